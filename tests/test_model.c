/* The model end to end on the CPU device: logits against the float64 evaluator of ref_model.h, sessions against
 * themselves where only bits can differ, and every error a file's directory can hold.
 *
 * Tolerances are fractions of the largest |logit|. float32 rounds to 6e-8, a few such errors add up: 5e-7 is measured,
 * FLOAT_TOLERANCE leaves a factor of eight. Quantized weights see inputs rounded to int8, which the
 * evaluator simulates; the same tolerance holds as long as no input lies so near to a tie that float32 noise (3e-7 of 127
 * steps: 4e-5) tips it to the other side, so tokens are searched whose inputs all keep INT8_MARGIN steps from a tie. */
#define ROCMFORGE_IMPLEMENTATION
#include "../rocmforge.h"

#include "make_gguf.h"
#include "ref_model.h"
#include "rf_test.h"

#define FLOAT_TOLERANCE 4e-6
#define INT8_MARGIN 1e-4

static const char *const isas[] = {"scalar", "avx2", "avx512", "neon"};
static const struct {
    uint32_t id;
    const char *name;
} types[] = {{MG_F32, "f32"},   {MG_F16, "f16"},   {MG_BF16, "bf16"}, {MG_Q4_0, "q4_0"}, {MG_Q4_1, "q4_1"}, {MG_Q5_0, "q5_0"},
             {MG_Q5_1, "q5_1"}, {MG_Q8_0, "q8_0"}, {MG_Q4_K, "q4_K"}, {MG_Q5_K, "q5_K"}, {MG_Q6_K, "q6_K"}};

/* ---- a model and everything below it ---- */

static _Atomic int64_t live_blocks, alloc_calls;

static void *count_alloc(size_t n, void *user) {
    void *p = malloc(n);
    (void)user;
    if (p) atomic_fetch_add(&live_blocks, 1);
    atomic_fetch_add(&alloc_calls, 1);
    return p;
}
static void count_free(void *p, void *user) {
    (void)user;
    atomic_fetch_sub(&live_blocks, 1);
    free(p);
}
static const rf_allocator counting = {count_alloc, count_free, NULL};

typedef struct rig {
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_session *s;
    rf_error err;
    uint32_t n_vocab;
} rig;

static void rig_close(rig *r) {
    rf_session_close(r->s);
    CHECK(rf_model_close(r->m, NULL) == RF_OK);
    CHECK(rf_device_close(r->d, NULL) == RF_OK);
    CHECK(rf_gguf_close(r->g, NULL) == RF_OK);
    memset(r, 0, sizeof *r);
    CHECK(atomic_load(&live_blocks) == 0, "%lld blocks are left", (long long)atomic_load(&live_blocks));
}

/* 1 if all of it opened; else nothing is left and r->err says why. isa NULL: the best. */
static int rig_open(rig *r, const mg_buf *file, const char *path, const char *isa, uint32_t n_threads, const rf_session_desc *sd) {
    rf_gguf_desc gd = {.allocator = counting};
    rf_device_desc dd = {.allocator = counting, .n_threads = n_threads, .isa = isa};
    memset(r, 0, sizeof *r);
    rf_result res = path ? rf_gguf_open(path, &gd, &r->g, &r->err) : rf_gguf_open_memory(file->data, file->n, &gd, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open("cpu", &dd, &r->d, &r->err);
    if (res == RF_OK) res = rf_model_open(r->g, r->d, NULL, &r->m, &r->err);
    if (res == RF_OK) res = rf_session_open(r->m, sd, &r->s, &r->err);
    if (res == RF_OK) {
        r->n_vocab = rf_model_get_info(r->m).n_vocab;
        return 1;
    }
    rf_error err = r->err;
    rig_close(r);
    r->err = err;
    return 0;
}

static int have_isa(const char *isa) {
    rf_device *d;
    rf_device_desc dd = {.n_threads = 1, .isa = isa};
    if (rf_device_open("cpu", &dd, &d, NULL) != RF_OK) return 0;
    rf_device_close(d, NULL);
    return 1;
}

static void random_tokens(int32_t *tokens, uint32_t n, uint32_t n_vocab, uint64_t seed) {
    mg_rng r = {seed};
    for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)mg_below(&r, n_vocab);
}

/* The session's logits of n tokens in sequence 0, all rows asked for. */
static int eval_all(rig *r, const int32_t *tokens, uint32_t n, float *out) {
    rf_row rows[256] = {{0}};
    if (n > 256) return 0;
    for (uint32_t i = 0; i < n; i++) rows[i] = (rf_row){.token = tokens[i], .pos = RF_POS_NEXT, .want_logits = 1};
    if (rf_eval(r->s, rows, n, &r->err) != RF_OK) return 0;
    for (uint32_t i = 0; i < n; i++) memcpy(out + (size_t)i * r->n_vocab, rf_session_logits(r->s, i), r->n_vocab * sizeof *out);
    return 1;
}

/* largest |a - b| over largest |b|; infinite if anything is not a number */
static double distance(const float *a, const double *b, size_t n) {
    double diff = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(a[i]) || !isfinite(b[i])) return INFINITY;
        diff = fmax(diff, fabs((double)a[i] - b[i]));
        most = fmax(most, fabs(b[i]));
    }
    return diff / most;
}

/* ---- logits against float64 ---- */

/* A model of these options, its reference logits, and tokens; for quantized ones tokens that keep away from ties. */
typedef struct problem {
    mg_buf file;
    int32_t tokens[64];
    uint32_t n, n_vocab;
    double *logits;
    double margin;
} problem;

static void problem_make(problem *p, const mg_options *o, uint32_t n, int kv_f16) {
    rf_gguf *g;
    ref_model m;
    ref_margins margins;
    ref_options ro = {.int8_acts = 1, .kv_f16 = kv_f16};
    memset(p, 0, sizeof *p);
    p->n = n;
    mg_llama(&p->file, o);
    if (rf_gguf_open_memory(p->file.data, p->file.n, NULL, &g, NULL) != RF_OK) ref_die("the fixture does not open");
    ref_open(&m, g);
    for (uint64_t seed = 0; p->margin < INT8_MARGIN && seed < 200; seed++) {
        free(p->logits);
        random_tokens(p->tokens, n, 310, seed);
        p->logits = ref_eval(&m, p->tokens, n, &ro, &margins);
        p->margin = margins.int8;
    }
    p->n_vocab = m.n_vocab;
    ref_close(&m);
    rf_gguf_close(g, NULL);
}

static void problem_free(problem *p) {
    mg_free(&p->file);
    free(p->logits);
}

/* The library's logits on every instruction set; returns the worst distance. */
static double problem_run(const problem *p, uint32_t cache_type, double tolerance, const char *what) {
    double worst = 0;
    float *got = (float *)malloc((size_t)p->n * p->n_vocab * sizeof *got);
    rf_session_desc sd = {.n_logits_max = p->n, .cache_type = cache_type};
    CHECK(p->margin >= INT8_MARGIN, "%s: no tokens keep away from ties", what);
    for (size_t i = 0; i < RFI_COUNT(isas); i++) {
        rig r;
        if (!have_isa(isas[i])) continue;
        int ok = rig_open(&r, &p->file, NULL, isas[i], 2, &sd);
        CHECK(ok, "%s %s: %s", what, isas[i], r.err.text);
        if (!ok) continue;
        CHECK(r.n_vocab == p->n_vocab);
        ok = eval_all(&r, p->tokens, p->n, got);
        CHECK(ok, "%s %s: %s", what, isas[i], r.err.text);
        double d = ok ? distance(got, p->logits, (size_t)p->n * p->n_vocab) : 0;
        CHECK(d <= tolerance, "%s on %s: logits are off by %.3g of the largest, allowed %.3g", what, isas[i], d, tolerance);
        worst = fmax(worst, d);
        rig_close(&r);
    }
    free(got);
    return worst;
}

/* How far the reference logits of a model with other options are from p's, for the same tokens. */
static double reference_distance(const problem *p, const mg_options *o) {
    mg_buf file = {0};
    rf_gguf *g;
    ref_model m;
    size_t n = (size_t)p->n * p->n_vocab;
    mg_llama(&file, o);
    rf_gguf_open_memory(file.data, file.n, NULL, &g, NULL);
    ref_open(&m, g);
    double *other = ref_eval(&m, p->tokens, p->n, &(ref_options){.int8_acts = 1}, NULL), diff = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        diff = fmax(diff, fabs(other[i] - p->logits[i]));
        most = fmax(most, fabs(p->logits[i]));
    }
    free(other);
    ref_close(&m);
    rf_gguf_close(g, NULL);
    mg_free(&file);
    return diff / most;
}

static int is_float(uint32_t type) { return type == MG_F32 || type == MG_F16 || type == MG_BF16; }

/* Every type with every architecture. */
static void test_types(void) {
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    double worst = 0;
    for (size_t t = 0; t < RFI_COUNT(types); t++)
        for (size_t a = 0; a < RFI_COUNT(archs); a++) {
            char what[64];
            problem p;
            mg_options o = {.arch = archs[a], .type = types[t].id, .seed = t * 1000};
            snprintf(what, sizeof what, "%s %s", archs[a], types[t].name);
            problem_make(&p, &o, is_float(o.type) ? 37 : 4, 0);
            worst = fmax(worst, problem_run(&p, RF_CACHE_F32, FLOAT_TOLERANCE, what));
            problem_free(&p);
        }
    printf("    types: worst %.2g of the largest logit\n", worst);
}


/* What else a file may say. Where an option changes no weight, the logits must differ from those without it by far more
 * than the tolerance, or the case would prove nothing. */
enum { OWN_WEIGHTS = 0, DIFFERS = 1, EQUAL = 2 };
static void test_graphs(void) {
    static const uint32_t heads[3] = {4, 2, 8}, kv_heads[3] = {2, 2, 1}, ff[3] = {96, 32, 160};
    static const struct {
        const char *what;
        int against_plain;
        mg_options o;
    } cases[] = {
        {"tied", OWN_WEIGHTS, {.tied = 1}},
        {"tied qwen3", OWN_WEIGHTS, {.arch = "qwen3", .tied = 1}},
        {"llama with biases", OWN_WEIGHTS, {.bias = 1}},
        {"all biases", OWN_WEIGHTS, {.bias = 1, .bias_out = 1, .bias_ffn = 1, .bias_logits = 1}},
        {"fused qkv", OWN_WEIGHTS, {.fused_qkv = 1}},
        {"fused qkv and bias, qwen2", OWN_WEIGHTS, {.arch = "qwen2", .fused_qkv = 1, .n_kv_heads = 1}},
        {"f16 vectors", OWN_WEIGHTS, {.vector_type = MG_F16, .bias = 1, .bias_out = 1, .bias_ffn = 1, .rope_freqs = 1}},
        {"bf16 vectors", OWN_WEIGHTS, {.arch = "qwen3", .vector_type = MG_BF16, .fused_qkv = 1, .bias = 1, .rope_freqs = 1}},
        {"rope_freqs", OWN_WEIGHTS, {.rope_freqs = 1}},
        {"rope_freqs qwen3", OWN_WEIGHTS, {.arch = "qwen3", .rope_freqs = 1}},
        {"rope base", DIFFERS, {.rope_base = 500.0f}},
        {"linear", DIFFERS, {.rope_scaling = "linear", .rope_factor = 4.0f}},
        {"linear without a type", DIFFERS, {.rope_factor = 2.0f}},
        {"linear by its old key", DIFFERS, {.arch = "qwen2", .rope_scale_linear = 8.0f}},
        {"scaling none", EQUAL, {.rope_scaling = "none", .rope_factor = 8.0f}},
        {"yarn", DIFFERS, {.rope_scaling = "yarn", .rope_factor = 4.0f, .n_ctx_original = 128}},
        {"yarn qwen3, trained context", DIFFERS, {.arch = "qwen3", .rope_scaling = "yarn", .rope_factor = 16.0f}},
        {"yarn with multiplier", OWN_WEIGHTS, {.rope_scaling = "yarn", .rope_factor = 8.0f, .yarn_log_multiplier = 0.7f, .rope_freqs = 1}},
        {"yarn, wide ramp", DIFFERS, {.rope_scaling = "yarn", .rope_factor = 32.0f, .n_ctx_original = 1024, .rope_base = 150.0f}},
        {"partial rope", DIFFERS, {.n_rot = 8}},
        {"partial rope qwen2", OWN_WEIGHTS, {.arch = "qwen2", .n_rot = 6, .rope_freqs = 1}},
        {"wide heads", OWN_WEIGHTS, {.arch = "qwen3", .head_dim = 32}},
        {"narrow heads", OWN_WEIGHTS, {.head_dim = 8}},
        {"keys wider than values", OWN_WEIGHTS, {.head_dim = 32, .head_dim_v = 16}},
        {"values wider than keys", OWN_WEIGHTS, {.head_dim = 16, .head_dim_v = 48, .fused_qkv = 1, .bias = 1}},
        {"a single key/value head", OWN_WEIGHTS, {.n_kv_heads = 1}},
        {"as many as query heads", OWN_WEIGHTS, {.n_kv_heads = 4}},
        {"eps", DIFFERS, {.eps = 0.5f}},
        {"eps qwen3", DIFFERS, {.arch = "qwen3", .eps = 0.5f}},
        {"one layer", OWN_WEIGHTS, {.n_layers = 1}},
        {"per-layer numbers", OWN_WEIGHTS, {.n_layers = 3, .layer_heads = heads, .layer_kv_heads = kv_heads, .layer_ff = ff, .head_dim = 16}},
        {"per-layer numbers, fused", OWN_WEIGHTS, {.arch = "qwen2", .n_layers = 3, .layer_heads = heads, .layer_kv_heads = kv_heads, .fused_qkv = 1,
                                      .layer_ff = ff, .head_dim = 32}},
        {"no tokenizer", OWN_WEIGHTS, {.no_vocab = 1, .n_vocab = 333}},
        {"heads of one value", OWN_WEIGHTS, {.head_dim = 1, .head_dim_v = 16}},
    };
    double worst = 0;
    for (size_t i = 0; i < RFI_COUNT(cases); i++)
        for (int quantized = 0; quantized < 2; quantized++) {
            problem p;
            char what[96];
            mg_options o = cases[i].o;
            o.type = quantized ? MG_Q8_0 : MG_F32;
            o.seed = 77 + i;
            if (quantized && (o.head_dim == 8 || o.head_dim == 1 || o.head_dim_v == 16)) o.n_heads = 8; /* rows of blocks */
            if (quantized && o.head_dim_v == 16 && o.head_dim == 1) o.n_kv_heads = 2;
            snprintf(what, sizeof what, "%s, %s", cases[i].what, quantized ? "q8_0" : "f32");
            problem_make(&p, &o, quantized ? 4 : 37, 0);
            worst = fmax(worst, problem_run(&p, RF_CACHE_F32, FLOAT_TOLERANCE, what));
            if (cases[i].against_plain) {
                mg_options plain = {.arch = o.arch, .type = o.type, .seed = o.seed};
                double d = reference_distance(&p, &plain);
                CHECK(cases[i].against_plain == EQUAL ? d == 0 : d > 1000 * FLOAT_TOLERANCE, "%s: %.3g from the plain model", what, d);
            }
            problem_free(&p);
        }
    printf("    graphs: worst %.2g of the largest logit\n", worst);
}

/* Mixes as files have them: K-quants with others, float among quantized matrices, another type for the embedding. */
static void test_mixes(void) {
    static const mg_options cases[] = {
        {.type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K},
        {.type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .use_embd = 1, .embd_type = MG_Q8_0, .tied = 1},
        {.type = MG_Q4_0, .use_mix = 1, .mix_type = MG_Q4_1, .arch = "qwen2"},
        {.type = MG_Q5_0, .use_mix = 1, .mix_type = MG_F16, .arch = "qwen3"},
        {.type = MG_BF16, .use_mix = 1, .mix_type = MG_Q8_0},
        {.type = MG_Q8_0, .use_mix = 1, .mix_type = MG_F32, .use_embd = 1, .embd_type = MG_BF16},
    };
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        problem p;
        char what[32];
        snprintf(what, sizeof what, "mix %zu", i);
        problem_make(&p, &cases[i], 4, 0);
        problem_run(&p, RF_CACHE_F32, FLOAT_TOLERANCE, what);
        problem_free(&p);
    }
}

/* Keys and values in binary16. A float32 error can tip such a rounding too, and does in every larger model; a step of
 * 2^-11 of one of the keys' or values' elements then moves a logit by about 2^-11 / sqrt(n_embd) = 6e-5. A few of them
 * are allowed; without simulating binary16 the distance is 10 times that. */
static void test_cache_f16(void) {
    double worst = 0;
    for (size_t t = 0; t < RFI_COUNT(types); t++) {
        problem p;
        mg_options o = {.type = types[t].id, .seed = 5};
        problem_make(&p, &o, 4, 1);
        worst = fmax(worst, problem_run(&p, RF_CACHE_F16, 1e-4, types[t].name));
        problem_free(&p);
    }
    printf("    f16 cache: worst %.2g of the largest logit\n", worst);
}

/* A long sequence: far positions, and attention over more than a block of them. */
static void test_long(void) {
    mg_options o = {.n_ctx = 256, .type = MG_F32, .seed = 3};
    rf_session_desc sd = {.n_ctx = 250, .n_logits_max = 250, .cache_type = RF_CACHE_F32};
    static float got[250 * 320];
    int32_t tokens[250];
    for (int neox = 0; neox < 2; neox++) {
        mg_buf file = {0};
        rf_gguf *g;
        ref_model m;
        o.arch = neox ? "qwen2" : "llama";
        mg_llama(&file, &o);
        rf_gguf_open_memory(file.data, file.n, NULL, &g, NULL);
        ref_open(&m, g);
        random_tokens(tokens, 250, 310, 8);
        double *want = ref_eval(&m, tokens, 250, &(ref_options){0}, NULL);
        for (size_t i = 0; i < RFI_COUNT(isas); i++) {
            rig r;
            if (!have_isa(isas[i])) continue;
            int ok = rig_open(&r, &file, NULL, isas[i], 2, &sd);
            CHECK(ok, "%s", r.err.text);
            if (!ok) continue;
            ok = eval_all(&r, tokens, 250, got);
            CHECK(ok, "%s", r.err.text);
            double d = distance(got, want, (size_t)250 * 320);
            CHECK(d <= FLOAT_TOLERANCE, "%s on %s: off by %.3g", o.arch, isas[i], d);
            rig_close(&r);
        }
        free(want);
        ref_close(&m);
        rf_gguf_close(g, NULL);
        mg_free(&file);
    }
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_types);
    RUN(test_graphs);
    RUN(test_mixes);
    RUN(test_cache_f16);
    RUN(test_long);
    RFT_END();
}
