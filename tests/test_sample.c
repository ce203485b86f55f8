/* cc -O2 -I. -o test_sample tests/test_sample.c -lm -pthread && ./test_sample
 * The sampler against a reference that sorts and counts in double, against exact probabilities, and against sequences
 * that an independent program drew. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include "make_gguf.h"
#include "rf_test.h"
#include "expected_sampling.h"

/* ---- reference ---- */

/* Its own generator, for inputs only. */
static uint64_t test_state = 1;
static uint32_t test_random(void) {
    test_state = test_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(test_state >> 33);
}
static double test_uniform(void) { return ((double)test_random() + 0.5) / 2147483648.0; }

/* Normal logits; with levels > 0 rounded to few values, so that many are equal. */
static void test_fill(float *logits, uint32_t n, double spread, int levels) {
    for (uint32_t i = 0; i < n; i++) {
        double x = sqrt(-2 * log(test_uniform())) * cos(6.283185307179586 * test_uniform());
        if (levels) x = floor(x * levels) / levels;
        logits[i] = (float)(x * spread);
    }
}

static const float *sort_logits;
static int by_logit(const void *a, const void *b) {
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    if (sort_logits[i] != sort_logits[j]) return sort_logits[i] > sort_logits[j] ? -1 : 1;
    return i < j ? -1 : 1;
}

/* probability[n] by the definition: sort, keep the best k, the shortest head that holds p, and what has min_p of
 * the best one's probability, then the softmax at the temperature. Finite logits. */
static void reference(const float *logits, uint32_t n, const rf_sampler_desc *d, double *probability) {
    uint32_t *order = malloc(n * sizeof *order), kept = n;
    for (uint32_t i = 0; i < n; i++) order[i] = i, probability[i] = 0;
    sort_logits = logits;
    qsort(order, n, sizeof *order, by_logit);
    double best = (double)logits[order[0]], sum = 0, cumulative = 0;
    if (d->top_k && d->top_k < kept) kept = d->top_k;
    for (uint32_t i = 0; i < kept; i++) sum += exp((double)logits[order[i]] - best);
    if (d->top_p > 0 && d->top_p < 1)
        for (uint32_t i = 0; i < kept; i++) {
            cumulative += exp((double)logits[order[i]] - best);
            if (cumulative >= (double)d->top_p * sum) kept = i + 1;
        }
    while (kept > 1 && exp((double)logits[order[kept - 1]] - best) < (double)d->min_p) kept--;
    sum = 0;
    for (uint32_t i = 0; i < kept; i++) {
        probability[order[i]] = exp(((double)logits[order[i]] - best) / (double)d->temperature);
        sum += probability[order[i]];
    }
    for (uint32_t i = 0; i < kept; i++) probability[order[i]] /= sum;
    free(order);
}

/* ---- what is kept ---- */

/* The kept set, exactly, and each choice where a uniform number u must land in the cumulative distribution. Weights
 * are good to 1e-8, so the ends of a token's interval are known to 1e-7. */
static void check_against_reference(float *logits, uint32_t n, const rf_sampler_desc *d, int n_draws) {
    double *probability = malloc(n * sizeof *probability), *before = malloc((n + 1) * sizeof *before);
    rf_sampler s, twin;
    reference(logits, n, d, probability);
    before[0] = 0;
    for (uint32_t i = 0; i < n; i++) before[i + 1] = before[i] + probability[i];

    rf_sampler_init(&s, d, NULL);
    rfi_choice choice;
    rfi_choice_begin(&choice, logits, n);
    if (d->top_k && d->top_k < n) rfi_choice_tighten(&choice, d->top_k, 0);
    if (d->top_p > 0 && d->top_p < 1) rfi_choice_top_p(&choice, d->top_p, d->min_p);
    uint32_t ties = choice.ties, wrong = 0;
    for (uint32_t i = 0; i < n; i++) {
        int in = rfi_choice_has(&choice, i, rfi_logit_key(logits[i]), &ties);
        if (d->min_p == 0) wrong += in != (probability[i] > 0);
        else wrong += !in && probability[i] > 0;
    }
    CHECK(wrong == 0, "n %u top_k %u top_p %g: %u tokens wrongly in or out", n, d->top_k, (double)d->top_p, wrong);

    for (int draw = 0; draw < n_draws; draw++) {
        int32_t token = -1;
        twin = s;
        double u = rfi_random(twin.rng);
        CHECK(rf_sampler_sample(&s, logits, n, &token, NULL) == RF_OK);
        CHECK(token >= 0 && (uint32_t)token < n, "token %d of %u", token, n);
        if (token < 0 || (uint32_t)token >= n) break;
        CHECK(probability[token] > 0, "n %u top_k %u top_p %g min_p %g: token %d is not in the set", n, d->top_k,
              (double)d->top_p, (double)d->min_p, token);
        CHECK(u > before[token] - 1e-7 && u < before[token + 1] + 1e-7, "n %u: u %.9f outside %.9f..%.9f of token %d",
              n, u, before[token], before[token + 1], token);
    }
    free(before);
    free(probability);
}

static void test_reference(void) {
    static const uint32_t sizes[] = {1, 2, 7, 255, 256, 257, 1000, 50000};
    static const uint32_t ks[] = {0, 1, 2, 3, 40, 999, 100000};
    static const float ps[] = {0, 1e-9f, 0.1f, 0.5f, 0.9f, 0.99f, 0.9999f, 1.0f};
    for (size_t size = 0; size < RFI_COUNT(sizes); size++) {
        uint32_t n = sizes[size];
        float *logits = malloc(n * sizeof *logits);
        for (int levels = 0; levels <= 4; levels += 2)
            for (size_t k = 0; k < RFI_COUNT(ks); k++)
                for (size_t p = 0; p < RFI_COUNT(ps); p++) {
                    if (n == 50000 && (k + p + (size_t)levels) % 11) continue; /* time */
                    rf_sampler_desc d = {.temperature = (float)(0.2 + 2 * test_uniform()), .top_k = ks[k],
                                         .top_p = ps[p], .seed = test_random()};
                    if (test_random() % 4 == 0) d.min_p = 0.03f;
                    test_fill(logits, n, p % 2 ? 1.0 : 4.0, levels);
                    check_against_reference(logits, n, &d, n == 50000 ? 5 : 30);
                }
        free(logits);
    }
}

/* All equal: ties go to the smaller ids, whatever cuts: 5 of 100 in every case. */
static void test_ties(void) {
    float logits[100];
    int32_t token;
    rf_sampler s;
    rf_sampler_desc cases[] = {{.temperature = 1, .top_k = 5, .seed = 3},
                               {.temperature = 1, .top_p = 0.049f, .seed = 3},
                               {.temperature = 1, .top_k = 10, .top_p = 0.5f, .seed = 3},
                               {.temperature = 1, .top_k = 5, .min_p = 1.0f, .seed = 3}};
    for (size_t c = 0; c < RFI_COUNT(cases); c++) {
        unsigned seen = 0;
        for (int i = 0; i < 100; i++) logits[i] = i % 2 ? 0.0f : -0.0f; /* equal numbers of unequal bits */
        rf_sampler_init(&s, &cases[c], NULL);
        for (int i = 0; i < 500; i++) {
            REQUIRE(rf_sampler_sample(&s, logits, 100, &token, NULL) == RF_OK);
            CHECK(token < 5, "case %zu: token %d", c, token);
            seen |= 1u << token;
        }
        CHECK(seen == 31u, "case %zu: saw %x of the 5 tokens", c, seen);
    }
}

/* ---- distribution ---- */

/* Pearson's chi-square of 20000 draws against exact probabilities; tokens expected fewer than 5 times are pooled. The
 * bound is the 1 - 1e-6 quantile by Wilson and Hilferty (z = 4.753); seeds are fixed, so this never flickers. */
static void chi_square(uint32_t n, const rf_sampler_desc *d, double spread) {
    float *logits = malloc(n * sizeof *logits);
    double *probability = malloc(n * sizeof *probability);
    uint32_t *count = calloc(n, sizeof *count);
    rf_sampler s;
    test_fill(logits, n, spread, 0);
    reference(logits, n, d, probability);
    rf_sampler_init(&s, d, NULL);
    const int n_draws = 20000;
    for (int i = 0; i < n_draws; i++) {
        int32_t token;
        CHECK(rf_sampler_sample(&s, logits, n, &token, NULL) == RF_OK);
        count[token]++;
    }
    double chi = 0, pooled = 0, pooled_count = 0;
    int cells = 0;
    for (uint32_t i = 0; i < n; i++) {
        double expected = probability[i] * n_draws, difference = count[i] - expected;
        if (expected < 5) pooled += expected, pooled_count += count[i];
        else chi += difference * difference / expected, cells++;
    }
    if (pooled >= 5) chi += (pooled_count - pooled) * (pooled_count - pooled) / pooled, cells++;
    double dof = cells - 1, bound = dof * pow(1 - 2 / (9 * dof) + 4.753 * sqrt(2 / (9 * dof)), 3);
    CHECK(cells > 1 && chi < bound, "n %u: chi-square %.1f, bound %.1f with %d cells", n, chi, bound, cells);
    CHECK(chi > 0.2 * dof, "n %u: chi-square %.1f is too good for %d cells", n, chi, cells);
    free(count);
    free(probability);
    free(logits);
}

static void test_distribution(void) {
    chi_square(20, &(rf_sampler_desc){.temperature = 1, .seed = 11}, 1.0);
    chi_square(300, &(rf_sampler_desc){.temperature = 1, .seed = 12}, 1.5);
    chi_square(300, &(rf_sampler_desc){.temperature = 0.7f, .top_k = 50, .seed = 13}, 1.0);
    chi_square(300, &(rf_sampler_desc){.temperature = 1.5f, .top_p = 0.9f, .seed = 14}, 2.0);
    chi_square(300, &(rf_sampler_desc){.temperature = 0.9f, .top_k = 100, .top_p = 0.95f, .min_p = 0.02f,
                                       .seed = 15}, 2.0);
}

/* ---- the generator and golden sequences ---- */

static void test_generator(void) {
    /* xoroshiro128++ from state {1, 2}: the published outputs; SplitMix64 from 0: likewise. */
    uint64_t state[2] = {1, 2};
    const uint64_t want[4] = {393217u, 669327710093319u, 1732421326133921491u, 11394790081659126983u};
    for (int i = 0; i < 4; i++) {
        double u = rfi_random(state);
        CHECK(u == ldexp((double)(want[i] >> 11), -53), "output %d: %.17g", i, u);
    }
    rfi_random_seed(state, 0);
    CHECK(state[0] == 0xe220a8397b1dcdafu && state[1] == 0x6e789e6aa1b965f4u);
}

/* Weights against the C library's exp: to 4e-9 and, as they are rounded down, a unit. As many bits as n logits allow. */
static void test_weights(void) {
    static const double temperatures[] = {0.1, 0.7, 1, 3};
    float logits[2] = {2.5f, 0};
    rfi_choice c;
    rfi_choice_begin(&c, logits, 2);
    double worst = 0;
    for (size_t t = 0; t < RFI_COUNT(temperatures); t++)
        for (float logit = 2.5f; logit > -120; logit -= 0.000731f) {
            const double want = ldexp(exp(((double)logit - 2.5) / temperatures[t]), 44);
            const double got = (double)rfi_choice_weight(&c, logit, RFI_LOG2E / temperatures[t]);
            const double error = got > want ? got / want - 1 : got + 1 < want ? 1 - (got + 1) / want : 0;
            if (error > worst) worst = error;
        }
    CHECK(c.unit == 44 && worst < 4e-9, "relative error %g, unit %u", worst, c.unit);
    CHECK(rfi_choice_weight(&c, 2.5f, RFI_LOG2E) == 1ull << 44 && rfi_choice_weight(&c, -INFINITY, RFI_LOG2E) == 0);
    CHECK(rfi_choice_weight(&c, NAN, RFI_LOG2E) == 0 && rfi_choice_weight(&c, -30, RFI_LOG2E) == 0);
    c.max = INFINITY, c.unit = 40;
    CHECK(rfi_choice_weight(&c, INFINITY, 1) == 1ull << 40 && rfi_choice_weight(&c, 3, 1) == 0);
    float *many = calloc((1u << 19) + 1, sizeof *many);
    for (uint32_t n = (1u << 19) - 1; n <= (1u << 19) + 1; n++) {
        uint64_t sums[RFI_CHOICE_BLOCKS];
        uint32_t ties_at[RFI_CHOICE_BLOCKS];
        rfi_choice_begin(&c, many, n);
        const uint64_t sum = rfi_choice_sum(&c, RFI_LOG2E, sums, ties_at);
        CHECK(c.unit == (n < 1u << 19 ? 44 : 43) && sum == (uint64_t)n << c.unit, "%u equal ones: unit %u", n, c.unit);
    }
    free(many);
}

/* Drawn by a separate program (Python, double, sorting) from logits ((7919 i) mod 1009) / 128, i < 512. */
static void test_golden(void) {
    static const int32_t want[2][24] = {
        {462, 165, 483, 99, 168, 47, 251, 49, 114, 152, 298, 436, 80, 231, 430, 475, 133, 318, 99, 40, 86, 409, 277,
         212},
        {429, 73, 66, 409, 284, 132, 508, 508, 429, 284, 86, 475, 343, 442, 99, 310, 66, 33, 264, 350, 495, 119,
         343, 20}};
    const rf_sampler_desc descs[2] = {
        {.temperature = 1, .seed = 42},
        {.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .seed = 1234567}};
    for (int c = 0; c < 2; c++) {
        rf_sampler s;
        float logits[512];
        rf_sampler_init(&s, &descs[c], NULL);
        for (int i = 0; i < 512; i++) logits[i] = (float)(i * 7919 % 1009) / 128.0f;
        for (int i = 0; i < 24; i++) {
            int32_t token = -1;
            CHECK(rf_sampler_sample(&s, logits, 512, &token, NULL) == RF_OK && token == want[c][i],
                  "case %d choice %d: want %d, got %d", c, i, want[c][i], token);
        }
    }
}

static void test_seed(void) {
    float logits[1000];
    rf_sampler a, b, c;
    int equal = 0;
    test_fill(logits, 1000, 1.0, 0);
    rf_sampler_init(&a, &(rf_sampler_desc){.temperature = 1, .seed = 5}, NULL);
    rf_sampler_init(&b, &(rf_sampler_desc){.temperature = 1, .seed = 5}, NULL);
    rf_sampler_init(&c, &(rf_sampler_desc){.temperature = 1, .seed = 6}, NULL);
    for (int i = 0; i < 200; i++) {
        int32_t x = -1, y = -2, z = -3;
        rf_sampler_sample(&a, logits, 1000, &x, NULL);
        rf_sampler_sample(&b, logits, 1000, &y, NULL);
        rf_sampler_sample(&c, logits, 1000, &z, NULL);
        CHECK(x == y, "choice %d: %d and %d from one seed", i, x, y);
        equal += x == z;
    }
    CHECK(equal < 20, "two seeds agree on %d of 200", equal);
}

/* ---- greedy, bias, penalties ---- */

static void test_greedy(void) {
    float logits[6] = {1, 3, -2, 3, 2.5f, 3};
    int32_t token = -1;
    rf_sampler s;
    rf_sampler_init(&s, NULL, NULL);
    uint64_t before[2] = {s.rng[0], s.rng[1]};
    CHECK(rf_sampler_sample(&s, logits, 6, &token, NULL) == RF_OK && token == 1, "token %d", token);
    rf_sampler_init(&s, &(rf_sampler_desc){.temperature = -1, .top_k = 3, .top_p = 0.5f}, NULL);
    CHECK(rf_sampler_sample(&s, logits, 6, &token, NULL) == RF_OK && token == 1, "token %d", token);
    CHECK(s.rng[0] == before[0] && s.rng[1] == before[1], "greedy used the generator");
    CHECK(s.n_accepted == 1 && s.history[0] == 1, "the choice was not remembered");
}

static void test_bias(void) {
    rf_logit_bias bias[] = {{2, 10.0f}, {0, -1.5f}, {2, 0.5f}, {-1, 99}, {4, 99}, {INT32_MAX, 99}, {INT32_MIN, 99},
                            {3, -INFINITY}};
    float logits[4] = {1, 2, 3, 4}, want[4] = {-0.5f, 2, 13.5f, -INFINITY};
    int32_t token = -1;
    rf_sampler s;
    REQUIRE(rf_sampler_init(&s, &(rf_sampler_desc){.bias = bias, .n_bias = 8}, NULL) == RF_OK);
    CHECK(rf_sampler_sample(&s, logits, 4, &token, NULL) == RF_OK && token == 2, "token %d", token);
    CHECK(memcmp(logits, want, sizeof want) == 0, "%g %g %g %g", (double)logits[0], (double)logits[1],
          (double)logits[2], (double)logits[3]);
}

/* By hand: repeat 2, frequency 0.25, presence 1; token 0 three times, 1 once, 2 once, in the last 5. */
static void test_penalties(void) {
    float logits[5] = {8, -3, 0, 7, 6}, want[5] = {8 / 2.0f - 0.75f - 1, -3 * 2.0f - 0.25f - 1, 0 - 0.25f - 1, 7, 6};
    const int32_t accepted[] = {3, 4, 3, 0, 1, 0, 2, 0}; /* the first three are outside the window */
    int32_t token = -1;
    rf_sampler s;
    rf_sampler_desc d = {.repeat_penalty = 2, .frequency_penalty = 0.25f, .presence_penalty = 1, .penalty_last_n = 5};
    rf_sampler_init(&s, &d, NULL);
    for (size_t i = 0; i < RFI_COUNT(accepted); i++) rf_sampler_accept(&s, accepted[i]);
    CHECK(rf_sampler_sample(&s, logits, 5, &token, NULL) == RF_OK && token == 3, "token %d", token);
    for (int i = 0; i < 5; i++) CHECK(logits[i] == want[i], "logit %d: want %g, got %g", i, (double)want[i],
                                      (double)logits[i]);

    /* Tokens outside the vocabulary are remembered and harmless; off means untouched. */
    rf_sampler_accept(&s, -7);
    rf_sampler_accept(&s, INT32_MAX);
    rf_sampler_accept(&s, 5);
    CHECK(rf_sampler_sample(&s, logits, 5, &token, NULL) == RF_OK);
    float plain[3] = {1, -1, 0.5f}, same[3] = {1, -1, 0.5f};
    rf_sampler_init(&s, &(rf_sampler_desc){.repeat_penalty = 1}, NULL);
    for (int i = 0; i < 3; i++) rf_sampler_accept(&s, i);
    CHECK(rf_sampler_sample(&s, plain, 3, &token, NULL) == RF_OK && memcmp(plain, same, sizeof same) == 0);
}

/* The window is the ring's last n, also after the ring has wrapped, in memory of the caller's, too. 0 means 64. */
static void test_window(void) {
    rf_sampler s;
    const uint32_t windows[] = {1, 2, 64, 255, 256, 0, 300};
    static int32_t memory[5 * 300];
    for (size_t w = 0; w < RFI_COUNT(windows); w++)
        for (uint32_t large = windows[w] == 300; large < 2; large++) {
            float logits[1000] = {0};
            int32_t token;
            uint32_t n = windows[w] ? windows[w] : 64;
            rf_sampler_desc d = {.presence_penalty = 1, .penalty_last_n = windows[w]};
            if (large) d.history = memory, d.n_history = 300;
            REQUIRE(rf_sampler_init(&s, &d, NULL) == RF_OK);
            for (int32_t i = 0; i < 700; i++) rf_sampler_accept(&s, i);
            rf_sampler_sample(&s, logits, 1000, &token, NULL);
            for (uint32_t i = 0; i < 1000; i++)
                CHECK(logits[i] == (i < 700 && i >= 700 - n ? -1.0f : 0.0f), "window %u: logit %u is %g", n, i,
                      (double)logits[i]);
        }
}

/* ---- XTC, DRY, mirostat, the hook, log probabilities ---- */

/* Every choice of every case, as a program that sorts and follows the definitions makes it (make_sampling.py). */
static void test_by_definition(void) {
    static float logits[1000], raw[1000];
    static int32_t memory[5 * 1000];
    for (size_t c = 0; c < RFI_COUNT(sampling_cases); c++) {
        const sampling_case *want = &sampling_cases[c];
        rf_sampler_desc d = want->desc;
        rf_logprob logprob;
        rf_sampler s;
        uint64_t hash = 0;
        double sum = 0;
        if (d.n_history) d.history = memory;
        d.logprobs = &logprob, d.logprob_memory = raw;
        REQUIRE(rf_sampler_init(&s, &d, NULL) == RF_OK);
        for (uint32_t j = 0; j < want->n_draws; j++) {
            int32_t token = -1;
            for (uint32_t i = 0; i < want->n; i++)
                logits[i] = (float)((double)((7919 * (uint64_t)i + 104729 * (uint64_t)j) % 1009) / want->scale);
            REQUIRE(rf_sampler_sample(&s, logits, want->n, &token, NULL) == RF_OK);
            if (j < 12) CHECK(token == want->first[j], "case %zu choice %u: want %d, got %d", c, j, want->first[j], token);
            hash = hash * 31 + (uint64_t)token;
            sum += (double)logprob.logprob;
            CHECK(logprob.token == token, "case %zu: log probability of token %d, chosen %d", c, logprob.token, token);
        }
        CHECK(hash == want->hash, "case %zu: other tokens than by definition", c);
        CHECK(fabs(s.mirostat_mu - want->mu) < 1e-5 || !d.mirostat, "case %zu: mu %.9g, want %.9g", c, s.mirostat_mu,
              want->mu);
        CHECK(fabs(sum - want->logprob) < 1e-3, "case %zu: log probability %.9g, want %.9g", c, sum, want->logprob);
    }
}

/* Repetitions of one token, the worst case of DRY: time is linear, and the exponent stops short of infinity. */
static void test_dry_repetition(void) {
    enum { N = 100000 };
    int32_t *memory = malloc(5 * N * sizeof *memory), token = -1;
    float logits[3] = {0, 1, 0};
    rf_sampler s;
    rf_sampler_desc d = {.dry_multiplier = 1, .dry_base = 10, .history = memory, .n_history = N};
    REQUIRE(rf_sampler_init(&s, &d, NULL) == RF_OK);
    for (int i = 0; i < N + 5; i++) rf_sampler_accept(&s, 1);
    CHECK(rf_sampler_sample(&s, logits, 3, &token, NULL) == RF_OK && token == 0, "token %d", token);
    CHECK(logits[0] == 0 && logits[2] == 0 && logits[1] < -1e37f && isfinite(logits[1]), "%g", (double)logits[1]);
    free(memory);
}

/* Breakers from texts: tokens that contain one, and tokens that end with its beginning. */
static void test_breakers(void) {
    rf_gguf *g = NULL;
    rf_tokenizer *t = NULL;
    rf_error err;
    static rf_dry_breaker found[4000];
    const char *const texts[] = {"\n", "day,"};
    uint32_t n = 0, n_again = 0, single = 0, split = 0;
    REQUIRE(rf_gguf_open("examples/shakespeare-5m.gguf", NULL, &g, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_tokenizer_open(g, NULL, &t, &err) == RF_OK, "%s", err.text);
    CHECK(rf_dry_breakers_find(t, texts, 2, found, 4000, &n, &err) == RF_OK && n > 2, "%u: %s", n, err.text);
    CHECK(rf_dry_breakers_find(t, texts, 2, NULL, 0, &n_again, &err) == RF_ERR_CAPACITY && n_again == n);
    for (uint32_t i = 0; i < n; i++) {
        char text[400];
        size_t len = 0;
        rf_detokenizer state = {.tokenizer = t, .started = 1};
        for (uint32_t k = 0; k < found[i].n_tokens; k++) {
            size_t more = 0;
            rf_detokenize(&state, found[i].tokens[k], RF_DETOKENIZE_SPECIAL, text + len, sizeof text - len - 1, &more, NULL);
            len += more;
        }
        text[len] = 0;
        single += found[i].n_tokens == 1, split += found[i].n_tokens > 1;
        CHECK(strstr(text, "\n") || strstr(text, "day,") || strstr(text, "da"), "breaker %u: '%s'", i, text);
    }
    CHECK(single > 0 && split > 0, "%u tokens, %u sequences", single, split);
    rf_sampler s;
    rf_sampler_desc d = {.dry_multiplier = 1, .dry_breakers = found, .n_dry_breakers = n};
    CHECK(rf_sampler_init(&s, &d, &err) == RF_OK, "%s", err.text);
    const char *const empty[] = {""}, *const longer[] = {"12345678901234567890123456789012345678901"};
    CHECK(rf_dry_breakers_find(t, empty, 1, found, 4000, &n, &err) == RF_ERR_ARGUMENT && err.text[0]);
    CHECK(rf_dry_breakers_find(t, longer, 1, found, 4000, &n, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_dry_breakers_find(NULL, texts, 2, found, 4000, &n, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_tokenizer_close(t, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK);
}

/* XTC and mirostat draw from what they keep in proportion: chi-square, as above. */
static void test_kept_distribution(void) {
    float logits[6] = {0, 0.5f, 1, 1.5f, 2, -1}, p[6], sum = 0;
    for (int mirostat = 0; mirostat <= 2; mirostat += 2) {
        uint32_t count[6] = {0};
        rf_sampler_desc d = {.temperature = 1, .seed = 77, .xtc_probability = 0.5f, .xtc_threshold = 0.2f};
        rf_sampler s;
        if (mirostat) d = (rf_sampler_desc){.temperature = 1, .seed = 78, .mirostat = 2, .mirostat_tau = 1.2f};
        d.mirostat_eta = 1e-20f; /* mu stays 2.4 bits: tokens of at least 0.19 */
        REQUIRE(rf_sampler_init(&s, &d, NULL) == RF_OK);
        for (int i = 0; i < 20000; i++) {
            float copy[6];
            int32_t token = 0;
            memcpy(copy, logits, sizeof copy);
            rf_sampler_sample(&s, copy, 6, &token, NULL);
            count[token]++;
        }
        /* softmax: 0.059 0.097 0.161 0.265 0.437 0.022; XTC takes 4 away in half of the draws, mirostat keeps 3 and 4 */
        sum = 0;
        for (int i = 0; i < 6; i++) sum += p[i] = expf(logits[i]);
        for (int i = 0; i < 6; i++) p[i] /= sum;
        double chi = 0, without = 1 - (double)p[4];
        for (int i = 0; i < 6; i++) {
            double q = (double)p[i];
            if (mirostat) q = i == 3 || i == 4 ? q / ((double)p[3] + (double)p[4]) : 0;
            else q = 0.5 * q + (i == 4 ? 0 : 0.5 * q / without);
            if (q == 0) CHECK(count[i] == 0, "token %d was drawn", i);
            else chi += (count[i] - 20000 * q) * (count[i] - 20000 * q) / (20000 * q);
        }
        CHECK(chi < 36, "mirostat %d: chi-square %.1f", mirostat, chi);
    }
}

/* A hook sees the logits first, bans tokens, and can fail; log probabilities are of the logits before it. */
typedef struct hook {
    int calls;
    float first;      /* logit 0 when it was called */
    int32_t only;     /* all others are banned      */
    rf_result result;
} hook;
static rf_result mask(float *logits, uint32_t n_vocab, void *user) {
    hook *h = (hook *)user;
    h->calls++;
    h->first = logits[0];
    for (uint32_t i = 0; i < n_vocab; i++)
        if ((int32_t)i != h->only) logits[i] = -INFINITY;
    return h->result;
}
static void test_hook(void) {
    const float raw[5] = {1, 3, 2, -INFINITY, 3};
    hook h = {.only = 2};
    rf_logit_bias bias = {0, 50};
    rf_logprob p[7];
    float memory[5], logits[5];
    int32_t token = -1;
    rf_error err;
    rf_sampler s;
    rf_sampler_desc d = {.bias = &bias, .n_bias = 1, .logits_fn = mask, .logits_user = &h, .logprobs = p,
                         .n_top_logprobs = 6, .logprob_memory = memory};
    for (int hot = 0; hot < 2; hot++) {
        d.temperature = (float)hot;
        REQUIRE(rf_sampler_init(&s, &d, &err) == RF_OK, "%s", err.text);
        memcpy(logits, raw, sizeof raw);
        CHECK(rf_sampler_sample(&s, logits, 5, &token, NULL) == RF_OK && token == 2 && h.calls == hot + 1 && h.first == 1,
              "token %d", token);
    }
    const double sum = exp(-2.0) + 1 + exp(-1.0) + 1;
    const int32_t order[7] = {2, 1, 4, 2, 0, -1, -1};
    for (int i = 0; i < 7; i++) {
        const double want = order[i] < 0 ? -INFINITY : (double)raw[order[i]] - 3 - log(sum);
        CHECK(p[i].token == order[i] && (p[i].logprob == want || fabs((double)p[i].logprob - want) < 1e-6),
              "log probability %d: token %d, %g, want %d, %g", i, p[i].token, (double)p[i].logprob, order[i], want);
    }
    h.result = RF_ERR_FORMAT;
    memcpy(logits, raw, sizeof raw);
    CHECK(rf_sampler_sample(&s, logits, 5, &token, &err) == RF_ERR_FORMAT && strstr(err.text, "logits_fn"), "%s", err.text);
    h.result = RF_OK, h.only = 3;
    memcpy(logits, raw, sizeof raw);
    CHECK(rf_sampler_sample(&s, logits, 5, &token, &err) == RF_ERR_ARGUMENT, "all banned");
    CHECK(s.n_accepted == 1);
}

/* ---- edges ---- */

static void test_not_numbers(void) {
    float nan = NAN, inf = INFINITY;
    int32_t token = 77;
    rf_sampler s;
    rf_error err;
    for (int hot = 0; hot < 5; hot++) {
        rf_sampler_desc d = {.temperature = hot ? 1.0f : 0.0f, .seed = 9};
        if (hot >= 2) d.top_k = 3;
        if (hot >= 3) d.top_p = 0.9f;
        if (hot >= 4) d.min_p = 0.1f;
        rf_sampler_init(&s, &d, NULL);
        unsigned seen = 0;
        float dead[4] = {nan, -inf, nan, -inf};
        token = 77;
        CHECK(rf_sampler_sample(&s, dead, 4, &token,
                                &err) == RF_ERR_ARGUMENT && err.code == RF_ERR_ARGUMENT && err.text[0]);
        CHECK(token == 77 && s.n_accepted == 0, "a failed call changed something");
        for (int i = 0; i < 100; i++) {
            float one[4] = {nan, -inf, -3e38f, -inf}, top[5] = {3e38f, inf, nan, inf, 0}, last[3] = {-nan, -inf, 5};
            CHECK(rf_sampler_sample(&s, one, 4, &token, NULL) == RF_OK && token == 2, "token %d", token);
            CHECK(rf_sampler_sample(&s, top, 5, &token, NULL) == RF_OK && (token == 1 || (hot && token == 3)),
                  "token %d", token);
            seen |= 1u << token;
            CHECK(rf_sampler_sample(&s, last, 3, &token, NULL) == RF_OK && token == 2, "token %d", token);
        }
        CHECK(seen == (hot ? 10u : 2u), "hot %d: infinite logits drawn: %x", hot, seen);
    }
    /* Every NaN is one: the ones next to the infinities, and quiet ones of both signs. */
    const uint32_t nans[] = {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu};
    for (size_t i = 0; i < RFI_COUNT(nans); i++) {
        float two[2] = {0, -1};
        memcpy(two, &nans[i], sizeof nans[i]);
        rf_sampler_init(&s, NULL, NULL);
        CHECK(rf_sampler_sample(&s, two, 2, &token, NULL) == RF_OK && token == 1, "%x", nans[i]);
    }
    /* Extremes of the temperature and of the range of a float: the sums stay numbers. */
    const float temperatures[] = {FLT_MIN / 4, 1e-6f, 1, FLT_MAX};
    for (size_t t = 0; t < RFI_COUNT(temperatures); t++) {
        rf_sampler_init(&s, &(rf_sampler_desc){.temperature = temperatures[t], .top_p = 0.5f, .seed = t}, NULL);
        float wide[4] = {-FLT_MAX, FLT_MAX, 0, -FLT_MAX};
        CHECK(rf_sampler_sample(&s, wide, 4, &token, NULL) == RF_OK && token == 1, "token %d", token);
    }
}

/* Any bits at all: never an index out of range, never a token that is not a number. */
static void test_any_bits(void) {
    for (int round = 0; round < 3000; round++) {
        float logits[64];
        uint32_t n = 1 + test_random() % 64, usable = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t bits = test_random() << 1 ^ test_random();
            memcpy(&logits[i], &bits, sizeof bits);
            usable += logits[i] > -INFINITY;
        }
        rf_sampler_desc d = {.temperature = (float)(test_random() % 3), .top_k = test_random() % 70,
                             .top_p = (float)(test_random() % 5) / 4, .min_p = (float)(test_random() % 3) / 2,
                             .xtc_probability = (float)(test_random() % 2), .xtc_threshold = 0.05f,
                             .mirostat = test_random() % 6 % 3, .mirostat_tau = (float)(test_random() % 9),
                             .dry_multiplier = (float)(test_random() % 2), .repeat_penalty = 1.5f,
                             .seed = test_random()};
        rf_sampler s;
        int32_t token = -1;
        REQUIRE(rf_sampler_init(&s, &d, NULL) == RF_OK);
        for (uint32_t i = test_random() % 64; i > 0; i--) rf_sampler_accept(&s, (int32_t)(test_random() % 5));
        for (uint32_t i = 0; i < n; i++) /* penalties may take it to -infinity */
            if (logits[i] < -1e38f) usable -= logits[i] > -INFINITY, logits[i] = -INFINITY;
        rf_result r = rf_sampler_sample(&s, logits, n, &token, NULL);
        CHECK(r == (usable ? RF_OK : RF_ERR_ARGUMENT), "%s with %u usable", r == RF_OK ? "ok" : "refused", usable);
        if (r == RF_OK)
            CHECK(token >= 0 && (uint32_t)token < n && logits[token] > -INFINITY, "token %d of %u", token, n);
    }
}

static void test_arguments(void) {
    const float nan = NAN, inf = INFINITY;
    rf_logit_bias bad = {1, nan};
    const rf_dry_breaker none[] = {{0}}, falling[] = {{1, {5}}, {1, {4}}};
    int32_t memory[10];
    rf_logprob p;
    float logits[1] = {0};
    const rf_sampler_desc refused[] = {
        {.temperature = nan}, {.temperature = inf}, {.top_p = nan}, {.top_p = -0.1f}, {.min_p = nan}, {.min_p = -1},
        {.min_p = 1.5f}, {.repeat_penalty = -1}, {.repeat_penalty = nan}, {.frequency_penalty = inf},
        {.presence_penalty = nan}, {.penalty_last_n = RF_SAMPLER_HISTORY + 1}, {.n_bias = 1}, {.bias = &bad, .n_bias = 1},
        {.xtc_probability = 1.5f}, {.xtc_threshold = -1}, {.dry_multiplier = nan}, {.dry_base = 0.5f}, {.mirostat = 3},
        {.mirostat_tau = inf}, {.mirostat_eta = -1}, {.dry_last_n = RF_SAMPLER_HISTORY + 1}, {.n_dry_breakers = 1},
        {.dry_breakers = none, .n_dry_breakers = 1}, {.dry_breakers = falling, .n_dry_breakers = 2}, {.n_history = 9},
        {.history = memory}, {.history = memory, .n_history = 2, .penalty_last_n = 3}, {.n_top_logprobs = 1},
        {.logprobs = &p}, {.logprobs = &p, .logprob_memory = logits, .n_top_logprobs = 257}};
    rf_sampler s;
    rf_error err;
    int32_t token;
    for (size_t i = 0; i < RFI_COUNT(refused); i++)
        CHECK(rf_sampler_init(&s, &refused[i], &err) == RF_ERR_ARGUMENT && err.text[0], "case %zu was accepted", i);
    CHECK(rf_sampler_init(NULL, NULL, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_sampler_init(&s, NULL, &err) == RF_OK && err.code == RF_OK);
    CHECK(rf_sampler_sample(NULL, logits, 1, &token, NULL) == RF_ERR_ARGUMENT);
    CHECK(rf_sampler_sample(&s, NULL, 1, &token, NULL) == RF_ERR_ARGUMENT);
    CHECK(rf_sampler_sample(&s, logits, 1, NULL, NULL) == RF_ERR_ARGUMENT);
    CHECK(rf_sampler_sample(&s, logits, 0, &token, NULL) == RF_ERR_ARGUMENT);
    CHECK(rf_sampler_sample(&s, logits, UINT32_MAX, &token, NULL) == RF_ERR_ARGUMENT);
    rf_sampler_accept(NULL, 1);
}

/* ---- what a file recommends ---- */

typedef struct key {
    const char *name;
    char kind; /* i: i32, f: f32, b: bool, s: string, 0: no more */
    double value;
} key;

static rf_result defaults_of(const key *keys, rf_sampler_desc *out, rf_error *err) {
    mg_gguf w;
    mg_buf file = {0};
    rf_gguf *g = NULL;
    char name[96];
    mg_begin(&w, 3);
    for (; keys->kind; keys++) {
        snprintf(name, sizeof name, "general.sampling.%s", keys->name);
        if (keys->kind == 'i') mg_kv_i32(&w, name, (int32_t)keys->value);
        if (keys->kind == 'f') mg_kv_f32(&w, name, (float)keys->value);
        if (keys->kind == 'b') mg_kv_bool(&w, name, keys->value != 0);
        if (keys->kind == 's') mg_kv_str(&w, name, "0.5");
    }
    mg_finish(&w, &file);
    rf_result r = rf_gguf_open_memory(file.data, file.n, NULL, &g, err);
    CHECK(r == RF_OK, "%s", err->text);
    r = rf_sampler_defaults(g, out, err);
    rf_gguf_close(g, NULL);
    mg_free(&file);
    return r;
}

static void test_defaults(void) {
    static const key all[] = {{"temp", 'f', 0.75}, {"top_k", 'i', 40}, {"top_p", 'f', 0.5}, {"min_p", 'f', 0.25},
                              {"penalty_repeat", 'f', 1.5}, {"penalty_last_n", 'i', 100}, {"mirostat", 'i', 2},
                              {"mirostat_tau", 'f', 4}, {"mirostat_eta", 'f', 0.5}, {"xtc_probability", 'f', 0.25},
                              {"xtc_threshold", 'f', 0.125}, {"sequence", 's', 0}, {0}};
    static const key none[] = {{0}}, off[] = {{"top_k", 'i', -1}, {"top_p", 'f', 1}, {"penalty_repeat", 'f', 1.5},
                                              {"penalty_last_n", 'i', 0}, {0}};
    static const key much[] = {{"top_p", 'f', 0}, {"penalty_repeat", 'f', 2}, {"penalty_last_n", 'i', -1},
                               {"temp", 'i', 2}, {0}};
    static const key bad[][2] = {{{"temp", 'f', -0.5}, {0}}, {{"temp", 'f', NAN}, {0}}, {{"temp", 'f', INFINITY}, {0}},
                                 {{"temp", 's', 0}, {0}}, {{"temp", 'b', 1}, {0}}, {{"top_k", 'f', 40}, {0}},
                                 {{"top_p", 'f', 1.5}, {0}}, {{"top_p", 'f', -1}, {0}}, {{"min_p", 'f', 2}, {0}},
                                 {{"mirostat", 'i', 3}, {0}}, {{"xtc_probability", 'f', 2}, {0}},
                                 {{"penalty_repeat", 'f', -1}, {0}}, {{"penalty_last_n", 'i', -2}, {0}}};
    rf_sampler_desc d, zero = {0};
    rf_sampler s;
    rf_error err;
    CHECK(defaults_of(none, &d, &err) == RF_OK && memcmp(&d, &zero, sizeof d) == 0, "%s", err.text);
    CHECK(defaults_of(all, &d, &err) == RF_OK && d.temperature == 0.75f && d.top_k == 40 && d.top_p == 0.5f &&
              d.min_p == 0.25f && d.repeat_penalty == 1.5f && d.penalty_last_n == 100 && d.seed == 0 && !d.bias &&
              d.mirostat == 2 && d.mirostat_tau == 4 && d.mirostat_eta == 0.5f && d.xtc_probability == 0.25f &&
              d.xtc_threshold == 0.125f, "%s", err.text);
    CHECK(rf_sampler_init(&s, &d, NULL) == RF_OK, "what a file says is fit for a sampler");
    CHECK(defaults_of(off, &d, &err) == RF_OK && d.top_k == 0 && d.top_p == 1 && d.repeat_penalty == 0, "%s", err.text);
    CHECK(defaults_of(much, &d, &err) == RF_OK && d.top_k == 1 && d.penalty_last_n == RF_SAMPLER_HISTORY &&
              d.temperature == 2 && rf_sampler_init(&s, &d, NULL) == RF_OK, "%s", err.text);
    for (size_t i = 0; i < RFI_COUNT(bad); i++) {
        rf_result r = defaults_of(bad[i], &d, &err);
        CHECK(r == RF_ERR_FORMAT && strstr(err.text, bad[i][0].name) && err.where > 0 &&
                  memcmp(&d, &zero, sizeof d) == 0, "%s = %g: %s", bad[i][0].name, bad[i][0].value, err.text);
    }
    CHECK(rf_sampler_defaults(NULL, &d, &err) == RF_ERR_ARGUMENT, "no file");
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_reference);
    RUN(test_ties);
    RUN(test_distribution);
    RUN(test_generator);
    RUN(test_weights);
    RUN(test_golden);
    RUN(test_seed);
    RUN(test_greedy);
    RUN(test_bias);
    RUN(test_penalties);
    RUN(test_window);
    RUN(test_by_definition);
    RUN(test_dry_repetition);
    RUN(test_breakers);
    RUN(test_kept_distribution);
    RUN(test_hook);
    RUN(test_not_numbers);
    RUN(test_any_bits);
    RUN(test_arguments);
    RUN(test_defaults);
    RFT_END();
}
