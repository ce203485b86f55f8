/* ref_model.h: the model in float64, for the tests. Written from the architecture notes alone: it shares no plan, kernel
 * or decoder with the library, only reads keys and raw tensor bytes through the public GGUF calls. One sequence, all
 * positions at once, everything naive.
 *     ref_model m;  ref_open(&m, gguf);
 *     double *logits = ref_eval(&m, tokens, n, &(ref_options){.int8_acts = 1}, NULL);    [n][m.n_vocab]; free(logits)
 *     ref_close(&m);
 * Anything it does not understand ends the program: a reference must not guess. Include rocmforge.h first. */
#ifndef REF_MODEL_H
#define REF_MODEL_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REF_FN __attribute__((unused)) static

/* What the library rounds, to be simulated so that tolerances need only cover float32 arithmetic. */
typedef struct ref_options {
    int int8_acts; /* inputs of a matmul with quantized weights become 8-bit, in blocks of 32      */
    int kv_f16;    /* keys (after rope) and values are rounded to binary16                         */
    int kv_q8;     /* ref_family.h: they are rounded to int8, 32 by a binary16 scale               */
} ref_options;

/* How near the simulated roundings came to a tie: below the float32 noise the library may fall to the other side. */
typedef struct ref_margins {
    double int8;   /* smallest distance of x/d from a half, in steps                                    */
    double choice; /* smallest distance of the scores of the last expert chosen and the first that is not */
} ref_margins;

typedef struct ref_model {
    const rf_gguf *g;
    char arch[32];
    uint32_t n_layers, n_embd, n_vocab;
    double **data; /* [n_tensors] decoded on first use */
    double *hidden; /* NULL, or [n, n_embd]: what the output matrix is multiplied with */
    ref_margins margins;
} ref_model;

__attribute__((unused, noreturn, format(printf, 1, 2))) static void ref_die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "ref_model.h: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(99);
}

REF_FN double *ref_zeros(uint64_t n) {
    double *p = (double *)calloc(n ? n : 1, sizeof *p);
    if (!p) ref_die("out of memory: %llu doubles", (unsigned long long)n);
    return p;
}

/* ---- decoding: the type table of the architecture notes ---- */

REF_FN double ref_half(const uint8_t *p) {
    uint32_t h = p[0] | (uint32_t)p[1] << 8, e = h >> 10 & 31, m = h & 1023;
    double v = e == 0 ? ldexp(m, -24) : e == 31 ? (m ? (double)NAN : (double)INFINITY) : ldexp(m + 1024.0, (int)e - 25);
    return h >> 15 ? -v : v;
}

/* nearest binary16, ties to even; finite values below 65520 only */
REF_FN double ref_to_half(double x) {
    int e;
    if (x == 0) return x;
    frexp(x, &e); /* |x| = [0.5, 1) * 2^e: 11 significant bits, or multiples of 2^-24 */
    double step = ldexp(1, e - 11 > -24 ? e - 11 : -24);
    return nearbyint(x / step) * step;
}

REF_FN double ref_float(const uint8_t *p, int bf16) {
    uint32_t u = bf16 ? (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24
                      : p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* scale and min of sub-block j of Q4_K and Q5_K, 6 bits each */
REF_FN void ref_k_scale(const uint8_t *s, int j, int *scale, int *min) {
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

/* 4-bit floats: a sign, 2 bits of exponent, 1 of fraction */
REF_FN double ref_fp4(int q) {
    int e = q >> 1 & 3, m = q & 1;
    return (q & 8 ? -1 : 1) * (e ? ldexp(1 + 0.5 * m, e - 1) : 0.5 * m);
}

/* one block; returns its elements */
REF_FN uint32_t ref_block(uint32_t type, const uint8_t *p, double *out) {
    double d = ref_half(p), m = type == RF_TYPE_Q4_1 || type == RF_TYPE_Q5_1 ? ref_half(p + 2) : 0;
    int scale, min;
    switch (type) {
    case RF_TYPE_F32: out[0] = ref_float(p, 0); return 1;
    case RF_TYPE_F16: out[0] = d; return 1;
    case RF_TYPE_BF16: out[0] = ref_float(p, 1); return 1;
    case RF_TYPE_Q4_0:
    case RF_TYPE_Q4_1:
    case RF_TYPE_Q5_0:
    case RF_TYPE_Q5_1: {
        int five = type == RF_TYPE_Q5_0 || type == RF_TYPE_Q5_1,
            with_min = type == RF_TYPE_Q4_1 || type == RF_TYPE_Q5_1;
        const uint8_t *high = p + (with_min ? 4 : 2), *low = high + (five ? 4 : 0);
        for (int e = 0; e < 32; e++) {
            int q = e < 16 ? low[e] & 15 : low[e - 16] >> 4;
            if (five) q |= (high[e / 8] >> e % 8 & 1) << 4;
            out[e] = with_min ? d * q + m : d * (q - (five ? 16 : 8));
        }
        return 32;
    }
    case RF_TYPE_Q8_0:
        for (int e = 0; e < 32; e++) out[e] = d * (int8_t)p[2 + e];
        return 32;
    case RF_TYPE_Q4_K:
    case RF_TYPE_Q5_K: {
        int five = type == RF_TYPE_Q5_K;
        const uint8_t *qh = p + 16, *qs = p + (five ? 48 : 16);
        for (int e = 0; e < 256; e++) {
            int j = e / 32, l = e % 32; /* sub-blocks 2g and 2g + 1: low and high nibbles of 32 bytes */
            int q = (j % 2 ? qs[j / 2 * 32 + l] >> 4 : qs[j / 2 * 32 + l] & 15) + (five && (qh[l] >> j & 1) ? 16 : 0);
            ref_k_scale(p + 4, j, &scale, &min);
            out[e] = d * scale * q - ref_half(p + 2) * min;
        }
        return 256;
    }
    case RF_TYPE_Q6_K:
        for (int e = 0; e < 256; e++) {
            int half = e / 128, quarter = e % 128 / 32, l = e % 32;
            int low = p[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
            int high = p[128 + half * 32 + l] >> (2 * quarter) & 3;
            int8_t sc = (int8_t)p[192 + half * 8 + quarter * 2 + l / 16];
            out[e] = ref_half(p + 208) * sc * ((low | high << 4) - 32);
        }
        return 256;
    case RF_TYPE_Q2_K:
        for (int e = 0; e < 256; e++) {
            int q = p[16 + e / 128 * 32 + e % 32] >> 2 * (e / 32 % 4) & 3;
            out[e] = ref_half(p + 80) * (p[e / 16] & 15) * q - ref_half(p + 82) * (p[e / 16] >> 4);
        }
        return 256;
    case RF_TYPE_MXFP4:
        for (int e = 0; e < 32; e++) out[e] = ldexp(ref_fp4(e < 16 ? p[1 + e] & 15 : p[1 + e - 16] >> 4), p[0] - 127);
        return 32;
    case RF_TYPE_NVFP4: /* scales of 4 bits of exponent, 3 of fraction */
        for (int e = 0; e < 64; e++) {
            int q = p[4 + e / 16 * 8 + e % 8], s = p[e / 16];
            out[e] = ldexp(s < 8 ? s : 8 + s % 8, s < 8 ? -9 : s / 8 - 10) * ref_fp4(e % 16 < 8 ? q & 15 : q >> 4);
        }
        return 64;
    default: ref_die("tensor type %u", type);
    }
}

/* ---- keys and tensors ---- */

REF_FN void ref_open(ref_model *m, const rf_gguf *g) {
    rf_kv kv;
    rf_string s;
    memset(m, 0, sizeof *m);
    m->g = g;
    m->data = (double **)calloc(rf_gguf_get_info(g).n_tensors + 1, sizeof *m->data);
    if (!m->data || rf_gguf_find_kv(g, "general.architecture", &kv, NULL) != RF_OK || rf_kv_text(&kv, NULL, &s, NULL) != RF_OK)
        ref_die("no architecture");
    snprintf(m->arch, sizeof m->arch, "%.*s", (int)s.len, s.data);
}

REF_FN void ref_close(ref_model *m) {
    for (uint64_t i = 0; i < rf_gguf_get_info(m->g).n_tensors; i++) free(m->data[i]);
    free(m->data);
}

/* number `il` of a key (arrays: one per layer); absent: the given value, or the end if that is NaN */
REF_FN double ref_key(const ref_model *m, const char *suffix, uint32_t il, double absent) {
    char name[128];
    rf_kv kv;
    int64_t i;
    double v;
    snprintf(name, sizeof name, "%s.%s", m->arch, suffix);
    if (rf_gguf_find_kv(m->g, name, &kv, NULL) != RF_OK) {
        if (isnan(absent)) ref_die("no key %s", name);
        return absent;
    }
    if (kv.type != RF_KV_ARRAY) il = 0;
    if (rf_kv_int(&kv, il, &i, NULL) == RF_OK) return (double)i;
    if (rf_kv_real(&kv, il, &v, NULL) == RF_OK) return v;
    ref_die("key %s", name);
}

REF_FN const double *ref_tensor(ref_model *m, const char *name, rf_tensor_info *t) {
    rf_tensor_info info;
    if (!t) t = &info;
    if (rf_gguf_find_tensor(m->g, name, t, NULL) != RF_OK) return NULL;
    double **data = &m->data[t->index];
    if (!*data) {
        rf_type_info type = rf_type_get(t->type);
        uint64_t n = t->ne[0] * t->ne[1] * t->ne[2];
        uint8_t *raw = (uint8_t *)malloc(t->size_bytes);
        if (!raw || rf_gguf_read_tensor(m->g, t->index, 0, raw, t->size_bytes, NULL) != RF_OK)
            ref_die("cannot read %s", name);
        *data = ref_zeros(n + 256);
        for (uint64_t b = 0; b * type.block_elements < n; b++)
            ref_block(t->type, raw + b * type.block_bytes, *data + b * type.block_elements);
        free(raw);
    }
    return *data;
}

REF_FN const double *ref_need(ref_model *m, const char *name, uint64_t n_in, uint64_t n_rows, rf_tensor_info *t) {
    rf_tensor_info info;
    if (!t) t = &info;
    const double *p = ref_tensor(m, name, t);
    if (!p || t->ne[0] != n_in || t->ne[1] != n_rows)
        ref_die("%s is missing or not %u x %u", name, (unsigned)n_rows, (unsigned)n_in);
    return p;
}

/* ---- the graph ---- */

/* Blocks of 32 as the CPU kernels see them: steps of max|x| / 127, half to even. */
REF_FN void ref_int8(ref_model *m, double *x, uint64_t n) {
    for (uint64_t b = 0; b < n; b += 32) {
        double most = 0;
        for (uint64_t i = b; i < b + 32; i++) most = fmax(most, fabs(x[i]));
        double d = most / 127;
        for (uint64_t i = b; i < b + 32 && d > 0; i++) {
            double steps = x[i] / d;
            m->margins.int8 = fmin(m->margins.int8, fabs(steps - floor(steps) - 0.5));
            x[i] = nearbyint(steps) * d;
        }
    }
}

/* y[n][n_out] (+)= x[n][n_in] W[row0 .. row0 + n_out]^T + bias; a bias is optional and of as many rows as the weight */
REF_FN void ref_matmul(ref_model *m, const ref_options *o, const char *name, const char *bias_name, uint64_t rows,
                       uint64_t row0, double *y, uint64_t n_out, const double *x, uint64_t n_in, uint32_t n, int add) {
    rf_tensor_info t;
    const double *w = ref_need(m, name, n_in, rows, &t) + row0 * n_in,
                 *bias = bias_name ? ref_tensor(m, bias_name, NULL) : NULL;
    double *in = ref_zeros(n * n_in);
    memcpy(in, x, n * n_in * sizeof *in);
    if (o->int8_acts && rf_type_get(t.type).block_elements > 1)
        for (uint32_t r = 0; r < n; r++) ref_int8(m, in + r * n_in, n_in);
    for (uint64_t j = 0; j < n_out; j++)
        for (uint32_t r = 0; r < n; r++) {
            double s[4] = {0, 0, 0, 0};
            const double *a = w + j * n_in, *b = in + r * n_in;
            uint64_t i = 0;
            for (; i + 4 <= n_in; i += 4)
                for (int k = 0; k < 4; k++) s[k] += a[i + k] * b[i + k];
            for (; i < n_in; i++) s[0] += a[i] * b[i];
            double v = s[0] + s[1] + s[2] + s[3] + (bias ? bias[row0 + j] : 0);
            y[r * n_out + j] = add ? y[r * n_out + j] + v : v;
        }
    free(in);
}

/* each of n_groups groups of `width` values on its own; y may be x */
REF_FN void ref_norm(ref_model *m, const char *name, double *y, const double *x, uint64_t width, uint64_t n_groups) {
    const double *w = ref_need(m, name, width, 1, NULL);
    double eps = ref_key(m, "attention.layer_norm_rms_epsilon", 0, NAN);
    for (uint64_t g = 0; g < n_groups; g++) {
        double sum = 0;
        for (uint64_t i = 0; i < width; i++) sum += x[g * width + i] * x[g * width + i];
        for (uint64_t i = 0; i < width; i++)
            y[g * width + i] = x[g * width + i] / sqrt(sum / (double)width + eps) * w[i];
    }
}

/* Rotate n rows of n_heads heads in place; row r is position r. */
REF_FN void ref_rope(ref_model *m, double *x, uint32_t n, uint32_t n_heads, uint32_t head_dim) {
    uint32_t n_rot = (uint32_t)ref_key(m, "rope.dimension_count", 0, head_dim);
    double base = ref_key(m, "rope.freq_base", 0, 10000), f = ref_key(m, "rope.scaling.factor", 0, 0), magnitude = 1;
    double lo = 0, hi = 0;
    const double *freqs = ref_tensor(m, "rope_freqs.weight", NULL);
    int neox = strcmp(m->arch, "llama") && strcmp(m->arch, "granitemoe"), yarn = 0, none = 0;
    char name[128];
    rf_kv kv;
    rf_string type = {"", 0};
    snprintf(name, sizeof name, "%s.rope.scaling.type", m->arch);
    if (rf_gguf_find_kv(m->g, name, &kv, NULL) == RF_OK) rf_kv_text(&kv, NULL, &type, NULL);
    yarn = type.len == 4 && memcmp(type.data, "yarn", 4) == 0;
    none = type.len == 4 && memcmp(type.data, "none", 4) == 0;
    if (f == 0) f = ref_key(m, "rope.scale_linear", 0, 1);
    if (f == 0 || none) f = 1;
    if (yarn) {
        double n0 = ref_key(m, "rope.scaling.original_context_length", 0, ref_key(m, "context_length", 0, NAN));
        double log_mul = ref_key(m, "rope.scaling.yarn_log_multiplier", 0, 0), two_pi = 2 * acos(-1);
        lo = floor(n_rot * log(n0 / (32 * two_pi)) / (2 * log(base)));
        hi = ceil(n_rot * log(n0 / (1 * two_pi)) / (2 * log(base)));
        if (lo < 0) lo = 0;
        if (hi > n_rot - 1) hi = n_rot - 1;
        magnitude = (0.1 * log(f) + 1) / (0.1 * log_mul * log(f) + 1);
    }
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t h = 0; h < n_heads; h++)
            for (uint32_t i = 0; i < n_rot / 2; i++) {
                double theta = pow(base, -2.0 * i / n_rot) / (freqs ? freqs[i] : 1), angle = r * theta / f;
                if (yarn) {
                    double t = (i - lo) / fmax(0.001, hi - lo), ramp = 1 - (t < 0 ? 0 : t > 1 ? 1 : t);
                    angle = r * theta * ((1 - ramp) / f + ramp);
                }
                double *v = x + ((uint64_t)r * n_heads + h) * head_dim;
                double *a = v + (neox ? i : 2 * i), *b = v + (neox ? i + n_rot / 2 : 2 * i + 1), a0 = *a, b0 = *b;
                *a = (a0 * cos(angle) - b0 * sin(angle)) * magnitude;
                *b = (a0 * sin(angle) + b0 * cos(angle)) * magnitude;
            }
}

/* Sizes of attention, and what architectures do differently in it. */
typedef struct ref_heads {
    uint32_t n_heads, n_kv, dk, dv;
    uint32_t window;     /* positions a row sees, itself included; 0: all */
    const double *sinks; /* [n_heads] a score without a value; or NULL    */
    double scale;
} ref_heads;

/* out[n][n_heads][dv] of q[n][n_heads][dk], k[n][n_kv][dk], v[n][n_kv][dv] */
REF_FN void ref_attention(double *out, const double *q, const double *k, const double *v, uint32_t n,
                          const ref_heads *a) {
    uint32_t n_heads = a->n_heads, n_kv = a->n_kv, dk = a->dk, dv = a->dv;
    double *p = ref_zeros(n);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t h = 0; h < n_heads; h++) {
            uint32_t g = h / (n_heads / n_kv);
            uint32_t first = a->window && r >= a->window ? r - a->window + 1 : 0;
            double most = a->sinks ? a->sinks[h] : -INFINITY, sum, *y = out + ((uint64_t)r * n_heads + h) * dv;
            for (uint32_t j = first; j <= r; j++) {
                p[j] = 0;
                for (uint32_t i = 0; i < dk; i++)
                    p[j] += q[((uint64_t)r * n_heads + h) * dk + i] * k[((uint64_t)j * n_kv + g) * dk + i];
                p[j] *= a->scale;
                most = fmax(most, p[j]);
            }
            sum = a->sinks ? exp(a->sinks[h] - most) : 0;
            for (uint32_t j = first; j <= r; j++) sum += p[j] = exp(p[j] - most);
            for (uint32_t i = 0; i < dv; i++) {
                y[i] = 0;
                for (uint32_t j = first; j <= r; j++) y[i] += p[j] / sum * v[((uint64_t)j * n_kv + g) * dv + i];
            }
        }
    free(p);
}

/* ---- experts: the MoE block of the architecture notes, a row at a time ---- */

/* y[n_out] = W x of one row, rounded as ref_matmul rounds */
REF_FN void ref_product(ref_model *m, const ref_options *o, uint32_t type, const double *w, const double *x, double *y,
                        uint64_t n_in, uint64_t n_out) {
    double *in = ref_zeros(n_in);
    memcpy(in, x, n_in * sizeof *in);
    if (o->int8_acts && rf_type_get(type).block_elements > 1) ref_int8(m, in, n_in);
    for (uint64_t j = 0; j < n_out; j++) {
        y[j] = 0;
        for (uint64_t i = 0; i < n_in; i++) y[j] += w[j * n_in + i] * in[i];
    }
    free(in);
}

/* What a router of this file does. */
typedef struct ref_router {
    uint32_t n, n_used, gating;
    int normalize;
    double scale;
} ref_router;

REF_FN ref_router ref_router_of(const ref_model *m) {
    int glm = strcmp(m->arch, "glm4moe") == 0, oss = strcmp(m->arch, "gpt-oss") == 0;
    ref_router r = {(uint32_t)ref_key(m, "expert_count", 0, NAN), (uint32_t)ref_key(m, "expert_used_count", 0, NAN),
                    glm ? 2 : oss ? 3 : 1, !glm && !oss, 1};
    if (!glm) return r;
    r.gating = (uint32_t)ref_key(m, "expert_gating_func", 0, 2);
    r.normalize = ref_key(m, "expert_weights_norm", 0, 0) != 0;
    r.scale = ref_key(m, "expert_weights_scale", 0, 1);
    return r;
}

/* Choose experts: ids and weights of n_used. bias (of the choice) may be NULL. */
REF_FN void ref_choose(ref_model *m, const ref_router *r, const double *logits, const double *bias, uint32_t *ids,
                       double *weights) {
    double p[1024], score[1024], most = -INFINITY, sum = 0, last = 0, next = -INFINITY;
    if (r->n > 1024) ref_die("%u experts", r->n);
    for (uint32_t i = 0; i < r->n; i++) most = fmax(most, logits[i]);
    for (uint32_t i = 0; i < r->n; i++) sum += exp(logits[i] - most);
    for (uint32_t i = 0; i < r->n; i++) {
        p[i] = r->gating == 1 ? exp(logits[i] - most) / sum : r->gating == 2 ? 1 / (1 + exp(-logits[i])) : logits[i];
        score[i] = p[i] + (bias ? bias[i] : 0);
    }
    sum = 0;
    for (uint32_t k = 0; k < r->n_used; k++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < r->n; i++)
            if (score[i] > score[best]) best = i;
        ids[k] = best;
        weights[k] = r->gating == 3 ? exp(p[best] - most) : p[best];
        sum += weights[k];
        last = score[best];
        score[best] = -INFINITY;
    }
    for (uint32_t i = 0; i < r->n; i++) next = fmax(next, score[i]);
    m->margins.choice = fmin(m->margins.choice, last - next);
    for (uint32_t k = 0; k < r->n_used; k++) {
        if (r->gating == 3) weights[k] /= sum;
        if (r->normalize) weights[k] /= fmax(sum, ldexp(1, -14));
        weights[k] *= r->scale;
    }
}

REF_FN const double *ref_blk(ref_model *m, uint32_t il, const char *name, rf_tensor_info *t) {
    char full[64];
    snprintf(full, sizeof full, "blk.%u.%s", il, name);
    return ref_tensor(m, full, t);
}

/* y += weight * Wdown act(Wgate h, Wup h) of a row, expert e of the tensors ffn_*_<kind> */
REF_FN void ref_expert(ref_model *m, const ref_options *o, uint32_t il, const char *kind, uint32_t e, double weight,
                       const double *h, double *y) {
    static const char *const mats[3] = {"gate", "up", "down"};
    const double *w[3], *bias[3];
    rf_tensor_info t[3];
    char name[64];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "ffn_%s_%s.weight", mats[i], kind);
        w[i] = ref_blk(m, il, name, &t[i]);
        if (!w[i] || e >= t[i].ne[2]) ref_die("no %s of expert %u", name, e);
        w[i] += e * t[i].ne[0] * t[i].ne[1];
        snprintf(name, sizeof name, "ffn_%s_%s.bias", mats[i], kind);
        bias[i] = ref_blk(m, il, name, NULL);
        if (bias[i]) bias[i] += e * t[i].ne[1];
    }
    uint64_t ff = t[0].ne[1], n_embd = m->n_embd;
    if (t[0].ne[0] != n_embd || t[1].ne[0] != n_embd || t[1].ne[1] != ff || t[2].ne[0] != ff || t[2].ne[1] != n_embd)
        ref_die("layer %u: experts of other shapes", il);
    double *gate = ref_zeros(ff), *up = ref_zeros(ff), *down = ref_zeros(n_embd);
    ref_product(m, o, t[0].type, w[0], h, gate, n_embd, ff);
    ref_product(m, o, t[1].type, w[1], h, up, n_embd, ff);
    for (uint64_t i = 0; i < ff; i++) {
        double g = gate[i] + (bias[0] ? bias[0][i] : 0), u = up[i] + (bias[1] ? bias[1][i] : 0);
        if (strcmp(m->arch, "gpt-oss") == 0) {
            g = fmin(g, 7), u = fmax(-7, fmin(7, u));
            gate[i] = g / (1 + exp(-1.702 * g)) * (u + 1);
        } else {
            gate[i] = g / (1 + exp(-g)) * u;
        }
    }
    ref_product(m, o, t[2].type, w[2], gate, down, ff, n_embd);
    for (uint64_t i = 0; i < n_embd; i++) y[i] += weight * (down[i] + (bias[2] ? bias[2][i] : 0));
    free(gate), free(up), free(down);
}

/* x += the experts of each of n rows; h their normed inputs */
REF_FN void ref_moe(ref_model *m, const ref_options *o, uint32_t il, const double *h, double *x, uint32_t n) {
    ref_router r = ref_router_of(m);
    rf_tensor_info t;
    const double *w = ref_blk(m, il, "ffn_gate_inp.weight", &t), *bias = ref_blk(m, il, "ffn_gate_inp.bias", NULL),
                 *choice = ref_blk(m, il, "exp_probs_b.bias", NULL);
    if (!w || t.ne[0] != m->n_embd || t.ne[1] != r.n) ref_die("layer %u: no router", il);
    int shared = ref_blk(m, il, "ffn_gate_shexp.weight", NULL) != NULL;
    for (uint32_t row = 0; row < n; row++) {
        double logits[1024], weights[1024];
        uint32_t ids[1024];
        const double *in = h + (uint64_t)row * m->n_embd;
        double *out = x + (uint64_t)row * m->n_embd;
        ref_product(m, o, t.type, w, in, logits, m->n_embd, r.n);
        for (uint32_t i = 0; bias && i < r.n; i++) logits[i] += bias[i];
        ref_choose(m, &r, logits, choice, ids, weights);
        for (uint32_t k = 0; k < r.n_used; k++) ref_expert(m, o, il, "exps", ids[k], weights[k], in, out);
        if (shared) ref_expert(m, o, il, "shexp", 0, 1, in, out);
    }
}

/* x += one layer */
REF_FN void ref_layer(ref_model *m, const ref_options *o, uint32_t il, double *x, uint32_t n) {
    char b[16][64];
    static const char *const names[16] = {"attn_norm.weight",
                                          "attn_q.weight",
                                          "attn_q.bias",
                                          "attn_k.weight",
                                          "attn_k.bias",
                                          "attn_v.weight",
                                          "attn_v.bias",
                                          "attn_qkv.weight",
                                          "attn_qkv.bias",
                                          "attn_q_norm.weight",
                                          "attn_k_norm.weight",
                                          "attn_output.weight",
                                          "attn_output.bias",
                                          "ffn_norm.weight",
                                          "post_attention_norm.weight",
                                          ""};
    for (int i = 0; i < 16; i++) snprintf(b[i], sizeof b[i], "blk.%u.%s", il, names[i]);
    uint64_t n_embd = m->n_embd;
    uint32_t nh = (uint32_t)ref_key(m, "attention.head_count", il, NAN),
             nkv = (uint32_t)ref_key(m, "attention.head_count_kv", il, nh);
    uint32_t nh0 = (uint32_t)ref_key(m, "attention.head_count", 0, NAN),
             ff = (uint32_t)ref_key(m, "feed_forward_length", il, NAN);
    uint32_t dk = (uint32_t)ref_key(m, "attention.key_length", 0, m->n_embd / nh0);
    uint32_t dv = (uint32_t)ref_key(m, "attention.value_length", 0, m->n_embd / nh0);
    double *h = ref_zeros(n * n_embd), *q = ref_zeros((uint64_t)n * nh * dk), *k = ref_zeros((uint64_t)n * nkv * dk);
    double *v = ref_zeros((uint64_t)n * nkv * dv), *a = ref_zeros((uint64_t)n * nh * dv);
    double *gate = ref_zeros((uint64_t)n * ff), *up = ref_zeros((uint64_t)n * ff);
    ref_norm(m, b[0], h, x, n_embd, n);
    if (ref_tensor(m, b[7], NULL)) { /* rows q, k, v */
        uint64_t rows = (uint64_t)nh * dk + (uint64_t)nkv * (dk + dv);
        ref_matmul(m, o, b[7], b[8], rows, 0, q, (uint64_t)nh * dk, h, n_embd, n, 0);
        ref_matmul(m, o, b[7], b[8], rows, (uint64_t)nh * dk, k, (uint64_t)nkv * dk, h, n_embd, n, 0);
        ref_matmul(m, o, b[7], b[8], rows, (uint64_t)(nh + nkv) * dk, v, (uint64_t)nkv * dv, h, n_embd, n, 0);
    } else {
        ref_matmul(m, o, b[1], b[2], (uint64_t)nh * dk, 0, q, (uint64_t)nh * dk, h, n_embd, n, 0);
        ref_matmul(m, o, b[3], b[4], (uint64_t)nkv * dk, 0, k, (uint64_t)nkv * dk, h, n_embd, n, 0);
        ref_matmul(m, o, b[5], b[6], (uint64_t)nkv * dv, 0, v, (uint64_t)nkv * dv, h, n_embd, n, 0);
    }
    if (ref_tensor(m, b[9], NULL)) {
        ref_norm(m, b[9], q, q, dk, (uint64_t)n * nh);
        ref_norm(m, b[10], k, k, dk, (uint64_t)n * nkv);
    }
    ref_rope(m, q, n, nh, dk);
    ref_rope(m, k, n, nkv, dk);
    for (uint64_t i = 0; o->kv_f16 && i < (uint64_t)n * nkv * dk; i++) k[i] = ref_to_half(k[i]);
    for (uint64_t i = 0; o->kv_f16 && i < (uint64_t)n * nkv * dv; i++) v[i] = ref_to_half(v[i]);
    ref_heads heads = {nh, nkv, dk, dv, 0, ref_blk(m, il, "attn_sinks.weight", NULL),
                       ref_key(m, "attention.scale", 0, 1 / sqrt(dk))};
    if (strcmp(m->arch, "gpt-oss") == 0 && il % 2 == 0)
        heads.window = (uint32_t)ref_key(m, "attention.sliding_window", 0, 0);
    ref_attention(a, q, k, v, n, &heads);
    double residual = ref_key(m, "residual_scale", 0, 1);
    ref_matmul(m, o, b[11], b[12], n_embd, 0, h, n_embd, a, (uint64_t)nh * dv, n, 0);
    for (uint64_t i = 0; i < n * n_embd; i++) x[i] += residual * h[i];

    ref_norm(m, ref_tensor(m, b[14], NULL) ? b[14] : b[13], h, x, n_embd, n);
    if (ref_blk(m, il, "ffn_gate_inp.weight", NULL)) {
        double *y = ref_zeros(n * n_embd);
        ref_moe(m, o, il, h, y, n);
        for (uint64_t i = 0; i < n * n_embd; i++) x[i] += residual * y[i];
        free(y);
        free(h), free(q), free(k), free(v), free(a), free(gate), free(up);
        return;
    }
    char w[3][64], bias[3][64];
    static const char *const mats[3] = {"ffn_gate", "ffn_up", "ffn_down"};
    for (int i = 0; i < 3; i++) {
        snprintf(w[i], sizeof w[i], "blk.%u.%s.weight", il, mats[i]);
        snprintf(bias[i], sizeof bias[i], "blk.%u.%s.bias", il, mats[i]);
    }
    ref_matmul(m, o, w[0], bias[0], ff, 0, gate, ff, h, n_embd, n, 0);
    ref_matmul(m, o, w[1], bias[1], ff, 0, up, ff, h, n_embd, n, 0);
    for (uint64_t i = 0; i < (uint64_t)n * ff; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    ref_matmul(m, o, w[2], bias[2], n_embd, 0, x, n_embd, gate, ff, n, 1);
    free(h), free(q), free(k), free(v), free(a), free(gate), free(up);
}

/* Logits [n][n_vocab] of tokens at positions 0 .. n-1; the caller frees them. margins may be NULL. */
REF_FN double *ref_eval(ref_model *m, const int32_t *tokens, uint32_t n, const ref_options *o, ref_margins *margins) {
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "qwen3moe", "glm4moe", "granitemoe", "gpt-oss"};
    rf_tensor_info t;
    const double *embd = ref_tensor(m, "token_embd.weight", &t);
    size_t known = 0;
    while (known < sizeof archs / sizeof archs[0] && strcmp(m->arch, archs[known])) known++;
    if (known == sizeof archs / sizeof archs[0]) ref_die("arch %s", m->arch);
    if (!embd) ref_die("no token_embd.weight");
    m->n_layers = (uint32_t)(ref_key(m, "block_count", 0, NAN) - ref_key(m, "nextn_predict_layers", 0, 0));
    m->n_embd = (uint32_t)ref_key(m, "embedding_length", 0, NAN);
    m->n_vocab = (uint32_t)t.ne[1];
    m->margins.int8 = 0.5;
    m->margins.choice = INFINITY;
    double *x = ref_zeros((uint64_t)n * m->n_embd), *logits = ref_zeros((uint64_t)n * m->n_vocab);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < m->n_embd; i++)
            x[(uint64_t)r * m->n_embd + i] =
                embd[(uint64_t)(uint32_t)tokens[r] * m->n_embd + i] * ref_key(m, "embedding_scale", 0, 1);
    for (uint32_t il = 0; il < m->n_layers; il++) ref_layer(m, o, il, x, n);
    ref_norm(m, "output_norm.weight", x, x, m->n_embd, n);
    if (m->hidden) memcpy(m->hidden, x, (uint64_t)n * m->n_embd * sizeof *x);
    int tied = !ref_tensor(m, "output.weight", NULL);
    ref_matmul(m, o, tied ? "token_embd.weight" : "output.weight", "output.bias", m->n_vocab, 0, logits, m->n_vocab, x,
               m->n_embd, n, 0);
    double logit_scale = ref_key(m, "logit_scale", 0, 1);
    for (uint64_t i = 0; i < (uint64_t)n * m->n_vocab; i++) logits[i] /= logit_scale;
    if (margins) *margins = m->margins;
    free(x);
    return logits;
}

/* largest |a - b| over largest |b|; infinite if anything is not a number */
static double ref_distance(const float *a, const double *b, size_t n) {
    double diff = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(a[i]) || !isfinite(b[i])) return INFINITY;
        diff = fmax(diff, fabs((double)a[i] - b[i]));
        most = fmax(most, fabs(b[i]));
    }
    return diff / most;
}

#endif
