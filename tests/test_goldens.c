/* test_goldens.c: families, and forms of files, that ../shared/zoo has no model of, judged by answers that another
 * program, in float64 and by another hand, gave for small random models (tests/make_family_goldens.py; what it wrote is
 * in tests/family). Only the public API is used: on GPUs in turn if some are linked (hip_goldens), else on the CPU. */
#include "rocmforge.h"
#include "rf_test.h"
#include <math.h>

#define MAX_TOKENS 48
#define N_VOCAB 64

/* Largest error of a logit, which are +-15. Sums of up to 200 products in float32, through two to four layers, leave
 * 1e-5 to 5e-5. A tensor left out, or a key that is 2 % wrong, moves some logit by 7e-4 or more (most by 1e-2). */
#define TOLERANCE 1e-4

/* A GPU sums in another order, which gives other errors of that size, and its division, exponential and root may be off
 * by 2.5 units in the last place where the CPU's are by a half: 5 times what rounding does to this model on the CPU
 * (7e-6 to 5e-5 of a logit; an H200's errors were 0.7 to 3 times that, but 6.2e-5 where the CPU's is 1.1e-5 by chance).
 * Never more than a third of what a tensor left out moves, no less than what the CPU is held to. */
#define GPU_TIMES 5
#define GPU_LEAST TOLERANCE
#define GPU_MOST 2.5e-4

/* Of logits with activations in int8: 0.002 to 0.07 of them, k2-horizon 0.14. (One kind of matrix shifted by a block: up to
 * 1.5, more than this in 52 to 69 of 71 families.) A GPU that is emulated rounds as the CPU does (1e-7; 8e-3 where a sum's
 * last bit is another and a tie falls otherwise); a card takes more than 32 rows in bf16. */
#define QUANTIZED_OFF 0.2
#ifdef RF_TEST_EMU
#define GPU_OFF 0.02
#else
#define GPU_OFF QUANTIZED_OFF
#endif

static const char *const families[] = {
    "mixtral", "qwen2moe", "olmoe", "lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen35moe-fused", "qwen3next",
    "qwen3next-legacy", "cohere2", "internlm2", "exaone", "seed_oss", "mpt", "bloom", "gemma4", "gemma4-moe", "gemma",
    "deepseek2-groups", "deepseek2-lite", "deepseek2-lite-legacy", "gemma3-linear", "olmo3", "lfm2-bias",
    "command-r-plus", "stablelm-12b", "mamba", "jamba", "falcon-h1",
    "nemotron-h-moe",
    "afmoe", "laguna", "llama4", "arctic", "grok", "cohere2moe", "smallthinker", "grovemoe", "k2-horizon", "talkie",
    "mimo2", "maple", "qwen3vl", "olmo", "hunyuan-dense", "jais", "minicpm3", "apertus", "step35", "minimax-01",
    "kimi-linear", "deepseek32", "glm-dsa", "minimax-m3", "kimi-k3", "glm5-next", "deepseek4", "qwen4exp",
    "dots3note", "hy-v4", "hrm-text", "gemma3n", "qwen35-mtp", "qwen35moe-mtp",
    "glm4moe-mtp", "deepseek2-mtp", "mimo2-mtp", "step35-mtp", "qwen3next-mtp",
    "nemotron-h-moe-mtp"};

/* What is split by tensors over two GPUs: experts with shared ones, of all layers or some, beside dense FFNs; dense. */
static const char *const by_tensors[] = {"qwen2moe", "glm4moe-mtp", "llama4", "arctic", "grok", "cohere2moe", "grovemoe",
                                         "maple", "smallthinker", "mixtral", "cohere2", "exaone"};

static const char *const encoders[] = {"bert", "jina-bert-v2", "nomic-bert-moe", "gemma-embedding", "t5encoder",
                                       "nomic-bert", "jina-bert-v3", "modern-bert", "modern-bert-silu"};

enum { N_FAMILIES = sizeof families / sizeof *families, N_ENCODERS = sizeof encoders / sizeof *encoders };

/* What make_family_goldens.py wrote. */
typedef struct golden {
    uint32_t n_tokens, n_greedy;
    int32_t tokens[MAX_TOKENS], greedy[MAX_TOKENS];
    float logits[MAX_TOKENS][N_VOCAB];
} golden;

/* A model that is open, with a session of 32-bit keys and values. */
typedef struct running {
    rf_gguf *file;
    rf_device *device;
    rf_model *model;
    rf_session *session;
} running;

static const char *current;
static rf_device_info device;
static uint32_t split; /* of the device */
static double tolerance; /* of the model that is tested, on the device */

/* "WORD 1 2 3": the numbers of a line; 0 if it does not start with WORD */
static uint32_t read_ids(FILE *f, const char *word, int32_t *ids) {
    char found[16];
    uint32_t n = 0;
    if (fscanf(f, "%15s", found) != 1 || strcmp(found, word)) return 0;
    while (n < MAX_TOKENS && fscanf(f, "%d", &ids[n]) == 1) n++;
    return n;
}

static int read_golden(const char *path, golden *g) {
    FILE *f = fopen(path, "r");
    int ok = f != NULL;
    if (!ok) return 0;
    g->n_tokens = read_ids(f, "tokens", g->tokens);
    g->n_greedy = read_ids(f, "greedy", g->greedy);
    ok = g->n_tokens && g->n_greedy && fscanf(f, " margins%*[^\n]") == 0;
    for (uint32_t i = 0; ok && i < g->n_tokens * N_VOCAB; i++) {
        ok = fscanf(f, "%f", &g->logits[i / N_VOCAB][i % N_VOCAB]) == 1;
    }
    fclose(f);
    return ok;
}

static void end(running *r) {
    rf_session_close(r->session, NULL);
    rf_model_close(r->model, NULL), rf_device_close(r->device, NULL), rf_gguf_close(r->file, NULL);
}

static rf_result begin(running *r, const char *path, const char *device_name, rf_error *err) {
    const rf_session_desc desc = {.n_ctx = 64, .n_logits_max = MAX_TOKENS, .cache_type = RF_CACHE_F32};
    rf_result code = rf_gguf_open(path, NULL, &r->file, err);
    if (!code) code = rf_device_open(device_name, &(rf_device_desc){.split = split}, &r->device, err);
    if (!code) code = rf_model_open(r->file, r->device, NULL, &r->model, err);
    if (!code) code = rf_session_open(r->model, &desc, &r->session, err);
    return code;
}

/* tokens from..to-1 in one call, with the logits of all of them in out[from..] */
static rf_result eval(rf_session *s, const golden *g, uint32_t from, uint32_t to, float (*out)[N_VOCAB],
                      rf_error *err) {
    rf_token_row rows[MAX_TOKENS] = {{0}};
    for (uint32_t i = from; i < to; i++) {
        rows[i - from] = (rf_token_row){.token = g->tokens[i], .pos = (int32_t)i, .want_logits = 1};
    }
    rf_result code = rf_session_eval(s, rows, to - from, err);
    for (uint32_t i = from; !code && i < to; i++) memcpy(out[i], rft_logits(s, i - from), sizeof out[i]);
    return code;
}

static double distance(const golden *g, float (*logits)[N_VOCAB], uint32_t from) {
    double worst = 0;
    for (uint32_t i = from; i < g->n_tokens; i++) {
        for (uint32_t j = 0; j < N_VOCAB; j++) {
            const double d = fabs((double)logits[i][j] - (double)g->logits[i][j]);
            worst = rft_worst(worst, d);
        }
    }
    return worst;
}

static void check_greedy(rf_session *s, const golden *g) {
    rf_error err = {0};
    int32_t id = rft_argmax(s, g->n_tokens - 1);
    for (uint32_t i = 0; i < g->n_greedy; i++) {
        REQUIRE(id == g->greedy[i], "step %u: %d, want %d", i, id, g->greedy[i]);
        REQUIRE(rf_session_forward(s, &id, 1, NULL, &err) == RF_OK, "%s", err.text);
        id = rft_argmax(s, 0);
    }
}

/* Set the tolerance; on a GPU by what the CPU makes of the same tokens. */
static void find_tolerance(const golden *g, const char *path, float (*logits)[N_VOCAB]) {
    running r = {0};
    rf_error err = {0};
    tolerance = TOLERANCE;
    if (!device.is_gpu) return;
    const int ok = begin(&r, path, "cpu", &err) == RF_OK && eval(r.session, g, 0, g->n_tokens, logits, &err) == RF_OK;
    CHECK(ok, "on the CPU: %s", err.text);
    tolerance = ok ? fmin(fmax(GPU_TIMES * distance(g, logits, 0), GPU_LEAST), GPU_MOST) : 0;
    end(&r);
}

/* the prompt in calls of 1 to `most` tokens, and again from a cut in its middle */
static void check_parts(rf_session *s, const golden *g, uint32_t most) {
    static float logits[MAX_TOKENS][N_VOCAB];
    rf_error err = {0};
    uint32_t kept = 1;
    REQUIRE(rf_session_truncate(s, 0, 0, &kept, &err) == RF_OK && kept == 0, "%s", err.text);
    for (uint32_t from = 0, n = 1; from < g->n_tokens; from += n, n = n < most ? n + 1 : 1) {
        if (n > g->n_tokens - from) n = g->n_tokens - from;
        REQUIRE(eval(s, g, from, from + n, logits, &err) == RF_OK, "%s", err.text);
    }
    CHECK(distance(g, logits, 0) <= tolerance, "calls of 1 to %u: %g", most, distance(g, logits, 0));
    REQUIRE(rf_session_truncate(s, 0, g->n_tokens / 2, &kept, &err) == RF_OK, "%s", err.text);
    REQUIRE(eval(s, g, kept, g->n_tokens, logits, &err) == RF_OK, "%s", err.text);
    CHECK(distance(g, logits, kept) <= tolerance, "after a cut to %u: %g", kept, distance(g, logits, kept));
}

static void test_golden(void) {
    static golden g;
    static float logits[MAX_TOKENS][N_VOCAB];
    running r = {0};
    rf_error err = {0};
    char path[128];
    snprintf(path, sizeof path, "tests/family/%s.txt", current);
    REQUIRE(read_golden(path, &g), "%s", path);
    snprintf(path, sizeof path, "tests/family/%s.gguf", current);
    find_tolerance(&g, path, logits);
    const rf_result code = begin(&r, path, device.name, &err);
    CHECK(code == RF_OK, "%s", err.text);
    CHECK(!code && eval(r.session, &g, 0, g.n_tokens, logits, &err) == RF_OK, "%s", err.text);
    CHECK(distance(&g, logits, 0) <= tolerance, "at once: %g", distance(&g, logits, 0));
    if (!rft_bad) check_greedy(r.session, &g);
    if (!rft_bad && !device.is_gpu) check_parts(r.session, &g, 1); /* slow where a GPU is emulated */
    if (!rft_bad) check_parts(r.session, &g, 5);
    end(&r);
}

/* ---- quantized ---- */

static char bytes[200000]; /* of a family's file */

/* Bytes of a key's value of this type at p. */
static size_t value_size(const char *p, uint32_t type) {
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint64_t n = 0, size = 12;
    uint32_t of = 0;
    if (type == 8) memcpy(&n, p, 8);
    if (type == 8) return 8 + n;
    if (type != 9) return sizes[type];
    memcpy(&of, p, 4), memcpy(&n, p + 4, 8);
    for (uint64_t i = 0; i < n; i++) size += value_size(p + size, of);
    return size;
}

/* Whether a tensor, by its name, is a matrix that quantized files have quantized. */
static int is_quantized(const char *name) {
    static const char *const no[] = {"norm", "gate_inp", "_ape", "tid2eid", "rel_b", "hc_", "indexer.proj", "_v_gate", "altup",
                                     "laurel"},
                      *const yes[] = {"attn_", "ffn_", "indexer", "ssm_in", "ssm_out", "token_embd.weight", "output.weight"};
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (strstr(name, no[i])) return 0;
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strstr(name, yes[i])) return 1;
    return 0;
}

static float half_value(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float v = e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24);
    return h >> 15 ? -v : v;
}

/* 32 values in 34 bytes of Q8_0, whose scale is a power of two; exact: to these values as floats. */
static size_t put_q8_0(char *to, const float *x, int exact) {
    float top = 0;
    for (int i = 0; i < 32; i++) top = fmaxf(top, fabsf(x[i]));
    int power = top > 0 ? ilogbf(top) - 6 : 0;
    while (top > ldexpf(127, power)) power++;
    const uint16_t scale = (uint16_t)((power + 15) << 10);
    if (!exact) memcpy(to, &scale, 2);
    for (int i = 0; i < 32; i++) {
        const float q = nearbyintf(ldexpf(x[i], -power)), v = ldexpf(q, power);
        if (exact) memcpy(to + 4 * i, &v, 4);
        else to[2 + i] = (char)(int8_t)q;
    }
    return exact ? 128 : 34;
}

/* The file with its matrices in Q8_0, or, exact, with floats of the same values. Returns the size; n_changed: matrices. */
static size_t quantize_file(const char *from, char *to, int exact, uint32_t *n_changed) {
    static char data[400000];
    uint64_t n_tensors, n_keys, n, ne[4], offset, at = 24, infos, size = 0;
    uint32_t type, n_dims;
    char name[96];
    memcpy(&n_tensors, from + 8, 8), memcpy(&n_keys, from + 16, 8);
    for (uint64_t i = 0; i < n_keys; i++) {
        memcpy(&n, from + at, 8), at += 8 + n;
        memcpy(&type, from + at, 4), at += 4 + value_size(from + at + 4, type);
    }
    infos = at;
    for (uint64_t i = 0; i < n_tensors; i++) {
        memcpy(&n, from + at, 8), memcpy(&n_dims, from + at + 8 + n, 4);
        at += 24 + n + 8 * n_dims;
    }
    const char *values = from + (at + 31) / 32 * 32;
    memcpy(to, from, at);
    *n_changed = 0;
    for (uint64_t i = 0; i < n_tensors; i++) {
        memcpy(&n, to + infos, 8), snprintf(name, sizeof name, "%.*s", (int)n, to + infos + 8), infos += 8 + n;
        memcpy(&n_dims, to + infos, 4), memcpy(ne, to + infos + 4, 8 * n_dims), infos += 4 + 8 * n_dims;
        memcpy(&type, to + infos, 4), memcpy(&offset, to + infos + 4, 8);
        uint64_t n_values = 1;
        for (uint32_t k = 0; k < n_dims; k++) n_values *= ne[k];
        const int halves = type == RF_TYPE_F16;
        const int changed = (halves || type == RF_TYPE_F32) && n_dims > 1 && ne[0] % 32 == 0 && is_quantized(name);
        const uint64_t old = n_values * (halves || type == RF_TYPE_BF16 ? 2 : 4), begin = size;
        if (!changed) memcpy(data + size, values + offset, old), size += old;
        for (uint64_t k = 0; changed && k < n_values; k += 32) {
            float x[32];
            uint16_t h[32];
            memcpy(h, values + offset + 2 * k, sizeof h);
            for (int j = 0; j < 32; j++) x[j] = half_value(h[j]);
            if (!halves) memcpy(x, values + offset + 4 * k, sizeof x);
            size += put_q8_0(data + size, x, exact);
        }
        if (changed) type = exact ? RF_TYPE_F32 : RF_TYPE_Q8_0;
        memcpy(to + infos, &type, 4), memcpy(to + infos + 4, &begin, 8), infos += 12;
        while (size % 32) data[size++] = 0;
        *n_changed += changed;
    }
    while (at % 32) to[at++] = 0;
    memcpy(to + at, data, size);
    return at + size;
}

/* The logits of a file in memory on a device, at once, or in calls of 1 to 5 tokens. */
static void run_bytes(const char *bytes, size_t n, const char *name, const golden *g, int in_parts, float (*logits)[N_VOCAB]) {
    const rf_session_desc desc = {.n_ctx = 64, .n_logits_max = MAX_TOKENS, .cache_type = RF_CACHE_F32};
    running r = {0};
    rf_error err = {0};
    rf_result code = rf_gguf_open_memory(bytes, n, NULL, &r.file, &err);
    if (!code) code = rf_device_open(name, NULL, &r.device, &err);
    if (!code) code = rf_model_open(r.file, r.device, NULL, &r.model, &err);
    if (!code) code = rf_session_open(r.model, &desc, &r.session, &err);
    for (uint32_t from = 0, k = in_parts ? 1 : g->n_tokens; !code && from < g->n_tokens; from += k, k = k < 5 ? k + 1 : 1) {
        if (k > g->n_tokens - from) k = g->n_tokens - from;
        code = eval(r.session, g, from, from + k, logits, &err);
    }
    CHECK(code == RF_OK, "%s: %s", name, err.text);
    end(&r);
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How far a row of logits is from another, as a part of that: the median, as rows that choose other experts may differ much. */
static double part_off(const golden *g, float (*logits)[N_VOCAB], float (*from)[N_VOCAB]) {
    double rows[MAX_TOKENS];
    for (uint32_t i = 0; i < g->n_tokens; i++) {
        double off = 0, all = 0;
        for (uint32_t j = 0; j < N_VOCAB; j++) {
            const double d = (double)logits[i][j] - (double)from[i][j];
            off += d * d, all += (double)from[i][j] * (double)from[i][j];
        }
        rows[i] = isfinite(off) ? sqrt(off / all) : HUGE_VAL;
    }
    qsort(rows, g->n_tokens, sizeof rows[0], by_size);
    return rows[g->n_tokens / 2];
}

/* With matrices in Q8_0: near what floats of the same values give, as near as int8 rows of activations are; a GPU is as near
 * to the CPU. */
static void test_quantized(void) {
    static golden g;
    static char file[400000];
    static float want[MAX_TOKENS][N_VOCAB], found[MAX_TOKENS][N_VOCAB];
    char path[128];
    uint32_t n_changed = 0;
    snprintf(path, sizeof path, "tests/family/%s.txt", current);
    REQUIRE(read_golden(path, &g), "%s", path);
    snprintf(path, sizeof path, "tests/family/%s.gguf", current);
    FILE *f = fopen(path, "rb");
    const size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f) fclose(f);
    REQUIRE(n > 0 && n < sizeof bytes, "%s", path);
    size_t size = quantize_file(bytes, file, !device.is_gpu, &n_changed);
    CHECK(n_changed > 1, "%u matrices", n_changed);
    run_bytes(file, size, "cpu", &g, 0, want);
    size = quantize_file(bytes, file, 0, &n_changed);
    for (int in_parts = 0; !rft_bad && in_parts < 2; in_parts++) {
        run_bytes(file, size, device.name, &g, in_parts, found);
        const double off = part_off(&g, found, want);
        CHECK(off <= (device.is_gpu ? GPU_OFF : QUANTIZED_OFF), "%s: %g off", in_parts ? "in parts" : "at once", off);
    }
}

/* ---- encoders ---- */

#define N_EMBD 32

/* What make_family_goldens.py wrote of an encoder: hidden states, their mean's embedding, and scores. */
typedef struct hidden_golden {
    uint32_t n_tokens, n_mean, n_scores;
    int32_t tokens[MAX_TOKENS];
    float mean[N_EMBD], scores[N_EMBD], hidden[MAX_TOKENS][N_EMBD];
} hidden_golden;

static uint32_t read_reals(FILE *f, const char *word, float *out) {
    char found[16];
    uint32_t n = 0;
    if (fscanf(f, "%15s", found) != 1 || strcmp(found, word)) return 0;
    for (int c; (c = fgetc(f)) != '\n' && c != EOF && n < N_EMBD;) n += c == ' ' && fscanf(f, "%f", &out[n]) == 1;
    return n;
}

static int read_hidden(const char *path, hidden_golden *g) {
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    g->n_tokens = read_ids(f, "tokens", g->tokens);
    g->n_mean = read_reals(f, "mean", g->mean);
    g->n_scores = read_reals(f, "scores", g->scores);
    int ok = g->n_tokens && g->n_mean;
    for (uint32_t i = 0; ok && i < g->n_tokens * N_EMBD; i++) ok = fscanf(f, "%f", &g->hidden[i / N_EMBD][i % N_EMBD]) == 1;
    fclose(f);
    return ok;
}

static double most_apart(const float *a, const float *b, uint32_t n) {
    double worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        worst = rft_worst(worst, d);
    }
    return worst;
}

/* Hidden states, and three texts at once: the whole one, its half, and the whole one. */
static void test_encoder(void) {
    static hidden_golden g;
    static float hidden[MAX_TOKENS][N_EMBD], out[3][N_EMBD];
    running r = {0};
    rf_error err = {0};
    char path[128];
    snprintf(path, sizeof path, "tests/family/%s.txt", current);
    REQUIRE(read_hidden(path, &g), "%s", path);
    snprintf(path, sizeof path, "tests/family/%s.gguf", current);
    const rf_session_desc desc = {.n_ctx = 64, .n_seq_max = 2, .cache_type = RF_CACHE_F32};
    rf_result code = rf_gguf_open(path, NULL, &r.file, &err);
    if (!code) code = rf_device_open(device.name, NULL, &r.device, &err);
    if (!code) code = rf_model_open(r.file, r.device, NULL, &r.model, &err);
    if (!code) code = rf_session_open(r.model, &desc, &r.session, &err);
    CHECK(code == RF_OK, "%s", err.text);
    const rf_model_info info = rf_model_get_info(r.model);
    CHECK(info.is_encoder && info.both_ways && info.n_embd_out == g.n_mean && info.n_scores == g.n_scores, "%u %u",
          info.n_embd_out, info.n_scores);
    rf_token_row rows[MAX_TOKENS] = {{0}};
    for (uint32_t i = 0; i < g.n_tokens; i++) rows[i] = (rf_token_row){.token = g.tokens[i], .pos = (int32_t)i, .want_logits = 1};
    if (!rft_bad) code = rf_session_eval(r.session, rows, g.n_tokens, &err);
    if (!code) code = rf_session_hidden(r.session, 0, g.n_tokens, hidden[0], &err);
    CHECK(code == RF_OK, "%s", err.text);
    CHECK(most_apart(hidden[0], g.hidden[0], g.n_tokens * N_EMBD) <= TOLERANCE, "hidden states: %g",
          most_apart(hidden[0], g.hidden[0], g.n_tokens * N_EMBD));
    float *logits;
    int32_t id;
    CHECK(rf_session_get_logits(r.session, 0, &logits, &err) == RF_ERR_UNSUPPORTED, "logits");
    CHECK(rf_session_get_argmax(r.session, 0, &id, &err) == RF_ERR_UNSUPPORTED, "argmax");
    CHECK(rf_session_eval(r.session, rows, 1, &err) == RF_ERR_ARGUMENT, "a text is read at once");
    const rf_embed_text texts[3] = {{g.tokens, g.n_tokens}, {g.tokens, g.n_tokens / 2}, {g.tokens, g.n_tokens}};
    rf_embed_desc embed = {.texts = texts, .n_texts = 3, .pooling = RF_POOL_MEAN, .normalize = 1};
    code = rf_session_embed(r.session, &embed, out[0], &err);
    CHECK(code == RF_OK && rf_session_length(r.session, 0) == 0, "%s", err.text);
    CHECK(most_apart(out[0], g.mean, g.n_mean) <= 2e-5 && most_apart(out[2], g.mean, g.n_mean) <= 2e-5, "means: %g %g",
          most_apart(out[0], g.mean, g.n_mean), most_apart(out[2], g.mean, g.n_mean));
    CHECK(most_apart(out[1], g.mean, g.n_mean) > 1e-3, "half the text");
    embed = (rf_embed_desc){.texts = texts, .n_texts = 1, .pooling = RF_POOL_RANK};
    code = rf_session_embed(r.session, &embed, out[0], &err);
    CHECK(code == (g.n_scores ? RF_OK : RF_ERR_UNSUPPORTED), "%s", err.text);
    CHECK(g.n_scores == 0 || most_apart(out[0], g.scores, g.n_scores) <= TOLERANCE, "scores: %g",
          most_apart(out[0], g.scores, g.n_scores));
    end(&r);
}

/* A family's file with another byte, so far behind the name of a key: an error that names the key. */
static void refused(const char *family, const char *key, size_t behind, int byte, rf_result code) {
    char path[96];
    rf_gguf *file = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    rf_error err = {0};
    snprintf(path, sizeof path, "tests/family/%s.gguf", family);
    FILE *f = fopen(path, "rb");
    const size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0, len = strlen(key);
    size_t at = 0;
    if (f) fclose(f);
    while (at + len + behind < n && memcmp(bytes + at, key, len) != 0) at++;
    REQUIRE(n < sizeof bytes && at + len + behind < n && bytes[at + len + behind] != byte, "%s: %s is not there", family, key);
    bytes[at + len + behind] = (char)byte;
    CHECK(rf_gguf_open_memory(bytes, n, NULL, &file, &err) == RF_OK && rf_device_open("cpu", NULL, &d, &err) == RF_OK &&
          rf_model_open(file, d, NULL, &m, &err) == code && strstr(err.text, key), "%s %d: %s", key, byte, err.text);
    rf_model_close(m, NULL);
    rf_device_close(d, NULL);
    rf_gguf_close(file, NULL);
}

/* Values are behind their type, 4 bytes, those of arrays behind 16. */
static void test_refused_keys(void) {
    refused("glm5-next", "attention.indexer.kpool_select_tail", 4, 0, RF_ERR_UNSUPPORTED);
    refused("deepseek4", "attention.compress_ratios", 16 + 4, 1, RF_ERR_FORMAT);      /* of layer 1 */
    refused("deepseek4", "attention.compress_ratios", 16 + 8 + 3, 0x80, RF_ERR_FORMAT);
    refused("deepseek4", "attention.output_group_count", 4, 3, RF_ERR_FORMAT);        /* of 4 heads */
    refused("deepseek4", "attention.indexer.key_length", 4, 6, RF_ERR_FORMAT);        /* rope turns 8 */
    refused("deepseek4", "hyper_connection.count", 4, RF_HYPER_STREAMS + 1, RF_ERR_UNSUPPORTED);
    refused("deepseek4", "hash_layer_count", 4, 4, RF_ERR_FORMAT);                    /* of 3 layers */
    refused("deepseek4", "expert_gating_func", 4, 5, RF_ERR_UNSUPPORTED);
    refused("deepseek4", "blk.1.indexer.proj.weight", 4, 31, RF_ERR_FORMAT);
    refused("deepseek4", "blk.0.ffn_gate_tid2eid.weight", 20, RF_TYPE_F32, RF_ERR_UNSUPPORTED); /* ids that are no integers */
}

static rf_result open_bytes(size_t n, running *r, rf_error *err) {
    rf_result code = rf_gguf_open_memory(bytes, n, NULL, &r->file, err);
    if (!code) code = rf_device_open("cpu", NULL, &r->device, err);
    return code ? code : rf_model_open(r->file, r->device, NULL, &r->model, err);
}

/* Open a family's file with one more key, a bool or a number; and a key of filling, so that tensors stay aligned. */
static rf_result open_with_key(const char *family, const char *key, uint32_t type, uint32_t value, running *r, rf_error *err) {
    const uint64_t len = strlen(key), n_value = type == RF_KV_BOOL ? 1 : 4, n_fill = 1 + (111 - (12 + len + n_value)) % 32, all = 28 + len + n_value + n_fill;
    const uint32_t fill = RF_KV_U32;
    char path[96], *at = bytes + 24;
    snprintf(path, sizeof path, "tests/family/%s.gguf", family);
    FILE *f = fopen(path, "rb");
    const size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f) fclose(f);
    if (n < 24 || n + all > sizeof bytes || all % 32) return RF_ERR_IO;
    memmove(at + all, at, n - 24);
    memset(at, 'z', all);
    memcpy(at, &len, 8), memcpy(at + 8, key, len), memcpy(at + 8 + len, &type, 4), memcpy(at + 12 + len, &value, n_value);
    at += 12 + len + n_value;
    memcpy(at, &n_fill, 8), memcpy(at + 8 + n_fill, &fill, 4);
    bytes[16] = (char)(bytes[16] + 2); /* keys, of fewer than 126 */
    return open_bytes(n + all, r, err);
}

/* Keys of deepseek4: attention is causal; a file may name an MTP head that it neither has nor counts among its blocks, for
 * which no layer is left out; and not say how wide an FFN without experts is, of which it has none. */
static void test_more_keys(void) {
    static const char width[] = "deepseek4.feed_forward_length";
    running r = {0}, other = {0}, third = {0}, last = {0};
    rf_error err = {0};
    rf_model *head = NULL;
    CHECK(open_with_key("deepseek4", "deepseek4.nextn_predict_layers", RF_KV_U32, 1, &r, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_get_info(r.model).n_layers == 3, "%u layers", rf_model_get_info(r.model).n_layers);
    CHECK(rf_model_open(r.file, r.device, &(rf_model_desc){.mtp = 1}, &head, &err) == RF_ERR_NOT_FOUND, "%s", err.text);
    end(&r);
    CHECK(open_with_key("deepseek4", "deepseek4.attention.causal", RF_KV_BOOL, 1, &other, &err) == RF_OK, "%s", err.text);
    end(&other);
    CHECK(open_with_key("deepseek4", "deepseek4.attention.causal", RF_KV_BOOL, 0, &third, &err) == RF_ERR_UNSUPPORTED &&
          strstr(err.text, "attention.causal"), "%s", err.text);
    end(&third);
    FILE *f = fopen("tests/family/deepseek4.gguf", "rb");
    const size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f) fclose(f);
    size_t at = 0;
    while (at + sizeof width < n && memcmp(bytes + at, width, sizeof width - 1) != 0) at++;
    bytes[at + sizeof width - 2] = 'x'; /* another key */
    CHECK(at + sizeof width < n && open_bytes(n, &last, &err) == RF_OK, "%s", err.text);
    end(&last);
}

/* Open a family's file with one more key of its architecture; an error names it. */
static rf_result open_with(const char *family, const char *suffix, uint32_t type, uint32_t value, rf_error *err) {
    char head[256] = "", arch[64] = "", key[128];
    running r = {0};
    snprintf(key, sizeof key, "tests/family/%s.gguf", family);
    FILE *f = fopen(key, "rb");
    size_t n = f ? fread(head, 1, sizeof head - 1, f) : 0, at = 24;
    if (f) fclose(f);
    while (at + 96 < n && memcmp(head + at, "general.architecture", 20) != 0) at++;
    if (at + 96 < n) snprintf(arch, sizeof arch, "%.*s", head[at + 24], head + at + 32); /* behind type and length */
    snprintf(key, sizeof key, "%s.%s", arch, suffix);
    const rf_result code = open_with_key(family, key, type, value, &r, err);
    CHECK(code == RF_OK || strstr(err->text, key), "%s: %s: %s", family, key, err->text);
    end(&r);
    return code;
}

/* Every family refuses keys of its graph that nothing reads; what works in order only, an order that is not causal. */
static void test_unknown_keys(void) {
    static const char *const unknown[] = {"attention.foo", "attention.indexer.foo", "rope.foo", "rope.scaling.foo", "ssm.foo",
                                          "expert_foo", "hyper_connection.foo"};
    static const char *const ordered[] = {"mamba", "qwen35", "kimi-linear", "deepseek32", "minimax-m3", "qwen4exp"};
    rf_error err = {0};
    for (size_t i = 0; i < N_FAMILIES + N_ENCODERS; i++) {
        const char *family = i < N_FAMILIES ? families[i] : encoders[i - N_FAMILIES];
        CHECK(open_with(family, "foo", RF_KV_U32, 7, &err) == RF_OK, "%s: %s", family, err.text);
        for (size_t k = 0; k < sizeof unknown / sizeof *unknown; k++)
            CHECK(open_with(family, unknown[k], RF_KV_U32, 7, &err) == RF_ERR_UNSUPPORTED, "%s: %s: %s", family, unknown[k], err.text);
    }
    for (size_t i = 0; i < sizeof ordered / sizeof *ordered; i++)
        CHECK(open_with(ordered[i], "attention.causal", RF_KV_BOOL, 0, &err) == RF_ERR_UNSUPPORTED, "%s: %s", ordered[i], err.text);
}

/* An indexer that is not supported: contexts that it leaves whole, and an error for longer ones. */
static void test_context_left_whole(void) {
    rf_gguf *file = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    rf_session *s = NULL;
    rf_error err = {0};
    REQUIRE(rf_gguf_open("tests/family/glm5-next.gguf", NULL, &file, &err) == RF_OK && rf_device_open("cpu", NULL, &d, &err) == RF_OK &&
            rf_model_open(file, d, NULL, &m, &err) == RF_OK, "%s", err.text);
    CHECK(rf_session_open(m, &(rf_session_desc){.n_ctx = 65}, &s, &err) == RF_ERR_UNSUPPORTED && strstr(err.text, "64 tokens an indexer"), "%s", err.text);
    CHECK(rf_session_open(m, &(rf_session_desc){.n_ctx = 64}, &s, &err) == RF_OK, "%s", err.text);
    rf_session_close(s, NULL);
    rf_model_close(m, NULL);
    rf_gguf_close(file, NULL);
    rf_device_close(d, NULL);
}

int main(int argc, char **argv) {
    rf_device_info devices[8];
    uint32_t n = 0, n_gpus = 0;
    RFT_BEGIN(argc, argv);
    rf_device_list(devices, 8, &n, NULL);
    for (uint32_t d = 0; d < n && d < 8; d++) {
        if (devices[d].usable && devices[d].is_gpu) devices[n_gpus++] = devices[d];
    }
    RUN(test_refused_keys);
    RUN(test_more_keys);
    RUN(test_context_left_whole);
    RUN(test_unknown_keys);
    for (size_t i = 0; i < N_FAMILIES + N_ENCODERS; i++) {
        char name[128];
        current = i < N_FAMILIES ? families[i] : encoders[i - N_FAMILIES];
        /* quick on emulated GPUs: every ninth, in waves of 32 and 64 by turns; the CPU runs all */
        for (uint32_t d = 0; d < (n_gpus ? n_gpus : 1); d++) {
            const int slow = n_gpus && (i % 9 != 0 || i % n_gpus != d);
            if (n_gpus) device = devices[d];
            else snprintf(device.name, sizeof device.name, "cpu");
            snprintf(name, sizeof name, "%s %s", device.name, current);
            rft_run(name, i < N_FAMILIES ? test_golden : test_encoder, slow);
            snprintf(name, sizeof name, "%s quantized %s", device.name, current);
            if (i < N_FAMILIES) rft_run(name, test_quantized, slow);
        }
    }
    split = RF_SPLIT_TENSORS;
    for (size_t i = 0; n_gpus > 1 && i < sizeof by_tensors / sizeof *by_tensors; i++) {
        char name[128];
        current = by_tensors[i];
        snprintf(device.name, sizeof device.name, "%.12s,%.12s", devices[0].name, strchr(devices[1].name, ':') + 1);
        snprintf(name, sizeof name, "%s by tensors %s", device.name, current);
        rft_run(name, test_golden, i % 6 != 0);
    }
    RFT_END();
}
