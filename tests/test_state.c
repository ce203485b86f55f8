/* Hidden states against the float64 model of ref_model.h, pooled and not; sequences saved and restored: the same bits
 * afterwards, damage and other models refused, failing streams and devices. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include "make_gguf.h"
#include "ref_model.h"
#include "rf_test.h"
#include "rf_rig.h"

enum { N = 24, VOCAB = 320 };

/* ---- help ---- */

static int open_rig(rig *r, const mg_options *o, const rf_session_desc *sd) {
    mg_buf file = {0};
    mg_llama(&file, o);
    const int ok = rig_open(r, &(rig_how){.file = &file, .session = sd});
    r->file = file;
    return ok;
}

/* ---- hidden states ---- */

static void test_hidden(void) {
    static const mg_options kinds[] = {{.type = MG_F32}, {.arch = "qwen3", .type = MG_F32, .tied = 1}};
    for (size_t k = 0; k < RFI_COUNT(kinds); k++) {
        rig r;
        ref_model ref;
        int32_t tokens[N];
        mg_tokens(tokens, N, 300, k);
        if (!open_rig(&r, &kinds[k], &(rf_session_desc){.n_logits_max = N, .n_batch = 7, .cache_type = RF_CACHE_F32})) continue;
        uint32_t n_embd = r.n_embd;
        float *got = (float *)calloc(N * (size_t)n_embd, sizeof *got);
        double *want = (double *)calloc(N * (size_t)n_embd, sizeof *want), *mean = (double *)calloc(n_embd, sizeof *mean);
        REQUIRE(got && want && mean, "out of memory");
        ref_open(&ref, r.g);
        ref.hidden = want;
        free(ref_eval(&ref, tokens, N, &(ref_options){0}, NULL));
        rf_token_row rows[N];
        for (uint32_t i = 0; i < N; i++) rows[i] = (rf_token_row){.token = tokens[i], .pos = RF_POS_NEXT, .want_logits = 1};
        CHECK(rf_session_hidden(r.s, 0, 1, got, &r.err) == RF_ERR_ARGUMENT, "no eval yet");
        CHECK(rf_session_eval(r.s, rows, N, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_session_hidden(r.s, 0, N, got, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(ref_distance(got, want, N * (size_t)n_embd) < 1e-4, "off by %g", ref_distance(got, want, N * (size_t)n_embd));
        CHECK(rf_session_hidden(r.s, 5, 1, got, &r.err) == RF_OK && ref_distance(got, want + 5 * n_embd, n_embd) < 1e-4, "one");
        CHECK(rf_session_hidden(r.s, N, 1, got, &r.err) == RF_ERR_ARGUMENT &&
                  rf_session_hidden(r.s, 1, N, got, &r.err) == RF_ERR_ARGUMENT &&
                  rf_session_hidden(r.s, 2, UINT32_MAX, got, &r.err) == RF_ERR_ARGUMENT &&
                  rf_session_hidden(r.s, 0, 1, NULL, &r.err) == RF_ERR_ARGUMENT, "arguments");
        const float *logits = rft_logits(r.s, N - 1); /* still there, and the same ones */
        CHECK(logits && isfinite(logits[0]), "logits");
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t c = 0; c < n_embd; c++) mean[c] += want[(size_t)i * n_embd + c] / N;
        const double *pooled[] = {mean, mean, want, want + (size_t)(N - 1) * n_embd};
        const rf_embed_text text = {tokens, N}, empty = {tokens, 0}, too_long = {tokens, 5000};
        rf_embed_desc embed = {.texts = &text, .n_texts = 1};
        for (uint32_t p = RF_POOL_DEFAULT; p <= RF_POOL_LAST; p++) {
            embed.pooling = p;
            CHECK(rf_session_embed(r.s, &embed, got, &r.err) == RF_OK && rf_session_length(r.s, 0) == 0, "%s", r.err.text);
            CHECK(ref_distance(got, pooled[p], n_embd) < 1e-4, "pooling %u: off by %g", p, ref_distance(got, pooled[p], n_embd));
        }
        embed.pooling = 5;
        CHECK(rf_session_embed(r.s, &embed, got, &r.err) == RF_ERR_ARGUMENT, "pooling");
        embed.pooling = RF_POOL_RANK;
        CHECK(rf_session_embed(r.s, &embed, got, &r.err) == RF_ERR_UNSUPPORTED, "no classifier");
        embed = (rf_embed_desc){.texts = &empty, .n_texts = 1};
        CHECK(rf_session_embed(r.s, &embed, got, &r.err) == RF_ERR_ARGUMENT, "no tokens");
        embed.texts = &too_long;
        CHECK(rf_session_embed(r.s, &embed, got, &r.err) == RF_ERR_CONTEXT_FULL, "too many");
        embed.texts = &text;
        tokens[N - 1] = VOCAB;
        CHECK(rf_session_embed(r.s, &embed, got, &r.err) == RF_ERR_ARGUMENT && rf_session_length(r.s, 0) == 0, "token");
        ref_close(&ref);
        rig_close(&r);
        free(got), free(want), free(mean);
    }
}

/* ---- streams ---- */

typedef struct stream {
    unsigned char *data;
    size_t n, at, capacity;
    int fail_at, calls; /* the call that fails, from 1; 0: none */
    size_t most;        /* bytes a read gives at most; 0: all   */
} stream;

static int stream_write(const void *data, size_t n, void *user) {
    stream *s = (stream *)user;
    if (++s->calls == s->fail_at) return -28;
    if (n > s->capacity - s->n) return -27;
    memcpy(s->data + s->n, data, n);
    s->n += n;
    return 0;
}
static int64_t stream_read(void *data, size_t n, void *user) {
    stream *s = (stream *)user;
    if (++s->calls == s->fail_at) return -5;
    if (s->most && n > s->most) n = s->most;
    if (n > s->n - s->at) n = s->n - s->at;
    memcpy(data, s->data + s->at, n);
    s->at += n;
    return (int64_t)n;
}
static rf_session_io io_of(stream *s) { return (rf_session_io){stream_write, stream_read, s}; }

static rf_result restore(rig *r, int32_t seq, stream *s) {
    rf_session_io io = io_of(s);
    s->at = 0, s->calls = 0;
    return rf_session_restore(r->s, seq, &io, &r->err);
}

/* The first n tokens in sequence seq, saved. */
static int save(rig *r, int32_t seq, const int32_t *tokens, uint32_t n, stream *out) {
    rf_token_row rows[N];
    rf_session_io io = io_of(out);
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < n; i++) rows[i] = (rf_token_row){.token = tokens[i], .seq = seq, .pos = RF_POS_NEXT};
    CHECK(rf_session_eval(r->s, rows, n, &r->err) == RF_OK, "%s", r->err.text);
    out->capacity = (size_t)rf_session_save_bytes(r->s, seq);
    out->data = (unsigned char *)malloc(out->capacity + 1);
    if (!out->data) return 0;
    rf_result res = rf_session_save(r->s, seq, &io, &r->err);
    CHECK(res == RF_OK && out->n == out->capacity && rf_session_length(r->s, seq) == n, "%s, %zu of %zu bytes", r->err.text,
          out->n, out->capacity);
    return res == RF_OK;
}

/* Logits of one more token of a sequence. */
static const float *next(rig *r, int32_t seq, int32_t token) {
    rf_token_row row = {.token = token, .seq = seq, .pos = RF_POS_NEXT, .want_logits = 1};
    CHECK(rf_session_eval(r->s, &row, 1, &r->err) == RF_OK, "%s", r->err.text);
    return rft_logits(r->s, 0);
}

/* ---- saved sequences ---- */

static void test_same_bits(void) {
    for (uint32_t cache = RF_CACHE_F16; cache <= RF_CACHE_F32; cache++) {
        rig a, b;
        stream s;
        int32_t tokens[N];
        float want[VOCAB];
        uint32_t kept;
        mg_tokens(tokens, N, 300, 3);
        mg_options o = {.type = MG_Q8_0};
        /* another context length, number of sequences and batch size: none of them is part of what is saved */
        rf_session_desc one = {.n_ctx = 64, .n_seq_max = 2, .cache_type = cache},
                        two = {.n_ctx = 40, .n_seq_max = 3, .n_batch = 1, .cache_type = cache};
        if (!open_rig(&a, &o, &one) || !open_rig(&b, &o, &two)) return;
        CHECK(save(&a, 1, tokens, N - 1, &s), "save");
        memcpy(want, next(&a, 1, tokens[N - 1]), sizeof want);
        next(&b, 0, 7);
        s.most = 13; /* reads may be short */
        CHECK(restore(&b, 2, &s) == RF_OK && rf_session_length(b.s, 2) == N - 1 && rf_session_length(b.s, 0) == 1, "%s",
              b.err.text);
        CHECK(memcmp(next(&b, 2, tokens[N - 1]), want, sizeof want) == 0, "other bits");
        CHECK(rf_session_sync(b.s, 2, tokens, N, &kept, &b.err) == RF_OK && kept == N - 1, "the tokens: %u", kept);
        CHECK(restore(&b, 2, &s) == RF_ERR_BUSY, "it holds tokens");
        rf_session_truncate(b.s, 1, 0, NULL, NULL);
        free(s.data);
        CHECK(rf_session_save_bytes(b.s, 1) > 0 && rf_session_save_bytes(b.s, 3) == 0, "sizes");
        s = (stream){.data = (unsigned char *)malloc(4096), .capacity = 4096}; /* an empty one */
        rf_session_io io = io_of(&s);
        CHECK(s.data && rf_session_save(b.s, 1, &io, &b.err) == RF_OK && restore(&b, 1, &s) == RF_OK &&
                  rf_session_length(b.s, 1) == 0, "%s", b.err.text);
        free(s.data);
        rig_close(&a), rig_close(&b);
    }
}

/* Cut anywhere, and every bit of header, tokens and some of the rest flipped: refused, the sequence empty, the others as
 * they were. */
static void test_damage(void) {
    rig r;
    stream s;
    int32_t tokens[N];
    mg_tokens(tokens, N, 300, 4);
    if (!open_rig(&r, &(mg_options){.type = MG_F32}, &(rf_session_desc){.n_ctx = 32, .n_seq_max = 2})) return;
    CHECK(save(&r, 0, tokens, 5, &s), "save");
    size_t n = s.n;
    for (size_t cut = 0; cut < n; cut++) {
        s.n = cut;
        rf_result res = restore(&r, 1, &s);
        CHECK(res == RF_ERR_FORMAT && rf_session_length(r.s, 1) == 0, "cut at %zu: %s", cut, rf_result_name(res));
    }
    s.n = n;
    for (size_t bit = 0; bit < 8 * n; bit += bit < 8 * (104 + 20) ? 1 : 1009) {
        s.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        rf_result res = restore(&r, 1, &s);
        CHECK((res == RF_ERR_FORMAT || res == RF_ERR_UNSUPPORTED) && r.err.text[0] && rf_session_length(r.s, 1) == 0,
              "bit %zu: %s", bit, rf_result_name(res));
        s.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    CHECK(restore(&r, 1, &s) == RF_OK && rf_session_length(r.s, 0) == 5, "%s", r.err.text);
    float want[VOCAB];
    memcpy(want, next(&r, 0, 9), sizeof want);
    CHECK(memcmp(next(&r, 1, 9), want, sizeof want) == 0, "both go on alike");
    free(s.data);
    rig_close(&r);
}

/* Factors of rope for long contexts alone: a short session has none, and saves and restores. */
static void test_long_factors_alone(void) {
    static const char name[] = "rope_factors_short.weight", other[] = "rope_factors_.input_scale"; /* has no effect */
    static saved kept;
    const rf_session_io io = {saved_write, saved_read, &kept};
    const rf_session_desc sd = {.n_ctx = 16, .n_seq_max = 2, .n_logits_max = 2};
    mg_buf file = {0};
    rig r;
    mg_family_model(&file, &(mg_family){.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE});
    size_t at = 0;
    while (at + sizeof name <= file.n && memcmp(file.data + at, name, sizeof name - 1)) at++;
    REQUIRE(at + sizeof name <= file.n, "no factors");
    memcpy(file.data + at, other, sizeof name - 1);
    REQUIRE(rig_open(&r, &(rig_how){.file = &file, .session = &sd}), "%s", r.err.text);
    r.file = file;
    const int32_t tokens[] = {5, 6, 7};
    kept.n = 0;
    CHECK(rf_session_forward(r.s, tokens, 3, NULL, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_save(r.s, 0, &io, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_restore(r.s, 1, &io, &r.err) == RF_OK && rf_session_length(r.s, 1) == 3, "%s", r.err.text);
    rig_close(&r);
}

/* Header, tokens and values that somebody made up, under a right checksum: refused, or a sequence like any other. Nothing
 * else of the session changes. */
static void test_forged(void) {
    static saved real, forged;
    static const struct { const char *path; mg_options o; } models[] = {
        {NULL, {.type = MG_F32}}, {NULL, {.arch = "gpt-oss", .n_experts = 4, .window = 4}}, {"tests/family/qwen35.gguf", {0}}};
    for (size_t k = 0; k < RFI_COUNT(models); k++) {
        const rf_session_desc sd = {.n_ctx = 16, .n_seq_max = 2, .n_logits_max = 2};
        const rf_session_io io = {saved_write, saved_read, &real}, io_forged = {saved_write, saved_read, &forged};
        rig r;
        int32_t tokens[N];
        uint32_t taken = 0, n_mutants = RFT_SANITIZED ? 400 : 2000;
        mg_rng rng = {k};
        mg_buf file = {0};
        if (!models[k].path) mg_llama(&file, &models[k].o);
        if (!rig_open(&r, &(rig_how){.path = models[k].path, .file = &file, .session = &sd})) continue;
        r.file = file;
        mg_tokens(tokens, N, r.n_vocab, k);
        CHECK(rf_session_forward(r.s, tokens, 9, NULL, &r.err) == RF_OK, "%s", r.err.text);
        real.n = 0;
        CHECK(rf_session_save(r.s, 0, &io, &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t i = 0; i < n_mutants; i++) {
            forged = real;
            saved_forge(&forged, &rng);
            const rf_result res = rf_session_restore(r.s, 1, &io_forged, &r.err);
            const uint32_t n = rf_session_length(r.s, 1);
            CHECK(res == RF_OK || (res == r.err.code && r.err.text[0] && n == 0), "mutant %u: %s, %u tokens", i,
                  rf_result_name(res), n);
            CHECK(res == RF_OK || res == RF_ERR_FORMAT || res == RF_ERR_UNSUPPORTED || res == RF_ERR_CONTEXT_FULL, "mutant %u: %s",
                  i, rf_result_name(res));
            taken += res == RF_OK;
            if (res == RF_OK && i % 16 == 0) {
                uint32_t kept = 0;
                if (n < 16) next(&r, 1, tokens[0]);
                CHECK(rf_session_truncate(r.s, 1, i / 16 % 9, &kept, &r.err) == RF_OK, "%s", r.err.text);
                next(&r, 1, tokens[1]);
            }
            CHECK(rf_session_length(r.s, 0) == 9, "%u tokens in the other sequence", rf_session_length(r.s, 0));
            rf_session_truncate(r.s, 1, 0, NULL, NULL);
        }
        CHECK(taken > n_mutants / 20 && taken < n_mutants * 9 / 10, "%u of %u were taken", taken, n_mutants);
        float want[VOCAB];
        CHECK(rf_session_restore(r.s, 1, &(rf_session_io){saved_write, saved_read, (real.at = 0, &real)}, &r.err) == RF_OK, "%s",
              r.err.text);
        memcpy(want, next(&r, 1, tokens[9]), r.n_vocab * sizeof *want);
        CHECK(memcmp(next(&r, 0, tokens[9]), want, r.n_vocab * sizeof *want) == 0, "the other sequence has changed");
        rig_close(&r);
    }
}

static void test_other_models(void) {
    static const struct { mg_options o; rf_session_desc sd; rf_result want; const char *says; } cases[] = {
        {{.type = MG_F32}, {.n_ctx = 32}, RF_OK, ""},
        {{.arch = "qwen2", .type = MG_F32}, {.n_ctx = 32}, RF_ERR_UNSUPPORTED, "want qwen2, found llama"},
        {{.type = MG_F32, .n_layers = 3}, {.n_ctx = 32}, RF_ERR_UNSUPPORTED, "weights: want 30, found 21"},
        {{.type = MG_F16}, {.n_ctx = 32}, RF_ERR_UNSUPPORTED, "hash of the weights' shapes"},
        {{.type = MG_F32, .n_ff = 128}, {.n_ctx = 32}, RF_ERR_UNSUPPORTED, "hash of the weights' shapes"},
        {{.type = MG_F32}, {.n_ctx = 32, .cache_type = RF_CACHE_F32}, RF_ERR_UNSUPPORTED, "rf_cache_type: want 1, found 0"},
        {{.type = MG_F32}, {.n_ctx = 4}, RF_ERR_CONTEXT_FULL, "5 tokens, n_ctx is 4"}};
    rig a;
    stream s;
    int32_t tokens[N];
    mg_tokens(tokens, N, 300, 5);
    if (!open_rig(&a, &cases[0].o, &cases[0].sd)) return;
    CHECK(save(&a, 0, tokens, 5, &s), "save");
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        rig b;
        if (!open_rig(&b, &cases[i].o, &cases[i].sd)) continue;
        rf_result res = restore(&b, 0, &s);
        CHECK(res == cases[i].want && strstr(b.err.text, cases[i].says), "case %zu: %s: %s", i, rf_result_name(res), b.err.text);
        rig_close(&b);
    }
    CHECK(restore(&a, 7, &s) == RF_ERR_ARGUMENT && rf_session_restore(a.s, 0, NULL, NULL) == RF_ERR_ARGUMENT &&
              rf_session_save(a.s, 0, &(rf_session_io){0}, NULL) == RF_ERR_ARGUMENT &&
              rf_session_restore(NULL, 0, NULL, NULL) == RF_ERR_ARGUMENT, "arguments");
    free(s.data);
    rig_close(&a);
}

/* ---- failing streams and devices ---- */

static int device_fails_in;
static const rf_device_api *real_api;

static rf_result failing_read(rf_queue *q, const rf_mem *src, uint64_t offset, void *dst, uint64_t n, rf_ticket *ticket,
                              rf_error *err) {
    if (--device_fails_in == 0) return rfi_fail(err, RF_ERR_DEVICE, 0, "the device reads no more");
    return real_api->mem_read(q, src, offset, dst, n, ticket, err);
}
static rf_result failing_write(rf_queue *q, const rf_mem *dst, uint64_t offset, const void *src, uint64_t n,
                               rf_ticket *ticket, rf_error *err) {
    if (--device_fails_in == 0) return rfi_fail(err, RF_ERR_DEVICE, 0, "the device writes no more");
    return real_api->mem_write(q, dst, offset, src, n, ticket, err);
}

static int write_as_fwrite(const void *data, size_t n, void *user) { /* not 0 for success */
    (void)data, (void)user;
    return (int)n;
}

static void test_faults(void) {
    rig r;
    stream s;
    int32_t tokens[N];
    float out[256];
    mg_tokens(tokens, N, 300, 6);
    if (!open_rig(&r, &(mg_options){.type = MG_F32}, &(rf_session_desc){.n_ctx = 32, .n_seq_max = 2})) return;
    CHECK(save(&r, 0, tokens, 5, &s), "save");
    int n_writes = s.calls, n_reads;
    CHECK(restore(&r, 1, &s) == RF_OK, "%s", r.err.text);
    n_reads = s.calls;
    CHECK(n_writes == 11 && n_reads == 11, "%d writes, %d reads", n_writes, n_reads); /* header, tokens, 8 heads, checksum */
    rf_session_truncate(r.s, 1, 0, NULL, NULL);
    for (s.fail_at = 1; s.fail_at <= n_reads; s.fail_at++)
        CHECK(restore(&r, 1, &s) == RF_ERR_IO && r.err.sys == 5 && strstr(r.err.text, "input/output error") &&
                  rf_session_length(r.s, 1) == 0, "read %d: %s", s.fail_at, r.err.text);
    stream copy = {.data = (unsigned char *)malloc(s.n), .capacity = s.n};
    REQUIRE(copy.data, "out of memory");
    rf_session_io io = io_of(&copy);
    for (copy.fail_at = 1; copy.fail_at <= n_writes; copy.fail_at++) {
        copy.n = 0, copy.calls = 0;
        CHECK(rf_session_save(r.s, 0, &io, &r.err) == RF_ERR_IO && r.err.sys == 28 && strstr(r.err.text, "no space left") &&
                  rf_session_length(r.s, 0) == 5, "write %d: %s", copy.fail_at, r.err.text);
    }
    CHECK(rf_session_save(r.s, 0, &(rf_session_io){.write_fn = write_as_fwrite}, &r.err) == RF_ERR_IO && r.err.sys == 0 &&
              strstr(r.err.text, "write_fn of 104 bytes at byte 0 returned 104"), "%s", r.err.text);
    copy.fail_at = s.fail_at = 0;
    rf_device_api failing = *(real_api = r.d->api);
    failing.mem_read = failing_read;
    failing.mem_write = failing_write;
    r.d->api = &failing;
    for (int k = 1; k <= 8; k++) {
        device_fails_in = k;
        CHECK(restore(&r, 1, &s) == RF_ERR_DEVICE && rf_session_length(r.s, 1) == 0, "write %d: %s", k, r.err.text);
        device_fails_in = k, copy.n = 0;
        CHECK(rf_session_save(r.s, 0, &io, &r.err) == RF_ERR_DEVICE && rf_session_length(r.s, 0) == 5, "read %d", k);
    }
    device_fails_in = 2; /* the first one is the argmax of the eval */
    const rf_embed_text text = {tokens, 5};
    const rf_embed_desc embed = {.texts = &text, .n_texts = 1, .pooling = RF_POOL_LAST};
    CHECK(rf_session_embed(r.s, &embed, out, &r.err) == RF_ERR_DEVICE && rf_session_length(r.s, 0) == 0, "%s", r.err.text);
    r.d->api = real_api;
    CHECK(restore(&r, 1, &s) == RF_OK && restore(&r, 0, &s) == RF_OK, "%s", r.err.text);
    free(copy.data), free(s.data);
    rig_close(&r);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_hidden);
    RUN(test_same_bits);
    RUN(test_damage);
    RUN(test_long_factors_alone);
    RUN(test_forged);
    RUN(test_other_models);
    RUN(test_faults);
    RFT_END();
}
