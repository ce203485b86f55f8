/* The expert cache: whatever part of the experts a budget holds, the same bits; which ones stay is what an independent
 * simulator of the policy says; what is in use is never evicted; failures and threads leave the cache whole. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include <dirent.h>

#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

enum { N_VOCAB = 310, N_LAYERS = 24, N_EXPERTS = 16, N_USED = 2, N_TOKENS = 12, MOST_FRAMES = N_LAYERS * N_EXPERTS };

static const char *const policies[] = {"lfru", "lru", "static"};

static char path[] = "/tmp/rf_experts_XXXXXX";
static mg_buf file;

static int open_rig(rig *r, int mode, const rf_gguf_desc *gd, const rf_device_desc *dd, const rf_model_desc *md) {
    static const rf_device_desc one_thread = {.n_threads = 1};
    return rig_try(r, &(rig_how){.path = path, .mode = mode, .gguf = gd, .device_desc = dd ? dd : &one_thread, .model = md}) == RF_OK;
}

/* Bytes that all weights take there. */
static uint64_t needed(int mode) {
    rig r;
    rf_forecast f = {0};
    if (!open_rig(&r, mode, NULL, NULL, NULL)) return 0;
    CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.expert_cache_bytes == 0, "%s", r.err.text);
    rig_close(&r);
    return f.weight_bytes;
}

static rf_model_desc percent_of(uint64_t all, uint32_t percent, uint32_t policy, uint32_t n_readers) {
    return (rf_model_desc){.budget_bytes = all * percent / 100, .expert_policy = policy, .n_readers = n_readers};
}

static int32_t token_at(uint32_t seed, uint32_t i) { return (int32_t)((seed * 7919u + i * i * 31u + i * 17u) % N_VOCAB); }

/* Logits of a prompt of 9 tokens in micro-batches of 4, and of the tokens after it one by one. */
static rf_result run_in(rf_session *s, uint32_t seed, float *out, rf_error *err) {
    int32_t tokens[N_TOKENS];
    float *logits;
    for (uint32_t i = 0; i < N_TOKENS; i++) tokens[i] = token_at(seed, i);
    rf_result r = rf_session_truncate(s, 0, 0, NULL, err);
    for (uint32_t i = 9; r == RF_OK && i <= N_TOKENS; i++) {
        r = i == 9 ? rf_session_forward(s, tokens, 9, &logits, err) : rf_session_forward(s, tokens + i - 1, 1, &logits, err);
        if (r == RF_OK) memcpy(out + (i - 9) * N_VOCAB, logits, N_VOCAB * sizeof *out);
    }
    return r;
}

enum { N_OUT = (N_TOKENS - 8) * N_VOCAB };
static const rf_session_desc short_session = {.n_ctx = 32, .n_batch = 4};

static rf_result run(rf_model *m, uint32_t seed, float *out, rf_error *err) {
    rf_session *s = NULL;
    rf_result r = rf_session_open(m, &short_session, &s, err);
    if (r == RF_OK) r = run_in(s, seed, out, err);
    rf_session_close(s, NULL);
    return r;
}

enum { N_SEEDS = 2 };
static float want[N_MODES][N_SEEDS][N_OUT];

/* Nobody uses a frame, no load is in progress, frames and their experts know each other. */
static void check_whole(rf_model *m, const char *when) {
    const rfi_cache *c = &m->store->cache;
    uint32_t used = 0;
    pthread_mutex_lock(&m->store->monitor.mutex);
    for (uint32_t f = 0; f < c->n_frames; f++) {
        used += c->frames[f].n_users;
        if (c->frames[f].expert_layer == RF_NONE) continue;
        CHECK(c->frame_of[c->layers[c->frames[f].expert_layer].first + c->frames[f].expert] == f, "%s: frame %u is not its expert's", when, f);
    }
    for (uint32_t e = 0; c->n_frames && e < c->n_experts; e++)
        CHECK(c->frame_of[e] == RF_NONE || c->layers[c->frames[c->frame_of[e]].expert_layer].first + c->frames[c->frame_of[e]].expert == e, "%s: expert %u", when, e);
    CHECK(used == 0 && (c->n_frames == 0 || c->sets[0].n_free == c->n_frames) && !c->eval_waits, "%s: %u uses are left, %u of %u frames are free", when, used, c->sets[0].n_free, c->n_frames);
    for (uint32_t slot = 0; slot < m->store->n_tensors; slot++)
        CHECK(atomic_load(&m->store->tensors[slot].cell.word) / RFI_PIN == 0, "%s: slot %u is pinned", when, slot);
    pthread_mutex_unlock(&m->store->monitor.mutex);
}

static uint32_t loaded_experts(rf_model *m) {
    uint32_t n = 0;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) n += rf_model_get_expert_stats(m, layer).n_loaded;
    return n;
}

/* Every policy at any budget: the same bits, no more memory than that, and nothing is loaded that was not chosen. */
static void test_budgets(void) {
    static const uint32_t percents[] = {100, 30, 10};
    static float got[N_OUT];
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        const uint64_t all = needed(mode);
        for (uint32_t i = 0; i < RFI_COUNT(percents); i++)
            for (uint32_t policy = RF_EXPERTS_LFRU; policy <= (percents[i] == 30 ? RF_EXPERTS_STATIC : RF_EXPERTS_LFRU); policy++) {
                const rf_model_desc md = percent_of(all, percents[i], policy, i % 2 ? 3 : 0);
                rig r;
                rf_forecast f;
                REQUIRE(open_rig(&r, mode, NULL, NULL, &md), "%s", r.err.text);
                CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.weight_bytes <= md.budget_bytes && f.streamed_bytes == 0, "%s", r.err.text);
                CHECK((f.expert_cache_bytes > 0) == (percents[i] < 100), "%u %%: %llu bytes of cache", percents[i], (unsigned long long)f.expert_cache_bytes);
                for (uint32_t seed = 0; seed < N_SEEDS; seed++) {
                    CHECK(run(r.m, seed, got, &r.err) == RF_OK, "%s, %u %%: %s", modes[mode], percents[i], r.err.text);
                    CHECK(memcmp(got, want[mode][seed], sizeof got) == 0, "%s, %u %%, %s: other bits", modes[mode], percents[i], policies[policy]);
                }
                rf_loading_stats st = rf_model_get_loading_stats(r.m);
                CHECK(st.device_bytes <= md.budget_bytes && (mode == MAPPED || st.device_bytes <= f.weight_bytes), "%llu bytes", (unsigned long long)st.device_bytes);
                const uint32_t n_frames = r.m->store->cache.n_frames;
                uint64_t misses = 0;
                for (uint32_t layer = 0; layer < N_LAYERS; layer++) misses += rf_model_get_expert_stats(r.m, layer).misses;
                if (percents[i] < 100) CHECK(loaded_experts(r.m) <= n_frames && st.loads == r.m->store->n_resident + 3 * misses,
                                             "%llu loads, %llu misses", (unsigned long long)st.loads, (unsigned long long)misses);
                check_whole(r.m, "afterwards");
                CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0 && loaded_experts(r.m) == 0, "clear");
                CHECK(run(r.m, 0, got, &r.err) == RF_OK && memcmp(got, want[mode][0], sizeof got) == 0, "after clear: %s", r.err.text);
                rig_close(&r);
            }
    }
}

/* What cannot hold a layer's experts is refused with the least that can; other options that are not known, too. */
static void test_limits(void) {
    static float got[N_OUT];
    rig r;
    rf_forecast f;
    const uint64_t all = needed(COPIED);
    CHECK(!open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.expert_policy = RF_EXPERTS_STATIC + 1}), "an unknown policy");
    REQUIRE(open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.expert_cache_bytes = 4096}), "%s", r.err.text);
    CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_ERR_MEMORY && strstr(r.err.text, "expert_cache_bytes") && strstr(r.err.text, "at least"), "%s", r.err.text);
    const uint64_t least = r.m->store->cache.frame_bytes * N_EXPERTS;
    CHECK(run(r.m, 0, got, &r.err) == RF_ERR_MEMORY && rf_model_get_loading_stats(r.m).device_bytes == 0, "%s", r.err.text);
    rig_close(&r);
    for (uint64_t bytes = least - 1; bytes <= least; bytes++) {
        REQUIRE(open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.expert_cache_bytes = bytes}), "%s", r.err.text);
        CHECK(run(r.m, 0, got, &r.err) == (bytes < least ? RF_ERR_MEMORY : RF_OK), "%llu of %llu bytes: %s", (unsigned long long)bytes, (unsigned long long)least, r.err.text);
        if (bytes == least) CHECK(memcmp(got, want[COPIED][0], sizeof got) == 0 && r.m->store->cache.n_frames == N_EXPERTS, "other bits");
        rig_close(&r);
    }
    /* a cap beyond all experts is none; one below the budget's room is kept */
    REQUIRE(open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.expert_cache_bytes = all}), "%s", r.err.text);
    CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.expert_cache_bytes == 0 && f.weight_bytes == all, "%s", r.err.text);
    CHECK(rf_model_load_tensor(r.m, "blk.1.ffn_up_exps.weight", &r.err) == RF_OK, "%s", r.err.text);
    rig_close(&r);
    REQUIRE(open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.budget_bytes = all / 2, .expert_cache_bytes = 2 * least}), "%s", r.err.text);
    CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.expert_cache_bytes == 2 * least && f.weight_bytes < all / 4, "%s", r.err.text);
    CHECK(rf_model_load_tensor(r.m, "blk.1.ffn_up_exps.weight", &r.err) == RF_ERR_MEMORY && rf_model_load_tensor(r.m, "blk.1.attn_q.weight", &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && loaded_experts(r.m) == 0 && !rf_model_is_layer_loaded(r.m, 0), "%s", r.err.text);
    rig_close(&r);
}

/* A budget that has no room for a layer's experts streams them, whatever is said of the cache. */
static void test_no_room(void) {
    static float got[N_OUT];
    rig r;
    rf_forecast f;
    const uint64_t all = needed(COPIED);
    REQUIRE(open_rig(&r, COPIED, NULL, NULL, NULL), "%s", r.err.text);
    const rfi_store *s = r.m->store;
    const uint64_t layer = s->cache.frame_bytes * N_EXPERTS, budget = s->device_bytes_needed - s->cache.expert_bytes + layer - 1;
    rig_close(&r);
    for (uint64_t cap = 1; cap <= all; cap = cap == 1 ? 2 * layer : cap == 2 * layer ? all : all + 1) {
        REQUIRE(open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.budget_bytes = budget, .expert_cache_bytes = cap}), "%s", r.err.text);
        CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && f.expert_cache_bytes == 0 && f.streamed_bytes > 0 && f.weight_bytes <= budget, "%s", r.err.text);
        CHECK(run(r.m, 0, got, &r.err) == RF_OK && memcmp(got, want[COPIED][0], sizeof got) == 0, "%s", r.err.text);
        CHECK(rf_model_get_loading_stats(r.m).device_bytes <= budget, "beyond the budget");
        rig_close(&r);
    }
}

/* Another model on the device gives way for what one takes, not for all that it has; and not for one that cannot run, which is
 * told so and does not wait. */
static void test_neighbours(void) {
    static float got[N_OUT];
    rig r, other = {0};
    REQUIRE(open_rig(&r, COPIED, NULL, NULL, NULL), "%s", r.err.text);
    const uint64_t all = r.m->store->device_bytes_needed, cap = 2 * N_EXPERTS * r.m->store->cache.frame_bytes,
                   both = 2 * all - r.m->store->cache.expert_bytes + cap;
    rig_close(&r);
    const struct { rf_model_desc desc; rf_result result; uint64_t device_bytes; } cases[] = {
        {{.expert_cache_bytes = cap}, RF_OK, both}, {{.expert_cache_bytes = cap}, RF_OK, 0},
        {{.budget_bytes = 4096}, RF_ERR_MEMORY, both}, {{.budget_bytes = 4096}, RF_ERR_MEMORY, 0}, {{.expert_cache_bytes = 4096}, RF_ERR_MEMORY, 0}};
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        REQUIRE(open_rig(&r, COPIED, NULL, &(rf_device_desc){.n_threads = 1, .budget_bytes = cases[i].device_bytes}, NULL), "%s", r.err.text);
        REQUIRE(rf_gguf_open(path, &(rf_gguf_desc){.no_map = 1}, &other.g, &r.err) == RF_OK && rf_model_open(other.g, r.d, &cases[i].desc, &other.m, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(run(other.m, 0, got, &r.err) == cases[i].result, "case %zu: %s", i, r.err.text);
        if (cases[i].result == RF_OK) CHECK(memcmp(got, want[COPIED][0], sizeof got) == 0, "other bits");
        CHECK(rf_model_get_loading_stats(r.m).evictions == 0 && rf_model_get_loading_stats(r.m).device_bytes == all, "case %zu: it gave way", i);
        CHECK(rf_model_close(other.m, NULL) == RF_OK && rf_gguf_close(other.g, NULL) == RF_OK, "busy");
        rig_close(&r);
    }
}

/* Wait until the cache is full: 1. */
static int is_filled(rf_model *m) {
    for (int i = 0; i < 20000 && loaded_experts(m) < m->store->cache.n_frames; i++) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return m->store->cache.n_frames > 0 && loaded_experts(m) == m->store->cache.n_frames;
}

/* The cache is filled again after all was dropped, between calls or during one, and with what was chosen most. */
static void test_refill(void) {
    static float got[N_OUT];
    for (int during = 0; during < 2; during++) {
        rf_model_desc md = percent_of(needed(COPIED), 30, RF_EXPERTS_LFRU, 2);
        rig r;
        uint64_t cancels;
        double least_there = INFINITY, most_absent = 0;
        md.expert_prefetch = 1;
        REQUIRE(open_rig(&r, COPIED, NULL, NULL, &md) && run(r.m, 1, got, &r.err) == RF_OK, "%s", r.err.text);
        const rfi_cache *c = &r.m->store->cache;
        CHECK(is_filled(r.m), "%u of %u frames", loaded_experts(r.m), c->n_frames);
        if (during) CHECK(rfi_store_begin(r.m->store, &cancels, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && loaded_experts(r.m) == 0, "clear");
        if (during) rfi_store_end(r.m->store);
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && is_filled(r.m), "%s: %u of %u frames", r.err.text, loaded_experts(r.m), c->n_frames);
        for (uint32_t e = 0; e < c->n_experts; e++)
            if (c->frame_of[e] != RF_NONE) least_there = fmin(least_there, c->score[e]);
            else most_absent = fmax(most_absent, c->score[e]);
        CHECK(least_there >= most_absent && most_absent < INFINITY, "one chosen %g is there, one chosen %g is not", least_there, most_absent);
        check_whole(r.m, "filled again");
        CHECK(run(r.m, 0, got, &r.err) == RF_OK && memcmp(got, want[COPIED][0], sizeof got) == 0, "%s", r.err.text);
        rig_close(&r);
    }
}

/* Readers with nothing else to do fill the cache, without evicting anything, to the budget; the bits stay. */
static void test_prefetch(void) {
    static float got[N_OUT];
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        rf_model_desc md = percent_of(needed(mode), 30, RF_EXPERTS_LFRU, 2);
        rig r;
        md.expert_prefetch = 1;
        REQUIRE(open_rig(&r, mode, NULL, NULL, &md), "%s", r.err.text);
        if (mode == COPIED) CHECK(run(r.m, 1, got, &r.err) == RF_OK && memcmp(got, want[mode][1], sizeof got) == 0, "while it fills: %s", r.err.text);
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
        const uint32_t n_frames = r.m->store->cache.n_frames;
        CHECK(is_filled(r.m), "%s: %u of %u frames are full", modes[mode], loaded_experts(r.m), n_frames);
        uint64_t prefetched = 0, misses = 0;
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            rf_expert_stats st = rf_model_get_expert_stats(r.m, layer);
            prefetched += st.prefetched, misses += st.misses;
        }
        CHECK(mode == COPIED || (prefetched == n_frames && misses == 0), "%llu prefetched, %llu misses", (unsigned long long)prefetched, (unsigned long long)misses);
        CHECK(mode == COPIED || rf_model_get_loading_stats(r.m).evictions == 0, "evicted");
        CHECK(run(r.m, 0, got, &r.err) == RF_OK && memcmp(got, want[mode][0], sizeof got) == 0, "%s: %s", modes[mode], r.err.text);
        CHECK(rf_model_get_loading_stats(r.m).device_bytes <= md.budget_bytes, "beyond the budget");
        check_whole(r.m, "afterwards");
        CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "clear");
        CHECK(run(r.m, 0, got, &r.err) == RF_OK && memcmp(got, want[mode][0], sizeof got) == 0, "after clear: %s", r.err.text);
        rig_close(&r);
    }
}

/* Room for two layers' experts, and those that were chosen fewer than `below` times on the CPU. */
static void on_cpu(uint32_t below, const float *expected, double tolerance) {
    static float got[N_OUT];
    rig r;
    rf_session *s;
    uint64_t hits = 0, misses = 0, on_cpu = 0;
    double worst = 0, most = 0;
    rf_model_desc md = {.expert_cpu_below = below, .n_readers = 2};
    REQUIRE(open_rig(&r, MAPPED, NULL, NULL, &md), "%s", r.err.text);
    md.expert_cache_bytes = 2 * N_EXPERTS * r.m->store->cache.frame_bytes;
    rig_close(&r);
    REQUIRE(open_rig(&r, MAPPED, NULL, NULL, &md) && rf_session_open(r.m, &short_session, &s, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(run_in(s, 1, got, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < N_OUT; i++) {
        worst = rft_worst(worst, fabs((double)got[i] - (double)expected[i]));
        most = fmax(most, fabs((double)expected[i]));
    }
    CHECK(worst <= tolerance * most, "below %u: off by %g of %g", below, worst, most);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        rf_expert_stats st = rf_model_get_expert_stats(r.m, layer);
        hits += st.hits, misses += st.misses, on_cpu += st.on_cpu;
    }
    CHECK(on_cpu > 0 && misses > 0 && rf_model_get_loading_stats(r.m).loads == r.m->store->n_resident + 3 * misses, "%llu on the CPU", (unsigned long long)on_cpu);
    printf("    below %u: %llu hits, %llu misses, %llu on the CPU; off by %.2g\n", below, (unsigned long long)hits, (unsigned long long)misses,
           (unsigned long long)on_cpu, worst / most);
    rf_session_close(s, NULL);
    check_whole(r.m, "afterwards");
    rig_close(&r);
}

/* Experts that were chosen little are computed by the CPU: but for the order of sums the same logits, which tips some keys in
 * half precision and some int8 inputs of quantized weights to the other side; fewer loads. With all experts there, the same bits. */
static void test_on_cpu(void) {
    static float expected[N_OUT], got[N_OUT];
    mg_buf floats = {0};
    mg_llama(&floats, &(mg_options){.arch = "qwen3moe", .n_layers = N_LAYERS, .n_experts = N_EXPERTS, .n_used = N_USED, .type = MG_F32, .n_vocab = N_VOCAB, .seed = 5});
    for (int quantized = 0; quantized < 2; quantized++) {
        rig r;
        REQUIRE(mg_write_file(quantized ? &file : &floats, path), "cannot write %s", path);
        REQUIRE(open_rig(&r, MAPPED, NULL, NULL, NULL) && run(r.m, 1, expected, &r.err) == RF_OK, "%s", r.err.text);
        rig_close(&r);
        on_cpu(2, expected, quantized ? 2e-2 : 1e-3);
        on_cpu(1000, expected, quantized ? 2e-2 : 1e-3);
    }
    mg_free(&floats);
    rig r;
    rf_session *s = NULL;
    REQUIRE(open_rig(&r, MAPPED, NULL, NULL, &(rf_model_desc){.expert_cpu_below = 5}), "%s", r.err.text);
    CHECK(run(r.m, 1, got, &r.err) == RF_OK && memcmp(got, want[MAPPED][1], sizeof got) == 0, "all are there: %s", r.err.text);
    rig_close(&r);
    REQUIRE(open_rig(&r, COPIED, NULL, NULL, &(rf_model_desc){.expert_cpu_below = 5}), "%s", r.err.text);
    CHECK(rf_session_open(r.m, NULL, &s, &r.err) == RF_ERR_UNSUPPORTED && strstr(r.err.text, "mapped"), "%s", r.err.text);
    rig_close(&r);
}

static uint32_t count_threads(void) {
    uint32_t n = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (const struct dirent *e; tasks && (e = readdir(tasks)) != NULL;) n += e->d_name[0] != '.';
    if (tasks) closedir(tasks);
    return n;
}

/* How many there are when they are `want`, or after five seconds: one that was joined is listed until the kernel is done with it. */
static uint32_t wait_for_threads(uint32_t want) {
    for (int i = 0; i < 5000 && count_threads() != want; i++) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return count_threads();
}

/* Whatever sessions have experts computed by the CPU share its threads: those of their device, or as many as a CPU device has. */
static void test_threads_on_cpu(void) {
    for (int null = 0; null < 2; null++) {
        enum { N = 4 };
        rf_session *s[N];
        rig r;
        /* ThreadSanitizer has one of its own */
        const uint32_t before = RFT_SANITIZED ? count_threads() : wait_for_threads(1), most = before + (null ? rfi_cpu_count() - 1 : 2);
        REQUIRE(open_rig(&r, null ? NULLED : MAPPED, &(rf_gguf_desc){0}, &(rf_device_desc){.n_threads = 3}, &(rf_model_desc){.expert_cpu_below = 2}), "%s", r.err.text);
        for (uint32_t i = 0; i < N; i++) REQUIRE(rf_session_open(r.m, &short_session, &s[i], &r.err) == RF_OK && s[i]->fallback, "%s", r.err.text);
        const uint32_t now = wait_for_threads(most);
        CHECK(now == most, "%s: %u threads, and %u at first; want %u", null ? "null" : "cpu", now, before, most);
        for (uint32_t i = 0; i < N; i++) rf_session_close(s[i], NULL);
        rig_close(&r);
        const uint32_t left = wait_for_threads(before);
        CHECK(left == before, "%u threads are left", left - before);
    }
}

/* ---- the policies against a simulator: no sums that go on, no units, only lists of what was chosen when ---- */

typedef struct choice { /* of a layer by the rows of a step */
    uint32_t layer, n_rows, rows_of[N_EXPERTS];
} choice;

enum { MOST_CHOICES = 300 * N_LAYERS };
static choice trace[MOST_CHOICES];
static uint32_t n_trace;

typedef struct count {
    uint64_t hits, misses;
} count;

/* The trace goes round and round through the layers: the last choice of a layer up to choice `now`, as an index + 1. */
static uint32_t last_of(uint32_t now, uint32_t layer) {
    const uint32_t step = now / N_LAYERS;
    return layer <= now % N_LAYERS ? step * N_LAYERS + layer + 1 : step ? (step - 1) * N_LAYERS + layer + 1 : 0;
}

/* How much expert e of a layer was chosen up to choice `now`, a choice of 48 rows ago counting half. */
static double worth(uint32_t now, uint32_t layer, uint32_t e) {
    double sum = 0, age = last_of(now, layer) <= now - now % N_LAYERS ? trace[now - now % N_LAYERS].n_rows : 0;
    for (uint32_t i = last_of(now, layer); i > 0; i = i > N_LAYERS ? i - N_LAYERS : 0) {
        sum += trace[i - 1].rows_of[e] * exp2(-age / 48);
        age += trace[i - 1].n_rows; /* as many in every layer of a step */
    }
    return sum;
}

/* How long ago, in steps, somebody chose it: the fewer the more it is worth. */
static double freshness(uint32_t now, uint32_t layer, uint32_t e) {
    for (uint32_t i = last_of(now, layer); i > 0; i = i > N_LAYERS ? i - N_LAYERS : 0)
        if (trace[i - 1].rows_of[e]) return (double)((i - 1) / N_LAYERS);
    return -1;
}

/* least: so many frames at the end take turns where all others stay. */
static void simulate(uint32_t policy, uint32_t n_frames, uint32_t least, count out[N_LAYERS]) {
    static int32_t in[MOST_FRAMES]; /* layer * N_EXPERTS + expert; -1: none */
    memset(out, 0, N_LAYERS * sizeof *out);
    for (uint32_t f = 0; f < n_frames; f++) in[f] = -1;
    for (uint32_t now = 0; now < n_trace; now++) {
        const choice *t = &trace[now];
        uint8_t used[MOST_FRAMES] = {0}, there[N_EXPERTS] = {0};
        for (uint32_t f = 0; f < n_frames; f++)
            if (in[f] >= 0 && (uint32_t)in[f] / N_EXPERTS == t->layer && t->rows_of[in[f] % N_EXPERTS]) used[f] = there[in[f] % N_EXPERTS] = 1;
        for (uint32_t e = 0; e < N_EXPERTS; e++) {
            if (!t->rows_of[e]) continue;
            if (there[e]) {
                out[t->layer].hits++;
                continue;
            }
            out[t->layer].misses++;
            uint32_t best = RF_NONE;
            double lowest = 0;
            for (uint32_t f = 0; f < n_frames; f++) {
                if (used[f]) continue;
                const uint32_t layer = (uint32_t)in[f] / N_EXPERTS, expert = (uint32_t)in[f] % N_EXPERTS;
                double value = in[f] < 0                                                          ? -2
                               : policy == RF_EXPERTS_LFRU                                        ? worth(now, layer, expert)
                               : policy == RF_EXPERTS_STATIC && f + least < n_frames             ? 1e300
                                                                                                  : freshness(now, layer, expert);
                if (best == RF_NONE || value < lowest) best = f, lowest = value;
            }
            in[best] = (int32_t)(t->layer * N_EXPERTS + e);
            used[best] = 1;
        }
    }
}

static void check_counts(rf_model *m, const count *sim, const char *what) {
    uint64_t hits = 0, misses = 0;
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        rf_expert_stats st = rf_model_get_expert_stats(m, layer);
        CHECK(st.hits == sim[layer].hits && st.misses == sim[layer].misses, "%s, layer %u: %llu hits, %llu misses, the simulator has %llu and %llu", what, layer,
              (unsigned long long)st.hits, (unsigned long long)st.misses, (unsigned long long)sim[layer].hits, (unsigned long long)sim[layer].misses);
        hits += st.hits, misses += st.misses;
    }
    printf("    %s: %.1f %% hits of %llu\n", what, 100.0 * (double)hits / (double)(hits + misses), (unsigned long long)(hits + misses));
}

static rf_device_api traced;
static uint64_t trace_at; /* of the route in the session's memory */

static rf_result traced_mem_read(rf_queue *q, const rf_mem *src, uint64_t offset, void *dst, uint64_t n, rf_ticket *ticket, rf_error *err) {
    rf_result r = rfi_cpu_api.mem_read(q, src, offset, dst, n, ticket, err);
    if (r != RF_OK || offset != trace_at || n_trace == MOST_CHOICES) return r;
    choice *t = &trace[n_trace];
    *t = (choice){.layer = n_trace % N_LAYERS, .n_rows = (uint32_t)(n / (2 * N_USED * sizeof(int32_t)))};
    for (uint32_t i = 0; i < t->n_rows * 2 * N_USED; i++)
        if (i % (2 * N_USED) < N_USED) t->rows_of[((const int32_t *)dst)[i]]++;
    n_trace++;
    return r;
}

/* Hits and misses of an evaluation are those of a simulator that was told the choices. */
static void test_policy(void) {
    static float got[N_OUT];
    const uint64_t all = needed(COPIED);
    traced = rfi_cpu_api;
    traced.mem_read = traced_mem_read;
    for (uint32_t policy = RF_EXPERTS_LFRU; policy <= RF_EXPERTS_STATIC; policy++) {
        const rf_model_desc md = percent_of(all, 30, policy, 2);
        rig r;
        rf_session *s;
        count sim[N_LAYERS];
        REQUIRE(open_rig(&r, COPIED, NULL, NULL, &md) && rf_session_open(r.m, &short_session, &s, &r.err) == RF_OK, "%s", r.err.text);
        r.d->api = &traced;
        const rf_plan *plan = rf_model_get_plan(r.m);
        for (uint32_t i = 0; i < plan->n_ops; i++)
            if (plan->ops[i].kind == RF_OP_ROUTE) trace_at = s->buffer_offset[plan->ops[i].out];
        n_trace = 0;
        for (uint32_t seed = 0; seed < N_SEEDS; seed++)
            CHECK(run_in(s, seed, got, &r.err) == RF_OK && memcmp(got, want[COPIED][seed], sizeof got) == 0, "%s", r.err.text);
        uint64_t n = 0, expected = 0;
        for (uint32_t i = 0; i < n_trace; i++)
            for (uint32_t e = 0; e < N_EXPERTS; e++) n += trace[i].rows_of[e];
        expected = (uint64_t)N_SEEDS * N_TOKENS * N_LAYERS * N_USED;
        CHECK(n == expected, "%llu choices, want %llu", (unsigned long long)n, (unsigned long long)expected);
        simulate(policy, r.m->store->cache.n_frames, N_EXPERTS, sim);
        check_counts(r.m, sim, policies[policy]);
        rf_session_close(s, NULL);
        rig_close(&r);
    }
}

/* Choices such as models make: in each layer 10 % of the experts get 60 % of them, 30 % 85 %, and these change every so
 * many tokens. Short of favourites, LFRU wins. */
static void make_trace(uint32_t n_tokens, uint32_t change) {
    mg_rng rng = {99};
    n_trace = 0;
    for (uint32_t token = 0; token < n_tokens; token++)
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            choice *t = &trace[n_trace++];
            *t = (choice){.layer = layer, .n_rows = 1};
            for (uint32_t n = 0; n < N_USED;) {
                const uint32_t p = mg_below(&rng, 100), rank = p < 60 ? mg_below(&rng, 2) : p < 85 ? 2 + mg_below(&rng, 3) : 5 + mg_below(&rng, N_EXPERTS - 5);
                const uint32_t e = (rank * 5 + layer * 3 + token / change * 7) % N_EXPERTS;
                if (t->rows_of[e]) continue;
                t->rows_of[e] = 1;
                n++;
            }
        }
}

static void test_policies_on_favourites(void) {
    double rate[3];
    const uint64_t all = needed(NULLED);
    make_trace(300, 150);
    for (uint32_t policy = RF_EXPERTS_LFRU; policy <= RF_EXPERTS_STATIC; policy++) {
        const rf_model_desc md = percent_of(all, 30, policy, 0);
        rig r;
        count sim[N_LAYERS];
        uint64_t cancels, hits = 0, misses = 0;
        REQUIRE(open_rig(&r, NULLED, NULL, NULL, &md) && rfi_store_begin(r.m->store, &cancels, &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t i = 0; i < n_trace; i++) {
            rfi_expert_layer *layer = &r.m->store->cache.layers[trace[i].layer];
            uint32_t frames[N_EXPERTS];
            REQUIRE(rfi_cache_acquire(r.m->store, layer, trace[i].rows_of, 1, cancels, frames, &r.err) == RF_OK, "%s", r.err.text);
            for (uint32_t e = 0; e < N_EXPERTS; e++)
                for (uint32_t k = 0; trace[i].rows_of[e] && k < layer->n_weights; k++) {
                    CHECK(rfi_store_pin(r.m->store, rfi_expert_slot(layer, k, e), cancels, &r.err) == RF_OK, "%s", r.err.text);
                    rfi_store_unpin(r.m->store, rfi_expert_slot(layer, k, e));
                }
            rfi_cache_release(r.m->store, layer, frames);
        }
        rfi_store_end(r.m->store);
        simulate(policy, r.m->store->cache.n_frames, N_EXPERTS, sim);
        check_counts(r.m, sim, policies[policy]);
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) hits += sim[layer].hits, misses += sim[layer].misses;
        rate[policy] = (double)hits / (double)(hits + misses);
        check_whole(r.m, "afterwards");
        rig_close(&r);
    }
    CHECK(rate[0] > rate[1] && rate[1] > rate[2], "lfru %g, lru %g, static %g", rate[0], rate[1], rate[2]);
}

/* ---- what is in use stays ---- */

typedef struct worker {
    rf_model *m;
    int mode, rounds;
    uint32_t seed;
    rf_result result;
    rf_error err;
    _Atomic int *stop;
    _Atomic int done;
} worker;

static void *evaluate(void *arg) {
    worker *w = (worker *)arg;
    float *got = (float *)malloc(N_OUT * sizeof *got);
    for (int i = 0; got && i < w->rounds && w->result == RF_OK; i++) {
        w->result = run(w->m, w->seed, got, &w->err);
        if (w->result == RF_OK && memcmp(got, want[w->mode][w->seed], N_OUT * sizeof *got) != 0) w->result = RF_ERR_FORMAT;
    }
    if (!got) w->result = RF_ERR_MEMORY;
    free(got);
    atomic_store(&w->done, 1);
    return NULL;
}

/* Frames that are held keep their experts through anything; an eval that finds too few waits until they are given back,
 * or for a cancel. */
static void test_held(void) {
    const uint64_t all = needed(COPIED);
    for (int cancel = 0; cancel < 2; cancel++) {
        const rf_model_desc md = percent_of(all, 10, RF_EXPERTS_LFRU, 1);
        rig r;
        uint64_t cancels;
        uint32_t frames[N_EXPERTS], rows_of[N_EXPERTS];
        REQUIRE(open_rig(&r, COPIED, NULL, NULL, &md) && rfi_store_begin(r.m->store, &cancels, &r.err) == RF_OK, "%s", r.err.text);
        rfi_store *s = r.m->store;
        rfi_expert_layer *layer = &s->cache.layers[3];
        for (uint32_t e = 0; e < N_EXPERTS; e++) rows_of[e] = 1;
        REQUIRE(s->cache.n_frames < 3 * N_EXPERTS, "%u frames", s->cache.n_frames);
        REQUIRE(rfi_cache_acquire(s, layer, rows_of, 1, cancels, frames, &r.err) == RF_OK, "%s", r.err.text);
        for (uint32_t e = 0; e < N_EXPERTS; e++) REQUIRE(rfi_store_pin(s, rfi_expert_slot(layer, 0, e), cancels, &r.err) == RF_OK, "%s", r.err.text);
        uint64_t offset = s->tensors[rfi_expert_slot(layer, 0, 5)].offset;
        worker w = {.m = r.m, .mode = COPIED, .rounds = 2, .seed = 1};
        uint32_t more[N_EXPERTS], n_left = s->cache.sets[0].n_free, some[N_EXPERTS] = {0};
        REQUIRE(n_left < N_EXPERTS, "%u are left", n_left);
        for (uint32_t e = 0; e + 1 < n_left; e++) some[e] = 1; /* one is left: no step can run */
        if (n_left > 1) REQUIRE(rfi_cache_acquire(s, layer + 1, some, 1, cancels, more, &r.err) == RF_OK, "%s", r.err.text);
        pthread_t thread;
        REQUIRE(pthread_create(&thread, NULL, evaluate, &w) == 0, "thread");
        int waiting = 0;
        while (!waiting && !atomic_load(&w.done)) {
            pthread_mutex_lock(&s->monitor.mutex);
            waiting = s->cache.eval_waits;
            pthread_mutex_unlock(&s->monitor.mutex);
            sched_yield();
        }
        CHECK(waiting && !atomic_load(&w.done), "it ran without frames: %s", w.err.text);
        for (uint32_t e = 0; e < N_EXPERTS; e++) {
            CHECK(rfi_cell_is_ready(&s->tensors[rfi_expert_slot(layer, 0, e)].cell), "expert %u was evicted", e);
            CHECK(frames[e] == s->cache.frame_of[layer->first + e], "expert %u has moved", e);
        }
        CHECK(s->tensors[rfi_expert_slot(layer, 0, 5)].offset == offset, "moved");
        if (cancel) {
            rf_model_cancel_loading(r.m);
            pthread_join(thread, NULL);
            CHECK(w.result == RF_ERR_CANCELLED, "%s", w.err.text);
        }
        for (uint32_t e = 0; e < N_EXPERTS; e++) rfi_store_unpin(s, rfi_expert_slot(layer, 0, e));
        rfi_cache_release(s, layer, frames);
        if (n_left > 1) rfi_cache_release(s, layer + 1, more);
        if (!cancel) pthread_join(thread, NULL);
        if (!cancel) CHECK(w.result == RF_OK, "%s: %s", rf_result_name(w.result), w.err.text);
        rfi_store_end(s);
        check_whole(r.m, "afterwards");
        rig_close(&r);
    }
}

static void *clear(void *arg) {
    worker *w = (worker *)arg;
    while (!atomic_load(w->stop)) {
        rf_model_clear_device_cache(w->m, NULL, NULL);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return NULL;
}

/* Two sessions and more at once, with room for little more than one of them, while another thread drops all it can. */
static void test_threads(void) {
    enum { N = 5 };
    for (int mode = COPIED; mode < N_MODES; mode++) {
        rf_model_desc md = percent_of(needed(mode), mode == COPIED ? 10 : 20, RF_EXPERTS_LFRU, 2);
        rig r;
        md.expert_prefetch = mode == NULLED;
        worker w[N];
        pthread_t threads[N];
        _Atomic int stop = 0;
        REQUIRE(open_rig(&r, mode, NULL, NULL, &md), "%s", r.err.text);
        for (int i = 0; i < N; i++) {
            w[i] = (worker){.m = r.m, .mode = mode, .rounds = 2, .seed = (uint32_t)i % N_SEEDS, .stop = &stop};
            REQUIRE(pthread_create(&threads[i], NULL, i + 1 < N ? evaluate : clear, &w[i]) == 0, "thread");
        }
        for (int i = 0; i < N; i++) {
            if (i + 1 == N) atomic_store(&stop, 1);
            pthread_join(threads[i], NULL);
            CHECK(w[i].result == RF_OK, "%s, thread %d: %s: %s", modes[mode], i, rf_result_name(w[i].result), w[i].err.text);
        }
        check_whole(r.m, "afterwards");
        rig_close(&r);
    }
}

/* ---- failures ---- */

/* A device call fails, at once or at its ticket: the run says so, and the next one has the right bits. */
static void test_failing_device(void) {
    static float got[N_OUT];
    const uint64_t all = needed(NULLED);
    int failed = 0;
    for (uint32_t late = 0; late < 2; late++)
        for (uint64_t n = 4; n < 2500; n += 1 + n / 6) {
            const rf_model_desc md = percent_of(all, 10, RF_EXPERTS_LFRU, n % 2 ? 2 : 0);
            rig r;
            if (!open_rig(&r, NULLED, NULL, &(rf_device_desc){.fail_call = n, .fail_late = late}, &md)) continue;
            rf_result res = run(r.m, 1, got, &r.err);
            CHECK(res == RF_OK || (res == RF_ERR_DEVICE && r.err.sys == -1), "call %d: %s", (int)n, r.err.text);
            failed += res != RF_OK;
            check_whole(r.m, "after a failure");
            const int again = res == RF_OK; /* then the call was none of that run's */
            res = run(r.m, 1, got, &r.err);
            CHECK((res == RF_OK && memcmp(got, want[NULLED][1], sizeof got) == 0) || (again && res == RF_ERR_DEVICE), "call %d, again: %s", (int)n, r.err.text);
            check_whole(r.m, "after another run");
            rig_close(&r);
        }
    CHECK(failed > 20, "%d failures", failed);
}

static _Atomic uint64_t n_reads, failing_read; /* of tensors */

static int64_t open_file(const char *name, uint64_t *size_bytes, void *user) {
    (void)user;
    int fd = open(name, O_RDONLY);
    *size_bytes = file.n;
    return fd >= 0 ? fd : -errno;
}
static int64_t read_file(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    (void)user;
    if (atomic_fetch_add(&n_reads, 1) + 1 == atomic_load(&failing_read)) return -EIO;
    ssize_t got = pread((int)handle, dst, n, (off_t)offset);
    return got >= 0 ? got : -errno;
}
static void close_file(int64_t handle, void *user) {
    (void)user;
    close((int)handle);
}

/* The same of a read of the file. */
static void test_failing_reads(void) {
    static float got[N_OUT];
    const rf_gguf_desc gd = {.no_map = 1, .io = {.open_fn = open_file, .read_fn = read_file, .close_fn = close_file}};
    const rf_model_desc md = percent_of(needed(COPIED), 10, RF_EXPERTS_LFRU, 0);
    int failed = 0;
    for (uint64_t n = 1; n < 400; n += 1 + n) {
        rig r;
        atomic_store(&failing_read, 0);
        REQUIRE(open_rig(&r, COPIED, &gd, NULL, &md), "%s", r.err.text);
        atomic_store(&n_reads, 0);
        atomic_store(&failing_read, n);
        rf_result res = run(r.m, 0, got, &r.err);
        CHECK(res == RF_OK || (res == RF_ERR_IO && r.err.sys == EIO), "read %d: %s", (int)n, r.err.text);
        failed += res != RF_OK;
        check_whole(r.m, "after a failure");
        CHECK(run(r.m, 0, got, &r.err) == RF_OK && memcmp(got, want[COPIED][0], sizeof got) == 0, "read %d, again: %s", (int)n, r.err.text);
        rig_close(&r);
    }
    atomic_store(&failing_read, 0);
    CHECK(failed > 4, "%d failures", failed);
}

static rf_model *cancelled; /* by a read, when nobody waits for one */
static _Atomic int nobody_waits, has_cancelled;

static int64_t read_until_cancel(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    if (atomic_fetch_add(&n_reads, 1) + 1 == atomic_load(&failing_read)) {
        while (!atomic_load(&nobody_waits)) sched_yield();
        rf_model_cancel_loading(cancelled);
        atomic_store(&has_cancelled, 1);
    }
    (void)user;
    return pread((int)handle, dst, n, (off_t)offset);
}

/* A cancel ends also what nobody waits for, until something is asked for again. */
static void test_cancelled_prefetch(void) {
    static float got[N_OUT];
    const rf_gguf_desc gd = {.no_map = 1, .io = {.open_fn = open_file, .read_fn = read_until_cancel, .close_fn = close_file}};
    rf_model_desc md = percent_of(needed(COPIED), 30, RF_EXPERTS_LFRU, 1);
    rig r;
    md.expert_prefetch = 1;
    REQUIRE(open_rig(&r, COPIED, &gd, NULL, &md), "%s", r.err.text);
    const uint32_t n_resident = rf_model_get_info(r.m).n_tensors - 3 * N_EXPERTS * N_LAYERS;
    cancelled = r.m;
    atomic_store(&n_reads, 0);
    atomic_store(&failing_read, n_resident + 5);
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
    atomic_store(&nobody_waits, 1);
    for (int i = 0; i < 20000 && !atomic_load(&has_cancelled); i++) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000000}, NULL);
    CHECK(atomic_load(&n_reads) == n_resident + 5 && loaded_experts(r.m) == 1, "%u reads more", (uint32_t)atomic_load(&n_reads) - n_resident - 5);
    CHECK(run(r.m, 1, got, &r.err) == RF_OK && memcmp(got, want[COPIED][1], sizeof got) == 0 && is_filled(r.m), "%s", r.err.text);
    check_whole(r.m, "afterwards");
    rig_close(&r);
}

/* What every mode gives with all experts there. */
static void reference(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        rig r;
        if (!open_rig(&r, mode, NULL, NULL, NULL)) return;
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && loaded_experts(r.m) == N_LAYERS * N_EXPERTS, "%s", r.err.text);
        for (uint32_t seed = 0; seed < N_SEEDS; seed++) CHECK(run(r.m, seed, want[mode][seed], &r.err) == RF_OK, "%s", r.err.text);
        rig_close(&r);
    }
    CHECK(memcmp(want[MAPPED], want[COPIED], sizeof want[0]) == 0 && memcmp(want[COPIED][0], want[COPIED][1], sizeof want[0][0]) != 0, "reference");
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    int fd = mkstemp(path);
    mg_llama(&file, &(mg_options){.arch = "qwen3moe", .n_layers = N_LAYERS, .n_experts = N_EXPERTS, .n_used = N_USED, .n_ff_expert = 96, .type = MG_Q8_0, .n_vocab = N_VOCAB, .seed = 3});
    int ok = fd >= 0 && write(fd, file.data, file.n) == (ssize_t)file.n;
    if (fd >= 0) close(fd);
    if (!ok) return printf("cannot write %s\n", path), 1;
    reference();
    RUN(test_budgets);
    RUN(test_limits);
    RUN(test_no_room);
    RUN(test_neighbours);
    RUN(test_prefetch);
    RUN(test_refill);
    RUN(test_on_cpu);
    RUN(test_threads_on_cpu);
    RUN(test_policy);
    RUN(test_policies_on_favourites);
    RUN(test_held);
    RUN(test_threads);
    RUN(test_failing_device);
    RUN(test_failing_reads);
    RUN(test_cancelled_prefetch);
    unlink(path);
    mg_free(&file);
    RFT_END();
}
