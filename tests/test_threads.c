/* test_threads.c: threads that do everything at once to some files, one device and the models on them: sessions are
 * opened, run, cancelled and closed, weights loaded, dropped and cancelled, models and tokenizers opened and closed,
 * and what is in use is closed, which must be refused. With budgets models compete for memory. Whatever the order, every
 * evaluation that succeeds gives the same bits. Meant for ThreadSanitizer; -DRF_ROUNDS=5000 for a long run. */
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <unistd.h>

#ifndef RF_ROUNDS
#ifdef RF_TEST_EMU
#define RF_ROUNDS 6
#else
#define RF_ROUNDS 60 /* of each thread, in each mode */
#endif
#endif
#define N_THREADS 6
#define N_VOCAB 320

static const int32_t some_tokens[5] = {7, 61, 12, 0, 39};

/* A dense model, a mixture, and one with recurrent states. */
enum { DENSE, MIXTURE, RECURRENT, N_MODELS };
static char dense[] = "/tmp/rf_threads_XXXXXX", mixture[] = "/tmp/rf_threads_XXXXXX";
static const char *const paths[N_MODELS] = {dense, mixture, "tests/family/qwen35.gguf"};

/* Of the weights: room for all; each model has a budget of its own; all models share the device's. */
enum { NO_BUDGET, MODEL_BUDGETS, DEVICE_BUDGET, N_BUDGETS };
static const char *const budgets[] = {"no budget", "a budget each", "one budget for all"};

typedef struct subject {
    rf_gguf *g;
    rf_model *m;     /* of all threads; a session of the main thread is open on it */
    rf_session *s;
    uint32_t n_vocab;
    float want[N_VOCAB];
} subject;

typedef struct shared {
    rf_device *d;
    subject of[N_MODELS];
    int budget;
    _Atomic unsigned done[16]; /* per action: how often it did what it is for */
} shared;

typedef struct worker {
    shared *all;
    subject *on;     /* the model of the action */
    uint64_t seed;
    int rounds;
    char wrong[700]; /* the first thing that went wrong */
} worker;

__attribute__((format(printf, 2, 3)))
static void wrong(worker *w, const char *format, ...) {
    va_list args;
    if (w->wrong[0]) return;
    va_start(args, format);
    vsnprintf(w->wrong, sizeof w->wrong, format, args);
    va_end(args);
}

/* Loading may be cancelled by another thread at any time, and a session by any. */
static int passes(worker *w, const char *what, rf_result r, const rf_error *err) {
    if (r == RF_OK) return 1;
    if (r != RF_ERR_CANCELLED) wrong(w, "%s: %s: %s", what, rf_result_name(r), err->text);
    return 0;
}

/* logits of the last of some_tokens in a fresh session, [N_VOCAB] */
static rf_result evaluate(rf_model *m, float *out, rf_error *err) {
    rf_session *s = NULL;
    float *logits;
    rf_result r = rf_session_open(m, &(rf_session_desc){.n_ctx = 16, .n_batch = 2}, &s, err);
    if (r == RF_OK) r = rf_session_forward(s, some_tokens, 5, &logits, err);
    if (r == RF_OK) memcpy(out, logits, rf_model_get_info(m).n_vocab * sizeof *out);
    rf_session_close(s, NULL);
    return r;
}

static int same_bits(worker *w, rf_model *m) {
    float got[N_VOCAB];
    rf_error err;
    if (!passes(w, "evaluate", evaluate(m, got, &err), &err)) return 0;
    if (memcmp(got, w->on->want, w->on->n_vocab * sizeof *got) != 0) wrong(w, "other bits");
    return 1;
}

/* Open a model of the same file and use it, or not; close it. */
static int own_model(worker *w, mg_rng *rng) {
    rf_error err;
    rf_model *m = NULL;
    int done = 0;
    if (passes(w, "rf_model_open", rf_model_open(w->on->g, w->all->d, NULL, &m, &err), &err))
        done = mg_below(rng, 2) ? same_bits(w, m) : 1;
    if (rf_model_close(m, &err) != RF_OK) wrong(w, "own model: %s", err.text);
    return done;
}

static int own_tokenizer(worker *w, mg_rng *rng) {
    static const char text[] = "hello the world";
    rf_tokenizer *mine = NULL;
    const rf_tokenizer *t;
    int32_t ids[32];
    uint32_t n = 0;
    rf_error err;
    rf_result r = rf_model_get_tokenizer(w->on->m, &t, &err); /* the first one builds it */
    if (r == RF_OK && mg_below(rng, 2)) r = rf_tokenizer_open(w->on->g, NULL, &mine, &err), t = mine;
    if (r == RF_OK) r = rf_tokenize(t, (rf_string){text, sizeof text - 1}, RF_TOKENIZE_ADD, ids, 32, &n, &err);
    rf_tokenizer_close(mine, NULL);
    return passes(w, "tokenizer", r, &err) && n > 0;
}

/* A session that is cancelled before or after it runs, and used on. */
static int cancelled_session(worker *w) {
    rf_session *s = NULL;
    rf_error err;
    float *logits;
    rf_result r = rf_session_open(w->on->m, &(rf_session_desc){.n_ctx = 16, .n_batch = 2}, &s, &err);
    if (passes(w, "rf_session_open", r, &err)) {
        rf_session_cancel(s);
        r = rf_session_forward(s, some_tokens, 5, &logits, &err);
        if (r != RF_ERR_CANCELLED || rf_session_length(s, 0) != 0) wrong(w, "cancelled: %s", rf_result_name(r));
        r = rf_session_forward(s, some_tokens, 5, &logits, &err);
        if (passes(w, "after a cancel", r, &err) && memcmp(logits, w->on->want, w->on->n_vocab * sizeof *logits) != 0)
            wrong(w, "other bits after a cancel");
    }
    rf_session_close(s, NULL);
    return r == RF_OK;
}

/* What others use is not closed. */
static int close_in_use(worker *w) {
    rf_error err;
    if (rf_model_close(w->on->m, &err) != RF_ERR_BUSY || !err.text[0]) wrong(w, "a model in use was closed");
    if (rf_device_close(w->all->d, &err) != RF_ERR_BUSY || !err.text[0]) wrong(w, "a device in use was closed");
    if (rf_gguf_close(w->on->g, &err) != RF_ERR_BUSY || !err.text[0]) wrong(w, "a file in use was closed");
    return 1;
}

static int look(worker *w, mg_rng *rng) {
    const rf_model_info info = rf_model_get_info(w->on->m);
    rf_loading_stats st = rf_model_get_loading_stats(w->on->m);
    rf_forecast f;
    rf_error err;
    const uint32_t layer = mg_below(rng, info.n_layers);
    rf_model_is_tensor_loaded(w->on->m, "token_embd.weight");
    rf_model_is_layer_loaded(w->on->m, layer);
    rf_model_get_expert_stats(w->on->m, layer);
    if (rf_model_forecast(w->on->m, NULL, &f, &err) != RF_OK) wrong(w, "forecast: %s", err.text);
    if (st.tensors_loaded > info.n_tensors)
        wrong(w, "%llu of %u tensors are loaded", (unsigned long long)st.tensors_loaded, info.n_tensors);
    return rf_device_get_info(w->all->d).lost == 0;
}

/* Any of the file. One beyond the budget is refused by name, as are all experts of a mixture whose experts do not fit. */
static int load_tensor(worker *w, mg_rng *rng) {
    rf_tensor_info t;
    char name[80];
    rf_error err;
    rf_gguf_get_tensor(w->on->g, mg_below(rng, (uint32_t)rf_gguf_get_info(w->on->g).n_tensors), &t, NULL);
    snprintf(name, sizeof name, "%.*s", (int)t.name.len, t.name.data);
    rf_result r = rf_model_load_tensor(w->on->m, name, &err);
    if (w->all->budget && r == RF_ERR_MEMORY && strstr(err.text, name)) return 1;
    return passes(w, "rf_model_load_tensor", r, &err);
}

enum { EVALUATE, OWN_MODEL, OWN_TOKENIZER, CANCELLED, LOAD_TENSOR, LOAD_LAYER, LOAD_ALL, CLEAR, CANCEL_LOADING,
       CLOSE_IN_USE, LOOK, N_ACTIONS };

static int act(worker *w, int action, mg_rng *rng) {
    rf_model *m = w->on->m;
    uint32_t layer = mg_below(rng, rf_model_get_info(m).n_layers), left;
    rf_error err;
    switch (action) {
    case EVALUATE: return same_bits(w, m);
    case OWN_MODEL: return own_model(w, rng);
    case OWN_TOKENIZER: return own_tokenizer(w, rng);
    case CANCELLED: return cancelled_session(w);
    case LOAD_TENSOR: return load_tensor(w, rng);
    case LOAD_LAYER: return passes(w, "rf_model_preload_layers", rf_model_preload_layers(m, &layer, 1, &err), &err);
    case LOAD_ALL: return passes(w, "rf_model_preload_all", rf_model_preload_all(m, &err), &err);
    case CLEAR: return passes(w, "rf_model_clear_device_cache", rf_model_clear_device_cache(m, &left, &err), &err);
    case CANCEL_LOADING: return rf_model_cancel_loading(m), 1;
    case CLOSE_IN_USE: return close_in_use(w);
    default: return look(w, rng);
    }
}

static void *work(void *arg) {
    worker *w = (worker *)arg;
    mg_rng rng = {w->seed};
    for (int i = 0; i < w->rounds && !w->wrong[0]; i++) {
        const int action = (int)mg_below(&rng, N_ACTIONS);
        w->on = &w->all->of[mg_below(&rng, N_MODELS)];
        if (act(w, action, &rng)) atomic_fetch_add(&w->all->done[action], 1);
    }
    return NULL;
}

/* Bytes that a model's weights take on the device. */
static uint64_t needed(rf_gguf *g, rf_device *d) {
    rf_model *m = NULL;
    rf_forecast f = {0};
    rf_error err;
    CHECK(rf_model_open(g, d, NULL, &m, &err) == RF_OK && rf_model_forecast(m, NULL, &f, &err) == RF_OK, "%s", err.text);
    rf_model_close(m, NULL);
    return f.weight_bytes;
}

/* Open all of it; what the models answer is known from then on. */
static int open_all(shared *all, const char *device, int mode) {
    rf_device_desc dd = {.n_threads = 2};
    uint64_t n_bytes[N_MODELS], total = 0;
    rf_error err = {0};
    int ok = rf_device_open(device, &dd, &all->d, &err) == RF_OK;
    for (int i = 0; ok && i < N_MODELS; i++) {
        ok = rf_gguf_open(paths[i], &(rf_gguf_desc){.no_map = mode != MAPPED}, &all->of[i].g, &err) == RF_OK;
        if (ok) total += n_bytes[i] = needed(all->of[i].g, all->d);
    }
    if (ok && all->budget == DEVICE_BUDGET) {
        rf_device_close(all->d, NULL);
        dd.budget_bytes = total * 6 / 10;
        ok = rf_device_open(device, &dd, &all->d, &err) == RF_OK;
    }
    for (int i = 0; ok && i < N_MODELS; i++) {
        subject *on = &all->of[i];
        const rf_model_desc md = {.budget_bytes = all->budget == MODEL_BUDGETS ? n_bytes[i] * 6 / 10 : 0, .n_readers = 2,
                                  .expert_prefetch = i == MIXTURE, .stream_policy = i == RECURRENT};
        ok = rf_model_open(on->g, all->d, &md, &on->m, &err) == RF_OK && evaluate(on->m, on->want, &err) == RF_OK &&
             rf_session_open(on->m, &(rf_session_desc){.n_ctx = 16}, &on->s, &err) == RF_OK;
        if (ok) on->n_vocab = rf_model_get_info(on->m).n_vocab;
    }
    CHECK(ok, "%s, %s: %s", device, budgets[all->budget], err.text);
    return ok;
}

static void close_all(shared *all) {
    rf_error err;
    for (int i = 0; i < N_MODELS; i++) {
        subject *on = &all->of[i];
        float got[N_VOCAB];
        CHECK(evaluate(on->m, got, &err) == RF_OK && memcmp(got, on->want, on->n_vocab * sizeof *got) == 0, "afterwards: %s",
              err.text);
        rf_session_close(on->s, NULL);
        rf_model_clear_device_cache(on->m, NULL, NULL);
        CHECK(rf_model_get_loading_stats(on->m).device_bytes == 0, "device memory is left");
        CHECK(rf_model_close(on->m, &err) == RF_OK, "%s", err.text);
    }
    CHECK(rf_device_close(all->d, &err) == RF_OK, "%s", err.text);
    for (int i = 0; i < N_MODELS; i++) CHECK(rf_gguf_close(all->of[i].g, &err) == RF_OK, "%s", err.text);
}

static void everything_at_once(const char *device, int mode, int budget) {
    static shared all;
    worker w[N_THREADS];
    pthread_t threads[N_THREADS];
    memset(&all, 0, sizeof all);
    all.budget = budget;
    if (!open_all(&all, device, mode)) return;
    for (int i = 0; i < N_THREADS; i++) {
        w[i] = (worker){.all = &all, .seed = (uint64_t)(i + 10 * mode + 100 * budget), .rounds = RF_ROUNDS};
        REQUIRE(pthread_create(&threads[i], NULL, work, &w[i]) == 0, "thread");
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(!w[i].wrong[0], "%s, %s, %s, thread %d: %s", device, modes[mode], budgets[budget], i, w[i].wrong);
    }
    for (int a = 0; a < N_ACTIONS; a++) { /* what was always cancelled works alone */
        mg_rng rng = {1};
        w[0].on = &all.of[DENSE];
        CHECK(atomic_load(&all.done[a]) > 0 || act(&w[0], a, &rng), "%s, %s: nobody did action %d", device, budgets[budget], a);
    }
    close_all(&all);
}

/* On the GPUs, if some are linked (hip_threads); else on the others. */
static void test_everything_at_once(void) {
    rf_device_info list[8];
    uint32_t n = 0, n_gpus = 0;
    rf_device_list(list, 8, &n, NULL);
    for (uint32_t i = 0; i < n && i < 8; i++) {
        if (!list[i].is_gpu || !list[i].usable) continue;
        for (int budget = 0; budget < N_BUDGETS; budget++)
            if (!RFT_SANITIZED || (uint32_t)budget % 2 == n_gpus % 2) everything_at_once(list[i].name, COPIED, budget);
        n_gpus++;
    }
    for (int mode = MAPPED; n_gpus == 0 && mode < N_MODES; mode++)
        for (int budget = 0; budget < N_BUDGETS; budget++) everything_at_once(mode == NULLED ? "null" : "cpu", mode, budget);
}

/* ---- a file that another thread writes to ---- */

typedef struct rewriting {
    mg_buf real;
    int fd, cuts;     /* cuts: sometimes the file is shorter, too */
    size_t head;      /* bytes of metadata                        */
    atomic_int stop;
} rewriting;

static void *rewrite(void *arg) {
    static const uint64_t odd[] = {0, UINT64_MAX, 1, UINT32_MAX, 1ull << 63, 8, 9, 0x0101010101010101u};
    rewriting *f = (rewriting *)arg;
    mg_rng rng = {(uint64_t)f->cuts};
    int ok = 1;
    while (ok && !atomic_load(&f->stop)) {
        const size_t at = mg_below(&rng, (uint32_t)f->head - 8), n = (size_t)1 << mg_below(&rng, 4);
        ok = pwrite(f->fd, &odd[mg_below(&rng, 8)], n, (off_t)at) == (ssize_t)n;
        for (uint32_t k = mg_below(&rng, 4); k > 0; k--) sched_yield();
        ok = ok && pwrite(f->fd, f->real.data + at, n, (off_t)at) == (ssize_t)n;
        if (f->cuts && mg_below(&rng, 64) == 0)
            ok = ok && ftruncate(f->fd, (off_t)mg_below(&rng, (uint32_t)f->real.n)) == 0 &&
                 pwrite(f->fd, f->real.data, f->real.n, 0) == (ssize_t)f->real.n;
        for (uint32_t k = mg_below(&rng, 800); k > 0; k--) sched_yield();
    }
    return ok ? NULL : arg;
}

/* From the file to logits: a code, and a text if it is a failure. */
static rf_result open_and_run(const char *path, rf_device *d, int mode, rf_error *err) {
    rf_gguf *g = NULL;
    rf_model *m = NULL;
    const rf_tokenizer *t;
    float logits[N_VOCAB];
    rf_result r = rf_gguf_open(path, &(rf_gguf_desc){.no_map = mode != MAPPED}, &g, err);
    if (r == RF_OK) r = rf_model_open(g, d, NULL, &m, err);
    if (r == RF_OK) r = rf_model_get_tokenizer(m, &t, err);
    if (r == RF_OK && rf_model_get_info(m).n_vocab <= N_VOCAB) r = evaluate(m, logits, err);
    CHECK(r == RF_OK || (err->code == r && err->text[0]), "%s without a text", rf_result_name(r));
    CHECK(rf_model_close(m, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    return r;
}

/* The file changes between any two reads: nothing that was checked may be read again. What is used in place is only
 * rewritten, because a cut there is a SIGBUS. */
static void test_rewritten_meanwhile(void) {
    for (int mode = MAPPED; mode <= COPIED; mode++) {
        char path[] = "/tmp/rf_threads_XXXXXX";
        static rewriting f;
        rf_device *d = NULL;
        rf_gguf *g = NULL;
        rf_error err;
        pthread_t writer;
        void *failed = NULL;
        unsigned n_ok = 0;
        memset(&f, 0, sizeof f);
        f.fd = mkstemp(path), f.cuts = mode == COPIED;
        mg_llama(&f.real, &(mg_options){.type = MG_Q8_0, .n_layers = 1});
        REQUIRE(f.fd >= 0 && mg_write_file(&f.real, path), "cannot write %s", path);
        REQUIRE(rf_gguf_open(path, NULL, &g, &err) == RF_OK, "%s", err.text);
        f.head = (size_t)rf_gguf_get_info(g).metadata_bytes;
        CHECK(rf_gguf_close(g, NULL) == RF_OK, "busy");
        REQUIRE(rf_device_open("cpu", &(rf_device_desc){.n_threads = 1}, &d, &err) == RF_OK, "%s", err.text);
        REQUIRE(pthread_create(&writer, NULL, rewrite, &f) == 0, "thread");
        for (int i = 0; i < 20 * RF_ROUNDS; i++) n_ok += open_and_run(path, d, mode, &err) == RF_OK;
        atomic_store(&f.stop, 1);
        pthread_join(writer, &failed);
        CHECK(!failed, "the file cannot be written");
        CHECK(open_and_run(path, d, mode, &err) == RF_OK, "as it was: %s", err.text);
        printf("    %s: %u of %d were whole\n", modes[mode], n_ok, 20 * RF_ROUNDS);
        CHECK(rf_device_close(d, NULL) == RF_OK, "busy");
        close(f.fd), unlink(path), mg_free(&f.real);
    }
}

static int make_file(char *path, const mg_options *o) {
    mg_buf file = {0};
    int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    mg_llama(&file, o);
    const int ok = mg_write_file(&file, path);
    mg_free(&file);
    if (!ok) printf("cannot write %s\n", path);
    return ok;
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    const mg_options of_dense = {.type = MG_Q8_0, .n_layers = 3},
                     of_mixture = {.arch = "qwen3moe", .type = MG_Q8_0, .n_layers = 3, .n_experts = 8, .expert_norm = 1};
    if (!make_file(dense, &of_dense) || !make_file(mixture, &of_mixture)) return 1;
    RUN(test_everything_at_once);
    RUN(test_rewritten_meanwhile);
    unlink(dense), unlink(mixture);
    RFT_END();
}
