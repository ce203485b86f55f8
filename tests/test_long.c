/* test_long.c: a program that never ends: generation after generation with random prompts, lengths, samplers, cancels,
 * evictions, budgets, files opened anew and reads that fail. Memory does not grow, no descriptor and no thread is left.
 *     test_long            the suite: a few hundred generations
 *     test_long N [SEED]   N of them, with a line of figures for every tenth */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include <dirent.h>

#include "make_gguf.h"
#include "rf_life.h"
#include "rf_test.h"

static char path[] = "/tmp/rf_long_XXXXXX";

/* ---- what a process holds ---- */

typedef struct held {
    uint64_t resident_bytes;
    unsigned files, threads;
} held;

static unsigned entries(const char *dir) {
    DIR *d = opendir(dir);
    unsigned n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n - 3; /* "." and "..", and of the descriptors this one */
}

static held measure(void) {
    held h = {0};
    unsigned long long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f) {
        if (fscanf(f, "%llu %llu", &pages, &resident) == 2)
            h.resident_bytes = resident * (uint64_t)sysconf(_SC_PAGESIZE);
        fclose(f);
    }
    h.files = entries("/proc/self/fd");
    /* a thread that was joined is there for a moment still */
    for (int ms = 0; (h.threads = entries("/proc/self/task") + 1) > 1 && ms < 1000; ms++) usleep(1000);
    return h;
}

/* ---- a server's life ---- */

typedef struct server {
    memory mem;
    mg_rng rng;
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_session *s;
    const rf_tokenizer *t;
    int fail_in;            /* data reads until one fails; 0: none                        */
    uint64_t generations, tokens, cancelled, failed, full, opened;
} server;

static int64_t flaky_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    server *v = (server *)user;
    if (v->fail_in > 0 && --v->fail_in == 0) return -EIO;
    return rfi_os_read(handle, offset, dst, n, NULL);
}

static void close_all(server *v) {
    rf_session_close(v->s, NULL);
    CHECK(rf_model_close(v->m, NULL) == RF_OK && rf_device_close(v->d, NULL) == RF_OK, "busy");
    CHECK(rf_gguf_close(v->g, NULL) == RF_OK, "busy");
    v->s = NULL, v->m = NULL, v->d = NULL, v->g = NULL;
    CHECK(memory_read(&v->mem.live) == 0, "%llu blocks are left", RFI_LLU(memory_read(&v->mem.live)));
}

/* A session of any shape; 0 after a report. */
static int open_session(server *v) {
    rf_error err;
    rf_session_desc sd = {.n_ctx = 48 + mg_below(&v->rng, 64), .n_seq_max = 1 + mg_below(&v->rng, 3),
                          .n_batch = 1 + mg_below(&v->rng, 16), .cache_type = mg_below(&v->rng, 2)};
    rf_session_close(v->s, NULL);
    v->s = NULL;
    rf_result r = rf_session_open(v->m, &sd, &v->s, &err);
    CHECK(r == RF_OK, "%s", err.text);
    return r == RF_OK;
}

/* File, device, model and session in one of the ways that there are; 0 after a report. */
static int open_all(server *v) {
    rf_allocator a = memory_allocator(&v->mem);
    rf_gguf_desc gd = {.allocator = a, .no_map = mg_below(&v->rng, 2)};
    rf_device_desc dd = {.allocator = a, .n_threads = 1 + mg_below(&v->rng, 3)};
    rf_model_desc md = {.load_policy = 2 * mg_below(&v->rng, 2), .n_readers = mg_below(&v->rng, 3)};
    int flaky = mg_below(&v->rng, 2);
    rf_forecast f = {0};
    rf_error err;
    close_all(v);
    if (flaky) gd.io = (rf_io){.open_fn = rfi_os_open, .read_fn = flaky_read, .close_fn = rfi_os_close, .user = v};
    v->fail_in = 0;
    rf_result r = rf_gguf_open(path, &gd, &v->g, &err);
    if (r == RF_OK) r = rf_device_open(mg_below(&v->rng, 4) ? "cpu" : "null", &dd, &v->d, &err);
    if (r == RF_OK) r = rf_model_open(v->g, v->d, &md, &v->m, &err);
    if (r == RF_OK) r = rf_model_forecast(v->m, NULL, &f, &err);
    if (r == RF_OK && mg_below(&v->rng, 3) == 0) { /* on a budget */
        md.budget_bytes = f.weight_bytes * 7 / 10;
        r = rf_model_close(v->m, &err);
        v->m = NULL;
        if (r == RF_OK) r = rf_model_open(v->g, v->d, &md, &v->m, &err);
    }
    if (r == RF_OK) r = rf_model_get_tokenizer(v->m, &v->t, &err);
    CHECK(r == RF_OK, "%s", err.text);
    v->opened++;
    return r == RF_OK && open_session(v);
}

/* What may happen between two generations. */
static int interlude(server *v) {
    uint32_t left;
    switch (mg_below(&v->rng, 40)) {
    case 0:
    case 1: return open_all(v);
    case 2:
    case 3: return open_session(v);
    case 4:
    case 5:
    case 6: return rf_model_clear_device_cache(v->m, &left, NULL) == RF_OK;
    case 7: rf_model_cancel_loading(v->m); return 1;
    case 8: rf_session_cancel(v->s); return 1;
    case 9: /* and the weights are loaded again, which fails */
        v->fail_in = 1 + (int)mg_below(&v->rng, 12);
        return rf_model_clear_device_cache(v->m, &left, NULL) == RF_OK;
    default: return 1;
    }
}

/* Errors that the run provokes; anything else is one. */
static void count_failure(server *v, rf_result r, const rf_error *err) {
    if (r == RF_ERR_CANCELLED) v->cancelled++;
    else if (r == RF_ERR_IO && err->sys == EIO) v->failed++;
    else if (r == RF_ERR_CONTEXT_FULL) v->full++;
    else CHECK(0, "%s: %s", rf_result_name(r), err->text);
}

/* One prompt of random bytes and as many tokens as chance wants. */
static void generate(server *v) {
    char text[64], out[64];
    int32_t ids[256];
    uint32_t n = 0, n_bytes = mg_below(&v->rng, sizeof text), n_more = mg_below(&v->rng, 24);
    size_t n_out;
    rf_error err;
    rf_detokenizer state = {.tokenizer = v->t};
    rf_sampler sampler;
    float *logits = NULL;
    for (uint32_t i = 0; i < n_bytes; i++)
        text[i] = (char)(mg_below(&v->rng, 3) ? 'a' + mg_below(&v->rng, 26) : mg_next(&v->rng));
    rf_result r = rf_tokenize(v->t, (rf_string){text, n_bytes}, RF_TOKENIZE_ADD, ids, 256, &n, &err);
    if (r == RF_OK && n == 0) ids[n++] = 1;
    rf_sampler_desc desc = {.temperature = (float)mg_below(&v->rng, 3), .top_k = mg_below(&v->rng, 40)};
    desc.seed = mg_next(&v->rng);
    if (r == RF_OK) r = rf_sampler_init(&sampler, &desc, &err);
    if (r == RF_OK && mg_below(&v->rng, 3)) r = rf_session_truncate(v->s, 0, mg_below(&v->rng, 8), NULL, &err);
    int peek = (int)mg_below(&v->rng, 2);
    for (uint32_t i = 0; r == RF_OK && i < n_more; i++, n = 1) {
        r = rf_session_forward(v->s, ids, n, peek ? &logits : NULL, &err);
        if (r == RF_OK) r = rf_session_sample(v->s, 0, &sampler, &ids[0], &err);
        if (r == RF_OK) rf_detokenize(&state, ids[0], 0, out, sizeof out, &n_out, NULL), v->tokens++;
        if (i == 3 && mg_below(&v->rng, 16) == 0) rf_session_cancel(v->s);
    }
    v->generations++;
    if (r != RF_OK) count_failure(v, r, &err);
    if (r == RF_ERR_CONTEXT_FULL) rf_session_truncate(v->s, 0, 0, NULL, NULL);
}

/* n generations; with everything closed after each tenth of them the process holds what it held after the first. */
static void run(uint64_t n, uint64_t seed, int show) {
    static server v;
    held first = {0}, now = {0};
    memset(&v, 0, sizeof v);
    v.rng.state = seed;
    for (int tenth = 1; tenth <= 10; tenth++) {
        if (!open_all(&v)) return;
        while (v.generations < n * (uint64_t)tenth / 10 && interlude(&v)) generate(&v);
        close_all(&v);
        now = measure();
        if (tenth == 1) first = now;
        if (show)
            printf("    %6llu generations, %llu tokens, %llu cancelled, %llu failed reads, %llu full, %llu times "
                   "opened: resident %.1f MiB, %u files, %u threads\n",
                   RFI_LLU(v.generations), RFI_LLU(v.tokens), RFI_LLU(v.cancelled), RFI_LLU(v.failed), RFI_LLU(v.full),
                   RFI_LLU(v.opened), (double)now.resident_bytes / 1048576.0, now.files, now.threads);
        CHECK(now.files == first.files && now.threads == first.threads, "%u files, %u threads; at first %u, %u",
              now.files, now.threads, first.files, first.threads);
    }
    CHECK(v.generations == n && v.tokens > n && v.cancelled && v.opened > 10, "%llu generations",
          RFI_LLU(v.generations));
    CHECK(n < 1000 || (v.failed && v.full), "no read failed, or no context was full");
    CHECK(RFT_SANITIZED || now.resident_bytes < first.resident_bytes + (16u << 20), "%llu bytes resident, %llu at first",
          RFI_LLU(now.resident_bytes), RFI_LLU(first.resident_bytes));
}

static void test_generations(void) { run(300, 1, 0); }

int main(int argc, char **argv) {
    mg_buf file = {0};
    int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 3});
    if (!mg_write_file(&file, path)) return printf("cannot write %s\n", path), 1;
    mg_free(&file);
    RFT_BEGIN(argc, argv);
    if (argc > 1 && argv[1][0] >= '0' && argv[1][0] <= '9') {
        run(strtoull(argv[1], NULL, 10), argc > 2 ? strtoull(argv[2], NULL, 10) : 1, 1);
        unlink(path);
        return rft_bad != 0;
    }
    RUN(test_generations);
    unlink(path);
    RFT_END();
}
