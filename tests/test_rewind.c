/* test_rewind.c: a session that is cut and goes on gives the bits of one that never was further, for every model of
 * ../shared/zoo. Only the public API is used: on GPUs in turn if some are linked (gpu_run.sh), else on the CPU. */
#include "rocmforge.h"
#include "rf_test.h"
#include <glob.h>

/* In the long prompt the rings of sliding windows have gone round. */
enum { MAX_VOCAB = 1024, DECODED = 4, LOGITS = 1 + DECODED, CTX = 512, BATCH = 100 };

typedef struct running {
    rf_gguf *file;
    rf_model *model;
    rf_session *session;
    uint32_t n_vocab;
} running;

typedef struct answer {
    float logits[LOGITS][MAX_VOCAB];
} answer;

static const char *path;
static rf_device *device;
static uint32_t n_refused, n_emptied;

/* any text will do, if no part of it is another */
static int32_t token_at(const running *r, uint32_t position, uint32_t text) {
    return (int32_t)((position * 7919u + text * 104729u + 11u) % (r->n_vocab - 1));
}

static rf_result feed(const running *r, uint32_t from, uint32_t to, uint32_t text, rf_error *err) {
    int32_t tokens[CTX];
    for (uint32_t i = from; i < to; i++) tokens[i - from] = token_at(r, i, text);
    return rf_session_forward(r->session, tokens, to - from, NULL, err);
}

/* From position `from` to the cut, from there to the end in a call of its own, and some tokens one by one. */
static rf_result write_on(const running *r, uint32_t from, uint32_t cut, uint32_t end, answer *a, rf_error *err) {
    rf_result code = from < cut ? feed(r, from, cut, 0, err) : RF_OK;
    if (!code) code = feed(r, cut, end, 0, err);
    for (uint32_t i = 0; !code && i < LOGITS; i++) {
        memcpy(a->logits[i], rft_logits(r->session, 0), r->n_vocab * sizeof(float));
        if (i + 1 < LOGITS) code = feed(r, end + i, end + i + 1, 0, err);
    }
    return code;
}

static void check_cut(running *r, uint32_t cut, uint32_t end) {
    static answer fresh, again;
    const rf_session_desc desc = {.n_ctx = CTX, .n_batch = BATCH};
    rf_error err = {0};
    uint32_t kept = 0;
    REQUIRE(rf_session_open(r->model, &desc, &r->session, &err) == RF_OK, "%s", err.text);
    CHECK(write_on(r, 0, cut, end, &fresh, &err) == RF_OK, "%s", err.text);
    CHECK(rf_session_truncate(r->session, 0, cut, &kept, &err) == RF_OK, "%s", err.text);
    CHECK(kept == cut || kept == 0, "of %u tokens %u are kept", cut, kept);
    n_emptied += kept == 0;
    if (kept == cut) { /* another text in between */
        CHECK(feed(r, cut, end + 3, 1, &err) == RF_OK, "%s", err.text);
        CHECK(rf_session_truncate(r->session, 0, cut, &kept, &err) == RF_OK, "%s", err.text);
    }
    CHECK(write_on(r, kept, cut, end, &again, &err) == RF_OK, "%s", err.text);
    for (uint32_t i = 0; !rft_bad && i < LOGITS; i++) {
        CHECK(memcmp(fresh.logits[i], again.logits[i], r->n_vocab * sizeof(float)) == 0,
              "cut to %u of %u, %u kept: other logits %u tokens after", cut, end, kept, i);
    }
    rf_session_close(r->session, NULL);
    r->session = NULL;
}

static void test_model(void) {
    running r = {0};
    rf_error err = {0};
    REQUIRE(rf_gguf_open(path, NULL, &r.file, &err) == RF_OK, "%s", err.text);
    const rf_result code = rf_model_open(r.file, device, NULL, &r.model, &err);
    n_refused += code == RF_ERR_UNSUPPORTED; /* by name: test_zoo */
    CHECK(code == RF_OK || code == RF_ERR_UNSUPPORTED, "%s", err.text);
    if (!code) {
        r.n_vocab = rf_model_get_info(r.model).n_vocab;
        CHECK(r.n_vocab <= MAX_VOCAB, "%u words", r.n_vocab);
        if (!rft_bad) check_cut(&r, 12, 25);
        if (!rft_bad && !RFT_SANITIZED) check_cut(&r, 230, 444);
    }
    rf_model_close(r.model, NULL), rf_gguf_close(r.file, NULL);
}

/* the models' paths, wherever below the repository this was started */
static int find_models(glob_t *found) {
    static const char *const tries[] = {"../shared/zoo", "../../shared/zoo", "../../../shared/zoo"};
    char pattern[64];
    for (size_t i = 0; i < RFT_COUNT(tries); i++) {
        snprintf(pattern, sizeof pattern, "%s/models/*.gguf", tries[i]);
        if (glob(pattern, 0, NULL, found)) continue;
        snprintf(pattern, sizeof pattern, "%s/quants/*.gguf", tries[i]);
        return glob(pattern, GLOB_APPEND, NULL, found) == 0;
    }
    return 0;
}

int main(int argc, char **argv) {
    rf_device_info devices[8];
    rf_device *opened[8] = {0};
    glob_t models = {0};
    rf_error err = {0};
    uint32_t n = 0, n_opened = 0;
    RFT_BEGIN(argc, argv);
    rf_device_list(devices, 8, &n, NULL);
    for (uint32_t d = 0; d < n && d < 8; d++) {
        if (!devices[d].usable || !devices[d].is_gpu) continue;
        if (rf_device_open(devices[d].name, NULL, &opened[n_opened], &err) == RF_OK) n_opened++;
        else printf("  FAIL %s: %s\n", devices[d].name, err.text), rft_failed++;
    }
    if (!n_opened && rf_device_open("cpu", NULL, &opened[n_opened++], &err) != RF_OK) return 1;
    if (!find_models(&models)) printf("  skip test_model: no ../shared/zoo\n"), rft_skipped++;
    for (size_t i = 0; i < models.gl_pathc; i++) {
        path = models.gl_pathv[i], device = opened[i % n_opened];
        rft_run(path, test_model, 0);
    }
    printf("    on %u devices; %u models refused, %u cuts left nothing\n", n_opened, n_refused, n_emptied);
    if (models.gl_pathc && n_emptied >= models.gl_pathc) printf("  FAIL cuts keep nothing\n"), rft_failed++;
    globfree(&models);
    for (uint32_t d = 0; d < n_opened; d++) rf_device_close(opened[d], NULL);
    RFT_END();
}
