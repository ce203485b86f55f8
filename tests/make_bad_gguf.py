# make_bad_gguf.py: a corpus of malformed and valid-but-odd GGUF files, and the policy: what must happen to each.
#
#   python3 make_bad_gguf.py OUT [--dim 64|256]    write the files and OUT/manifest.tsv
#   python3 make_bad_gguf.py OUT --check           ... and compare the manifest with the strict reader and planner below
#   python3 make_bad_gguf.py --verdict FILE...     what that reader and planner say
#
# Python's standard library only, deterministic. It shares nothing with rocmforge.h: it knows the format from the
# specification. Careful: OUT/special holds a FIFO and a link to /dev/zero.
#
# A line of manifest.tsv, fields between tabs, "-" for none:
#
#   file
#   verdict  must_accept   a conforming reader takes it as far as `stage`
#            must_reject   a reader returns an error at `stage` or earlier
#            either        accept or reject, but no crash, hang, out-of-bounds access or unbounded allocation
#   stage    open          header, metadata and tensor table (no tensor data)
#            plan          hyper-parameters, tokenizer and tensor shapes
#            load          tensor data is read, a token is generated
#   then     for must_accept with stage open: what planning must do afterwards ("reject" or "either")
#   at       byte offset of the bytes that are wrong; a reader may notice the fault at another place (a wrong length
#            shifts what follows)
#   header   bytes of metadata as the file declares them, to which memory is bounded
#   what     the field at `at`: kv[KEY].FIELD, tensor[NAME].FIELD, header.FIELD; or the key or tensor that is missing
#   why
#
# A reject at `stage` may come earlier, never later, and never as a crash.

import argparse
import copy
import math
import os
import random
import struct
import sys

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
VT_NAMES = ['u8', 'i8', 'u16', 'i16', 'u32', 'i32', 'f32', 'bool', 'str',
            'arr', 'u64', 'i64', 'f64']
VT_FMT = {U8: 'B', I8: 'b', U16: 'H', I16: 'h', U32: 'I', I32: 'i', F32: 'f',
          BOOL: 'B', U64: 'Q', I64: 'q', F64: 'd'}
VT_SIZE = {t: struct.calcsize('<' + f) for t, f in VT_FMT.items()}

# tensor type: (id, elements per block, bytes per block)
TT = {
    'F32': (0, 1, 4), 'F16': (1, 1, 2), 'Q4_0': (2, 32, 18),
    'Q4_1': (3, 32, 20), 'Q5_0': (6, 32, 22), 'Q5_1': (7, 32, 24),
    'Q8_0': (8, 32, 34), 'Q8_1': (9, 32, 36), 'Q2_K': (10, 256, 84),
    'Q3_K': (11, 256, 110), 'Q4_K': (12, 256, 144), 'Q5_K': (13, 256, 176),
    'Q6_K': (14, 256, 210), 'Q8_K': (15, 256, 292), 'IQ2_XXS': (16, 256, 66),
    'IQ2_XS': (17, 256, 74), 'IQ3_XXS': (18, 256, 98), 'IQ1_S': (19, 256, 50),
    'IQ4_NL': (20, 32, 18), 'IQ3_S': (21, 256, 110), 'IQ2_S': (22, 256, 82),
    'IQ4_XS': (23, 256, 136), 'I8': (24, 1, 1), 'I16': (25, 1, 2),
    'I32': (26, 1, 4), 'I64': (27, 1, 8), 'F64': (28, 1, 8),
    'IQ1_M': (29, 256, 56), 'BF16': (30, 1, 2), 'TQ1_0': (34, 256, 54),
    'TQ2_0': (35, 256, 66), 'MXFP4': (39, 32, 17),
}
TT_BY_ID = {v[0]: (k, v[1], v[2]) for k, v in TT.items()}

M64 = (1 << 64) - 1
DEFAULT_ALIGN = 32


def align_up(n, a):
    return (n + a - 1) // a * a


def nbytes_of(tname, dims):
    _, blk, size = TT[tname]
    n = 1
    for d in dims:
        n *= d
    return n // blk * size


# --------------------------------------------------------------------------
# a writable model
# --------------------------------------------------------------------------

class KV:
    """One metadata pair.  raw replaces the encoded value (after the type);
    klen, alen and slen override the declared lengths; vt may be anything."""
    __slots__ = ('key', 'vt', 'val', 'et', 'raw', 'klen', 'alen', 'slen', 'elens')

    def __init__(self, key, vt, val, et=None):
        self.key = key.encode() if isinstance(key, str) else key
        self.vt, self.val, self.et = vt, val, et
        self.raw = self.klen = self.alen = self.slen = None
        self.elens = {}     # index of an array string -> declared length


class Tensor:
    __slots__ = ('name', 'dims', 'type', 'data', 'off', 'ndims', 'namelen',
                 'gap', 'align')

    def __init__(self, name, dims, type_, data):
        self.name = name.encode() if isinstance(name, str) else name
        self.dims = list(dims)
        self.type = TT[type_][0] if isinstance(type_, str) else type_
        self.data = data
        self.off = self.ndims = self.namelen = None
        self.gap = 0        # unused bytes after the data
        self.align = None   # place with this alignment instead


class Model:
    def __init__(self):
        self.magic, self.version = b'GGUF', 3
        self.n_kv = self.n_tensors = None       # None: the true count
        self.kvs, self.tensors = [], []
        self.align = DEFAULT_ALIGN              # the layout actually used
        self.order = None                       # order of the tensor data
        self.lead_gap = 0
        self.tail = b''                         # bytes after the last tensor
        self.pad_last = True
        self.pad_byte = b'\0'
        self.endian, self.v1 = '<', False
        self.extra_header = b''                 # between KVs and tensor infos

    # -- editing ----------------------------------------------------------
    def clone(self):
        m = copy.copy(self)
        m.kvs = [copy.copy(k) for k in self.kvs]
        for k in m.kvs:
            k.elens = dict(k.elens)
            if isinstance(k.val, list):
                k.val = list(k.val)
        m.tensors = [copy.copy(t) for t in self.tensors]
        for t in m.tensors:
            t.dims = list(t.dims)
        m.order = list(self.order) if self.order is not None else None
        return m

    def kv(self, key):
        key = key.encode() if isinstance(key, str) else key
        for k in self.kvs:
            if k.key == key:
                return k
        raise KeyError(key)

    def add(self, key, vt, val, et=None):
        k = KV(key, vt, val, et)
        self.kvs.append(k)
        return k

    def put(self, key, vt, val, et=None):
        try:
            k = self.kv(key)
        except KeyError:
            return self.add(key, vt, val, et)
        k.vt, k.val, k.et = vt, val, et
        return k

    def drop(self, key):
        self.kvs.remove(self.kv(key))

    def t(self, name):
        name = name.encode() if isinstance(name, str) else name
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(name)

    def drop_t(self, name):
        self.tensors.remove(self.t(name))

    def add_t(self, name, dims, type_, data=None):
        if data is None:
            data = bytes(nbytes_of(type_, dims))
        t = Tensor(name, dims, type_, data)
        self.tensors.append(t)
        return t

    # -- writing ----------------------------------------------------------
    def build(self):
        """-> (bytes, field map: label -> (offset, length))"""
        e = self.endian
        out, fmap = bytearray(), {}
        lenfmt = 'I' if self.v1 else 'Q'

        def emit(label, b):
            fmap[label] = (len(out), len(b))
            out.extend(b)

        def num(label, fmt, v):
            if isinstance(v, bytes):
                emit(label, v)
            else:
                emit(label, struct.pack(e + fmt, v))

        def string(label, s, declared=None):
            num(label + '.len', lenfmt, len(s) if declared is None else declared)
            emit(label, s)

        def long_array(label, k):
            if k.et == STR:
                texts = [as_bytes(v) for v in k.val]
                emit(label + '.elems', b''.join(struct.pack(e + lenfmt, len(t)) + t for t in texts))
            else:
                emit(label + '.elems', struct.pack(f'{e}{len(k.val)}{VT_FMT[k.et]}', *k.val))

        def value(label, k):
            if k.raw is not None:
                emit(label + '.value', k.raw)
            elif k.vt == STR:
                string(label + '.value', as_bytes(k.val), k.slen)
            elif k.vt == ARR:
                num(label + '.etype', 'I', k.et)
                num(label + '.alen', lenfmt,
                    len(k.val) if k.alen is None else k.alen)
                if len(k.val) > 1000 and not k.elens:   # no labels for so many
                    long_array(label, k)
                    return
                for i, v in enumerate(k.val):
                    if k.et == STR:
                        string(f'{label}.elem[{i}]', as_bytes(v), k.elens.get(i))
                    elif isinstance(v, bytes):
                        emit(f'{label}.elem[{i}]', v)
                    else:
                        num(f'{label}.elem[{i}]', VT_FMT[k.et], v)
            elif isinstance(k.val, bytes):
                emit(label + '.value', k.val)
            else:
                num(label + '.value', VT_FMT[k.vt], k.val)

        emit('header.magic', self.magic)
        num('header.version', 'I', self.version)
        num('header.n_tensors', lenfmt,
            len(self.tensors) if self.n_tensors is None else self.n_tensors)
        num('header.n_kv', lenfmt,
            len(self.kvs) if self.n_kv is None else self.n_kv)
        for k in self.kvs:
            label = f'kv[{k.key.decode("latin1")[:80]}]'
            string(label + '.key', k.key, k.klen)
            num(label + '.type', 'I', k.vt)
            value(label, k)
        if self.extra_header:
            emit('extra_header', self.extra_header)

        # lay the data out, then write the table that points at it
        order = range(len(self.tensors)) if self.order is None else self.order
        at, cur = {}, self.lead_gap
        for i in order:
            t = self.tensors[i]
            cur = align_up(cur, t.align or self.align)
            at[i] = cur
            cur += len(t.data) + t.gap
        end = cur
        for i, t in enumerate(self.tensors):
            label = f'tensor[{t.name.decode("latin1")[:80]}]'
            string(label + '.name', t.name, t.namelen)
            num(label + '.n_dims', 'I', len(t.dims) if t.ndims is None else t.ndims)
            for j, d in enumerate(t.dims):
                num(f'{label}.dim[{j}]', 'I' if self.v1 else 'Q', d & M64)
            num(label + '.type', 'I', t.type & 0xFFFFFFFF)
            num(label + '.offset', 'Q', (at[i] if t.off is None else t.off) & M64)
        if self.tensors:
            pad = align_up(len(out), self.align) - len(out)
            emit('header.pad', self.pad_byte * pad)
        start = len(out)
        fmap['data'] = (start, 0)
        body = bytearray(self.pad_byte * end)
        for i, t in enumerate(self.tensors):
            body[at[i]:at[i] + len(t.data)] = t.data
            fmap[f'data[{t.name.decode("latin1")[:80]}]'] = (start + at[i], len(t.data))
        out.extend(body)
        if self.pad_last:
            out.extend(self.pad_byte * (align_up(len(body), self.align) - len(body)))
        if self.tail:
            emit('tail', self.tail)
        return bytes(out), fmap


def as_bytes(s):
    return s.encode() if isinstance(s, str) else s


# --------------------------------------------------------------------------
# random finite tensor data
# --------------------------------------------------------------------------

def f16(x):
    return struct.pack('<e', x)


def data_for(rng, tname, dims, scale=0.08, one=False):
    n = 1
    for d in dims:
        n *= d
    if tname in ('F32', 'F16'):
        fmt = '<f' if tname == 'F32' else '<e'
        table = [struct.pack(fmt, 1.0 + 0.05 * (i / 127.5 - 1) if one else 1.7 * scale * (i / 127.5 - 1))
                 for i in range(256)]
        return b''.join(map(table.__getitem__, rng.randbytes(n)))
    if tname == 'Q8_0':
        scales = [f16(scale * (0.7 + 0.6 * i / 255) / 75.0) for i in range(256)]
        return b''.join(scales[i] + rng.randbytes(32) for i in rng.randbytes(n // 32))
    if tname == 'Q4_K':
        # x = d * sc * q - dmin * m with sc, m < 64 and q < 16
        scales = [f16(scale * (0.7 + 0.6 * i / 255) / 220.0) + f16(scale * (1.3 - 0.6 * i / 255) / 28.0)
                  for i in range(256)]
        return b''.join(scales[i] + rng.randbytes(12 + 128) for i in rng.randbytes(n // 256))
    raise ValueError(tname)


# --------------------------------------------------------------------------
# base models
# --------------------------------------------------------------------------

def spm_vocab(n_bytes=8):
    """64 tokens: 3 special, 8 byte tokens, the space mark, a-z, space+a-z."""
    sp = '\u2581'
    toks, types = ['<unk>', '<s>', '</s>'], [2, 3, 3]
    some = [0x00, 0x09, 0x0A, 0x0D, 0x20, 0x21, 0x2E, 0x3F]
    for b in (range(256) if n_bytes == 256 else some):
        toks.append(f'<0x{b:02X}>')
        types.append(6)
    letters = [chr(c) for c in range(ord('a'), ord('z') + 1)]
    for s in [sp] + letters + [sp + c for c in letters]:
        toks.append(s)
        types.append(1)
    scores = [0.0 if t != 1 else -float(i) for i, t in enumerate(types)]
    return toks, scores, types


def base_model(dim=64, seed=1, n_layer=2, n_head=4, n_kv=2, n_ff=256,
               big_quant=False, vocab=None, tied=False, embd_type='F16'):
    rng = random.Random(seed)
    hd = dim // n_head
    toks, scores, types = vocab or spm_vocab()
    nv = len(toks)
    m = Model()
    m.add('general.architecture', STR, 'llama')
    m.add('general.type', STR, 'model')
    m.add('general.name', STR, 'rocmforge test model')
    m.add('general.quantization_version', U32, 2)
    m.add('general.file_type', U32, 7)
    m.add('llama.vocab_size', U32, nv)
    m.add('llama.context_length', U32, 512)
    m.add('llama.embedding_length', U32, dim)
    m.add('llama.block_count', U32, n_layer)
    m.add('llama.feed_forward_length', U32, n_ff)
    m.add('llama.attention.head_count', U32, n_head)
    m.add('llama.attention.head_count_kv', U32, n_kv)
    m.add('llama.attention.layer_norm_rms_epsilon', F32, 1e-5)
    m.add('llama.rope.dimension_count', U32, hd)
    m.add('llama.rope.freq_base', F32, 10000.0)
    m.add('tokenizer.ggml.model', STR, 'llama')
    m.add('tokenizer.ggml.pre', STR, 'default')
    m.add('tokenizer.ggml.tokens', ARR, list(toks), STR)
    m.add('tokenizer.ggml.scores', ARR, list(scores), F32)
    m.add('tokenizer.ggml.token_type', ARR, list(types), I32)
    m.add('tokenizer.ggml.bos_token_id', U32, 1)
    m.add('tokenizer.ggml.eos_token_id', U32, 2)
    m.add('tokenizer.ggml.unknown_token_id', U32, 0)
    m.add('tokenizer.ggml.add_bos_token', BOOL, 1)
    m.add('tokenizer.ggml.add_eos_token', BOOL, 0)
    m.add('tokenizer.ggml.add_space_prefix', BOOL, 1)

    def q(t, dims):         # a K-quant only where the row allows it
        return t if dims[0] % TT[t][1] == 0 else 'Q8_0'

    def w(name, t, dims, **kw):
        m.tensors.append(Tensor(name, dims, t, data_for(rng, t, dims, **kw)))

    w('token_embd.weight', embd_type, [dim, nv], scale=0.5)
    for i in range(n_layer):
        b = f'blk.{i}.'
        kvd = hd * n_kv
        qk = 'Q4_K' if big_quant else 'Q8_0'
        w(b + 'attn_norm.weight', 'F32', [dim], one=True)
        w(b + 'attn_q.weight', q(qk, [dim]), [dim, dim])
        w(b + 'attn_k.weight', 'F16' if not big_quant else q(qk, [dim]), [dim, kvd])
        w(b + 'attn_v.weight', 'F32' if not big_quant else q(qk, [dim]), [dim, kvd])
        w(b + 'attn_output.weight', q(qk, [dim]), [dim, dim])
        w(b + 'ffn_norm.weight', 'F32', [dim], one=True)
        w(b + 'ffn_gate.weight', q(qk, [dim]), [dim, n_ff])
        w(b + 'ffn_up.weight', q(qk, [dim]), [dim, n_ff])
        w(b + 'ffn_down.weight', q('Q4_K', [n_ff]), [n_ff, dim])
    w('output_norm.weight', 'F32', [dim], one=True)
    if not tied:
        w('output.weight', 'Q8_0', [dim, nv])
    return m


def bpe_model(base):
    """The base model with a GPT-2 style tokenizer of 64 tokens."""
    m = base.clone()
    toks = ['<|endoftext|>', '<|bos|>', '\u0120', '\u010a']
    toks += [chr(c) for c in range(ord('a'), ord('z') + 1)]
    toks += list('0123456789.,!?')
    merges = []
    for a, b in ['\u0120a', '\u0120b', '\u0120t', 'ab', 'th', 'he', 'in', 'er',
                 'an', 're', 'on', 'at', 'en', 'nd']:
        merges.append(f'{a} {b}')
        toks.append(a + b)
    merges += ['th e', '\u0120t he']
    toks += ['the', '\u0120the']
    while len(toks) < 64:
        toks.append(f'<|unused{len(toks)}|>')
    assert len(toks) == 64 and len(set(toks)) == 64
    m.put('tokenizer.ggml.model', STR, 'gpt2')
    m.put('tokenizer.ggml.pre', STR, 'gpt-2')
    m.put('tokenizer.ggml.tokens', ARR, toks, STR)
    m.put('tokenizer.ggml.token_type', ARR,
          [3, 3] + [1] * 58 + [3 if t.startswith('<|unused') else 1
                               for t in toks[60:]], I32)
    m.drop('tokenizer.ggml.scores')
    m.put('tokenizer.ggml.merges', ARR, merges, STR)
    m.put('tokenizer.ggml.bos_token_id', U32, 1)
    m.put('tokenizer.ggml.eos_token_id', U32, 0)
    m.drop('tokenizer.ggml.unknown_token_id')
    m.put('tokenizer.ggml.add_bos_token', BOOL, 0)
    m.drop('tokenizer.ggml.add_space_prefix')
    return m


# --------------------------------------------------------------------------
# the strict reader (open stage) and planner: an executable statement of the
# policy behind the manifest
# --------------------------------------------------------------------------

class Bad(Exception):
    pass


class Reader:
    """Reads a file the way the open stage should; raises Bad."""
    MAX_KEY, MAX_NAME, MAX_DIMS, MAX_NEST = 65535, 64, 4, 8

    def __init__(self, b):
        self.b, self.p, self.size = b, 0, len(b)
        self.kv, self.tensors = {}, {}
        self.open()

    def bad(self, msg, at=None):
        raise Bad(f'{msg} (byte {self.p if at is None else at})')

    def take(self, n, what):
        if n > self.size - self.p:
            self.bad(f'{what}: needs {n} bytes, {self.size - self.p} left')
        s = self.b[self.p:self.p + n]
        self.p += n
        return s

    def num(self, fmt, what):
        return struct.unpack('<' + fmt, self.take(struct.calcsize('<' + fmt), what))[0]

    def string(self, what, limit=None):
        at = self.p
        n = self.num('Q', what + ' length')
        if limit is not None and n > limit:
            self.bad(f'{what}: length {n} is over {limit}', at)
        if n > self.size - self.p:
            self.bad(f'{what}: length {n} runs past the end of the file', at)
        return bytes(self.take(n, what))

    def value(self, vt, what, depth=0):
        if vt == STR:
            return self.string(what)
        if vt == BOOL:
            v = self.num('B', what)
            if v > 1:
                self.bad(f'{what}: bool is {v}', self.p - 1)
            return bool(v)
        if vt in VT_FMT:
            return self.num(VT_FMT[vt], what)
        if vt == ARR:
            if depth >= self.MAX_NEST:
                self.bad(f'{what}: arrays nested too deep')
            at = self.p
            et = self.num('I', what + ' element type')
            if et > F64:
                self.bad(f'{what}: element type {et}', at)
            at = self.p
            n = self.num('Q', what + ' count')
            least = {STR: 8, ARR: 12}.get(et) or VT_SIZE[et]
            if n > (self.size - self.p) // least:
                self.bad(f'{what}: {n} elements do not fit in the file', at)
            if et in (STR, ARR, BOOL):
                return et, [self.value(et, what, depth + 1) for _ in range(n)]
            raw = self.take(n * least, what)
            return et, list(struct.unpack(f'<{n}{VT_FMT[et]}', raw))
        self.bad(f'{what}: value type {vt}', self.p - 4)

    def open(self):
        if self.size < 24:
            self.bad('too short for a header', self.size)
        if self.take(4, 'magic') != b'GGUF':
            self.bad('not a GGUF file', 0)
        v = self.num('I', 'version')
        if v not in (2, 3):
            self.bad(f'version {v}' + (' (big-endian file?)' if v & 0xFFFF == 0 and v else ''), 4)
        n_tensors = self.num('Q', 'tensor count')
        n_kv = self.num('Q', 'key count')
        if n_kv > (self.size - self.p) // 14:
            self.bad(f'{n_kv} keys do not fit in the file', 16)
        if n_tensors > (self.size - self.p) // 25:
            self.bad(f'{n_tensors} tensors do not fit in the file', 8)
        for i in range(n_kv):
            at = self.p
            key = self.string(f'key {i}', self.MAX_KEY)
            if not key:
                self.bad(f'key {i} is empty', at)
            if b'\0' in key:
                self.bad(f'key {i} has a NUL in it', at)
            if key in self.kv:
                self.bad(f'key {key!r} is there twice', at)
            vt = self.num('I', f'type of {key!r}')
            self.kv[key] = (vt, self.value(vt, repr(key)), at)
        align = DEFAULT_ALIGN
        if b'general.alignment' in self.kv:
            vt, v, at = self.kv[b'general.alignment']
            if vt != U32:
                self.bad('general.alignment is not a u32', at)
            if v == 0 or v & (v - 1):
                self.bad(f'general.alignment is {v}', at)
            align = v
        rows = []
        for i in range(n_tensors):
            at = self.p
            name = self.string(f'name of tensor {i}', self.MAX_NAME)
            if not name or b'\0' in name:
                self.bad(f'tensor {i} has no usable name', at)
            if name in self.tensors:
                self.bad(f'tensor {name!r} is there twice', at)
            nd = self.num('I', f'{name!r} n_dims')
            if nd > self.MAX_DIMS:
                self.bad(f'{name!r} has {nd} dimensions', self.p - 4)
            dims, ne = [], 1
            for j in range(nd):
                d = self.num('Q', f'{name!r} dimension')
                if d >= 1 << 63:
                    self.bad(f'{name!r} dimension {j} is {d}', self.p - 8)
                dims.append(d)
            # every partial product, so that a zero cannot hide an overflow
            part = 1
            for d in dims:
                ne *= d
                part *= max(d, 1)
                if part >= 1 << 63:
                    self.bad(f'{name!r} has too many elements', at)
            tt = self.num('I', f'{name!r} type')
            if tt not in TT_BY_ID:
                self.bad(f'{name!r} has tensor type {tt}', self.p - 4)
            _, blk, bs = TT_BY_ID[tt]
            if (dims[0] if dims else 1) % blk:
                self.bad(f'{name!r}: row of {dims[0] if dims else 1} is not whole blocks of {blk}', at)
            nb = ne // blk * bs
            if nb >= 1 << 63:
                self.bad(f'{name!r} is too big', at)
            oat = self.p
            off = self.num('Q', f'{name!r} offset')
            if off % align:
                self.bad(f'{name!r} offset {off} is not aligned to {align}', oat)
            self.tensors[name] = (dims, tt, off, nb)
            rows.append((off, nb, name, oat))
        if not rows:
            return
        start = align_up(self.p, align)
        for off, nb, name, oat in rows:
            if start > self.size or off > self.size - start or nb > self.size - start - off:
                self.bad(f'{name!r}: data at {start}+{off}, {nb} bytes, ends past the file', oat)
        rows.sort()
        for (o1, n1, a, _), (o2, n2, b, oat) in zip(rows, rows[1:]):
            if n1 and n2 and o1 + n1 > o2:
                self.bad(f'{a!r} and {b!r} overlap', oat)


FLOATS = ('F32', 'F16', 'BF16')


def plan(r):
    """Checks a parsed llama model the way the plan stage should."""
    def fail(msg):
        raise Bad(msg)

    def get(key, types, need=True, default=None):
        k = key.encode()
        if k not in r.kv:
            if need:
                fail(f'{key} is missing')
            return default
        vt, v, at = r.kv[k]
        if vt not in types:
            fail(f'{key} has type {VT_NAMES[vt]} (byte {at})')
        return v

    def uint(key, lo, hi, need=True, default=None):
        v = get(key, (U8, U16, U32, U64), need, default)
        if v is not None and not lo <= v <= hi:
            fail(f'{key} is {v}')
        return v

    def real(key, need=True, default=None, lo=0.0):
        v = get(key, (F32,), need, default)
        if v is not None and not (math.isfinite(v) and v > lo):
            fail(f'{key} is {v}')
        return v

    if get('general.architecture', (STR,)) != b'llama':
        fail('architecture is not supported')
    if uint('split.count', 0, 65535, False, 0) > 1:
        fail('one part of a split model')
    uint('llama.context_length', 1, (1 << 31) - 1)
    n_embd = uint('llama.embedding_length', 1, 1 << 20)
    n_layer = uint('llama.block_count', 1, 1024)
    n_ff = uint('llama.feed_forward_length', 1, 1 << 24)
    n_head = uint('llama.attention.head_count', 1, 1 << 14)
    n_kv = uint('llama.attention.head_count_kv', 1, 1 << 14, False, n_head)
    if n_kv > n_head or n_head % n_kv:
        fail(f'{n_head} heads on {n_kv} key heads')
    if b'llama.attention.key_length' not in r.kv and n_embd % n_head:
        fail(f'{n_embd} dimensions on {n_head} heads')
    hd = uint('llama.attention.key_length', 1, 1 << 14, False, n_embd // n_head)
    hv = uint('llama.attention.value_length', 1, 1 << 14, False, n_embd // n_head)
    rope = uint('llama.rope.dimension_count', 2, hd, False, hd)
    if rope % 2:
        fail(f'rope dimension {rope} is odd')
    real('llama.attention.layer_norm_rms_epsilon')
    real('llama.rope.freq_base', False, 10000.0)
    real('llama.rope.scaling.factor', False, 1.0)
    if get('llama.rope.scaling.type', (STR,), False, b'none') not in (b'none', b'linear', b'yarn'):
        fail('rope scaling type is unknown')
    if uint('llama.expert_count', 0, 1024, False, 0):
        fail('experts without expert tensors')

    # tokenizer
    kind = get('tokenizer.ggml.model', (STR,))
    if kind not in (b'llama', b'gpt2'):
        fail('tokenizer model is not supported')
    et, toks = get('tokenizer.ggml.tokens', (ARR,))
    if et != STR or not toks:
        fail('tokenizer.ggml.tokens is not a list of strings')
    nv = len(toks)
    for key, want in (('scores', F32), ('token_type', I32)):
        a = get(f'tokenizer.ggml.{key}', (ARR,), False)
        if a is not None:
            if a[0] != want:
                fail(f'tokenizer.ggml.{key} has elements of type {VT_NAMES[a[0]]}')
            if len(a[1]) != nv:
                fail(f'tokenizer.ggml.{key} has {len(a[1])} elements for {nv} tokens')
    types = get('tokenizer.ggml.token_type', (ARR,), False, (I32, [1] * nv))[1]
    for i, t in enumerate(types):
        if not 0 <= t <= 6:
            fail(f'token {i} has type {t}')
        if t == 6:
            s = toks[i]
            if not (len(s) == 6 and s[:3] == b'<0x' and s[5:] == b'>' and
                    all(c in b'0123456789abcdefABCDEF' for c in s[3:5])):
                fail(f'token {i} is a byte token but reads {s!r}')
    for key in ('bos', 'eos', 'unknown', 'padding', 'separator'):
        uint(f'tokenizer.ggml.{key}_token_id', 0, nv - 1, False)
    for key in ('add_bos_token', 'add_eos_token', 'add_space_prefix'):
        get('tokenizer.ggml.' + key, (BOOL,), False)
    if kind == b'gpt2':
        et, merges = get('tokenizer.ggml.merges', (ARR,))
        if et != STR:
            fail('tokenizer.ggml.merges is not a list of strings')
        have = set(toks)
        for i, s in enumerate(merges):
            a, sep, b = s.partition(b' ')
            if not (a and sep and b) or b' ' in b:
                fail(f'merge {i} reads {s!r}')
            if a + b not in have:
                fail(f'merge {i} makes {a + b!r}, which is not a token')

    # tensors
    def tensor(name, dims, norm=False):
        t = r.tensors.get(name.encode())
        if t is None:
            fail(f'tensor {name} is missing')
        got = list(t[0])
        while len(got) > 1 and got[-1] == 1 and len(got) > len(dims):
            got.pop()
        if got != dims:
            fail(f'tensor {name} is {t[0]}, not {dims}')
        tn = TT_BY_ID[t[1]][0]
        if tn in ('I8', 'I16', 'I32', 'I64', 'F64', 'Q8_1', 'Q8_K'):
            fail(f'tensor {name} has type {tn}')
        if norm and tn not in FLOATS:
            fail(f'tensor {name} has type {tn}')

    tensor('token_embd.weight', [n_embd, nv])
    tensor('output_norm.weight', [n_embd], True)
    if b'output.weight' in r.tensors:
        tensor('output.weight', [n_embd, nv])
    if b'rope_freqs.weight' in r.tensors:
        tensor('rope_freqs.weight', [rope // 2], True)
    for i in range(n_layer):
        b = f'blk.{i}.'
        tensor(b + 'attn_norm.weight', [n_embd], True)
        tensor(b + 'attn_q.weight', [n_embd, hd * n_head])
        tensor(b + 'attn_k.weight', [n_embd, hd * n_kv])
        tensor(b + 'attn_v.weight', [n_embd, hv * n_kv])
        tensor(b + 'attn_output.weight', [hv * n_head, n_embd])
        tensor(b + 'ffn_norm.weight', [n_embd], True)
        tensor(b + 'ffn_gate.weight', [n_embd, n_ff])
        tensor(b + 'ffn_up.weight', [n_embd, n_ff])
        tensor(b + 'ffn_down.weight', [n_ff, n_embd])


def oracle(b):
    try:
        r = Reader(b)
    except Bad as e:
        return f'open: {e}'
    try:
        plan(r)
    except Bad as e:
        return f'plan: {e}'
    return 'ok'


# --------------------------------------------------------------------------
# the corpus
# --------------------------------------------------------------------------

class Corpus:
    def __init__(self, out, dim):
        self.out, self.dim = out, dim
        self.rows = []
        self.base = base_model(dim, big_quant=dim % 256 == 0)
        self.base_bytes, self.fmap = self.base.build()

    def m(self):
        return self.base.clone()

    def row(self, name, verdict, stage, why, then='-', at='-', header='-', what='-'):
        self.rows.append({'file': name, 'verdict': verdict, 'stage': stage, 'then': then, 'at': at, 'header': header,
                          'what': what, 'why': why})

    def write(self, name, data, verdict, stage, why, header=None, **kw):
        path = os.path.join(self.out, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as f:
            f.write(data)
        header = self.fmap['data'][0] if header is None else header
        self.row(name, verdict, stage, why, header=min(header, len(data)), **kw)

    def reject(self, name, m, stage, why, label=None, **kw):
        self.put(name, m, 'must_reject', stage, why, label, **kw)

    def either(self, name, m, stage, why, label=None, **kw):
        self.put(name, m, 'either', stage, why, label, **kw)

    def accept(self, name, m, stage, why, then='-', **kw):
        self.put(name, m, 'must_accept', stage, why, None, then=then, **kw)

    def put(self, name, m, verdict, stage, why, label, header=None, **kw):
        data = m
        if isinstance(m, Model):
            data, fmap = m.build()
            header = fmap['data'][0]
            if label is not None:
                kw['at'] = fmap[label][0]
                kw.setdefault('what', label)
        self.write(name + '.gguf', data, verdict, stage, why, header=header, **kw)


def gen_header(c):
    for tag, magic in (('ggml', b'GGML'), ('swapped', b'FUGG'), ('lower', b'gguf'),
                       ('nul', b'\0\0\0\0'), ('off_by_one', b'GGUE'), ('zip', b'PK\3\4')):
        m = c.m()
        m.magic = magic
        c.reject(f'header_magic_{tag}', m, 'open', f'magic is {magic!r}', 'header.magic')
    for v, why in ((0, 'version 0 does not exist'),
                   (1, 'says version 1 but is laid out as version 3'),
                   (4, 'version 4 is from the future'), (255, 'version 255'),
                   (0x03000000, 'version 3 with its bytes swapped'),
                   (0xFFFFFFFF, 'version 2^32-1'), (0x10003, 'low half of the version is 3')):
        m = c.m()
        m.version = v
        c.reject(f'header_version_{v:#x}', m, 'open', why, 'header.version')
    m = c.m()
    m.version, m.v1 = 1, True
    c.reject('header_v1_file', m, 'open',
             'a genuine version 1 file (32-bit counts and lengths)', 'header.version')
    m = c.m()
    m.endian = '>'
    c.reject('header_big_endian', m, 'open',
             'a genuine big-endian file on a little-endian host', 'header.version')
    b = c.base_bytes
    c.reject('header_swapped_words', b''.join(b[i:i + 4][::-1] for i in range(0, len(b), 4)),
             'open', 'every 32-bit word of the file byte-swapped', at=0)
    c.reject('header_shifted', b'\0' + b, 'open', 'one byte before the magic', at=0)
    c.reject('header_bom', b'\xef\xbb\xbf' + b, 'open', 'UTF-8 byte order mark before the magic', at=0)


def gen_counts(c):
    n_kv, n_t = len(c.base.kvs), len(c.base.tensors)
    for field in ('n_kv', 'n_tensors'):
        true = n_kv if field == 'n_kv' else n_t
        for tag, v, why in (
                ('max', M64, 'is 2^64-1 (-1 when read as signed)'),
                ('i64min', 1 << 63, 'is 2^63'),
                ('i64max', (1 << 63) - 1, 'is 2^63-1'),
                ('2_61', 1 << 61, 'is 2^61: times 8 wraps to 0'),
                ('2_58', 1 << 58, 'is 2^58: times a 64-byte record wraps to 0'),
                ('wrap48', M64 // 48 + 1, 'wraps a 48-byte record size'),
                ('2_32', (1 << 32) + true, 'has the right value in its low 32 bits only'),
                ('2_31', 1 << 31, 'is 2^31'),
                ('1e6', 1000000, 'is 1000000 in a small file'),
                ('plus1', true + 1, 'is one more than there are')):
            m = c.m()
            setattr(m, field, v)
            c.reject(f'count_{field}_{tag}', m, 'open', f'{field} {why}', f'header.{field}')
    m = c.m()
    m.n_kv = n_kv - 1
    c.reject('count_n_kv_minus1', m, 'open', 'n_kv is one less than there are: a key is read as a tensor',
             'header.n_kv')
    m = c.m()
    m.n_kv = 0
    c.reject('count_n_kv_0', m, 'open', 'n_kv is 0 with keys present: keys are read as tensors', 'header.n_kv')
    m = c.m()
    m.n_tensors = n_t - 1
    c.either('count_n_tensors_minus1', m, 'plan',
             'n_tensors is one less than there are: output.weight goes, the rest looks like a model with a tied output '
             'and bytes to spare at the end', 'header.n_tensors')
    # the same with a tensor that cannot be done without
    m = c.m()
    m.tensors.append(m.tensors.pop(m.tensors.index(m.t('output_norm.weight'))))
    m.n_tensors = n_t - 1
    c.reject('count_n_tensors_minus1_norm', m, 'plan',
             'n_tensors is one less than there are: output_norm.weight is gone', 'header.n_tensors')
    m = c.m()
    m.n_tensors = 0
    c.accept('count_n_tensors_0', m, 'open',
             'n_tensors is 0 with a tensor table present: as a metadata-only file it is well formed', then='reject')
    m = c.m()
    m.n_kv = m.n_tensors = M64
    c.reject('count_both_max', m, 'open', 'both counts are 2^64-1', 'header.n_tensors')
    # CVE-2024-23496 / CVE-2024-21802 style tiny files
    c.reject('count_tiny_n_kv', b'GGUF' + struct.pack('<IQQ', 3, 0, 0x0FFFFFFFFFFFFFFF), 'open',
             'a 24-byte file that declares 2^60-1 keys', at=16)
    c.reject('count_tiny_n_tensors', b'GGUF' + struct.pack('<IQQ', 3, 0x0FFFFFFFFFFFFFFF, 0), 'open',
             'a 24-byte file that declares 2^60-1 tensors', at=8)
    c.reject('count_tiny_n_tensors_3', b'GGUF' + struct.pack('<IQQ', 3, 3, 0), 'open',
             'a 24-byte file that declares 3 tensors', at=8)


def gen_kv_types(c):
    for tag, vt in (('13', 13), ('255', 255), ('max', 0xFFFFFFFF), ('i32min', 0x80000000), ('le256', 0x0400)):
        m = c.m()
        k = m.add('test.key', U32, 1)
        k.vt, k.raw = vt, struct.pack('<I', 1)
        c.reject(f'kv_type_{tag}', m, 'open', f'value type {vt:#x} does not exist', 'kv[test.key].type')
        m = c.m()
        k = m.add('test.array', ARR, [1, 2, 3], U32)
        k.raw = struct.pack('<IQ3I', vt, 3, 1, 2, 3)
        c.reject(f'kv_etype_{tag}', m, 'open', f'array element type {vt:#x} does not exist',
                 'kv[test.array].value')
    m = c.m()
    m.kv('general.architecture').vt = 13
    m.kv('general.architecture').raw = struct.pack('<Q', 5) + b'llama'
    c.reject('kv_type_13_architecture', m, 'open', 'general.architecture has value type 13',
             'kv[general.architecture].type')
    for v in (2, 0x80, 0xFF):
        m = c.m()
        m.kv('tokenizer.ggml.add_bos_token').val = v
        c.reject(f'kv_bool_{v:#x}', m, 'open', f'a bool is {v} (the format allows 0 and 1 only)',
                 'kv[tokenizer.ggml.add_bos_token].value')
    m = c.m()
    m.add('test.bools', ARR, [0, 1, 2], BOOL)
    c.reject('kv_bool_array_2', m, 'open', 'an array of bools has a 2', 'kv[test.bools].elem[2]')


def gen_strings(c):
    lens = (('max', M64), ('i64min', 1 << 63), ('i64max', (1 << 63) - 1), ('wrap8', M64 - 7), ('2_32', 1 << 32),
            ('2_31', 1 << 31), ('1gib', 1 << 30))
    for tag, n in lens:
        m = c.m()
        m.kv('general.name').klen = n
        c.reject(f'string_key_{tag}', m, 'open', f'a key length is {n:#x}', 'kv[general.name].key.len')
        m = c.m()
        m.kv('general.name').slen = n
        c.reject(f'string_value_{tag}', m, 'open', f'a string value length is {n:#x}',
                 'kv[general.name].value.len')
        m = c.m()
        m.kv('tokenizer.ggml.tokens').elens[5] = n
        c.reject(f'string_elem_{tag}', m, 'open', f'the length of an array string is {n:#x}',
                 'kv[tokenizer.ggml.tokens].elem[5].len')
        m = c.m()
        m.tensors[3].namelen = n
        c.reject(f'string_tensor_name_{tag}', m, 'open', f'a tensor name length is {n:#x}',
                 f'tensor[{m.tensors[3].name.decode()}].name.len')
    # lengths that reach exactly to the end of the file, and one past it
    for tag, extra in (('eof', 0), ('past_eof', 1)):
        for where, label in (('value', 'kv[general.name].value.len'),
                             ('key', 'kv[general.name].key.len'),
                             ('elem', 'kv[tokenizer.ggml.tokens].elem[5].len'),
                             ('tensor_name', 'tensor[blk.0.attn_norm.weight].name.len')):
            off = c.fmap[label][0]
            b = bytearray(c.base_bytes)
            struct.pack_into('<Q', b, off, len(b) - off - 8 + extra)
            c.reject(f'string_{where}_to_{tag}', bytes(b), 'open',
                     f'a {where} length reaches ' + ('one byte past' if extra else 'exactly to') + ' the end',
                     at=off, what=label, header=len(b))
    m = c.m()
    m.kv('general.name').slen = len('rocmforge test model') + 1
    c.reject('string_value_plus1', m, 'open', 'a string value length is one too big: all after it shifts',
             'kv[general.name].value.len')
    m = c.m()
    m.kv('general.name').slen = len('rocmforge test model') - 1
    c.reject('string_value_minus1', m, 'open', 'a string value length is one too small',
             'kv[general.name].value.len')
    m = c.m()
    k = m.add('', U32, 1)
    c.reject('string_key_empty', m, 'open', 'a key is empty', 'kv[].key.len')
    m = c.m()
    m.add('k' * 65536, U32, 1)
    c.reject('string_key_65536', m, 'open', 'a key is 65536 bytes long (the format allows 65535)',
             at=m.build()[1]['kv[' + 'k' * 80 + '].key.len'][0])
    m = c.m()
    m.add(b'general.architecture\0x', STR, 'other')
    c.reject('string_key_nul', m, 'open',
             'a key holds a NUL: as a C string it equals general.architecture',
             'kv[general.architecture\0x].key.len')
    m = c.m()
    m.tensors[-1].name = b'output.weight\0x'
    c.reject('string_tensor_name_nul', m, 'open',
             'a tensor name holds a NUL: as a C string it equals output.weight', 'tensor[output.weight\0x].name.len')
    m = c.m()
    m.add_t('n' * 65, [32], 'F32')
    c.reject('string_tensor_name_65', m, 'open',
             'a tensor name is 65 bytes long (the format allows 64)', 'tensor[' + 'n' * 65 + '].name.len')
    m = c.m()
    m.add_t('n' * 5000, [32], 'F32')
    c.reject('string_tensor_name_5000', m, 'open', 'a tensor name is 5000 bytes long',
             'tensor[' + 'n' * 80 + '].name.len')
    m = c.m()
    m.add_t('', [32], 'F32')
    c.either('string_tensor_name_empty', m, 'open', 'a tensor name is empty', 'tensor[].name.len')
    m = c.m()
    m.add('Not A/valid KEY', U32, 1)
    c.either('string_key_not_snake', m, 'open',
             'a key is not hierarchical lower_snake_case (invalid by the letter, seen in the wild)')
    m = c.m()
    m.add(b'test.k\xc3\xa9y', U32, 1)
    c.either('string_key_utf8', m, 'open', 'a key is not ASCII (invalid by the letter)')
    m = c.m()
    m.add(b'test.\xff\xfe', U32, 1)
    c.either('string_key_not_utf8', m, 'open', 'a key is neither ASCII nor UTF-8')
    m = c.m()
    m.kv('general.name').val = b'abc\xff\xc0\x80\xed\xa0\x80'
    c.either('string_value_not_utf8', m, 'open',
             'general.name is not UTF-8: printing it must not fail or emit control bytes')
    m = c.m()
    m.kv('general.name').val = b'\x1b[2J\x1b]0;owned\x07\r\nINFO: all is well%s%n%n%x'
    c.either('string_value_terminal', m, 'open',
             'general.name holds terminal escapes and printf directives: log it escaped')
    m = c.m()
    m.add_t(b'\x1b[31m\xff%n%s', [32], 'F32')
    c.either('string_tensor_name_terminal', m, 'open',
             'a tensor name holds terminal escapes and printf directives: log it escaped')


def gen_arrays(c):
    sizes = (('u8', U8, 1), ('u16', U16, 2), ('u32', U32, 4), ('f32', F32, 4), ('u64', U64, 8), ('f64', F64, 8),
             ('bool', BOOL, 1))
    for tn, et, size in sizes:
        for tag, n in (('max', M64), ('i64max', (1 << 63) - 1), ('wrap0', (1 << 64) // size),
                       ('wrap1', (1 << 64) // size + 1)):
            if n > M64:
                continue
            m = c.m()
            k = m.add('test.array', ARR, [1, 0, 1, 0], et)
            k.alen = n
            c.reject(f'array_{tn}_{tag}', m, 'open',
                     f'an array of {tn} declares {n:#x} elements' +
                     (f': times {size} wraps to {n * size & M64}' if n * size > M64 else ''),
                     'kv[test.array].alen')
    for tag, n in (('max', M64), ('wrap8', 1 << 61), ('wrap32', 1 << 59), ('2_40', 1 << 40), ('2_32', (1 << 32) + 64)):
        m = c.m()
        m.kv('tokenizer.ggml.tokens').alen = n
        c.reject(f'array_str_{tag}', m, 'open', f'the token list declares {n:#x} strings',
                 'kv[tokenizer.ggml.tokens].alen')
    for key, size in (('scores', 4), ('token_type', 4)):
        off, _ = c.fmap[f'kv[tokenizer.ggml.{key}].alen']
        left = len(c.base_bytes) - off - 8
        for tag, n in (('to_eof', left // size), ('past_eof', left // size + 1)):
            b = bytearray(c.base_bytes)
            struct.pack_into('<Q', b, off, n)
            c.reject(f'array_{key}_{tag}', bytes(b), 'open',
                     f'tokenizer.ggml.{key} declares as many elements as the file has bytes for' +
                     (' and one more' if 'past' in tag else ''), at=off, what=f'tokenizer.ggml.{key}',
                     header=len(b))
    m = c.m()
    m.kv('tokenizer.ggml.tokens').alen = 65
    c.reject('array_tokens_plus1', m, 'open', 'the token list declares one string too many',
             'kv[tokenizer.ggml.tokens].alen')
    m = c.m()
    m.kv('tokenizer.ggml.tokens').alen = 63
    c.reject('array_tokens_minus1', m, 'open', 'the token list declares one string too few',
             'kv[tokenizer.ggml.tokens].alen')
    m = c.m()
    k = m.add('test.array', ARR, [], U8)
    k.alen = 1 << 30
    c.reject('array_u8_1gib', m, 'open', 'an array declares 2^30 bytes that are not there', 'kv[test.array].alen')
    m = c.m()
    k = m.add('test.array', ARR, [], STR)
    k.raw = struct.pack('<IQ', STR, len(c.base_bytes) // 8) + b''
    c.reject('array_str_amplify', m, 'open',
             'a string array declares file size / 8 strings: up to 32 times the file if allocated first',
             'kv[test.array].value')

    # nested arrays: legal in the specification, refused by ggml
    def nest(depth, count=1, leaf=b''):
        return struct.pack('<IQ', ARR, count) * (depth - 1) + struct.pack('<IQ', U8, 1) + b'\1' + leaf
    m = c.m()
    k = m.add('test.nested', ARR, [], ARR)
    k.raw = struct.pack('<IQ', ARR, 2) + struct.pack('<IQ2B', U8, 2, 1, 2) + struct.pack('<IQB', U8, 1, 3)
    c.either('nested_2', m, 'open', 'an array of two arrays (legal by the specification; ggml refuses it)',
             'kv[test.nested].value')
    m = c.m()
    k = m.add('test.nested', ARR, [], ARR)
    k.raw = struct.pack('<IQ', ARR, 0)
    c.either('nested_empty', m, 'open', 'an empty array of arrays')
    for depth in (20, 200, 10000, 100000):
        m = c.m()
        k = m.add('test.nested', ARR, [], ARR)
        k.raw = nest(depth)
        c.reject(f'nested_{depth}', m, 'open', f'arrays nested {depth} deep', 'kv[test.nested].value')
    m = c.m()
    k = m.add('test.nested', ARR, [], ARR)
    k.raw = nest(7, count=1 << 32)
    c.reject('nested_wide', m, 'open', 'arrays of 2^32 arrays, 6 deep', 'kv[test.nested].value')
    m = c.m()
    k = m.add('test.nested', ARR, [], ARR)
    k.raw = struct.pack('<IQ', ARR, 2) + struct.pack('<IQ', U8, M64 - 20) + struct.pack('<IQB', U8, 1, 3)
    c.reject('nested_inner_overflow', m, 'open', 'an inner array declares 2^64-21 bytes', 'kv[test.nested].value')
    m = c.m()
    m.put('tokenizer.ggml.tokens', ARR, [], ARR).raw = struct.pack('<IQ', ARR, 64) + struct.pack('<IQ', U8, 0) * 64
    c.reject('nested_tokens', m, 'plan', 'the token list is an array of arrays', 'kv[tokenizer.ggml.tokens].value')


def gen_dims(c):
    q = 'blk.0.attn_q.weight'

    def big(name, dims, type_, why, label='.dim[0]', stage='open', verdict='reject'):
        m = c.m()
        t = m.t(q)
        t.dims, t.type = dims, TT[type_][0]
        lab = f'tensor[{q}]{label}'
        getattr(c, verdict)(f'dims_{name}', m, stage, why, lab)

    big('huge', [1 << 62], 'F32', 'one dimension of 2^62: times 4 wraps to 0')
    big('i64max', [(1 << 63) - 1], 'I8', 'one dimension of 2^63-1')
    big('negative', [1 << 63], 'F32', 'one dimension of -2^63')
    big('minus1', [M64], 'F32', 'one dimension of -1')
    big('minus1_second', [64, M64], 'Q8_0', 'the second dimension is -1', '.dim[1]')
    big('product_0', [1 << 32, 1 << 32], 'F32', '2^32 by 2^32 elements: the product wraps to 0')
    big('product_small', [1 << 33, (1 << 31) + 1], 'F32', 'the product wraps to 2^33')
    big('product_negative', [(1 << 63) - 1, 2], 'I8',
        '2^63-1 by 2: a signed product is negative, which skips a check for > 0 (ggml issue 27203)')
    big('product_4d', [1 << 16, 1 << 16, 1 << 16, 1 << 16], 'F16', 'four dimensions of 2^16: the product wraps to 0')
    big('product_4d_partial', [1 << 32, 1 << 31, 1 << 31, 1 << 34], 'F16', 'the product wraps more than once')
    big('bytes_wrap', [1024, (1 << 52) + 1], 'F32', 'the element count fits, the byte count wraps (CVE-2026-33298)')
    big('bytes_wrap_q8', [1 << 31, 1 << 31], 'Q8_0', '2^62 elements of Q8_0: blocks times 34 wraps')
    big('pad_wrap', [4, (1 << 30) - 1, (1 << 30) + 1], 'F32',
        'the byte count is 2^64-16: padding it wraps to 0 (ggml issue 26978)')
    big('pad_wrap_1d', [(1 << 62) - 1], 'F32', 'the byte count is 2^64-4: padding it wraps to 0 (between three CVEs)')
    for tn in ('Q8_0', 'Q4_K'):
        _, blk, bs = TT[tn]
        ne = ((1 << 64) // bs // blk + 1) * blk
        big(f'row_wrap_{tn.lower()}', [ne], tn,
            f'row size computed as elements times {bs} over {blk} wraps to {(ne * bs & M64) // blk}; in blocks it fits')
    big('zero_hides_overflow', [1 << 62, 1 << 62, 0], 'F32', 'a zero dimension hides an overflow in the others')
    big('exabyte', [1 << 59], 'Q8_0', 'a tensor of 2^59 elements in a small file')
    big('one_row_more', [c.dim, c.dim + 1], 'F32',
        'F32 instead of a quantized type: the data runs into the next tensor')
    big('zero', [0], 'F32', 'a required tensor with one dimension of 0', stage='plan')
    big('zero_second', [c.dim, 0], 'Q8_0', 'a required tensor with a second dimension of 0', '.dim[1]', 'plan')
    big('zero_first', [0, c.dim], 'Q8_0', 'a required tensor with a first dimension of 0', stage='plan')
    for nd in (5, 6, 8, 9, 255, 1 << 16, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        m = c.m()
        t = m.t(q)
        if nd <= 9:
            t.dims = t.dims + [1] * (nd - 2)
        else:
            t.ndims = nd
        c.reject(f'dims_n_dims_{nd:#x}', m, 'open', f'n_dims is {nd}', f'tensor[{q}].n_dims')
    m = c.m()
    m.t(q).ndims = 1
    c.reject('dims_n_dims_minus1', m, 'open', 'n_dims is one too small: a dimension is read as the type',
             f'tensor[{q}].n_dims')
    m = c.m()
    m.t(q).ndims = 3
    c.reject('dims_n_dims_plus1', m, 'open', 'n_dims is one too big: the type is read as a dimension',
             f'tensor[{q}].n_dims')
    m = c.m()
    t = m.t(q)
    t.dims = []
    t.type = 0
    c.reject('dims_n_dims_0', m, 'plan', 'a required tensor has no dimensions', f'tensor[{q}].n_dims')
    for name, dims in (('extra_zero', [0]), ('extra_zero_4d', [4, 0, 3, 0]), ('extra_scalar', [])):
        m = c.m()
        m.add_t('extra.' + name, dims, 'F32', bytes(0 if dims else 4))
        c.either(f'dims_{name}', m, 'open', f'an unused tensor of shape {dims} (upstream takes empty tensors)')
    m = c.m()
    m.t(q).dims = [c.dim - 16, c.dim]
    c.reject('dims_row_q8_0', m, 'open', 'a Q8_0 row is not a whole number of 32-element blocks',
             f'tensor[{q}].dim[0]')
    m = c.m()
    m.t(q).dims = [1, c.dim * c.dim]
    c.reject('dims_row_q8_0_1', m, 'open', 'a Q8_0 tensor with rows of one element', f'tensor[{q}].dim[0]')
    d = 'blk.0.ffn_down.weight'
    m = c.m()
    m.t(d).dims = [128, 2 * c.dim]
    c.reject('dims_row_q4_k', m, 'open', 'a Q4_K row of 128 elements (blocks are 256); the total is whole blocks',
             f'tensor[{d}].dim[0]')
    m = c.m()
    m.add_t('extra', [255], 'Q4_K', bytes(144))
    c.reject('dims_row_q4_k_255', m, 'open', 'a Q4_K row of 255 elements', 'tensor[extra].dim[0]')


def gen_tensor_types(c):
    q = 'blk.1.attn_v.weight'
    for tag, tt, why in (('max', 0xFFFFFFFF, 'is -1'), ('i32min', 0x80000000, 'is -2^31'), ('255', 255, 'is 255'),
                         ('1000', 1000, 'is 1000'), ('le256', 0x100, 'is 256 (low byte 0)'),
                         ('0x80000008', 0x80000008, 'is Q8_0 with the sign bit set')):
        m = c.m()
        m.t(q).type = tt
        c.reject(f'ttype_{tag}', m, 'open', f'tensor type {why}', f'tensor[{q}].type')
    for tt, tn in ((4, 'Q4_2'), (5, 'Q4_3'), (31, 'Q4_0_4_4'), (32, 'Q4_0_4_8'), (33, 'Q4_0_8_8'), (36, 'IQ4_NL_4_4'),
                   (38, 'IQ4_NL_8_8')):
        m = c.m()
        m.t(q).type = tt
        c.reject(f'ttype_removed_{tt}', m, 'open',
                 f'tensor type {tt} ({tn}) was removed: its block size is unknown, 0 in a table', f'tensor[{q}].type')
    for tn in ('I8', 'I16', 'I32', 'I64', 'F64'):
        m = c.m()
        t = m.t(q)
        t.type = TT[tn][0]
        t.data = bytes(nbytes_of(tn, t.dims))
        c.reject(f'ttype_weight_{tn}', m, 'plan', f'a weight matrix is {tn}', f'tensor[{q}].type')
    for tn in ('Q8_1',):
        m = c.m()
        t = m.t(q)
        t.type = TT[tn][0]
        t.data = bytes(nbytes_of(tn, t.dims))
        c.reject(f'ttype_weight_{tn}', m, 'plan',
                 f'a weight matrix is {tn}, a type for intermediate results only', f'tensor[{q}].type')
    m = c.m()
    t = m.t('blk.0.ffn_down.weight')
    t.type, t.data = TT['Q8_K'][0], bytes(nbytes_of('Q8_K', t.dims))
    c.reject('ttype_weight_Q8_K', m, 'plan',
             'a weight matrix is Q8_K, a type for intermediate results only', 'tensor[blk.0.ffn_down.weight].type')
    for name in ('blk.0.attn_norm.weight', 'output_norm.weight'):
        m = c.m()
        t = m.t(name)
        t.type, t.data = TT['Q8_0'][0], data_for(random.Random(5), 'Q8_0', t.dims)
        c.either(f'ttype_norm_q8_0_{name.split(".")[-2]}', m, 'plan', f'{name} is Q8_0 instead of F32')
        m = c.m()
        t = m.t(name)
        t.type, t.data = TT['I32'][0], bytes(4 * t.dims[0])
        c.reject(f'ttype_norm_i32_{name.split(".")[-2]}', m, 'plan', f'{name} is I32',
                 f'tensor[{name}].type')
    m = c.m()
    t = m.t('token_embd.weight')
    t.type, t.data = TT['I32'][0], bytes(nbytes_of('I32', t.dims))
    c.reject('ttype_embd_i32', m, 'plan', 'token_embd.weight is I32', 'tensor[token_embd.weight].type')
    # type and data disagree: too little data for the type
    m = c.m()
    t = m.tensors[-1]
    t.type = TT['F32'][0]
    c.reject('ttype_last_bigger', m, 'open',
             'the last tensor is declared F32 over Q8_0 data: it ends past the file (CVE-2026-7482)',
             f'tensor[{t.name.decode()}].type')


def gen_offsets(c):
    last, mid = c.base.tensors[-1].name.decode(), 'blk.1.attn_q.weight'
    start = c.fmap['data'][0]
    size = len(c.base_bytes)
    room = size - start
    for tag, off, why in (
            ('max', M64, 'is 2^64-1'), ('max_aligned', M64 - 31, 'is 2^64-32'),
            ('i64max', (1 << 63) - 32, 'is 2^63-32'), ('i64min', 1 << 63, 'is 2^63'),
            ('wrap_to_0', (1 << 64) - start, 'plus the data start wraps to byte 0: the header is read as weights'),
            ('wrap_to_32', (1 << 64) - start + 32, 'plus the data start wraps to byte 32'),
            ('wrap_size', (1 << 64) - align_up(len(c.base.tensors[-1].data), 32), 'plus the size wraps to 0'),
            ('eof', align_up(room, 32), 'is the end of the file'),
            ('past_eof', align_up(room, 32) + 32, 'is past the end of the file'),
            ('2_32', (1 << 32) + (c.fmap[f'data[{last}]'][0] - start), 'is right in its low 32 bits only'),
            ('absolute', c.fmap[f'data[{last}]'][0] // 32 * 32, 'is relative to the file, not to the data')):
        m = c.m()
        m.tensors[-1].off = off
        c.reject(f'offset_{tag}', m, 'open', f'a tensor offset {why}', f'tensor[{last}].offset')
    m = c.m()
    m.tensors[-1].off = (c.fmap[f'data[{last}]'][0] - start) + 32
    c.reject('offset_plus32', m, 'open', 'the last tensor is 32 bytes too far: it ends past the file',
             f'tensor[{last}].offset')
    good = c.fmap[f'data[{mid}]'][0] - start
    for d in (1, 2, 4, 8, 16, 31):
        m = c.m()
        m.t(mid).off = good + d
        c.reject(f'offset_unaligned_{d}', m, 'open', f'a tensor offset is {d} off its alignment',
                 f'tensor[{mid}].offset')
    for tag, off, why in (('same', c.fmap['data[blk.1.attn_norm.weight]'][0] - start, 'two tensors share an offset'),
                          ('minus32', good - 32, 'a tensor starts inside the one before it'),
                          ('zero', 0, 'a tensor points at the first one')):
        m = c.m()
        m.t(mid).off = off
        c.reject(f'offset_overlap_{tag}', m, 'open', why, f'tensor[{mid}].offset')
    m = c.m()
    for t in m.tensors:
        t.off = 0
    c.reject('offset_all_zero', m, 'open', 'every tensor offset is 0', f'tensor[{m.tensors[1].name.decode()}].offset')
    m = c.m()
    a, b = m.t('blk.0.attn_q.weight'), m.t('blk.0.attn_k.weight')
    at = m.build()[1]
    a.off = at['data[blk.0.attn_k.weight]'][0] - start
    b.off = at['data[blk.0.attn_q.weight]'][0] - start
    c.reject('offset_swapped', m, 'open',
             'two offsets of different-sized tensors are swapped: the bigger one overlaps its neighbour',
             'tensor[blk.0.attn_q.weight].offset')
    # data start past the end of the file
    m = c.m()
    b, fm = m.build()
    c.reject('offset_no_data', b[:fm['data'][0]], 'open', 'the tensor data is missing altogether', at=fm['data'][0])


def gen_alignment(c):
    for v in (0, 3, 7, 12, 33, 0x80000001, 0xFFFFFFFF):
        m = c.m()
        m.add('general.alignment', U32, v)
        c.reject(f'align_{v:#x}', m, 'open', f'general.alignment is {v}', 'kv[general.alignment].value')
    m = c.m()
    m.add('general.alignment', U32, 24)
    m.align = 24
    c.either('align_24', m, 'open', 'general.alignment is 24: a multiple of 8 but no power of two')
    for v in (1, 2, 4):
        m = c.m()
        m.add('general.alignment', U32, v)
        m.align = v
        c.either(f'align_{v}', m, 'open',
                 f'general.alignment is {v}: a power of two but not a multiple of 8; ggml takes it')
    for v in (1 << 20, 1 << 30, 1 << 31):
        m = c.m()
        m.add('general.alignment', U32, v)
        c.reject(f'align_{v:#x}', m, 'open',
                 f'general.alignment is {v}: the data would start past the file', 'kv[general.alignment].value')
    for tag, vt, val in (('u64', U64, 32), ('i32', I32, 32), ('u16', U16, 32), ('u8', U8, 32), ('f32', F32, 32.0),
                         ('str', STR, '32'), ('bool', BOOL, 1), ('i64', I64, -32)):
        m = c.m()
        m.add('general.alignment', vt, val)
        c.reject(f'align_type_{tag}', m, 'open', f'general.alignment is a {tag}', 'kv[general.alignment].type')
    m = c.m()
    m.add('general.alignment', ARR, [32], U32)
    c.reject('align_type_arr', m, 'open', 'general.alignment is an array', 'kv[general.alignment].type')
    m = c.m()
    m.add('general.alignment', U32, 64)
    c.reject('align_64_laid_out_32', m, 'open', 'general.alignment is 64 but the data is laid out for 32',
             'kv[general.alignment].value')
    m = c.m()
    m.align = 8
    c.reject('align_32_laid_out_8', m, 'open', 'the data is laid out for 8 and the alignment is the default',
             at=m.build()[1]['data'][0])


def gen_duplicates(c):
    m = c.m()
    m.add('general.architecture', STR, 'llama')
    # labels collide on purpose: point at the second one
    b, _ = m.build()
    at = b.rindex(b'general.architecture') - 8
    c.reject('dup_key_same', m, 'open', 'general.architecture is there twice with the same value', at=at)
    m = c.m()
    m.add('llama.block_count', U32, 1)
    b, _ = m.build()
    c.reject('dup_key_value', m, 'open', 'llama.block_count is there twice with different values',
             at=b.rindex(b'llama.block_count') - 8)
    m = c.m()
    m.add('llama.embedding_length', STR, 'x')
    b, _ = m.build()
    c.reject('dup_key_type', m, 'open', 'llama.embedding_length is there twice with different types',
             at=b.rindex(b'llama.embedding_length') - 8)
    m = c.m()
    m.add('general.alignment', U32, 32)
    m.add('general.alignment', U32, 1 << 31)
    b, _ = m.build()
    c.reject('dup_key_alignment', m, 'open', 'general.alignment is there twice: 32, then 2^31',
             at=b.rindex(b'general.alignment') - 8)
    for name in ('blk.0.attn_q.weight', 'output.weight'):
        m = c.m()
        t = m.t(name)
        m.tensors.append(Tensor(t.name, t.dims, t.type, t.data))
        b, _ = m.build()
        c.reject(f'dup_tensor_{name.split(".")[-2]}', m, 'open', f'{name} is there twice',
                 at=b.rindex(name.encode()) - 8)
    m = c.m()
    m.t('blk.1.attn_q.weight').name = b'blk.0.attn_q.weight'
    b, _ = m.build()
    c.reject('dup_tensor_renamed', m, 'open', 'blk.1.attn_q.weight is called blk.0.attn_q.weight',
             at=b.rindex(b'blk.0.attn_q.weight') - 8)
    m = c.m()
    for _ in range(50):
        t = m.tensors[1]
        m.tensors.append(Tensor(t.name, t.dims, t.type, t.data))
    c.reject('dup_tensor_50', m, 'open', 'a tensor is there 51 times')


REQUIRED = ['general.architecture', 'llama.context_length', 'llama.embedding_length', 'llama.block_count',
            'llama.feed_forward_length', 'llama.attention.head_count', 'llama.attention.layer_norm_rms_epsilon',
            'tokenizer.ggml.model', 'tokenizer.ggml.tokens']


def gen_missing_keys(c):
    for key in REQUIRED:
        m = c.m()
        m.drop(key)
        c.reject('missing_' + key.replace('.', '_'), m, 'plan', f'{key} is missing', what=key)
    m = c.m()
    m.drop('llama.attention.head_count_kv')
    c.reject('missing_head_count_kv_gqa', m, 'plan',
             'head_count_kv is missing: it defaults to head_count, which the key and value weights contradict',
             what='blk.0.attn_k.weight')
    m = c.m()
    for k in list(m.kvs):
        if k.key.startswith(b'tokenizer.'):
            m.kvs.remove(k)
    c.reject('missing_tokenizer', m, 'plan', 'there is no tokenizer at all', what='tokenizer.ggml.model')
    m = c.m()
    m.kvs = []
    c.accept('missing_all_keys', m, 'open', 'no keys at all, only tensors: well formed', then='reject')
    m = c.m()
    m.drop('general.quantization_version')
    c.either('missing_quantization_version', m, 'plan',
             'general.quantization_version is missing though tensors are quantized (required by the letter)')
    m = c.m()
    for k in m.kvs:
        if k.key.startswith(b'llama.'):
            k.key = b'qwen2.' + k.key[6:]
    c.reject('missing_prefix', m, 'plan',
             'the architecture is llama but every hyper-parameter is called qwen2.*', what='llama.context_length')


def gen_wrong_types(c):
    def put(tag, key, vt, val, et=None, stage='plan', verdict='reject'):
        m = c.m()
        m.put(key, vt, val, et)
        short = key.split('.')[-1]
        vn = VT_NAMES[vt] + (f'_{VT_NAMES[et]}' if et is not None else '')
        getattr(c, verdict)(f'type_{short}_{tag}', m, stage, f'{key} is {vn} {val!r}'[:150],
                            f'kv[{key}].type')

    put('u32', 'general.architecture', U32, 5)
    put('arr', 'general.architecture', ARR, ['llama'], STR)
    put('bool', 'general.architecture', BOOL, 1)
    for key, good in (('llama.block_count', 2), ('llama.embedding_length', c.dim), ('llama.context_length', 512),
                      ('llama.attention.head_count', 4), ('llama.attention.head_count_kv', 2),
                      ('llama.feed_forward_length', 256), ('llama.rope.dimension_count', c.dim // 4)):
        put('str', key, STR, str(good))
        put('f32', key, F32, float(good))
        put('bool', key, BOOL, 1)
        put('i32_neg', key, I32, -good)
        put('i64_min', key, I64, -(1 << 63))
        put('u64_wrap', key, U64, (1 << 32) + good)
        put('arr_empty', key, ARR, [], U32)
        put('arr_long', key, ARR, [good] * 1000, U32)
        put('i32', key, I32, good, verdict='either')
    put('arr_str', 'llama.attention.head_count', ARR, ['4', '4'], STR)
    put('arr_u32', 'llama.attention.head_count', ARR, [4, 4], U32, verdict='either')
    put('arr_mixed', 'llama.attention.head_count', ARR, [4, 0], U32, verdict='either')
    put('arr_short', 'llama.attention.head_count_kv', ARR, [2], U32)
    put('u32', 'llama.attention.layer_norm_rms_epsilon', U32, 0x3727C5AC)
    put('str', 'llama.attention.layer_norm_rms_epsilon', STR, '1e-5')
    put('f64', 'llama.attention.layer_norm_rms_epsilon', F64, 1e-5, verdict='either')
    put('arr', 'llama.attention.layer_norm_rms_epsilon', ARR, [1e-5], F32)
    put('str', 'llama.rope.freq_base', STR, '10000')
    put('u32', 'llama.rope.freq_base', U32, 10000)
    put('u32', 'tokenizer.ggml.model', U32, 0)
    put('arr', 'tokenizer.ggml.model', ARR, ['llama'], STR)
    put('str', 'tokenizer.ggml.tokens', STR, 'abc')
    put('u32', 'tokenizer.ggml.tokens', U32, 64)
    put('arr_u32', 'tokenizer.ggml.tokens', ARR, list(range(64)), U32)
    put('arr_u8', 'tokenizer.ggml.tokens', ARR, [65] * 64, U8)
    put('arr_u8', 'tokenizer.ggml.scores', ARR, [1] * 64, U8)
    put('arr_i32', 'tokenizer.ggml.scores', ARR, [1] * 64, I32)
    put('arr_f64', 'tokenizer.ggml.scores', ARR, [1.0] * 64, F64)
    put('arr_str', 'tokenizer.ggml.scores', ARR, ['1'] * 64, STR)
    put('f32', 'tokenizer.ggml.scores', F32, 1.0)
    put('arr_u8', 'tokenizer.ggml.token_type', ARR, [1] * 64, U8)
    put('arr_u32', 'tokenizer.ggml.token_type', ARR, [1] * 64, U32)
    put('arr_i64', 'tokenizer.ggml.token_type', ARR, [1] * 64, I64)
    put('arr_str', 'tokenizer.ggml.token_type', ARR, ['1'] * 64, STR)
    put('str', 'tokenizer.ggml.bos_token_id', STR, '1')
    put('i32_neg', 'tokenizer.ggml.bos_token_id', I32, -1)
    put('arr', 'tokenizer.ggml.eos_token_id', ARR, [2], U32)
    put('f32', 'tokenizer.ggml.eos_token_id', F32, 2.0)
    put('u32', 'tokenizer.ggml.add_bos_token', U32, 1)
    put('str', 'tokenizer.ggml.add_bos_token', STR, 'true')


def gen_hparams(c):
    L, A = 'llama.', 'llama.attention.'

    def put(tag, key, val, why, vt=U32, verdict='reject', **more):
        m = c.m()
        m.put(key, vt, val)
        for k, v in more.items():
            m.put({'vs': 'llama.vocab_size'}.get(k, k), U32, v)
        getattr(c, verdict)(f'hparam_{tag}', m, 'plan', why, f'kv[{key}].value')

    for tag, v in (('0', 0), ('3', 3), ('513', 513), ('1025', 1025), ('1e6', 1000000), ('2_31', 1 << 31),
                   ('2_31m1', (1 << 31) - 1), ('max', 0xFFFFFFFF)):
        put(f'block_count_{tag}', L + 'block_count', v, f'block_count is {v}')
    put('block_count_1', L + 'block_count', 1, 'block_count is 1 with two blocks of tensors', verdict='either')
    put('block_count_u64_max', L + 'block_count', M64, 'block_count is 2^64-1', vt=U64)
    for tag, v in (('0', 0), ('1', 1), ('minus1', c.dim - 1), ('double', 2 * c.dim), ('2_31', 1 << 31),
                   ('max', 0xFFFFFFFF)):
        put(f'embedding_length_{tag}', L + 'embedding_length', v, f'embedding_length is {v}')
    for tag, v in (('0', 0), ('3', 3), ('5', 5), ('8', 8), ('dimx2', c.dim * 2), ('2_31', 1 << 31),
                   ('max', 0xFFFFFFFF)):
        put(f'head_count_{tag}', A + 'head_count', v,
            f'head_count is {v} for {c.dim} dimensions and 2 key heads')
    for tag, v in (('0', 0), ('3', 3), ('8', 8), ('4', 4), ('max', 0xFFFFFFFF)):
        put(f'head_count_kv_{tag}', A + 'head_count_kv', v, f'head_count_kv is {v} with head_count 4 and weights for 2')
    for tag, v in (('0', 0), ('255', 255), ('2_31', 1 << 31), ('max', 0xFFFFFFFF)):
        put(f'feed_forward_length_{tag}', L + 'feed_forward_length', v, f'feed_forward_length is {v}')
    hd = c.dim // 4
    for tag, v in (('0', 0), ('odd', hd - 1), ('1', 1), ('too_big', hd + 2), ('double', 2 * hd), ('2_31', 1 << 31),
                   ('max', 0xFFFFFFFF)):
        put(f'rope_dim_{tag}', L + 'rope.dimension_count', v, f'rope.dimension_count is {v} for heads of {hd}')
    put('context_length_0', L + 'context_length', 0, 'context_length is 0')
    put('context_length_max', L + 'context_length', 0xFFFFFFFF,
        'context_length is 2^32-1: no cache may be sized from it unasked', verdict='either')
    put('context_length_2_31', L + 'context_length', 1 << 31, 'context_length is 2^31', verdict='either')
    nan, inf = float('nan'), float('inf')
    for tag, v in (('nan', nan), ('inf', inf), ('minus_inf', -inf), ('negative', -1e-5)):
        put(f'eps_{tag}', A + 'layer_norm_rms_epsilon', v, f'layer_norm_rms_epsilon is {v}', vt=F32)
    put('eps_0', A + 'layer_norm_rms_epsilon', 0.0, 'layer_norm_rms_epsilon is 0', vt=F32, verdict='either')
    put('eps_huge', A + 'layer_norm_rms_epsilon', 3e38, 'layer_norm_rms_epsilon is 3e38', vt=F32, verdict='either')
    put('eps_denormal', A + 'layer_norm_rms_epsilon', 1e-45, 'layer_norm_rms_epsilon is denormal', vt=F32,
        verdict='either')
    for tag, v in (('0', 0.0), ('nan', nan), ('inf', inf), ('negative', -10000.0)):
        put(f'freq_base_{tag}', L + 'rope.freq_base', v, f'rope.freq_base is {v}', vt=F32)
    for tag, v in (('nan', nan), ('inf', inf), ('negative', -4.0)):
        m = c.m()
        m.add(L + 'rope.scaling.type', STR, 'linear')
        m.add(L + 'rope.scaling.factor', F32, v)
        c.reject(f'hparam_rope_factor_{tag}', m, 'plan', f'rope.scaling.factor is {v}',
                 'kv[llama.rope.scaling.factor].value')
    m = c.m()
    m.add(L + 'rope.scaling.type', STR, 'linear')
    m.add(L + 'rope.scaling.factor', F32, 0.0)
    c.either('hparam_rope_factor_0', m, 'plan', 'rope.scaling.factor is 0 (upstream reads it as unset)')
    m = c.m()
    m.add(L + 'rope.scaling.type', STR, 'quadratic')
    c.reject('hparam_rope_type_unknown', m, 'plan', 'rope.scaling.type is unknown', 'kv[llama.rope.scaling.type].value')
    for key in ('key_length', 'value_length'):
        for v in (0, hd * 2, 0xFFFFFFFF):
            put(f'{key}_{v:#x}', A + key, v, f'attention.{key} is {v} for weights of {hd}')
    m = c.m()
    m.put('llama.vocab_size', U32, 0)
    m.put('tokenizer.ggml.tokens', ARR, [], STR)
    m.put('tokenizer.ggml.scores', ARR, [], F32)
    m.put('tokenizer.ggml.token_type', ARR, [], I32)
    c.reject('hparam_vocab_0', m, 'plan', 'the vocabulary is empty', 'kv[tokenizer.ggml.tokens].alen')
    for v in (0, 63, 65, 1 << 31):
        put(f'vocab_size_{v:#x}', 'llama.vocab_size', v, f'vocab_size is {v} with 64 tokens', verdict='either')
    m = c.m()
    m.add('llama.expert_count', U32, 8)
    m.add('llama.expert_used_count', U32, 2)
    c.reject('hparam_experts', m, 'plan', '8 experts and no expert tensors', 'kv[llama.expert_count].value')
    m = c.m()
    m.add('llama.expert_count', U32, 2)
    m.add('llama.expert_used_count', U32, 3)
    c.reject('hparam_experts_used', m, 'plan', '3 of 2 experts used', 'kv[llama.expert_count].value')
    m = c.m()
    m.add('llama.expert_count', U32, 0xFFFFFFFF)
    m.add('llama.expert_used_count', U32, 0xFFFFFFFF)
    c.reject('hparam_experts_max', m, 'plan', '2^32-1 experts', 'kv[llama.expert_count].value')
    m = c.m()
    m.add('split.no', U16, 0)
    m.add('split.count', U16, 2)
    m.add('split.tensors.count', I32, 42)
    c.reject('hparam_split', m, 'plan', 'the first part of a two-part model, alone', 'kv[split.count].value')
    m = c.m()
    m.add('split.no', U16, 7)
    m.add('split.count', U16, 0xFFFF)
    m.add('split.tensors.count', I32, -1)
    c.reject('hparam_split_absurd', m, 'plan', 'part 7 of 65535', 'kv[split.count].value')
    for tag, dims in (('long', [hd]), ('short', [1]), ('matrix', [hd // 2, 2])):
        m = c.m()
        m.add_t('rope_freqs.weight', dims, 'F32', struct.pack('<f', 1.0) * (dims[0] * (dims[1:] or [1])[0]))
        c.reject(f'shape_rope_freqs_{tag}', m, 'plan', f'rope_freqs.weight is {dims}, not [{hd // 2}]',
                 'tensor[rope_freqs.weight].n_dims', what='rope_freqs.weight')
    for tag, v in (('zero', 0.0), ('nan', nan)):
        m = c.m()
        m.add_t('rope_freqs.weight', [hd // 2], 'F32', struct.pack('<f', v) * (hd // 2))
        c.either(f'data_rope_freqs_{tag}', m, 'load', f'every rope_freqs.weight is {v}: a divisor')
    for tag, arch in (('empty', ''), ('upper', 'LLaMA'), ('long', 'a' * 100000),
                      ('format', '%s%s%s%n'), ('nul', 'llama\0'), ('path', '../../llama')):
        m = c.m()
        m.put('general.architecture', STR, arch)
        c.reject(f'hparam_arch_{tag}', m, 'plan', f'general.architecture is {arch[:20]!r}',
                 'kv[general.architecture].value')


def gen_missing_tensors(c):
    names = [t.name.decode() for t in c.base.tensors]
    for name in names:
        if name == 'output.weight':
            continue            # tied embeddings: see gen_valid
        m = c.m()
        m.drop_t(name)
        c.reject('missing_t_' + name.replace('.weight', '').replace('.', '_'), m, 'plan',
                 f'{name} is missing', what=name)
    for name in ('token_embd.weight', 'blk.0.attn_q.weight', 'blk.1.ffn_down.weight'):
        m = c.m()
        m.t(name).name = name.replace('.weight', '.weighs').encode()
        c.reject('misnamed_t_' + name.replace('.weight', '').replace('.', '_'), m, 'plan',
                 f'{name} is called .weighs', what=name)
    m = c.m()
    m.tensors = [t for t in m.tensors if not t.name.startswith(b'blk.1.')]
    c.reject('missing_t_block_1', m, 'plan', 'every tensor of block 1 is missing', what='blk.1.')
    m = c.m()
    for t in m.tensors:
        if t.name.startswith(b'blk.1.'):
            t.name = b'blk.7.' + t.name[6:]
    c.reject('missing_t_block_7', m, 'plan', 'block 1 is called block 7', what='blk.1.')
    m = c.m()
    for t in m.tensors:
        t.name = t.name.upper()
    c.reject('missing_t_upper', m, 'plan', 'every tensor name is in upper case', what='token_embd.weight')


def gen_shapes(c):
    kinds = ['token_embd.weight', 'output_norm.weight', 'output.weight'] + \
            ['blk.1.' + n + '.weight' for n in ('attn_norm', 'attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_norm',
                                               'ffn_gate', 'ffn_up', 'ffn_down')]
    rng = random.Random(77)

    def reshape(m, name, dims):
        t = m.t(name)
        tn = TT_BY_ID[t.type][0]
        if dims[0] % TT[tn][1]:
            tn = 'F16'
            t.type = TT[tn][0]
        t.dims, t.data = dims, data_for(rng, tn, dims)

    for name in kinds:
        short = name.replace('.weight', '').replace('.', '_')
        d = c.base.t(name).dims
        variants = [('wide', [d[0] * 2] + d[1:])]
        if len(d) == 2:
            variants += [('row_more', [d[0], d[1] + 1]), ('row_less', [d[0], d[1] - 1]), ('one_row', [d[0], 1]),
                         ('flat', [d[0] * d[1]])]
            if d[0] != d[1]:
                variants.append(('transposed', [d[1], d[0]]))
            variants.append(('3d', [d[0], d[1] // 2, 2]))
        else:
            variants += [('one', [1]), ('less', [d[0] - 32]), ('matrix', [d[0], 2])]
        for tag, dims in variants:
            m = c.m()
            reshape(m, name, dims)
            c.reject(f'shape_{short}_{tag}', m, 'plan', f'{name} is {dims}, not {d}',
                     f'tensor[{name}].n_dims', what=name)


def gen_tokenizer(c):
    P = 'tokenizer.ggml.'

    def mod(tag, why, key=None, fn=None, verdict='reject', base=None, stage='plan'):
        m = (base or c.base).clone()
        fn(m)
        getattr(c, verdict)(f'tok_{tag}', m, stage, why, None, what=P + key if key else None)

    def setlen(key, n):
        def fn(m):
            v = m.kv(P + key).val
            m.kv(P + key).val = (v * (n // len(v) + 1))[:n]
        return fn

    for key in ('scores', 'token_type'):
        for n in (0, 1, 63, 65, 1000):
            mod(f'{key}_{n}', f'{P}{key} has {n} elements for 64 tokens', key, setlen(key, n))

    def tokens_more(m):
        m.kv(P + 'tokens').val.append('extra')
        m.kv(P + 'scores').val.append(-99.0)
        m.kv(P + 'token_type').val.append(1)

    def tokens_less(m):
        for k in ('tokens', 'scores', 'token_type'):
            m.kv(P + k).val.pop()
    mod('tokens_65', '65 tokens (and scores and types) for 64 rows of token_embd.weight', 'tokens', tokens_more)
    mod('tokens_63', '63 tokens (and scores and types) for 64 rows of token_embd.weight', 'tokens', tokens_less)
    for tag, v in (('7', 7), ('99', 99), ('minus1', -1), ('i32min', -(1 << 31)), ('i32max', (1 << 31) - 1)):
        def fn(m, v=v):
            m.kv(P + 'token_type').val[20] = v
        mod(f'type_{tag}', f'a token has type {v} (1 to 6 exist)', 'token_type', fn)

    def fn(m):
        m.kv(P + 'token_type').val = [0] * 64
    mod('type_all_0', 'every token has type 0 (undefined)', 'token_type', fn, 'either')

    def fn(m):
        m.kv(P + 'token_type').val = [3] * 64
    mod('type_all_control', 'every token is a control token: nothing can be written', 'token_type', fn, 'either')

    def fn(m):
        m.kv(P + 'token_type').val = [6] * 64
    mod('type_all_byte', 'every token is a byte token, whatever it reads', 'token_type', fn)
    for key in ('bos', 'eos', 'unknown', 'padding', 'separator'):
        for tag, v in (('64', 64), ('max', 0xFFFFFFFF), ('i32min', 1 << 31)):
            def fn(m, v=v, key=key):
                m.put(f'{P}{key}_token_id', U32, v)
            known = key in ('bos', 'eos')       # the others are seen out of range in the wild
            mod(f'{key}_{tag}', f'{key}_token_id is {v} with 64 tokens' + ('' if known else ': never an index'),
                f'{key}_token_id', fn, 'reject' if known else 'either')
    for tag, n, kind in (('1_spm', 1, 'llama'), ('3_bpe', 3, 'gpt2')):
        m = base_model(c.dim, seed=20, vocab=(['a', 'b', 'c'][:n], [0.0] * n, [1] * n))
        for k in ('bos', 'eos', 'unknown'):
            m.drop(f'{P}{k}_token_id')
        m.put(P + 'model', STR, kind)
        if kind == 'gpt2':
            m.put(P + 'merges', ARR, [], STR)
        c.either(f'tok_tiny_{tag}', m, 'plan',
                 f'{n} token(s) and no special ids: built-in default ids are out of range (llama.cpp pull 25508)')

    def fn(m):
        m.put(P + 'suppress_tokens', ARR, [1] * 64, U8)
    mod('suppress_u8', 'suppress_tokens has 1-byte elements (llama.cpp issue 24888)', 'suppress_tokens', fn, 'either')

    def fn(m):
        m.put(P + 'suppress_tokens', ARR, [-1, 64, 1 << 30], I32)
    mod('suppress_range', 'suppress_tokens holds ids that do not exist', 'suppress_tokens', fn, 'either')

    def fn(m):
        m.drop(P + 'bos_token_id')
        m.put(P + 'add_bos_token', BOOL, 1)
    mod('no_bos_id', 'add_bos_token is true and there is no bos_token_id', 'bos_token_id', fn, 'either')
    for tag, s in (('minus1', '<0x-1>'), ('minus_f', '<0x-f>'), ('zz', '<0xZZ>'), ('space', '<0x 1>'),
                   ('plus', '<0x+1>'),
                   ('short', '<0x>'), ('open', '<0x'), ('empty', ''), ('long', '<0x0000000041>'), ('text', 'hello')):
        def fn(m, s=s):
            m.kv(P + 'tokens').val[4] = s
        mod(f'byte_token_{tag}', f'a byte token reads {s!r} (llama.cpp pull 25969)', 'tokens', fn)

    def fn(m):
        m.kv(P + 'tokens').val[4] = '<0x00>'
    mod('byte_token_twice', 'two byte tokens for byte 0', 'tokens', fn, 'either')

    def fn(m):
        for i in range(3, 11):
            m.kv(P + 'token_type').val[i] = 1
    mod('no_byte_tokens', 'a sentencepiece vocabulary without byte tokens', 'tokens', fn, 'either')

    def fn(m):
        m.kv(P + 'tokens').val[20] = m.kv(P + 'tokens').val[21]
    mod('duplicate', 'two tokens read the same (llama.cpp issue 24885)', 'tokens', fn, 'either')

    def fn(m):
        m.kv(P + 'tokens').val = ['a'] * 64
        m.kv(P + 'token_type').val = [1] * 64
    mod('all_same', 'all 64 tokens read the same', 'tokens', fn, 'either')

    def fn(m):
        m.kv(P + 'tokens').val = [''] * 64
        m.kv(P + 'token_type').val = [1] * 64
    mod('all_empty', 'all 64 tokens are empty: a tokenizer may loop for ever', 'tokens', fn, 'either')

    def fn(m):
        m.kv(P + 'tokens').val[20] = ''
    mod('one_empty', 'one token is empty', 'tokens', fn, 'either')
    for tag, s in (('ff', b'\xff'), ('truncated', b'\xe2\x96'), ('overlong', b'\xc0\x80'),
                   ('surrogate', b'\xed\xa0\x80'),
                   ('too_big', b'\xf7\xbf\xbf\xbf'), ('continuation', b'\x80\x80\x80'), ('nul', b'a\0b')):
        def fn(m, s=s):
            m.kv(P + 'tokens').val[20] = s
        mod(f'utf8_{tag}', f'a token is not UTF-8: {s!r}' if tag != 'nul' else 'a token holds a NUL', 'tokens', fn,
            'either')

    def fn(m):
        m.kv(P + 'tokens').val[20] = 'x' * 1000000
    mod('token_1mb', 'a token of a million bytes', 'tokens', fn, 'either')
    for tag, v in (('nan', float('nan')), ('inf', float('inf')), ('minus_inf', float('-inf'))):
        def fn(m, v=v):
            m.kv(P + 'scores').val = [v] * 64
        mod(f'scores_{tag}', f'every score is {v}: comparisons must still be a strict order', 'scores', fn, 'either')
    for tag, s in (('unknown', 'nonesuch'), ('empty', ''), ('none', 'no_vocab')):
        def fn(m, s=s):
            m.put(P + 'model', STR, s)
        mod(f'model_{tag}', f'tokenizer.ggml.model is {s!r}', 'model', fn)

    # byte-pair tokenizer
    bpe = bpe_model(c.base)
    for tag, i, s in (('no_space', 3, 'ab'), ('empty', 0, ''), ('space', 2, ' '), ('leading', 4, ' th'),
                      ('trailing', 4, 'th '),
                      ('three', 5, 'a b c'), ('unknown', 6, 'zz zz'), ('not_utf8', 3, b'\xff \xfe'),
                      ('nul', 3, b'a\0 b')):
        def fn(m, i=i, s=s):
            m.kv(P + 'merges').val[i] = s
        # merges that make no token are seen in the wild, with pruned vocabularies
        mod(f'merge_{tag}', f'a merge reads {s!r}', 'merges', fn,
            'either' if tag in ('unknown', 'not_utf8', 'nul') else 'reject', base=bpe)

    def fn(m):
        m.drop(P + 'merges')
    mod('merges_missing', 'a gpt2 tokenizer without merges', 'merges', fn, base=bpe)

    def fn(m):
        m.put(P + 'merges', ARR, [1, 2, 3], U32)
    mod('merges_u32', 'the merges are numbers', 'merges', fn, base=bpe)

    def fn(m):
        m.put(P + 'merges', STR, 'a b')
    mod('merges_str', 'the merges are one string', 'merges', fn, base=bpe)

    def fn(m):
        m.put(P + 'merges', ARR, [], STR)
    mod('merges_empty', 'an empty list of merges', 'merges', fn, 'either', base=bpe)

    def fn(m):
        m.kv(P + 'merges').val = m.kv(P + 'merges').val * 3
    mod('merges_repeated', 'every merge is there three times', 'merges', fn, 'either', base=bpe)

    def fn(m):
        m.kv(P + 'merges').val = ['a b'] * 200000
    mod('merges_200k', '200000 equal merges', 'merges', fn, 'either', base=bpe)

    def fn(m):
        m.put(P + 'pre', STR, 'nonesuch')
    mod('pre_unknown', 'tokenizer.ggml.pre is unknown', 'pre', fn, 'either', base=bpe)

    def fn(m):
        m.put(P + 'pre', U32, 3)
    mod('pre_u32', 'tokenizer.ggml.pre is a number', 'pre', fn, 'either', base=bpe)


def gen_templates(c):
    T = 'tokenizer.chat_template'
    for tag, s, why in (
            ('nested_parens', '{{ ' + '(' * 50000 + '1' + ')' * 50000 + ' }}', '50000 nested parentheses'),
            ('nested_lists', '{{ ' + '[' * 50000 + ']' * 50000 + ' }}', '50000 nested lists'),
            ('nested_if', '{% if 1 %}' * 20000 + '{% endif %}' * 20000, '20000 nested ifs'),
            ('recursive_macro', '{% macro x() %}{{ x() }}{% endmacro %}{{ x() }}', 'a macro that calls itself'),
            ('long_loop', '{% for i in range(1000000000) %}a{% endfor %}', 'a loop of 10^9 rounds'),
            ('nested_loops', '{% for i in range(99999) %}' * 6 + 'a' + '{% endfor %}' * 6, 'six nested loops'),
            ('doubling', '{% set s = "aaaaaaaa" %}' + '{% set s = s ~ s %}' * 60 + '{{ s }}',
             'a string doubled 60 times'),
            ('multiply', '{{ "a" * 99999999999 }}', 'a string times 10^11'),
            ('divide', '{{ 1 // 0 }}{{ 1 % 0 }}{{ 1 / 0 }}', 'division by zero'),
            ('int_min', '{{ -9223372036854775808 // -1 }}{{ (-9223372036854775807 - 1) % -1 }}',
             'INT64_MIN divided by -1'),
            ('unclosed', '{% if 1 %}{{ messages', 'unclosed tags'),
            ('lone_else', '{% else %}{% endif %}{{', 'an else without an if'),
            ('ssti', "{{ ''.__class__.__mro__[1].__subclasses__() }}", 'a Python sandbox escape (CVE-2024-34359)'),
            ('not_utf8', b'{{ \xff\xfe }}', 'not UTF-8'), ('nul', b'{{ messages }}\0{% if', 'holds a NUL'),
            ('empty', '', 'empty'), ('8mb', 'x' * (8 << 20), 'eight megabytes of text'),
            ('pluses', '{{ 1' + '+1' * 100000 + ' }}', 'a sum of 100000 terms'),
            ('attributes', '{{ a' + '.a' * 100000 + ' }}', 'a chain of 100000 attributes')):
        m = c.m()
        m.put(T, STR, s)
        c.either(f'template_{tag}', m, 'open', f'chat template: {why}')
    m = c.m()
    m.put(T, U32, 1)
    c.either('template_u32', m, 'open', 'chat template: a number')
    m = c.m()
    m.put(T, ARR, ['a', 'b'], STR)
    c.either('template_arr', m, 'open', 'chat template: an array')


def gen_truncation(c):
    b, fm = c.base_bytes, c.fmap
    start = fm['data'][0]
    cuts = {}
    for label, (off, n) in fm.items():
        if 0 < off < len(b):
            cuts.setdefault(off, 'before ' + label)
        if 0 < off + n < len(b):
            cuts[off + n] = 'after ' + label
    for off in (4, 8, start):       # these have files of their own
        del cuts[off]
    for off, what in sorted(cuts.items()):
        c.reject(f'trunc/at_{off:07d}', b[:off], 'open',
                 f'cut {what}'.replace('\0', '?')[:120], at=off)
    rng = random.Random(0xC0FFEE)
    picks = set()
    while len(picks) < 64:      # half in the header, half anywhere
        n = rng.randrange(1, start if len(picks) < 32 else len(b))
        if n not in cuts:
            picks.add(n)
    for off in sorted(picks):
        c.reject(f'trunc/random_{off:07d}', b[:off], 'open', 'cut at a random byte', at=off)
    c.reject('trunc/minus_1', b[:-1], 'open', 'cut one byte short', at=len(b) - 1)
    hole = bytearray(b)
    hole[start:start + 4096] = bytes(4096)
    c.either('trunc/hole_data', bytes(hole), 'load',
             '4096 bytes at the start of the data are zero (a hole left by a broken download)')
    hole = bytearray(b)
    hole[512:1536] = bytes(1024)
    c.reject('trunc/hole_header', bytes(hole), 'open', '1024 bytes of the header are zero', at=512)


def gen_files(c):
    c.reject('file_empty', b'', 'open', 'an empty file', at=0)
    c.reject('file_3_bytes', b'GGU', 'open', 'three bytes', at=3)
    c.reject('file_4_bytes', b'GGUF', 'open', 'only the magic', at=4)
    c.reject('file_8_bytes', c.base_bytes[:8], 'open', 'only magic and version', at=8)
    c.reject('file_23_bytes', c.base_bytes[:23], 'open', 'one byte short of a header', at=23)
    c.reject('file_zeros', bytes(4096), 'open', '4096 zero bytes', at=0)
    c.reject('file_ones', b'\xff' * 4096, 'open', '4096 bytes of 0xFF', at=0)
    c.reject('file_magic_zeros', b'GGUF' + bytes(4092), 'open', 'the magic, then zeros: version 0', at=4)
    c.reject('file_magic_ones', b'GGUF' + b'\xff' * 4092, 'open', 'the magic, then 0xFF', at=4)
    c.reject('file_header_ones', b'GGUF\3\0\0\0' + b'\xff' * 4088, 'open', 'magic and version, then 0xFF', at=8)
    c.reject('file_html', b'<!DOCTYPE html><html><head><title>Sign in</title></head></html>\n', 'open',
             'a web page saved as a model', at=0)
    c.reject('file_lfs_pointer', b'version https://git-lfs.github.com/spec/v1\noid sha256:' + b'0' * 64 + b'\nsize 4\n',
             'open', 'a Git LFS pointer', at=0)
    c.reject('file_safetensors', struct.pack('<Q', 2) + b'{}' + bytes(64), 'open', 'a safetensors file', at=0)
    c.reject('file_ggjt', b'tjgg' + struct.pack('<I', 3) + bytes(256), 'open', 'an old GGJT file', at=0)
    rng = random.Random(4242)
    for i in range(8):
        c.reject(f'random_{i:02d}', rng.randbytes(64 << i), 'open', f'{64 << i} random bytes', at=0)
    for i in range(8):
        c.reject(f'random_{i + 8:02d}', b'GGUF' + struct.pack('<I', 3) + rng.randbytes(64 << i), 'open',
                 f'magic, version 3 and {64 << i} random bytes')
    for i in range(8):
        c.reject(f'random_{i + 16:02d}', b'GGUF' + struct.pack('<IQQ', 3, 5, 5) + rng.randbytes(64 << i), 'open',
                 f'a small header and {64 << i} random bytes')


def gen_data(c):
    rng = random.Random(99)
    h = {'nan': struct.pack('<H', 0x7E00), 'inf': struct.pack('<H', 0x7C00), 'minus_inf': struct.pack('<H', 0xFC00),
         'snan': struct.pack('<H', 0x7C01), 'max': struct.pack('<H', 0x7BFF)}

    def patch(tag, name, fn, why):
        m = c.m()
        t = m.t(name)
        d = bytearray(t.data)
        fn(d)
        t.data = bytes(d)
        c.either(f'data_{tag}', m, 'load', why + ': an error if data is checked, else no crash',
                 f'data[{name}]', what=name)

    q8 = 'output.weight'
    for k, v in h.items():
        patch(f'q8_0_scale_{k}', q8, lambda d, v=v: d.__setitem__(slice(0, 2), v), f'a Q8_0 scale is {k}')
        patch(f'q4_k_d_{k}', 'blk.0.ffn_down.weight', lambda d, v=v: d.__setitem__(slice(0, 2), v),
              f'a Q4_K scale is {k}')
        patch(f'q4_k_dmin_{k}', 'blk.0.ffn_down.weight', lambda d, v=v: d.__setitem__(slice(2, 4), v),
              f'a Q4_K minimum scale is {k}')
    for k, v in (('nan', float('nan')), ('inf', float('inf')), ('max', 3.4e38)):
        patch(f'f32_norm_{k}', 'output_norm.weight', lambda d, v=v: struct.pack_into('<f', d, 0, v),
              f'an F32 norm is {k}')
    for k in ('nan', 'inf'):
        patch(f'f16_embd_{k}', 'token_embd.weight',
              lambda d, k=k: d.__setitem__(slice(0, len(d)), h[k] * (len(d) // 2)),
              f'every embedding is {k}')

    def ff(d):
        d[:] = b'\xff' * len(d)
    patch('all_ff', q8, ff, 'every byte of output.weight is 0xFF')

    def zero(d):
        d[:] = bytes(len(d))
    patch('norm_zero', 'output_norm.weight', zero, 'output_norm.weight is all zeros: every logit is equal')
    m = c.m()
    for t in m.tensors:
        t.data = rng.randbytes(len(t.data))
    c.either('data_all_random', m, 'load', 'every tensor is random bytes, with NaN and infinity among them')
    m = c.m()
    for t in m.tensors:
        t.data = bytes(len(t.data))
    c.either('data_all_zero', m, 'load', 'every tensor is zero')
    m = c.m()
    m.pad_byte = b'\xa5'
    c.either('data_padding_not_zero', m, 'load', 'padding bytes are 0xA5 (the format says 0)')


def gen_valid(c):
    L = 'llama.'

    def ok(name, m, stage, why, then='-'):
        c.accept(name, m, stage, why, then)

    ok('base', c.m(), 'load', 'the base model')
    m = c.m()
    m.version = 2
    ok('ok_v2', m, 'load', 'version 2')
    for a in (8, 16, 64, 4096, 65536):
        m = c.m()
        m.add('general.alignment', U32, a)
        m.align = a
        ok(f'ok_align_{a}', m, 'load', f'alignment {a}')
    m = c.m()
    m.add('general.alignment', U32, 32)
    ok('ok_align_32_explicit', m, 'load', 'alignment 32, stated')
    m = c.m()
    for vt in range(13):
        n = VT_NAMES[vt]
        if vt == STR:
            m.add(f'test.{n}', STR, 'h\u00e9llo \u2603 \U0001f600')
        elif vt != ARR:
            lo, hi = {U8: (0, 255), I8: (-128, 127), U16: (0, 65535), I16: (-32768, 32767), U32: (0, 0xFFFFFFFF),
                      I32: (-(1 << 31), (1 << 31) - 1), U64: (0, M64), I64: (-(1 << 63), (1 << 63) - 1), BOOL: (0, 1),
                      F32: (-1.5, 1.5), F64: (-1e300, 1e300)}[vt]
            m.add(f'test.{n}.low', vt, lo)
            m.add(f'test.{n}.high', vt, hi)
            m.add(f'test.{n}.array', ARR, [lo, hi, lo], vt)
            m.add(f'test.{n}.empty', ARR, [], vt)
    m.add('test.str.array', ARR, ['', 'a', '\u00fc' * 100], STR)
    ok('ok_unknown_keys', m, 'load', 'unknown keys of every type, and arrays of every type but arrays')
    m = c.m()
    m.add('test.f32.nan', F32, float('nan'))
    m.add('test.f64.inf', F64, float('-inf'))
    ok('ok_unknown_nan', m, 'load', 'an unknown key is NaN')
    m = c.m()
    m.add('test.empty', STR, '')
    m.add('test.empties', ARR, [''] * 10, STR)
    m.add('test.none', ARR, [], STR)
    m.put('general.name', STR, '')
    ok('ok_empty_strings', m, 'load', 'empty strings, a list of them, an empty list')
    m = c.m()
    m.tensors = []
    ok('ok_zero_tensors', m, 'open', 'a vocabulary file: no tensors', 'reject')
    ok('ok_header_only', b'GGUF' + struct.pack('<IQQ', 3, 0, 0), 'open', '24 bytes: no keys, no tensors', 'reject')
    ok('ok_header_only_tail', b'GGUF' + struct.pack('<IQQ', 3, 0, 0) + b'\xff' * 100, 'open',
       'no keys, no tensors, 100 bytes of something', 'reject')
    m = c.m()
    m.put('general.architecture', STR, 'nonesuch')
    ok('ok_unknown_arch', m, 'open', 'an unknown architecture, for the reading functions only', 'reject')
    rng = random.Random(7)
    m = c.m()
    rng.shuffle(m.tensors)
    ok('ok_tensors_shuffled', m, 'load', 'tensors in another order, data in the same order as the table')
    m = c.m()
    m.order = list(range(len(m.tensors)))[::-1]
    ok('ok_data_reversed', m, 'load', 'data in the reverse order of the table')
    m = c.m()
    m.order = list(range(len(m.tensors)))
    rng.shuffle(m.order)
    ok('ok_data_shuffled', m, 'load', 'data in another order than the table')
    m = c.m()
    for t in m.tensors:
        t.gap = 100
    ok('ok_gaps', m, 'load', 'gaps between the tensors')
    m = c.m()
    m.lead_gap = 4096
    ok('ok_gap_first', m, 'load', 'the first tensor is at offset 4096')
    m = c.m()
    for t in m.tensors:
        t.align = 4096
    ok('ok_page_aligned', m, 'load', 'every tensor on a page of its own, alignment 32')
    for n in (1, 31, 5000):
        m = c.m()
        m.tail = b'\xee' * n
        ok(f'ok_tail_{n}', m, 'load', f'{n} bytes after the last tensor')
    m = c.m()
    m.tensors.append(m.tensors.pop(m.tensors.index(m.t('output.weight'))))
    t = m.add_t('zz.odd', [3], 'F32', struct.pack('<3f', 1, 2, 3))
    m.pad_last = False
    ok('ok_no_last_padding', m, 'open', 'the last tensor is 12 bytes and not padded', 'either')
    m = c.m()
    m.add_t('extra.4d', [3, 5, 7, 2], 'F16')
    ok('ok_4d', m, 'open', 'an unused tensor of four dimensions', 'either')
    m = c.m()
    m.t('blk.0.attn_q.weight').dims += [1, 1]
    m.t('output_norm.weight').dims += [1]
    ok('ok_trailing_ones', m, 'load', 'required tensors with trailing dimensions of 1')
    m = c.m()
    for i, tn in enumerate(TT):
        m.add_t(f'extra.{tn.lower()}', [TT[tn][1] * 2, 3], tn)
    ok('ok_every_type', m, 'open', 'an unused tensor of every type', 'either')
    for n in (63, 64):
        m = c.m()
        m.add_t('n' * n, [8], 'F32')
        ok(f'ok_name_{n}', m, 'open', f'a tensor name of {n} bytes', 'either')
    m = c.m()
    m.add_t('\u043c\u043e\u0434\u0435\u043b\u044c.\u6a21\u578b', [8], 'F32')
    m.put('general.name', STR, '\u6a21\u578b \U0001f999')
    ok('ok_utf8_names', m, 'open', 'a UTF-8 tensor name and model name', 'either')
    m = c.m()
    m.add('k' * 65535, U32, 1)
    ok('ok_key_65535', m, 'load', 'a key of 65535 bytes')
    m = c.m()
    m.kvs.reverse()
    ok('ok_keys_reversed', m, 'load', 'keys in reverse order: the architecture is last')
    m = c.m()
    rng.shuffle(m.kvs)
    ok('ok_keys_shuffled', m, 'load', 'keys in random order')
    m = c.m()
    m.add('general.alignment', U32, 64)
    m.align = 64
    m.kvs.insert(0, m.kvs.pop())
    ok('ok_align_first', m, 'load', 'general.alignment is the first key')
    for v in (0, 1):
        m = c.m()
        for k in ('add_bos_token', 'add_eos_token', 'add_space_prefix'):
            m.put('tokenizer.ggml.' + k, BOOL, v)
        ok(f'ok_bools_{v}', m, 'load', f'all bools are {v}')
    m = c.m()
    for k in m.kvs:
        if k.key.startswith(L.encode()) and k.vt == U32:
            k.vt = U64
    ok('ok_u64_hparams', m, 'load', 'hyper-parameters as u64 (the format asks readers to take both)')
    m = c.m()
    for k in m.kvs:
        if k.key.startswith(L.encode()) and k.vt == U32 and k.val < 65536:
            k.vt = U16
    c.either('ok_u16_hparams', m, 'plan', 'hyper-parameters as u16')
    m = c.m()
    m.drop_t('output.weight')
    ok('ok_tied', m, 'load', 'no output.weight: the embeddings serve')
    m = c.m()
    m.drop('llama.vocab_size')
    ok('ok_no_vocab_size', m, 'load', 'no llama.vocab_size')
    m = c.m()
    m.drop('llama.rope.dimension_count')
    ok('ok_no_rope_dim', m, 'load', 'no rope.dimension_count: the head size')
    m = c.m()
    m.drop('llama.rope.freq_base')
    ok('ok_no_freq_base', m, 'load', 'no rope.freq_base: 10000')
    m = c.m()
    for k in ('general.type', 'general.name', 'general.file_type', 'tokenizer.ggml.pre', 'tokenizer.ggml.add_bos_token',
              'tokenizer.ggml.add_eos_token', 'tokenizer.ggml.add_space_prefix'):
        m.drop(k)
    ok('ok_minimal_keys', m, 'load', 'no optional keys')
    m = c.m()
    m.drop('tokenizer.ggml.scores')
    ok('ok_no_scores', m, 'load', 'no scores: all tokens are equal')
    m = c.m()
    m.drop('tokenizer.ggml.token_type')
    c.either('ok_no_token_type', m, 'load',
             'no token types: all tokens are normal (legal; llama.cpp then has no newline token)')
    m = c.m()
    m.add_t('rope_freqs.weight', [c.dim // 8], 'F32',
            struct.pack(f'<{c.dim // 8}f', *[1.0 + i / 4 for i in range(c.dim // 8)]))
    ok('ok_rope_freqs', m, 'load', 'rope_freqs.weight is there, as in Llama 3.1')
    m = c.m()
    m.add_t('blk.0.attn_q.bias', [c.dim], 'F32', struct.pack('<f', 0.01) * c.dim)
    ok('ok_bias', m, 'open', 'an attention bias: to be used or refused, not ignored', 'either')
    ok('ok_mha', base_model(c.dim, n_kv=4, seed=3), 'load', 'as many key heads as heads')
    m = base_model(c.dim, n_kv=4, seed=3)
    m.drop('llama.attention.head_count_kv')
    ok('ok_mha_no_kv', m, 'load', 'no head_count_kv: head_count')
    ok('ok_mqa', base_model(c.dim, n_head=2, n_kv=1, seed=4), 'load', 'one key head')
    ok('ok_one_layer', base_model(c.dim, n_layer=1, seed=5), 'load', 'one layer')
    ok('ok_dim_256_q4_k', base_model(256, seed=6, big_quant=True), 'load', 'dim 256, Q4_K throughout, head size 64')
    ok('ok_dim_64', base_model(64, seed=8), 'load', 'dim 64, head size 16')
    ok('ok_spm_256_bytes', base_model(c.dim, seed=9, vocab=spm_vocab(256)), 'load',
       'a sentencepiece vocabulary with all 256 bytes')
    ok('ok_bpe', bpe_model(c.base), 'load', 'a GPT-2 style tokenizer')
    toks, scores, types = spm_vocab(256)
    while len(toks) < 32000:
        toks.append(f'\u2581w{len(toks)}')
        scores.append(-float(len(toks)))
        types.append(1)
    ok('ok_vocab_32000', base_model(c.dim, seed=10, vocab=(toks, scores, types), tied=True, embd_type='Q8_0'), 'load',
       '32000 tokens')
    m = c.m()
    m.tensors = []
    n = 256000
    m.put('tokenizer.ggml.tokens', ARR, [f't{i}' for i in range(n)], STR)
    m.put('tokenizer.ggml.scores', ARR, [0.0] * n, F32)
    m.put('tokenizer.ggml.token_type', ARR, [1] * n, I32)
    ok('ok_vocab_256k', m, 'open', '256000 tokens, no tensors', 'reject')
    m = c.m()
    for i in range(20000):
        m.add(f'test.k{i}', U8, i & 255)
    ok('ok_keys_20k', m, 'load', '20000 unknown keys: reading must not be quadratic')
    m = c.m()
    m.tensors = []
    for i in range(100000):
        m.add(f'test.k{i}', U8, i & 255)
    ok('ok_keys_100k', m, 'open', '100000 keys, no tensors: reading must not be quadratic (2 s)', 'reject')
    m = c.m()
    for i in range(20000):
        m.add_t(f'extra.{i}', [1], 'F32')
    ok('ok_tensors_20k', m, 'open', '20000 unused tensors: reading must not be quadratic (2 s)', 'either')
    m = c.m()
    m.tensors = []
    m.add('test.empties', ARR, [''] * 500000, STR)
    ok('ok_strings_500k', m, 'open', '500000 empty strings: memory must stay a small multiple of the file', 'reject')
    m = c.m()
    m.add('test.big', STR, 'x' * (8 << 20))
    ok('ok_string_8mb', m, 'load', 'a string of 8 MiB')
    m = c.m()
    m.put('tokenizer.chat_template', STR, '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}')
    ok('ok_chat_template', m, 'load', 'a plain chat template')
    b = c.base_bytes
    c.write('ok path \u00fcn\u00ef c\u00f6d\u00e9 \u6a21\u578b.gguf', b, 'must_accept', 'load',
            'spaces and UTF-8 in the path')
    ok('d' * 200, b, 'load', 'a file name of 205 bytes')


def gen_special(c):
    """Things that are not regular files, made in OUT/special."""
    d = os.path.join(c.out, 'special')
    os.makedirs(d, exist_ok=True)

    def fresh(name, verdict, stage, why):
        c.row('special/' + name, verdict, stage, why)
        p = os.path.join(d, name)
        if os.path.isdir(p) and not os.path.islink(p):
            os.rmdir(p)
        elif os.path.lexists(p):
            os.remove(p)
        return p

    os.mkdir(fresh('directory.gguf', 'must_reject', 'open', 'a directory'))
    os.mkfifo(fresh('fifo.gguf', 'must_reject', 'open', 'a named pipe nobody writes to: opening it must not hang'))
    for name, to, verdict, why in (
            ('dangling.gguf', 'nowhere', 'must_reject', 'a symbolic link to nothing'),
            ('loop.gguf', 'loop.gguf', 'must_reject', 'a symbolic link to itself'),
            ('dev_null.gguf', '/dev/null', 'must_reject', 'a link to /dev/null'),
            ('dev_zero.gguf', '/dev/zero', 'must_reject', 'a link to /dev/zero, which never ends'),
            ('link.gguf', '../base.gguf', 'must_accept', 'a link to the base model')):
        os.symlink(to, fresh(name, verdict, 'load' if verdict == 'must_accept' else 'open', why))
    p = fresh('read_only.gguf', 'must_accept', 'load', 'the base model, read-only')
    with open(p, 'wb') as f:
        f.write(c.base_bytes)
    os.chmod(p, 0o444)
    fresh('no_such_file.gguf', 'must_reject', 'open', 'there is no such file')


# --------------------------------------------------------------------------

def check(c):
    """The manifest against the strict reader and planner; the number of disagreements."""
    bad = 0
    for r in c.rows:
        if r['file'].startswith('special/'):
            continue
        with open(os.path.join(c.out, r['file']), 'rb') as f:
            says = oracle(f.read())
        o, v, s = says.split(':')[0], r['verdict'], r['stage']
        if v == 'must_reject':
            good = o == 'open' if s == 'open' else o in ('open', 'plan')
        elif v == 'must_accept':
            good = o == 'ok' if s in ('plan', 'load') else o != 'open' and (r['then'] != 'reject' or o == 'plan')
        else:
            good = True
        if not good:
            bad += 1
            print(f'DISAGREE {r["file"]}: {v} at {s}, then {r["then"]}; the strict reader says {says}')
    return bad


def write_manifest(c):
    names = [r['file'] for r in c.rows]
    assert len(names) == len(set(names)), 'a name is used twice'
    tally = {}
    with open(os.path.join(c.out, 'manifest.tsv'), 'wb') as f:
        for r in c.rows:
            tally[r['verdict']] = tally.get(r['verdict'], 0) + 1
            fields = [str(r[k]) for k in ('file', 'verdict', 'stage', 'then', 'at', 'header', 'what', 'why')]
            text = '\t'.join(''.join(f'\\x{ord(x):02x}' if x < ' ' else x for x in field) for field in fields)
            f.write(text.encode() + b'\n')
    print(f'{len(names)} files: ' + ', '.join(f'{k} {n}' for k, n in sorted(tally.items())))


def main():
    ap = argparse.ArgumentParser(description='Write a corpus of malformed GGUF files.')
    ap.add_argument('out', nargs='+', metavar='OUT')
    ap.add_argument('--dim', type=int, default=64, choices=(64, 256), help='width of the base model')
    ap.add_argument('--check', action='store_true', help='compare the manifest with the strict reader')
    ap.add_argument('--verdict', action='store_true', help='OUT are files: say what the strict reader makes of them')
    args = ap.parse_args()
    if args.verdict:
        for p in args.out:
            with open(p, 'rb') as f:
                print(f'{p}: {oracle(f.read())}')
        return
    if len(args.out) != 1:
        ap.error('one OUT, please')
    os.makedirs(args.out[0], exist_ok=True)
    c = Corpus(args.out[0], args.dim)
    for g in (gen_valid, gen_header, gen_counts, gen_kv_types, gen_strings, gen_arrays, gen_dims, gen_tensor_types,
              gen_offsets, gen_alignment, gen_duplicates, gen_missing_keys, gen_wrong_types, gen_hparams,
              gen_missing_tensors, gen_shapes, gen_tokenizer, gen_templates, gen_truncation, gen_files, gen_data,
              gen_special):
        g(c)
    write_manifest(c)
    if args.check:
        bad = check(c)
        print(f'{bad} disagreements')
        sys.exit(bool(bad))


if __name__ == '__main__':
    main()
