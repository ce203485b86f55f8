/* rf_life.h: everything that a program does with an untrusted file, from its bytes to the first token, with memory
 * counted and failures kept: shared by the corpus, the fuzzers and the long run. Include it after the library.
 *     life l = {0};  life_file file = {.path = "x.gguf"};
 *     life_run(&l, &file, 1);
 *     l.stage   the stage that failed (l.err says why), LIFE_DONE if none did */
#ifndef RF_LIFE_H
#define RF_LIFE_H

#include "rf_memory.h"

/* ---- a life ---- */

typedef enum life_stage { LIFE_OPEN, LIFE_PLAN, LIFE_LOAD, LIFE_TOKENIZE, LIFE_GENERATE, LIFE_DONE } life_stage;

typedef struct life_file {
    const char *path;    /* a file, or NULL and */
    const void *data;    /* bytes in memory     */
    size_t size_bytes;
    const rf_io *io;     /* NULL: the operating system's */
    uint32_t no_map;
} life_file;

typedef struct life {
    life_stage stage;    /* that failed, or LIFE_DONE                                          */
    rf_error err;        /* why                                                                */
    uint64_t head_bytes; /* of metadata, if it opened                                          */
    uint64_t open_peak;  /* most bytes held until the file was open, or refused                */
    uint64_t plan_peak;  /* and until the model and its tokenizer were there                   */
    int32_t token;       /* generated; -1 if no logit is a number                              */
    uint64_t touched;    /* a sum over what was read, so that no reading is optimised out      */
    uint64_t left;       /* blocks that were not freed: none                                   */
    memory mem;
} life;

/* Read whatever the accessors reach. */
static void life_touch(life *l, const rf_gguf *g) {
    rf_gguf_info info = rf_gguf_get_info(g);
    l->head_bytes = info.metadata_bytes;
    for (uint64_t i = 0; i < info.n_kv; i++) {
        rf_kv kv;
        uint64_t cursor = 0;
        if (rf_gguf_get_kv(g, i, &kv, NULL) != RF_OK) continue;
        for (uint64_t k = 0; k < kv.count && k < 1000; k++) {
            int64_t v = 0;
            double real = 0;
            rf_string s = {0};
            if (rf_kv_int(&kv, k, &v, NULL) == RF_OK) l->touched += (uint64_t)v;
            if (rf_kv_real(&kv, k, &real, NULL) == RF_OK) l->touched += real > 0;
            if (rf_kv_text(&kv, &cursor, &s, NULL) == RF_OK && s.len) l->touched += (unsigned char)s.data[s.len - 1];
        }
    }
    for (uint64_t i = 0; i < info.n_tensors; i++) {
        rf_tensor_info t;
        unsigned char last;
        if (rf_gguf_get_tensor(g, i, &t, NULL) != RF_OK || t.size_bytes == 0) continue;
        if (rf_gguf_read_tensor(g, i, t.size_bytes - 1, &last, 1, NULL) == RF_OK) l->touched += last;
    }
}

/* Text to ids and back, and a chat. */
static rf_result life_text(life *l, const rf_gguf *g, const rf_tokenizer *t, const char *text, size_t n) {
    const rf_chat_message messages[] = {{.role = "system", .content = "be brief"}, {.role = "user", .content = "hello"}};
    rf_chat chat = {.messages = messages, .n_messages = 2, .open_answer = 1, .now = 1};
    rf_chat_template *jinja = NULL;
    rf_string source;
    rf_kv kv;
    rf_tokenizer_info info = rf_tokenizer_get_info(t);
    rf_detokenizer state = {.tokenizer = t};
    int32_t ids[512];
    char out[1024];
    uint32_t n_ids = 0;
    size_t bytes = 0;
    rf_result r = rf_tokenize(t, (rf_string){text, n}, RF_TOKENIZE_SPECIAL | RF_TOKENIZE_ADD, ids, 512, &n_ids, &l->err);
    if (r == RF_ERR_CAPACITY && n_ids > 512) n_ids = 512, r = RF_OK;
    if (r != RF_OK) return r;
    for (uint32_t i = 0; i < n_ids; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= info.n_vocab) abort(); /* a broken promise, not a refusal */
        rf_detokenize(&state, ids[i], RF_DETOKENIZE_SPECIAL, out, sizeof out, &bytes, NULL);
        l->touched += rf_token_get_text(t, ids[i]).len + (uint64_t)rf_token_is_end(t, ids[i]) + bytes;
    }
    rf_detokenize(&state, -1, RF_DETOKENIZE_FINISH, out, sizeof out, &bytes, NULL);
    if (rf_gguf_find_kv(g, "tokenizer.chat_template", &kv, NULL) != RF_OK || rf_kv_text(&kv, NULL, &source, NULL) != RF_OK)
        return RF_OK;
    if (rf_chat_template_open(source, NULL, &jinja, NULL) != RF_OK) return RF_OK;
    chat.chat_template = jinja;
    if (rf_chat_format(&chat, out, sizeof out, &bytes, NULL) == RF_OK) l->touched += (unsigned char)out[0];
    if (rf_chat_tokenize(t, &chat, RF_TOKENIZE_ADD, ids, 512, &n_ids, NULL) == RF_OK) l->touched += n_ids;
    rf_chat_template_close(jinja, NULL);
    return RF_OK;
}

static rf_result life_generate(life *l, rf_model *m) {
    const rf_session_desc sd = {.n_ctx = 8, .n_batch = 4};
    const rf_token_row rows[] = {{.token = 0, .pos = RF_POS_NEXT}, {.token = 0, .pos = RF_POS_NEXT, .want_logits = 1}};
    rf_session *s = NULL;
    rf_sampler sampler;
    rf_result r = rf_session_open(m, &sd, &s, &l->err);
    if (r == RF_OK) r = rf_session_eval(s, rows, 2, &l->err);
    const rf_sampler_desc desc = {.temperature = 0.8f, .top_k = 20, .top_p = 0.9f};
    if (r == RF_OK) r = rf_sampler_init(&sampler, &desc, &l->err);
    if (r == RF_OK) {
        rf_session_get_argmax(s, 0, &l->token, NULL);
        int32_t drawn = -1;
        rf_result sampled = rf_session_sample(s, 0, &sampler, &drawn, NULL);
        uint32_t n_vocab = rf_model_get_info(m).n_vocab;
        if (l->token < -1 || (l->token >= 0 && (uint32_t)l->token >= n_vocab)) abort();
        if (sampled == RF_OK && (drawn < 0 || (uint32_t)drawn >= n_vocab)) abort();
    }
    rf_session_close(s, NULL);
    return r;
}

/* `full`: load all tensors and generate; otherwise the life ends with the tokenizer. */
__attribute__((unused))
static void life_run(life *l, const life_file *f, int full) {
    static const char text[] = "Hello w\xc3\xb6rld, 123 <|im_start|> the <s>\xff\xe2\x96\x81 \n\n\tend";
    rf_allocator a = memory_allocator(&l->mem);
    rf_gguf_desc gd = {.allocator = a, .no_map = f->no_map};
    rf_device_desc dd = {.allocator = a, .n_threads = 1};
    const rf_tokenizer *t = NULL;
    rf_gguf *g = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    if (f->io) gd.io = *f->io;
    l->stage = LIFE_OPEN;
    rf_result r = f->path ? rf_gguf_open(f->path, &gd, &g, &l->err)
                          : rf_gguf_open_memory(f->data, f->size_bytes, &gd, &g, &l->err);
    l->open_peak = (uint64_t)memory_read(&l->mem.peak);
    if (r == RF_OK) {
        life_touch(l, g);
        l->stage = LIFE_PLAN;
        r = rf_device_open("cpu", &dd, &d, &l->err);
        if (r == RF_OK) r = rf_model_open(g, d, NULL, &m, &l->err);
        if (r == RF_OK) r = rf_model_get_tokenizer(m, &t, &l->err);
        l->plan_peak = (uint64_t)memory_read(&l->mem.peak);
    }
    if (r == RF_OK && full) {
        l->stage = LIFE_LOAD;
        r = rf_model_preload_all(m, &l->err);
    }
    if (r == RF_OK && full) {
        l->stage = LIFE_TOKENIZE;
        r = life_text(l, g, t, text, sizeof text - 1);
    }
    if (r == RF_OK && full) {
        l->stage = LIFE_GENERATE;
        r = life_generate(l, m);
    }
    if (r == RF_OK) l->stage = LIFE_DONE;
    if (rf_model_close(m, NULL) != RF_OK || rf_device_close(d, NULL) != RF_OK || rf_gguf_close(g, NULL) != RF_OK)
        abort();
    l->left = (uint64_t)memory_read(&l->mem.live);
}

#endif
