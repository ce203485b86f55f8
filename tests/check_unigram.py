#!/usr/bin/env python3
"""check_unigram.py DIR CLI TEXT...: trains small Unigram models on the texts with SentencePiece, writes their vocabularies as
GGUF into DIR and compares the ids that the command and SentencePiece give for some 500 texts. The variants are those in which
llama.cpp and SentencePiece agree: llama.cpp, our reference, adds no space before text of spaces alone, adds one where spaces are
merged, and has no byte tokens here."""
import json, os, random, struct, subprocess, sys
import sentencepiece as spm

VARIANTS = {
    't5': dict(control_symbols='<ctl>'),
    'identity': dict(normalization_rule_name='identity', remove_extra_whitespaces=False, add_dummy_prefix=False),
    'nfkc_cf': dict(normalization_rule_name='nfkc_cf', remove_extra_whitespaces=False, add_dummy_prefix=False, split_by_whitespace=False),
}
PARTS = ['the ', 'and', ' ', '  ', '\n', '\t', 'Übung', '\u00a0', '\u3000', '㌖', '㍿', 'ﷺ', 'ﬁne', '½', 'Å', 'e\u0301', '①', 'ＡＢＣ', '日本語', 'が',
         '한국어', '😀', '👩‍👩‍👧', '\u200b', '\ufeff', '\u2581', '…', '--', 'x' * 40, 'aaaa', '\x01', '<sep>', '==', 'abcd', '0123456789', '\ufffd', 'ⅣⅨ',
         'Ω', 'ß', 'İ', '\u1e9b\u0323', 'don\'t', '"quoted"', '(a+b)=c;', 'إلى', 'Привет', 'ελλ']


def fields(data):
    """The (number, value) pairs of a protobuf message; bytes for strings and messages."""
    at, out = 0, []

    def varint():
        nonlocal at
        v = shift = 0
        while True:
            b = data[at]
            at += 1
            v |= (b & 127) << shift
            shift += 7
            if b < 128: return v
    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0: value = varint()
        else:
            n = {1: 8, 5: 4}.get(kind) or varint()
            value = data[at:at + n]
            at += n
        out.append((key >> 3, value))
    return out


def write_gguf(path, model):
    """model: SentencePiece's file: pieces (1), of which 1 text, 2 score, 3 type; normalizer (3), 2 charsmap, 3, 4 flags."""
    message = fields(model)
    pieces = [dict(fields(v)) for k, v in message if k == 1]
    normalizer = dict(next(fields(v) for k, v in message if k == 3))
    text = lambda b: struct.pack('<Q', len(b)) + b
    array = lambda kind, items: struct.pack('<IIQ', 9, kind, len(items)) + b''.join(items)
    u32, flag = lambda v: struct.pack('<II', 4, v), lambda v: struct.pack('<IB', 7, v)
    types = [p.get(3, 1) for p in pieces]
    kv = {'general.architecture': struct.pack('<I', 8) + text(b't5'),
          'tokenizer.ggml.model': struct.pack('<I', 8) + text(b't5'),
          'tokenizer.ggml.tokens': array(8, [text(p[1]) for p in pieces]),
          'tokenizer.ggml.scores': array(6, [p.get(2, bytes(4)) for p in pieces]),
          'tokenizer.ggml.token_type': array(5, [struct.pack('<i', t) for t in types]),
          'tokenizer.ggml.unknown_token_id': u32(types.index(2)), 'tokenizer.ggml.eos_token_id': u32(2),
          'tokenizer.ggml.add_eos_token': flag(0), 'tokenizer.ggml.add_space_prefix': flag(normalizer.get(3, 1)),
          'tokenizer.ggml.remove_extra_whitespaces': flag(normalizer.get(4, 1))}
    charsmap = normalizer.get(2, b'')
    if charsmap: kv['tokenizer.ggml.precompiled_charsmap'] = struct.pack('<IIQ', 9, 0, len(charsmap)) + charsmap
    with open(path, 'wb') as f:
        f.write(b'GGUF' + struct.pack('<IQQ', 3, 0, len(kv)))
        for k, v in kv.items(): f.write(text(k.encode()) + v)
    return pieces


def texts(corpus):
    rng = random.Random(5)
    yield ''
    for part in PARTS: yield part
    for _ in range(300): yield ''.join(rng.choice(PARTS) for _ in range(rng.randrange(1, 30)))
    for _ in range(150):
        at = rng.randrange(len(corpus) - 900)
        yield corpus[at:at + rng.randrange(1, 800)]
    for part in ('a', ' ', 'ab ', '㌖', 'ﷺ', 'ＡＢＣ', 'x\u00a0'): yield part * 3000


def same(want, got, pieces):
    """Equal, or as good: SentencePiece adds scores up as float32, so that equal sums may differ there."""
    if want == got: return True
    total = lambda ids: sum(struct.unpack('<f', pieces[i].get(2, bytes(4)))[0] for i in ids)
    text = lambda ids: b''.join(pieces[i][1] for i in ids)
    return len(want) == len(got) and text(want) == text(got) and abs(total(want) - total(got)) < 1e-3


def main():
    out, cli, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    corpus = ''.join(open(f, encoding='utf-8', errors='ignore').read() for f in files)
    lines = [line for line in corpus.split('\n') if line.strip()]
    failed = 0
    for name, options in VARIANTS.items():
        prefix = os.path.join(out, name)
        spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=prefix, vocab_size=600, model_type='unigram',
                                       character_coverage=0.9999, hard_vocab_limit=False, minloglevel=2, num_threads=1, **options)
        pieces = write_gguf(prefix + '.gguf', open(prefix + '.model', 'rb').read())
        sp = spm.SentencePieceProcessor(model_file=prefix + '.model')
        strings = list(texts(corpus))
        command = [cli, 'tokenize', '--gguf', prefix + '.gguf', '--hex', '--bos', '0', '--special', '0']
        lines_of = lambda more, text: subprocess.run(command + more, input=text, text=True, capture_output=True, check=True).stdout.split('\n')[:-1]
        got = [json.loads(line) for line in lines_of([], ''.join(t.encode().hex() + '\n' for t in strings))]
        bad = [t for t, ids in zip(strings, got) if not same(sp.encode(t), ids, pieces)] if len(got) == len(strings) else strings
        known = [ids for ids in got if sp.unk_id() not in ids]  # what it is shown as is everyone's own choice
        back = lines_of(['--decode'], ''.join('%s\n' % ids for ids in known))
        wrong = [ids for ids, text in zip(known, back) if bytes.fromhex(text).decode() != sp.decode(ids)] if len(back) == len(known) else known
        print('%s: ids of %d and text of %d are as SentencePiece has them' % (name, len(strings) - len(bad), len(known) - len(wrong)),
              *(repr(t[:60]) for t in bad[:5]), *(str(ids[:20]) for ids in wrong[:5]))
        failed += bool(bad or wrong or len(known) < 30)
    sys.exit(failed > 0)


main()
