/* test_group.c: several devices as one. By tensors: close to one device, the same bits in every run, mixtures of experts,
 * budgets, refusals by name, failing calls, and the steps after them. By layers ("hip:0,1"): the same bits as on one device for prompts, decoded tokens,
 * sequences that are cut, copied, saved and restored, embeddings and schedulers, within budgets too; members of uneven
 * memory; copies between GPUs that are refused, wrong or hang; and each call of each member failing. On CPU and null
 * devices, on emulated GPUs (hip_group), and with RF_TEST_GPUS on two real ones. */
#include "../rocmforge.h"
#ifdef RF_TEST_EMU
#include "hip_emu.h"
#endif
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define MAX_LOGITS 4096u
enum { N_PROMPT = 9, N_STEPS = 3, N_PARTS = 5 };

/* What a session says, in parts: the prompt and steps, after a cut, of a copy, of a restored sequence, of two rows. */
typedef struct speech { float logits[N_PARTS][MAX_LOGITS]; } speech;

static rf_result speak(rig *r, speech *out) {
    static saved file;
    const rf_session_io io = {.write_fn = saved_write, .read_fn = saved_read, .user = &file};
    int32_t tokens[N_PROMPT + N_STEPS];
    const rf_token_row rows[] = {{.token = 5, .seq = 0, .pos = RF_POS_NEXT, .want_logits = 1}, {.token = 6, .seq = 1, .pos = RF_POS_NEXT, .want_logits = 1}};
    float *row = NULL;
    rf_result res = rf_session_truncate(r->s, 0, 0, NULL, &r->err);
    mg_tokens(tokens, N_PROMPT + N_STEPS, r->n_vocab, 3);
    memset(out, 0, sizeof *out);
    file.n = file.at = 0;
#define SAY(part)                                                                      \
    do {                                                                               \
        if (res == RF_OK) res = rf_session_get_logits(r->s, 0, &row, &r->err);         \
        if (res == RF_OK) memcpy(out->logits[part], row, r->n_vocab * sizeof *row);    \
    } while (0)
    if (res == RF_OK) res = rf_session_forward(r->s, tokens, N_PROMPT, NULL, &r->err);
    for (int i = 0; res == RF_OK && i < N_STEPS; i++) res = rf_session_forward(r->s, tokens + N_PROMPT + i, 1, NULL, &r->err);
    SAY(0);
    if (res == RF_OK) res = rf_session_copy(r->s, 0, 1, &r->err);
    if (res == RF_OK) res = rf_session_save(r->s, 0, &io, &r->err);
    if (res == RF_OK) res = rf_session_eval(r->s, rows, 2, &r->err);
    SAY(1);
    if (res == RF_OK) res = rf_session_get_logits(r->s, 1, &row, &r->err);
    if (res == RF_OK) memcpy(out->logits[2], row, r->n_vocab * sizeof *row);
    if (res == RF_OK) res = rf_session_truncate(r->s, 0, 0, NULL, &r->err);
    if (res == RF_OK) res = rf_session_restore(r->s, 0, &io, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, tokens, 1, NULL, &r->err);
    SAY(3);
    if (res == RF_OK) res = rf_session_truncate(r->s, 0, 4, NULL, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, tokens + 4, 3, NULL, &r->err);
    SAY(4);
    return res;
#undef SAY
}

static const rf_session_desc session = {.n_ctx = 32, .n_seq_max = 2, .n_batch = 4, .n_logits_max = 2};

/* Open, speak, close; the rig's err stays. A device that begins with "tensors " is a group that splits by tensors. */
static rf_result speak_on(const char *path, const mg_buf *file, const char *device, const rf_model_desc *md, speech *out, rf_error *err) {
    rig r;
    const int tensors = strncmp(device, "tensors ", 8) == 0;
    const rf_device_desc dd = {.n_threads = 2, .split = tensors ? RF_SPLIT_TENSORS : RF_SPLIT_LAYERS};
    rf_result res = rig_try(&r, &(rig_how){.path = path, .file = file, .device = device + (tensors ? 8 : 0), .device_desc = &dd, .model = md, .session = &session});
    if (res == RF_OK) res = speak(&r, out);
    *err = r.err;
    rig_close(&r);
    return res;
}

static void say(const char *path, const mg_buf *file, const char *device, speech *out) {
    rf_error err;
    CHECK(speak_on(path, file, device, NULL, out, &err) == RF_OK, "%s on %s: %s", path ? path : "", device, err.text);
}
static void same_as(const speech *want, const char *path, const mg_buf *file, const char *group, const rf_model_desc *md) {
    static speech got;
    rf_error err;
    CHECK(speak_on(path, file, group, md, &got, &err) == RF_OK, "%s on %s: %s", path ? path : "", group, err.text);
    for (int i = 0; i < N_PARTS; i++)
        CHECK(memcmp(want->logits[i], got.logits[i], sizeof want->logits[i]) == 0, "%s on %s: part %d has other bits", path ? path : "", group, i);
}
static void same_case(const char *path, const mg_buf *file, const char *one, const char *group, const rf_model_desc *md) {
    static speech want;
    say(path, file, one, &want);
    same_as(&want, path, file, group, md);
}

/* Dense models, tied embeddings, experts, latent attention, recurrent layers, keys shared by layers, hyper-connections. */
#ifdef RF_TEST_EMU
static const char *const families[] = {"lfm2moe", "deepseek2-lite"};
#else
static const char *const families[] = {"mixtral", "deepseek2-lite", "qwen35moe", "gemma4", "lfm2moe", "hy-v4", "hrm-text", "falcon-h1", "kimi-k3", "glm5-next", "deepseek4"};
#endif
#ifdef RF_TEST_GPUS
static const char *const ones[] = {"hip:0", "hip:0"}, *const groups[] = {"hip:0,1", "hip:1,0,1"};
#elif defined(RF_TEST_EMU)
static const char *const ones[] = {"hip:0", "hip:0", "hip:1"}, *const groups[] = {"hip:0,2", "hip:2,0,0,2", "hip:1,3"};
#else
static const char *const ones[] = {"cpu", "cpu"}, *const groups[] = {"cpu,cpu", "cpu,cpu,cpu"};
#endif

static void test_same_bits(void) {
    static speech want;
    static const uint32_t one_odd[] = {64, 64, 64, 96}; /* 96 columns: a product that GPUs fuse with no other, in no layer */
    mg_buf files[3] = {{0}, {0}, {0}};
    mg_llama(&files[2], &(mg_options){.type = MG_Q8_0, .n_layers = 4, .seed = 6, .layer_ff = one_odd});
    mg_llama(&files[0], &(mg_options){.type = MG_Q4_K, .n_layers = 4, .seed = 4});
    mg_llama(&files[1], &(mg_options){.type = MG_Q8_0, .n_layers = 5, .seed = 5, .tied = 1, .rope_freqs = 1});
    for (int f = 0; f < 2; f++) {
        for (size_t k = 0; k < RFT_COUNT(groups); k++) {
            if (k == 0 || strcmp(ones[k], ones[k - 1]) != 0) say(NULL, &files[f], ones[k], &want);
            same_as(&want, NULL, &files[f], groups[k], NULL);
        }
    }
    same_case(NULL, &files[1], ones[1], groups[1], &(rf_model_desc){.load_policy = RF_LOAD_PRELOAD, .n_readers = 3});
    same_case(NULL, &files[2], ones[0], groups[0], NULL);
    for (size_t i = 0; i < RFT_COUNT(families); i++) {
        char path[64];
        snprintf(path, sizeof path, "tests/family/%s.gguf", families[i]);
        same_case(path, NULL, ones[0], groups[i % 2], NULL);
    }
    for (int f = 0; f < 3; f++) mg_free(&files[f]);
}

#ifdef RF_TEST_EMU
/* A prompt of 20 rows, which wgmma or the launches of a decode step may take. The output matrix decides which, also on
 * the member that does not have it. */
static void test_same_bits_of_20_rows(void) {
    static const char *const devices[] = {"hip:0", "hip:0,2"};
    static float logits[2][MAX_LOGITS];
    const rf_session_desc desc = {.n_ctx = 32, .n_seq_max = 1, .n_batch = 24};
    int32_t tokens[20];
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_K, .n_layers = 4, .seed = 7, .tied = 1, .use_embd = 1, .embd_type = MG_Q3_K});
    for (int k = 0; k < 2; k++) hip_emu_matrix_unit(2 * k, HIP_EMU_SM90);
    for (int k = 0; k < 2; k++) {
        rig r;
        float *row = NULL;
        rf_result res = rig_try(&r, &(rig_how){.file = &file, .device = devices[k], .session = &desc});
        if (res == RF_OK) mg_tokens(tokens, 20, r.n_vocab, 3);
        if (res == RF_OK) res = rf_session_forward(r.s, tokens, 20, NULL, &r.err);
        if (res == RF_OK) res = rf_session_get_logits(r.s, 0, &row, &r.err);
        if (res == RF_OK) memcpy(logits[k], row, r.n_vocab * sizeof *row);
        CHECK(res == RF_OK, "%s: %s", devices[k], r.err.text);
        rig_close(&r);
    }
    CHECK(memcmp(logits[0], logits[1], sizeof logits[0]) == 0, "%s: other bits than on one GPU", devices[1]);
    for (int k = 0; k < 2; k++) hip_emu_matrix_unit(2 * k, HIP_EMU_WMMA11);
    mg_free(&file);
}

/* By default a micro-batch has 512 rows, by tensors 512 for each member: a session then needs what it needs with those. */
static void test_rows_of_a_batch(void) {
    static const struct { const char *device; int tensors; uint32_t n_seq, rows; } cases[] = {
        {"cpu", 0, 1, 512}, {"hip:0", 0, 1, 1024}, {"hip:0", 0, 2, 512}, {"hip:0,2", 0, 1, 512}, {"hip:0,2", 1, 1, 1024}, {"hip:0,1,2", 1, 2, 1536}};
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 4, .n_heads = 8, .n_kv_heads = 4, .seed = 5});
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        const rf_device_desc dd = {.split = cases[i].tensors ? RF_SPLIT_TENSORS : RF_SPLIT_LAYERS};
        rf_forecast by_default = {0}, same = {0}, less = {0};
        rig r;
        rf_result res = rig_try(&r, &(rig_how){.file = &file, .device = cases[i].device, .device_desc = &dd, .session = &session});
        if (res == RF_OK) res = rf_model_forecast(r.m, &(rf_session_desc){.n_ctx = 2000, .n_seq_max = cases[i].n_seq}, &by_default, &r.err);
        if (res == RF_OK) res = rf_model_forecast(r.m, &(rf_session_desc){.n_ctx = 2000, .n_seq_max = cases[i].n_seq, .n_batch = cases[i].rows}, &same, &r.err);
        if (res == RF_OK) res = rf_model_forecast(r.m, &(rf_session_desc){.n_ctx = 2000, .n_seq_max = cases[i].n_seq, .n_batch = cases[i].rows - 1}, &less, &r.err);
        CHECK(res == RF_OK, "%s: %s", cases[i].device, r.err.text);
        CHECK(memcmp(&by_default, &same, sizeof same) == 0, "%s, case %zu: not %u rows", cases[i].device, i, cases[i].rows);
        CHECK(memcmp(&less, &same, sizeof same) != 0, "%s, case %zu: a forecast that rows do not change", cases[i].device, i);
        rig_close(&r);
    }
    mg_free(&file);
}
#endif

/* The largest difference, by the largest logit. */
static double close_to(const speech *want, const speech *got) {
    double worst = 0, most = 0;
    for (int p = 0; p < N_PARTS; p++)
        for (uint32_t i = 0; i < MAX_LOGITS; i++) {
            const double d = fabs((double)want->logits[p][i] - (double)got->logits[p][i]);
            worst = rft_worst(worst, d);
            most = fmax(most, fabs((double)want->logits[p][i]));
        }
    return worst / most;
}

/* Weights that go through the ring; experts in a cache, also those that a few rows chose on the CPU. */
static void test_budgets(void) {
    mg_buf file = {0};
    static speech want, got;
    rf_error err;
    const rf_model_desc cached = {.expert_cache_bytes = 200 << 10}, /* of each member's 12 experts of two layers 7 or so */
                        cpu = {.expert_cache_bytes = 200 << 10, .expert_cpu_below = 8};
    mg_llama(&file, &(mg_options){.arch = "qwen3moe", .type = MG_Q8_0, .n_layers = 4, .n_experts = 6, .n_ff_expert = 64, .seed = 3});
    same_case(NULL, &file, ones[0], groups[0], &cached);
    CHECK(speak_on(NULL, &file, ones[0], NULL, &want, &err) == RF_OK, "%s", err.text);
    CHECK(speak_on(NULL, &file, groups[0], &cpu, &got, &err) == RF_OK, "%s", err.text);
    CHECK(close_to(&want, &got) < 1e-2, "experts on the CPU: off by %g", close_to(&want, &got));
    CHECK(speak_on(NULL, &file, groups[0], &(rf_model_desc){.expert_cache_bytes = 100 << 10}, &got, &err) == RF_ERR_MEMORY && strstr(err.text, "hold the experts of a layer"), "%s", err.text);
    mg_free(&file);
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 8, .seed = 12});
    same_case(NULL, &file, ones[0], groups[0], &(rf_model_desc){.budget_bytes = file.n * 3 / 4, .n_readers = 2});
    mg_free(&file);
}

/* A name that is wrong is refused by the member that is; what was opened before it is closed. */
static void test_names(void) {
    static const char *const wrong[][2] = {{"cpu,bogus", "bogus"}, {"cpu,", "''"}, {",cpu", "''"}, {"cpu,hip:99", "hip"}, {"cpu,auto", "auto"},
        {"null,null,null,null,null,null,null,null,null,null,null,null", NULL}, {"0,1", "'0'"},
        {"cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu", "not known"}};
    for (size_t i = 0; i < RFT_COUNT(wrong); i++) {
        rf_error err = {0};
        rf_device *d = NULL;
        const rf_result r = rf_device_open(wrong[i][0], NULL, &d, &err);
        if (!wrong[i][1]) CHECK(r == RF_OK && strcmp(rf_device_get_info(d).name, wrong[i][0]) == 0, "%s: %s", wrong[i][0], err.text);
        else CHECK(r != RF_OK && !d && strstr(err.text, wrong[i][1]), "%s: %s", wrong[i][0], err.text);
        rf_device_close(d, NULL);
    }
}

/* Every call of every member fails, once and for ever: an error that names the member, nothing left, and no hang. */
static void test_failing_null(void) {
    static speech out;
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 4, .seed = 2});
    for (uint32_t forever = 0; forever < 2; forever++) {
        uint32_t n = 1, failed = 0;
        for (rf_result res = RF_ERR_DEVICE; n < 5000 && (res != RF_OK || n < 40); n++) {
            rig r;
            const rf_device_desc dd = {.fail_call = n, .fail_forever = forever};
            res = rig_try(&r, &(rig_how){.file = &file, .device = "null,null", .device_desc = &dd, .session = &session});
            if (res == RF_OK) res = speak(&r, &out);
            if (res != RF_OK) CHECK(strstr(r.err.text, "null: ") && ++failed, "call %u: %s", n, r.err.text);
            rig_close(&r);
        }
        CHECK(failed > 40 && n < 5000, "%u of %u calls failed", failed, n);
    }
    mg_free(&file);
}

/* Tokens that came, of two requests. */
typedef struct tokens { int32_t ids[2][16]; uint32_t n[2]; } tokens;
typedef struct client { tokens *to; int request; } client;
static int on_token(int32_t token, void *user) {
    const client *c = user;
    if (c->to->n[c->request] < 16) c->to->ids[c->request][c->to->n[c->request]++] = token;
    return 0;
}

/* Generation with drafts, and a scheduler with two requests, choose the tokens that they choose on one device. */
static void generate_on(const char *device, tokens *drafted, tokens *served) {
    static const int32_t prompts[2][6] = {{9, 30, 9, 30, 9, 30}, {5, 6, 7, 8, 9, 10}};
    rig r;
    rf_drafter *drafter = NULL;
    rf_scheduler *sch = NULL;
    const rf_tokenizer *t = NULL;
    uint32_t n_active = 1;
    client clients[2] = {{served, 0}, {served, 1}}, alone = {drafted, 0};
    rf_sampler greedy[2];
    const rf_session_desc sd = {.n_ctx = 32, .n_seq_max = 2, .n_batch = 4, .n_logits_max = 4};
    REQUIRE(rig_open(&r, &(rig_how){.path = "tests/family/gemma4.gguf", .device = device, .session = &sd}));
    CHECK(rf_drafter_open(r.m, &(rf_drafter_desc){.max_drafts = 3, .fixed = 1}, &drafter, &r.err) == RF_OK, "%s", r.err.text);
    const rf_generate_desc d = {.ids = prompts[0], .n_ids = 6, .max_tokens = 10, .drafter = drafter, .on_token = on_token, .user = &alone};
    CHECK(rf_generate(r.s, &d, NULL, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_truncate(r.s, 0, 0, NULL, &r.err) == RF_OK && rf_model_get_tokenizer(r.m, &t, &r.err) == RF_OK &&
          rf_scheduler_open(r.s, t, 2, &sch, &r.err) == RF_OK, "%s", r.err.text);
    for (int i = 0; i < 2; i++) {
        CHECK(rf_sampler_init(&greedy[i], &(rf_sampler_desc){0}, &r.err) == RF_OK, "%s", r.err.text);
        const rf_request q = {.prompt = prompts[i], .n_prompt = 6, .max_tokens = 6, .sampler = &greedy[i], .on_token = on_token, .user = &clients[i]};
        CHECK(rf_scheduler_submit(sch, &q, &r.err) == RF_OK, "%s", r.err.text);
    }
    for (int step = 0; n_active && step < 40; step++) CHECK(rf_scheduler_step(sch, &n_active, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_scheduler_close(sch, NULL) == RF_OK && rf_drafter_close(drafter, NULL) == RF_OK);
    rig_close(&r);
}
static void test_generated(void) {
    static tokens want[2], got[2];
    generate_on(ones[0], &want[0], &want[1]);
    generate_on(groups[0], &got[0], &got[1]);
    CHECK(memcmp(want, got, sizeof want) == 0 && want[0].n[0] > 5 && want[1].n[1] == 6, "other tokens than on one device");
}

static void test_embedding(void) {
    static float want[MAX_LOGITS], got[MAX_LOGITS];
    for (int k = 0; k < 2; k++) {
        rig r;
        int32_t tokens[] = {5, 6, 7, 8, 9};
        const rf_embed_text t = {tokens, 5};
        const rf_embed_desc ed = {.texts = &t, .n_texts = 1, .pooling = RF_POOL_MEAN};
        REQUIRE(rig_open(&r, &(rig_how){.path = "tests/family/gemma4.gguf", .device = k ? groups[0] : ones[0], .session = &session}));
        CHECK(rf_session_embed(r.s, &ed, k ? got : want, &r.err) == RF_OK, "%s", r.err.text);
        rig_close(&r);
    }
    CHECK(memcmp(want, got, sizeof want) == 0 && want[0] != 0, "the embedding has other bits");
}

#if defined(RF_TEST_EMU) || defined(RF_TEST_GPUS)
#ifdef RF_TEST_GPUS
static const char *const by_tensors[] = {"tensors hip:0,1", "tensors hip:1,0"};
#else
static const char *const by_tensors[] = {"tensors hip:0,2", "tensors hip:0,1,2"}; /* 3: waves of 32 and 64, 4 KV heads as 1, 1, 2 */
#endif

/* By tensors: close to one device, since sums are in parts, and the same bits each time. `others`: what the quick part leaves out,
 * which takes one group for each quantized model, by turns. */
static void tensors(int others) {
    static const mg_options models[] = {
        {.type = MG_F32, .n_layers = 3, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 160, .seed = 9, .rope_freqs = 1},
        {.type = MG_Q8_0, .arch = "qwen3", .n_heads = 8, .n_kv_heads = 4, .n_ff = 224, .seed = 9, .tied = 1},
        {.type = MG_Q4_K, .n_heads = 6, .n_kv_heads = 3, .head_dim = 128, .n_ff = 1280, .seed = 9}};
    static speech want, got, again;
    rf_error err;
    for (size_t i = others ? 0 : 1; i < RFT_COUNT(models); i++) {
        const double limit = models[i].type == MG_F32 ? 1e-3 : 2e-2;
        mg_buf file = {0};
        mg_llama(&file, &models[i]);
        say(NULL, &file, "hip:0", &want);
        for (size_t k = 0; k < RFT_COUNT(by_tensors); k++) {
            if (others == (i > 0 && k == i % RFT_COUNT(by_tensors))) continue;
            CHECK(speak_on(NULL, &file, by_tensors[k], NULL, &got, &err) == RF_OK, "%s: %s", by_tensors[k], err.text);
            CHECK(close_to(&want, &got) < limit, "%s, model %zu: off by %g", by_tensors[k], i, close_to(&want, &got));
            CHECK(i > 0 || memcmp(&want, &got, sizeof want) != 0, "%s, model %zu: the bits of one device: nothing was split", by_tensors[k], i);
            CHECK(speak_on(NULL, &file, by_tensors[k], NULL, &again, &err) == RF_OK, "%s: %s", by_tensors[k], err.text);
            CHECK(memcmp(&again, &got, sizeof got) == 0, "%s, model %zu: other bits in another run", by_tensors[k], i);
        }
        mg_free(&file);
    }
}
static void test_tensors(void) { tensors(0); }
static void test_tensors_more(void) { tensors(1); }
#endif

#ifdef RF_TEST_EMU
/* Mixtures: with shared experts and a dense layer, with biases, of more choices than a member has experts, and of one
 * choice, so that most members have none of a row's experts. */
static const mg_options mixtures[] = {
    {.arch = "qwen3moe", .type = MG_F32, .n_heads = 8, .n_kv_heads = 4, .n_experts = 6, .n_used = 4, .n_ff_expert = 32, .seed = 9},
    {.arch = "glm4moe", .type = MG_F16, .n_layers = 3, .n_heads = 8, .n_kv_heads = 4, .n_dense = 1, .n_ff = 160, .n_experts = 5, .n_ff_expert = 64, .n_shared = 2, .bias_choice = 1, .seed = 9},
    {.arch = "gpt-oss", .type = MG_Q8_0, .n_heads = 8, .n_kv_heads = 4, .head_dim = 32, .n_experts = 8, .n_used = 4, .n_ff_expert = 64, .seed = 9},
    {.arch = "glm4moe", .type = MG_Q4_0, .n_heads = 4, .n_kv_heads = 4, .head_dim = 32, .n_dense = 1, .n_ff = 128, .n_experts = 7, .n_used = 3, .n_ff_expert = 64, .n_shared = 4, .seed = 5},
    {.arch = "qwen3moe", .type = MG_Q8_0, .n_heads = 4, .n_kv_heads = 4, .head_dim = 32, .n_experts = 4, .n_used = 1, .n_ff_expert = 64, .seed = 7}};

static void tensors_experts(int others) {
    static const char *const names[] = {"tensors hip:0,2", "tensors hip:3,0,2", "tensors hip:0,1,2,3"};
    static speech want, got, again;
    rf_error err;
    for (size_t i = 0; i < RFT_COUNT(mixtures); i++) {
        const double limit = i < 2 ? 1e-4 : 2e-2;
        mg_buf file = {0};
        mg_llama(&file, &mixtures[i]);
        say(NULL, &file, "hip:0", &want);
        for (size_t k = 0; k < RFT_COUNT(names); k++) {
            if (others == (k == i % RFT_COUNT(names))) continue;
            CHECK(speak_on(NULL, &file, names[k], NULL, &got, &err) == RF_OK, "%s, mixture %zu: %s", names[k], i, err.text);
            CHECK(close_to(&want, &got) < limit, "%s, mixture %zu: off by %g", names[k], i, close_to(&want, &got));
            CHECK(speak_on(NULL, &file, names[k], NULL, &again, &err) == RF_OK, "%s: %s", names[k], err.text);
            CHECK(memcmp(&again, &got, sizeof got) == 0, "%s, mixture %zu: other bits in another run", names[k], i);
        }
        mg_free(&file);
    }
}
static void test_tensors_experts(void) { tensors_experts(0); }
static void test_tensors_experts_more(void) { tensors_experts(1); }

/* Decode steps as graphs, as on NVIDIA: whole steps, in which a product's blocks take the sum of its parts and quantize it
 * for the next product. The bits of steps in pieces. */
static void tensors_graphs(int others) {
    static const mg_options models[] = {
        {.type = MG_Q8_0, .n_heads = 8, .n_kv_heads = 4, .head_dim = 128, .n_ff = 768, .seed = 9, .tied = 1},
        {.type = MG_Q4_K, .n_heads = 6, .n_kv_heads = 3, .head_dim = 128, .n_ff = 1280, .seed = 9}};
    static speech want, got;
    rf_error err;
    for (size_t i = 0; i < RFT_COUNT(models); i++) {
        mg_buf file = {0};
        mg_llama(&file, &models[i]);
        for (size_t k = 0; k < RFT_COUNT(by_tensors); k++) {
            if (others == (i > 0 && k == i % RFT_COUNT(by_tensors))) continue;
            CHECK(speak_on(NULL, &file, by_tensors[k], NULL, &want, &err) == RF_OK, "%s: %s", by_tensors[k], err.text);
            const uint64_t before = hip_emu_get_counts().replays;
            hip_emu_trusted_graphs(1);
            CHECK(speak_on(NULL, &file, by_tensors[k], NULL, &got, &err) == RF_OK, "%s: %s", by_tensors[k], err.text);
            hip_emu_trusted_graphs(0);
            CHECK(hip_emu_get_counts().replays > before, "%s, model %zu: no graph", by_tensors[k], i);
            CHECK(memcmp(&want, &got, sizeof want) == 0, "%s, model %zu: graphs give other bits", by_tensors[k], i);
        }
        mg_free(&file);
    }
}
static void test_tensors_graphs(void) { tensors_graphs(0); }
static void test_tensors_graphs_more(void) { tensors_graphs(1); }

/* Each member's budget holds its own experts, or a cache of them, or they go through its ring: the same bits. */
static void test_tensors_experts_within(void) {
    static const struct { uint32_t tenths; int cached, streamed; } budgets[] = {{20, 0, 0}, {14, 0, 0}, {7, 1, 0}, {5, 0, 1}};
    static const rf_device_desc dd = {.split = RF_SPLIT_TENSORS};
    static speech want, got;
    mg_buf file = {0};
    rf_error err;
    mg_llama(&file, &(mg_options){.arch = "qwen3moe", .type = MG_Q8_0, .n_layers = 4, .n_heads = 4, .n_kv_heads = 4, .head_dim = 32, .n_experts = 12, .n_used = 2, .n_ff_expert = 64, .seed = 9});
    CHECK(speak_on(NULL, &file, "tensors hip:0,2", NULL, &want, &err) == RF_OK, "%s", err.text);
    for (size_t k = 0; k < RFT_COUNT(budgets); k++) {
        rig r;
        rf_forecast f = {0};
        const rf_model_desc md = {.budget_bytes = file.n * budgets[k].tenths / 10, .n_readers = 2};
        REQUIRE(rig_open(&r, &(rig_how){.file = &file, .device = "hip:0,2", .device_desc = &dd, .model = &md, .session = &session}));
        CHECK(rf_model_forecast(r.m, &session, &f, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(speak(&r, &got) == RF_OK, "%u tenths: %s", budgets[k].tenths, r.err.text);
        CHECK(memcmp(&want, &got, sizeof want) == 0, "%u tenths: other bits", budgets[k].tenths);
        CHECK((f.expert_cache_bytes > 0) == budgets[k].cached && (f.streamed_bytes > 0) == budgets[k].streamed, "%u tenths: %llu in the cache, %llu streamed",
              budgets[k].tenths, (unsigned long long)f.expert_cache_bytes, (unsigned long long)f.streamed_bytes);
        const rf_expert_stats st = rf_model_get_expert_stats(r.m, 1);
        CHECK(!budgets[k].cached || (st.misses > 6 && st.hits > 0 && rf_model_get_loading_stats(r.m).evictions > 0), "%llu hits, %llu misses", (unsigned long long)st.hits, (unsigned long long)st.misses);
        rig_close(&r);
    }
    const rf_model_desc cpu = {.budget_bytes = file.n, .expert_cpu_below = 8};
    CHECK(speak_on(NULL, &file, "tensors hip:0,2", &cpu, &got, &err) == RF_OK, "%s", err.text);
    CHECK(close_to(&want, &got) < 2e-2, "experts on the CPU: off by %g", close_to(&want, &got));
    hip_emu_memory(2, (size_t)4 << 30); /* its third of the budget is too little for its half of the experts */
    CHECK(speak_on(NULL, &file, "tensors hip:0,2", &(rf_model_desc){.budget_bytes = file.n * 14 / 10}, &got, &err) == RF_OK && memcmp(&want, &got, sizeof want) == 0, "uneven memory: %s", err.text);
    for (int i = 0; i < 4; i++) hip_emu_memory(i, (size_t)8 << 30);
    mg_free(&file);
}

/* By tensors, weights that go through the ring. */
static void test_tensors_streamed(void) {
    static speech want, got;
    mg_buf file = {0};
    rf_error err;
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 8, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160, .seed = 12, .bias = 1, .bias_out = 1, .bias_ffn = 1});
    CHECK(speak_on(NULL, &file, "tensors hip:0,2", NULL, &want, &err) == RF_OK, "%s", err.text);
    CHECK(speak_on(NULL, &file, "tensors hip:0,2", &(rf_model_desc){.budget_bytes = file.n * 3 / 4, .n_readers = 2}, &got, &err) == RF_OK, "%s", err.text);
    CHECK(memcmp(&want, &got, sizeof want) == 0, "streamed weights give other bits");
    CHECK(speak_on(NULL, &file, "hip:0", NULL, &got, &err) == RF_OK, "%s", err.text);
    CHECK(close_to(&want, &got) < 2e-2, "with biases: off by %g", close_to(&want, &got));
    mg_free(&file);
}

/* Four members, and members of uneven memory: close to one device as long as their parts fit, or an error by name. */
static void test_tensors_uneven(void) {
    static const char *const names[] = {"tensors hip:0,1,2,3", "tensors hip:0,2", "tensors hip:2,3,0"};
    static speech want, got;
    mg_buf file = {0};
    rf_error err;
    mg_llama(&file, &(mg_options){.type = MG_F32, .n_layers = 3, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 160, .seed = 9});
    say(NULL, &file, "hip:0", &want);
    for (int i = 0; i < 4; i++) hip_emu_memory(i, file.n * (size_t)(i == 2 ? 2 : 4));
    for (size_t k = 0; k < RFT_COUNT(names); k++) {
        CHECK(speak_on(NULL, &file, names[k], NULL, &got, &err) == RF_OK, "%s: %s", names[k], err.text);
        CHECK(close_to(&want, &got) < 1e-3, "%s: off by %g", names[k], close_to(&want, &got));
    }
    hip_emu_memory(2, 64 << 10);
    const rf_result res = speak_on(NULL, &file, names[1], NULL, &got, &err);
    CHECK((res == RF_ERR_MEMORY || res == RF_ERR_DEVICE) && strstr(err.text, "hip:2"), "too little memory: %s", err.text);
    for (int i = 0; i < 4; i++) hip_emu_memory(i, (size_t)8 << 30);
    mg_free(&file);
}

/* What cannot be split says so when it is opened, by name. */
static void test_tensors_refused(void) {
    static const char *const wrong[][3] = {
        {"tests/family/mixtral.gguf", "hip:0,2,3", "fewer KV heads or columns than devices"},
        {"tests/family/qwen35moe.gguf", "hip:0,2", "ops of this kind are not split yet"},
        {"tests/family/deepseek2-lite.gguf", "hip:0,2", "cannot be split by tensors"},
        {"tests/family/gemma4.gguf", "hip:0,1,2,3", "cannot be split by tensors"},
        {"examples/shakespeare-5m.gguf", "hip:0,2", "attn_output.weight) cannot be split by tensors: its rows would be cut within blocks"},
        {"examples/shakespeare-5m.gguf", "cpu,cpu", "for GPUs only"}, {"examples/shakespeare-5m.gguf", "hip:0,cpu", "for GPUs only"},
        {"examples/shakespeare-5m.gguf", "hip:0,2,0", "hip:0 twice"}};
    static speech got;
    rf_error err;
    for (size_t i = 0; i < RFT_COUNT(wrong); i++) {
        char name[32];
        snprintf(name, sizeof name, "tensors %s", wrong[i][1]);
        CHECK(speak_on(wrong[i][0], NULL, name, NULL, &got, &err) == RF_ERR_UNSUPPORTED && strstr(err.text, wrong[i][2]), "%s on %s: %s", wrong[i][0], name, err.text);
    }
    rig r; /* sums of rows that are no whole float4, and keys that no attention reads */
    mg_buf file = {0};
    const rf_device_desc dd = {.split = RF_SPLIT_TENSORS};
    mg_llama(&file, &(mg_options){.type = MG_F32, .n_layers = 1, .n_embd = 50, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .n_ff = 160, .seed = 9});
    CHECK(rig_try(&r, &(rig_how){.file = &file, .device = "hip:0,2", .device_desc = &dd}) == RF_ERR_UNSUPPORTED && strstr(r.err.text, "attn_output.weight) cannot be split"), "%s", r.err.text);
    mg_free(&file);
    rf_device *d = NULL;
    rf_dev *dev = NULL;
    REQUIRE(rf_device_open("hip:0,2", &dd, &d, &err) == RF_OK, "%s", err.text);
    const rf_device_api *api = rf_device_get_api(d, &dev);
    const rf_plan_buffer buffer = {"k", RF_ROWS_TOKENS, 64};
    const rf_plan_state state = {.n_kv_heads = 2, .head_dim = 32};
    const float table[16] = {0};
    const rf_op ops[] = {{.kind = RF_OP_ROPE, .in2 = RF_NONE, .in3 = RF_NONE, .weight = RF_NONE, .bias = RF_NONE, .factor = RF_NONE,
                          .rope = {.n_heads = 2, .head_dim = 32, .n_rot = 32, .scale = 1}},
                         {.kind = RF_OP_KV_STORE, .in2 = RF_NONE, .in3 = RF_NONE, .out = RF_NONE, .weight = RF_NONE, .bias = RF_NONE, .factor = RF_NONE,
                          .kv_store = {2, 32, 0}}};
    const rf_plan plan = {.ops = ops, .n_ops = 2, .buffers = &buffer, .n_buffers = 1, .states = &state, .n_states = 1, .tables = table, .n_tables = 16, .n_layers = 1, .n_vocab = 1};
    CHECK(api->op_supported(dev, &plan, &ops[0], &err) == RF_ERR_UNSUPPORTED && strstr(err.text, "heads of no KV head"), "%s", err.text);
    rf_device_close(d, NULL);
    hip_emu_peers(HIP_EMU_PEERS_REFUSED);
    CHECK(speak_on(wrong[2][0], NULL, "tensors hip:0,2", NULL, &got, &err) == RF_ERR_UNSUPPORTED && strstr(err.text, "no peer access"), "%s", err.text);
    hip_emu_peers(HIP_EMU_PEERS_OK);
}

/* By tensors, sums by kernels, by RCCL, and large ones alone by RCCL: the same bits. What does not work, or is slower, is not
 * used, and the note says so. */
static void rccl(size_t first, size_t end) {
    static const struct { int rccl, peers, uses; const char *note; } ways[] = {
        {HIP_EMU_RCCL_NONE, HIP_EMU_PEERS_OK, 0, "sums by kernels: hip: ncclGetUniqueId: system error"},
        {HIP_EMU_RCCL_SLOW, HIP_EMU_PEERS_OK, 0, "sums by kernels: of 14336 values kernels take "},
        {HIP_EMU_RCCL_FAST, HIP_EMU_PEERS_OK, 1, "sums by RCCL from 1792 values on: of 14336 values kernels take "},
        {HIP_EMU_RCCL_SLOW, HIP_EMU_PEERS_REFUSED, 2, "sums by RCCL: hip:0 from hip:2: hip:0: no peer access to hip:2"},
        {HIP_EMU_RCCL_WRONG, HIP_EMU_PEERS_OK, 0, "sums by kernels: hip:0: a sum gave wrong values"},
        {HIP_EMU_RCCL_HANG, HIP_EMU_PEERS_OK, 0, "sums by kernels: hip:0: not finished after 5000 ms"},
        {HIP_EMU_RCCL_SLOW, HIP_EMU_PEERS_WRONG, 2, "sums by RCCL: hip:0 from hip:2: a copy from hip:2 gave wrong bytes"},
        {HIP_EMU_RCCL_WRONG, HIP_EMU_PEERS_REFUSED, -1, "no peer access to hip:2; hip:0: a sum gave wrong values"}};
    static const char *const names[] = {"hip:0,2", "hip:0,2,1"};
    static const rf_device_desc dd = {.split = RF_SPLIT_TENSORS};
    static speech want, got;
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_F32, .n_layers = 2, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 160, .seed = 9, .rope_freqs = 1});
    for (size_t k = first; k < end; k++)
        for (size_t i = 0; i < (k ? 4 : RFT_COUNT(ways)); i++) {
            rig r;
            hip_emu_rccl(ways[i].rccl);
            hip_emu_peers(ways[i].peers);
            const rf_result res = rig_try(&r, &(rig_how){.file = &file, .device = names[k], .device_desc = &dd, .session = &session});
            hip_emu_rccl(HIP_EMU_RCCL_SLOW);
            const char *said = res == RF_OK ? rf_device_get_info(r.d).note : r.err.text;
            CHECK((res == RF_OK) == (ways[i].uses >= 0) && strstr(said, ways[i].note), "%s, way %zu: %d '%s'", names[k], i, res, said);
            if (res == RF_OK) {
                const uint64_t before = hip_emu_rccl_transfers();
                CHECK(speak(&r, i ? &got : &want) == RF_OK, "%s, way %zu: %s", names[k], i, r.err.text);
                const uint64_t n = hip_emu_rccl_transfers() - before;
                CHECK(i == 0 || memcmp(&want, &got, sizeof want) == 0, "%s, way %zu: other bits", names[k], i);
                CHECK(ways[i].uses == 0 ? n == 0 : ways[i].uses == 1 ? n > 0 && n < 110 : n > 110, "%s, way %zu: %u transfers", names[k], i, (unsigned)n);
            }
            rig_close(&r);
            const hip_emu_counts now = hip_emu_get_counts();
            CHECK(now.allocations + now.host_allocations + now.streams + now.comms == 0, "%s, way %zu: a leak", names[k], i);
        }
    hip_emu_rccl(HIP_EMU_RCCL_NONE);
    hip_emu_peers(HIP_EMU_PEERS_OK);
    mg_free(&file);
}

static void test_rccl(void) { rccl(0, 1); }
static void test_rccl_of_three(void) { rccl(1, 2); }

/* Calls that fail, of RCCL too, while sums go by it: an error, or the same bits by kernels; then the session goes on by kernels. */
static void rccl_failing(int peers) {
    static const rf_device_desc dd = {.split = RF_SPLIT_TENSORS};
    static speech want, got;
    mg_buf file = {0};
    uint32_t noticed = 0, n = 0;
    uint64_t n_calls = 1, opened = 0;
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 2, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 160, .seed = 12});
    hip_emu_peers(peers);
    for (uint64_t call = 0; call < n_calls; call += 1 + n_calls / 50, n++) {
        rig r;
        const uint64_t before = hip_emu_get_counts().calls;
        hip_emu_rccl(HIP_EMU_RCCL_FAST);
        hip_emu_fail_call(call, 0);
        rf_result res = rig_try(&r, &(rig_how){.file = &file, .device = "hip:0,2", .device_desc = &dd, .session = &session});
        hip_emu_rccl(HIP_EMU_RCCL_SLOW);
        if (call == 0) opened = hip_emu_get_counts().calls - before;
        if (res == RF_OK) res = speak(&r, call ? &got : &want);
        if (call == 0) n_calls = hip_emu_get_counts().calls - before;
        hip_emu_fail_call(0, 0);
        noticed += res != RF_OK || strstr(rf_device_get_info(r.d).note, "fail") || strstr(rf_device_get_info(r.d).note, "error");
        CHECK(call || res == RF_OK, "%s", r.err.text);
        CHECK(res == RF_OK || strncmp(r.err.text, "hip", 3) == 0, "call %d: %s", (int)call, r.err.text);
        CHECK(res != RF_OK || call == 0 || memcmp(&want, &got, sizeof want) == 0, "call %d failed unnoticed and gave other bits", (int)call);
        if (res != RF_OK && r.s && peers == HIP_EMU_PEERS_OK)
            CHECK(speak(&r, &got) == RF_OK && memcmp(&want, &got, sizeof want) == 0, "after call %d: %s", (int)call, r.err.text);
        rig_close(&r);
        const hip_emu_counts now = hip_emu_get_counts();
        CHECK(now.allocations + now.host_allocations + now.streams + now.comms == 0, "call %d: a leak", (int)call);
    }
    CHECK(opened < n_calls && noticed > n / 3, "%u of %u failures noticed", noticed, n);
    hip_emu_peers(HIP_EMU_PEERS_OK);
    hip_emu_rccl(HIP_EMU_RCCL_NONE);
    mg_free(&file);
}
static void test_rccl_failing(void) { rccl_failing(HIP_EMU_PEERS_OK), rccl_failing(HIP_EMU_PEERS_REFUSED); }

/* Members that cannot copy from each other, or do so wrongly or without end, hand activations through host memory. */
static void test_peers(void) {
    static const char *const why[] = {NULL, "no peer access", "wrong bytes", "hangs"};
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 2, .seed = 12});
    for (int how = HIP_EMU_PEERS_OK; how <= HIP_EMU_PEERS_HANG; how++) {
        const uint64_t before = hip_emu_peer_copies();
        rf_device *d = NULL;
        rf_error err = {0};
        hip_emu_peers(how);
        CHECK(rf_device_open("hip:0,2", NULL, &d, &err) == RF_OK, "%s", err.text);
        const rf_device_info info = rf_device_get_info(d);
        CHECK(why[how] ? strstr(info.note, why[how]) && strstr(info.note, "hip:2 from hip:0") : !info.note[0], "%d: '%s'", how, info.note);
        if (how == HIP_EMU_PEERS_HANG) hip_emu_peers(HIP_EMU_PEERS_OK); /* so that it can be closed */
        CHECK(rf_device_close(d, &err) == RF_OK, "%s", err.text);
        if (how == HIP_EMU_PEERS_HANG) break;
        const uint64_t probes = hip_emu_peer_copies() - before;
        same_case(NULL, &file, "hip:0", "hip:0,2", NULL);
        const uint64_t copies = hip_emu_peer_copies() - before - 2 * probes;
        CHECK(how == HIP_EMU_PEERS_OK ? copies > N_STEPS : copies == 0, "%d: %u copies between GPUs", how, (unsigned)copies);
    }
    hip_emu_peers(HIP_EMU_PEERS_OK);
    const hip_emu_counts now = hip_emu_get_counts();
    CHECK(now.allocations == 0 && now.host_allocations == 0 && now.streams == 0, "a leak");
    mg_free(&file);
}

/* GPUs of uneven memory, and the CPU for what does not fit on them: within the members' memory, and close to the CPU. */
static void test_uneven(void) {
    static const char *const names[] = {"hip:0,2", "hip:all", "hip:0,1,cpu"};
    static speech want, got;
    mg_buf file = {0};
    rf_error err;
    mg_llama(&file, &(mg_options){.type = MG_F32, .n_layers = 5, .seed = 7});
    CHECK(speak_on(NULL, &file, "cpu", NULL, &want, &err) == RF_OK, "%s", err.text);
    for (int i = 0; i < 4; i++) hip_emu_memory(i, file.n * (i ? 2 : 1));
    for (size_t k = 0; k < RFT_COUNT(names); k++) {
        CHECK(speak_on(NULL, &file, names[k], NULL, &got, &err) == RF_OK, "%s: %s", names[k], err.text);
        CHECK(close_to(&want, &got) < 1e-3, "%s: off by %g", names[k], close_to(&want, &got));
    }
    static const size_t tenths[][2] = {{5, 5}, {3, 7}};
    for (size_t k = 0; k < RFT_COUNT(tenths); k++) { /* what does not fit its member is streamed */
        for (int i = 0; i < 2; i++) hip_emu_memory(2 * i, file.n * tenths[k][i] / 10);
        CHECK(speak_on(NULL, &file, "hip:0,2", NULL, &got, &err) == RF_OK, "%zu: %s", k, err.text);
        CHECK(close_to(&want, &got) < 1e-3, "%zu tenths: off by %g", tenths[k][0], close_to(&want, &got));
    }
    hip_emu_memory(2, 64 << 10); /* what it has free is less than its part needs */
    rf_result res = speak_on(NULL, &file, "hip:2,2", NULL, &got, &err);
    CHECK(res == RF_ERR_MEMORY || res == RF_ERR_DEVICE, "too little memory: %s", err.text);
    for (int i = 0; i < 4; i++) hip_emu_memory(i, (size_t)8 << 30);
    mg_free(&file);
}

/* Members of two units, with AMD's fused blocks: the same calls of the runtime as with five and 1,024 threads, in less
 * time. */
static void be_small(int on) {
    hip_emu_units(on ? 2 : 5);
    for (int i = 0; i < 4; i += 2) hip_emu_fused_block(i, on ? 512 : 1024);
}

/* Calls of the runtime fail, one in each run: an error that names a member, other bits never, and nothing is left. */
static void failing_calls(const char *group, const mg_options *model, uint32_t n_runs) {
    static speech want, got;
    mg_buf file = {0};
    rf_error err;
    uint32_t noticed = 0, n = 0;
    mg_llama(&file, model);
    be_small(1);
    hip_emu_counts before = hip_emu_get_counts();
    CHECK(speak_on(NULL, &file, group, NULL, &want, &err) == RF_OK, "%s", err.text);
    const uint64_t n_calls = hip_emu_get_counts().calls - before.calls;
    for (uint64_t call = 1; call < n_calls; call += 1 + n_calls / n_runs, n++) {
        const int forever = n % 2;
        hip_emu_fail_call(call, forever);
        const rf_result res = speak_on(NULL, &file, group, NULL, &got, &err);
        hip_emu_fail_call(0, 0);
        noticed += res != RF_OK;
        CHECK(res == RF_OK || strncmp(err.text, "hip", 3) == 0, "call %d: %s", (int)call, err.text);
        CHECK(res != RF_OK || memcmp(&want, &got, sizeof want) == 0, "call %d failed unnoticed and gave other bits", (int)call);
        const hip_emu_counts now = hip_emu_get_counts();
        CHECK(now.allocations == before.allocations && now.host_allocations == before.host_allocations && now.streams == before.streams, "call %d: a leak", (int)call);
    }
    CHECK(noticed > n / 2, "%u of %u failures noticed", noticed, n);
    hip_emu_fail_work(200); /* a member is lost in the middle of its work */
    CHECK(speak_on(NULL, &file, group, NULL, &got, &err) == RF_ERR_DEVICE && (strstr(err.text, "hip:0") || strstr(err.text, "hip:2")), "%s", err.text);
    hip_emu_fail_work(0);
    hip_emu_recover();
    be_small(0);
    mg_free(&file);
}

/* After a call that fails in a step the same session goes on with the right bits. */
static void tensors_go_on(const mg_options *model, uint32_t n_runs) {
    static speech want, got;
    static const rf_device_desc dd = {.split = RF_SPLIT_TENSORS};
    mg_buf file = {0};
    rig r;
    uint32_t noticed = 0, n = 0;
    mg_llama(&file, model);
    be_small(1);
    REQUIRE(rig_open(&r, &(rig_how){.file = &file, .device = "hip:0,2", .device_desc = &dd, .session = &session}));
    CHECK(speak(&r, &want) == RF_OK, "%s", r.err.text);
    const uint64_t before = hip_emu_get_counts().calls;
    CHECK(speak(&r, &want) == RF_OK, "%s", r.err.text);
    const uint64_t n_calls = hip_emu_get_counts().calls - before;
    for (uint64_t call = 1; call < n_calls; call += 1 + n_calls / n_runs, n++) {
        hip_emu_fail_call(call, 0);
        const rf_result res = speak(&r, &got);
        hip_emu_fail_call(0, 0);
        noticed += res != RF_OK;
        CHECK(res == RF_OK || strstr(r.err.text, "hip:0") || strstr(r.err.text, "hip:2"), "call %d: %s", (int)call, r.err.text);
        CHECK(speak(&r, &got) == RF_OK, "after call %d: %s", (int)call, r.err.text);
        CHECK(memcmp(&want, &got, sizeof want) == 0, "after call %d: other bits", (int)call);
    }
    CHECK(noticed > n / 2, "%u of %u failures noticed", noticed, n);
    be_small(0);
    rig_close(&r);
    mg_free(&file);
}
static const mg_options dense = {.type = MG_Q4_0, .n_layers = 2, .n_ff = 128, .seed = 12};
static void test_tensors_go_on(void) { tensors_go_on(&dense, 12), tensors_go_on(&mixtures[3], 6); }

/* Two threads with a session each, by tensors: a sum may fill its device, so that work must begin in one order on all. */
typedef struct talker {
    rf_session *s;
    uint32_t n_vocab, n_wrong;
    float want[MAX_LOGITS];
    rf_result res;
    rf_error err;
} talker;
static void *talk(void *user) {
    talker *t = (talker *)user;
    int32_t tokens[N_PROMPT];
    float *row = NULL;
    mg_tokens(tokens, N_PROMPT, t->n_vocab, 3);
    for (int i = 0; i < 6 && t->res == RF_OK; i++) {
        t->res = rf_session_truncate(t->s, 0, 0, NULL, &t->err);
        if (t->res == RF_OK) t->res = rf_session_forward(t->s, tokens, N_PROMPT, &row, &t->err);
        if (t->res == RF_OK) t->n_wrong += memcmp(t->want, row, t->n_vocab * sizeof *row) != 0;
    }
    return NULL;
}
static void test_tensors_threads(void) {
    static const rf_device_desc dd = {.split = RF_SPLIT_TENSORS};
    static const rf_session_desc narrow = {.n_ctx = 32, .n_seq_max = 1, .n_batch = 1}; /* several steps are in flight */
    static talker talkers[2];
    int32_t tokens[N_PROMPT];
    pthread_t threads[2];
    mg_buf file = {0};
    float *row = NULL;
    rig r;
    mg_llama(&file, &dense);
    REQUIRE(rig_open(&r, &(rig_how){.file = &file, .device = "hip:0,2", .device_desc = &dd, .session = &narrow}));
    mg_tokens(tokens, N_PROMPT, r.n_vocab, 3);
    CHECK(rf_session_forward(r.s, tokens, N_PROMPT, &row, &r.err) == RF_OK, "%s", r.err.text);
    for (int i = 0; i < 2; i++) {
        talker *t = &talkers[i];
        *t = (talker){.s = r.s, .n_vocab = r.n_vocab};
        memcpy(t->want, row, r.n_vocab * sizeof *row);
        CHECK(i == 0 || rf_session_open(r.m, &narrow, &t->s, &r.err) == RF_OK, "%s", r.err.text);
    }
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, talk, &talkers[i]) == 0, "a thread");
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        CHECK(talkers[i].res == RF_OK && talkers[i].n_wrong == 0, "thread %d: %u with other bits, %s", i, talkers[i].n_wrong, talkers[i].err.text);
    }
    rf_session_close(talkers[1].s, NULL);
    rig_close(&r);
    mg_free(&file);
}
static void test_tensors_go_on_more(void) { tensors_go_on(&dense, 50), tensors_go_on(&mixtures[3], 50); }
static void test_failing_calls(void) { failing_calls("hip:0,2", &dense, 12); }
static void test_failing_more(void) { failing_calls("hip:0,2", &dense, 150); }
static void test_tensors_failing(void) { failing_calls("tensors hip:0,2", &dense, 12), failing_calls("tensors hip:0,2", &mixtures[3], 8); }
static void test_tensors_failing_more(void) { failing_calls("tensors hip:0,2", &dense, 150), failing_calls("tensors hip:0,2", &mixtures[3], 150); }
#endif

/* ---- loading ---- */

/* A file in memory, whose reads of a layer wait a little for a read of the other layer. */
typedef struct two_layers {
    mg_buf file;
    uint64_t begin[3];           /* of the layers, and the second one's end */
    _Atomic int n_reading[2];    /* now */
    _Atomic int n_alone, n_both; /* reads that met none of the other layer, and that did */
} two_layers;

static int64_t layers_open(const char *path, uint64_t *size_bytes, void *user) {
    (void)path;
    *size_bytes = ((const two_layers *)user)->file.n;
    return 7;
}
static void layers_close(int64_t handle, void *user) { (void)handle, (void)user; }
static int64_t layers_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    two_layers *f = (two_layers *)user;
    (void)handle;
    if (n > f->file.n - offset) n = f->file.n - offset;
    if (n > 1 << 20 && offset >= f->begin[0] && offset < f->begin[2]) { /* not once it is only a row of norms */
        const int at = offset >= f->begin[1];
        int met = 0;
        atomic_fetch_add(&f->n_reading[at], 1);
        for (int i = 0; i < 200 && !met; i++) {
            met = atomic_load(&f->n_reading[!at]) > 0;
            if (!met) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        nanosleep(&(struct timespec){.tv_nsec = 4000000}, NULL); /* the other one looks, too */
        atomic_fetch_sub(&f->n_reading[at], 1);
        atomic_fetch_add(met ? &f->n_both : &f->n_alone, 1);
    }
    memcpy(dst, f->file.data + offset, n);
    return (int64_t)n;
}

/* Members are loaded side by side, each over its own link, not a matrix of one after a matrix of another: with two threads
 * (a reader and the caller) nearly all reads of a layer are at the same time as one of the other, on another member. */
static void test_loads_side_by_side(void) {
    static two_layers f;
    const rf_gguf_desc gd = {.no_map = 1, .io = {.open_fn = layers_open, .read_fn = layers_read, .close_fn = layers_close, .user = &f}};
    rf_tensor_info t;
    rig r;
    memset(&f, 0, sizeof f);
    mg_llama(&f.file, &(mg_options){.type = MG_F16, .n_embd = 512, .n_ff = 10240}); /* matrices of 10 MiB: five reads */
    f.begin[0] = f.begin[1] = f.begin[2] = f.file.n;
    REQUIRE(rig_open(&r, &(rig_how){.path = "two layers", .gguf = &gd, .device = groups[0], .model = &(rf_model_desc){.n_readers = 1}}));
    for (uint32_t il = 0; il < 2; il++) {
        const char *names[] = {"blk.0.attn_norm.weight", "blk.1.attn_norm.weight"};
        CHECK(rf_gguf_find_tensor(r.g, names[il], &t, &r.err) == RF_OK, "%s", r.err.text);
        f.begin[il] = t.offset_bytes;
    }
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(f.n_both + f.n_alone == 30 && f.n_alone <= 8, "%d reads beside one of the other layer, %d alone", f.n_both, f.n_alone);
    rig_close(&r);
    mg_free(&f.file);
}

/* A file in memory that counts what the only reader reads of it. */
typedef struct read_order {
    mg_buf file;
    pthread_t caller;
    uint64_t output, output_end; /* in the file */
    int n_before, is_read;       /* its reads of other matrices before the first of the output */
} read_order;

static int64_t order_open(const char *path, uint64_t *size_bytes, void *user) {
    (void)path;
    *size_bytes = ((const read_order *)user)->file.n;
    return 7;
}
static int64_t order_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    read_order *f = (read_order *)user;
    (void)handle;
    if (n > f->file.n - offset) n = f->file.n - offset;
    if (f->output_end && !pthread_equal(pthread_self(), f->caller)) {
        f->is_read |= offset >= f->output && offset < f->output_end;
        f->n_before += !f->is_read && n > 1 << 16; /* no norms */
    }
    if (f->output_end) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    memcpy(dst, f->file.data + offset, n);
    return (int64_t)n;
}

/* The output before the layers, also where it is on the last of several members and one thread reads for all. */
static void test_critical_first(void) {
    static read_order f;
    const rf_gguf_desc gd = {.no_map = 1, .io = {.open_fn = order_open, .read_fn = order_read, .close_fn = layers_close, .user = &f}};
    const rf_model_desc md = {.n_readers = 1, .load_policy = RF_LOAD_CRITICAL_FIRST};
    rf_tensor_info t;
    rig r;
    const int32_t token = 3;
    memset(&f, 0, sizeof f);
    f.caller = pthread_self();
    mg_llama(&f.file, &(mg_options){.type = MG_F16, .n_embd = 256, .n_ff = 1024, .n_layers = 12});
    REQUIRE(rig_open(&r, &(rig_how){.path = "an order", .gguf = &gd, .device = groups[1], .model = &md, .session = &session}));
    CHECK(rf_gguf_find_tensor(r.g, "output.weight", &t, &r.err) == RF_OK, "%s", r.err.text);
    f.output = t.offset_bytes, f.output_end = t.offset_bytes + t.size_bytes;
    CHECK(rf_session_forward(r.s, &token, 1, NULL, &r.err) == RF_OK, "%s", r.err.text);
    rig_close(&r); /* the reader has ended */
    CHECK(f.is_read && f.n_before <= 6, "%d matrices were read before the output", f.n_before); /* two a member at most, of 84 */
    mg_free(&f.file);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
#ifdef RF_TEST_EMU
    hip_emu_devices(4, 0);
    hip_emu_rccl(HIP_EMU_RCCL_NONE);
    RUN(test_tensors);
    RUN_SLOW(test_tensors_more);
    RUN_SLOW(test_tensors_graphs);
    RUN_SLOW(test_tensors_graphs_more);
    RUN_SLOW(test_rccl);
    RUN_SLOW(test_rccl_of_three);
    RUN_SLOW(test_rccl_failing);
    RUN_SLOW(test_tensors_experts);
    RUN_SLOW(test_tensors_experts_more);
    RUN_SLOW(test_tensors_experts_within);
    RUN(test_tensors_streamed);
    RUN_SLOW(test_tensors_uneven);
    RUN(test_tensors_refused);
    RUN_SLOW(test_tensors_failing);
    RUN_SLOW(test_tensors_failing_more);
    RUN_SLOW(test_tensors_go_on);
    RUN_SLOW(test_tensors_go_on_more);
    RUN(test_tensors_threads);
    RUN(test_peers);
    RUN_SLOW(test_uneven);
    RUN(test_same_bits_of_20_rows);
    RUN(test_rows_of_a_batch);
    RUN(test_failing_calls);
    RUN_SLOW(test_failing_more);
#endif
#ifdef RF_TEST_GPUS
    RUN(test_tensors);
    RUN(test_tensors_more);
#endif
    RUN(test_same_bits);
    RUN(test_loads_side_by_side);
    RUN(test_critical_first);
    RUN_SLOW(test_budgets);
    RUN(test_names);
    RUN(test_failing_null);
    RUN(test_generated);
    RUN(test_embedding);
    RFT_END();
}
