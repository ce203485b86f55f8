/* test_kernels: decoding and the CPU's computing kernels, every instruction set of this machine, against float64 and
 * against decoders written here. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include "rf_test.h"
#include "ref_types.h"

static const uint32_t all_types[] = {RF_TYPE_F32,  RF_TYPE_F16,  RF_TYPE_BF16, RF_TYPE_Q8_0, RF_TYPE_Q4_0, RF_TYPE_Q4_1,
                                     RF_TYPE_Q5_0, RF_TYPE_Q5_1, RF_TYPE_Q4_K, RF_TYPE_Q5_K, RF_TYPE_Q6_K,
                                     RF_TYPE_IQ4_NL, RF_TYPE_NVFP4, RF_TYPE_Q2_K, RF_TYPE_IQ4_XS, RF_TYPE_MXFP4,
                                     RF_TYPE_Q3_K, RF_TYPE_IQ3_XXS, RF_TYPE_IQ3_S, RF_TYPE_IQ2_XXS, RF_TYPE_IQ2_XS,
                                     RF_TYPE_IQ2_S, RF_TYPE_IQ1_S, RF_TYPE_IQ1_M, RF_TYPE_TQ1_0, RF_TYPE_TQ2_0,
                                     RF_TYPE_Q1_0, RF_TYPE_Q2_0};
#define FIRST_EXPANDED 11 /* one of each kind first */
#if defined(EMULATED) /* by an interpreter of instructions: a part of the shapes and rounds */
#define EMULATED_PART 11
#else
#define EMULATED_PART 1
#endif
static const char *const all_isas[] = {"scalar", "avx2", "avxvnni", "avx512", "neon", "i8mm"};

/* ---- random numbers and buffers that end where the data ends, so that the address sanitizer sees a byte too far ---- */

static uint64_t rng_state = 1;
static uint32_t rnd(void) {
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = rng_state ^ (rng_state >> 33);
    return (uint32_t)((x * 0xff51afd7ed558ccdu) >> 32);
}
static double rnd_unit(void) { return ((double)rnd() + 0.5) / 4294967296.0; }
/* One of so many normal numbers: to make each anew took half of the suite's time. */
static float rnd_normal(void) {
    static float made[1 << 14];
    const uint32_t i = rnd() % RFI_COUNT(made);
    while (made[i] == 0) {
        const double u = rnd_unit(), v = rnd_unit();
        made[i] = (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
    }
    return made[i];
}
static void *get(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) abort();
    return p;
}

/* ---- blocks ---- */

/* Where the scale of a type is that is a half precision number, and the second one after it. */
static uint32_t scale_at(uint32_t type) {
    return type == RF_TYPE_Q6_K || type == RF_TYPE_Q3_K ? rf_type_get(type).block_bytes - 2
           : type == RF_TYPE_Q2_K                       ? 80
           : type == RF_TYPE_TQ1_0                      ? 52
           : type == RF_TYPE_TQ2_0                      ? 64
                                                        : 0;
}
static int half_scales(uint32_t type) { /* how many such there are */
    if (type == RF_TYPE_MXFP4 || type == RF_TYPE_NVFP4 || type == RF_TYPE_IQ1_M) return 0;
    return type == RF_TYPE_Q2_K || type == RF_TYPE_Q4_1 || type == RF_TYPE_Q5_1 || type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K ? 2
                                                                                                                               : 1;
}

/* n values from the start of a block on. */
static void decode(uint32_t type, const uint8_t *raw, uint64_t n, double *out) {
    const rf_type_info t = rf_type_get(type);
    for (uint64_t i = 0; i < n; i += t.block_elements, raw += t.block_bytes) decode_block(type, raw, out + i);
}

/* Random blocks whose weights are of moderate size: random bytes, then halves of the order `size` in the scales. */
static void put_half(uint8_t *p, float v) { uint16_t h = rfi_f32_to_f16(v); memcpy(p, &h, 2); }
static void fill_rows(uint32_t type, uint8_t *p, uint32_t n_rows, uint32_t n_in, float size) {
    const rf_type_info t = rf_type_get(type);
    const uint64_t n = (uint64_t)n_rows * n_in / t.block_elements;
    for (uint64_t b = 0; b < n; b++, p += t.block_bytes) {
        for (uint32_t i = 0; i < t.block_bytes; i++) p[i] = (uint8_t)(rnd() >> 13);
        float f = size * rnd_normal();
        switch (type) {
        case RF_TYPE_F32: memcpy(p, &f, 4); break;
        case RF_TYPE_F16: put_half(p, f); break;
        case RF_TYPE_BF16: { uint32_t u; memcpy(&u, &f, 4); u >>= 16; memcpy(p, &u, 2); break; }
        case RF_TYPE_Q6_K: put_half(p + 208, f / 1000); break;
        case RF_TYPE_Q4_K: case RF_TYPE_Q5_K: put_half(p, f / 500); put_half(p + 2, size * rnd_normal() / 50); break;
        case RF_TYPE_MXFP4: p[0] = (uint8_t)(125 + rnd() % 4); break;
        case RF_TYPE_NVFP4: for (int i = 0; i < 4; i++) p[i] = (uint8_t)(rnd() % 3 << 7 | (44 + rnd() % 24)); break;
        case RF_TYPE_IQ1_M: p[49] &= 15, p[51] &= 15, p[53] &= 15, p[55] = (uint8_t)(p[55] % 16 | 0x20); break;
        default:
            put_half(p + scale_at(type), f / (type >= RF_TYPE_Q2_K ? 100 : 10));
            if (half_scales(type) == 2) put_half(p + scale_at(type) + 2, size * rnd_normal());
        }
    }
}

/* ---- types and decoding ---- */

static void test_types(void) {
    rf_type_info t = rf_type_get(RF_TYPE_Q4_K);
    CHECK(t.name && !strcmp(t.name, "q4_K") && t.block_elements == 256 && t.block_bytes == 144 && t.runs == 1, "no");
    t = rf_type_get(RF_TYPE_Q8_K);
    CHECK(t.name && !strcmp(t.name, "q8_K") && !t.runs, "no");
    CHECK(!rf_type_get(4).name && !rf_type_get(36).name && !rf_type_get(43).name && !rf_type_get(0xffffffffu).name, "no");
    CHECK(rfi_row_bytes(RF_TYPE_Q6_K, 512) == 420 && rfi_row_bytes(RF_TYPE_F32, 3) == 12, "no");
    CHECK(rfi_row_bytes(RF_TYPE_Q6_K, 257) == 0 && rfi_row_bytes(5, 32) == 0, "no");
    CHECK(rfi_row_bytes(RF_TYPE_F32, UINT64_MAX / 2) == 0, "no");
}

static void test_dequantize_arguments(void) {
    float y[32];
    uint8_t b[18] = {0};
    rf_error err;
    CHECK(rf_dequantize(RF_TYPE_Q4_0, b, 32, y, &err) == RF_OK && err.code == RF_OK, "no");
    CHECK(rf_dequantize(RF_TYPE_Q4_0, b, 31, y, &err) == RF_ERR_ARGUMENT && err.code == RF_ERR_ARGUMENT && err.text[0], "no");
    CHECK(rf_dequantize(RF_TYPE_Q4_0, NULL, 32, y, NULL) == RF_ERR_ARGUMENT, "no");
    CHECK(rf_dequantize(RF_TYPE_Q4_0, b, 32, NULL, NULL) == RF_ERR_ARGUMENT, "no");
    CHECK(rf_dequantize(RF_TYPE_Q4_0, NULL, 0, NULL, &err) == RF_OK && err.code == RF_OK, "no");
    CHECK(rf_dequantize(RF_TYPE_Q8_K, b, 256, y, &err) == RF_ERR_UNSUPPORTED && strstr(err.text, "q8_K"), "no");
    CHECK(rf_dequantize(4, b, 32, y, &err) == RF_ERR_UNSUPPORTED, "no");
    CHECK(rf_dequantize(0xffffffffu, b, 32, y, &err) == RF_ERR_UNSUPPORTED, "no");
}

/* Any bytes, at an odd address: scales may be anything but inf and nan, whose bits are not promised. */
static void test_dequantize_random(void) {
    for (size_t k = 0; k < RFI_COUNT(all_types); k++) {
        const uint32_t type = all_types[k];
        const rf_type_info t = rf_type_get(type);
        const uint32_t n_blocks = 512 * 32 / t.block_elements + 3;
        const size_t n = (size_t)n_blocks * t.block_elements;
        uint8_t *raw = get((size_t)n_blocks * t.block_bytes + 1), *src = raw + 1;
        float *y = get(n * sizeof *y);
        double *exact = get(n * sizeof *exact); /* float32 rounds it once, Q6_K and mins twice */
        for (size_t i = 0; i < (size_t)n_blocks * t.block_bytes; i++) src[i] = (uint8_t)(rnd() >> 11);
        decode(type, src, n, exact);
        CHECK(rf_dequantize(type, src, n, y, NULL) == RF_OK, "no");
        uint32_t bad = 0, finite = 0;
        for (uint32_t i = 0; i < n; i++) {
            const double want = exact[i];
            if (!isfinite(want)) {
                bad += isfinite(y[i]) != 0;
                continue;
            }
            finite++;
            const float once = (float)want;
            const double slack = type == RF_TYPE_Q6_K ? 1.2e-7 * fabs(want) : 0;
            if (fabs((double)y[i] - want) > fabs((double)once - want) + slack) bad++;
            if (want == 0 && y[i] != 0) bad++;
        }
        CHECK(!bad, "%s: %u of %u wrong", t.name, bad, (unsigned)n);
        CHECK(finite > n / 2, "%s", t.name);
        free(raw), free(y), free(exact);
    }
}

/* Each grid in full, of which test_zoo.sh's packed blocks leave gaps: sorted, a digest of all codes, and their values. */
static void test_grids(void) {
    static const uint8_t of_iq2[] = {8, 25, 43, 0}, of_iq1[] = {1, 9, 17, 0}, of_iq3_xxs[] = {4, 12, 20, 28, 36, 44, 52, 62}, of_iq3_s[] = {1, 3, 5, 7, 9, 11, 13, 15};
    static const struct { const uint16_t *codes; uint32_t n, each, bits; uint64_t digest; const uint8_t *value; const void *grid; } lists[] = {
        {grid_iq2_xxs, 256, 8, 2, 0xab05d880babe6823u, of_iq2, rfi_iq2_xxs_grid}, {grid_iq2_xs, 512, 8, 2, 0x6853eeeddb7ea013u, of_iq2, rfi_iq2_xs_grid},
        {grid_iq2_s, 1024, 8, 2, 0x2c1955b62f3d75bdu, of_iq2, rfi_iq2_s_grid},    {grid_iq1, 2048, 8, 2, 0xec28b6368f0c62e0u, of_iq1, rfi_iq1_grid},
        {grid_iq3_xxs, 256, 4, 3, 0xe94d0633d4024cd5u, of_iq3_xxs, rfi_iq3_xxs_grid}, {grid_iq3_s, 512, 4, 3, 0x5d10ecbdf51ec43bu, of_iq3_s, rfi_iq3_s_grid}};
    for (size_t t = 0; t < RFI_COUNT(lists); t++) {
        uint64_t digest = 0xcbf29ce484222325u; /* FNV-1a over the codes */
        uint32_t wrong = 0;
        for (uint32_t i = 0; i < lists[t].n; i++) {
            CHECK(i == 0 || lists[t].codes[i] > lists[t].codes[i - 1], "list %zu is not sorted at %u", t, i);
            const uint64_t group = lists[t].each == 8 ? ((const uint64_t *)lists[t].grid)[i] : ((const uint32_t *)lists[t].grid)[i];
            for (uint32_t d = 0; d < lists[t].each; d++) {
                const uint32_t code = lists[t].codes[i] >> d * lists[t].bits & ((1u << lists[t].bits) - 1);
                digest = (digest ^ code) * 0x100000001b3u;
                wrong += (group >> 8 * d & 255) != lists[t].value[code];
            }
        }
        CHECK(digest == lists[t].digest, "list %zu: digest %llx", t, (unsigned long long)digest);
        CHECK(wrong == 0, "list %zu: %u values wrong", t, (unsigned)wrong);
    }
}

/* ---- half precision ---- */

static void test_f16(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        const double want = half_value((uint16_t)h);
        const float got = rfi_f16_to_f32((uint16_t)h);
        CHECK(isnan(want) ? isnan(got) : (double)got == want && !signbit(got) == !signbit(want), "%04x", h);
        CHECK(isnan(want) ? isnan(rfi_f16_to_f32(rfi_f32_to_f16(got))) : rfi_f32_to_f16(got) == h, "%04x", h);
        /* between this half and the next: below, at and above the middle */
        if ((h & 0x7fff) >= 0x7c00) continue;
        const float next = (h & 0x7fff) == 0x7bff ? (h & 0x8000 ? -65536.0f : 65536.0f) : rfi_f16_to_f32((uint16_t)(h + 1));
        const float middle = (float)(((double)got + (double)next) / 2);
        CHECK(rfi_f32_to_f16(nextafterf(middle, got)) == h, "%04x", h);
        CHECK(rfi_f32_to_f16(nextafterf(middle, next)) == h + 1, "%04x", h);
        CHECK(rfi_f32_to_f16(middle) == (h & 1 ? h + 1 : h), "%04x", h);
    }
    CHECK(rfi_f32_to_f16(1e30f) == 0x7c00 && rfi_f32_to_f16(-INFINITY) == 0xfc00 && rfi_f32_to_f16(1e-30f) == 0, "no");
    CHECK(rfi_f32_to_f16(-1e-44f) == 0x8000, "no");
}

static void test_bf16(void) { /* the upper half of a float32: 8 bits of exponent, 7 of fraction */
    for (uint32_t h = 0; h < 65536; h++) {
        const int e = (int)(h >> 7 & 255), m = (int)(h & 127);
        const double size = e == 0 ? ldexp(m, -133) : e < 255 ? ldexp(128 + m, e - 134) : m ? (double)NAN : (double)INFINITY;
        const float f = rfi_bf16_to_f32((uint16_t)h);
        CHECK(isnan(size) ? isnan(f) : f == (h >> 15 ? -size : size) && !signbit(f) == !(h >> 15), "%04x", h);
    }
}

static void check_store(const rfi_kernels *k) {
    enum { N = 1003 };
    float *x = get(N * sizeof *x);
    uint16_t *y = get(N * sizeof *y);
    for (int round = 0; round < 200 / EMULATED_PART; round++) {
        for (int i = 0; i < N; i++) x[i] = rfi_f32_of_bits(round % 2 ? rnd() : (rnd() & 0x8fffffffu) | 0x30000000u);
        const uint32_t n = round < 50 ? (uint32_t)round : N;
        k->f32_to_f16(y, x, n);
        for (uint32_t i = 0; i < n; i++)
            CHECK(y[i] == rfi_f32_to_f16(x[i]) || isnan(x[i]), "%s %a", k->name, (double)x[i]);
    }
    free(x), free(y);
}

/* ---- the int8 format ---- */

/* The definition in the comment of rfi_q8, with the library's rounding instead of a trick. */
static void want_q8(const float *x, rfi_q8 *o) {
    float top = 0;
    int sum[2] = {0, 0}, bad = 0;
    for (int i = 0; i < 32; i++) {
        if (!isfinite(x[i])) bad = 1;
        if (fabsf(x[i]) > top) top = fabsf(x[i]);
    }
    memset(o, 0, sizeof *o);
    o->d = top / 127.0f;
    if (bad) {
        o->d = o->s = NAN;
        return;
    }
    if (o->d < 0x1p-126f) o->d = 0;
    const volatile float id = o->d > 0 ? 1.0f / o->d : 0;
    for (int i = 0; i < 32; i++) {
        const volatile float v = x[i] * id;
        o->q[i] = (int8_t)lrintf(v);
        sum[i / 16] += o->q[i];
    }
    o->s = o->d * (float)(sum[0] + sum[1]);
    o->b16[0] = -128 * sum[0], o->b16[1] = -128 * sum[1];
    o->s16[0] = o->d * (float)sum[0], o->s16[1] = o->d * (float)sum[1];
    o->b = o->b16[0] + o->b16[1];
}

static void check_quantize(const rfi_kernels *k) {
    enum { GROUPS = 300 };
    const uint64_t n_out = rfi_q8_groups(GROUPS * 32);
    float *x = get(GROUPS * 32 * sizeof *x);
    rfi_q8 *got = get(n_out * sizeof *got);
    for (int g = 0; g < GROUPS; g++) {
        const float size = ldexpf(1, (int)(rnd() % 60) - 30);
        for (int i = 0; i < 32; i++) x[g * 32 + i] = g < 200 ? size * rnd_normal() : rfi_f32_of_bits(rnd());
        float *row = x + g * 32;
        for (int i = 0; i < 32 && g == 0; i++) row[i] = 0;
        for (int i = 0; i < 32 && g == 1; i++) row[i] = -0.0f;
        for (int i = 0; i < 32 && g == 2; i++) row[i] = ldexpf((float)i, -149);
        for (int i = 0; i < 32 && g == 3; i++) row[i] = i == 7 ? FLT_MAX : -1;
        for (int i = 0; i < 32 && g == 4; i++) row[i] = i == 7 ? INFINITY : 1;
        for (int i = 0; i < 32 && g == 5; i++) row[i] = i == 31 ? NAN : 1;
        for (int i = 0; i < 32 && g == 6; i++) row[i] = i == 0 ? 127 : (float)i - 15.5f; /* ties */
        for (int i = 0; i < 32 && g == 7; i++) row[i] = i == 0 ? 0x1.fcp-120f : 0x1p-126f;
        for (int i = 0; i < 32 && g == 8; i++) row[i] = 0x1.fbffffp-120f;
        if (g > 260) row[g % 32] = g % 3 ? -INFINITY : NAN;
    }
    k->quantize(x, GROUPS * 32, got);
    for (int g = 0; g < GROUPS; g++) {
        rfi_q8 want;
        want_q8(x + g * 32, &want);
        const int same = isnan(want.d) ? isnan(got[g].d) && isnan(got[g].s)
                                       : !memcmp(&got[g].d, &want.d, 4) && got[g].s == want.s;
        CHECK(same && !memcmp(got[g].q, want.q, 32), "%s group %d d %a want %a", k->name, g, (double)got[g].d, (double)want.d);
        CHECK(got[g].b == want.b && !memcmp(got[g].b16, want.b16, 8), "%s group %d", k->name, g);
        CHECK(isnan(want.d) ? isnan(got[g].s16[0]) && isnan(got[g].s16[1]) : !memcmp(got[g].s16, want.s16, 8), "%s group %d", k->name, g);
    }
    for (uint64_t g = GROUPS; g < n_out; g++) {
        static const rfi_q8 zero;
        CHECK(!memcmp(got + g, &zero, sizeof zero), "%s pad", k->name);
    }
    free(x), free(got);
}

/* ---- matmul ---- */

typedef struct problem {
    uint32_t type, n_rows, n_in, n_cols;
    uint64_t row_bytes;
    uint8_t *w;
    float *x;
    rfi_q8 *q;
    rfi_acts acts;
} problem;

static problem problem_create(const rfi_kernels *k, uint32_t type, uint32_t n_rows, uint32_t n_in, uint32_t n_cols) {
    problem p = {type, n_rows, n_in, n_cols, rfi_row_bytes(type, n_in), NULL, NULL, NULL, {NULL, 0, NULL, 0}};
    const uint64_t groups = rfi_q8_groups(n_in);
    p.w = get((size_t)(n_rows * p.row_bytes));
    p.x = get((size_t)n_cols * n_in * sizeof(float));
    p.q = get((size_t)(n_cols * groups) * sizeof(rfi_q8));
    fill_rows(type, p.w, n_rows, n_in, 1);
    for (uint64_t i = 0; i < (uint64_t)n_cols * n_in; i++) p.x[i] = rnd_normal();
    if (n_in % 32 == 0)
        for (uint32_t j = 0; j < n_cols; j++) k->quantize(p.x + (uint64_t)j * n_in, n_in, p.q + j * groups);
    p.acts = (rfi_acts){p.x, n_in, p.q, groups};
    return p;
}

static void problem_release(problem *p) { free(p->w), free(p->x), free(p->q); }

static void run(const rfi_kernels *k, const problem *p, uint32_t row, uint32_t n_rows, uint32_t col, uint32_t n_cols,
                float *y, uint64_t y_stride) {
    rfi_acts a = p->acts;
    a.f += col * a.f_stride, a.q += col * a.q_stride;
    const rfi_matmul m = {p->w + row * p->row_bytes, p->row_bytes, n_rows, p->n_in, &a, n_cols, y, y_stride};
    rfi_matmul_run(k, p->type, &m);
}

/* Against float64, then the bits of each way to cut it, then against the scalar kernels' bits if quantized. */
static void check_matmul(const rfi_kernels *k, uint32_t type, uint32_t n_rows, uint32_t n_in, uint32_t n_cols) {
    problem p = problem_create(k, type, n_rows, n_in, n_cols);
    const uint64_t stride = n_rows + 3;
    const size_t n_y = (size_t)(n_cols * stride);
    float *y = get(n_y * sizeof *y), *z = get(n_y * sizeof *z);
    double *row = get(n_in * sizeof *row), *x = get((size_t)n_cols * n_in * sizeof *x);
    const int quantized = type != RF_TYPE_F32 && type != RF_TYPE_F16 && type != RF_TYPE_BF16;
    const char *name = rf_type_get(type).name;
    for (size_t i = 0; i < n_y; i++) y[i] = -77;
    run(k, &p, 0, n_rows, 0, n_cols, y, stride);
    uint32_t bad = 0;
    for (uint32_t j = 0; j < n_cols; j++)
        for (uint32_t l = 0; l < n_in; l++) {
            const rfi_q8 *g = p.q + j * p.acts.q_stride + l / 32;
            x[(size_t)j * n_in + l] = quantized ? (double)g->d * g->q[l % 32] : (double)p.x[(uint64_t)j * n_in + l];
        }
    for (uint32_t i = 0; i < n_rows; i++) {
        decode(type, p.w + i * p.row_bytes, n_in, row);
        for (uint32_t j = 0; j < n_cols; j++) {
            double sum = 0, size = 0;
            for (uint32_t l = 0; l < n_in; l++) {
                const double product = row[l] * x[(size_t)j * n_in + l];
                sum += product;
                size += fabs(product);
            }
            if (!(fabs((double)y[j * stride + i] - sum) <= 1e-5 * size)) bad++;
        }
    }
    CHECK(!bad, "%s %s %u x %u x %u: %u wrong", k->name, name, n_rows, n_in, n_cols, bad);
    for (uint32_t j = 0; j < n_cols; j++)
        for (uint64_t i = n_rows; i < stride; i++) CHECK(y[j * stride + i] == -77, "%s %s wrote too far", k->name, name);

    for (int way = 0; way < 4; way++) {
        for (size_t i = 0; i < n_y; i++) z[i] = -77;
        if (way == 0) for (uint32_t j = 0; j < n_cols; j++) run(k, &p, 0, n_rows, j, 1, z + j * stride, stride);
        if (way == 1) for (uint32_t i = 0; i < n_rows; i++) run(k, &p, i, 1, 0, n_cols, z + i, stride);
        if (way == 2)
            for (uint32_t i = 0, n; i < n_rows; i += n)
                n = 1 + rnd() % (n_rows - i), run(k, &p, i, n, 0, n_cols, z + i, stride);
        if (way == 3)
            for (uint32_t j = 0, n; j < n_cols; j += n)
                n = 1 + rnd() % (n_cols - j), run(k, &p, 0, n_rows, j, n, z + j * stride, stride);
        CHECK(!memcmp(y, z, n_y * sizeof *y), "%s %s %u x %u x %u: other bits, way %d", k->name, name, n_rows, n_in, n_cols, way);
    }
    if (quantized) {
        for (size_t i = 0; i < n_y; i++) z[i] = -77;
        run(rfi_kernels_find("scalar"), &p, 0, n_rows, 0, n_cols, z, stride);
        CHECK(!memcmp(y, z, n_y * sizeof *y), "%s %s %u x %u x %u: not the scalar bits", k->name, name, n_rows, n_in, n_cols);
    }
    problem_release(&p);
    free(y), free(z), free(row), free(x);
}

static void check_matmuls(const rfi_kernels *k) {
    static const uint32_t rows[] = {1, 2, 3, 5, 17, 40}, cols[] = {1, 2, 3, 5, 8, 16, 17, 33};
    for (size_t t = 0; t < RFI_COUNT(all_types); t++) {
        const uint32_t type = all_types[t], block = rf_type_get(type).block_elements;
        const uint32_t unit = block == 1 ? 1 : block;
        const size_t part = t < FIRST_EXPANDED + 3 ? EMULATED_PART : 7 * EMULATED_PART; /* they differ in expansion alone */
        const uint32_t n_in[] = {unit, 3 * unit, block == 1 ? 50 : 8 * unit, 1024 / block * block, 2048 + unit * (block < 256 ? 5 : 1)};
        for (size_t a = 0; a < RFI_COUNT(n_in); a++)
            for (size_t b = 0; b < RFI_COUNT(rows); b++)
                for (size_t c = 0; c < RFI_COUNT(cols); c++)
                    if ((n_in[a] < 2000 || rows[b] * cols[c] <= 100 || rows[b] == 40) && (a + b + c + t) % part == 0)
                        check_matmul(k, type, rows[b], n_in[a], cols[c]);
    }
    if (EMULATED_PART > 1) return;
    check_matmul(k, RF_TYPE_Q4_K, 19, 512, 300); /* more columns than are blocked together */
    check_matmul(k, RF_TYPE_Q8_0, 33, 96, 300);
    check_matmul(k, RF_TYPE_F16, 19, 1030, 60);
}

/* Blocks of any bytes: extreme scales, all quants. Finite halves only: inf and nan give nan of unpromised bits. */
static void check_matmul_extremes(const rfi_kernels *k) {
    for (size_t t = 3; t < RFI_COUNT(all_types); t++) {
        const uint32_t type = all_types[t], n_in = 768, n_rows = 37, n_cols = 9;
        problem p = problem_create(k, type, n_rows, n_in, n_cols);
        float y[37 * 9], z[37 * 9];
        for (uint64_t i = 0; i < n_rows * p.row_bytes; i++) p.w[i] = rnd() % 3 ? (uint8_t)(rnd() >> 9) : rnd() % 2 ? 0xff : 0x80;
        memset(p.w, 0xff, p.row_bytes), memset(p.w + p.row_bytes, 0, p.row_bytes); /* the largest sums */
        const rf_type_info info = rf_type_get(type);
        for (uint64_t b = 0; b < n_rows * p.row_bytes / info.block_bytes; b++) {
            uint8_t *block = p.w + b * info.block_bytes;
            for (int i = 0; i < half_scales(type); i++) block[scale_at(type) + 2 * i + 1] &= (uint8_t)~0x40u; /* exponent below 16 */
            if (type == RF_TYPE_MXFP4) block[0] = (uint8_t)(64 + block[0] % 128);
            if (type == RF_TYPE_IQ1_M) block[55] &= (uint8_t)~0x40u;
        }
        for (uint32_t i = 0; i < n_in * n_cols; i++) /* q = +-127, of the first two columns all alike */
            p.x[i] = (i / n_in == 0 || (i / n_in > 1 && rnd() % 2)) ? 3.0f : -3.0f;
        for (uint32_t j = 0; j < n_cols; j++) k->quantize(p.x + j * n_in, n_in, p.q + j * p.acts.q_stride);
        run(k, &p, 0, n_rows, 0, n_cols, y, n_rows);
        run(rfi_kernels_find("scalar"), &p, 0, n_rows, 0, n_cols, z, n_rows);
        CHECK(!memcmp(y, z, sizeof y), "%s %s: not the scalar bits", k->name, info.name);
        for (uint32_t n = 1; n <= 2; n++) { /* one column and few take other code */
            memset(y, 0, n * n_rows * sizeof *y);
            run(k, &p, 0, n_rows, 0, n, y, n_rows);
            CHECK(!memcmp(y, z, sizeof y), "%s %s, %u columns: not the scalar bits", k->name, info.name, n);
        }
        for (uint32_t i = 0; i < n_rows; i++) {
            double row[768];
            decode(type, p.w + i * p.row_bytes, n_in, row);
            for (uint32_t j = 0; j < n_cols; j++) {
                double sum = 0, size = 0;
                for (uint32_t l = 0; l < n_in; l++) {
                    const rfi_q8 *g = p.q + j * p.acts.q_stride + l / 32;
                    const double v = row[l] * (double)g->d * g->q[l % 32];
                    sum += v, size += fabs(v);
                }
                CHECK(fabs((double)y[j * n_rows + i] - sum) <= 1e-5 * size, "%s %s %u %u", k->name, info.name, i, j);
            }
        }
        /* an input that is no number must show up in the result */
        p.x[5] = NAN;
        k->quantize(p.x, n_in, p.q);
        run(k, &p, 0, n_rows, 0, n_cols, y, n_rows);
        for (uint32_t i = 0; i < n_rows; i++) CHECK(isnan(y[i]) && !isnan(y[n_rows + i]), "%s %s", k->name, info.name);
        problem_release(&p);
    }
}

/* ---- elementwise ---- */

static void check_rms_norm(const rfi_kernels *k) {
    static const uint32_t sizes[] = {1, 2, 15, 16, 17, 33, 64, 128, 2048, 4099};
    for (size_t s = 0; s < RFI_COUNT(sizes); s++) {
        const uint32_t n = sizes[s];
        float *x = get(n * sizeof *x), *w = get(n * sizeof *w), *y = get(n * sizeof *y);
        double sum = 0, worst = 0;
        for (uint32_t i = 0; i < n; i++) x[i] = 3 * rnd_normal(), w[i] = 1 + rnd_normal(), sum += (double)x[i] * (double)x[i];
        const rfi_norm norm = {.w = w, .n = n, .eps = 1e-5f};
        k->norm(y, x, &norm);
        const double scale = 1 / sqrt(sum / n + (double)1e-5f);
        for (uint32_t i = 0; i < n; i++) {
            const double want = (double)x[i] * scale * (double)w[i], e = fabs((double)y[i] - want) / fabs(want);
            if (e > worst) worst = e;
        }
        CHECK(worst < 1e-6, "%s n %u error %g", k->name, n, worst);
        k->norm(x, x, &norm); /* in place */
        CHECK(!memcmp(x, y, n * sizeof *x), "%s n %u", k->name, n);
        free(x), free(w), free(y);
    }
}

/* exp(scale * s - max) in place; returns the sum, or that of a softmax taken in two pieces. */
static double softmax(const rfi_kernels *k, float *s, uint32_t n, uint32_t cut, float scale) {
    float top = -INFINITY, sum = 0;
    k->softmax(s, cut, scale, &top, &sum);
    if (cut == n) return (double)sum;
    const float earlier = k->softmax(s + cut, n - cut, scale, &top, &sum);
    for (uint32_t i = 0; i < cut; i++) s[i] *= earlier;
    return (double)sum;
}

static void check_exp(const rfi_kernels *k) {
    enum { N = 4096 };
    static float s[N], in[N];
    double worst = 0;
    for (int round = 0; round < 40; round += EMULATED_PART) {
        for (int i = 0; i < N; i++) in[i] = s[i] = -(float)(rnd_unit() * (round < 20 ? 1 : round < 30 ? 20 : 100));
        in[17] = s[17] = 0; /* the maximum, so that s becomes exp(in) */
        softmax(k, s, N, N, 1);
        for (int i = 0; i < N; i++) {
            const double want = exp((double)in[i]), ulp = want < 0x1p-126 ? 0x1p-149 : ldexp(1, ilogb(want) - 23);
            const double e = fabs((double)s[i] - want) / ulp;
            if (e > worst) worst = e;
        }
    }
    CHECK(worst < 1.5, "%s: exp is off by %.3f ulp", k->name, worst);
    float edge[] = {0, -INFINITY, -104.5f, -1e30f};
    softmax(k, edge, 4, 4, 1);
    CHECK(edge[0] == 1 && edge[1] == 0 && edge[2] == 0 && edge[3] == 0, "%s: %a %a %a", k->name, (double)edge[1], (double)edge[2], (double)edge[3]);
    float bad[20] = {0};
    bad[3] = NAN;
    CHECK(isnan(softmax(k, bad, 20, 20, 1)), "%s", k->name);
}

static void check_softmax(const rfi_kernels *k) {
    static const uint32_t sizes[] = {1, 2, 15, 16, 17, 31, 33, 257, 1000};
    for (size_t t = 0; t < 3 * RFI_COUNT(sizes); t++) {
        const uint32_t n = sizes[t / 3], cut = t % 3 == 0 || n == 1 ? n : t % 3 == 1 ? n / 2 : n - 1;
        float *s = get(n * sizeof *s), *in = get(n * sizeof *in);
        double top = -INFINITY, sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            in[i] = s[i] = 20 * rnd_normal() + (t % 2 ? 1000.0f : -1000.0f);
            if ((double)(0.25f * in[i]) > top) top = (double)(0.25f * in[i]);
        }
        const double got = softmax(k, s, n, cut, 0.25f);
        for (uint32_t i = 0; i < n; i++) {
            const double want = exp((double)(0.25f * in[i]) - top);
            sum += want;
            CHECK(fabs((double)s[i] - want) <= 5e-7 * want + 1e-44, "%s n %u: %a want %a", k->name, n, (double)s[i], want);
        }
        CHECK(fabs(got - sum) < 1e-6 * sum, "%s n %u", k->name, n);
        free(s), free(in);
    }
}

static void check_silu(const rfi_kernels *k) {
    enum { N = 4099 };
    static float g[N], u[N], y[N];
    double worst = 0;
    for (int i = 0; i < N; i++) g[i] = (i % 2 ? 4.0f : 40.0f) * rnd_normal(), u[i] = rnd_normal();
    g[0] = 0, g[1] = -200, g[2] = 200, g[3] = -87.5f, g[4] = -104, g[5] = -88.8f, g[6] = 1e30f, g[7] = -1e30f;
    k->glu(y, g, u, N, RF_ACT_SILU);
    for (int i = 0; i < N; i++) {
        const double x = (double)g[i], want = x / (1 + exp(-x)) * (double)u[i];
        const double least = 4e-37 * fabs((double)u[i]); /* e^-x is inf from 88.7 on */
        const double e = (fabs((double)y[i] - want) - least) / (fabs(want) + 1e-300);
        if (e > worst) worst = e;
    }
    CHECK(worst < 1e-6, "%s: error %g", k->name, worst);
    k->glu(g, g, u, N, RF_ACT_SILU);
    CHECK(!memcmp(g, y, sizeof g), "%s: in place", k->name);
    g[0] = NAN;
    k->glu(y, g, u, 1, RF_ACT_SILU);
    CHECK(isnan(y[0]), "%s", k->name);
}

static void check_rope(const rfi_kernels *k) {
    static const uint32_t dims[] = {2, 6, 32, 40, 80, 128};
    for (size_t t = 0; t < RFI_COUNT(dims); t++)
        for (int neox = 0; neox < 2; neox++) {
            const uint32_t n = dims[t], half = n / 2;
            float v[136], old[136], cs[136];
            for (uint32_t i = 0; i < n + 8; i++) v[i] = old[i] = rnd_normal();
            for (uint32_t i = 0; i < half; i++) {
                const double angle = 100 * rnd_unit();
                cs[2 * i] = (float)cos(angle), cs[2 * i + 1] = (float)sin(angle);
            }
            k->rope(v, cs, n, neox);
            for (uint32_t i = 0; i < half; i++) {
                const uint32_t a = neox ? i : 2 * i, b = neox ? i + half : 2 * i + 1;
                const double c = (double)cs[2 * i], s = (double)cs[2 * i + 1], x = (double)old[a], y = (double)old[b];
                CHECK(fabs((double)v[a] - (x * c - y * s)) < 1e-6, "%s %u %d", k->name, n, neox);
                CHECK(fabs((double)v[b] - (x * s + y * c)) < 1e-6, "%s %u %d", k->name, n, neox);
            }
            CHECK(!memcmp(v + n, old + n, 8 * sizeof *v), "%s %u %d: wrote too far", k->name, n, neox);
        }
}

static void check_add(const rfi_kernels *k) {
    float a[100], b[100];
    for (int i = 0; i < 100; i++) a[i] = (float)i, b[i] = (float)(i * i);
    k->add(a, b, 99);
    for (int i = 0; i < 100; i++) CHECK(a[i] == (i < 99 ? (float)(i + i * i) : 99.0f), "%s %d", k->name, i);
}

/* ---- attention ---- */

/* A row of a cache in q8_0, and its values. */
static void random_q8(uint8_t *row, float *values, uint32_t n) {
    for (uint32_t g = 0; g < n / 32; g++) {
        const uint16_t scale = rfi_f32_to_f16(0.005f + 0.008f * fabsf(rnd_normal()));
        memcpy(row + n + 2 * g, &scale, 2);
        for (uint32_t i = g * 32; i < g * 32 + 32; i++) {
            const int8_t q = (int8_t)(rnd() % 255 - 127);
            memcpy(row + i, &q, 1);
            values[i] = (float)q * rfi_f16_to_f32(scale);
        }
    }
}

/* n_tokens tokens, the last of which sees n_pos positions, against float64; then each token alone: the same bits. */
static void check_attention_one(const rfi_kernels *k, uint32_t n_pos, uint32_t n_tokens, uint32_t n_group, uint32_t dim,
                                uint32_t dim_v, uint32_t cache_type) {
    if (n_tokens > n_pos) n_tokens = n_pos;
    const uint32_t first = n_pos - n_tokens + 1, k_row = dim / 32 * 34, v_row = dim_v / 32 * 34;
    const uint64_t q_stride = n_group * dim + 5, out_stride = n_group * dim_v + 3;
    float *kf = get((size_t)n_pos * dim * 4), *vf = get((size_t)n_pos * dim_v * 4);
    uint16_t *kh = get((size_t)n_pos * dim * 2), *vh = get((size_t)n_pos * dim_v * 2);
    float *q = get((size_t)(n_tokens * q_stride) * 4), *out = get((size_t)(n_tokens * out_stride) * 4);
    float *alone = get((size_t)out_stride * 4), *scratch = get((size_t)rfi_attention_scratch(n_group, dim, dim_v) * 4);
    double *p = get(n_pos * sizeof *p);
    uint8_t *kq = get((size_t)n_pos * k_row + 1), *vq = get((size_t)n_pos * v_row + 1);
    float *cells = get(RFI_ATTENTION_BLOCK * (size_t)(dim + dim_v) * 4);
    for (uint32_t i = 0; i < n_pos * dim; i++) kh[i] = rfi_f32_to_f16(rnd_normal()), kf[i] = rfi_f16_to_f32(kh[i]);
    for (uint32_t i = 0; i < n_pos * dim_v; i++) vh[i] = rfi_f32_to_f16(rnd_normal()), vf[i] = rfi_f16_to_f32(vh[i]);
    if (cache_type == RF_CACHE_Q8_0)
        for (uint32_t i = 0; i < n_pos; i++)
            random_q8(kq + (size_t)i * k_row, kf + (size_t)i * dim, dim), random_q8(vq + (size_t)i * v_row, vf + (size_t)i * dim_v, dim_v);
    for (uint64_t i = 0; i < n_tokens * q_stride; i++) q[i] = rnd_normal();
    for (uint64_t i = 0; i < n_tokens * out_stride; i++) out[i] = -77;
    const void *ks[] = {kh, kf, kq}, *vs[] = {vh, vf, vq};
    rfi_attention a = {.unit = 1, .q = q, .q_stride = q_stride, .k = ks[cache_type],
                       .v = vs[cache_type], .cells = cells, .n_cells = n_pos, .cache_type = cache_type, .n_tokens = n_tokens,
                       .n_pos = first, .n_group = n_group, .head_dim = dim, .head_dim_v = dim_v,
                       .scale = 1 / sqrtf((float)dim), .scratch = scratch, .out = out, .out_stride = out_stride};
    rfi_attention_run(k, &a);
    double worst = 0;
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t h = 0; h < n_group; h++) {
            double top = -INFINITY, sum = 0;
            for (uint32_t j = 0; j < first + t; j++) {
                p[j] = 0;
                for (uint32_t i = 0; i < dim; i++) p[j] += (double)q[t * q_stride + h * dim + i] * (double)kf[j * dim + i];
                p[j] *= (double)a.scale;
                if (p[j] > top) top = p[j];
            }
            for (uint32_t j = 0; j < first + t; j++) sum += p[j] = exp(p[j] - top);
            for (uint32_t i = 0; i < dim_v; i++) {
                double want = 0;
                for (uint32_t j = 0; j < first + t; j++) want += p[j] / sum * (double)vf[j * dim_v + i];
                const double e = fabs((double)out[t * out_stride + h * dim_v + i] - want);
                worst = rft_worst(worst, e);
            }
        }
    CHECK(worst < 3e-6, "%s pos %u tokens %u group %u dim %u %u cache %u: %g", k->name, n_pos, n_tokens, n_group, dim, dim_v,
          cache_type, worst);
    for (uint32_t t = 0; t < n_tokens; t++) {
        rfi_attention b = a;
        b.q += t * q_stride, b.n_tokens = 1, b.n_pos = first + t, b.out = alone;
        rfi_attention_run(k, &b);
        CHECK(!memcmp(alone, out + t * out_stride, n_group * dim_v * 4), "%s: token %u has other bits alone", k->name, t);
        for (uint32_t i = n_group * dim_v; i < out_stride; i++) CHECK(out[t * out_stride + i] == -77, "%s", k->name);
    }
    free(kq), free(vq), free(cells);
    free(kf), free(vf), free(kh), free(vh), free(q), free(out), free(alone), free(scratch), free(p);
}

/* Rows to q8_0: the scale is that of the largest value, no value is off by more than half a step, and back. */
static void check_q8_rows(const rfi_kernels *k) {
    enum { ROW = 96 };
    float x[ROW], back[ROW];
    int8_t q[ROW];
    uint16_t scales[ROW / 32];
    for (int round = 0; round < 50; round++) {
        const float size = ldexpf(1, round % 40 - 20);
        for (int i = 0; i < ROW; i++) x[i] = i < 32 && round % 10 == 9 ? 0 : size * rnd_normal();
        if (round == 7) x[40] = -size * 5, x[41] = size * 5, x[70] = NAN;
        k->f32_to_q8(q, scales, x, ROW);
        k->q8_to_f32(back, q, scales, ROW);
        for (int g = 0; g < ROW / 32; g++) {
            float most = 0;
            for (int i = g * 32; i < g * 32 + 32; i++) most = fmaxf(most, fabsf(x[i]));
            const double step = (double)(most / 127), scale = (double)rfi_f16_to_f32(scales[g]);
            if (round == 7 && g == 2) {
                CHECK(isnan(scale) && isnan(back[70]), "%s: nan", k->name);
                continue;
            }
            CHECK(scales[g] == rfi_f32_to_f16(most / 127), "%s: scale %g, largest value %g", k->name, scale, (double)most);
            for (int i = g * 32; i < g * 32 + 32; i++)
                CHECK(fabs((double)x[i] - q[i] * step) <= step * 0.500001 && (double)back[i] == q[i] * scale, "%s: %g is %d times %g",
                      k->name, (double)x[i], q[i], step);
        }
    }
}

static void check_attention(const rfi_kernels *k) {
    check_q8_rows(k);
    static const uint32_t pos[] = {1, 2, 31, 33, 257, 530}, dims[] = {32, 40, 64, 80, 128}, groups[] = {1, 2, 4, 6, 8};
    for (size_t a = 0; a < RFI_COUNT(pos); a++)
        for (size_t b = 0; b < RFI_COUNT(dims); b++)
            for (size_t c = 0; c < RFI_COUNT(groups); c++)
                for (uint32_t cache = 0; cache < 3 && (a + b + c) % EMULATED_PART == 0; cache++)
                    if (cache < RF_CACHE_Q8_0 || dims[b] % 32 == 0) check_attention_one(k, pos[a], (a + b + c) % 2 ? 1 : 11, groups[c], dims[b], dims[b], cache);
    check_attention_one(k, 50, 20, 3, 12, 7, 0);
    check_attention_one(k, 50, 20, 1, 5, 256, 1);
}

/* ---- every instruction set ---- */

static void for_each_isa(void (*check)(const rfi_kernels *)) {
    for (size_t i = 0; i < RFI_COUNT(all_isas); i++) {
        const rfi_kernels *k = rfi_kernels_find(all_isas[i]);
        if (k) check(k);
    }
}

static void test_find(void) {
    const rfi_kernels *best = rfi_kernels_find(NULL), *last = NULL;
    CHECK(rfi_kernels_find("scalar") && !strcmp(rfi_kernels_find("scalar")->name, "scalar"), "no");
    CHECK(!rfi_kernels_find("sse9") && !rfi_kernels_find(""), "no");
    rf_device *d;
    rf_error err;
    CHECK(rf_device_open("cpu", &(rf_device_desc){.isa = "sse9"}, &d, &err) == RF_ERR_NOT_FOUND && strstr(err.text, "'sse9'") &&
              strstr(err.text, best->name), "%s", err.text);
    for (size_t i = 0; i < RFI_COUNT(all_isas); i++) {
        const rfi_kernels *k = rfi_kernels_find(all_isas[i]);
        if (!k) continue;
        last = k;
        CHECK(!strcmp(k->name, all_isas[i]) && k->arch_text[0], "no");
        for (uint32_t t = 0; t < RF_TYPE_COUNT; t++) CHECK(rfi_matmul_has(k, t) == (rf_type_get(t).runs == 1), "%s %u", k->name, t);
        printf("  instruction set: %s (%s)\n", k->name, k->arch_text);
    }
    CHECK(best == last, "best is %s", best->name);
}
static void test_quantize(void) { for_each_isa(check_quantize); }
static void test_matmul(void) { for_each_isa(check_matmuls); }
static void test_matmul_extremes(void) { for_each_isa(check_matmul_extremes); }
static void test_store(void) { for_each_isa(check_store); }
static void test_rms_norm(void) { for_each_isa(check_rms_norm); }
static void test_exp(void) { for_each_isa(check_exp); }
static void test_softmax(void) { for_each_isa(check_softmax); }
static void test_silu_mul(void) { for_each_isa(check_silu); }
static void test_rope(void) { for_each_isa(check_rope); }
static void test_add(void) { for_each_isa(check_add); }
static void test_attention(void) { for_each_isa(check_attention); }

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_types);
    RUN(test_dequantize_arguments);
    RUN(test_dequantize_random);
    RUN(test_grids);
    RUN(test_f16);
    RUN(test_bf16);
    RUN(test_find);
    RUN(test_quantize);
    RUN(test_matmul);
    RUN(test_matmul_extremes);
    RUN(test_store);
    RUN(test_rms_norm);
    RUN(test_exp);
    RUN(test_softmax);
    RUN(test_silu_mul);
    RUN(test_rope);
    RUN(test_add);
    RUN(test_attention);
    RFT_END();
}
