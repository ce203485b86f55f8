/* cc -O2 -I. -o test_generate tests/test_generate.c -lm -pthread && ./test_generate        from the repository root
 * rf_generate with the shipped model: the text is what a loop of rf_session_forward gives; stop texts, limits, chats whose model is
 * made to write given tokens, what is kept from turn to turn, and a context that is full. */
#include "rocmforge.h"
#include <math.h>
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

#define MODEL "examples/shakespeare-5m.gguf"

static rig r;
static const rf_tokenizer *tokenizer;

/* ---- what is given out ---- */

typedef struct record {
    char text[3][4096]; /* by rf_piece_kind; calls as "name arguments;" */
    size_t n[3];
    int n_pieces, stop_at, cancel_at;
    int32_t ids[1024];
    uint32_t n_ids;
} record;
static record out;

static int on_piece(const rf_piece *p, void *user) {
    record *o = user;
    const rf_string parts[4] = {p->name, {" ", p->kind == RF_PIECE_CALL}, p->text, {";", p->kind == RF_PIECE_CALL}};
    CHECK(p->text.len > 0, "an empty piece");
    for (int i = 0; i < 4; i++) {
        CHECK(o->n[p->kind] + parts[i].len < sizeof o->text[0]);
        if (parts[i].len) memcpy(o->text[p->kind] + o->n[p->kind], parts[i].data, parts[i].len);
        o->n[p->kind] += parts[i].len;
    }
    if (++o->n_pieces == o->cancel_at) rf_session_cancel(r.s);
    return o->n_pieces == o->stop_at;
}
static int on_token(int32_t token, void *user) {
    record *o = user;
    if (o->n_ids < 1024) o->ids[o->n_ids] = token;
    o->n_ids++;
    return 0;
}

static rf_result generate(rf_generate_desc d, rf_generate_result *result) {
    const record empty = {.stop_at = out.stop_at, .cancel_at = out.cancel_at};
    out = empty;
    d.on_piece = on_piece, d.on_token = on_token, d.user = &out;
    return rf_generate(r.s, &d, result, &r.err);
}
static const char *answer(void) { return out.text[RF_PIECE_ANSWER]; }

/* ---- a model that writes what it is told to ---- */

typedef struct script {
    int32_t ids[512];
    uint32_t n, at;
} script;
static rf_result follow(float *logits, uint32_t n_vocab, void *user) {
    script *s = user;
    for (uint32_t i = 0; i < n_vocab; i++) logits[i] = -INFINITY;
    logits[s->at < s->n ? s->ids[s->at] : rf_tokenizer_get_info(tokenizer).eos] = 0;
    s->at++;
    return RF_OK;
}
static rf_sampler scripted(script *s) {
    rf_sampler sampler;
    CHECK(rf_sampler_init(&sampler, &(rf_sampler_desc){.logits_fn = follow, .logits_user = s}, NULL) == RF_OK);
    return sampler;
}
/* The text as the tokenizer cuts it, or each character by itself. */
static script script_of(const char *text, int by_character) {
    script s = {.n = 0};
    uint32_t n = 0;
    if (!by_character) CHECK(rf_tokenize(tokenizer, rf_string_of(text), 0, s.ids, 512, &s.n, NULL) == RF_OK);
    for (; by_character && *text; text++, s.n += n)
        CHECK(rf_tokenize(tokenizer, (rf_string){text, 1}, 0, s.ids + s.n, 512 - s.n, &n, NULL) == RF_OK && n == 1);
    return s;
}

static int open_session(uint32_t n_ctx, uint32_t n_seq_max) {
    rig_close(&r);
    const rf_session_desc sd = {.n_ctx = n_ctx, .n_seq_max = n_seq_max};
    if (!rig_open(&r, &(rig_how){.path = MODEL, .session = &sd})) return 0;
    memset(&out, 0, sizeof out);
    return rf_model_get_tokenizer(r.m, &tokenizer, NULL) == RF_OK;
}

/* ---- prompts ---- */

/* Greedy, by hand. */
static uint32_t by_hand(const char *prompt, uint32_t max, char *text, int32_t *chosen) {
    int32_t ids[256];
    uint32_t n = 0, made = 0;
    size_t len = 0, more = 0;
    rf_detokenizer state = {.tokenizer = tokenizer, .started = 1};
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    rf_tokenize(tokenizer, rf_string_of(prompt), RF_TOKENIZE_ADD, ids, 256, &n, NULL);
    for (; made < max; n = 1) {
        if (rf_session_forward(r.s, ids, n, NULL, NULL)) break;
        chosen[made++] = ids[0] = rft_argmax(r.s, 0);
        if (rf_token_is_end(tokenizer, ids[0])) break;
        rf_detokenize(&state, ids[0], 0, text + len, 200, &more, NULL);
        len += more;
    }
    text[len] = 0;
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    return made;
}

static void test_prompt(void) {
    static char want[8192];
    int32_t chosen[100];
    rf_generate_result result;
    REQUIRE(open_session(512, 2));
    const uint32_t n = by_hand("ROMEO:\n", 60, want, chosen);
    for (int32_t seq = 0; seq < 2; seq++)
        for (int again = 0; again < 2; again++) {
            rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 60, .seq = seq};
            CHECK(generate(d, &result) == RF_OK, "%s", r.err.text);
            CHECK(strcmp(answer(), want) == 0 && out.n_ids == n && memcmp(out.ids, chosen, n * sizeof *chosen) == 0,
                  "sequence %d: '%s', by hand '%s'", seq, answer(), want);
            CHECK(result.finish == RF_FINISH_LENGTH && result.n_generated == 60 && result.last_token == chosen[59]);
            CHECK(again ? result.n_reused == result.n_prompt - 1 : result.n_reused == 0, "%u of %u", result.n_reused,
                  result.n_prompt);
        }
    CHECK(rf_session_length(r.s, 0) == result.n_prompt + 59 && rf_session_length(r.s, 1) == rf_session_length(r.s, 0));

    /* In two parts, the second of which goes on where the first ended. */
    char first[4096];
    CHECK(generate((rf_generate_desc){.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 25}, &result) == RF_OK);
    snprintf(first, sizeof first, "%s", answer());
    rf_generate_desc more = {.ids = &result.last_token, .n_ids = 1, .append = 1, .max_tokens = 35};
    CHECK(generate(more, NULL) == RF_OK, "%s", r.err.text);
    CHECK(strncmp(first, want, strlen(first)) == 0 && strcmp(answer(), want + strlen(first)) == 0, "'%s' + '%s'", first, answer());
}

/* The text ends before the first stop text, and nothing of it is given out. */
static void test_stop(void) {
    static char want[8192];
    int32_t chosen[100];
    REQUIRE(open_session(512, 1));
    by_hand("ROMEO:\n", 25, want, chosen);
    const size_t n = strlen(want);
    for (size_t at = 1; at + 9 < n; at += 5)
        for (size_t len = 1; len < 9; len += 6) {
            char stop[16];
            snprintf(stop, sizeof stop, "%.*s", (int)len, want + at);
            const char *const stops[] = {"\001never", stop};
            rf_generate_result result;
            rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 25, .stop = stops, .n_stop = 2};
            CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_STOP && result.stop_index == 1, "%s", r.err.text);
            const size_t end = (size_t)(strstr(want, stop) - want);
            CHECK(out.n[0] == end && memcmp(answer(), want, end) == 0, "stop '%s': '%s'", stop, answer());
        }
    const char *const half[] = {"\003"};
    rf_generate_result result;
    rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 25, .stop = half, .n_stop = 1};
    CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_LENGTH && strcmp(answer(), want) == 0);
}

static void test_ends(void) {
    REQUIRE(open_session(64, 1));
    rf_generate_result result;
    rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n")};
    CHECK(generate(d, &result) == RF_OK && (result.finish == RF_FINISH_CONTEXT || result.finish == RF_FINISH_END));
    script s = script_of("Hello", 0);
    rf_sampler sampler = scripted(&s);
    d.sampler = &sampler;
    CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_END && strcmp(answer(), "Hello") == 0, "%s", answer());
    CHECK(result.n_generated == s.n + 1 && rf_token_is_end(tokenizer, result.last_token) && result.n_calls == 0);

    d.sampler = NULL, d.max_tokens = 20;
    out.stop_at = 3;
    CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_CANCELLED && out.n_pieces == 3);
    out.stop_at = 0, out.cancel_at = 4;
    CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_CANCELLED && out.n_pieces == 4 && result.last_token >= 0);
    rf_session_cancel(r.s); /* already while the prompt is tokenized */
    CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_CANCELLED && result.n_prompt == 0 && result.n_generated == 0);
    out.cancel_at = 0;
    CHECK(generate(d, &result) == RF_OK && result.finish == RF_FINISH_LENGTH, "after a cancelled one");

    char longer[2000];
    memset(longer, 'x', sizeof longer - 1), longer[sizeof longer - 1] = 0;
    const uint32_t held = rf_session_length(r.s, 0);
    CHECK(generate((rf_generate_desc){.prompt = rf_string_of(longer)}, &result) == RF_ERR_CONTEXT_FULL && r.err.text[0]);
    CHECK(rf_session_length(r.s, 0) == held, "a refused prompt changed the sequence");
}

/* ---- chats ---- */

static const char chatml[] = "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
                             "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", "
                             "\"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}\n{% endfor %}"
                             "{% if add_generation_prompt %}[assistant]{% endif %}";
static rf_chat_template *template_of(const char *source) {
    rf_chat_template *t = NULL;
    CHECK(rf_chat_template_open(rf_string_of(source), NULL, &t, &r.err) == RF_OK, "%s", r.err.text);
    return t;
}

static void test_chat(void) {
    REQUIRE(open_session(512, 1));
    rf_chat_template *t = template_of(chatml), *opens = template_of("{{ messages[0].content }}<think>\n");
    const rf_chat_message messages[] = {{.role = "user", .content = "Hi"}};
    rf_chat chat = {.chat_template = t, .messages = messages, .n_messages = 1};
    rf_generate_result result;
    script s = script_of("<think>hm</think>Let me see. <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>", 0);
    rf_sampler sampler = scripted(&s);
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler}, &result) == RF_OK, "%s", r.err.text);
    CHECK(result.finish == RF_FINISH_CALL && result.n_calls == 1 && strcmp(out.text[RF_PIECE_THOUGHT], "hm") == 0 &&
          strcmp(answer(), "Let me see.") == 0 && strcmp(out.text[RF_PIECE_CALL], "f {\"a\": 1};") == 0,
          "'%s' '%s' '%s'", out.text[RF_PIECE_THOUGHT], answer(), out.text[RF_PIECE_CALL]);

    s = script_of("so</think>Well.", 0), sampler = scripted(&s);
    chat.chat_template = opens;
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler}, &result) == RF_OK, "%s", r.err.text);
    CHECK(result.finish == RF_FINISH_END && strcmp(out.text[RF_PIECE_THOUGHT], "so") == 0 && strcmp(answer(), "Well.") == 0,
          "'%s' '%s'", out.text[RF_PIECE_THOUGHT], answer());

    s = script_of("m</think>Yes", 0), sampler = scripted(&s);
    chat.chat_template = t, chat.prefill = "<think>h";
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler}, &result) == RF_OK, "%s", r.err.text);
    CHECK(strcmp(out.text[RF_PIECE_THOUGHT], "m") == 0 && strcmp(answer(), "Yes") == 0, "'%s' '%s'", out.text[RF_PIECE_THOUGHT],
          answer());
    rf_chat_template_close(t, NULL), rf_chat_template_close(opens, NULL);
}

/* The next turn keeps the tokens that the model wrote, however it cut its text; only new text is evaluated. */
static void test_kept(void) {
    static const char text[] = "Good morrow, cousin. What light is this?";
    for (int by_character = 0; by_character < 2; by_character++) {
        REQUIRE(open_session(512, 1));
        rf_chat_template *t = template_of(chatml);
        rf_chat_message messages[3] = {{.role = "user", .content = "Hi"}, {.role = "assistant", .content = text},
                                       {.role = "user", .content = "And then?"}};
        rf_chat chat = {.chat_template = t, .messages = messages, .n_messages = 1};
        rf_generate_result one, two;
        script s = script_of(text, by_character);
        rf_sampler sampler = scripted(&s);
        CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler}, &one) == RF_OK && strcmp(answer(), text) == 0);
        const uint32_t held = rf_session_length(r.s, 0);
        chat.n_messages = 3;
        CHECK(generate((rf_generate_desc){.chat = &chat, .max_tokens = 1}, &two) == RF_OK, "%s", r.err.text);
        CHECK(two.n_reused == held && held == one.n_prompt + s.n, "%u tokens held, %u reused", held, two.n_reused);
        /* The same tokens as a tokenizer would give, but for those of the answer. */
        int32_t fresh[512];
        uint32_t n_fresh = 0, kept = 0;
        chat.open_answer = 1;
        CHECK(rf_chat_tokenize(tokenizer, &chat, RF_TOKENIZE_ADD, fresh, 512, &n_fresh, NULL) == RF_OK);
        CHECK(two.n_prompt - n_fresh == (by_character ? s.n - script_of(text, 0).n : 0), "%u tokens, anew %u", two.n_prompt, n_fresh);
        CHECK(rf_session_sync(r.s, 0, fresh, n_fresh, &kept, NULL) == RF_OK);
        CHECK(by_character ? kept < held : kept + 1 == n_fresh, "%u of %u", kept, n_fresh);

        /* A changed answer is kept as far as it is the same. */
        messages[1].content = "Good morrow, friend.";
        CHECK(generate((rf_generate_desc){.chat = &chat, .max_tokens = 1}, &two) == RF_OK && two.n_reused < held);
        rf_chat_template_close(t, NULL);
    }
}

/* A long chat in a small context: with drop_turns it never ends, and the system message stays. */
static void test_full(void) {
    enum { TURNS = 16 };
    static char texts[2 * TURNS + 1][40];
    static rf_chat_message messages[2 * TURNS + 2];
    REQUIRE(open_session(128, 1));
    rf_chat_template *t = template_of(chatml);
    rf_chat chat = {.chat_template = t, .messages = messages, .n_messages = 1};
    rf_generate_result result = {.n_dropped = 0};
    messages[0] = (rf_chat_message){.role = "system", .content = "Be brief."};
    uint32_t dropped = 0, refused = 0, n_system = 0;
    int32_t system[64];
    CHECK(rf_tokenize(tokenizer, rf_string_of("[system]Be brief."), RF_TOKENIZE_ADD, system, 64, &n_system, NULL) == RF_OK);
    for (int turn = 0; turn < TURNS; turn++) {
        snprintf(texts[2 * turn], 40, "Question %d, my lord?", turn);
        messages[chat.n_messages++] = (rf_chat_message){.role = "user", .content = texts[2 * turn]};
        if (generate((rf_generate_desc){.chat = &chat, .max_tokens = 9}, &result) != RF_OK) {
            CHECK(r.err.code == RF_ERR_CONTEXT_FULL, "%s", r.err.text);
            refused++;
        }
        CHECK(generate((rf_generate_desc){.chat = &chat, .max_tokens = 9, .drop_turns = 1}, &result) == RF_OK, "turn %d: %s",
              turn, r.err.text);
        CHECK(result.finish == RF_FINISH_LENGTH || result.finish == RF_FINISH_END);
        CHECK(result.n_dropped < chat.n_messages - 1 && result.n_dropped >= dropped, "%u dropped of %u", result.n_dropped,
              chat.n_messages);
        dropped = result.n_dropped;
        uint32_t kept = 0;
        int32_t tokens[65];
        memcpy(tokens, system, n_system * sizeof *system), tokens[n_system] = 0;
        snprintf(texts[2 * turn + 1], 40, "%.38s", answer());
        CHECK(rf_session_sync(r.s, 0, tokens, n_system + 1, &kept, NULL) == RF_OK && kept == n_system, "%u of %u", kept, n_system);
        messages[chat.n_messages++] = (rf_chat_message){.role = "assistant", .content = texts[2 * turn + 1]};
    }
    CHECK(dropped > 10 && refused > 4, "%u messages dropped, %u refused without", dropped, refused);

    /* In the middle of an answer: it goes on behind what is left. */
    static char sentence[400];
    for (int i = 0; i < 90; i++) snprintf(sentence + 3 * i, 4, "%c %c", 'a' + i % 26, 'a' + (i + 7) % 26);
    script s = script_of(sentence, 1);
    s.n = 90;
    rf_sampler sampler = scripted(&s);
    chat.n_messages = 6;
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler, .drop_turns = 1}, &result) == RF_OK, "%s", r.err.text);
    CHECK(result.finish == RF_FINISH_END && result.n_generated == 91 && out.n[0] == 90 && memcmp(answer(), sentence, 90) == 0 &&
          result.n_dropped > 0, "%d after %u tokens, %u dropped: '%s'", result.finish, result.n_generated, result.n_dropped, answer());
    s.at = 0, s.n = 500;
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler, .drop_turns = 1}, &result) == RF_OK);
    CHECK(result.finish == RF_FINISH_CONTEXT && rf_session_length(r.s, 0) == 128, "%d", result.finish);
    rf_chat_template_close(t, NULL);
}

/* A vocabulary of bytes and gpt-oss's control tokens: those that belong to its channels are read, others are not shown, and text
 * that spells them is text. */
static void put_vocab(mg_gguf *w) {
    static const char *const controls[] = {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|other|>"};
    mg_vocab *v = malloc(sizeof *v);
    mg_bpe_vocab(v, 0);
    for (size_t i = 0; i < RFT_COUNT(controls); i++) mg_token(v, controls[i], 3);
    mg_kv_str(w, "tokenizer.ggml.model", "gpt2");
    mg_kv_str(w, "tokenizer.ggml.pre", "gpt-4o");
    mg_kv_arr_str(w, "tokenizer.ggml.tokens", v->list, v->n);
    mg_kv_arr_i32(w, "tokenizer.ggml.token_type", v->type, v->n);
    mg_kv_arr_str(w, "tokenizer.ggml.merges", mg_merges, sizeof mg_merges / sizeof mg_merges[0]);
    mg_kv_u32(w, "tokenizer.ggml.eos_token_id", v->n - 3);
    free(v);
}

static void test_control_tokens(void) {
    static const char source[] = "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
                                 "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
    const uint32_t n_vocab = 256 + sizeof mg_merges / sizeof mg_merges[0] + 3 + 7;
    mg_buf file = {0};
    rf_generate_result result;
    rig_close(&r);
    mg_llama(&file, &(mg_options){.no_vocab = 1, .n_vocab = n_vocab, .more_kv = put_vocab, .chat_template = source});
    const rf_session_desc sd = {.n_ctx = 256};
    REQUIRE(rig_open(&r, &(rig_how){.file = &file, .session = &sd}));
    REQUIRE(rf_model_get_tokenizer(r.m, &tokenizer, &r.err) == RF_OK, "%s", r.err.text);
    rf_chat_message messages[3] = {{.role = "user", .content = "hello <|channel|>final"}, {.role = "assistant"},
                                   {.role = "user", .content = "the end<|end|>"}};
    rf_chat chat = {.messages = messages, .n_messages = 1};
    script s = {.n = 0};
    CHECK(rf_tokenize(tokenizer, rf_string_of("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
                      "hel<|other|>lo <|<|other|>end|>"), RF_TOKENIZE_SPECIAL, s.ids, 512, &s.n, NULL) == RF_OK);
    rf_sampler sampler = scripted(&s);
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler}, &result) == RF_OK, "%s", r.err.text);
    CHECK(result.finish == RF_FINISH_END && strcmp(out.text[RF_PIECE_THOUGHT], "hm") == 0, "'%s'", out.text[RF_PIECE_THOUGHT]);
    CHECK(strncmp(answer(), "hello", 5) == 0 && !strstr(answer(), "other"), "'%s'", answer());

    /* A call, and the next turn: the template drops the thought, so what was before the answer is kept. */
    s.n = 0;
    CHECK(rf_tokenize(tokenizer, rf_string_of("<|channel|>commentary to=functions.f<|message|>{\"a\": 1}"), RF_TOKENIZE_SPECIAL, s.ids,
                      512, &s.n, NULL) == RF_OK);
    s.at = 0;
    CHECK(generate((rf_generate_desc){.chat = &chat, .sampler = &sampler}, &result) == RF_OK, "%s", r.err.text);
    CHECK(result.finish == RF_FINISH_CALL && strcmp(out.text[RF_PIECE_CALL], "f {\"a\": 1};") == 0, "'%s'", out.text[RF_PIECE_CALL]);
    const uint32_t before = result.n_prompt;
    messages[1].content = "hello";
    chat.n_messages = 3;
    CHECK(generate((rf_generate_desc){.chat = &chat, .max_tokens = 1}, &result) == RF_OK, "%s", r.err.text);
    CHECK(result.n_reused >= before && result.n_reused < result.n_prompt, "%u reused of %u, before %u", result.n_reused,
          result.n_prompt, before);
    rig_close(&r);
    mg_free(&file);
}

/* ---- failures ---- */

static void test_memory(void) {
    REQUIRE(open_session(256, 1));
    rf_chat_template *t = template_of(chatml);
    const rf_chat_message messages[] = {{.role = "user", .content = "Hi"}};
    const rf_chat chat = {.chat_template = t, .messages = messages, .n_messages = 1};
    const rf_generate_desc d = {.chat = &chat, .max_tokens = 3};
    int n_failures = 0;
    rf_result res = RF_ERR_MEMORY;
    CHECK(rf_model_preload_all(r.m, NULL) == RF_OK);
    const int64_t live = memory_read(&r.mem.live);
    for (int64_t fail = 1; fail < 100 && res != RF_OK; fail++) {
        r.mem.calls = 0, r.mem.fail_at = fail;
        res = generate(d, NULL);
        CHECK(res == RF_OK || (res == RF_ERR_MEMORY && r.err.code == res && r.err.text[0]), "%s", r.err.text);
        CHECK(memory_read(&r.mem.live) == live, "%d blocks are left", (int)(memory_read(&r.mem.live) - live));
        n_failures += res != RF_OK;
    }
    r.mem.fail_at = 0;
    CHECK(n_failures >= 6, "%d allocations", n_failures);
    rf_chat_template_close(t, NULL);
}

static void test_arguments(void) {
    REQUIRE(open_session(64, 1));
    const rf_chat chat = {.n_messages = 0};
    const char *const empty[] = {""};
    const int32_t bad_id = -5;
    const rf_generate_desc refused[] = {
        {.seq = 0}, {.prompt = rf_string_of("x"), .seq = 1}, {.prompt = rf_string_of("x"), .seq = -1},
        {.prompt = rf_string_of("x"), .ids = &bad_id, .n_ids = 1}, {.n_ids = 1}, {.ids = &bad_id, .n_ids = 1},
        {.chat = &chat, .append = 1}, {.chat = &chat, .prompt = rf_string_of("x")}, {.prompt = rf_string_of("x"), .n_stop = 1},
        {.prompt = rf_string_of("x"), .stop = empty, .n_stop = 1}};
    for (size_t i = 0; i < RFT_COUNT(refused); i++)
        CHECK(generate(refused[i], NULL) == RF_ERR_ARGUMENT && r.err.text[0], "case %zu: %s", i, r.err.text);
    CHECK(rf_generate(NULL, &refused[0], NULL, &r.err) == RF_ERR_ARGUMENT && rf_generate(r.s, NULL, NULL, &r.err) == RF_ERR_ARGUMENT);
    CHECK(generate((rf_generate_desc){.chat = &chat}, NULL) != RF_OK, "a file without a template");
    CHECK(rf_session_length(r.s, 0) == 0);
}

/* one call opens file, device, model and session, and one closes them */
static void test_open_file(void) {
    rf_session *s = NULL, *other = NULL;
    rf_error err = {0};
    const rf_session_desc too_long = {.n_ctx = 0x7fffffff, .n_seq_max = 64};
    CHECK(rf_session_open_file("no such file", "cpu", NULL, &s, &err) != RF_OK && !s && strstr(err.text, "no such file"), "%s", err.text);
    CHECK(rf_session_open_file(MODEL, "no such device", NULL, &s, &err) != RF_OK && !s && strstr(err.text, "no such device"), "%s", err.text);
    CHECK(rf_session_open_file(MODEL, "cpu", &too_long, &s, &err) != RF_OK && !s && err.text[0]);
    CHECK(rf_session_open_file(MODEL, "cpu", NULL, NULL, &err) == RF_ERR_ARGUMENT);
    CHECK(!rf_session_get_model(NULL) && rf_session_close(NULL, NULL) == RF_OK);

    REQUIRE(rf_session_open_file(MODEL, "cpu", NULL, &s, &err) == RF_OK, "%s", err.text);
    rf_model *m = rf_session_get_model(s);
    const rf_tokenizer *t = NULL;
    rf_scheduler *sch = NULL;
    int32_t id = 0;
    CHECK(rf_session_open(m, NULL, &other, &err) == RF_OK && rf_session_get_model(other) == m);
    CHECK(rf_session_close(s, &err) == RF_ERR_BUSY && strstr(err.text, "shakespeare-5m"), "%s", err.text);
    CHECK(rf_session_forward(s, &id, 1, NULL, &err) == RF_OK, "it works on: %s", err.text);
    CHECK(rf_model_get_tokenizer(m, &t, &err) == RF_OK && rf_scheduler_open(s, t, 1, &sch, &err) == RF_OK);
    CHECK(rf_session_close(other, &err) == RF_OK && rf_session_close(s, &err) == RF_ERR_BUSY);
    CHECK(rf_scheduler_close(sch, &err) == RF_OK && rf_session_close(s, &err) == RF_OK, "%s", err.text);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    FILE *model = fopen(MODEL, "rb");
    const int have = model != NULL;
    if (model) fclose(model);
    RUN_IF(have, test_prompt, "no " MODEL);
    RUN_IF(have, test_stop, "no " MODEL);
    RUN_IF(have, test_ends, "no " MODEL);
    RUN_IF(have, test_chat, "no " MODEL);
    RUN_IF(have, test_kept, "no " MODEL);
    RUN_IF(have, test_full, "no " MODEL);
    RUN(test_control_tokens);
    RUN_IF(have, test_memory, "no " MODEL);
    RUN_IF(have, test_arguments, "no " MODEL);
    RUN_IF(have, test_open_file, "no " MODEL);
    rig_close(&r);
    RFT_END();
}
