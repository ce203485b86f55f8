/* Caches of layers with a sliding window that hold no more than the window: the logits of whole models against the float64
 * evaluator of ref_family.h, and bit for bit those of a cache that holds everything, across every wrap of the ring; cutting,
 * copying, saving and failing; the forecast against what is asked of the device. And keys and values in q8_0. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "ref_model.h"
#include "ref_family.h"
#include "rf_test.h"
#include "rf_memory.h"
#include "rf_rig.h"

enum { N = 600, CTX = 640, VOCAB = 320 };
#define TOLERANCE 8e-6 /* of the largest logit, as in test_family.c; these contexts are 15 times as long */

static uint32_t window_now;
static void local_and_global(mg_gguf *w) { /* three layers, the second one global */
    const uint8_t local[3] = {1, 0, 1};
    (void)w;
    mg_uint("attention.sliding_window", window_now);
    mg_kv_arr(w, mg_key("attention.sliding_window_pattern"), MG_KV_BOOL, local, 3, 3);
}
static const mg_family gemma = {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM, .n_layers = 3, .seed = 5,
                                .more_kv = local_and_global};

/* The same with heads of 32 values, which q8_0 can do. */
static const mg_family wide_gemma = {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM, .n_layers = 3, .n_embd = 128, .seed = 6,
                                     .more_kv = local_and_global};

static int open_model(rig *r, const mg_family *f, uint32_t window) {
    mg_buf file = {0};
    window_now = window;
    mg_family_model(&file, f);
    const int ok = rig_open(r, &(rig_how){.file = &file});
    r->file = file;
    return ok;
}

/* A session in place of the one before. */
static int open_session(rig *r, rf_session_desc sd) {
    sd.n_ctx = sd.n_ctx ? sd.n_ctx : CTX;
    sd.n_logits_max = sd.n_logits_max ? sd.n_logits_max : N;
    rf_session_close(r->s, NULL);
    r->s = NULL;
    rf_result res = rf_session_open(r->m, &sd, &r->s, &r->err);
    CHECK(res == RF_OK, "%s", r->err.text);
    return res == RF_OK;
}

static const int32_t *some_tokens(void) {
    static int32_t tokens[CTX + 1];
    mg_tokens(tokens, CTX + 1, 310, 11);
    return tokens;
}

/* Tokens [first, first + n) to a sequence, n_call at a time; logits of all of them unless out is NULL. */
static int eval(rig *r, int32_t seq, uint32_t first, uint32_t n, uint32_t n_call, float *out) {
    static rf_token_row rows[N];
    const int32_t *tokens = some_tokens();
    rf_result res = RF_OK;
    for (uint32_t at = 0, k; res == RF_OK && at < n; at += k) {
        k = n - at < n_call ? n - at : n_call;
        for (uint32_t i = 0; i < k; i++)
            rows[i] = (rf_token_row){.token = tokens[first + at + i], .seq = seq, .pos = (int32_t)(first + at + i), .want_logits = out != NULL};
        res = rf_session_eval(r->s, rows, k, &r->err);
        for (uint32_t i = 0; res == RF_OK && out && i < k; i++)
            memcpy(out + (size_t)(at + i) * VOCAB, rft_logits(r->s, i), VOCAB * sizeof *out);
    }
    return res == RF_OK;
}

static float *all_logits(void) {
    float *p = (float *)malloc((size_t)N * VOCAB * sizeof *p);
    if (!p) ref_die("out of memory");
    return p;
}

/* ---- streams ---- */

static saved stream;
static const rf_session_io saved_io = {saved_write, saved_read, &stream};

static rf_result restore(rig *r, int32_t seq) {
    stream.at = 0;
    return rf_session_restore(r->s, seq, &saved_io, &r->err);
}

/* ---- the logits ---- */

static void test_windows(void) {
    static const uint32_t windows[] = {1, 100, 257, 1000}, /* 1000: no layer is a ring */
        batches[][2] = {{1, 1}, {64, 7}, {157, N}, {158, N}, {200, 3}}; /* n_batch, rows of a call */
    float *full = all_logits(), *got = all_logits();
    double worst = 0;
    for (size_t w = 0; w < RFI_COUNT(windows); w += 1 + RFT_SANITIZED) { /* 1 and 257 tell a sanitizer most */
        rig r;
        ref_model ref;
        if (!open_model(&r, &gemma, windows[w])) continue;
        ref_open(&ref, r.g);
        double *want = ref_family_eval(&ref, some_tokens(), N, CTX, &(ref_options){0}, NULL);
        ref_close(&ref);
        if (!open_session(&r, (rf_session_desc){.cache_type = RF_CACHE_F32, .swa_full = 1})) continue;
        CHECK(eval(&r, 0, 0, N, N, full), "%s", r.err.text);
        const double off = ref_distance(full, want, (size_t)N * VOCAB);
        CHECK(off <= TOLERANCE, "window %u: logits are off by %.3g", windows[w], off);
        worst = rft_worst(worst, off);
        free(want);
        for (size_t b = 0; b < RFI_COUNT(batches); b++) {
            const rf_session_desc sd = {.cache_type = RF_CACHE_F32, .n_batch = batches[b][0]};
            if (!open_session(&r, sd)) continue;
            CHECK(eval(&r, 0, 0, N, batches[b][1], got), "%s", r.err.text);
            CHECK(!memcmp(got, full, (size_t)N * VOCAB * sizeof *got), "window %u, batches of %u: other bits", windows[w], sd.n_batch);
        }
        rig_close(&r);
    }
    printf("    windows: worst %.2g of the largest logit\n", worst);
    free(full), free(got);
}

/* Sequences side by side, one of them ahead, with f16 keys and values: each as if it were alone. */
static void test_neighbours(void) {
    float *alone = all_logits(), *got = all_logits();
    rig r;
    if (!open_model(&r, &gemma, 100)) return;
    if (open_session(&r, (rf_session_desc){.swa_full = 1})) CHECK(eval(&r, 0, 0, N, N, alone), "%s", r.err.text);
    if (open_session(&r, (rf_session_desc){.n_seq_max = 3, .n_batch = 50})) {
        CHECK(eval(&r, 2, 0, 300, N, NULL) && eval(&r, 0, 0, 10, N, got), "%s", r.err.text);
        rf_token_row rows[2];
        for (uint32_t i = 10; i < N - 300; i++) {
            for (int k = 0; k < 2; k++)
                rows[k] = (rf_token_row){.token = some_tokens()[i + (k ? 290 : 0)], .seq = k ? 2 : 0, .pos = RF_POS_NEXT, .want_logits = 1};
            CHECK(rf_session_eval(r.s, rows, 2, &r.err) == RF_OK, "%s", r.err.text);
            for (uint32_t k = 0; k < 2; k++)
                memcpy(got + (size_t)(i + (k ? 290 : 0)) * VOCAB, rft_logits(r.s, k), VOCAB * sizeof *got);
        }
        CHECK(!memcmp(got, alone, (size_t)(N - 300) * VOCAB * sizeof *got), "sequence 0: other bits");
        CHECK(!memcmp(got + (size_t)300 * VOCAB, alone + (size_t)300 * VOCAB, (size_t)(N - 310) * VOCAB * sizeof *got), "sequence 2");
    }
    rig_close(&r);
    free(alone), free(got);
}

/* ---- q8_0 ---- */

/* Few tokens, whose keys and values keep away from ties, against the float64 evaluator that rounds them likewise. */
static void test_q8(void) {
    enum { FEW = 10 };
    float *got = all_logits();
    rig r;
    ref_model ref;
    ref_margins margins = {0};
    double *want = NULL;
    int32_t tokens[FEW];
    if (!open_model(&r, &wide_gemma, 4) || !open_session(&r, (rf_session_desc){.cache_type = RF_CACHE_Q8_0, .n_batch = 3})) return;
    ref_open(&ref, r.g);
    for (uint64_t seed = 0; margins.int8 < 1e-4 && seed < 300; seed++) {
        mg_rng random = {seed};
        free(want);
        for (uint32_t i = 0; i < FEW; i++) tokens[i] = (int32_t)mg_below(&random, 310);
        want = ref_family_eval(&ref, tokens, FEW, CTX, &(ref_options){.kv_q8 = 1}, &margins);
    }
    CHECK(margins.int8 >= 1e-4, "no tokens keep away from ties");
    double *unrounded = ref_family_eval(&ref, tokens, FEW, CTX, &(ref_options){0}, NULL);
    rf_token_row rows[FEW];
    for (uint32_t i = 0; i < FEW; i++) rows[i] = (rf_token_row){.token = tokens[i], .pos = RF_POS_NEXT, .want_logits = 1};
    CHECK(rf_session_eval(r.s, rows, FEW, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < FEW; i++) memcpy(got + (size_t)i * VOCAB, rft_logits(r.s, i), VOCAB * sizeof *got);
    const double off = ref_distance(got, want, FEW * VOCAB), without = ref_distance(got, unrounded, FEW * VOCAB);
    CHECK(off <= TOLERANCE && without > 100 * TOLERANCE, "off by %.3g, and by %.3g of what is not rounded", off, without);
    printf("    q8_0: worst %.2g of the largest logit; the rounding is %.2g\n", off, without);
    free(want), free(unrounded), free(got);
    ref_close(&ref);
    rig_close(&r);
}

/* Rings of it have the bits of a cache that holds everything, too; and are copied, saved and forecast. */
static void test_q8_rings(void) {
    static const uint32_t batches[][2] = {{64, 7}, {158, N}};
    const rf_session_desc sd = {.cache_type = RF_CACHE_Q8_0, .n_batch = 64, .n_seq_max = 2};
    float *full = all_logits(), *got = all_logits();
    rf_forecast f;
    rig r;
    if (!open_model(&r, &wide_gemma, 100)) return;
    if (!open_session(&r, (rf_session_desc){.cache_type = RF_CACHE_Q8_0, .swa_full = 1})) return;
    CHECK(eval(&r, 0, 0, N, N, full), "%s", r.err.text);
    for (size_t b = 0; b < RFI_COUNT(batches); b++) {
        if (!open_session(&r, (rf_session_desc){.cache_type = RF_CACHE_Q8_0, .n_batch = batches[b][0]})) continue;
        CHECK(eval(&r, 0, 0, N, batches[b][1], got), "%s", r.err.text);
        CHECK(!memcmp(got, full, (size_t)N * VOCAB * sizeof *got), "batches of %u: other bits", batches[b][0]);
    }
    if (!open_session(&r, sd)) return;
    const uint64_t want = (2 * 256 + CTX) * 2 * 2 * 34 * 2; /* cells, sequences, heads, bytes of 32 values, keys and values */
    CHECK(rf_model_forecast(r.m, &r.s->desc, &f, &r.err) == RF_OK && f.kv_bytes == want && r.s->state.size_bytes == want, "%llu bytes",
          RFI_LLU(f.kv_bytes));
    CHECK(eval(&r, 1, 0, 500, N, NULL) && rf_session_copy(r.s, 1, 0, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(eval(&r, 0, 500, 1, 1, got) && !memcmp(got, full + (size_t)500 * VOCAB, VOCAB * sizeof *got), "a copy: other bits");
    stream.n = 0;
    CHECK(rf_session_save(r.s, 1, &saved_io, &r.err) == RF_OK && stream.n == 112 + 4 * 500 + (2 * 256 + 500) * 136, "%zu bytes", stream.n);
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    CHECK(restore(&r, 0) == RF_OK && eval(&r, 0, 500, 1, 1, got) && !memcmp(got, full + (size_t)500 * VOCAB, VOCAB * sizeof *got), "%s",
          r.err.text);
    rig_close(&r);
    /* heads of 16 values */
    if (!open_model(&r, &gemma, 100)) return;
    CHECK(rf_model_forecast(r.m, &sd, &f, &r.err) == RF_ERR_UNSUPPORTED && rf_session_open(r.m, &sd, &r.s, &r.err) == RF_ERR_UNSUPPORTED &&
              strstr(r.err.text, "multiple of 32 values, layer 0 has 16 and 16"), "%s", r.err.text);
    rig_close(&r);
    free(full), free(got);
}

/* ---- cutting ---- */

/* A ring of 256 cells with a window of 100: of a sequence that has been 500 long, what comes before 244 is gone, and a
 * token at 343 sees it. */
static void test_cut(void) {
    float *want = all_logits(), *got = all_logits();
    const int32_t *tokens = some_tokens();
    uint32_t kept;
    rig r;
    if (!open_model(&r, &gemma, 100)) return;
    if (!open_session(&r, (rf_session_desc){.swa_full = 1}) || !eval(&r, 0, 0, N, N, want)) return;
    for (uint32_t n = N; n > 0; n -= 100) { /* a cache that holds everything is cut anywhere */
        CHECK(rf_session_truncate(r.s, 0, n - 100, &kept, &r.err) == RF_OK && kept == n - 100, "kept %u", kept);
        CHECK(eval(&r, 0, n - 100, 50, N, got) && !memcmp(got, want + (size_t)(n - 100) * VOCAB, 50 * VOCAB * sizeof *got), "at %u", n);
    }
    if (!open_session(&r, (rf_session_desc){.n_batch = 64})) return;
    CHECK(eval(&r, 0, 0, 500, N, NULL), "%s", r.err.text);
    CHECK(rf_session_truncate(r.s, 0, 600, &kept, NULL) == RF_OK && kept == 500, "kept %u", kept);
    CHECK(rf_session_truncate(r.s, 0, 400, &kept, NULL) == RF_OK && kept == 400, "kept %u", kept);
    CHECK(rf_session_truncate(r.s, 0, 343, &kept, NULL) == RF_OK && kept == 343, "kept %u", kept);
    CHECK(eval(&r, 0, 343, 1, 1, got) && !memcmp(got, want + (size_t)343 * VOCAB, VOCAB * sizeof *got), "at the edge");
    CHECK(eval(&r, 0, 344, 200, 64, got) && !memcmp(got, want + (size_t)344 * VOCAB, 200 * VOCAB * sizeof *got), "and on");
    CHECK(rf_session_sync(r.s, 0, tokens, 544, &kept, NULL) == RF_OK && kept == 543, "synced to %u", kept);
    CHECK(rf_session_sync(r.s, 0, tokens, 300, &kept, NULL) == RF_OK && kept == 0 && rf_session_length(r.s, 0) == 0, "synced to %u", kept);
    CHECK(eval(&r, 0, 0, 256, 9, got) && !memcmp(got, want, 256 * VOCAB * sizeof *got), "again from 0");
    CHECK(rf_session_truncate(r.s, 0, 3, &kept, NULL) == RF_OK && kept == 3, "not longer than the ring: kept %u", kept);
    CHECK(eval(&r, 0, 3, 254, 64, got) && !memcmp(got, want + 3 * VOCAB, 254 * VOCAB * sizeof *got), "and on");
    CHECK(rf_session_truncate(r.s, 0, 99, &kept, NULL) == RF_OK && kept == 0, "257 cells are one too many: kept %u", kept);
    CHECK(rf_session_truncate(r.s, 0, 0, &kept, NULL) == RF_OK && kept == 0, "kept %u", kept);
    rig_close(&r);
    free(want), free(got);
}

static void test_copy(void) {
    static const uint32_t lengths[] = {60, 256, 530};
    float want[VOCAB], got[VOCAB];
    uint32_t kept;
    rig r;
    if (!open_model(&r, &gemma, 100)) return;
    for (uint32_t full = 0; full < 2; full++)
        for (size_t i = 0; i < RFI_COUNT(lengths); i++) {
            const uint32_t n = lengths[i];
            if (!open_session(&r, (rf_session_desc){.n_seq_max = 3, .n_batch = 64, .swa_full = full})) continue;
            CHECK(eval(&r, 1, 0, n, N, NULL) && eval(&r, 0, 0, 300, N, NULL), "%s", r.err.text);
            CHECK(rf_session_copy(r.s, 1, 0, &r.err) == RF_OK && rf_session_length(r.s, 0) == n, "%s", r.err.text);
            CHECK(eval(&r, 1, n, 1, 1, want) && eval(&r, 0, n, 1, 1, got) && !memcmp(want, got, sizeof got), "%u: other bits", n);
            /* the copy can be cut as far as what it was copied from */
            CHECK(rf_session_truncate(r.s, 0, n - 50, &kept, NULL) == RF_OK && kept == n - 50, "kept %u", kept);
            CHECK(eval(&r, 0, n - 50, 51, 64, NULL) && eval(&r, 0, n + 1, 1, 1, got) && eval(&r, 1, n + 1, 1, 1, want) &&
                      !memcmp(want, got, sizeof got), "%u: other bits after a cut", n);
            CHECK(rf_session_truncate(r.s, 0, 20, &kept, NULL) == RF_OK && kept == (full || n < 255 ? 20u : 0u), "%u: kept %u", n, kept);
        }
    rig_close(&r);
}

/* ---- saving ---- */

static uint32_t cells_of(const rf_session_desc *d) { return d->swa_full ? CTX : d->n_batch > 157 ? 512 : 256; }

static void test_saved(void) {
    /* into rings of other sizes, and caches that hold everything; and from such ones */
    static const rf_session_desc sessions[] = {{.n_batch = 64}, {.n_batch = 1}, {.n_batch = 200, .n_seq_max = 2},
                                               {.n_batch = 64, .swa_full = 1}, {.n_batch = 64, .n_ctx = 562}};
    static const uint32_t lengths[] = {40, 257, 560};
    float want[2 * VOCAB], got[2 * VOCAB];
    uint32_t kept;
    rig r;
    if (!open_model(&r, &gemma, 100)) return;
    for (size_t l = 0; l < RFI_COUNT(lengths); l++)
        for (size_t from = 0; from < RFI_COUNT(sessions); from++) {
            const uint32_t n = lengths[l];
            if (!open_session(&r, sessions[from])) continue;
            stream.n = 0;
            CHECK(eval(&r, 0, 0, n, N, NULL), "%s", r.err.text);
            const uint64_t bytes = rf_session_save_bytes(r.s, 0);
            CHECK(rf_session_save(r.s, 0, &saved_io, &r.err) == RF_OK && bytes == stream.n, "%s, %zu bytes", r.err.text, stream.n);
            CHECK(eval(&r, 0, n, 2, 2, want), "%s", r.err.text);
            /* 104 of header, 8 of checksum; positions of layers 0 and 2, and of layer 1; 2 heads of 16, keys and values */
            const uint32_t cells = cells_of(&sessions[from]), held = n < cells ? n : cells;
            CHECK(bytes == 112 + 4 * n + (2 * held + n) * 128, "%u tokens: %llu bytes", n, RFI_LLU(bytes));
            for (size_t to = 0; to < RFI_COUNT(sessions); to++) {
                if (!open_session(&r, sessions[to])) continue;
                if (from == 0) CHECK(eval(&r, 0, 0, 257, N, NULL) && rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK, "used");
                CHECK(restore(&r, 0) == RF_OK && rf_session_length(r.s, 0) == n, "%s", r.err.text);
                CHECK(eval(&r, 0, n, 2, 2, got) && !memcmp(got, want, sizeof got), "%u, %zu to %zu: other bits", n, from, to);
                const uint32_t to_cells = cells_of(&sessions[to]);
                rf_session_truncate(r.s, 0, 20, &kept, NULL);
                CHECK(kept == (n <= cells && n <= to_cells ? 20u : 0u), "%u, %zu to %zu: kept %u", n, from, to, kept);
            }
        }
    rig_close(&r);
}

/* Headers that lie, with a checksum that holds. */
static void test_forged(void) {
    rig r;
    if (!open_model(&r, &gemma, 100) || !open_session(&r, (rf_session_desc){.n_batch = 64})) return;
    stream.n = 0;
    CHECK(eval(&r, 0, 0, 300, N, NULL) && rf_session_save(r.s, 0, &saved_io, &r.err) == RF_OK, "%s", r.err.text);
    rfi_saved h, forged;
    memcpy(&h, stream.data, sizeof h);
    CHECK(h.n_tokens == 300 && h.min_keep == 300 - 256 + 99, "at least %u", h.min_keep);
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    CHECK(restore(&r, 0) == RF_OK, "%s", r.err.text);
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    static const uint32_t least[] = {0, 1, 142, 144, 299, 300, 301, INT32_MAX, UINT32_MAX};
    for (size_t i = 0; i < RFI_COUNT(least); i++) {
        forged = h;
        forged.min_keep = least[i];
        memcpy(stream.data, &forged, sizeof forged);
        uint64_t hash = rfi_hash_bytes(0xcbf29ce484222325u, stream.data, stream.n - 8);
        memcpy(stream.data + stream.n - 8, &hash, 8);
        CHECK(restore(&r, 0) == RF_ERR_FORMAT && rf_session_length(r.s, 0) == 0, "at least %u: %s", least[i], r.err.text);
    }
    rig_close(&r);
}

/* ---- failing ---- */

static int runs_left;
static const rf_device_api *real_api;
static rf_result failing_run(rf_prepared *p, rf_queue *q, uint32_t first, uint32_t last, const rf_step *step, rf_ticket *ticket,
                             rf_error *err) {
    if (first == 0 && runs_left-- == 0) return rfi_fail(err, RF_ERR_DEVICE, 0, "the device runs no more");
    return real_api->plan_run(p, q, first, last, step, ticket, err);
}

/* A call that fails leaves a sequence as it was, or, if it came too far for that, empty. */
static void test_failing(void) {
    float *want = all_logits(), got[VOCAB];
    rig r;
    if (!open_model(&r, &gemma, 100) || !open_session(&r, (rf_session_desc){.n_batch = 64, .n_seq_max = 2}) ||
        !eval(&r, 0, 0, N, N, want)) return;
    rf_device_api failing = *(real_api = r.d->api);
    failing.plan_run = failing_run;
    for (int forward = 0; forward < 2; forward++)
        for (int batches = 0; batches < 3; batches++) { /* that work, of 64 rows; of 256 cells the next token needs 99 */
            const int lost = batches > 1; /* also what the failing batch may have written counts */
            rf_session_truncate(r.s, 0, 0, NULL, NULL);
            rf_session_truncate(r.s, 1, 0, NULL, NULL);
            CHECK(eval(&r, 0, 0, 280, N, NULL) && eval(&r, 1, 0, 5, N, NULL), "%s", r.err.text);
            r.d->api = &failing;
            runs_left = batches;
            if (forward) CHECK(rf_session_forward(r.s, some_tokens() + 280, 320, NULL, &r.err) == RF_ERR_DEVICE, "%s", r.err.text);
            else CHECK(!eval(&r, 0, 280, 320, N, NULL) && r.err.code == RF_ERR_DEVICE, "%s", r.err.text);
            r.d->api = real_api;
            CHECK(rf_session_length(r.s, 0) == (lost ? 0u : 280u) && rf_session_length(r.s, 1) == 5, "%d: %u tokens", batches,
                  rf_session_length(r.s, 0));
            CHECK(!strstr(r.err.text, "sequence 0 is empty now") == !lost, "%s", r.err.text);
            if (lost) CHECK(eval(&r, 0, 0, 280, N, NULL), "%s", r.err.text);
            CHECK(eval(&r, 0, 280, 1, 1, got) && !memcmp(got, want + (size_t)280 * VOCAB, sizeof got), "%d: other bits", batches);
        }
    rig_close(&r);
    free(want);
}

/* ---- the forecast ---- */

static void test_forecast(void) {
    static const struct { rf_session_desc sd; uint32_t window, cells[2]; } cases[] = {/* cells of local and global layers */
        {{.n_ctx = 4096}, 100, {768, 4096}},
        {{.n_ctx = 4096, .n_batch = 157}, 100, {256, 4096}},
        {{.n_ctx = 4096, .n_batch = 158}, 100, {512, 4096}},
        {{.n_ctx = 4096, .n_batch = 1}, 256, {256, 4096}},
        {{.n_ctx = 4096, .n_batch = 1}, 257, {512, 4096}},
        {{.n_ctx = 4096, .swa_full = 1}, 100, {4096, 4096}},
        {{.n_ctx = 600, .n_batch = 512}, 100, {600, 600}},
        {{.n_ctx = 4096, .n_seq_max = 3, .cache_type = RF_CACHE_F32}, 1, {512, 4096}},
        {{.n_ctx = 4096}, 100000, {4096, 4096}}};
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        rig r;
        rf_forecast f;
        rf_session_desc sd = cases[i].sd;
        if (!open_model(&r, &gemma, cases[i].window)) continue;
        const uint64_t n_seq = sd.n_seq_max ? sd.n_seq_max : 1, bytes = sd.cache_type == RF_CACHE_F32 ? 4 : 2;
        const uint64_t want = (2 * cases[i].cells[0] + cases[i].cells[1]) * n_seq * 2 * 16 * 2 * bytes;
        CHECK(rf_model_forecast(r.m, &sd, &f, &r.err) == RF_OK && rf_session_open(r.m, &sd, &r.s, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(f.kv_bytes == want && r.s && r.s->state.size_bytes == want, "case %zu: %llu bytes, forecast %llu, want %llu", i,
              RFI_LLU(r.s ? r.s->state.size_bytes : 0), RFI_LLU(f.kv_bytes), RFI_LLU(want));
        rig_close(&r);
    }
}

static memory mem;

/* What a session asks of the CPU device's allocator is what was forecast, and little beside: of each block its alignment, of
 * each op some words, and the rows and logits that go back and forth. */
static void test_cpu_workspaces(void) {
    static const char *const files[] = {"examples/shakespeare-5m.gguf", "tests/family/olmoe.gguf", "tests/family/qwen35moe.gguf",
                                        "tests/family/deepseek2-lite.gguf"};
    static const rf_session_desc descs[] = {{.n_ctx = 64, .n_batch = 1}, {.n_ctx = 128}, {.n_ctx = 2000, .n_batch = 1000, .cache_type = RF_CACHE_F32}};
    for (size_t i = 0; i < RFI_COUNT(files) * RFI_COUNT(descs); i++) {
        const char *path = files[i / RFI_COUNT(descs)];
        const rf_session_desc *sd = &descs[i % RFI_COUNT(descs)];
        rf_device_desc dd = {.n_threads = 2, .allocator = memory_allocator(&mem)};
        rf_forecast f;
        rig r = {0};
        rf_result res = rf_gguf_open(path, NULL, &r.g, &r.err);
        if (res == RF_OK) res = rf_device_open("cpu", &dd, &r.d, &r.err);
        if (res == RF_OK) res = rf_model_open(r.g, r.d, NULL, &r.m, &r.err);
        if (res == RF_OK) res = rf_model_forecast(r.m, sd, &f, &r.err);
        mem.total = 0;
        if (res == RF_OK) res = rf_session_open(r.m, sd, &r.s, &r.err);
        CHECK(res == RF_OK, "%s: %s", path, r.err.text);
        if (res == RF_OK) {
            const uint64_t forecast = f.kv_bytes + f.scratch_bytes + f.plan_bytes, beside = 32768 + 64ull * r.m->plan.n_ops;
            CHECK(f.plan_bytes > 0 && (uint64_t)mem.total >= forecast && (uint64_t)mem.total <= forecast + f.host_bytes + beside,
                  "%s: %llu bytes, forecast %llu", path, RFI_LLU((uint64_t)mem.total), RFI_LLU(forecast));
        }
        rig_close(&r);
    }
}

/* What a session takes of the host is what was forecast and some KiB, and grows with each of its sizes as that does. The null device takes nothing of its own. */
static void test_host_memory(void) {
    static const char *const files[] = {"examples/shakespeare-5m.gguf", "tests/family/olmoe.gguf", "tests/family/qwen35moe.gguf"};
    static const rf_session_desc least = {.n_ctx = 64, .n_seq_max = 1, .n_batch = 1, .n_logits_max = 1, .n_snapshots = 1};
    const rf_gguf_desc gd = {.allocator = memory_allocator(&mem)};
    const rf_device_desc dd = {.allocator = gd.allocator};
    for (size_t i = 0; i < RFI_COUNT(files); i++) {
        uint64_t first = 0, first_forecast = 0;
        for (int size = 0; size <= 5; size++) {
            rf_session_desc sd = least;
            rf_forecast f;
            rig r;
            if (size == 1) sd.n_ctx += 5000;
            if (size == 2) sd.n_seq_max += 1000;
            if (size == 3) sd.n_batch += 1000;
            if (size == 4) sd.n_logits_max += 1000;
            if (size == 5) sd.n_snapshots += 1000;
            if (!rig_open(&r, &(rig_how){.path = files[i], .device = "null", .gguf = &gd, .device_desc = &dd})) continue;
            CHECK(rf_model_forecast(r.m, &sd, &f, &r.err) == RF_OK, "%s", r.err.text);
            mem.total = 0;
            CHECK(rf_session_open(r.m, &sd, &r.s, &r.err) == RF_OK, "%s", r.err.text);
            if (size == 0) first = (uint64_t)mem.total, first_forecast = f.host_bytes;
            CHECK((uint64_t)mem.total >= f.host_bytes && (uint64_t)mem.total <= f.host_bytes + 20480, "%s, size %d: %llu bytes, forecast %llu", files[i], size, RFI_LLU((uint64_t)mem.total), RFI_LLU(f.host_bytes));
            const int64_t more = (int64_t)((uint64_t)mem.total - first), want = (int64_t)(f.host_bytes - first_forecast);
            CHECK(llabs(more - want) < 3 * 256, "%s, size %d: %lld bytes more, forecast %lld", files[i], size, (long long)more, (long long)want);
            rig_close(&r);
        }
    }
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_windows);
    RUN(test_neighbours);
    RUN(test_q8);
    RUN(test_q8_rings);
    RUN(test_cut);
    RUN(test_copy);
    RUN(test_saved);
    RUN(test_forged);
    RUN(test_failing);
    RUN(test_forecast);
    RUN(test_cpu_workspaces);
    RUN(test_host_memory);
    RFT_END();
}
