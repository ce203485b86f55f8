/* The loader with reader threads, and budgets: whatever the order, the number of readers and the budget, the same
 * tensors arrive, once each, and give the same bits; cancels, late failures and changed files are errors that pass. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* ThreadSanitizer takes a mapping for a store to each of its bytes. rf_gguf_handle_fault stores nothing: where a page is gone,
 * a load of another thread is answered by the kernel, with a fault of its own or with the new page. Only the mapping is
 * excepted, not what the library does around it: this program's mmap comes before the sanitizer's, which it calls. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
void AnnotateIgnoreWritesBegin(const char *where, int line);
void AnnotateIgnoreWritesEnd(const char *where, int line);
void *__interceptor_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset);
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    void *p = __interceptor_mmap(at, n, protection, flags, fd, offset);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    return p;
}
#endif
#endif

#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

#define N_VOCAB 320
static const int32_t some_tokens[5] = {7, 300, 12, 0, 99};

static char path[] = "/tmp/rf_stream_XXXXXX";
static mg_buf file;

static int open_rig(rig *r, int mode, const rf_device_desc *dd, const rf_model_desc *md) {
    return rig_open(r, &(rig_how){.path = path, .mode = mode, .device_desc = dd, .model = md});
}

/* logits of some_tokens' last and of one more token, in a fresh session with micro-batches of 2 */
static rf_result run(rf_model *m, float *out, rf_error *err) {
    rf_session *s;
    float *logits;
    rf_result r = rf_session_open(m, &(rf_session_desc){.n_ctx = 16, .n_batch = 2}, &s, err);
    if (r != RF_OK) return r;
    r = rf_session_forward(s, some_tokens, 5, &logits, err);
    if (r == RF_OK) memcpy(out, logits, N_VOCAB * sizeof *out);
    if (r == RF_OK) r = rf_session_forward(s, some_tokens, 1, &logits, err);
    if (r == RF_OK) memcpy(out + N_VOCAB, logits, N_VOCAB * sizeof *out);
    rf_session_close(s, NULL);
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
                if (!open_rig(&r, mode, NULL, &(rf_model_desc){.load_policy = policy, .n_readers = readers})) return;
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
                    CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK, "clear");
                    st = rf_model_get_loading_stats(r.m);
                    CHECK(st.tensors_loaded == 0 && st.device_bytes == 0 && st.bytes_loaded == 0, "clear left %llu bytes", (unsigned long long)st.device_bytes);
                }
                rig_close(&r);
            }
}

static uint64_t needed(int mode) {
    rig r;
    rf_forecast f = {0};
    if (!open_rig(&r, mode, NULL, NULL)) return 0;
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
                    if (!open_rig(&r, mode, NULL, &md)) return;
                    rf_result res = rf_model_forecast(r.m, NULL, &f, &r.err);
                    if (res == RF_OK) {
                        CHECK(f.weight_bytes <= md.budget_bytes && (f.streamed_bytes > 0) == (percent < 100), "%d %%: %llu bytes", percent, (unsigned long long)f.weight_bytes);
                        CHECK(run(r.m, got, &r.err) == RF_OK, "%s, %d %%: %s", modes[mode], percent, r.err.text);
                        CHECK(memcmp(got, want[mode], sizeof got) == 0, "%s, %d %%, policy %u, %u readers: other bits", modes[mode], percent, stream, readers);
                        rf_loading_stats st = rf_model_get_loading_stats(r.m);
                        CHECK(st.device_bytes <= md.budget_bytes && st.failures == 0, "%llu bytes", (unsigned long long)st.device_bytes);
                        CHECK(mode == MAPPED || st.device_bytes == f.weight_bytes, "%llu bytes, the forecast was %llu", (unsigned long long)st.device_bytes, (unsigned long long)f.weight_bytes);
                        CHECK(percent == 100 ? st.evictions == 0 : st.evictions > 0, "%llu evictions", (unsigned long long)st.evictions);
                        if (mode != MAPPED && md.pinned_bytes) CHECK(st.bytes_read <= rf_model_get_info(r.m).weight_bytes, "pinned bytes are read again");
                        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
                        CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "clear");
                        CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[mode], sizeof got) == 0, "after clear: %s", r.err.text);
                    } else {
                        CHECK(res == RF_ERR_MEMORY && percent < 60 && strstr(r.err.text, "at least"), "%d %%: %s", percent, r.err.text);
                        CHECK(run(r.m, got, &r.err) == RF_ERR_MEMORY && rf_model_get_loading_stats(r.m).device_bytes == 0, "%s", r.err.text);
                    }
                    rig_close(&r);
                }
    }
}

/* ---- a null device whose memory is watched ---- */

static rf_device_api watched;
static _Atomic uint64_t watched_bytes, watched_blocks; /* of memory that was made                */
static uint64_t watched_weight;                        /* what every weight claims to take; 0: its size */
static _Atomic int watched_hold, watched_held;         /* the watched_hold-th block waits while it is set */

static _Atomic uint64_t watched_now, watched_peak;     /* bytes that are there                             */
static _Atomic int watched_keep;                       /* releases take a while                            */

static void watched_mem_release(rf_dev *d, rf_mem *mem) {
    for (int i = 0; i < 300 && atomic_load(&watched_keep); i++) atomic_store(&watched_held, 1), nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    atomic_fetch_sub(&watched_now, mem->size_bytes);
    rfi_null_api.mem_release(d, mem);
}

/* ---- and its pinned memory ---- */

static uint64_t pinned_bytes;                       /* the size by which a block for tensors is known     */
static _Atomic int pinned_asked, pinned_failing;    /* such blocks; the first so many cannot be had       */
static _Atomic int pinned_wanted, pinned_go;          /* one is being made; until this is set, or too long */
static _Atomic int pinned_late;

static rf_result watched_host_create(rf_dev *d, uint64_t size_bytes, void **out, rf_error *err) {
    if (pinned_bytes == 0 || size_bytes != pinned_bytes) return rfi_null_api.host_create(d, size_bytes, out, err);
    const int n = atomic_fetch_add(&pinned_asked, 1);
    atomic_store(&pinned_wanted, 1);
    for (int i = 0; i < 30000 && !atomic_load(&pinned_go); i++) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (!atomic_load(&pinned_go)) atomic_store(&pinned_late, 1);
    if (n < atomic_load(&pinned_failing)) return rfi_fail(err, RF_ERR_MEMORY, 0, "no more pinned memory");
    return rfi_null_api.host_create(d, size_bytes, out, err);
}

static rf_result watched_mem_create(rf_dev *d, uint64_t size_bytes, rf_mem *out, rf_error *err) {
    int n = (int)atomic_fetch_add(&watched_blocks, 1) + 1;
    while (atomic_load(&watched_hold) == n) atomic_store(&watched_held, 1), sched_yield();
    atomic_fetch_add(&watched_bytes, size_bytes);
    uint64_t now = atomic_fetch_add(&watched_now, size_bytes) + size_bytes, peak = atomic_load(&watched_peak);
    while (now > peak && !atomic_compare_exchange_weak(&watched_peak, &peak, now)) continue;
    return rfi_null_api.mem_create(d, size_bytes, out, err);
}

static rf_weight_layout watched_layout(rf_dev *d, const rf_plan *plan, const rf_plan_weight *w) {
    rf_weight_layout layout = rfi_null_api.weight_layout(d, plan, w);
    if (watched_weight) layout.size_bytes = watched_weight;
    return layout;
}

static int watched_open(rig *r, const rf_model_desc *md, uint64_t weight) {
    memset(r, 0, sizeof *r);
    watched = rfi_null_api;
    watched.mem_create = watched_mem_create;
    watched.mem_release = watched_mem_release;
    watched.host_create = watched_host_create;
    watched.weight_layout = watched_layout;
    watched_weight = weight;
    atomic_store(&watched_bytes, 0), atomic_store(&watched_blocks, 0), atomic_store(&watched_held, 0);
    atomic_store(&watched_now, 0), atomic_store(&watched_peak, 0);
    rf_result res = rf_gguf_open(path, NULL, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open("null", NULL, &r->d, &r->err);
    if (res == RF_OK) r->d->api = &watched;
    if (res == RF_OK) res = rf_model_open(r->g, r->d, md, &r->m, &r->err);
    CHECK(res == RF_OK, "%s", r->err.text);
    return res == RF_OK;
}

static int64_t watched_live(const rig *r) { return atomic_load(&rfi_null_of(r->d->dev)->n_live); }

/* What is allocated is what was forecast: nothing for opening, keys, values and scratch by the session, weights by use. */
static void test_forecast(void) {
    const rf_session_desc sd = {.n_ctx = 48, .n_seq_max = 3, .n_batch = 7, .n_logits_max = 5, .cache_type = RF_CACHE_F32};
    rig r;
    rf_forecast f;
    rf_session *s;
    if (!watched_open(&r, NULL, 0)) return;
    CHECK(rf_model_forecast(r.m, &sd, &f, &r.err) == RF_OK && f.kv_bytes && f.scratch_bytes && f.weight_bytes, "%s", r.err.text);
    CHECK(atomic_load(&watched_bytes) == 0, "opening or asking took %llu bytes", (unsigned long long)atomic_load(&watched_bytes));
    CHECK(rf_session_open(r.m, &sd, &s, &r.err) == RF_OK && atomic_load(&watched_bytes) == f.kv_bytes + f.scratch_bytes, "%llu bytes, want %llu",
          (unsigned long long)atomic_load(&watched_bytes), (unsigned long long)(f.kv_bytes + f.scratch_bytes));
    CHECK(rf_session_forward(s, some_tokens, 5, NULL, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(atomic_load(&watched_bytes) == f.kv_bytes + f.scratch_bytes + f.weight_bytes, "%llu bytes", (unsigned long long)atomic_load(&watched_bytes));
    rf_session_close(s, NULL);
    rig_close(&r);
}

static void *release_soon(void *arg) {
    while (!atomic_load(&watched_held)) sched_yield();
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000000}, NULL);
    atomic_store((_Atomic int *)arg, 1);
    atomic_store(&watched_hold, 0);
    return NULL;
}

/* A reader makes memory for the next tensors while others load: dropping everything waits for it, and loses nothing. */
static void test_clear_waits_for_memory(void) {
    rig r;
    pthread_t thread;
    _Atomic int released = 0;
    float got[2 * N_VOCAB];
    const uint64_t weight = (uint64_t)100 << 20; /* a slab has 1 GiB: the embedding and layer 0 */
    atomic_store(&watched_hold, 2);
    if (!watched_open(&r, &(rf_model_desc){.n_readers = 1}, weight)) return;
    CHECK(rf_model_get_plan(r.m)->n_weights > 22, "three slabs");
    CHECK(pthread_create(&thread, NULL, release_soon, &released) == 0, "thread");
    uint64_t cancels; /* layer 0 is loaded ahead, and the thread that asked for it is gone */
    CHECK(rfi_store_begin(r.m->store, &cancels, &r.err) == RF_OK, "%s", r.err.text);
    rfi_store_prefetch(r.m->store, (uint32_t[]){0}, 1, 0);
    rfi_store_end(r.m->store);
    while (!atomic_load(&watched_held)) sched_yield();
    CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && atomic_load(&released), "cleared under a reader");
    pthread_join(thread, NULL);
    CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "bytes");
    CHECK(run(r.m, got, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "bytes");
    CHECK(rf_model_close(r.m, NULL) == RF_OK && watched_live(&r) == 0, "%lld objects are left", (long long)watched_live(&r));
    r.m = NULL;
    rig_close(&r);
}

/* The ring takes what a layer and a little ahead need, however wide the embedding is: all else of the budget is filled. */
static void test_ring_size(void) {
    mg_buf wide = {0};
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
    rf_forecast all, f;
    uint64_t layer = 0, most = 0;
    mg_llama(&wide, &(mg_options){.type = MG_Q8_0, .n_layers = 32, .n_vocab = 3000, .no_vocab = 1});
    REQUIRE(rf_gguf_open_memory(wide.data, wide.n, NULL, &g, &err) == RF_OK && rf_device_open("null", NULL, &d, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_model_open(g, d, NULL, &m, &err) == RF_OK && rf_model_forecast(m, NULL, &all, &err) == RF_OK, "%s", err.text);
    const rf_plan *plan = rf_model_get_plan(m);
    for (uint32_t i = 0; i < plan->n_weights; i++) {
        uint64_t bytes = (plan->weights[i].size_bytes + 255) / 256 * 256;
        if (plan->weights[i].layer != 0) continue;
        layer += bytes;
        if (bytes > most) most = bytes;
    }
    CHECK(plan->weights[0].size_bytes > 3 * layer, "the embedding is not wide");
    CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
    for (uint64_t percent = 90; percent >= 40; percent -= 10) {
        uint64_t budget = all.weight_bytes * percent / 100;
        REQUIRE(rf_model_open(g, d, &(rf_model_desc){.budget_bytes = budget}, &m, &err) == RF_OK && rf_model_forecast(m, NULL, &f, &err) == RF_OK, "%s", err.text);
        CHECK(f.streamed_bytes <= all.weight_bytes - budget + 2 * layer + 2 * most && f.streamed_bytes >= all.weight_bytes - budget + layer / 2,
              "%llu %%: %llu bytes are streamed, %llu are too many, a layer has %llu", (unsigned long long)percent, (unsigned long long)f.streamed_bytes,
              (unsigned long long)(all.weight_bytes - budget), (unsigned long long)layer);
        CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
    }
    CHECK(rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    mg_free(&wide);
}

/* Models of one file on one device share weights; of two files, the one used longer ago gives way. */
static void test_sharing(void) {
    rig r, other;
    rf_model *second;
    float got[2 * N_VOCAB];
    uint64_t all = needed(COPIED);
    if (!open_rig(&r, COPIED, &(rf_device_desc){.n_threads = 2, .budget_bytes = all * 3 / 2}, NULL)) return;
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
        rf_model_clear_device_cache(w->m, NULL, NULL);
        sched_yield();
    }
    return NULL;
}

/* Ten threads at once, whatever the policy: each tensor once, and once more after everything was dropped. */
static void test_policies_in_threads(void) {
    enum { N = 10 };
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (uint32_t policy = RF_LOAD_LAZY; policy <= RF_LOAD_CRITICAL_FIRST; policy++) {
            rig r;
            worker w[N];
            pthread_t threads[N];
            if (!open_rig(&r, mode, NULL, &(rf_model_desc){.load_policy = policy, .n_readers = 2})) return;
            uint32_t n = rf_model_get_info(r.m).n_tensors;
            for (uint32_t again = 1; again <= 2; again++) {
                for (int i = 0; i < N; i++) {
                    w[i] = (worker){.m = r.m, .mode = mode, .rounds = 1};
                    CHECK(pthread_create(&threads[i], NULL, evaluate, &w[i]) == 0, "thread");
                }
                for (int i = 0; i < N; i++) {
                    pthread_join(threads[i], NULL);
                    CHECK(w[i].result == RF_OK, "%s, policy %u: %s: %s", modes[mode], policy, rf_result_name(w[i].result), w[i].err.text);
                }
                rf_loading_stats st = rf_model_get_loading_stats(r.m);
                CHECK(st.loads == again * (uint64_t)n && st.tensors_loaded == n && st.failures == 0, "%s, policy %u: %llu loads of %u tensors",
                      modes[mode], policy, (unsigned long long)st.loads, n);
                CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).tensors_loaded == 0, "clear");
            }
            rig_close(&r);
        }
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
            if (!open_rig(&r, mode, &(rf_device_desc){.n_threads = 2, .budget_bytes = all * (uint64_t)percent / 100}, &(rf_model_desc){.n_readers = 2})) return;
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

/* While pinned memory is made other loads go on, and it is made once for all that want a place in it. If it cannot be had
 * the weights are read anew, and later it is tried again. */
static void test_pinned(void) {
    const uint64_t all = needed(NULLED);
    for (int failing = 0; failing < 2; failing++) {
        rig r;
        worker w = {.mode = NULLED, .rounds = 1};
        pthread_t thread;
        float got[2 * N_VOCAB];
        pinned_bytes = all;
        atomic_store(&pinned_asked, 0), atomic_store(&pinned_failing, failing), atomic_store(&pinned_late, 0);
        atomic_store(&pinned_wanted, 0), atomic_store(&pinned_go, 0);
        if (!watched_open(&r, &(rf_model_desc){.n_readers = 3, .budget_bytes = all * 7 / 10, .pinned_bytes = all}, 0)) return;
        w.m = r.m;
        REQUIRE(pthread_create(&thread, NULL, evaluate, &w) == 0, "thread");
        while (!atomic_load(&pinned_wanted)) sched_yield();
        CHECK(rf_model_load_tensor(r.m, "output_norm.weight", &r.err) == RF_OK && !atomic_load(&pinned_late), "another load waited: %s", r.err.text);
        atomic_store(&pinned_go, 1);
        pthread_join(thread, NULL);
        CHECK(w.result == RF_OK, "%s: %s", rf_result_name(w.result), w.err.text);
        for (int i = 0; i < 2; i++) CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[NULLED], sizeof got) == 0, "%s", r.err.text);
        const uint64_t bytes_read = rf_model_get_loading_stats(r.m).bytes_read;
        CHECK(run(r.m, got, &r.err) == RF_OK && rf_model_get_loading_stats(r.m).bytes_read == bytes_read, "read anew: %s", r.err.text);
        CHECK(atomic_load(&pinned_asked) == 1 + failing && r.m->store->pinned.n_blocks == 1, "asked for %d times", atomic_load(&pinned_asked));
        CHECK(rf_model_close(r.m, NULL) == RF_OK && watched_live(&r) == 0, "%lld objects are left", (long long)watched_live(&r));
        r.m = NULL;
        rig_close(&r);
    }
    pinned_bytes = 0;
}

static void *close_model(void *arg) {
    CHECK(rf_model_close((rf_model *)arg, NULL) == RF_OK, "busy");
    return NULL;
}

/* The memory of a model that is being closed is another one's when it has been given back, not before. */
static void test_closing(void) {
    const uint64_t all = needed(NULLED);
    rig r, other = {0};
    pthread_t thread;
    if (!watched_open(&r, NULL, 0)) return;
    r.d->budget_bytes = all + 4096;
    CHECK(rf_gguf_open(path, NULL, &other.g, &r.err) == RF_OK && rf_model_open(other.g, r.d, NULL, &other.m, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
    atomic_store(&watched_keep, 1);
    REQUIRE(pthread_create(&thread, NULL, close_model, r.m) == 0, "thread");
    while (!atomic_load(&watched_held)) sched_yield();
    CHECK(rf_model_preload_all(other.m, &r.err) == RF_OK, "%s", r.err.text);
    atomic_store(&watched_keep, 0);
    pthread_join(thread, NULL);
    CHECK(atomic_load(&watched_peak) <= all + 4096, "%llu bytes at once, of %llu", (unsigned long long)atomic_load(&watched_peak), (unsigned long long)all);
    r.m = NULL;
    CHECK(rf_model_close(other.m, NULL) == RF_OK && rf_gguf_close(other.g, NULL) == RF_OK && watched_live(&r) == 0, "busy");
    rig_close(&r);
}

/* A model that keeps the device to itself: its first report waits. */
typedef struct holder {
    rf_model *m;
    _Atomic int holding, go;
    rf_result result;
} holder;

static int hold(uint64_t done, uint64_t total, rf_string tensor, void *user) {
    holder *h = (holder *)user;
    (void)done, (void)total, (void)tensor;
    atomic_store(&h->holding, 1);
    while (!atomic_load(&h->go)) sched_yield();
    return 0;
}

static void *hold_device(void *arg) {
    holder *h = (holder *)arg;
    h->result = rf_model_preload_all(h->m, NULL);
    return NULL;
}

typedef struct asker {
    rf_model *m;
    rf_result result;
    _Atomic int done;
} asker;

static void *ask(void *arg) {
    asker *a = (asker *)arg;
    a->result = rf_model_preload_all(a->m, NULL);
    atomic_store(&a->done, 1);
    return NULL;
}

/* Who waits until another model gives its share back: a cancel ends the wait, clearing the model that waits does not. */
static void test_waiting_for_a_share(void) {
    for (int cancel = 0; cancel < 2; cancel++) {
        rig r, other;
        holder h = {0};
        asker a = {0};
        pthread_t threads[2];
        uint64_t all = needed(COPIED);
        rf_model_desc md = {.progress_fn = hold, .progress_user = &h};
        if (!open_rig(&r, COPIED, &(rf_device_desc){.n_threads = 2, .budget_bytes = all + 4096}, &md)) return;
        memset(&other, 0, sizeof other);
        CHECK(rf_gguf_open(path, &(rf_gguf_desc){.no_map = 1}, &other.g, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_open(other.g, r.d, NULL, &other.m, &r.err) == RF_OK, "%s", r.err.text);
        h.m = r.m, a.m = other.m;
        CHECK(pthread_create(&threads[0], NULL, hold_device, &h) == 0, "thread");
        while (!atomic_load(&h.holding)) sched_yield();
        CHECK(pthread_create(&threads[1], NULL, ask, &a) == 0, "thread");
        for (int i = 0; cancel ? !atomic_load(&a.done) : i < 20; i++) { /* it may not be waiting yet */
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            if (cancel) rf_model_cancel_loading(other.m);
            else rf_model_clear_device_cache(other.m, NULL, NULL);
        }
        CHECK(!atomic_load(&h.go) && atomic_load(&a.done) == cancel, "it did not wait");
        atomic_store(&h.go, 1);
        for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
        CHECK(h.result == RF_OK && a.result == (cancel ? RF_ERR_CANCELLED : RF_OK), "%s", rf_result_name(a.result));
        CHECK(rf_model_preload_all(other.m, &r.err) == RF_OK, "afterwards: %s", r.err.text);
        CHECK(rf_model_close(other.m, NULL) == RF_OK && rf_gguf_close(other.g, NULL) == RF_OK, "busy");
        rig_close(&r);
    }
}

/* A signal whose handler cancels arrives while its thread holds a lock of the store, or the device's. */
static rf_model *cancelled_model;
static int signal_in_write; /* or else where memory is asked for */

static void on_signal(int number) {
    (void)number;
    rf_model_cancel_loading(cancelled_model);
}
static rf_result signalling_write(rf_table *t, rf_queue *q, const rf_weight_part *part, rf_ticket *ticket, rf_error *err) {
    if (signal_in_write) raise(SIGUSR1);
    return rfi_cpu_api.weight_write(t, q, part, ticket, err);
}
static rf_result signalling_info(rf_dev *d, rf_device_info *out, rf_error *err) {
    if (!signal_in_write && cancelled_model) raise(SIGUSR1);
    return rfi_cpu_api.device_info(d, out, err);
}

static int child_cancels(void) {
    static rf_device_api api;
    rig r;
    signal(SIGUSR1, on_signal);
    if (!open_rig(&r, MAPPED, NULL, NULL)) return 2;
    api = *r.d->api;
    api.weight_write = signalling_write, api.device_info = signalling_info;
    r.d->api = &api;
    cancelled_model = r.m;
    if (rf_model_preload_all(r.m, &r.err) != RF_ERR_CANCELLED) return 3;
    cancelled_model = NULL;
    r.d->api = &rfi_cpu_api;
    if (rf_model_preload_all(r.m, &r.err) != RF_OK) return 4;
    rig_close(&r);
    return 0;
}

static void test_cancel_in_a_handler(void) {
    for (signal_in_write = 0; signal_in_write < 2; signal_in_write++) {
        int status = -1;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(60); /* who hangs is killed */
            _exit(child_cancels());
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "in %s: status %x", signal_in_write ? "a write" : "device_info", status);
    }
}

/* A resident tensor of many pieces after the streamed ones: who needs it finds it loading, by a reader or in pieces that
 * it took itself on the way, and waits. A race, so many times. */
static void test_wide_tensor_behind_the_ring(void) {
    mg_buf wide = {0};
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_session *s;
    rf_error err;
    rf_forecast all;
    mg_llama(&wide, &(mg_options){.type = MG_F32, .no_vocab = 1, .n_vocab = 40000, .n_layers = 12});
    REQUIRE(rf_gguf_open_memory(wide.data, wide.n, NULL, &g, &err) == RF_OK && rf_device_open("null", NULL, &d, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_model_open(g, d, NULL, &m, &err) == RF_OK && rf_model_forecast(m, NULL, &all, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
    for (uint32_t i = 0; i < 150; i++) {
        const rf_model_desc md = {.budget_bytes = all.weight_bytes - 200000, .n_readers = 1 + i % 3};
        REQUIRE(rf_model_open(g, d, &md, &m, &err) == RF_OK && rf_session_open(m, &(rf_session_desc){.n_ctx = 16}, &s, &err) == RF_OK, "%s", err.text);
        rf_result res = rf_session_forward(s, some_tokens, 1, NULL, &err);
        CHECK(res == RF_OK && rf_model_get_loading_stats(m).evictions > 0, "round %u: %s: %s", i, rf_result_name(res), err.text);
        rf_session_close(s, NULL);
        CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
    }
    CHECK(rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    mg_free(&wide);
}

/* Which experts of a layer are loaded, of one of its three tensors: a bit each. */
static uint32_t loaded_experts(rf_model *m, uint32_t layer, const char *tensor) {
    const rf_plan *plan = rf_model_get_plan(m);
    uint32_t bits = 0;
    char name[64];
    snprintf(name, sizeof name, "blk.%u.ffn_%s_exps.weight", layer, tensor);
    for (uint32_t slot = 0; slot < plan->n_slots; slot++) {
        const rf_plan_weight *w = rf_plan_weight_of(plan, slot);
        if (strcmp(w->name, name) == 0 && rfi_slot_is_ready(m->store, slot)) bits |= 1u << (slot - w->slot);
    }
    return bits;
}

static uint32_t count_bits(uint32_t bits) {
    uint32_t n = 0;
    for (; bits; bits &= bits - 1) n++;
    return n;
}

/* Without readers exactly the experts are loaded that the rows chose: gate, up and down of each. */
static void experts_on_demand(int mode, const float *bits_want) {
    rig r;
    float got[2 * N_VOCAB];
    if (!open_rig(&r, mode, NULL, &(rf_model_desc){.n_readers = 0})) return;
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, bits_want, sizeof got) == 0, "%s: %s", modes[mode], r.err.text);
    for (uint32_t layer = 0; layer < 2; layer++) {
        uint32_t gate = loaded_experts(r.m, layer, "gate");
        CHECK(count_bits(gate) >= 1 && count_bits(gate) <= 6 && (mode != NULLED || gate == 1), "layer %u: experts %x", layer, gate);
        CHECK(loaded_experts(r.m, layer, "up") == gate && loaded_experts(r.m, layer, "down") == gate, "not those of up and down");
    }
    rf_loading_stats st = rf_model_get_loading_stats(r.m);
    CHECK(mode == MAPPED || st.bytes_read == st.bytes_loaded, "%llu bytes read", (unsigned long long)st.bytes_read);
    CHECK(!rf_model_is_tensor_loaded(r.m, "blk.1.ffn_up_exps.weight") && !rf_model_is_layer_loaded(r.m, 1), "all are loaded");
    CHECK(rf_model_load_tensor(r.m, "blk.1.ffn_up_exps.weight", &r.err) == RF_OK && loaded_experts(r.m, 1, "up") == 0xffff, "%s", r.err.text);
    CHECK(rf_model_is_tensor_loaded(r.m, "blk.1.ffn_up_exps.weight"), "not loaded");
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, bits_want, sizeof got) == 0, "again: %s", r.err.text);
    uint32_t left = 1;
    CHECK(rf_model_clear_device_cache(r.m, &left, NULL) == RF_OK && left == 0 && loaded_experts(r.m, 0, "gate") == 0, "%u are left", left);
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, bits_want, sizeof got) == 0, "after clear: %s", r.err.text);
    rig_close(&r);
}

static void experts_budgets(int mode, const float *bits_want) {
    uint64_t all = needed(mode);
    int refused = 0;
    for (int percent = 100; percent > 0; percent -= 10)
        for (uint32_t readers = 0; readers < 4; readers += 3) {
            rig r;
            float got[2 * N_VOCAB];
            if (!open_rig(&r, mode, NULL, &(rf_model_desc){.budget_bytes = all * (uint64_t)percent / 100, .n_readers = readers})) return;
            rf_result res = run(r.m, got, &r.err);
            if (res == RF_OK) CHECK(memcmp(got, bits_want, sizeof got) == 0, "%s, %d %%, %u readers: other bits", modes[mode], percent, readers);
            else CHECK(res == RF_ERR_MEMORY && percent < 70 && strstr(r.err.text, "at least"), "%d %%: %s", percent, r.err.text);
            CHECK(rf_model_get_loading_stats(r.m).device_bytes <= all * (uint64_t)percent / 100, "beyond the budget");
            refused += res != RF_OK;
            rig_close(&r);
        }
    CHECK(refused > 0 && refused < 16, "%d budgets were refused", refused);
}

/* A model with experts: loaded as they are chosen, all at once, in any budget that holds a layer: the same bits. */
static void test_experts(void) {
    mg_buf dense = file;
    memset(&file, 0, sizeof file);
    mg_llama(&file, &(mg_options){.arch = "qwen3moe", .n_experts = 16, .n_used = 1, .type = MG_Q8_0, .seed = 3});
    REQUIRE(mg_write_file(&file, path), "no file");
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        rig r;
        static float all[2 * N_VOCAB], got[2 * N_VOCAB];
        if (!open_rig(&r, mode, NULL, NULL)) break;
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && run(r.m, all, &r.err) == RF_OK, "%s", r.err.text);
        rf_loading_stats st = rf_model_get_loading_stats(r.m);
        uint32_t n_slots = rf_model_get_plan(r.m)->n_slots, n_experts = 2 * 3 * 16, left = 0;
        CHECK(st.loads == n_slots, "a second load");
        CHECK(run(r.m, got, &r.err) == RF_OK && !memcmp(all, got, sizeof got), "%s", r.err.text);
        CHECK(rf_model_get_loading_stats(r.m).hits - st.hits == 4 * (uint64_t)(n_slots - n_experts), "experts are pinned one by one"); /* four evals */
        CHECK(r.m->store->cache.n_holding == 0 && rfi_store_hold_all(r.m->store), "not all are there");
        CHECK(rf_model_clear_device_cache(r.m, &left, NULL) == RF_OK && left == n_slots, "%u are left", left);
        rfi_store_release_all(r.m->store);
        CHECK(rf_model_clear_device_cache(r.m, &left, NULL) == RF_OK && left == 0 && !rfi_store_hold_all(r.m->store), "%u are left", left);
        CHECK(run(r.m, got, &r.err) == RF_OK && !memcmp(all, got, sizeof got), "%s", r.err.text);
        rig_close(&r);
        experts_on_demand(mode, all);
        experts_budgets(mode, all);
    }
    mg_free(&file);
    file = dense;
    CHECK(mg_write_file(&file, path), "no file");
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
                if (!open_rig(&r, NULLED, &(rf_device_desc){.fail_call = n, .fail_late = 1}, &(rf_model_desc){.n_readers = readers, .budget_bytes = all * (uint64_t)percent / 100})) continue;
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
            if (!open_rig(&r, mode, NULL, &md)) return;
            c.m = r.m;
            CHECK(pthread_create(&thread, NULL, cancel, &c) == 0, "thread");
            rf_result res = round & 1 ? rf_model_preload_all(r.m, &r.err) : run(r.m, got, &r.err);
            pthread_join(thread, NULL);
            CHECK(res == RF_ERR_CANCELLED || (res == RF_OK && readers), "%u readers: %s", readers, r.err.text);
            CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[mode], sizeof got) == 0, "afterwards: %s", r.err.text);
            rig_close(&r);
        }
}

static void *let_go(void *arg) {
    (void)arg;
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000000}, NULL); /* the run waits by then; if not, it passes */
    atomic_store(&pinned_go, 1);
    return NULL;
}

/* Cancelled while a reader is about to load a tensor of the stream: the run that comes next is not told of that load's end. */
static void test_cancelled_stream(void) {
    const uint64_t all = needed(NULLED);
    rig r;
    float got[2 * N_VOCAB];
    pthread_t thread;
    pinned_bytes = all;
    atomic_store(&pinned_failing, 0), atomic_store(&pinned_wanted, 0), atomic_store(&pinned_go, 0);
    if (!watched_open(&r, &(rf_model_desc){.n_readers = 1, .budget_bytes = all * 7 / 10, .pinned_bytes = all}, 0)) return;
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
    for (int i = 0; i < 10000 && !atomic_load(&pinned_wanted); i++) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    CHECK(atomic_load(&pinned_wanted), "no reader is at the stream");
    rf_model_cancel_loading(r.m);
    CHECK(pthread_create(&thread, NULL, let_go, NULL) == 0, "thread");
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[NULLED], sizeof got) == 0, "afterwards: %s", r.err.text);
    pthread_join(thread, NULL);
    rig_close(&r);
    pinned_bytes = 0;
}

/* The file changes while it is open: shortened or rewritten in place is an error, renamed over is none. */
static void test_changed_file(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (int how = 0; how < 3; how++) {
            rig r;
            float got[2 * N_VOCAB];
            char beside[sizeof path + 4];
            CHECK(mg_write_file(&file, path), "cannot write %s", path);
            if (!open_rig(&r, mode, NULL, NULL)) return;
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
    CHECK(mg_write_file(&file, path), "cannot write %s", path);
}

static int cut_short(uint64_t done, uint64_t total, rf_string tensor, void *user) {
    (void)total, (void)tensor;
    if (done > *(const uint64_t *)user / 3 && truncate(path, (off_t)file.n / 2) != 0) return 1;
    return 0;
}

/* Shortened by the callback of a load in progress: the load fails, in every mode, and works when the file is whole. */
static void test_cut_short_while_loading(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (int eval = 0; eval < 2; eval++) { /* without readers, which may be quicker than the callback */
            rig r;
            float got[2 * N_VOCAB];
            uint64_t total = file.n;
            CHECK(mg_write_file(&file, path), "cannot write %s", path);
            if (!open_rig(&r, mode, NULL, &(rf_model_desc){.progress_fn = cut_short, .progress_user = &total})) return;
            rf_result res = eval ? run(r.m, got, &r.err) : rf_model_preload_all(r.m, &r.err);
            CHECK(res == RF_ERR_IO && r.err.text[0], "%s: %s: %s", modes[mode], rf_result_name(res), r.err.text);
            CHECK(rf_model_get_loading_stats(r.m).failures > 0 && rf_model_get_loading_stats(r.m).tensors_loaded > 0, "what was loaded stays");
            rig_close(&r);
        }
    CHECK(mg_write_file(&file, path), "cannot write %s", path);
}

/* ---- the mapped file loses its end while it is in use ---- */

static rf_gguf *guarded;                    /* what the program's handler tells the library of */
static _Atomic(void *) foreign;             /* a page that is the program's own business       */
static _Atomic int n_handled, n_foreign;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    uintptr_t page = (uintptr_t)info->si_addr & ~(uintptr_t)4095;
    if (rf_gguf_handle_fault(guarded, info->si_addr)) {
        atomic_fetch_add(&n_handled, 1);
    } else if (page == (uintptr_t)atomic_load(&foreign)) {
        mmap((void *)page, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        atomic_fetch_add(&n_foreign, 1);
    } else {
        _exit(3);
    }
}

/* With a handler of the program's that asks the library, the running evaluation fails, sequences stay, the process lives;
 * a fault elsewhere stays the program's. */
static void test_fault(void) {
    rig r;
    rf_session *s;
    float *logits, got[2 * N_VOCAB];
    struct sigaction action, before;
    const char *name = strrchr(path, '/') + 1;
    if (!open_rig(&r, MAPPED, NULL, NULL)) return;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO;
    guarded = r.g;
    REQUIRE(sigaction(SIGBUS, &action, &before) == 0, "sigaction");
    CHECK(rf_session_open(r.m, &(rf_session_desc){.n_ctx = 16}, &s, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_forward(s, some_tokens, 5, &logits, &r.err) == RF_OK && memcmp(logits, want[MAPPED], N_VOCAB * sizeof *logits) == 0, "%s", r.err.text);
    CHECK(!rf_gguf_handle_fault(r.g, &r) && !rf_gguf_handle_fault(NULL, &r) && rf_session_forward(s, some_tokens, 1, NULL, &r.err) == RF_OK, "not ours: %s", r.err.text);
    CHECK(rf_session_truncate(s, 0, 5, NULL, NULL) == RF_OK && truncate(path, (off_t)file.n - 1) == 0, "truncate");
    CHECK(rf_session_forward(s, some_tokens, 1, NULL, &r.err) == RF_ERR_IO && r.err.where == file.n - 1 && atomic_load(&n_handled) == 0, "no page is gone: %s", r.err.text);
    CHECK(truncate(path, (off_t)file.n / 2) == 0, "truncate");
    rf_result res = rf_session_forward(s, some_tokens, 1, &logits, &r.err);
    CHECK(res == RF_ERR_IO && !logits && strstr(r.err.text, name), "%s: %s", rf_result_name(res), r.err.text);
    CHECK(r.err.where >= file.n / 2 && r.err.where < file.n && atomic_load(&n_handled) > 0, "at byte %llu of %zu", (unsigned long long)r.err.where, file.n / 2);
    CHECK(rf_session_length(s, 0) == 5 && rft_argmax(s, 0) == -1, "the sequence changed");
    CHECK(rf_session_forward(s, some_tokens, 1, NULL, &r.err) == RF_ERR_IO, "later: %s", r.err.text);
    CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_preload_all(r.m, &r.err) == RF_ERR_IO, "reloaded: %s", r.err.text);
    rf_session_close(s, NULL);

    int fd = open(path, O_RDONLY);
    volatile char *other = (volatile char *)mmap(NULL, file.n, PROT_READ, MAP_SHARED, fd, 0);
    REQUIRE(fd >= 0 && (void *)(uintptr_t)other != MAP_FAILED, "mmap");
    atomic_store(&foreign, (void *)((uintptr_t)other + (file.n - 1) / 4096 * 4096));
    CHECK(other[file.n - 1] == 0 && atomic_load(&n_foreign) == 1, "%d faults reached the program's own part", atomic_load(&n_foreign));
    munmap((void *)(uintptr_t)other, file.n);
    close(fd);
    rig_close(&r);

    CHECK(mg_write_file(&file, path) && open_rig(&r, MAPPED, NULL, NULL), "open again");
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want[MAPPED], sizeof got) == 0, "%s", r.err.text);
    sigaction(SIGBUS, &before, NULL);
    rig_close(&r);
}

/* What every mode gives without readers and budgets; the mapped and the copied weights the same. */
static void reference(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        rig r;
        if (!open_rig(&r, mode, NULL, NULL)) return;
        CHECK(run(r.m, want[mode], &r.err) == RF_OK, "%s", r.err.text);
        rig_close(&r);
    }
    CHECK(memcmp(want[MAPPED], want[COPIED], sizeof want[0]) == 0, "copied weights give other bits");
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 8});
    if (!mg_write_file(&file, path)) return printf("cannot write %s\n", path), 1;
    reference();
    RUN(test_policies);
    RUN(test_policies_in_threads);
    RUN(test_budgets);
    RUN(test_experts);
    RUN(test_forecast);
    RUN(test_ring_size);
    RUN(test_clear_waits_for_memory);
    RUN(test_sharing);
    RUN(test_threads);
    RUN(test_waiting_for_a_share);
    RUN(test_cancel_in_a_handler);
    RUN(test_pinned);
    RUN(test_closing);
    RUN(test_wide_tensor_behind_the_ring);
    RUN(test_late_failure);
    RUN(test_cancel);
    RUN(test_cancelled_stream);
    RUN(test_changed_file);
    RUN(test_cut_short_while_loading);
    RUN(test_fault);
    unlink(path);
    mg_free(&file);
    RFT_END();
}
