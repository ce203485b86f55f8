/* make_gguf.h: writes GGUF files into memory for the tests, and makes complete tiny models. It knows the format from
 * the specification only and shares nothing with rocmforge.h, so that it can serve as a reference.
 *     mg_gguf w;  mg_buf file = {0};
 *     mg_begin(&w, 3);
 *     mg_kv_str(&w, "general.architecture", "llama");
 *     mg_tensor(&w, "a.weight", MG_F32, 2, (uint64_t[]){4, 2}, values, sizeof values);
 *     mg_finish(&w, &file);            file.data, file.n; mg_free(&file) when done
 * A whole model: mg_options o = {0}; o.type = MG_Q8_0; mg_llama(&file, &o); */
#ifndef MAKE_GGUF_H
#define MAKE_GGUF_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MG_FN __attribute__((unused)) static

enum { MG_F32 = 0, MG_F16 = 1, MG_Q4_0 = 2, MG_Q4_1 = 3, MG_Q5_0 = 6, MG_Q5_1 = 7, MG_Q8_0 = 8, MG_Q4_K = 12,
       MG_Q5_K = 13, MG_Q6_K = 14, MG_BF16 = 30, MG_Q2_K = 10, MG_Q3_K = 11, MG_IQ2_XXS = 16, MG_IQ2_XS = 17,
       MG_IQ3_XXS = 18, MG_IQ1_S = 19, MG_IQ4_NL = 20, MG_IQ3_S = 21, MG_IQ2_S = 22, MG_IQ4_XS = 23, MG_IQ1_M = 29,
       MG_TQ1_0 = 34, MG_TQ2_0 = 35, MG_MXFP4 = 39, MG_NVFP4 = 40, MG_Q1_0 = 41, MG_Q2_0 = 42 };
enum { MG_KV_U8, MG_KV_I8, MG_KV_U16, MG_KV_I16, MG_KV_U32, MG_KV_I32, MG_KV_F32, MG_KV_BOOL, MG_KV_STR, MG_KV_ARR,
       MG_KV_U64, MG_KV_I64, MG_KV_F64 };

/* ---- bytes ---- */

typedef struct mg_buf {
    unsigned char *data;
    size_t n, capacity;
} mg_buf;

MG_FN void mg_put(mg_buf *b, const void *src, size_t n) {
    if (n > b->capacity - b->n) {
        size_t want = b->capacity * 2 + n + 256;
        unsigned char *p = (unsigned char *)realloc(b->data, want);
        if (!p) fprintf(stderr, "make_gguf.h: out of memory\n"), exit(99);
        b->data = p;
        b->capacity = want;
    }
    if (n) memcpy(b->data + b->n, src, n);
    b->n += n;
}
MG_FN void mg_put_u16(mg_buf *b, uint16_t v) { mg_put(b, &v, sizeof v); }
MG_FN void mg_put_u32(mg_buf *b, uint32_t v) { mg_put(b, &v, sizeof v); }
MG_FN void mg_put_u64(mg_buf *b, uint64_t v) { mg_put(b, &v, sizeof v); }
MG_FN void mg_put_text(mg_buf *b, const char *s, size_t n) {
    mg_put_u64(b, n);
    mg_put(b, s, n);
}
MG_FN void mg_pad(mg_buf *b, size_t align) {
    while (b->n % align) mg_put(b, "", 1);
}
MG_FN void mg_free(mg_buf *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}
MG_FN mg_buf mg_copy(const mg_buf *b) {
    mg_buf c = {0};
    mg_put(&c, b->data, b->n);
    return c;
}

/* Raw patches of a finished file. */
MG_FN void mg_set_u32(mg_buf *b, size_t at, uint32_t v) { memcpy(b->data + at, &v, sizeof v); }
MG_FN void mg_set_u64(mg_buf *b, size_t at, uint64_t v) { memcpy(b->data + at, &v, sizeof v); }
MG_FN uint64_t mg_get_u64(const mg_buf *b, size_t at) {
    uint64_t v;
    memcpy(&v, b->data + at, sizeof v);
    return v;
}
/* Offset of the n-th (0 = first) occurrence of text as a whole GGUF string: of its length field. SIZE_MAX if none. */
MG_FN size_t mg_find(const mg_buf *b, const char *text, int nth) {
    size_t n = strlen(text);
    for (size_t at = 0; at + 8 + n <= b->n; at++)
        if (mg_get_u64(b, at) == n && memcmp(b->data + at + 8, text, n) == 0 && nth-- == 0) return at;
    return SIZE_MAX;
}
MG_FN int mg_write_file(const mg_buf *b, const char *path) {
    FILE *f = fopen(path, "wb");
    if (!f) return 0;
    int ok = fwrite(b->data, 1, b->n, f) == b->n;
    return fclose(f) == 0 && ok;
}

/* ---- a file ---- */

typedef struct mg_row {
    char name[72];
    uint32_t type, n_dims;
    uint64_t ne[4];
    size_t at, n; /* of the data in mg_gguf.data */
} mg_row;

typedef struct mg_gguf {
    uint32_t version;
    uint32_t alignment;
    uint64_t n_kv;
    mg_buf kv;
    mg_buf rows; /* of mg_row                                 */
    mg_buf data; /* tensor data, each padded to the alignment */
} mg_gguf;

MG_FN void mg_begin(mg_gguf *w, uint32_t version) {
    memset(w, 0, sizeof *w);
    w->version = version;
    w->alignment = 32;
}

/* key and type of a pair; the caller appends the value to w->kv */
MG_FN void mg_kv(mg_gguf *w, const char *key, uint32_t type) {
    mg_put_text(&w->kv, key, strlen(key));
    mg_put_u32(&w->kv, type);
    w->n_kv++;
}
MG_FN void mg_kv_raw(mg_gguf *w, const char *key, uint32_t type, const void *value, size_t n) {
    mg_kv(w, key, type);
    mg_put(&w->kv, value, n);
}
MG_FN void mg_kv_u8(mg_gguf *w, const char *key, uint8_t v) { mg_kv_raw(w, key, MG_KV_U8, &v, sizeof v); }
MG_FN void mg_kv_i8(mg_gguf *w, const char *key, int8_t v) { mg_kv_raw(w, key, MG_KV_I8, &v, sizeof v); }
MG_FN void mg_kv_u16(mg_gguf *w, const char *key, uint16_t v) { mg_kv_raw(w, key, MG_KV_U16, &v, sizeof v); }
MG_FN void mg_kv_i16(mg_gguf *w, const char *key, int16_t v) { mg_kv_raw(w, key, MG_KV_I16, &v, sizeof v); }
MG_FN void mg_kv_u32(mg_gguf *w, const char *key, uint32_t v) { mg_kv_raw(w, key, MG_KV_U32, &v, sizeof v); }
MG_FN void mg_kv_i32(mg_gguf *w, const char *key, int32_t v) { mg_kv_raw(w, key, MG_KV_I32, &v, sizeof v); }
MG_FN void mg_kv_u64(mg_gguf *w, const char *key, uint64_t v) { mg_kv_raw(w, key, MG_KV_U64, &v, sizeof v); }
MG_FN void mg_kv_i64(mg_gguf *w, const char *key, int64_t v) { mg_kv_raw(w, key, MG_KV_I64, &v, sizeof v); }
MG_FN void mg_kv_f32(mg_gguf *w, const char *key, float v) { mg_kv_raw(w, key, MG_KV_F32, &v, sizeof v); }
MG_FN void mg_kv_f64(mg_gguf *w, const char *key, double v) { mg_kv_raw(w, key, MG_KV_F64, &v, sizeof v); }
MG_FN void mg_kv_bool(mg_gguf *w, const char *key, int v) {
    uint8_t b = v != 0;
    mg_kv_raw(w, key, MG_KV_BOOL, &b, 1);
}
MG_FN void mg_kv_str(mg_gguf *w, const char *key, const char *v) {
    mg_kv(w, key, MG_KV_STR);
    mg_put_text(&w->kv, v, strlen(v));
}
/* n elements, n_bytes of them: fixed-size types */
MG_FN void mg_kv_arr(mg_gguf *w, const char *key, uint32_t element_type, const void *v, uint64_t n, size_t n_bytes) {
    mg_kv(w, key, MG_KV_ARR);
    mg_put_u32(&w->kv, element_type);
    mg_put_u64(&w->kv, n);
    mg_put(&w->kv, v, n_bytes);
}
MG_FN void mg_kv_arr_u32(mg_gguf *w, const char *key, const uint32_t *v, size_t n) {
    mg_kv_arr(w, key, MG_KV_U32, v, n, n * 4);
}
MG_FN void mg_kv_arr_i32(mg_gguf *w, const char *key, const int32_t *v, size_t n) {
    mg_kv_arr(w, key, MG_KV_I32, v, n, n * 4);
}
MG_FN void mg_kv_arr_f32(mg_gguf *w, const char *key, const float *v, size_t n) {
    mg_kv_arr(w, key, MG_KV_F32, v, n, n * 4);
}
MG_FN void mg_kv_arr_str(mg_gguf *w, const char *key, const char *const *v, size_t n) {
    mg_kv_arr(w, key, MG_KV_STR, NULL, n, 0);
    for (size_t i = 0; i < n; i++) mg_put_text(&w->kv, v[i], strlen(v[i]));
}
/* Sets the alignment and says so in the file. Before the first tensor. */
MG_FN void mg_align(mg_gguf *w, uint32_t alignment) {
    w->alignment = alignment;
    mg_kv_u32(w, "general.alignment", alignment);
}

/* data may be NULL: zeros */
MG_FN void mg_tensor(mg_gguf *w, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne,
                     const void *data, size_t n) {
    mg_row row;
    memset(&row, 0, sizeof row);
    snprintf(row.name, sizeof row.name, "%s", name);
    row.type = type;
    row.n_dims = n_dims;
    for (uint32_t i = 0; i < n_dims && i < 4; i++) row.ne[i] = ne[i];
    mg_pad(&w->data, w->alignment);
    row.at = w->data.n;
    row.n = n;
    if (data) mg_put(&w->data, data, n);
    else for (size_t i = 0; i < n; i++) mg_put(&w->data, "", 1);
    mg_put(&w->rows, &row, sizeof row);
}

/* Append the file to out and release the writer. *data_start (may be NULL): offset of the tensor data. */
MG_FN void mg_finish_at(mg_gguf *w, mg_buf *out, size_t *data_start) {
    size_t n_rows = w->rows.n / sizeof(mg_row);
    mg_put(out, "GGUF", 4);
    mg_put_u32(out, w->version);
    mg_put_u64(out, n_rows);
    mg_put_u64(out, w->n_kv);
    mg_put(out, w->kv.data, w->kv.n);
    for (size_t i = 0; i < n_rows; i++) {
        mg_row row;
        memcpy(&row, w->rows.data + i * sizeof row, sizeof row);
        mg_put_text(out, row.name, strlen(row.name));
        mg_put_u32(out, row.n_dims);
        for (uint32_t d = 0; d < row.n_dims && d < 4; d++) mg_put_u64(out, row.ne[d]);
        mg_put_u32(out, row.type);
        mg_put_u64(out, row.at);
    }
    if (n_rows) mg_pad(out, w->alignment);
    if (data_start) *data_start = out->n;
    mg_put(out, w->data.data, w->data.n);
    if (n_rows) mg_pad(out, w->alignment);
    mg_free(&w->kv);
    mg_free(&w->rows);
    mg_free(&w->data);
}
MG_FN void mg_finish(mg_gguf *w, mg_buf *out) { mg_finish_at(w, out, NULL); }

/* ---- deterministic values ---- */

typedef struct mg_rng {
    uint64_t state;
} mg_rng;

MG_FN uint64_t mg_next(mg_rng *r) { /* splitmix64 */
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
MG_FN uint32_t mg_below(mg_rng *r, uint32_t n) { return (uint32_t)((mg_next(r) >> 32) * n >> 32); }
/* ids of a vocabulary, the same for the same seed */
MG_FN void mg_tokens(int32_t *tokens, uint32_t n, uint32_t n_vocab, uint64_t seed) {
    mg_rng r = {seed};
    for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)mg_below(&r, n_vocab);
}
/* uniform in [-1, 1) */
MG_FN float mg_uniform(mg_rng *r) { return (float)(int32_t)(mg_next(r) >> 40) / 8388608.0f - 1.0f; }

/* float32 to binary16, round to nearest even */
MG_FN uint16_t mg_f16(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = u >> 16 & 0x8000u, mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (mag >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more round to infinity */
    if (mag < 0x38800000u) {                                    /* below 2^-14: a multiple of 2^-24 */
        float scaled;
        memcpy(&scaled, &mag, sizeof scaled);
        return (uint16_t)(sign | (uint32_t)lrintf(scaled * 16777216.0f));
    }
    mag += 0xfffu + (mag >> 13 & 1u);
    return (uint16_t)(sign | ((mag - 0x38000000u) >> 13));
}
MG_FN uint16_t mg_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* elements and bytes of a block of the types above */
MG_FN void mg_block(uint32_t type, uint32_t *elements, uint32_t *bytes) {
    static const uint32_t table[][3] = {{MG_F32, 1, 4},     {MG_F16, 1, 2},     {MG_BF16, 1, 2},    {MG_Q4_0, 32, 18},
                                        {MG_Q4_1, 32, 20},  {MG_Q5_0, 32, 22},  {MG_Q5_1, 32, 24},  {MG_Q8_0, 32, 34},
                                        {MG_Q4_K, 256, 144}, {MG_Q5_K, 256, 176}, {MG_Q6_K, 256, 210},
                                        {MG_Q2_K, 256, 84}, {MG_Q3_K, 256, 110}, {MG_IQ2_XXS, 256, 66},
                                        {MG_IQ2_XS, 256, 74}, {MG_IQ3_XXS, 256, 98}, {MG_IQ1_S, 256, 50},
                                        {MG_IQ4_NL, 32, 18}, {MG_IQ3_S, 256, 110}, {MG_IQ2_S, 256, 82},
                                        {MG_IQ4_XS, 256, 136}, {MG_IQ1_M, 256, 56}, {MG_TQ1_0, 256, 54},
                                        {MG_TQ2_0, 256, 66}, {MG_MXFP4, 32, 17}, {MG_NVFP4, 64, 36},
                                        {MG_Q1_0, 128, 18}, {MG_Q2_0, 64, 18}};
    *elements = *bytes = 0;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i][0] == type) *elements = table[i][1], *bytes = table[i][2];
}

MG_FN void mg_put_random(mg_buf *b, mg_rng *r, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)(mg_next(r) >> 56);
        mg_put(b, &c, 1);
    }
}

/* A block of random bytes, then its scale d: in half precision at a certain byte, or in a form of its own. */
MG_FN void mg_put_random_block(mg_buf *b, mg_rng *r, uint32_t type, float v) {
    static const struct { uint32_t type, at; float deviation; } table[] = {
        {MG_Q2_K, 80, 13.9f},    {MG_Q3_K, 108, 43.4f},  {MG_IQ2_XXS, 0, 53.4f}, {MG_IQ2_XS, 0, 56.0f},
        {MG_IQ3_XXS, 0, 142.7f}, {MG_IQ1_S, 0, 7.2f},    {MG_IQ4_NL, 0, 67.5f},  {MG_IQ3_S, 0, 140.2f},
        {MG_IQ2_S, 0, 56.5f},    {MG_IQ4_XS, 0, 1244.f}, {MG_IQ1_M, 48, 7.2f},   {MG_TQ1_0, 52, 0.82f},
        {MG_TQ2_0, 64, 1.22f},   {MG_MXFP4, 0, 2.93f},   {MG_NVFP4, 0, 2.93f},   {MG_Q1_0, 0, 1.0f},
        {MG_Q2_0, 0, 1.22f}};
    uint32_t elements, bytes, i = 0;
    while (i < sizeof table / sizeof table[0] - 1 && table[i].type != type) i++;
    mg_block(type, &elements, &bytes);
    if (!bytes || table[i].type != type) fprintf(stderr, "make_gguf.h: no type %u\n", type), exit(99);
    mg_put_random(b, r, bytes);
    unsigned char *block = b->data + b->n - bytes;
    const float d = v / table[i].deviation, dmin = 1.5f * d; /* Q2_K: 7.5 * dmin = 7.5 * 1.5 * d */
    const uint16_t half[2] = {mg_f16(d), mg_f16(dmin)};
    int e;
    (void)frexpf(d, &e); /* d = fraction * 2^e, from 0.5 on */
    if (type == MG_MXFP4) block[0] = (unsigned char)(e + 126); /* 127 is 1 */
    else if (type == MG_NVFP4) /* 4 bits of exponent, 7 for 1, and 3 random bits behind; below: 1 to 4 times 1 / 512 */
        for (int k = 0; k < 4; k++)
            block[k] = (unsigned char)(e < -5 ? 1 + (block[k] & 3) : (e + 6) << 3 | (block[k] & 7));
    else if (type == MG_IQ1_M)
        for (int k = 0; k < 4; k++) block[49 + 2 * k] = (unsigned char)((block[49 + 2 * k] & 15) | (half[0] >> 4 * k & 15) << 4);
    else memcpy(block + table[i].at, half, type == MG_Q2_K ? 4 : 2);
}

/* Append one block of random weights of mean about 0 and deviation about s. The divisors are the deviation of the
 * integers after the scale when their bits are uniform; mins cancel the mean. */
MG_FN void mg_put_block(mg_buf *b, mg_rng *r, uint32_t type, float s) {
    float v = s * (1.0f + 0.3f * mg_uniform(r));
    size_t n = 0; /* random bytes after the scales */
    switch (type) {
    case MG_F32: v = 1.73f * s * mg_uniform(r), mg_put(b, &v, 4); break;
    case MG_F16: mg_put_u16(b, mg_f16(1.73f * s * mg_uniform(r))); break;
    case MG_BF16: mg_put_u16(b, mg_bf16(1.73f * s * mg_uniform(r))); break;
    case MG_Q4_0: mg_put_u16(b, mg_f16(v / 4.6f)), n = 16; break;
    case MG_Q4_1: mg_put_u16(b, mg_f16(v / 4.6f)), mg_put_u16(b, mg_f16(-7.5f * v / 4.6f)), n = 16; break;
    case MG_Q5_0: mg_put_u16(b, mg_f16(v / 9.2f)), n = 20; break;
    case MG_Q5_1: mg_put_u16(b, mg_f16(v / 9.2f)), mg_put_u16(b, mg_f16(-15.5f * v / 9.2f)), n = 20; break;
    case MG_Q8_0: mg_put_u16(b, mg_f16(v / 74.0f)), n = 32; break;
    case MG_Q4_K: mg_put_u16(b, mg_f16(v / 260.0f)), mg_put_u16(b, mg_f16(v / 35.0f)), n = 140; break;
    case MG_Q5_K: mg_put_u16(b, mg_f16(v / 520.0f)), mg_put_u16(b, mg_f16(v / 35.0f)), n = 172; break;
    case MG_Q6_K: mg_put_random(b, r, 208), mg_put_u16(b, mg_f16(v / 1360.0f)); break;
    default: mg_put_random_block(b, r, type, v);
    }
    mg_put_random(b, r, n);
}

/* A random tensor ne={n_in, n_rows} (n_rows 0: a vector). center: added to values of the float types, for norms. */
MG_FN void mg_weight(mg_gguf *w, mg_rng *r, const char *name, uint32_t type, uint64_t n_in, uint64_t n_rows, float s,
                     float center) {
    uint32_t elements, bytes;
    uint64_t ne[2] = {n_in, n_rows}, n = n_in * (n_rows ? n_rows : 1);
    mg_buf b = {0};
    mg_block(type, &elements, &bytes);
    if (!elements || n_in % elements)
        fprintf(stderr, "make_gguf.h: %s: %u is no row of type %u\n", name, (unsigned)n_in, type), exit(99);
    for (uint64_t i = 0; i < n / elements; i++) {
        if (center == 0) {
            mg_put_block(&b, r, type, s);
        } else {
            float v = center + s * mg_uniform(r);
            if (type == MG_F16) mg_put_u16(&b, mg_f16(v));
            else if (type == MG_BF16) mg_put_u16(&b, mg_bf16(v));
            else mg_put(&b, &v, 4);
        }
    }
    mg_tensor(w, name, type, n_rows ? 2 : 1, ne, b.data, b.n);
    mg_free(&b);
}

/* Matrices of n_experts experts, ne={n_in, n_rows, n_experts}. */
MG_FN void mg_experts(mg_gguf *w, mg_rng *r, const char *name, uint32_t type, uint64_t n_in, uint64_t n_rows,
                      uint64_t n_experts, float s) {
    mg_row row;
    const uint64_t ne[3] = {n_in, n_rows, n_experts};
    size_t at = w->rows.n;
    mg_weight(w, r, name, type, n_in, n_rows * n_experts, s, 0);
    memcpy(&row, w->rows.data + at, sizeof row);
    row.n_dims = 3;
    memcpy(row.ne, ne, sizeof ne);
    memcpy(w->rows.data + at, &row, sizeof row);
}

/* ---- vocabularies ---- */

typedef struct mg_vocab {
    char text[1024][64];
    const char *list[1024];
    float score[1024];
    int32_t type[1024]; /* 1 normal, 2 unknown, 3 control, 5 unused, 6 byte */
    uint32_t n;
} mg_vocab;

MG_FN void mg_token(mg_vocab *v, const char *text, int32_t type) {
    snprintf(v->text[v->n], sizeof v->text[0], "%s", text);
    v->list[v->n] = v->text[v->n];
    v->type[v->n] = type;
    v->score[v->n] = type == 1 ? -(float)v->n : 0.0f;
    v->n++;
}

#define MG_SPACE "\xe2\x96\x81" /* SPM's mark for a space, U+2581 */

/* 0 <unk>, 1 <s>, 2 </s>, 3..258 bytes, 259 the space mark, then pieces: a piece of lower id has the better score and
 * is merged first. " the" is 264, "hello" needs he, ll, hell, hello. Letters a-z follow, then unused ones. */
MG_FN void mg_spm_vocab(mg_vocab *v, uint32_t n_vocab) {
    static const char *const pieces[] = {
        "he", "ll", "th", "in", MG_SPACE "the", MG_SPACE "t", "er", "an", MG_SPACE "a", MG_SPACE "w", "or", "ld",
        "hell", "hello", MG_SPACE "hello", "orld", MG_SPACE "world", MG_SPACE "th", "\xc3\xa9", ".", ",", "!", "A",
        "B"};
    memset(v, 0, sizeof *v);
    mg_token(v, "<unk>", 2);
    mg_token(v, "<s>", 3);
    mg_token(v, "</s>", 3);
    for (int b = 0; b < 256; b++) {
        char t[8];
        snprintf(t, sizeof t, "<0x%02X>", (unsigned)b);
        mg_token(v, t, 6);
    }
    mg_token(v, MG_SPACE, 1);
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) mg_token(v, pieces[i], 1);
    for (char c = 'a'; c <= 'z'; c++) {
        char t[2] = {c, 0};
        mg_token(v, t, 1);
    }
    while (v->n < n_vocab && v->n < 1024) {
        char t[24];
        snprintf(t, sizeof t, "<unused%u>", v->n);
        mg_token(v, t, 5);
    }
}

/* GPT-2's printable stand-in for a byte, as UTF-8: bytes 33-126, 161-172, 174-255 stand for themselves, the n-th of
 * the others is U+0100 + n. */
MG_FN void mg_byte_char(unsigned b, char *out) {
    unsigned c = 0;
#define MG_PLAIN(x) (((x) >= 33 && (x) <= 126) || ((x) >= 161 && (x) <= 172) || ((x) >= 174 && (x) <= 255))
    if (MG_PLAIN(b)) {
        c = b;
    } else {
        for (unsigned i = 0; i < b; i++) c += !MG_PLAIN(i);
        c += 256;
    }
#undef MG_PLAIN
    if (c < 128) out[0] = (char)c, out[1] = 0;
    else out[0] = (char)(0xc0 | c >> 6), out[1] = (char)(0x80 | (c & 63)), out[2] = 0;
}

/* "\xc4\xa0" is the stand-in of the space. Merges in the order of rank. */
static const char *const mg_merges[] = {
    "h e", "l l", "t h", "i n", "\xc4\xa0 t", "e r", "a n", "he ll", "hell o", "\xc4\xa0t he", "\xc4\xa0 w", "o r",
    "l d", "\xc4\xa0w or", "\xc4\xa0wor ld", "\xc4\xa0 a", "\xc4\xa0 hello", "' s", "1 2"};

/* 0..255 the bytes (id = byte), then the merges, <|endoftext|>, <|im_start|>, <|im_end|>, then unused ones. */
MG_FN void mg_bpe_vocab(mg_vocab *v, uint32_t n_vocab) {
    memset(v, 0, sizeof *v);
    for (unsigned b = 0; b < 256; b++) {
        char t[4];
        mg_byte_char(b, t);
        mg_token(v, t, 1);
    }
    for (size_t i = 0; i < sizeof mg_merges / sizeof mg_merges[0]; i++) {
        const char *gap = strchr(mg_merges[i], ' ');
        char t[64];
        snprintf(t, sizeof t, "%.*s%s", (int)(gap - mg_merges[i]), mg_merges[i], gap + 1);
        mg_token(v, t, 1);
    }
    mg_token(v, "<|endoftext|>", 3);
    mg_token(v, "<|im_start|>", 3);
    mg_token(v, "<|im_end|>", 3);
    while (v->n < n_vocab && v->n < 1024) {
        char t[24];
        snprintf(t, sizeof t, "<|unused%u|>", v->n);
        mg_token(v, t, 5);
    }
}

/* The keys tokenizer.ggml.* of one of the two vocabularies. pre: BPE only. */
MG_FN uint32_t mg_put_vocab(mg_gguf *w, int bpe, const char *pre, uint32_t n_vocab) {
    mg_vocab *v = (mg_vocab *)malloc(sizeof *v);
    if (!v) fprintf(stderr, "make_gguf.h: out of memory\n"), exit(99);
    if (bpe) mg_bpe_vocab(v, n_vocab);
    else mg_spm_vocab(v, n_vocab);
    uint32_t n = v->n, end = 256 + (uint32_t)(sizeof mg_merges / sizeof mg_merges[0]);
    mg_kv_str(w, "tokenizer.ggml.model", bpe ? "gpt2" : "llama");
    mg_kv_str(w, "tokenizer.ggml.pre", bpe ? pre : "default");
    mg_kv_arr_str(w, "tokenizer.ggml.tokens", v->list, n);
    if (!bpe) mg_kv_arr_f32(w, "tokenizer.ggml.scores", v->score, n);
    mg_kv_arr_i32(w, "tokenizer.ggml.token_type", v->type, n);
    if (bpe) mg_kv_arr_str(w, "tokenizer.ggml.merges", mg_merges, sizeof mg_merges / sizeof mg_merges[0]);
    mg_kv_u32(w, "tokenizer.ggml.bos_token_id", bpe ? end : 1);
    mg_kv_u32(w, "tokenizer.ggml.eos_token_id", bpe ? end + 2 : 2);
    if (!bpe) mg_kv_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    mg_kv_bool(w, "tokenizer.ggml.add_bos_token", !bpe);
    mg_kv_bool(w, "tokenizer.ggml.add_eos_token", 0);
    if (!bpe) mg_kv_bool(w, "tokenizer.ggml.add_space_prefix", 1);
    free(v);
    return n;
}

/* ---- a whole model ---- */

/* Zero = defaults: llama, F32, 2 layers, SPM. Sizes of 256 instead of 64/96 when type or mix_type is a K-quant. */
typedef struct mg_options {
    const char *arch;      /* "llama", "qwen2", "qwen3", "gemma2", "gemma3", with experts "qwen3moe",
                              "glm4moe", "granitemoe", "gpt-oss"; NULL = "llama"                        */
    uint32_t type;         /* of all matrices                                                           */
    uint32_t mix_type;     /* with use_mix: of attn_v, ffn_down and output instead; with 2: of ffn_up too */
    int use_mix;
    uint32_t embd_type;    /* with use_embd: of token_embd instead                                      */
    int use_embd;
    uint32_t n_layers;     /* 0 = 2                                                                     */
    uint32_t n_embd;       /* 0 = 64 (256)                                                              */
    uint32_t n_heads;      /* 0 = 4                                                                     */
    uint32_t n_kv_heads;   /* 0 = 2                                                                     */
    uint32_t head_dim;     /* 0 = 16 (64); another than n_embd / n_heads is stated in the file          */
    uint32_t n_ff;         /* 0 = 96 (256)                                                              */
    uint32_t n_vocab;      /* 0 = 320, at least 310                                                     */
    uint32_t n_ctx;        /* 0 = 256                                                                   */
    uint32_t alignment;    /* 0 = 32, not stated                                                        */
    uint32_t version;      /* 0 = 3                                                                     */
    int tied;              /* no output.weight                                                          */
    int bias;              /* attn_q/k/v.bias; always for qwen2                                         */
    int qk_norm;           /* attn_q/k_norm; always for qwen3                                           */
    int rope_freqs;        /* rope_freqs.weight                                                         */
    int bpe;               /* vocabulary                                                                */
    int no_vocab;          /* no tokenizer keys; vocab_size is stated                                   */
    const char *pre;       /* BPE pre-tokenizer; NULL = "llama-bpe", or "qwen2" for qwen2/qwen3         */
    const char *chat_template; /* NULL = none                                                           */
    uint64_t seed;
    uint32_t vector_type;  /* of norms, biases and rope_freqs: MG_F32, MG_F16, MG_BF16                  */
    int fused_qkv;         /* attn_qkv instead of attn_q/k/v, its bias too                              */
    int bias_out;          /* attn_output.bias                                                          */
    int bias_ffn;          /* ffn_gate/up/down.bias                                                     */
    int bias_logits;       /* output.bias                                                               */
    uint32_t head_dim_v;   /* 0 = head_dim                                                              */
    uint32_t n_rot;        /* rope.dimension_count; 0 = not stated                                      */
    float eps;             /* 0 = 1e-5                                                                  */
    float rope_base;       /* 0 = 10000                                                                 */
    const char *rope_scaling; /* rope.scaling.type: "linear", "yarn", "none"; NULL = not stated         */
    float rope_factor;     /* rope.scaling.factor; 0 = not stated                                       */
    float rope_scale_linear;  /* its old name; 0 = not stated                                           */
    uint32_t n_ctx_original;  /* rope.scaling.original_context_length; 0 = not stated                   */
    float yarn_log_multiplier; /* rope.scaling.yarn_log_multiplier; 0 = not stated                      */
    const uint32_t *layer_heads, *layer_kv_heads, *layer_ff; /* [n_layers] instead of the one number, or NULL */
    void (*more_kv)(mg_gguf *w); /* appends further keys; NULL = none                                   */
    /* experts, for architectures that have them; 0: the key is not stated, unless something else is said */
    uint32_t n_experts;    /* 0 = no experts: no such keys and tensors                                  */
    uint32_t n_used;       /* 0 = 2                                                                     */
    uint32_t n_ff_expert;  /* 0 = 32 (256)                                                              */
    uint32_t n_shared;     /* expert_shared_count                                                       */
    uint32_t n_ff_shared;  /* expert_shared_feed_forward_length                                         */
    uint32_t n_dense;      /* leading_dense_block_count                                                 */
    uint32_t n_next;       /* nextn_predict_layers: the last layers of n_layers                         */
    uint32_t gating;       /* expert_gating_func                                                        */
    int expert_norm;       /* expert_weights_norm; -1 = stated to be false                              */
    float expert_scale;    /* expert_weights_scale                                                      */
    int bias_router;       /* ffn_gate_inp.bias                                                         */
    int bias_experts;      /* ffn_gate/up/down_exps.bias                                                */
    int bias_choice;       /* exp_probs_b.bias                                                          */
    int post_norm;         /* the feed-forward norm is post_attention_norm; 2: the results of attention and
                              feed-forward are normed, by post_attention_norm and post_ffw_norm; always for gemma */
    int sinks;             /* attn_sinks.weight                                                         */
    uint32_t window;       /* attention.sliding_window; 0 = not stated                                  */
    float scale_attention, scale_embedding, scale_residual, scale_logits; /* attention.scale, embedding_scale,
                              residual_scale, logit_scale; 0 = not stated                               */
} mg_options;

/* The feed-forward part of a layer with experts. */
MG_FN void mg_moe(mg_gguf *w, mg_rng *r, const mg_options *o, uint32_t il) {
    static const char *const mats[3] = {"gate", "up", "down"};
    uint32_t shared = o->n_ff_shared ? o->n_ff_shared : o->n_shared * o->n_ff_expert;
    char name[64];
    for (int i = 0; i < 3; i++) {
        uint32_t n_in = i < 2 ? o->n_embd : o->n_ff_expert, n_out = i < 2 ? o->n_ff_expert : o->n_embd;
        snprintf(name, sizeof name, "blk.%u.ffn_%s_exps.weight", il, mats[i]);
        mg_experts(w, r, name, i == 2 && o->use_mix ? o->mix_type : o->type, n_in, n_out, o->n_experts,
                   1.0f / sqrtf((float)n_in));
        snprintf(name, sizeof name, "blk.%u.ffn_%s_exps.bias", il, mats[i]);
        if (o->bias_experts) mg_weight(w, r, name, o->vector_type, n_out, o->n_experts, 0.1f, 0);
        snprintf(name, sizeof name, "blk.%u.ffn_%s_shexp.weight", il, mats[i]);
        if (shared)
            mg_weight(w, r, name, o->type, i < 2 ? o->n_embd : shared, i < 2 ? shared : o->n_embd,
                      1.0f / sqrtf((float)(i < 2 ? o->n_embd : shared)), 0);
    }
    snprintf(name, sizeof name, "blk.%u.ffn_gate_inp.weight", il);
    mg_weight(w, r, name, MG_F32, o->n_embd, o->n_experts, 2.0f / sqrtf((float)o->n_embd), 0);
    snprintf(name, sizeof name, "blk.%u.ffn_gate_inp.bias", il);
    if (o->bias_router) mg_weight(w, r, name, o->vector_type, o->n_experts, 0, 0.5f, 0);
    snprintf(name, sizeof name, "blk.%u.exp_probs_b.bias", il);
    if (o->bias_choice) mg_weight(w, r, name, o->vector_type, o->n_experts, 0, 0.3f, 0);
}

MG_FN void mg_layer(mg_gguf *w, mg_rng *r, const mg_options *o, uint32_t il) {
    char name[64];
    uint32_t n_heads = o->layer_heads ? o->layer_heads[il] : o->n_heads;
    uint32_t n_kv_heads = o->layer_kv_heads ? o->layer_kv_heads[il] : o->n_kv_heads;
    uint32_t n_ff = o->layer_ff ? o->layer_ff[il] : o->n_ff, vec = o->vector_type;
    uint64_t n_q = (uint64_t)n_heads * o->head_dim, n_k = (uint64_t)n_kv_heads * o->head_dim;
    uint64_t n_v = (uint64_t)n_kv_heads * o->head_dim_v, n_a = (uint64_t)n_heads * o->head_dim_v;
    uint32_t mix = o->use_mix ? o->mix_type : o->type;
    float s = 1.0f / sqrtf((float)o->n_embd), s_a = 1.0f / sqrtf((float)n_a), s_ff = 1.0f / sqrtf((float)n_ff);
#define MG_ADD(suffix, type, n_in, n_rows, dev, center) \
    (snprintf(name, sizeof name, "blk.%u." suffix, il), mg_weight(w, r, name, type, n_in, n_rows, dev, center))
    MG_ADD("attn_norm.weight", vec, o->n_embd, 0, 0.1f, 1.0f);
    if (o->fused_qkv) {
        MG_ADD("attn_qkv.weight", o->type, o->n_embd, n_q + n_k + n_v, s, 0);
        if (o->bias) MG_ADD("attn_qkv.bias", vec, n_q + n_k + n_v, 0, 0.1f, 0);
    } else {
        MG_ADD("attn_q.weight", o->type, o->n_embd, n_q, s, 0);
        MG_ADD("attn_k.weight", o->type, o->n_embd, n_k, s, 0);
        MG_ADD("attn_v.weight", mix, o->n_embd, n_v, s, 0);
    }
    if (o->bias && !o->fused_qkv) {
        MG_ADD("attn_q.bias", vec, n_q, 0, 0.1f, 0);
        MG_ADD("attn_k.bias", vec, n_k, 0, 0.1f, 0);
        MG_ADD("attn_v.bias", vec, n_v, 0, 0.1f, 0);
    }
    if (o->qk_norm) {
        MG_ADD("attn_q_norm.weight", vec, o->head_dim, 0, 0.1f, 1.0f);
        MG_ADD("attn_k_norm.weight", vec, o->head_dim, 0, 0.1f, 1.0f);
    }
    MG_ADD("attn_output.weight", o->type, n_a, o->n_embd, s_a, 0);
    if (o->sinks) MG_ADD("attn_sinks.weight", vec, n_heads, 0, 1.0f, 0);
    if (o->post_norm) MG_ADD("post_attention_norm.weight", vec, o->n_embd, 0, 0.1f, 1.0f);
    if (o->post_norm != 1) MG_ADD("ffn_norm.weight", vec, o->n_embd, 0, 0.1f, 1.0f);
    if (o->post_norm == 2) MG_ADD("post_ffw_norm.weight", vec, o->n_embd, 0, 0.1f, 1.0f);
    if (o->bias_out) MG_ADD("attn_output.bias", vec, o->n_embd, 0, 0.1f, 0);
    if (o->n_experts && il >= o->n_dense) {
        mg_moe(w, r, o, il);
        return;
    }
    MG_ADD("ffn_gate.weight", o->type, o->n_embd, n_ff, s, 0);
    MG_ADD("ffn_up.weight", o->use_mix == 2 ? mix : o->type, o->n_embd, n_ff, s, 0);
    MG_ADD("ffn_down.weight", mix, n_ff, o->n_embd, s_ff, 0);
    if (o->bias_ffn) {
        MG_ADD("ffn_gate.bias", vec, n_ff, 0, 0.1f, 0);
        MG_ADD("ffn_up.bias", vec, n_ff, 0, 0.1f, 0);
        MG_ADD("ffn_down.bias", vec, o->n_embd, 0, 0.1f, 0);
    }
#undef MG_ADD
}

MG_FN void mg_hparams(mg_gguf *w, const mg_options *o) {
    char key[96];
#define MG_KEY(suffix) (snprintf(key, sizeof key, "%s." suffix, o->arch), key)
    mg_kv_str(w, "general.architecture", o->arch);
    mg_kv_str(w, "general.name", "tiny test model");
    if (o->alignment) mg_align(w, o->alignment);
    mg_kv_u32(w, MG_KEY("block_count"), o->n_layers);
    mg_kv_u32(w, MG_KEY("context_length"), o->n_ctx);
    mg_kv_u32(w, MG_KEY("embedding_length"), o->n_embd);
    if (o->layer_ff) mg_kv_arr_u32(w, MG_KEY("feed_forward_length"), o->layer_ff, o->n_layers);
    else mg_kv_u32(w, MG_KEY("feed_forward_length"), o->n_ff);
    if (o->layer_heads) mg_kv_arr_u32(w, MG_KEY("attention.head_count"), o->layer_heads, o->n_layers);
    else mg_kv_u32(w, MG_KEY("attention.head_count"), o->n_heads);
    if (o->layer_kv_heads) mg_kv_arr_u32(w, MG_KEY("attention.head_count_kv"), o->layer_kv_heads, o->n_layers);
    else mg_kv_u32(w, MG_KEY("attention.head_count_kv"), o->n_kv_heads);
    mg_kv_f32(w, MG_KEY("attention.layer_norm_rms_epsilon"), o->eps);
    mg_kv_f32(w, MG_KEY("rope.freq_base"), o->rope_base);
    if (o->head_dim * o->n_heads != o->n_embd || o->head_dim_v != o->head_dim || o->layer_heads) {
        mg_kv_u32(w, MG_KEY("attention.key_length"), o->head_dim);
        mg_kv_u32(w, MG_KEY("attention.value_length"), o->head_dim_v);
    }
    if (o->n_rot) mg_kv_u32(w, MG_KEY("rope.dimension_count"), o->n_rot);
    if (o->rope_scaling) mg_kv_str(w, MG_KEY("rope.scaling.type"), o->rope_scaling);
    if (o->rope_factor != 0) mg_kv_f32(w, MG_KEY("rope.scaling.factor"), o->rope_factor);
    if (o->rope_scale_linear != 0) mg_kv_f32(w, MG_KEY("rope.scale_linear"), o->rope_scale_linear);
    if (o->n_ctx_original) mg_kv_u32(w, MG_KEY("rope.scaling.original_context_length"), o->n_ctx_original);
    if (o->yarn_log_multiplier != 0) mg_kv_f32(w, MG_KEY("rope.scaling.yarn_log_multiplier"), o->yarn_log_multiplier);
    if (o->no_vocab) mg_kv_u32(w, MG_KEY("vocab_size"), o->n_vocab);
    if (o->window) mg_kv_u32(w, MG_KEY("attention.sliding_window"), o->window);
    if (o->scale_attention != 0) mg_kv_f32(w, MG_KEY("attention.scale"), o->scale_attention);
    if (o->scale_embedding != 0) mg_kv_f32(w, MG_KEY("embedding_scale"), o->scale_embedding);
    if (o->scale_residual != 0) mg_kv_f32(w, MG_KEY("residual_scale"), o->scale_residual);
    if (o->scale_logits != 0) mg_kv_f32(w, MG_KEY("logit_scale"), o->scale_logits);
    if (o->n_experts) {
        mg_kv_u32(w, MG_KEY("expert_count"), o->n_experts);
        mg_kv_u32(w, MG_KEY("expert_used_count"), o->n_used);
        mg_kv_u32(w, MG_KEY("expert_feed_forward_length"), o->n_ff_expert);
        if (o->n_shared) mg_kv_u32(w, MG_KEY("expert_shared_count"), o->n_shared);
        if (o->n_ff_shared) mg_kv_u32(w, MG_KEY("expert_shared_feed_forward_length"), o->n_ff_shared);
        if (o->n_dense) mg_kv_u32(w, MG_KEY("leading_dense_block_count"), o->n_dense);
        if (o->n_next) mg_kv_u32(w, MG_KEY("nextn_predict_layers"), o->n_next);
        if (o->gating) mg_kv_u32(w, MG_KEY("expert_gating_func"), o->gating);
        if (o->expert_norm) mg_kv_bool(w, MG_KEY("expert_weights_norm"), o->expert_norm > 0);
        if (o->expert_scale != 0) mg_kv_f32(w, MG_KEY("expert_weights_scale"), o->expert_scale);
    }
#undef MG_KEY
    if (o->more_kv) o->more_kv(w);
    if (o->chat_template) mg_kv_str(w, "tokenizer.chat_template", o->chat_template);
}

/* Fill in the defaults, as mg_llama does. */
MG_FN mg_options mg_defaults(const mg_options *options) {
    mg_options o = *options;
    uint32_t elements = 1, mix = 1, bytes;
    mg_block(o.type, &elements, &bytes);
    if (o.use_mix) mg_block(o.mix_type, &mix, &bytes);
    int big = elements > 32 || mix > 32;
    if (!o.arch) o.arch = "llama";
    int qwen = strncmp(o.arch, "qwen", 4) == 0;
    if (strcmp(o.arch, "qwen2") == 0) o.bias = 1;
    if (strncmp(o.arch, "qwen3", 5) == 0) o.qk_norm = 1;
    if (strncmp(o.arch, "gemma", 5) == 0) o.post_norm = 2;
    if (strcmp(o.arch, "gemma3") == 0) o.qk_norm = 1;
    if (strcmp(o.arch, "glm4moe") == 0) o.bias = o.post_norm = 1;
    if (strcmp(o.arch, "gpt-oss") == 0)
        o.bias = o.bias_out = o.post_norm = o.sinks = o.bias_router = o.bias_experts = 1;
    if (!o.n_layers) o.n_layers = 2;
    if (!o.n_embd) o.n_embd = big ? 256 : 64;
    if (!o.n_heads) o.n_heads = 4;
    if (!o.n_kv_heads) o.n_kv_heads = 2;
    if (!o.head_dim) o.head_dim = big ? 64 : 16;
    if (!o.head_dim_v) o.head_dim_v = o.head_dim;
    if (!o.n_ff) o.n_ff = big ? 256 : 96;
    if (o.n_experts && !o.n_used) o.n_used = 2;
    if (!o.n_ff_expert) o.n_ff_expert = big ? 256 : 32;
    if (o.eps == 0) o.eps = 1e-5f;
    if (o.rope_base == 0) o.rope_base = 10000.0f;
    if (!o.n_vocab) o.n_vocab = 320;
    if (!o.n_ctx) o.n_ctx = 256;
    if (!o.version) o.version = 3;
    if (!o.pre) o.pre = qwen ? "qwen2" : "llama-bpe";
    return o;
}

MG_FN void mg_llama_at(mg_buf *out, const mg_options *options, size_t *data_start) {
    mg_options o = mg_defaults(options);
    mg_rng r = {o.seed + 1};
    mg_gguf w;
    mg_begin(&w, o.version);
    mg_hparams(&w, &o);
    if (!o.no_vocab) o.n_vocab = mg_put_vocab(&w, o.bpe, o.pre, o.n_vocab);
    mg_weight(&w, &r, "token_embd.weight", o.use_embd ? o.embd_type : o.type, o.n_embd, o.n_vocab, 1.0f, 0);
    for (uint32_t il = 0; il < o.n_layers; il++) mg_layer(&w, &r, &o, il);
    mg_weight(&w, &r, "output_norm.weight", o.vector_type, o.n_embd, 0, 0.1f, 1.0f);
    if (!o.tied)
        mg_weight(&w, &r, "output.weight", o.use_mix ? o.mix_type : o.type, o.n_embd, o.n_vocab,
                  1.0f / sqrtf((float)o.n_embd), 0);
    if (o.rope_freqs)
        mg_weight(&w, &r, "rope_freqs.weight", o.vector_type, (o.n_rot ? o.n_rot : o.head_dim) / 2, 0, 1.5f, 2.5f);
    if (o.bias_logits) mg_weight(&w, &r, "output.bias", o.vector_type, o.n_vocab, 0, 0.1f, 0);
    mg_finish_at(&w, out, data_start);
}
/* Append a complete model file to out. */
MG_FN void mg_llama(mg_buf *out, const mg_options *options) { mg_llama_at(out, options, NULL); }

/* ---- a model of another family ---- */

/* What its file holds beside the keys that all have. */
enum { MG_LAYER_NORM = 1, MG_NO_PRE_NORM = 2, MG_POST_NORM = 4, MG_QK_NORM = 8, MG_QK_NORM_WIDE = 16, MG_FUSED_GATE = 32,
       MG_NO_GATE = 64, MG_BIASES = 128, MG_QKV = 256, MG_POSITIONS = 512, MG_NO_FFN_NORM = 1024, MG_NORM_2 = 2048,
       MG_UNTIED = 4096, MG_FACTORS = 8192, MG_LONG_ROPE = 16384 };

typedef struct mg_family {
    const char *arch;
    uint32_t has; /* the bits above              */
    uint32_t type;
    uint32_t n_layers, n_embd, n_ff; /* 0 = 2, 64, 96 */
    uint32_t n_vocab;                /* 0 = a vocabulary of 320; else more_kv writes one */
    uint64_t seed;
    void (*more_kv)(mg_gguf *w);     /* further keys, or NULL */
} mg_family;

static const mg_family *mg_family_now; /* whose keys are being written */
static mg_gguf *mg_family_file;

MG_FN const char *mg_key(const char *suffix) {
    static char key[96];
    snprintf(key, sizeof key, "%s.%s", mg_family_now->arch, suffix);
    return key;
}
MG_FN void mg_real(const char *suffix, float v) { mg_kv_f32(mg_family_file, mg_key(suffix), v); }
MG_FN void mg_uint(const char *suffix, uint32_t v) { mg_kv_u32(mg_family_file, mg_key(suffix), v); }

/* A matrix, its bias and factor; n_rows 0: a norm. */
MG_FN void mg_family_tensor(mg_rng *r, int il, const char *name, uint64_t n_in, uint64_t n_rows) {
    char full[80], base[64];
    const uint32_t has = mg_family_now->has;
    mg_gguf *w = mg_family_file;
    if (il >= 0) snprintf(base, sizeof base, "blk.%d.%s", il, name);
    else snprintf(base, sizeof base, "%s", name);
    snprintf(full, sizeof full, "%s.weight", base);
    if (n_rows) mg_weight(w, r, full, mg_family_now->type, n_in, n_rows, 1 / sqrtf((float)n_in), 0);
    else mg_weight(w, r, full, MG_F32, n_in, 0, 0.1f, 1);
    snprintf(full, sizeof full, "%s.bias", base);
    if (has & MG_BIASES && (n_rows || has & MG_LAYER_NORM)) mg_weight(w, r, full, MG_F32, n_rows ? n_rows : n_in, 0, 0.1f, 0);
    snprintf(full, sizeof full, "%s.scale", base);
    if (has & MG_FACTORS && n_rows) mg_weight(w, r, full, MG_F32, 1, 0, 0.3f, 1);
}

MG_FN void mg_family_layer(mg_rng *r, int il, uint64_t n_embd, uint64_t n_ff) {
    const uint32_t has = mg_family_now->has;
    const uint64_t n_q = n_embd, n_k = n_embd / 2; /* 4 heads on 2 */
    if (!(has & MG_NO_PRE_NORM)) mg_family_tensor(r, il, "attn_norm", n_embd, 0);
    if (has & MG_NORM_2) mg_family_tensor(r, il, "attn_norm_2", n_embd, 0);
    if (has & MG_QKV) {
        mg_family_tensor(r, il, "attn_qkv", n_embd, n_q + 2 * n_k);
    } else {
        mg_family_tensor(r, il, "attn_q", n_embd, n_q);
        mg_family_tensor(r, il, "attn_k", n_embd, n_k);
        mg_family_tensor(r, il, "attn_v", n_embd, n_k);
    }
    if (has & (MG_QK_NORM | MG_QK_NORM_WIDE)) {
        mg_family_tensor(r, il, "attn_q_norm", has & MG_QK_NORM ? n_q / 4 : n_q, 0);
        mg_family_tensor(r, il, "attn_k_norm", has & MG_QK_NORM ? n_k / 2 : n_k, 0);
    }
    mg_family_tensor(r, il, "attn_output", n_q, n_embd);
    if (has & MG_POST_NORM) mg_family_tensor(r, il, "post_attention_norm", n_embd, 0);
    if (!(has & (MG_NO_FFN_NORM | MG_NO_PRE_NORM))) mg_family_tensor(r, il, "ffn_norm", n_embd, 0);
    if (!(has & (MG_NO_GATE | MG_FUSED_GATE))) mg_family_tensor(r, il, "ffn_gate", n_embd, n_ff);
    mg_family_tensor(r, il, "ffn_up", n_embd, has & MG_FUSED_GATE ? 2 * n_ff : n_ff);
    mg_family_tensor(r, il, "ffn_down", n_ff, n_embd);
    if (has & MG_POST_NORM) mg_family_tensor(r, il, "post_ffw_norm", n_embd, 0);
}

/* Append a model of a family to out: 4 heads on 2, a context of 256, or 32 of a small one. */
MG_FN void mg_family_model(mg_buf *out, const mg_family *f) {
    const uint32_t n_layers = f->n_layers ? f->n_layers : 2, n_embd = f->n_embd ? f->n_embd : 64,
                   n_ff = f->n_ff ? f->n_ff : 96, n_vocab = f->n_vocab ? f->n_vocab : 320, n_ctx = f->n_vocab ? 32 : 256;
    mg_rng r = {f->seed + 1};
    mg_gguf w;
    mg_begin(&w, 3);
    mg_family_now = f;
    mg_family_file = &w;
    mg_kv_str(&w, "general.architecture", f->arch);
    mg_uint("block_count", n_layers);
    mg_uint("context_length", n_ctx);
    mg_uint("embedding_length", n_embd);
    mg_uint("feed_forward_length", n_ff);
    mg_uint("attention.head_count", 4);
    mg_uint("attention.head_count_kv", 2);
    mg_real(f->has & MG_LAYER_NORM ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", 1e-5f);
    if (f->more_kv) f->more_kv(&w);
    if (!f->n_vocab) mg_put_vocab(&w, 0, "default", n_vocab);
    mg_weight(&w, &r, "token_embd.weight", f->type, n_embd, n_vocab, f->has & MG_UNTIED ? 1 : 1 / sqrtf((float)n_embd), 0);
    if (f->has & MG_POSITIONS) mg_weight(&w, &r, "position_embd.weight", MG_F32, n_embd, n_ctx, 0.5f, 0);
    for (uint32_t il = 0; il < n_layers; il++) mg_family_layer(&r, (int)il, n_embd, n_ff);
    mg_family_tensor(&r, -1, "output_norm", n_embd, 0);
    if (f->has & MG_UNTIED) mg_family_tensor(&r, -1, "output", n_embd, n_vocab);
    if (f->has & MG_LONG_ROPE) {
        mg_weight(&w, &r, "rope_factors_short.weight", MG_F32, n_embd / 8, 0, 0.3f, 1.5f);
        mg_weight(&w, &r, "rope_factors_long.weight", MG_F32, n_embd / 8, 0, 1.0f, 4.0f);
    }
    mg_finish(&w, out);
}

#endif
