/* cc -O2 -I. -o test_template tests/test_template.c -lm -pthread && ./test_template
 * Chat templates: what Jinja2 makes of them (template_goldens.h), messages, limits, and who wrote which byte. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include "make_gguf.h"
#include "rf_memory.h"
#include "rf_test.h"
#include "template_goldens.h"

#define NOW 1772694489 /* 2026-03-05 07:08:09 */

static rf_chat_template *open_template(const char *source) {
    rf_chat_template *t = NULL;
    rf_error err = {0};
    CHECK(rf_chat_template_open(rf_string_of(source), NULL, &t, &err) == RF_OK, "%s: %s", source, err.text);
    return t;
}

/* ---- Jinja2's results ---- */

static void check_golden(const struct golden *g) {
    static char out[65536];
    rf_chat_template *t = NULL;
    rf_error err = {0};
    size_t n = 0;
    rf_result r = rf_chat_template_open(rf_string_of(g->source), NULL, &t, &err);
    const rf_chat chat = {.chat_template = t, .extra = golden_variables, .now = NOW};
    if (r == RF_OK) r = rf_chat_format(&chat, out, sizeof out, &n, &err);
    if (g->kind == GOLDEN_TEXT)
        CHECK(r == RF_OK && n == strlen(g->text) && memcmp(out, g->text, n) == 0, "%s\n      want %s\n      got  %.*s%s", g->source,
              g->text, (int)n, out, err.text);
    else if (g->kind == GOLDEN_RAISES) CHECK(r == RF_ERR_ARGUMENT && strstr(err.text, g->text), "%s: %s", g->source, err.text);
    else CHECK(r < 0 && strstr(err.text, "line 1"), "%s: Jinja2 says: %s; here: %s %.*s", g->source, g->text, err.text, (int)n, out);
    rf_chat_template_close(t, NULL);
}

static void test_as_jinja2(void) {
    for (size_t i = 0; i < RFT_COUNT(goldens); i++) check_golden(&goldens[i]);
}

/* ---- messages ---- */

#define SHOW "{% for m in messages %}{{ m | tojson }}{{ '\\n' }}{% endfor %}"

static void check_chat(const char *source, const rf_chat *chat, const char *want) {
    char out[4096];
    rf_error err = {0};
    size_t n = 0;
    rf_chat c = *chat;
    rf_chat_template *t = open_template(source);
    c.chat_template = t;
    const rf_result r = rf_chat_format(&c, out, sizeof out, &n, &err);
    if (r == RF_OK) CHECK(n == strlen(want) && memcmp(out, want, n) == 0, "%s\n      want %s\n      got  %.*s", source, want, (int)n, out);
    else CHECK(err.code == r && strstr(err.text, want), "%s\n      want %s\n      got  %s", source, want, err.text);
    rf_chat_template_close(t, NULL);
}

static void test_messages(void) {
    const rf_tool_call calls[] = {{"c1", "f", "{\"x\": [1, \"\xc3\xa9\"]}"}, {NULL, "g", NULL}};
    const rf_chat_message messages[] = {
        {.role = "user", .parts = "[{\"type\": \"text\", \"text\": \"hi\"}]"},
        {.role = "assistant", .reasoning = "why", .tool_calls = calls, .n_tool_calls = 2},
        {.role = "tool", .content = "3", .name = "f", .tool_call_id = "c1"}};
    check_chat(SHOW, &(rf_chat){.messages = messages, .n_messages = 3},
               "{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"hi\"}]}\n"
               "{\"role\": \"assistant\", \"content\": \"\", \"reasoning_content\": \"why\", \"reasoning\": \"why\", \"thinking\": \"why\", "
               "\"tool_calls\": [{\"id\": \"c1\", \"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"x\": [1, \"\xc3\xa9\"]}}}, "
               "{\"type\": \"function\", \"function\": {\"name\": \"g\", \"arguments\": {}}}]}\n"
               "{\"role\": \"tool\", \"content\": \"3\", \"name\": \"f\", \"tool_call_id\": \"c1\"}\n");
    /* arguments are a mapping, and their JSON text where a template joins them to one */
    check_chat("{{ messages[1].tool_calls[0].function.arguments.x[0] }}{{ '<' + messages[1].tool_calls[0].function.arguments + '>' }}",
               &(rf_chat){.messages = messages, .n_messages = 3}, "1<{\"x\": [1, \"\xc3\xa9\"]}>");
    check_chat("{{ bos_token }}{{ add_generation_prompt }}{{ enable_thinking }}{{ thinking }}{{ reasoning_effort }}{{ tools[0].n }}{{ a }}{{ eos_token }}",
               &(rf_chat){.open_answer = 1, .tools = "[{\"n\": 1.5}]", .thinking = RF_THINKING_OFF, .effort = "low", .extra = "{\"a\": \"b\"}",
                          .prefill = "pre", .bos = rf_string_of("<s>"), .eos = rf_string_of("</s>")}, "<s>TrueFalseFalselow1.5b</s>pre");
    check_chat("{{ enable_thinking is defined }}{{ tools is defined }}{{ strftime_now is defined }}{{ bos_token ~ eos_token }}{{ messages }}",
               &(rf_chat){.thinking = RF_THINKING_DEFAULT}, "FalseFalseFalse[]");
    check_chat("{{ add_generation_prompt }}{{ enable_thinking }}", &(rf_chat){.extra = "{\"add_generation_prompt\": 5}", .thinking = RF_THINKING_ON}, "5True");
    check_chat("{{ strftime_now('%Y') }}", &(rf_chat){.now = 0}, "line 1: 'strftime_now' is undefined");
    check_chat("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", &(rf_chat){.now = -1}, "1969-12-31 23:59:59");
    check_chat("{{ strftime_now('%Q') }}", &(rf_chat){.now = 1}, "strftime_now: %Q");
    const struct { rf_chat_message m; const char *want; } bad[] = {
        {{.content = "x"}, "message 0: want a role"}, {{.role = "user", .n_tool_calls = 1}, "message 0: want a role"},
        {{.role = "user", .parts = "{}"}, "message 0: want a JSON array, found dict"}, {{.role = "user", .parts = "[1"}, "message 0: byte 2: want ',' or ']'"},
        {{.role = "assistant", .tool_calls = &(rf_tool_call){"i", "f", "[]"}, .n_tool_calls = 1}, "message 0: want a JSON object, found list"},
        {{.role = "assistant", .tool_calls = &(rf_tool_call){"i", NULL, "{}"}, .n_tool_calls = 1}, "message 0: a tool call has no name"}};
    for (size_t i = 0; i < RFT_COUNT(bad); i++) check_chat("x", &(rf_chat){.messages = &bad[i].m, .n_messages = 1}, bad[i].want);
}

static void test_json(void) {
    static const struct { const char *text, *want; } cases[] = {
        {" {\"a\" : [ ] , \"b\":{}, \"a\":1 } ", "{\"a\": 1, \"b\": {}}"}, {"{\"v\": \"\\u00e9\\ud83d\\ude00\\ud800\\n\\/\"}", "{\"v\": \"\xc3\xa9\xf0\x9f\x98\x80\xef\xbf\xbd\\n/\"}"},
        {"{\"v\": [-0, 1E2, 1.50, -1e-7, 9223372036854775807, 0.1]}", "{\"v\": [0, 100.0, 1.5, -1e-07, 9223372036854775807, 0.1]}"},
        {"{\"v\": 9223372036854775808}", "byte 6: want an integer of at most 64 bits"}, {"{\"v\": 01}", "byte 6: want a value"}, {"{\"v\": .5}", "byte 6: want a value"},
        {"{\"v\": +1}", "byte 6: want a value"}, {"{\"v\": -}", "byte 6: want a value"}, {"{\"v\": tru}", "byte 6: want a value"}, {"{\"v\"}", "byte 4: want ':'"},
        {"{v: 1}", "byte 1: want a key in quotes"}, {"{\"v\": \"\\x\"}", "want an escape"}, {"{\"v\": \"\n\"}", "want the rest of a string"}, {"{} x", "byte 3: want the end"},
        {"{\"v\": [1,]}", "byte 9: want a value"}, {"", "byte 0: want a value"}, {"[]", "want a JSON object, found list"}, {"{\"v\": \"", "want the rest of a string"}};
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        char source[64] = "{{ v | tojson }}";
        char want[128];
        snprintf(want, sizeof want, "%s", cases[i].want);
        if (i == 0) check_chat("{{ a }}{{ b }}", &(rf_chat){.extra = cases[i].text}, "1{}");
        else if (want[0] == '{') want[strlen(want) - 1] = 0, check_chat(source, &(rf_chat){.extra = cases[i].text}, want + 6);
        else check_chat(source, &(rf_chat){.extra = cases[i].text}, want);
    }
    static char deep[4096];
    memset(deep, '[', 300);
    memcpy(deep, "{\"v\":", 5);
    check_chat("x", &(rf_chat){.extra = deep}, "want at most 100 levels");
}

/* ---- who wrote which byte ---- */

/* What the caller gives is X and what the template writes is t: each output byte's mark must say so. */
static void check_marks(const char *expression) {
    rf_error err = {0};
    rfi_run r;
    char source[512];
    const rf_chat_message message = {.role = "user", .content = " XxX,X\xc3\x9fX\n\"X"};
    snprintf(source, sizeof source, "{%% set c = messages[0].content %%}{{ %s }}", expression);
    rf_chat_template *t = open_template(source);
    const rf_chat chat = {.chat_template = t, .messages = &message, .n_messages = 1, .extra = "{\"d\": {\"X\": \"XX\", \"x\": [\"X\"]}}", .now = NOW};
    rfi_chat_render(&r, &chat, rf_string_of(""), rf_string_of(""), &err);
    CHECK(err.code == RF_OK, "%s: %s", expression, err.text);
    for (uint64_t i = 0; err.code == RF_OK && i < r.m.n_out; i++) {
        const unsigned char c = (unsigned char)r.m.out[i];
        const int is_caller = c == 'X' || c == 'x' || c >= 0x80, is_own = c == 't' || c == '<' || c == '|';
        if (is_caller || is_own) CHECK(r.m.from[i] == is_caller, "%s: byte %d of %.*s", expression, (int)i, (int)r.m.n_out, r.m.out);
    }
    rfi_values_close(&r.m);
    rf_chat_template_close(t, NULL);
}

static void test_marks(void) {
    static const char *const expressions[] = {
        "c", "c + 't'", "'t' + c + '<'", "c ~ 't' ~ c", "c | trim", "('<' + c).strip('< ')", "c[1:]", "('t' + c)[::-1]", "('t' + c)[::2]", "('t' + c)[2]",
        "c | upper", "('<' + c) | lower", "c | title", "c | capitalize", "c.split(',') | join('t')", "c.split() | join('<')", "'t'.join(c.split(','))", "c.rsplit('x')",
        "c | replace('x', 't')", "'t<t' | replace('<', c)", "c.replace('', 't')", "c | tojson", "{'t': c} | tojson", "[c, 't'] | tojson(indent=2)", "c | tojson(ensure_ascii=true) | length",
        "[c, 't']", "{'t': c}", "(c, 't') | string", "'%s|%5s' % (c, 't')", "'%-20s|' | format(c)", "'{}<{:>20}'.format(c, 't')", "c.format()", "c | list", "c | list | join('t')",
        "c * 2 + 't' * 2", "c | indent(2)", "('t\\n' + c) | indent('<')", "'t\\nt' | indent(c)", "c | center(30, ) ~ 't'", "'t'.center(9, 'X') | replace('X', c)", "'t'.ljust(9, c[1])", "c.partition('x') | join('t')",
        "c.splitlines() | join('t')", "c | e", "c | e | safe + '<'", "c | reverse", "c | first ~ 't' ~ (c | last)", "d | dictsort | join('|')", "d.items() | list", "d | tojson(sort_keys=true)", "d.X + 't'",
        "[c, 't'] | sort | join", "[c, 't', c] | unique | join", "[{'k': c}, {'k': 't'}] | map(attribute='k') | join('<')", "[{'k': c}] | groupby('k') | first | first", "[c, 't'] | select('string') | join",
        "c | truncate(5, true, 't')", "c.removeprefix(' ')", "c.swapcase()", "c | default('t')", "nope | default(c) + 't'", "namespace(a=c).a + 't'", "dict(t=c).t ~ 't'", "c if c else 't'", "c and 't' + c",
        "strftime_now(c)", "c | urlencode | length", "'%c' % 'X' | length", "[c][0] + ('t', c)[1]", "'%(X)s<' % d"};
    for (size_t i = 0; i < RFT_COUNT(expressions); i++) check_marks(expressions[i]);
    check_marks("'' }}{% set x %}t{{ c }}<{% endset %}{{ x }}{% macro m(a) %}t{{ a }}{{ caller() }}{% endmacro %}{% call m(c) %}<{{ c }}{% endcall %}"
                "{% filter upper %}<{{ c }}{% endfilter %}{% for p in c %}{{ p }}t{% endfor %}{{ ''");
}

/* A vocabulary in which every marker below is a control token (kind 3) or a user-defined one (4). */
#define BAR(name) "<\xef\xbd\x9c" name "\xef\xbd\x9c>"
static const char *const markers[] = {"<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[gMASK]",
    "<sop>", "<|observation|>", BAR("User"), BAR("Assistant"), "<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<tool_call>",
    "</tool_call>", "<|turn>", "<turn|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    "<|start_of_role|>", "<|end_of_role|>"};
enum { N_MARKERS = RFT_COUNT(markers) };

/* Small templates in the shapes of the families. */
static const struct { const char *name, *source; } shapes[] = {
    {"chatml", "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
               "{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"},
    {"think", "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}{{ m.content.split("
              "'</think>')[-1].lstrip('\\n') }}<|im_end|>{% endfor %}"},
    {"llama3", "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"},
    {"gemma", "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"},
    {"gemma4", "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + m.role + '\\n' ~ m.content }}<turn|>{% endfor %}"},
    {"mistral", "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
                "{{ c.function.name ~ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% else %} {{ m.content + eos_token }}{% endif %}{% endfor %}"},
    {"phi", "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"},
    {"glm", "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
            "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}{{ v | tojson }}{% endfor %}</tool_call>{% endfor %}{% endfor %}"},
    {"deepseek", "{{ bos_token }}{% for m in messages %}{{ '" BAR("Assistant") "' if m.role == 'assistant' else '" BAR("User") "' }}{{ m.content }}{% if m.role == "
                 "'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"},
    {"gpt-oss", "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|channel|>final<|message|>"
                "{{ m.content }}<|end|>{% endfor %}"},
    {"command", "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' }}{{ m.content.upper() }}"
                "{{ m.content | replace('a', 'b') }}<|END_OF_TURN_TOKEN|>{% endfor %}"},
    {"granite", "{% for m in messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '</s>\\n' }}{% endfor %}"}};

static rf_gguf *open_vocabulary(mg_buf *bytes, int kind, rf_tokenizer **t) {
    static char letters[95][2];
    const char *tokens[N_MARKERS + 100];
    int32_t types[N_MARKERS + 100];
    mg_gguf w;
    rf_gguf *g = NULL;
    rf_error err = {0};
    uint32_t n = 0;
    for (; n < N_MARKERS; n++) tokens[n] = markers[n], types[n] = n < 2 ? 3 : kind;
    tokens[n] = "<table>", types[n++] = 4;
    for (int c = '!'; c <= '~'; c++, n++) letters[c - '!'][0] = (char)c, tokens[n] = letters[c - '!'], types[n] = 1;
    mg_begin(&w, 3);
    mg_kv_str(&w, "tokenizer.ggml.model", "gpt2");
    mg_kv_arr_str(&w, "tokenizer.ggml.tokens", tokens, n);
    mg_kv_arr_i32(&w, "tokenizer.ggml.token_type", types, n);
    mg_kv_arr_str(&w, "tokenizer.ggml.merges", tokens, 0);
    mg_kv_u32(&w, "tokenizer.ggml.bos_token_id", 0);
    mg_kv_u32(&w, "tokenizer.ggml.eos_token_id", 1);
    mg_kv_bool(&w, "tokenizer.ggml.add_bos_token", 1);
    mg_finish(&w, bytes);
    CHECK(rf_gguf_open_memory(bytes->data, bytes->n, NULL, &g, &err) == RF_OK && rf_tokenizer_open(g, NULL, t, &err) == RF_OK, "%s", err.text);
    return g;
}

/* How often each marker becomes a token in a conversation whose texts are all `text`. */
static void count_markers(const rf_tokenizer *tokenizer, const rf_chat_template *t, const char *text, uint32_t counts[N_MARKERS + 1]) {
    char json[4096];
    static int32_t ids[16384];
    uint32_t n = 0;
    rf_error err = {0};
    snprintf(json, sizeof json, "{\"%s\": \"%s\"}", text, text);
    const rf_tool_call call = {text, text, json};
    const rf_chat_message messages[] = {{.role = "user", .content = text},
        {.role = "assistant", .content = text, .reasoning = text, .tool_calls = &call, .n_tool_calls = 1}, {.role = "user", .content = text, .name = text}};
    const rf_chat chat = {.chat_template = t, .messages = messages, .n_messages = 3, .prefill = text};
    memset(counts, 0, (N_MARKERS + 1) * sizeof *counts);
    CHECK(rf_chat_tokenize(tokenizer, &chat, RF_TOKENIZE_ADD, ids, RFT_COUNT(ids), &n, &err) == RF_OK, "%s", err.text);
    for (uint32_t i = 0; i < n && i < RFT_COUNT(ids); i++)
        if (ids[i] <= N_MARKERS) counts[ids[i]]++;
}

static int yes(void *user) { return ++*(int *)user > 0; }

/* A conversation whose tokens are not wanted any more. */
static void test_cancelled(void) {
    mg_buf bytes = {0};
    rf_tokenizer *tokenizer = NULL;
    rf_gguf *g = open_vocabulary(&bytes, 4, &tokenizer);
    rf_chat_template *t = open_template(shapes[0].source);
    const rf_chat_message said = {.role = "user", .content = "x"};
    int n_asked = 0;
    const rf_chat chat = {.chat_template = t, .messages = &said, .n_messages = 1, .cancel_fn = yes, .cancel_user = &n_asked};
    uint32_t n = 1;
    rf_error err;
    const rf_result r = rf_chat_tokenize(tokenizer, &chat, 0, NULL, 0, &n, &err);
    CHECK(r == RF_ERR_CANCELLED && n == 0 && n_asked == 1 && err.code == r, "%d: %u tokens, asked %d times", r, n, n_asked);
    rf_chat_template_close(t, NULL);
    rf_tokenizer_close(tokenizer, NULL);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "busy");
    mg_free(&bytes);
}

/* Every family: the tokens of its markers are as many with messages, calls and thoughts that spell them as without. */
static void test_forged(void) {
    char all[1024] = "";
    for (uint32_t i = 0; i < N_MARKERS; i++) strcat(all, markers[i]);
    for (int kind = 3; kind <= 4; kind++) {
        mg_buf bytes = {0};
        rf_tokenizer *tokenizer = NULL;
        rf_gguf *g = open_vocabulary(&bytes, kind, &tokenizer);
        for (size_t i = 0; i < RFT_COUNT(shapes); i++) {
            uint32_t plain[N_MARKERS + 1], forged[N_MARKERS + 1], table[N_MARKERS + 1], n_used = 0;
            rf_chat_template *t = open_template(shapes[i].source);
            count_markers(tokenizer, t, "x", plain);
            count_markers(tokenizer, t, all, forged);
            count_markers(tokenizer, t, "<table>", table);
            for (uint32_t k = 0; k < N_MARKERS; k++) {
                n_used += plain[k] > 0;
                if (plain[k] || kind == 3)
                    CHECK(plain[k] == forged[k], "%s: %s %u times, in messages that name it %u", shapes[i].name, markers[k], plain[k], forged[k]);
            }
            CHECK(n_used >= 2 && plain[0] == 1 && table[N_MARKERS] >= 1, "%s: %u markers, bos %u, <table> %u", shapes[i].name, n_used, plain[0],
                  table[N_MARKERS]);
            rf_chat_template_close(t, NULL);
        }
        rf_tokenizer_close(tokenizer, NULL);
        CHECK(rf_gguf_close(g, NULL) == RF_OK, "busy");
        mg_free(&bytes);
    }
}

/* ---- a model's own ---- */

static const char *own, *for_tools;
static void template_keys(mg_gguf *w) {
    if (own) mg_kv_str(w, "tokenizer.chat_template", own);
    if (for_tools) mg_kv_str(w, "tokenizer.chat_template.tool_use", for_tools);
}

static void check_model(const char *text, const char *tools_text, rf_result want, const char *without, const char *with) {
    mg_buf bytes = {0};
    rf_gguf *g = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    const rf_chat_template *t = NULL, *again = NULL;
    rf_error err = {0};
    char out[256];
    size_t n = 0;
    own = text, for_tools = tools_text;
    mg_llama(&bytes, &(mg_options){.n_layers = 1, .more_kv = template_keys});
    REQUIRE(rf_gguf_open_memory(bytes.data, bytes.n, NULL, &g, &err) == RF_OK && rf_device_open("null", NULL, &d, &err) == RF_OK &&
                rf_model_open(g, d, NULL, &m, &err) == RF_OK, "%s", err.text);
    rf_result r = rf_model_get_chat_template(m, &t, &err);
    CHECK(r == want && (r == RF_OK) == (t != NULL), "%s: %s %s", text ? text : "none", rf_result_name(r), err.text);
    CHECK(rf_model_get_chat_template(m, &again, NULL) == want && again == t, "parsed twice");
    for (int k = 0; k < 2 && t; k++) {
        const rf_chat chat = {.chat_template = t, .tools = k ? "[]" : NULL};
        const char *text_of = k ? with : without;
        r = rf_chat_format(&chat, out, sizeof out, &n, &err);
        CHECK(r == RF_OK && n == strlen(text_of) && !memcmp(out, text_of, n), "want %s, got %.*s %s", text_of, (int)n, out, err.text);
    }
    CHECK(rf_model_close(m, NULL) == RF_OK && rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    mg_free(&bytes);
}

static void test_of_a_model(void) {
    check_model("plain", NULL, RF_OK, "plain", "plain");
    check_model("plain", "tools {{ tools }}", RF_OK, "plain", "tools []");
    check_model(NULL, NULL, RF_ERR_NOT_FOUND, "", "");
    check_model("{{", NULL, RF_ERR_FORMAT, "", "");
    check_model("plain", "{% import 'x' %}", RF_ERR_UNSUPPORTED, "", "");
    CHECK(rf_model_get_chat_template(NULL, NULL, NULL) == RF_ERR_ARGUMENT, "NULL");
}

/* ---- limits ---- */

static void test_hostile(void) {
    static const struct { const char *source, *want; rf_result code; } cases[] = {
        {"{% set l = range(999) %}\n{% for i in l %}{% for j in l %}{% for k in l %}{% endfor %}{% endfor %}{% endfor %}", "line 2: more than 1000000 steps", RF_ERR_UNSUPPORTED},
        {"{% macro m() %}\n{{ m() }}{% endmacro %}{{ m() }}", "line 2: nests deeper than 200", RF_ERR_UNSUPPORTED},
        {"{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "bytes", 0},
        {"{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}", "line 1: ", 0},
        {"{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}", "nests deeper", RF_ERR_UNSUPPORTED},
        {"{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}", "nests deeper", RF_ERR_UNSUPPORTED},
        {"{% set ns = namespace(l=[], k=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% set ns.k = [ns.k] %}{% endfor %}{{ ns.l == ns.k }}", "nests deeper", RF_ERR_UNSUPPORTED},
        {"{% set l = [] %}{{ l.append(l) }}{{ l }}", "nests deeper", RF_ERR_UNSUPPORTED}, {"{{ 'a' * 9223372036854775807 }}", "line 1: ", 0},
        {"{{ 9223372036854775807 + 1 }}", "an integer beyond 64 bits", RF_ERR_UNSUPPORTED}, {"{{ -9223372036854775807 - 2 }}", "beyond 64 bits", RF_ERR_UNSUPPORTED},
        {"{{ 2 ** 63 }}", "beyond 64 bits", RF_ERR_UNSUPPORTED}, {"{{ 3037000500 * 3037000500 }}", "beyond 64 bits", RF_ERR_UNSUPPORTED}, {"{{ '9223372036854775808' | int }}", "beyond 64 bits", RF_ERR_UNSUPPORTED},
        {"{{ 1e300 | int }}", "beyond 64 bits", RF_ERR_UNSUPPORTED}, {"{{ (-9223372036854775807 - 1) // -1 }}", "beyond 64 bits", RF_ERR_UNSUPPORTED}, {"{{ (-9223372036854775807 - 1) | abs }}", "beyond 64 bits", RF_ERR_UNSUPPORTED},
        {"{{ '%99999999s' % 1 }}", "a width above a million", RF_ERR_UNSUPPORTED}, {"{{ '{:99999999}'.format(1) }}", "a width above a million", RF_ERR_UNSUPPORTED}, {"{{ 'x' | center(99999999) }}", "line 1: ", 0},
        {"{{ [1, 2] | batch(1, 1) | map('list') | list | sum(start=[]) * 9999999 }}", "line 1: ", 0}, {"{{ '' | attr('__class__') }}{{ ''.__class__.__mro__ }}", "has no attribute '__class__'", RF_ERR_ARGUMENT},
        {"{{ cycler.__init__.__globals__ }}", "'cycler' is undefined", RF_ERR_ARGUMENT}, {"{{ lipsum.__globals__['os'] }}", "'lipsum' is undefined", RF_ERR_ARGUMENT},
        {"{% include '/etc/passwd' %}", "line 1: unknown tag 'include'", RF_ERR_UNSUPPORTED}, {"{{ messages.append(1) }}", "unsafe", RF_ERR_ARGUMENT}};
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        const rf_chat_template_desc limits = {.max_steps = 1000000, .max_memory = 8 << 20, .max_output = 1 << 20, .max_depth = 200};
        rf_chat_template *t = NULL;
        rf_error err = {0};
        size_t n = 7;
        rf_result r = rf_chat_template_open(rf_string_of(cases[i].source), &limits, &t, &err);
        if (r == RF_OK) r = rf_chat_format(&(rf_chat){.chat_template = t}, NULL, 0, &n, &err);
        CHECK(r < 0 && r != RF_ERR_CAPACITY && (!cases[i].code || r == cases[i].code) && strstr(err.text, cases[i].want), "%s: %s %s", cases[i].source,
              rf_result_name(r), err.text);
        rf_chat_template_close(t, NULL);
    }
}

/* Nesting of every kind, and texts that would cost the square of their length: an error or a template, soon. */
static void test_long_sources(void) {
    static const char *const parts[][3] = {{"", "(", ""}, {"{{ ", "[", ""}, {"{{ ", "-", "1 }}"}, {"{{ ", "not ", "1 }}"}, {"{{ 1", " if 1 else 1", " }}"}, {"{{ 1", "+1", " }}"}, {"{{ a", ".a", " }}"},
        {"{{ a", "[0]", " }}"}, {"{{ a", "|e", " }}"}, {"{{ a", "()", " }}"}, {"{{ ", "{1:", ""}, {"", "{% if 1 %}", ""}, {"", "{% for a in b %}", ""}, {"", "{% macro m() %}", ""}, {"", "{{ 1 }}", ""},
        {"", "{#", ""}, {"{% raw %}", "{% ", ""}, {"", "{% raw %}", ""}, {"", "{", ""}, {"", " \n", "{%- if 1 %}{% endif %}"}, {"", "{%- if 1 -%} {% endif %}", ""}, {"{{ '", "\\", "' }}"}, {"{{ ", "'a' ", " }}"},
        {"{{ 1", " is not none and not 1", " }}"}, {"{% set a", ",a", " = 1 %}"}, {"{% set ", "(", ""}, {"{{ f(", "a=1,", ") }}"}, {"{{ a", "~a", " }}"}, {"{{ 1", " 1", " }}"}, {"{% if 1 %}", "{% elif 1 %}", "{% endif %}"},
        {"{{ 1", "0", " }}"}, {"{{ 1.", "0", " }}"}, {"{{ ", "1 < ", "1 }}"}, {"{{ 2", " ** 2", " }}"}, {"{{ [", "1,", "] }}"}, {"{{ {", "1:1,", "} }}"}, {"", "{% set a = 1 %}", ""}, {"{% if 1 %}", "x\n", ""}};
    enum { BYTES = 100000 };
    char *source = (char *)malloc(BYTES + 200);
    for (size_t i = 0; source && i < RFT_COUNT(parts); i++) {
        const size_t n_part = strlen(parts[i][1]);
        size_t n = (size_t)sprintf(source, "%s", parts[i][0]), count = 0;
        rf_chat_template *t = NULL;
        rf_error err = {0};
        while (n + n_part < BYTES) memcpy(source + n, parts[i][1], n_part), n += n_part;
        n += (size_t)sprintf(source + n, "%s", parts[i][2]);
        rf_result r = rf_chat_template_open((rf_string){source, n}, &(rf_chat_template_desc){.max_steps = 1000000}, &t, &err);
        if (r == RF_OK) r = rf_chat_format(&(rf_chat){.chat_template = t}, NULL, 0, &count, &err);
        CHECK(r == RF_OK || err.text[0], "%s", parts[i][1]);
        rf_chat_template_close(t, NULL);
    }
    free(source);
}

/* Every allocation fails once, and every one after it: an error, and nothing is lost. */
static void test_memory(void) {
    static const char source[] = "{% macro m(a) %}{{ a | tojson(indent=1) }}{% endmacro %}{% for x in messages if x %}{{ m(x) ~ x.content[1:] }}{% endfor %}"
                                 "{{ tools | map(attribute='a') | sort | join('-') }}{% set q %}{{ messages * 40 }}{% endset %}{{ q | replace('h', 'j') }}";
    const rf_chat_message message = {.role = "user", .content = "hello \xc3\xa9"};
    for (int64_t fail_at = 1, done = 0; !done && fail_at < 100; fail_at++) {
        for (int forever = 0; forever < 2; forever++) {
            memory m = {.fail_at = fail_at, .forever = forever};
            const rf_chat_template_desc desc = {.allocator = memory_allocator(&m)};
            rf_chat_template *t = NULL;
            rf_error err = {0};
            size_t n = 0;
            rf_result r = rf_chat_template_open(rf_string_of(source), &desc, &t, &err);
            const rf_chat chat = {.chat_template = t, .messages = &message, .n_messages = 1, .tools = "[{\"a\": 2}, {\"a\": 1}]"};
            if (r == RF_OK) r = rf_chat_format(&chat, NULL, 0, &n, &err);
            done = r == RF_ERR_CAPACITY;
            CHECK(done || (r == RF_ERR_MEMORY && err.text[0]), "%d: %s", (int)fail_at, err.text);
            rf_chat_template_close(t, NULL);
            CHECK(m.live == 0, "%d: %d blocks are lost", (int)fail_at, (int)m.live);
        }
    }
    char out[64];
    size_t n = 0;
    rf_chat_template *t = open_template("{{ 'abc' }}def");
    for (size_t capacity = 0; capacity < 8; capacity++) {
        memset(out, '#', sizeof out);
        const rf_result r = rf_chat_format(&(rf_chat){.chat_template = t}, capacity ? out : NULL, capacity, &n, NULL);
        CHECK(r == (capacity < 6 ? RF_ERR_CAPACITY : RF_OK) && n == 6 && !memcmp(out, "abcdef", capacity < 6 ? capacity : 6) &&
                  out[capacity < 6 ? capacity : 6] == '#', "capacity %zu: %s, %zu", capacity, rf_result_name(r), n);
    }
    CHECK(rf_chat_format(&(rf_chat){0}, out, 8, &n, NULL) == RF_ERR_ARGUMENT && rf_chat_format(NULL, out, 8, &n, NULL) == RF_ERR_ARGUMENT &&
              rf_chat_format(&(rf_chat){.chat_template = t, .n_messages = 1}, out, 8, &n, NULL) == RF_ERR_ARGUMENT &&
              rf_chat_format(&(rf_chat){.chat_template = t, .thinking = 3}, out, 8, &n, NULL) == RF_ERR_ARGUMENT &&
              rf_chat_template_open((rf_string){0}, NULL, NULL, NULL) == RF_ERR_ARGUMENT, "arguments");
    rf_chat_template_close(t, NULL);
    rf_chat_template_close(NULL, NULL);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_as_jinja2);
    RUN(test_messages);
    RUN(test_json);
    RUN(test_marks);
    RUN(test_forged);
    RUN(test_cancelled);
    RUN(test_of_a_model);
    RUN(test_hostile);
    RUN(test_long_sources);
    RUN(test_memory);
    RFT_END();
}
