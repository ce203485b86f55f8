/* test_fuzz.c: untrusted bytes in every place where the library or the program in examples/ takes them. One source:
 *     build/test_fuzz                          the suite: seeds, truncations, a few mutations
 *     build/test_fuzz mutate N [SEED]          N mutations of the seeds' metadata, through to a token
 *     build/test_fuzz seeds DIR                write the seeds to DIR/TARGET/
 *     build/test_fuzz run TARGET FILE...       what a fuzzer found, once more, without the fuzzer
 *     build/fuzz TARGET [libFuzzer arguments]  the same source with -DRF_LIBFUZZER (`make fuzz`)
 * A target ends the process if a promise is broken that no sanitizer sees. */
#define _GNU_SOURCE /* memmem */
#define RFI_GGUF_FIRST_READ 64u
#define main rocmforge_cli_main
#include "../examples/rocmforge_cli.c"
#undef main

#include "make_gguf.h"
#include "rf_life.h"
#include "rf_test.h"

/* ---- input in pieces ---- */

/* The text up to the next separator, as a copy of exactly its length. */
typedef struct pieces {
    const unsigned char *at, *end;
    int more;
} pieces;

#define SEPARATOR 0x1e

static char *next_piece(pieces *p, size_t *n) {
    if (!p->more) return NULL;
    const unsigned char *stop = p->at == p->end ? NULL : memchr(p->at, SEPARATOR, (size_t)(p->end - p->at));
    *n = (size_t)((stop ? stop : p->end) - p->at);
    char *text = (char *)malloc(*n + 1);
    MUST(text != NULL, "out of memory");
    if (*n) memcpy(text, p->at, *n);
    text[*n] = 0;
    p->more = stop != NULL;
    p->at = stop ? stop + 1 : p->end;
    return text;
}

static unsigned next_byte(pieces *p) { return p->at < p->end ? *p->at++ : 0; }

static int is_utf8(const char *text, size_t n) {
    for (size_t i = 0; i < n;) {
        uint32_t c, len = utf8_next(text + i, n - i, &c);
        if (!len) return 0;
        i += len;
    }
    return 1;
}

/* ---- a file ---- */

static life_stage live(const life_file *f, size_t n) {
    life l = {0};
    life_run(&l, f, 1);
    MUST(l.stage == LIFE_DONE || (l.err.code < 0 && l.err.text[0]), "a failure without code or text");
    MUST(l.left == 0, "%llu blocks are left", LLU(l.left));
    MUST(l.open_peak <= 8 * n + (64u << 10), "opening %zu bytes took %llu", n, LLU(l.open_peak));
    MUST(l.plan_peak <= 32 * n + (256u << 10), "planning %zu bytes took %llu", n, LLU(l.plan_peak));
    for (const char *p = l.err.text; *p; p++) MUST(*p >= 0x20 && *p < 0x7f, "byte %d in a message", *p);
    return l.stage;
}

static life_stage fuzz_gguf_stage(const unsigned char *data, size_t n) {
    return live(&(life_file){.data = data, .size_bytes = n}, n);
}
static void fuzz_gguf(const unsigned char *data, size_t n) { fuzz_gguf_stage(data, n); }

/* ---- files of one or more parts, read in pieces ---- */

#define NEXT_PART "\nNEXTPART"
#define MAX_PARTS 4

typedef struct disk {
    const unsigned char *part[MAX_PARTS];
    size_t size[MAX_PARTS];
    unsigned n;
} disk;

static int64_t disk_open(const char *name, uint64_t *size_bytes, void *user) {
    disk *d = (disk *)user;
    unsigned no = 1, count = 1;
    int end = 0;
    int whole = strcmp(name, "m.gguf") == 0;
    if (!whole && (sscanf(name, "m-%5u-of-%5u.gguf%n", &no, &count, &end) != 2 || name[end])) return -ENOENT;
    if (no < 1 || no > d->n) return -ENOENT;
    *size_bytes = d->size[no - 1];
    return no;
}
static int64_t disk_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    disk *d = (disk *)user;
    MUST(handle >= 1 && handle <= d->n && offset <= d->size[handle - 1], "a read at %llu", LLU(offset));
    size_t left = d->size[handle - 1] - (size_t)offset, most = 1 + offset * 7919 % 301;
    if (n > left) n = left;
    if (n > most) n = most;
    if (n) memcpy(dst, d->part[handle - 1] + offset, n);
    return (int64_t)n;
}
static void disk_close(int64_t handle, void *user) { (void)handle, (void)user; }

static life_stage fuzz_files_stage(const unsigned char *data, size_t n) {
    disk d = {.n = 1};
    char name[32] = "m.gguf";
    for (const unsigned char *at = data, *end = data + n, *next = NULL;; at = next + sizeof NEXT_PART - 1) {
        next = d.n < MAX_PARTS ? memmem(at, (size_t)(end - at), NEXT_PART, sizeof NEXT_PART - 1) : NULL;
        d.part[d.n - 1] = at;
        d.size[d.n - 1] = (size_t)((next ? next : end) - at);
        if (!next) break;
        d.n++;
    }
    if (d.n > 1) snprintf(name, sizeof name, "m-00001-of-%05u.gguf", d.n);
    const rf_io io = {.open_fn = disk_open, .read_fn = disk_read, .close_fn = disk_close, .user = &d};
    return live(&(life_file){.path = name, .io = &io}, n);
}
static void fuzz_files(const unsigned char *data, size_t n) { fuzz_files_stage(data, n); }

/* ---- a text ---- */

static mg_buf vocab_file(int bpe, const char *pre) {
    mg_buf file = {0};
    mg_gguf w;
    mg_begin(&w, 3);
    mg_put_vocab(&w, bpe, pre, 330);
    mg_finish(&w, &file);
    return file;
}

/* A vocabulary of pieces, BPE merges being those that hold a space; the first byte of a piece says its type. */
/* UGM's table of replacements from edges of 3 bytes: node, byte, child and flags. Children lie at 256 node ^ byte. */
static void put_charsmap(mg_gguf *w, pieces *p) {
    enum { UNITS = 2048 };
    static const char texts[] = "\0a\0b c\0\xef\xbf\xbd\0 ";
    uint32_t units[1 + UNITS] = {4 * UNITS, 256 << 10};
    mg_buf b = {0};
    size_t n;
    unsigned char *edges = (unsigned char *)next_piece(p, &n);
    for (uint32_t k = 1; k < 8; k++) units[1 + 256 * k] = 0x80000000u | (2 * k - 2);
    for (size_t i = 0; i + 3 <= n; i += 3) {
        const uint32_t index = 256 * (edges[i] % 8u) ^ edges[i + 1], child = 256 * (edges[i + 2] % 8u), flags = edges[i + 2] / 8u;
        units[1 + index] = (index ^ child ^ (flags & 8 ? flags << 16 : 0)) << 10 | edges[i + 1] | (flags & 7 ? 256 : 0) | flags >> 4 << 31;
    }
    mg_put(&b, units, sizeof units);
    mg_put(&b, texts, sizeof texts);
    mg_kv_arr(w, "tokenizer.ggml.precompiled_charsmap", MG_KV_I8, b.data, b.n, b.n);
    mg_kv_bool(w, "tokenizer.ggml.add_space_prefix", n % 2);
    mg_kv_bool(w, "tokenizer.ggml.remove_extra_whitespaces", n / 2 % 2);
    mg_free(&b);
    free(edges);
}

static mg_buf piece_vocab_file(pieces *p, const char *model) {
    int bpe = strcmp(model, "gpt2") == 0;
    mg_buf tokens = {0}, merges = {0}, types = {0}, scores = {0}, file = {0};
    uint32_t n_tokens = 0, n_merges = 0;
    mg_gguf w;
    mg_begin(&w, 3);
    if (strcmp(model, "t5") == 0) put_charsmap(&w, p);
    while (p->more && n_tokens < 500) {
        size_t n;
        pieces ahead = *p;
        char *text = next_piece(&ahead, &n);
        if (!ahead.more) { /* the last piece is the text */
            free(text);
            break;
        }
        *p = ahead;
        uint32_t type = n && text[0] >= '1' && text[0] <= '6' ? (uint32_t)(text[0] - '0') : 1;
        if (bpe && memchr(text, ' ', n)) {
            mg_put_text(&merges, text, n), n_merges++;
        } else {
            float score = -(float)(n * 7 % 5);
            mg_put_text(&tokens, text + (n > 0), n - (n > 0)), n_tokens++;
            mg_put_u32(&types, type);
            mg_put(&scores, &score, 4);
        }
        free(text);
    }
    mg_kv_str(&w, "tokenizer.ggml.model", model);
    mg_kv_str(&w, "tokenizer.ggml.pre", "gpt-2");
    mg_kv_arr(&w, "tokenizer.ggml.tokens", MG_KV_STR, tokens.data, n_tokens, tokens.n);
    mg_kv_arr(&w, "tokenizer.ggml.token_type", MG_KV_I32, types.data, n_tokens, types.n);
    if (bpe) mg_kv_arr(&w, "tokenizer.ggml.merges", MG_KV_STR, merges.data, n_merges, merges.n);
    else mg_kv_arr(&w, "tokenizer.ggml.scores", MG_KV_F32, scores.data, n_tokens, scores.n);
    mg_finish(&w, &file);
    mg_free(&tokens), mg_free(&merges), mg_free(&types), mg_free(&scores);
    return file;
}

/* Ids to text again, a token at a time. */
static char *spell(const rf_tokenizer *t, const int32_t *ids, uint32_t n_ids, uint32_t flags, size_t *n) {
    rf_detokenizer state = {.tokenizer = t};
    char *text = NULL;
    size_t capacity = 0, bytes = 0;
    *n = 0;
    for (uint32_t i = 0; i <= n_ids; i++) {
        int32_t id = i < n_ids ? ids[i] : -1;
        uint32_t f = flags | (i == n_ids ? RF_DETOKENIZE_FINISH : 0);
        rf_detokenizer before = state;
        rf_result r = rf_detokenize(&state, id, f, NULL, 0, &bytes, NULL);
        MUST(r == RF_OK ? bytes == 0 : r == RF_ERR_CAPACITY && memcmp(&before, &state, sizeof state) == 0, "token %d",
             id);
        if (r == RF_OK) continue; /* nothing to give out, and done */
        if (*n + bytes > capacity) {
            capacity = 2 * (*n + bytes) + 64;
            text = (char *)realloc(text, capacity);
            MUST(text != NULL, "out of memory");
        }
        MUST(rf_detokenize(&state, id, f, text + *n, bytes, &bytes, NULL) == RF_OK, "token %d", id);
        *n += bytes;
    }
    return text;
}

static void check_text(const rf_tokenizer *t, const char *text, size_t n, uint32_t flags, int all_bytes) {
    uint32_t count = 0, again = 0, n_vocab = rf_tokenizer_get_info(t).n_vocab;
    rf_result r = rf_tokenize(t, (rf_string){text, n}, flags, NULL, 0, &count, NULL);
    const int is_ugm = strcmp(rf_tokenizer_get_info(t).model, "t5") == 0; /* whose replacements may be long, or lead nowhere */
    if (is_ugm && r == RF_ERR_FORMAT) return;
    MUST(r == (count ? RF_ERR_CAPACITY : RF_OK), "%s", rf_result_name(r));
    MUST(count <= (is_ugm ? 16 : 3) * n + 8, "%zu bytes give %u tokens", n, count);
    int32_t *ids = (int32_t *)malloc((count + !count) * sizeof *ids); /* exactly: a sanitizer sees one too many */
    MUST(ids != NULL, "out of memory");
    MUST(rf_tokenize(t, (rf_string){text, n}, flags, ids, count, &again, NULL) == RF_OK && again == count, "%u, then %u", count,
         again);
    for (uint32_t i = 0; i < count; i++) MUST(ids[i] >= 0 && (uint32_t)ids[i] < n_vocab, "token %d", ids[i]);
    size_t n_out;
    char *out = spell(t, ids, count, RF_DETOKENIZE_SPECIAL, &n_out);
    MUST(is_utf8(out, n_out), "detokenized text is not UTF-8");
    free(out);
    out = spell(t, ids, count, 0, &n_out);
    if (all_bytes && !(flags & RF_TOKENIZE_SPECIAL) && is_utf8(text, n) && !memmem(text, n, MG_SPACE, 3))
        MUST(n_out == n && (n == 0 || memcmp(out, text, n) == 0), "other text comes back");
    free(out);
    free(ids);
}

/* First byte: which vocabulary; second: flags; then pieces for a vocabulary, and the text. */
static void fuzz_tokenizer(const unsigned char *data, size_t n) {
    static const char *const models[] = {"bert", "gpt2", "llama", "t5"};
    static rf_tokenizer *known[RFI_COUNT(rfi_pres) + 1];
    static mg_buf files[RFI_COUNT(rfi_pres) + 1]; /* open as long as the process */
    pieces p = {data, data + n, 1};
    unsigned which = next_byte(&p), flags = next_byte(&p) & (RF_TOKENIZE_SPECIAL | RF_TOKENIZE_ADD);
    unsigned i = which < 252 ? which % RFI_COUNT(known) : which - 252 + (unsigned)RFI_COUNT(known);
    rf_tokenizer *t = NULL;
    rf_gguf *g = NULL;
    mg_buf file = {0};
    if (i < RFI_COUNT(known)) {
        if (!known[i]) {
            files[i] = vocab_file(i > 0, i ? rfi_pres[i - 1].names : NULL);
            MUST(rf_gguf_open_memory(files[i].data, files[i].n, NULL, &g, NULL) == RF_OK &&
                     rf_tokenizer_open(g, NULL, &known[i], NULL) == RF_OK, "vocabulary %u", i);
        }
        t = known[i], g = NULL;
    } else {
        file = piece_vocab_file(&p, models[i - RFI_COUNT(known)]);
        MUST(rf_gguf_open_memory(file.data, file.n, NULL, &g, NULL) == RF_OK, "vocabulary");
        if (rf_tokenizer_open(g, NULL, &t, NULL) != RF_OK) t = NULL;
    }
    size_t left = (size_t)(p.end - p.at);
    char *text = (char *)malloc(left + !left);
    MUST(text != NULL, "out of memory");
    if (left) memcpy(text, p.at, left);
    int is_raw = i > 0 && i < RFI_COUNT(known) && rfi_pres[i - 1].flags & RFI_PRE_RAW; /* drops what has no token */
    if (t) check_text(t, text, left, flags, i < RFI_COUNT(known) && !is_raw);
    free(text);
    if (i >= RFI_COUNT(known)) rf_tokenizer_close(t, NULL), mg_free(&file);
    MUST(rf_gguf_close(g, NULL) == RF_OK, "the file stays busy");
}

/* ---- a conversation ---- */

/* Two bytes of switches; then pieces: a template, its variables as JSON, and messages whose first byte says the role. */
static void fuzz_template(const unsigned char *data, size_t n) {
    static const char *const roles[] = {"system", "user", "assistant", "tool", "a<|b|>"};
    const rf_chat_template_desc limits = {.max_steps = 100000, .max_memory = 4 << 20, .max_output = 1 << 18, .max_depth = 200};
    pieces p = {data, data + n, 1};
    unsigned options = next_byte(&p), more = next_byte(&p);
    rf_chat_message messages[16];
    char *texts[18] = {0};
    size_t n_source = 0, n_bytes = 0, count = 0, again = 0;
    uint32_t n_texts = 0;
    rf_chat_template *t;
    rf_error err;
    while (n_texts < 18 && (texts[n_texts] = next_piece(&p, n_texts ? &n_bytes : &n_source))) n_texts++;
    for (uint32_t i = 2; i < n_texts; i++) {
        const char *text = texts[i];
        messages[i - 2] = (rf_chat_message){.role = roles[(unsigned char)text[0] % 5], .content = text + (text[0] != 0),
                                            .reasoning = more & 1 ? text : NULL, .name = more & 2 ? text : NULL};
    }
    rf_result r = n_texts ? rf_chat_template_open((rf_string){texts[0], n_source}, &limits, &t, &err) : RF_ERR_ARGUMENT;
    if (r == RF_OK) {
        rf_chat chat = {.chat_template = t, .messages = messages, .n_messages = n_texts > 2 ? n_texts - 2 : 0, .now = options};
        chat.open_answer = options & 1, chat.thinking = options >> 1 & 1;
        if (options & 4 && n_texts > 1) chat.extra = texts[1];
        else if (n_texts > 1) chat.tools = texts[1];
        if (options & 8) chat.effort = chat.prefill = "<|x|>";
        r = rf_chat_format(&chat, NULL, 0, &count, &err);
        if (r == RF_OK || r == RF_ERR_CAPACITY) {
            char *out = (char *)malloc(count + !count);
            MUST(out != NULL, "out of memory");
            MUST(rf_chat_format(&chat, out, count, &again, &err) == RF_OK && again == count, "%s", err.text);
            free(out);
        }
        rf_chat_template_close(t, NULL);
    }
    if (n_texts) MUST(r == RF_OK || r == RF_ERR_CAPACITY || (err.code == r && err.text[0]), "a failure without text");
    for (size_t i = 0; i < n_texts; i++) free(texts[i]);
}

/* ---- what a model writes ---- */

/* What was given out: a byte of the kind before each run of pieces of one kind, and before each call. */
typedef struct pieces_out {
    mg_buf text;
    int last;
} pieces_out;

static int collect_piece(const rf_piece *p, void *user) {
    pieces_out *o = (pieces_out *)user;
    const unsigned char kind = (unsigned char)p->kind;
    MUST(p->text.len > 0, "an empty piece");
    if (p->kind == RF_PIECE_CALL) {
        MUST(p->name.len && p->text.data[0] == '{' && p->text.data[p->text.len - 1] == '}', "no call");
        mg_put(&o->text, &kind, 1), mg_put(&o->text, p->name.data, p->name.len), mg_put(&o->text, p->id.data, p->id.len);
    } else if (o->last != (int)p->kind) {
        mg_put(&o->text, &kind, 1);
    }
    o->last = (int)p->kind;
    mg_put(&o->text, p->text.data, p->text.len);
    return 0;
}

/* First byte: options and how to cut; then pieces: template, prompt, tools, text. Cut or whole, it gives the same. */
static void fuzz_answer(const unsigned char *data, size_t n) {
    pieces p = {data, data + n, 1};
    const unsigned options = next_byte(&p);
    char *texts[4] = {0};
    size_t len[4] = {0};
    for (int i = 0; i < 4; i++) texts[i] = next_piece(&p, &len[i]);
    pieces_out out[2] = {{.last = -1}, {.last = -1}};
    for (int cut = 0; cut < 2; cut++) {
        rf_answer_desc d = {.chat_template = {texts[0], len[0]}, .prompt = {texts[1], len[1]}, .tools = {texts[2], len[2]},
                            .on_piece = collect_piece, .user = &out[cut], .max_bytes = options & 1 ? 50 : 0};
        rf_answer *a = NULL;
        MUST(rf_answer_open(&d, &a, NULL) == RF_OK, "open");
        for (size_t at = 0, step = 1; at < len[3]; at += step) {
            step = cut ? 1 + (at * 7 + options) % (options >> 4 | 1) : len[3];
            if (step > len[3] - at) step = len[3] - at;
            MUST(rf_answer_feed(a, (rf_string){texts[3] + at, step}, NULL) == RF_OK, "feed");
        }
        MUST(rf_answer_finish(a, NULL) == RF_OK && rf_answer_close(a, NULL) == RF_OK, "finish");
    }
    MUST(out[0].text.n == out[1].text.n && (!out[0].text.n || !memcmp(out[0].text.data, out[1].text.data, out[0].text.n)),
         "a cut changes what is given out");
    mg_free(&out[0].text), mg_free(&out[1].text);
    for (int i = 0; i < 4; i++) free(texts[i]);
}

/* ---- the command line program ---- */

/* Let what is printed go to memory. */
typedef struct capture {
    FILE *out, *err;
    char *text, *errors;
    size_t n, n_errors;
} capture;

static void begin_capture(capture *c) {
    c->out = stdout, c->err = stderr;
    FILE *text = open_memstream(&c->text, &c->n), *errors = open_memstream(&c->errors, &c->n_errors);
    MUST(text && errors, "open_memstream");
    stdout = text, stderr = errors;
}
static void end_capture(capture *c) {
    fclose(stdout), fclose(stderr);
    stdout = c->out, stderr = c->err;
}

/* A JSON string back to its characters, by the grammar of RFC 8259; characters it stands for, or -1. */
static long read_string(const char *s, size_t n, uint32_t *out) {
    long count = 0;
    if (n < 2 || s[0] != '"' || s[n - 1] != '"') return -1;
    for (size_t i = 1; i < n - 1; count++) {
        if (s[i] == '"' || (unsigned char)s[i] < 0x20 || (unsigned char)s[i] > 0x7e) return -1;
        if (s[i] != '\\') {
            out[count] = (unsigned char)s[i++];
            continue;
        }
        unsigned unit = 0;
        int used = 0;
        if (s[i + 1] == '"' || s[i + 1] == '\\') {
            if (i + 2 > n - 1) return -1;
            out[count] = (unsigned char)s[i + 1], i += 2;
        } else if (n - 1 - i >= 6 && sscanf(s + i, "\\u%4x%n", &unit, &used) == 1 && used == 6) {
            out[count] = unit, i += 6;
        } else {
            return -1;
        }
    }
    return count;
}

static void check_json_string(const char *text, size_t n) {
    capture c;
    uint32_t *units = (uint32_t *)malloc((6 * n + 2) * sizeof *units);
    MUST(units != NULL, "out of memory");
    begin_capture(&c);
    put_json(stdout, text, n);
    end_capture(&c);
    long count = read_string(c.text, c.n, units), at = 0;
    MUST(count >= 0, "no JSON: %s", c.text);
    for (size_t i = 0; i < n; at++) { /* UTF-16 units of the text, U+FFFD for what is no UTF-8 */
        uint32_t code = 0xfffd, len = utf8_next(text + i, n - i, &code);
        i += len ? len : 1;
        if (!len) code = 0xfffd;
        MUST(at < count, "the string is too short");
        if (code < 0x10000) {
            MUST(units[at] == code, "U+%04X became U+%04X", code, units[at]);
        } else {
            MUST(units[at] == 0xd800 + ((code - 0x10000) >> 10) && at + 1 < count &&
                     units[at + 1] == 0xdc00 + ((code - 0x10000) & 0x3ff), "U+%04X", code);
            at++;
        }
    }
    MUST(at == count, "the string is too long");
    free(units), free(c.text), free(c.errors);
}

/* The JSON array of token ids: what is accepted is printed and read again as the same. */
static void check_ids(app *a, const char *text) {
    ids v = {0}, again = {0};
    int good = 0;
    capture c;
    MUST(parse_ids(a, text, &v, &good) == DONE, "ids");
    if (good) {
        int same = 0;
        begin_capture(&c);
        print_ids(&v);
        end_capture(&c);
        c.text[strcspn(c.text, "\n")] = 0;
        MUST(parse_ids(a, c.text, &again, &same) == DONE && same && again.len == v.len, "printed as %s", c.text);
        for (uint32_t i = 0; i < v.len; i++) MUST(v.data[i] >= 0 && v.data[i] == again.data[i], "id %u", i);
        free(c.text), free(c.errors);
    }
    free(v.data), free(again.data);
}

/* Pieces are the words of a command line. */
static void check_command_line(app *a, pieces *p) {
    char *words[34] = {0}, name[] = "rocmforge_cli";
    int n = 1;
    size_t n_bytes;
    capture c;
    words[0] = name;
    while (n < 32 && (words[n] = next_piece(p, &n_bytes))) n++;
    if (n > 1) a->cmd = find_command(words[1]);
    if (a->cmd) {
        begin_capture(&c);
        int code = parse(a, n, words);
        end_capture(&c);
        size_t lines = 0;
        for (size_t i = 0; i < c.n_errors; i++) lines += c.errors[i] == '\n';
        MUST(code == DONE ? lines == 0 : code == USAGE && lines == 1, "code %d, %zu lines: %s", code, lines, c.errors);
        free(c.text), free(c.errors);
    }
    for (int i = 1; i < n; i++) free(words[i]);
}

/* A conversation to /load: all of it or one line that says why not, and what is loaded is saved and loaded as the same. */
static void check_conversation(app *a, const char *text) {
    capture c;
    json j = {text, text, "file"};
    char path[] = "/tmp/rf_fuzz_XXXXXX";
    int fd = mkstemp(path);
    MUST(fd >= 0 && close(fd) == 0, "mkstemp");
    begin_capture(&c);
    const int code = load_messages(a, &j);
    const uint32_t n = a->n_messages;
    const int saved = code ? DONE : slash_save(a, path), loaded = code ? DONE : slash_load(a, path);
    end_capture(&c);
    MUST(code == DONE ? c.n_errors == 0 : code == FAILED && strchr(c.errors, '\n') == c.errors + c.n_errors - 1,
         "code %d: %s", code, c.errors);
    MUST(saved == DONE && loaded == DONE && (code || a->n_messages == n), "%u messages: %u", n, a->n_messages);
    unlink(path);
    forget(a, 0);
    free(a->messages), free(a->line.data), free(a->text.data), free(c.text), free(c.errors);
}

/* First byte: which input. */
static void fuzz_cli(const unsigned char *data, size_t n) {
    pieces p = {data, data + n, 1};
    unsigned what = next_byte(&p) % 5;
    size_t left = (size_t)(p.end - p.at);
    app a = {0};
    bytes b = {.data = (char *)malloc(left + 1), .len = left, .capacity = left + 1};
    MUST(b.data != NULL, "out of memory");
    if (left) memcpy(b.data, p.at, left);
    b.data[left] = 0;
    if (what == 0) check_ids(&a, b.data);
    if (what == 1) check_json_string(b.data, left);
    if (what == 2 && from_hex(&b)) MUST(b.len == left / 2, "%zu bytes of %zu digits", b.len, left);
    if (what == 3) check_command_line(&a, &p);
    if (what == 4) check_conversation(&a, b.data);
    free(b.data);
}

/* ---- targets and their seeds ---- */

/* Vocabularies of 24 tokens: small files are what a fuzzer gets far with. */
#define N_VOCAB 24
static void small_spm(mg_gguf *w) {
    static const char *const tokens[N_VOCAB] = {
        "<unk>", "<s>", "</s>", "<0x41>", "<0xC3>", "<0xFF>", MG_SPACE, "a", "b", "e", "h", "l", "o", "t", "he", "ll",
        MG_SPACE "t", "ab", "hell", "hello", MG_SPACE "the", "\xc3\xa9", "<unused>", "<tool>"};
    static const int32_t types[N_VOCAB] = {2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 4};
    float scores[N_VOCAB];
    for (int i = 0; i < N_VOCAB; i++) scores[i] = types[i] == 1 ? -(float)i : 0;
    mg_kv_str(w, "tokenizer.ggml.model", "llama");
    mg_kv_arr_str(w, "tokenizer.ggml.tokens", tokens, N_VOCAB);
    mg_kv_arr_f32(w, "tokenizer.ggml.scores", scores, N_VOCAB);
    mg_kv_arr_i32(w, "tokenizer.ggml.token_type", types, N_VOCAB);
    mg_kv_u32(w, "tokenizer.ggml.bos_token_id", 1);
    mg_kv_u32(w, "tokenizer.ggml.eos_token_id", 2);
    mg_kv_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    mg_kv_bool(w, "tokenizer.ggml.add_bos_token", 1);
    mg_kv_bool(w, "tokenizer.ggml.add_space_prefix", 1);
}
static void small_bpe(mg_gguf *w) {
    static const char *const tokens[N_VOCAB] = {
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "\xc4\xa0", "\xc4\x8a", "a", "b", "e", "h", "l", "o", "t", "1",
        "2", "he", "ll", "hell", "hello", "ab", "12", "\xc4\xa0t", "\xc4\xa0the", "\xc3\x83", "x"};
    static const char *const merges[] = {"h e", "l l", "he ll", "hell o", "a b", "1 2", "\xc4\xa0 t", "\xc4\xa0t he"};
    static const int32_t types[N_VOCAB] = {3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    mg_kv_str(w, "tokenizer.ggml.model", "gpt2");
    mg_kv_str(w, "tokenizer.ggml.pre", "llama-bpe");
    mg_kv_arr_str(w, "tokenizer.ggml.tokens", tokens, N_VOCAB);
    mg_kv_arr_i32(w, "tokenizer.ggml.token_type", types, N_VOCAB);
    mg_kv_arr_str(w, "tokenizer.ggml.merges", merges, RFI_COUNT(merges));
    mg_kv_u32(w, "tokenizer.ggml.bos_token_id", 1);
    mg_kv_u32(w, "tokenizer.ggml.eos_token_id", 2);
}

/* A grammar and a text, divided by a zero byte; the first byte: what it is. What the matcher reads byte by byte the mask allows. */
static void fuzz_grammar(const unsigned char *data, size_t n) {
    static rf_gguf *file;
    static rf_tokenizer *tokenizer;
    const rf_grammar_desc desc = {.max_memory = 1 << 20, .max_steps = 100000};
    rf_grammar *g = NULL;
    rf_grammar_matcher *m = NULL;
    rf_error err;
    if (!file) {
        mg_gguf w;
        mg_buf b = {0};
        mg_begin(&w, 3);
        small_spm(&w);
        mg_finish(&w, &b);
        MUST(rf_gguf_open_memory(b.data, b.n, NULL, &file, &err) == RF_OK && rf_tokenizer_open(file, NULL, &tokenizer, &err) == RF_OK);
    }
    if (n == 0) return;
    const unsigned char *end = memchr(data + 1, 0, n - 1);
    const size_t n_source = (size_t)((end ? end : data + n) - data) - 1;
    const rf_string source = {(const char *)data + 1, n_source};
    const rf_grammar_kind kind = data[0] & 1 ? RF_GRAMMAR_JSON_SCHEMA : RF_GRAMMAR_GBNF;
    if (rf_grammar_open(tokenizer, kind, source, &desc, &g, &err) != RF_OK) {
        MUST(!g && err.text[0] && err.code != RF_ERR_ARGUMENT, "%s", err.text);
        return;
    }
    MUST(rf_grammar_matcher_open(g, 1, &m, &err) == RF_OK);
    for (const unsigned char *p = end; p && p < data + n; p++) {
        const uint64_t *mask = NULL;
        if (p > end && rf_grammar_matcher_accept_text(m, (rf_string){(const char *)p, 1}, &err) != RF_OK) break;
        if (rf_grammar_matcher_get_mask(m, &mask, &err) != RF_OK) break;
        const uint64_t allowed = mask[0];
        MUST((allowed >> 2 & 1) == (uint64_t)rf_grammar_matcher_is_complete(m) && allowed < 1ull << N_VOCAB);
        for (int32_t id = 0; id < N_VOCAB; id++) {
            const rf_result r = rf_grammar_matcher_accept(m, id, &err);
            MUST((allowed >> id & 1) == (r == RF_OK) || r == RF_ERR_UNSUPPORTED || r == RF_ERR_MEMORY, "%d: %s", id, err.text);
            if (r == RF_OK) MUST(rf_grammar_matcher_rollback(m, 1, &err) == RF_OK);
        }
    }
    rf_grammar_matcher_close(m, NULL);
    MUST(rf_grammar_close(g, &err) == RF_OK);
}

/* Every key that some family reads, in the families that read it: others refuse it. */
static void family_keys(mg_gguf *w) {
    static const struct {
        const char *suffix, *archs;
        float v;
    } keys[] = {
        {"attn_logit_softcapping", "gemma2", 5},
        {"final_logit_softcapping", "gemma2 gemma3", 3},
        {"attention.temperature_scale", "mistral3", 0.5f},
        {"attention.scale", "granite", 0.5f},
        {"embedding_scale", "granite", 2},
        {"residual_scale", "granite", 0.5f},
        {"logit_scale", "granite command-r", 2},
    };
    small_spm(w);
    for (size_t i = 0; i < RFI_COUNT(keys); i++)
        if (strstr(keys[i].archs, mg_family_now->arch)) mg_real(keys[i].suffix, keys[i].v);
    if (strstr("gemma2 gemma3 olmo2 phi3", mg_family_now->arch)) mg_uint("attention.sliding_window", 3);
    mg_uint("attention.sliding_window_pattern", 2);
    mg_real("rope.freq_base_swa", 100);
    mg_real("rope.scaling.attn_factor", 1.5f);
    mg_uint("rope.scaling.original_context_length", 16);
    mg_kv_bool(w, mg_key("rope.scaling.finetuned"), 1);
    if (strstr("gptneox falcon stablelm", mg_family_now->arch)) mg_kv_bool(w, mg_key("use_parallel_residual"), 1);
}

static mg_buf family_seed(int i) {
    static const mg_family families[] = {
        {.arch = "gemma2", .has = MG_POST_NORM},
        {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM},
        {.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE},
        {.arch = "glm4", .has = MG_FUSED_GATE | MG_POST_NORM | MG_BIASES},
        {.arch = "mistral3", .has = MG_UNTIED},
        {.arch = "smollm3", .n_layers = 4, .has = MG_FACTORS},
        {.arch = "granite"},
        {.arch = "olmo2", .has = MG_NO_PRE_NORM | MG_POST_NORM | MG_QK_NORM_WIDE},
        {.arch = "command-r", .has = MG_LAYER_NORM | MG_NO_FFN_NORM},
        {.arch = "stablelm", .has = MG_LAYER_NORM | MG_BIASES},
        {.arch = "gptneox", .has = MG_LAYER_NORM | MG_NO_GATE | MG_BIASES | MG_QKV},
        {.arch = "gpt2", .has = MG_LAYER_NORM | MG_NO_GATE | MG_BIASES | MG_QKV | MG_POSITIONS},
        {.arch = "falcon", .has = MG_LAYER_NORM | MG_NO_GATE | MG_QKV | MG_NO_FFN_NORM | MG_NORM_2},
    };
    mg_buf file = {0};
    mg_family f = families[i % (int)RFI_COUNT(families)];
    f.n_embd = 16, f.n_ff = 4, f.n_vocab = N_VOCAB, f.more_kv = family_keys;
    mg_family_model(&file, &f);
    return file;
}

#define N_FAMILIES 13
#define N_MODELS (30 + N_FAMILIES)
/* A tiny model; types of large blocks only in the embedding, whose rows must be long then. Before the last two, which
 * have experts, one of every family. */
static mg_buf model_seed(int i) {
    static const uint32_t types[] = {MG_F32, MG_F16, MG_BF16, MG_Q4_0, MG_Q4_1, MG_Q5_0, MG_Q5_1, MG_Q8_0,
                                     MG_Q4_K, MG_Q5_K, MG_Q6_K, MG_IQ4_NL, MG_IQ4_XS, MG_MXFP4, MG_NVFP4, MG_Q2_K,
                                     MG_Q3_K, MG_IQ3_XXS, MG_IQ3_S, MG_IQ2_XXS, MG_IQ2_XS, MG_IQ2_S, MG_IQ1_S,
                                     MG_IQ1_M, MG_TQ1_0, MG_TQ2_0, MG_Q1_0, MG_Q2_0};
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    static const char *const with_experts[] = {"qwen3moe", "glm4moe"};
    static const char *const scalings[] = {NULL, "linear", "yarn", "none"};
    if (i >= N_MODELS - 2 - N_FAMILIES && i < N_MODELS - 2) return family_seed(i - (N_MODELS - 2 - N_FAMILIES));
    uint32_t elements, bytes, type = types[i % (int)RFI_COUNT(types)];
    mg_buf file = {0};
    mg_block(type, &elements, &bytes);
    uint32_t n_embd = elements == 1 ? 4 : elements;
    const int moe = i >= N_MODELS - 2;
    mg_llama(&file, &(mg_options){.arch = moe ? with_experts[i % 2] : archs[i % 3], .type = elements > 32 ? MG_F32 : type, .use_embd = 1,
                                  .embd_type = type, .no_vocab = 1, .more_kv = i % 2 ? small_bpe : small_spm,
                                  .n_embd = n_embd, .n_heads = 2, .n_kv_heads = 1 + (uint32_t)(i & 1),
                                  .head_dim = elements == 32 ? 16 : 2, .n_ff = elements == 32 ? 32 : 3,
                                  .n_vocab = N_VOCAB,
                                  .n_ctx = 32, .tied = i % 4 != 1, .rope_freqs = i & 1, .fused_qkv = i % 5 == 4,
                                  .rope_scaling = scalings[i % 4], .rope_factor = i % 4 ? 2.0f : 0,
                                  .bias_out = i % 7 == 3, .bias_ffn = i % 7 == 5, .vector_type = types[i % 2],
                                  .n_experts = moe ? 3 : 0, .n_ff_expert = elements == 32 ? 32 : 3, .n_layers = 1 + moe,
                                  .n_dense = moe ? i % 2 : 0, .n_shared = moe ? i % 2 : 0, .gating = moe ? i % 2 * 2 : 0,
                                  .expert_norm = moe, .expert_scale = moe ? 1.5f : 0, .bias_choice = moe,
                                  .bias_experts = moe, .bias_router = moe,
                                  .chat_template = i % 3 ? NULL : "{{ '<|im_start|>' + '<|im_end|>' }}"});
    return file;
}

static void split_keys(mg_gguf *w, unsigned no) {
    mg_kv_u16(w, "split.no", (uint16_t)no);
    mg_kv_u16(w, "split.count", 2);
    mg_kv_i32(w, "split.tensors.count", 12);
}

/* A model in one file, or in two. */
static mg_buf files_seed(int i) {
    mg_options o = mg_defaults(&(mg_options){.n_layers = 1, .n_embd = 4, .n_heads = 2, .n_kv_heads = 1, .head_dim = 2,
                                             .n_ff = 3, .n_vocab = N_VOCAB, .no_vocab = 1,
                                             .more_kv = i & 1 ? small_bpe : small_spm});
    mg_rng r = {1};
    mg_buf file = {0};
    mg_gguf w;
    if (i < 2) return model_seed(i);
    mg_begin(&w, 3);
    mg_hparams(&w, &o);
    split_keys(&w, 0);
    mg_weight(&w, &r, "token_embd.weight", MG_F32, o.n_embd, o.n_vocab, 1.0f, 0);
    mg_weight(&w, &r, "output_norm.weight", MG_F32, o.n_embd, 0, 0.1f, 1.0f);
    mg_weight(&w, &r, "output.weight", MG_F32, o.n_embd, o.n_vocab, 1.0f, 0);
    mg_finish(&w, &file);
    mg_put(&file, NEXT_PART, sizeof NEXT_PART - 1);
    mg_buf second = {0};
    mg_begin(&w, 3);
    split_keys(&w, 1);
    mg_layer(&w, &r, &o, 0);
    mg_finish(&w, &second);
    mg_put(&file, second.data, second.n);
    mg_free(&second);
    return file;
}
#define N_FILES 4

typedef struct seed {
    const char *text;
    size_t n;
} seed;
#define SEED(text) {text, sizeof text - 1}

#define MIXED "HTTPServer's don'T e\xcc\x81x \xc3\x89t\xc3\xa9 1234567 12a \xd9\xa1\xd9\xa2 (foo)//\n\n  \t\xe3\x80\x80 \xe4\xb8\x80\xea\xb0\x80" \
    "\xef\xbc\x8c ~`$ <sentinel:12>IMGIMGABZ a b\xff   "

static const seed tokenizer_seeds[] = {
    SEED("\0\2Hello world, the hello. \xc3\xa9"), SEED("\0\1<s>hello</s> <unk>"),
    SEED("\1\2I'll we're 123 4567 \n\n  x"),
    SEED("\2\3<|im_start|>user\nhello<|im_end|>"), SEED("\3\0\xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80 \xff\xc0\x80"),
    SEED("\4\0a\tb\r\nc   d"), SEED("\6\0\xd9\xa1\xd9\xa2 \xe0\xa4\x95\xe0\xa5\x8d\xe0\xa4\xb7 A1b2"),
    /* a text with something for every pass, for one name of each rule */
    SEED("\1\0" MIXED), SEED("\2\1" MIXED), SEED("\3\2" MIXED), SEED("\21\3" MIXED), SEED("\22\0" MIXED),
    SEED("\23\1" MIXED), SEED("\37\2" MIXED), SEED("\40\3" MIXED), SEED("\41\0" MIXED), SEED("\42\1" MIXED),
    SEED("\43\2" MIXED), SEED("\44\3" MIXED), SEED("\51\0" MIXED), SEED("\52\1" MIXED), SEED("\53\2" MIXED),
    SEED("\54\3" MIXED), SEED("\55\0" MIXED), SEED("\56\1" MIXED), SEED("\61\2" MIXED), SEED("\62\3" MIXED),
    SEED("\63\0" MIXED), SEED("\64\1" MIXED), SEED("\74\2" MIXED), SEED("\117\3" MIXED), SEED("\122\0" MIXED),
    SEED("\123\1" MIXED), SEED("\124\2" MIXED), SEED("\125\3" MIXED),
    SEED("\xfd\0" "1a\x1e" "1b\x1e" "1ab\x1e" "1a b\x1e" "3<x>\x1e" "abab<x>"),
    SEED("\xfc\2" "2[UNK]\x1e" "1\xe2\x96\x81he\x1e" "1llo\x1e" "1e\x1e" "3[SEP]\x1e" "Hello h\xc3\xa9llo, [SEP]"),
    SEED("\xfe\1" "2?\x1e" "1a\x1e" "6<0x41>\x1e" "1aa\x1e" "aaaA"),
    SEED("\xff\2" "\1A\12\2B\13\1\xc2\4\4\xa0\15\x1e" "1a\x1e" "3</s>\x1e" "2?\x1e" "1aa\x1e" "1\xe2\x96\x81\x1e" "1\xe2\x96\x81" "b\x1e" "4uu\x1e"
         "aaAB b \xc2\xa0uu\xff"),
};
#define CHATML "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
static const seed template_seeds[] = {
    SEED("\1\0" CHATML "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}\x1e[]\x1e" "0system text\x1e" "1hello\x1e" "2answer"),
    SEED("\2\3{%- macro f(x, y=1) -%}{{ x ~ y }}{{ caller() if caller }}{%- endmacro -%}{% call f(2) %}{{ enable_thinking }}{% endcall %}\x1e[]"),
    SEED("\0\0{% for t in tools recursive %}{{ loop.index }}{{ t | tojson(indent=2) }}{{ loop(t.c) if t.c }}{% endfor %}\x1e[{\"c\": [{}]}, 1.5e3]"),
    SEED("\4\0{% set ns = namespace(a=[]) %}{% for k, v in d | dictsort %}{% set ns.a = ns.a + [k] %}{% endfor %}{{ ns.a | join(',') }}\x1e{\"d\": {\"b\": 1}}"),
    SEED("\4\0{{ s.split(',')[0].strip() | upper }}{{ s[::-1] }}{{ '%5.2f|%-3s' % (1.5, 'a') }}{{ '{:>5}'.format(s) }}\x1e{\"s\": \"a, b\\u00e9\"}"),
    SEED("\4\0{% for g in l | groupby('a') %}{{ g.grouper }}{{ g.list | map(attribute='a') | sort | unique | list }}{% endfor %}\x1e{\"l\": [{\"a\": 1}]}"),
    SEED("\10\1{% filter replace('a', 'b') | indent(2) %}{% raw %}{{ a }}{% endraw %}{% endfilter %}{{ strftime_now('%Y-%m-%d %B') }}\x1e[]\x1e" "1x"),
    SEED("\0\0{%- if messages[0]['role'] == 'system' and not tools is defined -%}{{ raise_exception('no') }}{%- elif 1 in [1, 2] -%}x{%- endif %}\x1e[]\x1e" "1"),
    SEED("\0\0{% set l = [] %}{% for i in range(9) if i is odd %}{{ l.append(i) }}{% if i > 5 %}{% break %}{% endif %}{% else %}x{% endfor %}{{ l.pop(0) }}"),
    SEED("\0\0{{ [3, 1] | select('gt', 1) | list + [2 ** 62 // 7 % 5] }}{{ 'x' | e | safe + '<' }}{{ {'a': (1,), 2: none}.items() | list }}{# c #}"),
    SEED("\0\0{% with a = 'abc' %}{{ a.find('c') }}{{ a.replace('', '-') }}{{ a | truncate(5) | center(9) | wordcount }}{{ a.partition('b') }}{% endwith %}"),
};
static const seed answer_seeds[] = {
    SEED("0\x1e\x1e\x1e<think>\na</think>\n\nb <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"\\n\"]}}\n</tool_call>"),
    SEED("1<tool_call> <function=\x1e<think>\n\x1e[{\"name\": \"f\", \"parameters\": {\"properties\": {\"a\": {\"type\": \"string\"}}}}]\x1e"
         "x</think><tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    SEED("2\x1e\x1e\x1e" "a[TOOL_CALLS]f[CALL_ID]1[ARGS]{\"a\": 1}[TOOL_CALLS][{\"name\": \"g\"}]"),
    SEED("3<|channel|>\x1e\x1e\x1e<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
         "<|message|>{}<|call|>"),
    SEED("4\x1e\x1e\x1e<|tool_call_start|>[f(a=1, b='x')]<|tool_call_end|><|tool_call>call:f{a:<|\"|>x<|\"|>}<tool_call|>"),
    SEED("5\"parameters\": dictionary<|python_tag|>\x1e\x1e\x1e{\"name\": \"f\", \"parameters\": {}}<|python_tag|>a.call(b=\"c\")"),
    SEED("6<arg_key><tool_call>\x1e\x1e\x1e<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b</arg_value></tool_call>"),
    SEED("7\x1e\x1e\x1e<minimax:tool_call><invoke name=\"f\"><parameter name=\"a\">1</parameter></invoke></minimax:tool_call>"
         "<|tools_prefix|>[{\"f\": {}}]<|tools_suffix|><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"),
};
static const seed cli_seeds[] = {
    SEED("\0[1, 2, 3]"), SEED("\0" "7,8 , 2147483647"), SEED("\0[]"), SEED("\0[ 1\t,\r2 ]"),
    SEED("\1plain \"quoted\" \\ \n\x7f"),
    SEED("\1\xc3\xa9 \xf0\x9f\x98\x80 \xed\xa0\x80 \xff"), SEED("\2" "48656c6C6f"), SEED("\2" "0g"),
    SEED("\3generate\x1e--gguf\x1em.gguf\x1e--prompt=x\x1e--temp\x1e" "0.5\x1e--max-tokens=7"),
    SEED("\4[{\"role\": \"system\", \"content\": \"\\ud83d\\ude00\\n\"}, {\"content\": [1, {}], \"role\": \"user\", \"x\": -1e3}]"),
    SEED("\4[{\"role\":\"a\",\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":{\"k\":null}}}],\"reasoning_content\":\"t\"}]"),
    SEED("\4[]"),
    SEED("\3inspect\x1em.gguf\x1e--json"), SEED("\3run\x1em\x1e--n-predict\x1e-1\x1e--logit-bias=1+1\x1e--ctx"), SEED("\3tokenize\x1e--bos\x1e" "1\x1e--gguf=m"),
    SEED("\3" "bench\x1e-p\x1e" "5\x1e-r=2\x1e--kv\x1e" "f32\x1em"),
};

static const seed grammar_seeds[] = {
    SEED("\0root ::= \"he\" (\"l\" | [a-b]{1,2})+ x? # c\nx ::= \"(\" x \")\" | [^a\\x41-\\u00e9]\0hellabx"),
    SEED("\0root ::= .* \"\\n\"\0the\xc3\xa9"),
    SEED("\1{\"type\":\"object\",\"properties\":{\"a\":{\"type\":[\"integer\",\"null\"],\"minimum\":-3,\"maximum\":170},\"b\":{\"enum\":[\"t\",1.5]}},"
         "\"required\":[\"a\"],\"additionalProperties\":{\"pattern\":\"^[a-c]+\\\\d{2}$\"}}\0{\"a\": 12, \"b\": \"t\", \"c\": \"ab12\"}"),
    SEED("\1{\"$defs\":{\"n\":{\"type\":\"array\",\"items\":{\"anyOf\":[{\"$ref\":\"#/$defs/n\"},{\"const\":null}]},\"maxItems\":3}},\"$ref\":\"#/$defs/n\"}\0[[null], null]"),
    SEED("\1{\"allOf\":[{\"type\":\"string\",\"minLength\":1},{\"maxLength\":9}]}\0\"a\\u00e9\""),
    SEED("\1{\"oneOf\":[{\"type\":\"string\",\"format\":\"date\"},{\"type\":\"array\",\"prefixItems\":[true],\"items\":false}]}\0\"2024-02-29\""),
    SEED("\1{}\0{\"a\":[1,2.5e3,{\"b\":true}]}"),
};

typedef struct target {
    const char *name;
    void (*run)(const unsigned char *data, size_t n);
    const seed *seeds; /* or */
    mg_buf (*make)(int i);
    int n_seeds;
} target;

static const target targets[] = {
    {"gguf", fuzz_gguf, NULL, model_seed, N_MODELS},
    {"files", fuzz_files, NULL, files_seed, N_FILES},
    {"tokenizer", fuzz_tokenizer, tokenizer_seeds, NULL, (int)RFI_COUNT(tokenizer_seeds)},
    {"template", fuzz_template, template_seeds, NULL, (int)RFI_COUNT(template_seeds)},
    {"answer", fuzz_answer, answer_seeds, NULL, (int)RFI_COUNT(answer_seeds)},
    {"grammar", fuzz_grammar, grammar_seeds, NULL, (int)RFI_COUNT(grammar_seeds)},
    {"cli", fuzz_cli, cli_seeds, NULL, (int)RFI_COUNT(cli_seeds)},
};

static const target *find_target(const char *name) {
    for (size_t i = 0; i < RFI_COUNT(targets); i++)
        if (strcmp(targets[i].name, name) == 0) return &targets[i];
    fprintf(stderr, "no target %s; there are gguf, files, tokenizer, template, answer, grammar, cli\n", name);
    exit(2);
}

static mg_buf seed_of(const target *t, int i) {
    mg_buf b = {0};
    if (t->make) return t->make(i);
    mg_put(&b, t->seeds[i].text, t->seeds[i].n);
    return b;
}

#ifdef RF_LIBFUZZER

static const target *chosen;

/* The target's name is the first argument, which libFuzzer must not see. */
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    if (*argc < 2) fprintf(stderr, "which target?\n"), exit(2);
    chosen = find_target((*argv)[1]);
    (*argv)[1] = (*argv)[0];
    ++*argv, --*argc;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    chosen->run(data, n);
    return 0;
}

#else

/* ---- the suite ---- */

/* Every seed does what it is there for: a model makes a token, and the other targets take theirs. */
static void test_seeds(void) {
    for (size_t k = 0; k < RFI_COUNT(targets); k++)
        for (int i = 0; i < targets[k].n_seeds; i++) {
            mg_buf b = seed_of(&targets[k], i);
            targets[k].run(b.data, b.n);
            if (targets[k].make == model_seed)
                CHECK(fuzz_gguf_stage(b.data, b.n) == LIFE_DONE, "model %d gives no token", i);
            if (targets[k].make == files_seed)
                CHECK(fuzz_files_stage(b.data, b.n) == LIFE_DONE, "file %d gives no token", i);
            mg_free(&b);
        }
}

static const uint64_t odd_values[] = {
    0, 1, 2, 7, 8, 9, 12, 13, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 0x7fff, 0x8000, 0xffff, 0x10000, 0x7fffffff,
    0x80000000, 0xffffffff, 0x100000000, 1ull << 58, 1ull << 59, 1ull << 60, 1ull << 61, 1ull << 62, INT64_MAX,
    1ull << 63, UINT64_MAX - 31, UINT64_MAX - 7, UINT64_MAX};

/* One to eight changes of the first `end` bytes. */
static void mutate(mg_rng *r, unsigned char *data, size_t end) {
    static const uint32_t times[] = {1, 1, 1, 1, 2, 3, 4, 8}, widths[] = {1, 2, 4, 8};
    for (uint32_t k = times[mg_below(r, 8)]; k > 0; k--) {
        size_t at = mg_below(r, (uint32_t)end), n = widths[mg_below(r, 4)], run = 1 + mg_below(r, 32);
        uint64_t v = 0;
        if (n > end - at) n = end - at;
        if (run > end - at) run = end - at;
        switch (mg_below(r, 6)) {
        case 0: data[at] ^= (unsigned char)(1u << mg_below(r, 8)); break;
        case 1: data[at] = (unsigned char)mg_next(r); break;
        case 2: v = odd_values[mg_below(r, RFI_COUNT(odd_values))], memcpy(data + at, &v, n); break;
        case 3: memcpy(&v, data + at, n), v += mg_below(r, 71) - 35ull, memcpy(data + at, &v, n); break;
        case 4: memmove(data + at, data + mg_below(r, (uint32_t)(end - run + 1)), run); break;
        default: memset(data + at, mg_below(r, 2) ? 0xff : 0, run); break;
        }
    }
}

/* n mutations of the models' metadata, each in a block of exactly its size. Prints how far they came. */
static void mutations(uint64_t n, uint64_t first, uint64_t *reached) {
    mg_rng r = {first};
    mg_buf models[N_MODELS];
    size_t ends[N_MODELS];
    for (int i = 0; i < N_MODELS; i++) {
        rf_gguf *g;
        models[i] = model_seed(i);
        MUST(rf_gguf_open_memory(models[i].data, models[i].n, NULL, &g, NULL) == RF_OK, "model %d", i);
        ends[i] = (size_t)rf_gguf_get_info(g).metadata_bytes;
        rf_gguf_close(g, NULL);
    }
    for (uint64_t k = 0; k < n; k++) {
        uint32_t i = mg_below(&r, N_MODELS);
        unsigned char *data = (unsigned char *)malloc(models[i].n);
        MUST(data != NULL, "out of memory");
        memcpy(data, models[i].data, models[i].n);
        mutate(&r, data, ends[i]);
        reached[fuzz_gguf_stage(data, models[i].n)]++;
        free(data);
    }
    for (int i = 0; i < N_MODELS; i++) mg_free(&models[i]);
    printf("    %llu mutations: %llu end at open, %llu at plan, %llu later, %llu give a token\n", LLU(n),
           LLU(reached[LIFE_OPEN]), LLU(reached[LIFE_PLAN]),
           LLU(reached[LIFE_LOAD] + reached[LIFE_TOKENIZE] + reached[LIFE_GENERATE]), LLU(reached[LIFE_DONE]));
}

static void test_mutations(void) {
    uint64_t reached[LIFE_DONE + 1] = {0};
    mutations(4000, 1, reached);
    CHECK(reached[LIFE_OPEN] > 1000 && reached[LIFE_PLAN] > 200 && reached[LIFE_DONE] > 200, "all end in one place");
}

/* Every length of a whole model but the last is refused at open. */

/* ---- the other uses of the program ---- */

static int write_seeds(const char *dir) {
    char path[1024];
    mkdir(dir, 0777);
    for (size_t k = 0; k < RFI_COUNT(targets); k++) {
        snprintf(path, sizeof path, "%s/%s", dir, targets[k].name);
        mkdir(path, 0777);
        for (int i = 0; i < targets[k].n_seeds; i++) {
            mg_buf b = seed_of(&targets[k], i);
            snprintf(path, sizeof path, "%s/%s/seed_%02d", dir, targets[k].name, i);
            FILE *f = fopen(path, "wb");
            if (!f || fwrite(b.data, 1, b.n, f) != b.n || fclose(f) != 0) return perror(path), 1;
            mg_free(&b);
        }
    }
    return 0;
}

static int run_files(const target *t, int n, char **paths) {
    for (int i = 0; i < n; i++) {
        bytes b = {0};
        app a = {0};
        FILE *f = fopen(paths[i], "rb");
        if (!f || read_all(&a, f, paths[i], &b) != DONE) return perror(paths[i]), 1;
        fclose(f);
        unsigned char *exact = (unsigned char *)malloc(b.len + !b.len);
        MUST(exact != NULL, "out of memory");
        memcpy(exact, b.data, b.len);
        printf("%s\n", paths[i]);
        fflush(stdout);
        t->run(exact, b.len);
        free(exact), free(b.data);
    }
    return 0;
}

int main(int argc, char **argv) {
    uint64_t reached[LIFE_DONE + 1] = {0};
    if (argc >= 3 && strcmp(argv[1], "seeds") == 0) return write_seeds(argv[2]);
    if (argc >= 3 && strcmp(argv[1], "run") == 0) return run_files(find_target(argv[2]), argc - 3, argv + 3);
    if (argc >= 3 && strcmp(argv[1], "mutate") == 0)
        return mutations(strtoull(argv[2], NULL, 10), argc > 3 ? strtoull(argv[3], NULL, 10) : 1, reached), 0;
    RFT_BEGIN(argc, argv);
    RUN(test_seeds);
    RUN(test_mutations);
    RFT_END();
}

#endif
