/* hip_ahead.c: steps that begin before the host knows their token, on an emulated GPU: tokens, lengths and errors are those
 * of a device that does not draw, where no step runs ahead. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include "hip_emu.h"
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <pthread.h>

/* ---- a device whose calls are watched ---- */

enum { RUN_AHEAD, WAIT, DRAW, READ, N_CALLS };
static const rf_device_api *real;
static rf_device_api watched, plain; /* plain: it does not draw */
static uint32_t n_ahead, n_runs;     /* steps that ran ahead; all */
static int fails_in[N_CALLS];        /* that many calls work before one fails; -1: none fails */
static int fail_times = 1;           /* or so many in a row */
static uint32_t cancel_at;           /* rf_session_cancel while that run is submitted; 0: never */
static uint32_t cancel_wait;         /* and that wait                                           */
static rf_session *cancels;

static int fails(int call) {
    static int n_failed;
    if (fails_in[call] < 0) return 0;
    if (fails_in[call] > 0) return fails_in[call]--, 0;
    if (++n_failed >= fail_times) fails_in[call] = -1, n_failed = 0;
    return 1;
}
static rf_result failed(rf_error *err) { return rfi_fail(err, RF_ERR_DEVICE, 0, "the device does no more"); }

static rf_result watch_run(rf_prepared *p, rf_queue *q, uint32_t first, uint32_t last, const rf_step *step,
                           rf_ticket *ticket, rf_error *err) {
    const int ahead = first == 0 && step->n_chosen;
    n_runs += first == 0, n_ahead += ahead;
    if (first == 0 && n_runs == cancel_at) rf_session_cancel(cancels);
    if (ahead && fails(RUN_AHEAD)) return failed(err);
    return real->plan_run(p, q, first, last, step, ticket, err);
}
static rf_result watch_wait(const rf_ticket *ticket, uint32_t timeout_ms, rf_error *err) {
    if (cancel_wait && --cancel_wait == 0) rf_session_cancel(cancels);
    const rf_result r = real->ticket_wait(ticket, timeout_ms, err);
    return ticket->value && fails(WAIT) ? failed(err) : r;
}
static rf_result watch_draw(rf_queue *q, const rf_mem *mem, const rf_draw_batch *batch, rf_ticket *ticket, rf_error *err) {
    return fails(DRAW) ? failed(err) : real->draw(q, mem, batch, ticket, err);
}
static rf_result watch_read(rf_queue *q, const rf_mem *src, uint64_t at, void *dst, uint64_t n, rf_ticket *ticket, rf_error *err) {
    return fails(READ) ? failed(err) : real->mem_read(q, src, at, dst, n, ticket, err);
}

/* ---- models ---- */

typedef struct model {
    const char *name, *path; /* of a file; NULL: made */
    mg_options options;
    rf_session_desc session;
    int never;               /* 1: no step may run ahead */
} model;
enum { CUT = 32 }; /* tokens by which a sequence with windows can be cut; of 256 cells these leave one, or none */
enum { MIXTURE = 4 };
static const model models[] = {
    {"llama", NULL, {.type = MG_Q8_0, .n_layers = 1, .seed = 3}, {.n_ctx = 64}, 0},
    {"hybrid", "tests/family/falcon-h1.gguf", {0}, {.n_ctx = 64, .n_snapshots = 1}, 0},
    {"window", NULL, {.arch = "gemma3", .type = MG_Q8_0, .window = 224, .n_layers = 1, .seed = 9, .n_ctx = 512}, {.n_ctx = 300, .n_batch = CUT}, 0},
    {"tight window", NULL, {.arch = "gemma3", .type = MG_Q8_0, .window = 225, .n_layers = 1, .seed = 9, .n_ctx = 512}, {.n_ctx = 300, .n_batch = CUT}, 1},
    {"mixture", NULL, {.arch = "qwen3moe", .type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .n_layers = 1, .n_experts = 5, .n_used = 2, .seed = 5}, {.n_ctx = 64}, 0},
    {"recurrent", "tests/family/qwen35.gguf", {0}, {.n_ctx = 64}, 0},
};

static int open_model(rig *r, const model *m, const mg_buf *file, int ahead) {
    rf_session_desc sd = m->session;
    memset(r, 0, sizeof *r);
    if (!file && !m->path) mg_llama(&r->file, &m->options), file = &r->file;
    rf_result res = m->path && !file ? rf_gguf_open(m->path, NULL, &r->g, &r->err)
                                     : rf_gguf_open_memory(file->data, file->n, NULL, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open("hip:0", NULL, &r->d, &r->err);
    if (res == RF_OK) {
        plain = watched = *(real = r->d->api);
        watched.plan_run = watch_run, watched.ticket_wait = watch_wait, watched.draw = watch_draw, watched.mem_read = watch_read;
        plain.draw = NULL;
        for (int i = 0; i < N_CALLS; i++) fails_in[i] = -1;
        n_ahead = n_runs = cancel_at = 0;
        r->d->api = ahead ? &watched : &plain;
        res = rf_model_open(r->g, r->d, NULL, &r->m, &r->err);
    }
    if (res == RF_OK) res = rf_session_open(r->m, &sd, &r->s, &r->err);
    CHECK(res == RF_OK, "%s: %s", m->name, r->err.text);
    if (res == RF_OK) r->n_vocab = rf_model_get_info(r->m).n_vocab;
    return res == RF_OK;
}

/* Nothing is held any more. */
static void close_model(rig *r) {
    uint32_t left = 1;
    CHECK(!r->m || (rf_model_clear_device_cache(r->m, &left, NULL) == RF_OK && left == 0), "%u tensors are held", left);
    if (r->d) r->d->api = real;
    rig_close(r);
}

/* No step runs ahead, and none has left a state. */
static void check_settled(const rf_session *s) {
    CHECK(!s->ahead.runs && !s->ahead.holds && !s->m->store->ahead && s->m->store->share.n_active == 0, "a step is left");
    for (uint32_t i = 0; i < s->desc.n_seq_max * s->n_slots; i++)
        CHECK(s->snapshots[i].pos <= s->lengths[i / s->n_slots], "sequence %u has a state beyond its end", i / s->n_slots);
}

/* ---- what is said ---- */

enum { SAID = 400 };
typedef struct said {
    int32_t ids[SAID], held[SAID]; /* tokens given out; of the sequence in the end */
    uint32_t n, stop_at, cancel_at, n_parts;
    struct { rf_result code; int finish; uint32_t n_generated, length, cut; int32_t last; } part[8];
    char text[80], answer[SAID];   /* of the error; what was given out */
} said;
static rf_session *now;

static int on_token(int32_t token, void *user) {
    said *o = user;
    if (o->n < SAID) o->ids[o->n++] = token;
    if (o->n == o->cancel_at) rf_session_cancel(now);
    return o->n == o->stop_at;
}

static const int32_t *refill(const rf_session *s, uint32_t from) {
    static int32_t ids[SAID];
    memcpy(ids, s->tokens, s->desc.n_ctx * sizeof *ids);
    return ids + from;
}

static int on_piece(const rf_piece *piece, void *user) {
    said *o = user;
    const size_t n = strlen(o->answer);
    if (n + piece->text.len < sizeof o->answer) memcpy(o->answer + n, piece->text.data, piece->text.len);
    return 0;
}

/* One rf_generate, and what it leaves; behind it the sequence is cut by `cut` tokens. */
static rf_generate_result say(rig *r, said *o, rf_generate_desc d, uint32_t cut) {
    rf_generate_result result;
    uint32_t kept = 0;
    now = r->s, d.on_token = on_token, d.on_piece = on_piece, d.user = o;
    const rf_result code = rf_generate(r->s, &d, &result, &r->err);
    const uint32_t length = rf_session_length(r->s, 0), k = o->n_parts++ % 8;
    snprintf(o->text, sizeof o->text, "%s", code ? r->err.text : "");
    if (cut) CHECK(rf_session_truncate(r->s, 0, length - cut, &kept, &r->err) == RF_OK, "%s", r->err.text);
    if (cut && r->s->n_slots && kept < length - cut) /* which states are left may differ */
        CHECK(rf_session_forward(r->s, refill(r->s, kept), length - cut - kept, NULL, &r->err) == RF_OK, "%s", r->err.text);
    o->part[k].code = code, o->part[k].finish = (int)result.finish, o->part[k].n_generated = result.n_generated;
    o->part[k].length = length, o->part[k].last = result.last_token, o->part[k].cut = r->s->n_slots ? 0 : kept;
    memset(o->held, 0, sizeof o->held);
    memcpy(o->held, r->s->tokens, rf_session_length(r->s, 0) * sizeof *o->held);
    check_settled(r->s);
    return result;
}

static uint32_t prompt_of(const rig *r, int32_t *ids, uint32_t n) {
    mg_tokens(ids, n, r->n_vocab < 300 ? r->n_vocab : 300, 7);
    for (uint32_t i = 0; i < n; i++) ids[i] += ids[i] < 4 ? 4 : 0; /* no end */
    return n;
}

/* ---- tests ---- */

enum { N_PROMPT = 6, N_TOKENS = 9 };

/* rf_generate as a loop of rf_session_forward and rf_session_sample. */
static void test_loop(void) {
    static const rf_logit_bias bias[] = {{40, 2}, {41, -3}, {42, -INFINITY}};
    static const rf_sampler_desc descs[] = {
        {0}, {.temperature = 1, .seed = 1}, {.temperature = 0.9f, .top_k = 20, .top_p = 0.9f, .min_p = 0.02f, .seed = 2},
        {.temperature = 1.5f, .repeat_penalty = 1.2f, .frequency_penalty = 0.3f, .presence_penalty = 0.2f, .penalty_last_n = 20, .seed = 3},
        {.repeat_penalty = 1.3f, .penalty_last_n = 16}, {.bias = bias, .n_bias = 3}, {.temperature = 1, .bias = bias, .n_bias = 3, .seed = 4},
        {.temperature = 1, .dry_multiplier = 0.8f, .seed = 5}, {.temperature = 1, .mirostat = 2, .seed = 6}};
    for (size_t m = 0; m < RFT_COUNT(models); m++)
        for (size_t k = 0; k < RFT_COUNT(descs); k++) {
            rig r;
            int32_t ids[N_PROMPT], want[N_TOKENS], token = -1;
            if (m && k % 3 != (m >= MIXTURE)) continue;
            if (!open_model(&r, &models[m], NULL, 1)) continue;
            prompt_of(&r, ids, N_PROMPT);
            rf_sampler a, b;
            CHECK(rf_sampler_init(&a, &descs[k], NULL) == RF_OK && rf_sampler_init(&b, &descs[k], NULL) == RF_OK);
            for (uint32_t i = 0; i < N_PROMPT; i++) rf_sampler_accept(&b, ids[i]);
            for (uint32_t i = 0; i < N_TOKENS; i++) {
                CHECK(rf_session_forward(r.s, i ? &token : ids, i ? 1 : N_PROMPT, NULL, &r.err) == RF_OK &&
                      rf_session_sample(r.s, 0, &b, &token, &r.err) == RF_OK, "%s", r.err.text);
                want[i] = token;
            }
            uint32_t n = 0;
            const rf_tokenizer *t = NULL;
            rf_model_get_tokenizer(r.m, &t, NULL);
            while (n < N_TOKENS && !rf_token_is_end(t, want[n++])) {}
            CHECK(n_ahead == 0 && rf_session_truncate(r.s, 0, 0, NULL, NULL) == RF_OK);
            static said o;
            memset(&o, 0, sizeof o);
            say(&r, &o, (rf_generate_desc){.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS, .sampler = &a}, 0);
            CHECK(o.n == n && memcmp(o.ids, want, n * sizeof *want) == 0, "%s, sampler %zu: other tokens", models[m].name, k);
            const int may = k < 7 && !models[m].never;
            CHECK(may ? n_ahead >= n - 1 && n_ahead <= n : n_ahead == 0, "%s, sampler %zu: %u of %u steps ran ahead", models[m].name, k, n_ahead, n);
            CHECK(memcmp(a.rng, b.rng, sizeof a.rng) == 0 || n < N_TOKENS, "other random numbers");
            close_model(&r);
        }
}

/* How a text ends. */
enum { LENGTH, END, STOP, TOKEN, CANCEL, BEFORE, CONTEXT, GRAMMAR, N_ENDS };
static const char *const ends[] = {"length", "end token", "stop text", "on_token", "rf_session_cancel", "cancelled before", "context", "grammar"};

static void tell(rig *r, int how, int hot, const char *stop, said *o) {
    static const rf_logit_bias no_end = {2, -100}, to_end = {2, 4};
    int32_t ids[N_PROMPT];
    prompt_of(r, ids, N_PROMPT);
    rf_sampler_desc sd = {.temperature = hot ? 1.0f : 0, .seed = 3, .bias = how == END ? &to_end : &no_end, .n_bias = 1};
    rf_sampler sampler;
    rf_grammar *grammar = NULL;
    memset(o, 0, sizeof *o);
    CHECK(rf_sampler_init(&sampler, &sd, NULL) == RF_OK);
    if (how == GRAMMAR) {
        const rf_tokenizer *t = NULL;
        rf_model_get_tokenizer(r->m, &t, NULL);
        CHECK(rf_grammar_open(t, RF_GRAMMAR_GBNF, rf_string_of("root ::= [a-z ]+"), NULL, &grammar, &r->err) == RF_OK, "%s", r->err.text);
    }
    rf_generate_desc d = {.ids = ids, .n_ids = N_PROMPT, .max_tokens = how == END ? 40 : N_TOKENS, .sampler = &sampler,
                          .stop = &stop, .n_stop = how == STOP, .grammar = grammar};
    o->stop_at = how == TOKEN ? 6 : 0, o->cancel_at = how == CANCEL ? 5 : 0;
    if (how == BEFORE) rf_session_cancel(r->s);
    rf_generate_result result = say(r, o, d, 0);
    o->stop_at = o->cancel_at = 0;
    d.append = 1, d.n_ids = 1, d.max_tokens = 3, d.n_stop = 0;
    d.ids = result.last_token >= 0 ? &result.last_token : ids;
    say(r, o, d, how == BEFORE ? 0 : 1); /* goes on behind what it has said, and after a cut */
    d.ids = ids;
    say(r, o, d, 3);
    say(r, o, d, 0);
    CHECK(rf_grammar_close(grammar, NULL) == RF_OK);
}

/* A sequence that is nearly as long as it can be: two texts, the second up to the end of the context, and cuts behind them. */
static void tell_long(rig *r, said *o) {
    static const rf_logit_bias no_end = {2, -100};
    int32_t ids[SAID];
    rf_sampler sampler;
    memset(o, 0, sizeof *o);
    CHECK(rf_sampler_init(&sampler, &(rf_sampler_desc){.temperature = 1, .seed = 3, .bias = &no_end, .n_bias = 1}, NULL) == RF_OK);
    rf_generate_desc d = {.ids = ids, .n_ids = r->s->desc.n_ctx - 25, .max_tokens = 9, .sampler = &sampler};
    prompt_of(r, ids, d.n_ids);
    rf_generate_result result = say(r, o, d, CUT);
    CHECK(rf_session_length(r->s, 0) > 0, "it cannot be cut");
    d.append = 1, d.n_ids = 1, d.max_tokens = 0, d.ids = &result.last_token;
    result = say(r, o, d, 2);
    CHECK(result.finish == RF_FINISH_CONTEXT, "it ended by %d", (int)result.finish);
    say(r, o, d, 0);
}

static void same(const said *o, const char *name, const char *what) {
    CHECK(o[0].n == o[1].n && memcmp(o[0].ids, o[1].ids, sizeof o[0].ids) == 0 && strcmp(o[0].answer, o[1].answer) == 0,
          "%s, %s: other tokens", name, what);
    for (uint32_t k = 0; k < o[0].n_parts; k++)
        CHECK(memcmp(&o[0].part[k], &o[1].part[k], sizeof o[0].part[k]) == 0,
              "%s, %s, part %u: %d %d, %u tokens, length %u, cut to %u, last %d; ahead %d %d, %u, %u, %u, %d", name, what, k,
              o[0].part[k].code, o[0].part[k].finish, o[0].part[k].n_generated, o[0].part[k].length, o[0].part[k].cut, o[0].part[k].last,
              o[1].part[k].code, o[1].part[k].finish, o[1].part[k].n_generated, o[1].part[k].length, o[1].part[k].cut, o[1].part[k].last);
    CHECK(memcmp(o[0].held, o[1].held, sizeof o[0].held) == 0, "%s, %s: other tokens are held", name, what);
}

/* hot: the device draws. */
static void check_ends(const model *m, int hot) {
    static const int finish[] = {RF_FINISH_LENGTH, RF_FINISH_END, RF_FINISH_STOP, RF_FINISH_CANCELLED, RF_FINISH_CANCELLED, RF_FINISH_CANCELLED};
    static said o[2];
    char stop[4] = "";
    for (int how = 0; how < N_ENDS; how++) {
        if (m->session.n_batch == CUT ? how != CONTEXT : m->path && how >= BEFORE) continue;
        for (int ahead = 0; ahead < 2; ahead++) {
            rig r;
            if (!open_model(&r, m, NULL, ahead)) continue;
            if (how == CONTEXT) tell_long(&r, &o[ahead]);
            else tell(&r, how, hot, stop, &o[ahead]);
            if (how == LENGTH) snprintf(stop, sizeof stop, "%.3s", o[ahead].answer + 3);
            const int may = !m->never && how != GRAMMAR && how != BEFORE;
            CHECK(!ahead || !may || n_ahead > 3, "%s, %s: %u steps ran ahead", m->name, ends[how], n_ahead);
            close_model(&r);
        }
        same(o, m->name, ends[how]);
        if (how < CONTEXT && (how != END || hot))
            CHECK(o[1].part[0].finish == finish[how], "%s, %s: it ended by %d", m->name, ends[how], o[1].part[0].finish);
    }
}
static void test_ends(void) {
    for (size_t m = 0; m < MIXTURE; m++)
        for (int hot = m > 1; hot < 2; hot++) check_ends(&models[m], hot);
}

/* Say N_TOKENS, whatever fails or is cancelled: the parts are the whole text. Returns how often it did not go on. */
static uint32_t say_all(rig *r, const rf_sampler_desc *desc, said *o) {
    int32_t ids[N_PROMPT], next;
    uint32_t broken = 0;
    rf_sampler sampler;
    memset(o, 0, sizeof *o);
    prompt_of(r, ids, N_PROMPT);
    CHECK(rf_sampler_init(&sampler, desc, NULL) == RF_OK);
    rf_generate_desc d = {.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS, .sampler = &sampler};
    for (int tries = 0; o->n < N_TOKENS && tries < 20; tries++) {
        const rf_generate_result result = say(r, o, d, 0);
        const uint32_t length = rf_session_length(r->s, 0);
        CHECK(o->n == 0 || length + (result.last_token >= 0) == N_PROMPT + o->n, "%u tokens held, last %d, %u said: %s", length,
              result.last_token, o->n, o->text);
        broken += result.finish != RF_FINISH_LENGTH;
        d.max_tokens = N_TOKENS - o->n;
        if (length + (result.last_token >= 0) < N_PROMPT + 1) continue; /* the prompt has failed */
        d.append = 1, d.n_ids = 1, d.ids = &next, next = result.last_token;
        if (next >= 0) continue;
        next = r->s->tokens[length - 1]; /* once more, for its logits */
        uint32_t kept = 0;
        CHECK(rf_session_truncate(r->s, 0, length - 1, &kept, NULL) == RF_OK);
        if (kept == length - 1) continue;
        CHECK(rf_session_forward(r->s, (int32_t[SAID]){0}, 0, NULL, NULL) != RF_OK); /* nothing to do */
        static int32_t again[SAID];
        for (uint32_t i = 0; i < length; i++) again[i] = i < N_PROMPT ? ids[i] : o->ids[i - N_PROMPT];
        d.ids = again + kept, d.n_ids = length - kept;
    }
    return broken;
}

static const rf_sampler_desc greedy_one = {0}, hot_one = {.temperature = 1, .seed = 8, .top_p = 0.95f};

/* Calls of the device that fail, one by one, and then the runtime's below it; a cancel from elsewhere. */
static void test_failures(void) {
    for (size_t m = 0; m < 2; m++)
        for (int hot = 0; hot < 2; hot++) {
            const rf_sampler_desc desc = hot ? hot_one : greedy_one;
            static said want, got;
            uint32_t broken = 0;
            rig r;
            if (!open_model(&r, &models[m], NULL, 1)) continue;
            CHECK(say_all(&r, &desc, &want) == 0 && n_ahead == N_TOKENS - 1, "%u steps ran ahead: %s", n_ahead, want.text);
            rf_session_truncate(r.s, 0, 0, NULL, NULL);
            const uint64_t before = hip_emu_get_counts().calls;
            say_all(&r, &desc, &got);
            const uint64_t n_calls = hip_emu_get_counts().calls - before;
            for (int call = 0; call < N_CALLS + 1; call++)
                for (int at = 0; at < 8; at += at < 1 ? 1 : 4) {
                    if ((call == DRAW && !hot) || (call == READ && at > 1)) continue; /* read is what the last step leaves */
                    rf_session_truncate(r.s, 0, 0, NULL, NULL);
                    fail_times = call == N_CALLS ? 2 : 1; /* a token's read, and the step before it */
                    fails_in[call == N_CALLS ? WAIT : call] = at;
                    const uint32_t n = say_all(&r, &desc, &got);
                    fail_times = 1;
                    CHECK(call == RUN_AHEAD ? n == 0 : n >= 1, "%s: call %d fails after %d: %u breaks", models[m].name, call, at, n);
                    CHECK(memcmp(got.ids, want.ids, sizeof got.ids) == 0, "%s: call %d fails after %d: other tokens", models[m].name, call, at);
                    if (at > 1 && call != RUN_AHEAD) CHECK((got.part[0].last >= 0) == (call == N_CALLS), "%s: call %d fails: last %d", models[m].name, call, got.part[0].last);
                    for (int i = 0; i < N_CALLS; i++) CHECK(fails_in[i] == -1, "call %d of %d did not fail", i, call);
                }
            for (uint64_t n = 1; n <= n_calls; n += 1 + n_calls / 12) {
                rf_session_truncate(r.s, 0, 0, NULL, NULL);
                hip_emu_fail_call(n, 0);
                broken += say_all(&r, &desc, &got);
                hip_emu_fail_call(0, 0);
                CHECK(memcmp(got.ids, want.ids, sizeof got.ids) == 0, "%s: runtime call %d fails: other tokens", models[m].name, (int)n);
            }
            CHECK(broken > 2, "%u failures seen", broken);
            for (uint32_t at = 2; at < 18; at += 3) {
                rf_session_truncate(r.s, 0, 0, NULL, NULL);
                n_runs = 0, cancels = r.s;
                *(at % 2 ? &cancel_at : &cancel_wait) = at / 2;
                const uint32_t n = say_all(&r, &desc, &got);
                CHECK(n == 1 && memcmp(got.ids, want.ids, sizeof got.ids) == 0, "%s: cancelled in %s %u: %u breaks", models[m].name, at % 2 ? "run" : "wait", at / 2, n);
                cancel_at = cancel_wait = 0;
            }
            close_model(&r);
        }
}

/* Logits that are no numbers, of the prompt and of the fourth token: the error is that of a step that does not run ahead. */
static void test_no_numbers(void) {
    const model m = {"NaN", NULL, {.type = MG_Q8_0, .n_layers = 1, .use_embd = 1, .embd_type = MG_F32, .seed = 3}, {.n_ctx = 64}, 0};
    for (int hot = 0; hot < 2; hot++) {
        static said want, o[2];
        mg_buf file = {0};
        rf_tensor_info info;
        rig r;
        mg_llama(&file, &m.options);
        REQUIRE(open_model(&r, &m, &file, 0));
        say_all(&r, hot ? &hot_one : &greedy_one, &want);
        CHECK(rf_gguf_find_tensor(r.g, "token_embd.weight", &info, NULL) == RF_OK);
        int32_t ids[N_PROMPT];
        prompt_of(&r, ids, N_PROMPT);
        close_model(&r);
        for (int of = 0; of < 2; of++) {
            mg_buf bad = mg_copy(&file);
            const uint64_t row = (uint64_t)(of ? want.ids[3] : ids[N_PROMPT - 1]);
            for (uint64_t i = 0; i < 64; i++) mg_set_u32(&bad, info.offset_bytes + (row * 64 + i) * 4, 0x7fc00000u);
            for (int ahead = 0; ahead < 2; ahead++) {
                rf_sampler sampler;
                memset(&o[ahead], 0, sizeof o[ahead]);
                rf_sampler_init(&sampler, hot ? &hot_one : &greedy_one, NULL);
                REQUIRE(open_model(&r, &m, &bad, ahead));
                say(&r, &o[ahead], (rf_generate_desc){.ids = ids, .n_ids = N_PROMPT, .max_tokens = N_TOKENS, .sampler = &sampler}, 0);
                close_model(&r);
            }
            CHECK(o[1].n <= 4 && o[1].part[0].code == RF_ERR_ARGUMENT && strstr(o[1].text, "none of 320 logits"), "%u tokens: %s", o[1].n, o[1].text);
            CHECK(memcmp(&o[0], &o[1], sizeof o[0]) == 0, "'%s' after %u tokens, length %u; ahead '%s', %u, %u", o[0].text, o[0].n, o[0].part[0].length,
                  o[1].text, o[1].n, o[1].part[0].length);
            mg_free(&bad);
        }
        mg_free(&file);
    }
}

/* ---- requests of a scheduler ---- */

enum { N_REQUESTS = 8, MOST = 20, N_SEQ = 8, ENDED = 4 };
typedef struct request {
    rf_sampler_desc sampler;
    uint32_t n_prompt, max_tokens, stop_at; /* stop_at: on_token ends it with that token; 0: never */
    uint32_t joins, leaves;                 /* the steps before which it is submitted, cancelled; 0: never cancelled */
} request;
static const rf_logit_bias never_ends = {2, -100}, ends_soon = {2, 4};
static const request requests[N_REQUESTS] = {
    {{0}, 5, 14, 0, 0, 0},
    {{.temperature = 1, .seed = 1, .bias = &never_ends, .n_bias = 1}, 9, 18, 0, 0, 0},
    {{.temperature = 0.9f, .top_k = 20, .top_p = 0.9f, .seed = 2, .bias = &ends_soon, .n_bias = 1}, 4, 0, 0, 0, 0},
    {{.repeat_penalty = 1.3f, .frequency_penalty = 0.2f}, 12, 6, 0, 3, 0},
    {{.temperature = 1, .seed = 3, .bias = &never_ends, .n_bias = 1}, 6, 0, 5, 6, 0},
    {{.temperature = 1.2f, .seed = 4, .presence_penalty = 0.4f, .bias = &never_ends, .n_bias = 1}, 3, 0, 0, 7, 12},
    {{.temperature = 1, .seed = 5, .bias = &never_ends, .n_bias = 1}, 8, 1, 0, 8, 0},
    {{.temperature = 1, .seed = 6, .bias = &never_ends, .n_bias = 1}, 0, 4, 0, 13, 0}}; /* goes on where ENDED has ended */

typedef struct told {
    int32_t prompt[32], ids[MOST];
    uint32_t n_prompt, n, stop_at, n_ends;
    rf_result reason;
    rf_sampler sampler;
} told;
static int on_told(int32_t token, void *user) {
    told *o = user;
    if (o->n < MOST) o->ids[o->n++] = token;
    return o->n == o->stop_at || o->n == MOST;
}
static void on_end(rf_result reason, void *user) {
    told *o = user;
    o->reason = reason, o->n_ends++;
}
static void submit(rig *r, rf_scheduler *sch, uint32_t i, told *o) {
    memset(o, 0, sizeof *o);
    o->n_prompt = requests[i].n_prompt;
    if (!o->n_prompt) {
        const told *ended = o - i + ENDED;
        memcpy(o->prompt, ended->prompt, sizeof o->prompt), memcpy(o->prompt + ended->n_prompt, ended->ids, ended->n * sizeof *ended->ids);
        o->n_prompt = ended->n_prompt + ended->n;
        for (uint32_t k = 0; k < 3; k++) o->prompt[o->n_prompt++] = (int32_t)(5 + k);
    }
    if (requests[i].n_prompt) mg_tokens(o->prompt, o->n_prompt, r->n_vocab < 300 ? r->n_vocab : 300, 20 + i);
    o->stop_at = requests[i].stop_at;
    CHECK(rf_sampler_init(&o->sampler, &requests[i].sampler, NULL) == RF_OK);
    const rf_request request = {.prompt = o->prompt, .n_prompt = o->n_prompt, .max_tokens = requests[i].max_tokens, .sampler = &o->sampler,
                                .on_token = on_told, .on_end = on_end, .user = o};
    CHECK(rf_scheduler_submit(sch, &request, &r->err) == RF_OK, "%s", r->err.text);
}

static rf_scheduler *open_scheduler(rig *r) {
    const rf_tokenizer *t = NULL;
    rf_scheduler *sch = NULL;
    CHECK(rf_model_get_tokenizer(r->m, &t, NULL) == RF_OK && rf_scheduler_open(r->s, t, N_REQUESTS, &sch, &r->err) == RF_OK, "%s", r->err.text);
    return sch;
}
static int open_served(rig *r, const model *m, int ahead) {
    model served = *m;
    served.session.n_seq_max = N_SEQ, served.session.n_batch = served.session.n_logits_max = 16;
    return open_model(r, &served, NULL, ahead);
}

/* Each alone, where nothing runs ahead. */
static void tell_alone(const model *m, told *want) {
    rig r;
    if (!open_served(&r, m, 0)) return;
    rf_scheduler *sch = open_scheduler(&r);
    for (uint32_t i = 0, n = 1; sch && i < N_REQUESTS; i++, n = 1) {
        submit(&r, sch, i, &want[i]);
        while (n) REQUIRE(rf_scheduler_step(sch, &n, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(want[i].n_ends == 1 && want[i].reason == RF_OK && want[i].n > 0, "request %u", i);
    }
    CHECK(rf_scheduler_close(sch, NULL) == RF_OK && n_ahead == 0);
    close_model(&r);
}

/* The scheduler and its session know of the same tokens, and nothing is left where a request has ended. */
static void check_sequences(const rf_scheduler *sch) {
    const rf_session *s = sch->session;
    for (uint32_t i = 0; i < sch->n_running; i++)
        CHECK(sch->slots[i].n_held == s->lengths[sch->slots[i].seq], "request %u holds %u tokens", i, sch->slots[i].n_held);
    for (uint32_t i = 0; i < s->desc.n_seq_max * s->n_slots; i++)
        CHECK(sch->used[i / s->n_slots] == RFI_SEQ_RUNS || s->snapshots[i].pos <= s->lengths[i / s->n_slots], "a state is left");
}

/* All, which join and leave. cancels_each: rf_session_cancel before each so-manieth step. Returns the steps. */
static uint32_t tell_together(rig *r, rf_scheduler *sch, told *got, uint32_t cancels_each, uint32_t *n_failed) {
    uint32_t step = 0, left = N_REQUESTS, n = 0, until = cancels_each;
    for (int again = 0; (left || n) && step < 200; step += !again) {
        for (uint32_t i = 0; i < N_REQUESTS && !again; i++) {
            if (requests[i].joins == step) submit(r, sch, i, &got[i]), left--, n++;
            if (requests[i].leaves && requests[i].leaves == step) CHECK(rf_scheduler_cancel(sch, &got[i], &r->err) == RF_OK);
        }
        again = until && n && --until == 0;
        if (again) rf_session_cancel(r->s), until = cancels_each;
        const rf_result res = rf_scheduler_step(sch, &n, &r->err);
        CHECK(res == (again ? RF_ERR_CANCELLED : RF_OK) || (n_failed && res == RF_ERR_DEVICE), "step %u: %s: %s", step, rf_result_name(res), r->err.text);
        if (n_failed) *n_failed += res != RF_OK;
        check_sequences(sch);
    }
    return step;
}

/* A request's tokens are a prefix of those alone, all of them if it ended by itself, and some sequence holds them but the last. */
static void compare(const rig *r, const model *m, const told *want, const told *got, const char *what) {
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        const told *w = &want[i], *o = &got[i];
        const uint32_t n_prompt = o->n_prompt;
        CHECK(o->n_ends == 1, "%s, %s: request %u ended %u times", m->name, what, i, o->n_ends);
        if (requests[i].n_prompt == 0 && got[ENDED].reason != RF_OK) continue; /* another prompt */
        CHECK(o->n <= w->n && memcmp(o->ids, w->ids, o->n * sizeof *o->ids) == 0, "%s, %s: request %u: other tokens", m->name, what, i);
        if (o->reason != RF_OK) continue;
        CHECK(o->n == w->n && memcmp(o->sampler.rng, w->sampler.rng, sizeof w->sampler.rng) == 0, "%s, %s: request %u: %u of %u tokens", m->name, what, i, o->n, w->n);
        int found = i == ENDED; /* another one goes on there */
        for (uint32_t seq = 0; r && seq < N_SEQ; seq++) {
            const int32_t *tokens = r->s->tokens + (size_t)seq * r->s->desc.n_ctx;
            found |= r->s->lengths[seq] == n_prompt + o->n - 1 && memcmp(tokens, o->prompt, n_prompt * sizeof *tokens) == 0 &&
                     memcmp(tokens + n_prompt, o->ids, (o->n - 1) * sizeof *tokens) == 0;
        }
        CHECK(!r || found, "%s, %s: request %u: no sequence holds its tokens", m->name, what, i);
    }
}

static void test_scheduler(void) {
    static told want[N_REQUESTS], got[N_REQUESTS];
    for (size_t m = 0; m < 2; m++) {
        rig r;
        tell_alone(&models[m], want);
        for (uint32_t cancels_each = 0; cancels_each < 5; cancels_each += 4) {
            if (!open_served(&r, &models[m], 1)) continue;
            rf_scheduler *sch = open_scheduler(&r);
            const uint32_t n_steps = tell_together(&r, sch, got, cancels_each, NULL);
            compare(&r, &models[m], want, got, cancels_each ? "cancelled" : "together");
            CHECK(got[5].reason == RF_ERR_CANCELLED && got[5].n > 2, "it was not cancelled");
            if (!cancels_each) printf("    %s: %u of %u steps ran ahead\n", models[m].name, n_ahead, n_steps);
            CHECK(cancels_each || n_ahead * 10 > n_steps * 6, "%s: %u of %u steps ran ahead", models[m].name, n_ahead, n_steps);
            check_settled(r.s);
            submit(&r, sch, 1, &got[1]), submit(&r, sch, 0, &got[0]); /* closed while a step runs ahead */
            for (int i = 0; i < 4; i++) CHECK(rf_scheduler_step(sch, NULL, &r.err) == RF_OK, "%s", r.err.text);
            CHECK(r.s->ahead.runs == 1 && rf_scheduler_close(sch, NULL) == RF_OK && got[0].reason == RF_ERR_CANCELLED);
            check_settled(r.s);
            close_model(&r);
        }
    }
}

/* A step that fails ends those that run; the sequences are what they say, and serve the same requests again. */
static void test_scheduler_failures(void) {
    static told want[N_REQUESTS], got[N_REQUESTS];
    for (size_t m = 0; m < 2; m++) {
        rig r;
        uint32_t all_failed = 0;
        tell_alone(&models[m], want);
        if (!open_served(&r, &models[m], 1)) continue;
        rf_scheduler *sch = open_scheduler(&r);
        for (int call = 0; call < N_CALLS + 1; call++) /* one call, or two waits */
            for (int at = m ? 3 : 1; at < 12; at += m ? 7 : 5) {
                uint32_t n_failed = 0;
                fail_times = call == N_CALLS ? 2 : 1;
                fails_in[call == N_CALLS ? WAIT : call] = at;
                tell_together(&r, sch, got, 0, &n_failed);
                fail_times = 1;
                for (int i = 0; i < N_CALLS; fails_in[i++] = -1) CHECK(fails_in[i] == -1 || m, "call %d did not fail", i);
                all_failed += n_failed;
                compare(NULL, &models[m], want, got, "a failure");
                CHECK(call != RUN_AHEAD || n_failed == 0, "%u failed", n_failed);
                check_settled(r.s);
                for (uint32_t i = 0; i < N_REQUESTS; i++) /* the sequences of a failed step hold what they held */
                    for (uint32_t seq = 0; seq < N_SEQ; seq++) CHECK(r.s->lengths[seq] < got[i].n_prompt + MOST + 20, "too long");
                tell_together(&r, sch, got, 0, NULL);
                compare(&r, &models[m], want, got, "after a failure");
            }
        CHECK(all_failed > 2, "%u failures seen", all_failed);
        CHECK(rf_scheduler_close(sch, NULL) == RF_OK);
        close_model(&r);
    }
}

/* More requests than a step that runs ahead may have rows, whose bits may differ: none runs ahead. */
static void test_many_requests(void) {
    enum { MANY = RFI_AHEAD_ROWS + 1 };
    static told got[MANY];
    rig r;
    uint32_t n = 1;
    model m = models[0];
    m.session.n_seq_max = m.session.n_logits_max = m.session.n_batch = MANY;
    REQUIRE(open_model(&r, &m, NULL, 1));
    const rf_tokenizer *t = NULL;
    rf_scheduler *sch = NULL;
    CHECK(rf_model_get_tokenizer(r.m, &t, NULL) == RF_OK && rf_scheduler_open(r.s, t, MANY, &sch, &r.err) == RF_OK, "%s", r.err.text);
    for (uint32_t i = 0; i < MANY; i++) submit(&r, sch, i ? 1 : 6, &got[i]); /* the first one wants one token */
    for (uint32_t i = 1; i < MANY; i++) got[i].stop_at = 4 + i % 3;
    uint32_t before = 0;
    while (n) {
        const uint32_t n_ran = n_ahead;
        CHECK(rf_scheduler_step(sch, &n, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(n <= RFI_AHEAD_ROWS || n_ahead == n_ran, "%u rows ran ahead", n);
        before = n_ahead;
    }
    CHECK(before > 2, "%u steps ran ahead", before);
    for (uint32_t i = 1; i < MANY; i++) CHECK(got[i].reason == RF_OK && memcmp(got[i].ids, got[1].ids, 4 * sizeof *got[i].ids) == 0, "request %u", i);
    CHECK(rf_scheduler_close(sch, NULL) == RF_OK);
    close_model(&r);
}

/* ---- two models that have room for one ---- */

static rig shared[2];
static _Atomic uint32_t n_said;
static int asks; /* 1: the callback has the other model write */

static rf_result write_one(rig *r, uint32_t n, int (*fn)(int32_t, void *)) {
    int32_t ids[N_PROMPT];
    static const rf_logit_bias no_end = {2, -100};
    rf_sampler sampler;
    rf_sampler_init(&sampler, &(rf_sampler_desc){.temperature = 1, .bias = &no_end, .n_bias = 1}, NULL);
    prompt_of(r, ids, N_PROMPT);
    return rf_generate(r->s, &(rf_generate_desc){.ids = ids, .n_ids = N_PROMPT, .max_tokens = n, .sampler = &sampler, .on_token = fn}, NULL, &r->err);
}
static int on_said(int32_t token, void *user) {
    (void)token, (void)user;
    if (atomic_fetch_add(&n_said, 1) == 5 && asks) CHECK(write_one(&shared[1], 3, NULL) == RF_OK, "%s", shared[1].err.text);
    return 0;
}
static void *write_long(void *arg) {
    CHECK(write_one(arg, 200, on_said) == RF_OK, "%s", shared[0].err.text);
    return NULL;
}

static void test_shared_budget(void) {
    const model m = {"shared", NULL, {.type = MG_Q8_0, .n_layers = 1, .seed = 3}, {.n_ctx = 240, .n_seq_max = 2}, 0};
    rf_device_desc dd = {0};
    rf_device *d = NULL;
    for (int i = 0; i < 2; i++) {
        REQUIRE(open_model(&shared[i], &m, NULL, 1));
        dd.budget_bytes = rf_model_get_info(shared[i].m).weight_bytes * 3 / 2;
        rf_session_close(shared[i].s, NULL), rf_model_close(shared[i].m, NULL), rf_device_close(shared[i].d, NULL);
        shared[i].s = NULL, shared[i].m = NULL, shared[i].d = NULL;
    }
    REQUIRE(rf_device_open("hip:0", &dd, &d, NULL) == RF_OK);
    d->api = &watched;
    for (int i = 0; i < 2; i++)
        REQUIRE(rf_model_open(shared[i].g, d, NULL, &shared[i].m, &shared[i].err) == RF_OK &&
                rf_session_open(shared[i].m, &m.session, &shared[i].s, &shared[i].err) == RF_OK, "%s", shared[i].err.text);
    asks = 1;
    n_ahead = 0;
    CHECK(write_one(&shared[0], 20, on_said) == RF_OK && n_ahead > 12, "%u steps ran ahead: %s", n_ahead, shared[0].err.text);
    asks = 0;
    atomic_store(&n_said, 0);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, write_long, &shared[0]) == 0);
    while (atomic_load(&n_said) < 5) {}
    CHECK(write_one(&shared[1], 3, NULL) == RF_OK, "%s", shared[1].err.text);
    CHECK(atomic_load(&n_said) < 150, "it waited for %u tokens", atomic_load(&n_said));
    pthread_join(thread, NULL);
    static told got[2]; /* between two steps of a scheduler, one of which runs ahead */
    uint32_t left = 1;
    rf_scheduler *sch = open_scheduler(&shared[0]);
    submit(&shared[0], sch, 1, &got[0]), submit(&shared[0], sch, 2, &got[1]);
    for (uint32_t i = 0, n = 1; n; i++) {
        CHECK(rf_scheduler_step(sch, &n, &shared[0].err) == RF_OK, "%s", shared[0].err.text);
        if (i == 4) CHECK(shared[0].s->ahead.runs && write_one(&shared[1], 3, NULL) == RF_OK && shared[0].s->ahead.runs, "%s", shared[1].err.text);
        if (i == 6) CHECK(rf_model_clear_device_cache(shared[0].m, &left, NULL) == RF_OK && left == 0, "%u tensors are held", left);
    }
    CHECK(got[0].reason == RF_OK && got[0].n == requests[1].max_tokens && got[1].reason == RF_OK);
    CHECK(rf_scheduler_close(sch, NULL) == RF_OK);
    d->api = real;
    for (int i = 0; i < 2; i++) {
        rf_session_close(shared[i].s, NULL), rf_model_close(shared[i].m, NULL);
        shared[i].s = NULL, shared[i].m = NULL;
        rig_close(&shared[i]);
    }
    CHECK(rf_device_close(d, NULL) == RF_OK);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    const hip_emu_counts before = hip_emu_get_counts();
    hip_emu_trusted_graphs(0); /* replays are checked */
    RUN_SLOW(test_loop);
    hip_emu_trusted_graphs(1);
    RUN(test_loop);
    RUN_SLOW(test_ends);
    RUN_SLOW(test_failures);
    RUN(test_no_numbers);
    RUN_SLOW(test_scheduler);
    RUN_SLOW(test_scheduler_failures);
    RUN(test_many_requests);
    RUN_SLOW(test_shared_budget);
    const hip_emu_counts after = hip_emu_get_counts();
    if (before.allocations != after.allocations || before.host_allocations != after.host_allocations || before.events != after.events ||
        before.streams != after.streams) rft_failed++, puts("  FAIL something is left on the device");
    RFT_END();
}
