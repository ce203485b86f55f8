#!/usr/bin/env python3
"""make_expected.py MODEL.gguf: what test_cli.sh expects of the shipped model, from a reference of its own: a Llama
forward pass in float64 on weights dequantized here (numpy). Writes expected_generate.txt next to this file; prints
the ids and the smallest margin between the best and the second logit. The prompt is chosen for wide margins: only
then is text a fair test of an engine that rounds. (On the model's f16 file it gives the golden logits to 5e-7.)"""
import os, struct, sys
import numpy as np

PROMPT = [1022, 644, 50, 50, 505, 268, 761, 330]  # "CASSIUS:\nWhere is"
N_TOKENS = 30
BLOCK = {0: (1, 4), 1: (1, 2), 8: (32, 34), 12: (256, 144), 14: (256, 210)}  # f32 f16 q8_0 q4_K q6_K


def read_gguf(path):
    data = open(path, 'rb').read()
    at = [4]

    def scalar(fmt):
        v = struct.unpack_from('<' + fmt, data, at[0])[0]
        at[0] += struct.calcsize('<' + fmt)
        return v

    def text():
        n = scalar('Q')
        at[0] += n
        return data[at[0] - n:at[0]]

    def value(t):
        if t == 8: return text()
        if t == 9:
            of, n = scalar('I'), scalar('Q')
            return [value(of) for _ in range(n)]
        return scalar({0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}[t])

    scalar('I')
    n_tensors, n_kv = scalar('Q'), scalar('Q')
    kv = {}
    for _ in range(n_kv):
        key = text().decode()
        kv[key] = value(scalar('I'))
    infos = []
    for _ in range(n_tensors):
        name = text().decode()
        ne = [scalar('Q') for _ in range(scalar('I'))]
        infos.append((name, ne, scalar('I'), scalar('Q')))
    align = kv.get('general.alignment', 32)
    base = (at[0] + align - 1) // align * align
    tensors = {}
    for name, ne, t, offset in infos:
        n, size = int(np.prod(ne)), BLOCK[t]
        raw = np.frombuffer(data, np.uint8, n // size[0] * size[1], base + offset).reshape(-1, size[1])
        tensors[name] = dequantize(t, raw).reshape(ne[::-1])
    return kv, tensors


def half(b):
    return np.ascontiguousarray(b).view(np.float16).astype(np.float64)


def dequantize(t, b):
    if t == 0: return np.ascontiguousarray(b).view(np.float32).astype(np.float64)
    if t == 1: return half(b)
    if t == 8: return half(b[:, :2]) * b[:, 2:].view(np.int8)
    if t == 12:  # q4_K: d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles
        s = b[:, 4:16].astype(np.int64)
        scale = np.concatenate([s[:, 0:4] & 63, s[:, 8:12] & 15 | s[:, 0:4] >> 6 << 4], 1)
        least = np.concatenate([s[:, 4:8] & 63, s[:, 8:12] >> 4 | s[:, 4:8] >> 6 << 4], 1)
        q = b[:, 16:].reshape(-1, 4, 32)
        q = np.stack([q & 15, q >> 4], 2).reshape(-1, 8, 32)
        return (half(b[:, :2]) * scale)[:, :, None] * q - (half(b[:, 2:4]) * least)[:, :, None]
    # q6_K: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 32)
    q = np.stack([low[:, :, k % 2] >> (k // 2 * 4) & 15 | (high >> (2 * k) & 3) << 4 for k in range(4)], 2)
    q = q.astype(np.int64).reshape(-1, 16, 16) - 32
    return half(b[:, 208:])[:, :, None] * b[:, 192:208].view(np.int8).astype(np.float64)[:, :, None] * q


def logits(kv, w, ids):
    n_heads, n_kv = kv['llama.attention.head_count'], kv['llama.attention.head_count_kv']
    hd = kv['llama.attention.key_length']
    eps, n = kv['llama.attention.layer_norm_rms_epsilon'], len(ids)
    angle = np.arange(n)[:, None] * kv['llama.rope.freq_base'] ** (-np.arange(0, hd, 2) / hd)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, g): return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * g

    def rope(x):
        y, (a, b) = np.empty_like(x), (x[..., 0::2], x[..., 1::2])
        y[..., 0::2], y[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        return y

    x = w['token_embd.weight'][ids]
    for i in range(kv['llama.block_count']):
        p = 'blk.%d.' % i
        h = norm(x, w[p + 'attn_norm.weight'])
        q = rope((h @ w[p + 'attn_q.weight'].T).reshape(n, n_heads, hd))
        k = rope((h @ w[p + 'attn_k.weight'].T).reshape(n, n_kv, hd)).repeat(n_heads // n_kv, 1)
        v = (h @ w[p + 'attn_v.weight'].T).reshape(n, n_kv, hd).repeat(n_heads // n_kv, 1)
        s = np.einsum('qhd,khd->hqk', q, k) / np.sqrt(hd) + np.triu(np.full((n, n), -np.inf), 1)
        s = np.exp(s - s.max(-1, keepdims=True))
        a = np.einsum('hqk,khd->qhd', s / s.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + a @ w[p + 'attn_output.weight'].T
        h = norm(x, w[p + 'ffn_norm.weight'])
        g = h @ w[p + 'ffn_gate.weight'].T
        x = x + (g / (1 + np.exp(-g)) * (h @ w[p + 'ffn_up.weight'].T)) @ w[p + 'ffn_down.weight'].T
    return norm(x, w['output_norm.weight']) @ w.get('output.weight', w['token_embd.weight']).T


def text_of(kv, ids):
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in shown]
    byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(other)}
    return b''.join(bytes(byte[c] for c in kv['tokenizer.ggml.tokens'][i].decode()) for i in ids)


if __name__ == '__main__':
    kv, w = read_gguf(sys.argv[1])
    ids, margins = list(PROMPT), []
    for _ in range(N_TOKENS):
        row = logits(kv, w, ids)[-1]
        best = np.argsort(row)[::-1]
        margins.append(row[best[0]] - row[best[1]])
        ids.append(int(best[0]))
    ids = ids[len(PROMPT):]
    print(','.join(map(str, ids)))
    print('smallest margin %.3f at token %d' % (min(margins), int(np.argmin(margins))))
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'expected_generate.txt')
    open(out, 'wb').write(text_of(kv, ids))
