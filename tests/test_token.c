/* Tokenizers: the shipped model's golden ids, small vocabularies with ids worked out by hand, words of each
 * pre-tokenizer, the streaming decoder, malformed metadata, failing memory, a megabyte of one character; and, where
 * ../shared/zoo lies beside the repository, llama.cpp's texts of the ids of 326 strings (test_zoo.sh compares the ids). */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_memory.h"
#include "rf_test.h"

#define SP MG_SPACE
#define K "tokenizer.ggml."
#define FFFD "\xef\xbf\xbd"

/* ---- help ---- */

static memory mem; /* of all files and tokenizers */

static void *get(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    if (!p) abort();
    return p;
}

typedef struct opened {
    mg_buf file;
    rf_gguf *g;
    rf_tokenizer *t;
    rf_error err;
} opened;

/* Finish the file and open its tokenizer; o->t is NULL and o->err filled if that is refused. */
static void open_file(opened *o, mg_gguf *w, const char *pre) {
    rf_gguf_desc desc = {.allocator = memory_allocator(&mem)};
    memset(o, 0, sizeof *o);
    mg_finish(w, &o->file);
    if (rf_gguf_open_memory(o->file.data, o->file.n, &desc, &o->g, &o->err) == RF_OK)
        rf_tokenizer_open(o->g, pre, &o->t, &o->err);
}
static void close_file(opened *o) {
    rf_tokenizer_close(o->t, NULL);
    rf_result r = rf_gguf_close(o->g, NULL);
    CHECK(r == RF_OK, "the tokenizer still holds its file: %d", r);
    mg_free(&o->file);
    CHECK(mem.live == 0, "%lld blocks leak", (long long)mem.live);
    mem.live = 0;
}

/* The vocabularies of make_gguf.h: SPM, or BPE under a pre-tokenizer. */
static void open_made(opened *o, const char *pre) {
    mg_gguf w;
    mg_begin(&w, 3);
    mg_put_vocab(&w, pre != NULL, pre, 320);
    open_file(o, &w, NULL);
    CHECK(o->t, "%s", o->err.text);
}

/* A vocabulary written out: NULL-terminated lists; a type letter a token: n(ormal) c(ontrol) u(ser) x (unknown) */
typedef struct small {
    const char *model, *pre, *types;
    const char *tokens[24], *merges[24];
    float scores[24];
    int bos, eos; /* 0: none */
    const char *name;
} small;

static void open_small(opened *o, const small *s) {
    static const char letters[] = "?nxcu.b";
    mg_gguf w;
    int32_t types[24];
    size_t n = 0, n_merges = 0;
    for (; n < 24 && s->tokens[n]; n++) types[n] = (int32_t)(strchr(letters, s->types[n]) - letters);
    while (n_merges < 24 && s->merges[n_merges]) n_merges++;
    mg_begin(&w, 3);
    if (s->name) mg_kv_str(&w, "general.name", s->name);
    mg_kv_str(&w, K "model", s->model);
    if (s->pre) mg_kv_str(&w, K "pre", s->pre);
    mg_kv_arr_str(&w, K "tokens", s->tokens, n);
    mg_kv_arr_i32(&w, K "token_type", types, n);
    if (strcmp(s->model, "llama") == 0 || strcmp(s->model, "t5") == 0) mg_kv_arr_f32(&w, K "scores", s->scores, n);
    else if (strcmp(s->model, "gpt2") == 0) mg_kv_arr_str(&w, K "merges", s->merges, n_merges);
    if (s->bos) mg_kv_u32(&w, K "bos_token_id", (uint32_t)s->bos);
    if (s->eos) mg_kv_u32(&w, K "eos_token_id", (uint32_t)s->eos);
    open_file(o, &w, NULL);
    CHECK(o->t, "%s", o->err.text);
}

/* ids as text, "1 2 3" */
static void ids_text(char *out, size_t capacity, const int32_t *ids, uint32_t n) {
    size_t at = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < n && at + 16 < capacity; i++)
        at += (size_t)snprintf(out + at, capacity - at, "%s%d", i ? " " : "", ids[i]);
}

static void expect_n(const rf_tokenizer *t, const char *text, size_t n_bytes, uint32_t flags, const char *want,
                     int line) {
    int32_t ids[256] = {0};
    uint32_t n = 0;
    rf_error err;
    char got[4096];
    rf_result r = t ? rf_tokenize(t, (rf_string){text, n_bytes}, flags, ids, 256, &n, &err) : RF_ERR_ARGUMENT;
    ids_text(got, sizeof got, ids, r == RF_OK ? n : 0);
    CHECK(r == RF_OK && strcmp(got, want) == 0, "line %d: \"%s\": want %s, got %s (%d)", line, text, want, got, r);
}
#define EXPECT(o, text, flags, want) expect_n((o).t, text, strlen(text), flags, want, __LINE__)

/* Text of ids, token by token; the caller frees. */
static char *detok(const rf_tokenizer *t, const int32_t *ids, uint32_t n, uint32_t flags, size_t *n_bytes) {
    rf_detokenizer state = {.tokenizer = t};
    rf_error err;
    size_t capacity = 64 * ((size_t)n + 1), at = 0, count;
    char *out = (char *)get(capacity);
    for (uint32_t i = 0; i <= n; i++) {
        uint32_t f = flags | (i == n ? RF_DETOKENIZE_FINISH : 0);
        rf_result r = rf_detokenize(&state, i == n ? -1 : ids[i], f, out + at, capacity - at, &count, &err);
        CHECK(r == RF_OK, "%s", err.text);
        if (r == RF_OK) at += count;
    }
    *n_bytes = at;
    return out;
}

/* ---- the shipped model ---- */

static int have_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f) fclose(f);
    return f != NULL;
}

static const char example_path[] = "examples/shakespeare-5m.gguf";

static void test_shipped_model(void) {
    static const char text[] = "ROMEO:\nWhat light is this that breaks upon the night?\n\nJULIET:\n";
    static const int32_t answer[] = {40, 459, 725, 423, 11, 295, 459, 725, 423, 11, 299, 349, 763, 258, 198, 404, 12,
                                     76, 784, 290, 308, 258, 256, 64, 314, 11, 299, 258, 719, 82, 198, 404};
    opened o = {.t = NULL};
    REQUIRE(rf_gguf_open(example_path, NULL, &o.g, &o.err) == RF_OK, "%s", o.err.text);
    CHECK(rf_tokenizer_open(o.g, NULL, &o.t, &o.err) == RF_OK, "%s", o.err.text);
    EXPECT(o, text, RF_TOKENIZE_ADD, "1022 846 268 477 364 355 330 370 327 770 584 82 605 267 869 367 996 268");
    rf_tokenizer_info info = rf_tokenizer_get_info(o.t);
    CHECK(strcmp(info.model, "gpt2") == 0 && strcmp(info.pre, "llama-bpe") == 0 && info.n_vocab == 1024 &&
              info.bos == 1022 && info.eos == 1023 && info.eot == -1 && info.add_bos == 1 && info.add_eos == 0,
          "%s %s %u", info.model, info.pre, info.n_vocab);
    CHECK(rf_token_is_end(o.t, 1023) && !rf_token_is_end(o.t, 1022) && !rf_token_is_end(o.t, -1), "ends");
    int32_t ids[64];
    uint32_t n;
    size_t n_bytes;
    REQUIRE(rf_tokenize(o.t, rf_string_of(text), RF_TOKENIZE_ADD, ids, 64, &n, NULL) == RF_OK, "tokenize");
    char *back = detok(o.t, ids, n, 0, &n_bytes);
    CHECK(n_bytes == strlen(text) && memcmp(back, text, n_bytes) == 0, "%.*s", (int)n_bytes, back);
    free(back);
    back = detok(o.t, answer, RFI_COUNT(answer), 0, &n_bytes);
    static const char said[] =
        "I'll tell thee, I'll tell thee, and thou art a\nTo-morrow to be a tale, and a words\nTo";
    CHECK(n_bytes == strlen(said) && memcmp(back, said, n_bytes) == 0, "%.*s", (int)n_bytes, back);
    free(back);
    close_file(&o);
}

/* ---- words ---- */

/* The words of a text, cut by `|` in want; where the text holds a `|` itself, \x01 cuts. */
typedef struct word_case {
    const char *pre, *text, *want;
} word_case;

static void test_words(void) {
    static const word_case cases[] = {
        {"llama3", "Hello world", "Hello| world"},
        {"llama3", "I'M we'll 'tis don't'", "I|'M| we|'ll| '|tis| don|'t|'"},
        {"llama3", "'sab 's we'LLx", "'s|ab| '|s| we|'LL|x"},
        {"llama3", "1234567 89", "123|456|7| |89"},
        {"llama3", "a\xc2\xbd\xd9\xa1\xd9\xa2\xd9\xa3", "a|\xc2\xbd\xd9\xa1\xd9\xa2|\xd9\xa3"}, /* half, Arabic */
        {"llama3", "(foo) {\n\n  bar\n}", "(foo|)| {\n\n| | bar|\n|}"},
        {"llama3", "a  \n \n  b", "a|  \n \n| | b"},
        {"llama3", "  x   ", " | x|   "},
        {"llama3", "\tx\r\n\r\ny", "\tx|\r\n\r\n|y"},
        {"llama3", "-x --y !\r\n", "-x| --|y| !\r\n"},
        {"llama3", "\xc3\xa9t\xc3\xa9\xe4\xbd\xa0\xe3\x80\x82ok", "\xc3\xa9t\xc3\xa9\xe4\xbd\xa0|\xe3\x80\x82ok"},
        {"llama3", "e\xcc\x81x", "e|\xcc\x81x"},                            /* a combining mark is no letter */
        {"llama3", "a\xc2\xa0\xc2\xa0" "b", "a|\xc2\xa0|\xc2\xa0" "b"},     /* no-break spaces are spaces    */
        {"llama3", "a\xff\xff" "b\xe2\x82", "a|\xff\xff|b|\xe2\x82"},       /* bad bytes are symbols ...     */
        {"llama3", "\xff" "b", "\xff" "b"},                                 /* ... of which one may lead     */
        {"qwen2", "a1234 5", "a|1|2|3|4| |5"},
        {"qwen2", "x=12;\n", "x|=|1|2|;\n"},
        {"gpt-2", "Hello world", "Hello| world"},
        {"gpt-2", "I'M we'll don't", "I|'|M| we|'ll| don|'t"},
        {"gpt-2", "'sab'REx", "'s|ab|'|REx"},
        {"gpt-2", "x 1234567", "x| 1234567"},
        {"gpt-2", "a  b   \n", "a| | b|   \n"},
        {"gpt-2", "a\n\nb", "a|\n|\n|b"},
        {"gpt-2", " (x) -- \t!", " (|x|)| --| |\t|!"},
        {"gpt-2", "e\xcc\x81x", "e|\xcc\x81|x"},
        {"smollm", "a 12 b", "a| |1|2| b"},
        {"smollm", "a  1", "a|  |1"},                                       /* spaces end where digits start */
        {"smollm", "it's 3's", "it|'s| |3|'s"},
        {"default", "a, b!", "a|,| b|!"},
        {"default", "a  !", "a|  |!"},
        {"default", "it's", "it|'|s"},
        {"default", "x 12345", "x| |123|45"},
        {"default", "x  12345", "x| | |123|45"},
        {"default", "12\xc2\xbd" "3456", "12\xc2\xbd|345|6"},
        {"default", "$5 = a^b~c `d` \xe2\x82\xac", "$|5| |=| a|^|b|~|c| `|d|`| \xe2\x82\xac"},
        {"default", "a|b", "a\x01|\x01" "b"},
        {"default", " 12 \xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa1", " |12| |\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa1"},
        {"falcon", "x `a` 12345", "x| |`|a|`| |123|45"},
        {"falcon", " 12345", " |123|45"},
        {"qwen35", "e\xcc\x81x \xcc\x81 !\xcc\x81", "e\xcc\x81x| \xcc\x81| !|\xcc\x81"},
        {"qwen35", "!!\xcc\x81y 12", "!!|\xcc\x81y| |1|2"},
        {"jais-2", "a          b", "a|        | | b"},        /* 10 spaces: 8, 1, and b's own */
        {"jais-2", "a    ", "a|    "},
        {"jais-2", "a   \n  b", "a|   \n| | b"},
        {"minicpm5", "a 1234\xc2\xb2", "a| |123|4\xc2\xb2"},
        {"ufakzeka", "Ali'den don't", "Ali|'den| don|'t"},
        {"ufakzeka", "it's's", "it|'s|'s"},
        {"seed-coder", "a (\n\n b", "a| (|\n\n| b"},
        {"laguna", "a \n\n b", "a| |\n\n| b"},
        {"tekken", "HTTPServer iPhone", "HTTPServer| i|Phone"},
        {"tekken", "don't 12 a/b//\n/c", "don|'t| |1|2| a|/b|//\n/|c"},
        {"tekken", "ABC \xc3\x89""A aB\xc3\xa9""CD", "ABC| \xc3\x89|A| a|B\xc3\xa9|CD"},
        {"gpt-4o", "We'LL HELLO'S x'y 12345", "We'LL| HELLO'S| x|'y| |123|45"},
        {"gpt-4o", "e\xcc\x81x", "e|\xcc\x81x"},
        {"granite-embed-multi-97m", "e\xcc\x81x aB", "e\xcc\x81x| a|B"},
        {"tiny_aya", "1234567 12a 1234_ 12345", "1|234|567| |12|a| |123|4|_| |12|345"},
        {"tiny_aya", "aBcD's", "aBcD's"},
        {"youtu", "a\xea\xb0\x80\xe4\xb8\x80\xef\xbc\x8c!", "a|\xea\xb0\x80|\xe4\xb8\x80|\xef\xbc\x8c|!"},
        {"kimi-k2", "a\xe4\xb8\x80\xe4\xba\x8c""b's \xe4\xb8\x80 1234", "a|\xe4\xb8\x80\xe4\xba\x8c|b's| |\xe4\xb8\x80| |123|4"},
        {"exaone-moe", "Hi all of you, 12/\n\nx", "Hi all of you|,| |1|2|/\n|\n|x"},
        {"exaone-moe", "a  b c", "a| | b c"},
        {"deepseek-v3", "(foo) 1234 \xe4\xb8\x80""a \xe2\x82\xac\n\n b", "(foo|)| |123|4| |\xe4\xb8\x80|a| \xe2\x82\xac\n\n| b"},
        {"deepseek-v3", "\x01\x02", "\x01\x02"},
        {"afmoe", "a1234567 12 123", "a|1|234|567| |12| |123"},
        {"deepseek-llm", "a  b\n 12 \xe4\xb8\x80  ", "a| | b|\n| |12| |\xe4\xb8\x80|  "},
        {"deepseek-llm", "x \xd7\x90 y!", "x| \xd7\x90| y|!"},    /* Hebrew has no case: it stays between */
        {"deepseek-coder", "a 12 ++ (b)", "a| |1|2| ++| (|b|)"},
        {"poro-chat", "a b, c.12 (d)", "a| b|,| c|.|12| (|d|)"},
        {"viking", "a b12, c", "a| b|1|2|,| c"},
        {"chameleon", "<sentinel:12>IMGIMGABZ\t    x12!", "<|sentinel|:|1|2|>|IMGIMGABZ|\t|    |x|1|2|!"},
        {"chameleon", "<sentinel:>IMGIMGZ   a", "<|sentinel|:|>|IMGIMGZ|  | a"},
        {"superbpe", "ab 1234567 c", "ab |1|234|567| c"},
        {"superbpe", "123\xc2\xb2""456", "123\xc2\xb2|456"},
        {"gemma4", "a b\n\n c", "a b|\n\n| c"},
    };
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        const char *name, *text = cases[i].text, cut = strchr(cases[i].want, 1) ? 1 : '|';
        char got[256];
        size_t n = 0;
        const rfi_pre *pre = rfi_pre_find(rf_string_of(cases[i].pre), &name);
        REQUIRE(pre, "no rule %s", cases[i].pre);
        rfi_tokenizing w = {.t = NULL};
        rfi_cutter cutter = rfi_cut(&w, pre, (const unsigned char *)text, (uint32_t)strlen(text));
        for (uint32_t pos = 0, end; text[pos]; pos = end) {
            end = rfi_cut_next(&cutter, pos);
            REQUIRE(end > pos && end <= strlen(text), "%s stands still in \"%s\"", name, text);
            if (n) got[n++] = cut;
            memcpy(got + n, text + pos, end - pos);
            n += end - pos;
        }
        got[n] = 0;
        CHECK(strcmp(got, cases[i].want) == 0, "%s: \"%s\": want \"%s\", got \"%s\"", name, text, cases[i].want, got);
    }
}

static void test_unicode_classes(void) {
    static const uint32_t cases[][2] = {
        {'a', RFI_LETTER}, {'Z', RFI_LETTER}, {'0', RFI_NUMBER}, {' ', RFI_SPACE}, {'\n', RFI_SPACE},
        {0x1c, RFI_OTHER}, {0x7f, RFI_OTHER}, {0x85, RFI_SPACE}, {0xa0, RFI_SPACE}, {0xaa, RFI_LETTER},
        {0xb2, RFI_NUMBER}, {0x301, RFI_MARK}, {0x1c5, RFI_LETTER}, {0x2b0, RFI_LETTER}, {0x660, RFI_NUMBER},
        {0x93c, RFI_MARK}, {0x1680, RFI_SPACE}, {0x180e, RFI_OTHER}, {0x200b, RFI_OTHER}, {0x2028, RFI_SPACE},
        {0x20ac, RFI_SYMBOL}, {0x2160, RFI_NUMBER}, {0x3000, RFI_SPACE}, {0x4e00, RFI_LETTER}, {0x9fff, RFI_LETTER},
        {0xd7a3, RFI_LETTER}, {0xd800, RFI_OTHER}, {0xe000, RFI_OTHER}, {0xfffd, RFI_SYMBOL}, {0x1f600, RFI_SYMBOL},
        {0x20000, RFI_LETTER}, {0xe0100, RFI_MARK}, {0x10ffff, RFI_OTHER}, {'`', RFI_SYMBOL},
        {'~', RFI_SYMBOL}, {'$', RFI_SYMBOL}, {'.', RFI_PUNCT}, {0x3002, RFI_PUNCT}, {0, RFI_OTHER}};
    for (uint32_t cp = 0; cp < 128; cp++) CHECK(rfi_class(cp) == rfi_unicode_class(cp), "U+%04X: a short cut", cp);
    for (size_t i = 0; i < RFI_COUNT(cases); i++)
        CHECK(rfi_class(cases[i][0]) == cases[i][1], "U+%04X: want %u, got %u", cases[i][0], cases[i][1],
              rfi_class(cases[i][0]));
}

/* ---- ids by hand ---- */

/* make_gguf.h: id = byte below 256, then he ll th in _t er an hell hello _the _w or ld _wor _world _a _hello 's 12 */
static void test_bpe_by_hand(void) {
    opened o;
    open_made(&o, "gpt-2");
    EXPECT(o, "hello world", 0, "264 270");
    EXPECT(o, "the then", 0, "116 256 265 110"); /* "h e" before "t h": "the" stays t, he; " the" is Gt, he */
    EXPECT(o, "12123", 0, "274 274 51");
    EXPECT(o, "it's", 0, "105 116 273");
    EXPECT(o, " hello", RF_TOKENIZE_ADD, "272"); /* the file says add_bos_token = false */
    EXPECT(o, "\xff", 0, "239 191 189");         /* a bad byte is read as U+FFFD */
    EXPECT(o, "\xc0\xaf", 0, "239 191 189 239 191 189");
    EXPECT(o, "\xed\xa0\x80", 0, "237 160 128"); /* a surrogate passes */
    EXPECT(o, "\xf4\x90\x80\x80", 0, "239 191 189 239 191 189 239 191 189 239 191 189");
    EXPECT(o, "", RF_TOKENIZE_ADD | RF_TOKENIZE_SPECIAL, "");
    EXPECT(o, "<|im_end|>", RF_TOKENIZE_SPECIAL, "277");
    EXPECT(o, "<|im_end|>", 0, "60 124 105 109 95 101 110 100 124 62");
    expect_n(o.t, "a\0b", 3, 0, "97 0 98", __LINE__);
    close_file(&o);
    open_made(&o, "llama-bpe");
    EXPECT(o, "12123", 0, "274 49 50 51"); /* 121 23 */
    close_file(&o);
    open_made(&o, "qwen2");
    EXPECT(o, "12123", 0, "49 50 49 50 51");
    close_file(&o);
    open_made(&o, "smollm");
    EXPECT(o, "hello 12", 0, "264 32 49 50");
    close_file(&o);
    open_made(&o, "default");
    EXPECT(o, "it's 12123", 0, "105 116 39 115 32 274 49 50 51");
    close_file(&o);
}

/* make_gguf.h: 0 <unk> 1 <s> 2 </s> 3+byte, 259 _, then he ll th in _the _t er an _a _w or ld hell hello _hello orld
 * _world _th e' . , ! A B a-z; the lower id has the better score */
static void test_spm_by_hand(void) {
    opened o;
    open_made(&o, NULL);
    EXPECT(o, "hello world", 0, "274 276");
    EXPECT(o, "hello world", RF_TOKENIZE_ADD, "1 274 276");
    EXPECT(o, "the", 0, "264");
    EXPECT(o, "th\xc3\xa9", 0, "277 278");
    EXPECT(o, "zx\n", 0, "259 309 307 13");
    EXPECT(o, " hello", 0, "259 274");
    EXPECT(o, "\xe6\x97\xa5", 0, "259 233 154 168");
    EXPECT(o, "\xff" "a\xc3", 0, "259 258 100 198"); /* cut by the first byte: the a is inside the bad character */
    EXPECT(o, "", RF_TOKENIZE_ADD, "1");
    EXPECT(o, "<s>", 0, "259 63 302 65");
    EXPECT(o, "<s>", RF_TOKENIZE_SPECIAL, "1");
    EXPECT(o, "hello<s>hello</s>", RF_TOKENIZE_SPECIAL, "274 1 274 2");
    EXPECT(o, "<unk>", RF_TOKENIZE_SPECIAL | RF_TOKENIZE_ADD, "1 0");
    expect_n(o.t, "\0", 1, 0, "259 3", __LINE__);
    close_file(&o);
    /* equal scores: the leftmost pair first */
    small s = {"llama", NULL, "nnnn", {"a", "aa", "aaa", SP}, {NULL}, {0, -1, -1, 0}, 0, 0, NULL};
    open_small(&o, &s);
    EXPECT(o, "aaaa", 0, "3 2 0");
    close_file(&o);
    /* order of scores across zero, NaN last */
    small z = {"llama", NULL, "nnnnnnnn", {"a", "b", "c", "d", "ab", "bc", "cd", SP}, {NULL},
               {0, 0, 0, 0, -1, 2, 1, 0}, 0, 0, NULL};
    open_small(&o, &z);
    EXPECT(o, "abcd", 0, "7 0 5 3");
    EXPECT(o, "bcd", 0, "7 5 3");
    close_file(&o);
    z.scores[5] = -0.5f;
    open_small(&o, &z);
    EXPECT(o, "bcd", 0, "7 1 6");
    EXPECT(o, "abc", 0, "7 0 5");
    close_file(&o);
    z.scores[5] = NAN;
    open_small(&o, &z);
    EXPECT(o, "abc", 0, "7 4 2");
    close_file(&o);
    /* no byte token, no such text: unknown if the file names one, else nothing */
    small u = {"llama", NULL, "xnn", {"?", "a", SP}, {NULL}, {0, 0, 0}, 0, 0, NULL};
    open_small(&o, &u);
    EXPECT(o, "aba", 0, "2 1 1");
    close_file(&o);
}

/* Longest tokens of each word; what has none is unknown as a whole. */
static void test_wpm_by_hand(void) {
    small s = {"bert", NULL, "cncnnnnnnn",
               {"[CLS]", "[PAD]", "[UNK]", SP "he", "llo", SP "hello", SP ",", SP "\xe4\xb8\x80", "l", SP "e"},
               {NULL}, {0}, 0, 0, NULL};
    opened o;
    s.bos = 0;
    open_small(&o, &s);
    EXPECT(o, "Hello, hEl", 0, "5 6 3 8");
    EXPECT(o, "H\xc3\x89llo e\xcc\x81 \xc3\xa9", 0, "5 9 9"); /* accents go, as one character or two */
    EXPECT(o, "hello\xe4\xb8\x80\xe4\xb8\x80hello", 0, "5 7 7 5");
    EXPECT(o, "he\x01l\xef\xbf\xbdlo\t \xff,", 0, "5 6");
    EXPECT(o, "helx hello", 0, "5"); /* this file names no unknown token */
    EXPECT(o, "[PAD]", 0, "");
    CHECK(strcmp(rf_tokenizer_get_info(o.t).model, "bert") == 0 && rf_tokenizer_get_info(o.t).pre[0] == 0, "info");
    close_file(&o);
    mg_gguf w;
    const char *const tokens[] = {"[CLS]", "[SEP]", "[UNK]", SP "he", SP "He", "\xc3\xa9"};
    mg_begin(&w, 3);
    mg_kv_str(&w, K "model", "bert");
    mg_kv_arr_str(&w, K "tokens", tokens, 6);
    mg_kv_arr_i32(&w, K "token_type", (const int32_t[]){3, 3, 2, 1, 1, 1}, 6);
    mg_kv_u32(&w, K "cls_token_id", 0);
    mg_kv_u32(&w, K "seperator_token_id", 1);
    mg_kv_u32(&w, K "unknown_token_id", 2);
    mg_kv_bool(&w, K "normalizer.lowercase", 0);
    open_file(&o, &w, NULL);
    EXPECT(o, "He he\xc3\xa9 x", RF_TOKENIZE_ADD, "0 4 3 5 2 1"); /* capitals and accents stay */
    close_file(&o);
    static const uint32_t small_letters[][2] = {{'A', 'a'}, {'a', 'a'}, {0x130, 'i'}, {0x12e, 0x12f}, {0x131, 0x131},
                                                {0x1e9e, 0xdf}, {0x23a, 0x2c65}, {0x10400, 0x10428}, {0x410, 0x430}};
    static const uint32_t bases[][2] = {{'e', 'e'}, {0xe9, 'e'}, {0x1ea4, 'A'}, {0xac00, 0x1100}, {0xd7a3, 0x1112},
                                        {0x3b1, 0x3b1}, {0x212b, 'A'}, {0x20000, 0x20000}};
    for (size_t i = 0; i < RFI_COUNT(small_letters); i++)
        CHECK(rfi_unicode_to_lower(small_letters[i][0]) == small_letters[i][1], "U+%04X", small_letters[i][0]);
    for (size_t i = 0; i < RFI_COUNT(bases); i++)
        CHECK(rfi_unicode_base(bases[i][0]) == bases[i][1], "U+%04X", bases[i][0]);
}

/* A word that is a token is taken whole by the llama-3 family only, and bos is its default. */
/* ---- UGM ---- */

/* A table that replaces "A" by "a", "AB" by "x y", a no-break space by a space and "D" by nothing. Node k has its children at
 * 256 (k + 1) ^ byte, its value at byte 0. */
static void put_charsmap(mg_buf *out) {
    static const char texts[] = "a\0x y\0 \0";
    static const struct { uint32_t node, byte, child; int value; } edges[] = {
        {0, 'A', 1, 0}, {1, 'B', 2, 2}, {0, 0xc2, 3, -1}, {3, 0xa0, 4, 6}, {0, 'D', 5, 7}};
    uint32_t units[2048] = {256u << 10};
    for (size_t i = 0; i < RFI_COUNT(edges); i++) {
        const uint32_t index = 256 * (edges[i].node + 1) ^ edges[i].byte, children = 256 * (edges[i].child + 1);
        units[index] = (index ^ children) << 10 | edges[i].byte | (edges[i].value >= 0 ? 256u : 0u);
        if (edges[i].value >= 0) units[children] = 0x80000000u | (uint32_t)edges[i].value;
    }
    const uint32_t n = sizeof units;
    *out = (mg_buf){0};
    mg_put(out, &n, 4);
    mg_put(out, units, n);
    mg_put(out, texts, sizeof texts - 1);
}

/* Scores, normalizing and unknown characters by hand; check_unigram.py compares with SentencePiece. */
static void test_ugm_by_hand(void) {
    static const struct { int adds_space, merges; const char *text, *want; } cases[] = {
        {0, 0, "ab", "5"},           /* -3 is more than -1 and -2.5                                  */
        {0, 0, "aab", "3 5"},        /* -4; "aa" and "b" have -6                                     */
        {0, 0, "ba", "4 3"},
        {0, 0, "a?b?!", "3 2 4 2"},  /* unknown ones side by side are one                            */
        {0, 0, "aaaa", "3 3 3 3"},
        {0, 0, "A", "3"},
        {0, 0, "AB", "8 6 9"},       /* the longest text that is replaced: "x y"                     */
        {0, 0, "AAB", "3 8 6 9"},
        {0, 0, "D", ""},
        {0, 0, "aDb", "5"},
        {0, 0, "a\xc2\xa0\xc2" "a", "3 6 2 3"}, /* a space; a byte that is malformed is unknown      */
        {0, 0, "  a", "6 7"},        /* spaces stay: "_" and "_a"                                    */
        {0, 0, "a ", "3 6"},
        {1, 0, "a a", "7 7"},        /* one is added                                                 */
        {1, 0, " a", "6 7"},         /* also before a word after spaces, as llama.cpp does           */
        {1, 0, " ", "6"},            /* but before no spaces alone                                   */
        {1, 1, "  a   b ", "7 6 4"}, /* those at the start and end go, those in between become one   */
        {0, 1, "a", "7"},            /* where they are merged each word has one                      */
        {1, 1, "   ", ""},
        {1, 1, "", ""},
        {0, 0, "uu", "10"},          /* user-defined                                                 */
        {1, 0, "auua", "7 10 7"},
    };
    mg_buf charsmap;
    put_charsmap(&charsmap);
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        static const char *const tokens[] = {"<pad>", "</s>", "<unk>", "a", "b", "ab", SP, SP "a", "x", "y", "uu", "aa"};
        static const int32_t types[] = {3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 4, 1};
        static const float scores[] = {0, 0, 0, -1, -2.5f, -3, -1.5f, -2, -2, -2, -90, -3.5f};
        mg_gguf w;
        opened o;
        mg_begin(&w, 3);
        mg_kv_str(&w, K "model", "t5");
        mg_kv_arr_str(&w, K "tokens", tokens, RFI_COUNT(tokens));
        mg_kv_arr_i32(&w, K "token_type", types, RFI_COUNT(tokens));
        mg_kv_arr_f32(&w, K "scores", scores, RFI_COUNT(tokens));
        mg_kv_bool(&w, K "add_space_prefix", cases[i].adds_space);
        mg_kv_bool(&w, K "remove_extra_whitespaces", cases[i].merges);
        mg_kv_arr(&w, K "precompiled_charsmap", i % 2 ? MG_KV_I8 : MG_KV_U8, charsmap.data, charsmap.n, charsmap.n);
        open_file(&o, &w, NULL);
        CHECK(o.t, "%s", o.err.text);
        char want[64];
        EXPECT(o, cases[i].text, 0, cases[i].want);
        snprintf(want, sizeof want, "%s%s1", cases[i].want, *cases[i].want ? " " : "");
        EXPECT(o, cases[i].text, RF_TOKENIZE_ADD, want); /* T5's eos, no bos */
        if (o.t) {
            const rf_tokenizer_info info = rf_tokenizer_get_info(o.t);
            CHECK(info.bos == -1 && info.eos == 1 && info.unknown == 2 && info.padding == 0 && strcmp(info.model, "t5") == 0 && !*info.pre,
                  "%d %d", info.bos, info.eos);
        }
        close_file(&o);
    }
    mg_free(&charsmap);
}

/* A table that is cut, or leads outside itself, is refused, when it is read or when a text leads there. */
static void test_charsmap_malformed(void) {
    enum { AT_OPEN, AT_TEXT, NEVER };
    static const struct { size_t at, n; uint32_t unit; size_t keep; int when; const char *text; } cases[] = {
        {0, 4, 8192, 0, NEVER, "AB"},                     /* as it is                              */
        {0, 4, 0xffffffff, 0, AT_OPEN, ""},               /* longer than the file                  */
        {0, 4, 8200, 0, AT_OPEN, ""},
        {0, 4, 0, 0, AT_TEXT, "a"},                       /* no unit                               */
        {0, 0, 0, 3, AT_OPEN, ""}, {0, 0, 0, 4, AT_OPEN, ""}, {0, 0, 0, 8197, AT_OPEN, ""},
        {4, 4, 0x7ffffc00, 0, AT_TEXT, "a"},              /* the root's children are far away      */
        {4 + 4 * (256 ^ 'A'), 4, 0x7fffff00 | 'A', 0, AT_TEXT, "A"},
        {4 + 4 * 512, 4, 0xffffffff, 0, AT_TEXT, "A"},    /* a text far away                       */
        {4 + 4 * 512, 4, 0x80000008, 0, AT_TEXT, "A"},
        {4 + 4 * 512, 4, 0x80000007, 0, NEVER, "A"},      /* the last one, which is empty          */
    };
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        mg_buf charsmap;
        opened o;
        put_charsmap(&charsmap);
        memcpy(charsmap.data + cases[i].at, &cases[i].unit, cases[i].n);
        if (cases[i].keep) charsmap.n = cases[i].keep;
        static const char *const tokens[] = {"a", "b", "<unk>"};
        mg_gguf w;
        mg_begin(&w, 3);
        mg_kv_str(&w, K "model", "t5");
        mg_kv_arr_str(&w, K "tokens", tokens, 3);
        mg_kv_arr(&w, K "precompiled_charsmap", MG_KV_I8, charsmap.data, charsmap.n, charsmap.n);
        open_file(&o, &w, NULL);
        CHECK(!o.t == (cases[i].when == AT_OPEN), "case %d: %s", (int)i, o.t ? "accepted" : o.err.text);
        if (!o.t) CHECK(o.err.code == RF_ERR_FORMAT && strstr(o.err.text, "precompiled_charsmap"), "%s", o.err.text);
        if (o.t) {
            uint32_t n = 0;
            const rf_result r = rf_tokenize(o.t, rf_string_of(cases[i].text), 0, NULL, 0, &n, &o.err);
            CHECK((r == RF_ERR_FORMAT) == (cases[i].when == AT_TEXT), "case %d: %d %s", (int)i, r, o.err.text);
            if (r == RF_ERR_FORMAT) CHECK(n == 0 && strstr(o.err.text, "precompiled_charsmap"), "%s", o.err.text);
        }
        close_file(&o);
        mg_free(&charsmap);
    }
}

static void test_whole_words(void) {
    small s = {"gpt2", "gpt-2", "nnnnnc", {"a", "b", "c", "bc", "abc", "<bos>"}, {"b c", NULL}, {0}, 5, 0, NULL};
    opened o;
    open_small(&o, &s);
    EXPECT(o, "abc", RF_TOKENIZE_ADD, "0 3");
    close_file(&o);
    s.pre = "llama-bpe";
    open_small(&o, &s);
    EXPECT(o, "abc", RF_TOKENIZE_ADD, "5 4");
    EXPECT(o, "abcc", 0, "0 3 2");
    EXPECT(o, "Abc?", 0, "3"); /* bytes without a token are dropped */
    close_file(&o);
    s.pre = NULL;
    open_small(&o, &s);
    CHECK(strcmp(rf_tokenizer_get_info(o.t).pre, "default") == 0, "%s", rf_tokenizer_get_info(o.t).pre);
    close_file(&o);
    /* a merge whose result is no token cannot lead anywhere; of equal merges and texts the first counts */
    small p = {"gpt2", "gpt-2", "nnnnn", {"a", "b", "ab", "abb", "ab"}, {"b b", "a b", "a b", "ab b", "x y", NULL},
               {0}, 0, 0, NULL};
    open_small(&o, &p);
    EXPECT(o, "abb", 0, "3");
    EXPECT(o, "ab", 0, "2");
    close_file(&o);
    small q = {"gpt2", "gpt-2", "nnnnn", {"a", "b", "c", "ab", "bc"}, {"a b", "b c", "a b", NULL}, {0}, 0, 0, NULL};
    open_small(&o, &q);
    EXPECT(o, "abc", 0, "3 2");
    close_file(&o);
}

static void test_special_tokens(void) {
    /* longest first, wherever it is: "<<" + "<|x|>" would be the leftmost reading of <<|x|> */
    small s = {"gpt2", "gpt-2", "nnnncccuu", {"<", "|", "x", ">", "<|x|>", "<|x|><|x|>", "<<", "xx", "xxx"}, {NULL},
               {0}, 0, 0, NULL};
    opened o;
    open_small(&o, &s);
    EXPECT(o, "<<|x|>", RF_TOKENIZE_SPECIAL, "0 4");
    EXPECT(o, "<<<", RF_TOKENIZE_SPECIAL, "6 0");
    EXPECT(o, "<|x|><|x|><|x|>", RF_TOKENIZE_SPECIAL, "5 4");
    EXPECT(o, "<|x|", RF_TOKENIZE_SPECIAL, "0 1 2 1");
    EXPECT(o, "<|x|>", 0, "0 1 2 1 3"); /* plain text never names a control token ... */
    EXPECT(o, "xxxxx", 0, "8 7");       /* ... but user-defined ones are always found */
    close_file(&o);
    /* where a longer one takes part of the place, a shorter one with the same start may fit */
    small f = {"gpt2", "gpt-2", "cuunn", {"<|x|>", "xy<", "xy", "x", "y"}, {NULL}, {0}, 0, 0, NULL};
    open_small(&o, &f);
    EXPECT(o, "xy<|x|>", RF_TOKENIZE_SPECIAL, "2 0");
    EXPECT(o, "xy<|x|>", 0, "1 3");
    close_file(&o);
    /* a control token is not reached by merging either, nor as a whole word */
    small m = {"gpt2", "llama-bpe", "nnc", {"a", "b", "ab"}, {"a b", NULL}, {0}, 0, 0, NULL};
    open_small(&o, &m);
    EXPECT(o, "ab", 0, "0 1");
    EXPECT(o, "ab", RF_TOKENIZE_SPECIAL, "2");
    close_file(&o);
    /* Phi-3: what follows a special token loses its spaces, but for three tokens */
    small p = {"llama", NULL, "xccnncn", {"<unk>", "<s>", "<|user|>", SP, "a", "<|end|>", SP "a"}, {NULL},
               {0}, 0, 0, "my Phi-3 mini"};
    open_small(&o, &p);
    EXPECT(o, "<|user|> \n a<|end|>  <s> a", RF_TOKENIZE_SPECIAL, "2 6 5 1 3 6");
    close_file(&o);
    p.name = "other";
    open_small(&o, &p);
    EXPECT(o, "<|user|> a<s> a", RF_TOKENIZE_SPECIAL, "2 3 6 1 3 6");
    close_file(&o);
}

static void test_ends(void) {
    small s = {"gpt2", "gpt-2", "nnnncnnn",
               {"a", "</s>", "<|im_end|>", "<|end|>", "<b>", "<|eot_id|>", "<|return|>", "[EOS]"},
               {NULL}, {0}, 0, 4, NULL};
    opened o;
    open_small(&o, &s);
    static const int want[8] = {0, 1, 1, 1, 1, 1, 1, 1};
    for (int32_t i = 0; i < 8; i++) CHECK(rf_token_is_end(o.t, i) == want[i], "token %d", i);
    EXPECT(o, "</s>", 0, ""); /* such texts are control tokens whatever their type says; no letter of it is a token */
    EXPECT(o, "</s>", RF_TOKENIZE_SPECIAL, "1");
    CHECK(!rf_token_is_end(o.t, 8) && !rf_token_is_end(o.t, INT32_MIN), "out of range");
    close_file(&o);
    s.tokens[4] = "<|call|>"; /* with <|return|> and <|call|>, <|end|> ends a message only */
    s.eos = 0;
    open_small(&o, &s);
    CHECK(!rf_token_is_end(o.t, 3) && rf_token_is_end(o.t, 4) && rf_token_is_end(o.t, 6), "gpt-oss");
    EXPECT(o, "<|end|>", 0, ""); /* ... and still cannot be written as plain text, but is shown */
    size_t n;
    char *shown = detok(o.t, (const int32_t[]){3, 4}, 2, 0, &n);
    CHECK(n == 7 && memcmp(shown, "<|end|>", 7) == 0, "%.*s", (int)n, shown);
    free(shown);
    close_file(&o);
    s.tokens[4] = "<|tool_response>"; /* gemma4: with it </s> is text */
    s.types = "nnnnnnnn";
    open_small(&o, &s);
    CHECK(rf_token_is_end(o.t, 4) && !rf_token_is_end(o.t, 1) && rf_token_is_end(o.t, 7), "gemma4");
    close_file(&o);
}

/* ---- back to text ---- */

static void expect_step(const rf_tokenizer *t, rf_detokenizer *state, int32_t id, uint32_t flags, const char *want,
                        int line) {
    char out[64];
    size_t n = 0;
    rf_error err;
    state->tokenizer = t;
    rf_result r = rf_detokenize(state, id, flags, out, sizeof out, &n, &err);
    CHECK(r == RF_OK && n == strlen(want) && memcmp(out, want, n) == 0,
          "line %d: token %d: want \"%s\", got \"%.*s\" (%d)", line, id, want, (int)n, out, r);
}
#define STEP(o, id, flags, want) expect_step((o).t, &state, id, flags, want, __LINE__)

static void test_detokenize(void) {
    opened o;
    rf_detokenizer state = {0};
    open_made(&o, "gpt-2"); /* id = byte below 256 */
    STEP(o, 0xe2, 0, "");
    STEP(o, 0x82, 0, "");
    STEP(o, 0xac, 0, "\xe2\x82\xac");
    STEP(o, 0xf0, 0, "");
    STEP(o, 0x9f, 0, "");
    STEP(o, 0x98, 0, "");
    STEP(o, 0x80, 0, "\xf0\x9f\x98\x80");
    STEP(o, 264, 0, "hello");
    STEP(o, 270, 0, " world");
    STEP(o, 277, 0, "");
    STEP(o, 277, RF_DETOKENIZE_SPECIAL, "<|im_end|>");
    STEP(o, 300, RF_DETOKENIZE_SPECIAL, "");      /* unused */
    STEP(o, 0xff, 0, FFFD);                       /* starts nothing */
    STEP(o, 0xe2, 0, "");
    STEP(o, 0x82, 0, "");
    STEP(o, 'a', 0, FFFD "a");                    /* one for the start of a character that broke off */
    STEP(o, 0xed, 0, "");
    STEP(o, 0xa0, 0, FFFD FFFD);                  /* a surrogate, byte by byte: ed is no start of anything with a0 */
    STEP(o, 0xc0, 0, FFFD);
    STEP(o, 0xf4, 0, "");
    STEP(o, 0x90, 0, FFFD FFFD);                  /* above U+10FFFF */
    STEP(o, 0xc3, 0, "");
    STEP(o, 0xc3, 0, FFFD);
    STEP(o, -1, RF_DETOKENIZE_FINISH, FFFD);
    STEP(o, -1, RF_DETOKENIZE_FINISH, "");
    STEP(o, 0xc3, 0, "");
    STEP(o, 0xa9, RF_DETOKENIZE_FINISH, "\xc3\xa9");
    /* no room: the count, and an unchanged state */
    char out[8] = "#######";
    size_t n = 0;
    rf_error err;
    STEP(o, 0xc3, 0, "");
    CHECK(rf_detokenize(&state, 0xa9, 0, out, 1, &n, &err) == RF_ERR_CAPACITY && n == 2, "%u", (unsigned)n);
    CHECK(rf_detokenize(&state, 0xa9, 0, NULL, 0, &n, NULL) == RF_ERR_CAPACITY && n == 2, "%u", (unsigned)n);
    CHECK(out[1] == '#', "wrote past its room");
    STEP(o, 0xa9, 0, "\xc3\xa9");
    CHECK(rf_detokenize(&state, 320, 0, out, 8, &n, &err) == RF_ERR_ARGUMENT && strstr(err.text, "320"), "%s",
          err.text);
    CHECK(rf_detokenize(&state, -2, 0, out, 8, &n, NULL) == RF_ERR_ARGUMENT, "-2");
    CHECK(rf_detokenize(&(rf_detokenizer){0}, 1, 0, out, 8, &n, NULL) == RF_ERR_ARGUMENT, "no tokenizer");
    CHECK(rf_detokenize(NULL, 1, 0, out, 8, &n, NULL) == RF_ERR_ARGUMENT, "no state");
    CHECK(rf_detokenize(&state, -1, 0, out, 8, &n, NULL) == RF_ERR_ARGUMENT, "-1 without FINISH");
    CHECK(rf_detokenize(&state, 1, 8, out, 8, &n, NULL) == RF_ERR_ARGUMENT, "flags");
    state.n_held = 9;
    CHECK(rf_detokenize(&state, 1, 0, out, 8, &n, NULL) == RF_ERR_ARGUMENT, "garbage state");
    close_file(&o);

    memset(&state, 0, sizeof state);
    open_made(&o, NULL);
    STEP(o, 1, 0, "");               /* bos is not text: the space rf_tokenize wrote is still to come */
    STEP(o, 274, 0, "hello");
    STEP(o, 276, 0, " world");
    STEP(o, 3 + 0xe2, 0, "");
    STEP(o, 3 + 0x82, 0, "");
    STEP(o, 3 + 0xac, 0, "\xe2\x82\xac");
    STEP(o, 278, 0, "\xc3\xa9");
    memset(&state, 0, sizeof state);
    STEP(o, 1, RF_DETOKENIZE_SPECIAL, "<s>");
    STEP(o, 274, 0, " hello");
    memset(&state, 0, sizeof state);
    STEP(o, 259, 0, "");
    STEP(o, 259, 0, " ");
    close_file(&o);
}

/* Random text and random bytes, there and back. */
static void test_round_trip(void) {
    static const char *const pres[] = {NULL, "gpt-2", "llama-bpe", "qwen2", "smollm", "default"};
    static const char *const parts[] = {"hello", " ", "  ", "\n", "world", "12", "3", "'s", "\xc3\xa9", ".", "<",
                                        "\t", "\xe6\x97\xa5", "\xf0\x9f\x98\x80", "the", "A", SP, "\xcc\x81",
                                        "\xc2\xa0", "-", "\r\n", "\x01", "\xc2\xad"};
    mg_rng rng = {42};
    for (size_t p = 0; p < RFI_COUNT(pres); p++) {
        opened o;
        open_made(&o, pres[p]);
        for (int rep = 0; o.t && rep < 300; rep++) {
            char text[512] = "", shown[512];
            int32_t ids[1024];
            uint32_t n, n_parts = mg_below(&rng, 24);
            size_t n_bytes;
            for (uint32_t i = 0; i < n_parts; i++) strcat(text, parts[mg_below(&rng, RFI_COUNT(parts))]);
            REQUIRE(rf_tokenize(o.t, rf_string_of(text), RF_TOKENIZE_ADD, ids, 1024, &n, NULL) == RF_OK, "%s", text);
            char *back = detok(o.t, ids, n, 0, &n_bytes), *want = text;
            if (!pres[p]) { /* SPM writes spaces and U+2581 alike: both come back as spaces */
                size_t k = 0;
                for (size_t i = 0; text[i]; k++)
                    if (memcmp(text + i, SP, 3) == 0) shown[k] = ' ', i += 3;
                    else shown[k] = text[i++];
                shown[k] = 0;
                want = shown;
            }
            CHECK(n_bytes == strlen(want) && memcmp(back, want, n_bytes) == 0, "%s: \"%s\" -> \"%.*s\"",
                  pres[p] ? pres[p] : "SPM", want, (int)n_bytes, back);
            free(back);
        }
        close_file(&o);
    }
}

/* ---- arguments ---- */

static void test_capacity_and_arguments(void) {
    opened o;
    open_made(&o, "gpt-2");
    int32_t ids[4] = {-7, -7, -7, -7};
    uint32_t n = 0;
    rf_error err;
    CHECK(rf_tokenize(o.t, (rf_string){"xyz", 3}, 0, ids, 2, &n, &err) == RF_ERR_CAPACITY && n == 3 && ids[0] == 'x' &&
              ids[1] == 'y' && ids[2] == -7,
          "%u ids, %s", n, err.text);
    CHECK(rf_tokenize(o.t, (rf_string){"xyz", 3}, 0, NULL, 0, &n, &err) == RF_ERR_CAPACITY && n == 3, "%u", n);
    CHECK(rf_tokenize(o.t, (rf_string){"xyz", 3}, 0, ids, 3, &n, &err) == RF_OK && n == 3 && err.code == RF_OK, "%u", n);
    CHECK(rf_tokenize(o.t, (rf_string){NULL, 0}, 0, NULL, 0, &n, NULL) == RF_OK && n == 0, "empty text");
    CHECK(rf_tokenize(NULL, (rf_string){"x", 1}, 0, ids, 4, &n, &err) == RF_ERR_ARGUMENT && err.text[0], "no tokenizer");
    CHECK(rf_tokenize(o.t, (rf_string){NULL, 1}, 0, ids, 4, &n, NULL) == RF_ERR_ARGUMENT, "no text");
    CHECK(rf_tokenize(o.t, (rf_string){"x", 1}, 0, NULL, 4, &n, NULL) == RF_ERR_ARGUMENT, "no out");
    CHECK(rf_tokenize(o.t, (rf_string){"x", 1}, 0, ids, 4, NULL, NULL) == RF_ERR_ARGUMENT, "no count");
    CHECK(rf_tokenize(o.t, (rf_string){"x", 1}, 4, ids, 4, &n, NULL) == RF_ERR_ARGUMENT, "flags");
    CHECK(rf_tokenize(o.t, (rf_string){"x", ((size_t)1 << 30) + 1}, 0, ids, 4, &n, &err) == RF_ERR_ARGUMENT, "%s", err.text);
    rf_tokenizer *t = o.t;
    CHECK(rf_tokenizer_open(NULL, NULL, &t, &err) == RF_ERR_ARGUMENT && t == NULL, "no file");
    CHECK(rf_tokenizer_open(o.g, NULL, NULL, &err) == RF_ERR_ARGUMENT, "no out");
    CHECK(rf_gguf_close(o.g, &err) == RF_ERR_BUSY, "the file is in use");
    CHECK(rf_tokenizer_open(o.g, "qwen2", &t, &err) == RF_OK && strcmp(rf_tokenizer_get_info(t).pre, "qwen2") == 0,
          "%s", err.text);
    rf_tokenizer_close(t, NULL);
    CHECK(rf_tokenizer_open(o.g, "lfm2.5", &t, &err) == RF_ERR_UNSUPPORTED && strstr(err.text, "'lfm2.5'") && !t,
          "%s", err.text);
    rf_string s = rf_token_get_text(o.t, 264);
    CHECK(s.len == 5 && memcmp(s.data, "hello", 5) == 0, "%.*s", (int)s.len, s.data);
    CHECK(rf_token_get_text(o.t, 320).len == 0 && rf_token_get_text(o.t, -1).len == 0 &&
              rf_token_get_text(NULL, 0).len == 0,
          "range");
    CHECK(rf_tokenizer_get_info(NULL).bos == -1 && !rf_token_is_end(NULL, 0), "NULL");
    rf_tokenizer_close(NULL, NULL);
    close_file(&o);
}

/* ---- malformed metadata ---- */

enum { DROP, U32, I32, F32, BOOL, STR, U8S, I32S, U32S, I64S, F32S, STRS, SET_TEXT, SET_VALUE, ALL_VALUE };

typedef struct bad_case {
    int bpe;
    const char *key; /* after K */
    int kind;        /* what the key becomes: nothing, a value, n elements, or its own list with one or all changed */
    int64_t value;   /* value or count; SET_VALUE, ALL_VALUE: the new value of element 4 or of all */
    const char *text;
    rf_result want;  /* RF_OK: must open */
    const char *says;
} bad_case;

static void put_key(mg_gguf *w, const char *key, int kind, int64_t v, const char *text) {
    size_t n = kind >= U8S && v > 0 ? (size_t)v : 0;
    int64_t *many = (int64_t *)get((n + 1) * 8);
    const char **strings = (const char **)get((n + 1) * sizeof *strings);
    for (size_t i = 0; i < n; i++) strings[i] = text ? text : "x";
    if (kind == U32) mg_kv_u32(w, key, (uint32_t)v);
    if (kind == I32) mg_kv_i32(w, key, (int32_t)v);
    if (kind == F32) mg_kv_f32(w, key, (float)v);
    if (kind == BOOL) mg_kv_bool(w, key, (int)v);
    if (kind == STR) mg_kv_str(w, key, text);
    if (kind == U8S) mg_kv_arr(w, key, MG_KV_U8, many, n, n);
    if (kind == I32S) mg_kv_arr(w, key, MG_KV_I32, many, n, n * 4);
    if (kind == U32S) mg_kv_arr(w, key, MG_KV_U32, many, n, n * 4);
    if (kind == I64S) mg_kv_arr(w, key, MG_KV_I64, many, n, n * 8);
    if (kind == F32S) mg_kv_arr(w, key, MG_KV_F32, many, n, n * 4);
    if (kind == STRS) mg_kv_arr_str(w, key, strings, n);
    free(many);
    free(strings);
}

/* make_gguf.h's vocabulary of 320 tokens with one key changed */
static void put_bad_vocab(mg_gguf *w, const bad_case *b) {
    static const char *const keys[] = {"model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id",
                                       "eos_token_id", "eot_token_id", "unknown_token_id", "padding_token_id",
                                       "add_bos_token", "add_eos_token", "add_space_prefix"};
    mg_vocab *v = (mg_vocab *)get(sizeof *v);
    const char *merges[RFI_COUNT(mg_merges)];
    memcpy(merges, mg_merges, sizeof merges);
    if (b->bpe) mg_bpe_vocab(v, 320);
    else mg_spm_vocab(v, 320);
    for (size_t i = 0; i < RFI_COUNT(keys); i++) {
        char key[64];
        int hit = b->key && strcmp(keys[i], b->key) == 0;
        snprintf(key, sizeof key, K "%s", keys[i]);
        if (hit && b->kind == SET_TEXT) *(i == 2 ? &v->list[4] : &merges[3]) = b->text;
        for (uint32_t k = 0; hit && b->kind >= SET_VALUE && k < 320; k++) {
            int32_t value = (int32_t)b->value;
            if (b->kind == ALL_VALUE || k == 4)
                memcpy(i == 3 ? (void *)&v->score[k] : (void *)&v->type[k], &value, 4);
        }
        if (hit && b->kind < SET_TEXT) put_key(w, key, b->kind, b->value, b->text);
        else if (i == 0) mg_kv_str(w, key, b->bpe ? "gpt2" : "llama");
        else if (i == 1) mg_kv_str(w, key, b->bpe ? "gpt-2" : "default");
        else if (i == 2) mg_kv_arr_str(w, key, v->list, 320);
        else if (i == 3 && !b->bpe) mg_kv_arr_f32(w, key, v->score, 320);
        else if (i == 4) mg_kv_arr_i32(w, key, v->type, 320);
        else if (i == 5 && b->bpe) mg_kv_arr_str(w, key, merges, RFI_COUNT(merges));
        else if (i == 6 || i == 7) mg_kv_u32(w, key, (uint32_t)i - 5);
    }
    free(v);
}

static void test_malformed(void) {
    const rf_result bad = RF_ERR_FORMAT, gone = RF_ERR_NOT_FOUND, no = RF_ERR_UNSUPPORTED, ok = RF_OK;
    const bad_case cases[] = {
        {0, NULL, DROP, 0, NULL, ok, NULL},
        {1, NULL, DROP, 0, NULL, ok, NULL},
        {0, "model", DROP, 0, NULL, gone, K "model"},
        {0, "model", U32, 0, NULL, bad, K "model"},
        {0, "model", STRS, 1, "llama", bad, "want a string"},
        {0, "model", STR, 0, "rwkv", no, "'rwkv'"},
        {0, "model", STR, 0, "", no, "''"},
        {0, "model", STR, 0, "llama\n", no, "'llama\\x0a'"},
        {1, "pre", STR, 0, "nonesuch", no, "'nonesuch'"},
        {1, "pre", STR, 0, "lfm2.5", no, "'lfm2.5'"},
        {1, "pre", U32, 3, NULL, bad, K "pre"},
        {1, "pre", DROP, 0, NULL, ok, NULL},
        {0, "pre", STR, 0, "nonesuch", ok, NULL}, /* SPM has none */
        {0, "tokens", DROP, 0, NULL, gone, K "tokens"},
        {0, "tokens", STR, 0, "abc", bad, "want an array of string"},
        {0, "tokens", U32S, 320, NULL, bad, "array of u32"},
        {0, "tokens", U8S, 320, NULL, bad, "array of u8"},
        {0, "tokens", STRS, 0, NULL, bad, "found 0"},
        {0, "tokens", STRS, 319, NULL, bad, "want 319 elements"},
        {0, "tokens", STRS, 321, NULL, bad, "want 321 elements"},
        {0, "tokens", SET_TEXT, 0, "<0x-1>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0x-f>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0xZZ>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0x 1>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0x+1>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0x>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0x", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "<0x0000000041>", bad, "element 4"},
        {0, "tokens", SET_TEXT, 0, "hello", bad, "'hello'"},
        {0, "tokens", SET_TEXT, 0, "<0x00>", ok, NULL}, /* twice: the first id wins */
        {0, "tokens", SET_TEXT, 0, "<0xaB>", ok, NULL},
        {1, "tokens", SET_TEXT, 0, "", ok, NULL},
        {1, "tokens", SET_TEXT, 0, "\xff\xfe", ok, NULL},
        {0, "scores", DROP, 0, NULL, ok, NULL},
        {0, "scores", F32S, 0, NULL, bad, "found 0"},
        {0, "scores", F32S, 1, NULL, bad, K "scores"},
        {0, "scores", F32S, 319, NULL, bad, "want 320 elements"},
        {0, "scores", F32S, 321, NULL, bad, "found 321"},
        {0, "scores", U8S, 320, NULL, bad, "array of u8"},
        {0, "scores", I32S, 320, NULL, bad, "want an array of f32"},
        {0, "scores", STRS, 320, "1", bad, K "scores"},
        {0, "scores", F32, 1, NULL, bad, "found f32"},
        {1, "scores", F32S, 319, NULL, bad, K "scores"},
        {0, "scores", ALL_VALUE, 0x7fc00000, NULL, ok, NULL}, /* NaN */
        {0, "scores", ALL_VALUE, 0x7f800000, NULL, ok, NULL},
        {0, "token_type", I32S, 0, NULL, bad, "found 0"},
        {0, "token_type", I32S, 319, NULL, bad, K "token_type"},
        {0, "token_type", U8S, 320, NULL, bad, "array of u8"},
        {0, "token_type", U32S, 320, NULL, bad, "want an array of i32"},
        {0, "token_type", I64S, 320, NULL, bad, "array of i64"},
        {0, "token_type", STRS, 320, "1", bad, K "token_type"},
        {0, "token_type", SET_VALUE, 7, NULL, bad, "element 4: want 0 to 6, found 7"},
        {0, "token_type", SET_VALUE, -1, NULL, bad, "found -1"},
        {0, "token_type", SET_VALUE, INT32_MIN, NULL, bad, "element 4"},
        {0, "token_type", SET_VALUE, INT32_MAX, NULL, bad, "element 4"},
        {0, "token_type", ALL_VALUE, 6, NULL, bad, "element 0"},
        {0, "token_type", ALL_VALUE, 0, NULL, ok, NULL},
        {0, "token_type", ALL_VALUE, 3, NULL, ok, NULL},
        {1, "token_type", ALL_VALUE, 3, NULL, ok, NULL},
        {0, "token_type", DROP, 0, NULL, ok, NULL},
        {0, "bos_token_id", U32, 320, NULL, bad, "want a token id below 320, found 320"},
        {0, "bos_token_id", U32, 0xffffffff, NULL, bad, "found 4294967295"},
        {0, "bos_token_id", I32, -1, NULL, bad, "found -1"},
        {0, "bos_token_id", STR, 0, "1", bad, "found string"},
        {0, "bos_token_id", F32, 1, NULL, bad, "found f32"},
        {0, "bos_token_id", BOOL, 1, NULL, bad, "found bool"},
        {0, "bos_token_id", U32S, 1, NULL, bad, "found array"},
        {0, "bos_token_id", DROP, 0, NULL, ok, NULL}, /* add_bos then adds nothing */
        {0, "bos_token_id", U32, 319, NULL, ok, NULL},
        {0, "eos_token_id", U32, 320, NULL, bad, K "eos_token_id"},
        {0, "eot_token_id", U32, 320, NULL, bad, K "eot_token_id"},
        {0, "unknown_token_id", U32, 0xffffffff, NULL, ok, NULL}, /* wrong in many files, and nothing depends on it */
        {0, "padding_token_id", I32, -1, NULL, ok, NULL},
        {0, "padding_token_id", STR, 0, "x", bad, K "padding_token_id"},
        {0, "add_bos_token", U32, 1, NULL, bad, "want a bool, found u32"},
        {0, "add_eos_token", STR, 0, "true", bad, "found string"},
        {0, "add_space_prefix", U8S, 1, NULL, bad, K "add_space_prefix"},
        {1, "merges", DROP, 0, NULL, gone, K "merges"},
        {1, "merges", U32S, 3, NULL, bad, "array of u32"},
        {1, "merges", STR, 0, "a b", bad, "want an array of string"},
        {1, "merges", STRS, 0, NULL, ok, NULL},
        {1, "merges", STRS, 2000, "h e", ok, NULL},
        {1, "merges", SET_TEXT, 0, "ab", bad, "element 3"},
        {1, "merges", SET_TEXT, 0, "", bad, "element 3"},
        {1, "merges", SET_TEXT, 0, " ", bad, "element 3"},
        {1, "merges", SET_TEXT, 0, " th", bad, "' th'"},
        {1, "merges", SET_TEXT, 0, "th ", bad, "'th '"},
        {1, "merges", SET_TEXT, 0, "a b c", bad, "'a b c'"},
        {1, "merges", SET_TEXT, 0, "zz zz", ok, NULL}, /* makes no token: pruned vocabularies have such */
        {1, "merges", SET_TEXT, 0, "\xff \xfe", ok, NULL},
        {0, "merges", STRS, 3, "?", ok, NULL}, /* SPM has none */
    };
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        const bad_case *b = &cases[i];
        mg_gguf w;
        opened o;
        mg_begin(&w, 3);
        put_bad_vocab(&w, b);
        open_file(&o, &w, NULL);
        rf_result got = o.t ? RF_OK : o.err.code;
        CHECK(got == b->want && (got == RF_OK || strstr(o.err.text, b->says)),
              "%s %s kind %d: want %d \"%s\", got %d \"%s\"", b->bpe ? "BPE" : "SPM", b->key, b->kind, b->want,
              b->says ? b->says : "", got, o.err.text);
        if (got == RF_ERR_FORMAT || (got == RF_ERR_UNSUPPORTED && o.err.where))
            CHECK(o.err.where > 0 && o.err.where < o.file.n && strstr(o.err.text, "at byte "), "%s", o.err.text);
        if (o.t) { /* what opens also works */
            static const char text[] = "<s>hello <|im_end|> \xff\xe2\x96\x81the 12\n";
            int32_t ids[128];
            uint32_t n = 0;
            size_t n_bytes;
            for (uint32_t flags = 0; flags < 4; flags++)
                CHECK(rf_tokenize(o.t, (rf_string){text, sizeof text - 1}, flags, ids, 128, &n, &o.err) == RF_OK, "%s: %s", b->key,
                      o.err.text);
            for (uint32_t k = 0; k < n; k++) CHECK(ids[k] >= 0 && ids[k] < 320, "id %d", ids[k]);
            for (int32_t id = 0; id < (int32_t)rf_tokenizer_get_info(o.t).n_vocab; id++)
                free(detok(o.t, &id, 1, RF_DETOKENIZE_SPECIAL, &n_bytes));
        }
        close_file(&o);
    }
}

/* ---- memory ---- */

static void test_no_memory(void) {
    static const char text[] = "hello <|im_end|> world <s> and 12 the \xff";
    for (int bpe = 0; bpe < 2; bpe++) {
        mg_gguf w;
        opened o;
        int32_t ids[64], want[64];
        uint32_t n = 0, n_want = 0;
        rf_result r = RF_ERR_MEMORY;
        mg_begin(&w, 3);
        mg_put_vocab(&w, bpe, "llama-bpe", 320);
        open_file(&o, &w, NULL);
        REQUIRE(o.t, "%s", o.err.text);
        REQUIRE(rf_tokenize(o.t, (rf_string){text, sizeof text - 1}, 3, want, 64, &n_want, NULL) == RF_OK, "tokenize");
        rf_tokenizer_close(o.t, NULL);
        o.t = NULL;
        int64_t before = mem.live, fails = 0;
        for (int64_t at = 1; at < 100 && r == RF_ERR_MEMORY; at++, fails++) {
            mem.calls = 0, mem.fail_at = at;
            r = rf_tokenizer_open(o.g, NULL, &o.t, &o.err);
            if (r == RF_OK) break;
            CHECK(r == RF_ERR_MEMORY && !o.t && o.err.code == RF_ERR_MEMORY && mem.live == before, "%s",
                  o.err.text);
        }
        CHECK(r == RF_OK && fails >= 5, "%d after %d failures", r, (int)fails);
        before = mem.live;
        r = RF_ERR_MEMORY;
        fails = 0;
        for (int64_t at = 1; o.t && at < 100 && r == RF_ERR_MEMORY; at++, fails++) {
            mem.calls = 0, mem.fail_at = at;
            r = rf_tokenize(o.t, (rf_string){text, sizeof text - 1}, 3, ids, 64, &n, &o.err);
            CHECK(mem.live == before, "%lld blocks leak", (long long)(mem.live - before));
            if (r == RF_OK) break;
            CHECK(r == RF_ERR_MEMORY && o.err.code == RF_ERR_MEMORY && n == 0, "%d %s", r, o.err.text);
        }
        mem.fail_at = 0;
        CHECK(r == RF_OK && fails >= 3 && n == n_want && memcmp(ids, want, n * sizeof *ids) == 0, "%d after %d", r,
              (int)fails);
        close_file(&o);
    }
}

/* ---- long texts ---- */

/* A megabyte of each (a quarter for the last two): work that grows with the square of the length would take hours. */
static void test_long_texts(void) {
    enum { BYTES = 1 << 20 };
    static const char *const patterns[] = {"a", " ", "1", "\xff", "<", "he", "\xe6\x97\xa5", "\n", "hello the ",
                                           "<|im_end|>", "  x"};
    static const char *const pres[] = {NULL, "llama-bpe", "default", "runs"};
    char *text = (char *)get(BYTES);
    int32_t *ids = (int32_t *)get(3 * (size_t)BYTES * sizeof *ids);
    for (size_t p = 0; p < RFI_COUNT(pres); p++) {
        opened o;
        if (pres[p] && strcmp(pres[p], "runs") == 0) { /* user-defined runs of spaces, as gpt-neox has them */
            mg_gguf w;
            char runs[64][64];
            const char *tokens[64];
            int32_t types[64];
            for (int i = 0; i < 64; i++) {
                memset(runs[i], ' ', 64);
                runs[i][i] = 0;
                tokens[i] = i == 0 ? "a" : runs[i];
                types[i] = i == 0 ? 1 : 4;
            }
            mg_begin(&w, 3);
            mg_kv_str(&w, K "model", "gpt2");
            mg_kv_arr_str(&w, K "tokens", tokens, 64);
            mg_kv_arr_i32(&w, K "token_type", types, 64);
            mg_kv_arr_str(&w, K "merges", tokens, 0);
            open_file(&o, &w, NULL);
        } else {
            open_made(&o, pres[p]);
        }
        for (size_t k = 0; o.t && k < RFI_COUNT(patterns); k++) {
            size_t len = strlen(patterns[k]), n_bytes = p < 2 ? BYTES : BYTES / 4;
            uint32_t n = 0;
            for (size_t i = 0; i < n_bytes; i++) text[i] = patterns[k][i % len];
            clock_t start = clock(); /* of the processor: other programs may be running */
            rf_result r = rf_tokenize(o.t, (rf_string){text, n_bytes}, 3, ids, 3u * BYTES, &n, &o.err);
            double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
            CHECK(r == RF_OK && seconds < 10, "%s, %s: %d, %.1f s", pres[p] ? pres[p] : "SPM", patterns[k], r,
                  seconds);
            if (p == 3 && k == 1) CHECK(n == n_bytes / 63 + 1, "%u runs of 63 spaces", n);
            if (p == 0 && k == 0) CHECK(n == BYTES + 1, "%u", n); /* bos, _a, then a each */
        }
        close_file(&o);
    }
    free(text);
    free(ids);
}

/* ---- memory, special tokens against a search without an automaton, cancelling ---- */

/* Vocabularies of every kind, for texts of any bytes. */
static const small every_kind[] = {
    {"llama", NULL, "nnnn", {"a", SP, SP "a", "aa"}, {NULL}, {0, -1, -2, -3}, 0, 0, NULL},
    {"llama", NULL, "nnnnu", {"a", SP, "a" SP "a", SP "a", "uu"}, {NULL}, {0, -1, -2, -3}, 0, 0, NULL}, /* not word by word */
    {"gpt2", "gpt-2", "nnnnnnu", {"a", "aa", "\xc3\xaf", "\xc2\xbf", "\xc2\xbd", "\xc3\xaf\xc2\xbf", "<"},
     {"a a", "\xc3\xaf \xc2\xbf"}, {0}, 0, 0, NULL},
    {"gpt2", "llama-bpe", "nnu", {"a", "aa", "uu"}, {"a a"}, {0}, 0, 0, NULL},
    {"gpt2", "gemma4", "nnnnu", {"a", "aa", SP, FFFD, "uu"}, {"a a"}, {0}, 0, 0, NULL},
    {"bert", NULL, "nnnx", {SP "a", "a", "aa", "[UNK]"}, {NULL}, {0}, 0, 0, NULL},
    {"t5", NULL, "nnxnu", {"a", "aa", "<unk>", "aaa", "uu"}, {NULL}, {-1, -2, 0, -3}, 0, 0, NULL}, /* of equal sums */
    {"t5", NULL, "nnxnnnn", {SP, SP SP, "<unk>", SP SP SP, "\xef\xbf\xbd", "!", "a" SP}, {NULL}, {-1, -2, 0, -3, -1, -1, -9}, 0, 0, NULL},
};

/* What opening a file with its tokenizer promises: 32 times the metadata, with tokens of every length and type. */
static void test_open_memory(void) {
    static const char *const models[] = {"gpt2", "llama", "bert", "t5"};
    static const uint32_t lengths[] = {1, 2, 3, 8, 15, 16, 17, 64, 256, 257, 1024, 1025};
    static const int32_t types[] = {RFI_TOKEN_NORMAL, RFI_TOKEN_CONTROL, RFI_TOKEN_USER};
    enum { BYTES = 1 << 18 };
    mg_rng rng = {3};
    for (size_t c = 0; c < RFI_COUNT(models) * RFI_COUNT(lengths) * RFI_COUNT(types); c++) {
        const char *model = models[c % RFI_COUNT(models)];
        const uint32_t len = lengths[c / RFI_COUNT(models) % RFI_COUNT(lengths)], n = BYTES / (len + 12);
        const int32_t type = types[c / RFI_COUNT(models) / RFI_COUNT(lengths)];
        mg_buf tokens = {0}, all_types = {0};
        char text[1025];
        opened o;
        mg_gguf w;
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t k = 0; k < len; k++) text[k] = (char)mg_next(&rng);
            mg_put_text(&tokens, text, len);
            mg_put_u32(&all_types, (uint32_t)type);
        }
        mg_begin(&w, 3);
        mg_kv_str(&w, K "model", model);
        mg_kv_arr(&w, K "tokens", MG_KV_STR, tokens.data, n, tokens.n);
        mg_kv_arr(&w, K "token_type", MG_KV_I32, all_types.data, n, all_types.n);
        if (strcmp(model, "gpt2") == 0) mg_kv_arr_str(&w, K "merges", NULL, 0);
        mem.peak = mem.now;
        open_file(&o, &w, NULL);
        CHECK(o.t && mem.peak <= 32 * (int64_t)o.file.n + 65536, "%s, %u tokens of %u bytes, type %d: %.1f times the file: %s", model, n, len,
              type, (double)mem.peak / (double)o.file.n, o.err.text);
        close_file(&o);
        mg_free(&tokens), mg_free(&all_types);
    }
}

/* What rf_tokenize promises, for texts that need most: one word, malformed, of spaces, of special tokens. */
static void test_memory(void) {
    static const char *const patterns[] = {"a", " ", "\xff", "a\xff", "\xe2", "!", "!\xff", "\n", "a ", "u", "uu!\xff", "<", "<!",
                                           FFFD, "\xf0\x9f\x98\x80", "\xd9\xa1", "  \xff"};
    enum { BYTES = 1 << 14 };
    char *text = (char *)get(2 * BYTES);
    int32_t *ids = (int32_t *)get(6 * (size_t)BYTES * sizeof *ids);
    for (size_t v = 0; v < RFI_COUNT(every_kind); v++) {
        opened o;
        open_small(&o, &every_kind[v]);
        for (size_t k = 0; o.t && k < 3 * RFI_COUNT(patterns); k++) { /* alone; a short and a long word; after others */
            const size_t len = strlen(patterns[k / 3]);
            size_t n_bytes = 0;
            if (k % 3) for (; n_bytes < (k % 3 == 1 ? 300 : BYTES); n_bytes++) text[n_bytes] = "a a!b"[n_bytes % 5];
            for (size_t i = 0; i < BYTES; i++) text[n_bytes++] = patterns[k / 3][i % len];
            uint32_t n = 0;
            const int64_t before = mem.now;
            mem.peak = mem.now;
            const rf_result r = rf_tokenize(o.t, (rf_string){text, n_bytes}, 3, ids, 6 * BYTES, &n, &o.err);
            const int64_t used = mem.peak - before;
            CHECK(r == RF_OK && mem.now == before, "%d: %s", r, o.err.text);
            CHECK(used <= 24 * (int64_t)n_bytes + 4096, "vocabulary %u, text %u: %.1f bytes per byte of text", (uint32_t)v, (uint32_t)k,
                  (double)used / (double)n_bytes);
        }
        close_file(&o);
    }
    free(text);
    free(ids);
}

/* Of all places where special tokens stand the longest are taken first, of equals the leftmost. */
static uint32_t take_specials(const rf_tokenizer *t, const char *text, uint32_t n, int all, int32_t *out) {
    static int32_t taken[512];
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++) taken[i] = -1;
    for (uint32_t len = n; len > 0; len--)
        for (uint32_t at = 0; at + len <= n; at++) {
            int32_t best = -1;
            int is_free = 1;
            for (uint32_t i = at; i < at + len; i++) is_free &= taken[i] == -1;
            for (uint32_t id = 0; is_free && id < t->n_vocab; id++) {
                const rf_string s = rf_token_get_text(t, (int32_t)id);
                const uint32_t type = rfi_token_type(t, id);
                if (s.len != len || memcmp(s.data, text + at, len) != 0) continue;
                if (type != RFI_TOKEN_USER && !(all && type == RFI_TOKEN_CONTROL)) continue;
                if (best < 0 || (type == RFI_TOKEN_USER && rfi_token_type(t, (uint32_t)best) != RFI_TOKEN_USER)) best = (int32_t)id;
            }
            for (uint32_t i = at; best >= 0 && i < at + len; i++) taken[i] = i == at ? best : -2;
        }
    for (uint32_t i = 0; i < n; i++)
        if (taken[i] != -2) out[count++] = taken[i] >= 0 ? taken[i] : text[i] - 'a'; /* plain: tokens 0 and 1 */
    return count;
}

static void test_special_search(void) {
    mg_rng seed = {7};
    for (int round = 0; round < 60; round++) {
        char texts[24][16], text[300];
        small s = {"gpt2", "gpt-2", NULL, {"a", "b"}, {NULL}, {0}, 0, 0, NULL};
        char types[25] = "nn";
        opened o;
        for (int i = 2; i < 24; i++) { /* tokens of two letters that overlap, nest and repeat */
            const uint32_t len = 1 + mg_below(&seed, round % 2 ? 12 : 4);
            for (uint32_t k = 0; k < len; k++) texts[i][k] = (char)('a' + (mg_below(&seed, 4) == 0));
            texts[i][len] = 0;
            s.tokens[i] = texts[i];
            types[i] = mg_below(&seed, 3) ? 'u' : 'c';
        }
        s.types = types;
        open_small(&o, &s);
        for (int k = 0; o.t && k < 8; k++) {
            const uint32_t n = 1 + mg_below(&seed, 250);
            int32_t ids[300], want[300];
            uint32_t n_ids = 0;
            for (uint32_t i = 0; i < n; i++) text[i] = (char)('a' + (mg_below(&seed, 5) == 0));
            const uint32_t flags = k % 2 ? RF_TOKENIZE_SPECIAL : 0, n_want = take_specials(o.t, text, n, k % 2, want);
            const rf_result r = rf_tokenize(o.t, (rf_string){text, n}, flags, ids, 300, &n_ids, &o.err);
            CHECK(r == RF_OK && n_ids == n_want && memcmp(ids, want, n_ids * sizeof *ids) == 0, "round %d, text %d: %u, want %u tokens",
                  round, k, n_ids, n_want);
        }
        close_file(&o);
    }
}

/* Thousands of user-defined tokens that share prefixes: a search for each at each byte took 46 s a megabyte. */
static void test_special_fan(void) {
    enum { TOKENS = 6001, BYTES = 1 << 20 };
    char (*texts)[1040] = (char (*)[1040])get(TOKENS * sizeof *texts), *text = (char *)get(BYTES);
    const char **tokens = (const char **)get(TOKENS * sizeof *tokens);
    int32_t *types = (int32_t *)get(TOKENS * sizeof *types), *ids = (int32_t *)get(BYTES * sizeof *ids);
    opened o;
    mg_gguf w;
    for (int i = 0; i < TOKENS; i++) { /* a; then 1 to 1,000 times a, and the same with one more letter */
        const int n = i == 0 ? 1 : 1 + (i - 1) / 6;
        memset(texts[i], 'a', (size_t)n);
        if (i > 0 && (i - 1) % 6) texts[i][n] = (char)('b' + (i - 1) % 6);
        tokens[i] = texts[i];
        types[i] = i == 0 ? RFI_TOKEN_NORMAL : RFI_TOKEN_USER;
    }
    memset(text, 'a', BYTES);
    mg_begin(&w, 3);
    mg_kv_str(&w, K "model", "gpt2");
    mg_kv_arr_str(&w, K "tokens", tokens, TOKENS);
    mg_kv_arr_i32(&w, K "token_type", types, TOKENS);
    mg_kv_arr_str(&w, K "merges", tokens, 0);
    open_file(&o, &w, NULL);
    REQUIRE(o.t, "%s", o.err.text);
    uint32_t n = 0;
    const clock_t start = clock();
    const rf_result r = rf_tokenize(o.t, (rf_string){text, BYTES}, 0, ids, BYTES, &n, &o.err);
    const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    CHECK(r == RF_OK && n == BYTES / 1000 + 1 && seconds < 10, "%d: %u tokens in %.1f s", r, n, seconds);
    close_file(&o);
    free(texts), free(text), free(tokens), free(types), free(ids);
}

typedef struct cancelling { int n_asked, stop_at; } cancelling; /* 0: never */

static int ask(void *user) {
    cancelling *c = (cancelling *)user;
    return ++c->n_asked == c->stop_at;
}

/* A call that is cancelled at any of the places where it asks says so and leaves nothing. */
static void test_cancel(void) {
    static const char *const patterns[] = {"a", " ", "uu", "a a!", "\xff"};
    enum { BYTES = 1 << 15 };
    char *text = (char *)get(BYTES);
    for (size_t v = 0; v < RFI_COUNT(every_kind); v++) {
        opened o;
        open_small(&o, &every_kind[v]);
        for (size_t k = 0; o.t && k < RFI_COUNT(patterns); k++) {
            cancelling c = {0, 0};
            rf_tokenize_desc desc = {.cancel_fn = ask, .cancel_user = &c};
            uint32_t n = 0;
            for (size_t i = 0, len = strlen(patterns[k]); i < BYTES; i++) text[i] = patterns[k][i % len];
            rf_result r = rf_tokenize_with(o.t, (rf_string){text, BYTES}, &desc, NULL, 0, &n, &o.err);
            CHECK((r == RF_OK || r == RF_ERR_CAPACITY) && c.n_asked >= 3, "%d: asked %d times", r, c.n_asked);
            for (int n_asked = c.n_asked, at = 1; at <= n_asked; at++) {
                const int64_t before = mem.live;
                c = (cancelling){0, at};
                n = 1;
                r = rf_tokenize_with(o.t, (rf_string){text, BYTES}, &desc, NULL, 0, &n, &o.err);
                CHECK(r == RF_ERR_CANCELLED && o.err.code == r && n == 0 && c.n_asked == at && mem.live == before,
                      "vocabulary %d, text %d: %d at %d, asked %d times", (int)v, (int)k, r, at, c.n_asked);
            }
        }
        close_file(&o);
    }
    free(text);
}

/* Text of the caller between borders becomes none of the template's markers, neither as a special token nor by merging;
 * user-defined tokens that are no markers are taken there as everywhere. */
static void test_markers(void) {
    static const small bpe = {"gpt2", "gpt-2", "nnnnnuuuuucnn", {"<", "|", ">", "n", "<|", "<|>", "<n>", "nn", "<nn", "xx", "<n", "nnn", ">|"},
                              {"< |", "<| >", "n n", "nn n", "> |"}, {0}, 0, 0, NULL};
    static const struct { const char *markers, *text; size_t borders[4]; uint32_t n_borders; const char *want; } cases[] = {
        {"[<|>]", "<|><|>", {3, 6}, 2, "5 4 2"},       /* the template's is a marker, the message's is plain text      */
        {"[<|>]", "<|><|>", {0, 0}, 0, "5 5"},         /* no borders: all is the template's                            */
        {"", "<|><|>", {0, 6}, 2, "5 5"},              /* no marker: user-defined tokens are taken in messages          */
        {"<|>", "<n><nn", {0, 6}, 2, "6 8"},           /* others, too                                                  */
        {"<|> nn", "nnxx", {0, 4}, 2, "7 9"},          /* words are no markers, though the template has them           */
        {"<|>", "<|><|>", {1, 5}, 2, "4 2 4 2"},       /* no marker across a border                                    */
        {"<|>", "<n", {0, 2}, 2, "0 3"},               /* no control token in a message, marker or not                 */
        {"<|>", "<n", {0, 0}, 2, "10"},                /* an empty message hides nothing                               */
        {"<|>", "<|<|>", {0, 2, 2, 2}, 4, "4 5"},      /* two messages side by side                                    */
    };
    opened o;
    open_small(&o, &bpe);
    for (size_t i = 0; o.t && i < RFI_COUNT(cases); i++) {
        int32_t ids[32];
        char got[256];
        uint8_t markers[8] = {0};
        rfi_markers_add(o.t, rf_string_of(cases[i].markers), markers);
        rfi_tokenizing w = {.t = o.t, .err = &o.err, .out = ids, .capacity = 32, .borders = cases[i].borders,
                            .n_borders = cases[i].n_borders, .markers = markers};
        const rf_result r = rfi_tokenize(&w, rf_string_of(cases[i].text), RF_TOKENIZE_SPECIAL);
        ids_text(got, sizeof got, ids, w.count);
        CHECK(r == RF_OK && strcmp(got, cases[i].want) == 0, "case %d: want %s, got %s", (int)i, cases[i].want, got);
    }
    close_file(&o);
}

/* The same for the scanners of every rule: no run of one class, nor a start that leads nowhere, may cost its square. */
static void test_long_scans(void) {
    enum { BYTES = 1 << 15 };
    static const char *const patterns[] = {
        "a", "A", "\xc3\xa9", "A\xc3\xa9", "1", "\xd9\xa1", "1\xd9\xa1", " ", "\n", " \n", "\xe3\x80\x80", ".", "+", "\x01",
        "\xcc\x81", "\xe4\xb8\x80", "\xff", "'", "/", "a ", "1a", "1_", "<sentinel:1", "IMGIMGA", "  x"};
    unsigned char *text = (unsigned char *)get(BYTES + 4);
    for (size_t p = 0; p < RFI_COUNT(rfi_pres); p++) {
        for (size_t k = 0; k < 2 * RFI_COUNT(patterns); k++) { /* alone, and with another character at the end */
            const char *pattern = patterns[k / 2];
            size_t len = strlen(pattern), n = BYTES - BYTES % len;
            for (size_t i = 0; i < n; i++) text[i] = (unsigned char)pattern[i % len];
            if (k % 2) text[n++] = 'x';
            clock_t start = clock();
            rfi_tokenizing w = {.t = NULL};
            rfi_cutter cutter = rfi_cut(&w, &rfi_pres[p], text, (uint32_t)n);
            uint32_t pos = 0, stuck = 0;
            while (pos < n && !stuck) {
                uint32_t end = rfi_cut_next(&cutter, pos);
                stuck = end <= pos;
                pos = end;
            }
            double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
            CHECK(pos == n && !stuck && seconds < 0.5, "%s, %s: stopped at %u after %.1f s", rfi_pres[p].names, pattern, pos, seconds);
            cancelling once = {0, 1};
            w = (rfi_tokenizing){.n_steps = 3000, .cancel_fn = ask, .cancel_user = &once};
            cutter = rfi_cut(&w, &rfi_pres[p], text, (uint32_t)n);
            for (pos = 0; pos < n && !w.cancelled; stuck++) pos = rfi_cut_next(&cutter, pos);
            CHECK(pos <= n && once.n_asked <= 1, "%s, %s: cancelled, went on to %u", rfi_pres[p].names, pattern, pos);
        }
    }
    free(text);
}

/* ---- llama.cpp's answers ---- */

static char zoo[600];

static int have_zoo(const char *program) {
    static const char *const tries[] = {"../shared/zoo", "../../shared/zoo", "../../../shared/zoo"};
    const char *slash = strrchr(program, '/');
    for (size_t i = 0; i < 2 * RFI_COUNT(tries); i++) {
        char path[700];
        int dir = i % 2 && slash ? (int)(slash - program) : 0;
        snprintf(zoo, sizeof zoo, "%.*s%s%s", dir, program, dir ? "/" : "", tries[i / 2]);
        snprintf(path, sizeof path, "%s/golden/tokenizer/strings.json", zoo);
        if (have_file(path)) return 1;
    }
    return 0;
}

static char *read_text(const char *name) {
    char path[700];
    snprintf(path, sizeof path, "%s/golden/tokenizer/%s.json", zoo, name);
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    mg_buf b = {0};
    char chunk[65536];
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, f)) > 0;) mg_put(&b, chunk, n);
    mg_put(&b, "", 1);
    fclose(f);
    return (char *)b.data;
}

/* The little of JSON these files need: what follows "key":, the next [numbers], the next "string". */
static const char *json_key(const char *p, const char *key) {
    char quoted[128];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    p = p ? strstr(p, quoted) : NULL;
    return p ? p + strlen(quoted) : NULL;
}
static const char *json_ids(const char *p, int32_t *ids, uint32_t capacity, uint32_t *n) {
    *n = 0;
    while (*p && *p != ']' && !(*p == '[' && p[1] != '[')) p++;
    for (p += *p == '['; *p && *p != ']';) {
        char *end;
        long v = strtol(p, &end, 10);
        if (end == p) p++;
        else {
            if (*n < capacity) ids[(*n)++] = (int32_t)v;
            p = end;
        }
    }
    return *p ? p + 1 : p;
}
static const char *json_string(const char *p, const char **s, size_t *n) {
    p = p ? strchr(p, '"') : NULL;
    const char *end = p ? strchr(p + 1, '"') : NULL;
    *s = end ? p + 1 : "";
    *n = end ? (size_t)(end - p - 1) : 0;
    return end ? end + 1 : NULL;
}
static size_t unhex(const char *hex, size_t n, char *out) {
    for (size_t i = 0; i + 1 < n; i += 2) out[i / 2] = (char)(rfi_hex_digit(hex[i]) << 4 | rfi_hex_digit(hex[i + 1]));
    return n / 2;
}

enum { MAX_STRINGS = 400, MAX_BYTES = 4096 };
static struct {
    char text[MAX_BYTES];
    size_t n;
} *strings;
static size_t n_strings;

static void read_strings(void) {
    char *json = read_text("strings");
    const char *p = json, *s;
    size_t n;
    free(strings);
    strings = get(MAX_STRINGS * sizeof *strings);
    for (n_strings = 0; p && n_strings < MAX_STRINGS && (p = json_string(p, &s, &n)) && n < 2 * MAX_BYTES;
         n_strings++)
        strings[n_strings].n = unhex(s, n, strings[n_strings].text);
    free(json);
}

static rf_result open_vocab(opened *o, const char *name, const char *pre) {
    char path[700];
    memset(o, 0, sizeof *o);
    snprintf(path, sizeof path, "%s/vocab/%s.gguf", zoo, name);
    rf_result r = rf_gguf_open(path, NULL, &o->g, &o->err);
    return r == RF_OK ? rf_tokenizer_open(o->g, pre, &o->t, &o->err) : r;
}

/* Well-formed UTF-8? Written apart from the library's, which it judges. */
static int is_utf8(const char *s, size_t n) {
    const unsigned char *p = (const unsigned char *)s;
    for (size_t i = 0; i < n;) {
        if ((p[i] >= 0x80 && p[i] < 0xc2) || p[i] > 0xf4) return 0;
        size_t more = p[i] < 0x80 ? 0 : p[i] < 0xe0 ? 1 : p[i] < 0xf0 ? 2 : 3;
        if (n - i <= more) return 0;
        uint32_t cp = more == 0 ? p[i] : p[i] & (0x3fu >> more);
        for (size_t k = 1; k <= more; k++) {
            if (p[i + k] >> 6 != 2) return 0;
            cp = cp * 64 + p[i + k] % 64;
        }
        if ((more == 2 && (cp < 0x800 || cp - 0xd800 < 0x800)) || (more == 3 && (cp < 0x10000 || cp > 0x10ffff)))
            return 0;
        i += more + 1;
    }
    return 1;
}

static size_t without_spaces(char *s, size_t n) {
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (s[i] != ' ') s[k++] = s[i];
    return k;
}

/* Golden texts of the ids with bos. SPM: llama.cpp keeps the space it wrote, we take it back. BPE: llama.cpp drops
 * some spaces before punctuation, so spaces are not compared here. Without p the ids must give the string itself.
 * Texts that are not UTF-8 are not compared, but ours must be. */
static int compare_texts(const rf_tokenizer *t, const char *what, const char *ids_at, const char *p, uint32_t flags) {
    int bad = 0, n_compared = 0, spm = strcmp(rf_tokenizer_get_info(t).model, "llama") == 0;
    ids_at = ids_at ? strchr(ids_at, '[') : NULL;
    CHECK(ids_at, "%s: no golden ids", what);
    for (size_t i = 0; ids_at && i < n_strings; i++) {
        int32_t ids[MAX_BYTES];
        uint32_t n;
        const char *hex;
        size_t n_hex, n_got, n_want = strings[i].n;
        char text[2 * MAX_BYTES], *want = text;
        memcpy(text, strings[i].text, n_want);
        ids_at = json_ids(ids_at + (i == 0), ids, MAX_BYTES, &n);
        char *got = detok(t, ids, n, flags, &n_got);
        int good = is_utf8(got, n_got);
        if (p) {
            p = json_string(p, &hex, &n_hex);
            n_want = unhex(hex, n_hex, want);
            if (spm && !(flags & RF_DETOKENIZE_SPECIAL) && n_want && *want == ' ') want++, n_want--;
            if (!spm) n_want = without_spaces(want, n_want), n_got = without_spaces(got, n_got);
        }
        int has_mark = 0; /* SPM's U+2581 comes back as a space; llama.cpp's own text has it so */
        for (size_t k = 0; !p && spm && k + 3 <= n_want; k++) has_mark |= memcmp(want + k, SP, 3) == 0;
        if (is_utf8(want, n_want) && !has_mark)
            n_compared++, good = good && n_want == n_got && memcmp(want, got, n_got) == 0;
        if (!good && bad++ < 3)
            printf("    %s, string %d: want \"%.*s\", got \"%.*s\"\n", what, (int)i, (int)n_want, want, (int)n_got,
                   got);
        free(got);
    }
    CHECK(n_compared > 300, "%s: %d texts compared", what, n_compared);
    return bad;
}

static void test_zoo_texts(void) {
    static const struct { const char *name; int n_lossy; } vocabs[] = { /* texts with bytes that have no token */
        {"gpt-2", 0}, {"gpt-neox", 0}, {"llama-spm", 0}, {"phi-3", 0}, {"refact", 0}, {"falcon", 2},
        {"deepseek-coder", 0}};
    read_strings();
    REQUIRE(n_strings == 326, "%d strings", (int)n_strings);
    for (size_t i = 0; i < RFI_COUNT(vocabs); i++) {
        const char *name = vocabs[i].name;
        opened o;
        char *json = read_text(name);
        CHECK(json && open_vocab(&o, name, NULL) == RF_OK, "%s: %s", name, o.err.text);
        if (json && o.t) {
            int bad = compare_texts(o.t, name, json_key(json, "full"), json_key(json, "detok"), RF_DETOKENIZE_SPECIAL);
            bad += compare_texts(o.t, name, json_key(json, "full"), json_key(json, "detok_nospecial"), 0);
            bad += compare_texts(o.t, name, json_key(json, "plain"), NULL, 0) - vocabs[i].n_lossy;
            CHECK(bad == 0, "%s: texts of %d strings differ", name, bad);
        }
        free(json);
        close_file(&o);
    }
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_words);
    RUN(test_unicode_classes);
    RUN(test_bpe_by_hand);
    RUN(test_spm_by_hand);
    RUN(test_wpm_by_hand);
    RUN(test_ugm_by_hand);
    RUN(test_charsmap_malformed);
    RUN(test_whole_words);
    RUN(test_special_tokens);
    RUN(test_ends);
    RUN(test_detokenize);
    RUN(test_round_trip);
    RUN(test_capacity_and_arguments);
    RUN(test_malformed);
    RUN(test_no_memory);
    RUN(test_long_texts);
    RUN(test_open_memory);
    RUN(test_memory);
    RUN(test_special_search);
    RUN(test_special_fan);
    RUN(test_cancel);
    RUN(test_markers);
    RUN(test_long_scans);
    RUN_IF(have_file(example_path), test_shipped_model, "no examples/shakespeare-5m.gguf");
    RUN_IF(have_zoo(argv[0]), test_zoo_texts, "no ../shared/zoo");
    RFT_END();
}
