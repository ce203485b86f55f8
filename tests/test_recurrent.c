/* Sessions of models whose layers have a state instead of keys and values: the same bits whatever the batches, the
 * neighbours and the way there; going back, copies, saved sequences, failures. The fresh evaluation of the same tokens,
 * one at a time, is the reference: that it is right is test_goldens.c's business. With the kernels linked the sessions run on
 * the GPU, where the bits depend on the number of rows of a step. */
#include "rocmforge.h"
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include "ref_compress.h"
#include "ref_hyper.h"
#ifdef RF_TEST_EMU
#include "hip_emu.h"
#endif
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

/* Longer than the 256 tokens between two states that are kept. */
enum { N_VOCAB = 64, MOST = RFT_SANITIZED ? 300 : 600 };

static const char *const models[] = {"tests/family/lfm2.gguf", "tests/family/qwen35.gguf", "tests/family/qwen4exp.gguf",
                                     "tests/family/deepseek4.gguf"};
static const char *device_name;

static int open_rig(rig *r, const char *path, const rf_gguf_desc *gd, const rf_model_desc *md) {
    const rf_device_desc dd = {.n_threads = 1};
    return rig_open(r, &(rig_how){.path = path, .device = device_name, .gguf = gd, .device_desc = &dd, .model = md});
}

static rf_session *session(rig *r, const rf_session_desc *desc) {
    rf_session *s = NULL;
    CHECK(rf_session_open(r->m, desc, &s, &r->err) == RF_OK, "%s", r->err.text);
    return s;
}

/* tokens [from, to) of sequence seq in one call, the last one's logits to out (unless it is NULL) */
static int feed(rf_session *s, int32_t seq, const int32_t *tokens, uint32_t from, uint32_t to, float *out, rf_error *err) {
    static rf_token_row rows[MOST];
    for (uint32_t i = from; i < to; i++)
        rows[i - from] = (rf_token_row){.token = tokens[i], .seq = seq, .pos = (int32_t)i, .want_logits = i + 1 == to};
    if (rf_session_eval(s, rows, to - from, err) != RF_OK) return 0;
    if (out) memcpy(out, rft_logits(s, 0), N_VOCAB * sizeof *out);
    return 1;
}

/* Logits after each token of a sequence that is alone, [n][N_VOCAB]. */
static void reference(rig *r, const int32_t *tokens, uint32_t n, float (*out)[N_VOCAB]) {
    rf_session *s = session(r, &(rf_session_desc){.n_ctx = MOST, .n_batch = 1, .cache_type = RF_CACHE_F32});
    for (uint32_t i = 0; i < n; i++) CHECK(feed(s, 0, tokens, i, i + 1, out[i], &r->err), "%s", r->err.text);
    rf_session_close(s, NULL);
}

#define SAME(a, b) (memcmp(a, b, N_VOCAB * sizeof(float)) == 0)

static float want[MOST][N_VOCAB];
static int32_t tokens[MOST];

/* The GPU's products of one row and of many have other bits. */
static int exact(void) { return strcmp(device_name, "cpu") == 0; }
static int close_to(const float *a, const float *b) {
    float most = 0, off = 0;
    for (int i = 0; i < N_VOCAB; i++) most = fmaxf(most, fabsf(b[i])), off = fmaxf(off, fabsf(a[i] - b[i]));
    return exact() ? SAME(a, b) : off <= 1e-4f * most;
}

static void test_batches(void) {
    static const uint32_t sizes[] = {2, 7, 64, 512};
    for (size_t k = 0; k < RFT_COUNT(models); k++) {
        const uint32_t n = MOST;
        rig r;
        float got[N_VOCAB];
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        mg_tokens(tokens, n, N_VOCAB, k);
        reference(&r, tokens, n, want);
        CHECK(!SAME(want[n - 1], want[n - 2]), "%s: all logits are alike", models[k]);
        for (size_t i = 0; i < RFT_COUNT(sizes); i++) {
            rf_session *s = session(&r, &(rf_session_desc){.n_ctx = MOST, .n_batch = sizes[i], .cache_type = RF_CACHE_F32});
            CHECK(feed(s, 0, tokens, 0, n, got, &r.err), "%s", r.err.text);
            CHECK(close_to(got, want[n - 1]), "%s in batches of %u", models[k], sizes[i]);
            rf_session_close(s, NULL);
        }
        rig_close(&r);
    }
}

/* Floats instead of a token are refused where layers look the token up: n-grams of qwen4exp, experts of deepseek4. */
static void test_tokens_needed(void) {
    for (size_t k = 0; k < RFT_COUNT(models); k++) {
        static float row[1024];
        const int refused = strstr(models[k], "qwen4exp") || strstr(models[k], "deepseek4");
        rig r;
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        rf_session *s = session(&r, &(rf_session_desc){.n_ctx = 8});
        const rf_result res = rf_session_eval(s, &(rf_token_row){.embedding = row, .pos = RF_POS_NEXT}, 1, &r.err);
        CHECK(refused ? res == RF_ERR_UNSUPPORTED && strstr(r.err.text, "look up the token") && rf_session_length(s, 0) == 0 : res == RF_OK,
              "%s: %d %s", models[k], (int)res, r.err.text);
        rf_session_close(s, NULL);
        rig_close(&r);
    }
}

/* Rows of three of a session's sequences mixed in a step are as if each were alone. */
static void test_neighbours(void) {
    for (size_t k = 0; k < RFT_COUNT(models); k++) {
        enum { MOST_EACH = 33 };
        static float alone[3][MOST_EACH][N_VOCAB];
        static const int32_t ids[3] = {17, 0, 39};
        int32_t text[3][MOST_EACH];
        const uint32_t n_each = exact() ? MOST_EACH : 13;
        uint32_t at[3] = {0, 0, 0}, n_calls = 0;
        mg_rng rng = {k + 7};
        rig r;
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        for (uint32_t q = 0; q < 3; q++) mg_tokens(text[q], n_each, N_VOCAB, 50 + 3 * k + q), reference(&r, text[q], n_each, alone[q]);
        rf_session *s = session(&r, &(rf_session_desc){.n_ctx = n_each, .n_seq_max = 40, .n_batch = 5, .n_logits_max = 16,
                                                       .cache_type = RF_CACHE_F32});
        while (at[0] + at[1] + at[2] < 3 * n_each) {
            rf_token_row rows[16];
            uint32_t n = 0, of[16], pos[16];
            /* A GPU may replay steps of as many rows: of one sequence, then of two, then of three. */
            const int replays = !exact() && (n_calls < 4 || mg_below(&rng, 2));
            const uint32_t among = replays && n_calls < 3 ? 1 + n_calls : 3;
            n_calls++;
            for (uint32_t left = replays ? 5 : 1 + mg_below(&rng, 16); left; left--) {
                const uint32_t q = mg_below(&rng, among);
                if (at[q] == n_each) continue;
                of[n] = q, pos[n] = at[q];
                rows[n++] = (rf_token_row){.token = text[q][at[q]++], .seq = ids[q], .pos = RF_POS_NEXT, .want_logits = 1};
            }
            if (n == 0) continue;
            CHECK(rf_session_eval(s, rows, n, &r.err) == RF_OK, "%s", r.err.text);
            for (uint32_t i = 0; i < n; i++)
                CHECK(close_to(rft_logits(s, i), alone[of[i]][pos[i]]), "%s: sequence %d, token %u", models[k],
                      rows[i].seq, pos[i]);
        }
        rf_session_close(s, NULL);
        rig_close(&r);
    }
}

/* How far back a cut goes, and that what follows has the bits of a sequence that was never longer. */
static void test_cut(void) {
    static const uint32_t cuts[] = {MOST - 1, MOST - 2, MOST - 3, MOST - 80, 511, 300, 256, 1, 0};
    for (size_t k = 0; k < RFT_COUNT(models); k++) {
        rig r;
        float got[N_VOCAB];
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        mg_tokens(tokens, MOST, N_VOCAB, k + 20);
        reference(&r, tokens, MOST, want);
        for (size_t i = 0; i < RFT_COUNT(cuts); i++) {
            if (cuts[i] >= MOST) continue; /* a sanitizer's sequence is shorter */
            const rf_session_desc desc = {.n_ctx = MOST, .n_batch = 100, .cache_type = RF_CACHE_F32,
                                          .swa_full = cuts[i] < MOST - 80}; /* a window's ring holds 256 positions */
            rf_session *s = session(&r, &desc);
            uint32_t kept = 9999, n = cuts[i];
            CHECK(feed(s, 0, tokens, 0, MOST - 2, NULL, &r.err) && feed(s, 0, tokens, MOST - 2, MOST - 1, NULL, &r.err), "%s", r.err.text);
            CHECK(rf_session_truncate(s, 0, n, &kept, &r.err) == RF_OK, "%s", r.err.text);
            /* where it is; before the token that was evaluated alone; before the prompt's last; then not too far back */
            CHECK(rf_session_length(s, 0) == kept && (n >= MOST - 3 ? kept == n : kept <= n && n - kept < 256),
                  "cut to %u: %u are left", n, kept);
            CHECK(feed(s, 0, tokens, kept, MOST, got, &r.err) && SAME(got, want[MOST - 1]), "after a cut to %u", n);
            uint32_t again = 0;
            CHECK(rf_session_sync(s, 0, tokens, MOST, &again, &r.err) == RF_OK && again == MOST - 1, "sync keeps %u", again);
            rf_session_close(s, NULL);
        }
        rig_close(&r);
    }
}

/* ---- whatever happens ---- */

enum { N_SEQ = 3, N_CTX = RFT_SANITIZED ? 120 : 300 };
typedef struct play {
    rig r;
    rf_session *s;
    mg_rng rng;
    uint32_t n_ctx;
    uint32_t n[N_SEQ]; /* all hold beginnings of `tokens` */
} play;

static void play_saved(play *p, uint32_t q, uint32_t to) {
    static saved file;
    rf_session_io io = {saved_write, saved_read, &file};
    file.n = file.at = 0;
    CHECK(rf_session_save(p->s, (int32_t)q, &io, &p->r.err) == RF_OK, "%s", p->r.err.text);
    CHECK(file.n == rf_session_save_bytes(p->s, (int32_t)q), "%zu bytes", file.n);
    CHECK(rf_session_truncate(p->s, (int32_t)to, 0, NULL, NULL) == RF_OK, "empty");
    CHECK(rf_session_restore(p->s, (int32_t)to, &io, &p->r.err) == RF_OK, "%s", p->r.err.text);
    p->n[to] = p->n[q];
}

static void play_once(play *p, int step) {
    const uint32_t q = mg_below(&p->rng, N_SEQ), to = mg_below(&p->rng, N_SEQ), what = mg_below(&p->rng, 12);
    const uint32_t most = what < 4 ? p->n_ctx / 4 : 2, more = 1 + mg_below(&p->rng, most);
    float got[N_VOCAB];
    uint32_t kept = 0;
    if (what < 8 && p->n[q] + more <= p->n_ctx) {
        CHECK(feed(p->s, (int32_t)q, tokens, p->n[q], p->n[q] + more, got, &p->r.err), "%s", p->r.err.text);
        p->n[q] += more;
        CHECK(close_to(got, want[p->n[q] - 1]), "step %d: sequence %u of %u tokens", step, q, p->n[q]);
    } else if (what == 8) {
        const uint32_t keep = mg_below(&p->rng, p->n[q] + 1);
        CHECK(rf_session_truncate(p->s, (int32_t)q, keep, &kept, &p->r.err) == RF_OK && kept <= keep, "%u", kept);
        p->n[q] = kept;
    } else if (what == 9) {
        CHECK(rf_session_copy(p->s, (int32_t)q, (int32_t)to, &p->r.err) == RF_OK, "%s", p->r.err.text);
        p->n[to] = p->n[q];
    } else if (what == 10) {
        play_saved(p, q, to);
    } else if (p->n[q] + more <= p->n_ctx) { /* cancelled: nothing has changed */
        rf_session_cancel(p->s);
        CHECK(!feed(p->s, (int32_t)q, tokens, p->n[q], p->n[q] + more, NULL, &p->r.err), "not cancelled");
        CHECK(p->r.err.code == RF_ERR_CANCELLED, "%s", p->r.err.text);
    }
    for (uint32_t i = 0; i < N_SEQ; i++)
        CHECK(rf_session_length(p->s, (int32_t)i) == p->n[i], "step %d: sequence %u is %u long, want %u", step, i,
              rf_session_length(p->s, (int32_t)i), p->n[i]);
}

static void test_play(void) {
    static const uint32_t snapshots[] = {1, 2, 5};
    for (size_t k = 0; k < RFT_COUNT(models); k++)
        for (size_t i = 0; i < (exact() ? RFT_COUNT(snapshots) : 1); i++) {
            play p = {.rng = {99 + i + 10 * k}, .n_ctx = exact() ? N_CTX : 40};
            if (!open_rig(&p.r, models[k], NULL, NULL)) continue;
            mg_tokens(tokens, N_CTX, N_VOCAB, k + 40);
            reference(&p.r, tokens, exact() ? N_CTX : 40, want);
            p.s = session(&p.r, &(rf_session_desc){.n_ctx = N_CTX, .n_seq_max = N_SEQ, .n_batch = 9, .n_snapshots = snapshots[i],
                                                   .cache_type = RF_CACHE_F32});
            for (int step = 0; p.s && step < (!exact() ? 20 : RFT_SANITIZED ? 60 : 400); step++) play_once(&p, step);
            rf_session_close(p.s, NULL);
            rig_close(&p.r);
        }
}

/* Reading the file fails at each of its reads in turn, in the middle of an eval of several micro-batches, each of which
 * streams the weights anew: the sequence is as it was, and rf_session_forward goes back over several evals. */
static _Atomic int64_t reads_left; /* may be read by several threads */
static int64_t failing_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    (void)handle;
    return atomic_fetch_sub(&reads_left, 1) > 0 ? pread(*(int *)user, dst, n, (off_t)offset) : -5;
}
static int64_t open_file(const char *path, uint64_t *size_bytes, void *user) {
    (void)path;
    *size_bytes = (uint64_t)lseek(*(int *)user, 0, SEEK_END);
    return 0;
}
static void close_file(int64_t handle, void *user) { (void)handle, (void)user; }

static void test_failing_reads(void) {
    enum { BEFORE = 11, ALL = 40 };
    for (size_t k = 0; k < RFT_COUNT(models); k++) {
        int f = open(models[k], O_RDONLY);
        rig r;
        float got[N_VOCAB];
        REQUIRE(f >= 0, "%s", models[k]);
        const rf_gguf_desc gd = {.io = {open_file, failing_read, NULL, NULL, close_file, &f}, .no_map = 1};
        mg_tokens(tokens, ALL, N_VOCAB, k + 60);
        reads_left = INT64_MAX;
        if (!open_rig(&r, models[k], &gd, &(rf_model_desc){.budget_bytes = k < 2 ? 60000 : 75000, .n_readers = 1})) continue;
        reference(&r, tokens, ALL, want);
        rf_session *s = session(&r, &(rf_session_desc){.n_ctx = ALL, .n_batch = 6, .n_snapshots = 1, .cache_type = RF_CACHE_F32});
        CHECK(feed(s, 0, tokens, 0, BEFORE, NULL, &r.err), "%s", r.err.text);
        uint32_t failures = 0;
        for (int64_t n = 0; n < 5000; n += 3) {
            float *logits = NULL;
            reads_left = n;
            const int ok = n / 3 % 2 ? feed(s, 0, tokens, BEFORE, ALL, got, &r.err)
                                     : rf_session_forward(s, tokens + BEFORE, ALL - BEFORE, &logits, &r.err) == RF_OK;
            if (ok && logits) memcpy(got, logits, sizeof got);
            reads_left = INT64_MAX;
            if (ok) break;
            failures++;
            CHECK(rf_session_length(s, 0) == BEFORE, "it holds %u", rf_session_length(s, 0));
        }
        CHECK(failures > 10, "only %u failures", failures);
        CHECK(SAME(got, want[ALL - 1]), "%s: other bits after %u failures", models[k], failures);
        rf_session_close(s, NULL);
        rig_close(&r);
        close(f);
    }
}

/* What is said to be needed: keys and values of layers with attention only, and a state for each slot. */
static void test_forecast(void) {
    for (size_t k = 0; k < RFT_COUNT(models); k++) {
        rig r;
        rf_forecast one, two;
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        const rf_plan *p = rf_model_get_plan(r.m);
        uint64_t kv = 0, state = 0, n_recurrent = 0;
        for (uint32_t i = 0; i < p->n_states; i++) {
            const rf_plan_state *st = &p->states[i];
            n_recurrent += st->width != 0;
            state += (st->width * 4ull + 255) / 256 * 256;
            if (!st->width) kv += 2 * ((st->n_kv_heads * 64ull * (st->head_dim + st->head_dim_v) + 255) / 256 * 256);
        }
        CHECK(n_recurrent && kv, "%s: %u states", models[k], p->n_states);
        const rf_session_desc desc = {.n_ctx = 64, .n_snapshots = 3}, more = {.n_ctx = 64, .n_snapshots = 13};
        CHECK(rf_model_forecast(r.m, &desc, &one, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_forecast(r.m, &more, &two, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(two.kv_bytes - one.kv_bytes <= 10 * state && two.kv_bytes - one.kv_bytes >= 10 * (state - 256 * n_recurrent),
              "%llu for ten states", (unsigned long long)(two.kv_bytes - one.kv_bytes));
        CHECK(one.kv_bytes <= 6 * state + kv && one.kv_bytes >= 6 * (state - 256 * n_recurrent), "%llu in all",
              (unsigned long long)one.kv_bytes);
        rf_session *s = NULL;
        CHECK(rf_session_open(r.m, &(rf_session_desc){.n_snapshots = 1025}, &s, &r.err) == RF_ERR_ARGUMENT, "too many");
        rig_close(&r);
    }
}

/* ---- the ops on the CPU, against float64 (on GPUs: test_hip.cpp) ---- */

enum { ROWS = 7, SLOTS = 4, WIDE = 1100, N_STATE = 256 * 256 };

/* A plan of one op on the device: x to buffers 0, 1, 2; y from buffer 3; and weights. */
typedef struct one_op {
    rf_op op;
    rf_plan_state state;
    rf_plan_weight weights[3];
    const void *values[3];
    uint32_t widths[4], n_weights, n_ctx;
    float x[3][ROWS * WIDE], y[ROWS * WIDE], slots[SLOTS * N_STATE];
} one_op;

static rf_result run_one(one_op *o, const rf_step_row *rows, rf_error *err) {
    rf_dev *dev;
    rf_device *d = NULL;
    rf_queue *q = NULL;
    rf_table *table = NULL;
    rf_prepared *prepared = NULL;
    rf_mem scratch, state, w[3], repack[3] = {{0}};
    rf_ticket t;
    uint64_t at[4], state_at = 0;
    uint32_t segment[2], n_segments, n_ctx = o->n_ctx ? o->n_ctx : 8, cells = rf_state_cells_of(&o->state, n_ctx);
    const rf_plan_buffer buffers[4] = {{"a", 0, o->widths[0]}, {"b", 0, o->widths[1]}, {"c", 0, o->widths[2]}, {"y", 0, o->widths[3]}};
    const rf_plan plan = {.ops = &o->op, .n_ops = 1, .buffers = buffers, .n_buffers = 4, .states = &o->state, .n_states = 1,
                          .weights = o->weights, .n_weights = o->n_weights, .n_slots = o->n_weights, .n_layers = 1, .n_vocab = 1};
    const rf_step step = {.rows = rows, .n_rows = ROWS};
    for (uint32_t i = 0; i < o->n_weights; i++) o->weights[i].slot = i;
    for (int i = 0; i < 4; i++) at[i] = (uint64_t)i * ROWS * WIDE * 4 / 256 * 256 + 256 * (uint64_t)i;
    rf_result r = rf_device_open(device_name, &(rf_device_desc){.n_threads = 2}, &d, err);
    if (r != RF_OK) return r;
    const rf_device_api *api = rf_device_get_api(d, &dev);
    rf_plan_bind bind = {.plan = &plan, .buffer_offset = at, .state_offset = &state_at, .state_cells = &cells, .n_ctx = n_ctx, .cache_type = RF_CACHE_F32, .n_seq = 2,
                         .n_batch = ROWS, .n_logits = 1, .n_slots = SLOTS};
    r = api->queue_create(dev, &q, err);
    if (r == RF_OK) r = api->table_create(dev, &plan, &table, err);
    if (r == RF_OK) r = api->mem_create(dev, 5 * ROWS * WIDE * 4 + 2048, &scratch, err);
    if (r == RF_OK) r = api->mem_create(dev, sizeof o->slots, &state, err);
    bind.table = table, bind.scratch = scratch, bind.state = state;
    for (uint32_t i = 0; r == RF_OK && i < o->n_weights; i++) {
        const rf_weight_layout layout = api->weight_layout(dev, &plan, &o->weights[i]);
        rf_weight_part part = {.slot = i, .n_rows = o->weights[i].n_rows, .src = o->values[i], .mem = &w[i],
                               .scratch = layout.scratch_bytes ? &repack[i] : NULL};
        r = api->mem_create(dev, layout.size_bytes, &w[i], err);
        if (r == RF_OK && layout.scratch_bytes) r = api->mem_create(dev, layout.scratch_bytes, &repack[i], err);
        if (r == RF_OK) r = api->weight_write(table, q, &part, &t, err);
    }
    if (r == RF_OK) r = api->plan_prepare(dev, &bind, segment, &n_segments, &prepared, err);
    for (int i = 0; r == RF_OK && i < 4; i++)
        if (o->widths[i]) r = api->mem_write(q, &scratch, at[i], i < 3 ? o->x[i] : o->y, ROWS * o->widths[i] * 4ull, &t, err);
    if (r == RF_OK) r = api->mem_write(q, &state, 0, o->slots, sizeof o->slots, &t, err);
    if (r == RF_OK) r = api->plan_run(prepared, q, 0, n_segments, &step, &t, err);
    if (r == RF_OK) r = api->mem_read(q, &scratch, at[3], o->y, ROWS * o->widths[3] * 4ull, &t, err);
    if (r == RF_OK) r = api->mem_read(q, &state, 0, o->slots, sizeof o->slots, &t, err);
    if (r == RF_OK) r = api->ticket_wait(&t, 60000, err);
    api->queue_release(q); /* waits for its work, which uses the rest */
    if (prepared) api->plan_release(prepared);
    for (uint32_t i = 0; i < o->n_weights; i++) api->weight_clear(table, i), api->mem_release(dev, &w[i]);
    for (uint32_t i = 0; i < 3; i++)
        if (repack[i].base) api->mem_release(dev, &repack[i]);
    api->mem_release(dev, &scratch), api->mem_release(dev, &state);
    api->table_release(table);
    rf_device_close(d, NULL);
    return r;
}

/* Two sequences in turn: one from its start, one from slot 1; a state is left in the middle, and two at the ends. */
static const rf_step_row turns[ROWS] = {{0, 1, 3, -1, 1, 0}, {0, 0, 0, -1, 0, 0}, {0, 0, 1, -1, 0, 2}, {0, 1, 4, -1, 0, 0},
                                        {0, 0, 2, -1, 0, 0}, {0, 1, 5, -1, 0, 3}, {0, 0, 3, -1, 0, 4}};

static void fill(float *x, size_t n, uint64_t seed) {
    mg_rng r = {seed};
    for (size_t i = 0; i < n; i++) x[i] = (float)mg_below(&r, 2001) / 1000 - 1;
}

static void agree(const float *found, const double *want, size_t n, const char *what) {
    double off = 0, most = 0;
    for (size_t i = 0; i < n; i++) off = rft_worst(off, fabs((double)found[i] - want[i])), most = fmax(most, fabs(want[i]));
    CHECK(off <= 2e-6 * most && most > 0, "%s: off by %g of %g", what, off, most);
}

static void test_conv_op(void) {
    static one_op o;
    static double past[2][16][WIDE], want[ROWS * WIDE], left[SLOTS][15 * WIDE];
    static float w[WIDE * 8], bias[WIDE];
    fill(bias, WIDE, 9);
    for (uint32_t taps = 2; taps <= 8; taps += 2)
        for (int silu = 0; silu < 2; silu++) {
            rf_error err = {0};
            const uint32_t n = taps == 8 ? 61 : 321, biased = taps / 2 % 2, apart = taps == 8 ? 2 : taps == 4 && silu ? 5 : 1,
                           reach = (taps - 1) * apart, mean = taps == 4 && !silu;
            memset(&o, 0, sizeof o), memset(past, 0, sizeof past), memset(left, 0, sizeof left);
            o.op = (rf_op){.kind = RF_OP_CONV, .in = 0, .in2 = RF_NONE, .in3 = RF_NONE, .out = 3, .weight = 0,
                           .bias = biased ? 1 : RF_NONE, .factor = RF_NONE,
                           .conv = {.n = n, .n_taps = taps, .activation = silu ? RF_ACT_SILU : RF_ACT_NONE, .dilation = apart > 1 ? apart : 0}};
            if (mean) o.op.weight = RF_NONE;
            o.state.width = reach * n;
            o.weights[0] = (rf_plan_weight){.name = "w", .type = RF_TYPE_F32, .n_in = taps, .n_rows = n, .size_bytes = 4ull * taps * n};
            o.weights[1] = (rf_plan_weight){.name = "b", .type = RF_TYPE_F32, .n_in = n, .n_rows = 1, .size_bytes = 4ull * n};
            o.values[0] = w, o.values[1] = bias, o.n_weights = 1 + biased, o.widths[0] = n, o.widths[1] = o.widths[2] = 1, o.widths[3] = n;
            fill(w, taps * n, taps), fill(o.x[0], ROWS * n, 77), fill(o.slots, SLOTS * N_STATE, 5);
            for (uint32_t j = 0; j < reach; j++)
                for (uint32_t c = 0; c < n; c++) past[1][j][c] = o.slots[j * n + c];
            for (uint32_t r = 0; r < ROWS; r++)
                for (uint32_t c = 0; c < n; c++) {
                    double (*x)[WIDE] = past[turns[r].seq], sum = 0;
                    x[reach][c] = o.x[0][r * n + c];
                    for (uint32_t j = 0; j < taps; j++) sum += x[j * apart][c] * (mean ? 0.25 : w[c * taps + j]);
                    if (biased) sum += bias[c];
                    for (uint32_t j = 0; j < reach; j++) x[j][c] = x[j + 1][c];
                    want[r * n + c] = silu ? sum / (1 + exp(-sum)) : sum;
                    for (uint32_t j = 0; turns[r].to && j < reach; j++) left[turns[r].to - 1][j * n + c] = x[j][c];
                }
            CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
            agree(o.y, want, ROWS * n, "conv");
            for (uint32_t i = 1; i < SLOTS; i++) agree(o.slots + i * o.state.width, left[i], o.state.width, "state of conv");
        }
}

typedef struct delta_shape { uint32_t dk, dv, heads, keys; int cyclic; } delta_shape;

static void make_delta(one_op *o, const delta_shape *c) {
    memset(o, 0, sizeof *o);
    o->op = (rf_op){.kind = RF_OP_DELTA, .flags = c->cyclic ? RF_OP_CYCLIC : 0, .in = 0, .in2 = 1, .in3 = 2, .out = 3,
                    .weight = 0, .bias = 1, .factor = RF_NONE,
                    .delta = {.n_heads = c->heads, .n_k_heads = c->keys, .head_dim = c->dk, .head_dim_v = c->dv,
                              .scale = 0.4f, .eps = 0.03f, .n_decays = 1}};
    o->state.width = c->heads * c->dk * c->dv;
    for (int i = 0; i < 2; i++)
        o->weights[i] = (rf_plan_weight){.name = "v", .type = RF_TYPE_F32, .n_in = c->heads, .n_rows = 1, .size_bytes = 4 * c->heads};
    o->n_weights = 2;
    o->widths[0] = 2 * c->keys * c->dk + c->heads * c->dv, o->widths[1] = o->widths[2] = c->heads, o->widths[3] = c->heads * c->dv;
}

/* One row of a head: S, and out[dv]. */
static void delta_row(const one_op *o, uint32_t r, uint32_t h, double decay_by, double bias, double *S, double *out) {
    const rf_delta_params *p = &o->op.delta;
    const uint32_t dk = p->head_dim, dv = p->head_dim_v, keys = p->n_k_heads, heads = p->n_heads;
    const float *row = o->x[0] + r * o->widths[0],
                *q = row + (o->op.flags & RF_OP_CYCLIC ? h % keys : h / (heads / keys)) * dk, *k = q + keys * dk,
                *v = row + 2 * keys * dk + h * dv;
    const double decay = exp(log1p(exp((double)o->x[2][r * heads + h] + bias)) * decay_by),
                 beta = 1 / (1 + exp(-(double)o->x[1][r * heads + h]));
    double kk = p->eps, qq = p->eps;
    for (uint32_t i = 0; i < dk; i++) kk += (double)k[i] * k[i], qq += (double)q[i] * q[i];
    for (uint32_t j = 0; j < dv; j++) {
        double d = v[j];
        out[j] = 0;
        for (uint32_t i = 0; i < dk; i++) S[i * dv + j] *= decay, d -= S[i * dv + j] * k[i] / sqrt(kk);
        for (uint32_t i = 0; i < dk; i++) {
            S[i * dv + j] += k[i] / sqrt(kk) * beta * d;
            out[j] += S[i * dv + j] * q[i] / sqrt(qq) * p->scale;
        }
    }
}

static void test_delta_op(void) {
    /* the sizes of models, the largest, and odd ones */
    static const delta_shape shapes[] = {{40, 24, 6, 3, 0}, {40, 24, 6, 3, 1}, {128, 128, 2, 1, 0}, {256, 256, 1, 1, 1}, {200, 72, 3, 1, 1}};
    static one_op o;
    static double s[2][N_STATE], want[ROWS * WIDE], left[SLOTS][N_STATE];
    for (size_t n = 0; n < RFT_COUNT(shapes); n++) {
        const delta_shape c = shapes[n];
        const uint32_t size = c.dk * c.dv;
        rf_error err = {0};
        float a[8], b[8];
        make_delta(&o, &c), memset(s, 0, sizeof s);
        o.values[0] = a, o.values[1] = b;
        fill(a, c.heads, 1), fill(b, c.heads, 2), fill(o.x[0], ROWS * o.widths[0], 3);
        fill(o.x[1], ROWS * c.heads, 4), fill(o.x[2], ROWS * c.heads, 5), fill(o.slots, SLOTS * N_STATE, 6);
        for (uint32_t h = 0; h < c.heads; h++) a[h] = -0.2f - fabsf(a[h]);
        for (uint32_t i = 0; i < o.state.width; i++) s[1][i] = o.slots[i];
        for (uint32_t r = 0; r < ROWS; r++)
            for (uint32_t h = 0; h < c.heads; h++) {
                double *S = s[turns[r].seq] + h * size;
                delta_row(&o, r, h, a[h], b[h], S, want + (r * c.heads + h) * c.dv);
                if (turns[r].to) memcpy(left[turns[r].to - 1] + h * size, S, size * sizeof *S);
            }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * c.heads * c.dv, "delta");
        for (uint32_t i = 1; i < SLOTS; i++) agree(o.slots + i * o.state.width, left[i], o.state.width, "state of delta");
    }
}

typedef struct scan_shape { uint32_t heads, groups, dim, n, decays; } scan_shape;

/* One row of a head: S [n][dim], and out[dim]. */
static void scan_row(const one_op *o, uint32_t r, uint32_t h, const float *a, const float *bias, double *S, double *out) {
    const rf_scan_params *p = &o->op.scan;
    const uint32_t n = p->n_state, dim = p->head_dim, group = h / (p->n_heads / p->n_groups);
    const float *row = o->x[0] + r * o->widths[0], *x = row + h * dim, *write = row + p->n_heads * dim + group * n,
                *read = write + p->n_groups * n;
    const double dt = log1p(exp((double)o->x[1][r * p->n_heads + h] + bias[h]));
    for (uint32_t j = 0; j < dim; j++) {
        out[j] = (double)bias[p->n_heads + h] * x[j]; /* the skip's weights lie behind */
        for (uint32_t i = 0; i < n; i++) {
            double *s = S + i * dim + j;
            *s = *s * exp(dt * a[h * p->n_decays + (p->n_decays > 1 ? i : 0)]) + dt * write[i] * x[j];
            out[j] += *s * read[i];
        }
    }
}

static void test_scan_op(void) {
    /* Mamba-2's and Mamba's sizes, the largest, and odd ones */
    static const scan_shape shapes[] = {{6, 3, 24, 40, 1}, {2, 1, 64, 128, 1}, {131, 1, 1, 16, 16}, {1, 1, 80, 256, 1}, {5, 5, 7, 3, 3}};
    static one_op o;
    static double s[2][N_STATE], want[ROWS * WIDE], left[SLOTS][N_STATE];
    for (size_t k = 0; k < RFT_COUNT(shapes); k++) {
        const scan_shape c = shapes[k];
        const uint32_t size = c.n * c.dim;
        static float a[WIDE * 16], bias[2 * WIDE];
        rf_error err = {0};
        memset(&o, 0, sizeof o), memset(s, 0, sizeof s);
        o.op = (rf_op){.kind = RF_OP_SCAN, .in = 0, .in2 = 1, .in3 = RF_NONE, .out = 3, .weight = 0, .bias = 1, .factor = 2,
                       .scan = {c.heads, c.groups, c.dim, c.n, c.decays, 0}};
        o.state.width = c.heads * size;
        for (uint32_t i = 0; i < 3; i++) {
            const uint32_t n = c.heads * (i ? 1 : c.decays);
            o.weights[i] = (rf_plan_weight){.name = "v", .type = RF_TYPE_F32, .n_in = n, .n_rows = 1, .size_bytes = 4 * n};
        }
        o.values[0] = a, o.values[1] = bias, o.values[2] = bias + c.heads, o.n_weights = 3;
        o.widths[0] = c.heads * c.dim + 2 * c.groups * c.n, o.widths[1] = c.heads, o.widths[2] = 1, o.widths[3] = c.heads * c.dim;
        REQUIRE(o.widths[0] <= WIDE && o.state.width <= N_STATE, "case %zu is too large", k);
        fill(a, c.heads * c.decays, 1), fill(bias, 2 * c.heads, 2), fill(o.x[0], ROWS * o.widths[0], 3);
        fill(o.x[1], ROWS * c.heads, 4), fill(o.slots, SLOTS * N_STATE, 6);
        for (uint32_t i = 0; i < c.heads * c.decays; i++) a[i] = -0.2f - fabsf(a[i]);
        for (uint32_t i = 0; i < o.state.width; i++) s[1][i] = o.slots[i];
        for (uint32_t r = 0; r < ROWS; r++)
            for (uint32_t h = 0; h < c.heads; h++) {
                double *S = s[turns[r].seq] + h * size;
                scan_row(&o, r, h, a, bias, S, want + (r * c.heads + h) * c.dim);
                if (turns[r].to) memcpy(left[turns[r].to - 1] + h * size, S, size * sizeof *S);
            }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * c.heads * c.dim, "scan");
        for (uint32_t i = 1; i < SLOTS; i++) agree(o.slots + i * o.state.width, left[i], o.state.width, "state of scan");
    }
}

static void test_compress_op(void) {
    enum { N = 300, UNIT = 4 };
    static one_op o;
    static double s[2][9 * N], want[ROWS * N], left[SLOTS][9 * N], w[UNIT * 2 * N];
    static float places[UNIT * 2 * N];
    for (uint32_t k = 0; k < 4; k++) { /* positions 3 to 5 of one sequence, 0 to 3 of the other */
        const uint32_t overlap = k % 2, unit = k < 2 ? UNIT : 3, n = k < 2 ? N : 7, n_in = n << overlap, width = overlap ? 9 * n : 3 * n;
        rf_error err = {0};
        memset(&o, 0, sizeof o), memset(s, 0, sizeof s);
        o.op = (rf_op){.kind = RF_OP_COMPRESS, .in = 0, .in2 = 1, .in3 = RF_NONE, .out = 3, .weight = 0, .bias = RF_NONE,
                       .factor = RF_NONE, .compress = {n, unit, overlap}};
        o.weights[0] = (rf_plan_weight){.name = "w", .type = RF_TYPE_F32, .n_in = n_in, .n_rows = unit, .size_bytes = 4ull * n_in * unit};
        o.values[0] = places, o.n_weights = 1, o.state.width = width;
        o.widths[0] = o.widths[1] = n_in, o.widths[2] = 1, o.widths[3] = n;
        fill(places, unit * n_in, 1), fill(o.x[0], ROWS * n_in, 2), fill(o.x[1], ROWS * n_in, 3), fill(o.slots, SLOTS * N_STATE, 4);
        for (uint32_t i = 0; i < unit * n_in; i++) w[i] = (double)places[i];
        for (uint32_t i = 0; i < ROWS * n_in; i++) o.x[1][i] *= 8;
        for (uint32_t i = 0; i < width; i++) s[1][i] = (double)o.slots[i]; /* of half of them the sum is below 0: nothing */
        for (uint32_t r = 0; r < ROWS; r++) {
            double *S = s[turns[r].seq];
            ref_compress_row(S, n, unit, (int)overlap, (uint32_t)turns[r].pos, o.x[0] + r * n_in, o.x[1] + r * n_in, w, want + r * n);
            if (turns[r].to) memcpy(left[turns[r].to - 1], S, width * sizeof *S);
        }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * n, "compress");
        for (uint32_t i = 1; i < SLOTS; i++) agree(o.slots + i * width, left[i], width, "state of compress");
    }
}

/* The score of a block of an indexer: -1e9 if it has none, 1e9 if it is listed in any case. */
static double index_score(const one_op *o, const rf_step_row *row, uint32_t list, uint32_t b, const float *x, const float *w) {
    const rf_index_params *p = &o->op.index;
    const uint32_t last = (o->op.flags & RF_OP_LAST) != 0, end = (uint32_t)row->pos + 1, own = (end - 1) / p->list_unit;
    double best = -1e9;
    if (b > own || (last && (b + 1) * p->list_unit > end)) return best;
    if (b + p->n_local > own) return 1e9;
    const uint32_t n_cells = last ? (o->n_ctx + p->list_unit - 1) / p->list_unit : o->n_ctx;
    for (uint32_t at = last ? b : b * p->list_unit; last ? at == b : at < end && at < (b + 1) * p->list_unit; at++) {
        const float *k = o->slots + ((size_t)row->seq * n_cells + at) * p->head_dim;
        double sum = 0;
        for (uint32_t h = p->n_lists > 1 ? list : 0; h < (p->n_lists > 1 ? list + 1 : p->n_heads); h++) {
            double dot = 0;
            for (uint32_t i = 0; i < p->head_dim; i++) dot += (double)x[h * p->head_dim + i] * k[i];
            sum += p->n_lists > 1 ? dot : (w ? w[h] : 1) * fmax(dot, 0);
        }
        best = fmax(best, sum);
    }
    return best;
}

/* Small integers: floats add them exactly, and many scores are equal. */
static void test_index_op(void) {
    enum { N = 700 };
    static const struct { uint32_t heads, dim, lists, listed, unit, local, last, weights; } cases[] = {
        {3, 12, 1, 9, 1, 0, 0, 1}, {17, 64, 1, 300, 1, 3, 0, 1}, {2, 33, 2, 5, 4, 1, 0, 0}, {4, 40, 4, 3, 128, 2, 0, 0}, {5, 16, 1, 9, 4, 0, 1, 0},
        {1, 7, 1, 1, 3, 0, 1, 1}};
    static const rf_step_row rows[ROWS] = {{0, 1, 3, -1, 0, 0}, {0, 0, 0, -1, 0, 0}, {0, 1, 299, -1, 0, 0}, {0, 0, 257, -1, 0, 0},
                                           {0, 0, 698, -1, 0, 0}, {0, 1, 699, -1, 0, 0}, {0, 0, 511, -1, 0, 0}};
    static one_op o;
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        const rf_index_params p = {cases[i].heads, cases[i].dim, cases[i].lists, cases[i].listed, cases[i].unit, cases[i].local};
        const uint32_t last = cases[i].last;
        rf_error err = {0};
        mg_rng r = {i};
        memset(&o, 0, sizeof o);
        o.op = (rf_op){.kind = RF_OP_INDEX, .flags = last ? RF_OP_LAST : 0, .in = 0, .in2 = cases[i].weights ? 1 : RF_NONE, .in3 = RF_NONE,
                       .out = 3, .weight = RF_NONE, .bias = RF_NONE, .factor = RF_NONE, .index = p};
        o.state = (rf_plan_state){.n_kv_heads = 1, .head_dim = p.head_dim, .unit = last ? p.list_unit : 0}, o.n_ctx = N;
        o.widths[0] = p.n_heads * p.head_dim, o.widths[1] = p.n_heads, o.widths[2] = 1, o.widths[3] = p.n_lists * p.n_listed;
        for (uint32_t k = 0; k < ROWS * o.widths[0]; k++) o.x[0][k] = (float)mg_below(&r, 5) - 2;
        for (uint32_t k = 0; k < ROWS * o.widths[1]; k++) o.x[1][k] = (float)mg_below(&r, 7) - 2;
        for (uint32_t k = 0; k < 2 * N * p.head_dim; k++) o.slots[k] = (float)mg_below(&r, 3) - 1;
        CHECK(run_one(&o, rows, &err) == RF_OK, "%s", err.text);
        for (uint32_t t = 0; t < ROWS; t++)
            for (uint32_t l = 0; l < p.n_lists; l++) {
                const uint32_t end = (uint32_t)rows[t].pos + 1, n_blocks = last ? end / p.list_unit : (end - 1) / p.list_unit + 1;
                static double score[N];
                static int32_t want[N], found[N];
                uint32_t n = 0, n_best = p.n_listed - last < n_blocks ? p.n_listed - last : n_blocks;
                for (uint32_t b = 0; b < n_blocks; b++)
                    score[b] = index_score(&o, &rows[t], l, b, o.x[0] + t * o.widths[0], cases[i].weights ? o.x[1] + t * o.widths[1] : NULL);
                for (uint32_t b = 0; b < n_blocks; b++) { /* fewer than n_best are before it */
                    uint32_t before = 0;
                    for (uint32_t c = 0; c < n_blocks; c++) before += score[c] > score[b] || (score[c] == score[b] && c < b);
                    if (before < n_best) want[n++] = (int32_t)b;
                }
                if (last && end % p.list_unit) want[n++] = (int32_t)n_blocks;
                while (n < p.n_listed) want[n++] = -1;
                memcpy(found, o.y + t * o.widths[3] + l * p.n_listed, n * sizeof *found);
                CHECK(!memcmp(found, want, n * sizeof *want), "case %zu row %u list %u", i, t, l);
            }
    }
}

static void test_blend_op(void) {
    enum { N = 53, BANKED = 6 };
    static one_op o;
    static double want[ROWS * N];
    float w[N];
    rf_error err = {0};
    memset(&o, 0, sizeof o);
    o.op = (rf_op){.kind = RF_OP_BLEND, .in = 0, .in2 = 1, .in3 = RF_NONE, .out = 3, .state = RF_NONE, .weight = 0, .bias = RF_NONE,
                   .factor = RF_NONE, .blend = {N, BANKED, 0.02f}};
    o.weights[0] = (rf_plan_weight){.name = "w", .type = RF_TYPE_F32, .n_in = N, .n_rows = 1, .size_bytes = 4 * N};
    o.values[0] = w, o.n_weights = 1, o.state.width = 1;
    o.widths[0] = N * BANKED, o.widths[1] = o.widths[3] = N, o.widths[2] = 1;
    fill(w, N, 1), fill(o.x[0], ROWS * o.widths[0], 2), fill(o.x[1], ROWS * N, 3);
    for (uint32_t r = 0; r < ROWS; r++) {
        double p[BANKED + 1], total = 0;
        for (uint32_t k = 0; k <= BANKED; k++) {
            const float *x = k < BANKED ? o.x[0] + (r * BANKED + k) * N : o.x[1] + r * N;
            double squares = 0, dot = 0;
            for (uint32_t i = 0; i < N; i++) squares += (double)x[i] * x[i], dot += (double)x[i] * w[i];
            total += p[k] = exp(dot / sqrt(squares / N + 0.02));
        }
        for (uint32_t i = 0; i < N; i++) {
            want[r * N + i] = p[BANKED] / total * o.x[1][r * N + i];
            for (uint32_t k = 0; k < BANKED; k++) want[r * N + i] += p[k] / total * o.x[0][(r * BANKED + k) * N + i];
        }
    }
    CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
    agree(o.y, want, ROWS * N, "blend");
}

static void test_hyper_op(void) {
    enum { S = 5, ALL = 2 * S + S * S };
    static one_op o;
    static double want[ROWS * ALL];
    float scale[3] = {0.7f, -1.3f, 1.9f}, base[ALL];
    double base_of_matrix[S * S];
    fill(base, ALL, 7);
    for (uint32_t i = 0; i < S * S; i++) base_of_matrix[i] = (double)base[2 * S + i];
    for (uint32_t parts = 1; parts <= 3; parts++) {
        const uint32_t n_in = parts < 3 ? parts * S : ALL, n_out = parts < 3 ? 2 * S : ALL;
        rf_error err = {0};
        memset(&o, 0, sizeof o);
        o.op = (rf_op){.kind = RF_OP_HYPER, .in = 0, .in2 = RF_NONE, .in3 = RF_NONE, .out = 3, .state = RF_NONE, .weight = 0,
                       .bias = 1, .factor = RF_NONE, .hyper = {S, parts, 2.5f, 0.125f, 3}};
        o.weights[0] = (rf_plan_weight){.name = "s", .type = RF_TYPE_F32, .n_in = parts, .n_rows = 1, .size_bytes = 4 * parts};
        o.weights[1] = (rf_plan_weight){.name = "b", .type = RF_TYPE_F32, .n_in = n_in, .n_rows = 1, .size_bytes = 4ull * n_in};
        o.values[0] = scale, o.values[1] = base, o.n_weights = 2, o.state.width = 1;
        o.widths[0] = n_in, o.widths[1] = o.widths[2] = 1, o.widths[3] = n_out;
        fill(o.x[0], ROWS * n_in, 3);
        for (uint32_t r = 0; r < ROWS; r++) {
            for (uint32_t i = 0; i < 2 * S; i++) {
                const uint32_t part = i < S, at = part * S + i % S;
                const double x = part < parts ? (double)o.x[0][r * n_in + at] * scale[part] + base[at] : 0;
                want[r * n_out + i] = part < parts ? (part ? 2.5 : 1) / (1 + exp(-x)) + (part && parts == 3 ? 0 : 0.125) : 0;
            }
            if (parts == 3) ref_hyper_matrix(want + r * n_out + 2 * S, S, o.x[0] + r * n_in + 2 * S, scale[2], base_of_matrix, 0.125, 3);
        }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * n_out, "hyper");
    }
}

/* What goes to each stream: all, by a weight or its sigmoid, and by a product of vectors, which is 0 or next to it in some. */
static void test_spread_op(void) {
    enum { N = 37, S = 5 };
    static one_op o;
    static double want[ROWS * N * (S + 2)];
    for (uint32_t kind = 0; kind < 8; kind++) {
        const int by = kind % 4, add = kind > 3;
        const uint32_t first = kind % 3, all = S + first;
        rf_error err = {0};
        memset(&o, 0, sizeof o);
        o.op = (rf_op){.kind = RF_OP_SPREAD, .flags = (add ? RF_OP_ACCUMULATE : 0) | (by == 1 ? RF_OP_SIGMOID : 0), .in = 0,
                       .in2 = by ? 1 : RF_NONE, .in3 = by == 2 ? 2 : RF_NONE, .out = 3, .state = RF_NONE, .weight = RF_NONE, .bias = RF_NONE,
                       .factor = RF_NONE, .spread = {N, S, add ? 2.0f : 0, first}};
        o.state.width = 1, o.widths[0] = N, o.widths[1] = o.widths[2] = N * S, o.widths[3] = N * all;
        fill(o.x[0], ROWS * N, 1), fill(o.x[1], ROWS * N * S, 2), fill(o.x[2], ROWS * N * S, 3), fill(o.y, ROWS * N * all, 4);
        for (uint32_t i = 0; i < ROWS * N * all; i++) want[i] = o.y[i];
        memset(o.x[1], 0, N * sizeof(float));
        for (uint32_t i = 0; i < N; i++) o.x[1][N + i] = i ? 0 : 1e-5f;
        for (uint32_t r = 0; r < ROWS; r++)
            for (uint32_t s = 0; s < S; s++) {
                const uint32_t at = (r * S + s) * N;
                double x = o.x[1][r * N * S + s], dot = 0;
                for (uint32_t i = 0; i < N; i++) dot += (double)o.x[1][at + i] * o.x[2][at + i] / sqrt(N);
                if (by == 2) x = (dot > 0) - (dot < 0), x *= sqrt(fmax(fabs(dot), 1e-6));
                x = by == 3 ? x : by ? 1 / (1 + exp(-x)) : 1;
                for (uint32_t i = 0; i < N; i++) {
                    double *w = &want[(r * all + first + s) * N + i];
                    *w = (add ? *w : 0) + x * (add ? 2 : 1) * o.x[0][r * N + i];
                }
            }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * N * all, "spread");
    }
}

/* Several sums of the same vectors, in the place of what is there or added to it. */
static void test_mix_op(void) {
    enum { N = 257, USED = 3, OUT = 4 };
    static one_op o;
    static double want[ROWS * OUT * N];
    for (uint32_t kind = 0; kind < 4; kind++) {
        const int add = kind & 1, sigmoid = kind / 2;
        rf_error err = {0};
        memset(&o, 0, sizeof o);
        o.op = (rf_op){.kind = RF_OP_MIX, .flags = (add ? RF_OP_ACCUMULATE : 0) | (sigmoid ? RF_OP_SIGMOID : 0), .in = 0, .in2 = 1,
                       .in3 = RF_NONE, .out = 3, .state = RF_NONE, .weight = RF_NONE, .bias = RF_NONE, .factor = RF_NONE,
                       .mix = {N, USED, add ? 0.5f : 0, OUT}};
        o.state.width = 1, o.widths[0] = USED * N, o.widths[1] = USED * OUT, o.widths[2] = 1, o.widths[3] = OUT * N;
        fill(o.x[0], ROWS * USED * N, 1), fill(o.x[1], ROWS * USED * OUT, 2), fill(o.y, ROWS * OUT * N, 4);
        for (uint32_t i = 0; i < ROWS * OUT * N; i++) {
            const uint32_t r = i / (OUT * N), to = i / N % OUT;
            want[i] = add ? o.y[i] : 0;
            for (uint32_t k = 0; k < USED; k++) {
                const double w = o.x[1][(r * OUT + to) * USED + k];
                want[i] += (add ? 0.5 : 1) * (sigmoid ? 1 / (1 + exp(-w)) : w) * o.x[0][(r * USED + k) * N + i % N];
            }
        }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * OUT * N, "mix");
    }
}

/* Vectors as long as another, one of them 0; and what stands out of a row. */
static void test_match_and_trim_ops(void) {
    enum { N = 43, S = 3 };
    static one_op o;
    static double want[ROWS * N * S];
    rf_error err = {0};
    memset(&o, 0, sizeof o);
    o.op = (rf_op){.kind = RF_OP_MATCH, .in = 0, .in2 = 1, .in3 = RF_NONE, .out = 3, .state = RF_NONE, .weight = RF_NONE, .bias = RF_NONE,
                   .factor = RF_NONE, .match = {S, N}};
    o.state.width = 1, o.widths[0] = o.widths[3] = N * S, o.widths[1] = N, o.widths[2] = 1;
    fill(o.x[0], ROWS * N * S, 1), fill(o.x[1], ROWS * N, 2);
    memset(o.x[0] + N, 0, N * sizeof(float));
    for (uint32_t i = 0; i < ROWS * N * S; i++) {
        double found = 0, as = 0;
        for (uint32_t j = 0; j < N; j++) {
            found += pow(o.x[0][i / N * N + j], 2);
            as += pow(o.x[1][i / (N * S) * N + j], 2);
        }
        want[i] = found > 0 ? o.x[0][i] * sqrt(as / found) : 0;
    }
    CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
    agree(o.y, want, ROWS * N * S, "match");
    for (int k = -1; k < 2; k++) {
        o.op = (rf_op){.kind = RF_OP_TRIM, .in = 0, .in2 = RF_NONE, .in3 = RF_NONE, .out = 3, .state = RF_NONE, .weight = RF_NONE,
                       .bias = RF_NONE, .factor = RF_NONE, .trim = {N * S, 0.75f * (float)k}};
        for (uint32_t r = 0; r < ROWS; r++) {
            const float *x = o.x[0] + r * N * S;
            double mean = 0, squares = 0;
            for (uint32_t i = 0; i < N * S; i++) mean += x[i] / (double)(N * S);
            for (uint32_t i = 0; i < N * S; i++) squares += (x[i] - mean) * (x[i] - mean) / (N * S - 1);
            for (uint32_t i = 0; i < N * S; i++) want[r * N * S + i] = fmax(x[i] - mean - 0.75 * k * sqrt(squares), 0);
        }
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * N * S, "trim");
    }
    for (uint32_t adds = 0; adds < 2; adds++) { /* a sum over members, of which there is one */
        enum { SUMMED = N * S / 4 * 4 };
        o.op = (rf_op){.kind = RF_OP_SUM, .flags = adds ? RF_OP_ACCUMULATE : 0, .in = 0, .in2 = RF_NONE, .in3 = RF_NONE, .out = 3,
                       .state = RF_NONE, .weight = RF_NONE, .bias = RF_NONE, .factor = RF_NONE, .sum = {SUMMED}};
        o.widths[0] = o.widths[3] = SUMMED;
        for (uint32_t i = 0; i < ROWS * SUMMED; i++) want[i] = (double)o.x[0][i] + (adds ? (double)o.y[i] : 0);
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        agree(o.y, want, ROWS * SUMMED, "sum");
    }
}

/* Matrices of heads that lie apart in one weight, and such whose rows go with the values: quantized ones as floats. */
static void test_heads_op(void) {
    enum { HEADS = 2, REST = 3, ROW0 = 1, MOST = ROW0 + HEADS * 40 };
    static const struct { uint32_t type, n_in, n_out, across; } cases[] = {
        {RF_TYPE_F32, 40, 33, 0}, {RF_TYPE_F32, 33, 40, 1}, {RF_TYPE_F16, 17, 300, 1}, {RF_TYPE_Q8_0, 17, 288, 1},
        {RF_TYPE_Q4_K, 17, 512, 1}, {RF_TYPE_Q6_K, 5, 512, 1}, {RF_TYPE_IQ4_XS, 5, 256, 1}};
    static one_op o;
    static uint8_t bytes[MOST * 512 * 4];
    static float w[MOST * 512];
    static double want[ROWS * WIDE];
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        rf_error err = {0};
        const uint32_t type = cases[i].type, across = cases[i].across, n_in = cases[i].n_in, n_out = cases[i].n_out, dim = n_in + REST,
                       width = across ? n_out : n_in, head_rows = (across ? n_in : n_out) + 2, n_rows = ROW0 + HEADS * head_rows;
        const rf_type_info info = rf_type_get(type);
        const uint64_t n = (uint64_t)n_rows * width, n_bytes = n / info.block_elements * info.block_bytes;
        mg_rng random = {i};
        memset(&o, 0, sizeof o);
        REQUIRE(n_rows <= MOST && HEADS * (n_out + REST) <= WIDE, "case %zu is too large", i);
        for (uint64_t k = 0; k < n_bytes; k++) bytes[k] = (uint8_t)mg_below(&random, 256);
        if (type == RF_TYPE_F32) fill((float *)(void *)bytes, n, i);
        for (uint64_t k = 0; type != RF_TYPE_F32 && k + 1 < n_bytes; k += 2) bytes[k + 1] &= 0xbf; /* scales: no infinity */
        CHECK(rf_dequantize(type, bytes, n, w, &err) == RF_OK, "%s", err.text);
        o.op = (rf_op){.kind = RF_OP_HEADS, .flags = across ? RF_OP_ACROSS : 0, .in = 0, .in2 = RF_NONE, .in3 = RF_NONE, .out = 3,
                       .state = RF_NONE, .weight = 0, .bias = RF_NONE, .factor = RF_NONE,
                       .heads = {.n_heads = HEADS, .head_dim = dim, .n_in = n_in, .n_out = n_out, .first_row = ROW0,
                                 .head_rows = head_rows}};
        o.weights[0] = (rf_plan_weight){.name = "w", .type = type, .n_in = width, .n_rows = n_rows, .size_bytes = n_bytes};
        o.values[0] = bytes, o.n_weights = 1, o.widths[0] = HEADS * dim, o.widths[1] = o.widths[2] = 1,
        o.widths[3] = HEADS * (n_out + REST), o.state.width = 1;
        fill(o.x[0], ROWS * HEADS * dim, 3);
        for (uint32_t r = 0, at = 0; r < ROWS; r++)
            for (uint32_t h = 0; h < HEADS; h++) {
                const float *x = o.x[0] + (r * HEADS + h) * dim, *m = w + (ROW0 + h * head_rows) * (uint64_t)width;
                for (uint32_t c = 0; c < n_out; c++, at++) {
                    want[at] = 0;
                    for (uint32_t k = 0; k < n_in; k++) want[at] += (double)x[k] * m[across ? k * width + c : c * width + k];
                }
                for (uint32_t k = n_in; k < dim; k++) want[at++] = x[k];
            }
        CHECK(run_one(&o, turns, &err) == RF_OK, "case %zu: %s", i, err.text);
        agree(o.y, want, ROWS * HEADS * (n_out + REST), info.name);
    }
}

/* Heads of any width: GPUs refuse wide ones (test_hip.cpp). */
static void test_wide_delta(void) {
    static one_op o;
    static const float a[1] = {-0.5f};
    rf_error err = {0};
    make_delta(&o, &(delta_shape){264, 8, 1, 1, 0});
    o.values[0] = o.values[1] = a;
    CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
}

/* A part of each head; what lies before and after it in out stays. */
static void test_slice_op(void) {
    enum { HEADS = 3, DIM = 40, OUT_AT = 5 };
    static const struct { uint32_t at, n; } parts[] = {{0, DIM}, {0, 7}, {33, 7}, {11, 1}};
    static one_op o;
    for (size_t i = 0; i < RFT_COUNT(parts); i++) {
        const uint32_t n = parts[i].n, width = OUT_AT + HEADS * n + 2;
        rf_error err = {0};
        memset(&o, 0, sizeof o);
        o.op = (rf_op){.kind = RF_OP_SLICE, .in = 0, .in2 = RF_NONE, .in3 = RF_NONE, .out = 3, .state = RF_NONE, .weight = RF_NONE,
                       .bias = RF_NONE, .factor = RF_NONE,
                       .slice = {.n_heads = HEADS, .head_dim = DIM, .at = parts[i].at, .n = n, .out_at = OUT_AT}};
        o.widths[0] = HEADS * DIM, o.widths[1] = o.widths[2] = 1, o.widths[3] = width, o.state.width = 1;
        fill(o.x[0], ROWS * HEADS * DIM, i), fill(o.y, ROWS * width, 9);
        static float want[ROWS * WIDE];
        memcpy(want, o.y, sizeof want);
        for (uint32_t r = 0; r < ROWS; r++)
            for (uint32_t k = 0; k < HEADS * n; k++)
                want[r * width + OUT_AT + k] = o.x[0][(r * HEADS + k / n) * DIM + parts[i].at + k % n];
        CHECK(run_one(&o, turns, &err) == RF_OK, "%s", err.text);
        CHECK(memcmp(o.y, want, ROWS * width * sizeof *want) == 0, "%u values at %u", n, parts[i].at);
    }
}

int main(int argc, char **argv) {
    rf_device_info devices[8];
    uint32_t n_devices = 0, n_gpus = 0;
    RFT_BEGIN(argc, argv);
    rf_device_list(devices, 8, &n_devices, NULL);
    for (uint32_t d = 0; d < n_devices && d < 8; d++) {
        if (!devices[d].usable || !devices[d].is_gpu) continue;
        n_gpus++;
        device_name = devices[d].name;
#ifdef RF_TEST_EMU
        hip_emu_trusted_graphs(n_gpus == 1); /* steps of several rows are replayed as well */
#endif
        rft_run("test_neighbours", test_neighbours, 1);
        rft_run("test_play", test_play, n_gpus > 1); /* slow: other waves than the first device's */
    }
    device_name = "cpu";
    if (n_gpus == 0) {
        RUN(test_conv_op);
        RUN(test_delta_op);
        RUN(test_scan_op);
        RUN(test_heads_op);
        RUN(test_compress_op);
        RUN(test_index_op);
        RUN(test_blend_op);
        RUN(test_spread_op);
        RUN(test_hyper_op);
        RUN(test_mix_op);
        RUN(test_match_and_trim_ops);
        RUN(test_wide_delta);
        RUN(test_slice_op);
        RUN(test_tokens_needed);
        RUN(test_batches);
        RUN(test_neighbours);
        RUN(test_cut);
        RUN(test_play);
        RUN(test_failing_reads);
        RUN(test_forecast);
    }
    RFT_END();
}
