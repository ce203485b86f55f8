/* cc -O2 -I. -o test_scheduler tests/test_scheduler.c -lm -pthread && ./test_scheduler        from the repository root
 * Continuous batching: whatever the slots, the batch and the neighbours, each request gets exactly the tokens that it
 * gets alone, through rf_session_forward and greedy choice. */
#include "rocmforge.h"
#include <math.h>
#include "rf_memory.h"
#include "rf_test.h"

#define MODEL "examples/shakespeare-5m.gguf"
#define N_REQUESTS 12
#define MAX_TOKENS 11

static rf_gguf *file;
static rf_device *device;
static rf_model *model;
static const rf_tokenizer *tokenizer;

static const char *const prompts[N_REQUESTS] = {
    "ROMEO:\n", "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n", "O", "KING RICHARD II:\n",
    "What light through yonder window breaks? It is the east, and Juliet is the sun. Arise, fair sun, and kill the\n",
    "JULIET:\nMy", "To be, or not", "Good morrow, cousin.\n\nBENVOLIO:\n", "MENENIUS:\nI tell you, friends,",
    "The", "Second Servingman:\nWhere's Cotus? my master calls for him. Cotus!\n\n", "DUKE VINCENTIO:\n"};

/* One request, what it got and how it ended. */
typedef struct job {
    int32_t prompt[512];
    uint32_t n_prompt, max_tokens;
    rf_sampler sampler;
    int32_t tokens[512];
    uint32_t n_tokens;
    int n_ends;
    rf_result reason;
    uint32_t stop_after;      /* on_token asks to end then; 0: never      */
    rf_scheduler *scheduler;  /* on_end submits `then` to it, if there is */
    struct job *then;
} job;

static job jobs[N_REQUESTS], reference[N_REQUESTS];

static int on_token(int32_t token, void *user) {
    job *j = user;
    if (j->n_tokens < 512) j->tokens[j->n_tokens] = token;
    CHECK(j->n_ends == 0, "a token after the end");
    return ++j->n_tokens == j->stop_after;
}

static rf_result submit(rf_scheduler *sch, job *j, rf_error *err);
static void on_end(rf_result reason, void *user) {
    job *j = user;
    j->n_ends++;
    j->reason = reason;
    if (j->then) CHECK(submit(j->scheduler, j->then, NULL) == RF_OK, "submit from on_end");
}

static rf_result submit(rf_scheduler *sch, job *j, rf_error *err) {
    rf_request r = {j->prompt, j->n_prompt, j->max_tokens, &j->sampler, on_token, on_end, j, 0, NULL};
    return rf_scheduler_submit(sch, &r, err);
}

static void set_job(job *j, const char *prompt, uint32_t max_tokens) {
    memset(j, 0, sizeof *j);
    j->max_tokens = max_tokens;
    CHECK(rf_tokenize(tokenizer, rf_string_of(prompt), RF_TOKENIZE_ADD, j->prompt, 512, &j->n_prompt, NULL) == RF_OK);
    if (RFT_SANITIZED && j->n_prompt > 5) j->n_prompt = 5; /* a minute less, and no less to see */
    CHECK(rf_sampler_init(&j->sampler, NULL, NULL) == RF_OK);
}

static rf_session *open_session(uint32_t n_ctx, uint32_t n_seq_max, uint32_t n_batch, uint32_t n_logits_max) {
    rf_session_desc d = {.n_ctx = n_ctx, .n_seq_max = n_seq_max, .n_batch = n_batch, .n_logits_max = n_logits_max};
    rf_session *s = NULL;
    rf_error err;
    CHECK(rf_session_open(model, &d, &s, &err) == RF_OK, "%s", err.text);
    return s;
}

/* The same request without the scheduler. */
static void run_alone(job *j) {
    rf_session *s = open_session(512, 1, 0, 0);
    uint32_t n_vocab = rf_model_get_info(model).n_vocab;
    float *logits;
    rf_result r = rf_session_forward(s, j->prompt, j->n_prompt, &logits, NULL);
    while (r == RF_OK) {
        int32_t best = 0;
        for (uint32_t i = 1; i < n_vocab; i++)
            if (logits[i] > logits[best]) best = (int32_t)i;
        j->tokens[j->n_tokens++] = best;
        if (j->n_tokens == j->max_tokens || rf_token_is_end(tokenizer, best)) break;
        r = rf_session_forward(s, &best, 1, &logits, NULL);
    }
    j->reason = r;
    rf_session_close(s, NULL);
}

static int open_all(void) {
    rf_error err;
    rf_device_desc one_thread = {.n_threads = 1};
    if (rf_gguf_open(MODEL, NULL, &file, &err) || rf_device_open("cpu", &one_thread, &device, &err) ||
        rf_model_open(file, device, NULL, &model, &err) || rf_model_get_tokenizer(model, &tokenizer, &err)) {
        printf("  %s\n", err.text);
        return 0;
    }
    for (int i = 0; i < N_REQUESTS; i++) {
        set_job(&reference[i], prompts[i], 5 + (uint32_t)i * 7 % (MAX_TOKENS - 5));
        run_alone(&reference[i]);
    }
    return 1;
}

static void reset_jobs(void) {
    for (int i = 0; i < N_REQUESTS; i++) set_job(&jobs[i], prompts[i], reference[i].max_tokens);
}

static void check_same(int i) {
    const job *j = &jobs[i], *want = &reference[i];
    CHECK(j->n_ends == 1 && j->reason == RF_OK, "request %d: %d ends, %s", i, j->n_ends, rf_result_name(j->reason));
    CHECK(j->n_tokens == want->n_tokens && memcmp(j->tokens, want->tokens, want->n_tokens * sizeof(int32_t)) == 0,
          "request %d: %u tokens, alone %u, or other ones", i, j->n_tokens, want->n_tokens);
}

/* Steps until nothing is left; a scheduler that does not come to an end fails. */
static void run_all(rf_scheduler *sch, uint32_t n_expected) {
    rf_error err;
    uint32_t active = 1, steps = 0, before = n_expected;
    while (active && steps++ < 2000) {
        rf_result r = rf_scheduler_step(sch, &active, &err);
        CHECK(r == RF_OK, "step %u: %s", steps, err.text);
        CHECK(active <= before, "step %u: %u active after %u", steps, active, before);
        before = active;
        if (r != RF_OK) break;
    }
    CHECK(active == 0, "%u requests left after %u steps", active, steps);
}

/* ---- tests ---- */

static void test_reference_is_alive(void) {
    uint32_t total = 0, different = 0;
    for (int i = 0; i < N_REQUESTS; i++) {
        CHECK(reference[i].reason == RF_OK && reference[i].n_tokens > 0, "request %d: %u tokens", i,
              reference[i].n_tokens);
        total += reference[i].n_tokens;
        different += memcmp(reference[i].tokens, reference[0].tokens, 2 * sizeof(int32_t)) != 0;
    }
    CHECK(total > 80 && different > 3, "%u tokens, %u texts differ from the first", total, different);
}

static void test_same_as_alone(void) {
    /* n_seq_max, n_batch, n_logits_max: as asked; fewer logits, fewer rows than sequences; room for all */
    static const uint32_t shapes[][3] = {{3, 64, 3}, {5, 4, 2}, {9, 3, 9}, {16, 512, 16}};
    for (size_t c = 0; c < RFT_COUNT(shapes); c += 1 + RFT_SANITIZED) { /* the first and the third tell a sanitizer most */
        rf_session *s = open_session(256, shapes[c][0], shapes[c][1], shapes[c][2]);
        rf_scheduler *sch = NULL;
        rf_error err;
        REQUIRE(rf_scheduler_open(s, tokenizer, N_REQUESTS, &sch, &err) == RF_OK, "%s", err.text);
        reset_jobs();
        for (int i = 0; i < N_REQUESTS; i++) CHECK(submit(sch, &jobs[i], &err) == RF_OK, "%s", err.text);
        run_all(sch, N_REQUESTS);
        for (int i = 0; i < N_REQUESTS; i++) check_same(i);
        rf_scheduler_close(sch, NULL);
        rf_session_close(s, NULL);
    }
}

/* Requests that arrive while others run: every even one at its own step, its successor from its on_end. */
static void test_arrivals(void) {
    rf_session *s = open_session(256, 3, 32, 0);
    rf_scheduler *sch = NULL;
    rf_error err;
    uint32_t active = 1;
    REQUIRE(rf_scheduler_open(s, tokenizer, N_REQUESTS, &sch, &err) == RF_OK, "%s", err.text);
    reset_jobs();
    for (int step = 0; step < 2000 && active; step++) {
        if (step % 3 == 0 && step / 3 * 2 < N_REQUESTS) {
            job *j = &jobs[step / 3 * 2];
            j->scheduler = sch;
            j->then = j + 1;
            CHECK(submit(sch, j, &err) == RF_OK, "%s", err.text);
        }
        REQUIRE(rf_scheduler_step(sch, &active, &err) == RF_OK, "%s", err.text);
    }
    for (int i = 0; i < N_REQUESTS; i++) check_same(i);
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
}

/* First come, first served: with one slot the ends come in the order of submission, through a ring that wraps. */
static void test_order(void) {
    rf_session *s = open_session(256, 1, 64, 0);
    rf_scheduler *sch = NULL;
    rf_error err;
    int next = 0, ended = 0;
    uint32_t active = 1;
    REQUIRE(rf_scheduler_open(s, tokenizer, 3, &sch, &err) == RF_OK, "%s", err.text);
    reset_jobs();
    for (int step = 0; step < 2000 && active; step++) {
        while (next < N_REQUESTS && submit(sch, &jobs[next], &err) == RF_OK) next++;
        CHECK(next == N_REQUESTS || err.code == RF_ERR_BUSY, "%s", err.text);
        REQUIRE(rf_scheduler_step(sch, &active, &err) == RF_OK, "%s", err.text);
        while (ended < N_REQUESTS && jobs[ended].n_ends) ended++;
        for (int i = ended + 1; i < N_REQUESTS; i++)
            CHECK(jobs[i].n_tokens == 0, "request %d got a token before request %d ended", i, ended);
    }
    for (int i = 0; i < N_REQUESTS; i++) check_same(i);
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
}

/* How a request can end: asked by on_token, by its limit, by the end of the context. */
static void test_ends(void) {
    const uint32_t n_ctx = 24;
    rf_session *s = open_session(n_ctx, 3, 16, 0);
    rf_scheduler *sch = NULL;
    rf_error err;
    REQUIRE(rf_scheduler_open(s, tokenizer, 8, &sch, &err) == RF_OK, "%s", err.text);
    for (int i = 0; i < 5; i++) set_job(&jobs[i], prompts[0], 1000);
    jobs[0].stop_after = 3;
    jobs[1].max_tokens = 1;
    jobs[3].max_tokens = 0; /* no limit of its own */
    jobs[4].n_prompt = n_ctx;
    for (uint32_t i = 0; i < n_ctx; i++) jobs[4].prompt[i] = (int32_t)i + 40;
    for (int i = 0; i < 5; i++) CHECK(submit(sch, &jobs[i], &err) == RF_OK, "%s", err.text);
    jobs[5] = jobs[4];
    jobs[5].n_prompt = n_ctx + 1;
    CHECK(submit(sch, &jobs[5], &err) == RF_ERR_CONTEXT_FULL && jobs[5].n_ends == 0);
    run_all(sch, 5);
    CHECK(jobs[0].n_ends == 1 && jobs[0].reason == RF_OK && jobs[0].n_tokens == 3, "%u", jobs[0].n_tokens);
    CHECK(jobs[1].n_ends == 1 && jobs[1].reason == RF_OK && jobs[1].n_tokens == 1, "%u", jobs[1].n_tokens);
    /* n_ctx tokens fit; the last one chosen needs no room */
    for (int i = 2; i <= 4; i++)
        CHECK(jobs[i].n_ends == 1 && jobs[i].reason == RF_ERR_CONTEXT_FULL &&
                  jobs[i].n_tokens == n_ctx - jobs[i].n_prompt + 1,
              "request %d: %s, %u tokens after %u", i, rf_result_name(jobs[i].reason), jobs[i].n_tokens,
              jobs[i].n_prompt);
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
}

/* A cancelled step leaves everything as it was. */
static void test_cancel(void) {
    rf_session *s = open_session(256, 3, 16, 0);
    rf_scheduler *sch = NULL;
    rf_error err;
    uint32_t active = 1, n_cancelled = 0;
    REQUIRE(rf_scheduler_open(s, tokenizer, N_REQUESTS, &sch, &err) == RF_OK, "%s", err.text);
    reset_jobs();
    for (int i = 0; i < N_REQUESTS; i++) CHECK(submit(sch, &jobs[i], &err) == RF_OK, "%s", err.text);
    for (int step = 0; step < 2000 && active; step++) {
        if (step % 3 == 0) rf_session_cancel(s);
        rf_result r = rf_scheduler_step(sch, &active, &err);
        CHECK(r == (step % 3 == 0 ? RF_ERR_CANCELLED : RF_OK), "step %d: %s", step, rf_result_name(r));
        n_cancelled += r == RF_ERR_CANCELLED;
    }
    CHECK(n_cancelled > 5 && active == 0, "%u steps cancelled", n_cancelled);
    for (int i = 0; i < N_REQUESTS; i++) check_same(i);
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
}

static int close_from_token(int32_t token, void *user) {
    rf_error err;
    (void)token;
    CHECK(rf_scheduler_close(((job *)user)->scheduler, &err) == RF_ERR_BUSY && strstr(err.text, "callback"), "%s", err.text);
    return ++((job *)user)->n_tokens == 3;
}

/* What is in use stays open, and says so. */
static void test_busy(void) {
    rf_session *s = open_session(64, 1, 8, 0);
    rf_scheduler *sch = NULL;
    rf_tokenizer *own = NULL;
    rf_error err;
    uint32_t active = 1;
    REQUIRE(rf_tokenizer_open(file, NULL, &own, &err) == RF_OK && rf_scheduler_open(s, own, 1, &sch, &err) == RF_OK, "%s", err.text);
    rf_model *other = NULL;
    rf_scheduler *sch2 = NULL;
    const rf_tokenizer *borrowed = NULL;
    CHECK(rf_session_close(s, &err) == RF_ERR_BUSY && err.code == RF_ERR_BUSY && strstr(err.text, "scheduler"), "%s", err.text);
    CHECK(rf_tokenizer_close(own, &err) == RF_ERR_BUSY && strstr(err.text, "scheduler"), "%s", err.text);
    set_job(&jobs[0], prompts[0], 0);
    jobs[0].scheduler = sch;
    rf_request r = {.prompt = jobs[0].prompt, .n_prompt = jobs[0].n_prompt, .sampler = &jobs[0].sampler,
                    .on_token = close_from_token, .user = &jobs[0]};
    CHECK(rf_scheduler_submit(sch, &r, &err) == RF_OK, "%s", err.text);
    while (active) REQUIRE(rf_scheduler_step(sch, &active, &err) == RF_OK, "%s", err.text);
    CHECK(jobs[0].n_tokens == 3, "%u tokens", jobs[0].n_tokens);
    /* a scheduler may borrow the tokenizer of a model without a session */
    REQUIRE(rf_model_open(file, device, NULL, &other, &err) == RF_OK && rf_model_get_tokenizer(other, &borrowed, &err) == RF_OK &&
            rf_scheduler_open(s, borrowed, 1, &sch2, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_close(other, &err) == RF_ERR_BUSY && strstr(err.text, "scheduler"), "%s", err.text);
    CHECK(rf_scheduler_close(sch2, &err) == RF_OK && rf_model_close(other, &err) == RF_OK, "%s", err.text);
    CHECK(rf_scheduler_close(sch, &err) == RF_OK && rf_tokenizer_close(own, &err) == RF_OK && rf_session_close(s, &err) == RF_OK,
          "%s", err.text);
}

static void end_and_submit(rf_result reason, void *user) {
    job *j = user;
    j->n_ends++;
    j->reason = reason;
    CHECK(submit(j->scheduler, j, NULL) == RF_ERR_CANCELLED, "a closing scheduler took a request");
}

static void test_close(void) {
    rf_session *s = open_session(256, 2, 16, 0);
    rf_scheduler *sch = NULL;
    rf_error err;
    uint32_t active = 0;
    REQUIRE(rf_scheduler_open(s, tokenizer, N_REQUESTS, &sch, &err) == RF_OK, "%s", err.text);
    CHECK(rf_scheduler_step(sch, &active, &err) == RF_OK && active == 0, "nothing to do is fine");
    reset_jobs();
    for (int i = 0; i < 6; i++) {
        jobs[i].scheduler = sch;
        jobs[i].max_tokens = 100;
        rf_request r = {jobs[i].prompt, jobs[i].n_prompt, 100, &jobs[i].sampler, on_token, end_and_submit, &jobs[i]};
        CHECK(rf_scheduler_submit(sch, &r, &err) == RF_OK, "%s", err.text);
    }
    for (int i = 0; i < 4; i++) CHECK(rf_scheduler_step(sch, &active, &err) == RF_OK && active == 6, "%u active",
                                      active);
    rf_scheduler_close(sch, NULL);
    for (int i = 0; i < 6; i++)
        CHECK(jobs[i].n_ends == 1 && jobs[i].reason == RF_ERR_CANCELLED, "request %d: %d ends, %s", i, jobs[i].n_ends,
              rf_result_name(jobs[i].reason));
    rf_session_close(s, NULL);
    rf_scheduler_close(NULL, NULL);
}

static void test_arguments(void) {
    rf_session *s = open_session(64, 1, 16, 0);
    rf_scheduler *sch = NULL;
    rf_error err;
    CHECK(rf_scheduler_open(NULL, tokenizer, 1, &sch, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_scheduler_open(s, NULL, 1, &sch, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_scheduler_open(s, tokenizer, 0, &sch, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_scheduler_open(s, tokenizer, 1, NULL, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_scheduler_step(NULL, NULL, &err) == RF_ERR_ARGUMENT);
    REQUIRE(rf_scheduler_open(s, tokenizer, 1, &sch, &err) == RF_OK, "%s", err.text);
    set_job(&jobs[0], prompts[0], 4);
    const rf_request good = {jobs[0].prompt, jobs[0].n_prompt, 4, &jobs[0].sampler, NULL, NULL, NULL};
    rf_request bad = good;
    CHECK(rf_scheduler_submit(NULL, &good, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_scheduler_submit(sch, NULL, &err) == RF_ERR_ARGUMENT);
    bad.prompt = NULL;
    CHECK(rf_scheduler_submit(sch, &bad, &err) == RF_ERR_ARGUMENT);
    bad = good, bad.n_prompt = 0;
    CHECK(rf_scheduler_submit(sch, &bad, &err) == RF_ERR_ARGUMENT);
    bad = good, bad.sampler = NULL;
    CHECK(rf_scheduler_submit(sch, &bad, &err) == RF_ERR_ARGUMENT);
    int32_t wrong[3] = {1, -1, 1};
    bad = good, bad.prompt = wrong, bad.n_prompt = 3;
    CHECK(rf_scheduler_submit(sch, &bad, &err) == RF_ERR_ARGUMENT && err.where == 1);
    wrong[1] = (int32_t)rf_model_get_info(model).n_vocab;
    CHECK(rf_scheduler_submit(sch, &bad, &err) == RF_ERR_ARGUMENT && err.where == 1);
    CHECK(rf_scheduler_submit(sch, &good, &err) == RF_OK, "%s", err.text);
    CHECK(rf_scheduler_submit(sch, &good, &err) == RF_ERR_BUSY);
    run_all(sch, 1); /* without callbacks */
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
}

/* A sampler's hook acts on its own request: one bans a token, one fails at its third token, the others are as alone. */
typedef struct ban {
    int32_t token;
    uint32_t calls, fail_at;
} ban;
static rf_result ban_token(float *logits, uint32_t n_vocab, void *user) {
    ban *b = user;
    CHECK(n_vocab == rf_model_get_info(model).n_vocab, "%u logits", n_vocab);
    if (b->token >= 0) logits[b->token] = -INFINITY;
    return ++b->calls == b->fail_at ? RF_ERR_FORMAT : RF_OK;
}
static void test_hooks(void) {
    ban bans[2] = {{.token = reference[0].tokens[0]}, {.token = -1, .fail_at = 3}};
    rf_logprob logprob = {-1, 0};
    float *raw = malloc(rf_model_get_info(model).n_vocab * sizeof *raw);
    rf_session *s = open_session(512, 4, 64, 4), *alone = open_session(512, 1, 0, 0);
    rf_scheduler *sch = NULL;
    REQUIRE(rf_scheduler_open(s, tokenizer, 4, &sch, NULL) == RF_OK);
    reset_jobs();
    for (int i = 0; i < 2; i++) {
        rf_sampler_desc d = {.logits_fn = ban_token, .logits_user = &bans[i]};
        if (i == 0) d.logprobs = &logprob, d.logprob_memory = raw;
        REQUIRE(rf_sampler_init(&jobs[i].sampler, &d, NULL) == RF_OK);
    }
    for (int i = 0; i < 4; i++) REQUIRE(submit(sch, &jobs[i], NULL) == RF_OK);
    run_all(sch, 4);
    check_same(2), check_same(3);
    CHECK(jobs[1].n_ends == 1 && jobs[1].reason == RF_ERR_FORMAT && jobs[1].n_tokens == 2, "%s after %u tokens",
          rf_result_name(jobs[1].reason), jobs[1].n_tokens);
    CHECK(jobs[0].reason == RF_OK && jobs[0].n_tokens == bans[0].calls, "%u tokens", jobs[0].n_tokens);
    int32_t ids[1];
    rf_result r = rf_session_forward(alone, jobs[0].prompt, jobs[0].n_prompt, NULL, NULL);
    for (uint32_t i = 0; r == RF_OK && i < jobs[0].n_tokens; i++) {
        float *logits = rft_logits(alone, 0);
        logits[bans[0].token] = -INFINITY;
        rf_sampler greedy;
        rf_sampler_init(&greedy, NULL, NULL);
        REQUIRE(rf_session_sample(alone, 0, &greedy, ids, NULL) == RF_OK);
        CHECK(ids[0] == jobs[0].tokens[i], "token %u: %d, alone %d", i, jobs[0].tokens[i], ids[0]);
        r = rf_session_forward(alone, ids, 1, NULL, NULL);
    }
    CHECK(logprob.token == jobs[0].tokens[jobs[0].n_tokens - 1] && logprob.logprob < 0, "log probability of token %d: %g",
          logprob.token, (double)logprob.logprob);
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL), rf_session_close(alone, NULL);
    free(raw);
}

/* Requests whose rows several threads sample get the ids of a sampler alone: several cuts, greedy, penalties. */
static void test_sampled_together(void) {
    const rf_device_desc threads = {.n_threads = 4};
    const rf_sampler_desc kinds[] = {{.temperature = 0.8f, .top_k = 40, .top_p = 0.95f}, {.temperature = 1.5f},
                                     {.temperature = 1, .top_p = 0.9f, .min_p = 0.05f}, {.temperature = 0},
                                     {.temperature = 2, .top_p = 0.99f, .repeat_penalty = 1.3f},
                                     {.repeat_penalty = 1.2f}};
    const uint32_t n = RFT_SANITIZED ? RFT_COUNT(kinds) : N_REQUESTS; /* one of each shows races, too */
    rf_device *d = NULL;
    rf_model *m = NULL, *first = model;
    rf_scheduler *sch = NULL;
    REQUIRE(rf_device_open("cpu", &threads, &d, NULL) == RF_OK && rf_model_open(file, d, NULL, &m, NULL) == RF_OK);
    model = m;
    rf_session *s = open_session(256, N_REQUESTS, 64, N_REQUESTS), *alone = open_session(256, 1, 0, 0);
    REQUIRE(rf_scheduler_open(s, tokenizer, N_REQUESTS, &sch, NULL) == RF_OK);
    reset_jobs();
    for (uint32_t i = 0; i < n; i++) {
        rf_sampler_desc kind = kinds[i % RFT_COUNT(kinds)];
        kind.seed = i;
        CHECK(rf_sampler_init(&jobs[i].sampler, &kind, NULL) == RF_OK && submit(sch, &jobs[i], NULL) == RF_OK);
    }
    run_all(sch, n);
    for (uint32_t i = 0; i < n; i++) {
        const job *j = &jobs[i];
        rf_sampler sampler;
        int32_t id = -1;
        rf_sampler_init(&sampler, &j->sampler.desc, NULL);
        CHECK(j->reason == RF_OK && j->n_tokens > 0, "request %u: %s", i, rf_result_name(j->reason));
        rf_session_truncate(alone, 0, 0, NULL, NULL);
        rf_result r = rf_session_forward(alone, j->prompt, j->n_prompt, NULL, NULL);
        for (uint32_t k = 0; r == RF_OK && k < j->n_tokens; k++) {
            CHECK(rf_session_sample(alone, 0, &sampler, &id, NULL) == RF_OK && id == j->tokens[k],
                  "request %u, token %u: %d, alone %d", i, k, j->tokens[k], id);
            r = rf_session_forward(alone, &id, 1, NULL, NULL);
        }
    }
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL), rf_session_close(alone, NULL);
    rf_model_close(m, NULL), rf_device_close(d, NULL);
    model = first;
}

/* ---- failures ---- */

/* An allocator that counts and fails the n-th call. */
/* Device calls fail one after the other: the requests in the batch end with the code, each once; nothing leaks. */
static void test_device_failure(void) {
    int n_failed_steps = 0;
    for (uint64_t fail = 1; fail < 60; fail++) {
        rf_device_desc d = {.fail_call = fail};
        rf_device *null_device = NULL;
        rf_model *m = NULL;
        rf_session *s = NULL;
        rf_scheduler *sch = NULL;
        rf_error err;
        rf_session_desc sd = {.n_ctx = 64, .n_seq_max = 2, .n_batch = 16};
        uint32_t active = 1;
        reset_jobs();
        if (rf_device_open("null", &d, &null_device, &err) == RF_OK &&
            rf_model_open(file, null_device, NULL, &m, &err) == RF_OK &&
            rf_session_open(m, &sd, &s, &err) == RF_OK) {
            REQUIRE(rf_scheduler_open(s, tokenizer, 4, &sch, &err) == RF_OK, "%s", err.text);
            for (int i = 0; i < 4; i++) CHECK(submit(sch, &jobs[i], &err) == RF_OK, "%s", err.text);
            rf_result r = RF_OK;
            for (int step = 0; step < 500 && active && r == RF_OK; step++) r = rf_scheduler_step(sch, &active, &err);
            if (r != RF_OK) {
                n_failed_steps++;
                int n_ended = 0;
                for (int i = 0; i < 4; i++) {
                    rf_result reason = jobs[i].reason;
                    CHECK(jobs[i].n_ends <= 1 && (jobs[i].n_ends == 0 || reason == r || reason == RF_OK ||
                                                  reason == RF_ERR_CONTEXT_FULL),
                          "fail %d request %d: %d ends, %s", (int)fail, i, jobs[i].n_ends,
                          rf_result_name(jobs[i].reason));
                    n_ended += jobs[i].n_ends && jobs[i].reason == r;
                }
                CHECK(n_ended > 0 && n_ended <= 2, "%d requests ended by %s", n_ended, rf_result_name(r));
            }
            rf_scheduler_close(sch, NULL);
            for (int i = 0; i < 4; i++) CHECK(jobs[i].n_ends == 1, "request %d: %d ends", i, jobs[i].n_ends);
        }
        rf_session_close(s, NULL);
        rf_model_close(m, NULL);
        rf_device_close(null_device, NULL);
    }
    CHECK(n_failed_steps > 5, "only %d steps failed", n_failed_steps);
}

/* Each allocation of rf_scheduler_open fails once; after a successful one nothing is allocated any more. */
static void test_memory(void) {
    memory mem = {0};
    rf_gguf_desc gd = {.allocator = memory_allocator(&mem)};
    rf_gguf *g = NULL;
    rf_model *m = NULL;
    rf_session *s = NULL;
    rf_scheduler *sch = NULL;
    rf_error err;
    rf_session_desc sd = {.n_ctx = 128, .n_seq_max = 3};
    REQUIRE(rf_gguf_open(MODEL, &gd, &g, &err) == RF_OK && rf_model_open(g, device, NULL, &m, &err) == RF_OK &&
                rf_session_open(m, &sd, &s, &err) == RF_OK, "%s", err.text);
    int n_failures = 0;
    for (int n = 1; n < 20 && !sch; n++) {
        mem.calls = 0, mem.fail_at = n;
        rf_result r = rf_scheduler_open(s, tokenizer, 4, &sch, &err);
        CHECK(r == RF_OK || (r == RF_ERR_MEMORY && !sch && err.text[0]), "%s", rf_result_name(r));
        n_failures += r != RF_OK;
    }
    REQUIRE(sch && n_failures >= 4, "%d allocations", n_failures);
    rf_model_preload_all(m, NULL);
    mem.calls = 0, mem.fail_at = 1;
    reset_jobs();
    for (int i = 0; i < 4; i++) CHECK(submit(sch, &jobs[i], &err) == RF_OK, "%s", err.text);
    run_all(sch, 4);
    CHECK(mem.calls == 0, "%d allocations after rf_scheduler_open", (int)mem.calls);
    mem.fail_at = 0;
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
    rf_model_close(m, NULL);
    rf_gguf_close(g, NULL);
}

/* One long beginning, many endings: it is evaluated once, whether the requests come together or after one another, and
 * the texts are those of each alone. Then the same with no_reuse. */
static void test_shared_prefix(void) {
    static job own[6], alone[6];
    static uint32_t reused[6];
    char text[600];
    for (int i = 0; i < 6; i++) {
        snprintf(text, sizeof text, "%s%s", prompts[4], prompts[i]);
        set_job(&alone[i], text, 6);
        run_alone(&alone[i]);
    }
    for (int round = 0; round < 3; round++) { /* few sequences, more of them than run, no_reuse */
        rf_session *s = open_session(256, round == 1 ? 5 : 3, 16, 3);
        rf_scheduler *sch = NULL;
        uint32_t n_active = 1, n_reused = 0, shared = 0;
        CHECK(rf_scheduler_open(s, tokenizer, 8, &sch, NULL) == RF_OK);
        for (int i = 0; i < 6; i++) {
            own[i] = alone[i];
            own[i].n_tokens = 0, own[i].n_ends = 0;
            CHECK(rf_sampler_init(&own[i].sampler, NULL, NULL) == RF_OK);
            rf_request r = {own[i].prompt, own[i].n_prompt, 6, &own[i].sampler, on_token, on_end, &own[i], round == 2,
                            &reused[i]};
            reused[i] = 9999;
            CHECK(rf_scheduler_submit(sch, &r, NULL) == RF_OK);
        }
        for (int steps = 0; n_active && steps < 500; steps++) CHECK(rf_scheduler_step(sch, &n_active, NULL) == RF_OK);
        for (int i = 0; i < 6; i++) {
            CHECK(own[i].n_ends == 1 && own[i].reason == alone[i].reason && own[i].n_tokens == alone[i].n_tokens &&
                  memcmp(own[i].tokens, alone[i].tokens, alone[i].n_tokens * sizeof(int32_t)) == 0, "request %d", i);
            n_reused += reused[i];
        }
        rf_tokenize(tokenizer, rf_string_of(prompts[4]), RF_TOKENIZE_ADD, NULL, 0, &shared, NULL);
        if (RFT_SANITIZED) shared = 5; /* set_job cuts prompts */
        if (round == 2) CHECK(n_reused == 0, "%u tokens reused", n_reused);
        else CHECK(RFT_SANITIZED || n_reused >= 5 * (shared - 8), "%u tokens reused of 5 times %u", n_reused, shared);
        rf_scheduler_close(sch, NULL);
        rf_session_close(s, NULL);
    }
}

/* A request that runs, one that waits: both end at once, others go on. */
static void test_cancel_requests(void) {
    rf_session *s = open_session(256, 2, 16, 2);
    rf_scheduler *sch = NULL;
    uint32_t n_active = 1;
    CHECK(rf_scheduler_open(s, tokenizer, 8, &sch, NULL) == RF_OK);
    reset_jobs();
    for (int i = 0; i < 5; i++) CHECK(submit(sch, &jobs[i], NULL) == RF_OK);
    CHECK(rf_scheduler_step(sch, NULL, NULL) == RF_OK);
    for (int i = 1; i < 5; i += 2) { /* 1 runs, 3 waits */
        CHECK(rf_scheduler_cancel(sch, &jobs[i], NULL) == RF_OK);
        CHECK(jobs[i].n_ends == 1 && jobs[i].reason == RF_ERR_CANCELLED, "request %d", i);
    }
    CHECK(rf_scheduler_cancel(sch, &jobs[7], NULL) == RF_OK && rf_scheduler_cancel(NULL, NULL, NULL) == RF_ERR_ARGUMENT);
    for (int steps = 0; n_active && steps < 500; steps++) CHECK(rf_scheduler_step(sch, &n_active, NULL) == RF_OK);
    for (int i = 0; i < 5; i += 2)
        CHECK(jobs[i].n_ends == 1 && jobs[i].n_tokens == reference[i].n_tokens &&
              memcmp(jobs[i].tokens, reference[i].tokens, jobs[i].n_tokens * sizeof(int32_t)) == 0, "request %d", i);
    rf_scheduler_close(sch, NULL);
    rf_session_close(s, NULL);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    int have = open_all();
    RUN_IF(have, test_reference_is_alive, "no " MODEL);
    RUN_IF(have, test_same_as_alone, "no " MODEL);
    RUN_IF(have, test_arrivals, "no " MODEL);
    RUN_IF(have, test_order, "no " MODEL);
    RUN_IF(have, test_ends, "no " MODEL);
    RUN_IF(have, test_cancel, "no " MODEL);
    RUN_IF(have, test_shared_prefix, "no " MODEL);
    RUN_IF(have, test_cancel_requests, "no " MODEL);
    RUN_IF(have, test_busy, "no " MODEL);
    RUN_IF(have, test_close, "no " MODEL);
    RUN_IF(have, test_arguments, "no " MODEL);
    RUN_IF(have, test_hooks, "no " MODEL);
    RUN_IF(have, test_sampled_together, "no " MODEL);
    RUN_IF(have, test_device_failure, "no " MODEL);
    RUN_IF(have, test_memory, "no " MODEL);
    rf_model_close(model, NULL);
    rf_device_close(device, NULL);
    rf_gguf_close(file, NULL);
    RFT_END();
}
