/* cc -O2 -I. -o test_grammar tests/test_grammar.c -lm -pthread && ./test_grammar        from the repository root
 * Grammars: schemas and texts as Python's jsonschema judges them (grammar_cases.h), GBNF worked out by hand, masks against every
 * token of the vocabulary tried byte by byte, random walks, rollback, limits, failing memory, rf_generate and the scheduler.
 * `test_grammar walk SEED`: schemas of the table and random texts that their masks allow, for make_grammar_cases.py check. */
#include "rocmforge.h"
#include <math.h>
#include <time.h>
#include "grammar_cases.h"
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

#define MODEL "examples/shakespeare-5m.gguf"

static rig r;
static const rf_tokenizer *tokenizer;
static uint32_t n_vocab;

static rf_grammar *open_grammar(rf_grammar_kind kind, const char *source, const rf_grammar_desc *desc) {
    rf_grammar *g = NULL;
    const rf_result res = rf_grammar_open(tokenizer, kind, rf_string_of(source), desc, &g, &r.err);
    CHECK((res == RF_OK) == (g != NULL));
    return g;
}
static rf_grammar_matcher *open_matcher(rf_grammar *g, uint32_t max_rollback) {
    rf_grammar_matcher *m = NULL;
    rf_grammar_matcher_open(g, max_rollback, &m, &r.err);
    return m;
}
static void close_both(rf_grammar *g, rf_grammar_matcher *m) {
    CHECK(rf_grammar_matcher_close(m, NULL) == RF_OK && rf_grammar_close(g, NULL) == RF_OK);
}

/* 1: a whole text, 0: the beginning of one, -1: none */
static int judge(rf_grammar_matcher *m, const char *text, size_t n) {
    rf_grammar_matcher_reset(m);
    if (rf_grammar_matcher_accept_text(m, (rf_string){text, n}, &r.err) != RF_OK) return -1;
    return rf_grammar_matcher_is_complete(m);
}

/* ---- languages ---- */

static void test_schemas(void) {
    rf_grammar *g = NULL;
    rf_grammar_matcher *m = NULL;
    int n_valid = 0, n_invalid = 0;
    for (size_t i = 0; i < RFT_COUNT(grammar_cases); i++) {
        const char *text = grammar_cases[i];
        if (*text == '{') {
            close_both(g, m);
            g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, text, NULL);
            REQUIRE(g, "%s: %s", text, r.err.text);
            m = open_matcher(g, 0);
            continue;
        }
        const int valid = *text++ == '+', found = judge(m, text, strlen(text)) > 0;
        CHECK(found == valid, "%s: %s", text, valid ? "valid" : "not valid");
        n_valid += valid, n_invalid += !valid;
    }
    close_both(g, m);
    CHECK(n_valid > 150 && n_invalid > 150, "%d valid, %d invalid", n_valid, n_invalid);
}

static void test_gbnf(void) {
    static const struct { const char *grammar, *texts[12]; } cases[] = { /* + whole, ~ beginning, - neither */
        {"root ::= \"a\" (\"b\" | \"c\"){2,3} [0-9]+ x?\nx ::= \"[\" x \"]\" | \".\" # comment",
         {"+abb1", "~ab", "+abcb12", "-abbbb1", "+abb1[[.]]", "~abb1[[.]", "-abb1x", "~", NULL}},
        {"# first\nroot ::= item | item \",\" root\r\nitem ::= [a-c]{2} | [^a-z\\x5d]", {"+ab", "+ab,?", "-ad", "+\xe2\x82\xac,ca", NULL}},
        {"root ::= .{2}", {"+ab", "~a", "+\xf0\x9f\x98\x80\n", "~\xf0\x9f", "-\xff", "-\xed\xa0", "-abc", NULL}},
        {"root ::= (\"x\" |\n  \"y\")*\n  | \"zz\"", {"+", "+xyxy", "+zz", "~z", "-xz", NULL}},
        {"root ::= \"\\u00e9\\x41\\n\\\"\" [\\]\\\\-]{,2}", {NULL}},
        {"root ::= \"\\u00e9\\x41\\n\\\"\" [\\]\\\\-]{0,2}", {"+\xc3\xa9" "A\n\"", "+\xc3\xa9" "A\n\"]\\", "~\xc3\xa9", "-\xc3\xa8", NULL}},
        {"root ::= a{3,} b{2} c{0}\na ::= \"a\"?\nb ::= \"b\"\nc ::= \"c\"", {"+bb", "+aaaaaabb", "-aac", "~b", NULL}},
        {"root ::= expr\nexpr ::= term (\"+\" term)*\nterm ::= [0-9] | \"(\" expr \")\"", {"+1+(2+3)", "~((1)", "-1)", "+((((((1))))))", NULL}},
        {"root ::= \"a\"* \"a\"* \"a\"* \"b\"", {"+b", "+aaaaaaaaaaaaaaaaaaaab", "~aaaa", NULL}},
        {"root ::= [\\u0080-\\u07ff] [\\U0001f600-\\U0001f64f]?", {"+\xc2\x80", "+\xdf\xbf\xf0\x9f\x98\x80", "-\xe0", "-a", NULL}},
        {"root ::= \"\" | x\nx ::= [^]", {"+", "+a", "+\n", NULL}}};
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        rf_grammar *g = open_grammar(RF_GRAMMAR_GBNF, cases[i].grammar, NULL);
        if (!cases[i].texts[0]) {
            CHECK(!g && r.err.code == RF_ERR_FORMAT, "%s", cases[i].grammar);
            continue;
        }
        REQUIRE(g, "%s: %s", cases[i].grammar, r.err.text);
        rf_grammar_matcher *m = open_matcher(g, 0);
        for (int k = 0; cases[i].texts[k]; k++) {
            const char *text = cases[i].texts[k];
            const int want = *text == '+' ? 1 : *text == '~' ? 0 : -1, found = judge(m, text + 1, strlen(text + 1));
            CHECK(found == want, "%s: %s: want %d, found %d", cases[i].grammar, text, want, found);
        }
        close_both(g, m);
    }
}

static void test_errors(void) {
    static const struct { int json; rf_result code; const char *source, *text; } cases[] = {
        {0, RF_ERR_FORMAT, "", "named root"}, {0, RF_ERR_FORMAT, "foo ::= \"a\"", "named root"},
        {0, RF_ERR_FORMAT, "root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: want each rule once"},
        {0, RF_ERR_FORMAT, "root ::= \"a\" |\n  bar \"c\"", "line 2, column 3: want a rule that is defined, found 'b'"},
        {0, RF_ERR_FORMAT, "root ::= (\"a\"", "line 1, column 14: want ')', found the end"},
        {0, RF_ERR_FORMAT, "root ::= [a", "column 10: want a class that is closed"},
        {0, RF_ERR_FORMAT, "root ::= \"a", "column 10: want a literal that is closed"},
        {0, RF_ERR_FORMAT, "root = \"a\"", "column 6: want '::='"}, {0, RF_ERR_FORMAT, "root ::= \"a\"{3,2}", "column 13: want counts"},
        {0, RF_ERR_FORMAT, "root ::= [z-a]", "rising order"}, {0, RF_ERR_FORMAT, "root ::= \"\\x4\"", "hexadecimal"},
        {0, RF_ERR_UNSUPPORTED, "root ::= \"\\q\"", "escape"}, {0, RF_ERR_FORMAT, "root ::= *", "want a rule, literal, class or group"},
        {0, RF_ERR_UNSUPPORTED, "root ::= root \"a\" | \"b\"", "rule root calls itself"},
        {0, RF_ERR_UNSUPPORTED, "root ::= \"x\" a\na ::= \"q\"? b\nb ::= (a)* \"y\"", "left recursion"},
        {0, RF_ERR_FORMAT, "root ::= \"a\" root", "no text ever matches"}, {0, RF_ERR_FORMAT, "root ::= \"\xff\"", "UTF-8"},
        {1, RF_ERR_FORMAT, "{\"type\":", "JSON schema: byte 8: want a value"}, {1, RF_ERR_FORMAT, "3", "JSON schema: #: want a schema"},
        {1, RF_ERR_UNSUPPORTED, "{\"properties\":{\"a/b\":{\"not\":{}}}}", "#/properties/a/b/not: this keyword is not supported"},
        {1, RF_ERR_UNSUPPORTED, "{\"type\":\"number\",\"minimum\":1}", "#/minimum: bounds"},
        {1, RF_ERR_UNSUPPORTED, "{\"type\":\"string\",\"format\":\"email\"}", "#/format: want date"},
        {1, RF_ERR_UNSUPPORTED, "{\"type\":\"string\",\"pattern\":\"a(?=b)\"}", "#/pattern: character 4: want a plain group"},
        {1, RF_ERR_UNSUPPORTED, "{\"items\":{\"pattern\":\"(^a)\"}}", "#/items/pattern: character 2: want ^ and $"},
        {1, RF_ERR_FORMAT, "{\"type\":\"string\",\"pattern\":\"a**\"}", NULL}, {1, RF_ERR_FORMAT, "{\"type\":\"strin\"}", "#/type: want names"},
        {1, RF_ERR_FORMAT, "{\"pattern\":\"a)\"}", "want the end of the pattern"},
        {1, RF_ERR_UNSUPPORTED, "{\"pattern\":\"a\",\"minLength\":2}", "cannot be combined"},
        {1, RF_ERR_FORMAT, "{\"$ref\":\"#/$defs/x\"}", "#/$ref: want a pointer to something that is there"},
        {1, RF_ERR_UNSUPPORTED, "{\"$ref\":\"http://x\"}", "within the document"}, {1, RF_ERR_UNSUPPORTED, "{\"$ref\":\"#\"}", "left recursion"},
        {1, RF_ERR_UNSUPPORTED, "{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"number\"}]}", "#/oneOf: want schemas that exclude"},
        {1, RF_ERR_UNSUPPORTED, "{\"type\":\"object\",\"required\":[\"q\"]}", "#/required"},
        {1, RF_ERR_UNSUPPORTED, "{\"allOf\":[{\"pattern\":\"a\"},{\"pattern\":\"b\"}]}", "pattern: stands in two schemas"},
        {1, RF_ERR_FORMAT, "{\"minLength\":-1}", "#/minLength: want a whole number"}, {1, RF_ERR_FORMAT, "false", "no text ever matches"},
        {1, RF_ERR_FORMAT, "{\"type\":\"integer\",\"minimum\":5,\"maximum\":4}", "no text ever matches"},
        {1, RF_ERR_MEMORY, "{\"type\":\"string\",\"maxLength\":100000000}", NULL}};
    const rf_grammar_desc small = {.max_memory = 8 << 20, .max_steps = 10000000};
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        rf_grammar *g = open_grammar(cases[i].json ? RF_GRAMMAR_JSON_SCHEMA : RF_GRAMMAR_GBNF, cases[i].source, &small);
        if (!cases[i].text && g) {
            rf_grammar_close(g, NULL);
            continue;
        }
        CHECK(!g && r.err.code == cases[i].code && (!cases[i].text || strstr(r.err.text, cases[i].text)), "%s: %s: %s", cases[i].source,
              rf_result_name(r.err.code), r.err.text);
        rf_grammar_close(g, NULL);
    }
}

/* ---- masks ---- */

static int has(const uint64_t *mask, int32_t id) { return (int)(mask[id / 64] >> id % 64 & 1); }

/* The mask allows exactly the tokens whose bytes the automaton accepts. */
static void check_mask(rf_grammar_matcher *m, const char *what) {
    static uint64_t copy[64];
    const uint64_t *mask = NULL;
    REQUIRE(rf_grammar_matcher_get_mask(m, &mask, &r.err) == RF_OK, "%s", r.err.text);
    REQUIRE(n_vocab <= 4096);
    memcpy(copy, mask, (n_vocab + 63) / 64 * 8);
    for (int32_t id = 0; id < (int32_t)n_vocab; id++) {
        const int is_end = rf_token_is_end(tokenizer, id), complete = rf_grammar_matcher_is_complete(m);
        rf_detokenizer state = {.tokenizer = tokenizer, .started = 1};
        char text[512];
        size_t n = 0;
        rf_detokenize(&state, id, 0, text, sizeof text, &n, NULL);
        text[n < sizeof text ? n : sizeof text - 1] = 0;
        if (state.n_held || strstr(text, "\xef\xbf\xbd")) continue; /* part of a character: see test_bytes */
        const int want = is_end ? complete : n > 0 && rf_grammar_matcher_accept_text(m, (rf_string){text, n}, NULL) == RF_OK;
        if (want && !is_end) rf_grammar_matcher_rollback(m, 1, NULL);
        CHECK(has(copy, id) == want, "%s: token %d '%.*s': want %d", what, id, (int)n, text, want);
    }
}

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((seed >> 33) % n);
}

/* A random token of the mask, -1: none. Long texts come to an end where they can. */
static int32_t pick(rf_grammar_matcher *m, uint32_t n_before) {
    const uint64_t *mask = NULL;
    int32_t ids[4096];
    uint32_t n = 0;
    if (rf_grammar_matcher_get_mask(m, &mask, &r.err) != RF_OK) return -1;
    for (int32_t id = 0; id < (int32_t)n_vocab; id++)
        if (has(mask, id)) {
            if (rf_token_is_end(tokenizer, id) && n_before > 8) return id;
            const rf_string text = rf_token_get_text(tokenizer, id);
            if (n_before > 30 && text.len && strchr("\"]}", text.data[0])) return id;
            ids[n++] = id;
        }
    return n ? ids[below(n)] : -1;
}

/* A random text; 1 if it is whole. */
static int walk(rf_grammar_matcher *m, char *out, size_t capacity) {
    rf_detokenizer state = {.tokenizer = tokenizer, .started = 1};
    size_t n = 0, n_all = 0;
    rf_grammar_matcher_reset(m);
    for (uint32_t i = 0; i < 400; i++) {
        const int32_t id = pick(m, i);
        if (id < 0) return 0;
        CHECK(rf_grammar_matcher_accept(m, id, &r.err) == RF_OK, "%s", r.err.text);
        if (rf_token_is_end(tokenizer, id)) return out[n_all] = 0, 1;
        if (rf_detokenize(&state, id, 0, out + n_all, capacity - 1 - n_all, &n, NULL) != RF_OK) return 0;
        n_all += n;
    }
    return 0;
}

static void test_masks(void) {
    static const struct { int json; const char *source, *texts[9]; } cases[] = {
        {1, "{}", {"", "[", "[1", "{\"a\"", "{\"a\": \"b", "\"\\", "12", "[[{\"x\": [", NULL}},
        {1, "{\"type\":\"string\",\"maxLength\":5}", {"", "\"", "\"ab", "\"abcd", "\"abcde", NULL}},
        {1, "{\"type\":\"string\",\"maxLength\":40}", {"\"", "\"0123456789", "\"01234567890123456789012345678901", NULL}},
        {1, "{\"type\":\"string\",\"pattern\":\"^[ -~]*$\"}", {"\"", "\"a", NULL}},
        {1, "{\"enum\":[\"the\",\"then\",\"there\",\"other\"]}", {"", "\"the", "\"th", "\"there", NULL}},
        {0, "root ::= [a-z ]* \".\" \"\\n\"?", {"", "abc", "a.", "a.\n", NULL}}, {0, "root ::= .*", {"", "\xc3\xa9", NULL}},
        {0, "root ::= [^a]{3,} | \"a\" root \"a\"", {"", "a", "aaa", "bb", "bbb", NULL}}};
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        rf_grammar *g = open_grammar(cases[i].json ? RF_GRAMMAR_JSON_SCHEMA : RF_GRAMMAR_GBNF, cases[i].source, NULL);
        REQUIRE(g, "%s", r.err.text);
        rf_grammar_matcher *m = open_matcher(g, 1);
        for (int k = 0; cases[i].texts[k]; k++) {
            REQUIRE(judge(m, cases[i].texts[k], strlen(cases[i].texts[k])) >= 0, "%s: %s", cases[i].source, cases[i].texts[k]);
            check_mask(m, cases[i].source);
        }
        close_both(g, m);
    }
}

/* What is counted: masks at every place of a text, in the order of the text and again, with small memory, from its end. */
static void test_counts(void) {
    static const struct { int json; const char *source, *text; } cases[] = {
        {0, "root ::= [a-z ]{0,18}", "the king and queen"}, {0, "root ::= [a-z ]{3,40}", "the king and the queen are in the garden"},
        {0, "root ::= [^x]{30,60} \"x\"", "So it is, and \xc3\xa9t\xc3\xa9 \"they\" said:\nthe king, the queen.x"},
        {0, "root ::= ([a-z]{2,30} \" \"){1,20} [0-9]{1,3}", "what shall we do with the king who was there before us 12"},
        {0, "root ::= \"a\"{25,} \"b\"", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"}, {0, "root ::= (\"a\"?){30} \"the\"{20,50}", "aathethethethethethethethethethethethethethethethethethethethe"},
        {0, "root ::= ([a-z] [a-z]*){2,40} [A-Z]{0,30}", "thekingandthequeenTHEKING"},
        {1, "{\"type\":\"string\",\"maxLength\":50}", "\"It was the king's, \\u00e9 and the \xe2\x82\xac of the world then\""},
        {1, "{\"type\":\"string\",\"minLength\":20,\"maxLength\":60}", "\"The king and the queen are there.\""},
        {1, "{\"type\":\"array\",\"maxItems\":30,\"minItems\":2,\"items\":{\"type\":\"string\",\"maxLength\":25}}",
         "[\"the king\", \"queen\",\"\",\"\",\"\",\"\",\"\",\"and the queen of the land\"]"},
        {1, "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"}],\"maxItems\":26,\"minItems\":24,\"items\":{\"enum\":[1,22]}}",
         "[7,1,22,1, 22,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,22,1,22]"},
        {1, "{\"type\":\"string\",\"pattern\":\"^([a-c]{1,40}-){0,20}[A-Z]+$\"}", "\"a-bbb-abcabcabcabcabcabcabcabcabcabcabcabcab-c-THE\""}};
    const rf_grammar_desc small = {.max_memory = 1 << 20};
    for (size_t i = 0; i < 2 * RFT_COUNT(cases); i++) {
        const char *source = cases[i / 2].source, *text = cases[i / 2].text;
        rf_grammar *g = open_grammar(cases[i / 2].json ? RF_GRAMMAR_JSON_SCHEMA : RF_GRAMMAR_GBNF, source, i % 2 ? &small : NULL);
        REQUIRE(g, "%s: %s", source, r.err.text);
        rf_grammar_matcher *m = open_matcher(g, 1);
        const size_t n = strlen(text);
        for (size_t k = 0; k <= n; k++) {
            const size_t at = i % 2 ? n - k : k;
            REQUIRE(judge(m, text, at) >= 0, "%s: %.*s", source, (int)at, text);
            if (!((unsigned char)text[at] & 0x80)) check_mask(m, source);
        }
        close_both(g, m);
    }
}

/* ---- a large vocabulary ---- */

/* A word, number, sign, run of spaces or text in another script, as large vocabularies have them. Returns its bytes; '\1': a space. */
static uint32_t make_word(uint64_t *state, char *out) {
    static const char letters[] = "eeeeeeeeeeetttttttttaaaaaaaaooooooooiiiiiiinnnnnnnsssssshhhhhhrrrrrrddddlllluuucccmmmwwffggyyppbbvkjxqz";
    static const char signs[] = "()[]{}<>=+-*/;:,.!?#$%&@_|~^`'\"\n";
    uint32_t n = 0;
#define PICK(n) (*state = *state * 6364136223846793005u + 1442695040888963407u, (uint32_t)(*state >> 33) % (uint32_t)(n))
    const uint32_t kind = PICK(100), many = kind < 76 ? 1 + PICK(5) + PICK(6) : 1 + PICK(40);
    if (kind % 5 < 3) out[n++] = '\1';
    for (uint32_t i = 0; kind < 75 && i < many; i++) out[n++] = (char)(letters[PICK(sizeof letters - 1)] - (PICK(i ? 50 : 5) == 0 ? 32 : 0));
    for (uint32_t i = 0; kind == 75 && i < many % 4; i++) out[n++] = (char)('0' + PICK(10));
    for (uint32_t i = 0; kind > 75 && kind < 83 && i <= many % 6; i++) out[n++] = signs[PICK(sizeof signs - 1)];
    for (uint32_t i = 0; kind == 83 && i < many; i++) out[n++] = "\1\n-="[many % 4];
    for (uint32_t i = 0; kind > 83 && i <= many % 4; i++) {
        const uint32_t c = kind % 3 ? 0x430 + PICK(16) : 0x4e00 + PICK(8000);
        if (c < 0x800) out[n++] = (char)(0xc0 | c >> 6);
        else out[n++] = (char)(0xe0 | c >> 12), out[n++] = (char)(0x80 | (c >> 6 & 63));
        out[n++] = (char)(0x80 | (c & 63));
    }
#undef PICK
    if (n == 0) out[n++] = 'a';
    out[n] = 0;
    return n;
}

static int by_time(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Of n tokens: control tokens, bytes and distinct words. */
static rf_result open_large(uint32_t n, rf_gguf **g, rf_tokenizer **t, mg_buf *file) {
    char *memory = malloc((size_t)n * 64), **words = malloc(2 * n * sizeof *words), **list = words + n, *end = memory;
    float *score = calloc(n, sizeof *score);
    int32_t *type = calloc(n, sizeof *type);
    uint64_t state = 7;
    uint32_t n_words = 0, n_list = 0;
    mg_gguf w;
    while (n_words < n - 259) { /* distinct ones: sort, drop twins, add again */
        for (; n_words < n - 259; n_words++) words[n_words] = end, end += make_word(&state, end) + 1;
        qsort(words, n_words, sizeof *words, by_text);
        for (uint32_t i = n_words = 0; i < n - 259; i++)
            if (n_words == 0 || strcmp(words[i], words[n_words - 1]) != 0) words[n_words++] = words[i];
        if (end - memory > (ptrdiff_t)n * 48) break;
    }
    for (; n_list < 259; n_list++) {
        list[n_list] = end, type[n_list] = n_list < 3 ? 3 : 6;
        end += sprintf(end, n_list < 3 ? "<s%02X>" : "<0x%02X>", n_list < 3 ? n_list : n_list - 3) + 1;
    }
    for (uint32_t i = 0; i < n_words; i++) {
        const char *from = words[i];
        list[n_list] = end, type[n_list] = 1, score[n_list++] = -(float)i;
        for (; *from && end - memory < (ptrdiff_t)n * 64 - 8; from++) {
            if (*from == '\1') memcpy(end, "\xe2\x96\x81", 3), end += 3;
            else *end++ = *from;
        }
        *end++ = 0;
    }
    mg_begin(&w, 3);
    mg_kv_str(&w, "general.architecture", "llama");
    mg_kv_str(&w, "tokenizer.ggml.model", "llama");
    mg_kv_str(&w, "tokenizer.ggml.pre", "default");
    mg_kv_arr_str(&w, "tokenizer.ggml.tokens", (const char *const *)list, n_list);
    mg_kv_arr_f32(&w, "tokenizer.ggml.scores", score, n_list);
    mg_kv_arr_i32(&w, "tokenizer.ggml.token_type", type, n_list);
    mg_kv_u32(&w, "tokenizer.ggml.bos_token_id", 1);
    mg_kv_u32(&w, "tokenizer.ggml.eos_token_id", 2);
    mg_finish(&w, file);
    free(memory), free(words), free(score), free(type);
    const rf_result res = rf_gguf_open_memory(file->data, file->n, NULL, g, &r.err);
    return res == RF_OK ? rf_tokenizer_open(*g, NULL, t, &r.err) : res;
}

/* Masks of 150,000 tokens at every place of a text: each 97th token tried by itself, and the time that the masks take. */
static void test_large_vocabulary(void) {
    static const struct { int json; const char *source, *text; } cases[] = {
        {0, "root ::= [a-z ]{3,40}", "the king and the queen are in the garden"},
        {0, "root ::= [^x]{30,60} \"x\"", "So it is, and \xc3\xa9t\xc3\xa9 they said:\nthe king, the queen.x"},
        {0, "root ::= ([a-z]{2,30} \" \"){1,20} [0-9]{1,3}", "what shall we do with the king who was there before us 12"},
        {0, "root ::= [a-m]{1,20} [n-z]{1,20}", "abcdefghijklmnopqrstuvwxyz"}, {0, "root ::= [a-zA-Z]+ [.!?] [A-Z ]{0,9} \"x\"?", "Then?A KINGx"},
        {0, "root ::= [\\u4e00-\\u9fff]{2,30} \"a\"*", "\xe4\xb8\xad\xe6\x96\x87\xe4\xb8\xad\xe6\x96\x87" "aa"},
        {0, "root ::= ([a-z] [a-z]*){2,40} [A-Z]{0,30}", "thekingandthequeenTHEKING"},
        {1, "{\"type\":\"string\",\"maxLength\":50}", "\"It was the king's and the \xe2\x82\xac of the world then\""},
        {1, "{\"type\":\"string\",\"minLength\":20,\"maxLength\":36}", "\"The king and the queen are there.\""},
        {1, "{\"type\":\"string\",\"pattern\":\"^[a-z]{2,12}@[a-z]{2,12}[.][a-z]{2,3}$\"}", "\"theking@thequeen.org\""},
        {1, "{\"type\":\"array\",\"maxItems\":5,\"minItems\":2,\"items\":{\"type\":\"string\",\"maxLength\":25}}", "[\"the king\", \"queen\",\"\"]"},
        {1, "{}", "{\"name\": \"The king, of it\", \"age\": 123.5e3, \"tags\": [\"a b\", null]}"}};
    rf_gguf *file = NULL;
    rf_tokenizer *t = NULL, *const before = (rf_tokenizer *)(uintptr_t)tokenizer;
    mg_buf bytes = {0};
    REQUIRE(open_large(150000, &file, &t, &bytes) == RF_OK, "%s", r.err.text);
    const uint32_t n_tokens = rf_tokenizer_get_info(t).n_vocab;
    double times[600], worst = 0;
    uint32_t n_times = 0, n_wrong = 0, n_allowed = 0;
    tokenizer = t;
    for (size_t i = 0; i < RFT_COUNT(cases); i++) {
        const char *text = cases[i].text;
        rf_grammar *g = open_grammar(cases[i].json ? RF_GRAMMAR_JSON_SCHEMA : RF_GRAMMAR_GBNF, cases[i].source, NULL);
        REQUIRE(g, "%s: %s", cases[i].source, r.err.text);
        rf_grammar_matcher *m = open_matcher(g, 1);
        for (size_t k = 0; k <= strlen(text); k++) {
            const uint64_t *mask = NULL;
            REQUIRE(judge(m, text, k) >= 0, "%s: %.*s", cases[i].source, (int)k, text);
            if (((unsigned char)text[k] & 0xc0) == 0x80) continue;
            const clock_t start = clock();
            REQUIRE(rf_grammar_matcher_get_mask(m, &mask, &r.err) == RF_OK, "%s", r.err.text);
            times[n_times] = (double)(clock() - start) / CLOCKS_PER_SEC;
            if (times[n_times] > worst) worst = times[n_times];
            n_times++;
            for (uint32_t id = (uint32_t)(k % 97); id < n_tokens; id += 97) {
                const int allowed = rf_grammar_matcher_accept(m, (int32_t)id, NULL) == RF_OK;
                if (allowed && rf_token_is_end(t, (int32_t)id)) rf_grammar_matcher_reset(m), judge(m, text, k);
                else if (allowed) REQUIRE(rf_grammar_matcher_rollback(m, 1, &r.err) == RF_OK, "%s", r.err.text);
                n_wrong += allowed != has(mask, (int32_t)id), n_allowed += (uint32_t)allowed;
            }
        }
        CHECK(n_wrong == 0, "%s: %u tokens", cases[i].source, n_wrong);
        close_both(g, m);
    }
    tokenizer = before;
    qsort(times, n_times, sizeof *times, by_time);
    printf("    %u tokens, %u masks: median %.0f us, worst %.0f us\n", n_tokens, n_times, 1e6 * times[n_times / 2], 1e6 * worst);
    CHECK(n_tokens > 145000 && n_allowed > 20000 && worst < 0.05, "%u tokens, %u allowed, %g s", n_tokens, n_allowed, worst);
    CHECK(rf_tokenizer_close(t, NULL) == RF_OK && rf_gguf_close(file, NULL) == RF_OK);
    mg_free(&bytes);
}

/* Tokens of single bytes lead through a character byte by byte. */
static void test_bytes(void) {
    rf_grammar *g = open_grammar(RF_GRAMMAR_GBNF, "root ::= [\\u20ac\\u00e9]", NULL);
    REQUIRE(g, "%s", r.err.text);
    rf_grammar_matcher *m = open_matcher(g, 4);
    int32_t ids[8];
    uint32_t n = 0;
    REQUIRE(rf_tokenize(tokenizer, rf_string_of("\xe2\x82\xac"), 0, ids, 8, &n, NULL) == RF_OK && n == 3, "%u", n);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t *mask = NULL;
        CHECK(rf_grammar_matcher_get_mask(m, &mask, NULL) == RF_OK && has(mask, ids[i]) && !has(mask, ids[(i + 1) % 3]), "%u", i);
        CHECK(rf_grammar_matcher_accept(m, ids[i], &r.err) == RF_OK, "%s", r.err.text);
    }
    CHECK(rf_grammar_matcher_is_complete(m) && rf_grammar_matcher_rollback(m, 3, NULL) == RF_OK && !rf_grammar_matcher_is_complete(m));
    CHECK(rf_grammar_matcher_accept(m, ids[1], NULL) == RF_ERR_ARGUMENT && rf_grammar_matcher_accept(m, ids[0], NULL) == RF_OK);
    close_both(g, m);
}

/* What masks allow is what the automaton reads, and comes to an end. */
static void test_walks(void) {
    char text[8192];
    uint32_t n_whole = 0;
    for (size_t i = 0; i < RFT_COUNT(grammar_cases); i++) {
        if (*grammar_cases[i] != '{') continue;
        rf_grammar *g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, grammar_cases[i], NULL);
        rf_grammar_matcher *m = open_matcher(g, 0);
        for (int k = 0; k < 3; k++)
            if (walk(m, text, sizeof text)) {
                CHECK(judge(m, text, strlen(text)) == 1, "%s: %s", grammar_cases[i], text);
                n_whole++;
            }
        close_both(g, m);
    }
    CHECK(n_whole > 80, "%u whole texts", n_whole);
}

/* ---- states ---- */

static void test_rollback(void) {
    rf_grammar *g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, "{\"type\":\"array\"}", NULL);
    rf_grammar_matcher *m = open_matcher(g, 3), *copy = NULL;
    for (int i = 0; i < 5; i++) CHECK(rf_grammar_matcher_accept_text(m, rf_string_of("["), NULL) == RF_OK);
    CHECK(rf_grammar_matcher_copy(m, &copy, NULL) == RF_OK);
    CHECK(rf_grammar_close(g, NULL) == RF_ERR_BUSY);
    CHECK(rf_grammar_matcher_rollback(m, 4, NULL) == RF_ERR_ARGUMENT && rf_grammar_matcher_rollback(m, 3, NULL) == RF_OK);
    CHECK(rf_grammar_matcher_rollback(m, 1, NULL) == RF_ERR_ARGUMENT);
    CHECK(rf_grammar_matcher_accept_text(m, rf_string_of("]]"), NULL) == RF_OK && rf_grammar_matcher_is_complete(m));
    CHECK(rf_grammar_matcher_accept_text(m, rf_string_of("]"), NULL) == RF_ERR_ARGUMENT && rf_grammar_matcher_is_complete(m));
    CHECK(rf_grammar_matcher_accept_text(copy, rf_string_of("]]]]"), NULL) == RF_OK && !rf_grammar_matcher_is_complete(copy));
    CHECK(rf_grammar_matcher_accept_text(copy, rf_string_of("]"), NULL) == RF_OK && rf_grammar_matcher_is_complete(copy));
    rf_grammar_matcher_reset(copy);
    CHECK(rf_grammar_matcher_rollback(copy, 1, NULL) == RF_ERR_ARGUMENT && rf_grammar_matcher_accept_text(copy, rf_string_of("[]"), NULL) == RF_OK);
    rf_grammar_matcher_close(copy, NULL);
    close_both(g, m);
}

/* Little memory: states are forgotten and made again, and another matcher stays where it is. */
static void test_collection(void) {
    const rf_grammar_desc desc = {.max_memory = 768 << 10};
    rf_grammar *g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, "{}", &desc);
    REQUIRE(g, "%s", r.err.text);
    rf_grammar_matcher *m = open_matcher(g, 2), *other = open_matcher(g, 2);
    CHECK(rf_grammar_matcher_accept_text(other, rf_string_of("[{\"a\":"), NULL) == RF_OK);
    char text[400];
    for (int i = 0; i < 3000; i++) {
        rf_grammar_matcher_reset(m);
        size_t n = 0;
        for (uint32_t depth = 1 + below(60); depth > 0; depth--) n += (size_t)sprintf(text + n, below(2) ? "[" : "{\"\":");
        const uint64_t *mask;
        REQUIRE(rf_grammar_matcher_accept_text(m, (rf_string){text, n}, &r.err) == RF_OK, "%d: %s", i, r.err.text);
        REQUIRE(i % 16 || rf_grammar_matcher_get_mask(m, &mask, &r.err) == RF_OK, "%d: %s", i, r.err.text);
    }
    check_mask(m, "after collections");
    CHECK(rf_grammar_matcher_accept_text(other, rf_string_of("1}]"), &r.err) == RF_OK && rf_grammar_matcher_is_complete(other), "%s", r.err.text);
    rf_grammar_matcher_close(other, NULL);
    close_both(g, m);
}

static void test_limits(void) {
    static const char *const hostile[] = {
        "root ::= (((\"a\"*)*)*)* \"b\"", "root ::= (\"a\" | \"aa\"){0,900} \"b\"", "root ::= (\"a\"?){5000} \"b\"",
        "root ::= a a a a a a a a a a a a \"b\"\na ::= b b b b b b b b\nb ::= c c c c c c c c\nc ::= d d d d d d d d | \"a\"\nd ::= \"a\"?",
        "root ::= x \"b\"\nx ::= \"a\" x x x | \"a\"?", "root ::= [a]{0,20000} [a]{0,20000} \"b\""};
    const rf_grammar_desc small = {.max_memory = 16 << 20, .max_steps = 300000};
    char text[300];
    memset(text, 'a', sizeof text);
    for (size_t i = 0; i < RFT_COUNT(hostile); i++) {
        rf_grammar *g = open_grammar(RF_GRAMMAR_GBNF, hostile[i], &small);
        if (!g) {
            CHECK(r.err.code == RF_ERR_UNSUPPORTED || r.err.code == RF_ERR_MEMORY, "%s", r.err.text);
            continue;
        }
        rf_grammar_matcher *m = open_matcher(g, 0);
        const uint64_t *mask;
        for (size_t n = 0; n < sizeof text; n++) {
            rf_result res = rf_grammar_matcher_accept_text(m, (rf_string){text, 1}, &r.err);
            if (res == RF_OK) res = rf_grammar_matcher_get_mask(m, &mask, &r.err);
            if (res != RF_OK) {
                CHECK(res == RF_ERR_UNSUPPORTED || res == RF_ERR_MEMORY || n > 0, "%s", r.err.text);
                break;
            }
        }
        close_both(g, m);
    }
    char deep[2000], *p = deep + sprintf(deep, "root ::= ");
    memset(p, '(', 900), p[900] = 0;
    CHECK(!open_grammar(RF_GRAMMAR_GBNF, deep, NULL) && r.err.code == RF_ERR_UNSUPPORTED && strstr(r.err.text, "max_depth"), "%s", r.err.text);
}

static void test_failing_memory(void) {
    memory mem = {0};
    const rf_grammar_desc desc = {.allocator = memory_allocator(&mem)};
    int done = 0;
    for (int64_t fail_at = 1; !done && fail_at < 500; fail_at++) {
        mem.calls = 0, mem.fail_at = fail_at;
        rf_grammar *g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, "{\"type\":\"object\",\"properties\":{\"a\":{\"enum\":[1,\"b\"]}},"
                                     "\"additionalProperties\":{\"pattern\":\"^a{2}\"}}", &desc);
        CHECK(g || r.err.code == RF_ERR_MEMORY, "%s", r.err.text);
        rf_grammar_matcher *m = g ? open_matcher(g, 1) : NULL;
        const uint64_t *mask;
        rf_result res = m ? rf_grammar_matcher_accept_text(m, rf_string_of("{\"a\": "), &r.err) : RF_ERR_MEMORY;
        if (res == RF_OK) res = rf_grammar_matcher_get_mask(m, &mask, &r.err);
        CHECK(res == RF_OK || res == RF_ERR_MEMORY, "%s", r.err.text);
        done = res == RF_OK && mem.calls < fail_at;
        if (m) mem.fail_at = 0, check_mask(m, "after a failure");
        close_both(g, m);
        CHECK(mem.live == 0, "%lld blocks leak", (long long)mem.live);
    }
    CHECK(done);
}

/* ---- with a model ---- */

typedef struct output {
    char text[4096];
    size_t n;
} output;
static int on_piece(const rf_piece *p, void *user) {
    output *o = user;
    if (o->n + p->text.len < sizeof o->text) memcpy(o->text + o->n, p->text.data, p->text.len), o->n += p->text.len;
    return 0;
}
static void generate(rf_grammar *g, rf_sampler *sampler, output *o, rf_generate_result *result) {
    *o = (output){.n = 0};
    const rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 240, .on_piece = on_piece, .user = o, .grammar = g, .sampler = sampler};
    rf_session_truncate(r.s, 0, 0, NULL, NULL);
    CHECK(rf_generate(r.s, &d, result, &r.err) == RF_OK, "%s", r.err.text);
}

static void test_generate(void) {
    static output free_text, all, form;
    rf_generate_result result;
    rf_sampler sampler;
    rf_grammar *any = open_grammar(RF_GRAMMAR_GBNF, "root ::= .*", NULL);
    rf_grammar *g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":20},"
                                 "\"age\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":120}},\"required\":[\"name\",\"age\"]}", NULL);
    REQUIRE(any && g, "%s", r.err.text);
    generate(NULL, NULL, &free_text, &result);
    generate(any, NULL, &all, &result);
    CHECK(free_text.n > 20 && free_text.n == all.n && memcmp(free_text.text, all.text, all.n) == 0, "'%s' '%s'", free_text.text, all.text);
    rf_grammar_matcher *m = open_matcher(g, 0);
    for (uint64_t k = 0; k < 4; k++) {
        rf_sampler_init(&sampler, &(rf_sampler_desc){.temperature = (float)k, .seed = k}, NULL);
        generate(g, &sampler, &form, &result);
        CHECK(result.finish == RF_FINISH_END && judge(m, form.text, form.n) == 1, "%d: %s", result.finish, form.text);
        CHECK(sampler.desc.grammar == NULL);
    }
    close_both(g, m);
    rf_grammar_close(any, NULL);
}

typedef struct client {
    rf_sampler sampler;
    rf_grammar_matcher *m;
    rf_result reason;
    int ended;
} client;
static void on_end(rf_result reason, void *user) { ((client *)user)->reason = reason, ((client *)user)->ended = 1; }

/* Two requests with grammars of their own beside one without. */
static void test_scheduler(void) {
    static client clients[3];
    static const char *const sources[2] = {"root ::= [0-9]{5}", "root ::= \"yes\" | \"no\""};
    rf_grammar *g[2];
    int32_t prompt[16];
    uint32_t n = 0, active = 1;
    rf_scheduler *s = NULL;
    REQUIRE(rf_tokenize(tokenizer, rf_string_of("ROMEO:\n"), 0, prompt, 16, &n, NULL) == RF_OK);
    REQUIRE(rf_scheduler_open(r.s, tokenizer, 4, &s, &r.err) == RF_OK, "%s", r.err.text);
    for (int i = 0; i < 3; i++) {
        clients[i] = (client){.ended = 0};
        if (i < 2) g[i] = open_grammar(RF_GRAMMAR_GBNF, sources[i], NULL), clients[i].m = open_matcher(g[i], 0);
        rf_sampler_init(&clients[i].sampler, &(rf_sampler_desc){.grammar = clients[i].m}, NULL);
        const rf_request request = {.prompt = prompt, .n_prompt = n, .max_tokens = 20, .sampler = &clients[i].sampler, .on_end = on_end, .user = &clients[i]};
        CHECK(rf_scheduler_submit(s, &request, &r.err) == RF_OK, "%s", r.err.text);
    }
    for (int i = 0; active && i < 100; i++) CHECK(rf_scheduler_step(s, &active, &r.err) == RF_OK, "%s", r.err.text);
    for (int i = 0; i < 3; i++) {
        CHECK(clients[i].ended && clients[i].reason == RF_OK, "%d: %s", i, rf_result_name(clients[i].reason));
        if (i == 2) break;
        CHECK(rf_grammar_matcher_is_complete(clients[i].m));
        close_both(g[i], clients[i].m);
    }
    CHECK(rf_scheduler_close(s, NULL) == RF_OK);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    if (!rig_open(&r, &(rig_how){.path = MODEL, .session = &(rf_session_desc){.n_ctx = 256, .n_seq_max = 4, .n_batch = 64, .n_logits_max = 4}})) return 1;
    rf_model_get_tokenizer(r.m, &tokenizer, NULL);
    n_vocab = r.n_vocab;
    if (argc > 2 && !strcmp(argv[1], "walk")) {
        static char text[8192];
        seed = strtoull(argv[2], NULL, 10);
        for (size_t i = 0; i < RFT_COUNT(grammar_cases); i++) {
            if (*grammar_cases[i] != '{') continue;
            rf_grammar *g = open_grammar(RF_GRAMMAR_JSON_SCHEMA, grammar_cases[i], NULL);
            rf_grammar_matcher *m = open_matcher(g, 0);
            for (int k = 0; k < 20; k++)
                if (walk(m, text, sizeof text)) {
                    for (char *p = text; *p; p++) if (*p == '\n') *p = ' '; /* white space between values: strings have none */
                    printf("%s\t%s\n", grammar_cases[i], text);
                }
            close_both(g, m);
        }
        rig_close(&r);
        return 0;
    }
    RUN(test_schemas);
    RUN(test_gbnf);
    RUN(test_errors);
    RUN(test_masks);
    RUN(test_counts);
    RUN(test_large_vocabulary);
    RUN(test_bytes);
    RUN(test_walks);
    RUN(test_rollback);
    RUN(test_collection);
    RUN(test_limits);
    RUN(test_failing_memory);
    RUN(test_generate);
    RUN(test_scheduler);
    rig_close(&r);
    RFT_END();
}
