/* Sessions of models whose layers have a state instead of keys and values: the same bits whatever the batches, the
 * neighbours and the way there; going back, copies, saved sequences, failures. The fresh evaluation of the same tokens,
 * one at a time, is the reference: that it is right is test_goldens.c's business. On the CPU; with the kernels linked, on
 * the GPU, where the bits depend on the number of rows of a step, and less of it, since it may be emulated. */
#define ROCMFORGE_IMPLEMENTATION
#include "../rocmforge.h"
#include "make_gguf.h"
#include "rf_test.h"
#include <fcntl.h>

enum { N_VOCAB = 64, MOST = 600 };

static const char *const models[] = {"tests/family/lfm2.gguf", "tests/family/qwen35.gguf"};
static const char *device_name;

typedef struct rig {
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
} rig;

static int open_rig(rig *r, const char *path, const rf_gguf_desc *gd, const rf_model_desc *md) {
    memset(r, 0, sizeof *r);
    rf_result res = rf_gguf_open(path, gd, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open(device_name, &(rf_device_desc){.n_threads = 1}, &r->d, &r->err);
    if (res == RF_OK) res = rf_model_open(r->g, r->d, md, &r->m, &r->err);
    CHECK(res == RF_OK, "%s: %s", path, r->err.text);
    return res == RF_OK;
}

static void close_rig(rig *r) {
    CHECK(rf_model_close(r->m, NULL) == RF_OK, "a session is open");
    rf_device_close(r->d, NULL);
    rf_gguf_close(r->g, NULL);
}

static rf_session *session(rig *r, const rf_session_desc *desc) {
    rf_session *s = NULL;
    CHECK(rf_session_open(r->m, desc, &s, &r->err) == RF_OK, "%s", r->err.text);
    return s;
}

static void random_tokens(int32_t *tokens, uint32_t n, uint64_t seed) {
    mg_rng r = {seed};
    for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)mg_below(&r, N_VOCAB);
}

/* tokens [from, to) of sequence seq in one call, the last one's logits to out (unless it is NULL) */
static int feed(rf_session *s, int32_t seq, const int32_t *tokens, uint32_t from, uint32_t to, float *out, rf_error *err) {
    static rf_row rows[MOST];
    for (uint32_t i = from; i < to; i++)
        rows[i - from] = (rf_row){.token = tokens[i], .seq = seq, .pos = (int32_t)i, .want_logits = i + 1 == to};
    if (rf_eval(s, rows, to - from, err) != RF_OK) return 0;
    if (out) memcpy(out, rf_session_logits(s, 0), N_VOCAB * sizeof *out);
    return 1;
}

/* Logits behind each token of a sequence that is alone, [n][N_VOCAB]. */
static void reference(rig *r, const int32_t *tokens, uint32_t n, float (*out)[N_VOCAB]) {
    rf_session *s = session(r, &(rf_session_desc){.n_ctx = MOST, .n_batch = 1, .cache_type = RF_CACHE_F32});
    for (uint32_t i = 0; i < n; i++) CHECK(feed(s, 0, tokens, i, i + 1, out[i], &r->err), "%s", r->err.text);
    rf_session_close(s);
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
    for (size_t k = 0; k < RFI_COUNT(models); k++) {
        const uint32_t n = MOST;
        rig r;
        float got[N_VOCAB];
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        random_tokens(tokens, n, k);
        reference(&r, tokens, n, want);
        CHECK(!SAME(want[n - 1], want[n - 2]), "%s: all logits are alike", models[k]);
        for (size_t i = 0; i < RFI_COUNT(sizes); i++) {
            rf_session *s = session(&r, &(rf_session_desc){.n_ctx = MOST, .n_batch = sizes[i], .cache_type = RF_CACHE_F32});
            CHECK(feed(s, 0, tokens, 0, n, got, &r.err), "%s", r.err.text);
            CHECK(close_to(got, want[n - 1]), "%s in batches of %u", models[k], sizes[i]);
            rf_session_close(s);
        }
        close_rig(&r);
    }
}

/* Rows of three sequences mixed in a step are as if each were alone. */
static void test_neighbours(void) {
    for (size_t k = 0; k < RFI_COUNT(models); k++) {
        enum { MOST_EACH = 33 };
        static float alone[3][MOST_EACH][N_VOCAB];
        int32_t text[3][MOST_EACH];
        const uint32_t n_each = exact() ? MOST_EACH : 9;
        uint32_t at[3] = {0, 0, 0};
        mg_rng rng = {k + 7};
        rig r;
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        for (uint32_t q = 0; q < 3; q++) random_tokens(text[q], n_each, 50 + 3 * k + q), reference(&r, text[q], n_each, alone[q]);
        rf_session *s = session(&r, &(rf_session_desc){.n_ctx = n_each, .n_seq_max = 3, .n_batch = 5, .n_logits_max = 16,
                                                       .cache_type = RF_CACHE_F32});
        while (at[0] + at[1] + at[2] < 3 * n_each) {
            rf_row rows[16];
            uint32_t n = 0, pos[16];
            for (uint32_t left = 1 + mg_below(&rng, 16); left; left--) {
                const uint32_t q = mg_below(&rng, 3);
                if (at[q] == n_each) continue;
                pos[n] = at[q];
                rows[n++] = (rf_row){.token = text[q][at[q]++], .seq = (int32_t)q, .pos = RF_POS_NEXT, .want_logits = 1};
            }
            if (n == 0) continue;
            CHECK(rf_eval(s, rows, n, &r.err) == RF_OK, "%s", r.err.text);
            for (uint32_t i = 0; i < n; i++)
                CHECK(close_to(rf_session_logits(s, i), alone[rows[i].seq][pos[i]]), "%s: sequence %d, token %u", models[k],
                      rows[i].seq, pos[i]);
        }
        rf_session_close(s);
        close_rig(&r);
    }
}

/* How far back a cut goes, and that what follows has the bits of a sequence that was never longer. */
static void test_cut(void) {
    static const uint32_t cuts[] = {599, 598, 597, 520, 511, 300, 256, 1, 0};
    for (size_t k = 0; k < RFI_COUNT(models); k++) {
        rig r;
        float got[N_VOCAB];
        if (!open_rig(&r, models[k], NULL, NULL)) continue;
        random_tokens(tokens, MOST, k + 20);
        reference(&r, tokens, MOST, want);
        for (size_t i = 0; i < RFI_COUNT(cuts); i++) {
            rf_session *s = session(&r, &(rf_session_desc){.n_ctx = MOST, .n_batch = 100, .cache_type = RF_CACHE_F32});
            uint32_t kept = 9999, n = cuts[i];
            CHECK(feed(s, 0, tokens, 0, 598, NULL, &r.err) && feed(s, 0, tokens, 598, 599, NULL, &r.err), "%s", r.err.text);
            CHECK(rf_session_truncate(s, 0, n, &kept, &r.err) == RF_OK, "%s", r.err.text);
            /* where it is; before the token that was evaluated alone; before the prompt's last; then not too far back */
            CHECK(rf_session_length(s, 0) == kept && (n >= 597 ? kept == n : kept <= n && n - kept < 256),
                  "cut to %u: %u are left", n, kept);
            CHECK(feed(s, 0, tokens, kept, MOST, got, &r.err) && SAME(got, want[MOST - 1]), "after a cut to %u", n);
            uint32_t again = 0;
            CHECK(rf_session_sync(s, 0, tokens, MOST, &again, &r.err) == RF_OK && again == MOST - 1, "sync keeps %u", again);
            rf_session_close(s);
        }
        close_rig(&r);
    }
}

/* ---- whatever happens ---- */

typedef struct saved {
    unsigned char data[1 << 20];
    size_t n, at;
} saved;
static int save_bytes(const void *data, size_t n, void *user) {
    saved *f = (saved *)user;
    if (n > sizeof f->data - f->n) return -1;
    memcpy(f->data + f->n, data, n);
    f->n += n;
    return 0;
}
static int64_t restore_bytes(void *data, size_t n, void *user) {
    saved *f = (saved *)user;
    if (n > f->n - f->at) n = f->n - f->at;
    memcpy(data, f->data + f->at, n);
    f->at += n;
    return (int64_t)n;
}

enum { N_SEQ = 3, N_CTX = 300 };
typedef struct play {
    rig r;
    rf_session *s;
    mg_rng rng;
    uint32_t n_ctx;
    uint32_t n[N_SEQ]; /* all hold beginnings of `tokens` */
} play;

static void play_saved(play *p, uint32_t q, uint32_t to) {
    static saved file;
    rf_session_io io = {save_bytes, restore_bytes, &file};
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
    for (size_t k = 0; k < RFI_COUNT(models); k++)
        for (size_t i = 0; i < (exact() ? RFI_COUNT(snapshots) : 1); i++) {
            play p = {.rng = {99 + i + 10 * k}, .n_ctx = exact() ? N_CTX : 40};
            if (!open_rig(&p.r, models[k], NULL, NULL)) continue;
            random_tokens(tokens, N_CTX, k + 40);
            reference(&p.r, tokens, exact() ? N_CTX : 40, want);
            p.s = session(&p.r, &(rf_session_desc){.n_ctx = N_CTX, .n_seq_max = N_SEQ, .n_batch = 9, .n_snapshots = snapshots[i],
                                                   .cache_type = RF_CACHE_F32});
            for (int step = 0; p.s && step < (exact() ? 400 : 20); step++) play_once(&p, step);
            rf_session_close(p.s);
            close_rig(&p.r);
        }
}

/* Reading the file fails at each of its reads in turn, in the middle of an eval of several micro-batches, each of which
 * streams the weights anew: the sequence is as it was, and rf_forward goes back over several evals. */
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
    for (size_t k = 0; k < RFI_COUNT(models); k++) {
        int f = open(models[k], O_RDONLY);
        rig r;
        float got[N_VOCAB];
        REQUIRE(f >= 0, "%s", models[k]);
        const rf_gguf_desc gd = {.io = {open_file, failing_read, NULL, NULL, close_file, &f}, .no_map = 1};
        random_tokens(tokens, ALL, k + 60);
        reads_left = INT64_MAX;
        if (!open_rig(&r, models[k], &gd, &(rf_model_desc){.budget_bytes = 60000, .n_readers = 1})) continue;
        reference(&r, tokens, ALL, want);
        rf_session *s = session(&r, &(rf_session_desc){.n_ctx = ALL, .n_batch = 6, .n_snapshots = 1, .cache_type = RF_CACHE_F32});
        CHECK(feed(s, 0, tokens, 0, BEFORE, NULL, &r.err), "%s", r.err.text);
        uint32_t failures = 0;
        for (int64_t n = 0; n < 5000; n += 3) {
            float *logits = NULL;
            reads_left = n;
            const int ok = n / 3 % 2 ? feed(s, 0, tokens, BEFORE, ALL, got, &r.err)
                                     : rf_forward(s, tokens + BEFORE, ALL - BEFORE, &logits, &r.err) == RF_OK;
            if (ok && logits) memcpy(got, logits, sizeof got);
            reads_left = INT64_MAX;
            if (ok) break;
            failures++;
            CHECK(rf_session_length(s, 0) == BEFORE, "it holds %u", rf_session_length(s, 0));
        }
        CHECK(failures > 10, "only %u failures", failures);
        CHECK(SAME(got, want[ALL - 1]), "%s: other bits after %u failures", models[k], failures);
        rf_session_close(s);
        close_rig(&r);
        close(f);
    }
}

/* What is said to be needed: keys and values of layers with attention only, and a state for each slot. */
static void test_forecast(void) {
    for (size_t k = 0; k < RFI_COUNT(models); k++) {
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
        CHECK(one.kv_bytes <= 5 * state + kv && one.kv_bytes >= 5 * (state - 256 * n_recurrent), "%llu in all",
              (unsigned long long)one.kv_bytes);
        rf_session *s = NULL;
        CHECK(rf_session_open(r.m, &(rf_session_desc){.n_snapshots = 1025}, &s, &r.err) == RF_ERR_ARGUMENT, "too many");
        close_rig(&r);
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
        RUN(test_neighbours);
        RUN(test_play);
    }
    device_name = "cpu";
    if (n_gpus == 0) {
        RUN(test_batches);
        RUN(test_neighbours);
        RUN(test_cut);
        RUN(test_play);
        RUN(test_failing_reads);
        RUN(test_forecast);
    }
    RFT_END();
}
