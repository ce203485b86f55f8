/* test_threads.c: threads that do everything at once to one file, one device and the models on them: sessions are
 * opened, run, cancelled and closed, weights loaded, dropped and cancelled, models and tokenizers opened and closed,
 * and what is in use is closed, which must be refused. Whatever the order, every evaluation that succeeds gives the
 * same bits. Meant for ThreadSanitizer; -DRF_ROUNDS=5000 for a long run. */
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <unistd.h>

#ifndef RF_ROUNDS
#define RF_ROUNDS 60 /* of each thread, in each mode */
#endif
#define N_THREADS 6
#define N_VOCAB 320

static const int32_t some_tokens[5] = {7, 300, 12, 0, 99};

static char path[] = "/tmp/rf_threads_XXXXXX";

typedef struct shared {
    rf_gguf *g;
    rf_device *d;
    rf_model *m;     /* of all threads; a session of the main thread is open on it */
    rf_session *s;
    float want[N_VOCAB];
    int streamed;    /* a budget leaves out some weights */
    _Atomic unsigned done[16]; /* per action: how often it did what it is for */
} shared;

typedef struct worker {
    shared *all;
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

/* logits of the last of some_tokens in a fresh session */
static rf_result evaluate(rf_model *m, float *out, rf_error *err) {
    rf_session *s = NULL;
    float *logits;
    rf_result r = rf_session_open(m, &(rf_session_desc){.n_ctx = 16, .n_batch = 2}, &s, err);
    if (r == RF_OK) r = rf_session_forward(s, some_tokens, 5, &logits, err);
    if (r == RF_OK) memcpy(out, logits, N_VOCAB * sizeof *out);
    rf_session_close(s, NULL);
    return r;
}

static int same_bits(worker *w, rf_model *m) {
    float got[N_VOCAB];
    rf_error err;
    if (!passes(w, "evaluate", evaluate(m, got, &err), &err)) return 0;
    if (memcmp(got, w->all->want, sizeof got) != 0) wrong(w, "other bits");
    return 1;
}

/* Open a model of the same file and use it, or not; close it. */
static int own_model(worker *w, mg_rng *rng) {
    rf_error err;
    rf_model *m = NULL;
    int done = 0;
    if (passes(w, "rf_model_open", rf_model_open(w->all->g, w->all->d, NULL, &m, &err), &err))
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
    rf_result r = rf_model_get_tokenizer(w->all->m, &t, &err); /* the first one builds it */
    if (r == RF_OK && mg_below(rng, 2)) r = rf_tokenizer_open(w->all->g, NULL, &mine, &err), t = mine;
    if (r == RF_OK) r = rf_tokenize(t, (rf_string){text, sizeof text - 1}, RF_TOKENIZE_ADD, ids, 32, &n, &err);
    rf_tokenizer_close(mine, NULL);
    return passes(w, "tokenizer", r, &err) && n > 0;
}

/* A session that is cancelled before or after it runs, and used on. */
static int cancelled_session(worker *w) {
    rf_session *s = NULL;
    rf_error err;
    float *logits;
    rf_result r = rf_session_open(w->all->m, &(rf_session_desc){.n_ctx = 16}, &s, &err);
    if (passes(w, "rf_session_open", r, &err)) {
        rf_session_cancel(s);
        r = rf_session_forward(s, some_tokens, 5, &logits, &err);
        if (r != RF_ERR_CANCELLED || rf_session_length(s, 0) != 0) wrong(w, "cancelled: %s", rf_result_name(r));
        r = rf_session_forward(s, some_tokens, 5, &logits, &err);
        if (passes(w, "after a cancel", r, &err) && memcmp(logits, w->all->want, sizeof w->all->want) != 0)
            wrong(w, "other bits after a cancel");
    }
    rf_session_close(s, NULL);
    return r == RF_OK;
}

/* What others use is not closed. */
static int close_in_use(worker *w) {
    rf_error err;
    if (rf_model_close(w->all->m, &err) != RF_ERR_BUSY || !err.text[0]) wrong(w, "a model in use was closed");
    if (rf_device_close(w->all->d, &err) != RF_ERR_BUSY || !err.text[0]) wrong(w, "a device in use was closed");
    if (rf_gguf_close(w->all->g, &err) != RF_ERR_BUSY || !err.text[0]) wrong(w, "a file in use was closed");
    return 1;
}

static int look(worker *w, mg_rng *rng) {
    const rf_plan *plan = rf_model_get_plan(w->all->m);
    const char *name = plan->weights[mg_below(rng, plan->n_weights)].name;
    rf_loading_stats st = rf_model_get_loading_stats(w->all->m);
    rf_model_is_tensor_loaded(w->all->m, name);
    rf_model_is_layer_loaded(w->all->m, mg_below(rng, plan->n_layers));
    if (st.tensors_loaded > plan->n_slots)
        wrong(w, "%llu of %u tensors are loaded", (unsigned long long)st.tensors_loaded, plan->n_slots);
    return rf_device_get_info(w->all->d).lost == 0;
}

/* One beyond the budget is refused by name. */
static int load_tensor(worker *w, const char *name) {
    rf_error err;
    rf_result r = rf_model_load_tensor(w->all->m, name, &err);
    if (w->all->streamed && r == RF_ERR_MEMORY && strstr(err.text, name)) return 1;
    return passes(w, "rf_model_load_tensor", r, &err);
}

enum { EVALUATE, OWN_MODEL, OWN_TOKENIZER, CANCELLED, LOAD_TENSOR, LOAD_LAYER, LOAD_ALL, CLEAR, CANCEL_LOADING,
       CLOSE_IN_USE, LOOK, N_ACTIONS };

static int act(worker *w, int action, mg_rng *rng) {
    rf_model *m = w->all->m;
    const rf_plan *plan = rf_model_get_plan(m);
    uint32_t layer = mg_below(rng, plan->n_layers), left;
    const char *name = plan->weights[mg_below(rng, plan->n_weights)].name;
    rf_error err;
    switch (action) {
    case EVALUATE: return same_bits(w, m);
    case OWN_MODEL: return own_model(w, rng);
    case OWN_TOKENIZER: return own_tokenizer(w, rng);
    case CANCELLED: return cancelled_session(w);
    case LOAD_TENSOR: return load_tensor(w, name);
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
        int action = (int)mg_below(&rng, N_ACTIONS);
        if (act(w, action, &rng)) atomic_fetch_add(&w->all->done[action], 1);
    }
    return NULL;
}

static void everything_at_once(int mode, uint64_t budget_percent) {
    shared all = {0};
    rf_error err;
    worker w[N_THREADS];
    pthread_t threads[N_THREADS];
    rf_device_desc dd = {.n_threads = 2};
    rf_forecast f = {0};
    REQUIRE(rf_gguf_open(path, &(rf_gguf_desc){.no_map = mode != MAPPED}, &all.g, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_device_open(mode == NULLED ? "null" : "cpu", &dd, &all.d, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_model_open(all.g, all.d, NULL, &all.m, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_forecast(all.m, NULL, &f, &err) == RF_OK, "%s", err.text);
    all.streamed = budget_percent < 100;
    if (all.streamed) {
        CHECK(rf_model_close(all.m, &err) == RF_OK, "%s", err.text);
        rf_model_desc md = {.budget_bytes = f.weight_bytes * budget_percent / 100, .n_readers = 2};
        REQUIRE(rf_model_open(all.g, all.d, &md, &all.m, &err) == RF_OK, "%s", err.text);
    }
    CHECK(evaluate(all.m, all.want, &err) == RF_OK, "%s", err.text);
    CHECK(rf_session_open(all.m, NULL, &all.s, &err) == RF_OK, "%s", err.text);
    for (int i = 0; i < N_THREADS; i++) {
        w[i] = (worker){.all = &all, .seed = (uint64_t)(i + 10 * mode) + 100 * budget_percent, .rounds = RF_ROUNDS};
        REQUIRE(pthread_create(&threads[i], NULL, work, &w[i]) == 0, "thread");
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(!w[i].wrong[0], "%s, %d %%, thread %d: %s", modes[mode], (int)budget_percent, i, w[i].wrong);
    }
    for (int a = 0; a < N_ACTIONS; a++)
        CHECK(atomic_load(&all.done[a]) > 0, "%s: nobody did action %d", modes[mode], a);
    CHECK(evaluate(all.m, all.want, &err) == RF_OK, "afterwards: %s", err.text);
    rf_session_close(all.s, NULL);
    rf_model_clear_device_cache(all.m, NULL, NULL);
    CHECK(rf_model_get_loading_stats(all.m).device_bytes == 0, "device memory is left");
    CHECK(rf_model_close(all.m, &err) == RF_OK && rf_device_close(all.d, &err) == RF_OK, "%s", err.text);
    CHECK(rf_gguf_close(all.g, &err) == RF_OK, "%s", err.text);
}

static void test_everything_at_once(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (uint64_t percent = 100; percent >= 60; percent -= 40) everything_at_once(mode, percent);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    mg_buf file = {0};
    int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 3});
    if (!mg_write_file(&file, path)) return printf("cannot write %s\n", path), 1;
    RUN(test_everything_at_once);
    unlink(path);
    mg_free(&file);
    RFT_END();
}
