#!/usr/bin/env python3
"""make_sampling.py >tests/expected_sampling.h: what samplers must choose, by their definitions, in float64, sorting.

Logit i of draw j is (7919 i + 104729 j) mod 1009 / scale, so that the test can compute the same numbers. Penalties, which the library
applies in place, are rounded to float32 after each step. The random numbers are xoroshiro128++'s, drawn as the library documents: one
for XTC, if it is on, then one for the token, which walks the ids in rising order.
XTC is p-e-w's (2024), DRY p-e-w's with llama.cpp's breakers, mirostat Basu et al.'s (2021) with llama.cpp's m = 100."""
import math
import numpy as np

M64 = (1 << 64) - 1


class Random:
    def __init__(self, seed):
        self.s = []
        for _ in range(2):
            seed = (seed + 0x9E3779B97F4A7C15) & M64
            z = seed
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
            z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
            self.s.append(z ^ z >> 31)

    def __call__(self):
        rot = lambda x, n: (x << n | x >> (64 - n)) & M64
        a, b = self.s
        x = (rot((a + b) & M64, 17) + a) & M64
        b ^= a
        self.s = [rot(a, 49) ^ b ^ (b << 21 & M64), rot(b, 28)]
        return (x >> 11) * 2.0**-53


def softmax(logits, ids, temperature=1.0):
    top = max(logits[i] for i in ids)
    w = [math.exp((logits[i] - top) / temperature) for i in ids]
    return [x / sum(w) for x in w]


def penalize(c, logits, history):
    recent = history[-c.get("penalty_last_n", 64):]
    for t in set(recent):
        x = logits[t]
        r = np.float32(c.get("repeat_penalty", 1))
        x = np.float32(x / r) if x > 0 else np.float32(x * r)
        logits[t] = np.float32(x - np.float32(np.float32(recent.count(t)) * np.float32(c.get("frequency_penalty", 0)) +
                                              np.float32(c.get("presence_penalty", 0))))


def dry(c, logits, history):
    """For each earlier place: how long is the longest common ending of all history and of history up to there?"""
    allowed, n = c.get("dry_allowed_length", 2), c.get("dry_last_n", c.get("n_history", 256))
    h, breakers = history[-n:], c.get("dry_breakers", [])
    if not c.get("dry_multiplier") or len(h) <= allowed:
        return
    limit = len(h)
    for at in range(len(h) - 1, -1, -1):
        fits = [len(b) for b in breakers if h[at:at + len(b)] == b]
        if fits:
            limit = len(h) - at - max(fits)
            break
    if limit < allowed:
        return
    longest = {}
    for end in range(1, len(h)):
        same = 0
        while same < end and h[end - 1 - same] == h[-1 - same]:
            same += 1
        same = min(same, limit)
        if same >= allowed:
            longest[h[end]] = max(longest.get(h[end], 0), same)
    for t, same in longest.items():
        if [t] not in breakers:
            logits[t] = np.float32(logits[t] - np.float32(np.float32(c["dry_multiplier"]) *
                                                          float(np.float32(c.get("dry_base", 1.75)))**(same - allowed)))


def draw(ids, p, u):
    point, order = u * sum(p), sorted(range(len(ids)), key=lambda k: ids[k])
    for k in order:
        if p[k] > 0:
            chosen = k
            if point < p[k]:
                break
            point -= p[k]
    return ids[chosen], p[chosen] / sum(p)


def run(c):
    rng, history, chosen, n = Random(c["seed"]), [], [], c["n"]
    tau, eta = c.get("mirostat_tau", 5), float(np.float32(c.get("mirostat_eta", 0.1)))
    mu, temperature, logprob = 2.0 * tau, float(np.float32(c.get("temperature", 0))), 0.0
    for j in range(c["draws"]):
        logits = [np.float32((7919 * i + 104729 * j) % 1009 / c["scale"]) for i in range(n)]
        raw = softmax([float(x) for x in logits], range(n))
        mirostat = c.get("mirostat", 0)
        if not mirostat:
            penalize(c, logits, history)
            dry(c, logits, history)
        x = [float(v) for v in logits]
        ids = sorted(range(n), key=lambda i: (-x[i], i))
        p = softmax(x, ids, temperature or 1)
        if not temperature:
            token = ids[0]
        elif mirostat == 1:
            m = min(100, n)
            t = [math.log((i + 2) / (i + 1)) for i in range(m - 1)]
            b = [math.log(p[i] / p[i + 1]) for i in range(m - 1)]
            s = sum(u * v for u, v in zip(t, b)) / sum(u * u for u in t)
            e = s - 1
            k = max(1, int(min(n, (e * 2**mu / (1 - n**-e))**(1 / s))))
            ids = ids[:k]
            token, q = draw(ids, softmax(x, ids, temperature), rng())
            mu -= eta * (-math.log2(q) - tau)
        elif mirostat == 2:
            ids = [i for i, q in zip(ids, p) if -math.log2(q) <= mu] or ids[:1]
            token, q = draw(ids, softmax(x, ids, temperature), rng())
            mu -= eta * (-math.log2(q) - tau)
        else:
            ids = ids[:c.get("top_k") or n]
            p, total = softmax(x, ids), 0
            if c.get("top_p"):
                for k, q in enumerate(p):
                    total += q
                    if total >= float(np.float32(c["top_p"])):
                        ids = ids[:k + 1]
                        break
            if c.get("min_p"):
                ids = [i for i in ids if math.exp(x[i] - x[ids[0]]) >= float(np.float32(c["min_p"]))]
            if c.get("xtc_probability") and rng() < float(np.float32(c["xtc_probability"])):
                high = [k for k, q in enumerate(softmax(x, ids)) if q >= float(np.float32(c.get("xtc_threshold", 0.1)))]
                if len(high) > 1:
                    ids = ids[high[-1]:]
            token, _ = draw(ids, softmax(x, ids, temperature), rng())
        history.append(token)
        chosen.append(token)
        logprob += math.log(raw[token])
    return chosen, mu, logprob


CASES = [
    dict(n=300, draws=200, scale=128, temperature=1, xtc_probability=1, xtc_threshold=0.01, seed=1),
    dict(n=40, draws=200, scale=256, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, xtc_probability=0.5, seed=2),
    dict(n=8, draws=200, scale=math.inf, temperature=1, xtc_probability=0.5, seed=3),  # all equal: the last id is left
    dict(n=6, draws=200, scale=512, temperature=0.3, dry_multiplier=0.8, seed=4),
    dict(n=6, draws=200, scale=512, dry_multiplier=2, dry_base=1.2, dry_allowed_length=1, seed=5),
    dict(n=5, draws=200, scale=256, temperature=0.5, dry_multiplier=1.5, dry_breakers=[[1], [3, 0], [3, 0, 2]], seed=6),
    dict(n=12, draws=900, scale=256, temperature=0.4, dry_multiplier=1, dry_last_n=700, n_history=1000, repeat_penalty=1.3,
         penalty_last_n=500, frequency_penalty=0.01, presence_penalty=0.1, seed=7),
    dict(n=400, draws=200, scale=128, temperature=1, mirostat=1, seed=8),
    dict(n=1000, draws=200, scale=64, temperature=0.8, mirostat=1, mirostat_tau=3, mirostat_eta=0.2, seed=9),
    dict(n=400, draws=200, scale=128, temperature=1, mirostat=2, seed=10),
    dict(n=1000, draws=200, scale=64, temperature=1.3, mirostat=2, mirostat_tau=2, mirostat_eta=0.3, seed=11),
]


def main():
    print("/* Written by make_sampling.py: what samplers must choose, by their definitions. */")
    print("typedef struct sampling_case {\n    uint32_t n, n_draws;\n    double scale;\n    rf_sampler_desc desc;\n"
          "    int32_t first[12];\n    uint64_t hash; /* of all tokens: h = h * 31 + token */\n"
          "    double mu, logprob; /* mirostat's at the end; sum of the chosen */\n} sampling_case;\n")
    print("static const rf_dry_breaker sampling_breakers[] = {{1, {1}}, {2, {3, 0}}, {3, {3, 0, 2}}};\n")
    print("static const sampling_case sampling_cases[] = {")
    for c in CASES:
        chosen, mu, logprob = run(c)
        h = 0
        for t in chosen:
            h = (h * 31 + t) & M64
        fields = []
        for k, v in c.items():
            if k in ("n", "draws", "scale"):
                continue
            if k == "dry_breakers":
                fields.append(".dry_breakers = sampling_breakers, .n_dry_breakers = 3")
            else:
                fields.append(".%s = %s" % (k, "%rf" % v if isinstance(v, float) else v))
        print("    {%d, %d, %s, {%s},\n     {%s}, %du, %.12g, %.12g}," % (
            c["n"], c["draws"], "INFINITY" if math.isinf(c["scale"]) else c["scale"], ", ".join(fields), ", ".join(map(str, chosen[:12])), h, mu, logprob))
    print("};")


if __name__ == "__main__":
    main()
