/* rf_test.h: the smallest test frame. A test is a function; it passes if no CHECK in it failed.
 *     static void test_add(void) { CHECK(1 + 1 == 2, "got %d", 1 + 1); }
 *     int main(int argc, char **argv) { RFT_BEGIN(argc, argv); RUN(test_add); RUN_IF(have_zoo, test_zoo, "no zoo"); RFT_END(); }
 * `program SUBSTR` runs only the tests whose name contains SUBSTR; `program slow` those of RUN_SLOW, `program quick` the others.
 * The last line is "suite: N passed, N failed, N skipped". */
#ifndef RF_TEST_H
#define RF_TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int rft_passed, rft_failed, rft_skipped, rft_bad;
static const char *rft_filter, *rft_suite;

/* 1 where a sanitizer makes the program several times slower and keeps memory that was freed. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RFT_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define RFT_SANITIZED 1
#endif
#endif
#ifndef RFT_SANITIZED
#define RFT_SANITIZED 0
#endif

#define RFT_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* The larger error; NaN if either is, unlike fmax: a result that is not a number fails. */
static inline double rft_worst(double a, double b) { return b > a || b != b ? b : a; }

/* Report and go on; at most 20 reports a test. */
#define CHECK(cond, ...)                                                              \
    do {                                                                              \
        if (!(cond) && ++rft_bad <= 20) {                                             \
            printf("    %s:%d: %s: ", __FILE__, __LINE__, #cond);                     \
            printf("" __VA_ARGS__);                                                   \
            printf("\n");                                                             \
        }                                                                             \
    } while (0)

/* Report and leave the test. */
#define REQUIRE(cond, ...)                                                            \
    do {                                                                              \
        if (!(cond)) {                                                                \
            CHECK(cond, __VA_ARGS__);                                                 \
            return;                                                                   \
        }                                                                             \
    } while (0)

/* A promise that no input may break: report and end the process, as a sanitizer does. For fuzzers. */
#define MUST(cond, ...)                                                               \
    do {                                                                              \
        if (!(cond)) {                                                                \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                \
            fprintf(stderr, "" __VA_ARGS__);                                          \
            fprintf(stderr, "\n");                                                    \
            abort();                                                                  \
        }                                                                             \
    } while (0)

static int rft_wanted(const char *name, int slow) {
    if (!rft_filter) return 1;
    if (!strcmp(rft_filter, "slow")) return slow;
    if (!strcmp(rft_filter, "quick")) return !slow;
    return strstr(name, rft_filter) != NULL;
}
static void rft_run(const char *name, void (*test)(void), int slow) {
    if (!rft_wanted(name, slow)) return;
    rft_bad = 0;
    clock_t start = clock();
    test();
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (seconds >= 1) printf("  %s: cpu %.0f s\n", name, seconds);
    if (rft_bad) rft_failed++, printf("  FAIL %s (%d)\n", name, rft_bad);
    else rft_passed++;
    fflush(stdout);
}
#define RUN(test) rft_run(#test, test, 0)
#define RUN_SLOW(test) rft_run(#test, test, 1)
#define RUN_IF(available, test, why)                                                  \
    do {                                                                              \
        if (available) RUN(test);                                                     \
        else if (rft_wanted(#test, 0)) rft_skipped++, printf("  skip %s: %s\n", #test, why); \
    } while (0)

#define RFT_BEGIN(argc, argv) (rft_suite = (argv)[0], rft_filter = (argc) > 1 ? (argv)[1] : NULL)
#define RFT_END()                                                                     \
    do {                                                                              \
        const char *base = strrchr(rft_suite, '/');                                   \
        printf("%s: %d passed, %d failed, %d skipped\n", base ? base + 1 : rft_suite, \
               rft_passed, rft_failed, rft_skipped);                                  \
        return rft_failed != 0;                                                       \
    } while (0)

#ifdef ROCMFORGE_H
/* Logits of a row of the last eval, or NULL; the id of its largest one, or -1. */
__attribute__((unused)) static float *rft_logits(rf_session *s, uint32_t i) {
    float *logits = NULL;
    rf_session_get_logits(s, i, &logits, NULL);
    return logits;
}
__attribute__((unused)) static int32_t rft_argmax(const rf_session *s, uint32_t i) {
    int32_t token = -1;
    rf_session_get_argmax(s, i, &token, NULL);
    return token;
}
#endif

#endif
