/* cc -O2 -I. -o test_answer tests/test_answer.c -lm -pthread && ./test_answer        from the repository root
 * Thoughts, answers and tool calls from what a model writes, in every format, however the text is cut. */
#include "rocmforge.h"
#include "rf_memory.h"
#include "rf_test.h"

/* What was given out: "A text", "T thought", "C name arguments", one line each; pieces of one kind are joined. */
typedef struct record {
    char text[1 << 16];
    size_t n;
    int last;        /* kind of the last piece, -1: none                 */
    int n_pieces;
    int stop_at;     /* on_piece asks to stop at this piece; 0: never    */
} record;

static void put(record *r, const char *text, size_t n) {
    if (n > sizeof r->text - 1 - r->n) n = sizeof r->text - 1 - r->n;
    memcpy(r->text + r->n, text, n);
    r->n += n;
    r->text[r->n] = 0;
}

static int on_piece(const rf_piece *p, void *user) {
    record *r = user;
    CHECK(p->text.len > 0, "an empty piece");
    if (p->kind != RF_PIECE_CALL && (int)p->kind == r->last) r->n--; /* the line goes on */
    else put(r, p->kind == RF_PIECE_ANSWER ? "A " : p->kind == RF_PIECE_THOUGHT ? "T " : "C ", 2);
    if (p->kind == RF_PIECE_CALL) {
        put(r, p->name.data, p->name.len);
        if (p->id.len) put(r, "#", 1), put(r, p->id.data, p->id.len);
        put(r, " ", 1);
    }
    put(r, p->text.data, p->text.len);
    put(r, "\n", 1);
    r->last = p->kind;
    return ++r->n_pieces == r->stop_at;
}

static rf_answer *open_answer(const char *chat_template, const char *prompt, const char *tools, record *r) {
    rf_answer_desc d = {.chat_template = rf_string_of(chat_template), .prompt = rf_string_of(prompt),
                        .tools = rf_string_of(tools), .on_piece = on_piece, .user = r};
    rf_answer *a = NULL;
    rf_error err;
    CHECK(rf_answer_open(&d, &a, &err) == RF_OK, "%s", err.text);
    return a;
}

static void start(record *r) { *r = (record){.last = -1}; }

/* In one piece, cut at each place, and byte by byte. */
static void check(int line, const char *chat_template, const char *prompt, const char *tools, const char *text,
                  const char *want) {
    static record r;
    const size_t n = strlen(text);
    rf_answer *a = open_answer(chat_template, prompt, tools, &r);
    for (size_t cut = 0; cut <= n + 1; cut++) {
        start(&r);
        if (cut > n)
            for (size_t i = 0; i < n; i++) rf_answer_feed(a, (rf_string){text + i, 1}, NULL);
        else {
            rf_answer_feed(a, (rf_string){text, cut}, NULL);
            rf_answer_feed(a, (rf_string){text + cut, n - cut}, NULL);
        }
        CHECK(rf_answer_finish(a, NULL) == RF_OK);
        CHECK(strcmp(r.text, want) == 0, "line %d, cut at %zu: want\n%sgot\n%s", line, cut, want, r.text);
        if (strcmp(r.text, want)) break;
    }
    rf_answer_close(a, NULL);
}

#define THINK "<think> <tool_call>"
#define IS(chat_template, text, want) check(__LINE__, chat_template, NULL, NULL, text, want)

static void test_thoughts(void) {
    IS(THINK, "Hello!", "A Hello!\n");
    IS(THINK, " \n Hello! \n", "A  \n Hello! \n\n");
    IS(THINK, "<think>\nhm\n\nso\n</think>\n\nHello!\n", "T hm\n\nso\nA Hello!\n\n");
    IS(THINK, "\n<think></think>Hello!", "A Hello!\n");
    IS(THINK, "<think>a</think><think>b</think>c", "T ab\nA c\n");
    IS(THINK, "<think>it ends here \n", "T it ends here\n");
    IS(THINK, "<think>a</thin", "T a</thin\n");
    IS(THINK, "<thin", "A <thin\n");
    IS(THINK, "write <think> x </think>", "A write <think> x </think>\n"); /* in the text it is text */
    IS("no thoughts <tool_call>", "<think>a</think>b", "A <think>a</think>b\n");
    IS(NULL, "<think>a</think>b", "T a\nA b\n");
    IS("[THINK]", "[THINK]a[/THINK]b [THINK]c", "T a\nA b\nT c\n");
    IS("<seed:think>", "<seed:think>\na</seed:think>\nb", "T a\nA b\n");
    IS("'<|channel>thought\\n'", "<|channel>thought\na\n<channel|>b", "T a\nA b\n");
    IS("<|START_THINKING|><|START_RESPONSE|>", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
       "T a\nA b\n");
    IS("<|inner_prefix|>", "<|inner_prefix|>a<|inner_suffix|>b", "T a\nA b\n");
    check(__LINE__, THINK, "assistant\n<think>\n", NULL, "hm\n</think>\nHello", "T hm\nA Hello\n");
    check(__LINE__, THINK, "assistant\n<think>\n\n</think>\n\n", NULL, "Hello", "A Hello\n");
    check(__LINE__, THINK, "<think>", NULL, "never ends", "T never ends\n");
}

static void test_json_calls(void) {
    IS(THINK, "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, -2.5e3, true, null]}}\n</tool_call>\n",
       "A Let me see.\nC f {\"a\": [1, -2.5e3, true, null]}\n");
    IS(THINK, "<think>x</think>\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>{\"arguments\":"
       "{\"b\":\"</tool_call>\\\"\\u00e9\"},\"name\":\"g\"}</tool_call>",
       "T x\nC f {}\nC g {\"b\": \"</tool_call>\\\"\\u00e9\"}\n");
    IS(THINK, "<tool_call>{\"name\": \"f\"}</tool_call>done", "C f {}\nA done\n");
    IS(THINK, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"x\\\\ny\\\"}\"}</tool_call>",
       "C f {\"a\": \"x\\ny\"}\n"); /* JSON in a string */
    IS(THINK, "<tool_call>{\"id\": \"7\", \"function\": {\"name\": \"f\", \"arguments\": {}}}</tool_call>", "C f {}\n");
    IS(THINK, "<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"x\"', 'b': None,}}</tool_call>",
       "C f {\"a\": \"it's \\\"x\\\"\", \"b\": null}\n");
    IS(THINK, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}", "C f {\"a\": 1}\n"); /* no closing marker */
    IS("<tool_calls>", "a <tool_calls>[{\"name\":\"f\",\"arguments\":{},\"id\":\"1\"}, {\"name\":\"g\"}]</tool_calls>",
       "A a\nC f#1 {}\nC g {}\n");
    IS("<|START_ACTION|>", "<|START_ACTION|>[\n {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": 1}}\n]"
       "<|END_ACTION|>", "C f#0 {\"a\": 1}\n");
    IS("<|tools_prefix|>", "<|tools_prefix|>[{\"f\": {\"a\": 1}}, {\"g\": {}}]<|tools_suffix|>", "C f {\"a\": 1}\nC g {}\n");
    IS("<|tool_call|>", "<|tool_call|>[{\"name\": \"f\", \"arguments\": {}}] x", "C f {}\nA x\n");
    IS("functools[", "import functools. functools[{\"name\": \"f\", \"arguments\": {}}]", "A import functools.\nC f {}\n");
    IS("'role': 'function call'", "<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"f\", \"arguments\": {}}",
       "C f {}\n");
    IS("[TOOL_CALLS]", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": \"]\"}, \"id\": \"abc\"}, {\"name\": \"g\"}]",
       "C f#abc {\"a\": \"]\"}\nC g {}\n");
    IS("[TOOL_CALLS]", "Hm.[TOOL_CALLS]f[CALL_ID]x1[ARGS]{\"a\": {\"b\": \"}\"}}[TOOL_CALLS]g[ARGS]{}",
       "A Hm.\nC f#x1 {\"a\": {\"b\": \"}\"}}\nC g {}\n");
    IS("[TOOL_CALLS]", "[TOOL_CALLS]f{\"a\": 1}", "C f {\"a\": 1}\n");
}

static void test_bare_json(void) {
    static const char llama[] = "\"parameters\": dictionary <|python_tag|>";
    IS(llama, "{\"name\": \"f\", \"parameters\": {\"a\": \"1\"}}", "C f {\"a\": \"1\"}\n");
    IS(llama, "\n{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "C f {}\n");
    IS(llama, "{\"type\": \"function\", \"function\": \"f\", \"parameters\": {}}", "C f {}\n");
    IS(llama, "{\"name\": \"Bob\", \"age\": 3}", "A {\"name\": \"Bob\", \"age\": 3}\n");
    IS(llama, "{\"city\": \"Paris\"}", "A {\"city\": \"Paris\"}\n");
    IS(llama, "{ x }", "A { x }\n");
    IS(llama, "Answer: {\"name\": \"f\", \"parameters\": {}}", "A Answer: {\"name\": \"f\", \"parameters\": {}}\n");
    IS(llama, "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "C f {\"a\": 1}\n");
    IS(llama, "<|python_tag|>search.call(query=\"a {b}\", n=2)", "C search {\"query\": \"a {b}\", \"n\": 2}\n");
    IS(llama, "<|python_tag|>print(1)", "A <|python_tag|>print(1)\n");
    IS(NULL, "{\"name\": \"f\", \"parameters\": {}}", "A {\"name\": \"f\", \"parameters\": {}}\n");
}

#define XML "<tool_call> <function= <parameter="
static void test_xml_calls(void) {
    static const char tools[] = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"properties\": "
                                "{\"a\": {\"type\": \"string\"}, \"b\": {\"type\": \"integer\"}}}}}]";
    static const char text[] = "Hm.\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n"
                               "<parameter=c>\nline \"1\"\n\n<b>\\\n</parameter>\n</function>\n</tool_call>";
    IS(XML, text, "A Hm.\nC f {\"a\": 12, \"b\": 12, \"c\": \"line \\\"1\\\"\\n\\n<b>\\\\\"}\n");
    check(__LINE__, XML, NULL, tools, text, "A Hm.\nC f {\"a\": \"12\", \"b\": 12, \"c\": \"line \\\"1\\\"\\n\\n<b>\\\\\"}\n");
    IS(XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "C f {}\n");
    IS("<seed:tool_call>", "<seed:tool_call>\n<function=f>\n<parameter=a>['x', 'y']</parameter>\n<parameter=b>x y</parameter>\n"
       "</function>\n</seed:tool_call>", "C f {\"a\": [\"x\", \"y\"], \"b\": \"x y\"}\n");
    IS("<minimax:tool_call>", "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">1</parameter>\n</invoke>\n"
       "<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>", "C f {\"a\": 1}\nC g {}\n");
    IS("<function=", "<function=f>{\"a\": 1}</function><function=g>{}</function>", "C f {\"a\": 1}\nC g {}\n");
    IS("<tool_call> <arg_key>", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x \"y\"</arg_value>\n<arg_key>b</arg_key>\n"
       "<arg_value>[1]</arg_value>\n</tool_call>", "C f {\"a\": \"x \\\"y\\\"\", \"b\": [1]}\n");
    IS("<tool_call> <arg_key>", "<tool_call>f</tool_call>", "C f {}\n");
    IS(THINK, "<tool_call>f</tool_call>", "A <tool_call>f</tool_call>\n");
}

#define DS(text) "<\xef\xbd\x9ctool\xe2\x96\x81" text "\xef\xbd\x9c>"
#define SP "\xe2\x96\x81"
static void test_token_calls(void) {
    static const char deepseek[] = DS("calls" SP "begin");
    IS(deepseek, DS("calls" SP "begin") DS("call" SP "begin") "function" DS("sep") "f\n```json\n{\"a\": 1}\n```" DS("call" SP "end")
       "\n" DS("call" SP "begin") "g" DS("sep") "{}" DS("call" SP "end") DS("calls" SP "end"), "C f {\"a\": 1}\nC g {}\n");
    IS("<|tool_calls_section_begin|>", "a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
       "{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>", "A a\nC f#functions.f:0 {\"a\": 1}\n");
    IS("<|tool_call_start|>", "<|tool_call_start|>[f(a=1, b='it\\'s \"', c=[True, None]), x.g()]<|tool_call_end|>ok",
       "C f {\"a\": 1, \"b\": \"it's \\\"\", \"c\": [true, null]}\nC x.g {}\nA ok\n");
    IS("<|tool_call>", "<|tool_call>call:f{a:<|\"|>x\"y<|\"|>,b:[1,{c:true}]}<tool_call|><|tool_call>call:g{}<tool_call|>",
       "C f {\"a\": \"x\\\"y\", \"b\": [1, {\"c\": true}]}\nC g {}\n");
}

#define OSS "<|channel|>"
static void test_channels(void) {
    IS(OSS, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
       "T hm\nA Hello!\n");
    IS(OSS, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
       "<|message|>{\"a\": 1}<|call|>", "T hm\nC f {\"a\": 1}\n");
    IS(OSS, " to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}", "C f {\"a\": 1}\n");
    IS(OSS, "<|channel|>commentary<|message|>I will look.<|end|>", "A I will look.\n");
    IS(OSS, "<|channel|>commentary to=python<|message|>print(1)<|call|>", "A print(1)\n");
    IS(OSS, "plain text", "A plain text\n");
    IS(OSS, "<|channel|>anal", "");
    check(__LINE__, OSS, "<|start|>assistant<|channel|>final<|message|>", NULL, "Hello", "A Hello\n");
}

/* What is no call is text, all of it. */
static void test_text(void) {
    static const char *const texts[] = {
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": }}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call> x", "<tool_call></tool_call>", "<tool_call>", "a < b <tool_cal", "<tool_call>{\"name\": ",
        "<tool_call>{\"name\": \"a b\"}</tool_call>", "<tool_call>{\"name\": \"f\"} x</tool_call>", "</tool_call>", "<tool_call>{\"name\": \"f\"",
        "x\n\n<tool_call>no</tool_call>\n", "<tool_call><function=f><parameter=a>x</function></tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 01}}</tool_call>", "<tool_call>{\"name\": \"\"}</tool_call>"};
    char want[512];
    for (size_t i = 0; i < RFT_COUNT(texts); i++) {
        snprintf(want, sizeof want, "A %s\n", texts[i]);
        IS(THINK " <function=", texts[i], want);
    }
    /* A second opening: what came before was text. */
    IS(THINK, "Use <tool_call> so: <tool_call>{\"name\": \"f\"}</tool_call>", "A Use <tool_call> so: \nC f {}\n");
    /* A template that knows tools and shows no calls: all formats. */
    IS("{% if tools %}", "<tool_call>{\"name\": \"f\"}</tool_call>", "C f {}\n");
    IS("nothing", "<tool_call>{\"name\": \"f\"}</tool_call>", "A <tool_call>{\"name\": \"f\"}</tool_call>\n");
}

/* Pieces come as soon as it is decided what they are. */
static void test_at_once(void) {
    static record r;
    static const struct { const char *text, *want; } steps[] = {
        {"<", ""}, {"think>", ""}, {"I", "T I\n"}, {" think", "T I think\n"}, {" ", "T I think\n"}, {"x</th", "T I think x\n"},
        {"e", "T I think x</the\n"}, {"</think>\n", "T I think x</the\n"}, {"Hi <b", "T I think x</the\nA Hi <b\n"},
        {" <tool_call>{\"name\":\"f\"", "T I think x</the\nA Hi <b\n"}, {"}</tool_call", "T I think x</the\nA Hi <b\n"},
        {">", "T I think x</the\nA Hi <b\nC f {}\n"}};
    rf_answer *a = open_answer(THINK, NULL, NULL, &r);
    start(&r);
    for (size_t i = 0; i < RFT_COUNT(steps); i++) {
        CHECK(rf_answer_feed(a, rf_string_of(steps[i].text), NULL) == RF_OK);
        CHECK(strcmp(r.text, steps[i].want) == 0, "step %zu: want\n%sgot\n%s", i, steps[i].want, r.text);
    }
    CHECK(rf_answer_knows(a, rf_string_of("</tool_call>")) && rf_answer_knows(a, rf_string_of("<think>")));
    CHECK(!rf_answer_knows(a, rf_string_of("<|im_end|>")) && !rf_answer_knows(a, rf_string_of("[TOOL_CALLS]")) &&
          !rf_answer_knows(NULL, rf_string_of("x")) && !rf_answer_knows(a, (rf_string){0}));
    CHECK(rf_answer_close(a, NULL) == RF_OK && rf_answer_close(NULL, NULL) == RF_OK);
}

/* Long and deep bodies, too many calls: bounded, and text. */
static void test_limits(void) {
    static record r;
    static char text[100000];
    rf_answer *a = open_answer(THINK, NULL, NULL, &r);
    for (int deep = 0; deep < 2; deep++) {
        size_t n = (size_t)snprintf(text, sizeof text, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ");
        const int depth = deep ? 1000 : 50;
        for (int i = 0; i < depth; i++) text[n++] = '[';
        for (int i = 0; i < depth; i++) text[n++] = ']';
        n += (size_t)snprintf(text + n, sizeof text - n, "}}</tool_call>");
        start(&r);
        rf_answer_feed(a, (rf_string){text, n}, NULL), rf_answer_finish(a, NULL);
        CHECK(r.text[0] == (deep ? 'A' : 'C'), "depth %d: %.40s", depth, r.text);
    }
    size_t n = (size_t)snprintf(text, sizeof text, "<tool_call>");
    for (int i = 0; i < 200; i++) n += (size_t)snprintf(text + n, sizeof text - n, "{\"name\": \"f\"}");
    snprintf(text + n, sizeof text - n, "</tool_call>");
    start(&r);
    rf_answer_feed(a, rf_string_of(text), NULL), rf_answer_finish(a, NULL);
    CHECK(r.text[0] == 'A', "200 calls in one body: %.40s", r.text);
    rf_answer_close(a, NULL);

    rf_answer_desc d = {.max_bytes = 100, .on_piece = on_piece, .user = &r};
    REQUIRE(rf_answer_open(&d, &a, NULL) == RF_OK);
    start(&r);
    memset(text, 'x', 500);
    memcpy(text, "<tool_call>{\"", 13);
    for (int i = 0; i < 500; i++) rf_answer_feed(a, (rf_string){text + i, 1}, NULL);
    CHECK(r.n == 2 + 500 + 1, "%zu bytes of 500 are given out", r.n - 3);
    rf_answer_finish(a, NULL);
    start(&r);
    memset(text, ' ', 9000);
    rf_answer_feed(a, (rf_string){text, 9000}, NULL);
    CHECK(r.n > 4000, "white space is held back without a limit");
    rf_answer_close(a, NULL);
}

static void test_stop_and_memory(void) {
    static record r;
    static const char text[] = "a <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> b";
    rf_answer *a = open_answer(THINK, NULL, NULL, &r);
    rf_error err;
    for (int stop = 1; stop <= 3; stop++) {
        start(&r);
        r.stop_at = stop;
        rf_result fed = rf_answer_feed(a, rf_string_of(text), &err), finished = rf_answer_finish(a, NULL);
        CHECK((fed == RF_ERR_CANCELLED) != (finished == RF_ERR_CANCELLED) || stop < 3, "stop at %d", stop);
        CHECK(r.n_pieces >= stop && (fed != RF_ERR_CANCELLED || err.code == RF_ERR_CANCELLED), "stop at %d", stop);
    }
    rf_answer_close(a, NULL);

    int n_failures = 0;
    for (int64_t fail = 1; fail < 10; fail++) {
        memory m = {.fail_at = fail};
        rf_answer_desc d = {.on_piece = on_piece, .user = &r, .allocator = memory_allocator(&m)};
        start(&r);
        a = NULL;
        rf_result result = rf_answer_open(&d, &a, &err);
        if (result == RF_OK) result = rf_answer_feed(a, rf_string_of(text), &err);
        CHECK(result == RF_OK || (result == RF_ERR_MEMORY && err.code == RF_ERR_MEMORY), "%s", rf_result_name(result));
        n_failures += result != RF_OK;
        rf_answer_close(a, NULL);
        CHECK(m.live == 0, "%d blocks are left", (int)m.live);
    }
    CHECK(n_failures == 3, "%d allocations", n_failures);
    rf_answer_desc bad = {.allocator = {.alloc_fn = memory_alloc}};
    CHECK(rf_answer_open(NULL, NULL, &err) == RF_ERR_ARGUMENT && rf_answer_open(&bad, &a, &err) == RF_ERR_ARGUMENT);
    CHECK(rf_answer_feed(NULL, rf_string_of("x"), &err) == RF_ERR_ARGUMENT && rf_answer_finish(NULL, &err) == RF_ERR_ARGUMENT);
}

/* Hostile texts: markers without end, in every format: time is linear, so megabytes pass at once. */
static void test_linear(void) {
    static const char *const parts[] = {"<tool_call>", "<think>", "<tool_call>{\"", "[TOOL_CALLS]", "<function=", "</tool_call>", " ",
                                        "<|channel|>", "<tool_call><function=f><parameter=a>", "[TOOL_CALLS][", "<|start|>x<|message|>{",
                                        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"", "<|tool_call>call:f{a:<|\"|>"};
    char *text = malloc(1 << 20);
    for (size_t i = 0; i < RFT_COUNT(parts); i++) {
        const size_t len = strlen(parts[i]);
        size_t n = 0;
        for (; n + len < 1 << 20; n += len) memcpy(text + n, parts[i], len);
        rf_answer *a = NULL;
        rf_answer_desc d = {.max_bytes = 1 << 18};
        REQUIRE(rf_answer_open(&d, &a, NULL) == RF_OK);
        for (size_t at = 0; at < n; at += 100) rf_answer_feed(a, (rf_string){text + at, n - at < 100 ? n - at : 100}, NULL);
        CHECK(rf_answer_finish(a, NULL) == RF_OK);
        rf_answer_close(a, NULL);
    }
    free(text);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_thoughts);
    RUN(test_json_calls);
    RUN(test_bare_json);
    RUN(test_xml_calls);
    RUN(test_token_calls);
    RUN(test_channels);
    RUN(test_text);
    RUN(test_at_once);
    RUN(test_limits);
    RUN(test_stop_and_memory);
    RUN(test_linear);
    RFT_END();
}
