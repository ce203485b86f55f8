/* cc -O2 -I. examples/rocmforge_cli.c -o rocmforge_cli -lm -pthread */

/* rocmforge_cli: rocmforge.h from a shell. It uses the public API only; `rocmforge_cli help` lists the commands.
 * `make` adds -DHAVE_EDITLINE -ledit where libedit is installed: line editing and history in a chat.
 *
 * stdout carries the result and nothing else. stderr carries notes and timing, progress if it is a terminal, and
 * exactly one line when a command fails. Exit status: 0 done; 1 failed; 2 the command line is wrong; 130 stopped by
 * Ctrl-C, after what there was has been written. Text from a file is escaped before it is printed; what a model
 * generates is not. */

#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#ifdef HAVE_EDITLINE
#include <editline/readline.h>
#endif

enum { DONE = 0, FAILED = 1, USAGE = 2, INTERRUPTED = 130 };

#define LLU(x) ((unsigned long long)(x)) /* for %llu */

/* Every step returns DONE (0) or, its line printed, the exit code, and its caller returns that at once. All memory
 * belongs to the app and main releases it, so that leaving early needs no cleanup. */

/* ---- options and state ---- */

#define LIST_MAX 32u

/* The values of an option that may be given many times. */
typedef struct texts {
    const char *item[LIST_MAX];
    uint32_t n;
} texts;

/* The options of all commands; the table at the end says which command takes which. Switches are 0 or 1. */
typedef struct options {
    const char *gguf, *prompt, *prompt_file, *system, *device, *isa, *pre, *type, *tokens, *out, *depths, *parallel;
    const char *jinja, *tools, *effort, *extra, *input, *now, *rank, *grammar, *schema, *draft, *shares;
    texts logit_bias, dry_breakers, stop;
    uint64_t split, budget, expert_budget, pinned, expert_policy, expert_prefetch, expert_cpu_below, peak;
    uint64_t max_tokens, top_k, seed, threads, ctx, batch, kv, bos, special, n_greedy, n_prompt, n_decode, n_repeat;
    uint64_t no_bos, raw, echo, json, hex, decode, step, help, pooling, normalize, swa_full, stats, think;
    uint64_t penalty_last_n, dry_allowed, dry_last_n, mirostat, draft_max;
    double temp, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty, dry_multiplier, dry_base;
    double xtc_probability, xtc_threshold, mirostat_tau, mirostat_eta;
} options;

enum { THINK_ON, THINK_OFF, THINK_HIDE }; /* in the order of --think's choices */

#define NOT_GIVEN UINT64_MAX /* a count that was not given; a number is NAN */

typedef struct bytes {
    char *data;
    size_t len, capacity;
} bytes;

typedef struct ids {
    int32_t *data;
    uint32_t len, capacity;
} ids;

#define MESSAGES_MAX 4096
#define DEFAULT_CTX 4096u /* tokens, without --ctx */

typedef struct command command;

typedef struct app {
    options o;
    const command *cmd;
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_session *s;
    rf_tokenizer *own;      /* of `tokenize`, which opens no model */
    const rf_tokenizer *t;
    rf_grammar *grammar;    /* of --grammar, --json-schema; or NULL */
    rf_drafter *drafter;    /* of --draft, or NULL                  */
    rf_gguf *draft_g;       /* its draft model                      */
    rf_model *draft_m[RF_MTP_HEADS];   /* or the model's MTP heads */
    rf_session *draft_s[RF_MTP_HEADS];
    rf_chat_template *own_template;        /* of --jinja                       */
    const rf_chat_template *chat_template; /* that, or the model's; NULL: none */
    rf_model_info info;
    rf_sampler sampler;
    rf_logit_bias bias[LIST_MAX];
    rf_dry_breaker *breakers;
    int32_t *history;
    rf_error err;
    rf_chat_message *messages;
    uint32_t n_messages;
    uint32_t n_ctx;         /* of the session                      */
    double start, open_s, plan_s;
    bytes line, message, text, thought, tools, notes;
    ids prompt, tokens;
    FILE *out;
    int talks;              /* chat on a terminal: stdin and stderr are one                 */
    int bar;                /* progress bar: 1 = on the terminal, -1 = never again: text is */
    double bar_time;        /* when it was drawn                                            */
    char seed[32];          /* ", seed 123", if it was drawn                                */
    int64_t today;          /* seconds since 1970, for templates                            */

    /* of the answer that is generated */
    rf_tool_call *calls;    /* [n_calls] */
    uint32_t n_calls;
    int thinks, failed;     /* in a thought; exit status of a callback that failed          */
    int open_line;          /* stdout does not end in a newline                             */
    double first_token, thought_begin; /* when */

    char problem[RF_ERROR_TEXT_BYTES]; /* the first one of `check` */
    uint32_t n_problems;
    struct comparison *comparison;     /* of `check --device` */
} app;

struct command {
    const char *name;
    int (*run)(app *a);
    const char *help;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- what is said to the user ---- */

static volatile sig_atomic_t interrupted;

/* A backslash stays as it is: the library's texts are escaped already. */
static void put_escaped(FILE *f, const char *text, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        fprintf(f, c >= 0x20 && c < 0x7f ? "%c" : "\\x%02x", c);
    }
}

static void clear_bar(app *a) {
    if (a->bar > 0) fputs("\r\033[K", stderr), a->bar = 0;
}

/* Print the one line of a failure; returns the exit code. */
__attribute__((format(printf, 3, 4)))
static int fail(app *a, int code, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    clear_bar(a);
    fprintf(stderr, "rocmforge_cli%s%s: ", a->cmd ? " " : "", a->cmd ? a->cmd->name : "");
    put_escaped(stderr, text, strlen(text));
    fputc('\n', stderr);
    return code;
}

static int no_memory(app *a) { return fail(a, FAILED, "out of memory"); }

static int fail_errno(app *a, const char *name) { return fail(a, FAILED, "%s: %s", name, strerror(errno)); }

/* DONE, or the line of a failed library call and its exit code. */
static int lib(app *a, rf_result r) {
    if (r == RF_OK) return DONE;
    if (r == RF_ERR_CANCELLED && interrupted) return fail(a, INTERRUPTED, "interrupted");
    return fail(a, FAILED, "%s", a->err.text[0] ? a->err.text : rf_result_name(r));
}

/* Does it take colours and control codes? */
static int is_rich(int fd) {
    const char *term = getenv("TERM"), *no_colour = getenv("NO_COLOR");
    return isatty(fd) && term && *term && strcmp(term, "dumb") && !(no_colour && *no_colour);
}

/* Make room for n more bytes and a NUL. */
static int reserve(app *a, bytes *b, size_t n) {
    if (b->capacity - b->len > n) return DONE;
    size_t capacity = n < SIZE_MAX / 4 - b->len ? 2 * (b->len + n) + 64 : 0;
    char *data = capacity ? realloc(b->data, capacity) : NULL;
    if (!data) return no_memory(a);
    b->data = data;
    b->capacity = capacity;
    return DONE;
}

static int append(app *a, bytes *b, const char *data, size_t n) {
    int code;
    if ((code = reserve(a, b, n))) return code;
    if (n) memcpy(b->data + b->len, data, n);
    b->data[b->len += n] = 0;
    return DONE;
}

static int reserve_ids(app *a, ids *v, uint64_t n) {
    if (n <= v->capacity) return DONE;
    int32_t *data = n < INT32_MAX / 2 ? realloc(v->data, 2 * n * sizeof *data) : NULL;
    if (!data) return no_memory(a);
    v->data = data;
    v->capacity = (uint32_t)(2 * n);
    return DONE;
}

/* Keep a note until the command has succeeded or asks the user: a command that fails prints one line only. */
static void note(rf_log_level level, const char *text, void *user) {
    app *a = user;
    size_t n = strlen(text);
    if (level != RF_LOG_WARNING || n + 1 > 4096 - a->notes.len || reserve(a, &a->notes, n + 1) != DONE) return;
    memcpy(a->notes.data + a->notes.len, text, n + 1);
    a->notes.len += n + 1;
}

static void print_notes(app *a) {
    clear_bar(a);
    for (size_t i = 0; i < a->notes.len; i += strlen(a->notes.data + i) + 1) {
        put_escaped(stderr, a->notes.data + i, strlen(a->notes.data + i));
        fputc('\n', stderr);
    }
    a->notes.len = 0;
}

static void progress(app *a, const char *what, uint64_t done, uint64_t total) {
    if (total == 0 || a->bar < 0 || !is_rich(STDERR_FILENO)) return;
    if (done < total && now() - a->bar_time < 0.1) return;
    a->bar_time = now();
    int n = (int)((double)done / (double)total * 24.0);
    fprintf(stderr, "\r\033[K%s [%-24.*s] %.0f MB", what, n, "########################", (double)done / 1e6);
    a->bar = 1;
    if (done >= total) clear_bar(a);
}

static int load_progress(uint64_t done_bytes, uint64_t total_bytes, rf_string tensor, void *user) {
    (void)tensor;
    progress(user, "loading", done_bytes, total_bytes);
    return interrupted != 0;
}

/* Write result bytes to stdout, unbuffered. */
static int emit(app *a, const char *data, size_t n) {
    if (n) a->open_line = data[n - 1] != '\n';
    return fwrite(data, 1, n, stdout) == n && fflush(stdout) == 0 ? DONE : fail_errno(a, "stdout");
}

/* ---- chat messages ---- */

static void free_text(const char *text) { free((void *)(uintptr_t)text); }

static void free_calls(rf_tool_call *calls, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) free_text(calls[i].id), free_text(calls[i].name), free_text(calls[i].arguments);
    free(calls);
}

/* All that a message points to is its own. */
static void free_message(rf_chat_message *m) {
    free_text(m->role), free_text(m->content), free_text(m->reasoning), free_text(m->name);
    free_text(m->tool_call_id), free_text(m->parts);
    free_calls((rf_tool_call *)(uintptr_t)m->tool_calls, m->n_tool_calls);
}

static void forget(app *a, uint32_t n_keep) {
    while (a->n_messages > n_keep) free_message(&a->messages[--a->n_messages]);
}

/* Copy a text; a NUL in it becomes a space. */
static int copy_text(app *a, const char *text, size_t n, const char **out) {
    char *copy = malloc(n + 1);
    if (!copy) return no_memory(a);
    for (size_t i = 0; i < n; i++) copy[i] = text[i] ? text[i] : ' ';
    copy[n] = 0;
    *out = copy;
    return DONE;
}

/* Add a message, and own what it points to; if that fails, too. */
static int add_message(app *a, rf_chat_message *m) {
    int code = DONE;
    if (!a->messages && !(a->messages = calloc(MESSAGES_MAX, sizeof *a->messages))) code = no_memory(a);
    else if (a->n_messages == MESSAGES_MAX) code = fail(a, FAILED, "more than %d messages", MESSAGES_MAX);
    if (code) free_message(m);
    else a->messages[a->n_messages++] = *m;
    return code;
}

static int say(app *a, const char *role, const char *text, size_t n) {
    int code;
    rf_chat_message m = {0};
    if ((code = copy_text(a, role, strlen(role), &m.role)) || (code = copy_text(a, text, n, &m.content)))
        return free_message(&m), code;
    return add_message(a, &m);
}

/* Add what the model has said. */
static int add_answer(app *a) {
    int code = DONE;
    rf_chat_message m = {.tool_calls = a->calls, .n_tool_calls = a->n_calls};
    a->calls = NULL;
    a->n_calls = 0;
    if (!code) code = copy_text(a, "assistant", 9, &m.role);
    if (!code) code = copy_text(a, a->text.data, a->text.len, &m.content);
    if (!code && a->thought.len) code = copy_text(a, a->thought.data, a->thought.len, &m.reasoning);
    if (code) return free_message(&m), code;
    return add_message(a, &m);
}

/* ---- opening and closing ---- */

static rf_session *volatile running;

static volatile sig_atomic_t interrupted_before; /* and nothing was typed since */
static struct termios terminal;                  /* as it was at the start      */
static int has_terminal;

/* The first Ctrl-C asks for a clean stop, a second one exits at once. All that is called is async-signal-safe. */
static void on_interrupt(int sig) {
    (void)sig;
    if (interrupted || interrupted_before) {
        if (has_terminal) tcsetattr(STDIN_FILENO, TCSANOW, &terminal); /* while a line is edited it is another */
        _exit(INTERRUPTED);
    }
    interrupted = 1;
    if (running) rf_session_cancel(running);
}

static void catch_interrupt(rf_session *s) {
    struct sigaction action, old;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_interrupt; /* no SA_RESTART: it interrupts reading a line, too */
    running = s;
    if (sigaction(SIGINT, NULL, &old) == 0 && old.sa_handler != SIG_IGN) sigaction(SIGINT, &action, NULL);
}

static int open_file(app *a) {
    int code;
    rf_gguf_desc desc = {.log_fn = note, .log_user = a};
    double t = now();
    if ((code = lib(a, rf_gguf_open(a->o.gguf, &desc, &a->g, &a->err)))) return code;
    a->open_s = now() - t;
    return DONE;
}

static int open_model(app *a, const char *device) {
    int code;
    rf_device_desc device_desc = {.n_threads = (uint32_t)a->o.threads, .isa = a->o.isa, .split = (uint32_t)a->o.split};
    rf_model_desc model_desc = {.progress_fn = load_progress, .progress_user = a, .pre_tokenizer = a->o.pre,
                                .budget_bytes = a->o.budget, .pinned_bytes = a->o.pinned,
                                .expert_cache_bytes = a->o.expert_budget,
                                .expert_policy = (uint32_t)a->o.expert_policy,
                                .expert_cpu_below = (uint32_t)a->o.expert_cpu_below,
                                .expert_prefetch = (uint32_t)a->o.expert_prefetch};
    if ((code = open_file(a))) return code;
    if ((code = lib(a, rf_device_open(device, &device_desc, &a->d, &a->err)))) return code;
    double t = now();
    if ((code = lib(a, rf_model_open(a->g, a->d, &model_desc, &a->m, &a->err)))) return code;
    a->plan_s = now() - t;
    a->info = rf_model_get_info(a->m);
    return DONE;
}

static uint32_t drafts_by_mtp(const app *a) { return a->o.draft && !strcmp(a->o.draft, "mtp"); }

/* The context: --ctx, else n_ctx_train but at most DEFAULT_CTX, or `need` tokens if that is more. */
static rf_session_desc session_desc(const app *a, uint64_t need, uint32_t n_logits) {
    uint32_t trained = a->info.n_ctx_train;
    uint64_t n_ctx = trained && trained < DEFAULT_CTX ? trained : DEFAULT_CTX;
    if (need > n_ctx) n_ctx = need < INT32_MAX ? need : INT32_MAX;
    if (a->o.ctx) n_ctx = a->o.ctx;
    /* a recurrent model's states to be cut back to: no fewer than by default */
    const uint32_t n_snapshots = a->o.draft || a->o.shares ? n_logits > 5 ? n_logits - 1 : 4 : 0;
    return (rf_session_desc){.n_ctx = (uint32_t)n_ctx, .n_batch = (uint32_t)a->o.batch, .n_logits_max = n_logits,
                             .n_snapshots = n_snapshots, .cache_type = (uint32_t)a->o.kv,
                             .swa_full = (uint32_t)a->o.swa_full, .mtp = drafts_by_mtp(a)};
}

static int too_long(app *a, uint64_t n_tokens) {
    return fail(a, FAILED, "%llu tokens do not fit, the context holds %u (see --ctx)", LLU(n_tokens), a->n_ctx);
}

/* Open the session for `need` tokens, of which n_tokens must fit. */
static int open_session(app *a, uint64_t need, uint64_t n_tokens, uint32_t n_logits) {
    int code;
    rf_session_desc desc = session_desc(a, need, n_logits);
    a->n_ctx = desc.n_ctx;
    if (n_tokens > a->n_ctx) return too_long(a, n_tokens);
    rf_result r = rf_session_open(a->m, &desc, &a->s, &a->err);
    if (r && a->o.ctx) return fail(a, FAILED, "--ctx %u: %s", a->n_ctx, a->err.text);
    if ((code = lib(a, r))) return code;
    catch_interrupt(a->s);
    return DONE;
}

static void close_comparison(struct comparison *c);

static void close_all(app *a) {
    running = NULL;
    close_comparison(a->comparison);
    rf_session_close(a->s, NULL);
    rf_grammar_close(a->grammar, NULL);
    rf_drafter_close(a->drafter, NULL);
    for (int k = 0; k < RF_MTP_HEADS; k++) rf_session_close(a->draft_s[k], NULL), rf_model_close(a->draft_m[k], NULL);
    if (a->draft_g) rf_gguf_close(a->draft_g, NULL);
    rf_model_close(a->m, NULL);
    rf_device_close(a->d, NULL);
    rf_tokenizer_close(a->own, NULL);
    rf_chat_template_close(a->own_template, NULL);
    if (a->g) rf_gguf_close(a->g, NULL);
    if (a->out) fclose(a->out);
    forget(a, 0);
    free_calls(a->calls, a->n_calls);
    free(a->messages);
    free(a->breakers);
    free(a->history);
    free(a->thought.data);
    free(a->tools.data);
    free(a->line.data);
    free(a->message.data);
    free(a->text.data);
    free(a->notes.data);
    free(a->prompt.data);
    free(a->tokens.data);
}

/* ---- text and tokens ---- */

/* Read all of a stream, whatever its bytes. */
static int read_all(app *a, FILE *f, const char *name, bytes *out) {
    int code;
    size_t n = 1;
    for (; n > 0; out->len += n) {
        if ((code = reserve(a, out, 65536))) return code;
        n = fread(out->data + out->len, 1, 65536, f);
    }
    out->data[out->len] = 0;
    return ferror(f) ? fail_errno(a, name) : DONE;
}

/* Read a line of stdin without its newline; *more is 0 at the end. */
static int read_line(app *a, bytes *line, int *more) {
    errno = 0;
    ssize_t n = getline(&line->data, &line->capacity, stdin);
    *more = n >= 0;
    line->len = n > 0 ? (size_t)n : 0;
    if (line->len && line->data[line->len - 1] == '\n') line->data[--line->len] = 0;
    return n < 0 && errno && errno != EINTR ? fail_errno(a, "stdin") : DONE;
}

/* Text to ids. A byte gives at most three tokens: those of U+FFFD. */
static int encode(app *a, const char *text, size_t n, uint32_t flags, ids *out) {
    int code;
    if (n > INT32_MAX / 8) return fail(a, FAILED, "text: want at most %d bytes, got %zu", INT32_MAX / 8, n);
    if ((code = reserve_ids(a, out, 3 * n + 8))) return code;
    return lib(a, rf_tokenize(a->t, (rf_string){text, n}, flags, out->data, out->capacity, &out->len, &a->err));
}

/* Append the text of a token (-1: none) to out. */
static int decode(app *a, rf_detokenizer *state, int32_t id, uint32_t flags, bytes *out) {
    int code;
    size_t n = 0;
    if ((code = reserve(a, out, 3 * (size_t)rf_token_get_text(a->t, id).len + 16))) return code;
    if ((code = lib(a, rf_detokenize(state, id, flags, out->data + out->len, out->capacity - out->len, &n, &a->err))))
        return code;
    out->len += n;
    return DONE;
}

/* Parse token ids "1,2,3", also "[1, 2, 3]". *good is 0 if it is anything else. */
static int parse_ids(app *a, const char *p, ids *out, int *good) {
    int code;
    static const char blank[] = " \t\r";
    out->len = 0;
    *good = 0;
    p += strspn(p, blank);
    int close = *p == '[' ? ']' : 0, more = 1;
    if (close) p += 1 + strspn(p + 1, blank);
    if (close && *p == close) more = 0, p++;
    while (more) {
        char *end;
        errno = 0;
        if (*p < '0' || *p > '9') return DONE;
        unsigned long long v = strtoull(p, &end, 10);
        if (errno || v > INT32_MAX) return DONE;
        if ((code = reserve_ids(a, out, (uint64_t)out->len + 1))) return code;
        out->data[out->len++] = (int32_t)v;
        p = end + strspn(end, blank);
        more = *p == ',';
        if (!more && *p != close) return DONE;
        if (more || close) p += 1 + strspn(p + 1, blank);
    }
    *good = p[strspn(p, blank)] == 0;
    return DONE;
}

static void print_ids(const ids *v) {
    putchar('[');
    for (uint32_t i = 0; i < v->len; i++) printf("%s%d", i ? "," : "", v->data[i]);
    puts("]");
}

/* Hex digits to bytes, in place; 0 if there is anything else. */
static int from_hex(bytes *b) {
    size_t n = b->len / 2;
    if (b->len % 2 || (b->len && strspn(b->data, "0123456789abcdefABCDEF") != b->len)) return 0;
    for (size_t i = 0; i < n; i++) {
        char pair[3] = {b->data[2 * i], b->data[2 * i + 1], 0};
        b->data[i] = (char)strtoul(pair, NULL, 16);
    }
    b->len = n;
    return 1;
}

/* ---- JSON ---- */

/* Length of the UTF-8 character at p, its code point in *c; 0 if it is malformed. */
static uint32_t utf8_next(const char *text, uint64_t n, uint32_t *c) {
    static const uint32_t min_cp[5] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *p = (const unsigned char *)text;
    uint32_t len = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf8 ? 4 : 0;
    if (len == 0 || len > n) return 0;
    *c = len == 1 ? p[0] : p[0] & (0x7fu >> len);
    for (uint32_t i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        *c = *c << 6 | (p[i] & 0x3fu);
    }
    return *c < min_cp[len] || *c > 0x10ffff || (*c >= 0xd800 && *c < 0xe000) ? 0 : len;
}

/* Write code point c as UTF-8: its length. */
static size_t utf8_put(uint32_t c, char out[4]) {
    if (c < 0x80) return out[0] = (char)c, 1;
    const size_t len = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = len - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(0xf0u << (4 - len) | c);
    return len;
}

/* A JSON string in ASCII: what is not UTF-8 becomes U+FFFD, so that any bytes give valid JSON. */
static void put_json(FILE *f, const char *text, uint64_t n) {
    fputc('"', f);
    for (uint64_t i = 0; i < n;) {
        uint32_t c, len = utf8_next(text + i, n - i, &c);
        if (len == 0) c = 0xfffd, len = 1;
        i += len;
        if (c >= 0x20 && c < 0x7f) fprintf(f, c == '"' || c == '\\' ? "\\%c" : "%c", (int)c);
        else if (c < 0x10000) fprintf(f, "\\u%04x", c);
        else fprintf(f, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10), 0xdc00 + ((c - 0x10000) & 0x3ff));
    }
    fputc('"', f);
}

/* JSON being read; a NUL stands at its end. */
typedef struct json {
    const char *start, *at, *name; /* of the file */
} json;

static int fail_json(app *a, const json *j, const char *want) {
    return fail(a, FAILED, "%s: byte %zu: want %s", j->name, (size_t)(j->at - j->start), want);
}

/* The next character that is no blank. */
static char json_next(json *j) { return *(j->at += strspn(j->at, " \t\r\n")); }

/* Take c if it comes next. */
static int json_take(json *j, char c) { return json_next(j) == c ? j->at++, 1 : 0; }

/* Four hex digits; UINT32_MAX if they are none. */
static uint32_t json_hex(const char *p) {
    char digits[5] = "";
    for (int i = 0; i < 4 && p[i]; i++) digits[i] = p[i];
    return strspn(digits, "0123456789abcdefABCDEF") == 4 ? (uint32_t)strtoul(digits, NULL, 16) : UINT32_MAX;
}

/* Read a string into out, as UTF-8. Half of a surrogate pair becomes U+FFFD. */
static int json_string(app *a, json *j, bytes *out) {
    static const char letters[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    int code;
    out->len = 0;
    if (!json_take(j, '"')) return fail_json(a, j, "a string");
    while (*j->at != '"') {
        size_t n = strcspn(j->at, "\"\\");
        if ((code = append(a, out, j->at, n))) return code;
        j->at += n;
        if (*j->at == 0) return fail_json(a, j, "the end of a string");
        if (*j->at != '\\') continue;
        const char *letter = j->at[1] ? strchr(letters, j->at[1]) : NULL;
        uint32_t c = j->at[1] == 'u' ? json_hex(j->at + 2) : UINT32_MAX, low;
        if (letter) c = (unsigned char)values[letter - letters];
        if (c == UINT32_MAX) return fail_json(a, j, "an escape sequence");
        j->at += letter ? 2 : 6;
        if (c >= 0xd800 && c < 0xdc00 && j->at[0] == '\\' && j->at[1] == 'u' && (low = json_hex(j->at + 2)) >= 0xdc00 &&
            low < 0xe000)
            c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00), j->at += 6;
        char utf8[4];
        if ((code = append(a, out, utf8, utf8_put(c >= 0xd800 && c < 0xe000 ? 0xfffd : c, utf8)))) return code;
    }
    j->at++;
    return append(a, out, "", 0);
}

/* Go to the next element of an array (close is ']') or the next key of an object ('}'), the first one if *more is 0;
 * *more becomes 0 at the end. */
static int json_element(app *a, json *j, char close, int *more) {
    const int first = !*more, is_array = close == ']';
    if (first && !json_take(j, is_array ? '[' : '{')) return fail_json(a, j, is_array ? "an array" : "an object");
    *more = !json_take(j, close);
    return first || !*more || json_take(j, ',') ? DONE : fail_json(a, j, "a comma or the end");
}

static int json_key(app *a, json *j, bytes *key, int *more) {
    int code;
    if ((code = json_element(a, j, '}', more)) || !*more) return code;
    if ((code = json_string(a, j, key))) return code;
    return json_take(j, ':') ? DONE : fail_json(a, j, "a colon");
}

/* Skip a value. Brackets are only counted: whoever uses the value checks it. */
static int json_skip(app *a, json *j) {
    int code;
    uint64_t depth = 0;
    do {
        const char c = json_next(j);
        size_t n = strspn(j->at, depth ? "+-.0123456789Eaeflnrstu,:" : "+-.0123456789Eaeflnrstu");
        if (c == '"') {
            if ((code = json_string(a, j, &a->line))) return code;
            continue;
        }
        if (c == '[' || c == '{') depth++, n = 1;
        if (depth && (c == ']' || c == '}')) depth--, n = 1;
        if (n == 0) return fail_json(a, j, "a value");
        j->at += n;
    } while (depth > 0);
    return DONE;
}

/* ---- generating ---- */

/* What a generation gave, and when. */
typedef struct answer {
    rf_generate_result result;
    double begin, end;
} answer;

/* A Ctrl-C after the last evaluation of the one before must not stop this one: then evaluate again. */
static rf_result forward(app *a, const int32_t *tokens, uint32_t n) {
    rf_result r = rf_session_forward(a->s, tokens, n, NULL, &a->err);
    return r == RF_ERR_CANCELLED && !interrupted ? rf_session_forward(a->s, tokens, n, NULL, &a->err) : r;
}

/* A thought that begins or ends: shown it is dimmed, folded one line says how long it took. */
static void show_thought(app *a, int begins) {
    const int dims = is_rich(STDERR_FILENO);
    if (a->o.think != THINK_HIDE && isatty(STDERR_FILENO)) {
        fputs(begins ? dims ? "\033[2m" : "" : dims ? "\033[0m\n\n" : "\n\n", stderr);
    } else if (a->talks) {
        if (begins) fputs("(thinking ...", stderr);
        else fprintf(stderr, " %.1f s)\n\n", now() - a->thought_begin);
    }
    if (begins) a->thought_begin = now();
}

/* Keep a tool call, and print it as a line of JSON. */
static int add_call(app *a, const rf_piece *p) {
    int code;
    rf_tool_call call = {0}, *calls = realloc(a->calls, (a->n_calls + 1) * sizeof *calls);
    if (!calls) return no_memory(a);
    a->calls = calls;
    if (p->id.len && (code = copy_text(a, p->id.data, p->id.len, &call.id))) return code;
    if ((code = copy_text(a, p->name.data, p->name.len, &call.name)) ||
        (code = copy_text(a, p->text.data, p->text.len, &call.arguments)))
        return free_text(call.id), free_text(call.name), code;
    calls[a->n_calls++] = call;
    if (a->open_line) putchar('\n');
    fputs("{\"name\": ", stdout);
    put_json(stdout, call.name, strlen(call.name));
    printf(", \"arguments\": %s}", call.arguments);
    return emit(a, "\n", 1);
}

/* Thoughts go to a terminal only: the result is the answer. */
static int on_piece(const rf_piece *p, void *user) {
    app *a = user;
    const int is_thought = p->kind == RF_PIECE_THOUGHT;
    if (is_thought != a->thinks) show_thought(a, is_thought);
    a->thinks = is_thought;
    if (is_thought) {
        a->failed = append(a, &a->thought, p->text.data, p->text.len);
        if (a->o.think != THINK_HIDE && isatty(STDERR_FILENO)) fwrite(p->text.data, 1, p->text.len, stderr);
    } else if (p->kind == RF_PIECE_CALL) {
        a->failed = add_call(a, p);
    } else {
        a->failed = append(a, &a->text, p->text.data, p->text.len);
        if (!a->failed) a->failed = emit(a, p->text.data, p->text.len);
    }
    return a->failed;
}

static int on_token(int32_t token, void *user) {
    app *a = user;
    (void)token;
    if (a->first_token == 0) {
        clear_bar(a);
        a->bar = -1;
        a->first_token = now();
    }
    return interrupted != 0;
}

static void note_dropped(app *a, uint32_t n) {
    char text[80];
    snprintf(text, sizeof text, "the context is full: the oldest %u messages are left out", n);
    note(RF_LOG_WARNING, text, a);
}

/* Generate: the answer goes to stdout and a->text, thoughts to a->thought, tool calls to a->calls. */
static int generate(app *a, rf_generate_desc *desc, answer *out) {
    rf_result r;
    desc->sampler = &a->sampler;
    desc->grammar = a->grammar;
    desc->drafter = a->drafter;
    desc->stop = a->o.stop.item;
    desc->n_stop = a->o.stop.n;
    desc->on_piece = on_piece;
    desc->on_token = on_token;
    desc->user = a;
    out->begin = now();
    a->text.len = a->thought.len = 0;
    free_calls(a->calls, a->n_calls);
    a->calls = NULL;
    a->n_calls = 0;
    a->first_token = 0;
    a->failed = DONE;
    do r = rf_generate(a->s, desc, &out->result, &a->err); /* again, if a Ctrl-C of before has stopped it */
    while (r == RF_OK && out->result.finish == RF_FINISH_CANCELLED && !a->first_token && !interrupted);
    out->end = now();
    if (a->thinks) show_thought(a, 0);
    a->thinks = 0;
    if (out->result.n_dropped) note_dropped(a, out->result.n_dropped);
    return a->failed ? a->failed : lib(a, r);
}

static double rate(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

static const char *const finish_names[] = {"end of text", "tool call", "stop text", "max tokens", "context full",
                                           "interrupted"}; /* by rf_finish */

static void print_timing(app *a, const answer *x) {
    const rf_generate_result *g = &x->result;
    const rf_device_info d = rf_device_get_info(a->d);
    const double first = a->first_token ? a->first_token : x->end, n_steps = g->n_generated ? g->n_generated - 1 : 0;
    const double decode = rate(n_steps, x->end - first), n_prompt = g->n_prompt - g->n_reused;
    char drafts[128] = "";
    const rf_drafter_stats s = rf_drafter_get_stats(a->drafter);
    if (a->drafter)
        snprintf(drafts, sizeof drafts, "drafts %llu of %llu right, %llu steps, gain %.2f, ", LLU(s.accepted),
                 LLU(s.drafted), LLU(s.steps), s.gain);
    print_notes(a);
    fprintf(stderr, "open %.1f ms, plan %.1f ms, first token %.1f ms, prefill %.0f tokens %.1f tok/s, decode %u tokens "
            "%.1f tok/s %.2f GB/s, %s%s (%s)%s, stopped: %s\n", a->open_s * 1e3, a->plan_s * 1e3,
            (first - a->start) * 1e3, n_prompt, rate(n_prompt, first - x->begin), g->n_generated, decode,
            decode * (double)a->info.token_bytes / 1e9, drafts, d.name, d.arch, a->seed, finish_names[g->finish]);
}

/* ---- sampling and templates ---- */

/* --logit-bias "15+1.5", "15-inf" */
static int parse_biases(app *a) {
    const texts *list = &a->o.logit_bias;
    for (uint32_t i = 0; i < list->n; i++) {
        const char *text = list->item[i];
        char *sign, *end;
        errno = 0;
        unsigned long long id = strtoull(text, &sign, 10);
        double bias = *sign == '+' || *sign == '-' ? strtod(sign, &end) : NAN;
        if (errno || *text < '0' || *text > '9' || isnan(bias) || *end || bias > 1e6)
            return fail(a, USAGE, "--logit-bias: want ID+B or ID-B, like 15-inf, got \"%s\"", text);
        if (id >= a->info.n_vocab)
            return fail(a, FAILED, "--logit-bias: want ids 0..%u, got %llu", a->info.n_vocab - 1, id);
        a->bias[i] = (rf_logit_bias){(int32_t)id, (float)bias};
    }
    return DONE;
}

/* Where DRY's repetitions begin anew: at --dry-sequence-breaker, else at llama.cpp's. */
static int find_breakers(app *a, rf_sampler_desc *d) {
    static const texts usual = {{"\n", ":", "\"", "*"}, 4};
    const texts *list = a->o.dry_breakers.n ? &a->o.dry_breakers : &usual;
    uint32_t n = 0;
    rf_result r = rf_dry_breakers_find(a->t, list->item, list->n, NULL, 0, &n, &a->err);
    if (r != RF_ERR_CAPACITY) return lib(a, r);
    if (!(a->breakers = malloc(n * sizeof *a->breakers))) return no_memory(a);
    d->dry_breakers = a->breakers;
    d->n_dry_breakers = n;
    return lib(a, rf_dry_breakers_find(a->t, list->item, list->n, a->breakers, n, &n, &a->err));
}

/* Numbers as the options say, else as the file says, else ours (0: the library's). */
static int choose_sampling(app *a, rf_sampler_desc *d) {
    int code;
    const options *o = &a->o;
    rf_kv kv;
    if ((code = lib(a, rf_sampler_defaults(a->g, d, &a->err)))) return code;
    const struct { float *field; double given; const char *key; double ours; } reals[] = {
        {&d->temperature, o->temp, "general.sampling.temp", 0.8},
        {&d->top_p, o->top_p, "general.sampling.top_p", 0.95},
        {&d->min_p, o->min_p, "general.sampling.min_p", 0.05},
        {&d->repeat_penalty, o->repeat_penalty, NULL, 0},
        {&d->frequency_penalty, o->frequency_penalty, NULL, 0},
        {&d->presence_penalty, o->presence_penalty, NULL, 0},
        {&d->dry_multiplier, o->dry_multiplier, NULL, 0},
        {&d->dry_base, o->dry_base, NULL, 0},
        {&d->xtc_probability, o->xtc_probability, NULL, 0},
        {&d->xtc_threshold, o->xtc_threshold, NULL, 0},
        {&d->mirostat_tau, o->mirostat_tau, NULL, 0},
        {&d->mirostat_eta, o->mirostat_eta, NULL, 0}};
    const struct { uint32_t *field; uint64_t given; } counts[] = {
        {&d->top_k, o->top_k}, {&d->penalty_last_n, o->penalty_last_n}, {&d->dry_last_n, o->dry_last_n},
        {&d->dry_allowed_length, o->dry_allowed}, {&d->mirostat, o->mirostat}};
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        if (reals[i].key && rf_gguf_find_kv(a->g, reals[i].key, &kv, NULL)) *reals[i].field = (float)reals[i].ours;
        if (!isnan(reals[i].given)) *reals[i].field = (float)reals[i].given;
    }
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].given != NOT_GIVEN) *counts[i].field = (uint32_t)counts[i].given;
    return DONE;
}

/* Start the sampler, when the size of the context is known. */
static int open_sampler(app *a) {
    int code;
    rf_sampler_desc d;
    uint32_t seed = (uint32_t)time(NULL);
    if ((code = choose_sampling(a, &d)) || (code = parse_biases(a))) return code;
    d.bias = a->bias;
    d.n_bias = a->o.logit_bias.n;
    d.seed = a->o.seed;
    if (a->o.seed == NOT_GIVEN) {
        if (getentropy(&seed, sizeof seed)) errno = 0; /* the time will do */
        d.seed = seed;
        if (d.temperature > 0) snprintf(a->seed, sizeof a->seed, ", seed %u", seed);
    }
    if (d.dry_multiplier > 0 && (code = find_breakers(a, &d))) return code;
    if (d.dry_multiplier > 0 || d.penalty_last_n > RF_SAMPLER_HISTORY) { /* remember more than the sampler can alone */
        d.n_history = a->n_ctx > d.penalty_last_n ? a->n_ctx : d.penalty_last_n;
        if (!(d.history = a->history = malloc(5 * sizeof *d.history * d.n_history))) return no_memory(a);
    }
    return lib(a, rf_sampler_init(&a->sampler, &d, &a->err));
}

/* Read a whole file. */
static int read_file(app *a, const char *path, bytes *out) {
    FILE *f = fopen(path, "rb");
    if (!f) return fail_errno(a, path);
    int code = read_all(a, f, path, out);
    fclose(f);
    return code;
}

/* Parse the template in a file. */
static int open_template(app *a, const char *path) {
    bytes text = {0};
    int code = read_file(a, path, &text);
    rf_error *err = &a->err;
    rf_result r = code ? RF_OK : rf_chat_template_open((rf_string){text.data, text.len}, NULL, &a->own_template, err);
    free(text.data);
    a->chat_template = a->own_template;
    return r ? fail(a, FAILED, "%s: %s", path, err->text) : code;
}

/* Compile the grammar in a file, or a JSON schema, which may stand in the command line. */
static int open_grammar(app *a) {
    const char *schema = a->o.schema, *what = schema ? schema : a->o.grammar;
    const int is_text = schema && schema[strspn(schema, " \t\r\n")] == '{';
    bytes text = {0};
    if (!what) return DONE;
    if (schema && a->o.grammar) return fail(a, USAGE, "want either --grammar or --json-schema, not both");
    int code = is_text ? append(a, &text, schema, strlen(schema)) : read_file(a, what, &text);
    rf_result r = code ? RF_OK : rf_grammar_open(a->t, schema ? RF_GRAMMAR_JSON_SCHEMA : RF_GRAMMAR_GBNF,
                                                 (rf_string){text.data, text.len}, NULL, &a->grammar, &a->err);
    free(text.data);
    return r ? fail(a, FAILED, "%s: %s", is_text ? "--json-schema" : what, a->err.text) : code;
}

/* Open the draft model of a file, or the MTP heads: path NULL. A file without any is refused as the first is opened. */
static int open_draft_model(app *a, const char *path) {
    int code;
    const uint32_t n = path || a->info.n_mtp == 0 ? 1 : a->info.n_mtp < RF_MTP_HEADS ? a->info.n_mtp : RF_MTP_HEADS;
    if (path && (code = lib(a, rf_gguf_open(path, NULL, &a->draft_g, &a->err)))) return code;
    for (uint32_t k = 0; k < n; k++) {
        const rf_model_desc how = {.mtp = path ? 0 : k + 1};
        if ((code = lib(a, rf_model_open(path ? a->draft_g : a->g, a->d, &how, &a->draft_m[k], &a->err)))) return code;
    }
    return DONE;
}

static int open_draft_sessions(app *a) {
    const uint32_t trained = rf_model_get_info(a->draft_m[0]).n_ctx_train;
    int code = DONE;
    for (int k = 0; k < RF_MTP_HEADS && a->draft_m[k] && !code; k++) {
        const rf_session_desc desc = {.n_ctx = trained && trained < a->n_ctx ? trained : a->n_ctx,
                                      .mtp = k + 1 < RF_MTP_HEADS && a->draft_m[k + 1]};
        code = lib(a, rf_session_open(a->draft_m[k], &desc, &a->draft_s[k], &a->err));
    }
    return code;
}

/* Open a session for text and the drafter of --draft: n-grams, and behind them the MTP heads or a draft model. */
static int open_writing_session(app *a, uint64_t need, uint64_t n_tokens) {
    int code;
    const uint32_t max = (uint32_t)a->o.draft_max;
    const uint32_t mtp = drafts_by_mtp(a);
    const int asks = a->o.draft && strcmp(a->o.draft, "ngram");
    if ((code = open_session(a, need, n_tokens, a->o.draft ? max + 1 : 1))) return code;
    if (!a->o.draft) return DONE;
    if (asks && (code = open_draft_model(a, mtp ? NULL : a->o.draft))) return code;
    if (asks && (code = open_draft_sessions(a))) return code;
    rf_drafter_desc desc = {.max_drafts = max, .session = mtp ? NULL : a->draft_s[0]};
    if (mtp) memcpy(desc.mtp, a->draft_s, sizeof desc.mtp);
    return lib(a, rf_drafter_open(a->m, &desc, &a->drafter, &a->err));
}

/* Open model, tokenizer, and the chat template of --jinja or else the model's; there may be none. */
static int open_writer(app *a) {
    int code;
    if ((code = open_model(a, a->o.device))) return code;
    if ((code = lib(a, rf_model_get_tokenizer(a->m, &a->t, &a->err)))) return code;
    if ((code = open_grammar(a))) return code;
    if (a->o.tools && (code = read_file(a, a->o.tools, &a->tools))) return code;
    if (a->o.raw) return DONE;
    if (a->o.jinja) return open_template(a, a->o.jinja);
    rf_result r = rf_model_get_chat_template(a->m, &a->chat_template, &a->err);
    return r == RF_ERR_NOT_FOUND ? DONE : lib(a, r);
}

/* The messages, with the opening of an answer. */
static rf_chat conversation(const app *a) {
    static const uint32_t thinking[] = {RF_THINKING_ON, RF_THINKING_OFF, RF_THINKING_DEFAULT};
    return (rf_chat){.chat_template = a->chat_template, .messages = a->messages, .n_messages = a->n_messages,
                     .open_answer = 1, .tools = a->tools.data, .effort = a->o.effort, .extra = a->o.extra,
                     .thinking = a->o.think == NOT_GIVEN ? RF_THINKING_DEFAULT : thinking[a->o.think], .now = a->today};
}

/* ---- generate ---- */

/* The prompt: an argument, a file, or what comes through a pipe, without its last newline. */
static int read_prompt(app *a) {
    int code;
    const char *text = a->o.prompt, *name = a->o.prompt_file;
    if (text && name) return fail(a, USAGE, "want either --prompt or --prompt-file, not both");
    if (text) return append(a, &a->message, text, strlen(text));
    if (name) return strcmp(name, "-") ? read_file(a, name, &a->message) : read_all(a, stdin, "stdin", &a->message);
    if (!isatty(STDIN_FILENO) && (code = read_all(a, stdin, "stdin", &a->message))) return code;
    if (a->message.len == 0) return fail(a, USAGE, "want a prompt: --prompt TEXT, --prompt-file FILE, or a pipe");
    if (a->message.data[a->message.len - 1] == '\n') a->message.data[--a->message.len] = 0;
    return DONE;
}

/* What to generate from: messages where there is a chat template, else text. *n: its tokens. */
static int prepare(app *a, rf_chat *chat, rf_generate_desc *desc, uint32_t *n) {
    int code;
    const options *o = &a->o;
    if (!a->chat_template) {
        uint32_t flags = (o->no_bos ? 0 : RF_TOKENIZE_ADD) | (o->special ? RF_TOKENIZE_SPECIAL : 0);
        if ((code = encode(a, a->message.data, a->message.len, flags, &a->prompt))) return code;
        *desc = (rf_generate_desc){.ids = a->prompt.data, .n_ids = *n = a->prompt.len};
        return a->prompt.len ? DONE : fail(a, FAILED, "the prompt is empty");
    }
    if (o->system && (code = say(a, "system", o->system, strlen(o->system)))) return code;
    if ((code = say(a, "user", a->message.data, a->message.len))) return code;
    *chat = conversation(a);
    *desc = (rf_generate_desc){.chat = chat};
    rf_result r = rf_chat_tokenize(a->t, chat, RF_TOKENIZE_ADD, NULL, 0, n, &a->err);
    return r == RF_ERR_CAPACITY ? DONE : lib(a, r);
}

static int run_generate(app *a) {
    int code;
    answer x = {0};
    const options *o = &a->o;
    rf_generate_desc desc;
    rf_chat chat;
    uint32_t n;
    if ((code = read_prompt(a))) return code;
    if ((code = open_writer(a))) return code;
    if ((code = prepare(a, &chat, &desc, &n))) return code;
    desc.max_tokens = o->max_tokens != NOT_GIVEN ? (uint32_t)o->max_tokens : desc.chat ? 0 : 256;
    uint64_t need = (uint64_t)n + (desc.max_tokens ? desc.max_tokens : DEFAULT_CTX), trained = a->info.n_ctx_train;
    if ((code = open_writing_session(a, need < trained ? need : trained, n))) return code;
    if ((code = open_sampler(a))) return code;
    if (o->echo && (code = emit(a, a->message.data, a->message.len))) return code;
    if ((code = generate(a, &desc, &x))) return code;
    if ((a->open_line && (o->echo || isatty(STDOUT_FILENO))) && (code = emit(a, "\n", 1))) return code;
    print_timing(a, &x);
    return interrupted ? INTERRUPTED : DONE;
}

/* ---- chat: the terminal ---- */

/* Ask for a line. On a terminal it can be edited, and earlier ones come back with the arrow keys. */
static int ask(app *a, const char *prompt, int *more) {
#ifdef HAVE_EDITLINE
    if (a->talks) {
        int code = DONE;
        char *line = readline(prompt);
        *more = line != NULL;
        a->line.len = 0;
        if (line) code = append(a, &a->line, line, strlen(line));
        if (line && *line) add_history(line);
        free(line);
        return code;
    }
#endif
    if (a->talks) fputs(prompt, stderr);
    return read_line(a, &a->line, more);
}

#define QUOTES "\"\"\""

/* Read a message: a line, or lines between """ and """. */
static int read_message(app *a, int *more) {
    int code;
    const size_t n_quotes = strlen(QUOTES);
    bytes *m = &a->message;
    m->len = 0;
    if ((code = ask(a, "> ", more))) return code;
    size_t skip = *more && strncmp(a->line.data, QUOTES, n_quotes) == 0 ? n_quotes : 0, open = skip > 0;
    if (*more && (code = append(a, m, a->line.data + skip, a->line.len - skip))) return code;
    while (open && *more) {
        if (m->len >= n_quotes && memcmp(m->data + m->len - n_quotes, QUOTES, n_quotes) == 0) {
            m->data[m->len -= n_quotes] = 0;
            return DONE;
        }
        if ((code = ask(a, ". ", more))) return code;
        if (*more && (code = append(a, m, "\n", 1))) return code;
        if (*more && (code = append(a, m, a->line.data, a->line.len))) return code;
    }
    return DONE;
}

/* ---- chat: the conversation ---- */

/* Answer the messages so far. The session keeps the prefix that the old and the new conversation share. */
static int answer_messages(app *a) {
    int code;
    answer x = {0};
    const rf_chat chat = conversation(a);
    rf_generate_desc desc = {.chat = &chat, .drop_turns = 1,
                             .max_tokens = a->o.max_tokens == NOT_GIVEN ? 0 : (uint32_t)a->o.max_tokens};
    a->start = now();
    if ((code = generate(a, &desc, &x))) return code;
    if (a->open_line && (code = emit(a, "\n", 1))) return code;
    const rf_finish finish = x.result.finish;
    if (a->o.stats) print_timing(a, &x);
    else if (a->talks) {
        print_notes(a);
        if (finish == RF_FINISH_LENGTH || finish == RF_FINISH_CONTEXT) fprintf(stderr, "(%s)\n", finish_names[finish]);
    }
    return add_answer(a);
}

static int is_from(const app *a, uint32_t i, const char *role) { return strcmp(a->messages[i].role, role) == 0; }

/* Messages that stay when the conversation is forgotten: a system message. */
static uint32_t n_system(const app *a) { return a->n_messages > 0 && is_from(a, 0, "system"); }

/* ---- chat: /save and /load ----
 * A conversation is a JSON array of messages, as chat APIs and templates have it: {"role": ..., "content": ...}, with
 * reasoning_content and tool_calls of answers, and name and tool_call_id of a tool's results. */

static void save_field(FILE *f, const char *name, const char *text) {
    if (!text) return;
    fprintf(f, ", \"%s\": ", name);
    put_json(f, text, strlen(text));
}

static void save_message(FILE *f, const rf_chat_message *m) {
    fputs("{\"role\": ", f);
    put_json(f, m->role, strlen(m->role));
    save_field(f, "content", m->content);
    if (m->parts) fprintf(f, ", \"content\": %s", m->parts);
    save_field(f, "reasoning_content", m->reasoning);
    save_field(f, "name", m->name);
    save_field(f, "tool_call_id", m->tool_call_id);
    for (uint32_t i = 0; i < m->n_tool_calls; i++) {
        const rf_tool_call *call = &m->tool_calls[i];
        fputs(i ? ", {\"type\": \"function\"" : ", \"tool_calls\": [{\"type\": \"function\"", f);
        save_field(f, "id", call->id);
        fputs(", \"function\": {\"name\": ", f);
        put_json(f, call->name, strlen(call->name));
        save_field(f, "arguments", call->arguments);
        fputs(i + 1 < m->n_tool_calls ? "}}" : "}}]", f);
    }
    fputc('}', f);
}

static int slash_save(app *a, const char *path) {
    FILE *f = fopen(path, "w");
    if (!f) return fail_errno(a, path);
    for (uint32_t i = 0; i < a->n_messages; i++) {
        fputs(i ? ",\n " : "[", f);
        save_message(f, &a->messages[i]);
    }
    fputs(a->n_messages ? "]\n" : "[]\n", f);
    int good = !ferror(f);
    if (fclose(f) != 0 || !good) return fail_errno(a, path);
    if (a->talks) fprintf(stderr, "%u messages\n", a->n_messages);
    return DONE;
}

/* Read a text, once; null is none. Where `any`, other values are kept as JSON. */
static int load_text(app *a, json *j, int any, const char **out) {
    int code;
    const int is_string = json_next(j) == '"';
    const char *start = j->at;
    if (*out) return fail_json(a, j, "this key once");
    if (strncmp(start, "null", 4) == 0) return j->at += 4, DONE;
    if ((code = is_string || !any ? json_string(a, j, &a->line) : json_skip(a, j))) return code;
    return is_string ? copy_text(a, a->line.data, a->line.len, out) : copy_text(a, start, (size_t)(j->at - start), out);
}

/* Read a tool call: {"id": ..., "function": {"name": ..., "arguments": ...}}, or all in one object. */
static int load_call(app *a, json *j, rf_tool_call *call, int is_function) {
    int code;
    for (int more = 0;;) {
        if ((code = json_key(a, j, &a->text, &more)) || !more) return code;
        const char *key = a->text.data;
        if (strcmp(key, "id") == 0) code = load_text(a, j, 0, &call->id);
        else if (strcmp(key, "name") == 0) code = load_text(a, j, 0, &call->name);
        else if (strcmp(key, "arguments") == 0) code = load_text(a, j, 1, &call->arguments);
        else if (strcmp(key, "function") == 0 && !is_function) code = load_call(a, j, call, 1);
        else code = json_skip(a, j);
        if (code) return code;
    }
}

static int load_calls(app *a, json *j, rf_chat_message *m) {
    int code;
    for (int more = 0;;) {
        if ((code = json_element(a, j, ']', &more)) || !more) return code;
        rf_tool_call *calls = (rf_tool_call *)(uintptr_t)m->tool_calls;
        if (!(calls = realloc(calls, (m->n_tool_calls + 1) * sizeof *calls))) return no_memory(a);
        calls[m->n_tool_calls] = (rf_tool_call){0};
        m->tool_calls = calls;
        rf_tool_call *call = &calls[m->n_tool_calls++];
        if ((code = load_call(a, j, call, 0))) return code;
        if (!call->name || !call->arguments) return fail_json(a, j, "a tool call with name and arguments");
    }
}

/* Read an object into m, which is to be freed whatever comes of it. */
static int load_message(app *a, json *j, rf_chat_message *m) {
    int code;
    for (int more = 0;;) {
        if ((code = json_key(a, j, &a->text, &more)) || !more) break;
        const char *key = a->text.data;
        const struct { const char *key, **out; } fields[] = {
            {"role", &m->role}, {"reasoning_content", &m->reasoning}, {"name", &m->name},
            {"tool_call_id", &m->tool_call_id}, {"content", json_next(j) == '[' ? &m->parts : &m->content}};
        const char **out = NULL;
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
            if (strcmp(key, fields[i].key) == 0) out = fields[i].out;
        if (out) code = load_text(a, j, out == &m->parts, out);
        else if (strcmp(key, "tool_calls") == 0 && json_next(j) == '[') code = load_calls(a, j, m);
        else code = json_skip(a, j);
        if (code) break;
    }
    if (code) return code;
    return m->role ? DONE : fail_json(a, j, "a role");
}

static int load_messages(app *a, json *j) {
    int code;
    for (int more = 0;;) {
        rf_chat_message m = {0};
        if ((code = json_element(a, j, ']', &more))) return code;
        if (!more) break;
        if ((code = load_message(a, j, &m))) return free_message(&m), code;
        if ((code = add_message(a, &m))) return code;
    }
    return json_next(j) ? fail_json(a, j, "nothing after the array") : DONE;
}

/* The messages of a file replace those that there are, unless it fails. */
static int slash_load(app *a, const char *path) {
    bytes text = {0};
    const uint32_t n_before = a->n_messages;
    int code = read_file(a, path, &text);
    json j = {text.data, text.data, path};
    if (code == DONE && (code = load_messages(a, &j))) forget(a, n_before);
    free(text.data);
    if (code) return code;
    for (uint32_t i = 0; i < n_before; i++) free_message(&a->messages[i]);
    a->n_messages -= n_before;
    if (a->n_messages) memmove(a->messages, a->messages + n_before, a->n_messages * sizeof *a->messages);
    if (a->talks) fprintf(stderr, "%u messages\n", a->n_messages);
    return DONE;
}

/* ---- chat: slash commands ---- */

enum { LEAVE = -1 }; /* what /bye returns */

typedef struct slash {
    const char *name, *argument, *help; /* an argument in [] may be left out */
    int (*run)(app *a, const char *argument);
} slash;

static int slash_help(app *a, const char *argument);

static int slash_bye(app *a, const char *argument) { return (void)a, (void)argument, LEAVE; }

static int slash_clear(app *a, const char *argument) {
    (void)argument;
    forget(a, n_system(a));
    return DONE;
}

/* Put a system message first, in place of the one that is there. */
static int slash_system(app *a, const char *argument) {
    int code;
    if (n_system(a)) {
        free_message(&a->messages[0]);
        memmove(a->messages, a->messages + 1, --a->n_messages * sizeof *a->messages);
    }
    if (!*argument) return DONE;
    if ((code = say(a, "system", argument, strlen(argument)))) return code;
    rf_chat_message last = a->messages[a->n_messages - 1];
    memmove(a->messages + 1, a->messages, (a->n_messages - 1) * sizeof *a->messages);
    a->messages[0] = last;
    return DONE;
}

/* The last message of the user, or n_messages if there is none. */
static uint32_t last_question(const app *a) {
    for (uint32_t i = a->n_messages; i > 0; i--) if (is_from(a, i - 1, "user")) return i - 1;
    return a->n_messages;
}

static int slash_undo(app *a, const char *argument) {
    (void)argument;
    if (last_question(a) == a->n_messages) return fail(a, FAILED, "/undo: there is no message");
    forget(a, last_question(a));
    return DONE;
}

static int slash_regen(app *a, const char *argument) {
    (void)argument;
    if (last_question(a) == a->n_messages) return fail(a, FAILED, "/regen: there is no message");
    forget(a, last_question(a) + 1);
    return answer_messages(a);
}

/* The result of a tool call, the first that has none; after that of the last one the model goes on. */
static int slash_result(app *a, const char *argument) {
    int code;
    uint32_t n = a->n_messages, at = n;
    while (at > 0 && is_from(a, at - 1, "tool")) at--;
    const rf_chat_message *asks = at > 0 ? &a->messages[at - 1] : NULL;
    if (!asks || n - at >= asks->n_tool_calls) return fail(a, FAILED, "/result: there is no tool call without one");
    const rf_tool_call *call = &asks->tool_calls[n - at];
    if ((code = say(a, "tool", argument, strlen(argument)))) return code;
    rf_chat_message *m = &a->messages[n];
    if ((code = copy_text(a, call->name, strlen(call->name), &m->name))) return code;
    if (call->id && (code = copy_text(a, call->id, strlen(call->id), &m->tool_call_id))) return code;
    return a->n_messages - at == asks->n_tool_calls ? answer_messages(a) : DONE;
}

static int slash_think(app *a, const char *argument) {
    static const char *const choices[] = {"on", "off", "hide"}; /* as of --think */
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (strcmp(argument, choices[i]) == 0) return a->o.think = i, DONE;
    return fail(a, USAGE, "/think: want on, off or hide");
}

static int slash_stats(app *a, const char *argument) {
    (void)argument;
    a->o.stats = !a->o.stats;
    fprintf(stderr, "statistics are %s\n", a->o.stats ? "on" : "off");
    return DONE;
}

static const slash slashes[] = {
    {"/help", "", "this list", slash_help},
    {"/bye", "", "leave; Ctrl-D does, too", slash_bye},
    {"/quit", "", NULL, slash_bye},
    {"/exit", "", NULL, slash_bye},
    {"/system", "[TEXT]", "the system message; without TEXT there is none", slash_system},
    {"/clear", "", "forget the conversation, but for the system message", slash_clear},
    {"/reset", "", NULL, slash_clear},
    {"/undo", "", "forget your last message and its answer", slash_undo},
    {"/regen", "", "answer your last message anew", slash_regen},
    {"/result", "TEXT", "the result of a tool call of the model (--tools)", slash_result},
    {"/think", "on|off|hide", "let the model think and show it, do not, or show only how long", slash_think},
    {"/save", "FILE", "write the conversation as JSON", slash_save},
    {"/load", "FILE", "go on with a conversation that was saved", slash_load},
    {"/stats", "", "print times and speeds after each answer, or stop that", slash_stats},
};
#define N_SLASHES (sizeof slashes / sizeof *slashes)

static int slash_help(app *a, const char *argument) {
    (void)a, (void)argument;
    for (const slash *c = slashes; c < slashes + N_SLASHES; c++)
        if (c->help) fprintf(stderr, "  %-8s %-12s %s\n", c->name, c->argument, c->help);
    fputs("  \"\"\"                   begins and ends a message of many lines\n"
          "  Ctrl-C                stops an answer; twice: leaves\n", stderr);
    return DONE;
}

/* Is it "/word ..."? A path (/etc/hosts) is a message. */
static int is_slash(const char *text) {
    size_t n = 1 + strspn(text + (*text == '/'), "abcdefghijklmnopqrstuvwxyz");
    return *text == '/' && n > 1 && (!text[n] || text[n] == ' ');
}

static int run_slash(app *a) {
    const char *text = a->message.data, *argument = text + strcspn(text, " ");
    const size_t n = (size_t)(argument - text);
    char names[256];
    size_t len = 0;
    argument += strspn(argument, " ");
    for (const slash *c = slashes; c < slashes + N_SLASHES; c++) {
        if (c->help) len += (size_t)snprintf(names + len, sizeof names - len, " %s", c->name);
        if (strlen(c->name) != n || memcmp(c->name, text, n)) continue;
        if (!*c->argument && *argument) return fail(a, USAGE, "%s takes no argument", c->name);
        if (*c->argument && *c->argument != '[' && !*argument)
            return fail(a, USAGE, "%s: want %s", c->name, c->argument);
        return c->run(a, argument);
    }
    return fail(a, USAGE, "%.*s is no command; there are%s", (int)n, text, names);
}

/* Answer a message of the user; one without an answer is forgotten. */
static int talk(app *a) {
    int code;
    uint32_t n_before = a->n_messages;
    if ((code = say(a, "user", a->message.data, a->message.len))) return code;
    if ((code = answer_messages(a))) forget(a, n_before);
    return code;
}

/* Note who answers, and how to get help. */
static void greet(app *a) {
    char text[512];
    rf_device_info d = rf_device_get_info(a->d);
    rf_kv kv;
    rf_string name = {a->info.arch, strlen(a->info.arch)};
    if (rf_gguf_find_kv(a->g, "general.name", &kv, NULL) == RF_OK && kv.type == RF_KV_STRING)
        rf_kv_text(&kv, NULL, &name, NULL);
    snprintf(text, sizeof text, "%.*s on %s (%s), %u tokens of context%s%s", name.len < 200 ? (int)name.len : 200,
             name.data, d.name, d.arch, a->n_ctx, a->seed, a->talks ? "; /help lists commands" : "");
    note(RF_LOG_WARNING, text, a);
}

static int run_chat(app *a) {
    int code, more;
    has_terminal = tcgetattr(STDIN_FILENO, &terminal) == 0;
    a->talks = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    if ((code = open_writer(a))) return code;
    if (!a->chat_template) return fail(a, FAILED, "%s has no chat template: --jinja FILE gives one", a->o.gguf);
    if ((code = open_writing_session(a, 0, 0))) return code;
    if ((code = open_sampler(a))) return code;
    if (a->o.system && (code = say(a, "system", a->o.system, strlen(a->o.system)))) return code;
    greet(a);
    if (a->talks) print_notes(a);
#ifdef HAVE_EDITLINE
    setlocale(LC_CTYPE, ""); /* which bytes are one character */
    rl_outstream = stderr;
#endif
    for (;;) {
        if ((code = read_message(a, &more))) return code;
        if (!more && !interrupted) {
            if (a->talks) fputc('\n', stderr);
            break;
        }
        if (!interrupted) code = !a->message.len ? DONE : is_slash(a->message.data) ? run_slash(a) : talk(a);
        if (code == LEAVE) break;
        if (code && !a->talks) return code;
        if (interrupted && !a->talks) return INTERRUPTED;
        if (interrupted) fputs("\n(Ctrl-C again or /bye leaves)\n", stderr);
        interrupted_before = interrupted;
        interrupted = 0;
    }
    print_notes(a);
    return DONE;
}

/* ---- logits ---- */

#define LOGITS_ROWS 64u /* rows of logits kept at once: bounds memory, whatever the prompt */

/* Evaluate n tokens and write the logits of each. */
static int write_logits(app *a, const int32_t *tokens, uint32_t n) {
    int code;
    rf_token_row rows[LOGITS_ROWS];
    size_t n_vocab = a->info.n_vocab;
    memset(rows, 0, sizeof rows);
    for (uint32_t i = 0; i < n; i++)
        rows[i] = (rf_token_row){.token = tokens[i], .pos = RF_POS_NEXT, .want_logits = 1};
    if ((code = lib(a, rf_session_eval(a->s, rows, n, &a->err)))) return code;
    for (uint32_t i = 0; i < n; i++) {
        float *logits;
        if ((code = lib(a, rf_session_get_logits(a->s, i, &logits, &a->err)))) return code;
        if (fwrite(logits, sizeof(float), n_vocab, a->out) != n_vocab) return fail_errno(a, a->o.out);
    }
    return DONE;
}

/* Append greedy tokens, the first from row i of the last eval. */
static int continue_greedily(app *a, uint32_t i) {
    int code;
    rf_sampler_desc greedy = {0};
    if ((code = reserve_ids(a, &a->tokens, a->o.n_greedy))) return code;
    if ((code = lib(a, rf_sampler_init(&a->sampler, &greedy, &a->err)))) return code;
    while (a->tokens.len < a->o.n_greedy) {
        int32_t *id = &a->tokens.data[a->tokens.len];
        if (a->tokens.len++ && (code = lib(a, rf_session_forward(a->s, id - 1, 1, NULL, &a->err)))) return code;
        if ((code = lib(a, rf_session_sample(a->s, i, &a->sampler, id, &a->err)))) return code;
        i = 0;
    }
    print_ids(&a->tokens);
    return DONE;
}

static int run_logits(app *a) {
    int code;
    const ids *p = &a->prompt;
    int good;
    if ((code = parse_ids(a, a->o.tokens, &a->prompt, &good))) return code;
    if (!good || p->len == 0) return fail(a, USAGE, "--tokens: want ids like 1,2,3, got \"%s\"", a->o.tokens);
    if ((code = open_model(a, a->o.device))) return code;
    for (uint32_t i = 0; i < p->len; i++)
        if ((uint32_t)p->data[i] >= a->info.n_vocab)
            return fail(a, FAILED, "--tokens: want ids 0..%u, got %d", a->info.n_vocab - 1, p->data[i]);
    uint64_t need = p->len + a->o.n_greedy;
    uint32_t piece = a->o.step ? 1 : p->len < LOGITS_ROWS ? p->len : LOGITS_ROWS;
    if ((code = open_session(a, need, need, piece))) return code;
    if (!(a->out = fopen(a->o.out, "wb"))) return fail_errno(a, a->o.out);
    for (uint32_t at = 0; at < p->len; at += piece) {
        if (piece > p->len - at) piece = p->len - at;
        if ((code = write_logits(a, p->data + at, piece))) return code;
    }
    FILE *f = a->out;
    a->out = NULL;
    if (fclose(f) != 0) return fail_errno(a, a->o.out);
    if (a->o.n_greedy && (code = continue_greedily(a, piece - 1))) return code;
    print_notes(a);
    return DONE;
}

/* ---- embed ---- */

/* A reranker's text of a query and a document to prompt: the file's template for it, or both texts with what the
 * vocabulary puts around each; documents begin without what begins a text. */
static int encode_pair(app *a, rf_string document) {
    int code;
    rf_kv kv;
    rf_string template = {NULL, 0};
    const rf_string query = {a->o.rank, strlen(a->o.rank)};
    const rf_tokenizer_info t = rf_tokenizer_get_info(a->t);
    bytes text = {0};
    ids part = {0};
    if (rf_gguf_find_kv(a->g, "tokenizer.chat_template.rerank", &kv, NULL) == RF_OK)
        rf_kv_text(&kv, NULL, &template, NULL);
    for (size_t i = 0; i < template.len;) {
        const int is_query = template.len - i >= 7 && memcmp(template.data + i, "{query}", 7) == 0,
                  is_document = template.len - i >= 10 && memcmp(template.data + i, "{document}", 10) == 0;
        const rf_string next = is_query ? query : is_document ? document : (rf_string){template.data + i, 1};
        if ((code = append(a, &text, next.data, next.len))) return code;
        i += is_query ? 7 : is_document ? 10 : 1;
    }
    if (template.len) code = encode(a, text.data, text.len, RF_TOKENIZE_ADD | RF_TOKENIZE_SPECIAL, &a->prompt);
    else {
        code = encode(a, query.data, query.len, RF_TOKENIZE_ADD, &a->prompt);
        if (!code) code = encode(a, document.data, document.len, RF_TOKENIZE_ADD, &part);
        const uint32_t begin = part.len && part.data[0] == t.bos;
        if (!code) code = reserve_ids(a, &a->prompt, a->prompt.len + part.len + 1);
        /* XLM-R puts two separators between sentences */
        if (!code && strcmp(t.model, "t5") == 0 && t.eos >= 0) a->prompt.data[a->prompt.len++] = t.eos;
        for (uint32_t i = begin; !code && i < part.len; i++) a->prompt.data[a->prompt.len++] = part.data[i];
    }
    free(text.data), free(part.data);
    return code;
}

/* The vector of a->prompt, or its scores, as a list in JSON. */
static int print_vector(app *a, uint32_t pooling) {
    int code;
    if (pooling == RF_POOL_DEFAULT) pooling = a->info.pooling;
    const uint32_t n = pooling == RF_POOL_RANK ? a->info.n_scores : a->info.n_embd_out, len = a->prompt.len;
    const rf_embed_text text = {a->prompt.data, len};
    const rf_embed_desc desc = {.texts = &text, .n_texts = 1, .pooling = pooling,
                                .normalize = (uint32_t)a->o.normalize};
    if (len == 0) return fail(a, FAILED, "the text is empty");
    if (pooling == RF_POOL_RANK && n == 0) return fail(a, FAILED, "--rank: the model has no classifier");
    if ((code = open_session(a, len, len, len < LOGITS_ROWS || a->info.both_ways ? len : LOGITS_ROWS))) return code;
    if ((code = reserve(a, &a->text, n * sizeof(float)))) return code;
    float *v = (float *)(void *)a->text.data; /* malloc aligns it */
    code = lib(a, rf_session_embed(a->s, &desc, v, &a->err));
    for (uint32_t i = 0; !code && i < n; i++)
        printf(isfinite(v[i]) ? "%s%.9g" : "%snull", i ? ", " : "[", (double)v[i]); /* JSON has no other numbers */
    if (!code) puts("]");
    return code;
}

/* A vector of the prompt; with --rank the scores of each of its lines, a document, for a query. */
static int run_embed(app *a) {
    int code;
    if ((code = read_prompt(a))) return code;
    if ((code = open_model(a, a->o.device))) return code;
    if ((code = lib(a, rf_model_get_tokenizer(a->m, &a->t, &a->err)))) return code;
    uint32_t tokenize = (a->o.bos ? RF_TOKENIZE_ADD : 0) | (a->o.special ? RF_TOKENIZE_SPECIAL : 0);
    const char *line = a->message.data, *end = line + a->message.len;
    if (!a->o.rank && (code = encode(a, line, a->message.len, tokenize, &a->prompt))) return code;
    if (!a->o.rank && (code = print_vector(a, (uint32_t)a->o.pooling))) return code;
    while (a->o.rank && line < end) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        if ((code = encode_pair(a, (rf_string){line, (size_t)(stop - line)}))) return code;
        if ((code = print_vector(a, RF_POOL_RANK))) return code;
        if ((code = lib(a, rf_session_close(a->s, &a->err)))) return code;
        a->s = NULL;
        line = stop + 1;
    }
    print_notes(a);
    return DONE;
}

/* ---- bench ---- */

#define REPEAT_MAX 100

static int by_value(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double median(double *v, size_t n) {
    qsort(v, n, sizeof *v, by_value);
    return (v[(n - 1) / 2] + v[n / 2]) / 2;
}

#define DEPTHS_MAX 64u
#define PEAK_MIN_SECONDS 0.25 /* of reading, at least */

/* Seconds to read the whole buffer n times in a row. */
static int time_reading(app *a, rf_queue *q, const rf_mem *buffer, const rf_mem *sum, uint32_t n, double *seconds) {
    int code;
    rf_dev *dev;
    const rf_device_api *api = rf_device_get_api(a->d, &dev);
    rf_ticket ticket = {NULL, 0};
    double t = now();
    for (uint32_t i = 0; i < n; i++)
        if ((code = lib(a, api->mem_sum(q, (rf_mem_at){buffer, 0}, buffer->size_bytes, (rf_mem_at){sum, 0}, &ticket,
                           &a->err))))
            return code;
    if ((code = lib(a, api->ticket_wait(&ticket, 60000, &a->err)))) return code;
    *seconds = now() - t;
    return interrupted ? fail(a, INTERRUPTED, "interrupted") : DONE;
}

/* Memory bandwidth of the device, bytes per second: the best of several rounds of at least 10 ms. The sum of what was
 * read is compared with what was written, so that the read cannot be optimized away. */
static int read_peak(app *a, rf_queue *q, const rf_mem *buffer, const rf_mem *sum, double *peak) {
    int code;
    rf_dev *dev;
    const rf_device_api *api = rf_device_get_api(a->d, &dev);
    rf_ticket ticket = {NULL, 0};
    uint64_t n_read = 1, want, found = 0;
    uint32_t n = 1;
    double seconds;
    if ((code = lib(a, api->mem_fill(q, buffer, 0, 1, buffer->size_bytes, &ticket, &a->err)))) return code;
    if ((code = lib(a, api->mem_fill(q, sum, 0, 0, sum->size_bytes, &ticket, &a->err)))) return code;
    if ((code = time_reading(a, q, buffer, sum, 1, &seconds))) return code; /* the first one warms up */
    double start = now();
    for (int round = 0; round < 3 || now() - start < PEAK_MIN_SECONDS; round++, n_read += n) {
        if (round && seconds < 0.01 && n < 1024) n *= 2;
        if ((code = time_reading(a, q, buffer, sum, n, &seconds))) return code;
        *peak = fmax(*peak, rate((double)n * (double)buffer->size_bytes, seconds));
    }
    if ((code = lib(a, api->mem_read(q, sum, 0, &found, sizeof found, &ticket, &a->err)))) return code;
    if ((code = lib(a, api->ticket_wait(&ticket, 60000, &a->err)))) return code;
    want = n_read * (buffer->size_bytes / 8) * 0x0101010101010101u;
    if (found != want)
        return fail(a, FAILED, "the device has read %016llx, want %016llx", LLU(found), LLU(want));
    return DONE;
}

/* Measure it in a buffer of --peak bytes, or of a quarter of the free memory. 0: nothing was measured. */
static int measure_peak(app *a, double *peak) {
    rf_dev *dev;
    const rf_device_api *api = rf_device_get_api(a->d, &dev);
    uint64_t size = rf_device_get_info(a->d).free_bytes / 4;
    rf_mem buffer = {NULL, 0}, sum = {NULL, 0};
    rf_queue *q = NULL;
    *peak = 0;
    if (size > a->o.peak) size = a->o.peak;
    size -= size % 256;
    if (size == 0 || strcmp(api->name, "null") == 0) return DONE;
    int code = lib(a, api->queue_create(dev, &q, &a->err));
    if (code == DONE) code = lib(a, api->mem_create(dev, size, &buffer, &a->err));
    if (code == DONE) code = lib(a, api->mem_create(dev, 256, &sum, &a->err));
    if (code == DONE) code = read_peak(a, q, &buffer, &sum, peak);
    if (q) api->queue_release(q);
    if (buffer.base) api->mem_release(dev, &buffer);
    if (sum.base) api->mem_release(dev, &sum);
    return code;
}

/* Sum of the positions that the tokens at [first, first + n) attend to; window 0: all up to their own. */
static double cells_seen(double first, double n, double window) {
    double all = window > 0 ? fmin(fmax(window - first, 0), n) : n;
    return all * first + all * (all + 1) / 2 + (n - all) * window;
}

/* Floating-point operations of matrix products and attention for n tokens at [first, first + n), of which the last one
 * asks for logits. */
static double prompt_flop(const rf_plan *plan, double first, double n) {
    double total = 0;
    for (uint32_t i = 0; i < plan->n_ops && n > 0; i++) {
        const rf_op *op = &plan->ops[i];
        const rf_experts_params *e = &op->experts;
        const rf_attention_params *t = &op->attention;
        double rows = op->rows == RF_ROWS_LOGITS ? 1 : n;
        if (op->kind == RF_OP_MATMUL) total += 2.0 * op->matmul.n_in * op->matmul.n_out * rows;
        if (op->kind == RF_OP_EXPERTS) total += 2.0 * e->n_in * e->n_out * e->n_used * rows;
        if (op->kind == RF_OP_HEADS) total += 2.0 * op->heads.n_in * op->heads.n_out * op->heads.n_heads * rows;
        if (op->kind == RF_OP_ATTENTION)
            total += 2.0 * t->n_heads * (t->head_dim + t->head_dim_v) * cells_seen(first, n, t->window);
    }
    return total;
}

/* Bytes that one of n tokens at [first, first + n) reads on average: weights (of experts those used), KV cache and
 * recurrent states. */
static double decode_bytes(const app *a, double first, double n) {
    const rf_plan *plan = rf_model_get_plan(a->m);
    double total = (double)a->info.token_bytes;
    for (uint32_t i = 0; i < plan->n_ops && n > 0; i++) {
        const rf_op *op = &plan->ops[i];
        if (op->kind != RF_OP_ATTENTION && op->kind != RF_OP_CONV && op->kind != RF_OP_DELTA) continue;
        const rf_plan_state *s = &plan->states[op->state];
        uint64_t cell = rf_cache_row_bytes((uint32_t)a->o.kv, s->head_dim) +
                        rf_cache_row_bytes((uint32_t)a->o.kv, s->head_dim_v);
        if (s->width) total += 4.0 * s->width;
        else total += cells_seen(first, n, op->attention.window) / n * s->n_kv_heads * (double)cell;
    }
    return total;
}

/* Expert stats summed over layers, since the model was opened. */
static rf_expert_stats expert_stats(const app *a) {
    rf_expert_stats sum = {0};
    for (uint32_t layer = 0; layer < a->info.n_layers; layer++) {
        rf_expert_stats x = rf_model_get_expert_stats(a->m, layer);
        sum.hits += x.hits;
        sum.misses += x.misses;
        sum.bytes += x.bytes;
        sum.prefetched += x.prefetched;
        sum.on_cpu += x.on_cpu;
        sum.round_trips += x.round_trips;
    }
    return sum;
}

/* Results at one depth. */
typedef struct bench_row {
    uint32_t depth;
    double prompt_s[REPEAT_MAX], decode_s[REPEAT_MAX];
    rf_session_stats device; /* of all decoded tokens */
    rf_expert_stats experts;
} bench_row;

/* Make the session hold the first `depth` tokens: cut off what it has beyond, evaluate what is missing. */
static int bench_fill(app *a, uint32_t depth) {
    int code;
    uint32_t kept = 0;
    if ((code = lib(a, rf_session_truncate(a->s, 0, depth, &kept, &a->err)))) return code;
    return kept < depth ? lib(a, forward(a, a->prompt.data + kept, depth - kept)) : DONE;
}

/* Decode n tokens behind those that the session holds: a greedy text that begins with ids[0], and goes on behind its
 * end tokens. Without a vocabulary there is no text: the tokens are ids. */
static int bench_decode(app *a, const int32_t *ids, uint32_t n) {
    int code = DONE;
    const rf_tokenizer *t;
    const int text = rf_model_get_tokenizer(a->m, &t, NULL) == RF_OK;
    for (uint32_t i = 0; !text && i < n; i++) if ((code = lib(a, forward(a, ids + i, 1)))) return code;
    for (uint32_t left = text ? n : 0; left;) {
        const rf_generate_desc desc = {.ids = ids, .n_ids = 1, .append = 1, .max_tokens = left};
        rf_generate_result result;
        if ((code = lib(a, rf_generate(a->s, &desc, &result, &a->err)))) return code;
        if (result.finish == RF_FINISH_CANCELLED) return fail(a, INTERRUPTED, "interrupted");
        left -= result.n_generated;
        ids++;
    }
    return code;
}

/* After the row's depth: the prompt at once, then n_decode tokens one by one. Run -1 does not count. */
static int bench_once(app *a, int run, bench_row *row) {
    int code;
    uint32_t n_prompt = (uint32_t)a->o.n_prompt, n_decode = (uint32_t)a->o.n_decode;
    const int32_t *next = a->prompt.data + row->depth;
    if ((code = bench_fill(a, row->depth))) return code;
    double t = now();
    if (n_prompt && (code = lib(a, forward(a, next, n_prompt)))) return code;
    double prompt_s = now() - t;
    rf_session_stats device = rf_session_get_stats(a->s);
    rf_expert_stats x = expert_stats(a);
    t = now();
    if (n_decode && (code = bench_decode(a, next + n_prompt, n_decode))) return code;
    double decode_s = now() - t;
    if (run < 0) return DONE;
    row->prompt_s[run] = prompt_s;
    row->decode_s[run] = decode_s;
    rf_session_stats device_now = rf_session_get_stats(a->s);
    row->device.launches += device_now.launches - device.launches;
    row->device.submissions += device_now.submissions - device.submissions;
    rf_expert_stats after = expert_stats(a);
    row->experts.hits += after.hits - x.hits;
    row->experts.misses += after.misses - x.misses;
    row->experts.bytes += after.bytes - x.bytes;
    row->experts.prefetched += after.prefetched - x.prefetched;
    row->experts.on_cpu += after.on_cpu - x.on_cpu;
    row->experts.round_trips += after.round_trips - x.round_trips;
    return DONE;
}

typedef struct bench_value {
    const char *name;
    int digits; /* -1: it does not apply */
    double value;
} bench_value;

#define BENCH_COLUMNS 16

/* The numbers of a row; returns how many. */
static size_t bench_values(app *a, bench_row *row, double peak, bench_value *out) {
    const options *o = &a->o;
    const rf_expert_stats *x = &row->experts;
    double n_prompt = (double)o->n_prompt, n = (double)o->n_decode, all = fmax(1, n * (double)o->n_repeat);
    double prompt_s = median(row->prompt_s, o->n_repeat), decode_s = median(row->decode_s, o->n_repeat);
    double bytes = decode_bytes(a, row->depth + n_prompt, n), speed = rate(n * bytes, decode_s);
    int is_gpu = (int)rf_device_get_info(a->d).is_gpu, has_prompt = n_prompt > 0, decodes = n > 0;
    const bench_value values[BENCH_COLUMNS] = {
        {"depth", 0, row->depth},
        {"prompt_tok_s", has_prompt ? 2 : -1, rate(n_prompt, prompt_s)},
        {"prompt_tflop_s", has_prompt ? 4 : -1,
         rate(prompt_flop(rf_model_get_plan(a->m), row->depth, n_prompt), prompt_s) / 1e12},
        {"decode_tok_s", decodes ? 2 : -1, rate(n, decode_s)},
        {"decode_ms", decodes ? 4 : -1, decode_s / fmax(1, n) * 1e3},
        {"decode_bytes", decodes ? 0 : -1, bytes},
        {"decode_gb_s", decodes ? 3 : -1, speed / 1e9},
        {"peak_percent", decodes && peak > 0 ? 1 : -1, 100 * rate(speed, peak)},
        {"launches", decodes && is_gpu ? 1 : -1, (double)row->device.launches / all},
        {"submissions", decodes && is_gpu ? 1 : -1, (double)row->device.submissions / all},
        {"expert_hits", decodes ? 2 : -1, (double)x->hits / all},
        {"expert_misses", decodes ? 2 : -1, (double)x->misses / all},
        {"expert_mb", decodes ? 3 : -1, (double)x->bytes / all / 1e6},
        {"expert_ahead", decodes ? 2 : -1, (double)x->prefetched / all},
        {"expert_on_cpu", decodes ? 2 : -1, (double)x->on_cpu / all},
        {"round_trips", decodes ? 2 : -1, (double)x->round_trips / all}};
    memcpy(out, values, sizeof values);
    const rf_expert_stats ever = expert_stats(a);
    return ever.hits + ever.misses + ever.on_cpu ? BENCH_COLUMNS : BENCH_COLUMNS - 6;
}

/* The launch configs that a GPU tried for decode steps, and which it took. */
static void print_launch_configs(const app *a) {
    const rf_session_stats s = rf_session_get_stats(a->s);
    if (a->o.json) {
        fputs("\"launch_configs\": [", stdout);
        for (uint32_t i = 0; i < s.n_configs; i++)
            printf("%s{\"in_flight\": %u, \"blocks_per_cu\": %u, \"us\": %.1f}", i ? ", " : "", s.configs[i].in_flight,
                   s.configs[i].blocks_per_cu, s.configs[i].us);
        if (s.config_is_timed) printf("], \"launch_config\": %u, ", s.config);
        else fputs("], \"launch_config\": null, ", stdout);
        return;
    }
    if (s.n_configs == 0) return;
    const rf_launch_config *used = &s.configs[s.config];
    printf("%-14sin flight %u, blocks per CU %u (", "launch_config", used->in_flight, used->blocks_per_cu);
    for (uint32_t i = 0; i < s.n_configs && s.config_is_timed; i++)
        printf("%s%u, %u: %.1f us", i ? "; " : "", s.configs[i].in_flight, s.configs[i].blocks_per_cu, s.configs[i].us);
    puts(s.config_is_timed ? ")" : "not timed)");
}

/* Print a header of names and values, then a line for each depth. */
static void print_bench(app *a, double load_s, double peak, bench_row *rows, uint32_t n_rows) {
    const options *o = &a->o;
    rf_device_info d = rf_device_get_info(a->d);
    bench_value row[BENCH_COLUMNS];
    const struct { const char *name, *text; } texts[] = {
        {"version", rf_version()}, {"file", o->gguf}, {"arch", a->info.arch}, {"device", d.name},
        {"device_text", d.text}, {"device_arch", d.arch}, {"device_note", d.note}};
    const bench_value numbers[] = {
        {"weight_bytes", 0, (double)a->info.weight_bytes}, {"token_bytes", 0, (double)a->info.token_bytes},
        {"open_ms", 3, a->open_s * 1e3}, {"plan_ms", 3, a->plan_s * 1e3}, {"load_ms", 3, load_s * 1e3},
        {"peak_gb_s", peak > 0 ? 3 : -1, peak / 1e9}, {"n_ctx", 0, a->n_ctx}, {"n_ctx_train", 0, a->info.n_ctx_train},
        {"n_repeat", 0, (double)o->n_repeat}, {"n_prompt", 0, (double)o->n_prompt},
        {"n_decode", 0, (double)o->n_decode}};
    if (o->json) putchar('{');
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        printf(o->json ? "\"%s\": " : "%-14s", texts[i].name);
        put_json(stdout, texts[i].text, strlen(texts[i].text));
        fputs(o->json ? ", " : "\n", stdout);
    }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        printf(o->json ? "\"%s\": " : "%-14s", numbers[i].name);
        if (numbers[i].digits < 0) fputs(o->json ? "null" : "not measured", stdout);
        else printf("%.*f", numbers[i].digits, numbers[i].value);
        fputs(o->json ? ", " : "\n", stdout);
    }
    print_launch_configs(a);
    if (o->json) fputs("\"results\": [", stdout);
    for (uint32_t k = 0; k < n_rows; k++) {
        size_t n = bench_values(a, &rows[k], peak, row);
        for (size_t i = 0; i < n && k == 0 && !o->json; i++)
            printf("%s%*s%s", i ? "" : "\n", i ? 2 : 0, "", row[i].name);
        fputs(o->json ? k ? ", {" : "{" : "\n", stdout);
        for (size_t i = 0; i < n; i++) {
            int width = o->json ? 0 : (int)strlen(row[i].name);
            if (o->json) printf("%s\"%s\": ", i ? ", " : "", row[i].name);
            else if (i) fputs("  ", stdout);
            if (row[i].digits < 0) printf("%*s", width, o->json ? "null" : "-");
            else printf("%*.*f", width, row[i].digits, row[i].value);
        }
        if (o->json) putchar('}');
    }
    puts(o->json ? "]}" : "");
}

/* Parse -d, or without one `depths`, at most `max` numbers, into a->tokens; *deepest is the largest. */
static int parse_depths(app *a, const char *depths, uint32_t max, uint32_t *deepest) {
    int code;
    const ids *v = &a->tokens;
    int good;
    if (a->o.depths) depths = a->o.depths;
    if ((code = parse_ids(a, depths, &a->tokens, &good))) return code;
    *deepest = 0;
    for (uint32_t i = 0; i < v->len; i++)
        if ((uint32_t)v->data[i] > *deepest) *deepest = (uint32_t)v->data[i];
    if (good && v->len > 0 && v->len <= max && *deepest <= 1 << 24) return DONE;
    return fail(a, USAGE, "-d: want at most %u depth%s up to %u, like %s, got \"%s\"", max, max == 1 ? "" : "s",
                1u << 24, max == 1 ? "4096" : "0,4096,16384", depths);
}

/* Decode tokens that do not count until a GPU has timed its launch configs, or eight of them changed nothing. */
static int time_launch_configs(app *a) {
    int code;
    rf_session_stats s = rf_session_get_stats(a->s);
    for (int idle = 0; a->o.n_decode && s.n_configs && !s.config_is_timed && idle < 8;) {
        const rf_session_stats before = s;
        if ((code = bench_fill(a, 0))) return code;
        if ((code = lib(a, forward(a, a->prompt.data, 1)))) return code;
        s = rf_session_get_stats(a->s);
        idle = s.config == before.config && memcmp(s.configs, before.configs, sizeof s.configs) == 0 ? idle + 1 : 0;
    }
    return DONE;
}

static int measure_bench(app *a, bench_row *rows) {
    int code;
    uint32_t deepest, n_rows = 0;
    double peak;
    uint64_t n = a->o.n_prompt + a->o.n_decode;
    if ((code = parse_depths(a, "0", DEPTHS_MAX, &deepest))) return code;
    n += deepest;
    if ((code = open_model(a, a->o.device))) return code;
    catch_interrupt(NULL); /* before there is a session */
    if ((code = measure_peak(a, &peak))) return code;
    if (a->o.ctx == 0) a->o.ctx = n; /* no more than needed: attention may cost what the context could hold */
    if ((code = open_session(a, n, n, 1))) return code;
    if ((code = reserve_ids(a, &a->prompt, n))) return code;
    for (; a->prompt.len < n; a->prompt.len++)
        a->prompt.data[a->prompt.len] = (int32_t)((a->prompt.len * 7919u + 1u) % a->info.n_vocab);
    double t = now();
    if ((code = lib(a, forward(a, a->prompt.data, 1)))) return code;
    double load_s = now() - t;
    if ((code = time_launch_configs(a))) return code;
    for (; n_rows < a->tokens.len; n_rows++) {
        rows[n_rows].depth = (uint32_t)a->tokens.data[n_rows];
        for (int i = -1; i < (int)a->o.n_repeat; i++) if ((code = bench_once(a, i, &rows[n_rows]))) return code;
    }
    print_notes(a);
    print_bench(a, load_s, peak, rows, n_rows);
    return DONE;
}

/* ---- bench --parallel ---- */

#define PARALLEL_MAX 1024u /* sequences */

/* Evaluate the first `depth` tokens once and copy them to n sequences; `n` itself keeps them. */
static int fill_sequences(app *a, uint32_t n, uint32_t depth) {
    int code;
    uint32_t i = rf_session_length(a->s, (int32_t)n);
    while (i < depth) {
        rf_token_row rows[256] = {{0}};
        uint32_t n_rows = 0;
        for (; n_rows < 256 && i < depth; n_rows++, i++)
            rows[n_rows] = (rf_token_row){.token = (int32_t)((i * 7919u + 1u) % a->info.n_vocab), .seq = (int32_t)n,
                                          .pos = RF_POS_NEXT};
        if ((code = lib(a, rf_session_eval(a->s, rows, n_rows, &a->err)))) return code;
    }
    for (uint32_t seq = 0; seq < n; seq++)
        if ((code = lib(a, rf_session_copy(a->s, (int32_t)n, (int32_t)seq, &a->err)))) return code;
    return DONE;
}

/* Milliseconds of a step of one token of each of n sequences, all with logits: the median of the runs. */
static int time_parallel(app *a, uint32_t n, uint32_t depth, double *ms) {
    int code;
    double seconds[REPEAT_MAX];
    rf_token_row rows[PARALLEL_MAX];
    rf_session_desc desc = session_desc(a, depth + a->o.n_decode, n);
    desc.n_seq_max = n + 1;
    if ((code = lib(a, rf_session_open(a->m, &desc, &a->s, &a->err)))) return code;
    catch_interrupt(a->s);
    for (int run = -1; run < (int)a->o.n_repeat; run++) { /* the first one does not count */
        if ((code = fill_sequences(a, n, depth))) return code;
        int32_t last;
        const double t = now();
        for (uint32_t k = 0; k < a->o.n_decode; k++) {
            for (uint32_t i = 0; i < n; i++)
                rows[i] = (rf_token_row){.token = (int32_t)((k * 77u + i * 1013u + 3u) % a->info.n_vocab),
                                         .seq = (int32_t)i, .pos = RF_POS_NEXT, .want_logits = 1};
            if ((code = lib(a, rf_session_eval(a->s, rows, n, &a->err)))) return code;
            if ((code = lib(a, rf_session_get_argmax(a->s, n - 1, &last, &a->err)))) return code;
        }
        if (run >= 0) seconds[run] = now() - t;
    }
    *ms = median(seconds, a->o.n_repeat) / (double)a->o.n_decode * 1e3;
    catch_interrupt(NULL);
    code = lib(a, rf_session_close(a->s, &a->err));
    a->s = NULL;
    return code;
}

static int run_parallel(app *a) {
    int code, good;
    uint32_t depth;
    ids *v = &a->tokens;
    if ((code = parse_depths(a, "256", 1, &depth))) return code;
    if ((code = parse_ids(a, a->o.parallel, v, &good))) return code;
    for (uint32_t i = 0; i < v->len; i++) good = good && v->data[i] > 0 && (uint32_t)v->data[i] <= PARALLEL_MAX;
    if (!good || v->len == 0 || v->len > DEPTHS_MAX || a->o.n_decode == 0)
        return fail(a, USAGE, "--parallel: want at most %u numbers of sequences, 1 to %u, like 1,2,4, and -n above 0, "
                    "got \"%s\"", DEPTHS_MAX, PARALLEL_MAX, a->o.parallel);
    if ((code = open_model(a, a->o.device))) return code;
    const uint64_t length = (uint64_t)depth + a->o.n_decode;
    if (a->o.ctx == 0) a->o.ctx = length;
    a->n_ctx = (uint32_t)a->o.ctx;
    if (length > a->n_ctx) return too_long(a, length);
    if (a->o.json) fputs("{\"results\": [", stdout);
    else puts("sequences  step_ms  sequence_tok_s  all_tok_s");
    for (uint32_t i = 0; i < v->len; i++) {
        const uint32_t n = (uint32_t)v->data[i];
        double ms;
        if ((code = time_parallel(a, n, depth, &ms))) return code;
        printf(a->o.json ? "%s{\"sequences\": %u, \"step_ms\": %.4f, \"sequence_tok_s\": %.2f, \"all_tok_s\": %.2f}"
                         : "%s%9u  %7.4f  %14.2f  %9.2f\n",
               a->o.json && i ? ", " : "", n, ms, rate(1e3, ms), rate(1e3 * n, ms));
        fflush(stdout);
    }
    if (a->o.json) puts("]}");
    return DONE;
}

/* ---- bench --draft ---- */

/* A drafter that knows the answer in some percent of its drafts, unless the MTP head drafts. */
typedef struct oracle {
    const ids *answer;
    uint32_t n_prompt, n_vocab, percent, random;
} oracle;

static uint32_t foresee(const int32_t *tokens, uint32_t n_tokens, int32_t *drafts, uint32_t max, void *user) {
    oracle *o = user;
    (void)tokens;
    for (uint32_t i = 0; i < max; i++) {
        const uint32_t at = n_tokens - o->n_prompt + i;
        if (at >= o->answer->len) return i;
        o->random = o->random * 1664525u + 1013904223u;
        const uint32_t right = (uint32_t)o->answer->data[at];
        drafts[i] = (int32_t)((o->random >> 16) % 100 < o->percent ? right : (right + 1) % o->n_vocab);
    }
    return max;
}

/* What a generation chose, and when its first token came. */
typedef struct drafted {
    ids chosen; /* of n_decode */
    double first;
} drafted;

static int on_drafted_token(int32_t token, void *user) {
    drafted *g = user;
    if (g->chosen.len == 0) g->first = now();
    g->chosen.data[g->chosen.len++] = token;
    return interrupted;
}

/* Tokens a second of a greedy generation behind the prompt. */
static int time_drafts(app *a, rf_drafter *drafter, drafted *g, double *tok_s) {
    int code;
    const rf_generate_desc desc = {.ids = a->prompt.data, .n_ids = a->prompt.len, .drafter = drafter,
                                   .max_tokens = (uint32_t)a->o.n_decode, .on_token = on_drafted_token, .user = g};
    g->chosen.len = 0;
    if ((code = lib(a, rf_session_truncate(a->s, 0, 0, NULL, &a->err)))) return code;
    if ((code = lib(a, rf_generate(a->s, &desc, NULL, &a->err)))) return code;
    *tok_s = rate(g->chosen.len - 1.0, now() - g->first);
    return interrupted ? fail(a, INTERRUPTED, "interrupted") : DONE;
}

/* A line: n drafts a step (0: as many as pay), the oracle right as often as it says; or those of the MTP heads, if
 * their sessions are open. The drafter learns across the runs, whose ids are those without drafts, or the line says
 * so. */
static int bench_drafts(app *a, oracle *o, uint32_t n, double plain, drafted *g) {
    int code = DONE;
    double tok_s[REPEAT_MAX];
    int same = 1;
    rf_drafter_desc desc = {.max_drafts = n ? n : (uint32_t)a->o.draft_max, .fixed = n > 0, .ngram = RF_NONE,
                            .fn = a->draft_s[0] ? NULL : foresee, .user = o};
    memcpy(desc.mtp, a->draft_s, sizeof desc.mtp);
    if ((code = lib(a, rf_drafter_open(a->m, &desc, &a->drafter, &a->err)))) return code;
    for (int run = -1; run < (int)a->o.n_repeat && !code; run++) { /* the first one does not count */
        code = time_drafts(a, a->drafter, g, &tok_s[run < 0 ? 0 : run]);
        same = same && g->chosen.len == o->answer->len &&
               !memcmp(g->chosen.data, o->answer->data, g->chosen.len * sizeof *g->chosen.data);
    }
    const rf_drafter_stats x = rf_drafter_get_stats(a->drafter);
    rf_drafter_close(a->drafter, NULL);
    a->drafter = NULL;
    if (code) return code;
    const double speed = median(tok_s, a->o.n_repeat);
    char drafts[16] = "adaptive", right[16];
    if (n) snprintf(drafts, sizeof drafts, "%u", n);
    snprintf(right, sizeof right, a->o.json ? "\"mtp\"" : "mtp");
    if (!a->draft_s[0]) snprintf(right, sizeof right, "%u", o->percent);
    printf(a->o.json ? ", {\"right_percent\": %s, \"drafts\": \"%s\", \"drafted\": %llu, \"accepted\": %llu, "
                       "\"tok_s\": %.2f, \"gain\": %.3f, \"same_ids\": %s}"
                     : "%13s  %8s  %8llu  %8llu  %8.2f  %5.3f  %s\n",
           right, drafts, LLU(x.drafted), LLU(x.accepted), speed, rate(speed, plain),
           same ? a->o.json ? "true" : "yes" : a->o.json ? "false" : "no");
    fflush(stdout);
    return DONE;
}

/* The percents of --draft; *mtp: "mtp" stands behind them, or alone. */
static int parse_shares(app *a, ids *shares, int *mtp) {
    int code, good = 1;
    char percents[256] = "";
    const char *list = a->o.shares;
    size_t n = strlen(list);
    shares->len = 0;
    *mtp = n >= 3 && !strcmp(list + n - 3, "mtp") && (n == 3 || list[n - 4] == ',');
    if (*mtp) n -= n > 3 ? 4 : 3;
    snprintf(percents, sizeof percents, "%.*s", n < sizeof percents ? (int)n : 0, list);
    if (!(*mtp && n == 0) && (code = parse_ids(a, percents, shares, &good))) return code;
    for (uint32_t i = 0; i < shares->len; i++) good = good && shares->data[i] >= 0 && shares->data[i] <= 100;
    if (!good || a->o.n_decode < 2)
        return fail(a, USAGE, "--draft: want percents of right drafts and mtp, like 0,50,75 or 75,mtp, and -n above 1, "
                    "got \"%s\"", list);
    return DONE;
}

/* Lines for each number of drafts. */
static int bench_numbers(app *a, const ids *answer, uint32_t percent, double plain, drafted *g) {
    static const uint32_t numbers[] = {1, 2, 4, 8, 15, 0};
    int code = DONE;
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers && !code; k++) {
        oracle o = {answer, a->prompt.len, a->info.n_vocab, percent, 1};
        if (numbers[k] <= a->o.draft_max) code = bench_drafts(a, &o, numbers[k], plain, g);
    }
    return code;
}

static int measure_drafts(app *a, ids *answer, drafted *g) {
    int code, mtp;
    uint32_t depth;
    ids *shares = &a->tokens;
    double plain[REPEAT_MAX], tok_s;
    const uint32_t n_logits = (uint32_t)a->o.draft_max + 1;
    if ((code = parse_depths(a, "256", 1, &depth))) return code;
    if (depth == 0) return fail(a, USAGE, "--draft: want -d above 0");
    const uint64_t n = depth + a->o.n_decode;
    if ((code = parse_shares(a, shares, &mtp))) return code;
    if ((code = open_model(a, a->o.device))) return code;
    if (mtp && (code = open_draft_model(a, NULL))) return code; /* before all that takes time */
    if (a->o.ctx == 0) a->o.ctx = n;
    if ((code = open_session(a, n, n, n_logits))) return code;
    if ((code = reserve_ids(a, &a->prompt, depth))) return code;
    if ((code = reserve_ids(a, answer, n)) || (code = reserve_ids(a, &g->chosen, n))) return code;
    for (; a->prompt.len < depth; a->prompt.len++)
        a->prompt.data[a->prompt.len] = (int32_t)((a->prompt.len * 7919u + 1u) % a->info.n_vocab);
    for (int run = -1; run < (int)a->o.n_repeat; run++)
        if ((code = time_drafts(a, NULL, g, &plain[run < 0 ? 0 : run]))) return code;
    memcpy(answer->data, g->chosen.data, g->chosen.len * sizeof *answer->data);
    answer->len = g->chosen.len;
    tok_s = median(plain, a->o.n_repeat);
    printf(a->o.json ? "{\"results\": [{\"drafts\": \"none\", \"tok_s\": %.2f}"
                     : "right_percent    drafts   drafted  accepted     tok_s   gain  same_ids\n"
                       "            -      none         -         -  %8.2f      -  -\n", tok_s);
    for (uint32_t i = 0; i < shares->len; i++)
        if ((code = bench_numbers(a, answer, (uint32_t)shares->data[i], tok_s, g))) return code;
    if (mtp) {
        running = NULL;
        rf_session_close(a->s, NULL);
        a->s = NULL;
        a->o.draft = "mtp"; /* a session whose hidden rows come to the host */
        if ((code = open_session(a, n, n, n_logits)) || (code = open_draft_sessions(a))) return code;
        if ((code = bench_numbers(a, answer, 0, tok_s, g))) return code;
    }
    if (a->o.json) puts("]}");
    return DONE;
}

static int run_drafts(app *a) {
    ids answer = {0};
    drafted g = {0};
    const int code = measure_drafts(a, &answer, &g);
    free(answer.data);
    free(g.chosen.data);
    return code;
}

static int run_bench(app *a) {
    if (a->o.parallel) return run_parallel(a);
    if (a->o.shares) return run_drafts(a);
    if (a->o.n_prompt + a->o.n_decode == 0) return fail(a, USAGE, "-p and -n are both 0");
    bench_row *rows = calloc(DEPTHS_MAX, sizeof *rows);
    if (!rows) return no_memory(a);
    int code = measure_bench(a, rows);
    free(rows);
    return code;
}

/* ---- inspect ---- */

#define TEXT_SHOWN 160u /* bytes of a string, without --json */
#define ITEMS_SHOWN 8u  /* elements of an array              */

static void print_element(const rf_kv *kv, uint64_t i, uint64_t *cursor, int json) {
    rf_string s = {0};
    double real = NAN;
    int64_t value = 0;
    uint64_t bits = 0;
    switch (kv->element_type) {
    case RF_KV_STRING:
        rf_kv_text(kv, kv->type == RF_KV_ARRAY ? cursor : NULL, &s, NULL);
        put_json(stdout, s.data, json || s.len < TEXT_SHOWN ? s.len : TEXT_SHOWN);
        if (!json && s.len > TEXT_SHOWN) printf("... (%llu bytes)", LLU(s.len));
        break;
    case RF_KV_F32:
    case RF_KV_F64:
        rf_kv_real(kv, i, &real, NULL);
        if (json && !isfinite(real)) printf("null"); /* JSON has no such numbers */
        else printf("%.*g", kv->element_type == RF_KV_F32 ? 9 : 17, real);
        break;
    case RF_KV_U64: /* may exceed what rf_kv_int can say */
        memcpy(&bits, (const char *)kv->data + 8 * i, sizeof bits);
        printf("%llu", LLU(bits));
        break;
    default:
        if (rf_kv_int(kv, i, &value, NULL)) printf("null");
        else if (kv->element_type == RF_KV_BOOL) printf("%s", value ? "true" : "false");
        else printf("%lld", (long long)value);
    }
}

static void print_kv(const rf_kv *kv, int json) {
    static const char *const types[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    uint64_t cursor = 0, shown = kv->count < ITEMS_SHOWN ? kv->count : ITEMS_SHOWN;
    const char *type = kv->element_type < sizeof types / sizeof *types ? types[kv->element_type] : "?";
    int array = kv->type == RF_KV_ARRAY;
    if (json) printf("{\"key\": "), put_json(stdout, kv->key.data, kv->key.len);
    else put_escaped(stdout, kv->key.data, kv->key.len);
    printf(json ? ", \"type\": \"%s\"" : "  %s", type);
    if (array) printf(json ? ", \"count\": %llu" : "[%llu]", LLU(kv->count));
    printf(json ? ", \"value\": " : "  ");
    if (array) putchar('[');
    for (uint64_t i = 0; i < shown; i++) {
        if (i) printf(", ");
        print_element(kv, i, &cursor, json);
    }
    if (array) printf(!json && shown < kv->count ? ", ...]" : "]");
    puts(json ? "}" : "");
}

static void print_tensor(const rf_tensor_info *t, int json) {
    if (json) printf("{\"name\": "), put_json(stdout, t->name.data, t->name.len);
    else put_escaped(stdout, t->name.data, t->name.len);
    printf(json ? ", \"type\": \"%s\", \"ne\": [" : "  %s  ne={", rf_type_get(t->type).name);
    for (uint32_t i = 0; i < t->n_dims; i++) printf("%s%llu", i ? ", " : "", LLU(t->ne[i]));
    printf(json ? "], \"bytes\": %llu, \"file\": %u, \"offset\": %llu}\n" : "}  %llu bytes in file %u at %llu\n",
           LLU(t->size_bytes), t->file_index, LLU(t->offset_bytes));
}

static rf_string text_of(const char *s) { return (rf_string){s, s ? strlen(s) : 0}; }

static void print_fact(const char *name, rf_string text, int json) {
    printf(json ? ", \"%s\": " : "%-20s", name);
    if (json && text.len) put_json(stdout, text.data, text.len);
    else if (json) printf("null");
    else if (text.len) put_escaped(stdout, text.data, text.len);
    else putchar('-');
    if (!json) putchar('\n');
}

static void print_count(const char *name, uint64_t n, int json) {
    printf(json ? ", \"%s\": %llu" : "%-20s%llu\n", name, LLU(n));
}

/* Tensor types that do not run, with how many tensors have them: "iq2_xs (12), tq1_0 (1)". */
static int unsupported_types(app *a, uint64_t n_tensors) {
    int code;
    uint64_t counts[RF_TYPE_COUNT] = {0};
    rf_tensor_info t;
    a->text.len = 0;
    for (uint64_t i = 0; i < n_tensors; i++)
        if (rf_gguf_get_tensor(a->g, i, &t, NULL) == RF_OK && !rf_type_get(t.type).runs) counts[t.type]++;
    for (uint32_t type = 0; type < RF_TYPE_COUNT; type++) {
        if (!counts[type]) continue;
        if ((code = reserve(a, &a->text, 64))) return code;
        a->text.len += (size_t)snprintf(a->text.data + a->text.len, 64, "%s%s (%llu)", a->text.len ? ", " : "",
                                        rf_type_get(type).name, LLU(counts[type]));
    }
    return DONE;
}

/* Print whether this version can run the file and what memory that takes, or the first reason why not, and what can be
 * said without running it. */
static int print_support(app *a, const rf_gguf_info *f, int json) {
    int code;
    rf_forecast need = {0};
    rf_error err, tokenizer_err;
    rf_kv kv;
    rf_result r = rf_device_open(a->o.device ? a->o.device : "null", NULL, &a->d, &err);
    if (r == RF_OK) r = rf_model_open(a->g, a->d, NULL, &a->m, &err);
    if (r == RF_OK) a->info = rf_model_get_info(a->m);
    rf_session_desc desc = session_desc(a, 0, 1);
    if (r == RF_OK) r = rf_model_forecast(a->m, &desc, &need, &err);
    int runs = r == RF_OK, tokenizes = rf_tokenizer_open(a->g, a->o.pre, &a->own, &tokenizer_err) == RF_OK;
    rf_tokenizer_info t = rf_tokenizer_get_info(a->own);
    rf_string jinja = {0};
    rf_error template_err = {0};
    if (rf_gguf_find_kv(a->g, "tokenizer.chat_template", &kv, NULL) == RF_OK && kv.type == RF_KV_STRING &&
        rf_kv_text(&kv, NULL, &jinja, NULL) == RF_OK)
        rf_chat_template_open(jinja, NULL, &a->own_template, &template_err);
    rf_string arch = {0};
    if (rf_gguf_find_kv(a->g, "general.architecture", &kv, NULL) == RF_OK && kv.type == RF_KV_STRING)
        rf_kv_text(&kv, NULL, &arch, NULL);
    if ((code = unsupported_types(a, f->n_tensors))) return code;
    printf(json ? "],\n\"support\": {\"runs\": %s" : "\nsupported           %s\n",
           json ? (runs ? "true" : "false") : runs ? "yes" : "no");
    print_fact("reason", text_of(runs ? NULL : err.text), json);
    print_fact("architecture", arch, json);
    print_fact("unsupported_types", (rf_string){a->text.data, a->text.len}, json);
    print_fact("tokenizer", text_of(tokenizes ? t.model : NULL), json);
    print_fact("pre_tokenizer", text_of(tokenizes ? t.pre : NULL), json);
    print_fact("tokenizer_error", text_of(tokenizes ? NULL : tokenizer_err.text), json);
    print_fact("template", text_of(a->own_template ? "jinja" : template_err.code ? template_err.text : NULL), json);
    print_count("tensor_bytes", f->data_bytes, json);
    if (runs) {
        print_count("weight_bytes", a->info.weight_bytes, json);
        print_count("session_tokens", desc.n_ctx, json);
        print_count("kv_bytes", need.kv_bytes, json);
        print_count("scratch_bytes", need.scratch_bytes, json);
        if (a->o.device) print_count("plan_bytes", need.plan_bytes, json);
        print_count("host_bytes", need.host_bytes, json);
    }
    if (json) putchar('}');
    return DONE;
}

static int run_inspect(app *a) {
    int code;
    int json = a->o.json != 0;
    if ((code = open_file(a))) return code;
    rf_gguf_info f = rf_gguf_get_info(a->g);
    if (json) printf("{\"path\": "), put_json(stdout, f.path, strlen(f.path));
    else put_escaped(stdout, f.path, strlen(f.path));
    printf(json ? ", \"version\": %u, \"files\": %u, \"alignment\": %u, \"file_bytes\": %llu, \"data_bytes\": %llu,\n"
                  "\"metadata\": [\n"
                : "  GGUF version %u, files %u, alignment %u, %llu bytes, %llu of tensors\n",
           f.version, f.n_files, f.alignment, LLU(f.file_bytes), LLU(f.data_bytes));
    for (uint64_t i = 0; i < f.n_kv; i++) {
        rf_kv kv;
        rf_gguf_get_kv(a->g, i, &kv, NULL);
        if (json && i) putchar(',');
        print_kv(&kv, json);
    }
    if (json) printf("],\n\"tensors\": [\n");
    for (uint64_t i = 0; i < f.n_tensors; i++) {
        rf_tensor_info t;
        rf_gguf_get_tensor(a->g, i, &t, NULL);
        if (json && i) putchar(',');
        print_tensor(&t, json);
    }
    if ((code = print_support(a, &f, json))) return code;
    if (json) puts("}");
    print_notes(a);
    return DONE;
}

/* ---- template ---- */

/* Seconds since 1970 of 2026-11-22T12:34:56, UTC, or of a count of seconds. */
static int read_time(app *a, const char *text, int64_t *out) {
    struct tm t = {0};
    char *end;
    int n = 0;
    *out = strtoll(text, &end, 10);
    if (*text && !*end) return DONE;
    if (sscanf(text, "%d-%d-%dT%d:%d:%d%n", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour, &t.tm_min, &t.tm_sec,
               &n) != 6 || text[n])
        return fail(a, USAGE, "--now: want 2026-11-22T12:34:56 or seconds since 1970, got \"%s\"", text);
    t.tm_year -= 1900;
    t.tm_mon--;
    *out = timegm(&t);
    return DONE;
}

/* Print the model's template; with --input what it, or --jinja's, makes of these variables. */
static int run_template(app *a) {
    int code;
    rf_kv kv;
    rf_string jinja = {0};
    size_t n = 0;
    rf_chat chat = {0};
    if (!a->o.gguf == !a->o.jinja) return fail(a, USAGE, "want either a model or --jinja FILE");
    if (a->o.jinja && !a->o.input) return fail(a, USAGE, "--jinja: want --input FILE.json, too");
    if (a->o.gguf) {
        if ((code = open_file(a))) return code;
        if ((code = lib(a, rf_gguf_find_kv(a->g, "tokenizer.chat_template", &kv, &a->err)))) return code;
        if ((code = lib(a, rf_kv_text(&kv, NULL, &jinja, &a->err)))) return code;
        if (!a->o.input) return fwrite(jinja.data, 1, jinja.len, stdout), putchar('\n'), DONE;
        if ((code = lib(a, rf_chat_template_open(jinja, NULL, &a->own_template, &a->err)))) return code;
    } else if ((code = open_template(a, a->o.jinja))) return code;
    if ((code = read_file(a, a->o.input, &a->text))) return code;
    chat.chat_template = a->own_template;
    chat.extra = a->text.data;
    chat.now = a->today;
    if (a->o.now && (code = read_time(a, a->o.now, &chat.now))) return code;
    rf_result r = rf_chat_format(&chat, NULL, 0, &n, &a->err);
    if (r && r != RF_ERR_CAPACITY) return lib(a, r);
    if ((code = reserve(a, &a->line, n + 1))) return code;
    if ((code = lib(a, rf_chat_format(&chat, a->line.data, n, &n, &a->err)))) return code;
    fwrite(a->line.data, 1, n, stdout);
    return DONE;
}

/* ---- plan ---- */

/* Weight bytes that one row of an op reads: the rows of a matrix that it multiplies or looks up, a vector's values. */
static uint64_t op_bytes(const rf_plan *p, const rf_op *op) {
    const rf_op_spec spec = rf_op_get_spec(p, op);
    const uint32_t first_row = op->kind == RF_OP_MATMUL ? op->matmul.first_row : 0;
    uint64_t n = 0;
    if (op->kind == RF_OP_EMBED) return p->weights[op->weight].size_bytes / p->weights[op->weight].n_rows;
    if (op->kind == RF_OP_EXPERTS) return p->weights[op->weight].size_bytes * op->experts.n_used;
    for (uint32_t k = 0; k < spec.n_weights; k++) {
        const rf_plan_weight *w = &p->weights[spec.weight[k].id];
        const uint64_t rows = spec.weight[k].n_rows - (spec.weight[k].n_rows > first_row ? first_row : 0);
        n += w->size_bytes / (spec.weight[k].n_in ? w->n_rows : (uint64_t)w->n_in * w->n_rows) * rows;
    }
    return n;
}

static void print_buffer(const rf_plan *p, uint32_t i, const char *before) {
    if (i >= p->n_buffers) return;
    const rf_plan_buffer *b = &p->buffers[i];
    printf("%s%s[%c,%u]", before, b->name, b->rows == RF_ROWS_TOKENS ? 'T' : 'L', b->width);
}

/* Parameters of an op that its buffers and weights do not show. */
static void print_params(const rf_op *op) {
    static const char *const activations[RF_ACT_COUNT] = {"silu", "gelu", "oai", "none", "clamp", "sigmoid", "relu",
                                                          "relu2", "softplus", "silu_min", "min_silu", "xielu"};
    const rf_attention_params *t = &op->attention;
    switch (op->kind) {
    case RF_OP_EMBED:
        if (op->flags & RF_OP_POSITIONS) printf(" by position");
        if (op->embed.scale != 0) printf(" x %g", (double)op->embed.scale);
        break;
    case RF_OP_RMS_NORM:
        if (op->norm.n_groups > 1) printf(" groups %u", op->norm.n_groups);
        if (op->flags & RF_OP_CENTER) printf(" centred");
        break;
    case RF_OP_MATMUL:
        if (op->matmul.first_row) printf(" from row %u", op->matmul.first_row);
        if (op->matmul.scale != 0) printf(" x %g", (double)op->matmul.scale);
        if (op->matmul.softcap != 0) printf(" softcap %g", (double)op->matmul.softcap);
        break;
    case RF_OP_ROPE:
        printf(" heads %u rotate %u%s", op->rope.n_heads, op->rope.n_rot, op->flags & RF_OP_NEOX ? " neox" : "");
        break;
    case RF_OP_ATTENTION:
        printf(" heads %u kv heads %u", t->n_heads, t->n_kv_heads);
        if (t->window) printf(" window %u", t->window);
        if (t->softcap != 0) printf(" softcap %g", (double)t->softcap);
        if (t->temperature != 0) printf(" temperature %g per %u", (double)t->temperature, t->temperature_length);
        break;
    case RF_OP_GLU: printf(" %s", activations[op->glu.activation]); break;
    case RF_OP_ROUTE: printf(" top %u of %u", op->route.n_used, op->route.n_experts); break;
    case RF_OP_EXPERTS: printf(" %u of %u experts", op->experts.n_used, op->experts.n_experts); break;
    case RF_OP_HEADS: printf(" heads %u", op->heads.n_heads); break;
    case RF_OP_CONV: printf(" taps %u %s", op->conv.n_taps, activations[op->conv.activation]); break;
    case RF_OP_DELTA: printf(" heads %u key heads %u", op->delta.n_heads, op->delta.n_k_heads); break;
    case RF_OP_SLICE: printf(" heads %u values %u + %u", op->slice.n_heads, op->slice.at, op->slice.n); break;
    default: break;
    }
}

/* "  12     0 matmul     q[T,256] = xn[T,256]  blk.0.attn_q.weight f16 [256,256]  131072 bytes" */
static void print_op(const rf_plan *p, uint32_t i) {
    const rf_op *op = &p->ops[i];
    const rf_op_spec spec = rf_op_get_spec(p, op);
    uint64_t n = op_bytes(p, op);
    printf("%4u %5d %-9s", i, op->layer, spec.name);
    print_buffer(p, op->out, " ");
    if (op->state != RF_NONE) printf(" state %u", op->state);
    for (uint32_t k = 0; k < spec.n_in; k++)
        print_buffer(p, spec.in[k].id, k ? ", " : op->flags & RF_OP_ACCUMULATE ? " += " : " = ");
    print_params(op);
    for (uint32_t k = 0; k < spec.n_weights; k++) {
        const rf_plan_weight *w = &p->weights[spec.weight[k].id];
        printf("  ");
        put_escaped(stdout, w->name, strlen(w->name));
        printf(" %s [%u,%u]", rf_type_get(w->type).name, w->n_rows, w->n_in);
        if (spec.weight[k].n_matrices > 1) printf(" x %u", spec.weight[k].n_matrices);
    }
    if (n) printf("  %llu bytes", LLU(n));
    putchar('\n');
}

static int run_plan(app *a) {
    int code;
    rf_forecast need;
    const rf_model_info *m = &a->info;
    if ((code = open_model(a, a->o.device ? a->o.device : "null"))) return code;
    const rf_plan *p = rf_model_get_plan(a->m);
    rf_session_desc desc = session_desc(a, 0, 1);
    if ((code = lib(a, rf_model_forecast(a->m, &desc, &need, &a->err)))) return code;
    puts("  op layer kind      result = inputs (T tokens, L of them with logits)  weight  bytes a token reads");
    for (uint32_t i = 0; i < p->n_ops; i++) print_op(p, i);
    printf("%s: %u layers, n_embd %u, n_vocab %u, %u heads of %u, %u kv heads, trained for %u tokens\n", m->arch,
           m->n_layers, m->n_embd, m->n_vocab, m->n_heads, m->head_dim, m->n_kv_heads, m->n_ctx_train);
    printf("%u ops, %u tensors with %llu weights in %llu bytes, a token reads %llu bytes\n", p->n_ops, m->n_tensors,
           LLU(m->n_params), LLU(m->weight_bytes), LLU(m->token_bytes));
    printf("a session of %u tokens: %llu bytes of keys and values, %llu of scratch, %llu on the host", desc.n_ctx,
           LLU(need.kv_bytes), LLU(need.scratch_bytes), LLU(need.host_bytes));
    if (a->o.device) printf(", %llu of workspaces of %s", LLU(need.plan_bytes), rf_device_get_info(a->d).name);
    putchar('\n');
    print_notes(a);
    return DONE;
}

/* ---- check ---- */

static unsigned char raw[1u << 17];
static float values[1u << 17];

/* As many whole blocks as fit into both buffers. */
static size_t piece_blocks(rf_type_info t) {
    size_t n = sizeof raw / t.block_bytes, m = sizeof values / sizeof *values / t.block_elements;
    return n < m ? n : m;
}

/* Problems go to stdout as they are found, the first one to stderr at the end. */
static void report(app *a, const char *text) {
    if (a->n_problems++ == 0) snprintf(a->problem, sizeof a->problem, "%s", text);
    put_escaped(stdout, text, strlen(text));
    putchar('\n');
}

/* Ids of experts as values: NaN for one that no expert has. */
static void decode_ids(const app *a, const rf_plan_weight *w, uint64_t n) {
    const rf_plan *plan = rf_model_get_plan(a->m);
    uint32_t n_experts = 0;
    for (uint32_t i = 0; i < plan->n_ops; i++)
        if (plan->ops[i].kind == RF_OP_ROUTE && plan->ops[i].factor < plan->n_weights &&
            &plan->weights[plan->ops[i].factor] == w)
            n_experts = plan->ops[i].route.n_experts;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t id;
        memcpy(&id, raw + 4 * i, sizeof id);
        values[i] = id < n_experts ? (float)id : NAN;
    }
}

/* Decode a matrix and check every value: a bad block scale makes them NaN or infinite (0 * inf is NaN, too). */
static int scan_matrix(app *a, const rf_plan_weight *w, uint32_t expert, uint64_t done_bytes) {
    int code;
    rf_type_info type = rf_type_get(w->type);
    uint64_t piece = piece_blocks(type), n_blocks = w->size_bytes / type.block_bytes, n_found = 0, first = 0;
    const char *what = "";
    for (uint64_t at = 0; at < n_blocks; at += piece) {
        if (piece > n_blocks - at) piece = n_blocks - at;
        uint64_t n = piece * type.block_elements, offset = at * type.block_bytes;
        size_t n_bytes = (size_t)(piece * type.block_bytes);
        if ((code = lib(a, rf_gguf_read_tensor(a->g, w->tensor, expert * w->size_bytes + offset, raw, n_bytes,
                           &a->err))))
            return code;
        if (w->type == RF_TYPE_I32) decode_ids(a, w, n);
        else if ((code = lib(a, rf_dequantize(w->type, raw, n, values, &a->err)))) return code;
        for (uint64_t i = 0; i < n; i++)
            if (!isfinite(values[i]) && n_found++ == 0)
                first = at * type.block_elements + i, what = isnan(values[i]) ? "NaN" : "infinite";
        progress(a, "checking", done_bytes + offset + n_bytes, a->info.weight_bytes);
    }
    if (n_found) {
        char text[256], which[32] = "";
        if (w->n_experts) snprintf(which, sizeof which, " of expert %u", expert);
        snprintf(text, sizeof text, "%s (%s): value %llu%s (row %llu, column %llu) is %s; %llu values are not finite",
                 w->name, type.name, LLU(first), which, LLU(first / w->n_in), LLU(first % w->n_in), what, LLU(n_found));
        report(a, text);
    }
    return DONE;
}

/* ---- check --device ----
 * Each op of a prompt, then of one more token, runs alone on the device and on the CPU, with the CPU's inputs. The
 * weights of one op are loaded at a time. Then both run the same rows through sessions, where ops are fused. */

#define CHECK_PROMPT 12u /* rows: more than decode kernels take */
#define CHECK_CTX 32u
#define N_STATES 2u /* slots of recurrent states: after the prompt, after one more token */
#define OP_TOLERANCE 1e-3     /* largest difference over largest value                                  */
#define LOGITS_TOLERANCE 5e-2 /* inputs are rounded to int8: a small difference rounds some the other way */

typedef struct side {
    const rf_device_api *api;
    rf_dev *dev;
    rf_queue *queue;
    rf_table *table;
    rf_prepared *prepared;
    rf_mem scratch, state;
    rf_mem weight[RF_OP_WEIGHTS], repack; /* of the op that runs */
    void *bytes[RF_OP_WEIGHTS];           /* of the file         */
    uint32_t slot[RF_OP_WEIGHTS], n_slots[RF_OP_WEIGHTS];
    rf_model *m;              /* for the run as a whole                    */
    rf_session *s;
} side;

struct comparison {
    rf_device *cpu;
    side sides[2]; /* the device, the CPU */
    const rf_plan *p;
    uint64_t *buffer_offset, *state_offset, scratch_bytes, state_bytes;
    uint32_t *segments;
    char *out[2];     /* what an op wrote           */
    float *values[2]; /* as floats                  */
    double largest;   /* difference of an op        */
    uint32_t largest_op;
};

static uint64_t align_256(uint64_t n) { return (n + 255) & ~(uint64_t)255; }

static void drop_op(side *s) {
    if (s->prepared) s->api->plan_release(s->prepared);
    s->prepared = NULL;
    for (uint32_t k = 0; k < RF_OP_WEIGHTS; k++) {
        for (uint32_t i = 0; s->bytes[k] && i < s->n_slots[k]; i++) s->api->weight_clear(s->table, s->slot[k] + i);
        if (s->weight[k].base) s->api->mem_release(s->dev, &s->weight[k]);
        free(s->bytes[k]);
        s->bytes[k] = NULL;
    }
    if (s->repack.base) s->api->mem_release(s->dev, &s->repack);
}

static void close_comparison(struct comparison *c) {
    for (int i = 0; c && i < 2; i++) {
        side *s = &c->sides[i];
        drop_op(s);
        rf_session_close(s->s, NULL);
        if (i) rf_model_close(s->m, NULL);
        if (s->queue) s->api->queue_release(s->queue);
        if (s->table) s->api->table_release(s->table);
        if (s->scratch.base) s->api->mem_release(s->dev, &s->scratch);
        if (s->state.base) s->api->mem_release(s->dev, &s->state);
        free(c->out[i]), free(c->values[i]);
    }
    if (!c) return;
    rf_device_close(c->cpu, NULL);
    free(c->buffer_offset), free(c->state_offset), free(c->segments), free(c);
}

/* Lay out the memory of both sides: offsets, sizes and the largest output. */
static int place_buffers(app *a, struct comparison *c) {
    const rf_plan *p = c->p;
    uint64_t max_bytes = 0;
    c->buffer_offset = calloc(p->n_buffers + 1, sizeof *c->buffer_offset);
    c->state_offset = calloc(p->n_states + 1, sizeof *c->state_offset);
    c->segments = calloc(p->n_ops + 1, sizeof *c->segments);
    if (!c->buffer_offset || !c->state_offset || !c->segments) return no_memory(a);
    for (uint32_t i = 0; i < p->n_buffers; i++) {
        uint64_t n = (uint64_t)CHECK_PROMPT * p->buffers[i].width * sizeof(float);
        c->buffer_offset[i] = c->scratch_bytes;
        c->scratch_bytes += align_256(n);
        if (n > max_bytes) max_bytes = n;
    }
    for (uint32_t i = 0; i < p->n_states; i++) {
        const rf_plan_state *t = &p->states[i];
        uint64_t cells = (uint64_t)t->n_kv_heads * CHECK_CTX;
        uint64_t n = t->width ? align_256(N_STATES * 4ull * t->width)
                              : align_256(cells * t->head_dim * 2) + align_256(cells * t->head_dim_v * 2);
        c->state_offset[i] = c->state_bytes;
        c->state_bytes += n;
        if (n > max_bytes) max_bytes = n;
    }
    c->state_offset[p->n_states] = c->state_bytes;
    for (int i = 0; i < 2; i++) {
        c->out[i] = malloc(max_bytes);
        c->values[i] = malloc(max_bytes * 2); /* halves take twice as much */
        if (!c->out[i] || !c->values[i]) return no_memory(a);
    }
    return DONE;
}

static int wait_for(app *a, side *s, rf_ticket *ticket) {
    return lib(a, s->api->ticket_wait(ticket, 600000, &a->err));
}

static int open_side(app *a, struct comparison *c, side *s, const rf_device *d) {
    int code;
    rf_ticket t = {0};
    s->api = rf_device_get_api(d, &s->dev);
    if ((code = lib(a, s->api->queue_create(s->dev, &s->queue, &a->err)))) return code;
    if ((code = lib(a, s->api->table_create(s->dev, c->p, &s->table, &a->err)))) return code;
    if ((code = lib(a, s->api->mem_create(s->dev, c->scratch_bytes, &s->scratch, &a->err)))) return code;
    if ((code = lib(a, s->api->mem_create(s->dev, c->state_bytes + 1, &s->state, &a->err)))) return code;
    if ((code = lib(a, s->api->mem_fill(s->queue, &s->scratch, 0, 0, c->scratch_bytes, &t, &a->err)))) return code;
    if ((code = lib(a, s->api->mem_fill(s->queue, &s->state, 0, 0, c->state_bytes, &t, &a->err)))) return code;
    return wait_for(a, s, &t);
}

static int load_weight(app *a, struct comparison *c, side *s, uint32_t k, const rf_op_weight *weight) {
    int code;
    const rf_plan_weight *w = &c->p->weights[weight->id];
    const uint32_t n = rf_plan_weight_matrices(w);
    rf_weight_layout layout = s->api->weight_layout(s->dev, c->p, w);
    rf_ticket t = {0};
    uint64_t file_bytes = align_256(w->size_bytes), device_bytes = align_256(layout.size_bytes);
    s->slot[k] = w->slot;
    s->n_slots[k] = n;
    rf_weight_part part = {.n_rows = w->n_rows, .scratch = &s->repack};
    s->bytes[k] = aligned_alloc(256, n * file_bytes);
    if (!s->bytes[k]) return no_memory(a);
    if (!layout.in_place) {
        part.mem = &s->weight[k];
        if ((code = lib(a, s->api->mem_create(s->dev, n * device_bytes, &s->weight[k], &a->err)))) return code;
        if (layout.scratch_bytes && !s->repack.base)
            if ((code = lib(a, s->api->mem_create(s->dev, layout.scratch_bytes, &s->repack, &a->err)))) return code;
    }
    for (uint32_t i = 0; i < n; i++) { /* the matrices of all experts, or one */
        void *bytes = (char *)s->bytes[k] + i * file_bytes;
        if ((code = lib(a, rf_gguf_read_tensor(a->g, w->tensor, i * w->size_bytes, bytes, (size_t)w->size_bytes,
                                       &a->err)))) return code;
        part.src = bytes;
        part.slot = w->slot + i;
        part.offset = i * device_bytes;
        if ((code = lib(a, s->api->weight_write(s->table, s->queue, &part, &t, &a->err)))) return code;
        if ((code = wait_for(a, s, &t))) return code;
    }
    return DONE;
}

/* Run op i alone. */
static int run_op(app *a, struct comparison *c, side *s, uint32_t i, const rf_step *step) {
    int code;
    rf_plan one = *c->p;
    rf_plan_bind bind = {.plan = &one, .table = s->table, .scratch = s->scratch, .state = s->state,
                         .buffer_offset = c->buffer_offset, .state_offset = c->state_offset, .n_ctx = CHECK_CTX,
                         .n_seq = 1, .n_batch = CHECK_PROMPT, .n_logits = CHECK_PROMPT, .n_slots = N_STATES};
    rf_ticket t = {0};
    uint32_t n = 0;
    one.ops += i;
    one.n_ops = 1;
    const rf_op_spec spec = rf_op_get_spec(c->p, one.ops);
    for (uint32_t k = 0; k < spec.n_weights; k++) if ((code = load_weight(a, c, s, k, &spec.weight[k]))) return code;
    if ((code = lib(a, s->api->plan_prepare(s->dev, &bind, c->segments, &n, &s->prepared, &a->err)))) return code;
    if ((code = lib(a, s->api->plan_run(s->prepared, s->queue, 0, n, step, &t, &a->err)))) return code;
    if ((code = wait_for(a, s, &t))) return code;
    drop_op(s);
    return DONE;
}

/* Largest difference over largest value of the second, or `scale` if that is larger; infinite where one is not a number
 * and the other is. */
static double difference(const float *x, const float *y, uint64_t n, double scale) {
    double worst = 0, largest = scale;
    for (uint64_t i = 0; i < n; i++) {
        if (isnan(x[i]) && isnan(y[i])) continue;
        double d = x[i] == y[i] ? 0 : fabs((double)x[i] - (double)y[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
        if (isfinite(y[i])) largest = fmax(largest, fabs((double)y[i]));
    }
    return worst == 0 ? 0 : worst / largest;
}

/* Infinite if the two sides of a ROUTE chose other experts: ids are whole numbers in the first half of a row. */
static double different_experts(const struct comparison *c, const rf_op *op, uint32_t rows) {
    const size_t row_bytes = c->p->buffers[op->out].width * sizeof(float);
    for (uint32_t i = 0; i < rows; i++)
        if (memcmp((const char *)c->out[0] + i * row_bytes, (const char *)c->out[1] + i * row_bytes,
                   op->route.n_used * 4))
            return INFINITY;
    return 0;
}

/* Run op i on both sides and compare; the device continues with what the CPU wrote. */
static int compare_op(app *a, struct comparison *c, uint32_t i, const rf_step *step) {
    int code;
    const rf_op *op = &c->p->ops[i];
    int stores = op->kind == RF_OP_KV_STORE;
    uint64_t at = stores ? c->state_offset[op->state] : c->buffer_offset[op->out], n, bytes;
    uint32_t rows = op->rows == RF_ROWS_LOGITS ? step->n_logits : step->n_rows;
    n = stores ? (c->state_offset[op->state + 1] - at) / 2 : (uint64_t)rows * c->p->buffers[op->out].width;
    bytes = stores ? 2 * n : 4 * n;
    rf_ticket t = {0};
    for (int k = 0; k < 2; k++) {
        side *s = &c->sides[k];
        if ((code = run_op(a, c, s, i, step))) return code;
        if ((code = lib(a, s->api->mem_read(s->queue, stores ? &s->state : &s->scratch, at, c->out[k], bytes, &t,
                           &a->err))))
            return code;
        if ((code = wait_for(a, s, &t))) return code;
        if ((code = lib(a, rf_dequantize(stores ? RF_TYPE_F16 : RF_TYPE_F32, c->out[k], n, c->values[k], &a->err))))
            return code;
    }
    /* a softcap's error is relative to the cap */
    double d = difference(c->values[0], c->values[1], n, op->kind == RF_OP_MATMUL ? op->matmul.softcap : 0);
    if (op->kind == RF_OP_ARGMAX) d = memcmp(c->out[0], c->out[1], (size_t)bytes) ? INFINITY : 0;
    if (op->kind == RF_OP_ROUTE) d = fmax(d, different_experts(c, op, rows));
    if (d > c->largest) c->largest = d, c->largest_op = i;
    const char *weight = op->weight == RF_NONE ? "" : c->p->weights[op->weight].name;
    if (!(d <= OP_TOLERANCE))
        return fail(a, FAILED, "%s and the CPU differ: op %u of layer %d (%s%s%s), %u rows: by %.2g of the largest "
                    "value", rf_device_get_info(a->d).name, i, op->layer, rf_op_name(op->kind), *weight ? " " : "",
                    weight, rows, d);
    const side *s = &c->sides[0];
    if ((code = lib(a, s->api->mem_write(s->queue, stores ? &s->state : &s->scratch, at, c->out[1], bytes, &t,
                       &a->err))))
        return code;
    return wait_for(a, &c->sides[0], &t);
}

static int open_comparison(app *a) {
    int code;
    struct comparison *c = a->comparison = calloc(1, sizeof *c);
    if (!c) return no_memory(a);
    rf_device_desc desc = {.n_threads = (uint32_t)a->o.threads};
    if ((code = lib(a, rf_device_open("cpu", &desc, &c->cpu, &a->err)))) return code;
    c->p = rf_model_get_plan(a->m);
    if ((code = place_buffers(a, c))) return code;
    if ((code = open_side(a, c, &c->sides[0], a->d))) return code;
    return open_side(a, c, &c->sides[1], c->cpu);
}

static int32_t check_token(const app *a, uint32_t i) { return (int32_t)((i * 7919u + 1u) % a->info.n_vocab); }

static int compare_ops(app *a) {
    int code;
    struct comparison *c = a->comparison;
    for (uint32_t first = 0; first <= CHECK_PROMPT; first += CHECK_PROMPT) {
        rf_step_row rows[CHECK_PROMPT];
        uint32_t n = first ? 1 : CHECK_PROMPT, last = n - 1;
        for (uint32_t i = 0; i < n; i++)
            rows[i] = (rf_step_row){.token = check_token(a, first + i), .pos = (int32_t)(first + i),
                                    .logits_row = i == last ? 0 : -1, .from = first != 0,
                                    .to = i == last ? 1 + (first != 0) : 0};
        rf_step step = {.rows = rows, .logit_rows = &last, .n_rows = n, .n_logits = 1};
        for (uint32_t i = 0; i < c->p->n_ops && !interrupted; i++) if ((code = compare_op(a, c, i, &step))) return code;
    }
    return DONE;
}

/* Run the same rows through sessions, where devices fuse ops. */
static int compare_sessions(app *a, double *d) {
    int code;
    struct comparison *c = a->comparison;
    int32_t tokens[CHECK_PROMPT + 1];
    rf_session_desc desc = {.n_ctx = CHECK_CTX};
    float *logits[2];
    for (uint32_t i = 0; i <= CHECK_PROMPT; i++) tokens[i] = check_token(a, i);
    c->sides[0].m = a->m;
    if ((code = lib(a, rf_model_open(a->g, c->cpu, NULL, &c->sides[1].m, &a->err)))) return code;
    for (int k = 0; k < 2; k++)
        if ((code = lib(a, rf_session_open(c->sides[k].m, &desc, &c->sides[k].s, &a->err)))) return code;
    for (uint32_t n = CHECK_PROMPT; n; n = n > 1) { /* the prompt, then one */
        const int32_t *from = n > 1 ? tokens : tokens + CHECK_PROMPT;
        for (int k = 0; k < 2; k++)
            if ((code = lib(a, rf_session_forward(c->sides[k].s, from, n, &logits[k], &a->err)))) return code;
        *d = fmax(*d, difference(logits[0], logits[1], a->info.n_vocab, 0));
    }
    if (*d <= LOGITS_TOLERANCE) return DONE;
    return fail(a, FAILED, "%s and the CPU differ: no op alone, the logits of all together: by %.2g of the largest",
                rf_device_get_info(a->d).name, *d);
}

static int check_device(app *a) {
    int code;
    double whole = 0;
    if ((code = open_comparison(a))) return code;
    if ((code = compare_ops(a))) return code;
    if ((code = compare_sessions(a, &whole))) return code;
    const struct comparison *c = a->comparison;
    const rf_op *op = &c->p->ops[c->largest_op];
    rf_device_info d = rf_device_get_info(a->d);
    printf("ok: %s as the CPU: %u ops, by at most %.2g of the largest value (op %u, %s), logits by %.2g\n", d.name,
           c->p->n_ops, c->largest, c->largest_op, rf_op_name(op->kind), whole);
    if (d.note[0]) printf("%s: %s\n", d.name, d.note);
    return DONE;
}

static int run_check(app *a) {
    int code;
    uint64_t done_bytes = 0;
    if ((code = open_model(a, a->o.device ? a->o.device : "null"))) return code;
    const rf_plan *p = rf_model_get_plan(a->m);
    if (rf_model_get_tokenizer(a->m, &a->t, &a->err)) report(a, a->err.text);
    for (uint32_t slot = 0; slot < p->n_slots; slot++) {
        const rf_plan_weight *w = rf_plan_weight_of(p, slot);
        if ((code = scan_matrix(a, w, slot - w->slot, done_bytes))) return code;
        done_bytes += w->size_bytes;
    }
    if (a->n_problems > 1) return fail(a, FAILED, "%s (and %u more)", a->problem, a->n_problems - 1);
    if (a->n_problems) return fail(a, FAILED, "%s", a->problem);
    printf("ok: %s, %u tensors, %llu bytes\n", a->info.arch, p->n_weights, LLU(done_bytes));
    if (a->o.device && (code = check_device(a))) return code;
    print_notes(a);
    return DONE;
}

/* ---- tokenize ---- */

static int tokenize_line(app *a) {
    int code;
    uint32_t tokenize = (a->o.bos ? RF_TOKENIZE_ADD : 0) | (a->o.special ? RF_TOKENIZE_SPECIAL : 0);
    if (a->o.hex && !from_hex(&a->line)) return fail(a, FAILED, "stdin: want two hex digits per byte");
    if ((code = encode(a, a->line.data, a->line.len, tokenize, &a->tokens))) return code;
    print_ids(&a->tokens);
    return DONE;
}

static int detokenize_line(app *a) {
    int code;
    uint32_t special = a->o.special ? RF_DETOKENIZE_SPECIAL : 0;
    rf_detokenizer state = {.tokenizer = a->t};
    int good;
    if ((code = parse_ids(a, a->line.data, &a->tokens, &good))) return code;
    if (!good || strlen(a->line.data) != a->line.len)
        return fail(a, FAILED, "stdin: want a line like [1,2,3], got \"%s\"", a->line.data);
    a->text.len = 0;
    for (uint32_t i = 0; i < a->tokens.len; i++)
        if ((code = decode(a, &state, a->tokens.data[i], special, &a->text))) return code;
    if ((code = decode(a, &state, -1, special | RF_DETOKENIZE_FINISH, &a->text))) return code;
    if (!a->o.hex) fwrite(a->text.data, 1, a->text.len, stdout);
    for (size_t i = 0; a->o.hex && i < a->text.len; i++) printf("%02x", (unsigned char)a->text.data[i]);
    putchar('\n');
    return DONE;
}

static int run_tokenize(app *a) {
    int code;
    int more = 1;
    if ((code = open_file(a))) return code;
    if ((code = lib(a, rf_tokenizer_open(a->g, a->o.pre, &a->own, &a->err)))) return code;
    a->t = a->own;
    while (!ferror(stdout)) { /* main reports it */
        if ((code = read_line(a, &a->line, &more))) return code;
        if (!more) break;
        if ((code = a->o.decode ? detokenize_line(a) : tokenize_line(a))) return code;
    }
    print_notes(a);
    return DONE;
}

/* ---- dequant, devices ---- */

static int run_dequant(app *a) {
    int code;
    uint32_t type = 0;
    for (; type < RF_TYPE_COUNT; type++) {
        const char *name = rf_type_get(type).name;
        if (name && strcasecmp(name, a->o.type) == 0) break;
    }
    if (type == RF_TYPE_COUNT) return fail(a, USAGE, "--type: want a tensor type, e.g. q4_K, got \"%s\"", a->o.type);
    rf_type_info t = rf_type_get(type);
    if ((code = lib(a, rf_dequantize(type, raw, 0, values, &a->err)))) return code;
    size_t got, piece_bytes = piece_blocks(t) * t.block_bytes;
    while ((got = fread(raw, 1, piece_bytes, stdin)) > 0 && !ferror(stdout)) {
        size_t n = got / t.block_bytes * t.block_elements;
        if (got % t.block_bytes) return fail(a, FAILED, "stdin: want whole blocks of %u bytes", t.block_bytes);
        if ((code = lib(a, rf_dequantize(type, raw, n, values, &a->err)))) return code;
        fwrite(values, sizeof *values, n, stdout);
    }
    return ferror(stdin) ? fail_errno(a, "stdin") : DONE;
}

static int run_devices(app *a) {
    int code;
    rf_device_info list[32];
    uint32_t n = 0;
    if ((code = lib(a, rf_device_list(list, 32, &n, &a->err)))) return code;
    for (uint32_t i = 0; i < n && i < 32; i++) {
        const rf_device_info *d = &list[i];
        printf("%-8s %s", d->name, d->usable ? "" : "unusable");
        if (d->usable)
            printf("%s, %s, %u units, %.1f of %.1f GB left", d->text, d->arch, d->compute_units,
                   (double)d->free_bytes / 1e9, (double)d->total_bytes / 1e9);
        printf("%s%s\n", d->note[0] ? ": " : "", d->note);
    }
    return DONE;
}

/* ---- command line ---- */

static const command commands[] = {
    {"chat", run_chat, "talk with a model: a line in, an answer out; /help there lists what else; `run` is the same"},
    {"generate", run_generate, "answer one prompt, or continue it (--raw); the text streams to stdout"},
    {"inspect", run_inspect, "print metadata, tensors, and whether and with what memory the file runs"},
    {"plan", run_plan, "print what a token computes and what that needs; loads nothing"},
    {"check", run_check, "validate a file: shapes, tokenizer, every value; a device: every op against the CPU"},
    {"tokenize", run_tokenize, "lines of text in, [1,2,3] out; --decode the other way"},
    {"dequant", run_dequant, "packed blocks in, float32 out"},
    {"embed", run_embed, "a text to a vector: its hidden states, pooled, as JSON"},
    {"logits", run_logits, "write the logits of every token, float32 [n_tokens, n_vocab]"},
    {"bench", run_bench, "measure prompt and decode speed: medians of -r runs after a warm-up"},
    {"devices", run_devices, "list the devices"},
    {"template", run_template, "print a model's chat template, or what one makes of a conversation in JSON (--input)"},
};
#define N_COMMANDS (sizeof commands / sizeof *commands)

enum { /* in the order of the table above */
    CHAT = 1, GENERATE = 2, INSPECT = 4, PLAN = 8, CHECK = 16, TOKENIZE = 32, DEQUANT = 64, EMBED = 128, LOGITS = 256,
    BENCH = 512, DEVICES = 1024, TEMPLATE = 2048,
    WRITE = GENERATE | CHAT,              /* choose tokens */
    RUN = WRITE | EMBED | LOGITS | BENCH, /* compute       */
    FILES = RUN | INSPECT | PLAN | CHECK | TOKENIZE | TEMPLATE,
    ALL = FILES | DEQUANT | DEVICES
};

/* LIMIT: a count, and -1 means 0 (no limit). CHOICE: the position in "a|b". LIST: a text, may be given many times. */
typedef enum kind { SWITCH, TEXT, LIST, COUNT, LIMIT, BYTES, REAL, CHOICE } kind;

/* An option; without names, the heading of those that follow. */
typedef struct flag {
    const char *names;     /* "-n, --max-tokens, --n-predict"                                                  */
    kind kind;
    size_t target;         /* in options: const char * for TEXT, texts for LIST, double for REAL, else uint64_t */
    uint32_t takes, needs; /* commands                                                                         */
    int64_t min;           /* of COUNT, LIMIT and REAL                                                         */
    uint64_t max;
    const char *value, *help;
} flag;

#define AT(member) offsetof(options, member)
#define HEADING(takes, text) {NULL, SWITCH, 0, takes, 0, 0, 0, NULL, text}
static const flag flags[] = {
    {"-m, --model, --gguf", TEXT, AT(gguf), FILES, FILES & ~TEMPLATE, 0, 0, "F", "the model; F alone will do"},
    {"-h, --help", SWITCH, AT(help), ALL, 0, 0, 0, NULL, "this text"},
    {"--json", SWITCH, AT(json), INSPECT | BENCH, 0, 0, 0, NULL, "print JSON"},
    {"-p, --prompt", TEXT, AT(prompt), GENERATE | EMBED, 0, 0, 0, "S", "the text; S alone after the model will do"},
    {"-f, --prompt-file", TEXT, AT(prompt_file), GENERATE | EMBED, 0, 0, 0, "F",
     "the text from a file, - is stdin (a pipe, its last newline dropped)"},
    {"--echo", SWITCH, AT(echo), GENERATE, 0, 0, 0, NULL, "print the prompt first, and end with a newline"},
    {"--raw", SWITCH, AT(raw), GENERATE, 0, 0, 0, NULL, "the prompt as it is: no chat template"},
    {"--system", TEXT, AT(system), WRITE, 0, 0, 0, "S", "system message"},
    {"--tools", TEXT, AT(tools), WRITE, 0, 0, 0, "F", "what the model may call: a JSON file of tool definitions"},
    {"--think", CHOICE, AT(think), WRITE, 0, 0, 0, "on|off|hide", "let it think and show that; do not; show how long"},
    {"--effort", TEXT, AT(effort), WRITE, 0, 0, 0, "S", "how much to think, as the template knows it: low, high, ..."},
    {"--jinja, --chat-template-file", TEXT, AT(jinja), WRITE | TEMPLATE, 0, 0, 0, "F", "chat template (the model's)"},
    {"--template-args, --chat-template-kwargs", TEXT, AT(extra), WRITE, 0, 0, 0, "JSON", "an object of its variables"},
    {"--grammar", TEXT, AT(grammar), WRITE, 0, 0, 0, "F", "what the answer may be: a file of GBNF"},
    {"--json-schema", TEXT, AT(schema), WRITE, 0, 0, 0, "F|JSON", "the answer is JSON of this schema; {} is any"},
    {"--draft", TEXT, AT(draft), WRITE, 0, 0, 0, "ngram|mtp|F",
     "faster: evaluate what followed the last tokens before; or else what the MTP heads or a draft model say"},
    {"--draft-max, --draft-n", COUNT, AT(draft_max), WRITE | BENCH, 0, 1, 15, "N", "drafts in a step at most (8)"},
    {"--stop", LIST, AT(stop), WRITE, 0, 0, 0, "S", "a text that ends the answer; may be given many times"},
    {"-n, --max-tokens, --n-predict", LIMIT, AT(max_tokens), WRITE, 0, 0, INT32_MAX, "N",
     "tokens of an answer at most; 0 or -1: no limit (256 for --raw, else none)"},
    {"--stats", SWITCH, AT(stats), CHAT, 0, 0, 0, NULL, "print times and speeds after each answer"},
    {"--input", TEXT, AT(input), TEMPLATE, 0, 0, 0, "F", "JSON: {\"messages\": [...], \"tools\": [...], ...}"},
    {"--now", TEXT, AT(now), TEMPLATE, 0, 0, 0, "T", "the template's clock, as 2026-11-22T12:34:56 (now)"},
    {"--pooling", CHOICE, AT(pooling), EMBED, 0, 0, 0, "default|mean|cls|last",
     "of the tokens' vectors (as the file says, else mean)"},
    {"--normalize", SWITCH, AT(normalize), EMBED, 0, 0, 0, NULL, "a vector of length 1"},
    {"--rank", TEXT, AT(rank), EMBED, 0, 0, 0, "QUERY", "a reranker's scores of each line of the text for a query"},
    {"--tokens", TEXT, AT(tokens), LOGITS, LOGITS, 0, 0, "1,2,3", "the prompt as token ids"},
    {"--out", TEXT, AT(out), LOGITS, LOGITS, 0, 0, "F", "file to write"},
    {"--step", SWITCH, AT(step), LOGITS, 0, 0, 0, NULL, "evaluate token by token"},
    {"--greedy", COUNT, AT(n_greedy), LOGITS, 0, 0, 1 << 24, "N", "then print the N likeliest next ids as [1,2,3]"},
    {"-p", COUNT, AT(n_prompt), BENCH, 0, 0, 1 << 24, "N", "prompt tokens (512); TFLOP/s: weights used and attention"},
    {"-n", COUNT, AT(n_decode), BENCH, 0, 0, 1 << 24, "N", "tokens of a greedy text (128); GB/s: weights, k, v, state"},
    {"-r", COUNT, AT(n_repeat), BENCH, 0, 1, REPEAT_MAX, "N", "runs (3)"},
    {"-d", TEXT, AT(depths), BENCH, 0, 0, 0, "0,4096,...",
     "tokens in the context before, a line for each (0); for --parallel and --draft one number (256)"},
    {"--parallel", TEXT, AT(parallel), BENCH, 0, 0, 0, "1,2,4,...",
     "instead: steps of so many sequences, a token of each; a line for each"},
    {"--draft", TEXT, AT(shares), BENCH, 0, 0, 0, "0,50,...,mtp",
     "instead: greedy text with 1, 2, 4, ... drafts a step, so many percent of them right, or the MTP heads'"},
    {"--peak", BYTES, AT(peak), BENCH, 0, 0, 0, "N", "read so much at once to measure the memory (1G); 0 = do not"},
    {"--decode", SWITCH, AT(decode), TOKENIZE, 0, 0, 0, NULL, "[1,2,3] in, text out"},
    {"--hex", SWITCH, AT(hex), TOKENIZE, 0, 0, 0, NULL, "text as the hex digits of its bytes"},
    {"--type", TEXT, AT(type), DEQUANT, DEQUANT, 0, 0, "T", "tensor type, e.g. q4_K"},

    HEADING(WRITE, "choosing tokens (by default as the file says, else as given here)"),
    {"--temp, --temperature", REAL, AT(temp), WRITE, 0, 0, 100, "T", "0 takes the likeliest token (0.8)"},
    {"--top-k", COUNT, AT(top_k), WRITE, 0, 0, INT32_MAX, "K", "choose among the K likeliest (0 = off)"},
    {"--top-p", REAL, AT(top_p), WRITE, 0, 0, 1, "P", "choose among the likeliest that sum to P; 1 = off (0.95)"},
    {"--min-p", REAL, AT(min_p), WRITE, 0, 0, 1, "P", "drop those below P times the likeliest; 0 = off (0.05)"},
    {"--repeat-penalty", REAL, AT(repeat_penalty), WRITE, 0, 0, 100, "R", "divide logits of recent tokens (1 = off)"},
    {"--frequency-penalty", REAL, AT(frequency_penalty), WRITE, 0, -100, 100, "A",
     "subtract A for each time that a token is among the recent ones (0)"},
    {"--presence-penalty", REAL, AT(presence_penalty), WRITE, 0, -100, 100, "A", "subtract A if it is there (0)"},
    {"--repeat-last-n", COUNT, AT(penalty_last_n), WRITE, 0, 1, 1 << 24, "N", "recent are the last N (64)"},
    {"--dry-multiplier", REAL, AT(dry_multiplier), WRITE, 0, 0, 100, "M", "DRY against repetition: 0.8, say (0 = off)"},
    {"--dry-base", REAL, AT(dry_base), WRITE, 0, 1, 100, "B", "each further token costs M * B^length (1.75)"},
    {"--dry-allowed-length", COUNT, AT(dry_allowed), WRITE, 0, 1, 1 << 24, "N", "beyond N tokens (2)"},
    {"--dry-penalty-last-n", COUNT, AT(dry_last_n), WRITE, 0, 1, 1 << 24, "N", "among the last N (the context)"},
    {"--dry-sequence-breaker", LIST, AT(dry_breakers), WRITE, 0, 0, 0, "S", "no repetition goes beyond S (\\n : \" *)"},
    {"--xtc-probability", REAL, AT(xtc_probability), WRITE, 0, 0, 1, "P", "XTC, against cliches: how often (0 = off)"},
    {"--xtc-threshold", REAL, AT(xtc_threshold), WRITE, 0, 0, 1, "P", "all likelier than P but the last one go (0.1)"},
    {"--mirostat", COUNT, AT(mirostat), WRITE, 0, 0, 2, "V", "version 1 or 2, in place of top-k and such (0 = off)"},
    {"--mirostat-ent", REAL, AT(mirostat_tau), WRITE, 0, 0, 100, "T", "the surprise it aims at, in bits (5)"},
    {"--mirostat-lr", REAL, AT(mirostat_eta), WRITE, 0, 0, 100, "E", "how fast it learns (0.1)"},
    {"--logit-bias", LIST, AT(logit_bias), WRITE, 0, 0, 0, "ID+B", "add B to a token's logit, as 15+1.5 or 15-inf"},
    {"-s, --seed", COUNT, AT(seed), WRITE, 0, 0, UINT64_MAX, "S", "the same seed, the same text (random, printed)"},

    HEADING(TOKENIZE | WRITE | EMBED, "text to tokens"),
    {"--no-bos", SWITCH, AT(no_bos), GENERATE, 0, 0, 0, NULL, "do not add the tokens that the file asks for"},
    {"--bos", CHOICE, AT(bos), TOKENIZE | EMBED, 0, 0, 0, "0|1", "add bos and eos where the file asks for it (1)"},
    {"--special", CHOICE, AT(special), TOKENIZE | GENERATE | EMBED, 0, 0, 0, "0|1", "text may name special tokens (0)"},
    {"--pre", TEXT, AT(pre), TOKENIZE | WRITE | EMBED, 0, 0, 0, "NAME", "pre-tokenizer (the file's)"},

    HEADING(RUN | PLAN | INSPECT | CHECK, "device and memory"),
    {"--device", TEXT, AT(device), RUN, 0, 0, 0, "D",
     "auto, cpu, null, hip:N; several: hip:0,1, hip:all, hip:0,cpu (auto)"},
    {"--split", CHOICE, AT(split), RUN, 0, 0, 0, "layer|tensor",
     "what each of several GPUs has: layers, or a part of each (layer)"},
    {"--device", TEXT, AT(device), PLAN | INSPECT, 0, 0, 0, "D", "also what memory this device needs"},
    {"--device", TEXT, AT(device), CHECK, 0, 0, 0, "D", "compare this device with the CPU, op by op"},
    {"-t, --threads", COUNT, AT(threads), RUN | CHECK, 0, 0, 256, "N", "of the CPU (0 = one per core)"},
    {"--isa", TEXT, AT(isa), RUN | CHECK, 0, 0, 0, "NAME", "kernels: scalar, avx2, avxvnni, avx512, neon, i8mm"},
    {"-c, --ctx", COUNT, AT(ctx), RUN | PLAN | INSPECT, 0, 1, 1 << 24, "N",
     "tokens that the context holds (what the model was trained for, at most 4096)"},
    {"-b, --batch", COUNT, AT(batch), RUN | PLAN | INSPECT, 0, 1, 1 << 16, "N", "rows evaluated at once"},
    {"--kv", CHOICE, AT(kv), RUN | PLAN | INSPECT, 0, 0, 0, "f16|f32|q8_0", "keys and values (f16)"},
    {"--swa-full", SWITCH, AT(swa_full), RUN | PLAN | INSPECT, 0, 0, 0, NULL, "sliding windows keep all positions"},
    {"--budget", BYTES, AT(budget), RUN, 0, 0, 0, "N", "bytes of weights on the device, e.g. 3G; others are streamed"},
    {"--pinned", BYTES, AT(pinned), RUN, 0, 0, 0, "N", "GPU: of these, bytes that stay in pinned host memory (0)"},
    {"--expert-budget", BYTES, AT(expert_budget), RUN, 0, 0, 0, "N", "of --budget, for experts (what others leave)"},
    {"--expert-policy", CHOICE, AT(expert_policy), RUN, 0, 0, 0, "lfru|lru|static", "which expert gives way (lfru)"},
    {"--expert-prefetch", SWITCH, AT(expert_prefetch), RUN, 0, 0, 0, NULL, "load likely experts ahead"},
    {"--expert-cpu", COUNT, AT(expert_cpu_below), RUN, 0, 0, INT32_MAX, "N",
     "the CPU computes those not loaded and chosen less often"},
};
#define N_FLAGS (sizeof flags / sizeof *flags)

/* The next of the names "-n, --max-tokens": its length, 0 at the end. *at starts as the names. */
static size_t next_name(const char **at, const char **name) {
    *name = *at + strspn(*at, ", ");
    size_t n = strcspn(*name, ", ");
    *at = *name + n;
    return n;
}

#define HELP_COLUMN 34

static void print_command_help(const command *cmd) {
    const uint32_t bit = 1u << (cmd - commands);
    printf("rocmforge_cli %s: %s\n", cmd->name, cmd->help);
    for (const flag *f = flags; f < flags + N_FLAGS; f++) {
        if (!(f->takes & bit)) continue;
        if (!f->names) {
            int any = 0;
            for (const flag *g = f + 1; g < flags + N_FLAGS && g->names; g++) any |= (g->takes & bit) != 0;
            if (any) printf("\n%s\n", f->help);
            continue;
        }
        int width = printf("  %s %s", f->names, f->value ? f->value : "");
        if (width >= HELP_COLUMN) putchar('\n'), width = 0;
        printf("%*s%s%s\n", HELP_COLUMN - width, "", f->help, f->needs & bit ? " (needed)" : "");
    }
}

static int print_help(const command *cmd) {
    if (cmd) return print_command_help(cmd), DONE;
    printf("rocmforge_cli %s: run GGUF language models\n\n", rf_version());
    for (size_t i = 0; i < N_COMMANDS; i++) printf("  %-10s %s\n", commands[i].name, commands[i].help);
    puts("\nrocmforge_cli COMMAND MODEL [OPTIONS]; rocmforge_cli help COMMAND; rocmforge_cli --version\n"
         "  rocmforge_cli chat model.gguf\n"
         "  rocmforge_cli generate model.gguf \"Why is the sky blue?\" -n 200\n"
         "  echo \"Why is the sky blue?\" | rocmforge_cli generate model.gguf\n"
         "exit status: 0 done, 1 failed, 2 wrong command line, 130 interrupted");
    return DONE;
}

/* ---- did you mean ---- */

#define WORD_MAX 31u

/* How many letters to insert, delete or replace to make b of a (Levenshtein); WORD_MAX if one is longer than that. */
static size_t edit_distance(const char *a, size_t n_a, const char *b, size_t n_b) {
    size_t row[WORD_MAX + 1]; /* distances of the first i letters of a to prefixes of b */
    if (n_a > WORD_MAX || n_b > WORD_MAX) return WORD_MAX;
    for (size_t j = 0; j <= n_b; j++) row[j] = j;
    for (size_t i = 1; i <= n_a; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            size_t replace = diagonal + (a[i - 1] != b[j - 1]), other = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            diagonal = row[j];
            row[j] = replace < other ? replace : other;
        }
    }
    return row[n_b];
}

/* The best name so far for a word that is none. */
typedef struct guess {
    const char *word, *name;
    size_t n_word, n_name, distance;
} guess;

static guess guess_for(const char *word, size_t n) {
    return (guess){.word = word, .n_word = n, .name = "", .distance = 1 + n / 3};
}

static void consider(guess *g, const char *name, size_t n) {
    size_t d = edit_distance(g->word, g->n_word, name, n);
    if (g->n_word >= 4 && n > g->n_word && memcmp(name, g->word, g->n_word) == 0) d = 1; /* only its start was typed */
    if (d >= g->distance || d >= n) return;
    g->name = name, g->n_name = n, g->distance = d;
}

static int unknown_command(app *a, const char *word) {
    guess g = guess_for(word, strlen(word));
    for (size_t i = 0; i < N_COMMANDS; i++) consider(&g, commands[i].name, strlen(commands[i].name));
    if (g.n_name) return fail(a, USAGE, "unknown command \"%s\", did you mean %s?", word, g.name);
    return fail(a, USAGE, "unknown command \"%s\" (rocmforge_cli help lists them)", word);
}

static int unknown_option(app *a, const char *word, size_t n) {
    guess g = guess_for(word, n);
    const uint32_t bit = 1u << (a->cmd - commands);
    const char *name;
    for (const flag *f = flags; f < flags + N_FLAGS; f++) {
        const char *at = f->names;
        for (size_t len; at && (len = next_name(&at, &name)) > 0;) {
            if (f->takes & bit) consider(&g, name, len);
            else if (len == n && memcmp(name, word, n) == 0)
                return fail(a, USAGE, "%.*s is no option of %s (see rocmforge_cli help %s)", (int)n, word, a->cmd->name,
                            a->cmd->name);
        }
    }
    if (g.n_name)
        return fail(a, USAGE, "unknown option \"%.*s\", did you mean %.*s?", (int)n, word, (int)g.n_name, g.name);
    return fail(a, USAGE, "unknown option \"%.*s\" (see rocmforge_cli help %s)", (int)n, word, a->cmd->name);
}

/* ---- values ---- */

/* A value being parsed, and its option as it was typed. */
typedef struct given {
    const flag *f;
    const char *name, *value;
    int n_name;
} given;

/* Parse a number strictly: digits only, in range. */
static int parse_number(app *a, const given *x, uint64_t *count, double *real) {
    static const char *const digits[2] = {"0123456789", "0123456789.eE+-"};
    const flag *f = x->f;
    const char *text = x->value;
    int is_real = f->kind == REAL;
    char *end = NULL;
    errno = 0;
    if (f->kind == LIMIT && strcmp(text, "-1") == 0) return *count = 0, DONE;
    if (is_real) *real = strtod(text, &end);
    else *count = strtoull(text, &end, 10);
    int good = end != text && *end == 0 && text[strspn(text, digits[is_real])] == 0;
    if (is_real) good = good && *real >= (double)f->min && *real <= (double)f->max;
    else good = good && !errno && *count >= (uint64_t)f->min && *count <= f->max;
    if (good) return DONE;
    return fail(a, USAGE, "%.*s: want a %snumber %lld..%llu%s, got \"%s\"", x->n_name, x->name, is_real ? "" : "whole ",
                (long long)f->min, LLU(f->max), f->kind == LIMIT ? " or -1" : "", text);
}

/* Parse a size: 3000000000, 3000M or 3G. */
static int parse_bytes(app *a, const given *x, uint64_t *out) {
    static const char units[] = "kMG";
    const char *text = x->value;
    size_t n = strspn(text, "0123456789");
    const char *at = text[n] ? strchr(units, text[n]) : NULL;
    uint64_t unit = 1;
    for (const char *u = units; at && u <= at; u++) unit *= 1000;
    errno = 0;
    *out = strtoull(text, NULL, 10);
    if (n && !errno && (!text[n] || (at && !text[n + 1])) && *out <= UINT64_MAX / unit) return *out *= unit, DONE;
    return fail(a, USAGE, "%.*s: want bytes, like 500M or 3G, got \"%s\"", x->n_name, x->name, text);
}

static int parse_choice(app *a, const given *x, uint64_t *out) {
    size_t n = strlen(x->value), len;
    *out = 0;
    for (const char *p = x->f->value; *p; p += len + (p[len] == '|'), ++*out) {
        len = strcspn(p, "|");
        if (n == len && memcmp(p, x->value, n) == 0) return DONE;
    }
    return fail(a, USAGE, "%.*s: want %s, got \"%s\"", x->n_name, x->name, x->f->value, x->value);
}

static int parse_value(app *a, const given *x) {
    int code;
    char *target = (char *)&a->o + x->f->target;
    uint64_t count = 1;
    double real = 0;
    switch (x->f->kind) {
    case TEXT: memcpy(target, &x->value, sizeof x->value); return DONE;
    case LIST: {
        texts *list = (texts *)(void *)target;
        if (list->n == LIST_MAX) return fail(a, USAGE, "%.*s: at most %u times", x->n_name, x->name, LIST_MAX);
        list->item[list->n++] = x->value;
        return DONE;
    }
    case REAL:
        if ((code = parse_number(a, x, &count, &real))) return code;
        memcpy(target, &real, sizeof real);
        return DONE;
    case COUNT:
    case LIMIT: code = parse_number(a, x, &count, &real); break;
    case BYTES: code = parse_bytes(a, x, &count); break;
    case CHOICE: code = parse_choice(a, x, &count); break;
    default: code = DONE;
    }
    if (code == DONE) memcpy(target, &count, sizeof count);
    return code;
}

/* An argument that is no option: the model, then the prompt. */
static int parse_plain(app *a, const char *arg) {
    const uint32_t bit = 1u << (a->cmd - commands);
    options *o = &a->o;
    if (((FILES | TEMPLATE) & bit) && !o->gguf) o->gguf = arg;
    else if (((GENERATE | EMBED) & bit) && !o->prompt) o->prompt = arg;
    else return fail(a, USAGE, "unexpected argument \"%s\"", arg);
    return DONE;
}

/* The option that a command knows by this name, or NULL. */
static const flag *find_flag(const command *cmd, const char *arg, size_t n) {
    const char *name;
    for (const flag *f = flags; f < flags + N_FLAGS; f++) {
        const char *at = f->takes & (1u << (cmd - commands)) ? f->names : NULL;
        for (size_t len; at && (len = next_name(&at, &name)) > 0;) if (len == n && memcmp(name, arg, n) == 0) return f;
    }
    return NULL;
}

/* --option VALUE, --option=VALUE, the model's file name or the prompt alone. */
static int parse(app *a, int argc, char **argv) {
    int code;
    const uint32_t bit = 1u << (a->cmd - commands);
    for (int i = 2; i < argc && !a->o.help; i++) {
        const char *arg = argv[i], *equals = arg[0] == '-' ? strchr(arg, '=') : NULL;
        const size_t n = equals ? (size_t)(equals - arg) : strlen(arg);
        if (arg[0] != '-') {
            if ((code = parse_plain(a, arg))) return code;
            continue;
        }
        given x = {find_flag(a->cmd, arg, n), arg, equals ? equals + 1 : NULL, (int)n};
        if (!x.f) return unknown_option(a, arg, n);
        if (x.f->kind == SWITCH && equals)
            return fail(a, USAGE, "%.*s: takes no value, got \"%s\"", (int)n, arg, x.value);
        if (x.f->kind != SWITCH && !x.value && !(x.value = argv[++i])) return fail(a, USAGE, "%s: want a value", arg);
        if ((code = parse_value(a, &x))) return code;
    }
    for (const flag *f = flags; f < flags + N_FLAGS && !a->o.help; f++) {
        const char *text = "";
        if (f->needs & bit) memcpy(&text, (const char *)&a->o + f->target, sizeof text); /* only TEXT is needed */
        if (text) continue;
        if (f->target == AT(gguf)) return fail(a, USAGE, "want a model: rocmforge_cli %s MODEL.gguf", a->cmd->name);
        return fail(a, USAGE, "%s is needed (see rocmforge_cli help %s)", f->names, a->cmd->name);
    }
    return DONE;
}

static const command *find_command(const char *name) {
    if (strcmp(name, "run") == 0) name = "chat";
    for (size_t i = 0; i < N_COMMANDS; i++) if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

static int run(app *a, int argc, char **argv) {
    int code;
    const char *name = argc > 1 ? argv[1] : "";
    if (argc < 2) return fail(a, USAGE, "want a command (rocmforge_cli help lists them)");
    if (strcmp(name, "--version") == 0) return printf("rocmforge_cli %s\n", rf_version()), DONE;
    int help = strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0;
    if (help && argc < 3) return print_help(NULL);
    if (help) name = argv[2];
    const command *cmd = find_command(name);
    if (!cmd) return unknown_command(a, name);
    if (help) return print_help(cmd);
    a->cmd = cmd;
    if ((code = parse(a, argc, argv))) return code;
    return a->o.help ? print_help(cmd) : cmd->run(a);
}

int main(int argc, char **argv) {
    app a = {.o = {.max_tokens = NOT_GIVEN, .bos = 1, .n_prompt = 512, .n_decode = 128, .n_repeat = 3,
                   .peak = 1000000000, .draft_max = 8, .top_k = NOT_GIVEN, .seed = NOT_GIVEN,
                   .penalty_last_n = NOT_GIVEN,
                   .dry_allowed = NOT_GIVEN, .dry_last_n = NOT_GIVEN, .mirostat = NOT_GIVEN, .think = NOT_GIVEN},
             .start = now(), .today = (int64_t)time(NULL)};
    const double not_given = NAN;
    for (const flag *f = flags; f < flags + N_FLAGS; f++)
        if (f->kind == REAL) memcpy((char *)&a.o + f->target, &not_given, sizeof not_given);
    signal(SIGPIPE, SIG_DFL);      /* `| head` ends us without a word                */
    for (int fd = 0; fd < 3; fd++) /* a file opened later must not become stdout     */
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) != fd) return FAILED;
    int code = run(&a, argc, argv);
    int flushed = fflush(stdout) == 0;
    if (code == DONE && (!flushed || ferror(stdout)))
        code = fail(&a, FAILED, "stdout: %s", flushed ? "write error" : strerror(errno));
    close_all(&a);
    return code;
}
