/* The once-cell and the thread pool, alone. Both are made of races, so the tests are too: run them under ThreadSanitizer
 * and AddressSanitizer as well. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "rf_memory.h"
#include "rf_test.h"

#define MAX_THREADS 16

static void sleep_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* ---- the once-cell ---- */

/* A lazy object: a canary that exists while the cell is READY. */
#define CANARY 0x1234567890abcdefu

typedef struct object {
    rfi_cell cell;
    rfi_monitor monitor;
    uint64_t *value;         /* owned by whoever moves the cell */
    _Atomic int64_t loads, failures, evictions;
    _Atomic int blocked;     /* loads wait while this is set    */
    _Atomic int loading;     /* threads inside load             */
    rf_result outcome;       /* of loads                        */
    int fail_one_in;         /* of loads, at random; 0: never   */
    rf_result inner;         /* of an acquire inside the load   */
    int reenter;
} object;

static void object_open(object *o) {
    memset(o, 0, sizeof *o);
    rfi_monitor_init(&o->monitor);
}
static void object_close(object *o) {
    free(o->value);
    rfi_monitor_destroy(&o->monitor);
}

static rf_result object_load(void *ctx, rf_error *err) {
    object *o = (object *)ctx;
    CHECK(atomic_fetch_add(&o->loading, 1) == 0, "two loads at once");
    int64_t n = atomic_fetch_add(&o->loads, 1) + 1;
    while (atomic_load(&o->blocked)) sched_yield();
    if (o->reenter) o->inner = rfi_cell_acquire(&o->cell, &o->monitor, object_load, o, NULL, err);
    rf_result r = o->outcome;
    if (o->fail_one_in && n % o->fail_one_in == 0) r = RF_ERR_IO;
    if (r == RF_OK) {
        CHECK(o->value == NULL, "loaded over a value");
        o->value = (uint64_t *)malloc(sizeof *o->value);
        *o->value = CANARY;
    } else {
        atomic_fetch_add(&o->failures, 1);
        rfi_fail_sys(err, r, 42, (uint64_t)n, "load %lld fails", (long long)n);
    }
    atomic_fetch_sub(&o->loading, 1);
    return r;
}

static rf_result object_acquire(object *o, int *loaded, rf_error *err) {
    rfi_clear(err);
    return rfi_cell_acquire(&o->cell, &o->monitor, object_load, o, loaded, err);
}

static int object_evict(object *o) {
    if (!rfi_cell_try_evict(&o->cell)) return 0;
    *o->value = 0; /* whoever still looks sees it */
    free(o->value);
    o->value = NULL;
    atomic_fetch_add(&o->evictions, 1);
    rfi_cell_evicted(&o->cell, &o->monitor);
    return 1;
}

static uint64_t pins(const object *o) { return atomic_load(&o->cell.word) / RFI_PIN; }

static int n_waiters(object *o) {
    int n = 0;
    pthread_mutex_lock(&o->monitor.mutex);
    for (rfi_waiter *w = o->cell.waiters; w; w = w->next) n++;
    pthread_mutex_unlock(&o->monitor.mutex);
    return n;
}

static void test_cell_error_then_success(void) {
    object o;
    rf_error err;
    int loaded = 9;
    object_open(&o);
    CHECK(!rfi_cell_is_ready(&o.cell) && !rfi_cell_try_pin(&o.cell, &o.monitor) && atomic_load(&o.cell.word) == 0, "a new cell");
    CHECK(!rfi_cell_try_evict(&o.cell), "nothing to evict");
    o.outcome = RF_ERR_IO;
    for (int i = 1; i <= 3; i++) {
        CHECK(object_acquire(&o, &loaded, &err) == RF_ERR_IO && !loaded, "attempt %d", i);
        CHECK(err.code == RF_ERR_IO && err.sys == 42 && err.where == (uint64_t)i, "attempt %d: %s", i, err.text);
        CHECK(atomic_load(&o.cell.word) == 0 && !rfi_cell_is_ready(&o.cell), "unloaded again");
    }
    CHECK(object_acquire(&o, NULL, NULL) == RF_ERR_IO, "without an error to fill");
    o.outcome = RF_OK;
    CHECK(object_acquire(&o, &loaded, &err) == RF_OK && loaded && err.code == RF_OK, "%s", err.text);
    CHECK(rfi_cell_is_ready(&o.cell) && pins(&o) == 1 && atomic_load(&o.loads) == 5, "loaded and pinned once");
    CHECK(object_acquire(&o, &loaded, &err) == RF_OK && !loaded && pins(&o) == 2 && atomic_load(&o.loads) == 5, "found loaded");
    rfi_cell_unpin(&o.cell, &o.monitor);
    rfi_cell_unpin(&o.cell, &o.monitor);
    CHECK(pins(&o) == 0 && rfi_cell_is_ready(&o.cell), "unpinned and there");
    object_close(&o);
}

static void test_cell_pins_block_eviction(void) {
    object o;
    rf_error err;
    int loaded;
    object_open(&o);
    CHECK(object_acquire(&o, NULL, &err) == RF_OK && rfi_cell_try_pin(&o.cell, &o.monitor), "%s", err.text);
    CHECK(!object_evict(&o), "two pins");
    rfi_cell_unpin(&o.cell, &o.monitor);
    CHECK(!object_evict(&o), "one pin");
    rfi_cell_unpin(&o.cell, &o.monitor);
    CHECK(object_evict(&o) && !rfi_cell_is_ready(&o.cell) && !object_evict(&o), "no pin");
    CHECK(!rfi_cell_try_pin(&o.cell, &o.monitor) && atomic_load(&o.cell.word) == 0, "a failed pin leaves nothing");
    CHECK(object_acquire(&o, &loaded, &err) == RF_OK && loaded && atomic_load(&o.loads) == 2, "loads again");
    rfi_cell_unpin(&o.cell, &o.monitor);
    object_close(&o);
}

static void test_cell_reentry(void) {
    object o;
    rf_error err;
    object_open(&o);
    o.reenter = 1;
    CHECK(object_acquire(&o, NULL, &err) == RF_OK && o.inner == RF_ERR_BUSY, "%s: %s", rf_result_name(o.inner), err.text);
    CHECK(atomic_load(&o.loads) == 1 && pins(&o) == 1, "loaded once");
    rfi_cell_unpin(&o.cell, &o.monitor);
    object_close(&o);
}

typedef struct user {
    object *o;
    rf_result result;
    rf_error err;
    int loaded;
    uint64_t seed;
    _Atomic int *stop;
    uint64_t n_used, n_failed;
} user;

static void *user_acquire(void *arg) {
    user *u = (user *)arg;
    u->result = object_acquire(u->o, &u->loaded, &u->err);
    if (u->result == RF_OK && *u->o->value != CANARY) u->result = RF_ERR_DEVICE;
    return NULL;
}

/* N threads ask at once; the load is held back until all of them sleep on it. */
static void many_ask(object *o, user *u, int n) {
    pthread_t threads[MAX_THREADS];
    atomic_store(&o->blocked, 1);
    for (int i = 0; i < n; i++) {
        u[i] = (user){.o = o};
        CHECK(pthread_create(&threads[i], NULL, user_acquire, &u[i]) == 0, "thread");
    }
    while (n_waiters(o) < n - 1) sched_yield();
    atomic_store(&o->blocked, 0);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
}

static void test_cell_one_load(void) {
    object o;
    user u[MAX_THREADS];
    int loaded = 0;
    object_open(&o);
    many_ask(&o, u, MAX_THREADS);
    for (int i = 0; i < MAX_THREADS; i++) {
        CHECK(u[i].result == RF_OK, "thread %d: %s", i, u[i].err.text);
        loaded += u[i].loaded;
    }
    CHECK(loaded == 1 && atomic_load(&o.loads) == 1 && pins(&o) == MAX_THREADS, "%d loaded, %llu pins", loaded, (unsigned long long)pins(&o));
    for (int i = 0; i < MAX_THREADS; i++) rfi_cell_unpin(&o.cell, &o.monitor);
    CHECK(object_evict(&o), "nobody holds it");
    object_close(&o);
}

static void test_cell_waiters_get_the_error(void) {
    object o;
    user u[MAX_THREADS];
    object_open(&o);
    for (int round = 1; round <= 3; round++) {
        o.outcome = RF_ERR_DEVICE;
        many_ask(&o, u, MAX_THREADS);
        for (int i = 0; i < MAX_THREADS; i++)
            CHECK(u[i].result == RF_ERR_DEVICE && u[i].err.sys == 42 && u[i].err.where == (uint64_t)round && !u[i].loaded, "thread %d: %s", i, u[i].err.text);
        CHECK(atomic_load(&o.loads) == round && atomic_load(&o.cell.word) == 0, "one attempt for all");
    }
    o.outcome = RF_OK;
    many_ask(&o, u, 4);
    CHECK(u[0].result == RF_OK && u[3].result == RF_OK && pins(&o) == 4, "then it works");
    for (int i = 0; i < 4; i++) rfi_cell_unpin(&o.cell, &o.monitor);
    object_close(&o);
}

/* Who comes during an eviction waits for its end and loads again. */
static void test_cell_during_eviction(void) {
    object o;
    user u = {.o = &o};
    pthread_t thread;
    object_open(&o);
    CHECK(object_acquire(&o, NULL, NULL) == RF_OK, "load");
    rfi_cell_unpin(&o.cell, &o.monitor);
    CHECK(rfi_cell_try_evict(&o.cell), "evict");
    CHECK(!rfi_cell_is_ready(&o.cell) && !rfi_cell_try_pin(&o.cell, &o.monitor) && !rfi_cell_try_evict(&o.cell), "neither pinned nor evicted twice");
    CHECK(pthread_create(&thread, NULL, user_acquire, &u) == 0, "thread");
    while (n_waiters(&o) < 1) sched_yield();
    CHECK(atomic_load(&o.loads) == 1, "it does not load yet");
    free(o.value);
    o.value = NULL;
    rfi_cell_evicted(&o.cell, &o.monitor);
    pthread_join(thread, NULL);
    CHECK(u.result == RF_OK && u.loaded && atomic_load(&o.loads) == 2 && pins(&o) == 1, "%s", u.err.text);
    rfi_cell_unpin(&o.cell, &o.monitor);
    object_close(&o);
}

/* Threads that use, and threads that evict, as fast as they can. */
static void *user_race(void *arg) {
    user *u = (user *)arg;
    uint64_t x = u->seed * 2654435761u + 1;
    while (!atomic_load(u->stop)) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        object *o = &u->o[x >> 40 & 3];
        if ((x >> 33 & 7) == 0) {
            object_evict(o);
            continue;
        }
        rf_error err;
        rf_result r = object_acquire(o, NULL, &err);
        if (r != RF_OK) {
            CHECK(r == RF_ERR_IO && err.code == r && err.sys == 42, "%s: %s", rf_result_name(r), err.text);
            u->n_failed++;
            continue;
        }
        for (int i = 0; i < 4; i++) CHECK(*o->value == CANARY, "evicted under its user");
        if ((x >> 50 & 63) == 0) sched_yield();
        CHECK(*o->value == CANARY, "evicted under its user");
        rfi_cell_unpin(&o->cell, &o->monitor);
        u->n_used++;
    }
    return NULL;
}

static void test_cell_races(void) {
    object o[4];
    user u[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    _Atomic int stop = 0;
    uint64_t used = 0, failed = 0, evicted = 0;
    for (int i = 0; i < 4; i++) object_open(&o[i]), o[i].fail_one_in = 5;
    for (int i = 0; i < MAX_THREADS; i++) {
        u[i] = (user){.o = o, .seed = (uint64_t)i, .stop = &stop};
        CHECK(pthread_create(&threads[i], NULL, user_race, &u[i]) == 0, "thread");
    }
    for (int i = 0; i < 60 && evicted <= 100; i++) { /* on a loaded machine little happens in a second */
        sleep_ms(1000);
        evicted = 0;
        for (int i = 0; i < 4; i++) evicted += (uint64_t)atomic_load(&o[i].evictions);
    }
    atomic_store(&stop, 1);
    evicted = 0;
    for (int i = 0; i < MAX_THREADS; i++) {
        pthread_join(threads[i], NULL);
        used += u[i].n_used;
        failed += u[i].n_failed;
    }
    for (int i = 0; i < 4; i++) {
        int64_t ready = rfi_cell_is_ready(&o[i].cell);
        evicted += (uint64_t)atomic_load(&o[i].evictions);
        CHECK(pins(&o[i]) == 0 && n_waiters(&o[i]) == 0, "%llu pins, %d waiters are left", (unsigned long long)pins(&o[i]), n_waiters(&o[i]));
        CHECK(atomic_load(&o[i].loads) == atomic_load(&o[i].failures) + atomic_load(&o[i].evictions) + ready, "loads do not add up");
        CHECK(ready == (o[i].value != NULL), "ready without a value");
        object_close(&o[i]);
    }
    printf("    cells: %llu uses, %llu evictions, %llu errors\n", (unsigned long long)used, (unsigned long long)evicted, (unsigned long long)failed);
    CHECK(used > 1000 && evicted > 100 && failed > 10, "too little happened");
}

/* ---- the thread pool ---- */

static const rf_allocator plain = {rfi_default_alloc, rfi_default_free, NULL};

#define MAX_CHUNKS 1000u

typedef struct job {
    rfi_pool *pool;
    _Atomic uint32_t runs[MAX_CHUNKS]; /* of each chunk                         */
    _Atomic int busy[MAX_THREADS];     /* a thread number has one user at a time */
    struct job *inner;
    uint32_t n_inner;
    _Atomic uint32_t started;
    uint32_t meet; /* chunks wait until so many of them run */
} job;

static void job_chunk(void *ctx, uint32_t chunk, uint32_t thread) {
    job *j = (job *)ctx;
    if (thread >= j->pool->n_threads || chunk >= MAX_CHUNKS) {
        CHECK(0, "chunk %u on thread %u of %u", chunk, thread, j->pool->n_threads);
        return;
    }
    CHECK(atomic_exchange(&j->busy[thread], 1) == 0, "thread number %u is used twice", thread);
    atomic_fetch_add(&j->runs[chunk], 1);
    atomic_fetch_add(&j->started, 1);
    double until = rfi_now() + 20;
    while (j->meet && atomic_load(&j->started) < j->meet && rfi_now() < until) sched_yield();
    if (j->inner && chunk == 1) rfi_pool_run(j->pool, job_chunk, j->inner, j->n_inner);
    atomic_store(&j->busy[thread], 0);
}

static void job_run(job *j, uint32_t n_chunks, const char *what) {
    for (uint32_t i = 0; i < n_chunks; i++) atomic_store(&j->runs[i], 0);
    atomic_store(&j->started, 0);
    rfi_pool_run(j->pool, job_chunk, j, n_chunks);
    for (uint32_t i = 0; i < n_chunks; i++)
        CHECK(atomic_load(&j->runs[i]) == 1, "%s: chunk %u of %u ran %u times", what, i, n_chunks, atomic_load(&j->runs[i]));
}

static job *job_new(rfi_pool *p) {
    job *j = (job *)calloc(1, sizeof *j);
    j->pool = p;
    return j;
}

static const uint32_t thread_counts[] = {1, 2, 3, 8};

static void test_pool_every_chunk_once(void) {
    static const uint32_t n_chunks[] = {0, 1, 2, 3, 7, 64, 1000};
    for (size_t t = 0; t < RFI_COUNT(thread_counts); t++) {
        rfi_pool p;
        REQUIRE(rfi_pool_init(&p, &plain, thread_counts[t], NULL) == RF_OK, "init");
        CHECK(p.n_started == thread_counts[t] - 1, "%u workers", p.n_started);
        job *j = job_new(&p);
        for (int round = 0; round < 50; round++)
            for (size_t c = 0; c < RFI_COUNT(n_chunks); c++) job_run(j, n_chunks[c], "one caller");
        free(j);
        rfi_pool_destroy(&p);
    }
}

/* The threads really work, also after they went to sleep: chunks that wait for each other all run at once. */
static void test_pool_threads_take_part(void) {
    rfi_pool p;
    REQUIRE(rfi_pool_init(&p, &plain, 4, NULL) == RF_OK, "init");
    job *j = job_new(&p);
    j->meet = 4;
    for (int round = 0; round < 20; round++) {
        if (round % 4 == 3) sleep_ms(5); /* asleep by now */
        double start = rfi_now();
        job_run(j, 4, "meeting");
        CHECK(rfi_now() - start < 15, "round %d: a sleeping thread was not woken", round);
    }
    free(j);
    rfi_pool_destroy(&p);
}

static void test_pool_many_short_jobs(void) {
    const int n = RFT_SANITIZED ? 3000 : 30000;
    for (size_t t = 1; t < RFI_COUNT(thread_counts); t++) {
        rfi_pool p;
        REQUIRE(rfi_pool_init(&p, &plain, thread_counts[t], NULL) == RF_OK, "init");
        job *j = job_new(&p);
        for (int i = 0; i < n; i++) job_run(j, 2 + (uint32_t)i % 5, "short jobs");
        free(j);
        rfi_pool_destroy(&p);
    }
}

typedef struct caller {
    rfi_pool *pool;
    int n;
} caller;

static void *caller_thread(void *arg) {
    caller *c = (caller *)arg;
    job *j = job_new(c->pool);
    for (int i = 0; i < c->n; i++) job_run(j, 1 + (uint32_t)i % 40, "callers at once");
    free(j);
    return NULL;
}

static void test_pool_callers_at_once(void) {
    rfi_pool p;
    pthread_t threads[4];
    caller c = {.pool = &p, .n = RFT_SANITIZED ? 500 : 3000};
    REQUIRE(rfi_pool_init(&p, &plain, 3, NULL) == RF_OK, "init");
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, caller_thread, &c) == 0, "thread");
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    rfi_pool_destroy(&p);
}

/* A chunk may run a job of its own: in its thread alone. */
static void test_pool_nested(void) {
    rfi_pool p;
    REQUIRE(rfi_pool_init(&p, &plain, 3, NULL) == RF_OK, "init");
    job *outer = job_new(&p), *inner = job_new(&p);
    outer->inner = inner;
    outer->n_inner = 50;
    for (int round = 0; round < 200; round++) {
        for (uint32_t i = 0; i < 50; i++) atomic_store(&inner->runs[i], 0);
        job_run(outer, 6, "outer");
        for (uint32_t i = 0; i < 50; i++) CHECK(atomic_load(&inner->runs[i]) == 1, "inner chunk %u ran %u times", i, atomic_load(&inner->runs[i]));
    }
    free(outer), free(inner);
    rfi_pool_destroy(&p);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Idle threads sleep: 7 spinning ones would use up to 2.1 s of CPU in 300 ms, sleeping ones none. */
static void test_pool_idle(void) {
    rfi_pool p;
    REQUIRE(rfi_pool_init(&p, &plain, 8, NULL) == RF_OK, "init");
    job *j = job_new(&p);
    job_run(j, 100, "before");
    double used = INFINITY;
    for (int i = 0; i < 5 && used >= 0.03; i++) { /* they look for work for a while first, a long one if others use the cores */
        sleep_ms(20);
        double before = cpu_seconds();
        sleep_ms(300);
        used = cpu_seconds() - before;
    }
    CHECK(used < 0.03, "idle threads used %.3f s of CPU in 0.3 s", used);
    job_run(j, 100, "after");
    free(j);
    rfi_pool_destroy(&p);
}

static void test_pool_destroy(void) {
    for (int round = 0; round < 40; round++) {
        rfi_pool p;
        REQUIRE(rfi_pool_init(&p, &plain, thread_counts[round % 4], NULL) == RF_OK, "init");
        job *j = job_new(&p);
        if (round % 3) job_run(j, 20, "before destroy"); /* while they still look for work */
        if (round % 3 == 2) sleep_ms(2);                 /* or sleep */
        free(j);
        rfi_pool_destroy(&p);
    }
}

static void test_pool_memory(void) {
    rfi_pool p;
    memory none = {.fail_at = 1, .forever = 1}, mem = {0};
    const rf_allocator fails = memory_allocator(&none), counts = memory_allocator(&mem);
    rf_error err;
    rfi_clear(&err);
    CHECK(rfi_pool_init(&p, &fails, 4, &err) == RF_ERR_MEMORY && err.code == RF_ERR_MEMORY, "%s", err.text);
    CHECK(rfi_pool_init(&p, &counts, 4, &err) == RF_OK, "init");
    rfi_pool_destroy(&p);
    CHECK(mem.live == 0, "%lld blocks are left", (long long)mem.live);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    RUN(test_cell_error_then_success);
    RUN(test_cell_pins_block_eviction);
    RUN(test_cell_reentry);
    RUN(test_cell_one_load);
    RUN(test_cell_waiters_get_the_error);
    RUN(test_cell_during_eviction);
    RUN(test_cell_races);
    RUN(test_pool_every_chunk_once);
    RUN(test_pool_threads_take_part);
    RUN(test_pool_many_short_jobs);
    RUN(test_pool_callers_at_once);
    RUN(test_pool_nested);
    RUN(test_pool_idle);
    RUN(test_pool_destroy);
    RUN(test_pool_memory);
    RFT_END();
}
