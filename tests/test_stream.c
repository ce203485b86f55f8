/* The loader with reader threads, and budgets: whatever the order, the number of readers and the budget, the same
 * tensors arrive, once each, and give the same bits; cancels, late failures and changed files are errors that pass. */
#define ROCMFORGE_IMPLEMENTATION
#include "../rocmforge.h"

#include <sys/mman.h>

#include "make_gguf.h"
#include "rf_test.h"

#define N_VOCAB 320
static const int32_t some_tokens[5] = {7, 300, 12, 0, 99};

typedef struct rig {
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
} rig;

/* The file used in place, read into memory of the CPU device, read into the null device. */
enum { MAPPED, COPIED, NULLED, N_MODES };
static const char *const modes[] = {"mapped", "copied", "null"};

static char path[] = "/tmp/rf_stream_XXXXXX";
static mg_buf file;

static int write_file(void) {
    int fd = open(path, O_WRONLY | O_TRUNC | O_CREAT, 0600);
    int ok = fd >= 0 && write(fd, file.data, file.n) == (ssize_t)file.n;
    if (fd >= 0) close(fd);
    return ok;
}

static void rig_close(rig *r) {
    CHECK(rf_model_close(r->m, NULL) == RF_OK && rf_device_close(r->d, NULL) == RF_OK && rf_gguf_close(r->g, NULL) == RF_OK, "busy");
    memset(r, 0, sizeof *r);
}

static int rig_open(rig *r, int mode, const rf_device_desc *dd, const rf_model_desc *md) {
    memset(r, 0, sizeof *r);
    rf_device_desc d = dd ? *dd : (rf_device_desc){.n_threads = 2};
    rf_result res = rf_gguf_open(path, &(rf_gguf_desc){.no_map = mode != MAPPED}, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open(mode == NULLED ? "null" : "cpu", &d, &r->d, &r->err);
    if (res == RF_OK) res = rf_model_open(r->g, r->d, md, &r->m, &r->err);
    CHECK(res == RF_OK, "%s: %s", modes[mode], r->err.text);
    if (res != RF_OK) rig_close(r);
    return res == RF_OK;
}

/* logits of some_tokens' last and of one more token, in a fresh session with micro-batches of 2 */
static rf_result run(rf_model *m, float *out, rf_error *err) {
    rf_session *s;
    float *logits;
    rf_result r = rf_session_open(m, &(rf_session_desc){.n_ctx = 16, .n_batch = 2}, &s, err);
    if (r != RF_OK) return r;
    r = rf_forward(s, some_tokens, 5, &logits, err);
    if (r == RF_OK) memcpy(out, logits, N_VOCAB * sizeof *out);
    if (r == RF_OK) r = rf_forward(s, some_tokens, 1, &logits, err);
    if (r == RF_OK) memcpy(out + N_VOCAB, logits, N_VOCAB * sizeof *out);
    rf_session_close(s);
    return r;
}

static float want[N_MODES][2 * N_VOCAB];

/* Every policy, readers or none: each tensor once, the same bits, also after everything was dropped. */
static void test_policies(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (uint32_t policy = RF_LOAD_LAZY; policy <= RF_LOAD_CRITICAL_FIRST; policy++)
            for (uint32_t readers = 0; readers <= 16; readers = readers ? readers * 4 : 1) {
                rig r;
                float got[2 * N_VOCAB];
                if (!rig_open(&r, mode, NULL, &(rf_model_desc){.load_policy = policy, .n_readers = readers})) return;
                uint32_t n = rf_model_get_info(r.m).n_tensors;
                rf_loading_stats st = rf_model_get_loading_stats(r.m);
                CHECK(st.device_bytes == 0 && st.tensors_loaded == 0 && st.device_allocations == 0, "after open");
                for (int again = 0; again < 2; again++) {
                    CHECK(run(r.m, got, &r.err) == RF_OK, "%s", r.err.text);
                    CHECK(memcmp(got, want[mode], sizeof got) == 0, "%s, policy %u, %u readers: other bits", modes[mode], policy, readers);
                    st = rf_model_get_loading_stats(r.m);
                    CHECK(st.loads == n * (uint64_t)(again + 1) && st.tensors_loaded == n && st.failures == 0, "%llu loads of %u tensors",
                          (unsigned long long)st.loads, n);
                    CHECK(mode == MAPPED || st.bytes_read == rf_model_get_info(r.m).weight_bytes * (uint64_t)(again + 1), "read twice");
                    CHECK(rf_model_clear_gpu_cache(r.m, NULL, NULL) == RF_OK, "clear");
                    st = rf_model_get_loading_stats(r.m);
                    CHECK(st.tensors_loaded == 0 && st.device_bytes == 0 && st.bytes_loaded == 0, "clear left %llu bytes", (unsigned long long)st.device_bytes);
                }
                rig_close(&r);
            }
}

static uint64_t needed(int mode) {
    rig r;
    rf_forecast f = {0};
    if (!rig_open(&r, mode, NULL, NULL)) return 0;
    CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.streamed_bytes == 0, "%s", r.err.text);
    rig_close(&r);
    return f.weight_bytes;
}

/* Any budget that can work gives the same bits and is kept; a smaller one is refused with the least that is needed. */
static void test_budgets(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        uint64_t all = needed(mode);
        for (int percent = 100; percent > 0; percent -= 10)
            for (uint32_t stream = RF_STREAM_PREFIX; stream <= RF_STREAM_LRU; stream++)
                for (uint32_t readers = 0; readers < 4; readers += 3) {
                    rig r;
                    rf_forecast f;
                    float got[2 * N_VOCAB];
                    rf_model_desc md = {.budget_bytes = all * (uint64_t)percent / 100, .stream_policy = stream, .n_readers = readers,
                                        .pinned_bytes = percent % 20 ? all : 0};
                    if (!rig_open(&r, mode, NULL, &md)) return;
                    rf_result res = rf_model_forecast(r.m, NULL, &f, &r.err);
                    if (res == RF_OK) {
                        CHECK(f.weight_bytes <= md.budget_bytes && (f.streamed_bytes > 0) == (percent < 100), "%d %%: %llu bytes", percent, (unsigned long long)f.weight_bytes);
                        CHECK(run(r.m, got, &r.err) == RF_OK, "%s, %d %%: %s", modes[mode], percent, r.err.text);
                        CHECK(memcmp(got, want[mode], sizeof got) == 0, "%s, %d %%, policy %u, %u readers: other bits", modes[mode], percent, stream, readers);
                        rf_loading_stats st = rf_model_get_loading_stats(r.m);
                        CHECK(st.device_bytes <= md.budget_bytes && st.failures == 0, "%llu bytes", (unsigned long long)st.device_bytes);
                        CHECK(percent == 100 ? st.evictions == 0 : st.evictions > 0, "%llu evictions", (unsigned long long)st.evictions);
                        if (mode != MAPPED && md.pinned_bytes) CHECK(st.bytes_read <= rf_model_get_info(r.m).weight_bytes, "pinned bytes are read again");
                        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
                        CHECK(rf_model_clear_gpu_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "clear");
                        CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[mode], sizeof got) == 0, "after clear: %s", r.err.text);
                    } else {
                        CHECK(res == RF_ERR_MEMORY && percent < 60 && strstr(r.err.text, "at least"), "%d %%: %s", percent, r.err.text);
                        CHECK(run(r.m, got, &r.err) == RF_ERR_MEMORY && rf_model_get_loading_stats(r.m).device_bytes == 0, "%s", r.err.text);
                    }
                    rig_close(&r);
                }
    }
}

/* Models of one file on one device share weights; of two files, the one used longer ago gives way. */
static void test_sharing(void) {
    rig r, other;
    rf_model *second;
    float got[2 * N_VOCAB];
    uint64_t all = needed(COPIED);
    if (!rig_open(&r, COPIED, &(rf_device_desc){.n_threads = 2, .budget_bytes = all * 3 / 2}, NULL)) return;
    CHECK(rf_model_open(r.g, r.d, NULL, &second, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(run(r.m, got, &r.err) == RF_OK, "%s", r.err.text);
    uint64_t loads = rf_model_get_loading_stats(r.m).loads;
    CHECK(run(second, got, &r.err) == RF_OK && memcmp(got, want[COPIED], sizeof got) == 0, "%s", r.err.text);
    CHECK(rf_model_get_loading_stats(second).loads == loads && rf_model_get_loading_stats(r.m).device_bytes <= all, "loaded twice");
    CHECK(rf_model_close(r.m, NULL) == RF_OK, "busy");
    r.m = second;
    CHECK(run(r.m, got, &r.err) == RF_OK && rf_model_get_loading_stats(r.m).loads == loads, "the weights went with the first model");

    memset(&other, 0, sizeof other);
    CHECK(rf_gguf_open(path, &(rf_gguf_desc){.no_map = 1}, &other.g, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_model_open(other.g, r.d, NULL, &other.m, &r.err) == RF_OK, "%s", r.err.text);
    for (int round = 0; round < 3; round++)
        for (int k = 0; k < 2; k++) {
            rf_model *m = k ? r.m : other.m, *idle = k ? other.m : r.m;
            CHECK(run(m, got, &r.err) == RF_OK && memcmp(got, want[COPIED], sizeof got) == 0, "%s", r.err.text);
            CHECK(rf_model_get_loading_stats(m).device_bytes <= all && rf_model_get_loading_stats(idle).device_bytes == 0, "no model gave way");
        }
    CHECK(rf_model_close(other.m, NULL) == RF_OK && rf_gguf_close(other.g, NULL) == RF_OK, "busy");
    rig_close(&r);
}

typedef struct worker {
    rf_model *m;
    int mode, rounds;
    rf_result result;
    rf_error err;
    _Atomic int *stop;
} worker;

static void *evaluate(void *arg) {
    worker *w = (worker *)arg;
    float got[2 * N_VOCAB];
    for (int i = 0; i < w->rounds && w->result == RF_OK; i++) {
        w->result = run(w->m, got, &w->err);
        if (w->result == RF_OK && memcmp(got, want[w->mode], sizeof got) != 0) w->result = RF_ERR_DEVICE;
    }
    return NULL;
}

static void *clear(void *arg) {
    worker *w = (worker *)arg;
    while (!atomic_load(w->stop)) {
        rf_model_clear_gpu_cache(w->m, NULL, NULL);
        sched_yield();
    }
    return NULL;
}

/* Two models in two threads each on a device that holds one and a half, and a thread that clears. */
static void test_threads(void) {
    for (int mode = COPIED; mode < N_MODES; mode++)
        for (int percent = 150; percent >= 50; percent -= 50) {
            rig r, other;
            worker w[5];
            pthread_t threads[5];
            _Atomic int stop = 0;
            uint64_t all = needed(mode);
            if (!rig_open(&r, mode, &(rf_device_desc){.n_threads = 2, .budget_bytes = all * (uint64_t)percent / 100}, &(rf_model_desc){.n_readers = 2})) return;
            memset(&other, 0, sizeof other);
            CHECK(rf_gguf_open(path, &(rf_gguf_desc){.no_map = 1}, &other.g, &r.err) == RF_OK, "%s", r.err.text);
            CHECK(rf_model_open(other.g, r.d, &(rf_model_desc){.n_readers = 2}, &other.m, &r.err) == RF_OK, "%s", r.err.text);
            for (int i = 0; i < 5; i++) {
                w[i] = (worker){.m = i & 1 ? other.m : r.m, .mode = mode, .rounds = 6, .stop = &stop};
                CHECK(pthread_create(&threads[i], NULL, i < 4 ? evaluate : clear, &w[i]) == 0, "thread");
            }
            for (int i = 0; i < 5; i++) {
                if (i == 4) atomic_store(&stop, 1);
                pthread_join(threads[i], NULL);
                CHECK(w[i].result == RF_OK, "%s, %d %%, thread %d: %s: %s", modes[mode], percent, i, rf_result_name(w[i].result), w[i].err.text);
            }
            CHECK(rf_model_close(other.m, NULL) == RF_OK && rf_gguf_close(other.g, NULL) == RF_OK, "busy");
            rig_close(&r);
        }
}

/* A copy that fails after its tensor was READY: the run fails with the copy's error, and the next one loads it again. */
static void test_late_failure(void) {
    int failed = 0;
    for (int percent = 100; percent >= 60; percent -= 40)
        for (uint32_t readers = 0; readers < 2; readers++)
            for (uint64_t n = 4; n < 60; n++) { /* the first three are those of opening */
                rig r;
                float got[2 * N_VOCAB];
                uint64_t all = needed(NULLED);
                if (!rig_open(&r, NULLED, &(rf_device_desc){.fail_call = n, .fail_late = 1}, &(rf_model_desc){.n_readers = readers, .budget_bytes = all * (uint64_t)percent / 100})) continue;
                rf_result res = run(r.m, got, &r.err);
                CHECK(res == RF_OK || (res == RF_ERR_DEVICE && r.err.sys == -1), "call %d: %s", (int)n, r.err.text);
                if (res != RF_OK && strstr(r.err.text, "fails late")) {
                    failed++;
                    CHECK(run(r.m, got, &r.err) == RF_OK, "again: %s", r.err.text);
                    CHECK(rf_model_get_loading_stats(r.m).failures >= 1 || percent < 100, "not counted");
                }
                rig_close(&r);
            }
    CHECK(failed > 40, "%d late failures", failed);
}

/* The first tensor's report waits until another thread has cancelled. */
typedef struct cancelling {
    rf_model *m;
    _Atomic int reported, cancelled;
} cancelling;

static int report(uint64_t done, uint64_t total, rf_string tensor, void *user) {
    cancelling *c = (cancelling *)user;
    (void)done, (void)total, (void)tensor;
    atomic_store(&c->reported, 1);
    while (!atomic_load(&c->cancelled)) sched_yield();
    return 0;
}

static void *cancel(void *arg) {
    cancelling *c = (cancelling *)arg;
    while (!atomic_load(&c->reported)) sched_yield();
    rf_model_cancel_loading(c->m);
    atomic_store(&c->cancelled, 1);
    return NULL;
}

/* Cancelled by another thread: every call that waits returns, and a later one works. Readers may have loaded everything
 * by then; without them the calling thread has one tensor. */
static void test_cancel(void) {
    for (int mode = COPIED; mode < N_MODES; mode++)
        for (int round = 0; round < 24; round++) {
            rig r;
            float got[2 * N_VOCAB];
            pthread_t thread;
            uint64_t all = needed(mode);
            uint32_t readers = (uint32_t)round % 3;
            cancelling c = {0};
            rf_model_desc md = {.n_readers = readers, .budget_bytes = round & 4 ? all * 7 / 10 : 0, .progress_fn = report, .progress_user = &c};
            if (!rig_open(&r, mode, NULL, &md)) return;
            c.m = r.m;
            CHECK(pthread_create(&thread, NULL, cancel, &c) == 0, "thread");
            rf_result res = round & 1 ? rf_model_preload_all(r.m, &r.err) : run(r.m, got, &r.err);
            pthread_join(thread, NULL);
            CHECK(res == RF_ERR_CANCELLED || (res == RF_OK && readers), "%u readers: %s", readers, r.err.text);
            CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[mode], sizeof got) == 0, "afterwards: %s", r.err.text);
            rig_close(&r);
        }
}

/* The file changes while it is open: shortened or rewritten in place is an error, renamed over is none. */
static void test_changed_file(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (int how = 0; how < 3; how++) {
            rig r;
            float got[2 * N_VOCAB];
            char beside[sizeof path + 4];
            CHECK(write_file(), "cannot write %s", path);
            if (!rig_open(&r, mode, NULL, NULL)) return;
            CHECK(rf_model_preload_layers(r.m, (uint32_t[]){0}, 1, &r.err) == RF_OK, "%s", r.err.text);
            if (how == 0) CHECK(truncate(path, (off_t)file.n / 2) == 0, "truncate");
            if (how == 1) {
                struct timespec later[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 2000000000}};
                int fd = open(path, O_WRONLY);
                CHECK(fd >= 0 && pwrite(fd, "x", 1, (off_t)file.n - 1) == 1 && futimens(fd, later) == 0, "rewrite");
                if (fd >= 0) close(fd);
            }
            if (how == 2) {
                snprintf(beside, sizeof beside, "%s.new", path);
                int fd = open(beside, O_WRONLY | O_CREAT, 0600);
                CHECK(fd >= 0 && rename(beside, path) == 0, "rename");
                if (fd >= 0) close(fd);
            }
            rf_result res = rf_model_preload_all(r.m, &r.err);
            CHECK(how == 2 ? res == RF_OK : res == RF_ERR_IO && strstr(r.err.text, how ? "was written to" : "was changed"),
                  "%s, change %d: %s: %s", modes[mode], how, rf_result_name(res), r.err.text);
            if (how == 2) CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[mode], sizeof got) == 0, "%s", r.err.text);
            else CHECK(rf_model_is_layer_loaded(r.m, 0) && !rf_model_is_layer_loaded(r.m, 1), "what was loaded stays");
            rig_close(&r);
        }
    CHECK(write_file(), "cannot write %s", path);
}

/* What every mode gives without readers and budgets; the mapped and the copied weights the same. */
static void reference(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        rig r;
        if (!rig_open(&r, mode, NULL, NULL)) return;
        CHECK(run(r.m, want[mode], &r.err) == RF_OK, "%s", r.err.text);
        rig_close(&r);
    }
    CHECK(memcmp(want[MAPPED], want[COPIED], sizeof want[0]) == 0, "copied weights give other bits");
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(300); /* a deadlock is a failure too */
    int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 8});
    if (!write_file()) return printf("cannot write %s\n", path), 1;
    reference();
    RUN(test_policies);
    RUN(test_budgets);
    RUN(test_sharing);
    RUN(test_threads);
    RUN(test_late_failure);
    RUN(test_cancel);
    RUN(test_changed_file);
    unlink(path);
    mg_free(&file);
    RFT_END();
}
