/* rocmforge.h - runs GGUF language models; one file, C11                                                    v0.2.0
 *
 *     #define ROCMFORGE_IMPLEMENTATION        in exactly one C file, before the include; nowhere else
 *     #include "rocmforge.h"
 *
 *     CPU   cc -O2 example.c -lm -pthread
 *     GPU   hipcc example.c rocmforge_kernels.hip      hipcc >= 5.7; README.md has 5.2 and nvcc. AMD is proven by
 *                                                      emulation and not yet on a card; NVIDIA is tested on H200.
 *
 * The point is lazy loading: opening a model reads metadata only; a weight is read when the forward pass first needs
 * it, exactly once, whatever the number of threads. Opening costs O(metadata), and models larger than memory run.
 *
 * rocmforge does NOT
 *   - train, fine-tune, quantize or convert models, read anything but GGUF, or download files
 *   - execute chat templates (Jinja): the common ones are recognised, others are refused by name
 *   - run what it was not built for: an unknown architecture, type or pre-tokenizer is an error that names it
 *   - print, exit, abort, read environment variables, install signal handlers or keep global state
 *   - support big-endian or 32-bit machines, or systems other than Linux
 *
 * A complete program (examples/hello.c):
 *
 *     #define ROCMFORGE_IMPLEMENTATION
 *     #include "rocmforge.h"
 *     #include <stdio.h>
 *
 *     int main(int argc, char **argv) {
 *         const char *path = argc > 1 ? argv[1] : "examples/shakespeare-5m.gguf", *prompt = "ROMEO:\n";
 *         rf_gguf *file = NULL;
 *         rf_device *device = NULL;
 *         rf_model *model = NULL;
 *         rf_session *session = NULL;
 *         const rf_tokenizer *tokenizer = NULL;
 *         rf_sampler sampler;
 *         rf_error err = {0};
 *         int32_t ids[64];
 *         uint32_t n = 0;
 *
 *         rf_result r = rf_gguf_open(path, NULL, &file, &err);
 *         if (!r) r = rf_device_open("auto", NULL, &device, &err); // the first GPU, else the CPU
 *         if (!r) r = rf_model_open(file, device, NULL, &model, &err);
 *         if (!r) r = rf_session_open(model, NULL, &session, &err);
 *         if (!r) r = rf_model_get_tokenizer(model, &tokenizer, &err);
 *         if (!r) r = rf_sampler_init(&sampler, NULL, &err); // greedy
 *         if (!r) r = rf_tokenize(tokenizer, rf_string_of(prompt), RF_TOKENIZE_ADD, ids, 64, &n, &err);
 *
 *         rf_detokenizer state = {.tokenizer = tokenizer};
 *         for (int i = 0; !r && i < 64; i++, n = 1) {
 *             char text[256];
 *             size_t n_bytes = 0;
 *             r = rf_session_forward(session, ids, n, NULL, &err); // the prompt, then one token at a time
 *             if (!r) r = rf_session_sample(session, 0, &sampler, &ids[0], &err);
 *             if (r || rf_token_is_end(tokenizer, ids[0])) break;
 *             r = rf_detokenize(&state, ids[0], 0, text, sizeof text, &n_bytes, &err);
 *             fwrite(text, 1, n_bytes, stdout);
 *         }
 *         if (r) fprintf(stderr, "%s\n", err.text);
 *
 *         rf_session_close(session, NULL);
 *         rf_model_close(model, NULL);
 *         rf_device_close(device, NULL);
 *         rf_gguf_close(file, NULL);
 *         return r != RF_OK;
 *     }
 *
 * Recipes: what to look up for
 *   text, token by token               the program above; rf_detokenize gives out whole UTF-8 characters only
 *   chat                               rf_chat_tokenize; rf_session_sync keeps the shared prefix; rocmforge_cli chat
 *   stop at the end of the answer      rf_token_is_end
 *   stop text                          search in what rf_detokenize gave out so far, and evaluate no further token
 *   hide thoughts                      rf_chat_final on the text so far
 *   limit or ban tokens, JSON          rf_sampler_desc.bias, or logits_fn, which sees and changes the logits
 *   against repetition                 rf_sampler_desc: DRY, penalties; rf_dry_breakers_find
 *   the same text again                rf_sampler_desc.seed; temperature 0 is greedy
 *   log probabilities of the answer    rf_sampler_desc.logprobs
 *   log probabilities, perplexity      rf_session_eval with rf_token_row.want_logits, then rf_session_get_logits
 *   embed a text                       rf_session_embed; rf_session_hidden for each token
 *   give floats instead of tokens      rf_token_row.embedding
 *   many users at once                 rf_scheduler_open (continuous batching), or a session per thread of one model
 *   one system prompt, many answers    evaluate it once, then rf_session_copy
 *   edit or undo                       rf_session_sync, rf_session_truncate
 *   save a sequence                    rf_session_save, rf_session_restore
 *   will it fit                        rf_model_forecast, before anything is allocated
 *   a model larger than memory         rf_model_desc.budget_bytes; for experts expert_cache_bytes and what follows it
 *   load ahead, progress bar           rf_model_preload_all; rf_model_desc.progress_fn; examples/lazy.c
 *   free GPU memory, keep the model    rf_model_clear_device_cache
 *   cancel an answer                   rf_session_cancel, from any thread or a signal handler
 *   cancel a load                      rf_model_cancel_loading from any thread; from a signal handler set a flag of
 *                                      type volatile sig_atomic_t that progress_fn returns
 *   two GPUs                           for each a device ("hip:0", "hip:1"), a model and a session; one rf_gguf will do
 *   a model inside the program         rf_gguf_open_memory; rf_io for files of your own kind
 *   why is no GPU used                 rf_device_list and rf_device_get_info: the note
 *   what the library has to say        rf_gguf_desc.log_fn; it prints nothing itself
 *   tokens of a vocabulary-only file   rf_tokenizer_open
 *   what is in a file                  rf_gguf_get_kv, rf_gguf_get_tensor; rocmforge_cli inspect
 *   a file that is cut short           rf_gguf_desc.no_map or rf_gguf_handle_fault
 *   does this GPU compute right        rocmforge_cli check: every op against the CPU
 *
 * Sections (search for the tag)
 *    1 >>api          what you call                          8 >>model     hyperparameters
 *    2 >>device-api   ops, plans, what a device is           9 >>plan      the model as data: op emitters
 *    3 >>base         memory, checked arithmetic, errors    10 >>kernels >>cpu    the CPU's kernels, the CPU device
 *    4 >>sync         once-cell, thread pool                11 >>null      the device that only checks
 *    5 >>gguf         the file format                       12 >>session   the forward pass
 *    6 >>quant        tensor types                          13 >>token >>template >>sample >>scheduler
 *    7 >>tensor >>loader >>stream >>experts >>budget >>store    14 >>public    thin bodies
 *
 * Macros, all optional, defined before the include
 *   ROCMFORGE_STATIC          implementation: functions become static, private to that C file
 *   ROCMFORGE_API             everywhere: what stands before each declaration (default extern)
 *   ROCMFORGE_HIP             implementation: refer to the kernels file strongly (static archives)
 *   ROCMFORGE_TYPES           implementation, kernels file: tensor types that get kernels, names of RF_TYPE_TABLE, e.g.
 *                             Q4_K,Q6_K,Q8_0,F16 (F32 is always in; default all): quicker to compile
 *   ROCMFORGE_NO_SIMD         implementation: portable C kernels only, slow to run, compiles in half the time
 *   ROCMFORGE_MALLOC/_FREE    implementation: default allocator, both or none (default malloc, free)
 *   ROCMFORGE_MAX_LAYERS ...  implementation: limits for files, named beside their checks
 *
 * Rules
 *   Memory   every object has its own close; a zeroed desc means defaults; pointers that are handed out are borrowed,
 *            and a comment says until when. After rf_session_open a session allocates nothing.
 *   Threads  files, models, devices and tokenizers may be shared by any number of threads; a session, a sampler and a
 *            scheduler take one call at a time. The library starts threads in two places: in the CPU device, where
 *            they sleep between calls, and to load weights, while there is something to load or to stream.
 *   Errors   every function that can fail returns an rf_result (0 = ok); its last argument is the caller's rf_error,
 *            which receives the text, or NULL. Every close is RF_ERR_BUSY while something uses the object.
 *   Signals  async-signal-safe are rf_session_cancel and, on Linux, rf_gguf_handle_fault; no other call is meant to be.
 *   Bits     the same input gives the same logits, bit for bit, for any number of threads, load order and budget, on
 *            one device model and CPU instruction set. On the CPU also whatever else is in a batch and however a prompt
 *            is cut; a GPU chooses kernels by the number of rows in a step, and these round in other places.
 *
 * Security
 *   Untrusted   every byte of a GGUF file, also while others change it; saved sequences; texts, token ids and chat
 *               messages. Allocations, reads and device calls may fail at any time.
 *   Promised    whatever happens, the worst is an error. No crash, no hang, no access outside the file's bytes and
 *               our own; memory to open and plan is bounded by the file's metadata, not by what it claims. Nothing in
 *               a file is run, used as a format, or as a path (the parts of a split file are found by the first one's
 *               name); messages are printable ASCII.
 *   Limits      A file that somebody cuts short while the CPU uses it in place raises SIGBUS: rf_gguf_desc.no_map
 *               avoids it, rf_gguf_handle_fault makes it an error. One that is rewritten in place is noticed by size
 *               and time before a weight is loaded, not after.
 *   Not         that a model is any good, or what it was named: check where it comes from. What a model writes is as
 *   promised    untrusted as its file. A large model may take long: rf_session_cancel ends it. Arguments, hooks,
 *               the device's driver and other code of the process are trusted; this is no sandbox. Text of strangers
 *               is tokenized without RF_TOKENIZE_SPECIAL, or it can forge control tokens.
 *
 * MIT licence, at the end of this file. */

/* The implementation uses POSIX beyond strict C11. In gnu modes (the compilers' default) nothing is needed; under
 * -std=c11 this file must come first or the build must define _GNU_SOURCE, because libc reads it only once. Looked at
 * for every inclusion: another header may have included this one before, for its declarations. */
#if defined(ROCMFORGE_IMPLEMENTATION) && defined(__STRICT_ANSI__) && !defined(_GNU_SOURCE)
#ifdef _FEATURES_H
#error "rocmforge.h: under -std=c11 include it before every other header, or compile with -D_GNU_SOURCE"
#undef ROCMFORGE_IMPLEMENTATION /* one error is enough */
#else
#define _GNU_SOURCE 1
#endif
#endif

#ifndef ROCMFORGE_H
#define ROCMFORGE_H

#include <stddef.h>
#include <stdint.h>

/* ==== 1 API ============================================================================================= >>api
 * What a program calls, in the order in which it calls it. Each comment says what the function needs, returns,
 * allocates and costs, and which threads may call it ("any one": any thread, one at a time). "Memory none" means that
 * the call allocates nothing. Shapes are row-major [rows, cols], the last index contiguous; where the order of a GGUF
 * file is meant (contiguous dimension first) it reads ne={...}. */

#define RF_VERSION_MAJOR 0
#define RF_VERSION_MINOR 2
#define RF_VERSION_PATCH 0

#ifndef ROCMFORGE_API
#ifdef ROCMFORGE_STATIC
#define ROCMFORGE_API static __attribute__((unused))
#else
#define ROCMFORGE_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- results and errors ---- */

/* Grouped by what the caller can do about it. 0 is success, every failure is negative, everywhere in this file. */
typedef enum rf_result {
    RF_OK = 0,
    RF_ERR_ARGUMENT = -1,     /* the call is wrong: fix the program                                   */
    RF_ERR_MEMORY = -2,       /* too little host memory, or too small a budget for weights            */
    RF_ERR_IO = -3,           /* the operating system could not read; error.sys is errno              */
    RF_ERR_FORMAT = -4,       /* the file is malformed; error.where is a byte offset                  */
    RF_ERR_UNSUPPORTED = -5,  /* well formed, but this version cannot run it                          */
    RF_ERR_CONTEXT_FULL = -6, /* the sequence has no room for these tokens                            */
    RF_ERR_DEVICE = -7,       /* a device call failed; error.sys is its code                          */
    RF_ERR_CANCELLED = -8,    /* by a call that cancels, a progress callback or a closing scheduler   */
    RF_ERR_NOT_FOUND = -9,    /* no such key, tensor, device or file                                  */
    RF_ERR_BUSY = -10,        /* in use (close what uses it first), not empty, or a full queue        */
    RF_ERR_CAPACITY = -11     /* the caller's buffer is too small; *count is the size needed          */
} rf_result;

#define RF_ERROR_TEXT_BYTES 480

/* The first cause of a failure. Caller-owned, plain, no release. Every function that takes one accepts NULL and sets
 * code to RF_OK when it starts; on failure it fills everything. */
typedef struct rf_error {
    rf_result code;
    int32_t sys;                     /* errno or the device's code, 0 if neither                     */
    uint64_t where;                  /* byte offset in the file, layer, or op index; see the text    */
    char text[RF_ERROR_TEXT_BYTES];  /* names the object, expected, found; printable ASCII only      */
} rf_error;

/* Name of a result ("RF_ERR_IO"); never NULL. Threads any. */
ROCMFORGE_API const char *rf_result_name(rf_result code);

/* Library version as "0.2.0": compare with RF_VERSION_* to notice a stale object file. Threads any. */
ROCMFORGE_API const char *rf_version(void);

/* ---- memory, log and file hooks ---- */

/* Where host memory comes from. Zero = ROCMFORGE_MALLOC / ROCMFORGE_FREE (malloc and free unless defined). Give both
 * or none. Called from any thread that calls the library; blocks are aligned as malloc's. */
typedef struct rf_allocator {
    void *(*alloc_fn)(size_t size_bytes, void *user);
    void (*free_fn)(void *block, void *user);
    void *user;
} rf_allocator;

typedef enum rf_log_level { RF_LOG_INFO = 0, RF_LOG_WARNING = 1 } rf_log_level;

/* Text without a newline, printable ASCII, valid during the call. The library prints nothing itself. */
typedef void (*rf_log_fn)(rf_log_level level, const char *text, void *user);

/* How files are read. Zero = the operating system. Give all of open_fn, read_fn, close_fn or none of them; map_fn and
 * unmap_fn may be left out: then tensor bytes are read, never mapped. Failures are negative errno values.
 *   open_fn   path -> handle >= 0; *size_bytes out. Must refuse what is not a regular file.
 *   read_fn   reads up to n bytes at offset; returns bytes read (short reads allowed, 0 = end of file)
 *   map_fn    maps the whole file read-only; NULL if it cannot                                              */
typedef struct rf_io {
    int64_t (*open_fn)(const char *path, uint64_t *size_bytes, void *user);
    int64_t (*read_fn)(int64_t handle, uint64_t offset, void *dst, size_t n, void *user);
    void *(*map_fn)(int64_t handle, uint64_t size_bytes, void *user);
    void (*unmap_fn)(void *base, uint64_t size_bytes, void *user);
    void (*close_fn)(int64_t handle, void *user);
    void *user;
} rf_io;

/* ---- tensor types ---- */

/* The one table of GGUF tensor types: X(NAME, id, text, elements per block, bytes per block, runs here).
 * Sizes follow ggml's block structs and are asserted against ours; a type that does not run is refused by name. */
#define RF_TYPE_TABLE(X) \
    X(F32, 0, "f32", 1, 4, 1)          X(F16, 1, "f16", 1, 2, 1)           X(Q4_0, 2, "q4_0", 32, 18, 1)        \
    X(Q4_1, 3, "q4_1", 32, 20, 1)      X(Q5_0, 6, "q5_0", 32, 22, 1)       X(Q5_1, 7, "q5_1", 32, 24, 1)        \
    X(Q8_0, 8, "q8_0", 32, 34, 1)      X(Q8_1, 9, "q8_1", 32, 36, 0)       X(Q2_K, 10, "q2_K", 256, 84, 1)      \
    X(Q3_K, 11, "q3_K", 256, 110, 1)   X(Q4_K, 12, "q4_K", 256, 144, 1)    X(Q5_K, 13, "q5_K", 256, 176, 1)     \
    X(Q6_K, 14, "q6_K", 256, 210, 1)   X(Q8_K, 15, "q8_K", 256, 292, 0)    X(IQ2_XXS, 16, "iq2_xxs", 256, 66, 1) \
    X(IQ2_XS, 17, "iq2_xs", 256, 74, 1) X(IQ3_XXS, 18, "iq3_xxs", 256, 98, 1) X(IQ1_S, 19, "iq1_s", 256, 50, 1) \
    X(IQ4_NL, 20, "iq4_nl", 32, 18, 1) X(IQ3_S, 21, "iq3_s", 256, 110, 1)  X(IQ2_S, 22, "iq2_s", 256, 82, 1)    \
    X(IQ4_XS, 23, "iq4_xs", 256, 136, 1) X(I8, 24, "i8", 1, 1, 0)          X(I16, 25, "i16", 1, 2, 0)           \
    X(I32, 26, "i32", 1, 4, 0)         X(I64, 27, "i64", 1, 8, 0)          X(F64, 28, "f64", 1, 8, 0)           \
    X(IQ1_M, 29, "iq1_m", 256, 56, 1)  X(BF16, 30, "bf16", 1, 2, 1)        X(TQ1_0, 34, "tq1_0", 256, 54, 1)    \
    X(TQ2_0, 35, "tq2_0", 256, 66, 1)  X(MXFP4, 39, "mxfp4", 32, 17, 1)    X(NVFP4, 40, "nvfp4", 64, 36, 1)     \
    X(Q1_0, 41, "q1_0", 128, 18, 1)    X(Q2_0, 42, "q2_0", 64, 18, 1)

typedef enum rf_type {
#define RF_TYPE_ENUM(NAME, id, text, elements, bytes, runs) RF_TYPE_##NAME = id,
    RF_TYPE_TABLE(RF_TYPE_ENUM)
#undef RF_TYPE_ENUM
    RF_TYPE_COUNT = 43 /* ids are < this; the holes are types that ggml removed */
} rf_type;

typedef struct rf_type_info {
    const char *name;        /* ggml's name, e.g. "q4_K"; NULL for an id that is no type */
    uint32_t block_elements; /* values per block                                         */
    uint32_t block_bytes;
    uint32_t runs;           /* 1 if this version computes with it, unless a device's build
                                leaves it out (ROCMFORGE_TYPES): its op_supported says so */
} rf_type_info;

/* Facts about a type id; a zeroed struct (name NULL) for an unknown id. Threads any. */
ROCMFORGE_API rf_type_info rf_type_get(uint32_t type);

/* Decode n values of packed blocks to float32.
 *   type  in   rf_type that runs;   src  in  blocks, any alignment;   n  a multiple of the block's elements
 *   dst   out  [n] float32
 * Returns RF_OK; RF_ERR_ARGUMENT (n); RF_ERR_UNSUPPORTED (type, or it is not among ROCMFORGE_TYPES).
 * Memory none.   Threads any.
 * Source: ggml's dequantize_row_*; bit-identical to it for every type that runs. */
ROCMFORGE_API rf_result rf_dequantize(uint32_t type, const void *src, uint64_t n, float *dst, rf_error *err);

/* ---- GGUF files ---- */

typedef struct rf_gguf rf_gguf;

/* Bytes and their number: not NUL-terminated, any content. Those that the library gives out lie in a file's metadata
 * and are valid until the file is closed, unless a comment says otherwise. */
typedef struct rf_string {
    const char *data;
    uint64_t len;
} rf_string;

/* A NUL-terminated text as an rf_string that points to it; empty for NULL.   Memory none.   Threads any. */
ROCMFORGE_API rf_string rf_string_of(const char *text);

typedef enum rf_kv_type {
    RF_KV_U8 = 0, RF_KV_I8 = 1, RF_KV_U16 = 2, RF_KV_I16 = 3, RF_KV_U32 = 4, RF_KV_I32 = 5, RF_KV_F32 = 6,
    RF_KV_BOOL = 7, RF_KV_STRING = 8, RF_KV_ARRAY = 9, RF_KV_U64 = 10, RF_KV_I64 = 11, RF_KV_F64 = 12
} rf_kv_type;

/* One key/value of the file, already checked: the bytes of every element lie inside the metadata. */
typedef struct rf_kv {
    rf_string key;
    uint32_t type;         /* rf_kv_type                                              */
    uint32_t element_type; /* of an array; equal to type otherwise                    */
    uint64_t count;        /* elements of an array; 1 otherwise                       */
    const void *data;      /* first element, little endian, unaligned; a string is a
                              u64 length and its bytes: read it with rf_kv_text       */
    uint64_t size_bytes;   /* of all elements                                         */
    uint64_t where;        /* byte offset of the value in the file, for messages      */
} rf_kv;

/* One entry of the tensor directory. ne[0] is the contiguous dimension; unused dimensions are 1. */
typedef struct rf_tensor_info {
    rf_string name;
    uint32_t type;          /* rf_type, a known one                                     */
    uint32_t n_dims;        /* 1..4                                                     */
    uint64_t ne[4];
    uint32_t file_index;    /* which part of a split file                               */
    uint32_t index;         /* position in the directory over all parts                 */
    uint64_t offset_bytes;  /* of the data, from the start of that file                 */
    uint64_t size_bytes;
    uint64_t where;         /* byte offset of this directory entry                      */
} rf_tensor_info;

typedef struct rf_gguf_desc {
    rf_allocator allocator; /* also of models, tokenizers, sessions and schedulers made from the file               */
    rf_io io;
    rf_log_fn log_fn;   /* NULL: silent                                                                         */
    void *log_user;
    uint32_t no_map;    /* 1: never map tensor bytes, read them. A file that is truncated meanwhile is then an
                           error; a mapping raises SIGBUS (see rf_gguf_handle_fault)                            */
} rf_gguf_desc;

typedef struct rf_gguf_info {
    const char *path;       /* as opened; "(memory)" for a buffer                       */
    uint32_t version;       /* 2 or 3                                                   */
    uint32_t n_files;       /* parts of a split file, else 1                            */
    uint32_t alignment;     /* of tensor data, bytes                                    */
    uint32_t mapped;        /* 1 if tensor bytes are mapped or in memory                */
    uint64_t n_kv;
    uint64_t n_tensors;     /* over all parts                                           */
    uint64_t metadata_bytes;/* header, key/values and directory, over all parts         */
    uint64_t file_bytes;    /* over all parts                                           */
    uint64_t data_bytes;    /* sum of all tensors                                       */
} rf_gguf_info;

/* Open a GGUF v2/v3 file and parse its metadata; tensor bytes are not touched.
 *   path  in   a regular file. The first part ("-00001-of-0000N.gguf") opens all N parts.
 *   desc  in   NULL = defaults;   out  receives the object, NULL on failure
 * Returns RF_OK; RF_ERR_NOT_FOUND; RF_ERR_IO; RF_ERR_FORMAT (with the byte offset); RF_ERR_UNSUPPORTED (GGUF v1,
 * big-endian, nested arrays, a limit); RF_ERR_ARGUMENT (desc, or a part that is not the first); RF_ERR_MEMORY.
 * Memory  at most 8 x metadata bytes + 64 KiB, whatever the file claims.   Cost O(metadata): about 1 ms per MB.
 * Threads any. The object is immutable: share it freely. */
ROCMFORGE_API rf_result rf_gguf_open(const char *path, const rf_gguf_desc *desc, rf_gguf **out, rf_error *err);

/* The same from bytes in memory (one file, no split). `data` is borrowed until rf_gguf_close and used in place. */
ROCMFORGE_API rf_result rf_gguf_open_memory(const void *data, size_t size_bytes, const rf_gguf_desc *desc,
                                            rf_gguf **out, rf_error *err);

/* Close the file. NULL is fine.
 * Returns RF_OK; RF_ERR_BUSY, with the file still open, while a model or tokenizer uses it.   Threads any one. */
ROCMFORGE_API rf_result rf_gguf_close(rf_gguf *g, rf_error *err);

/* Facts about an open file; path is borrowed until it is closed. Zeros for NULL.   Cost O(files).   Threads any. */
ROCMFORGE_API rf_gguf_info rf_gguf_get_info(const rf_gguf *g);

/* A key/value by position (0 .. n_kv-1) or by name; what it points to is borrowed until the file is closed.
 * Returns RF_OK; RF_ERR_NOT_FOUND, with *out zeroed; RF_ERR_ARGUMENT (out).   Memory none.   Cost O(1).
 * Threads any. */
ROCMFORGE_API rf_result rf_gguf_get_kv(const rf_gguf *g, uint64_t index, rf_kv *out, rf_error *err);
ROCMFORGE_API rf_result rf_gguf_find_kv(const rf_gguf *g, const char *key, rf_kv *out, rf_error *err);

/* Element i of a value as an integer (of any integer type or bool), a real (of any number), or a string. The strings
 * of an array are read in order: *cursor_bytes starts at 0 and each call moves it to the next; NULL for one string.
 * Returns RF_OK; RF_ERR_ARGUMENT if the value has another type, does not fit, or i is out of range.   Threads any. */
ROCMFORGE_API rf_result rf_kv_int(const rf_kv *kv, uint64_t i, int64_t *out, rf_error *err);
ROCMFORGE_API rf_result rf_kv_real(const rf_kv *kv, uint64_t i, double *out, rf_error *err);
ROCMFORGE_API rf_result rf_kv_text(const rf_kv *kv, uint64_t *cursor_bytes, rf_string *out, rf_error *err);

/* A tensor by position in the directory (0 .. n_tensors-1) or by name. Lifetime, Returns, Cost, Threads as above. */
ROCMFORGE_API rf_result rf_gguf_get_tensor(const rf_gguf *g, uint64_t index, rf_tensor_info *out, rf_error *err);
ROCMFORGE_API rf_result rf_gguf_find_tensor(const rf_gguf *g, const char *name, rf_tensor_info *out, rf_error *err);

/* Read n bytes of a tensor's data, starting `offset` bytes into it, to dst.
 * Returns RF_OK; RF_ERR_ARGUMENT (range); RF_ERR_IO (also when the file has become shorter).   Threads any. */
ROCMFORGE_API rf_result rf_gguf_read_tensor(const rf_gguf *g, uint64_t index, uint64_t offset, void *dst, size_t n,
                                            rf_error *err);

/* Turn a SIGBUS into an error. The CPU uses weights where the file is mapped; if somebody truncates the file, or its
 * disk fails, the system raises SIGBUS in the thread that computes. The library installs no signal handler; a program
 * that wants an error instead of the signal calls this in its own:
 *     static void on_sigbus(int number, siginfo_t *info, void *context) {
 *         if (rf_gguf_handle_fault(file, info->si_addr)) return;
 *         ...                                                       what the program does about other addresses
 *     }
 *   g        in  an open file (NULL: none); it must not be closed while the handler can run
 *   address  in  the address of the fault
 * Returns 1 if the address lies in g's mapping: the mapping now reads as zeros from its page to the end of the file,
 * the computation goes on, and that rf_session_eval and all later ones return RF_ERR_IO with the file and the offset,
 * their sequences unchanged. Close and open the file to recover. 0 if the address is not g's: nothing has changed.
 * Memory none.   Cost: two system calls.   Threads any; async-signal-safe on Linux (atomics, sysconf, mmap; errno
 * is kept). */
ROCMFORGE_API int rf_gguf_handle_fault(rf_gguf *g, const void *address);

/* ---- devices ---- */

typedef struct rf_device rf_device;

typedef struct rf_device_info {
    char name[64];          /* what rf_device_open takes: "cpu", "null", "hip:0"                  */
    char text[96];          /* product name                                                       */
    char arch[32];          /* "gfx1100", "sm_90", "avx512-vnni"                                  */
    char note[160];         /* why it cannot be used, or what is unusual; empty if nothing is     */
    uint32_t usable;        /* 1 if rf_device_open may succeed                                    */
    uint32_t is_gpu;
    uint32_t wave_size;     /* lanes per wave (warp); 1 on the CPU                                */
    uint32_t compute_units; /* or threads of the CPU device                                       */
    uint64_t total_bytes;   /* memory                                                             */
    uint64_t free_bytes;
    uint32_t lost;          /* 1: the device failed for good, close what uses it                  */
} rf_device_info;

typedef struct rf_device_desc {
    rf_allocator allocator;
    uint32_t n_threads;     /* CPU: threads that compute, the caller's included; 0 = one per core allowed (max 256) */
    const char *isa;        /* CPU: "scalar", "avx2", "avxvnni", "avx512", "neon", "i8mm"; NULL = the best. For tests
                               and for equal bits on different machines. */
    uint64_t budget_bytes;  /* for the weights of all models on it; 0 = what is free on a GPU, no limit on the CPU. The
                               least recently used model gives way. */
    uint64_t fail_call;     /* null device: the n-th call fails (1 = the first); 0 = none */
    uint32_t fail_forever;  /* null device: so do all later ones                          */
    uint32_t fail_late;     /* null device: a weight_write fails at its ticket, not at once */
} rf_device_desc;

/* List the devices. A kernels file that is not linked appears as an unusable entry that says so.
 *   out    out  [capacity], the first ones; may be NULL with capacity 0;   count  out  devices there are
 * Returns RF_OK, also if there are more than capacity; RF_ERR_ARGUMENT.   Memory none.   Threads any. */
ROCMFORGE_API rf_result rf_device_list(rf_device_info *out, uint32_t capacity, uint32_t *count, rf_error *err);

/* Open a device.
 *   name  in   "auto" or NULL (the first usable GPU, else the CPU; rf_device_get_info says which and, in note, why
 *              not a GPU), "cpu", "null", "hip:N" (also NVIDIA)
 *   desc  in   NULL = defaults;   out  receives the object, NULL on failure
 * Returns RF_OK; RF_ERR_NOT_FOUND (no such device: the text lists what there is); RF_ERR_DEVICE; RF_ERR_MEMORY.
 * Memory: the CPU device keeps n_threads - 1 sleeping threads.   Threads any; the object may be shared. */
ROCMFORGE_API rf_result rf_device_open(const char *name, const rf_device_desc *desc, rf_device **out, rf_error *err);

/* Close the device. NULL is fine.
 * Returns RF_OK; RF_ERR_BUSY, with the device still open, while a model uses it.   Threads any one. */
ROCMFORGE_API rf_result rf_device_close(rf_device *d, rf_error *err);

/* What it is, and how much memory is free now. Zeros for NULL.   Cost: asks the driver.   Threads any. */
ROCMFORGE_API rf_device_info rf_device_get_info(const rf_device *d);

/* ---- models ---- */

typedef struct rf_model rf_model;

/* A tensor was loaded: done_bytes of total_bytes are on the device now. Return nonzero to cancel, as
 * rf_model_cancel_loading does. Called from a thread that loads, which may be inside rf_session_eval, one call at a
 * time. It may use its own model's loading calls below, but not evaluate, nor close what is in use. */
typedef int (*rf_progress_fn)(uint64_t done_bytes, uint64_t total_bytes, rf_string tensor, void *user);

/* When weights are loaded. */
typedef enum rf_load_policy {
    RF_LOAD_LAZY = 0,           /* the first rf_session_eval starts it, in plan order; compute overlaps it  */
    RF_LOAD_PRELOAD = 1,        /* rf_session_open loads all of them before it returns                      */
    RF_LOAD_CRITICAL_FIRST = 2  /* as lazy, with the embedding and the output before the layers             */
} rf_load_policy;

/* What happens to weights beyond the budget. */
typedef enum rf_stream_policy {
    RF_STREAM_PREFIX = 0,       /* as many as fit stay resident, the others are streamed anew for each token */
    RF_STREAM_LRU = 1           /* all are streamed, the least recently used is evicted: for comparison only */
} rf_stream_policy;

/* Which expert of a mixture (MoE) is evicted, where the budget leaves room for some experts only. */
typedef enum rf_expert_policy {
    RF_EXPERTS_LFRU = 0,        /* the least frequently chosen, old choices counting for less               */
    RF_EXPERTS_LRU = 1,         /* the least recently chosen: for comparison only                           */
    RF_EXPERTS_STATIC = 2       /* those chosen first stay, the others take turns: for comparison only      */
} rf_expert_policy;

typedef struct rf_model_desc {
    rf_progress_fn progress_fn; /* NULL: none                                                               */
    void *progress_user;
    const char *pre_tokenizer;  /* use this pre-tokenizer instead of tokenizer.ggml.pre; NULL = the file's  */
    uint64_t budget_bytes;      /* for weights on the device; 0 = no limit but the device's. CPU: bytes of the
                                   mapping that stay resident, and up to a page more for each end of a tensor.
                                   Too few even to stream: the first load or rf_session_eval returns
                                   RF_ERR_MEMORY, and rf_model_forecast does before                         */
    uint32_t load_policy;       /* rf_load_policy                                                           */
    uint32_t stream_policy;     /* rf_stream_policy                                                         */
    uint64_t pinned_bytes;      /* GPU: pinned host memory in which weights beyond the budget are kept; 0 = read
                                   them from the file each time                                             */
    uint32_t n_readers;         /* threads that read while there is something to read; 0 = chosen; max 16   */
    uint64_t expert_cache_bytes;/* of the budget, for experts if they do not all fit; 0 = what others leave */
    uint32_t expert_policy;     /* rf_expert_policy                                                         */
    uint32_t expert_cpu_below;  /* CPU fallback: an expert that is not on the device and was chosen fewer times of
                                   late, as LFRU counts, is computed by the CPU, in steps of up to 8 rows; 0 = never.
                                   The logits then depend on which experts are loaded. The file must be mapped. On a
                                   GPU the first session that asks for it starts one thread per core, for all
                                   sessions and until the device is closed; on the CPU the device's threads do it */
    uint32_t expert_prefetch;   /* 1: idle readers fill free room in the expert cache, the likeliest first  */
} rf_model_desc;

typedef struct rf_model_info {
    const char *arch;        /* "llama", ...                                                */
    rf_string name;          /* general.name, may be empty                                  */
    uint32_t n_layers;
    uint32_t n_embd;
    uint32_t n_vocab;
    uint32_t n_heads;        /* of layer 0                                                  */
    uint32_t n_kv_heads;     /* of layer 0, < n_heads with GQA; 0: it has no attention      */
    uint32_t head_dim;
    uint32_t n_ctx_train;    /* context the model was trained for, tokens                   */
    uint32_t n_tensors;      /* weights that the plan uses; each expert counts              */
    uint64_t n_params;       /* values in those                                             */
    uint64_t weight_bytes;   /* as stored in the file                                       */
    uint64_t token_bytes;    /* weight bytes that one token reads: of experts, those chosen */
} rf_model_info;

/* Make a model of a file on a device: read hyperparameters, check the shape of every tensor, build the plan. No
 * tensor byte is read: weights load on first use, or by the calls below.
 *   g, d  in   stay open as long as the model (closing them is refused)
 *   desc  in   NULL = defaults;   out  receives the object, NULL on failure
 * Returns RF_OK; RF_ERR_UNSUPPORTED (architecture, tensor type, feature: by name); RF_ERR_FORMAT; RF_ERR_NOT_FOUND
 * (a tensor or key is missing: the text lists the names tried); RF_ERR_ARGUMENT (a policy); RF_ERR_MEMORY;
 * RF_ERR_DEVICE. The pre-tokenizer is not checked before rf_model_get_tokenizer.
 * Models of one rf_gguf on one device share their weights, and the loading fields of the first one's desc.
 * Memory at most 32 x metadata bytes + 256 KiB, with file and tokenizer, whatever the file claims.   Cost O(metadata).
 * Threads any. The model may be shared by any number of threads. */
ROCMFORGE_API rf_result rf_model_open(rf_gguf *g, rf_device *d, const rf_model_desc *desc, rf_model **out,
                                      rf_error *err);

/* Close the model, and release its weights if no other model shares them. NULL is fine.
 * Returns RF_OK; RF_ERR_BUSY, with the model still open, while a session is open or a scheduler uses its tokenizer.
 * Threads any one. */
ROCMFORGE_API rf_result rf_model_close(rf_model *m, rf_error *err);

/* Facts about a model; name is borrowed until its file is closed. Zeros for NULL.   Cost O(tensors).   Threads any. */
ROCMFORGE_API rf_model_info rf_model_get_info(const rf_model *m);

/* Load one tensor, unless it is loaded. Any number of threads may ask: one loads, the others wait; if it fails all of
 * them get the error, and a later call tries again.
 *   name  in   of a tensor that the plan uses
 * Returns RF_OK; RF_ERR_NOT_FOUND; RF_ERR_IO (also if the file was shortened or rewritten since it was opened, which is
 * checked before each load; replacing it by rename does no harm); RF_ERR_DEVICE; RF_ERR_MEMORY (also if it is beyond
 * the budget: rf_session_eval streams it); RF_ERR_CANCELLED; RF_ERR_BUSY from a hook that this tensor's load calls.
 * Memory: device memory, a slab of tensors at a time.   Cost: its bytes, once.   Threads any. */
ROCMFORGE_API rf_result rf_model_load_tensor(rf_model *m, const char *name, rf_error *err);

/* 1 if the tensor, or every tensor of the layer, is loaded now; 0 if not, or if the plan uses no such tensor. Another
 * thread may evict it right after. Never blocks. Threads any. */
ROCMFORGE_API int rf_model_is_tensor_loaded(const rf_model *m, const char *name);
ROCMFORGE_API int rf_model_is_layer_loaded(const rf_model *m, uint32_t layer);

/* Load the weights of these layers (each < n_layers), or all weights of the plan, with all readers, and wait until they
 * are on the device. Weights beyond the budget, which are streamed, are left out.
 * Returns as rf_model_load_tensor; RF_ERR_ARGUMENT (a layer).   Memory, Cost as there.   Threads any. */
ROCMFORGE_API rf_result rf_model_preload_layers(rf_model *m, const uint32_t *layers, uint32_t n_layers, rf_error *err);
ROCMFORGE_API rf_result rf_model_preload_all(rf_model *m, rf_error *err);

/* Stop loading: calls that wait for weights, or for memory that another model holds, return RF_ERR_CANCELLED, within
 * the time of one read of a few MiB. What is loaded stays, and a later call loads the rest.
 * Threads any; not async-signal-safe, it takes locks: in a signal handler set a flag that progress_fn returns. */
ROCMFORGE_API void rf_model_cancel_loading(rf_model *m);

typedef struct rf_loading_stats {
    uint64_t tensors_loaded;     /* now; each expert of a tensor counts for itself            */
    uint64_t bytes_loaded;       /* now, as stored in the file                                */
    uint64_t device_bytes;       /* allocated for weights on the device now, ring included    */
    uint64_t hits;               /* uses that found the tensor loaded                         */
    uint64_t misses;             /* uses that had to load it or wait for it                   */
    uint64_t loads;              /* loads that succeeded, reloads included                    */
    uint64_t failures;           /* loads that failed                                         */
    uint64_t evictions;
    uint64_t device_allocations;
    uint64_t bytes_read;         /* from the file, reloads included; mapped in place: none    */
    double wait_seconds;         /* that threads waited for tensors                           */
    double load_seconds;         /* in which something was being loaded                       */
    double gb_per_second;        /* loaded, reloads included, per load_seconds, in 10^9 bytes */
} rf_loading_stats;

/* Counters of the weights that this model shares with others of its file on its device; gauges say "now". Zeros for
 * NULL. Cost O(1). Threads any. */
ROCMFORGE_API rf_loading_stats rf_model_get_loading_stats(const rf_model *m);

typedef struct rf_expert_stats {
    uint32_t n_experts;     /* of the layer; 0: it has none                                      */
    uint32_t n_loaded;      /* of these now, with all their matrices                             */
    uint64_t hits;          /* chosen experts that were loaded, each once per step               */
    uint64_t misses;        /* chosen experts that had to be loaded first                        */
    uint64_t bytes;         /* of experts loaded, reloads included, as stored in the file        */
    uint64_t prefetched;    /* experts loaded before a step chose them                           */
    uint64_t on_cpu;        /* experts computed by the CPU: neither hits nor misses              */
    uint64_t round_trips;   /* times that the host waited for a GPU to learn what was chosen     */
} rf_expert_stats;

/* The same for the experts of one layer. Choices are counted where the host must know them; a GPU that holds all
 * experts of the layer is never asked. Zeros for NULL and for a layer without experts.   Cost O(experts of a layer).
 * Threads any. */
ROCMFORGE_API rf_expert_stats rf_model_get_expert_stats(const rf_model *m, uint32_t layer);

/* Evict every loaded weight that no running call uses, and free its memory; handles and sessions stay valid, and
 * weights load again on use. On the CPU the pages leave the process; the page cache keeps the file.
 *   left  out  tensors that were in use and stay loaded; may be NULL
 * Returns RF_OK; RF_ERR_ARGUMENT (NULL).   Threads any. */
ROCMFORGE_API rf_result rf_model_clear_device_cache(rf_model *m, uint32_t *left, rf_error *err);

/* The old name of rf_model_clear_device_cache. */
ROCMFORGE_API rf_result rf_model_clear_gpu_cache(rf_model *m, uint32_t *left, rf_error *err);

/* ---- sessions ---- */

typedef struct rf_session rf_session;

/* How the KV cache stores keys and values. Q8_0 takes 17 bytes where f16 takes 32: 32 int8 and one f16 scale. */
typedef enum rf_cache_type { RF_CACHE_F16 = 0, RF_CACHE_F32 = 1, RF_CACHE_Q8_0 = 2 } rf_cache_type;

typedef struct rf_session_desc {
    uint32_t n_ctx;        /* tokens that each sequence can hold; 0 = min(n_ctx_train, 4096)                     */
    uint32_t n_seq_max;    /* sequences; 0 = 1                                                                   */
    uint32_t n_batch;      /* rows of a micro-batch, longer calls are cut; 0 = 512, or n_ctx*n_seq_max if less   */
    uint32_t n_logits_max; /* rows of one rf_session_eval that may ask for logits; 0 = n_seq_max                 */
    uint32_t cache_type;   /* rf_cache_type; 0 = f16. Q8_0 needs head_dim to be a multiple of 32                 */
    uint32_t swa_full;     /* Layers with sliding-window attention (SWA): 0 = keep the positions that the window and
                              the largest batch need; a sequence cannot be cut back far (rf_session_truncate). 1 = keep
                              n_ctx positions; it can be cut back to any, unless it was restored from a session that
                              kept fewer. The logits are the same bits.                                          */
    uint32_t n_snapshots;  /* recurrent models: older states that a sequence keeps, to be cut back to; 0 = 4, or
                              1 if n_seq_max > 1                                                                 */
} rf_session_desc;

typedef struct rf_forecast {
    uint64_t weight_bytes;   /* of the device when loaded: resident, ring, for repacking  */
    uint64_t streamed_bytes; /* weights read anew for every token, beyond the budget      */
    uint64_t expert_cache_bytes; /* part of weight_bytes, if experts do not all fit       */
    uint64_t kv_bytes;       /* KV cache (with MLA the latents) and recurrent states      */
    uint64_t scratch_bytes;  /* activations and logits                                    */
    uint64_t plan_bytes;     /* of the device, for workspaces of ops                      */
    uint64_t host_bytes;     /* of the session on the host, pinned memory included        */
} rf_forecast;

/* What a session would need, before anything is allocated.
 *   desc  in   NULL = defaults
 * Returns RF_OK; RF_ERR_ARGUMENT (also: sizes overflow); RF_ERR_UNSUPPORTED (cache_type, with this head_dim);
 * RF_ERR_MEMORY (the budget is too small even for streaming, or host memory ran out); RF_ERR_DEVICE. Host memory for
 * expert_cpu_below is not counted.
 * Memory O(tensors + ops + n_batch) during the call.   Threads any. */
ROCMFORGE_API rf_result rf_model_forecast(const rf_model *m, const rf_session_desc *desc, rf_forecast *out,
                                          rf_error *err);

/* Open a session: n_seq_max independent sequences with their KV cache, activations and logits.
 *   desc  in   NULL = defaults;   out  receives the object, NULL on failure
 * Models with two sets of rope factors (longrope) choose by n_ctx, not by the prompt: another n_ctx may give another
 * answer. Learned positions (gpt2) limit n_ctx.
 * Returns RF_OK; RF_ERR_ARGUMENT; RF_ERR_UNSUPPORTED (cache_type, with this head_dim); RF_ERR_MEMORY; RF_ERR_DEVICE.
 * Memory: all of it, now; no later call on the session allocates.   Threads: one call at a time per session
 * (rf_session_cancel excepted); sessions of one model run in parallel. */
ROCMFORGE_API rf_result rf_session_open(rf_model *m, const rf_session_desc *desc, rf_session **out, rf_error *err);

/* Close the session. NULL is fine.
 * Returns RF_OK; RF_ERR_BUSY, with the session still open, while a scheduler uses it.   Threads any one. */
ROCMFORGE_API rf_result rf_session_close(rf_session *s, rf_error *err);

/* One row of a batch: the next token of a sequence. Rows of one sequence come in the order of their positions. */
typedef struct rf_token_row {
    int32_t token;         /* 0 .. n_vocab-1; ignored if embedding is given                                */
    int32_t seq;           /* 0 .. n_seq_max-1                                                             */
    int32_t pos;           /* must be the sequence's length; RF_POS_NEXT = that                            */
    int32_t want_logits;   /* 1: keep this row's logits                                                    */
    const float *embedding;/* [n_embd] instead of a token, or NULL; read during the call only              */
} rf_token_row;

#define RF_POS_NEXT (-1)

/* Run rows through the model; each is appended to its sequence. Prefill (a prompt), decode (one token), and continuous
 * batching (one token of each of many sequences) are all this call; it is cut into micro-batches of n_batch rows.
 *   rows    in   [n_rows], n_rows >= 1, at most n_logits_max of them with want_logits
 * Returns RF_OK; RF_ERR_ARGUMENT; RF_ERR_CONTEXT_FULL; RF_ERR_CANCELLED; errors of loading a weight; RF_ERR_DEVICE.
 *         On failure every sequence is as long as before the call, and no logits are kept. One exception, where layers
 *         keep a window only (rf_session_desc.swa_full): a sequence to which the call had added more than n_batch rows
 *         may be empty instead; the text says so.
 * Memory none.   Cost: each weight is read once per micro-batch; attention reads each sequence's KV cache. */
ROCMFORGE_API rf_result rf_session_eval(rf_session *s, const rf_token_row *rows, uint32_t n_rows, rf_error *err);

/* Logits of a row of the last rf_session_eval or rf_session_forward.
 *   i       in   0 .. rows that asked for logits - 1, in their order
 *   logits  out  borrowed [n_vocab] float32 in host memory, valid and writable (to mask tokens, say) until the next
 *                rf_session_eval or rf_session_forward; NULL on failure
 * Returns RF_OK; RF_ERR_ARGUMENT (no such row); RF_ERR_DEVICE (the copy failed; it may be tried again).   Memory none.
 * Cost: the first call after an eval copies the logits of all its rows from the device; if the largest alone is wanted,
 * rf_session_get_argmax copies none. */
ROCMFORGE_API rf_result rf_session_get_logits(rf_session *s, uint32_t i, float **logits, rf_error *err);

/* Id of the largest logit of that row, found by the device; of equal ones the smallest id. What is written to the
 * logits of rf_session_get_logits does not change it.
 *   token  out  -1 if no logit is greater than -infinity, and on failure
 * Returns RF_OK; RF_ERR_ARGUMENT (no such row).   Memory none.   Cost O(1): no logits are copied. */
ROCMFORGE_API rf_result rf_session_get_argmax(const rf_session *s, uint32_t i, int32_t *token, rf_error *err);

/* The simple form of rf_session_eval: append tokens to sequence 0 and keep the last one's logits.
 *   tokens  in   [n_tokens], n_tokens >= 1
 *   logits  out  as rf_session_get_logits; NULL: they are not copied (rf_session_get_argmax and rf_session_sample do
 *                without)
 * Returns as rf_session_eval.   Memory none.   Cost: rf_session_eval and, with logits, rf_session_get_logits. */
ROCMFORGE_API rf_result rf_session_forward(rf_session *s, const int32_t *tokens, uint32_t n_tokens, float **logits,
                                           rf_error *err);

/* Reuse a prefix: make sequence `seq` hold exactly a prefix of `tokens`, the longest that it has in common with what it
 * holds now, and drop the rest.
 *   kept  out  <= n_tokens: the caller evaluates tokens[kept] and what follows. Less than the common prefix, or 0,
 *              where the sequence cannot be cut back to that (rf_session_truncate). If all tokens are held, the last
 *              one is dropped, so that evaluating it gives logits again.
 * Returns RF_OK; RF_ERR_ARGUMENT (seq, NULL).   Memory none.   Cost O(kept). */
ROCMFORGE_API rf_result rf_session_sync(rf_session *s, int32_t seq, const int32_t *tokens, uint32_t n_tokens,
                                        uint32_t *kept, rf_error *err);

/* Cut a sequence to its first n_keep tokens (if it holds no more: no change); 0 empties it.
 *   kept  out  tokens that it holds now: n_keep, or less where it cannot be cut to that; may be NULL
 * Sliding windows (SWA), without rf_session_desc.swa_full: positions more than n_batch tokens before the furthest one
 * that the sequence ever had may be gone; then *kept is 0. A sequence that was never longer than the window can be cut
 * anywhere. A restored one can be cut back as far as the saved one could, if the session's n_batch is no smaller.
 * Recurrent models: the sequence goes back to the last state that it kept. It keeps n_snapshots of them, spread over
 * its length: at every 256th token, before the last token of the last rf_session_eval with several, and a few of those
 * evaluated one at a time. A restored sequence has the state that was saved, no older ones.
 * Returns RF_OK; RF_ERR_ARGUMENT (seq).   Memory none.   Cost O(1). */
ROCMFORGE_API rf_result rf_session_truncate(rf_session *s, int32_t seq, uint32_t n_keep, uint32_t *kept, rf_error *err);

/* Make sequence dst a copy of src. Of a recurrent model only the current state is copied: dst can be cut back to that
 * and to 0.
 * Returns RF_OK; RF_ERR_ARGUMENT (src, dst); RF_ERR_DEVICE, with dst empty.   Memory none.   Cost: copies its KV cache
 * on the device. */
ROCMFORGE_API rf_result rf_session_copy(rf_session *s, int32_t src, int32_t dst, rf_error *err);

/* Empty all sequences but this one. Returns RF_OK; RF_ERR_ARGUMENT (seq).   Memory none.   Cost O(n_seq_max). */
ROCMFORGE_API rf_result rf_session_keep(rf_session *s, int32_t seq, rf_error *err);

/* Tokens that the sequence holds; 0 for a seq out of range. */
ROCMFORGE_API uint32_t rf_session_length(const rf_session *s, int32_t seq);

/* Ask the running rf_session_eval or rf_session_forward, or if none runs the next one, to return RF_ERR_CANCELLED. They
 * look between layers and between micro-batches.
 * Threads any; async-signal-safe (one atomic store). */
ROCMFORGE_API void rf_session_cancel(rf_session *s);

/* Hidden states of rows of the last rf_session_eval or rf_session_forward that asked for logits: the input of the
 * output matrix, after the final norm.
 *   first, n  in   which of these rows, as in rf_session_get_logits
 *   out       out  [n, n_embd] float32, the caller's
 * Returns RF_OK; RF_ERR_ARGUMENT (no such rows); RF_ERR_DEVICE.   Memory none.   Cost: the copy from the device. */
ROCMFORGE_API rf_result rf_session_hidden(rf_session *s, uint32_t first, uint32_t n, float *out, rf_error *err);

typedef enum rf_pooling {
    RF_POOL_MEAN = 0, /* average of all tokens' rows                                          */
    RF_POOL_LAST = 1, /* the last token's row: for causal attention                           */
    RF_POOL_CLS = 2   /* the first token's row                                                */
} rf_pooling;

/* Embed a text as one vector: empty sequence 0, evaluate the tokens in it, pool their hidden states. The vector is not
 * normalised.
 *   tokens   in   [n_tokens], 1 to n_ctx
 *   pooling  in   rf_pooling
 *   out      out  [n_embd] float32, the caller's
 * Returns as rf_session_eval, and RF_ERR_ARGUMENT (pooling). On failure sequence 0 is empty, or unchanged if the call
 * was refused for NULL, pooling or n_tokens.
 * Memory none.   Cost: rf_session_eval with logits for the pooled rows, at most n_logits_max at once: open the session
 * with n_logits_max = n_batch for RF_POOL_MEAN. */
ROCMFORGE_API rf_result rf_session_embed(rf_session *s, const int32_t *tokens, uint32_t n_tokens, uint32_t pooling,
                                         float *out, rf_error *err);

/* Where a saved sequence goes to or comes from: a file, a buffer, a socket. Called in order, never from two threads.
 *   write_fn  takes all n bytes; returns 0, or a negative errno value
 *   read_fn   gives up to n bytes; returns how many (0 = end), or a negative errno value */
typedef struct rf_session_io {
    int (*write_fn)(const void *data, size_t n, void *user);
    int64_t (*read_fn)(void *data, size_t n, void *user);
    void *user;
} rf_session_io;

/* Bytes that rf_session_save would write; 0 for a seq out of range.   Memory none.   Cost O(layers). */
ROCMFORGE_API uint64_t rf_session_save_bytes(const rf_session *s, int32_t seq);

/* Save a sequence: its tokens, its KV cache (of layers with a sliding window what the session still needs, to go on or
 * to be cut back) or its recurrent state, what identifies the model, and a checksum.
 * Returns RF_OK; RF_ERR_ARGUMENT; RF_ERR_IO (write_fn); RF_ERR_DEVICE. The sequence is unchanged.   Memory none.
 * Cost: copies its KV cache from the device. */
ROCMFORGE_API rf_result rf_session_save(rf_session *s, int32_t seq, const rf_session_io *io, rf_error *err);

/* Restore a saved sequence into one that is empty. On the same device model what follows has the same bits as without
 * saving; others get the same keys and values. What is read is untrusted: a forged one can at worst make the model
 * write other text.
 * Returns RF_OK; RF_ERR_ARGUMENT; RF_ERR_BUSY (the sequence holds tokens: rf_session_truncate it); RF_ERR_FORMAT
 * (damaged, or cut short); RF_ERR_UNSUPPORTED (another version, model, or cache type: expected and found are named);
 * RF_ERR_CONTEXT_FULL (more tokens than n_ctx); RF_ERR_IO (read_fn); RF_ERR_DEVICE. On failure the sequence is empty,
 * and all others are unchanged.   Memory none. */
ROCMFORGE_API rf_result rf_session_restore(rf_session *s, int32_t seq, const rf_session_io *io, rf_error *err);

/* ---- tokens and text ---- */

typedef struct rf_tokenizer rf_tokenizer;

/* Build the tokenizer of a file (vocabulary-only files too): BPE, SentencePiece (SPM) or WordPiece (WPM).
 *   g    in   stays open as long as the tokenizer (closing it is refused)
 *   pre  in   use this pre-tokenizer name; NULL = tokenizer.ggml.pre. SPM has none and ignores it.
 *   out  out  the object, NULL on failure
 * Returns RF_OK; RF_ERR_UNSUPPORTED (model or pre-tokenizer, by name); RF_ERR_FORMAT; RF_ERR_NOT_FOUND;
 * RF_ERR_MEMORY.
 * Memory and cost O(vocabulary).   Threads any; the object is immutable. */
ROCMFORGE_API rf_result rf_tokenizer_open(rf_gguf *g, const char *pre, rf_tokenizer **out, rf_error *err);

/* Close a tokenizer from rf_tokenizer_open. NULL is fine.
 * Returns RF_OK; RF_ERR_BUSY, with the tokenizer still open, while a scheduler uses it.   Threads any one. */
ROCMFORGE_API rf_result rf_tokenizer_close(rf_tokenizer *t, rf_error *err);

/* The model's own tokenizer, built on first use, owned by the model and borrowed until that is closed.
 * Returns as rf_tokenizer_open; a later call tries again.   Memory, Cost as there, once.   Threads any. */
ROCMFORGE_API rf_result rf_model_get_tokenizer(rf_model *m, const rf_tokenizer **out, rf_error *err);

#define RF_TOKENIZE_SPECIAL 1u /* text may name special tokens ("<|im_end|>"); never for untrusted text     */
#define RF_TOKENIZE_ADD 2u     /* add bos / eos where the file asks for it                                  */

/* Turn text into token ids.
 *   text   in   any bytes; malformed UTF-8 is not an error
 *   flags  in   RF_TOKENIZE_*
 *   out    out  [capacity], may be NULL with capacity 0;   count  out  size needed, also if capacity is too small
 * Returns RF_OK; RF_ERR_CAPACITY (out holds the first ones); RF_ERR_ARGUMENT; RF_ERR_MEMORY.
 * Memory O(text.len) during the call.   Cost O(n log n).   Threads any. */
ROCMFORGE_API rf_result rf_tokenize(const rf_tokenizer *t, rf_string text, uint32_t flags, int32_t *out,
                                    uint32_t capacity, uint32_t *count, rf_error *err);

/* Streaming decoder: set the tokenizer and zero the rest before the first token of a text. */
typedef struct rf_detokenizer {
    const rf_tokenizer *tokenizer; /* borrowed                                   */
    uint8_t held[4];      /* bytes of an unfinished UTF-8 character              */
    uint8_t n_held;
    uint8_t started;      /* 1: not the start of a text, so SPM's leading space stays; set it to continue a prompt */
} rf_detokenizer;

#define RF_DETOKENIZE_SPECIAL 1u /* show special tokens as text, instead of nothing   */
#define RF_DETOKENIZE_FINISH 2u  /* no token follows: give out held bytes too         */

/* Text of the next token. Only whole UTF-8 characters are given out: an unfinished one is held for the next call.
 *   id     in   a token, or -1 for none (with RF_DETOKENIZE_FINISH)
 *   out    out  [capacity] bytes, no NUL;   count  out  size needed, also if capacity is too small
 * Returns RF_OK; RF_ERR_CAPACITY, with the state unchanged; RF_ERR_ARGUMENT (id).   Memory none.
 * Threads any, one call at a time per state. */
ROCMFORGE_API rf_result rf_detokenize(rf_detokenizer *state, int32_t id, uint32_t flags, char *out, size_t capacity,
                                      size_t *count, rf_error *err);

typedef struct rf_tokenizer_info {
    const char *model;      /* "llama" (SPM), "gpt2", "gemma4" (BPE), "bert" (WPM)  */
    const char *pre;        /* pre-tokenizer in use; "" for SPM                     */
    uint32_t n_vocab;
    int32_t bos, eos, eot, unknown, padding; /* -1 if the file names none           */
    uint32_t add_bos, add_eos;
} rf_tokenizer_info;

/* Facts about a tokenizer; its texts live as long as the program. "", 0 and -1 for NULL.   Cost O(1).   Threads any. */
ROCMFORGE_API rf_tokenizer_info rf_tokenizer_get_info(const rf_tokenizer *t);

/* 1 if the token ends a generation (eos, eot, eom, <|im_end|>, ...); 0 also if out of range.   Threads any. */
ROCMFORGE_API int rf_token_is_end(const rf_tokenizer *t, int32_t id);

/* The token's text as the vocabulary spells it, borrowed until the file is closed; empty if out of range.
 * Threads any. */
ROCMFORGE_API rf_string rf_token_get_text(const rf_tokenizer *t, int32_t id);

/* ---- chat templates ---- */

typedef struct rf_chat_message {
    const char *role;    /* "system", "user", "assistant" */
    const char *content;
} rf_chat_message;

/* A conversation to format. */
typedef struct rf_chat {
    /* NULL = recognise the file's tokenizer.chat_template; or "chatml", "llama3", "llama2", "mistral" (its v3),
     * "mistral-v0", "mistral-v1", "mistral-v3-tekken", "mistral-v7", "mistral-v7-tekken", "zephyr", "phi3", "phi4",
     * "phi4-mini", "gemma", "glm4", "granite", "deepseek3", "deepseek-r1", "harmony" (gpt-oss), "plain" */
    const char *template_name;
    const rf_chat_message *messages; /* [n_messages] */
    uint32_t n_messages;
    uint32_t open_answer;      /* 1: end with the opening of the assistant's answer (a generation prompt) */
} rf_chat;

/* Format a conversation as the model's template would. The template in the file is recognised, never executed.
 *   g     in   the file; NULL if chat names the template
 *   out   out  [capacity] bytes, no NUL; may be NULL with capacity 0;   count  out  size needed
 * Returns RF_OK; RF_ERR_CAPACITY; RF_ERR_UNSUPPORTED (template not recognised: format it yourself or name one);
 * RF_ERR_NOT_FOUND (no template in the file); RF_ERR_ARGUMENT (name, role, system text the template has no place for).
 * Memory none.   Threads any. */
ROCMFORGE_API rf_result rf_chat_format(const rf_gguf *g, const rf_chat *chat, char *out, size_t capacity,
                                       size_t *count, rf_error *err);

/* Format a conversation and turn it into token ids. What the template writes may name special tokens; the messages
 * may not, whatever they hold. Words are cut and merged as in the text that rf_chat_format gives.
 *   t      in   the tokenizer; its file's template is used if chat names none
 *   flags  in   RF_TOKENIZE_ADD, or 0
 *   out    out  [capacity], may be NULL with capacity 0;   count  out  size needed, also if capacity is too small
 * Returns as rf_chat_format and rf_tokenize.   Memory O(text) during the call.   Threads any. */
ROCMFORGE_API rf_result rf_chat_tokenize(const rf_tokenizer *t, const rf_chat *chat, uint32_t flags, int32_t *out,
                                         uint32_t capacity, uint32_t *count, rf_error *err);

/* The part of an answer that is meant for the reader, without the reasoning before it: what follows "</think>", or
 * gpt-oss's final channel. All of it if it has neither; empty if an answer in channels has no final one yet. Points
 * into text.
 *   text  in  what the model wrote, control tokens that are shown included
 * Memory none.   Threads any. */
ROCMFORGE_API rf_string rf_chat_final(rf_string text);

/* Name of the template that the file's chat_template is recognised as, valid as long as the program runs; NULL if the
 * file has none or it is not recognised.   Memory none.   Cost O(its length).   Threads any. */
ROCMFORGE_API const char *rf_chat_template_name(const rf_gguf *g);

/* ---- sampling ---- */

#define RF_SAMPLER_HISTORY 256

typedef struct rf_logit_bias {
    int32_t token;
    float bias; /* added to the logit */
} rf_logit_bias;

typedef struct rf_logprob {
    int32_t token;
    float logprob; /* natural logarithm of the probability */
} rf_logprob;

#define RF_DRY_BREAKER_TOKENS 21

/* A sequence of tokens that a repetition, as DRY counts it, does not go beyond. */
typedef struct rf_dry_breaker {
    uint32_t n_tokens; /* 1 .. RF_DRY_BREAKER_TOKENS */
    int32_t tokens[RF_DRY_BREAKER_TOKENS];
} rf_dry_breaker;

/* Zero = greedy. The order is llama.cpp's: logits_fn, bias, penalties, DRY, top-k, top-p, min-p, XTC, temperature.
 * With mirostat: logits_fn, bias, temperature, mirostat, and nothing else. Pointers are borrowed as long as the sampler
 * is used. */
typedef struct rf_sampler_desc {
    float temperature;       /* <= 0: greedy (the largest logit, the smallest id among equals)                   */
    uint32_t top_k;          /* 0: off                                                                           */
    float top_p;             /* 0 or >= 1: off                                                                   */
    float min_p;             /* 0: off                                                                           */
    float repeat_penalty;    /* 0 or 1: off; divides positive, multiplies negative logits of recent tokens       */
    float frequency_penalty; /* subtracted per occurrence among recent tokens                                    */
    float presence_penalty;  /* subtracted once                                                                  */
    uint32_t penalty_last_n; /* how many recent tokens; 0 = 64, at most as many as are remembered                */
    uint64_t seed;           /* the same seed gives the same choices                                             */
    const rf_logit_bias *bias; /* [n_bias]; ids out of range are ignored                                         */
    uint32_t n_bias;
    float xtc_probability;   /* XTC (exclude top choices): chance per token, 0: off. Of the tokens with at least */
    float xtc_threshold;     /* this probability only the least likely stays; 0 = 0.1, above 0.5: off            */
    float dry_multiplier;    /* DRY (don't repeat yourself), 0: off. A token that would lengthen a repetition of */
    float dry_base;          /* n >= dry_allowed_length tokens loses multiplier * base^(n - allowed); 0 = 1.75,  */
    uint32_t dry_allowed_length; /* >= 1; 0 = 2                                                                  */
    uint32_t dry_last_n;     /* among how many recent tokens; 0 = all that are remembered                        */
    const rf_dry_breaker *dry_breakers; /* [n_dry_breakers], by rising first token; see rf_dry_breakers_find     */
    uint32_t n_dry_breakers;
    uint32_t mirostat;       /* 0: off; 1 or 2: the version; greedy if temperature <= 0                          */
    float mirostat_tau;      /* its target surprise in bits; 0 = 5                                               */
    float mirostat_eta;      /* its learning rate; 0 = 0.1                                                       */
    int32_t *history;        /* [5 * n_history] memory to remember more than RF_SAMPLER_HISTORY tokens, or NULL; */
    uint32_t n_history;      /* a copy of such a sampler shares it                                               */

    /* Sees the logits as the model gave them and may change them: -INFINITY bans a token. What it returns, unless
     * RF_OK, rf_sampler_sample returns. It may use nothing of the session. */
    rf_result (*logits_fn)(float *logits, uint32_t n_vocab, void *user);
    void *logits_user;

    /* Log probabilities: [1 + n_top_logprobs], written by each choice; NULL: none. First the chosen token's, then the
     * most likely ones, best first (token -1 where there are no more). As OpenAI's API and llama.cpp's server define
     * them: of the softmax of all logits as the model gave them, before logits_fn, bias and all that follows. */
    rf_logprob *logprobs;
    uint32_t n_top_logprobs; /* at most 256                                                                      */
    float *logprob_memory;   /* [n_vocab], needed with logprobs: the logits as they were                         */
} rf_sampler_desc;

typedef struct rf_sampler {
    rf_sampler_desc desc;
    uint64_t rng[2];
    double mirostat_mu;                  /* the largest surprise allowed now */
    uint64_t n_accepted;                 /* tokens, in all                   */
    int32_t history[RF_SAMPLER_HISTORY]; /* ring buffer of accepted tokens, if desc.history is NULL */
} rf_sampler;

/* What the file recommends: general.sampling.temp, .top_k, .top_p, .min_p, .penalty_repeat, .penalty_last_n,
 * .xtc_probability, .xtc_threshold, .mirostat, .mirostat_tau, .mirostat_eta.
 *   out  out  zero (greedy) but for what the file says: change what you like and pass it to rf_sampler_init. A
 *             penalty_last_n above RF_SAMPLER_HISTORY, or unlimited (-1), becomes RF_SAMPLER_HISTORY.
 * Returns RF_OK, also if the file says nothing; RF_ERR_FORMAT (a value out of range or of another type, by key; *out
 * is zero); RF_ERR_ARGUMENT. general.sampling.sequence is ignored: the order is fixed.
 * Memory none.   Threads any. */
ROCMFORGE_API rf_result rf_sampler_defaults(const rf_gguf *g, rf_sampler_desc *out, rf_error *err);

/* Start a sampler.
 *   s     out  the caller's; nothing is to be released
 *   desc  in   NULL = greedy; copied, but for what it points to
 * Returns RF_OK; RF_ERR_ARGUMENT (a field not finite or out of range, by name).   Memory none.   Threads any. */
ROCMFORGE_API rf_result rf_sampler_init(rf_sampler *s, const rf_sampler_desc *desc, rf_error *err);

/* Find the breakers of texts, for rf_sampler_desc.dry_breakers: every token in which a text ends or begins, the latter
 * followed by the tokens of its rest. llama.cpp's texts are "\n", ":", "\"" and "*".
 *   texts  in   [n_texts], 1 to 40 bytes each
 *   out    out  [capacity], may be NULL with capacity 0;   count  out  size needed, also if capacity is too small
 * Returns RF_OK; RF_ERR_CAPACITY (out holds the first ones); RF_ERR_ARGUMENT; RF_ERR_MEMORY.
 * Memory: rf_tokenize's, during the call.   Cost O(vocabulary * n_texts).   Threads any. */
ROCMFORGE_API rf_result rf_dry_breakers_find(const rf_tokenizer *t, const char *const *texts, uint32_t n_texts,
                                             rf_dry_breaker *out, uint32_t capacity, uint32_t *count, rf_error *err);

/* Choose a token and remember it for penalties and DRY.
 *   logits  inout [n_vocab]; logits_fn, bias, penalties and DRY change them in place
 * Returns RF_OK; RF_ERR_ARGUMENT if no logit is a number greater than -infinity; what logits_fn returned.
 * Memory none.   Cost O(n_vocab + tokens remembered).   Threads: one call at a time per sampler. */
ROCMFORGE_API rf_result rf_sampler_sample(rf_sampler *s, float *logits, uint32_t n_vocab, int32_t *token,
                                          rf_error *err);

/* The same from row i of the session's last rf_session_eval. A greedy sampler with nothing that changes or reports
 * logits takes rf_session_get_argmax, unless rf_session_get_logits has handed out the logits: then it reads these, as
 * they are now.
 * Returns RF_OK; RF_ERR_ARGUMENT (no such row, no logit greater than -infinity); RF_ERR_DEVICE (copying the logits).
 * Memory none.   Cost O(1), or rf_session_get_logits and rf_sampler_sample.   Threads as both. */
ROCMFORGE_API rf_result rf_session_sample(rf_session *s, uint32_t i, rf_sampler *sampler, int32_t *token,
                                          rf_error *err);

/* Remember a token that was not sampled (a prompt's), for penalties and DRY.
 * Memory none.   Threads: one call at a time per sampler. */
ROCMFORGE_API void rf_sampler_accept(rf_sampler *s, int32_t token);

/* ---- answers: thoughts, text, tool calls ---- */

typedef enum rf_piece_kind { RF_PIECE_ANSWER = 0, RF_PIECE_THOUGHT = 1, RF_PIECE_CALL = 2 } rf_piece_kind;

/* A part of what a model writes, valid during the call that gives it. */
typedef struct rf_piece {
    rf_piece_kind kind;
    rf_string text; /* answer, thought: more of it; call: all of its arguments, a JSON object      */
    rf_string name; /* call: of the function                                                       */
    rf_string id;   /* call: what the model names it, or empty                                     */
} rf_piece;

/* Return nonzero to stop. */
typedef int (*rf_piece_fn)(const rf_piece *piece, void *user);

typedef struct rf_answer rf_answer;

typedef struct rf_answer_desc {
    rf_string chat_template; /* its source: which formats the model knows; empty: all but JSON without a marker */
    rf_string prompt;        /* the end of the prompt: it may have opened a thought already        */
    rf_string tools;         /* their definitions, JSON as in rf_chat.tools: the types of arguments that are written as
                                bare text; empty: what is a JSON value is taken for one            */
    rf_piece_fn on_piece;
    void *user;
    uint32_t max_bytes;      /* of one tool call; 0 = 1 MiB. A longer one is text                   */
    rf_allocator allocator;
} rf_answer_desc;

/* Split what a model writes, while it writes, into thoughts, answer and tool calls, as the model's chat template writes
 * them. What is no well-formed call is text; an unfinished thought is a thought. White space around thoughts and calls
 * is dropped. Formats:
 *   thoughts  <think>, [THINK], <seed:think>, Gemma 4's and gpt-oss's channels, Command R's and Apertus' tokens
 *   calls     JSON (Hermes, Qwen, Llama 3, Mistral, Granite, Apriel, Apertus, Command R, functionary, GigaChat), XML
 *             (Qwen3-Coder, Nemotron, Seed, Step, MiniMax), GLM, DeepSeek, Kimi, LFM2's Python, Gemma 4, gpt-oss
 *   desc  in   copied, but for tools, which are borrowed;   out  the object, NULL on failure
 * Returns RF_OK; RF_ERR_ARGUMENT; RF_ERR_MEMORY.   Threads: one call at a time per object. */
ROCMFORGE_API rf_result rf_answer_open(const rf_answer_desc *desc, rf_answer **out, rf_error *err);
ROCMFORGE_API rf_result rf_answer_close(rf_answer *a, rf_error *err);

/* More of the text, control tokens included (RF_DETOKENIZE_SPECIAL) where rf_answer_knows them. Pieces are given out as
 * soon as it is decided what they are: however the text is cut, they add up to the same.
 * Returns RF_OK; RF_ERR_CANCELLED (on_piece asked); RF_ERR_MEMORY.   Memory at most 9 x max_bytes, for calls.
 * Cost O(text). */
ROCMFORGE_API rf_result rf_answer_feed(rf_answer *a, rf_string text, rf_error *err);

/* The text has ended: give out what was held back. rf_answer_feed then begins a new text. Returns, Memory as above. */
ROCMFORGE_API rf_result rf_answer_finish(rf_answer *a, rf_error *err);

/* 1 if the text of a control token belongs to a marker of the template's formats; others are not to be shown. */
ROCMFORGE_API int rf_answer_knows(const rf_answer *a, rf_string token);

/* ---- from prompt or messages to text ---- */

/* Why a generation ended. */
typedef enum rf_finish {
    RF_FINISH_END = 0,       /* the model's end token                                              */
    RF_FINISH_CALL = 1,      /* the same, after tool calls: answer them and go on                  */
    RF_FINISH_STOP = 2,      /* a stop text                                                        */
    RF_FINISH_LENGTH = 3,    /* max_tokens                                                         */
    RF_FINISH_CONTEXT = 4,   /* the sequence is full                                               */
    RF_FINISH_CANCELLED = 5  /* a callback or rf_session_cancel                                    */
} rf_finish;

/* What to generate. Zero but for one of prompt, ids and chat will do. */
typedef struct rf_generate_desc {
    rf_string prompt;        /* text, tokenized with RF_TOKENIZE_ADD unless `append`               */
    uint32_t prompt_special; /* 1: it may name special tokens (RF_TOKENIZE_SPECIAL)                */
    const int32_t *ids;      /* or [n_ids] tokens                                                  */
    uint32_t n_ids;
    const rf_chat *chat;     /* or messages, with the opening of the answer                        */
    int32_t seq;             /* the session's sequence                                             */
    uint32_t append;         /* 1: prompt or ids go on after what the sequence holds; 0: the sequence is made to hold
                                them, and keeps the prefix that it holds already                   */
    rf_sampler *sampler;     /* NULL: greedy. The last tokens of the prompt become its history     */
    uint32_t max_tokens;     /* 0: no limit but the context                                        */
    const char *const *stop; /* [n_stop] texts that end the answer and are not given out           */
    uint32_t n_stop;
    uint32_t drop_turns;     /* chat: 1: where the context is too small leave out the oldest turns, but for system
                                messages and the last turn; also in the middle of an answer. 0: RF_ERR_CONTEXT_FULL, in
                                an answer RF_FINISH_CONTEXT                                        */
    rf_piece_fn on_piece;    /* of a chat thoughts, answer and calls (rf_answer_open); else all is answer */
    int (*on_token)(int32_t token, void *user); /* each token chosen, the end token too; nonzero: stop */
    void *user;              /* of both                                                            */
} rf_generate_desc;

typedef struct rf_generate_result {
    rf_finish finish;
    uint32_t n_prompt;       /* tokens of the prompt                                               */
    uint32_t n_reused;       /* of these, held by the sequence already                             */
    uint32_t n_generated;    /* tokens chosen, the end token too                                   */
    uint32_t n_calls;        /* tool calls given out                                               */
    uint32_t n_dropped;      /* messages left out                                                  */
    uint32_t stop_index;     /* which stop text, with RF_FINISH_STOP                               */
    int32_t last_token;      /* chosen last, not in the sequence; -1: none. To go on after RF_FINISH_LENGTH give it
                                as ids, with append                                                */
} rf_generate_result;

/* Generate text. Tokens that the sequence holds stay as they are where the new prompt has the same text: what a model
 * wrote is not tokenized anew in the next turn, so that only new text is evaluated.
 *   result  out  may be NULL
 * Returns RF_OK, with the reason in result->finish; RF_ERR_ARGUMENT; RF_ERR_CONTEXT_FULL (the prompt does not fit; with
 * drop_turns: nor does its last turn), the sequence unchanged; errors of rf_chat_tokenize, rf_session_eval (not of
 * cancelling) and the sampler's, with result filled.
 * Memory O(prompt + context) during the call.   Cost: rf_session_eval of what is new, then of each token.
 * Threads: one call at a time per session. */
ROCMFORGE_API rf_result rf_generate(rf_session *s, const rf_generate_desc *desc, rf_generate_result *result,
                                    rf_error *err);

/* ---- continuous batching ---- */

typedef struct rf_scheduler rf_scheduler;

/* One request. on_token is called for each token chosen, the end token included, in rf_scheduler_step's thread; a
 * nonzero return ends the request. on_end is called once, with the reason: RF_OK (end token, max_tokens, on_token
 * asked), or the failure. Both may be NULL; both may call rf_scheduler_submit and nothing else of the scheduler or its
 * session. */
typedef struct rf_request {
    const int32_t *prompt;   /* [n_prompt], borrowed until on_end     */
    uint32_t n_prompt;
    uint32_t max_tokens;     /* to choose; 0: no limit but the context */
    rf_sampler *sampler;     /* borrowed until on_end; has the request's own logits_fn and logprobs */
    int (*on_token)(int32_t token, void *user);
    void (*on_end)(rf_result reason, void *user);
    void *user;
} rf_request;

/* Serve many requests with one session: each step evaluates the next token of every running sequence and a share of the
 * waiting prompts.
 *   s, t            in   borrowed until rf_scheduler_close (closing them is refused); no other call may use the session
 *                        meanwhile, rf_session_cancel excepted
 *   queue_capacity  in   requests that may wait, >= 1
 *   out             out  the object, NULL on failure
 * Returns RF_OK; RF_ERR_ARGUMENT; RF_ERR_MEMORY.   Memory O(queue_capacity + n_batch).   Threads: one call at a time
 * per scheduler. */
ROCMFORGE_API rf_result rf_scheduler_open(rf_session *s, const rf_tokenizer *t, uint32_t queue_capacity,
                                          rf_scheduler **out, rf_error *err);

/* Close the scheduler: requests that run or wait end with RF_ERR_CANCELLED. NULL is fine.
 * Returns RF_OK; RF_ERR_BUSY, with the scheduler still open, from one of its own callbacks.   Threads as above. */
ROCMFORGE_API rf_result rf_scheduler_close(rf_scheduler *sch, rf_error *err);

/* Queue a request (copied).
 * Returns RF_OK; RF_ERR_BUSY (the queue is full); RF_ERR_CONTEXT_FULL (the prompt can never fit); RF_ERR_ARGUMENT (a
 * token out of range, no prompt, no sampler); RF_ERR_CANCELLED while the scheduler closes.   Memory none.   Threads as
 * above. */
ROCMFORGE_API rf_result rf_scheduler_submit(rf_scheduler *sch, const rf_request *request, rf_error *err);

/* Run one batch.
 *   n_active  out  requests that run or wait afterwards; may be NULL
 * Returns as rf_session_eval. After RF_ERR_CANCELLED all is as before the step; any other failure ends the requests
 * that run, with it as the reason, and those that wait come next.   Memory none.   Cost: rf_session_eval of at most
 * n_batch rows.   Threads as above. */
ROCMFORGE_API rf_result rf_scheduler_step(rf_scheduler *sch, uint32_t *n_active, rf_error *err);

/* ---------------------------------------------------------------------------------------------------------------
 * Stop here if you only call the library.
 * ------------------------------------------------------------------------------------------------------------ */

/* ==== 2 Device API =============================================================================== >>device-api
 * What rocmforge.h and rocmforge_kernels.hip share: ops, plans, and the table of functions that a device is. A plan
 * is data: a flat array of ops over numbered buffers, weights and states, built once per model and run by the CPU, the
 * null device or a GPU. Programs that look at plans or run them start at rf_model_get_plan and rf_device_get_api. */

/* ---- tensor types that kernels are compiled for ----
 * Sets of types as constant expressions, bit rf_type each: all that run, and those of ROCMFORGE_TYPES, a comma list of
 * names of RF_TYPE_TABLE. It is read four names at a time, padded with F32, which is always in. */
#define RF_TYPE_RUNS_BIT(NAME, id, text, elements, bytes, runs) | (uint64_t)(runs) << (id)
#define RF_TYPES_RUN ((uint64_t)0 RF_TYPE_TABLE(RF_TYPE_RUNS_BIT))
#if defined(ROCMFORGE_TYPES)
#define RF_TYPE_BIT(NAME) ((uint64_t)1 << RF_TYPE_##NAME)
#define RF_TYPE_BITS_4(a, b, c, d) (RF_TYPE_BIT(a) | RF_TYPE_BIT(b) | RF_TYPE_BIT(c) | RF_TYPE_BIT(d))
#define RF_TYPE_BITS_A(a, b, c, d, ...) (RF_TYPE_BITS_4(a, b, c, d) | RF_TYPE_BITS_B(__VA_ARGS__))
#define RF_TYPE_BITS_B(a, b, c, d, ...) (RF_TYPE_BITS_4(a, b, c, d) | RF_TYPE_BITS_C(__VA_ARGS__))
#define RF_TYPE_BITS_C(a, b, c, d, ...) (RF_TYPE_BITS_4(a, b, c, d) | RF_TYPE_BITS_D(__VA_ARGS__))
#define RF_TYPE_BITS_D(a, b, c, d, ...) (RF_TYPE_BITS_4(a, b, c, d) | RF_TYPE_BITS_E(__VA_ARGS__))
#define RF_TYPE_BITS_E(a, b, c, d, ...) (RF_TYPE_BITS_4(a, b, c, d) | RF_TYPE_BITS_F(__VA_ARGS__))
#define RF_TYPE_BITS_F(a, b, c, d, ...) (RF_TYPE_BITS_4(a, b, c, d) | RF_TYPE_BITS_G(__VA_ARGS__))
#define RF_TYPE_BITS_G(a, b, c, d, ...) RF_TYPE_BITS_4(a, b, c, d)
#define RF_TYPE_BITS(...) RF_TYPE_BITS_A(__VA_ARGS__)
#define RF_TYPES_BUILT \
    RF_TYPE_BITS(ROCMFORGE_TYPES, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, \
                 F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32)
#else
#define RF_TYPES_BUILT RF_TYPES_RUN
#endif
/* 1 or 0; a constant expression where type is one. type < RF_TYPE_COUNT */
#define RF_TYPE_IS_BUILT(type) (RF_TYPES_BUILT >> (type) & 1)

#define RF_NONE 0xffffffffu /* no buffer, weight slot, state or table */

/* ---- ops ----
 * T = rows of the step, L = those of them that want logits; "rows" is T or L, by rf_op.rows. Activations are float32,
 * row-major. W is a weight [n_rows, n_in]; "=" is "+=" under RF_OP_ACCUMULATE; a scale of 0 is 1. Buffers are in, in2,
 * in3 and out; weight, bias and factor are weight slots, any of which may be RF_NONE where the op can do without.
 *
 * To add an op: a struct of its parameters here, a row of RF_OP_TABLE below, and its kernels. Names, checks of plans
 * and `rocmforge_cli plan` come from the row. */

/* rf_op.flags; which kinds take which: RF_OP_TABLE */
#define RF_OP_ACCUMULATE 1u     /* add to out                                                                       */
#define RF_OP_NEOX 2u           /* ROPE: rotate pairs (i, i + n_rot/2) instead of (2i, 2i+1)                        */
#define RF_OP_CENTER 4u         /* RMS_NORM: subtract the mean first (LayerNorm)                                    */
#define RF_OP_POSITIONS 8u      /* EMBED: look up the row's position instead of its token                           */
#define RF_OP_LAST 0x10u        /* ROPE: rotate the last n_rot values of a head instead of the first                */
#define RF_OP_SIGMOID 0x100u    /* ROUTE: probabilities by sigmoid; MIX: weights are sigmoid(in2)                   */
#define RF_OP_CHOSEN 0x200u     /* ROUTE: softmax over the chosen experts only                                      */
#define RF_OP_NORMALIZE 0x400u  /* ROUTE: weights of the chosen experts add up to 1                                 */
#define RF_OP_PER_CHOICE 0x800u /* EXPERTS: every chosen expert has an input row of its own                         */
#define RF_OP_MLA 0x1000u    /* KV_STORE, ATTENTION: MLA, one compressed key for all heads, values are part of it */
#define RF_OP_CYCLIC 0x2000u    /* DELTA: head h reads key head h % n_k_heads                                       */
#define RF_OP_EACH_HEAD 0x4000u /* RMS_NORM: weight [n_groups, n], one vector per group                             */
#define RF_OP_ACROSS 0x8000u    /* HEADS: multiply by W[h] instead of its transpose, dequantized                    */

#define RF_MAX_TAPS 8u       /* of a CONV    */
#define RF_MAX_EXPERTS 1024u /* of a layer   */

typedef enum rf_op_rows { RF_ROWS_TOKENS = 0, RF_ROWS_LOGITS = 1 } rf_op_rows;

typedef enum rf_activation {
    RF_ACT_SILU = 0,    /* x / (1 + e^-x)                                                                            */
    RF_ACT_GELU = 1,    /* tanh form: x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)                         */
    RF_ACT_OAI = 2,     /* gpt-oss: x / (1 + e^-1.702x) * (1 + y), x = min(in, 7), y = in2 clamped to -7 .. 7        */
    RF_ACT_NONE = 3,    /* x                                                                                         */
    RF_ACT_CLAMP = 4,   /* x clamped to -limit .. limit                                                              */
    RF_ACT_SIGMOID = 5, /* 1 / (1 + e^-x)                                                                            */
    RF_ACT_RELU = 6,    /* max(x, 0)                                                                                 */
    RF_ACT_RELU2 = 7,   /* max(x, 0)^2                                                                               */
    RF_ACT_SOFTPLUS = 8, /* ln(1 + e^x)                                                                              */
    RF_ACT_SILU_MIN = 9, /* SILU of min(in, limit), times in2 clamped to -limit .. limit                             */
    RF_ACT_MIN_SILU = 10, /* min(SILU of in, limit), times in2 clamped to -limit .. limit                            */
    RF_ACT_COUNT = 11
} rf_activation;

/* EMBED: out[T, n] = scale * W[token], or the row's own embedding if it has no token. Under RF_OP_POSITIONS:
 * out (+)= scale * W[pos]. */
typedef struct rf_embed_params {
    uint32_t n;
    float scale;
} rf_embed_params;

/* RMS_NORM: out[rows, n_groups, n] = x / sqrt(mean(x^2) + eps) * weight[n] + bias[n], mean over the n values of a
 * group, x = in, less its mean under RF_OP_CENTER. Without weight 1, without bias 0. out may be in. */
typedef struct rf_norm_params {
    uint32_t n_groups, n;
    float eps;
} rf_norm_params;

/* MATMUL: out[rows, n_out] = cap(scale * (factor * in[rows, n_in] W^T + bias)), W and bias from first_row on (a fused
 * tensor holds several matrices); cap(y) = softcap * tanh(y / softcap), or y if softcap is 0. */
typedef struct rf_matmul_params {
    uint32_t n_in, n_out;
    uint32_t first_row;
    float scale, softcap;
} rf_matmul_params;

/* ROPE: rotate n_rot values of each head of in[T, n_heads, head_dim], in place, by the angles
 * pos * table[i] / weight[i], i < n_rot / 2 (without weight: / 1), cos and sin times scale. factor, if there is one, is
 * the weight for sessions of a long context: rf_session_open chooses, devices read weight only. */
typedef struct rf_rope_params {
    uint32_t n_heads, head_dim, n_rot;
    uint32_t table; /* [n_rot / 2] floats, index into rf_plan.tables */
    float scale;
} rf_rope_params;

/* KV_STORE: K[seq][head][pos] = in[T, n_kv_heads, head_dim], V[seq][head][pos] = in2[T, n_kv_heads, head_dim_v]. Under
 * RF_OP_MLA a key is in[.., head_dim_v], then in2[.., head_dim - head_dim_v], and there is no V. */
typedef struct rf_kv_store_params {
    uint32_t n_kv_heads, head_dim, head_dim_v;
} rf_kv_store_params;

/* ATTENTION: out[T, n_heads, head_dim_v] = softmax(cap(t * in K^T * scale) + slopes[h] * (p - pos)) V, over the
 * positions p <= pos of the row's sequence; with a sliding window (SWA) only those > pos - window. GQA: head h reads
 * KV head h / (n_heads / n_kv_heads). cap as in MATMUL; t = 1 + temperature * ln(1 + floor(pos / temperature_length)).
 * weight [n_heads] are attention sinks: one more score per head, whose value is 0. Under RF_OP_MLA the values are the
 * first head_dim_v elements of the keys. */
typedef struct rf_attention_params {
    uint32_t n_heads, n_kv_heads, head_dim, head_dim_v;
    uint32_t window;      /* positions seen, the row's own included; 0: all                     */
    uint32_t slopes;      /* ALiBi: [n_heads] floats, index into rf_plan.tables; RF_NONE: none  */
    float scale, softcap; /* softcap 0: none                                                    */
    float temperature;    /* 0: none                                                            */
    uint32_t temperature_length;
} rf_attention_params;

/* GLU: out[rows, n] = factor * act(in) * in2[in2_at ..]; without in2 factor * act(in); factor is one number. out may be
 * in. With repeat > 1 each value of in2 multiplies so many in a row. */
typedef struct rf_glu_params {
    uint32_t n, in2_at;
    uint32_t activation; /* rf_activation                  */
    float limit;         /* of RF_ACT_CLAMP and those with MIN */
    uint32_t repeat;     /* 0: 1                           */
} rf_glu_params;

/* GATHER: out[L, n] = the rows of in[T, n] that want logits, in order. */
typedef struct rf_gather_params {
    uint32_t n;
} rf_gather_params;

/* ARGMAX: out[rows] = id (int32) of the largest of in[rows, n]; the smallest id among equals; NaN never wins; -1 if
 * nothing is greater than -infinity. */
typedef struct rf_argmax_params {
    uint32_t n;
} rf_argmax_params;

/* ROUTE, the router of a mixture of experts: out[T, 2, n_used] = ids (int32) of the top-k experts, best first, and
 * their weights. From the logits in[T, n_experts]:
 *   p = softmax(in), or sigmoid(in) under RF_OP_SIGMOID, or in under RF_OP_CHOSEN;   s = p + bias[n_experts]
 *   n_groups > 1: experts form equal groups; only the n_groups_used groups with the largest sum of their two largest s
 *   take part.   ids = the n_used largest s, the smaller id among equals, NaN last
 *   weights = p[ids], softmax(p[ids]) under RF_OP_CHOSEN; under RF_OP_NORMALIZE / max(sum, 2^-14); times scale */
typedef struct rf_route_params {
    uint32_t n_experts, n_used, n_groups, n_groups_used;
    float scale;
} rf_route_params;

/* EXPERTS: out[T, n_used, n_out] = factor[id] * in[T, n_in] W[id]^T + bias[id][n_out], id from a ROUTE's output in2.
 * weight is the first of n_experts consecutive slots; only chosen experts need be loaded. Of each matrix the rows from
 * first_row on. Under RF_OP_PER_CHOICE in[T, n_used, n_in]. */
typedef struct rf_experts_params {
    uint32_t n_in, n_out, first_row;
    uint32_t n_experts, n_used;
} rf_experts_params;

/* MIX: out[T, n] = scale * sum over k of weight[k] * in[T, n_used, n], in order of k; weights from a ROUTE's output
 * in2, or sigmoid(in2[T, n_used]) under RF_OP_SIGMOID; without in2 1. */
typedef struct rf_mix_params {
    uint32_t n, n_used;
    float scale;
} rf_mix_params;

/* HEADS, a matrix per head (MLA): out[T, n_heads, n_out + rest] = first n_in values of each head of
 * in[T, n_heads, head_dim] times W[h]^T, then the other rest = head_dim - n_in values unchanged. W[h] are n_out rows
 * from row first_row + h * head_rows on. Under RF_OP_ACROSS: times W[h], n_in rows of n_out values. */
typedef struct rf_heads_params {
    uint32_t n_heads, head_dim, n_in, n_out;
    uint32_t first_row, head_rows;
} rf_heads_params;

/* CONV, a causal depthwise convolution: out[T, n] = act(sum over j < n_taps of W[c, j] * x[t - n_taps + 1 + j, c] +
 * bias[c]). x = rows of in[T, n], before them the sequence's state [n_taps - 1, n], oldest first. W is [n, n_taps] of
 * floats. act is RF_ACT_SILU or RF_ACT_NONE. out may be in. */
typedef struct rf_conv_params {
    uint32_t n, n_taps;
    uint32_t activation;
} rf_conv_params;

/* DELTA, the gated delta rule (arXiv 2412.06464): out[T, n_heads, head_dim_v] of in[T, q | k | v], q and k of n_k_heads
 * heads, v of n_heads. Head h has a state S[head_dim, head_dim_v] and reads q and k of head h / (n_heads / n_k_heads),
 * or h % n_k_heads under RF_OP_CYCLIC. Row by row of a sequence, with x' = x / sqrt(|x|^2 + eps):
 *   S *= exp(softplus(in3[h] + bias[h]) * weight[h]);   d = sigmoid(in2[h]) * (v - S^T k')
 *   S += k' d^T;   out = scale * S^T q' */
typedef struct rf_delta_params {
    uint32_t n_heads, n_k_heads, head_dim, head_dim_v;
    float scale, eps;
} rf_delta_params;

/* SLICE: out[T, out_at .., n_heads, n] = values at .. at + n of each head of in[T, n_heads, head_dim]. What is before
 * out_at in a row of out stays. */
typedef struct rf_slice_params {
    uint32_t n_heads, head_dim, at, n, out_at;
} rf_slice_params;

/* The one table of ops: X(KIND, id, member, rows, flags, operands).
 *   member    of rf_op's union, also the op's name       rows   RF_OP_ANY_ROWS, or the only rf_op_rows there may be
 *   flags     that the kind takes
 *   operands  what an op reads and writes, as calls on the rf_op_spec *s, from its rf_op *op and its parameters *p:
 *     rf_op_in, rf_op_in_if, rf_op_out   a buffer (_if: unless RF_NONE) and the values of a row
 *     rf_op_matrix    a weight slot, how many consecutive ones, n_in, and the rows it must have
 *     rf_op_vector, rf_op_vector_if      a weight slot of at least so many floats (_if: unless RF_NONE)
 *     rf_op_kv, rf_op_recurrent          the op's state; rf_op_need: what must hold besides */
#define RF_OP_TABLE(X) \
    X(EMBED, 0, embed, RF_ROWS_TOKENS, RF_OP_POSITIONS | RF_OP_ACCUMULATE, { \
        rf_op_out(s, p->n); \
        rf_op_matrix(s, op->weight, 1, p->n, op->flags & RF_OP_POSITIONS ? 1 : plan->n_vocab); \
        rf_op_need(s, op->flags != RF_OP_ACCUMULATE, "only positions are added"); \
    }) \
    X(RMS_NORM, 1, norm, RF_OP_ANY_ROWS, RF_OP_CENTER | RF_OP_ACCUMULATE | RF_OP_EACH_HEAD, { \
        rf_op_in(s, op->in, (uint64_t)p->n_groups * p->n); \
        rf_op_out(s, (uint64_t)p->n_groups * p->n); \
        rf_op_vector_if(s, op->weight, (op->flags & RF_OP_EACH_HEAD ? (uint64_t)p->n_groups : 1) * p->n); \
        rf_op_vector_if(s, op->bias, p->n); \
    }) \
    X(MATMUL, 2, matmul, RF_OP_ANY_ROWS, RF_OP_ACCUMULATE, { \
        rf_op_in(s, op->in, p->n_in); \
        rf_op_out(s, p->n_out); \
        rf_op_matrix(s, op->weight, 1, p->n_in, (uint64_t)p->first_row + p->n_out); \
        rf_op_vector_if(s, op->bias, (uint64_t)p->first_row + p->n_out); \
        rf_op_vector_if(s, op->factor, 1); \
        rf_op_need(s, op->in != op->out, "out must not be in"); \
    }) \
    X(ROPE, 3, rope, RF_ROWS_TOKENS, RF_OP_NEOX | RF_OP_LAST, { \
        rf_op_in(s, op->in, (uint64_t)p->n_heads * p->head_dim); \
        rf_op_out(s, (uint64_t)p->n_heads * p->head_dim); \
        rf_op_vector_if(s, op->weight, p->n_rot / 2); \
        rf_op_vector_if(s, op->factor, p->n_rot / 2); \
        rf_op_need(s, op->in == op->out, "out must be in"); \
        rf_op_need(s, p->n_rot <= p->head_dim && p->n_rot % 2 == 0, "n_rot must be even, and a head's at most"); \
        rf_op_need(s, (uint64_t)p->table + p->n_rot / 2 <= plan->n_tables, "the table is too short"); \
    }) \
    X(KV_STORE, 4, kv_store, RF_ROWS_TOKENS, RF_OP_MLA, { \
        const int mla = (op->flags & RF_OP_MLA) != 0; \
        const uint32_t rest = p->head_dim - p->head_dim_v; \
        rf_op_need(s, !mla || p->head_dim_v < p->head_dim, "a latent key must be longer than its values"); \
        rf_op_in(s, op->in, (uint64_t)p->n_kv_heads * (mla ? p->head_dim_v : p->head_dim)); \
        rf_op_in(s, op->in2, (uint64_t)p->n_kv_heads * (mla ? rest : p->head_dim_v)); \
        rf_op_kv(s, p->n_kv_heads, p->head_dim, mla ? 0 : p->head_dim_v); \
    }) \
    X(ATTENTION, 5, attention, RF_ROWS_TOKENS, RF_OP_MLA, { \
        const int mla = (op->flags & RF_OP_MLA) != 0; \
        rf_op_in(s, op->in, (uint64_t)p->n_heads * p->head_dim); \
        rf_op_out(s, (uint64_t)p->n_heads * p->head_dim_v); \
        rf_op_vector_if(s, op->weight, p->n_heads); \
        rf_op_kv(s, p->n_kv_heads, p->head_dim, mla ? 0 : p->head_dim_v); \
        s->window = p->window; \
        rf_op_need(s, !mla || p->head_dim_v < p->head_dim, "a latent key must be longer than its values"); \
        rf_op_need(s, p->n_kv_heads > 0 && p->n_heads % p->n_kv_heads == 0, "n_heads is no multiple of n_kv_heads"); \
        rf_op_need(s, p->temperature == 0 || p->temperature_length > 0, "a temperature needs its length"); \
        rf_op_need(s, p->slopes == RF_NONE || (uint64_t)p->slopes + p->n_heads <= plan->n_tables, \
                   "the table of slopes is too short"); \
    }) \
    X(GLU, 6, glu, RF_OP_ANY_ROWS, 0, { \
        rf_op_in(s, op->in, p->n); \
        rf_op_in_if(s, op->in2, p->in2_at + (p->repeat > 1 ? (p->n + (uint64_t)p->repeat - 1) / p->repeat : p->n)); \
        rf_op_out(s, p->n); \
        rf_op_vector_if(s, op->factor, 1); \
        rf_op_need(s, p->activation < RF_ACT_COUNT, "the activation is unknown"); \
        rf_op_need(s, (p->activation != RF_ACT_OAI && p->activation < RF_ACT_SILU_MIN) || \
                   (op->in2 != RF_NONE && p->repeat <= 1), "this activation needs in2, a value for each"); \
    }) \
    X(GATHER, 7, gather, RF_ROWS_LOGITS, 0, { \
        rf_op_in(s, op->in, p->n); \
        s->in[0].rows = RF_ROWS_TOKENS; \
        rf_op_out(s, p->n); \
    }) \
    X(ARGMAX, 8, argmax, RF_OP_ANY_ROWS, 0, { \
        rf_op_in(s, op->in, p->n); \
        rf_op_out(s, 1); \
    }) \
    X(ROUTE, 9, route, RF_ROWS_TOKENS, RF_OP_SIGMOID | RF_OP_CHOSEN | RF_OP_NORMALIZE, { \
        rf_op_in(s, op->in, p->n_experts); \
        rf_op_out(s, 2 * (uint64_t)p->n_used); \
        rf_op_vector_if(s, op->bias, p->n_experts); \
        rf_op_need_experts(s, p->n_used, p->n_experts); \
        rf_op_need(s, p->n_groups <= 1 || (p->n_experts % p->n_groups == 0 && p->n_groups_used <= p->n_groups && \
                                           (uint64_t)p->n_experts / p->n_groups * p->n_groups_used >= p->n_used), \
                   "the groups of experts do not fit"); \
    }) \
    X(EXPERTS, 10, experts, RF_ROWS_TOKENS, RF_OP_PER_CHOICE, { \
        rf_op_in(s, op->in, (op->flags & RF_OP_PER_CHOICE ? (uint64_t)p->n_used : 1) * p->n_in); \
        rf_op_in(s, op->in2, 2 * (uint64_t)p->n_used); \
        rf_op_out(s, (uint64_t)p->n_used * p->n_out); \
        rf_op_need_experts(s, p->n_used, p->n_experts); \
        rf_op_matrix(s, op->weight, p->n_experts, p->n_in, (uint64_t)p->first_row + p->n_out); \
        rf_op_vector_if(s, op->bias, (uint64_t)p->n_experts * p->n_out); \
        rf_op_vector_if(s, op->factor, p->n_experts); \
        rf_op_need(s, op->in != op->out, "out must not be in"); \
    }) \
    X(MIX, 11, mix, RF_ROWS_TOKENS, RF_OP_ACCUMULATE | RF_OP_SIGMOID, { \
        rf_op_in(s, op->in, (uint64_t)p->n_used * p->n); \
        rf_op_in_if(s, op->in2, (op->flags & RF_OP_SIGMOID ? 1 : 2) * (uint64_t)p->n_used); \
        rf_op_out(s, p->n); \
        rf_op_need_experts(s, p->n_used, RF_MAX_EXPERTS); \
        rf_op_need(s, op->in != op->out, "out must not be in"); \
    }) \
    X(HEADS, 12, heads, RF_ROWS_TOKENS, RF_OP_ACROSS, { \
        const int across = (op->flags & RF_OP_ACROSS) != 0; \
        const uint32_t n_rows = across ? p->n_in : p->n_out; \
        rf_op_need(s, p->n_heads > 0 && p->n_in <= p->head_dim && p->head_rows >= n_rows, "the heads do not fit"); \
        rf_op_need(s, op->in != op->out, "out must not be in"); \
        rf_op_in(s, op->in, (uint64_t)p->n_heads * p->head_dim); \
        rf_op_out(s, (uint64_t)p->n_heads * ((uint64_t)p->n_out + p->head_dim - p->n_in)); \
        rf_op_matrix(s, op->weight, 1, across ? p->n_out : p->n_in, \
                     p->first_row + (p->n_heads - 1ull) * p->head_rows + n_rows); \
    }) \
    X(CONV, 13, conv, RF_ROWS_TOKENS, 0, { \
        rf_op_in(s, op->in, p->n); \
        rf_op_out(s, p->n); \
        rf_op_vector(s, op->weight, (uint64_t)p->n * p->n_taps); \
        rf_op_vector_if(s, op->bias, p->n); \
        rf_op_recurrent(s, (p->n_taps - 1ull) * p->n); \
        rf_op_need(s, p->n_taps >= 2 && p->n_taps <= RF_MAX_TAPS, "there must be 2 to 8 taps"); \
        rf_op_need(s, p->activation == RF_ACT_SILU || p->activation == RF_ACT_NONE, "the activation is unknown"); \
    }) \
    X(DELTA, 14, delta, RF_ROWS_TOKENS, RF_OP_CYCLIC, { \
        const uint64_t n_values = (uint64_t)p->n_heads * p->head_dim_v; \
        rf_op_in(s, op->in, 2 * (uint64_t)p->n_k_heads * p->head_dim + n_values); \
        rf_op_in(s, op->in2, p->n_heads); \
        rf_op_in(s, op->in3, p->n_heads); \
        rf_op_out(s, n_values); \
        rf_op_vector(s, op->weight, p->n_heads); \
        rf_op_vector(s, op->bias, p->n_heads); \
        rf_op_recurrent(s, n_values * p->head_dim); \
        rf_op_need(s, p->n_k_heads > 0 && p->n_heads % p->n_k_heads == 0, "n_heads is no multiple of n_k_heads"); \
        rf_op_need(s, op->out != op->in && op->out != op->in2 && op->out != op->in3, "out must not be an input"); \
    }) \
    X(SLICE, 15, slice, RF_ROWS_TOKENS, 0, { \
        rf_op_in(s, op->in, (uint64_t)p->n_heads * p->head_dim); \
        rf_op_out(s, p->out_at + (uint64_t)p->n_heads * p->n); \
        rf_op_need(s, (uint64_t)p->at + p->n <= p->head_dim, "the slice is beyond its head"); \
        rf_op_need(s, op->in != op->out, "out must not be in"); \
    })

#define RF_OP_ANY_ROWS 0xffu

typedef enum rf_op_kind {
#define RF_OP_ENUM(KIND, id, member, rows, flags, operands) RF_OP_##KIND = id,
    RF_OP_TABLE(RF_OP_ENUM)
#undef RF_OP_ENUM
    RF_OP_KIND_COUNT
} rf_op_kind;

/* One op: plain data, so that plans can be printed, hashed and compared. Unused fields are 0, or RF_NONE where they
 * name something. */
typedef struct rf_op {
    uint32_t kind;  /* rf_op_kind                                            */
    uint32_t rows;  /* rf_op_rows                                            */
    uint32_t flags;
    int32_t layer;  /* -1: before the first; n_layers: after the last        */
    uint32_t in, in2, in3, out;    /* buffers                                */
    uint32_t state;                /* KV_STORE, ATTENTION, CONV, DELTA       */
    uint32_t weight, bias, factor; /* slots                                  */
    union {
#define RF_OP_MEMBER(KIND, id, member, rows, flags, operands) rf_##member##_params member;
        RF_OP_TABLE(RF_OP_MEMBER)
#undef RF_OP_MEMBER
    };
} rf_op;

/* Whether two ROPE ops rotate by the same angles. */
static inline int rf_op_same_angles(const rf_op *a, const rf_op *b) {
    return a->rope.n_rot == b->rope.n_rot && a->rope.table == b->rope.table && a->weight == b->weight &&
           a->rope.scale == b->rope.scale;
}

/* An activation buffer: float32 [rows, width]; ARGMAX, and ROUTE in the first half of a row, write int32. */
typedef struct rf_plan_buffer {
    const char *name;
    uint32_t rows;  /* rf_op_rows: as many rows as the step, or as logits, at most */
    uint32_t width;
} rf_plan_buffer;

/* A layer's KV cache or recurrent state: memory that outlives a step.
 * KV cache: K [n_seq][n_kv_heads][cells][head_dim], then, aligned to RF_STATE_ALIGN, V [n_seq][n_kv_heads][cells]
 * [head_dim_v], elements of the session's cache type. Position p is in cell p % cells. cells is n_ctx; or, with a
 * sliding window, a ring of as many as the window and a step's rows need, a multiple of RF_STATE_CELLS, so that
 * RF_STATE_CELLS positions from a multiple of it on are always contiguous. head_dim_v is 0 under RF_OP_MLA.
 * Recurrent state (width > 0): [n_slots][width] float32, as CONV and DELTA say (DELTA: S of every head). */
typedef struct rf_plan_state {
    uint32_t layer;
    uint32_t n_kv_heads;
    uint32_t head_dim, head_dim_v;
    uint32_t window; /* the most positions its ATTENTION ops see, the row's own included; 0: all   */
    uint32_t width;  /* floats of a recurrent state; 0: a KV cache                                 */
} rf_plan_state;

#define RF_STATE_ALIGN 256u
#define RF_STATE_CELLS 256u

/* Bytes of n consecutive values in a KV cache. RF_CACHE_Q8_0: n int8 q, then n / 32 scales as f16; value i is
 * q[i] * scale[i / 32], the scale is max |x| of the 32 divided by 127, and q is x / scale, rounded to nearest. */
static inline uint64_t rf_cache_row_bytes(uint32_t cache_type, uint64_t n) {
    return cache_type == RF_CACHE_F32 ? 4 * n : cache_type == RF_CACHE_F16 ? 2 * n : n / 32 * 34;
}

/* A weight: a tensor of the file, or one expert's matrix of it. Matrices are [n_rows, n_in]. The tensor is
 * ne={n_in, n_rows}; of experts ne={n_in, n_rows, n_experts}, matrix `expert` beginning at byte expert * size_bytes; of
 * HEADS also ne={n_in, n_rows / n_heads, n_heads}. */
typedef struct rf_plan_weight {
    char name[68];        /* NUL-terminated                                    */
    uint32_t tensor;      /* rf_tensor_info.index                              */
    uint32_t type;        /* rf_type                                           */
    uint32_t n_in;
    uint32_t n_rows;      /* 1 for a vector                                    */
    int32_t layer;        /* as rf_op.layer                                    */
    uint32_t row_reads;   /* 1: only single rows are read (embedding)          */
    uint64_t size_bytes;  /* as stored in the file                             */
    uint32_t n_experts, expert; /* matrices of the tensor, and which one; 0: not of experts */
} rf_plan_weight;

typedef struct rf_plan {
    const rf_op *ops;
    const rf_plan_buffer *buffers;
    const rf_plan_state *states;
    const rf_plan_weight *weights; /* in the order of first use */
    const float *tables;
    uint32_t n_ops, n_buffers, n_states, n_weights, n_tables;
    uint32_t n_layers, n_embd, n_vocab;
    uint32_t logits, argmax;       /* buffers                   */
} rf_plan;

/* ---- what an op needs: RF_OP_TABLE's operands, as data ---- */

/* A buffer that an op reads or writes. */
typedef struct rf_op_buffer {
    uint32_t id, rows; /* RF_NONE: the op has none; rf_op_rows */
    uint64_t width;    /* values of a row, at least            */
} rf_op_buffer;

/* A weight, or n_slots consecutive ones: matrices whose rows are n_in long, of which there are n_rows at least; or a
 * vector (n_in 0) of n_rows floats at least. */
typedef struct rf_op_weight {
    uint32_t slot, n_slots;
    uint64_t n_in, n_rows;
} rf_op_weight;

#define RF_OP_INS 3u
#define RF_OP_WEIGHTS 3u

typedef struct rf_op_spec {
    const char *name;
    uint32_t rows, flags;  /* as in RF_OP_TABLE                          */
    uint32_t n_in, n_weights;
    rf_op_buffer in[RF_OP_INS], out;
    rf_op_weight weight[RF_OP_WEIGHTS];
    uint32_t n_kv_heads, head_dim, head_dim_v, window; /* of its KV cache; n_kv_heads 0: none */
    uint64_t state_width;                              /* of its recurrent state; 0: none     */
    const char *unmet;     /* the first rf_op_need that does not hold; NULL: all do */
} rf_op_spec;

static inline void rf_op_need(rf_op_spec *s, int holds, const char *what) {
    if (!holds && !s->unmet) s->unmet = what;
}
static inline void rf_op_need_experts(rf_op_spec *s, uint32_t n_used, uint32_t n_experts) {
    rf_op_need(s, n_used > 0 && n_used <= n_experts && n_experts <= RF_MAX_EXPERTS, "too few or too many experts");
}
static inline void rf_op_in_if(rf_op_spec *s, uint32_t id, uint64_t width) {
    const rf_op_buffer in = {id, s->out.rows, width};
    if (id != RF_NONE) s->in[s->n_in++] = in;
}
static inline void rf_op_in(rf_op_spec *s, uint32_t id, uint64_t width) {
    rf_op_in_if(s, id, width);
    rf_op_need(s, id != RF_NONE, "an input is missing");
}
static inline void rf_op_out(rf_op_spec *s, uint64_t width) {
    s->out.width = width;
    rf_op_need(s, width > 0, "it has no results");
}
static inline void rf_op_matrix(rf_op_spec *s, uint32_t slot, uint32_t n_slots, uint64_t n_in, uint64_t n_rows) {
    const rf_op_weight w = {slot, n_slots, n_in, n_rows};
    if (slot != RF_NONE) s->weight[s->n_weights++] = w;
    rf_op_need(s, slot != RF_NONE && n_in > 0, "its weight is missing, or its rows are empty");
}
static inline void rf_op_vector_if(rf_op_spec *s, uint32_t slot, uint64_t n) {
    const rf_op_weight w = {slot, 1, 0, n};
    if (slot != RF_NONE) s->weight[s->n_weights++] = w;
}
static inline void rf_op_vector(rf_op_spec *s, uint32_t slot, uint64_t n) {
    rf_op_vector_if(s, slot, n);
    rf_op_need(s, slot != RF_NONE, "its weight is missing");
}
static inline void rf_op_kv(rf_op_spec *s, uint32_t n_kv_heads, uint32_t head_dim, uint32_t head_dim_v) {
    s->n_kv_heads = n_kv_heads;
    s->head_dim = head_dim;
    s->head_dim_v = head_dim_v;
    rf_op_need(s, n_kv_heads > 0, "it has no KV heads");
}
static inline void rf_op_recurrent(rf_op_spec *s, uint64_t width) {
    s->state_width = width;
    rf_op_need(s, width > 0, "its state has no values");
}

/* Name of a kind ("matmul"), "?" for an unknown one. */
static inline const char *rf_op_name(uint32_t kind) {
    static const char *const names[] = {
#define RF_OP_NAME(KIND, id, member, rows, flags, operands) #member,
        RF_OP_TABLE(RF_OP_NAME)
#undef RF_OP_NAME
    };
    return kind < RF_OP_KIND_COUNT ? names[kind] : "?";
}

/* What op needs, by its row of the table. Numbers in it are not checked yet: rf_op_check. */
static inline rf_op_spec rf_op_get_spec(const rf_plan *plan, const rf_op *op) {
    const rf_op_buffer none = {RF_NONE, 0, 0}, out = {op->out, op->rows, 0};
    const rf_op_weight no_weight = {RF_NONE, 0, 0, 0};
    rf_op_spec spec = {rf_op_name(op->kind), 0, 0, 0, 0, {none, none, none}, out, {no_weight, no_weight, no_weight},
                       0, 0, 0, 0, 0, NULL}, *s = &spec;
    switch (op->kind) {
#define RF_OP_CASE(KIND, id, member, rows_, flags_, operands) \
    case RF_OP_##KIND: { \
        const rf_##member##_params *p = &op->member; \
        s->rows = rows_; \
        s->flags = flags_; \
        operands \
        break; \
    }
        RF_OP_TABLE(RF_OP_CASE)
#undef RF_OP_CASE
    default: rf_op_need(s, 0, "its kind is unknown");
    }
    return spec;
}

static inline int rf_op_buffer_fits(const rf_plan *plan, const rf_op_buffer *b) {
    return b->id < plan->n_buffers && plan->buffers[b->id].rows == b->rows && b->width > 0 &&
           b->width <= plan->buffers[b->id].width;
}

static inline int rf_op_weight_fits(const rf_plan *plan, const rf_op_weight *want) {
    if (want->slot >= plan->n_weights || want->n_slots > plan->n_weights - want->slot) return 0;
    const rf_plan_weight *first = &plan->weights[want->slot];
    for (const rf_plan_weight *w = first; w < first + want->n_slots; w++) {
        const uint64_t n = (uint64_t)w->n_in * w->n_rows;
        if (want->n_in == 0 && (n < want->n_rows || (w->type != RF_TYPE_F32 && w->type != RF_TYPE_F16 &&
                                                     w->type != RF_TYPE_BF16)))
            return 0;
        if (want->n_in && (w->n_in != want->n_in || w->n_rows < want->n_rows || w->type != first->type)) return 0;
    }
    return 1;
}

static inline int rf_op_state_fits(const rf_plan *plan, const rf_op *op, const rf_op_spec *s) {
    if (s->n_kv_heads == 0 && s->state_width == 0) return 1;
    if (op->state >= plan->n_states) return 0;
    const rf_plan_state *state = &plan->states[op->state];
    if (s->state_width) return state->width == s->state_width;
    return state->width == 0 && state->n_kv_heads == s->n_kv_heads && state->head_dim == s->head_dim &&
           state->head_dim_v == s->head_dim_v &&
           (op->kind != RF_OP_ATTENTION || state->window == 0 || (s->window && s->window <= state->window));
}

/* NULL if the op is one that this version knows, its numbers fit together, and its buffers, weights and state are there
 * and large enough; else what is wrong. What a device can do besides is the device's to say. */
static inline const char *rf_op_check(const rf_plan *plan, const rf_op *op) {
    const rf_op_spec s = rf_op_get_spec(plan, op);
    if (s.unmet) return s.unmet;
    if (op->flags & ~s.flags) return "it has a flag that its kind does not take";
    if (op->rows > RF_ROWS_LOGITS || (s.rows != RF_OP_ANY_ROWS && op->rows != s.rows)) return "it has the wrong rows";
    for (uint32_t i = 0; i < s.n_in; i++)
        if (!rf_op_buffer_fits(plan, &s.in[i])) return "an input is no buffer of its rows that is wide enough";
    if (s.out.width && !rf_op_buffer_fits(plan, &s.out)) return "out is no buffer of its rows that is wide enough";
    for (uint32_t i = 0; i < s.n_weights; i++)
        if (!rf_op_weight_fits(plan, &s.weight[i])) return "a weight has another shape or type";
    return rf_op_state_fits(plan, op, &s) ? NULL : "its state does not fit";
}

/* 1 if op i is the first of a segment. A segment is the ops of a layer, cut after each ROUTE: then the host knows which
 * experts must be loaded. */
static inline int rf_op_begins_segment(const rf_plan *plan, uint32_t i) {
    return i == 0 || plan->ops[i].layer != plan->ops[i - 1].layer || plan->ops[i - 1].kind == RF_OP_ROUTE;
}

/* The plan of a model: borrowed, immutable, until the model is closed. NULL for NULL. Threads any. */
ROCMFORGE_API const rf_plan *rf_model_get_plan(const rf_model *m);

/* One row of a step. */
typedef struct rf_step_row {
    int32_t token;     /* -1: rf_step.embeddings has the row            */
    int32_t seq;
    int32_t pos;
    int32_t logits_row;/* row of the logits buffer, -1 for none         */
    /* Slots of recurrent states, 1 and up. from: where the sequence's first row of the step reads its state, 0 if it is
     * the first row of all. to: where this row's state is saved, 0 for nowhere; no two rows save to the same slot. */
    uint32_t from, to;
} rf_step_row;

/* What varies from call to call; host memory, read only during plan_run. Rows of one sequence have consecutive,
 * ascending positions. */
typedef struct rf_step {
    const rf_step_row *rows;
    const float *embeddings;    /* [n_rows, n_embd], or NULL                        */
    const uint32_t *logit_rows; /* [n_logits] row of the step behind each logits row */
    uint32_t n_rows;
    uint32_t n_logits;          /* logits rows of this step                          */
    uint32_t first_logits_row;  /* they go to [first_logits_row, + n_logits)         */
} rf_step;

/* Objects of a device, opaque to the host. */
typedef struct rf_dev rf_dev;           /* an opened device                                            */
typedef struct rf_queue rf_queue;       /* work in order; one per session, one or more for copies      */
typedef struct rf_table rf_table;       /* the weights of a model by slot, read by kernels             */
typedef struct rf_prepared rf_prepared; /* a plan bound to a session's memory                          */

/* Device memory: the host never computes with base, only adds offsets through the calls below. */
typedef struct rf_mem {
    void *base;
    uint64_t size_bytes;
} rf_mem;

/* A place in device memory. */
typedef struct rf_mem_at {
    const rf_mem *mem;
    uint64_t offset;
} rf_mem_at;

/* A point in a queue's work; value 0: already reached. */
typedef struct rf_ticket {
    rf_queue *queue;
    uint64_t value;
} rf_ticket;

/* How a device stores a weight. in_place: it can use the file's bytes where they are (host memory, aligned to `align`,
 * valid until weight_clear); size_bytes is then what a copy would need. */
typedef struct rf_weight_layout {
    uint64_t size_bytes;
    uint64_t scratch_bytes; /* device memory needed while writing, for repacking */
    uint32_t align;
    uint32_t in_place;
} rf_weight_layout;

/* Rows [row0, row0 + n_rows) of a weight to upload. src is pinned host memory, or the device copies it before
 * weight_write returns. In place: mem is NULL, src are the file's bytes, all rows. */
typedef struct rf_weight_part {
    uint32_t slot;
    uint32_t row0, n_rows;
    const void *src;
    const rf_mem *mem;      /* of weight_layout's size for the whole weight, from offset on */
    uint64_t offset;
    const rf_mem *scratch;  /* as asked for by weight_layout, or NULL                       */
} rf_weight_part;

/* Everything a session brings for plan_prepare; kept by reference until plan_release. */
typedef struct rf_plan_bind {
    const rf_plan *plan;
    rf_table *table;
    rf_mem scratch;                /* activations                                            */
    rf_mem state;                  /* keys and values, recurrent states                      */
    const uint64_t *buffer_offset; /* [n_buffers] bytes into scratch, multiples of 256       */
    const uint64_t *state_offset;  /* [n_states] bytes into state, multiples of 256          */
    const uint32_t *state_cells;   /* [n_states] cells per sequence; NULL: n_ctx each        */
    uint32_t n_ctx;                /* positions per sequence                                 */
    uint32_t n_seq;
    uint32_t n_batch;              /* rows of a step at most                                 */
    uint32_t n_logits;             /* rows of the logits buffers at most                     */
    uint32_t cache_type;           /* rf_cache_type                                          */
    uint32_t n_slots;              /* of recurrent states, for all sequences                 */
} rf_plan_bind;

/* Cells of a state per sequence; 0 if it is neither the context nor a ring that is large enough. */
static inline uint32_t rf_state_cells(const rf_plan_bind *bind, uint32_t state) {
    const uint32_t n = bind->state_cells ? bind->state_cells[state] : bind->n_ctx,
                   window = bind->plan->states[state].window;
    const int is_ring = window && n % RF_STATE_CELLS == 0 && n >= (uint64_t)window + bind->n_batch - 1;
    return n == bind->n_ctx || is_ring ? n : 0;
}

/* How a GPU launches the matrix products of a decode step (one token). All launch configs give the same bits; which
 * is fastest depends on the GPU. */
typedef struct rf_launch_config {
    uint32_t in_flight;     /* pieces of 64 weights that a lane has in flight at most: 1 or 2           */
    uint32_t blocks_per_cu; /* blocks of a launch per compute unit, at most                             */
    float us;               /* of the fastest step that was timed, in microseconds; 0: none was         */
} rf_launch_config;

#define RF_LAUNCH_CONFIGS 4u

typedef struct rf_session_stats {
    uint64_t launches;     /* kernels that a GPU was given to run, those of graphs included; 0 on the CPU   */
    uint64_t submissions;  /* calls of its driver that gave them: of a kernel, or of a graph of many        */
    rf_launch_config configs[RF_LAUNCH_CONFIGS]; /* [n_configs] the default first                           */
    uint32_t n_configs;    /* 0: there is nothing to choose, as on the CPU                                  */
    uint32_t config;       /* index of the one that decode steps use now                                    */
    uint32_t config_is_timed; /* 1: config was the fastest, or is the default and no other was 1 % faster; it stays.
                              0: not all are timed yet                                                      */
} rf_session_stats;

#define RF_DEVICE_API_VERSION 7u

/* The table of a device. Every entry may be called from any thread and leaves the thread's current device as it was.
 * Failures return a code and fill err; a device that is gone for good says so in device_info.lost. Asynchronous work
 * reports its failure at the ticket. */
typedef struct rf_device_api {
    uint32_t size_bytes, version;           /* sizeof(rf_device_api), RF_DEVICE_API_VERSION: a mismatch of these or */
    uint32_t op_bytes, step_bytes;          /* of sizeof(rf_op), sizeof(rf_step) means: rebuild the kernels file    */
    const char *name;                       /* prefix of its device names                                           */

    rf_result (*device_list)(rf_device_info *out, uint32_t capacity, uint32_t *count, rf_error *err);
    rf_result (*device_open)(uint32_t index, const rf_device_desc *desc, rf_dev **out, rf_error *err);
    void (*device_close)(rf_dev *d);
    rf_result (*device_info)(rf_dev *d, rf_device_info *out, rf_error *err);

    /* host memory that copies can read and write asynchronously (pinned) */
    rf_result (*host_create)(rf_dev *d, uint64_t size_bytes, void **out, rf_error *err);
    void (*host_release)(rf_dev *d, void *host);
    /* device memory, aligned to 256, contents undefined; release waits for nothing: the host knows it is idle */
    rf_result (*mem_create)(rf_dev *d, uint64_t size_bytes, rf_mem *out, rf_error *err);
    void (*mem_release)(rf_dev *d, rf_mem *mem);

    rf_result (*queue_create)(rf_dev *d, rf_queue **out, rf_error *err);
    void (*queue_release)(rf_queue *q); /* waits for its work */

    /* weights: a table of slots, described by the plan; a slot is empty until the write of its last row */
    rf_result (*table_create)(rf_dev *d, const rf_plan *plan, rf_table **out, rf_error *err);
    void (*table_release)(rf_table *t);
    rf_weight_layout (*weight_layout)(rf_dev *d, const rf_plan_weight *w);
    /* *ticket: src may be reused */
    rf_result (*weight_write)(rf_table *t, rf_queue *q, const rf_weight_part *part, rf_ticket *ticket, rf_error *err);
    void (*weight_clear)(rf_table *t, uint32_t slot); /* no running op uses it */

    rf_result (*mem_write)(rf_queue *q, const rf_mem *dst, uint64_t offset, const void *src, uint64_t n,
                           rf_ticket *ticket, rf_error *err);
    rf_result (*mem_read)(rf_queue *q, const rf_mem *src, uint64_t offset, void *dst, uint64_t n, rf_ticket *ticket,
                          rf_error *err);
    rf_result (*mem_copy)(rf_queue *q, rf_mem_at dst, rf_mem_at src, uint64_t n, rf_ticket *ticket, rf_error *err);
    rf_result (*mem_fill)(rf_queue *q, const rf_mem *dst, uint64_t offset, uint8_t value, uint64_t n,
                          rf_ticket *ticket, rf_error *err);

    /* Reads n bytes at full speed, to measure bandwidth: the uint64 at sum += the n / 8 uint64 at src, modulo 2^64. n
     * and src.offset are multiples of 16, sum.offset of 8. */
    rf_result (*mem_sum)(rf_queue *q, rf_mem_at src, uint64_t n, rf_mem_at sum, rf_ticket *ticket, rf_error *err);

    int (*ticket_done)(const rf_ticket *ticket);                                             /* never blocks */
    rf_result (*ticket_wait)(const rf_ticket *ticket, uint32_t timeout_ms,
                             rf_error *err);   /* RF_ERR_DEVICE after it */
    rf_result (*queue_after)(rf_queue *q, const rf_ticket *ticket, rf_error *err);           /* q's next work waits */

    /* RF_OK, or RF_ERR_UNSUPPORTED with what is missing */
    rf_result (*op_supported)(rf_dev *d, const rf_plan *plan, const rf_op *op, rf_error *err);
    /* *bytes: the device memory that plan_prepare takes for workspaces of such a plan and such sizes. The memory, table
     * and arrays of bind are not looked at, and may be NULL. */
    rf_result (*plan_bytes)(rf_dev *d, const rf_plan_bind *bind, uint64_t *bytes, rf_error *err);
    /* Group the ops into segments and bind memory; no allocation happens in plan_run. segment_ops receives the first
     * op of each of *n_segments segments (room for n_ops). A segment is run as a whole. */
    rf_result (*plan_prepare)(rf_dev *d, const rf_plan_bind *bind, uint32_t *segment_ops, uint32_t *n_segments,
                              rf_prepared **out, rf_error *err);
    /* Run segments [first, last). Their weights are written, or the queue waits for them. The segments of a step run
     * in order; segment 0 starts a new step. */
    rf_result (*plan_run)(rf_prepared *p, rf_queue *q, uint32_t first, uint32_t last, const rf_step *step,
                          rf_ticket *ticket, rf_error *err);
    void (*plan_release)(rf_prepared *p);
    rf_session_stats (*plan_stats)(const rf_prepared *p); /* since it was prepared; no plan_run of it is running */
    /* microseconds of each op in the last run that was timed, 0 for one done along with another; us == NULL switches
     * timing on (n = 1) or off (n = 0) */
    rf_result (*times)(rf_prepared *p, float *us, uint32_t n, rf_error *err);
} rf_device_api;

/* The table of an opened device, for programs that run plans themselves; *dev (may be NULL) is what its entries take.
 * Both are borrowed until rf_device_close. NULL for NULL. Threads any. */
ROCMFORGE_API const rf_device_api *rf_device_get_api(const rf_device *d, rf_dev **dev);

/* What a session has asked of its device since it was opened, copies not counted, and its launch config. Configs are
 * timed while the first tokens are decoded one by one with their logits and all weights are resident: 12 to 30 steps,
 * or three times as many if other work disturbs the timing. Later sessions on the device whose models have the same
 * shapes begin with the config that was found (the last 16 shapes are kept until the device is closed). Zeros for NULL.
 * Memory none.   Cost O(1).   Threads: as rf_session_eval. */
ROCMFORGE_API rf_session_stats rf_session_get_stats(const rf_session *s);

/* The kernels file's table. Strong in rocmforge_kernels.hip; the implementation below refers to it weakly, so that a
 * program links without that file and then has no GPU. `#define ROCMFORGE_HIP 1` makes the reference strong: needed
 * when the kernels come in a static archive, whose members a weak reference does not pull in. */
const rf_device_api *rocmforge_hip_api(void);

/* ---- grids of the IQ types ----
 * IQ1, IQ2 and IQ3 store indices into fixed lists of weight groups, in ascending order: eight weights of 2-bit codes
 * (IQ1, IQ2), or four of 3-bit codes (IQ3), the first weight in the lowest bits. The weight of code c:
 *     IQ2 8 + 17c + (c >> 1)    IQ1 c - 1    IQ3_XXS 4 + 8c, + 2 if c is 7    IQ3_S 2c + 1
 * Source: ggml's tables. */

#define RF_GRID_IQ2_XXS \
    0, 2, 5, 8, 10, 17, 20, 32, 34, 40, 42, 65, 68, 80, 88, 97, 100, 128, 130, 138, 162, 257, 260, 272, 277, 320, 388, \
    408, 512, 514, 546, 642, 1025, 1028, 1040, 1057, 1060, 1088, 1090, 1096, 1120, 1153, 1156, 1168, 1188, 1280, 1282, \
    1288, 1312, 1350, 1385, 1408, 1425, 1545, 1552, 1600, 1668, 1700, 2048, 2053, 2056, 2068, 2088, 2113, 2116, 2128, \
    2130, 2184, 2308, 2368, 2562, 2580, 4097, 4100, 4112, 4129, 4160, 4192, 4228, 4240, 4245, 4352, 4360, 4384, 4432, \
    4442, 4480, 4644, 4677, 5120, 5128, 5152, 5157, 5193, 5248, 5400, 5474, 5632, 5654, 6145, 6148, 6160, 6208, 6273, \
    6400, 6405, 6560, 6737, 8192, 8194, 8202, 8260, 8289, 8320, 8322, 8489, 8520, 8704, 8706, 9217, 9220, 9232, 9280, \
    9302, 9472, 9537, 9572, 9872, 10248, 10272, 10388, 10820, 16385, 16388, 16400, 16408, 16417, 16420, 16448, 16456, \
    16470, 16480, 16513, 16516, 16528, 16640, 16672, 16737, 16768, 16773, 16897, 16912, 16968, 16982, 17000, 17408, \
    17416, 17440, 17536, 17561, 17682, 17700, 17920, 18433, 18436, 18448, 18496, 18501, 18688, 18776, 18785, 18818, \
    19013, 19088, 20480, 20488, 20497, 20505, 20512, 20608, 20616, 20740, 20802, 20900, 21137, 21648, 21650, 21770, \
    22017, 22100, 22528, 22545, 22553, 22628, 22848, 23048, 24580, 24592, 24640, 24680, 24832, 24917, 25112, 25184, \
    25600, 25605, 25872, 25874, 25988, 26690, 32768, 32770, 32778, 32833, 32898, 33028, 33048, 33088, 33297, 33793, \
    33796, 33808, 33813, 33856, 33888, 34048, 34118, 34196, 34313, 34368, 34400, 34818, 35076, 35345, 36868, 36880, \
    36900, 36928, 37025, 37142, 37248, 37445, 37888, 37922, 37956, 38225, 39041, 39200, 40962, 41040, 41093, 41225, \
    41472, 42008, 43088, 43268

#define RF_GRID_IQ2_XS \
    0, 2, 5, 8, 10, 17, 20, 22, 25, 32, 34, 37, 40, 65, 68, 70, 73, 80, 82, 85, 88, 97, 100, 128, 130, 133, 136, 145, \
    148, 153, 160, 257, 260, 262, 265, 272, 274, 277, 280, 282, 289, 292, 320, 322, 325, 328, 337, 340, 352, 360, 385, \
    388, 400, 512, 514, 517, 520, 529, 532, 544, 577, 580, 592, 597, 640, 650, 1025, 1028, 1030, 1033, 1040, 1042, \
    1045, 1048, 1057, 1060, 1088, 1090, 1093, 1096, 1105, 1108, 1110, 1120, 1153, 1156, 1168, 1280, 1282, 1285, 1288, \
    1297, 1300, 1312, 1345, 1348, 1360, 1377, 1408, 1537, 1540, 1552, 1574, 1600, 1602, 1668, 2048, 2050, 2053, 2056, \
    2058, 2065, 2068, 2080, 2085, 2113, 2116, 2128, 2136, 2176, 2208, 2218, 2305, 2308, 2320, 2368, 2433, 2441, 2560, \
    2592, 2600, 2710, 2720, 4097, 4100, 4102, 4105, 4112, 4114, 4117, 4120, 4129, 4132, 4160, 4162, 4165, 4168, 4177, \
    4180, 4192, 4202, 4225, 4228, 4240, 4352, 4354, 4357, 4360, 4369, 4372, 4384, 4417, 4420, 4432, 4480, 4500, 4502, \
    4609, 4612, 4614, 4624, 4672, 4704, 5120, 5122, 5125, 5128, 5137, 5140, 5152, 5185, 5188, 5193, 5200, 5220, 5248, \
    5377, 5380, 5392, 5440, 5632, 5652, 5705, 6145, 6148, 6160, 6162, 6208, 6228, 6278, 6400, 6405, 6502, 6737, 6825, \
    8192, 8194, 8197, 8200, 8202, 8209, 8212, 8224, 8257, 8260, 8272, 8320, 8352, 8449, 8452, 8464, 8512, 8520, 8549, \
    8704, 8738, 8832, 8872, 9217, 9220, 9232, 9257, 9280, 9472, 9537, 9554, 9625, 9729, 9754, 9894, 10240, 10248, \
    10250, 10272, 10325, 10376, 10402, 10600, 10640, 10760, 10784, 10882, 10888, 10890, 16385, 16388, 16390, 16393, \
    16400, 16402, 16405, 16408, 16417, 16420, 16448, 16450, 16453, 16456, 16458, 16465, 16468, 16480, 16485, 16513, \
    16516, 16528, 16640, 16642, 16645, 16648, 16657, 16660, 16672, 16705, 16708, 16720, 16768, 16773, 16802, 16897, \
    16900, 16912, 16914, 16937, 16960, 17408, 17410, 17413, 17416, 17425, 17428, 17433, 17440, 17473, 17476, 17488, \
    17536, 17556, 17665, 17668, 17680, 17700, 17728, 17818, 17920, 17930, 17988, 18000, 18433, 18436, 18448, 18496, \
    18501, 18516, 18530, 18688, 18705, 18756, 18768, 18793, 18948, 20480, 20482, 20485, 20488, 20497, 20500, 20512, \
    20520, 20545, 20548, 20560, 20608, 20737, 20740, 20752, 20757, 20800, 20802, 20992, 21060, 21162, 21505, 21508, \
    21520, 21537, 21568, 21600, 21633, 21665, 21760, 21768, 21888, 21896, 22049, 22120, 22177, 22528, 22548, 22593, \
    22608, 22681, 22810, 22848, 22850, 23173, 24577, 24580, 24592, 24640, 24660, 24674, 24710, 24745, 24832, 25124, \
    25162, 25234, 25600, 25622, 25872, 25920, 25925, 26020, 26625, 26730, 26917, 27142, 27220, 27234, 32768, 32770, \
    32773, 32776, 32785, 32788, 32800, 32810, 32833, 32836, 32848, 32896, 32898, 32936, 32938, 33025, 33028, 33030, \
    33040, 33088, 33105, 33113, 33280, 33312, 33408, 33410, 33440, 33448, 33793, 33796, 33808, 33810, 33813, 33856, \
    33888, 33929, 34048, 34116, 34213, 34328, 34410, 34816, 34824, 34853, 34906, 34944, 34946, 34984, 35078, 35362, \
    35456, 35464, 35478, 35496, 36865, 36868, 36880, 36928, 36950, 36996, 37120, 37154, 37220, 37462, 37513, 37888, \
    37893, 37956, 37968, 37976, 38185, 38288, 38290, 38465, 38993, 39078, 39241, 39445, 39520, 40960, 40962, 40968, \
    40970, 40992, 41002, 41120, 41297, 41305, 41382, 41472, 41474, 41480, 41514, 41600, 41632, 42048, 42133, 42597, \
    42648, 43018, 43040, 43042, 43048, 43168, 43176, 43268, 43396, 43398, 43560, 43562, 43665, 43690

#define RF_GRID_IQ2_S \
    0, 2, 5, 8, 10, 17, 20, 22, 25, 32, 34, 37, 40, 65, 68, 70, 73, 80, 82, 85, 88, 97, 100, 102, 105, 128, 130, 133, \
    136, 145, 148, 160, 165, 170, 257, 260, 262, 265, 272, 274, 277, 280, 289, 292, 320, 322, 325, 328, 337, 340, 342, \
    345, 352, 357, 360, 385, 388, 400, 402, 405, 417, 420, 512, 514, 517, 520, 529, 532, 544, 554, 577, 580, 582, 585, \
    592, 597, 640, 645, 650, 660, 674, 1025, 1028, 1030, 1033, 1040, 1042, 1045, 1048, 1057, 1060, 1062, 1065, 1088, \
    1090, 1093, 1096, 1098, 1105, 1108, 1110, 1113, 1120, 1122, 1125, 1153, 1156, 1158, 1161, 1168, 1173, 1176, 1185, \
    1188, 1280, 1282, 1285, 1288, 1290, 1297, 1300, 1302, 1305, 1312, 1317, 1320, 1345, 1348, 1350, 1353, 1360, 1362, \
    1365, 1368, 1377, 1380, 1408, 1410, 1413, 1416, 1425, 1428, 1440, 1537, 1540, 1542, 1545, 1552, 1557, 1600, 1605, \
    1608, 1617, 1620, 1632, 1665, 1668, 1680, 2048, 2050, 2053, 2056, 2065, 2068, 2070, 2073, 2080, 2085, 2090, 2113, \
    2116, 2118, 2121, 2128, 2130, 2133, 2136, 2145, 2148, 2176, 2181, 2196, 2218, 2305, 2308, 2320, 2322, 2325, 2328, \
    2337, 2368, 2373, 2376, 2385, 2388, 2400, 2433, 2448, 2560, 2577, 2580, 2594, 2600, 2602, 2640, 2713, 4097, 4100, \
    4102, 4105, 4112, 4114, 4117, 4120, 4129, 4132, 4134, 4160, 4162, 4165, 4168, 4177, 4180, 4182, 4185, 4192, 4194, \
    4197, 4200, 4225, 4228, 4230, 4240, 4245, 4248, 4257, 4260, 4352, 4354, 4357, 4360, 4362, 4369, 4372, 4374, 4377, \
    4384, 4386, 4389, 4392, 4417, 4420, 4422, 4425, 4432, 4434, 4437, 4440, 4449, 4452, 4480, 4482, 4485, 4488, 4497, \
    4500, 4609, 4612, 4617, 4624, 4629, 4641, 4644, 4672, 4677, 4689, 4692, 4737, 4740, 4752, 5120, 5122, 5125, 5128, \
    5137, 5140, 5142, 5145, 5152, 5157, 5160, 5185, 5188, 5190, 5193, 5200, 5202, 5205, 5208, 5217, 5220, 5248, 5250, \
    5253, 5256, 5265, 5268, 5280, 5377, 5380, 5382, 5385, 5392, 5394, 5397, 5400, 5409, 5412, 5440, 5442, 5445, 5448, \
    5457, 5460, 5472, 5505, 5508, 5520, 5632, 5637, 5640, 5649, 5652, 5664, 5697, 5700, 5712, 5760, 5802, 6145, 6148, \
    6150, 6153, 6160, 6165, 6168, 6177, 6208, 6210, 6213, 6216, 6225, 6228, 6240, 6273, 6276, 6400, 6402, 6405, 6408, \
    6417, 6420, 6432, 6465, 6468, 6480, 6505, 6562, 6660, 6672, 6720, 6742, 8192, 8194, 8197, 8200, 8209, 8212, 8214, \
    8217, 8224, 8229, 8234, 8257, 8260, 8272, 8274, 8277, 8292, 8320, 8330, 8340, 8362, 8449, 8452, 8464, 8466, 8469, \
    8481, 8512, 8514, 8517, 8529, 8532, 8544, 8577, 8580, 8592, 8704, 8714, 8738, 8744, 8746, 8772, 8784, 8840, 8842, \
    8872, 9217, 9220, 9222, 9225, 9232, 9237, 9240, 9249, 9252, 9280, 9282, 9285, 9288, 9297, 9300, 9312, 9345, 9348, \
    9360, 9472, 9477, 9480, 9489, 9492, 9504, 9537, 9540, 9552, 9574, 9600, 9729, 9732, 9744, 9792, 9817, 10240, \
    10245, 10257, 10260, 10305, 10308, 10320, 10378, 10410, 10497, 10500, 10512, 10645, 10762, 10786, 10852, 10888, \
    10890, 16385, 16388, 16390, 16393, 16400, 16402, 16405, 16408, 16410, 16417, 16420, 16422, 16448, 16450, 16453, \
    16456, 16458, 16465, 16468, 16470, 16473, 16480, 16482, 16485, 16513, 16516, 16528, 16533, 16536, 16545, 16548, \
    16640, 16642, 16645, 16648, 16657, 16660, 16662, 16665, 16672, 16674, 16677, 16705, 16708, 16710, 16713, 16720, \
    16722, 16725, 16728, 16737, 16740, 16768, 16770, 16773, 16776, 16785, 16788, 16800, 16897, 16900, 16912, 16914, \
    16917, 16920, 16932, 16960, 16965, 16968, 16977, 16980, 16992, 17025, 17028, 17408, 17410, 17413, 17416, 17418, \
    17425, 17428, 17430, 17433, 17440, 17442, 17445, 17448, 17473, 17476, 17478, 17481, 17488, 17490, 17493, 17496, \
    17505, 17508, 17536, 17538, 17541, 17544, 17553, 17556, 17568, 17665, 17668, 17670, 17673, 17680, 17682, 17685, \
    17688, 17697, 17700, 17728, 17730, 17733, 17736, 17745, 17748, 17760, 17770, 17793, 17796, 17808, 17920, 17922, \
    17925, 17928, 17937, 17940, 17952, 17985, 17988, 18000, 18048, 18085, 18433, 18436, 18441, 18448, 18450, 18453, \
    18456, 18465, 18468, 18496, 18498, 18501, 18504, 18513, 18516, 18528, 18564, 18576, 18688, 18690, 18693, 18696, \
    18705, 18708, 18720, 18753, 18756, 18768, 18816, 18838, 18945, 18948, 18960, 19008, 20480, 20482, 20485, 20488, \
    20497, 20500, 20502, 20505, 20512, 20514, 20517, 20520, 20545, 20548, 20550, 20553, 20560, 20562, 20565, 20568, \
    20577, 20580, 20608, 20610, 20613, 20616, 20625, 20628, 20737, 20740, 20742, 20745, 20752, 20754, 20757, 20760, \
    20769, 20772, 20800, 20802, 20805, 20808, 20817, 20820, 20832, 20865, 20868, 20880, 20992, 20997, 21000, 21009, \
    21012, 21024, 21057, 21060, 21072, 21097, 21120, 21505, 21508, 21510, 21513, 21520, 21522, 21525, 21528, 21537, \
    21540, 21568, 21570, 21573, 21576, 21585, 21588, 21600, 21633, 21636, 21648, 21760, 21762, 21765, 21768, 21777, \
    21780, 21792, 21825, 21828, 21840, 21888, 22017, 22020, 22032, 22054, 22080, 22528, 22530, 22533, 22536, 22545, \
    22548, 22560, 22593, 22596, 22608, 22618, 22656, 22785, 22788, 22800, 22848, 23040, 23065, 23173, 23208, 24577, \
    24580, 24582, 24592, 24594, 24597, 24600, 24609, 24612, 24640, 24645, 24648, 24657, 24660, 24672, 24708, 24720, \
    24832, 24834, 24837, 24840, 24849, 24852, 24864, 24897, 24900, 24912, 24960, 24985, 25092, 25104, 25152, 25174, \
    25249, 25600, 25605, 25608, 25617, 25620, 25632, 25665, 25668, 25680, 25728, 25857, 25860, 25872, 25920, 25930, \
    25960, 26002, 26112, 26260, 26625, 26628, 26640, 26725, 26776, 26880, 26922, 27202, 27297, 32768, 32770, 32773, \
    32776, 32785, 32788, 32793, 32800, 32805, 32833, 32836, 32848, 32850, 32853, 32856, 32865, 32896, 32901, 32913, \
    32916, 33025, 33028, 33033, 33040, 33042, 33045, 33048, 33057, 33060, 33088, 33090, 33093, 33096, 33105, 33108, \
    33153, 33156, 33168, 33193, 33280, 33285, 33290, 33297, 33300, 33345, 33348, 33360, 33793, 33796, 33798, 33801, \
    33808, 33810, 33813, 33816, 33825, 33856, 33858, 33861, 33864, 33873, 33876, 33888, 33921, 33924, 33936, 34048, \
    34050, 34053, 34056, 34065, 34068, 34080, 34113, 34116, 34128, 34176, 34186, 34305, 34308, 34320, 34345, 34368, \
    34816, 34821, 34833, 34836, 34881, 34884, 34896, 34978, 35073, 35076, 35136, 35173, 35362, 35416, 35418, 35458, \
    35490, 36865, 36868, 36873, 36880, 36882, 36885, 36888, 36900, 36928, 36930, 36933, 36936, 36945, 36948, 36960, \
    36993, 36996, 37008, 37120, 37125, 37137, 37140, 37185, 37188, 37200, 37210, 37377, 37380, 37392, 37440, 37542, \
    37888, 37890, 37893, 37896, 37905, 37908, 37920, 37953, 37956, 37968, 38016, 38038, 38145, 38148, 38160, 38208, \
    38296, 38305, 38400, 38470, 38500, 38913, 38916, 38928, 38950, 38976, 39081, 39168, 39241, 39250, 39568, 40960, \
    40965, 40970, 40980, 40994, 41002, 41025, 41028, 41040, 41122, 41130, 41280, 41317, 41474, 41482, 41506, 41512, \
    41514, 41602, 41608, 41610, 41640, 41985, 41988, 42000, 42048, 42121, 42148, 42240, 42265, 42577, 43018, 43048, \
    43170, 43348, 43398, 43528, 43530, 43552, 43554, 43560, 43656, 43690

#define RF_GRID_IQ1 \
    0, 2, 5, 8, 10, 17, 21, 32, 34, 40, 42, 69, 81, 84, 86, 101, 128, 130, 136, 138, 149, 160, 162, 168, 170, 260, \
    261, 273, 276, 278, 281, 282, 293, 321, 326, 329, 338, 341, 346, 353, 356, 358, 360, 389, 401, 404, 406, 421, 512, \
    514, 520, 522, 533, 544, 546, 552, 554, 581, 593, 601, 612, 617, 640, 642, 648, 650, 657, 661, 665, 672, 674, 680, \
    682, 1041, 1044, 1046, 1061, 1089, 1097, 1109, 1114, 1124, 1125, 1169, 1177, 1189, 1281, 1284, 1285, 1286, 1301, \
    1304, 1306, 1321, 1344, 1349, 1354, 1360, 1361, 1364, 1365, 1366, 1369, 1376, 1378, 1381, 1384, 1386, 1409, 1425, \
    1429, 1432, 1434, 1441, 1444, 1445, 1446, 1449, 1556, 1561, 1601, 1604, 1616, 1618, 1621, 1624, 1632, 1633, 1638, \
    1641, 1669, 1681, 1684, 1689, 2048, 2050, 2056, 2058, 2069, 2080, 2082, 2088, 2090, 2117, 2129, 2134, 2149, 2176, \
    2178, 2184, 2186, 2197, 2208, 2210, 2216, 2218, 2309, 2321, 2324, 2329, 2340, 2341, 2369, 2384, 2385, 2389, 2401, \
    2404, 2409, 2449, 2452, 2454, 2457, 2469, 2560, 2562, 2568, 2570, 2581, 2592, 2594, 2600, 2602, 2629, 2641, 2649, \
    2657, 2661, 2688, 2690, 2693, 2696, 2698, 2709, 2720, 2722, 2728, 2730, 4112, 4113, 4116, 4121, 4132, 4133, 4161, \
    4164, 4176, 4181, 4184, 4193, 4196, 4197, 4201, 4241, 4244, 4246, 4257, 4261, 4353, 4356, 4358, 4361, 4368, 4370, \
    4373, 4376, 4385, 4388, 4393, 4421, 4426, 4432, 4433, 4434, 4436, 4437, 4438, 4441, 4448, 4453, 4484, 4498, 4501, \
    4513, 4516, 4625, 4628, 4630, 4645, 4672, 4678, 4681, 4690, 4693, 4696, 4698, 4708, 4710, 4741, 4753, 4756, 4758, \
    4773, 5121, 5126, 5129, 5140, 5141, 5144, 5145, 5153, 5158, 5185, 5189, 5190, 5192, 5194, 5201, 5204, 5205, 5206, \
    5209, 5218, 5221, 5224, 5252, 5257, 5264, 5268, 5269, 5272, 5273, 5274, 5281, 5284, 5285, 5289, 5378, 5381, 5386, \
    5393, 5396, 5397, 5398, 5401, 5408, 5410, 5413, 5416, 5418, 5441, 5444, 5445, 5446, 5457, 5458, 5460, 5461, 5462, \
    5465, 5466, 5473, 5476, 5477, 5478, 5481, 5504, 5506, 5508, 5509, 5512, 5514, 5520, 5521, 5524, 5525, 5526, 5529, \
    5530, 5536, 5538, 5541, 5633, 5636, 5637, 5638, 5653, 5654, 5656, 5658, 5665, 5670, 5696, 5698, 5700, 5701, 5704, \
    5706, 5713, 5717, 5718, 5720, 5721, 5729, 5732, 5733, 5736, 5737, 5738, 5766, 5770, 5778, 5781, 5796, 5801, 6161, \
    6166, 6181, 6209, 6212, 6214, 6217, 6224, 6229, 6232, 6234, 6240, 6241, 6244, 6246, 6249, 6277, 6289, 6292, 6309, \
    6416, 6418, 6421, 6426, 6433, 6437, 6466, 6468, 6469, 6472, 6481, 6484, 6485, 6486, 6489, 6490, 6496, 6501, 6506, \
    6537, 6545, 6546, 6549, 6552, 6561, 6566, 6569, 6665, 6678, 6692, 6694, 6724, 6726, 6729, 6736, 6738, 6741, 6744, \
    6753, 6758, 6761, 6789, 6801, 6806, 6810, 8192, 8194, 8200, 8202, 8213, 8224, 8226, 8229, 8232, 8234, 8261, 8273, \
    8281, 8289, 8293, 8320, 8322, 8328, 8330, 8341, 8352, 8354, 8357, 8360, 8362, 8453, 8465, 8468, 8473, 8485, 8514, \
    8516, 8521, 8533, 8536, 8538, 8545, 8548, 8549, 8550, 8581, 8592, 8598, 8601, 8613, 8705, 8712, 8714, 8721, 8725, \
    8736, 8738, 8744, 8746, 8773, 8785, 8790, 8793, 8805, 8833, 8840, 8842, 8849, 8853, 8864, 8866, 8872, 8874, 9221, \
    9236, 9238, 9241, 9253, 9284, 9285, 9286, 9289, 9298, 9301, 9304, 9306, 9318, 9349, 9361, 9364, 9369, 9377, 9381, \
    9481, 9493, 9505, 9513, 9536, 9541, 9544, 9553, 9556, 9557, 9561, 9570, 9573, 9576, 9609, 9616, 9620, 9621, 9624, \
    9626, 9633, 9636, 9638, 9641, 9733, 9744, 9746, 9753, 9765, 9793, 9801, 9813, 9824, 9825, 9833, 9860, 9862, 9872, \
    9882, 10240, 10242, 10248, 10250, 10261, 10272, 10274, 10280, 10282, 10309, 10321, 10324, 10341, 10368, 10370, \
    10376, 10378, 10400, 10402, 10408, 10410, 10505, 10513, 10516, 10521, 10533, 10566, 10569, 10578, 10581, 10593, \
    10596, 10598, 10601, 10629, 10640, 10646, 10649, 10660, 10661, 10752, 10754, 10760, 10762, 10784, 10786, 10792, \
    10794, 10821, 10833, 10838, 10841, 10853, 10880, 10882, 10888, 10890, 10901, 10912, 10914, 10920, 10922, 16389, \
    16401, 16406, 16421, 16457, 16466, 16469, 16472, 16474, 16481, 16484, 16486, 16532, 16537, 16545, 16550, 16640, \
    16641, 16644, 16646, 16649, 16658, 16661, 16662, 16664, 16666, 16673, 16678, 16681, 16709, 16712, 16714, 16721, \
    16724, 16725, 16726, 16729, 16730, 16741, 16744, 16746, 16769, 16772, 16774, 16784, 16786, 16789, 16800, 16801, \
    16802, 16901, 16913, 16916, 16918, 16933, 16961, 16978, 16981, 16986, 16996, 17001, 17033, 17044, 17061, 17409, \
    17429, 17433, 17449, 17477, 17480, 17482, 17489, 17492, 17493, 17494, 17505, 17506, 17509, 17512, 17514, 17537, \
    17542, 17545, 17552, 17554, 17557, 17568, 17569, 17577, 17665, 17666, 17669, 17674, 17681, 17684, 17685, 17686, \
    17689, 17696, 17701, 17706, 17729, 17732, 17733, 17734, 17737, 17744, 17745, 17748, 17749, 17750, 17752, 17753, \
    17761, 17764, 17765, 17766, 17769, 17794, 17796, 17797, 17800, 17809, 17812, 17813, 17814, 17817, 17818, 17829, \
    17832, 17834, 17921, 17925, 17929, 17940, 17941, 17944, 17946, 17953, 17956, 17961, 17984, 17986, 17989, 17992, \
    18000, 18001, 18002, 18005, 18006, 18009, 18018, 18021, 18024, 18049, 18053, 18058, 18068, 18069, 18081, 18084, \
    18086, 18437, 18449, 18453, 18458, 18469, 18498, 18505, 18512, 18517, 18520, 18529, 18532, 18534, 18537, 18565, \
    18577, 18580, 18582, 18585, 18597, 18689, 18693, 18694, 18698, 18704, 18708, 18709, 18712, 18721, 18724, 18726, \
    18752, 18757, 18762, 18769, 18770, 18772, 18773, 18774, 18777, 18784, 18786, 18789, 18790, 18794, 18822, 18825, \
    18834, 18837, 18838, 18840, 18849, 18852, 18854, 18857, 18966, 19012, 19014, 19017, 19029, 19032, 19034, 19044, \
    19049, 19092, 19109, 20481, 20484, 20485, 20486, 20489, 20498, 20501, 20506, 20513, 20516, 20521, 20544, 20549, \
    20552, 20561, 20564, 20565, 20566, 20569, 20581, 20584, 20614, 20617, 20629, 20632, 20640, 20641, 20646, 20649, \
    20741, 20744, 20745, 20746, 20753, 20756, 20757, 20758, 20760, 20761, 20768, 20773, 20774, 20776, 20778, 20801, \
    20804, 20805, 20806, 20809, 20816, 20817, 20818, 20820, 20821, 20822, 20824, 20825, 20826, 20833, 20836, 20837, \
    20838, 20841, 20866, 20869, 20881, 20884, 20885, 20886, 20889, 20896, 20901, 20906, 20993, 20998, 21010, 21013, \
    21018, 21025, 21028, 21058, 21061, 21066, 21073, 21076, 21077, 21078, 21081, 21090, 21093, 21125, 21136, 21138, \
    21141, 21145, 21146, 21156, 21508, 21509, 21521, 21524, 21525, 21526, 21528, 21529, 21537, 21541, 21544, 21546, \
    21569, 21572, 21573, 21574, 21577, 21578, 21584, 21585, 21588, 21589, 21590, 21592, 21593, 21594, 21601, 21602, \
    21604, 21605, 21606, 21609, 21632, 21640, 21642, 21649, 21652, 21653, 21654, 21657, 21665, 21668, 21669, 21674, \
    21761, 21762, 21764, 21765, 21766, 21769, 21776, 21777, 21778, 21780, 21781, 21782, 21785, 21786, 21793, 21796, \
    21797, 21798, 21801, 21824, 21825, 21826, 21828, 21829, 21830, 21832, 21833, 21840, 21841, 21842, 21844, 21845, \
    21846, 21848, 21849, 21850, 21856, 21857, 21860, 21861, 21862, 21864, 21865, 21866, 21889, 21892, 21893, 21897, \
    21898, 21904, 21905, 21908, 21909, 21910, 21912, 21913, 21921, 21924, 21925, 21926, 21929, 22016, 22017, 22018, \
    22020, 22022, 22024, 22025, 22033, 22036, 22037, 22040, 22041, 22048, 22049, 22050, 22052, 22053, 22054, 22056, \
    22057, 22081, 22085, 22086, 22088, 22089, 22090, 22096, 22097, 22098, 22100, 22101, 22102, 22104, 22105, 22106, \
    22113, 22116, 22117, 22121, 22146, 22149, 22150, 22152, 22153, 22154, 22161, 22165, 22170, 22178, 22181, 22182, \
    22184, 22185, 22532, 22533, 22534, 22537, 22544, 22549, 22552, 22561, 22570, 22597, 22600, 22602, 22609, 22612, \
    22613, 22614, 22616, 22617, 22624, 22626, 22628, 22629, 22658, 22665, 22672, 22674, 22677, 22680, 22689, 22697, \
    22785, 22786, 22789, 22794, 22801, 22804, 22805, 22806, 22809, 22821, 22849, 22852, 22853, 22854, 22857, 22864, \
    22865, 22866, 22868, 22869, 22870, 22872, 22873, 22874, 22881, 22884, 22885, 22886, 22889, 22913, 22917, 22921, \
    22929, 22932, 22933, 22934, 22936, 22937, 22949, 23044, 23048, 23061, 23066, 23072, 23077, 23078, 23081, 23109, \
    23112, 23113, 23121, 23125, 23126, 23128, 23129, 23138, 23141, 23144, 23146, 23169, 23178, 23186, 23189, 23190, \
    23192, 23194, 23201, 24581, 24596, 24598, 24601, 24613, 24644, 24656, 24661, 24662, 24664, 24666, 24673, 24676, \
    24678, 24681, 24705, 24726, 24741, 24833, 24836, 24838, 24841, 24850, 24853, 24865, 24866, 24870, 24873, 24901, \
    24905, 24913, 24917, 24918, 24921, 24933, 24934, 24938, 24964, 24970, 24978, 24981, 24993, 24998, 25001, 25105, \
    25110, 25113, 25152, 25153, 25158, 25173, 25174, 25176, 25184, 25221, 25233, 25238, 25253, 25617, 25618, 25621, \
    25622, 25626, 25633, 25638, 25641, 25664, 25666, 25669, 25672, 25674, 25681, 25684, 25685, 25686, 25689, 25690, \
    25696, 25698, 25701, 25732, 25733, 25737, 25744, 25746, 25748, 25749, 25750, 25752, 25754, 25761, 25764, 25769, \
    25861, 25864, 25866, 25873, 25877, 25878, 25881, 25924, 25925, 25926, 25929, 25936, 25937, 25940, 25941, 25942, \
    25945, 25953, 25956, 25957, 25958, 25961, 25990, 25993, 25994, 26001, 26005, 26006, 26009, 26010, 26018, 26021, \
    26022, 26024, 26114, 26121, 26133, 26144, 26150, 26152, 26153, 26176, 26181, 26184, 26186, 26193, 26196, 26197, \
    26198, 26200, 26202, 26208, 26213, 26216, 26240, 26242, 26245, 26250, 26260, 26262, 26264, 26265, 26272, 26276, \
    26278, 26282, 26646, 26649, 26661, 26689, 26706, 26709, 26714, 26721, 26729, 26757, 26769, 26776, 26790, 26881, \
    26884, 26896, 26901, 26913, 26916, 26918, 26921, 26944, 26945, 26949, 26950, 26952, 26961, 26964, 26965, 26966, \
    26969, 26976, 26981, 26986, 27010, 27012, 27018, 27029, 27041, 27044, 27045, 27049, 27153, 27158, 27160, 27201, \
    27204, 27209, 27216, 27221, 27224, 27226, 27236, 27237, 27241, 27270, 27284, 27288, 27290, 27302, 32768, 32770, \
    32776, 32778, 32800, 32802, 32808, 32810, 32837, 32848, 32849, 32852, 32854, 32857, 32869, 32896, 32898, 32904, \
    32906, 32917, 32928, 32930, 32936, 32938, 33029, 33041, 33044, 33046, 33049, 33061, 33089, 33092, 33097, 33104, \
    33106, 33109, 33110, 33112, 33113, 33124, 33126, 33129, 33157, 33161, 33172, 33174, 33177, 33189, 33280, 33282, \
    33288, 33290, 33301, 33312, 33314, 33320, 33322, 33361, 33364, 33369, 33381, 33408, 33410, 33416, 33418, 33429, \
    33440, 33442, 33448, 33450, 33812, 33817, 33857, 33860, 33873, 33877, 33882, 33889, 33892, 33897, 33940, 33945, \
    34049, 34057, 34066, 34069, 34074, 34086, 34089, 34112, 34113, 34117, 34120, 34129, 34132, 34133, 34134, 34137, \
    34138, 34149, 34150, 34152, 34154, 34177, 34180, 34182, 34185, 34192, 34194, 34197, 34200, 34214, 34321, 34326, \
    34329, 34341, 34369, 34372, 34377, 34378, 34384, 34389, 34393, 34394, 34401, 34406, 34410, 34437, 34449, 34458, \
    34468, 34816, 34818, 34824, 34826, 34837, 34848, 34850, 34856, 34858, 34881, 34885, 34897, 34900, 34905, 34917, \
    34921, 34944, 34946, 34952, 34954, 34965, 34976, 34978, 34984, 34986, 35077, 35078, 35089, 35092, 35094, 35109, \
    35137, 35140, 35142, 35145, 35152, 35154, 35157, 35162, 35169, 35172, 35205, 35222, 35225, 35237, 35328, 35330, \
    35336, 35338, 35349, 35360, 35362, 35368, 35370, 35397, 35409, 35412, 35414, 35456, 35458, 35464, 35466, 35477, \
    35488, 35490, 35496, 35498, 36869, 36881, 36886, 36888, 36889, 36901, 36929, 36934, 36937, 36949, 36952, 36954, \
    36969, 36970, 36997, 37009, 37012, 37014, 37017, 37029, 37121, 37124, 37126, 37129, 37136, 37141, 37144, 37146, \
    37153, 37156, 37158, 37161, 37184, 37189, 37200, 37201, 37204, 37205, 37206, 37209, 37218, 37221, 37252, 37254, \
    37266, 37269, 37272, 37281, 37284, 37286, 37289, 37381, 37393, 37396, 37401, 37413, 37444, 37446, 37449, 37456, \
    37458, 37461, 37464, 37478, 37481, 37509, 37524, 37526, 37545, 37889, 37892, 37894, 37904, 37909, 37912, 37926, \
    37952, 37962, 37969, 37972, 37973, 37974, 37976, 37977, 37984, 37985, 37986, 37989, 38020, 38022, 38034, 38036, \
    38037, 38040, 38049, 38057, 38144, 38149, 38152, 38154, 38160, 38161, 38164, 38165, 38166, 38169, 38177, 38181, \
    38185, 38186, 38209, 38212, 38213, 38214, 38217, 38224, 38225, 38226, 38228, 38229, 38230, 38232, 38233, 38234, \
    38241, 38244, 38245, 38246, 38249, 38273, 38277, 38280, 38289, 38290, 38292, 38293, 38294, 38297, 38298, 38304, \
    38306, 38309, 38312, 38314, 38401, 38404, 38416, 38421, 38425, 38432, 38438, 38441, 38469, 38472, 38473, 38481, \
    38482, 38485, 38486, 38489, 38501, 38504, 38530, 38532, 38537, 38538, 38546, 38548, 38549, 38564, 38566, 38569, \
    38917, 38934, 38937, 38949, 38977, 38982, 38992, 38994, 38997, 38998, 39002, 39012, 39013, 39045, 39057, 39062, \
    39065, 39077, 39172, 39174, 39177, 39184, 39186, 39189, 39192, 39194, 39200, 39201, 39204, 39206, 39232, 39234, \
    39237, 39240, 39242, 39249, 39252, 39253, 39254, 39257, 39266, 39269, 39270, 39274, 39297, 39300, 39312, 39314, \
    39317, 39322, 39329, 39334, 39429, 39445, 39461, 39492, 39494, 39497, 39504, 39509, 39512, 39521, 39557, 39569, \
    39572, 39573, 39574, 40960, 40962, 40968, 40970, 40981, 40992, 40994, 41000, 41002, 41029, 41041, 41044, 41046, \
    41049, 41088, 41090, 41096, 41098, 41109, 41120, 41122, 41128, 41130, 41221, 41225, 41233, 41236, 41238, 41241, \
    41242, 41286, 41289, 41297, 41301, 41304, 41306, 41313, 41316, 41349, 41360, 41362, 41366, 41369, 41474, 41480, \
    41482, 41488, 41497, 41506, 41512, 41514, 41541, 41553, 41558, 41561, 41573, 41600, 41602, 41608, 41610, 41621, \
    41632, 41634, 41640, 41642, 42009, 42021, 42049, 42052, 42064, 42068, 42069, 42072, 42074, 42081, 42085, 42086, \
    42088, 42089, 42117, 42246, 42249, 42256, 42258, 42261, 42264, 42278, 42281, 42306, 42309, 42321, 42324, 42325, \
    42326, 42329, 42341, 42346, 42369, 42372, 42373, 42374, 42377, 42386, 42389, 42392, 42501, 42513, 42518, 42522, \
    42529, 42533, 42564, 42566, 42570, 42578, 42581, 42582, 42584, 42592, 42594, 42630, 42640, 42645, 42646, 42649, \
    42657, 42660, 42662, 43008, 43010, 43016, 43018, 43040, 43042, 43048, 43050, 43089, 43092, 43094, 43097, 43136, \
    43138, 43144, 43146, 43157, 43168, 43170, 43176, 43178, 43269, 43284, 43289, 43297, 43301, 43329, 43344, 43349, \
    43354, 43361, 43366, 43369, 43408, 43414, 43520, 43522, 43528, 43530, 43552, 43554, 43560, 43562, 43601, 43604, \
    43606, 43648, 43650, 43656, 43658, 43669, 43680, 43682, 43688, 43690

#define RF_GRID_IQ3_XXS \
    0, 2, 4, 9, 11, 15, 16, 18, 25, 34, 59, 61, 65, 67, 72, 74, 81, 85, 88, 90, 97, 108, 120, 128, 130, 132, 137, 144, \
    146, 153, 155, 159, 169, 175, 189, 193, 199, 200, 202, 213, 248, 267, 287, 292, 303, 315, 317, 321, 327, 346, 362, \
    413, 436, 456, 460, 462, 483, 497, 513, 515, 520, 522, 529, 531, 536, 538, 540, 551, 552, 576, 578, 585, 592, 594, \
    641, 643, 648, 650, 657, 664, 698, 704, 706, 720, 729, 742, 758, 769, 773, 808, 848, 852, 870, 889, 901, 978, 992, \
    1024, 1026, 1033, 1035, 1040, 1042, 1046, 1049, 1058, 1089, 1091, 1093, 1096, 1098, 1105, 1112, 1139, 1143, 1144, \
    1152, 1154, 1161, 1167, 1168, 1170, 1183, 1184, 1197, 1217, 1224, 1228, 1272, 1276, 1309, 1323, 1347, 1367, 1377, \
    1404, 1473, 1475, 1486, 1509, 1537, 1544, 1546, 1553, 1555, 1576, 1589, 1594, 1600, 1602, 1616, 1625, 1636, 1638, \
    1665, 1667, 1672, 1685, 1706, 1722, 1737, 1755, 1816, 1831, 1850, 1856, 1862, 1874, 1901, 1932, 1950, 1971, 2011, \
    2032, 2052, 2063, 2077, 2079, 2091, 2095, 2172, 2192, 2207, 2208, 2224, 2230, 2247, 2277, 2308, 2345, 2356, 2389, \
    2403, 2424, 2501, 2504, 2506, 2520, 2570, 2593, 2616, 2624, 2630, 2646, 2669, 2700, 2714, 2746, 2754, 2795, 2824, \
    2835, 2839, 2874, 2882, 2905, 2984, 3028, 3042, 3092, 3108, 3110, 3124, 3153, 3185, 3215, 3252, 3288, 3294, 3364, \
    3397, 3434, 3483, 3523, 3537, 3587, 3589, 3591, 3592, 3610, 3626, 3670, 3680, 3722, 3749, 3754, 3776, 3789, 3803, \
    3824, 3857, 3873, 3904, 3906, 3924, 3992

#define RF_GRID_IQ3_S \
    0, 1, 2, 5, 7, 8, 9, 10, 12, 14, 16, 17, 21, 27, 32, 34, 37, 39, 41, 43, 48, 50, 57, 60, 63, 64, 65, 66, 68, 72, \
    73, 77, 80, 83, 87, 89, 93, 100, 113, 117, 122, 128, 129, 133, 135, 136, 139, 142, 145, 149, 152, 156, 162, 165, \
    167, 169, 171, 184, 187, 195, 201, 205, 208, 210, 217, 219, 222, 228, 232, 234, 247, 249, 253, 256, 267, 271, 273, \
    276, 282, 288, 291, 297, 312, 322, 324, 336, 338, 342, 347, 353, 357, 359, 374, 379, 390, 393, 395, 409, 426, 441, \
    448, 450, 452, 464, 466, 470, 475, 488, 492, 512, 513, 514, 516, 520, 521, 523, 525, 527, 528, 530, 537, 540, 542, \
    556, 558, 561, 570, 576, 577, 579, 582, 584, 588, 593, 600, 603, 609, 616, 618, 632, 638, 640, 650, 653, 655, 656, \
    660, 666, 672, 675, 685, 688, 698, 705, 708, 711, 712, 715, 721, 727, 728, 732, 737, 754, 760, 771, 773, 778, 780, \
    793, 795, 802, 806, 808, 812, 833, 840, 843, 849, 856, 858, 873, 912, 916, 919, 932, 934, 961, 963, 968, 970, 977, \
    989, 993, 1010, 1016, 1024, 1025, 1027, 1029, 1031, 1032, 1034, 1036, 1038, 1041, 1043, 1047, 1048, 1050, 1057, \
    1059, 1061, 1064, 1066, 1079, 1080, 1083, 1085, 1088, 1090, 1096, 1099, 1103, 1106, 1109, 1113, 1116, 1122, 1129, \
    1153, 1156, 1159, 1169, 1171, 1176, 1183, 1185, 1195, 1199, 1209, 1212, 1216, 1218, 1221, 1225, 1234, 1236, 1241, \
    1243, 1250, 1256, 1270, 1281, 1287, 1296, 1299, 1306, 1309, 1313, 1338, 1341, 1348, 1353, 1362, 1375, 1376, 1387, \
    1400, 1408, 1410, 1415, 1425, 1453, 1457, 1477, 1481, 1494, 1496, 1507, 1512, 1538, 1545, 1547, 1549, 1551, 1554, \
    1561, 1563, 1565, 1570, 1572, 1575, 1577, 1587, 1593, 1601, 1603, 1605, 1612, 1617, 1619, 1632, 1648, 1658, 1662, \
    1664, 1674, 1680, 1690, 1692, 1704, 1729, 1736, 1740, 1745, 1747, 1751, 1752, 1761, 1763, 1767, 1773, 1787, 1795, \
    1801, 1806, 1810, 1817, 1834, 1840, 1844, 1857, 1864, 1866, 1877, 1882, 1892, 1902, 1915, 1934, 1953, 1985, 1987, \
    2000, 2002, 2013, 2048, 2052, 2058, 2064, 2068, 2071, 2074, 2081, 2088, 2104, 2114, 2119, 2121, 2123, 2130, 2136, \
    2141, 2147, 2153, 2157, 2177, 2179, 2184, 2189, 2193, 2203, 2208, 2223, 2226, 2232, 2244, 2249, 2251, 2256, 2258, \
    2265, 2269, 2304, 2306, 2324, 2335, 2336, 2361, 2373, 2375, 2385, 2418, 2443, 2460, 2480, 2504, 2509, 2520, 2531, \
    2537, 2562, 2568, 2572, 2578, 2592, 2596, 2599, 2602, 2614, 2620, 2625, 2627, 2629, 2634, 2641, 2650, 2682, 2688, \
    2697, 2707, 2712, 2718, 2731, 2754, 2759, 2760, 2775, 2788, 2793, 2805, 2811, 2817, 2820, 2832, 2842, 2854, 2890, \
    2902, 2921, 2923, 2978, 3010, 3012, 3026, 3081, 3083, 3085, 3097, 3099, 3120, 3136, 3152, 3159, 3188, 3210, 3228, \
    3234, 3245, 3250, 3256, 3264, 3276, 3281, 3296, 3349, 3363, 3378, 3392, 3395, 3420, 3440, 3461, 3488, 3529, 3531, \
    3584, 3588, 3591, 3600, 3602, 3614, 3616, 3628, 3634, 3650, 3657, 3668, 3683, 3685, 3713, 3716, 3720, 3726, 3729, \
    3736, 3753, 3778, 3802, 3805, 3819, 3841, 3845, 3851, 3856, 3880, 3922, 3938, 3970, 3993, 4032

#ifdef __cplusplus
}
#endif
#endif /* ROCMFORGE_H */

#if defined(ROCMFORGE_IMPLEMENTATION) && !defined(ROCMFORGE_IMPLEMENTATION_DONE)
#define ROCMFORGE_IMPLEMENTATION_DONE 1

#if defined(__cplusplus)
#error "rocmforge.h: define ROCMFORGE_IMPLEMENTATION in a C file; C++ files include the header without it"
#elif !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__))
#error "rocmforge.h supports Linux on x86-64 and arm64"
#elif !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rocmforge.h supports little-endian machines"
#elif !defined(__STDC_VERSION__) || __STDC_VERSION__ < 201112L || defined(__STDC_NO_ATOMICS__)
#error "rocmforge.h needs C11 with atomics"
#elif defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "rocmforge.h rounds and looks for NaN and infinity: compile it without -ffast-math"
#elif defined(ROCMFORGE_MALLOC) != defined(ROCMFORGE_FREE)
#error "rocmforge.h: define both ROCMFORGE_MALLOC(size) and ROCMFORGE_FREE(ptr), or none"
#else

/* ==== 3 Base ============================================================================================== >>base
 * Platform, allocation, checked arithmetic, errors and log: what every later section uses. */

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#else
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#ifndef ROCMFORGE_MALLOC
#define ROCMFORGE_MALLOC(size) malloc(size)
#define ROCMFORGE_FREE(ptr) free(ptr)
#endif

#define RFI_UNUSED(x) ((void)(x))
#define RFI_INLINE static inline __attribute__((always_inline))
#define RFI_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define RFI_LLU(x) ((unsigned long long)(x)) /* for %llu */

_Static_assert(sizeof(void *) == 8, "64-bit pointers");

static uint64_t rfi_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t rfi_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Checked arithmetic: 1 and *out, or 0 if the result does not fit. Numbers of a file are added and multiplied only by
 * these. */
static int rfi_add(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_add_overflow(a, b, out); }
static int rfi_mul(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_mul_overflow(a, b, out); }
/* Round up to a multiple of a power of two. */
static int rfi_align_up(uint64_t a, uint64_t align, uint64_t *out) {
    if (!rfi_add(a, align - 1, out)) return 0;
    *out &= ~(align - 1);
    return 1;
}

/* Monotonic clock, in seconds. */
static double rfi_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- errors ---- */

/* Every public function begins with this; after it the first failure is kept. */
static void rfi_clear(rf_error *err) {
    if (err) {
        err->code = RF_OK;
        err->sys = 0;
        err->where = 0;
        err->text[0] = 0;
    }
}

/* Append a name to a list in a message, "a, b"; "..." stands for all names that do not fit. */
static void rfi_list_name(char *list, size_t capacity, const char *name) {
    const size_t n = strlen(list);
    const int fits = n + strlen(name) + sizeof ", , ..." <= capacity;
    if (n > 3 && strcmp(list + n - 3, "...") == 0) return;
    snprintf(list + n, capacity - n, "%s%s", n ? ", " : "", fits ? name : "...");
}

/* Copy text with bytes outside printable ASCII as \xNN: names of files must not reach a terminal raw. */
static void rfi_escape(char *dst, size_t capacity, const char *src) {
    static const char hex[] = "0123456789abcdef";
    size_t n = 0;
    for (; *src; src++) {
        unsigned char c = (unsigned char)*src;
        int plain = c >= 0x20 && c < 0x7f;
        if (n + (plain ? 1u : 4u) >= capacity) break;
        if (plain) dst[n++] = (char)c;
        else dst[n++] = '\\', dst[n++] = 'x', dst[n++] = hex[c >> 4], dst[n++] = hex[c & 15];
    }
    dst[n] = 0;
}

/* Record a failure and return its code. The first one is kept: later ones are its consequences. */
__attribute__((format(printf, 5, 6)))
static rf_result rfi_fail_sys(rf_error *err, rf_result code, int sys, uint64_t where, const char *format, ...) {
    if (err && err->code == RF_OK) {
        char raw[RF_ERROR_TEXT_BYTES];
        va_list args;
        va_start(args, format);
        vsnprintf(raw, sizeof raw, format, args);
        va_end(args);
        err->code = code;
        err->sys = sys;
        err->where = where;
        rfi_escape(err->text, sizeof err->text, raw);
    }
    return code;
}
#define rfi_fail(err, code, where, ...) rfi_fail_sys(err, code, 0, where, __VA_ARGS__)

/* The same with a failure that was recorded elsewhere. */
static rf_result rfi_fail_with(rf_error *err, const rf_error *why) {
    if (err && err->code == RF_OK && why->code != RF_OK) *err = *why;
    return why->code;
}

/* Length and pointer of an rf_string for "%.*s": file text is cut at 96 bytes in messages. */
#define RFI_STR(s) (int)rfi_min_u64((s).len, 96), (s).data

/* The common errno values in words: strerror is not thread-safe everywhere. */
static const char *rfi_errno_text(int e) {
    static const struct { int code; const char *text; } texts[] = {
        {ENOENT, "no such file"}, {EACCES, "permission denied"}, {EISDIR, "is a directory"}, {ENOMEM, "out of memory"},
        {EMFILE, "too many open files"}, {ELOOP, "too many symbolic links"}, {EIO, "input/output error"},
        {ENOSPC, "no space left on the device"}, {ENOTSUP, "not a regular file"}, {ENAMETOOLONG, "name too long"},
        {ENOTDIR, "not a directory"}};
    for (size_t i = 0; i < RFI_COUNT(texts); i++)
        if (texts[i].code == e) return texts[i].text;
    return "system error";
}

/* ---- memory ---- */

static void *rfi_default_alloc(size_t size_bytes, void *user) {
    RFI_UNUSED(user);
    return ROCMFORGE_MALLOC(size_bytes);
}
static void rfi_default_free(void *block, void *user) {
    RFI_UNUSED(user);
    ROCMFORGE_FREE(block);
}

static rf_result rfi_check_allocator(const rf_allocator *a, rf_allocator *out, rf_error *err) {
    if ((a->alloc_fn == NULL) != (a->free_fn == NULL))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "allocator: give both alloc_fn and free_fn, or none");
    *out = *a;
    if (!out->alloc_fn) out->alloc_fn = rfi_default_alloc, out->free_fn = rfi_default_free;
    return RF_OK;
}

/* Zeroed array of n elements; NULL and RF_ERR_MEMORY in err on failure. n == 0 gives a valid block. */
static void *rfi_alloc(const rf_allocator *a, uint64_t n, uint64_t element_bytes, const char *what, rf_error *err) {
    uint64_t bytes;
    void *p = NULL;
    if (rfi_mul(n, element_bytes, &bytes) && bytes < (uint64_t)PTRDIFF_MAX) {
        p = a->alloc_fn((size_t)(bytes ? bytes : 1), a->user);
        if (p) memset(p, 0, (size_t)bytes);
    }
    if (!p)
        rfi_fail(err, RF_ERR_MEMORY, 0, "out of memory: %llu x %llu bytes for %s", RFI_LLU(n), RFI_LLU(element_bytes),
                 what);
    return p;
}

static void rfi_free(const rf_allocator *a, void *block) {
    if (block) a->free_fn(block, a->user);
}

/* Uninitialised memory aligned to a power of two >= 16. The allocator's block is remembered just before it. */
static void *rfi_alloc_aligned(const rf_allocator *a, uint64_t bytes, uint64_t align, const char *what, rf_error *err) {
    uint64_t total;
    char *block = NULL;
    if (rfi_add(bytes, align + sizeof(void *), &total) && total < (uint64_t)PTRDIFF_MAX)
        block = (char *)a->alloc_fn((size_t)total, a->user);
    if (!block) {
        rfi_fail(err, RF_ERR_MEMORY, 0, "out of memory: %llu bytes for %s", RFI_LLU(bytes), what);
        return NULL;
    }
    uintptr_t at = ((uintptr_t)block + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    char *p = block + (at - (uintptr_t)block);
    memcpy(p - sizeof(void *), &block, sizeof block);
    return p;
}

static void rfi_free_aligned(const rf_allocator *a, void *p) {
    if (p) {
        char *block;
        memcpy(&block, (char *)p - sizeof(void *), sizeof block);
        a->free_fn(block, a->user);
    }
}

static char *rfi_copy_text(const rf_allocator *a, const char *text, const char *what, rf_error *err) {
    const size_t n = strlen(text);
    char *copy = (char *)rfi_alloc(a, n + 1, 1, what, err);
    if (copy) memcpy(copy, text, n);
    return copy;
}

/* ---- values ---- */

static int rfi_str_equal(rf_string s, const char *text) {
    size_t n = strlen(text);
    return s.len == n && (n == 0 || memcmp(s.data, text, n) == 0);
}

/* little-endian, at any alignment */
static uint16_t rfi_load_u16(const void *p) { uint16_t v; memcpy(&v, p, sizeof v); return v; }
static uint32_t rfi_load_u32(const void *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
static uint64_t rfi_load_u64(const void *p) { uint64_t v; memcpy(&v, p, sizeof v); return v; }
static float rfi_load_f32(const void *p) { float v; memcpy(&v, p, sizeof v); return v; }

/* Hash of folded 64 x 64 -> 128 bit products. The seed is the address of the table's owner, so that no file can be made
 * to collide. */
__extension__ typedef unsigned __int128 rfi_u128;

static uint64_t rfi_fold(uint64_t a, uint64_t b) {
    rfi_u128 product = (rfi_u128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t rfi_hash(const void *data, uint64_t n, uint64_t seed) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t h = rfi_fold(seed ^ 0x9e3779b97f4a7c15u, n ^ 0xd6e8feb86659fd93u);
    for (; n >= 8; n -= 8, p += 8) h = rfi_fold(h ^ rfi_load_u64(p), 0x9fb21c651e98df25u ^ seed);
    uint64_t tail = 0;
    memcpy(&tail, p, (size_t)n);
    return rfi_fold(h ^ tail, 0xa0761d6478bd642fu);
}

/* ---- log ---- */

typedef struct rfi_log {
    rf_log_fn fn;
    void *user;
} rfi_log;

__attribute__((format(printf, 3, 4)))
static void rfi_log_text(const rfi_log *log, rf_log_level level, const char *format, ...) {
    if (!log->fn) return;
    char raw[RF_ERROR_TEXT_BYTES], text[RF_ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(raw, sizeof raw, format, args);
    va_end(args);
    rfi_escape(text, sizeof text, raw);
    log->fn(level, text, log->user);
}

/* ==== 4 Synchronisation =============================================================================== >>sync
 * The once-cell of every lazy object, and the pool of threads that computes. A cell is one atomic word that holds state
 * and pins together: a plain "is it loaded" followed by a use would race with eviction. Waiters sleep on a monitor, one
 * for all cells of an owner, which only loads, failures and evictions touch. tests/once_cell.pml is its model. */

/* A mutex, and the condition that what it guards has changed. */
typedef struct rfi_monitor {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} rfi_monitor;

static void rfi_monitor_init(rfi_monitor *m) { /* with default attributes neither call fails on Linux */
    pthread_mutex_init(&m->mutex, NULL);
    pthread_cond_init(&m->wake, NULL);
}
static void rfi_monitor_destroy(rfi_monitor *m) {
    pthread_cond_destroy(&m->wake);
    pthread_mutex_destroy(&m->mutex);
}
static void rfi_monitor_lock(rfi_monitor *m) { pthread_mutex_lock(&m->mutex); }
static void rfi_monitor_unlock(rfi_monitor *m) { pthread_mutex_unlock(&m->mutex); }
/* Sleep until a wake, or spuriously; the mutex is released meanwhile. */
static void rfi_monitor_wait(rfi_monitor *m) { pthread_cond_wait(&m->wake, &m->mutex); }
static void rfi_monitor_wake(rfi_monitor *m) { pthread_cond_broadcast(&m->wake); }

/* ---- once-cell ---- */

enum {
    RFI_UNLOADED = 0,
    RFI_LOADING = 1,
    RFI_READY = 2,
    RFI_EVICTING = 3,
    RFI_BROKEN = 4, /* was READY, then its copy failed: no new pins; can be loaded again when the old ones are gone */
    RFI_STATE_MASK = 7
};
#define RFI_PIN ((uint64_t)1 << 32) /* the upper half of the word counts pins */

/* A sleeping thread, on its own stack: it gets the outcome of the attempt that it waited for. */
typedef struct rfi_waiter {
    struct rfi_waiter *next;
    int done;
    rf_error err;
} rfi_waiter;

/* Zeroed = UNLOADED. */
typedef struct rfi_cell {
    _Atomic uint64_t word;
    rfi_waiter *waiters; /* guarded by the monitor, as what follows */
    pthread_t owner;
    int owned;           /* 1: the load in progress is `owner`'s    */
} rfi_cell;

/* Loads what a cell stands for; runs without a lock. */
typedef rf_result (*rfi_load_fn)(void *ctx, rf_error *err);

static uint64_t rfi_cell_state(const rfi_cell *c) {
    return atomic_load_explicit(&c->word, memory_order_acquire) & RFI_STATE_MASK;
}
static int rfi_cell_is_ready(const rfi_cell *c) { return rfi_cell_state(c) == RFI_READY; }
static int rfi_cell_is_unloaded(const rfi_cell *c) { return rfi_cell_state(c) == RFI_UNLOADED; }

/* The last unpin of a BROKEN cell wakes those who want to load it again. */
static void rfi_cell_unpin(rfi_cell *c, rfi_monitor *monitor) {
    uint64_t word = atomic_fetch_sub_explicit(&c->word, RFI_PIN, memory_order_release);
    if (word != RFI_BROKEN + RFI_PIN) return;
    rfi_monitor_lock(monitor);
    rfi_monitor_wake(monitor);
    rfi_monitor_unlock(monitor);
}

/* Pin if READY. The pin is added first: an evictor that comes later sees it, one that came earlier is seen here. */
static int rfi_cell_try_pin(rfi_cell *c, rfi_monitor *monitor) {
    uint64_t word = atomic_fetch_add_explicit(&c->word, RFI_PIN, memory_order_acquire);
    if ((word & RFI_STATE_MASK) == RFI_READY) return 1;
    rfi_cell_unpin(c, monitor);
    return 0;
}

/* End a load or eviction and give every waiter the outcome (NULL: success). The state changes by addition, since pins
 * come and go meanwhile. */
static void rfi_cell_settle(rfi_cell *c, rfi_monitor *monitor, uint64_t delta, const rf_error *outcome) {
    rfi_monitor_lock(monitor);
    atomic_fetch_add_explicit(&c->word, delta, memory_order_release);
    for (rfi_waiter *w = c->waiters; w; w = w->next) {
        if (outcome) w->err = *outcome;
        w->done = 1;
    }
    c->waiters = NULL;
    rfi_monitor_wake(monitor);
    rfi_monitor_unlock(monitor);
}

/* UNLOADED, or BROKEN without pins, becomes LOADING: 1. */
static int rfi_cell_claim_word(rfi_cell *c) {
    uint64_t word = atomic_load_explicit(&c->word, memory_order_acquire);
    while ((word & RFI_STATE_MASK) == RFI_UNLOADED || word == RFI_BROKEN)
        if (atomic_compare_exchange_weak_explicit(&c->word, &word, (word & ~(uint64_t)RFI_STATE_MASK) + RFI_LOADING,
                                                  memory_order_acquire, memory_order_acquire))
            return 1;
    return 0;
}

/* UNLOADED becomes LOADING: 1. No thread owns the load; it ends when some thread settles the cell. */
static int rfi_cell_try_claim(rfi_cell *c, rfi_monitor *monitor) {
    int claim = 0;
    rfi_monitor_lock(monitor);
    if (rfi_cell_is_unloaded(c)) claim = rfi_cell_claim_word(c);
    if (claim) c->owned = 0;
    rfi_monitor_unlock(monitor);
    return claim;
}

/* After try_pin has failed: become the cell's loader (1); or sleep until the attempt in progress ends (0: try to pin
 * again; -1: it failed, with err). */
static int rfi_cell_claim(rfi_cell *c, rfi_monitor *monitor, rf_error *err) {
    rfi_monitor_lock(monitor);
    int claim = rfi_cell_claim_word(c);
    uint64_t word = atomic_load_explicit(&c->word, memory_order_acquire);
    if (claim) {
        c->owner = pthread_self();
        c->owned = 1;
    } else if ((word & RFI_STATE_MASK) == RFI_LOADING && c->owned && pthread_equal(c->owner, pthread_self())) {
        rfi_fail(err, RF_ERR_BUSY, 0, "this thread is loading it already");
        claim = -1;
    } else if ((word & RFI_STATE_MASK) == RFI_BROKEN) {
        if (word != RFI_BROKEN) rfi_monitor_wait(monitor); /* until it is unpinned */
    } else if ((word & RFI_STATE_MASK) != RFI_READY) {
        rfi_waiter w = {.next = c->waiters};
        c->waiters = &w;
        while (!w.done) rfi_monitor_wait(monitor);
        if (rfi_fail_with(err, &w.err) != RF_OK) claim = -1;
    }
    rfi_monitor_unlock(monitor);
    return claim;
}

/* Get or load: returns with the cell READY and pinned, or with the error of the attempt that this call made or waited
 * for; a later call may try again. One thread at a time runs `load`. *loaded (may be NULL): 1 if this call loaded. */
static rf_result rfi_cell_acquire(rfi_cell *c, rfi_monitor *monitor, rfi_load_fn load, void *ctx, int *loaded,
                                  rf_error *err) {
    if (loaded) *loaded = 0;
    for (;;) {
        if (rfi_cell_try_pin(c, monitor)) return RF_OK;
        rf_error own = {0};
        int claim = rfi_cell_claim(c, monitor, &own);
        if (claim > 0) {
            if (load(ctx, &own) == RF_OK) {
                if (loaded) *loaded = 1;
                rfi_cell_settle(c, monitor, (uint64_t)RFI_READY - RFI_LOADING + RFI_PIN, NULL);
                return RF_OK;
            }
            rfi_cell_settle(c, monitor, (uint64_t)0 - RFI_LOADING, &own);
        }
        if (claim != 0) return rfi_fail_with(err, &own);
    }
}

/* READY or BROKEN without pins becomes EVICTING: 1; the caller frees what the cell stands for, then calls evicted. */
static int rfi_cell_try_evict(rfi_cell *c) {
    uint64_t word = atomic_load_explicit(&c->word, memory_order_relaxed);
    while (word == RFI_READY || word == RFI_BROKEN)
        if (atomic_compare_exchange_weak_explicit(&c->word, &word, RFI_EVICTING, memory_order_acquire,
                                                  memory_order_relaxed))
            return 1;
    return 0;
}

/* READY becomes BROKEN and keeps its pins: 1. */
static int rfi_cell_break(rfi_cell *c) {
    uint64_t word = atomic_load_explicit(&c->word, memory_order_relaxed);
    while ((word & RFI_STATE_MASK) == RFI_READY)
        if (atomic_compare_exchange_weak_explicit(&c->word, &word, word + (RFI_BROKEN - RFI_READY),
                                                  memory_order_acq_rel, memory_order_relaxed))
            return 1;
    return 0;
}

static void rfi_cell_evicted(rfi_cell *c, rfi_monitor *monitor) {
    rfi_cell_settle(c, monitor, (uint64_t)0 - RFI_EVICTING, NULL);
}

/* ---- thread pool ----
 * One job at a time: numbered chunks, taken by an atomic counter. Results never depend on which thread computes which
 * chunk. A worker joins a job while it is open; the caller closes it when the chunks run out and waits only for those
 * who joined, so a sleeping worker costs nothing. Workers spin for RFI_SPIN_SECONDS, then sleep. */

#define RFI_MAX_THREADS  256
#define RFI_SPIN_SECONDS 100e-6

typedef void (*rfi_chunk_fn)(void *ctx, uint32_t chunk, uint32_t thread);

#define RFI_JOB_OPEN   ((uint64_t)1 << 31)
#define RFI_JOB_INSIDE (RFI_JOB_OPEN - 1) /* mask: workers that joined; above the open bit: number of the job */

typedef struct rfi_pool rfi_pool;

typedef struct rfi_worker {
    rfi_pool *pool;
    pthread_t thread;
    uint32_t index; /* 1 .. n_threads-1; the caller is 0 */
} rfi_worker;

struct rfi_pool {
    rf_allocator alloc;
    uint32_t n_threads;
    uint32_t n_started;
    rfi_worker *workers;
    pthread_mutex_t busy; /* held by the caller whose job runs            */
    rfi_monitor monitor;  /* of the workers that sleep                    */
    _Atomic uint32_t n_sleeping;
    _Atomic int quit;
    _Atomic uint64_t job;
    _Atomic uint32_t next; /* chunk                                        */
    uint32_t n_chunks;
    rfi_chunk_fn fn;
    void *ctx;
};

static void rfi_pause(void) {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ __volatile__("yield");
#endif
}

static void rfi_pool_work(rfi_pool *p, uint32_t thread) {
    for (;;) {
        uint32_t chunk = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (chunk >= p->n_chunks) return;
        p->fn(p->ctx, chunk, thread);
    }
}

/* There is an open job other than number `last`, or the pool is to stop. */
static int rfi_pool_has_work(const rfi_pool *p, uint64_t last) {
    const uint64_t job = atomic_load(&p->job);
    return ((job & RFI_JOB_OPEN) && job / RFI_JOB_OPEN != last) || atomic_load(&p->quit);
}

/* Wait for work: spin for a while, then sleep. */
static void rfi_pool_wait(rfi_pool *p, uint64_t last) {
    double until = rfi_now() + RFI_SPIN_SECONDS;
    do {
        for (int i = 0; i < 64; i++) {
            if (rfi_pool_has_work(p, last)) return;
            rfi_pause();
        }
    } while (rfi_now() < until);
    rfi_monitor_lock(&p->monitor);
    atomic_fetch_add(&p->n_sleeping, 1); /* before the look at job: the caller stores job, then looks at n_sleeping */
    while (!rfi_pool_has_work(p, last)) rfi_monitor_wait(&p->monitor);
    atomic_fetch_sub(&p->n_sleeping, 1);
    rfi_monitor_unlock(&p->monitor);
}

static void *rfi_pool_thread(void *arg) {
    rfi_worker *w = (rfi_worker *)arg;
    rfi_pool *p = w->pool;
    uint64_t last = 0;
    while (!atomic_load(&p->quit)) {
        uint64_t job = atomic_load_explicit(&p->job, memory_order_acquire);
        if (!(job & RFI_JOB_OPEN) || job / RFI_JOB_OPEN == last) {
            rfi_pool_wait(p, last);
        } else if (atomic_compare_exchange_weak_explicit(&p->job, &job, job + 1, memory_order_acquire,
                                                         memory_order_relaxed)) {
            rfi_pool_work(p, w->index);
            last = job / RFI_JOB_OPEN;
            atomic_fetch_sub_explicit(&p->job, 1, memory_order_release);
        }
    }
    return NULL;
}

/* Run fn for chunks 0 .. n_chunks-1, in any order, on the pool's threads and the caller's. While another caller's job
 * runs, the caller's thread does all of it. */
static void rfi_pool_run(rfi_pool *p, rfi_chunk_fn fn, void *ctx, uint32_t n_chunks) {
    if (n_chunks <= 1 || p->n_started == 0 || pthread_mutex_trylock(&p->busy) != 0) {
        for (uint32_t i = 0; i < n_chunks; i++) fn(ctx, i, 0);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n_chunks = n_chunks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    /* the open bit is the lowest of the job's number: closed numbers are even, open ones odd */
    uint64_t number = atomic_load_explicit(&p->job, memory_order_relaxed) / RFI_JOB_OPEN;
    atomic_store(&p->job, (number + 3) * RFI_JOB_OPEN);
    if (atomic_load(&p->n_sleeping)) {
        rfi_monitor_lock(&p->monitor);
        rfi_monitor_wake(&p->monitor);
        rfi_monitor_unlock(&p->monitor);
    }
    rfi_pool_work(p, 0);
    uint64_t job = atomic_fetch_and_explicit(&p->job, ~RFI_JOB_OPEN, memory_order_acquire);
    for (uint32_t spin = 0; job & RFI_JOB_INSIDE; spin++) {
        if (spin & 1023) rfi_pause();
        else sched_yield(); /* a worker inside may be waiting for this core */
        job = atomic_load_explicit(&p->job, memory_order_acquire);
    }
    pthread_mutex_unlock(&p->busy);
}

static void rfi_pool_destroy(rfi_pool *p) {
    rfi_monitor_lock(&p->monitor);
    atomic_store(&p->quit, 1);
    rfi_monitor_wake(&p->monitor);
    rfi_monitor_unlock(&p->monitor);
    for (uint32_t i = 0; i < p->n_started; i++) pthread_join(p->workers[i].thread, NULL);
    rfi_free(&p->alloc, p->workers);
    rfi_monitor_destroy(&p->monitor);
    pthread_mutex_destroy(&p->busy);
}

/* Start n_threads - 1 workers. A machine that refuses some of them gets fewer, not an error: results are the same. */
static rf_result rfi_pool_init(rfi_pool *p, const rf_allocator *alloc, uint32_t n_threads, rf_error *err) {
    *p = (rfi_pool){.alloc = *alloc, .n_threads = n_threads};
    p->workers = (rfi_worker *)rfi_alloc(alloc, n_threads, sizeof *p->workers, "worker threads", err);
    if (!p->workers) return RF_ERR_MEMORY;
    pthread_mutex_init(&p->busy, NULL);
    rfi_monitor_init(&p->monitor);
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        rfi_worker *w = &p->workers[i];
        *w = (rfi_worker){.pool = p, .index = i + 1};
        if (pthread_create(&w->thread, NULL, rfi_pool_thread, w) != 0) break;
        p->n_started++;
    }
    return RF_OK;
}

/* ==== 5 GGUF ============================================================================================== >>gguf
 * Reads header, key/value pairs and tensor directory of a file, whole or split in parts. Owns a copy of that metadata,
 * tables of keys and of tensors, and the mappings of the tensor bytes, which are not touched here.
 * Metadata is read, never parsed from a mapping: nobody can change it between a check and its use, and a file that
 * shrinks is an error instead of a SIGBUS. Each part is scanned twice: the first pass checks every number against the
 * file and finds where the metadata ends, the second fills tables whose sizes are known by then. So no allocation is
 * sized by a number that the file merely claims, and memory stays within 8 x metadata + 64 KiB. */

/* Limits, each with the reason for its default. A file beyond one is refused with a message that says which. */
#ifndef ROCMFORGE_MAX_KEY_BYTES
#define ROCMFORGE_MAX_KEY_BYTES 65535u /* the specification's */
#endif
#ifndef ROCMFORGE_MAX_NAME_BYTES
#define ROCMFORGE_MAX_NAME_BYTES 64u /* the specification's, for tensor names */
#endif
#ifndef ROCMFORGE_MAX_METADATA_BYTES
#define ROCMFORGE_MAX_METADATA_BYTES (1u << 30) /* of one part; the largest vocabularies need about 20 MB */
#endif
#ifndef ROCMFORGE_MAX_ALIGNMENT
#define ROCMFORGE_MAX_ALIGNMENT (1u << 24) /* more than the largest page in use */
#endif
#ifndef ROCMFORGE_MAX_FILES
#define ROCMFORGE_MAX_FILES 1000u /* parts of a split file: each keeps a handle open */
#endif

_Static_assert(ROCMFORGE_MAX_NAME_BYTES < sizeof(((rf_plan_weight *)0)->name), "names fit rf_plan_weight");
_Static_assert(ROCMFORGE_MAX_METADATA_BYTES <= UINT32_MAX, "rows of a table are numbered in 32 bits");

#define RFI_GGUF_HEADER_BYTES 24u
#define RFI_GGUF_KV_BYTES 14u      /* smallest pair: length, one byte of key, type, one byte of value        */
#define RFI_GGUF_TENSOR_BYTES 33u  /* smallest row: length, one byte of name, n_dims, one dim, type, offset  */
#ifndef RFI_GGUF_FIRST_READ /* the fuzzers set it small: then metadata grows, and moves, in small files too */
#define RFI_GGUF_FIRST_READ 32768u /* most small files need no second read */
#endif
#define RFI_SPLIT_SUFFIX_BYTES 20u /* "-00001-of-00002.gguf"                                                 */

/* Rows that begin with their name (rf_kv, rf_tensor_info), and an open-addressing index over the names. */
typedef struct rfi_gguf_table {
    unsigned char *rows;
    uint64_t row_bytes;
    uint64_t n;
    uint32_t *slots; /* [n_slots] row + 1, 0 = empty; at most 3/4 full */
    uint64_t n_slots;
    uint64_t seed;
} rfi_gguf_table;

typedef struct rfi_gguf_part {
    char *path;
    int64_t handle;            /* -1: bytes in memory                                 */
    uint64_t size_bytes;
    struct stat as_opened;     /* of a file of the operating system                   */
    const unsigned char *meta; /* [n_loaded] the file's first bytes                   */
    unsigned char *owned;      /* meta, if we allocated it                            */
    uint64_t n_loaded;
    uint64_t tensors_at;       /* where the directory begins                          */
    uint64_t meta_bytes;       /* where the directory ends, once it has been scanned  */
    const unsigned char *map;  /* [size_bytes] the whole file, or NULL                */
    _Atomic uint64_t fault;    /* 1 + first mapped byte that raised SIGBUS; 0: none   */
    uint64_t n_kv, n_tensors;
    uint32_t version, alignment;
} rfi_gguf_part;

struct rf_gguf {
    rf_allocator allocator;
    rf_io io;
    rfi_log log;
    char *path;
    rfi_gguf_part *parts; /* [n_parts] */
    uint32_t n_parts;
    rfi_gguf_table keys;    /* rf_kv of the first part         */
    rfi_gguf_table tensors; /* rf_tensor_info of all parts     */
    uint64_t data_bytes;
    atomic_uint n_users;    /* models and tokenizers           */
};

/* ---- names ---- */

static rf_string rfi_gguf_row_name(const rfi_gguf_table *t, uint64_t row) {
    rf_string name;
    memcpy(&name, t->rows + row * t->row_bytes, sizeof name);
    return name;
}

/* The slot that holds the name, or the empty one where it belongs. Some slot is empty, so probing ends. */
static uint64_t rfi_gguf_slot(const rfi_gguf_table *t, rf_string name) {
    uint64_t i = rfi_hash(name.data, name.len, t->seed) & (t->n_slots - 1);
    for (; t->slots[i]; i = (i + 1) & (t->n_slots - 1)) {
        rf_string other = rfi_gguf_row_name(t, t->slots[i] - 1);
        if (other.len == name.len && memcmp(other.data, name.data, (size_t)name.len) == 0) break;
    }
    return i;
}

static const void *rfi_gguf_find(const rfi_gguf_table *t, const char *text) {
    rf_string name = {text, text ? strlen(text) : 0};
    if (!name.len || !t->n) return NULL;
    uint32_t row = t->slots[rfi_gguf_slot(t, name)];
    return row ? t->rows + (row - 1) * t->row_bytes : NULL;
}

/* Index a filled row. Returns the row that has the same name already, or RF_NONE. */
static uint32_t rfi_gguf_insert(rfi_gguf_table *t, uint32_t row) {
    uint64_t i = rfi_gguf_slot(t, rfi_gguf_row_name(t, row));
    if (t->slots[i]) return t->slots[i] - 1;
    t->slots[i] = row + 1;
    return RF_NONE;
}

/* requires: n rows are known to be in the file, so that n * 33 does not overflow */
static rf_result rfi_gguf_table_create(rf_gguf *g, rfi_gguf_table *t, uint64_t n, uint64_t row_bytes, rf_error *err) {
    t->row_bytes = row_bytes;
    t->n = n;
    t->seed = (uint64_t)(uintptr_t)g;
    for (t->n_slots = 4; t->n_slots / 4 * 3 < n;) t->n_slots *= 2;
    t->rows = (unsigned char *)rfi_alloc(&g->allocator, n, row_bytes, "a GGUF table", err);
    if (t->rows) t->slots = (uint32_t *)rfi_alloc(&g->allocator, t->n_slots, sizeof *t->slots, "a GGUF index", err);
    return t->slots ? RF_OK : RF_ERR_MEMORY;
}

static void rfi_gguf_table_release(const rf_gguf *g, rfi_gguf_table *t) {
    rfi_free(&g->allocator, t->rows);
    rfi_free(&g->allocator, t->slots);
    memset(t, 0, sizeof *t);
}

/* ---- files of the operating system ---- */

/* O_NONBLOCK: opening a FIFO that nobody writes to must not hang. It has no effect on regular files. */
static int64_t rfi_os_open(const char *path, uint64_t *size_bytes, void *user) {
    struct stat st;
    int fd, sys = 0;
    RFI_UNUSED(user);
    do {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return -(int64_t)errno;
    if (fstat(fd, &st) != 0) sys = errno;
    else if (S_ISDIR(st.st_mode)) sys = EISDIR;
    else if (!S_ISREG(st.st_mode) || st.st_size < 0) sys = ENOTSUP;
    if (sys) {
        close(fd);
        return -(int64_t)sys;
    }
    *size_bytes = (uint64_t)st.st_size;
    return fd;
}

static int64_t rfi_os_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    RFI_UNUSED(user);
    if (offset > INT64_MAX) return -(int64_t)EINVAL;
    ssize_t got = pread((int)handle, dst, n, (off_t)offset);
    return got < 0 ? -(int64_t)errno : (int64_t)got;
}

/* Shared and read-only: processes share the page cache, and no memory is reserved for copies. */
static void *rfi_os_map(int64_t handle, uint64_t size_bytes, void *user) {
    RFI_UNUSED(user);
    void *base = mmap(NULL, (size_t)size_bytes, PROT_READ, MAP_SHARED, (int)handle, 0);
    return base == MAP_FAILED ? NULL : base;
}

static void rfi_os_unmap(void *base, uint64_t size_bytes, void *user) {
    RFI_UNUSED(user);
    munmap(base, (size_t)size_bytes);
}

static void rfi_os_close(int64_t handle, void *user) {
    RFI_UNUSED(user);
    close((int)handle);
}

static rf_result rfi_check_io(const rf_io *io, rf_io *out, rf_error *err) {
    int n_base = (io->open_fn != NULL) + (io->read_fn != NULL) + (io->close_fn != NULL);
    if ((n_base != 0 && n_base != 3) || (io->map_fn == NULL) != (io->unmap_fn == NULL) || (n_base == 0 && io->map_fn))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0,
                        "io: give all of open_fn, read_fn, close_fn or none; map_fn with unmap_fn and these");
    *out = *io;
    if (n_base == 0) {
        out->open_fn = rfi_os_open;
        out->read_fn = rfi_os_read;
        out->map_fn = rfi_os_map;
        out->unmap_fn = rfi_os_unmap;
        out->close_fn = rfi_os_close;
    }
    return RF_OK;
}

/* The errno in a callback's negative result. */
static int rfi_io_errno(int64_t result) { return result < -4095 ? EIO : (int)-result; }

/* The end of a path, for messages. */
static const char *rfi_path_tail(const char *path, size_t max) {
    size_t n = strlen(path);
    return n > max ? path + (n - max) : path;
}
static const char *rfi_path_label(const char *path) {
    const char *slash = strrchr(path, '/');
    return rfi_path_tail(slash ? slash + 1 : path, 80);
}

static rf_result rfi_gguf_read(const rf_gguf *g, const rfi_gguf_part *part, uint64_t offset, void *dst, uint64_t n,
                               rf_error *err) {
    unsigned char *to = (unsigned char *)dst;
    while (n) {
        size_t want = (size_t)rfi_min_u64(n, 1u << 30); /* Linux reads at most 2 GiB at once */
        int64_t got = g->io.read_fn(part->handle, offset, to, want, g->io.user);
        if (got == -EINTR) continue;
        if (got < 0)
            return rfi_fail_sys(err, RF_ERR_IO, rfi_io_errno(got), offset,
                                "%s: cannot read %llu bytes at byte %llu: %s", rfi_path_label(part->path),
                                RFI_LLU(want), RFI_LLU(offset), rfi_errno_text(rfi_io_errno(got)));
        if (got == 0)
            return rfi_fail(err, RF_ERR_IO, offset,
                            "%s: ends at byte %llu, it had %llu bytes when it was opened: it was shortened meanwhile",
                            rfi_path_label(part->path), RFI_LLU(offset), RFI_LLU(part->size_bytes));
        if ((uint64_t)got > want)
            return rfi_fail(err, RF_ERR_IO, offset, "%s: read_fn returned %lld bytes at byte %llu, asked for %llu",
                            rfi_path_label(part->path), (long long)got, RFI_LLU(offset), RFI_LLU(want));
        to += got;
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return RF_OK;
}

/* ---- the cursor ---- */

/* The scan of a part: its position, and what it is reading, for messages. Names are kept as offsets because the
 * metadata buffer moves when it grows. The scanning functions return 1, or 0 with rc and err set. */
typedef struct rfi_gguf_reader {
    rf_gguf *g;
    rfi_gguf_part *part;
    uint64_t at;                /* offset of the next byte                        */
    const char *object;         /* "header", "key", "tensor"                      */
    int64_t index;              /* of the key or tensor; -1: neither              */
    uint64_t name_at, name_len; /* its name; len 0: not read yet                  */
    uint64_t last_at, last_len; /* name of the previous one; len 0: none          */
    uint64_t element;           /* 1 + index in an array; 0: not in an array      */
    rf_result rc;
    rf_error *err;
} rfi_gguf_reader;

/* Up to 64 bytes of metadata as a C string: NULs are spelled out here, all other odd bytes by rfi_fail. */
#define RFI_GGUF_SHOW_BYTES (4 * 64 + 1)
static void rfi_gguf_show(char *dst, const rfi_gguf_part *part, uint64_t at, uint64_t n) {
    for (uint64_t i = 0; i < n && i < 64; i++) {
        if (part->meta[at + i]) *dst++ = (char)part->meta[at + i];
        else memcpy(dst, "\\x00", 4), dst += 4;
    }
    *dst = 0;
}

/* "FILE: OBJECT at byte WHERE: what is wrong" */
__attribute__((format(printf, 4, 5)))
static int rfi_gguf_bad(rfi_gguf_reader *r, rf_result code, uint64_t where, const char *format, ...) {
    char what[RF_ERROR_TEXT_BYTES], name[RFI_GGUF_SHOW_BYTES], last[RFI_GGUF_SHOW_BYTES], element[32] = "";
    int unnamed = r->name_len == 0 && r->last_len != 0;
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (r->name_len) rfi_gguf_show(name, r->part, r->name_at, r->name_len);
    else if (r->index < 0) snprintf(name, sizeof name, "%s", r->object);
    else snprintf(name, sizeof name, "%s %lld", r->object, (long long)r->index);
    /* a wrong length is often noticed only in the object after it */
    rfi_gguf_show(last, r->part, r->last_at, unnamed ? r->last_len : 0);
    if (r->element) snprintf(element, sizeof element, "[%llu]", RFI_LLU(r->element) - 1);
    r->rc = rfi_fail(r->err, code, where, "%s: %s%s%s%s%s at byte %llu: %s", rfi_path_label(r->part->path), name,
                     element, unnamed ? " (after " : "", last, unnamed ? ")" : "", RFI_LLU(where), what);
    return 0;
}

static void rfi_gguf_begin(rfi_gguf_reader *r, const char *object, int64_t index) {
    if (r->name_len) {
        r->last_at = r->name_at;
        r->last_len = r->name_len;
    }
    r->object = object;
    r->index = index;
    r->name_len = 0;
    r->element = 0;
}

/* Go back to an object read before, to report an error in it. */
static void rfi_gguf_resume(rfi_gguf_reader *r, rf_string name) {
    rfi_gguf_begin(r, "", -1);
    r->name_at = (uint64_t)((const unsigned char *)name.data - r->part->meta);
    r->name_len = name.len;
}

static uint64_t rfi_gguf_left(const rfi_gguf_reader *r) { return r->part->size_bytes - r->at; }

static int rfi_gguf_resize(rfi_gguf_reader *r, uint64_t n) {
    rfi_gguf_part *part = r->part;
    unsigned char *bytes = (unsigned char *)rfi_alloc(&r->g->allocator, n, 1, "GGUF metadata", r->err);
    if (!bytes) return r->rc = RF_ERR_MEMORY, 0;
    part->n_loaded = rfi_min_u64(part->n_loaded, n);
    if (part->n_loaded) memcpy(bytes, part->owned, (size_t)part->n_loaded);
    rfi_free(&r->g->allocator, part->owned);
    part->meta = part->owned = bytes;
    return 1;
}

/* Have the part's first `need` bytes in memory. The buffer doubles: both buffers together hold at most 3 x need. */
static int rfi_gguf_load(rfi_gguf_reader *r, uint64_t need) {
    rfi_gguf_part *part = r->part;
    uint64_t n = rfi_max_u64(rfi_max_u64(need, part->n_loaded * 2), RFI_GGUF_FIRST_READ);
    n = rfi_min_u64(n, part->size_bytes);
    if (!rfi_gguf_resize(r, n)) return 0;
    r->rc = rfi_gguf_read(r->g, part, part->n_loaded, part->owned + part->n_loaded, n - part->n_loaded, r->err);
    part->n_loaded = r->rc == RF_OK ? n : 0;
    return r->rc == RF_OK;
}

/* The only function that moves the cursor. It compares by subtraction, since at + n can wrap. The pointer is valid
 * until the next call. */
static const unsigned char *rfi_gguf_take(rfi_gguf_reader *r, uint64_t n, const char *what) {
    if (n > rfi_gguf_left(r)) {
        rfi_gguf_bad(r, RF_ERR_FORMAT, r->at, "%s needs %llu bytes, the file has %llu left", what, RFI_LLU(n),
                     RFI_LLU(rfi_gguf_left(r)));
        return NULL;
    }
    if (r->at + n > ROCMFORGE_MAX_METADATA_BYTES) {
        rfi_gguf_bad(r, RF_ERR_UNSUPPORTED, r->at,
                     "%s of %llu bytes: metadata is read up to %u bytes (ROCMFORGE_MAX_METADATA_BYTES)", what,
                     RFI_LLU(n), (unsigned)ROCMFORGE_MAX_METADATA_BYTES);
        return NULL;
    }
    if (r->at + n > r->part->n_loaded && !rfi_gguf_load(r, r->at + n)) return NULL;
    r->at += n;
    return r->part->meta + (r->at - n);
}

static int rfi_gguf_copy(rfi_gguf_reader *r, const char *what, void *out, size_t n_bytes) {
    const unsigned char *p = rfi_gguf_take(r, n_bytes, what);
    if (p) memcpy(out, p, n_bytes);
    return p != NULL;
}
static int rfi_gguf_u32(rfi_gguf_reader *r, const char *what, uint32_t *out) { return rfi_gguf_copy(r, what, out, 4); }
static int rfi_gguf_u64(rfi_gguf_reader *r, const char *what, uint64_t *out) { return rfi_gguf_copy(r, what, out, 8); }

/* Report a name whose length is wrong, with the printable bytes that it begins with: they usually identify it. */
static int rfi_gguf_bad_name(rfi_gguf_reader *r, const char *what, uint64_t at, uint64_t len, uint64_t max) {
    char begins[RFI_GGUF_SHOW_BYTES];
    uint64_t n = 0, max_shown = rfi_min_u64(rfi_min_u64(len, rfi_gguf_left(r)), 64);
    if (!rfi_gguf_take(r, max_shown, what)) return 0;
    while (n < max_shown && r->part->meta[at + n] >= 0x20 && r->part->meta[at + n] < 0x7f) n++;
    rfi_gguf_show(begins, r->part, at, n);
    return rfi_gguf_bad(r, RF_ERR_FORMAT, at - 8, "%s length is %llu, want 1..%llu%s%s%s", what, RFI_LLU(len),
                        RFI_LLU(max), n ? ": '" : "", begins, n ? "'" : "");
}

/* Read a string: *at is where its bytes begin. max 0: any length; else 1..max. */
static int rfi_gguf_string(rfi_gguf_reader *r, const char *what, uint64_t max, uint64_t *at, uint64_t *len) {
    if (!rfi_gguf_u64(r, what, len)) return 0;
    *at = r->at;
    if (max && (*len == 0 || *len > max)) return rfi_gguf_bad_name(r, what, *at, *len, max);
    if (*len > rfi_gguf_left(r))
        return rfi_gguf_bad(r, RF_ERR_FORMAT, *at - 8, "%s length is %llu, the file has %llu bytes left", what,
                            RFI_LLU(*len), RFI_LLU(rfi_gguf_left(r)));
    return rfi_gguf_take(r, *len, what) != NULL;
}

/* Read the name of a key or tensor. A NUL would make different names equal as C strings. */
static int rfi_gguf_name(rfi_gguf_reader *r, const char *what, uint64_t max) {
    uint64_t at, len;
    if (!rfi_gguf_string(r, what, max, &at, &len)) return 0;
    r->name_at = at;
    r->name_len = len;
    if (memchr(r->part->meta + at, 0, (size_t)len))
        return rfi_gguf_bad(r, RF_ERR_FORMAT, at - 8, "%s of %llu bytes has a NUL in it", what, RFI_LLU(len));
    return 1;
}

/* ---- header, keys, tensors ---- */

static int rfi_gguf_header(rfi_gguf_reader *r) {
    rfi_gguf_part *part = r->part;
    rfi_gguf_begin(r, "header", -1);
    const unsigned char *p = rfi_gguf_take(r, 4, "magic");
    if (!p) return 0;
    if (memcmp(p, "GGUF", 4) != 0) {
        char found[RFI_GGUF_SHOW_BYTES];
        rfi_gguf_show(found, part, 0, 4);
        return rfi_gguf_bad(r, RF_ERR_FORMAT, 0, "magic is '%s', want 'GGUF': not a GGUF file", found);
    }
    if (!rfi_gguf_u32(r, "version", &part->version)) return 0;
    if (part->version != 2 && part->version != 3) {
        uint32_t swapped = __builtin_bswap32(part->version);
        return rfi_gguf_bad(r, RF_ERR_UNSUPPORTED, 4, "version is %u, want 2 or 3%s", part->version,
                            swapped >= 1 && swapped <= 3 ? ": this is a big-endian file, convert it to little-endian"
                            : part->version == 1         ? ": version 1 is of 2023, convert the model again"
                                                         : "");
    }
    if (!rfi_gguf_u64(r, "n_tensors", &part->n_tensors) || !rfi_gguf_u64(r, "n_kv", &part->n_kv)) return 0;
    uint64_t left = rfi_min_u64(rfi_gguf_left(r), ROCMFORGE_MAX_METADATA_BYTES);
    if (part->n_kv > left / RFI_GGUF_KV_BYTES)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, 16, "n_kv is %llu, at most %llu fit in the file", RFI_LLU(part->n_kv),
                            RFI_LLU(left / RFI_GGUF_KV_BYTES));
    if (part->n_tensors > left / RFI_GGUF_TENSOR_BYTES)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, 8, "n_tensors is %llu, at most %llu fit in the file",
                            RFI_LLU(part->n_tensors), RFI_LLU(left / RFI_GGUF_TENSOR_BYTES));
    return 1;
}

/* Minimum bytes of a value, by rf_kv_type: of a string its length field; 0 for an array. */
static const uint8_t rfi_kv_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8};
#define RFI_KV_TYPES RFI_COUNT(rfi_kv_bytes)

/* Check n values. The caller knows that the file has room for n values of the minimum size. */
static int rfi_gguf_values(rfi_gguf_reader *r, uint32_t type, uint64_t n, int in_array) {
    if (type == RF_KV_STRING) {
        for (uint64_t i = 0; i < n; i++) {
            uint64_t at, len;
            r->element = in_array ? i + 1 : 0;
            if (!rfi_gguf_string(r, "string", 0, &at, &len)) return 0;
        }
        r->element = 0;
        return 1;
    }
    const unsigned char *p = rfi_gguf_take(r, n * rfi_kv_bytes[type], "value");
    if (p && type == RF_KV_BOOL) {
        for (uint64_t i = 0; i < n; i++) {
            if (p[i] <= 1) continue;
            r->element = in_array ? i + 1 : 0;
            return rfi_gguf_bad(r, RF_ERR_FORMAT, r->at - n + i, "bool is %u, want 0 or 1", p[i]);
        }
    }
    return p != NULL;
}

/* Read a key/value pair. The pointers in *out stay valid if all metadata is loaded. */
static int rfi_gguf_kv(rfi_gguf_reader *r, uint64_t index, rf_kv *out) {
    memset(out, 0, sizeof *out);
    rfi_gguf_begin(r, "key", (int64_t)index);
    if (!rfi_gguf_name(r, "key", ROCMFORGE_MAX_KEY_BYTES) || !rfi_gguf_u32(r, "value type", &out->type)) return 0;
    if (out->type >= RFI_KV_TYPES)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, r->at - 4, "value type is %u, want 0..12", out->type);
    out->where = r->at;
    out->element_type = out->type;
    out->count = 1;
    if (out->type == RF_KV_ARRAY) {
        if (!rfi_gguf_u32(r, "element type", &out->element_type)) return 0;
        if (out->element_type >= RFI_KV_TYPES)
            return rfi_gguf_bad(r, RF_ERR_FORMAT, r->at - 4, "element type is %u, want 0..12", out->element_type);
        if (out->element_type == RF_KV_ARRAY) /* legal, used by no model: refused, so that nothing here recurses */
            return rfi_gguf_bad(r, RF_ERR_UNSUPPORTED, r->at - 4, "is an array of arrays, which is not supported");
        if (!rfi_gguf_u64(r, "element count", &out->count)) return 0;
        uint64_t max = rfi_gguf_left(r) / rfi_kv_bytes[out->element_type];
        if (out->count > max)
            return rfi_gguf_bad(r, RF_ERR_FORMAT, r->at - 8, "element count is %llu, at most %llu fit in the file",
                                RFI_LLU(out->count), RFI_LLU(max));
    }
    uint64_t first = r->at;
    if (!rfi_gguf_values(r, out->element_type, out->count, out->type == RF_KV_ARRAY)) return 0;
    out->key.data = (const char *)r->part->meta + r->name_at;
    out->key.len = r->name_len;
    out->data = r->part->meta + first;
    out->size_bytes = r->at - first;
    return 1;
}

/* The tensor's size_bytes: rows of whole blocks. Element counts and byte counts are both checked for overflow. */
static int rfi_gguf_tensor_size(rfi_gguf_reader *r, rf_tensor_info *t) {
    rf_type_info type = rf_type_get(t->type);
    uint64_t n = 1, where = t->where + 8 + t->name.len + 4;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (t->ne[i] == 0 || t->ne[i] > INT64_MAX)
            return rfi_gguf_bad(r, RF_ERR_FORMAT, where + 8 * i, "dimension %u is %llu, want 1..2^63-1", i,
                                RFI_LLU(t->ne[i]));
        if (!rfi_mul(n, t->ne[i], &n) || n > INT64_MAX)
            return rfi_gguf_bad(r, RF_ERR_FORMAT, where + 8 * i,
                                "dimensions {%llu, %llu, %llu, %llu} have 2^63 or more elements",
                                RFI_LLU(t->ne[0]), RFI_LLU(t->ne[1]), RFI_LLU(t->ne[2]), RFI_LLU(t->ne[3]));
    }
    where += 8 * t->n_dims;
    if (!type.name)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, where, "tensor type is %u, which is none or was removed from ggml",
                            t->type);
    if (t->ne[0] % type.block_elements)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, where - 8 * t->n_dims, "dimension 0 is %llu, want whole %s blocks of %u",
                            RFI_LLU(t->ne[0]), type.name, type.block_elements);
    if (!rfi_mul(n / type.block_elements, type.block_bytes, &t->size_bytes) || t->size_bytes > INT64_MAX)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, where - 8 * t->n_dims, "%llu elements of %s have 2^63 or more bytes",
                            RFI_LLU(n), type.name);
    return 1;
}

/* Read a row of the tensor directory; offset_bytes is still relative to the part's data. */
static int rfi_gguf_tensor(rfi_gguf_reader *r, uint64_t index, rf_tensor_info *out) {
    memset(out, 0, sizeof *out);
    rfi_gguf_begin(r, "tensor", (int64_t)index);
    out->where = r->at;
    if (!rfi_gguf_name(r, "name", ROCMFORGE_MAX_NAME_BYTES) || !rfi_gguf_u32(r, "n_dims", &out->n_dims)) return 0;
    if (out->n_dims < 1 || out->n_dims > 4)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, r->at - 4, "n_dims is %u, want 1..4", out->n_dims);
    for (uint32_t i = 0; i < 4; i++) {
        out->ne[i] = 1;
        if (i < out->n_dims && !rfi_gguf_u64(r, "dimension", &out->ne[i])) return 0;
    }
    if (!rfi_gguf_u32(r, "tensor type", &out->type) || !rfi_gguf_u64(r, "offset", &out->offset_bytes)) return 0;
    out->name.data = (const char *)r->part->meta + r->name_at;
    out->name.len = r->name_len;
    return rfi_gguf_tensor_size(r, out);
}

/* ---- one part ---- */

/* First pass: check everything that can be checked by itself, load the metadata and shrink the buffer to it. */
static int rfi_gguf_scan(rfi_gguf_reader *r) {
    rfi_gguf_part *part = r->part;
    rf_kv kv;
    rf_tensor_info t;
    if (!rfi_gguf_header(r)) return 0;
    for (uint64_t i = 0; i < part->n_kv; i++)
        if (!rfi_gguf_kv(r, i, &kv)) return 0;
    part->tensors_at = r->at;
    for (uint64_t i = 0; i < part->n_tensors; i++)
        if (!rfi_gguf_tensor(r, i, &t)) return 0;
    part->meta_bytes = r->at;
    return !part->owned || part->n_loaded == part->meta_bytes || rfi_gguf_resize(r, part->meta_bytes);
}

/* Second pass over the keys. */
static int rfi_gguf_index_keys(rfi_gguf_reader *r, rfi_gguf_table *keys) {
    r->rc = rfi_gguf_table_create(r->g, keys, r->part->n_kv, sizeof(rf_kv), r->err);
    if (r->rc != RF_OK) return 0;
    r->at = RFI_GGUF_HEADER_BYTES;
    for (uint32_t i = 0; i < keys->n; i++) {
        rf_kv kv;
        uint64_t at = r->at;
        if (!rfi_gguf_kv(r, i, &kv)) return 0;
        memcpy(keys->rows + i * sizeof kv, &kv, sizeof kv);
        uint32_t same = rfi_gguf_insert(keys, i);
        if (same != RF_NONE)
            return rfi_gguf_bad(r, RF_ERR_FORMAT, at, "the key is there twice, first at byte %llu",
                                RFI_LLU(rfi_gguf_row_name(keys, same).data - (const char *)r->part->meta - 8));
    }
    return 1;
}

static int rfi_gguf_alignment(rfi_gguf_reader *r, const rfi_gguf_table *keys) {
    const rf_kv *kv = (const rf_kv *)rfi_gguf_find(keys, "general.alignment");
    r->part->alignment = 32; /* the specification's default */
    if (!kv) return 1;
    rfi_gguf_resume(r, kv->key);
    if (kv->type != RF_KV_U32)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, kv->where, "value type is %u, want u32 (%d)", kv->type, RF_KV_U32);
    uint32_t v = rfi_load_u32(kv->data);
    if (v == 0 || (v & (v - 1)) || v > ROCMFORGE_MAX_ALIGNMENT)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, kv->where, "value is %u, want a power of two up to %u", v,
                            (unsigned)ROCMFORGE_MAX_ALIGNMENT);
    r->part->alignment = v;
    return 1;
}

static uint64_t rfi_gguf_offset_at(const rf_tensor_info *t) {
    return t->where + 8 + t->name.len + 4 + 8 * t->n_dims + 4;
}

/* Sift order[root] down, so that order[0, n) is a max-heap of data offsets below `root`. */
static void rfi_gguf_sift(const rf_tensor_info *rows, uint32_t *order, uint64_t root, uint64_t n) {
    for (uint64_t child; (child = 2 * root + 1) < n; root = child) {
        uint32_t t = order[root];
        if (child + 1 < n && rows[order[child + 1]].offset_bytes > rows[order[child]].offset_bytes) child++;
        if (rows[t].offset_bytes >= rows[order[child]].offset_bytes) return;
        order[root] = order[child];
        order[child] = t;
    }
}

/* Check that no two of the part's tensors overlap; gaps and any order are fine. Heap sort takes n log n for any file;
 * libc's qsort may allocate memory that the caller's allocator does not see. */
static int rfi_gguf_disjoint(rfi_gguf_reader *r, const rf_tensor_info *rows, uint64_t n) {
    uint32_t *order = (uint32_t *)rfi_alloc(&r->g->allocator, n, sizeof *order, "the order of tensors", r->err);
    if (!order) return r->rc = RF_ERR_MEMORY, 0;
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint64_t i = n / 2; i-- > 0;) rfi_gguf_sift(rows, order, i, n);
    for (uint64_t i = n; i-- > 1;) {
        uint32_t top = order[0];
        order[0] = order[i];
        order[i] = top;
        rfi_gguf_sift(rows, order, 0, i);
    }
    int ok = 1;
    for (uint64_t i = 1; i < n && ok; i++) {
        const rf_tensor_info *low = &rows[order[i - 1]], *high = &rows[order[i]];
        if (high->offset_bytes - low->offset_bytes >= low->size_bytes) continue;
        /* blame the later row of the directory */
        const rf_tensor_info *a = high->index < low->index ? high : low, *b = a == low ? high : low;
        rfi_gguf_resume(r, b->name);
        ok = rfi_gguf_bad(r, RF_ERR_FORMAT, rfi_gguf_offset_at(b), "data [%llu, +%llu) overlaps %.*s [%llu, +%llu)",
                          RFI_LLU(b->offset_bytes), RFI_LLU(b->size_bytes), RFI_STR(a->name),
                          RFI_LLU(a->offset_bytes), RFI_LLU(a->size_bytes));
    }
    rfi_free(&r->g->allocator, order);
    return ok;
}

/* Make offset_bytes relative to the file, and check that the tensor lies inside it. */
static int rfi_gguf_place(rfi_gguf_reader *r, rf_tensor_info *t) {
    const rfi_gguf_part *part = r->part;
    uint64_t where = rfi_gguf_offset_at(t), offset = t->offset_bytes, start = 0;
    if (offset % part->alignment)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, where, "offset is %llu, want a multiple of the alignment %u",
                            RFI_LLU(offset), part->alignment);
    if (!rfi_align_up(part->meta_bytes, part->alignment, &start) || start > part->size_bytes ||
        offset > part->size_bytes - start || t->size_bytes > part->size_bytes - start - offset)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, where,
                            "%llu bytes at offset %llu of the data, which starts at byte %llu (general.alignment "
                            "%u), end past the file's %llu: is it truncated?",
                            RFI_LLU(t->size_bytes), RFI_LLU(offset), RFI_LLU(start), part->alignment,
                            RFI_LLU(part->size_bytes));
    t->offset_bytes = start + offset;
    return 1;
}

/* Second pass over the directory: rows [first, first + n_tensors) of the table of all parts. */
static int rfi_gguf_index_tensors(rfi_gguf_reader *r, uint32_t file_index, uint64_t first) {
    rf_gguf *g = r->g;
    rf_tensor_info *rows = (rf_tensor_info *)(void *)g->tensors.rows + first;
    r->at = r->part->tensors_at;
    for (uint64_t i = 0; i < r->part->n_tensors; i++) {
        rf_tensor_info *t = &rows[i];
        if (!rfi_gguf_tensor(r, i, t)) return 0;
        t->file_index = file_index;
        t->index = (uint32_t)(first + i);
        uint32_t same = rfi_gguf_insert(&g->tensors, t->index);
        if (same != RF_NONE) {
            const rf_tensor_info *other = (const rf_tensor_info *)(const void *)g->tensors.rows + same;
            int here = other->file_index == file_index;
            return rfi_gguf_bad(r, RF_ERR_FORMAT, t->where, "the tensor is there twice, first at byte %llu%s%s",
                                RFI_LLU(other->where), here ? "" : " of ",
                                here ? "" : rfi_path_label(g->parts[other->file_index].path));
        }
        if (!rfi_gguf_place(r, t)) return 0;
        g->data_bytes += t->size_bytes;
    }
    return rfi_gguf_disjoint(r, rows, r->part->n_tensors);
}

/* ---- split files ---- */

/* The end of the path of part `number` (from 1) of a split file. */
static void rfi_split_suffix(char suffix[RFI_SPLIT_SUFFIX_BYTES + 1], int64_t number, int64_t count) {
    snprintf(suffix, RFI_SPLIT_SUFFIX_BYTES + 1, "-%05u-of-%05u.gguf", (unsigned)number % 100000u,
             (unsigned)count % 100000u);
}

static char *rfi_split_path(const rf_gguf *g, int64_t number, int64_t count, rf_error *err) {
    char *other = rfi_copy_text(&g->allocator, g->path, "a path", err);
    if (other) rfi_split_suffix(other + strlen(other) - RFI_SPLIT_SUFFIX_BYTES, number, count);
    return other;
}

/* Read an integer key in lo..hi; `absent` if the file has none. */
static int rfi_gguf_split_key(rfi_gguf_reader *r, const rfi_gguf_table *keys, const char *key, int64_t lo, int64_t hi,
                              int64_t absent, int64_t *out) {
    const rf_kv *kv = (const rf_kv *)rfi_gguf_find(keys, key);
    *out = absent;
    if (!kv) return 1;
    rfi_gguf_resume(r, kv->key);
    if (kv->type == RF_KV_ARRAY || rf_kv_int(kv, 0, out, NULL) != RF_OK)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, kv->where, "value type is %u, want an integer", kv->type);
    if (*out < lo || *out > hi)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, kv->where, "value is %lld, want %lld..%lld", (long long)*out,
                            (long long)lo, (long long)hi);
    return 1;
}

typedef struct rfi_split {
    int64_t no, count; /* this part, from 0; how many there are */
    int64_t n_tensors; /* over all parts; -1: not stated        */
} rfi_split;

/* Read the keys split.* of a part and compare them with its name. A file without them may have any name. */
static int rfi_gguf_split(rfi_gguf_reader *r, const rfi_gguf_table *keys, rfi_split *s) {
    char suffix[RFI_SPLIT_SUFFIX_BYTES + 1];
    if (!rfi_gguf_split_key(r, keys, "split.count", 0, UINT16_MAX, 1, &s->count)) return 0;
    if (s->count == 0) s->count = 1;
    if (!rfi_gguf_split_key(r, keys, "split.no", 0, s->count - 1, s->count > 1 ? -1 : 0, &s->no) ||
        !rfi_gguf_split_key(r, keys, "split.tensors.count", 0, UINT32_MAX, -1, &s->n_tensors))
        return 0;
    if (s->count == 1) return 1;
    const rf_kv *kv = (const rf_kv *)rfi_gguf_find(keys, "split.count");
    rfi_gguf_resume(r, kv->key);
    if (s->no < 0)
        return rfi_gguf_bad(r, RF_ERR_FORMAT, kv->where, "value is %lld, but there is no split.no",
                            (long long)s->count);
    if (s->count > ROCMFORGE_MAX_FILES)
        return rfi_gguf_bad(r, RF_ERR_UNSUPPORTED, kv->where,
                            "value is %lld, at most %u parts are read (ROCMFORGE_MAX_FILES)",
                            (long long)s->count, (unsigned)ROCMFORGE_MAX_FILES);
    if (r->part->handle < 0)
        return rfi_gguf_bad(r, RF_ERR_UNSUPPORTED, kv->where,
                            "value is %lld: a split file cannot be opened from memory", (long long)s->count);
    rfi_split_suffix(suffix, s->no + 1, s->count);
    if (strcmp(rfi_path_tail(r->part->path, RFI_SPLIT_SUFFIX_BYTES), suffix) != 0)
        return rfi_gguf_bad(r, RF_ERR_UNSUPPORTED, kv->where,
                            "value is %lld: other parts are found by name, this one's must end in %s",
                            (long long)s->count, suffix);
    return 1;
}

/* ---- opening ---- */

static rf_result rfi_gguf_parse(rf_gguf *g, rfi_gguf_part *part, rfi_gguf_table *keys, rfi_split *split,
                                rf_error *err) {
    rfi_gguf_reader r = {.g = g, .part = part, .err = err};
    if (rfi_gguf_scan(&r) && rfi_gguf_index_keys(&r, keys) && rfi_gguf_alignment(&r, keys))
        rfi_gguf_split(&r, keys, split);
    return r.rc;
}

static int rfi_gguf_is_os_file(const rf_gguf *g, const rfi_gguf_part *part) {
    return part->handle >= 0 && g->io.open_fn == rfi_os_open;
}

/* Takes ownership of path. Keys of the first part are kept; those of others must agree with its `split`. */
static rf_result rfi_gguf_add_file(rf_gguf *g, char *path, rfi_split *split, rf_error *err) {
    const uint64_t n = g->n_parts;
    rfi_gguf_part *parts = (rfi_gguf_part *)rfi_alloc(&g->allocator, n + 1, sizeof *parts, "parts of a file", err);
    if (!parts) return rfi_free(&g->allocator, path), RF_ERR_MEMORY;
    if (n) memcpy(parts, g->parts, n * sizeof *parts);
    rfi_free(&g->allocator, g->parts);
    g->parts = parts;
    rfi_gguf_part *part = &g->parts[g->n_parts];
    part->path = path;
    part->handle = g->io.open_fn(path, &part->size_bytes, g->io.user);
    if (part->handle < 0) {
        int sys = rfi_io_errno(part->handle);
        rf_result rc = rfi_fail_sys(err, sys == ENOENT ? RF_ERR_NOT_FOUND : RF_ERR_IO, sys, 0,
                                    "%s: cannot open%s: %s", *path ? rfi_path_tail(path, 300) : "''",
                                    g->n_parts ? " (a part of the split file)" : "", rfi_errno_text(sys));
        part->path = NULL;
        rfi_free(&g->allocator, path);
        return rc;
    }
    if (rfi_gguf_is_os_file(g, part) && fstat((int)part->handle, &part->as_opened) != 0) part->as_opened.st_size = -1;
    uint32_t file_index = g->n_parts++;
    if (file_index == 0) return rfi_gguf_parse(g, part, &g->keys, split, err);
    rfi_gguf_table keys = {0};
    rfi_split s;
    rf_result rc = rfi_gguf_parse(g, part, &keys, &s, err);
    rfi_gguf_table_release(g, &keys);
    if (rc == RF_OK && (s.count != split->count || s.no != file_index || s.n_tensors != split->n_tensors))
        rc = rfi_fail(err, RF_ERR_FORMAT, 0,
                      "%s: split.no, split.count and split.tensors.count are %lld, %lld, %lld, want "
                      "%u, %lld, %lld as the first part says",
                      rfi_path_label(path), (long long)s.no, (long long)s.count, (long long)s.n_tensors, file_index,
                      (long long)split->count, (long long)split->n_tensors);
    return rc;
}

static rf_result rfi_gguf_add_files(rf_gguf *g, rf_error *err) {
    rfi_split split = {0, 1, -1};
    char *path = rfi_copy_text(&g->allocator, g->path, "a path", err);
    if (!path) return RF_ERR_MEMORY;
    rf_result rc = rfi_gguf_add_file(g, path, &split, err);
    if (rc == RF_OK && split.no != 0) {
        char *first = rfi_split_path(g, 1, split.count, err);
        if (!first) return RF_ERR_MEMORY;
        rc = rfi_fail(err, RF_ERR_ARGUMENT, 0, "%s: is part %lld of %lld, open the first part: %s",
                      rfi_path_label(g->path), (long long)split.no + 1, (long long)split.count,
                      rfi_path_tail(first, 300));
        rfi_free(&g->allocator, first);
    }
    for (uint32_t i = 1; rc == RF_OK && i < split.count; i++) {
        path = rfi_split_path(g, i + 1, split.count, err);
        rc = path ? rfi_gguf_add_file(g, path, &split, err) : RF_ERR_MEMORY;
    }
    uint64_t n_tensors = 0;
    for (uint32_t i = 0; i < g->n_parts; i++) n_tensors += g->parts[i].n_tensors;
    if (rc == RF_OK && split.count > 1 && split.n_tensors >= 0 && (uint64_t)split.n_tensors != n_tensors)
        rc = rfi_fail(err, RF_ERR_FORMAT, 0, "%s: split.tensors.count is %lld, the parts have %llu tensors",
                      rfi_path_label(g->path), (long long)split.n_tensors, RFI_LLU(n_tensors));
    return rc;
}

static rf_result rfi_gguf_add_tensors(rf_gguf *g, rf_error *err) {
    uint64_t n = 0, first = 0;
    for (uint32_t i = 0; i < g->n_parts; i++) n += g->parts[i].n_tensors;
    if (n >= RF_NONE)
        return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "%s: %llu tensors, at most %u are supported",
                        rfi_path_label(g->path), RFI_LLU(n), RF_NONE - 1);
    rf_result rc = rfi_gguf_table_create(g, &g->tensors, n, sizeof(rf_tensor_info), err);
    for (uint32_t i = 0; i < g->n_parts && rc == RF_OK; i++) {
        rfi_gguf_reader r = {.g = g, .part = &g->parts[i], .err = err};
        rfi_gguf_index_tensors(&r, i, first);
        rc = r.rc;
        first += r.part->n_tensors;
    }
    return rc;
}

static void rfi_gguf_release(rf_gguf *g) {
    rf_allocator a = g->allocator;
    for (uint32_t i = 0; i < g->n_parts; i++) {
        rfi_gguf_part *part = &g->parts[i];
        if (part->handle >= 0) {
            if (part->map) g->io.unmap_fn((void *)(uintptr_t)part->map, part->size_bytes, g->io.user);
            g->io.close_fn(part->handle, g->io.user);
        }
        rfi_free(&a, part->owned);
        rfi_free(&a, part->path);
    }
    rfi_gguf_table_release(g, &g->keys);
    rfi_gguf_table_release(g, &g->tensors);
    rfi_free(&a, g->parts);
    rfi_free(&a, g->path);
    rfi_free(&a, g);
}

static rf_result rfi_gguf_create(const char *path, const rf_gguf_desc *desc, rf_gguf **out, rf_error *err) {
    static const rf_gguf_desc defaults = {0};
    rf_allocator allocator;
    rf_io io;
    if (!desc) desc = &defaults;
    rf_result rc = rfi_check_allocator(&desc->allocator, &allocator, err);
    if (rc == RF_OK) rc = rfi_check_io(&desc->io, &io, err);
    if (rc != RF_OK) return rc;
    rf_gguf *g = (rf_gguf *)rfi_alloc(&allocator, 1, sizeof *g, "rf_gguf", err);
    if (!g) return RF_ERR_MEMORY;
    g->allocator = allocator;
    g->io = io;
    if (desc->no_map) g->io.map_fn = NULL;
    g->log = (rfi_log){desc->log_fn, desc->log_user};
    g->path = rfi_copy_text(&allocator, path, "a path", err);
    if (!g->path) return rfi_gguf_release(g), RF_ERR_MEMORY;
    *out = g;
    return RF_OK;
}

/* Index the tensors of the parts, and map the files; if this or what came before failed (rc), free all. */
static rf_result rfi_gguf_finish(rf_gguf *g, rf_result rc, rf_gguf **out, rf_error *err) {
    if (rc == RF_OK) rc = rfi_gguf_add_tensors(g, err);
    for (uint32_t i = 0; rc == RF_OK && i < g->n_parts && g->io.map_fn; i++) {
        rfi_gguf_part *part = &g->parts[i];
        if (part->handle < 0) continue;
        part->map = (const unsigned char *)g->io.map_fn(part->handle, part->size_bytes, g->io.user);
        if (!part->map)
            rfi_log_text(&g->log, RF_LOG_WARNING, "%s: cannot be mapped, its tensors are read",
                         rfi_path_label(part->path));
    }
    if (rc == RF_OK) *out = g;
    else if (g) rfi_gguf_release(g);
    return rc;
}

ROCMFORGE_API rf_result rf_gguf_open(const char *path, const rf_gguf_desc *desc, rf_gguf **out, rf_error *err) {
    rf_gguf *g = NULL;
    rfi_clear(err);
    if (out) *out = NULL;
    if (!path || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_gguf_open: path or out is NULL");
    rf_result rc = rfi_gguf_create(path, desc, &g, err);
    if (rc == RF_OK) rc = rfi_gguf_add_files(g, err);
    return rfi_gguf_finish(g, rc, out, err);
}

ROCMFORGE_API rf_result rf_gguf_open_memory(const void *data, size_t size_bytes, const rf_gguf_desc *desc,
                                            rf_gguf **out, rf_error *err) {
    rf_gguf *g = NULL;
    rfi_split split;
    rfi_clear(err);
    if (out) *out = NULL;
    if (!data || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_gguf_open_memory: data or out is NULL");
    rf_result rc = rfi_gguf_create("(memory)", desc, &g, err);
    if (rc != RF_OK) return rc;
    g->parts = (rfi_gguf_part *)rfi_alloc(&g->allocator, 1, sizeof *g->parts, "parts of a file", err);
    char *path = g->parts ? rfi_copy_text(&g->allocator, g->path, "a path", err) : NULL;
    if (!path) return rfi_gguf_finish(g, RF_ERR_MEMORY, out, err);
    g->parts[0] = (rfi_gguf_part){.path = path, .handle = -1, .size_bytes = size_bytes, .n_loaded = size_bytes,
                                  .meta = (const unsigned char *)data, .map = (const unsigned char *)data};
    g->n_parts = 1;
    return rfi_gguf_finish(g, rfi_gguf_parse(g, g->parts, &g->keys, &split, err), out, err);
}

ROCMFORGE_API rf_result rf_gguf_close(rf_gguf *g, rf_error *err) {
    rfi_clear(err);
    if (!g) return RF_OK;
    unsigned n_users = atomic_load(&g->n_users);
    if (n_users)
        return rfi_fail(err, RF_ERR_BUSY, 0, "%s: still used by %u models or tokenizers, those of models counted",
                        rfi_path_label(g->path), n_users);
    rfi_gguf_release(g);
    return RF_OK;
}

/* ---- what other sections use ---- */

static void rfi_gguf_hold(rf_gguf *g) { atomic_fetch_add(&g->n_users, 1u); }
static void rfi_gguf_drop(rf_gguf *g) { atomic_fetch_sub(&g->n_users, 1u); }
static const rf_allocator *rfi_gguf_allocator(const rf_gguf *g) { return &g->allocator; }
/* The file's name for messages, without folders: a long path would leave no room for what is wrong. */
static const char *rfi_gguf_path(const rf_gguf *g) { return rfi_path_label(g->path); }

/* The tensor's bytes in a mapping or in the caller's memory; NULL if they must be read. */
static const void *rfi_gguf_map(const rf_gguf *g, const rf_tensor_info *t) {
    const unsigned char *map = g->parts[t->file_index].map;
    return map ? map + t->offset_bytes : NULL;
}

/* 1: we mapped a file, so that the bytes are pages of it. */
static int rfi_gguf_is_mapped(const rf_gguf *g, const rfi_gguf_part *part) {
    return part->map && rfi_gguf_is_os_file(g, part) && g->io.map_fn == rfi_os_map;
}

/* Fails if rf_gguf_handle_fault has put zeros in the place of mapped bytes. */
static rf_result rfi_gguf_check_fault(const rfi_gguf_part *part, rf_error *err) {
    uint64_t fault = atomic_load(&part->fault);
    if (!fault) return RF_OK;
    return rfi_fail(err, RF_ERR_IO, fault - 1,
                    "%s: the mapped byte %llu is gone: the file was shortened while it was in use, or its disk "
                    "fails; open it again",
                    rfi_path_label(part->path), RFI_LLU(fault - 1));
}

/* To be called after a computation with mapped bytes: fails if a file was shortened meanwhile. From its new end to the
 * end of that page a mapping reads as zeros, without a signal. */
static rf_result rfi_gguf_intact(const rf_gguf *g, rf_error *err) {
    struct stat now;
    rf_result r = RF_OK;
    for (uint32_t i = 0; r == RF_OK && i < g->n_parts; i++) {
        const rfi_gguf_part *part = &g->parts[i];
        if (!rfi_gguf_is_mapped(g, part)) continue;
        r = rfi_gguf_check_fault(part, err);
        if (r == RF_OK && fstat((int)part->handle, &now) == 0 && now.st_size < part->as_opened.st_size)
            r = rfi_fail(err, RF_ERR_IO, (uint64_t)now.st_size,
                         "%s: has %lld bytes, it had %lld when it was opened: it was shortened while it was in use",
                         rfi_path_label(part->path), (long long)now.st_size, (long long)part->as_opened.st_size);
    }
    return r;
}

/* Fails if the file was shortened or rewritten since it was opened. A rename does no harm: the open file stays. */
static rf_result rfi_gguf_unchanged(const rf_gguf *g, const rf_tensor_info *t, rf_error *err) {
    const rfi_gguf_part *part = &g->parts[t->file_index];
    const struct stat *then = &part->as_opened;
    struct stat now;
    if (!rfi_gguf_is_os_file(g, part)) return RF_OK;
    if (rfi_gguf_check_fault(part, err) != RF_OK) return RF_ERR_IO;
    if (fstat((int)part->handle, &now) != 0)
        return rfi_fail_sys(err, RF_ERR_IO, errno, 0, "%s: fstat: %s", rfi_path_label(part->path),
                            rfi_errno_text(errno));
    if (now.st_size != then->st_size)
        return rfi_fail(err, RF_ERR_IO, t->offset_bytes,
                        "%s: has %lld bytes, it had %lld when it was opened: it was changed meanwhile (tensor %.*s)",
                        rfi_path_label(part->path), (long long)now.st_size, (long long)then->st_size, RFI_STR(t->name));
    if (now.st_mtim.tv_sec != then->st_mtim.tv_sec || now.st_mtim.tv_nsec != then->st_mtim.tv_nsec)
        return rfi_fail(err, RF_ERR_IO, t->offset_bytes,
                        "%s: was written to after it was opened: open it again (tensor %.*s)",
                        rfi_path_label(part->path), RFI_STR(t->name));
    return RF_OK;
}

/* First page of bytes [offset, offset + *n) of a mapped tensor; *n then counts from the page's beginning. */
static void *rfi_gguf_pages(const rf_gguf *g, const rf_tensor_info *t, uint64_t offset, uint64_t *n) {
    const rfi_gguf_part *part = &g->parts[t->file_index];
    if (!rfi_gguf_is_mapped(g, part)) return NULL;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), at = t->offset_bytes + offset, first = at / page * page;
    *n += at - first;
    return (void *)(uintptr_t)(part->map + first);
}

#define RFI_MADV_POPULATE_READ 22 /* Linux 5.14; not in older libraries' headers */

/* Page in bytes [offset, offset + n) of a mapped tensor. */
static rf_result rfi_gguf_populate(const rf_gguf *g, const rf_tensor_info *t, uint64_t offset, uint64_t n,
                                   rf_error *err) {
    uint64_t at = t->offset_bytes + offset;
    void *pages = rfi_gguf_pages(g, t, offset, &n);
    if (!pages || madvise(pages, (size_t)n, RFI_MADV_POPULATE_READ) == 0) return RF_OK;
    if (errno == EFAULT) /* where a read would raise SIGBUS */
        return rfi_fail_sys(err, RF_ERR_IO, EFAULT, at,
                            "%s: cannot read %llu bytes at byte %llu: it was shortened, or its disk fails",
                            rfi_path_label(g->parts[t->file_index].path), RFI_LLU(n), RFI_LLU(at));
    madvise(pages, (size_t)n, MADV_WILLNEED); /* an older kernel: a hint is what there is */
    return RF_OK;
}

/* Drop a mapped tensor's pages from the process; the page cache keeps them. */
static void rfi_gguf_release_pages(const rf_gguf *g, const rf_tensor_info *t) {
    uint64_t n = t->size_bytes;
    void *pages = rfi_gguf_pages(g, t, 0, &n);
    if (pages) madvise(pages, (size_t)n, MADV_DONTNEED);
}

ROCMFORGE_API int rf_gguf_handle_fault(rf_gguf *g, const void *address) {
    int saved = errno, handled = 0;
    for (uint32_t i = 0; g && i < g->n_parts && !handled; i++) {
        rfi_gguf_part *part = &g->parts[i];
        uint64_t at = (uint64_t)((uintptr_t)address - (uintptr_t)part->map), none = 0;
        if (!rfi_gguf_is_mapped(g, part) || at >= part->size_bytes) continue;
        uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = at / page * page;
        atomic_compare_exchange_strong(&part->fault, &none, at + 1); /* first, so that no use of zeros goes unnoticed */
        handled = mmap((void *)(uintptr_t)(part->map + first), (size_t)(part->size_bytes - first), PROT_READ,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
    }
    errno = saved;
    return handled;
}

/* ---- looking things up ---- */

ROCMFORGE_API rf_gguf_info rf_gguf_get_info(const rf_gguf *g) {
    if (!g) return (rf_gguf_info){0};
    rf_gguf_info info = {.path = g->path, .version = g->parts[0].version, .n_files = g->n_parts,
                         .alignment = g->parts[0].alignment, .mapped = 1, .n_kv = g->keys.n,
                         .n_tensors = g->tensors.n, .data_bytes = g->data_bytes};
    for (uint32_t i = 0; i < g->n_parts; i++) {
        info.metadata_bytes += g->parts[i].meta_bytes;
        info.file_bytes += g->parts[i].size_bytes;
        if (!g->parts[i].map) info.mapped = 0;
    }
    return info;
}

/* Copy a row to out, by name or (NULL) by index; zeros and an error that says what was looked for if there is none. */
static rf_result rfi_gguf_give(const rfi_gguf_table *t, const char *what, const char *name, uint64_t index, void *out,
                               size_t row_bytes, rf_error *err) {
    const void *row = NULL;
    rfi_clear(err);
    if (!out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "want a place for a %s, out is NULL", what);
    if (t && name) row = rfi_gguf_find(t, name);
    else if (t && index < t->n) row = t->rows + index * row_bytes;
    if (row) return memcpy(out, row, row_bytes), RF_OK;
    memset(out, 0, row_bytes);
    if (name) return rfi_fail(err, RF_ERR_NOT_FOUND, 0, "the file has no %s '%.96s'", what, name);
    return rfi_fail(err, RF_ERR_NOT_FOUND, index, "the file has no %s %llu", what, RFI_LLU(index));
}

ROCMFORGE_API rf_result rf_gguf_get_kv(const rf_gguf *g, uint64_t index, rf_kv *out, rf_error *err) {
    return rfi_gguf_give(g ? &g->keys : NULL, "key", NULL, index, out, sizeof *out, err);
}
ROCMFORGE_API rf_result rf_gguf_find_kv(const rf_gguf *g, const char *key, rf_kv *out, rf_error *err) {
    return rfi_gguf_give(g ? &g->keys : NULL, "key", key ? key : "", 0, out, sizeof *out, err);
}
ROCMFORGE_API rf_result rf_gguf_get_tensor(const rf_gguf *g, uint64_t index, rf_tensor_info *out, rf_error *err) {
    return rfi_gguf_give(g ? &g->tensors : NULL, "tensor", NULL, index, out, sizeof *out, err);
}
ROCMFORGE_API rf_result rf_gguf_find_tensor(const rf_gguf *g, const char *name, rf_tensor_info *out, rf_error *err) {
    return rfi_gguf_give(g ? &g->tensors : NULL, "tensor", name ? name : "", 0, out, sizeof *out, err);
}

ROCMFORGE_API rf_result rf_gguf_read_tensor(const rf_gguf *g, uint64_t index, uint64_t offset, void *dst, size_t n,
                                            rf_error *err) {
    rf_tensor_info t;
    rfi_clear(err);
    if (!g) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_gguf_read_tensor: file is NULL");
    if (rf_gguf_get_tensor(g, index, &t, NULL) != RF_OK)
        return rfi_fail(err, RF_ERR_ARGUMENT, index, "rf_gguf_read_tensor: tensor %llu of %llu", RFI_LLU(index),
                        RFI_LLU(rf_gguf_get_info(g).n_tensors));
    if (offset > t.size_bytes || n > t.size_bytes - offset)
        return rfi_fail(err, RF_ERR_ARGUMENT, offset,
                        "rf_gguf_read_tensor: %.*s has %llu bytes, want %llu from %llu on", RFI_STR(t.name),
                        RFI_LLU(t.size_bytes), RFI_LLU(n), RFI_LLU(offset));
    if (n == 0) return RF_OK;
    if (!dst) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_gguf_read_tensor: dst is NULL");
    const rfi_gguf_part *part = &g->parts[t.file_index];
    if (part->handle >= 0) return rfi_gguf_read(g, part, t.offset_bytes + offset, dst, n, err);
    memcpy(dst, part->map + t.offset_bytes + offset, n);
    return RF_OK;
}

/* ---- values ---- */

static rf_result rfi_kv_fail(const rf_kv *kv, uint64_t i, const char *want, rf_error *err) {
    if (!kv) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "want %s, the value is NULL", want);
    return rfi_fail(err, RF_ERR_ARGUMENT, kv->where, "%.*s: element %llu of %llu: want %s and a place for it",
                    RFI_STR(kv->key), RFI_LLU(i), RFI_LLU(kv->count), want);
}

ROCMFORGE_API rf_result rf_kv_int(const rf_kv *kv, uint64_t i, int64_t *out, rf_error *err) {
    rfi_clear(err);
    if (!kv || !out || i >= kv->count) return rfi_kv_fail(kv, i, "an integer", err);
    const unsigned char *p = (const unsigned char *)kv->data;
    uint64_t v;
    switch (kv->element_type) {
    case RF_KV_U8:
    case RF_KV_BOOL: *out = p[i]; return RF_OK;
    case RF_KV_I8: *out = (int8_t)p[i]; return RF_OK;
    case RF_KV_U16: *out = rfi_load_u16(p + 2 * i); return RF_OK;
    case RF_KV_I16: *out = (int16_t)rfi_load_u16(p + 2 * i); return RF_OK;
    case RF_KV_U32: *out = rfi_load_u32(p + 4 * i); return RF_OK;
    case RF_KV_I32: *out = (int32_t)rfi_load_u32(p + 4 * i); return RF_OK;
    case RF_KV_I64: *out = (int64_t)rfi_load_u64(p + 8 * i); return RF_OK;
    case RF_KV_U64:
        v = rfi_load_u64(p + 8 * i);
        if (v > INT64_MAX) return rfi_kv_fail(kv, i, "an integer below 2^63", err);
        *out = (int64_t)v;
        return RF_OK;
    default: return rfi_kv_fail(kv, i, "an integer", err);
    }
}

ROCMFORGE_API rf_result rf_kv_real(const rf_kv *kv, uint64_t i, double *out, rf_error *err) {
    int64_t v;
    rfi_clear(err);
    if (!kv || !out || i >= kv->count || kv->element_type == RF_KV_BOOL) return rfi_kv_fail(kv, i, "a number", err);
    const unsigned char *p = (const unsigned char *)kv->data;
    switch (kv->element_type) {
    case RF_KV_F32: *out = (double)rfi_load_f32(p + 4 * i); return RF_OK;
    case RF_KV_F64: memcpy(out, p + 8 * i, sizeof *out); return RF_OK;
    case RF_KV_U64: *out = (double)rfi_load_u64(p + 8 * i); return RF_OK;
    default: break;
    }
    if (rf_kv_int(kv, i, &v, NULL) != RF_OK) return rfi_kv_fail(kv, i, "a number", err);
    *out = (double)v;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_kv_text(const rf_kv *kv, uint64_t *cursor_bytes, rf_string *out, rf_error *err) {
    uint64_t at = cursor_bytes ? *cursor_bytes : 0, len = 0;
    rfi_clear(err);
    if (!kv || !out || kv->element_type != RF_KV_STRING || (!cursor_bytes && kv->type != RF_KV_STRING))
        return rfi_kv_fail(kv, 0, "a string, or an array of them and a cursor", err);
    const int fits = at <= kv->size_bytes && kv->size_bytes - at >= 8;
    if (fits) len = rfi_load_u64((const unsigned char *)kv->data + at);
    if (!fits || len > kv->size_bytes - at - 8)
        return rfi_fail(err, RF_ERR_ARGUMENT, kv->where, "%.*s: no string begins at byte %llu of its %llu",
                        RFI_STR(kv->key), RFI_LLU(at), RFI_LLU(kv->size_bytes));
    out->data = (const char *)kv->data + at + 8;
    out->len = len;
    if (cursor_bytes) *cursor_bytes = at + 8 + len;
    return RF_OK;
}

/* ==== 6 Types ============================================================================================ >>quant
 * Tensor types: the facts of RF_TYPE_TABLE, the packed blocks of those that run, and their decoding to float32. The
 * CPU kernels have their own unpackers; the decoders here are the definition that they are tested against. */

static const rf_type_info rfi_types[RF_TYPE_COUNT] = {
#define RFI_TYPE_INFO(NAME, id, text, elements, bytes, runs) [id] = {text, elements, bytes, runs},
    RF_TYPE_TABLE(RFI_TYPE_INFO)
#undef RFI_TYPE_INFO
};

ROCMFORGE_API rf_type_info rf_type_get(uint32_t type) {
    static const rf_type_info none = {NULL, 0, 0, 0};
    return type < RF_TYPE_COUNT ? rfi_types[type] : none;
}

/* Bytes of n_in values; 0 if the type is unknown, n_in is not whole blocks or the size does not fit. */
static uint64_t rfi_row_bytes(uint32_t type, uint64_t n_in) {
    rf_type_info t = rf_type_get(type);
    uint64_t bytes;
    if (!t.name || n_in % t.block_elements) return 0;
    return rfi_mul(n_in / t.block_elements, t.block_bytes, &bytes) ? bytes : 0;
}

/* ---- packed blocks, as in the file: bytes only, so that any address will do ---- */

/* q[j]: low nibble is value j, high nibble value j + 16; qh bit j is bit 4 of value j. Type _0: w = d*(q - 8), or
 * d*(q - 16) with qh; type _1: w = d*q + m */
typedef struct rfi_block_q4_0 { uint8_t d[2], q[16]; } rfi_block_q4_0;
typedef struct rfi_block_q4_1 { uint8_t d[2], m[2], q[16]; } rfi_block_q4_1;
typedef struct rfi_block_q5_0 { uint8_t d[2], qh[4], q[16]; } rfi_block_q5_0;
typedef struct rfi_block_q5_1 { uint8_t d[2], m[2], qh[4], q[16]; } rfi_block_q5_1;
typedef struct rfi_block_q8_0 { uint8_t d[2], q[32]; } rfi_block_q8_0; /* q signed */
/* Eight groups of 32 with 6-bit scales and mins. q[32c + l]: low nibble is value l of group 2c, high nibble of 2c + 1;
 * qh[l] bit g is bit 4 of value l of group g. w = d*scale*q - dmin*min */
typedef struct rfi_block_q4_k { uint8_t d[2], dmin[2], scales[12], q[128]; } rfi_block_q4_k;
typedef struct rfi_block_q5_k { uint8_t d[2], dmin[2], scales[12], qh[32], q[128]; } rfi_block_q5_k;
/* Sixteen groups of 16, signed scales. Half h, value l of 32 in its quarter k: low 4 bits in ql[64h + 32*(k&1) + l],
 * nibble k>>1; high 2 bits in qh[32h + l], bits 2k. w = d*scale*(q-32) */
typedef struct rfi_block_q6_k { uint8_t ql[128], qh[64], scales[16], d[2]; } rfi_block_q6_k;

/* The types below are expanded (rfi_expanded) before they are multiplied. Q2_K, Q3_K, TQ2_0: half h, value l of quarter
 * k: the bits 2k of q[32h + l]; the third bit of Q3_K: bit 4h + k of high[l]. Q2_K: w = d*(low nibble)*q -
 * dmin*(high nibble); Q3_K: w = d*(scale - 32)*(q - 4), 6-bit scales; TQ2_0: w = d*(q - 1) */
typedef struct rfi_block_q2_k { uint8_t scales[16], q[64], d[2], dmin[2]; } rfi_block_q2_k;
typedef struct rfi_block_q3_k { uint8_t high[32], q[64], scales[12], d[2]; } rfi_block_q3_k;
typedef struct rfi_block_tq2_0 { uint8_t q[64], d[2]; } rfi_block_tq2_0;
/* Nibbles are indices into a codebook, ordered as in Q4_0; NVFP4 likewise in groups of 16. IQ4_XS: groups of 32 with
 * 6-bit scales; MXFP4: e is a power of two; NVFP4: d are small floats of 4 and 3 bits */
typedef struct rfi_block_iq4_nl { uint8_t d[2], q[16]; } rfi_block_iq4_nl;
typedef struct rfi_block_iq4_xs { uint8_t d[2], scales_high[2], scales_low[4], q[128]; } rfi_block_iq4_xs;
typedef struct rfi_block_mxfp4 { uint8_t e, q[16]; } rfi_block_mxfp4;
typedef struct rfi_block_nvfp4 { uint8_t d[4], q[32]; } rfi_block_nvfp4;
/* Runs of 8 values (IQ3: 4) from a list, each with its sign. q: the runs' places in the list or their low 8 bits, high:
 * the bits above. Signs: a bit per value; where there are 7 for 8 values the last is their parity */
typedef struct rfi_block_iq2_xxs { uint8_t d[2]; struct { uint8_t q[4], signs[4]; } group[8]; } rfi_block_iq2_xxs;
typedef struct rfi_block_iq2_xs { uint8_t d[2], q[64], scales[8]; } rfi_block_iq2_xs;
typedef struct rfi_block_iq2_s { uint8_t d[2], q[32], signs[32], high[8], scales[8]; } rfi_block_iq2_s;
typedef struct rfi_block_iq3_xxs { uint8_t d[2], q[64], signs[32]; } rfi_block_iq3_xxs;
typedef struct rfi_block_iq3_s { uint8_t d[2], q[64], high[8], signs[32], scales[4]; } rfi_block_iq3_s;
/* Runs of 8 of -1, 0, 1, all moved up or down by an eighth; the d of IQ1_M is in the high nibbles of its scales */
typedef struct rfi_block_iq1_s { uint8_t d[2], q[32], high[16]; } rfi_block_iq1_s;
typedef struct rfi_block_iq1_m { uint8_t q[32], high[16], scales[8]; } rfi_block_iq1_m;
/* Five values of -1, 0, 1 to a byte, four in qh; bits for -1, 1; pairs of bits for -1, 0, 1, 2 */
typedef struct rfi_block_tq1_0 { uint8_t q[48], qh[4], d[2]; } rfi_block_tq1_0;
typedef struct rfi_block_q1_0 { uint8_t d[2], q[16]; } rfi_block_q1_0;
typedef struct rfi_block_q2_0 { uint8_t d[2], q[16]; } rfi_block_q2_0;

#define RFI_TYPE_SIZES(NAME, id, text, elements, bytes, runs) \
    RFI_BYTES_##NAME = (bytes), RFI_ELEMENTS_##NAME = (elements),
enum { RF_TYPE_TABLE(RFI_TYPE_SIZES) RFI_TYPE_SIZES_END };
#undef RFI_TYPE_SIZES
#define RFI_SAME_SIZE(NAME, block) _Static_assert(sizeof(block) == RFI_BYTES_##NAME, #NAME " as in the file")
RFI_SAME_SIZE(Q4_0, rfi_block_q4_0); RFI_SAME_SIZE(Q4_1, rfi_block_q4_1); RFI_SAME_SIZE(Q5_0, rfi_block_q5_0);
RFI_SAME_SIZE(Q5_1, rfi_block_q5_1); RFI_SAME_SIZE(Q8_0, rfi_block_q8_0); RFI_SAME_SIZE(Q4_K, rfi_block_q4_k);
RFI_SAME_SIZE(Q5_K, rfi_block_q5_k); RFI_SAME_SIZE(Q6_K, rfi_block_q6_k); RFI_SAME_SIZE(F32, float);
RFI_SAME_SIZE(F16, uint16_t); RFI_SAME_SIZE(BF16, uint16_t); RFI_SAME_SIZE(Q2_K, rfi_block_q2_k);
RFI_SAME_SIZE(Q3_K, rfi_block_q3_k); RFI_SAME_SIZE(IQ4_NL, rfi_block_iq4_nl); RFI_SAME_SIZE(IQ4_XS, rfi_block_iq4_xs);
RFI_SAME_SIZE(MXFP4, rfi_block_mxfp4); RFI_SAME_SIZE(NVFP4, rfi_block_nvfp4); RFI_SAME_SIZE(IQ2_XS, rfi_block_iq2_xs);
RFI_SAME_SIZE(IQ2_XXS, rfi_block_iq2_xxs); RFI_SAME_SIZE(IQ3_XXS, rfi_block_iq3_xxs);
RFI_SAME_SIZE(IQ2_S, rfi_block_iq2_s); RFI_SAME_SIZE(IQ3_S, rfi_block_iq3_s); RFI_SAME_SIZE(IQ1_S, rfi_block_iq1_s);
RFI_SAME_SIZE(IQ1_M, rfi_block_iq1_m); RFI_SAME_SIZE(TQ1_0, rfi_block_tq1_0); RFI_SAME_SIZE(TQ2_0, rfi_block_tq2_0);
RFI_SAME_SIZE(Q1_0, rfi_block_q1_0); RFI_SAME_SIZE(Q2_0, rfi_block_q2_0);
#undef RFI_SAME_SIZE

/* ---- half precision ---- */

static float rfi_f32_of_bits(uint32_t bits) { float f; memcpy(&f, &bits, sizeof f); return f; }
static uint32_t rfi_bits_of_f32(float f) { uint32_t bits; memcpy(&bits, &f, sizeof bits); return bits; }

/* Exact; nan stays nan (quiet). Free of branches, so that loops over it vectorise, and of subnormal floats. */
static inline float rfi_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t small = rfi_bits_of_f32((float)(int32_t)(h & 0x3ffu) * 0x1p-24f);
    uint32_t large = rest | 0x7f800000u | (rest > 0x0f800000u ? 0x00400000u : 0);
    uint32_t bits = rest < 0x00800000u ? small : rest + (112u << 23);
    return rfi_f32_of_bits(sign | (rest >= 0x0f800000u ? large : bits));
}

/* Round to nearest even; too large gives inf, nan stays nan (quiet). Subnormal halves are multiples of 2^-24: adding
 * 0.5 lines the float's last bit up with that, and the adder rounds. */
static inline uint16_t rfi_f32_to_f16(float f) {
    uint32_t bits = rfi_bits_of_f32(f), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t normal = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
    uint32_t small = rfi_bits_of_f32(rfi_f32_of_bits(rest) + 0.5f) - 0x3f000000u;
    uint32_t h = rest < 0x38800000u ? small : normal;
    if (rest >= 0x477ff000u) h = 0x7c00u;
    if (rest > 0x7f800000u) h = 0x7e00u | (rest >> 13 & 0x3ffu);
    return (uint16_t)(sign | h);
}

static inline float rfi_bf16_to_f32(uint16_t h) { return rfi_f32_of_bits((uint32_t)h << 16); }

static float rfi_load_f16(const void *p) { return rfi_f16_to_f32(rfi_load_u16(p)); }

/* ---- decoding ---- */

/* 6-bit scales and mins of the eight groups of a Q4_K or Q5_K block. */
static void rfi_k_scales(const uint8_t s[12], uint8_t scale[8], uint8_t min[8]) {
    for (int j = 0; j < 4; j++) {
        scale[j] = s[j] & 63;
        min[j] = s[j + 4] & 63;
        scale[j + 4] = (uint8_t)((s[j + 8] & 15) | (s[j] >> 6) << 4);
        min[j + 4] = (uint8_t)(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
    }
}

/* A block of 32: w = d*(q + offset) + m, with bit 4 of each q from qh. m = -0.0 where there is none: adding it keeps
 * -0. */
static void rfi_decode_32(float d, int offset, float m, uint32_t qh, const uint8_t *q, float *y) {
    for (int j = 0; j < 16; j++) {
        int lo = (int)((q[j] & 15u) | (qh >> j & 1u) << 4), hi = (int)(q[j] >> 4 | (qh >> (j + 16) & 1u) << 4);
        y[j] = (float)(lo + offset) * d + m;
        y[j + 16] = (float)(hi + offset) * d + m;
    }
}

static void rfi_decode_k45(const uint8_t *head, const uint8_t *qh, const uint8_t *q, float *y) {
    float d = rfi_load_f16(head), dmin = rfi_load_f16(head + 2);
    uint8_t scale[8], min[8];
    rfi_k_scales(head + 4, scale, min);
    for (int g = 0; g < 8; g++) {
        float ds = d * (float)scale[g], dm = dmin * (float)min[g];
        for (int l = 0; l < 32; l++) {
            int v = q[(g >> 1) * 32 + l] >> ((g & 1) * 4) & 15;
            if (qh) v |= (qh[l] >> g & 1) << 4;
            y[g * 32 + l] = ds * (float)v - dm;
        }
    }
}

static void rfi_decode_q6_k(const rfi_block_q6_k *b, float *y) {
    float d = rfi_load_f16(b->d);
    for (int i = 0; i < 256; i++) {
        int half = i >> 7, quarter = i >> 5 & 3, l = i & 31;
        int lo = b->ql[half * 64 + (quarter & 1) * 32 + l] >> ((quarter >> 1) * 4) & 15;
        int hi = b->qh[half * 32 + l] >> (quarter * 2) & 3;
        y[i] = d * (float)(int8_t)b->scales[i >> 4] * (float)((lo | hi << 4) - 32);
    }
}

/* ---- expansion: the other types as int8 values and scales ---- */

/* 256 values, w = s*q (Q2_K: s*q + m); s comes out exact. */
typedef struct rfi_expanded {
    int8_t q[256];
    float s[16];   /* of each 32 values, or of each 16     */
    float m[16];   /* of each 16                           */
} rfi_expanded;

/* What a type expands to: a scale for each 32, for each 16, or a scale and a min for each 16 values. */
#define RFI_EXPANDED_TYPES(X) \
    X(IQ4_NL, EXPANDED_32)  X(IQ4_XS, EXPANDED_32)  X(MXFP4, EXPANDED_32)  X(NVFP4, EXPANDED_16)  \
    X(Q2_K, EXPANDED_MIN)   X(Q3_K, EXPANDED_16)    X(IQ3_XXS, EXPANDED_32) X(IQ3_S, EXPANDED_32)  \
    X(IQ2_XXS, EXPANDED_32) X(IQ2_XS, EXPANDED_16)  X(IQ2_S, EXPANDED_16)  X(IQ1_S, EXPANDED_32)  \
    X(IQ1_M, EXPANDED_16)   X(TQ1_0, EXPANDED_32)   X(TQ2_0, EXPANDED_32)  X(Q1_0, EXPANDED_32)   \
    X(Q2_0, EXPANDED_32)
/* Types of their own for the kernels, above those of files. */
enum { RFI_TYPE_EXPANDED_32 = RF_TYPE_COUNT, RFI_TYPE_EXPANDED_16, RFI_TYPE_EXPANDED_MIN };

/* n_blocks blocks, 256 values at most: their q, s and m are written. */
typedef void (*rfi_expand_fn)(const uint8_t *p, uint32_t n_blocks, rfi_expanded *out);
/* The values of a list that the low, and the high, nibbles of q number. */
typedef void (*rfi_codebook_fn)(const int8_t list[16], const uint8_t q[16], int8_t low[16], int8_t high[16]);

static const int8_t rfi_iq4_list[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t rfi_fp4_list[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */

/* The lists of runs: IQ2 and IQ1 8 digits of 2 bits, 0 to 2; IQ3 4 digits of 3 bits; the lowest bits come first. */
static const uint16_t rfi_iq2_xxs_runs[256] = {RF_GRID_IQ2_XXS};
static const uint16_t rfi_iq2_xs_runs[512] = {RF_GRID_IQ2_XS};
static const uint16_t rfi_iq2_s_runs[1024] = {RF_GRID_IQ2_S};
static const uint16_t rfi_iq1_runs[2048] = {RF_GRID_IQ1};
static const uint16_t rfi_iq3_xxs_runs[256] = {RF_GRID_IQ3_XXS};
static const uint16_t rfi_iq3_s_runs[512] = {RF_GRID_IQ3_S};

static void rfi_portable_codebook(const int8_t list[16], const uint8_t q[16], int8_t low[16], int8_t high[16]) {
    for (int i = 0; i < 16; i++) low[i] = list[q[i] & 15], high[i] = list[q[i] >> 4];
}

/* Eight bytes at a time, each x; their values minus n, for values of at most 127 and n of at most 128. */
#define RFI_EIGHT(x) (0x0101010101010101u * (uint64_t)(x))
RFI_INLINE uint64_t rfi_eight_less(uint64_t v, uint32_t n) { return (v + RFI_EIGHT(128 - n)) ^ RFI_EIGHT(128); }
RFI_INLINE void rfi_eight_put(int8_t *q, uint64_t v) { memcpy(q, &v, sizeof v); }
/* The pairs of bits, and the bits, of a number as bytes. Shifts and sums alone: compilers do several at once. */
RFI_INLINE uint64_t rfi_eight_pairs(uint64_t v) {
    v = (v | v << 24) & 0x000000ff000000ffu;
    v = (v | v << 12) & 0x000f000f000f000fu;
    return (v | v << 6) & RFI_EIGHT(3);
}
RFI_INLINE uint64_t rfi_eight_bits(uint64_t v) {
    v = (v | v << 28) & 0x0000000f0000000fu;
    v = (v | v << 14) & 0x0003000300030003u;
    return (v | v << 7) & RFI_EIGHT(1);
}
/* v with the sign changed where signs has a bit; v is never 0. */
RFI_INLINE uint64_t rfi_eight_signed(uint64_t v, uint64_t signs) {
    const uint64_t one = rfi_eight_bits(signs);
    return (v ^ ((one << 8) - one)) + one;
}
/* The low 7 bits and their parity. */
RFI_INLINE uint64_t rfi_with_parity(uint64_t signs) {
    signs &= 127;
    uint64_t x = signs ^ signs >> 4;
    x ^= x >> 2;
    return signs | ((x ^ x >> 1) & 1) << 7;
}
RFI_INLINE uint32_t rfi_nibble(const uint8_t *p, uint32_t i) { return (uint32_t)(p[i >> 1] >> 4 * (i & 1) & 15); }

/* Q2_K, Q3_K, TQ2_0: pairs of bits, with or without the third ones, minus n. */
RFI_INLINE void rfi_expand_pairs(const uint8_t *p, const uint8_t *high, uint32_t n, int8_t *q) {
    for (uint32_t h = 0; h < 2; h++)
        for (uint32_t k = 0; k < 4; k++)
            for (uint32_t i = 0; i < 32; i += 8, q += 8) {
                uint64_t v = rfi_load_u64(p + 32 * h + i) >> 2 * k & RFI_EIGHT(3);
                if (high) v |= (rfi_load_u64(high + i) >> (4 * h + k) & RFI_EIGHT(1)) << 2;
                rfi_eight_put(q, rfi_eight_less(v, n));
            }
}

RFI_INLINE void rfi_expand_q2_k(const rfi_block_q2_k *b, int8_t *q, float *s, float *m) {
    const float d = rfi_load_f16(b->d), dmin = rfi_load_f16(b->dmin);
    for (int i = 0; i < 16; i++) {
        s[i] = d * (float)(b->scales[i] & 15);
        m[i] = -(dmin * (float)(b->scales[i] >> 4));
    }
    rfi_expand_pairs(b->q, NULL, 0, q);
}

RFI_INLINE void rfi_expand_q3_k(const rfi_block_q3_k *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    for (uint32_t i = 0; i < 16; i++) {
        const uint32_t low = b->scales[i & 7] >> (i >> 3) * 4 & 15, high = b->scales[8 + (i & 3)] >> (i >> 2) * 2 & 3;
        s[i] = d * (float)((int)(low | high << 4) - 32);
    }
    rfi_expand_pairs(b->q, b->high, 4, q);
}

RFI_INLINE void rfi_expand_iq4_xs(rfi_codebook_fn codebook, const rfi_block_iq4_xs *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    const uint32_t high = rfi_load_u16(b->scales_high);
    for (uint32_t g = 0; g < 8; g++, q += 32) {
        s[g] = d * (float)((int)(rfi_nibble(b->scales_low, g) | (high >> 2 * g & 3) << 4) - 32);
        codebook(rfi_iq4_list, b->q + 16 * g, q, q + 16);
    }
}

RFI_INLINE void rfi_expand_mxfp4(rfi_codebook_fn codebook, const rfi_block_mxfp4 *b, int8_t *q, float *s) {
    *s = rfi_f32_of_bits(b->e < 2 ? 0x00200000u << b->e : (b->e - 1u) << 23); /* 2^(e - 128) */
    codebook(rfi_fp4_list, b->q, q, q + 16);
}

/* Scales without a sign: 4 bits of exponent, 3 of fraction, halved. 127 is no number and counts as 0. */
RFI_INLINE float rfi_nvfp4_scale(uint8_t d) {
    const int e = d >> 3 & 15, fraction = d & 7;
    if (d == 127) return 0;
    return e ? (float)(8 + fraction) * rfi_f32_of_bits((uint32_t)(e + 127 - 11) << 23) : (float)fraction * 0x1p-10f;
}

RFI_INLINE void rfi_expand_nvfp4(rfi_codebook_fn codebook, const rfi_block_nvfp4 *b, int8_t *q, float *s) {
    for (int i = 0; i < 4; i++) s[i] = rfi_nvfp4_scale(b->d[i]);
    for (int i = 0; i < 4; i += 2) { /* two sixteens of 8 bytes each */
        int8_t low[16], high[16];
        codebook(rfi_fp4_list, b->q + 8 * i, low, high);
        for (int j = 0; j < 2; j++) {
            memcpy(q + 16 * (i + j), low + 8 * j, 8);
            memcpy(q + 16 * (i + j) + 8, high + 8 * j, 8);
        }
    }
}

RFI_INLINE float rfi_half_scale(float d, uint32_t scale) { return d * (0.5f + (float)scale); }

/* 32 runs of 8 digits, 0 to 2 for 8, 25, 43, with their signs; or seven signs and their parity. */
RFI_INLINE void rfi_expand_runs2(const uint64_t run[32], const uint64_t signs[32], int parity, int8_t *q) {
    uint64_t out[32];
    for (int i = 0; i < 32; i++) {
        const uint64_t digits = rfi_eight_pairs(run[i]);
        out[i] = rfi_eight_signed(RFI_EIGHT(8) + (digits << 4) + digits + (digits >> 1 & RFI_EIGHT(1)),
                                  parity ? rfi_with_parity(signs[i]) : signs[i]);
    }
    memcpy(q, out, sizeof out);
}

RFI_INLINE void rfi_expand_iq2_xxs(const rfi_block_iq2_xxs *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    uint64_t run[32], signs[32];
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t bits = rfi_load_u32(b->group[g].signs);
        s[g] = rfi_half_scale(d, bits >> 28) * 0.25f;
        for (uint32_t i = 0; i < 4; i++) {
            run[4 * g + i] = rfi_iq2_xxs_runs[b->group[g].q[i]];
            signs[4 * g + i] = bits >> 7 * i;
        }
    }
    rfi_expand_runs2(run, signs, 1, q);
}

RFI_INLINE void rfi_expand_iq2_xs(const rfi_block_iq2_xs *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    uint64_t run[32], signs[32];
    for (uint32_t i = 0; i < 16; i++) s[i] = rfi_half_scale(d, rfi_nibble(b->scales, i)) * 0.25f;
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t v = rfi_load_u16(b->q + 2 * i);
        run[i] = rfi_iq2_xs_runs[v & 511], signs[i] = v >> 9;
    }
    rfi_expand_runs2(run, signs, 1, q);
}

RFI_INLINE void rfi_expand_iq2_s(const rfi_block_iq2_s *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    uint64_t run[32], signs[32];
    for (uint32_t i = 0; i < 16; i++) s[i] = rfi_half_scale(d, rfi_nibble(b->scales, i)) * 0.25f;
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t high = b->high[i >> 2] >> 2 * (i & 3) & 3;
        run[i] = rfi_iq2_s_runs[b->q[i] | high << 8], signs[i] = b->signs[i];
    }
    rfi_expand_runs2(run, signs, 0, q);
}

/* 32 pairs of runs of 4 digits of 3 bits, the second in the upper 32 bits, with their signs: of IQ3_XXS 4, 12, 20 ..
 * 52, 62, and seven signs; of IQ3_S 1, 3 .. 15. */
RFI_INLINE void rfi_expand_runs3(uint32_t type, const uint64_t run[32], const uint64_t signs[32], int8_t *q) {
    const int xxs = type == RF_TYPE_IQ3_XXS;
    uint64_t out[32];
    for (int i = 0; i < 32; i++) {
        uint64_t v = run[i];
        v = (v & 0x0000000700000007u) | (v << 5 & 0x0000070000000700u) | (v << 10 & 0x0007000000070000u) |
            (v << 15 & 0x0700000007000000u);
        const uint64_t last = v & v >> 1 & v >> 2 & RFI_EIGHT(1);
        v = xxs ? (v << 3) + RFI_EIGHT(4) + (last << 1) : (v << 1) + RFI_EIGHT(1);
        out[i] = rfi_eight_signed(v, xxs ? rfi_with_parity(signs[i]) : signs[i]);
    }
    memcpy(q, out, sizeof out);
}

RFI_INLINE void rfi_expand_iq3_xxs(const rfi_block_iq3_xxs *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    uint64_t run[32], signs[32];
    for (uint32_t g = 0; g < 8; g++) {
        const uint32_t bits = rfi_load_u32(b->signs + 4 * g);
        s[g] = rfi_half_scale(d, bits >> 28) * 0.5f;
        for (uint32_t i = 4 * g; i < 4 * g + 4; i++) {
            run[i] = rfi_iq3_xxs_runs[b->q[2 * i]] | (uint64_t)rfi_iq3_xxs_runs[b->q[2 * i + 1]] << 32;
            signs[i] = bits >> 7 * (i & 3);
        }
    }
    rfi_expand_runs3(RF_TYPE_IQ3_XXS, run, signs, q);
}

RFI_INLINE void rfi_expand_iq3_s(const rfi_block_iq3_s *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    uint64_t run[32], signs[32];
    for (uint32_t g = 0; g < 8; g++) s[g] = d * (float)(1 + 2 * rfi_nibble(b->scales, g));
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t high = (uint32_t)b->high[i >> 2] >> 2 * (i & 3);
        run[i] = rfi_iq3_s_runs[b->q[2 * i] | (high & 1) << 8] |
                 (uint64_t)rfi_iq3_s_runs[b->q[2 * i + 1] | (high & 2) << 7] << 32;
        signs[i] = b->signs[i];
    }
    rfi_expand_runs3(RF_TYPE_IQ3_S, run, signs, q);
}

/* 32 runs of 8 of -1, 0, 1 times 8, plus or (down: 2) minus 1. */
RFI_INLINE void rfi_expand_runs1(const uint64_t run[32], const uint64_t down[32], int8_t *q) {
    uint64_t out[32];
    for (int i = 0; i < 32; i++) { /* 128 + 8 * (digit - 1) + 1 - down */
        const uint64_t less = down[i] | down[i] << 16, eight = (rfi_eight_pairs(run[i]) << 3) + RFI_EIGHT(121);
        out[i] = (eight - (less | less << 8 | less << 32 | less << 40)) ^ RFI_EIGHT(128);
    }
    memcpy(q, out, sizeof out);
}

RFI_INLINE void rfi_expand_iq1_s(const rfi_block_iq1_s *b, int8_t *q, float *s) {
    const float d = rfi_load_f16(b->d);
    uint64_t run[32], down[32];
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t high = rfi_load_u16(b->high + 2 * (i >> 2));
        if (i % 4 == 0) s[i >> 2] = d * (float)(2 * (high >> 12 & 7) + 1) * 0.125f;
        run[i] = rfi_iq1_runs[b->q[i] | (high >> 3 * (i & 3) & 7) << 8];
        down[i] = high >> 14 & 2;
    }
    rfi_expand_runs1(run, down, q);
}

RFI_INLINE void rfi_expand_iq1_m(const rfi_block_iq1_m *b, int8_t *q, float *s) {
    uint32_t scales[4], half = 0;
    uint64_t run[32], down[32];
    for (int i = 0; i < 4; i++) {
        scales[i] = rfi_load_u16(b->scales + 2 * i);
        half |= scales[i] >> 12 << 4 * i;
    }
    const float d = rfi_f16_to_f32((uint16_t)half);
    for (uint32_t i = 0; i < 16; i++) s[i] = d * (float)(2 * (scales[i >> 2] >> 3 * (i & 3) & 7) + 1) * 0.125f;
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t high = rfi_nibble(b->high, i);
        run[i] = rfi_iq1_runs[b->q[i] | (high & 7) << 8];
        down[i] = high >> 2 & 2;
    }
    rfi_expand_runs1(run, down, q);
}

/* Digits of base 3, n of them, of bytes that hold fractions: the first of all bytes, the second of all bytes .. */
RFI_INLINE void rfi_expand_thirds(const uint8_t *p, uint32_t n_bytes, uint32_t n, int8_t *q) {
    for (uint32_t power = 1; n--; power *= 3)
        for (uint32_t i = 0; i < n_bytes; i++) *q++ = (int8_t)((p[i] * power % 256 * 3 >> 8) - 1);
}

/* A block to its q, s and m; type and codebook are constants. */
RFI_INLINE void rfi_expand_block(uint32_t type, rfi_codebook_fn codebook, const void *p, int8_t *q, float *s,
                                 float *m) {
    const uint8_t *bytes = (const uint8_t *)p; /* a d in front of values or behind them, the same for all */
    uint32_t n_scales = 0;
    float d = 0;
    switch (type) {
    case RF_TYPE_Q2_K: rfi_expand_q2_k((const rfi_block_q2_k *)p, q, s, m); break;
    case RF_TYPE_Q3_K: rfi_expand_q3_k((const rfi_block_q3_k *)p, q, s); break;
    case RF_TYPE_IQ4_NL:
        *s = rfi_load_f16(p);
        codebook(rfi_iq4_list, bytes + 2, q, q + 16);
        break;
    case RF_TYPE_IQ4_XS: rfi_expand_iq4_xs(codebook, (const rfi_block_iq4_xs *)p, q, s); break;
    case RF_TYPE_MXFP4: rfi_expand_mxfp4(codebook, (const rfi_block_mxfp4 *)p, q, s); break;
    case RF_TYPE_NVFP4: rfi_expand_nvfp4(codebook, (const rfi_block_nvfp4 *)p, q, s); break;
    case RF_TYPE_IQ2_XXS: rfi_expand_iq2_xxs((const rfi_block_iq2_xxs *)p, q, s); break;
    case RF_TYPE_IQ2_XS: rfi_expand_iq2_xs((const rfi_block_iq2_xs *)p, q, s); break;
    case RF_TYPE_IQ2_S: rfi_expand_iq2_s((const rfi_block_iq2_s *)p, q, s); break;
    case RF_TYPE_IQ3_XXS: rfi_expand_iq3_xxs((const rfi_block_iq3_xxs *)p, q, s); break;
    case RF_TYPE_IQ3_S: rfi_expand_iq3_s((const rfi_block_iq3_s *)p, q, s); break;
    case RF_TYPE_IQ1_S: rfi_expand_iq1_s((const rfi_block_iq1_s *)p, q, s); break;
    case RF_TYPE_IQ1_M: rfi_expand_iq1_m((const rfi_block_iq1_m *)p, q, s); break;
    case RF_TYPE_TQ1_0:
        rfi_expand_thirds(bytes, 32, 5, q);
        rfi_expand_thirds(bytes + 32, 16, 5, q + 160);
        rfi_expand_thirds(bytes + 48, 4, 4, q + 240);
        d = rfi_load_f16(bytes + 52), n_scales = 8;
        break;
    case RF_TYPE_TQ2_0:
        rfi_expand_pairs(bytes, NULL, 1, q);
        d = rfi_load_f16(bytes + 64), n_scales = 8;
        break;
    case RF_TYPE_Q1_0:
        for (int i = 0; i < 16; i++) rfi_eight_put(q + 8 * i, rfi_eight_less(2 * rfi_eight_bits(bytes[2 + i]), 1));
        d = rfi_load_f16(p), n_scales = 4;
        break;
    default: /* Q2_0 */
        for (int i = 0; i < 8; i++)
            rfi_eight_put(q + 8 * i, rfi_eight_less(rfi_eight_pairs(rfi_load_u16(bytes + 2 + 2 * i)), 1));
        d = rfi_load_f16(p), n_scales = 2;
        break;
    }
    for (uint32_t i = 0; i < n_scales; i++) s[i] = d;
}

#define RFI_EXPANDER(name, TARGET, codebook, TYPE, kind)                                                              \
    static inline TARGET void rfi_##name##_expand_##TYPE(const uint8_t *p, uint32_t n_blocks, rfi_expanded *e) {      \
        const uint32_t n = RFI_ELEMENTS_##TYPE, n_scales = n / (RFI_TYPE_##kind == RFI_TYPE_EXPANDED_32 ? 32 : 16);   \
        for (uint32_t b = 0; b < n_blocks; b++, p += RFI_BYTES_##TYPE)                                                \
            rfi_expand_block(RF_TYPE_##TYPE, codebook, p, e->q + b * n, e->s + b * n_scales, e->m + b * n_scales);    \
    }
#define RFI_PORTABLE_EXPANDER(TYPE, kind) RFI_EXPANDER(portable, , rfi_portable_codebook, TYPE, kind)
RFI_EXPANDED_TYPES(RFI_PORTABLE_EXPANDER)
#undef RFI_PORTABLE_EXPANDER

_Static_assert((RF_TYPES_BUILT & ~RF_TYPES_RUN) == 0, "ROCMFORGE_TYPES: want types that run");

/* What is compiled: types, and the RFI_TYPE_EXPANDED_* that some of them need. */
#define RFI_KIND_BIT(TYPE, kind) | (int)RF_TYPE_IS_BUILT(RF_TYPE_##TYPE) << (RFI_TYPE_##kind - RF_TYPE_COUNT)
enum { RFI_KINDS_BUILT = 0 RFI_EXPANDED_TYPES(RFI_KIND_BIT) };
#undef RFI_KIND_BIT
#define RFI_IF_BUILT(type, f) \
    ((RF_TYPES_BUILT | (uint64_t)RFI_KINDS_BUILT << RF_TYPE_COUNT) >> (type) & 1 ? (f) : NULL)

/* How a type is expanded, and to which RFI_TYPE_EXPANDED_*; 0 and NULL for those that are not. */
static const struct { rfi_expand_fn expand; uint32_t kind; } rfi_expansions[RF_TYPE_COUNT] = {
#define RFI_EXPANSION(TYPE, kind) \
    [RF_TYPE_##TYPE] = {RFI_IF_BUILT(RF_TYPE_##TYPE, rfi_portable_expand_##TYPE), RFI_TYPE_##kind},
    RFI_EXPANDED_TYPES(RFI_EXPANSION)
#undef RFI_EXPANSION
};

static void rfi_decode_expanded(uint32_t type, const uint8_t *p, uint64_t n, float *y) {
    const uint32_t elements = rfi_types[type].block_elements, kind = rfi_expansions[type].kind;
    const uint32_t run = kind == RFI_TYPE_EXPANDED_32 ? 32 : 16;
    rfi_expanded e;
    for (uint64_t i = 0; i < n; i += 256, p += (size_t)(256 / elements) * rfi_types[type].block_bytes) {
        const uint32_t here = (uint32_t)rfi_min_u64(256, n - i);
        rfi_expansions[type].expand(p, here / elements, &e);
        for (uint32_t j = 0; j < here; j++) {
            const float w = e.s[j / run] * (float)e.q[j];
            y[i + j] = kind == RFI_TYPE_EXPANDED_MIN ? w + e.m[j / run] : w;
        }
    }
}

/* One block of a type that runs and is not expanded; y receives block_elements values. */
static void rfi_dequantize_block(uint32_t type, const uint8_t *p, float *y) {
    switch (type) {
    case RF_TYPE_F32: *y = rfi_load_f32(p); break;
    case RF_TYPE_F16: *y = rfi_load_f16(p); break;
    case RF_TYPE_BF16: *y = rfi_bf16_to_f32(rfi_load_u16(p)); break;
    case RF_TYPE_Q4_0: rfi_decode_32(rfi_load_f16(p), -8, -0.0f, 0, p + 2, y); break;
    case RF_TYPE_Q4_1: rfi_decode_32(rfi_load_f16(p), 0, rfi_load_f16(p + 2), 0, p + 4, y); break;
    case RF_TYPE_Q5_0: rfi_decode_32(rfi_load_f16(p), -16, -0.0f, rfi_load_u32(p + 2), p + 6, y); break;
    case RF_TYPE_Q5_1: rfi_decode_32(rfi_load_f16(p), 0, rfi_load_f16(p + 2), rfi_load_u32(p + 4), p + 8, y); break;
    case RF_TYPE_Q8_0:
        for (int i = 0; i < 32; i++) y[i] = (float)(int8_t)p[2 + i] * rfi_load_f16(p);
        break;
    case RF_TYPE_Q4_K: rfi_decode_k45(p, NULL, p + 16, y); break;
    case RF_TYPE_Q5_K: rfi_decode_k45(p, p + 16, p + 48, y); break;
    case RF_TYPE_Q6_K: rfi_decode_q6_k((const rfi_block_q6_k *)p, y); break;
    default: break;
    }
}

/* Decode n values of a type that runs; n is whole blocks. */
static void rfi_dequantize_row(uint32_t type, const void *src, uint64_t n, float *dst) {
    const uint8_t *p = (const uint8_t *)src;
    const uint32_t elements = rfi_types[type].block_elements, bytes = rfi_types[type].block_bytes;
    if (rfi_expansions[type].kind) rfi_decode_expanded(type, p, n, dst);
    else for (uint64_t i = 0; i < n; i += elements, p += bytes) rfi_dequantize_block(type, p, dst + i);
}

ROCMFORGE_API rf_result rf_dequantize(uint32_t type, const void *src, uint64_t n, float *dst, rf_error *err) {
    rf_type_info t = rf_type_get(type);
    rfi_clear(err);
    if (!t.name) return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "dequantize: type %u is no tensor type", (unsigned)type);
    if (!t.runs) return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "dequantize: type %s is not supported", t.name);
    if (!RF_TYPE_IS_BUILT(type))
        return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "dequantize: type %s is not among ROCMFORGE_TYPES", t.name);
    if (n % t.block_elements)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "dequantize %s: want a multiple of %u values, got %llu", t.name,
                        (unsigned)t.block_elements, (unsigned long long)n);
    if (n && (!src || !dst)) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "dequantize: src or dst is NULL");
    rfi_dequantize_row(type, src, n, dst);
    return RF_OK;
}

/* ==== 7 Lazy tensors ================================================================================== >>tensor
 * The weights of a file on a device, in one store for all models of that file there. Nothing is read before somebody
 * needs it: a tensor's once-cell makes one thread start the load and lets the others sleep. READY means: the address is
 * fixed and the copy is enqueued; the device waits for the copy, not the host. Where the device uses the file's bytes
 * in place, loading pages in a part of the mapping. Users pin: what is pinned is not evicted.
 * This room has the objects and their locks, device memory, and eviction; the next ones have all else.
 *
 * Locks, in the order in which they may be taken; each object says which one guards it:
 *   device.monitor       the list of stores and their shares of the budget; wakes when a store becomes idle
 *   store.stream_lock    held by the eval that streams: the ring serves one eval at a time
 *   store.monitor        everything else of a store; wakes at every change
 *   store.cell_monitor   the waiters of the tensors' once-cells
 * "locked" after a function's head means that the caller holds store.monitor, "locked, yields" that the function also
 * releases it for a while: what it guards may have changed afterwards. */

typedef struct rfi_store rfi_store;
static uint32_t rfi_cpu_count(void);                                   /* section 10 */
static void rfi_plan_free(const rf_allocator *alloc, rf_plan *plan);   /* section 9  */

struct rf_device {
    rf_allocator alloc;
    const rf_device_api *api;
    rf_dev *dev;
    char note[160];                /* why "auto" chose this one                                              */
    uint32_t is_gpu;
    uint64_t budget_bytes;         /* for weights; 0 = what is free                                          */
    _Atomic uint32_t n_held;       /* models on it                                                           */
    _Atomic uint64_t weight_bytes; /* allocated for weights now                                              */
    rfi_monitor monitor;           /* guards what follows                                                    */
    rfi_store *stores;
    uint64_t clock;                /* counts uses of stores, for LRU                                         */
    rf_dev *fallback_dev;          /* CPU device for experts that the CPU computes; NULL until some are      */
};

/* A device that has not finished by then is reported as failed instead of hanging the caller. */
#define RFI_WAIT_MS 120000u

#define RFI_SLAB_BYTES ((uint64_t)1 << 30) /* of a device allocation for weights, at least; or an eighth of them */
#define RFI_SLABS      8u
#define RFI_MAX_SLABS  64u                 /* an allocation that fails is tried in halves up to so many          */

#define RFI_STAGING_BYTES ((uint64_t)2 << 20) /* of a piece; more only if a row is longer. 1 to 8 MiB were tried */
#define RFI_MAX_READERS   16u
#define RFI_MAX_STAGING   (2 * RFI_MAX_READERS) /* buffers: one is filled while another's copy is in flight */

#define RFI_PINNED_PIECE_BYTES ((uint64_t)32 << 20)  /* of a piece that has a pinned copy already                */
#define RFI_PINNED_BLOCK_BYTES ((uint64_t)128 << 20) /* of an allocation for pinned copies; more if pinned_bytes */
#define RFI_MAX_PINNED_BLOCKS  512u                  /* would take more than half of these                       */

#define RFI_EXPERT_WEIGHTS 4u /* matrices of an expert at most */

typedef struct rfi_tensor {
    rfi_cell cell;
    /* fixed when the store is open */
    rf_tensor_info info;
    const void *in_place;    /* the file's bytes, if the device uses them where they are              */
    uint64_t bytes;          /* on the device, or of the mapping                                      */
    struct rfi_expert_layer *expert_layer; /* of an expert's matrix, else NULL                        */
    /* by the placement: change only while no call is active */
    uint32_t slab;
    uint8_t streamed;        /* 1: lives in the ring                                                  */
    uint8_t cached;          /* 1: lives in a frame of the expert cache                               */
    /* guarded by store.monitor; fixed while the tensor is READY and pinned */
    uint8_t bound;           /* 1: has memory: LOADING, READY, BROKEN, EVICTING                       */
    uint64_t offset;         /* in its slab, in the ring or in the cache                              */
    rf_ticket written;       /* of the last of its copies                                             */
    _Atomic uint8_t arrived; /* 1: the copies are known to have succeeded                             */
    /* guarded by store.monitor */
    rf_ticket last_use;      /* of a streamed tensor                                                  */
    void *pinned;            /* a copy in pinned host memory, if it may be loaded again               */
    uint8_t pinned_filled;
    uint8_t prefetch;        /* 1: readers shall load it                                              */
    uint8_t reporting;       /* 1: in the list of reports                                             */
    struct rfi_tensor *next_report;
    uint32_t n_loads;
    /* guarded by store.monitor: the load in progress */
    struct rfi_tensor *next_job;
    uint8_t loading;
    uint8_t demanded;        /* 1: by a thread that waits and settles the cell; 0: by readers         */
    uint32_t next_row;       /* threads have taken the rows before it                                 */
    uint32_t n_busy;         /* threads at work on a piece                                            */
    uint64_t epoch;          /* of the loader, when the load began                                    */
    rf_error err;
} rfi_tensor;

/* ---- objects of a store that store.monitor guards ---- */

/* A block of device memory in which tensors lie. */
typedef struct rfi_slab {
    rf_mem mem;
    uint64_t size_bytes;
    uint32_t n_bound; /* tensors in it */
    int creating;
} rfi_slab;

/* Device memory of resident weights. */
typedef struct rfi_memory {
    rfi_slab slabs[RFI_MAX_SLABS];
    uint32_t n_slabs;
    uint32_t n_creating; /* slabs that are being allocated                                         */
    rfi_slab scratch;    /* in which the device repacks: copies run one after another and share it */
} rfi_memory;

enum { RFI_STAGING_ABSENT, RFI_STAGING_FREE, RFI_STAGING_FILLING, RFI_STAGING_IN_FLIGHT };

/* A buffer in pinned host memory between file and device. */
typedef struct rfi_staging {
    void *mem;
    int state;
    rf_ticket ticket;    /* IN_FLIGHT: a copy reads it until then        */
    uint32_t slot, load; /* what it holds is of this load of this tensor */
} rfi_staging;

/* Pinned host memory for copies of tensors that are loaded again and again. */
typedef struct rfi_pinned_pool {
    void *blocks[RFI_MAX_PINNED_BLOCKS];
    uint32_t n_blocks;
    uint64_t size_bytes;
    unsigned char *free_at; /* the free rest of the last block       */
    uint64_t free_bytes;
    uint64_t retry_at;      /* stats.loads at which to try again     */
    int creating;
} rfi_pinned_pool;

/* The progress callback: one call at a time, with nothing locked, so that it may call the library. */
typedef struct rfi_reports {
    rf_progress_fn fn;
    void *user;
    const rf_model *owner;    /* whose callback it is                    */
    rfi_tensor *first, **end; /* loaded tensors that it has not seen     */
    int running;
} rfi_reports;

/* Rows of a load. On the stack of the thread that works on them. */
typedef struct rfi_piece {
    rfi_tensor *t;
    uint32_t row0, n_rows;
    pthread_t thread;
    struct rfi_piece *next;
} rfi_piece;

typedef struct rfi_reader {
    pthread_t thread;
    rfi_store *store;
    int started, ended;
} rfi_reader;

/* The loads in progress and the threads that read. */
typedef struct rfi_loader {
    rfi_tensor *jobs;
    uint32_t n_jobs, n_stream_jobs; /* counted before they are in the list       */
    double busy_since;              /* when n_jobs became 1                      */
    rfi_piece *pieces;              /* that threads work on now                  */
    rf_ticket newest_copy;
    uint64_t epoch;                 /* a cancel ends the loads of earlier epochs */
    uint32_t prefetch_at;           /* readers have been through store.order up to here */
    rfi_staging staging[RFI_MAX_STAGING];
    uint32_t n_staging_max;
    rfi_reader readers[RFI_MAX_READERS];
    uint32_t n_readers_max, n_running;
    int quit;
} rfi_loader;

/* The ring of streamed tensors, in the order of their uses by the plan, round and round. Counts are of uses since the
 * last reset: n_freed <= n_used <= n_loaded. */
typedef struct rfi_stream {
    uint32_t *uses;  /* [n_uses] slots, layer by layer */
    uint32_t n_uses; /* 0: nothing is streamed         */
    uint64_t n_loaded, n_used, n_freed;
    int paused, freeing;
    rf_error err;
    rfi_slab ring;
} rfi_stream;

/* The experts of a layer. The matrices of expert e are in the slots weight[0] + e, weight[1] + e, ... */
typedef struct rfi_expert_layer {
    uint32_t layer, n_experts;
    uint32_t first; /* number of its expert 0 among those of all layers */
    uint32_t n_weights, weight[RFI_EXPERT_WEIGHTS];
    _Atomic uint64_t hits, misses, bytes, prefetched, on_cpu, round_trips;
} rfi_expert_layer;

/* Room for one expert. Its tensors may be evicted or loading; the frame is theirs until another expert gets it. */
typedef struct rfi_frame {
    double rank;      /* the frame of lowest rank is the victim; negative: empty */
    uint32_t expert_layer, expert;
    uint32_t n_users; /* evals whose current layer needs it                      */
} rfi_frame;

typedef struct rfi_cache {
    rfi_expert_layer *layers;     /* [n_layers] in plan order; 0: no experts, or none that can be cached */
    uint32_t n_layers, n_experts; /* experts of all layers                                   */
    uint64_t frame_bytes;         /* of the largest expert                                   */
    uint64_t expert_bytes;        /* of all experts on the device                            */
    uint32_t n_frames_min;        /* with so many, any step finds room for a layer's experts */
    rfi_slab slab;
    rfi_frame *frames;            /* [n_frames]                                              */
    uint32_t *frame_of;           /* [n_experts] RF_NONE: has none                           */
    double *score;                /* [n_experts] choices, each worth the `unit` of its time  */
    double unit, clock;           /* weight of a choice now; steps                           */
    uint32_t n_frames;            /* 0: all experts are resident, or streamed                */
    uint32_t n_free;              /* without users, less those that evals have reserved      */
    uint32_t n_empty;             /* that hold no expert                                     */
    int prefetching;              /* no cancel since the last request: readers may fill empty frames */
    int reader_waits;             /* a reader waits for a copy to end                        */
    int eval_waits;               /* an eval waits for free frames; others queue after it    */
    uint32_t n_holding;           /* evals that need no pins: all experts are there, and none may be evicted */
    uint64_t held_stamp;          /* rfi_store_stamp when all were found there; 0: never     */
} rfi_cache;

/* ---- objects of a store with other guards ---- */

/* What stays on the device, what goes through the ring, and how large the expert cache is. */
typedef struct rfi_placement {
    uint8_t *streamed;       /* [n_weights]                                  */
    uint32_t *slots;         /* the weights of a layer, while it is made     */
    uint64_t resident_bytes; /* with the expert cache and scratch            */
    uint64_t ring_bytes;
    uint32_t n_frames;       /* of the expert cache; 0: none                 */
} rfi_placement;

/* A store's part of the device's budget. Guarded by device.monitor. */
typedef struct rfi_share {
    uint32_t n_models;
    uint32_t n_active;  /* calls in progress                     */
    uint64_t last_used; /* device.clock at the last call's begin */
    int placed;         /* the placement is in effect            */
    uint64_t size_bytes;
    rfi_placement placement;
} rfi_share;

/* Counters, without a lock. */
typedef struct rfi_stats {
    _Atomic uint64_t tensors_loaded, residents_loaded, bytes_loaded; /* now                       */
    _Atomic uint64_t loads, failures, evictions, hits, misses;       /* ever                      */
    _Atomic uint64_t bytes_total, bytes_read;                        /* of all loads; of the file */
    _Atomic uint64_t device_bytes, device_allocations;
    _Atomic uint64_t wait_ns, load_ns;
} rfi_stats;

struct rfi_store {
    /* fixed when the store is open */
    rf_gguf *g;
    rf_device *device;
    rf_plan plan;
    rf_model_desc desc;
    rf_table *table;
    rf_queue *queue;              /* for copies                                              */
    rfi_tensor *tensors;          /* [n_weights], by slot                                    */
    uint32_t *order;              /* [n_weights] slots in the order of the load policy       */
    uint64_t total_bytes;         /* in the file                                             */
    uint64_t device_bytes_needed; /* if all is resident, with scratch                        */
    uint64_t row_bytes_max;
    int in_place;                 /* some tensor's bytes are used where the file is mapped   */

    /* guarded by device.monitor */
    rfi_store *next;
    rfi_share share;

    /* By the placement: changes only while no call is active, so that calls read it without a lock; as do stream.n_uses
     * and cache.n_frames. */
    uint32_t n_resident; /* tensors neither streamed nor cached                              */

    pthread_mutex_t stream_lock;

    /* guarded by store.monitor */
    rfi_monitor monitor;
    uint64_t n_changes;  /* a thread that had released the monitor sees that it missed one   */
    rfi_memory memory;
    rfi_loader loader;
    rfi_pinned_pool pinned;
    rfi_reports reports;
    rfi_stream stream;
    rfi_cache cache;

    /* without a lock, or with their own */
    rfi_monitor cell_monitor;
    _Atomic uint64_t cancels; /* by the user: a call ends if this changes meanwhile          */
    rfi_stats stats;
};

static void rfi_store_changed(rfi_store *s) { /* locked */
    s->n_changes++;
    rfi_monitor_wake(&s->monitor);
}

/* Sleep until something changes, unless it has since n_changes was `seen`. */
static void rfi_store_wait_change(rfi_store *s, uint64_t seen) { /* locked, yields */
    if (s->n_changes == seen) rfi_monitor_wait(&s->monitor);
}

static uint32_t rfi_tensor_slot(const rfi_store *s, const rfi_tensor *t) { return (uint32_t)(t - s->tensors); }
static const rf_plan_weight *rfi_tensor_weight(const rfi_store *s, const rfi_tensor *t) {
    return &s->plan.weights[t - s->tensors];
}

/* 1: stays where it is once loaded, unless the user clears. */
static int rfi_is_resident(const rfi_tensor *t) { return !t->streamed && !t->cached; }

static int rfi_store_streams(const rfi_store *s) { return s->stream.n_uses > 0; }
static int rfi_store_all_loaded(const rfi_store *s) {
    return atomic_load(&s->stats.tensors_loaded) == s->plan.n_weights;
}
static int rfi_store_residents_loaded(const rfi_store *s) {
    return atomic_load(&s->stats.residents_loaded) >= s->n_resident;
}

static void rfi_stats_count_tensor(rfi_store *s, const rfi_tensor *t, int loaded) {
    const uint64_t one = loaded ? 1 : 0 - (uint64_t)1;
    atomic_fetch_add(&s->stats.tensors_loaded, one);
    if (rfi_is_resident(t)) atomic_fetch_add(&s->stats.residents_loaded, one);
    atomic_fetch_add(&s->stats.bytes_loaded, loaded ? t->info.size_bytes : 0 - t->info.size_bytes);
}

static void rfi_stats_count_memory(rfi_store *s, uint64_t size_bytes, int created) {
    atomic_fetch_add(&s->stats.device_allocations, created ? 1 : 0);
    atomic_fetch_add(&s->stats.device_bytes, created ? size_bytes : 0 - size_bytes);
    atomic_fetch_add(&s->device->weight_bytes, created ? size_bytes : 0 - size_bytes);
}

/* Differs whenever a tensor was loaded, evicted or broken meanwhile. */
static uint64_t rfi_store_stamp(const rfi_store *s) {
    const rfi_stats *n = &s->stats;
    return 1 + atomic_load(&n->loads) + atomic_load(&n->evictions) + atomic_load(&n->failures);
}

static rf_result rfi_fail_cancelled(const rfi_store *s, const rfi_tensor *t, rf_error *err) {
    return rfi_fail(err, RF_ERR_CANCELLED, rfi_tensor_slot(s, t), "loading of %s was cancelled",
                    rfi_tensor_weight(s, t)->name);
}

/* ---- device memory ---- */

static rfi_slab *rfi_tensor_slab(rfi_store *s, const rfi_tensor *t) {
    return t->streamed ? &s->stream.ring : t->cached ? &s->cache.slab : &s->memory.slabs[t->slab];
}

/* Allocate the slab's memory, unless it has some. Unlocked meanwhile, since a driver may take milliseconds for it. */
static rf_result rfi_slab_create(rfi_store *s, rfi_slab *slab, rf_error *err) { /* locked, yields */
    rf_mem mem = {0};
    while (slab->creating) rfi_monitor_wait(&s->monitor);
    if (slab->mem.base) return RF_OK;
    slab->creating = 1;
    s->memory.n_creating++;
    rfi_monitor_unlock(&s->monitor);
    rf_result r = s->device->api->mem_create(s->device->dev, slab->size_bytes, &mem, err);
    rfi_monitor_lock(&s->monitor);
    slab->creating = 0;
    s->memory.n_creating--;
    rfi_store_changed(s);
    if (r != RF_OK) return r;
    slab->mem = mem;
    rfi_stats_count_memory(s, slab->size_bytes, 1);
    return RF_OK;
}

static void rfi_slab_release(rfi_store *s, rfi_slab *slab) { /* locked */
    if (!slab->mem.base || slab->n_bound) return;
    s->device->api->mem_release(s->device->dev, &slab->mem);
    memset(&slab->mem, 0, sizeof slab->mem);
    rfi_stats_count_memory(s, slab->size_bytes, 0);
}

/* Place the tensors of slab `from` (RF_NONE: all resident ones) anew in slabs of about `target` bytes. */
static void rfi_memory_place(rfi_store *s, uint32_t from, uint64_t target) { /* locked */
    rfi_memory *m = &s->memory;
    uint32_t at = from;
    if (from == RF_NONE) at = m->n_slabs = 0;
    else m->slabs[from].size_bytes = 0;
    for (uint32_t slot = 0; slot < s->plan.n_weights; slot++) {
        rfi_tensor *t = &s->tensors[slot];
        if (t->in_place || !rfi_is_resident(t) || (from != RF_NONE && t->slab != from)) continue;
        uint64_t size = m->n_slabs ? m->slabs[at].size_bytes : target;
        /* a slab that is cut in halves must not stay as large as it was */
        int full = from == RF_NONE ? size >= target : size && size + t->bytes > target;
        if (full && m->n_slabs < RFI_MAX_SLABS) {
            at = m->n_slabs++;
            memset(&m->slabs[at], 0, sizeof m->slabs[at]);
        }
        t->slab = at;
        t->offset = m->slabs[at].size_bytes;
        m->slabs[at].size_bytes += t->bytes;
    }
}

/* Have the memory of a tensor that is about to load. A slab that cannot be allocated is cut into smaller ones; the
 * first failure is the one reported. */
static rf_result rfi_tensor_memory(rfi_store *s, rfi_tensor *t, rf_error *err) { /* locked, yields */
    rf_error why = {0};
    if (t->in_place) return RF_OK;
    rf_result r = s->memory.scratch.size_bytes ? rfi_slab_create(s, &s->memory.scratch, err) : RF_OK;
    if (r != RF_OK) return r;
    for (;;) {
        rfi_slab *slab = rfi_tensor_slab(s, t);
        r = rfi_slab_create(s, slab, &why);
        if (slab != rfi_tensor_slab(s, t)) continue; /* another thread has cut it meanwhile */
        if (r == RF_OK) return RF_OK;
        if (!rfi_is_resident(t) || slab->mem.base || slab->size_bytes == t->bytes || s->memory.n_slabs == RFI_MAX_SLABS)
            return rfi_fail_with(err, &why);
        rfi_memory_place(s, t->slab, slab->size_bytes / 2);
    }
}

/* ---- the end of a tensor ---- */

/* Undo a load, once the copies and the last use are done. Nobody may have it pinned. */
static void rfi_tensor_drop(rfi_store *s, rfi_tensor *t) { /* locked */
    const rf_device_api *api = s->device->api;
    if (!t->bound) return;
    if (!atomic_load(&t->arrived)) api->ticket_wait(&t->written, RFI_WAIT_MS, NULL);
    api->ticket_wait(&t->last_use, RFI_WAIT_MS, NULL);
    api->weight_clear(s->table, rfi_tensor_slot(s, t));
    if (t->in_place) rfi_gguf_release_pages(s->g, &t->info);
    else rfi_tensor_slab(s, t)->n_bound--;
    t->bound = 0;
    t->n_loads++; /* a staging buffer's copy that fails from now on is of no interest */
    memset(&t->written, 0, sizeof t->written);
    memset(&t->last_use, 0, sizeof t->last_use);
}

/* Evict a tensor: 1 if it is unloaded now (or was), 0 if it is in use or loading. */
static int rfi_tensor_evict(rfi_store *s, uint32_t slot) { /* locked */
    rfi_tensor *t = &s->tensors[slot];
    if (s->cache.n_holding && s->plan.weights[slot].n_experts) return rfi_cell_is_unloaded(&t->cell);
    if (!rfi_cell_try_evict(&t->cell)) return rfi_cell_is_unloaded(&t->cell);
    rfi_tensor_drop(s, t);
    rfi_stats_count_tensor(s, t, 0);
    atomic_fetch_add(&s->stats.evictions, 1);
    rfi_cell_evicted(&t->cell, &s->cell_monitor);
    return 1;
}

/* A copy of a READY tensor failed: nobody can pin it any more, its users learn it from the failed run. */
static void rfi_tensor_break(rfi_store *s, uint32_t slot, const rf_error *why) { /* locked */
    rfi_tensor *t = &s->tensors[slot];
    if (t->loading) rfi_fail_with(&t->err, why);
    if (t->streamed) rfi_fail_with(&s->stream.err, why);
    if (!t->loading && rfi_cell_break(&t->cell)) atomic_fetch_add(&s->stats.failures, 1);
    rfi_store_changed(s);
}

/* Did the copy of a READY tensor succeed? Asked when a run that waited for it has finished. */
static rf_result rfi_tensor_arrived(rfi_store *s, uint32_t slot, rf_error *err) {
    rfi_tensor *t = &s->tensors[slot];
    if (atomic_load_explicit(&t->arrived, memory_order_acquire)) return RF_OK;
    rf_error own = {0};
    if (s->device->api->ticket_wait(&t->written, RFI_WAIT_MS, &own) == RF_OK) {
        atomic_store_explicit(&t->arrived, 1, memory_order_release);
        return RF_OK;
    }
    rfi_monitor_lock(&s->monitor);
    rfi_tensor_break(s, slot, &own);
    rfi_monitor_unlock(&s->monitor);
    return rfi_fail_sys(err, own.code, own.sys, slot, "%.*s (the copy of %s)", RF_ERROR_TEXT_BYTES - 96, own.text,
                        s->plan.weights[slot].name);
}

/* ==== 7b Loading ====================================================================================== >>loader
 * A load is a job: cut into pieces of whole rows, which readers, and threads that wait for the tensor, take until none
 * is left. A piece is read into a staging buffer, or into the tensor's pinned copy if it has one, and its copy to the
 * device is enqueued. The thread that finishes the last piece ends the job. */

static void rfi_loader_cancel(rfi_store *s);
static int rfi_stream_load_next(rfi_store *s);
static int rfi_cache_prefetch(rfi_store *s);

/* ---- progress ---- */

static void rfi_report(rfi_store *s, rfi_tensor *t) { /* locked */
    rfi_reports *q = &s->reports;
    if (!q->fn || t->reporting) return;
    t->reporting = 1;
    t->next_report = NULL;
    *q->end = t;
    q->end = &t->next_report;
}

/* Call the callback for each report. A thread that finds it running (perhaps itself) leaves them to that call. */
static void rfi_reports_deliver(rfi_store *s) { /* locked, yields */
    rfi_reports *q = &s->reports;
    if (q->running) return;
    q->running = 1;
    while (q->first) {
        rfi_tensor *t = q->first;
        q->first = t->next_report;
        if (!q->first) q->end = &q->first;
        t->reporting = 0;
        rf_progress_fn fn = q->fn;
        void *user = q->user;
        rfi_monitor_unlock(&s->monitor);
        int cancel = fn ? fn(atomic_load(&s->stats.bytes_loaded), s->total_bytes, t->info.name, user) : 0;
        rfi_monitor_lock(&s->monitor);
        if (cancel) {
            atomic_fetch_add(&s->cancels, 1);
            rfi_loader_cancel(s);
        }
    }
    q->running = 0;
    rfi_store_changed(s);
}

/* ---- pinned copies ---- */

/* Allocate another block of pinned memory, with room for n bytes: 1. A driver may take a second for it, so that one
 * thread does it unlocked; others that want a pinned copy wait for it. After a failure the next try is when as many
 * tensors as there are have been loaded. */
static int rfi_pinned_create(rfi_store *s, uint64_t n) { /* locked, yields */
    rfi_pinned_pool *p = &s->pinned;
    const uint64_t max = s->desc.pinned_bytes, left = max - p->size_bytes;
    const uint64_t block = rfi_max_u64(RFI_PINNED_BLOCK_BYTES, max / RFI_MAX_PINNED_BLOCKS * 2);
    const uint64_t size = rfi_min_u64(left, rfi_max_u64(n, block));
    void *mem = NULL;
    if (size < n || p->n_blocks == RFI_MAX_PINNED_BLOCKS || atomic_load(&s->stats.loads) < p->retry_at) return 0;
    p->creating = 1;
    rfi_monitor_unlock(&s->monitor);
    const rf_result r = s->device->api->host_create(s->device->dev, size, &mem, NULL);
    rfi_monitor_lock(&s->monitor);
    p->creating = 0;
    rfi_store_changed(s);
    if (r != RF_OK) {
        p->retry_at = atomic_load(&s->stats.loads) + s->plan.n_weights;
        return 0;
    }
    p->blocks[p->n_blocks++] = mem;
    p->size_bytes += size;
    p->free_at = (unsigned char *)mem;
    p->free_bytes = size;
    return 1;
}

/* Give a tensor that will be loaded again room for a pinned copy, for good, if there is some. */
static void rfi_tensor_pinned_copy(rfi_store *s, rfi_tensor *t) { /* locked, yields */
    rfi_pinned_pool *p = &s->pinned;
    const uint64_t n = (t->info.size_bytes + 255) & ~(uint64_t)255;
    if (t->pinned || t->in_place || rfi_is_resident(t) || s->desc.pinned_bytes == 0) return;
    while (p->creating) rfi_monitor_wait(&s->monitor);
    if (p->free_bytes < n && !rfi_pinned_create(s, n)) return;
    t->pinned = p->free_at;
    p->free_at += n;
    p->free_bytes -= n;
}

/* ---- jobs ---- */

/* Begin the load of a tensor whose cell this thread has made LOADING. A failure is found in t->err when it ends. */
static void rfi_job_begin(rfi_store *s, rfi_tensor *t, int demanded) { /* locked, yields */
    rfi_loader *l = &s->loader;
    const rf_plan_weight *w = rfi_tensor_weight(s, t);
    if (t->bound) { /* a copy failed after READY */
        rfi_tensor_drop(s, t);
        rfi_stats_count_tensor(s, t, 0);
    }
    rfi_clear(&t->err);
    t->demanded = (uint8_t)demanded;
    t->prefetch = 0;
    t->loading = 1;
    t->n_loads++;
    t->n_busy = 0;
    t->next_row = 0;
    t->epoch = l->epoch;
    atomic_store(&t->arrived, 0);
    if (l->n_jobs++ == 0) l->busy_since = rfi_now();
    l->n_stream_jobs += t->streamed;
    rfi_tensor_pinned_copy(s, t);
    if (rfi_gguf_unchanged(s->g, &t->info, &t->err) == RF_OK && rfi_tensor_memory(s, t, &t->err) == RF_OK) {
        t->bound = 1;
        if (!t->in_place) rfi_tensor_slab(s, t)->n_bound++;
    }
    if (t->in_place && w->row_reads) t->next_row = w->n_rows; /* a few rows are looked up: no read ahead */
    t->next_job = NULL;
    rfi_tensor **end = &l->jobs;
    while (*end) end = &(*end)->next_job;
    *end = t;
}

/* Take a job off the list and tell the outcome, t->err, to those who wait for it. */
static void rfi_job_end(rfi_store *s, rfi_tensor *t) { /* locked */
    rfi_loader *l = &s->loader;
    const int ok = t->err.code == RF_OK;
    rfi_tensor **at = &l->jobs;
    while (*at != t) at = &(*at)->next_job;
    *at = t->next_job;
    t->loading = 0;
    l->n_stream_jobs -= t->streamed;
    if (--l->n_jobs == 0) atomic_fetch_add(&s->stats.load_ns, (uint64_t)((rfi_now() - l->busy_since) * 1e9));
    if (!ok) {
        rfi_tensor_drop(s, t);
        atomic_fetch_add(&s->stats.failures, 1);
        if (t->streamed) rfi_fail_with(&s->stream.err, &t->err);
    } else {
        atomic_store(&t->arrived, (uint8_t)(t->written.value == 0));
        t->pinned_filled = t->pinned != NULL;
        rfi_stats_count_tensor(s, t, 1);
        if (t->expert_layer) atomic_fetch_add(&t->expert_layer->bytes, t->info.size_bytes);
        atomic_fetch_add(&s->stats.bytes_total, t->info.size_bytes);
        atomic_fetch_add(&s->stats.loads, 1);
        if (!t->demanded) rfi_report(s, t);
    }
    if (!t->demanded)
        rfi_cell_settle(&t->cell, &s->cell_monitor, (ok ? (uint64_t)RFI_READY : 0) - RFI_LOADING, &t->err);
    rfi_store_changed(s);
}

/* End a job if no thread works on it and it has no piece left, has failed or was cancelled. */
static void rfi_job_end_if_done(rfi_store *s, rfi_tensor *t) { /* locked */
    const rf_plan_weight *w = rfi_tensor_weight(s, t);
    if (t->err.code == RF_OK && t->next_row < w->n_rows && t->epoch != s->loader.epoch)
        rfi_fail_cancelled(s, t, &t->err);
    if (!t->loading || t->n_busy || (t->err.code == RF_OK && t->next_row < w->n_rows)) return;
    if (t->err.code == RF_OK && t->in_place) {
        const rf_weight_part all = {.slot = rfi_tensor_slot(s, t), .n_rows = w->n_rows, .src = t->in_place};
        rf_ticket none = {0};
        s->device->api->weight_write(s->table, s->queue, &all, &none, &t->err);
    }
    rfi_job_end(s, t);
}

/* End every load: threads at work see it at their next piece. */
static void rfi_loader_cancel(rfi_store *s) { /* locked */
    s->loader.epoch++;
    s->cache.prefetching = 0;
    for (uint32_t slot = 0; slot < s->plan.n_weights; slot++) s->tensors[slot].prefetch = 0;
    for (rfi_tensor *t = s->loader.jobs, *next; t; t = next) {
        next = t->next_job;
        rfi_job_end_if_done(s, t);
    }
    rfi_store_changed(s);
}

/* ---- staging buffers ---- */

/* Wait for the copy that reads a staging buffer, and have the buffer. */
static void rfi_staging_finish(rfi_store *s, rfi_staging *b) { /* locked, yields */
    rf_error own = {0};
    b->state = RFI_STAGING_FILLING;
    rfi_monitor_unlock(&s->monitor);
    rf_result r = s->device->api->ticket_wait(&b->ticket, RFI_WAIT_MS, &own);
    rfi_monitor_lock(&s->monitor);
    if (r != RF_OK && b->load == s->tensors[b->slot].n_loads) rfi_tensor_break(s, b->slot, &own);
}

/* Have a buffer to fill: one that is free, or whose copy is done, or a new one, or the one whose copy ends next. A
 * failed allocation is an error only if there is no buffer at all. */
static rf_result rfi_staging_take(rfi_store *s, rfi_staging **out, rf_error *err) { /* locked, yields */
    const rf_device_api *api = s->device->api;
    const uint64_t bytes = rfi_max_u64(RFI_STAGING_BYTES, s->row_bytes_max);
    rf_error why = {0};
    for (;;) {
        rfi_staging *oldest = NULL, *absent = NULL;
        uint32_t n_filling = 0;
        for (uint32_t i = 0; i < s->loader.n_staging_max; i++) {
            rfi_staging *b = &s->loader.staging[i];
            n_filling += b->state == RFI_STAGING_FILLING;
            if (b->state == RFI_STAGING_ABSENT && why.code == RF_OK) absent = b;
            if (b->state == RFI_STAGING_FREE) {
                b->state = RFI_STAGING_FILLING;
                *out = b;
                return RF_OK;
            }
            if (b->state == RFI_STAGING_IN_FLIGHT && (!oldest || b->ticket.value < oldest->ticket.value)) oldest = b;
        }
        if (oldest && (!absent || api->ticket_done(&oldest->ticket))) {
            rfi_staging_finish(s, oldest);
            *out = oldest;
            return RF_OK;
        }
        if (absent) {
            absent->state = RFI_STAGING_FILLING;
            rfi_monitor_unlock(&s->monitor);
            rf_result r = api->host_create(s->device->dev, bytes, &absent->mem, &why);
            rfi_monitor_lock(&s->monitor);
            *out = absent;
            if (r == RF_OK) return RF_OK;
            absent->state = RFI_STAGING_ABSENT;
        } else if (n_filling == 0) {
            return rfi_fail_with(err, &why);
        } else {
            rfi_monitor_wait(&s->monitor);
        }
    }
}

/* Release the staging buffers that nobody fills: 1 if there were any. */
static int rfi_staging_release(rfi_store *s) { /* locked, yields */
    int some = 0;
    for (uint32_t i = 0; i < s->loader.n_staging_max; i++) {
        rfi_staging *b = &s->loader.staging[i];
        if (b->state == RFI_STAGING_IN_FLIGHT) rfi_staging_finish(s, b);
        else if (b->state != RFI_STAGING_FREE) continue;
        s->device->api->host_release(s->device->dev, b->mem);
        memset(b, 0, sizeof *b);
        rfi_store_changed(s); /* who waits for a buffer may allocate it anew */
        some = 1;
    }
    return some;
}

/* ---- pieces ---- */

/* Take the next piece of a job (`only`, or NULL: any). */
static int rfi_piece_take(rfi_store *s, const rfi_tensor *only, rfi_piece *out) { /* locked */
    for (rfi_tensor *t = s->loader.jobs, *next; t; t = next) {
        const rf_plan_weight *w = rfi_tensor_weight(s, t);
        next = t->next_job;
        if (only && t != only) continue;
        rfi_job_end_if_done(s, t);
        if (!t->loading || t->err.code != RF_OK || t->next_row >= w->n_rows) continue;
        uint64_t bytes = t->pinned_filled ? RFI_PINNED_PIECE_BYTES : RFI_STAGING_BYTES;
        uint64_t n = rfi_max_u64(1, bytes / (w->size_bytes / w->n_rows));
        *out = (rfi_piece){.t = t, .row0 = t->next_row, .n_rows = (uint32_t)rfi_min_u64(n, w->n_rows - t->next_row)};
        t->next_row += out->n_rows;
        t->n_busy++;
        return 1;
    }
    return 0;
}

static rf_result rfi_piece_copy(rfi_store *s, const rfi_piece *p, rf_ticket *ticket,
                                rf_error *err) { /* locked, yields */
    rfi_tensor *t = p->t;
    const rf_plan_weight *w = rfi_tensor_weight(s, t);
    const uint64_t row_bytes = w->size_bytes / w->n_rows, at = p->row0 * row_bytes, n = p->n_rows * row_bytes;
    rf_weight_part part = {.slot = rfi_tensor_slot(s, t), .row0 = p->row0, .n_rows = p->n_rows, .offset = t->offset,
                           .mem = &rfi_tensor_slab(s, t)->mem,
                           .scratch = s->memory.scratch.mem.base ? &s->memory.scratch.mem : NULL};
    rfi_staging *b = NULL;
    rf_result r = t->pinned ? RF_OK : rfi_staging_take(s, &b, err);
    if (r != RF_OK) return r;
    rfi_monitor_unlock(&s->monitor);
    void *src = b ? b->mem : (void *)((unsigned char *)t->pinned + at);
    part.src = src;
    if (!t->pinned_filled) {
        r = rf_gguf_read_tensor(s->g, w->tensor, w->expert * w->size_bytes + at, src, (size_t)n, err);
        if (r == RF_OK) atomic_fetch_add(&s->stats.bytes_read, n);
    }
    if (r == RF_OK) r = s->device->api->weight_write(s->table, s->queue, &part, ticket, err);
    rfi_monitor_lock(&s->monitor);
    if (ticket->value > s->loader.newest_copy.value) s->loader.newest_copy = *ticket;
    if (b) {
        b->slot = part.slot;
        b->load = t->n_loads;
        b->ticket = *ticket;
        b->state = ticket->value ? RFI_STAGING_IN_FLIGHT : RFI_STAGING_FREE;
    }
    return r;
}

static void rfi_piece_load(rfi_store *s, rfi_piece *p) { /* locked, yields */
    rfi_tensor *t = p->t;
    const rf_plan_weight *w = rfi_tensor_weight(s, t);
    rf_error err = {0};
    rf_ticket ticket = {0};
    rf_result r;
    p->thread = pthread_self();
    p->next = s->loader.pieces;
    s->loader.pieces = p;
    if (t->in_place) {
        uint64_t row_bytes = w->size_bytes / w->n_rows;
        rfi_monitor_unlock(&s->monitor);
        r = rfi_gguf_populate(s->g, &t->info, p->row0 * row_bytes, p->n_rows * row_bytes, &err);
        rfi_monitor_lock(&s->monitor);
    } else {
        r = rfi_piece_copy(s, p, &ticket, &err);
    }
    rfi_piece **at = &s->loader.pieces;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    if (r != RF_OK) rfi_fail_with(&t->err, &err);
    if (ticket.value > t->written.value) t->written = ticket;
    t->n_busy--;
    rfi_job_end_if_done(s, t);
    rfi_store_changed(s);
}

static void rfi_piece_run(rfi_store *s, rfi_piece *p) { /* locked, yields */
    rfi_piece_load(s, p);
    rfi_reports_deliver(s);
}

/* ---- readers ---- */

/* Begin the load of the next tensor to prefetch: 1. */
static int rfi_loader_prefetch(rfi_store *s) { /* locked, yields */
    rfi_tensor *t = NULL;
    while (!t && s->loader.prefetch_at < s->plan.n_weights) {
        t = &s->tensors[s->order[s->loader.prefetch_at++]];
        if (!t->prefetch || !rfi_is_resident(t) || !rfi_cell_try_claim(&t->cell, &s->cell_monitor)) t = NULL;
    }
    if (!t) return 0;
    rfi_job_begin(s, t, 0);
    uint32_t next = t->slab + 1; /* while others read, allocate the next slab, which takes a driver a while */
    if (!t->in_place && next < s->memory.n_slabs && !s->memory.slabs[next].creating)
        rfi_slab_create(s, &s->memory.slabs[next], NULL);
    return 1;
}

/* Find a piece of work. A thread that is no reader leaves prefetches alone: it may go away in the middle of one. */
static int rfi_loader_next(rfi_store *s, int is_reader, rfi_piece *out) { /* locked, yields */
    for (;;) {
        if (rfi_piece_take(s, NULL, out)) return 1;
        if (is_reader && rfi_loader_prefetch(s)) continue;
        if (!rfi_stream_load_next(s) && !(is_reader && rfi_cache_prefetch(s))) return 0;
    }
}

static void *rfi_reader_run(void *arg) {
    rfi_reader *reader = (rfi_reader *)arg;
    rfi_store *s = reader->store;
    rfi_loader *l = &s->loader;
    rfi_piece piece;
    rfi_monitor_lock(&s->monitor);
    while (!l->quit) {
        uint64_t seen = s->n_changes;
        if (rfi_loader_next(s, 1, &piece)) rfi_piece_run(s, &piece);
        else if (l->n_jobs || rfi_store_streams(s) || s->cache.n_frames) rfi_store_wait_change(s, seen);
        else if (l->n_running > 1 || !rfi_staging_release(s)) break; /* the last one looks once more for work */
    }
    l->n_running--;
    reader->ended = 1;
    rfi_store_changed(s);
    rfi_monitor_unlock(&s->monitor);
    return NULL;
}

/* Have all readers running. A machine that refuses threads is not an error: who waits for a tensor reads it. */
static void rfi_loader_start(rfi_store *s) { /* locked */
    rfi_loader *l = &s->loader;
    for (uint32_t i = 0; i < l->n_readers_max && !l->quit; i++) {
        rfi_reader *reader = &l->readers[i];
        if (reader->started && !reader->ended) continue;
        if (reader->started) pthread_join(reader->thread, NULL); /* it has ended but for its return */
        *reader = (rfi_reader){.store = s};
        if (pthread_create(&reader->thread, NULL, rfi_reader_run, reader) != 0) break;
        reader->started = 1;
        l->n_running++;
    }
    rfi_store_changed(s);
}

/* Resident, and of one of some layers (NULL: of any). */
static int rfi_store_selects(const rfi_store *s, uint32_t slot, const uint32_t *layers, uint32_t n_layers) {
    int selected = layers == NULL;
    for (uint32_t i = 0; i < n_layers && !selected; i++)
        selected = s->plan.weights[slot].layer == (int32_t)layers[i];
    return selected && rfi_is_resident(&s->tensors[slot]);
}

/* Have the readers load the resident tensors of some layers (NULL: of all), in the order of the load policy, unless
 * there was a cancel since `cancels` was read. Also starts them for the stream and the expert cache. */
static void rfi_store_prefetch(rfi_store *s, const uint32_t *layers, uint32_t n_layers, uint64_t cancels) {
    rfi_monitor_lock(&s->monitor);
    const int go = atomic_load(&s->cancels) == cancels;
    int some = go && (rfi_store_streams(s) || s->cache.n_frames);
    for (uint32_t slot = 0; go && slot < s->plan.n_weights; slot++) {
        rfi_tensor *t = &s->tensors[slot];
        if (!rfi_store_selects(s, slot, layers, n_layers) || t->prefetch || rfi_cell_is_ready(&t->cell)) continue;
        t->prefetch = 1;
        some = 1;
    }
    s->loader.prefetch_at = 0;
    s->cache.prefetching |= go;
    if (some) rfi_loader_start(s);
    rfi_monitor_unlock(&s->monitor);
}

/* ---- pins ---- */

typedef struct rfi_load {
    rfi_store *store;
    rfi_tensor *t;
    uint64_t cancels; /* when its call began */
} rfi_load;

/* The load function of the cells: the calling thread works on its tensor until the load has ended. */
static rf_result rfi_tensor_load(void *ctx, rf_error *err) {
    const rfi_load *load = (const rfi_load *)ctx;
    rfi_tensor *t = load->t;
    rfi_store *s = load->store;
    rfi_piece piece;
    rfi_monitor_lock(&s->monitor);
    if (atomic_load(&s->cancels) != load->cancels) {
        rfi_monitor_unlock(&s->monitor);
        return rfi_fail_cancelled(s, t, err);
    }
    rfi_job_begin(s, t, 1);
    while (t->loading) {
        if (rfi_piece_take(s, t, &piece)) rfi_piece_run(s, &piece);
        else if (t->loading) rfi_monitor_wait(&s->monitor);
    }
    rf_result r = rfi_fail_with(err, &t->err);
    rfi_monitor_unlock(&s->monitor);
    return r;
}

/* Before this thread sleeps until a load has ended that readers began: work on it, there may be no reader left. A read
 * hook that waits for the tensor it is reading for would never return. */
static rf_result rfi_tensor_help(rfi_store *s, rfi_tensor *t, rf_error *err) {
    rfi_piece piece;
    rf_result r = RF_OK;
    rfi_monitor_lock(&s->monitor);
    for (const rfi_piece *p = s->loader.pieces; p && r == RF_OK; p = p->next)
        if (p->t == t && pthread_equal(p->thread, pthread_self()))
            r = rfi_fail(err, RF_ERR_BUSY, rfi_tensor_slot(s, t), "%s: this thread is loading it already",
                         rfi_tensor_weight(s, t)->name);
    while (r == RF_OK && t->loading && !t->demanded && rfi_piece_take(s, t, &piece)) rfi_piece_run(s, &piece);
    rfi_monitor_unlock(&s->monitor);
    return r;
}

static void rfi_store_unpin(rfi_store *s, uint32_t slot) { rfi_cell_unpin(&s->tensors[slot].cell, &s->cell_monitor); }

/* Pin a resident tensor, loading it if needed. A cancel since `cancels` was read ends the call. */
static rf_result rfi_store_pin(rfi_store *s, uint32_t slot, uint64_t cancels, rf_error *err) {
    rfi_tensor *t = &s->tensors[slot];
    if (rfi_cell_try_pin(&t->cell, &s->cell_monitor)) {
        atomic_fetch_add_explicit(&s->stats.hits, 1, memory_order_relaxed);
        return RF_OK;
    }
    rfi_load load = {s, t, cancels};
    int loaded = 0;
    double start = rfi_now();
    rf_result r;
    do { /* again if the cancel that ended the load is older than this call */
        rfi_clear(err);
        r = atomic_load(&s->cancels) == cancels ? rfi_tensor_help(s, t, err) : rfi_fail_cancelled(s, t, err);
        if (r == RF_OK) r = rfi_cell_acquire(&t->cell, &s->cell_monitor, rfi_tensor_load, &load, &loaded, err);
    } while (r == RF_ERR_CANCELLED && atomic_load(&s->cancels) == cancels);
    atomic_fetch_add(&s->stats.misses, 1);
    atomic_fetch_add(&s->stats.wait_ns, (uint64_t)((rfi_now() - start) * 1e9));
    if (loaded) { /* not before its cell was settled: the callback may use the tensor */
        rfi_monitor_lock(&s->monitor);
        rfi_report(s, t);
        rfi_reports_deliver(s);
        rfi_monitor_unlock(&s->monitor);
    }
    if (r == RF_OK && atomic_load(&s->cancels) != cancels) {
        rfi_store_unpin(s, slot);
        r = rfi_fail(err, RF_ERR_CANCELLED, slot, "loading was cancelled after %s", s->plan.weights[slot].name);
    }
    return r;
}

/* Load a resident tensor and wait until its copy has succeeded. */
static rf_result rfi_store_load(rfi_store *s, uint32_t slot, uint64_t cancels, rf_error *err) {
    rf_result r = rfi_store_pin(s, slot, cancels, err);
    if (r != RF_OK) return r;
    r = rfi_tensor_arrived(s, slot, err);
    rfi_store_unpin(s, slot);
    return r;
}

/* ==== 7c Streaming ==================================================================================== >>stream
 * Weights that do not fit the budget live in a ring buffer of device memory. Readers load them in the order in which
 * the plan uses them, as far ahead as the ring has room; when the device is past the last use of the oldest, its place
 * is free again. Every forward pass of an eval goes through all uses once. An error stops the stream until a reset. */

/* A place for n bytes after the newest of the ring's tensors, which lie there in the order of their loads. */
static int rfi_stream_place(const rfi_store *s, uint64_t n, uint64_t *offset) { /* locked */
    const rfi_stream *q = &s->stream;
    if (q->n_loaded == q->n_freed) {
        *offset = 0;
        return n <= q->ring.size_bytes;
    }
    const rfi_tensor *newest = &s->tensors[q->uses[(q->n_loaded - 1) % q->n_uses]];
    const rfi_tensor *oldest = &s->tensors[q->uses[q->n_freed % q->n_uses]];
    const uint64_t head = newest->offset + newest->bytes, tail = oldest->offset;
    const uint64_t end = head > tail ? q->ring.size_bytes : tail;
    *offset = head;
    if (n <= end - head) return 1;
    *offset = 0;
    return head > tail && n <= tail;
}

/* Take the oldest tensor out of the ring, if its use has begun; waits for the use to end. 0: it is still to be used. */
static int rfi_stream_free_oldest(rfi_store *s) { /* locked, yields */
    rfi_stream *q = &s->stream;
    if (q->n_freed == q->n_used || q->freeing) return 0;
    rfi_tensor *t = &s->tensors[q->uses[q->n_freed % q->n_uses]];
    rf_error err = {0};
    q->freeing = 1;
    rfi_monitor_unlock(&s->monitor);
    const rf_device_api *api = s->device->api;
    rf_result r = api->ticket_wait(&t->last_use, RFI_WAIT_MS, &err);
    if (r == RF_OK) r = api->ticket_wait(&t->written, RFI_WAIT_MS, &err);
    rfi_monitor_lock(&s->monitor);
    q->freeing = 0;
    rfi_fail_with(&q->err, &err);
    int freed = rfi_tensor_evict(s, rfi_tensor_slot(s, t));
    q->n_freed += (uint64_t)freed;
    if (freed) rfi_store_changed(s);
    else rfi_monitor_wake(&s->monitor); /* no change worth another try: rfi_stream_release will be one */
    return freed;
}

/* Begin the load of the next use, if there is room for it: 1. */
static int rfi_stream_load_next(rfi_store *s) { /* locked, yields */
    rfi_stream *q = &s->stream;
    while (q->n_uses && !q->paused && q->err.code == RF_OK) {
        rfi_tensor *t = &s->tensors[q->uses[q->n_loaded % q->n_uses]];
        uint64_t offset;
        if (q->n_loaded - q->n_freed < q->n_uses && rfi_stream_place(s, t->bytes, &offset) &&
            rfi_cell_try_claim(&t->cell, &s->cell_monitor)) {
            t->offset = offset;
            q->n_loaded++;
            rfi_job_begin(s, t, 0);
            return 1;
        }
        if (!rfi_stream_free_oldest(s)) break;
    }
    return 0;
}

/* Pin the tensor of the stream's next use after n_held that are pinned already; until it is there this thread loads
 * it and what comes after it. What the ring still holds of the last pass does not count: it may be freed at any time.
 * Requires stream_lock. */
static rf_result rfi_stream_pin(rfi_store *s, uint32_t slot, uint32_t n_held, uint64_t cancels, rf_error *err) {
    rfi_stream *q = &s->stream;
    rfi_tensor *t = &s->tensors[slot];
    rfi_piece piece;
    rf_result r = RF_OK;
    double start = rfi_now();
    int waited = 0;
    rfi_monitor_lock(&s->monitor);
    while (r == RF_OK && !(q->n_loaded > q->n_used + n_held && rfi_cell_try_pin(&t->cell, &s->cell_monitor))) {
        waited = 1;
        if (atomic_load(&s->cancels) != cancels) {
            r = rfi_fail_cancelled(s, t, err);
            break;
        }
        uint64_t seen = s->n_changes;
        int working = rfi_loader_next(s, 0, &piece);
        if (working) rfi_piece_run(s, &piece);
        r = rfi_fail_with(err, &q->err);
        if (r == RF_OK && !working && !(q->n_loaded > q->n_used + n_held && rfi_cell_is_ready(&t->cell)))
            rfi_store_wait_change(s, seen);
    }
    rfi_monitor_unlock(&s->monitor);
    atomic_fetch_add_explicit(waited ? &s->stats.misses : &s->stats.hits, 1, memory_order_relaxed);
    if (waited) atomic_fetch_add(&s->stats.wait_ns, (uint64_t)((rfi_now() - start) * 1e9));
    return r;
}

/* Unpin n streamed tensors. last_use: ticket of their run, after which the ring may reuse their place; or NULL. */
static void rfi_stream_release(rfi_store *s, const uint32_t *slots, uint32_t n, const rf_ticket *last_use) {
    if (n == 0) return;
    rfi_monitor_lock(&s->monitor);
    for (uint32_t i = 0; i < n; i++) {
        if (last_use) s->tensors[slots[i]].last_use = *last_use;
        rfi_store_unpin(s, slots[i]);
    }
    if (last_use) s->stream.n_used += n;
    rfi_store_changed(s);
    rfi_monitor_unlock(&s->monitor);
}

/* Empty the ring: the next use is the first of the plan. Requires stream_lock, and no pins on streamed tensors. */
static void rfi_stream_reset(rfi_store *s) { /* locked, yields */
    rfi_stream *q = &s->stream;
    q->paused = 1;
    while (s->loader.n_stream_jobs || q->freeing) {
        rfi_piece piece; /* no reports: who clears holds device.monitor, which a callback may want */
        if (rfi_piece_take(s, NULL, &piece)) rfi_piece_load(s, &piece);
        else if (s->loader.n_stream_jobs || q->freeing) rfi_monitor_wait(&s->monitor);
    }
    for (uint64_t use = q->n_freed; use < q->n_loaded; use++) rfi_tensor_evict(s, q->uses[use % q->n_uses]);
    q->n_loaded = q->n_used = q->n_freed = 0;
    rfi_clear(&q->err);
    q->paused = 0;
    rfi_store_changed(s);
}

/* A forward pass begins: if the last one was not finished, start over. Requires stream_lock. */
static void rfi_stream_begin_pass(rfi_store *s) {
    if (!rfi_store_streams(s)) return;
    rfi_monitor_lock(&s->monitor);
    if (s->stream.n_used % s->stream.n_uses || s->stream.err.code != RF_OK) rfi_stream_reset(s);
    rfi_monitor_unlock(&s->monitor);
}

/* As rfi_tensor_arrived, for all that the ring held during an eval that has finished, with `r`. The eval's queue may
 * be gone hereafter. */
static rf_result rfi_stream_arrived(rfi_store *s, rf_result r, rf_error *err) {
    rfi_stream *q = &s->stream;
    if (!rfi_store_streams(s)) return r;
    rfi_monitor_lock(&s->monitor);
    while (q->freeing) rfi_monitor_wait(&s->monitor);
    for (uint64_t use = q->n_freed; use < q->n_used; use++) {
        rfi_tensor *t = &s->tensors[q->uses[use % q->n_uses]];
        memset(&t->last_use, 0, sizeof t->last_use);
        if (q->err.code == RF_OK) s->device->api->ticket_wait(&t->written, RFI_WAIT_MS, &q->err);
    }
    if (r == RF_OK) r = rfi_fail_with(err, &q->err);
    rfi_monitor_unlock(&s->monitor);
    return r;
}

/* ==== 7d Expert cache ================================================================================ >>experts
 * Where the budget leaves room for a part of the experts, that room is cut into frames, each as large as the largest
 * expert with all its matrices. Before the experts of a layer run, the host learns which ones the rows chose and
 * acquires their frames, all at once: an eval that waits for frames holds none, so that no two wait for each other. It
 * releases them when its queue is past the layer. Of the frames without users the one of lowest rank is the victim.
 * Nothing in here changes what is computed. */

/* A choice counts half as much after so many rows. Simulated with 48 layers of 128 experts and room for a quarter of
 * them, where the tenth that gets 60 % of the choices changes every 512 rows: 16 gives 73.0 % hits, 32 73.7, 64 72.5,
 * 128 70.1, 512 63.6; LRU 63.9. Where it never changes, longer half-lives gain a little. */
#define RFI_EXPERT_HALF_LIFE 48.0

static uint32_t rfi_expert_slot(const rfi_expert_layer *layer, uint32_t weight, uint32_t expert) {
    return layer->weight[weight] + expert;
}

static int rfi_expert_is_ready(const rfi_store *s, const rfi_expert_layer *layer, uint32_t expert) {
    int ready = 1;
    for (uint32_t k = 0; ready && k < layer->n_weights; k++)
        ready = rfi_cell_is_ready(&s->tensors[rfi_expert_slot(layer, k, expert)].cell);
    return ready;
}

/* Empty all frames. What was chosen how often is still known. */
static void rfi_cache_reset(rfi_cache *c, uint32_t n_frames) { /* locked */
    c->n_frames = c->n_free = c->n_empty = n_frames;
    for (uint32_t f = 0; f < n_frames; f++) c->frames[f] = (rfi_frame){.rank = -1, .expert_layer = RF_NONE};
    for (uint32_t e = 0; e < c->n_experts; e++) c->frame_of[e] = RF_NONE;
}

static const rfi_expert_layer *rfi_frame_layer(const rfi_cache *c, const rfi_frame *frame) {
    return frame->expert_layer == RF_NONE ? NULL : &c->layers[frame->expert_layer];
}

static void rfi_cache_drop_evicted(rfi_store *s) { /* locked */
    rfi_cache *c = &s->cache;
    for (uint32_t f = 0; f < c->n_frames; f++) {
        rfi_frame *frame = &c->frames[f];
        const rfi_expert_layer *layer = rfi_frame_layer(c, frame);
        int keep = !layer || frame->n_users;
        for (uint32_t k = 0; !keep && k < layer->n_weights; k++)
            keep = !rfi_cell_is_unloaded(&s->tensors[rfi_expert_slot(layer, k, frame->expert)].cell);
        if (keep) continue;
        c->frame_of[layer->first + frame->expert] = RF_NONE;
        *frame = (rfi_frame){.rank = -1, .expert_layer = RF_NONE};
        c->n_empty++;
    }
}

/* Count the choices of a step, which begins with the first layer. Scores do not decay: later choices are worth more. */
static void rfi_cache_count(rfi_cache *c, const rfi_expert_layer *layer, const uint32_t *rows_of, uint32_t n_rows) {
    if (layer == c->layers) {
        c->clock++;
        c->unit *= exp2(fmin(n_rows / RFI_EXPERT_HALF_LIFE, 300)); /* stays finite */
    }
    for (uint32_t e = 0; e < layer->n_experts; e++) c->score[layer->first + e] += c->unit * rows_of[e];
    if (c->unit < 1e200) return;
    for (uint32_t e = 0; e < c->n_experts; e++) c->score[e] /= c->unit;
    for (uint32_t f = 0; f < c->n_frames; f++)
        if (c->frames[f].rank > 0) c->frames[f].rank /= c->unit;
    c->unit = 1;
}

/* The rank of a frame whose expert was chosen now. */
static double rfi_cache_rank(const rfi_store *s, uint32_t f) {
    const rfi_cache *c = &s->cache;
    const rfi_frame *frame = &c->frames[f];
    if (s->desc.expert_policy == RF_EXPERTS_LFRU) return c->score[rfi_frame_layer(c, frame)->first + frame->expert];
    if (s->desc.expert_policy == RF_EXPERTS_STATIC && f < c->n_frames - c->n_frames_min) return INFINITY;
    return c->clock;
}

static int rfi_frame_is_loading(const rfi_store *s, const rfi_frame *frame) {
    const rfi_expert_layer *layer = rfi_frame_layer(&s->cache, frame);
    int loading = 0;
    for (uint32_t k = 0; layer && k < layer->n_weights; k++)
        loading |= s->tensors[rfi_expert_slot(layer, k, frame->expert)].loading;
    return loading;
}

/* The frame to give to another expert; RF_NONE: all that have no users are loading. */
static uint32_t rfi_cache_victim(const rfi_store *s) { /* locked */
    const rfi_cache *c = &s->cache;
    uint32_t best = RF_NONE;
    for (uint32_t f = 0; f < c->n_frames; f++)
        if (c->frames[f].n_users == 0 && (best == RF_NONE || c->frames[f].rank < c->frames[best].rank) &&
            !rfi_frame_is_loading(s, &c->frames[f]))
            best = f;
    return best;
}

/* Give frame f to an expert that has none. 0: what is in it is in use. */
static int rfi_cache_assign(rfi_store *s, uint32_t f, const rfi_expert_layer *layer, uint32_t expert) { /* locked */
    rfi_cache *c = &s->cache;
    rfi_frame *frame = &c->frames[f];
    const rfi_expert_layer *old = rfi_frame_layer(c, frame);
    int evicted = 1;
    for (uint32_t k = 0; old && k < old->n_weights; k++)
        evicted &= rfi_tensor_evict(s, rfi_expert_slot(old, k, frame->expert));
    if (!evicted) return 0;
    if (old) c->frame_of[old->first + frame->expert] = RF_NONE;
    else c->n_empty--;
    *frame = (rfi_frame){.rank = 0, .expert_layer = (uint32_t)(layer - c->layers), .expert = expert};
    c->frame_of[layer->first + expert] = f;
    uint64_t at = f * c->frame_bytes;
    for (uint32_t k = 0; k < layer->n_weights; k++) {
        rfi_tensor *t = &s->tensors[rfi_expert_slot(layer, k, expert)];
        t->offset = at;
        at += t->bytes;
    }
    return 1;
}

/* How many free frames a choice takes: one for each chosen expert that has none, or whose frame has no users. */
static uint32_t rfi_cache_need(const rfi_cache *c, const rfi_expert_layer *layer, const uint32_t *rows_of) {
    uint32_t n = 0;
    for (uint32_t e = 0; e < layer->n_experts; e++) {
        const uint32_t f = c->frame_of[layer->first + e];
        n += rows_of[e] && (f == RF_NONE || c->frames[f].n_users == 0);
    }
    return n;
}

/* Wait until there are enough free frames for a choice, and reserve them. Later evals wait until the first one that
 * waits has its frames, so that it cannot starve. */
static rf_result rfi_cache_reserve(rfi_store *s, const rfi_expert_layer *layer, const uint32_t *rows_of,
                                   uint64_t cancels, rf_error *err) { /* locked, yields */
    rfi_cache *c = &s->cache;
    int first = 0;
    rf_result r = RF_OK;
    for (;;) {
        if (atomic_load(&s->cancels) != cancels) {
            r = rfi_fail_cancelled(s, &s->tensors[layer->weight[0]], err);
            break;
        }
        if (first || !c->eval_waits) {
            const uint32_t need = rfi_cache_need(c, layer, rows_of);
            if (need <= c->n_free) {
                c->n_free -= need;
                break;
            }
            c->eval_waits = first = 1;
        }
        rfi_monitor_wait(&s->monitor);
    }
    if (first) {
        c->eval_waits = 0;
        rfi_store_changed(s);
    }
    return r;
}

/* An expert's frame for this eval, which has reserved one for it. */
static uint32_t rfi_cache_frame(rfi_store *s, const rfi_expert_layer *layer, uint32_t expert) { /* locked, yields */
    rfi_cache *c = &s->cache;
    uint32_t f;
    while ((f = c->frame_of[layer->first + expert]) == RF_NONE) {
        const uint64_t seen = s->n_changes;
        const uint32_t victim = rfi_cache_victim(s);
        rfi_piece piece;
        if (victim != RF_NONE && rfi_cache_assign(s, victim, layer, expert)) continue;
        if (rfi_piece_take(s, NULL, &piece)) rfi_piece_run(s, &piece);
        else rfi_store_wait_change(s, seen);
    }
    if (c->frames[f].n_users++) c->n_free++; /* another eval has brought it meanwhile */
    return f;
}

/* Have the matrices of an expert loaded into its frame: 1 if they are there already. */
static int rfi_cache_load(rfi_store *s, const rfi_expert_layer *layer, uint32_t expert) { /* locked, yields */
    int ready = 1;
    const uint64_t epoch = s->loader.epoch;
    for (uint32_t k = 0; k < layer->n_weights; k++) {
        rfi_tensor *t = &s->tensors[rfi_expert_slot(layer, k, expert)];
        ready &= rfi_cell_is_ready(&t->cell);
        if (s->loader.epoch != epoch) continue; /* cancelled meanwhile: no more of them */
        if (rfi_cell_try_claim(&t->cell, &s->cell_monitor)) rfi_job_begin(s, t, 0);
    }
    return ready;
}

/* Acquire the frames of a layer's experts, of which expert e was chosen by rows_of[e] of n_rows rows, and begin to load
 * what is not in them.
 *   frames  out  [n_experts], to be released; RF_NONE of those not chosen */
static rf_result rfi_cache_acquire(rfi_store *s, rfi_expert_layer *layer, const uint32_t *rows_of, uint32_t n_rows,
                                   uint64_t cancels, uint32_t *frames, rf_error *err) {
    rfi_cache *c = &s->cache;
    for (uint32_t e = 0; e < layer->n_experts; e++) frames[e] = RF_NONE;
    rfi_monitor_lock(&s->monitor);
    rfi_cache_count(c, layer, rows_of, n_rows);
    rf_result r = rfi_cache_reserve(s, layer, rows_of, cancels, err);
    if (r == RF_OK) c->prefetching = 1;
    for (uint32_t e = 0; r == RF_OK && e < layer->n_experts; e++) /* first, so that none of these is a victim */
        if (rows_of[e] && (frames[e] = c->frame_of[layer->first + e]) != RF_NONE) c->frames[frames[e]].n_users++;
    for (uint32_t e = 0; r == RF_OK && e < layer->n_experts; e++) {
        if (rows_of[e] == 0) continue;
        if (frames[e] == RF_NONE) frames[e] = rfi_cache_frame(s, layer, e);
        c->frames[frames[e]].rank = rfi_cache_rank(s, frames[e]);
        if (atomic_load(&s->cancels) != cancels) continue; /* nobody will wait for it */
        atomic_fetch_add(rfi_cache_load(s, layer, e) ? &layer->hits : &layer->misses, 1);
    }
    if (s->loader.n_jobs) rfi_store_changed(s);
    rfi_monitor_unlock(&s->monitor);
    return r;
}

/* No run uses these frames any more. */
static void rfi_cache_release(rfi_store *s, const rfi_expert_layer *layer, const uint32_t *frames) {
    rfi_cache *c = &s->cache;
    rfi_monitor_lock(&s->monitor);
    for (uint32_t e = 0; e < layer->n_experts; e++)
        if (frames[e] != RF_NONE && --c->frames[frames[e]].n_users == 0) c->n_free++;
    if (c->eval_waits) rfi_store_changed(s);
    rfi_monitor_unlock(&s->monitor);
}

/* A reader with nothing to load and no copy in flight begins to fill an empty frame with the expert of highest score
 * that has none: 1. To go on and replace experts of lower score gains three in ten thousand hits in the simulation
 * above, for three experts a token on the bus. */
static int rfi_cache_prefetch(rfi_store *s) { /* locked, yields */
    rfi_cache *c = &s->cache;
    const rf_device_api *api = s->device->api;
    if (!s->desc.expert_prefetch || !c->prefetching || c->n_frames == 0 || c->n_empty == 0 || c->n_free == 0 ||
        s->loader.n_jobs || s->stream.paused || s->loader.quit || c->reader_waits || !rfi_store_residents_loaded(s))
        return 0;
    rf_ticket newest = s->loader.newest_copy;
    if (!api->ticket_done(&newest)) { /* one reader waits for it, and looks again for what has come meanwhile */
        c->reader_waits = 1;
        rfi_monitor_unlock(&s->monitor);
        api->ticket_wait(&newest, RFI_WAIT_MS, NULL);
        rfi_monitor_lock(&s->monitor);
        c->reader_waits = 0;
        rfi_store_changed(s);
        return 1;
    }
    rfi_expert_layer *layer = NULL;
    uint32_t expert = 0;
    for (rfi_expert_layer *l = c->layers; l < c->layers + c->n_layers; l++)
        for (uint32_t e = 0; e < l->n_experts; e++)
            if (c->frame_of[l->first + e] == RF_NONE &&
                (!layer || c->score[l->first + e] > c->score[layer->first + expert]))
                layer = l, expert = e;
    const uint32_t f = rfi_cache_victim(s);
    if (!layer || f == RF_NONE || c->frames[f].expert_layer != RF_NONE) return 0;
    if (!rfi_cache_assign(s, f, layer, expert)) return 0;
    c->frames[f].rank = rfi_cache_rank(s, f);
    atomic_fetch_add(&layer->prefetched, 1);
    rfi_cache_load(s, layer, expert);
    return 1;
}

/* Take those experts out of a layer's choice that the CPU is to compute: not loaded, chosen fewer than expert_cpu_below
 * times of late (scores decay), no more than max_pairs choices in all, and never all experts of the choice.
 *   rows_of   in, out  [n_experts]
 *   fallback  out      [n_experts] 1: taken out.   Returns how many choices these are. */
static uint32_t rfi_cache_pick_fallback(rfi_store *s, rfi_expert_layer *layer, uint32_t *rows_of, uint32_t max_pairs,
                                        uint8_t *fallback) {
    rfi_cache *c = &s->cache;
    uint32_t n = 0, n_left = 0;
    rfi_monitor_lock(&s->monitor);
    for (uint32_t e = 0; e < layer->n_experts; e++) n_left += rows_of[e] > 0;
    for (uint32_t e = 0; e < layer->n_experts; e++) {
        double *score = &c->score[layer->first + e];
        const int ready = c->frame_of[layer->first + e] != RF_NONE && rfi_expert_is_ready(s, layer, e);
        fallback[e] = rows_of[e] && !ready && n_left > 1 && rows_of[e] <= max_pairs - n &&
                      *score / c->unit + rows_of[e] < s->desc.expert_cpu_below;
        if (!fallback[e]) continue;
        *score += c->unit * rows_of[e];
        n += rows_of[e];
        n_left--;
        rows_of[e] = 0;
        atomic_fetch_add(&layer->on_cpu, 1);
    }
    rfi_monitor_unlock(&s->monitor);
    return n;
}

/* Hold all experts at once, if all are loaded and their copies done: 1, and until rfi_store_release_experts none is
 * evicted. Thousands of pins for each token would take longer than some kernels. */
static int rfi_store_hold_experts(rfi_store *s) {
    rfi_monitor_lock(&s->monitor);
    const uint64_t stamp = rfi_store_stamp(s);
    int all = !rfi_store_streams(s) && rfi_store_all_loaded(s);
    for (uint32_t slot = 0; all && s->cache.held_stamp != stamp && slot < s->plan.n_weights; slot++)
        all = !s->plan.weights[slot].n_experts ||
              (rfi_cell_is_ready(&s->tensors[slot].cell) && atomic_load(&s->tensors[slot].arrived));
    if (all) s->cache.held_stamp = stamp;
    s->cache.n_holding += (uint32_t)all;
    rfi_monitor_unlock(&s->monitor);
    return all;
}

static void rfi_store_release_experts(rfi_store *s) {
    rfi_monitor_lock(&s->monitor);
    s->cache.n_holding--;
    rfi_monitor_unlock(&s->monitor);
}

static void rfi_cache_get_stats(const rfi_store *s, uint32_t layer, rf_expert_stats *out) {
    for (uint32_t i = 0; i < s->cache.n_layers; i++) {
        const rfi_expert_layer *l = &s->cache.layers[i];
        if (l->layer != layer) continue;
        *out = (rf_expert_stats){.n_experts = l->n_experts, .hits = atomic_load(&l->hits),
                                 .misses = atomic_load(&l->misses), .bytes = atomic_load(&l->bytes),
                                 .prefetched = atomic_load(&l->prefetched), .on_cpu = atomic_load(&l->on_cpu),
                                 .round_trips = atomic_load(&l->round_trips)};
        for (uint32_t e = 0; e < l->n_experts; e++) out->n_loaded += (uint32_t)rfi_expert_is_ready(s, l, e);
    }
}

/* ---- finding the experts of a plan ---- */

/* Add an op's experts to the last expert layer: 0 if an expert of the layer is not one matrix of each of a few ops. */
static int rfi_expert_layer_add(rfi_store *s, const rf_op *op) {
    rfi_cache *c = &s->cache;
    rfi_expert_layer *l = &c->layers[c->n_layers - 1];
    for (uint32_t k = 0; k < l->n_weights; k++)
        if (l->weight[k] == op->weight) return 1; /* gates and what they multiply in one matrix */
    if (l->n_weights == RFI_EXPERT_WEIGHTS || op->experts.n_experts != l->n_experts) return 0;
    l->weight[l->n_weights++] = op->weight;
    for (uint32_t e = 0; e < op->experts.n_experts; e++) {
        rfi_tensor *t = &s->tensors[op->weight + e];
        if (t->expert_layer) return 0;
        t->expert_layer = l;
        c->expert_bytes += t->bytes;
    }
    return 1;
}

/* Find the experts of each layer, and allocate as many frames as there are experts. */
static rf_result rfi_cache_create(rfi_store *s, rf_error *err) {
    const rf_allocator *alloc = rfi_gguf_allocator(s->g);
    rfi_cache *c = &s->cache;
    uint32_t n_ops = 0;
    int fit = 1;
    for (uint32_t i = 0; i < s->plan.n_ops; i++) n_ops += s->plan.ops[i].kind == RF_OP_EXPERTS;
    if (n_ops == 0) return RF_OK;
    c->layers = (rfi_expert_layer *)rfi_alloc(alloc, n_ops, sizeof *c->layers, "expert layers", err);
    if (!c->layers) return RF_ERR_MEMORY;
    for (const rf_op *op = s->plan.ops; op < s->plan.ops + s->plan.n_ops; op++) {
        if (op->kind != RF_OP_EXPERTS) continue;
        if (c->n_layers == 0 || c->layers[c->n_layers - 1].layer != (uint32_t)op->layer) {
            rfi_expert_layer *l = &c->layers[c->n_layers++];
            *l = (rfi_expert_layer){
                .layer = (uint32_t)op->layer, .n_experts = op->experts.n_experts, .first = c->n_experts};
            c->n_experts += op->experts.n_experts;
            if (c->n_frames_min < op->experts.n_experts) c->n_frames_min = op->experts.n_experts;
        }
        fit &= rfi_expert_layer_add(s, op);
    }
    for (const rfi_expert_layer *l = c->layers; l < c->layers + c->n_layers; l++) {
        uint64_t bytes = 0;
        for (uint32_t k = 0; k < l->n_weights; k++) bytes += s->tensors[l->weight[k]].bytes;
        c->frame_bytes = rfi_max_u64(c->frame_bytes, bytes);
    }
    if (!fit) c->n_layers = 0;
    c->unit = 1;
    c->frames = (rfi_frame *)rfi_alloc(alloc, c->n_experts, sizeof *c->frames, "an expert cache", err);
    c->frame_of = (uint32_t *)rfi_alloc(alloc, c->n_experts, sizeof *c->frame_of, "an expert cache", err);
    c->score = (double *)rfi_alloc(alloc, c->n_experts, sizeof *c->score, "an expert cache", err);
    return c->frames && c->frame_of && c->score ? RF_OK : RF_ERR_MEMORY;
}

/* ==== 7e Budget ======================================================================================= >>budget
 * How a store uses its share of the device's memory. If everything fits, all weights are resident. Else the weights
 * outside of experts are resident and the rest is the expert cache; if that is too little for a layer's experts, or
 * there are none, some weights are streamed. Stores of one device share its budget: the least recently used one that
 * is idle is cleared for another; those in use are waited for. */

/* Slots from op.weight on that an op uses. */
static uint32_t rfi_op_matrices(const rf_op *op) { return op->kind == RF_OP_EXPERTS ? op->experts.n_experts : 1; }

/* Upper bound of the uses of weights by all ops. */
static uint64_t rfi_plan_uses(const rf_plan *plan) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < plan->n_ops; i++) n += RF_OP_WEIGHTS - 1 + rfi_op_matrices(&plan->ops[i]);
    return n;
}

/* The weights of ops [first, end), each once, into slots (room for rfi_plan_uses of them): how many. */
static uint32_t rfi_ops_slots(const rf_plan *plan, uint32_t first, uint32_t end, uint32_t *slots) {
    uint32_t n = 0;
    for (const rf_op *op = plan->ops + first; op < plan->ops + end; op++) {
        const uint32_t all[RF_OP_WEIGHTS] = {op->weight, op->bias, op->factor};
        for (uint32_t k = 0; k < RF_OP_WEIGHTS; k++) {
            int known = all[k] == RF_NONE;
            for (uint32_t j = 0; j < n && !known; j++) known = slots[j] == all[k];
            for (uint32_t e = 0; !known && e < (k ? 1 : rfi_op_matrices(op)); e++) slots[n++] = all[k] + e;
        }
    }
    return n;
}

/* The same of the layer that begins with op *at; *at moves to the next layer. */
static uint32_t rfi_layer_slots(const rf_plan *plan, uint32_t *at, uint32_t *slots) {
    const uint32_t first = *at;
    while (*at < plan->n_ops && plan->ops[*at].layer == plan->ops[first].layer) ++*at;
    return rfi_ops_slots(plan, first, *at, slots);
}

/* ---- placement ---- */

/* Bytes of the smallest ring that holds the streamed weights of any layer together, wherever in the ring they begin.
 * *ahead: bytes more, to keep copies going while such a layer computes. A GPU computes a layer in a small part of the
 * time that its copy takes, so that room for one more weight suffices; a CPU may compute for as long as the file takes
 * to read, so that it needs room for a layer. */
static uint64_t rfi_stream_min_bytes(const rfi_store *s, const rfi_placement *p, uint64_t *ahead) {
    uint64_t min = 0;
    *ahead = 0;
    for (uint32_t at = 0; at < s->plan.n_ops;) {
        uint32_t n = rfi_layer_slots(&s->plan, &at, p->slots), n_streamed = 0;
        uint64_t sum = 0, max = 0;
        for (uint32_t i = 0; i < n; i++) {
            if (!p->streamed[p->slots[i]]) continue;
            uint64_t bytes = s->tensors[p->slots[i]].bytes;
            sum += bytes;
            max = rfi_max_u64(max, bytes);
            n_streamed++;
        }
        min = rfi_max_u64(min, n_streamed > 1 ? sum + max : sum); /* + max: a gap where the ring wraps around */
        *ahead = rfi_max_u64(*ahead, s->device->is_gpu ? max : sum);
    }
    return min;
}

/* 1: the weight is resident whatever else is streamed, if it can be. keep 0: vectors, which are small. 1: also weights
 * of the last layer and those of two layers (tied embeddings), the widest: the ring must hold the widest layer. 2: also
 * weights of which a token reads a few rows only. */
static int rfi_placement_keeps(const rf_plan *plan, uint32_t slot, int keep) {
    const rf_plan_weight *w = &plan->weights[slot];
    if (w->n_rows == 1 || (keep > 1 && w->row_reads)) return 1;
    int wide = w->layer == plan->ops[plan->n_ops - 1].layer;
    for (uint32_t k = 0; k < plan->n_ops && !w->n_experts; k++)
        wide |= plan->ops[k].weight == slot && plan->ops[k].layer != w->layer;
    return keep && wide;
}

/* All weights but experts are resident, and what they leave of the limit is frames. 0: too few for a layer. */
static int rfi_placement_caches(const rfi_store *s, uint64_t limit, rfi_placement *p) {
    const rfi_cache *c = &s->cache;
    const uint64_t others = s->device_bytes_needed - c->expert_bytes;
    if (c->n_layers == 0 || others > limit) return 0;
    uint64_t bytes = limit - others, n;
    if (s->desc.expert_cache_bytes) bytes = rfi_min_u64(bytes, s->desc.expert_cache_bytes);
    n = rfi_min_u64(bytes / c->frame_bytes, c->n_experts);
    if (n < c->n_frames_min) return 0;
    p->n_frames = (uint32_t)n;
    p->resident_bytes = others + n * c->frame_bytes;
    return 1;
}

/* Choose what is streamed within `limit` bytes. Dense models read every weight for every token, so which ones are
 * resident does not matter for the bytes that are streamed; a prefix of the plan lets a token begin while the ring
 * fills. What the ring takes is streamed in addition, so that it is no larger than it must be. */
static rf_result rfi_placement_streams(const rfi_store *s, uint64_t limit, rfi_placement *p, rf_error *err) {
    const rf_plan *plan = &s->plan;
    uint64_t min = 0, ahead = 0;
    for (int keep = s->desc.stream_policy == RF_STREAM_PREFIX ? 2 : 0; keep >= 0; keep--) {
        p->resident_bytes = s->memory.scratch.size_bytes;
        for (uint32_t i = 0; i < plan->n_weights; i++) {
            p->streamed[i] = (uint8_t)!rfi_placement_keeps(plan, i, keep);
            if (!p->streamed[i]) p->resident_bytes += s->tensors[i].bytes;
        }
        min = rfi_stream_min_bytes(s, p, &ahead);
        if (min <= limit && p->resident_bytes <= limit - min) break;
    }
    if (min > limit || p->resident_bytes > limit - min)
        return rfi_fail(err, RF_ERR_MEMORY, limit,
                        "%s: %llu bytes for weights are too few: at least %llu are needed to stream it",
                        rfi_gguf_path(s->g), RFI_LLU(limit), RFI_LLU(p->resident_bytes + min));
    uint64_t ring = rfi_min_u64(min + ahead, limit - p->resident_bytes);
    if (s->desc.stream_policy == RF_STREAM_LRU) ring = limit - p->resident_bytes;
    for (uint32_t i = 0; i < plan->n_weights; i++) {
        uint64_t bytes = s->tensors[i].bytes;
        if (!p->streamed[i] || bytes > limit - p->resident_bytes - ring) continue;
        p->streamed[i] = 0;
        p->resident_bytes += bytes;
    }
    p->ring_bytes = limit - p->resident_bytes;
    return RF_OK;
}

static rf_result rfi_placement_choose(const rfi_store *s, uint64_t limit, rfi_placement *p, rf_error *err) {
    memset(p->streamed, 0, s->plan.n_weights);
    p->resident_bytes = s->device_bytes_needed;
    p->ring_bytes = 0;
    p->n_frames = 0;
    const uint64_t max = s->desc.expert_cache_bytes, layer = s->cache.n_frames_min * s->cache.frame_bytes;
    const uint64_t others = s->device_bytes_needed - s->cache.expert_bytes;
    const int capped = max && s->cache.n_layers && s->cache.expert_bytes > max, all = p->resident_bytes <= limit;
    if (all && !capped) return RF_OK;
    if (rfi_placement_caches(s, limit, p)) return RF_OK;
    if (capped && max < layer && (all || (others <= limit && limit - others >= layer))) /* else the limit is why */
        return rfi_fail(err, RF_ERR_MEMORY, limit,
                        "%s: expert_cache_bytes %llu are too few: at least %llu hold the experts of a layer",
                        rfi_gguf_path(s->g), RFI_LLU(max), RFI_LLU(layer));
    return rfi_placement_streams(s, limit, p, err);
}

/* Put the store's placement into effect; nothing is loaded. */
static void rfi_placement_apply(rfi_store *s) { /* device.monitor held, no call active */
    const rfi_placement *p = &s->share.placement;
    const uint64_t cache_bytes = p->n_frames * s->cache.frame_bytes;
    rfi_stream *q = &s->stream;
    rfi_monitor_lock(&s->monitor);
    s->n_resident = 0;
    for (uint32_t i = 0; i < s->plan.n_weights; i++) {
        rfi_tensor *t = &s->tensors[i];
        t->streamed = p->streamed[i];
        t->cached = p->n_frames && t->expert_layer;
        s->n_resident += (uint32_t)rfi_is_resident(t);
    }
    rfi_cache_reset(&s->cache, p->n_frames);
    s->cache.slab = (rfi_slab){.size_bytes = cache_bytes};
    q->n_uses = 0;
    for (uint32_t at = 0; at < s->plan.n_ops && p->ring_bytes;) {
        uint32_t n = rfi_layer_slots(&s->plan, &at, p->slots);
        for (uint32_t i = 0; i < n; i++)
            if (p->streamed[p->slots[i]]) q->uses[q->n_uses++] = p->slots[i];
    }
    q->n_loaded = q->n_used = q->n_freed = 0;
    q->ring = (rfi_slab){.size_bytes = p->ring_bytes};
    uint32_t slabs = p->ring_bytes ? RFI_SLABS - 1 : RFI_SLABS;
    rfi_memory_place(s, RF_NONE, rfi_max_u64(RFI_SLAB_BYTES, (p->resident_bytes - cache_bytes + slabs - 1) / slabs));
    rfi_monitor_unlock(&s->monitor);
    s->share.size_bytes = p->resident_bytes + p->ring_bytes;
    s->share.placed = 1;
}

/* Evict what is not in use and release its memory. idle: no call is active, so stop loading. Returns tensors left. */
static uint32_t rfi_store_clear(rfi_store *s, int idle) {
    uint32_t left = 0;
    const int ring_is_ours = pthread_mutex_trylock(&s->stream_lock) == 0; /* else an eval streams */
    rfi_monitor_lock(&s->monitor);
    if (idle) {
        s->stream.paused = 1;
        rfi_loader_cancel(s);
        while (s->loader.n_jobs || s->memory.n_creating) rfi_monitor_wait(&s->monitor);
    }
    if (ring_is_ours && rfi_store_streams(s)) rfi_stream_reset(s);
    if (idle) { /* until it is placed anew */
        s->stream.n_uses = s->cache.n_frames = 0;
        s->stream.paused = 0;
        rfi_store_changed(s);
    }
    for (uint32_t slot = 0; slot < s->plan.n_weights; slot++)
        if (!s->tensors[slot].streamed) left += !rfi_tensor_evict(s, slot);
        else left += !rfi_cell_is_unloaded(&s->tensors[slot].cell);
    rfi_cache_drop_evicted(s);
    for (uint32_t i = 0; i < s->memory.n_slabs; i++) rfi_slab_release(s, &s->memory.slabs[i]);
    rfi_slab_release(s, &s->stream.ring);
    rfi_slab_release(s, &s->cache.slab);
    if (s->loader.n_jobs == 0 && s->loader.n_running == 0) rfi_staging_release(s);
    if (left == 0) rfi_slab_release(s, &s->memory.scratch);
    rfi_monitor_unlock(&s->monitor);
    if (ring_is_ours) pthread_mutex_unlock(&s->stream_lock);
    return left;
}

/* ---- the device's budget ---- */

/* Bytes that the device can give to the weights of all stores. *others: what other stores have of them. */
static uint64_t rfi_budget_limit(const rfi_store *s, uint64_t *others) { /* device.monitor held */
    const rf_device *d = s->device;
    uint64_t limit = d->budget_bytes;
    rf_device_info info = {0};
    *others = 0;
    for (const rfi_store *o = d->stores; o; o = o->next)
        if (o != s && o->share.placed) *others += o->share.size_bytes;
    if (limit == 0) {
        limit = UINT64_MAX;
        if (d->api->device_info(d->dev, &info, NULL) == RF_OK && info.is_gpu && info.free_bytes)
            limit = (info.free_bytes + atomic_load(&d->weight_bytes)) / 32 * 31; /* a little stays for the driver */
    }
    return limit;
}

static rfi_store *rfi_budget_lru(const rfi_store *s) { /* device.monitor held */
    rfi_store *lru = NULL;
    for (rfi_store *o = s->device->stores; o; o = o->next)
        if (o != s && o->share.placed && o->share.n_active == 0 && (!lru || o->share.last_used < lru->share.last_used))
            lru = o;
    return lru;
}

/* Have a share of the device's budget. A cancel since `cancels` was read ends the wait for models in use. */
static rf_result rfi_budget_acquire(rfi_store *s, uint64_t cancels, rf_error *err) { /* device.monitor held, yields */
    const uint64_t own = s->desc.budget_bytes ? s->desc.budget_bytes : UINT64_MAX;
    rfi_placement *p = &s->share.placement;
    while (!s->share.placed) { /* perhaps by another thread meanwhile */
        uint64_t others, limit = rfi_budget_limit(s, &others);
        rf_result r = rfi_placement_choose(s, rfi_min_u64(own, limit), p, err);
        if (r != RF_OK) return r; /* even alone: clearing others or waiting would not help */
        const uint64_t want = p->resident_bytes + p->ring_bytes;
        rfi_store *lru = others && (others > limit || limit - others < want) ? rfi_budget_lru(s) : NULL;
        if (lru) {
            rfi_store_clear(lru, 1);
            lru->share.placed = 0;
            continue;
        }
        const uint64_t rest = rfi_min_u64(own, limit > others ? limit - others : 0);
        if (others == 0 || rfi_placement_choose(s, rest, p, NULL) == RF_OK) {
            rfi_placement_apply(s);
        } else if (atomic_load(&s->cancels) != cancels) {
            return rfi_fail(err, RF_ERR_CANCELLED, 0, "%s: cancelled while it waited for its share of the device",
                            rfi_gguf_path(s->g));
        } else {
            rfi_monitor_wait(&s->device->monitor); /* until a store becomes idle */
        }
    }
    return RF_OK;
}

/* What the weights would take of the device now, if all other stores were cleared. */
static rf_result rfi_store_forecast(const rfi_store *s, rf_forecast *out, rf_error *err) {
    const rf_allocator *alloc = rfi_gguf_allocator(s->g);
    uint64_t others, own = s->desc.budget_bytes ? s->desc.budget_bytes : UINT64_MAX;
    rfi_placement p = {0};
    p.streamed = (uint8_t *)rfi_alloc(alloc, s->plan.n_weights, 1, "a forecast", err);
    p.slots = (uint32_t *)rfi_alloc(alloc, rfi_plan_uses(&s->plan), sizeof *p.slots, "a forecast", err);
    rf_result r = p.streamed && p.slots ? RF_OK : RF_ERR_MEMORY;
    if (r == RF_OK) {
        rfi_monitor_lock(&s->device->monitor);
        uint64_t limit = rfi_budget_limit(s, &others);
        rfi_monitor_unlock(&s->device->monitor);
        r = rfi_placement_choose(s, rfi_min_u64(own, limit), &p, err);
    }
    for (uint32_t i = 0; r == RF_OK && i < s->plan.n_weights; i++)
        if (p.streamed[i]) out->streamed_bytes += s->tensors[i].bytes;
    out->weight_bytes = p.resident_bytes + p.ring_bytes;
    out->expert_cache_bytes = p.n_frames * s->cache.frame_bytes;
    rfi_free(alloc, p.streamed);
    rfi_free(alloc, p.slots);
    return r;
}

/* Around every call that loads or uses weights. *cancels: a cancel after it was read ends the call. */
static rf_result rfi_store_begin(rfi_store *s, uint64_t *cancels, rf_error *err) {
    *cancels = atomic_load(&s->cancels);
    rfi_monitor_lock(&s->device->monitor);
    rf_result r = rfi_budget_acquire(s, *cancels, err);
    if (r == RF_OK) s->share.n_active++;
    s->share.last_used = ++s->device->clock;
    rfi_monitor_unlock(&s->device->monitor);
    return r;
}

static void rfi_store_end(rfi_store *s) {
    rfi_monitor_lock(&s->device->monitor);
    if (--s->share.n_active == 0) rfi_monitor_wake(&s->device->monitor);
    rfi_monitor_unlock(&s->device->monitor);
}

/* ==== 7f The store ===================================================================================== >>store
 * Open and close, and what models call. Models of one file on one device share a store; the first opens it, the last
 * frees it. */

/* Free a store that is clear; its readers may still wait for work. */
static void rfi_store_free(rfi_store *s) {
    const rf_device_api *api = s->device->api;
    const rf_allocator *alloc = rfi_gguf_allocator(s->g);
    rfi_loader *l = &s->loader;
    rfi_monitor_lock(&s->monitor);
    l->quit = 1;
    rfi_store_changed(s);
    rfi_monitor_unlock(&s->monitor);
    for (uint32_t i = 0; i < RFI_MAX_READERS; i++)
        if (l->readers[i].started) pthread_join(l->readers[i].thread, NULL);
    rfi_monitor_lock(&s->monitor);
    rfi_staging_release(s);
    rfi_monitor_unlock(&s->monitor);
    for (uint32_t i = 0; i < s->pinned.n_blocks; i++) api->host_release(s->device->dev, s->pinned.blocks[i]);
    if (s->queue) api->queue_release(s->queue);
    if (s->table) api->table_release(s->table);
    rfi_free(alloc, s->tensors);
    rfi_free(alloc, s->order);
    rfi_free(alloc, s->stream.uses);
    rfi_free(alloc, s->share.placement.streamed);
    rfi_free(alloc, s->share.placement.slots);
    rfi_free(alloc, s->cache.layers);
    rfi_free(alloc, s->cache.frames);
    rfi_free(alloc, s->cache.frame_of);
    rfi_free(alloc, s->cache.score);
    rfi_plan_free(alloc, &s->plan);
    rfi_monitor_destroy(&s->monitor);
    rfi_monitor_destroy(&s->cell_monitor);
    pthread_mutex_destroy(&s->stream_lock);
    rfi_free(alloc, s);
}

static void rfi_tensor_describe(rfi_store *s, uint32_t slot) {
    const rf_plan_weight *w = &s->plan.weights[slot];
    rfi_tensor *t = &s->tensors[slot];
    const rf_weight_layout layout = s->device->api->weight_layout(s->device->dev, w);
    rf_gguf_get_tensor(s->g, w->tensor, &t->info, NULL);
    t->info.offset_bytes += w->expert * w->size_bytes;
    t->info.size_bytes = w->size_bytes;
    const void *map = rfi_gguf_map(s->g, &t->info);
    if (layout.in_place && map && ((uintptr_t)map & (layout.align - 1)) == 0) t->in_place = map;
    t->bytes = (layout.size_bytes + 255) & ~(uint64_t)255;
    s->in_place |= t->in_place != NULL;
    s->total_bytes += w->size_bytes;
    s->device_bytes_needed += t->bytes;
    s->row_bytes_max = rfi_max_u64(s->row_bytes_max, t->in_place ? 0 : w->size_bytes / w->n_rows);
    s->memory.scratch.size_bytes = rfi_max_u64(s->memory.scratch.size_bytes, layout.scratch_bytes);
}

static void rfi_store_describe(rfi_store *s) {
    rfi_loader *l = &s->loader;
    uint32_t n = 0;
    for (uint32_t slot = 0; slot < s->plan.n_weights; slot++) rfi_tensor_describe(s, slot);
    s->device_bytes_needed += s->memory.scratch.size_bytes;
    for (int pass = 0; pass < 2; pass++) /* RF_LOAD_CRITICAL_FIRST: embedding and output, then the layers */
        for (uint32_t slot = 0; slot < s->plan.n_weights; slot++) {
            const int32_t layer = s->plan.weights[slot].layer;
            const int in_layer = layer >= 0 && layer < (int32_t)s->plan.n_layers;
            if ((in_layer || s->desc.load_policy != RF_LOAD_CRITICAL_FIRST) == pass) s->order[n++] = slot;
        }
    uint64_t readers = rfi_min_u64(rfi_min_u64(8, rfi_cpu_count()), s->total_bytes / (4 * RFI_STAGING_BYTES));
    l->n_readers_max = (uint32_t)rfi_min_u64(s->desc.n_readers ? s->desc.n_readers : readers, RFI_MAX_READERS);
    l->n_staging_max = 2 * (uint32_t)rfi_max_u64(l->n_readers_max, 1);
}

/* Nothing of the file is read. The plan becomes the store's, even if this fails; then nothing is left. */
static rf_result rfi_store_open(rf_gguf *g, rf_device *d, rf_plan *plan, const rf_model_desc *desc, rfi_store **out,
                                rf_error *err) {
    const rf_allocator *alloc = rfi_gguf_allocator(g);
    const uint64_t n_weights = plan->n_weights, n_uses = rfi_plan_uses(plan);
    rfi_store *s = (rfi_store *)rfi_alloc(alloc, 1, sizeof *s, "lazy tensors", err);
    if (!s) return rfi_plan_free(alloc, plan), RF_ERR_MEMORY;
    rfi_monitor_init(&s->monitor);
    rfi_monitor_init(&s->cell_monitor);
    pthread_mutex_init(&s->stream_lock, NULL);
    s->g = g;
    s->device = d;
    s->plan = *plan;
    s->desc = *desc;
    s->reports = (rfi_reports){.fn = desc->progress_fn, .user = desc->progress_user, .end = &s->reports.first};
    rfi_placement *p = &s->share.placement;
    s->tensors = (rfi_tensor *)rfi_alloc(alloc, n_weights, sizeof *s->tensors, "lazy tensors", err);
    s->order = (uint32_t *)rfi_alloc(alloc, n_weights, sizeof *s->order, "lazy tensors", err);
    s->stream.uses = (uint32_t *)rfi_alloc(alloc, n_uses, sizeof *s->stream.uses, "lazy tensors", err);
    p->streamed = (uint8_t *)rfi_alloc(alloc, n_weights, sizeof *p->streamed, "lazy tensors", err);
    p->slots = (uint32_t *)rfi_alloc(alloc, n_uses, sizeof *p->slots, "lazy tensors", err);
    const int all = s->tensors && s->order && s->stream.uses && p->streamed && p->slots;
    rf_result r = all ? RF_OK : RF_ERR_MEMORY;
    if (r == RF_OK) r = d->api->table_create(d->dev, &s->plan, &s->table, err);
    if (r == RF_OK) r = d->api->queue_create(d->dev, &s->queue, err);
    if (r == RF_OK) rfi_store_describe(s);
    if (r == RF_OK) r = rfi_cache_create(s, err);
    if (r != RF_OK) rfi_store_free(s);
    else *out = s;
    return r;
}

/* This file's store on this device: another model's, or a new one. The plan becomes the store's, or is freed. */
static rf_result rfi_device_get_store(rf_device *d, rf_gguf *g, rf_plan *plan, const rf_model_desc *desc,
                                      const rf_model *owner, rfi_store **out, rf_error *err) {
    rf_result r = RF_OK;
    rfi_monitor_lock(&d->monitor);
    rfi_store *s = d->stores;
    while (s && s->g != g) s = s->next;
    if (s) {
        rfi_plan_free(rfi_gguf_allocator(g), plan);
    } else if ((r = rfi_store_open(g, d, plan, desc, &s, err)) == RF_OK) {
        s->reports.owner = owner;
        s->next = d->stores;
        d->stores = s;
    }
    if (r == RF_OK) {
        s->share.n_models++;
        *out = s;
    }
    rfi_monitor_unlock(&d->monitor);
    return r;
}

/* A model gives its store up; the last one frees it. */
static void rfi_device_put_store(rfi_store *s, const rf_model *owner) {
    rf_device *d = s->device;
    rfi_store **at = &d->stores;
    rfi_monitor_lock(&s->monitor);
    if (s->reports.owner == owner) s->reports.fn = NULL; /* its callback is called no more */
    while (s->reports.owner == owner && s->reports.running) rfi_monitor_wait(&s->monitor);
    rfi_monitor_unlock(&s->monitor);
    rfi_monitor_lock(&d->monitor);
    const int last = --s->share.n_models == 0;
    while (last && *at != s) at = &(*at)->next;
    if (last) rfi_store_clear(s, 1), *at = s->next; /* in this order: others count with its memory from now on */
    rfi_monitor_unlock(&d->monitor);
    if (last) rfi_store_free(s);
}

/* Load the resident tensors of some layers (NULL: of all) and wait for them. */
static rf_result rfi_store_preload(rfi_store *s, const uint32_t *layers, uint32_t n_layers, rf_error *err) {
    uint64_t cancels;
    rf_result r = rfi_store_begin(s, &cancels, err);
    if (r != RF_OK) return r;
    rfi_store_prefetch(s, layers, n_layers, cancels);
    for (uint32_t i = 0; r == RF_OK && i < s->plan.n_weights; i++)
        if (rfi_store_selects(s, s->order[i], layers, n_layers)) r = rfi_store_load(s, s->order[i], cancels, err);
    rfi_store_end(s);
    return r;
}

/* Cancel loading for the user: calls in progress end, too. */
static void rfi_store_cancel(rfi_store *s) {
    rfi_monitor_lock(&s->monitor);
    atomic_fetch_add(&s->cancels, 1);
    rfi_loader_cancel(s);
    rfi_monitor_unlock(&s->monitor);
    rfi_monitor_lock(&s->device->monitor); /* who waits for a share of the budget looks again */
    rfi_monitor_wake(&s->device->monitor);
    rfi_monitor_unlock(&s->device->monitor);
}

/* Clear what no call uses; if none is active, also give up the share of the budget. Returns the tensors left. */
static uint32_t rfi_store_clear_unused(rfi_store *s) {
    rfi_monitor_lock(&s->device->monitor); /* so that no call begins meanwhile */
    const int idle = s->share.n_active == 0;
    const uint32_t left = rfi_store_clear(s, idle);
    if (idle) s->share.placed = 0;
    rfi_monitor_unlock(&s->device->monitor);
    return left;
}

static void rfi_store_get_stats(rfi_store *s, rf_loading_stats *out) {
    const rfi_stats *n = &s->stats;
    *out = (rf_loading_stats){
        .tensors_loaded = atomic_load(&n->tensors_loaded), .bytes_loaded = atomic_load(&n->bytes_loaded),
        .device_bytes = atomic_load(&n->device_bytes), .hits = atomic_load(&n->hits),
        .misses = atomic_load(&n->misses), .loads = atomic_load(&n->loads), .failures = atomic_load(&n->failures),
        .evictions = atomic_load(&n->evictions), .device_allocations = atomic_load(&n->device_allocations),
        .bytes_read = atomic_load(&n->bytes_read), .wait_seconds = 1e-9 * (double)atomic_load(&n->wait_ns)};
    rfi_monitor_lock(&s->monitor);
    const double busy = s->loader.n_jobs ? rfi_now() - s->loader.busy_since : 0;
    rfi_monitor_unlock(&s->monitor);
    out->load_seconds = 1e-9 * (double)atomic_load(&n->load_ns) + busy;
    if (out->load_seconds > 0) out->gb_per_second = 1e-9 * (double)atomic_load(&n->bytes_total) / out->load_seconds;
}

/* ==== 8 Model ========================================================================================== >>model
 * The hyperparameters of a file, each read with a range check before anything is computed from it. The next section
 * derives the shape of every weight from them. */

#ifndef ROCMFORGE_MAX_LAYERS
#define ROCMFORGE_MAX_LAYERS 1024
#endif

typedef enum rfi_rope_scaling { RFI_ROPE_NONE = 0, RFI_ROPE_LINEAR = 1, RFI_ROPE_YARN = 2 } rfi_rope_scaling;

typedef struct rfi_layer_config {
    uint32_t n_heads, n_kv_heads, n_ff;
    uint32_t head_dim, head_dim_v;
    uint32_t cache_layer; /* the layer whose KV cache it reads: itself, or an earlier one */
    uint32_t window;      /* positions its attention sees; 0: all                         */
    int swa;              /* 1: a layer with a sliding window                             */
    int recurrent;        /* 1: a recurrent state instead of attention                    */
    int rope;             /* 0: queries and keys are not rotated                          */
} rfi_layer_config;

typedef enum rfi_gating {
    RFI_GATING_SOFTMAX = 1, /* values of the key expert_gating_func */
    RFI_GATING_SIGMOID = 2,
    RFI_GATING_CHOSEN = 3
} rfi_gating;

/* The mixture of experts of an architecture, and the keys that may change it. */
typedef struct rfi_moe_arch {
    rfi_gating gating;
    int normalize;    /* the weights of the chosen experts add up to 1                                       */
    int keys;         /* expert_gating_func, expert_weights_norm and _scale are read                         */
    int n_ff_is_ff;   /* expert_feed_forward_length defaults to feed_forward_length                          */
    int groups;       /* expert_group_count and _used_count are read                                         */
    int dense_beside; /* the dense FFN runs beside the experts; both outputs are normed and added            */
    int optional;     /* a file without expert_count has no experts                                          */
    int shared_gate;  /* the shared experts' output is multiplied by sigmoid(ffn_gate_inp_shexp . x)         */
    int dense_lead;   /* the first leading_dense_block_count layers have no experts                          */
    int shared;       /* shared experts, as wide as expert_feed_forward_length times expert_shared_count, or
                         expert_shared_feed_forward_length                                                   */
} rfi_moe_arch;

/* What recurrent layers are. */
typedef enum rfi_recurrence { RFI_RECURRENCE_NONE = 0, RFI_SHORT_CONV = 1, RFI_DELTA_NET = 2 } rfi_recurrence;
typedef struct rfi_recurrent_arch {
    rfi_recurrence kind;
    int cyclic;      /* DELTA_NET: head h reads key head h % n_k_heads instead of h / (n_heads / n_k_heads) */
    int fused_gates; /* ssm_ba (per key head the betas of its heads, then their alphas) instead of ssm_beta, _alpha */
} rfi_recurrent_arch;

/* Recurrent layers of a model; kind 0: none. */
typedef struct rfi_recurrent_config {
    rfi_recurrence kind;
    uint32_t n_taps;                                   /* of its convolutions                   */
    uint32_t n_k_heads, n_heads, head_dim, head_dim_v; /* DELTA_NET                             */
    uint32_t n_conv;                                   /* DELTA_NET: channels q, k, v together  */
} rfi_recurrent_config;

/* Experts of a model; n_experts 0: none. */
typedef struct rfi_moe_config {
    uint32_t n_experts, n_used, n_ff, n_ff_shared;
    uint32_t n_dense; /* layers before the first with experts */
    uint32_t gating;
    uint32_t n_groups, n_groups_used; /* as rf_route_params */
    int normalize;
    double scale;
} rfi_moe_config;

/* Multi-head latent attention (MLA): all heads share one key of kv_lora_rank values and n_rot rotated ones. The layers'
 * head_dim is the sum of both, their head_dim_v is kv_lora_rank. */
typedef struct rfi_mla_config {
    uint32_t kv_lora_rank;
    uint32_t q_lora_rank;          /* 0: queries are not compressed                          */
    uint32_t head_dim, head_dim_v; /* of a head's key and value before compression           */
    int joined;                    /* the file has attn_kv_b instead of attn_k_b, attn_v_b   */
} rfi_mla_config;

/* An architecture: how it differs from llama's decoder; zero is llama. What a file's tensors show by being there needs
 * no field: biases, a fused attn_qkv, a tied output, rope_freqs. */
typedef struct rfi_arch {
    const char *name;

    /* norms */
    uint8_t layer_norm;       /* all norms subtract the mean and may have a bias                              */
    uint8_t no_pre_norm;      /* attention and FFN read x itself                                              */
    uint8_t post_norm;        /* the outputs of attention and FFN are normed: post_attention_norm, post_ffw_norm */
    uint8_t ffn_norm_is_post_attention; /* the norm before the FFN is named post_attention_norm               */
    uint8_t embedding_norm;   /* token_embd_norm after the embedding                                          */
    uint8_t qk_norm;          /* each query and key head is normed before rope                                */
    uint8_t qk_norm_wide;     /* one norm over all query heads, one over all key heads                        */
    uint8_t qk_norm_optional; /* as qk_norm, in layers that have attn_q_norm                                  */
    uint8_t v_norm;           /* values are normed, too; a layer without attn_v takes attn_k's output as values */

    /* residual stream */
    uint8_t parallel;         /* x += attention + FFN of the same x                                           */
    uint8_t parallel_key;     /* the same if use_parallel_residual says so                                    */
    uint8_t parallel_without_ffn_norm; /* the same in layers without ffn_norm                                 */
    uint8_t embed_sqrt;       /* embeddings times sqrt(n_embd)                                                */
    uint8_t learned_positions; /* position_embd instead of rope                                               */
    uint8_t layer_inputs;     /* an embedding row for every layer, layers that share the keys and values of earlier
                                 ones, layer_output_scale                                                     */

    /* keys that are read */
    uint8_t scale_keys;       /* embedding_scale, residual_scale, logit_scale (divides), attention.scale      */
    uint8_t logit_scale_multiplies; /* logit_scale                                                            */
    uint8_t attn_softcap;     /* attn_ and final_logit_softcapping, 50 and 30 if absent                       */
    uint8_t final_softcap;    /* final_logit_softcapping                                                      */
    uint8_t attn_temperature; /* attention.temperature_scale and yarn's betas                                 */
    uint8_t alibi_keys;       /* attention.max_alibi_bias and clamp_kqv                                       */

    /* rope and attention */
    uint8_t rope_neox;        /* rope pairs (i, i + n_rot/2) instead of (2i, 2i+1)                            */
    uint8_t mrope;            /* M-RoPE if rope.dimension_sections is there; 2: its axes take turns           */
    uint8_t rope_switch;      /* no rope if rope.scaling.finetuned is false                                   */
    uint8_t longrope;         /* rope_factors_long and rope_factors_short                                     */
    uint8_t attn_sinks;       /* attn_sinks; scores are scaled by 1/sqrt(n_rot)                               */
    uint8_t mla;              /* multi-head latent attention: one compressed key and value for all heads      */
    uint8_t swa_yarn;         /* layers with a sliding window (SWA) use yarn, too                             */
    uint8_t swa_rope_only;    /* only they have rope                                                          */
    uint8_t swa_heads;        /* they have head sizes of their own, and no rope_freqs                         */
    uint32_t swa_period;      /* n: SWA in all layers but every n-th, unless the file says else; 0: none      */
    uint32_t swa_window;      /* positions a window holds if the file does not say                            */
    float swa_rope_base;      /* rope base of SWA layers, unscaled; 0: as the others                          */
    uint32_t no_rope_period;  /* n: every n-th layer has no rope                                              */
    float alibi;              /* ALiBi instead of rope, the steepest slope is 2^(-alibi / heads); 0: rope     */
    float attn_scale;         /* of scores; 0: 1/sqrt(head_dim)                                               */
    uint32_t wide_layers;     /* a model of so many layers scales scores by 1/sqrt(n_embd / n_heads)          */

    /* FFN */
    uint8_t gelu;             /* instead of SiLU                                                              */
    uint8_t no_gate;          /* FFN: down act(up x)                                                          */
    uint8_t fused_gate_up;    /* ffn_up holds the gate's rows, then its own                                   */
    uint8_t swiglu_oai;       /* experts: RF_ACT_OAI instead of SiLU                                          */

    const rfi_moe_arch *moe;             /* NULL: no experts                */
    const rfi_recurrent_arch *recurrent; /* NULL: all layers have attention */
} rfi_arch;

static const rfi_arch *rfi_arch_find(rf_string name);
static void rfi_arch_list(char *text, size_t capacity); /* "llama, qwen2, ...", as many as fit */

typedef struct rfi_rope_config {
    double base, factor;
    double magnitude; /* factor of cos and sin besides yarn's */
    rfi_rope_scaling scaling;
    uint32_t n_rot; /* values of a head that are rotated */
} rfi_rope_config;

typedef struct rfi_config {
    const rfi_arch *arch;
    uint32_t n_layers, n_embd, n_vocab, n_ctx_train;
    uint32_t head_dim, head_dim_v, n_rot; /* of layers without SWA, where SWA layers have sizes of their own */
    uint32_t n_layer_input;           /* values of a layer's embedding row; 0: none */
    uint32_t n_positions;             /* learned ones; 0: no limit                  */
    double norm_eps;
    rfi_rope_config rope, swa_rope;
    int rope_neox;                    /* as rfi_arch; M-RoPE implies it             */
    uint32_t rope_sections[4];        /* M-RoPE: pairs of each axis; 0: no M-RoPE   */
    double yarn_log_multiplier, yarn_beta_fast, yarn_beta_slow;
    uint32_t rope_n_ctx_original;
    int parallel;                     /* x += attention + FFN of the same x         */
    double embedding_scale, residual_scale, logit_scale; /* 0: none              */
    double attention_scale;           /* of scores; 0: 1/sqrt(head_dim)             */
    double attention_softcap, logit_softcap, temperature; /* 0: none             */
    double alibi;                     /* 0: rope                                    */
    double clamp;                     /* of queries, keys and values; 0: none       */
    uint32_t n_blocks;                /* layers in the file: n_layers, then unused MTP layers */
    rfi_layer_config *layers;         /* [n_layers]                                 */
    rfi_moe_config moe;
    rfi_mla_config mla;
    rfi_recurrent_config recurrent;
} rfi_config;

static const char *rfi_kv_type_name(uint32_t type) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return type < RFI_COUNT(names) ? names[type] : "unknown";
}

static int rfi_kv_is_uint(uint32_t type) {
    return type == RF_KV_U8 || type == RF_KV_U16 || type == RF_KV_U32 || type == RF_KV_U64 || type == RF_KV_I8 ||
           type == RF_KV_I16 || type == RF_KV_I32 || type == RF_KV_I64;
}

/* Reads the keys of a file: "<arch>.<suffix>", or suffix itself while arch is NULL. After the first failure nothing is
 * read any more, and what would have been read gets its value for absent keys. */
typedef struct rfi_key_reader {
    const rf_gguf *g;
    const rfi_arch *arch;
    rf_error *err;
    rf_result result; /* the first failure */
    rf_kv kv;         /* of the last key   */
    char name[96];    /* its whole name    */
    uint32_t n_found; /* keys of the architecture that were looked for and found, and where in the file they are */
    uint64_t found[128];
} rfi_key_reader;

static int rfi_key_was_found(const rfi_key_reader *k, const rf_kv *kv) {
    for (uint32_t i = 0; i < k->n_found; i++)
        if (k->found[i] == kv->where) return 1;
    return 0;
}

/* Find a key. Returns 1 if the file has it. */
static int rfi_key_find(rfi_key_reader *k, const char *suffix) {
    snprintf(k->name, sizeof k->name, "%s%s%s", k->arch ? k->arch->name : "", k->arch ? "." : "", suffix);
    if (rf_gguf_find_kv(k->g, k->name, &k->kv, NULL) != RF_OK) return 0;
    if (k->n_found < RFI_COUNT(k->found) && !rfi_key_was_found(k, &k->kv)) k->found[k->n_found++] = k->kv.where;
    return 1;
}

/* Fail at the last key: "FILE: KEY at byte N: what is wrong". */
__attribute__((format(printf, 3, 4)))
static void rfi_key_fail(rfi_key_reader *k, rf_result code, const char *format, ...) {
    char what[RF_ERROR_TEXT_BYTES];
    va_list args;
    if (k->result != RF_OK) return;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    k->result = rfi_fail(k->err, code, k->kv.where, "%s: %s at byte %llu: %s", rfi_gguf_path(k->g), k->name,
                         RFI_LLU(k->kv.where), what);
}

/* Find a key that a reader is about to read. Absent: 0, and a failure if it is required. */
static int rfi_key_read(rfi_key_reader *k, const char *suffix, int required) {
    if (k->result != RF_OK) return 0;
    if (rfi_key_find(k, suffix)) return 1;
    if (required)
        k->result = rfi_fail(k->err, RF_ERR_NOT_FOUND, 0, "%s: key %s is missing", rfi_gguf_path(k->g), k->name);
    return 0;
}

/* An unsigned hyperparameter. Absent: `absent`, or a failure if required. */
typedef struct rfi_uint_key {
    const char *suffix;
    uint32_t min, max, absent, required;
} rfi_uint_key;

/* The same where the file may give an array of n_layers values, one per layer; n_layers 0: it may not. */
static void rfi_key_uint_of(rfi_key_reader *k, const rfi_uint_key *key, uint64_t il, uint64_t n_layers, uint32_t *out) {
    const rf_kv *kv = &k->kv;
    int64_t v = 0;
    *out = key->absent;
    if (!rfi_key_read(k, key->suffix, key->required != 0)) return;
    const int is_array = kv->type == RF_KV_ARRAY;
    if (!rfi_kv_is_uint(kv->element_type) || (is_array && n_layers == 0))
        rfi_key_fail(k, RF_ERR_FORMAT, "want an unsigned integer, found %s%s", is_array ? "an array of " : "",
                     rfi_kv_type_name(kv->element_type));
    else if (is_array && kv->count != n_layers)
        rfi_key_fail(k, RF_ERR_FORMAT, "want %llu elements, one per layer, found %llu", RFI_LLU(n_layers),
                     RFI_LLU(kv->count));
    else if (rf_kv_int(kv, is_array ? il : 0, &v, NULL) != RF_OK || v < 0 || v < key->min || v > key->max)
        rfi_key_fail(k, RF_ERR_FORMAT, "want %u to %u, found %lld", key->min, key->max, (long long)v);
    else *out = (uint32_t)v;
}
static void rfi_key_uint(rfi_key_reader *k, const rfi_uint_key *key, uint32_t *out) {
    rfi_key_uint_of(k, key, 0, 0, out);
}

/* A real hyperparameter, finite and >= min. */
static void rfi_key_real(rfi_key_reader *k, const char *suffix, double min, double absent, int required, double *out) {
    *out = absent;
    if (!rfi_key_read(k, suffix, required)) return;
    if (k->kv.type != RF_KV_F32 && k->kv.type != RF_KV_F64) {
        rfi_key_fail(k, RF_ERR_FORMAT, "want a real number, found %s", rfi_kv_type_name(k->kv.type));
        return;
    }
    rf_kv_real(&k->kv, 0, out, NULL);
    if (!isfinite(*out) || *out < min)
        rfi_key_fail(k, RF_ERR_FORMAT, "want a finite number >= %g, found %g", min, *out);
}

/* A factor, softcap or temperature: 0 (none), or 1e-9 to 1e9, so that products neither overflow nor vanish. */
static void rfi_key_scale(rfi_key_reader *k, const char *suffix, double absent, int required, double *out) {
    rfi_key_real(k, suffix, 0, absent, required, out);
    if (*out != 0 && !(*out >= 1e-9 && *out <= 1e9))
        rfi_key_fail(k, RF_ERR_FORMAT, "want 0, or 1e-9 to 1e9, found %g", *out);
}

static void rfi_key_bool(rfi_key_reader *k, const char *suffix, int absent, int required, int *out) {
    int64_t v = absent;
    *out = absent;
    if (!rfi_key_read(k, suffix, required)) return;
    if (k->kv.type != RF_KV_BOOL)
        rfi_key_fail(k, RF_ERR_FORMAT, "want a bool, found %s", rfi_kv_type_name(k->kv.type));
    rf_kv_int(&k->kv, 0, &v, NULL);
    *out = v != 0;
}

/* A string; empty if absent. */
static void rfi_key_text(rfi_key_reader *k, const char *suffix, rf_string *out) {
    memset(out, 0, sizeof *out);
    if (!rfi_key_read(k, suffix, 0)) return;
    if (k->kv.type != RF_KV_STRING)
        rfi_key_fail(k, RF_ERR_FORMAT, "want a string, found %s", rfi_kv_type_name(k->kv.type));
    else rf_kv_text(&k->kv, NULL, out, NULL);
}

static void rfi_config_arch(rfi_key_reader *k, rfi_config *c) {
    rf_string arch;
    char names[200]; /* of an error's text, after a path */
    rfi_key_text(k, "general.architecture", &arch);
    if (k->result == RF_OK && arch.len == 0)
        k->result = rfi_fail(k->err, RF_ERR_NOT_FOUND, 0, "%s: key general.architecture is missing or empty",
                             rfi_gguf_path(k->g));
    if (k->result != RF_OK) return;
    k->arch = c->arch = rfi_arch_find(arch);
    if (c->arch) return;
    rfi_arch_list(names, sizeof names);
    rfi_key_fail(k, RF_ERR_UNSUPPORTED, "'%.*s' is not supported (supported: %s)", RFI_STR(arch), names);
}

/* Rope scaling. A factor without a type means linear; rope.scale_linear is the old name of the factor. */
static void rfi_config_rope_scaling(rfi_key_reader *k, rfi_config *c) {
    rf_string type;
    double old_factor = 0;
    rfi_key_real(k, "rope.scaling.factor", 0, 0, 0, &c->rope.factor);
    rfi_key_real(k, "rope.scale_linear", 0, 0, 0, &old_factor);
    rfi_key_text(k, "rope.scaling.type", &type);
    if (k->result != RF_OK) return;
    if (c->rope.factor == 0) c->rope.factor = old_factor;
    if (c->rope.factor == 0) c->rope.factor = 1;
    if (rfi_str_equal(type, "none")) c->rope.factor = 1;
    else if (type.len == 0 || rfi_str_equal(type, "linear") || rfi_str_equal(type, "longrope"))
        c->rope.scaling = c->rope.factor == 1 ? RFI_ROPE_NONE : RFI_ROPE_LINEAR;
    else if (rfi_str_equal(type, "yarn")) c->rope.scaling = RFI_ROPE_YARN;
    else
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "'%.*s' is not supported (supported: none, linear, yarn, longrope)",
                     RFI_STR(type));
}

/* M-RoPE (arXiv 2409.12191): how many pairs each axis of a position has. */
static void rfi_config_rope_sections(rfi_key_reader *k, rfi_config *c) {
    const rf_kv *kv = &k->kv;
    c->rope_neox = c->arch->rope_neox;
    if (!c->arch->mrope || !rfi_key_read(k, "rope.dimension_sections", 0)) return;
    if (kv->type != RF_KV_ARRAY || kv->count == 0 || kv->count > 4)
        rfi_key_fail(k, RF_ERR_FORMAT, "want 1 to 4 numbers, found %llu", RFI_LLU(kv->count));
    for (uint32_t i = 0; k->result == RF_OK && i < kv->count; i++) {
        int64_t n = -1;
        if (rf_kv_int(kv, i, &n, NULL) != RF_OK || n < 0 || n > 1 << 14)
            rfi_key_fail(k, RF_ERR_FORMAT, "want integers from 0 to 16384, found %lld", (long long)n);
        c->rope_sections[i] = (uint32_t)n;
    }
    if (c->rope_sections[0] && c->rope_sections[1]) c->rope_neox = 1;
    else memset(c->rope_sections, 0, sizeof c->rope_sections);
}

static void rfi_config_rope(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key original = {"rope.scaling.original_context_length", 1, INT32_MAX, 0, 0};
    const double swa_base = (double)c->arch->swa_rope_base;
    rfi_key_real(k, "rope.freq_base", FLT_MIN, 10000.0, 0, &c->rope.base);
    rfi_config_rope_scaling(k, c);
    rfi_key_real(k, "rope.scaling.yarn_log_multiplier", 0, 0, 0, &c->yarn_log_multiplier);
    rfi_key_scale(k, "rope.scaling.attn_factor", 0, 0, &c->rope.magnitude);
    rfi_key_uint(k, &original, &c->rope_n_ctx_original);
    if (c->rope_n_ctx_original == 0) c->rope_n_ctx_original = c->n_ctx_train;
    c->yarn_beta_fast = 32;
    c->yarn_beta_slow = 1;
    if (c->arch->attn_temperature) {
        rfi_key_real(k, "rope.scaling.yarn_beta_fast", FLT_MIN, 32, 0, &c->yarn_beta_fast);
        rfi_key_real(k, "rope.scaling.yarn_beta_slow", FLT_MIN, 1, 0, &c->yarn_beta_slow);
    }
    rfi_config_rope_sections(k, c);
    const uint32_t swa_n_rot = c->swa_rope.n_rot; /* set by rfi_config_heads */
    c->rope.n_rot = c->n_rot;
    c->swa_rope = c->rope;
    c->swa_rope.n_rot = swa_n_rot;
    if (swa_base > 0) c->swa_rope.base = swa_base;
    if (swa_base > 0 || (c->rope.scaling == RFI_ROPE_YARN && !c->arch->swa_yarn)) /* for long contexts */
        c->swa_rope = (rfi_rope_config){c->swa_rope.base, 1, 0, RFI_ROPE_NONE, c->swa_rope.n_rot};
    if (c->arch->swa_period) rfi_key_real(k, "rope.freq_base_swa", FLT_MIN, c->swa_rope.base, 0, &c->swa_rope.base);
}

/* The layers with a sliding window: all but every n-th (0: all), or a list of booleans, one per layer. */
static void rfi_config_window(rfi_key_reader *k, rfi_config *c) {
    const rfi_uint_key window_key = {"attention.sliding_window", 0, INT32_MAX, c->arch->swa_window, 0},
                       period_key = {"attention.sliding_window_pattern", 0, ROCMFORGE_MAX_LAYERS, 0, 0};
    uint32_t window = 0, period = c->arch->swa_period;
    if (period == 0) return;
    rfi_key_uint(k, &window_key, &window);
    const int there = rfi_key_read(k, period_key.suffix, c->arch->swa_heads), list = there && k->kv.type == RF_KV_ARRAY;
    const rf_kv kv = k->kv;
    if (there && !list) rfi_key_uint(k, &period_key, &period);
    if (list && (kv.count != c->n_layers || kv.element_type != RF_KV_BOOL))
        rfi_key_fail(k, RF_ERR_FORMAT, "want a number, or %u truth values, one per layer", c->n_layers);
    for (uint32_t il = 0; k->result == RF_OK && window && il < c->n_layers; il++) {
        int64_t swa = period == 0 || il % period < period - 1;
        if (list) rf_kv_int(&kv, il, &swa, NULL);
        c->layers[il].swa = swa != 0;
        c->layers[il].window = swa ? window : 0;
        if (!swa && c->arch->swa_rope_only) c->layers[il].rope = 0;
    }
}

/* Scales, softcaps and slopes; 0 is none, as in llama.cpp. */
static void rfi_config_scales(rfi_key_reader *k, rfi_config *c) {
    const rfi_arch *arch = c->arch;
    if (arch->embed_sqrt) c->embedding_scale = sqrt((double)c->n_embd);
    if (arch->wide_layers == c->n_layers) c->attention_scale = 1 / sqrt((double)c->n_embd / c->layers[0].n_heads);
    c->alibi = (double)arch->alibi;
    if (arch->alibi_keys) {
        rfi_key_real(k, "attention.max_alibi_bias", FLT_MIN, 0, 1, &c->alibi);
        rfi_key_scale(k, "attention.clamp_kqv", 0, 0, &c->clamp);
    }
    if (arch->attn_scale > 0) c->attention_scale = (double)arch->attn_scale;
    if (arch->mla) { /* keys are rotated in part only, so yarn's magnitude applies to the scores */
        const double f = c->rope.scaling == RFI_ROPE_YARN ? fmax(1, c->rope.factor) : 1;
        const double magnitude = 1 + c->yarn_log_multiplier * log(f);
        c->attention_scale = magnitude * magnitude / sqrt(c->mla.head_dim);
    }
    if (arch->scale_keys) {
        rfi_key_scale(k, "embedding_scale", 0, 0, &c->embedding_scale);
        rfi_key_scale(k, "residual_scale", 0, 0, &c->residual_scale);
        rfi_key_scale(k, "attention.scale", 0, 0, &c->attention_scale);
    }
    if (arch->scale_keys || arch->logit_scale_multiplies) rfi_key_scale(k, "logit_scale", 0, 1, &c->logit_scale);
    if (arch->scale_keys && c->logit_scale != 0) c->logit_scale = 1 / c->logit_scale;
    if (arch->attn_softcap) rfi_key_scale(k, "attn_logit_softcapping", 50, 0, &c->attention_softcap);
    if (arch->attn_softcap || arch->final_softcap)
        rfi_key_scale(k, "final_logit_softcapping", arch->attn_softcap ? 30 : 0, 0, &c->logit_softcap);
    if (arch->attn_temperature) rfi_key_scale(k, "attention.temperature_scale", 0, 0, &c->temperature);
}

/* Vocabulary size: the token list counts; a file without a tokenizer may say vocab_size. */
static void rfi_config_vocab(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key vocab = {"vocab_size", 1, INT32_MAX, 0, 1};
    rfi_key_reader tokens = {.g = k->g, .err = k->err, .result = k->result};
    const rf_kv *kv = &tokens.kv;
    if (!rfi_key_read(&tokens, "tokenizer.ggml.tokens", 0)) {
        rfi_key_uint(k, &vocab, &c->n_vocab);
        return;
    }
    if (kv->type != RF_KV_ARRAY || kv->element_type != RF_KV_STRING || kv->count == 0 || kv->count > INT32_MAX)
        rfi_key_fail(&tokens, RF_ERR_FORMAT, "want an array of 1 to 2147483647 strings, found %llu x %s",
                     RFI_LLU(kv->count), rfi_kv_type_name(kv->element_type));
    k->result = tokens.result;
    c->n_vocab = (uint32_t)kv->count;
}

/* Gating of the experts, where keys of the file decide. */
static void rfi_config_gating(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key groups = {"expert_group_count", 0, RF_MAX_EXPERTS, 0, 0},
                              groups_used = {"expert_group_used_count", 0, RF_MAX_EXPERTS, 0, 0},
                              gating = {"expert_gating_func", 0, UINT32_MAX, 0, 0};
    rfi_moe_config *m = &c->moe;
    uint32_t function = 0, n_groups = 0;
    rfi_key_uint(k, &gating, &function);
    rfi_key_bool(k, "expert_weights_norm", c->moe.normalize, 0, &c->moe.normalize);
    rfi_key_real(k, "expert_weights_scale", 0, 0, 0, &c->moe.scale);
    rfi_key_uint(k, &groups, &n_groups);
    if (k->result != RF_OK) return;
    if (function > RFI_GATING_CHOSEN) {
        rfi_key_find(k, gating.suffix);
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "%u is not supported (supported: 1, 2, 3)", function);
    }
    if (function) m->gating = function;
    else if (c->arch->mla && c->n_vocab == 154880 && (c->n_blocks == 47 || c->n_blocks == 48))
        m->gating = RFI_GATING_SIGMOID; /* files of GLM-4.7-Flash do not say so */
    if (n_groups <= 1) return;
    m->n_groups = n_groups;
    rfi_key_uint(k, &groups_used, &m->n_groups_used);
    rfi_key_find(k, groups.suffix);
    if (!c->arch->moe->groups)
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "%u: groups of experts are not supported", n_groups);
    if (m->n_experts % n_groups || m->n_groups_used > n_groups ||
        m->n_experts / n_groups * m->n_groups_used < m->n_used)
        rfi_key_fail(k, RF_ERR_FORMAT, "%u of %u groups for %u of %u experts", m->n_groups_used, n_groups, m->n_used,
                     m->n_experts);
}

/* Experts: how many, how wide, how they are chosen. Products of these numbers stay below 2^31. */
static void rfi_config_experts(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key n_shared = {"expert_shared_count", 0, RF_MAX_EXPERTS, 0, 0},
                              shared_ff = {"expert_shared_feed_forward_length", 0, 1 << 24, 0, 0};
    const rfi_moe_arch *a = c->arch->moe;
    const rfi_uint_key n_experts = {"expert_count", !a->optional, RF_MAX_EXPERTS, 0, !a->optional};
    rfi_moe_config *m = &c->moe;
    uint32_t shared = 0;
    rfi_key_uint(k, &n_experts, &m->n_experts);
    if (k->result != RF_OK || m->n_experts == 0) return;
    const rfi_uint_key n_used = {"expert_used_count", 1, m->n_experts, 0, 1},
                       n_dense = {"leading_dense_block_count", 0, c->n_layers, 0, 0},
                       n_ff = {"expert_feed_forward_length", 1, 1 << 24, c->layers[0].n_ff, !a->n_ff_is_ff};
    m->gating = a->gating;
    m->normalize = a->normalize;
    rfi_key_uint(k, &n_used, &m->n_used);
    rfi_key_uint(k, &n_ff, &m->n_ff);
    if (a->dense_lead) rfi_key_uint(k, &n_dense, &m->n_dense);
    if (a->shared) rfi_key_uint(k, &n_shared, &shared);
    if (a->shared) rfi_key_uint(k, &shared_ff, &m->n_ff_shared);
    if (a->keys) rfi_config_gating(k, c);
    if (k->result != RF_OK) return;
    const uint64_t widest = rfi_max_u64(m->n_ff, c->n_embd), all_shared = (uint64_t)shared * m->n_ff;
    if (widest * m->n_experts > INT32_MAX || all_shared > INT32_MAX) {
        rfi_key_find(k, n_experts.suffix);
        rfi_key_fail(k, RF_ERR_FORMAT,
                     "%u experts of up to %llu rows, %u of them shared: at most 2147483647 rows in all", m->n_experts,
                     RFI_LLU(widest), shared);
    }
    if (m->n_ff_shared == 0) m->n_ff_shared = (uint32_t)all_shared;
}

/* What would change the graph and is not built: refused by name, never run wrong. */
static void rfi_config_refuse(rfi_key_reader *k, const rfi_config *c) {
    static const rfi_uint_key experts = {"expert_count", 0, UINT32_MAX, 0, 0};
    uint32_t n_experts = 0;
    int64_t causal = 1;
    if (!c->arch->moe) rfi_key_uint(k, &experts, &n_experts);
    if (n_experts)
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "%u: mixture of experts is not supported in this architecture", n_experts);
    if (rfi_key_read(k, "attention.causal", 0) && rf_kv_int(&k->kv, 0, &causal, NULL) == RF_OK && !causal)
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "false: attention without a causal mask is not supported");
}

/* What a graph may depend on: the keys that begin so. */
static const char *const rfi_graph_keys[] = {
    "activation.", "attention.", "attn_", "embedding_scale", "expert", "final_logit_", "hyper_connection.", "kda.",
    "logit_scale", "moe_", "ple.", "residual_scale", "rope.", "router_logit_", "shortconv.", "ssm.", "swiglu_",
    "use_parallel_residual"};

/* Values besides 0 that change nothing: llama.cpp saves every key that it knows. */
static const struct {
    const char *suffix;
    double value;
} rfi_neutral_keys[] = {
    {"attn_logit_softcapping", 50}, {"final_logit_softcapping", 30},     {"router_logit_softcapping", 30},
    {"expert_group_count", 1},      {"expert_group_used_count", 1},      {"expert_weights_scale", 1},
    {"expert_group_scale", 0.05f},  {"attention.rope_pattern", 1},       {"kda.gate_lower_bound", -INFINITY},
    {"activation.situ_beta", 1},    {"attention.indexer.kpool_select_tail", 1},
};

/* Keys that llama.cpp does not read either, in the named architectures or, where there are none, in all that do not
 * read them here: files have them, and run. Sizes are among them: tensors that do not fit them are refused. */
static const struct {
    const char *suffix, *archs;
} rfi_ignored_keys[] = {
    {"attention.group_norm_epsilon", NULL},
    {"attention.indexer.block_size", NULL},
    {"attention.indexer.head_count", NULL},
    {"attention.indexer.key_length", NULL},
    {"attention.key_length_mla", NULL},
    {"attention.key_length_swa", NULL},
    {"attention.kv_lora_rank", NULL},
    {"attention.layer_norm_epsilon", NULL},
    {"attention.layer_norm_rms_epsilon", NULL},
    {"attention.q_lora_rank", NULL},
    {"attention.sliding_window_pattern", NULL}, /* without a window */
    {"attention.temperature_length", NULL},
    {"attention.value_length_mla", NULL},
    {"attention.value_length_swa", NULL},
    {"expert_feed_forward_length", NULL},
    {"expert_shared_count", NULL},
    {"expert_shared_feed_forward_length", NULL},
    {"expert_used_count", NULL},
    {"rope.dimension_count_swa", NULL},
    {"rope.freq_base_swa", NULL},
    {"rope.scaling.finetuned", NULL},
    {"rope.scaling.yarn_attn_factor", NULL},
    {"rope.scaling.yarn_beta_fast", NULL},
    {"rope.scaling.yarn_beta_slow", NULL},
    {"rope.scaling.yarn_ext_factor", NULL},
    {"rope.section_order", NULL},
    {"attention.clamp_kqv", " bloom "},
    {"attention.max_alibi_bias", " bloom "},
    {"attention.scale", " llama gemma gemma2 gemma3 "},
    {"attention.sliding_window", " llama phi3 qwen2 qwen2moe qwen3 qwen3moe smollm3 starcoder2 "},
    {"embedding_scale", " llama "},
    {"expert_gating_func", " granitemoe llama olmoe qwen2moe qwen3moe gpt-oss "},
    {"expert_weights_norm", " granitemoe llama olmoe qwen2moe qwen3moe gpt-oss "},
    {"expert_weights_scale", " granitemoe llama olmoe qwen2moe qwen3moe gpt-oss "},
    {"logit_scale", " llama "},
    {"residual_scale", " llama "},
    {"use_parallel_residual", " falcon stablelm "},
};

static int rfi_key_is_of_graph(rf_string suffix) {
    for (uint32_t i = 0; i < RFI_COUNT(rfi_graph_keys); i++) {
        const size_t n = strlen(rfi_graph_keys[i]);
        if (suffix.len >= n && memcmp(suffix.data, rfi_graph_keys[i], n) == 0) return 1;
    }
    return 0;
}

static int rfi_key_is_ignored(const rfi_key_reader *k, rf_string suffix) {
    char name[64];
    snprintf(name, sizeof name, " %s ", k->arch->name);
    for (uint32_t i = 0; i < RFI_COUNT(rfi_ignored_keys); i++)
        if (rfi_str_equal(suffix, rfi_ignored_keys[i].suffix))
            return !rfi_ignored_keys[i].archs || strstr(rfi_ignored_keys[i].archs, name);
    return 0;
}

/* Whether all values are 0, or what changes nothing. */
static int rfi_key_is_neutral(const rf_kv *kv, rf_string suffix) {
    double neutral = 0, v = 0;
    for (uint32_t i = 0; i < RFI_COUNT(rfi_neutral_keys); i++)
        if (rfi_str_equal(suffix, rfi_neutral_keys[i].suffix)) neutral = rfi_neutral_keys[i].value;
    if (kv->element_type == RF_KV_STRING) return 0;
    for (uint64_t i = 0; i < kv->count; i++) {
        int64_t truth = 0;
        if (kv->element_type == RF_KV_BOOL) rf_kv_int(kv, i, &truth, NULL), v = (double)truth;
        else rf_kv_real(kv, i, &v, NULL);
        if (!(v >= 0 && v <= 0) && !(v >= neutral && v <= neutral)) return 0;
    }
    return 1;
}

/* Refuse keys that the graph may depend on and that nothing has read: never run wrong without a word. */
static void rfi_config_refuse_unread(rfi_key_reader *k) {
    const uint64_t n = rf_gguf_get_info(k->g).n_kv, n_arch = strlen(k->arch->name);
    for (uint64_t i = 0; k->result == RF_OK && i < n; i++) {
        rf_kv kv;
        if (rf_gguf_get_kv(k->g, i, &kv, NULL) != RF_OK || kv.key.len <= n_arch || kv.key.data[n_arch] != '.' ||
            memcmp(kv.key.data, k->arch->name, n_arch) != 0)
            continue;
        const rf_string suffix = {kv.key.data + n_arch + 1, kv.key.len - n_arch - 1};
        if (!rfi_key_is_of_graph(suffix) || rfi_key_was_found(k, &kv) || rfi_key_is_neutral(&kv, suffix) ||
            rfi_key_is_ignored(k, suffix))
            continue;
        k->result = rfi_fail(k->err, RF_ERR_UNSUPPORTED, kv.where, "%s: %.*s at byte %llu: this key of a %s model is "
                             "not supported, and it would change the answer", rfi_gguf_path(k->g), RFI_STR(kv.key),
                             RFI_LLU(kv.where), k->arch->name);
    }
}

/* Every full_attention_interval-th layer has attention, unless a list says which layers are recurrent. */
static void rfi_config_delta_layers(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key interval_key = {"full_attention_interval", 1, ROCMFORGE_MAX_LAYERS, 4, 0};
    uint32_t interval = 0;
    rfi_key_uint(k, &interval_key, &interval);
    const int list = rfi_key_read(k, "attention.recurrent_layers", 0);
    const rf_kv *kv = &k->kv;
    if (list && (kv->type != RF_KV_ARRAY || kv->count != c->n_blocks || kv->element_type != RF_KV_BOOL))
        rfi_key_fail(k, RF_ERR_FORMAT, "want %u truth values, one per layer", c->n_blocks);
    for (uint32_t il = 0; k->result == RF_OK && il < c->n_layers; il++) {
        int64_t recurrent = (il + 1) % interval != 0;
        if (list) rf_kv_int(kv, il, &recurrent, NULL);
        c->layers[il].recurrent = recurrent != 0;
    }
}

static void rfi_config_recurrent(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key l_cache = {"shortconv.l_cache", 2, RF_MAX_TAPS, 0, 1},
                              kernel = {"ssm.conv_kernel", 2, RF_MAX_TAPS, 0, 1},
                              state = {"ssm.state_size", 1, 1 << 10, 0, 1},
                              groups = {"ssm.group_count", 1, 1 << 10, 0, 1},
                              heads = {"ssm.time_step_rank", 1, 1 << 10, 0, 1},
                              inner = {"ssm.inner_size", 1, 1 << 20, 0, 1};
    rfi_recurrent_config *t = &c->recurrent;
    uint32_t n_inner = 0;
    t->kind = c->arch->recurrent->kind;
    if (t->kind == RFI_SHORT_CONV) {
        rfi_key_uint(k, &l_cache, &t->n_taps);
        return;
    }
    rfi_key_uint(k, &kernel, &t->n_taps);
    rfi_key_uint(k, &state, &t->head_dim);
    rfi_key_uint(k, &groups, &t->n_k_heads);
    rfi_key_uint(k, &heads, &t->n_heads);
    rfi_key_uint(k, &inner, &n_inner);
    if (k->result != RF_OK) return;
    t->head_dim_v = n_inner / t->n_heads;
    t->n_conv = 2 * t->n_k_heads * t->head_dim + n_inner;
    rfi_key_find(k, heads.suffix);
    if (n_inner % t->n_heads || t->n_heads % t->n_k_heads)
        rfi_key_fail(k, RF_ERR_FORMAT,
                     "want a divisor of ssm.inner_size %u and a multiple of ssm.group_count %u, found %u", n_inner,
                     t->n_k_heads, t->n_heads);
    rfi_key_find(k, inner.suffix);
    if (t->head_dim_v > 1 << 10)
        rfi_key_fail(k, RF_ERR_FORMAT, "%u heads of %u values: at most 1024", t->n_heads, t->head_dim_v);
    rfi_config_delta_layers(k, c);
}

/* Heads, KV heads and FFN width of every layer; keys are numbers or arrays. */
static void rfi_config_layers(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key heads = {"attention.head_count", 1, 1 << 14, 0, 1},
                              ff = {"feed_forward_length", 1, 1 << 24, 0, 1};
    int rotate = !c->arch->learned_positions && c->arch->alibi == 0;
    if (c->arch->rope_switch) rfi_key_bool(k, "rope.scaling.finetuned", 1, 0, &rotate);
    for (uint32_t il = 0; k->result == RF_OK && il < c->n_layers; il++) {
        rfi_layer_config *l = &c->layers[il];
        l->rope = rotate && !(c->arch->no_rope_period && (il + 1) % c->arch->no_rope_period == 0);
        rfi_key_uint_of(k, &heads, il, c->n_blocks, &l->n_heads);
        const int conv = c->arch->recurrent && c->arch->recurrent->kind == RFI_SHORT_CONV; /* no heads: recurrent */
        const rfi_uint_key kv_heads = {"attention.head_count_kv", !conv, 1 << 14, l->n_heads, (uint32_t)conv};
        rfi_key_uint_of(k, &kv_heads, il, c->n_blocks, &l->n_kv_heads);
        rfi_key_uint_of(k, &ff, il, c->n_blocks, &l->n_ff);
        l->recurrent = l->n_kv_heads == 0;
        if (!l->recurrent && l->n_heads % l->n_kv_heads) {
            rfi_key_find(k, kv_heads.suffix);
            rfi_key_fail(k, RF_ERR_FORMAT, "layer %u has %u heads on %u key/value heads, want a divisor", il,
                         l->n_heads, l->n_kv_heads);
        }
    }
}

/* Head sizes of every layer; SWA layers may have their own. */
static void rfi_config_swa_heads(rfi_key_reader *k, rfi_config *c) {
    const rfi_uint_key key_length = {"attention.key_length_swa", 1, 1 << 14, c->head_dim, 0},
                       value_length = {"attention.value_length_swa", 1, 1 << 14, c->head_dim_v, 0};
    uint32_t dim = c->head_dim, dim_v = c->head_dim_v;
    c->swa_rope.n_rot = c->n_rot;
    if (c->arch->swa_heads) {
        rfi_key_uint(k, &key_length, &dim);
        rfi_key_uint(k, &value_length, &dim_v);
        const rfi_uint_key n_rot = {"rope.dimension_count_swa", 2, dim, dim & ~1u, 0};
        rfi_key_uint(k, &n_rot, &c->swa_rope.n_rot);
        if (c->swa_rope.n_rot % 2)
            rfi_key_fail(k, RF_ERR_FORMAT, "want an even number, found %u", c->swa_rope.n_rot);
    }
    for (uint32_t il = 0; il < c->n_layers; il++) {
        rfi_layer_config *l = &c->layers[il];
        l->head_dim = l->swa ? dim : c->head_dim;
        l->head_dim_v = l->swa ? dim_v : c->head_dim_v;
        l->cache_layer = il;
    }
}

/* Embedding rows for every layer, and layers that share a KV cache: they read that of the last layer of their kind
 * that has one. */
static void rfi_config_layer_inputs(rfi_key_reader *k, rfi_config *c) {
    const rfi_uint_key input = {"embedding_length_per_layer_input", 0, 1 << 16, 0, 0},
                       shared = {"attention.shared_kv_layers", 0, c->n_layers - 1, 0, 0};
    uint32_t n_shared = 0;
    rfi_key_uint(k, &input, &c->n_layer_input);
    rfi_key_uint(k, &shared, &n_shared);
    const uint32_t from = c->n_layers - n_shared;
    for (uint32_t il = from; k->result == RF_OK && il < c->n_layers; il++) {
        rfi_layer_config *l = &c->layers[il];
        const uint32_t back = l->swa ? 2 : 1;
        const rfi_layer_config *of = from >= back ? &c->layers[from - back] : NULL;
        if (!of || of->swa != l->swa || l->n_heads % of->n_kv_heads) {
            rfi_key_fail(k, RF_ERR_FORMAT, "layer %u finds no earlier layer of its kind whose keys it could read", il);
            return;
        }
        l->cache_layer = from - back;
        l->n_kv_heads = of->n_kv_heads;
    }
}

/* Head sizes, and how much of a head is rotated. */
static void rfi_config_heads(rfi_key_reader *k, rfi_config *c) {
    uint32_t n_heads = c->layers[0].n_heads;
    uint32_t by_width = c->n_embd % n_heads ? 0 : c->n_embd / n_heads; /* 0: then the file must say */
    const rfi_uint_key key_length = {"attention.key_length", 1, 1 << 14, by_width, 0};
    rfi_key_uint(k, &key_length, &c->head_dim);
    if (c->head_dim == 0) {
        rfi_key_find(k, "attention.head_count");
        rfi_key_fail(k, RF_ERR_FORMAT, "%u heads on %s.embedding_length %u, want a divisor or %s.attention.key_length",
                     n_heads, c->arch->name, c->n_embd, c->arch->name);
    }
    const rfi_uint_key value_length = {"attention.value_length", 1, 1 << 14, by_width ? by_width : c->head_dim, 0};
    rfi_key_uint(k, &value_length, &c->head_dim_v);
    const rfi_uint_key n_rot = {"rope.dimension_count", 2, c->head_dim, c->head_dim & ~1u, 0};
    rfi_key_uint(k, &n_rot, &c->n_rot);
    if (c->n_rot % 2) rfi_key_fail(k, RF_ERR_FORMAT, "want an even number, found %u", c->n_rot);
    rfi_key_find(k, value_length.suffix);
    if (c->recurrent.kind == RFI_DELTA_NET && c->head_dim_v != c->head_dim) /* a gate for each value */
        rfi_key_fail(k, RF_ERR_FORMAT, "want attention.key_length %u, found %u", c->head_dim, c->head_dim_v);
    rfi_config_swa_heads(k, c);
}

/* MLA. Older files, with attn_kv_b, give the sizes before compression and as many KV heads as heads. */
static void rfi_config_mla(rfi_key_reader *k, rfi_config *c) {
    static const rfi_uint_key rank = {"attention.kv_lora_rank", 1, 1 << 14, 0, 1},
                              q_lora_rank = {"attention.q_lora_rank", 0, 1 << 20, 0, 0};
    rfi_mla_config *l = &c->mla;
    rf_tensor_info t;
    l->joined = rf_gguf_find_tensor(k->g, "blk.0.attn_kv_b.weight", &t, NULL) == RF_OK &&
                rf_gguf_find_tensor(k->g, "blk.0.attn_k_b.weight", &t, NULL) != RF_OK;
    const rfi_uint_key key_length = {l->joined ? "attention.key_length" : "attention.key_length_mla", c->n_rot + 1,
                                     1 << 14, 0, 1},
                       value_length = {l->joined ? "attention.value_length" : "attention.value_length_mla", 1, 1 << 14,
                                       0, 1};
    rfi_key_uint(k, &rank, &l->kv_lora_rank);
    rfi_key_uint(k, &q_lora_rank, &l->q_lora_rank);
    rfi_key_uint(k, &key_length, &l->head_dim);
    rfi_key_uint(k, &value_length, &l->head_dim_v);
    if (l->joined) c->head_dim = l->kv_lora_rank + c->n_rot, c->head_dim_v = l->kv_lora_rank;
    rfi_key_find(k, rank.suffix);
    if (c->head_dim != l->kv_lora_rank + c->n_rot || c->head_dim_v != l->kv_lora_rank)
        rfi_key_fail(k, RF_ERR_FORMAT,
                     "%u, and %u rotated values, want attention.key_length %u and value_length %u, found %u and %u",
                     l->kv_lora_rank, c->n_rot, l->kv_lora_rank + c->n_rot, l->kv_lora_rank, c->head_dim,
                     c->head_dim_v);
    for (uint32_t il = 0; il < c->n_layers; il++) {
        rfi_layer_config *layer = &c->layers[il];
        const uint32_t want = l->joined ? layer->n_heads : 1;
        if (layer->n_kv_heads != want)
            rfi_key_fail(k, RF_ERR_FORMAT, "%s, want attention.head_count_kv %u, found %u in layer %u",
                         l->joined ? "attn_kv_b" : "one key of all heads", want, layer->n_kv_heads, il);
        layer->n_kv_heads = 1;
        layer->head_dim = c->head_dim;
        layer->head_dim_v = c->head_dim_v;
    }
}

/* Read everything. c->layers is allocated with the file's allocator, also on failure; the caller frees it. */
static rf_result rfi_config_read(const rf_gguf *g, rfi_config *c, rf_error *err) {
    static const rfi_uint_key n_layers = {"block_count", 1, ROCMFORGE_MAX_LAYERS, 0, 1},
                              n_embd = {"embedding_length", 1, 1 << 20, 0, 1},
                              n_ctx = {"context_length", 1, UINT32_MAX, 0, 1};
    rfi_key_reader keys = {.g = g, .err = err}, *k = &keys;
    uint32_t n_mtp = 0;
    memset(c, 0, sizeof *c);
    rfi_config_arch(k, c);
    rfi_key_uint(k, &n_layers, &c->n_blocks);
    if (k->result != RF_OK) return k->result;
    const rfi_arch *arch = c->arch;
    const rfi_uint_key mtp = {"nextn_predict_layers", 0, c->n_blocks - 1, 0, 0};
    if (arch->moe || arch->recurrent) rfi_key_uint(k, &mtp, &n_mtp);
    c->n_layers = c->n_blocks - n_mtp;
    rfi_key_uint(k, &n_embd, &c->n_embd);
    rfi_key_uint(k, &n_ctx, &c->n_ctx_train);
    rfi_key_real(k, arch->layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", 0, 0, 1,
                 &c->norm_eps);
    c->parallel = arch->parallel;
    if (arch->parallel_key) rfi_key_bool(k, "use_parallel_residual", 0, 1, &c->parallel);
    rfi_config_vocab(k, c);
    rfi_config_refuse(k, c);
    if (k->result != RF_OK) return k->result;
    if (c->n_ctx_train > INT32_MAX) c->n_ctx_train = INT32_MAX;
    if (arch->learned_positions) c->n_positions = c->n_ctx_train;
    c->layers = (rfi_layer_config *)rfi_alloc(rfi_gguf_allocator(g), c->n_layers, sizeof *c->layers,
                                              "layer hyperparameters", err);
    if (!c->layers) return RF_ERR_MEMORY;
    rfi_config_layers(k, c);
    rfi_config_window(k, c);
    if (arch->moe) rfi_config_experts(k, c);
    if (arch->recurrent) rfi_config_recurrent(k, c);
    if (k->result != RF_OK) return k->result;

    rfi_config_heads(k, c);
    if (k->result == RF_OK && arch->mla) rfi_config_mla(k, c);
    if (k->result == RF_OK && arch->layer_inputs) rfi_config_layer_inputs(k, c);
    rfi_config_rope(k, c);
    rfi_config_scales(k, c);
    if (k->result == RF_OK) rfi_config_refuse_unread(k);
    return k->result;
}

/* ==== 9 Plan ============================================================================================ >>plan
 * The model as data: emitters append ops, nothing runs. Weights are found by name here and their shapes checked, so
 * that every fault of a file's tensor directory is found before a tensor is read. T is the rows of a step, L those that
 * want logits. */

/* A bound weight: its slot; of a matrix also the first row used (a fused tensor holds several matrices) and the slots
 * of its bias and of the factor of its products. RF_NONE: absent. */
typedef struct rfi_weight {
    uint32_t slot, row, bias, factor;
} rfi_weight;
static const rfi_weight rfi_no_weight = {RF_NONE, 0, RF_NONE, RF_NONE};

typedef struct rfi_array {
    void *items;
    uint32_t n, capacity;
} rfi_array;

typedef struct rfi_builder {
    const rf_gguf *g;
    const rf_allocator *alloc;
    const rfi_config *c;
    rfi_array ops, buffers, states, weights, tables;
    rf_error *err;
    rf_result result; /* the first failure; after it nothing is appended               */
    rf_op dropped;    /* emitters write here after a failure, and so need no checks    */
    int32_t layer;    /* being emitted                                                 */
    uint32_t logits, argmax; /* buffers                                                */
} rfi_builder;

/* Append room for `more` items, growing by doubling; NULL once the builder failed. */
static void *rfi_array_push(rfi_builder *b, rfi_array *a, uint32_t more, size_t item_bytes) {
    if (b->result != RF_OK) return NULL;
    if (!a->items || a->capacity - a->n < more) {
        uint32_t capacity = (a->n + more) * 2;
        void *items = rfi_alloc(b->alloc, capacity, item_bytes, "the plan", b->err);
        if (!items) {
            b->result = RF_ERR_MEMORY;
            return NULL;
        }
        if (a->n) memcpy(items, a->items, (size_t)a->n * item_bytes);
        rfi_free(b->alloc, a->items);
        a->items = items;
        a->capacity = capacity;
    }
    void *first = (char *)a->items + (size_t)a->n * item_bytes;
    a->n += more;
    return first;
}

/* ---- weights ---- */

/* "blk.<layer>.<name>", or the name alone outside the layers */
static void rfi_weight_name(const rfi_builder *b, const char *name, char *out, size_t capacity) {
    if (b->layer >= 0 && b->layer < (int32_t)b->c->n_layers)
        snprintf(out, capacity, "blk.%d.%s", (int)b->layer, name);
    else snprintf(out, capacity, "%s", name);
}

static int rfi_has(const rfi_builder *b, const char *name) {
    char full[64];
    rf_tensor_info t;
    rfi_weight_name(b, name, full, sizeof full);
    return rf_gguf_find_tensor(b->g, full, &t, NULL) == RF_OK;
}

/* Fail if a tensor is there that would change the graph in a way that is not built. */
static void rfi_refuse(rfi_builder *b, const char *name) {
    if (b->result == RF_OK && rfi_has(b, name))
        b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, 0, "%s: blk.%d.%s: this tensor of a %s model is not supported",
                             rfi_gguf_path(b->g), (int)b->layer, name, b->c->arch->name);
}

/* Check shape and type: a matrix [n_rows, n_in]; with n_experts as many of them, or as many vectors if n_rows is 0. */
static void rfi_bind_check(rfi_builder *b, const char *name, const rf_tensor_info *t, uint64_t n_in,
                           uint64_t n_rows, uint64_t n_experts) {
    rf_type_info type = rf_type_get(t->type);
    const char *path = rfi_gguf_path(b->g);
    unsigned long long at = RFI_LLU(t->where);
    int is_float = t->type == RF_TYPE_F32 || t->type == RF_TYPE_F16 || t->type == RF_TYPE_BF16;
    const int vectors = n_rows == 1 || n_rows == 0;
    const uint64_t ne1 = n_rows ? n_rows : n_experts, ne2 = n_rows && n_experts ? n_experts : 1;
    if (t->ne[0] != n_in || t->ne[1] != ne1 || t->ne[2] != ne2 || t->ne[3] != 1)
        b->result = rfi_fail(b->err, RF_ERR_FORMAT, t->where,
                             "%s: %s at byte %llu: want ne={%llu, %llu, %llu}, found %s ne={%llu, %llu, %llu, %llu}",
                             path, name, at, RFI_LLU(n_in), RFI_LLU(ne1), RFI_LLU(ne2), type.name, RFI_LLU(t->ne[0]),
                             RFI_LLU(t->ne[1]), RFI_LLU(t->ne[2]), RFI_LLU(t->ne[3]));
    else if (!type.runs)
        b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, t->where,
                             "%s: %s at byte %llu: tensor type %s is not supported", path, name, at, type.name);
    else if (vectors && !is_float)
        b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, t->where,
                             "%s: %s at byte %llu: want a vector of f32, f16 or bf16, found %s", path, name, at,
                             type.name);
}

/* What rfi_bind and rfi_bind_experts look for. */
typedef struct rfi_wanted {
    const char *name;
    uint64_t n_in, n_rows, n_experts; /* as rfi_bind_check */
    int optional;
    const char *also; /* an alternative name, for the message; or NULL */
    int joined;       /* all matrices make one weight                  */
} rfi_wanted;

static rfi_weight rfi_bind_wanted(rfi_builder *b, const rfi_wanted *want) {
    const char *also = want->also;
    char full[64];
    rf_tensor_info t;
    if (b->result != RF_OK) return rfi_no_weight;
    rfi_weight_name(b, want->name, full, sizeof full);
    if (rf_gguf_find_tensor(b->g, full, &t, NULL) != RF_OK) {
        if (!want->optional)
            b->result = rfi_fail(b->err, RF_ERR_NOT_FOUND, 0, "%s: tensor %s is missing (tried: %s%s%s)",
                                 rfi_gguf_path(b->g), full, full, also ? ", " : "", also ? also : "");
        return rfi_no_weight;
    }
    rfi_bind_check(b, full, &t, want->n_in, want->n_rows, want->n_experts);
    if (b->result != RF_OK) return rfi_no_weight;
    const int matrices = want->n_rows && want->n_experts && !want->joined;
    const uint32_t n = matrices ? (uint32_t)want->n_experts : 1;
    const uint64_t in_one = want->joined ? want->n_experts : 1;
    rf_plan_weight *w = (rf_plan_weight *)rfi_array_push(b, &b->weights, n, sizeof *w);
    for (uint32_t i = 0; w && i < n; i++) {
        memset(&w[i], 0, sizeof w[i]);
        if (matrices) snprintf(w[i].name, sizeof w[i].name, "%.56s:%u", full, i);
        else snprintf(w[i].name, sizeof w[i].name, "%s", full);
        w[i].tensor = t.index;
        w[i].type = t.type;
        w[i].n_in = (uint32_t)want->n_in;
        w[i].n_rows = (uint32_t)(want->n_rows ? want->n_rows * in_one : want->n_experts);
        w[i].layer = b->layer;
        w[i].size_bytes = t.size_bytes / n;
        w[i].n_experts = matrices ? n : 0;
        w[i].expert = i;
    }
    return w ? (rfi_weight){b->weights.n - n, 0, RF_NONE, RF_NONE} : rfi_no_weight;
}

/* Bind a tensor [n_rows, n_in] (a vector: n_rows 1). Absent: RF_NONE, and an error unless optional. */
static rfi_weight rfi_bind(rfi_builder *b, const char *name, uint64_t n_in, uint64_t n_rows, int optional,
                           const char *also) {
    const rfi_wanted want = {name, n_in, n_rows, 0, optional, also, 0};
    return rfi_bind_wanted(b, &want);
}

/* Bind a vector of n floats; returns its slot. */
static uint32_t rfi_bind_vector(rfi_builder *b, const char *name, uint64_t n) {
    return rfi_bind(b, name, n, 1, 0, NULL).slot;
}
static uint32_t rfi_bind_optional(rfi_builder *b, const char *name, uint64_t n) {
    return rfi_bind(b, name, n, 1, 1, NULL).slot;
}

/* NAME.weight, and NAME.scale and NAME.bias if they are there. */
static rfi_weight rfi_bind_matrix(rfi_builder *b, const char *name, uint64_t n_in, uint64_t n_rows, const char *also) {
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    rfi_weight w = rfi_bind(b, full, n_in, n_rows, 0, also);
    snprintf(full, sizeof full, "%s.scale", name);
    w.factor = rfi_bind_optional(b, full, 1);
    snprintf(full, sizeof full, "%s.bias", name);
    w.bias = rfi_bind_optional(b, full, n_rows);
    return w;
}

/* The matrices of all experts, [n_experts, n_rows, n_in]; n_rows 0: their vectors [n_experts, n_in], optional. */
static rfi_weight rfi_bind_experts(rfi_builder *b, const char *name, uint64_t n_in, uint64_t n_rows) {
    const rfi_wanted want = {name, n_in, n_rows, b->c->moe.n_experts, n_rows == 0, NULL, 0};
    return rfi_bind_wanted(b, &want);
}

/* NAME.weight with a matrix per head, [n_heads, n_rows, n_in], as one matrix of n_heads * n_rows rows. */
static rfi_weight rfi_bind_heads(rfi_builder *b, const char *name, uint64_t n_in, uint64_t n_rows, uint64_t n_heads) {
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    const rfi_wanted want = {full, n_in, n_rows, n_heads, 0, NULL, 1};
    char scale[64];
    snprintf(scale, sizeof scale, "%s.scale", name);
    if (b->result == RF_OK && rfi_has(b, scale))
        b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, 0, "%s: blk.%d.%s: factors of heads are not supported",
                             rfi_gguf_path(b->g), (int)b->layer, scale);
    return rfi_bind_wanted(b, &want);
}

/* ---- buffers, states, ops ---- */

static uint32_t rfi_state(rfi_builder *b, const rfi_layer_config *l) {
    rf_plan_state *p = (rf_plan_state *)rfi_array_push(b, &b->states, 1, sizeof *p);
    if (!p) return 0;
    *p = (rf_plan_state){(uint32_t)b->layer, l->n_kv_heads, l->head_dim,
                         b->c->arch->mla ? 0 : l->head_dim_v, l->window, 0};
    return b->states.n - 1;
}

static uint32_t rfi_recurrent_state(rfi_builder *b, uint64_t width) {
    rf_plan_state *p = (rf_plan_state *)rfi_array_push(b, &b->states, 1, sizeof *p);
    if (!p) return 0;
    *p = (rf_plan_state){.layer = (uint32_t)b->layer, .width = (uint32_t)width};
    return b->states.n - 1;
}

/* Append an op from buffer `in` to buffer `out`, with the rows of `out`; all else is 0 or RF_NONE. Valid until the next
 * op is appended. */
static rf_op *rfi_op(rfi_builder *b, uint32_t kind, uint32_t out, uint32_t in) {
    rf_op *op = (rf_op *)rfi_array_push(b, &b->ops, 1, sizeof *op);
    const int is_logits =
        op && out != RF_NONE && ((const rf_plan_buffer *)b->buffers.items)[out].rows == RF_ROWS_LOGITS;
    if (!op) op = &b->dropped;
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->rows = is_logits ? RF_ROWS_LOGITS : RF_ROWS_TOKENS;
    op->layer = b->layer;
    op->in = in;
    op->out = out;
    op->in2 = op->in3 = op->state = op->weight = op->bias = op->factor = RF_NONE;
    return op;
}

/* out = norm(in) of n_groups groups of n values, by NAME.weight and, of a LayerNorm, NAME.bias. Flags
 * RF_OP_ACCUMULATE: +=; RF_OP_EACH_HEAD: NAME.weight has a vector for each group, and there is no bias. */
static void rfi_emit_norm(rfi_builder *b, uint32_t out, uint32_t in, const char *name, uint64_t n, uint32_t n_groups,
                          uint32_t flags) {
    const int each = (flags & RF_OP_EACH_HEAD) != 0, center = b->c->arch->layer_norm;
    char weight[64], bias[64];
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    const rfi_wanted vectors = {weight, n, 0, n_groups, 0, NULL, 0};
    const uint32_t w = each ? rfi_bind_wanted(b, &vectors).slot : rfi_bind_vector(b, weight, n),
                   w_bias = center && !each ? rfi_bind_optional(b, bias, n) : RF_NONE;
    rf_op *op = rfi_op(b, RF_OP_RMS_NORM, out, in);
    op->flags = flags | (center ? RF_OP_CENTER : 0);
    op->weight = w;
    op->bias = w_bias;
    op->norm = (rf_norm_params){n_groups, (uint32_t)n, (float)b->c->norm_eps};
}

/* out[rows, n_out] = in[rows, n_in] W^T + bias; flags RF_OP_ACCUMULATE: +=. Returns the op, for its scale and so on. */
static rf_op *rfi_emit_matmul(rfi_builder *b, uint32_t out, uint32_t in, rfi_weight w, uint32_t n_out, uint32_t flags) {
    rf_op *op = rfi_op(b, RF_OP_MATMUL, out, in);
    op->flags = flags;
    op->weight = w.slot;
    op->bias = w.bias;
    op->factor = w.factor;
    op->matmul.n_in = b->result == RF_OK ? ((const rf_plan_weight *)b->weights.items)[w.slot].n_in : 0;
    op->matmul.n_out = n_out;
    op->matmul.first_row = w.row;
    return op;
}

/* The rope of some layers. */
typedef struct rfi_rope {
    uint32_t table;
    float magnitude;
    uint32_t n_rot;
    uint32_t freqs, long_freqs; /* slots of the frequency factors; long_freqs: for long contexts */
} rfi_rope;

static rf_op *rfi_emit_rope(rfi_builder *b, uint32_t x, uint32_t n_heads, uint32_t head_dim, const rfi_rope *rope) {
    rf_op *op = rfi_op(b, RF_OP_ROPE, x, x);
    op->flags = b->c->rope_neox ? RF_OP_NEOX : 0;
    op->weight = rope->freqs;
    op->factor = rope->long_freqs;
    op->rope = (rf_rope_params){n_heads, head_dim, rope->n_rot, rope->table, rope->magnitude};
    return op;
}

/* Whether pair i rotates by the position. The axes of a text's position are all the same but the fourth, which is 0. */
static int rfi_rope_rotates(const rfi_config *c, uint32_t i) {
    const uint32_t *s = c->rope_sections, all = s[0] + s[1] + s[2] + s[3];
    if (all == 0) return 1;
    const uint32_t at = i % all;
    return c->arch->mrope == 2 ? at < 3 * s[at % 3] : at < all - s[3];
}

/* Make the table: angle per position of rope pair i, base^(-2i/n_rot), scaled. YaRN (arXiv 2309.00071) divides the
 * frequency of slow pairs by the factor, leaves fast pairs and blends between them. */
static rfi_rope rfi_rope_table(rfi_builder *b, const rfi_rope_config *r) {
    const rfi_config *c = b->c;
    const double pi = 3.14159265358979323846, n_rot = r->n_rot, f = r->factor;
    rfi_rope rope = {b->tables.n, r->magnitude != 0 ? (float)r->magnitude : 1, r->n_rot, RF_NONE, RF_NONE};
    float *table = (float *)rfi_array_push(b, &b->tables, r->n_rot / 2, sizeof *table);
    int yarn = r->scaling == RFI_ROPE_YARN && f > 0;
    double lo = 0, hi = 0;
    if (!table) return rope;
    if (yarn) {
        double n0 = c->rope_n_ctx_original, per = n_rot / (2 * log(r->base));
        lo = fmax(0, floor(per * log(n0 / (2 * pi * c->yarn_beta_fast))));
        hi = fmin(n_rot - 1, ceil(per * log(n0 / (2 * pi * c->yarn_beta_slow))));
    }
    for (uint32_t i = 0; i < r->n_rot / 2; i++) {
        double theta = pow(r->base, -2.0 * i / n_rot), keep = 1;
        if (r->scaling == RFI_ROPE_LINEAR) keep = 1 / f;
        if (yarn) {
            double fast = 1 - fmin(1, fmax(0, (i - lo) / fmax(0.001, hi - lo)));
            keep = (1 - fast) / f + fast;
        }
        table[i] = rfi_rope_rotates(c, i) ? (float)(theta * keep) : 0;
    }
    if (yarn && f > 1 && !c->arch->mla)
        rope.magnitude *= (float)((0.1 * log(f) + 1) / (0.1 * c->yarn_log_multiplier * log(f) + 1));
    return rope;
}

/* ---- the decoder ---- */

/* The decoder's buffers: X(name, rows). How wide they are follows from the ops: rfi_size_buffers. */
#define RFI_BUFFERS(X) \
    X(x, TOKENS)           /* [n_embd] residual stream                                               */ \
    X(xn, TOKENS)          /* [n_embd] its norm                                                      */ \
    X(xn2, TOKENS)         /* [n_embd] the FFN's norm, where it is parallel to attention             */ \
    X(y, TOKENS)           /* [n_embd] what is normed before it is added to x                        */ \
    X(q, TOKENS)           /* [n_heads, head_dim]                                                    */ \
    X(k, TOKENS)           /* [n_kv_heads, head_dim]                                                 */ \
    X(v, TOKENS)           /* [n_kv_heads, head_dim_v]                                               */ \
    X(att, TOKENS)         /* [n_heads, head_dim_v]                                                  */ \
    X(q_lora, TOKENS)      /* [q_lora_rank] MLA: compressed queries                                  */ \
    X(mla_q, TOKENS)       /* [n_heads, head_dim] MLA: queries against compressed keys               */ \
    X(mla_v, TOKENS)       /* [n_heads, head_dim_v] MLA: attention's sums of compressed values       */ \
    X(gate, TOKENS)        /* [n_ff]                                                                 */ \
    X(up, TOKENS)          /* [n_ff]                                                                 */ \
    X(router, TOKENS)      /* [n_experts] logits                                                     */ \
    X(route, TOKENS)       /* [2, n_used] ids and weights of the chosen experts                      */ \
    X(gates, TOKENS)       /* [n_used, n_ff]                                                         */ \
    X(ups, TOKENS)         /* [n_used, n_ff]                                                         */ \
    X(downs, TOKENS)       /* [n_used, n_embd]                                                       */ \
    X(z, TOKENS)           /* [n_embd] the experts' sum, where a dense FFN is beside them            */ \
    X(inputs, TOKENS)      /* [n_layers, n_layer_input]                                              */ \
    X(input_parts, TOKENS) /* [n_layers, n_layer_input]                                              */ \
    X(input_gate, TOKENS)  /* [n_layer_input]                                                        */ \
    X(share, TOKENS)       /* [1] gate of the shared experts, before its sigmoid                     */ \
    X(qg, TOKENS)          /* [n_heads, 2, head_dim] queries and the gates of attention              */ \
    X(q_gate, TOKENS)      /* [n_heads, head_dim] those gates                                        */ \
    X(conv_b, TOKENS)      /* [n_embd] short convolution                                             */ \
    X(conv_c, TOKENS)      /* [n_embd]                                                               */ \
    X(conv_x, TOKENS)      /* [n_embd]                                                               */ \
    X(mixed, TOKENS)       /* [q | k | v] delta net                                                  */ \
    X(delta_in, TOKENS)    /* [n_k_heads, q | k | v | gate] where the file has one matrix for them   */ \
    X(delta_gate, TOKENS)  /* [n_heads, head_dim_v]                                                  */ \
    X(ba, TOKENS)          /* [2 n_heads]                                                            */ \
    X(beta, TOKENS)        /* [n_heads]                                                              */ \
    X(alpha, TOKENS)       /* [n_heads]                                                              */ \
    X(xl, LOGITS)          /* [n_embd] rows of x that want logits                                    */ \
    X(logits, LOGITS)      /* [n_vocab]                                                              */ \
    X(argmax, LOGITS)      /* [1]                                                                    */

enum {
#define RFI_BUFFER_INDEX(name, rows) RFI_BUFFER_##name,
    RFI_BUFFERS(RFI_BUFFER_INDEX)
#undef RFI_BUFFER_INDEX
    RFI_N_BUFFERS
};

typedef struct rfi_decoder {
#define RFI_BUFFER_ID(name, rows) uint32_t name;
    RFI_BUFFERS(RFI_BUFFER_ID)
#undef RFI_BUFFER_ID
    rfi_rope rope, swa_rope;
    uint32_t slopes;              /* ALiBi: index of the table; RF_NONE: none                                */
} rfi_decoder;

/* Whether the layer has a KV cache of its own. */
static int rfi_has_cache(const rfi_builder *b, const rfi_layer_config *l) {
    return l->cache_layer == (uint32_t)b->layer;
}

/* gate = act(gate) * up. Returns the op. */
static rf_op *rfi_emit_glu(rfi_builder *b, uint32_t gate, uint32_t up, uint32_t n, uint32_t activation) {
    rf_op *op = rfi_op(b, RF_OP_GLU, gate, gate);
    op->in2 = up;
    op->glu.n = n;
    op->glu.activation = activation;
    return op;
}

/* Delta nets gate the output of attention, by values that attn_q makes beside the queries. */
static int rfi_gates_attention(const rfi_config *c) { return c->recurrent.kind == RFI_DELTA_NET; }

/* out[T, n_heads, dim] = values [at, + dim) of each head of in[T, n_heads, width]. Returns the op. */
static rf_op *rfi_emit_slice(rfi_builder *b, uint32_t out, uint32_t in, uint32_t n_heads, uint32_t width, uint32_t at,
                             uint32_t dim) {
    rf_op *op = rfi_op(b, RF_OP_SLICE, out, in);
    op->slice = (rf_slice_params){n_heads, width, at, dim, 0};
    return op;
}

/* q, k, v = in W^T + bias, from three tensors, or from the rows of a fused one. */
static void rfi_emit_qkv(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l, uint32_t in) {
    uint32_t rows[3] = {l->n_heads * l->head_dim, l->n_kv_heads * l->head_dim, l->n_kv_heads * l->head_dim_v};
    uint32_t out[3] = {d->q, d->k, d->v};
    const int n = rfi_has_cache(b, l) ? 3 : 1;
    uint64_t n_embd = b->c->n_embd;
    const int gated = rfi_gates_attention(b->c); /* attn_q: per head the query, then the gate */
    if (!gated && rfi_has(b, "attn_qkv.weight")) {
        uint64_t all = (uint64_t)rows[0] + rows[1] + rows[2];
        rfi_weight w = rfi_bind_matrix(b, "attn_qkv", n_embd, all, NULL);
        for (int i = 0; i < 3; i++) {
            rfi_emit_matmul(b, out[i], in, w, rows[i], 0);
            w.row += rows[i];
        }
        return;
    }
    static const char *const names[3] = {"attn_q", "attn_k", "attn_v"};
    if (gated) rows[0] *= 2, out[0] = d->qg;
    rfi_weight w = rfi_no_weight;
    for (int i = 0; i < n; i++) {
        if (i < 2 || !b->c->arch->v_norm || rfi_has(b, "attn_v.weight") || rows[1] != rows[2]) {
            w = rfi_bind_matrix(b, names[i], n_embd, rows[i], "attn_qkv.weight of the same layer");
        } /* else the values are the keys before their norm */
        rfi_emit_matmul(b, out[i], in, w, rows[i], 0);
    }
    const uint32_t dim = l->head_dim;
    if (gated) rfi_emit_slice(b, d->q, d->qg, l->n_heads, 2 * dim, 0, dim);
    if (gated) rfi_emit_slice(b, d->q_gate, d->qg, l->n_heads, 2 * dim, dim, dim);
}

/* x += W in + bias, scaled or normed as the architecture says: the end of attention and of the FFN. */
static void rfi_emit_residual(rfi_builder *b, const rfi_decoder *d, uint32_t in, uint64_t n_in, const char *name,
                              const char *post_norm) {
    const rfi_config *c = b->c;
    int normed = c->arch->post_norm;
    rfi_weight w = rfi_bind_matrix(b, name, n_in, c->n_embd, NULL);
    rf_op *op = rfi_emit_matmul(b, normed ? d->y : d->x, in, w, c->n_embd, normed ? 0 : RF_OP_ACCUMULATE);
    op->matmul.scale = (float)c->residual_scale;
    if (normed) rfi_emit_norm(b, d->x, d->y, post_norm, c->n_embd, 1, RF_OP_ACCUMULATE);
}

/* Norms of queries and keys: per head, or over all heads. */
static void rfi_emit_qk_norm(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l) {
    uint32_t dim = l->head_dim, heads[2] = {l->n_heads, l->n_kv_heads}, x[2] = {d->q, d->k};
    const int n = rfi_has_cache(b, l) ? 2 : 1;
    static const char *const names[2] = {"attn_q_norm", "attn_k_norm"};
    const int each = b->c->arch->layer_norm && rfi_has(b, "attn_q_norm.weight");
    if (each) {
        rfi_refuse(b, "attn_q_norm.bias");
        rfi_refuse(b, "attn_k_norm.bias");
    }
    for (int i = 0; i < n; i++)
        if (each)
            rfi_emit_norm(b, x[i], x[i], names[i], dim, heads[i], RF_OP_EACH_HEAD);
        else if (b->c->arch->qk_norm_wide)
            rfi_emit_norm(b, x[i], x[i], names[i], (uint64_t)heads[i] * dim, 1, 0);
        else if (b->c->arch->qk_norm || (b->c->arch->qk_norm_optional && rfi_has(b, "attn_q_norm.weight")))
            rfi_emit_norm(b, x[i], x[i], names[i], dim, heads[i], 0);
    if (!b->c->arch->v_norm || n == 1) return;
    rf_op *op = rfi_op(b, RF_OP_RMS_NORM, d->v, d->v);
    op->norm = (rf_norm_params){l->n_kv_heads, l->head_dim_v, (float)b->c->norm_eps};
}

static void rfi_emit_clamp(rfi_builder *b, uint32_t x, uint32_t n) {
    rfi_emit_glu(b, x, RF_NONE, n, RF_ACT_CLAMP)->glu.limit = (float)b->c->clamp;
}

/* Store keys k and values v, then att = attention of the queries q. */
static void rfi_emit_attend(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l) {
    const rfi_config *c = b->c;
    const int mla = c->arch->mla;
    rf_op *op;
    if (rfi_has_cache(b, l)) {
        op = rfi_op(b, RF_OP_KV_STORE, RF_NONE, d->k);
        op->flags = mla ? RF_OP_MLA : 0;
        op->in2 = d->v;
        op->state = rfi_state(b, l);
        op->kv_store = (rf_kv_store_params){l->n_kv_heads, l->head_dim, l->head_dim_v};
    }
    const rf_plan_state *states = (const rf_plan_state *)b->states.items;
    uint32_t state = 0;
    while (b->result == RF_OK && states[state].layer != l->cache_layer) state++;
    uint32_t sinks = c->arch->attn_sinks ? rfi_bind_vector(b, "attn_sinks.weight", l->n_heads) : RF_NONE;
    op = rfi_op(b, RF_OP_ATTENTION, mla ? d->mla_v : d->att, mla ? d->mla_q : d->q);
    op->flags = mla ? RF_OP_MLA : 0;
    op->state = state;
    op->weight = sinks;
    op->attention = (rf_attention_params){
        .n_heads = l->n_heads,
        .n_kv_heads = l->n_kv_heads,
        .head_dim = l->head_dim,
        .head_dim_v = l->head_dim_v,
        .window = l->window,
        .slopes = d->slopes,
        .scale = (float)(c->attention_scale != 0 ? c->attention_scale
                                                 : 1 / sqrt(c->arch->attn_sinks ? c->n_rot : l->head_dim)),
        .softcap = (float)c->attention_softcap,
        .temperature = (float)c->temperature,
        .temperature_length = c->temperature != 0 ? c->rope_n_ctx_original : 0,
    };
}

/* x += Wo attention(rope(q), rope(k), v), with q, k, v from `in` */
static void rfi_emit_attention(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l, uint32_t in) {
    const rfi_rope *rope = l->swa ? &d->swa_rope : &d->rope;
    rfi_emit_qkv(b, d, l, in);
    if (b->c->clamp != 0) {
        rfi_emit_clamp(b, d->q, l->n_heads * l->head_dim);
        rfi_emit_clamp(b, d->k, l->n_kv_heads * l->head_dim);
        rfi_emit_clamp(b, d->v, l->n_kv_heads * l->head_dim_v);
    }
    rfi_emit_qk_norm(b, d, l);
    if (l->rope) rfi_emit_rope(b, d->q, l->n_heads, l->head_dim, rope);
    if (l->rope && rfi_has_cache(b, l)) rfi_emit_rope(b, d->k, l->n_kv_heads, l->head_dim, rope);
    rfi_emit_attend(b, d, l);
    if (rfi_gates_attention(b->c)) {
        rf_op *op = rfi_emit_glu(b, d->q_gate, d->att, l->n_heads * l->head_dim_v, RF_ACT_SIGMOID);
        op->out = d->att;
    }
    rfi_emit_residual(b, d, d->att, (uint64_t)l->n_heads * l->head_dim_v, "attn_output", "post_attention_norm");
}

static void rfi_emit_heads(rfi_builder *b, uint32_t out, uint32_t in, uint32_t weight, const rf_heads_params *heads,
                           uint32_t flags) {
    rf_op *op = rfi_op(b, RF_OP_HEADS, out, in);
    op->flags = flags;
    op->weight = weight;
    op->heads = *heads;
}

/* Multi-head latent attention (arXiv 2405.04434). All heads share k = norm(Wkv in), kv_lora_rank values, and n_rot
 * rotated ones: that is the KV cache. Keys and values are never decompressed: queries are multiplied by Wk of their
 * head instead, and the sums of compressed values by Wv. */
static void rfi_emit_mla(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l, uint32_t in) {
    const rfi_config *c = b->c;
    const rfi_mla_config *a = &c->mla;
    const uint32_t nope = a->head_dim - c->n_rot;
    const uint64_t n_q = (uint64_t)l->n_heads * a->head_dim;
    const uint64_t n_first = a->q_lora_rank ? a->q_lora_rank : n_q;
    rfi_weight first = rfi_bind_matrix(b, a->q_lora_rank ? "attn_q_a" : "attn_q", c->n_embd, n_first, NULL);
    rfi_emit_matmul(b, a->q_lora_rank ? d->q_lora : d->q, in, first, (uint32_t)n_first, 0);
    rfi_weight kv = rfi_bind_matrix(b, "attn_kv_a_mqa", c->n_embd, c->head_dim, NULL);
    rfi_emit_matmul(b, d->k, in, kv, a->kv_lora_rank, 0);
    kv.row = a->kv_lora_rank;
    rfi_emit_matmul(b, d->v, in, kv, c->n_rot, 0);
    if (a->q_lora_rank) {
        rfi_emit_norm(b, d->q_lora, d->q_lora, "attn_q_a_norm", a->q_lora_rank, 1, 0);
        rfi_weight w = rfi_bind_matrix(b, "attn_q_b", a->q_lora_rank, n_q, NULL);
        rfi_emit_matmul(b, d->q, d->q_lora, w, (uint32_t)n_q, 0);
    }
    rfi_emit_norm(b, d->k, d->k, "attn_kv_a_norm", a->kv_lora_rank, 1, 0);
    rfi_emit_rope(b, d->q, l->n_heads, a->head_dim, &d->rope)->flags |= RF_OP_LAST;
    rfi_emit_rope(b, d->v, 1, c->n_rot, &d->rope);
    rf_heads_params keys = {l->n_heads, a->head_dim, nope, a->kv_lora_rank, 0, a->kv_lora_rank},
                    values = {l->n_heads, a->kv_lora_rank, a->kv_lora_rank, a->head_dim_v, 0, a->head_dim_v};
    uint32_t wk, wv;
    if (a->joined) { /* rows per head: first those of its key, then those of its value */
        rfi_refuse(b, "attn_kv_b.scale");
        keys.head_rows = values.head_rows = nope + a->head_dim_v;
        const uint64_t n_rows = (uint64_t)l->n_heads * keys.head_rows;
        wk = wv = rfi_bind(b, "attn_kv_b.weight", a->kv_lora_rank, n_rows, 0, "attn_k_b.weight").slot;
        values.first_row = nope;
    } else {
        wk = rfi_bind_heads(b, "attn_k_b", nope, a->kv_lora_rank, l->n_heads).slot;
        wv = RF_NONE;
    }
    rfi_emit_heads(b, d->mla_q, d->q, wk, &keys, a->joined ? RF_OP_ACROSS : 0);
    rfi_emit_attend(b, d, l);
    if (!a->joined) wv = rfi_bind_heads(b, "attn_v_b", a->kv_lora_rank, a->head_dim_v, l->n_heads).slot;
    rfi_emit_heads(b, d->att, d->mla_v, wv, &values, 0);
    rfi_emit_residual(b, d, d->att, (uint64_t)l->n_heads * a->head_dim_v, "attn_output", "post_attention_norm");
}

/* ---- recurrent layers ---- */

static void rfi_emit_conv(rfi_builder *b, uint32_t out, uint32_t in, const char *name, uint32_t n,
                          uint32_t activation) {
    const uint32_t n_taps = b->c->recurrent.n_taps;
    char weight[64], bias[64];
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    const rfi_weight w = rfi_bind(b, weight, n_taps, n, 0, NULL);
    const uint32_t b_slot = rfi_bind_optional(b, bias, n);
    rf_op *op = rfi_op(b, RF_OP_CONV, out, in);
    op->weight = w.slot;
    op->bias = b_slot;
    op->state = rfi_recurrent_state(b, (n_taps - 1ull) * n);
    op->conv = (rf_conv_params){n, n_taps, activation};
}

/* x += Wout (c * conv(b * x')); b, c, x' = in Win^T */
static void rfi_emit_short_conv(rfi_builder *b, const rfi_decoder *d, uint32_t in) {
    const uint32_t n = b->c->n_embd, conv[3] = {d->conv_b, d->conv_c, d->conv_x};
    rfi_weight w = rfi_bind_matrix(b, "shortconv.in_proj", n, 3 * (uint64_t)n, NULL);
    for (int i = 0; i < 3; i++, w.row += n)
        rfi_emit_matmul(b, conv[i], in, w, n, 0);
    rfi_emit_glu(b, d->conv_b, d->conv_x, n, RF_ACT_NONE);
    rfi_emit_conv(b, d->conv_b, d->conv_b, "shortconv.conv", n, RF_ACT_NONE);
    rfi_emit_glu(b, d->conv_b, d->conv_c, n, RF_ACT_NONE);
    rfi_emit_residual(b, d, d->conv_b, n, "shortconv.out_proj", "");
}

/* beta and alpha, one of each per head: the strength of the update before its sigmoid, the input of the decay. */
static void rfi_emit_delta_gates(rfi_builder *b, const rfi_decoder *d, uint32_t in) {
    const rfi_recurrent_config *t = &b->c->recurrent;
    const uint32_t n = t->n_heads, n_embd = b->c->n_embd, each = n / t->n_k_heads;
    if (b->c->arch->recurrent->fused_gates) {
        rfi_emit_matmul(b, d->ba, in, rfi_bind_matrix(b, "ssm_ba", n_embd, 2 * (uint64_t)n, NULL), 2 * n, 0);
        rfi_emit_slice(b, d->beta, d->ba, t->n_k_heads, 2 * each, 0, each);
        rfi_emit_slice(b, d->alpha, d->ba, t->n_k_heads, 2 * each, each, each);
    } else {
        rfi_emit_matmul(b, d->beta, in, rfi_bind_matrix(b, "ssm_beta", n_embd, n, NULL), n, 0);
        rfi_emit_matmul(b, d->alpha, in, rfi_bind_matrix(b, "ssm_alpha", n_embd, n, NULL), n, 0);
    }
}

/* mixed = queries, keys and values; delta_gate = the gate of the output. Older qwen3next files have one matrix for
 * both: per key head the rows of its query, key, values and gates. */
static void rfi_emit_delta_inputs(rfi_builder *b, const rfi_decoder *d, uint32_t in) {
    const rfi_recurrent_config *t = &b->c->recurrent;
    const uint32_t n_values = t->n_heads * t->head_dim_v, n_embd = b->c->n_embd;
    if (!b->c->arch->recurrent->fused_gates) rfi_refuse(b, "ssm_in.weight");
    if (!rfi_has(b, "ssm_in.weight")) {
        const rfi_weight qkv = rfi_bind_matrix(b, "attn_qkv", n_embd, t->n_conv, "ssm_in.weight of the same layer");
        rfi_emit_matmul(b, d->mixed, in, qkv, t->n_conv, 0);
        rfi_emit_matmul(b, d->delta_gate, in, rfi_bind_matrix(b, "attn_gate", n_embd, n_values, NULL), n_values, 0);
        return;
    }
    const uint32_t values = n_values / t->n_k_heads, of_head = 2 * t->head_dim + 2 * values, all = t->n_conv + n_values;
    rfi_emit_matmul(b, d->delta_in, in, rfi_bind_matrix(b, "ssm_in", n_embd, all, NULL), all, 0);
    const uint32_t dims[4] = {t->head_dim, t->head_dim, values, values};
    for (uint32_t i = 0, at = 0; i < 4; at += dims[i++]) {
        const uint32_t out = i < 3 ? d->mixed : d->delta_gate;
        rf_op *op = rfi_emit_slice(b, out, d->delta_in, t->n_k_heads, of_head, at, dims[i]);
        op->slice.out_at = i < 3 ? at * t->n_k_heads : 0;
    }
}

/* x += Wout (norm(delta(silu(conv(Wqkv in)))) * silu(Wz in)) */
static void rfi_emit_delta(rfi_builder *b, const rfi_decoder *d, uint32_t in) {
    const rfi_recurrent_config *t = &b->c->recurrent;
    const uint32_t n_values = t->n_heads * t->head_dim_v;
    rfi_emit_delta_inputs(b, d, in);
    rfi_emit_delta_gates(b, d, in);
    rfi_emit_conv(b, d->mixed, d->mixed, "ssm_conv1d", t->n_conv, RF_ACT_SILU);
    const uint32_t a = rfi_bind_vector(b, "ssm_a", t->n_heads),
                   dt = rfi_bind_vector(b, "ssm_dt.bias", t->n_heads);
    rf_op *op = rfi_op(b, RF_OP_DELTA, d->att, d->mixed);
    op->flags = b->c->arch->recurrent->cyclic ? RF_OP_CYCLIC : 0;
    op->in2 = d->beta;
    op->in3 = d->alpha;
    op->weight = a;
    op->bias = dt;
    op->state = rfi_recurrent_state(b, (uint64_t)n_values * t->head_dim);
    op->delta = (rf_delta_params){.n_heads = t->n_heads,
                                  .n_k_heads = t->n_k_heads,
                                  .head_dim = t->head_dim,
                                  .head_dim_v = t->head_dim_v,
                                  .scale = (float)(1 / sqrt(t->head_dim)),
                                  .eps = (float)b->c->norm_eps};
    rfi_emit_norm(b, d->att, d->att, "ssm_norm", t->head_dim_v, t->n_heads, 0);
    rfi_emit_glu(b, d->delta_gate, d->att, n_values, RF_ACT_SILU);
    rfi_emit_residual(b, d, d->delta_gate, n_values, "ssm_out", "");
}

/* act(Wgate in) * Wup in, or act(Wup in). Returns its buffer. */
static uint32_t rfi_emit_hidden(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l, uint32_t in) {
    const rfi_config *c = b->c;
    uint32_t n_ff = l->n_ff;
    int fused = c->arch->fused_gate_up, gated = !c->arch->no_gate;
    rfi_weight up;
    if (fused) {
        up = rfi_bind_matrix(b, "ffn_up", c->n_embd, 2 * (uint64_t)n_ff, NULL);
        rfi_emit_matmul(b, d->gate, in, up, n_ff, 0);
        up.row = n_ff;
    } else {
        if (gated)
            rfi_emit_matmul(b, d->gate, in, rfi_bind_matrix(b, "ffn_gate", c->n_embd, n_ff, NULL), n_ff, 0);
        up = rfi_bind_matrix(b, "ffn_up", c->n_embd, n_ff, NULL);
    }
    if (b->result == RF_OK && rfi_has(b, "ffn_act.scales"))
        b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, 0, "%s: blk.%d.ffn_act.scales is not supported",
                             rfi_gguf_path(b->g), (int)b->layer);
    rfi_emit_matmul(b, d->up, in, up, n_ff, 0);
    rfi_emit_glu(b, gated ? d->gate : d->up, gated ? d->up : RF_NONE, n_ff,
                 c->arch->gelu ? RF_ACT_GELU : RF_ACT_SILU);
    return gated ? d->gate : d->up;
}

/* x += Wdown (act(Wgate in) * Wup in) */
static void rfi_emit_ffn(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l, uint32_t in) {
    rfi_emit_residual(b, d, rfi_emit_hidden(b, d, l, in), l->n_ff, "ffn_down", "post_ffw_norm");
}

/* NAME.weight, .bias and .scale of all experts; matrices [n_rows, n_in]. */
typedef struct rfi_experts {
    uint32_t n_in, weight, bias, factor; /* slots; bias, factor: RF_NONE if there is none */
} rfi_experts;

static rfi_experts rfi_bind_expert_set(rfi_builder *b, const char *name, uint32_t n_in, uint32_t n_rows) {
    char full[64];
    rfi_experts e = {.n_in = n_in};
    snprintf(full, sizeof full, "%s.weight", name);
    e.weight = rfi_bind_experts(b, full, n_in, n_rows).slot;
    snprintf(full, sizeof full, "%s.bias", name);
    e.bias = rfi_bind_experts(b, full, n_rows, 0).slot;
    snprintf(full, sizeof full, "%s.scale", name);
    e.factor = rfi_bind_optional(b, full, b->c->moe.n_experts);
    return e;
}

/* out[T, n_used, n_out] = factor[expert] * in W[expert]^T + bias[expert], rows of W from `row` on; in_out: {in, out} */
static void rfi_emit_experts(rfi_builder *b, const rfi_decoder *d, const rfi_experts *e, const uint32_t in_out[2],
                             uint32_t row, uint32_t n_out, uint32_t flags) {
    rf_op *op = rfi_op(b, RF_OP_EXPERTS, in_out[1], in_out[0]);
    op->flags = flags;
    op->in2 = d->route;
    op->weight = e->weight;
    op->bias = e->bias;
    op->factor = e->factor;
    op->experts = (rf_experts_params){e->n_in, n_out, row, b->c->moe.n_experts, b->c->moe.n_used};
}

/* route = the router's choice of experts for each row of xn */
static void rfi_emit_route(rfi_builder *b, const rfi_decoder *d) {
    const rfi_moe_config *m = &b->c->moe;
    rfi_weight w = rfi_bind(b, "ffn_gate_inp.weight", b->c->n_embd, m->n_experts, 0, NULL);
    w.bias = rfi_bind_optional(b, "ffn_gate_inp.bias", m->n_experts);
    rf_op *op = rfi_emit_matmul(b, d->router, d->xn, w, m->n_experts, 0);
    if (b->c->arch->moe->dense_beside) op->matmul.scale = (float)(1 / sqrt((double)b->c->n_embd));
    const uint32_t bias = rfi_bind_optional(b, "exp_probs_b.bias", m->n_experts);
    op = rfi_op(b, RF_OP_ROUTE, d->route, d->router);
    op->bias = bias;
    op->flags = (m->gating == RFI_GATING_SIGMOID  ? RF_OP_SIGMOID
                 : m->gating == RFI_GATING_CHOSEN ? RF_OP_CHOSEN
                                                  : 0) |
                (m->normalize ? RF_OP_NORMALIZE : 0);
    op->route = (rf_route_params){m->n_experts, m->n_used, m->n_groups, m->n_groups_used, (float)m->scale};
}

/* out = sum of the n_used results in `in`, weighted by in2; flags RF_OP_ACCUMULATE: += */
static rf_op *rfi_emit_mix(rfi_builder *b, uint32_t out, uint32_t in, uint32_t in2, uint32_t n_used, uint32_t flags) {
    rf_op *op = rfi_op(b, RF_OP_MIX, out, in);
    op->in2 = in2;
    op->flags = flags;
    op->mix.n = b->c->n_embd;
    op->mix.n_used = n_used;
    return op;
}

/* x += Wdown (silu(Wgate xn) * Wup xn) of the shared experts, times their gate if there is one */
static void rfi_emit_shared(rfi_builder *b, const rfi_decoder *d) {
    const rfi_config *c = b->c;
    const uint32_t n_embd = c->n_embd, n_ff = c->moe.n_ff_shared;
    if (!n_ff && rfi_has(b, "ffn_up_shexp.weight") && b->result == RF_OK)
        b->result = rfi_fail(b->err, RF_ERR_NOT_FOUND, 0,
                             "%s: blk.%d.ffn_up_shexp.weight: no key of %s says how wide it is", rfi_gguf_path(b->g),
                             (int)b->layer, c->arch->name);
    if (!n_ff) return;
    rfi_weight gate = rfi_bind_matrix(b, "ffn_gate_shexp", n_embd, n_ff, NULL),
               up = rfi_bind_matrix(b, "ffn_up_shexp", n_embd, n_ff, NULL);
    rfi_emit_matmul(b, d->gate, d->xn, gate, n_ff, 0);
    rfi_emit_matmul(b, d->up, d->xn, up, n_ff, 0);
    rfi_emit_glu(b, d->gate, d->up, n_ff, RF_ACT_SILU);
    if (!c->arch->moe->shared_gate) {
        rfi_emit_residual(b, d, d->gate, n_ff, "ffn_down_shexp", "post_ffw_norm");
        return;
    }
    rfi_weight down = rfi_bind_matrix(b, "ffn_down_shexp", n_ff, n_embd, NULL),
               share = rfi_bind(b, "ffn_gate_inp_shexp.weight", n_embd, 1, 0, NULL);
    rfi_emit_matmul(b, d->y, d->gate, down, n_embd, 0);
    rfi_emit_matmul(b, d->share, d->xn, share, 1, 0);
    rf_op *op = rfi_emit_mix(b, d->x, d->y, d->share, 1, RF_OP_ACCUMULATE | RF_OP_SIGMOID);
    op->mix.scale = (float)c->residual_scale;
}

/* downs = Wdown (act(Wgate xn) * Wup xn) of each of the chosen experts */
static void rfi_emit_chosen(rfi_builder *b, const rfi_decoder *d) {
    const rfi_config *c = b->c;
    const rfi_moe_config *m = &c->moe;
    const uint32_t n_embd = c->n_embd, n_ff = m->n_ff, gate[2] = {d->xn, d->gates}, up[2] = {d->xn, d->ups},
                   down[2] = {d->gates, d->downs};
    rfi_experts e;
    if (rfi_has(b, "ffn_gate_up_exps.weight")) { /* rows of the gate, then of up */
        e = rfi_bind_expert_set(b, "ffn_gate_up_exps", n_embd, 2 * n_ff);
        if (e.bias != RF_NONE && b->result == RF_OK)
            b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, 0, "%s: blk.%d.ffn_gate_up_exps.bias is not supported",
                                 rfi_gguf_path(b->g), (int)b->layer);
        rfi_emit_experts(b, d, &e, gate, 0, n_ff, 0);
        rfi_emit_experts(b, d, &e, up, n_ff, n_ff, 0);
    } else {
        e = rfi_bind_expert_set(b, "ffn_gate_exps", n_embd, n_ff);
        rfi_emit_experts(b, d, &e, gate, 0, n_ff, 0);
        e = rfi_bind_expert_set(b, "ffn_up_exps", n_embd, n_ff);
        rfi_emit_experts(b, d, &e, up, 0, n_ff, 0);
    }
    rfi_emit_glu(b, d->gates, d->ups, m->n_used * n_ff,
                 c->arch->swiglu_oai ? RF_ACT_OAI : c->arch->gelu ? RF_ACT_GELU : RF_ACT_SILU);
    e = rfi_bind_expert_set(b, "ffn_down_exps", n_ff, n_embd);
    rfi_emit_experts(b, d, &e, down, 0, n_embd, RF_OP_PER_CHOICE);
}

/* x += sum over the chosen experts of weight * Wdown (act(Wgate xn) * Wup xn), then the shared experts */
static void rfi_emit_moe(rfi_builder *b, const rfi_decoder *d) {
    rfi_emit_route(b, d);
    rfi_emit_chosen(b, d);
    rf_op *op = rfi_emit_mix(b, d->x, d->downs, d->route, b->c->moe.n_used, RF_OP_ACCUMULATE);
    op->mix.scale = (float)b->c->residual_scale;
    rfi_emit_shared(b, d);
}

/* x += norm(norm1(FFN(xn)) + norm2(experts(pre_norm2(x)))); the router reads x with a norm of its own */
static void rfi_emit_beside(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l) {
    const rfi_config *c = b->c;
    const uint32_t n_embd = c->n_embd, hidden = rfi_emit_hidden(b, d, l, d->xn);
    rfi_emit_matmul(b, d->y, hidden, rfi_bind_matrix(b, "ffn_down", l->n_ff, n_embd, NULL), n_embd, 0);
    rfi_emit_norm(b, d->y, d->y, "post_ffw_norm_1", n_embd, 1, 0);
    rf_op *op = rfi_op(b, RF_OP_RMS_NORM, d->xn, d->x);
    op->norm = (rf_norm_params){1, n_embd, (float)c->norm_eps};
    const uint32_t scale = rfi_bind_vector(b, "ffn_gate_inp.scale", n_embd);
    if (b->result == RF_OK) op->weight = scale;
    rfi_emit_route(b, d);
    rfi_emit_norm(b, d->xn, d->x, "pre_ffw_norm_2", n_embd, 1, 0);
    rfi_emit_chosen(b, d);
    rfi_emit_mix(b, d->z, d->downs, d->route, c->moe.n_used, 0);
    rfi_emit_norm(b, d->y, d->z, "post_ffw_norm_2", n_embd, 1, RF_OP_ACCUMULATE);
    rfi_emit_norm(b, d->x, d->y, "post_ffw_norm", n_embd, 1, RF_OP_ACCUMULATE);
}

/* inputs = for every layer an embedding row + norm(a part of Wproj x). rfi_emit_layer_end divides by sqrt(2). */
static void rfi_emit_layer_inputs(rfi_builder *b, const rfi_decoder *d) {
    const rfi_config *c = b->c;
    const uint32_t n = c->n_layer_input, all = n * c->n_layers;
    rfi_weight table = rfi_bind(b, "per_layer_token_embd.weight", all, c->n_vocab, 0, NULL);
    rf_op *op = rfi_op(b, RF_OP_EMBED, d->inputs, RF_NONE);
    op->weight = table.slot;
    op->embed = (rf_embed_params){all, (float)sqrt(n)};
    if (b->result == RF_OK) ((rf_plan_weight *)b->weights.items)[table.slot].row_reads = 1;
    rfi_weight w = rfi_bind_matrix(b, "per_layer_model_proj", c->n_embd, all, NULL);
    op = rfi_emit_matmul(b, d->input_parts, d->x, w, all, 0);
    op->matmul.scale = (float)(1 / sqrt((double)c->n_embd));
    rfi_emit_norm(b, d->inputs, d->input_parts, "per_layer_proj_norm", n, c->n_layers, RF_OP_ACCUMULATE);
}

/* x += norm(Wproj (gelu(Wgate x) * the layer's input)); x *= layer_output_scale */
static void rfi_emit_layer_end(rfi_builder *b, const rfi_decoder *d) {
    const rfi_config *c = b->c;
    const uint32_t n = c->n_layer_input;
    if (n) {
        rfi_weight gate = rfi_bind_matrix(b, "inp_gate", c->n_embd, n, NULL),
                   proj = rfi_bind_matrix(b, "proj", n, c->n_embd, NULL);
        rfi_emit_matmul(b, d->input_gate, d->x, gate, n, 0);
        rfi_emit_glu(b, d->input_gate, d->inputs, n, RF_ACT_GELU)->glu.in2_at = (uint32_t)b->layer * n;
        rfi_emit_matmul(b, d->y, d->input_gate, proj, c->n_embd, 0)->matmul.scale = (float)sqrt(0.5);
        rfi_emit_norm(b, d->x, d->y, "post_norm", c->n_embd, 1, RF_OP_ACCUMULATE);
    }
    const uint32_t factor = rfi_bind_optional(b, "layer_output_scale.weight", 1);
    if (factor != RF_NONE) rfi_emit_glu(b, d->x, RF_NONE, c->n_embd, RF_ACT_NONE)->factor = factor;
}

static int rfi_layer_has_experts(const rfi_config *c, uint32_t il) {
    return c->moe.n_experts && il >= c->moe.n_dense;
}

/* One layer. With parallel FFN its input is made before attention adds to x. */
static void rfi_emit_layer(rfi_builder *b, const rfi_decoder *d, const rfi_layer_config *l) {
    const rfi_config *c = b->c;
    const uint32_t n_embd = c->n_embd;
    const char *ffn_norm = c->arch->ffn_norm_is_post_attention ? "post_attention_norm" : "ffn_norm";
    int has_ffn_norm = rfi_has(b, "ffn_norm.weight");
    int parallel = c->parallel || (c->arch->parallel_without_ffn_norm && !has_ffn_norm);
    uint32_t attention_in = d->xn, ffn_in = d->xn;
    if (c->arch->no_pre_norm) attention_in = ffn_in = d->x;
    else rfi_emit_norm(b, d->xn, d->x, "attn_norm", n_embd, 1, 0);
    if (c->parallel && rfi_has(b, "attn_norm_2.weight")) { /* attention has its own norm */
        rfi_emit_norm(b, d->xn2, d->x, "attn_norm_2", n_embd, 1, 0);
        attention_in = d->xn2;
    } else if (c->parallel && c->arch->parallel_key) {
        rfi_emit_norm(b, d->xn2, d->x, "ffn_norm", n_embd, 1, 0);
        ffn_in = d->xn2;
    }
    if (c->arch->mla) rfi_emit_mla(b, d, l, attention_in);
    else if (!l->recurrent) rfi_emit_attention(b, d, l, attention_in);
    else if (c->recurrent.kind == RFI_SHORT_CONV) rfi_emit_short_conv(b, d, attention_in);
    else rfi_emit_delta(b, d, attention_in);
    if (!parallel && ffn_in != d->x) rfi_emit_norm(b, d->xn, d->x, ffn_norm, n_embd, 1, 0);
    const int experts = rfi_layer_has_experts(c, (uint32_t)b->layer);
    if (experts && c->arch->moe->dense_beside) rfi_emit_beside(b, d, l);
    else if (experts) rfi_emit_moe(b, d);
    else rfi_emit_ffn(b, d, l, ffn_in);
    if (c->arch->layer_inputs) rfi_emit_layer_end(b, d);
}

static rfi_decoder rfi_decoder_buffers(rfi_builder *b) {
    static const rf_plan_buffer buffers[] = {
#define RFI_BUFFER(name, rows) {#name, RF_ROWS_##rows, 0},
        RFI_BUFFERS(RFI_BUFFER)
#undef RFI_BUFFER
    };
    rf_plan_buffer *p = (rf_plan_buffer *)rfi_array_push(b, &b->buffers, RFI_COUNT(buffers), sizeof *p);
    if (p) memcpy(p, buffers, sizeof buffers);
    return (rfi_decoder){
#define RFI_BUFFER_SET(name, rows) .name = RFI_BUFFER_##name,
        RFI_BUFFERS(RFI_BUFFER_SET)
#undef RFI_BUFFER_SET
    };
}

/* Rope tables and frequency factors; SWA layers may have their own. */
static void rfi_emit_rope_tables(rfi_builder *b, rfi_decoder *d) {
    const rfi_config *c = b->c;
    const rfi_rope_config *r = &c->rope, *swa = &c->swa_rope;
    uint32_t n_swa = 0, half = c->n_rot / 2;
    for (uint32_t il = 0; il < c->n_layers; il++) n_swa += c->layers[il].swa != 0;
    d->rope = d->swa_rope = rfi_rope_table(b, r);
    if (n_swa && (r->base != swa->base || r->scaling != swa->scaling || r->n_rot != swa->n_rot))
        d->swa_rope = rfi_rope_table(b, swa);
    d->rope.freqs = rfi_bind_optional(b, "rope_freqs.weight", half);
    if (!c->arch->swa_heads) d->swa_rope.freqs = d->rope.freqs;
    if (!c->arch->longrope || d->rope.freqs != RF_NONE) return;
    d->rope.freqs = rfi_bind_optional(b, "rope_factors_short.weight", half);
    d->rope.long_freqs = rfi_bind(b, "rope_factors_long.weight", half, 1, d->rope.freqs == RF_NONE, NULL).slot;
}

/* ALiBi slopes (arXiv 2108.12409): powers of 2^(-alibi / n), n the largest power of two <= n_heads; heads from n on
 * take the odd powers of its square root. */
static uint32_t rfi_slope_table(rfi_builder *b) {
    const uint32_t n_heads = b->c->layers[0].n_heads, first = b->tables.n;
    uint32_t n = 1;
    for (uint32_t il = 0; il < b->c->n_layers && b->result == RF_OK; il++)
        if (b->c->layers[il].n_heads != n_heads)
            b->result = rfi_fail(b->err, RF_ERR_FORMAT, 0,
                                 "%s: %s.attention.head_count: want as many heads in every layer, found %u and %u",
                                 rfi_gguf_path(b->g), b->c->arch->name, n_heads, b->c->layers[il].n_heads);
    while (n * 2 <= n_heads) n *= 2;
    float *slopes = (float *)rfi_array_push(b, &b->tables, n_heads, sizeof *slopes);
    for (uint32_t h = 0; slopes && h < n_heads; h++) {
        const double power = h < n ? h + 1 : (2 * (h - n) + 1) / 2.0;
        slopes[h] = (float)exp2(-b->c->alibi / n * power);
    }
    return first;
}

/* x = token embeddings, + learned position embeddings */
static rfi_weight rfi_emit_embedding(rfi_builder *b, const rfi_decoder *d) {
    const rfi_config *c = b->c;
    rfi_weight embedding = rfi_bind(b, "token_embd.weight", c->n_embd, c->n_vocab, 0, NULL);
    rf_op *op = rfi_op(b, RF_OP_EMBED, d->x, RF_NONE);
    op->weight = embedding.slot;
    op->embed = (rf_embed_params){c->n_embd, (float)c->embedding_scale};
    if (c->arch->embedding_norm) rfi_emit_norm(b, d->x, d->x, "token_embd_norm", c->n_embd, 1, 0);
    if (!c->arch->learned_positions) return embedding;
    rfi_weight positions = rfi_bind(b, "position_embd.weight", c->n_embd, c->n_positions, 0, NULL);
    op = rfi_op(b, RF_OP_EMBED, d->x, RF_NONE);
    op->flags = RF_OP_POSITIONS | RF_OP_ACCUMULATE;
    op->weight = positions.slot;
    op->embed.n = c->n_embd;
    return embedding;
}

/* The decoder of all architectures: llama's graph, changed by the fields of rfi_arch. */
static void rfi_emit_decoder(rfi_builder *b) {
    const rfi_config *c = b->c;
    rfi_decoder d = rfi_decoder_buffers(b);
    b->logits = d.logits;
    b->argmax = d.argmax;
    b->layer = -1;
    rfi_weight embedding = rfi_emit_embedding(b, &d);
    rfi_emit_rope_tables(b, &d);
    d.slopes = c->alibi != 0 ? rfi_slope_table(b) : RF_NONE;
    if (c->n_layer_input) rfi_emit_layer_inputs(b, &d);
    for (uint32_t il = 0; il < c->n_layers; il++) {
        b->layer = (int32_t)il;
        rfi_emit_layer(b, &d, &c->layers[il]);
    }
    b->layer = (int32_t)c->n_layers;
    rf_op *op = rfi_op(b, RF_OP_GATHER, d.xl, d.x);
    op->gather.n = c->n_embd;
    const char *output_norm = c->recurrent.kind == RFI_SHORT_CONV ? "token_embd_norm" : "output_norm";
    rfi_emit_norm(b, d.xl, d.xl, output_norm, c->n_embd, 1, 0);
    int tied = !rfi_has(b, "output.weight");
    rfi_weight output = tied ? embedding : rfi_bind_matrix(b, "output", c->n_embd, c->n_vocab, NULL);
    if (tied) output.bias = rfi_bind_optional(b, "output.bias", c->n_vocab);
    op = rfi_emit_matmul(b, d.logits, d.xl, output, c->n_vocab, 0);
    op->matmul.scale = (float)c->logit_scale;
    op->matmul.softcap = (float)c->logit_softcap;
    op = rfi_op(b, RF_OP_ARGMAX, d.argmax, d.logits);
    op->argmax.n = c->n_vocab;
    if (b->result == RF_OK && !tied) ((rf_plan_weight *)b->weights.items)[embedding.slot].row_reads = 1;
}

static const rfi_moe_arch rfi_moe_qwen3 = {.gating = RFI_GATING_SOFTMAX, .normalize = 1};
static const rfi_moe_arch rfi_moe_glm4 = {.gating = RFI_GATING_SIGMOID, .keys = 1, .dense_lead = 1, .shared = 1};
static const rfi_moe_arch rfi_moe_granite = {
    .gating = RFI_GATING_SOFTMAX, .normalize = 1, .n_ff_is_ff = 1, .shared = 1};
static const rfi_moe_arch rfi_moe_deepseek2 = {
    .gating = RFI_GATING_SOFTMAX, .keys = 1, .groups = 1, .dense_lead = 1, .shared = 1};
static const rfi_moe_arch rfi_moe_mixtral = {
    .gating = RFI_GATING_SOFTMAX, .normalize = 1, .n_ff_is_ff = 1, .optional = 1};
static const rfi_moe_arch rfi_moe_gemma4 = {
    .gating = RFI_GATING_SOFTMAX, .normalize = 1, .dense_beside = 1, .optional = 1};
static const rfi_moe_arch rfi_moe_qwen2 = {.gating = RFI_GATING_SOFTMAX, .shared = 1, .shared_gate = 1};
static const rfi_moe_arch rfi_moe_olmo = {.gating = RFI_GATING_SOFTMAX, .n_ff_is_ff = 1};
static const rfi_moe_arch rfi_moe_oss = {.gating = RFI_GATING_CHOSEN};
static const rfi_moe_arch rfi_moe_qwen35 = {
    .gating = RFI_GATING_SOFTMAX, .normalize = 1, .shared = 1, .shared_gate = 1};
static const rfi_moe_arch rfi_moe_lfm2 = {.gating = RFI_GATING_SIGMOID, .normalize = 1, .keys = 1, .dense_lead = 1};
static const rfi_recurrent_arch rfi_qwen3next = {.kind = RFI_DELTA_NET, .fused_gates = 1};
static const rfi_recurrent_arch rfi_lfm2 = {.kind = RFI_SHORT_CONV};
static const rfi_recurrent_arch rfi_qwen35 = {.kind = RFI_DELTA_NET, .cyclic = 1};
/* A new architecture is a row here.
 *  1. Compare its graph with llama's and find the fields of rfi_arch that say how it differs.
 *  2. Add the row. Keys and tensors follow from the fields; those of the wrong shape are refused by name.
 *  3. What no field says yet becomes a field: read it in section 8, act on it in this one.
 *  4. `rocmforge_cli plan FILE` prints the graph; tests/make_family_goldens.py writes its answers in float64. */
static const rfi_arch rfi_archs[] = {
    {.name = "llama", .moe = &rfi_moe_mixtral},
    {.name = "qwen2", .rope_neox = 1},
    {.name = "qwen3", .qk_norm = 1, .rope_neox = 1},
    {.name = "gemma", .embed_sqrt = 1, .rope_neox = 1, .gelu = 1},
    {.name = "gemma2", .post_norm = 1, .embed_sqrt = 1, .attn_softcap = 1, .rope_neox = 1, .swa_period = 2,
     .swa_window = 4096, .wide_layers = 46, .gelu = 1},
    {.name = "gemma3", .post_norm = 1, .qk_norm = 1, .embed_sqrt = 1, .final_softcap = 1, .rope_neox = 1,
     .swa_period = 6, .swa_rope_base = 10000, .wide_layers = 62, .gelu = 1},
    {.name = "gemma4", .post_norm = 1, .qk_norm = 1, .v_norm = 1, .embed_sqrt = 1, .layer_inputs = 1,
     .final_softcap = 1, .rope_neox = 1, .swa_heads = 1, .swa_period = 6, .swa_rope_base = 10000, .attn_scale = 1,
     .gelu = 1, .moe = &rfi_moe_gemma4},
    {.name = "phi3", .rope_neox = 1, .longrope = 1, .fused_gate_up = 1},
    {.name = "glm4", .post_norm = 1, .mrope = 1, .fused_gate_up = 1},
    {.name = "mistral3", .attn_temperature = 1},
    {.name = "smollm3", .no_rope_period = 4},
    {.name = "granite", .scale_keys = 1, .rope_switch = 1},
    {.name = "olmo2", .no_pre_norm = 1, .post_norm = 1, .qk_norm_wide = 1, .rope_neox = 1, .swa_period = 4},
    {.name = "command-r", .layer_norm = 1, .parallel = 1, .logit_scale_multiplies = 1},
    {.name = "cohere2", .layer_norm = 1, .parallel = 1, .logit_scale_multiplies = 1, .swa_rope_only = 1,
     .swa_period = 4, .swa_window = 4096},
    {.name = "internlm2"},
    {.name = "exaone", .rope_neox = 1},
    {.name = "seed_oss", .ffn_norm_is_post_attention = 1, .rope_neox = 1},
    {.name = "stablelm", .layer_norm = 1, .parallel_without_ffn_norm = 1, .rope_neox = 1},
    {.name = "starcoder2", .layer_norm = 1, .rope_neox = 1, .gelu = 1, .no_gate = 1},
    {.name = "phi2", .layer_norm = 1, .parallel = 1, .rope_neox = 1, .gelu = 1, .no_gate = 1},
    {.name = "gptneox", .layer_norm = 1, .parallel_key = 1, .rope_neox = 1, .gelu = 1, .no_gate = 1},
    {.name = "gpt2", .layer_norm = 1, .learned_positions = 1, .gelu = 1, .no_gate = 1},
    {.name = "falcon", .layer_norm = 1, .parallel = 1, .rope_neox = 1, .gelu = 1, .no_gate = 1},
    {.name = "mpt", .layer_norm = 1, .alibi_keys = 1, .alibi = 8, .gelu = 1, .no_gate = 1},
    {.name = "bloom", .layer_norm = 1, .embedding_norm = 1, .alibi = 8, .gelu = 1, .no_gate = 1},
    {.name = "qwen3moe", .qk_norm = 1, .rope_neox = 1, .moe = &rfi_moe_qwen3},
    {.name = "qwen2moe", .rope_neox = 1, .moe = &rfi_moe_qwen2},
    {.name = "olmoe", .qk_norm_wide = 1, .rope_neox = 1, .moe = &rfi_moe_olmo},
    {.name = "granitemoe", .scale_keys = 1, .rope_switch = 1, .moe = &rfi_moe_granite},
    {.name = "gpt-oss", .ffn_norm_is_post_attention = 1, .rope_neox = 1, .attn_sinks = 1, .swa_yarn = 1,
     .swa_period = 2, .swiglu_oai = 1, .moe = &rfi_moe_oss},
    {.name = "glm4moe", .ffn_norm_is_post_attention = 1, .qk_norm_optional = 1, .rope_neox = 1, .mrope = 1,
     .moe = &rfi_moe_glm4},
    {.name = "deepseek2", .mla = 1, .moe = &rfi_moe_deepseek2},
    {.name = "lfm2", .qk_norm = 1, .rope_neox = 1, .recurrent = &rfi_lfm2},
    {.name = "qwen35", .ffn_norm_is_post_attention = 1, .qk_norm = 1, .rope_neox = 1, .mrope = 2,
     .recurrent = &rfi_qwen35},
    {.name = "qwen35moe", .ffn_norm_is_post_attention = 1, .qk_norm = 1, .rope_neox = 1, .mrope = 2,
     .moe = &rfi_moe_qwen35, .recurrent = &rfi_qwen35},
    {.name = "qwen3next", .ffn_norm_is_post_attention = 1, .qk_norm = 1, .rope_neox = 1, .moe = &rfi_moe_qwen35,
     .recurrent = &rfi_qwen3next},
    {.name = "lfm2moe", .qk_norm = 1, .rope_neox = 1, .moe = &rfi_moe_lfm2, .recurrent = &rfi_lfm2},
};

static const rfi_arch *rfi_arch_find(rf_string name) {
    for (size_t i = 0; i < RFI_COUNT(rfi_archs); i++)
        if (rfi_str_equal(name, rfi_archs[i].name)) return &rfi_archs[i];
    return NULL;
}

static void rfi_arch_list(char *text, size_t capacity) {
    text[0] = 0;
    for (size_t i = 0; i < RFI_COUNT(rfi_archs); i++) rfi_list_name(text, capacity, rfi_archs[i].name);
}

static void rfi_plan_free(const rf_allocator *alloc, rf_plan *p) {
    rfi_free(alloc, (void *)(uintptr_t)p->ops);
    rfi_free(alloc, (void *)(uintptr_t)p->buffers);
    rfi_free(alloc, (void *)(uintptr_t)p->states);
    rfi_free(alloc, (void *)(uintptr_t)p->weights);
    rfi_free(alloc, (void *)(uintptr_t)p->tables);
    memset(p, 0, sizeof *p);
}

/* Make every buffer as wide as its ops need, and drop those that none uses. */
static void rfi_size_buffers(rfi_builder *b) {
    rf_plan_buffer *buffers = (rf_plan_buffer *)b->buffers.items;
    rf_op *ops = (rf_op *)b->ops.items;
    const rf_plan plan = {.n_vocab = b->c->n_vocab};
    uint32_t n = 0, ids[RFI_N_BUFFERS];
    for (rf_op *op = ops; op < ops + b->ops.n; op++) {
        const rf_op_spec spec = rf_op_get_spec(&plan, op);
        const rf_op_buffer used[] = {spec.out, spec.in[0], spec.in[1], spec.in[2]};
        for (uint32_t i = 0; i < RFI_COUNT(used); i++)
            if (used[i].id != RF_NONE && buffers[used[i].id].width < used[i].width)
                buffers[used[i].id].width = (uint32_t)used[i].width;
    }
    for (uint32_t i = 0; i < RFI_N_BUFFERS; i++) {
        ids[i] = n;
        if (buffers[i].width) buffers[n++] = buffers[i];
    }
    b->buffers.n = n;
    for (rf_op *op = ops; op < ops + b->ops.n; op++) {
        uint32_t *const used[] = {&op->in, &op->in2, &op->in3, &op->out};
        for (uint32_t i = 0; i < RFI_COUNT(used); i++)
            if (*used[i] != RF_NONE) *used[i] = ids[*used[i]];
    }
    b->logits = ids[b->logits];
    b->argmax = ids[b->argmax];
}

/* Tensors that change no logits: factors of activations that we do not quantize so, the layers after the last (MTP),
 * the parts for images and sound, the heads of classifiers, and frequencies that follow from the keys. */
static int rfi_tensor_is_ignored(const rfi_builder *b, rf_string name) {
    static const char *const starts[] = {"a.", "cls.", "mm.", "v."};
    static const char *const ends[] = {".input_scale", ".attn_rot_embd.weight"};
    uint64_t layer = 0, i = 4;
    for (uint32_t j = 0; j < RFI_COUNT(starts); j++)
        if (name.len > strlen(starts[j]) && memcmp(name.data, starts[j], strlen(starts[j])) == 0) return 1;
    for (uint32_t j = 0; j < RFI_COUNT(ends); j++)
        if (name.len > strlen(ends[j]) && memcmp(name.data + name.len - strlen(ends[j]), ends[j], strlen(ends[j])) == 0)
            return 1;
    if (name.len < 6 || memcmp(name.data, "blk.", 4) != 0) return 0;
    for (; i < name.len && i < 12 && name.data[i] >= '0' && name.data[i] <= '9'; i++)
        layer = 10 * layer + (uint64_t)(name.data[i] - '0');
    return i > 4 && i < name.len && name.data[i] == '.' && layer >= b->c->n_layers && layer < b->c->n_blocks;
}

/* Refuse a tensor that the plan does not use: a model without its bias would run, and wrong. */
static void rfi_refuse_unused(rfi_builder *b) {
    const uint64_t n = rf_gguf_get_info(b->g).n_tensors;
    const rf_plan_weight *w = (const rf_plan_weight *)b->weights.items;
    unsigned char *used = (unsigned char *)rfi_alloc(b->alloc, n, 1, "marks of tensors", b->err);
    if (!used) b->result = RF_ERR_MEMORY;
    for (uint32_t i = 0; b->result == RF_OK && i < b->weights.n; i++) used[w[i].tensor] = 1;
    for (uint64_t i = 0; b->result == RF_OK && i < n; i++) {
        rf_tensor_info t;
        if (used[i] || rf_gguf_get_tensor(b->g, i, &t, NULL) != RF_OK || rfi_tensor_is_ignored(b, t.name)) continue;
        b->result = rfi_fail(b->err, RF_ERR_UNSUPPORTED, t.where,
                             "%s: %.*s at byte %llu: this tensor is not used in a %s model, and it would change the "
                             "answer", rfi_gguf_path(b->g), RFI_STR(t.name), RFI_LLU(t.where), b->c->arch->name);
    }
    rfi_free(b->alloc, used);
}

/* Build the plan of a file: O(metadata), no tensor byte is read. */
static rf_result rfi_plan_build(const rf_gguf *g, const rfi_config *c, rf_plan *out, rf_error *err) {
    rfi_builder b;
    memset(&b, 0, sizeof b);
    b.g = g;
    b.alloc = rfi_gguf_allocator(g);
    b.c = c;
    b.err = err;
    rfi_emit_decoder(&b);
    if (b.result == RF_OK) rfi_refuse_unused(&b);
    if (b.result == RF_OK) rfi_size_buffers(&b);
    *out = (rf_plan){
        .ops = (const rf_op *)b.ops.items,
        .buffers = (const rf_plan_buffer *)b.buffers.items,
        .states = (const rf_plan_state *)b.states.items,
        .weights = (const rf_plan_weight *)b.weights.items,
        .tables = (const float *)b.tables.items,
        .n_ops = b.ops.n,
        .n_buffers = b.buffers.n,
        .n_states = b.states.n,
        .n_weights = b.weights.n,
        .n_tables = b.tables.n,
        .n_layers = c->n_layers,
        .n_embd = c->n_embd,
        .n_vocab = c->n_vocab,
        .logits = b.logits,
        .argmax = b.argmax,
    };
    if (b.result != RF_OK) rfi_plan_free(b.alloc, out);
    return b.result;
}

/* Check an op against the table of ops; the error names the device. */
static rf_result rfi_check_op(const char *device, const rf_plan *plan, const rf_op *op, rf_error *err) {
    const char *why = rf_op_check(plan, op), *name = op->weight < plan->n_weights ? plan->weights[op->weight].name : "";
    if (!why) return RF_OK;
    return rfi_fail(err, op->kind < RF_OP_KIND_COUNT ? RF_ERR_ARGUMENT : RF_ERR_UNSUPPORTED,
                    (uint64_t)(op - plan->ops), "%s: op %u (%s%s%s): %s", device, (uint32_t)(op - plan->ops),
                    rf_op_name(op->kind), *name ? " " : "", name, why);
}

/* ==== 10 CPU kernels =================================================================================== >>kernels
 * Dot products, attention and elementwise functions, single-threaded. Each instruction set has a table of functions,
 * chosen at run time; functions carry target attributes, so the file needs no -m flags.
 *
 * Dot products with quantized weights give the same bits on every instruction set and device. Inputs are quantized to
 * int8 in groups of 32 (rfi_q8), and one output is
 *     y = 0; for each group in order: y = fma(float(isum), d_w * d_x, y); if the type has mins: y = fma(m_w, s_x, y)
 * isum is the exact integer dot product of the group, d_w = d or d * scale, m_w = m or -dmin * min. Types with a scale
 * for every 16 values (Q6_K, Q2_K, Q3_K, NVFP4, IQ2_XS, IQ2_S, IQ1_M) do this for each half of a group; s_x of Q2_K is
 * then d_x times the sum of that half. Types of RFI_EXPANDED_TYPES take isum over the q of rfi_expanded, its s as d_w
 * and its m as m_w. How rows are divided over lanes, panels and threads does not change the result.
 * Dot products with float weights sum in lanes along the row, whose number depends on the instruction set; rows longer
 * than RFI_FLOAT_CHUNK are summed chunk by chunk. */

#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O2", "fp-contract=off") /* without it intrinsics at -O0 are 15 to 70 times slower */
#else
#pragma STDC FP_CONTRACT OFF
#endif

/* Arrays of vectors stay in registers only where the loops over them are unrolled. */
#define RFI_PRAGMA(text) _Pragma(#text)
#define RFI_UNROLL(n) RFI_PRAGMA(GCC unroll n)

/* ---- inputs ---- */

/* 32 inputs of a quantized product, one cache line. For x[0..32) with top = max |x|:
 *     d = top / 127 and q = round-to-nearest-even(x * (1 / d)), all in float32;
 *     d = 0 and q = 0 if that d < 2^-126;  d = nan and q = 0 if an x is infinite or nan. */
typedef struct rfi_q8 {
    int8_t q[32];
    float d;
    float s;         /* d * sum of q                                             */
    int32_t b;       /* -128 * sum of q: undoes the bias of unsigned weights     */
    int32_t b16[2];  /* the same of each half                                    */
    float s16[2];    /* d * sum of q of each half                                */
    int32_t zero;    /* to the end of the line                                   */
} rfi_q8;
_Static_assert(sizeof(rfi_q8) == 64, "one cache line");

/* Inputs of a matmul: column j at f + j * f_stride (float weights) or at q + j * q_stride (quantized weights), which
 * has rfi_q8_groups(n_in) groups. 64-byte alignment is faster. */
typedef struct rfi_acts {
    const float *f;
    uint64_t f_stride;
    const rfi_q8 *q;
    uint64_t q_stride;
} rfi_acts;

/* Groups to allocate per column: whole units of 8, and one more so that columns do not share cache sets. */
static uint64_t rfi_q8_groups(uint32_t n_in) { return ((uint64_t)n_in + 255) / 256 * 8 + 1; }

/* One kv head and the n_group query heads that share it, for n_tokens consecutive tokens of one sequence. */
typedef struct rfi_attention {
    const float *q;          /* [n_tokens][q_stride], heads side by side: [n_group][head_dim]                  */
    uint64_t q_stride;
    const void *k, *v;       /* [n_cells][head_dim], [n_cells][head_dim_v], of cache_type                      */
    uint32_t n_cells;        /* a ring buffer: position p is in cell p % n_cells (RF_STATE_CELLS)              */
    uint32_t cache_type;     /* rf_cache_type                                                                  */
    uint32_t n_tokens;
    uint32_t n_pos;          /* positions the first token attends to, itself included; token t: n_pos + t      */
    uint32_t n_group, head_dim, head_dim_v;
    const float *sinks;      /* [n_group] attention sinks: one more score per head, with no value; or NULL     */
    const float *slopes;     /* [n_group] ALiBi: slope * distance is subtracted from a score; or NULL          */
    uint32_t window;         /* SWA: positions a token attends to, itself included; 0: all                     */
    float scale, softcap, temperature;
    uint32_t temperature_length;
    float *scratch;          /* [rfi_attention_scratch(n_group, head_dim, head_dim_v)]                         */
    float *cells;            /* RF_CACHE_Q8_0: [RFI_ATTENTION_BLOCK][the larger head_dim], a block as floats   */
    uint32_t v_rest;         /* trailing elements of v's rows that are no values (MLA); out leaves them out    */
    float *out;              /* [n_tokens][out_stride], [n_group][head_dim_v - v_rest]                         */
    uint64_t out_stride;
} rfi_attention;

#define RFI_ATTENTION_COLS  128u /* queries that share a pass over keys and values; n_group if that is more        */
#define RFI_ATTENTION_BLOCK 256u /* positions per block: its keys, values and scores stay in cache                 */

static uint32_t rfi_attention_tokens(uint32_t n_group) {
    return n_group < RFI_ATTENTION_COLS ? RFI_ATTENTION_COLS / n_group : 1;
}

/* Floats of scratch: queries, weighted sums of values, scores, and a maximum and a sum for each query. */
static uint64_t rfi_attention_scratch(uint32_t n_group, uint32_t head_dim, uint32_t head_dim_v) {
    return (uint64_t)rfi_attention_tokens(n_group) * n_group * (head_dim + head_dim_v + RFI_ATTENTION_BLOCK + 2ull);
}

typedef struct rfi_matmul {
    const uint8_t *w;
    uint64_t row_bytes;
    uint32_t n_rows, n_in;
    const rfi_acts *x;
    uint32_t n_cols;
    float *y;
    uint64_t y_stride;
} rfi_matmul;

/* Rows of weights that are multiplied together, one per lane. Past the last row it is repeated. */
typedef struct rfi_rows {
    const uint8_t *row[16];
    uint64_t row_bytes;     /* from one to the next; 0: nothing to prefetch */
    int extended;           /* rfi_kernels.extended                         */
} rfi_rows;

#define RFI_CHUNK_GROUPS 16u /* groups of a panel: 512 values, so that the inputs of a chunk stay in L2 */

/* Weights unpacked for many columns: 4 values of each lane together, the layout of integer dot instructions. */
typedef struct rfi_panel {
    _Alignas(64) uint8_t q[RFI_CHUNK_GROUPS * 8 * 16 * 4]; /* [group][8][lane][4]                                  */
    float s[RFI_CHUNK_GROUPS * 2 * 16];       /* d_w: [group][lane], or [group * 2 + half][lane]      */
    float m[RFI_CHUNK_GROUPS * 2 * 16];       /* m_w likewise                                         */
} rfi_panel;

/* Panels times columns: adds n_groups groups to acc[c * acc_stride + row]; rows are the lanes of all panels. */
typedef struct rfi_tile {
    const rfi_panel *p;  /* [n_panels]                    */
    uint32_t type;       /* rf_type, or RFI_TYPE_EXPANDED */
    uint32_t n_groups, n_cols;
    int extended;        /* rfi_kernels.extended          */
    const rfi_q8 *x;
    uint64_t x_stride;
    float *acc;
    uint64_t acc_stride;
} rfi_tile;

/* Kernels of one type on one instruction set. A unit is 8 groups: one K block, 8 blocks of 32, or one rfi_expanded. */
typedef struct rfi_quant {
    /* one column: adds n_groups groups to acc [n_lanes] */
    void (*vector)(const rfi_rows *r, uint32_t n_groups, const rfi_q8 *x, float *acc);
    /* writes the unit at offset to groups [at, at + 8) of the panel */
    void (*unpack)(const rfi_rows *r, uint64_t offset, uint32_t at, rfi_panel *p);
} rfi_quant;

typedef struct rfi_float_tile rfi_float_tile;

/* A norm of n values: RF_OP_RMS_NORM. */
typedef struct rfi_norm {
    const float *w, *b; /* [n], or NULL                 */
    uint32_t n;
    float eps;
    int center;         /* subtract the mean: layer norm */
    int accumulate;     /* out +=                       */
} rfi_norm;

/* One row of one head through RF_OP_DELTA. */
typedef struct rfi_delta {
    const float *q, *k, *v;
    float beta, decay, scale, eps;
    uint32_t head_dim, head_dim_v;
    float *s;   /* [head_dim][head_dim_v], before and after */
    float *d;   /* [head_dim_v] scratch                     */
    float *out; /* [head_dim_v]                             */
} rfi_delta;

/* out[c * out_stride + d] += sum over pos of p[c * p_stride + pos] * v[pos][d], in order of pos */
typedef struct rfi_weigh {
    const void *v;
    uint32_t n_pos, head_dim_v;
    const float *p;
    uint64_t p_stride;
    uint32_t n_cols;
    float *out;
    uint64_t out_stride;
} rfi_weigh;

typedef struct rfi_kernels {
    const char *name;       /* of rf_device_desc.isa     */
    const char *arch_text;  /* of rf_device_info.arch    */
    /* x [n_in], n_in a multiple of 32 -> rfi_q8_groups(n_in) groups, the last ones zero */
    void (*quantize)(const float *x, uint32_t n_in, rfi_q8 *out);
    /* Matmuls: rfi_matmul_run. Row counts that are multiples of n_lanes * n_panels waste nothing. */
    uint32_t n_lanes, n_panels, n_cols; /* rows of a panel; panels and columns of a tile at most */
    int extended;                       /* may use VNNI (AVX2) or I8MM (NEON)                    */
    rfi_quant quant[RFI_TYPE_EXPANDED_MIN + 1];
    void (*tile)(const rfi_tile *t);
    rfi_expand_fn (*expander)(uint32_t type);
    void (*float_tile[RF_TYPE_BF16 + 1])(rfi_float_tile *t);
    void (*norm)(float *out, const float *x, const rfi_norm *norm);                      /* out may be x */
    /* out = act(gate) * up, or act(gate) if up is NULL; out may be gate or up */
    void (*glu)(float *out, const float *gate, const float *up, uint32_t n, uint32_t activation);
    /* out[c] = sum over j of w[j * n + c] * x[j * n + c], in order of j < n_taps */
    void (*conv)(float *out, const float *x, const float *w, uint32_t n_taps, uint32_t n);
    void (*delta)(const rfi_delta *a);
    void (*add)(float *out, const float *x, uint32_t n);                                 /* out += x */
    void (*scale)(float *x, uint32_t n, float factor);                                   /* x *= factor */
    void (*softcap)(float *x, uint32_t n, float cap);                                    /* x = cap * tanh(x / cap) */
    void (*rope)(float *head, const float *cos_sin, uint32_t n_rot, int neox);           /* cos_sin [n_rot/2][2] */
    void (*f32_to_f16)(uint16_t *dst, const float *src, uint32_t n);
    /* n values, a multiple of 32, and their scales: RF_CACHE_Q8_0 */
    void (*f32_to_q8)(int8_t *q, uint16_t *scales, const float *src, uint32_t n);
    void (*q8_to_f32)(float *dst, const int8_t *q, const uint16_t *scales, uint32_t n);
    /* s[c * RFI_ATTENTION_BLOCK + pos] = q[c] . k[pos], added up in order of the dimensions, for n_pos positions; s has
     * room for a whole block */
    void (*scores[2])(const void *k, uint32_t n_pos, uint32_t head_dim, const float *q, uint32_t n_cols, float *s);
    /* Online softmax, n more scores: *top is the maximum so far, at first -inf, *sum the sum of exp(score - *top).
     * Writes s[i] = exp(scale * s[i] - *top); returns the factor for what was summed before. */
    float (*softmax)(float *s, uint32_t n, float scale, float *top, float *sum);
    void (*weigh[2])(const rfi_weigh *a);
} rfi_kernels;

/* ---- elementwise kernels: one source for all instruction sets; a fixed number of lanes keeps the bits equal ---- */

/* Adding it rounds to nearest even for |x| < 2^22, the same on every machine. */
#define RFI_ROUND_MAGIC 12582912.0f
#define RFI_ROUND_BITS 0x4b400000u

/* The scale of a group, from the bits of its largest |x|; returns 1 / d. As integers nan > inf > all numbers. */
RFI_INLINE float rfi_q8_scale(uint32_t top, rfi_q8 *out) {
    const float d = rfi_f32_of_bits(top) / 127.0f;
    out->d = top >= 0x7f800000u ? rfi_f32_of_bits(0x7fc00000u) : d >= 0x1p-126f ? d : 0;
    return d >= 0x1p-126f ? 1.0f / d : 0;
}

RFI_INLINE void rfi_q8_sums(int32_t first, int32_t second, rfi_q8 *out) {
    out->s = out->d * (float)(first + second);
    out->b = -128 * (first + second);
    out->b16[0] = -128 * first;
    out->b16[1] = -128 * second;
    out->s16[0] = out->d * (float)first;
    out->s16[1] = out->d * (float)second;
    out->zero = 0;
}

RFI_INLINE void rfi_scalar_q8(const float *restrict x, rfi_q8 *restrict out) {
    uint32_t top = 0;
    int32_t sum[2] = {0, 0};
    for (int l = 0; l < 32; l++) {
        uint32_t a = rfi_bits_of_f32(x[l]) & 0x7fffffffu;
        top = a > top ? a : top;
    }
    const float id = rfi_q8_scale(top, out);
    for (int l = 0; l < 32; l++) {
        uint32_t bits = rfi_bits_of_f32((top < 0x7f800000u ? x[l] : 0.0f) * id + RFI_ROUND_MAGIC);
        int32_t q = (int32_t)(bits - RFI_ROUND_BITS);
        out->q[l] = (int8_t)q;
        sum[l >> 4] += q;
    }
    rfi_q8_sums(sum[0], sum[1], out);
}

/* if_so ? a : b with masks: compilers make the operator a branch and then do not vectorise. */
RFI_INLINE float rfi_choose(int if_so, float a, float b) {
    const uint32_t mask = 0u - (uint32_t)if_so;
    return rfi_f32_of_bits((rfi_bits_of_f32(a) & mask) | (rfi_bits_of_f32(b) & ~mask));
}

/* e^x to 1.5 ulp: x = n ln 2 + r, polynomial in r (minimax, relative error 3e-9), 2^n in two steps so that results near
 * overflow and subnormal ones come out right. nan stays nan. */
RFI_INLINE float rfi_exp(float x) {
    x = rfi_choose(x < -104.0f, -104.0f, x);
    x = rfi_choose(x > 89.0f, 89.0f, x);
    float shifted = x * 0x1.715476p+0f + RFI_ROUND_MAGIC;
    float n = shifted - RFI_ROUND_MAGIC;
    float r = x - n * 0x1.62e4p-1f;   /* ln 2 in two parts: n times the first is exact */
    r = r - n * 0x1.7f7d1cp-20f;
    float p = 0x1.6a23dp-10f;
    p = p * r + 0x1.123a2p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r * r + r + 1.0f;
    int32_t e = (int32_t)(rfi_bits_of_f32(shifted) - RFI_ROUND_BITS), half = e >> 1;
    return p * rfi_f32_of_bits((uint32_t)(half + 127) << 23) * rfi_f32_of_bits((uint32_t)(e - half + 127) << 23);
}

/* 16 lanes of sums as a vector type: an array would be kept in memory. */
typedef float rfi_lanes __attribute__((vector_size(64)));

/* The sum of (x - mean)^2 if square, of x - mean otherwise. */
RFI_INLINE double rfi_norm_sum(const float *x, uint32_t n, float mean, int square) {
    rfi_lanes lanes = {0}, v;
    float lane[16];
    double sum = 0; /* of the lanes, in double precision */
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        memcpy(&v, x + i, sizeof v);
        v -= mean;
        lanes += square ? v * v : v;
    }
    memcpy(lane, &lanes, sizeof lane);
    for (uint32_t l = 0; i + l < n; l++) lane[l] += square ? (x[i + l] - mean) * (x[i + l] - mean) : x[i + l];
    for (int l = 0; l < 16; l++) sum += (double)lane[l];
    return sum;
}

RFI_INLINE void rfi_norm_body(float *out, const float *x, const rfi_norm *p) {
    const uint32_t n = p->n;
    const float *w = p->w, *b = p->b;
    const float mean = p->center ? (float)(rfi_norm_sum(x, n, 0, 0) / (double)n) : 0;
    const float scale = 1.0f / sqrtf((float)(rfi_norm_sum(x, n, mean, 1) / (double)n) + p->eps);
    if (w && !b && !p->center && !p->accumulate) {
        for (uint32_t i = 0; i < n; i++) out[i] = x[i] * scale * w[i];
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        float y = (x[i] - mean) * scale;
        if (w) y *= w[i];
        if (b) y += b[i];
        out[i] = p->accumulate ? out[i] + y : y;
    }
}

/* Every activation is a / (1 + e^z) * b; without one e^z is 0. In blocks of constant size, which compilers turn into
 * plain vector loops. */
RFI_INLINE void rfi_glu_body(float *out, const float *gate, const float *up, uint32_t n, uint32_t activation) {
    for (uint32_t at = 0; at < n; at += 64) {
        float a[64] = {0}, b[64], z[64];
        const size_t bytes = rfi_min_u64(64, n - at) * sizeof *a;
        for (int i = 0; i < 64; i++) b[i] = 1.0f, z[i] = -104.0f;
        memcpy(a, gate + at, bytes);
        if (up) memcpy(b, up + at, bytes);
        if (activation == RF_ACT_OAI)
            for (int i = 0; i < 64; i++) {
                a[i] = rfi_choose(a[i] > 7.0f, 7.0f, a[i]);
                b[i] = rfi_choose(b[i] > 7.0f, 7.0f, rfi_choose(b[i] < -7.0f, -7.0f, b[i])) + 1.0f;
                z[i] = -1.702f * a[i];
            }
        else if (activation == RF_ACT_GELU)
            for (int i = 0; i < 64; i++) z[i] = -1.5957691216057308f * (a[i] + 0.044715f * a[i] * a[i] * a[i]);
        else if (activation != RF_ACT_NONE)
            for (int i = 0; i < 64; i++) z[i] = -a[i];
        if (activation == RF_ACT_SIGMOID)
            for (int i = 0; i < 64; i++) a[i] = b[i], b[i] = 1.0f;
        for (int i = 0; i < 64; i++) a[i] = a[i] / (1.0f + rfi_exp(z[i])) * b[i];
        memcpy(out + at, a, bytes);
    }
}

RFI_INLINE void rfi_conv_body(float *out, const float *x, const float *w, uint32_t n_taps, uint32_t n) {
    for (uint32_t c = 0; c < n; c++) out[c] = w[c] * x[c];
    for (uint32_t j = 1; j < n_taps; j++)
        for (uint32_t c = 0; c < n; c++) out[c] += w[j * n + c] * x[j * n + c];
}

RFI_INLINE void rfi_delta_body(const rfi_delta *a) {
    const uint32_t n = a->head_dim, n_v = a->head_dim_v;
    const float q_scale = a->scale / sqrtf((float)rfi_norm_sum(a->q, n, 0, 1) + a->eps),
                k_scale = 1.0f / sqrtf((float)rfi_norm_sum(a->k, n, 0, 1) + a->eps);
    float *d = a->d, *out = a->out, *s = a->s;
    for (uint32_t j = 0; j < n_v; j++) d[j] = out[j] = 0;
    for (uint32_t i = 0; i < n; i++, s += n_v) {
        const float k = a->k[i] * k_scale;
        for (uint32_t j = 0; j < n_v; j++) s[j] *= a->decay;
        for (uint32_t j = 0; j < n_v; j++) d[j] += s[j] * k;
    }
    for (uint32_t j = 0; j < n_v; j++) d[j] = a->beta * (a->v[j] - d[j]);
    s = a->s;
    for (uint32_t i = 0; i < n; i++, s += n_v) {
        const float k = a->k[i] * k_scale, q = a->q[i] * q_scale;
        for (uint32_t j = 0; j < n_v; j++) s[j] += k * d[j];
        for (uint32_t j = 0; j < n_v; j++) out[j] += s[j] * q;
    }
}

RFI_INLINE void rfi_scale_body(float *x, uint32_t n, float factor) {
    for (uint32_t i = 0; i < n; i++) x[i] *= factor;
}

/* tanh y = 1 - 2 / (e^2y + 1); the error is at most 1e-7 of the cap. */
RFI_INLINE void rfi_softcap_body(float *x, uint32_t n, float cap) {
    const float twice = 2.0f / cap;
    for (uint32_t i = 0; i < n; i++) x[i] = cap * (1.0f - 2.0f / (rfi_exp(x[i] * twice) + 1.0f));
}

RFI_INLINE void rfi_add_body(float *out, const float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) out[i] += x[i];
}

RFI_INLINE void rfi_rope_body(float *head, const float *cos_sin, uint32_t n_rot, int neox) {
    const uint32_t half = n_rot / 2;
    float *a = head, *b = neox ? head + half : head + 1;
    const uint32_t step = neox ? 1 : 2;
    for (uint32_t i = 0; i < half; i++) {
        const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1], u = a[i * step], v = b[i * step];
        a[i * step] = u * c - v * s;
        b[i * step] = u * s + v * c;
    }
}

RFI_INLINE void rfi_scalar_f16(uint16_t *dst, const float *src, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) dst[i] = rfi_f32_to_f16(src[i]);
}

RFI_INLINE void rfi_q8_to_f32_body(float *restrict dst, const int8_t *restrict q, const uint16_t *scales, uint32_t n) {
    for (uint32_t g = 0; g < n / 32; g++) {
        const float scale = rfi_f16_to_f32(scales[g]);
        for (uint32_t l = 0; l < 32; l++) dst[g * 32 + l] = (float)q[g * 32 + l] * scale;
    }
}

/* Maps float bits to ints in the same order, so that integer vectors find the maximum; an involution. */
RFI_INLINE int32_t rfi_order(int32_t bits) { return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1); }

RFI_INLINE float rfi_softmax_body(float *s, uint32_t n, float scale, float *top, float *sum) {
    rfi_lanes lanes = {0}, v;
    float lane[16];
    int32_t max = rfi_order((int32_t)rfi_bits_of_f32(*top));
    uint32_t i;
    for (i = 0; i < n; i++) s[i] *= scale;
    for (i = 0; i < n; i++) {
        const int32_t order = rfi_order((int32_t)rfi_bits_of_f32(s[i]));
        max = order > max ? order : max;
    }
    const float new_top = rfi_f32_of_bits((uint32_t)rfi_order(max));
    for (i = 0; i < n; i++) s[i] = rfi_exp(s[i] - new_top); /* a separate loop, so that it is vectorised */
    for (i = 0; i + 16 <= n; i += 16) memcpy(&v, s + i, sizeof v), lanes += v;
    memcpy(lane, &lanes, sizeof lane);
    for (uint32_t l = 0; i + l < n; l++) lane[l] += s[i + l];
    for (int width = 8; width; width /= 2)
        for (int l = 0; l < width; l++) lane[l] += lane[l + width];
    const float earlier = rfi_exp(*top - new_top);
    *sum = *sum * earlier + lane[0];
    *top = new_top;
    return earlier;
}

/* The elementwise functions of an instruction set. */
#define RFI_ELEMENTWISE(isa, TARGET)                                                                                  \
    static TARGET void rfi_quantize_##isa(const float *x, uint32_t n_in, rfi_q8 *out) {                               \
        const uint32_t n = n_in / 32;                                                                                 \
        for (uint32_t g = 0; g < n; g++) rfi_##isa##_q8(x + g * 32, out + g);                                         \
        memset(out + n, 0, (size_t)(rfi_q8_groups(n_in) - n) * sizeof *out);                                          \
    }                                                                                                                 \
    static TARGET void rfi_norm_##isa(float *out, const float *x, const rfi_norm *p) { rfi_norm_body(out, x, p); }    \
    static TARGET void rfi_glu_##isa(float *out, const float *gate, const float *up, uint32_t n, uint32_t act) {      \
        rfi_glu_body(out, gate, up, n, act);                                                                          \
    }                                                                                                                 \
    static TARGET void rfi_conv_##isa(float *out, const float *x, const float *w, uint32_t n_taps, uint32_t n) {      \
        rfi_conv_body(out, x, w, n_taps, n);                                                                          \
    }                                                                                                                 \
    static TARGET void rfi_delta_##isa(const rfi_delta *a) { rfi_delta_body(a); }                                     \
    static TARGET void rfi_scale_##isa(float *x, uint32_t n, float factor) { rfi_scale_body(x, n, factor); }          \
    static TARGET void rfi_softcap_##isa(float *x, uint32_t n, float cap) { rfi_softcap_body(x, n, cap); }            \
    static TARGET void rfi_add_##isa(float *out, const float *x, uint32_t n) { rfi_add_body(out, x, n); }             \
    static TARGET void rfi_rope_##isa(float *head, const float *cos_sin, uint32_t n_rot, int neox) {                  \
        if (neox) rfi_rope_body(head, cos_sin, n_rot, 1);                                                             \
        else rfi_rope_body(head, cos_sin, n_rot, 0);                                                                  \
    }                                                                                                                 \
    static TARGET void rfi_f32_to_f16_##isa(uint16_t *dst, const float *src, uint32_t n) {                            \
        rfi_##isa##_f16(dst, src, n);                                                                                 \
    }                                                                                                                 \
    static TARGET void rfi_f32_to_q8_##isa(int8_t *q, uint16_t *scales, const float *src, uint32_t n) {               \
        for (uint32_t g = 0; g < n / 32; g++) {                                                                       \
            rfi_q8 group;                                                                                             \
            rfi_##isa##_q8(src + g * 32, &group);                                                                     \
            memcpy(q + g * 32, group.q, sizeof group.q);                                                              \
            scales[g] = rfi_f32_to_f16(group.d);                                                                      \
        }                                                                                                             \
    }                                                                                                                 \
    static TARGET void rfi_q8_to_f32_##isa(float *dst, const int8_t *q, const uint16_t *scales, uint32_t n) {         \
        rfi_q8_to_f32_body(dst, q, scales, n);                                                                        \
    }                                                                                                                 \
    static TARGET float rfi_softmax_##isa(float *s, uint32_t n, float scale, float *top, float *sum) {                \
        return rfi_softmax_body(s, n, scale, top, sum);                                                               \
    }

/* ---- attention ---- */

/* A pass over keys and values for n_tokens tokens of n_group heads each: n_cols columns, contiguous in scratch. */
typedef struct rfi_attention_pass {
    const rfi_attention *a;
    uint32_t n_tokens, n_cols;
    uint32_t n_pos;             /* of the first token        */
    float *q, *out, *scores, *top, *sum;
} rfi_attention_pass;

typedef struct rfi_span {
    uint32_t begin, end;
} rfi_span;

/* The part of positions [pos, pos + n) that token t of the pass attends to, relative to pos; may be empty. */
static rfi_span rfi_attention_sees(const rfi_attention_pass *p, uint32_t t, uint32_t pos, uint32_t n) {
    const uint32_t end = p->n_pos + t, window = p->a->window;
    const uint32_t begin = window && end > window ? end - window : 0;
    rfi_span s = {begin > pos ? begin - pos : 0, end > pos ? (uint32_t)rfi_min_u64(n, end - pos) : 0};
    if (s.begin > s.end) s.begin = s.end;
    return s;
}

/* Adds the weighted values at positions [from, to) of a block to the outputs of n_tokens tokens from t on. */
static void rfi_attention_weigh(const rfi_kernels *k, const rfi_attention_pass *p, const uint8_t *v, uint32_t t,
                                uint32_t n_tokens, uint32_t from, uint32_t to) {
    const rfi_attention *a = p->a;
    const int wide = a->cache_type != RF_CACHE_F16;
    const uint64_t c = (uint64_t)t * a->n_group;
    if (from < to)
        k->weigh[wide](&(rfi_weigh){v + (uint64_t)from * a->head_dim_v * (wide ? 4 : 2), to - from, a->head_dim_v,
                                    p->scores + c * RFI_ATTENTION_BLOCK + from, RFI_ATTENTION_BLOCK,
                                    n_tokens * a->n_group, p->out + c * a->head_dim_v, a->head_dim_v});
}

/* n rows of keys or values from a cell on; Q8_0 is dequantized first. */
static const uint8_t *rfi_attention_rows(const rfi_kernels *k, const rfi_attention *a, const void *rows, uint32_t cell,
                                         uint32_t n, uint32_t dim) {
    const uint64_t row_bytes = rf_cache_row_bytes(a->cache_type, dim);
    const uint8_t *from = (const uint8_t *)rows + cell * row_bytes;
    if (a->cache_type != RF_CACHE_Q8_0) return from;
    for (uint32_t i = 0; i < n; i++, from += row_bytes)
        k->q8_to_f32(a->cells + (uint64_t)i * dim, (const int8_t *)from, (const uint16_t *)(const void *)(from + dim),
                     dim);
    return (const uint8_t *)a->cells;
}

/* Positions [pos, pos + n), n at most a block. Blocks and order are the same for a query whatever else is in the batch,
 * and so are its bits. */
static void rfi_attention_block(const rfi_kernels *k, const rfi_attention_pass *p, uint32_t pos, uint32_t n) {
    const rfi_attention *a = p->a;
    const uint32_t cell = pos % a->n_cells; /* masked cells may hold other positions */
    k->scores[a->cache_type != RF_CACHE_F16](rfi_attention_rows(k, a, a->k, cell, n, a->head_dim), n, a->head_dim, p->q,
                                             p->n_cols, p->scores);
    for (uint32_t c = 0; c < p->n_cols; c++) {
        const rfi_span sees = rfi_attention_sees(p, c / a->n_group, pos, n);
        const uint32_t n_seen = sees.end - sees.begin;
        float *s = p->scores + (uint64_t)c * RFI_ATTENTION_BLOCK + sees.begin, scale = a->scale;
        if (n_seen == 0) continue;
        if (a->softcap != 0) {
            k->scale(s, n_seen, scale);
            k->softcap(s, n_seen, a->softcap);
            scale = 1;
        }
        if (a->slopes) {
            const float slope = a->slopes[c % a->n_group], own = (float)(p->n_pos + c / a->n_group - 1);
            for (uint32_t i = 0; i < n_seen; i++) s[i] = s[i] * scale + slope * ((float)(pos + sees.begin + i) - own);
            scale = 1;
        }
        const float earlier = k->softmax(s, n_seen, scale, &p->top[c], &p->sum[c]);
        float *out = p->out + (uint64_t)c * a->head_dim_v;
        for (uint32_t d = 0; earlier != 1 && d < a->head_dim_v; d++) out[d] *= earlier;
    }
    const uint8_t *v = rfi_attention_rows(k, a, a->v, cell, n, a->head_dim_v);
    /* the positions that all tokens share; before and after them, each token alone */
    rfi_span all = {rfi_attention_sees(p, p->n_tokens - 1, pos, n).begin, rfi_attention_sees(p, 0, pos, n).end};
    if (all.begin >= all.end) all.begin = all.end = n;
    for (uint32_t t = 0; t < p->n_tokens; t++) {
        const rfi_span sees = rfi_attention_sees(p, t, pos, n);
        rfi_attention_weigh(k, p, v, t, 1, sees.begin, (uint32_t)rfi_min_u64(sees.end, all.begin));
    }
    rfi_attention_weigh(k, p, v, 0, p->n_tokens, all.begin, all.end);
    for (uint32_t t = 0; t < p->n_tokens; t++)
        rfi_attention_weigh(k, p, v, t, 1, all.end, rfi_attention_sees(p, t, pos, n).end);
}

static float rfi_attention_temperature(const rfi_attention *a, uint32_t pos) {
    return (float)(1 + (double)a->temperature * log(1 + floor((double)pos / a->temperature_length)));
}

static void rfi_attention_run(const rfi_kernels *k, const rfi_attention *a) {
    const uint32_t step = rfi_attention_tokens(a->n_group), n_max = step * a->n_group;
    rfi_attention_pass p = {.a = a, .q = a->scratch};
    p.out = p.q + (uint64_t)n_max * a->head_dim;
    p.scores = p.out + (uint64_t)n_max * a->head_dim_v;
    p.top = p.scores + (uint64_t)n_max * RFI_ATTENTION_BLOCK;
    p.sum = p.top + n_max;
    for (uint32_t t = 0; t < a->n_tokens; t += step) {
        p.n_tokens = (uint32_t)rfi_min_u64(step, a->n_tokens - t);
        p.n_cols = p.n_tokens * a->n_group;
        p.n_pos = a->n_pos + t;
        const size_t q_floats = (size_t)a->n_group * a->head_dim, out_floats = (size_t)a->n_group * a->head_dim_v;
        for (uint32_t i = 0; i < p.n_tokens; i++) {
            memcpy(p.q + i * q_floats, a->q + (t + i) * a->q_stride, q_floats * sizeof(float));
            if (a->temperature != 0)
                k->scale(p.q + i * q_floats, (uint32_t)q_floats, rfi_attention_temperature(a, p.n_pos + i - 1));
        }
        memset(p.out, 0, p.n_tokens * out_floats * sizeof(float));
        for (uint32_t c = 0; c < p.n_cols; c++) {
            p.top[c] = a->sinks ? a->sinks[c % a->n_group] : -HUGE_VALF;
            p.sum[c] = a->sinks ? 1 : 0;
        }
        const uint32_t n_pos = p.n_pos + p.n_tokens - 1;
        uint32_t pos = rfi_attention_sees(&p, 0, 0, n_pos).begin / RFI_ATTENTION_BLOCK * RFI_ATTENTION_BLOCK;
        for (; pos < n_pos; pos += RFI_ATTENTION_BLOCK)
            rfi_attention_block(k, &p, pos, (uint32_t)rfi_min_u64(RFI_ATTENTION_BLOCK, n_pos - pos));
        for (uint32_t c = 0; c < p.n_cols; c++) {
            const uint32_t n_out = a->head_dim_v - a->v_rest;
            float *out = a->out + (t + c / a->n_group) * a->out_stride + (uint64_t)(c % a->n_group) * n_out;
            for (uint32_t d = 0; d < n_out; d++) out[d] = p.out[(uint64_t)c * a->head_dim_v + d] / p.sum[c];
        }
    }
}

#define RFI_SCORES_PARAMS const void *k, uint32_t n_pos, uint32_t head_dim, const float *q, uint32_t n_cols, float *s
#define RFI_SCORES_DIMS 64u /* dimensions of keys that are transposed at once */

/* Keys of up to 32 positions; past the last one it is repeated. */
typedef struct rfi_keys {
    const uint8_t *row[32];
} rfi_keys;

static void rfi_keys_at(const void *k, uint64_t row_bytes, uint32_t pos, uint32_t n_pos, uint32_t n, rfi_keys *out) {
    for (uint32_t i = 0; i < n; i++)
        out->row[i] = (const uint8_t *)k + rfi_min_u64(pos + i, n_pos - 1) * row_bytes;
}

/* Prefetches n bytes: hardware prefetchers stop at page boundaries. Past the end of memory it does nothing. */
RFI_INLINE void rfi_keys_prefetch(uintptr_t p, uint64_t n) {
    for (uint64_t i = 0; i < n; i += 64) __builtin_prefetch((const void *)(p + i));
}

/* Scores on one instruction set: the keys of RFI_KEYS_ISA positions are transposed, so that lanes are positions, and
 * multiplied with several queries at once. */
#define RFI_SCORES(isa, TARGET, TYPE, bytes)                                                                          \
    static TARGET void rfi_##isa##_scores_##TYPE(RFI_SCORES_PARAMS) {                                                 \
        _Alignas(64) float keys_t[RFI_SCORES_DIMS * RFI_KEYS_##isa];                                                  \
        for (uint32_t pos = 0; pos < n_pos; pos += RFI_KEYS_##isa) {                                                  \
            rfi_keys keys;                                                                                            \
            rfi_keys_at(k, (uint64_t)head_dim * (bytes), pos, n_pos, RFI_KEYS_##isa, &keys);                          \
            rfi_keys_prefetch((uintptr_t)keys.row[RFI_KEYS_##isa - 1],                                                \
                           (uint64_t)head_dim * (bytes) * (RFI_KEYS_##isa + 1));                                      \
            for (uint32_t d = 0; d < head_dim; d += RFI_SCORES_DIMS) {                                                \
                const uint32_t n = (uint32_t)rfi_min_u64(RFI_SCORES_DIMS, head_dim - d);                              \
                rfi_##isa##_transpose_keys(RF_TYPE_##TYPE, &keys, d, n, keys_t);                                      \
                rfi_##isa##_dots_q(&(rfi_dots){keys_t, n, d, head_dim, q, n_cols, s + pos});                          \
            }                                                                                                         \
        }                                                                                                             \
    }

/* Dimensions [d, d + n) of transposed keys times all columns, added to their scores. */
typedef struct rfi_dots {
    const float *keys_t;
    uint32_t n, d, head_dim;
    const float *q;
    uint32_t n_cols;
    float *s;
} rfi_dots;
#define RFI_WEIGH(isa, TARGET, TYPE) \
    static TARGET void rfi_##isa##_weigh_##TYPE(const rfi_weigh *a) { rfi_##isa##_weigh(RF_TYPE_##TYPE, a); }

/* ---- quantized matmul, common to all instruction sets ---- */

#define RFI_BLOCK_COLS 256u
#define RFI_AHEAD 2u /* units to prefetch ahead in each of 16 rows: 4 to 8 KB in all, by measurement */

/* A matmul with what its type needs. */
typedef struct rfi_quant_matmul {
    const rfi_kernels *k;
    const rfi_quant *quant;
    uint32_t type;        /* index of quant                                    */
    uint32_t n_blocks, unit_bytes; /* of a unit, in the file                   */
    rfi_expand_fn expand; /* NULL: the units of the file serve as they are     */
} rfi_quant_matmul;

static void rfi_rows_at(const rfi_kernels *k, const rfi_matmul *m, uint32_t i, rfi_rows *r) {
    for (uint32_t l = 0; l < k->n_lanes; l++) r->row[l] = m->w + rfi_min_u64(i + l, m->n_rows - 1) * m->row_bytes;
    r->row_bytes = m->row_bytes;
    r->extended = k->extended;
}

/* The blocks after the last whole unit, copied so that a whole unit can be read. */
typedef struct rfi_rows_tail {
    rfi_rows r;
    uint8_t copy[16 * 8 * RFI_BYTES_Q8_0];
} rfi_rows_tail;

static void rfi_rows_cut(const rfi_rows *r, uint32_t n_lanes, uint32_t unit_bytes, uint64_t offset, rfi_rows_tail *t) {
    const size_t left = (size_t)(r->row_bytes - offset);
    memset(t->copy, 0, sizeof t->copy);
    for (uint32_t l = 0; l < n_lanes; l++) {
        memcpy(t->copy + l * unit_bytes, r->row[l] + offset, left < unit_bytes ? left : unit_bytes);
        t->r.row[l] = t->copy + l * unit_bytes;
    }
    t->r.row_bytes = 0;
    t->r.extended = r->extended;
}

/* One unit of some rows, expanded. */
typedef struct rfi_expanded_rows {
    rfi_rows r;
    _Alignas(64) rfi_expanded unit[16];
} rfi_expanded_rows;

/* Expands groups [g, g + 8) of n_lanes rows, or as many as are left. */
static void rfi_rows_expand(const rfi_quant_matmul *q, const rfi_matmul *m, const rfi_rows *r, uint32_t g,
                            rfi_expanded_rows *out) {
    const uint64_t offset = (uint64_t)(g / 8) * q->unit_bytes;
    const uint32_t left = m->n_in / 32 - g, n_blocks = left >= 8 ? q->n_blocks : left * q->n_blocks / 8;
    for (uint32_t l = 0; l < q->k->n_lanes; l++) {
        const uint8_t *unit = r->row[l] + offset;
        for (uint32_t i = 0; i < q->unit_bytes; i += 64)
            __builtin_prefetch((const void *)((uintptr_t)unit + RFI_AHEAD * q->unit_bytes + i));
        q->expand(unit, n_blocks, &out->unit[l]);
        out->r.row[l] = (const uint8_t *)&out->unit[l];
    }
    out->r.row_bytes = 0;
    out->r.extended = r->extended;
}

/* One column, of a type that is expanded a unit at a time. */
static void rfi_vector_expanded(const rfi_quant_matmul *q, const rfi_matmul *m, const rfi_rows *r, float *acc) {
    rfi_expanded_rows e;
    memset(&e, 0, sizeof e);
    for (uint32_t g = 0; g < m->n_in / 32; g += 8) {
        rfi_rows_expand(q, m, r, g, &e);
        q->quant->vector(&e.r, (uint32_t)rfi_min_u64(8, m->n_in / 32 - g), m->x->q + g, acc);
    }
}

static void rfi_vector_direct(const rfi_quant_matmul *q, const rfi_matmul *m, const rfi_rows *r, float *acc) {
    const uint32_t n_groups = m->n_in / 32, whole = n_groups & ~7u;
    if (whole) q->quant->vector(r, whole, m->x->q, acc);
    if (n_groups > whole) {
        rfi_rows_tail t;
        rfi_rows_cut(r, q->k->n_lanes, q->unit_bytes, (uint64_t)(whole / 8) * q->unit_bytes, &t);
        q->quant->vector(&t.r, n_groups - whole, m->x->q + whole, acc);
    }
}

static void rfi_matmul_vector(const rfi_quant_matmul *q, const rfi_matmul *m) {
    for (uint32_t i = 0; i < m->n_rows; i += q->k->n_lanes) {
        rfi_rows r;
        float acc[16] = {0};
        rfi_rows_at(q->k, m, i, &r);
        if (q->expand) rfi_vector_expanded(q, m, &r, acc);
        else rfi_vector_direct(q, m, &r, acc);
        memcpy(m->y + i, acc, (size_t)rfi_min_u64(q->k->n_lanes, m->n_rows - i) * sizeof(float));
    }
}

/* Columns [j, j_end) times panels p: rows from i, groups from g on. y holds the sums of the chunks before. */
static void rfi_panel_times(const rfi_quant_matmul *q, const rfi_matmul *m, const rfi_panel *p, uint32_t i, uint32_t g,
                            uint32_t j, uint32_t j_end) {
    const uint32_t n_rows = q->k->n_lanes * q->k->n_panels;
    const size_t valid = (size_t)rfi_min_u64(n_rows, m->n_rows - i);
    for (; j < j_end; j += q->k->n_cols) {
        const uint32_t n_cols = (uint32_t)rfi_min_u64(q->k->n_cols, j_end - j);
        float *y = m->y + j * m->y_stride + i, part[8 * 32] = {0}, *acc = valid < n_rows ? part : y;
        const rfi_tile t = {p, q->type, (uint32_t)rfi_min_u64(RFI_CHUNK_GROUPS, m->n_in / 32 - g), n_cols,
                            q->k->extended, m->x->q + j * m->x->q_stride + g, m->x->q_stride, acc,
                            valid < n_rows ? 32 : m->y_stride};
        for (uint32_t c = 0; c < n_cols; c++) {
            if (g == 0) memset(acc + c * t.acc_stride, 0, n_rows * sizeof(float));
            else if (acc != y) memcpy(acc + c * t.acc_stride, y + c * m->y_stride, valid * sizeof(float));
        }
        q->k->tile(&t);
        for (uint32_t c = 0; acc != y && c < n_cols; c++)
            memcpy(y + c * m->y_stride, acc + c * t.acc_stride, valid * sizeof(float));
    }
}

/* Unpacks groups [g, g_end) of n_lanes rows from i on. */
static void rfi_panel_fill(const rfi_quant_matmul *q, const rfi_matmul *m, rfi_panel *p, uint32_t i, uint32_t g,
                           uint32_t g_end) {
    rfi_rows r;
    rfi_rows_at(q->k, m, i, &r);
    for (uint32_t u = g; u < g_end; u += 8) {
        const uint64_t offset = (uint64_t)(u / 8) * q->unit_bytes;
        if (q->expand) {
            rfi_expanded_rows e;
            rfi_rows_expand(q, m, &r, u, &e);
            q->quant->unpack(&e.r, 0, u - g, p);
        } else if (u + 8 <= g_end) {
            q->quant->unpack(&r, offset, u - g, p);
        } else {
            rfi_rows_tail t;
            rfi_rows_cut(&r, q->k->n_lanes, q->unit_bytes, offset, &t);
            q->quant->unpack(&t.r, 0, u - g, p);
        }
    }
}

static void rfi_matmul_panels(const rfi_quant_matmul *q, const rfi_matmul *m) {
    const uint32_t n_groups = m->n_in / 32, n_chunks = (n_groups - 1) / RFI_CHUNK_GROUPS + 1;
    const uint32_t n_lanes = q->k->n_lanes, n_panels = q->k->n_panels, n_rows = n_lanes * n_panels;
    const uint32_t n_tiles = (m->n_rows - 1) / n_rows + 1;
    rfi_panel p[2];
    for (uint32_t j = 0; j < m->n_cols; j += RFI_BLOCK_COLS) {
        const uint32_t j_end = (uint32_t)rfi_min_u64(m->n_cols, (uint64_t)j + RFI_BLOCK_COLS);
        const int by_row = j_end - j <= 16; /* few columns: read weights in order; many: reuse inputs in cache */
        for (uint64_t step = 0; step < (uint64_t)n_chunks * n_tiles; step++) {
            const uint32_t chunk = (uint32_t)(by_row ? step % n_chunks : step / n_tiles);
            const uint32_t i = (uint32_t)(by_row ? step / n_chunks : step % n_tiles) * n_rows;
            const uint32_t g = chunk * RFI_CHUNK_GROUPS, g_end = (uint32_t)rfi_min_u64(n_groups, g + RFI_CHUNK_GROUPS);
            for (uint32_t part = 0; part < n_panels; part++)
                rfi_panel_fill(q, m, &p[part], (uint32_t)rfi_min_u64(i + part * n_lanes, m->n_rows - 1), g, g_end);
            rfi_panel_times(q, m, p, i, g, j, j_end);
        }
    }
}

static void rfi_matmul_quant(const rfi_kernels *k, uint32_t type, const rfi_matmul *m) {
    rfi_quant_matmul q = {.k = k, .type = type, .n_blocks = 256 / rfi_types[type].block_elements};
    if (m->n_rows == 0 || m->n_cols == 0 || m->n_in == 0) return;
    if (rfi_expansions[type].kind) q.expand = k->expander(type), q.type = rfi_expansions[type].kind;
    q.unit_bytes = q.n_blocks * rfi_types[type].block_bytes;
    q.quant = &k->quant[q.type];
    if (m->n_cols > 1) rfi_matmul_panels(&q, m);
    else rfi_matmul_vector(&q, m);
}

/* Kinds of types: values stored with a bias or with a min, with one or two scales (and mins) per group. */
typedef enum rfi_kind { RFI_KIND_BIAS = 0, RFI_KIND_MIN = 1, RFI_KIND_HALVES = 2, RFI_KIND_HALVES_MIN = 3 } rfi_kind;

RFI_INLINE rfi_kind rfi_kind_of(uint32_t type) {
    return type == RF_TYPE_Q6_K || type == RFI_TYPE_EXPANDED_16 ? RFI_KIND_HALVES
         : type == RFI_TYPE_EXPANDED_MIN                        ? RFI_KIND_HALVES_MIN
         : type == RF_TYPE_Q4_0 || type == RF_TYPE_Q5_0 || type == RF_TYPE_Q8_0 || type == RFI_TYPE_EXPANDED_32
             ? RFI_KIND_BIAS : RFI_KIND_MIN;
}
RFI_INLINE uint32_t rfi_kind_scales(rfi_kind kind) { return kind & 2 ? 2 : 1; } /* of a group */
RFI_INLINE int rfi_kind_min(rfi_kind kind) { return kind & 1; }
RFI_INLINE int rfi_is_expanded(uint32_t type) { return type >= RF_TYPE_COUNT; }
/* Whether the values are signed when unpacked. */
RFI_INLINE int rfi_is_signed(uint32_t type) {
    return type == RF_TYPE_Q8_0 || type == RFI_TYPE_EXPANDED_32 || type == RFI_TYPE_EXPANDED_16;
}

/* The bias: subtracted from the stored value. */
RFI_INLINE int rfi_bias_of(uint32_t type) {
    return type == RF_TYPE_Q4_0 ? 8 : type == RF_TYPE_Q5_0 ? 16 : type == RF_TYPE_Q6_K ? 32 : 0;
}

/* rfi_q8.b is -128 times the sum of inputs: this shift to the right makes it -bias times the sum. */
RFI_INLINE int rfi_bias_shift(uint32_t type) {
    return type == RF_TYPE_Q4_0 ? 4 : type == RF_TYPE_Q5_0 ? 3 : type == RF_TYPE_Q6_K ? 2 : 0;
}

RFI_INLINE uint32_t rfi_unit_bytes(uint32_t type) {
    return type == RF_TYPE_Q4_0 ? 8 * RFI_BYTES_Q4_0 : type == RF_TYPE_Q4_1 ? 8 * RFI_BYTES_Q4_1
         : type == RF_TYPE_Q5_0 ? 8 * RFI_BYTES_Q5_0 : type == RF_TYPE_Q5_1 ? 8 * RFI_BYTES_Q5_1
         : type == RF_TYPE_Q8_0 ? 8 * RFI_BYTES_Q8_0 : type == RF_TYPE_Q4_K ? RFI_BYTES_Q4_K
         : type == RF_TYPE_Q5_K ? RFI_BYTES_Q5_K : type == RF_TYPE_Q6_K ? RFI_BYTES_Q6_K
         : (uint32_t)sizeof(rfi_expanded);
}

/* The functions of one type on one instruction set: static inline, so that what a table leaves out is not compiled. */
#define RFI_QUANT(isa, TARGET, name, type)                                                                            \
    static inline TARGET void rfi_##isa##_vector_##name(const rfi_rows *r, uint32_t n_groups, const rfi_q8 *x,        \
                                                        float *acc) {                                                 \
        rfi_##isa##_vector(type, r, n_groups, x, acc);                                                                \
    }                                                                                                                 \
    static inline TARGET void rfi_##isa##_unpack_##name(const rfi_rows *r, uint64_t offset, uint32_t at,              \
                                                        rfi_panel *p) {                                               \
        rfi_##isa##_unpack(type, r, offset, at, p);                                                                   \
    }
#define RFI_QUANT_ENTRY(isa, TARGET, name, type) \
    [type] = {RFI_IF_BUILT(type, rfi_##isa##_vector_##name), RFI_IF_BUILT(type, rfi_##isa##_unpack_##name)},
#define RFI_QUANT_TYPES(X, isa, TARGET)                                                                 \
    X(isa, TARGET, Q8_0, RF_TYPE_Q8_0) X(isa, TARGET, Q4_0, RF_TYPE_Q4_0) X(isa, TARGET, Q4_1, RF_TYPE_Q4_1) \
    X(isa, TARGET, Q5_0, RF_TYPE_Q5_0) X(isa, TARGET, Q5_1, RF_TYPE_Q5_1) X(isa, TARGET, Q4_K, RF_TYPE_Q4_K) \
    X(isa, TARGET, Q5_K, RF_TYPE_Q5_K) X(isa, TARGET, Q6_K, RF_TYPE_Q6_K)                               \
    X(isa, TARGET, EXPANDED_32, RFI_TYPE_EXPANDED_32) X(isa, TARGET, EXPANDED_16, RFI_TYPE_EXPANDED_16) \
    X(isa, TARGET, EXPANDED_MIN, RFI_TYPE_EXPANDED_MIN)

/* ---- float matmul, common to all instruction sets ---- */

#define RFI_FLOAT_CHUNK 1024u /* values of a row summed in lanes at a time: a tile fits in L1 */
#define RFI_FLOAT_COLS 6u

/* Four rows times some columns; past the last row it is repeated. */
struct rfi_float_tile {
    const uint8_t *row[4];
    uint64_t ahead;     /* prefetch this many bytes ahead of the rows; 0: do not     */
    const float *x;
    uint64_t x_stride;
    uint32_t n;         /* values of a row           */
    uint32_t n_cols;    /* at most RFI_FLOAT_COLS    */
    float sum[RFI_FLOAT_COLS][4]; /* out [column][row] */
};

/* Up to RFI_FLOAT_COLS columns from j on, the chunk from k0 on, rows [i, i_end). */
static void rfi_float_columns(void (*tile)(rfi_float_tile *), uint32_t value_bytes, const rfi_matmul *m, uint32_t j,
                              uint32_t k0, uint32_t i, uint32_t i_end) {
    float packed[RFI_FLOAT_COLS * (RFI_FLOAT_CHUNK + 16)];
    rfi_float_tile t;
    t.n = (uint32_t)rfi_min_u64(RFI_FLOAT_CHUNK, m->n_in - k0);
    t.n_cols = (uint32_t)rfi_min_u64(RFI_FLOAT_COLS, m->n_cols - j);
    t.x = m->x->f + j * m->x->f_stride + k0;
    t.x_stride = m->x->f_stride;
    t.ahead = m->n_cols > 1 ? 0 : k0 + RFI_FLOAT_CHUNK < m->n_in ? 1024 : m->row_bytes * 4 - (uint64_t)k0 * value_bytes;
    if (t.n_cols > 1 && i_end - i >= 32) { /* columns a power of two apart share cache sets */
        for (uint32_t c = 0; c < t.n_cols; c++)
            memcpy(packed + c * (RFI_FLOAT_CHUNK + 16), t.x + c * t.x_stride, t.n * sizeof(float));
        t.x = packed, t.x_stride = RFI_FLOAT_CHUNK + 16;
    }
    for (; i < i_end; i += 4) {
        for (uint32_t r = 0; r < 4; r++)
            t.row[r] = m->w + rfi_min_u64(i + r, m->n_rows - 1) * m->row_bytes + (uint64_t)k0 * value_bytes;
        tile(&t);
        const uint32_t valid = (uint32_t)rfi_min_u64(4, m->n_rows - i);
        for (uint32_t c = 0; c < t.n_cols; c++) {
            float *y = m->y + (j + c) * m->y_stride + i;
            for (uint32_t r = 0; r < valid; r++) y[r] = k0 ? y[r] + t.sum[c][r] : t.sum[c][r];
        }
    }
}

static void rfi_matmul_float(void (*tile)(rfi_float_tile *), uint32_t value_bytes, const rfi_matmul *m) {
    for (uint32_t j = 0; j < m->n_cols; j += RFI_FLOAT_COLS) {
        const uint32_t step = m->n_cols > 1 ? m->n_rows : 4; /* one column: rows in the order of the file */
        for (uint32_t i = 0; i < m->n_rows; i += step)
            for (uint32_t k0 = 0; k0 < m->n_in; k0 += RFI_FLOAT_CHUNK)
                rfi_float_columns(tile, value_bytes, m, j, k0, i, (uint32_t)rfi_min_u64(m->n_rows, (uint64_t)i + step));
    }
}

#define RFI_FLOAT(isa, TARGET, TYPE)                                                      \
    static inline TARGET void rfi_##isa##_tile_##TYPE(rfi_float_tile *t) {                \
        rfi_##isa##_float_tile(RF_TYPE_##TYPE, t);                                        \
    }

/* All kernels of an instruction set but its vectors, tiles and elementwise functions. */
#define RFI_KERNELS_OF(isa, TARGET)                  \
    RFI_QUANT_TYPES(RFI_QUANT, isa, TARGET)          \
    RFI_FLOAT(isa, TARGET, F32)                      \
    RFI_FLOAT(isa, TARGET, F16)                      \
    RFI_FLOAT(isa, TARGET, BF16)                     \
    RFI_SCORES(isa, TARGET, F16, 2)                  \
    RFI_SCORES(isa, TARGET, F32, 4)                  \
    RFI_WEIGH(isa, TARGET, F16)                      \
    RFI_WEIGH(isa, TARGET, F32)

/* Members of a table: the matmuls and attention of one instruction set, the elementwise kernels of another. */
#define RFI_KERNELS(isa, elementwise)                                                                                 \
    .n_lanes = RFI_LANES_##isa, .n_panels = RFI_PANELS_##isa, .n_cols = RFI_COLS_##isa,                               \
    .quant = {RFI_QUANT_TYPES(RFI_QUANT_ENTRY, isa, )}, .tile = rfi_##isa##_tile, .expander = rfi_##isa##_expander,   \
    .float_tile = {[RF_TYPE_F32] = rfi_##isa##_tile_F32,                                                              \
                   [RF_TYPE_F16] = RFI_IF_BUILT(RF_TYPE_F16, rfi_##isa##_tile_F16),                                   \
                   [RF_TYPE_BF16] = RFI_IF_BUILT(RF_TYPE_BF16, rfi_##isa##_tile_BF16)},                               \
    .weigh = {[RF_CACHE_F16] = rfi_##isa##_weigh_F16, [RF_CACHE_F32] = rfi_##isa##_weigh_F32},                        \
    .scores = {[RF_CACHE_F16] = rfi_##isa##_scores_F16, [RF_CACHE_F32] = rfi_##isa##_scores_F32},                     \
    .quantize = rfi_quantize_##elementwise, .norm = rfi_norm_##elementwise, .glu = rfi_glu_##elementwise,             \
    .add = rfi_add_##elementwise, .scale = rfi_scale_##elementwise, .softcap = rfi_softcap_##elementwise,             \
    .conv = rfi_conv_##elementwise, .delta = rfi_delta_##elementwise, .rope = rfi_rope_##elementwise,                 \
    .softmax = rfi_softmax_##elementwise, .f32_to_f16 = rfi_f32_to_f16_##elementwise,                                 \
    .f32_to_q8 = rfi_f32_to_q8_##elementwise, .q8_to_f32 = rfi_q8_to_f32_##elementwise

/* ---- scalar: portable C, the reference for the others ---- */

/* d_w and m_w of the groups of a unit. */
static void rfi_scalar_scales(uint32_t type, const uint8_t *block, float *s, float *m) {
    if (rfi_is_expanded(type)) {
        const rfi_expanded *e = (const rfi_expanded *)(const void *)block;
        memcpy(s, e->s, 8 * rfi_kind_scales(rfi_kind_of(type)) * sizeof *s);
        if (type == RFI_TYPE_EXPANDED_MIN) memcpy(m, e->m, sizeof e->m);
    } else if (type == RF_TYPE_Q6_K) {
        const rfi_block_q6_k *b = (const rfi_block_q6_k *)block;
        for (int i = 0; i < 16; i++) s[i] = rfi_load_f16(b->d) * (float)(int8_t)b->scales[i];
    } else if (type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K) {
        const float d = rfi_load_f16(block), dmin = rfi_load_f16(block + 2);
        uint8_t scale[8], min[8];
        rfi_k_scales(block + 4, scale, min);
        for (int g = 0; g < 8; g++) s[g] = d * (float)scale[g], m[g] = -dmin * (float)min[g];
    } else {
        const int has_min = rfi_kind_of(type) == RFI_KIND_MIN;
        for (int g = 0; g < 8; g++, block += rfi_unit_bytes(type) / 8) {
            s[g] = rfi_load_f16(block);
            m[g] = has_min ? rfi_load_f16(block + 2) : 0;
        }
    }
}

static void rfi_scalar_unpack(uint32_t type, const rfi_rows *r, uint64_t offset, uint32_t at, rfi_panel *p) {
    const uint8_t *block = r->row[0] + offset;
    int8_t *q = (int8_t *)p->q + at * 32;
    const uint32_t n_scales = rfi_kind_scales(rfi_kind_of(type));
    rfi_scalar_scales(type, block, p->s + at * n_scales, p->m + at * n_scales);
    if (rfi_is_expanded(type)) {
        memcpy(q, ((const rfi_expanded *)(const void *)block)->q, 256);
    } else if (type == RF_TYPE_Q6_K) {
        const rfi_block_q6_k *b = (const rfi_block_q6_k *)block;
        for (int g = 0; g < 8; g++) {
            const uint8_t *lo = b->ql + (g >> 2) * 64 + (g & 1) * 32, *hi = b->qh + (g >> 2) * 32;
            for (int l = 0; l < 32; l++)
                q[g * 32 + l] = (int8_t)(((lo[l] >> (g & 2) * 2 & 15) | (hi[l] >> (g & 3) * 2 & 3) << 4) - 32);
        }
    } else if (type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K) {
        const uint8_t *bits = block + 16, *low = type == RF_TYPE_Q5_K ? block + 48 : block + 16;
        for (int g = 0; g < 8; g++)
            for (int l = 0; l < 32; l++) {
                int v = low[(g >> 1) * 32 + l] >> (g & 1) * 4 & 15;
                q[g * 32 + l] = (int8_t)(type == RF_TYPE_Q5_K ? v | (bits[l] >> g & 1) << 4 : v);
            }
    } else {
        const int five = type == RF_TYPE_Q5_0 || type == RF_TYPE_Q5_1;
        for (int g = 0; g < 8; g++, block += rfi_unit_bytes(type) / 8, q += 32) {
            const uint8_t *b = block + (rfi_kind_of(type) == RFI_KIND_MIN ? 4 : 2), *low = b + (five ? 4 : 0);
            const uint32_t qh = five ? rfi_load_u32(b) : 0;
            for (int l = 0; l < 32 && type != RF_TYPE_Q8_0; l++)
                q[l] = (int8_t)((low[l & 15] >> (l >> 4) * 4 & 15) + (int)(qh >> l & 1) * 16 - rfi_bias_of(type));
            if (type == RF_TYPE_Q8_0) memcpy(q, b, 32);
        }
    }
}

static void rfi_scalar_tile(const rfi_tile *t) {
    const rfi_kind kind = rfi_kind_of(t->type);
    for (uint32_t c = 0; c < t->n_cols; c++) {
        float y = t->acc[c * t->acc_stride];
        for (uint32_t g = 0; g < t->n_groups; g++) {
            const rfi_q8 *x = t->x + c * t->x_stride + g;
            const int8_t *q = (const int8_t *)t->p->q + g * 32;
            int32_t sum[2] = {0, 0};
            for (int l = 0; l < 16; l++) sum[0] += q[l] * x->q[l];
            for (int l = 16; l < 32; l++) sum[1] += q[l] * x->q[l];
            if (rfi_kind_scales(kind) == 2) {
                for (uint32_t h = 0; h < 2; h++) {
                    y = fmaf((float)sum[h], t->p->s[2 * g + h] * x->d, y);
                    if (rfi_kind_min(kind)) y = fmaf(t->p->m[2 * g + h], x->s16[h], y);
                }
            } else {
                y = fmaf((float)(sum[0] + sum[1]), t->p->s[g] * x->d, y);
                if (rfi_kind_min(kind)) y = fmaf(t->p->m[g], x->s, y);
            }
        }
        t->acc[c * t->acc_stride] = y;
    }
}

static void rfi_scalar_vector(uint32_t type, const rfi_rows *r, uint32_t n_groups, const rfi_q8 *x, float *acc) {
    rfi_panel p;
    for (uint32_t g = 0; g < n_groups; g += 8) {
        rfi_scalar_unpack(type, r, (uint64_t)(g / 8) * rfi_unit_bytes(type), 0, &p);
        rfi_scalar_tile(&(rfi_tile){&p, type, n_groups - g < 8 ? n_groups - g : 8, 1, 0, x + g, 0, acc, 1});
    }
}

RFI_INLINE float rfi_load_type(uint32_t type, const uint8_t *p, uint64_t i) {
    return type == RF_TYPE_F32 ? rfi_load_f32(p + 4 * i)
         : type == RF_TYPE_F16 ? rfi_load_f16(p + 2 * i) : rfi_bf16_to_f32(rfi_load_u16(p + 2 * i));
}

RFI_INLINE void rfi_scalar_float_tile(uint32_t type, rfi_float_tile *t) {
    for (int r = 0; r < 4; r++) {
        float w[RFI_FLOAT_CHUNK];
        for (uint32_t i = 0; i < t->n; i++) w[i] = rfi_load_type(type, t->row[r], i);
        for (uint32_t c = 0; c < t->n_cols; c++) {
            const float *x = t->x + c * t->x_stride;
            float lane[16] = {0};
            uint32_t i = 0;
            for (; i + 16 <= t->n; i += 16)
                for (uint32_t l = 0; l < 16; l++) lane[l] += w[i + l] * x[i + l];
            for (uint32_t l = 0; i + l < t->n; l++) lane[l] += w[i + l] * x[i + l];
            for (int width = 8; width; width /= 2)
                for (int l = 0; l < width; l++) lane[l] += lane[l + width];
            t->sum[c][r] = lane[0];
        }
    }
}

/* nc columns from c on and dimensions from d on, which fill no vector. */
RFI_INLINE void rfi_weigh_rest(uint32_t type, const rfi_weigh *a, uint32_t c, uint32_t nc, uint32_t d) {
    for (const uint32_t c_end = c + nc; c < c_end; c++)
        for (uint32_t e = d; e < a->head_dim_v; e++) {
            float *out = a->out + c * a->out_stride + e;
            for (uint64_t pos = 0; pos < a->n_pos; pos++)
                *out = fmaf(a->p[c * a->p_stride + pos],
                            rfi_load_type(type, (const uint8_t *)a->v, pos * a->head_dim_v + e), *out);
        }
}

RFI_INLINE void rfi_scalar_weigh(uint32_t type, const rfi_weigh *a) {
    for (uint32_t c = 0; c < a->n_cols; c++)
        for (uint64_t pos = 0; pos < a->n_pos; pos++)
            for (uint32_t d = 0; d < a->head_dim_v; d++)
                a->out[c * a->out_stride + d] +=
                    a->p[c * a->p_stride + pos] * rfi_load_type(type, (const uint8_t *)a->v, pos * a->head_dim_v + d);
}

/* Transposes keys: keys_t[i][l] = dimension d + i of position l */
RFI_INLINE void rfi_scalar_transpose_keys(uint32_t type, const rfi_keys *k, uint32_t d, uint32_t n, float *keys_t) {
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t l = 0; l < 16; l++) keys_t[i * 16 + l] = rfi_load_type(type, k->row[l], d + i);
}

RFI_INLINE void rfi_scalar_dots_q(const rfi_dots *a) {
    for (uint32_t c = 0; c < a->n_cols; c++) {
        float *out = a->s + (uint64_t)c * RFI_ATTENTION_BLOCK;
        if (a->d == 0) memset(out, 0, 16 * sizeof *out);
        for (uint32_t i = 0; i < a->n; i++)
            for (uint32_t l = 0; l < 16; l++)
                out[l] += a->keys_t[i * 16 + l] * a->q[(uint64_t)c * a->head_dim + a->d + i];
    }
}

static rfi_expand_fn rfi_scalar_expander(uint32_t type) { return rfi_expansions[type].expand; }

enum { RFI_LANES_scalar = 1, RFI_PANELS_scalar = 1, RFI_COLS_scalar = 8, RFI_KEYS_scalar = 16 };
#define RFI_NO_TARGET
RFI_ELEMENTWISE(scalar, RFI_NO_TARGET)
RFI_KERNELS_OF(scalar, RFI_NO_TARGET)
static const rfi_kernels rfi_kernels_scalar = {.name = "scalar", .arch_text = "portable C",
                                               RFI_KERNELS(scalar, scalar)};

#if defined(__x86_64__) && !defined(ROCMFORGE_NO_SIMD)

/* ---- expansion with AVX2: written by hand for the most common types ---- */

#define RFI_256 __attribute__((target("avx2,fma,f16c")))

RFI_INLINE RFI_256 __m256i rfi_256_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
RFI_INLINE RFI_256 __m128i rfi_128_load(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
RFI_INLINE RFI_256 float rfi_256_f16(const void *p) { return _cvtsh_ss(rfi_load_u16(p)); }

RFI_INLINE RFI_256 void rfi_256_codebook(const int8_t list[16], const uint8_t q[16], int8_t low[16], int8_t high[16]) {
    const __m128i values = rfi_128_load(list), mask = _mm_set1_epi8(15), v = rfi_128_load(q);
    _mm_storeu_si128((__m128i *)(void *)low, _mm_shuffle_epi8(values, _mm_and_si128(v, mask)));
    _mm_storeu_si128((__m128i *)(void *)high, _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(v, 4), mask)));
}

static RFI_256 void rfi_256_expand_IQ4_NL(const uint8_t *p, uint32_t n_blocks, rfi_expanded *e) {
    for (uint32_t b = 0; b < n_blocks; b++, p += RFI_BYTES_IQ4_NL) {
        e->s[b] = rfi_256_f16(p);
        rfi_256_codebook(rfi_iq4_list, p + 2, e->q + 32 * b, e->q + 32 * b + 16);
    }
}

static RFI_256 void rfi_256_expand_IQ4_XS(const uint8_t *p, uint32_t n_blocks, rfi_expanded *e) {
    const rfi_block_iq4_xs *b = (const rfi_block_iq4_xs *)p;
    const __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32((int)rfi_load_u32(b->scales_low)),
                                          _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(rfi_load_u16(b->scales_high) << 4),
                                           _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0));
    const __m256i scale = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                          _mm256_and_si256(high, _mm256_set1_epi32(0x30)));
    const __m256 s = _mm256_cvtepi32_ps(_mm256_sub_epi32(scale, _mm256_set1_epi32(32)));
    RFI_UNUSED(n_blocks);
    _mm256_storeu_ps(e->s, _mm256_mul_ps(s, _mm256_set1_ps(rfi_256_f16(b->d))));
    RFI_UNROLL(8)
    for (int g = 0; g < 8; g++) rfi_256_codebook(rfi_iq4_list, b->q + 16 * g, e->q + 32 * g, e->q + 32 * g + 16);
}

/* As rfi_expand_pairs. */
RFI_INLINE RFI_256 void rfi_256_expand_pairs(const uint8_t *p, const uint8_t *high, int n, int8_t *q) {
    const __m256i less = _mm256_set1_epi8((char)n), third = high ? rfi_256_load(high) : less;
    RFI_UNROLL(2)
    for (int h = 0; h < 2; h++) {
        const __m256i pairs = rfi_256_load(p + 32 * h);
        RFI_UNROLL(4)
        for (int k = 0; k < 4; k++, q += 32) {
            const int bit = 4 * h + k;
            __m256i v = _mm256_and_si256(_mm256_srli_epi16(pairs, 2 * k), _mm256_set1_epi8(3));
            if (high) {
                const __m256i t = bit < 2 ? _mm256_slli_epi16(third, 2 - bit) : _mm256_srli_epi16(third, bit - 2);
                v = _mm256_sub_epi8(_mm256_or_si256(v, _mm256_and_si256(t, _mm256_set1_epi8(4))), less);
            }
            _mm256_storeu_si256((__m256i *)(void *)q, v);
        }
    }
}

/* 16 int8 times d. */
RFI_INLINE RFI_256 void rfi_256_times(__m128i v, float d, float *s) {
    const __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
    const __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(v, v)));
    _mm256_storeu_ps(s, _mm256_mul_ps(a, _mm256_set1_ps(d)));
    _mm256_storeu_ps(s + 8, _mm256_mul_ps(b, _mm256_set1_ps(d)));
}

static RFI_256 void rfi_256_expand_Q2_K(const uint8_t *p, uint32_t n_blocks, rfi_expanded *e) {
    const rfi_block_q2_k *b = (const rfi_block_q2_k *)p;
    const __m128i scales = rfi_128_load(b->scales), four = _mm_set1_epi8(15);
    RFI_UNUSED(n_blocks);
    rfi_256_times(_mm_and_si128(scales, four), rfi_256_f16(b->d), e->s);
    rfi_256_times(_mm_and_si128(_mm_srli_epi16(scales, 4), four), -rfi_256_f16(b->dmin), e->m);
    rfi_256_expand_pairs(b->q, NULL, 0, e->q);
}

static RFI_256 void rfi_256_expand_Q3_K(const uint8_t *p, uint32_t n_blocks, rfi_expanded *e) {
    const rfi_block_q3_k *b = (const rfi_block_q3_k *)p;
    const uint64_t low = rfi_load_u64(b->scales), four = RFI_EIGHT(15);
    const __m128i high = _mm_srlv_epi32(_mm_set1_epi32((int)rfi_load_u32(b->scales + 8)), _mm_set_epi32(6, 4, 2, 0));
    const __m128i v = _mm_or_si128(_mm_set_epi64x((long long)(low >> 4 & four), (long long)(low & four)),
                                   _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4));
    RFI_UNUSED(n_blocks);
    rfi_256_times(_mm_sub_epi8(v, _mm_set1_epi8(32)), rfi_256_f16(b->d), e->s);
    rfi_256_expand_pairs(b->q, b->high, 4, e->q);
}

#define RFI_256_EXPANDER(TYPE, kind) RFI_EXPANDER(256, RFI_256, rfi_256_codebook, TYPE, kind)
RFI_256_EXPANDER(MXFP4, EXPANDED_32)   RFI_256_EXPANDER(NVFP4, EXPANDED_16)   RFI_256_EXPANDER(IQ3_XXS, EXPANDED_32)
RFI_256_EXPANDER(IQ3_S, EXPANDED_32)   RFI_256_EXPANDER(IQ2_XXS, EXPANDED_32) RFI_256_EXPANDER(IQ2_XS, EXPANDED_16)
RFI_256_EXPANDER(IQ2_S, EXPANDED_16)   RFI_256_EXPANDER(IQ1_S, EXPANDED_32)   RFI_256_EXPANDER(IQ1_M, EXPANDED_16)
RFI_256_EXPANDER(TQ1_0, EXPANDED_32)   RFI_256_EXPANDER(TQ2_0, EXPANDED_32)   RFI_256_EXPANDER(Q1_0, EXPANDED_32)
RFI_256_EXPANDER(Q2_0, EXPANDED_32)

static rfi_expand_fn rfi_256_expander(uint32_t type) {
    static const rfi_expand_fn expand[RF_TYPE_COUNT] = {
#define RFI_EXPANSION(TYPE, kind) [RF_TYPE_##TYPE] = RFI_IF_BUILT(RF_TYPE_##TYPE, rfi_256_expand_##TYPE),
        RFI_EXPANDED_TYPES(RFI_EXPANSION)
#undef RFI_EXPANSION
    };
    return expand[type];
}

/* ---- AVX-512 with VNNI: 16 rows at once ---- */

#define RFI_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

/* Loads 16 bytes from each of four addresses, `step` apart. */
RFI_INLINE RFI_512 __m512i rfi_512_pick(const void *p, uint64_t step) {
    const uint8_t *b = (const uint8_t *)p;
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)b));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(const void *)(b + step)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(const void *)(b + 2 * step)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(const void *)(b + 3 * step)), 3);
}

/* 4x4 transpose of the 32-bit elements of each 128-bit lane. */
RFI_INLINE RFI_512 void rfi_512_transpose(__m512i v[4]) {
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
    const __m512i c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, b), v[1] = _mm512_unpackhi_epi64(a, b);
    v[2] = _mm512_unpacklo_epi64(c, d), v[3] = _mm512_unpackhi_epi64(c, d);
}

/* 4x4 transpose of whole 128-bit lanes. */
RFI_INLINE RFI_512 void rfi_512_transpose_lanes(__m512i v[4]) {
    const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, b, 0x88), v[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    v[2] = _mm512_shuffle_i32x4(c, d, 0x88), v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

/* In each 128-bit lane: the sum of a's four elements, of b's, c's, d's. */
RFI_INLINE RFI_512 __m512i rfi_512_sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* Adds the fifth bits of 4 blocks of 32, `step` apart: q[0] the first 16 values of each, q[1] the second. Reads 12
 * bytes past qh. */
RFI_INLINE RFI_512 void rfi_512_fifth(const uint8_t *qh, uint64_t step, __m512i q[2]) {
    const __m512i bits = rfi_512_pick(qh, step), own = _mm512_set1_epi64((long long)0x8040201008040201u);
    RFI_UNROLL(2)
    for (int i = 0; i < 2; i++) { /* shuffle each value the byte that has its bit */
        const __m512i byte =
            _mm512_broadcast_i32x4(_mm_set_epi64x((2 * i + 1) * 0x0101010101010101, 2 * i * 0x0101010101010101));
        const __mmask64 set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(bits, byte), own);
        q[i] = _mm512_mask_add_epi8(q[i], set, q[i], _mm512_set1_epi8(16));
    }
}

/* Group of lane l: the first four vectors' lanes are groups order 0..3 of a unit, the others' 4..7. */
RFI_INLINE uint32_t rfi_512_group(uint32_t type, uint32_t l) {
    return rfi_is_expanded(type) ? l
         : type == RF_TYPE_Q6_K  ? (l & 4) / 2 + (l & 1) + (l & 2) * 2 : (l & 4) / 4 + (l & 3) * 2;
}
/* The inverse. */
RFI_INLINE uint32_t rfi_512_lane(uint32_t type, uint32_t g) {
    return rfi_is_expanded(type) || type == RF_TYPE_Q6_K ? rfi_512_group(type, g) : (g & 1) * 4 + g / 2;
}

/* A unit's values, unsigned: q[0], q[1] the first and second 16 of groups 0 to 3 in rfi_512_group's order, one group
 * per lane; q[2], q[3] of the other four. */
RFI_INLINE RFI_512 void rfi_512_values(uint32_t type, const uint8_t *p, __m512i q[4]) {
    const __m512i low = _mm512_set1_epi8(15);
    const uint64_t step = rfi_unit_bytes(type) / 8;
    const __m512i flip = _mm512_set1_epi8(rfi_is_signed(type) ? -128 : 0);
    if (rfi_is_expanded(type)) {
        RFI_UNROLL(2)
        for (int i = 0; i < 4; i += 2) {
            const __m512i a = _mm512_loadu_si512(p + 64 * i), b = _mm512_loadu_si512(p + 64 * i + 64);
            q[i] = _mm512_xor_si512(_mm512_shuffle_i32x4(a, b, 0x88), flip);
            q[i + 1] = _mm512_xor_si512(_mm512_shuffle_i32x4(a, b, 0xdd), flip);
        }
    } else if (type == RF_TYPE_Q8_0) {
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < 4; i++)
            q[i] = _mm512_xor_si512(rfi_512_pick(p + (i >> 1) * step + 2 + (i & 1) * 16, 2 * step), flip);
    } else if (type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K || type == RF_TYPE_Q6_K) {
        const uint8_t *nibbles = p + (type == RF_TYPE_Q4_K ? 16 : type == RF_TYPE_Q5_K ? 48 : 0);
        const __m512i a = _mm512_loadu_si512(nibbles), b = _mm512_loadu_si512(nibbles + 64);
        const __m512i first = _mm512_shuffle_i32x4(a, b, 0x88), second = _mm512_shuffle_i32x4(a, b, 0xdd);
        q[0] = _mm512_and_si512(first, low), q[2] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
        q[1] = _mm512_and_si512(second, low), q[3] = _mm512_and_si512(_mm512_srli_epi16(second, 4), low);
        if (type == RF_TYPE_Q4_K) return;
        /* a rotation, different in each lane, moves the high bits into place */
        __m512i high[2], count[2];
        if (type == RF_TYPE_Q5_K) {
            RFI_UNROLL(2)
            for (int i = 0; i < 2; i++)
                high[i] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)(p + 16) + i));
            count[0] = _mm512_set_epi32(30, 30, 30, 30, 0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4);
            count[1] = _mm512_set_epi32(29, 29, 29, 29, 31, 31, 31, 31, 1, 1, 1, 1, 3, 3, 3, 3);
        } else {
            const __m512i h = _mm512_loadu_si512(p + 128);
            high[0] = _mm512_shuffle_i32x4(h, h, 0xa0), high[1] = _mm512_shuffle_i32x4(h, h, 0xf5);
            count[0] = _mm512_set_epi32(2, 2, 2, 2, 4, 4, 4, 4, 2, 2, 2, 2, 4, 4, 4, 4);
            count[1] = _mm512_set_epi32(30, 30, 30, 30, 0, 0, 0, 0, 30, 30, 30, 30, 0, 0, 0, 0);
        }
        const __m512i mask = _mm512_set1_epi8(type == RF_TYPE_Q5_K ? 0x10 : 0x30);
        RFI_UNROLL(4)
        for (int i = 0; i < 4; i++) /* q | (rotated & mask) */
            q[i] = _mm512_ternarylogic_epi32(q[i], _mm512_rolv_epi32(high[i & 1], count[i >> 1]), mask, 0xf8);
    } else {
        const int five = type == RF_TYPE_Q5_0 || type == RF_TYPE_Q5_1;
        const uint32_t head = rfi_kind_of(type) == RFI_KIND_MIN ? 4 : 2;
        RFI_UNROLL(2)
        for (uint32_t i = 0; i < 2; i++) {
            const uint8_t *b = p + i * step + head;
            const __m512i v = rfi_512_pick(b + (five ? 4 : 0), 2 * step);
            q[2 * i] = _mm512_and_si512(v, low), q[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            if (five) rfi_512_fifth(b, 2 * step, q + 2 * i);
        }
    }
}

/* 16 bytes of each row as 4 vectors of 32-bit elements, lane = row. */
RFI_INLINE RFI_512 void rfi_512_heads(const rfi_rows *r, uint64_t offset, __m512i head[4]) {
    RFI_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const uint8_t *const *row = r->row + i;
        __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(row[0] + offset)));
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(const void *)(row[4] + offset)), 1);
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(const void *)(row[8] + offset)), 2);
        head[i] = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(const void *)(row[12] + offset)), 3);
    }
    rfi_512_transpose(head);
}

/* The low halves of 32-bit elements, converted from half precision. */
RFI_INLINE RFI_512 __m512 rfi_512_half(__m512i v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }

/* d_w and m_w of the groups of a unit, as in rfi_panel. */
RFI_INLINE RFI_512 void rfi_512_scales(uint32_t type, const rfi_rows *r, uint64_t offset, float *s, float *m) {
    __m512i head[4];
    const __m512i byte = _mm512_set1_epi32(255);
    if (rfi_is_expanded(type)) {
        const uint32_t n = 2 * rfi_kind_scales(rfi_kind_of(type)), end = type == RFI_TYPE_EXPANDED_MIN ? 2 * n : n;
        RFI_UNROLL(8)
        for (uint32_t i = 0; i < end; i++) { /* m follows s */
            rfi_512_heads(r, offset + offsetof(rfi_expanded, s) + 16 * i, head);
            float *to = i < n ? s + i * 64 : m + (i - n) * 64;
            RFI_UNROLL(4)
            for (uint32_t j = 0; j < 4; j++) _mm512_storeu_si512(to + j * 16, head[j]);
        }
    } else if (type == RF_TYPE_Q6_K) {
        uint16_t d[16];
        RFI_UNROLL(16)
        for (int l = 0; l < 16; l++) d[l] = rfi_load_u16(r->row[l] + offset + 208);
        rfi_512_heads(r, offset + 192, head);
        const __m512 dw = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)d));
        RFI_UNROLL(4)
        for (int i = 0; i < 4; i++)
            RFI_UNROLL(4)
            for (int b = 0; b < 4; b++) {
                const __m512i v = _mm512_srai_epi32(_mm512_slli_epi32(head[i], (unsigned)(24 - 8 * b)), 24);
                _mm512_storeu_ps(s + (i * 4 + b) * 16, _mm512_mul_ps(dw, _mm512_cvtepi32_ps(v)));
            }
    } else if (type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K) {
        const __m512i six = _mm512_set1_epi32(0x3f3f3f3f), four = _mm512_set1_epi32(0x0f0f0f0f);
        const __m512i top = _mm512_set1_epi32(0x30303030);
        rfi_512_heads(r, offset, head);
        const __m512 d = rfi_512_half(head[0]);
        const __m512 dmin = _mm512_sub_ps(_mm512_setzero_ps(), rfi_512_half(_mm512_srli_epi32(head[0], 16)));
        /* as rfi_k_scales, four scales or mins to an element */
        const __m512i scale[2] = {_mm512_and_si512(head[1], six),
                                  _mm512_or_si512(_mm512_and_si512(head[3], four),
                                                  _mm512_and_si512(_mm512_srli_epi32(head[1], 2), top))};
        const __m512i min[2] = {_mm512_and_si512(head[2], six),
                                _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(head[3], 4), four),
                                                _mm512_and_si512(_mm512_srli_epi32(head[2], 2), top))};
        RFI_UNROLL(2)
        for (int i = 0; i < 2; i++)
            RFI_UNROLL(4)
            for (int b = 0; b < 4; b++) {
                const __m512i u = _mm512_and_si512(_mm512_srli_epi32(scale[i], (unsigned)(8 * b)), byte);
                const __m512i v = _mm512_and_si512(_mm512_srli_epi32(min[i], (unsigned)(8 * b)), byte);
                _mm512_storeu_ps(s + (i * 4 + b) * 16, _mm512_mul_ps(d, _mm512_cvtepi32_ps(u)));
                _mm512_storeu_ps(m + (i * 4 + b) * 16, _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(v)));
            }
    } else {
        const uint64_t step = rfi_unit_bytes(type) / 8;
        for (uint32_t g = 0; g < 8; g++) {
            uint32_t d[16];
            RFI_UNROLL(16)
            for (int l = 0; l < 16; l++) d[l] = rfi_load_u32(r->row[l] + offset + g * step);
            const __m512i v = _mm512_loadu_si512(d);
            _mm512_storeu_ps(s + g * 16, rfi_512_half(v));
            if (rfi_kind_of(type) == RFI_KIND_MIN) _mm512_storeu_ps(m + g * 16, rfi_512_half(_mm512_srli_epi32(v, 16)));
        }
    }
}

RFI_INLINE RFI_512 void rfi_512_prefetch(uint32_t type, const uint8_t *row, uint64_t ahead) {
    RFI_UNROLL(8)
    for (uint32_t i = 0; i < rfi_unit_bytes(type); i += 64)
        _mm_prefetch((const char *)((uintptr_t)row + ahead + i), _MM_HINT_T0);
}

/* The inputs of a unit, in the order of rfi_512_values. */
RFI_INLINE RFI_512 void rfi_512_inputs(uint32_t type, const rfi_q8 *x, __m512i xq[4]) {
    RFI_UNROLL(4)
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = (i >> 1) * 4;
        const uint64_t step = (rfi_512_group(type, 1) - rfi_512_group(type, 0)) * sizeof *x;
        const rfi_q8 *a = x + rfi_512_group(type, at), *b = x + rfi_512_group(type, at + 2);
        __m512i v = _mm512_castsi128_si512(rfi_128_load(a->q + 16 * (i & 1)));
        v = _mm512_inserti32x4(v, rfi_128_load((const uint8_t *)a->q + 16 * (i & 1) + step), 1);
        v = _mm512_inserti32x4(v, rfi_128_load(b->q + 16 * (i & 1)), 2);
        xq[i] = _mm512_inserti32x4(v, rfi_128_load((const uint8_t *)b->q + 16 * (i & 1) + step), 3);
    }
}

/* sum[v][i][lane]: of rows 4i to 4i + 3, the sums of products of each group, or of each half of one. */
RFI_INLINE RFI_512 void rfi_512_sums(uint32_t type, const rfi_rows *r, uint64_t offset, const __m512i xq[4],
                                     __m512i sum[4][4]) {
    const uint32_t n_sums = 2 * rfi_kind_scales(rfi_kind_of(type));
    uint64_t ahead = offset + RFI_AHEAD * rfi_unit_bytes(type); /* past the end of a row: the row 16 further on */
    if (ahead >= r->row_bytes) ahead += 15 * r->row_bytes;
    for (uint32_t i = 0; i < 4; i++) {
        __m512i dot[4][4];
        RFI_UNROLL(4)
        for (uint32_t j = 0; j < 4; j++) {
            const __m512i zero = _mm512_setzero_si512();
            __m512i q[4];
            rfi_512_values(type, r->row[i * 4 + j] + offset, q);
            if (r->row_bytes) rfi_512_prefetch(type, r->row[i * 4 + j], ahead);
            RFI_UNROLL(4)
            for (uint32_t v = 0; v < 4; v++)
                q[v] = _mm512_dpbusd_epi32(v & 1 && n_sums == 2 ? q[v - 1] : zero, q[v], xq[v]);
            RFI_UNROLL(4)
            for (uint32_t v = 0; v < n_sums; v++) dot[v][j] = q[n_sums == 2 ? 2 * v + 1 : v];
        }
        RFI_UNROLL(4)
        for (uint32_t v = 0; v < n_sums; v++) sum[v][i] = rfi_512_sum4(dot[v][0], dot[v][1], dot[v][2], dot[v][3]);
    }
    RFI_UNROLL(4)
    for (uint32_t v = 0; v < n_sums; v++) rfi_512_transpose_lanes(sum[v]);
}

RFI_INLINE RFI_512 void rfi_avx512_vector(uint32_t type, const rfi_rows *r, uint32_t n_groups, const rfi_q8 *x,
                                          float *acc) {
    const rfi_kind kind = rfi_kind_of(type);
    const uint32_t n_halves = rfi_kind_scales(kind);
    const int shift = rfi_bias_shift(type);
    _Alignas(64) float s[16 * 16], m[16 * 16];
    __m512 y = _mm512_loadu_ps(acc);
    for (uint32_t g0 = 0; g0 < n_groups; g0 += 8, x += 8) {
        const uint64_t offset = (uint64_t)(g0 / 8) * rfi_unit_bytes(type);
        __m512i xq[4], sum[4][4];
        rfi_512_inputs(type, x, xq);
        rfi_512_scales(type, r, offset, s, m);
        rfi_512_sums(type, r, offset, xq, sum);
        RFI_UNROLL(8)
        for (uint32_t g = 0; g < 8; g++) {
            if (g0 + g == n_groups) break;
            const uint32_t l = rfi_512_lane(type, g);
            const __m512 dx = _mm512_set1_ps(x[g].d);
            RFI_UNROLL(2)
            for (uint32_t h = 0; h < n_halves; h++) {
                const int32_t bias = rfi_kind_min(kind) ? 0 : (n_halves == 2 ? x[g].b16[h] : x[g].b) >> shift;
                const __m512i isum = _mm512_add_epi32(sum[(l >> 2) * n_halves + h][l & 3], _mm512_set1_epi32(bias));
                const uint32_t at = (g * n_halves + h) * 16;
                y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum), _mm512_mul_ps(_mm512_load_ps(s + at), dx), y);
                if (!rfi_kind_min(kind)) continue;
                y = _mm512_fmadd_ps(_mm512_load_ps(m + at), _mm512_set1_ps(n_halves == 2 ? x[g].s16[h] : x[g].s), y);
            }
        }
    }
    _mm512_storeu_ps(acc, y);
}

/* 16 rows of a unit's values, each in the order of rfi_512_values, to groups from `at` of a panel. */
static RFI_512 void rfi_512_interleave(uint32_t type, const uint8_t (*q)[256], uint32_t at, rfi_panel *p) {
    const int bias = rfi_is_signed(type) || rfi_kind_min(rfi_kind_of(type)) ? 0 : 128 - rfi_bias_of(type);
    for (uint32_t i = 0; i < 4; i++) {
        __m512i v[4][4]; /* [rows 4k to 4k + 3][element of a lane] */
        RFI_UNROLL(4)
        for (int k = 0; k < 4; k++) {
            RFI_UNROLL(4)
            for (int j = 0; j < 4; j++)
                v[k][j] = _mm512_add_epi8(_mm512_load_si512(q[4 * k + j] + 64 * i), _mm512_set1_epi8((char)bias));
            rfi_512_transpose(v[k]);
        }
        RFI_UNROLL(4)
        for (uint32_t e = 0; e < 4; e++) {
            __m512i lane[4] = {v[0][e], v[1][e], v[2][e], v[3][e]};
            rfi_512_transpose_lanes(lane);
            RFI_UNROLL(4)
            for (uint32_t l = 0; l < 4; l++) {
                const uint32_t g = at + rfi_512_group(type, (i >> 1) * 4 + l);
                _mm512_store_si512(p->q + (g * 8 + (i & 1) * 4 + e) * 64, lane[l]);
            }
        }
    }
}

RFI_INLINE RFI_512 void rfi_avx512_unpack(uint32_t type, const rfi_rows *r, uint64_t offset, uint32_t at,
                                          rfi_panel *p) {
    _Alignas(64) uint8_t q[16][256];
    const uint32_t n_scales = rfi_kind_scales(rfi_kind_of(type));
    for (int l = 0; l < 16; l++) {
        __m512i v[4];
        rfi_512_values(type, r->row[l] + offset, v);
        RFI_UNROLL(4)
        for (int i = 0; i < 4; i++) _mm512_store_si512(q[l] + 64 * i, v[i]);
    }
    rfi_512_interleave(type, (const uint8_t (*)[256])q, at, p);
    rfi_512_scales(type, r, offset, p->s + at * n_scales * 16, p->m + at * n_scales * 16);
}

/* nc columns of 32 rows (two panels). One body for all types: its branches are the same all along a tile. */
RFI_INLINE RFI_512 void rfi_512_tile(int has_min, uint32_t nc, const rfi_tile *t, uint32_t c0) {
    const uint32_t halves = rfi_kind_scales(rfi_kind_of(t->type)) == 2;
    const rfi_q8 *x = t->x + c0 * t->x_stride;
    float *acc = t->acc + c0 * t->acc_stride;
    /* what a sum begins with, of the first and second half */
    const uint64_t b0 = has_min ? offsetof(rfi_q8, zero) : halves ? offsetof(rfi_q8, b16) : offsetof(rfi_q8, b);
    const uint64_t b1 = halves && !has_min ? b0 + sizeof(int32_t) : b0;
    const rfi_panel *p = t->p;
    __m512 y[2][6];
    __m512i sum[2][6];
    RFI_UNROLL(6)
    for (uint32_t c = 0; c < nc; c++) {
        sum[0][c] = sum[1][c] = _mm512_setzero_si512();
        y[0][c] = _mm512_loadu_ps(acc + c * t->acc_stride);
        y[1][c] = _mm512_loadu_ps(acc + c * t->acc_stride + 16);
    }
    for (uint32_t i = 0; i < 2 * t->n_groups; i++) { /* halves of groups */
        const uint32_t h = i & 1;
        if (!h || halves) {
            RFI_UNROLL(6)
            for (uint32_t c = 0; c < nc; c++) {
                const uint8_t *xc = (const uint8_t *)(x + c * t->x_stride);
                if (!h) _mm_prefetch((const char *)(xc + 2 * sizeof *x), _MM_HINT_T0);
                sum[0][c] = sum[1][c] = _mm512_set1_epi32((int)rfi_load_u32(xc + (h ? b1 : b0)));
            }
        }
        RFI_UNROLL(4)
        for (uint32_t u = 0; u < 4; u++) {
            const __m512i a = _mm512_load_si512(p[0].q + i * 256 + u * 64);
            const __m512i b = _mm512_load_si512(p[1].q + i * 256 + u * 64);
            RFI_UNROLL(6)
            for (uint32_t c = 0; c < nc; c++) {
                const __m512i v = _mm512_set1_epi32((int)rfi_load_u32(x[c * t->x_stride].q + h * 16 + u * 4));
                sum[0][c] = _mm512_dpbusd_epi32(sum[0][c], a, v), sum[1][c] = _mm512_dpbusd_epi32(sum[1][c], b, v);
            }
        }
        if (!h && !halves) continue;
        const uint32_t at = halves ? i * 16 : i / 2 * 16;
        RFI_UNROLL(2)
        for (uint32_t k = 0; k < 2; k++) {
            const __m512 s = _mm512_load_ps(p[k].s + at);
            RFI_UNROLL(6)
            for (uint32_t c = 0; c < nc; c++) {
                const __m512 d = _mm512_mul_ps(s, _mm512_set1_ps(x[c * t->x_stride].d));
                y[k][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[k][c]), d, y[k][c]);
            }
            if (!has_min) continue;
            const __m512 m = _mm512_load_ps(p[k].m + at);
            RFI_UNROLL(6)
            for (uint32_t c = 0; c < nc; c++) {
                const float *sx = halves ? &x[c * t->x_stride].s16[h] : &x[c * t->x_stride].s;
                y[k][c] = _mm512_fmadd_ps(m, _mm512_set1_ps(*sx), y[k][c]);
            }
        }
        x += h;
    }
    RFI_UNROLL(6)
    for (uint32_t c = 0; c < nc; c++) {
        _mm512_storeu_ps(acc + c * t->acc_stride, y[0][c]);
        _mm512_storeu_ps(acc + c * t->acc_stride + 16, y[1][c]);
    }
}

/* Whole tiles of 6 columns, then of 4, 2, 1. */
RFI_INLINE RFI_512 void rfi_512_tiles(int has_min, const rfi_tile *t) {
    const uint32_t n = t->n_cols;
    if (n == 6) {
        rfi_512_tile(has_min, 6, t, 0);
        return;
    }
    if (n & 4) rfi_512_tile(has_min, 4, t, 0);
    if (n & 2) rfi_512_tile(has_min, 2, t, n & 4);
    if (n & 1) rfi_512_tile(has_min, 1, t, n & 6);
}
static RFI_512 void rfi_avx512_tile(const rfi_tile *t) {
    if (rfi_kind_min(rfi_kind_of(t->type))) rfi_512_tiles(1, t);
    else rfi_512_tiles(0, t);
}
#define rfi_avx512_expander rfi_256_expander

RFI_INLINE __mmask16 rfi_512_mask(uint32_t n) { return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1u); }

/* 16 values of a type from element i on; of those the first n. */
RFI_INLINE RFI_512 __m512 rfi_512_load(uint32_t type, const void *p, uint64_t i, uint32_t n) {
    const uint8_t *at = (const uint8_t *)p + i * (type == RF_TYPE_F32 ? 4 : 2);
    if (type == RF_TYPE_F32) return n >= 16 ? _mm512_loadu_ps(at) : _mm512_maskz_loadu_ps(rfi_512_mask(n), at);
    const __m256i v = n >= 16 ? _mm256_loadu_si256((const __m256i *)(const void *)at)
                              : _mm256_maskz_loadu_epi16(rfi_512_mask(n), at);
    if (type == RF_TYPE_F16) return _mm512_cvtph_ps(v);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/* n values (16, but at the end of a row) of 4 rows times the columns. */
RFI_INLINE RFI_512 void rfi_512_float_step(uint32_t type, uint32_t n_cols, const rfi_float_tile *t, const float *x,
                                           uint32_t i, uint32_t n, __m512 sum[RFI_FLOAT_COLS][4]) {
    __m512 w[4];
    RFI_UNROLL(4)
    for (int r = 0; r < 4; r++) {
        w[r] = rfi_512_load(type, t->row[r], i, n);
        if (n_cols == 1 && t->ahead) _mm_prefetch((const char *)((uintptr_t)t->row[r] + t->ahead + i * 2), _MM_HINT_T0);
    }
    RFI_UNROLL(6)
    for (uint32_t c = 0; c < n_cols; c++) {
        const __m512 v = rfi_512_load(RF_TYPE_F32, x + c * t->x_stride, i, n);
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) sum[c][r] = _mm512_fmadd_ps(w[r], v, sum[c][r]);
    }
}

RFI_INLINE RFI_512 void rfi_512_float_tile(uint32_t type, uint32_t n_cols, rfi_float_tile *t, uint32_t c0) {
    const float *x = t->x + c0 * t->x_stride;
    __m512 sum[RFI_FLOAT_COLS][4];
    uint32_t i = 0;
    RFI_UNROLL(6)
    for (uint32_t c = 0; c < n_cols; c++)
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) sum[c][r] = _mm512_setzero_ps();
    for (; i + 16 <= t->n; i += 16) rfi_512_float_step(type, n_cols, t, x, i, 16, sum);
    if (i < t->n) rfi_512_float_step(type, n_cols, t, x, i, t->n - i, sum);
    RFI_UNROLL(6)
    for (uint32_t c = 0; c < n_cols; c++) {
        const __m512 ab =
            _mm512_add_ps(_mm512_unpacklo_ps(sum[c][0], sum[c][1]), _mm512_unpackhi_ps(sum[c][0], sum[c][1]));
        const __m512 cd =
            _mm512_add_ps(_mm512_unpacklo_ps(sum[c][2], sum[c][3]), _mm512_unpackhi_ps(sum[c][2], sum[c][3]));
        const __m512 lanes = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
        const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
        _mm_storeu_ps(t->sum[c0 + c], _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
    }
}

RFI_INLINE RFI_512 void rfi_avx512_float_tile(uint32_t type, rfi_float_tile *t) {
    const uint32_t n = t->n_cols;
    if (n == 6) {
        rfi_512_float_tile(type, 6, t, 0);
        return;
    }
    if (n & 4) rfi_512_float_tile(type, 4, t, 0);
    if (n & 2) rfi_512_float_tile(type, 2, t, n & 4);
    if (n & 1) rfi_512_float_tile(type, 1, t, n & 6);
}

#define RFI_512_VALUES_AHEAD 32u /* positions to prefetch ahead: hardware prefetchers stop at page boundaries */

/* nc columns from c on by n_vec vectors of 16 dimensions from d on. */
RFI_INLINE RFI_512 void rfi_512_weigh(uint32_t type, uint32_t nc, uint32_t n_vec, const rfi_weigh *a, uint32_t c0,
                                      uint32_t d) {
    const uint64_t row = (uint64_t)a->head_dim_v * (type == RF_TYPE_F32 ? 4 : 2);
    const uint32_t n = n_vec > 1 ? 16 : a->head_dim_v - d;
    const float *p = a->p + c0 * a->p_stride;
    float *out = a->out + c0 * a->out_stride + d;
    __m512 sum[4][4];
    RFI_UNROLL(4)
    for (uint32_t c = 0; c < nc; c++)
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < n_vec; i++) sum[c][i] = rfi_512_load(RF_TYPE_F32, out + c * a->out_stride, 16 * i, n);
    for (uint64_t pos = 0; pos < a->n_pos; pos++) {
        __m512 w[4];
        if (n_vec > 1)
            for (uint32_t i = 0; i < (type == RF_TYPE_F32 ? 4u : 2u); i++)
                _mm_prefetch((const char *)((uintptr_t)a->v + (pos + RFI_512_VALUES_AHEAD) * row) + i * 64,
                             _MM_HINT_T0);
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < n_vec; i++) w[i] = rfi_512_load(type, a->v, pos * a->head_dim_v + d + 16 * i, n);
        RFI_UNROLL(4)
        for (uint32_t c = 0; c < nc; c++) {
            const __m512 f = _mm512_set1_ps(p[c * a->p_stride + pos]);
            RFI_UNROLL(4)
            for (uint32_t i = 0; i < n_vec; i++) sum[c][i] = _mm512_fmadd_ps(f, w[i], sum[c][i]);
        }
    }
    RFI_UNROLL(4)
    for (uint32_t c = 0; c < nc; c++)
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < n_vec; i++)
            _mm512_mask_storeu_ps(out + c * a->out_stride + 16 * i, rfi_512_mask(n), sum[c][i]);
}

RFI_INLINE RFI_512 void rfi_avx512_weigh(uint32_t type, const rfi_weigh *a) {
    for (uint32_t c = 0, nc; c < a->n_cols; c += nc) {
        nc = a->n_cols - c >= 4 ? 4 : 1;
        for (uint32_t d = 0; d < a->head_dim_v;) {
            const int wide = a->head_dim_v - d >= 64;
            if (nc == 4 && wide) rfi_512_weigh(type, 4, 4, a, c, d);
            else if (nc == 4) rfi_512_weigh(type, 4, 1, a, c, d);
            else if (wide) rfi_512_weigh(type, 1, 4, a, c, d);
            else rfi_512_weigh(type, 1, 1, a, c, d);
            d += wide ? 64 : 16;
        }
    }
}

/* As rfi_scalar_transpose_keys, 32 positions. */
RFI_INLINE RFI_512 void rfi_avx512_transpose_keys(uint32_t type, const rfi_keys *k, uint32_t d, uint32_t n,
                                                  float *keys_t) {
    for (uint32_t half = 0; half < 2; half++)
        for (uint32_t i = 0; i < n; i += 16) {
            __m512i v[4][4]; /* [positions 4j to 4j + 3][position, then dimension of a lane] */
            RFI_UNROLL(4)
            for (uint32_t j = 0; j < 4; j++) {
                RFI_UNROLL(4)
                for (uint32_t l = 0; l < 4; l++)
                    v[j][l] = _mm512_castps_si512(rfi_512_load(type, k->row[half * 16 + j * 4 + l], d + i, n - i));
                rfi_512_transpose(v[j]);
            }
            RFI_UNROLL(4)
            for (uint32_t e = 0; e < 4; e++) {
                __m512i lane[4] = {v[0][e], v[1][e], v[2][e], v[3][e]};
                rfi_512_transpose_lanes(lane);
                for (uint32_t l = 0; l < 4; l++)
                    if (i + l * 4 + e < n) _mm512_store_si512(keys_t + (i + l * 4 + e) * 32 + half * 16, lane[l]);
            }
        }
}

/* nc columns from c on. */
RFI_INLINE RFI_512 void rfi_512_dots_q(uint32_t nc, const rfi_dots *a, uint32_t c) {
    __m512 sum[8][2];
    const float *q = a->q + (uint64_t)c * a->head_dim + a->d;
    float *out = a->s + (uint64_t)c * RFI_ATTENTION_BLOCK;
    RFI_UNROLL(8)
    for (uint32_t e = 0; e < nc; e++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++)
            sum[e][h] = a->d ? _mm512_loadu_ps(out + e * RFI_ATTENTION_BLOCK + 16 * h) : _mm512_setzero_ps();
    for (uint32_t i = 0; i < a->n; i++) {
        const __m512 k0 = _mm512_load_ps(a->keys_t + i * 32), k1 = _mm512_load_ps(a->keys_t + i * 32 + 16);
        RFI_UNROLL(8)
        for (uint32_t e = 0; e < nc; e++) {
            const __m512 f = _mm512_set1_ps(q[(uint64_t)e * a->head_dim + i]);
            sum[e][0] = _mm512_fmadd_ps(k0, f, sum[e][0]), sum[e][1] = _mm512_fmadd_ps(k1, f, sum[e][1]);
        }
    }
    RFI_UNROLL(8)
    for (uint32_t e = 0; e < nc; e++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) _mm512_storeu_ps(out + e * RFI_ATTENTION_BLOCK + 16 * h, sum[e][h]);
}

static RFI_512 void rfi_avx512_dots_q(const rfi_dots *a) {
    uint32_t c = 0;
    for (; c + 8 <= a->n_cols; c += 8) rfi_512_dots_q(8, a, c);
    for (; c < a->n_cols; c++) rfi_512_dots_q(1, a, c);
}

enum { RFI_LANES_avx512 = 16, RFI_PANELS_avx512 = 2, RFI_COLS_avx512 = 6, RFI_KEYS_avx512 = 32 };
RFI_KERNELS_OF(avx512, RFI_512)

/* ---- AVX2 with FMA and F16C: 8 rows at once ---- */

/* Loads 16 bytes from each of two addresses. */
RFI_INLINE RFI_256 __m256i rfi_256_pick(const void *a, const void *b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)),
                                   _mm_loadu_si128((const __m128i *)b), 1);
}

/* 4x4 transpose of the 32-bit elements of each 128-bit lane. */
RFI_INLINE RFI_256 void rfi_256_transpose(__m256i v[4]) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
    const __m256i c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, b), v[1] = _mm256_unpackhi_epi64(a, b);
    v[2] = _mm256_unpacklo_epi64(c, d), v[3] = _mm256_unpackhi_epi64(c, d);
}

/* The two groups of a pair; pairs 0 to 3 make a unit. */
RFI_INLINE uint32_t rfi_256_group(uint32_t type, uint32_t pair, uint32_t second) {
    return type == RF_TYPE_Q6_K || rfi_is_expanded(type) ? pair * 2 + second : (pair & 2) * 2 + (pair & 1) + second * 2;
}

/* Values of a pair, 2 * half + odd: q[0] the first 16 of both groups, q[1] the second 16. Unsigned, but Q8_0 signed. */
RFI_INLINE RFI_256 void rfi_256_values(uint32_t type, const uint8_t *p, uint32_t half, uint32_t odd, __m256i q[2]) {
    const uint32_t pair = 2 * half + odd;
    const __m256i low = _mm256_set1_epi8(15);
    if (rfi_is_expanded(type)) {
        const __m256i a = rfi_256_load(p + pair * 64), b = rfi_256_load(p + pair * 64 + 32);
        q[0] = _mm256_permute2x128_si256(a, b, 0x20), q[1] = _mm256_permute2x128_si256(a, b, 0x31);
        return;
    }
    if (type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K || type == RF_TYPE_Q6_K) {
        const uint8_t *nibbles = p + (type == RF_TYPE_Q4_K ? 16 : type == RF_TYPE_Q5_K ? 48 : 0) + half * 64;
        RFI_UNROLL(2)
        for (int i = 0; i < 2; i++) {
            const __m256i v = rfi_256_pick(nibbles + 16 * i, nibbles + 32 + 16 * i);
            q[i] = _mm256_and_si256(odd ? _mm256_srli_epi16(v, 4) : v, low);
        }
        if (type == RF_TYPE_Q4_K) return;
        /* the high bits come into place by a shift for each of the groups: left by a and b, right for negative ones */
        const uint8_t *bits = type == RF_TYPE_Q5_K ? p + 16 : p + 128 + half * 32;
        const int a = type == RF_TYPE_Q5_K ? 4 - (int)rfi_256_group(type, pair, 0) : 4 - (int)odd * 4, b = a - 2;
        const __m256i mask = _mm256_set1_epi8(type == RF_TYPE_Q5_K ? 0x10 : 0x30);
        const __m256i left = _mm256_set_epi32(b, b, b, b, a, a, a, a), zero = _mm256_setzero_si256();
        RFI_UNROLL(2)
        for (int i = 0; i < 2; i++) { /* shifts by counts outside 0 to 31 give 0 */
            const __m256i h = rfi_256_pick(bits + 16 * i, bits + 16 * i);
            const __m256i v = _mm256_or_si256(_mm256_sllv_epi32(h, left),
                                              _mm256_srlv_epi32(h, _mm256_sub_epi32(zero, left)));
            q[i] = _mm256_or_si256(q[i], _mm256_and_si256(v, mask));
        }
        return;
    }
    const uint32_t step = rfi_unit_bytes(type) / 8;
    const uint8_t *b0 = p + rfi_256_group(type, pair, 0) * step, *b1 = p + rfi_256_group(type, pair, 1) * step;
    const int five = type == RF_TYPE_Q5_0 || type == RF_TYPE_Q5_1;
    const uint32_t head = rfi_kind_of(type) == RFI_KIND_MIN ? 4 : 2, at = head + (five ? 4 : 0);
    if (type == RF_TYPE_Q8_0) {
        q[0] = rfi_256_pick(b0 + at, b1 + at), q[1] = rfi_256_pick(b0 + at + 16, b1 + at + 16);
        return;
    }
    const __m256i v = rfi_256_pick(b0 + at, b1 + at);
    q[0] = _mm256_and_si256(v, low), q[1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
    if (!five) return;
    /* each byte tests its bit of qh */
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u), sixteen = _mm256_set1_epi8(16);
    const __m256i qh = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32((int)rfi_load_u32(b0 + head))),
                                               _mm_set1_epi32((int)rfi_load_u32(b1 + head)), 1);
    RFI_UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const __m256i byte = _mm256_add_epi8(_mm256_set1_epi8((char)(2 * i)),
                                             _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0101010101010101, 0)));
        const __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(qh, byte), bit);
        q[i] = _mm256_or_si256(q[i], _mm256_and_si256(_mm256_cmpeq_epi8(mine, bit), sixteen));
    }
}

RFI_INLINE RFI_256 __m256 rfi_256_half(const uint16_t *h) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)h));
}

/* As rfi_512_scales. */
RFI_INLINE RFI_256 void rfi_256_scales(uint32_t type, const rfi_rows *r, uint64_t offset, float *s, float *m) {
    const int k = type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K;
    const __m256i byte = _mm256_set1_epi32(255);
    uint16_t d[8], dmin[8];
    __m256i head[4];
    if (rfi_is_expanded(type)) {
        const uint32_t n = 2 * rfi_kind_scales(rfi_kind_of(type)), end = type == RFI_TYPE_EXPANDED_MIN ? 2 * n : n;
        RFI_UNROLL(8)
        for (uint32_t i = 0; i < end; i++) { /* m follows s */
            const uint64_t at = offset + offsetof(rfi_expanded, s) + 16 * i;
            RFI_UNROLL(4)
            for (int j = 0; j < 4; j++) head[j] = rfi_256_pick(r->row[j] + at, r->row[j + 4] + at);
            rfi_256_transpose(head);
            float *to = i < n ? s + i * 32 : m + (i - n) * 32;
            RFI_UNROLL(4)
            for (uint32_t j = 0; j < 4; j++) _mm256_storeu_si256((__m256i *)(void *)(to + j * 8), head[j]);
        }
        return;
    }
    if (type == RF_TYPE_Q6_K || k) {
        const uint64_t at = offset + (k ? 0 : 192);
        RFI_UNROLL(4)
        for (int i = 0; i < 4; i++) head[i] = rfi_256_pick(r->row[i] + at, r->row[i + 4] + at);
        rfi_256_transpose(head);
        RFI_UNROLL(8)
        for (int l = 0; l < 8; l++) {
            d[l] = rfi_load_u16(r->row[l] + offset + (k ? 0 : 208));
            dmin[l] = rfi_load_u16(r->row[l] + offset + 2);
        }
    }
    if (type == RF_TYPE_Q6_K) {
        RFI_UNROLL(16)
        for (int i = 0; i < 16; i++) {
            const __m256i v = _mm256_srai_epi32(_mm256_slli_epi32(head[i >> 2], 24 - 8 * (i & 3)), 24);
            _mm256_storeu_ps(s + i * 8, _mm256_mul_ps(rfi_256_half(d), _mm256_cvtepi32_ps(v)));
        }
    } else if (k) {
        const __m256i six = _mm256_set1_epi32(0x3f3f3f3f), four = _mm256_set1_epi32(0x0f0f0f0f);
        const __m256i top = _mm256_set1_epi32(0x30303030);
        const __m256 dw = rfi_256_half(d), mw = _mm256_sub_ps(_mm256_setzero_ps(), rfi_256_half(dmin));
        const __m256i scale[2] = {_mm256_and_si256(head[1], six),
                                  _mm256_or_si256(_mm256_and_si256(head[3], four),
                                                  _mm256_and_si256(_mm256_srli_epi32(head[1], 2), top))};
        const __m256i min[2] = {_mm256_and_si256(head[2], six),
                                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(head[3], 4), four),
                                                _mm256_and_si256(_mm256_srli_epi32(head[2], 2), top))};
        RFI_UNROLL(8)
        for (int i = 0; i < 8; i++) {
            const __m256i u = _mm256_and_si256(_mm256_srli_epi32(scale[i >> 2], 8 * (i & 3)), byte);
            const __m256i v = _mm256_and_si256(_mm256_srli_epi32(min[i >> 2], 8 * (i & 3)), byte);
            _mm256_storeu_ps(s + i * 8, _mm256_mul_ps(dw, _mm256_cvtepi32_ps(u)));
            _mm256_storeu_ps(m + i * 8, _mm256_mul_ps(mw, _mm256_cvtepi32_ps(v)));
        }
    } else {
        for (uint32_t g = 0; g < 8; g++) {
            RFI_UNROLL(8)
            for (int l = 0; l < 8; l++) {
                const uint8_t *b = r->row[l] + offset + g * (rfi_unit_bytes(type) / 8);
                d[l] = rfi_load_u16(b), dmin[l] = rfi_load_u16(b + 2);
            }
            _mm256_storeu_ps(s + g * 8, rfi_256_half(d));
            if (rfi_kind_of(type) == RFI_KIND_MIN) _mm256_storeu_ps(m + g * 8, rfi_256_half(dmin));
        }
    }
}

/* sum += sums of 4 products, a unsigned. Assembly, because compilers offer the intrinsic only in functions with that
 * target, which the shared AVX2 functions do not have. The tests define RFI_VNNI_EVEX to run them on
 * machines that have the other encoding alone. */
#if defined(RFI_VNNI_EVEX)
#define RFI_VNNI_DOT "%{evex%} vpdpbusd %2, %1, %0"
#else
#define RFI_VNNI_DOT "%{vex%} vpdpbusd %2, %1, %0"
#endif
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11 /* older ones know neither target nor instruction */
#define RFI_HAS_VNNI 1
#define rfi_256_vnni(sum, a, x) __asm__(RFI_VNNI_DOT : "+x"(sum) : "x"(a), "x"(x))
#else
#define RFI_HAS_VNNI 0
#define rfi_256_vnni(sum, a, x) (void)(a), (void)(x)
#endif

/* Sums of 4 products; a is unsigned unless signed_a. No 16-bit sum overflows: 128 * 127 * 2, or 63 * 127 * 2. */
RFI_INLINE RFI_256 __m256i rfi_256_dot(int signed_a, __m256i a, __m256i x) {
    if (signed_a) x = _mm256_sign_epi8(x, a), a = _mm256_abs_epi8(a);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a, x), _mm256_set1_epi16(1));
}

RFI_INLINE RFI_256 void rfi_256_prefetch(uint32_t type, const rfi_rows *r, uint64_t offset) {
    uint64_t ahead = offset + 2 * RFI_AHEAD * rfi_unit_bytes(type); /* past the end of a row: the row 8 further on */
    if (ahead >= r->row_bytes) ahead += 7 * r->row_bytes;
    for (int l = 0; l < 8 && r->row_bytes; l++)
        RFI_UNROLL(8)
        for (uint32_t i = 0; i < rfi_unit_bytes(type); i += 64)
            _mm_prefetch((const char *)((uintptr_t)r->row[l] + ahead + i), _MM_HINT_T0);
}

/* Sums of products of a pair of groups, or of their halves, of rows 4i to 4i + 3. */
RFI_INLINE RFI_256 void rfi_256_sums(uint32_t type, const __m256i q[4][2], const __m256i xq[2], __m256i sum[2]) {
    const uint32_t n_sums = rfi_kind_scales(rfi_kind_of(type));
    __m256i dot[2][4];
    RFI_UNROLL(4)
    for (int j = 0; j < 4; j++) {
        RFI_UNROLL(2)
        for (int h = 0; h < 2; h++) dot[h][j] = rfi_256_dot(rfi_is_signed(type), q[j][h], xq[h]);
        if (n_sums == 1) dot[0][j] = _mm256_add_epi32(dot[0][j], dot[1][j]);
    }
    RFI_UNROLL(2)
    for (uint32_t h = 0; h < n_sums; h++)
        sum[h] = _mm256_hadd_epi32(_mm256_hadd_epi32(dot[h][0], dot[h][1]), _mm256_hadd_epi32(dot[h][2], dot[h][3]));
}

RFI_INLINE RFI_256 void rfi_avx2_vector(uint32_t type, const rfi_rows *r, uint32_t n_groups, const rfi_q8 *x,
                                        float *acc) {
    const rfi_kind kind = rfi_kind_of(type);
    const uint32_t n_halves = rfi_kind_scales(kind);
    const int has_bias = !rfi_is_signed(type) && !rfi_kind_min(kind), shift = rfi_bias_shift(type);
    _Alignas(32) float s[16 * 8], m[16 * 8];
    __m256i isum[8][2]; /* [group][half] */
    __m256 y = _mm256_loadu_ps(acc);
    for (uint32_t g0 = 0; g0 < n_groups; g0 += 8, x += 8) {
        const uint64_t offset = (uint64_t)(g0 / 8) * rfi_unit_bytes(type);
        rfi_256_prefetch(type, r, offset);
        rfi_256_scales(type, r, offset, s, m);
        for (uint32_t half = 0; half < 2; half++)
            RFI_UNROLL(2)
            for (uint32_t odd = 0; odd < 2; odd++) {
                const uint32_t first = rfi_256_group(type, 2 * half + odd, 0);
                const uint32_t second = rfi_256_group(type, 2 * half + odd, 1);
                const __m256i xq[2] = {rfi_256_pick(x[first].q, x[second].q),
                                       rfi_256_pick(x[first].q + 16, x[second].q + 16)};
                __m256i sum[2][2]; /* [rows 0..3, 4..7][half] */
                RFI_UNROLL(2)
                for (int i = 0; i < 2; i++) {
                    __m256i q[4][2];
                    RFI_UNROLL(4)
                    for (int j = 0; j < 4; j++) rfi_256_values(type, r->row[4 * i + j] + offset, half, odd, q[j]);
                    rfi_256_sums(type, (const __m256i (*)[2])q, xq, sum[i]);
                }
                RFI_UNROLL(2)
                for (uint32_t h = 0; h < n_halves; h++) {
                    isum[first][h] = _mm256_permute2x128_si256(sum[0][h], sum[1][h], 0x20);
                    isum[second][h] = _mm256_permute2x128_si256(sum[0][h], sum[1][h], 0x31);
                }
            }
        for (uint32_t g = 0; g < 8 && g0 + g < n_groups; g++) {
            const __m256 dx = _mm256_set1_ps(x[g].d);
            RFI_UNROLL(2)
            for (uint32_t h = 0; h < n_halves; h++) {
                __m256i i = isum[g][h];
                const uint32_t at = (g * n_halves + h) * 8;
                const int32_t b = n_halves == 2 ? x[g].b16[h] : x[g].b;
                if (has_bias) i = _mm256_add_epi32(i, _mm256_set1_epi32(b >> shift));
                y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i), _mm256_mul_ps(_mm256_load_ps(s + at), dx), y);
                if (!rfi_kind_min(kind)) continue;
                y = _mm256_fmadd_ps(_mm256_load_ps(m + at), _mm256_set1_ps(n_halves == 2 ? x[g].s16[h] : x[g].s), y);
            }
        }
    }
    _mm256_storeu_ps(acc, y);
}

/* 8 rows of a unit's values, [pair][half][32] each, to groups from `at` of a panel. */
static RFI_256 void rfi_256_interleave(uint32_t type, const uint8_t (*q)[256], uint32_t at, rfi_panel *p) {
    for (uint32_t i = 0; i < 8; i++) { /* pair and half */
        uint8_t *a = p->q + (at + rfi_256_group(type, i >> 1, 0)) * 256 + (i & 1) * 128;
        uint8_t *b = p->q + (at + rfi_256_group(type, i >> 1, 1)) * 256 + (i & 1) * 128;
        __m256i v[2][4]; /* [rows 0..3, 4..7][row, then element of a lane] */
        RFI_UNROLL(2)
        for (int k = 0; k < 2; k++) {
            RFI_UNROLL(4)
            for (int l = 0; l < 4; l++) v[k][l] = rfi_256_load(q[4 * k + l] + 32 * i);
            rfi_256_transpose(v[k]);
        }
        RFI_UNROLL(4)
        for (int e = 0; e < 4; e++) {
            _mm256_store_si256((__m256i *)(void *)(a + 32 * e), _mm256_permute2x128_si256(v[0][e], v[1][e], 0x20));
            _mm256_store_si256((__m256i *)(void *)(b + 32 * e), _mm256_permute2x128_si256(v[0][e], v[1][e], 0x31));
        }
    }
}

RFI_INLINE RFI_256 void rfi_avx2_unpack(uint32_t type, const rfi_rows *r, uint64_t offset, uint32_t at, rfi_panel *p) {
    _Alignas(32) uint8_t q[8][256];
    const uint32_t n_scales = rfi_kind_scales(rfi_kind_of(type));
    for (int l = 0; l < 8; l++) {
        RFI_UNROLL(4)
        for (uint32_t pair = 0; pair < 4; pair++) {
            __m256i v[2];
            rfi_256_values(type, r->row[l] + offset, pair >> 1, pair & 1, v);
            _mm256_store_si256((__m256i *)(void *)(q[l] + 64 * pair), v[0]);
            _mm256_store_si256((__m256i *)(void *)(q[l] + 64 * pair + 32), v[1]);
        }
    }
    rfi_256_interleave(type, (const uint8_t (*)[256])q, at, p);
    rfi_256_scales(type, r, offset, p->s + at * n_scales * 8, p->m + at * n_scales * 8);
}

/* Half a group (4 times 4 values of 8 rows) times the columns' values, with VNNI. is_signed: the weights are. */
RFI_INLINE RFI_256 void rfi_256_dots_vnni(int is_signed, const uint8_t *q, const rfi_tile *t, const int8_t *x,
                                          uint32_t nc, __m256i sum[4]) {
    RFI_UNROLL(4)
    for (uint32_t u = 0; u < 4; u++) {
        const __m256i w = rfi_256_load(q + u * 32), a = is_signed ? _mm256_abs_epi8(w) : w;
        RFI_UNROLL(4)
        for (uint32_t c = 0; c < nc; c++) {
            __m256i xc = _mm256_set1_epi32((int)rfi_load_u32(x + c * t->x_stride * sizeof(rfi_q8) + u * 4));
            if (is_signed) xc = _mm256_sign_epi8(xc, w);
            rfi_256_vnni(sum[c], a, xc);
        }
    }
}

/* And without it. `bits` of the weights: up to 5 let four products of pairs add up in 16 bits, 6 let two; 8 means
 * signed. */
RFI_INLINE RFI_256 void rfi_256_dots(int bits, const uint8_t *q, const rfi_tile *t, const int8_t *x, uint32_t nc,
                                     __m256i sum[4]) {
    const uint32_t together = bits == 8 ? 1 : bits == 6 ? 2 : 4;
    __m256i pairs[4];
    RFI_UNROLL(4)
    for (uint32_t u = 0; u < 4; u++) {
        const __m256i w = rfi_256_load(q + u * 32), a = bits == 8 ? _mm256_abs_epi8(w) : w;
        RFI_UNROLL(4)
        for (uint32_t c = 0; c < nc; c++) {
            __m256i xc = _mm256_set1_epi32((int)rfi_load_u32(x + c * t->x_stride * sizeof(rfi_q8) + u * 4));
            if (bits == 8) xc = _mm256_sign_epi8(xc, w);
            xc = _mm256_maddubs_epi16(a, xc);
            pairs[c] = u % together ? _mm256_add_epi16(pairs[c], xc) : xc;
            if ((u + 1) % together == 0)
                sum[c] = _mm256_add_epi32(sum[c], _mm256_madd_epi16(pairs[c], _mm256_set1_epi16(1)));
        }
    }
}

/* nc columns of 8 rows. */
RFI_INLINE RFI_256 void rfi_256_tile(int vnni, rfi_kind kind, int bits, uint32_t nc, const rfi_tile *t, uint32_t c0) {
    const int has_min = rfi_kind_min(kind), shift = rfi_bias_shift(t->type);
    const uint32_t n_halves = rfi_kind_scales(kind);
    const rfi_q8 *x = t->x + c0 * t->x_stride;
    float *acc = t->acc + c0 * t->acc_stride;
    __m256 y[4];
    RFI_UNROLL(4)
    for (uint32_t c = 0; c < nc; c++) y[c] = _mm256_loadu_ps(acc + c * t->acc_stride);
    for (uint32_t g = 0; g < t->n_groups; g++, x++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < n_halves; h++) {
            const uint8_t *q = t->p->q + g * 256 + h * 128;
            const uint32_t at = (g * n_halves + h) * 8;
            __m256i sum[4];
            RFI_UNROLL(4)
            for (uint32_t c = 0; c < nc; c++) {
                const rfi_q8 *xc = x + c * t->x_stride;
                const int32_t b = has_min || bits == 8 ? 0 : n_halves == 2 ? xc->b16[h] : xc->b;
                sum[c] = _mm256_set1_epi32(b >> shift);
            }
            RFI_UNROLL(2)
            for (uint32_t i = 0; i < 3 - n_halves; i++) {
                if (vnni) rfi_256_dots_vnni(bits == 8, q + 128 * i, t, x->q + (h + i) * 16, nc, sum);
                else rfi_256_dots(bits, q + 128 * i, t, x->q + (h + i) * 16, nc, sum);
            }
            const __m256 s = _mm256_load_ps(t->p->s + at);
            RFI_UNROLL(4)
            for (uint32_t c = 0; c < nc; c++) {
                const __m256 d = _mm256_mul_ps(s, _mm256_set1_ps(x[c * t->x_stride].d));
                y[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[c]), d, y[c]);
            }
            if (!has_min) continue;
            const __m256 m = _mm256_load_ps(t->p->m + at);
            RFI_UNROLL(4)
            for (uint32_t c = 0; c < nc; c++) {
                const float *sx = n_halves == 2 ? &x[c * t->x_stride].s16[h] : &x[c * t->x_stride].s;
                y[c] = _mm256_fmadd_ps(m, _mm256_set1_ps(*sx), y[c]);
            }
        }
    RFI_UNROLL(4)
    for (uint32_t c = 0; c < nc; c++) _mm256_storeu_ps(acc + c * t->acc_stride, y[c]);
}

#define RFI_256_TILE(name, vnni, kind, bits)                                            \
    static RFI_256 void rfi_256_tile_##name(const rfi_tile *t) {                        \
        if (t->n_cols & 4) rfi_256_tile(vnni, kind, bits, 4, t, 0);                     \
        if (t->n_cols & 2) rfi_256_tile(vnni, kind, bits, 2, t, t->n_cols & 4);         \
        if (t->n_cols & 1) rfi_256_tile(vnni, kind, bits, 1, t, t->n_cols & 6);         \
    }
RFI_256_TILE(bias, 0, RFI_KIND_BIAS, 5)
RFI_256_TILE(min, 0, RFI_KIND_MIN, 5)
RFI_256_TILE(halves, 0, RFI_KIND_HALVES, 6)
RFI_256_TILE(halves_min, 0, RFI_KIND_HALVES_MIN, 5)
RFI_256_TILE(eight, 0, RFI_KIND_BIAS, 8)
RFI_256_TILE(halves_eight, 0, RFI_KIND_HALVES, 8)
RFI_256_TILE(vnni_bias, 1, RFI_KIND_BIAS, 5)
RFI_256_TILE(vnni_min, 1, RFI_KIND_MIN, 5)
RFI_256_TILE(vnni_halves, 1, RFI_KIND_HALVES, 6)
RFI_256_TILE(vnni_halves_min, 1, RFI_KIND_HALVES_MIN, 5)
RFI_256_TILE(vnni_eight, 1, RFI_KIND_BIAS, 8)
RFI_256_TILE(vnni_halves_eight, 1, RFI_KIND_HALVES, 8)

static void rfi_avx2_tile(const rfi_tile *t) {
    static void (*const tiles[2][6])(const rfi_tile *) = { /* [VNNI][rfi_kind; signed: 4 and 5] */
        {rfi_256_tile_bias, rfi_256_tile_min, rfi_256_tile_halves, rfi_256_tile_halves_min, rfi_256_tile_eight,
         rfi_256_tile_halves_eight},
        {rfi_256_tile_vnni_bias, rfi_256_tile_vnni_min, rfi_256_tile_vnni_halves, rfi_256_tile_vnni_halves_min,
         rfi_256_tile_vnni_eight, rfi_256_tile_vnni_halves_eight}};
    const rfi_kind kind = rfi_kind_of(t->type);
    tiles[t->extended][rfi_is_signed(t->type) ? 3 + rfi_kind_scales(kind) : (uint32_t)kind](t);
}

RFI_INLINE RFI_256 __m256 rfi_256_load8(uint32_t type, const void *p, uint64_t i) {
    if (type == RF_TYPE_F32) return _mm256_loadu_ps((const float *)p + i);
    const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)((const uint8_t *)p + 2 * i));
    if (type == RF_TYPE_F16) return _mm256_cvtph_ps(v);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

RFI_INLINE RFI_256 void rfi_256_float_tile(uint32_t type, uint32_t n_cols, uint32_t first, rfi_float_tile *t) {
    const uint32_t whole = t->n & ~7u;
    const float *x = t->x + first * t->x_stride;
    __m256 sum[3][4];
    RFI_UNROLL(3)
    for (uint32_t c = 0; c < n_cols; c++)
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) sum[c][r] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < whole; i += 8)
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            const __m256 w = rfi_256_load8(type, t->row[r], i);
            if (n_cols == 1 && t->ahead)
                _mm_prefetch((const char *)((uintptr_t)t->row[r] + t->ahead + i * 2), _MM_HINT_T0);
            RFI_UNROLL(3)
            for (uint32_t c = 0; c < n_cols; c++)
                sum[c][r] = _mm256_fmadd_ps(w, _mm256_loadu_ps(x + c * t->x_stride + i), sum[c][r]);
        }
    RFI_UNROLL(4)
    for (int r = 0; r < 4; r++) { /* the last values, in the first lanes */
        float w[8] = {0}, v[8] = {0};
        if (whole == t->n) continue;
        for (uint32_t l = 0; whole + l < t->n; l++) w[l] = rfi_load_type(type, t->row[r], whole + l);
        RFI_UNROLL(3)
        for (uint32_t c = 0; c < n_cols; c++) {
            for (uint32_t l = 0; whole + l < t->n; l++) v[l] = x[c * t->x_stride + whole + l];
            sum[c][r] = _mm256_fmadd_ps(_mm256_loadu_ps(w), _mm256_loadu_ps(v), sum[c][r]);
        }
    }
    RFI_UNROLL(3)
    for (uint32_t c = 0; c < n_cols; c++) {
        const __m256 lanes = _mm256_hadd_ps(_mm256_hadd_ps(sum[c][0], sum[c][1]), _mm256_hadd_ps(sum[c][2], sum[c][3]));
        _mm_storeu_ps(t->sum[first + c], _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
    }
}

RFI_INLINE RFI_256 void rfi_avx2_float_tile(uint32_t type, rfi_float_tile *t) {
    uint32_t c = 0;
    for (; c + 3 <= t->n_cols; c += 3) rfi_256_float_tile(type, 3, c, t);
    if (c + 2 == t->n_cols) rfi_256_float_tile(type, 2, c, t);
    else if (c < t->n_cols) rfi_256_float_tile(type, 1, c, t);
}

RFI_INLINE RFI_256 void rfi_256_weigh(uint32_t type, uint32_t nc, uint32_t n_vec, const rfi_weigh *a, uint32_t c0,
                                      uint32_t d) {
    const float *p = a->p + c0 * a->p_stride;
    float *out = a->out + c0 * a->out_stride + d;
    __m256 sum[2][4];
    RFI_UNROLL(2)
    for (uint32_t c = 0; c < nc; c++)
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < n_vec; i++) sum[c][i] = _mm256_loadu_ps(out + c * a->out_stride + 8 * i);
    for (uint64_t pos = 0; pos < a->n_pos; pos++) {
        __m256 f[2];
        RFI_UNROLL(2)
        for (uint32_t c = 0; c < nc; c++) f[c] = _mm256_set1_ps(p[c * a->p_stride + pos]);
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < n_vec; i++) {
            const __m256 w = rfi_256_load8(type, a->v, pos * a->head_dim_v + d + 8 * i);
            RFI_UNROLL(2)
            for (uint32_t c = 0; c < nc; c++) sum[c][i] = _mm256_fmadd_ps(f[c], w, sum[c][i]);
        }
    }
    RFI_UNROLL(2)
    for (uint32_t c = 0; c < nc; c++)
        RFI_UNROLL(4)
        for (uint32_t i = 0; i < n_vec; i++) _mm256_storeu_ps(out + c * a->out_stride + 8 * i, sum[c][i]);
}

RFI_INLINE RFI_256 void rfi_avx2_weigh(uint32_t type, const rfi_weigh *a) {
    for (uint32_t c = 0, nc; c < a->n_cols; c += nc) {
        uint32_t d = 0;
        nc = a->n_cols - c >= 2 ? 2 : 1;
        for (; d + 32 <= a->head_dim_v; d += 32) {
            if (nc == 2) rfi_256_weigh(type, 2, 4, a, c, d);
            else rfi_256_weigh(type, 1, 4, a, c, d);
        }
        for (; d + 8 <= a->head_dim_v; d += 8) {
            if (nc == 2) rfi_256_weigh(type, 2, 1, a, c, d);
            else rfi_256_weigh(type, 1, 1, a, c, d);
        }
        rfi_weigh_rest(type, a, c, nc, d);
    }
}

RFI_INLINE RFI_256 int32_t rfi_256_sum(__m256i v) {
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

RFI_INLINE RFI_256 void rfi_avx2_q8(const float *x, rfi_q8 *out) {
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    __m256 v[4];
    __m256i q[4], t = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        t = _mm256_max_epu32(t, _mm256_and_si256(_mm256_castps_si256(v[i]), no_sign));
    }
    __m128i u = _mm_max_epu32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    u = _mm_max_epu32(u, _mm_shuffle_epi32(u, 0x4e));
    const uint32_t top = (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(u, _mm_shuffle_epi32(u, 0xb1)));
    const __m256 id = _mm256_set1_ps(rfi_q8_scale(top, out));
    for (int i = 0; i < 4; i++) {
        if (top >= 0x7f800000u) v[i] = _mm256_setzero_ps();
        const __m256 y = _mm256_add_ps(_mm256_mul_ps(v[i], id), _mm256_set1_ps(RFI_ROUND_MAGIC));
        q[i] = _mm256_sub_epi32(_mm256_castps_si256(y), _mm256_set1_epi32((int)RFI_ROUND_BITS));
    }
    const int32_t first = rfi_256_sum(_mm256_add_epi32(q[0], q[1]));
    const int32_t second = rfi_256_sum(_mm256_add_epi32(q[2], q[3]));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_storeu_si256((__m256i *)(void *)out->q, /* packs leave groups of 4 in the order 0 2 4 6 1 3 5 7 */
                        _mm256_permutevar8x32_epi32(bytes, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0)));
    rfi_q8_sums(first, second, out);
}

RFI_INLINE RFI_256 void rfi_avx2_f16(uint16_t *dst, const float *src, uint32_t n) {
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    rfi_scalar_f16(dst + i, src + i, n - i);
}

/* As rfi_scalar_transpose_keys, 16 positions. */
RFI_INLINE RFI_256 void rfi_avx2_transpose_keys(uint32_t type, const rfi_keys *k, uint32_t d, uint32_t n,
                                                float *keys_t) {
    const uint32_t whole = n & ~7u;
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *const *row = k->row + half * 8;
        for (uint32_t i = 0; i < whole; i += 8) {
            __m256i v[2][4]; /* [positions 4j to 4j + 3][position, then dimension of a lane] */
            RFI_UNROLL(2)
            for (uint32_t j = 0; j < 2; j++) {
                RFI_UNROLL(4)
                for (uint32_t l = 0; l < 4; l++)
                    v[j][l] = _mm256_castps_si256(rfi_256_load8(type, row[j * 4 + l], d + i));
                rfi_256_transpose(v[j]);
            }
            RFI_UNROLL(4)
            for (uint32_t e = 0; e < 4; e++) {
                float *at = keys_t + (i + e) * 16 + half * 8;
                _mm256_store_si256((__m256i *)(void *)at, _mm256_permute2x128_si256(v[0][e], v[1][e], 0x20));
                _mm256_store_si256((__m256i *)(void *)(at + 64), _mm256_permute2x128_si256(v[0][e], v[1][e], 0x31));
            }
        }
        for (uint32_t i = whole; i < n; i++)
            for (uint32_t l = 0; l < 8; l++) keys_t[i * 16 + half * 8 + l] = rfi_load_type(type, row[l], d + i);
    }
}

RFI_INLINE RFI_256 void rfi_256_dots_q(uint32_t nc, const rfi_dots *a, uint32_t c) {
    __m256 sum[4][2];
    const float *q = a->q + (uint64_t)c * a->head_dim + a->d;
    float *out = a->s + (uint64_t)c * RFI_ATTENTION_BLOCK;
    RFI_UNROLL(4)
    for (uint32_t e = 0; e < nc; e++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++)
            sum[e][h] = a->d ? _mm256_loadu_ps(out + e * RFI_ATTENTION_BLOCK + 8 * h) : _mm256_setzero_ps();
    for (uint32_t i = 0; i < a->n; i++) {
        const __m256 k0 = _mm256_load_ps(a->keys_t + i * 16), k1 = _mm256_load_ps(a->keys_t + i * 16 + 8);
        RFI_UNROLL(4)
        for (uint32_t e = 0; e < nc; e++) {
            const __m256 f = _mm256_set1_ps(q[(uint64_t)e * a->head_dim + i]);
            sum[e][0] = _mm256_fmadd_ps(k0, f, sum[e][0]), sum[e][1] = _mm256_fmadd_ps(k1, f, sum[e][1]);
        }
    }
    RFI_UNROLL(4)
    for (uint32_t e = 0; e < nc; e++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) _mm256_storeu_ps(out + e * RFI_ATTENTION_BLOCK + 8 * h, sum[e][h]);
}

static RFI_256 void rfi_avx2_dots_q(const rfi_dots *a) {
    uint32_t c = 0;
    for (; c + 4 <= a->n_cols; c += 4) rfi_256_dots_q(4, a, c);
    for (; c < a->n_cols; c++) rfi_256_dots_q(1, a, c);
}
#define rfi_avx2_expander rfi_256_expander

enum { RFI_LANES_avx2 = 8, RFI_PANELS_avx2 = 1, RFI_COLS_avx2 = 4, RFI_KEYS_avx2 = 16 };
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3") /* finds vectors in plain loops */
#endif
RFI_ELEMENTWISE(avx2, RFI_256)
#if !defined(__clang__)
#pragma GCC pop_options
#endif
RFI_KERNELS_OF(avx2, RFI_256)
static const rfi_kernels rfi_kernels_avx512 = {.name = "avx512", .arch_text = "avx512-vnni",
                                               RFI_KERNELS(avx512, avx2)};
static const rfi_kernels rfi_kernels_avx2 = {.name = "avx2", .arch_text = "avx2", RFI_KERNELS(avx2, avx2)};
#if RFI_HAS_VNNI
static const rfi_kernels rfi_kernels_avxvnni = {.name = "avxvnni", .arch_text = "avx2 vnni", .extended = 1,
                                                RFI_KERNELS(avx2, avx2)};
#endif
#endif /* __x86_64__ */

#if defined(__aarch64__) && !defined(ROCMFORGE_NO_SIMD)

/* ---- NEON with dot products: 4 rows at once ---- */

#if defined(__clang__)
#define RFI_NEON __attribute__((target("dotprod")))
#else
#define RFI_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

/* acc's four lanes += sums of four products each; the second multiplies by group `lane` of x. Written as assembly since
 * compilers offer the intrinsics only when the whole file is compiled for such a processor. */
RFI_INLINE RFI_NEON int32x4_t rfi_neon_dot(int32x4_t acc, int8x16_t a, int8x16_t b) {
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(a), "w"(b));
    return acc;
}
#define rfi_neon_dot_lane(acc, a, x, lane) \
    __asm__("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(acc) : "w"(a), "w"(x))

/* The values of group g of a unit: the first and the second 16, signed, bias taken off. */
RFI_INLINE RFI_NEON void rfi_neon_values(uint32_t type, const uint8_t *p, uint32_t g, int8x16_t q[2]) {
    const uint8x16_t low = vdupq_n_u8(15);
    uint8x16_t v[2];
    if (rfi_is_expanded(type)) {
        v[0] = vld1q_u8(p + 32 * g), v[1] = vld1q_u8(p + 32 * g + 16);
    } else if (type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K || type == RF_TYPE_Q6_K) {
        const int k6 = type == RF_TYPE_Q6_K, high = k6 ? g >> 1 & 1 : g & 1;
        const uint8_t *nibbles =
            p + (k6 ? (g >> 2) * 64 + (g & 1) * 32 : (type == RF_TYPE_Q4_K ? 16u : 48u) + (g >> 1) * 32);
        const uint8_t *bits = k6 ? p + 128 + (g >> 2) * 32 : p + 16;
        const int8x16_t count = vdupq_n_s8((int8_t)(k6 ? 4 - 2 * (int)(g & 3) : 4 - (int)g));
        const uint8x16_t mask = vdupq_n_u8(k6 ? 0x30 : 0x10);
        RFI_UNROLL(2)
        for (int i = 0; i < 2; i++) {
            const uint8x16_t b = vld1q_u8(nibbles + 16 * i);
            v[i] = high ? vshrq_n_u8(b, 4) : vandq_u8(b, low);
            if (type != RF_TYPE_Q4_K) v[i] = vorrq_u8(v[i], vandq_u8(vshlq_u8(vld1q_u8(bits + 16 * i), count), mask));
        }
    } else {
        const int five = type == RF_TYPE_Q5_0 || type == RF_TYPE_Q5_1;
        const uint8_t *b = p + g * (rfi_unit_bytes(type) / 8) + (rfi_kind_of(type) == RFI_KIND_MIN ? 4 : 2);
        v[0] = vld1q_u8(b + (five ? 4 : 0));
        v[1] = type == RF_TYPE_Q8_0 ? vld1q_u8(b + 16) : vshrq_n_u8(v[0], 4);
        if (type != RF_TYPE_Q8_0) v[0] = vandq_u8(v[0], low);
        for (int i = 0; i < 2 && five; i++) {
            const uint8x16_t qh = vcombine_u8(vdup_n_u8(b[2 * i]), vdup_n_u8(b[2 * i + 1]));
            const uint8x8_t bit = vcreate_u8(0x8040201008040201u);
            v[i] = vorrq_u8(v[i], vandq_u8(vtstq_u8(qh, vcombine_u8(bit, bit)), vdupq_n_u8(16)));
        }
    }
    const int8x16_t bias = vdupq_n_s8((int8_t)rfi_bias_of(type));
    RFI_UNROLL(2)
    for (int i = 0; i < 2; i++)
        q[i] = rfi_bias_of(type) ? vsubq_s8(vreinterpretq_s8_u8(v[i]), bias) : vreinterpretq_s8_u8(v[i]);
}

/* As in rfi_panel, from each row's own. */
RFI_INLINE RFI_NEON void rfi_neon_scales(uint32_t type, const rfi_rows *r, uint64_t offset, float *s, float *m) {
    const rfi_kind kind = rfi_kind_of(type);
    const uint32_t n = 8 * rfi_kind_scales(kind);
    RFI_UNROLL(4)
    for (uint32_t l = 0; l < 4; l++) {
        float row_s[16], row_m[16];
        rfi_scalar_scales(type, r->row[l] + offset, row_s, row_m);
        for (uint32_t i = 0; i < n; i++) s[i * 4 + l] = row_s[i];
        for (uint32_t i = 0; i < n && rfi_kind_min(kind); i++) m[i * 4 + l] = row_m[i];
    }
}

RFI_INLINE RFI_NEON void rfi_neon_vector(uint32_t type, const rfi_rows *r, uint32_t n_groups, const rfi_q8 *x,
                                         float *acc) {
    const uint32_t unit = rfi_unit_bytes(type);
    const rfi_kind kind = rfi_kind_of(type);
    float s[16 * 4], m[16 * 4];
    float32x4_t y = vld1q_f32(acc);
    for (uint32_t g0 = 0; g0 < n_groups; g0 += 8, x += 8) {
        const uint64_t offset = (uint64_t)(g0 / 8) * unit;
        uint64_t ahead = offset + 4 * RFI_AHEAD * unit; /* past the end of a row: the row 4 further on */
        if (ahead >= r->row_bytes) ahead += 3 * r->row_bytes;
        for (int l = 0; l < 4 && r->row_bytes; l++)
            for (uint32_t i = 0; i < unit; i += 64)
                __builtin_prefetch((const char *)((uintptr_t)r->row[l] + ahead + i));
        rfi_neon_scales(type, r, offset, s, m);
        for (uint32_t g = 0; g < 8 && g0 + g < n_groups; g++) {
            const int8x16_t x0 = vld1q_s8(x[g].q), x1 = vld1q_s8(x[g].q + 16);
            int32x4_t a[4], b[4];
            RFI_UNROLL(4)
            for (int l = 0; l < 4; l++) {
                int8x16_t q[2];
                rfi_neon_values(type, r->row[l] + offset, g, q);
                a[l] = rfi_neon_dot(vdupq_n_s32(0), q[0], x0);
                if (rfi_kind_scales(kind) == 2) b[l] = rfi_neon_dot(vdupq_n_s32(0), q[1], x1);
                else a[l] = rfi_neon_dot(a[l], q[1], x1);
            }
            const float32x4_t isum = vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(a[2], a[3])));
            if (rfi_kind_scales(kind) == 2) {
                const float32x4_t half = vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(b[0], b[1]), vpaddq_s32(b[2], b[3])));
                y = vfmaq_f32(y, isum, vmulq_n_f32(vld1q_f32(s + g * 8), x[g].d));
                if (rfi_kind_min(kind)) y = vfmaq_n_f32(y, vld1q_f32(m + g * 8), x[g].s16[0]);
                y = vfmaq_f32(y, half, vmulq_n_f32(vld1q_f32(s + g * 8 + 4), x[g].d));
                if (rfi_kind_min(kind)) y = vfmaq_n_f32(y, vld1q_f32(m + g * 8 + 4), x[g].s16[1]);
            } else {
                y = vfmaq_f32(y, isum, vmulq_n_f32(vld1q_f32(s + g * 4), x[g].d));
                if (rfi_kind_min(kind)) y = vfmaq_n_f32(y, vld1q_f32(m + g * 4), x[g].s);
            }
        }
    }
    vst1q_f32(acc, y);
}

/* mm: rows in pairs, 8 values of each at a time, as the matrix instruction wants them. */
RFI_INLINE RFI_NEON void rfi_neon_unpack(uint32_t type, const rfi_rows *r, uint64_t offset, uint32_t at,
                                         rfi_panel *p) {
    const int mm = r->extended;
    for (uint32_t g = 0; g < 8; g++) {
        int8x16_t q[4][2];
        RFI_UNROLL(4)
        for (int l = 0; l < 4; l++) rfi_neon_values(type, r->row[l] + offset, g, q[l]);
        for (uint32_t i = 0; i < 8 && mm; i++) { /* i: bits are half of the group, half of that, pair of rows */
            const int8x16_t a = q[(i & 1) * 2][i >> 2], b = q[(i & 1) * 2 + 1][i >> 2];
            const int8x16_t pair = i & 2 ? vcombine_s8(vget_high_s8(a), vget_high_s8(b))
                                         : vcombine_s8(vget_low_s8(a), vget_low_s8(b));
            vst1q_s8((int8_t *)p->q + (at + g) * 128 + i * 16, pair);
        }
        for (int h = 0; h < 2 && !mm; h++) { /* storing four vectors interleaved transposes them */
            const uint32x4x4_t v = {{vreinterpretq_u32_s8(q[0][h]), vreinterpretq_u32_s8(q[1][h]),
                                     vreinterpretq_u32_s8(q[2][h]), vreinterpretq_u32_s8(q[3][h])}};
            vst4q_u32((uint32_t *)(void *)(p->q + (at + g) * 128 + (uint32_t)h * 64), v);
        }
    }
    const uint32_t n_scales = rfi_kind_scales(rfi_kind_of(type));
    rfi_neon_scales(type, r, offset, p->s + at * n_scales * 4, p->m + at * n_scales * 4);
}

/* Half a group of 4 rows times the columns' values. */
RFI_INLINE RFI_NEON void rfi_neon_dots(const uint8_t *q, const rfi_q8 *x, uint64_t x_stride, uint32_t n_cols,
                                       uint32_t at, int32x4_t sum[8]) {
    int8x16_t w[4];
    RFI_UNROLL(4)
    for (int u = 0; u < 4; u++) w[u] = vreinterpretq_s8_u8(vld1q_u8(q + 16 * u));
    RFI_UNROLL(8)
    for (uint32_t c = 0; c < n_cols; c++) {
        const int8x16_t v = vld1q_s8(x[c * x_stride].q + at);
        rfi_neon_dot_lane(sum[c], w[0], v, 0);
        rfi_neon_dot_lane(sum[c], w[1], v, 1);
        rfi_neon_dot_lane(sum[c], w[2], v, 2);
        rfi_neon_dot_lane(sum[c], w[3], v, 3);
    }
}

/* acc += the 2x2 products of two rows a and two columns b of 8 values; assembly as above. */
#if defined(__clang__)
#define RFI_I8MM __attribute__((target("dotprod,i8mm")))
#else
#define RFI_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
#define rfi_i8mm_mul(acc, a, b) __asm__("smmla %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(a), "w"(b))

/* As rfi_neon_dots with pairs of columns (one column: twice the same), of rows in pairs. */
RFI_INLINE RFI_I8MM void rfi_i8mm_dots(const uint8_t *q, const rfi_q8 *x, uint64_t x_stride, uint32_t n_cols,
                                       uint32_t at, int32x4_t sum[8]) {
    int8x16_t w[4];
    RFI_UNROLL(4)
    for (int u = 0; u < 4; u++) w[u] = vreinterpretq_s8_u8(vld1q_u8(q + 16 * u));
    RFI_UNROLL(8)
    for (uint32_t c = 0; c < n_cols; c += 2) {
        const uint32_t d = n_cols > 1 ? c + 1 : c;
        const int8x16_t a = vld1q_s8(x[c * x_stride].q + at), b = vld1q_s8(x[d * x_stride].q + at);
        const int8x16_t low = vcombine_s8(vget_low_s8(a), vget_low_s8(b));
        const int8x16_t high = vcombine_s8(vget_high_s8(a), vget_high_s8(b));
        int32x4_t first = vdupq_n_s32(0), second = first; /* rows 0 and 1, 2 and 3 */
        rfi_i8mm_mul(first, w[0], low);
        rfi_i8mm_mul(second, w[1], low);
        rfi_i8mm_mul(first, w[2], high);
        rfi_i8mm_mul(second, w[3], high);
        sum[c] = vaddq_s32(sum[c], vuzp1q_s32(first, second));
        if (d > c) sum[d] = vaddq_s32(sum[d], vuzp2q_s32(first, second));
    }
}

/* A macro, not a function with a flag: clang checks the instructions of branches never taken, too. */
#define RFI_NEON_TILE(isa, TARGET)                                                                                    \
    RFI_INLINE TARGET void rfi_##isa##_columns(rfi_kind kind, uint32_t nc, const rfi_tile *t, uint32_t c0) {          \
        const uint32_t n_halves = rfi_kind_scales(kind);                                                              \
        const rfi_q8 *x = t->x + c0 * t->x_stride;                                                                    \
        float *acc = t->acc + c0 * t->acc_stride;                                                                     \
        float32x4_t y[8];                                                                                             \
        RFI_UNROLL(8)                                                                                                 \
        for (uint32_t c = 0; c < nc; c++) y[c] = vld1q_f32(acc + c * t->acc_stride);                                  \
        for (uint32_t g = 0; g < t->n_groups; g++, x++)                                                               \
            RFI_UNROLL(2)                                                                                             \
            for (uint32_t h = 0; h < n_halves; h++) {                                                                 \
                const uint8_t *q = t->p->q + g * 128 + h * 64;                                                        \
                const float32x4_t s = vld1q_f32(t->p->s + (g * n_halves + h) * 4);                                    \
                const float32x4_t m = vld1q_f32(t->p->m + (g * n_halves + h) * 4);                                    \
                int32x4_t sum[8];                                                                                     \
                RFI_UNROLL(8)                                                                                         \
                for (uint32_t c = 0; c < nc; c++) sum[c] = vdupq_n_s32(0);                                            \
                RFI_UNROLL(2)                                                                                         \
                for (uint32_t i = 0; i < 3 - n_halves; i++)                                                           \
                    rfi_##isa##_dots(q + 64 * i, x, t->x_stride, nc, (h + i) * 16, sum);                              \
                RFI_UNROLL(8)                                                                                         \
                for (uint32_t c = 0; c < nc; c++) {                                                                   \
                    const rfi_q8 *xc = x + c * t->x_stride;                                                           \
                    y[c] = vfmaq_f32(y[c], vcvtq_f32_s32(sum[c]), vmulq_n_f32(s, xc->d));                             \
                    if (rfi_kind_min(kind)) y[c] = vfmaq_n_f32(y[c], m, n_halves == 2 ? xc->s16[h] : xc->s);          \
                }                                                                                                     \
            }                                                                                                         \
        RFI_UNROLL(8)                                                                                                 \
        for (uint32_t c = 0; c < nc; c++) vst1q_f32(acc + c * t->acc_stride, y[c]);                                   \
    }                                                                                                                 \
    /* whole tiles of 8 columns, then of one */                                                                       \
    RFI_INLINE TARGET void rfi_##isa##_tile_of(rfi_kind kind, const rfi_tile *t) {                                    \
        if (t->n_cols == 8) rfi_##isa##_columns(kind, 8, t, 0);                                                       \
        else                                                                                                          \
            for (uint32_t c = 0; c < t->n_cols; c++) rfi_##isa##_columns(kind, 1, t, c);                              \
    }                                                                                                                 \
    static TARGET void rfi_##isa##_tile_all(const rfi_tile *t) {                                                      \
        const rfi_kind kind = rfi_kind_of(t->type);                                                                   \
        if (kind == RFI_KIND_BIAS) rfi_##isa##_tile_of(RFI_KIND_BIAS, t);                                             \
        else if (kind == RFI_KIND_MIN) rfi_##isa##_tile_of(RFI_KIND_MIN, t);                                          \
        else if (kind == RFI_KIND_HALVES) rfi_##isa##_tile_of(RFI_KIND_HALVES, t);                                    \
        else rfi_##isa##_tile_of(RFI_KIND_HALVES_MIN, t);                                                             \
    }
RFI_NEON_TILE(neon, RFI_NEON)
RFI_NEON_TILE(i8mm, RFI_I8MM)
static void rfi_neon_tile(const rfi_tile *t) {
    if (t->extended) rfi_i8mm_tile_all(t);
    else rfi_neon_tile_all(t);
}

static RFI_NEON void rfi_neon_codebook(const int8_t list[16], const uint8_t q[16], int8_t low[16], int8_t high[16]) {
    const int8x16_t values = vld1q_s8(list);
    const uint8x16_t v = vld1q_u8(q);
    vst1q_s8(low, vqtbl1q_s8(values, vandq_u8(v, vdupq_n_u8(15))));
    vst1q_s8(high, vqtbl1q_s8(values, vshrq_n_u8(v, 4)));
}
RFI_EXPANDER(neon, RFI_NEON, rfi_neon_codebook, IQ4_NL, EXPANDED_32)
RFI_EXPANDER(neon, RFI_NEON, rfi_neon_codebook, IQ4_XS, EXPANDED_32)
RFI_EXPANDER(neon, RFI_NEON, rfi_neon_codebook, MXFP4, EXPANDED_32)
RFI_EXPANDER(neon, RFI_NEON, rfi_neon_codebook, NVFP4, EXPANDED_16)

static rfi_expand_fn rfi_neon_expander(uint32_t type) {
    return type == RF_TYPE_IQ4_NL ? rfi_neon_expand_IQ4_NL : type == RF_TYPE_IQ4_XS ? rfi_neon_expand_IQ4_XS
         : type == RF_TYPE_MXFP4 ? rfi_neon_expand_MXFP4 : type == RF_TYPE_NVFP4 ? rfi_neon_expand_NVFP4
         : rfi_expansions[type].expand;
}

RFI_INLINE RFI_NEON float32x4_t rfi_neon_load(uint32_t type, const void *p, uint64_t i) {
    if (type == RF_TYPE_F32) return vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)p + 4 * i));
    const uint16x4_t v = vreinterpret_u16_u8(vld1_u8((const uint8_t *)p + 2 * i));
    if (type == RF_TYPE_F16) return vcvt_f32_f16(vreinterpret_f16_u16(v));
    return vreinterpretq_f32_u32(vshll_n_u16(v, 16));
}

RFI_INLINE RFI_NEON void rfi_neon_float_part(uint32_t type, uint32_t n_cols, uint32_t first, rfi_float_tile *t) {
    const uint32_t whole = t->n & ~7u;
    float32x4_t sum[2][4][2]; /* 8 lanes */
    RFI_UNROLL(8)
    for (uint32_t c = 0; c < n_cols; c++)
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) sum[c][r][0] = sum[c][r][1] = vdupq_n_f32(0);
    for (uint32_t i = 0; i < whole; i += 8)
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            if (n_cols == 1 && t->ahead) __builtin_prefetch((const char *)((uintptr_t)t->row[r] + t->ahead + i * 2));
            RFI_UNROLL(2)
            for (uint32_t h = 0; h < 2; h++) {
                const float32x4_t w = rfi_neon_load(type, t->row[r], i + 4 * h);
                RFI_UNROLL(8)
                for (uint32_t c = 0; c < n_cols; c++)
                    sum[c][r][h] = vfmaq_f32(sum[c][r][h], w, vld1q_f32(t->x + (first + c) * t->x_stride + i + 4 * h));
            }
        }
    RFI_UNROLL(8)
    for (uint32_t c = 0; c < n_cols; c++) {
        const float *x = t->x + (first + c) * t->x_stride;
        float32x4_t v[4];
        RFI_UNROLL(4)
        for (int r = 0; r < 4; r++) v[r] = vaddq_f32(sum[c][r][0], sum[c][r][1]);
        vst1q_f32(t->sum[first + c], vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
        for (uint32_t i = whole; i < t->n; i++)
            RFI_UNROLL(4)
            for (int r = 0; r < 4; r++)
                t->sum[first + c][r] = fmaf(rfi_load_type(type, t->row[r], i), x[i], t->sum[first + c][r]);
    }
}

RFI_INLINE RFI_NEON void rfi_neon_float_tile(uint32_t type, rfi_float_tile *t) {
    for (uint32_t c = 0; c + 2 <= t->n_cols; c += 2) rfi_neon_float_part(type, 2, c, t);
    if (t->n_cols & 1) rfi_neon_float_part(type, 1, t->n_cols - 1, t);
}

RFI_INLINE RFI_NEON void rfi_neon_weigh_part(uint32_t type, uint32_t nc, uint32_t n_vec, const rfi_weigh *a,
                                             uint32_t c0, uint32_t d) {
    const float *p = a->p + c0 * a->p_stride;
    float *out = a->out + c0 * a->out_stride + d;
    float32x4_t sum[2][8];
    RFI_UNROLL(2)
    for (uint32_t c = 0; c < nc; c++)
        RFI_UNROLL(8)
        for (uint32_t i = 0; i < n_vec; i++) sum[c][i] = vld1q_f32(out + c * a->out_stride + 4 * i);
    for (uint64_t pos = 0; pos < a->n_pos; pos++)
        RFI_UNROLL(8)
        for (uint32_t i = 0; i < n_vec; i++) {
            const float32x4_t w = rfi_neon_load(type, a->v, pos * a->head_dim_v + d + 4 * i);
            RFI_UNROLL(2)
            for (uint32_t c = 0; c < nc; c++) sum[c][i] = vfmaq_n_f32(sum[c][i], w, p[c * a->p_stride + pos]);
        }
    RFI_UNROLL(2)
    for (uint32_t c = 0; c < nc; c++)
        RFI_UNROLL(8)
        for (uint32_t i = 0; i < n_vec; i++) vst1q_f32(out + c * a->out_stride + 4 * i, sum[c][i]);
}

RFI_INLINE RFI_NEON void rfi_neon_weigh(uint32_t type, const rfi_weigh *a) {
    for (uint32_t c = 0, nc; c < a->n_cols; c += nc) {
        uint32_t d = 0;
        nc = a->n_cols - c >= 2 ? 2 : 1;
        for (; d + 32 <= a->head_dim_v; d += 32) {
            if (nc == 2) rfi_neon_weigh_part(type, 2, 8, a, c, d);
            else rfi_neon_weigh_part(type, 1, 8, a, c, d);
        }
        for (; d + 4 <= a->head_dim_v; d += 4) {
            if (nc == 2) rfi_neon_weigh_part(type, 2, 1, a, c, d);
            else rfi_neon_weigh_part(type, 1, 1, a, c, d);
        }
        rfi_weigh_rest(type, a, c, nc, d);
    }
}

RFI_INLINE RFI_NEON void rfi_neon_q8(const float *x, rfi_q8 *out) {
    const uint32x4_t no_sign = vdupq_n_u32(0x7fffffff);
    float32x4_t v[8];
    int32x4_t q[8];
    uint32x4_t t = vdupq_n_u32(0);
    RFI_UNROLL(8)
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        t = vmaxq_u32(t, vandq_u32(vreinterpretq_u32_f32(v[i]), no_sign));
    }
    const uint32_t top = vmaxvq_u32(t);
    const float32x4_t id = vdupq_n_f32(rfi_q8_scale(top, out));
    RFI_UNROLL(8)
    for (int i = 0; i < 8; i++) {
        if (top >= 0x7f800000u) v[i] = vdupq_n_f32(0);
        const uint32x4_t y = vreinterpretq_u32_f32(vaddq_f32(vmulq_f32(v[i], id), vdupq_n_f32(RFI_ROUND_MAGIC)));
        q[i] = vreinterpretq_s32_u32(vsubq_u32(y, vdupq_n_u32(RFI_ROUND_BITS)));
    }
    RFI_UNROLL(8)
    for (int i = 0; i < 8; i += 2)
        vst1_s8(out->q + 4 * i, vmovn_s16(vcombine_s16(vmovn_s32(q[i]), vmovn_s32(q[i + 1]))));
    rfi_q8_sums(vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3]))),
                vaddvq_s32(vaddq_s32(vaddq_s32(q[4], q[5]), vaddq_s32(q[6], q[7]))), out);
}

RFI_INLINE RFI_NEON void rfi_neon_f16(uint16_t *dst, const float *src, uint32_t n) {
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float16x4_t h = vcvt_f16_f32(vld1q_f32(src + i));
        memcpy(dst + i, &h, sizeof h);
    }
    rfi_scalar_f16(dst + i, src + i, n - i);
}

/* As rfi_scalar_transpose_keys, 8 positions: keys_t[half][i][4]. */
RFI_INLINE RFI_NEON void rfi_neon_transpose_keys(uint32_t type, const rfi_keys *k, uint32_t d, uint32_t n,
                                                 float *keys_t) {
    const uint32_t whole = n & ~3u;
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *const *row = k->row + half * 4;
        float *to = keys_t + half * 4 * RFI_SCORES_DIMS;
        for (uint32_t i = 0; i < whole; i += 4) {
            const float32x4x4_t v = {{rfi_neon_load(type, row[0], d + i), rfi_neon_load(type, row[1], d + i),
                                      rfi_neon_load(type, row[2], d + i), rfi_neon_load(type, row[3], d + i)}};
            vst4q_f32(to + i * 4, v);
        }
        for (uint32_t i = whole; i < n; i++)
            RFI_UNROLL(4)
            for (uint32_t l = 0; l < 4; l++) to[i * 4 + l] = rfi_load_type(type, row[l], d + i);
    }
}

/* nc columns from c on. */
RFI_INLINE RFI_NEON void rfi_neon_dots_part(uint32_t nc, const rfi_dots *a, uint32_t c) {
    float32x4_t sum[4][2];
    const float *q = a->q + (uint64_t)c * a->head_dim + a->d;
    float *out = a->s + (uint64_t)c * RFI_ATTENTION_BLOCK;
    RFI_UNROLL(4)
    for (uint32_t e = 0; e < nc; e++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++)
            sum[e][h] = a->d ? vld1q_f32(out + e * RFI_ATTENTION_BLOCK + 4 * h) : vdupq_n_f32(0);
    for (uint32_t i = 0; i < a->n; i++) {
        const float32x4_t k0 = vld1q_f32(a->keys_t + i * 4), k1 = vld1q_f32(a->keys_t + (RFI_SCORES_DIMS + i) * 4);
        RFI_UNROLL(4)
        for (uint32_t e = 0; e < nc; e++) {
            sum[e][0] = vfmaq_n_f32(sum[e][0], k0, q[(uint64_t)e * a->head_dim + i]);
            sum[e][1] = vfmaq_n_f32(sum[e][1], k1, q[(uint64_t)e * a->head_dim + i]);
        }
    }
    RFI_UNROLL(4)
    for (uint32_t e = 0; e < nc; e++)
        RFI_UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) vst1q_f32(out + e * RFI_ATTENTION_BLOCK + 4 * h, sum[e][h]);
}

static RFI_NEON void rfi_neon_dots_q(const rfi_dots *a) {
    uint32_t c = 0;
    for (; c + 4 <= a->n_cols; c += 4) rfi_neon_dots_part(4, a, c);
    for (; c < a->n_cols; c++) rfi_neon_dots_part(1, a, c);
}

enum { RFI_LANES_neon = 4, RFI_PANELS_neon = 1, RFI_COLS_neon = 8, RFI_KEYS_neon = 8 };
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3") /* finds vectors in plain loops */
#endif
RFI_ELEMENTWISE(neon, RFI_NEON)
#if !defined(__clang__)
#pragma GCC pop_options
#endif
RFI_KERNELS_OF(neon, RFI_NEON)
static const rfi_kernels rfi_kernels_neon = {.name = "neon", .arch_text = "neon dotprod", RFI_KERNELS(neon, neon)};
/* The matrix instruction serves panels only: one column gains nothing by it. */
static const rfi_kernels rfi_kernels_i8mm = {.name = "i8mm", .arch_text = "neon i8mm", .extended = 1,
                                             RFI_KERNELS(neon, neon)};
#endif /* __aarch64__ */

/* ---- choice ---- */

#if defined(ROCMFORGE_NO_SIMD)
static int rfi_has_isa(const char *isa) {
    RFI_UNUSED(isa);
    return 0;
}
#elif defined(__x86_64__)
/* Whether this machine and its operating system offer an instruction set. */
static int rfi_has_isa(const char *isa) {
    uint32_t a, b, c, d, xcr0, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const uint32_t need1 = 1u << 27 | 1u << 28 | 1u << 12 | 1u << 29; /* OSXSAVE, AVX, FMA, F16C */
    if ((c & need1) != need1) return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(unused) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const int avx2 = (xcr0 & 0x06) == 0x06 && (b & 1u << 5);
    if (!strcmp(isa, "avx2")) return avx2;
#if !defined(RFI_VNNI_EVEX)
    if (!strcmp(isa, "avxvnni")) return avx2 && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
#endif
    const uint32_t need7 = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* AVX2, AVX512 F, DQ, BW, VL */
    return (xcr0 & 0xe6) == 0xe6 && (b & need7) == need7 && (c & 1u << 11); /* VNNI */
}
#else
static int rfi_has_isa(const char *isa) {
    if (!strcmp(isa, "i8mm") && !(getauxval(AT_HWCAP2) & 1u << 13)) return 0; /* HWCAP2_I8MM */
    return (getauxval(AT_HWCAP) & 1u << 20) != 0;                             /* HWCAP_ASIMDDP */
}
#endif

/* The kernels of an instruction set by name, NULL = the best; NULL if this machine lacks it. Threads any. */
static const rfi_kernels *rfi_kernels_find(const char *isa) {
#if defined(ROCMFORGE_NO_SIMD)
    static const rfi_kernels *const tables[] = {&rfi_kernels_scalar};
#elif defined(__x86_64__)
    static const rfi_kernels *const tables[] = {&rfi_kernels_avx512,
#if RFI_HAS_VNNI
                                                &rfi_kernels_avxvnni,
#endif
                                                &rfi_kernels_avx2, &rfi_kernels_scalar};
#else
    static const rfi_kernels *const tables[] = {&rfi_kernels_i8mm, &rfi_kernels_neon, &rfi_kernels_scalar};
#endif
    for (size_t i = 0; i < RFI_COUNT(tables); i++) {
        if (isa && strcmp(isa, tables[i]->name)) continue;
        if (tables[i] == &rfi_kernels_scalar || rfi_has_isa(tables[i]->name)) return tables[i];
    }
    return NULL;
}

static int rfi_matmul_has(const rfi_kernels *k, uint32_t type) {
    RFI_UNUSED(k);
    return type < RF_TYPE_COUNT && RF_TYPE_IS_BUILT(type);
}

/* ---- experts ---- */

/* Whether selection score a ranks before b; nan ranks last. */
static int rfi_route_better(float a, float b) { return a > b || (a == a && b != b); }

/* The index of the best score that is not taken, the first of equals; n if all are taken. */
static uint32_t rfi_route_best(const float *score, const uint8_t *taken, uint32_t n) {
    uint32_t best = n;
    for (uint32_t i = 0; i < n; i++)
        if (!taken[i] && (best == n || rfi_route_better(score[i], score[best]))) best = i;
    return best;
}

/* Group-limited routing: keeps the groups with the largest sums of their two best scores, marks all other experts as
 * taken. */
static void rfi_route_groups(const rf_op *op, const float *score, uint8_t *taken) {
    const uint32_t size = op->route.n_experts / op->route.n_groups;
    float sum[RF_MAX_EXPERTS];
    uint8_t kept[RF_MAX_EXPERTS] = {0};
    for (uint32_t g = 0; g < op->route.n_groups; g++) {
        const float *s = score + g * size;
        uint8_t *t = taken + g * size;
        const uint32_t first = rfi_route_best(s, t, size);
        t[first] = 1;
        const uint32_t second = rfi_route_best(s, t, size);
        t[first] = 0;
        sum[g] = second < size ? s[first] + s[second] : s[first];
    }
    for (uint32_t i = 0; i < op->route.n_groups_used; i++) kept[rfi_route_best(sum, kept, op->route.n_groups)] = 1;
    for (uint32_t i = 0; i < op->route.n_experts; i++) taken[i] = !kept[i / size];
}

/* p = softmax(x), sums in order */
static void rfi_route_softmax(const float *x, uint32_t n, float *p) {
    float top = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    for (uint32_t i = 0; i < n; i++) sum += p[i] = rfi_exp(x[i] - top);
    for (uint32_t i = 0; i < n; i++) p[i] /= sum;
}

/* One row of ROUTE. bias may be NULL. */
static void rfi_route_row(const rf_op *op, const float *logits, const float *bias, int32_t *ids, float *weights) {
    const uint32_t n = op->route.n_experts, n_used = op->route.n_used;
    float p[RF_MAX_EXPERTS], score[RF_MAX_EXPERTS], sum = 0;
    uint8_t taken[RF_MAX_EXPERTS] = {0};
    if (op->flags & RF_OP_SIGMOID)
        for (uint32_t i = 0; i < n; i++) p[i] = 1.0f / (1.0f + rfi_exp(-logits[i]));
    else if (op->flags & RF_OP_CHOSEN) memcpy(p, logits, n * sizeof *p);
    else rfi_route_softmax(logits, n, p);
    for (uint32_t i = 0; i < n; i++) score[i] = bias ? p[i] + bias[i] : p[i];
    if (op->route.n_groups > 1) rfi_route_groups(op, score, taken);
    for (uint32_t k = 0; k < n_used; k++) {
        const uint32_t id = rfi_route_best(score, taken, n);
        taken[id] = 1;
        ids[k] = (int32_t)id;
        weights[k] = p[id];
    }
    if (op->flags & RF_OP_CHOSEN) rfi_route_softmax(weights, n_used, weights);
    for (uint32_t k = 0; k < n_used; k++) sum += weights[k];
    if (!(sum > 0x1p-14f)) sum = 0x1p-14f;
    for (uint32_t k = 0; k < n_used; k++) {
        if (op->flags & RF_OP_NORMALIZE) weights[k] /= sum;
        if (op->route.scale != 0) weights[k] *= op->route.scale;
    }
}

/* One row of MIX. */
static void rfi_mix_row(const rf_op *op, const float *in, const float *weights, float *out) {
    const int sigmoid = (op->flags & RF_OP_SIGMOID) != 0;
    const float scale = op->mix.scale != 0 ? op->mix.scale : 1;
    float sum[256];
    for (uint32_t at = 0; at < op->mix.n; at += RFI_COUNT(sum)) {
        const uint32_t n = (uint32_t)rfi_min_u64(RFI_COUNT(sum), op->mix.n - at);
        memset(sum, 0, sizeof sum);
        for (uint32_t k = 0; k < op->mix.n_used; k++) {
            const float weight = !weights ? 1 : sigmoid ? 1 / (1 + expf(-weights[k])) : weights[k];
            for (uint32_t i = 0; i < n; i++) sum[i] += weight * in[(uint64_t)k * op->mix.n + at + i];
        }
        for (uint32_t i = 0; i < n; i++)
            out[at + i] = (op->flags & RF_OP_ACCUMULATE ? out[at + i] : 0.0f) + scale * sum[i];
    }
}

/* ---- matmul of any type ---- */

/* y[j * y_stride + i] = W[i] . x[j] for i < n_rows, j < n_cols; of a type that is built. Stack 40 KiB. */
static void rfi_matmul_run(const rfi_kernels *k, uint32_t type, const rfi_matmul *m) {
    if (type == RF_TYPE_F32) rfi_matmul_float(k->float_tile[type], 4, m);
    else if (type == RF_TYPE_F16 || type == RF_TYPE_BF16) rfi_matmul_float(k->float_tile[type], 2, m);
    else rfi_matmul_quant(k, type, m);
}

#if !defined(__clang__)
#pragma GCC pop_options
#else
#pragma STDC FP_CONTRACT DEFAULT
#endif

/* ==== 10b CPU device ======================================================================================= >>cpu
 * The device table of section 2 over the kernels above, and the reference for other devices. Weights are used where
 * the file is mapped. An op is divided into chunks whose results do not depend on which thread computes them. There are
 * no queues: every call has finished when it returns. */

#define RFI_CPU_COLS   128u /* columns (tokens) and                    */
#define RFI_CPU_ROWS   128u /* rows of a matmul tile                   */
#define RFI_CPU_UNIT   16u  /* rows that kernels like to get together  */
#define RFI_CPU_PARTS  3u   /* matrices of a matmul job: q, k, v       */

typedef struct rfi_cpu {
    rf_allocator alloc;
    const rfi_kernels *kernels;
    rfi_pool pool;
} rfi_cpu;

typedef struct rfi_cpu_table {
    rfi_cpu *dev;
    const rf_plan *plan;
    const void **weights; /* [n_weights] first byte, NULL = empty */
} rfi_cpu_table;

/* How an op is run, found out once: neighbours are joined where that saves a pass or a meeting of the threads. */
typedef struct rfi_cpu_how {
    uint8_t n_parts;       /* MATMUL: this many ops multiply one input in one job                   */
    uint8_t then_glu;      /* MATMUL: and the GLU behind them takes each tile while it is warm      */
    uint8_t has_acts;      /* MATMUL: the quantized input is there already                          */
    uint8_t then_quantize; /* RMS_NORM, GLU: quantize each row for the matmul behind                */
    uint8_t n_along;       /* ops behind this one that are done along with it                       */
} rfi_cpu_how;

/* The pairs of a row and an expert that a ROUTE made, row * n_used + choice, those of one expert side by side and in
 * order: its weights are read once for all of them. */
typedef struct rfi_cpu_pairs {
    uint32_t route;   /* buffer they were sorted from; RF_NONE = nothing */
    uint32_t n_active;
    uint32_t *sorted; /* [n_batch * most n_used]                         */
    uint32_t *first;  /* [most experts + 1] place of an expert's first   */
    uint32_t *active; /* [most experts] those that have some             */
} rfi_cpu_pairs;

typedef struct rfi_cpu_plan {
    rfi_cpu *dev;
    rf_plan_bind bind;
    const rf_plan *plan;
    uint32_t *segments; /* [n_segments + 1] first op of each                                   */
    uint32_t n_segments;
    rfi_cpu_how *how;   /* [n_ops]                                                             */
    rfi_q8 *acts;       /* quantized input of a matmul, [n_batch, groups of the widest n_in]   */
    float *scratch;     /* [n_threads, scratch_stride]: scores of attention, or a matmul tile  */
    uint64_t cells_at;  /* in a thread's scratch: rfi_attention.cells                          */
    uint64_t scratch_stride;
    float *vector;                   /* [RFI_CPU_PARTS, vector_stride] a norm's weights or biases as float32 */
    uint64_t vector_stride;
    float *cos_sin;                  /* [n_batch, widest n_rot / 2, 2]                                      */
    const rf_op *rope;               /* of which cos_sin holds the values of this step; NULL = nothing      */
    uint32_t *firsts;   /* [n_firsts] first row of each sequence in the step; NULL: nothing is recurrent      */
    uint32_t n_firsts;
    rfi_cpu_pairs pairs;
    float *gathered;    /* inputs of experts with float weights, in the order of pairs */
    float *times_us;                 /* [n_ops]; 0 for those done along with another */
    uint32_t timing;
} rfi_cpu_plan;

/* A matrix of a matmul job. */
typedef struct rfi_cpu_part {
    const rf_op *op;
    const uint8_t *w; /* first row used */
    uint32_t w_type;
    uint64_t w_row_bytes;
    const float *bias; /* or NULL */
    float factor;
    float *out;
    uint64_t out_width;
} rfi_cpu_part;

/* Rows of all parts in units, cut into chunks: n_big chunks of `big` units, then small ones, so that the threads finish
 * together. */
typedef struct rfi_cpu_cut {
    uint32_t n_units, n_big, big, small;
} rfi_cpu_cut;

/* One op in progress: what a chunk needs. */
typedef struct rfi_cpu_op {
    rfi_cpu_plan *p;
    const rf_op *op;
    const rfi_cpu_how *how;
    const rf_step *step;
    const rfi_kernels *k;
    const float *in, *in2, *in3;
    float *out;
    uint64_t in_width, in2_width, in3_width, out_width; /* floats from row to row */
    uint32_t n_rows;
    const uint8_t *w;        /* EMBED                       */
    uint32_t w_type;
    uint64_t w_row_bytes;
    const float *vector;  /* norm weights, freqs; or NULL */
    const float *vector2; /* a norm's biases, or NULL     */
    rfi_acts acts;
    rfi_cpu_part parts[RFI_CPU_PARTS]; /* MATMUL */
    rfi_cpu_cut cut;
} rfi_cpu_op;

/* Float weights take float inputs, all others inputs of int8. */
static int rfi_type_takes_int8(uint32_t type) {
    return type != RF_TYPE_F32 && type != RF_TYPE_F16 && type != RF_TYPE_BF16;
}

static rfi_cpu *rfi_cpu_of(rf_dev *d) { return (rfi_cpu *)(void *)d; }
static rfi_cpu_table *rfi_cpu_table_of(rf_table *t) { return (rfi_cpu_table *)(void *)t; }
static rfi_cpu_plan *rfi_cpu_plan_of(rf_prepared *p) { return (rfi_cpu_plan *)(void *)p; }

/* ---- ops ---- */

static void rfi_cpu_embed(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_step_row *row = &o->step->rows[chunk];
    float *out = o->out + chunk * o->out_width;
    RFI_UNUSED(thread);
    if (row->token < 0)
        memcpy(out, o->step->embeddings + (uint64_t)chunk * o->op->embed.n, o->op->embed.n * sizeof *out);
    else rfi_dequantize_row(o->w_type, o->w + (uint64_t)row->token * o->w_row_bytes, o->op->embed.n, out);
    if (row->token >= 0 && o->op->embed.scale != 0) o->k->scale(out, o->op->embed.n, o->op->embed.scale);
}

/* out (+)= scale * W[pos]; rows are dequantized into the thread's scratch */
static void rfi_cpu_embed_position(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    float *out = o->out + chunk * o->out_width, *y = o->p->scratch + thread * o->p->scratch_stride;
    rfi_dequantize_row(o->w_type, o->w + (uint64_t)(uint32_t)o->step->rows[chunk].pos * o->w_row_bytes, op->embed.n, y);
    if (op->embed.scale != 0) o->k->scale(y, op->embed.n, op->embed.scale);
    if (op->flags & RF_OP_ACCUMULATE) o->k->add(out, y, op->embed.n);
    else memcpy(out, y, op->embed.n * sizeof *out);
}

/* Quantize row `row` of n values for the next matmul. */
static void rfi_cpu_quantize_row(const rfi_cpu_op *o, uint32_t row, const float *x, uint32_t n) {
    o->k->quantize(x, n, o->p->acts + row * rfi_q8_groups(n));
}

static void rfi_cpu_norm(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_norm_params *par = &op->norm;
    rfi_norm norm = {.w = o->vector,
                     .b = o->vector2,
                     .n = par->n,
                     .eps = par->eps,
                     .center = (op->flags & RF_OP_CENTER) != 0,
                     .accumulate = (op->flags & RF_OP_ACCUMULATE) != 0};
    RFI_UNUSED(thread);
    for (uint32_t h = 0; h < par->n_groups; h++) {
        if (op->flags & RF_OP_EACH_HEAD) norm.w = o->vector + (uint64_t)h * par->n;
        o->k->norm(o->out + chunk * o->out_width + (uint64_t)h * par->n,
                   o->in + chunk * o->in_width + (uint64_t)h * par->n, &norm);
    }
    if (o->how->then_quantize) rfi_cpu_quantize_row(o, chunk, o->out + chunk * o->out_width, par->n);
}

static void rfi_cpu_quantize(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    RFI_UNUSED(thread);
    rfi_cpu_quantize_row(o, chunk, o->in + chunk * o->in_width, o->op->matmul.n_in);
}

/* One tile of a matmul: rows [row0, + n_rows) of its weight times columns [col0, + n_cols). */
static void rfi_cpu_tile(const rfi_cpu_op *o, const rfi_cpu_part *part, uint32_t row0, uint32_t n_rows, uint32_t col0,
                         uint32_t n_cols, uint32_t thread) {
    const int accumulate = (part->op->flags & RF_OP_ACCUMULATE) != 0;
    float *out = part->out + col0 * part->out_width + row0;
    float *y = accumulate ? o->p->scratch + thread * o->p->scratch_stride : out;
    const uint64_t y_stride = accumulate ? n_rows : part->out_width;
    rfi_acts x = o->acts;
    x.f += col0 * x.f_stride;
    x.q += col0 * x.q_stride;
    const uint8_t *w = part->w + row0 * part->w_row_bytes;
    const rfi_matmul m = {w, part->w_row_bytes, n_rows, part->op->matmul.n_in, &x, n_cols, y, y_stride};
    rfi_matmul_run(o->k, part->w_type, &m);
    for (uint32_t j = 0; j < n_cols; j++) {
        float *column = y + j * y_stride;
        if (part->factor != 1) o->k->scale(column, n_rows, part->factor);
        if (part->bias) o->k->add(column, part->bias + row0, n_rows);
        if (part->op->matmul.scale != 0) o->k->scale(column, n_rows, part->op->matmul.scale);
        if (part->op->matmul.softcap != 0) o->k->softcap(column, n_rows, part->op->matmul.softcap);
        if (accumulate) o->k->add(out + j * part->out_width, column, n_rows);
    }
}

/* Units [u, u_end) of matmul `first` (with a fused GLU, of the next one, too) times all columns, in tiles that fit the
 * L2 cache. */
static void rfi_cpu_units(const rfi_cpu_op *o, uint32_t first, uint32_t u, uint32_t u_end, uint32_t thread) {
    const rfi_cpu_part *part = &o->parts[first], *up = part + 1;
    const uint32_t row0 = u * RFI_CPU_UNIT;
    const uint32_t n_rows = (uint32_t)rfi_min_u64(part->op->matmul.n_out, (uint64_t)u_end * RFI_CPU_UNIT) - row0;
    for (uint32_t col0 = 0; col0 < o->n_rows; col0 += RFI_CPU_COLS) {
        const uint32_t n_cols = (uint32_t)rfi_min_u64(RFI_CPU_COLS, o->n_rows - col0);
        rfi_cpu_tile(o, part, row0, n_rows, col0, n_cols, thread);
        if (!o->how->then_glu) continue;
        rfi_cpu_tile(o, up, row0, n_rows, col0, n_cols, thread);
        for (uint32_t j = col0; j < col0 + n_cols; j++)
            o->k->glu(o->out + j * o->out_width + row0, part->out + j * part->out_width + row0,
                      up->out + j * up->out_width + row0, n_rows, part->op[2].glu.activation);
    }
}

static uint32_t rfi_cpu_part_units(const rfi_cpu_part *part) {
    return (part->op->matmul.n_out + RFI_CPU_UNIT - 1) / RFI_CPU_UNIT;
}

static void rfi_cpu_matmul(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rfi_cpu_cut *c = &o->cut;
    uint32_t u = chunk < c->n_big ? chunk * c->big : c->n_big * c->big + (chunk - c->n_big) * c->small;
    uint32_t u_end = (uint32_t)rfi_min_u64(c->n_units, (uint64_t)u + (chunk < c->n_big ? c->big : c->small));
    for (uint32_t i = 0; u < u_end; i++) {
        const uint32_t n = o->how->then_glu ? c->n_units : rfi_cpu_part_units(&o->parts[i]);
        if (u < n) rfi_cpu_units(o, i, u, (uint32_t)rfi_min_u64(n, u_end), thread);
        u = u > n ? u - n : 0;
        u_end = u_end > n ? u_end - n : 0;
    }
}

/* Load balancing: large chunks for three quarters of the work, then small ones. With many columns the panel kernels
 * need 32 rows. */
static rfi_cpu_cut rfi_cpu_cut_units(uint32_t n_units, uint32_t n_threads, uint32_t n_cols) {
    rfi_cpu_cut c = {.n_units = n_units, .small = n_cols > 1 ? 2 : 1};
    const uint64_t share = n_units / ((uint64_t)n_threads * 4) / c.small * c.small;
    c.big = (uint32_t)rfi_max_u64(c.small, rfi_min_u64(RFI_CPU_ROWS / RFI_CPU_UNIT, share));
    c.n_big = (n_units - n_units / 4) / c.big;
    return c;
}

/* cos and sin of every row's position, once per step */
static void rfi_cpu_cos_sin(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_rope_params *par = &o->op->rope;
    uint32_t n = par->n_rot / 2;
    float *out = o->p->cos_sin + (uint64_t)chunk * n * 2;
    const float *table = o->p->plan->tables + par->table;
    RFI_UNUSED(thread);
    for (uint32_t i = 0; i < n; i++) {
        double angle =
            (double)o->step->rows[chunk].pos * (double)table[i] / (o->vector ? (double)o->vector[i] : 1.0);
        out[2 * i] = (float)cos(angle) * par->scale;
        out[2 * i + 1] = (float)sin(angle) * par->scale;
    }
}

static void rfi_cpu_rope(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_rope_params *par = &op->rope;
    RFI_UNUSED(thread);
    const uint32_t first = op->flags & RF_OP_LAST ? par->head_dim - par->n_rot : 0;
    for (uint32_t h = 0; h < par->n_heads; h++)
        o->k->rope(o->out + chunk * o->out_width + (uint64_t)h * par->head_dim + first,
                   o->p->cos_sin + (uint64_t)chunk * par->n_rot, par->n_rot, (op->flags & RF_OP_NEOX) != 0);
}

/* First byte of the keys (or values) of one KV head of one sequence. */
static uint8_t *rfi_cpu_state(const rfi_cpu_plan *p, uint32_t state, int values, int32_t seq, uint32_t head) {
    const rf_plan_state *s = &p->plan->states[state];
    uint64_t n_cells = rf_state_cells(&p->bind, state), row = rf_cache_row_bytes(p->bind.cache_type, s->head_dim);
    uint64_t cells = ((uint64_t)(uint32_t)seq * s->n_kv_heads + head) * n_cells;
    uint64_t k_bytes = (uint64_t)p->bind.n_seq * s->n_kv_heads * n_cells * row;
    uint8_t *base = (uint8_t *)p->bind.state.base + p->bind.state_offset[state];
    if (!values) return base + cells * row;
    return base + ((k_bytes + RF_STATE_ALIGN - 1) & ~(uint64_t)(RF_STATE_ALIGN - 1)) +
           cells * rf_cache_row_bytes(p->bind.cache_type, s->head_dim_v);
}

static void rfi_cpu_kv_store(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_kv_store_params *par = &op->kv_store;
    const rf_step_row *row = &o->step->rows[chunk];
    const uint32_t pos = (uint32_t)row->pos % rf_state_cells(&o->p->bind, op->state);
    const int latent = (op->flags & RF_OP_MLA) != 0;
    RFI_UNUSED(thread);
    for (int second = 0; second < 2; second++) { /* keys, then values; of MLA the two parts of the key */
        const uint32_t first_dim = latent ? par->head_dim_v : par->head_dim,
                       dim = !second ? first_dim : latent ? par->head_dim - first_dim : par->head_dim_v,
                       cell = latent ? par->head_dim : dim;
        const float *src = second ? o->in2 + chunk * o->in2_width : o->in + chunk * o->in_width;
        for (uint32_t h = 0; h < par->n_kv_heads; h++) {
            uint8_t *head = rfi_cpu_state(o->p, op->state, second && !latent, row->seq, h);
            const uint32_t type = o->p->bind.cache_type, at = second && latent ? first_dim : 0;
            uint8_t *to = head + pos * rf_cache_row_bytes(type, cell);
            if (type == RF_CACHE_F32) memcpy((float *)(void *)to + at, src + (uint64_t)h * dim, dim * sizeof(float));
            else if (type == RF_CACHE_F16)
                o->k->f32_to_f16((uint16_t *)(void *)to + at, src + (uint64_t)h * dim, dim);
            else
                o->k->f32_to_q8((int8_t *)to + at, (uint16_t *)(void *)(to + cell) + at / 32, src + (uint64_t)h * dim,
                                dim);
        }
    }
}

/* Query heads per chunk of attention: all of a KV head (GQA), but at most 16, so that threads share the rest. */
static uint32_t rfi_cpu_query_heads(const rf_op *op) {
    return (uint32_t)rfi_min_u64(op->attention.n_heads / op->attention.n_kv_heads, 16);
}

/* A chunk is one KV head with some of its query heads, for some rows; consecutive rows of a sequence share one pass
 * over keys and values. */
static void rfi_cpu_attention(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_attention_params *par = &op->attention;
    const uint32_t group = par->n_heads / par->n_kv_heads, most = rfi_cpu_query_heads(op),
                   parts = (group + most - 1) / most, n_tokens = rfi_attention_tokens(most),
                   piece = chunk % (par->n_kv_heads * parts), head = piece / parts, first = piece % parts * most,
                   q_head = head * group + first;
    const int latent = (op->flags & RF_OP_MLA) != 0;
    uint32_t r = chunk / (par->n_kv_heads * parts) * n_tokens;
    uint32_t end = (uint32_t)rfi_min_u64(o->n_rows, r + n_tokens);
    for (uint32_t n = 1; r < end; r += n, n = 1) {
        const rf_step_row *row = &o->step->rows[r];
        while (r + n < end && row[n].seq == row->seq && row[n].pos == row->pos + (int32_t)n) n++;
        rfi_attention a = {
            .q = o->in + r * o->in_width + (uint64_t)q_head * par->head_dim,
            .q_stride = o->in_width,
            .k = rfi_cpu_state(o->p, op->state, 0, row->seq, head),
            .v = rfi_cpu_state(o->p, op->state, !latent, row->seq, head),
            .n_cells = rf_state_cells(&o->p->bind, op->state),
            .cache_type = o->p->bind.cache_type,
            .n_tokens = n,
            .n_pos = (uint32_t)row->pos + 1,
            .n_group = (uint32_t)rfi_min_u64(most, group - first),
            .head_dim = par->head_dim,
            .head_dim_v = latent ? par->head_dim : par->head_dim_v,
            .v_rest = latent ? par->head_dim - par->head_dim_v : 0,
            .sinks = o->vector ? o->vector + q_head : NULL,
            .slopes = par->slopes != RF_NONE ? o->p->plan->tables + par->slopes + q_head : NULL,
            .window = par->window,
            .scale = par->scale,
            .softcap = par->softcap,
            .temperature = par->temperature,
            .temperature_length = par->temperature_length,
            .scratch = o->p->scratch + thread * o->p->scratch_stride,
            .cells = o->p->scratch + thread * o->p->scratch_stride + o->p->cells_at,
            .out = o->out + r * o->out_width + (uint64_t)q_head * par->head_dim_v,
            .out_stride = o->out_width,
        };
        rfi_attention_run(o->k, &a);
    }
}

static float rfi_clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

/* An activation that few models have. */
static float rfi_activate_rare(uint32_t activation, float x, float limit) {
    const float positive = x > 0 ? x : 0, least = x < limit ? x : limit;
    switch (activation) {
    case RF_ACT_CLAMP: return rfi_clamp(x, limit);
    case RF_ACT_RELU: return positive;
    case RF_ACT_RELU2: return positive * positive;
    case RF_ACT_SOFTPLUS: return positive + log1pf(expf(-fabsf(x)));
    case RF_ACT_SILU_MIN: return least / (1 + expf(-least));
    default: return fminf(x / (1 + expf(-x)), limit);
    }
}
static void rfi_glu_row(const rf_op *op, const float *in, const float *in2, float *out) {
    const float limit = op->glu.limit;
    for (uint32_t i = 0; i < op->glu.n; i++) {
        const float b = !in2 ? 1 : op->glu.activation >= RF_ACT_SILU_MIN ? rfi_clamp(in2[i], limit) : in2[i];
        out[i] = rfi_activate_rare(op->glu.activation, in[i], limit) * b;
    }
}

static void rfi_cpu_glu(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    RFI_UNUSED(thread);
    float *out = o->out + chunk * o->out_width;
    const float *in = o->in + chunk * o->in_width,
                *in2 = o->in2 ? o->in2 + chunk * o->in2_width + o->op->glu.in2_at : NULL;
    const uint32_t n = o->op->glu.n, repeat = o->op->glu.repeat;
    const float *each = repeat > 1 ? NULL : in2;
    if (o->op->glu.activation >= RF_ACT_CLAMP && o->op->glu.activation != RF_ACT_SIGMOID)
        rfi_glu_row(o->op, in, each, out);
    else o->k->glu(out, in, each, n, o->op->glu.activation);
    for (uint32_t at = 0; in2 && !each && at < n; at += repeat)
        o->k->scale(out + at, (uint32_t)rfi_min_u64(repeat, n - at), in2[at / repeat]);
    if (o->vector) o->k->scale(out, n, o->vector[0]);
    if (o->how->then_quantize) rfi_cpu_quantize_row(o, chunk, out, o->op->glu.n);
}

static void rfi_cpu_gather(rfi_cpu_op *o) {
    for (uint32_t i = 0; i < o->n_rows; i++)
        memcpy(o->out + i * o->out_width, o->in + o->step->logit_rows[i] * o->in_width,
               o->op->gather.n * sizeof(float));
}

/* NaN never compares greater, and -infinity is no result */
static void rfi_cpu_argmax(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const float *in = o->in + chunk * o->in_width;
    float largest = -INFINITY;
    int32_t id = -1;
    RFI_UNUSED(thread);
    for (uint32_t i = 0; i < o->op->argmax.n; i++)
        if (in[i] > largest) largest = in[i], id = (int32_t)i;
    memcpy(o->out + chunk * o->out_width, &id, sizeof id);
}

/* ---- recurrent layers ---- */

#define RFI_CONV_BLOCK 256u /* channels of a chunk, so that inputs, state and weights fit the L1 cache */

static float *rfi_cpu_slot(const rfi_cpu_op *o, uint32_t slot) {
    uint8_t *base = (uint8_t *)o->p->bind.state.base + o->p->bind.state_offset[o->op->state];
    return (float *)(void *)base + (uint64_t)(slot - 1) * o->p->plan->states[o->op->state].width;
}

/* A chunk is a block of channels, for all rows of one sequence. */
static void rfi_cpu_conv(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_conv_params *par = &o->op->conv;
    const uint32_t n_taps = par->n_taps, n_out = par->n, n_blocks = (n_out + RFI_CONV_BLOCK - 1) / RFI_CONV_BLOCK,
                   first = o->p->firsts[chunk / n_blocks], c0 = chunk % n_blocks * RFI_CONV_BLOCK,
                   n = (uint32_t)rfi_min_u64(RFI_CONV_BLOCK, n_out - c0);
    const rf_step_row *rows = o->step->rows;
    float *w = o->p->scratch + thread * o->p->scratch_stride, *x = w + n_taps * n;
    for (uint32_t j = 0; j < n_taps; j++)
        for (uint32_t c = 0; c < n; c++) w[j * n + c] = o->vector[(uint64_t)(c0 + c) * n_taps + j];
    for (uint32_t j = 0; j + 1 < n_taps; j++)
        if (rows[first].from) memcpy(x + j * n, rfi_cpu_slot(o, rows[first].from) + j * n_out + c0, n * sizeof *x);
        else memset(x + j * n, 0, n * sizeof *x);
    for (uint32_t r = first; r < o->n_rows; r++) {
        if (rows[r].seq != rows[first].seq) continue;
        float *out = o->out + r * o->out_width + c0;
        memcpy(x + (n_taps - 1) * n, o->in + r * o->in_width + c0, n * sizeof *x);
        o->k->conv(out, x, w, n_taps, n);
        if (o->vector2) o->k->add(out, o->vector2 + c0, n);
        if (par->activation != RF_ACT_NONE) o->k->glu(out, out, NULL, n, par->activation);
        memmove(x, x + n, (n_taps - 1) * n * sizeof *x);
        for (uint32_t j = 0; rows[r].to && j + 1 < n_taps; j++)
            memcpy(rfi_cpu_slot(o, rows[r].to) + j * n_out + c0, x + j * n, n * sizeof *x);
    }
}

/* log(1 + e^x) */
static float rfi_softplus(float x) { return x > 20.0f ? x : log1pf(rfi_exp(x)); }

static uint64_t rfi_delta_scratch(const rf_op *op) { return (op->delta.head_dim + 1ull) * op->delta.head_dim_v; }

/* A chunk is a head, for all rows of one sequence. */
static void rfi_cpu_delta(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_delta_params *par = &op->delta;
    const uint32_t h = chunk % par->n_heads, first = o->p->firsts[chunk / par->n_heads],
                   k_head = op->flags & RF_OP_CYCLIC ? h % par->n_k_heads : h / (par->n_heads / par->n_k_heads);
    const uint64_t n_keys = (uint64_t)par->n_k_heads * par->head_dim, n_s = (uint64_t)par->head_dim * par->head_dim_v;
    const rf_step_row *rows = o->step->rows;
    rfi_delta a = {.scale = par->scale, .eps = par->eps, .head_dim = par->head_dim, .head_dim_v = par->head_dim_v};
    a.s = o->p->scratch + thread * o->p->scratch_stride;
    a.d = a.s + n_s;
    if (rows[first].from) memcpy(a.s, rfi_cpu_slot(o, rows[first].from) + h * n_s, n_s * sizeof *a.s);
    else memset(a.s, 0, n_s * sizeof *a.s);
    for (uint32_t r = first; r < o->n_rows; r++) {
        if (rows[r].seq != rows[first].seq) continue;
        a.q = o->in + r * o->in_width + (uint64_t)k_head * par->head_dim;
        a.k = a.q + n_keys;
        a.v = o->in + r * o->in_width + 2 * n_keys + (uint64_t)h * par->head_dim_v;
        a.beta = 1.0f / (1.0f + rfi_exp(-o->in2[r * o->in2_width + h]));
        a.decay = rfi_exp(rfi_softplus(o->in3[r * o->in3_width + h] + o->vector2[h]) * o->vector[h]);
        a.out = o->out + r * o->out_width + (uint64_t)h * par->head_dim_v;
        o->k->delta(&a);
        if (rows[r].to) memcpy(rfi_cpu_slot(o, rows[r].to) + h * n_s, a.s, n_s * sizeof *a.s);
    }
}

static void rfi_cpu_slice(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_slice_params *par = &op->slice;
    RFI_UNUSED(thread);
    for (uint32_t h = 0; h < par->n_heads; h++)
        memcpy(o->out + chunk * o->out_width + par->out_at + (uint64_t)h * par->n,
               o->in + chunk * o->in_width + (uint64_t)h * par->head_dim + par->at, par->n * sizeof *o->out);
}

/* The first row of each sequence in a step. */
static void rfi_cpu_find_firsts(rfi_cpu_plan *p, const rf_step *step) {
    p->n_firsts = 0;
    for (uint32_t r = 0; p->firsts && r < step->n_rows; r++) {
        uint32_t i = 0;
        while (i < p->n_firsts && step->rows[p->firsts[i]].seq != step->rows[r].seq) i++;
        if (i == p->n_firsts) p->firsts[p->n_firsts++] = r;
    }
}

/* ---- experts ---- */

static void rfi_cpu_route(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    float *out = o->out + chunk * o->out_width;
    RFI_UNUSED(thread);
    rfi_route_row(o->op, o->in + chunk * o->in_width, o->vector, (int32_t *)(void *)out, out + o->op->route.n_used);
}

/* The k-th chosen expert of a ROUTE's output row. */
static uint32_t rfi_route_id(const float *row, uint32_t k) {
    uint32_t id;
    memcpy(&id, row + k, sizeof id);
    return id;
}

/* Counting sort of the (row, choice) pairs of a ROUTE by expert, stable; kept until another ROUTE runs. */
static void rfi_cpu_sort_pairs(rfi_cpu_plan *p, const rf_op *op, uint32_t buffer, const float *route, uint64_t width,
                               uint32_t n_rows) {
    const rf_experts_params *par = &op->experts;
    rfi_cpu_pairs *s = &p->pairs;
    if (s->route == buffer) return;
    s->route = buffer;
    s->n_active = 0;
    memset(s->first, 0, (par->n_experts + 1) * sizeof *s->first);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t k = 0; k < par->n_used; k++) s->first[rfi_route_id(route + row * width, k) + 1]++;
    for (uint32_t e = 0; e < par->n_experts; e++) {
        if (s->first[e + 1]) s->active[s->n_active++] = e;
        s->first[e + 1] += s->first[e];
    }
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t k = 0; k < par->n_used; k++)
            s->sorted[s->first[rfi_route_id(route + row * width, k)]++] = row * par->n_used + k;
    for (uint32_t e = par->n_experts; e > 0; e--) s->first[e] = s->first[e - 1]; /* undo what sorting moved */
    s->first[0] = 0;
}

/* Gather the input of a sorted pair, quantized if the weights are. */
static void rfi_cpu_gather_pair(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_experts_params *par = &op->experts;
    const uint32_t pair = o->p->pairs.sorted[chunk], row = pair / par->n_used, k = pair % par->n_used;
    const float *x = o->in + row * o->in_width + (op->flags & RF_OP_PER_CHOICE ? (uint64_t)k * par->n_in : 0);
    RFI_UNUSED(thread);
    if (rfi_type_takes_int8(o->w_type)) rfi_cpu_quantize_row(o, chunk, x, par->n_in);
    else memcpy(o->p->gathered + (uint64_t)chunk * par->n_in, x, par->n_in * sizeof *x);
}

/* A chunk is cut.small units of rows of one expert, for all pairs that chose it. */
static void rfi_cpu_experts(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_experts_params *par = &op->experts;
    const rfi_cpu_pairs *s = &o->p->pairs;
    const uint32_t n_blocks = (o->cut.n_units + o->cut.small - 1) / o->cut.small, e = s->active[chunk / n_blocks],
                   row0 = chunk % n_blocks * o->cut.small * RFI_CPU_UNIT,
                   n_rows = (uint32_t)rfi_min_u64(par->n_out - row0, (uint64_t)o->cut.small * RFI_CPU_UNIT);
    const uint8_t *w = (const uint8_t *)rfi_cpu_table_of(o->p->bind.table)->weights[op->weight + e];
    w += (par->first_row + row0) * o->w_row_bytes;
    float *y = o->p->scratch + thread * o->p->scratch_stride;
    for (uint32_t at = s->first[e], n; at < s->first[e + 1]; at += n) {
        rfi_acts x = o->acts;
        n = (uint32_t)rfi_min_u64(RFI_CPU_COLS, s->first[e + 1] - at);
        x.f += at * x.f_stride;
        x.q += at * x.q_stride;
        const rfi_matmul m = {w, o->w_row_bytes, n_rows, par->n_in, &x, n, y, n_rows};
        rfi_matmul_run(o->k, o->w_type, &m);
        for (uint32_t j = 0; j < n; j++) {
            const uint32_t pair = s->sorted[at + j];
            float *out = o->out + pair / par->n_used * o->out_width;
            out += (uint64_t)(pair % par->n_used) * par->n_out + row0;
            if (o->vector2) o->k->scale(y + (uint64_t)j * n_rows, n_rows, o->vector2[e]);
            if (o->vector) o->k->add(y + (uint64_t)j * n_rows, o->vector + (uint64_t)e * par->n_out + row0, n_rows);
            memcpy(out, y + (uint64_t)j * n_rows, n_rows * sizeof *out);
        }
    }
}

static void rfi_cpu_mix(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    RFI_UNUSED(thread);
    const uint32_t first = o->op->flags & RF_OP_SIGMOID ? 0 : o->op->mix.n_used; /* after the ids of a ROUTE */
    rfi_mix_row(o->op, o->in + chunk * o->in_width, o->in2 ? o->in2 + chunk * o->in2_width + first : NULL,
                o->out + chunk * o->out_width);
}

/* A vector weight as float32: in place if it is f32, else converted into vector buffer `part`. */
static const float *rfi_cpu_vector(const rfi_cpu_plan *p, uint32_t slot, uint32_t first, uint32_t n, uint32_t part) {
    if (slot == RF_NONE) return NULL;
    const rf_plan_weight *w = &p->plan->weights[slot];
    const uint8_t *data = (const uint8_t *)rfi_cpu_table_of(p->bind.table)->weights[slot];
    data += first * rfi_row_bytes(w->type, 1);
    if (w->type == RF_TYPE_F32) return (const float *)(const void *)data;
    float *out = p->vector + part * p->vector_stride;
    rfi_dequantize_row(w->type, data, n, out);
    return out;
}

/* A weight of one value; 1 if there is none. */
static float rfi_cpu_scalar(const rfi_cpu_plan *p, uint32_t slot) {
    float v = 1;
    if (slot == RF_NONE) return v;
    rfi_dequantize_row(p->plan->weights[slot].type, rfi_cpu_table_of(p->bind.table)->weights[slot], 1, &v);
    return v;
}

static float *rfi_cpu_buffer(const rfi_cpu_plan *p, const rf_step *step, uint32_t id, uint64_t *width) {
    const rf_plan_buffer *b = &p->plan->buffers[id];
    float *base = (float *)(void *)((uint8_t *)p->bind.scratch.base + p->bind.buffer_offset[id]);
    *width = b->width;
    return b->rows == RF_ROWS_LOGITS ? base + (uint64_t)step->first_logits_row * b->width : base;
}

static void rfi_cpu_run_matmul(rfi_cpu_op *o) {
    rfi_cpu_plan *p = o->p;
    const rf_op *op = o->op;
    rfi_pool *pool = &p->dev->pool;
    uint32_t n_units = 0;
    for (uint32_t i = 0; i < o->how->n_parts; i++) {
        rfi_cpu_part *part = &o->parts[i];
        const rf_plan_weight *w = &p->plan->weights[op[i].weight];
        part->op = &op[i];
        part->w_type = w->type;
        part->w_row_bytes = rfi_row_bytes(w->type, w->n_in);
        part->w = (const uint8_t *)rfi_cpu_table_of(p->bind.table)->weights[op[i].weight];
        part->w += op[i].matmul.first_row * part->w_row_bytes;
        part->bias = rfi_cpu_vector(p, op[i].bias, op[i].matmul.first_row, op[i].matmul.n_out, i);
        part->factor = rfi_cpu_scalar(p, op[i].factor);
        part->out = rfi_cpu_buffer(p, o->step, op[i].out, &part->out_width);
        if (i == 0 || !o->how->then_glu) n_units += rfi_cpu_part_units(part);
    }
    if (o->how->then_glu) o->out = rfi_cpu_buffer(p, o->step, op[2].out, &o->out_width);
    o->acts = (rfi_acts){.f = o->in, .f_stride = o->in_width, .q = p->acts, .q_stride = rfi_q8_groups(op->matmul.n_in)};
    if (rfi_type_takes_int8(o->parts[0].w_type) && !o->how->has_acts)
        rfi_pool_run(pool, rfi_cpu_quantize, o, o->n_rows);
    o->cut = rfi_cpu_cut_units(n_units, pool->n_threads, o->n_rows);
    const uint32_t rest = n_units - o->cut.n_big * o->cut.big;
    rfi_pool_run(pool, rfi_cpu_matmul, o, o->cut.n_big + (rest + o->cut.small - 1) / o->cut.small);
}

#define RFI_ACROSS_COLS 256u /* columns of a chunk: whole blocks of any type  */
#define RFI_ACROSS_MAX 1024u  /* n_in at most                                 */

static void rfi_cpu_quantize_heads(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_heads_params *par = &op->heads;
    RFI_UNUSED(thread);
    for (uint32_t h = 0; h < par->n_heads; h++)
        rfi_cpu_quantize_row(o, chunk * par->n_heads + h, o->in + chunk * o->in_width + (uint64_t)h * par->head_dim,
                             par->n_in);
}

/* A chunk is cut.small units of rows of one head's matrix, for all rows of the step. The first chunk of a head also
 * copies the values that its matrix does not multiply. */
static void rfi_cpu_heads(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_heads_params *par = &op->heads;
    const uint32_t n_blocks = (o->cut.n_units + o->cut.small - 1) / o->cut.small, h = chunk / n_blocks,
                   rest = par->head_dim - par->n_in, row0 = chunk % n_blocks * o->cut.small * RFI_CPU_UNIT,
                   n_rows = (uint32_t)rfi_min_u64(par->n_out - row0, (uint64_t)o->cut.small * RFI_CPU_UNIT);
    const uint8_t *w = o->w + (par->first_row + (uint64_t)h * par->head_rows + row0) * o->w_row_bytes;
    const float *in = o->in + (uint64_t)h * par->head_dim;
    float *out = o->out + (uint64_t)h * (par->n_out + rest);
    RFI_UNUSED(thread);
    for (uint32_t col0 = 0, n; col0 < o->n_rows; col0 += n) {
        n = (uint32_t)rfi_min_u64(RFI_CPU_COLS, o->n_rows - col0);
        rfi_acts x = o->acts;
        x.f = in + col0 * x.f_stride;
        x.q += h * rfi_q8_groups(par->n_in) + col0 * x.q_stride;
        const rfi_matmul m = {w, o->w_row_bytes, n_rows, par->n_in, &x, n, out + row0 + col0 * o->out_width,
                              o->out_width};
        rfi_matmul_run(o->k, o->w_type, &m);
    }
    for (uint64_t r = 0; row0 == 0 && r < o->n_rows; r++)
        memcpy(out + r * o->out_width + par->n_out, in + r * o->in_width + par->n_in, rest * sizeof *out);
}

/* RF_OP_ACROSS: a chunk is RFI_ACROSS_COLS columns of one head's matrix, as floats in the thread's scratch. */
static void rfi_cpu_heads_across(void *ctx, uint32_t chunk, uint32_t thread) {
    const rfi_cpu_op *o = (const rfi_cpu_op *)ctx;
    const rf_op *op = o->op;
    const rf_heads_params *par = &op->heads;
    const uint32_t n_blocks = (par->n_out + RFI_ACROSS_COLS - 1) / RFI_ACROSS_COLS, h = chunk / n_blocks,
                   rest = par->head_dim - par->n_in, c0 = chunk % n_blocks * RFI_ACROSS_COLS,
                   n_cols = (uint32_t)rfi_min_u64(par->n_out - c0, RFI_ACROSS_COLS);
    const uint8_t *w = o->w + (par->first_row + (uint64_t)h * par->head_rows) * o->w_row_bytes;
    const float *in = o->in + (uint64_t)h * par->head_dim;
    float *out = o->out + (uint64_t)h * (par->n_out + rest), *row = o->p->scratch + thread * o->p->scratch_stride,
          *columns = row + RFI_ACROSS_COLS;
    for (uint32_t i = 0; i < par->n_in; i++) {
        rfi_dequantize_row(o->w_type, w + i * o->w_row_bytes + rfi_row_bytes(o->w_type, c0), n_cols, row);
        for (uint32_t c = 0; c < n_cols; c++) columns[(uint64_t)c * par->n_in + i] = row[c];
    }
    for (uint32_t col0 = 0, n; col0 < o->n_rows; col0 += n) {
        n = (uint32_t)rfi_min_u64(RFI_CPU_COLS, o->n_rows - col0);
        rfi_acts x = {.f = in + col0 * o->in_width, .f_stride = o->in_width};
        const rfi_matmul m = {(const uint8_t *)columns, par->n_in * sizeof *columns, n_cols, par->n_in, &x, n,
                              out + c0 + col0 * o->out_width, o->out_width};
        rfi_matmul_run(o->k, RF_TYPE_F32, &m);
    }
    for (uint64_t r = 0; c0 == 0 && r < o->n_rows; r++)
        memcpy(out + r * o->out_width + par->n_out, in + r * o->in_width + par->n_in, rest * sizeof *out);
}

static void rfi_cpu_run_heads(rfi_cpu_op *o) {
    const rf_op *op = o->op;
    const rf_heads_params *par = &op->heads;
    rfi_pool *pool = &o->p->dev->pool;
    if (op->flags & RF_OP_ACROSS) {
        const uint32_t n_blocks = (par->n_out + RFI_ACROSS_COLS - 1) / RFI_ACROSS_COLS;
        rfi_pool_run(pool, rfi_cpu_heads_across, o, par->n_heads * n_blocks);
        return;
    }
    o->acts = (rfi_acts){.f = o->in, .f_stride = o->in_width, .q = o->p->acts,
                         .q_stride = rfi_q8_groups(par->n_in) * par->n_heads};
    if (rfi_type_takes_int8(o->w_type)) rfi_pool_run(pool, rfi_cpu_quantize_heads, o, o->n_rows);
    o->cut.n_units = (par->n_out + RFI_CPU_UNIT - 1) / RFI_CPU_UNIT;
    const uint64_t share = (uint64_t)o->cut.n_units * par->n_heads / ((uint64_t)pool->n_threads * 4);
    o->cut.small = (uint32_t)rfi_max_u64(2, rfi_min_u64(RFI_CPU_ROWS / RFI_CPU_UNIT, share));
    rfi_pool_run(pool, rfi_cpu_heads, o, par->n_heads * ((o->cut.n_units + o->cut.small - 1) / o->cut.small));
}

static void rfi_cpu_run_route(rfi_cpu_op *o) {
    o->vector = rfi_cpu_vector(o->p, o->op->bias, 0, o->op->route.n_experts, 0);
    rfi_pool_run(&o->p->dev->pool, rfi_cpu_route, o, o->n_rows);
    if (o->p->pairs.route == o->op->out) o->p->pairs.route = RF_NONE;
}

static void rfi_cpu_run_experts(rfi_cpu_op *o) {
    rfi_cpu_plan *p = o->p;
    const rf_op *op = o->op;
    const rf_experts_params *par = &op->experts;
    rfi_pool *pool = &p->dev->pool;
    rfi_cpu_sort_pairs(p, op, op->in2, o->in2, o->in2_width, o->n_rows);
    o->vector = rfi_cpu_vector(p, op->bias, 0, par->n_experts * par->n_out, 0);
    o->vector2 = rfi_cpu_vector(p, op->factor, 0, par->n_experts, 1);
    o->acts = (rfi_acts){.f = p->gathered, .f_stride = par->n_in, .q = p->acts, .q_stride = rfi_q8_groups(par->n_in)};
    if (!o->how->has_acts) rfi_pool_run(pool, rfi_cpu_gather_pair, o, o->n_rows * par->n_used);
    o->cut.n_units = (par->n_out + RFI_CPU_UNIT - 1) / RFI_CPU_UNIT;
    const uint64_t share = (uint64_t)o->cut.n_units * p->pairs.n_active / ((uint64_t)pool->n_threads * 4);
    o->cut.small = (uint32_t)rfi_max_u64(2, rfi_min_u64(RFI_CPU_ROWS / RFI_CPU_UNIT, share));
    rfi_pool_run(pool, rfi_cpu_experts, o,
                 p->pairs.n_active * ((o->cut.n_units + o->cut.small - 1) / o->cut.small));
}

static void rfi_cpu_run_conv(rfi_cpu_op *o) {
    const rf_op *op = o->op;
    const rf_conv_params *par = &op->conv;
    const uint32_t n_blocks = (par->n + RFI_CONV_BLOCK - 1) / RFI_CONV_BLOCK;
    o->vector = rfi_cpu_vector(o->p, op->weight, 0, par->n * par->n_taps, 0);
    o->vector2 = rfi_cpu_vector(o->p, op->bias, 0, par->n, 1);
    rfi_pool_run(&o->p->dev->pool, rfi_cpu_conv, o, o->p->n_firsts * n_blocks);
}

static void rfi_cpu_run_delta(rfi_cpu_op *o) {
    o->in3 = rfi_cpu_buffer(o->p, o->step, o->op->in3, &o->in3_width);
    o->vector = rfi_cpu_vector(o->p, o->op->weight, 0, o->op->delta.n_heads, 0);
    o->vector2 = rfi_cpu_vector(o->p, o->op->bias, 0, o->op->delta.n_heads, 1);
    rfi_pool_run(&o->p->dev->pool, rfi_cpu_delta, o, o->p->n_firsts * o->op->delta.n_heads);
}

static void rfi_cpu_run_rope(rfi_cpu_op *o) {
    rfi_cpu_plan *p = o->p;
    if (!p->rope || !rf_op_same_angles(p->rope, o->op)) {
        o->vector = rfi_cpu_vector(p, o->op->weight, 0, o->op->rope.n_rot / 2, 0);
        rfi_pool_run(&p->dev->pool, rfi_cpu_cos_sin, o, o->n_rows);
        p->rope = o->op;
    }
    rfi_pool_run(&p->dev->pool, rfi_cpu_rope, o, o->n_rows);
}

static void rfi_cpu_run_op(rfi_cpu_plan *p, uint32_t index, const rf_step *step) {
    const rf_op *op = &p->plan->ops[index];
    rfi_pool *pool = &p->dev->pool;
    rfi_cpu_op o = {.p = p, .op = op, .how = &p->how[index], .step = step, .k = p->dev->kernels};
    o.n_rows = op->rows == RF_ROWS_LOGITS ? step->n_logits : step->n_rows;
    if (o.n_rows == 0) return;
    if (op->in != RF_NONE) o.in = rfi_cpu_buffer(p, step, op->in, &o.in_width);
    if (op->in2 != RF_NONE) o.in2 = rfi_cpu_buffer(p, step, op->in2, &o.in2_width);
    if (op->out != RF_NONE) o.out = rfi_cpu_buffer(p, step, op->out, &o.out_width);
    if (op->weight != RF_NONE) {
        const rf_plan_weight *w = &p->plan->weights[op->weight];
        if (op->kind != RF_OP_EXPERTS) /* only chosen experts are loaded */
            o.w = (const uint8_t *)rfi_cpu_table_of(p->bind.table)->weights[op->weight];
        o.w_type = w->type;
        o.w_row_bytes = rfi_row_bytes(w->type, w->n_in);
    }
    switch (op->kind) {
    case RF_OP_EMBED:
        rfi_pool_run(pool, op->flags & RF_OP_POSITIONS ? rfi_cpu_embed_position : rfi_cpu_embed, &o, o.n_rows);
        break;
    case RF_OP_RMS_NORM:
        o.vector = rfi_cpu_vector(p, op->weight, 0,
                                  op->norm.n * (op->flags & RF_OP_EACH_HEAD ? op->norm.n_groups : 1), 0);
        o.vector2 = rfi_cpu_vector(p, op->bias, 0, op->norm.n, 1);
        rfi_pool_run(pool, rfi_cpu_norm, &o, o.n_rows);
        break;
    case RF_OP_MATMUL: rfi_cpu_run_matmul(&o); break;
    case RF_OP_ROPE: rfi_cpu_run_rope(&o); break;
    case RF_OP_KV_STORE: rfi_pool_run(pool, rfi_cpu_kv_store, &o, o.n_rows); break;
    case RF_OP_ATTENTION: {
        const uint32_t most = rfi_cpu_query_heads(op), n_tokens = rfi_attention_tokens(most);
        const uint32_t n_kv_heads = op->attention.n_kv_heads, group = op->attention.n_heads / n_kv_heads;
        o.vector = rfi_cpu_vector(p, op->weight, 0, op->attention.n_heads, 0);
        rfi_pool_run(pool, rfi_cpu_attention, &o,
                     (o.n_rows + n_tokens - 1) / n_tokens * n_kv_heads * ((group + most - 1) / most));
        break;
    }
    case RF_OP_GLU:
        o.vector = rfi_cpu_vector(p, op->factor, 0, 1, 0);
        rfi_pool_run(pool, rfi_cpu_glu, &o, o.n_rows);
        break;
    case RF_OP_GATHER: rfi_cpu_gather(&o); break;
    case RF_OP_ARGMAX: rfi_pool_run(pool, rfi_cpu_argmax, &o, o.n_rows); break;
    case RF_OP_ROUTE: rfi_cpu_run_route(&o); break;
    case RF_OP_EXPERTS: rfi_cpu_run_experts(&o); break;
    case RF_OP_MIX: rfi_pool_run(pool, rfi_cpu_mix, &o, o.n_rows); break;
    case RF_OP_HEADS: rfi_cpu_run_heads(&o); break;
    case RF_OP_CONV: rfi_cpu_run_conv(&o); break;
    case RF_OP_DELTA: rfi_cpu_run_delta(&o); break;
    case RF_OP_SLICE: rfi_pool_run(pool, rfi_cpu_slice, &o, o.n_rows); break;
    default: break; /* plan_prepare refused it */
    }
}

/* ---- the table ---- */

/* Number of cores this process may run on. */
static uint32_t rfi_cpu_count(void) {
    unsigned long mask[64];
    uint32_t n = 0;
    long bytes =
        syscall(SYS_sched_getaffinity, 0, sizeof mask, mask); /* the libc wrapper needs _GNU_SOURCE */
    for (long i = 0; i < bytes / (long)sizeof mask[0]; i++) n += (uint32_t)__builtin_popcountl(mask[i]);
    return n == 0 ? 1 : n > RFI_MAX_THREADS ? RFI_MAX_THREADS : n;
}

static rf_result rfi_cpu_device_info(rf_dev *d, rf_device_info *out, rf_error *err) {
    const rfi_cpu *cpu = d ? rfi_cpu_of(d) : NULL;
    const rfi_kernels *k = cpu ? cpu->kernels : rfi_kernels_find(NULL);
    long pages = sysconf(_SC_PHYS_PAGES), free_pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    RFI_UNUSED(err);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "cpu");
    snprintf(out->text, sizeof out->text, "CPU");
    snprintf(out->arch, sizeof out->arch, "%s", k->arch_text);
    out->usable = 1;
    out->wave_size = 1;
    out->compute_units = cpu ? cpu->pool.n_started + 1 : rfi_cpu_count();
    out->total_bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    out->free_bytes = free_pages > 0 && page > 0 ? (uint64_t)free_pages * (uint64_t)page : 0;
    return RF_OK;
}

static rf_result rfi_cpu_device_list(rf_device_info *out, uint32_t capacity, uint32_t *count, rf_error *err) {
    *count = 1;
    return capacity ? rfi_cpu_device_info(NULL, out, err) : RF_OK;
}

static rf_result rfi_cpu_device_open(uint32_t index, const rf_device_desc *desc, rf_dev **out, rf_error *err) {
    RFI_UNUSED(index);
    const rfi_kernels *k = rfi_kernels_find(desc->isa);
    if (!k)
        return rfi_fail(err, RF_ERR_NOT_FOUND, 0,
                        "cpu: instruction set '%.64s' is not known, or this machine lacks it; its best is %s",
                        desc->isa, rfi_kernels_find(NULL)->name);
    if (desc->n_threads > RFI_MAX_THREADS)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "cpu: %u threads, at most %d are supported", desc->n_threads,
                        RFI_MAX_THREADS);
    rfi_cpu *cpu = (rfi_cpu *)rfi_alloc(&desc->allocator, 1, sizeof *cpu, "the cpu device", err);
    if (!cpu) return RF_ERR_MEMORY;
    cpu->alloc = desc->allocator;
    cpu->kernels = k;
    rf_result r =
        rfi_pool_init(&cpu->pool, &cpu->alloc, desc->n_threads ? desc->n_threads : rfi_cpu_count(), err);
    if (r != RF_OK) {
        rfi_free(&desc->allocator, cpu);
        return r;
    }
    *out = (rf_dev *)(void *)cpu;
    return RF_OK;
}

static void rfi_cpu_device_close(rf_dev *d) {
    rfi_cpu *cpu = rfi_cpu_of(d);
    rf_allocator alloc = cpu->alloc;
    rfi_pool_destroy(&cpu->pool);
    rfi_free(&alloc, cpu);
}

static rf_result rfi_cpu_host_create(rf_dev *d, uint64_t size_bytes, void **out, rf_error *err) {
    *out = rfi_alloc_aligned(&rfi_cpu_of(d)->alloc, size_bytes, 4096, "a staging buffer", err);
    return *out ? RF_OK : RF_ERR_MEMORY;
}

static void rfi_cpu_host_release(rf_dev *d, void *host) { rfi_free_aligned(&rfi_cpu_of(d)->alloc, host); }

static rf_result rfi_cpu_mem_create(rf_dev *d, uint64_t size_bytes, rf_mem *out, rf_error *err) {
    out->base = rfi_alloc_aligned(&rfi_cpu_of(d)->alloc, size_bytes, 256, "device memory", err);
    out->size_bytes = out->base ? size_bytes : 0;
    return out->base ? RF_OK : RF_ERR_MEMORY;
}

static void rfi_cpu_mem_release(rf_dev *d, rf_mem *mem) {
    rfi_free_aligned(&rfi_cpu_of(d)->alloc, mem->base);
    memset(mem, 0, sizeof *mem);
}

static rf_result rfi_cpu_queue_create(rf_dev *d, rf_queue **out, rf_error *err) {
    RFI_UNUSED(err);
    *out = (rf_queue *)(void *)d; /* queues have no state, but are not NULL */
    return RF_OK;
}

static void rfi_cpu_queue_release(rf_queue *q) { RFI_UNUSED(q); }

static rf_result rfi_cpu_table_create(rf_dev *d, const rf_plan *plan, rf_table **out, rf_error *err) {
    rfi_cpu *cpu = rfi_cpu_of(d);
    rfi_cpu_table *t = (rfi_cpu_table *)rfi_alloc(&cpu->alloc, 1, sizeof *t, "a weight table", err);
    if (!t) return RF_ERR_MEMORY;
    t->weights =
        (const void **)rfi_alloc(&cpu->alloc, plan->n_weights, sizeof *t->weights, "a weight table", err);
    if (!t->weights) {
        rfi_free(&cpu->alloc, t);
        return RF_ERR_MEMORY;
    }
    t->dev = cpu;
    t->plan = plan;
    *out = (rf_table *)(void *)t;
    return RF_OK;
}

static void rfi_cpu_table_release(rf_table *table) {
    rfi_cpu_table *t = rfi_cpu_table_of(table);
    rf_allocator alloc = t->dev->alloc;
    rfi_free(&alloc, (void *)t->weights);
    rfi_free(&alloc, t);
}

static rf_weight_layout rfi_cpu_weight_layout(rf_dev *d, const rf_plan_weight *w) {
    RFI_UNUSED(d);
    return (rf_weight_layout){.size_bytes = w->size_bytes, .align = 4, .in_place = 1};
}

static rf_result rfi_cpu_weight_write(rf_table *table, rf_queue *q, const rf_weight_part *part, rf_ticket *ticket,
                                      rf_error *err) {
    rfi_cpu_table *t = rfi_cpu_table_of(table);
    const rf_plan_weight *w = &t->plan->weights[part->slot];
    RFI_UNUSED(q);
    RFI_UNUSED(err);
    memset(ticket, 0, sizeof *ticket);
    if (!part->mem) {
        t->weights[part->slot] = part->src;
        return RF_OK;
    }
    uint64_t row_bytes = w->size_bytes / w->n_rows;
    uint8_t *base = (uint8_t *)part->mem->base + part->offset;
    memcpy(base + part->row0 * row_bytes, part->src, (size_t)(part->n_rows * row_bytes));
    if (part->row0 + part->n_rows == w->n_rows) t->weights[part->slot] = base;
    return RF_OK;
}

static void rfi_cpu_weight_clear(rf_table *table, uint32_t slot) {
    rfi_cpu_table_of(table)->weights[slot] = NULL;
}

static rf_result rfi_cpu_mem_write(rf_queue *q, const rf_mem *dst, uint64_t offset, const void *src, uint64_t n,
                                   rf_ticket *ticket, rf_error *err) {
    RFI_UNUSED(q);
    RFI_UNUSED(err);
    memset(ticket, 0, sizeof *ticket);
    memcpy((uint8_t *)dst->base + offset, src, (size_t)n);
    return RF_OK;
}

static rf_result rfi_cpu_mem_read(rf_queue *q, const rf_mem *src, uint64_t offset, void *dst, uint64_t n,
                                  rf_ticket *ticket, rf_error *err) {
    RFI_UNUSED(q);
    RFI_UNUSED(err);
    memset(ticket, 0, sizeof *ticket);
    memcpy(dst, (const uint8_t *)src->base + offset, (size_t)n);
    return RF_OK;
}

static rf_result rfi_cpu_mem_copy(rf_queue *q, rf_mem_at dst, rf_mem_at src, uint64_t n, rf_ticket *ticket,
                                  rf_error *err) {
    RFI_UNUSED(q);
    RFI_UNUSED(err);
    memset(ticket, 0, sizeof *ticket);
    memmove((uint8_t *)dst.mem->base + dst.offset, (const uint8_t *)src.mem->base + src.offset, (size_t)n);
    return RF_OK;
}

static rf_result rfi_cpu_mem_fill(rf_queue *q, const rf_mem *dst, uint64_t offset, uint8_t value, uint64_t n,
                                  rf_ticket *ticket, rf_error *err) {
    RFI_UNUSED(q);
    RFI_UNUSED(err);
    memset(ticket, 0, sizeof *ticket);
    memset((uint8_t *)dst->base + offset, value, (size_t)n);
    return RF_OK;
}

/* mem_sum in chunks of RFI_SUM_WORDS. */
#define RFI_SUM_WORDS 131072u
typedef struct rfi_cpu_sum {
    const uint64_t *words;
    uint64_t n_words;
    _Atomic uint64_t total;
} rfi_cpu_sum;

static void rfi_cpu_sum_chunk(void *ctx, uint32_t chunk, uint32_t thread) {
    rfi_cpu_sum *sum = (rfi_cpu_sum *)ctx;
    const uint64_t first = (uint64_t)chunk * RFI_SUM_WORDS;
    const uint64_t *w = sum->words + first, n = rfi_min_u64(sum->n_words - first, RFI_SUM_WORDS);
    uint64_t part[8] = {0}, i = 0;
    RFI_UNUSED(thread);
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) part[k] += w[i + (uint64_t)k];
    for (; i < n; i++) part[0] += w[i];
    for (int k = 1; k < 8; k++) part[0] += part[k];
    atomic_fetch_add_explicit(&sum->total, part[0], memory_order_relaxed);
}

static rf_result rfi_cpu_mem_sum(rf_queue *q, rf_mem_at src, uint64_t n, rf_mem_at sum, rf_ticket *ticket,
                                 rf_error *err) {
    rfi_cpu_sum job = {.words = (const uint64_t *)(const void *)((const uint8_t *)src.mem->base + src.offset),
                       .n_words = n / 8};
    memset(ticket, 0, sizeof *ticket);
    if (job.n_words / RFI_SUM_WORDS >= UINT32_MAX)
        return rfi_fail(err, RF_ERR_ARGUMENT, n, "cpu: mem_sum of %llu bytes: want fewer than %llu", RFI_LLU(n),
                        RFI_LLU((uint64_t)UINT32_MAX * RFI_SUM_WORDS * 8));
    rfi_pool_run(&rfi_cpu_of((rf_dev *)(void *)q)->pool, rfi_cpu_sum_chunk, &job,
                 (uint32_t)((job.n_words + RFI_SUM_WORDS - 1) / RFI_SUM_WORDS));
    *(uint64_t *)(void *)((uint8_t *)sum.mem->base + sum.offset) += atomic_load(&job.total);
    return RF_OK;
}

static int rfi_cpu_ticket_done(const rf_ticket *ticket) {
    RFI_UNUSED(ticket);
    return 1;
}

static rf_result rfi_cpu_ticket_wait(const rf_ticket *ticket, uint32_t timeout_ms, rf_error *err) {
    RFI_UNUSED(ticket);
    RFI_UNUSED(timeout_ms);
    RFI_UNUSED(err);
    return RF_OK;
}

static rf_result rfi_cpu_queue_after(rf_queue *q, const rf_ticket *ticket, rf_error *err) {
    RFI_UNUSED(q);
    RFI_UNUSED(ticket);
    RFI_UNUSED(err);
    return RF_OK;
}

static rf_result rfi_cpu_op_supported(rf_dev *d, const rf_plan *plan, const rf_op *op, rf_error *err) {
    const rf_result r = rfi_check_op("cpu", plan, op, err);
    if (r != RF_OK) return r;
    const rf_op_spec spec = rf_op_get_spec(plan, op);
    for (uint32_t k = 0; k < spec.n_weights; k++) {
        const rf_plan_weight *w = &plan->weights[spec.weight[k].slot];
        if (!RF_TYPE_IS_BUILT(w->type))
            return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "cpu: %s is of type %s, which is not among ROCMFORGE_TYPES",
                            w->name, rf_type_get(w->type).name);
    }
    if (op->flags & RF_OP_ACROSS && op->kind == RF_OP_HEADS && op->heads.n_in > RFI_ACROSS_MAX)
        return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "cpu: attn_kv_b with keys of %u values, at most %u are supported",
                        op->heads.n_in, RFI_ACROSS_MAX);
    if (op->kind != RF_OP_MATMUL && op->kind != RF_OP_EXPERTS && op->kind != RF_OP_HEADS) return RF_OK;
    uint32_t type = plan->weights[op->weight].type;
    if (rfi_matmul_has(rfi_cpu_of(d)->kernels, type)) return RF_OK;
    return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "cpu: no matmul for tensor type %s", rf_type_get(type).name);
}

static void rfi_cpu_plan_release(rf_prepared *prepared) {
    rfi_cpu_plan *p = rfi_cpu_plan_of(prepared);
    rf_allocator alloc = p->dev->alloc;
    rfi_free(&alloc, p->segments);
    rfi_free(&alloc, p->how);
    rfi_free_aligned(&alloc, p->acts);
    rfi_free_aligned(&alloc, p->scratch);
    rfi_free_aligned(&alloc, p->vector);
    rfi_free_aligned(&alloc, p->cos_sin);
    rfi_free(&alloc, p->firsts);
    rfi_free(&alloc, p->pairs.sorted);
    rfi_free(&alloc, p->pairs.first);
    rfi_free(&alloc, p->pairs.active);
    rfi_free_aligned(&alloc, p->gathered);
    rfi_free(&alloc, p->times_us);
    rfi_free(&alloc, p);
}

/* What the ops of a plan need of workspaces. */
typedef struct rfi_cpu_need {
    uint64_t groups;   /* q8 groups of quantized inputs, per row      */
    uint64_t gathered; /* floats of gathered expert inputs, per row   */
    uint64_t scratch;  /* floats per thread                           */
    uint64_t cells;    /* floats per thread, to dequantize a KV block */
    uint64_t vector;   /* floats of converted vectors                 */
    uint64_t n_rot;
    uint32_t n_experts, n_used;
    int recurrent;
} rfi_cpu_need;

/* Whether matmuls a and b read the same input in the same format, so that one parallel job does both. */
static int rfi_cpu_same_input(const rf_plan *plan, const rf_op *a, const rf_op *b) {
    return b->kind == RF_OP_MATMUL && a->in == b->in && a->matmul.n_in == b->matmul.n_in && a->rows == b->rows &&
           a->layer == b->layer && a->out != b->out && a->out != a->in &&
           rfi_type_takes_int8(plan->weights[a->weight].type) == rfi_type_takes_int8(plan->weights[b->weight].type);
}

/* Fuse matmul i with those that follow, and gate and up with their GLU. */
static void rfi_cpu_join(const rf_plan *plan, uint32_t i, rfi_cpu_how *how) {
    const rf_op *op = &plan->ops[i];
    uint32_t n = 1;
    while (n < RFI_CPU_PARTS && i + n < plan->n_ops && rfi_cpu_same_input(plan, &op[n - 1], &op[n])) n++;
    how[i].n_parts = (uint8_t)n;
    how[i].n_along = (uint8_t)(n - 1);
    if (n != 2 || i + 2 >= plan->n_ops || op[0].matmul.n_out != op[1].matmul.n_out) return;
    if (op[2].kind != RF_OP_GLU || op[2].in != op[0].out || op[2].in2 != op[1].out || op[2].rows != op->rows ||
        op[2].glu.n != op->matmul.n_out || op[2].layer != op->layer || op[2].factor != RF_NONE || op[2].glu.in2_at ||
        op[2].glu.activation > RF_ACT_NONE || op[2].glu.repeat > 1)
        return;
    how[i].then_glu = 1;
    how[i].n_along = 2;
}

/* Whether op `before` makes whole input rows of matmul op, and so can quantize them. */
static int rfi_cpu_can_quantize(const rf_op *before, const rf_op *op) {
    return before->out == op->in && before->rows == op->rows && before->layer == op->layer &&
           ((before->kind == RF_OP_RMS_NORM && before->norm.n_groups == 1) || before->kind == RF_OP_GLU);
}

/* The needs of an EXPERTS op. Gate and up of a layer share their gathered input. */
static void rfi_cpu_measure_experts(const rf_plan *plan, uint32_t i, rfi_cpu_how *how, rfi_cpu_need *need) {
    const rf_op *op = &plan->ops[i], *before = i ? op - 1 : op;
    const rf_experts_params *par = &op->experts;
    const int int8 = rfi_type_takes_int8(plan->weights[op->weight].type);
    how[i].has_acts = before->kind == RF_OP_EXPERTS && i > 0 && before->layer == op->layer && before->in == op->in &&
                      before->in2 == op->in2 && before->out != op->in && before->experts.n_in == par->n_in &&
                      before->flags == op->flags && int8 == rfi_type_takes_int8(plan->weights[before->weight].type);
    if (int8) need->groups = rfi_max_u64(need->groups, rfi_q8_groups(par->n_in) * par->n_used);
    else need->gathered = rfi_max_u64(need->gathered, (uint64_t)par->n_in * par->n_used);
    if (need->n_experts < par->n_experts) need->n_experts = par->n_experts;
    if (need->n_used < par->n_used) need->n_used = par->n_used;
}

/* The needs of any op. */
static void rfi_cpu_measure_op(const rf_plan *plan, const rf_op *op, rfi_cpu_need *need) {
    const rf_op_spec spec = rf_op_get_spec(plan, op);
    uint64_t scratch = 0;
    for (uint32_t k = 0; k < spec.n_weights; k++)
        if (spec.weight[k].n_in == 0) need->vector = rfi_max_u64(need->vector, spec.weight[k].n_rows);
    if (op->kind == RF_OP_EMBED) scratch = op->embed.n;
    if (op->kind == RF_OP_ROPE) need->n_rot = rfi_max_u64(need->n_rot, op->rope.n_rot);
    if (op->kind == RF_OP_HEADS && op->flags & RF_OP_ACROSS) scratch = RFI_ACROSS_COLS * (op->heads.n_in + 1ull);
    if (op->kind == RF_OP_DELTA) scratch = rfi_delta_scratch(op);
    need->recurrent |= op->kind == RF_OP_CONV || op->kind == RF_OP_DELTA;
    if (op->kind == RF_OP_ATTENTION) {
        const rf_attention_params *a = &op->attention;
        const uint32_t dim_v = op->flags & RF_OP_MLA ? a->head_dim : a->head_dim_v;
        scratch = rfi_attention_scratch(rfi_cpu_query_heads(op), a->head_dim, dim_v);
        need->cells = rfi_max_u64(need->cells, (uint64_t)RFI_ATTENTION_BLOCK * rfi_max_u64(a->head_dim, dim_v));
    }
    need->scratch = rfi_max_u64(need->scratch, scratch);
}

/* Walk the ops: their needs, which are fused, and which matmuls find their input quantized already. */
static rfi_cpu_need rfi_cpu_measure(const rf_plan *plan, rfi_cpu_how *how) {
    rfi_cpu_need need = {.scratch = (uint64_t)RFI_CPU_COLS * RFI_CPU_ROWS};
    uint32_t held = RF_NONE; /* buffer whose rows are quantized in acts     */
    uint32_t next = 0;       /* first op after the fused ones               */
    int along = 0;           /* the op before was fused with an earlier one */
    for (uint32_t i = 0; i < plan->n_ops; i++) {
        const rf_op *op = &plan->ops[i];
        rfi_cpu_measure_op(plan, op, &need);
        if (op->kind == RF_OP_MATMUL && i >= next) {
            const int alone = i > 0 && !along;
            rfi_cpu_join(plan, i, how);
            if (rfi_type_takes_int8(plan->weights[op->weight].type)) {
                need.groups = rfi_max_u64(need.groups, rfi_q8_groups(op->matmul.n_in));
                how[i].has_acts = held == op->in;
                if (!how[i].has_acts && alone && rfi_cpu_can_quantize(op - 1, op))
                    how[i - 1].then_quantize = how[i].has_acts = 1;
                held = op->in;
            }
        }
        if (op->kind == RF_OP_EXPERTS) {
            rfi_cpu_measure_experts(plan, i, how, &need);
            held = RF_NONE;
        }
        if (op->kind == RF_OP_HEADS && !(op->flags & RF_OP_ACROSS) &&
            rfi_type_takes_int8(plan->weights[op->weight].type)) {
            need.groups = rfi_max_u64(need.groups, rfi_q8_groups(op->heads.n_in) * op->heads.n_heads);
            held = RF_NONE;
        }
        along = i < next;
        if (!along) next = i + 1 + how[i].n_along;
        if (op->out == held) held = RF_NONE;
    }
    return need;
}

/* Sizes of a plan's workspaces in bytes, and the shares of threads. */
typedef struct rfi_cpu_sizes {
    uint64_t acts, scratch, vector, cos_sin, firsts, gathered, pairs;
    uint64_t cells_at, scratch_stride, vector_stride; /* of rfi_cpu_plan, in floats */
} rfi_cpu_sizes;

static rfi_cpu_sizes rfi_cpu_size(const rfi_cpu *cpu, const rf_plan_bind *bind, const rfi_cpu_need *need) {
    rfi_cpu_sizes n = {.cells_at = (need->scratch + 15) / 16 * 16, /* whole cache lines, against false sharing */
                       .vector_stride = (need->vector + 15) / 16 * 16};
    n.scratch_stride = n.cells_at + (bind->cache_type == RF_CACHE_Q8_0 ? need->cells : 0);
    n.acts = bind->n_batch * need->groups * sizeof(rfi_q8);
    n.scratch = cpu->pool.n_threads * n.scratch_stride * sizeof(float);
    n.vector = RFI_CPU_PARTS * n.vector_stride * sizeof(float);
    n.cos_sin = bind->n_batch * need->n_rot * sizeof(float);
    n.firsts = need->recurrent ? (uint64_t)bind->n_batch * sizeof(uint32_t) : 0;
    if (need->n_used == 0) return n;
    n.gathered = rfi_max_u64(1, bind->n_batch * need->gathered) * sizeof(float);
    n.pairs = ((uint64_t)bind->n_batch * need->n_used + 2ull * need->n_experts + 1) * sizeof(uint32_t);
    return n;
}

static rf_result rfi_cpu_prepare_experts(rfi_cpu_plan *p, const rfi_cpu_need *need, uint64_t gathered_bytes,
                                         rf_error *err) {
    const rf_allocator *alloc = &p->dev->alloc;
    const uint64_t n_pairs = (uint64_t)p->bind.n_batch * need->n_used;
    if (n_pairs > INT32_MAX)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "cpu: %u rows with %u experts each: at most 2147483647 in all",
                        p->bind.n_batch, need->n_used);
    p->pairs.sorted = (uint32_t *)rfi_alloc(alloc, n_pairs, sizeof(uint32_t), "experts' rows", err);
    p->pairs.first = (uint32_t *)rfi_alloc(alloc, need->n_experts + 1ull, sizeof(uint32_t), "experts' rows", err);
    p->pairs.active = (uint32_t *)rfi_alloc(alloc, need->n_experts, sizeof(uint32_t), "experts' rows", err);
    p->gathered = (float *)rfi_alloc_aligned(alloc, gathered_bytes, 64, "experts' inputs", err);
    return p->pairs.sorted && p->pairs.first && p->pairs.active && p->gathered ? RF_OK : RF_ERR_MEMORY;
}

static rf_result rfi_cache_check(const rf_plan *plan, uint32_t cache_type, rf_error *err) {
    if (cache_type > RF_CACHE_Q8_0)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "session: cache_type %u is not known", cache_type);
    for (uint32_t i = 0; cache_type == RF_CACHE_Q8_0 && i < plan->n_ops; i++) {
        const rf_op *op = &plan->ops[i];
        if (op->kind == RF_OP_KV_STORE && (op->kv_store.head_dim % 32 || op->kv_store.head_dim_v % 32))
            return rfi_fail(err, RF_ERR_UNSUPPORTED, i,
                            "keys and values in q8_0: want heads of a multiple of 32 values, layer %d has %u and %u",
                            (int)op->layer, op->kv_store.head_dim, op->kv_store.head_dim_v);
    }
    return RF_OK;
}

static rf_result rfi_bind_check_cells(const rf_plan_bind *bind, rf_error *err) {
    const rf_result r = rfi_cache_check(bind->plan, bind->cache_type, err);
    if (r != RF_OK) return r;
    for (uint32_t i = 0; i < bind->plan->n_states; i++)
        if (rf_state_cells(bind, i) == 0)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "state %u: %u cells are too few, or not as rings are", i,
                            bind->state_cells ? bind->state_cells[i] : bind->n_ctx);
    return RF_OK;
}

static rf_result rfi_cpu_plan_bytes(rf_dev *d, const rf_plan_bind *bind, uint64_t *bytes, rf_error *err) {
    const rfi_cpu *cpu = rfi_cpu_of(d);
    const rf_plan *plan = bind->plan;
    rfi_cpu_how *how = (rfi_cpu_how *)rfi_alloc(&cpu->alloc, plan->n_ops, sizeof *how, "op flags", err);
    rf_result r = how ? RF_OK : RF_ERR_MEMORY;
    for (uint32_t i = 0; r == RF_OK && i < plan->n_ops; i++) r = rfi_cpu_op_supported(d, plan, &plan->ops[i], err);
    if (r == RF_OK) {
        const rfi_cpu_need need = rfi_cpu_measure(plan, how);
        const rfi_cpu_sizes n = rfi_cpu_size(cpu, bind, &need);
        *bytes = n.acts + n.scratch + n.vector + n.cos_sin + n.firsts + n.gathered + n.pairs;
    }
    rfi_free(&cpu->alloc, how);
    return r;
}

static rf_result rfi_cpu_plan_prepare(rf_dev *d, const rf_plan_bind *bind, uint32_t *segment_ops,
                                      uint32_t *n_segments, rf_prepared **out, rf_error *err) {
    rfi_cpu *cpu = rfi_cpu_of(d);
    const rf_plan *plan = bind->plan;
    rfi_cpu_plan *p = (rfi_cpu_plan *)rfi_alloc(&cpu->alloc, 1, sizeof *p, "a prepared plan", err);
    if (!p) return RF_ERR_MEMORY;
    p->dev = cpu;
    p->bind = *bind;
    p->plan = plan;
    p->pairs.route = RF_NONE;
    p->segments =
        (uint32_t *)rfi_alloc(&cpu->alloc, (uint64_t)plan->n_ops + 1, sizeof *p->segments, "segments", err);
    p->how = (rfi_cpu_how *)rfi_alloc(&cpu->alloc, plan->n_ops, sizeof *p->how, "op flags", err);
    p->times_us = (float *)rfi_alloc(&cpu->alloc, plan->n_ops, sizeof *p->times_us, "op times", err);
    rf_result r = p->segments && p->how && p->times_us ? RF_OK : RF_ERR_MEMORY;
    for (uint32_t i = 0; r == RF_OK && i < plan->n_ops; i++) {
        r = rfi_cpu_op_supported(d, plan, &plan->ops[i], err);
        if (rf_op_begins_segment(plan, i)) p->segments[p->n_segments++] = i;
    }
    if (r == RF_OK) r = rfi_bind_check_cells(bind, err);
    if (r == RF_OK) {
        rfi_cpu_need need = rfi_cpu_measure(plan, p->how);
        p->segments[p->n_segments] = plan->n_ops;
        const rfi_cpu_sizes n = rfi_cpu_size(cpu, bind, &need);
        p->cells_at = n.cells_at;
        p->scratch_stride = n.scratch_stride;
        p->vector_stride = n.vector_stride;
        p->acts = (rfi_q8 *)rfi_alloc_aligned(&cpu->alloc, n.acts, 64, "quantized activations", err);
        p->scratch = (float *)rfi_alloc_aligned(&cpu->alloc, n.scratch, 64, "thread scratch", err);
        p->vector = (float *)rfi_alloc_aligned(&cpu->alloc, n.vector, 64, "vector scratch", err);
        p->cos_sin = (float *)rfi_alloc_aligned(&cpu->alloc, n.cos_sin, 64, "rope scratch", err);
        if (need.recurrent) p->firsts = (uint32_t *)rfi_alloc(&cpu->alloc, bind->n_batch, 4, "recurrent rows", err);
        if (!p->acts || !p->scratch || !p->vector || !p->cos_sin || (need.recurrent && !p->firsts)) r = RF_ERR_MEMORY;
        if (r == RF_OK && need.n_used) r = rfi_cpu_prepare_experts(p, &need, n.gathered, err);
    }
    if (r != RF_OK) {
        rfi_cpu_plan_release((rf_prepared *)(void *)p);
        return r;
    }
    memcpy(segment_ops, p->segments, p->n_segments * sizeof *segment_ops);
    *n_segments = p->n_segments;
    *out = (rf_prepared *)(void *)p;
    return RF_OK;
}

static rf_result rfi_cpu_plan_run(rf_prepared *prepared, rf_queue *q, uint32_t first, uint32_t last,
                                  const rf_step *step, rf_ticket *ticket, rf_error *err) {
    rfi_cpu_plan *p = rfi_cpu_plan_of(prepared);
    RFI_UNUSED(q);
    RFI_UNUSED(err);
    memset(ticket, 0, sizeof *ticket);
    if (first == 0) p->rope = NULL;
    if (first == 0) rfi_cpu_find_firsts(p, step);
    p->pairs.route = RF_NONE; /* another step may have changed it */
    for (uint32_t i = p->segments[first]; i < p->segments[last]; i += 1u + p->how[i].n_along) {
        double start = p->timing ? rfi_now() : 0;
        rfi_cpu_run_op(p, i, step);
        if (p->timing) p->times_us[i] = (float)((rfi_now() - start) * 1e6);
    }
    return RF_OK;
}

static rf_session_stats rfi_host_plan_stats(const rf_prepared *prepared) {
    RFI_UNUSED(prepared);
    return (rf_session_stats){0};
}

static rf_result rfi_cpu_times(rf_prepared *prepared, float *us, uint32_t n, rf_error *err) {
    rfi_cpu_plan *p = rfi_cpu_plan_of(prepared);
    RFI_UNUSED(err);
    if (!us) p->timing = n;
    else memcpy(us, p->times_us, rfi_min_u64(n, p->plan->n_ops) * sizeof *us);
    return RF_OK;
}

static const rf_device_api rfi_cpu_api = {
    .size_bytes = sizeof(rf_device_api),
    .version = RF_DEVICE_API_VERSION,
    .op_bytes = sizeof(rf_op),
    .step_bytes = sizeof(rf_step),
    .name = "cpu",
    .device_list = rfi_cpu_device_list,
    .device_open = rfi_cpu_device_open,
    .device_close = rfi_cpu_device_close,
    .device_info = rfi_cpu_device_info,
    .host_create = rfi_cpu_host_create,
    .host_release = rfi_cpu_host_release,
    .mem_create = rfi_cpu_mem_create,
    .mem_release = rfi_cpu_mem_release,
    .queue_create = rfi_cpu_queue_create,
    .queue_release = rfi_cpu_queue_release,
    .table_create = rfi_cpu_table_create,
    .table_release = rfi_cpu_table_release,
    .weight_layout = rfi_cpu_weight_layout,
    .weight_write = rfi_cpu_weight_write,
    .weight_clear = rfi_cpu_weight_clear,
    .mem_write = rfi_cpu_mem_write,
    .mem_read = rfi_cpu_mem_read,
    .mem_copy = rfi_cpu_mem_copy,
    .mem_fill = rfi_cpu_mem_fill,
    .mem_sum = rfi_cpu_mem_sum,
    .ticket_done = rfi_cpu_ticket_done,
    .ticket_wait = rfi_cpu_ticket_wait,
    .queue_after = rfi_cpu_queue_after,
    .op_supported = rfi_cpu_op_supported,
    .plan_bytes = rfi_cpu_plan_bytes,
    .plan_prepare = rfi_cpu_plan_prepare,
    .plan_run = rfi_cpu_plan_run,
    .plan_release = rfi_cpu_plan_release,
    .plan_stats = rfi_host_plan_stats,
    .times = rfi_cpu_times,
};

/* ==== 11 Null device ==================================================================================== >>null
 * Computes nothing and checks everything: ops against the table of ops, that every buffer is written before it is read,
 * that weights are loaded when an op runs, that the rows of a step fit. It has no memory, logits are zeros, and it can
 * fail its n-th call, so that tests reach every error path. */

typedef struct rfi_null {
    rf_allocator alloc;
    _Atomic uint64_t n_calls;
    uint64_t fail_call;
    uint32_t fail_forever, fail_late;
    _Atomic int64_t n_live; /* objects and memory blocks not released yet */
} rfi_null;

typedef struct rfi_null_table {
    rfi_null *dev;
    const rf_plan *plan;
    _Atomic uint32_t *rows; /* [n_weights] written so far */
} rfi_null_table;

typedef struct rfi_null_plan {
    rfi_null *dev;
    rf_plan_bind bind;
    uint32_t *segments; /* [n_segments + 1] */
    uint32_t n_segments;
    uint8_t *written; /* [n_buffers] in this step */
} rfi_null_plan;

static rfi_null *rfi_null_of(rf_dev *d) { return (rfi_null *)(void *)d; }
static rfi_null_table *rfi_null_table_of(rf_table *t) { return (rfi_null_table *)(void *)t; }
static rfi_null_plan *rfi_null_plan_of(rf_prepared *p) { return (rfi_null_plan *)(void *)p; }

/* Count a call; the one to fail fails. */
static rf_result rfi_null_call(rfi_null *d, const char *what, rf_error *err) {
    uint64_t n = atomic_fetch_add(&d->n_calls, 1) + 1;
    if (d->fail_call && (n == d->fail_call || (d->fail_forever && n > d->fail_call)))
        return rfi_fail_sys(err, RF_ERR_DEVICE, -1, n, "null: %s, call %llu of the device, fails on request",
                            what, RFI_LLU(n));
    return RF_OK;
}

/* ---- checks of a plan ---- */

static rf_result rfi_null_check_rows(const rfi_null_plan *p, const rf_step *step, rf_error *err) {
    if (step->n_rows == 0 || step->n_rows > p->bind.n_batch ||
        step->first_logits_row + step->n_logits > p->bind.n_logits)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "null: step of %u rows, %u logits", step->n_rows,
                        step->n_logits);
    for (uint32_t i = 0; i < step->n_rows; i++) {
        const rf_step_row *row = &step->rows[i];
        if (row->token >= (int32_t)p->bind.plan->n_vocab || (row->token < 0 && !step->embeddings) ||
            row->seq < 0 || row->seq >= (int32_t)p->bind.n_seq || row->pos < 0 ||
            row->pos >= (int32_t)p->bind.n_ctx || row->from > p->bind.n_slots || row->to > p->bind.n_slots)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "null: row %u: token %d, sequence %d, position %d", i,
                            row->token, row->seq, row->pos);
    }
    for (uint32_t i = 0; i < step->n_logits; i++)
        if (step->logit_rows[i] >= step->n_rows)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "null: logits row %u of the step", step->logit_rows[i]);
    return RF_OK;
}

/* "Run" an op: its inputs were written, its weights are loaded. */
static rf_result rfi_null_run_op(rfi_null_plan *p, uint32_t i, rf_error *err) {
    const rf_op *op = &p->bind.plan->ops[i];
    const uint32_t slots[RF_OP_WEIGHTS] = {op->weight, op->bias, op->factor},
                   in[4] = {op->in, op->in2, op->in3, op->flags & RF_OP_ACCUMULATE ? op->out : RF_NONE};
    for (uint32_t k = 0; k < RF_OP_WEIGHTS; k++)
        if (slots[k] != RF_NONE &&
            rfi_null_table_of(p->bind.table)->rows[slots[k]] != p->bind.plan->weights[slots[k]].n_rows)
            return rfi_fail(err, RF_ERR_DEVICE, i, "null: op %u: weight %s is not loaded", i,
                            p->bind.plan->weights[slots[k]].name);
    for (int k = 0; k < 4; k++)
        if (in[k] != RF_NONE && !p->written[in[k]])
            return rfi_fail(err, RF_ERR_DEVICE, i, "null: op %u: buffer %s is read before it is written", i,
                            p->bind.plan->buffers[in[k]].name);
    if (op->out != RF_NONE) p->written[op->out] = 1;
    return RF_OK;
}

/* ---- the table ---- */

static rf_result rfi_null_device_info(rf_dev *d, rf_device_info *out, rf_error *err) {
    RFI_UNUSED(d);
    RFI_UNUSED(err);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "null");
    snprintf(out->text, sizeof out->text, "checks plans, computes nothing");
    snprintf(out->arch, sizeof out->arch, "none");
    out->usable = 1;
    out->wave_size = 1;
    return RF_OK;
}

static rf_result rfi_null_device_list(rf_device_info *out, uint32_t capacity, uint32_t *count, rf_error *err) {
    *count = 1;
    return capacity ? rfi_null_device_info(NULL, out, err) : RF_OK;
}

static rf_result rfi_null_device_open(uint32_t index, const rf_device_desc *desc, rf_dev **out, rf_error *err) {
    RFI_UNUSED(index);
    rfi_null *d = (rfi_null *)rfi_alloc(&desc->allocator, 1, sizeof *d, "the null device", err);
    if (!d) return RF_ERR_MEMORY;
    d->alloc = desc->allocator;
    d->fail_call = desc->fail_call;
    d->fail_forever = desc->fail_forever;
    d->fail_late = desc->fail_late;
    rf_result r = rfi_null_call(d, "device_open", err);
    if (r != RF_OK) rfi_free(&desc->allocator, d);
    else *out = (rf_dev *)(void *)d;
    return r;
}

static void rfi_null_device_close(rf_dev *d) {
    rf_allocator alloc = rfi_null_of(d)->alloc;
    rfi_free(&alloc, d);
}

static rf_result rfi_null_host_create(rf_dev *d, uint64_t size_bytes, void **out, rf_error *err) {
    rf_result r = rfi_null_call(rfi_null_of(d), "host_create", err);
    if (r != RF_OK) return r;
    *out = rfi_alloc(&rfi_null_of(d)->alloc, size_bytes, 1, "a staging buffer", err);
    if (!*out) return RF_ERR_MEMORY;
    atomic_fetch_add(&rfi_null_of(d)->n_live, 1);
    return RF_OK;
}

static void rfi_null_host_release(rf_dev *d, void *host) {
    rfi_free(&rfi_null_of(d)->alloc, host);
    atomic_fetch_sub(&rfi_null_of(d)->n_live, 1);
}

static rf_result rfi_null_mem_create(rf_dev *d, uint64_t size_bytes, rf_mem *out, rf_error *err) {
    rf_result r = rfi_null_call(rfi_null_of(d), "mem_create", err);
    if (r != RF_OK) return r;
    *out = (rf_mem){d, size_bytes}; /* base is never dereferenced */
    atomic_fetch_add(&rfi_null_of(d)->n_live, 1);
    return RF_OK;
}

static void rfi_null_mem_release(rf_dev *d, rf_mem *mem) {
    memset(mem, 0, sizeof *mem);
    atomic_fetch_sub(&rfi_null_of(d)->n_live, 1);
}

static rf_result rfi_null_queue_create(rf_dev *d, rf_queue **out, rf_error *err) {
    rf_result r = rfi_null_call(rfi_null_of(d), "queue_create", err);
    if (r != RF_OK) return r;
    *out = (rf_queue *)(void *)d;
    atomic_fetch_add(&rfi_null_of(d)->n_live, 1);
    return RF_OK;
}

static void rfi_null_queue_release(rf_queue *q) {
    atomic_fetch_sub(&rfi_null_of((rf_dev *)(void *)q)->n_live, 1);
}

static rf_result rfi_null_table_create(rf_dev *d, const rf_plan *plan, rf_table **out, rf_error *err) {
    rfi_null *dev = rfi_null_of(d);
    rf_result r = rfi_null_call(dev, "table_create", err);
    if (r != RF_OK) return r;
    rfi_null_table *t = (rfi_null_table *)rfi_alloc(&dev->alloc, 1, sizeof *t, "a weight table", err);
    if (!t) return RF_ERR_MEMORY;
    t->rows = (_Atomic uint32_t *)rfi_alloc(&dev->alloc, plan->n_weights, sizeof *t->rows, "a weight table", err);
    if (!t->rows) {
        rfi_free(&dev->alloc, t);
        return RF_ERR_MEMORY;
    }
    t->dev = dev;
    t->plan = plan;
    atomic_fetch_add(&dev->n_live, 1);
    *out = (rf_table *)(void *)t;
    return RF_OK;
}

static void rfi_null_table_release(rf_table *table) {
    rfi_null_table *t = rfi_null_table_of(table);
    rfi_null *dev = t->dev;
    rfi_free(&dev->alloc, (void *)t->rows);
    rfi_free(&dev->alloc, t);
    atomic_fetch_sub(&dev->n_live, 1);
}

static rf_weight_layout rfi_null_weight_layout(rf_dev *d, const rf_plan_weight *w) {
    RFI_UNUSED(d);
    return (rf_weight_layout){.size_bytes = w->size_bytes, .align = 1};
}

static rf_result rfi_null_weight_write(rf_table *table, rf_queue *q, const rf_weight_part *part, rf_ticket *ticket,
                                       rf_error *err) {
    rfi_null_table *t = rfi_null_table_of(table);
    RFI_UNUSED(q);
    memset(ticket, 0, sizeof *ticket);
    rf_error late;
    rfi_clear(&late);
    rf_result r = rfi_null_call(t->dev, "weight_write", t->dev->fail_late ? &late : err);
    if (r != RF_OK && !t->dev->fail_late) return r;
    if (r != RF_OK) { /* a ticket that fails when waited for */
        *ticket = (rf_ticket){q, late.where};
    }
    const rf_plan_weight *w = part->slot < t->plan->n_weights ? &t->plan->weights[part->slot] : NULL;
    if (!w || !part->mem || !part->src || part->offset + w->size_bytes > part->mem->size_bytes ||
        part->n_rows == 0 || (uint64_t)part->row0 + part->n_rows > w->n_rows ||
        atomic_fetch_add(&t->rows[part->slot], part->n_rows) + part->n_rows > w->n_rows)
        return rfi_fail(err, RF_ERR_ARGUMENT, part->slot, "null: weight_write of slot %u, rows %u + %u, does not fit",
                        part->slot, part->row0, part->n_rows);
    return RF_OK;
}

static int rfi_null_ticket_done(const rf_ticket *ticket) { return ticket->value == 0; }

static rf_result rfi_null_ticket_wait(const rf_ticket *ticket, uint32_t timeout_ms, rf_error *err) {
    RFI_UNUSED(timeout_ms);
    if (ticket->value == 0) return RF_OK;
    return rfi_fail_sys(err, RF_ERR_DEVICE, -1, ticket->value,
                        "null: weight_write, call %llu of the device, fails late", RFI_LLU(ticket->value));
}

static void rfi_null_weight_clear(rf_table *table, uint32_t slot) { rfi_null_table_of(table)->rows[slot] = 0; }

static rf_result rfi_null_transfer(rf_queue *q, const char *what, const rf_mem *mem, uint64_t offset, uint64_t n,
                                   rf_ticket *ticket, rf_error *err) {
    memset(ticket, 0, sizeof *ticket);
    rf_result r = rfi_null_call(rfi_null_of((rf_dev *)(void *)q), what, err);
    if (r == RF_OK && (offset > mem->size_bytes || n > mem->size_bytes - offset))
        r = rfi_fail(err, RF_ERR_ARGUMENT, offset, "null: %s of %llu bytes at %llu in a block of %llu", what,
                     RFI_LLU(n), RFI_LLU(offset), RFI_LLU(mem->size_bytes));
    return r;
}

static rf_result rfi_null_mem_write(rf_queue *q, const rf_mem *dst, uint64_t offset, const void *src, uint64_t n,
                                    rf_ticket *ticket, rf_error *err) {
    RFI_UNUSED(src);
    return rfi_null_transfer(q, "mem_write", dst, offset, n, ticket, err);
}

static rf_result rfi_null_mem_read(rf_queue *q, const rf_mem *src, uint64_t offset, void *dst, uint64_t n,
                                   rf_ticket *ticket, rf_error *err) {
    rf_result r = rfi_null_transfer(q, "mem_read", src, offset, n, ticket, err);
    if (r == RF_OK) memset(dst, 0, (size_t)n);
    return r;
}

static rf_result rfi_null_mem_copy(rf_queue *q, rf_mem_at dst, rf_mem_at src, uint64_t n, rf_ticket *ticket,
                                   rf_error *err) {
    rf_result r = rfi_null_transfer(q, "mem_copy", dst.mem, dst.offset, n, ticket, err);
    if (r == RF_OK && (src.offset > src.mem->size_bytes || n > src.mem->size_bytes - src.offset))
        r = rfi_fail(err, RF_ERR_ARGUMENT, src.offset, "null: mem_copy of %llu bytes from %llu on in a block of %llu",
                     RFI_LLU(n), RFI_LLU(src.offset), RFI_LLU(src.mem->size_bytes));
    return r;
}

static rf_result rfi_null_mem_fill(rf_queue *q, const rf_mem *dst, uint64_t offset, uint8_t value, uint64_t n,
                                   rf_ticket *ticket, rf_error *err) {
    RFI_UNUSED(value);
    return rfi_null_transfer(q, "mem_fill", dst, offset, n, ticket, err);
}

/* Checks its arguments only. */
static rf_result rfi_null_mem_sum(rf_queue *q, rf_mem_at src, uint64_t n, rf_mem_at sum, rf_ticket *ticket,
                                  rf_error *err) {
    rf_result r = rfi_null_transfer(q, "mem_sum", src.mem, src.offset, n, ticket, err);
    if (r == RF_OK && (src.offset % 16 || n % 16 || sum.offset % 8 || sum.mem->size_bytes < 8 ||
                       sum.offset > sum.mem->size_bytes - 8))
        r = rfi_fail(err, RF_ERR_ARGUMENT, src.offset,
                     "null: mem_sum of %llu bytes at %llu: want multiples of 16; to %llu of %llu: want one of 8",
                     RFI_LLU(n), RFI_LLU(src.offset), RFI_LLU(sum.offset), RFI_LLU(sum.mem->size_bytes));
    return r;
}

static rf_result rfi_null_op_supported(rf_dev *d, const rf_plan *plan, const rf_op *op, rf_error *err) {
    RFI_UNUSED(d);
    return rfi_check_op("null", plan, op, err);
}

static void rfi_null_plan_release(rf_prepared *prepared) {
    rfi_null_plan *p = rfi_null_plan_of(prepared);
    rfi_null *dev = p->dev;
    rfi_free(&dev->alloc, p->segments);
    rfi_free(&dev->alloc, p->written);
    rfi_free(&dev->alloc, p);
    atomic_fetch_sub(&dev->n_live, 1);
}

static rf_result rfi_null_plan_bytes(rf_dev *d, const rf_plan_bind *bind, uint64_t *bytes, rf_error *err) {
    RFI_UNUSED(bind);
    *bytes = 0;
    return rfi_null_call(rfi_null_of(d), "plan_bytes", err);
}

static rf_result rfi_null_plan_prepare(rf_dev *d, const rf_plan_bind *bind, uint32_t *segment_ops,
                                       uint32_t *n_segments, rf_prepared **out, rf_error *err) {
    rfi_null *dev = rfi_null_of(d);
    const rf_plan *plan = bind->plan;
    rf_result r = rfi_null_call(dev, "plan_prepare", err);
    for (uint32_t i = 0; r == RF_OK && i < plan->n_ops; i++) r = rfi_check_op("null", plan, &plan->ops[i], err);
    if (r == RF_OK) r = rfi_bind_check_cells(bind, err);
    if (r != RF_OK) return r;
    rfi_null_plan *p = (rfi_null_plan *)rfi_alloc(&dev->alloc, 1, sizeof *p, "a prepared plan", err);
    if (!p) return RF_ERR_MEMORY;
    p->dev = dev;
    p->bind = *bind;
    atomic_fetch_add(&dev->n_live, 1);
    p->segments =
        (uint32_t *)rfi_alloc(&dev->alloc, (uint64_t)plan->n_ops + 1, sizeof *p->segments, "segments", err);
    p->written = (uint8_t *)rfi_alloc(&dev->alloc, plan->n_buffers, 1, "buffer flags", err);
    if (!p->segments || !p->written) {
        rfi_null_plan_release((rf_prepared *)(void *)p);
        return RF_ERR_MEMORY;
    }
    for (uint32_t i = 0; i < plan->n_ops; i++)
        if (rf_op_begins_segment(plan, i)) p->segments[p->n_segments++] = i;
    p->segments[p->n_segments] = plan->n_ops;
    memcpy(segment_ops, p->segments, p->n_segments * sizeof *segment_ops);
    *n_segments = p->n_segments;
    *out = (rf_prepared *)(void *)p;
    return RF_OK;
}

static rf_result rfi_null_plan_run(rf_prepared *prepared, rf_queue *q, uint32_t first, uint32_t last,
                                   const rf_step *step, rf_ticket *ticket, rf_error *err) {
    rfi_null_plan *p = rfi_null_plan_of(prepared);
    RFI_UNUSED(q);
    memset(ticket, 0, sizeof *ticket);
    rf_result r = rfi_null_call(p->dev, "plan_run", err);
    if (r == RF_OK) r = rfi_null_check_rows(p, step, err);
    if (r == RF_OK && (first > last || last > p->n_segments))
        r = rfi_fail(err, RF_ERR_ARGUMENT, first, "null: segments %u to %u of %u", first, last, p->n_segments);
    if (r == RF_OK && first == 0) memset(p->written, 0, p->bind.plan->n_buffers);
    for (uint32_t i = r == RF_OK ? p->segments[first] : 0; r == RF_OK && i < p->segments[last]; i++)
        r = rfi_null_run_op(p, i, err);
    return r;
}

static rf_result rfi_null_times(rf_prepared *prepared, float *us, uint32_t n, rf_error *err) {
    RFI_UNUSED(prepared);
    RFI_UNUSED(err);
    if (us) memset(us, 0, n * sizeof *us);
    return RF_OK;
}

static const rf_device_api rfi_null_api = {
    .size_bytes = sizeof(rf_device_api),
    .version = RF_DEVICE_API_VERSION,
    .op_bytes = sizeof(rf_op),
    .step_bytes = sizeof(rf_step),
    .name = "null",
    .device_list = rfi_null_device_list,
    .device_open = rfi_null_device_open,
    .device_close = rfi_null_device_close,
    .device_info = rfi_null_device_info,
    .host_create = rfi_null_host_create,
    .host_release = rfi_null_host_release,
    .mem_create = rfi_null_mem_create,
    .mem_release = rfi_null_mem_release,
    .queue_create = rfi_null_queue_create,
    .queue_release = rfi_null_queue_release,
    .table_create = rfi_null_table_create,
    .table_release = rfi_null_table_release,
    .weight_layout = rfi_null_weight_layout,
    .weight_write = rfi_null_weight_write,
    .weight_clear = rfi_null_weight_clear,
    .mem_write = rfi_null_mem_write,
    .mem_read = rfi_null_mem_read,
    .mem_copy = rfi_null_mem_copy,
    .mem_fill = rfi_null_mem_fill,
    .mem_sum = rfi_null_mem_sum,
    .ticket_done = rfi_null_ticket_done,
    .ticket_wait = rfi_null_ticket_wait,
    .queue_after = rfi_cpu_queue_after,
    .op_supported = rfi_null_op_supported,
    .plan_bytes = rfi_null_plan_bytes,
    .plan_prepare = rfi_null_plan_prepare,
    .plan_run = rfi_null_plan_run,
    .plan_release = rfi_null_plan_release,
    .plan_stats = rfi_host_plan_stats,
    .times = rfi_null_times,
};

/* ==== 12 Model and session ============================================================================ >>session
 * A model is a file, its plan and its weights on one device. A session is the memory in which the plan runs: KV cache
 * and recurrent states of n_seq_max sequences, activations, logits. Everything is allocated at open. rf_session_eval
 * cuts rows into micro-batches and walks the plan's segments: load the segment's weights, run it,
 * check for a cancel. */

struct rf_model {
    rf_gguf *g;
    rf_device *device;
    rfi_config config;
    rf_plan plan;            /* the store's                                         */
    rfi_store *store;        /* shared with other models of this file on the device */
    rfi_log log;
    rf_string name;
    char *pre_tokenizer;     /* rf_model_desc.pre_tokenizer, or NULL                */
    rfi_cell tokenizer_cell;
    rf_tokenizer *tokenizer; /* guarded by tokenizer_cell                           */
    _Atomic uint32_t n_sessions;
};

typedef struct rfi_fallback rfi_fallback; /* experts computed by the CPU, below */

/* A slot that holds the recurrent states of all layers after the first `pos` tokens of a sequence. */
typedef struct rfi_snapshot {
    uint32_t pos;    /* 0: free                                               */
    uint32_t row;    /* row of the micro-batch in progress that writes it     */
    uint8_t written; /* 1: one of these rows writes it                        */
    uint8_t prompt;  /* 1: the state before the last token of the last prompt */
} rfi_snapshot;

/* Where an array of a session lies: zeroed or raw memory of the allocator, or pinned memory of the device. Raw memory
 * costs no page until it is used. */
enum { RFI_ZEROED, RFI_RAW, RFI_PINNED };

/* The arrays of a session in host memory: where, type, member, elements for model m and desc d. */
#define RFI_SESSION_ARRAYS(X)                                                                                          \
    X(RFI_ZEROED, uint64_t, buffer_offset, m->plan.n_buffers) /* bytes into scratch                                */  \
    X(RFI_ZEROED, uint64_t, state_offset, m->plan.n_states)   /* bytes into state                                  */  \
    X(RFI_ZEROED, uint32_t, state_cells, m->plan.n_states)    /* KV cache cells of a sequence                      */  \
    X(RFI_ZEROED, uint32_t, segment_ops, m->plan.n_ops + 1ull)   /* [n_segments + 1] first op                      */  \
    X(RFI_ZEROED, uint32_t, segment_first, m->plan.n_ops + 1ull) /* [n_segments + 1] first of segment_slots        */  \
    X(RFI_ZEROED, uint32_t, segment_slots, rfi_plan_uses(&m->plan)) /* weight slots, segment after segment         */  \
    /* weights that the eval in progress holds */                                                                      \
    X(RFI_ZEROED, uint8_t, is_expert, m->plan.n_weights) /* 1: of an expert                                        */  \
    X(RFI_ZEROED, uint8_t, pinned, m->plan.n_weights)    /* 1: resident, and pinned by the eval                    */  \
    X(RFI_ZEROED, uint8_t, chosen, m->plan.n_weights)    /* 1: of an expert that the segment in progress needs     */  \
    X(RFI_ZEROED, uint32_t, held, rfi_plan_uses(&m->plan))          /* [n_held] resident slots                     */  \
    X(RFI_ZEROED, uint32_t, held_streamed, rfi_plan_uses(&m->plan)) /* [n_held_streamed] slots of the segment      */  \
    X(RFI_ZEROED, uint32_t, rows_of, m->config.moe.n_experts) /* rows that chose each expert of the layer          */  \
    X(RFI_ZEROED, uint32_t, frames, m->config.moe.n_experts)  /* frames held of held_layer's experts, or RF_NONE   */  \
    X(RFI_PINNED, int32_t, route, 2ull * m->config.moe.n_used * d->n_batch) /* ids, weights; NULL: no experts      */  \
    /* sequences */                                                                                                    \
    X(RFI_RAW, int32_t, tokens, (uint64_t)d->n_seq_max * d->n_ctx) /* -1 where a row came as floats                */  \
    X(RFI_ZEROED, uint32_t, lengths, d->n_seq_max)      /* tokens held                                             */  \
    X(RFI_ZEROED, uint32_t, min_keep, d->n_seq_max)     /* shortest length, but for 0, that it can be cut to       */  \
    X(RFI_ZEROED, uint32_t, eval_lengths, d->n_seq_max) /* lengths as the eval in progress goes on                 */  \
    X(RFI_ZEROED, uint32_t, eval_ends, d->n_seq_max)    /* lengths after all rows of that eval                     */  \
    X(RFI_ZEROED, uint32_t, batch_begins, d->n_seq_max) /* lengths before its micro-batch in progress              */  \
    X(RFI_ZEROED, rfi_snapshot, snapshots, (uint64_t)d->n_seq_max * rfi_session_n_slots(m, d))                         \
    /* rows of a micro-batch and what comes back */                                                                    \
    X(RFI_ZEROED, rf_step_row, rows, d->n_batch)                                                                       \
    X(RFI_ZEROED, rf_token_row, forward_rows, d->n_batch)        /* of rf_session_forward                          */  \
    X(RFI_ZEROED, uint32_t, logit_rows, d->n_batch)              /* [n_logits of the step] its rows                */  \
    X(RFI_PINNED, float, embeddings, (uint64_t)d->n_batch * m->plan.n_embd) /* [n_batch, n_embd], staging as well  */  \
    X(RFI_PINNED, float, logits, (uint64_t)d->n_logits_max * m->plan.n_vocab)                                          \
    X(RFI_PINNED, int32_t, argmax, d->n_logits_max)

struct rf_session {
    rf_model *m;
    rf_session_desc desc; /* resolved: no zeros left                                         */
    rf_plan plan;         /* the model's, but for ops that depend on n_ctx                   */
    rf_op *ops;           /* its ops; NULL: the model's                                      */
    rf_mem scratch, state;
    rf_queue *queue;
    rf_prepared *prepared;
    uint32_t n_segments, n_held, n_held_streamed;
    uint32_t n_slots;             /* snapshots of a sequence; 0: the model is not recurrent  */
    rfi_expert_layer *held_layer; /* whose frames are held; NULL: none are                   */
    int holds_experts;            /* 1: all experts are held, so none is pinned              */
    rfi_fallback *fallback;       /* experts on the CPU; NULL: none                          */
    uint64_t loading_cancels;     /* of the store, when the eval in progress began           */
    uint32_t rollback;            /* length of sequence 0 if rf_session_forward fails        */
    uint32_t n_logits;            /* rows of the last eval that asked for logits             */
    uint32_t logits_copied;       /* 1: logits holds them                                    */
    _Atomic uint32_t n_users;     /* schedulers                                              */
    _Atomic int cancel;
#define RFI_SESSION_MEMBER(where, type, name, count) type *name;
    RFI_SESSION_ARRAYS(RFI_SESSION_MEMBER)
#undef RFI_SESSION_MEMBER
};

static const rf_allocator *rfi_session_allocator(const rf_session *s) { return rfi_gguf_allocator(s->m->g); }

/* ---- sizes ---- */

#define RFI_MAX_SNAPSHOTS 1024u

/* Snapshot slots of a sequence: those that it keeps, and three that are in use: the state before the eval in progress,
 * the one before its micro-batch, and the one that this leaves. */
static uint32_t rfi_session_n_slots(const rf_model *m, const rf_session_desc *d) {
    return m->config.recurrent.kind ? d->n_snapshots + 3 : 0;
}

static rf_result rfi_session_resolve(const rf_model *m, const rf_session_desc *desc, rf_session_desc *out,
                                     rf_error *err) {
    *out = desc ? *desc : (rf_session_desc){0};
    if (out->n_ctx == 0) out->n_ctx = (uint32_t)rfi_min_u64(m->config.n_ctx_train, 4096);
    if (out->n_seq_max == 0) out->n_seq_max = 1;
    uint64_t cells = (uint64_t)out->n_ctx * out->n_seq_max;
    if (out->n_batch == 0) out->n_batch = (uint32_t)rfi_min_u64(512, cells);
    if (out->n_logits_max == 0) out->n_logits_max = out->n_seq_max;
    if (cells > INT32_MAX || out->n_batch > INT32_MAX || out->n_logits_max > INT32_MAX)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0,
                        "session: n_ctx %u x n_seq_max %u, n_batch %u, n_logits_max %u: at most 2147483647 each",
                        out->n_ctx, out->n_seq_max, out->n_batch, out->n_logits_max);
    if (m->config.n_positions && out->n_ctx > m->config.n_positions)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "session: n_ctx %u, the model has learned %u positions", out->n_ctx,
                        m->config.n_positions);
    if (out->n_snapshots == 0) out->n_snapshots = out->n_seq_max > 1 ? 1 : 4;
    if (out->n_snapshots > RFI_MAX_SNAPSHOTS)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "session: n_snapshots %u: at most %u", out->n_snapshots,
                        RFI_MAX_SNAPSHOTS);
    return rfi_cache_check(&m->plan, out->cache_type, err);
}

/* KV cache cells of a sequence in a state. With a sliding window they are a ring buffer, which still holds what the
 * first row of a micro-batch sees after its last row is written. */
static uint32_t rfi_session_state_cells(const rf_session_desc *d, const rf_plan_state *s) {
    const uint64_t needed = (uint64_t)s->window + d->n_batch - 1;
    const uint64_t n = (needed + RF_STATE_CELLS - 1) / RF_STATE_CELLS * RF_STATE_CELLS;
    return s->window == 0 || d->swa_full || n >= d->n_ctx ? d->n_ctx : (uint32_t)n;
}

/* Reserve `n` x `width` elements at *end, which moves on to a multiple of 256; 0 if it does not fit 64 bits. */
static int rfi_place(uint64_t *end, uint64_t *offset, uint64_t n, uint64_t width, uint64_t element_bytes) {
    uint64_t bytes;
    *offset = *end;
    return rfi_mul(n, width, &bytes) && rfi_mul(bytes, element_bytes, &bytes) && rfi_add(*end, bytes, end) &&
           rfi_align_up(*end, RF_STATE_ALIGN, end);
}

/* Bytes of a session's arrays in host memory; 0 if they do not fit 64 bits. */
static int rfi_session_host_bytes(const rf_model *m, const rf_session_desc *d, uint64_t *bytes) {
    uint64_t n;
    int fits = 1;
    *bytes = 0;
#define RFI_SESSION_BYTES(where, type, name, count) \
    fits = fits && rfi_mul(count, sizeof(type), &n) && rfi_add(*bytes, n, bytes);
    RFI_SESSION_ARRAYS(RFI_SESSION_BYTES)
#undef RFI_SESSION_BYTES
    return fits;
}

/* Offsets of buffers and states (arrays, or NULL), and the bytes of all in out. */
static rf_result rfi_session_layout(const rf_model *m, const rf_session_desc *d, uint64_t *buffer_offset,
                                    uint64_t *state_offset, rf_forecast *out, rf_error *err) {
    const rf_plan *plan = &m->plan;
    uint64_t at, unused;
    int fits = 1;
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < plan->n_buffers; i++) {
        const rf_plan_buffer *b = &plan->buffers[i];
        fits &= rfi_place(&out->scratch_bytes, &at, b->rows == RF_ROWS_LOGITS ? d->n_logits_max : d->n_batch,
                          b->width, sizeof(float));
        if (buffer_offset) buffer_offset[i] = at;
    }
    for (uint32_t i = 0; i < plan->n_states; i++) {
        const rf_plan_state *s = &plan->states[i];
        uint64_t cells = (uint64_t)rfi_session_state_cells(d, s) * d->n_seq_max * s->n_kv_heads; /* < 2^31 * 2^14 */
        if (s->width) {
            fits &= rfi_place(&out->kv_bytes, &at, (uint64_t)rfi_session_n_slots(m, d) * d->n_seq_max, s->width, 4);
        } else {
            fits &= rfi_place(&out->kv_bytes, &at, cells, rf_cache_row_bytes(d->cache_type, s->head_dim), 1);
            fits &= rfi_place(&out->kv_bytes, &unused, cells, rf_cache_row_bytes(d->cache_type, s->head_dim_v), 1);
        }
        if (state_offset) state_offset[i] = at;
    }
    fits &= rfi_session_host_bytes(m, d, &out->host_bytes);
    return fits ? RF_OK : rfi_fail(err, RF_ERR_ARGUMENT, 0, "session: sizes do not fit 64 bits");
}

/* ---- open and close ---- */

static void rfi_fallback_close(rf_session *s);
static rf_result rfi_fallback_open(rf_session *s, rf_error *err);

static rf_result rfi_session_alloc(rf_session *s, int where, uint64_t n, uint64_t element_bytes, const char *what,
                                   void **out, rf_error *err) {
    const rf_allocator *alloc = rfi_session_allocator(s);
    const uint64_t bytes = n * element_bytes; /* rfi_session_host_bytes has checked it */
    if (where == RFI_PINNED) return n ? s->m->device->api->host_create(s->m->device->dev, bytes, out, err) : RF_OK;
    *out = where == RFI_RAW ? rfi_alloc_aligned(alloc, bytes, 64, what, err)
                            : rfi_alloc(alloc, n, element_bytes, what, err);
    return *out ? RF_OK : RF_ERR_MEMORY;
}

static rf_result rfi_session_alloc_arrays(rf_session *s, rf_error *err) {
    const rf_model *m = s->m;
    const rf_session_desc *d = &s->desc;
    rf_result r = RF_OK;
#define RFI_SESSION_ALLOC(where, type, name, count)                                           \
    if (r == RF_OK) {                                                                         \
        void *p = NULL;                                                                       \
        r = rfi_session_alloc(s, where, count, sizeof(type), "the session's " #name, &p, err); \
        s->name = (type *)p;                                                                  \
    }
    RFI_SESSION_ARRAYS(RFI_SESSION_ALLOC)
#undef RFI_SESSION_ALLOC
    s->n_slots = rfi_session_n_slots(m, d);
    return r;
}

static void rfi_session_free(rf_session *s, int where, void *p) {
    const rf_allocator *alloc = rfi_session_allocator(s);
    if (where == RFI_RAW) rfi_free_aligned(alloc, p);
    else if (where == RFI_ZEROED) rfi_free(alloc, p);
    else if (p) s->m->device->api->host_release(s->m->device->dev, p);
}

static void rfi_session_release(rf_session *s) {
    const rf_device_api *api = s->m->device->api;
    rf_dev *dev = s->m->device->dev;
    if (s->prepared) api->plan_release(s->prepared);
    if (s->queue) api->queue_release(s->queue);
    rfi_fallback_close(s); /* after the queue, which copies from and to its memory */
    if (s->state.base) api->mem_release(dev, &s->state);
    if (s->scratch.base) api->mem_release(dev, &s->scratch);
#define RFI_SESSION_FREE(where, type, name, count) rfi_session_free(s, where, s->name);
    RFI_SESSION_ARRAYS(RFI_SESSION_FREE)
#undef RFI_SESSION_FREE
    rfi_free(rfi_session_allocator(s), s->ops);
    rfi_free(rfi_session_allocator(s), s);
}

/* List the weights that each segment needs, each once. No weight is in two segments of one layer. */
static void rfi_session_segment_slots(rf_session *s) {
    uint32_t n = 0;
    for (uint32_t slot = 0; slot < s->m->plan.n_weights; slot++)
        s->is_expert[slot] = s->m->plan.weights[slot].n_experts > 0;
    s->segment_ops[s->n_segments] = s->m->plan.n_ops;
    for (uint32_t segment = 0; segment < s->n_segments; segment++) {
        s->segment_first[segment] = n;
        n += rfi_ops_slots(&s->m->plan, s->segment_ops[segment], s->segment_ops[segment + 1], s->segment_slots + n);
    }
    s->segment_first[s->n_segments] = n;
}

/* Choose the rope factors. A model with two sets (longrope) takes the long one if n_ctx, rounded up to 256, is longer
 * than its original context: the answer depends on n_ctx, as llama.cpp's does. */
static rf_result rfi_session_plan(const rf_model *m, const rf_session_desc *d, rf_plan *out, rf_op **ops,
                                  rf_error *err) {
    const rf_plan *plan = &m->plan;
    uint32_t n_choices = 0;
    *out = *plan;
    *ops = NULL;
    for (uint32_t i = 0; i < plan->n_ops; i++)
        n_choices += plan->ops[i].kind == RF_OP_ROPE && plan->ops[i].factor != RF_NONE;
    if (((uint64_t)d->n_ctx + 255) / 256 * 256 <= m->config.rope_n_ctx_original || n_choices == 0) return RF_OK;
    rf_op *own = (rf_op *)rfi_alloc(rfi_gguf_allocator(m->g), plan->n_ops, sizeof *own, "the session's ops", err);
    if (!own) return RF_ERR_MEMORY;
    memcpy(own, plan->ops, plan->n_ops * sizeof *own);
    for (uint32_t i = 0; i < plan->n_ops; i++)
        if (own[i].kind == RF_OP_ROPE && own[i].factor != RF_NONE) own[i].weight = own[i].factor;
    out->ops = *ops = own;
    return RF_OK;
}

/* The arguments of plan_prepare that do not depend on the session's memory. */
static rf_plan_bind rfi_session_bind(const rf_model *m, const rf_session_desc *d, const rf_plan *plan) {
    return (rf_plan_bind){.plan = plan, .n_ctx = d->n_ctx, .n_seq = d->n_seq_max, .n_batch = d->n_batch,
                          .n_logits = d->n_logits_max, .cache_type = d->cache_type,
                          .n_slots = rfi_session_n_slots(m, d) * d->n_seq_max};
}

ROCMFORGE_API rf_result rf_model_forecast(const rf_model *m, const rf_session_desc *desc, rf_forecast *out,
                                          rf_error *err) {
    rf_session_desc d;
    rf_plan plan;
    rf_op *ops = NULL;
    rfi_clear(err);
    if (!m || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_forecast: model or out is NULL");
    rf_result r = rfi_session_resolve(m, desc, &d, err);
    if (r == RF_OK) r = rfi_session_layout(m, &d, NULL, NULL, out, err);
    if (r == RF_OK) r = rfi_session_plan(m, &d, &plan, &ops, err);
    if (r == RF_OK) {
        const rf_plan_bind bind = rfi_session_bind(m, &d, &plan);
        r = m->device->api->plan_bytes(m->device->dev, &bind, &out->plan_bytes, err);
    }
    rfi_free(rfi_gguf_allocator(m->g), ops);
    return r == RF_OK ? rfi_store_forecast(m->store, out, err) : r;
}

static rf_result rfi_session_build(rf_session *s, rf_error *err) {
    rf_model *m = s->m;
    const rf_device_api *api = m->device->api;
    rf_dev *dev = m->device->dev;
    rf_forecast size;
    rf_result r = rfi_session_layout(m, &s->desc, NULL, NULL, &size, err);
    if (r == RF_OK) r = rfi_session_plan(m, &s->desc, &s->plan, &s->ops, err);
    if (r == RF_OK) r = rfi_session_alloc_arrays(s, err);
    if (r == RF_OK) r = rfi_session_layout(m, &s->desc, s->buffer_offset, s->state_offset, &size, err);
    for (uint32_t i = 0; r == RF_OK && i < m->plan.n_states; i++)
        s->state_cells[i] = rfi_session_state_cells(&s->desc, &m->plan.states[i]);
    if (r == RF_OK) r = api->mem_create(dev, size.scratch_bytes, &s->scratch, err);
    if (r == RF_OK) r = api->mem_create(dev, rfi_max_u64(size.kv_bytes, 1), &s->state, err);
    if (r == RF_OK) r = api->queue_create(dev, &s->queue, err);
    if (r != RF_OK) return r;
    rf_plan_bind bind = rfi_session_bind(m, &s->desc, &s->plan);
    bind.table = m->store->table;
    bind.scratch = s->scratch;
    bind.state = s->state;
    bind.buffer_offset = s->buffer_offset;
    bind.state_offset = s->state_offset;
    bind.state_cells = s->state_cells;
    r = api->plan_prepare(dev, &bind, s->segment_ops, &s->n_segments, &s->prepared, err);
    if (r == RF_OK) rfi_session_segment_slots(s);
    if (r == RF_OK) r = rfi_fallback_open(s, err);
    return r;
}

ROCMFORGE_API rf_result rf_session_open(rf_model *m, const rf_session_desc *desc, rf_session **out, rf_error *err) {
    rfi_clear(err);
    if (out) *out = NULL;
    if (!m || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_open: model or out is NULL");
    rf_session *s = (rf_session *)rfi_alloc(rfi_gguf_allocator(m->g), 1, sizeof *s, "a session", err);
    if (!s) return RF_ERR_MEMORY;
    s->m = m;
    rf_result r = rfi_session_resolve(m, desc, &s->desc, err);
    if (r == RF_OK) r = rfi_session_build(s, err);
    if (r == RF_OK && m->store->desc.load_policy == RF_LOAD_PRELOAD) r = rfi_store_preload(m->store, NULL, 0, err);
    if (r != RF_OK) {
        rfi_session_release(s);
        return r;
    }
    if (s->desc.n_ctx > m->config.n_ctx_train)
        rfi_log_text(&m->log, RF_LOG_WARNING, "n_ctx %u is above the %u tokens the model was trained for",
                     s->desc.n_ctx, m->config.n_ctx_train);
    atomic_fetch_add(&m->n_sessions, 1);
    *out = s;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_close(rf_session *s, rf_error *err) {
    rfi_clear(err);
    if (!s) return RF_OK;
    rf_model *m = s->m;
    if (atomic_load(&s->n_users))
        return rfi_fail(err, RF_ERR_BUSY, 0, "session of %s: a scheduler uses it", rfi_gguf_path(m->g));
    rfi_session_release(s);
    atomic_fetch_sub(&m->n_sessions, 1);
    return RF_OK;
}

/* ---- recurrent states ----
 * A sequence has n_slots snapshot slots; each holds the states of all layers after some number of its tokens. A step
 * reads one slot and writes others, so that no state has to be copied: the state before an eval stays until the eval
 * has succeeded, and those of earlier evals stay as long as there is room, to be cut back to. Devices number the slots
 * of all sequences from 1. */

#define RFI_SNAPSHOT_TOKENS 256u

static rfi_snapshot *rfi_snapshots_of(const rf_session *s, uint32_t seq) {
    return s->snapshots + (uint64_t)seq * s->n_slots;
}

/* Number of the slot that holds the state after pos tokens; 0: none does, or pos is 0. */
static uint32_t rfi_snapshot_find(const rf_session *s, uint32_t seq, uint32_t pos) {
    for (uint32_t i = 0; pos && i < s->n_slots; i++)
        if (rfi_snapshots_of(s, seq)[i].pos == pos) return seq * s->n_slots + i + 1;
    return 0;
}

/* Offset of a slot in the session's state memory, bytes. */
static uint64_t rfi_snapshot_offset(const rf_session *s, uint32_t state, uint32_t slot) {
    return s->state_offset[state] + (slot - 1) * 4ull * s->m->plan.states[state].width;
}

/* Free the slots after n tokens. Returns the length, at most n, that the sequence can be cut back to. */
static uint32_t rfi_snapshots_cut(rf_session *s, uint32_t seq, uint32_t n) {
    uint32_t last = 0;
    if (s->n_slots == 0) return n;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        rfi_snapshot *slot = &rfi_snapshots_of(s, seq)[i];
        if (slot->pos > n) memset(slot, 0, sizeof *slot);
        else if (slot->pos > last) last = slot->pos;
    }
    return last;
}

/* Tokens between the neighbours of the state after pos tokens: the gap that its loss would leave. */
static uint32_t rfi_snapshot_gap(const rf_session *s, uint32_t seq, uint32_t pos, uint32_t end) {
    uint32_t before = 0, after = end;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        const uint32_t at = rfi_snapshots_of(s, seq)[i].pos;
        if (at < pos && at > before) before = at;
        if (at > pos && at < after) after = at;
    }
    return after - before;
}

/* Choose a slot for the state after pos tokens, which a row of the micro-batch that begins at `begin` tokens will
 * write: a free one, else the one whose loss leaves the smallest gap; the end of a prompt goes last. Never one that is
 * needed: where the micro-batch begins, and where the eval rolls back to. rfi_session_n_slots leaves one more. */
static uint32_t rfi_snapshot_take(rf_session *s, uint32_t seq, uint32_t pos, uint32_t begin, uint32_t row) {
    rfi_snapshot *slots = rfi_snapshots_of(s, seq), *best = NULL;
    uint64_t min_loss = UINT64_MAX;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        const uint32_t at = slots[i].pos;
        if (at && (at == begin || at == s->lengths[seq] || (seq == 0 && at == s->rollback))) continue;
        const uint64_t loss = at == 0 ? 0 : rfi_snapshot_gap(s, seq, at, pos) + (slots[i].prompt ? 1ull << 32 : 0);
        if (loss < min_loss) min_loss = loss, best = &slots[i];
    }
    if (best->written) s->rows[best->row].to = 0;
    *best = (rfi_snapshot){.pos = pos, .row = row, .written = 1};
    return (uint32_t)(best - s->snapshots) + 1;
}

/* Choose the slots that rows read and write: each sequence's last state, and those worth keeping before it. */
static void rfi_snapshots_plan(rf_session *s, uint32_t n_rows) {
    if (s->n_slots == 0) return;
    for (uint64_t i = 0; i < (uint64_t)s->n_slots * s->desc.n_seq_max; i++) s->snapshots[i].written = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        rf_step_row *row = &s->rows[i];
        const uint32_t seq = (uint32_t)row->seq, pos = (uint32_t)row->pos + 1;
        uint32_t begin = s->batch_begins[seq];
        const int prompt = pos + 1 == s->eval_ends[seq]; /* not its last */
        if (row->pos == (int32_t)begin) row->from = rfi_snapshot_find(s, seq, begin);
        if (pos != s->eval_lengths[seq] && !prompt && pos % RFI_SNAPSHOT_TOKENS) continue;
        row->to = rfi_snapshot_take(s, seq, pos, begin, i);
        for (uint32_t k = 0; prompt && k < s->n_slots; k++) {
            rfi_snapshot *slot = &rfi_snapshots_of(s, seq)[k];
            slot->prompt = slot->pos == pos;
        }
    }
}

/* ---- the forward pass ---- */

/* Check every row before anything changes. s->eval_lengths receives the lengths that sequences will have. */
static rf_result rfi_eval_check(rf_session *s, const rf_token_row *rows, uint32_t n_rows, rf_error *err) {
    const rf_session_desc *d = &s->desc;
    uint32_t n_logits = 0, n_vocab = s->m->plan.n_vocab;
    memcpy(s->eval_lengths, s->lengths, d->n_seq_max * sizeof *s->eval_lengths);
    for (uint32_t i = 0; i < n_rows; i++) {
        const rf_token_row *row = &rows[i];
        if (row->seq < 0 || (uint32_t)row->seq >= d->n_seq_max)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "rf_session_eval: row %u: sequence %d, want 0 to %u", i, row->seq,
                            d->n_seq_max - 1);
        if (!row->embedding && (row->token < 0 || (uint32_t)row->token >= n_vocab))
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "rf_session_eval: row %u: token %d, want 0 to %u", i, row->token,
                            n_vocab - 1);
        if (row->embedding && s->m->config.n_layer_input)
            return rfi_fail(err, RF_ERR_UNSUPPORTED, i,
                            "rf_session_eval: row %u: every layer of this model looks up the token, "
                            "an embedding has none",
                            i);
        if (row->pos != RF_POS_NEXT && (row->pos < 0 || (uint32_t)row->pos != s->eval_lengths[row->seq]))
            return rfi_fail(err, RF_ERR_ARGUMENT, i,
                            "rf_session_eval: row %u: position %d, want %u, the length of sequence %d", i, row->pos,
                            s->eval_lengths[row->seq], row->seq);
        if (s->eval_lengths[row->seq] >= d->n_ctx)
            return rfi_fail(
                err, RF_ERR_CONTEXT_FULL, i,
                "rf_session_eval: row %u: sequence %d is full: n_ctx is %u, it holds %u and these rows add more", i,
                row->seq, d->n_ctx, s->lengths[row->seq]);
        s->eval_lengths[row->seq]++;
        n_logits += row->want_logits != 0;
    }
    if (n_logits > d->n_logits_max)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_eval: %u rows want logits, n_logits_max is %u", n_logits,
                        d->n_logits_max);
    return RF_OK;
}

/* Read bytes of the scratch memory after all that was submitted to the queue so far. */
static rf_result rfi_session_read(rf_session *s, uint64_t at, void *dst, uint64_t n_bytes, rf_error *err) {
    const rf_device_api *api = s->m->device->api;
    rf_ticket ticket = {0};
    rf_result r = api->mem_read(s->queue, &s->scratch, at, dst, n_bytes, &ticket, err);
    return r == RF_OK ? api->ticket_wait(&ticket, RFI_WAIT_MS, err) : r;
}

/* Count how many of the step's rows chose each expert of an op, into s->rows_of. Reading the route waits for the
 * segment before, which computes it. */
static rf_result rfi_eval_read_route(rf_session *s, const rf_op *op, uint32_t n_rows, rf_error *err) {
    const uint32_t width = s->m->plan.buffers[op->in2].width;
    rf_result r = rfi_session_read(s, s->buffer_offset[op->in2], s->route, (uint64_t)n_rows * width * sizeof *s->route,
                                   err);
    memset(s->rows_of, 0, op->experts.n_experts * sizeof *s->rows_of);
    for (uint64_t k = 0; r == RF_OK && k < (uint64_t)n_rows * op->experts.n_used; k++) {
        const int32_t id = s->route[k / op->experts.n_used * width + k % op->experts.n_used];
        if (id < 0 || (uint32_t)id >= op->experts.n_experts)
            return rfi_fail(err, RF_ERR_DEVICE, (uint64_t)(op - s->m->plan.ops), "op %u: expert %d of %u was chosen",
                            (uint32_t)(op - s->m->plan.ops), id, op->experts.n_experts);
        s->rows_of[id]++;
    }
    return r;
}

/* No run uses the experts in the frames that the eval holds: release them. Reports copies that failed. */
static rf_result rfi_eval_release_experts(rf_session *s, rf_result r, rf_error *err) {
    rfi_store *store = s->m->store;
    rfi_expert_layer *layer = s->held_layer;
    if (!layer) return r;
    for (uint32_t e = 0; e < layer->n_experts; e++)
        for (uint32_t k = 0; s->frames[e] != RF_NONE && k < layer->n_weights; k++) {
            const uint32_t slot = rfi_expert_slot(layer, k, e);
            s->chosen[slot] = 0;
            if (!s->pinned[slot]) continue;
            rf_result arrived = rfi_tensor_arrived(store, slot, r == RF_OK ? err : NULL);
            if (r == RF_OK) r = arrived;
            rfi_store_unpin(store, slot);
            s->pinned[slot] = 0;
        }
    rfi_cache_release(store, layer, s->frames);
    s->held_layer = NULL;
    return r;
}

/* ---- experts computed by the CPU: the fallback ----
 * An expert that is not loaded and that few rows chose is computed by the CPU, where the file is mapped, in place of
 * being loaded. For the device such a choice becomes one of an expert that is loaded, with weight 0. The CPU's result
 * is added to the residual stream before the device adds the results of the other experts to it. */

#define RFI_FALLBACK_ROWS  8u  /* of a step, at most              */
#define RFI_FALLBACK_PAIRS 32u /* of a row and an expert, at most */

struct rfi_fallback {
    rf_dev *dev; /* CPU device, not ours */
    rf_table *table;
    rf_prepared *prepared;
    rf_plan plan; /* the ops from each ROUTE to its MIX, with one choice for each row */
    rf_op *ops;
    rf_plan_buffer *buffers;
    uint64_t *buffer_offset;
    uint32_t *segment_ops;
    uint32_t n_segments;
    rf_mem scratch;
    float *in, *x; /* in one pinned block, [RFI_FALLBACK_ROWS, n_embd]: input of the experts, residual stream */
    uint8_t is_fallback[RF_MAX_EXPERTS]; /* 1: the CPU computes it in this step */
    uint32_t row[RFI_FALLBACK_PAIRS];    /* of the step, for each pair          */
    rf_step_row rows[RFI_FALLBACK_PAIRS];
};

static void rfi_fallback_close(rf_session *s) {
    rfi_fallback *a = s->fallback;
    const rf_allocator *alloc = rfi_session_allocator(s);
    rf_device *d = s->m->device;
    if (!a) return;
    if (a->prepared) rfi_cpu_api.plan_release(a->prepared);
    if (a->table) rfi_cpu_api.table_release(a->table);
    if (a->scratch.base) rfi_cpu_api.mem_release(a->dev, &a->scratch);
    if (a->in) d->api->host_release(d->dev, a->in);
    rfi_free(alloc, a->ops);
    rfi_free(alloc, a->buffers);
    rfi_free(alloc, a->buffer_offset);
    rfi_free(alloc, a->segment_ops);
    rfi_free(alloc, a);
    s->fallback = NULL;
}

/* Append the ops after a ROUTE up to its MIX, with one choice for each row. 0: their form is not supported. */
static int rfi_fallback_ops(rfi_fallback *a, const rf_plan *plan, uint32_t route) {
    const uint32_t n_used = plan->ops[route].route.n_used, first = a->plan.n_ops;
    for (uint32_t i = route + 1; i < plan->n_ops; i++) {
        const uint32_t kind = plan->ops[i].kind;
        rf_op *op = &a->ops[a->plan.n_ops++];
        *op = plan->ops[i];
        if (kind == RF_OP_EXPERTS) {
            op->experts.n_used = 1;
            a->buffers[op->out].width = op->experts.n_out;
            a->buffers[op->in2].width = 2;
        } else if (kind == RF_OP_GLU) {
            op->glu.n /= n_used;
        } else {
            op->mix.n_used = 1; /* any other kind is refused here */
            return kind == RF_OP_MIX && op->in2 == plan->ops[route].out && (op->flags & RF_OP_ACCUMULATE) &&
                   a->ops[first].kind == RF_OP_EXPERTS && plan->buffers[op->out].width == plan->n_embd &&
                   plan->buffers[a->ops[first].in].width == plan->n_embd;
        }
    }
    return 0;
}

static rf_result rfi_fallback_plan(rf_session *s, rf_error *err) {
    rfi_fallback *a = s->fallback;
    const rf_plan *plan = &s->m->plan;
    int fits = 1;
    a->plan = *plan;
    a->plan.ops = a->ops;
    a->plan.buffers = a->buffers;
    a->plan.n_ops = a->plan.n_states = 0;
    memcpy(a->buffers, plan->buffers, plan->n_buffers * sizeof *a->buffers);
    for (uint32_t i = 0; fits && i < plan->n_ops; i++)
        if (plan->ops[i].kind == RF_OP_ROUTE) fits = rfi_fallback_ops(a, plan, i);
    if (!fits)
        return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "session: experts of %s models cannot be computed by the CPU apart",
                        s->m->config.arch->name);
    for (uint32_t i = 0; i < plan->n_buffers; i++) {
        const uint64_t row = (uint64_t)a->buffers[i].width * sizeof(float);
        int used = 0;
        for (const rf_op *op = a->ops; op < a->ops + a->plan.n_ops; op++)
            used |= op->in == i || op->in2 == i || op->out == i;
        a->buffer_offset[i] = a->scratch.size_bytes;
        if (used) a->scratch.size_bytes += (row * RFI_FALLBACK_PAIRS + 255) / 256 * 256;
    }
    return RF_OK;
}

static rf_result rfi_fallback_weights(rf_session *s, rf_error *err) {
    rfi_fallback *a = s->fallback;
    rf_result r = RF_OK;
    const uint32_t n = rfi_ops_slots(&a->plan, 0, a->plan.n_ops, s->held); /* not in use outside of evals */
    for (uint32_t i = 0; r == RF_OK && i < n; i++) {
        const uint32_t slot = s->held[i];
        const void *map = rfi_gguf_map(s->m->g, &s->m->store->tensors[slot].info);
        rf_ticket none;
        if (!map || (uintptr_t)map % 4)
            return rfi_fail(err, RF_ERR_UNSUPPORTED, slot, "%s: expert_cpu_below needs the file mapped",
                            rfi_gguf_path(s->m->g));
        r = rfi_cpu_api.weight_write(a->table, NULL, &(rf_weight_part){.slot = slot, .src = map}, &none, err);
    }
    return r;
}

/* The CPU device that computes for all sessions on d: d itself, or one opened when the first session asks. */
static rf_result rfi_device_fallback(rf_device *d, rf_dev **out, rf_error *err) {
    rf_result r = RF_OK;
    if (d->api->device_open == rfi_cpu_api.device_open) {
        *out = d->dev;
        return RF_OK;
    }
    rfi_monitor_lock(&d->monitor);
    const rf_device_desc desc = {.allocator = d->alloc};
    if (!d->fallback_dev) r = rfi_cpu_api.device_open(0, &desc, &d->fallback_dev, err);
    *out = d->fallback_dev;
    rfi_monitor_unlock(&d->monitor);
    return r;
}

/* Open the fallback if the model asks for it (rf_model_desc.expert_cpu_below). */
static rf_result rfi_fallback_open(rf_session *s, rf_error *err) {
    const rf_allocator *alloc = rfi_session_allocator(s);
    const rf_plan *plan = &s->m->plan;
    rf_device *d = s->m->device;
    const uint64_t n = (uint64_t)RFI_FALLBACK_ROWS * plan->n_embd;
    if (s->m->store->desc.expert_cpu_below == 0 || s->m->store->cache.n_layers == 0) return RF_OK;
    rfi_fallback *a = s->fallback = (rfi_fallback *)rfi_alloc(alloc, 1, sizeof *a, "experts on the CPU", err);
    if (!a) return RF_ERR_MEMORY;
    a->ops = (rf_op *)rfi_alloc(alloc, plan->n_ops, sizeof *a->ops, "experts on the CPU", err);
    a->buffers = (rf_plan_buffer *)rfi_alloc(alloc, plan->n_buffers, sizeof *a->buffers, "experts on the CPU", err);
    a->buffer_offset =
        (uint64_t *)rfi_alloc(alloc, plan->n_buffers, sizeof *a->buffer_offset, "experts on the CPU", err);
    a->segment_ops = (uint32_t *)rfi_alloc(alloc, plan->n_ops, sizeof *a->segment_ops, "experts on the CPU", err);
    if (!a->ops || !a->buffers || !a->buffer_offset || !a->segment_ops) return RF_ERR_MEMORY;
    void *in = NULL;
    rf_result r = rfi_fallback_plan(s, err);
    const uint64_t scratch_bytes = a->scratch.size_bytes;
    if (r == RF_OK) r = rfi_device_fallback(d, &a->dev, err);
    if (r == RF_OK) r = rfi_cpu_api.mem_create(a->dev, scratch_bytes, &a->scratch, err);
    if (r == RF_OK) r = rfi_cpu_api.table_create(a->dev, &a->plan, &a->table, err);
    if (r == RF_OK) r = rfi_fallback_weights(s, err);
    if (r == RF_OK) r = d->api->host_create(d->dev, 2 * n * sizeof(float), &in, err);
    if (r != RF_OK) return r;
    a->in = (float *)in;
    a->x = a->in + n;
    const rf_plan_bind bind = {.plan = &a->plan, .table = a->table, .scratch = a->scratch, .n_ctx = 1, .n_seq = 1,
                               .buffer_offset = a->buffer_offset, .n_batch = RFI_FALLBACK_PAIRS, .n_logits = 1};
    return rfi_cpu_api.plan_prepare(a->dev, &bind, a->segment_ops, &a->n_segments, &a->prepared, err);
}

static float *rfi_fallback_row(const rfi_fallback *a, uint32_t buffer, uint32_t row) {
    return (float *)(void *)((char *)a->scratch.base + a->buffer_offset[buffer]) +
           (uint64_t)row * a->buffers[buffer].width;
}

/* Move the CPU's pairs of a row and an expert out of s->route; `stand_in` takes their place, with weight 0. */
static uint32_t rfi_fallback_take_pairs(rf_session *s, const rf_op *experts, uint32_t n_rows, uint32_t stand_in) {
    rfi_fallback *a = s->fallback;
    const uint32_t n_used = experts->experts.n_used, width = s->m->plan.buffers[experts->in2].width;
    uint32_t n = 0;
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t k = 0; k < n_used; k++) {
            int32_t *id = s->route + row * width + k, *weight = id + n_used;
            if (!a->is_fallback[*id]) continue;
            float *pair = rfi_fallback_row(a, experts->in2, n);
            memcpy(pair, id, sizeof *id);
            memcpy(pair + 1, weight, sizeof *weight);
            a->row[n++] = row;
            *id = (int32_t)stand_in;
            *weight = 0; /* the bits of 0.0f */
        }
    return n;
}

/* Compute the fallback's pairs, and write back the residual stream with their results and the route without them. */
static rf_result rfi_fallback_run(rf_session *s, const rf_op *experts, uint32_t n_rows, rf_error *err) {
    rfi_fallback *a = s->fallback;
    const rf_device_api *api = s->m->device->api;
    const rfi_expert_layer *layer = s->m->store->tensors[experts->weight].expert_layer;
    const uint32_t segment = (uint32_t)(layer - s->m->store->cache.layers), n_embd = s->m->plan.n_embd,
                   end = segment + 1 < a->n_segments ? a->segment_ops[segment + 1] : a->plan.n_ops,
                   x = a->ops[end - 1].out, route_width = s->m->plan.buffers[experts->in2].width;
    const uint64_t bytes = (uint64_t)n_rows * n_embd * sizeof(float);
    uint32_t stand_in = 0;
    rf_ticket ticket = {0};
    rf_result r = rfi_gguf_unchanged(s->m->g, &s->m->store->tensors[experts->weight].info, err);
    if (r == RF_OK)
        r = api->mem_read(s->queue, &s->scratch, s->buffer_offset[experts->in], a->in, bytes, &ticket, err);
    if (r == RF_OK) r = api->mem_read(s->queue, &s->scratch, s->buffer_offset[x], a->x, bytes, &ticket, err);
    if (r == RF_OK) r = api->ticket_wait(&ticket, RFI_WAIT_MS, err);
    if (r != RF_OK) return r;
    while (s->rows_of[stand_in] == 0) stand_in++;
    const uint32_t n = rfi_fallback_take_pairs(s, experts, n_rows, stand_in);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(rfi_fallback_row(a, experts->in, i), a->in + (uint64_t)a->row[i] * n_embd, n_embd * sizeof(float));
        memset(rfi_fallback_row(a, x, i), 0, n_embd * sizeof(float));
    }
    const rf_step step = {.rows = a->rows, .n_rows = n};
    r = rfi_cpu_api.plan_run(a->prepared, NULL, segment, segment + 1, &step, &ticket, err);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n_embd; k++) a->x[(uint64_t)a->row[i] * n_embd + k] += rfi_fallback_row(a, x, i)[k];
    if (r == RF_OK) r = api->mem_write(s->queue, &s->scratch, s->buffer_offset[x], a->x, bytes, &ticket, err);
    if (r != RF_OK) return r;
    return api->mem_write(s->queue, &s->scratch, s->buffer_offset[experts->in2], s->route,
                          (uint64_t)n_rows * route_width * sizeof *s->route, &ticket, err);
}

/* Acquire the experts of an op that s->rows_of counts, before the first op of their layer runs: from the expert cache,
 * computed by the CPU, or only counted where all experts are resident. */
static rf_result rfi_eval_acquire_experts(rf_session *s, const rf_op *op, uint32_t n_rows, rf_error *err) {
    rfi_store *store = s->m->store;
    rfi_expert_layer *layer = store->tensors[op->weight].expert_layer;
    if (!layer) return RF_OK;
    if (s->m->device->is_gpu) atomic_fetch_add(&layer->round_trips, 1);
    if (store->cache.n_frames) {
        rf_result r = rfi_eval_release_experts(s, RF_OK, err);
        uint32_t n_fallback = 0;
        if (s->fallback && n_rows <= RFI_FALLBACK_ROWS)
            n_fallback =
                rfi_cache_pick_fallback(store, layer, s->rows_of, RFI_FALLBACK_PAIRS, s->fallback->is_fallback);
        if (r == RF_OK) r = rfi_cache_acquire(store, layer, s->rows_of, n_rows, s->loading_cancels, s->frames, err);
        if (r == RF_OK) s->held_layer = layer;
        if (r == RF_OK && n_fallback) r = rfi_fallback_run(s, op, n_rows, err); /* while others load */
        return r;
    }
    for (uint32_t e = 0; e < op->experts.n_experts; e++)
        if (s->rows_of[e]) atomic_fetch_add(rfi_expert_is_ready(store, layer, e) ? &layer->hits : &layer->misses, 1);
    return RF_OK;
}

/* Mark the experts that the segment's rows chose in s->chosen; all of them where that costs nothing, or if the step
 * runs as a whole. */
static rf_result rfi_eval_choose(rf_session *s, uint32_t segment, uint32_t n_rows, int whole, rf_error *err) {
    const rf_plan *plan = &s->m->plan;
    const rfi_store *store = s->m->store;
    uint32_t read = RF_NONE; /* buffer that s->route holds */
    for (uint32_t i = s->segment_ops[segment]; i < s->segment_ops[segment + 1]; i++) {
        const rf_op *op = &plan->ops[i];
        if (op->kind != RF_OP_EXPERTS) continue;
        /* reading the route is a wait on a GPU: skip it if all experts are loaded and stay */
        int all = whole || (s->m->device->is_gpu && store->cache.n_frames == 0);
        for (uint32_t e = 0; all && !whole && e < op->experts.n_experts; e++)
            all = s->pinned[op->weight + e] || rfi_cell_is_ready(&store->tensors[op->weight + e].cell);
        if (all) {
            memset(s->chosen + op->weight, 1, op->experts.n_experts);
            continue;
        }
        rf_result r = RF_OK;
        if (read != op->in2) {
            r = rfi_eval_read_route(s, op, n_rows, err);
            if (r == RF_OK) r = rfi_eval_acquire_experts(s, op, n_rows, err);
        }
        if (r != RF_OK) return r;
        read = op->in2;
        for (uint32_t e = 0; e < op->experts.n_experts; e++)
            if (s->rows_of[e]) s->chosen[op->weight + e] = 1;
    }
    return RF_OK;
}

/* Pin the weights of a segment, loading what is missing; the session's queue waits for copies in flight. Of experts pin
 * those in s->chosen, and all that are streamed, because the stream comes in order. */
static rf_result rfi_eval_pin(rf_session *s, uint32_t segment, rf_error *err) {
    rfi_store *store = s->m->store;
    rf_ticket written = {0}; /* the last of these copies: they are all in one queue */
    rf_result r = RF_OK;
    for (uint32_t i = s->segment_first[segment]; r == RF_OK && i < s->segment_first[segment + 1]; i++) {
        uint32_t slot = s->segment_slots[i];
        if (s->is_expert[slot] && !s->chosen[slot] && !rfi_store_streams(store)) continue; /* or all held */
        rfi_tensor *t = &store->tensors[slot];
        if (t->streamed) {
            r = rfi_stream_pin(store, slot, s->n_held_streamed, s->loading_cancels, err);
            if (r == RF_OK) s->held_streamed[s->n_held_streamed++] = slot;
        } else if (s->pinned[slot] || (s->is_expert[slot] && !s->chosen[slot])) {
            continue; /* an earlier micro-batch that pinned it has also waited for its copy */
        } else {
            r = rfi_store_pin(store, slot, s->loading_cancels, err);
            if (r == RF_OK) s->pinned[slot] = 1;
            if (r == RF_OK && !t->cached) s->held[s->n_held++] = slot;
        }
        if (r == RF_OK && !atomic_load_explicit(&t->arrived, memory_order_acquire) && t->written.value > written.value)
            written = t->written;
    }
    return r == RF_OK && written.value ? s->m->device->api->queue_after(s->queue, &written, err) : r;
}

/* Unpin everything after the eval, when nothing of it is running, and report copies that failed. */
static rf_result rfi_eval_unpin(rf_session *s, rf_result r, rf_error *err) {
    rfi_store *store = s->m->store;
    rfi_stream_release(store, s->held_streamed, s->n_held_streamed, NULL);
    for (uint32_t i = 0; i < s->n_held; i++) {
        rf_result arrived = rfi_tensor_arrived(store, s->held[i], r == RF_OK ? err : NULL);
        if (r == RF_OK) r = arrived;
        rfi_store_unpin(store, s->held[i]);
        s->pinned[s->held[i]] = 0;
    }
    r = rfi_eval_release_experts(s, r, err);
    r = rfi_stream_arrived(store, r, err);
    if (s->route) memset(s->chosen, 0, store->plan.n_weights);
    if (s->holds_experts) rfi_store_release_experts(store);
    s->holds_experts = 0;
    s->n_held = s->n_held_streamed = 0;
    return r;
}

/* Run segments [first, last): check for a cancel, pin their weights, submit. */
static rf_result rfi_eval_segments(rf_session *s, uint32_t first, uint32_t last, const rf_step *step,
                                   rf_ticket *ticket, rf_error *err) {
    rf_result r = RF_OK;
    if (atomic_load_explicit(&s->cancel, memory_order_relaxed) && atomic_exchange(&s->cancel, 0))
        return rfi_fail(err, RF_ERR_CANCELLED, first, "rf_session_eval: cancelled by rf_session_cancel");
    for (uint32_t segment = first; r == RF_OK && segment < last; segment++) {
        if (s->route && !s->holds_experts)
            r = rfi_eval_choose(s, segment, step->n_rows, last - first == s->n_segments, err);
        if (r == RF_OK) r = rfi_eval_pin(s, segment, err);
    }
    if (r == RF_OK) r = s->m->device->api->plan_run(s->prepared, s->queue, first, last, step, ticket, err);
    if (r != RF_OK) return r;
    rfi_stream_release(s->m->store, s->held_streamed, s->n_held_streamed, ticket);
    s->n_held_streamed = 0;
    return RF_OK;
}

#define RFI_WHOLE_STEP_ROWS 8u

/* Where the run that begins with a segment ends. On a GPU: if everything is loaded and there are few rows, at the end
 * of the step, which the device may replay as a graph; if everything but experts is loaded, after the next ROUTE,
 * because the host must learn what was chosen. */
static uint32_t rfi_eval_end(const rf_session *s, uint32_t segment, uint32_t n_rows) {
    const rfi_store *store = s->m->store;
    const int whole = segment == 0 && n_rows <= RFI_WHOLE_STEP_ROWS;
    uint32_t end = segment + 1;
    if (!s->m->device->is_gpu) return end;
    if (whole && rfi_store_all_loaded(store)) return s->n_segments;
    if (store->cache.n_frames && rfi_store_residents_loaded(store))
        while (end < s->n_segments && s->m->plan.ops[s->segment_ops[end] - 1].kind != RF_OP_ROUTE) end++;
    return end;
}

/* The last micro-batch also reads the argmax of all logits rows. s->eval_lengths: where each sequence continues. */
static rf_result rfi_eval_batch(rf_session *s, const rf_token_row *rows, uint32_t n_rows, uint32_t first_logits_row,
                                int last, uint32_t *n_logits, rf_error *err) {
    const rf_device_api *api = s->m->device->api;
    uint32_t n_embd = s->m->plan.n_embd;
    rf_step step = {.rows = s->rows, .logit_rows = s->logit_rows, .n_rows = n_rows,
                    .first_logits_row = first_logits_row};
    memcpy(s->batch_begins, s->eval_lengths, s->desc.n_seq_max * sizeof *s->batch_begins);
    for (uint32_t i = 0; i < n_rows; i++) {
        uint32_t pos = s->eval_lengths[rows[i].seq]++;
        int32_t token = rows[i].embedding ? -1 : rows[i].token;
        s->rows[i] = (rf_step_row){token, rows[i].seq, (int32_t)pos, -1, 0, 0};
        s->tokens[(uint64_t)(uint32_t)rows[i].seq * s->desc.n_ctx + pos] = token;
        if (rows[i].embedding) {
            memcpy(s->embeddings + (uint64_t)i * n_embd, rows[i].embedding, n_embd * sizeof(float));
            step.embeddings = s->embeddings;
        }
        if (rows[i].want_logits) {
            s->rows[i].logits_row = (int32_t)(first_logits_row + step.n_logits);
            s->logit_rows[step.n_logits++] = i;
        }
    }
    *n_logits = step.n_logits;
    rfi_snapshots_plan(s, n_rows);
    rf_ticket ticket = {0};
    rf_result r = RF_OK;
    rfi_stream_begin_pass(s->m->store);
    for (uint32_t segment = 0, end; r == RF_OK && segment < s->n_segments; segment = end) {
        end = rfi_eval_end(s, segment, n_rows);
        r = rfi_eval_segments(s, segment, end, &step, &ticket, err);
    }
    if (r == RF_OK && last && first_logits_row + step.n_logits) {
        rf_ticket read = {0};
        r = api->mem_read(s->queue, &s->scratch, s->buffer_offset[s->m->plan.argmax], s->argmax,
                          (first_logits_row + step.n_logits) * sizeof(int32_t), &read, err);
        if (r == RF_OK) ticket = read;
    }
    /* also after a failure: the step's arrays and the pinned weights are in use until then */
    rf_result waited = api->ticket_wait(&ticket, RFI_WAIT_MS, r == RF_OK ? err : NULL);
    return r == RF_OK ? waited : r;
}

/* Positions up to `end` were written: a ring may have overwritten what a shorter sequence would need. */
static void rfi_session_raise_min_keep(rf_session *s, uint32_t seq, uint32_t end) {
    for (uint32_t i = 0; i < s->m->plan.n_states; i++) {
        const uint32_t n_cells = s->state_cells[i], window = s->m->plan.states[i].window;
        if (end > n_cells) s->min_keep[seq] = (uint32_t)rfi_max_u64(s->min_keep[seq], end - n_cells + window - 1);
    }
}

/* Cut a sequence to n tokens, or to the last snapshot before. If its window does not reach back that far it becomes
 * empty, and the text of err, if there is one, says so. */
static void rfi_session_cut(rf_session *s, uint32_t seq, uint32_t n, rf_error *err) {
    const uint32_t at = rfi_snapshots_cut(s, seq, n);
    const int lost = at > 0 && at < s->min_keep[seq];
    s->lengths[seq] = lost ? rfi_snapshots_cut(s, seq, 0) : at;
    if (s->lengths[seq] == 0) s->min_keep[seq] = 0;
    if (!lost || !err) return;
    const size_t used = strlen(err->text);
    snprintf(err->text + used, sizeof err->text - used, "; sequence %u is empty now: its window has moved on", seq);
}

static rf_result rfi_eval_run(rf_session *s, const rf_token_row *rows, uint32_t n_rows, uint32_t *n_logits,
                              rf_error *err) {
    rfi_store *store = s->m->store;
    const int streams = rfi_store_streams(store);
    rf_result r = RF_OK;
    if (streams) pthread_mutex_lock(&store->stream_lock);
    if (streams || !rfi_store_residents_loaded(store))
        rfi_store_prefetch(store, NULL, 0, s->loading_cancels);
    s->holds_experts = s->route && rfi_store_hold_experts(store);
    for (uint32_t at = 0; r == RF_OK && at < n_rows;) {
        uint32_t n = (uint32_t)rfi_min_u64(s->desc.n_batch, n_rows - at), more = 0;
        r = rfi_eval_batch(s, rows + at, n, *n_logits, at + n == n_rows, &more, err);
        *n_logits += more;
        at += n;
    }
    if (r == RF_OK && (store->in_place || s->fallback)) r = rfi_gguf_intact(s->m->g, err);
    r = rfi_eval_unpin(s, r, err);
    if (streams) pthread_mutex_unlock(&store->stream_lock);
    return r;
}

ROCMFORGE_API rf_result rf_session_eval(rf_session *s, const rf_token_row *rows, uint32_t n_rows, rf_error *err) {
    rfi_clear(err);
    if (!s || !rows || n_rows == 0)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_eval: session or rows is NULL, or there are no rows");
    s->n_logits = s->logits_copied = 0;
    rf_result r = rfi_eval_check(s, rows, n_rows, err);
    if (r == RF_OK) r = rfi_store_begin(s->m->store, &s->loading_cancels, err);
    if (r != RF_OK) return r;
    memcpy(s->eval_ends, s->eval_lengths, s->desc.n_seq_max * sizeof *s->eval_ends);
    memcpy(s->eval_lengths, s->lengths, s->desc.n_seq_max * sizeof *s->eval_lengths);
    uint32_t n_logits = 0;
    r = rfi_eval_run(s, rows, n_rows, &n_logits, err);
    rfi_store_end(s->m->store);
    for (uint32_t i = 0; i < s->desc.n_seq_max; i++)
        if (s->eval_lengths[i] > s->lengths[i]) rfi_session_raise_min_keep(s, i, s->eval_lengths[i]);
    for (uint32_t i = 0; r != RF_OK && i < s->desc.n_seq_max; i++) rfi_session_cut(s, i, s->lengths[i], err);
    if (r != RF_OK) return r;
    memcpy(s->lengths, s->eval_lengths, s->desc.n_seq_max * sizeof *s->lengths);
    s->n_logits = n_logits;
    return RF_OK;
}

static rf_result rfi_session_row(rf_session *s, uint32_t i, float **out, rf_error *err) {
    *out = NULL;
    if (i >= s->n_logits)
        return rfi_fail(err, RF_ERR_ARGUMENT, i, "logits row %u: the last rf_session_eval gave %u", i, s->n_logits);
    const uint64_t n_vocab = s->m->plan.n_vocab, at = s->buffer_offset[s->m->plan.logits];
    rf_result r = RF_OK;
    if (!s->logits_copied) r = rfi_session_read(s, at, s->logits, s->n_logits * n_vocab * sizeof *s->logits, err);
    if (r != RF_OK) return r;
    s->logits_copied = 1;
    *out = s->logits + i * n_vocab;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_get_logits(rf_session *s, uint32_t i, float **logits, rf_error *err) {
    rfi_clear(err);
    if (logits) *logits = NULL;
    if (!s || !logits) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_get_logits: session or logits is NULL");
    return rfi_session_row(s, i, logits, err);
}

ROCMFORGE_API rf_session_stats rf_session_get_stats(const rf_session *s) {
    return s ? s->m->device->api->plan_stats(s->prepared) : (rf_session_stats){0};
}

ROCMFORGE_API rf_result rf_session_get_argmax(const rf_session *s, uint32_t i, int32_t *token, rf_error *err) {
    rfi_clear(err);
    if (token) *token = -1;
    if (!s || !token) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_get_argmax: session or token is NULL");
    if (i >= s->n_logits)
        return rfi_fail(err, RF_ERR_ARGUMENT, i, "logits row %u: the last rf_session_eval gave %u", i, s->n_logits);
    *token = s->argmax[i];
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_forward(rf_session *s, const int32_t *tokens, uint32_t n_tokens, float **logits,
                                   rf_error *err) {
    rfi_clear(err);
    if (logits) *logits = NULL;
    if (!s || !tokens || n_tokens == 0)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0,
                        "rf_session_forward: session or tokens is NULL, or there are no tokens");
    uint32_t before = s->lengths[0];
    s->n_logits = 0;
    if (n_tokens > s->desc.n_ctx - before)
        return rfi_fail(err, RF_ERR_CONTEXT_FULL, 0,
                        "rf_session_forward: %u tokens do not fit: n_ctx is %u, sequence 0 holds %u", n_tokens,
                        s->desc.n_ctx, before);
    rf_result r = RF_OK;
    s->rollback = before;
    for (uint32_t at = 0; r == RF_OK && at < n_tokens;) {
        uint32_t n = (uint32_t)rfi_min_u64(s->desc.n_batch, n_tokens - at);
        for (uint32_t i = 0; i < n; i++)
            s->forward_rows[i] =
                (rf_token_row){.token = tokens[at + i], .pos = RF_POS_NEXT, .want_logits = at + i + 1 == n_tokens};
        r = rf_session_eval(s, s->forward_rows, n, err);
        at += n;
    }
    if (r == RF_OK && logits) r = rfi_session_row(s, 0, logits, err);
    s->rollback = 0;
    if (r != RF_OK) s->n_logits = 0;
    if (r != RF_OK && s->lengths[0] > before) rfi_session_cut(s, 0, before, err);
    return r;
}

/* ---- sequences ---- */

/* Calls about a sequence begin with this. */
static rf_result rfi_session_check_seq(const rf_session *s, int32_t seq, const char *what, rf_error *err) {
    rfi_clear(err);
    if (!s) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "%s: session is NULL", what);
    if (seq < 0 || (uint32_t)seq >= s->desc.n_seq_max)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "%s: sequence %d, want 0 to %u", what, seq, s->desc.n_seq_max - 1);
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_truncate(rf_session *s, int32_t seq, uint32_t n_keep, uint32_t *kept,
                                            rf_error *err) {
    rf_result r = rfi_session_check_seq(s, seq, "rf_session_truncate", err);
    if (r != RF_OK) return r;
    if (s->lengths[seq] > n_keep) rfi_session_cut(s, (uint32_t)seq, n_keep, NULL);
    if (kept) *kept = s->lengths[seq];
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_sync(rf_session *s, int32_t seq, const int32_t *tokens, uint32_t n_tokens,
                                        uint32_t *kept, rf_error *err) {
    rf_result r = rfi_session_check_seq(s, seq, "rf_session_sync", err);
    if (r != RF_OK) return r;
    if ((!tokens && n_tokens) || !kept)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_sync: tokens or kept is NULL");
    const int32_t *held = s->tokens + (uint64_t)(uint32_t)seq * s->desc.n_ctx;
    uint32_t n = 0, max = (uint32_t)rfi_min_u64(s->lengths[seq], n_tokens ? n_tokens - 1 : 0);
    while (n < max && held[n] == tokens[n] && held[n] >= 0) n++; /* -1, a row of floats, equals no token */
    return rf_session_truncate(s, seq, n, kept, err);
}

static uint64_t rfi_state_row_bytes(const rf_session *s, const rf_plan_state *st, int values) {
    return rf_cache_row_bytes(s->desc.cache_type, values ? st->head_dim_v : st->head_dim);
}

/* Offset of a sequence's cells in a KV cache, by heads: the keys', then the values'. *row: bytes of a cell. */
static uint64_t rfi_state_head(const rf_session *s, uint32_t state, int32_t seq, uint32_t head, uint64_t *row) {
    const rf_plan_state *st = &s->m->plan.states[state];
    const uint64_t n_cells = s->state_cells[state], heads = (uint64_t)s->desc.n_seq_max * st->n_kv_heads;
    uint64_t at = s->state_offset[state], keys;
    *row = rfi_state_row_bytes(s, st, 0);
    if (head >= st->n_kv_heads) {
        rfi_place(&at, &keys, n_cells * heads, *row, 1);
        *row = rfi_state_row_bytes(s, st, 1);
    }
    return at + ((uint64_t)(uint32_t)seq * st->n_kv_heads + head % st->n_kv_heads) * n_cells * *row;
}

ROCMFORGE_API rf_result rf_session_copy(rf_session *s, int32_t src, int32_t dst, rf_error *err) {
    rf_result r = rfi_session_check_seq(s, src, "rf_session_copy", err);
    if (r == RF_OK) r = rfi_session_check_seq(s, dst, "rf_session_copy", err);
    if (r != RF_OK || src == dst) return r;
    const rf_device_api *api = s->m->device->api;
    uint64_t n = s->lengths[src];
    rf_ticket ticket = {0};
    rfi_session_cut(s, (uint32_t)dst, 0, NULL); /* a failure in the middle leaves it empty */
    for (uint32_t i = 0; i < s->m->plan.n_states; i++) {
        const rf_plan_state *st = &s->m->plan.states[i];
        if (st->width && n) {
            const uint32_t snapshot = rfi_snapshot_find(s, (uint32_t)src, (uint32_t)n);
            const rf_mem_at to = {&s->state, rfi_snapshot_offset(s, i, (uint32_t)dst * s->n_slots + 1)},
                            from = {&s->state, rfi_snapshot_offset(s, i, snapshot)};
            r = api->mem_copy(s->queue, to, from, 4ull * st->width, &ticket, err);
        }
        if (r != RF_OK) return r;
        for (uint32_t h = 0; h < st->n_kv_heads * 2 && n; h++) {
            uint64_t row;
            const rf_mem_at to = {&s->state, rfi_state_head(s, i, dst, h, &row)},
                            from = {&s->state, rfi_state_head(s, i, src, h, &row)};
            r = api->mem_copy(s->queue, to, from, rfi_min_u64(n, s->state_cells[i]) * row, &ticket, err);
            if (r != RF_OK) return r;
        }
    }
    r = api->ticket_wait(&ticket, RFI_WAIT_MS, err);
    if (r != RF_OK) return r;
    memcpy(s->tokens + (uint64_t)(uint32_t)dst * s->desc.n_ctx, s->tokens + (uint64_t)(uint32_t)src * s->desc.n_ctx,
           (size_t)n * sizeof *s->tokens);
    s->lengths[dst] = (uint32_t)n;
    s->min_keep[dst] = s->min_keep[src];
    if (s->n_slots) rfi_snapshots_of(s, (uint32_t)dst)->pos = (uint32_t)n;
    return RF_OK;
}

/* ---- hidden states ---- */

/* The buffer that the output matrix reads, which holds the hidden states. */
static uint32_t rfi_plan_hidden(const rf_plan *p) {
    for (uint32_t i = p->n_ops; i-- > 0;)
        if (p->ops[i].kind == RF_OP_MATMUL && p->ops[i].out == p->logits) return p->ops[i].in;
    return RF_NONE;
}

/* Read n <= n_batch hidden rows into s->embeddings, which is pinned and not in use between evals. */
static rf_result rfi_session_hidden_part(rf_session *s, uint32_t first, uint32_t n, rf_error *err) {
    const uint64_t row_bytes = (uint64_t)s->m->plan.n_embd * sizeof(float);
    const uint64_t at = s->buffer_offset[rfi_plan_hidden(&s->m->plan)] + first * row_bytes;
    return rfi_session_read(s, at, s->embeddings, n * row_bytes, err);
}

ROCMFORGE_API rf_result rf_session_hidden(rf_session *s, uint32_t first, uint32_t n, float *out, rf_error *err) {
    rfi_clear(err);
    if (!s || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_hidden: session or out is NULL");
    if (first > s->n_logits || n > s->n_logits - first)
        return rfi_fail(err, RF_ERR_ARGUMENT, first,
                        "rf_session_hidden: %u rows from %u on, the last rf_session_eval gave %u", n, first,
                        s->n_logits);
    uint32_t n_embd = s->m->plan.n_embd;
    rf_result r = RF_OK;
    for (uint32_t at = 0, part; r == RF_OK && at < n; at += part) {
        part = (uint32_t)rfi_min_u64(n - at, s->desc.n_batch);
        r = rfi_session_hidden_part(s, first + at, part, err);
        if (r == RF_OK) memcpy(out + (uint64_t)at * n_embd, s->embeddings, (size_t)part * n_embd * sizeof *out);
    }
    return r;
}

ROCMFORGE_API rf_result rf_session_embed(rf_session *s, const int32_t *tokens, uint32_t n_tokens, uint32_t pooling,
                                         float *out, rf_error *err) {
    rfi_clear(err);
    if (!s || !tokens || !out || n_tokens == 0)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0,
                        "rf_session_embed: session, tokens or out is NULL, or there are no tokens");
    if (pooling > RF_POOL_CLS)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_embed: pooling %u is not known", pooling);
    if (n_tokens > s->desc.n_ctx)
        return rfi_fail(err, RF_ERR_CONTEXT_FULL, 0, "rf_session_embed: %u tokens, n_ctx is %u", n_tokens,
                        s->desc.n_ctx);
    uint32_t max_rows = pooling == RF_POOL_MEAN ? s->desc.n_logits_max : n_tokens;
    if (max_rows > s->desc.n_batch) max_rows = s->desc.n_batch;
    rf_result r = RF_OK;
    rfi_session_cut(s, 0, 0, NULL);
    const uint32_t n_embd = s->m->plan.n_embd;
    memset(out, 0, (size_t)n_embd * sizeof *out);
    for (uint32_t at = 0; r == RF_OK && at < n_tokens;) {
        uint32_t n = (uint32_t)rfi_min_u64(max_rows, n_tokens - at);
        for (uint32_t i = 0; i < n; i++) {
            int want = pooling == RF_POOL_MEAN || (pooling == RF_POOL_CLS ? at + i == 0 : at + i + 1 == n_tokens);
            s->forward_rows[i] = (rf_token_row){.token = tokens[at + i], .pos = RF_POS_NEXT, .want_logits = want};
        }
        r = rf_session_eval(s, s->forward_rows, n, err);
        if (r == RF_OK && s->n_logits) r = rfi_session_hidden_part(s, 0, s->n_logits, err);
        for (uint32_t row = 0; r == RF_OK && row < s->n_logits; row++)
            for (uint32_t k = 0; k < n_embd; k++) out[k] += s->embeddings[(uint64_t)row * n_embd + k];
        at += n;
    }
    if (r != RF_OK) s->n_logits = 0, rfi_session_cut(s, 0, 0, NULL);
    for (uint32_t k = 0; r == RF_OK && pooling == RF_POOL_MEAN && k < n_embd; k++) out[k] /= (float)n_tokens;
    return r;
}

/* ---- saved sequences ----
 * A header; the token ids (int32); for each state the keys, then the values, head by head, of the positions held (with
 * a sliding window from the first position that the sequence needs after a cut to min_keep tokens), or the recurrent
 * state after the last token; and a checksum of all of it. Little endian, nothing aligned. */

#define RFI_SAVED_MAGIC "rocmforge seq\n"
enum { RFI_SAVED_VERSION = 2 };

typedef struct rfi_saved {
    char magic[16];       /* RFI_SAVED_MAGIC                          */
    uint32_t version, header_bytes;
    char arch[32];
    uint32_t n_weights, n_states, n_embd, n_vocab, cache_type, n_tokens;
    uint32_t min_keep, zero; /* shortest length, but for 0, to cut it to */
    uint64_t shapes;      /* hash of the weights' names, types, sizes */
    uint64_t total_bytes; /* with the checksum                        */
} rfi_saved;
_Static_assert(sizeof(rfi_saved) == 104, "no padding in what is written");

typedef struct rfi_saving {
    rf_session *s;
    const rf_session_io *io;
    rf_error *err;
    uint64_t hash, done; /* checksum and count of the bytes so far */
    int loading;         /* 1: restore */
} rfi_saving;

/* FNV-1a: detects damage, not forgery. */
static uint64_t rfi_hash_bytes(uint64_t hash, const void *data, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t rfi_plan_hash(const rf_plan *p) {
    uint64_t h = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < p->n_weights; i++) {
        const rf_plan_weight *w = &p->weights[i];
        h = rfi_hash_bytes(h, w->name, strlen(w->name) + 1);
        h = rfi_hash_bytes(h, &w->type, sizeof w->type);
        h = rfi_hash_bytes(h, &w->n_rows, sizeof w->n_rows);
        h = rfi_hash_bytes(h, &w->n_in, sizeof w->n_in);
    }
    for (uint32_t i = 0; i < p->n_states; i++) {
        const rf_plan_state *st = &p->states[i];
        const uint32_t shape[6] = {st->layer, st->n_kv_heads, st->head_dim, st->head_dim_v, st->window, st->width};
        h = rfi_hash_bytes(h, shape, sizeof shape);
    }
    for (uint32_t i = 0; i < p->n_ops; i++) /* keys were rotated by the factors that the session chose */
        if (p->ops[i].kind == RF_OP_ROPE && p->ops[i].factor != RF_NONE)
            h = rfi_hash_bytes(h, &p->ops[i].weight, sizeof p->ops[i].weight);
    return h;
}

static uint32_t rfi_saved_first(const rfi_saved *h, const rf_plan_state *st) {
    return st->window && h->min_keep >= st->window ? h->min_keep - st->window + 1 : 0;
}

/* The header that this session writes, or expects to read, for n_tokens tokens. */
static rfi_saved rfi_saved_header(const rf_session *s, uint32_t n_tokens, uint32_t min_keep) {
    const rf_plan *p = &s->plan;
    rfi_saved h = {.magic = RFI_SAVED_MAGIC, .version = RFI_SAVED_VERSION, .header_bytes = sizeof h,
                   .n_weights = p->n_weights, .n_states = p->n_states, .n_embd = p->n_embd, .n_vocab = p->n_vocab,
                   .cache_type = s->desc.cache_type, .n_tokens = n_tokens, .min_keep = min_keep,
                   .shapes = rfi_plan_hash(p), .total_bytes = sizeof h + 4 * (uint64_t)n_tokens + 8};
    snprintf(h.arch, sizeof h.arch, "%s", s->m->config.arch->name);
    for (const rf_plan_state *st = p->states; st < p->states + p->n_states; st++) {
        const uint64_t cells = (uint64_t)(n_tokens - rfi_saved_first(&h, st)) * st->n_kv_heads;
        if (n_tokens) h.total_bytes += 4ull * st->width;
        h.total_bytes += cells * (rfi_state_row_bytes(s, st, 0) + rfi_state_row_bytes(s, st, 1));
    }
    return h;
}

/* Move n bytes through the caller's function: all of them, or an error. */
static rf_result rfi_saving_move(rfi_saving *w, void *data, uint64_t n) {
    int64_t got = 0;
    uint64_t at = 0;
    if (w->loading) {
        while (at < n && (got = w->io->read_fn((char *)data + at, (size_t)(n - at), w->io->user)) > 0 &&
               (uint64_t)got <= n - at)
            at += (uint64_t)got;
    } else if ((got = n ? w->io->write_fn(data, (size_t)n, w->io->user) : 0) == 0) {
        at = n;
    }
    if (at < n && got == 0)
        return rfi_fail(w->err, RF_ERR_FORMAT, w->done + at, "saved sequence: ends at byte %llu, want more",
                        RFI_LLU(w->done + at));
    if (at < n && got > 0)
        return rfi_fail(w->err, RF_ERR_IO, w->done + at, "saved sequence: %s of %llu bytes at byte %llu returned %lld",
                        w->loading ? "read_fn" : "write_fn", RFI_LLU(n - at), RFI_LLU(w->done + at), (long long)got);
    if (at < n)
        return rfi_fail_sys(w->err, RF_ERR_IO, rfi_io_errno(got), w->done + at,
                            "saved sequence: cannot %s %llu bytes at byte %llu: %s", w->loading ? "read" : "write",
                            RFI_LLU(n - at), RFI_LLU(w->done + at), rfi_errno_text(rfi_io_errno(got)));
    w->hash = rfi_hash_bytes(w->hash, data, n);
    w->done += n;
    return RF_OK;
}

/* Move bytes of the state memory between device and caller, through s->embeddings as the staging buffer. */
static rf_result rfi_saving_bytes(rfi_saving *w, uint64_t offset, uint64_t n_bytes) {
    rf_session *s = w->s;
    const rf_device_api *api = s->m->device->api;
    uint64_t piece = (uint64_t)s->desc.n_batch * s->m->plan.n_embd * sizeof(float);
    rf_result r = RF_OK;
    for (uint64_t at = 0; r == RF_OK && at < n_bytes; at += piece) {
        uint64_t n = rfi_min_u64(piece, n_bytes - at);
        rf_ticket ticket = {0};
        if (w->loading) r = rfi_saving_move(w, s->embeddings, n);
        if (r != RF_OK) return r;
        r = w->loading ? api->mem_write(s->queue, &s->state, offset + at, s->embeddings, n, &ticket, w->err)
                       : api->mem_read(s->queue, &s->state, offset + at, s->embeddings, n, &ticket, w->err);
        if (r == RF_OK) r = api->ticket_wait(&ticket, RFI_WAIT_MS, w->err);
        if (r == RF_OK && !w->loading) r = rfi_saving_move(w, s->embeddings, n);
    }
    return r;
}

/* Move the rows of some positions of one head, whose cells begin at an offset. In order of position: of those that
 * share a cell of this session's ring the last one stays. */
static rf_result rfi_saving_head(rfi_saving *w, uint64_t offset, uint64_t row, uint32_t n_cells, rfi_span positions) {
    rf_result r = RF_OK;
    for (uint32_t n, pos = positions.begin; r == RF_OK && pos < positions.end; pos += n) {
        n = (uint32_t)rfi_min_u64(positions.end - pos, n_cells - pos % n_cells);
        r = rfi_saving_bytes(w, offset + pos % n_cells * row, n * row);
    }
    return r;
}

static rf_result rfi_saving_body(rfi_saving *w, int32_t seq, const rfi_saved *header) {
    rf_session *s = w->s;
    const uint32_t n = header->n_tokens;
    const rf_plan *p = &s->m->plan;
    int32_t *tokens = s->tokens + (uint64_t)(uint32_t)seq * s->desc.n_ctx;
    const uint32_t slot = w->loading ? (uint32_t)seq * s->n_slots + 1 : rfi_snapshot_find(s, (uint32_t)seq, n);
    rf_result r = rfi_saving_move(w, tokens, 4 * (uint64_t)n);
    for (uint32_t i = 0; r == RF_OK && w->loading && i < n; i++)
        if (tokens[i] < -1 || tokens[i] >= (int64_t)p->n_vocab)
            r = rfi_fail(w->err, RF_ERR_FORMAT, i, "saved sequence: token %u is %d, want -1 to %u", i, tokens[i],
                         p->n_vocab - 1);
    for (uint32_t i = 0; r == RF_OK && i < p->n_states; i++) {
        const rf_plan_state *st = &p->states[i];
        const rfi_span positions = {rfi_saved_first(header, st), n};
        if (st->width && n) r = rfi_saving_bytes(w, rfi_snapshot_offset(s, i, slot), 4ull * st->width);
        for (uint32_t h = 0; r == RF_OK && h < st->n_kv_heads * 2; h++) {
            uint64_t row, at = rfi_state_head(s, i, seq, h, &row);
            r = rfi_saving_head(w, at, row, s->state_cells[i], positions);
        }
    }
    uint64_t want = w->hash, found = want;
    if (r == RF_OK) r = rfi_saving_move(w, &found, sizeof found);
    if (r == RF_OK && found != want)
        r = rfi_fail(w->err, RF_ERR_FORMAT, w->done - 8, "saved sequence: damaged: checksum %016llx, want %016llx",
                     RFI_LLU(found), RFI_LLU(want));
    return r;
}

static rf_result rfi_saved_check(const rfi_saved *h, const rfi_saved *want, uint32_t n_ctx, rf_error *err) {
    const struct { const char *what; uint64_t found, want; } numbers[] = {
        {"version", h->version, want->version},     {"header bytes", h->header_bytes, want->header_bytes},
        {"weights", h->n_weights, want->n_weights}, {"layers with keys", h->n_states, want->n_states},
        {"n_embd", h->n_embd, want->n_embd},        {"n_vocab", h->n_vocab, want->n_vocab},
        {"hash of the weights' shapes", h->shapes, want->shapes},
        {"rf_cache_type", h->cache_type, want->cache_type}};
    if (memcmp(h->magic, want->magic, sizeof h->magic) != 0)
        return rfi_fail(err, RF_ERR_FORMAT, 0, "saved sequence: begins with '%.*s', want '%s'",
                        (int)sizeof h->magic, h->magic, want->magic);
    if (h->version == want->version && memcmp(h->arch, want->arch, sizeof h->arch) != 0)
        return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "saved sequence: architecture: want %s, found %.32s", want->arch,
                        h->arch);
    for (size_t i = 0; i < RFI_COUNT(numbers); i++)
        if (numbers[i].found != numbers[i].want)
            return rfi_fail(err, RF_ERR_UNSUPPORTED, 0, "saved sequence: %s: want %llu, found %llu", numbers[i].what,
                            RFI_LLU(numbers[i].want), RFI_LLU(numbers[i].found));
    if (h->min_keep > h->n_tokens)
        return rfi_fail(err, RF_ERR_FORMAT, 0, "saved sequence: at least %u tokens of %u", h->min_keep, h->n_tokens);
    if (h->total_bytes != want->total_bytes)
        return rfi_fail(err, RF_ERR_FORMAT, 0, "saved sequence: %llu bytes, want %llu for %u tokens",
                        RFI_LLU(h->total_bytes), RFI_LLU(want->total_bytes), h->n_tokens);
    if (h->n_tokens > n_ctx)
        return rfi_fail(err, RF_ERR_CONTEXT_FULL, 0, "saved sequence: %u tokens, n_ctx is %u", h->n_tokens, n_ctx);
    return RF_OK;
}

ROCMFORGE_API uint64_t rf_session_save_bytes(const rf_session *s, int32_t seq) {
    if (rfi_session_check_seq(s, seq, "", NULL) != RF_OK) return 0;
    return rfi_saved_header(s, s->lengths[seq], s->min_keep[seq]).total_bytes;
}

ROCMFORGE_API rf_result rf_session_save(rf_session *s, int32_t seq, const rf_session_io *io, rf_error *err) {
    rf_result r = rfi_session_check_seq(s, seq, "rf_session_save", err);
    if (r != RF_OK) return r;
    if (!io || !io->write_fn) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_save: no write_fn");
    rfi_saved h = rfi_saved_header(s, s->lengths[seq], s->min_keep[seq]);
    rfi_saving w = {.s = s, .io = io, .err = err, .hash = 0xcbf29ce484222325u};
    r = rfi_saving_move(&w, &h, sizeof h);
    return r == RF_OK ? rfi_saving_body(&w, seq, &h) : r;
}

ROCMFORGE_API rf_result rf_session_restore(rf_session *s, int32_t seq, const rf_session_io *io, rf_error *err) {
    rf_result r = rfi_session_check_seq(s, seq, "rf_session_restore", err);
    if (r != RF_OK) return r;
    if (!io || !io->read_fn) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_restore: no read_fn");
    if (s->lengths[seq])
        return rfi_fail(err, RF_ERR_BUSY, 0, "rf_session_restore: sequence %d holds %u tokens, want none", seq,
                        s->lengths[seq]);
    rfi_saved h;
    rfi_saving w = {.s = s, .io = io, .err = err, .hash = 0xcbf29ce484222325u, .loading = 1};
    r = rfi_saving_move(&w, &h, sizeof h);
    if (r != RF_OK) return r;
    rfi_saved want = rfi_saved_header(s, h.n_tokens, h.min_keep);
    r = rfi_saved_check(&h, &want, s->desc.n_ctx, err);
    if (r == RF_OK) r = rfi_saving_body(&w, seq, &h);
    if (r != RF_OK) return r;
    s->lengths[seq] = h.n_tokens;
    s->min_keep[seq] = h.min_keep;
    rfi_session_raise_min_keep(s, (uint32_t)seq, h.n_tokens);
    if (s->n_slots) rfi_snapshots_of(s, (uint32_t)seq)->pos = h.n_tokens;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_keep(rf_session *s, int32_t seq, rf_error *err) {
    rf_result r = rfi_session_check_seq(s, seq, "rf_session_keep", err);
    for (uint32_t i = 0; r == RF_OK && i < s->desc.n_seq_max; i++)
        if (i != (uint32_t)seq) rfi_session_cut(s, i, 0, NULL);
    return r;
}

ROCMFORGE_API uint32_t rf_session_length(const rf_session *s, int32_t seq) {
    return s && seq >= 0 && (uint32_t)seq < s->desc.n_seq_max ? s->lengths[seq] : 0;
}

ROCMFORGE_API void rf_session_cancel(rf_session *s) {
    if (s) atomic_store(&s->cancel, 1);
}

/* ==== 13 Tokens and text ================================================================================ >>token
 * Tokenizers: text to token ids and back. SPM (SentencePiece, "llama") merges pairs by score; spaces are U+2581, bytes
 * <0xHH>. BPE ("gpt2") cuts text into words with a pre-tokenizer, then merges pairs by rank over GPT-2's byte alphabet;
 * "gemma4" is BPE over lines, with spaces and bytes as in SPM. WPM (WordPiece, "bert", embedding models) takes the
 * longest tokens of each word, letters without accents and capitals. A tokenizer is checked while it is read, and then
 * immutable. Token texts point into the metadata of its file, which it keeps open. Text is untrusted: nothing recurses,
 * and time is O(n log n) in its length.
 * Reference for every choice: what llama.cpp answers, except that plain text never becomes a control token. */

/* tokenizer.ggml.token_type, and flags that we add. */
enum {
    RFI_TOKEN_UNDEFINED = 0, RFI_TOKEN_NORMAL = 1, RFI_TOKEN_UNKNOWN = 2, RFI_TOKEN_CONTROL = 3, RFI_TOKEN_USER = 4,
    RFI_TOKEN_UNUSED = 5, RFI_TOKEN_BYTE = 6,
    RFI_TOKEN_TYPE = 7,     /* mask of the above                                                    */
    RFI_TOKEN_END = 8,      /* ends a generation                                                    */
    RFI_TOKEN_STRIP = 16,   /* drops the whitespace that follows it in text (Phi-3)                 */
    RFI_TOKEN_PLAIN = 32,   /* plain text may become it: it is in the index of texts                */
    RFI_TOKEN_SHOWN = 64    /* control token that is part of the text: gpt-oss's channels           */
};

enum { RFI_TEXT_MAX_BYTES = 1 << 30 };  /* of one rf_tokenize: three symbols per byte stay below 2^32 */
enum { RFI_SPECIAL_MAX_BYTES = 1024 };  /* longer special tokens are not looked for in text         */

enum {
    RFI_PRE_WHOLE = 1,    /* a word that is a token is taken whole, without merging            */
    RFI_PRE_BOS = 2,      /* add bos unless the file says no                                   */
    RFI_PRE_RAW = 4,      /* no byte alphabet: spaces are U+2581, other bytes <0xHH>           */
    RFI_PRE_FORCE_BOS = 8 /* add bos, whatever the file says                                   */
};

/* Pre-tokenizers: how BPE cuts text into words before it merges; see "BPE: cutting text into words". */
typedef struct rfi_scan rfi_scan;

typedef struct rfi_pass {
    uint32_t (*match)(rfi_scan *s, uint32_t pos, uint32_t how); /* end of the match at pos, or pos */
    uint32_t how;
} rfi_pass;

enum { RFI_PASSES_MAX = 6 };

typedef struct rfi_pre {
    const char *names; /* values of tokenizer.ggml.pre, each with a NUL, and one more */
    uint32_t flags;    /* RFI_PRE_* above                                             */
    rfi_pass passes[RFI_PASSES_MAX];
} rfi_pre;

static const rfi_pre *rfi_pre_find(rf_string name, const char **spelled);

/* Slots of hash tables with open addressing. id and rank are stored + 1, so that zeroed memory is an empty table. */
typedef struct rfi_text_slot {
    uint32_t hash, id1;
} rfi_text_slot;

typedef struct rfi_merge_slot {
    uint64_t key;
    uint32_t rank1, result;
} rfi_merge_slot;

struct rf_tokenizer {
    rf_allocator allocator;
    rf_gguf *g;                   /* kept open                                                               */
    const char *model;            /* "llama", "gpt2", "gemma4", "bert"                                       */
    const rfi_pre *pre;           /* BPE; NULL: SPM, WPM                                                     */
    const char *pre_name;         /* of pre's names the file's, or the forced one                            */
    int is_wpm, lower, strip;     /* WPM: make capitals small, drop accents                                  */
    uint32_t n_vocab;
    rf_string *text;              /* [n_vocab] as the vocabulary spells it                                   */
    uint8_t *attr;                /* [n_vocab] RFI_TOKEN_*                                                   */
    const unsigned char *scores;  /* [n_vocab] float32 in the metadata, unaligned; NULL: all 0               */
    rfi_text_slot *texts;         /* [n_texts] hash table: text -> id of plain tokens                        */
    uint32_t n_texts;
    uint64_t *hash;               /* [n_vocab] of the text; 0: no plain token                                */
    uint32_t plain_max_bytes;     /* longest plain token                                                     */
    rfi_merge_slot *merges;       /* [n_merges] BPE hash table: (left, right) -> rank, result                */
    uint32_t n_merges;
    int32_t byte_id[256];         /* token of a byte, -1: it cannot be written                               */
    int32_t *special;             /* [n_special] control, unknown and user-defined tokens, sorted by text    */
    uint32_t n_special, n_user;
    uint32_t special_first[257];  /* index in special of the first token that begins with a byte             */
    int32_t bos, eos, eot, eom, unknown, padding; /* -1: the file names none                                 */
    int add_bos, add_eos, add_space;
    _Atomic uint32_t n_users;     /* schedulers                                                              */
};

static const char rfi_spm_space[] = "\xe2\x96\x81"; /* U+2581 stands for a space in SPM vocabularies */

/* ---- characters ---- */

enum {
    RFI_LETTER = 1, RFI_NUMBER = 2, RFI_SPACE = 4, RFI_PUNCT = 8, RFI_SYMBOL = 16, RFI_MARK = 32, RFI_OTHER = 64,
    RFI_REST = RFI_PUNCT | RFI_SYMBOL | RFI_MARK | RFI_OTHER /* [^\s\p{L}\p{N}] */
};

static uint32_t rfi_unicode_class(uint32_t cp); /* one of these bits, from the Unicode tables below */
static int rfi_unicode_is_control(uint32_t cp);
static uint32_t rfi_unicode_to_lower(uint32_t cp), rfi_unicode_base(uint32_t cp);

static uint32_t rfi_class(uint32_t cp) {
    if ((cp | 32) - 'a' < 26) return RFI_LETTER;
    if (cp - '0' < 10) return RFI_NUMBER;
    if (cp == ' ') return RFI_SPACE;
    if (cp < 128) { /* one bit per character, as in the table */
        static const uint64_t spaces = 0x100003e00u, punct[2] = {0x8c00f7ee00000000u, 0x28000000b8000001u},
                              symbols[2] = {0x7000081000000000u, 0x5000000140000000u};
        uint64_t bit = (uint64_t)1 << (cp & 63);
        if (cp < 64 && spaces & bit) return RFI_SPACE;
        return punct[cp >> 6] & bit ? RFI_PUNCT : symbols[cp >> 6] & bit ? RFI_SYMBOL : RFI_OTHER;
    }
    return rfi_unicode_class(cp);
}

/* How many of n rising numbers, `stride` apart, are below x. */
static size_t rfi_count_below(const uint32_t *numbers, size_t n, size_t stride, uint32_t x) {
    size_t lo = 0;
    while (lo < n) {
        size_t mid = lo + (n - lo) / 2;
        if (numbers[mid * stride] < x) lo = mid + 1;
        else n = mid;
    }
    return lo;
}

typedef struct rfi_char {
    uint32_t cp, n_bytes; /* a malformed byte counts as U+FFFD of one byte */
    uint32_t is_bad;
} rfi_char;

/* Decode the first character of n >= 1 bytes. Overlong, truncated and above U+10FFFF are malformed; surrogates are not,
 * they pass as three bytes. */
static rfi_char rfi_utf8(const unsigned char *p, uint64_t n) {
    static const uint32_t min_cp[5] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t len = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf8 ? 4 : 0;
    rfi_char bad = {0xfffd, 1, 1}, c = {p[0], len, 0};
    if (len == 1) return c;
    if (len == 0 || len > n) return bad;
    c.cp &= 0x7fu >> len;
    for (uint32_t i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80) return bad;
        c.cp = c.cp << 6 | (p[i] & 0x3f);
    }
    return c.cp < min_cp[len] || c.cp > 0x10ffff ? bad : c;
}

/* GPT-2's byte alphabet writes byte b as the character cp: printable Latin-1 as itself, the 68 others from U+0100 on
 * in order. Source: openai/gpt-2 bytes_to_unicode. */
static uint32_t rfi_byte_char(uint32_t b) {
    if (b < 33) return 256 + b;
    if (b >= 127 && b <= 160) return 256 + 33 + b - 127;
    return b == 173 ? 256 + 67 : b;
}

/* The byte that cp stands for in that alphabet, or -1. */
static int rfi_char_byte(uint32_t cp) {
    if (cp >= 256 + 68) return -1;
    if (cp >= 256) return cp < 256 + 33 ? (int)cp - 256 : cp == 256 + 67 ? 173 : (int)cp - 256 - 33 + 127;
    return rfi_byte_char(cp) == cp ? (int)cp : -1;
}

/* Returns how many bytes cp takes, 1 to 4. */
static uint32_t rfi_put_utf8(uint32_t cp, char *out) {
    uint32_t n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    static const uint8_t lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (uint32_t i = n; i-- > 1; cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3f));
    out[0] = (char)(lead[n] | cp);
    return n;
}

/* ---- vocabulary ---- */

static uint32_t rfi_token_type(const rf_tokenizer *t, uint32_t id) { return t->attr[id] & RFI_TOKEN_TYPE; }

/* Slots of a hash table for n entries: at most two thirds are used, so that every search ends. */
static uint32_t rfi_slot_count(uint64_t n) { return (uint32_t)(n + n / 2 + 1); }

static uint32_t rfi_first_slot(uint64_t hash, uint32_t n_slots) { return (uint32_t)((hash >> 32) * n_slots >> 32); }

static uint64_t rfi_text_hash(const rf_tokenizer *t, const char *s, uint64_t n) {
    return rfi_hash(s, n, (uint64_t)(uintptr_t)t);
}

/* Slot that holds a text, or the empty one where it belongs. */
static uint32_t rfi_text_slot_of(const rf_tokenizer *t, const char *s, uint64_t n, uint64_t hash) {
    uint32_t i = rfi_first_slot(hash, t->n_texts);
    for (; t->texts[i].id1; i = i + 1 < t->n_texts ? i + 1 : 0) {
        const rf_string *text = &t->text[t->texts[i].id1 - 1];
        if (t->texts[i].hash == (uint32_t)hash && text->len == n && memcmp(text->data, s, (size_t)n) == 0) break;
    }
    return i;
}

/* Id of a plain token by its text, or -1. */
static int32_t rfi_token_find(const rf_tokenizer *t, const char *s, uint64_t n) {
    if (n == 0 || n > t->plain_max_bytes) return -1;
    return (int32_t)t->texts[rfi_text_slot_of(t, s, n, rfi_text_hash(t, s, n))].id1 - 1;
}

/* Hash a pair of texts to 64 bits. Merges are compared by this alone: reading the 280 000 merges of a large vocabulary
 * then needs no search for their parts, and two merges collide in one of 10^8 files. */
static uint64_t rfi_merge_key(uint64_t left, uint64_t right) {
    uint64_t h = (left * 0x9e3779b97f4a7c15u ^ right) * 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

/* Slot that holds a merge, or the empty one where it belongs. */
static uint32_t rfi_merge_slot_of(const rf_tokenizer *t, uint64_t key) {
    uint32_t i = rfi_first_slot(key, t->n_merges);
    while (t->merges[i].rank1 && t->merges[i].key != key) i = i + 1 < t->n_merges ? i + 1 : 0;
    return i;
}

/* ---- reading the file ---- */

#define RFI_TOK "tokenizer.ggml."

/* Get an array key: required if n_want is 0, any length then; else *out has count 0 if it is absent. */
static void rfi_tok_array(rfi_key_reader *k, const char *key, uint32_t type, uint64_t n_want, rf_kv *out) {
    *out = (rf_kv){0};
    if (!rfi_key_read(k, key, n_want == 0)) return;
    *out = k->kv;
    if (out->type != RF_KV_ARRAY || out->element_type != type)
        rfi_key_fail(k, RF_ERR_FORMAT, "want an array of %s, found %s%s", rfi_kv_type_name(type),
                     out->type == RF_KV_ARRAY ? "an array of " : "", rfi_kv_type_name(out->element_type));
    else if (n_want && out->count != n_want)
        rfi_key_fail(k, RF_ERR_FORMAT, "want %llu elements, one per token, found %llu", RFI_LLU(n_want),
                     RFI_LLU(out->count));
}

/* Get a token id. Out of range is an error, or -1 for keys that many files have wrong and nothing depends on. */
static void rfi_tok_id(rfi_key_reader *k, const char *key, uint32_t n_vocab, int lax, int32_t *out) {
    int64_t v = 0;
    *out = -1;
    if (!rfi_key_read(k, key, 0)) return;
    if (k->kv.type == RF_KV_ARRAY || k->kv.type == RF_KV_BOOL || rf_kv_int(&k->kv, 0, &v, NULL) != RF_OK)
        rfi_key_fail(k, RF_ERR_FORMAT, "want a token id, found %s", rfi_kv_type_name(k->kv.type));
    else if (v >= 0 && v < n_vocab) *out = (int32_t)v;
    else if (!lax) rfi_key_fail(k, RF_ERR_FORMAT, "want a token id below %u, found %lld", n_vocab, (long long)v);
}

/* Choose the algorithm and, for BPE, the pre-tokenizer. */
static void rfi_tok_open_model(rf_tokenizer *t, const char *force_pre, rfi_key_reader *k) {
    static const char *const models[] = {"llama", "gpt2", "gemma4", "bert"};
    rf_string name;
    if (!rfi_key_read(k, RFI_TOK "model", 1)) return;
    rfi_key_text(k, RFI_TOK "model", &name);
    for (size_t i = 0; i < RFI_COUNT(models); i++)
        if (rfi_str_equal(name, models[i])) t->model = models[i];
    if (!t->model)
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "'%.*s' is not supported (supported: llama, gpt2, gemma4, bert)",
                     RFI_STR(name));
    t->is_wpm = t->model == models[3];
    if (!t->model || t->model == models[0] || t->is_wpm) return;
    if (!force_pre && t->model == models[2]) force_pre = models[2]; /* whatever its pre says */
    if (force_pre) name = rf_string_of(force_pre);
    else rfi_key_text(k, RFI_TOK "pre", &name);
    if (name.len == 0) name = rf_string_of("default");
    t->pre = rfi_pre_find(name, &t->pre_name);
    if (!t->pre && force_pre)
        k->result = rfi_fail(k->err, RF_ERR_UNSUPPORTED, 0, "%s: forced pre-tokenizer '%.*s' is not supported",
                             rfi_gguf_path(t->g), RFI_STR(name));
    else if (!t->pre)
        rfi_key_fail(k, RF_ERR_UNSUPPORTED, "pre-tokenizer '%.*s' is not supported; a supported one can be forced",
                     RFI_STR(name));
}

static int rfi_hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* The byte of "<0xHH>", or -1. */
static int rfi_byte_token(rf_string s) {
    if (s.len != 6 || memcmp(s.data, "<0x", 3) != 0 || s.data[5] != '>') return -1;
    int high = rfi_hex_digit(s.data[3]), low = rfi_hex_digit(s.data[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

static void rfi_tok_open_tokens(rf_tokenizer *t, rfi_key_reader *k) {
    rf_kv tokens, scores, types;
    uint64_t cursor = 0;
    rfi_tok_array(k, RFI_TOK "tokens", RF_KV_STRING, 0, &tokens);
    if (tokens.count == 0 || tokens.count > INT32_MAX)
        rfi_key_fail(k, RF_ERR_FORMAT, "want 1 to 2147483647 tokens, found %llu", RFI_LLU(tokens.count));
    rfi_tok_array(k, RFI_TOK "scores", RF_KV_F32, tokens.count, &scores);
    rfi_tok_array(k, RFI_TOK "token_type", RF_KV_I32, tokens.count, &types);
    if (k->result != RF_OK) return;
    t->n_vocab = (uint32_t)tokens.count;
    t->scores = (const unsigned char *)scores.data;
    t->text = (rf_string *)rfi_alloc(&t->allocator, t->n_vocab, sizeof *t->text, "token texts", k->err);
    t->attr = (uint8_t *)rfi_alloc(&t->allocator, t->n_vocab, 1, "token types", k->err);
    if (!t->text || !t->attr) k->result = RF_ERR_MEMORY;
    for (uint32_t i = 0; k->result == RF_OK && i < t->n_vocab; i++) {
        rf_kv_text(&tokens, &cursor, &t->text[i], NULL);
        const uint32_t type = types.count ? rfi_load_u32((const char *)types.data + 4 * (size_t)i) : RFI_TOKEN_NORMAL;
        t->attr[i] = (uint8_t)type;
        if (type < RFI_TOKEN_BYTE || (type == RFI_TOKEN_BYTE && rfi_byte_token(t->text[i]) >= 0)) continue;
        rfi_key_find(k, type > RFI_TOKEN_BYTE ? RFI_TOK "token_type" : RFI_TOK "tokens");
        if (type > RFI_TOKEN_BYTE) rfi_key_fail(k, RF_ERR_FORMAT, "element %u: want 0 to 6, found %d", i, (int)type);
        rfi_key_fail(k, RF_ERR_FORMAT,
                     "element %u is a byte by " RFI_TOK "token_type: want <0x00> to <0xFF>, found '%.*s'", i,
                     RFI_STR(t->text[i]));
    }
}

/* Read named ids and flags. Without add_* keys SPM adds bos and a leading space, BPE bos if its pre-tokenizer says so,
 * WPM bos and eos, which its files call cls and separator. */
static void rfi_tok_open_ids(rf_tokenizer *t, rfi_key_reader *k) {
    const uint32_t n = t->n_vocab;
    rfi_tok_id(k, RFI_TOK "bos_token_id", n, 0, &t->bos);
    rfi_tok_id(k, RFI_TOK "eos_token_id", n, 0, &t->eos);
    rfi_tok_id(k, RFI_TOK "eot_token_id", n, 0, &t->eot);
    rfi_tok_id(k, RFI_TOK "eom_token_id", n, 0, &t->eom);
    rfi_tok_id(k, RFI_TOK "unknown_token_id", n, 1, &t->unknown);
    rfi_tok_id(k, RFI_TOK "padding_token_id", n, 1, &t->padding);
    rfi_key_bool(k, RFI_TOK "add_bos_token", !t->pre || t->pre->flags & RFI_PRE_BOS, 0, &t->add_bos);
    rfi_key_bool(k, RFI_TOK "add_eos_token", t->is_wpm, 0, &t->add_eos);
    rfi_key_bool(k, RFI_TOK "add_space_prefix", !t->pre, 0, &t->add_space);
    if (t->is_wpm) {
        if (t->bos < 0) rfi_tok_id(k, RFI_TOK "cls_token_id", n, 0, &t->bos);
        if (t->eos < 0) rfi_tok_id(k, RFI_TOK "seperator_token_id", n, 0, &t->eos);
        rfi_key_bool(k, RFI_TOK "normalizer.lowercase", 1, 0, &t->lower);
        rfi_key_bool(k, RFI_TOK "normalizer.strip_accents", t->lower, 0, &t->strip);
    }
    if (t->pre) t->add_space = 0;
    if (t->pre && t->pre->flags & RFI_PRE_FORCE_BOS) t->add_bos = 1;
}

/* Make every token with one of these texts a control token with `attr`; *found of each receives its id or stays. */
static void rfi_tok_mark(rf_tokenizer *t, const char *const *texts, size_t n, uint32_t attr, int32_t *found) {
    for (uint32_t i = 0; i < t->n_vocab; i++) {
        char c = t->text[i].len ? t->text[i].data[0] : 0;
        if (c != '<' && c != '[' && c != '_') continue;
        for (size_t k = 0; k < n; k++) {
            if (!rfi_str_equal(t->text[i], texts[k])) continue;
            t->attr[i] = (uint8_t)(RFI_TOKEN_CONTROL | attr);
            found[k] = (int32_t)i;
        }
    }
}

/* Mark the tokens that end a generation: those the file names, and known texts, which become control tokens because
 * many files give them the wrong type. Two exceptions. gpt-oss and solar-open, recognised by their tokens for calls:
 * <|end|> only ends a message, and the tokens around a message are shown. gemma4, recognised by <|tool_response>: </s>
 * is text. */
static void rfi_tok_find_ends(rf_tokenizer *t) {
    enum { END, RETURN, CALL, CALLS, FLUSH, TOOL_RESPONSE, S };
    static const char *const ends[] = {
        "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "</s>", "<|eot_id|>",
        "<|im_end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>",
        "<end_of_utterance>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<|fim_pad|>", "<|fim_repo|>",
        "<|repo_name|>", "<|file_sep|>", "<\xef\xbd\x9c\x65nd\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>"};
    static const char *const frame[] = {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"};
    int32_t found[RFI_COUNT(ends)], framed[RFI_COUNT(frame)];
    const int32_t named[] = {t->eos, t->eot, t->eom};
    for (size_t k = 0; k < RFI_COUNT(ends); k++) found[k] = -1;
    rfi_tok_mark(t, ends, RFI_COUNT(ends), RFI_TOKEN_END, found);
    int calls = found[RETURN] >= 0 ? found[CALL] >= 0 : found[FLUSH] >= 0 && found[CALLS] >= 0;
    if (calls) rfi_tok_mark(t, frame, RFI_COUNT(frame), RFI_TOKEN_SHOWN, framed);
    if (found[TOOL_RESPONSE] >= 0 && found[S] >= 0) t->attr[found[S]] = RFI_TOKEN_NORMAL;
    for (size_t k = 0; k < RFI_COUNT(named); k++)
        if (named[k] >= 0) t->attr[named[k]] |= RFI_TOKEN_END;
}

/* Order of special tokens: by text; of equal texts the user-defined first, then the smaller id. */
static int rfi_special_less(const rf_tokenizer *t, int32_t a, int32_t b) {
    rf_string x = t->text[a], y = t->text[b];
    int c = memcmp(x.data, y.data, (size_t)rfi_min_u64(x.len, y.len));
    if (c != 0) return c < 0;
    if (x.len != y.len) return x.len < y.len;
    int ux = rfi_token_type(t, (uint32_t)a) == RFI_TOKEN_USER, uy = rfi_token_type(t, (uint32_t)b) == RFI_TOKEN_USER;
    return ux != uy ? ux : a < b;
}

/* Does the name say Phi-3? All but three of its special tokens drop the whitespace after them; no key says so. */
static int rfi_tok_is_phi3(const rf_gguf *g) {
    rfi_key_reader k = {.g = g};
    rf_string name;
    rfi_key_text(&k, "general.name", &name);
    for (uint64_t i = 0; i + 4 <= name.len; i++) {
        const char *p = name.data + i;
        if ((p[0] | 32) != 'p' || (p[1] | 32) != 'h' || (p[2] | 32) != 'i') continue;
        if (p[3] == '3' || (p[3] == '-' && i + 5 <= name.len && p[4] == '3')) return 1;
    }
    return 0;
}

/* Collect, sort and index the special tokens, which are searched in text before anything else. */
static rf_result rfi_tok_open_special(rf_tokenizer *t, rf_error *err) {
    uint32_t n = 0, phi3 = (uint32_t)rfi_tok_is_phi3(t->g);
    for (int pass = 0; pass < 2; pass++) {
        n = 0;
        for (uint32_t i = 0; i < t->n_vocab; i++) {
            uint32_t type = rfi_token_type(t, i);
            if (type != RFI_TOKEN_CONTROL && type != RFI_TOKEN_UNKNOWN && type != RFI_TOKEN_USER) continue;
            if (t->text[i].len == 0 || t->text[i].len > RFI_SPECIAL_MAX_BYTES) continue;
            if (pass == 1) t->special[n] = (int32_t)i;
            n++;
        }
        if (pass == 0) t->special = (int32_t *)rfi_alloc(&t->allocator, n, sizeof *t->special, "special tokens", err);
        if (!t->special) return RF_ERR_MEMORY;
    }
    uint32_t gap = 1;
    while (gap < n / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3) /* Shell sort: in place, no recursion; few files have over a thousand of them */
        for (uint32_t i = gap; i < n; i++) {
            int32_t id = t->special[i];
            uint32_t k = i;
            for (; k >= gap && rfi_special_less(t, id, t->special[k - gap]); k -= gap)
                t->special[k] = t->special[k - gap];
            t->special[k] = id;
        }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = (uint32_t)t->special[i];
        rf_string s = t->text[id], last = t->n_special ? t->text[t->special[t->n_special - 1]] : (rf_string){NULL, 0};
        if (last.len == s.len && memcmp(last.data, s.data, (size_t)s.len) == 0) continue;
        t->special[t->n_special++] = (int32_t)id;
        t->special_first[(unsigned char)s.data[0] + 1] = t->n_special;
        if (rfi_token_type(t, id) == RFI_TOKEN_USER) t->n_user++;
        if (phi3 && !rfi_str_equal(s, "<unk>") && !rfi_str_equal(s, "<s>") && !rfi_str_equal(s, "<|endoftext|>"))
            t->attr[id] |= RFI_TOKEN_STRIP;
    }
    for (uint32_t c = 1; c <= 256; c++)
        if (t->special_first[c] == 0) t->special_first[c] = t->special_first[c - 1];
    return RF_OK;
}

/* Index the texts of plain tokens. Control, unknown and byte tokens are none: plain text cannot become them. Of equal
 * texts the first id wins. */
static rf_result rfi_tok_open_texts(rf_tokenizer *t, rf_error *err) {
    t->n_texts = rfi_slot_count(t->n_vocab);
    t->texts = (rfi_text_slot *)rfi_alloc(&t->allocator, t->n_texts, sizeof *t->texts, "vocabulary index", err);
    t->hash = (uint64_t *)rfi_alloc(&t->allocator, t->n_vocab, sizeof *t->hash, "token hashes", err);
    if (!t->texts || !t->hash) return RF_ERR_MEMORY;
    for (uint32_t i = 0; i < t->n_vocab; i++) {
        rf_string s = t->text[i];
        uint32_t type = rfi_token_type(t, i);
        if (type == RFI_TOKEN_CONTROL || type == RFI_TOKEN_UNKNOWN || type == RFI_TOKEN_BYTE) continue;
        if (s.len == 0 || s.len > UINT32_MAX) continue;
        uint64_t hash = rfi_text_hash(t, s.data, s.len);
        rfi_text_slot *slot = &t->texts[rfi_text_slot_of(t, s.data, s.len, hash)];
        if (slot->id1) continue;
        *slot = (rfi_text_slot){(uint32_t)hash, i + 1};
        t->hash[i] = hash;
        t->attr[i] |= RFI_TOKEN_PLAIN;
        if (s.len > t->plain_max_bytes) t->plain_max_bytes = (uint32_t)s.len;
    }
    return RF_OK;
}

static int rfi_tok_is_raw(const rf_tokenizer *t) { return t->pre && t->pre->flags & RFI_PRE_RAW; }

/* Find the token of each byte. BPE: its character in GPT-2's alphabet; a byte without a token is dropped from text, as
 * llama.cpp does. SPM, and BPE without that alphabet: the byte token; without one its text as a plain token; then, SPM
 * only, the byte itself, then unknown. */
static void rfi_tok_find_bytes(rf_tokenizer *t) {
    static const char hex[] = "0123456789ABCDEF";
    int is_spelled = !t->pre || rfi_tok_is_raw(t);
    for (uint32_t b = 0; b < 256; b++) {
        char byte = (char)b, spelled[6] = {'<', '0', 'x', hex[b >> 4], hex[b & 15], '>'}, letter[2];
        if (is_spelled) t->byte_id[b] = rfi_token_find(t, spelled, sizeof spelled);
        else t->byte_id[b] = rfi_token_find(t, letter, rfi_put_utf8(rfi_byte_char(b), letter));
        if (t->pre) continue;
        if (t->byte_id[b] < 0) t->byte_id[b] = rfi_token_find(t, &byte, 1);
        if (t->byte_id[b] < 0) t->byte_id[b] = t->unknown;
    }
    for (uint32_t i = is_spelled ? t->n_vocab : 0; i-- > 0;)
        if (rfi_token_type(t, i) == RFI_TOKEN_BYTE) t->byte_id[rfi_byte_token(t->text[i])] = (int32_t)i;
}

/* Is token id's text left + right? */
static int rfi_merge_makes(const rf_tokenizer *t, rf_string left, rf_string right, uint32_t id) {
    if (id >= t->n_vocab || !(t->attr[id] & RFI_TOKEN_PLAIN)) return 0;
    rf_string s = t->text[id];
    return s.len == left.len + right.len && memcmp(s.data, left.data, (size_t)left.len) == 0 &&
           memcmp(s.data + left.len, right.data, (size_t)right.len) == 0;
}

/* The token that a merge makes, or -1. Files list merges in the order of their results, so the last result and the
 * id after it are tried first. `joined` has room for the longest plain token. */
static int32_t rfi_merge_result(const rf_tokenizer *t, rf_string left, rf_string right, uint32_t last, char *joined) {
    if (rfi_merge_makes(t, left, right, last)) return (int32_t)last;
    if (rfi_merge_makes(t, left, right, last + 1)) return (int32_t)last + 1;
    if (left.len + right.len > t->plain_max_bytes) return -1;
    memcpy(joined, left.data, (size_t)left.len);
    memcpy(joined + left.len, right.data, (size_t)right.len);
    return rfi_token_find(t, joined, left.len + right.len);
}

/* Insert a group of merges into the table and empty the group; the first of equals counts. The table is larger than
 * the caches, so all slots of the group are prefetched before the first is needed. */
static void rfi_merges_insert(rf_tokenizer *t, const rfi_merge_slot *group, uint32_t *n) {
    for (uint32_t i = 0; i < *n; i++) __builtin_prefetch(&t->merges[rfi_first_slot(group[i].key, t->n_merges)], 1);
    for (uint32_t i = 0; i < *n; i++) {
        rfi_merge_slot *slot = &t->merges[rfi_merge_slot_of(t, group[i].key)];
        if (slot->rank1 == 0) *slot = group[i];
    }
    *n = 0;
}

/* Read the merges, "left right". A merge that makes no token is left out: pruned vocabularies have such. */
static void rfi_tok_open_merges(rf_tokenizer *t, rfi_key_reader *k) {
    rf_kv kv;
    uint64_t cursor = 0;
    int32_t last = 0;
    rfi_merge_slot group[32] = {{0, 0, 0}};
    uint32_t n_group = 0;
    rfi_tok_array(k, RFI_TOK "merges", RF_KV_STRING, 0, &kv);
    if (kv.count > INT32_MAX)
        rfi_key_fail(k, RF_ERR_FORMAT, "want at most 2147483647, found %llu", RFI_LLU(kv.count));
    if (k->result != RF_OK) return;
    t->n_merges = rfi_slot_count(kv.count);
    t->merges = (rfi_merge_slot *)rfi_alloc(&t->allocator, t->n_merges, sizeof *t->merges, "merges", k->err);
    char *joined = (char *)rfi_alloc(&t->allocator, t->plain_max_bytes, 1, "merge text", k->err);
    if (!t->merges || !joined) k->result = RF_ERR_MEMORY;
    for (uint32_t i = 0; k->result == RF_OK && i < kv.count; i++) {
        rf_string s = {"", 0}, left, right;
        rf_kv_text(&kv, &cursor, &s, NULL);
        const char *space = s.len ? (const char *)memchr(s.data, ' ', (size_t)s.len) : NULL;
        left = (rf_string){s.data, space ? (uint64_t)(space - s.data) : 0};
        right = (rf_string){space ? space + 1 : s.data, space ? s.len - left.len - 1 : 0};
        if (left.len == 0 || right.len == 0 || memchr(right.data, ' ', (size_t)right.len)) {
            rfi_key_fail(k, RF_ERR_FORMAT, "element %u: want two tokens with one space between, found '%.*s'", i,
                         RFI_STR(s));
            break;
        }
        int32_t result = rfi_merge_result(t, left, right, (uint32_t)last, joined);
        if (result < 0) continue;
        last = result;
        uint64_t key = rfi_merge_key(rfi_text_hash(t, left.data, left.len), rfi_text_hash(t, right.data, right.len));
        group[n_group++] = (rfi_merge_slot){key, i + 1, (uint32_t)result};
        if (n_group == RFI_COUNT(group)) rfi_merges_insert(t, group, &n_group);
    }
    if (k->result == RF_OK) rfi_merges_insert(t, group, &n_group);
    rfi_free(&t->allocator, joined);
}

ROCMFORGE_API rf_result rf_tokenizer_open(rf_gguf *g, const char *pre, rf_tokenizer **out, rf_error *err) {
    rfi_clear(err);
    if (out) *out = NULL;
    if (!g || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_tokenizer_open: g and out must not be NULL");
    rf_tokenizer *t = (rf_tokenizer *)rfi_alloc(rfi_gguf_allocator(g), 1, sizeof *t, "tokenizer", err);
    if (!t) return RF_ERR_MEMORY;
    t->allocator = *rfi_gguf_allocator(g);
    t->g = g;
    rfi_gguf_hold(g);
    rfi_key_reader k = {.g = g, .err = err};
    rfi_tok_open_model(t, pre, &k);
    rfi_tok_open_tokens(t, &k);
    rfi_tok_open_ids(t, &k);
    if (k.result == RF_OK) rfi_tok_find_ends(t);
    if (k.result == RF_OK) k.result = rfi_tok_open_special(t, err);
    if (k.result == RF_OK) k.result = rfi_tok_open_texts(t, err);
    if (k.result == RF_OK) rfi_tok_find_bytes(t);
    if (t->pre) rfi_tok_open_merges(t, &k);
    if (k.result != RF_OK) rf_tokenizer_close(t, NULL);
    else *out = t;
    return k.result;
}

ROCMFORGE_API rf_result rf_tokenizer_close(rf_tokenizer *t, rf_error *err) {
    rfi_clear(err);
    if (!t) return RF_OK;
    if (atomic_load(&t->n_users))
        return rfi_fail(err, RF_ERR_BUSY, 0, "tokenizer of %s: a scheduler uses it", rfi_gguf_path(t->g));
    rf_allocator a = t->allocator;
    rfi_free(&a, t->text);
    rfi_free(&a, t->attr);
    rfi_free(&a, t->texts);
    rfi_free(&a, t->hash);
    rfi_free(&a, t->merges);
    rfi_free(&a, t->special);
    rfi_gguf_drop(t->g);
    rfi_free(&a, t);
    return RF_OK;
}

/* ---- text to ids: the state of one call ---- */

/* A piece of the word that is being merged. Merged pieces leave the linked list with id DEAD. */
typedef struct rfi_symbol {
    int32_t id;        /* token, -1: none */
    uint32_t start;    /* SPM: byte in the word; BPE: the byte itself */
    uint32_t prev, next;
} rfi_symbol;

enum { RFI_SYMBOL_DEAD = -2 };

typedef struct rfi_heap_item {
    uint64_t key;    /* smallest first; the low half is a position, so that the leftmost of equals wins */
    uint32_t end;    /* merges: symbol after the pair                                                    */
    int32_t id;      /* merges: token that the pair becomes                                              */
} rfi_heap_item;

typedef struct rfi_tokenizing {
    const rf_tokenizer *t;
    rf_error *err;
    int32_t *out;
    uint32_t capacity, count;
    rfi_heap_item *heap;
    uint64_t n_heap, heap_capacity;
    rfi_symbol *symbols;    /* one more than the word has, as a sentinel */
    uint64_t symbol_capacity;
    char *word;             /* the word as the vocabulary spells it      */
    uint64_t word_capacity;
    const size_t *borders;  /* [n_borders] start and end of texts in which control tokens are not searched */
    uint32_t n_borders;
} rfi_tokenizing;

static void rfi_put_id(rfi_tokenizing *w, int32_t id) {
    if (id < 0) return;
    if (w->count < w->capacity) w->out[w->count] = id;
    w->count++;
}

/* Grow a block, whose pointer is at *block, to n elements and keep the first n_kept; unchanged if memory is short. */
static rf_result rfi_grow(rfi_tokenizing *w, void *block, uint64_t *capacity, uint64_t n, uint64_t n_kept,
                          uint64_t element_bytes, const char *what) {
    if (n <= *capacity) return RF_OK;
    uint64_t want = rfi_max_u64(n, *capacity * 2);
    void *old, *bigger = rfi_alloc(&w->t->allocator, want, element_bytes, what, w->err);
    if (!bigger) return RF_ERR_MEMORY;
    memcpy(&old, block, sizeof old);
    if (n_kept) memcpy(bigger, old, (size_t)(n_kept * element_bytes));
    rfi_free(&w->t->allocator, old);
    memcpy(block, &bigger, sizeof bigger);
    *capacity = want;
    return RF_OK;
}

static rf_result rfi_need_symbols(rfi_tokenizing *w, uint64_t n) {
    return rfi_grow(w, &w->symbols, &w->symbol_capacity, n + 1, 0, sizeof *w->symbols, "symbols of a text");
}

static rf_result rfi_need_word(rfi_tokenizing *w, uint64_t n_bytes) {
    return rfi_grow(w, &w->word, &w->word_capacity, n_bytes, 0, 1, "text");
}

static rf_result rfi_heap_push(rfi_tokenizing *w, rfi_heap_item item) {
    rf_result r = rfi_grow(w, &w->heap, &w->heap_capacity, w->n_heap + 1, w->n_heap, sizeof item, "merge queue");
    if (r != RF_OK) return r;
    uint64_t i = w->n_heap++;
    for (; i > 0 && item.key < w->heap[(i - 1) / 2].key; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = item;
    return RF_OK;
}

static rfi_heap_item rfi_heap_pop(rfi_tokenizing *w) {
    rfi_heap_item top = w->heap[0], last = w->heap[--w->n_heap];
    uint64_t i = 0;
    for (uint64_t child; (child = 2 * i + 1) < w->n_heap; i = child) {
        if (child + 1 < w->n_heap && w->heap[child + 1].key < w->heap[child].key) child++;
        if (last.key <= w->heap[child].key) break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = last;
    return top;
}

/* ---- merging: both vocabularies ---- */

/* Queue the pair that starts at symbol `left`, if it makes a token. BPE: low ranks first. SPM: high scores first. */
static rf_result rfi_merge_try(rfi_tokenizing *w, uint32_t left, uint32_t n) {
    const rf_tokenizer *t = w->t;
    uint32_t right = w->symbols[left].next, priority;
    if (right == n) return RF_OK;
    rfi_heap_item item = {0, w->symbols[right].next, -1};
    if (t->pre) {
        if (w->symbols[left].id < 0 || w->symbols[right].id < 0) return RF_OK;
        uint64_t key = rfi_merge_key(t->hash[w->symbols[left].id], t->hash[w->symbols[right].id]);
        const rfi_merge_slot *m = &t->merges[rfi_merge_slot_of(t, key)];
        if (m->rank1 == 0) return RF_OK;
        priority = m->rank1;
        item.id = (int32_t)m->result;
    } else {
        uint32_t start = w->symbols[left].start;
        item.id = rfi_token_find(t, w->word + start, w->symbols[item.end].start - start);
        if (item.id < 0) return RF_OK;
        /* Maps float bits to ints in the same order; NaN counts as the lowest score, -0 as 0. */
        float score = t->scores ? rfi_load_f32(t->scores + 4 * (size_t)item.id) + 0.0f : 0.0f;
        uint32_t bits;
        if (score != score) score = -INFINITY;
        memcpy(&bits, &score, sizeof bits);
        priority = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    }
    item.key = (uint64_t)priority << 32 | left;
    return rfi_heap_push(w, item);
}

/* Merge the n symbols of a word, best pair first, until no pair makes a token. */
static rf_result rfi_merge(rfi_tokenizing *w, uint32_t n) {
    rf_result r = RF_OK;
    w->n_heap = 0;
    for (uint32_t i = 0; i < n; i++) w->symbols[i].prev = i - 1, w->symbols[i].next = i + 1;
    for (uint32_t i = 0; i < n && r == RF_OK; i++) r = rfi_merge_try(w, i, n);
    while (r == RF_OK && w->n_heap > 0) {
        rfi_heap_item item = rfi_heap_pop(w);
        uint32_t left = (uint32_t)item.key, right = w->symbols[left].next;
        /* The pair is still as queued if its two symbols end where they ended: symbols only grow. */
        if (w->symbols[left].id == RFI_SYMBOL_DEAD || right == n || w->symbols[right].next != item.end) continue;
        w->symbols[left].id = item.id;
        w->symbols[left].next = item.end;
        w->symbols[right].id = RFI_SYMBOL_DEAD;
        if (item.end < n) w->symbols[item.end].prev = left;
        r = rfi_merge_try(w, left, n);
        if (r == RF_OK && left > 0) r = rfi_merge_try(w, w->symbols[left].prev, n);
    }
    return r;
}

/* Merge n symbols of w->word and give out the ids; what is no token is given out as its bytes. */
static rf_result rfi_merge_spelt(rfi_tokenizing *w, uint32_t n) {
    rf_result r = rfi_merge(w, n);
    for (uint32_t i = 0; r == RF_OK && i < n; i = w->symbols[i].next) {
        rfi_put_id(w, w->symbols[i].id);
        for (uint32_t k = w->symbols[i].start; w->symbols[i].id < 0 && k < w->symbols[w->symbols[i].next].start; k++)
            rfi_put_id(w, w->t->byte_id[(unsigned char)w->word[k]]);
    }
    return r;
}

/* ---- SPM ---- */

/* Tokenize plain text: spaces become U+2581, then everything merges at once. What is no token is given out as its
 * bytes. Characters are cut by their first byte alone, as llama.cpp does: a malformed one includes what follows. */
static rf_result rfi_spm_text(rfi_tokenizing *w, const unsigned char *text, uint32_t n_bytes, int add_space) {
    uint64_t n_word = 0;
    uint32_t n = 0;
    rf_result r = rfi_need_word(w, 3 * ((uint64_t)n_bytes + 1));
    if (r != RF_OK) return r;
    for (uint32_t i = 0; i < n_bytes + (uint32_t)add_space; i++) {
        unsigned char c = i < (uint32_t)add_space ? ' ' : text[i - (uint32_t)add_space];
        if (c != ' ') w->word[n_word++] = (char)c;
        else memcpy(w->word + n_word, rfi_spm_space, 3), n_word += 3;
    }
    r = rfi_need_symbols(w, n_word);
    if (r != RF_OK) return r;
    for (uint64_t at = 0; at < n_word; n++) {
        unsigned char c = (unsigned char)w->word[at];
        uint64_t len = rfi_min_u64(c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4, n_word - at);
        w->symbols[n].id = rfi_token_find(w->t, w->word + at, len);
        w->symbols[n].start = (uint32_t)at;
        at += len;
    }
    w->symbols[n].start = (uint32_t)n_word;
    return rfi_merge_spelt(w, n);
}

/* ---- WPM ---- */

enum { RFI_WPM_TOKEN_MAX = 256 }; /* bytes: longer tokens are not searched, or a vocabulary could make text slow */

/* Ideographs: each is a word. Source: BERT's tokenizer in Hugging Face's tokenizers. */
static int rfi_wpm_is_word(uint32_t cp) {
    static const uint32_t ranges[][2] = {{0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xf900, 0xfaff},   {0x20000, 0x2a6df},
                                         {0x2a700, 0x2b81f}, {0x2b920, 0x2ceaf}, {0x2f800, 0x2fa1f}};
    for (size_t i = 0; i < RFI_COUNT(ranges); i++)
        if (cp >= ranges[i][0] && cp <= ranges[i][1]) return 1;
    uint32_t class = rfi_class(cp);
    return class == RFI_PUNCT || (class == RFI_SYMBOL && cp < 0x7f);
}

/* The word in w->word begins with U+2581. Take the longest token that fits until the end; if none fits: unknown. */
static void rfi_wpm_word(rfi_tokenizing *w, uint64_t n) {
    uint32_t before = w->count, longest = (uint32_t)rfi_min_u64(w->t->plain_max_bytes, RFI_WPM_TOKEN_MAX);
    int32_t id = 0;
    if (n <= 3) return;
    for (uint64_t at = 0; at < n && id >= 0;) {
        uint64_t len = rfi_min_u64(longest, n - at);
        while (len > 0 && (id = rfi_token_find(w->t, w->word + at, len)) < 0) len--;
        if (len == 0) id = -1;
        if (id >= 0) rfi_put_id(w, id);
        at += len;
    }
    if (id >= 0) return;
    w->count = before;
    rfi_put_id(w, w->t->unknown);
}

/* Cut text into words: at spaces; control characters are dropped; punctuation and ideographs are words. */
static rf_result rfi_wpm_text(rfi_tokenizing *w, const unsigned char *text, uint32_t n_bytes) {
    rf_result r = rfi_need_word(w, 3 * (uint64_t)n_bytes + 8);
    if (r != RF_OK) return r;
    memcpy(w->word, rfi_spm_space, 3);
    uint64_t n = 3;
    for (uint32_t at = 0; at < n_bytes;) {
        rfi_char c = rfi_utf8(text + at, n_bytes - at);
        uint32_t cp = w->t->strip ? rfi_unicode_base(c.cp) : c.cp, class = rfi_class(cp);
        at += c.n_bytes;
        if (class == RFI_SPACE) rfi_wpm_word(w, n), n = 3;
        if (class == RFI_SPACE || cp == 0 || cp == 0xfffd || rfi_unicode_is_control(cp)) continue;
        if (w->t->strip && class == RFI_MARK) continue;
        if (w->t->lower) cp = rfi_unicode_to_lower(cp);
        int is_word = rfi_wpm_is_word(cp);
        if (is_word) rfi_wpm_word(w, n), n = 3;
        n += rfi_put_utf8(cp, w->word + n);
        if (is_word) rfi_wpm_word(w, n), n = 3;
    }
    rfi_wpm_word(w, n);
    return RF_OK;
}

/* ---- BPE: cutting text into words ----
 * Each rule is a regular expression of some program; these scanners are hand-written matchers for them. A rule is a
 * list of passes. A pass cuts the pieces that the pass before left: each match becomes a piece, and so does the text
 * between matches. A pass sees nothing outside its piece. Where other programs' expressions distinguish \p{Lu} and
 * \p{Ll}, these distinguish A-Z and a-z alone, as llama.cpp's do. */

/* One pass in progress. No character is read more than a few times, or long runs would cost the square of their length:
 * where a match depends on the end of a run, that end is kept. */
struct rfi_scan {
    const unsigned char *text;
    uint32_t end;     /* of the piece                                               */
    uint32_t skip;    /* set by a pass without a match: none starts before it       */
    uint32_t run_end; /* end of the run (of digits, of spaces) that was read        */
};

typedef struct rfi_scan_char {
    uint32_t cp, class, next; /* class 0: the end; next: where the next character starts */
} rfi_scan_char;

static rfi_scan_char rfi_scan_at(const rfi_scan *s, uint32_t pos) {
    if (pos >= s->end) return (rfi_scan_char){0, 0, pos};
    rfi_char c = rfi_utf8(s->text + pos, s->end - pos);
    return (rfi_scan_char){c.cp, rfi_class(c.cp), pos + c.n_bytes};
}

static uint32_t rfi_scan_run(const rfi_scan *s, uint32_t pos, uint32_t classes) {
    for (;;) {
        rfi_scan_char c = rfi_scan_at(s, pos);
        if (!(c.class & classes)) return pos;
        pos = c.next;
    }
}

static int rfi_is_digit(uint32_t c) { return c - '0' < 10; }
static int rfi_is_ascii_letter(uint32_t c) { return (c | 32) - 'a' < 26; }
static int rfi_is_newline(uint32_t c) { return c == '\r' || c == '\n'; }

/* 's|'t|'re|'ve|'m|'ll|'d: end of it, or pos. */
static uint32_t rfi_scan_contraction(const rfi_scan *s, uint32_t pos, int any_case) {
    if (s->end - pos < 2 || s->text[pos] != '\'') return pos;
    unsigned char fold = any_case ? 32 : 0, a = s->text[pos + 1] | fold;
    unsigned char b = s->end - pos > 2 ? s->text[pos + 2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return pos + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return pos + 3;
    return pos;
}

/* \s*[\r\n]+ (if newlines) | \s+(?!\S) | \s+ : of spaces before a word the last one is left to the word. */
static uint32_t rfi_scan_spaces(const rfi_scan *s, uint32_t pos, int newlines) {
    uint32_t start = pos, last = pos, newline_end = 0;
    rfi_scan_char c;
    while ((c = rfi_scan_at(s, pos)).class & RFI_SPACE) {
        last = pos;
        pos = c.next;
        if (rfi_is_newline(c.cp)) newline_end = pos;
    }
    if (newlines && newline_end) return newline_end;
    return c.class && last > start ? last : pos;
}

/* \s*[\r\n]+ | \s{512}(?!\S) | \s{256}(?!\S) | ... | \s{8}(?!\S) | \s{4}(?!\S) | \s{1,2}(?!\S) | \s */
static uint32_t rfi_scan_space_sizes(rfi_scan *s, uint32_t pos) {
    if (pos >= s->run_end) { /* else the run is known to have no newline */
        uint32_t newline_end = 0, end = pos;
        for (rfi_scan_char c; (c = rfi_scan_at(s, end)).class & RFI_SPACE; end = c.next)
            if (rfi_is_newline(c.cp)) newline_end = c.next;
        if (newline_end) return newline_end;
        s->run_end = end;
    }
    uint32_t ends[514], n = 0; /* ends[i]: position after i characters */
    for (ends[0] = pos; n < 513 && ends[n] < s->run_end; n++) ends[n + 1] = rfi_scan_at(s, ends[n]).next;
    if (n == 0) return pos;
    for (uint32_t size = 512; size > 0; size /= 2)
        if (n > size || (n == size && s->run_end == s->end)) return ends[size];
    return ends[1];
}

/* ---- sets of characters, sorted ---- */

typedef uint32_t rfi_range[2]; /* first, last */

enum {
    RFI_SET_CJK_OLD, RFI_SET_CJK, RFI_SET_HANGUL, RFI_SET_BOPOMOFO, RFI_SET_CJK_PUNCT, RFI_SET_ASIAN, RFI_SET_HAN,
    RFI_SET_PORO_BETWEEN, RFI_SET_DEEPSEEK_PUNCT, RFI_SET_DEEPSEEK_LETTERS,
    RFI_SET_SPACE = 64 /* with a set, or classes: one space may come first */
};

#define RFI_SET(...) {(const rfi_range[]){__VA_ARGS__}, RFI_COUNT(((const rfi_range[]){__VA_ARGS__}))}
static const struct { const rfi_range *ranges; size_t n; } rfi_sets[] = {
    /* 4e00-9fa5, 0800-4e00, ac00-d7ff of deepseek-llm and -coder */
    [RFI_SET_CJK_OLD] = RFI_SET({0x800, 0x9fa5}, {0xac00, 0xd7ff}),
    [RFI_SET_CJK] = RFI_SET({0x3040, 0x30ff}, {0x4e00, 0x9fa5}),
    [RFI_SET_HANGUL] = RFI_SET({0x3131, 0x318e}, {0xac00, 0xd7a3}),
    [RFI_SET_BOPOMOFO] = RFI_SET({0x3105, 0x312f}),
    [RFI_SET_CJK_PUNCT] = RFI_SET({0x2014, 0x2014}, {0x2018, 0x2019}, {0x201c, 0x201d}, {0x2026, 0x2026},
        {0x3001, 0x303f}, {0xfe30, 0xfe4f}, {0xff01, 0xff01}, {0xff0c, 0xff0c}, {0xff1a, 0xff1b}),
    [RFI_SET_ASIAN] = RFI_SET({0xe40, 0xeff}, {0x1000, 0x109f}, {0x1100, 0x11ff}, {0x1780, 0x17ff}, {0x2f00, 0x2fdf},
        {0x3040, 0x30ff}, {0x3400, 0x4dbf}, {0x4e00, 0x9fff}, {0xa9e0, 0xa9ff}, {0xaa60, 0xaa7f}, {0xac00, 0xd7af},
        {0xf900, 0xfaff}, {0xff65, 0xff9f}),
    [RFI_SET_HAN] = RFI_SET({0x3400, 0x4dbf}, {0x4e00, 0x9fff}, {0xf900, 0xfaff}, {0x20000, 0x2a6df},
        {0x2a700, 0x2ebef}, {0x2f800, 0x2fa1f}),
    /* ( ) | . , ! ? and six similar: what poro-chat leaves between words */
    [RFI_SET_PORO_BETWEEN] = RFI_SET({'!', '!'}, {'(', ')'}, {',', ','}, {'.', '.'}, {'?', '?'}, {'|', '|'},
        {0x60c, 0x60c}, {0x6d4, 0x6d4}, {0x964, 0x964}, {0x2026, 0x2026}, {0x3001, 0x3002}, {0xff0c, 0xff0c}),
    [RFI_SET_DEEPSEEK_PUNCT] = RFI_SET({'!', '/'}, {':', '~'}, {0x2018, 0x201f}, {0x3000, 0x3002}, {0xff01, 0xff0f},
        {0xff1a, 0xff5e}),
    /* letters with case, as in deepseek-llm's expression */
    [RFI_SET_DEEPSEEK_LETTERS] = RFI_SET({0x41, 0x5a}, {0x61, 0x7a}, {0xb5, 0xb5}, {0xc0, 0xd6}, {0xd8, 0xf6},
        {0xf8, 0x1ba}, {0x1bc, 0x1bf}, {0x1c4, 0x293}, {0x295, 0x2af}, {0x370, 0x373}, {0x376, 0x377}, {0x37b, 0x37d},
        {0x37f, 0x37f}, {0x386, 0x386}, {0x388, 0x38a}, {0x38c, 0x38c}, {0x38e, 0x3a1}, {0x3a3, 0x3f5}, {0x3f7, 0x481},
        {0x48a, 0x52f}, {0x531, 0x556}, {0x10a0, 0x10c5}, {0x13a0, 0x13f5}, {0x13f8, 0x13fd}, {0x1c90, 0x1cba},
        {0x1cbd, 0x1cbf}, {0x1d00, 0x1d2b}, {0x1d6b, 0x1d77}, {0x1d79, 0x1d9a}, {0x1e00, 0x1f15}, {0x1f18, 0x1f1d},
        {0x1f20, 0x1f45}, {0x1f48, 0x1f4d}, {0x1f50, 0x1f57}, {0x1f59, 0x1f59}, {0x1f5b, 0x1f5b}, {0x1f5d, 0x1f5d},
        {0x1f5f, 0x1f7d}, {0x1f80, 0x1fb4}, {0x1fb6, 0x1fbc}, {0x1fbe, 0x1fbe}, {0x1fc2, 0x1fc4}, {0x1fc6, 0x1fcc},
        {0x1fd0, 0x1fd3}, {0x1fd6, 0x1fdb}, {0x1fe0, 0x1fec}, {0x1ff2, 0x1ff4}, {0x1ff6, 0x1ffc}, {0x2102, 0x2102},
        {0x2107, 0x2107}, {0x210a, 0x2113}, {0x2115, 0x2115}, {0x2119, 0x211d}, {0x2124, 0x2124}, {0x2126, 0x2126},
        {0x2128, 0x2128}, {0x212a, 0x212d}, {0x212f, 0x2134}, {0x2139, 0x2139}, {0x213c, 0x213f}, {0x2145, 0x2149},
        {0x214e, 0x214e}, {0x2183, 0x2184}, {0x2c00, 0x2c7b}, {0x2c7e, 0x2ce4}, {0x2ceb, 0x2cee}, {0x2cf2, 0x2cf3},
        {0xa640, 0xa66d}, {0xa680, 0xa69b}, {0xa722, 0xa76f}, {0xa771, 0xa787}, {0xa78b, 0xa78e}, {0xab70, 0xabbf},
        {0xfb00, 0xfb06}, {0xfb13, 0xfb17}, {0xff21, 0xff3a}, {0xff41, 0xff5a}, {0x10400, 0x1044f}, {0x104b0, 0x104d3},
        {0x104d8, 0x104fb}, {0x10c80, 0x10cb2}, {0x10cc0, 0x10cf2}, {0x118a0, 0x118df}, {0x1e900, 0x1e943}),
};
#undef RFI_SET

/* Spaces beyond ASCII are in no set. */
static int rfi_in_set(const rfi_scan_char *c, uint32_t set) {
    if (!c->class || c->class & RFI_SPACE) return 0;
    const size_t i = rfi_count_below(&rfi_sets[set].ranges[0][1], rfi_sets[set].n, 2, c->cp); /* ranges before cp */
    return i < rfi_sets[set].n && rfi_sets[set].ranges[i][0] <= c->cp;
}

/* ---- passes ---- */

/* [set]+ , with RFI_SET_SPACE: \s?[set]+ */
static uint32_t rfi_scan_set(rfi_scan *s, uint32_t pos, uint32_t how) {
    rfi_scan_char c = rfi_scan_at(s, pos);
    uint32_t set = how & ~(uint32_t)RFI_SET_SPACE, from = how & RFI_SET_SPACE && c.class & RFI_SPACE ? c.next : pos;
    uint32_t end = from;
    while (c = rfi_scan_at(s, end), rfi_in_set(&c, set)) end = c.next;
    return end > from ? end : pos;
}

/* [classes]+ , with RFI_SET_SPACE << 8: \s?[classes]+ */
static uint32_t rfi_scan_classes(rfi_scan *s, uint32_t pos, uint32_t how) {
    rfi_scan_char c = rfi_scan_at(s, pos);
    uint32_t from = how & RFI_SET_SPACE << 8 && c.class & RFI_SPACE ? c.next : pos;
    uint32_t end = rfi_scan_run(s, from, how & 255);
    return end > from ? end : pos;
}

/* \p{N}{1,max} */
static uint32_t rfi_scan_number(rfi_scan *s, uint32_t pos, uint32_t max) {
    rfi_scan_char c;
    for (uint32_t n = 0; n < max && (c = rfi_scan_at(s, pos)).class & RFI_NUMBER; n++) pos = c.next;
    return pos;
}

/* [0-9][0-9][0-9] */
static uint32_t rfi_scan_three(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    for (uint32_t i = 0; i < 3; i++)
        if (s->end - pos < 3 || !rfi_is_digit(s->text[pos + i])) return pos;
    return pos + 3;
}

/* [\r\n] */
static uint32_t rfi_scan_newline(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    return pos + (rfi_is_newline(s->text[pos]) != 0);
}

/* [^\n]+|[\n]+ */
static uint32_t rfi_scan_lines(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    int newline = s->text[pos] == '\n';
    while (pos < s->end && (s->text[pos] == '\n') == newline) pos++;
    return pos;
}

/* \s+$ */
static uint32_t rfi_scan_last_spaces(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    uint32_t end = rfi_scan_run(s, pos, RFI_SPACE);
    s->skip = end;
    return end == s->end ? end : pos;
}

/* [\p{P}$+<=>^~|]+ , falcon: with ` */
static uint32_t rfi_scan_punct(rfi_scan *s, uint32_t pos, uint32_t backtick) {
    for (rfi_scan_char c;; pos = c.next) {
        c = rfi_scan_at(s, pos);
        if (c.class != RFI_PUNCT && !(c.class == RFI_SYMBOL && c.cp < 128 && (backtick || c.cp != '`'))) return pos;
    }
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static uint32_t rfi_scan_gpt2(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    static const uint32_t kinds[] = {RFI_LETTER, RFI_NUMBER, RFI_REST};
    uint32_t end = rfi_scan_contraction(s, pos, 0), from = s->text[pos] == ' ' ? pos + 1 : pos;
    for (size_t k = 0; end == pos && k < RFI_COUNT(kinds); k++)
        if (rfi_scan_at(s, from).class & kinds[k]) end = rfi_scan_run(s, from, kinds[k]);
    return end > pos ? end : rfi_scan_spaces(s, pos, 0);
}

/* How rfi_scan_words differs between rules. */
enum {
    RFI_WORDS_DIGITS = 15,        /* mask: digits in one word, 15: any number                             */
    RFI_WORDS_MARKS = 16,         /* marks count as letters                                               */
    RFI_WORDS_MARKS_ONLY_SO = 32, /* ... and as nothing else                                              */
    RFI_WORDS_CASE = 64,          /* a new word starts where a-z is followed by A-Z                       */
    RFI_WORDS_FIRST = 128,        /* contractions are words                                               */
    RFI_WORDS_AFTER = 256,        /* contractions belong to the word before                               */
    RFI_WORDS_HAN = 512,          /* runs of Han characters are words of their own                        */
    RFI_WORDS_SPACED = 1024,      /* words with single spaces between them are one word                   */
    RFI_WORDS_SLASH = 2048,       /* newlines and slashes may end punctuation; else newlines              */
    RFI_WORDS_ONE = 4096,         /* at most one of them                                                  */
    RFI_WORDS_NONE = 8192,        /* none of them                                                         */
    RFI_WORDS_SPACE_SIZES = 16384 /* runs of spaces are cut into 512, 256, ...                            */
};

/* End of the letters at pos, which is one. */
static uint32_t rfi_scan_letters(const rfi_scan *s, uint32_t pos, uint32_t how) {
    uint32_t letters = RFI_LETTER | (how & RFI_WORDS_MARKS ? RFI_MARK : 0), start = pos, lower = pos;
    rfi_scan_char c;
    if (how & RFI_WORDS_CASE) { /* U*W+|U+W* with U: letters but a-z, W: letters but A-Z */
        for (; (c = rfi_scan_at(s, pos)).class & letters && c.cp - 'a' >= 26; pos = c.next)
            if (c.cp - 'A' >= 26) lower = c.next;
        if (!(c.class & letters)) return lower > start ? lower : pos; /* backtrack: W+ must match inside U* */
        while ((c = rfi_scan_at(s, pos)).class & letters && c.cp - 'A' >= 26) pos = c.next;
        return pos;
    }
    while ((c = rfi_scan_at(s, pos)).class & letters && !(how & RFI_WORDS_HAN && rfi_in_set(&c, RFI_SET_HAN))) {
        pos = c.next;
        if (!(how & RFI_WORDS_SPACED)) continue;
        pos = rfi_scan_run(s, pos, RFI_MARK);
        c = rfi_scan_at(s, pos);
        if (c.cp == ' ' && rfi_scan_at(s, c.next).class & letters) pos = c.next;
    }
    return pos;
}

/* Words of llama-3 and its variants:
 *     C|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * with C = the contractions in any case */
static uint32_t rfi_scan_words(rfi_scan *s, uint32_t pos, uint32_t how) {
    uint32_t letters = RFI_LETTER | (how & RFI_WORDS_MARKS ? RFI_MARK : 0), rest = RFI_REST, end, digits;
    rfi_scan_char c = rfi_scan_at(s, pos), next = rfi_scan_at(s, c.next);
    if (how & RFI_WORDS_MARKS_ONLY_SO) rest &= ~(uint32_t)RFI_MARK;
    if (how & RFI_WORDS_FIRST && (end = rfi_scan_contraction(s, pos, 1)) > pos) return end;
    if (how & RFI_WORDS_HAN && rfi_in_set(&c, RFI_SET_HAN)) return rfi_scan_set(s, pos, RFI_SET_HAN);
    int leads = !(c.class & (RFI_LETTER | RFI_NUMBER)) && !rfi_is_newline(c.cp) && next.class & letters &&
                !(how & RFI_WORDS_HAN && rfi_in_set(&next, RFI_SET_HAN));
    if (leads || c.class & letters) {
        end = rfi_scan_letters(s, leads ? c.next : pos, how);
        return how & RFI_WORDS_AFTER ? rfi_scan_contraction(s, end, 1) : end;
    }
    digits = how & RFI_WORDS_DIGITS;
    if (c.class & RFI_NUMBER) return rfi_scan_number(s, pos, digits == RFI_WORDS_DIGITS ? UINT32_MAX : digits);
    uint32_t from = c.cp == ' ' ? c.next : pos;
    end = rfi_scan_run(s, from, rest);
    if (end == from) return how & RFI_WORDS_SPACE_SIZES ? rfi_scan_space_sizes(s, pos) : rfi_scan_spaces(s, pos, 1);
    for (uint32_t n = how & RFI_WORDS_NONE ? 0 : how & RFI_WORDS_ONE ? 1 : UINT32_MAX; n > 0 && end < s->end; n--) {
        if (!rfi_is_newline(s->text[end]) && !(how & RFI_WORDS_SLASH && s->text[end] == '/')) break;
        end++;
    }
    return end;
}

/* P[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * with P = ASCII punctuation and symbols */
static uint32_t rfi_scan_deepseek(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    enum { LETTERS = RFI_LETTER | RFI_MARK, SIGNS = RFI_PUNCT | RFI_SYMBOL };
    rfi_scan_char c = rfi_scan_at(s, pos);
    uint32_t end = c.next;
    if (c.cp < 128 && c.class & SIGNS) {
        while (end < s->end && rfi_is_ascii_letter(s->text[end])) end++;
        if (end > c.next) return end;
    }
    if (!(c.class & (RFI_LETTER | SIGNS)) && !rfi_is_newline(c.cp) && rfi_scan_at(s, c.next).class & LETTERS)
        return rfi_scan_run(s, c.next, LETTERS);
    if (c.class & LETTERS) return rfi_scan_run(s, pos, LETTERS);
    uint32_t from = c.cp == ' ' ? c.next : pos;
    end = rfi_scan_run(s, from, SIGNS);
    if (end == from) return c.class & RFI_SPACE ? rfi_scan_spaces(s, pos, 1) : pos;
    while (end < s->end && rfi_is_newline(s->text[end])) end++;
    return end;
}

/* Everything up to the end of the next 1 to 3 digits; the rest of that run of digits is a multiple of 3 long. */
static uint32_t rfi_scan_afmoe_digits(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    uint32_t n = 3;
    rfi_scan_char c;
    while ((c = rfi_scan_at(s, pos)).class && !(c.class & RFI_NUMBER)) pos = c.next;
    if (c.class && pos >= s->run_end) {
        n = 0;
        for (s->run_end = pos; (c = rfi_scan_at(s, s->run_end)).class & RFI_NUMBER; s->run_end = c.next) n++;
        n = n % 3 ? n % 3 : 3;
    }
    return rfi_scan_number(s, pos, n);
}

/* Length of the run of 0-9 at pos. */
static uint32_t rfi_scan_digits_left(rfi_scan *s, uint32_t pos) {
    if (pos >= s->run_end)
        for (s->run_end = pos; s->run_end < s->end && rfi_is_digit(s->text[s->run_end]);) s->run_end++;
    return s->run_end - pos;
}

/* \d{1,3}(?=(?:\d{3})*\b) */
static uint32_t rfi_scan_aya_digits(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    uint32_t n = rfi_scan_digits_left(s, pos);
    unsigned char after = s->run_end < s->end ? s->text[s->run_end] : ' ';
    s->skip = pos + n;
    if (n == 0 || after == '_' || rfi_is_ascii_letter(after)) return pos;
    return pos + (n % 3 ? n % 3 : 3);
}

/* (?=(\d{3})+(?!\d)): up to the next position that a multiple of 3 digits follows. */
static uint32_t rfi_scan_superbpe_digits(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    while ((pos = rfi_scan_at(s, pos).next) < s->end)
        if (rfi_is_digit(s->text[pos]) && rfi_scan_digits_left(s, pos) % 3 == 0) return pos;
    return s->end;
}

/*  ?[^(\s|.,!?...)]+ : words between the punctuation of a set */
static uint32_t rfi_scan_poro(rfi_scan *s, uint32_t pos, uint32_t how __attribute__((unused))) {
    uint32_t from = s->text[pos] == ' ' ? pos + 1 : pos, end = from;
    for (rfi_scan_char c; (c = rfi_scan_at(s, end)).class; end = c.next)
        if (c.class & RFI_SPACE || rfi_in_set(&c, RFI_SET_PORO_BETWEEN)) break;
    return end > from ? end : pos;
}

static uint32_t rfi_scan_literal(const rfi_scan *s, uint32_t pos, const char *literal) {
    size_t n = strlen(literal);
    return s->end - pos >= n && memcmp(s->text + pos, literal, n) == 0 ? pos + (uint32_t)n : pos;
}

/* Chameleon's: 0 <sentinel:[0-9]+>, 1 IMGIMG[A-I]{1,4}Z, 2 [\t\n] or 4 or 2 spaces, 3 one of [\p{P}!-/:-@\[-`{-~] */
static uint32_t rfi_scan_chameleon(rfi_scan *s, uint32_t pos, uint32_t what) {
    rfi_scan_char c = rfi_scan_at(s, pos);
    uint32_t end = what < 2 ? rfi_scan_literal(s, pos, what ? "IMGIMG" : "<sentinel:") : pos, from = end;
    if (what < 2 && end > pos) {
        if (what == 0) while (end < s->end && rfi_is_digit(s->text[end])) end++;
        if (what == 1) while (end < s->end && end < from + 4 && s->text[end] - (uint32_t)'A' < 9) end++;
        return end > from && end < s->end && s->text[end] == (what ? 'Z' : '>') ? end + 1 : pos;
    }
    if (what == 2 && (c.cp == '\t' || c.cp == '\n')) return pos + 1;
    if (what == 2) return end = rfi_scan_literal(s, pos, "    "), end > pos ? end : rfi_scan_literal(s, pos, "  ");
    if (what == 3 && (c.class == RFI_PUNCT || (c.class == RFI_SYMBOL && c.cp < 128))) return c.next;
    return pos;
}

/* ---- pre-tokenizers ---- */

/* A name is listed only if its rule is known: on one vocabulary two rules can look the same, and a wrong rule is a
 * silent error. */
static const rfi_pre rfi_pres[] = {
    {"llama3\0llama-v3\0llama-bpe\0falcon3\0falcon-h1\0pixtral\0midm-2.0\0lfm2\0jina-v5-nano\0",
     RFI_PRE_WHOLE | RFI_PRE_BOS, {{rfi_scan_words, RFI_WORDS_FIRST | 3}}},
    {"dbrx\0smaug-bpe\0glm4\0chatglm-bpe\0glm5\0", 0, {{rfi_scan_words, RFI_WORDS_FIRST | 3}}},
    {"jais-2\0", 0, {{rfi_scan_words, RFI_WORDS_FIRST | RFI_WORDS_SPACE_SIZES | 3}}},
    {"minicpm5\0", RFI_PRE_WHOLE, {{rfi_scan_number, 3}, {rfi_scan_words, RFI_WORDS_FIRST | RFI_WORDS_DIGITS}}},
    {"qwen2\0kormo\0f2llmv2\0stablelm2\0deepseek-r1-qwen\0hunyuan\0megrez\0solar-open\0grok-2\0bailingmoe\0"
     "bailingmoe2\0llada-moe\0", 0, {{rfi_scan_words, RFI_WORDS_FIRST | 1}}},
    {"qwen35\0", 0, {{rfi_scan_words, RFI_WORDS_FIRST | RFI_WORDS_MARKS | RFI_WORDS_MARKS_ONLY_SO | 1}}},
    {"ufakzeka\0", 0, {{rfi_scan_words, 1}}},
    {"seed-coder\0", 0, {{rfi_scan_words, RFI_WORDS_FIRST | RFI_WORDS_NONE | 1}}},
    {"laguna\0", 0, {{rfi_scan_lines, 0}, {rfi_scan_words, RFI_WORDS_FIRST | 1}}},
    {"tekken\0", RFI_PRE_WHOLE | RFI_PRE_BOS, {{rfi_scan_words, RFI_WORDS_CASE | RFI_WORDS_SLASH | 1}}},
    {"gpt-4o\0llama4\0kanana2\0talkie\0minimax-m2\0", 0,
     {{rfi_scan_words, RFI_WORDS_CASE | RFI_WORDS_AFTER | RFI_WORDS_SLASH | 3}}},
    {"granite-embed-multi-97m\0", RFI_PRE_WHOLE,
     {{rfi_scan_words, RFI_WORDS_CASE | RFI_WORDS_MARKS | RFI_WORDS_AFTER | RFI_WORDS_SLASH | 3}}},
    {"tiny_aya\0", 0,
     {{rfi_scan_aya_digits, 0}, {rfi_scan_words, RFI_WORDS_MARKS | RFI_WORDS_AFTER | RFI_WORDS_SLASH | 3}}},
    {"youtu\0", RFI_PRE_WHOLE,
     {{rfi_scan_set, RFI_SET_HANGUL}, {rfi_scan_set, RFI_SET_CJK_PUNCT}, {rfi_scan_set, RFI_SET_BOPOMOFO},
      {rfi_scan_set, RFI_SET_CJK}, {rfi_scan_words, RFI_WORDS_MARKS | RFI_WORDS_AFTER | RFI_WORDS_SLASH | 1}}},
    {"kimi-k2\0", 0, {{rfi_scan_words, RFI_WORDS_HAN | RFI_WORDS_AFTER | 3}}},
    {"exaone-moe\0", 0, {{rfi_scan_words, RFI_WORDS_FIRST | RFI_WORDS_SPACED | RFI_WORDS_SLASH | RFI_WORDS_ONE | 1}}},
    {"deepseek-v3\0hunyuan-dense\0joyai-llm\0", 0,
     {{rfi_scan_number, 3}, {rfi_scan_set, RFI_SET_CJK}, {rfi_scan_deepseek, 0}}},
    {"afmoe\0", 0, {{rfi_scan_afmoe_digits, 0}, {rfi_scan_set, RFI_SET_ASIAN}, {rfi_scan_deepseek, 0}}},
    {"deepseek-llm\0", 0,
     {{rfi_scan_newline, 0}, {rfi_scan_set, RFI_SET_DEEPSEEK_LETTERS | RFI_SET_SPACE},
      {rfi_scan_set, RFI_SET_DEEPSEEK_PUNCT | RFI_SET_SPACE}, {rfi_scan_last_spaces, 0},
      {rfi_scan_set, RFI_SET_CJK_OLD}, {rfi_scan_classes, RFI_NUMBER}}},
    {"deepseek-coder\0", 0,
     {{rfi_scan_newline, 0}, {rfi_scan_classes, RFI_LETTER | RFI_SET_SPACE << 8},
      {rfi_scan_classes, RFI_PUNCT | RFI_SET_SPACE << 8}, {rfi_scan_set, RFI_SET_CJK_OLD}, {rfi_scan_number, 1}}},
    {"gpt-2\0phi-2\0olmo\0exaone4\0mellum\0granite-docling\0mpt\0jais\0trillion\0gigachat\0a.x-4.0\0modern-bert\0"
     "jina-es\0jina-de\0jina-v2-es\0jina-v2-de\0jina-v1-en\0jina-v2-code\0roberta-bpe\0", 0, {{rfi_scan_gpt2, 0}}},
    {"smollm\0refact\0exaone\0starcoder\0mellum2\0codeshell\0command-r\0minerva-7b\0", 0,
     {{rfi_scan_number, 1}, {rfi_scan_gpt2, 0}}},
    {"default\0", 0, {{rfi_scan_punct, 0}, {rfi_scan_gpt2, 0}, {rfi_scan_classes, RFI_NUMBER}, {rfi_scan_three, 0}}},
    {"falcon\0", 0, {{rfi_scan_punct, 1}, {rfi_scan_gpt2, 0}, {rfi_scan_three, 0}}},
    {"poro-chat\0bloom\0gpt3-finnish\0", 0, {{rfi_scan_poro, 0}}},
    {"viking\0", 0, {{rfi_scan_poro, 0}, {rfi_scan_number, 1}}},
    {"chameleon\0", RFI_PRE_BOS,
     {{rfi_scan_chameleon, 0}, {rfi_scan_chameleon, 1}, {rfi_scan_chameleon, 2}, {rfi_scan_number, 1},
      {rfi_scan_chameleon, 3}, {rfi_scan_gpt2, 0}}},
    {"superbpe\0", 0, {{rfi_scan_classes, RFI_NUMBER}, {rfi_scan_superbpe_digits, 0}}},
    {"sarvam-moe\0", RFI_PRE_RAW, {{rfi_scan_lines, 0}}},
    {"gemma4\0granite-embed-multi-311m\0mmbert\0", RFI_PRE_RAW | RFI_PRE_FORCE_BOS, {{rfi_scan_lines, 0}}},
};

/* A pre-tokenizer by name, and where the table spells that; NULL if it is not known. */
static const rfi_pre *rfi_pre_find(rf_string name, const char **spelled) {
    for (const rfi_pre *pre = rfi_pres; pre < rfi_pres + RFI_COUNT(rfi_pres); pre++)
        for (*spelled = pre->names; **spelled; *spelled += strlen(*spelled) + 1)
            if (rfi_str_equal(name, *spelled)) return pre;
    return NULL;
}

/* A text, and where the current piece of each pass ends. */
typedef struct rfi_cutter {
    const rfi_pass *passes;
    uint32_t n_passes, n_bytes;
    rfi_scan scans[RFI_PASSES_MAX];
    uint32_t ends[RFI_PASSES_MAX];
} rfi_cutter;

static rfi_cutter rfi_cut(const rfi_pre *pre, const unsigned char *text, uint32_t n_bytes) {
    rfi_cutter c = {.passes = pre->passes, .n_bytes = n_bytes};
    while (c.n_passes < RFI_PASSES_MAX && c.passes[c.n_passes].match) c.scans[c.n_passes++].text = text;
    return c;
}

/* End of the piece that starts at pos: a match, or the text before the next match. */
static uint32_t rfi_cut_piece(const rfi_pass *pass, rfi_scan *s, uint32_t start) {
    uint32_t pos = start;
    while (pos < s->end) {
        s->skip = 0;
        uint32_t end = pass->match(s, pos, pass->how);
        if (end > pos) return pos > start ? pos : end;
        pos = rfi_scan_at(s, pos).next;
        if (s->skip > pos) pos = s->skip;
    }
    return pos;
}

/* End of the word that starts at pos: 0, or where the last word ended. */
static uint32_t rfi_cut_next(rfi_cutter *c, uint32_t pos) {
    uint32_t i = c->n_passes, end = c->n_bytes;
    while (i > 0 && c->ends[i - 1] <= pos) i--; /* the passes whose piece is over */
    if (i > 0) end = c->ends[i - 1];
    for (; i < c->n_passes; i++) {
        c->scans[i].end = end;
        end = c->ends[i] = rfi_cut_piece(&c->passes[i], &c->scans[i], pos);
    }
    return end;
}

/* ---- BPE: one word ---- */

/* Id of the token that the bytes of n symbols spell in the byte alphabet, or -1. */
static rf_result rfi_bpe_whole(rfi_tokenizing *w, uint32_t n, int32_t *id) {
    uint64_t len = 0;
    *id = -1;
    if (n > w->t->plain_max_bytes) return RF_OK;
    rf_result r = rfi_need_word(w, 2 * (uint64_t)n);
    if (r != RF_OK) return r;
    for (uint32_t i = 0; i < n; i++) len += rfi_put_utf8(rfi_byte_char(w->symbols[i].start), w->word + len);
    *id = rfi_token_find(w->t, w->word, len);
    return RF_OK;
}

static const unsigned char rfi_replacement[3] = {0xef, 0xbf, 0xbd}; /* U+FFFD, for a malformed byte */

/* A line without the byte alphabet: spaces become U+2581, characters merge; newlines are one token if there is one. */
static rf_result rfi_raw_word(rfi_tokenizing *w, const unsigned char *text, uint32_t n_bytes) {
    uint32_t n = 0, at_word = 0;
    rf_result r = rfi_need_word(w, 3 * (uint64_t)n_bytes);
    if (r == RF_OK) r = rfi_need_symbols(w, n_bytes);
    if (r != RF_OK) return r;
    int32_t lines = text[0] == '\n' ? rfi_token_find(w->t, (const char *)text, n_bytes) : -1;
    if (lines >= 0) return rfi_put_id(w, lines), RF_OK;
    for (uint32_t at = 0; at < n_bytes; n++) {
        rfi_char c = rfi_utf8(text + at, n_bytes - at);
        const void *p = c.is_bad ? rfi_replacement : c.cp == ' ' ? (const void *)rfi_spm_space : text + at;
        uint32_t len = c.is_bad || c.cp == ' ' ? 3 : c.n_bytes;
        memcpy(w->word + at_word, p, len);
        w->symbols[n].id = rfi_token_find(w->t, w->word + at_word, len);
        w->symbols[n].start = at_word;
        at_word += len;
        at += c.n_bytes;
    }
    w->symbols[n].start = at_word;
    return rfi_merge_spelt(w, n);
}

static rf_result rfi_bpe_word(rfi_tokenizing *w, const unsigned char *text, uint32_t n_bytes) {
    uint32_t n = 0;
    rf_result r = rfi_need_symbols(w, 3 * (uint64_t)n_bytes);
    if (r != RF_OK) return r;
    for (uint32_t at = 0; at < n_bytes;) {
        rfi_char c = rfi_utf8(text + at, n_bytes - at);
        const unsigned char *p = c.is_bad ? rfi_replacement : text + at;
        for (uint32_t i = 0; i < (c.is_bad ? 3 : c.n_bytes); i++, n++) {
            w->symbols[n].id = w->t->byte_id[p[i]];
            w->symbols[n].start = p[i];
        }
        at += c.n_bytes;
    }
    int32_t whole = -1;
    if (w->t->pre->flags & RFI_PRE_WHOLE) r = rfi_bpe_whole(w, n, &whole);
    if (whole >= 0) return rfi_put_id(w, whole), RF_OK;
    if (r == RF_OK) r = rfi_merge(w, n);
    for (uint32_t i = 0; r == RF_OK && i < n; i = w->symbols[i].next) rfi_put_id(w, w->symbols[i].id);
    return r;
}

/* ---- special tokens in text ---- */

/* First of the special tokens [lo, hi) whose byte n is >= min; they share their first n bytes and are longer. */
static uint32_t rfi_special_bound(const rf_tokenizer *t, uint32_t lo, uint32_t hi, uint32_t n, uint32_t min) {
    if (lo < hi && (unsigned char)t->text[t->special[hi - 1]].data[n] < min) return hi; /* often all of them ... */
    if (lo < hi && (unsigned char)t->text[t->special[lo]].data[n] >= min) return lo;    /* ... or none */
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)t->text[t->special[mid]].data[n] < min) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* The longest special token of at most limit >= 1 bytes that p starts with, or -1: the sorted list is narrowed byte by
 * byte. `all`: control and unknown tokens too. */
static int32_t rfi_special_longest(const rf_tokenizer *t, const unsigned char *p, uint32_t limit, int all) {
    uint32_t lo = t->special_first[p[0]], hi = t->special_first[p[0] + 1];
    int32_t best = -1;
    for (uint32_t n = 1; lo < hi; n++) {
        int32_t id = t->special[lo]; /* the shortest that starts with these n bytes: it may end here */
        if (t->text[id].len == n) {
            if (all || rfi_token_type(t, (uint32_t)id) == RFI_TOKEN_USER) best = id;
            lo++;
        }
        if (n >= limit) break;
        lo = rfi_special_bound(t, lo, hi, n, p[n]);
        hi = rfi_special_bound(t, lo, hi, n, p[n] + 1u);
    }
    return best;
}

/* Queue the longest special token at pos of at most limit bytes. It must lie inside one part of the text: the
 * template's or a message's, and in a message `all` is off. */
static rf_result rfi_special_push(rfi_tokenizing *w, const unsigned char *text, uint32_t pos, uint32_t limit, int all) {
    uint32_t lo = 0, hi = w->n_borders; /* the first border after pos */
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (w->borders[mid] <= pos) lo = mid + 1;
        else hi = mid;
    }
    if (lo < w->n_borders) limit = (uint32_t)rfi_min_u64(limit, w->borders[lo] - pos);
    int32_t id = rfi_special_longest(w->t, text + pos, limit, all && lo % 2 == 0);
    if (id < 0) return RF_OK;
    return rfi_heap_push(w, (rfi_heap_item){(~w->t->text[id].len & UINT32_MAX) << 32 | pos, 0, id});
}

static int rfi_is_ascii_space(unsigned char c) { return c == ' ' || (c >= 9 && c <= 13); }

/* Find the special tokens: the longest first, of equals the leftmost. (*marks)[pos] becomes 1 + id where one starts and
 * -1 on its other bytes; NULL if there is none. */
static rf_result rfi_special_find(rfi_tokenizing *w, const unsigned char *text, uint32_t n, int all, int32_t **marks) {
    const rf_tokenizer *t = w->t;
    rf_result r = RF_OK;
    *marks = NULL;
    w->n_heap = 0;
    if (all ? t->n_special == 0 : t->n_user == 0) return RF_OK;
    for (uint32_t pos = 0; pos < n && r == RF_OK; pos++) r = rfi_special_push(w, text, pos, n - pos, all);
    if (r != RF_OK || w->n_heap == 0) return r;
    int32_t *mark = *marks = (int32_t *)rfi_alloc(&t->allocator, n, sizeof *mark, "special tokens of a text", w->err);
    if (!mark) return RF_ERR_MEMORY;
    while (w->n_heap > 0 && r == RF_OK) {
        rfi_heap_item item = rfi_heap_pop(w);
        uint32_t pos = (uint32_t)item.key, len = (uint32_t)t->text[item.id].len, room = 0;
        while (room < len && mark[pos + room] == 0) room++;
        if (room < len) { /* some of its bytes are taken: a shorter one may fit */
            if (room > 0) r = rfi_special_push(w, text, pos, room, all);
            continue;
        }
        for (uint32_t i = 0; i < len; i++) mark[pos + i] = i ? -1 : item.id + 1;
        if (!(t->attr[item.id] & RFI_TOKEN_STRIP)) continue;
        for (pos += len; pos < n && mark[pos] == 0 && rfi_is_ascii_space(text[pos]); pos++) mark[pos] = -1;
    }
    return r;
}

/* ---- public: text to ids ---- */

/* Tokenize plain text between special tokens. SPM adds a space before it, at the start and after special tokens. */
static rf_result rfi_plain_text(rfi_tokenizing *w, const unsigned char *text, uint32_t n) {
    rf_result r = RF_OK;
    if (w->t->is_wpm) return rfi_wpm_text(w, text, n);
    if (!w->t->pre) return rfi_spm_text(w, text, n, w->t->add_space);
    rfi_cutter cutter = rfi_cut(w->t->pre, text, n);
    for (uint32_t pos = 0; pos < n && r == RF_OK;) {
        uint32_t end = rfi_cut_next(&cutter, pos);
        if (rfi_tok_is_raw(w->t)) r = rfi_raw_word(w, text + pos, end - pos);
        else r = rfi_bpe_word(w, text + pos, end - pos);
        pos = end;
    }
    return r;
}

/* Tokenize a text: count the ids, store as many as there is room for, free all memory of the call. */
static rf_result rfi_tokenize(rfi_tokenizing *w, const unsigned char *p, uint32_t n, uint32_t flags) {
    const rf_tokenizer *t = w->t;
    int32_t *marks = NULL;
    if (flags & RF_TOKENIZE_ADD && t->add_bos) rfi_put_id(w, t->bos);
    rf_result r = rfi_special_find(w, p, n, (flags & RF_TOKENIZE_SPECIAL) != 0, &marks);
    for (uint32_t pos = 0, end; pos < n && r == RF_OK; pos = end) {
        int is_text = !marks || marks[pos] == 0;
        for (end = is_text && !marks ? n : pos + 1; end < n && marks && is_text && marks[end] == 0;) end++;
        if (is_text) r = rfi_plain_text(w, p + pos, end - pos);
        else if (marks[pos] > 0) rfi_put_id(w, marks[pos] - 1);
    }
    if (flags & RF_TOKENIZE_ADD && t->add_eos) rfi_put_id(w, t->eos);
    rfi_free(&t->allocator, marks);
    rfi_free(&t->allocator, w->heap);
    rfi_free(&t->allocator, w->symbols);
    rfi_free(&t->allocator, w->word);
    if (r != RF_OK || w->count <= w->capacity) return r;
    return rfi_fail(w->err, RF_ERR_CAPACITY, 0, "rf_tokenize: want room for %u ids, got %u", w->count, w->capacity);
}

ROCMFORGE_API rf_result rf_tokenize(const rf_tokenizer *t, rf_string text, uint32_t flags, int32_t *out,
                                    uint32_t capacity, uint32_t *count, rf_error *err) {
    rfi_clear(err);
    if (count) *count = 0;
    if (!t || !count || (!text.data && text.len) || (!out && capacity))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_tokenize: t, text, out and count must not be NULL");
    if (flags & ~(RF_TOKENIZE_SPECIAL | RF_TOKENIZE_ADD))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_tokenize: unknown flags 0x%x", flags);
    if (text.len > RFI_TEXT_MAX_BYTES)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_tokenize: text has %llu bytes, want at most %d",
                        RFI_LLU(text.len), RFI_TEXT_MAX_BYTES);
    rfi_tokenizing w = {.t = t, .err = err, .out = out, .capacity = capacity};
    rf_result r = rfi_tokenize(&w, (const unsigned char *)text.data, (uint32_t)text.len, flags);
    if (r != RF_ERR_MEMORY) *count = w.count;
    return r;
}

/* ---- public: ids to text ---- */

typedef struct rfi_detokenizing {
    rf_detokenizer state;
    char *out;
    size_t capacity, count;
} rfi_detokenizing;

static void rfi_detok_put(rfi_detokenizing *d, const void *bytes, uint32_t n) {
    for (uint32_t i = 0; i < n; i++, d->count++)
        if (d->count < d->capacity) d->out[d->count] = ((const char *)bytes)[i];
}

/* May b follow the held bytes in a well-formed character? Source: the Unicode Standard, table 3-7. */
static int rfi_detok_fits(const rf_detokenizer *s, unsigned char b) {
    unsigned char lead = s->held[0], low = 0x80, high = 0xbf;
    if (s->n_held == 1 && lead == 0xe0) low = 0xa0;
    if (s->n_held == 1 && lead == 0xed) high = 0x9f;
    if (s->n_held == 1 && lead == 0xf0) low = 0x90;
    if (s->n_held == 1 && lead == 0xf4) high = 0x8f;
    return b >= low && b <= high;
}

/* Add a byte; whole characters are given out, so that the output is always well-formed UTF-8. A truncated character, as
 * far as it is valid, and a byte that starts none become one U+FFFD each (the Unicode Standard, section 3.9). */
static void rfi_detok_byte(rfi_detokenizing *d, unsigned char b) {
    rf_detokenizer *s = &d->state;
    if (s->n_held > 0 && rfi_detok_fits(s, b)) {
        uint32_t lead = s->held[0], want = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
        s->held[s->n_held++] = b;
        if (s->n_held < want) return;
        rfi_detok_put(d, s->held, want);
        s->n_held = 0;
        return;
    }
    if (s->n_held > 0) rfi_detok_put(d, "\xef\xbf\xbd", 3);
    s->n_held = 0;
    if (b < 0x80) rfi_detok_put(d, &b, 1);
    else if (b < 0xc2 || b > 0xf4) rfi_detok_put(d, "\xef\xbf\xbd", 3);
    else s->held[s->n_held++] = b;
}

/* Add one byte of the text. The first space of SPM text is the one that rf_tokenize added, and is dropped. */
static void rfi_detok_text(const rf_tokenizer *t, rfi_detokenizing *d, unsigned char b) {
    int skip = !d->state.started && t->add_space && b == ' ';
    d->state.started = 1;
    if (!skip) rfi_detok_byte(d, b);
}

/* Add the bytes of a token: of a byte token its byte, a normal token decoded, a user-defined one as spelled; control
 * and unknown tokens only on request, unused ones never. */
static void rfi_detok_token(const rf_tokenizer *t, rfi_detokenizing *d, uint32_t id, uint32_t flags) {
    rf_string s = t->text[id];
    const unsigned char *p = (const unsigned char *)s.data;
    uint32_t type = rfi_token_type(t, id);
    int is_special = type == RFI_TOKEN_CONTROL || type == RFI_TOKEN_UNKNOWN;
    int is_raw = is_special || type == RFI_TOKEN_USER;
    int is_hidden = is_special && !(t->attr[id] & RFI_TOKEN_SHOWN) && !(flags & RF_DETOKENIZE_SPECIAL);
    if (type == RFI_TOKEN_UNUSED || is_hidden) return;
    if (type == RFI_TOKEN_BYTE) {
        rfi_detok_text(t, d, (unsigned char)rfi_byte_token(s));
        return;
    }
    for (uint64_t i = 0; i < s.len;) {
        rfi_char c = rfi_utf8(p + i, s.len - i);
        int byte = t->pre && !rfi_tok_is_raw(t) ? rfi_char_byte(c.cp) : c.cp == 0x2581 ? ' ' : -1;
        if (byte >= 0 && !is_raw && !c.is_bad) rfi_detok_text(t, d, (unsigned char)byte);
        else for (uint32_t k = 0; k < c.n_bytes; k++) rfi_detok_text(t, d, p[i + k]);
        i += c.n_bytes;
    }
}

ROCMFORGE_API rf_result rf_detokenize(rf_detokenizer *state, int32_t id, uint32_t flags, char *out, size_t capacity,
                                      size_t *count, rf_error *err) {
    const rf_tokenizer *t = state ? state->tokenizer : NULL;
    rfi_clear(err);
    if (count) *count = 0;
    if (!t || !count || (!out && capacity))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_detokenize: state, its tokenizer, out and count must not be NULL");
    if (flags & ~(RF_DETOKENIZE_SPECIAL | RF_DETOKENIZE_FINISH) || state->n_held > 3)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_detokenize: flags 0x%x or a state that was not zeroed", flags);
    if (id < -1 || (id >= 0 && (uint32_t)id >= t->n_vocab) || (id == -1 && !(flags & RF_DETOKENIZE_FINISH)))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_detokenize: want a token id below %u, found %d", t->n_vocab, id);
    rfi_detokenizing d = {*state, out, capacity, 0};
    if (id >= 0) rfi_detok_token(t, &d, (uint32_t)id, flags);
    if (flags & RF_DETOKENIZE_FINISH && d.state.n_held > 0) {
        rfi_detok_put(&d, "\xef\xbf\xbd", 3);
        d.state.n_held = 0;
    }
    *count = d.count;
    if (d.count > capacity)
        return rfi_fail(err, RF_ERR_CAPACITY, 0, "rf_detokenize: want room for %llu bytes, got %llu",
                        (unsigned long long)d.count, (unsigned long long)capacity);
    *state = d.state;
    return RF_OK;
}

/* ---- public: facts ---- */

ROCMFORGE_API rf_tokenizer_info rf_tokenizer_get_info(const rf_tokenizer *t) {
    if (!t) return (rf_tokenizer_info){"", "", 0, -1, -1, -1, -1, -1, 0, 0};
    return (rf_tokenizer_info){.model = t->model, .pre = t->pre ? t->pre_name : "", .n_vocab = t->n_vocab,
                               .bos = t->bos, .eos = t->eos, .eot = t->eot, .unknown = t->unknown,
                               .padding = t->padding, .add_bos = t->add_bos != 0, .add_eos = t->add_eos != 0};
}

ROCMFORGE_API int rf_token_is_end(const rf_tokenizer *t, int32_t id) {
    return t && id >= 0 && (uint32_t)id < t->n_vocab && (t->attr[id] & RFI_TOKEN_END) != 0;
}

ROCMFORGE_API rf_string rf_token_get_text(const rf_tokenizer *t, int32_t id) {
    return t && id >= 0 && (uint32_t)id < t->n_vocab ? t->text[id] : (rf_string){"", 0};
}

/* ---- the Unicode table ----
 * Runs of characters of one class: the first character shifted left by 3, the class in the low bits; and the index of
 * the run at each 256th character, so that few runs are searched. Made by tests/make_unicode.py; the reference strings
 * have no character newer than this version. */

typedef struct rfi_lower {
    uint32_t first; /* capital letters first, first + step, ... */
    uint16_t n, step;
    int32_t add;    /* to the small letter                      */
} rfi_lower;

/* Unicode 14.0.0, 15654 bytes. */
static const uint32_t rfi_unicode_runs[2240] = {
    7, 78, 119, 262, 267, 292, 299, 348, 355, 386, 467, 484, 507, 521, 731, 756, 763, 772, 777, 987, 996, 1003, 1012,
    1023, 1070, 1079, 1286, 1291, 1300, 1339, 1348, 1361, 1371, 1380, 1391, 1396, 1426, 1444, 1449, 1459, 1476, 1482,
    1489, 1499, 1506, 1531, 1537, 1724, 1729, 1980, 1985, 5652, 5681, 5780, 5889, 5932, 5985, 5996, 6001, 6012, 6149,
    7041, 7084, 7089, 7104, 7121, 7155, 7161, 7168, 7204, 7217, 7227, 7233, 7256, 7265, 7272, 7281, 7440, 7449, 8116,
    8121, 9236, 9245, 9297, 10624, 10633, 10936, 10953, 10963, 11009, 11339, 11352, 11372, 11392, 11405, 11763, 11773,
    11779, 11789, 11803, 11813, 11827, 11837, 11840, 11905, 12120, 12153, 12187, 12200, 12295, 12340, 12363, 12380,
    12387, 12404, 12421, 12507, 12519, 12523, 12545, 12893, 13058, 13139, 13169, 13189, 13193, 13987, 13993, 14005,
    14063, 14068, 14077, 14121, 14141, 14156, 14165, 14193, 14210, 14289, 14316, 14329, 14339, 14448, 14463, 14465,
    14477, 14481, 14725, 14936, 14953, 15669, 15753, 15760, 15874, 15953, 16221, 16289, 16308, 16315, 16337, 16344,
    16365, 16372, 16385, 16565, 16593, 16605, 16673, 16685, 16705, 16717, 16752, 16771, 16888, 16897, 17101, 17120,
    17139, 17144, 17153, 17240, 17281, 17476, 17481, 17528, 17543, 17552, 17605, 17665, 18005, 18199, 18205, 18465,
    18901, 18921, 18933, 19073, 19085, 19137, 19221, 19235, 19250, 19331, 19337, 19469, 19488, 19497, 19560, 19577,
    19592, 19609, 19784, 19793, 19848, 19857, 19864, 19889, 19920, 19941, 19945, 19957, 20008, 20029, 20040, 20061,
    20081, 20088, 20157, 20160, 20193, 20208, 20217, 20245, 20256, 20274, 20353, 20372, 20386, 20436, 20449, 20459,
    20469, 20472, 20493, 20512, 20521, 20568, 20601, 20616, 20633, 20808, 20817, 20872, 20881, 20896, 20905, 20920,
    20929, 20944, 20965, 20968, 20981, 21016, 21053, 21064, 21085, 21104, 21133, 21136, 21193, 21224, 21233, 21240,
    21298, 21381, 21393, 21421, 21427, 21432, 21517, 21536, 21545, 21616, 21625, 21648, 21657, 21832, 21841, 21896,
    21905, 21920, 21929, 21968, 21989, 21993, 22005, 22064, 22077, 22096, 22109, 22128, 22145, 22152, 22273, 22293,
    22304, 22322, 22403, 22412, 22416, 22473, 22485, 22528, 22541, 22560, 22569, 22632, 22649, 22664, 22681, 22856,
    22865, 22920, 22929, 22944, 22953, 22992, 23013, 23017, 23029, 23080, 23101, 23112, 23133, 23152, 23213, 23232,
    23265, 23280, 23289, 23317, 23328, 23346, 23428, 23433, 23442, 23488, 23573, 23577, 23584, 23593, 23640, 23665,
    23688, 23697, 23728, 23753, 23768, 23777, 23784, 23793, 23808, 23833, 23848, 23873, 23896, 23921, 24016, 24053,
    24088, 24117, 24136, 24149, 24176, 24193, 24200, 24253, 24256, 24370, 24476, 24536, 24581, 24617, 24680, 24689,
    24712, 24721, 24904, 24913, 25040, 25061, 25065, 25077, 25128, 25141, 25160, 25173, 25200, 25261, 25272, 25281,
    25304, 25321, 25328, 25345, 25365, 25376, 25394, 25472, 25531, 25538, 25596, 25601, 25613, 25635, 25641, 25704,
    25713, 25736, 25745, 25928, 25937, 26016, 26025, 26064, 26085, 26089, 26101, 26152, 26165, 26184, 26197, 26224,
    26285, 26296, 26345, 26360, 26369, 26389, 26400, 26418, 26496, 26505, 26520, 26629, 26657, 26728, 26737, 26760,
    26769, 27101, 27113, 27125, 27176, 27189, 27208, 27221, 27249, 27260, 27264, 27297, 27325, 27330, 27385, 27413,
    27424, 27442, 27596, 27601, 27648, 27661, 27680, 27689, 27832, 27857, 28048, 28057, 28128, 28137, 28144, 28161,
    28216, 28245, 28248, 28285, 28328, 28341, 28344, 28357, 28416, 28466, 28544, 28565, 28579, 28584, 28681, 29069,
    29073, 29093, 29144, 29180, 29185, 29245, 29307, 29314, 29395, 29408, 29705, 29720, 29729, 29736, 29745, 29784,
    29793, 29984, 29993, 30000, 30009, 30093, 30097, 30117, 30185, 30192, 30209, 30248, 30257, 30264, 30277, 30320,
    30338, 30416, 30433, 30464, 30721, 30732, 30755, 30876, 30883, 30892, 30917, 30932, 30978, 31140, 31149, 31156,
    31165, 31172, 31181, 31187, 31221, 31233, 31296, 31305, 31592, 31629, 31787, 31797, 31809, 31853, 31936, 31949,
    32232, 32244, 32309, 32316, 32360, 32372, 32387, 32428, 32459, 32472, 32769, 33117, 33273, 33282, 33363, 33409,
    33461, 33489, 33525, 33545, 33557, 33577, 33597, 33649, 33677, 33705, 33813, 33905, 33917, 33922, 34005, 34036,
    34049, 34352, 34361, 34368, 34409, 34416, 34433, 34779, 34785, 37448, 37457, 37488, 37505, 37560, 37569, 37576,
    37585, 37616, 37633, 37960, 37969, 38000, 38017, 38280, 38289, 38320, 38337, 38392, 38401, 38408, 38417, 38448,
    38465, 38584, 38593, 39048, 39057, 39088, 39105, 39640, 39661, 39683, 39754, 39912, 39937, 40068, 40144, 40193,
    40880, 40897, 40944, 40963, 40969, 45932, 45939, 45945, 46086, 46089, 46299, 46312, 46337, 46939, 46962, 46985,
    47048, 47105, 47253, 47280, 47353, 47509, 47531, 47544, 47617, 47765, 47776, 47873, 47976, 47985, 48008, 48021,
    48032, 48129, 48549, 48803, 48825, 48835, 48860, 48865, 48877, 48880, 48898, 48976, 49026, 49104, 49155, 49245,
    49271, 49277, 49282, 49360, 49409, 50120, 50177, 50221, 50233, 50509, 50513, 50520, 50561, 51120, 51201, 51448,
    51461, 51552, 51589, 51680, 51716, 51720, 51747, 51762, 51841, 52080, 52097, 52136, 52225, 52576, 52609, 52816,
    52866, 52952, 52980, 53249, 53437, 53472, 53491, 53505, 53933, 54008, 54021, 54248, 54269, 54274, 54352, 54402,
    54480, 54531, 54585, 54595, 54640, 54661, 54904, 55301, 55337, 55717, 55849, 55912, 55938, 56019, 56076, 56157,
    56228, 56299, 56312, 56325, 56345, 56589, 56689, 56706, 56785, 57141, 57248, 57315, 57345, 57637, 57792, 57819,
    57858, 57936, 57961, 57986, 58065, 58355, 58369, 58440, 58497, 58840, 58857, 58883, 58944, 59013, 59035, 59045,
    59209, 59245, 59249, 59301, 59305, 59325, 59345, 59352, 59393, 60933, 61441, 63664, 63681, 63728, 63745, 64048,
    64065, 64112, 64129, 64192, 64201, 64208, 64217, 64224, 64233, 64240, 64249, 64496, 64513, 64936, 64945, 65004,
    65009, 65020, 65041, 65064, 65073, 65132, 65153, 65184, 65201, 65248, 65260, 65281, 65388, 65408, 65425, 65448,
    65457, 65516, 65528, 65542, 65631, 65667, 65862, 65879, 65918, 65923, 66084, 66091, 66196, 66203, 66302, 66311,
    66344, 66359, 66434, 66441, 66448, 66466, 66516, 66539, 66553, 66562, 66644, 66667, 66680, 66689, 66792, 66820,
    67080, 67205, 67464, 67588, 67601, 67612, 67641, 67652, 67665, 67748, 67753, 67764, 67785, 67828, 67873, 67884,
    67889, 67900, 67905, 67916, 67921, 67956, 67961, 68052, 68065, 68100, 68137, 68180, 68209, 68220, 68226, 68633,
    68650, 68692, 68704, 68740, 71747, 71780, 72011, 72028, 74040, 74244, 74328, 74498, 74980, 75602, 75780, 80707,
    80818, 81060, 81451, 81468, 81715, 81796, 85019, 85196, 85699, 85732, 85987, 86004, 88992, 89012, 89264, 89276,
    90113, 91948, 91993, 92029, 92049, 92064, 92107, 92138, 92147, 92161, 92464, 92473, 92480, 92521, 92528, 92545,
    92992, 93049, 93059, 93064, 93181, 93185, 93368, 93441, 93496, 93505, 93560, 93569, 93624, 93633, 93688, 93697,
    93752, 93761, 93816, 93825, 93880, 93889, 93944, 93957, 94211, 94585, 94595, 94852, 94867, 94960, 95236, 95440,
    95452, 96160, 96260, 97968, 98180, 98272, 98310, 98315, 98340, 98345, 98362, 98371, 98452, 98467, 98564, 98570,
    98645, 98691, 98697, 98740, 98754, 98777, 98795, 98804, 98816, 98825, 99512, 99533, 99548, 99561, 99587, 99593,
    100315, 100321, 100352, 100393, 100736, 100745, 101496, 101508, 101522, 101556, 101633, 101892, 102176, 102273,
    102404, 102648, 102658, 102740, 102978, 103044, 103050, 103172, 103426, 103508, 103818, 103940, 106497, 159236,
    159745, 337000, 337028, 337464, 337537, 337907, 337921, 340075, 340097, 340226, 340305, 340320, 340481, 340861,
    340891, 340901, 340979, 340985, 341237, 341249, 341810, 341893, 341907, 341952, 342020, 342201, 342276, 342289,
    343116, 343129, 343640, 343681, 343696, 343705, 343712, 343721, 343760, 343953, 344085, 344089, 344117, 344121,
    344157, 344161, 344349, 344388, 344421, 344424, 344450, 344500, 344528, 344577, 344995, 345024, 345093, 345105,
    345509, 345648, 345715, 345730, 345808, 345861, 346001, 346051, 346073, 346083, 346089, 346109, 346114, 346193,
    346421, 346483, 346497, 346685, 346784, 346875, 346881, 347112, 347141, 347169, 347549, 347659, 347760, 347769,
    347778, 347856, 347891, 347905, 347949, 347953, 348034, 348113, 348152, 348161, 348493, 348600, 348673, 348701,
    348705, 348773, 348784, 348802, 348880, 348899, 348929, 349116, 349137, 349149, 349169, 349573, 349577, 349589,
    349609, 349629, 349641, 349685, 349697, 349709, 349713, 349720, 349913, 349939, 349953, 350045, 350083, 350097,
    350125, 350136, 350217, 350264, 350281, 350328, 350345, 350392, 350465, 350520, 350529, 350584, 350593, 350940,
    350945, 351060, 351072, 351105, 352029, 352091, 352101, 352112, 352130, 352208, 352257, 441632, 441729, 441912,
    441945, 442336, 442375, 509953, 512880, 512897, 513744, 514049, 514104, 514201, 514240, 514281, 514293, 514297,
    514380, 514385, 514488, 514497, 514536, 514545, 514552, 514561, 514576, 514585, 514600, 514609, 515476, 515608,
    515737, 518643, 518660, 518785, 519296, 519313, 519744, 519804, 519808, 520065, 520164, 520197, 520323, 520400,
    520453, 520579, 520856, 520867, 520980, 520987, 520996, 521016, 521027, 521036, 521043, 521056, 521089, 521128,
    521137, 522216, 522239, 522240, 522251, 522276, 522283, 522332, 522339, 522370, 522451, 522468, 522491, 522505,
    522715, 522740, 522747, 522756, 522761, 522971, 522980, 522987, 522996, 523003, 523057, 523768, 523793, 523840,
    523857, 523904, 523921, 523968, 523985, 524008, 524036, 524088, 524100, 524152, 524239, 524260, 524272, 524289,
    524384, 524393, 524600, 524609, 524760, 524769, 524784, 524793, 524912, 524929, 525040, 525313, 526296, 526339,
    526360, 526394, 526752, 526780, 526850, 527308, 527442, 527460, 527480, 527492, 527592, 527620, 527624, 528004,
    528365, 528368, 529409, 529640, 529665, 530056, 530181, 530186, 530400, 530433, 530690, 530720, 530793, 530954,
    530961, 531026, 531032, 531073, 531381, 531416, 531457, 531696, 531707, 531713, 532000, 532033, 532099, 532106,
    532144, 532481, 533744, 533762, 533840, 533889, 534176, 534209, 534496, 534529, 534848, 534913, 535328, 535419,
    535425, 535512, 535521, 535640, 535649, 535704, 535713, 535728, 535737, 535824, 535833, 535952, 535961, 536016,
    536025, 536040, 536577, 539064, 539137, 539312, 539393, 539456, 539649, 539696, 539705, 540040, 540049, 540120,
    540673, 540720, 540737, 540744, 540753, 541104, 541113, 541128, 541153, 541160, 541177, 541360, 541371, 541378,
    541441, 541628, 541642, 541697, 541944, 542010, 542080, 542465, 542616, 542625, 542640, 542682, 542721, 542898,
    542944, 542971, 542977, 543184, 543227, 543232, 543745, 544192, 544226, 544241, 544258, 544384, 544402, 544769,
    544781, 544800, 544813, 544824, 544869, 544897, 544928, 544937, 544960, 544969, 545200, 545221, 545240, 545277,
    545282, 545352, 545411, 545480, 545537, 545770, 545787, 545793, 546026, 546048, 546305, 546372, 546377, 546605,
    546616, 546650, 546691, 546744, 546817, 547248, 547275, 547329, 547504, 547522, 547585, 547736, 547778, 547841,
    547984, 548043, 548072, 548170, 548224, 548865, 549448, 549889, 550296, 550401, 550808, 550866, 550913, 551205,
    551232, 551298, 551376, 553730, 553976, 553985, 554320, 554333, 554347, 554352, 554369, 554384, 555009, 555242,
    555321, 555328, 555393, 555573, 555658, 555691, 555728, 555905, 556053, 556083, 556112, 556417, 556586, 556640,
    556801, 556984, 557061, 557081, 557509, 557627, 557680, 557714, 557957, 557961, 557981, 557993, 558000, 558077,
    558105, 558469, 558555, 558575, 558579, 558613, 558616, 558703, 558704, 558721, 558920, 558978, 559056, 559109,
    559129, 559421, 559528, 559538, 559619, 559649, 559661, 559673, 559680, 559745, 560029, 560035, 560049, 560056,
    560133, 560153, 560541, 560649, 560683, 560717, 560747, 560757, 560770, 560849, 560859, 560865, 560875, 560896,
    560906, 561064, 561153, 561296, 561305, 561509, 561603, 561653, 561656, 562177, 562232, 562241, 562248, 562257,
    562288, 562297, 562416, 562425, 562507, 562512, 562561, 562941, 563032, 563074, 563152, 563205, 563232, 563241,
    563304, 563321, 563336, 563353, 563528, 563537, 563592, 563601, 563616, 563625, 563664, 563677, 563689, 563701,
    563752, 563773, 563784, 563805, 563824, 563841, 563848, 563901, 563904, 563945, 563989, 564000, 564021, 564072,
    564101, 564136, 565249, 565677, 565817, 565851, 565890, 565971, 565984, 565995, 566005, 566009, 566032, 566273,
    566661, 566817, 566835, 566841, 566848, 566914, 566992, 568321, 568701, 568752, 568773, 568843, 569025, 569061,
    569072, 569345, 569733, 569867, 569889, 569896, 569986, 570064, 570115, 570216, 570369, 570717, 570817, 570827,
    570832, 570882, 570960, 571393, 571608, 571629, 571744, 571778, 571875, 571900, 571905, 571960, 573441, 573797,
    573915, 573920, 574721, 575234, 575384, 575481, 575544, 575561, 575568, 575585, 575648, 575657, 575672, 575681,
    575877, 575920, 575933, 575944, 575965, 575993, 576005, 576009, 576021, 576035, 576056, 576130, 576208, 576769,
    576832, 576849, 577165, 577216, 577237, 577289, 577299, 577305, 577317, 577320, 577537, 577549, 577625, 577949,
    578001, 578013, 578043, 578109, 578112, 578177, 578189, 578273, 578645, 578771, 578793, 578803, 578840, 578945,
    579528, 581633, 581704, 581713, 582013, 582072, 582085, 582145, 582155, 582192, 582274, 582504, 582531, 582545,
    582784, 582805, 582976, 582989, 583096, 583681, 583736, 583745, 583760, 583769, 584077, 584120, 584149, 584152,
    584165, 584176, 584189, 584241, 584253, 584256, 584322, 584400, 584449, 584496, 584505, 584520, 584529, 584789,
    584824, 584837, 584848, 584861, 584897, 584904, 584962, 585040, 587521, 587677, 587707, 587720, 589185, 589192,
    589314, 589484, 589712, 589819, 589825, 597200, 598018, 598904, 598915, 598952, 599041, 600608, 621697, 622475,
    622488, 622593, 631160, 631175, 631240, 663553, 668216, 737281, 741832, 741889, 742136, 742146, 742224, 742259,
    742273, 742904, 742914, 742992, 743041, 743280, 743301, 743339, 743344, 743425, 743813, 743867, 743908, 743937,
    743971, 743980, 743984, 744066, 744144, 744154, 744208, 744217, 744384, 744425, 744576, 750081, 750594, 750779,
    750808, 751617, 752216, 752253, 752257, 752269, 752704, 752765, 752793, 752896, 753409, 753427, 753433, 753445,
    753448, 753541, 753552, 753665, 802752, 802817, 812720, 813057, 813128, 884609, 884640, 884649, 884704, 884713,
    884728, 884737, 887064, 887425, 887448, 887585, 887616, 887681, 890848, 909313, 910168, 910209, 910312, 910337,
    910408, 910465, 910544, 910564, 910573, 910587, 910599, 910624, 948229, 948592, 948613, 948792, 948868, 949792,
    950276, 952240, 952324, 952632, 952652, 953133, 953172, 953197, 953247, 953309, 953372, 953389, 953444, 953685,
    953716, 954200, 954372, 954901, 954924, 954928, 956162, 956320, 956420, 957112, 957186, 957384, 958465, 959144,
    959153, 959720, 959729, 959744, 959761, 959768, 959785, 959800, 959817, 959848, 959857, 959952, 959961, 959968,
    959977, 960032, 960041, 960560, 960569, 960600, 960617, 960680, 960689, 960744, 960753, 960976, 960985, 961016,
    961025, 961064, 961073, 961080, 961105, 961160, 961169, 963888, 963905, 964108, 964113, 964316, 964321, 964572,
    964577, 964780, 964785, 965036, 965041, 965244, 965249, 965500, 965505, 965708, 965713, 965964, 965969, 966172,
    966177, 966240, 966258, 966660, 970757, 971196, 971229, 971628, 971693, 971700, 971813, 971820, 971835, 971872,
    971997, 972032, 972045, 972160, 980993, 981240, 983045, 983096, 983109, 983240, 983261, 983312, 983325, 983336,
    983349, 983384, 985089, 985448, 985477, 985529, 985584, 985602, 985680, 985713, 985724, 985728, 988289, 988533,
    988536, 988673, 989029, 989058, 989136, 989180, 989184, 999169, 999224, 999233, 999264, 999273, 999288, 999297,
    999416, 999425, 1001000, 1001018, 1001093, 1001144, 1001473, 1002021, 1002073, 1002080, 1002114, 1002192, 1002227,
    1002240, 1008522, 1008996, 1009002, 1009028, 1009034, 1009064, 1009674, 1010036, 1010042, 1010160, 1011713, 1011744,
    1011753, 1011968, 1011977, 1011992, 1012001, 1012008, 1012025, 1012032, 1012041, 1012120, 1012129, 1012160, 1012169,
    1012176, 1012185, 1012192, 1012241, 1012248, 1012281, 1012288, 1012297, 1012304, 1012313, 1012320, 1012329, 1012352,
    1012361, 1012376, 1012385, 1012392, 1012409, 1012416, 1012425, 1012432, 1012441, 1012448, 1012457, 1012464, 1012473,
    1012480, 1012489, 1012504, 1012513, 1012520, 1012537, 1012568, 1012577, 1012632, 1012641, 1012672, 1012681, 1012712,
    1012721, 1012728, 1012737, 1012816, 1012825, 1012960, 1013001, 1013024, 1013033, 1013072, 1013081, 1013216, 1013636,
    1013648, 1015812, 1016160, 1016196, 1016992, 1017092, 1017208, 1017228, 1017344, 1017356, 1017472, 1017484, 1017776,
    1017858, 1017964, 1019248, 1019700, 1019928, 1020036, 1020384, 1020420, 1020488, 1020548, 1020560, 1020676, 1020720,
    1021956, 1029824, 1029868, 1029992, 1030020, 1030120, 1030148, 1031072, 1031172, 1031880, 1031940, 1032032, 1032068,
    1032072, 1032196, 1032288, 1032324, 1032768, 1032836, 1032912, 1032964, 1033280, 1033348, 1033584, 1033604, 1033616,
    1034244, 1036960, 1037060, 1037168, 1037188, 1037224, 1037252, 1037288, 1037316, 1037368, 1037444, 1037672, 1037700,
    1037784, 1037828, 1037872, 1037956, 1038032, 1038084, 1038144, 1038212, 1038264, 1038340, 1039512, 1039524, 1039960,
    1040258, 1040336, 1048577, 1390336, 1390593, 1423816, 1423873, 1425648, 1425665, 1471760, 1471873, 1531656, 1556481,
    1560816, 1572865, 1612376, 7340047, 7340048, 7340295, 7341056, 7342085, 7344000, 7864327, 8388592, 8388615, 8912880,
};
static const uint16_t rfi_unicode_blocks[257] = {
    0, 50, 50, 60, 80, 83, 109, 141, 163, 191, 242, 312, 381, 444, 494, 533, 571, 601, 601, 627, 644, 645, 645, 658,
    687, 703, 724, 744, 765, 793, 795, 795, 836, 868, 900, 900, 904, 911, 911, 911, 918, 918, 924, 924, 929, 938, 969,
    979, 983, 1011, 1023, 1034, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035,
    1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1035, 1037, 1037, 1037, 1037, 1037, 1037, 1037,
    1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037,
    1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037,
    1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037,
    1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037, 1037,
    1037, 1037, 1037, 1037, 1043, 1043, 1061, 1074, 1105, 1130, 1164, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187,
    1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187,
    1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1187, 1193, 1193,
    1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193,
    1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1193, 1194, 1194, 1198, 1219, 1219, 1230, 1250,
    1288,
};
static const rfi_lower rfi_unicode_lower[182] = {
    {65, 26, 1, 32}, {192, 23, 1, 32}, {216, 7, 1, 32}, {256, 24, 2, 1}, {304, 1, 1, -199}, {306, 3, 2, 1},
    {313, 8, 2, 1}, {330, 23, 2, 1}, {376, 1, 1, -121}, {377, 3, 2, 1}, {385, 1, 1, 210}, {386, 2, 2, 1},
    {390, 1, 1, 206}, {391, 1, 1, 1}, {393, 2, 1, 205}, {395, 1, 1, 1}, {398, 1, 1, 79}, {399, 1, 1, 202},
    {400, 1, 1, 203}, {401, 1, 1, 1}, {403, 1, 1, 205}, {404, 1, 1, 207}, {406, 1, 1, 211}, {407, 1, 1, 209},
    {408, 1, 1, 1}, {412, 1, 1, 211}, {413, 1, 1, 213}, {415, 1, 1, 214}, {416, 3, 2, 1}, {422, 1, 1, 218},
    {423, 1, 1, 1}, {425, 1, 1, 218}, {428, 1, 1, 1}, {430, 1, 1, 218}, {431, 1, 1, 1}, {433, 2, 1, 217},
    {435, 2, 2, 1}, {439, 1, 1, 219}, {440, 1, 1, 1}, {444, 1, 1, 1}, {452, 1, 1, 2}, {453, 1, 1, 1}, {455, 1, 1, 2},
    {456, 1, 1, 1}, {458, 1, 1, 2}, {459, 9, 2, 1}, {478, 9, 2, 1}, {497, 1, 1, 2}, {498, 2, 2, 1}, {502, 1, 1, -97},
    {503, 1, 1, -56}, {504, 20, 2, 1}, {544, 1, 1, -130}, {546, 9, 2, 1}, {570, 1, 1, 10795}, {571, 1, 1, 1},
    {573, 1, 1, -163}, {574, 1, 1, 10792}, {577, 1, 1, 1}, {579, 1, 1, -195}, {580, 1, 1, 69}, {581, 1, 1, 71},
    {582, 5, 2, 1}, {880, 2, 2, 1}, {886, 1, 1, 1}, {895, 1, 1, 116}, {902, 1, 1, 38}, {904, 3, 1, 37}, {908, 1, 1, 64},
    {910, 2, 1, 63}, {913, 17, 1, 32}, {931, 9, 1, 32}, {975, 1, 1, 8}, {984, 12, 2, 1}, {1012, 1, 1, -60},
    {1015, 1, 1, 1}, {1017, 1, 1, -7}, {1018, 1, 1, 1}, {1021, 3, 1, -130}, {1024, 16, 1, 80}, {1040, 32, 1, 32},
    {1120, 17, 2, 1}, {1162, 27, 2, 1}, {1216, 1, 1, 15}, {1217, 7, 2, 1}, {1232, 48, 2, 1}, {1329, 38, 1, 48},
    {4256, 38, 1, 7264}, {4295, 1, 1, 7264}, {4301, 1, 1, 7264}, {5024, 80, 1, 38864}, {5104, 6, 1, 8},
    {7312, 43, 1, -3008}, {7357, 3, 1, -3008}, {7680, 75, 2, 1}, {7838, 1, 1, -7615}, {7840, 48, 2, 1},
    {7944, 8, 1, -8}, {7960, 6, 1, -8}, {7976, 8, 1, -8}, {7992, 8, 1, -8}, {8008, 6, 1, -8}, {8025, 4, 2, -8},
    {8040, 8, 1, -8}, {8072, 8, 1, -8}, {8088, 8, 1, -8}, {8104, 8, 1, -8}, {8120, 2, 1, -8}, {8122, 2, 1, -74},
    {8124, 1, 1, -9}, {8136, 4, 1, -86}, {8140, 1, 1, -9}, {8152, 2, 1, -8}, {8154, 2, 1, -100}, {8168, 2, 1, -8},
    {8170, 2, 1, -112}, {8172, 1, 1, -7}, {8184, 2, 1, -128}, {8186, 2, 1, -126}, {8188, 1, 1, -9}, {8486, 1, 1, -7517},
    {8490, 1, 1, -8383}, {8491, 1, 1, -8262}, {8498, 1, 1, 28}, {8544, 16, 1, 16}, {8579, 1, 1, 1}, {9398, 26, 1, 26},
    {11264, 48, 1, 48}, {11360, 1, 1, 1}, {11362, 1, 1, -10743}, {11363, 1, 1, -3814}, {11364, 1, 1, -10727},
    {11367, 3, 2, 1}, {11373, 1, 1, -10780}, {11374, 1, 1, -10749}, {11375, 1, 1, -10783}, {11376, 1, 1, -10782},
    {11378, 1, 1, 1}, {11381, 1, 1, 1}, {11390, 2, 1, -10815}, {11392, 50, 2, 1}, {11499, 2, 2, 1}, {11506, 1, 1, 1},
    {42560, 23, 2, 1}, {42624, 14, 2, 1}, {42786, 7, 2, 1}, {42802, 31, 2, 1}, {42873, 2, 2, 1}, {42877, 1, 1, -35332},
    {42878, 5, 2, 1}, {42891, 1, 1, 1}, {42893, 1, 1, -42280}, {42896, 2, 2, 1}, {42902, 10, 2, 1},
    {42922, 1, 1, -42308}, {42923, 1, 1, -42319}, {42924, 1, 1, -42315}, {42925, 1, 1, -42305}, {42926, 1, 1, -42308},
    {42928, 1, 1, -42258}, {42929, 1, 1, -42282}, {42930, 1, 1, -42261}, {42931, 1, 1, 928}, {42932, 8, 2, 1},
    {42948, 1, 1, -48}, {42949, 1, 1, -42307}, {42950, 1, 1, -35384}, {42951, 2, 2, 1}, {42960, 1, 1, 1},
    {42966, 2, 2, 1}, {42997, 1, 1, 1}, {65313, 26, 1, 32}, {66560, 40, 1, 40}, {66736, 36, 1, 40}, {66928, 11, 1, 39},
    {66940, 15, 1, 39}, {66956, 7, 1, 39}, {66964, 2, 1, 39}, {68736, 51, 1, 64}, {71840, 32, 1, 32},
    {93760, 32, 1, 32}, {125184, 34, 1, 34},
};
static const uint32_t rfi_unicode_bases[999] = {
    12582977, 12648513, 12714049, 12779585, 12845121, 12910657, 13041731, 13107269, 13172805, 13238341, 13303877,
    13369417, 13434953, 13500489, 13566025, 13697102, 13762639, 13828175, 13893711, 13959247, 14024783, 14221397,
    14286933, 14352469, 14418005, 14483545, 14680161, 14745697, 14811233, 14876769, 14942305, 15007841, 15138915,
    15204453, 15269989, 15335525, 15401061, 15466601, 15532137, 15597673, 15663209, 15794286, 15859823, 15925359,
    15990895, 16056431, 16121967, 16318581, 16384117, 16449653, 16515189, 16580729, 16711801, 16777281, 16842849,
    16908353, 16973921, 17039425, 17104993, 17170499, 17236067, 17301571, 17367139, 17432643, 17498211, 17563715,
    17629283, 17694788, 17760356, 17956933, 18022501, 18088005, 18153573, 18219077, 18284645, 18350149, 18415717,
    18481221, 18546789, 18612295, 18677863, 18743367, 18808935, 18874439, 18940007, 19005511, 19071079, 19136584,
    19202152, 19398729, 19464297, 19529801, 19595369, 19660873, 19726441, 19791945, 19857513, 19923017, 20185162,
    20250730, 20316235, 20381803, 20512844, 20578412, 20643916, 20709484, 20774988, 20840556, 21168206, 21233774,
    21299278, 21364846, 21430350, 21495918, 21758031, 21823599, 21889103, 21954671, 22020175, 22085743, 22282322,
    22347890, 22413394, 22478962, 22544466, 22610034, 22675539, 22741107, 22806611, 22872179, 22937683, 23003251,
    23068755, 23134323, 23199828, 23265396, 23330900, 23396468, 23593045, 23658613, 23724117, 23789685, 23855189,
    23920757, 23986261, 24051829, 24117333, 24182901, 24248405, 24313973, 24379479, 24445047, 24510553, 24576121,
    24641625, 24707162, 24772730, 24838234, 24903802, 24969306, 25034874, 27263055, 27328623, 28246101, 28311669,
    30212161, 30277729, 30343241, 30408809, 30474319, 30539887, 30605397, 30670965, 30736469, 30802037, 30867541,
    30933109, 30998613, 31064181, 31129685, 31195253, 31326273, 31391841, 31457345, 31522913, 31588550, 31654118,
    31850567, 31916135, 31981643, 32047211, 32112719, 32178287, 32243791, 32309359, 32375223, 32440978, 32505962,
    32768071, 32833639, 33030222, 33095790, 33161281, 33226849, 33292486, 33358054, 33423576, 33489144, 33554497,
    33620065, 33685569, 33751137, 33816645, 33882213, 33947717, 34013285, 34078793, 34144361, 34209865, 34275433,
    34340943, 34406511, 34472015, 34537583, 34603090, 34668658, 34734162, 34799730, 34865237, 34930805, 34996309,
    35061877, 35127379, 35192947, 35258452, 35324020, 35520584, 35586152, 36044865, 36110433, 36175941, 36241509,
    36307023, 36372591, 36438095, 36503663, 36569167, 36634735, 36700239, 36765807, 36831321, 36896889, 54526720,
    54592257, 54723347, 54788872, 57934521, 58589243, 59048104, 59114385, 59179191, 59245461, 59310999, 59376537,
    59507615, 59638693, 59704233, 59769785, 61473689, 61539237, 61604785, 61670325, 61735863, 61801401, 61866949,
    63570873, 63636421, 63701951, 63767493, 63833033, 64160722, 64226258, 67109909, 67175445, 67306515, 67568646,
    67896346, 67961880, 68027427, 68748312, 70845496, 72352821, 72418357, 72549427, 72811606, 73139258, 73204792,
    73270339, 74843252, 74908789, 79758358, 79823926, 80741392, 80806960, 80872464, 80938032, 81134613, 81200181,
    81396952, 81462489, 81527830, 81593398, 81658903, 81724471, 81921048, 81986616, 82052120, 82117688, 82183198,
    82248766, 82445544, 82511081, 82576429, 82641997, 82707491, 82773059, 82838563, 82904131, 82969635, 83035203,
    83100711, 83166279, 83362859, 83428427, 102893095, 102958631, 103024200, 103089703, 103155274, 113247957, 113379009,
    114493138, 153684264, 154208560, 154405171, 156764437, 156829974, 156895511, 156961052, 157026593, 157092130,
    157157675, 157223215, 164301255, 164366791, 165415329, 165480866, 165611951, 171117106, 171313720, 173607446,
    173672983, 173738524, 173935147, 189270855, 189467463, 189532999, 190581537, 190647074, 194251666, 197790662,
    197856199, 197921734, 206048326, 213912767, 214371526, 214437062, 214568134, 214633670, 222956870, 223022407,
    223087942, 232394201, 232525273, 232590809, 232656345, 256053058, 256708428, 257036113, 257363798, 257691483,
    258543424, 259198833, 259329905, 259395506, 259526579, 260116337, 261296018, 261951388, 262279073, 262606758,
    262934443, 263786384, 270929957, 453384965, 453516039, 453647113, 453778187, 453909261, 454171409, 456858426,
    456989500, 457186110, 457251647, 457382722, 503316545, 503382113, 503447618, 503513186, 503578690, 503644258,
    503709762, 503775330, 503840835, 503906403, 503971908, 504037476, 504102980, 504168548, 504234052, 504299620,
    504365124, 504430692, 504496196, 504561764, 504627269, 504692837, 504758341, 504823909, 504889413, 504954981,
    505020485, 505086053, 505151557, 505217125, 505282630, 505348198, 505413703, 505479271, 505544776, 505610344,
    505675848, 505741416, 505806920, 505872488, 505937992, 506003560, 506069064, 506134632, 506200137, 506265705,
    506331209, 506396777, 506462283, 506527851, 506593355, 506658923, 506724427, 506789995, 506855500, 506921068,
    506986572, 507052140, 507117644, 507183212, 507248716, 507314284, 507379789, 507445357, 507510861, 507576429,
    507641933, 507707501, 507773006, 507838574, 507904078, 507969646, 508035150, 508100718, 508166222, 508231790,
    508297295, 508362863, 508428367, 508493935, 508559439, 508625007, 508690511, 508756079, 508821584, 508887152,
    508952656, 509018224, 509083730, 509149298, 509214802, 509280370, 509345874, 509411442, 509476946, 509542514,
    509608019, 509673587, 509739091, 509804659, 509870163, 509935731, 510001235, 510066803, 510132307, 510197875,
    510263380, 510328948, 510394452, 510460020, 510525524, 510591092, 510656596, 510722164, 510787669, 510853237,
    510918741, 510984309, 511049813, 511115381, 511180885, 511246453, 511311957, 511377525, 511443030, 511508598,
    511574102, 511639670, 511705175, 511770743, 511836247, 511901815, 511967319, 512032887, 512098391, 512163959,
    512229463, 512295031, 512360536, 512426104, 512491608, 512557176, 512622681, 512688249, 512753754, 512819322,
    512884826, 512950394, 513015898, 513081466, 513146984, 513212532, 513278071, 513343609, 513474943, 513802305,
    513867873, 513933377, 513998945, 514064449, 514130017, 514195521, 514261089, 514326593, 514392161, 514457665,
    514523233, 514588737, 514654305, 514719809, 514785377, 514850881, 514916449, 514981953, 515047521, 515113025,
    515178593, 515244097, 515309665, 515375173, 515440741, 515506245, 515571813, 515637317, 515702885, 515768389,
    515833957, 515899461, 515965029, 516030533, 516096101, 516161605, 516227173, 516292677, 516358245, 516423753,
    516489321, 516554825, 516620393, 516685903, 516751471, 516816975, 516882543, 516948047, 517013615, 517079119,
    517144687, 517210191, 517275759, 517341263, 517406831, 517472335, 517537903, 517603407, 517668975, 517734479,
    517800047, 517865551, 517931119, 517996623, 518062191, 518127695, 518193263, 518258773, 518324341, 518389845,
    518455413, 518520917, 518586485, 518651989, 518717557, 518783061, 518848629, 518914133, 518979701, 519045205,
    519110773, 519176281, 519241849, 519307353, 519372921, 519438425, 519503993, 519569497, 519635065, 520094641,
    520160177, 520225713, 520291249, 520356785, 520422321, 520487857, 520553393, 520618897, 520684433, 520749969,
    520815505, 520881041, 520946577, 521012113, 521077649, 521143221, 521208757, 521274293, 521339829, 521405365,
    521470901, 521667477, 521733013, 521798549, 521864085, 521929621, 521995157, 522191799, 522257335, 522322871,
    522388407, 522453943, 522519479, 522585015, 522650551, 522716055, 522781591, 522847127, 522912663, 522978199,
    523043735, 523109271, 523174807, 523240377, 523305913, 523371449, 523436985, 523502521, 523568057, 523633593,
    523699129, 523764633, 523830169, 523895705, 523961241, 524026777, 524092313, 524157849, 524223385, 524288959,
    524354495, 524420031, 524485567, 524551103, 524616639, 524813215, 524878751, 524944287, 525009823, 525075359,
    525140895, 525337541, 525403077, 525468613, 525534149, 525599685, 525665221, 525730757, 525796293, 525927333,
    526058405, 526189477, 526320549, 526386121, 526451657, 526517193, 526582729, 526648265, 526713801, 526779337,
    526844873, 526910377, 526975913, 527041449, 527106985, 527172521, 527238057, 527303593, 527369129, 527434673,
    527500209, 527565749, 527631285, 527696823, 527762359, 527827897, 527893433, 527958975, 528024511, 528090053,
    528155589, 528221129, 528286665, 528483249, 528548785, 528614321, 528679857, 528745393, 528810929, 528876465,
    528942001, 529007505, 529073041, 529138577, 529204113, 529269649, 529335185, 529400721, 529466257, 529531831,
    529597367, 529662903, 529728439, 529793975, 529859511, 529925047, 529990583, 530056087, 530121623, 530187159,
    530252695, 530318231, 530383767, 530449303, 530514839, 530580425, 530645961, 530711497, 530777033, 530842569,
    530908105, 530973641, 531039177, 531104681, 531170217, 531235753, 531301289, 531366825, 531432361, 531497897,
    531563433, 531628977, 531694513, 531760049, 531825585, 531891121, 532022193, 532087729, 532153233, 532218769,
    532284305, 532349841, 532415377, 532546489, 532742312, 532808631, 532874167, 532939703, 533070775, 533136311,
    533201813, 533267349, 533332887, 533398423, 533463959, 533536703, 533602239, 533667775, 533726137, 533791673,
    533857209, 533922745, 534119353, 534184889, 534250393, 534315929, 534381465, 534447001, 534585342, 534650878,
    534716414, 534774725, 534840261, 534905797, 534971333, 535036865, 535102401, 535167941, 535233477, 535298981,
    535364517, 535430053, 535495589, 535561121, 535625896, 535691432, 535756896, 535954377, 536019913, 536085449,
    536216521, 536282057, 536347551, 536413087, 536478633, 536544169, 536609705, 536674484, 536879106, 536944643,
    556139433, 556400715, 556466241, 563749264, 563814802, 565059988, 567091664, 567157204, 567222738, 570696195,
    571023880, 571220491, 572793379, 572924453, 574693948, 574890563, 575087173, 575218248, 576716861, 576856673,
    577577549, 577634364, 577699902, 577774180, 577839717, 578036338, 578101875, 578298486, 578364023, 578822778,
    578888315, 579084930, 579150467, 579347078, 579412615, 581706402, 581771944, 581837481, 581903019, 585114236,
    585179773, 585245329, 585310866, 585769650, 585835187, 585900724, 585966261, 589901832, 589967369, 719071965,
    810299467, 810430541, 810561615, 810692689, 810823763, 810954837, 811085911, 811216985, 811348059, 811479133,
    811610207, 811741281, 811937892, 812068966, 812200040, 812658799, 812724335, 812855410, 812920946, 813052021,
    813117557, 813248632, 813314168, 813445243, 813510779, 815018054, 815673501, 816591019, 816722093, 816853167,
    816984241, 817115315, 817246389, 817377463, 817508537, 817639611, 817770685, 817901759, 818032833, 818229444,
    818360518, 818491592, 818950351, 819015887, 819146962, 819212498, 819343573, 819409109, 819540184, 819605720,
    819736795, 819802331, 821309606, 821506287, 821571824, 821637361, 821702898, 821965053,
};

static uint32_t rfi_unicode_code(uint32_t cp) {
    uint32_t lo, hi = RFI_COUNT(rfi_unicode_runs);
    if (cp < 0x10000) lo = rfi_unicode_blocks[cp >> 8], hi = rfi_unicode_blocks[(cp >> 8) + 1] + 1u;
    else lo = rfi_unicode_blocks[256];
    /* the last run that starts at or before cp; the first one starts at 0 */
    return rfi_unicode_runs[lo + rfi_count_below(rfi_unicode_runs + lo, hi - lo, 1, (cp + 1) << 3) - 1] & 7;
}

static uint32_t rfi_unicode_class(uint32_t cp) {
    static const uint8_t bits[8] = {RFI_OTHER,  RFI_LETTER, RFI_NUMBER, RFI_PUNCT,
                                    RFI_SYMBOL, RFI_MARK,   RFI_SPACE,  RFI_OTHER};
    return bits[rfi_unicode_code(cp)];
}

/* Control, format, private use, surrogate: \p{C} without what is not assigned. */
static int rfi_unicode_is_control(uint32_t cp) { return rfi_unicode_code(cp) == 7; }

/* The small letter of a capital one, its first if there are several; others as they are. */
static uint32_t rfi_unicode_to_lower(uint32_t cp) {
    const size_t stride = sizeof(rfi_lower) / sizeof(uint32_t);
    const size_t n = rfi_count_below(&rfi_unicode_lower[0].first, RFI_COUNT(rfi_unicode_lower), stride, cp + 1);
    if (n == 0) return cp;
    const rfi_lower *run = &rfi_unicode_lower[n - 1]; /* the last one that starts at or before cp */
    uint32_t k = (cp - run->first) / run->step;
    return (cp - run->first) % run->step == 0 && k < run->n ? (uint32_t)((int32_t)cp + run->add) : cp;
}

/* The first character that cp decomposes into; Hangul by rule, ideographs of compatibility not at all. */
static uint32_t rfi_unicode_base(uint32_t cp) {
    if (cp - 0xac00 < 11172) return 0x1100 + (cp - 0xac00) / 588;
    if (cp > 0xffff) return cp;
    const size_t i = rfi_count_below(rfi_unicode_bases, RFI_COUNT(rfi_unicode_bases), 1, cp << 16);
    return i < RFI_COUNT(rfi_unicode_bases) && rfi_unicode_bases[i] >> 16 == cp ? rfi_unicode_bases[i] & 0xffff : cp;
}

/* ==== 13b Chat templates ============================================================================== >>template
 * The chat_template of a file is a program (Jinja). It is never run: the text is searched for the markers of the
 * families below, and the family's own rules format the conversation. A template with markers of no family, of two, or
 * of one that is known but not built in, is refused: a wrong format gives bad answers and no error. Two things differ
 * from the templates on purpose. A default system text that some add (Qwen2, Llama 3.1 with its dates) is not added;
 * and Mistral's system text goes into the next user turn, where v3 moves it to the last one, so that a longer
 * conversation begins with the same tokens. Content is copied as it is: where the result is tokenized with
 * RF_TOKENIZE_SPECIAL, a control token spelled out in a message becomes one; rf_chat_tokenize keeps them apart. */

/* In the texts below these two bytes stand for the file's own tokens. The tokenizer adds the bos at the very start. */
#define RFI_CHAT_BOS "\1"
#define RFI_CHAT_EOS "\2"

/* Whose content is trimmed, and other properties of a family. */
enum {
    RFI_TRIM_SYSTEM = 1, RFI_TRIM_USER = 2, RFI_TRIM_ANSWER = 4,
    RFI_CHAT_FINAL = 8,       /* finished answers lose their reasoning                   */
    RFI_CHAT_SYSTEM_FIRST = 16 /* system text is at the start only, parts joined by "\n\n" */
};

typedef struct rfi_chat_family {
    const char *name;
    const char *system[2];    /* before and after a system message            */
    const char *user[2];
    const char *answer[2];
    const char *answer_space; /* between answer[0] and a finished answer      */
    uint32_t trim;
    uint32_t in_user;         /* 1: system text is part of the next user turn */
    const char *prefix;       /* before everything; NULL: nothing             */
    const char *open;         /* opening of the answer; NULL: answer[0]       */
} rfi_chat_family;

#define RFI_CHAT_TURNS(open, shut, end, system, user, answer) \
    {open system shut, end}, {open user shut, end}, {open answer shut, end}
#define RFI_CHAT_BAR(name) "<\xef\xbd\x9c" name "\xef\xbd\x9c>" /* between fullwidth bars */

/* Source: the templates in the files that the families publish. "mistral" is the format of its tokenizer v3; "harmony"
 * is OpenAI's description of gpt-oss's format, less the date, which a library does not know. */
static const rfi_chat_family rfi_chat_families[] = {
    {"chatml", RFI_CHAT_TURNS("<|im_start|>", "\n", "<|im_end|>\n", "system", "user", "assistant"), "", 0, 0,
     NULL, NULL},
    {"llama3", RFI_CHAT_TURNS("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>",
     "system", "user", "assistant"), "", RFI_TRIM_SYSTEM | RFI_TRIM_USER | RFI_TRIM_ANSWER, 0, NULL, NULL},
    {"phi3", RFI_CHAT_TURNS("<|", "|>\n", "<|end|>\n", "system", "user", "assistant"), "", 0, 0, NULL, NULL},
    {"zephyr", RFI_CHAT_TURNS("<|", "|>\n", RFI_CHAT_EOS "\n", "system", "user", "assistant"), "", 0, 0, NULL, NULL},
    {"gemma", {"", "\n\n"}, {"<start_of_turn>user\n", "<end_of_turn>\n"},
     {"<start_of_turn>model\n", "<end_of_turn>\n"}, "", RFI_TRIM_USER | RFI_TRIM_ANSWER, 1, NULL, NULL},
    {"llama2", {"<<SYS>>\n", "\n<</SYS>>\n\n"}, {RFI_CHAT_BOS "[INST] ", " [/INST]"}, {"", " " RFI_CHAT_EOS}, " ",
     RFI_TRIM_USER | RFI_TRIM_ANSWER, 1, NULL, NULL},
    {"mistral-v0", {"", "\n\n"}, {"[INST] ", " [/INST]"}, {"", RFI_CHAT_EOS}, "", 0, 1, NULL, NULL},
    {"mistral-v1", {"", "\n\n"}, {" [INST] ", " [/INST]"}, {"", RFI_CHAT_EOS}, " ", 0, 1, NULL, NULL},
    {"mistral", {"", "\n\n"}, {"[INST] ", "[/INST]"}, {"", RFI_CHAT_EOS}, " ", RFI_TRIM_ANSWER, 1, NULL, NULL},
    {"mistral-v3-tekken", {"", "\n\n"}, {"[INST]", "[/INST]"}, {"", RFI_CHAT_EOS}, "", 0, 1, NULL, NULL},
    {"mistral-v7", {"[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"}, {"[INST] ", "[/INST]"}, {"", RFI_CHAT_EOS}, " ",
     0, 0, NULL, NULL},
    {"mistral-v7-tekken", {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}, {"[INST]", "[/INST]"}, {"", RFI_CHAT_EOS}, "",
     0, 0, NULL, NULL},
    {"phi4", RFI_CHAT_TURNS("<|im_start|>", "<|im_sep|>", "<|im_end|>", "system", "user", "assistant"), "", 0, 0,
     NULL, NULL},
    {"phi4-mini", RFI_CHAT_TURNS("<|", "|>", "<|end|>", "system", "user", "assistant"), "", 0, 0, NULL, NULL},
    {"glm4", RFI_CHAT_TURNS("<|", "|>\n", "", "system", "user", "assistant"), "", 0, 0, "[gMASK]<sop>", NULL},
    {"granite", RFI_CHAT_TURNS("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n",
     "system", "user", "assistant"), "", 0, 0, NULL, NULL},
    {"deepseek3", {"", ""}, {RFI_CHAT_BAR("User"), ""}, {RFI_CHAT_BAR("Assistant"), RFI_CHAT_EOS}, "",
     RFI_CHAT_FINAL | RFI_CHAT_SYSTEM_FIRST, 0, NULL, NULL},
    {"deepseek-r1", {"", ""}, {RFI_CHAT_BAR("User"), ""}, {RFI_CHAT_BAR("Assistant"), RFI_CHAT_EOS}, "",
     RFI_CHAT_FINAL | RFI_CHAT_SYSTEM_FIRST, 0, NULL, RFI_CHAT_BAR("Assistant") "<think>\n"},
    {"harmony", {"<|start|>developer<|message|># Instructions\n\n", "<|end|>"},
     {"<|start|>user<|message|>", "<|end|>"},
     {"<|start|>assistant<|channel|>final<|message|>", "<|end|>"}, "", RFI_CHAT_FINAL, 0,
     "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
     "2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for "
     "every message.<|end|>", "<|start|>assistant"},
    {"plain", {"", "\n\n"}, {"User: ", "\n"}, {"Assistant:", "\n"}, " ", 0, 0, NULL, NULL}, /* by name only */
};

static const rfi_chat_family *rfi_chat_by_name(const char *name) {
    for (size_t i = 0; name && i < RFI_COUNT(rfi_chat_families); i++)
        if (strcmp(rfi_chat_families[i].name, name) == 0) return &rfi_chat_families[i];
    return NULL;
}

static rf_result rfi_chat_unknown(const char *name, rf_error *err) {
    char names[256] = "";
    for (size_t i = 0; i < RFI_COUNT(rfi_chat_families); i++)
        rfi_list_name(names, sizeof names, rfi_chat_families[i].name);
    return rfi_fail(err, RF_ERR_ARGUMENT, 0, "chat: no template is called '%.64s'; there are: %s", name, names);
}

/* ---- recognising ---- */

#define RFI_CHAT_TEMPLATE_MAX (1u << 20) /* bytes; real ones have less than 64 KiB */

/* The text from the first occurrence of a marker on; empty if there is none. */
static rf_string rfi_chat_find(rf_string t, const char *mark) {
    size_t n = strlen(mark);
    if (t.len < n) return (rf_string){NULL, 0};
    for (const char *p = t.data, *end = t.data + t.len; (size_t)(end - p) >= n; p++) {
        p = (const char *)memchr(p, mark[0], (size_t)(end - p) - n + 1);
        if (!p) break;
        if (memcmp(p, mark, n) == 0) return (rf_string){p, (uint64_t)(end - p)};
    }
    return (rf_string){NULL, 0};
}
static int rfi_chat_has(rf_string t, const char *mark) { return rfi_chat_find(t, mark).len > 0; }

/* [INST] is written by two families and, in one of them, with white space that differs by version. */
static const char *rfi_chat_recognise_inst(rf_string t) {
    if (rfi_chat_has(t, "[SYSTEM_PROMPT]"))
        return rfi_chat_has(t, "[SYSTEM_PROMPT] ") ? "mistral-v7" : "mistral-v7-tekken";
    if (rfi_chat_has(t, "<<SYS>>")) /* copies that do not repeat the bos are another format */
        return rfi_chat_has(t, "bos_token + '[INST]") || rfi_chat_has(t, "bos_token + \"[INST]") ? "llama2" : NULL;
    if (rfi_chat_has(t, "' [INST]") || rfi_chat_has(t, "\" [INST]")) return "mistral-v1";
    if (rfi_chat_has(t, " [/INST]")) return "mistral-v0";
    return rfi_chat_has(t, "[INST] ") ? "mistral" : "mistral-v3-tekken";
}

/* <|user|> and <|assistant|> are written by many. Phi-3 ends a turn by <|end|> and begins it by a newline, Phi-4-mini
 * does not; Zephyr ends the user's turn by the eos (Falcon 3, OLMo 2 and GLM do not). */
static const char *rfi_chat_recognise_roles(rf_string t) {
    rf_string p = rfi_chat_find(t, "<|assistant|>");
    if (rfi_chat_has(t, "<|end|>")) {
        uint64_t i = strlen("<|assistant|>"); /* then '\n' or ' + '\n, as the character or spelled */
        while (i < p.len && p.data[i] && strchr("'\"+ ", p.data[i])) i++;
        if (i < p.len && p.data[i] == '\n') return "phi3";
        if (p.len - i >= 2 && memcmp(p.data + i, "\\n", 2) == 0) return "phi3";
        return rfi_chat_has(t, "'|>' + message['content'] + '<|end|>'") ? "phi4-mini" : NULL;
    }
    p = rfi_chat_find(t, "<|user|>");
    p.len -= rfi_chat_find(p, "}}").len;
    int eos = rfi_chat_has(p, "eos_token") || rfi_chat_has(p, "</s>") || rfi_chat_has(p, "<|endoftext|>");
    return eos ? "zephyr" : NULL;
}

/* R1 opens its answer with reasoning; a choice between reasoning and none (V3.1) is not built in. */
static const char *rfi_chat_recognise_deepseek(rf_string t) {
    rf_string p = rfi_chat_find(t, RFI_CHAT_BAR("Assistant") "<think>");
    size_t n = strlen(RFI_CHAT_BAR("Assistant") "<think>");
    if (p.len && (p.len < n + 2 || (p.data[n] != '\n' && memcmp(p.data + n, "\\n", 2) != 0))) return NULL;
    if (p.len) return "deepseek-r1";
    return rfi_chat_has(t, "thinking") ? NULL : "deepseek3";
}

/* Name of the family, or NULL. Every rule is tried, so their order does not matter. */
static const char *rfi_chat_recognise(rf_string t) {
    static const char *const refused[] = {"<|turn>" /* Gemma 4 */, "<|START_OF_TURN_TOKEN|>" /* Command R */,
                                          "<|header_start|>" /* Llama 4 */};
    const char *found[9] = {0}, *name = NULL;
    for (size_t i = 0; i < RFI_COUNT(refused); i++)
        if (rfi_chat_has(t, refused[i])) return NULL;
    int glm = rfi_chat_has(t, "[gMASK]"), sep = rfi_chat_has(t, "<|im_sep|>");
    if (rfi_chat_has(t, "<|im_start|>") && rfi_chat_has(t, "<|im_end|>")) found[0] = sep ? "phi4" : "chatml";
    if (rfi_chat_has(t, "<|start_header_id|>") && rfi_chat_has(t, "<|eot_id|>")) found[1] = "llama3";
    if (rfi_chat_has(t, "<start_of_turn>") && rfi_chat_has(t, "<end_of_turn>")) found[2] = "gemma";
    if (rfi_chat_has(t, "[INST]") && rfi_chat_has(t, "[/INST]")) found[3] = rfi_chat_recognise_inst(t);
    if (!glm && rfi_chat_has(t, "<|assistant|>")) found[4] = rfi_chat_recognise_roles(t);
    if (rfi_chat_has(t, "<|start_of_role|>") && rfi_chat_has(t, "<|end_of_role|>")) found[5] = "granite";
    if (rfi_chat_has(t, RFI_CHAT_BAR("User")) && rfi_chat_has(t, RFI_CHAT_BAR("Assistant")))
        found[6] = rfi_chat_recognise_deepseek(t);
    if (rfi_chat_has(t, "<|channel|>") && rfi_chat_has(t, "<|start|>") && rfi_chat_has(t, "<|message|>"))
        found[7] = "harmony";
    if (glm) { /* GLM-4's knows metadata; GLM-4.5 thinks */
        if (!rfi_chat_has(t, "[gMASK]<sop>") || !rfi_chat_has(t, "metadata") || rfi_chat_has(t, "think>")) return NULL;
        found[8] = "glm4";
    }
    for (size_t i = 0; i < RFI_COUNT(found); i++) {
        if (found[i] && name) return NULL;
        if (found[i]) name = found[i];
    }
    if (sep && (!found[0] || !rfi_chat_has(t, "<|im_start|>user<|im_sep|>"))) return NULL;
    if (rfi_chat_has(t, "<|channel|>") && !found[7]) return NULL;
    if (rfi_chat_has(t, "<|start_of_role|>") && !found[5]) return NULL;
    return rfi_chat_has(t, RFI_CHAT_BAR("User")) && !found[6] ? NULL : name;
}

static rf_result rfi_chat_of_file(const rf_gguf *g, const rfi_chat_family **out, rf_error *err) {
    rf_kv kv;
    rf_string t;
    *out = NULL;
    if (rf_gguf_find_kv(g, "tokenizer.chat_template", &kv, NULL) != RF_OK)
        return rfi_fail(err, RF_ERR_NOT_FOUND, 0, "chat: the file has no tokenizer.chat_template: name one");
    if (kv.type == RF_KV_STRING && rf_kv_text(&kv, NULL, &t, NULL) == RF_OK && t.len <= RFI_CHAT_TEMPLATE_MAX)
        *out = rfi_chat_by_name(rfi_chat_recognise(t));
    if (*out) return RF_OK;
    return rfi_fail(err, RF_ERR_UNSUPPORTED, kv.where, "chat: the file's chat template is of no family known here: "
                    "name one, or format the conversation yourself");
}

ROCMFORGE_API const char *rf_chat_template_name(const rf_gguf *g) {
    const rfi_chat_family *family;
    return g && rfi_chat_of_file(g, &family, NULL) == RF_OK ? family->name : NULL;
}

/* ---- formatting ---- */

typedef struct rfi_chat_writer {
    const rf_gguf *g;      /* or NULL                               */
    rf_string bos, eos;    /* their texts once asked for            */
    char *out;
    size_t capacity, count;
    size_t *borders;       /* NULL, or [2 * messages]: where contents start and end */
    uint32_t n_borders;
} rfi_chat_writer;

static void rfi_chat_put(rfi_chat_writer *w, const char *data, size_t n) {
    if (w->count < w->capacity && n) memcpy(w->out + w->count, data, rfi_min_u64(n, w->capacity - w->count));
    w->count += n;
}

/* Text of the token that `key` names, cached in *text: finding it walks the vocabulary. */
static void rfi_chat_put_token(rfi_chat_writer *w, const char *key, const char *otherwise, rf_string *text) {
    if (!text->data) {
        rf_kv id_kv, tokens;
        uint64_t cursor = 0;
        int64_t id;
        int found = w->g && rf_gguf_find_kv(w->g, key, &id_kv, NULL) == RF_OK &&
                    rf_kv_int(&id_kv, 0, &id, NULL) == RF_OK &&
                    rf_gguf_find_kv(w->g, "tokenizer.ggml.tokens", &tokens, NULL) == RF_OK && id >= 0;
        for (int64_t i = 0; found && i <= id; i++) found = rf_kv_text(&tokens, &cursor, text, NULL) == RF_OK;
        if (!found) *text = (rf_string){otherwise, strlen(otherwise)};
    }
    rfi_chat_put(w, text->data, (size_t)text->len);
}

static void rfi_chat_put_text(rfi_chat_writer *w, const char *text) {
    for (; *text; text++)
        if (*text == RFI_CHAT_EOS[0]) rfi_chat_put_token(w, "tokenizer.ggml.eos_token_id", "</s>", &w->eos);
        else if (*text != RFI_CHAT_BOS[0]) rfi_chat_put(w, text, 1);
        else if (w->count) rfi_chat_put_token(w, "tokenizer.ggml.bos_token_id", "<s>", &w->bos);
}

ROCMFORGE_API rf_string rf_chat_final(rf_string text) {
    static const char *const marks[] = {"</think>", "<|channel|>final<|message|>"};
    rf_string t = text.data ? text : (rf_string){"", 0}, found;
    for (size_t i = 0; i < RFI_COUNT(marks); i++)
        while ((found = rfi_chat_find(t, marks[i])).len) {
            t.data = found.data + strlen(marks[i]);
            t.len = found.len - strlen(marks[i]);
        }
    if (rfi_chat_has(t, "<|channel|>")) t.len = 0; /* only reasoning so far */
    return t;
}

static void rfi_chat_put_content(rfi_chat_writer *w, rf_string s, int trim) {
    for (; trim && s.len && rfi_is_ascii_space((unsigned char)s.data[0]); s.len--) s.data++;
    while (trim && s.len && rfi_is_ascii_space((unsigned char)s.data[s.len - 1])) s.len--;
    if (w->borders) w->borders[w->n_borders++] = w->count;
    rfi_chat_put(w, s.data, (size_t)s.len);
    if (w->borders) w->borders[w->n_borders++] = w->count;
}

/* 0 system, 1 user, 2 assistant, -1 none of them. */
static int rfi_chat_role(const rf_chat_message *m) {
    static const char *const roles[] = {"system", "user", "assistant"};
    for (int i = 0; i < 3 && m->role; i++)
        if (strcmp(m->role, roles[i]) == 0) return i;
    return -1;
}

/* Write message i, with the system messages just before it where they belong into it. */
static void rfi_chat_put_message(rfi_chat_writer *w, const rfi_chat_family *f, const rf_chat_message *messages,
                                 uint32_t i) {
    int role = rfi_chat_role(&messages[i]);
    rf_string content = {messages[i].content, strlen(messages[i].content)};
    const char *const *around = role == 0 ? f->system : role == 1 ? f->user : f->answer;
    uint32_t first = i;
    if (role == 0 && f->in_user) return;
    while (role == 1 && f->in_user && first > 0 && rfi_chat_role(&messages[first - 1]) == 0) first--;
    rfi_chat_put_text(w, around[0]);
    for (; first < i; first++) {
        rfi_chat_put_text(w, f->system[0]);
        rfi_chat_put_content(w, (rf_string){messages[first].content, strlen(messages[first].content)}, 0);
        rfi_chat_put_text(w, f->system[1]);
    }
    if (role == 2) rfi_chat_put_text(w, f->answer_space);
    if (role == 2 && f->trim & RFI_CHAT_FINAL) content = rf_chat_final(content);
    if (role == 0 && f->trim & RFI_CHAT_SYSTEM_FIRST && i > 0) rfi_chat_put_text(w, "\n\n");
    rfi_chat_put_content(w, content, (f->trim >> role & 1) != 0);
    rfi_chat_put_text(w, around[1]);
}

/* Write the conversation; w->count is its length, whatever the capacity. */
static rf_result rfi_chat_write(rfi_chat_writer *w, const rf_chat *chat, rf_error *err) {
    const char *name = chat->template_name;
    const rf_chat_message *messages = chat->messages;
    const uint32_t n = chat->n_messages;
    const rfi_chat_family *f = rfi_chat_by_name(name);
    if (name && !f) return rfi_chat_unknown(name, err);
    rf_result r = f ? RF_OK : rfi_chat_of_file(w->g, &f, err);
    if (r != RF_OK) return r;
    for (uint32_t i = 0; i < n; i++) {
        int role = rfi_chat_role(&messages[i]);
        if (role < 0 || !messages[i].content)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "chat: message %u: role '%.32s', want system, user or "
                            "assistant, with content", i, messages[i].role ? messages[i].role : "");
        if (role == 0 && f->in_user && (i + 1 == n || rfi_chat_role(&messages[i + 1]) == 2))
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "chat: message %u: '%s' puts system text into the "
                            "user turn that follows, and none does", i, f->name);
        if (role == 0 && f->trim & RFI_CHAT_SYSTEM_FIRST && i > 0 && rfi_chat_role(&messages[i - 1]) != 0)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "chat: message %u: '%s' has system text at the start only", i,
                            f->name);
    }
    if (f->prefix) rfi_chat_put_text(w, f->prefix);
    for (uint32_t i = 0; i < n; i++) rfi_chat_put_message(w, f, messages, i);
    if (chat->open_answer) rfi_chat_put_text(w, f->open ? f->open : f->answer[0]);
    return RF_OK;
}

ROCMFORGE_API rf_result rf_chat_format(const rf_gguf *g, const rf_chat *chat, char *out, size_t capacity,
                                       size_t *count, rf_error *err) {
    rfi_clear(err);
    if (count) *count = 0;
    if (!count || !chat || (!g && !chat->template_name) || (!chat->messages && chat->n_messages) || (!out && capacity))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_chat_format: want a file or a name, messages, out and count");
    rfi_chat_writer w = {.g = g, .out = out, .capacity = capacity};
    rf_result r = rfi_chat_write(&w, chat, err);
    if (r != RF_OK) return r;
    *count = w.count;
    if (w.count <= capacity) return RF_OK;
    return rfi_fail(err, RF_ERR_CAPACITY, 0, "rf_chat_format: the text has %llu bytes, capacity is %llu",
                    (unsigned long long)w.count, (unsigned long long)capacity);
}

ROCMFORGE_API rf_result rf_chat_tokenize(const rf_tokenizer *t, const rf_chat *chat, uint32_t flags, int32_t *out,
                                         uint32_t capacity, uint32_t *count, rf_error *err) {
    rfi_clear(err);
    if (count) *count = 0;
    if (!t || !count || !chat || (!chat->messages && chat->n_messages) || (!out && capacity) ||
        flags & ~RF_TOKENIZE_ADD)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0,
                        "rf_chat_tokenize: want a tokenizer, messages, out and count, flags 0 or RF_TOKENIZE_ADD");
    rfi_chat_writer w = {.g = t->g};
    rf_result r = rfi_chat_write(&w, chat, err);
    if (r != RF_OK) return r;
    if (w.count > RFI_TEXT_MAX_BYTES)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_chat_tokenize: text has %llu bytes, want at most %d",
                        (unsigned long long)w.count, RFI_TEXT_MAX_BYTES);
    w.capacity = w.count;
    w.count = 0;
    uint64_t n_borders = 2 * (uint64_t)chat->n_messages + 1;
    w.borders = (size_t *)rfi_alloc(&t->allocator, n_borders, sizeof *w.borders, "messages", err);
    w.out = (char *)rfi_alloc(&t->allocator, w.capacity + 1, 1, "chat text", err);
    r = w.borders && w.out ? rfi_chat_write(&w, chat, err) : RF_ERR_MEMORY;
    rfi_tokenizing k = {.t = t, .err = err, .out = out, .capacity = capacity, .borders = w.borders};
    k.n_borders = w.n_borders;
    if (r == RF_OK) r = rfi_tokenize(&k, (const unsigned char *)w.out, (uint32_t)w.count, flags | RF_TOKENIZE_SPECIAL);
    rfi_free(&t->allocator, w.out);
    rfi_free(&t->allocator, w.borders);
    if (r != RF_ERR_MEMORY) *count = k.count;
    return r;
}

/* ==== 13c Sampling ======================================================================================= >>sample
 * Sampling: from logits to one token, without allocating and without sorting. A float maps to a uint32 key of the same
 * order, so that top-k and top-p are both a cut in key space, found by three histogram passes (11 + 11 + 10 bits) over
 * 24 KiB of stack; min-p, XTC and mirostat cut there, too. Exact: among equal logits the smaller ids stay. The draw
 * walks the ids in order, adds in double and needs no exp of the C library, so that the same seed and logits give the
 * same token on every machine (but for a last bit where a compiler fuses multiply and add). */

#define RFI_KEY_NONE 0x007fffffu     /* the key of -infinity: a token that cannot be chosen */
#define RFI_KEY_INFINITY 0xff800000u
#define RFI_CHOICE_BLOCKS 256u

/* The tokens that can still be chosen: those with a key above `key`, and the first `ties` ids whose key equals it. Of
 * these min-p leaves keys from `floor` on, and XTC those below `ceiling` and the id `last`. The largest key of each
 * block of ids lets a pass skip blocks without any, which soon are most of them. */
typedef struct rfi_choice {
    const float *logits; /* [n]               */
    float max;           /* the largest logit */
    uint32_t n, block_size, n_blocks;
    uint32_t key, ties, floor, ceiling, last;
    uint32_t best[RFI_CHOICE_BLOCKS];
} rfi_choice;

/* Order-preserving key of a logit: negative numbers flip all bits, others the sign. NaN, beyond both infinities then,
 * counts as -infinity, and -0 as 0. */
static uint32_t rfi_logit_key(float logit) {
    uint32_t bits = rfi_load_u32(&logit), key = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    if (key - RFI_KEY_NONE > RFI_KEY_INFINITY - RFI_KEY_NONE) return RFI_KEY_NONE;
    return key + (key == 0x7fffffffu);
}

/* Start with every token above -infinity. Returns the id of the largest logit, the smallest id among equals. */
static uint32_t rfi_choice_begin(rfi_choice *c, const float *logits, uint32_t n) {
    uint32_t token = 0, key = RFI_KEY_NONE;
    *c = (rfi_choice){.logits = logits, .n = n, .block_size = n / RFI_CHOICE_BLOCKS + 1, .key = RFI_KEY_NONE,
                      .ceiling = UINT32_MAX};
    for (uint32_t i = 0; i < n; c->n_blocks++) {
        uint32_t best = RFI_KEY_NONE, end = i + (uint32_t)rfi_min_u64(c->block_size, n - i);
        for (; i < end; i++) {
            uint32_t k = rfi_logit_key(logits[i]);
            if (k > best) best = k;
            if (k > key) key = k, token = i;
        }
        c->best[c->n_blocks] = best;
    }
    c->max = logits[token];
    return token;
}

/* Can token i, whose key this is, be chosen? Ask in rising order of ids; *ties counts down from c->ties. */
static int rfi_choice_has(const rfi_choice *c, uint32_t i, uint32_t key, uint32_t *ties) {
    if (key < c->key || (key == c->key && *ties == 0)) return 0;
    if (key == c->key) --*ties;
    return key >= c->floor && (key < c->ceiling || i == c->last);
}

/* e^x for x <= 0, to 1e-8; 0 below -700. 2^whole goes into the exponent, the rest is a Taylor series, summed in
 * independent pairs. */
static inline double rfi_sample_exp(double x) {
    if (!(x > -700)) return 0;
    double log2 = x * 1.4426950408889634, scale;
    int64_t whole = (int64_t)(log2 - 0.5);
    uint64_t bits = (uint64_t)(whole + 1023) << 52;
    memcpy(&scale, &bits, sizeof scale);
    double t = (log2 - (double)whole) * 0.6931471805599453, tt = t * t;
    double high = (1.0 / 24 + t * (1.0 / 120)) + tt * (1.0 / 720 + t * (1.0 / 5040));
    return scale * ((1 + t) + tt * (0.5 + t * (1.0 / 6)) + tt * tt * high);
}

/* Probability relative to the most likely token's. The comparison avoids infinity - infinity. */
static double rfi_choice_weight(const rfi_choice *c, float logit, double inverse_temperature) {
    return logit == c->max ? 1.0 : rfi_sample_exp(((double)logit - (double)c->max) * inverse_temperature);
}

/* Drop most of what cannot be in the top k: if k blocks have a largest key >= x, so have k ids. */
static void rfi_choice_skim(rfi_choice *c, uint32_t top_k) {
    uint32_t sorted[RFI_CHOICE_BLOCKS], n = 0;
    if (top_k > c->n_blocks) return;
    for (uint32_t block = 0; block < c->n_blocks; block++) {
        uint32_t at = n++;
        for (; at > 0 && sorted[at - 1] < c->best[block]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = c->best[block];
    }
    if (sorted[top_k - 1] > c->key) c->key = sorted[top_k - 1] - 1, c->ties = 0;
}

/* Cut to the smallest set of the most likely tokens that holds
 *   top_k > 0   that many tokens
 *   top_k == 0  at least top_p of the probability, at temperature 1
 * and at least one token. Both are one search: a token counts 1 or its weight; histogram buckets are added from the
 * largest key down until the target is reached; that bucket is then split by the next bits of the key. */
static void rfi_choice_tighten(rfi_choice *c, uint32_t top_k, double top_p) {
    static const uint32_t bits[3] = {11, 11, 10};
    if (top_k) rfi_choice_skim(c, top_k);
    uint32_t count[1u << 11], prefix = 0, shift = 32, bucket = 0, lowest = c->key;
    double mass[1u << 11], above = 0, target = top_k;
    for (int level = 0; level < 3; level++) {
        uint32_t ties = c->ties, n_buckets = 1u << bits[level];
        memset(count, 0, sizeof count);
        memset(mass, 0, sizeof mass);
        shift -= bits[level];
        for (uint32_t block = 0; block < c->n_blocks; block++) {
            if (c->best[block] < lowest) continue;
            uint32_t i = block * c->block_size, end = i + (uint32_t)rfi_min_u64(c->block_size, c->n - i);
            for (; i < end; i++) {
                uint32_t key = rfi_logit_key(c->logits[i]);
                if (!rfi_choice_has(c, i, key, &ties)) continue;
                if (level > 0 && key >> (shift + bits[level]) != prefix) continue;
                bucket = (key >> shift) & (n_buckets - 1);
                count[bucket]++;
                if (!top_k) mass[bucket] += rfi_choice_weight(c, c->logits[i], 1.0);
            }
        }
        if (level == 0 && !top_k) {
            for (uint32_t b = n_buckets; b-- > 0;) target += mass[b];
            target *= top_p;
        }
        double sum = above;
        for (uint32_t b = n_buckets; b-- > 0 && sum < target;) {
            if (count[b] == 0) continue;
            bucket = b;
            above = sum;
            sum += top_k ? (double)count[b] : mass[b];
        }
        prefix = prefix << bits[level] | bucket;
        lowest = prefix << shift > c->key ? prefix << shift : c->key;
    }
    /* The last bucket is one key: how many of its equal tokens does the target still need? */
    double each = top_k ? 1.0 : mass[bucket] / (double)count[bucket], ties = ceil((target - above) / each);
    if (!(ties >= 1)) ties = 1;
    if (ties > (double)count[bucket]) ties = (double)count[bucket];
    c->key = prefix;
    c->ties = (uint32_t)ties;
}

/* The weights of what can be chosen, all and by block; ties_at: of c->ties what is left at each block's start. */
static double rfi_choice_sum(const rfi_choice *c, double inverse_temperature, double sums[RFI_CHOICE_BLOCKS],
                             uint32_t ties_at[RFI_CHOICE_BLOCKS]) {
    uint32_t ties = c->ties;
    double total = 0;
    for (uint32_t block = 0; block < c->n_blocks; block++) {
        uint32_t i = block * c->block_size, end = i + (uint32_t)rfi_min_u64(c->block_size, c->n - i);
        ties_at[block] = ties;
        sums[block] = 0;
        if (c->best[block] < c->key) continue;
        for (; i < end; i++)
            if (rfi_choice_has(c, i, rfi_logit_key(c->logits[i]), &ties))
                sums[block] += rfi_choice_weight(c, c->logits[i], inverse_temperature);
        total += sums[block];
    }
    return total;
}

/* XTC: of the tokens with at least this probability leave only the least likely, the largest id among equals. */
static void rfi_choice_exclude_top(rfi_choice *c, double threshold) {
    double sums[RFI_CHOICE_BLOCKS], least;
    uint32_t ties_at[RFI_CHOICE_BLOCKS], ties = c->ties, n = 0, lowest = UINT32_MAX, last = 0;
    least = threshold * rfi_choice_sum(c, 1.0, sums, ties_at);
    for (uint32_t i = 0; i < c->n; i++) {
        const uint32_t key = rfi_logit_key(c->logits[i]);
        if (!rfi_choice_has(c, i, key, &ties) || rfi_choice_weight(c, c->logits[i], 1.0) < least) continue;
        n++;
        if (key <= lowest) lowest = key, last = i;
    }
    if (n > 1) c->ceiling = lowest, c->last = last;
}

/* The n most likely tokens, best first; returns how many there are. */
static uint32_t rfi_choice_best(rfi_choice *c, uint32_t n, rf_logprob *best) {
    uint32_t found = 0;
    if (n < c->n) rfi_choice_tighten(c, n, 0);
    for (uint32_t i = 0, ties = c->ties; i < c->n; i++) {
        if (!rfi_choice_has(c, i, rfi_logit_key(c->logits[i]), &ties)) continue;
        uint32_t at = found++;
        for (; at > 0 && best[at - 1].logprob < c->logits[i]; at--) best[at] = best[at - 1];
        best[at] = (rf_logprob){(int32_t)i, c->logits[i]};
    }
    return found;
}

/* ---- random numbers ---- */

/* xoroshiro128++ 1.0 (Blackman and Vigna), seeded by SplitMix64: integers only, so alike on every machine. */
static uint64_t rfi_rotate(uint64_t x, int n) { return x << n | x >> (64 - n); }

static void rfi_random_seed(uint64_t state[2], uint64_t seed) {
    for (int i = 0; i < 2; i++) {
        uint64_t z = seed += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        state[i] = z ^ z >> 31;
    }
}

/* Uniform in [0, 1), 53 bits. */
static double rfi_random(uint64_t state[2]) {
    uint64_t a = state[0], b = state[1], x = rfi_rotate(a + b, 17) + a;
    b ^= a;
    state[0] = rfi_rotate(a, 49) ^ b ^ b << 21;
    state[1] = rfi_rotate(b, 28);
    return (double)(x >> 11) * 0x1p-53;
}

/* ---- the sampler ---- */

/* Read a number of general.sampling: lo to hi, an integer if `whole`. Returns 1 if the file has it. */
static int rfi_sampling_key(rfi_key_reader *k, const char *name, double lo, double hi, int whole, double *out) {
    int64_t n = 0;
    if (!rfi_key_read(k, name, 0)) return 0;
    const int is_number = k->kv.type != RF_KV_ARRAY && k->kv.type != RF_KV_BOOL;
    if (is_number && rf_kv_int(&k->kv, 0, &n, NULL) == RF_OK) *out = (double)n;
    else if (!is_number || whole || rf_kv_real(&k->kv, 0, out, NULL) != RF_OK)
        rfi_key_fail(k, RF_ERR_FORMAT, "want a %snumber, found %s", whole ? "whole " : "",
                     rfi_kv_type_name(k->kv.type));
    if (!(*out >= lo && *out <= hi)) rfi_key_fail(k, RF_ERR_FORMAT, "want %g to %g, found %g", lo, hi, *out);
    return 1;
}

ROCMFORGE_API rf_result rf_sampler_defaults(const rf_gguf *g, rf_sampler_desc *out, rf_error *err) {
    enum { TEMP, TOP_K, TOP_P, MIN_P, PENALTY, LAST_N, XTC, XTC_THRESHOLD, MIROSTAT, TAU, ETA, N };
    static const struct { const char *name; double lo, hi; int whole; } keys[N] = {
        {"general.sampling.temp", 0, 100, 0},  {"general.sampling.top_k", INT32_MIN, INT32_MAX, 1},
        {"general.sampling.top_p", 0, 1, 0},   {"general.sampling.min_p", 0, 1, 0},
        {"general.sampling.penalty_repeat", 0, 100, 0}, {"general.sampling.penalty_last_n", -1, INT32_MAX, 1},
        {"general.sampling.xtc_probability", 0, 1, 0},  {"general.sampling.xtc_threshold", 0, 1, 0},
        {"general.sampling.mirostat", 0, 2, 1},         {"general.sampling.mirostat_tau", 0, 100, 0},
        {"general.sampling.mirostat_eta", 0, 100, 0}};
    double v[N] = {0};
    int found[N];
    rfi_clear(err);
    if (out) memset(out, 0, sizeof *out);
    if (!g || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_sampler_defaults: file or out is NULL");
    rfi_key_reader k = {.g = g, .err = err};
    for (int i = 0; i < N; i++)
        found[i] = rfi_sampling_key(&k, keys[i].name, keys[i].lo, keys[i].hi, keys[i].whole, &v[i]);
    if (k.result != RF_OK) return k.result;
    out->temperature = (float)v[TEMP];
    out->top_k = v[TOP_K] > 0 ? (uint32_t)v[TOP_K] : 0; /* 0 and less: all tokens */
    out->top_p = (float)v[TOP_P];
    if (found[TOP_P] && v[TOP_P] == 0) out->top_k = 1;  /* ours: 0 is off; the file's: keep the likeliest */
    out->min_p = (float)v[MIN_P];
    out->xtc_probability = (float)v[XTC];
    out->xtc_threshold = (float)v[XTC_THRESHOLD];
    out->mirostat = (uint32_t)v[MIROSTAT];
    out->mirostat_tau = (float)v[TAU];
    out->mirostat_eta = (float)v[ETA];
    if (found[LAST_N] && v[LAST_N] == 0) return RF_OK;  /* no penalties */
    out->repeat_penalty = (float)v[PENALTY];
    if (v[LAST_N] < 0 || v[LAST_N] > RF_SAMPLER_HISTORY) out->penalty_last_n = RF_SAMPLER_HISTORY;
    else out->penalty_last_n = (uint32_t)v[LAST_N];
    return RF_OK;
}

/* Tokens that the sampler can remember, and where: ring buffer, with the caller's memory followed by workspace. */
static uint32_t rfi_sampler_capacity(const rf_sampler *s) {
    return s->desc.history ? s->desc.n_history : RF_SAMPLER_HISTORY;
}

/* The i-th last token. */
static int32_t rfi_sampler_recent(const rf_sampler *s, uint32_t i) {
    const int32_t *history = s->desc.history ? s->desc.history : s->history;
    return history[(s->n_accepted - 1 - i) % rfi_sampler_capacity(s)];
}

static rf_result rfi_sampler_check_arrays(const rf_sampler_desc *d, rf_error *err) {
    const rf_dry_breaker *b = d->dry_breakers;
    if ((d->n_bias && !d->bias) || (d->n_dry_breakers && !b))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sampler: bias or dry_breakers is NULL, their number is not 0");
    for (uint32_t i = 0; i < d->n_bias; i++)
        if (isnan(d->bias[i].bias))
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "sampler: bias of token %d is not a number", d->bias[i].token);
    for (uint32_t i = 0; i < d->n_dry_breakers; i++)
        if (b[i].n_tokens - 1u >= RF_DRY_BREAKER_TOKENS || (i && b[i].tokens[0] < b[i - 1].tokens[0]))
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "sampler: dry_breakers[%u] of %u tokens: want 1 to %d, in rising "
                            "order of the first token", i, b[i].n_tokens, RF_DRY_BREAKER_TOKENS);
    if (!d->history != !d->n_history || d->n_history > INT32_MAX / 5)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sampler: want memory for 1 to %d tokens of history, or none; got %u",
                        INT32_MAX / 5, d->n_history);
    if (d->logprobs ? !d->logprob_memory || d->n_top_logprobs > 256 : d->n_top_logprobs != 0)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sampler: want logprobs, logprob_memory and at most 256 "
                        "n_top_logprobs, or none of them; got %u", d->n_top_logprobs);
    return RF_OK;
}

ROCMFORGE_API rf_result rf_sampler_init(rf_sampler *s, const rf_sampler_desc *desc, rf_error *err) {
#define RFI_FIELD(name, lo, hi) {#name, offsetof(rf_sampler_desc, name), lo, hi}
    static const struct { const char *name; size_t at; float lo, hi; } fields[] = {
        RFI_FIELD(temperature, -FLT_MAX, FLT_MAX), RFI_FIELD(top_p, 0, INFINITY), RFI_FIELD(min_p, 0, 1),
        RFI_FIELD(repeat_penalty, 0, FLT_MAX), RFI_FIELD(frequency_penalty, -FLT_MAX, FLT_MAX),
        RFI_FIELD(presence_penalty, -FLT_MAX, FLT_MAX), RFI_FIELD(xtc_probability, 0, 1),
        RFI_FIELD(xtc_threshold, 0, 1), RFI_FIELD(dry_multiplier, 0, FLT_MAX), RFI_FIELD(dry_base, 1, FLT_MAX),
        RFI_FIELD(mirostat_tau, 0, FLT_MAX), RFI_FIELD(mirostat_eta, 0, FLT_MAX)};
#undef RFI_FIELD
    rfi_clear(err);
    if (!s) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sampler: want a struct, got NULL");
    memset(s, 0, sizeof *s);
    if (desc) s->desc = *desc;
    rf_sampler_desc *d = &s->desc;
    for (size_t i = 0; i < RFI_COUNT(fields); i++) {
        float v;
        memcpy(&v, (const char *)d + fields[i].at, sizeof v);
        if (v != 0 && !(v >= fields[i].lo && v <= fields[i].hi))
            return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sampler: %s: want a number from %g to %g, got %g",
                            fields[i].name, (double)fields[i].lo, (double)fields[i].hi, (double)v);
    }
    rf_result r = rfi_sampler_check_arrays(d, err);
    if (r != RF_OK) return r;
    const uint32_t capacity = rfi_sampler_capacity(s);
    if (d->penalty_last_n > capacity || d->dry_last_n > capacity || d->mirostat > 2)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sampler: want penalty_last_n and dry_last_n up to %u, the tokens "
                        "remembered, and mirostat 0 to 2; got %u, %u and %u", capacity, d->penalty_last_n,
                        d->dry_last_n, d->mirostat);
    if (d->penalty_last_n == 0) d->penalty_last_n = (uint32_t)rfi_min_u64(64, capacity);
    if (d->dry_last_n == 0) d->dry_last_n = capacity;
    if (d->dry_base == 0) d->dry_base = 1.75f;
    if (d->dry_allowed_length == 0) d->dry_allowed_length = 2;
    if (d->xtc_threshold == 0) d->xtc_threshold = 0.1f;
    if (d->mirostat_tau == 0) d->mirostat_tau = 5;
    if (d->mirostat_eta == 0) d->mirostat_eta = 0.1f;
    s->mirostat_mu = 2 * (double)d->mirostat_tau;
    rfi_random_seed(s->rng, d->seed);
    return RF_OK;
}

ROCMFORGE_API void rf_sampler_accept(rf_sampler *s, int32_t token) {
    if (!s) return;
    int32_t *history = s->desc.history ? s->desc.history : s->history;
    history[s->n_accepted++ % rfi_sampler_capacity(s)] = token;
}

/* ---- bias, penalties, DRY ---- */

/* Counts by token, in time that does not depend on the vocabulary. Entry e is three numbers: token, bits of its logit,
 * count. Meanwhile the logit's place holds e, which is believed only if entry e names the token (Briggs and Torczon
 * 1993, sparse sets). */
typedef struct rfi_tally {
    int32_t *entries; /* [3 * n] */
    uint32_t n;
    float *logits;
    uint32_t n_vocab;
} rfi_tally;

/* The count of a token; NULL if it is not in the vocabulary. */
static int32_t *rfi_tally_count(rfi_tally *t, int32_t token) {
    if (token < 0 || (uint32_t)token >= t->n_vocab) return NULL;
    uint32_t e = rfi_load_u32(&t->logits[token]);
    if (e >= t->n || t->entries[3 * (size_t)e] != token) {
        int32_t *entry = t->entries + 3 * (size_t)t->n;
        entry[0] = token, entry[2] = 0;
        memcpy(&entry[1], &t->logits[token], sizeof *entry);
        e = t->n++;
        memcpy(&t->logits[token], &e, sizeof e);
    }
    return &t->entries[3 * (size_t)e + 2];
}

/* Take entry e back out: put its logit where it was. Returns the count. */
static int32_t rfi_tally_restore(const rfi_tally *t, uint32_t e, float **logit) {
    const int32_t *entry = t->entries + 3 * (size_t)e;
    *logit = &t->logits[entry[0]];
    memcpy(*logit, &entry[1], sizeof **logit);
    return entry[2];
}

/* Source: the repeat penalty of Keskar et al. 2019, multiplying where the logit is negative; the other two as in
 * OpenAI's API. Remembered tokens outside the vocabulary change nothing. */
static void rfi_sampler_penalize(const rf_sampler *s, rfi_tally *t) {
    const rf_sampler_desc *d = &s->desc;
    float repeat = d->repeat_penalty > 0 ? d->repeat_penalty : 1.0f, *logit;
    if (repeat == 1.0f && d->frequency_penalty == 0 && d->presence_penalty == 0) return;
    const uint32_t n = (uint32_t)rfi_min_u64(s->n_accepted, d->penalty_last_n);
    for (uint32_t i = 0; i < n; i++) {
        int32_t *count = rfi_tally_count(t, rfi_sampler_recent(s, i));
        if (count) ++*count;
    }
    for (uint32_t e = 0; e < t->n; e++) {
        const int32_t count = rfi_tally_restore(t, e, &logit);
        *logit = *logit > 0 ? *logit / repeat : *logit * repeat;
        *logit -= (float)count * d->frequency_penalty + d->presence_penalty;
    }
    t->n = 0;
}

/* The breakers that begin with a token: the first of them, n_dry_breakers if there is none. */
static uint32_t rfi_sampler_breaker(const rf_sampler_desc *d, int32_t token) {
    uint32_t lo = 0, hi = d->n_dry_breakers;
    while (lo < hi) {
        const uint32_t middle = lo + (hi - lo) / 2;
        if (d->dry_breakers[middle].tokens[0] < token) lo = middle + 1;
        else hi = middle;
    }
    return lo < d->n_dry_breakers && d->dry_breakers[lo].tokens[0] == token ? lo : d->n_dry_breakers;
}

/* Is the token a breaker on its own? */
static int rfi_sampler_is_breaker(const rf_sampler_desc *d, int32_t token) {
    uint32_t b = rfi_sampler_breaker(d, token);
    while (b < d->n_dry_breakers && d->dry_breakers[b].tokens[0] == token && d->dry_breakers[b].n_tokens > 1) b++;
    return b < d->n_dry_breakers && d->dry_breakers[b].tokens[0] == token;
}

/* How many of the last n tokens follow the last breaker among them: no repetition is longer than that. */
static uint32_t rfi_sampler_unbroken(const rf_sampler *s, uint32_t n) {
    const rf_sampler_desc *d = &s->desc;
    for (uint32_t i = 0; i < n && d->n_dry_breakers; i++) {
        const int32_t token = rfi_sampler_recent(s, i);
        uint32_t longest = 0;
        for (uint32_t b = rfi_sampler_breaker(d, token); b < d->n_dry_breakers; b++) {
            const rf_dry_breaker *breaker = &d->dry_breakers[b];
            if (breaker->tokens[0] != token) break;
            uint32_t same = 0;
            while (same < breaker->n_tokens && same <= i && breaker->tokens[same] == rfi_sampler_recent(s, i - same))
                same++;
            if (same == breaker->n_tokens && same > longest) longest = same;
        }
        if (longest) return i + 1 - longest;
    }
    return n;
}

/* DRY as llama.cpp defines it. z[k]: how many of the last tokens also stand k tokens earlier, at most `limit` of them
 * (Z-algorithm, backwards, linear). The token that followed there would lengthen the repetition.
 * Source: p-e-w's proposal for text-generation-webui (2024), with llama.cpp's breakers. */
static void rfi_sampler_dry(const rf_sampler *s, int32_t *z, rfi_tally *t) {
    const rf_sampler_desc *d = &s->desc;
    const uint32_t n = (uint32_t)rfi_min_u64(s->n_accepted, d->dry_last_n), allowed = d->dry_allowed_length;
    if (d->dry_multiplier == 0 || n <= allowed) return;
    const uint32_t limit = rfi_sampler_unbroken(s, n);
    if (limit < allowed) return;
    float *logit;
    for (uint32_t k = 1, from = 0, end = 0; k < n; k++) { /* [from, end): the match that reaches furthest back */
        uint32_t same = k < end ? (uint32_t)rfi_min_u64((uint32_t)z[k - from], end - k) : 0;
        while (k + same < n && rfi_sampler_recent(s, same) == rfi_sampler_recent(s, k + same)) same++;
        if (k + same > end) from = k, end = k + same;
        z[k] = (int32_t)same;
    }
    for (uint32_t k = 1; k < n; k++) {
        const int32_t same = (int32_t)rfi_min_u64((uint32_t)z[k], limit);
        int32_t *longest = (uint32_t)same >= allowed ? rfi_tally_count(t, rfi_sampler_recent(s, k - 1)) : NULL;
        if (longest && same > *longest) *longest = same;
    }
    const double most = d->dry_base > 1.000001f ? floor(88.7228391 / log((double)d->dry_base)) : INFINITY;
    for (uint32_t e = 0; e < t->n; e++) {
        const double power = (double)rfi_tally_restore(t, e, &logit) - (double)allowed;
        if (rfi_sampler_is_breaker(d, t->entries[3 * (size_t)e])) continue;
        *logit -= (float)((double)d->dry_multiplier * pow((double)d->dry_base, power < most ? power : most));
    }
    t->n = 0;
}

/* Apply bias, penalties and DRY in place. */
static void rfi_sampler_adjust(const rf_sampler *s, float *logits, uint32_t n_vocab) {
    const rf_sampler_desc *d = &s->desc;
    int32_t small[4 * RF_SAMPLER_HISTORY], *work = d->history ? d->history + d->n_history : small;
    for (uint32_t i = 0; i < d->n_bias; i++) {
        int32_t token = d->bias[i].token;
        if (token >= 0 && (uint32_t)token < n_vocab) logits[token] += d->bias[i].bias;
    }
    if (d->mirostat && d->temperature > 0) return;
    rfi_tally tally = {.entries = work + rfi_sampler_capacity(s), .logits = logits, .n_vocab = n_vocab};
    rfi_sampler_penalize(s, &tally);
    rfi_sampler_dry(s, work, &tally);
}

/* Copy one breaker: token `head`, then the tokens of what is left of the text, at most as many as there is room for. */
static rf_result rfi_dry_breaker_add(const rf_tokenizer *t, int32_t head, const char *rest, rf_dry_breaker *out,
                                     rf_error *err) {
    int32_t tail[64]; /* rest has at most 40 bytes */
    uint32_t n = 0;
    rf_result r = *rest ? rf_tokenize(t, rf_string_of(rest), 0, tail, RFI_COUNT(tail), &n, err) : RF_OK;
    if (r != RF_OK) return r;
    *out = (rf_dry_breaker){.n_tokens = 1 + (uint32_t)rfi_min_u64(n, RF_DRY_BREAKER_TOKENS - 1), .tokens = {head}};
    memcpy(out->tokens + 1, tail, (out->n_tokens - 1) * sizeof *tail);
    return RF_OK;
}

ROCMFORGE_API rf_result rf_dry_breakers_find(const rf_tokenizer *t, const char *const *texts, uint32_t n_texts,
                                             rf_dry_breaker *out, uint32_t capacity, uint32_t *count, rf_error *err) {
    rfi_clear(err);
    if (count) *count = 0;
    if (!t || !count || (n_texts && !texts) || (capacity && !out))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_dry_breakers_find: tokenizer, texts, out or count is NULL");
    for (uint32_t i = 0; i < n_texts; i++)
        if (!texts[i] || texts[i][0] == 0 || strlen(texts[i]) > 40)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "rf_dry_breakers_find: texts[%u]: want 1 to 40 bytes", i);
    const int32_t n_vocab = (int32_t)rf_tokenizer_get_info(t).n_vocab;
    for (int32_t token = 0; token < n_vocab; token++) {
        rf_detokenizer state = {.tokenizer = t, .started = 1};
        char word[512];
        size_t n = 0;
        if (rf_detokenize(&state, token, RF_DETOKENIZE_SPECIAL | RF_DETOKENIZE_FINISH, word, sizeof word, &n, NULL))
            continue; /* longer than that: no breaker */
        for (uint32_t i = 0; i < n_texts; i++)
            for (size_t at = 0, len = strlen(texts[i]); at < n; at++) {
                const size_t same = n - at < len ? n - at : len;
                if (memcmp(word + at, texts[i], same) != 0) continue;
                rf_result r = RF_OK;
                if (*count < capacity) r = rfi_dry_breaker_add(t, token, texts[i] + same, &out[*count], err);
                if (r != RF_OK) return r;
                ++*count;
                if (same == len) break;
            }
    }
    if (*count <= capacity) return RF_OK;
    return rfi_fail(err, RF_ERR_CAPACITY, 0, "rf_dry_breakers_find: %u breakers, room for %u", *count, capacity);
}

/* ---- the choice ---- */

/* Draw from the choice. Weights are summed by blocks of ids, so that only the block that holds the drawn point is
 * walked a second time.
 *   probability  out  the drawn token's, of the choice; may be NULL */
static uint32_t rfi_sampler_draw(rf_sampler *s, const rfi_choice *c, double *probability) {
    double sums[RFI_CHOICE_BLOCKS], inverse = 1.0 / (double)s->desc.temperature;
    uint32_t ties_at[RFI_CHOICE_BLOCKS], from = 0;
    const double total = rfi_choice_sum(c, inverse, sums, ties_at);
    /* A block or token without weight is never entered, and rounding cannot lead past the last one that has some. */
    double point = rfi_random(s->rng) * total;
    for (uint32_t block = 0; block < c->n_blocks; block++) {
        if (sums[block] <= 0) continue;
        from = block;
        if (point < sums[block]) break;
        point -= sums[block];
    }
    uint32_t i = from * c->block_size, end = i + (uint32_t)rfi_min_u64(c->block_size, c->n - i), token = i;
    for (uint32_t ties = ties_at[from]; i < end; i++) {
        if (!rfi_choice_has(c, i, rfi_logit_key(c->logits[i]), &ties)) continue;
        double weight = rfi_choice_weight(c, c->logits[i], inverse);
        if (weight <= 0) continue;
        token = i;
        if (probability) *probability = weight / total;
        if (point < weight) break;
        point -= weight;
    }
    return token;
}

/* How many tokens mirostat 1 keeps: it fits Zipf's exponent to the 100 most likely ones.
 * Source: Basu et al. 2021, Mirostat, algorithm 1. */
static uint32_t rfi_mirostat_k(const rf_sampler *s, const rfi_choice *choice) {
    rf_logprob best[100];
    rfi_choice c = *choice;
    const uint32_t n = rfi_choice_best(&c, 100, best);
    const double n_vocab = choice->n;
    double product = 0, square = 0;
    for (uint32_t i = 0; i + 1 < n; i++) {
        const double t = log((i + 2.0) / (i + 1.0));
        product += t * ((double)best[i].logprob - (double)best[i + 1].logprob) / (double)s->desc.temperature;
        square += t * t;
    }
    const double exponent = product / square, above = exponent - 1;
    double k = above == 0 ? 1 / log(n_vocab) : above / (1 - pow(n_vocab, -above));
    k = pow(k * exp2(s->mirostat_mu), 1 / exponent);
    return !(k >= 1) ? 1 : k < n_vocab ? (uint32_t)k : choice->n;
}

/* Choose by mirostat: keep what surprises little enough, then let the surprise, in bits, steer the limit.
 * Source: Basu et al. 2021; version 2 cuts by the surprise itself. */
static uint32_t rfi_sampler_mirostat(rf_sampler *s, rfi_choice *c) {
    const rf_sampler_desc *d = &s->desc;
    double sums[RFI_CHOICE_BLOCKS], probability = 1;
    uint32_t ties_at[RFI_CHOICE_BLOCKS];
    if (d->mirostat == 1) {
        const uint32_t k = rfi_mirostat_k(s, c);
        if (k < c->n) rfi_choice_tighten(c, k, 0);
    } else {
        const double total = rfi_choice_sum(c, 1.0 / (double)d->temperature, sums, ties_at);
        const double below = log(total) - s->mirostat_mu * 0.6931471805599453; /* ln of the least weight */
        if (below > 0) rfi_choice_tighten(c, 1, 0);
        else c->floor = rfi_logit_key((float)((double)c->max + below * (double)d->temperature));
    }
    const uint32_t token = rfi_sampler_draw(s, c, &probability);
    s->mirostat_mu -= (double)d->mirostat_eta * (-log2(probability) - (double)d->mirostat_tau);
    return token;
}

/* The token's log probability and the most likely ones', by the logits that desc.logprob_memory keeps. */
static void rfi_sampler_logprobs(const rf_sampler *s, uint32_t n_vocab, int32_t token) {
    const rf_sampler_desc *d = &s->desc;
    const float *logits = d->logprob_memory;
    double sums[RFI_CHOICE_BLOCKS];
    uint32_t ties_at[RFI_CHOICE_BLOCKS], n = 0;
    rfi_choice c;
    rfi_choice_begin(&c, logits, n_vocab);
    const double log_sum = log(rfi_choice_sum(&c, 1.0, sums, ties_at));
    d->logprobs[0] = (rf_logprob){token, logits[token]};
    if (d->n_top_logprobs && rfi_logit_key(c.max) != RFI_KEY_NONE)
        n = rfi_choice_best(&c, d->n_top_logprobs, d->logprobs + 1);
    for (uint32_t i = 0; i <= d->n_top_logprobs; i++) {
        rf_logprob *p = &d->logprobs[i];
        if (i > n) *p = (rf_logprob){-1, -INFINITY};
        else if (p->logprob == c.max) p->logprob = (float)-log_sum; /* also where both are infinite */
        else p->logprob = (float)((double)p->logprob - (double)c.max - log_sum);
    }
}

ROCMFORGE_API rf_result rf_sampler_sample(rf_sampler *s, float *logits, uint32_t n_vocab, int32_t *token,
                                          rf_error *err) {
    rfi_clear(err);
    if (!s || !logits || !token || n_vocab == 0 || n_vocab > INT32_MAX)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sample: want sampler, logits, token, and 1..2^31-1 logits, got %u",
                        n_vocab);
    const rf_sampler_desc *d = &s->desc;
    if (d->logprobs) memcpy(d->logprob_memory, logits, n_vocab * sizeof *logits);
    rf_result r = d->logits_fn ? d->logits_fn(logits, n_vocab, d->logits_user) : RF_OK;
    if (r != RF_OK) return rfi_fail(err, r, 0, "sample: logits_fn returned %s", rf_result_name(r));
    rfi_sampler_adjust(s, logits, n_vocab);

    rfi_choice choice;
    uint32_t chosen = rfi_choice_begin(&choice, logits, n_vocab);
    if (rfi_logit_key(choice.max) == RFI_KEY_NONE)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "sample: none of %u logits is greater than -infinity", n_vocab);
    if (d->temperature > 0 && d->mirostat) chosen = rfi_sampler_mirostat(s, &choice);
    else if (d->temperature > 0) {
        if (d->top_k > 0 && d->top_k < n_vocab) rfi_choice_tighten(&choice, d->top_k, 0);
        if (d->top_p > 0 && d->top_p < 1) rfi_choice_tighten(&choice, 0, (double)d->top_p);
        if (d->min_p > 0) choice.floor = rfi_logit_key(choice.max + logf(d->min_p));
        if (d->xtc_probability > 0 && d->xtc_threshold <= 0.5f && rfi_random(s->rng) < (double)d->xtc_probability)
            rfi_choice_exclude_top(&choice, (double)d->xtc_threshold);
        chosen = rfi_sampler_draw(s, &choice, NULL);
    }
    *token = (int32_t)chosen;
    if (d->logprobs) rfi_sampler_logprobs(s, n_vocab, *token);
    rf_sampler_accept(s, *token);
    return RF_OK;
}

ROCMFORGE_API rf_result rf_session_sample(rf_session *s, uint32_t i, rf_sampler *sampler, int32_t *token,
                                          rf_error *err) {
    rfi_clear(err);
    if (!s || !sampler || !token)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_session_sample: session, sampler or token is NULL");
    const rf_sampler_desc *d = &sampler->desc;
    const int is_argmax = d->temperature <= 0 && d->n_bias == 0 && (d->repeat_penalty == 0 || d->repeat_penalty == 1) &&
                          d->frequency_penalty == 0 && d->presence_penalty == 0 && d->dry_multiplier == 0 &&
                          !d->logits_fn && !d->logprobs;
    if (is_argmax && !s->logits_copied && i < s->n_logits && s->argmax[i] >= 0) {
        *token = s->argmax[i];
        rf_sampler_accept(sampler, *token);
        return RF_OK;
    }
    float *logits;
    rf_result r = rfi_session_row(s, i, &logits, err);
    return r == RF_OK ? rf_sampler_sample(sampler, logits, s->m->plan.n_vocab, token, err) : r;
}

/* ==== 13d Continuous batching ========================================================================= >>scheduler
 * The scheduler. Requests wait in a ring buffer and run in slots, each with a sequence of the session. There are never
 * more slots than a batch has rows and logits, so every request in decode advances in every step and none starves. The
 * rest of a batch goes to prompts (prefill), the oldest first. Callbacks may submit requests, nothing else. */

typedef struct rfi_slot {
    rf_request request;
    int32_t seq;
    uint32_t n_held;    /* tokens evaluated, the prompt's first               */
    uint32_t n_new;     /* tokens in the current batch                        */
    uint32_t n_chosen;
    int32_t next;       /* chosen last, evaluated next                        */
    int32_t logits_row; /* of the current batch, -1 if the prompt goes on     */
} rfi_slot;

struct rf_scheduler {
    rf_session *session;
    const rf_session_desc *desc; /* the session's                                      */
    rf_tokenizer *tokenizer;     /* not const: it counts its users                     */
    rf_request *queue;           /* [capacity] ring buffer                             */
    uint32_t capacity, first, n_waiting;
    rfi_slot *slots;             /* [n_slots] running ones, oldest first, then idle    */
    uint32_t n_slots, n_running;
    rf_token_row *rows;          /* [n_batch]                                          */
    int closing, in_callbacks;   /* 1: in rf_scheduler_close; in a call that runs callbacks */
};

ROCMFORGE_API rf_result rf_scheduler_open(rf_session *s, const rf_tokenizer *t, uint32_t queue_capacity,
                                          rf_scheduler **out, rf_error *err) {
    rfi_clear(err);
    if (out) *out = NULL;
    if (!s || !t || !out || queue_capacity == 0)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_scheduler_open: want session, tokenizer, out, and a queue");
    const rf_allocator *alloc = rfi_session_allocator(s);
    rf_scheduler *sch = (rf_scheduler *)rfi_alloc(alloc, 1, sizeof *sch, "a scheduler", err);
    if (!sch) return RF_ERR_MEMORY;
    const rf_session_desc *d = sch->desc = &s->desc;
    sch->session = s, sch->tokenizer = (rf_tokenizer *)(uintptr_t)t;
    atomic_fetch_add(&sch->session->n_users, 1);
    atomic_fetch_add(&sch->tokenizer->n_users, 1);
    sch->n_slots = (uint32_t)rfi_min_u64(d->n_seq_max, rfi_min_u64(d->n_batch, d->n_logits_max));
    sch->capacity = queue_capacity;
    sch->queue = (rf_request *)rfi_alloc(alloc, queue_capacity, sizeof *sch->queue, "waiting requests", err);
    sch->slots = (rfi_slot *)rfi_alloc(alloc, sch->n_slots, sizeof *sch->slots, "running requests", err);
    sch->rows = (rf_token_row *)rfi_alloc(alloc, d->n_batch, sizeof *sch->rows, "a batch of rows", err);
    if (!sch->queue || !sch->slots || !sch->rows) {
        rf_scheduler_close(sch, NULL);
        return RF_ERR_MEMORY;
    }
    for (uint32_t i = 0; i < sch->n_slots; i++) sch->slots[i].seq = (int32_t)i;
    *out = sch;
    return RF_OK;
}

/* End the i-th running request: free its slot, then call on_end. */
static void rfi_scheduler_end(rf_scheduler *sch, uint32_t i, rf_result reason) {
    const rfi_slot ended = sch->slots[i];
    sch->n_running--;
    memmove(sch->slots + i, sch->slots + i + 1, (sch->n_running - i) * sizeof *sch->slots);
    sch->slots[sch->n_running] = ended;
    if (ended.request.on_end) ended.request.on_end(reason, ended.request.user);
}

static rf_result rfi_scheduler_admit(rf_scheduler *sch, rf_error *err) {
    rfi_slot *slot = &sch->slots[sch->n_running++];
    *slot = (rfi_slot){.request = sch->queue[sch->first], .seq = slot->seq, .logits_row = -1};
    sch->first = (sch->first + 1) % sch->capacity;
    sch->n_waiting--;
    return rf_session_truncate(sch->session, slot->seq, 0, NULL, err);
}

ROCMFORGE_API rf_result rf_scheduler_close(rf_scheduler *sch, rf_error *err) {
    rfi_clear(err);
    if (!sch) return RF_OK;
    if (sch->in_callbacks) return rfi_fail(err, RF_ERR_BUSY, 0, "rf_scheduler_close: called from a callback");
    const rf_allocator *alloc = rfi_session_allocator(sch->session);
    sch->closing = sch->in_callbacks = 1;
    while (sch->n_running || sch->n_waiting) {
        if (!sch->n_running) rfi_scheduler_admit(sch, NULL);
        rfi_scheduler_end(sch, 0, RF_ERR_CANCELLED);
    }
    rf_session *s = sch->session;
    rf_tokenizer *t = sch->tokenizer;
    rfi_free(alloc, sch->queue), rfi_free(alloc, sch->slots), rfi_free(alloc, sch->rows), rfi_free(alloc, sch);
    atomic_fetch_sub(&s->n_users, 1); /* last: the allocator is their file's */
    atomic_fetch_sub(&t->n_users, 1);
    return RF_OK;
}

ROCMFORGE_API rf_result rf_scheduler_submit(rf_scheduler *sch, const rf_request *request, rf_error *err) {
    rfi_clear(err);
    if (!sch || !request || !request->prompt || request->n_prompt == 0 || !request->sampler)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_scheduler_submit: want a scheduler, a prompt and a sampler");
    if (sch->closing) return rfi_fail(err, RF_ERR_CANCELLED, 0, "rf_scheduler_submit: the scheduler is being closed");
    if (request->n_prompt > sch->desc->n_ctx)
        return rfi_fail(err, RF_ERR_CONTEXT_FULL, 0, "rf_scheduler_submit: prompt of %u tokens, a sequence holds %u",
                        request->n_prompt, sch->desc->n_ctx);
    const uint32_t n_vocab = sch->session->m->plan.n_vocab;
    for (uint32_t i = 0; i < request->n_prompt; i++) /* here, because in a batch it would fail the others too */
        if (request->prompt[i] < 0 || (uint32_t)request->prompt[i] >= n_vocab)
            return rfi_fail(err, RF_ERR_ARGUMENT, i, "rf_scheduler_submit: prompt[%u] is token %d, want 0 to %u", i,
                            request->prompt[i], n_vocab - 1);
    if (sch->n_waiting == sch->capacity)
        return rfi_fail(err, RF_ERR_BUSY, 0, "rf_scheduler_submit: %u requests wait already", sch->n_waiting);
    sch->queue[((uint64_t)sch->first + sch->n_waiting++) % sch->capacity] = *request;
    return RF_OK;
}

/* Fill the batch: a row of each request in decode, then prompts while there is room. Changes only what describes this
 * batch, so that a cancelled batch can be filled again. */
static uint32_t rfi_scheduler_fill(rf_scheduler *sch) {
    uint32_t n_rows = 0, n_logits = 0;
    for (int prompts = 0; prompts < 2; prompts++)
        for (uint32_t i = 0; i < sch->n_running; i++) {
            rfi_slot *slot = &sch->slots[i];
            const rf_request *request = &slot->request;
            if ((slot->n_held < request->n_prompt) != prompts) continue;
            uint32_t end = prompts ? request->n_prompt : slot->n_held + 1, room = sch->desc->n_batch - n_rows;
            slot->n_new = end - slot->n_held < room ? end - slot->n_held : room;
            slot->logits_row = slot->n_held + slot->n_new == end ? (int32_t)n_logits++ : -1;
            for (uint32_t at = slot->n_held; at < slot->n_held + slot->n_new; at++)
                sch->rows[n_rows++] = (rf_token_row){.token = prompts ? request->prompt[at] : slot->next,
                                               .seq = slot->seq, .pos = RF_POS_NEXT, .want_logits = at + 1 == end};
        }
    return n_rows;
}

/* Sample a request's next token. Returns 1, with the reason, if that was its last. */
static int rfi_scheduler_choose(rf_scheduler *sch, rfi_slot *slot, rf_result *reason) {
    const rf_request *request = &slot->request;
    *reason = rf_session_sample(sch->session, (uint32_t)slot->logits_row, request->sampler, &slot->next, NULL);
    if (*reason != RF_OK) return 1;
    int stop = request->on_token && request->on_token(slot->next, request->user);
    if (stop || ++slot->n_chosen == request->max_tokens || rf_token_is_end(sch->tokenizer, slot->next)) return 1;
    *reason = RF_ERR_CONTEXT_FULL;
    return slot->n_held == sch->desc->n_ctx;
}

ROCMFORGE_API rf_result rf_scheduler_step(rf_scheduler *sch, uint32_t *n_active, rf_error *err) {
    rfi_clear(err);
    if (!sch) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_scheduler_step: scheduler is NULL");
    rf_result r = RF_OK;
    while (r == RF_OK && sch->n_waiting && sch->n_running < sch->n_slots) r = rfi_scheduler_admit(sch, err);
    if (r == RF_OK && sch->n_running) r = rf_session_eval(sch->session, sch->rows, rfi_scheduler_fill(sch), err);
    sch->in_callbacks = 1;
    /* Cancelled: nothing has changed. Any other failure ends every request that runs. */
    for (uint32_t i = 0; i < sch->n_running && r != RF_ERR_CANCELLED;) {
        rfi_slot *slot = &sch->slots[i];
        rf_result reason = r;
        int ends = r != RF_OK;
        if (!ends) slot->n_held += slot->n_new;
        if (!ends && slot->logits_row >= 0) ends = rfi_scheduler_choose(sch, slot, &reason);
        if (ends) rfi_scheduler_end(sch, i, reason);
        else i++;
    }
    sch->in_callbacks = 0;
    if (n_active) *n_active = sch->n_running + sch->n_waiting;
    return r;
}

/* ==== 14 Public ======================================================================================== >>public
 * Functions of section 1 that belong to no section above: results, devices, models. Arguments are checked here. */

ROCMFORGE_API rf_string rf_string_of(const char *text) { return (rf_string){text, text ? strlen(text) : 0}; }

ROCMFORGE_API const char *rf_result_name(rf_result code) {
#define RFI_NAME(code) [-(code)] = #code
    static const char *const names[] = {
        RFI_NAME(RF_OK), RFI_NAME(RF_ERR_ARGUMENT), RFI_NAME(RF_ERR_MEMORY), RFI_NAME(RF_ERR_IO),
        RFI_NAME(RF_ERR_FORMAT), RFI_NAME(RF_ERR_UNSUPPORTED), RFI_NAME(RF_ERR_CONTEXT_FULL),
        RFI_NAME(RF_ERR_DEVICE), RFI_NAME(RF_ERR_CANCELLED), RFI_NAME(RF_ERR_NOT_FOUND), RFI_NAME(RF_ERR_BUSY),
        RFI_NAME(RF_ERR_CAPACITY)};
#undef RFI_NAME
    const size_t i = (size_t)-(int64_t)code;
    return i < RFI_COUNT(names) ? names[i] : "unknown result";
}

#define RFI_TEXT_OF(x) #x
#define RFI_TEXT(x)    RFI_TEXT_OF(x)
ROCMFORGE_API const char *rf_version(void) {
    return RFI_TEXT(RF_VERSION_MAJOR) "." RFI_TEXT(RF_VERSION_MINOR) "." RFI_TEXT(RF_VERSION_PATCH);
}

/* ---- devices ---- */

#ifdef ROCMFORGE_HIP
#define RFI_HIP_LINKED 1
#else
extern const rf_device_api *rocmforge_hip_api(void) __attribute__((weak));
#define RFI_HIP_LINKED (rocmforge_hip_api != NULL)
#endif

/* The kernels file's table, if it is linked and was built from this header. */
static rf_result rfi_hip(const rf_device_api **out, rf_error *err) {
    const rf_device_api *api = RFI_HIP_LINKED ? rocmforge_hip_api() : NULL;
    *out = NULL;
    if (!api)
        return rfi_fail(err, RF_ERR_NOT_FOUND, 0,
                        "hip: not linked: build with rocmforge_kernels.hip (see ROCMFORGE_HIP)");
    if (api->size_bytes != sizeof *api || api->version != RF_DEVICE_API_VERSION ||
        api->op_bytes != sizeof(rf_op) || api->step_bytes != sizeof(rf_step))
        return rfi_fail(err, RF_ERR_DEVICE, 0,
                        "hip: rocmforge_kernels.hip was built from another rocmforge.h (table %u bytes, version "
                        "%u, op %u, step %u; here %u, %u, %u, %u): rebuild it",
                        api->size_bytes, api->version, api->op_bytes, api->step_bytes, (unsigned)sizeof *api,
                        RF_DEVICE_API_VERSION, (unsigned)sizeof(rf_op), (unsigned)sizeof(rf_step));
    *out = api;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_device_list(rf_device_info *out, uint32_t capacity, uint32_t *count, rf_error *err) {
    rf_error hip_err = {0};
    uint32_t n = 0;
    rfi_clear(err);
    if (!count || (!out && capacity))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_device_list: out or count is NULL");
    const rf_device_api *hip;
    rf_result r = rfi_hip(&hip, &hip_err);
    if (r == RF_OK) r = hip->device_list(out, capacity, &n, &hip_err);
    if (r != RF_OK) { /* one entry that says why there is no GPU */
        n = 1;
        if (capacity) {
            memset(out, 0, sizeof *out);
            snprintf(out->name, sizeof out->name, "hip:0");
            snprintf(out->note, sizeof out->note, "%.*s", (int)sizeof out->note - 1, hip_err.text);
        }
    }
    uint32_t used = n < capacity ? n : capacity, one = 0;
    r = rfi_cpu_api.device_list(out + used, capacity - used, &one, err);
    if (r != RF_OK) return r;
    n += one;
    used = n < capacity ? n : capacity;
    r = rfi_null_api.device_list(out + used, capacity - used, &one, err);
    *count = n + one;
    return r;
}

/* "hip:N" -> N; -1 if it is not that. */
static int rfi_hip_index(const char *name) {
    int n = 0, digits = 0;
    if (strncmp(name, "hip:", 4) != 0) return -1;
    for (const char *p = name + 4; *p; p++, digits++) {
        if (*p < '0' || *p > '9' || digits == 4) return -1;
        n = n * 10 + (*p - '0');
    }
    return digits ? n : -1;
}

/* Open the first usable GPU, else the CPU; d->note says why not a GPU. The list marks integrated GPUs as not usable. */
static rf_result rfi_device_open_auto(rf_device *d, const rf_device_desc *desc, rf_error *err) {
    rf_error why = {0};
    rf_device_info info[16];
    uint32_t n = 0;
    const rf_device_api *hip;
    if (rfi_hip(&hip, &why) == RF_OK && hip->device_list(info, (uint32_t)RFI_COUNT(info), &n, &why) == RF_OK) {
        for (uint32_t i = 0; i < n && i < RFI_COUNT(info); i++) {
            if (!info[i].usable) {
                rfi_fail(&why, RF_ERR_DEVICE, i, "%s: %s", info[i].name, info[i].note);
                continue;
            }
            rfi_clear(&why);
            if (hip->device_open(i, desc, &d->dev, &why) == RF_OK) {
                d->api = hip;
                return RF_OK;
            }
        }
        if (n == 0) rfi_fail(&why, RF_ERR_NOT_FOUND, 0, "hip: no device found");
    }
    snprintf(d->note, sizeof d->note, "no GPU: %.*s", (int)sizeof d->note - 16, why.text);
    d->api = &rfi_cpu_api;
    return rfi_cpu_api.device_open(0, desc, &d->dev, err);
}

static rf_result rfi_device_open_named(rf_device *d, const char *name, const rf_device_desc *desc, rf_error *err) {
    int index = rfi_hip_index(name);
    rf_result r = RF_OK;
    if (strcmp(name, "cpu") == 0) d->api = &rfi_cpu_api, index = 0;
    else if (strcmp(name, "null") == 0) d->api = &rfi_null_api, index = 0;
    else if (index < 0)
        return rfi_fail(err, RF_ERR_NOT_FOUND, 0, "device '%s' is not known; there are: auto, cpu, null, hip:N", name);
    else r = rfi_hip(&d->api, err);
    return r != RF_OK ? r : d->api->device_open((uint32_t)index, desc, &d->dev, err);
}

ROCMFORGE_API rf_result rf_device_open(const char *name, const rf_device_desc *desc, rf_device **out, rf_error *err) {
    rf_device_desc resolved = desc ? *desc : (rf_device_desc){0};
    rfi_clear(err);
    if (!out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_device_open: out is NULL");
    *out = NULL;
    rf_result r = rfi_check_allocator(&resolved.allocator, &resolved.allocator, err);
    if (r != RF_OK) return r;
    rf_device *d = (rf_device *)rfi_alloc(&resolved.allocator, 1, sizeof *d, "a device", err);
    if (!d) return RF_ERR_MEMORY;
    d->alloc = resolved.allocator;
    d->budget_bytes = resolved.budget_bytes;
    rfi_monitor_init(&d->monitor);
    r = !name || strcmp(name, "auto") == 0 ? rfi_device_open_auto(d, &resolved, err)
                                           : rfi_device_open_named(d, name, &resolved, err);
    if (r != RF_OK) {
        rfi_monitor_destroy(&d->monitor);
        rfi_free(&resolved.allocator, d);
        return r;
    }
    d->is_gpu = rf_device_get_info(d).is_gpu;
    *out = d;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_device_close(rf_device *d, rf_error *err) {
    rfi_clear(err);
    if (!d) return RF_OK;
    uint32_t n = atomic_load(&d->n_held);
    if (n) return rfi_fail(err, RF_ERR_BUSY, 0, "device %s: %u models are open on it", d->api->name, n);
    rf_allocator alloc = d->alloc;
    d->api->device_close(d->dev);
    if (d->fallback_dev) rfi_cpu_api.device_close(d->fallback_dev);
    rfi_monitor_destroy(&d->monitor);
    rfi_free(&alloc, d);
    return RF_OK;
}

ROCMFORGE_API const rf_device_api *rf_device_get_api(const rf_device *d, rf_dev **dev) {
    if (dev) *dev = d ? d->dev : NULL;
    return d ? d->api : NULL;
}

ROCMFORGE_API rf_device_info rf_device_get_info(const rf_device *d) {
    rf_device_info info = {0};
    if (!d) return info;
    if (d->api->device_info(d->dev, &info, NULL) != RF_OK) info.lost = 1;
    if (d->note[0]) memcpy(info.note, d->note, sizeof info.note);
    return info;
}

/* ---- models ---- */

static rf_result rfi_model_store(rf_model *m, const rf_model_desc *desc, rf_error *err) {
    rf_device *d = m->device;
    rf_plan plan;
    rf_result r = rfi_plan_build(m->g, &m->config, &plan, err);
    if (r != RF_OK) return r;
    for (uint32_t i = 0; r == RF_OK && i < plan.n_ops; i++)
        r = d->api->op_supported(d->dev, &plan, &plan.ops[i], err);
    if (r == RF_OK) r = rfi_device_get_store(d, m->g, &plan, desc, m, &m->store, err);
    else rfi_plan_free(rfi_gguf_allocator(m->g), &plan);
    if (r == RF_OK) m->plan = m->store->plan;
    return r;
}

static rf_result rfi_model_build(rf_model *m, const rf_model_desc *desc, rf_error *err) {
    if (desc->load_policy > RF_LOAD_CRITICAL_FIRST || desc->stream_policy > RF_STREAM_LRU ||
        desc->expert_policy > RF_EXPERTS_STATIC)
        return rfi_fail(err, RF_ERR_ARGUMENT, 0,
                        "rf_model_open: load_policy %u, stream_policy %u or expert_policy %u is not known",
                        desc->load_policy, desc->stream_policy, desc->expert_policy);
    rfi_key_reader k = {.g = m->g, .err = err};
    k.result = rfi_config_read(m->g, &m->config, err);
    rfi_key_text(&k, "general.name", &m->name);
    rf_result r = k.result;
    if (r == RF_OK && desc->pre_tokenizer) {
        m->pre_tokenizer = rfi_copy_text(rfi_gguf_allocator(m->g), desc->pre_tokenizer, "a name", err);
        if (!m->pre_tokenizer) r = RF_ERR_MEMORY;
    }
    return r == RF_OK ? rfi_model_store(m, desc, err) : r;
}

static void rfi_model_free(rf_model *m) {
    const rf_allocator *alloc = rfi_gguf_allocator(m->g);
    if (m->store) rfi_device_put_store(m->store, m);
    rfi_free(alloc, m->config.layers);
    rfi_free(alloc, m->pre_tokenizer);
    rfi_free(alloc, m);
}

ROCMFORGE_API rf_result rf_model_open(rf_gguf *g, rf_device *d, const rf_model_desc *desc, rf_model **out,
                                      rf_error *err) {
    rfi_clear(err);
    if (out) *out = NULL;
    if (!g || !d || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_open: file, device or out is NULL");
    rf_model *m = (rf_model *)rfi_alloc(rfi_gguf_allocator(g), 1, sizeof *m, "a model", err);
    if (!m) return RF_ERR_MEMORY;
    m->g = g;
    m->device = d;
    m->log = g->log;
    static const rf_model_desc defaults = {0};
    rf_result r = rfi_model_build(m, desc ? desc : &defaults, err);
    if (r != RF_OK) {
        rfi_model_free(m);
        return r;
    }
    rfi_gguf_hold(g);
    atomic_fetch_add(&d->n_held, 1);
    *out = m;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_model_close(rf_model *m, rf_error *err) {
    rfi_clear(err);
    if (!m) return RF_OK;
    uint32_t n = atomic_load(&m->n_sessions);
    if (n) return rfi_fail(err, RF_ERR_BUSY, 0, "model %s: %u sessions are open", rfi_gguf_path(m->g), n);
    rf_gguf *g = m->g;
    rf_device *d = m->device;
    rf_result r = rf_tokenizer_close(m->tokenizer, err);
    if (r != RF_OK) return r; /* a scheduler on another model's session uses it */
    rfi_model_free(m);
    rfi_gguf_drop(g);
    atomic_fetch_sub(&d->n_held, 1);
    return RF_OK;
}

ROCMFORGE_API rf_model_info rf_model_get_info(const rf_model *m) {
    if (!m) return (rf_model_info){0};
    const rfi_config *c = &m->config;
    rf_model_info info = {.arch = c->arch->name, .name = m->name, .n_layers = c->n_layers, .n_embd = c->n_embd,
                          .n_vocab = c->n_vocab, .n_heads = c->layers[0].n_heads,
                          .n_kv_heads = c->layers[0].n_kv_heads, .head_dim = c->head_dim,
                          .n_ctx_train = c->n_ctx_train, .n_tensors = m->plan.n_weights,
                          .weight_bytes = m->store->total_bytes};
    for (uint32_t i = 0; i < m->plan.n_weights; i++) {
        const rf_plan_weight *w = &m->plan.weights[i];
        info.n_params += (uint64_t)w->n_in * w->n_rows;
        info.token_bytes += w->row_reads                           ? w->size_bytes / w->n_rows
                            : w->expert < m->config.moe.n_used || w->n_experts == 0 ? w->size_bytes
                                                                                    : 0;
    }
    return info;
}

ROCMFORGE_API const rf_plan *rf_model_get_plan(const rf_model *m) { return m ? &m->plan : NULL; }

/* Slot of a tensor by name; RF_NONE if the plan does not use it. */
static uint32_t rfi_model_slot(const rf_model *m, const char *name) {
    rf_tensor_info t;
    if (!m || !name || rf_gguf_find_tensor(m->g, name, &t, NULL) != RF_OK) return RF_NONE;
    for (uint32_t i = 0; i < m->plan.n_weights; i++)
        if (m->plan.weights[i].tensor == t.index) return i;
    return RF_NONE;
}

/* The slot after the last of a tensor's matrices, of which `slot` is the first. */
static uint32_t rfi_model_slot_end(const rf_model *m, uint32_t slot) {
    return slot + (uint32_t)rfi_max_u64(m->plan.weights[slot].n_experts, 1);
}

ROCMFORGE_API rf_result rf_model_load_tensor(rf_model *m, const char *name, rf_error *err) {
    rfi_clear(err);
    if (!m || !name) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_load_tensor: model or name is NULL");
    uint32_t slot = rfi_model_slot(m, name);
    if (slot == RF_NONE)
        return rfi_fail(err, RF_ERR_NOT_FOUND, 0, "%s: the plan uses no tensor %s", rfi_gguf_path(m->g), name);
    uint64_t cancels;
    rf_result r = rfi_store_begin(m->store, &cancels, err);
    if (r != RF_OK) return r;
    for (const uint32_t end = rfi_model_slot_end(m, slot); r == RF_OK && slot < end; slot++) {
        if (!rfi_is_resident(&m->store->tensors[slot]))
            r = rfi_fail(err, RF_ERR_MEMORY, slot, "%s is beyond the budget: rf_session_eval loads it as it is needed",
                         name);
        else r = rfi_store_load(m->store, slot, cancels, err);
    }
    rfi_store_end(m->store);
    return r;
}

ROCMFORGE_API int rf_model_is_tensor_loaded(const rf_model *m, const char *name) {
    uint32_t slot = rfi_model_slot(m, name);
    if (slot == RF_NONE) return 0;
    for (const uint32_t end = rfi_model_slot_end(m, slot); slot < end; slot++)
        if (!rfi_cell_is_ready(&m->store->tensors[slot].cell)) return 0;
    return 1;
}

ROCMFORGE_API int rf_model_is_layer_loaded(const rf_model *m, uint32_t layer) {
    if (!m || layer >= m->config.n_layers) return 0;
    for (uint32_t i = 0; i < m->plan.n_weights; i++)
        if (m->plan.weights[i].layer == (int32_t)layer && !rfi_cell_is_ready(&m->store->tensors[i].cell)) return 0;
    return 1;
}

ROCMFORGE_API rf_result rf_model_preload_layers(rf_model *m, const uint32_t *layers, uint32_t n_layers, rf_error *err) {
    rfi_clear(err);
    if (!m || (!layers && n_layers))
        return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_preload_layers: model or layers is NULL");
    for (uint32_t i = 0; i < n_layers; i++)
        if (layers[i] >= m->config.n_layers)
            return rfi_fail(err, RF_ERR_ARGUMENT, layers[i],
                            "rf_model_preload_layers: layer %u, the model has %u", layers[i], m->config.n_layers);
    return rfi_store_preload(m->store, layers ? layers : &n_layers, n_layers, err); /* NULL would be all */
}

ROCMFORGE_API rf_result rf_model_preload_all(rf_model *m, rf_error *err) {
    rfi_clear(err);
    if (!m) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_preload_all: model is NULL");
    return rfi_store_preload(m->store, NULL, 0, err);
}

ROCMFORGE_API void rf_model_cancel_loading(rf_model *m) {
    if (m) rfi_store_cancel(m->store);
}

ROCMFORGE_API rf_loading_stats rf_model_get_loading_stats(const rf_model *m) {
    rf_loading_stats st = {0};
    if (m) rfi_store_get_stats(m->store, &st);
    return st;
}

ROCMFORGE_API rf_expert_stats rf_model_get_expert_stats(const rf_model *m, uint32_t layer) {
    rf_expert_stats st = {0};
    if (m) rfi_cache_get_stats(m->store, layer, &st);
    return st;
}

ROCMFORGE_API rf_result rf_model_clear_device_cache(rf_model *m, uint32_t *left, rf_error *err) {
    rfi_clear(err);
    if (!m) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_clear_device_cache: model is NULL");
    const uint32_t n = rfi_store_clear_unused(m->store);
    if (left) *left = n;
    return RF_OK;
}

ROCMFORGE_API rf_result rf_model_clear_gpu_cache(rf_model *m, uint32_t *left, rf_error *err) {
    return rf_model_clear_device_cache(m, left, err);
}

static rf_result rfi_model_tokenizer_load(void *ctx, rf_error *err) {
    rf_model *m = (rf_model *)ctx;
    return rf_tokenizer_open(m->g, m->pre_tokenizer, &m->tokenizer, err);
}

ROCMFORGE_API rf_result rf_model_get_tokenizer(rf_model *m, const rf_tokenizer **out, rf_error *err) {
    rfi_clear(err);
    if (out) *out = NULL;
    if (!m || !out) return rfi_fail(err, RF_ERR_ARGUMENT, 0, "rf_model_get_tokenizer: model or out is NULL");
    rf_result r = rfi_cell_acquire(&m->tokenizer_cell, &m->store->cell_monitor, rfi_model_tokenizer_load, m, NULL, err);
    if (r != RF_OK) return r;
    rfi_cell_unpin(&m->tokenizer_cell, &m->store->cell_monitor); /* it is never evicted */
    *out = m->tokenizer;
    return RF_OK;
}

/* Changes
 *   0.3.0  Samplers: rf_sampler_desc.logits_fn and logprobs; XTC, DRY (rf_dry_breakers_find), mirostat; histories.
 *            rf_sampler.n_history -> n_accepted, 64 bits.
 *   0.2.0  Renames and one rule for each kind of call; old -> new:
 *            rf_eval, rf_forward                 -> rf_session_eval, rf_session_forward
 *            rf_row                              -> rf_token_row
 *            rf_session_logits, _get_error       -> rf_session_get_logits, which returns an rf_result
 *            rf_session_argmax                   -> rf_session_get_argmax, likewise
 *            rf_model_clear_gpu_cache            -> rf_model_clear_device_cache; the old name works, too
 *            rf_session_desc.full_cache          -> swa_full; the command's --full-cache -> --swa-full
 *            rf_decode_way, rf_session_stats.way -> rf_launch_config, .config; section 2
 *          Every close returns an rf_result, takes an rf_error, and is RF_ERR_BUSY while the object is in use:
 *            rf_session_close(s) -> rf_session_close(s, NULL); likewise tokenizers and schedulers.
 *          The last parameter is an rf_error, NULL if it is not wanted: rf_gguf_get_kv, rf_gguf_find_kv, rf_kv_int,
 *            rf_kv_real, rf_kv_text, rf_gguf_get_tensor, rf_gguf_find_tensor.
 *          A buffer that is too small: RF_ERR_ARGUMENT -> RF_ERR_CAPACITY.
 *          Texts come as rf_string (rf_string_of): rf_tokenize(t, text, n, ...) -> (t, text, ...), rf_chat_final.
 *          rf_detokenize(t, &state, ...) -> (&state, ...); the state names the tokenizer.
 *          The command's --max-tokens 0: no tokens -> no limit but the context, as rf_request.max_tokens.
 *   0.1.0  The first version.
 *
 * MIT License. Copyright (c) 2026 the rocmforge authors.
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
 * documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
 * rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
 * permit persons to whom the Software is furnished to do so, subject to the following conditions:
 *
 * The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
 * Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
 * WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
 * COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
 * OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
#endif /* a machine and a language that are supported */
#endif /* ROCMFORGE_IMPLEMENTATION */
