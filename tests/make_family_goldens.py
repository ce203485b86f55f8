#!/usr/bin/env python3
"""make_family_goldens.py DIRECTORY [FAMILY...]: writes NAME.gguf and NAME.txt for families without a public reference
model of this size: random weights, and the answers of a forward pass in float64 on the stored (16-bit) weights.

make_family_goldens.py --check DIRECTORY [FAMILY...]: makes them again in memory; models must be equal bit for bit,
answers but for the last digit (libraries differ in the order of a sum).

The answers are for tests/test_goldens.c. The formulas follow the papers and the published checkpoints' own definitions,
the names and layouts of tensors those of GGUF's converters; nothing is shared with the library, and whoever writes a
family there does not read this file. All functions take the whole sequence, without a cache: [T] tokens, x [T, n_embd],
q [T, heads, head_dim]. NAME.txt: lines "tokens", "greedy" (the continuation) and "margins" (best minus second logit of
each of its steps), then one line of logits per token. With an MTP head: "drafts", and its line of logits for each token of the
prompt and each draft but the last.

llama.cpp 0.5.0 gives the same answers for these models stored in 32 bits, to 6e-5; with gelu, of which it reads a table
of 16-bit values, to 1e-2 in the rows where the table rounds another way, else to 1e-5."""
import os, struct, sys
import numpy as np

N_EMBD, N_VOCAB, N_PROMPT, N_GREEDY, N_DRAFTS = 32, 64, 28, 16, 4
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
    """What the file holds. tensors: name -> array as stored, outermost dimension first; keys: name -> (type, value)"""

    def __init__(self, arch, name):
        self.arch, self.name, self.keys, self.tensors, self.router_margin = arch, name, {}, {}, np.inf
        self.encoder, self.head, self.scores, self.mtp = False, None, None, None

    def u32(self, **values): self.put('u32', values)
    def f32(self, **values): self.put('f32', values)
    def text(self, **values): self.put('text', values)
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

    def norm(self, name, n, mean=1.0):
        self.vector(name + '.weight', n, mean=mean)

    def at_layer(self, name, il):
        """a key that may be one value for all layers"""
        value = self.get(name)
        return value[il] if isinstance(value, list) else value

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
        out += struct.pack('<IQ', {'float32': 0, 'float16': 1, 'int32': 26}[t.dtype.name], len(data))
        data += t.tobytes() + b'\0' * (-t.nbytes % 32)
    return out + b'\0' * (-len(out) % 32) + data


# ---- parts of models ----

def sigmoid(x): return 1.0 / (1.0 + np.exp(-x))
def silu(x): return x * sigmoid(x)


def gelu(x): return 0.5 * x * (1.0 + np.tanh((2.0 / np.pi) ** 0.5 * (x + 0.044715 * x ** 3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x, eps): return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
def rms_norm(m, name, x): return rms(x, m.get('attention.layer_norm_rms_epsilon')) * m.at(name + '.weight')


def layer_norm(m, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + m.get('attention.layer_norm_epsilon')) * m.at(name + '.weight')
    return x + m.at(name + '.bias') if m.has(name + '.bias') else x


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


def attention(q, k, v, scale, window=0, slopes=None, sinks=None, seen=None):
    """causal; a key head serves n_head / n_kv_head heads that follow one another; a window counts the token itself;
    scale: a number or a function; slopes: per head, what a score loses for each position between; sinks: per head, a
    score of nothing; seen: [T, T] or [key heads, T, T], which positions a row attends to at most"""
    n, n_head, _ = q.shape
    age = np.arange(n)[:, None] - np.arange(n)[None, :]
    hidden = (age < 0) | (age >= (window or n))
    out = np.empty((n, n_head, v.shape[2]))
    for h in range(n_head):
        of = h * k.shape[1] // n_head
        score = q[:, h] @ k[:, of].T
        score = scale(score) if callable(scale) else score * scale
        if slopes is not None: score = score - slopes[h] * age
        score = np.where(hidden, -np.inf, score)
        if seen is not None: score = np.where(seen if seen.ndim == 2 else seen[of], score, -np.inf)
        if sinks is not None: score = np.concatenate([score, np.full((n, 1), sinks[h])], 1)
        out[:, h] = softmax(score)[:, :n] @ v[:, of]
    return out.reshape(n, -1)


def alibi_slopes(n_head, most):
    """powers of 2^(-most / n) for n heads, n a power of two; with further heads the odd powers of its square root"""
    n = 1 << (n_head.bit_length() - 1)
    powers = [2 * (h + 1) if h < n else 2 * (h - n) + 1 for h in range(n_head)]
    return [2.0 ** (-most * power / (2 * n)) for power in powers]


def self_attention(m, il, h, pairs, qk_norm=None, window=0, base=None, factors=1.0, grown=1.0):
    """the usual kind; qk_norm: q and k are normalised "full", over their whole width, or "head", each head by itself, or
    "heads", so with weights of its own, as a layer norm; pairs None: no rope, else of this base (None: the file's), with angles divided by factors and results times grown"""
    b = 'blk.%d.attn_' % il
    q, k, v = linear(m, b + 'q', h), linear(m, b + 'k', h), linear(m, b + 'v', h)
    if qk_norm == 'full': q, k = rms_norm(m, b + 'q_norm', q), rms_norm(m, b + 'k_norm', k)
    n_kv = m.at_layer('attention.head_count_kv', il)
    q, k, v = heads(q, m.get('attention.head_count')), heads(k, n_kv), heads(v, n_kv)
    if qk_norm == 'head': q, k = rms_norm(m, b + 'q_norm', q), rms_norm(m, b + 'k_norm', k)
    if qk_norm == 'heads': q, k = layer_norm(m, b + 'q_norm', q), layer_norm(m, b + 'k_norm', k)
    n_rot, base = m.get('rope.dimension_count'), base or m.get('rope.freq_base')
    if m.has('rope_freqs.weight'): factors = m.at('rope_freqs.weight')
    if pairs: q, k = rope(q, n_rot, base, pairs, factors) * grown, rope(k, n_rot, base, pairs, factors) * grown
    return linear(m, b + 'output', attention(q, k, v, q.shape[2] ** -0.5, window))


def conv(m, name, x):
    """each channel of x [T, channels] has a causal filter: w[taps-1] is the current token's; zeros come before"""
    w = m.at(name + '.weight')
    taps = w.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    y = sum(padded[j:j + len(x)] * w[:, j] for j in range(taps))
    return y + m.at(name + '.bias') if m.has(name + '.bias') else y


def short_conv(m, il, h):
    """LFM2's mixing: two gates around a filter"""
    b = 'blk.%d.shortconv.' % il
    before, after, x = np.split(linear(m, b + 'in_proj', h), 3, 1)
    return linear(m, b + 'out_proj', after * conv(m, b + 'conv', before * x))


def delta_rule(q, k, v, beta, decay):
    """q, k, v [T, heads, d], beta, decay [T, heads]: a memory S [d, d] per head fades, has what it holds under the key
    replaced, in the measure beta, and answers the query"""
    state, out = np.zeros(k.shape[1:] + v.shape[2:]), np.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t][:, None, None]
        held = np.einsum('hkv,hk->hv', state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - held))[:, None, :]
        out[t] = np.einsum('hkv,hk->hv', state, q[t])
    return out


def unit(x, eps):
    """length 1; the checkpoints' definition adds 1e-6 to the sum of squares, which is also their norms' epsilon"""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def delta_net(m, il, h, project, key_head, opened=silu):
    """the gated DeltaNet. project(m, il, h): q, k, v side by side, the output's gate z, and what beta and decay come
    from; key_head(value head): the head of q and k that it goes with"""
    b, eps = 'blk.%d.ssm_' % il, m.get('attention.layer_norm_rms_epsilon')
    d, n_k, n_v = m.get('ssm.state_size'), m.get('ssm.group_count'), m.get('ssm.time_step_rank')
    qkv, z, before_beta, before_decay = project(m, il, h)
    q, k, v = np.split(silu(conv(m, b + 'conv1d', qkv)), (n_k * d, 2 * n_k * d), 1)
    of = [key_head(i) for i in range(n_v)]
    q, k = unit(heads(q, n_k), eps)[:, of] * d ** -0.5, unit(heads(k, n_k), eps)[:, of]
    decay = np.exp(np.log1p(np.exp(before_decay + m.at(b + 'dt.bias'))) * m.at(b + 'a'))
    out = delta_rule(q, k, heads(v, n_v), sigmoid(before_beta), decay)
    out = rms_norm(m, b + 'norm', out) * opened(heads(z, n_v))
    return linear(m, b + 'out', out.reshape(len(h), -1))


def selective_scan(x, dt, a, b, c, d):
    """x [T, heads, d], dt [T, heads], a [heads, 1 or n], b, c [T, groups, n], d [heads]: a memory [n, d] per head fades,
    takes in what comes, and is read; heads that follow one another share a group"""
    n_head = x.shape[1]
    b, c = np.repeat(b, n_head // b.shape[1], 1), np.repeat(c, n_head // c.shape[1], 1)
    state, out = np.zeros((n_head, b.shape[2], x.shape[2])), np.empty_like(x)
    for t in range(len(x)):
        state = state * np.exp(dt[t][:, None] * a)[:, :, None] + (dt[t][:, None] * b[t])[:, :, None] * x[t][:, None, :]
        out[t] = np.einsum('hnd,hn->hd', state, c[t]) + d[:, None] * x[t]
    return out


def softplus(x): return np.log1p(np.exp(x))


def mamba(m, il, h):
    """Mamba: what is written, read, and the time steps come from the filtered input"""
    b, n, rank, eps = 'blk.%d.ssm_' % il, m.get('ssm.state_size'), m.get('ssm.time_step_rank'), m.get('attention.layer_norm_rms_epsilon')
    x, z = np.split(linear(m, b + 'in', h), 2, 1)
    x = silu(conv(m, b + 'conv1d', x))
    dt, write, read = np.split(linear(m, b + 'x', x), (rank, rank + n), 1)
    if m.get('ssm.dt_b_c_rms'): dt, write, read = rms(dt, eps), rms(write, eps), rms(read, eps)
    if m.has(b + 'dt_norm.weight'):
        dt, write, read = rms_norm(m, b + 'dt_norm', dt), rms_norm(m, b + 'b_norm', write), rms_norm(m, b + 'c_norm', read)
    y = selective_scan(x[:, :, None], softplus(linear(m, b + 'dt', dt)), m.at(b + 'a'), write[:, None], read[:, None], m.at(b + 'd'))
    return linear(m, b + 'out', y[:, :, 0] * silu(z))


def mamba2(m, il, h):
    """Mamba-2: one matrix makes everything; the gated results are normed by groups, if there is a norm"""
    b, inner, n, groups = 'blk.%d.ssm_' % il, m.get('ssm.inner_size'), m.get('ssm.state_size'), m.get('ssm.group_count')
    n_head, wide = m.get('ssm.time_step_rank'), inner + 2 * groups * n
    z, xbc, dt = np.split(linear(m, b + 'in', h), (inner, inner + wide), 1)
    x, write, read = np.split(silu(conv(m, b + 'conv1d', xbc)), (inner, inner + groups * n), 1)
    y = selective_scan(heads(x, n_head), softplus(dt + m.at(b + 'dt.bias')), m.at(b + 'a').reshape(n_head, 1), heads(write, groups),
                       heads(read, groups), m.at(b + 'd').reshape(-1)).reshape(len(h), -1) * silu(z)
    if m.has(b + 'norm.weight'): y = (rms(heads(y, groups), m.get('attention.layer_norm_rms_epsilon')) * m.at(b + 'norm.weight')).reshape(y.shape)
    return linear(m, b + 'out', y)


def gated_attention(m, il, h, seen=None):
    """each head's rows of attn_q are its query and then a gate for its output"""
    b, n_head, n_kv = 'blk.%d.attn_' % il, m.get('attention.head_count'), m.get('attention.head_count_kv')
    q, gate = np.split(heads(linear(m, b + 'q', h), n_head), 2, 2)
    q, k = rms_norm(m, b + 'q_norm', q), rms_norm(m, b + 'k_norm', heads(linear(m, b + 'k', h), n_kv))
    n_rot, base = m.get('rope.dimension_count'), m.get('rope.freq_base')
    out = attention(rope(q, n_rot, base, 'far'), rope(k, n_rot, base, 'far'), heads(linear(m, b + 'v', h), n_kv),
                    q.shape[2] ** -0.5, seen=seen)
    return linear(m, b + 'output', out * sigmoid(gate.reshape(len(h), -1)))


def gated_ffn(m, il, h, suffix='', act=silu):
    b = 'blk.%d.ffn_' % il
    return linear(m, b + 'down' + suffix, act(linear(m, b + 'gate' + suffix, h)) * linear(m, b + 'up' + suffix, h))


def best_groups(m, score):
    """score, -infinity outside the expert_group_used_count groups whose best two experts have the highest sum"""
    n_groups, used = m.get('expert_group_count'), m.get('expert_group_used_count')
    groups = heads(score, n_groups)
    sums = np.sort(groups, -1)[:, :, -2:].sum(-1)
    ranks = np.sort(sums, -1)[:, ::-1]
    m.router_margin = min(m.router_margin, (ranks[:, used - 1] - ranks[:, used]).min())
    return np.where((sums >= ranks[:, used - 1:used])[:, :, None], groups, -np.inf).reshape(score.shape)


def choose_experts(m, probs, score, normalised, count='expert_used_count'):
    """[T, n_expert] weights, zero where an expert is not among the `count` of the highest score"""
    used = m.get(count)
    ranks = np.sort(score, -1)[:, ::-1]
    m.router_margin = min(m.router_margin, (ranks[:, used - 1] - ranks[:, used]).min())
    w = np.where(score >= ranks[:, used - 1:used], probs, 0.0)
    return w / w.sum(-1, keepdims=True) if normalised else w


def experts(m, il, h, w, act=silu, word='_exps'):
    """sum over the experts, each a gated ffn, with weights w [T, n_expert]"""
    b = 'blk.%d.ffn_' % il
    down = m.at(b + 'down' + word + '.weight')
    if m.has(b + 'gate_up' + word + '.weight'): gate, up = np.split(m.at(b + 'gate_up' + word + '.weight'), 2, 1)
    else: gate, up = m.at(b + 'gate' + word + '.weight'), m.at(b + 'up' + word + '.weight')
    return sum(w[:, e:e + 1] * ((act(h @ gate[e].T) * (h @ up[e].T)) @ down[e].T) for e in range(w.shape[1]))


def softmax_moe(m, il, h, normalised):
    score = linear(m, 'blk.%d.ffn_gate_inp' % il, h)
    return experts(m, il, h, choose_experts(m, softmax(score), score, normalised))


def shared_expert(m, il, h):
    """seen by every token, after a gate of its own"""
    gate = sigmoid(h @ m.at('blk.%d.ffn_gate_inp_shexp.weight' % il))
    return gate[:, None] * gated_ffn(m, il, h, '_shexp')


def pre_norm_decoder(m, tokens, mix, ffn, ffn_norm='ffn_norm', final='output_norm', embedding_scale=1.0):
    return logits(m, pre_norm_hidden(m, tokens, mix, ffn, ffn_norm, final, embedding_scale))


def pre_norm_hidden(m, tokens, mix, ffn, ffn_norm, final='output_norm', embedding_scale=1.0):
    """x += mix(norm(x)); x += ffn(norm(x)) for each layer; then the norm that the output matrix reads, unless final is None"""
    x = m.at('token_embd.weight')[tokens] * embedding_scale
    for il in range(trunk_layers(m)): x = pre_norm_layer(m, il, x, mix, ffn, ffn_norm)
    return rms_norm(m, final, x) if final else x


def pre_norm_layer(m, il, x, mix, ffn, ffn_norm):
    x = x + mix(m, il, rms_norm(m, 'blk.%d.attn_norm' % il, x))
    return x + ffn(m, il, rms_norm(m, 'blk.%d.%s' % (il, ffn_norm), x)) if ffn else x


def trunk_layers(m): return m.get('block_count') - m.get('nextn_predict_layers', 0)


def logits(m, x):
    """an absent output matrix is the embedding"""
    return x @ m.at('output.weight' if m.has('output.weight') else 'token_embd.weight').T


# ---- what files hold ----

def common_keys(m, layers, n_head, n_kv, head_dim, n_ff, base=10000.0, n_rot=None, eps=2e-3):
    m.u32(context_length=128, embedding_length=N_EMBD, block_count=layers, feed_forward_length=n_ff,
          attention__head_count=n_head, attention__head_count_kv=n_kv, attention__key_length=head_dim,
          attention__value_length=head_dim, rope__dimension_count=n_rot or head_dim, vocab_size=N_VOCAB)
    m.f32(attention__layer_norm_rms_epsilon=eps, rope__freq_base=base)


def put_delta_net(m, il):
    """what all DeltaNets have; their projections differ"""
    b, inner, n_v = 'blk.%d.ssm_' % il, m.get('ssm.inner_size'), m.get('ssm.time_step_rank')
    d, n_k = m.get('ssm.state_size'), m.get('ssm.group_count')
    m.vector(b + 'conv1d.weight', 2 * n_k * d + inner, m.get('ssm.conv_kernel'), spread=1.0)
    m.vector(b + 'dt.bias', n_v, spread=0.5)
    # a memory of some 3 to 30 tokens
    m.vector(b + 'a', n_v, mean=-0.3, spread=0.07)
    m.norm(b + 'norm', d)
    m.weight(b + 'out', N_EMBD, inner, gain=1.5)


def put_gated_attention(m, il):
    put_attention(m, il, rows_per_q=2)
    m.norm('blk.%d.attn_q_norm' % il, m.get('attention.key_length'))
    m.norm('blk.%d.attn_k_norm' % il, m.get('attention.key_length'))


def put_embeddings(m, tied=False, final='output_norm', gain=4.0):
    """gain: of the logits; tied, the rows of the matrix are what the first layer reads, too"""
    n = m.get('embedding_length')
    m.weight('token_embd', N_VOCAB, n, gain=gain if tied else n ** 0.5)
    m.norm(final, n)
    if not tied: m.weight('output', N_VOCAB, n, gain=gain)


def put_attention(m, il, bias=False, n_kv=None, rows_per_q=1):
    b = 'blk.%d.attn_' % il
    n_head, head_dim = m.get('attention.head_count'), m.get('attention.key_length')
    n_kv = n_kv or m.get('attention.head_count_kv')
    # queries and keys of this size make attention choose: scores of a few units
    q_rows, kv_rows = rows_per_q * n_head * head_dim, n_kv * head_dim
    for part, rows, gain in (('q', q_rows, 1.5), ('k', kv_rows, 1.5), ('v', kv_rows, 1.0)):
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


def put_ffn_and_indexer(m, il):
    """a dense layer, then layers with experts of which layer 1 has no indexer"""
    b = 'blk.%d.' % il
    if il == 0: put_ffn(m, il, 48)
    else:
        put_experts(m, il, 6, 16)
        put_ffn(m, il, 16, '_shexp')
        m.vector(b + 'exp_probs_b.bias', 6, spread=0.2)
    if il == 1: return
    for name, *shape in (('attn_q_b', 36, 20), ('attn_k', 12, N_EMBD), ('proj', 3, N_EMBD)): m.weight(b + 'indexer.' + name, *shape, gain=1.5)
    m.norm(b + 'indexer.k_norm', 12)
    m.vector(b + 'indexer.k_norm.bias', 12)


def fuse_experts(m, il):
    """one tensor: of each expert the gate's rows and then the other's"""
    parts = [m.tensors.pop('blk.%d.ffn_%s_exps.weight' % (il, part)) for part in ('gate', 'up')]
    m.tensors['blk.%d.ffn_gate_up_exps.weight' % il] = np.concatenate(parts, 1)


# ---- families ----

def make_mixtral():
    """arch llama with experts: rope on neighbours, the chosen experts' weights are made to add up to 1"""
    m = Model('llama', 'mixtral')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=16, n_ff=24, base=3000.0)
    m.u32(expert_count=6, expert_used_count=2)
    put_embeddings(m)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        put_experts(m, il, 6, 24)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, 'near'),
        lambda m, il, h: softmax_moe(m, il, h, normalised=True))


def make_qwen2moe():
    """biases of q, k, v; softmax over all experts, not normalised; a gated shared expert of another width"""
    m = Model('qwen2moe', 'qwen2moe')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=64, base=3000.0, eps=3e-3)
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
    common_keys(m, layers=2, n_head=4, n_kv=4, head_dim=8, n_ff=16)
    m.u32(expert_count=8, expert_used_count=3)
    put_embeddings(m)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        m.norm('blk.%d.attn_q_norm' % il, 32)
        m.norm('blk.%d.attn_k_norm' % il, 32)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        put_experts(m, il, 8, 16)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, 'far', qk_norm='full'),
        lambda m, il, h: softmax_moe(m, il, h, normalised=False))


def lfm2_keys(m, kv_heads, n_ff, taps):
    common_keys(m, layers=len(kv_heads), n_head=4, n_kv=2, head_dim=8, n_ff=n_ff, base=3000.0)
    m.i32s(attention__head_count_kv=kv_heads)
    m.u32(shortconv__l_cache=taps)
    put_embeddings(m, tied=True, final='token_embd_norm')


def put_lfm2_mix(m, il):
    """attention in layers that have key heads, else a filter"""
    n_kv, b = m.at_layer('attention.head_count_kv', il), 'blk.%d.' % il
    m.norm(b + 'attn_norm', N_EMBD)
    if n_kv:
        put_attention(m, il, n_kv=n_kv)
        m.norm(b + 'attn_q_norm', 8)
        m.norm(b + 'attn_k_norm', 8)
    else:
        m.weight(b + 'shortconv.in_proj', 3 * N_EMBD, N_EMBD, gain=1.5)
        m.vector(b + 'shortconv.conv.weight', N_EMBD, m.get('shortconv.l_cache'), spread=0.7)
        m.weight(b + 'shortconv.out_proj', N_EMBD, N_EMBD, gain=1.5)
    m.norm(b + 'ffn_norm', N_EMBD)


def lfm2_mix(m, il, h):
    if m.at_layer('attention.head_count_kv', il): return self_attention(m, il, h, 'far', qk_norm='head')
    return short_conv(m, il, h)


def make_lfm2(bias=False):
    """filters and attention in turn; the last norm is called token_embd_norm. conv_bias gives the filters and both
    projections around them biases"""
    m = Model('lfm2', 'lfm2-bias' if bias else 'lfm2')
    lfm2_keys(m, [0, 2, 0, 2], 64, taps=3)
    for il in range(4):
        put_lfm2_mix(m, il)
        put_ffn(m, il, 64)
        if bias and il in (0, 2):
            for part, n in (('in_proj', 3 * N_EMBD), ('conv', N_EMBD), ('out_proj', N_EMBD)):
                m.vector('blk.%d.shortconv.%s.bias' % (il, part), n)
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, lfm2_mix, gated_ffn, final='token_embd_norm')


def make_lfm2_bias(): return make_lfm2(bias=True)


def make_lfm2moe():
    """a dense layer, then experts: sigmoid scores, with a bias for the choice only, made to add up to 1"""
    m = Model('lfm2moe', 'lfm2moe')
    lfm2_keys(m, [0, 2, 0], 64, taps=4)
    m.u32(expert_count=6, expert_used_count=2, expert_feed_forward_length=16, leading_dense_block_count=1)
    m.u32(expert_gating_func=2)
    for il in range(3):
        put_lfm2_mix(m, il)
        if il < 1: put_ffn(m, il, 64)
        else:
            put_experts(m, il, 6, 16)
            m.vector('blk.%d.exp_probs_b.bias' % il, 6, spread=0.3)

    def ffn(m, il, h):
        if il < m.get('leading_dense_block_count'): return gated_ffn(m, il, h)
        probs = sigmoid(linear(m, 'blk.%d.ffn_gate_inp' % il, h))
        score = probs + m.at('blk.%d.exp_probs_b.bias' % il)
        return experts(m, il, h, choose_experts(m, probs, score, normalised=True))
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, lfm2_mix, ffn, final='token_embd_norm')


def delta_net_keys(m, layers, interval, n_k, n_v, d, eps):
    common_keys(m, layers=layers, n_head=4, n_kv=2, head_dim=16, n_ff=48, base=1000.0, n_rot=8, eps=eps)
    m.u32(full_attention_interval=interval, ssm__conv_kernel=4, ssm__state_size=d, ssm__group_count=n_k,
          ssm__time_step_rank=n_v, ssm__inner_size=n_v * d)


def put_qwen_mixes(m, put_projections):
    for il in range(m.get('block_count')):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        if is_full(m, il): put_gated_attention(m, il)
        else:
            put_projections(m, il)
            put_delta_net(m, il)
        m.norm('blk.%d.post_attention_norm' % il, N_EMBD)


def is_full(m, il): return il >= trunk_layers(m) or (il + 1) % m.get('full_attention_interval') == 0


def put_qwen_moe(m, il, fused=False):
    put_experts(m, il, 6, 16)
    if fused: fuse_experts(m, il)
    m.vector('blk.%d.ffn_gate_inp_shexp.weight' % il, N_EMBD, spread=2.0 / N_EMBD ** 0.5)
    put_ffn(m, il, 24, '_shexp')


def qwen_moe(m, il, h): return softmax_moe(m, il, h, normalised=True) + shared_expert(m, il, h)


def put_separate_projections(m, il):
    inner, n_v, b = m.get('ssm.inner_size'), m.get('ssm.time_step_rank'), 'blk.%d.' % il
    m.weight(b + 'attn_qkv', 2 * m.get('ssm.group_count') * m.get('ssm.state_size') + inner, N_EMBD, gain=1.5)
    m.weight(b + 'attn_gate', inner, N_EMBD, gain=1.5)
    m.weight(b + 'ssm_beta', n_v, N_EMBD, gain=1.5)
    m.weight(b + 'ssm_alpha', n_v, N_EMBD, gain=1.5)


def separate_projections(m, il, h):
    return [linear(m, 'blk.%d.%s' % (il, part), h) for part in ('attn_qkv', 'attn_gate', 'ssm_beta', 'ssm_alpha')]


def qwen35_decoder(ffn):
    """value head h goes with key head h modulo their number: converters of this family order the value heads so"""
    return lambda m, tokens: pre_norm_decoder(m, tokens, qwen35_mix, ffn, ffn_norm='post_attention_norm')


def qwen35_mix(m, il, h):
    if is_full(m, il): return gated_attention(m, il, h)
    return delta_net(m, il, h, separate_projections, lambda i: i % m.get('ssm.group_count'))


def make_qwen35():
    m = Model('qwen35', 'qwen35')
    delta_net_keys(m, layers=4, interval=2, n_k=2, n_v=4, d=16, eps=2e-3)
    m.i32s(rope__dimension_sections=[2, 1, 1, 0])
    put_embeddings(m, tied=True)
    put_qwen_mixes(m, put_separate_projections)
    for il in range(4): put_ffn(m, il, 48)
    return m, qwen35_decoder(gated_ffn)


def qwen35moe(name, fused):
    m = Model('qwen35moe', name)
    layers = 2 if fused else 3
    delta_net_keys(m, layers, interval=layers, n_k=2, n_v=4, d=16, eps=2e-3)
    m.i32s(rope__dimension_sections=[2, 1, 1, 0])
    m.u32(expert_count=6, expert_used_count=3, expert_feed_forward_length=16, expert_shared_feed_forward_length=24)
    put_embeddings(m)
    put_qwen_mixes(m, put_separate_projections)
    for il in range(layers): put_qwen_moe(m, il, fused)
    return m, qwen35_decoder(qwen_moe)


def put_mtp(m, own=(), il=None):
    """a head for the token after next, whose block is il, the first after the model's layers; own: tensors that it else
    shares with the model"""
    b, n = 'blk.%d.nextn.' % (il or trunk_layers(m)), m.get('embedding_length')
    m.weight(b + 'eh_proj', n, 2 * n, gain=1.5)
    m.norm(b + 'enorm', n)
    m.norm(b + 'hnorm', n)
    if 'norm' in own: m.norm(b + 'shared_head_norm', n)
    if 'embedding' in own: m.weight(b + 'embed_tokens', N_VOCAB, n, gain=n ** 0.5)
    if 'output' in own: m.weight(b + 'shared_head_head', N_VOCAB, n, gain=4.0)


OWN = ('norm', 'embedding', 'output')


def mtp_head(mix, ffn, ffn_norm, raw):
    """of tokens [T] and what the model, or the head before, made of the token before each, [T, n_embd]: hidden rows, raw or
    normed, and logits. The block is one of the model's layers; k: of which head"""
    def head(m, tokens, g, k):
        il = trunk_layers(m) + k
        b = 'blk.%d.' % il
        def mine(*names): return next((b + name for name in names if m.has(b + name + '.weight')), None)
        e = m.at((mine('nextn.embed_tokens') or 'token_embd') + '.weight')[tokens]
        e, g = rms_norm(m, b + 'nextn.enorm', e), rms_norm(m, b + 'nextn.hnorm', g)
        x = pre_norm_layer(m, il, linear(m, b + 'nextn.eh_proj', np.concatenate([e, g], 1)), mix, ffn, ffn_norm)
        normed = rms_norm(m, mine('nextn.shared_head_norm', 'layer_output_norm') or 'output_norm', x)
        output = mine('nextn.shared_head_head') or ('output' if m.has('output.weight') else 'token_embd')
        return x if raw else normed, normed @ m.at(output + '.weight').T
    return head


def with_mtp(m, mix, ffn, ffn_norm='ffn_norm', raw=False):
    """the model as it is without, and m.mtp: hidden rows of the model, raw or as its output matrix reads them, and the head,
    if the file has one"""
    final = None if raw else 'output_norm'
    if m.get('nextn_predict_layers'): m.mtp = (lambda m, tokens: pre_norm_hidden(m, tokens, mix, ffn, ffn_norm, final), mtp_head(mix, ffn, ffn_norm, raw))
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mix, ffn, ffn_norm)


def make_qwen35_mtp():
    m = Model('qwen35', 'qwen35-mtp')
    delta_net_keys(m, layers=3, interval=2, n_k=2, n_v=4, d=16, eps=2e-3)
    m.u32(nextn_predict_layers=1)
    m.i32s(rope__dimension_sections=[2, 1, 1, 0])
    put_embeddings(m, tied=True)
    put_qwen_mixes(m, put_separate_projections)
    for il in range(3): put_ffn(m, il, 48)
    put_mtp(m)
    return with_mtp(m, qwen35_mix, gated_ffn, 'post_attention_norm')


def make_qwen35moe_mtp():
    m = Model('qwen35moe', 'qwen35moe-mtp')
    delta_net_keys(m, layers=3, interval=2, n_k=2, n_v=4, d=16, eps=2e-3)
    m.u32(nextn_predict_layers=1)
    m.i32s(rope__dimension_sections=[2, 1, 1, 0])
    m.u32(expert_count=6, expert_used_count=3, expert_feed_forward_length=16, expert_shared_feed_forward_length=24)
    put_embeddings(m)
    put_qwen_mixes(m, put_separate_projections)
    for il in range(3): put_qwen_moe(m, il)
    put_mtp(m, OWN)
    return with_mtp(m, qwen35_mix, qwen_moe, 'post_attention_norm')


def make_qwen35moe(): return qwen35moe('qwen35moe', fused=False)
def make_qwen35moe_fused(): return qwen35moe('qwen35moe-fused', fused=True)


def make_qwen3next(legacy=False, mtp=False):
    """value heads follow one another under their key head, in the file as in the checkpoint. The first converters kept
    the checkpoint's one matrix, in which each key head's rows of q, k, v and z follow one another"""
    m = Model('qwen3next', 'qwen3next-mtp' if mtp else 'qwen3next-legacy' if legacy else 'qwen3next')
    delta_net_keys(m, layers=2 + mtp, interval=2, n_k=2, n_v=6, d=16, eps=2e-3)
    m.u32(expert_count=6, expert_used_count=2, expert_feed_forward_length=16, expert_shared_feed_forward_length=24)
    n_k, n_v, d, inner = 2, 6, 16, 96
    if mtp: m.u32(nextn_predict_layers=1)
    put_embeddings(m)

    def put_projections(m, il):
        b = 'blk.%d.' % il
        if legacy: m.weight(b + 'ssm_in', 2 * n_k * d + 2 * inner, N_EMBD, gain=1.5)
        else:
            m.weight(b + 'attn_qkv', 2 * n_k * d + inner, N_EMBD, gain=1.5)
            m.weight(b + 'attn_gate', inner, N_EMBD, gain=1.5)
        m.weight(b + 'ssm_ba', 2 * n_v, N_EMBD, gain=1.5)

    def project(m, il, h):
        b = 'blk.%d.' % il
        if legacy:
            per_key = heads(linear(m, b + 'ssm_in', h), n_k)
            q, k, v, z = (part.reshape(len(h), -1) for part in np.split(per_key, (d, 2 * d, 2 * d + inner // n_k), 2))
            qkv = np.concatenate([q, k, v], 1)
        else: qkv, z = linear(m, b + 'attn_qkv', h), linear(m, b + 'attn_gate', h)
        beta, alpha = (part.reshape(len(h), -1) for part in np.split(heads(linear(m, b + 'ssm_ba', h), n_k), 2, 2))
        return qkv, z, beta, alpha

    def mix(m, il, h):
        return gated_attention(m, il, h) if is_full(m, il) else delta_net(m, il, h, project, lambda i: i * n_k // n_v)
    put_qwen_mixes(m, put_projections)
    for il in range(m.get('block_count')): put_qwen_moe(m, il)
    if mtp: put_mtp(m, ('norm',))
    return with_mtp(m, mix, qwen_moe, 'post_attention_norm')


def make_qwen3next_legacy(): return make_qwen3next(legacy=True)
def make_qwen3next_mtp(): return make_qwen3next(mtp=True)


def make_qwen4exp():
    """Three residual streams: a layer reads the mean of what gates leave of them, and what it makes goes to each in a
    measure of its own. Before layer 0 rows of a table that hashes of the last two and three tokens choose are added,
    and a filter over every third row of them. Attention to the two best complete blocks of four positions, by the mean
    of their keys, and to the block that is not complete"""
    n_s, rank, n_heads, width, end = 3, 6, 4, 6, 8
    m = Model('qwen4exp', 'qwen4exp')
    delta_net_keys(m, layers=2, interval=2, n_k=2, n_v=4, d=16, eps=2e-3)
    rows, first, factor = [37, 41, 43, 47], [0, 37, 80, 125], [11, 40503, 2654435]
    m.u32(expert_count=6, expert_used_count=3, expert_feed_forward_length=16, expert_shared_feed_forward_length=24,
          hyper_connection__count=n_s, hyper_connection__low_rank=rank, attention__indexer__head_count=3,
          attention__indexer__key_length=10, attention__indexer__top_k=8, ple__ngram_size=3, ple__heads_per_ngram=2,
          ple__conv_kernel=4, ple__eos_token_id=end, embedding_length_per_layer_input=width)
    m.i32s(rope__dimension_sections=[2, 1, 1, 0], attention__compress_ratios=[0, 4], ple__layers=[0],
           ple__layer_multipliers=factor, ple__head_offsets=first, ple__head_vocab_sizes=rows)
    m.weight('token_embd', N_VOCAB, N_EMBD, gain=N_EMBD ** 0.5)
    m.weight('output', N_VOCAB, N_EMBD, gain=3.0)
    m.weight('per_layer_token_embd', 176, width, gain=width ** 0.5)

    def put_streams(name, inject):
        m.vector(name + '_norm.weight', n_s, N_EMBD, mean=1.0)
        m.weight(name + '_down', rank, n_s * N_EMBD, gain=2.0)
        m.weight(name + '_up', n_s * N_EMBD, rank, gain=2.0)
        if inject: m.weight(name + '_inject', n_s, n_s * N_EMBD, gain=2.0)

    put_streams('output_hc', inject=False)
    for il in range(2):
        b = 'blk.%d.' % il
        put_streams(b + 'hc_attn', inject=True)
        put_streams(b + 'hc_ffn', inject=True)
        put_qwen_moe(m, il, fused=il == 1)
    put_separate_projections(m, 0)
    put_delta_net(m, 0)
    put_gated_attention(m, 1)
    m.weight('blk.1.indexer.q_proj', 30, N_EMBD, gain=1.5)
    m.weight('blk.1.indexer.k_proj', 10, N_EMBD, gain=1.5)
    m.norm('blk.1.indexer.q_norm', 10)
    m.norm('blk.1.indexer.k_norm', 10)
    m.weight('blk.0.ple_key', n_s * N_EMBD, n_heads * width)
    m.weight('blk.0.ple_value', N_EMBD, n_heads * width)
    for name in ('key', 'query', 'conv'): m.vector('blk.0.ple_norm_%s.weight' % name, n_s * N_EMBD, mean=1.0)
    m.vector('blk.0.ple_conv1d.weight', n_s * N_EMBD, 4, spread=0.7)

    def norm(m, name, x):
        return rms(x, m.get('attention.layer_norm_rms_epsilon')) * m.at(name + '.weight').reshape(n_s, N_EMBD)

    def from_streams(m, name, x):
        h = norm(m, name + '_norm', x)
        flat = h.reshape(len(x), -1)
        gate = sigmoid(linear(m, name + '_up', silu(linear(m, name + '_down', flat) / n_s)))
        return (h * gate.reshape(h.shape)).mean(1), flat

    def to_streams(m, name, x, flat, y):
        return x + 2.0 * sigmoid(linear(m, name + '_inject', flat) / n_s)[:, :, None] * y[:, None]

    def ngrams(tokens):
        table, out = m.at('per_layer_token_embd.weight'), np.zeros((len(tokens), n_heads, width))
        for t in range(len(tokens)):
            past, over = [int(tokens[t])], False
            for age in (1, 2):
                over = over or age > t or int(tokens[t - age]) == end
                past.append(end if over else int(tokens[t - age]))
            for head in range(n_heads):
                mixed = 0
                for age in range(2 + head // 2): mixed ^= past[age] * factor[age]
                out[t, head] = table[first[head] + mixed % rows[head]]
        return out.reshape(len(tokens), -1)

    def with_ngrams(m, x, tokens):
        b, e, n = 'blk.0.ple_', ngrams(tokens), len(tokens)
        key = norm(m, b + 'norm_key', linear(m, b + 'key', e).reshape(x.shape))
        near = (key * norm(m, b + 'norm_query', x)).sum(2) / N_EMBD ** 0.5
        gate = sigmoid(np.sign(near) * np.sqrt(np.maximum(np.abs(near), 1e-6)))
        gated = gate[:, :, None] * linear(m, b + 'value', e)[:, None]
        past = np.concatenate([np.zeros((9, n_s * N_EMBD)), norm(m, b + 'norm_conv', gated).reshape(n, -1)])
        w = m.at(b + 'conv1d.weight')
        return x + gated + silu(sum(past[3 * j:3 * j + n] * w[:, j] for j in range(4))).reshape(x.shape)

    def choice(m, h):
        b, n = 'blk.1.indexer.', len(h)
        q = rope(rms_norm(m, b + 'q_norm', heads(linear(m, b + 'q_proj', h), 3)), 8, 1000.0, 'far')
        raw, key = linear(m, b + 'k_proj', h), np.zeros((n, 1, 10))
        for at in range(0, n - 3, 4): key[at] = rms_norm(m, b + 'k_norm', raw[at:at + 4].mean(0))
        key = rope(key, 8, 1000.0, 'far')[0:n - 3:4, 0]
        score = np.maximum(np.einsum('thd,bd->thb', q, key), 0.0).sum(1)
        score = np.where(4 * np.arange(len(key))[None] + 3 <= np.arange(n)[:, None], score, -np.inf)
        blocks = np.zeros((n, (n + 3) // 4), bool)
        blocks[:, :len(key)] = best_of_each(m, score, 2)
        for t in range(n): blocks[t, t // 4] |= t % 4 != 3
        return np.repeat(blocks, 4, 1)[:, :n]

    def forward(m, tokens):
        x = np.repeat(m.at('token_embd.weight')[tokens][:, None], n_s, 1)
        for il in range(2):
            b = 'blk.%d.' % il
            if il == 0: x = with_ngrams(m, x, tokens)
            h, flat = from_streams(m, b + 'hc_attn', x)
            y = gated_attention(m, il, h, choice(m, h)) if il else delta_net(m, il, h, separate_projections, lambda i: i % 2, sigmoid)
            x = to_streams(m, b + 'hc_attn', x, flat, y)
            h, flat = from_streams(m, b + 'hc_ffn', x)
            x = to_streams(m, b + 'hc_ffn', x, flat, qwen_moe(m, il, h))
        return logits(m, from_streams(m, 'output_hc', x)[0])
    return m, forward


def make_cohere2():
    """attention and ffn side by side, after one norm without bias; of four layers three have a window and rope, the
    fourth neither; the logits are scaled"""
    m = Model('cohere2', 'cohere2')
    common_keys(m, layers=4, n_head=4, n_kv=2, head_dim=8, n_ff=48, base=1000.0)
    m.f32(attention__layer_norm_epsilon=0.02, logit_scale=0.4)
    m.u32(attention__sliding_window=6)
    put_embeddings(m, tied=True, gain=10.0)
    for il in range(4):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        put_ffn(m, il, 48)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(m.get('block_count')):
            h = layer_norm(m, 'blk.%d.attn_norm' % il, x)
            if il % 4 == 3: mixed = self_attention(m, il, h, None)
            else: mixed = self_attention(m, il, h, 'near', window=m.get('attention.sliding_window'))
            x = x + mixed + gated_ffn(m, il, h)
        return logits(m, layer_norm(m, 'output_norm', x)) * m.get('logit_scale')
    return m, forward


def put_head_norms(m, il):
    """each head of the queries and of the keys has a vector of its own"""
    for part, n in (('q', m.get('attention.head_count')), ('k', m.get('attention.head_count_kv'))):
        m.vector('blk.%d.attn_%s_norm.weight' % (il, part), n, m.get('attention.key_length'), mean=1.0)


def side_by_side(m, tokens, pairs):
    """Logits of attention and ffn after one norm, with normed heads"""
    x = m.at('token_embd.weight')[tokens]
    for il in range(m.get('block_count')):
        h = layer_norm(m, 'blk.%d.attn_norm' % il, x)
        x = x + self_attention(m, il, h, pairs, qk_norm='heads') + gated_ffn(m, il, h)
    return logits(m, layer_norm(m, 'output_norm', x))


def make_command_r_plus():
    """Command R+: attention and ffn side by side, after one norm without bias; the heads of queries and keys are normed;
    the logits are scaled"""
    m = Model('command-r', 'command-r-plus')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=48, base=1000.0)
    m.f32(attention__layer_norm_epsilon=0.02, logit_scale=0.6)
    put_embeddings(m, tied=True, gain=8.0)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        put_head_norms(m, il)
        put_ffn(m, il, 48)

    return m, lambda m, tokens: side_by_side(m, tokens, 'near') * m.get('logit_scale')


def make_stablelm_12b():
    """StableLM 2 12B: as that, with biases of the norms of layers; a quarter of each head turns; a matrix of its own for
    the logits"""
    m = Model('stablelm', 'stablelm-12b')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=16, n_ff=48, base=1000.0, n_rot=4)
    m.f32(attention__layer_norm_epsilon=0.02)
    m.flag(use_parallel_residual=True)
    put_embeddings(m)
    m.vector('output_norm.bias', N_EMBD)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        m.vector('blk.%d.attn_norm.bias' % il, N_EMBD)
        put_attention(m, il)
        put_head_norms(m, il)
        put_ffn(m, il, 48)

    return m, lambda m, tokens: side_by_side(m, tokens, 'far')


def plain(arch, pairs, head_dim, factors=False, bias=False, ffn_norm='ffn_norm'):
    """llama's graph under another name"""
    m = Model(arch, arch)
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=head_dim, n_ff=56, base=1000.0)
    put_embeddings(m)
    if factors: m.vector('rope_freqs.weight', head_dim // 2, mean=2.5, spread=0.7)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il, bias)
        m.norm('blk.%d.%s' % (il, ffn_norm), N_EMBD)
        put_ffn(m, il, 56)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, pairs), gated_ffn, ffn_norm)


def make_internlm2(): return plain('internlm2', 'near', 8)
def make_exaone(): return plain('exaone', 'far', 12, factors=True)
def make_seed_oss(): return plain('seed_oss', 'far', 12, bias=True, ffn_norm='post_attention_norm')


def alibi_family(arch, n_embd, n_head, bias):
    """one matrix for q, k and v; LayerNorm; positions by ALiBi; gelu"""
    m = Model(arch, arch)
    m.u32(context_length=128, embedding_length=n_embd, block_count=2, feed_forward_length=64,
          attention__head_count=n_head, attention__head_count_kv=n_head, vocab_size=N_VOCAB)
    m.f32(attention__layer_norm_epsilon=2e-3)
    put_embeddings(m, tied=True)

    def put(name, *shape):
        m.weight(name, *shape, gain=1.5)
        if bias: m.vector(name + '.bias', shape[0])

    def put_norm(name):
        m.norm(name, n_embd)
        if bias: m.vector(name + '.bias', n_embd)
    for il in range(2):
        b = 'blk.%d.' % il
        put_norm(b + 'attn_norm')
        put(b + 'attn_qkv', 3 * n_embd, n_embd)
        put(b + 'attn_output', n_embd, n_embd)
        put_norm(b + 'ffn_norm')
        put(b + 'ffn_up', 64, n_embd)
        put(b + 'ffn_down', n_embd, 64)
    if bias:
        put_norm('token_embd_norm')
        m.vector('output_norm.bias', n_embd)
    return m


def alibi_decoder(m, tokens, slopes, clamp=np.inf):
    x = m.at('token_embd.weight')[tokens]
    if m.has('token_embd_norm.weight'): x = layer_norm(m, 'token_embd_norm', x)
    for il in range(m.get('block_count')):
        b = 'blk.%d.' % il
        qkv = np.clip(linear(m, b + 'attn_qkv', layer_norm(m, b + 'attn_norm', x)), -clamp, clamp)
        q, k, v = (heads(part, len(slopes)) for part in np.split(qkv, 3, 1))
        x = x + linear(m, b + 'attn_output', attention(q, k, v, q.shape[2] ** -0.5, slopes=slopes))
        h = linear(m, b + 'ffn_up', layer_norm(m, b + 'ffn_norm', x))
        x = x + linear(m, b + 'ffn_down', gelu(h))
    return logits(m, layer_norm(m, 'output_norm', x))


def make_mpt():
    """no biases; q, k and v are cut to a range"""
    m = alibi_family('mpt', 32, 4, bias=False)
    m.f32(attention__clamp_kqv=2.0, attention__max_alibi_bias=6.0)
    return m, lambda m, tokens: alibi_decoder(
        m, tokens, alibi_slopes(m.get('attention.head_count'), m.get('attention.max_alibi_bias')),
        m.get('attention.clamp_kqv'))


def make_bloom():
    """biases everywhere, a norm after the embedding, and heads that are no power of two"""
    m = alibi_family('bloom', 48, 6, bias=True)
    return m, lambda m, tokens: alibi_decoder(m, tokens, alibi_slopes(m.get('attention.head_count'), 8.0))


def gemma4(name, windows, n_kv, shared, per_layer, n_ff, no_values):
    """windows: which layers have one; they have heads of another size and another rope. The last `shared` layers have
    no keys and values of their own; full layers with no_values take the keys, before their norm, as values"""
    m, n = Model('gemma4', name), len(windows)
    common_keys(m, layers=n, n_head=4, n_kv=2, head_dim=16, n_ff=40, base=1000.0)
    m.bools(attention__sliding_window_pattern=windows)
    m.i32s(attention__head_count_kv=n_kv, feed_forward_length=n_ff)
    m.u32(attention__sliding_window=6, attention__key_length_swa=8, attention__value_length_swa=8,
          rope__dimension_count_swa=8, attention__shared_kv_layers=shared, embedding_length_per_layer_input=per_layer)
    m.f32(rope__freq_base_swa=100.0, final_logit_softcapping=9.0)
    put_embeddings(m, tied=True)
    # what full layers rotate: a quarter
    m.tensors['rope_freqs.weight'] = np.array([1.0] * 2 + [1e30] * 6, np.float32)
    for il in range(n):
        b, head_dim = 'blk.%d.' % il, 8 if windows[il] else 16
        m.norm(b + 'attn_norm', N_EMBD)
        m.weight(b + 'attn_q', 4 * head_dim, N_EMBD)
        m.norm(b + 'attn_q_norm', head_dim)
        if il < n - shared:
            m.weight(b + 'attn_k', n_kv[il] * head_dim, N_EMBD)
            if windows[il] or not no_values: m.weight(b + 'attn_v', n_kv[il] * head_dim, N_EMBD)
            m.norm(b + 'attn_k_norm', head_dim)
        m.weight(b + 'attn_output', N_EMBD, 4 * head_dim)
        # branches as large as the scaled embedding
        m.norm(b + 'post_attention_norm', N_EMBD, mean=3.0)
        m.norm(b + 'ffn_norm', N_EMBD)
        put_ffn(m, il, n_ff[il])
        m.norm(b + 'post_ffw_norm', N_EMBD, mean=3.0)
        m.vector(b + 'layer_output_scale.weight', 1, mean=0.8, spread=0.1)
    return m


def gemma4_attention(m, il, h, kept):
    """scores are not scaled; values are normalised, without weights. kept: keys and values by layer"""
    b, pattern = 'blk.%d.attn_' % il, m.get('attention.sliding_window_pattern')
    windowed, swa = pattern[il], '_swa' if pattern[il] else ''
    n_rot, base = m.get('rope.dimension_count' + swa, m.get('rope.dimension_count')), m.get('rope.freq_base' + swa)
    factors = 1.0 if windowed or not m.has('rope_freqs.weight') else m.at('rope_freqs.weight')
    eps = m.get('attention.layer_norm_rms_epsilon')
    q = rms_norm(m, b + 'q_norm', heads(linear(m, b + 'q', h), m.get('attention.head_count')))
    first_shared = m.get('block_count') - m.get('attention.shared_kv_layers')
    if il < first_shared:
        n_kv = m.at_layer('attention.head_count_kv', il)
        k = heads(linear(m, b + 'k', h), n_kv)
        v = heads(linear(m, b + 'v', h), n_kv) if m.has(b + 'v.weight') else k
        kept[il] = rope(rms_norm(m, b + 'k_norm', k), n_rot, base, 'far', factors), rms(v, eps)
        k, v = kept[il]
    else:  # those of the last layer of the same kind that has some
        k, v = kept[max(j for j in range(first_shared) if pattern[j] == windowed)]
    window = m.get('attention.sliding_window') if windowed else 0
    return linear(m, b + 'output', attention(rope(q, n_rot, base, 'far', factors), k, v, 1.0, window))


def gemma4_ffn(m, il, x):
    """a layer with experts adds theirs to the dense ffn's output; x reaches both, and the router, by other norms"""
    b = 'blk.%d.' % il
    y = gated_ffn(m, il, rms_norm(m, b + 'ffn_norm', x), act=gelu)
    if m.has(b + 'ffn_gate_inp.weight'):
        seen = rms(x, m.get('attention.layer_norm_rms_epsilon')) * m.at(b + 'ffn_gate_inp.scale') * x.shape[1] ** -0.5
        score = linear(m, b + 'ffn_gate_inp', seen)
        w = choose_experts(m, softmax(score), score, normalised=True) * m.at(b + 'ffn_down_exps.scale')
        moe = experts(m, il, rms_norm(m, b + 'pre_ffw_norm_2', x), w, act=gelu)
        y = rms_norm(m, b + 'post_ffw_norm_1', y) + rms_norm(m, b + 'post_ffw_norm_2', moe)
    return rms_norm(m, b + 'post_ffw_norm', y)


def gemma4_decoder(m, tokens):
    n, n_embd, width = m.get('block_count'), m.get('embedding_length'), m.get('embedding_length_per_layer_input')
    x, kept = m.at('token_embd.weight')[tokens] * n_embd ** 0.5, {}
    if width:  # a second embedding of each token, a part for each layer, mixed with what the first says
        own = m.at('per_layer_token_embd.weight')[tokens] * width ** 0.5
        seen = rms_norm(m, 'per_layer_proj_norm', heads(linear(m, 'per_layer_model_proj', x) * n_embd ** -0.5, n))
        extra = (heads(own, n) + seen) * 0.5 ** 0.5
    for il in range(n):
        b = 'blk.%d.' % il
        mixed = gemma4_attention(m, il, rms_norm(m, b + 'attn_norm', x), kept)
        x = x + rms_norm(m, b + 'post_attention_norm', mixed)
        x = x + gemma4_ffn(m, il, x)
        if width:
            gated = gelu(linear(m, b + 'inp_gate', x)) * extra[:, il]
            x = x + rms_norm(m, b + 'post_norm', linear(m, b + 'proj', gated))
        x = x * m.at(b + 'layer_output_scale.weight')
    cap = m.get('final_logit_softcapping')
    return cap * np.tanh(logits(m, rms_norm(m, 'output_norm', x)) / cap)


def make_gemma4():
    """the small models: embeddings per layer, shared keys and values, a wider ffn where they are shared"""
    width, n = 8, 5
    m = gemma4('gemma4', [True, True, False, True, False], [2, 2, 1, 2, 1], 2, width, [40, 40, 40, 56, 56], False)
    m.weight('per_layer_token_embd', N_VOCAB, n * width, gain=n ** 0.5)
    m.weight('per_layer_model_proj', n * width, N_EMBD)
    m.norm('per_layer_proj_norm', width)
    for il in range(n):
        m.weight('blk.%d.inp_gate' % il, width, N_EMBD)
        m.weight('blk.%d.proj' % il, N_EMBD, width)
        m.norm('blk.%d.post_norm' % il, N_EMBD, mean=3.0)
    return m, gemma4_decoder


def altup_router(m, il, x):
    b = 'blk.%d.altup_' % il
    return np.tanh(linear(m, b + 'router', rms_norm(m, b + 'router_norm', x) / x.shape[1]))


def gemma3n_layer(m, il, streams, kept, extra):
    """streams [n, T, n_embd]: the first is computed, all are predicted before and corrected after (AltUp)"""
    b, n = 'blk.%d.' % il, len(streams)
    mix = linear(m, b + 'altup_predict_coef', altup_router(m, il, streams[0])).reshape(-1, n, n)
    predicted = streams + np.einsum('tok,kte->ote', mix, streams)
    active = predicted[0]
    h = rms_norm(m, b + 'attn_norm', active)
    laurel = h + rms_norm(m, b + 'laurel_post_norm', linear(m, b + 'laurel_r', linear(m, b + 'laurel_l', h)))
    attended = active + rms_norm(m, b + 'post_attention_norm', gemma4_attention(m, il, h, kept))
    x = (attended + laurel) / 2.0 ** 0.5
    h = rms_norm(m, b + 'ffn_norm', x)
    gate, cutoff = linear(m, b + 'ffn_gate', h), m.get('activation_sparsity_scale')[il]
    if np.isfinite(cutoff):  # only what stands out among the gates of a token
        least = gate.mean(1, keepdims=True) + cutoff * gate.std(1, ddof=1, keepdims=True)
        gate = np.maximum(gate - least, 0.0)
    y = linear(m, b + 'ffn_down', gelu(gate) * linear(m, b + 'ffn_up', h))
    x = x + rms_norm(m, b + 'post_ffw_norm', y)
    gain = 1.0 + linear(m, b + 'altup_correct_coef', altup_router(m, il, x))
    streams = predicted + gain.T[:, :, None] * (x - active)
    seen = linear(m, b + 'inp_gate', streams[0] * m.at(b + 'altup_correct_scale.weight'))
    more = rms_norm(m, b + 'post_norm', linear(m, b + 'proj', gelu(seen) * extra[:, il]))
    return np.concatenate([streams[:1], streams[1:] + more])


def make_gemma3n():
    """AltUp, LAuReL, trimmed gates, a second embedding; layers that share keys and values have matrices for them, too,
    which nothing reads"""
    m, layers, width, n, rank = Model('gemma3n', 'gemma3n'), 5, 8, 3, 6
    common_keys(m, layers=layers, n_head=4, n_kv=2, head_dim=16, n_ff=40, base=1000.0)
    m.bools(attention__sliding_window_pattern=[True, True, False, True, False])
    m.u32(attention__sliding_window=6, attention__shared_kv_layers=2, embedding_length_per_layer_input=width,
          altup__num_inputs=n, altup__active_idx=0)
    m.f32(rope__freq_base_swa=100.0, final_logit_softcapping=9.0)
    m.put('f32s', dict(activation_sparsity_scale=[1.25, 0.5, -0.25, -np.inf, -np.inf]))
    put_embeddings(m, tied=True)
    m.weight('per_layer_token_embd', N_VOCAB, layers * width, gain=layers ** 0.5)
    m.weight('per_layer_model_proj', layers * width, N_EMBD)
    m.norm('per_layer_proj_norm', width)
    for name in 'altup_proj', 'altup_unembd_proj': m.weight(name, n - 1, N_EMBD, N_EMBD)
    for il in range(layers):
        b = 'blk.%d.' % il
        put_attention(m, il)
        put_ffn(m, il, 40)
        for name in 'attn_q_norm', 'attn_k_norm': m.norm(b + name, 16)
        for name in 'attn_norm', 'ffn_norm', 'laurel_post_norm', 'altup_router_norm', 'altup_correct_scale':
            m.norm(b + name, N_EMBD)
        for name in 'post_attention_norm', 'post_ffw_norm', 'post_norm': m.norm(b + name, N_EMBD, mean=3.0)
        m.weight(b + 'altup_router', n, N_EMBD, gain=N_EMBD)
        m.weight(b + 'altup_predict_coef', n * n, n, gain=0.5)
        m.weight(b + 'altup_correct_coef', n, n, gain=0.5)
        m.weight(b + 'laurel_l', rank, N_EMBD)
        m.weight(b + 'laurel_r', N_EMBD, rank)
        m.weight(b + 'inp_gate', width, N_EMBD)
        m.weight(b + 'proj', N_EMBD, width)

    def forward(m, tokens):
        def length(x): return np.sqrt((x * x).sum(-1, keepdims=True))
        x, kept = m.at('token_embd.weight')[tokens] * N_EMBD ** 0.5, {}
        own = m.at('per_layer_token_embd.weight')[tokens] * width ** 0.5
        seen = rms_norm(m, 'per_layer_proj_norm', heads(linear(m, 'per_layer_model_proj', x) * N_EMBD ** -0.5, layers))
        extra = (heads(own, layers) + seen) * 0.5 ** 0.5
        others = np.einsum('sij,tj->sti', m.at('altup_proj.weight'), x)
        streams = np.concatenate([x[None], others / length(others) * length(x)])
        for il in range(layers): streams = gemma3n_layer(m, il, streams, kept, extra)
        others = np.einsum('sij,stj->sti', m.at('altup_unembd_proj.weight'), streams[1:])
        x = (streams[0] + (others / length(others) * length(streams[0])).sum(0)) / n
        cap = m.get('final_logit_softcapping')
        return cap * np.tanh(logits(m, rms_norm(m, 'output_norm', x)) / cap)
    return m, forward


def make_gemma4_moe():
    """the large models: experts beside the dense ffn, full layers without values"""
    m = gemma4('gemma4-moe', [True, True, False], [2, 2, 1], 0, 0, [40, 40, 40], True)
    m.u32(expert_count=6, expert_used_count=2, expert_feed_forward_length=16)
    for il in range(3):
        b = 'blk.%d.' % il
        put_experts(m, il, 6, 16)
        fuse_experts(m, il)
        # the router divides by the root of the width
        m.vector(b + 'ffn_gate_inp.scale', N_EMBD, mean=N_EMBD ** 0.5)
        m.vector(b + 'ffn_down_exps.scale', 6, mean=1.0)
        m.norm(b + 'pre_ffw_norm_2', N_EMBD)
        m.norm(b + 'post_ffw_norm_1', N_EMBD)
        m.norm(b + 'post_ffw_norm_2', N_EMBD)
    return m, gemma4_decoder


def make_gemma():
    """one key head; gelu; the embedding scaled by the root of its width"""
    m = Model('gemma', 'gemma')
    common_keys(m, layers=2, n_head=4, n_kv=1, head_dim=16, n_ff=48, base=1000.0, eps=0.05)
    put_embeddings(m, tied=True, gain=3.0)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        put_ffn(m, il, 48)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, 'far'),
        lambda m, il, h: gated_ffn(m, il, h, act=gelu), embedding_scale=m.get('embedding_length') ** 0.5)


def make_gemma3_linear():
    """norms before and after each branch; layers with a window have a rope base of their own, which files leave out,
    and no rope factor"""
    m = Model('gemma3', 'gemma3-linear')
    common_keys(m, layers=3, n_head=4, n_kv=2, head_dim=16, n_ff=40, base=1000.0)
    m.u32(attention__sliding_window=6, attention__sliding_window_pattern=2)
    m.text(rope__scaling__type='linear')
    m.f32(rope__scaling__factor=8.0)
    put_embeddings(m, tied=True)
    for il in range(3):
        b = 'blk.%d.' % il
        m.norm(b + 'attn_norm', N_EMBD)
        put_attention(m, il)
        m.norm(b + 'attn_q_norm', 16)
        m.norm(b + 'attn_k_norm', 16)
        m.norm(b + 'post_attention_norm', N_EMBD, mean=3.0)
        m.norm(b + 'ffn_norm', N_EMBD)
        put_ffn(m, il, 40)
        m.norm(b + 'post_ffw_norm', N_EMBD, mean=3.0)

    def mix(m, il, h):
        period, window = m.get('attention.sliding_window_pattern'), m.get('attention.sliding_window')
        if il % period < period - 1: mixed = self_attention(m, il, h, 'far', 'head', window, base=10000.0)
        else: mixed = self_attention(m, il, h, 'far', 'head', factors=m.get('rope.scaling.factor'))
        return rms_norm(m, 'blk.%d.post_attention_norm' % il, mixed)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, mix, lambda m, il, h: rms_norm(m, 'blk.%d.post_ffw_norm' % il, gated_ffn(m, il, h, act=gelu)),
        embedding_scale=m.get('embedding_length') ** 0.5)


def make_olmo3():
    """arch olmo2: norms after the branches only; three of four layers have a window, and no part in yarn"""
    m = Model('olmo2', 'olmo3')
    common_keys(m, layers=4, n_head=4, n_kv=2, head_dim=8, n_ff=40, base=1000.0)
    m.u32(attention__sliding_window=6, rope__scaling__original_context_length=32)
    m.text(rope__scaling__type='yarn')
    m.f32(rope__scaling__factor=8.0, rope__scaling__attn_factor=1.2)
    put_embeddings(m)
    for il in range(4):
        b = 'blk.%d.' % il
        put_attention(m, il)
        m.norm(b + 'attn_q_norm', 32)
        m.norm(b + 'attn_k_norm', 16)
        m.norm(b + 'post_attention_norm', N_EMBD)
        put_ffn(m, il, 40)
        m.norm(b + 'post_ffw_norm', N_EMBD)

    def forward(m, tokens):
        x, factors = m.at('token_embd.weight')[tokens], yarn_factors(m)
        grown = (1.0 + 0.1 * np.log(m.get('rope.scaling.factor'))) * m.get('rope.scaling.attn_factor')
        for il in range(m.get('block_count')):
            b = 'blk.%d.' % il
            if il % 4 == 3: mixed = self_attention(m, il, x, 'far', 'full', factors=factors, grown=grown)
            else: mixed = self_attention(m, il, x, 'far', 'full', m.get('attention.sliding_window'))
            x = x + rms_norm(m, b + 'post_attention_norm', mixed)
            x = x + rms_norm(m, b + 'post_ffw_norm', gated_ffn(m, il, x))
        return logits(m, rms_norm(m, 'output_norm', x))
    return m, forward


def yarn_factors(m, base=None):
    """what divides the angles of each pair. Pairs that turn less than once in the original context are interpolated,
    those that turn 32 times or more are not, and those between in part"""
    n_rot, base = m.get('rope.dimension_count'), base or m.get('rope.freq_base')
    factor, context = m.get('rope.scaling.factor'), m.get('rope.scaling.original_context_length')

    def pair_that_turns(times): return n_rot * np.log(context / (times * 2.0 * np.pi)) / (2.0 * np.log(base))
    low, high = max(0.0, np.floor(pair_that_turns(32.0))), min(n_rot - 1.0, np.ceil(pair_that_turns(1.0)))
    interpolated = np.clip((np.arange(n_rot // 2) - low) / max(0.001, high - low), 0.0, 1.0)
    return 1.0 / (interpolated / factor + (1.0 - interpolated))


def latent_attention(m, il, h, factors, gain, seen=None):
    """keys and values of all heads from one narrow vector per token, beside it the one part of the keys that turns. New
    files have the matrices from the narrow vector by head, and transposed for keys; old ones have one matrix, in which
    each head's rows are those of its key and then of its value"""
    b, n_head, n_rot = 'blk.%d.attn_' % il, m.get('attention.head_count'), m.get('rope.dimension_count')
    base, rank = m.get('rope.freq_base'), m.get('attention.kv_lora_rank')
    if m.has(b + 'q.weight'): q = linear(m, b + 'q', h)
    else: q = linear(m, b + 'q_b', rms_norm(m, b + 'q_a_norm', linear(m, b + 'q_a', h)))
    q, narrow = heads(q, n_head), linear(m, b + 'kv_a_mqa', h)
    still = q.shape[2] - n_rot
    turning = rope(narrow[:, None, rank:], n_rot, base, 'near', factors)
    q = np.concatenate([q[..., :still], rope(q[..., still:], n_rot, base, 'near', factors)], 2)
    narrow = rms_norm(m, b + 'kv_a_norm', narrow[:, :rank])
    if m.has(b + 'kv_b.weight'): k, v = np.split(heads(linear(m, b + 'kv_b', narrow), n_head), [still], 2)
    else:
        k = np.einsum('tr,hrd->thd', narrow, m.at(b + 'k_b.weight'))
        v = np.einsum('tr,hdr->thd', narrow, m.at(b + 'v_b.weight'))
    k = np.concatenate([k, np.repeat(turning, n_head, 1)], 2)
    return linear(m, b + 'output', attention(q, k, v, gain * q.shape[2] ** -0.5, seen=seen))


def deepseek2(name, n_head, n_kv, n_rot, rank, gating, n_expert, used, shared, layers=2):
    """keys that both forms have, and a dense first layer"""
    m = Model('deepseek2', name)
    common_keys(m, layers=layers, n_head=n_head, n_kv=n_kv, head_dim=rank + n_rot, n_ff=48, base=1000.0, n_rot=n_rot)
    m.u32(attention__kv_lora_rank=rank, leading_dense_block_count=1, expert_count=n_expert, expert_used_count=used,
          expert_feed_forward_length=16, expert_shared_count=shared, expert_gating_func=gating,
          rope__scaling__original_context_length=32)
    m.text(rope__scaling__type='yarn')
    put_embeddings(m)
    for il in range(layers):
        b = 'blk.%d.' % il
        m.norm(b + 'attn_norm', N_EMBD)
        m.weight(b + 'attn_kv_a_mqa', rank + n_rot, N_EMBD, gain=1.5)
        m.norm(b + 'attn_kv_a_norm', rank)
        m.norm(b + 'ffn_norm', N_EMBD)
        if il < 1: put_ffn(m, il, 48)
        else:
            put_experts(m, il, n_expert, 16)
            put_ffn(m, il, 16 * shared, '_shexp')
    return m


def deepseek2_ffn(m, il, h):
    if il < m.get('leading_dense_block_count'): return gated_ffn(m, il, h)
    score = linear(m, 'blk.%d.ffn_gate_inp' % il, h)
    probs = sigmoid(score) if m.get('expert_gating_func') == 2 else softmax(score)
    if m.has('blk.%d.exp_probs_b.bias' % il): score = probs + m.at('blk.%d.exp_probs_b.bias' % il)
    if m.get('expert_group_count', 1) > 1: score = best_groups(m, score)
    w = choose_experts(m, probs, score, m.get('expert_weights_norm')) * m.get('expert_weights_scale')
    return experts(m, il, h, w) + gated_ffn(m, il, h, '_shexp')


def deepseek2_mix(m, il, h):
    grown = 1.0 + m.get('rope.scaling.yarn_log_multiplier') * np.log(m.get('rope.scaling.factor'))
    return latent_attention(m, il, h, yarn_factors(m), grown * grown)


def deepseek2_decoder(m, tokens): return pre_norm_decoder(m, tokens, deepseek2_mix, deepseek2_ffn)


def make_deepseek2_groups(mtp=False):
    """DeepSeek V3: narrow queries, sigmoid scores with a bias for the choice, groups of experts"""
    name, layers = ('deepseek2-mtp', 3) if mtp else ('deepseek2-groups', 2)
    m = deepseek2(name, 4, 1, 8, 24, gating=2, n_expert=12, used=3, shared=2, layers=layers)
    m.u32(attention__value_length=24, attention__key_length_mla=20, attention__value_length_mla=10,
          attention__q_lora_rank=20, expert_group_count=4, expert_group_used_count=2)
    m.f32(rope__scaling__factor=8.0, rope__scaling__yarn_log_multiplier=0.1, expert_weights_scale=1.8)
    m.flag(expert_weights_norm=True)
    for il in range(layers):
        b = 'blk.%d.attn_' % il
        m.weight(b + 'q_a', 20, N_EMBD)
        m.norm(b + 'q_a_norm', 20)
        m.weight(b + 'q_b', 4 * 20, 20, gain=1.5)
        m.weight(b + 'k_b', 4, 24, 12, gain=1.5 * 0.5 ** 0.5)
        m.weight(b + 'v_b', 4, 10, 24)
        m.weight(b + 'output', N_EMBD, 4 * 10, gain=1.5)
    for il in range(1, layers): m.vector('blk.%d.exp_probs_b.bias' % il, 12, spread=0.2)
    if mtp:
        m.u32(nextn_predict_layers=1)
        put_mtp(m, ('norm',))
    return with_mtp(m, deepseek2_mix, deepseek2_ffn)


def make_deepseek2_mtp(): return make_deepseek2_groups(mtp=True)


def make_glm4moe_mtp():
    """GLM-4.5: queries, keys and values have biases, heads turn in part and are normed; sigmoid experts beside a shared one"""
    m = Model('glm4moe', 'glm4moe-mtp')
    common_keys(m, layers=3, n_head=4, n_kv=2, head_dim=8, n_ff=48, base=1000.0, n_rot=4)
    m.u32(expert_count=6, expert_used_count=2, expert_feed_forward_length=16, expert_shared_count=1, expert_gating_func=2,
          leading_dense_block_count=1, nextn_predict_layers=1)
    m.f32(expert_weights_scale=1.8)
    m.flag(expert_weights_norm=True)
    put_family(m, 3, 48, bias=True, qk=lambda n: (8,), norms=('attn_norm', 'post_attention_norm'), dense=lambda il: il == 0)
    for il in (1, 2): put_router(m, il, 6, 16, bias=True, shared=16)
    put_mtp(m, OWN)

    def mix(m, il, h): return parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x), n_rot=4)

    def ffn(m, il, h):
        return experts(m, il, h, sigmoid_weights(m, il, h)) + gated_ffn(m, il, h, '_shexp') if il else gated_ffn(m, il, h)
    return with_mtp(m, mix, ffn, 'post_attention_norm')


def make_deepseek2_lite(legacy=False):
    """DeepSeek V2 Lite: full queries, softmax scores as they are; in the first files one matrix for keys and values"""
    m = deepseek2('deepseek2-lite-legacy' if legacy else 'deepseek2-lite', 4, 4 if legacy else 1, 8, 24, 1, 6, 2, 1)
    if legacy: m.u32(attention__key_length=20, attention__value_length=12)
    else: m.u32(attention__value_length=24, attention__key_length_mla=20, attention__value_length_mla=12)
    m.f32(rope__scaling__factor=4.0, rope__scaling__yarn_log_multiplier=0.0707, expert_weights_scale=1.0)
    m.flag(expert_weights_norm=False)
    for il in range(2):
        b = 'blk.%d.attn_' % il
        m.weight(b + 'q', 4 * 20, N_EMBD, gain=1.5)
        if legacy: m.weight(b + 'kv_b', 4 * (12 + 12), 24, gain=1.5)
        else:
            m.weight(b + 'k_b', 4, 24, 12, gain=1.5 * 0.5 ** 0.5)
            m.weight(b + 'v_b', 4, 12, 24, gain=1.5)
        m.weight(b + 'output', N_EMBD, 4 * 12, gain=1.5)
    return m, deepseek2_decoder


def make_deepseek2_lite_legacy(): return make_deepseek2_lite(legacy=True)


def best_of_each(m, score, kept):
    """[T, n] score, of which the `kept` best are chosen, of equal ones (nothing was above zero) the first; -inf: none"""
    seen = np.zeros(score.shape, bool)
    for t, row in enumerate(score):
        order = np.argsort(-row, kind='stable')
        seen[t, order[:kept]] = row[order[:kept]] > -np.inf
        if (row > -np.inf).sum() <= kept: continue
        gap = row[order[kept - 1]] - row[order[kept]]
        if gap or row[order[kept]]: m.router_margin = min(m.router_margin, gap)
    return seen


def latent_choice(m, il, h, short, pairs, still, eps):
    """which eight positions three heads of an indexer score best; their queries come from short. Queries and key turn in
    eight dimensions, after `still` ones that do not"""
    b = 'blk.%d.indexer.' % il
    q, k = heads(linear(m, b + 'attn_q_b', short), 3), linear(m, b + 'attn_k', h)
    k = k - k.mean(-1, keepdims=True)
    k = (rms(k, eps) * m.at(b + 'k_norm.weight') + m.at(b + 'k_norm.bias'))[:, None]
    q, k = (np.concatenate([x[..., :still], rope(x[..., still:], 8, 1000.0, pairs)], 2) for x in (q, k))
    score = np.einsum('th,ths->ts', linear(m, b + 'proj', h), np.maximum(np.einsum('thd,sd->ths', q, k[:, 0]), 0.0))
    age = np.arange(len(h))[:, None] - np.arange(len(h))[None, :]
    return best_of_each(m, np.where(age < 0, -np.inf, score), 8)


def lead_and_experts(m, il, h):
    """a dense FFN in the first layer, then experts by sigmoids, times 1.8, and a shared one"""
    if il == 0: return gated_ffn(m, il, h)
    probs = sigmoid(linear(m, 'blk.%d.ffn_gate_inp' % il, h))
    w = choose_experts(m, probs, probs + m.at('blk.%d.exp_probs_b.bias' % il), True)
    return 1.8 * experts(m, il, h, w) + gated_ffn(m, il, h, '_shexp')


def make_sparse_latent(arch, pairs, shared):
    """DeepSeek V3.2 and GLM-5: latent attention to the eight positions that an indexer's heads score best; its queries
    and key turn in their first dimensions. In GLM-5 layers may take over an earlier layer's choice"""
    m = Model(arch, arch)
    common_keys(m, layers=3, n_head=4, n_kv=1, head_dim=24 + 8, n_ff=48, base=1000.0, n_rot=8)
    m.u32(attention__kv_lora_rank=24, attention__q_lora_rank=20, attention__value_length=24, attention__key_length_mla=20,
          attention__value_length_mla=10, leading_dense_block_count=1, expert_count=6, expert_used_count=2,
          expert_feed_forward_length=16, expert_shared_count=1, expert_gating_func=2, attention__indexer__head_count=3,
          attention__indexer__key_length=12, attention__indexer__top_k=8)
    if shared: m.i32s(attention__indexer__types=[1, 0, 1])
    m.f32(expert_weights_scale=1.8)
    m.flag(expert_weights_norm=True)
    put_embeddings(m)
    for il in range(3):
        b = 'blk.%d.' % il
        for name, n in (('attn_norm', N_EMBD), ('attn_q_a_norm', 20), ('attn_kv_a_norm', 24), ('ffn_norm', N_EMBD)): m.norm(b + name, n)
        for name, *shape in (('q_a', 20, N_EMBD), ('q_b', 80, 20), ('kv_a_mqa', 32, N_EMBD), ('k_b', 4, 24, 12), ('v_b', 4, 10, 24), ('output', N_EMBD, 40)):
            m.weight(b + 'attn_' + name, *shape, gain=1.5)
        if il == 0: put_ffn(m, il, 48)
        else:
            put_experts(m, il, 6, 16)
            put_ffn(m, il, 16, '_shexp')
            m.vector(b + 'exp_probs_b.bias', 6, spread=0.2)
        if il == 1 and shared: continue
        for name, *shape in (('attn_q_b', 36, 20), ('attn_k', 12, N_EMBD), ('proj', 3, N_EMBD)): m.weight(b + 'indexer.' + name, *shape, gain=1.5)
        m.norm(b + 'indexer.k_norm', 12)
        m.vector(b + 'indexer.k_norm.bias', 12)

    def decoder(m, tokens):
        last = [None]
        def mix(m, il, h):
            b = 'blk.%d.attn_q_a' % il
            if il != 1 or not shared: last[0] = latent_choice(m, il, h, rms_norm(m, b + '_norm', linear(m, b, h)), pairs, 0, 1e-6)
            return latent_attention(m, il, h, 1.0, 1.0, last[0])
        return pre_norm_decoder(m, tokens, mix, lead_and_experts)
    return m, decoder


def make_deepseek32(): return make_sparse_latent('deepseek32', 'far', shared=False)
def make_glm_dsa(): return make_sparse_latent('glm-dsa', 'near', shared=True)


def make_dots3note():
    """Layers with a window of six positions have latents, keys and values of other widths and another base; the others
    attend to the eight positions that an indexer scores best. The part of a key that turns is normalised, and a gate for
    each head closes what it found"""
    m = Model('dots3note', 'dots3note')
    common_keys(m, layers=3, n_head=4, n_kv=1, head_dim=24 + 8, n_ff=48, base=1000.0, n_rot=8)
    m.u32(attention__kv_lora_rank=24, attention__q_lora_rank=20, attention__value_length=24, attention__key_length_mla=20,
          attention__value_length_mla=10, leading_dense_block_count=1, expert_count=6, expert_used_count=2,
          expert_feed_forward_length=16, expert_shared_count=1, expert_gating_func=2, attention__indexer__head_count=3,
          attention__indexer__key_length=12, attention__indexer__top_k=8, attention__sliding_window=6,
          attention__kv_lora_rank_swa=16, attention__key_length_mla_swa=18, attention__value_length_mla_swa=7)
    m.i32s(attention__indexer__types=[1, 0, 1], attention__sliding_window_pattern=[0, 1, 0], attention__head_count=[4, 3, 4])
    m.f32(expert_weights_scale=1.8, rope__freq_base_swa=300.0)
    m.flag(expert_weights_norm=True)
    put_embeddings(m)
    sizes = [(4, 24, 20, 10, 1000.0), (3, 16, 18, 7, 300.0), (4, 24, 20, 10, 1000.0)]
    for il, (n_head, rank, key, value, _) in enumerate(sizes):
        b = 'blk.%d.' % il
        for name, n in (('attn_norm', N_EMBD), ('attn_q_a_norm', 20), ('attn_kv_a_norm', rank), ('attn_k_norm', 8), ('ffn_norm', N_EMBD)):
            m.norm(b + name, n)
        for name, *shape in (('q_a', 20, N_EMBD), ('q_b', n_head * key, 20), ('kv_a_mqa', rank + 8, N_EMBD), ('k_b', n_head, rank, key - 8),
                             ('v_b', n_head, value, rank), ('gate', n_head, N_EMBD), ('output', N_EMBD, n_head * value)):
            m.weight(b + 'attn_' + name, *shape, gain=1.5)
        put_ffn_and_indexer(m, il)

    def mix(m, il, h):
        b, (n_head, rank, key, value, base) = 'blk.%d.attn_' % il, sizes[il]
        short = rms_norm(m, b + 'q_a_norm', linear(m, b + 'q_a', h))
        q, narrow = heads(linear(m, b + 'q_b', short), n_head), linear(m, b + 'kv_a_mqa', h)
        turning = rope(rms_norm(m, b + 'k_norm', narrow[:, None, rank:]), 8, base, 'near')
        q = np.concatenate([q[..., :key - 8], rope(q[..., key - 8:], 8, base, 'near')], 2)
        narrow = rms_norm(m, b + 'kv_a_norm', narrow[:, :rank])
        k = np.concatenate([np.einsum('tr,hrd->thd', narrow, m.at(b + 'k_b.weight')), np.repeat(turning, n_head, 1)], 2)
        v = np.einsum('tr,hdr->thd', narrow, m.at(b + 'v_b.weight'))
        y = attention(q, k, v, key ** -0.5, 6 if il == 1 else 0, seen=None if il == 1 else latent_choice(m, il, h, short, 'far', 0, 1e-6))
        y = heads(y, n_head) * sigmoid(linear(m, b + 'gate', h))[:, :, None]
        return linear(m, b + 'output', y.reshape(len(h), -1))
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mix, lead_and_experts)


def make_hrm_text():
    """Two stacks of two layers take turns, the low one twice and then the high one, twice in all. Each reads the sum of
    what both have made, at first a vector of the file and the embedding; norms have no weights"""
    m = Model('hrm_text', 'hrm-text')
    common_keys(m, layers=12, n_head=4, n_kv=2, head_dim=12, n_ff=40, base=1000.0, n_rot=12)
    m.u32(hrm__layers_per_stack=2, hrm__h_cycles=2, hrm__l_cycles=2)
    m.f32(embedding_scale=1.75)
    m.weight('token_embd', N_VOCAB, N_EMBD, gain=N_EMBD ** 0.5)
    m.weight('output', N_VOCAB, N_EMBD, gain=4.0)
    m.vector('hrm.z_l_init', N_EMBD, spread=0.8)
    for il in range(4):
        put_attention(m, il)
        m.weight('blk.%d.attn_gate' % il, 48, N_EMBD, gain=1.5)
        put_ffn(m, il, 40)

    def layer(m, il, x):
        b, eps = 'blk.%d.attn_' % il, m.get('attention.layer_norm_rms_epsilon')
        h = rms(x, eps)
        q, k = (rope(heads(linear(m, b + name, h), n), 12, 1000.0, 'far') for name, n in (('q', 4), ('k', 2)))
        y = attention(q, k, heads(linear(m, b + 'v', h), 2), 12 ** -0.5)
        x = x + linear(m, b + 'output', y * sigmoid(linear(m, b + 'gate', h)))
        return x + gated_ffn(m, il, rms(x, eps))

    def forward(m, tokens):
        high = m.at('token_embd.weight')[tokens] * 1.75
        low = np.repeat(m.at('hrm.z_l_init')[None], len(tokens), 0)
        for turn in range(6):
            x, first = high + low, 2 if turn % 3 == 2 else 0
            for il in (first, first + 1): x = layer(m, il, x)
            x = rms(x, m.get('attention.layer_norm_rms_epsilon'))
            if first: high = x
            else: low = x
        return logits(m, high)
    return m, forward


def make_hy_v4():
    """Four residual streams: the normalised stream of all of them gives weights, by which a layer reads their sum, and
    others, by which they receive what it makes. Gated latent attention with sinks to the eight positions that an indexer
    scores best, whose heads turn in their last dimensions; the second layer takes over the first one's choice"""
    n_s = 4
    m = Model('hy_v4', 'hy-v4')
    common_keys(m, layers=3, n_head=4, n_kv=1, head_dim=24 + 8, n_ff=48, base=1000.0, n_rot=8)
    m.u32(attention__kv_lora_rank=24, attention__q_lora_rank=20, attention__value_length=24, attention__key_length_mla=20,
          attention__value_length_mla=10, leading_dense_block_count=1, expert_count=6, expert_used_count=2,
          expert_feed_forward_length=16, expert_shared_count=1, expert_gating_func=2, attention__indexer__head_count=3,
          attention__indexer__key_length=12, attention__indexer__top_k=8, hyper_connection__count=n_s)
    m.i32s(attention__indexer__types=[1, 0, 1])
    m.f32(expert_weights_scale=1.8, hyper_connection__epsilon=0.01, hyper_connection__magnitude=1.5)
    m.put('f32s', {'swiglu_clamp_exp': [0.0, 0.75, 0.5]})
    m.flag(expert_weights_norm=True)
    put_embeddings(m)

    def put_streams(name, parts):
        m.weight(name + '_fn', parts * n_s, n_s * N_EMBD, gain=1.5)
        m.vector(name + '_base.weight', parts * n_s, spread=0.5)
        m.vector(name + '_scale.weight', parts, mean=1.0, spread=0.4)

    put_streams('output_hc', 1)
    for il in range(3):
        b = 'blk.%d.' % il
        put_streams(b + 'hc_attn', 2)
        put_streams(b + 'hc_ffn', 2)
        for name, n in (('attn_norm', N_EMBD), ('attn_q_a_norm', 20), ('attn_kv_a_norm', 24), ('ffn_norm', N_EMBD)): m.norm(b + name, n)
        for name, *shape in (('q_a', 20, N_EMBD), ('q_b', 80, 20), ('kv_a_mqa', 32, N_EMBD), ('k_b', 4, 24, 12), ('v_b', 4, 10, 24),
                             ('gate', 40, N_EMBD), ('output', N_EMBD, 40)):
            m.weight(b + 'attn_' + name, *shape, gain=1.5)
        m.vector(b + 'attn_sinks.weight', 4, mean=0.5, spread=1.0)
        put_ffn_and_indexer(m, il)

    def weights(m, name, x):
        flat = x.reshape(len(x), -1)
        mixed = np.split(linear(m, name + '_fn', rms(flat, 2e-3)), len(m.at(name + '_scale.weight')), 1)
        base = m.at(name + '_base.weight').reshape(len(mixed), n_s)
        return [sigmoid(y * s + v) for y, s, v in zip(mixed, m.at(name + '_scale.weight'), base)]

    def read(take, x): return ((take + 0.01)[:, :, None] * x).sum(1)

    def attend(m, il, h, last):
        b = 'blk.%d.attn_' % il
        short = rms_norm(m, b + 'q_a_norm', linear(m, b + 'q_a', h))
        if il != 1: last[0] = latent_choice(m, il, h, short, 'near', 4, 2e-3)
        q, narrow = heads(linear(m, b + 'q_b', short), 4), linear(m, b + 'kv_a_mqa', h)
        q = np.concatenate([q[..., :12], rope(q[..., 12:], 8, 1000.0, 'near')], 2)
        turning = rope(narrow[:, None, 24:], 8, 1000.0, 'near')
        narrow = rms_norm(m, b + 'kv_a_norm', narrow[:, :24])
        k = np.concatenate([np.einsum('tr,hrd->thd', narrow, m.at(b + 'k_b.weight')), np.repeat(turning, 4, 1)], 2)
        y = attention(q, k, np.einsum('tr,hdr->thd', narrow, m.at(b + 'v_b.weight')), 20 ** -0.5, sinks=m.at(b + 'sinks.weight'), seen=last[0])
        return linear(m, b + 'output', y * sigmoid(linear(m, b + 'gate', h)))

    def ffn(m, il, h):
        if il == 0: return gated_ffn(m, il, h)
        b, most = 'blk.%d.' % il, m.at_layer('swiglu_clamp_exp', il)
        probs = sigmoid(linear(m, b + 'ffn_gate_inp', h))
        w = choose_experts(m, probs, probs + m.at(b + 'exp_probs_b.bias'), True)
        gate, up, down = (m.at(b + 'ffn_%s_exps.weight' % x) for x in ('gate', 'up', 'down'))
        y = sum(w[:, e:e + 1] * ((silu(np.minimum(h @ gate[e].T, most)) * np.clip(h @ up[e].T, -most, most)) @ down[e].T) for e in range(6))
        return 1.8 * y + gated_ffn(m, il, h, '_shexp')

    def forward(m, tokens):
        x, last = np.repeat(m.at('token_embd.weight')[tokens][:, None], n_s, 1), [None]
        for il in range(3):
            for part in ('attn', 'ffn'):
                b = 'blk.%d.' % il
                take, give = weights(m, b + 'hc_' + part, x)
                h = rms_norm(m, b + part + '_norm', read(take, x))
                y = attend(m, il, h, last) if part == 'attn' else ffn(m, il, h)
                x = x + (1.5 * give + 0.01)[:, :, None] * y[:, None]
        return logits(m, rms_norm(m, 'output_norm', read(weights(m, 'output_hc', x)[0], x)))
    return m, forward


def make_minimax_m3():
    """Each key head attends to three blocks of four positions, its own and the two that its index head scores best; the
    first layer is dense. Gates above 7 are cut, and values beside them above and below"""
    m = Model('minimax-m3', 'minimax-m3')
    common_keys(m, layers=3, n_head=4, n_kv=2, head_dim=12, n_ff=24, base=1000.0, n_rot=8)
    m.u32(leading_dense_block_count=1, expert_count=6, expert_used_count=2, expert_feed_forward_length=16, expert_shared_count=1,
          expert_gating_func=2, attention__indexer__head_count=2, attention__indexer__key_length=10,
          attention__indexer__top_k=3, attention__indexer__block_size=4, attention__indexer__local_blocks=1)
    m.f32(expert_weights_scale=1.5)
    m.flag(expert_weights_norm=True)
    put_embeddings(m)
    for il in range(3):
        b = 'blk.%d.' % il
        for name, n in (('attn_norm', N_EMBD), ('attn_q_norm', 12), ('attn_k_norm', 12), ('ffn_norm', N_EMBD)): m.norm(b + name, n)
        put_attention(m, il)
        if il == 0: put_ffn(m, il, 24)
        else:
            put_experts(m, il, 6, 16)
            put_ffn(m, il, 16, '_shexp')
            m.vector(b + 'exp_probs_b.bias', 6, spread=0.2)
            m.weight(b + 'indexer.q_proj', 20, N_EMBD, gain=1.5)
            m.weight(b + 'indexer.k_proj', 10, N_EMBD, gain=1.5)
            m.norm(b + 'indexer.q_norm', 10)
            m.norm(b + 'indexer.k_norm', 10)

    def choice(m, il, h):
        b, n = 'blk.%d.indexer.' % il, len(h)
        q = rope(rms_norm(m, b + 'q_norm', heads(linear(m, b + 'q_proj', h), 2)), 8, 1000.0, 'far')
        k = rope(rms_norm(m, b + 'k_norm', heads(linear(m, b + 'k_proj', h), 1)), 8, 1000.0, 'far')[:, 0]
        own, age = np.arange(n)[:, None] // 4, np.arange(n)[:, None] - np.arange(n)[None, :]
        seen = []
        for g in range(2):
            score = np.where(age < 0, -np.inf, q[:, g] @ k.T)
            block = np.stack([score[:, at:at + 4].max(1) for at in range(0, n, 4)], 1)
            block = np.where(np.arange(block.shape[1])[None, :] == own, 1e9, block)
            seen.append(np.repeat(best_of_each(m, block, 3), 4, 1)[:, :n])
        return np.stack(seen)

    def mix(m, il, h):
        b = 'blk.%d.attn_' % il
        q, k = (rope(rms_norm(m, b + x + '_norm', heads(linear(m, b + x, h), n)), 8, 1000.0, 'far') for x, n in (('q', 4), ('k', 2)))
        y = attention(q, k, heads(linear(m, b + 'v', h), 2), 12 ** -0.5, seen=choice(m, il, h) if il else None)
        return linear(m, b + 'output', y)

    def swiglu(gate, up):
        gate = np.minimum(gate, 7.0)
        return gate * sigmoid(1.702 * gate) * (np.clip(up, -7.0, 7.0) + 1.0)

    def mlp(m, il, h, suffix):
        b = 'blk.%d.ffn_' % il
        return linear(m, b + 'down' + suffix, swiglu(linear(m, b + 'gate' + suffix, h), linear(m, b + 'up' + suffix, h)))

    def ffn(m, il, h):
        b = 'blk.%d.ffn_' % il
        if il == 0: return mlp(m, il, h, '')
        probs = sigmoid(linear(m, b + 'gate_inp', h))
        w = 1.5 * choose_experts(m, probs, probs + m.at('blk.%d.exp_probs_b.bias' % il), True)
        gate, up, down = (m.at(b + x + '_exps.weight') for x in ('gate', 'up', 'down'))
        return mlp(m, il, h, '_shexp') + sum(w[:, e:e + 1] * (swiglu(h @ gate[e].T, h @ up[e].T) @ down[e].T) for e in range(6))
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mix, ffn)


def put_mamba(m, il, norms):
    b, inner, n, rank = 'blk.%d.ssm_' % il, m.get('ssm.inner_size'), m.get('ssm.state_size'), m.get('ssm.time_step_rank')
    m.weight(b + 'in', 2 * inner, N_EMBD)
    m.vector(b + 'conv1d.weight', inner, m.get('ssm.conv_kernel'), spread=1.0)
    m.vector(b + 'conv1d.bias', inner)
    m.weight(b + 'x', rank + 2 * n, inner, gain=1.5)
    m.weight(b + 'dt', inner, rank)
    m.vector(b + 'dt.bias', inner, spread=0.5)
    m.vector(b + 'a', inner, n, mean=-0.3, spread=0.07)
    m.vector(b + 'd', inner)
    m.weight(b + 'out', N_EMBD, inner, gain=1.5)
    for part, width in (('dt', rank), ('b', n), ('c', n)) if norms else (): m.norm(b + part + '_norm', width)


def put_mamba2(m, il, norm):
    b, inner, n, groups = 'blk.%d.ssm_' % il, m.get('ssm.inner_size'), m.get('ssm.state_size'), m.get('ssm.group_count')
    n_head = m.get('ssm.time_step_rank')
    m.weight(b + 'in', 2 * inner + 2 * groups * n + n_head, N_EMBD)
    m.vector(b + 'conv1d.weight', inner + 2 * groups * n, m.get('ssm.conv_kernel'), spread=1.0)
    m.vector(b + 'conv1d.bias', inner + 2 * groups * n)
    m.vector(b + 'dt.bias', n_head, spread=0.5)
    m.vector(b + 'a', n_head, 1, mean=-0.3, spread=0.07)
    m.vector(b + 'd', n_head, 1)
    if norm: m.vector(b + 'norm.weight', groups, inner // groups, mean=1.0)
    m.weight(b + 'out', N_EMBD, inner, gain=1.5)


def make_mamba():
    """only scans, no ffn; the time steps and what is written and read are normed, as in Falcon Mamba"""
    m = Model('mamba', 'mamba')
    common_keys(m, layers=3, n_head=0, n_kv=0, head_dim=0, n_ff=0)
    m.u32(ssm__conv_kernel=4, ssm__inner_size=72, ssm__state_size=5, ssm__time_step_rank=3)
    m.flag(ssm__dt_b_c_rms=True)
    for name in ('attention.key_length', 'attention.value_length', 'rope.dimension_count', 'attention.head_count_kv'): del m.keys['mamba.' + name]
    put_embeddings(m)
    for il in range(3):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_mamba(m, il, norms=False)
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mamba, None)


def make_jamba():
    """Mamba layers with norms, and attention without rope; experts in layers that have a router"""
    m = Model('jamba', 'jamba')
    common_keys(m, layers=3, n_head=4, n_kv=2, head_dim=8, n_ff=24)
    m.i32s(attention__head_count_kv=[0, 2, 0])
    m.u32(ssm__conv_kernel=4, ssm__inner_size=64, ssm__state_size=16, ssm__time_step_rank=2, expert_count=4, expert_used_count=2)
    put_embeddings(m)
    for il in range(3):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        if il == 1: put_attention(m, il, n_kv=2)
        else: put_mamba(m, il, norms=True)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
        if il == 1: put_experts(m, il, 4, 24)
        else: put_ffn(m, il, 24)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: self_attention(m, il, h, None) if il == 1 else mamba(m, il, h),
        lambda m, il, h: softmax_moe(m, il, h, normalised=False) if il == 1 else gated_ffn(m, il, h))


def make_falcon_h1():
    """attention and Mamba-2 side by side in every layer; a norm without a suffix"""
    m = Model('falcon-h1', 'falcon-h1')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=48, base=3000.0)
    m.u32(ssm__conv_kernel=4, ssm__inner_size=48, ssm__state_size=12, ssm__time_step_rank=6, ssm__group_count=2)
    put_embeddings(m)
    for il in range(2):
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        put_attention(m, il)
        put_mamba2(m, il, norm=il == 1)
        m.vector('blk.%d.ffn_norm' % il, N_EMBD, mean=1.0)
        put_ffn(m, il, 48)

    def layers(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(2):
            h = rms_norm(m, 'blk.%d.attn_norm' % il, x)
            x = x + self_attention(m, il, h, 'far') + mamba2(m, il, h)
            x = x + gated_ffn(m, il, rms(x, m.get('attention.layer_norm_rms_epsilon')) * m.at('blk.%d.ffn_norm' % il))
        return logits(m, rms_norm(m, 'output_norm', x))
    return m, layers


def make_nemotron_h_moe(mtp=False):
    """a layer is Mamba-2, attention without rope, or a squared-ReLU ffn, whose experts read a shorter vector. The MTP head's
    layer is attention and then experts; its last norm is RMS, as in vLLM and TensorRT-LLM (llama.cpp subtracts the mean)"""
    m = Model('nemotron_h_moe', 'nemotron-h-moe-mtp' if mtp else 'nemotron-h-moe')
    common_keys(m, layers=4 + mtp, n_head=4, n_kv=2, head_dim=8, n_ff=24)
    m.i32s(attention__head_count_kv=[0, 0, 2, 0] + [2] * mtp, feed_forward_length=[0, 24, 0, 20] + [24] * mtp)
    m.u32(ssm__conv_kernel=4, ssm__inner_size=48, ssm__state_size=12, ssm__time_step_rank=6, ssm__group_count=2, expert_count=6,
          expert_used_count=2, expert_feed_forward_length=24, expert_shared_feed_forward_length=20, expert_latent_length=16)
    m.flag(expert_weights_norm=True)
    m.f32(expert_weights_scale=2.5)
    put_embeddings(m)
    for il in range(4 + mtp): m.norm('blk.%d.attn_norm' % il, N_EMBD)
    put_mamba2(m, 0, norm=True)
    put_attention(m, 2, n_kv=2)
    for b in ['blk.1.'] + ['blk.4.'] * mtp:
        m.vector(b + 'ffn_gate_inp.weight', 6, N_EMBD, spread=2.5 / N_EMBD ** 0.5)
        m.vector(b + 'exp_probs_b.bias', 6, spread=0.2)
        for name, *shape in (('latent_down', 16, N_EMBD), ('up_exps', 6, 24, 16), ('down_exps', 6, 16, 24),
                             ('latent_up', N_EMBD, 16), ('up_shexp', 20, N_EMBD), ('down_shexp', N_EMBD, 20)):
            m.weight(b + 'ffn_' + name, *shape, gain=1.5)
    for name, *shape in (('up', 20, N_EMBD), ('down', N_EMBD, 20)): m.weight('blk.3.ffn_' + name, *shape, gain=1.5)

    def plain_ffn(m, b, h, suffix=''):
        return linear(m, b + 'ffn_down' + suffix, np.maximum(linear(m, b + 'ffn_up' + suffix, h), 0) ** 2)

    def moe(m, b, h):
        probs = sigmoid(linear(m, b + 'ffn_gate_inp', h))
        w = choose_experts(m, probs, probs + m.at(b + 'exp_probs_b.bias'), True) * 2.5
        u, up, down = linear(m, b + 'ffn_latent_down', h), m.at(b + 'ffn_up_exps.weight'), m.at(b + 'ffn_down_exps.weight')
        y = sum(w[:, e:e + 1] * (np.maximum(u @ up[e].T, 0) ** 2 @ down[e].T) for e in range(6))
        return linear(m, b + 'ffn_latent_up', y) + plain_ffn(m, b, h, '_shexp')

    def hidden(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il, part in enumerate((lambda h: mamba2(m, 0, h), lambda h: moe(m, 'blk.1.', h),
                                   lambda h: self_attention(m, 2, h, None), lambda h: plain_ffn(m, 'blk.3.', h))):
            x = x + part(rms_norm(m, 'blk.%d.attn_norm' % il, x))
        return rms_norm(m, 'output_norm', x)
    if mtp:
        m.u32(nextn_predict_layers=1)
        m.f32(attention__layer_norm_epsilon=1e-5)
        put_attention(m, 4, n_kv=2)
        m.norm('blk.4.post_attention_norm', N_EMBD)
        put_mtp(m, ('norm',))
        m.mtp = hidden, mtp_head(lambda m, il, h: self_attention(m, il, h, None), lambda m, il, h: moe(m, 'blk.4.', h),
                                 'post_attention_norm', raw=False)
    return m, lambda m, tokens: logits(m, hidden(m, tokens))


def make_nemotron_h_moe_mtp(): return make_nemotron_h_moe(mtp=True)


# ---- families that combine parts: what each does is in the table of its function ----

def put_family(m, layers, n_ff, bias=False, qk=None, norms=('attn_norm', 'ffn_norm'), tied=False, final=True, dense=lambda il: True):
    """the tensors of a decoder. qk: shape of the norms of queries and keys, given the number of heads"""
    n = m.get('embedding_length')
    put_embeddings(m, tied)
    if not final: del m.tensors['output_norm.weight']
    for il in range(layers):
        b, n_head, n_kv = 'blk.%d.' % il, m.at_layer('attention.head_count', il), m.at_layer('attention.head_count_kv', il)
        dim, dim_v = m.get('attention.key_length'), m.get('attention.value_length')
        for name in norms: m.norm(b + name, n)
        for part, rows, gain in (('q', n_head * dim, 1.5), ('k', n_kv * dim, 1.5), ('v', n_kv * dim_v, 1.0)):
            m.weight(b + 'attn_' + part, rows, n, gain=gain)
            if bias: m.vector(b + 'attn_' + part + '.bias', rows)
        m.weight(b + 'attn_output', n, n_head * dim_v, gain=1.5)
        if qk: m.vector(b + 'attn_q_norm.weight', *qk(n_head), mean=1.0), m.vector(b + 'attn_k_norm.weight', *qk(n_kv), mean=1.0)
        if dense(il): put_ffn(m, il, n_ff)


def put_router(m, il, n_expert, n_ff, bias=False, shared=0):
    put_experts(m, il, n_expert, n_ff)
    if bias: m.vector('blk.%d.exp_probs_b.bias' % il, n_expert, spread=0.1)
    if shared: put_ffn(m, il, shared, '_shexp')


def sigmoid_weights(m, il, h):
    """weights by sigmoid, a bias for the choice alone, if there is one; made to add up to 1 and scaled as the keys say"""
    probs = sigmoid(linear(m, 'blk.%d.ffn_gate_inp' % il, h))
    bias = 'blk.%d.exp_probs_b.bias' % il
    w = choose_experts(m, probs, probs + m.at(bias) if m.has(bias) else probs, m.get('expert_weights_norm'))
    return w * (m.get('expert_weights_scale') or 1.0)


def parts_attention(m, il, h, pairs='far', qk=None, after=False, window=0, n_rot=None, scale=None, gate=None, factors=1.0,
                    clamp=np.inf, grown=1.0, slopes=None):
    """the usual kind, in parts. qk(x, name): a norm of the heads of queries and keys, before or after they turn; gate(x):
    of what attn_gate makes of h, for each value or each head"""
    b, n_kv, n_head = 'blk.%d.attn_' % il, m.at_layer('attention.head_count_kv', il), m.at_layer('attention.head_count', il)
    if m.has(b + 'qkv.weight'):
        dim = m.get('attention.key_length')
        q, k, v = np.split(linear(m, b + 'qkv', h), (n_head * dim, (n_head + n_kv) * dim), 1)
    else: q, k, v = (np.clip(linear(m, b + part, h), -clamp, clamp) for part in 'qkv')
    q, k, v = heads(q, n_head), heads(k, n_kv), heads(v, n_kv)
    norm = lambda x, part: qk(x, b + part + '_norm') if qk else x
    turn = lambda x: rope(x, n_rot or x.shape[2], m.get('rope.freq_base'), pairs, factors) if pairs else x
    q, k = (norm(turn(x), part) if after else turn(norm(x, part)) for x, part in ((q, 'q'), (k, 'k')))
    out = attention(q, k, v, scale or q.shape[2] ** -0.5, window, slopes, m.at(b + 'sinks.weight') if m.has(b + 'sinks.weight') else None)
    if gate:
        g = gate(linear(m, b + 'gate', h))
        out = (heads(out, n_head) * (g[:, :, None] if g.shape[1] == n_head else heads(g, n_head))).reshape(out.shape)
    return linear(m, b + 'output', out) * grown


def make_afmoe():
    """norms before and after; gated attention; three layers of four have a window and rope; embeddings are scaled; the
    first ffn is dense, others are experts beside a shared one"""
    m = Model('afmoe', 'afmoe')
    common_keys(m, layers=4, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.u32(attention__sliding_window=6, expert_count=4, expert_used_count=2, expert_feed_forward_length=16,
          expert_shared_count=1, leading_dense_block_count=1, expert_gating_func=2)
    m.f32(expert_weights_scale=1.5)
    m.flag(expert_weights_norm=True)
    put_family(m, 4, 32, qk=lambda n: (8,), dense=lambda il: il == 0,
               norms=('attn_norm', 'post_attention_norm', 'ffn_norm', 'post_ffw_norm'))
    for il in range(4):
        m.weight('blk.%d.attn_gate' % il, 32, N_EMBD, gain=1.5)
        if il: put_router(m, il, 4, 16, bias=True, shared=16)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens] * N_EMBD ** 0.5
        for il in range(4):
            b = 'blk.%d.' % il
            mixed = parts_attention(m, il, rms_norm(m, b + 'attn_norm', x), 'far' if il < 3 else None,
                                    lambda x, name: rms_norm(m, name, x), window=6 if il < 3 else 0, gate=sigmoid)
            x = x + rms_norm(m, b + 'post_attention_norm', mixed)
            h = rms_norm(m, b + 'ffn_norm', x)
            y = experts(m, il, h, sigmoid_weights(m, il, h)) + gated_ffn(m, il, h, '_shexp') if il else gated_ffn(m, il, h)
            x = x + rms_norm(m, b + 'post_ffw_norm', y)
        return logits(m, rms_norm(m, 'output_norm', x))
    return m, forward


def make_laguna():
    """a gate for each head; the first layer of a period sees all and turns half of a head, the others have a window"""
    m = Model('laguna', 'laguna')
    common_keys(m, layers=3, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0, n_rot=4)
    m.u32(attention__sliding_window=6, expert_count=4, expert_used_count=2, expert_feed_forward_length=16,
          expert_shared_feed_forward_length=16, leading_dense_block_count=2, rope__dimension_count_swa=8)
    put_family(m, 3, 32, qk=lambda n: (8,), dense=lambda il: il < 2)
    for il in range(3): m.weight('blk.%d.attn_gate' % il, 4, N_EMBD, gain=1.5)
    put_router(m, 2, 4, 16, bias=True, shared=16)

    def mix(m, il, h):
        return parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x), n_rot=8 if il else 4,
                               window=6 if il else 0, gate=softplus)

    def ffn(m, il, h):
        return gated_ffn(m, il, h) if il < 2 else experts(m, il, h, sigmoid_weights(m, il, h)) + gated_ffn(m, il, h, '_shexp')
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mix, ffn)


def make_llama4():
    """every second ffn is experts, whose inputs are weighted, beside a shared one; queries and keys that turn are normed
    afterwards, the last layer's do not turn"""
    m = Model('llama4', 'llama4')
    common_keys(m, layers=4, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.u32(expert_count=4, expert_used_count=2, expert_feed_forward_length=16, interleave_moe_layer_step=2)
    put_family(m, 4, 32, dense=lambda il: il % 2 == 0)
    for il in (1, 3): put_router(m, il, 4, 16, shared=16)
    plain = lambda x, name: rms(x, m.get('attention.layer_norm_rms_epsilon'))

    def mix(m, il, h): return parts_attention(m, il, h, 'near' if il < 3 else None, plain if il < 3 else None, after=True)

    def ffn(m, il, h):
        if il % 2 == 0: return gated_ffn(m, il, h)
        w, ones = sigmoid_weights(m, il, h), np.ones((len(h), 1))
        out = gated_ffn(m, il, h, '_shexp')
        for e in range(4):
            one = np.where(np.arange(4) == e, ones, 0.0)
            out = out + np.where(w[:, e:e + 1] > 0, experts(m, il, h * w[:, e:e + 1], one), 0.0)
        return out
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mix, ffn)


def make_arctic():
    """a dense ffn, and experts that read the input of the layer after a norm of their own"""
    m = Model('arctic', 'arctic')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=16, base=1000.0)
    m.u32(expert_count=4, expert_used_count=2)
    put_family(m, 2, N_EMBD, norms=('attn_norm', 'ffn_norm', 'ffn_norm_exps'))
    for il in range(2): put_router(m, il, 4, 16)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(2):
            b, first = 'blk.%d.' % il, x
            x = x + parts_attention(m, il, rms_norm(m, b + 'attn_norm', x), 'near')
            x = x + gated_ffn(m, il, rms_norm(m, b + 'ffn_norm', x))
            x = x + softmax_moe(m, il, rms_norm(m, b + 'ffn_norm_exps', first), normalised=True)
        return logits(m, rms_norm(m, 'output_norm', x))
    return m, forward


def make_grok():
    """scores are capped; experts and a dense ffn together, divided by the root of two; all outputs normed; gelu"""
    m = Model('grok', 'grok')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.u32(expert_count=4, expert_used_count=2, expert_feed_forward_length=16)
    m.f32(embedding_scale=3.0, logit_scale=0.6, attention__output_scale=0.5, attn_logit_softcapping=4.0,
          final_logit_softcapping=5.0)
    put_family(m, 2, 32, norms=('attn_norm', 'attn_output_norm', 'ffn_norm', 'layer_output_norm'))
    for il in range(2): put_router(m, il, 4, 16)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens] * 3.0
        for il in range(2):
            b = 'blk.%d.' % il
            mixed = parts_attention(m, il, rms_norm(m, b + 'attn_norm', x), scale=lambda s: 4.0 * np.tanh(s * 0.5 / 4.0))
            x = x + rms_norm(m, b + 'attn_output_norm', mixed)
            h = rms_norm(m, b + 'ffn_norm', x)
            score = linear(m, b + 'ffn_gate_inp', h)
            y = experts(m, il, h, choose_experts(m, softmax(score), score, True), gelu) + gated_ffn(m, il, h, act=gelu)
            x = x + rms_norm(m, b + 'layer_output_norm', y * 0.5 ** 0.5)
        y = logits(m, rms_norm(m, 'output_norm', x)) * m.get('logit_scale')
        return 5.0 * np.tanh(y / 5.0)
    return m, forward


def make_cohere2moe():
    """attention and ffn side by side; experts and a shared one, divided by two; the first layer of a period has no
    window, and no rope but where the ffn is dense"""
    m = Model('cohere2moe', 'cohere2moe')
    common_keys(m, layers=4, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    del m.keys['cohere2moe.attention.layer_norm_rms_epsilon']
    m.f32(attention__layer_norm_epsilon=0.02, logit_scale=0.5)
    m.u32(attention__sliding_window=6, attention__sliding_window_pattern=3, expert_count=4, expert_used_count=2,
          expert_feed_forward_length=16, expert_shared_count=1, leading_dense_block_count=1)
    put_family(m, 4, 32, norms=('attn_norm',), dense=lambda il: il == 0)
    for il in range(1, 4): put_router(m, il, 4, 16, shared=16)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(4):
            h, full = layer_norm(m, 'blk.%d.attn_norm' % il, x), il % 3 == 0
            mixed = parts_attention(m, il, h, None if il == 3 else 'near', window=0 if full else 6)
            y = (experts(m, il, h, sigmoid_weights(m, il, h)) + gated_ffn(m, il, h, '_shexp')) / 2 if il else gated_ffn(m, il, h)
            x = x + mixed + y
        return logits(m, layer_norm(m, 'output_norm', x)) * m.get('logit_scale')
    return m, forward


def make_smallthinker():
    """the router reads a layer's input before any norm; ReLU; the first layer of a period neither turns nor has a window"""
    m = Model('smallthinker', 'smallthinker')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=16, base=1000.0)
    m.u32(expert_count=4, expert_used_count=2, expert_feed_forward_length=16, expert_gating_func=2, attention__sliding_window=6)
    put_family(m, 2, 16, dense=lambda il: False)
    for il in range(2):
        put_router(m, il, 4, 16)
        m.vector('blk.%d.ffn_gate_inp.weight' % il, 4, N_EMBD, spread=0.5 / N_EMBD ** 0.5)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(2):
            b, probs = 'blk.%d.' % il, sigmoid(linear(m, 'blk.%d.ffn_gate_inp' % il, x))
            x = x + parts_attention(m, il, rms_norm(m, b + 'attn_norm', x), 'far' if il else None)
            h = rms_norm(m, b + 'ffn_norm', x)
            x = x + experts(m, il, h, choose_experts(m, probs, probs, True), lambda x: np.maximum(x, 0.0))
        return logits(m, rms_norm(m, 'output_norm', x))
    return m, forward


def make_grovemoe():
    """the experts' sum goes through further experts of the same choice"""
    m = Model('grovemoe', 'grovemoe')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=16, base=1000.0)
    m.u32(expert_count=4, expert_used_count=2, expert_feed_forward_length=16, experts_per_group=1,
          expert_chunk_feed_forward_length=12)
    m.f32(expert_group_scale=0.5)
    put_family(m, 2, 16, qk=lambda n: (8,), dense=lambda il: False)
    for il in range(2):
        put_router(m, il, 4, 16)
        for part, rows, columns in (('gate', 12, N_EMBD), ('up', 12, N_EMBD), ('down', N_EMBD, 12)):
            m.weight('blk.%d.ffn_%s_chexps' % (il, part), 4, rows, columns, gain=2.0)

    def ffn(m, il, h):
        score = linear(m, 'blk.%d.ffn_gate_inp' % il, h)
        w = choose_experts(m, softmax(score), score, True)
        y = experts(m, il, h, w)
        return y + 0.5 * experts(m, il, y, w, word='_chexps')
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x)), ffn)


def make_k2_horizon():
    """norms of four equal parts; a norm for each head; gates by softplus of base 2; values are mixtures, too, of
    more experts than the FFN"""
    m = Model('k2-horizon', 'k2-horizon')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.u32(expert_count=4, expert_used_count=2, expert_feed_forward_length=16, leading_dense_block_count=1,
          attention__value_expert_count=7, attention__value_expert_used_count=3, attention__group_norm_groups=4)
    put_family(m, 2, 32, qk=lambda n: (n, 8), dense=lambda il: il == 0)
    for il in range(2): m.weight('blk.%d.attn_gate' % il, 32, N_EMBD, gain=1.5)
    put_router(m, 1, 4, 16)
    del m.tensors['blk.1.attn_v.weight']
    m.weight('blk.1.attn_v_exps', 7, 16, N_EMBD, gain=2.0)
    m.vector('blk.1.attn_v_gate.weight', 7, N_EMBD, spread=2.5 / N_EMBD ** 0.5)
    m.vector('blk.1.attn_v_gate.bias', 7, spread=0.1)
    eps = m.get('attention.layer_norm_rms_epsilon')

    def grouped(name, x): return rms(heads(x, 4), eps).reshape(x.shape) * m.at(name + '.weight')

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(2):
            b, h = 'blk.%d.' % il, grouped('blk.%d.attn_norm' % il, x)
            if il:
                probs = sigmoid(h @ m.at(b + 'attn_v_gate.weight').T)
                w = choose_experts(m, probs, probs + m.at(b + 'attn_v_gate.bias'), False,
                                   'attention.value_expert_used_count')
                v = sum(w[:, e:e + 1] * silu(h @ m.at(b + 'attn_v_exps.weight')[e].T) for e in range(7))
            else: v = linear(m, b + 'attn_v', h)
            q, k = heads(linear(m, b + 'attn_q', h), 4), heads(linear(m, b + 'attn_k', h), 2)
            q, k = (rope(rms_norm(m, b + name, x), 8, 1000.0, 'far') for name, x in (('attn_q_norm', q), ('attn_k_norm', k)))
            out = attention(q, k, heads(v, 2), 8 ** -0.5) * np.log2(1.0 + 2.0 ** linear(m, b + 'attn_gate', h))
            x = x + linear(m, b + 'attn_output', out)
            h = grouped(b + 'ffn_norm', x)
            x = x + (experts(m, il, h, sigmoid_weights(m, il, h)) if il else gated_ffn(m, il, h))
        return logits(m, grouped('output_norm', x))
    return m, forward


def make_talkie():
    """norms without weights, of the embedding, too, which every layer adds in part; a number for each head of queries"""
    m = Model('talkie', 'talkie')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.f32(logit_scale=0.7)
    put_family(m, 2, 32, norms=(), final=False)
    for il in range(2):
        m.vector('blk.%d.attn_q_norm.weight' % il, 4, 1, mean=1.5)
        m.vector('blk.%d.layer_output_scale.weight' % il, 1, mean=0.5)
    eps = m.get('attention.layer_norm_rms_epsilon')

    def qk(x, name): return rms(x, eps) * (m.at(name + '.weight') if m.has(name + '.weight') else 1.0)

    def forward(m, tokens):
        x = first = rms(m.at('token_embd.weight')[tokens], eps)
        for il in range(2):
            x = x + parts_attention(m, il, rms(x, eps), 'far', qk, after=True)
            x = x + gated_ffn(m, il, rms(x, eps)) + first * m.at('blk.%d.layer_output_scale.weight' % il)
        return logits(m, rms(x, eps)) * m.get('logit_scale')
    return m, forward


def make_mimo2(mtp=0):
    """heads and windows of each layer; keys are longer than values; sinks; the output of attention is scaled. The layers of
    the MTP heads have windows, one matrix for queries, keys and values, and a dense ffn; they hand on what their norms read"""
    m = Model('mimo2', 'mimo2-mtp' if mtp else 'mimo2')
    common_keys(m, layers=2 + mtp, n_head=4, n_kv=2, head_dim=12, n_ff=32, base=1000.0, n_rot=4)
    m.u32(attention__value_length=8, attention__sliding_window=6, expert_count=4, expert_used_count=2, expert_feed_forward_length=16)
    m.i32s(attention__head_count=[4, 6] + [6] * mtp, attention__head_count_kv=[2, 3] + [3] * mtp,
           attention__sliding_window_pattern=[0, 1] + [1] * mtp)
    m.f32(attention__value_scale=0.7, rope__freq_base_swa=200.0)
    put_family(m, 2 + mtp, 32, dense=lambda il: il != 1)
    for il in range(1, 2 + mtp): m.vector('blk.%d.attn_sinks.weight' % il, 6, spread=1.0)
    put_router(m, 1, 4, 16, bias=True)

    def mix(m, il, h):
        keep = m.keys['mimo2.rope.freq_base']
        if il: m.f32(rope__freq_base=200.0)
        y = parts_attention(m, il, h, 'far', n_rot=4, window=6 if il else 0, grown=m.get('attention.value_scale'))
        m.keys['mimo2.rope.freq_base'] = keep
        return y

    def ffn(m, il, h):
        if il != 1: return gated_ffn(m, il, h)
        w = sigmoid_weights(m, il, h)
        return experts(m, il, h, w / w.sum(-1, keepdims=True))
    if mtp: m.u32(nextn_predict_layers=mtp)
    for il in range(2, 2 + mtp):
        b = 'blk.%d.' % il
        m.norm(b + 'layer_output_norm', N_EMBD)
        put_mtp(m, il=il)
        m.tensors[b + 'attn_qkv.weight'] = np.concatenate([m.tensors.pop(b + 'attn_%s.weight' % part) for part in 'qkv'])
    return with_mtp(m, mix, ffn, raw=True)


def make_mimo2_mtp(): return make_mimo2(mtp=3)


def make_maple():
    """gates of experts have an upper limit and what they multiply two; rope where there is a window"""
    m = Model('maple', 'maple')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.u32(attention__sliding_window=6, expert_count=4, expert_used_count=2, expert_feed_forward_length=16)
    m.i32s(attention__sliding_window_pattern=[1, 0])
    m.keys['maple.swiglu_clamp_exp'] = ('f32s', [0.5, 0.25])
    put_family(m, 2, 32, qk=lambda n: (8,), dense=lambda il: False)
    for il in range(2): put_router(m, il, 4, 16)

    def mix(m, il, h):
        return parts_attention(m, il, h, None if il else 'far', lambda x, name: rms_norm(m, name, x), window=0 if il else 6)

    def ffn(m, il, h):
        score, limit, b = linear(m, 'blk.%d.ffn_gate_inp' % il, h), m.get('swiglu_clamp_exp')[il], 'blk.%d.ffn_' % il
        w, (gate, up, down) = choose_experts(m, softmax(score), score, True), (m.at(b + part + '_exps.weight') for part in ('gate', 'up', 'down'))
        return sum(w[:, e:e + 1] * ((silu(np.minimum(h @ gate[e].T, limit)) * np.clip(h @ up[e].T, -limit, limit)) @ down[e].T)
                   for e in range(4))
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, mix, ffn)


def make_qwen3vl():
    """M-RoPE whose axes take turns: pairs of the fourth axis do not turn in a text"""
    m = Model('qwen3vl', 'qwen3vl')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=16, n_ff=32, base=1000.0)
    m.i32s(rope__dimension_sections=[3, 2, 2, 1])
    put_family(m, 2, 32, qk=lambda n: (16,))
    still = np.array([1.0 if pair in (0, 1, 2, 3, 4, 5, 6) else np.inf for pair in range(8)])
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x), factors=still), gated_ffn)


def make_olmo():
    """LayerNorm without weights; queries, keys and values are clamped"""
    m = Model('olmo', 'olmo')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.f32(attention__layer_norm_epsilon=0.02, attention__clamp_kqv=1.0)
    put_family(m, 2, 32, norms=(), final=False)

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.02)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(2):
            x = x + parts_attention(m, il, norm(x), 'near', clamp=1.0)
            x = x + gated_ffn(m, il, norm(x))
        return logits(m, norm(x))
    return m, forward


def make_hunyuan_dense():
    """queries and keys are normed after they turn"""
    m = Model('hunyuan-dense', 'hunyuan-dense')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    put_family(m, 2, 32, qk=lambda n: (8,), tied=True)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x), after=True), gated_ffn)


def make_jais():
    """LayerNorm with biases, ALiBi, scores divided by the length of a key"""
    m = Model('jais', 'jais')
    common_keys(m, layers=2, n_head=4, n_kv=4, head_dim=8, n_ff=32)
    m.f32(attention__layer_norm_epsilon=0.02, attention__max_alibi_bias=4.0)
    put_family(m, 2, 32, bias=True)
    for name in ('output_norm', 'blk.0.attn_norm', 'blk.0.ffn_norm', 'blk.1.attn_norm', 'blk.1.ffn_norm'): m.vector(name + '.bias', N_EMBD)

    def forward(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(2):
            b = 'blk.%d.' % il
            x = x + parts_attention(m, il, layer_norm(m, b + 'attn_norm', x), None, scale=1 / 8, slopes=alibi_slopes(4, 4.0))
            x = x + gated_ffn(m, il, layer_norm(m, b + 'ffn_norm', x))
        return logits(m, layer_norm(m, 'output_norm', x))
    return m, forward


def make_minicpm3():
    """compressed queries and keys; embeddings, outputs and logits are scaled by numbers of the width and depth"""
    m = Model('minicpm3', 'minicpm3')
    common_keys(m, layers=2, n_head=4, n_kv=4, head_dim=12, n_ff=32, base=1000.0, n_rot=4)
    m.u32(attention__value_length=8, attention__q_lora_rank=16, attention__kv_lora_rank=16,
          rope__scaling__original_context_length=512)
    put_embeddings(m, gain=0.5)
    for part in ('long', 'short'): m.vector('rope_factors_%s.weight' % part, 2, mean=2.0)
    for il in range(2):
        b = 'blk.%d.attn_' % il
        for name, n in (('attn_norm', N_EMBD), ('ffn_norm', N_EMBD), ('attn_q_a_norm', 16), ('attn_kv_a_norm', 16)): m.norm('blk.%d.%s' % (il, name), n)
        m.weight(b + 'q_a', 16, N_EMBD), m.weight(b + 'q_b', 48, 16, gain=1.5)
        m.weight(b + 'kv_a_mqa', 20, N_EMBD, gain=1.5), m.weight(b + 'kv_b', 64, 16, gain=1.5)
        m.weight(b + 'output', N_EMBD, 32, gain=1.5)
        put_ffn(m, il, 32)

    def mix(m, il, h):
        b, factors = 'blk.%d.attn_' % il, m.at('rope_factors_short.weight')
        turn = lambda x: np.concatenate([x[..., :-4], rope(x[..., -4:], 4, 1000.0, 'far', factors)], -1)
        q = turn(heads(linear(m, b + 'q_b', rms_norm(m, b + 'q_a_norm', linear(m, b + 'q_a', h))), 4))
        c, turned = np.split(linear(m, b + 'kv_a_mqa', h), (16,), 1)
        k, v = np.split(heads(linear(m, b + 'kv_b', rms_norm(m, b + 'kv_a_norm', c)), 4), (8,), 2)
        k = turn(np.concatenate([k, np.repeat(turned[:, None], 4, 1)], 2))
        return linear(m, b + 'output', attention(q, k, v, 12 ** -0.5)) * (1.4 / 2 ** 0.5)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, mix, lambda m, il, h: gated_ffn(m, il, h) * (1.4 / 2 ** 0.5), embedding_scale=12.0) * (256 / N_EMBD)


def make_minimax_01():
    """lightning attention, a sum over all earlier tokens that fades by head and layer; the residual stream is the norm"""
    m = Model('minimax-01', 'minimax-01')
    common_keys(m, layers=3, n_head=4, n_kv=4, head_dim=8, n_ff=24, base=3000.0)
    m.u32(full_attention_interval=3, expert_count=4, expert_used_count=2)
    m.f32(residual_scale=1.7)
    put_embeddings(m)
    for il in range(3):
        b = 'blk.%d.' % il
        m.norm(b + 'attn_norm', N_EMBD)
        if il == 2: put_attention(m, il)
        else:
            m.weight(b + 'attn_qkv', 3 * 32, N_EMBD, gain=1.5)
            m.weight(b + 'attn_gate', 32, N_EMBD)
            m.norm(b + 'attn_norm_2', 32)
            m.weight(b + 'attn_output', N_EMBD, 32, gain=1.5)
        m.norm(b + 'ffn_norm', N_EMBD)
        put_experts(m, il, 4, 24)

    def lightning(m, il, h):
        b, n = 'blk.%d.attn_' % il, len(h)
        q, k, v = np.split(heads(silu(linear(m, b + 'qkv', h)), 4), 3, 2)
        age, y = np.arange(n)[:, None] - np.arange(n)[None, :], np.empty((n, 4, 8))
        for i in range(4):
            fade = np.exp(-2.0 ** (-2.0 * (i + 1)) * (1 - il / 2 + 1e-5) * np.maximum(age, 0))
            y[:, i] = np.where(age < 0, 0, q[:, i] @ k[:, i].T * fade) @ v[:, i]
        return linear(m, b + 'output', rms_norm(m, b + 'norm_2', y.reshape(n, -1)) * sigmoid(linear(m, b + 'gate', h)))

    def layers(m, tokens):
        x = m.at('token_embd.weight')[tokens]
        for il in range(3):
            h = rms_norm(m, 'blk.%d.attn_norm' % il, x)
            y = 1.7 * h + (self_attention(m, il, h, 'far') if il == 2 else lightning(m, il, h))
            h = rms_norm(m, 'blk.%d.ffn_norm' % il, y)
            x = 1.7 * h + softmax_moe(m, il, h, normalised=True)
        return logits(m, rms_norm(m, 'output_norm', x))
    return m, layers


def kimi_delta(m, b, h, fade, gate):
    """Kimi delta attention of 4 heads of 8 values: each key channel of the memory fades by itself, by fade(ssm_a, step)"""
    eps, n = m.get('attention.layer_norm_rms_epsilon'), len(h)
    def part(x):
        w = m.at(b + 'ssm_conv1d_%s.weight' % x)[:, 0]
        y = np.concatenate([np.zeros((3, 32)), linear(m, b + 'attn_' + x, h)])
        return heads(silu(sum(y[j:j + n] * w[:, j] for j in range(4))), 4)
    q, k, v = unit(part('q'), eps) * 8 ** -0.5, unit(part('k'), eps), part('v')
    step = heads(linear(m, b + 'ssm_f_b', linear(m, b + 'ssm_f_a', h)) + m.at(b + 'ssm_dt.bias'), 4)
    fades = fade(m.at(b + 'ssm_a').reshape(4, 1), step)
    beta, state, out = sigmoid(linear(m, b + 'ssm_beta', h)), np.zeros((4, 8, 8)), np.empty((n, 4, 8))
    for t in range(n):
        state = state * fades[t][:, :, None]
        held = np.einsum('hkv,hk->hv', state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - held))[:, None, :]
        out[t] = np.einsum('hkv,hk->hv', state, q[t])
    return linear(m, b + 'attn_output', rms_norm(m, b + 'ssm_norm', out).reshape(n, -1) * sigmoid(gate))


def put_kimi_delta(m, b, a):
    """as kimi_delta reads it, with a low rank output gate; a: mean, spread and shape of ssm_a"""
    for part in 'qkv':
        m.weight(b + 'attn_' + part, 32, N_EMBD, gain=1.5)
        m.vector(b + 'ssm_conv1d_%s.weight' % part, 32, 1, 4, spread=1.0)
    for name, *shape in (('f_a', 8, N_EMBD), ('f_b', 32, 8), ('g_a', 8, N_EMBD), ('g_b', 32, 8), ('beta', 4, N_EMBD)):
        m.weight(b + 'ssm_' + name, *shape, gain=1.5)
    m.vector(b + 'ssm_a', *a[2], mean=a[0], spread=a[1])
    m.vector(b + 'ssm_dt.bias', 32, spread=0.5)
    m.norm(b + 'ssm_norm', 8)
    m.weight(b + 'attn_output', N_EMBD, 32, gain=1.5)


def put_mixed_streams(m, b):
    """what makes the weights of four streams"""
    for part in ('attn', 'ffn'):
        m.norm(b + part + '_norm', N_EMBD)
        m.weight(b + 'hc_%s_fn' % part, 24, 4 * N_EMBD, gain=1.5)
        m.vector(b + 'hc_%s_base.weight' % part, 24, spread=0.5)
        m.vector(b + 'hc_%s_scale.weight' % part, 3, mean=1.0, spread=0.4)


def through_streams(m, b, x, part, f):
    """x [T, 4, n_embd] after f of a weighted sum of its streams has been given back to them, and a matrix has mixed them whose
    rows and columns nearly add up to 1"""
    eps, name = m.get('hyper_connection.epsilon'), b + 'hc_' + part
    y, base = linear(m, name + '_fn', rms(x.reshape(len(x), -1), 2e-3)), m.at(name + '_base.weight')
    take, give, mix = (y[:, i:j] * s + base[i:j] for (i, j), s in zip(((0, 4), (4, 8), (8, 24)), m.at(name + '_scale.weight')))
    c = softmax(mix.reshape(-1, 4, 4)) + eps  # of each token [from][to]
    for line in range(2 * m.get('hyper_connection.sinkhorn_iterations') - 1): c = c / (c.sum(1 + line % 2, keepdims=True) + eps)
    out = f(rms_norm(m, b + part + '_norm', ((sigmoid(take) + eps)[:, :, None] * x).sum(1)))
    return 2 * sigmoid(give)[:, :, None] * out[:, None] + np.einsum('nft,nfd->ntd', c, x)


def put_kimi_ffn(m, il):
    """a dense first layer, then six experts beside a shared one"""
    if il == 0: return put_ffn(m, il, 40)
    put_experts(m, il, 6, 16)
    put_ffn(m, il, 16, '_shexp')
    m.vector('blk.%d.exp_probs_b.bias' % il, 6, spread=0.2)


def make_glm5_next():
    """Four residual streams, which a matrix mixes whose rows and columns nearly add up to 1; Kimi delta attention, and latent
    attention without rope, whose indexer leaves this context whole; the head reads the mean of the streams"""
    n_s, eps = 4, 0.01
    m = Model('glm5-next', 'glm5-next')
    common_keys(m, layers=3, n_head=4, n_kv=1, head_dim=24, n_ff=40)
    m.i32s(attention__head_count_kv=[0, 1, 0])
    m.u32(attention__value_length=24, attention__kv_lora_rank=24, attention__q_lora_rank=20, attention__key_length_mla=12,
          attention__value_length_mla=10, rope__dimension_count=0, ssm__conv_kernel=4, kda__head_dim=8,
          leading_dense_block_count=1, expert_count=6, expert_used_count=2, expert_feed_forward_length=16,
          expert_shared_count=1, expert_gating_func=2, attention__indexer__head_count=3, attention__indexer__key_length=12,
          attention__indexer__top_k=64, attention__indexer__kpool=4, hyper_connection__count=n_s,
          hyper_connection__sinkhorn_iterations=3)
    m.f32(expert_weights_scale=1.5, kda__gate_lower_bound=-3.0, hyper_connection__epsilon=eps)
    m.flag(expert_weights_norm=True, attention__indexer__kpool_select_tail=True)
    put_embeddings(m)
    for il in range(3):
        b = 'blk.%d.' % il
        put_mixed_streams(m, b)
        if il == 1:
            m.norm(b + 'attn_q_a_norm', 20)
            m.norm(b + 'attn_kv_a_norm', 24)
            for name, *shape in (('q_a', 20, N_EMBD), ('q_b', 48, 20), ('kv_a_mqa', 24, N_EMBD), ('k_b', 4, 24, 12),
                                 ('v_b', 4, 10, 24), ('output', N_EMBD, 40)):
                m.weight(b + 'attn_' + name, *shape, gain=1.2)
            m.weight(b + 'indexer.proj', 3, N_EMBD)
            m.weight(b + 'indexer_compressor_gate', 12, N_EMBD)
        else: put_kimi_delta(m, b, (-0.8, 0.1, (4,)))
        put_kimi_ffn(m, il)

    def kda(m, b, h):
        gate = linear(m, b + 'ssm_g_b', linear(m, b + 'ssm_g_a', h))
        return kimi_delta(m, b, h, lambda a, step: np.exp(-3.0 * sigmoid(-a * step)), gate)

    def latent(m, b, h):
        q = heads(linear(m, b + 'attn_q_b', rms_norm(m, b + 'attn_q_a_norm', linear(m, b + 'attn_q_a', h))), 4)
        low = rms_norm(m, b + 'attn_kv_a_norm', linear(m, b + 'attn_kv_a_mqa', h))
        k, v = (np.einsum(how, low, m.at(b + 'attn_%s_b.weight' % x)) for how, x in (('tr,hrd->thd', 'k'), ('tr,hdr->thd', 'v')))
        return linear(m, b + 'attn_output', attention(q, k, v, 12 ** -0.5))

    def moe(m, il, h):
        return experts(m, il, h, sigmoid_weights(m, il, h)) + gated_ffn(m, il, h, '_shexp') if il else gated_ffn(m, il, h)

    def forward(m, tokens):
        x = np.repeat(m.at('token_embd.weight')[tokens][:, None], n_s, 1)
        for il in range(3):
            b = 'blk.%d.' % il
            x = through_streams(m, b, x, 'attn', lambda h: (latent if il == 1 else kda)(m, b, h))
            x = through_streams(m, b, x, 'ffn', lambda h: moe(m, il, h))
        return logits(m, rms_norm(m, 'output_norm', x.mean(1)))
    return m, forward


def make_deepseek4():
    """Four residual streams, which a matrix mixes; one key of all heads, which is the value, too, in a window; before it layer
    1 sees two of its overlapping blocks of four tokens, which an indexer chooses, and layer 2 all of its blocks of eight. A
    block is its tokens' average, of each channel by itself, by scores that depend on the place. Heads turn back after
    attention; groups of them are projected. The token chooses the experts of layer 0; their weights are square roots"""
    m, ratios, base = Model('deepseek4', 'deepseek4'), [0, 4, 8], 400.0
    common_keys(m, layers=3, n_head=4, n_kv=1, head_dim=16, n_ff=16, base=1000.0, n_rot=8)
    m.i32s(attention__compress_ratios=ratios)
    m.u32(attention__sliding_window=6, attention__q_lora_rank=20, attention__output_group_count=2, attention__output_lora_rank=12,
          attention__indexer__head_count=3, attention__indexer__key_length=12, attention__indexer__top_k=2, expert_count=6,
          expert_used_count=2, expert_feed_forward_length=16, expert_shared_count=1, expert_gating_func=4, hash_layer_count=1,
          hyper_connection__count=4, hyper_connection__sinkhorn_iterations=3, rope__scaling__original_context_length=16)
    m.f32(expert_weights_scale=1.5, hyper_connection__epsilon=0.01, attention__compress_rope_freq_base=base, rope__scaling__factor=4.0)
    m.put('f32s', {'swiglu_clamp_exp': [0.0, 0.75, 0.5], 'swiglu_clamp_shexp': [0.5, 0.0, 0.75]})
    m.text(rope__scaling__type='yarn')
    m.flag(expert_weights_norm=True)
    put_embeddings(m)
    m.weight('output_hc_fn', 4, 4 * N_EMBD, gain=1.5)
    m.vector('output_hc_base.weight', 4, spread=0.5)
    m.vector('output_hc_scale.weight', 1, mean=1.0, spread=0.4)
    for il, ratio in enumerate(ratios):
        b = 'blk.%d.' % il
        put_mixed_streams(m, b)
        m.vector(b + 'attn_sinks.weight', 4)
        m.norm(b + 'attn_q_a_norm', 20)
        m.norm(b + 'attn_kv_a_norm', 16, mean=1.5)
        for name, *shape in (('q_a', 20, N_EMBD), ('q_b', 64, 20), ('kv', 16, N_EMBD), ('output_a', 24, 32), ('output_b', N_EMBD, 24)):
            m.weight(b + 'attn_' + name, *shape, gain=1.5)
        for part, n in (('attn', 16), ('indexer', 12))[:0 if ratio == 0 else 2 if ratio == 4 else 1]:
            n_all, name = n * (2 if ratio == 4 else 1), b + part + '_compressor_'
            m.weight(name + 'kv', n_all, N_EMBD)
            m.weight(name + 'gate', n_all, N_EMBD, gain=2.0)
            m.vector(name + 'ape.weight', ratio, n_all, spread=1.0)
            m.norm(name + 'norm', n, mean=1.5)
        if ratio == 4:
            m.weight(b + 'indexer.proj', 3, N_EMBD)
            m.weight(b + 'indexer.attn_q_b', 36, 20, gain=1.5)
        put_experts(m, il, 6, 16)
        put_ffn(m, il, 16, '_shexp')
        if il: m.vector(b + 'exp_probs_b.bias', 6, spread=0.2)
        else:
            ids = [np.argsort(random_words('experts of token %d' % t, 6))[:2] for t in range(N_VOCAB)]
            m.tensors[b + 'ffn_gate_tid2eid.weight'] = np.array(ids, np.int32)

    def turn(x, ratio, sign=1.0):
        """the last eight values of a head"""
        part = rope(x[..., -8:], 8, base if ratio else 1000.0, 'near', sign * (yarn_factors(m, base) if ratio else 1.0))
        return np.concatenate([x[..., :-8], part], -1)

    def blocks(m, name, h, ratio):
        """[blocks, n]"""
        n, places = len(h) // ratio, np.arange(len(h)) % ratio
        value, score = (y[:n * ratio].reshape(n, ratio, -1) for y in (linear(m, name + 'kv', h), linear(m, name + 'gate', h) + m.at(name + 'ape.weight')[places]))
        if ratio == 4:  # the first half counts in the next block
            half = value.shape[2] // 2
            value, score = (np.concatenate([np.concatenate([np.full((1, 4, half), none), y[:-1, :, :half]]), y[:, :, half:]], 1)
                            for y, none in ((value, 0.0), (score, -np.inf)))
        out = np.zeros((len(h), 1, value.shape[2]))
        e = np.exp(score - score.max(1, keepdims=True))
        out[0:n * ratio:ratio, 0] = rms_norm(m, name + 'norm', (e * value).sum(1) / e.sum(1))
        return turn(out, ratio)[0:n * ratio:ratio, 0]

    def attend(m, il, h):
        b, ratio, n = 'blk.%d.' % il, ratios[il], len(h)
        short = rms_norm(m, b + 'attn_q_a_norm', linear(m, b + 'attn_q_a', h))
        q = turn(rms(heads(linear(m, b + 'attn_q_b', short), 4), 2e-3), ratio)
        key = turn(rms_norm(m, b + 'attn_kv_a_norm', linear(m, b + 'attn_kv', h))[:, None], ratio)[:, 0]
        age = np.arange(n)[:, None] - np.arange(n)[None, :]
        seen = (age >= 0) & (age < 6)
        if ratio:
            key = np.concatenate([key, blocks(m, b + 'attn_compressor_', h, ratio)])
            complete = np.arange(n // ratio)[None, :] < (np.arange(n)[:, None] + 1) // ratio
            if ratio == 4:
                index_q, index_k = turn(heads(linear(m, b + 'indexer.attn_q_b', short), 3), 4), blocks(m, b + 'indexer_compressor_', h, 4)
                score = np.einsum('th,thb->tb', linear(m, b + 'indexer.proj', h), np.maximum(np.einsum('thd,bd->thb', index_q, index_k), 0.0))
                complete = best_of_each(m, np.where(complete, score, -np.inf), 2)
            seen = np.concatenate([seen, complete], 1)
        score = np.where(seen[:, None], np.einsum('thd,kd->thk', q, key) / 4.0, -np.inf)
        sinks = np.broadcast_to(m.at(b + 'attn_sinks.weight')[None, :, None], (n, 4, 1))
        out = turn(np.einsum('thk,kd->thd', softmax(np.concatenate([score, sinks], 2))[:, :, :-1], key), ratio, -1.0)
        groups = np.einsum('tgi,gri->tgr', out.reshape(n, 2, 32), m.at(b + 'attn_output_a.weight').reshape(2, 12, 32))
        return linear(m, b + 'attn_output_b', groups.reshape(n, 24))

    def moe(m, il, h, tokens):
        b = 'blk.%d.' % il
        probs = np.sqrt(np.logaddexp(0.0, linear(m, b + 'ffn_gate_inp', h)))
        if il: w = choose_experts(m, probs, probs + m.at(b + 'exp_probs_b.bias'), True)
        else:
            w = np.where((m.tensors[b + 'ffn_gate_tid2eid.weight'][tokens][:, :, None] == np.arange(6)).any(1), probs, 0.0)
            w = w / w.sum(-1, keepdims=True)

        def limited(gate, up, limit):
            return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit) if limit else silu(gate) * up
        limits = [m.at_layer('swiglu_clamp_' + part, il) for part in ('exp', 'shexp')]
        gate, up, down = (m.at(b + 'ffn_%s_exps.weight' % part) for part in ('gate', 'up', 'down'))
        y = linear(m, b + 'ffn_down_shexp', limited(linear(m, b + 'ffn_gate_shexp', h), linear(m, b + 'ffn_up_shexp', h), limits[1]))
        return y + sum(1.5 * w[:, e:e + 1] * (limited(h @ gate[e].T, h @ up[e].T, limits[0]) @ down[e].T) for e in range(6))

    def forward(m, tokens):
        x = np.repeat(m.at('token_embd.weight')[tokens][:, None], 4, 1)
        for il in range(3):
            x = through_streams(m, 'blk.%d.' % il, x, 'attn', lambda h: attend(m, il, h))
            x = through_streams(m, 'blk.%d.' % il, x, 'ffn', lambda h: moe(m, il, h, tokens))
        take = linear(m, 'output_hc_fn', rms(x.reshape(len(x), -1), 2e-3)) * m.at('output_hc_scale.weight') + m.at('output_hc_base.weight')
        return logits(m, rms_norm(m, 'output_norm', ((sigmoid(take) + m.get('hyper_connection.epsilon'))[:, :, None] * x).sum(1)))
    return m, forward


def make_kimi_k3():
    """each sublayer reads a mixture of the stream and of those that every second layer put aside; narrow experts; tanh
    limits gates and values"""
    m = Model('kimi-k3', 'kimi-k3')
    common_keys(m, layers=4, n_head=4, n_kv=1, head_dim=28, n_ff=40)
    m.i32s(attention__head_count_kv=[0, 1, 0, 1])
    m.u32(attention__value_length=24, attention__kv_lora_rank=24, attention__q_lora_rank=20, attention__key_length_mla=12,
          attention__value_length_mla=10, rope__dimension_count=4, ssm__conv_kernel=4, kda__head_dim=8,
          leading_dense_block_count=1, expert_count=6, expert_used_count=2, expert_feed_forward_length=16,
          expert_shared_count=1, expert_gating_func=2, expert_latent_length=24, attn_res__block_size=2)
    m.f32(expert_weights_scale=1.5, kda__gate_lower_bound=-3.0, activation__situ_beta=1.5, activation__situ_linear_beta=2.5)
    m.flag(expert_weights_norm=True)
    put_embeddings(m)
    m.vector('output_res_score.weight', N_EMBD)
    for il in range(4):
        b = 'blk.%d.' % il
        m.norm(b + 'attn_norm', N_EMBD)
        m.norm(b + 'ffn_norm', N_EMBD)
        m.vector(b + 'ffn_res_score.weight', N_EMBD)
        if il: m.vector(b + 'attn_res_score.weight', N_EMBD)
        if il % 2:
            m.norm(b + 'attn_q_a_norm', 20)
            m.norm(b + 'attn_kv_a_norm', 24)
            for name, *shape in (('q_a', 20, N_EMBD), ('q_b', 48, 20), ('kv_a_mqa', 28, N_EMBD), ('k_b', 4, 24, 8), ('v_b', 4, 10, 24),
                                 ('gate', 40, N_EMBD), ('output', N_EMBD, 40)):
                m.weight(b + 'attn_' + name, *shape, gain=1.2)
        else:
            for part in 'qkv':
                m.weight(b + 'attn_' + part, 32, N_EMBD, gain=1.5)
                m.vector(b + 'ssm_conv1d_%s.weight' % part, 32, 1, 4, spread=1.0)
            for name, *shape in (('f_a', 8, N_EMBD), ('f_b', 32, 8), ('g', 32, N_EMBD), ('beta', 4, N_EMBD)):
                m.weight(b + 'ssm_' + name, *shape, gain=1.5)
            m.vector(b + 'ssm_a', 4, mean=-0.8, spread=0.1)
            m.vector(b + 'ssm_dt.bias', 32, mean=-1.0, spread=0.5)
            m.norm(b + 'ssm_norm', 8)
            m.weight(b + 'attn_output', N_EMBD, 32, gain=1.5)
        if il == 0: put_ffn(m, il, 40)
        else:
            m.vector(b + 'ffn_gate_inp.weight', 6, N_EMBD, spread=2.5 / N_EMBD ** 0.5)
            for part, rows, columns in (('gate', 16, 24), ('up', 16, 24), ('down', 24, 16)): m.weight(b + 'ffn_%s_exps' % part, 6, rows, columns, gain=2.0)
            m.weight(b + 'ffn_routed_down', 24, N_EMBD)
            m.weight(b + 'ffn_routed_up', N_EMBD, 24)
            m.norm(b + 'ffn_routed_norm', 24)
            put_ffn(m, il, 16, '_shexp')
            m.vector(b + 'exp_probs_b.bias', 6, spread=0.2)

    def kda(m, b, h):
        return kimi_delta(m, b, h, lambda a, step: np.exp(-3.0 * sigmoid(-a * step)), linear(m, b + 'ssm_g', h))

    def latent(m, b, h):
        q = heads(linear(m, b + 'attn_q_b', rms_norm(m, b + 'attn_q_a_norm', linear(m, b + 'attn_q_a', h))), 4)
        narrow = linear(m, b + 'attn_kv_a_mqa', h)
        low = rms_norm(m, b + 'attn_kv_a_norm', narrow[:, :24])
        k = np.concatenate([np.einsum('tr,hrd->thd', low, m.at(b + 'attn_k_b.weight')), np.repeat(narrow[:, None, 24:], 4, 1)], 2)
        y = attention(q, k, np.einsum('tr,hdr->thd', low, m.at(b + 'attn_v_b.weight')), 12 ** -0.5)
        return linear(m, b + 'attn_output', y * sigmoid(linear(m, b + 'attn_gate', h)))

    def situ(gate, up): return 1.5 * np.tanh(gate / 1.5) * sigmoid(gate) * 2.5 * np.tanh(up / 2.5)

    def mlp(m, b, h, end):
        return linear(m, b + 'ffn_down' + end, situ(linear(m, b + 'ffn_gate' + end, h), linear(m, b + 'ffn_up' + end, h)))

    def moe(m, b, h):
        probs = sigmoid(linear(m, b + 'ffn_gate_inp', h))
        w = 1.5 * choose_experts(m, probs, probs + m.at(b + 'exp_probs_b.bias'), True)
        gate, up, down = (m.at(b + 'ffn_%s_exps.weight' % x) for x in ('gate', 'up', 'down'))
        low = linear(m, b + 'ffn_routed_down', h)
        y = sum(w[:, e:e + 1] * (situ(low @ gate[e].T, low @ up[e].T) @ down[e].T) for e in range(6))
        return linear(m, b + 'ffn_routed_up', rms_norm(m, b + 'ffn_routed_norm', y)) + mlp(m, b, h, '_shexp')

    def forward(m, tokens):
        eps = m.get('attention.layer_norm_rms_epsilon')
        x, kept = m.at('token_embd.weight')[tokens], []
        def mixture(x, name):
            if not kept: return x
            every = np.stack(kept + [x])
            p = softmax((rms(every, eps) @ m.at(name + '.weight')).T)
            return np.einsum('tk,ktd->td', p, every)
        for il in range(4):
            b = 'blk.%d.' % il
            h = rms_norm(m, b + 'attn_norm', mixture(x, b + 'attn_res_score'))
            y = (latent if il % 2 else kda)(m, b, h)
            if il % 2 == 0: kept.append(x)
            x = y if il % 2 == 0 else x + y
            h = rms_norm(m, b + 'ffn_norm', mixture(x, b + 'ffn_res_score'))
            x = x + (moe(m, b, h) if il else mlp(m, b, h, ''))
        return logits(m, rms_norm(m, 'output_norm', mixture(x, 'output_res_score')))
    return m, forward


def make_kimi_linear():
    """Kimi delta attention: each key channel of a memory fades by itself; latent attention without rope, softmax gates"""
    m = Model('kimi-linear', 'kimi-linear')
    common_keys(m, layers=3, n_head=4, n_kv=1, head_dim=28, n_ff=40)
    m.i32s(attention__head_count_kv=[0, 1, 0])
    m.u32(attention__value_length=24, attention__kv_lora_rank=24, attention__key_length_mla=12, attention__value_length_mla=10,
          rope__dimension_count=4, ssm__conv_kernel=4, kda__head_dim=8, leading_dense_block_count=1, expert_count=6,
          expert_used_count=2, expert_feed_forward_length=16, expert_shared_count=1, expert_gating_func=2)
    m.f32(expert_weights_scale=1.5)
    put_embeddings(m)
    for il in range(3):
        b = 'blk.%d.' % il
        m.norm(b + 'attn_norm', N_EMBD)
        m.norm(b + 'ffn_norm', N_EMBD)
        if il == 1:
            m.norm(b + 'attn_kv_a_norm', 24)
            for name, *shape in (('q', 48, N_EMBD), ('kv_a_mqa', 28, N_EMBD), ('k_b', 4, 24, 8), ('v_b', 4, 10, 24), ('output', N_EMBD, 40)):
                m.weight(b + 'attn_' + name, *shape, gain=1.2)
        else: put_kimi_delta(m, b, (-0.3, 0.07, (4, 1)))
        put_kimi_ffn(m, il)

    def kda(m, b, h):
        gate = linear(m, b + 'ssm_g_b', linear(m, b + 'ssm_g_a', h))
        return kimi_delta(m, b, h, lambda a, step: np.exp(softplus(step) * a), gate)

    def latent(m, b, h):
        q, kv = heads(linear(m, b + 'attn_q', h), 4), linear(m, b + 'attn_kv_a_mqa', h)
        c = rms_norm(m, b + 'attn_kv_a_norm', kv[:, :24])
        k = np.concatenate([np.einsum('tr,hrn->thn', c, m.at(b + 'attn_k_b.weight')), np.repeat(kv[:, None, 24:], 4, 1)], 2)
        v = np.einsum('tr,hdr->thd', c, m.at(b + 'attn_v_b.weight'))
        return linear(m, b + 'attn_output', attention(q, k, v, 12 ** -0.5))

    def moe(m, il, h):
        if il == 0: return gated_ffn(m, il, h)
        probs = sigmoid(linear(m, 'blk.%d.ffn_gate_inp' % il, h))
        w = choose_experts(m, probs, probs + m.at('blk.%d.exp_probs_b.bias' % il), True)
        return experts(m, il, h, w * 1.5) + gated_ffn(m, il, h, '_shexp')
    return m, lambda m, tokens: pre_norm_decoder(m, tokens, lambda m, il, h: (latent if il == 1 else kda)(m, 'blk.%d.' % il, h), moe)


# ---- encoders: hidden states instead of logits ----

def look_around(q, k, v, scale, window=0, slopes=None, bias=None):
    """attention to all tokens, or to those at most window / 2 away; slopes: what a score loses for each position between;
    bias [heads, T, T]"""
    n, n_head, _ = q.shape
    far = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :])
    out = np.empty_like(v)
    for h in range(n_head):
        score = q[:, h] @ k[:, h].T * scale - (slopes[h] * far if slopes is not None else 0) + (bias[h] if bias is not None else 0)
        out[:, h] = softmax(np.where(far > (window // 2 or n), -np.inf, score)) @ v[:, h]
    return out.reshape(n, -1)


def encoder_attention(m, il, h, output='attn_output', turn=lambda x: x, **how):
    b, n_head = 'blk.%d.' % il, m.get('attention.head_count')
    if m.arch == 't5encoder': b = 'enc.' + b
    q, k, v = (linear(m, b + 'attn_' + part, h) for part in 'qkv')
    if m.has(b + 'attn_q_norm.weight'): q, k = layer_norm(m, b + 'attn_q_norm', q), layer_norm(m, b + 'attn_k_norm', k)
    q, k, v = turn(heads(q, n_head)), turn(heads(k, n_head)), heads(v, n_head)
    how.setdefault('scale', q.shape[2] ** -0.5)
    return linear(m, b + output, look_around(q, k, v, **how))


def encoder_model(arch, layers, n_head, n_ff, rms_norms=False):
    m = Model(arch, arch)
    common_keys(m, layers=layers, n_head=n_head, n_kv=n_head, head_dim=N_EMBD // n_head, n_ff=n_ff, base=3000.0)
    m.flag(attention__causal=False)
    m.encoder = True
    if not rms_norms:
        del m.keys[arch + '.attention.layer_norm_rms_epsilon']
        m.f32(attention__layer_norm_epsilon=2e-3)
    m.weight('token_embd', N_VOCAB, N_EMBD, gain=N_EMBD ** 0.5)
    return m


def put_layer_norm(m, name):
    m.norm(name, N_EMBD)
    m.vector(name + '.bias', N_EMBD)


def put_encoder_layer(m, il, bias):
    put_attention(m, il, bias=bias)
    if bias: m.vector('blk.%d.attn_output.bias' % il, N_EMBD)
    put_layer_norm(m, 'blk.%d.attn_output_norm' % il)
    put_layer_norm(m, 'blk.%d.layer_output_norm' % il)


def put_mlp(m, il, n_ff):
    for part, rows, columns in (('up', n_ff, N_EMBD), ('down', N_EMBD, n_ff)):
        m.weight('blk.%d.ffn_%s' % (il, part), rows, columns, gain=1.5)
        m.vector('blk.%d.ffn_%s.bias' % (il, part), rows)


def mlp(m, il, h): return linear(m, 'blk.%d.ffn_down' % il, gelu(linear(m, 'blk.%d.ffn_up' % il, h)))


def normed_after(m, tokens, x, attend, ffn):
    """x = norm(x + attend(x)), x = norm(x + ffn(x)) for each layer"""
    for il in range(m.get('block_count')):
        y = layer_norm(m, 'blk.%d.attn_output_norm' % il, x + attend(m, il, x))
        if m.has('blk.%d.attn_norm_2.weight' % il): y = layer_norm(m, 'blk.%d.attn_norm_2' % il, y + x)
        x = layer_norm(m, 'blk.%d.layer_output_norm' % il, y + ffn(m, il, y))
    return x


def embedded(m, tokens):
    x = m.at('token_embd.weight')[tokens]
    if m.has('token_types.weight'): x = x + m.at('token_types.weight')[0]
    if m.has('position_embd.weight'): x = x + m.at('position_embd.weight')[:len(tokens)]
    return layer_norm(m, 'token_embd_norm', x)


def make_bert():
    """learned positions, biases everywhere, and a classifier of two labels"""
    m = encoder_model('bert', layers=3, n_head=4, n_ff=48)
    m.u32(pooling_type=4)
    m.weight('token_types', 2, N_EMBD)
    m.weight('position_embd', 128, N_EMBD)
    put_layer_norm(m, 'token_embd_norm')
    for il in range(3):
        put_encoder_layer(m, il, bias=True)
        put_mlp(m, il, 48)
    m.weight('cls', N_EMBD, N_EMBD)
    m.vector('cls.bias', N_EMBD)
    m.weight('cls.output', 2, N_EMBD)
    m.vector('cls.output.bias', 2)
    m.scores = lambda x: linear(m, 'cls.output', np.tanh(linear(m, 'cls', x[:1])))[0]
    return m, lambda m, tokens: normed_after(m, tokens, embedded(m, tokens), encoder_attention, mlp)


def make_jina_bert_v2():
    """a penalty for distance instead of positions, norms of all queries and keys, a second norm, a gated ffn"""
    m = encoder_model('jina-bert-v2', layers=2, n_head=6, n_ff=40)
    m.u32(attention__key_length=5, attention__value_length=5)
    del m.keys['jina-bert-v2.rope.dimension_count'], m.keys['jina-bert-v2.rope.freq_base']
    put_layer_norm(m, 'token_embd_norm')
    for il in range(2):
        put_encoder_layer(m, il, bias=True)
        put_ffn(m, il, 40)
        for part in ('q_norm', 'k_norm'):
            m.norm('blk.%d.attn_%s' % (il, part), 30)
            m.vector('blk.%d.attn_%s.bias' % (il, part), 30)
    put_layer_norm(m, 'blk.1.attn_norm_2')
    slopes = alibi_slopes(6, 8.0)
    return m, lambda m, tokens: normed_after(m, tokens, embedded(m, tokens), lambda m, il, h: encoder_attention(m, il, h, slopes=slopes),
                                             lambda m, il, h: gated_ffn(m, il, h, act=gelu))


def make_nomic_bert_moe():
    """rope, and experts without gates in every second layer, weighted by their share of the softmax"""
    m = encoder_model('nomic-bert-moe', layers=2, n_head=4, n_ff=24)
    m.u32(moe_every_n_layers=2, expert_count=4, expert_used_count=2)
    put_layer_norm(m, 'token_embd_norm')
    for il in range(2): put_encoder_layer(m, il, bias=False)
    put_mlp(m, 0, 24)
    m.vector('blk.1.ffn_gate_inp.weight', 4, N_EMBD, spread=2.5 / N_EMBD ** 0.5)
    m.weight('blk.1.ffn_up_exps', 4, 24, N_EMBD, gain=2.0)
    m.weight('blk.1.ffn_down_exps', 4, N_EMBD, 24, gain=2.0)

    def moe(m, il, h):
        score = linear(m, 'blk.1.ffn_gate_inp', h)
        w, up, down = choose_experts(m, softmax(score), score, False), m.at('blk.1.ffn_up_exps.weight'), m.at('blk.1.ffn_down_exps.weight')
        return sum(w[:, e:e + 1] * (gelu(h @ up[e].T) @ down[e].T) for e in range(4))
    return m, lambda m, tokens: normed_after(m, tokens, embedded(m, tokens), lambda m, il, h: encoder_attention(
        m, il, h, turn=lambda x: rope(x, 8, 3000.0, 'far')), lambda m, il, h: moe(m, il, h) if il else mlp(m, il, h))


def make_nomic_bert():
    """rope and a gated ffn, no biases but those of norms"""
    m = encoder_model('nomic-bert', layers=2, n_head=4, n_ff=40)
    m.weight('token_types', 2, N_EMBD)
    put_layer_norm(m, 'token_embd_norm')
    for il in range(2):
        put_encoder_layer(m, il, bias=False)
        put_ffn(m, il, 40)
    return m, lambda m, tokens: normed_after(m, tokens, embedded(m, tokens), lambda m, il, h: encoder_attention(
        m, il, h, turn=lambda x: rope(x, 8, 3000.0, 'far')), gated_ffn)


def make_jina_bert_v3():
    """rope, biases everywhere"""
    m = encoder_model('jina-bert-v3', layers=2, n_head=4, n_ff=40)
    m.weight('token_types', 1, N_EMBD)
    put_layer_norm(m, 'token_embd_norm')
    for il in range(2):
        put_encoder_layer(m, il, bias=True)
        put_mlp(m, il, 40)
    return m, lambda m, tokens: normed_after(m, tokens, embedded(m, tokens), lambda m, il, h: encoder_attention(
        m, il, h, turn=lambda x: rope(x, 8, 3000.0, 'far')), mlp)


def make_modern_bert(act='gelu'):
    """norms without biases before attention, of which the first layer has none, and before the ffn; every third layer
    sees all tokens, the others those at most three away, and turn with another base; one matrix makes gates and values"""
    m = encoder_model('modern-bert', layers=4, n_head=4, n_ff=40)
    m.u32(attention__sliding_window=6)
    if act != 'gelu':
        m.name = 'modern-bert-' + act
        m.text(hidden_activation=act)
    m.norm('token_embd_norm', N_EMBD)
    for il in range(4):
        b = 'blk.%d.' % il
        if il: m.norm(b + 'attn_norm', N_EMBD)
        put_attention(m, il)
        m.norm(b + 'ffn_norm', N_EMBD)
        m.weight(b + 'ffn_up', 80, N_EMBD, gain=1.5)
        m.weight(b + 'ffn_down', N_EMBD, 40, gain=1.5)
    m.norm('output_norm', N_EMBD)

    def normed(m, name, x):
        x = x - x.mean(-1, keepdims=True)
        return rms(x, m.get('attention.layer_norm_epsilon')) * m.at(name + '.weight')

    def forward(m, tokens):
        x = normed(m, 'token_embd_norm', m.at('token_embd.weight')[tokens])
        for il in range(4):
            b, local = 'blk.%d.' % il, il % 3 != 0
            x = x + encoder_attention(m, il, normed(m, b + 'attn_norm', x) if il else x, window=6 if local else 0,
                                      turn=lambda v: rope(v, 8, 10000.0 if local else 3000.0, 'far'))
            gate, up = np.split(linear(m, b + 'ffn_up', normed(m, b + 'ffn_norm', x)), 2, 1)
            x = x + linear(m, b + 'ffn_down', (gelu if act == 'gelu' else silu)(gate) * up)
        return normed(m, 'output_norm', x)
    return m, forward


def make_modern_bert_silu(): return make_modern_bert('silu')


def make_gemma_embedding():
    """gemma 3 without its causal order, windows to both sides, and two matrices after the mean"""
    m = encoder_model('gemma-embedding', layers=2, n_head=4, n_ff=40, rms_norms=True)
    m.u32(attention__sliding_window=9, attention__sliding_window_pattern=2, pooling_type=1)
    m.norm('output_norm', N_EMBD)
    for il in range(2):
        for name in ('attn_norm', 'post_attention_norm', 'ffn_norm', 'post_ffw_norm'): m.norm('blk.%d.%s' % (il, name), N_EMBD)
        put_attention(m, il)
        put_head_norms_rms(m, il)
        put_ffn(m, il, 40)
    m.weight('dense_2', 48, N_EMBD)
    m.weight('dense_3', N_EMBD, 48)
    m.head = lambda x: linear(m, 'dense_3', linear(m, 'dense_2', x))

    def layers(m, tokens):
        x = m.at('token_embd.weight')[tokens] * N_EMBD ** 0.5
        for il in range(2):
            b, base = 'blk.%d.' % il, 3000.0 if il else 10000.0
            h, n_head = rms_norm(m, b + 'attn_norm', x), 4
            q, k, v = (heads(linear(m, b + 'attn_' + part, h), n_head) for part in 'qkv')
            q, k = rope(rms_norm(m, b + 'attn_q_norm', q), 8, base, 'far'), rope(rms_norm(m, b + 'attn_k_norm', k), 8, base, 'far')
            y = linear(m, b + 'attn_output', look_around(q, k, v, 8 ** -0.5, window=0 if il else 9))
            x = x + rms_norm(m, b + 'post_attention_norm', y)
            x = x + rms_norm(m, b + 'post_ffw_norm', gated_ffn(m, il, rms_norm(m, b + 'ffn_norm', x), act=gelu))
        return rms_norm(m, 'output_norm', x)
    return m, layers


def put_head_norms_rms(m, il):
    for part in ('q', 'k'): m.norm('blk.%d.attn_%s_norm' % (il, part), 8)


def make_t5encoder():
    """a learned bias for the distance of two tokens, by buckets, which all layers share; scores are not scaled"""
    m = encoder_model('t5encoder', layers=2, n_head=4, n_ff=40, rms_norms=True)
    m.u32(attention__relative_buckets_count=12)
    m.vector('enc.blk.0.attn_rel_b.weight', 12, 4, spread=1.0)
    m.norm('enc.output_norm', N_EMBD)
    for il in range(2):
        put_attention(m, il)
        put_ffn(m, il, 40)
        m.norm('blk.%d.attn_norm' % il, N_EMBD)
        m.norm('blk.%d.ffn_norm' % il, N_EMBD)
    for name in [name for name in m.tensors if name.startswith('blk.')]:
        m.tensors['enc.' + name.replace('attn_output', 'attn_o')] = m.tensors.pop(name)

    def bucket(i, j):
        """six for each side: three of one distance each, three of a logarithmic scale up to 128"""
        far, after = abs(i - j), 6 if j > i else 0
        return after + (far if far < 3 else min(5, int(3 + np.log(far / 3) / np.log(128 / 3) * 3)))

    def layers(m, tokens):
        x, n = m.at('token_embd.weight')[tokens], len(tokens)
        table = m.at('enc.blk.0.attn_rel_b.weight')
        bias = np.array([[[table[bucket(i, j)][h] for j in range(n)] for i in range(n)] for h in range(4)])
        for il in range(2):
            b = 'enc.blk.%d.' % il
            x = x + encoder_attention(m, il, rms_norm(m, b + 'attn_norm', x), 'attn_o', scale=1.0, bias=bias)
            h = rms_norm(m, b + 'ffn_norm', x)
            x = x + linear(m, b + 'ffn_down', gelu(linear(m, b + 'ffn_gate', h)) * linear(m, b + 'ffn_up', h))
        return rms_norm(m, 'enc.output_norm', x)
    return m, layers


def make_apertus():
    """no gate: xIELU, whose numbers are each layer's; normed heads"""
    m = Model('apertus', 'apertus')
    common_keys(m, layers=2, n_head=4, n_kv=2, head_dim=8, n_ff=40, base=1000.0)
    numbers = {'alpha_n': [0.3, -0.4], 'alpha_p': [0.5, -0.2], 'beta': [0.5, 0.4], 'eps': [-1e-6, -1e-6]}
    for name, values in numbers.items(): m.keys['xielu.' + name] = ('f32s', values)
    put_family(m, 2, 40, qk=lambda n: (8,))
    for il in range(2): del m.tensors['blk.%d.ffn_gate.weight' % il]

    def ffn(m, il, h):
        n, p, beta, eps = (np.float64(np.float32(numbers[name][il])) for name in ('alpha_n', 'alpha_p', 'beta', 'eps'))
        x = linear(m, 'blk.%d.ffn_up' % il, h)
        low = (beta + softplus(n)) * (np.expm1(np.minimum(x, eps)) - x)
        return linear(m, 'blk.%d.ffn_down' % il, np.where(x > 0, softplus(p) * x * x, low) + beta * x)
    return m, lambda m, tokens: pre_norm_decoder(
        m, tokens, lambda m, il, h: parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x)), ffn)


def make_step35(mtp=0):
    """layers with a window turn whole heads, the others half; gates of heads; what experts and others multiply is
    limited, and their gates after SiLU. mtp: heads, whose layers have windows and no limits"""
    m = Model('step35', 'step35-mtp' if mtp else 'step35')
    common_keys(m, layers=2 + mtp, n_head=4, n_kv=2, head_dim=8, n_ff=32, base=1000.0)
    m.u32(attention__sliding_window=6, expert_count=4, expert_used_count=2, expert_feed_forward_length=16,
          expert_shared_feed_forward_length=16)
    m.i32s(attention__head_count=[4, 6] + [6] * mtp, attention__head_count_kv=[2, 2] + [2] * mtp,
           attention__sliding_window_pattern=[0, 1] + [1] * mtp)
    m.f32(rope__freq_base_swa=200.0, expert_weights_scale=1.5)
    m.keys['step35.swiglu_clamp_exp'] = ('f32s', [0.0, 0.25] + [0.0] * mtp)
    m.keys['step35.swiglu_clamp_shexp'] = ('f32s', [0.5, 0.25] + [0.0] * mtp)
    m.vector('rope_freqs.weight', 4, mean=2.5, spread=0.7)
    put_family(m, 2 + mtp, 32, qk=lambda n: (8,), dense=lambda il: il != 1)
    put_router(m, 1, 4, 16, bias=True, shared=16)
    for il in range(2 + mtp): m.weight('blk.%d.attn_gate' % il, 6 if il else 4, N_EMBD, gain=1.5)

    def mix(m, il, h):
        keep = m.keys['step35.rope.freq_base']
        if il: m.f32(rope__freq_base=200.0)
        y = parts_attention(m, il, h, 'far', lambda x, name: rms_norm(m, name, x), n_rot=8 if il else 4, window=6 if il else 0,
                            gate=sigmoid, factors=1.0 if il else m.at('rope_freqs.weight')[:2])
        m.keys['step35.rope.freq_base'] = keep
        return y

    def limited(gate, up, down, limit): return (np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)) @ down.T

    def ffn(m, il, h):
        b, word, limit = 'blk.%d.ffn_' % il, '_shexp' if il == 1 else '', m.get('swiglu_clamp_shexp')[il]
        if limit == 0: limit = np.inf
        y = limited(linear(m, b + 'gate' + word, h), linear(m, b + 'up' + word, h), m.at(b + 'down' + word + '.weight'), limit)
        if il != 1: return y
        w, (gate, up, down) = sigmoid_weights(m, il, h), (m.at(b + part + '_exps.weight') for part in ('gate', 'up', 'down'))
        return y + sum(w[:, e:e + 1] * limited(h @ gate[e].T, h @ up[e].T, down[e], 0.25) for e in range(4))
    if mtp: m.u32(nextn_predict_layers=mtp)
    for il in range(2, 2 + mtp): put_mtp(m, ('norm', 'output'), il)
    return with_mtp(m, mix, ffn, raw=True)


def make_step35_mtp(): return make_step35(mtp=2)


FAMILIES = [make_mixtral, make_qwen2moe, make_olmoe, make_lfm2, make_lfm2moe, make_qwen35, make_qwen35moe,
            make_qwen35moe_fused, make_qwen3next, make_qwen3next_legacy, make_cohere2, make_internlm2, make_exaone,
            make_seed_oss, make_mpt, make_bloom, make_gemma4, make_gemma4_moe, make_gemma3n,
            make_gemma, make_deepseek2_groups, make_deepseek2_lite,
            make_deepseek2_lite_legacy, make_gemma3_linear, make_olmo3, make_lfm2_bias, make_command_r_plus,
            make_stablelm_12b, make_mamba, make_jamba, make_falcon_h1,
            make_nemotron_h_moe, make_bert, make_jina_bert_v2, make_nomic_bert_moe, make_gemma_embedding,
            make_t5encoder, make_minimax_01, make_kimi_linear,
            make_afmoe, make_laguna, make_llama4, make_arctic, make_grok, make_cohere2moe, make_smallthinker,
            make_grovemoe, make_k2_horizon, make_talkie, make_mimo2, make_maple, make_qwen3vl, make_olmo,
            make_hunyuan_dense, make_jais, make_minicpm3, make_apertus, make_step35, make_deepseek32, make_glm_dsa,
            make_minimax_m3, make_nomic_bert, make_jina_bert_v3, make_modern_bert, make_modern_bert_silu,
            make_kimi_k3, make_glm5_next, make_deepseek4, make_qwen4exp, make_dots3note, make_hy_v4,
            make_hrm_text, make_qwen35_mtp, make_qwen35moe_mtp, make_glm4moe_mtp, make_deepseek2_mtp, make_mimo2_mtp,
            make_step35_mtp, make_qwen3next_mtp, make_nemotron_h_moe_mtp]


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
        near = m.mtp and min(margins) >= GREEDY_MARGIN and not mtp_answers(m, tokens)
        if min(margins) >= GREEDY_MARGIN and m.router_margin >= ROUTER_MARGIN and not near:
            return tokens, table, greedy, margins
    sys.exit(m.name + ': every prompt has a near tie')


def mtp_answers(m, tokens):
    """drafts after the prompt, each from the one before, and logits: the first head's of the prompt, and those of the drafts
    but the first; None: a draft is a near tie. A head reads what the one before made of the token before, also of drafts; the
    last one, for drafts beyond the heads, what it made itself. Before the first token there is nothing: zeros"""
    hidden, head = m.mtp
    tokens, drafts, last = np.array(tokens), [], m.get('nextn_predict_layers') - 1
    nothing = np.zeros((1, N_EMBD))
    g, rows = np.concatenate([nothing, hidden(m, tokens)[:-1]]), []
    for i in range(N_DRAFTS):
        x, table = head(m, tokens, g, min(i, last))
        best = np.sort(table[-1])
        if best[-1] - best[-2] < GREEDY_MARGIN: return None
        drafts.append(int(table[-1].argmax()))
        rows += list(table if i == 0 else table[-1:])
        tokens, g = np.append(tokens, drafts[-1]), np.concatenate([nothing, x] if i < last else [g, x[-1:]])
    return ['drafts ' + numbers('%d', drafts)] + [numbers('%.5f', row) for row in rows]


def encoder_answers(m, forward):
    """a text's hidden states; its mean, after the file's matrices if there are any, of length 1; and its scores"""
    for attempt in range(200):
        tokens = [int(w % np.uint64(N_VOCAB - 3)) + 3 for w in random_words('%s text %d' % (m.name, attempt), N_PROMPT)]
        m.router_margin = np.inf
        x = forward(m, np.array(tokens))
        if m.router_margin >= ROUTER_MARGIN: break
    mean = x.mean(0, keepdims=True)
    mean = (m.head(mean) if m.head else mean)[0]
    lines = ['tokens ' + numbers('%d', tokens), 'mean ' + numbers('%.6f', mean / np.sqrt((mean * mean).sum()))]
    lines += [('scores ' + numbers('%.5f', m.scores(x) if m.scores else [])).strip()] + [numbers('%.5f', row) for row in x]
    return '\n'.join(lines) + '\n'


def numbers(form, values): return ' '.join(form % v for v in values)


def make(family):
    """name, bytes of the model, text of the answers"""
    m, forward = family()
    if m.encoder: return m.name, write_gguf(m), encoder_answers(m, forward)
    tokens, table, greedy, margins = answers(m, forward)
    lines = ['tokens ' + numbers('%d', tokens), 'greedy ' + numbers('%d', greedy)]
    lines += ['margins ' + numbers('%.5f', margins)]
    lines += [numbers('%.5f', row) for row in table]
    if m.mtp: lines += mtp_answers(m, tokens)
    return m.name, write_gguf(m), '\n'.join(lines) + '\n'


def same_answers(a, b):
    """equal words, but for the last digit of reals"""
    a, b = a.split(), b.split()
    near = (x == y or ('.' in x and '.' in y and abs(float(x) - float(y)) < 1.5e-5) for x, y in zip(a, b))
    return len(a) == len(b) and all(near)


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
