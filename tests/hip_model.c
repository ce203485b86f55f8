/* hip_model.c: whole models on the GPU device, through the public API: against the CPU device, against themselves, in two
 * threads, and with failing calls. Linked with the emulated kernels (-DRF_TEST_EMU) or with those of a real GPU, where
 * runs are repeated more often and with the shipped model. */
#define ROCMFORGE_IMPLEMENTATION
#include "../rocmforge.h"

#ifdef RF_TEST_EMU
#include "hip_emu.h"
enum { REPEATS = 8, THREAD_REPEATS = 4, DECODED = 3 };
#else
enum { REPEATS = 1000, THREAD_REPEATS = 100, DECODED = 12 };
#endif
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <pthread.h>

/* Sums of floats in another order, of values rounded to half in the cache: what the project promises is 1e-3. Inputs of
 * quantized weights are rounded to int8, and the other order tips some of them to the other side. */
#define FLOAT_TOLERANCE 1e-3
#define INT8_TOLERANCE 2e-2

#define MAX_VOCAB 8192u

/* file NULL: the shipped model. What is open already stays. */
static rf_result open_rig(rig *r, const mg_buf *file, const char *device, const rf_session_desc *sd) {
    rf_result res = RF_OK;
    if (!r->g) res = file ? rf_gguf_open_memory(file->data, file->n, NULL, &r->g, &r->err) : rf_gguf_open("examples/shakespeare-5m.gguf", NULL, &r->g, &r->err);
    if (res == RF_OK && !r->d) res = rf_device_open(device, NULL, &r->d, &r->err);
    if (res == RF_OK && !r->m) res = rf_model_open(r->g, r->d, NULL, &r->m, &r->err);
    if (res == RF_OK && !r->s) res = rf_session_open(r->m, sd, &r->s, &r->err);
    if (res == RF_OK) r->n_vocab = rf_model_get_info(r->m).n_vocab;
    return res;
}

/* "hip:N", or NULL if there is no such usable device */
static const char *device_name(uint32_t index) {
    static rf_device_info list[16];
    uint32_t n = 0, found = 0;
    if (rf_device_list(list, 16, &n, NULL) != RF_OK) return NULL;
    for (uint32_t i = 0; i < n && i < 16; i++)
        if (list[i].is_gpu && list[i].usable && found++ == index) return list[i].name;
    return NULL;
}

/* A prompt from an empty sequence and greedy steps after it: the logits of each, and the ids the device chose. */
static rf_result write_on(rig *r, const int32_t *prompt, uint32_t n, uint32_t steps, float *logits, int32_t *ids) {
    rf_result res = rf_session_truncate(r->s, 0, 0, NULL, &r->err);
    for (uint32_t i = 0; res == RF_OK && i <= steps; i++) {
        float *row = NULL;
        res = i ? rf_session_forward(r->s, &ids[i - 1], 1, &row, &r->err) : rf_session_forward(r->s, prompt, n, &row, &r->err);
        ids[i] = rft_argmax(r->s, 0);
        if (res == RF_OK) memcpy(logits + (size_t)i * r->n_vocab, row, r->n_vocab * sizeof *row);
    }
    return res;
}

static double distance(const float *a, const float *b, size_t n) {
    double worst = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        worst = rft_worst(worst, d);
        most = fmax(most, fabs((double)b[i]));
    }
    return worst / most;
}

/* Weight types and architectures: the same ids and nearly the same logits as the CPU device. */
static void test_as_cpu(void) {
    static const uint32_t types[] = {MG_F32, MG_F16, MG_BF16, MG_Q4_0, MG_Q4_1, MG_Q5_0, MG_Q5_1, MG_Q8_0, MG_Q4_K, MG_Q5_K, MG_Q6_K,
                                     MG_Q2_K, MG_Q3_K, MG_IQ4_XS, MG_MXFP4, MG_IQ3_S, MG_IQ1_M};
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    static float cpu[5 * MAX_VOCAB], gpu[5 * MAX_VOCAB];
    int32_t prompt[11], cpu_ids[5], gpu_ids[5];
    double worst[2] = {0, 0};
    for (uint32_t t = 0; t < RFT_COUNT(types); t++) {
        mg_buf file = {0};
        rig r = {0}, c = {0};
        rf_session_desc sd = {.n_ctx = 64, .n_batch = t % 2 ? 4 : 0, .cache_type = t % 3 == 0 ? RF_CACHE_F32 : RF_CACHE_F16};
        mg_llama(&file, &(mg_options){.type = types[t], .arch = archs[t % 3], .seed = 3 + t, .tied = t == 5, .rope_freqs = t == 6});
        mg_tokens(prompt, 11, 300, t);
        int int8 = types[t] != MG_F32 && types[t] != MG_F16 && types[t] != MG_BF16;
        CHECK(open_rig(&c, &file, "cpu", &sd) == RF_OK && write_on(&c, prompt, 11, 4, cpu, cpu_ids) == RF_OK, "%s", c.err.text);
        for (uint32_t k = 0; device_name(k); k++) {
            if (t > 10 && device_name(1) && k % 2 != t % 2) continue; /* these are tested as ops by test_hip: in turn */
            CHECK(open_rig(&r, &file, device_name(k), &sd) == RF_OK && write_on(&r, prompt, 11, 4, gpu, gpu_ids) == RF_OK, "%s", r.err.text);
            double d = distance(gpu, cpu, (size_t)c.n_vocab * 5);
            CHECK(d <= (int8 ? INT8_TOLERANCE : FLOAT_TOLERANCE), "type %u on %s: off by %g", types[t], device_name(k), d);
            CHECK(memcmp(cpu_ids, gpu_ids, sizeof cpu_ids) == 0, "type %u on %s: other ids", types[t], device_name(k));
            worst[int8] = rft_worst(worst[int8], d);
            rig_close(&r);
        }
        rig_close(&c);
        mg_free(&file);
    }
    printf("    off by %.2g with float weights, %.2g with int8 inputs\n", worst[0], worst[1]);
}

/* A row's bits are the same alone and in steps of up to 16 rows, whoever's they are. */
enum { OWN = 17, STRANGER = 16, N_OWN = 3 };
static const int32_t own_tokens[N_OWN] = {21, 7, 50}; /* small models have 64 */

static rf_result fill_sequence(rig *r, int32_t seq, uint32_t n, uint32_t seed) {
    int32_t tokens[80];
    rf_token_row rows[80];
    mg_tokens(tokens, n, r->n_vocab < 300 ? r->n_vocab : 300, seed);
    for (uint32_t i = 0; i < n; i++) rows[i] = (rf_token_row){.token = tokens[i], .seq = seq, .pos = RF_POS_NEXT};
    return rf_session_eval(r->s, rows, n, &r->err);
}

/* The logits of a step's row: the next token of sequence 0 among n - 1 of strangers. */
static rf_result step_among(rig *r, uint32_t n, uint32_t k, float *logits) {
    rf_token_row rows[16];
    float *out = NULL;
    for (uint32_t i = 0; i < n; i++)
        rows[i] = (rf_token_row){.token = (int32_t)((40 + 3 * i + k) % 64), .seq = (int32_t)i + 1, .pos = RF_POS_NEXT, .want_logits = i % 2 == 0};
    const uint32_t own = n / 2 + k % 2 < n ? n / 2 + k % 2 : n - 1; /* of odd and of even columns */
    rows[own] = (rf_token_row){.token = own_tokens[k], .pos = RF_POS_NEXT, .want_logits = 1};
    uint32_t place = 0;
    for (uint32_t i = 0; i < own; i++) place += (uint32_t)rows[i].want_logits;
    rf_result res = rf_session_eval(r->s, rows, n, &r->err);
    if (res == RF_OK) res = rf_session_get_logits(r->s, place, &out, &r->err);
    if (res == RF_OK) memcpy(logits, out, r->n_vocab * sizeof *logits);
    return res;
}

static void rows_case(const mg_buf *file, const char *path, const char *device, uint32_t cache_type, const char *what) {
#ifdef RF_TEST_EMU
    static const uint32_t counts[] = {1, 2, 5, 16}; /* the first one is alone */
#else
    static const uint32_t counts[] = {1, 2, 3, 5, 8, 16};
#endif
    static float alone[N_OWN][MAX_VOCAB], found[MAX_VOCAB];
    rig r = {0};
    rf_session_desc sd = {.n_ctx = 96, .n_seq_max = 18, .n_batch = 64, .n_logits_max = 16, .cache_type = cache_type};
    if (path) CHECK(rf_gguf_open(path, NULL, &r.g, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(open_rig(&r, file, device, &sd) == RF_OK && fill_sequence(&r, OWN, 70, 1) == RF_OK && fill_sequence(&r, STRANGER, 9, 2) == RF_OK, "%s", r.err.text);
    for (uint32_t c = 0; c < RFT_COUNT(counts); c++) {
        CHECK(rf_session_copy(r.s, OWN, 0, &r.err) == RF_OK, "%s", r.err.text);
        for (int32_t i = 1; i < 16; i++) CHECK(rf_session_copy(r.s, STRANGER, i, &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t k = 0; k < N_OWN; k++) {
            float *to = c ? found : alone[k];
            CHECK(step_among(&r, counts[c], k, to) == RF_OK, "%s", r.err.text);
            CHECK(memcmp(to, alone[k], r.n_vocab * sizeof *to) == 0, "%s on %s: token %u has other bits in a step of %u rows, off by %g",
                  what, device, k, counts[c], distance(to, alone[k], r.n_vocab));
        }
    }
    rf_token_row rows[N_OWN]; /* all rows of one sequence */
    CHECK(rf_session_copy(r.s, OWN, 0, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t k = 0; k < N_OWN; k++) rows[k] = (rf_token_row){.token = own_tokens[k], .pos = RF_POS_NEXT, .want_logits = 1};
    CHECK(rf_session_eval(r.s, rows, N_OWN, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t k = 0; k < N_OWN; k++) {
        float *out = NULL;
        CHECK(rf_session_get_logits(r.s, k, &out, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(out && memcmp(out, alone[k], r.n_vocab * sizeof *out) == 0, "%s on %s: token %u has other bits in a step of its sequence", what, device, k);
    }
    rig_close(&r);
}

/* Steps of as many rows, of a sequence each and then all of one, while positions outgrow a split of attention: on a GPU
 * that replays such steps, what was captured must not be used for more positions or for the other kind. */
static void growing_case(const char *device, const mg_buf *file) {
    enum { N = 3, APART = 8, STEPS = APART + N };
    static float alone[N][STEPS][MAX_VOCAB];
    rig r = {0};
    const rf_session_desc sd = {.n_ctx = 96, .n_seq_max = 2 * N, .n_batch = 64, .n_logits_max = N, .cache_type = RF_CACHE_F32};
    CHECK(open_rig(&r, file, device, &sd) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < N; i++) {
        CHECK(fill_sequence(&r, (int32_t)i, 60, i) == RF_OK && rf_session_copy(r.s, (int32_t)i, (int32_t)(N + i), &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t k = 0; k < STEPS; k++) {
            const rf_token_row row = {.token = (int32_t)((7 * i + 5 * k) % 64), .seq = (int32_t)(N + i), .pos = RF_POS_NEXT, .want_logits = 1};
            float *out = NULL;
            CHECK(rf_session_eval(r.s, &row, 1, &r.err) == RF_OK && rf_session_get_logits(r.s, 0, &out, &r.err) == RF_OK, "%s", r.err.text);
            if (out) memcpy(alone[i][k], out, r.n_vocab * sizeof *out);
        }
    }
    for (uint32_t t = 0; t < APART + N; t++) {
        const int apart = t < APART;
        rf_token_row rows[N];
        for (uint32_t j = 0; j < N; j++) {
            const uint32_t i = apart ? j : t - APART, k = apart ? t : APART + j;
            rows[j] = (rf_token_row){.token = (int32_t)((7 * i + 5 * k) % 64), .seq = (int32_t)i, .pos = RF_POS_NEXT, .want_logits = 1};
        }
        CHECK(rf_session_eval(r.s, rows, N, &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t j = 0; j < N; j++) {
            const float *expect = apart ? alone[j][t] : alone[t - APART][APART + j];
            float *out = NULL;
            CHECK(rf_session_get_logits(r.s, j, &out, &r.err) == RF_OK, "%s", r.err.text);
            CHECK(out && memcmp(out, expect, r.n_vocab * sizeof *out) == 0, "%s: row %u of step %u has other bits than alone", device, j, t);
        }
    }
    rig_close(&r);
}

static void test_growing_rows(void) {
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .n_kv_heads = 1, .seed = 12});
    for (uint32_t k = 0; device_name(k); k++) growing_case(device_name(k), &file);
    mg_free(&file);
}

/* Mixtures of experts with quantized weights, whose decode steps are fused. */
static const mg_options mixtures[] = {
    {.arch = "qwen3moe", .type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .n_experts = 9, .n_used = 3, .seed = 5},
    {.arch = "gpt-oss", .type = MG_MXFP4, .n_experts = 8, .n_used = 4, .bias = 1, .bias_out = 1, .bias_router = 1, .bias_experts = 1,
     .post_norm = 1, .sinks = 1, .window = 8, .seed = 6},
    {.arch = "glm4moe", .type = MG_Q8_0, .n_experts = 40, .n_used = 2, .n_shared = 1, .n_ff_shared = 32, .n_layers = 3, .n_dense = 1,
     .gating = 2, .bias_choice = 1, .seed = 7},
    {.arch = "qwen3moe", .type = MG_IQ4_XS, .n_experts = 9, .n_used = 3, .seed = 5},
    {.arch = "qwen3moe", .type = MG_IQ4_NL, .n_experts = 9, .n_used = 3, .seed = 5},
    {.arch = "qwen3moe", .type = MG_NVFP4, .n_experts = 9, .n_used = 3, .seed = 6},
};

/* GELUs, and norms of the results of attention and feed-forward. */
static const mg_options post_norms[] = {
    {.arch = "gemma2", .type = MG_Q8_0, .seed = 8},
    {.arch = "gemma3", .type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .window = 8, .n_layers = 3, .tied = 1, .seed = 9},
};

/* index: of the device; all types but the first six take turns where there are two. */
static void rows_on(const char *device, uint32_t index) {
    static const uint32_t types[] = {MG_Q4_K, MG_Q6_K, MG_Q8_0, MG_Q4_0, MG_IQ4_XS, MG_NVFP4, MG_Q4_1, MG_Q5_0, MG_Q5_1, MG_Q5_K, MG_Q2_K, MG_Q3_K, MG_F16, MG_IQ3_S, MG_IQ2_XS},
                          caches[] = {RF_CACHE_F16, RF_CACHE_F32, RF_CACHE_F16};
    static const char *const archs[] = {"llama", "qwen2", "qwen3"},
                      *const files[] = {"tests/family/qwen35moe.gguf", "tests/family/mixtral.gguf", "tests/family/gemma3-linear.gguf"};
    char what[64];
    for (uint32_t t = 0; t < RFT_COUNT(types); t++) {
        mg_buf file = {0};
        if (!RF_TYPE_IS_BUILT(types[t]) || (t > 5 && device_name(1) && t % 2 != index)) continue;
        mg_llama(&file, &(mg_options){.type = types[t], .arch = archs[t % 3], .seed = 3 + t, .n_kv_heads = t % 2 ? 1 : 0,
                                      .use_mix = t == 0, .mix_type = MG_Q6_K});
        snprintf(what, sizeof what, "type %u", types[t]);
        rows_case(&file, NULL, device, caches[t % 3], what);
        mg_free(&file);
    }
    for (uint32_t t = 0; t < RFT_COUNT(mixtures) + RFT_COUNT(post_norms); t++) {
        const mg_options *o = t < RFT_COUNT(mixtures) ? &mixtures[t] : &post_norms[t - RFT_COUNT(mixtures)];
        mg_buf file = {0};
        mg_llama(&file, o);
        rows_case(&file, NULL, device, RF_CACHE_F16, o->arch);
        mg_free(&file);
    }
    for (size_t i = 0; i < RFT_COUNT(files); i++) rows_case(NULL, files[i], device, RF_CACHE_F16, files[i]);
}

static void test_rows_alone(void) {
    rows_on("cpu", 0);
    for (uint32_t k = 0; k < 2 && device_name(k); k++) rows_on(device_name(k), k);
#ifdef RF_TEST_EMU
    static const struct {
        const char *what, *arch;
        uint32_t n_ff, gate, up;
    } by_mma[] = {{"q4_K by mma.sync", "llama", 2560, MG_Q4_K, MG_Q4_K}, {"q6_K by mma.sync", "llama", 4864, MG_Q6_K, MG_Q6_K},
                  {"q4_K beside q6_K by mma.sync", "llama", 512, MG_Q4_K, MG_Q6_K}, {"gemma3 by mma.sync", "gemma3", 512, MG_Q4_K, MG_Q4_K},
                  {"q5_K by mma.sync", "llama", 2560, MG_Q5_K, MG_Q5_K}, {"q4_0 by mma.sync", "llama", 4864, MG_Q4_0, MG_Q4_0},
                  {"q8_0 through shared memory", "llama", 4864, MG_Q8_0, MG_Q8_0}, {"q5_1 through shared memory", "llama", 4864, MG_Q5_1, MG_Q5_1},
                  {"iq4_xs through shared memory", "llama", 4864, MG_IQ4_XS, MG_IQ4_XS}, {"nvfp4 through shared memory", "llama", 2304, MG_NVFP4, MG_NVFP4},
                  {"q3_K through shared memory", "llama", 2304, MG_Q3_K, MG_Q3_K}, {"q2_K through shared memory", "llama", 4864, MG_Q2_K, MG_Q2_K},
                  {"iq3_s through shared memory", "llama", 2304, MG_IQ3_S, MG_IQ3_S}, {"iq2_xs through shared memory", "llama", 4864, MG_IQ2_XS, MG_IQ2_XS}};
    /* They have ways of their own, of 8 and of 16 columns; rows of more blocks than a tile has waves, and of more than twice as many. */
    for (uint32_t k = 0; k < 2 * RFT_COUNT(by_mma); k++) {
        const uint32_t t = k % RFT_COUNT(by_mma);
        mg_buf file = {0};
        hip_emu_matrix_unit(0, k < RFT_COUNT(by_mma) ? HIP_EMU_SM80 : HIP_EMU_SM90);
        mg_llama(&file, &(mg_options){.arch = by_mma[t].arch, .type = by_mma[t].gate, .use_mix = 2, .mix_type = by_mma[t].up, .seed = 9, .n_embd = 256, .n_ff = by_mma[t].n_ff, .n_layers = 1});
        rows_case(&file, NULL, "hip:0", RF_CACHE_F16, by_mma[t].what);
        mg_free(&file);
    }
    hip_emu_matrix_unit(0, HIP_EMU_WMMA11);
#endif
}

/* Nearly the same logits as the CPU device. */
static void options_as_cpu(const mg_options *options, size_t n) {
    static float cpu[5 * MAX_VOCAB], gpu[5 * MAX_VOCAB];
    int32_t prompt[11], cpu_ids[5], gpu_ids[5];
    for (uint32_t t = 0; t < n; t++) {
        mg_buf file = {0};
        rig r = {0}, c = {0};
        const rf_session_desc sd = {.n_ctx = 64};
        mg_llama(&file, &options[t]);
        mg_tokens(prompt, 11, 300, t);
        CHECK(open_rig(&c, &file, "cpu", &sd) == RF_OK && write_on(&c, prompt, 11, 4, cpu, cpu_ids) == RF_OK, "%s", c.err.text);
        for (uint32_t k = 0; device_name(k); k++) {
            CHECK(open_rig(&r, &file, device_name(k), &sd) == RF_OK && write_on(&r, prompt, 11, 4, gpu, gpu_ids) == RF_OK, "%s", r.err.text);
            double d = distance(gpu, cpu, (size_t)c.n_vocab * 5);
            CHECK(d <= INT8_TOLERANCE, "%s on %s: off by %g", options[t].arch, device_name(k), d);
            rig_close(&r);
        }
        rig_close(&c);
        mg_free(&file);
    }
}
static void test_mixtures(void) { options_as_cpu(mixtures, RFT_COUNT(mixtures)); }
static void test_post_norms(void) { options_as_cpu(post_norms, RFT_COUNT(post_norms)); }

/* Steps of more sequences than a decode step's launches take: on a GPU attention alone is that of a decode step. Nearly the
 * logits of the CPU device, for sequences of different lengths. */
enum { MANY = 40, MANY_STEPS = 2 };

static rf_result many_on(rig *r, float *logits) {
    rf_result res = RF_OK;
    for (uint32_t i = 0; i < MANY && res == RF_OK; i++)
        res = i < 3 ? fill_sequence(r, (int32_t)i, i == 1 ? 70 : 3 + 6 * i, i) : rf_session_copy(r->s, (int32_t)i % 3, (int32_t)i, &r->err);
    for (uint32_t k = 0; k < MANY_STEPS; k++) {
        rf_token_row rows[MANY];
        for (uint32_t i = 0; i < MANY; i++)
            rows[i] = (rf_token_row){.token = (int32_t)((3 * i + 7 * k) % 64), .seq = (int32_t)i, .pos = RF_POS_NEXT, .want_logits = 1};
        if (res == RF_OK) res = rf_session_eval(r->s, rows, MANY, &r->err);
        for (uint32_t i = 0; i < MANY && res == RF_OK; i++) {
            float *out = NULL;
            res = rf_session_get_logits(r->s, i, &out, &r->err);
            if (res == RF_OK) memcpy(logits + (size_t)(k * MANY + i) * r->n_vocab, out, r->n_vocab * sizeof *out);
        }
    }
    return res;
}

static void test_many_sequences(void) {
    static const char *const files[] = {NULL, "tests/family/qwen35moe.gguf"};
    static float cpu[MANY * MANY_STEPS * MAX_VOCAB], gpu[MANY * MANY_STEPS * MAX_VOCAB];
    const rf_session_desc sd = {.n_ctx = 96, .n_seq_max = MANY, .n_batch = 80, .n_logits_max = MANY};
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .n_kv_heads = 1, .seed = 8});
    for (size_t i = 0; i < RFT_COUNT(files); i++)
        for (uint32_t k = 0; device_name(k); k++) {
            rig r = {0}, c = {0};
            if (files[i]) {
                CHECK(rf_gguf_open(files[i], NULL, &c.g, &c.err) == RF_OK, "%s", c.err.text);
                CHECK(rf_gguf_open(files[i], NULL, &r.g, &r.err) == RF_OK, "%s", r.err.text);
            }
            CHECK(open_rig(&c, &file, "cpu", &sd) == RF_OK && many_on(&c, cpu) == RF_OK, "%s", c.err.text);
            CHECK(open_rig(&r, &file, device_name(k), &sd) == RF_OK && many_on(&r, gpu) == RF_OK, "%s", r.err.text);
            const double d = distance(gpu, cpu, (size_t)c.n_vocab * MANY * MANY_STEPS);
            CHECK(d <= INT8_TOLERANCE, "%s on %s: off by %g", files[i] ? files[i] : "llama", device_name(k), d);
            rig_close(&r);
            rig_close(&c);
        }
    mg_free(&file);
}

/* Steps of rows that decode and of a prompt of another sequence, before or behind them: on a GPU each kind has its own
 * attention if those that decode come first. Nearly the logits of the CPU device. */
enum { MIXED_DECODE = 20, MIXED_STEPS = 4, MIXED_PROMPT = 70, MIXED_LOGITS = MIXED_STEPS * (MIXED_DECODE + 1) };

static rf_result mixed_on(rig *r, float *logits) {
    static const struct { uint32_t n_decode, n_prompt, is_first; } steps[MIXED_STEPS] = {
        {1, 17, 0}, {2, 30, 0}, {5, MIXED_PROMPT, 0}, {MIXED_DECODE, MIXED_PROMPT, 1}};
    rf_result res = RF_OK;
    for (uint32_t i = 0; i < MIXED_DECODE && res == RF_OK; i++) res = fill_sequence(r, (int32_t)i, 3 + (13 * i) % 77, i);
    for (uint32_t k = 0, at = 0; k < MIXED_STEPS; k++) {
        rf_token_row rows[MIXED_DECODE + MIXED_PROMPT];
        const uint32_t n = steps[k].n_decode, n_prompt = steps[k].n_prompt, first = steps[k].is_first ? n_prompt : 0;
        for (uint32_t i = 0; i < n; i++)
            rows[first + i] = (rf_token_row){.token = (int32_t)((3 * i + 7 * k) % 64), .seq = (int32_t)i, .pos = RF_POS_NEXT, .want_logits = 1};
        for (uint32_t i = 0; i < n_prompt; i++)
            rows[first ? i : n + i] = (rf_token_row){.token = (int32_t)((5 * i + k) % 64), .seq = (int32_t)(MIXED_DECODE + k), .pos = RF_POS_NEXT, .want_logits = i + 1 == n_prompt};
        if (res == RF_OK) res = rf_session_eval(r->s, rows, n + n_prompt, &r->err);
        for (uint32_t i = 0; i <= n && res == RF_OK; i++, at++) {
            float *out = NULL;
            res = rf_session_get_logits(r->s, i, &out, &r->err);
            if (res == RF_OK) memcpy(logits + (size_t)at * r->n_vocab, out, r->n_vocab * sizeof *out);
        }
    }
    return res;
}

static void test_mixed_steps(void) {
    static const struct { const char *arch; uint32_t cache; } models[] = {{"llama", RF_CACHE_F16}, {"qwen3", RF_CACHE_Q8_0}, {"gemma3", RF_CACHE_F16}};
    static float cpu[MIXED_LOGITS * MAX_VOCAB], gpu[MIXED_LOGITS * MAX_VOCAB];
    for (size_t i = 0; i < RFT_COUNT(models); i++) {
        const rf_session_desc sd = {.n_ctx = 96, .n_seq_max = MIXED_DECODE + MIXED_STEPS, .n_batch = MIXED_DECODE + MIXED_PROMPT,
                                    .n_logits_max = MIXED_DECODE + 1, .cache_type = models[i].cache};
        mg_buf file = {0};
        mg_llama(&file, &(mg_options){.arch = models[i].arch, .type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .seed = 5 + i});
        for (uint32_t k = 0; device_name(k); k++) {
            rig r = {0}, c = {0};
            if (i && device_name(1) && i % 2 != k) continue;
            memset(cpu, 0, sizeof cpu), memset(gpu, 0, sizeof gpu);
            CHECK(open_rig(&c, &file, "cpu", &sd) == RF_OK && mixed_on(&c, cpu) == RF_OK, "%s", c.err.text);
            CHECK(open_rig(&r, &file, device_name(k), &sd) == RF_OK && mixed_on(&r, gpu) == RF_OK, "%s", r.err.text);
            const double d = distance(gpu, cpu, (size_t)c.n_vocab * MIXED_LOGITS);
            CHECK(d <= INT8_TOLERANCE, "%s on %s: off by %g", models[i].arch, device_name(k), d);
            rig_close(&r);
            rig_close(&c);
        }
        mg_free(&file);
    }
}

/* Rows beyond whole tiles of a prompt's products are a micro-batch of their own: the bits are those of two calls. */
static void test_rows_beyond_tiles(void) {
    enum { FEW = 4, MAX_ROWS = 256 + FEW };
    static float logits[2][MAX_VOCAB];
    uint32_t tiles[2];
    const rf_session_desc sd = {.n_ctx = 320, .n_batch = MAX_ROWS + 9};
    rf_token_row rows[MAX_ROWS];
    mg_buf file = {0};
    rig r = {0};
#ifdef RF_TEST_EMU
    hip_emu_matrix_unit(0, HIP_EMU_SM90);
#endif
    mg_llama(&file, &(mg_options){.type = MG_Q4_K, .n_layers = 1, .seed = 3});
    CHECK(open_rig(&r, &file, "hip:0", &sd) == RF_OK, "%s", r.err.text);
    memcpy(tiles, rf_session_get_stats(r.s).tile_rows, sizeof tiles);
#ifdef RF_TEST_EMU
    CHECK(tiles[0] == 64 && tiles[1] == 256, "tile_rows: %u, %u", tiles[0], tiles[1]);
#endif
    for (uint32_t k = 0; k < 2 && tiles[k] && tiles[k] + FEW <= MAX_ROWS; k++) {
        const uint32_t n = tiles[k] + FEW;
        for (uint32_t i = 0; i < n; i++)
            rows[i] = (rf_token_row){.token = (int32_t)(7 * i % 64), .pos = RF_POS_NEXT, .want_logits = i + 1 == n};
        for (uint32_t parts = 1; parts <= 2; parts++) {
            float *out = NULL;
            CHECK(rf_session_truncate(r.s, 0, 0, NULL, &r.err) == RF_OK, "%s", r.err.text);
            if (parts == 2) CHECK(rf_session_eval(r.s, rows, FEW, &r.err) == RF_OK, "%s", r.err.text);
            CHECK(rf_session_eval(r.s, parts == 2 ? rows + FEW : rows, parts == 2 ? tiles[k] : n, &r.err) == RF_OK, "%s", r.err.text);
            CHECK(rf_session_get_logits(r.s, 0, &out, &r.err) == RF_OK, "%s", r.err.text);
            if (out) memcpy(logits[parts - 1], out, r.n_vocab * sizeof *out);
        }
        CHECK(memcmp(logits[0], logits[1], r.n_vocab * sizeof **logits) == 0, "%u rows: other bits than of two calls", n);
    }
    rig_close(&r);
    mg_free(&file);
#ifdef RF_TEST_EMU
    hip_emu_matrix_unit(0, HIP_EMU_WMMA11);
#endif
}

/* The model of the two tests below: in emulation a small one. */
static const mg_buf *repeated_model(void) {
#ifdef RF_TEST_EMU
    static mg_buf file;
    if (!file.n) mg_llama(&file, &(mg_options){.type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .seed = 4});
    return &file;
#else
    return NULL;
#endif
}

static void test_repeats(void) {
    static float first[(DECODED + 1) * MAX_VOCAB], again[(DECODED + 1) * MAX_VOCAB];
    int32_t prompt[20], ids[2][DECODED + 1];
    for (uint32_t k = 0; device_name(k); k++) {
        rig r = {0};
        int different = 0;
        REQUIRE(open_rig(&r, repeated_model(), device_name(k), NULL) == RF_OK && r.n_vocab <= MAX_VOCAB, "%s", r.err.text);
        mg_tokens(prompt, 20, r.n_vocab, 1);
        for (int i = 0; i < REPEATS; i++) {
            rf_result res = write_on(&r, prompt, 20, DECODED, i ? again : first, ids[i > 0]);
            CHECK(res == RF_OK, "run %d: %s", i, r.err.text);
            if (i) different += memcmp(first, again, (size_t)(DECODED + 1) * r.n_vocab * sizeof *first) != 0 || memcmp(ids[0], ids[1], sizeof ids[0]) != 0;
        }
        CHECK(different == 0, "%s: %d of %d repeated runs give other bits", device_name(k), different, REPEATS);
        printf("    %s: %d runs\n", device_name(k), REPEATS);
        rig_close(&r);
    }
}

/* ---- two sessions in two threads ---- */

typedef struct writer {
    rig r;
    int32_t prompt[20], ids[DECODED + 1];
    float *alone, *found;
    int n_different;
    rf_result res;
} writer;

static void *writer_main(void *arg) {
    writer *w = (writer *)arg;
    size_t bytes = (size_t)(DECODED + 1) * w->r.n_vocab * sizeof *w->found;
    for (int i = 0; i < THREAD_REPEATS && w->res == RF_OK; i++) {
        w->res = write_on(&w->r, w->prompt, 20, DECODED, w->found, w->ids);
        w->n_different += memcmp(w->found, w->alone, bytes) != 0;
    }
    return NULL;
}

static void test_two_threads(void) {
    for (uint32_t k = 0; device_name(k); k++) {
        rig shared = {0};
        static writer w[2];
        memset(w, 0, sizeof w);
        REQUIRE(open_rig(&shared, repeated_model(), device_name(k), NULL) == RF_OK, "%s", shared.err.text);
        for (int i = 0; i < 2; i++) {
            size_t n = (size_t)(DECODED + 1) * shared.n_vocab;
            w[i].r = shared;
            w[i].r.s = NULL;
            w[i].alone = (float *)malloc(n * sizeof(float));
            w[i].found = (float *)malloc(n * sizeof(float));
            mg_tokens(w[i].prompt, 20, shared.n_vocab, 10 + (uint64_t)i);
            REQUIRE(w[i].alone && w[i].found && rf_session_open(shared.m, NULL, &w[i].r.s, NULL) == RF_OK, "no session");
            CHECK(write_on(&w[i].r, w[i].prompt, 20, DECODED, w[i].alone, w[i].ids) == RF_OK, "%s", w[i].r.err.text);
        }
        CHECK(memcmp(w[0].alone, w[1].alone, shared.n_vocab * sizeof(float)) != 0, "both threads do the same");
        CHECK(rf_model_clear_device_cache(shared.m, NULL, NULL) == RF_OK, "clear"); /* both load at once, too */
        pthread_t id[2];
        for (int i = 0; i < 2; i++) REQUIRE(pthread_create(&id[i], NULL, writer_main, &w[i]) == 0, "thread");
        for (int i = 0; i < 2; i++) pthread_join(id[i], NULL);
        for (int i = 0; i < 2; i++) {
            CHECK(w[i].res == RF_OK && w[i].n_different == 0, "%s thread %d: %d of %d runs differ from the session alone: %s", device_name(k), i,
                  w[i].n_different, THREAD_REPEATS, w[i].r.err.text);
            rf_session_close(w[i].r.s, NULL);
            free(w[i].alone), free(w[i].found);
        }
        rig_close(&shared);
    }
}

/* ---- weights beyond the budget ---- */

static rf_result open_within(rig *r, const mg_buf *file, const char *device, const rf_model_desc *md) {
    static const rf_session_desc sd = {.n_ctx = 32};
    rf_result res = rf_gguf_open_memory(file->data, file->n, NULL, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open(device, NULL, &r->d, &r->err);
    if (res == RF_OK) res = rf_model_open(r->g, r->d, md, &r->m, &r->err);
    if (res == RF_OK) res = rf_session_open(r->m, &sd, &r->s, &r->err);
    if (res == RF_OK) r->n_vocab = rf_model_get_info(r->m).n_vocab;
    return res;
}

/* A short life within a budget: a prompt of one token, and the token after it. */
enum { WITHIN_VOCAB = 310, WITHIN_STEPS = 1 };
static const int32_t within_prompt[1] = {5};
typedef struct within {
    float logits[(WITHIN_STEPS + 1) * WITHIN_VOCAB];
    int32_t ids[WITHIN_STEPS + 1];
} within;

static rf_result write_within(rig *r, within *out) { return write_on(r, within_prompt, 1, WITHIN_STEPS, out->logits, out->ids); }

/* What all the weights take on a device, and what it writes with them there. */
static uint64_t all_resident(const mg_buf *file, const char *device, within *want) {
    rig r = {0};
    rf_forecast f = {0};
    CHECK(open_within(&r, file, device, NULL) == RF_OK && rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.streamed_bytes == 0, "%s", r.err.text);
    CHECK(write_within(&r, want) == RF_OK, "%s", r.err.text);
    CHECK(rf_model_get_loading_stats(r.m).device_bytes == f.weight_bytes, "%llu bytes, %llu were forecast",
          (unsigned long long)rf_model_get_loading_stats(r.m).device_bytes, (unsigned long long)f.weight_bytes);
    rig_close(&r);
    return f.weight_bytes;
}

/* Half and a tenth of the weights: the same bits as with all of them there, whatever reads them, from the file or from
 * pinned memory, evicted and loaded again; no more than the budget is allocated. */
static void test_budgets(void) {
    static const uint32_t percents[] = {100, 50, 10};
    static within want, got;
    mg_buf file = {0}; /* many thin layers: a tenth of the bytes holds the widest of them */
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 28, .n_vocab = WITHIN_VOCAB, .seed = 11});
    for (uint32_t k = 0; device_name(k); k++) {
        uint64_t all = all_resident(&file, device_name(k), &want);
        for (uint32_t i = 0; i < RFT_COUNT(percents); i++) {
            rig r = {0};
            rf_forecast f;
            uint32_t percent = percents[i];
            if (k && percent != 10) continue; /* what another device may do differently is in its kernels */
            int pinned = (i + k) % 2 == 0;
            rf_model_desc md = {.budget_bytes = all * percent / 100, .n_readers = pinned ? 16 : 1, .pinned_bytes = pinned ? all : 0,
                                .load_policy = pinned ? RF_LOAD_PRELOAD : RF_LOAD_LAZY};
            CHECK(open_within(&r, &file, device_name(k), &md) == RF_OK && rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK, "%u %%: %s", percent, r.err.text);
            for (int again = 0; r.s && again <= (percent == 50); again++) {
                CHECK(write_within(&r, &got) == RF_OK, "%u %%: %s", percent, r.err.text);
                CHECK(memcmp(&want, &got, sizeof want) == 0, "%s, %u %%: other bits", device_name(k), percent);
                rf_loading_stats st = rf_model_get_loading_stats(r.m);
                CHECK(st.device_bytes == f.weight_bytes && st.device_bytes <= md.budget_bytes, "%u %%: %llu bytes", percent, (unsigned long long)st.device_bytes);
                CHECK((st.evictions > 0) == (percent < 100 || again), "%u %%: %llu evictions", percent, (unsigned long long)st.evictions);
                CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "clear");
            }
            rig_close(&r);
        }
    }
    mg_free(&file);
}

/* A file in memory of which the bytes of one tensor come late, when the layers before have been launched. */
static const mg_buf *slow_file;
static rf_tensor_info slow_tensor;

static int64_t open_slow(const char *path, uint64_t *size_bytes, void *user) {
    (void)path, (void)user;
    *size_bytes = slow_file->n;
    return 0;
}
static int64_t read_slow(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    const uint64_t from = slow_tensor.offset_bytes, end = from + slow_tensor.size_bytes;
    (void)handle, (void)user;
    if (offset < end && offset + n > from) nanosleep(&(struct timespec){.tv_nsec = 20 * 1000000}, NULL);
    memcpy(dst, slow_file->data + offset, n);
    return (int64_t)n;
}
static void close_slow(int64_t handle, void *user) { (void)handle, (void)user; }

/* Weights that leave between two tokens and come back one by one change no bits: rope's factors, which the first layer
 * wants, are not there when the step begins. */
static void test_cleared_between(void) {
    static float row[2][4 * WITHIN_VOCAB];
    static const int32_t tokens[] = {5, 17, 9, 30};
    const rf_gguf_desc gd = {.no_map = 1, .io = {.open_fn = open_slow, .read_fn = read_slow, .close_fn = close_slow}};
    const rf_session_desc sd = {.n_ctx = 32};
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_embd = 128, .n_heads = 4, .n_ff = 128, .n_vocab = WITHIN_VOCAB, .rope_freqs = 1, .seed = 12});
    slow_file = &file;
    for (uint32_t k = 0; device_name(k); k++) {
        for (int clears = 0; clears < 2; clears++) {
            rig r = {0};
            slow_tensor = (rf_tensor_info){0};
            REQUIRE(rf_gguf_open("slow", &gd, &r.g, &r.err) == RF_OK && rf_gguf_find_tensor(r.g, "rope_freqs.weight", &slow_tensor, NULL) == RF_OK, "%s", r.err.text);
            REQUIRE(open_rig(&r, NULL, device_name(k), &sd) == RF_OK, "%s", r.err.text);
            for (uint32_t i = 0; i < 4; i++) {
                float *logits = NULL;
                REQUIRE(rf_session_forward(r.s, &tokens[i], 1, &logits, &r.err) == RF_OK, "%s", r.err.text);
                memcpy(row[clears] + i * WITHIN_VOCAB, logits, WITHIN_VOCAB * sizeof *logits);
                if (clears) CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK, "clear");
            }
            rig_close(&r);
        }
        CHECK(memcmp(row[0], row[1], sizeof row[0]) == 0, "%s: other bits", device_name(k));
    }
    mg_free(&file);
}

/* A model whose experts are cached: the same bits with room for all, for a third and for a tenth of the bytes. With all
 * there the host never asks what was chosen; else once for each layer of a step. */
static void test_experts(void) {
    enum { LAYERS = 20, EVALS = WITHIN_STEPS + 1 };
    static const uint32_t percents[] = {100, 30, 10};
    static within want, got;
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .arch = "qwen3moe", .n_layers = LAYERS, .n_experts = 8, .n_ff_expert = 384,
                                  .n_vocab = WITHIN_VOCAB, .use_mix = 1, .mix_type = MG_Q8_0, .seed = 13});
    for (uint32_t k = 0; device_name(k) && k < 1; k++) { /* the others have other kernels, not another host */
        uint64_t all = all_resident(&file, device_name(k), &want);
        for (uint32_t i = 0; i < RFT_COUNT(percents); i++) {
            rig r = {0};
            rf_forecast f;
            uint32_t percent = percents[i], n_runs = percent == 30 ? 2 : 1;
            rf_model_desc md = {.budget_bytes = all * percent / 100, .n_readers = 2, .pinned_bytes = i == k ? all : 0, .load_policy = RF_LOAD_PRELOAD};
            REQUIRE(open_within(&r, &file, device_name(k), &md) == RF_OK && rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK, "%u %%: %s", percent, r.err.text);
            CHECK((f.expert_cache_bytes > 0) == (percent < 100) && f.streamed_bytes == 0, "%u %%: no cache", percent);
            for (uint32_t again = 0; again < n_runs; again++) {
                CHECK(write_within(&r, &got) == RF_OK, "%u %%: %s", percent, r.err.text);
                CHECK(memcmp(&want, &got, sizeof want) == 0, "%s, %u %%: other bits", device_name(k), percent);
            }
            uint64_t asked = 0, chosen = 0;
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                rf_expert_stats st = rf_model_get_expert_stats(r.m, layer);
                asked += st.round_trips, chosen += st.hits + st.misses;
            }
            CHECK(asked == (percent < 100 ? n_runs * EVALS * LAYERS : 0) && chosen == 2 * asked, "%u %%: %llu round trips, %llu choices", percent,
                  (unsigned long long)asked, (unsigned long long)chosen);
            CHECK(rf_model_get_loading_stats(r.m).device_bytes <= md.budget_bytes, "%u %%: beyond the budget", percent);
            rig_close(&r);
        }
        rig r = {0}; /* experts that are not there computed by the CPU */
        const rf_model_desc md = {.budget_bytes = all * 30 / 100, .expert_cpu_below = 1000, .load_policy = RF_LOAD_PRELOAD};
        uint64_t on_cpu = 0;
        REQUIRE(open_within(&r, &file, device_name(k), &md) == RF_OK && write_within(&r, &got) == RF_OK, "%s", r.err.text);
        for (uint32_t layer = 0; layer < LAYERS; layer++) on_cpu += rf_model_get_expert_stats(r.m, layer).on_cpu;
        const double off = distance(got.logits, want.logits, RFT_COUNT(got.logits));
        CHECK(on_cpu > 0 && off <= INT8_TOLERANCE && memcmp(got.ids, want.ids, sizeof got.ids) == 0, "%llu on the CPU, off by %g", (unsigned long long)on_cpu, off);
        printf("    %llu experts on the CPU: off by %.2g\n", (unsigned long long)on_cpu, off);
        rig_close(&r);
    }
    mg_free(&file);
}

#ifdef RF_TEST_EMU

/* ---- failing calls ---- */

static int leaks(hip_emu_counts a, hip_emu_counts b) {
    return a.allocations != b.allocations || a.host_allocations != b.host_allocations || a.streams != b.streams || a.events != b.events;
}

/* Open, load, a prompt, a token, logits; what is open stays open in r. */
static rf_result whole_life(rig *r, const mg_buf *file, float *out) {
    static const int32_t tokens[] = {5, 6, 7, 8};
    rf_session_desc sd = {.n_ctx = 16, .n_seq_max = 2, .n_batch = 4};
    rf_result res = open_rig(r, file, "hip:0", &sd);
    if (res == RF_OK) res = rf_model_load_tensor(r->m, "blk.0.ffn_up.weight", &r->err);
    if (res == RF_OK) res = rf_session_truncate(r->s, 0, 0, NULL, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, tokens, 3, NULL, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, tokens + 3, 1, NULL, &r->err);
    if (res == RF_OK) res = rf_session_copy(r->s, 0, 1, &r->err);
    if (res != RF_OK) return res;
    float *logits;
    res = rf_session_get_logits(r->s, 0, &logits, &r->err);
    if (res == RF_OK) memcpy(out, logits, r->n_vocab * sizeof *out);
    return res;
}

/* What failed is named: the op, the weight, or what was asked for. */
static int names_its_object(const char *text) {
    const char *object = strstr(text, " for ");
    if (strncmp(text, "hip", 3) != 0) return 0;
    if (strstr(text, "hipLaunchKernel")) return strstr(text, "for op ") || strstr(text, "for blk.") || strstr(text, "for output") || strstr(text, "for token_embd") || strstr(text, "for a step") || strstr(text, "for a probe") || strstr(text, "for a check of the matrix units");
    return (object && object[5]) || strstr(text, "no usable GPU") != NULL;
}

/* The n-th call of the runtime fails, once or with all after it, for every n up to success: a code and a text that
 * names the object, nothing left on the device or pinned, and all works afterwards. */
static void test_failing_calls(void) {
    mg_buf file = {0};
    static float want[MAX_VOCAB], found[MAX_VOCAB];
    rig r = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 1, .n_vocab = 300, .seed = 8});
    hip_emu_counts before = hip_emu_get_counts();
    REQUIRE(whole_life(&r, &file, want) == RF_OK, "%s", r.err.text);
    uint64_t n_calls = hip_emu_get_counts().calls - before.calls; /* without those of closing, which report nothing */
    rig_close(&r);
    REQUIRE(!leaks(before, hip_emu_get_counts()), "a leak without any failure");
    for (int forever = 0; forever < 2; forever++) {
        uint32_t noticed = 0, ops = 0, tensors = 0;
        for (uint64_t n = 1; n <= n_calls; n++) {
            hip_emu_fail_call(n, forever);
            rf_result res = whole_life(&r, &file, found);
            if (!forever) hip_emu_fail_call(0, 0);
            noticed += res != RF_OK;
            if (res == RF_OK) CHECK(memcmp(want, found, r.n_vocab * sizeof *want) == 0, "call %d failed unnoticed and gave other logits", (int)n);
            else CHECK(res == RF_ERR_DEVICE && r.err.code == res && r.err.sys && names_its_object(r.err.text), "call %d: %s: %s", (int)n, rf_result_name(res), r.err.text);
            ops += strstr(r.err.text, "for op ") != NULL;
            tensors += strstr(r.err.text, "for blk.0.") != NULL;
            if (res != RF_OK && !forever && n % 4 == 0) /* the same objects go on */
                CHECK(whole_life(&r, &file, found) == RF_OK && memcmp(want, found, r.n_vocab * sizeof *want) == 0, "after call %d: %s", (int)n, r.err.text);
            rig_close(&r);
            hip_emu_fail_call(0, 0);
            REQUIRE(!leaks(before, hip_emu_get_counts()), "call %d%s: a leak", (int)n, forever ? " and all later" : "");
        }
        CHECK(noticed > n_calls / 2 && ops > 10 && tensors > 10, "%u of %d noticed, %u name an op, %u a tensor", noticed, (int)n_calls, ops, tensors);
        printf("    %s: %d calls, %u failures reported, %u name an op, %u a tensor\n", forever ? "for ever" : "once", (int)n_calls, noticed, ops, tensors);
    }
    REQUIRE(whole_life(&r, &file, found) == RF_OK && memcmp(want, found, r.n_vocab * sizeof *want) == 0, "%s", r.err.text);
    rig_close(&r);
    mg_free(&file);
}

/* A call fails while weights go through the ring, every few calls another one: the evaluation reports it, the sequence is
 * as it was, and the next one has the right bits. */
static void test_failing_ring(void) {
    static within want, got;
    mg_buf file = {0};
    rig r = {0};
    uint32_t noticed = 0, n = 0;
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 8, .n_vocab = WITHIN_VOCAB, .seed = 12});
    hip_emu_counts before = hip_emu_get_counts();
    uint64_t all = all_resident(&file, "hip:0", &want);
    REQUIRE(open_within(&r, &file, "hip:0", &(rf_model_desc){.budget_bytes = all / 2, .n_readers = 2}) == RF_OK, "%s", r.err.text);
    CHECK(write_within(&r, &got) == RF_OK && memcmp(&want, &got, sizeof want) == 0, "%s", r.err.text);
    uint64_t start = hip_emu_get_counts().calls;
    CHECK(write_within(&r, &got) == RF_OK, "%s", r.err.text);
    uint64_t n_calls = hip_emu_get_counts().calls - start;
    for (uint64_t call = 1; call < n_calls; call += 1 + n_calls / 16, n++) {
        hip_emu_fail_call(call, 0);
        rf_result res = write_within(&r, &got);
        hip_emu_fail_call(0, 0);
        noticed += res != RF_OK;
        CHECK(res == RF_OK || (res == RF_ERR_DEVICE && r.err.sys && names_its_object(r.err.text)), "call %d: %s: %s", (int)call, rf_result_name(res), r.err.text);
        CHECK(res != RF_OK || memcmp(&want, &got, sizeof want) == 0, "call %d failed unnoticed and gave other bits", (int)call);
        const int late = res == RF_OK; /* the call may have been a reader's, for the next evaluation: that one reports it */
        res = write_within(&r, &got);
        if (late && res == RF_ERR_DEVICE) noticed++, res = write_within(&r, &got);
        CHECK(res == RF_OK && memcmp(&want, &got, sizeof want) == 0, "after call %d: %s", (int)call, r.err.text);
    }
    CHECK(noticed > n / 4, "%u of %u failures noticed", noticed, n); /* how many depends on the readers' turns: 8 to 15 of 16 */
    printf("    %d calls, %u of %u failures reported\n", (int)n_calls, noticed, n);
    rig_close(&r);
    mg_free(&file);
    CHECK(!leaks(before, hip_emu_get_counts()), "a leak");
}
#endif

/* ---- drawing tokens ---- */

/* xoroshiro128++: what a sampler with this state draws next. */
static uint64_t next_random(const uint64_t state[2]) {
    const uint64_t sum = state[0] + state[1];
    return (sum << 17 | sum >> 47) + state[0];
}
static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-53;
}

/* Logits of several kinds: normal, few values (ties), nearly flat, numbers and others mixed, all equal, one above the rest. */
static void fill_logits(float *logits, uint32_t n, uint32_t kind, uint64_t *state) {
    static const uint32_t odd[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u, 0x80000000u, 0, 0xff7fffffu, 0x00000001u};
    for (uint32_t i = 0; i < n; i++) {
        double x = -6;
        for (int k = 0; k < 12; k++) x += uniform(state);
        if (kind == 1) x = floor(2 * x) / 2;
        if (kind == 2) x *= 1e-3;
        if (kind == 4) x = 0;
        logits[i] = (float)(2 * x);
        if (kind == 3 && uniform(state) < 0.4) memcpy(&logits[i], &odd[1 + (int)(7 * uniform(state))], sizeof *logits);
        if (kind == 5 && i == n / 2) logits[i] = 40;
    }
    if (kind == 3 && n > 2) memcpy(&logits[n / 3], &odd[uniform(state) < 0.5], sizeof *logits);
}

/* A sampler's next choice as the device gets it. */
static rf_draw draw_of(const rf_sampler *s, uint32_t row, uint32_t first_change) {
    const rf_sampler_desc *d = &s->desc;
    rf_draw draw = {.scale = INFINITY, .row = row, .min_gap = -INFINITY, .first_change = first_change, .repeat = d->repeat_penalty > 0 ? d->repeat_penalty : 1,
                    .frequency = d->frequency_penalty, .presence = d->presence_penalty};
    if (d->temperature <= 0) return draw;
    draw.scale = 1.4426950408889634 / (double)d->temperature, draw.random = next_random(s->rng), draw.top_k = d->top_k;
    if (d->min_p > 0) draw.min_gap = logf(d->min_p);
    if (d->top_p > 0) draw.top_p = (uint32_t)fmax((double)d->top_p * 0x1p32, 1);
    return draw;
}

/* Biases of the row's first, last and largest token, and of one above all; some tokens again and again. */
static uint32_t change_draw(rf_sampler *s, rf_draw *draw, rf_draw_change *changes, rf_logit_bias *bias, uint32_t n, int32_t largest) {
    const int32_t tokens[4] = {0, (int32_t)n - 1, largest < 0 ? 0 : largest, (int32_t)(n / 2)};
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t k = 0;
        while (k < draw->n_changes && changes[k].token != (uint32_t)tokens[i]) k++;
        if (k < draw->n_changes) continue;
        const float b = i == 2 ? -3 : i == 3 ? 4.7f : i ? -INFINITY : 0.1f;
        changes[draw->n_changes] = (rf_draw_change){.token = (uint32_t)tokens[i], .bias = b};
        bias[draw->n_changes++] = (rf_logit_bias){tokens[i], b};
    }
    s->desc.bias = bias, s->desc.n_bias = draw->n_changes;
    for (uint32_t i = 0; i < 40; i++) {
        const int32_t token = i % 3 ? tokens[2] : (int32_t)(i * 7 % n);
        uint32_t k = 0;
        while (k < draw->n_changes && changes[k].token != (uint32_t)token) k++;
        if (k == draw->n_changes) changes[draw->n_changes++] = (rf_draw_change){.token = (uint32_t)token};
        changes[k].count++;
        rf_sampler_accept(s, token);
    }
    return draw->n_changes;
}

/* The device draws from rows; the host's sampler must choose the same tokens, and the logits must be what they were. */
static void draw_case(rf_device *d, uint32_t n, uint32_t kind, const rf_sampler_desc *descs, uint32_t n_descs) {
    enum { DRAWS = 30 };
    rf_dev *dev;
    const rf_device_api *api = rf_device_get_api(d, &dev);
    const uint64_t row_bytes = n * sizeof(float), all = DRAWS * row_bytes;
    const uint64_t argmax_at = (all + 255) / 256 * 256, draws_at = argmax_at + 256, changes_at = draws_at + 4096,
                   work_at = changes_at + (sizeof(rf_draw_change[DRAWS][RF_DRAW_MAX_CHANGES]) + 255) / 256 * 256;
    float *logits = malloc(all), *copy = malloc(all);
    uint64_t state = n * 6 + kind;
    int32_t argmax[DRAWS];
    rf_draw draws[DRAWS];
    rf_draw_change changes[DRAWS * RF_DRAW_MAX_CHANGES];
    rf_logit_bias bias[DRAWS][4];
    rf_sampler samplers[DRAWS];
    rf_queue *q = NULL;
    rf_mem mem = {0};
    rf_ticket t = {0};
    rf_error err = {0};
    uint32_t n_changes = 0;
    for (uint32_t row = 0; row < DRAWS; row++) {
        const float *values = logits + (size_t)row * n;
        if (row < 3) fill_logits(logits + (size_t)row * n, n, kind, &state);
        else memcpy(logits + (size_t)row * n, logits + (size_t)(row % 3) * n, row_bytes);
        argmax[row] = -1;
        for (uint32_t i = 0; i < n; i++)
            if (values[i] > (argmax[row] < 0 ? -INFINITY : values[argmax[row]])) argmax[row] = (int32_t)i;
    }
    for (uint32_t i = 0; i < DRAWS; i++) {
        rf_sampler_desc desc = descs[i % n_descs];
        desc.seed = i;
        REQUIRE(rf_sampler_init(&samplers[i], &desc, &err) == RF_OK, "%s", err.text);
        draws[i] = draw_of(&samplers[i], 7 * i % DRAWS, n_changes);
        if (i % 2 || desc.presence_penalty != 0 || desc.temperature <= 0)
            n_changes += change_draw(&samplers[i], &draws[i], changes + n_changes, bias[i], n, argmax[draws[i].row]);
    }
    memcpy(copy, logits, all);
    rf_result r = api->queue_create(dev, &q, &err);
    if (r == RF_OK) r = api->mem_create(dev, work_at + rf_draw_work_bytes(n, DRAWS), &mem, &err);
    if (r == RF_OK) r = api->mem_write(q, &mem, 0, logits, all, &t, &err);
    if (r == RF_OK) r = api->mem_write(q, &mem, argmax_at, argmax, sizeof argmax, &t, &err);
    if (r == RF_OK) r = api->mem_write(q, &mem, draws_at, draws, sizeof draws, &t, &err);
    if (r == RF_OK) r = api->mem_write(q, &mem, changes_at, changes, sizeof changes, &t, &err);
    const rf_draw_batch batch = {.argmax = argmax_at, .draws = draws_at, .changes = changes_at, .work = work_at, .n_rows = DRAWS, .n_vocab = n,
                                 .n_draws = DRAWS, .n_changes = n_changes};
    if (r == RF_OK) r = api->draw(q, &mem, &batch, &t, &err);
    if (r == RF_OK) r = api->mem_read(q, &mem, draws_at, draws, sizeof draws, &t, &err);
    if (r == RF_OK) r = api->mem_read(q, &mem, 0, logits, all, &t, &err);
    if (r == RF_OK) r = api->ticket_wait(&t, 60000, &err);
    CHECK(r == RF_OK && memcmp(copy, logits, all) == 0, "logits are as they were: %s", err.text);
    for (uint32_t i = 0; r == RF_OK && i < DRAWS; i++) {
        int32_t want = -1;
        const rf_sampler_desc *s = &samplers[i].desc;
        const rf_result sampled = rf_sampler_sample(&samplers[i], copy + (size_t)draws[i].row * n, n, &want, NULL);
        CHECK((sampled == RF_OK) == (draws[i].token >= 0) && draws[i].token == want,
              "%u logits of kind %u, top-k %u, top-p %g, min-p %g, temperature %g, %u changes: want %d, got %d", n, kind, s->top_k,
              (double)s->top_p, (double)s->min_p, (double)s->temperature, draws[i].n_changes, want, draws[i].token);
    }
    if (mem.base) api->mem_release(dev, &mem);
    if (q) api->queue_release(q);
    free(logits), free(copy);
}

static void test_draws(void) {
    static const uint32_t sizes[] = {1, 2, 33, 1000, 32767, 128256};
    static const rf_sampler_desc descs[] = {
        {.temperature = 1}, {.temperature = 0.8f, .top_k = 40}, {.temperature = 0.8f, .top_p = 0.95f, .min_p = 0.05f},
        {.temperature = 0.7f, .top_p = 0.95f}, {.temperature = 2, .top_k = 100, .top_p = 0.5f}, {.temperature = 1.3f, .min_p = 0.1f},
        {.temperature = 1e-20f}, {.temperature = 50, .top_k = 1}, {.temperature = 5, .top_k = 7, .top_p = 0.9f, .min_p = 0.3f},
        {.temperature = 1, .top_p = 1e-12f}, {.temperature = 1, .top_k = 900, .min_p = 1}, {.temperature = 3, .top_p = 0.99999f},
        {.temperature = 1, .top_k = 32000, .top_p = 0.3f}, {.temperature = 0.8f, .top_p = 0.95f, .presence_penalty = 0.5f},
        {.temperature = 1, .repeat_penalty = 1.3f, .frequency_penalty = 0.37f, .presence_penalty = -0.1f},
        {.repeat_penalty = 1.1f, .frequency_penalty = 0.2f}, {.presence_penalty = 7}};
    for (uint32_t index = 0; device_name(index); index++) {
        rf_device *d = NULL;
        rf_error err = {0};
        REQUIRE(rf_device_open(device_name(index), NULL, &d, &err) == RF_OK, "%s", err.text);
        for (size_t i = 0; i < RFT_COUNT(sizes); i++)
            for (uint32_t kind = 0; kind < 6; kind++) draw_case(d, sizes[i], kind, descs, RFT_COUNT(descs));
        rf_device_close(d, NULL);
    }
}

/* Requests of a scheduler, some of which the device draws and some the host samples, write what they write where a hook has the host
 * sample all of them. */
typedef struct said {
    int32_t ids[12];
    uint32_t n;
} said;
static rf_result leave_logits(float *logits, uint32_t n_vocab, void *user) {
    (void)logits, (void)n_vocab, (void)user;
    return RF_OK;
}
static int on_said(int32_t token, void *user) {
    said *a = (said *)user;
    if (a->n < RFT_COUNT(a->ids)) a->ids[a->n++] = token;
    return 0;
}
static void test_draws_of_scheduler(void) {
    const rf_logit_bias bias[2] = {{300, 3}, {301, 3}}, twice[2] = {{300, 3}, {300, -3}};
    const rf_sampler_desc descs[] = {
        {.temperature = 0.8f, .top_p = 0.95f, .min_p = 0.05f, .seed = 1}, {.temperature = 1, .top_k = 40, .seed = 2}, {.temperature = 0},
        {.temperature = 1.2f, .frequency_penalty = 0.3f, .repeat_penalty = 1.2f, .seed = 3}, {.temperature = 1, .dry_multiplier = 0.8f, .seed = 4},
        {.temperature = 1, .xtc_probability = 0.5f, .seed = 5}, {.presence_penalty = 2}, {.temperature = 1, .bias = bias, .n_bias = 2, .seed = 6},
        {.temperature = 1, .bias = twice, .n_bias = 2, .seed = 7}, {.temperature = 1, .presence_penalty = 1, .penalty_last_n = 200, .seed = 8}};
    enum { N = RFT_COUNT(descs), STEPS = 8 };
    static said said_by[2][N];
    static rf_sampler samplers[N];
    int32_t prompts[N][90];
    for (int host = 0; host < 2; host++) {
        rig r = {0};
        rf_session_desc sd = {.n_ctx = 128, .n_batch = 64, .n_seq_max = N, .n_logits_max = N};
        REQUIRE(open_rig(&r, NULL, device_name(0), &sd) == RF_OK, "%s", r.err.text);
        rf_scheduler *sch = NULL;
        const rf_tokenizer *t = NULL;
        uint32_t n_active = 1;
        REQUIRE(rf_model_get_tokenizer(r.m, &t, &r.err) == RF_OK && rf_scheduler_open(r.s, t, N, &sch, &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t i = 0; i < N; i++) { /* the last one has more than 64 tokens to penalize */
            const uint32_t n_prompt = i + 1 == N ? 90 : 5 + i;
            rf_sampler_desc desc = descs[i];
            if (host) desc.logits_fn = leave_logits;
            rf_sampler_init(&samplers[i], &desc, NULL);
            for (uint32_t k = 0; k < n_prompt; k++) prompts[i][k] = (int32_t)(100 + i * 31 + k), rf_sampler_accept(&samplers[i], prompts[i][k]);
            const rf_request request = {.prompt = prompts[i], .n_prompt = n_prompt, .max_tokens = STEPS, .sampler = &samplers[i],
                                        .on_token = on_said, .user = &said_by[host][i]};
            REQUIRE(rf_scheduler_submit(sch, &request, &r.err) == RF_OK, "%s", r.err.text);
        }
        while (n_active) REQUIRE(rf_scheduler_step(sch, &n_active, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_scheduler_close(sch, &r.err) == RF_OK, "%s", r.err.text);
        rig_close(&r);
    }
    for (uint32_t i = 0; i < N; i++)
        CHECK(said_by[0][i].n > 0 && memcmp(&said_by[0][i], &said_by[1][i], sizeof(said)) == 0, "request %u", i);
}

/* A session whose device draws goes on as one whose logits were handed out. */
static void test_draws_of_session(void) {
    rig r = {0};
    rf_session_desc sd = {.n_ctx = 64, .n_batch = 8, .n_logits_max = 8};
    REQUIRE(open_rig(&r, NULL, device_name(0), &sd) == RF_OK, "%s", r.err.text);
    rf_token_row rows[5];
    for (int32_t i = 0; i < 5; i++) rows[i] = (rf_token_row){.token = 20 + i, .pos = RF_POS_NEXT, .want_logits = 1};
    REQUIRE(rf_session_eval(r.s, rows, 5, &r.err) == RF_OK, "%s", r.err.text);
    rf_sampler a, b, dry;
    const rf_logit_bias bias = {99, 20};
    rf_sampler_init(&a, &(rf_sampler_desc){.temperature = 1.5f, .top_p = 0.95f, .seed = 3, .frequency_penalty = 2, .bias = &bias, .n_bias = 1}, NULL);
    rf_sampler_init(&dry, &(rf_sampler_desc){.temperature = 1, .dry_multiplier = 1}, NULL);
    b = a;
    int32_t got[5], want = -1;
    for (uint32_t i = 0; i < 5; i++) CHECK(rf_session_sample(r.s, i, &a, &got[i], &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_sample(r.s, 3, &dry, &want, &r.err) == RF_OK, "%s", r.err.text); /* copies row 3 */
    float *logits;
    for (uint32_t i = 0; i < 5; i++)
        CHECK(rf_session_get_logits(r.s, i, &logits, &r.err) == RF_OK && rf_sampler_sample(&b, logits, r.n_vocab, &want, &r.err) == RF_OK &&
                  want == got[i], "row %u: want %d, got %d: %s", i, want, got[i], r.err.text);
    CHECK(a.rng[0] == b.rng[0] && a.rng[1] == b.rng[1] && a.n_accepted == 5 && memcmp(a.history, got, sizeof got) == 0);
    rf_session_get_logits(r.s, 1, &logits, NULL); /* what the caller wrote counts */
    for (uint32_t i = 0; i < r.n_vocab; i++) logits[i] = i == 77 ? 0 : -INFINITY;
    CHECK(rf_session_sample(r.s, 1, &a, &want, &r.err) == RF_OK && want == 77, "token %d", want);
    rig_close(&r);
}

#ifdef RF_TEST_EMU
/* What a session takes of the device's memory is what was forecast, to the byte, and all of it goes back. */
static void forecast_case(const char *path, const char *device, const rf_session_desc *sd) {
    rig r = {0};
    rf_forecast f = {0};
    CHECK(rf_gguf_open(path, NULL, &r.g, &r.err) == RF_OK && rf_device_open(device, NULL, &r.d, &r.err) == RF_OK &&
          rf_model_open(r.g, r.d, NULL, &r.m, &r.err) == RF_OK, "%s", r.err.text);
    /* the model's table of experts, which its first session makes, is no session's and in no forecast */
    CHECK(rf_session_open(r.m, &(rf_session_desc){.n_ctx = 8}, &r.s, &r.err) == RF_OK, "%s: %s", path, r.err.text);
    rf_session_close(r.s, NULL), r.s = NULL;
    const uint64_t before = hip_emu_get_counts().bytes;
    const rf_result res = rf_model_forecast(r.m, sd, &f, &r.err);
    CHECK(res == RF_OK && f.plan_bytes > 0 && hip_emu_get_counts().bytes == before, "%s: %s", path, r.err.text);
    CHECK(rf_session_open(r.m, sd, &r.s, &r.err) == RF_OK, "%s: %s", path, r.err.text);
    const uint64_t taken = hip_emu_get_counts().bytes - before, want = f.kv_bytes + f.scratch_bytes + f.plan_bytes;
    CHECK(taken == want, "%s on %s: %llu bytes, forecast %llu", path, device, (unsigned long long)taken, (unsigned long long)want);
    rf_session_close(r.s, NULL), r.s = NULL;
    CHECK(hip_emu_get_counts().bytes == before, "%s: memory is left", path);
    rig_close(&r);
}

static void test_forecast(void) {
    static const char *const files[] = {"examples/shakespeare-5m.gguf", "tests/family/mixtral.gguf", "tests/family/deepseek2-lite.gguf",
                                        "tests/family/qwen35moe.gguf", "tests/family/gemma3-linear.gguf", "tests/family/lfm2moe.gguf"};
    static const rf_session_desc descs[] = {{.n_ctx = 64}, {.n_ctx = 100, .n_batch = 1}, {.n_ctx = 120, .n_seq_max = 3, .n_batch = 40, .n_logits_max = 50},
                                            {.n_ctx = 2000, .n_batch = 700, .cache_type = RF_CACHE_F32}};
    for (uint32_t k = 0; device_name(k); k++)
        for (size_t i = 0; i < RFT_COUNT(files) * RFT_COUNT(descs); i++)
            forecast_case(files[i / RFT_COUNT(descs)], device_name(k), &descs[i % RFT_COUNT(descs)]);
}
#endif

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    if (!device_name(0)) return puts("no usable device"), 1;
    RUN(test_as_cpu);
    RUN(test_rows_alone);
    RUN(test_growing_rows);
    RUN(test_mixtures);
    RUN(test_post_norms);
    RUN(test_many_sequences);
    RUN(test_mixed_steps);
    RUN(test_rows_beyond_tiles);
    RUN(test_repeats);
    RUN(test_two_threads);
    RUN(test_budgets);
    RUN(test_cleared_between);
    RUN(test_experts);
    RUN(test_draws);
    RUN(test_draws_of_session);
    RUN(test_draws_of_scheduler);
#ifdef RF_TEST_EMU
    RUN(test_forecast);
    RUN(test_failing_ring);
    RUN(test_failing_calls);
#endif
    RFT_END();
}
