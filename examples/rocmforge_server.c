/* cc -O2 -I. examples/rocmforge_server.c -o rocmforge_server -lmicrohttpd -ljansson -lm -pthread
 *
 * rocmforge_server MODEL.gguf: an HTTP server for many users, with the APIs of OpenAI and Anthropic and a page to chat.
 * Debian: apt-get install libmicrohttpd-dev libjansson-dev. `rocmforge_server --help` lists options.
 *
 * HTTP threads read a request's JSON into a task and suspend the connection. One scheduler thread runs all tasks
 * together (rf_scheduler) and writes what the model says, in the format of the task's API, into the task's output;
 * then it resumes the connection. Embeddings have a thread and a session of their own.
 *
 * What a client sends is untrusted: sizes, depth, numbers and time are bounded, nothing of it becomes a path or a
 * format, and its text becomes no control token. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifndef ROCMFORGE_IMPLEMENTATION_DONE
#define ROCMFORGE_IMPLEMENTATION
#endif
#include "rocmforge.h"

#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEPTH 64           /* of nested JSON                                       */
#define MAX_MESSAGES 4096      /* of a conversation                                    */
#define MAX_STOPS 32           /* stop texts, of MAX_STOP_BYTES each                   */
#define MAX_STOP_BYTES 256
#define MAX_BIASES 4096
#define MAX_TOP_LOGPROBS 20
#define MAX_CALLS 16           /* that an answer may be required to have               */
#define MAX_INPUTS 256         /* prompts or texts to embed, of one request            */
#define MAX_OUTPUT (16u << 20) /* bytes that a client has not read: then it is dropped */
#define UPLOAD_SECONDS 60      /* for a body to arrive                                 */
#define N_HTTP_THREADS 4
#define N_LATENCIES 12

/* ==== bytes and JSON out ==== */

/* Bytes that grow. After a failed allocation they stay as they are, and `failed` says so. */
typedef struct bytes {
    char *data;
    size_t n, capacity;
    int failed;
} bytes;

static void put(bytes *b, const void *data, size_t n) {
    if (b->failed || n == 0) return;
    if (n > b->capacity - b->n) {
        const size_t capacity = 2 * (b->n + n) + 256;
        char *grown = realloc(b->data, capacity);
        if (!grown) {
            b->failed = 1;
            return;
        }
        b->data = grown, b->capacity = capacity;
    }
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

static void put_text(bytes *b, const char *text) { put(b, text, strlen(text)); }

__attribute__((format(printf, 2, 3))) static void put_format(bytes *b, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (n > 0) put(b, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

/* Bytes of the UTF-8 character at p, of n bytes; 0 if there is none. */
static size_t utf8_length(const unsigned char *p, size_t n) {
    const size_t want = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2 : (p[0] & 0xf0) == 0xe0 ? 3
                        : p[0] >= 0xf0 && p[0] < 0xf5 ? 4 : 0;
    if (want == 0 || want > n) return 0;
    for (size_t i = 1; i < want; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f)) return 0; /* overlong, surrogate */
    if ((p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f)) return 0; /* overlong, > U+10FFFF */
    return want;
}

/* A JSON string, without its quotes. Bytes that are no UTF-8 become U+FFFD. */
static void put_escaped(bytes *b, const char *text, size_t n) {
    const unsigned char *p = (const unsigned char *)text;
    size_t plain = 0;
    for (size_t i = 0; i < n;) {
        const size_t length = utf8_length(p + i, n - i);
        if (length > 1 || (length == 1 && p[i] >= 0x20 && p[i] != '"' && p[i] != '\\' && p[i] != 0x7f)) {
            i += length;
            continue;
        }
        put(b, text + plain, i - plain);
        if (length == 0) put_text(b, "\\ufffd");
        else if (p[i] == '\n') put_text(b, "\\n");
        else if (p[i] == '"' || p[i] == '\\') put_format(b, "\\%c", p[i]);
        else put_format(b, "\\u%04x", p[i]);
        plain = ++i;
    }
    put(b, text + plain, n - plain);
}

static void put_string_n(bytes *b, const char *text, size_t n) {
    put_text(b, "\"");
    put_escaped(b, text, n);
    put_text(b, "\"");
}

static void put_string(bytes *b, const char *text) { put_string_n(b, text, strlen(text)); }

/* JSON's numbers are finite. */
static void put_real(bytes *b, double x) { put_format(b, "%.9g", isfinite(x) ? x : x < 0 ? -1e30 : 1e30); }

/* ==== the server ==== */

typedef enum api { API_CHAT, API_COMPLETIONS, API_RESPONSES, API_MESSAGES, API_EMBEDDINGS, API_NONE } api;
static const char *const api_names[] = {"chat_completions", "completions", "responses", "messages", "embeddings"};

typedef struct options {
    const char *model, *device, *host, *alias, *cors, *draft;
    const char *api_keys[64];
    uint32_t n_api_keys, port, n_ctx, n_parallel, n_prefixes, n_batch, n_queue, n_threads, n_connections, n_drafts;
    uint32_t max_body, timeout_seconds, drain_seconds, cache_type, split;
} options;

struct task;

/* All that the threads share. What stands below `lock` is guarded by it; the rest is set before the threads start. */
static struct server {
    options o;
    rf_gguf *file;
    rf_device *device;
    rf_model *model;
    rf_model_info info;
    const rf_tokenizer *tokenizer;
    const rf_chat_template *chat_template;
    rf_chat_template *own_template; /* one that is not the model's                 */
    rf_string source, tool_source;  /* of chat_template; for conversations with tools, or empty */
    rf_sampler_desc sampling;       /* what requests start from                     */
    rf_logit_bias *no_end;          /* [n_no_end] bans the end tokens (ignore_eos)  */
    uint32_t n_no_end;
    rf_session *session;
    rf_scheduler *scheduler;
    uint32_t n_ctx;                 /* tokens of a sequence                         */
    rf_gguf *draft_file;            /* of --draft FILE                              */
    rf_model *draft_models[RF_MTP_HEADS]; /* of that, or the MTP heads; or NULL     */
    rf_session **draft_sessions;    /* [n_drafters, RF_MTP_HEADS] of those          */
    rf_drafter **drafters;          /* [n_drafters], one for each that runs; the first n_idle wait for a request */
    uint32_t n_drafters, n_idle;    /* the scheduler thread's                       */
    int64_t started;
    struct MHD_Daemon *daemon;
    pthread_t scheduler_thread, embed_thread;

    pthread_mutex_t lock;
    pthread_cond_t work;            /* something for the threads in the queues, or stop */
    struct task *inbox, **inbox_end, *embeds, **embeds_end; /* queues, by `next`    */
    struct task *tasks;             /* all that are not ended, by `after`           */
    uint32_t n_tasks, n_choices;    /* those; their choices                         */
    uint32_t n_unsent;              /* answers that a connection has not sent whole */
    int draining, stop;
    uint64_t serial;                /* of ids                                       */
    uint64_t n_requests[API_NONE], n_refused, n_dropped, n_steps;
    uint64_t n_prompt_tokens, n_reused_tokens, n_generated_tokens, n_drafted_tokens, n_accepted_drafts;
    uint64_t n_draft_steps;
    double draft_gain;              /* of the drafter that ended an answer last     */
    uint64_t first_token[N_LATENCIES + 1], between_tokens[N_LATENCIES + 1]; /* histograms */
    double first_token_sum, between_tokens_sum;
} g = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

static const double latencies[N_LATENCIES] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10};

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* "prefix" and 24 hexadecimal digits that no other client can guess. */
static void make_id(char out[48], const char *prefix) {
    unsigned char random[12] = {0};
    if (getrandom(random, sizeof random, 0) < 0) {
        const uint64_t serial = (uint64_t)(seconds() * 1e9);
        memcpy(random, &serial, sizeof serial);
    }
    int n = snprintf(out, 24, "%s", prefix);
    for (size_t i = 0; i < sizeof random; i++) n += snprintf(out + n, 3, "%02x", random[i]);
}

/* ==== tasks ==== */

/* Where the JSON of a call that must come is, {"name": ..., "arguments": ...}; between calls of a list: OUTSIDE. */
typedef enum { CALL_OUTSIDE, CALL_HEAD, CALL_COLON, CALL_ARGUMENTS, CALL_TAIL } call_part;
typedef struct forced_call {
    call_part part;
    int in_string, escaped, n_strings, depth; /* strings of the head that have ended; brackets of the arguments */
    bytes name, text;                         /* of the function, as JSON at first; arguments                   */
    size_t n_sent;                            /* of the arguments                                               */
} forced_call;

/* One answer to a prompt: a request of the scheduler. */
typedef struct choice {
    struct task *task;
    uint32_t index;
    const int32_t *prompt;        /* [n_prompt]                                         */
    uint32_t n_prompt, n_reused, n_generated;
    uint32_t n_thought;           /* of those: what was said with them was a thought    */
    int in_thought;               /* the last piece was one                             */
    rf_sampler sampler;
    rf_answer *answer;            /* splits the text of a chat; else NULL               */
    rf_detokenizer detokenizer;
    bytes held;                   /* text that may become a stop text                   */
    bytes content, thought, calls; /* what was said so far                              */
    uint32_t n_calls;
    char call_id[48];             /* ours, of the last call                             */
    forced_call forced;
    bytes items;                  /* responses, messages: blocks that are complete      */
    bytes block;                  /* text of the open one                               */
    int block_kind;               /* rf_piece_kind, -1: none is open                    */
    uint32_t n_blocks;
    char block_id[48];
    rf_logprob *logprobs;         /* [n_logprobs][1 + n_top]                            */
    size_t n_logprobs, n_logprobs_sent, logprobs_capacity;
    const char *stop_text;        /* the one that ended it, or NULL                     */
    const char *finish;           /* in OpenAI's words                                  */
    int begun, ended, muted;      /* first token came; on_end came; a prefill is fed    */
    rf_drafter *drafter;          /* while it runs, or NULL                             */
    rf_drafter_stats drafts;      /* of the drafter: before it runs, and after it the difference */
    rf_grammar_matcher *matcher;  /* where the answer is in the task's grammar, or NULL */
    double last_token;            /* time of it                                         */
} choice;

/* A request for text, or for embeddings. HTTP threads make it, the scheduler thread works on it until the last choice
 * has ended, and then it belongs to its connection again. */
typedef struct task {
    api api;
    json_t *root;                 /* the body; texts are borrowed from it               */
    struct block { struct block *next; } *blocks; /* task_alloc                         */
    char at[112];                 /* where in the body we are, for messages: "messages[2]." */
    int status;                   /* 200 or of the error                                */
    char error[512], param[128], code[48];
    /* what is asked for */
    rf_chat chat;
    rf_chat_message *messages;
    uint32_t n_messages;
    rf_sampler_desc sampling;
    uint32_t max_tokens, n, n_top;
    json_t *tools;                /* in OpenAI's form, or NULL                          */
    const char *schema;           /* of the answer, or of a call that must come (forced_call) */
    const char *gbnf;             /* the request's own grammar, or NULL                 */
    rf_grammar *grammar;          /* made of either                                     */
    int grammar_is_kept;          /* 1: it belongs to kept_grammars                     */
    int want_logprobs, want_stream, want_usage, no_cache, one_call, forced_call, echo, base64, counting;
    const char *stops[MAX_STOPS];
    uint32_t n_stops;
    char id[48];
    int64_t created;
    rf_embed_text *inputs;        /* [n_inputs] prompts or texts to embed               */
    uint32_t n_inputs;
    choice *choices;              /* [n_choices]                                        */
    uint32_t n_choices, n_events; /* events: of a stream, numbered                      */
    double begin, first, deadline; /* times                                             */
    /* guarded by the server's lock */
    bytes out;
    size_t n_sent;
    uint32_t n_open;              /* choices that have not ended                        */
    int submitted, suspended, gone, timed_out, cancelled, over;
    int fd;
    struct MHD_Connection *connection;
    struct task *next, *after;
} task;

/* Memory that lives as long as the task; NULL sets its error. */
static void *task_alloc(task *t, size_t n, size_t size) {
    struct block *b = size && n > (SIZE_MAX / 2) / size ? NULL : calloc(1, sizeof *b + n * size);
    if (!b) {
        t->status = 500;
        snprintf(t->error, sizeof t->error, "out of memory");
        return NULL;
    }
    b->next = t->blocks;
    t->blocks = b;
    return b + 1;
}

static void choice_free(choice *c) {
    rf_answer_close(c->answer, NULL);
    rf_grammar_matcher_close(c->matcher, NULL);
    free(c->held.data), free(c->content.data), free(c->thought.data), free(c->calls.data);
    free(c->forced.name.data), free(c->forced.text.data);
    free(c->items.data), free(c->block.data), free(c->logprobs);
}

static void task_free(task *t) {
    if (!t) return;
    for (uint32_t i = 0; i < t->n_choices; i++) choice_free(&t->choices[i]);
    while (t->blocks) {
        struct block *b = t->blocks;
        t->blocks = b->next;
        free(b);
    }
    if (!t->grammar_is_kept) rf_grammar_close(t->grammar, NULL);
    json_decref(t->root), json_decref(t->tools);
    free(t->out.data);
    free(t);
}

/* Refuse the request, naming the field. Returns 0. */
__attribute__((format(printf, 4, 5))) static int refuse(task *t, int status, const char *field, const char *format,
                                                        ...) {
    if (t->status != 200) return 0;
    va_list arguments;
    t->status = status;
    va_start(arguments, format);
    vsnprintf(t->error, sizeof t->error, format, arguments);
    va_end(arguments);
    if (field) snprintf(t->param, sizeof t->param, "%s%s", t->at, field);
    return 0;
}

/* A failure of the library. */
static int refuse_result(task *t, const char *field, rf_result r, const rf_error *err) {
    const int ours = r == RF_ERR_MEMORY || r == RF_ERR_DEVICE || r == RF_ERR_IO;
    const int status = ours ? 500 : r == RF_ERR_CANCELLED ? 408 : 400;
    if (r == RF_ERR_CONTEXT_FULL) snprintf(t->code, sizeof t->code, "context_length_exceeded");
    return refuse(t, status, field, "%s", err->text);
}

/* The body of an error, in the API's form. */
static void put_error(bytes *b, api kind, int status, const char *text, const char *param, const char *code) {
    const char *type = status == 401 ? "authentication_error" : status == 403 ? "permission_error"
                       : status == 404 ? "not_found_error" : status == 413 ? "request_too_large"
                       : status == 429 ? "rate_limit_error" : status == 503 ? "overloaded_error"
                       : status < 500 ? "invalid_request_error" : kind == API_MESSAGES ? "api_error" : "server_error";
    put_text(b, kind == API_MESSAGES ? "{\"type\":\"error\",\"error\":{\"type\":" : "{\"error\":{\"type\":");
    put_string(b, type);
    put_text(b, ",\"message\":");
    if (kind == API_MESSAGES && param && *param) {
        put_text(b, "\"");
        put_escaped(b, param, strlen(param));
        put_text(b, ": ");
        put_escaped(b, text, strlen(text));
        put_text(b, "\"");
    } else put_string(b, text);
    put_text(b, ",\"param\":");
    if (param && *param) put_string(b, param);
    else put_text(b, "null");
    put_text(b, ",\"code\":");
    if (code && *code) put_string(b, code);
    else put_text(b, "null");
    put_text(b, "}}");
}

/* ==== fields of the body ==== */

/* Readers of an object's field. A field that is missing or null leaves *out; one of another type or out of range is
 * refused. They return 0 if the request is refused. */
static const json_t *get(const json_t *object, const char *key) {
    const json_t *v = json_object_get(object, key);
    return v && !json_is_null(v) ? v : NULL;
}

static int wrong_type(task *t, const char *key, const char *want) {
    return refuse(t, 400, key, "'%s%s' must be %s", t->at, key, want);
}

static int get_text(task *t, const json_t *o, const char *key, const char **out) {
    const json_t *v = get(o, key);
    if (v && !json_is_string(v)) return wrong_type(t, key, "a string");
    if (v) *out = json_string_value(v);
    return 1;
}

static int get_flag(task *t, const json_t *o, const char *key, int *out) {
    const json_t *v = get(o, key);
    if (v && !json_is_boolean(v)) return wrong_type(t, key, "true or false");
    if (v) *out = json_is_true(v);
    return 1;
}

static int get_real(task *t, const json_t *o, const char *key, const double range[2], double *out) {
    const json_t *v = get(o, key);
    if (v && !json_is_number(v)) return wrong_type(t, key, "a number");
    if (!v) return 1;
    *out = json_number_value(v);
    if (!(*out >= range[0] && *out <= range[1]))
        return refuse(t, 400, key, "'%s%s' is %g, want %g to %g", t->at, key, *out, range[0], range[1]);
    return 1;
}

static int get_int(task *t, const json_t *o, const char *key, const int64_t range[2], int64_t *out) {
    const json_t *v = get(o, key);
    if (v && !json_is_integer(v)) return wrong_type(t, key, "an integer");
    if (!v) return 1;
    *out = json_integer_value(v);
    if (*out < range[0] || *out > range[1])
        return refuse(t, 400, key, "'%s%s' is %lld, want %lld to %lld", t->at, key, (long long)*out,
                      (long long)range[0], (long long)range[1]);
    return 1;
}

static int get_object(task *t, const json_t *o, const char *key, const json_t **out) {
    *out = get(o, key);
    return !*out || json_is_object(*out) || wrong_type(t, key, "an object");
}

static int get_array(task *t, const json_t *o, const char *key, const json_t **out) {
    *out = get(o, key);
    return !*out || json_is_array(*out) || wrong_type(t, key, "an array");
}

/* JSON text of a value, as long as the task lives; NULL sets the task's error. */
static const char *json_text(task *t, const json_t *v) {
    char *dumped = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    char *text = dumped ? task_alloc(t, strlen(dumped) + 1, 1) : NULL;
    if (text) memcpy(text, dumped, strlen(dumped) + 1);
    else refuse(t, 500, NULL, "out of memory");
    free(dumped);
    return text;
}

static const char *copy_text(task *t, const char *text, size_t n) {
    char *copy = task_alloc(t, n + 1, 1);
    if (copy) memcpy(copy, text, n);
    return copy;
}

/* Jansson reads nested values by recursion: bound it before. */
static int depth_is_fine(const char *text, size_t n) {
    int depth = 0, in_string = 0;
    for (size_t i = 0; i < n; i++) {
        if (in_string) {
            if (text[i] == '\\') i++;
            else if (text[i] == '"') in_string = 0;
        } else if (text[i] == '"') in_string = 1;
        else if (text[i] == '[' || text[i] == '{') depth++;
        else if (text[i] == ']' || text[i] == '}') depth--;
        if (depth > MAX_DEPTH) return 0;
    }
    return 1;
}

/* ---- sampling ---- */

#define FIELD(name) offsetof(rf_sampler_desc, name)
static const struct real_field { const char *key; size_t at; double range[2]; } real_fields[] = {
    {"temperature", FIELD(temperature), {0, 100}}, {"top_p", FIELD(top_p), {0, 1}}, {"min_p", FIELD(min_p), {0, 1}},
    {"repeat_penalty", FIELD(repeat_penalty), {0.01, 100}},
    {"frequency_penalty", FIELD(frequency_penalty), {-2, 2}}, {"presence_penalty", FIELD(presence_penalty), {-2, 2}},
    {"xtc_probability", FIELD(xtc_probability), {0, 1}}, {"xtc_threshold", FIELD(xtc_threshold), {0, 1}},
    {"dry_multiplier", FIELD(dry_multiplier), {0, 100}}, {"dry_base", FIELD(dry_base), {1, 100}},
    {"mirostat_tau", FIELD(mirostat_tau), {0, 100}}, {"mirostat_eta", FIELD(mirostat_eta), {0, 1}}};
static const struct int_field { const char *key; size_t at; int64_t range[2]; } int_fields[] = {
    {"top_k", FIELD(top_k), {0, INT32_MAX}}, {"repeat_last_n", FIELD(penalty_last_n), {0, RF_SAMPLER_HISTORY}},
    {"dry_allowed_length", FIELD(dry_allowed_length), {0, INT32_MAX}},
    {"dry_penalty_last_n", FIELD(dry_last_n), {0, INT32_MAX}}, {"mirostat", FIELD(mirostat), {0, 2}}};
#undef FIELD

static int add_bias(task *t, rf_logit_bias *bias, long long token, const json_t *value) {
    const uint32_t n_vocab = g.info.n_vocab;
    if (token < 0 || token >= (long long)n_vocab)
        return refuse(t, 400, "logit_bias", "'logit_bias' names token %lld, want 0 to %u", token, n_vocab - 1);
    if (!json_is_number(value) && !json_is_false(value))
        return refuse(t, 400, "logit_bias", "'logit_bias' of token %lld must be a number", token);
    const double x = json_is_false(value) ? -1e9 : json_number_value(value);
    if (!(fabs(x) <= 1e9)) return refuse(t, 400, "logit_bias", "'logit_bias' of token %lld is out of range", token);
    *bias = (rf_logit_bias){(int32_t)token, (float)(x <= -100 ? -1e9 : x)}; /* -100 bans, as OpenAI has it */
    return 1;
}

/* {"id": bias, ...} or [[id, bias], ...]; ignore_eos bans the end tokens. */
static int read_biases(task *t, const json_t *o) {
    const json_t *v = get(o, "logit_bias"), *pair;
    const char *key;
    int no_end = 0;
    size_t i;
    if (!get_flag(t, o, "ignore_eos", &no_end)) return 0;
    if (v && !json_is_object(v) && !json_is_array(v)) return wrong_type(t, "logit_bias", "an object");
    const size_t n = json_is_object(v) ? json_object_size(v) : json_array_size(v);
    if (n > MAX_BIASES) return refuse(t, 400, "logit_bias", "'logit_bias' has more than %d tokens", MAX_BIASES);
    rf_logit_bias *bias = task_alloc(t, n + g.n_no_end, sizeof *bias);
    uint32_t used = 0;
    if (!bias) return 0;
    if (json_is_object(v))
        json_object_foreach((json_t *)(uintptr_t)v, key, pair) {
            char *end;
            const long long token = strtoll(key, &end, 10);
            if (end == key || *end) return refuse(t, 400, "logit_bias", "'logit_bias' has a key that is no token id");
            if (!add_bias(t, &bias[used++], token, pair)) return 0;
        }
    else
        json_array_foreach(v, i, pair) {
            if (json_array_size(pair) != 2 || !json_is_integer(json_array_get(pair, 0)))
                return refuse(t, 400, "logit_bias", "'logit_bias[%zu]' must be [token id, bias]", i);
            if (!add_bias(t, &bias[used++], json_integer_value(json_array_get(pair, 0)), json_array_get(pair, 1)))
                return 0;
        }
    for (uint32_t k = 0; no_end && k < g.n_no_end; k++) bias[used++] = g.no_end[k];
    t->sampling.bias = bias, t->sampling.n_bias = used;
    return 1;
}

/* A string or an array of strings. */
static int read_stops(task *t, const json_t *o, const char *key) {
    const json_t *v = get(o, key), *item;
    size_t i;
    if (!v) return 1;
    if (!json_is_string(v) && !json_is_array(v)) return wrong_type(t, key, "a string or an array of strings");
    const size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > MAX_STOPS - 1) return refuse(t, 400, key, "'%s' has %zu texts, want up to %d", key, n, MAX_STOPS - 1);
    if (json_is_string(v)) t->stops[t->n_stops++] = json_string_value(v);
    else
        json_array_foreach(v, i, item) {
            if (!json_is_string(item)) return wrong_type(t, key, "a string or an array of strings");
            t->stops[t->n_stops++] = json_string_value(item);
        }
    for (uint32_t k = 0; k < t->n_stops; k++)
        if (!*t->stops[k] || strlen(t->stops[k]) > MAX_STOP_BYTES)
            return refuse(t, 400, key, "'%s' has a text of %zu bytes, want 1 to %d", key, strlen(t->stops[k]),
                          MAX_STOP_BYTES);
    return 1;
}

static int read_seed(task *t, const json_t *o) {
    static const int64_t range[2] = {INT64_MIN, INT64_MAX};
    int64_t seed = -1;
    if (!get_int(t, o, "seed", range, &seed)) return 0;
    if (seed == -1 && getrandom(&t->sampling.seed, sizeof t->sampling.seed, 0) >= 0) return 1;
    t->sampling.seed = (uint64_t)seed;
    return 1;
}

/* What all the APIs for text have in common. */
static int read_sampling(task *t, const json_t *o) {
    char *desc = (char *)&t->sampling;
    t->sampling = g.sampling;
    for (size_t i = 0; i < sizeof real_fields / sizeof real_fields[0]; i++) {
        double x = -1;
        if (!get_real(t, o, real_fields[i].key, real_fields[i].range, &x)) return 0;
        const float value = (float)x;
        if (get(o, real_fields[i].key)) memcpy(desc + real_fields[i].at, &value, sizeof value);
    }
    for (size_t i = 0; i < sizeof int_fields / sizeof int_fields[0]; i++) {
        int64_t x = 0;
        if (!get_int(t, o, int_fields[i].key, int_fields[i].range, &x)) return 0;
        const uint32_t value = (uint32_t)x;
        if (get(o, int_fields[i].key)) memcpy(desc + int_fields[i].at, &value, sizeof value);
    }
    int cache = 1;
    if (!read_seed(t, o) || !read_biases(t, o) || !get_flag(t, o, "stream", &t->want_stream) ||
        !get_flag(t, o, "cache_prompt", &cache))
        return 0;
    t->no_cache = !cache;
    return 1;
}

/* The first of these fields that is there. */
static int read_max_tokens(task *t, const json_t *o, const char *const *keys) {
    static const int64_t range[2] = {1, INT32_MAX};
    for (; *keys; keys++) {
        int64_t n = 0;
        if (!get_int(t, o, *keys, range, &n)) return 0;
        if (n && !t->max_tokens) t->max_tokens = (uint32_t)n;
    }
    return 1;
}

static int read_n(task *t, const json_t *o) {
    const int64_t range[2] = {1, g.o.n_parallel}, one[2] = {1, 1};
    int64_t n = 1, best_of = 1;
    if (!get_int(t, o, "n", range, &n) || (n == 1 && !get_int(t, o, "best_of", one, &best_of))) return 0;
    t->n = (uint32_t)n;
    return 1;
}

static int read_stream_options(task *t, const json_t *o) {
    const json_t *options;
    if (!get_object(t, o, "stream_options", &options)) return 0;
    snprintf(t->at, sizeof t->at, "stream_options.");
    const int ok = get_flag(t, options, "include_usage", &t->want_usage);
    t->at[0] = 0;
    return ok;
}

/* ==== requests ==== */

/* ---- messages ---- */

/* Content of a message: a string, or an array of parts with text, which are joined. What is no text is refused. */
static int read_content(task *t, const json_t *v, const char **out) {
    const json_t *part;
    bytes joined = {0};
    size_t i;
    int ok = 1;
    if (!v || json_is_null(v)) return 1;
    if (json_is_string(v)) return *out = json_string_value(v), 1;
    if (!json_is_array(v)) return wrong_type(t, "content", "a string or an array of parts");
    json_array_foreach(v, i, part) {
        const char *type = "text", *text = NULL;
        ok = ok && (json_is_object(part) || wrong_type(t, "content", "an array of objects")) &&
             get_text(t, part, "type", &type);
        if (!ok) break;
        if (strcmp(type, "text") != 0 && strcmp(type, "input_text") != 0 && strcmp(type, "output_text") != 0 &&
            strcmp(type, "refusal") != 0)
            ok = refuse(t, 400, "content", "'%scontent[%zu]' is a part of type '%.40s', want text", t->at, i, type);
        else if (get_text(t, part, strcmp(type, "refusal") == 0 ? "refusal" : "text", &text) && text)
            put_text(&joined, text);
        else ok = wrong_type(t, "content", "an array of parts that have a text");
    }
    if (ok && !(*out = copy_text(t, joined.data ? joined.data : "", joined.n))) ok = 0;
    free(joined.data);
    return ok;
}

static int read_calls(task *t, const json_t *list, rf_chat_message *m) {
    const json_t *item, *f;
    size_t i;
    rf_tool_call *calls = task_alloc(t, json_array_size(list), sizeof *calls);
    if (!calls) return 0;
    json_array_foreach(list, i, item) {
        if (!json_is_object(item) || !get_object(t, item, "function", &f) || !get_text(t, item, "id", &calls[i].id) ||
            !get_text(t, f, "name", &calls[i].name))
            return wrong_type(t, "tool_calls", "an array of objects");
        const json_t *arguments = get(f, "arguments");
        calls[i].arguments = json_is_string(arguments) ? json_string_value(arguments)
                             : json_is_object(arguments) ? json_text(t, arguments) : NULL;
        if (!calls[i].name || !calls[i].arguments)
            return refuse(t, 400, "tool_calls", "'%stool_calls[%zu]' needs a function's name and arguments", t->at, i);
    }
    m->tool_calls = calls, m->n_tool_calls = (uint32_t)json_array_size(list);
    return 1;
}

/* A new message, or NULL. */
static rf_chat_message *add_message(task *t, const char *role) {
    if (t->n_messages == MAX_MESSAGES) {
        refuse(t, 400, NULL, "more than %d messages", MAX_MESSAGES);
        return NULL;
    }
    rf_chat_message *m = &t->messages[t->n_messages++];
    *m = (rf_chat_message){.role = role};
    return m;
}

/* A role as templates know it, or NULL. */
static const char *known_role(task *t, const char *role) {
    static const char *const roles[] = {"system", "user", "assistant", "tool", "developer"};
    if (role && strcmp(role, "function") == 0) return "tool";
    for (size_t i = 0; role && i < sizeof roles / sizeof roles[0]; i++) {
        if (strcmp(role, roles[i]) != 0) continue;
        const int known = i != 4 || (g.source.len && memmem(g.source.data, g.source.len, "developer", 9));
        return known ? roles[i] : "system";
    }
    refuse(t, 400, "role", "'%srole' must be system, user, assistant, tool or developer", t->at);
    return NULL;
}

/* An array's element number i is read next: at = "KEY[i]." */
static void set_at(task *t, const char *key, size_t i) { snprintf(t->at, sizeof t->at, "%s[%zu].", key, i); }

static int read_message(task *t, const json_t *v) {
    const char *role = NULL;
    const json_t *calls;
    rf_chat_message *m;
    if (!json_is_object(v)) return wrong_type(t, "role", "a field of an object");
    if (!get_text(t, v, "role", &role) || !(role = known_role(t, role)) || !(m = add_message(t, role))) return 0;
    if (!read_content(t, json_object_get(v, "content"), &m->content) || !get_text(t, v, "name", &m->name) ||
        !get_text(t, v, "reasoning_content", &m->reasoning) || !get_text(t, v, "tool_call_id", &m->tool_call_id) ||
        !get_array(t, v, "tool_calls", &calls) || (calls && !read_calls(t, calls, m)))
        return 0;
    if (!m->content && !m->n_tool_calls) {
        if (strcmp(role, "assistant") != 0) return refuse(t, 400, "content", "'%scontent' is missing", t->at);
        m->content = "";
    }
    return 1;
}

static int read_messages(task *t, const json_t *o, int (*read_one)(task *, const json_t *)) {
    const json_t *list, *v;
    size_t i;
    if (!get_array(t, o, "messages", &list)) return 0;
    if (!json_array_size(list)) return refuse(t, 400, "messages", "'messages' must be an array of one message or more");
    json_array_foreach(list, i, v) {
        set_at(t, "messages", i);
        if (!read_one(t, v)) return 0;
    }
    t->at[0] = 0;
    return 1;
}

/* ---- tools ---- */

/* One tool in OpenAI's form, of a name, a description and a schema that its API calls `parameters`. A new reference. */
static json_t *make_tool(const json_t *v, const char *parameters) {
    const json_t *description = get(v, "description"), *schema = get(v, parameters);
    return json_pack("{s:s, s:{s:O, s:O*, s:o}}", "type", "function", "function", "name", get(v, "name"),
                     "description", description, "parameters",
                     schema ? json_incref((json_t *)(uintptr_t)schema) : json_pack("{s:s, s:{}}", "type", "object",
                                                                                  "properties"));
}

/* Tools of any API in OpenAI's form: `inner` is the field that has a tool's definition, or NULL. */
static int read_tools(task *t, const json_t *o, const char *inner, const char *parameters) {
    const json_t *list, *v, *definition, *schema;
    size_t i;
    int ok = 1;
    if (!get_array(t, o, "tools", &list)) return 0;
    if (!json_array_size(list)) return 1;
    t->tools = json_array();
    json_array_foreach(list, i, v) {
        const char *name = NULL, *description = NULL, *type = "function";
        set_at(t, "tools", i);
        ok = (json_is_object(v) || wrong_type(t, "function", "a field of an object")) && get_text(t, v, "type", &type);
        if (!ok) return 0;
        if (strcmp(type, "function") != 0 && strcmp(type, "custom") != 0)
            return refuse(t, 400, "type", "'%stype' is '%.40s', want 'function'", t->at, type);
        definition = v;
        if (inner && !get_object(t, v, inner, &definition)) return 0;
        if (!definition || !get_text(t, definition, "name", &name) || !name || !*name || strlen(name) > 256)
            return refuse(t, 400, inner ? inner : "name", "'%s%s' needs a name", t->at, inner ? inner : "name");
        if (!get_text(t, definition, "description", &description) || !get_object(t, definition, parameters, &schema))
            return 0;
        if (json_array_append_new(t->tools, make_tool(definition, parameters)) != 0)
            return refuse(t, 500, NULL, "out of memory");
    }
    t->at[0] = 0;
    return 1;
}

static const char *tool_name(const json_t *tool) {
    return json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
}

/* A call must come: the schema of its JSON {"name", "arguments"}, for one tool; for all of them that of a list of
 * calls, unless there must be just one. A new reference. */
static json_t *call_schema(const json_t *tools, const char *only, int one_call) {
    json_t *any = json_array();
    const json_t *tool;
    size_t i;
    json_array_foreach(tools, i, tool) {
        if (only && strcmp(only, tool_name(tool)) != 0) continue;
        json_t *parameters = json_object_get(json_object_get(tool, "function"), "parameters");
        json_t *one = json_pack("{s:s, s:{s:{s:s}, s:O}, s:[ss], s:b}", "type", "object", "properties", "name", "const",
                                tool_name(tool), "arguments", parameters, "required", "name", "arguments",
                                "additionalProperties", 0);
        json_array_append_new(any, one);
    }
    json_t *schema = json_array_size(any) == 1 ? json_incref(json_array_get(any, 0)) : json_pack("{s:O}", "anyOf", any);
    json_decref(any);
    if (only || one_call) return schema;
    return json_pack("{s:s, s:o, s:i, s:i}", "type", "array", "items", schema, "minItems", 1, "maxItems", MAX_CALLS);
}

/* tool_choice: none, auto, required (Anthropic: any), or a tool's name, in any of the APIs' forms. */
static int read_tool_choice(task *t, const json_t *o) {
    const json_t *v = get(o, "tool_choice"), *f;
    const char *choice = "auto", *name = NULL;
    int found = 0, parallel = 1, is_one = 0;
    size_t i;
    if (!get_flag(t, o, "parallel_tool_calls", &parallel)) return 0;
    if (v && !json_is_string(v) && !json_is_object(v)) return wrong_type(t, "tool_choice", "a string or an object");
    if (json_is_string(v)) choice = json_string_value(v);
    else if (v) {
        if (!get_text(t, v, "type", &choice) || !get_object(t, v, "function", &f) ||
            !get_flag(t, v, "disable_parallel_tool_use", &is_one)) return 0;
        if (!get_text(t, f ? f : v, "name", &name)) return 0;
        if (strcmp(choice, "function") == 0 || strcmp(choice, "tool") == 0) choice = "named";
    }
    t->one_call = !parallel || is_one;
    if (strcmp(choice, "any") == 0) choice = "required";
    if (strcmp(choice, "none") == 0) json_decref(t->tools), t->tools = NULL;
    else if (strcmp(choice, "required") == 0 || strcmp(choice, "named") == 0) {
        json_array_foreach(t->tools, i, v) found |= !name || strcmp(name, tool_name(v)) == 0;
        if (!found || (!name && strcmp(choice, "named") == 0))
            return refuse(t, 400, "tool_choice", "'tool_choice' wants a tool that 'tools' does not have");
        json_t *schema = call_schema(t->tools, name, t->one_call);
        t->schema = schema ? json_text(t, schema) : NULL;
        json_decref(schema);
        t->forced_call = 1;
        if (!t->schema) return refuse(t, 500, NULL, "out of memory");
    } else if (strcmp(choice, "auto") != 0)
        return refuse(t, 400, "tool_choice", "'tool_choice' is '%.40s', want none, auto, required or a tool", choice);
    t->chat.tools = t->tools ? json_text(t, t->tools) : NULL;
    return t->status == 200;
}

/* ---- the form of the answer ---- */

/* response_format, or Responses' text.format, where name, schema and strict stand beside the type. */
static int read_format(task *t, const json_t *v, const char *key) {
    const json_t *inner, *schema;
    const char *type = NULL;
    if (!v) return 1;
    if (!json_is_object(v)) return wrong_type(t, key, "an object");
    if (!get_text(t, v, "type", &type) || !type) return wrong_type(t, key, "an object with a type");
    if (strcmp(type, "text") == 0) return 1;
    if (t->forced_call) return refuse(t, 400, key, "'%s' does not go with a call that 'tool_choice' requires", key);
    if (strcmp(type, "json_object") == 0) {
        schema = get(v, "schema"); /* as llama.cpp has it */
        if (schema && !json_is_object(schema)) return wrong_type(t, key, "an object with a schema that is an object");
        return (t->schema = schema ? json_text(t, schema) : "{\"type\":\"object\"}") != NULL;
    }
    if (strcmp(type, "json_schema") != 0)
        return refuse(t, 400, key, "'%s.type' is '%.40s', want text, json_object or json_schema", key, type);
    if (!get_object(t, v, "json_schema", &inner)) return 0;
    schema = get(inner ? inner : v, "schema");
    if (!json_is_object(schema)) return refuse(t, 400, key, "'%s' needs a schema that is an object", key);
    return (t->schema = json_text(t, schema)) != NULL;
}

/* Compile what the answer must be. */
static int open_grammar(task *t, const json_t *o) {
    const json_t *schema;
    rf_error err;
    if (!get_text(t, o, "grammar", &t->gbnf) || !get_object(t, o, "json_schema", &schema)) return 0;
    if (t->gbnf && !*t->gbnf) t->gbnf = NULL;
    if (!!t->gbnf + !!schema + !!t->schema > 1)
        return refuse(t, 400, "grammar", "want one of grammar, json_schema, response_format and a required call");
    if (schema && !(t->schema = json_text(t, schema))) return 0;
    if (!t->gbnf && !t->schema) return 1;
    const rf_result r = rf_grammar_open(g.tokenizer, t->gbnf ? RF_GRAMMAR_GBNF : RF_GRAMMAR_JSON_SCHEMA,
                                        rf_string_of(t->gbnf ? t->gbnf : t->schema), NULL, &t->grammar, &err);
    return r == RF_OK || refuse_result(t, t->gbnf ? "grammar" : t->forced_call ? "tools" : "response_format", r, &err);
}

/* ---- prompts ---- */

/* The cancel_fn of tokenizing: a text that takes too long is given up. */
static int is_late(void *user) {
    const task *t = user;
    return seconds() > t->deadline;
}

static int32_t *fit_tokens(task *t, const int32_t *ids, uint32_t n) {
    int32_t *own = task_alloc(t, n, sizeof *own);
    if (own) memcpy(own, ids, n * sizeof *own);
    return own;
}

static int refuse_length(task *t, const char *key, uint32_t n) {
    snprintf(t->code, sizeof t->code, "context_length_exceeded");
    return refuse(t, 400, key, "the prompt has %u tokens, the context holds %u", n, g.n_ctx);
}

/* A prompt's or a text's tokens: a string, or token ids. */
static int read_prompt(task *t, const json_t *v, const char *key, uint32_t limit) {
    const rf_tokenize_desc how = {RF_TOKENIZE_ADD, is_late, t};
    const json_t *id;
    uint32_t n = 0;
    rf_error err = {0};
    rf_result r = RF_OK;
    size_t i;
    int32_t *ids = malloc((limit + 1) * sizeof *ids);
    if (!ids) return refuse(t, 500, NULL, "out of memory");
    if (json_is_string(v))
        r = rf_tokenize_with(g.tokenizer, rf_string_of(json_string_value(v)), &how, ids, limit, &n, &err);
    else {
        n = (uint32_t)json_array_size(v);
        json_array_foreach(v, i, id) {
            if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= g.info.n_vocab) {
                refuse(t, 400, key, "'%s' must be texts or tokens of 0 to %u", key, g.info.n_vocab - 1);
                break;
            }
            if (i < limit) ids[i] = (int32_t)json_integer_value(id);
        }
    }
    if (r == RF_ERR_CAPACITY || n > limit) refuse_length(t, key, n);
    else if (r != RF_OK) refuse_result(t, key, r, &err);
    else if (n == 0) refuse(t, 400, key, "'%s' has no tokens", key);
    else {
        t->inputs[t->n_inputs] = (rf_embed_text){fit_tokens(t, ids, n), n};
        if (t->inputs[t->n_inputs].tokens) t->n_inputs++;
    }
    free(ids);
    return t->status == 200;
}

/* A string, token ids, or an array of either. */
static int read_prompts(task *t, const json_t *o, const char *key, uint32_t limit) {
    const json_t *v = get(o, key), *one;
    size_t i;
    if (!v) return refuse(t, 400, key, "'%s' is missing", key);
    if (!json_is_string(v) && !json_is_array(v)) return wrong_type(t, key, "a string or an array");
    const json_t *first = json_array_get(v, 0);
    const int many = json_is_string(first) || json_is_array(first);
    const size_t n = many ? json_array_size(v) : 1;
    if (n > MAX_INPUTS) return refuse(t, 400, key, "'%s' has %zu texts, want up to %d", key, n, MAX_INPUTS);
    if (!(t->inputs = task_alloc(t, n, sizeof *t->inputs))) return 0;
    if (!many) return read_prompt(t, v, key, limit);
    json_array_foreach(v, i, one) {
        if (!json_is_string(one) && !json_is_array(one)) return wrong_type(t, key, "an array of strings or of tokens");
        if (!read_prompt(t, one, key, limit)) return 0;
    }
    return 1;
}

/* The conversation's tokens, as its template writes it. */
static int format_chat(task *t) {
    rf_error err = {0};
    uint32_t n = 0;
    int32_t *ids = malloc(((size_t)g.n_ctx + 1) * sizeof *ids);
    if (!ids) return refuse(t, 500, NULL, "out of memory");
    if (!(t->inputs = task_alloc(t, 1, sizeof *t->inputs))) {
        free(ids);
        return 0;
    }
    t->chat.chat_template = g.chat_template;
    t->chat.messages = t->messages, t->chat.n_messages = t->n_messages;
    t->chat.open_answer = 1;
    t->chat.now = t->created;
    t->chat.cancel_fn = is_late, t->chat.cancel_user = t;
    const rf_result r = rf_chat_tokenize(g.tokenizer, &t->chat, RF_TOKENIZE_ADD, ids, g.n_ctx, &n, &err);
    if (r == RF_ERR_CAPACITY) refuse_length(t, "messages", n);
    else if (r != RF_OK) refuse_result(t, "messages", r, &err);
    else if (n == 0) refuse(t, 400, "messages", "the prompt has no tokens");
    else if ((t->inputs[0].tokens = fit_tokens(t, ids, n))) t->inputs[0].n_tokens = n, t->n_inputs = 1;
    free(ids);
    return t->status == 200;
}

/* What a chat's template gets besides messages and tools. */
static int read_chat_options(task *t, const json_t *o) {
    const json_t *extra;
    int go_on = 0;
    if (!get_text(t, o, "reasoning_effort", &t->chat.effort) || !get_object(t, o, "chat_template_kwargs", &extra) ||
        !get_flag(t, o, "continue_final_message", &go_on))
        return 0;
    if (extra && !(t->chat.extra = json_text(t, extra))) return 0;
    if (t->chat.effort && strcmp(t->chat.effort, "none") == 0)
        t->chat.effort = NULL, t->chat.thinking = RF_THINKING_OFF;
    rf_chat_message *last = &t->messages[t->n_messages - 1];
    if (go_on && strcmp(last->role, "assistant") == 0 && last->content && *last->content && t->n_messages > 1)
        t->chat.prefill = last->content, t->n_messages--;
    return 1;
}

/* ---- the APIs ---- */

static int read_chat(task *t, const json_t *o) {
    static const char *const max[] = {"max_completion_tokens", "max_tokens", NULL};
    static const int64_t top_range[2] = {0, MAX_TOP_LOGPROBS};
    int64_t top = 0;
    if (!read_messages(t, o, read_message) || !read_tools(t, o, "function", "parameters") || !read_tool_choice(t, o) ||
        !read_format(t, get(o, "response_format"), "response_format") || !read_chat_options(t, o) ||
        !read_sampling(t, o) || !read_stops(t, o, "stop") || !read_max_tokens(t, o, max) || !read_n(t, o) ||
        !read_stream_options(t, o) || !get_flag(t, o, "logprobs", &t->want_logprobs) ||
        !get_int(t, o, "top_logprobs", top_range, &top))
        return 0;
    if (top && !t->want_logprobs) return refuse(t, 400, "top_logprobs", "'top_logprobs' needs 'logprobs' to be true");
    t->n_top = (uint32_t)top;
    make_id(t->id, "chatcmpl-");
    return format_chat(t) && open_grammar(t, o);
}

static int read_completion(task *t, const json_t *o) {
    static const char *const max[] = {"max_tokens", "n_predict", NULL};
    static const int64_t top_range[2] = {0, MAX_TOP_LOGPROBS};
    int64_t top = -1;
    if (!read_sampling(t, o) || !read_stops(t, o, "stop") || !read_max_tokens(t, o, max) || !read_n(t, o) ||
        !read_stream_options(t, o) || !get_flag(t, o, "echo", &t->echo) ||
        !read_format(t, get(o, "response_format"), "response_format") ||
        !get_int(t, o, "logprobs", top_range, &top))
        return 0;
    if (get(o, "suffix")) return refuse(t, 400, "suffix", "'suffix' is not supported");
    t->want_logprobs = top >= 0;
    t->n_top = top > 0 ? (uint32_t)top : 0;
    if (!t->max_tokens) t->max_tokens = 16; /* OpenAI's default here */
    make_id(t->id, "cmpl-");
    return read_prompts(t, o, "prompt", g.n_ctx) && open_grammar(t, o);
}

/* An item of the Responses API's input. */
static int read_item(task *t, const json_t *v) {
    const char *type = "message", *name = NULL, *arguments = NULL, *id = NULL;
    rf_chat_message *m, *last = t->n_messages ? &t->messages[t->n_messages - 1] : NULL;
    if (!json_is_object(v)) return wrong_type(t, "type", "a field of an object");
    if (!get_text(t, v, "type", &type)) return 0;
    if (strcmp(type, "message") == 0) return read_message(t, v);
    if (strcmp(type, "reasoning") == 0) return 1; /* encrypted or summed up: nothing that a template wants */
    if (!get_text(t, v, "call_id", &id)) return 0;
    if (strcmp(type, "function_call_output") == 0) {
        if (!(m = add_message(t, "tool")) || !read_content(t, json_object_get(v, "output"), &m->content)) return 0;
        m->tool_call_id = id;
        return m->content && id ? 1 : refuse(t, 400, "output", "'%soutput' and call_id must be strings", t->at);
    }
    if (strcmp(type, "function_call") != 0)
        return refuse(t, 400, "type", "'%stype' is '%.40s', want message, function_call, ...", t->at, type);
    if (!get_text(t, v, "name", &name) || !get_text(t, v, "arguments", &arguments)) return 0;
    if (!name || !arguments) return refuse(t, 400, "name", "'%sname' and arguments must be strings", t->at);
    if (!last || strcmp(last->role, "assistant") != 0) last = add_message(t, "assistant");
    rf_tool_call *calls = last ? task_alloc(t, last->n_tool_calls + 1, sizeof *calls) : NULL;
    if (!calls) return 0;
    if (last->n_tool_calls) memcpy(calls, last->tool_calls, last->n_tool_calls * sizeof *calls);
    calls[last->n_tool_calls++] = (rf_tool_call){id, name, arguments};
    last->tool_calls = calls;
    return 1;
}

static int read_responses(task *t, const json_t *o) {
    static const char *const max[] = {"max_output_tokens", NULL};
    const char *instructions = NULL;
    const json_t *input = get(o, "input"), *text, *reasoning, *v;
    rf_chat_message *m;
    size_t i;
    if (get(o, "previous_response_id"))
        return refuse(t, 400, "previous_response_id", "responses are not kept: give the whole conversation as 'input'");
    if (!get_text(t, o, "instructions", &instructions) || !get_object(t, o, "text", &text) ||
        !get_object(t, o, "reasoning", &reasoning))
        return 0;
    if (instructions && (m = add_message(t, "system"))) m->content = instructions;
    if (!json_is_string(input) && !json_array_size(input)) return wrong_type(t, "input", "a string or an array");
    if (json_is_string(input)) {
        if (!(m = add_message(t, "user"))) return 0;
        m->content = json_string_value(input);
    } else
        json_array_foreach(input, i, v) {
            set_at(t, "input", i);
            if (!read_item(t, v)) return 0;
        }
    t->at[0] = 0;
    if (!t->n_messages) return refuse(t, 400, "input", "'input' has no message");
    if (!read_tools(t, o, NULL, "parameters") || !read_tool_choice(t, o) || !read_chat_options(t, o) ||
        !read_format(t, get(text, "format"), "text.format") || !read_sampling(t, o) || !read_stops(t, o, "stop") ||
        !read_max_tokens(t, o, max) || !get_text(t, reasoning, "effort", &t->chat.effort))
        return 0;
    t->n = 1;
    make_id(t->id, "resp_");
    return format_chat(t) && open_grammar(t, o);
}

/* A message of Anthropic's form: results of tools become messages of their own, before the rest. */
static int read_blocks(task *t, const json_t *v) {
    const json_t *list = json_object_get(v, "content"), *b, *input;
    const char *role = NULL;
    bytes text = {0}, thought = {0};
    rf_chat_message own = {0}, *m;
    size_t i;
    if (!get_text(t, v, "role", &role) || !(role = known_role(t, role))) return 0;
    if (!json_is_array(list)) return read_message(t, v);
    rf_tool_call *calls = task_alloc(t, json_array_size(list), sizeof *calls);
    json_array_foreach(list, i, b) {
        const char *type = "", *part = NULL, *id = NULL;
        if (!calls || !get_text(t, b, "type", &type)) break;
        if (strcmp(type, "text") == 0 && get_text(t, b, "text", &part) && part) put_text(&text, part);
        else if (strcmp(type, "thinking") == 0 && get_text(t, b, "thinking", &part) && part) put_text(&thought, part);
        else if (strcmp(type, "redacted_thinking") == 0) continue;
        else if (strcmp(type, "tool_use") == 0 && get_text(t, b, "id", &id) && get_text(t, b, "name", &part) && part &&
                 get_object(t, b, "input", &input) && input)
            calls[own.n_tool_calls++] = (rf_tool_call){id, part, json_text(t, input)};
        else if (strcmp(type, "tool_result") == 0 && get_text(t, b, "tool_use_id", &id) && id &&
                 (m = add_message(t, "tool"))) {
            m->tool_call_id = id, m->content = "";
            if (!read_content(t, json_object_get(b, "content"), &m->content)) break;
        } else refuse(t, 400, "content", "'%scontent[%zu]' is a block of no type known here, or malformed", t->at, i);
        if (t->status != 200) break;
    }
    if (t->status == 200 && (text.n || thought.n || own.n_tool_calls) && (m = add_message(t, role))) {
        m->content = copy_text(t, text.data ? text.data : "", text.n);
        m->reasoning = thought.n ? copy_text(t, thought.data, thought.n) : NULL;
        m->tool_calls = calls, m->n_tool_calls = own.n_tool_calls;
    }
    free(text.data), free(thought.data);
    return t->status == 200;
}

static int read_anthropic(task *t, const json_t *o) {
    static const char *const max[] = {"max_tokens", NULL};
    const json_t *thinking;
    const char *kind = "";
    rf_chat_message *m = NULL;
    if (get(o, "system")) {
        if (!(m = add_message(t, "system")) || !read_content(t, get(o, "system"), &m->content)) return 0;
    }
    if (!read_messages(t, o, read_blocks) || !read_max_tokens(t, o, max)) return 0;
    if (!t->n_messages || (m && t->n_messages == 1)) return refuse(t, 400, "messages", "'messages' has no content");
    if (!t->max_tokens && !t->counting) return refuse(t, 400, "max_tokens", "'max_tokens' is missing");
    if (!read_tools(t, o, NULL, "input_schema") || !read_tool_choice(t, o) || !read_chat_options(t, o) ||
        !read_sampling(t, o) || !read_stops(t, o, "stop_sequences") || !get_object(t, o, "thinking", &thinking) ||
        !get_text(t, thinking, "type", &kind))
        return 0;
    if (strcmp(kind, "enabled") == 0) t->chat.thinking = RF_THINKING_ON;
    if (strcmp(kind, "disabled") == 0) t->chat.thinking = RF_THINKING_OFF;
    m = &t->messages[t->n_messages - 1];
    if (strcmp(m->role, "assistant") == 0 && !m->n_tool_calls && t->n_messages > 1)
        t->chat.prefill = m->content, t->n_messages--;
    t->n = 1;
    make_id(t->id, "msg_");
    return format_chat(t) && open_grammar(t, o);
}

static int read_embeddings(task *t, const json_t *o) {
    const int64_t range[2] = {g.info.n_embd_out, g.info.n_embd_out};
    const char *encoding = "float";
    int64_t n = 0;
    if (g.info.pooling == RF_POOL_RANK)
        return refuse(t, 400, "model", "the model is a reranker: it makes scores of texts, no embeddings");
    if (!get_text(t, o, "encoding_format", &encoding) || !get_int(t, o, "dimensions", range, &n)) return 0;
    t->base64 = strcmp(encoding, "base64") == 0;
    if (!t->base64 && strcmp(encoding, "float") != 0)
        return refuse(t, 400, "encoding_format", "'encoding_format' must be float or base64");
    return read_prompts(t, o, "input", g.n_ctx);
}

/* ---- choices ---- */

/* The end of the prompt may have opened a thought; a prefill is fed and not given out. */
static int on_piece(const rf_piece *piece, void *user);

static int open_answer(choice *c) {
    task *t = c->task;
    const rf_string prefill = rf_string_of(t->chat.prefill);
    const uint32_t tail = c->n_prompt < 40 + prefill.len ? c->n_prompt : (uint32_t)(40 + prefill.len);
    rf_detokenizer d = {.tokenizer = g.tokenizer, .started = 1};
    bytes text = {0};
    char piece[1024];
    size_t n;
    rf_error err;
    for (uint32_t i = c->n_prompt - tail; i < c->n_prompt; i++)
        if (rf_detokenize(&d, c->prompt[i], RF_DETOKENIZE_SPECIAL, piece, sizeof piece, &n, NULL) == RF_OK)
            put(&text, piece, n);
    const int ends = prefill.len && text.n >= prefill.len &&
                     memcmp(text.data + text.n - prefill.len, prefill.data, prefill.len) == 0;
    const rf_answer_desc desc = {
        .chat_template = t->chat.tools && g.tool_source.len ? g.tool_source : g.source,
        .prompt = {text.data, text.n - (ends ? prefill.len : 0)}, .tools = rf_string_of(t->chat.tools),
        .on_piece = on_piece, .user = c};
    rf_result r = rf_answer_open(&desc, &c->answer, &err);
    c->muted = 1;
    if (r == RF_OK && ends) r = rf_answer_feed(c->answer, prefill, &err);
    c->muted = 0;
    free(text.data);
    return r == RF_OK || refuse_result(t, NULL, r, &err);
}

static int open_sampler(choice *c) {
    task *t = c->task;
    rf_sampler_desc d = t->sampling;
    rf_error err;
    d.seed += c->index;
    if (t->want_logprobs) {
        d.n_top_logprobs = t->n_top;
        d.logprobs = task_alloc(t, 1 + t->n_top, sizeof *d.logprobs);
        d.logprob_memory = task_alloc(t, g.info.n_vocab, sizeof *d.logprob_memory);
        if (!d.logprobs || !d.logprob_memory) return 0;
    }
    const rf_result r = rf_sampler_init(&c->sampler, &d, &err);
    if (r != RF_OK) return refuse_result(t, NULL, r, &err);
    const uint32_t n = c->n_prompt < RF_SAMPLER_HISTORY ? c->n_prompt : RF_SAMPLER_HISTORY;
    for (uint32_t i = c->n_prompt - n; i < c->n_prompt; i++) rf_sampler_accept(&c->sampler, c->prompt[i]);
    return 1;
}

static int make_choices(task *t) {
    if ((uint64_t)t->n * t->n_inputs > MAX_INPUTS) return refuse(t, 400, "n", "more than %d choices", MAX_INPUTS);
    if (!(t->choices = task_alloc(t, (size_t)t->n * t->n_inputs, sizeof *t->choices))) return 0;
    for (uint32_t i = 0; i < t->n * t->n_inputs; i++) {
        choice *c = &t->choices[t->n_choices++];
        c->task = t, c->index = i, c->block_kind = -1;
        c->prompt = t->inputs[i / t->n].tokens, c->n_prompt = t->inputs[i / t->n].n_tokens;
        c->detokenizer = (rf_detokenizer){.tokenizer = g.tokenizer, .started = 1};
        if (!open_sampler(c) || (t->api != API_COMPLETIONS && !open_answer(c))) return 0;
    }
    t->n_open = t->n_choices;
    return 1;
}

static int read_body(task *t, const json_t *o) {
    switch (t->api) {
    case API_CHAT: return read_chat(t, o) && make_choices(t);
    case API_COMPLETIONS: return read_completion(t, o) && make_choices(t);
    case API_RESPONSES: return read_responses(t, o) && make_choices(t);
    case API_MESSAGES: return read_anthropic(t, o) && (t->counting || make_choices(t));
    case API_EMBEDDINGS: return read_embeddings(t, o);
    default: return 0;
    }
}

/* The body of a request as a task, with its error if it is refused; NULL without memory. */
static task *read_task(api kind, int counting, const char *text, size_t n) {
    static const int64_t seconds_range[2] = {1, 86400};
    json_error_t json_err;
    int64_t limit = g.o.timeout_seconds;
    task *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->api = kind, t->status = 200, t->fd = -1, t->counting = counting;
    t->created = (int64_t)time(NULL);
    t->begin = seconds();
    t->deadline = t->begin + 10; /* until the prompt is tokenized */
    if (!depth_is_fine(text, n)) refuse(t, 400, NULL, "the body is nested deeper than %d", MAX_DEPTH);
    else if (!(t->root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &json_err)))
        refuse(t, 400, NULL, "the body is no JSON: byte %d: %s", json_err.position, json_err.text);
    else if (!json_is_object(t->root)) refuse(t, 400, NULL, "the body must be a JSON object");
    if (t->status != 200 || !(t->messages = task_alloc(t, MAX_MESSAGES, sizeof *t->messages))) return t;
    if (get_int(t, t->root, "timeout_seconds", seconds_range, &limit) && read_body(t, t->root))
        t->deadline = t->begin + (double)(limit < g.o.timeout_seconds ? limit : g.o.timeout_seconds);
    return t;
}

/* ==== answers out ====
 * Run by the scheduler thread, with its own `line`. Each API has a format: begin, a piece, the end of a choice, and the
 * end of the task. A stream sends each piece as an event; without one the body is made at the end. */

static bytes line;

/* Wake the connection of a task; the lock is held. */
static void wake(task *t) {
    if (!t->suspended) return;
    t->suspended = 0;
    MHD_resume_connection(t->connection);
}

/* Send the line. A client that does not read is dropped. */
static void send_line(task *t) {
    pthread_mutex_lock(&g.lock);
    put(&t->out, line.data, line.n);
    if (t->out.failed || line.failed || t->out.n - t->n_sent > MAX_OUTPUT) t->gone = 1;
    wake(t);
    pthread_mutex_unlock(&g.lock);
    line.n = 0, line.failed = 0;
}

/* An event of a stream: its data follow, then event_end. */
static void event_begin(task *t, const char *name) {
    if (name) put_format(&line, "event: %s\ndata: {\"type\":\"%s\",", name, name);
    else put_text(&line, "data: {");
    if (t->api == API_RESPONSES) put_format(&line, "\"sequence_number\":%u,", t->n_events++);
}

static void event_end(task *t) {
    put_text(&line, "}\n\n");
    send_line(t);
}

static void put_field(bytes *b, const char *key, const char *value) {
    put_format(b, "\"%s\":", key);
    put_string(b, value);
}

static void put_bytes(bytes *b, const char *key, const bytes *value) {
    put_format(b, "\"%s\":", key);
    put_string_n(b, value->data ? value->data : "", value->n);
}

/* ---- log probabilities ---- */

static size_t token_text(int32_t token, char text[1024]) {
    rf_detokenizer d = {.tokenizer = g.tokenizer, .started = 1};
    size_t n = 0;
    const uint32_t flags = RF_DETOKENIZE_SPECIAL | RF_DETOKENIZE_FINISH;
    return rf_detokenize(&d, token, flags, text, 1024, &n, NULL) == RF_OK ? n : 0;
}

/* {"token", "logprob", "bytes"} without the closing brace. */
static void put_logprob(bytes *b, const rf_logprob *p) {
    char text[1024];
    const size_t n = token_text(p->token, text);
    put_text(b, "{\"token\":");
    put_string_n(b, text, n);
    put_text(b, ",\"logprob\":");
    put_real(b, p->logprob);
    put_text(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++) put_format(b, "%s%u", i ? "," : "", (unsigned char)text[i]);
    put_text(b, "]");
}

static void put_chat_logprobs(bytes *b, const choice *c, size_t from) {
    const size_t width = 1 + c->task->n_top;
    put_text(b, "{\"content\":[");
    for (size_t i = from; i < c->n_logprobs; i++) {
        const rf_logprob *p = c->logprobs + i * width;
        if (i > from) put_text(b, ",");
        put_logprob(b, p);
        put_text(b, ",\"top_logprobs\":[");
        for (size_t k = 1; k < width && p[k].token >= 0; k++) {
            if (k > 1) put_text(b, ",");
            put_logprob(b, p + k);
            put_text(b, "}");
        }
        put_text(b, "]}");
    }
    put_text(b, "],\"refusal\":null}");
}

/* The older form, of /v1/completions. */
static void put_completion_logprobs(bytes *b, const choice *c, size_t from) {
    const size_t width = 1 + c->task->n_top;
    char text[1024];
    static const char *const keys[] = {"{\"tokens\":[", "],\"token_logprobs\":[", "],\"top_logprobs\":[",
                                       "],\"text_offset\":["};
    size_t offset = 0;
    for (size_t i = 0; i < from; i++) offset += token_text(c->logprobs[i * width].token, text);
    for (int part = 0; part < 4; part++) {
        put_text(b, keys[part]);
        for (size_t i = from; i < c->n_logprobs; i++) {
            const rf_logprob *p = c->logprobs + i * width;
            const size_t n = token_text(p->token, text);
            if (i > from) put_text(b, ",");
            if (part == 0) put_string_n(b, text, n);
            else if (part == 1) put_real(b, p->logprob);
            else if (part == 3) put_format(b, "%zu", offset), offset += n;
            for (size_t k = 1; part == 2 && k < width && p[k].token >= 0; k++) {
                put_text(b, k == 1 ? "{" : ",");
                put_string_n(b, text, token_text(p[k].token, text));
                put_text(b, ":");
                put_real(b, p[k].logprob);
            }
            if (part == 2) put_text(b, width > 1 ? "}" : "null");
        }
    }
    put_text(b, "]}");
}

static void put_logprobs(bytes *b, choice *c) {
    put_text(b, "\"logprobs\":");
    if (!c->task->want_logprobs) put_text(b, "null");
    else if (c->task->api == API_CHAT) put_chat_logprobs(b, c, c->n_logprobs_sent);
    else put_completion_logprobs(b, c, c->n_logprobs_sent);
    c->n_logprobs_sent = c->n_logprobs;
}

/* ---- OpenAI: chat and text completions ---- */

static void count_tokens(const task *t, uint64_t sums[6]) {
    memset(sums, 0, 6 * sizeof *sums);
    for (uint32_t i = 0; i < t->n_choices; i++) {
        const choice *c = &t->choices[i];
        if (i % t->n == 0) sums[0] += c->n_prompt, sums[1] += c->n_reused;
        sums[2] += c->n_generated, sums[3] += c->n_thought;
        sums[4] += c->drafts.drafted, sums[5] += c->drafts.accepted;
    }
}

static void put_usage(bytes *b, const task *t) {
    uint64_t n[6];
    count_tokens(t, n);
    put_format(b, "\"usage\":{\"prompt_tokens\":%" PRIu64 ",\"completion_tokens\":%" PRIu64 ",\"total_tokens\":%" PRIu64
               ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRIu64 "},\"completion_tokens_details\":"
               "{\"reasoning_tokens\":%" PRIu64, n[0], n[2], n[0] + n[2], n[1], n[3]);
    if (g.o.draft)
        put_format(b, ",\"accepted_prediction_tokens\":%" PRIu64 ",\"rejected_prediction_tokens\":%" PRIu64, n[5],
                   n[4] - n[5]);
    put_text(b, "}}");
    const double now = seconds(), prompt = t->first - t->begin, rest = now - t->first;
    const double rate = n[2] > 1 && rest > 0 ? (double)(n[2] - 1) / rest : 0;
    put_format(b, ",\"timings\":{\"prompt_n\":%" PRIu64 ",\"prompt_ms\":%.3f,\"cache_n\":%" PRIu64, n[0] - n[1],
               1e3 * prompt, n[1]);
    put_format(b, ",\"predicted_n\":%" PRIu64 ",\"predicted_ms\":%.3f,\"predicted_per_second\":%.3f}", n[2], 1e3 * rest,
               rate);
}

static void put_head(bytes *b, const task *t, const char *object) {
    put_format(b, "\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,", t->id, object, (long long)t->created);
    put_field(b, "model", g.o.alias);
}

static void chunk_begin(choice *c) {
    event_begin(c->task, NULL);
    put_head(&line, c->task, c->task->api == API_CHAT ? "chat.completion.chunk" : "text_completion");
    put_format(&line, ",\"choices\":[{\"index\":%u,", c->index);
}

static void chunk_end(choice *c, const char *finish) {
    put_text(&line, ",");
    put_logprobs(&line, c);
    put_text(&line, ",\"finish_reason\":");
    if (finish) put_string(&line, finish);
    else put_text(&line, "null");
    put_text(&line, "}]");
    event_end(c->task);
}

/* The id that the model wrote, else ours. */
static void put_call_id(bytes *b, const rf_piece *p, const char *id) {
    if (p->id.len) put_string_n(b, p->id.data, p->id.len);
    else put_string(b, id);
}

static void put_call(bytes *b, const rf_piece *p, const char *id, int whole) {
    put_text(b, "\"id\":");
    put_call_id(b, p, id);
    put_text(b, ",\"type\":\"function\",\"function\":{\"name\":");
    put_string_n(b, p->name.data, p->name.len);
    put_text(b, ",\"arguments\":");
    put_string_n(b, p->text.data, whole ? p->text.len : 0);
    put_text(b, "}}");
}

/* A call is given out in three steps: it begins, with its name; goes on, with more of its arguments, any number of
 * times; and ends, with all of them. */
typedef enum { CALL_BEGINS, CALL_GOES_ON, CALL_ENDS } call_step;

static void chat_call(choice *c, const rf_piece *p, call_step step) {
    if (step == CALL_BEGINS) make_id(c->call_id, "call_");
    if (!c->task->want_stream && step == CALL_ENDS) {
        put_text(&c->calls, c->calls.n ? ",{" : "{");
        put_call(&c->calls, p, c->call_id, 1);
    }
    if (!c->task->want_stream || step == CALL_ENDS) return;
    chunk_begin(c);
    put_format(&line, "\"delta\":{\"tool_calls\":[{\"index\":%u,", c->n_calls - 1);
    if (step == CALL_BEGINS) put_call(&line, p, c->call_id, 0);
    else {
        put_text(&line, "\"function\":{\"arguments\":");
        put_string_n(&line, p->text.data, p->text.len);
        put_text(&line, "}}");
    }
    put_text(&line, "]}");
    chunk_end(c, NULL);
}

static void chat_begin(choice *c) {
    if (!c->task->want_stream) return;
    chunk_begin(c);
    put_text(&line, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}");
    chunk_end(c, NULL);
}

static void chat_piece(choice *c, const rf_piece *p) {
    const int thought = p->kind == RF_PIECE_THOUGHT;
    if (!c->task->want_stream) {
        put(thought ? &c->thought : &c->content, p->text.data, p->text.len);
        return;
    }
    chunk_begin(c);
    put_format(&line, "\"delta\":{\"%s\":", thought ? "reasoning_content" : "content");
    put_string_n(&line, p->text.data, p->text.len);
    put_text(&line, "}");
    chunk_end(c, NULL);
}

static void chat_end(choice *c) {
    if (!c->task->want_stream) return;
    chunk_begin(c);
    put_text(&line, "\"delta\":{}");
    chunk_end(c, c->finish);
}

static void put_message(bytes *b, const choice *c) {
    put_text(b, "\"message\":{\"role\":\"assistant\",\"refusal\":null,");
    if (c->content.n || !c->calls.n) put_bytes(b, "content", &c->content);
    else put_text(b, "\"content\":null");
    put_text(b, c->thought.n ? "," : "");
    if (c->thought.n) put_bytes(b, "reasoning_content", &c->thought);
    if (c->calls.n) {
        put_text(b, ",\"tool_calls\":[");
        put(b, c->calls.data, c->calls.n);
        put_text(b, "]");
    }
    put_text(b, "}");
}

static void openai_done(task *t) {
    const int chat = t->api == API_CHAT;
    if (t->want_stream) {
        if (t->want_usage) {
            event_begin(t, NULL);
            put_head(&line, t, chat ? "chat.completion.chunk" : "text_completion");
            put_text(&line, ",\"choices\":[],");
            put_usage(&line, t);
            event_end(t);
        }
        put_text(&line, "data: [DONE]\n\n");
        send_line(t);
        return;
    }
    put_text(&line, "{");
    put_head(&line, t, chat ? "chat.completion" : "text_completion");
    put_text(&line, ",\"choices\":[");
    for (uint32_t i = 0; i < t->n_choices; i++) {
        choice *c = &t->choices[i];
        put_format(&line, "%s{\"index\":%u,", i ? "," : "", i);
        if (chat) put_message(&line, c);
        else put_bytes(&line, "text", &c->content);
        put_text(&line, ",");
        put_logprobs(&line, c);
        put_text(&line, ",");
        put_field(&line, "finish_reason", c->finish);
        put_text(&line, "}");
    }
    put_text(&line, "],");
    put_usage(&line, t);
    put_text(&line, "}");
    send_line(t);
}

static void completion_piece(choice *c, const rf_piece *p) {
    if (!c->task->want_stream) {
        put(&c->content, p->text.data, p->text.len);
        return;
    }
    chunk_begin(c);
    put_text(&line, "\"text\":");
    put_string_n(&line, p->text.data, p->text.len);
    chunk_end(c, NULL);
}

/* echo: the prompt's text comes first. */
static void completion_begin(choice *c) {
    rf_detokenizer d = {.tokenizer = g.tokenizer};
    char piece[1024];
    size_t n;
    bytes text = {0};
    for (uint32_t i = 0; c->task->echo && i < c->n_prompt; i++)
        if (rf_detokenize(&d, c->prompt[i], 0, piece, sizeof piece, &n, NULL) == RF_OK) put(&text, piece, n);
    const rf_piece p = {.kind = RF_PIECE_ANSWER, .text = {text.data, text.n}};
    if (text.n) completion_piece(c, &p);
    free(text.data);
}

static void completion_end(choice *c) {
    if (!c->task->want_stream) return;
    chunk_begin(c);
    put_text(&line, "\"text\":\"\"");
    chunk_end(c, c->finish);
}

/* ---- OpenAI: responses ---- */

/* The fields that an item of a block begins with; its content is empty, or all of it. */
static void put_item(bytes *b, const choice *c, int whole) {
    const bytes none = {0}, *text = whole ? &c->block : &none;
    const int thought = c->block_kind == RF_PIECE_THOUGHT;
    put_format(b, "{\"id\":\"%s\",\"type\":\"%s\",\"status\":\"%s\",", c->block_id, thought ? "reasoning" : "message",
               whole ? "completed" : "in_progress");
    put_text(b, thought ? "\"summary\":[],\"content\":[" : "\"role\":\"assistant\",\"content\":[");
    if (whole) {
        put_text(b, thought ? "{\"type\":\"reasoning_text\","
                            : "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[],");
        put_bytes(b, "text", text);
        put_text(b, "}");
    }
    put_text(b, "]}");
}

static void put_place(const choice *c) {
    put_format(&line, "\"item_id\":\"%s\",\"output_index\":%u,\"content_index\":0,", c->block_id, c->n_blocks);
}

static void put_part(const choice *c, const char *event) {
    event_begin(c->task, event);
    put_place(c);
    put_text(&line, c->block_kind == RF_PIECE_THOUGHT ? "\"part\":{\"type\":\"reasoning_text\","
                                                      : "\"part\":{\"type\":\"output_text\",\"annotations\":[],");
    put_bytes(&line, "text", &c->block);
    put_text(&line, "}");
    event_end(c->task);
}

static void send_item(const choice *c, const char *event, const bytes *item) {
    if (!c->task->want_stream) return;
    event_begin(c->task, event);
    put_format(&line, "\"output_index\":%u,\"item\":", c->n_blocks);
    put(&line, item->data, item->n);
    event_end(c->task);
}

/* The block is complete: keep it. */
static void keep_item(choice *c, const bytes *item) {
    if (c->items.n) put_text(&c->items, ",");
    put(&c->items, item->data, item->n);
    c->n_blocks++;
    c->block.n = 0;
    c->block_kind = -1;
}

static void responses_close(choice *c) {
    task *t = c->task;
    bytes item = {0};
    if (c->block_kind < 0) return;
    const int thought = c->block_kind == RF_PIECE_THOUGHT;
    put_item(&item, c, 1);
    if (t->want_stream) {
        event_begin(t, thought ? "response.reasoning_text.done" : "response.output_text.done");
        put_place(c);
        if (!thought) put_text(&line, "\"logprobs\":[],");
        put_bytes(&line, "text", &c->block);
        event_end(t);
        put_part(c, "response.content_part.done");
        send_item(c, "response.output_item.done", &item);
    }
    keep_item(c, &item);
    free(item.data);
}

static void responses_open(choice *c, int kind) {
    bytes item = {0};
    responses_close(c);
    c->block_kind = kind;
    make_id(c->block_id, kind == RF_PIECE_THOUGHT ? "rs_" : "msg_");
    put_item(&item, c, 0);
    send_item(c, "response.output_item.added", &item);
    if (c->task->want_stream) put_part(c, "response.content_part.added");
    free(item.data);
}

static void put_function_call(bytes *b, const choice *c, const rf_piece *p, const char *call_id, int whole) {
    put_format(b, "{\"id\":\"%s\",\"type\":\"function_call\",\"status\":\"%s\",\"call_id\":", c->block_id,
               !whole ? "in_progress" : c->forced.part == CALL_ARGUMENTS ? "incomplete" : "completed");
    if (p->id.len) put_string_n(b, p->id.data, p->id.len);
    else put_string(b, call_id);
    put_text(b, ",\"name\":");
    put_string_n(b, p->name.data, p->name.len);
    put_text(b, ",\"arguments\":");
    put_string_n(b, p->text.data, whole ? p->text.len : 0);
    put_text(b, "}");
}

static void responses_call(choice *c, const rf_piece *p, call_step step) {
    task *t = c->task;
    bytes item = {0};
    if (step == CALL_BEGINS) {
        responses_close(c);
        make_id(c->block_id, "fc_");
        make_id(c->call_id, "call_");
        put_function_call(&item, c, p, c->call_id, 0);
        send_item(c, "response.output_item.added", &item);
    } else if (t->want_stream) {
        const int done = step == CALL_ENDS;
        event_begin(t, done ? "response.function_call_arguments.done" : "response.function_call_arguments.delta");
        put_format(&line, "\"item_id\":\"%s\",\"output_index\":%u,\"%s\":", c->block_id, c->n_blocks,
                   done ? "arguments" : "delta");
        put_string_n(&line, p->text.data, p->text.len);
        event_end(t);
    }
    if (step == CALL_ENDS) {
        put_function_call(&item, c, p, c->call_id, 1);
        send_item(c, "response.output_item.done", &item);
        keep_item(c, &item);
    }
    free(item.data);
}

/* The response object; c NULL: before its first token. */
static void put_response(bytes *b, const task *t, const choice *c) {
    static const char *const fields[][2] = {{"instructions", "null"}, {"parallel_tool_calls", "true"}, {"tools", "[]"},
                                            {"tool_choice", "\"auto\""}, {"metadata", "{}"}};
    uint64_t n[6];
    const int cut = c && strcmp(c->finish, "length") == 0;
    put_head(b, t, "response");
    put_format(b, ",\"created_at\":%lld,\"status\":\"%s\",\"error\":null,\"incomplete_details\":%s",
               (long long)t->created, !c ? "in_progress" : cut ? "incomplete" : "completed",
               cut ? "{\"reason\":\"max_output_tokens\"}" : "null");
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) { /* as the request has them */
        const json_t *v = get(t->root, fields[i][0]);
        char *json = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
        put_format(b, ",\"%s\":", fields[i][0]);
        put_text(b, json ? json : fields[i][1]);
        free(json);
    }
    put_text(b, ",\"output\":[");
    if (c) put(b, c->items.data, c->items.n);
    put_text(b, "],\"usage\":");
    count_tokens(t, n);
    if (!c) put_text(b, "null");
    else
        put_format(b, "{\"input_tokens\":%" PRIu64 ",\"input_tokens_details\":{\"cached_tokens\":%" PRIu64
                   "},\"output_tokens\":%" PRIu64 ",\"output_tokens_details\":{\"reasoning_tokens\":%" PRIu64
                   "},\"total_tokens\":%" PRIu64 "}", n[0], n[1], n[2], n[3], n[0] + n[2]);
}

static void send_response(task *t, const char *event, const choice *c) {
    event_begin(t, event);
    put_text(&line, "\"response\":{");
    put_response(&line, t, c);
    put_text(&line, "}");
    event_end(t);
}

static void responses_begin(choice *c) {
    if (!c->task->want_stream) return;
    send_response(c->task, "response.created", NULL);
    send_response(c->task, "response.in_progress", NULL);
}

static void responses_piece(choice *c, const rf_piece *p) {
    task *t = c->task;
    if (c->block_kind != (int)p->kind) responses_open(c, (int)p->kind);
    put(&c->block, p->text.data, p->text.len);
    if (!t->want_stream) return;
    event_begin(t, p->kind == RF_PIECE_THOUGHT ? "response.reasoning_text.delta" : "response.output_text.delta");
    put_place(c);
    if (p->kind == RF_PIECE_ANSWER) put_text(&line, "\"logprobs\":[],");
    put_text(&line, "\"delta\":");
    put_string_n(&line, p->text.data, p->text.len);
    event_end(t);
}

static void responses_done(task *t) {
    const choice *c = &t->choices[0];
    const int cut = strcmp(c->finish, "length") == 0;
    if (t->want_stream) {
        send_response(t, cut ? "response.incomplete" : "response.completed", c);
        return;
    }
    put_text(&line, "{");
    put_response(&line, t, c);
    put_text(&line, "}");
    send_line(t);
}

/* ---- Anthropic: messages ---- */

static const char *anthropic_reason(const choice *c) {
    return c->stop_text ? "stop_sequence" : strcmp(c->finish, "length") == 0 ? "max_tokens"
           : strcmp(c->finish, "tool_calls") == 0 ? "tool_use" : "end_turn";
}

/* The message object; whole: with its content and why it ended. */
static void put_anthropic(bytes *b, const choice *c, int whole) {
    put_format(b, "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",", c->task->id);
    put_field(b, "model", g.o.alias);
    put_text(b, ",\"content\":[");
    if (whole) put(b, c->items.data, c->items.n);
    put_text(b, "],\"stop_reason\":");
    if (whole) put_string(b, anthropic_reason(c));
    else put_text(b, "null");
    put_text(b, ",\"stop_sequence\":");
    if (whole && c->stop_text) put_string(b, c->stop_text);
    else put_text(b, "null");
    put_format(b, ",\"usage\":{\"input_tokens\":%u,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":%u,"
               "\"output_tokens\":%u}}", c->n_prompt - c->n_reused, c->n_reused, whole ? c->n_generated : 0);
}

static void messages_begin(choice *c) {
    if (!c->task->want_stream) return;
    event_begin(c->task, "message_start");
    put_text(&line, "\"message\":");
    put_anthropic(&line, c, 0);
    event_end(c->task);
}

static void messages_close(choice *c) {
    bytes item = {0};
    if (c->block_kind < 0) return;
    if (c->block_kind == RF_PIECE_THOUGHT) {
        put_text(&item, "{\"type\":\"thinking\",\"signature\":\"\",");
        put_bytes(&item, "thinking", &c->block);
    } else {
        put_text(&item, "{\"type\":\"text\",");
        put_bytes(&item, "text", &c->block);
    }
    put_text(&item, "}");
    if (c->task->want_stream) {
        event_begin(c->task, "content_block_stop");
        put_format(&line, "\"index\":%u", c->n_blocks);
        event_end(c->task);
    }
    keep_item(c, &item);
    free(item.data);
}

/* {"type": "tool_use", ...}; arguments that are no JSON become {}. */
static void put_tool_use(bytes *b, const rf_piece *p, const char *id, int whole) {
    json_t *input = whole ? json_loadb(p->text.data, p->text.len, 0, NULL) : NULL;
    put_text(b, "{\"type\":\"tool_use\",\"id\":");
    put_call_id(b, p, id);
    put_text(b, ",\"name\":");
    put_string_n(b, p->name.data, p->name.len);
    put_text(b, ",\"input\":");
    if (json_is_object(input)) put(b, p->text.data, p->text.len);
    else put_text(b, "{}");
    put_text(b, "}");
    json_decref(input);
}

static void messages_delta(choice *c, const char *type, const char *key, rf_string text) {
    event_begin(c->task, "content_block_delta");
    put_format(&line, "\"index\":%u,\"delta\":{\"type\":\"%s\",\"%s\":", c->n_blocks, type, key);
    put_string_n(&line, text.data, text.len);
    put_text(&line, "}");
    event_end(c->task);
}

static void messages_call(choice *c, const rf_piece *p, call_step step) {
    task *t = c->task;
    bytes item = {0};
    if (step == CALL_BEGINS) {
        messages_close(c);
        make_id(c->call_id, "toolu_");
    }
    if (step == CALL_GOES_ON && t->want_stream) messages_delta(c, "input_json_delta", "partial_json", p->text);
    if (step != CALL_GOES_ON && t->want_stream) {
        event_begin(t, step == CALL_BEGINS ? "content_block_start" : "content_block_stop");
        put_format(&line, "\"index\":%u", c->n_blocks);
        if (step == CALL_BEGINS) {
            put_text(&line, ",\"content_block\":");
            put_tool_use(&line, p, c->call_id, 0);
        }
        event_end(t);
    }
    if (step != CALL_ENDS) return;
    put_tool_use(&item, p, c->call_id, 1);
    keep_item(c, &item);
    free(item.data);
}

static void messages_piece(choice *c, const rf_piece *p) {
    const int thought = p->kind == RF_PIECE_THOUGHT;
    if (c->block_kind != (int)p->kind) {
        messages_close(c);
        c->block_kind = (int)p->kind;
        if (c->task->want_stream) {
            event_begin(c->task, "content_block_start");
            put_format(&line, "\"index\":%u,\"content_block\":%s", c->n_blocks,
                       thought ? "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"
                               : "{\"type\":\"text\",\"text\":\"\"}");
            event_end(c->task);
        }
    }
    put(&c->block, p->text.data, p->text.len);
    if (!c->task->want_stream) return;
    messages_delta(c, thought ? "thinking_delta" : "text_delta", thought ? "thinking" : "text", p->text);
}

static void messages_done(task *t) {
    const choice *c = &t->choices[0];
    if (!t->want_stream) {
        put_anthropic(&line, c, 1);
        send_line(t);
        return;
    }
    event_begin(t, "message_delta");
    put_format(&line, "\"delta\":{\"stop_reason\":\"%s\",\"stop_sequence\":", anthropic_reason(c));
    if (c->stop_text) put_string(&line, c->stop_text);
    else put_text(&line, "null");
    put_format(&line, "},\"usage\":{\"output_tokens\":%u}", c->n_generated);
    event_end(t);
    put_text(&line, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    send_line(t);
}

static const struct format {
    void (*begin)(choice *);
    void (*piece)(choice *, const rf_piece *); /* thought, answer */
    void (*call)(choice *, const rf_piece *, call_step);
    void (*end)(choice *);
    void (*done)(task *);
} formats[] = {[API_CHAT] = {chat_begin, chat_piece, chat_call, chat_end, openai_done},
               [API_COMPLETIONS] = {completion_begin, completion_piece, NULL, completion_end, openai_done},
               [API_RESPONSES] = {responses_begin, responses_piece, responses_call, responses_close, responses_done},
               [API_MESSAGES] = {messages_begin, messages_piece, messages_call, messages_close, messages_done}};

/* ==== calls that must come ==== */

static void forced_step(choice *c, call_step step, rf_string text) {
    const bytes *name = &c->forced.name;
    const rf_piece piece = {RF_PIECE_CALL, text, {name->data, name->n}, {0}};
    formats[c->task->api].call(c, &piece, step);
}

/* The next byte of the JSON, which the grammar has allowed. Returns 1 if it is of a call's arguments. */
static int forced_byte(forced_call *f, char byte) {
    const int in_string = f->in_string;
    if (in_string) f->in_string = f->escaped || byte != '"';
    else f->in_string = byte == '"';
    f->escaped = in_string && !f->escaped && byte == '\\';
    const int opens = !in_string && (byte == '{' || byte == '['), closes = !in_string && (byte == '}' || byte == ']');
    switch (f->part) {
    case CALL_OUTSIDE: /* between calls of a list */
        if (byte == '{') f->part = CALL_HEAD, f->n_strings = 0, f->name.n = f->text.n = f->n_sent = 0;
        return 0;
    case CALL_HEAD: /* "name": "...", "arguments": */
        if (f->n_strings == 1 && (in_string || f->in_string)) put(&f->name, &byte, 1);
        f->n_strings += in_string && !f->in_string;
        if (byte == ':' && !in_string && f->n_strings == 3) f->part = CALL_COLON;
        return 0;
    case CALL_COLON:
        if (strchr(" \t\n\r", byte)) return 0;
        f->part = CALL_ARGUMENTS, f->depth = opens;
        return 1;
    case CALL_ARGUMENTS:
        if (f->depth == 0 && !in_string && strchr("}, \t\n\r", byte)) { /* behind what has no brackets */
            f->part = byte == '}' ? CALL_OUTSIDE : CALL_TAIL;
            return 0;
        }
        f->depth += opens - closes;
        if (closes && f->depth == 0) f->part = CALL_TAIL;
        return 1;
    case CALL_TAIL: break;
    }
    if (byte == '}') f->part = CALL_OUTSIDE;
    return 0;
}

static void forced_send(choice *c) {
    forced_call *f = &c->forced;
    const rf_string more = {f->text.data + f->n_sent, f->text.n - f->n_sent};
    if (more.len) forced_step(c, CALL_GOES_ON, more);
    f->n_sent = f->text.n;
}

/* More of the JSON of a call that must come, or of a list of them: its arguments are given out as they come. Returns
 * nonzero to stop. */
static int forced_more(choice *c, rf_string text) {
    forced_call *f = &c->forced;
    for (size_t i = 0; i < text.len; i++) {
        const call_part before = f->part;
        if (forced_byte(f, text.data[i])) put(&f->text, &text.data[i], 1);
        if (f->part == before) continue;
        if (f->part == CALL_ARGUMENTS) {
            json_t *name = json_loadb(f->name.data, f->name.n, JSON_DECODE_ANY, NULL);
            f->name.n = 0;
            put(&f->name, json_is_string(name) ? json_string_value(name) : "", json_string_length(name));
            json_decref(name);
            c->n_calls++;
            forced_step(c, CALL_BEGINS, (rf_string){0});
        } else if (before == CALL_ARGUMENTS) {
            forced_send(c);
            forced_step(c, CALL_ENDS, (rf_string){f->text.data, f->text.n});
            if (c->task->one_call) return 1;
        }
    }
    if (f->part == CALL_ARGUMENTS) forced_send(c);
    return 0;
}

/* ==== text of tokens ==== */

static int on_piece(const rf_piece *piece, void *user) {
    choice *c = user;
    if (c->muted) return 0;
    c->in_thought = piece->kind == RF_PIECE_THOUGHT;
    if (c->task->forced_call && piece->kind == RF_PIECE_ANSWER) return forced_more(c, piece->text);
    if (piece->kind != RF_PIECE_CALL) {
        formats[c->task->api].piece(c, piece);
        return 0;
    }
    c->n_calls++;
    for (int step = CALL_BEGINS; step <= CALL_ENDS; step++) formats[c->task->api].call(c, piece, (call_step)step);
    return c->task->one_call;
}

/* Give out the first n bytes of the text held. Returns nonzero to stop. */
static int give(choice *c, size_t n) {
    const rf_piece piece = {.kind = RF_PIECE_ANSWER, .text = {c->held.data, n}};
    int stop = 0;
    if (n == 0) return 0;
    if (c->answer) stop = rf_answer_feed(c->answer, piece.text, NULL) != RF_OK;
    else stop = on_piece(&piece, c);
    c->held.n -= n;
    memmove(c->held.data, c->held.data + n, c->held.n);
    return stop;
}

static void detokenize(choice *c, int32_t token, uint32_t flags) {
    char text[4096];
    size_t n = 0;
    if (rf_detokenize(&c->detokenizer, token, flags, text, sizeof text, &n, NULL) == RF_OK) put(&c->held, text, n);
}

/* Look for stop texts in the text held, from `from` on. Gives out what cannot become one. Returns 1 to stop. */
static int look_for_stops(choice *c) {
    const task *t = c->task;
    const bytes *held = &c->held;
    for (size_t at = 0; at < held->n; at++)
        for (uint32_t k = 0; k < t->n_stops; k++) {
            const size_t left = held->n - at, length = strlen(t->stops[k]);
            if (memcmp(held->data + at, t->stops[k], left < length ? left : length) != 0) continue;
            if (left < length) return give(c, at); /* it may become one */
            give(c, at);
            c->held.n = 0;
            c->stop_text = t->stops[k];
            return 1;
        }
    return give(c, held->n);
}

static void keep_logprobs(choice *c) {
    const size_t width = 1 + c->task->n_top;
    if (c->n_logprobs == c->logprobs_capacity) {
        const size_t capacity = 2 * c->n_logprobs + 16;
        rf_logprob *grown = realloc(c->logprobs, capacity * width * sizeof *grown);
        if (!grown) return;
        c->logprobs = grown, c->logprobs_capacity = capacity;
    }
    memcpy(c->logprobs + c->n_logprobs++ * width, c->sampler.desc.logprobs, width * sizeof *c->logprobs);
}

static void count_latency(uint64_t *histogram, double *sum, double x) {
    int i = 0;
    while (i < N_LATENCIES && x > latencies[i]) i++;
    histogram[i]++;
    *sum += x;
}

static void begin(choice *c) {
    task *t = c->task;
    if (c->begun) return;
    c->begun = 1;
    if (!t->first) t->first = seconds();
    formats[t->api].begin(c);
}

static int on_token(int32_t token, void *user) {
    choice *c = user;
    task *t = c->task;
    const double now = seconds();
    begin(c);
    pthread_mutex_lock(&g.lock);
    if (c->n_generated++ == 0) count_latency(g.first_token, &g.first_token_sum, now - t->begin);
    else count_latency(g.between_tokens, &g.between_tokens_sum, now - c->last_token);
    g.n_generated_tokens++;
    const int gone = t->gone;
    pthread_mutex_unlock(&g.lock);
    c->last_token = now;
    if (t->want_logprobs) keep_logprobs(c);
    if (gone) return 1;
    if (rf_token_is_end(g.tokenizer, token)) return c->finish = "stop", 0;
    detokenize(c, token, c->answer && rf_answer_knows(c->answer, rf_token_get_text(g.tokenizer, token))
                             ? RF_DETOKENIZE_SPECIAL : 0);
    const int stop = look_for_stops(c);
    if (stop) c->finish = "stop";
    c->n_thought += (uint32_t)c->in_thought;
    if (c->matcher) rf_answer_guide(c->answer, c->matcher, &c->sampler);
    return stop;
}

/* The last of a task: the rest of its output, or its error. */
static void task_done(task *t) {
    const int failed = t->status != 200;
    if (!t->gone && !failed) formats[t->api].done(t);
    else if (!t->gone) {
        if (t->want_stream && t->api == API_MESSAGES) put_text(&line, "event: error\n");
        if (t->want_stream) put_text(&line, "data: ");
        put_error(&line, t->api, t->status, t->error, t->param, t->code);
        if (t->want_stream) put_text(&line, t->api == API_MESSAGES ? "\n\n" : "\n\ndata: [DONE]\n\n");
        send_line(t);
    }
}

static void end_choice(choice *c) {
    task *t = c->task;
    if (t->status != 200 || t->gone) return;
    if (!c->stop_text) detokenize(c, -1, RF_DETOKENIZE_FINISH);
    give(c, c->held.n);
    if (c->answer) rf_answer_finish(c->answer, NULL);
    if (t->want_stream && c->forced.part == CALL_ARGUMENTS) /* cut off: what began must end */
        forced_step(c, CALL_ENDS, (rf_string){c->forced.text.data, c->forced.text.n});
    if (c->n_calls && strcmp(c->finish, "stop") == 0 && !c->stop_text) c->finish = "tool_calls";
    formats[t->api].end(c);
}

/* The task belongs to its connection again; without one it is freed. */
static void release_task(task *t) {
    pthread_mutex_lock(&g.lock);
    for (task **p = &g.tasks; *p; p = &(*p)->after)
        if (*p == t) {
            *p = t->after;
            break;
        }
    g.n_tasks--;
    g.n_choices -= t->n_choices ? t->n_choices : 1;
    g.n_dropped += (uint64_t)t->gone;
    t->over = 1;
    const int orphan = t->gone && !t->connection;
    wake(t);
    pthread_mutex_unlock(&g.lock);
    if (orphan) task_free(t);
}

/* One of the drafters that are idle; a request that had to wait behind as many goes without. */
static void take_drafter(choice *c) {
    if (g.n_idle == 0) return;
    c->drafter = g.drafters[--g.n_idle];
    c->drafts = rf_drafter_get_stats(c->drafter);
}

static void give_drafter_back(choice *c) {
    if (!c->drafter) return;
    const rf_drafter_stats now = rf_drafter_get_stats(c->drafter);
    c->drafts = (rf_drafter_stats){.steps = now.steps - c->drafts.steps, .drafted = now.drafted - c->drafts.drafted,
                                   .accepted = now.accepted - c->drafts.accepted, .gain = now.gain};
    g.drafters[g.n_idle++] = c->drafter;
    c->drafter = NULL;
}

static void on_end(rf_result reason, void *user) {
    choice *c = user;
    task *t = c->task;
    if (reason == RF_ERR_CONTEXT_FULL && c->begun) reason = RF_OK;
    if (!c->finish) c->finish = "length";
    give_drafter_back(c);
    if (reason == RF_ERR_CANCELLED && t->timed_out) refuse(t, 504, NULL, "the time limit is reached");
    else if (reason == RF_ERR_CANCELLED) refuse(t, 503, NULL, "the server is closing");
    else if (reason != RF_OK) refuse(t, 500, NULL, "%s", rf_result_name(reason));
    if (reason == RF_OK) begin(c), end_choice(c);
    c->ended = 1;
    pthread_mutex_lock(&g.lock);
    g.n_prompt_tokens += c->n_prompt;
    g.n_reused_tokens += c->n_reused;
    g.n_drafted_tokens += c->drafts.drafted, g.n_accepted_drafts += c->drafts.accepted;
    g.n_draft_steps += c->drafts.steps;
    if (c->drafts.gain > 0) g.draft_gain = c->drafts.gain;
    const uint32_t left = --t->n_open;
    pthread_mutex_unlock(&g.lock);
    if (left) return;
    if (t->grammar) { /* here, because one thread at a time may use a grammar and what it was made of */
        for (uint32_t i = 0; i < t->n_choices; i++) {
            rf_grammar_matcher_close(t->choices[i].matcher, NULL);
            t->choices[i].matcher = NULL;
        }
        if (!t->grammar_is_kept) rf_grammar_close(t->grammar, NULL);
        t->grammar = NULL;
    }
    task_done(t);
    release_task(t);
}

/* ==== threads ==== */

/* Grammars that were used of late: their token masks are known. They are the scheduler thread's, for one thread at a
 * time may use a grammar and its matchers. */
static struct kept_grammar {
    char *source;
    rf_grammar *grammar;
    int is_gbnf;
    uint64_t used;
} kept_grammars[16];
#define N_KEPT_GRAMMARS (sizeof kept_grammars / sizeof kept_grammars[0])

/* Take a kept grammar in place of the task's, or keep this one in place of one that was not used for longest and has
 * no matchers. */
static void keep_grammar(task *t) {
    static uint64_t now;
    const char *source = t->gbnf ? t->gbnf : t->schema;
    struct kept_grammar *oldest = kept_grammars;
    now++;
    for (struct kept_grammar *k = kept_grammars; k < kept_grammars + N_KEPT_GRAMMARS; k++) {
        if (k->source && k->is_gbnf == (t->gbnf != NULL) && strcmp(k->source, source) == 0) {
            rf_grammar_close(t->grammar, NULL);
            t->grammar = k->grammar, t->grammar_is_kept = 1, k->used = now;
            return;
        }
        if (k->used < oldest->used) oldest = k;
    }
    char *copy = strlen(source) <= 65536 ? strdup(source) : NULL;
    if (!copy || rf_grammar_close(oldest->grammar, NULL) != RF_OK) {
        free(copy);
        return;
    }
    free(oldest->source);
    *oldest = (struct kept_grammar){copy, t->grammar, t->gbnf != NULL, now};
    t->grammar_is_kept = 1;
}

static void drop_grammars(void) {
    for (struct kept_grammar *k = kept_grammars; k < kept_grammars + N_KEPT_GRAMMARS; k++) {
        rf_grammar_close(k->grammar, NULL);
        free(k->source);
    }
}

static void submit(task *t) {
    t->submitted = 1;
    if (t->grammar) keep_grammar(t);
    for (uint32_t i = 0; i < t->n_choices; i++) {
        choice *c = &t->choices[i];
        rf_error err = {0};
        rf_result r = t->grammar ? rf_grammar_matcher_open(t->grammar, 0, &c->matcher, &err) : RF_OK;
        if (c->matcher) rf_answer_guide(c->answer, c->matcher, &c->sampler);
        take_drafter(c);
        const rf_request request = {.prompt = c->prompt, .n_prompt = c->n_prompt, .max_tokens = t->max_tokens,
                                    .sampler = &c->sampler, .on_token = on_token, .on_end = on_end, .user = c,
                                    .no_reuse = (uint32_t)t->no_cache, .n_reused = &c->n_reused,
                                    .drafter = c->drafter};
        if (r == RF_OK) r = rf_scheduler_submit(g.scheduler, &request, &err);
        const int last = i + 1 == t->n_choices; /* a task whose choices all failed is gone after that */
        if (r != RF_OK) refuse_result(t, NULL, r, &err), on_end(r, c);
        if (last) return;
    }
}

/* Whose client is gone, or whose time is up. A client that has closed its side is taken for gone. */
static void look_for_gone(void) {
    const double now = seconds();
    task *doomed[64];
    uint32_t n = 0;
    pthread_mutex_lock(&g.lock);
    for (task *t = g.tasks; t && n < 64; t = t->after) {
        struct pollfd p = {t->fd, POLLRDHUP, 0};
        if (t->fd >= 0 && poll(&p, 1, 0) > 0 && p.revents) t->gone = 1;
        if (now > t->deadline) t->timed_out = 1;
        if ((t->gone || t->timed_out) && !t->cancelled && t->submitted) t->cancelled = 1, doomed[n++] = t;
    }
    pthread_mutex_unlock(&g.lock);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = doomed[i]->n_choices; k-- > 0;) { /* the task may go with its last open choice */
            choice *c = &doomed[i]->choices[k];
            const uint32_t left = doomed[i]->n_open;
            const int was_open = !c->ended;
            if (was_open) rf_scheduler_cancel(g.scheduler, c, NULL);
            if (was_open && left == 1) break;
        }
}

static void *schedule(void *unused) {
    uint32_t n_active = 0;
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&g.lock);
        while (!g.inbox && !n_active && !g.stop) pthread_cond_wait(&g.work, &g.lock);
        task *new = g.inbox;
        g.inbox = NULL, g.inbox_end = &g.inbox;
        g.n_steps += n_active > 0;
        const int stop = g.stop;
        pthread_mutex_unlock(&g.lock);
        for (task *next; new; new = next) {
            next = new->next;
            submit(new);
        }
        if (stop) break;
        look_for_gone();
        rf_scheduler_step(g.scheduler, &n_active, NULL);
    }
    rf_scheduler_close(g.scheduler, NULL);
    drop_grammars();
    free(line.data);
    return NULL;
}

static void put_base64(bytes *b, const unsigned char *p, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        const uint32_t second = i + 1 < n ? p[i + 1] : 0, third = i + 2 < n ? p[i + 2] : 0;
        const uint32_t x = (uint32_t)p[i] << 16 | second << 8 | third;
        const char four[4] = {digits[x >> 18], digits[x >> 12 & 63], i + 1 < n ? digits[x >> 6 & 63] : '=',
                              i + 2 < n ? digits[x & 63] : '='};
        put(b, four, 4);
    }
}

static void put_embeddings(bytes *b, const task *t, const float *vectors) {
    const uint32_t n = g.info.n_embd_out;
    uint64_t n_tokens = 0;
    put_text(b, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < t->n_inputs; i++) {
        const float *v = vectors + (size_t)i * n;
        n_tokens += t->inputs[i].n_tokens;
        put_format(b, "%s{\"object\":\"embedding\",\"index\":%u,\"embedding\":", i ? "," : "", i);
        put_text(b, t->base64 ? "\"" : "[");
        if (t->base64) put_base64(b, (const unsigned char *)v, n * sizeof *v);
        for (uint32_t k = 0; k < n && !t->base64; k++) {
            if (k) put_text(b, ",");
            put_real(b, (double)v[k]);
        }
        put_text(b, t->base64 ? "\"}" : "]}");
    }
    put_text(b, "],");
    put_field(b, "model", g.o.alias);
    put_format(b, ",\"usage\":{\"prompt_tokens\":%" PRIu64 ",\"total_tokens\":%" PRIu64 "}}", n_tokens, n_tokens);
}

/* Embed a task's texts, one after the other, so that a client that is gone is noticed. */
static void embed(task *t, rf_session **session) {
    const uint32_t n = g.info.n_embd_out;
    bytes body = {0};
    rf_error err = {0};
    rf_result r = RF_OK;
    float *vectors = calloc(t->n_inputs, n * sizeof *vectors);
    if (!*session) {
        const uint32_t n_rows = g.info.both_ways ? 0 : g.n_ctx < 64 ? g.n_ctx : 64; /* for means of hidden states */
        const rf_session_desc desc = {.n_ctx = g.n_ctx, .n_batch = n_rows, .n_logits_max = n_rows};
        r = rf_session_open(g.model, &desc, session, &err);
    }
    for (uint32_t i = 0; r == RF_OK && vectors && i < t->n_inputs && !is_late(t); i++) {
        const rf_embed_desc desc = {.texts = &t->inputs[i], .n_texts = 1, .normalize = 1};
        r = rf_session_embed(*session, &desc, vectors + (size_t)i * n, &err);
    }
    if (r != RF_OK) refuse_result(t, "input", r, &err);
    else if (!vectors) refuse(t, 500, NULL, "out of memory");
    else if (is_late(t)) refuse(t, 504, NULL, "the time limit is reached");
    if (t->status == 200) put_embeddings(&body, t, vectors);
    else put_error(&body, t->api, t->status, t->error, t->param, t->code);
    pthread_mutex_lock(&g.lock);
    put(&t->out, body.data, body.n);
    g.n_prompt_tokens += t->n_inputs;
    pthread_mutex_unlock(&g.lock);
    free(body.data), free(vectors);
    release_task(t);
}

static void *embed_all(void *unused) {
    rf_session *session = NULL;
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&g.lock);
        while (!g.embeds && !g.stop) pthread_cond_wait(&g.work, &g.lock);
        task *t = g.embeds;
        if (t && !(g.embeds = t->next)) g.embeds_end = &g.embeds;
        pthread_mutex_unlock(&g.lock);
        if (!t) break;
        embed(t, &session);
    }
    rf_session_close(session, NULL);
    return NULL;
}

/* ==== HTTP ==== */

/* A request while it arrives and until its answer has left. */
typedef struct request {
    const struct route *route;
    bytes body;
    double begin;
    int too_large, queued;
    task *task;
} request;

static const char *header(struct MHD_Connection *c, const char *name) {
    return MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
}

static enum MHD_Result answer(struct MHD_Connection *c, int status, const char *type, struct MHD_Response *r) {
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (g.o.cors) {
        MHD_add_response_header(r, "Access-Control-Allow-Origin", g.o.cors);
        MHD_add_response_header(r, "Access-Control-Allow-Headers", "authorization, content-type, x-api-key, *");
    }
    if (status == 429 || status == 503) MHD_add_response_header(r, "Retry-After", "1");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    const enum MHD_Result queued = MHD_queue_response(c, (unsigned)status, r);
    MHD_destroy_response(r);
    return queued;
}

/* The response takes the bytes. */
static enum MHD_Result answer_bytes(struct MHD_Connection *c, int status, const char *type, bytes *b) {
    if (b->failed) {
        free(b->data);
        return MHD_NO;
    }
    struct MHD_Response *r = MHD_create_response_from_buffer(b->n, b->data ? b->data : "",
                                                             b->data ? MHD_RESPMEM_MUST_FREE : MHD_RESPMEM_PERSISTENT);
    *b = (bytes){0};
    return answer(c, status, type, r);
}

static enum MHD_Result answer_error(struct MHD_Connection *c, api kind, int status, const char *text) {
    bytes body = {0};
    put_error(&body, kind, status, text, NULL, NULL);
    pthread_mutex_lock(&g.lock);
    g.n_refused++;
    pthread_mutex_unlock(&g.lock);
    return answer_bytes(c, status, "application/json", &body);
}

/* Takes the same time wherever the keys differ. */
static int same_key(const char *given, const char *key) {
    const size_t n = strlen(given), n_key = strlen(key);
    volatile unsigned char differ = n != n_key;
    for (size_t i = 0; i < n; i++) differ |= (unsigned char)(given[i] ^ key[n_key ? i % n_key : 0]);
    return !differ;
}

static int is_authorized(struct MHD_Connection *c) {
    const char *bearer = header(c, "Authorization"), *given = header(c, "x-api-key");
    int ok = g.o.n_api_keys == 0;
    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0) given = bearer + 7;
    for (uint32_t i = 0; given && i < g.o.n_api_keys; i++) ok |= same_key(given, g.o.api_keys[i]);
    return ok;
}

/* ---- short answers ---- */

static enum MHD_Result get_health(struct MHD_Connection *c, request *q) {
    bytes b = {0};
    (void)q;
    pthread_mutex_lock(&g.lock);
    const int draining = g.draining;
    pthread_mutex_unlock(&g.lock);
    put_text(&b, draining ? "{\"status\":\"draining\"}" : "{\"status\":\"ok\"}");
    return answer_bytes(c, draining ? 503 : 200, "application/json", &b);
}

static void put_model(bytes *b) {
    const rf_model_info *m = &g.info;
    put_text(b, "{");
    put_field(b, "id", g.o.alias);
    put_format(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"rocmforge\",\"meta\":{\"architecture\":\"%s\","
               "\"n_ctx\":%u,\"n_ctx_train\":%u,\"n_embd\":%u,\"n_vocab\":%u,\"n_params\":%" PRIu64 ",\"size\":%" PRIu64
               "}}", (long long)g.started, m->arch, g.n_ctx, m->n_ctx_train, m->n_embd, m->n_vocab, m->n_params,
               m->weight_bytes);
}

static enum MHD_Result get_models(struct MHD_Connection *c, request *q) {
    bytes b = {0};
    (void)q;
    put_text(&b, "{\"object\":\"list\",\"data\":[");
    put_model(&b);
    put_text(&b, "]}");
    return answer_bytes(c, 200, "application/json", &b);
}

static enum MHD_Result get_model(struct MHD_Connection *c, request *q) {
    bytes b = {0};
    (void)q;
    put_model(&b);
    return answer_bytes(c, 200, "application/json", &b);
}

static void put_metric(bytes *b, const char *name, const char *type, const char *help, double value) {
    put_format(b, "# HELP rocmforge_%s %s\n# TYPE rocmforge_%s %s\n", name, help, name, type);
    put_format(b, "rocmforge_%s %.10g\n", name, value);
}

static void put_histogram(bytes *b, const char *name, const char *help, const uint64_t *counts, double sum) {
    uint64_t n = 0;
    put_format(b, "# HELP rocmforge_%s %s\n# TYPE rocmforge_%s histogram\n", name, help, name);
    for (int i = 0; i < N_LATENCIES; i++) {
        n += counts[i];
        put_format(b, "rocmforge_%s_bucket{le=\"%g\"} %" PRIu64 "\n", name, latencies[i], n);
    }
    n += counts[N_LATENCIES];
    put_format(b, "rocmforge_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", name, n);
    put_format(b, "rocmforge_%s_sum %.9g\nrocmforge_%s_count %" PRIu64 "\n", name, sum, name, n);
}

static enum MHD_Result get_metrics(struct MHD_Connection *c, request *q) {
    bytes b = {0};
    (void)q;
    pthread_mutex_lock(&g.lock);
    put_text(&b, "# HELP rocmforge_requests_total Requests accepted.\n# TYPE rocmforge_requests_total counter\n");
    for (int i = 0; i < API_NONE; i++)
        put_format(&b, "rocmforge_requests_total{api=\"%s\"} %" PRIu64 "\n", api_names[i], g.n_requests[i]);
    put_metric(&b, "errors_total", "counter", "Answers that are errors.", (double)g.n_refused);
    put_metric(&b, "clients_gone_total", "counter", "Requests whose client went away.", (double)g.n_dropped);
    put_metric(&b, "prompt_tokens_total", "counter", "Tokens of prompts.", (double)g.n_prompt_tokens);
    put_metric(&b, "reused_tokens_total", "counter", "Of these, not evaluated again.", (double)g.n_reused_tokens);
    put_metric(&b, "generated_tokens_total", "counter", "Tokens chosen.", (double)g.n_generated_tokens);
    put_metric(&b, "drafted_tokens_total", "counter", "Tokens that --draft proposed.", (double)g.n_drafted_tokens);
    put_metric(&b, "accepted_drafts_total", "counter", "Of these, tokens that the model chose itself.",
               (double)g.n_accepted_drafts);
    put_metric(&b, "draft_steps_total", "counter", "Steps of answers with --draft.", (double)g.n_draft_steps);
    put_metric(&b, "draft_gain", "gauge", "Tokens a second by those of steps without drafts, of the drafter that ended "
               "an answer last; 0: not measured.", g.draft_gain);
    put_metric(&b, "steps_total", "counter", "Batches evaluated.", (double)g.n_steps);
    put_metric(&b, "requests_active", "gauge", "Requests that run or wait.", (double)g.n_tasks);
    put_metric(&b, "sequences_active", "gauge", "Answers that run or wait.", (double)g.n_choices);
    put_metric(&b, "sequences_max", "gauge", "Answers that can run at once.", g.o.n_parallel);
    put_histogram(&b, "time_to_first_token_seconds", "From the request to its first token.", g.first_token,
                  g.first_token_sum);
    put_histogram(&b, "time_between_tokens_seconds", "Between tokens of an answer.", g.between_tokens,
                  g.between_tokens_sum);
    pthread_mutex_unlock(&g.lock);
    return answer_bytes(c, 200, "text/plain; version=0.0.4", &b);
}

/* The page, embedded by the assembler. */
__asm__(".section .rodata\n"
        "server_page:\n.incbin \"examples/server_page.html\"\n"
        "server_page_end:\n.byte 0\n"
        ".previous\n");
extern const char page[] __asm__("server_page"), page_end[] __asm__("server_page_end");

static enum MHD_Result get_page(struct MHD_Connection *c, request *q) {
    (void)q;
    struct MHD_Response *r = MHD_create_response_from_buffer((size_t)(page_end - page), (void *)(uintptr_t)page,
                                                             MHD_RESPMEM_PERSISTENT);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Security-Policy",
                            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                            "frame-ancestors 'none'");
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    return answer(c, 200, "text/html; charset=utf-8", r);
}

/* The body as an object, or NULL with the task's error. */
static task *read_object(const request *q) {
    json_error_t json_err;
    task *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->api = API_NONE, t->status = 200, t->fd = -1;
    t->deadline = seconds() + 10;
    if (!depth_is_fine(q->body.data, q->body.n)) refuse(t, 400, NULL, "the body is nested deeper than %d", MAX_DEPTH);
    else if (!(t->root = json_loadb(q->body.data ? q->body.data : "", q->body.n, JSON_REJECT_DUPLICATES, &json_err)))
        refuse(t, 400, NULL, "the body is no JSON: byte %d: %s", json_err.position, json_err.text);
    else if (!json_is_object(t->root)) refuse(t, 400, NULL, "the body must be a JSON object");
    return t;
}

/* What a task answers at once, without the scheduler. */
static enum MHD_Result answer_task(struct MHD_Connection *c, task *t, bytes *b) {
    const int status = t->status;
    if (status != 200) {
        b->n = 0;
        put_error(b, t->api, status, t->error, t->param, t->code);
        pthread_mutex_lock(&g.lock);
        g.n_refused++;
        pthread_mutex_unlock(&g.lock);
    }
    task_free(t);
    return answer_bytes(c, status, "application/json", b);
}

static void put_tokens(bytes *b, const int32_t *ids, uint32_t n, int pieces) {
    char text[1024];
    put_text(b, "{\"tokens\":[");
    for (uint32_t i = 0; i < n; i++) {
        if (i) put_text(b, ",");
        if (!pieces) put_format(b, "%d", ids[i]);
        else {
            put_format(b, "{\"id\":%d,\"piece\":", ids[i]);
            put_string_n(b, text, token_text(ids[i], text));
            put_text(b, "}");
        }
    }
    put_text(b, "]}");
}

static enum MHD_Result post_tokenize(struct MHD_Connection *c, request *q) {
    task *t = read_object(q);
    int add = 0, special = 0, pieces = 0;
    const char *text = NULL;
    bytes b = {0};
    if (!t) return MHD_NO;
    if (t->status == 200 && get_text(t, t->root, "content", &text) && get_flag(t, t->root, "add_special", &add) &&
        get_flag(t, t->root, "parse_special", &special) && get_flag(t, t->root, "with_pieces", &pieces)) {
        const uint32_t flags = (add ? RF_TOKENIZE_ADD : 0) | (special ? RF_TOKENIZE_SPECIAL : 0);
        const rf_tokenize_desc how = {flags, is_late, t};
        rf_error err = {0};
        uint32_t n = 0;
        if (!text) refuse(t, 400, "content", "'content' is missing");
        const uint32_t capacity = text ? (uint32_t)strlen(text) + 8 : 0;
        int32_t *ids = text ? malloc(capacity * sizeof *ids) : NULL;
        rf_result r = RF_OK;
        if (ids) r = rf_tokenize_with(g.tokenizer, rf_string_of(text), &how, ids, capacity, &n, &err);
        if (r != RF_OK) refuse_result(t, "content", r, &err);
        else if (ids) put_tokens(&b, ids, n, pieces);
        free(ids);
    }
    return answer_task(c, t, &b);
}

static enum MHD_Result post_detokenize(struct MHD_Connection *c, request *q) {
    task *t = read_object(q);
    const json_t *list, *id;
    rf_detokenizer d = {.tokenizer = g.tokenizer};
    bytes b = {0}, text = {0};
    char piece[1024];
    size_t i, n;
    if (!t) return MHD_NO;
    if (t->status == 200 && get_array(t, t->root, "tokens", &list)) {
        if (!list) refuse(t, 400, "tokens", "'tokens' is missing");
        json_array_foreach(list, i, id) {
            const json_int_t x = json_integer_value(id);
            if (!json_is_integer(id) || x < 0 || x >= g.info.n_vocab) {
                refuse(t, 400, "tokens", "'tokens[%zu]' must be 0 to %u", i, g.info.n_vocab - 1);
                break;
            }
            if (rf_detokenize(&d, (int32_t)x, RF_DETOKENIZE_SPECIAL, piece, sizeof piece, &n, NULL) == RF_OK)
                put(&text, piece, n);
        }
        if (rf_detokenize(&d, -1, RF_DETOKENIZE_FINISH, piece, sizeof piece, &n, NULL) == RF_OK) put(&text, piece, n);
        put_text(&b, "{");
        put_bytes(&b, "content", &text);
        put_text(&b, "}");
    }
    free(text.data);
    return answer_task(c, t, &b);
}

static enum MHD_Result post_count_tokens(struct MHD_Connection *c, request *q) {
    bytes b = {0};
    task *t = read_task(API_MESSAGES, 1, q->body.data ? q->body.data : "", q->body.n);
    if (!t) return MHD_NO;
    put_format(&b, "{\"input_tokens\":%u}", t->n_inputs ? t->inputs[0].n_tokens : 0);
    return answer_task(c, t, &b);
}

/* ---- tasks ---- */

/* Give bytes of the output to the connection, or suspend it until there are some. */
static ssize_t read_stream(void *user, uint64_t at, char *out, size_t max) {
    task *t = user;
    ssize_t n = 0;
    (void)at;
    pthread_mutex_lock(&g.lock);
    if (t->n_sent < t->out.n) {
        n = (ssize_t)(t->out.n - t->n_sent < max ? t->out.n - t->n_sent : max);
        memcpy(out, t->out.data + t->n_sent, (size_t)n);
        t->n_sent += (size_t)n;
        if (t->n_sent == t->out.n) t->n_sent = t->out.n = 0;
    } else if (t->over) n = t->gone ? MHD_CONTENT_READER_END_WITH_ERROR : MHD_CONTENT_READER_END_OF_STREAM;
    else {
        t->suspended = 1;
        MHD_suspend_connection(t->connection);
    }
    pthread_mutex_unlock(&g.lock);
    return n;
}

/* Queue a task for its thread. Returns 200, or why there is no place for it. */
static int enqueue(task *t, struct MHD_Connection *c) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    const uint32_t n = t->n_choices ? t->n_choices : 1;
    int status = 200;
    pthread_mutex_lock(&g.lock);
    if (g.draining) status = 503;
    else if (g.n_choices + n > g.o.n_parallel + g.o.n_queue) status = 429;
    else {
        task ***end = t->api == API_EMBEDDINGS ? &g.embeds_end : &g.inbox_end;
        t->connection = c;
        t->fd = info ? info->connect_fd : -1;
        **end = t;
        *end = &t->next;
        t->after = g.tasks;
        g.tasks = t;
        g.n_tasks++, g.n_unsent++, g.n_choices += n;
        g.n_requests[t->api]++;
        if (!t->want_stream) t->suspended = 1, MHD_suspend_connection(c);
        pthread_cond_broadcast(&g.work);
    }
    pthread_mutex_unlock(&g.lock);
    return status;
}

static enum MHD_Result finish_task(struct MHD_Connection *c, task *t) {
    bytes body = t->out;
    t->out = (bytes){0};
    return answer_bytes(c, t->status, "application/json", &body);
}

static enum MHD_Result start_stream(struct MHD_Connection *c, task *t) {
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32768, read_stream, t, NULL);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    MHD_add_response_header(r, "X-Accel-Buffering", "no"); /* nginx passes events on at once */
    return answer(c, 200, "text/event-stream", r);
}

static enum MHD_Result post_task(struct MHD_Connection *c, request *q);

typedef enum MHD_Result (*handler)(struct MHD_Connection *, request *);
static const struct route {
    const char *method, *path;
    handler handle;
    api api;
    int open; /* 1: no key needed */
} routes[] = {{"GET", "/", get_page, API_NONE, 1},
              {"GET", "/health", get_health, API_NONE, 1},
              {"GET", "/metrics", get_metrics, API_NONE, 0},
              {"GET", "/v1/models", get_models, API_NONE, 0},
              {"POST", "/tokenize", post_tokenize, API_NONE, 0},
              {"POST", "/detokenize", post_detokenize, API_NONE, 0},
              {"POST", "/v1/chat/completions", post_task, API_CHAT, 0},
              {"POST", "/v1/completions", post_task, API_COMPLETIONS, 0},
              {"POST", "/v1/responses", post_task, API_RESPONSES, 0},
              {"POST", "/v1/messages", post_task, API_MESSAGES, 0},
              {"POST", "/v1/messages/count_tokens", post_count_tokens, API_MESSAGES, 0},
              {"POST", "/v1/embeddings", post_task, API_EMBEDDINGS, 0}};
static const struct route model_route = {"GET", "", get_model, API_NONE, 0};

static enum MHD_Result post_task(struct MHD_Connection *c, request *q) {
    const api kind = q->route->api;
    if (kind == API_EMBEDDINGS && !g.info.n_embd_out)
        return answer_error(c, kind, 400, "this model makes no embeddings");
    if (kind != API_EMBEDDINGS && !g.scheduler) return answer_error(c, kind, 400, "this model writes no text");
    task *t = read_task(kind, 0, q->body.data ? q->body.data : "", q->body.n);
    bytes none = {0};
    if (!t) return MHD_NO;
    if (t->status != 200) return answer_task(c, t, &none);
    q->task = t;
    const int streams = t->want_stream; /* after enqueue the task belongs to its thread */
    const int status = enqueue(t, c);
    if (status == 200) return streams ? start_stream(c, t) : MHD_YES;
    q->task = NULL;
    refuse(t, status, NULL, status == 429 ? "the queue is full" : "the server is closing");
    return answer_task(c, t, &none);
}

static const struct route *find_route(const char *method, const char *path, int *known) {
    *known = 0;
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        if (strcmp(path, routes[i].path) != 0) continue;
        *known = 1;
        if (strcmp(method, routes[i].method) == 0) return &routes[i];
    }
    if (strncmp(path, "/v1/models/", 11) == 0 && strcmp(path + 11, g.o.alias) == 0)
        return *known = 1, strcmp(method, "GET") == 0 ? &model_route : NULL;
    return NULL;
}

/* Why a request is not handled: an HTTP status and a text; 200 if it is. */
static int judge(struct MHD_Connection *c, const request *q, const char **text) {
    const char *site = header(c, "Sec-Fetch-Site");
    if (q->too_large) return *text = "the body is too large", 413;
    if (site && !g.o.cors && strcmp(site, "cross-site") == 0) return *text = "a page of another site asks", 403;
    if (!q->route->open && !is_authorized(c)) return *text = "want an API key: Authorization: Bearer KEY", 401;
    return 200;
}

static enum MHD_Result first_call(struct MHD_Connection *c, const char *path, const char *method, void **user) {
    int known;
    const char *length = header(c, "Content-Length");
    if (g.o.cors && strcmp(method, "OPTIONS") == 0)
        return answer(c, 204, "text/plain", MHD_create_response_from_buffer(0, "", MHD_RESPMEM_PERSISTENT));
    const struct route *route = find_route(method, path, &known);
    const api kind = strncmp(path, "/v1/messages", 12) == 0 ? API_MESSAGES : API_NONE;
    if (!route && known) return answer_error(c, kind, 405, "this path has another method");
    if (!route) return answer_error(c, kind, 404, "there is no such path");
    /* a client learns more from an answer behind its body than from a connection that breaks */
    if (length && strtoull(length, NULL, 10) / 16 > g.o.max_body)
        return answer_error(c, kind, 413, "the body is too large");
    request *q = calloc(1, sizeof *q);
    if (!q) return MHD_NO;
    q->route = route;
    q->begin = seconds();
    *user = q;
    return MHD_YES;
}

static enum MHD_Result handle(void *unused, struct MHD_Connection *c, const char *path, const char *method,
                              const char *version, const char *data, size_t *n_data, void **user) {
    request *q = *user;
    const char *text = NULL;
    (void)unused, (void)version;
    if (!q) return first_call(c, path, method, user);
    if (*n_data) {
        if (q->body.n + *n_data > g.o.max_body) q->too_large = 1;
        if (seconds() - q->begin > UPLOAD_SECONDS) return MHD_NO;
        if (!q->too_large) put(&q->body, data, *n_data);
        *n_data = 0;
        return q->body.failed ? MHD_NO : MHD_YES;
    }
    if (q->task) { /* resumed */
        pthread_mutex_lock(&g.lock);
        const int over = q->task->over;
        pthread_mutex_unlock(&g.lock);
        return over ? finish_task(c, q->task) : MHD_YES;
    }
    const int status = judge(c, q, &text);
    return status == 200 ? q->route->handle(c, q) : answer_error(c, q->route->api, status, text);
}

/* The answer has left, or the client. A task that is not over is ended within a step. */
static void completed(void *unused, struct MHD_Connection *c, void **user, enum MHD_RequestTerminationCode how) {
    request *q = *user;
    (void)unused, (void)c, (void)how;
    if (!q) return;
    task *t = q->task;
    pthread_mutex_lock(&g.lock);
    if (t && t->connection) g.n_unsent--;
    if (t) t->connection = NULL, t->fd = -1, t->suspended = 0;
    if (t && !t->over) t->gone = 1, t = NULL;
    pthread_mutex_unlock(&g.lock);
    task_free(t);
    free(q->body.data), free(q);
    *user = NULL;
}

/* ==== the program ==== */

/* For models without a template: a play's. */
static const char plain_template[] =
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}";

static const char help[] =
    "rocmforge_server MODEL.gguf [options]: serve a model over HTTP, with OpenAI's and Anthropic's APIs\n"
    "  --host ADDRESS          listen there (127.0.0.1); others than this machine reach 0.0.0.0 or ::\n"
    "  --port N                (8080); 0: a free one, which is printed\n"
    "  --device NAME           cpu, hip:0, several: hip:0,1, ... (auto)\n"
    "  --split WHAT            what each of several GPUs has: layer, or tensor: a part of each (layer)\n"
    "  --threads N             of the CPU that compute (one per core)\n"
    "  -c, --ctx N             tokens of each conversation (what the model was trained for, at most 4096)\n"
    "  --parallel N            answers that are written at once (8)\n"
    "  --queue N               answers that may wait; beyond that 429 (64)\n"
    "  --prefixes N            sequences that only keep what was said, for the next turn (4)\n"
    "  --batch N               tokens evaluated in a step (128; 512 on a GPU)\n"
    "  --cache-type T          of keys and values: f16, f32, q8_0 (f16)\n"
    "  --draft WHAT            guess tokens ahead, for the same text in fewer steps: ngram, mtp (the file's own\n"
    "                          head) or a small model's FILE; it keeps no --prefixes\n"
    "  --draft-max N           guesses in a step, at most 15 (8)\n"
    "  --alias NAME            the model's name in the API (the file's)\n"
    "  --chat-template FILE    instead of the model's\n"
    "  --api-key KEY           wanted from clients; may be given more than once\n"
    "  --api-key-file FILE     keys, one a line\n"
    "  --tls-cert, --tls-key   PEM files: HTTPS\n"
    "  --cors ORIGIN           let pages of ORIGIN (or *) use the API\n"
    "  --max-body BYTES        of a request (4194304)\n"
    "  --max-connections N     (1024)\n"
    "  --timeout SECONDS       for a request (600)\n"
    "  --drain SECONDS         after SIGTERM or SIGINT, for answers that are being written or sent (30)\n";

/* Usage errors end with 2. */
__attribute__((format(printf, 1, 2), noreturn)) static void stop_usage(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "rocmforge_server: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, " (--help lists the options)\n");
    va_end(arguments);
    exit(2);
}

static uint32_t option_number(const char *name, const char *text, uint32_t low, uint32_t high) {
    char *end;
    errno = 0;
    const unsigned long n = strtoul(text, &end, 10);
    if (errno || end == text || *end || *text == '-' || n < low || n > high)
        stop_usage("--%s is '%s', want %u to %u", name, text, low, high);
    return (uint32_t)n;
}

/* A whole file, NUL-terminated, of at most 1 MiB; it is kept until the end. */
static char *read_file(const char *path) {
    FILE *f = fopen(path, "rb");
    char *text = calloc(1, (1 << 20) + 1);
    if (!f || !text) stop_usage("%s: %s", path, strerror(errno));
    const size_t n = fread(text, 1, (1 << 20) + 1, f);
    if (ferror(f) || n > 1 << 20) stop_usage("%s: cannot be read, or has more than 1 MiB", path);
    fclose(f);
    return text;
}

static void add_key(const char *key) {
    if (g.o.n_api_keys == sizeof g.o.api_keys / sizeof g.o.api_keys[0]) stop_usage("too many API keys");
    if (strlen(key) < 1) stop_usage("an API key is empty");
    g.o.api_keys[g.o.n_api_keys++] = key;
}

static void add_keys(char *text) {
    for (char *at = text, *key; (key = strsep(&at, "\r\n"));)
        if (*key) add_key(key);
    if (g.o.n_api_keys == 0) stop_usage("--api-key-file has no key");
}

static char *keys_text, *certificate_text, *key_text, *template_text; /* files that were read */

static void set_option(const char *name, const char *value) {
    static const struct { const char *name; size_t at; uint32_t low, high; } numbers[] = {
#define NUMBER(name, field, low, high) {name, offsetof(options, field), low, high}
        NUMBER("port", port, 0, 65535), NUMBER("threads", n_threads, 1, 256), NUMBER("ctx", n_ctx, 8, 1u << 24),
        NUMBER("parallel", n_parallel, 1, 1024), NUMBER("queue", n_queue, 0, 65536),
        NUMBER("prefixes", n_prefixes, 0, 1024), NUMBER("batch", n_batch, 1, 65536),
        NUMBER("max-body", max_body, 1024, 1u << 30),
        NUMBER("max-connections", n_connections, N_HTTP_THREADS, 65536), NUMBER("timeout", timeout_seconds, 1, 86400),
        NUMBER("drain", drain_seconds, 0, 86400), NUMBER("draft-max", n_drafts, 1, 15)};
#undef NUMBER
    static const struct { const char *name; size_t at; } texts[] = {
        {"host", offsetof(options, host)}, {"device", offsetof(options, device)}, {"alias", offsetof(options, alias)},
        {"cors", offsetof(options, cors)}, {"draft", offsetof(options, draft)}};
    char *o = (char *)&g.o;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (strcmp(name, numbers[i].name) == 0) {
            const uint32_t n = option_number(name, value, numbers[i].low, numbers[i].high);
            memcpy(o + numbers[i].at, &n, sizeof n);
        }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (strcmp(name, texts[i].name) == 0) memcpy(o + texts[i].at, &value, sizeof value);
    if (strcmp(name, "api-key") == 0) add_key(value);
    if (strcmp(name, "api-key-file") == 0) add_keys(keys_text = read_file(value));
    if (strcmp(name, "chat-template") == 0) template_text = read_file(value);
    if (strcmp(name, "tls-cert") == 0) certificate_text = read_file(value);
    if (strcmp(name, "tls-key") == 0) key_text = read_file(value);
    if (strcmp(name, "split") == 0) {
        if (strcmp(value, "layer") != 0 && strcmp(value, "tensor") != 0)
            stop_usage("--split is '%s', want layer or tensor", value);
        g.o.split = strcmp(value, "tensor") == 0 ? RF_SPLIT_TENSORS : RF_SPLIT_LAYERS;
    }
    if (strcmp(name, "cache-type") != 0) return;
    if (strcmp(value, "f16") == 0) g.o.cache_type = RF_CACHE_F16;
    else if (strcmp(value, "f32") == 0) g.o.cache_type = RF_CACHE_F32;
    else if (strcmp(value, "q8_0") == 0) g.o.cache_type = RF_CACHE_Q8_0;
    else stop_usage("--cache-type is '%s', want f16, f32 or q8_0", value);
}

static void read_options(int argc, char **argv) {
    static const char *const names[] = {"host", "port", "device", "threads", "ctx", "parallel", "queue", "prefixes",
        "batch", "cache-type", "alias", "chat-template", "api-key", "api-key-file", "tls-cert", "tls-key", "cors",
        "max-body", "max-connections", "timeout", "drain", "draft", "draft-max", "split"};
    struct option longs[sizeof names / sizeof names[0] + 2] = {{"help", no_argument, NULL, 'h'}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        longs[i + 1] = (struct option){names[i], required_argument, NULL, 0};
    g.o = (options){.host = "127.0.0.1", .port = 8080, .device = "auto", .n_parallel = 8, .n_queue = 64,
                    .n_prefixes = UINT32_MAX, .max_body = 4 << 20, .n_connections = 1024, .timeout_seconds = 600,
                    .drain_seconds = 30, .n_drafts = 8};
    for (int c, i = 0; (c = getopt_long(argc, argv, "hc:", longs, &i)) != -1;) {
        if (c == 'h') fputs(help, stdout), exit(0);
        if (c == '?') stop_usage("what is wanted?");
        set_option(c == 'c' ? "ctx" : longs[i].name, optarg);
    }
    if (optind + 1 != argc) stop_usage("want one model");
    if (g.o.draft && g.o.n_prefixes && g.o.n_prefixes != UINT32_MAX)
        stop_usage("--prefixes %u with --draft: no sequences are kept beside answers that draft; want 0, or no "
                   "--prefixes", g.o.n_prefixes);
    if (g.o.n_prefixes == UINT32_MAX) g.o.n_prefixes = g.o.draft ? 0 : 4;
    if (!certificate_text != !key_text) stop_usage("--tls-cert and --tls-key go together");
    g.o.model = argv[optind];
    const char *slash = strrchr(g.o.model, '/');
    if (!g.o.alias) g.o.alias = slash ? slash + 1 : g.o.model;
}

/* A text among the file's keys, or an empty one. */
static rf_string file_text(const char *key) {
    rf_kv kv;
    rf_string text = {0};
    if (rf_gguf_find_kv(g.file, key, &kv, NULL) == RF_OK) rf_kv_text(&kv, NULL, &text, NULL);
    return text;
}

static rf_result open_template(rf_error *err) {
    const rf_string own = rf_string_of(template_text ? template_text : plain_template);
    if (!template_text && rf_model_get_chat_template(g.model, &g.chat_template, err) == RF_OK) {
        g.source = file_text("tokenizer.chat_template");
        g.tool_source = file_text("tokenizer.chat_template.tool_use");
        return RF_OK;
    }
    if (!template_text && err->code != RF_ERR_NOT_FOUND) return err->code;
    g.source = own;
    const rf_result r = rf_chat_template_open(own, NULL, &g.own_template, err);
    g.chat_template = g.own_template;
    return r;
}

/* What requests sample with, unless they say so. */
static rf_result set_sampling(rf_error *err) {
    rf_kv kv;
    const rf_result r = rf_sampler_defaults(g.file, &g.sampling, err);
    if (rf_gguf_find_kv(g.file, "general.sampling.temp", &kv, NULL) != RF_OK) g.sampling.temperature = 0.8f;
    if (g.sampling.temperature > 0 && !g.sampling.top_p && !g.sampling.top_k) g.sampling.top_p = 0.95f;
    if (g.sampling.temperature > 0 && !g.sampling.min_p) g.sampling.min_p = 0.05f;
    for (int pass = 0; pass < 2; pass++) {
        g.n_no_end = 0;
        for (uint32_t id = 0; id < g.info.n_vocab; id++)
            if (rf_token_is_end(g.tokenizer, (int32_t)id)) {
                if (pass) g.no_end[g.n_no_end] = (rf_logit_bias){(int32_t)id, -1e9f};
                g.n_no_end++;
            }
        if (!pass && !(g.no_end = calloc(g.n_no_end + 1, sizeof *g.no_end))) return RF_ERR_MEMORY;
    }
    return r;
}

/* A drafter for each answer that is written at once. One that asks a model has a session of its own of it. */
static rf_result open_drafters(rf_error *err) {
    const options *o = &g.o;
    const int mtp = strcmp(o->draft, "mtp") == 0, has_model = mtp || strcmp(o->draft, "ngram") != 0;
    const uint32_t n_mtp = g.info.n_mtp < RF_MTP_HEADS ? g.info.n_mtp : RF_MTP_HEADS,
                   n_models = mtp && n_mtp ? n_mtp : (uint32_t)has_model; /* without heads: refused when opened */
    rf_result r = has_model && !mtp ? rf_gguf_open(o->draft, NULL, &g.draft_file, err) : RF_OK;
    for (uint32_t k = 0; !r && k < n_models; k++) {
        const rf_model_desc how = {.mtp = mtp ? k + 1 : 0};
        r = rf_model_open(mtp ? g.file : g.draft_file, g.device, &how, &g.draft_models[k], err);
    }
    g.draft_sessions = calloc(o->n_parallel, RF_MTP_HEADS * sizeof(rf_session *));
    g.drafters = calloc(o->n_parallel, sizeof(rf_drafter *));
    if (!r && (!g.draft_sessions || !g.drafters)) r = RF_ERR_MEMORY;
    const uint32_t trained = g.draft_models[0] ? rf_model_get_info(g.draft_models[0]).n_ctx_train : 0;
    for (; !r && g.n_drafters < o->n_parallel; g.n_drafters++) {
        rf_session **of = g.draft_sessions + (size_t)g.n_drafters * RF_MTP_HEADS;
        for (uint32_t k = 0; !r && k < n_models; k++) {
            const rf_session_desc session = {.n_ctx = trained && trained < g.n_ctx ? trained : g.n_ctx,
                                             .mtp = k + 1 < n_models};
            r = rf_session_open(g.draft_models[k], &session, &of[k], err);
        }
        rf_drafter_desc drafter = {.max_drafts = o->n_drafts, .session = mtp ? NULL : of[0]};
        if (mtp) memcpy(drafter.mtp, of, sizeof drafter.mtp);
        if (!r) r = rf_drafter_open(g.model, &drafter, &g.drafters[g.n_drafters], err);
        for (uint32_t k = 0; r && k < n_models; k++) rf_session_close(of[k], NULL);
    }
    g.n_idle = g.n_drafters;
    return r;
}

static void close_drafters(void) {
    for (uint32_t i = 0; i < g.n_drafters; i++) rf_drafter_close(g.drafters[i], NULL);
    for (uint32_t i = 0; i < g.n_drafters * RF_MTP_HEADS; i++) rf_session_close(g.draft_sessions[i], NULL);
    for (uint32_t k = 0; k < RF_MTP_HEADS; k++) rf_model_close(g.draft_models[k], NULL);
    rf_gguf_close(g.draft_file, NULL);
    free(g.drafters), free(g.draft_sessions);
}

static rf_result open_model(rf_error *err) {
    const options *o = &g.o;
    const rf_device_desc device = {.n_threads = o->n_threads, .split = o->split};
    rf_result r = rf_gguf_open(o->model, NULL, &g.file, err);
    if (!r) r = rf_device_open(o->device, &device, &g.device, err);
    if (!r) r = rf_model_open(g.file, g.device, NULL, &g.model, err);
    if (!r) r = rf_model_get_tokenizer(g.model, &g.tokenizer, err);
    if (r) return r;
    g.info = rf_model_get_info(g.model);
    g.n_ctx = o->n_ctx ? o->n_ctx : g.info.n_ctx_train < 4096 ? g.info.n_ctx_train : 4096;
    const uint32_t batch = o->n_batch ? o->n_batch : rf_device_get_info(g.device).is_gpu ? 512 : 128;
    /* drafts share the rows beyond one for each answer; a scheduler uses at most 16 rows for both */
    const uint32_t wanted = o->draft ? o->n_parallel + o->n_drafts : 0, n_shared = wanted < 16 ? wanted : 16;
    const rf_session_desc session = {.n_ctx = g.n_ctx, .n_seq_max = o->n_parallel + o->n_prefixes,
                                     .n_batch = batch > o->n_parallel ? batch : o->n_parallel,
                                     .n_logits_max = o->n_parallel > n_shared ? o->n_parallel : n_shared,
                                     .n_snapshots = o->draft && o->n_drafts > 4 ? o->n_drafts : 0,
                                     .mtp = o->draft && strcmp(o->draft, "mtp") == 0, .cache_type = o->cache_type};
    r = open_template(err);
    if (!r) r = set_sampling(err);
    if (!r && !g.info.is_encoder) r = rf_session_open(g.model, &session, &g.session, err);
    if (!r && g.session && !g.info.both_ways)
        r = rf_scheduler_open(g.session, g.tokenizer, o->n_parallel + o->n_queue, &g.scheduler, err);
    if (!r && g.scheduler && o->draft) r = open_drafters(err);
    return r;
}

static void close_model(void) {
    close_drafters();
    rf_session_close(g.session, NULL);
    rf_chat_template_close(g.own_template, NULL);
    rf_model_close(g.model, NULL);
    rf_device_close(g.device, NULL);
    rf_gguf_close(g.file, NULL);
    free(g.no_end), free(keys_text), free(certificate_text), free(key_text), free(template_text);
}

/* Small events leave at once. */
static void connected(void *unused, struct MHD_Connection *c, void **context,
                      enum MHD_ConnectionNotificationCode code) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    const int on = 1;
    (void)unused, (void)context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED && info)
        setsockopt(info->connect_fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static int open_daemon(void) {
    const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_PASSIVE, .ai_socktype = SOCK_STREAM};
    struct addrinfo *address = NULL;
    struct rlimit files;
    char port[8];
    snprintf(port, sizeof port, "%u", g.o.port);
    if (getaddrinfo(g.o.host, port, &hints, &address) != 0) stop_usage("--host is '%s', want an address", g.o.host);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max)
        files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC;
    if (address->ai_family == AF_INET6) flags |= MHD_USE_DUAL_STACK;
    if (certificate_text) flags |= MHD_USE_TLS;
    const struct MHD_OptionItem tls[] = {{MHD_OPTION_HTTPS_MEM_CERT, 0, certificate_text},
                                         {MHD_OPTION_HTTPS_MEM_KEY, 0, key_text}, {MHD_OPTION_END, 0, NULL}};
    const struct MHD_OptionItem plain[] = {{MHD_OPTION_END, 0, NULL}};
    g.daemon = MHD_start_daemon(flags, 0, NULL, NULL, handle, NULL, MHD_OPTION_SOCK_ADDR, address->ai_addr,
                                MHD_OPTION_NOTIFY_COMPLETED, completed, NULL, MHD_OPTION_NOTIFY_CONNECTION, connected,
                                NULL, MHD_OPTION_CONNECTION_LIMIT, g.o.n_connections, MHD_OPTION_CONNECTION_TIMEOUT,
                                30u, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)N_HTTP_THREADS,
                                MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)65536,
                                MHD_OPTION_LISTEN_BACKLOG_SIZE, 1024u, MHD_OPTION_ARRAY, certificate_text ? tls : plain,
                                MHD_OPTION_END);
    freeaddrinfo(address);
    return g.daemon != NULL;
}

/* Let answers end that are being written or sent, for drain_seconds; then end them. */
static void drain(void) {
    const double until = seconds() + g.o.drain_seconds;
    const struct timespec pause = {0, 20000000};
    pthread_mutex_lock(&g.lock);
    g.draining = 1;
    while ((g.n_tasks || g.n_unsent) && seconds() < until) {
        pthread_mutex_unlock(&g.lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&g.lock);
    }
    g.stop = 1;
    pthread_cond_broadcast(&g.work);
    pthread_mutex_unlock(&g.lock);
    if (g.scheduler) pthread_join(g.scheduler_thread, NULL);
    pthread_join(g.embed_thread, NULL);
}

int main(int argc, char **argv) {
    rf_error err = {0};
    sigset_t signals;
    int number;
    read_options(argc, argv);
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM), sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL); /* in all threads: sigwait takes them */
    signal(SIGPIPE, SIG_IGN);
    g.inbox_end = &g.inbox, g.embeds_end = &g.embeds;
    g.started = (int64_t)time(NULL);
    int failed = open_model(&err) != RF_OK;
    if (failed) fprintf(stderr, "rocmforge_server: %s\n", err.text);
    else if (!open_daemon()) {
        fprintf(stderr, "rocmforge_server: cannot listen at %s port %u: %s\n", g.o.host, g.o.port, strerror(errno));
        failed = 1;
    }
    if (failed) {
        if (g.scheduler) rf_scheduler_close(g.scheduler, NULL);
        close_model();
        return 1;
    }
    if ((g.scheduler && pthread_create(&g.scheduler_thread, NULL, schedule, NULL) != 0) ||
        pthread_create(&g.embed_thread, NULL, embed_all, NULL) != 0)
        return fprintf(stderr, "rocmforge_server: no thread\n"), 1;
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(g.daemon, MHD_DAEMON_INFO_BIND_PORT);
    printf("%s on %s: http%s://%s%s%s:%u\n", g.o.alias, rf_device_get_info(g.device).name, certificate_text ? "s" : "",
           strchr(g.o.host, ':') ? "[" : "", g.o.host, strchr(g.o.host, ':') ? "]" : "", info ? info->port : g.o.port);
    fflush(stdout);
    sigwait(&signals, &number);
    drain();
    MHD_stop_daemon(g.daemon);
    close_model();
    return 0;
}
