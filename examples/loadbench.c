/* cc -O2 -I. examples/loadbench.c -o loadbench -lm -pthread
 *
 * How fast a model loads: open, plan, first token, everything loaded, decode; device and host memory at each step.
 *   loadbench FILE [--device D] [--mode lazy|preload|critical|context] [--readers N] [--budget PERCENT]
 *             [--stream prefix|lru] [--pinned] [--cold] [--prompt N] [--tokens N] [--no-map] [--cancel MS]
 * context: only open the device, the part of a start that no loader can shorten. --cold drops the file from the page
 * cache first. --budget: percent of the weights' bytes; --pinned keeps the streamed ones in pinned host memory.
 * --prompt: tokens before the first one, at most 16. --cancel: first load in another thread, and cancel that after MS
 * milliseconds. The last line is a hash of the logits' bits, which depend on no option but --device, --prompt and
 * --tokens. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void die(const char *what, const rf_error *err) {
    fprintf(stderr, "loadbench: %s: %s\n", what, err ? err->text : "");
    exit(1);
}

/* resident MiB of this process */
static double rss(void) {
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / 1048576.0;
}

static double start;

static void say(const char *step, const rf_model *m) {
    rf_loading_stats st = rf_model_get_loading_stats(m);
    printf("%-12s %9.2f ms   host %8.1f MiB   device weights %9.1f MiB in %llu   loaded %5.1f %%\n", step,
           now_ms() - start, rss(), (double)st.device_bytes / 1048576.0, (unsigned long long)st.device_allocations,
           m ? 100.0 * (double)st.bytes_loaded / (double)rf_model_get_info(m).weight_bytes : 0.0);
    fflush(stdout);
}

static void drop_from_cache(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
        die("cannot drop the file from the cache", NULL);
    close(fd);
}

typedef struct loading {
    rf_model *m;
    rf_result result;
    double ended;
} loading;

static void *load_all(void *arg) {
    loading *l = (loading *)arg;
    l->result = rf_model_preload_all(l->m, NULL);
    l->ended = now_ms();
    return NULL;
}

static void load_and_cancel(rf_model *m, int after_ms) {
    loading l = {.m = m};
    pthread_t thread;
    struct timespec wait = {after_ms / 1000, after_ms % 1000 * 1000000L};
    if (pthread_create(&thread, NULL, load_all, &l) != 0) die("thread", NULL);
    nanosleep(&wait, NULL);
    double asked = now_ms();
    rf_model_cancel_loading(m);
    pthread_join(thread, NULL);
    printf("cancelled after %d ms: %s, %.2f ms later\n", after_ms, rf_result_name(l.result), l.ended - asked);
    say("cancelled", m);
}

/* a hash of the bits */
static uint64_t fingerprint(const float *logits, uint32_t n) {
    uint64_t h = 1469598103934665603u;
    const unsigned char *p = (const unsigned char *)logits;
    for (size_t i = 0; i < n * sizeof *logits; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

typedef struct options {
    const char *path, *device, *mode;
    int cold, pinned, n_tokens, n_prompt, percent, cancel_ms;
    rf_model_desc md;
    rf_gguf_desc gd;
} options;

/* 0 if the command line is wrong. */
static int parse(options *o, int argc, char **argv) {
    *o = (options){.mode = "lazy", .n_tokens = 16, .n_prompt = 16, .cancel_ms = -1};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--device")) o->device = value, i++;
        else if (!strcmp(argv[i], "--mode")) o->mode = value, i++;
        else if (!strcmp(argv[i], "--readers")) o->md.n_readers = (uint32_t)atoi(value), i++;
        else if (!strcmp(argv[i], "--budget")) o->percent = atoi(value), i++;
        else if (!strcmp(argv[i], "--stream"))
            o->md.stream_policy = strcmp(value, "lru") ? RF_STREAM_PREFIX : RF_STREAM_LRU, i++;
        else if (!strcmp(argv[i], "--tokens")) o->n_tokens = atoi(value), i++;
        else if (!strcmp(argv[i], "--prompt")) o->n_prompt = atoi(value), i++;
        else if (!strcmp(argv[i], "--cancel")) o->cancel_ms = atoi(value), i++;
        else if (!strcmp(argv[i], "--pinned")) o->pinned = 1;
        else if (!strcmp(argv[i], "--cold")) o->cold = 1;
        else if (!strcmp(argv[i], "--no-map")) o->gd.no_map = 1;
        else if (argv[i][0] != '-' && !o->path) o->path = argv[i];
        else return 0;
    }
    if (!strcmp(o->mode, "preload")) o->md.load_policy = RF_LOAD_PRELOAD;
    if (!strcmp(o->mode, "critical")) o->md.load_policy = RF_LOAD_CRITICAL_FIRST;
    return o->path && o->n_prompt >= 1 && o->n_prompt <= 16;
}

int main(int argc, char **argv) {
    options o;
    rf_error err;
    if (!parse(&o, argc, argv))
        return fprintf(stderr, "usage: loadbench FILE [options]; the first lines of loadbench.c list them\n"), 2;
    if (o.cold) drop_from_cache(o.path);

    rf_device *d;
    rf_gguf *g;
    rf_model *m;
    rf_session *s;
    start = now_ms();
    if (rf_device_open(o.device, NULL, &d, &err) != RF_OK) die("device", &err);
    say("device", NULL);
    if (!strcmp(o.mode, "context")) return rf_device_close(d, NULL), 0;
    if (rf_gguf_open(o.path, &o.gd, &g, &err) != RF_OK) die("open", &err);
    say("open", NULL);
    if (o.percent) { /* of the bytes that all weights take on the device */
        rf_forecast all;
        if (rf_model_open(g, d, NULL, &m, &err) != RF_OK || rf_model_forecast(m, NULL, &all, &err) != RF_OK)
            die("forecast", &err);
        rf_model_close(m, NULL);
        o.md.budget_bytes = all.weight_bytes / 100 * (uint64_t)o.percent;
        o.md.pinned_bytes = o.pinned ? all.weight_bytes : 0;
    }
    if (rf_model_open(g, d, &o.md, &m, &err) != RF_OK) die("plan", &err);
    say("plan", m);
    rf_forecast forecast;
    if (rf_model_forecast(m, &(rf_session_desc){.n_ctx = 512}, &forecast, &err) != RF_OK) die("forecast", &err);
    if (rf_session_open(m, &(rf_session_desc){.n_ctx = 512}, &s, &err) != RF_OK) die("session", &err);
    say("session", m);
    if (o.cancel_ms >= 0) load_and_cancel(m, o.cancel_ms);

    const int32_t prompt[16] = {1, 20, 300, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160};
    if (rf_session_forward(s, prompt, (uint32_t)o.n_prompt, NULL, &err) != RF_OK) die("first token", &err);
    int32_t token = -1;
    if (rf_session_get_argmax(s, 0, &token, &err) != RF_OK) die("first token", &err);
    say("first token", m);
    if (rf_model_preload_all(m, &err) != RF_OK) die("preload", &err);
    say("all loaded", m);
    rf_loading_stats st = rf_model_get_loading_stats(m);
    uint64_t read_before = st.bytes_read;
    double decode = now_ms();
    for (int i = 0; i < o.n_tokens; i++) {
        if (rf_session_forward(s, &token, 1, NULL, &err) || rf_session_get_argmax(s, 0, &token, &err))
            die("decode", &err);
    }
    decode = now_ms() - decode;
    say("decode", m);
    st = rf_model_get_loading_stats(m);
    printf("%d tokens, %.2f ms each; loading %.2f GB/s in %.1f ms, waited %.1f ms; %llu loads, %llu evictions\n",
           o.n_tokens, decode / o.n_tokens, st.gb_per_second, st.load_seconds * 1e3, st.wait_seconds * 1e3,
           (unsigned long long)st.loads, (unsigned long long)st.evictions);
    if (forecast.streamed_bytes)
        printf("streaming %.2f GB/s of %.3f GB a token; %.2f GB read from the file while decoding\n",
               1e-6 * (double)forecast.streamed_bytes * o.n_tokens / decode, 1e-9 * (double)forecast.streamed_bytes,
               1e-9 * (double)(st.bytes_read - read_before));
    float *logits;
    if (rf_session_get_logits(s, 0, &logits, &err) != RF_OK) die("logits", &err);
    printf("last token %d, logits %016llx\n", token,
           (unsigned long long)fingerprint(logits, rf_model_get_info(m).n_vocab));
    if (rf_session_close(s, &err) != RF_OK) die("close", &err);
    if (rf_model_clear_device_cache(m, NULL, &err) != RF_OK) die("clear", &err);
    say("clear", m);
    if (rf_model_close(m, &err) != RF_OK || rf_device_close(d, &err) != RF_OK || rf_gguf_close(g, &err) != RF_OK)
        die("close", &err);
    return 0;
}
