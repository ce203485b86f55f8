/* cc -O2 -I. -o test_mtp tests/test_mtp.c -lm -pthread && ./test_mtp        from the repository root
 * Heads for multi-token prediction (MTP): their logits against a forward pass in float64 (tests/make_family_goldens.py), and
 * as drafters: the same tokens as without, and the same drafts after rejected ones as if the text had been the prompt. With
 * the kernels linked (hip_mtp) logits and drafts are those of the GPUs in turn. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <math.h>
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

#define N_VOCAB 64
#define N_PROMPT 28
#define N_DRAFTS 4
#define TOLERANCE (n_gpus ? 2.5e-4 : 1e-4) /* as tests/test_goldens.c, which says why */

static const char *const families[] = {"qwen35-mtp", "qwen35moe-mtp", "glm4moe-mtp", "deepseek2-mtp", "mimo2-mtp", "step35-mtp",
                                       "qwen3next-mtp", "nemotron-h-moe-mtp"};
static const uint64_t tight[] = {40000, 56000, 48000, 69000, 32000, 32000, 64000, 40000}; /* bytes of weights: they are streamed */

static rig r;                         /* the model      */
static rf_model *heads[RF_MTP_HEADS]; /* and its heads  */
static rf_session *hs[RF_MTP_HEADS];
static uint32_t n_heads;
static int mode;           /* of the file */
static uint64_t budget;    /* bytes for the weights of each; 0: no limit */
static const char *device; /* NULL: the CPU                              */
static rf_device_info gpus[8];
static uint32_t n_gpus;

static int32_t prompt[N_PROMPT], drafts[N_DRAFTS];
static float wanted[N_PROMPT + N_DRAFTS - 1][N_VOCAB]; /* the first head's logits, then those that make the other drafts */

static void close_sessions(rf_session **of) {
    for (uint32_t k = 0; k < n_heads; k++) rf_session_close(of[k], NULL), of[k] = NULL;
}
static void close_all(void) {
    close_sessions(hs);
    for (uint32_t k = 0; k < n_heads; k++) CHECK(rf_model_close(heads[k], NULL) == RF_OK);
    memset(heads, 0, sizeof heads);
    n_heads = 0;
    rig_close(&r);
}

static int open_sessions(uint32_t n_ctx, rf_session **out) {
    rf_result res = RF_OK;
    for (uint32_t k = 0; k < n_heads && res == RF_OK; k++) {
        const rf_session_desc desc = {.n_ctx = n_ctx, .n_logits_max = 32, .mtp = k + 1 < n_heads, .cache_type = RF_CACHE_F32};
        res = rf_session_open(heads[k], &desc, &out[k], &r.err);
    }
    return res == RF_OK;
}

/* path, or the bytes of a file */
static int open_file(const char *path, const mg_buf *file, uint32_t n_batch, uint32_t n_ctx_head) {
    close_all();
    const rf_session_desc desc = {.n_ctx = 96, .n_batch = n_batch, .n_logits_max = 8, .n_snapshots = 8, .mtp = 1, .cache_type = RF_CACHE_F32};
    if (!rig_open(&r, &(rig_how){.path = path, .file = file, .mode = mode, .device = device, .model = &(rf_model_desc){.budget_bytes = budget}, .session = &desc})) return 0;
    n_heads = rf_model_get_info(r.m).n_mtp;
    if (n_heads == 0 || n_heads > RF_MTP_HEADS) return 0;
    for (uint32_t k = 0; k < n_heads; k++)
        if (rf_model_open(r.g, r.d, &(rf_model_desc){.mtp = k + 1, .budget_bytes = budget}, &heads[k], &r.err) != RF_OK) return 0;
    return open_sessions(n_ctx_head, hs);
}
static int open_all(const char *name, uint32_t n_batch, uint32_t n_ctx_head) {
    char path[64];
    snprintf(path, sizeof path, "tests/family/%s.gguf", name);
    return open_file(path, NULL, n_batch, n_ctx_head);
}

/* Tokens of the prompt, and of a head's drafts and logits after it. */
static int read_answers(const char *name) {
    char path[64];
    int ok = 1;
    float unused;
    snprintf(path, sizeof path, "tests/family/%s.txt", name);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    ok = fscanf(f, "tokens") == 0;
    for (int i = 0; ok && i < N_PROMPT; i++) ok = fscanf(f, "%d", &prompt[i]) == 1;
    ok = ok && fscanf(f, " greedy%*[^\n] margins%*[^\n]") == 0;
    for (int i = 0; ok && i < N_PROMPT * N_VOCAB; i++) ok = fscanf(f, "%f", &unused) == 1;
    ok = ok && fscanf(f, " drafts") == 0;
    for (int i = 0; ok && i < N_DRAFTS; i++) ok = fscanf(f, "%d", &drafts[i]) == 1;
    for (int i = 0; ok && i < (N_PROMPT + N_DRAFTS - 1) * N_VOCAB; i++) ok = fscanf(f, "%f", &wanted[i / N_VOCAB][i % N_VOCAB]) == 1;
    fclose(f);
    return ok;
}

static double distance(const float *logits, const float *want) {
    double worst = 0;
    for (int i = 0; i < N_VOCAB; i++) worst = rft_worst(worst, fabs((double)logits[i] - (double)want[i]));
    return worst;
}

/* Head k reads places before `end`, in calls of some rows; of the tokens from N_PROMPT on drafts. given: [end] hidden rows, in
 * whose place come the head's own. Returns how far its logits are from the reference's; *id: its draft. */
static double read_places(uint32_t k, uint32_t end, uint32_t part, float (*given)[64], int32_t *id) {
    rf_token_row rows[N_PROMPT + N_DRAFTS];
    static float own[N_PROMPT + N_DRAFTS][64];
    double worst = 0;
    float *logits;
    for (uint32_t at = 0, n; at < end; at += n) {
        n = part < end - at ? part : end - at;
        for (uint32_t i = 0; i < n; i++)
            rows[i] = (rf_token_row){.token = at + i < N_PROMPT ? prompt[at + i] : drafts[at + i - N_PROMPT], .embedding = given[at + i],
                                     .pos = RF_POS_NEXT, .want_logits = 1};
        const rf_result res = rf_session_eval(hs[k], rows, n, &r.err);
        CHECK(res == RF_OK && rf_session_get_argmax(hs[k], n - 1, id, NULL) == RF_OK, "%s", r.err.text);
        for (uint32_t i = 0; res == RF_OK && i < n; i++) {
            CHECK(rf_session_hidden(hs[k], i, 1, own[at + i], NULL) == RF_OK && rf_session_get_logits(hs[k], i, &logits, NULL) == RF_OK);
            if (hs[k]->desc.mtp) CHECK(memcmp(own[at + i], hs[k]->hidden + i * r.n_embd, r.n_embd * sizeof(float)) == 0);
            if (k == 0 || at + i + 1 == end) worst = rft_worst(worst, distance(logits, wanted[at + i]));
        }
    }
    memcpy(given, own, end * sizeof *given);
    return worst;
}

/* Every logit of the first head, and those of each draft: a head reads the text and the drafts before with what the one before
 * made of it; the last one goes on with its own. */
static void check_logits(const char *name, uint32_t part) {
    static float hidden[N_PROMPT + N_DRAFTS][64];
    int32_t id = -1;
    double worst = 0;
    REQUIRE(open_all(name, 0, 64) && read_answers(name), "%s: %s", name, r.err.text);
    CHECK(r.n_embd <= 64 && rf_session_forward(r.s, prompt, N_PROMPT, NULL, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < N_PROMPT; i++) memcpy(hidden[i], r.s->hidden + i * r.n_embd, r.n_embd * sizeof(float));
    for (uint32_t i = 0; i < N_DRAFTS; i++) {
        if (i < n_heads) {
            memmove(hidden[1], hidden[0], (N_PROMPT + i) * sizeof *hidden);
            memset(hidden[0], 0, sizeof *hidden);
            worst = rft_worst(worst, read_places(i, N_PROMPT + i, part, hidden, &id));
        } else {
            float *logits, *own = hidden[N_PROMPT + n_heads - 2];
            const rf_token_row row = {.token = id, .embedding = own, .pos = RF_POS_NEXT, .want_logits = 1};
            REQUIRE(rf_session_eval(hs[n_heads - 1], &row, 1, &r.err) == RF_OK, "%s", r.err.text);
            CHECK(rf_session_get_logits(hs[n_heads - 1], 0, &logits, NULL) == RF_OK && rf_session_get_argmax(hs[n_heads - 1], 0, &id, NULL) == RF_OK &&
                  rf_session_hidden(hs[n_heads - 1], 0, 1, own, NULL) == RF_OK);
            worst = rft_worst(worst, distance(logits, wanted[N_PROMPT + i - 1]));
        }
        CHECK(id == drafts[i], "%s: draft %u is %d, want %d", name, i, id, drafts[i]);
    }
    CHECK(worst < TOLERANCE, "%s on %s, in parts of %u: %g", name, device ? device : "cpu", part, worst);
}
static void test_logits(void) {
    for (size_t k = 0; k < RFT_COUNT(families); k++)
        for (uint32_t part = 1; part <= N_PROMPT; part = part * 3 + 1) check_logits(families[k], part);
}

/* ---- as drafters ---- */

static int forget(rf_session **of) {
    int ok = 1;
    for (uint32_t k = 0; k < n_heads; k++) ok = ok && rf_session_truncate(of[k], 0, 0, NULL, NULL) == RF_OK;
    return ok;
}

static rf_drafter *drafter_of(rf_drafter_desc d) {
    rf_drafter *out = NULL;
    d.allocator = memory_allocator(&r.mem);
    if (!d.mtp[0]) memcpy(d.mtp, hs, sizeof hs);
    if (d.ngram == 0) d.ngram = RF_NONE;
    CHECK(rf_drafter_open(r.m, &d, &out, &r.err) == RF_OK, "%s", r.err.text);
    return out;
}

typedef struct record {
    int32_t ids[96];
    uint32_t n;
} record;
static int on_token(int32_t token, void *user) {
    record *o = user;
    o->ids[o->n++] = token;
    return 0;
}
static rf_result generate(const int32_t *ids, uint32_t n, uint32_t append, uint32_t max, float temperature, rf_drafter *drafter, record *out) {
    rf_sampler sampler;
    *out = (record){0};
    CHECK(rf_sampler_init(&sampler, &(rf_sampler_desc){.temperature = temperature, .seed = 5}, NULL) == RF_OK);
    return rf_generate(r.s, &(rf_generate_desc){.ids = ids, .n_ids = n, .append = append, .max_tokens = max, .sampler = &sampler,
                                                .drafter = drafter, .on_token = on_token, .user = out}, NULL, &r.err);
}

/* What the head would draft after one token more. */
static void propose(rf_drafter *d, int32_t token, int32_t *out) {
    uint32_t n = 0;
    rfi_drafter_append(d, token);
    CHECK(rfi_drafter_propose(d, N_VOCAB, out, N_DRAFTS, &n, &r.err) == RF_OK && n == N_DRAFTS, "%u drafts: %s", n, r.err.text);
}

/* After a prompt, read in calls of n_batch rows, the drafts are the reference's. */
static void check_drafts(const char *name, uint32_t n_batch, uint64_t bytes) {
    record unused;
    int32_t got[N_DRAFTS];
    budget = bytes;
    REQUIRE(open_all(name, n_batch, 64) && read_answers(name), "%s", r.err.text);
    budget = 0;
    CHECK(bytes < rf_model_get_info(r.m).weight_bytes);
    rf_drafter *one = drafter_of((rf_drafter_desc){0});
    CHECK(generate(prompt, N_PROMPT - 1, 0, 1, 0, one, &unused) == RF_OK, "%s", r.err.text);
    propose(one, prompt[N_PROMPT - 1], got);
    CHECK(memcmp(got, drafts, sizeof got) == 0, "%s: %d %d %d %d", name, got[0], got[1], got[2], got[3]);
    CHECK(rf_drafter_close(one, NULL) == RF_OK);
}
static void test_drafts(void) {
    for (size_t k = 0; k < RFT_COUNT(families); k++)
        for (uint32_t n_batch = 5; n_batch < 64; n_batch += 25)
            for (mode = MAPPED; mode <= COPIED; mode++) check_drafts(families[k], n_batch, n_batch == 30 ? tight[k] : 0);
    mode = MAPPED;
}

/* The same tokens as without drafts, greedy and sampled; and then the head knows what it would know of the text as a prompt:
 * rejected drafts leave nothing, steps without drafts are made up for. */
static void test_same_ids(void) {
    for (size_t k = 0; k < RFT_COUNT(families); k++)
        for (uint32_t how = 0; how < 6; how++) {
            static record want, got, unused;
            int32_t warm[N_DRAFTS], fresh[N_DRAFTS], text[96];
            const float temperature = how % 2 ? 0.8f : 0;
            REQUIRE(open_all(families[k], how < 2 ? 0 : 16, 96) && read_answers(families[k]));
            CHECK(generate(prompt, 20, 0, 41, temperature, NULL, &want) == RF_OK && want.n > 1, "%s", r.err.text);
            CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK);
            rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 1 + how, .fixed = how < 4, .ngram = how == 5 ? 2 : 0});
            CHECK(generate(prompt, 20, 0, 41, temperature, one, &got) == RF_OK, "%s", r.err.text);
            CHECK(got.n == want.n && memcmp(got.ids, want.ids, got.n * 4) == 0, "%s, way %u: other tokens", families[k], how);
            const rf_drafter_stats stats = rf_drafter_get_stats(one);
            CHECK(how >= 4 || (stats.drafted > stats.accepted && stats.tokens == got.n - 1), "%llu", (unsigned long long)stats.drafted);

            const uint32_t n = rf_session_length(r.s, 0); /* the last token chosen is not in it */
            memcpy(text, prompt, 20 * sizeof *text);
            memcpy(text + 20, got.ids, (n - 20) * sizeof *text);
            propose(one, got.ids[got.n - 1], warm);
            CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && forget(hs));
            rf_drafter *two = drafter_of((rf_drafter_desc){0});
            CHECK(generate(text, n, 0, 1, 0, two, &unused) == RF_OK, "%s", r.err.text);
            propose(two, got.ids[got.n - 1], fresh);
            CHECK(how == 5 || memcmp(warm, fresh, sizeof warm) == 0, "%s, way %u: %d %d %d %d, of a prompt %d %d %d %d", families[k], how, warm[0],
                  warm[1], warm[2], warm[3], fresh[0], fresh[1], fresh[2], fresh[3]);
            CHECK(rf_drafter_close(one, NULL) == RF_OK && rf_drafter_close(two, NULL) == RF_OK);
        }
}

/* A second turn goes on where the head is; another prompt, and a head that is full, begin anew. */
static void check_turns(const char *name) {
    static record want, got;
    int32_t after[N_DRAFTS], again[N_DRAFTS];
    REQUIRE(open_all(name, 0, 24) && read_answers(name));
    rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 3, .fixed = 1});
    for (uint32_t turn = 0; turn < 3; turn++) {
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && generate(prompt + turn, 20, 0, 20, 0, NULL, &want) == RF_OK);
        CHECK(generate(prompt + turn, 20, 0, 20, 0, one, &got) == RF_OK, "%s", r.err.text);
        CHECK(got.n == want.n && memcmp(got.ids, want.ids, got.n * 4) == 0 && hs[0]->lengths[0] <= 24 && one->heads[n_heads - 1].first > 0, "turn %u", turn);
    }
    CHECK(rf_drafter_close(one, NULL) == RF_OK);

    /* the head goes on with the second turn, and drafts as if all had been one prompt */
    REQUIRE(open_all(name, 0, 96));
    one = drafter_of((rf_drafter_desc){.max_drafts = 3, .fixed = 1});
    CHECK(generate(prompt, 10, 0, 6, 0, one, &got) == RF_OK && generate(prompt + 10, 10, 1, 1, 0, one, &want) == RF_OK);
    CHECK(one->heads[0].first == 0 && hs[0]->lengths[0] == rf_session_length(r.s, 0));
    propose(one, prompt[20], after);
    int32_t text[32];
    const uint32_t n = rf_session_length(r.s, 0);
    memcpy(text, r.s->tokens, n * sizeof *text);
    CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && generate(text, n, 0, 1, 0, one, &got) == RF_OK);
    propose(one, prompt[20], again);
    CHECK(memcmp(after, again, sizeof after) == 0);
    CHECK(rf_drafter_close(one, NULL) == RF_OK);
}
static void test_turns(void) { check_turns(families[0]), check_turns(families[4]), check_turns(families[5]); }

/* ---- every kind of drafter: penalties, a grammar, saved sequences ---- */

/* Two turns of letters, sampled with penalties and a grammar. restored: before the second the sequence is saved and restored. */
static void two_turns(rf_grammar *g, rf_drafter *drafter, int restored, record *out) {
    static saved file;
    const rf_session_io io = {saved_write, saved_read, &file};
    *out = (record){0};
    CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK);
    for (int turn = 0; turn < 2; turn++) {
        rf_sampler sampler;
        const rf_sampler_desc how = {.temperature = 0.7f, .seed = 5, .repeat_penalty = 1.3f, .frequency_penalty = 0.2f, .presence_penalty = 0.1f,
                                     .bias = &(const rf_logit_bias){2, -INFINITY}, .n_bias = 1}; /* no end token */
        CHECK(rf_sampler_init(&sampler, &how, NULL) == RF_OK);
        const rf_generate_desc d = {.ids = turn ? prompt + 20 : prompt, .n_ids = turn ? 3 : 20, .append = (uint32_t)turn, .max_tokens = 20, .sampler = &sampler,
                                    .grammar = g, .drafter = drafter, .on_token = on_token, .user = out};
        CHECK(rf_generate(r.s, &d, NULL, &r.err) == RF_OK, "%s", r.err.text);
        if (turn || !restored) continue;
        file.n = file.at = 0;
        CHECK(rf_session_save(r.s, 0, &io, &r.err) == RF_OK && rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK, "%s", r.err.text);
        CHECK(rf_session_restore(r.s, 0, &io, &r.err) == RF_OK, "%s", r.err.text);
    }
}

static void check_kinds(const char *name) {
    static record want, got;
    static const char *const kinds[] = {"MTP", "n-grams, then MTP", "a draft model", "n-grams"};
    const rf_tokenizer *tokenizer = NULL;
    rf_grammar *g = NULL;
    rf_session *own = NULL;
    REQUIRE(open_all(name, 0, 96) && read_answers(name));
    CHECK(rf_model_get_tokenizer(r.m, &tokenizer, NULL) == RF_OK && rf_session_open(r.m, &(rf_session_desc){.n_ctx = 96}, &own, &r.err) == RF_OK);
    CHECK(rf_grammar_open(tokenizer, RF_GRAMMAR_GBNF, rf_string_of("root ::= [A-P]*"), NULL, &g, &r.err) == RF_OK, "%s", r.err.text);
    two_turns(g, NULL, 0, &want);
    CHECK(want.n == 40);
    for (uint32_t i = 0; i < want.n; i++) CHECK(want.ids[i] >= 4 && want.ids[i] < 20, "token %d", want.ids[i]); /* 4 is "A" */
    for (int kind = 0; kind < 4; kind++)
        for (int restored = 0; restored < 2; restored++) {
            rf_drafter_desc d = {.max_drafts = 4, .fixed = 1, .ngram = kind % 2 ? 1 : RF_NONE, .session = kind == 2 ? own : NULL, .allocator = memory_allocator(&r.mem)};
            rf_drafter *one = NULL;
            if (kind < 2) memcpy(d.mtp, hs, sizeof hs);
            CHECK(rf_drafter_open(r.m, &d, &one, &r.err) == RF_OK, "%s", r.err.text);
            two_turns(g, one, restored, &got);
            CHECK(got.n == want.n && memcmp(got.ids, want.ids, want.n * 4) == 0, "%s, %s%s: other tokens", name, kinds[kind], restored ? ", restored" : "");
            CHECK(rf_drafter_get_stats(one).drafted > 10);
            CHECK(rf_drafter_close(one, NULL) == RF_OK);
        }
    rf_session_close(own, NULL);
    CHECK(rf_grammar_close(g, NULL) == RF_OK);
}
static void test_kinds(void) { check_kinds(families[0]), check_kinds(families[3]), check_kinds(families[4]); }

/* ---- where the later heads matter ---- */

static int ends(rf_string name, const char *end) { return name.len >= strlen(end) && memcmp(name.data + name.len - strlen(end), end, strlen(end)) == 0; }

/* A value of mimo2 made simple: layers that add nothing, so that the next token follows from the token alone, by the first half
 * of its embedding, and norms of ones. The first head finds it, too, but hands on a second half, in which a row for it has
 * something else; the others need no hidden row. */
static float simple(rf_string name, uint32_t row, uint32_t col, float was) {
    const uint32_t n = r.n_embd, half = n / 2;
    if (ends(name, "norm.weight")) return 1;
    if (ends(name, "attn_output.weight") || ends(name, "ffn_down.weight") || ends(name, "ffn_down_exps.weight")) return 0;
    if (ends(name, "token_embd.weight") || ends(name, "output.weight")) return col < half ? was : 0;
    if (!ends(name, "eh_proj.weight")) return was;
    if (memcmp(name.data, "blk.2.", 6) != 0) return row < half && col == row;
    return col == row % half ? 1 : row < half && col == n + half + (row + 1) % half ? -4 : 0;
}

static int make_simple(const char *path, mg_buf *out) {
    FILE *f = fopen(path, "rb");
    static _Alignas(64) uint8_t bytes[1 << 18];
    const size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f) fclose(f);
    rf_gguf *g = NULL;
    if (n == 0 || n == sizeof bytes || rf_gguf_open(path, NULL, &g, &r.err) != RF_OK) return 0;
    for (uint64_t i = 0; i < rf_gguf_get_info(g).n_tensors; i++) {
        rf_tensor_info t;
        rf_gguf_get_tensor(g, i, &t, NULL);
        float *x = (float *)(void *)(bytes + t.offset_bytes);
        uint16_t *half = (uint16_t *)(void *)x;
        for (uint64_t k = 0; k < t.size_bytes / (t.type == RF_TYPE_F16 ? 2 : 4); k++) {
            const uint32_t row = (uint32_t)(k / t.ne[0]), col = (uint32_t)(k % t.ne[0]);
            if (t.type == RF_TYPE_F32) x[k] = simple(t.name, row, col, x[k]);
            if (t.type == RF_TYPE_F16) half[k] = rfi_f32_to_f16(simple(t.name, row, col, rfi_f16_to_f32(half[k])));
        }
    }
    mg_put(out, bytes, n);
    return rf_gguf_close(g, NULL) == RF_OK;
}

/* The heads in turn are right always, the first one alone only once a step. */
static void test_later_heads(void) {
    static record want, got[2];
    rf_drafter_stats stats[2];
    REQUIRE(open_all("mimo2-mtp", 0, 64), "%s", r.err.text);
    mg_buf file = {0};
    REQUIRE(make_simple("tests/family/mimo2-mtp.gguf", &file), "%s", r.err.text);
    close_all();
    REQUIRE(open_file(NULL, &file, 0, 64) && n_heads == 3, "%s", r.err.text);
    const int32_t text[] = {9, 30, 17};
    CHECK(generate(text, 3, 0, 41, 0, NULL, &want) == RF_OK && want.n == 41, "%u tokens", want.n);
    for (int alone = 0; alone < 2; alone++) {
        rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 4, .fixed = 1, .mtp = {hs[0], alone ? NULL : hs[1], alone ? NULL : hs[2]}});
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && forget(hs) && generate(text, 3, 0, 41, 0, one, &got[alone]) == RF_OK, "%s", r.err.text);
        CHECK(got[alone].n == want.n && memcmp(got[alone].ids, want.ids, want.n * 4) == 0);
        stats[alone] = rf_drafter_get_stats(one);
        CHECK(rf_drafter_close(one, NULL) == RF_OK);
    }
    printf("    three heads: %llu of %llu drafts right, the first alone: %llu of %llu\n", (unsigned long long)stats[0].accepted,
           (unsigned long long)stats[0].drafted, (unsigned long long)stats[1].accepted, (unsigned long long)stats[1].drafted);
    CHECK(stats[0].accepted == stats[0].drafted && stats[0].steps <= 9 && 3 * stats[1].accepted < stats[1].drafted);
    close_all();
    mg_free(&file);
}

/* ---- of a scheduler ---- */

typedef struct client {
    record got;
    rf_result reason;
} client;
static int on_served(int32_t token, void *user) { return on_token(token, &((client *)user)->got); }
static void on_end(rf_result reason, void *user) { ((client *)user)->reason = reason; }

/* Two requests, each with a head of its own, and one without: the same tokens; and the heads know the texts. */
static void check_scheduler(const char *name) {
    static record want[3];
    static client clients[3];
    const rf_tokenizer *t = NULL;
    rf_scheduler *sch = NULL;
    rf_drafter *drafters[3] = {0};
    rf_session *second[RF_MTP_HEADS] = {0};
    rf_sampler samplers[3];
    uint32_t n_active = 1;
    REQUIRE(open_all(name, 0, 96) && read_answers(name));
    for (int i = 0; i < 3; i++) {
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && generate(prompt + i, 20, 0, 24, 0, NULL, &want[i]) == RF_OK, "%s", r.err.text);
        CHECK(rf_sampler_init(&samplers[i], NULL, NULL) == RF_OK);
    }
    const rf_session_desc desc = {.n_ctx = 64, .n_seq_max = 3, .n_batch = 16, .n_logits_max = 12, .n_snapshots = 4, .mtp = 1, .cache_type = RF_CACHE_F32};
    rf_session_close(r.s, NULL);
    REQUIRE(rf_session_open(r.m, &desc, &r.s, &r.err) == RF_OK, "%s", r.err.text);
    REQUIRE(open_sessions(64, second), "%s", r.err.text);
    CHECK(rf_model_get_tokenizer(r.m, &t, NULL) == RF_OK && rf_scheduler_open(r.s, t, 4, &sch, &r.err) == RF_OK, "%s", r.err.text);
    for (int i = 0; i < 3; i++) {
        rf_drafter_desc how = {.max_drafts = 3, .fixed = 1, .ngram = RF_NONE, .allocator = memory_allocator(&r.mem)};
        memcpy(how.mtp, i ? second : hs, sizeof hs);
        if (i < 2) CHECK(rf_drafter_open(r.m, &how, &drafters[i], &r.err) == RF_OK, "%s", r.err.text);
        clients[i] = (client){.reason = RF_ERR_BUSY};
        const rf_request q = {.prompt = prompt + i, .n_prompt = 20, .max_tokens = 24, .sampler = &samplers[i], .on_token = on_served, .on_end = on_end,
                              .user = &clients[i], .drafter = drafters[i]};
        CHECK(rf_scheduler_submit(sch, &q, &r.err) == RF_OK, "%s", r.err.text);
    }
    while (n_active) REQUIRE(rf_scheduler_step(sch, &n_active, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_scheduler_close(sch, NULL) == RF_OK);
    for (int i = 0; i < 3; i++) {
        int32_t warm[N_DRAFTS], fresh[N_DRAFTS], text[64];
        record unused;
        CHECK(clients[i].reason == RF_OK && clients[i].got.n == want[i].n && memcmp(clients[i].got.ids, want[i].ids, want[i].n * 4) == 0, "request %d", i);
        if (i == 2) continue;
        CHECK(rf_drafter_get_stats(drafters[i]).drafted > 10);
        propose(drafters[i], 7, warm); /* `7` in place of the last token, of which the scheduler tells the drafter nothing */
        memcpy(text, prompt + i, 20 * sizeof *text);
        memcpy(text + 20, want[i].ids, (want[i].n - 1) * sizeof *text);
        rf_drafter *two = drafter_of((rf_drafter_desc){0});
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && forget(hs));
        CHECK(generate(text, 19 + want[i].n, 0, 1, 0, two, &unused) == RF_OK, "%s", r.err.text);
        propose(two, 7, fresh);
        CHECK(memcmp(warm, fresh, sizeof warm) == 0, "request %d: %d %d %d %d, of a prompt %d %d %d %d", i, warm[0], warm[1], warm[2], warm[3], fresh[0],
              fresh[1], fresh[2], fresh[3]);
        CHECK(rf_drafter_close(two, NULL) == RF_OK && rf_drafter_close(drafters[i], NULL) == RF_OK);
    }
    close_sessions(second);
}
static void test_scheduler(void) { check_scheduler(families[1]), check_scheduler(families[4]); }

/* ---- weights that the head and its model have in common ---- */

/* Every logit of the head, after both were cleared: the shared weights may lie elsewhere then. */
static void check_again(const char *name) {
    static float hidden[N_PROMPT + 1][64];
    float *logits;
    double worst = 0;
    rf_token_row rows[N_PROMPT];
    const uint32_t n_embd = rf_model_get_info(r.m).n_embd;
    CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && rf_session_truncate(hs[0], 0, 0, NULL, NULL) == RF_OK);
    REQUIRE(rf_session_forward(r.s, prompt, N_PROMPT, NULL, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < N_PROMPT; i++) {
        if (i) memcpy(hidden[i], r.s->hidden + (i - 1) * n_embd, n_embd * sizeof(float));
        rows[i] = (rf_token_row){.token = prompt[i], .embedding = hidden[i], .pos = RF_POS_NEXT, .want_logits = 1};
    }
    REQUIRE(rf_session_eval(hs[0], rows, N_PROMPT, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < N_PROMPT; i++) {
        REQUIRE(rf_session_get_logits(hs[0], i, &logits, NULL) == RF_OK);
        worst = rft_worst(worst, distance(logits, wanted[i]));
    }
    CHECK(worst < TOLERANCE, "%s: %g", name, worst);
}

/* They are read once and lie on the device once, whoever loads them: the head has as much less as it has in common with its
 * model, by a head of another rf_gguf, which has them all. */
static void check_lent(const char *name) {
    rf_gguf *g = NULL;
    rf_model *alone = NULL;
    char path[64];
    uint64_t shared = 0, own = 0;
    snprintf(path, sizeof path, "tests/family/%s.gguf", name);
    REQUIRE(open_all(name, 0, 64) && read_answers(name), "%s: %s", name, r.err.text);
    const rf_plan *of_head = rf_model_get_plan(heads[0]), *of_model = rf_model_get_plan(r.m);
    for (uint32_t i = 0; i < of_head->n_weights; i++) {
        const rf_plan_weight *w = &of_head->weights[i];
        int both = 0;
        for (uint32_t j = 0; j < of_model->n_weights; j++) both |= of_model->weights[j].tensor == w->tensor;
        *(both ? &shared : &own) += w->size_bytes * rf_plan_weight_matrices(w);
    }
    if (shared == 0) return; /* the file has an embedding and an output matrix for the head */
    CHECK(rf_model_preload_all(heads[0], &r.err) == RF_OK, "%s: %s", name, r.err.text);
    CHECK(rf_model_get_loading_stats(heads[0]).bytes_loaded == own && rf_model_get_loading_stats(r.m).bytes_loaded == shared, "%s", name);
    CHECK(rf_model_is_tensor_loaded(heads[0], "token_embd.weight") == rf_model_is_tensor_loaded(r.m, "token_embd.weight"));
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && rf_model_get_loading_stats(heads[0]).bytes_loaded == own, "%s", r.err.text);
    REQUIRE(rf_gguf_open(path, &(rf_gguf_desc){.no_map = 1, .allocator = memory_allocator(&r.mem)}, &g, &r.err) == RF_OK &&
            rf_model_open(g, r.d, &(rf_model_desc){.mtp = 1}, &alone, &r.err) == RF_OK && rf_model_preload_all(alone, &r.err) == RF_OK, "%s", r.err.text);
    const uint64_t less = rf_model_get_loading_stats(heads[0]).device_bytes, all = rf_model_get_loading_stats(alone).device_bytes;
    CHECK(rf_model_get_loading_stats(alone).bytes_loaded == own + shared && all >= less + shared, "%s: %llu and %llu bytes", name,
          (unsigned long long)less, (unsigned long long)all);
    rf_forecast f = {0};
    CHECK(rf_model_forecast(heads[0], &(rf_session_desc){.n_ctx = 64}, &f, &r.err) == RF_OK && f.weight_bytes == less, "%llu", (unsigned long long)f.weight_bytes);
    printf("    %s: %llu bytes on the device, %llu less than alone\n", name, (unsigned long long)less, (unsigned long long)(all - less));
    CHECK(rf_model_close(alone, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK);

    uint32_t left = 9;
    check_again(name);
    CHECK(rf_model_clear_device_cache(r.m, &left, NULL) == RF_OK && left == 0);
    CHECK(rf_model_get_loading_stats(r.m).device_bytes == 0 && rf_model_get_loading_stats(heads[0]).device_bytes == 0);
    check_again(name);
    CHECK(rf_model_clear_device_cache(heads[0], &left, NULL) == RF_OK && left == 0 && rf_model_get_loading_stats(r.m).device_bytes > 0);
    check_again(name);
    rf_session_close(r.s, NULL); /* the model goes first: the head still has what both use */
    CHECK(rf_model_close(r.m, NULL) == RF_OK);
    r.s = NULL, r.m = NULL;
    static float zeros[64];
    const rf_token_row row = {.token = prompt[0], .embedding = zeros, .pos = RF_POS_NEXT, .want_logits = 1};
    float *logits = NULL;
    CHECK(rf_session_truncate(hs[0], 0, 0, NULL, NULL) == RF_OK && rf_session_eval(hs[0], &row, 1, &r.err) == RF_OK &&
          rf_session_get_logits(hs[0], 0, &logits, NULL) == RF_OK && distance(logits, wanted[0]) < TOLERANCE, "%s: %s", name, r.err.text);
}
static void test_lent(void) {
    mode = COPIED;
    for (size_t k = 0; k < RFT_COUNT(families); k++) check_lent(families[k]);
    mode = MAPPED;
}

/* A device whose products take 8 rows at once, or multiples of 16: rows beyond them are a micro-batch of their own, and all hidden rows come. */
static rf_session_stats tiled_stats(const rf_prepared *p) {
    (void)p;
    return (rf_session_stats){.tile_rows = {8, 16}};
}
static const rf_device_api *untiled;
static uint32_t n_steps;
static rf_result count_steps(rf_prepared *p, rf_queue *q, uint32_t first, uint32_t last, const rf_step *step, rf_ticket *ticket, rf_error *err) {
    n_steps += first == 0;
    return untiled->plan_run(p, q, first, last, step, ticket, err);
}

static void check_rows_beyond_tiles(uint64_t bytes) {
    static const struct { uint32_t n_rows, n_steps; } calls[] = {{7, 1}, {8, 1}, {9, 2}, {10, 1}, {16, 1}, {17, 2}, {18, 2}, {19, 1}, {28, 1}};
    static float wanted_hidden[N_PROMPT * 64];
    budget = bytes;
    REQUIRE(open_all(families[0], 0, 64) && read_answers(families[0]) && r.n_embd <= 64, "%s", r.err.text);
    budget = 0;
    CHECK(bytes < rf_model_get_info(r.m).weight_bytes);
    CHECK(rf_session_forward(r.s, prompt, N_PROMPT, NULL, &r.err) == RF_OK, "%s", r.err.text);
    memcpy(wanted_hidden, r.s->hidden, N_PROMPT * r.n_embd * sizeof(float));
    untiled = r.s->m->device->api;
    rf_device_api tiled = *untiled;
    tiled.plan_stats = tiled_stats, tiled.plan_run = count_steps;
    r.s->m->device->api = &tiled;
    for (size_t i = 0; i < RFT_COUNT(calls); i++) {
        n_steps = 0;
        memset(r.s->hidden, 0, N_PROMPT * r.n_embd * sizeof(float));
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, &r.err) == RF_OK && rf_session_forward(r.s, prompt, calls[i].n_rows, NULL, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(n_steps == calls[i].n_steps, "%u rows: %u micro-batches, want %u", calls[i].n_rows, n_steps, calls[i].n_steps);
        CHECK(memcmp(r.s->hidden, wanted_hidden, calls[i].n_rows * r.n_embd * sizeof(float)) == 0, "%u rows: other hidden rows", calls[i].n_rows);
    }
    r.s->m->device->api = untiled;
    close_all();
}
/* Whatever the budget: where a call is cut, bits may depend on it. */
static void test_rows_beyond_tiles(void) {
    check_rows_beyond_tiles(0);
    check_rows_beyond_tiles(tight[0]);
}

/* Drafts of a recurrent model before a prompt that is longer than a tile: the sequence can be cut back to each of them. Rows of
 * sequences in decode are a micro-batch of their own. */
static void test_drafts_before_a_tile(void) {
    enum { HELD = 20, MOST_ROWS = 18, PROMPT = 5 };
    static const struct { uint32_t n_drafts, n_decode, n_rows, n_steps; } calls[] = {{7, 0, 9, 1}, {7, 0, 18, 1}, {2, 0, 18, 2}, {1, 0, 9, 2}, {0, 2, 18, 2}, {0, 1, 9, 2}};
    const rf_session_desc desc = {.n_ctx = 64, .n_seq_max = PROMPT + 1, .n_batch = 32, .n_snapshots = 6, .n_logits_max = 8};
    rig one;
    rf_session *s = NULL;
    int32_t ids[HELD + MOST_ROWS];
    REQUIRE(rig_open(&one, &(rig_how){.path = "tests/family/qwen35.gguf"}));
    mg_tokens(ids, HELD + MOST_ROWS, N_VOCAB, 40);
    untiled = one.m->device->api;
    rf_device_api tiled = *untiled;
    tiled.plan_stats = tiled_stats, tiled.plan_run = count_steps;
    for (size_t c = 0; c < RFT_COUNT(calls); c++) {
        for (uint32_t to = 0; to <= calls[c].n_drafts; to++) {
            rf_token_row rows[HELD + MOST_ROWS];
            uint32_t n = 0, kept = 9999;
            CHECK(rf_session_open(one.m, &desc, &s, &one.err) == RF_OK && rf_session_forward(s, ids, HELD - 9, NULL, &one.err) == RF_OK, "%s", one.err.text);
            for (uint32_t i = HELD - 9; i < HELD; i++) CHECK(rf_session_forward(s, ids + i, 1, NULL, &one.err) == RF_OK, "%s", one.err.text);
            for (; n < calls[c].n_drafts; n++) rows[n] = (rf_token_row){.token = ids[HELD + n], .pos = RF_POS_NEXT, .want_logits = 1};
            for (uint32_t i = 0; i < calls[c].n_decode; i++) rows[n++] = (rf_token_row){.token = ids[i], .seq = (int32_t)i + 1, .pos = RF_POS_NEXT, .want_logits = 1};
            for (; n < calls[c].n_rows; n++) rows[n] = (rf_token_row){.token = ids[n], .seq = PROMPT, .pos = RF_POS_NEXT};
            n_steps = 0;
            one.m->device->api = &tiled;
            CHECK(rf_session_eval(s, rows, n, &one.err) == RF_OK, "%s", one.err.text);
            one.m->device->api = untiled;
            CHECK(n_steps == calls[c].n_steps, "%u drafts, %u rows: %u micro-batches, want %u", calls[c].n_drafts, n, n_steps, calls[c].n_steps);
            CHECK(rf_session_truncate(s, 0, HELD + to, &kept, &one.err) == RF_OK && kept == HELD + to, "%u of %u drafts, %u rows: %u are left", to,
                  calls[c].n_drafts, n, kept);
            rf_session_close(s, NULL);
        }
    }
    rig_close(&one);
}

/* What is refused, by name; each allocation may fail. */
static void test_errors(void) {
    static record unused;
    rf_drafter *one = NULL;
    rf_model *none = NULL;
    rf_session *plain = NULL;
    REQUIRE(open_all(families[0], 0, 64) && read_answers(families[0]));
    CHECK(rf_drafter_open(r.m, &(rf_drafter_desc){.mtp = {r.s}}, &one, &r.err) == RF_ERR_ARGUMENT && strstr(r.err.text, "MTP head"), "%s", r.err.text);
    CHECK(rf_model_open(r.g, r.d, &(rf_model_desc){.mtp = 2}, &none, &r.err) == RF_ERR_NOT_FOUND && strstr(r.err.text, "no MTP head 2"), "%s", r.err.text);
    CHECK(rf_session_forward(hs[0], prompt, 1, NULL, &r.err) == RF_ERR_ARGUMENT && strstr(r.err.text, "hidden row"), "%s", r.err.text);
    CHECK(rf_session_open(r.m, &(rf_session_desc){.n_ctx = 64, .n_logits_max = 4}, &plain, &r.err) == RF_OK);
    one = drafter_of((rf_drafter_desc){0});
    CHECK(rf_generate(plain, &(rf_generate_desc){.ids = prompt, .n_ids = 4, .drafter = one}, NULL, &r.err) == RF_ERR_ARGUMENT &&
          strstr(r.err.text, "rf_session_desc.mtp"), "%s", r.err.text);
    rf_session_close(plain, NULL);
    CHECK(rf_drafter_close(one, NULL) == RF_OK);

    CHECK(rf_model_preload_all(heads[0], NULL) == RF_OK && rf_model_preload_all(r.m, NULL) == RF_OK);
    const int64_t live = memory_read(&r.mem.live);
    rf_result res = RF_ERR_MEMORY;
    int n_failures = 0;
    for (int64_t fail = 1; fail < 60 && res != RF_OK; fail++) {
        const rf_drafter_desc desc = {.allocator = memory_allocator(&r.mem), .mtp = {hs[0]}};
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK);
        r.mem.calls = 0, r.mem.fail_at = fail;
        res = rf_drafter_open(r.m, &desc, &one, &r.err);
        if (res == RF_OK) res = generate(prompt, 9, 0, 9, 0, one, &unused);
        CHECK(res == RF_OK || (res == RF_ERR_MEMORY && r.err.code == res && r.err.text[0]), "%s", r.err.text);
        rf_drafter_close(one, NULL);
        CHECK(memory_read(&r.mem.live) == live, "%d blocks are left", (int)(memory_read(&r.mem.live) - live));
        n_failures += res != RF_OK;
    }
    r.mem.fail_at = 0;
    CHECK(n_failures >= 6, "%d allocations", n_failures);

    static const char *const without[] = {"tests/family/qwen35.gguf", "tests/family/mixtral.gguf", NULL};
    mg_buf unknown = {0}; /* a file of which only the model is known */
    mg_llama(&unknown, &(mg_options){.arch = "qwen3moe", .n_experts = 4, .n_next = 1, .n_layers = 3});
    for (int i = 0; i < 3; i++) {
        rig other;
        const char *path = without[i];
        REQUIRE(rig_open(&other, &(rig_how){.path = path, .file = path ? NULL : &unknown}));
        CHECK(rf_model_open(other.g, other.d, &(rf_model_desc){.mtp = 1}, &none, &other.err) == (path ? RF_ERR_NOT_FOUND : RF_ERR_UNSUPPORTED) &&
              !none && strstr(other.err.text, path ? "no MTP head" : "MTP heads of qwen3moe models"), "%s", other.err.text);
        rig_close(&other);
    }
    mg_free(&unknown);
}

/* Each family on one of the GPUs. */
static void test_gpus(void) {
    for (size_t k = 0; k < RFT_COUNT(families); k++) {
        device = gpus[k % n_gpus].name;
        check_logits(families[k], 13);
        check_drafts(families[k], 30, 0);
    }
}

int main(int argc, char **argv) {
    rf_device_info all[8];
    uint32_t n = 0;
    RFT_BEGIN(argc, argv);
    rf_device_list(all, 8, &n, NULL);
    for (uint32_t i = 0; i < n && i < 8; i++)
        if (all[i].usable && all[i].is_gpu) gpus[n_gpus++] = all[i];
    if (n_gpus) RUN(test_gpus);
    else {
        RUN(test_logits);
        RUN(test_drafts);
        RUN(test_same_ids);
        RUN(test_turns);
        RUN(test_kinds);
        RUN(test_later_heads);
        RUN(test_lent);
        RUN(test_scheduler);
        RUN(test_rows_beyond_tiles);
    RUN(test_drafts_before_a_tile);
        RUN(test_errors);
    }
    close_all();
    RFT_END();
}
