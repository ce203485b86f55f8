/* cc -O2 -I. examples/expertbench.c -o expertbench -lm -pthread
 *
 * Measures the expert cache of a mixture-of-experts model: decode speed, hit rate, and how often the host waits for the
 * device's routing, with all experts loaded and with a part of them under each policy.
 *   expertbench FILE [--device D] [--budget PERCENT] [--policies LIST] [--tokens N] [--warm N] [--first ID] [--pinned]
 *               [--prefetch] [--cpu-below N] [--readers N]
 * --budget: percent of the weights' bytes (30). --policies: of all,lfru,lru,static (those four). --pinned keeps the
 * weights beyond the budget in pinned host memory; --prefetch fills the cache while the bus is idle. Tokens are not
 * sampled: ids count up from --first (512), because a model of random weights repeats itself, which would flatter any
 * cache. --warm (512) tokens are not measured, --tokens (1024) are. The last column is a hash of the logits' bits.
 * --cpu-below: experts that are not loaded and were chosen fewer times of late are computed by the CPU; the logits then
 * differ. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct options {
    const char *path, *device, *policies;
    int percent, n_tokens, n_warm, first, pinned, prefetch, cpu_below, n_readers;
} options;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what, const rf_error *err) {
    fprintf(stderr, "expertbench: %s: %s\n", what, err->text);
    exit(1);
}

/* sum over layers */
static rf_expert_stats all_layers(const rf_model *m) {
    rf_expert_stats sum = {0};
    for (uint32_t layer = 0; layer < rf_model_get_info(m).n_layers; layer++) {
        rf_expert_stats st = rf_model_get_expert_stats(m, layer);
        sum.n_experts += st.n_experts;
        sum.n_loaded += st.n_loaded;
        sum.hits += st.hits;
        sum.misses += st.misses;
        sum.bytes += st.bytes;
        sum.prefetched += st.prefetched;
        sum.on_cpu += st.on_cpu;
        sum.round_trips += st.round_trips;
    }
    return sum;
}

static void decode(rf_session *s, const options *o, int32_t *id, int n, uint32_t n_vocab) {
    rf_error err;
    for (int i = 0; i < n; i++) {
        if (rf_session_forward(s, id, 1, NULL, &err) != RF_OK) die("decode", &err);
        *id = *id + 1 < (int32_t)n_vocab ? *id + 1 : o->first;
    }
}

static uint64_t fingerprint(const float *logits, uint32_t n) {
    uint64_t h = 1469598103934665603u;
    const unsigned char *p = (const unsigned char *)logits;
    for (size_t i = 0; logits && i < n * sizeof *logits; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

/* One row of the table. */
static void measure(const options *o, rf_gguf *g, rf_device *d, const char *policy, uint64_t all_bytes) {
    const int all = strcmp(policy, "all") == 0;
    rf_model_desc md = {.load_policy = RF_LOAD_PRELOAD, .n_readers = (uint32_t)o->n_readers};
    md.expert_prefetch = o->prefetch != 0;
    md.expert_cpu_below = all ? 0 : (uint32_t)o->cpu_below;
    const rf_session_desc sd = {.n_ctx = (uint32_t)(o->n_warm + o->n_tokens), .n_batch = 1};
    rf_error err;
    rf_model *m;
    rf_session *s;
    if (!all) md.budget_bytes = all_bytes / 100 * (uint64_t)o->percent;
    if (o->pinned && !all) md.pinned_bytes = all_bytes + all_bytes / 16;
    if (strcmp(policy, "lru") == 0) md.expert_policy = RF_EXPERTS_LRU;
    if (strcmp(policy, "static") == 0) md.expert_policy = RF_EXPERTS_STATIC;
    const double opened = now();
    if (rf_model_open(g, d, &md, &m, &err) != RF_OK) die("model", &err);
    if (rf_session_open(m, &sd, &s, &err) != RF_OK) die("session", &err);
    const double loaded = now();
    const uint32_t n_vocab = rf_model_get_info(m).n_vocab;
    int32_t id = o->first;
    decode(s, o, &id, o->n_warm, n_vocab);
    const rf_expert_stats before = all_layers(m);
    const double start = now();
    decode(s, o, &id, o->n_tokens, n_vocab);
    const double seconds = now() - start, n = o->n_tokens;
    const rf_expert_stats st = all_layers(m);
    float *logits;
    if (rf_session_get_logits(s, 0, &logits, &err) != RF_OK) die("logits", &err);
    const double hits = (double)(st.hits - before.hits), misses = (double)(st.misses - before.misses);
    printf("%-7s %8.1f %9.2f %8.2f %9.1f %9.1f %9.2f %9.1f %9.2f %8u/%u %7.1f %7.1f  %016llx\n", policy, n / seconds,
           seconds / n * 1e3, hits + misses > 0 ? 100 * hits / (hits + misses) : 100.0, misses / n,
           1e-6 * (double)(st.bytes - before.bytes) / n, (double)(st.prefetched - before.prefetched) / n,
           (double)(st.on_cpu - before.on_cpu) / n, (double)(st.round_trips - before.round_trips) / n, st.n_loaded,
           st.n_experts, loaded - opened, start - loaded,
           (unsigned long long)fingerprint(logits, n_vocab));
    fflush(stdout);
    if (rf_session_close(s, &err) != RF_OK) die("close", &err);
    if (rf_model_close(m, &err) != RF_OK) die("close", &err);
}

int main(int argc, char **argv) {
    options o = {NULL, NULL, "all,lfru,lru,static", 30, 1024, 512, 512, 0, 0, 0, 0};
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
    rf_forecast forecast;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--device")) o.device = value, i++;
        else if (!strcmp(argv[i], "--budget")) o.percent = atoi(value), i++;
        else if (!strcmp(argv[i], "--policies")) o.policies = value, i++;
        else if (!strcmp(argv[i], "--tokens")) o.n_tokens = atoi(value), i++;
        else if (!strcmp(argv[i], "--warm")) o.n_warm = atoi(value), i++;
        else if (!strcmp(argv[i], "--first")) o.first = atoi(value), i++;
        else if (!strcmp(argv[i], "--readers")) o.n_readers = atoi(value), i++;
        else if (!strcmp(argv[i], "--pinned")) o.pinned = 1;
        else if (!strcmp(argv[i], "--prefetch")) o.prefetch = 1;
        else if (!strcmp(argv[i], "--cpu-below")) o.cpu_below = atoi(value), i++;
        else if (argv[i][0] != '-' && !o.path) o.path = argv[i];
        else o.path = NULL, i = argc;
    }
    if (!o.path || o.percent < 1 || o.n_tokens < 1 || o.n_warm < 0 || o.first < 0)
        return fprintf(stderr, "usage: expertbench FILE [options]; the first lines of expertbench.c list them\n"), 2;
    if (rf_gguf_open(o.path, &(rf_gguf_desc){.no_map = o.cpu_below == 0}, &g, &err) != RF_OK) die("open", &err);
    if (rf_device_open(o.device, NULL, &d, &err) != RF_OK) die("device", &err);
    if (rf_model_open(g, d, NULL, &m, &err) != RF_OK) die("model", &err);
    if (rf_model_forecast(m, &(rf_session_desc){.n_ctx = 512}, &forecast, &err) != RF_OK) die("forecast", &err);
    if (all_layers(m).n_experts == 0) return fprintf(stderr, "expertbench: %s has no experts\n", o.path), 1;
    rf_model_close(m, NULL);
    printf("%s on %s: %.2f GB of weights, budget %d %%, %d tokens after %d, %s\n", o.path, rf_device_get_info(d).text,
           1e-9 * (double)forecast.weight_bytes, o.percent, o.n_tokens, o.n_warm, o.pinned ? "pinned" : "read anew");
    printf("%-7s %8s %9s %8s %9s %9s %9s %9s %9s %12s %7s %7s  logits\n", "policy", "tok/s", "ms/tok", "hits %",
           "miss/tok", "MB/tok", "ahead/tok", "cpu/tok", "asks/tok", "there/all", "load s", "warm s");
    for (const char *at = o.policies; *at;) {
        char policy[16] = {0};
        const size_t n = strcspn(at, ",");
        memcpy(policy, at, n < sizeof policy ? n : sizeof policy - 1);
        if (!strstr("all lfru lru static", policy)) return fprintf(stderr, "expertbench: policy %s?\n", policy), 2;
        measure(&o, g, d, policy, forecast.weight_bytes);
        at += n + (at[n] == ',');
    }
    if (rf_device_close(d, &err) != RF_OK || rf_gguf_close(g, &err) != RF_OK) die("close", &err);
    return 0;
}
