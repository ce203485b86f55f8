/* cc -O2 -I. -o test_draft tests/test_draft.c -lm -pthread && ./test_draft        from the repository root
 * Speculation: with drafts of any kind rf_generate chooses the tokens that it chooses without, greedy and sampled, and leaves the
 * sequence as it does without. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <math.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

#define MODEL "examples/shakespeare-5m.gguf"
#define SMALL "tests/family/gemma4.gguf" /* layers with windows, 64 tokens */

static rig r;

typedef struct record {
    int32_t ids[512];
    uint32_t n, length, cancel_at;
    rf_generate_result result;
} record;

static int on_token(int32_t token, void *user) {
    record *o = user;
    if (o->n < 512) o->ids[o->n] = token;
    if (++o->n == o->cancel_at) rf_session_cancel(r.s);
    return 0;
}

/* What rf_generate does with desc, from an empty sequence. */
static rf_result generate(rf_generate_desc d, const rf_sampler_desc *how, rf_drafter *drafter, record *out) {
    rf_sampler sampler;
    *out = (record){.cancel_at = out->cancel_at};
    CHECK(rf_sampler_init(&sampler, how, NULL) == RF_OK && rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK);
    d.on_token = on_token, d.user = out, d.sampler = &sampler, d.drafter = drafter;
    const rf_result res = rf_generate(r.s, &d, &out->result, &r.err);
    out->length = rf_session_length(r.s, 0);
    return res;
}
static int same(const record *a, const record *b) {
    return a->n == b->n && memcmp(a->ids, b->ids, a->n * sizeof *a->ids) == 0 && a->length == b->length &&
           memcmp(&a->result, &b->result, sizeof a->result) == 0;
}

/* ---- a drafter that knows the answer, in some share of its drafts ---- */

typedef struct oracle {
    const record *answer;
    uint32_t n_prompt, percent, random;
} oracle;
static uint32_t foresee(const int32_t *tokens, uint32_t n_tokens, int32_t *drafts, uint32_t max, void *user) {
    oracle *o = user;
    (void)tokens;
    for (uint32_t i = 0; i < max; i++) {
        const uint32_t at = n_tokens - o->n_prompt + i;
        if (at >= o->answer->n) return i;
        o->random = o->random * 1664525u + 1013904223u;
        drafts[i] = (o->random >> 16) % 100 < o->percent ? o->answer->ids[at] : (o->answer->ids[at] + 1) % (int32_t)r.n_vocab;
    }
    return max;
}

static int open_model(const char *path, uint32_t n_ctx) {
    rig_close(&r);
    return rig_open(&r, &(rig_how){.path = path, .device_desc = &(rf_device_desc){.n_threads = 1},
                                   .session = &(rf_session_desc){.n_ctx = n_ctx, .n_logits_max = 16}});
}
static rf_drafter *drafter_of(rf_drafter_desc d) {
    rf_drafter *out = NULL;
    d.allocator = memory_allocator(&r.mem);
    CHECK(rf_drafter_open(r.m, &d, &out, &r.err) == RF_OK, "%s", r.err.text);
    return out;
}

/* ---- tests ---- */

static const int32_t some[] = {9, 30, 17, 44};

/* Samplers of every kind, each share of right drafts, each number of drafts; the share shows in the statistics. */
static void test_same_ids(void) {
    static const rf_sampler_desc samplers[] = {
        {0}, {.temperature = 0.9f, .seed = 7, .top_k = 40, .min_p = 0.02f}, {.repeat_penalty = 1.2f, .frequency_penalty = 0.1f},
        {.temperature = 1, .seed = 3, .mirostat = 2}, {.temperature = 1.2f, .seed = 9, .xtc_probability = 0.5f, .xtc_threshold = 0.1f}};
    static const uint32_t drafts[] = {1, 4, 8, 15}, percents[] = {0, 50, 90, 100};
    REQUIRE(open_model(SMALL, 96));
    for (size_t s = 0; s < sizeof samplers / sizeof *samplers; s++)
        for (int k = 0; k < 4; k++) {
            const rf_generate_desc d = {.ids = some, .n_ids = 4,
                                        .max_tokens = k == 3 && s < 2 ? 0 : 40};
            static record want, got;
            CHECK(generate(d, &samplers[s], NULL, &want) == RF_OK, "%s", r.err.text);
            oracle o = {&want, want.result.n_prompt, percents[(s + (size_t)k) % 4], 1};
            rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = drafts[k], .fixed = k != 1, .ngram = RF_NONE,
                                                           .fn = foresee, .user = &o});
            for (int again = 0; again < 1 + (s == 0); again++) {
                CHECK(generate(d, &samplers[s], one, &got) == RF_OK, "%s", r.err.text);
                CHECK(same(&want, &got), "sampler %zu, %u drafts, %u %% right: %u tokens, without drafts %u", s, drafts[k],
                      o.percent, got.n, want.n);
            }
            const rf_drafter_stats stats = rf_drafter_get_stats(one);
            CHECK(stats.accepted <= stats.drafted && stats.tokens <= (1 + (s == 0)) * (uint64_t)got.n && stats.steps <= stats.tokens);
            if (k != 1 && o.percent == 0) CHECK(stats.accepted == 0 && stats.drafted > 0);
            if (k != 1 && o.percent == 100 && want.n > 30) CHECK(stats.steps <= (1 + (s == 0)) * want.n / 2 + 1, "%llu", (unsigned long long)stats.steps);
            CHECK(rf_drafter_close(one, NULL) == RF_OK);
        }
}

/* N-grams: a text that repeats is foreseen; and a draft model, here the model itself, is always right. */
static void test_kinds(void) {
    REQUIRE(open_model(MODEL, 256));
    static record want, got;
    rf_session *own = NULL;
    const char *const text = "the king, the queen, the king, the queen, the king, the queen, the king,";
    static const char *const stops[] = {"slave"};
    const rf_generate_desc d = {.prompt = rf_string_of(text), .max_tokens = 50, .stop = stops, .n_stop = 1};
    const rf_sampler_desc greedy = {0};
    CHECK(generate(d, &greedy, NULL, &want) == RF_OK);
    CHECK(rf_session_open(r.m, &(rf_session_desc){.n_ctx = 256}, &own, NULL) == RF_OK);
    for (int k = 0; k < 3; k++) {
        rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 5, .fixed = 1, .ngram = k == 1 ? RF_NONE : 2,
                                                       .session = k ? own : NULL});
        CHECK(generate(d, &greedy, one, &got) == RF_OK, "%s", r.err.text);
        const rf_drafter_stats stats = rf_drafter_get_stats(one);
        CHECK(same(&want, &got) && stats.drafted && stats.accepted, "kind %d", k);
        if (k == 1) CHECK(stats.drafted == stats.accepted && stats.steps <= 9, "%llu", (unsigned long long)stats.steps);
        CHECK(rf_drafter_close(one, NULL) == RF_OK);
    }
    rf_session_close(own, NULL);
}

/* A grammar holds for every token. */
static void test_grammar(void) {
    REQUIRE(open_model(MODEL, 256));
    static record want, got;
    const rf_tokenizer *t = NULL;
    rf_grammar *g = NULL;
    CHECK(rf_model_get_tokenizer(r.m, &t, NULL) == RF_OK);
    CHECK(rf_grammar_open(t, RF_GRAMMAR_GBNF, rf_string_of("root ::= (\"the \" [a-m]+ \", \")*"), NULL, &g, &r.err) == RF_OK, "%s", r.err.text);
    const rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 40, .grammar = g};
    const rf_sampler_desc how = {.temperature = 1, .seed = 5};
    CHECK(generate(d, &how, NULL, &want) == RF_OK, "%s", r.err.text);
    oracle o = {&want, want.result.n_prompt, 75, 1};
    rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 4, .fixed = 1, .ngram = RF_NONE, .fn = foresee, .user = &o});
    CHECK(generate(d, &how, one, &got) == RF_OK && same(&want, &got), "%s", r.err.text);
    CHECK(rf_drafter_close(one, NULL) == RF_OK && rf_grammar_close(g, NULL) == RF_OK);
}

/* ---- the distribution ---- */

enum { LETTERS = 4, SAMPLES = RFT_SANITIZED ? 1000 : 3000 };
static const float repeat = 3, frequency = 4, presence = 2, heat = 4;

/* Probabilities of the first LETTERS letters behind some tokens: the model's logits, evaluated without drafts, penalized for all
 * tokens before, masked, softmax; in float64. */
static void next_letter(const int32_t *tokens, uint32_t n, int32_t first, double *p) {
    float *logits;
    double sum = 0;
    REQUIRE(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && rf_session_forward(r.s, tokens, n, &logits, &r.err) == RF_OK, "%s", r.err.text);
    for (int c = 0; c < LETTERS; c++) {
        double x = (double)logits[first + c];
        uint32_t count = 0;
        for (uint32_t i = 0; i < n; i++) count += tokens[i] == first + c;
        if (count) x = (x > 0 ? x / (double)repeat : x * (double)repeat) - count * (double)frequency - (double)presence;
        sum += p[c] = exp(x / (double)heat);
    }
    for (int c = 0; c < LETTERS; c++) p[c] /= sum;
}

/* Drafts: the likeliest letter, and now and then one that the grammar bans. They know nothing of what is drawn. */
typedef struct guesser {
    int32_t second[LETTERS], third[LETTERS][LETTERS]; /* after those */
    uint32_t random;
} guesser;
static uint32_t guess_letters(const int32_t *tokens, uint32_t n_tokens, int32_t *drafts, uint32_t max, void *user) {
    guesser *o = user;
    int32_t letters[8] = {0};
    for (uint32_t i = 4; i < n_tokens; i++) letters[i - 4] = tokens[i] - 4;
    for (uint32_t i = 0, at = n_tokens - 4; i < max; i++, at++) {
        o->random = o->random * 1664525u + 1013904223u;
        letters[at] = at == 1 ? o->second[letters[0]] : at == 2 ? o->third[letters[0]][letters[1]] : 0;
        drafts[i] = 4 + ((o->random >> 20) % 8 ? letters[at] : LETTERS);
    }
    return max;
}
static int32_t likeliest(const double *p) {
    int32_t best = 0;
    for (int c = 1; c < LETTERS; c++) best = p[c] > p[best] ? c : best;
    return best;
}

/* The first three letters of four, two of which are drafted in one step, come as often as the model says: chi-square of all 64
 * words, with penalties and a grammar in each row that is verified. */
static void test_distribution(void) {
    enum { WORDS = LETTERS * LETTERS * LETTERS };
    static double p[WORDS];
    static record got;
    uint32_t count[WORDS] = {0};
    guesser o = {.random = 3};
    const rf_tokenizer *t = NULL;
    rf_grammar *g = NULL;
    REQUIRE(open_model(SMALL, 96));
    CHECK(rf_model_get_tokenizer(r.m, &t, NULL) == RF_OK);
    CHECK(rf_grammar_open(t, RF_GRAMMAR_GBNF, rf_string_of("root ::= [A-D] [A-D] [A-D] [A-D]"), NULL, &g, &r.err) == RF_OK, "%s", r.err.text);
    int32_t text[] = {9, 4, 17, 6, 0, 0}; /* token 4 is "A" */
    for (int a = 0; a < LETTERS; a++)
        for (int b = 0; b < LETTERS; b++) {
            double one[3][LETTERS];
            text[4] = 4 + a, text[5] = 4 + b;
            for (uint32_t k = 0; k < 3; k++) next_letter(text, 4 + k, 4, one[k]);
            o.second[a] = likeliest(one[1]), o.third[a][b] = likeliest(one[2]);
            for (int c = 0; c < LETTERS; c++) p[(a * LETTERS + b) * LETTERS + c] = one[0][a] * one[1][b] * one[2][c];
        }
    rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 2, .fixed = 1, .ngram = RF_NONE, .fn = guess_letters, .user = &o});
    for (uint32_t k = 0; k < SAMPLES; k++) {
        const rf_sampler_desc how = {.temperature = heat, .seed = k + 1, .repeat_penalty = repeat, .frequency_penalty = frequency,
                                     .presence_penalty = presence};
        REQUIRE(generate((rf_generate_desc){.ids = text, .n_ids = 4, .max_tokens = 4, .grammar = g}, &how, one, &got) == RF_OK && got.n == 4, "%s", r.err.text);
        uint32_t word = 0;
        for (int i = 0; i < 3; i++) word = word * LETTERS + (uint32_t)got.ids[i] - 4;
        REQUIRE(word < WORDS, "%d %d %d: not what the grammar allows", got.ids[0], got.ids[1], got.ids[2]);
        count[word]++;
    }
    double chi = 0, want = 0, n = 0, freedom = -1; /* words that few texts have are counted together */
    for (int w = 0; w < WORDS; w++) {
        want += SAMPLES * p[w], n += count[w];
        if (want < 5) continue;
        chi += (n - want) * (n - want) / want;
        want = n = 0, freedom++;
    }
    CHECK(chi < freedom + 4.3 * sqrt(2 * freedom) + 12, "chi-square %.1f of %g degrees of freedom", chi, freedom); /* 1 in 100,000 */
    const rf_drafter_stats stats = rf_drafter_get_stats(one);
    CHECK(stats.accepted > SAMPLES / 4 && stats.accepted < stats.drafted, "%llu of %llu", (unsigned long long)stats.accepted, (unsigned long long)stats.drafted);
    printf("    chi-square %.1f of %g degrees of freedom, %llu of %llu drafts accepted\n", chi, freedom, (unsigned long long)stats.accepted, (unsigned long long)stats.drafted);
    CHECK(rf_drafter_close(one, NULL) == RF_OK && rf_grammar_close(g, NULL) == RF_OK);
}

/* Cancelled in the middle, also of accepted drafts: the sequence ends where it ends without drafts. */
static void test_cancel(void) {
    REQUIRE(open_model(SMALL, 96));
    static record all, want, got;
    const rf_generate_desc d = {.ids = some, .n_ids = 4, .max_tokens = 60};
    const rf_sampler_desc greedy = {0};
    CHECK(generate(d, &greedy, NULL, &all) == RF_OK);
    oracle o = {&all, all.result.n_prompt, 90, 1};
    for (uint32_t at = 1; at < 40; at += 8) {
        rf_drafter *one = drafter_of((rf_drafter_desc){.max_drafts = 6, .fixed = 1, .ngram = RF_NONE, .fn = foresee, .user = &o});
        got.cancel_at = want.cancel_at = at;
        CHECK(generate(d, &greedy, NULL, &want) == RF_OK && generate(d, &greedy, one, &got) == RF_OK, "%s", r.err.text);
        /* the request is seen by the next step, which comes later with drafts */
        CHECK(want.result.finish == RF_FINISH_CANCELLED && got.result.finish == RF_FINISH_CANCELLED);
        CHECK(got.n >= want.n && got.n <= want.n + 6 && memcmp(got.ids, all.ids, got.n * 4) == 0);
        CHECK(got.length == all.result.n_prompt + got.n - 1, "%u held, %u chosen", got.length, got.n);
        CHECK(rf_drafter_close(one, NULL) == RF_OK);
    }
}

/* Rows with logits can be cut one by one, also of recurrent models and windows; what follows has the same bits. */
static void test_families(void) {
    static const char *const files[] = {"lfm2", "qwen35", "falcon-h1", "gemma3-linear", "cohere2", "deepseek2-lite"};
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        char path[64];
        snprintf(path, sizeof path, "tests/family/%s.gguf", files[f]);
        rig_close(&r);
        REQUIRE(rig_open(&r, &(rig_how){.path = path, .session = &(rf_session_desc){.n_ctx = 64, .n_logits_max = 16}}));
        float want[40][8], *x;
        int32_t tokens[40];
        for (int i = 0; i < 40; i++) {
            tokens[i] = (int32_t)((uint32_t)(i * 7 + 1) % r.n_vocab);
            CHECK(rf_session_forward(r.s, &tokens[i], 1, &x, &r.err) == RF_OK, "%s", r.err.text);
            memcpy(want[i], x, sizeof want[i]);
        }
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && rf_session_forward(r.s, tokens, 6, NULL, NULL) == RF_OK);
        for (uint32_t at = 6, step = 0; at + 5 < 40; step++) {
            rf_token_row rows[5];
            uint32_t kept = 0;
            const uint32_t right = step % 5; /* drafts that are accepted */
            for (uint32_t i = 0; i < 5; i++)
                rows[i] = (rf_token_row){.token = i <= right ? tokens[at + i] : 0, .pos = RF_POS_NEXT, .want_logits = 1};
            CHECK(rf_session_eval(r.s, rows, 5, &r.err) == RF_OK, "%s", r.err.text);
            for (uint32_t i = 0; i <= right; i++)
                CHECK(rf_session_get_logits(r.s, i, &x, NULL) == RF_OK && memcmp(x, want[at + i], sizeof want[0]) == 0,
                      "%s: other bits at %u", files[f], at + i);
            at += right + 1;
            CHECK(rf_session_truncate(r.s, 0, at, &kept, NULL) == RF_OK && kept == at, "%s: cut to %u, not %u", files[f], kept, at);
        }
    }
}

/* Requests of a scheduler, some with drafts of their own: each gets the ids that it gets without, whoever is beside it. */
typedef struct client {
    record got;
    rf_result reason;
} client;
static int on_served(int32_t token, void *user) {
    client *c = user;
    if (c->got.n < 512) c->got.ids[c->got.n++] = token;
    return 0;
}
static void on_end(rf_result reason, void *user) { ((client *)user)->reason = reason; }

static void test_scheduler(void) {
    static const int32_t prompts[4][5] = {{9, 30, 17, 44, 3}, {8, 8, 8, 8, 8}, {50, 51}, {33}};
    static const uint32_t n[4] = {5, 5, 2, 1};
    static record want[4];
    static client clients[4];
    uint32_t n_active = 1;
    const rf_tokenizer *t = NULL;
    rig_close(&r);
    REQUIRE(rig_open(&r, &(rig_how){.path = SMALL, .session = &(rf_session_desc){.n_ctx = 96, .n_seq_max = 3, .n_logits_max = 16}}));
    CHECK(rf_model_get_tokenizer(r.m, &t, NULL) == RF_OK);
    for (int fixed = 0; fixed < 2; fixed++) {
        rf_scheduler *sch = NULL;
        rf_drafter *drafters[4];
        oracle oracles[4];
        rf_sampler samplers[4];
        uint64_t accepted = 0;
        for (int i = 0; i < 4; i++) {
            const rf_sampler_desc how = {.temperature = i % 2 ? 0.9f : 0, .seed = 5 + (uint64_t)i};
            /* the last one runs into the end of its context */
            CHECK(generate((rf_generate_desc){.ids = prompts[i], .n_ids = n[i], .max_tokens = i == 3 ? 0 : 50}, &how, NULL, &want[i]) == RF_OK);
            oracles[i] = (oracle){&want[i], n[i], 80, 1};
            drafters[i] = drafter_of((rf_drafter_desc){.max_drafts = 6, .fixed = (uint32_t)fixed, .ngram = RF_NONE, .fn = foresee, .user = &oracles[i]});
            CHECK(rf_sampler_init(&samplers[i], &how, NULL) == RF_OK);
        }
        CHECK(rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK && rf_scheduler_open(r.s, t, 4, &sch, &r.err) == RF_OK, "%s", r.err.text);
        for (int i = 0; i < 4; i++) {
            clients[i] = (client){.reason = RF_ERR_BUSY};
            const rf_request q = {.prompt = prompts[i], .n_prompt = n[i], .max_tokens = i == 3 ? 0 : 50, .sampler = &samplers[i], .on_token = on_served,
                                  .on_end = on_end, .user = &clients[i], .drafter = i == 2 ? NULL : drafters[i]};
            CHECK(rf_scheduler_submit(sch, &q, &r.err) == RF_OK, "%s", r.err.text);
        }
        for (int step = 0; n_active && step < 500; step++) {
            if (step % 7 == 3) rf_session_cancel(r.s);
            const rf_result res = rf_scheduler_step(sch, &n_active, &r.err);
            CHECK(res == RF_OK || res == RF_ERR_CANCELLED, "%s", r.err.text);
        }
        for (int i = 0; i < 4; i++) {
            CHECK(clients[i].got.n == want[i].n && memcmp(clients[i].got.ids, want[i].ids, want[i].n * 4) == 0, "request %d: %u of %u tokens", i,
                  clients[i].got.n, want[i].n);
            CHECK(clients[i].reason == (want[i].result.finish == RF_FINISH_CONTEXT ? RF_ERR_CONTEXT_FULL : RF_OK), "request %d", i);
            accepted += rf_drafter_get_stats(drafters[i]).accepted;
            CHECK(rf_drafter_close(drafters[i], NULL) == RF_OK);
        }
        if (fixed) CHECK(accepted > 40, "%llu", (unsigned long long)accepted);
        CHECK(rf_scheduler_close(sch, NULL) == RF_OK);
        n_active = 1;
    }
}

/* Each allocation may fail; wrong arguments are refused by name. */
static void test_errors(void) {
    REQUIRE(open_model(MODEL, 128));
    static record got;
    rf_drafter *one = NULL;
    rf_session *other = NULL;
    const rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 5};
    const rf_sampler_desc greedy = {0};
    CHECK(rf_model_preload_all(r.m, NULL) == RF_OK && generate(d, &greedy, NULL, &got) == RF_OK);
    const int64_t live = memory_read(&r.mem.live);
    rf_result res = RF_ERR_MEMORY;
    int n_failures = 0;
    for (int64_t fail = 1; fail < 60 && res != RF_OK; fail++) {
        const rf_drafter_desc desc = {.allocator = memory_allocator(&r.mem)};
        r.mem.calls = 0, r.mem.fail_at = fail;
        res = rf_drafter_open(r.m, &desc, &one, &r.err);
        if (res == RF_OK) res = generate(d, &greedy, one, &got);
        CHECK(res == RF_OK || (res == RF_ERR_MEMORY && r.err.code == res && r.err.text[0]), "%s", r.err.text);
        rf_drafter_close(one, NULL);
        CHECK(memory_read(&r.mem.live) == live, "%d blocks are left", (int)(memory_read(&r.mem.live) - live));
        n_failures += res != RF_OK;
    }
    r.mem.fail_at = 0;
    CHECK(n_failures >= 6, "%d allocations", n_failures);

    CHECK(rf_drafter_open(NULL, NULL, &one, &r.err) == RF_ERR_ARGUMENT && !one);
    CHECK(rf_drafter_open(r.m, &(rf_drafter_desc){.max_drafts = 16}, &one, &r.err) == RF_ERR_ARGUMENT && strstr(r.err.text, "16"));
    CHECK(rf_drafter_open(r.m, &(rf_drafter_desc){.ngram = 65}, &one, &r.err) == RF_ERR_ARGUMENT && strstr(r.err.text, "65"));
    CHECK(rf_drafter_close(NULL, NULL) == RF_OK && rf_drafter_get_stats(NULL).steps == 0);

    /* a session with room for one row of logits; a draft model with other tokens */
    one = drafter_of((rf_drafter_desc){0});
    CHECK(rf_session_open(r.m, &(rf_session_desc){.n_ctx = 64}, &other, NULL) == RF_OK);
    CHECK(rf_generate(other, &(rf_generate_desc){.prompt = d.prompt, .drafter = one}, NULL, &r.err) == RF_ERR_ARGUMENT &&
          strstr(r.err.text, "n_logits_max"), "%s", r.err.text);
    rf_session_close(other, NULL);
    CHECK(rf_drafter_close(one, NULL) == RF_OK);
    one = drafter_of((rf_drafter_desc){.session = r.s});
    CHECK(generate(d, &greedy, one, &got) == RF_ERR_ARGUMENT && strstr(r.err.text, "drafts for"), "%s", r.err.text);
    CHECK(rf_drafter_close(one, NULL) == RF_OK);
    rig small;
    REQUIRE(rig_open(&small, &(rig_how){.path = "tests/family/gemma4.gguf", .session = &(rf_session_desc){.n_ctx = 64}}));
    res = rf_drafter_open(r.m, &(rf_drafter_desc){.session = small.s}, &one, &r.err);
    CHECK(res != RF_OK && !one && r.err.text[0], "%s", r.err.text);
    rig_close(&small);
}

/* ---- how many drafts pay ---- */

/* What a step with k drafts takes, by that of a step without. */
typedef struct prices {
    const char *name;
    double of[RFI_MAX_DRAFTS + 1];
} prices;
static const prices price_lists[] = {
    {"a row costs little", {1, 1.03, 1.05, 1.08, 1.1, 1.13, 1.15, 1.18, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5, 1.55}},
    {"the second row costs most", {1, 2.3, 2.33, 2.36, 2.4, 2.43, 2.46, 2.5, 2.7, 2.9, 3.1, 3.3, 3.5, 3.6, 3.7, 3.8}},
    {"a mixture: each row costs", {1, 1.4, 1.8, 2.1, 2.4, 2.7, 3, 3.3, 3.6, 3.9, 4.2, 4.5, 4.8, 5.1, 5.4, 5.7}},
    {"a row costs a step", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}}};

/* Tokens a second of `tokens` tokens, by those without drafts: with fixed drafts, or as many as the drafter thinks pay
 * (fixed < 0). Times are noisy by 5 %; with `cold` the drafter sees the first step of each length take so many times as long. */
static double simulate(const prices *p, double share, int fixed, uint32_t tokens, double cold) {
    rf_drafter d = {.desc = {.max_drafts = 8}, .share = RFI_FIRST_SHARE, .guess = -1};
    uint32_t random = 7 + tokens, made = 0, seen = 0;
    double seconds = 0;
    while (made < tokens) {
        const uint32_t n = fixed < 0 ? rfi_drafter_count(&d, &d.costs, 0, 8) : (uint32_t)fixed;
        uint32_t right = 0;
        while (right < n && (random = random * 1664525u + 1013904223u) / 4294967296.0 < share) right++;
        random = random * 1664525u + 1013904223u;
        const double took = 0.001 * p->of[n] * (0.95 + 0.1 * (random / 4294967296.0));
        if (fixed < 0) {
            const double known = took * (seen >> n & 1 ? 1 : cold);
            rfi_draft_costs_learn(&d.costs, n, known);
            rfi_drafter_learn(&d, n, right, known, d.costs.seconds[0]);
            random = random * 1664525u + 1013904223u;
            if (d.on_paper) rfi_drafter_judge(&d, random / 4294967296.0 < share);
        }
        seen |= 1u << n;
        made += right + 1, seconds += took;
    }
    const double gain = made * 0.001 / seconds;
    CHECK(fixed >= 0 || cold > 1 || fabs(d.stats.gain / gain - 1) < 0.05, "%s: gain %g, the drafter says %g", p->name, gain, d.stats.gain);
    return gain;
}
static void test_count(void) {
    for (size_t i = 0; i < RFT_COUNT(price_lists); i++)
        for (int percent = 0; percent <= 100; percent += 5) {
            const double gain = simulate(&price_lists[i], percent / 100.0, -1, 4000, 1);
            double best = 1;
            for (int n = 1; n <= 8; n++) best = fmax(best, simulate(&price_lists[i], percent / 100.0, n, 4000, 1));
            CHECK(gain > 0.97 && gain > 0.8 * best, "%s, %d %% right: %.3f times as fast, %.3f with the best number",
                  price_lists[i].name, percent, gain, best);
        }
}

/* A short answer gains most of what the best number would and loses an eighth at most, also where the first step of each length
 * takes long. */
static void test_learns_soon(void) {
    for (size_t i = 0; i < RFT_COUNT(price_lists); i++)
        for (int percent = 0; percent <= 100; percent += 25)
            for (int cold = 1; cold <= 20; cold += 19) {
                double gain = 0, best = 1;
                for (uint32_t k = 0; k < 10; k++) gain += simulate(&price_lists[i], percent / 100.0, -1, 96 + k, cold) / 10;
                for (int n = 1; n <= 8; n++) best = fmax(best, simulate(&price_lists[i], percent / 100.0, n, 4000, 1));
                CHECK(gain > 0.875 && gain > 0.75 * best, "%s, %d %% right: %.3f times as fast, %.3f with the best number",
                      price_lists[i].name, percent, gain, best);
            }
}

/* ---- the same in rf_generate, by a clock of the test's ---- */

/* In this thread the library reads the clock when a step begins and when it ends; the time between is that of its drafts. */
static _Thread_local struct {
    const prices *of; /* NULL: the real clock */
    double seconds;
    uint32_t reads;
} watch;

int clock_gettime(clockid_t id, struct timespec *t) {
    if (!watch.of || id != CLOCK_MONOTONIC) return (int)syscall(SYS_clock_gettime, id, t);
    if (watch.reads++ % 2) watch.seconds += 0.001 * watch.of->of[r.s->n_logits - 1];
    *t = (struct timespec){.tv_sec = 1 + (time_t)watch.seconds, .tv_nsec = (long)(fmod(watch.seconds, 1) * 1e9)};
    return 0;
}
static const rf_sampler_desc endless = {.bias = &(const rf_logit_bias){2, -INFINITY}, .n_bias = 1}; /* no end token */
/* Tokens a second by those of steps without drafts, over n_texts texts, each with a new drafter or all with one; best: with the
 * best fixed number, as the shares of right drafts say. */
static double pace(const prices *p, uint32_t percent, record *answer, uint32_t n_texts, int new, double *best) {
    static record got;
    uint64_t n = 0;
    oracle o = {answer, answer->result.n_prompt, percent, 7};
    rf_drafter *one = NULL;
    watch.of = p, watch.seconds = 0, watch.reads = 0;
    for (uint32_t k = 0; k < n_texts; k++, n += got.n - 1) {
        if (!one) one = drafter_of((rf_drafter_desc){.ngram = RF_NONE, .fn = foresee, .user = &o});
        const rf_result res = generate((rf_generate_desc){.ids = some, .n_ids = 4, .max_tokens = answer->n}, &endless, one, &got);
        CHECK(res == RF_OK && same(answer, &got), "%s", r.err.text);
        if (new) rf_drafter_close(one, NULL), one = NULL;
    }
    watch.of = NULL;
    const rf_drafter_stats stats = rf_drafter_get_stats(one);
    const double gain = (double)n * 0.001 / watch.seconds, share = percent / 100.0;
    if (!new) {
        CHECK(watch.reads == 2 * stats.steps && stats.tokens == n, "%u times of %llu steps", watch.reads, (unsigned long long)stats.steps);
        CHECK(fabs(stats.gain / gain - 1) < 0.03, "%s, %u %% right: gain %.3f, the drafter says %.3f", p->name, percent, gain, stats.gain);
    }
    CHECK(rf_drafter_close(one, NULL) == RF_OK);
    *best = 1;
    for (int k = 1; k <= 8; k++) *best = fmax(*best, (share < 1 ? (1 - pow(share, k + 1)) / (1 - share) : k + 1) / p->of[k]);
    return gain;
}

/* Never more than 3 % slower than without drafts; and most of what drafts can gain is gained. */
static void test_pace(void) {
    static const uint32_t percents[] = {0, 25, 50, 75, 90};
    static record answer;
    REQUIRE(open_model(SMALL, 512));
    CHECK(generate((rf_generate_desc){.ids = some, .n_ids = 4, .max_tokens = 480}, &endless, NULL, &answer) == RF_OK && answer.n == 480, "%u: %s", answer.n, r.err.text);
    for (size_t i = 0; i < (RFT_SANITIZED ? 1 : RFT_COUNT(price_lists)); i++)
        for (size_t k = 0; k < RFT_COUNT(percents); k++) {
            double best, gain = pace(&price_lists[i], percents[k], &answer, 4, 0, &best);
            printf("    %s, %u %% right: %.3f times as fast, at best %.3f\n", price_lists[i].name, percents[k], gain, best);
            CHECK(gain > 0.97 && gain > 0.9 * best, "%s, %u %% right: %.3f times as fast, at best %.3f", price_lists[i].name, percents[k], gain, best);
        }
}

/* Nor is a short text, of which the drafter has learned nothing before (one of 24 tokens at most 4 %); and none whose drafts are
 * never right, for that shows on paper. */
static void test_short_texts(void) {
    static const uint32_t percents[] = {0, 10, 25, 50, 75, 90}, lengths[] = {24, 48, 96};
    static record answer;
    REQUIRE(open_model(SMALL, 512));
    for (size_t l = 0; l < RFT_COUNT(lengths); l++) {
        CHECK(generate((rf_generate_desc){.ids = some, .n_ids = 4, .max_tokens = lengths[l]}, &endless, NULL, &answer) == RF_OK && answer.n == lengths[l]);
        for (size_t i = 0; i < (RFT_SANITIZED ? 1 : RFT_COUNT(price_lists)); i++)
            for (size_t k = 0; k < RFT_COUNT(percents); k++) {
                double best, gain = pace(&price_lists[i], percents[k], &answer, 40, 1, &best);
                printf("    %u tokens, %s, %u %% right: %.3f times as fast, at best %.3f\n", lengths[l], price_lists[i].name, percents[k], gain, best);
                CHECK(gain > (lengths[l] < 48 ? 0.96 : 0.97) && (percents[k] || gain > 0.999), "%u tokens, %s, %u %% right: %.3f times as fast", lengths[l], price_lists[i].name, percents[k], gain);
            }
    }
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    FILE *model = fopen(MODEL, "rb");
    const int have = model != NULL;
    if (model) fclose(model);
    RUN(test_same_ids);
    RUN_IF(have, test_kinds, "no " MODEL);
    RUN_IF(have, test_grammar, "no " MODEL);
    RUN(test_distribution);
    RUN(test_cancel);
    RUN(test_families);
    RUN(test_scheduler);
    RUN(test_count);
    RUN(test_learns_soon);
    RUN(test_pace);
    RUN_SLOW(test_short_texts);
    RUN_IF(have, test_errors, "no " MODEL);
    rig_close(&r);
    RFT_END();
}
