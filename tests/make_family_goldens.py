#!/usr/bin/env python3
"""make_family_goldens.py DIRECTORY [FAMILY...]: writes NAME.gguf and NAME.txt for families that have no public reference
model of this size: random weights, and the answers of a forward pass in float64 on the stored (16-bit) weights.

make_family_goldens.py --check DIRECTORY [FAMILY...]: makes them again in memory; the models must be equal bit for bit, the
answers but for the last digit (libraries differ in the order of a sum).

The answers are for tests/test_goldens.c. The formulas follow the papers and the published checkpoints' own definitions, read
for the tensor names and layouts of GGUF; nothing here is shared with the library, and whoever writes a family there does not
read this file. Every function takes the whole sequence, without a cache: [T] tokens, x [T, n_embd], q [T, heads, head_dim].
NAME.txt: a line each of "tokens", "greedy" (the continuation) and "margins" (best minus second logit of each of its steps),
then one line of logits per token."""
import os, struct, sys
import numpy as np

N_EMBD, N_VOCAB, N_PROMPT, N_GREEDY = 48, 64, 28, 16
# A test that rounds to float32 can only be held to choices that are not near ties.
GREEDY_MARGIN, ROUTER_MARGIN = 0.02, 2e-3


# ---- random numbers and files ----

def fnv(text):
    h = 0xcbf29ce484222325
    for b in text.encode():
        h = (h ^ b) * 0x100000001b3 & 0xffffffffffffffff
    return h


def random_words(seed, n):
    """splitmix64: [n] uint64, a function of the seed alone"""
    z = (np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9e3779b97f4a7c15)) + np.uint64(fnv(seed))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
    return z ^ (z >> np.uint64(31))


def random_normal(seed, shape):
    """about normal, variance 1, at most 3.5: four 16-bit fields of a word added, exact in float64"""
    z = random_words(seed, int(np.prod(shape)))
    fields = sum(((z >> np.uint64(16 * i)) & np.uint64(0xffff)).astype(np.float64) for i in range(4))
    return ((fields / 65535.0 - 2.0) * 3.0 ** 0.5).reshape(shape)


class Model:
    """What the file holds. tensors: name -> (array as stored, outermost dimension first); keys: name -> (type, value)"""

    def __init__(self, arch, name):
        self.arch, self.name, self.keys, self.tensors, self.router_margin = arch, name, {}, {}, np.inf

    def u32(self, **values): self.put('u32', values)
    def f32(self, **values): self.put('f32', values)
    def flag(self, **values): self.put('bool', values)
    def i32s(self, **values): self.put('i32s', values)
    def bools(self, **values): self.put('bools', values)

    def put(self, kind, values):
        """keys of the architecture; "__" in an argument's name stands for "." """
        for name, value in values.items():
            if kind == 'f32': value = float(np.float32(value))
            self.keys[self.arch + '.' + name.replace('__', '.')] = (kind, value)

    def get(self, name, default=None):
        return self.keys.get(self.arch + '.' + name, (None, default))[1]

    def weight(self, name, *shape, gain=1.0):
        """a matrix in 16 bits; its product with rows of variance 1 has variance gain^2"""
        value = random_normal(self.name + name, shape) * (gain / shape[-1] ** 0.5)
        self.tensors[name + '.weight'] = value.astype(np.float16)

    def vector(self, name, *shape, mean=0.0, spread=0.3):
        value = mean + spread * random_normal(self.name + name, shape)
        self.tensors[name] = value.astype(np.float32)

    def norm(self, name, n):
        self.vector(name + '.weight', n, mean=1.0)

    def has(self, name): return name in self.tensors
    def at(self, name): return self.tensors[name].astype(np.float64)


def write_gguf(m):
    """the bytes of a GGUF v3 file"""
    def text(s): return struct.pack('<Q', len(s.encode())) + s.encode()

    def value(kind, v):
        if kind == 'u32': return struct.pack('<II', 4, v)
        if kind == 'f32': return struct.pack('<If', 6, v)
        if kind == 'bool': return struct.pack('<I?', 7, v)
        if kind == 'text': return struct.pack('<I', 8) + text(v)
        of, pack = {'i32s': (5, '<i'), 'f32s': (6, '<f'), 'bools': (7, '<?'), 'texts': (8, None)}[kind]
        body = b''.join(text(e) if pack is None else struct.pack(pack, e) for e in v)
        return struct.pack('<IIQ', 9, of, len(v)) + body

    # SentencePiece without bytes: three control tokens, the space and as many characters as there is room for
    tokens = ['<unk>', '<s>', '</s>', '\u2581'] + [chr(c) for c in range(0x41, 0x41 + N_VOCAB - 4)]
    keys = {'general.architecture': ('text', m.arch), 'general.name': ('text', 'random ' + m.name), **m.keys,
            'tokenizer.ggml.model': ('text', 'llama'), 'tokenizer.ggml.tokens': ('texts', tokens),
            'tokenizer.ggml.scores': ('f32s', [-float(i) for i in range(N_VOCAB)]),
            'tokenizer.ggml.token_type': ('i32s', [2, 3, 3] + [1] * (N_VOCAB - 3)),
            'tokenizer.ggml.bos_token_id': ('u32', 1), 'tokenizer.ggml.eos_token_id': ('u32', 2)}
    out = b'GGUF' + struct.pack('<IQQ', 3, len(m.tensors), len(keys))
    for key, (kind, v) in keys.items():
        out += text(key) + value(kind, v)
    data = b''
    for name, t in m.tensors.items():
        out += text(name) + struct.pack('<I', t.ndim) + b''.join(struct.pack('<Q', n) for n in t.shape[::-1])
        out += struct.pack('<IQ', {'float32': 0, 'float16': 1}[t.dtype.name], len(data))
        data += t.tobytes() + b'\0' * (-t.nbytes % 32)
    return out + b'\0' * (-len(out) % 32) + data


# ---- parts of models ----

def sigmoid(x): return 1.0 / (1.0 + np.exp(-x))
def silu(x): return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x, eps): return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
def rms_norm(m, name, x): return rms(x, m.get('attention.layer_norm_rms_epsilon')) * m.at(name + '.weight')


def linear(m, name, x):
    y = x @ m.at(name + '.weight').T
    return y + m.at(name + '.bias') if m.has(name + '.bias') else y


def heads(x, n): return x.reshape(x.shape[0], n, -1)


def rope(x, n_rot, base, pairs, factors=1.0):
    """turn the first n_rot dimensions of each head of x [T, heads, head_dim]: "near" pairs are (2i, 2i+1), "far" ones
    (i, i + n_rot/2); row t has position t"""
    angle = np.arange(x.shape[0])[:, None] * base ** (-2.0 * np.arange(n_rot // 2) / n_rot) / factors
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = {'near': (slice(0, n_rot, 2), slice(1, n_rot, 2)),
                     'far': (slice(0, n_rot // 2), slice(n_rot // 2, n_rot))}[pairs]
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention(q, k, v, scale, window=0):
    """causal; each key head serves n_head / n_kv_head heads that follow one another; a window counts the token itself"""
    n, n_head, _ = q.shape
    age = np.arange(n)[:, None] - np.arange(n)[None, :]
    hidden = (age < 0) | (age >= (window or n))
    out = np.empty((n, n_head, v.shape[2]))
    for h in range(n_head):
        of = h * k.shape[1] // n_head
        score = np.where(hidden, -np.inf, q[:, h] @ k[:, of].T * scale)
        out[:, h] = softmax(score) @ v[:, of]
    return out.reshape(n, -1)


def self_attention(m, il, h, pairs, qk_norm=None):
    """the usual kind; qk_norm "full" normalises q and k over their whole width, before they are cut into heads"""
    b = 'blk.%d.attn_' % il
    q, k, v = linear(m, b + 'q', h), linear(m, b + 'k', h), linear(m, b + 'v', h)
    if qk_norm == 'full': q, k = rms_norm(m, b + 'q_norm', q), rms_norm(m, b + 'k_norm', k)
    n_kv = m.get('attention.head_count_kv')
    q, k, v = heads(q, m.get('attention.head_count')), heads(k, n_kv), heads(v, n_kv)
    n_rot, base = m.get('rope.dimension_count'), m.get('rope.freq_base')
    q, k = rope(q, n_rot, base, pairs), rope(k, n_rot, base, pairs)
    return linear(m, b + 'output', attention(q, k, v, q.shape[2] ** -0.5))


def gated_ffn(m, il, h, suffix=''):
    b = 'blk.%d.ffn_' % il
    return linear(m, b + 'down' + suffix, silu(linear(m, b + 'gate' + suffix, h)) * linear(m, b + 'up' + suffix, h))


def choose_experts(m, probs, score, normalised):
    """[T, n_expert] weights, zero where an expert is not among the expert_used_count of the highest score"""
    used = m.get('expert_used_count')
    ranks = np.sort(score, -1)[:, ::-1]
    m.router_margin = min(m.router_margin, (ranks[:, used - 1] - ranks[:, used]).min())
    w = np.where(score >= ranks[:, used - 1:used], probs, 0.0)
    return w / w.sum(-1, keepdims=True) if normalised else w


def experts(m, il, h, w):
    """sum over the experts, each a gated ffn, with weights w [T, n_expert]"""
    b = 'blk.%d.ffn_' % il
    gate, up, down = (m.at(b + part + '_exps.weight') for part in ('gate', 'up', 'down'))
    return sum(w[:, e:e + 1] * ((silu(h @ gate[e].T) * (h @ up[e].T)) @ down[e].T) for e in range(w.shape[1]))


def softmax_moe(m, il, h, normalised):
    score = linear(m, 'blk.%d.ffn_gate_inp' % il, h)
    return experts(m, il, h, choose_experts(m, softmax(score), score, normalised))


def shared_expert(m, il, h):
    """seen by every token, behind a gate of its own"""
    gate = sigmoid(h @ m.at('blk.%d.ffn_gate_inp_shexp.weight' % il))
    return gate[:, None] * gated_ffn(m, il, h, '_shexp')


def pre_norm_decoder(m, tokens, mix, ffn, ffn_norm='ffn_norm', final='output_norm'):
    """x += mix(norm(x)); x += ffn(norm(x)) for each layer"""
    x = m.at('token_embd.weight')[tokens]
    for il in range(m.get('block_count')):
        x = x + mix(m, il, rms_norm(m, 'blk.%d.attn_norm' % il, x))
        x = x + ffn(m, il, rms_norm(m, 'blk.%d.%s' % (il, ffn_norm), x))
    return logits(m, rms_norm(m, final, x))


def logits(m, x):
    """an absent output matrix is the embedding"""
    return x @ m.at('output.weight' if m.has('output.weight') else 'token_embd.weight').T


# ---- what files hold ----

def common_keys(m, layers, n_head, n_kv, head_dim, n_ff, base=10000.0, n_rot=None, eps=2e-3):
    m.u32(context_length=128, embedding_length=N_EMBD, block_count=layers, feed_forward_length=n_ff,
          attention__head_count=n_head, attention__head_count_kv=n_kv, attention__key_length=head_dim,
          attention__value_length=head_dim, rope__dimension_count=n_rot or head_dim, vocab_size=N_VOCAB)
    m.f32(attention__layer_norm_rms_epsilon=eps, rope__freq_base=base)


def put_embeddings(m, tied=False, final='output_norm'):
    # scaled for logits of a few units; tied, the rows of the matrix are what the first layer reads, too
    m.weight('token_embd', N_VOCAB, N_EMBD, gain=4.0 if tied else N_EMBD ** 0.5)
    m.norm(final, N_EMBD)
    if not tied: m.weight('output', N_VOCAB, N_EMBD, gain=4.0)


def put_attention(m, il, bias=False, n_kv=None, rows_per_q=1):
    b = 'blk.%d.attn_' % il
    n_head, head_dim = m.get('attention.head_count'), m.get('attention.key_length')
    n_kv = n_kv or m.get('attention.head_count_kv')
    # queries and keys of this size make attention choose: scores of a few units
    for part, rows, gain in (('q', rows_per_q * n_head * head_dim, 1.5), ('k', n_kv * head_dim, 1.5), ('v', n_kv * head_dim, 1.0)):
        m.weight(b + part, rows, N_EMBD, gain=gain)
        if bias: m.vector(b + part + '.bias', rows)
    m.weight(b + 'output', N_EMBD, n_head * head_dim, gain=1.5)


def put_ffn(m, il, n_ff, suffix=''):
    b = 'blk.%d.ffn_' % il
    m.weight(b + 'gate' + suffix, n_ff, N_EMBD, gain=1.5)
    m.weight(b + 'up' + suffix, n_ff, N_EMBD, gain=1.5)
    m.weight(b + 'down' + suffix, N_EMBD, n_ff, gain=1.5)


def put_experts(m, il, n_expert, n_ff, gain=2.0):
    b = 'blk.%d.ffn_' % il
    m.vector(b + 'gate_inp.weight', n_expert, N_EMBD, spread=2.5 / N_EMBD ** 0.5)
    for part, rows, columns in (('gate', n_ff, N_EMBD), ('up', n_ff, N_EMBD), ('down', N_EMBD, n_ff)):
        m.weight(b + part + '_exps', n_expert, rows, columns, gain=gain)


# ---- families ----

def make_mixtral():
    """arch llama with experts: rope on neighbours, the chosen experts' weights are made to add up to 1"""
    m = Model('llama', 'mixtral')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=16, n_ff=24, base=1e6)
    m.u32(expert_count=6, expert_used_count=2)
    put_embeddings(m)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        put_experts(m, il, 6, 24)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, 'near'), lambda m, il, h: softmax_moe(m, il, h, normalised=True))


def make_qwen2moe():
    """biases of q, k, v; softmax over all experts, not normalised; a gated shared expert of another width"""
    m = Model('qwen2moe', 'qwen2moe')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=12, n_ff=64, base=1e6, eps=3e-3)
    m.u32(expert_count=6, expert_used_count=3, expert_feed_forward_length=16, expert_shared_feed_forward_length=40)
    put_embeddings(m)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il, bias=True)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        put_experts(m, il, 6, 16)
        m.vector('blk.%d.ffn_gate_inp_shexp.weight' % il, N_EMBD, spread=2.0 / N_EMBD ** 0.5)
        put_ffn(m, il, 40, '_shexp')
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, 'far'),
        lambda m, il, h: softmax_moe(m, il, h, normalised=False) + shared_expert(m, il, h))


def make_olmoe():
    """q and k are normalised over all heads together; softmax over all experts, not normalised"""
    m = Model('olmoe', 'olmoe')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=12, n_ff=16)
    m.u32(expert_count=8, expert_used_count=3)
    put_embeddings(m)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        m.norm('blk.%d.attn_q_norm' % il, 48)
        m.norm('blk.%d.attn_k_norm' % il, 24)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        put_experts(m, il, 8, 16)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, 'far', qk_norm='full'),
        lambda m, il, h: softmax_moe(m, il, h, normalised=False))


FAMILIES = [make_mixtral, make_qwen2moe, make_olmoe]


# ---- answers ----

def answers(m, forward):
    """prompt, its logits, the greedy continuation and its margins; the first prompt of which no step is a near tie"""
    for attempt in range(200):
        words = random_words('%s prompt %d' % (m.name, attempt), N_PROMPT)
        tokens, greedy, margins = [int(w % np.uint64(N_VOCAB - 3)) + 3 for w in words], [], []
        m.router_margin = np.inf
        table = forward(m, np.array(tokens))
        row = table[-1]
        while len(greedy) < N_GREEDY:
            best = np.sort(row)
            greedy.append(int(row.argmax()))
            margins.append(best[-1] - best[-2])
            if min(margins) < GREEDY_MARGIN: break
            row = forward(m, np.array(tokens + greedy))[-1]
        if min(margins) >= GREEDY_MARGIN and m.router_margin >= ROUTER_MARGIN: return tokens, table, greedy, margins
    sys.exit(m.name + ': every prompt has a near tie')


def numbers(form, values): return ' '.join(form % v for v in values)


def make(family):
    """name, bytes of the model, text of the answers"""
    m, forward = family()
    tokens, table, greedy, margins = answers(m, forward)
    lines = ['tokens ' + numbers('%d', tokens), 'greedy ' + numbers('%d', greedy), 'margins ' + numbers('%.3f', margins)]
    lines += [numbers('%.6f', row) for row in table]
    return m.name, write_gguf(m), '\n'.join(lines) + '\n'


def same_answers(a, b):
    """equal words, but for the last digits of reals"""
    a, b = a.split(), b.split()
    return len(a) == len(b) and all(x == y or ('.' in x and '.' in y and abs(float(x) - float(y)) < 5e-6) for x, y in zip(a, b))


def main(arguments):
    check = arguments[:1] == ['--check']
    directory, wanted = arguments[check], arguments[check + 1:]
    bad = 0
    for family in FAMILIES:
        name = family.__name__[5:].replace('_', '-')
        if wanted and name not in wanted: continue
        name, model, text = make(family)
        path = os.path.join(directory, name)
        if check:
            same = open(path + '.gguf', 'rb').read() == model and same_answers(open(path + '.txt').read(), text)
            print('%s: %s' % (name, 'the same' if same else 'differs'))
            bad += not same
        else:
            with open(path + '.gguf', 'wb') as f: f.write(model)
            with open(path + '.txt', 'w') as f: f.write(text)
            print('%s: %d bytes' % (name, len(model)))
    return bad != 0


if __name__ == '__main__':
    np.seterr(over='ignore')
    sys.exit(main(sys.argv[1:]))
