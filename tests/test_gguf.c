/* test_gguf.c: the GGUF reader (section 5) against files made by make_gguf.h, which shares no code with it: what is
 * read is what was written; every malformed file is refused with a message that names the place; memory, allocation
 * failures, I/O failures, split files, special files. The corpus of bad files is test_corpus.c's. */
#define _GNU_SOURCE /* nftw */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include "rf_test.h"
#include "rf_memory.h"
#include "make_gguf.h"
#include <ftw.h>

static char tmp_dir[256];

static const char *tmp_path(const char *name) {
    static char path[4][512];
    static unsigned next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", tmp_dir, name);
    return p;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *at) {
    RFI_UNUSED(st), RFI_UNUSED(type), RFI_UNUSED(at);
    return remove(path);
}

/* ---- files that count and fail ---- */

typedef struct shaky {
    uint64_t calls, fail_at;
    int forever;
    int error;         /* negative errno of the failing call        */
    int eintr;         /* every second read is interrupted          */
    size_t chunk;      /* reads return at most this; 0 = any        */
    int64_t lie;       /* a failing read returns this if not 0      */
    int handles, maps; /* open now                                  */
} shaky;

static int shaky_fails(shaky *s) {
    s->calls++;
    return s->fail_at && (s->calls == s->fail_at || (s->forever && s->calls > s->fail_at));
}
static int64_t shaky_open(const char *path, uint64_t *size, void *user) {
    shaky *s = (shaky *)user;
    if (shaky_fails(s)) return s->error;
    int64_t h = rfi_os_open(path, size, NULL);
    if (h >= 0) s->handles++;
    return h;
}
static int64_t shaky_read(int64_t h, uint64_t offset, void *dst, size_t n, void *user) {
    shaky *s = (shaky *)user;
    if (shaky_fails(s)) return s->lie == 1 ? (int64_t)n + 1 : s->lie == 2 ? 0 : s->error;
    if (s->eintr && s->calls % 2) return -EINTR;
    return rfi_os_read(h, offset, dst, s->chunk && n > s->chunk ? s->chunk : n, NULL);
}
static void *shaky_map(int64_t h, uint64_t size, void *user) {
    shaky *s = (shaky *)user;
    if (shaky_fails(s)) return NULL;
    s->maps++;
    return rfi_os_map(h, size, NULL);
}
static void shaky_unmap(void *base, uint64_t size, void *user) {
    ((shaky *)user)->maps--;
    rfi_os_unmap(base, size, NULL);
}
static void shaky_close(int64_t h, void *user) {
    ((shaky *)user)->handles--;
    rfi_os_close(h, NULL);
}
static rf_io shaky_io(shaky *s) {
    rf_io io = {shaky_open, shaky_read, shaky_map, shaky_unmap, shaky_close, s};
    return io;
}

/* ---- files ---- */

/* Every value type, alone and as an array; four tensors, the last of which ends the file without padding. */
static void small_file(mg_buf *out, uint32_t version) {
    static const char *const texts[] = {"", "a", "h\xc3\xa9llo"};
    const uint8_t u8[] = {0, 255}, bools[] = {0, 1, 1};
    const int8_t i8[] = {-128, 127};
    const uint16_t u16[] = {0, 65535};
    const int16_t i16[] = {-32768, 32767};
    const uint32_t u32[] = {0, 4294967295u};
    const int32_t i32[] = {INT32_MIN, INT32_MAX, 7};
    const uint64_t u64[] = {0, UINT64_MAX, INT64_MAX};
    const int64_t i64[] = {INT64_MIN, INT64_MAX};
    const float f32[] = {-1.5f, 3e38f};
    const double f64[] = {-1e300, 0.1};
    mg_gguf w;
    mg_begin(&w, version);
    mg_kv_str(&w, "general.architecture", "none");
    mg_kv_u8(&w, "u8", 200), mg_kv_arr(&w, "u8s", MG_KV_U8, u8, 2, sizeof u8);
    mg_kv_i8(&w, "i8", -100), mg_kv_arr(&w, "i8s", MG_KV_I8, i8, 2, sizeof i8);
    mg_kv_u16(&w, "u16", 50000), mg_kv_arr(&w, "u16s", MG_KV_U16, u16, 2, sizeof u16);
    mg_kv_i16(&w, "i16", -30000), mg_kv_arr(&w, "i16s", MG_KV_I16, i16, 2, sizeof i16);
    mg_kv_u32(&w, "u32", 4000000000u), mg_kv_arr_u32(&w, "u32s", u32, 2);
    mg_kv_i32(&w, "i32", -2000000000), mg_kv_arr_i32(&w, "i32s", i32, 3);
    mg_kv_f32(&w, "f32", 0.25f), mg_kv_arr_f32(&w, "f32s", f32, 2);
    mg_kv_bool(&w, "bool", 1), mg_kv_arr(&w, "bools", MG_KV_BOOL, bools, 3, 3);
    mg_kv_str(&w, "str", "text"), mg_kv_arr_str(&w, "strs", texts, 3);
    mg_kv_u64(&w, "u64", 1ull << 40), mg_kv_arr(&w, "u64s", MG_KV_U64, u64, 3, sizeof u64);
    mg_kv_i64(&w, "i64", -(1ll << 40)), mg_kv_arr(&w, "i64s", MG_KV_I64, i64, 2, sizeof i64);
    mg_kv_f64(&w, "f64", 1e-300), mg_kv_arr(&w, "f64s", MG_KV_F64, f64, 2, sizeof f64);
    mg_kv_str(&w, "empty", ""), mg_kv_arr(&w, "nothing", MG_KV_U64, NULL, 0, 0);
    mg_kv_arr_str(&w, "no_text", NULL, 0);
    unsigned char bytes[272];
    for (unsigned i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i * 7 + 1);
    mg_tensor(&w, "aa", MG_F32, 2, (uint64_t[]){5, 3}, bytes, 60);
    mg_tensor(&w, "b.weight", MG_Q8_0, 3, (uint64_t[]){64, 2, 2}, bytes, 272);
    mg_tensor(&w, "cc", MG_F16, 4, (uint64_t[]){1, 2, 3, 4}, bytes + 9, 48);
    mg_tensor(&w, "d", MG_F32, 1, (uint64_t[]){8}, bytes + 100, 32);
    mg_finish(&w, out);
}

static rf_result open_buf(const mg_buf *b, rf_gguf **g, rf_error *err) {
    return rf_gguf_open_memory(b->data, b->n, NULL, g, err);
}

/* Reads everything that the accessors can reach, to let the sanitizers look. Returns a sum so that nothing is
 * optimised out. */
static uint64_t touch_all(const rf_gguf *g) {
    uint64_t sum = 0;
    rf_gguf_info info = rf_gguf_get_info(g);
    for (uint64_t i = 0; i < info.n_kv; i++) {
        rf_kv kv, same;
        char key[256];
        CHECK(rf_gguf_get_kv(g, i, &kv, NULL) == RF_OK, "kv %llu", RFI_LLU(i));
        uint64_t cursor = 0;
        for (uint64_t k = 0; k < kv.count && k < 1000; k++) {
            int64_t v = 0;
            double r = 0;
            rf_string s = {0};
            if (rf_kv_int(&kv, k, &v, NULL) == RF_OK) sum += (uint64_t)v;
            if (rf_kv_real(&kv, k, &r, NULL) == RF_OK) sum += r > 0;
            if (rf_kv_text(&kv, &cursor, &s, NULL) == RF_OK) sum += s.len ? (unsigned char)s.data[s.len - 1] : 1;
        }
        if (kv.key.len >= sizeof key) continue;
        snprintf(key, sizeof key, "%.*s", (int)kv.key.len, kv.key.data);
        CHECK(rf_gguf_find_kv(g, key, &same, NULL) == RF_OK && same.data == kv.data, "find %s", key);
    }
    for (uint64_t i = 0; i < info.n_tensors; i++) {
        rf_tensor_info t, same;
        unsigned char bytes[64];
        char name[80];
        CHECK(rf_gguf_get_tensor(g, i, &t, NULL) == RF_OK && t.index == i, "tensor %llu", RFI_LLU(i));
        snprintf(name, sizeof name, "%.*s", (int)t.name.len, t.name.data);
        CHECK(rf_gguf_find_tensor(g, name, &same, NULL) == RF_OK && same.index == i, "find %s", name);
        size_t n = t.size_bytes < sizeof bytes ? (size_t)t.size_bytes : sizeof bytes;
        CHECK(rf_gguf_read_tensor(g, i, t.size_bytes - n, bytes, n, NULL) == RF_OK, "read %s", name);
        for (size_t k = 0; k < n; k++) sum += bytes[k];
        const unsigned char *map = (const unsigned char *)rfi_gguf_map(g, &t);
        if (map) CHECK(memcmp(map + (t.size_bytes - n), bytes, n) == 0, "mapped bytes of %s", name);
    }
    return sum;
}

/* ---- tests ---- */

static void check_int(const rf_gguf *g, const char *key, uint64_t i, int64_t want) {
    rf_kv kv;
    int64_t v = 0;
    double r = 0;
    CHECK(rf_gguf_find_kv(g, key, &kv, NULL) == RF_OK, "%s", key);
    CHECK(rf_kv_int(&kv, i, &v, NULL) == RF_OK && v == want, "%s[%llu] is %lld", key, RFI_LLU(i), (long long)v);
    if (kv.element_type != RF_KV_BOOL)
        CHECK(rf_kv_real(&kv, i, &r, NULL) == RF_OK && r == (double)want, "%s[%llu] is %g", key, RFI_LLU(i), r);
    CHECK(rf_kv_int(&kv, kv.count, &v, NULL) == RF_ERR_ARGUMENT, "%s has no such element", key);
}

static void check_real(const rf_gguf *g, const char *key, uint64_t i, double want) {
    rf_kv kv;
    int64_t v = 0;
    double r = 0;
    CHECK(rf_gguf_find_kv(g, key, &kv, NULL) == RF_OK, "%s", key);
    CHECK(rf_kv_real(&kv, i, &r, NULL) == RF_OK && r == want, "%s[%llu] is %g", key, RFI_LLU(i), r);
    CHECK(rf_kv_int(&kv, i, &v, NULL) == RF_ERR_ARGUMENT, "%s is no integer", key);
}

static void check_small(const rf_gguf *g, const mg_buf *file, uint32_t version) {
    rf_gguf_info info = rf_gguf_get_info(g);
    CHECK(info.version == version && info.n_files == 1 && info.alignment == 32, "%u %u %u", info.version,
          info.n_files, info.alignment);
    CHECK(info.n_kv == 28 && info.n_tensors == 4, "%llu %llu", RFI_LLU(info.n_kv), RFI_LLU(info.n_tensors));
    CHECK(info.file_bytes == file->n && info.data_bytes == 60 + 272 + 48 + 32, "%llu", RFI_LLU(info.data_bytes));
    /* the directory ends with d's row: name, n_dims, one dimension, type, offset */
    CHECK(info.metadata_bytes == mg_find(file, "d", 0) + 8 + 1 + 4 + 8 + 4 + 8, "%llu", RFI_LLU(info.metadata_bytes));
    check_int(g, "u8", 0, 200), check_int(g, "u8s", 0, 0), check_int(g, "u8s", 1, 255);
    check_int(g, "i8", 0, -100), check_int(g, "i8s", 0, -128), check_int(g, "i8s", 1, 127);
    check_int(g, "u16", 0, 50000), check_int(g, "u16s", 1, 65535);
    check_int(g, "i16", 0, -30000), check_int(g, "i16s", 0, -32768), check_int(g, "i16s", 1, 32767);
    check_int(g, "u32", 0, 4000000000), check_int(g, "u32s", 1, 4294967295);
    check_int(g, "i32", 0, -2000000000), check_int(g, "i32s", 0, INT32_MIN), check_int(g, "i32s", 2, 7);
    check_int(g, "bool", 0, 1), check_int(g, "bools", 0, 0), check_int(g, "bools", 2, 1);
    check_int(g, "u64", 0, 1ll << 40), check_int(g, "u64s", 2, INT64_MAX);
    check_int(g, "i64", 0, -(1ll << 40)), check_int(g, "i64s", 0, INT64_MIN), check_int(g, "i64s", 1, INT64_MAX);
    check_real(g, "f32", 0, 0.25), check_real(g, "f32s", 1, (double)3e38f);
    check_real(g, "f64", 0, 1e-300), check_real(g, "f64s", 1, 0.1);

    rf_kv kv;
    rf_string s;
    int64_t v;
    double r;
    CHECK(rf_gguf_find_kv(g, "u64s", &kv, NULL) == RF_OK && rf_kv_int(&kv, 1, &v, NULL) == RF_ERR_ARGUMENT,
          "2^64-1 does not fit");
    CHECK(rf_kv_real(&kv, 1, &r, NULL) == RF_OK && r == 18446744073709551615.0, "but is a real");
    CHECK(rf_gguf_find_kv(g, "bool", &kv, NULL) == RF_OK && rf_kv_real(&kv, 0, &r, NULL) == RF_ERR_ARGUMENT,
          "a bool is no number");
    CHECK(rf_kv_text(&kv, NULL, &s, NULL) == RF_ERR_ARGUMENT, "nor a text");
    CHECK(rf_gguf_find_kv(g, "str", &kv, NULL) == RF_OK && rf_kv_text(&kv, NULL, &s, NULL) == RF_OK && rfi_str_equal(s, "text"),
          " ");
    CHECK(rf_kv_int(&kv, 0, &v, NULL) == RF_ERR_ARGUMENT, "a text is no integer");
    CHECK(rf_gguf_find_kv(g, "empty", &kv, NULL) == RF_OK && rf_kv_text(&kv, NULL, &s, NULL) == RF_OK && s.len == 0, "empty");
    CHECK(rf_gguf_find_kv(g, "nothing", &kv, NULL) == RF_OK && kv.count == 0 && kv.type == RF_KV_ARRAY &&
              kv.element_type == RF_KV_U64,
          "empty array");
    CHECK(rf_gguf_find_kv(g, "strs", &kv, NULL) == RF_OK && kv.count == 3, "strs");
    CHECK(rf_kv_text(&kv, NULL, &s, NULL) == RF_ERR_ARGUMENT, "an array needs a cursor");
    uint64_t cursor = 0;
    CHECK(rf_kv_text(&kv, &cursor, &s, NULL) == RF_OK && s.len == 0, "strs[0]");
    CHECK(rf_kv_text(&kv, &cursor, &s, NULL) == RF_OK && rfi_str_equal(s, "a"), "strs[1]");
    CHECK(rf_kv_text(&kv, &cursor, &s, NULL) == RF_OK && rfi_str_equal(s, "h\xc3\xa9llo"), "strs[2]");
    CHECK(rf_kv_text(&kv, &cursor, &s, NULL) == RF_ERR_ARGUMENT, "the end");
    cursor = 3; /* inside a length field: garbage, but never outside the value */
    if (rf_kv_text(&kv, &cursor, &s, NULL) == RF_OK) CHECK(cursor <= kv.size_bytes, "cursor %llu", RFI_LLU(cursor));
    cursor = UINT64_MAX;
    CHECK(rf_kv_text(&kv, &cursor, &s, NULL) == RF_ERR_ARGUMENT, "a wild cursor");
    memset(&kv, 1, sizeof kv);
    CHECK(rf_gguf_find_kv(g, "absent", &kv, NULL) == RF_ERR_NOT_FOUND && kv.data == NULL && kv.count == 0, "zeroed");
    /* what went wrong is said, and nothing after a call that went right */
    rf_error err;
    rf_tensor_info t;
    CHECK(rf_gguf_find_kv(g, "absent", &kv, &err) == RF_ERR_NOT_FOUND && err.code == RF_ERR_NOT_FOUND && strstr(err.text, "key 'absent'"), "%s", err.text);
    CHECK(rf_gguf_get_kv(g, 99, &kv, &err) == RF_ERR_NOT_FOUND && err.where == 99 && strstr(err.text, "key 99"), "%s", err.text);
    CHECK(rf_gguf_find_tensor(g, "absent", &t, &err) == RF_ERR_NOT_FOUND && strstr(err.text, "tensor 'absent'"), "%s", err.text);
    CHECK(rf_gguf_get_tensor(g, 99, NULL, &err) == RF_ERR_ARGUMENT && err.code == RF_ERR_ARGUMENT && strstr(err.text, "out"), "%s", err.text);
    CHECK(rf_gguf_find_kv(g, "str", &kv, &err) == RF_OK && err.code == RF_OK && !err.text[0], "%s", err.text);
    CHECK(rf_kv_int(&kv, 0, &v, &err) == RF_ERR_ARGUMENT && err.where == kv.where && strstr(err.text, "str: element 0 of 1: want an integer"), "%s", err.text);
    CHECK(rf_kv_real(&kv, 0, &r, &err) == RF_ERR_ARGUMENT && strstr(err.text, "want a number"), "%s", err.text);
    CHECK(rf_kv_text(NULL, NULL, &s, &err) == RF_ERR_ARGUMENT && strstr(err.text, "NULL"), "%s", err.text);
    CHECK(rf_gguf_find_kv(g, "strs", &kv, &err) == RF_OK && rf_kv_text(&kv, NULL, &s, &err) == RF_ERR_ARGUMENT && strstr(err.text, "cursor"), "%s", err.text);
    cursor = 1;
    CHECK(rf_kv_text(&kv, &cursor, &s, &err) == RF_ERR_ARGUMENT && strstr(err.text, "byte 1"), "%s", err.text);
    CHECK(rf_gguf_get_kv(g, 28, &kv, NULL) == RF_ERR_NOT_FOUND, "28 keys");
    CHECK(rf_gguf_get_kv(g, 1, &kv, NULL) == RF_OK && rfi_str_equal(kv.key, "u8"), "in the order of the file");
    CHECK(kv.where == mg_find(file, "u8", 0) + 8 + 2 + 4, "where %llu", RFI_LLU(kv.where));

    unsigned char bytes[272];
    CHECK(rf_gguf_find_tensor(g, "b.weight", &t, NULL) == RF_OK && t.index == 1 && t.type == RF_TYPE_Q8_0, "b.weight");
    CHECK(t.n_dims == 3 && t.ne[0] == 64 && t.ne[1] == 2 && t.ne[2] == 2 && t.ne[3] == 1, "ne");
    CHECK(t.size_bytes == 272 && t.where == mg_find(file, "b.weight", 0) && t.file_index == 0, "size, where");
    CHECK(rf_gguf_read_tensor(g, 1, 0, bytes, 272, NULL) == RF_OK && bytes[0] == 1 &&
              bytes[271] == (unsigned char)(271 * 7 + 1),
          "its bytes");
    CHECK(rf_gguf_read_tensor(g, 1, 200, bytes, 72, NULL) == RF_OK && bytes[0] == (unsigned char)(200 * 7 + 1),
          "a piece");
    CHECK(rf_gguf_read_tensor(g, 1, 272, NULL, 0, NULL) == RF_OK, "nothing, at the end");
    CHECK(rf_gguf_read_tensor(g, 1, 273, bytes, 0, NULL) == RF_ERR_ARGUMENT, "past the end");
    CHECK(rf_gguf_read_tensor(g, 1, 200, bytes, 73, NULL) == RF_ERR_ARGUMENT, "one byte too many");
    CHECK(rf_gguf_read_tensor(g, 1, 1, bytes, SIZE_MAX, NULL) == RF_ERR_ARGUMENT, "wraps");
    CHECK(rf_gguf_read_tensor(g, 1, 0, NULL, 1, NULL) == RF_ERR_ARGUMENT, "no dst");
    CHECK(rf_gguf_read_tensor(g, 4, 0, bytes, 1, NULL) == RF_ERR_ARGUMENT, "no such tensor");
    CHECK(rf_gguf_read_tensor(NULL, 0, 0, bytes, 1, &err) == RF_ERR_ARGUMENT && strstr(err.text, "file is NULL"), "%s", err.text);
    CHECK(rf_gguf_get_tensor(g, 2, &t, NULL) == RF_OK && rfi_str_equal(t.name, "cc") && t.ne[3] == 4 && t.size_bytes == 48,
          "c");
    CHECK(rf_gguf_get_tensor(g, 4, &t, NULL) == RF_ERR_NOT_FOUND && t.name.data == NULL, "4 tensors");
    CHECK(rf_gguf_find_tensor(g, "", &t, NULL) == RF_ERR_NOT_FOUND && rf_gguf_find_tensor(g, NULL, &t, NULL) == RF_ERR_NOT_FOUND,
          " ");
    touch_all(g);
}

static void test_round_trip(void) {
    for (uint32_t version = 2; version <= 3; version++) {
        mg_buf b = {0};
        rf_gguf *g;
        rf_error err;
        const char *path = tmp_path("small.gguf");
        small_file(&b, version);
        REQUIRE(mg_write_file(&b, path), "write");
        REQUIRE(open_buf(&b, &g, &err) == RF_OK, "%s", err.text);
        CHECK(strcmp(rf_gguf_get_info(g).path, "(memory)") == 0 && rf_gguf_get_info(g).mapped == 1, " ");
        check_small(g, &b, version);
        CHECK(rf_gguf_close(g, &err) == RF_OK, "%s", err.text);
        for (uint32_t no_map = 0; no_map < 2; no_map++) {
            rf_gguf_desc desc = {.no_map = no_map};
            REQUIRE(rf_gguf_open(path, &desc, &g, &err) == RF_OK, "%s", err.text);
            CHECK(strcmp(rf_gguf_get_info(g).path, path) == 0, "path");
            CHECK(rf_gguf_get_info(g).mapped == !no_map, "mapped");
            rf_tensor_info t;
            CHECK(rf_gguf_get_tensor(g, 0, &t, NULL) == RF_OK && (rfi_gguf_map(g, &t) != NULL) == !no_map, "map");
            CHECK(rfi_gguf_populate(g, &t, 0, t.size_bytes, &err) == RF_OK, "%s", err.text);
            rfi_gguf_release_pages(g, &t);
            check_small(g, &b, version);
            CHECK(rf_gguf_close(g, &err) == RF_OK, "%s", err.text);
        }
        mg_free(&b);
    }
}

static void test_models(void) {
    static const uint32_t types[] = {MG_F32,  MG_F16,  MG_BF16, MG_Q4_0, MG_Q4_1, MG_Q5_0,
                                     MG_Q5_1, MG_Q8_0, MG_Q4_K, MG_Q5_K, MG_Q6_K};
    for (size_t i = 0; i < RFI_COUNT(types); i++) {
        mg_options o = {.type = types[i],
                        .bpe = (int)(i & 1),
                        .arch = i % 3 == 0   ? "llama"
                                : i % 3 == 1 ? "qwen2"
                                             : "qwen3",
                        .rope_freqs = 1,
                        .alignment = i % 2 ? 64 : 0};
        mg_buf b = {0};
        rf_gguf *g;
        rf_error err;
        rf_tensor_info t;
        mg_llama(&b, &o);
        REQUIRE(open_buf(&b, &g, &err) == RF_OK, "type %u: %s", types[i], err.text);
        CHECK(rf_gguf_find_tensor(g, "blk.1.ffn_down.weight", &t, NULL) == RF_OK && t.type == types[i] && t.n_dims == 2,
              "type");
        CHECK(rf_gguf_get_info(g).alignment == (i % 2 ? 64 : 32), "alignment");
        touch_all(g);
        CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
        mg_free(&b);
    }
}

static void test_arguments(void) {
    mg_buf b = {0};
    rf_gguf *g = (rf_gguf *)&b;
    rf_error err;
    rf_kv kv;
    small_file(&b, 3);
    CHECK(rf_gguf_open(NULL, NULL, &g, &err) == RF_ERR_ARGUMENT && g == NULL && err.code == RF_ERR_ARGUMENT, "path");
    CHECK(rf_gguf_open("x", NULL, NULL, &err) == RF_ERR_ARGUMENT, "out");
    CHECK(rf_gguf_open_memory(NULL, 8, NULL, &g, &err) == RF_ERR_ARGUMENT, "data");
    CHECK(rf_gguf_open_memory(b.data, b.n, NULL, NULL, NULL) == RF_ERR_ARGUMENT, "out");
    rf_gguf_desc desc = {.allocator = {.alloc_fn = memory_alloc}};
    CHECK(rf_gguf_open_memory(b.data, b.n, &desc, &g, &err) == RF_ERR_ARGUMENT && g == NULL, "half an allocator");
    shaky s = {0};
    for (int i = 0; i < 5; i++) {
        rf_gguf_desc d = {.io = shaky_io(&s)};
        if (i == 0) d.io.open_fn = NULL;
        if (i == 1) d.io.read_fn = NULL;
        if (i == 2) d.io.close_fn = NULL;
        if (i == 3) d.io.map_fn = NULL;
        if (i == 4) d.io.open_fn = NULL, d.io.read_fn = NULL, d.io.close_fn = NULL;
        CHECK(rf_gguf_open("x", &d, &g, &err) == RF_ERR_ARGUMENT && strstr(err.text, "io:"), "%d: %s", i, err.text);
    }
    CHECK(rf_gguf_close(NULL, &err) == RF_OK && err.code == RF_OK, "NULL is fine");
    CHECK(rf_gguf_get_info(NULL).n_kv == 0, "NULL has nothing");
    CHECK(rf_gguf_get_kv(NULL, 0, &kv, NULL) == RF_ERR_NOT_FOUND && rf_gguf_find_kv(NULL, "a", &kv, NULL) == RF_ERR_NOT_FOUND,
          "NULL");
    REQUIRE(open_buf(&b, &g, NULL) == RF_OK, "err may be NULL");
    CHECK(rf_gguf_get_kv(g, 0, NULL, NULL) == RF_ERR_ARGUMENT && rf_gguf_get_tensor(g, 0, NULL, NULL) == RF_ERR_ARGUMENT, "out");
    rf_gguf_close(g, NULL);
    b.data[0] = 'g';
    CHECK(open_buf(&b, &g, NULL) == RF_ERR_FORMAT && g == NULL, "without an err to fill");
    mg_free(&b);
}

static void test_close_busy(void) {
    mg_buf b = {0};
    rf_gguf *g;
    rf_error err;
    small_file(&b, 3);
    REQUIRE(open_buf(&b, &g, &err) == RF_OK, "%s", err.text);
    rfi_gguf_hold(g);
    rfi_gguf_hold(g);
    CHECK(rf_gguf_close(g, &err) == RF_ERR_BUSY && err.code == RF_ERR_BUSY, "%s", err.text);
    rfi_gguf_drop(g);
    CHECK(rf_gguf_close(g, NULL) == RF_ERR_BUSY, "still one");
    touch_all(g);
    rfi_gguf_drop(g);
    CHECK(rf_gguf_close(g, &err) == RF_OK, "%s", err.text);
    mg_free(&b);
}

/* A message fit to be shown: printable ASCII, "byte N", where = N. */
static void check_message(const rf_error *err, rf_result rc, const char *what) {
    char at[40];
    CHECK(err->code == rc, "%s: code %d, returned %d", what, err->code, rc);
    snprintf(at, sizeof at, "byte %llu", RFI_LLU(err->where));
    CHECK(strstr(err->text, at) != NULL, "%s: no '%s' in: %s", what, at, err->text);
    for (const char *p = err->text; *p; p++) CHECK(*p >= 0x20 && *p < 0x7f, "%s: byte %d in the message", what, *p);
}

/* Truncated after every byte: refused at open, from a block of exactly that size, so that a sanitizer sees any read
 * beyond it; for some lengths also from a file. */
static void test_truncated(void) {
    mg_buf b = {0};
    rf_error err;
    rf_gguf *g;
    small_file(&b, 3);
    for (size_t n = 0; n < b.n; n++) {
        unsigned char *part = (unsigned char *)malloc(n ? n : 1);
        REQUIRE(part != NULL, "malloc");
        memcpy(part, b.data, n);
        rf_result rc = rf_gguf_open_memory(part, n, NULL, &g, &err);
        CHECK(rc == RF_ERR_FORMAT && g == NULL, "%zu bytes: %d", n, rc);
        check_message(&err, rc, "truncated");
        CHECK(err.where <= n, "%zu bytes: where is %llu", n, RFI_LLU(err.where));
        free(part);
        if (n % 37 == 0) {
            mg_buf head = {b.data, n, n};
            const char *path = tmp_path("truncated.gguf");
            char text[RF_ERROR_TEXT_BYTES];
            REQUIRE(mg_write_file(&head, path), "write");
            snprintf(text, sizeof text, "%s", strchr(err.text, ':'));
            CHECK(rf_gguf_open(path, NULL, &g, &err) == RF_ERR_FORMAT && g == NULL, "%zu bytes: %s", n, err.text);
            CHECK(strcmp(strchr(err.text, ':'), text) == 0, "memory says%s, file%s", text, strchr(err.text, ':'));
        }
    }
    REQUIRE(open_buf(&b, &g, &err) == RF_OK, "and whole it opens: %s", err.text);
    rf_gguf_close(g, NULL);
    mg_free(&b);
}

/* Random changes of the metadata: any verdict, no crash; what opens can be read through. */
static void test_mutations(void) {
    static const uint64_t odd[] = {
        0,          1,          2,           0x7f,      0x80,       0xff,       0xffff,         0x7fffffff,
        0x80000000, 0xffffffff, 0x100000000, INT64_MAX, 1ull << 63, UINT64_MAX, UINT64_MAX - 7, UINT64_MAX - 31,
        1ull << 61, 1ull << 62};
    mg_rng r = {42};
    unsigned opened = 0, total = 0;
    for (int which = 0; which < 2; which++) {
        mg_buf b = {0}, good;
        rf_gguf *g;
        rf_error err;
        mg_options o = {.type = MG_Q8_0, .n_layers = 1, .bpe = 1};
        if (which == 0) small_file(&b, 3);
        else mg_llama(&b, &o);
        good = mg_copy(&b);
        REQUIRE(open_buf(&b, &g, &err) == RF_OK, "%s", err.text);
        size_t head = (size_t)rf_gguf_get_info(g).metadata_bytes;
        rf_gguf_close(g, NULL);
        for (int i = 0; i < (which == 0 ? 16000 : 4000); i++, total++) {
            unsigned n = 1 + mg_below(&r, 3);
            for (unsigned k = 0; k < n; k++) {
                size_t at = mg_below(&r, (uint32_t)head - 8);
                uint64_t v = mg_below(&r, 2) ? odd[mg_below(&r, RFI_COUNT(odd))] : mg_next(&r) >> mg_below(&r, 64);
                static const size_t sizes[] = {1, 1, 4, 8};
                memcpy(b.data + at, &v, sizes[mg_below(&r, 4)]);
            }
            rf_result rc = open_buf(&b, &g, &err);
            if (rc == RF_OK) {
                opened++;
                touch_all(g);
                CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
            } else {
                CHECK(rc == RF_ERR_FORMAT || rc == RF_ERR_UNSUPPORTED, "%d: %s", rc, err.text);
                check_message(&err, rc, "mutated");
            }
            memcpy(b.data, good.data, head);
        }
        mg_free(&b);
        mg_free(&good);
    }
    CHECK(opened > total / 100, "only %u of %u mutations opened: the test reaches nothing after the parser", opened,
          total);
}

/* ---- the table of malformed files ---- */

typedef struct bad_file {
    const char *what;
    rf_result code;
    const char *says; /* in the message: the object */
    const char *why;  /* and what is wrong with it  */
} bad_file;

#define BAD_FILES(X)                                                                                                 \
    X(magic, FORMAT, "header", "magic is '\\x00\\xffGG'")                                                            \
    X(version_1, UNSUPPORTED, "header", "version 1")                                                                 \
    X(version_4, UNSUPPORTED, "header", "version is 4")                                                              \
    X(big_endian, UNSUPPORTED, "header", "big-endian")                                                               \
    X(n_kv, FORMAT, "header", "n_kv is 18446744073709551615")                                                        \
    X(n_kv_wraps, FORMAT, "header", "n_kv is 329406144173384851")                                                    \
    X(n_tensors, FORMAT, "header", "n_tensors is 1000000")                                                           \
    X(key_empty, FORMAT, "key 1 (after general.architecture)", "length is 0")                                        \
    X(key_long, FORMAT, "key 1 (after general.architecture)", "length is 65536")                                     \
    X(key_nul, FORMAT, "i3\\x00s", "NUL")                                                                            \
    X(key_twice, FORMAT, "i16", "twice")                                                                             \
    X(value_type, FORMAT, "u32", "value type is 13")                                                                 \
    X(element_type, FORMAT, "u32s", "element type is 99")                                                            \
    X(nested, UNSUPPORTED, "u32s", "array of arrays")                                                                \
    X(count, FORMAT, "f64s", "element count is 2305843009213693953")                                                 \
    X(bool_2, FORMAT, "bool", "bool is 2")                                                                           \
    X(bools_255, FORMAT, "bools[1]", "bool is 255")                                                                  \
    X(string, FORMAT, "str", "string length is 18446744073709551608")                                                \
    X(strings, FORMAT, "strs[1]", "string length is 9223372036854775808")                                            \
    X(name_empty, FORMAT, "tensor 1 (after aa)", "length is 0")                                                      \
    X(name_65, FORMAT, "tensor 1 (after aa)", "length is 65")                                                        \
    X(name_nul, FORMAT, "b.\\x00eight", "NUL")                                                                       \
    X(name_twice, FORMAT, "aa", "twice")                                                                             \
    X(n_dims_0, FORMAT, "b.weight", "n_dims is 0")                                                                   \
    X(n_dims_5, FORMAT, "b.weight", "n_dims is 5")                                                                   \
    X(dim_0, FORMAT, "b.weight", "dimension 1 is 0")                                                                 \
    X(dim_negative, FORMAT, "b.weight", "dimension 2 is 18446744073709551615")                                       \
    X(product, FORMAT, "b.weight", "elements")                                                                       \
    X(product_zero, FORMAT, "b.weight", "elements")                                                                  \
    X(bytes, FORMAT, "aa", "bytes")                                                                                  \
    X(row, FORMAT, "b.weight", "blocks of 32")                                                                       \
    X(type_removed, FORMAT, "aa", "tensor type is 4")                                                                \
    X(type_high, FORMAT, "aa", "tensor type is 2147483648")                                                          \
    X(offset_odd, FORMAT, "cc", "multiple of the alignment")                                                         \
    X(offset_far, FORMAT, "cc", "end past")                                                                          \
    X(offset_wraps, FORMAT, "cc", "end past")                                                                        \
    X(overlap, FORMAT, "cc", "overlaps b.weight")                                                                    \
    X(overlap_all, FORMAT, "b.weight", "overlaps aa")                                                                \
    X(last_longer, FORMAT, "d", "end past")                                                                          \
    X(alignment_0, FORMAT, "general.alignment", "value is 0")                                                        \
    X(alignment_24, FORMAT, "general.alignment", "value is 24")                                                      \
    X(alignment_2_31, FORMAT, "general.alignment", "value is 2147483648")                                            \
    X(alignment_type, FORMAT, "general.alignment", "u32")                                                            \
    X(alignment_far, FORMAT, "t", "end past")                                                                        \
    X(split_count, UNSUPPORTED, "split.count", "value is 2")                                                         \
    X(split_text, FORMAT, "split.count", "integer")                                                                  \
    X(split_no, FORMAT, "split.no", "value is 2, want 0..1")                                                         \
    X(split_no_no, FORMAT, "split.count", "no split.no")                                                             \
    X(split_tensors, FORMAT, "split.tensors.count", "value is -1")                                                   \
    X(split_many, UNSUPPORTED, "split.count", "ROCMFORGE_MAX_FILES")

enum {
#define BAD_ENUM(name, code, says, why) BAD_##name,
    BAD_FILES(BAD_ENUM) BAD_COUNT
};
static const bad_file bad_files[] = {
#define BAD_ROW(name, code, says, why) {#name, RF_ERR_##code, says, why},
    BAD_FILES(BAD_ROW)};

/* offset of the value of a key, and of the n-th field of a tensor's row: n_dims, type, offset, dimensions */
static size_t value_at(const mg_buf *b, const char *key) { return mg_find(b, key, 0) + 8 + strlen(key) + 4; }
enum { ROW_N_DIMS, ROW_TYPE, ROW_OFFSET, ROW_DIM };
static size_t row_at(const mg_buf *b, const char *name, int field, unsigned dim) {
    size_t at = mg_find(b, name, 0) + 8 + strlen(name);
    uint32_t n_dims;
    memcpy(&n_dims, b->data + at, 4);
    return field == ROW_N_DIMS ? at
                               : at + 4 + (field == ROW_DIM ? 8 * dim : 8 * n_dims + (field == ROW_OFFSET ? 4 : 0));
}

/* A file with the given extra keys and one tensor. */
static void keyed_file(mg_buf *b, int which) {
    mg_gguf w;
    mg_free(b);
    mg_begin(&w, 3);
    switch (which) {
    case BAD_alignment_0: mg_kv_u32(&w, "general.alignment", 0); break;
    case BAD_alignment_24: mg_kv_u32(&w, "general.alignment", 24); break;
    case BAD_alignment_2_31: mg_kv_u32(&w, "general.alignment", 1u << 31); break;
    case BAD_alignment_type: mg_kv_u64(&w, "general.alignment", 32); break;
    case BAD_alignment_far: mg_kv_u32(&w, "general.alignment", 1u << 20); break;
    case BAD_split_count: mg_kv_u16(&w, "split.count", 2), mg_kv_u16(&w, "split.no", 0); break;
    case BAD_split_text: mg_kv_str(&w, "split.count", "2"); break;
    case BAD_split_no: mg_kv_u16(&w, "split.count", 2), mg_kv_u16(&w, "split.no", 2); break;
    case BAD_split_no_no: mg_kv_u16(&w, "split.count", 2); break;
    case BAD_split_many: mg_kv_u16(&w, "split.count", 1001), mg_kv_u16(&w, "split.no", 0); break;
    default: mg_kv_u16(&w, "split.count", 2), mg_kv_u16(&w, "split.no", 0), mg_kv_i32(&w, "split.tensors.count", -1);
    }
    mg_tensor(&w, "t", MG_F32, 1, (uint64_t[]){4}, NULL, 16);
    mg_finish(&w, b);
}

/* Turn the small file into the which-th malformed one. */
static void spoil(mg_buf *b, int which) {
    size_t at;
    switch (which) {
    case BAD_magic: memcpy(b->data, "\0\xff" "GG", 4); break;
    case BAD_version_1: mg_set_u32(b, 4, 1); break;
    case BAD_version_4: mg_set_u32(b, 4, 4); break;
    case BAD_big_endian: mg_set_u32(b, 4, 0x03000000); break;
    case BAD_n_kv: mg_set_u64(b, 16, UINT64_MAX); break;
    case BAD_n_kv_wraps: mg_set_u64(b, 16, 329406144173384851u); break; /* x 56 wraps to 40 */
    case BAD_n_tensors: mg_set_u64(b, 8, 1000000); break;
    case BAD_key_empty: mg_set_u64(b, mg_find(b, "u8", 0), 0); break;
    case BAD_key_long: mg_set_u64(b, mg_find(b, "u8", 0), 65536); break;
    case BAD_key_nul: b->data[mg_find(b, "i32s", 0) + 8 + 2] = 0; break;
    case BAD_key_twice: memcpy(b->data + mg_find(b, "u32", 0) + 8, "i16", 3); break;
    case BAD_value_type: mg_set_u32(b, value_at(b, "u32") - 4, 13); break;
    case BAD_element_type: mg_set_u32(b, value_at(b, "u32s"), 99); break;
    case BAD_nested: mg_set_u32(b, value_at(b, "u32s"), MG_KV_ARR); break;
    case BAD_count: mg_set_u64(b, value_at(b, "f64s") + 4, (1ull << 61) + 1); break;
    case BAD_bool_2: b->data[value_at(b, "bool")] = 2; break;
    case BAD_bools_255: b->data[value_at(b, "bools") + 12 + 1] = 255; break;
    case BAD_string: mg_set_u64(b, value_at(b, "str"), UINT64_MAX - 7); break;
    case BAD_strings: mg_set_u64(b, value_at(b, "strs") + 12 + 8, 1ull << 63); break;
    case BAD_name_empty: mg_set_u64(b, mg_find(b, "b.weight", 0), 0); break;
    case BAD_name_65: mg_set_u64(b, mg_find(b, "b.weight", 0), 65); break;
    case BAD_name_nul: b->data[mg_find(b, "b.weight", 0) + 8 + 2] = 0; break;
    case BAD_name_twice: memcpy(b->data + mg_find(b, "cc", 0) + 8, "aa", 2); break;
    case BAD_n_dims_0: mg_set_u32(b, row_at(b, "b.weight", ROW_N_DIMS, 0), 0); break;
    case BAD_n_dims_5: mg_set_u32(b, row_at(b, "b.weight", ROW_N_DIMS, 0), 5); break;
    case BAD_dim_0: mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 1), 0); break;
    case BAD_dim_negative: mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 2), UINT64_MAX); break;
    case BAD_product_zero: mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 2), 0); /* fall through */
    case BAD_product:
        mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 0), 1ull << 32);
        mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 1), 1ull << 32);
        break;
    case BAD_bytes:
        mg_set_u64(b, row_at(b, "aa", ROW_DIM, 0), 1ull << 60), mg_set_u64(b, row_at(b, "aa", ROW_DIM, 1), 4);
        break;
    case BAD_row:
        mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 0), 16), mg_set_u64(b, row_at(b, "b.weight", ROW_DIM, 1), 8);
        break;
    case BAD_type_removed: mg_set_u32(b, row_at(b, "aa", ROW_TYPE, 0), 4); break;
    case BAD_type_high: mg_set_u32(b, row_at(b, "aa", ROW_TYPE, 0), 1u << 31); break;
    case BAD_offset_odd: at = row_at(b, "cc", ROW_OFFSET, 0), mg_set_u64(b, at, mg_get_u64(b, at) + 16); break;
    case BAD_offset_far: mg_set_u64(b, row_at(b, "cc", ROW_OFFSET, 0), 1ull << 40); break;
    case BAD_offset_wraps: mg_set_u64(b, row_at(b, "cc", ROW_OFFSET, 0), UINT64_MAX - 31); break;
    case BAD_overlap: at = row_at(b, "cc", ROW_OFFSET, 0), mg_set_u64(b, at, mg_get_u64(b, at) - 32); break;
    case BAD_overlap_all: mg_set_u64(b, row_at(b, "b.weight", ROW_OFFSET, 0), 0); break;
    case BAD_last_longer: mg_set_u64(b, row_at(b, "d", ROW_DIM, 0), 9); break;
    default: keyed_file(b, which);
    }
}

/* The same code and text from memory, file, file without mapping and callbacks with short reads. */
static void test_malformed(void) {
    const char *path = tmp_path("malformed.gguf");
    CHECK(RFI_COUNT(bad_files) == BAD_COUNT, "table");
    for (int i = 0; i < BAD_COUNT; i++) {
        const bad_file *bad = &bad_files[i];
        mg_buf b = {0};
        rf_error err[4];
        rf_gguf *g[4];
        rf_result rc[4];
        shaky s = {.chunk = 5, .eintr = 1};
        rf_gguf_desc no_map = {.no_map = 1}, io = {.io = shaky_io(&s)};
        small_file(&b, 3);
        spoil(&b, i);
        REQUIRE(mg_write_file(&b, path), "write");
        rc[0] = open_buf(&b, &g[0], &err[0]);
        rc[1] = rf_gguf_open(path, NULL, &g[1], &err[1]);
        rc[2] = rf_gguf_open(path, &no_map, &g[2], &err[2]);
        rc[3] = rf_gguf_open(path, &io, &g[3], &err[3]);
        for (int k = 0; k < 4; k++) {
            CHECK(rc[k] == bad->code && g[k] == NULL, "%s, way %d: %d %s", bad->what, k, rc[k], err[k].text);
            check_message(&err[k], rc[k], bad->what);
            const char *text = strchr(err[k].text, ':'), *first = strchr(err[0].text, ':');
            REQUIRE(text && first, "%s: %s", bad->what, err[k].text);
            if (i != BAD_split_count)
                CHECK(strcmp(text, first) == 0, "%s: memory says%s, way %d%s", bad->what, first, k, text);
            CHECK(strncmp(err[k].text, k ? "malformed.gguf: " : "(memory): ", k ? 16 : 10) == 0, "file: %s",
                  err[k].text);
            CHECK(strncmp(text + 2, bad->says, strlen(bad->says)) == 0 &&
                      strncmp(text + 2 + strlen(bad->says), " at byte ", 9) == 0,
                  "%s: want %s: %s", bad->what, bad->says, text);
            CHECK(strstr(text, bad->why) != NULL, "%s: want %s: %s", bad->what, bad->why, text);
        }
        CHECK(s.handles == 0 && s.maps == 0, "%s: %d handles, %d maps left", bad->what, s.handles, s.maps);
        mg_free(&b);
    }
}

/* Valid, though unusual: any order of the data, gaps, alignments, bytes after the end, no tensors, no keys, names at
 * the limits. */
static void test_odd_but_valid(void) {
    mg_buf b = {0}, big;
    rf_gguf *g;
    rf_error err;
    rf_tensor_info t;
    small_file(&b, 3);
    uint64_t c = mg_get_u64(&b, row_at(&b, "cc", ROW_OFFSET, 0)), a = mg_get_u64(&b, row_at(&b, "aa", ROW_OFFSET, 0));
    mg_set_u64(&b, row_at(&b, "cc", ROW_OFFSET, 0), a); /* a: 60 bytes, c: 48: both slots hold 64 */
    mg_set_u64(&b, row_at(&b, "aa", ROW_OFFSET, 0), c);
    REQUIRE(open_buf(&b, &g, &err) == RF_OK, "data in another order: %s", err.text);
    CHECK(rf_gguf_find_tensor(g, "cc", &t, NULL) == RF_OK && t.offset_bytes % 32 == 0 && t.offset_bytes < t.where + 200,
          " ");
    rf_gguf_close(g, NULL);
    big = mg_copy(&b);
    for (int i = 0; i < 100; i++) mg_put(&big, "\xee", 1);
    mg_set_u64(&big, row_at(&big, "d", ROW_OFFSET, 0), mg_get_u64(&big, row_at(&big, "d", ROW_OFFSET, 0)) + 64);
    REQUIRE(open_buf(&big, &g, &err) == RF_OK, "a gap, and bytes after: %s", err.text);
    rf_gguf_close(g, NULL);
    mg_free(&big);
    mg_free(&b);
    static const uint32_t alignments[] = {1, 2, 4, 8, 16, 64, 4096, 65536};
    for (size_t i = 0; i < RFI_COUNT(alignments); i++) {
        mg_gguf w;
        unsigned char *key = (unsigned char *)malloc(65536);
        REQUIRE(key != NULL, "malloc");
        memset(key, 'k', 65535), key[65535] = 0;
        mg_begin(&w, 3);
        mg_align(&w, alignments[i]);
        mg_kv_u8(&w, (const char *)key, 1);
        char name[65];
        memset(name, 'n', 64), name[64] = 0;
        mg_tensor(&w, name, MG_F16, 1, (uint64_t[]){3}, "\1\2\3\4\5\6", 6);
        mg_tensor(&w, "x", MG_F16, 1, (uint64_t[]){2}, "\6\5\4\3", 4);
        mg_finish(&w, &b);
        unsigned char four[4];
        REQUIRE(open_buf(&b, &g, &err) == RF_OK, "alignment %u: %s", alignments[i], err.text);
        CHECK(rf_gguf_read_tensor(g, 1, 0, four, 4, &err) == RF_OK && four[0] == 6 && four[3] == 3, "%s", err.text);
        CHECK(rf_gguf_get_info(g).alignment == alignments[i], "alignment");
        CHECK(touch_all(g) > 0, "touch");
        rf_gguf_close(g, NULL);
        mg_free(&b);
        free(key);
    }
    mg_gguf w;
    mg_begin(&w, 3);
    mg_finish(&w, &b);
    REQUIRE(b.n == 24 && open_buf(&b, &g, &err) == RF_OK, "24 bytes: %s", err.text);
    rf_kv kv;
    CHECK(rf_gguf_find_kv(g, "x", &kv, NULL) == RF_ERR_NOT_FOUND && rf_gguf_find_tensor(g, "x", &t, NULL) == RF_ERR_NOT_FOUND,
          "empty");
    rf_gguf_close(g, NULL);
    mg_free(&b);
    /* all types of the table, in one directory */
    mg_begin(&w, 3);
#define PUT_TYPE(NAME, id, text, elements, bytes, runs)                                                              \
    mg_tensor(&w, text, id, 2, (uint64_t[]){2 * elements, 3}, NULL, 6 * bytes);
    RF_TYPE_TABLE(PUT_TYPE)
    mg_finish(&w, &b);
    REQUIRE(open_buf(&b, &g, &err) == RF_OK, "types that do not run may be there: %s", err.text);
    rf_gguf_close(g, NULL);
    mg_free(&b);
}

/* ---- size ---- */

static void many_keys(mg_buf *b, unsigned n, int twice) {
    mg_gguf w;
    char key[32];
    mg_begin(&w, 3);
    for (unsigned i = 0; i < n; i++) {
        snprintf(key, sizeof key, "%x", i);
        mg_kv_u8(&w, key, 1);
    }
    if (twice) mg_kv_u8(&w, "7", 1);
    mg_finish(&w, b);
}
static void many_tensors(mg_buf *b, unsigned n, int twice) {
    mg_gguf w;
    char name[32];
    mg_begin(&w, 3);
    mg_align(&w, 1);
    for (unsigned i = 0; i < n; i++) {
        snprintf(name, sizeof name, "%x", i);
        mg_tensor(&w, name, 24 /* I8 */, 1, (uint64_t[]){1}, "x", 1);
    }
    if (twice) mg_tensor(&w, "7", 24, 1, (uint64_t[]){1}, "x", 1);
    mg_finish(&w, b);
}

static void test_many(void) {
    for (int which = 0; which < 4; which++) {
        mg_buf b = {0};
        rf_gguf *g;
        rf_error err;
        if (which < 2) many_keys(&b, 100000, which);
        else many_tensors(&b, 20000, which - 2);
        clock_t start = clock();
        rf_result rc = open_buf(&b, &g, &err);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC; /* of this process: others may be busy */
        printf("    %s%s: %.1f ms\n", which < 2 ? "100000 keys" : "20000 tensors",
               which % 2 ? " and a duplicate" : "", seconds * 1e3);
        CHECK(seconds < 0.5, "%.3f s", seconds); /* ten times what it takes under sanitizers */
        if (which % 2) CHECK(rc == RF_ERR_FORMAT && strstr(err.text, "twice"), "%d %s", rc, err.text);
        else CHECK(rc == RF_OK, "%s", err.text);
        if (rc == RF_OK) {
            rf_kv kv;
            rf_tensor_info t;
            if (which == 0) CHECK(rf_gguf_find_kv(g, "1869f", &kv, NULL) == RF_OK, "the last key");
            if (which == 2) CHECK(rf_gguf_find_tensor(g, "4e1f", &t, NULL) == RF_OK && t.index == 19999, "the last tensor");
            CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
        }
        mg_free(&b);
    }
    /* data in the reverse order of the directory: the sort must not care */
    mg_buf b = {0};
    rf_gguf *g;
    rf_error err;
    many_tensors(&b, 20000, 0);
    size_t at = 24 + (8 + 17 + 4 + 4);
    for (uint64_t i = 0; i < 20000; i++) {
        at += 8 + mg_get_u64(&b, at) + 4 + 8 + 4;
        mg_set_u64(&b, at, 19999 - i);
        at += 8;
    }
    CHECK(open_buf(&b, &g, &err) == RF_OK, "%s", err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    mg_set_u64(&b, at - 8, 12345); /* and one overlap among 20000 */
    CHECK(open_buf(&b, &g, &err) == RF_ERR_FORMAT && strstr(err.text, "4e1f at byte") &&
              strstr(err.text, "overlaps 1de6"),
          "%s", err.text);
    mg_free(&b);
}

/* Peak memory from a file: at most 8 x metadata + 64 KiB; nothing left afterwards. */
static void test_memory_bound(void) {
    const char *path = tmp_path("bound.gguf");
    for (int which = 0; which < 7; which++) {
        mg_buf b = {0};
        mg_gguf w;
        mg_options o = {.type = MG_Q4_0, .bpe = 1};
        mg_begin(&w, 3);
        if (which == 0) mg_finish(&w, &b);
        if (which == 1) small_file(&b, 3);
        if (which == 2) mg_llama(&b, &o);
        if (which == 3) many_keys(&b, 100000, 0);
        if (which == 4) many_tensors(&b, 20000, 0);
        if (which == 5) { /* 300000 empty strings */
            mg_kv_arr(&w, "s", MG_KV_STR, NULL, 300000, 0);
            for (int i = 0; i < 300000; i++) mg_put_u64(&w.kv, 0);
            mg_finish(&w, &b);
        }
        if (which == 6) { /* just over a power of two, the buffer has doubled last */
            static char text[32769];
            memset(text, 't', 32768);
            for (int k = 0; k < 33; k++) mg_kv_str(&w, (char[]){(char)('A' + k), 0}, text);
            mg_tensor(&w, "t", 24 /* I8 */, 1, (uint64_t[]){1 << 20}, NULL, 1 << 20);
            mg_finish(&w, &b);
        }
        REQUIRE(mg_write_file(&b, path), "write");
        for (int way = 0; way < 2; way++) {
            memory c = {0};
            rf_gguf_desc desc = {.allocator = memory_allocator(&c)};
            rf_gguf *g;
            rf_error err;
            rf_result rc =
                way ? rf_gguf_open_memory(b.data, b.n, &desc, &g, &err) : rf_gguf_open(path, &desc, &g, &err);
            REQUIRE(rc == RF_OK, "%d: %s", which, err.text);
            uint64_t head = rf_gguf_get_info(g).metadata_bytes;
            CHECK((uint64_t)c.peak <= 8 * head + 65536, "file %d: %llu bytes for %llu of metadata", which, RFI_LLU(c.peak),
                  RFI_LLU(head));
            if (!way && head > 100000)
                printf("    %llu KB of metadata: peak %.2f x, kept %.2f x\n", RFI_LLU(head / 1024),
                       (double)c.peak / (double)head, (double)c.now / (double)head);
            rf_gguf_close(g, NULL);
            CHECK(c.live == 0 && c.now == 0, "%llu blocks left", RFI_LLU(c.live));
        }
        mg_free(&b);
    }
    for (int i = 0; i < BAD_COUNT; i++) {
        mg_buf b = {0};
        memory c = {0};
        rf_gguf_desc desc = {.allocator = memory_allocator(&c)};
        rf_gguf *g;
        small_file(&b, 3);
        spoil(&b, i);
        REQUIRE(mg_write_file(&b, path), "write");
        CHECK(rf_gguf_open(path, &desc, &g, NULL) != RF_OK, "%s", bad_files[i].what);
        CHECK(c.live == 0 && (uint64_t)c.peak <= 8 * b.n + 65536, "%s: %llu blocks left, peak %llu", bad_files[i].what,
              RFI_LLU(c.live), RFI_LLU(c.peak));
        mg_free(&b);
    }
}

/* ---- split files ---- */

/* Part `no` of `count` with two tensors; n_tensors is what split.tensors.count says. */
static void split_part(mg_buf *b, unsigned no, unsigned count, int n_tensors, const char *first_name) {
    mg_gguf w;
    char name[32];
    float v[8];
    mg_free(b);
    mg_begin(&w, 3);
    if (no == 0) mg_kv_str(&w, "general.architecture", "none");
    if (no == 1) mg_align(&w, 64); /* parts may differ */
    mg_kv_u16(&w, "split.no", (uint16_t)no);
    mg_kv_u16(&w, "split.count", (uint16_t)count);
    mg_kv_i32(&w, "split.tensors.count", n_tensors);
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned k = 0; k < 8; k++) v[k] = (float)(100 * no + 10 * i + k);
        snprintf(name, sizeof name, "t%u.%u", no, i);
        mg_tensor(&w, i == 0 && first_name ? first_name : name, MG_F32, 1, (uint64_t[]){8}, v, sizeof v);
    }
    mg_finish(&w, b);
}

static void write_part(const char *path, unsigned no, unsigned count, int n_tensors, const char *first_name) {
    mg_buf b = {0};
    split_part(&b, no, count, n_tensors, first_name);
    CHECK(mg_write_file(&b, path), "write");
    mg_free(&b);
}

static void write_split(const char *stem, unsigned count) {
    char name[64];
    for (unsigned i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%s-%05u-of-%05u.gguf", stem, i + 1, count);
        write_part(tmp_path(name), i, count, (int)(2 * count), NULL);
    }
}

static void split_fails(const char *path, rf_result want, const char *says) {
    rf_gguf *g;
    rf_error err;
    CHECK(rf_gguf_open(path, NULL, &g, &err) == want && g == NULL && strstr(err.text, says), "%d, want %s: %s",
          err.code, says, err.text);
}

static void test_split(void) {
    rf_gguf *g;
    rf_error err;
    for (unsigned count = 2; count <= 3; count++) {
        char first[64], second[64];
        snprintf(first, sizeof first, "m-00001-of-%05u.gguf", count);
        snprintf(second, sizeof second, "m-00002-of-%05u.gguf", count);
        write_split("m", count);
        for (uint32_t no_map = 0; no_map < 2; no_map++) {
            memory c = {0};
            rf_gguf_desc desc = {.no_map = no_map, .allocator = memory_allocator(&c)};
            REQUIRE(rf_gguf_open(tmp_path(first), &desc, &g, &err) == RF_OK, "%s", err.text);
            rf_gguf_info info = rf_gguf_get_info(g);
            CHECK(info.n_files == count && info.n_tensors == 2 * count && info.n_kv == 4, "%u files", info.n_files);
            CHECK(info.data_bytes == 64 * count && info.mapped == !no_map, "data, mapped");
            CHECK((uint64_t)c.peak <= 8 * info.metadata_bytes + 65536, "peak %llu", RFI_LLU(c.peak));
            for (unsigned i = 0; i < 2 * count; i++) {
                rf_tensor_info t;
                char name[32];
                float v[8];
                snprintf(name, sizeof name, "t%u.%u", i / 2, i % 2);
                REQUIRE(rf_gguf_find_tensor(g, name, &t, NULL) == RF_OK, "%s", name);
                CHECK(t.index == i && t.file_index == i / 2, "%s is %u in part %u", name, t.index, t.file_index);
                CHECK(rf_gguf_read_tensor(g, i, 0, v, sizeof v, &err) == RF_OK, "%s", err.text);
                CHECK(v[0] == (float)(100 * (i / 2) + 10 * (i % 2)) && v[7] == v[0] + 7, "%s: %g", name,
                      (double)v[0]);
                CHECK(no_map || memcmp(rfi_gguf_map(g, &t), v, sizeof v) == 0, "%s mapped", name);
            }
            rf_kv kv;
            CHECK(rf_gguf_find_kv(g, "general.alignment", &kv, NULL) == RF_ERR_NOT_FOUND, "keys are the first part's");
            CHECK(rf_gguf_close(g, NULL) == RF_OK && c.live == 0, "close");
        }
        CHECK(rf_gguf_open(tmp_path(second), NULL, &g, &err) == RF_ERR_ARGUMENT && strstr(err.text, first), "%s",
              err.text);
    }
    mg_buf b = {0};
    const char *part2 = tmp_path("m-00002-of-00003.gguf");
    char first[512];
    snprintf(first, sizeof first, "%s", tmp_path("m-00001-of-00003.gguf"));
    CHECK(remove(part2) == 0, "remove");
    split_fails(first, RF_ERR_NOT_FOUND, "m-00002-of-00003.gguf");
    write_part(part2, 2, 3, 6, NULL); /* the third part in the second's place */
    split_fails(first, RF_ERR_UNSUPPORTED, "m-00002-of-00003.gguf: split.count at byte");
    write_part(part2, 1, 2, 6, NULL); /* says that there are two parts */
    split_fails(first, RF_ERR_UNSUPPORTED, "m-00002-of-00003.gguf: split.count at byte");
    write_part(part2, 1, 3, 7, NULL); /* says that there are seven tensors */
    split_fails(first, RF_ERR_FORMAT, "m-00002-of-00003.gguf: split.no");
    write_part(part2, 1, 3, 6, "t0.1"); /* has a tensor of the first part */
    split_fails(first, RF_ERR_FORMAT, "m-00002-of-00003.gguf: t0.1 at byte");
    split_fails(first, RF_ERR_FORMAT, "of m-00001-of-00003.gguf");
    CHECK(truncate(part2, 20) == 0, "truncate");
    split_fails(first, RF_ERR_FORMAT, "m-00002-of-00003.gguf: header at byte");
    small_file(&b, 3);
    CHECK(mg_write_file(&b, part2), "write"); /* a file of its own */
    split_fails(first, RF_ERR_FORMAT, "m-00002-of-00003.gguf: split.no");
    write_part(part2, 1, 3, 6, NULL);
    CHECK(rf_gguf_open(first, NULL, &g, &err) == RF_OK, "mended: %s", err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    for (unsigned i = 0; i < 3; i++) { /* all parts agree on a wrong number */
        char name[64];
        snprintf(name, sizeof name, "m-%05u-of-00003.gguf", i + 1);
        write_part(tmp_path(name), i, 3, 5, NULL);
    }
    split_fails(first, RF_ERR_FORMAT, "split.tensors.count is 5, the parts have 6");
    CHECK(mg_write_file(&b, tmp_path("p-00002-of-00003.gguf")), "write"); /* a plain file may be called like a part */
    CHECK(rf_gguf_open(tmp_path("p-00002-of-00003.gguf"), NULL, &g, &err) == RF_OK, "%s", err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    split_part(&b, 0, 1, 2, NULL);
    CHECK(open_buf(&b, &g, &err) == RF_OK, "one part of one is a plain file: %s", err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    mg_free(&b);
}

/* ---- failures of memory and of the operating system ---- */

/* The n-th allocation fails, once and from then on, for every n: an error, nothing left. */
static void test_alloc_failure(void) {
    mg_buf b = {0};
    rf_gguf *g;
    rf_error err;
    char path[512];
    mg_options o = {.type = MG_Q8_0};
    write_split("f", 3);
    mg_llama(&b, &o);
    snprintf(path, sizeof path, "%s", tmp_path("f-00001-of-00003.gguf"));
    for (int way = 0; way < 3; way++) { /* split file, file of several reads, memory */
        if (way == 1) REQUIRE(mg_write_file(&b, strcpy(path, tmp_path("model.gguf"))), "write");
        for (int forever = 0; forever < 2; forever++) {
            uint64_t n = 1;
            for (; n < 1000; n++) {
                shaky s = {0};
                memory c = {.fail_at = (int64_t)n, .forever = forever};
                rf_gguf_desc desc = {.allocator = memory_allocator(&c), .io = shaky_io(&s)};
                rf_result rc = way == 2 ? rf_gguf_open_memory(b.data, b.n, &desc, &g, &err)
                                        : rf_gguf_open(path, &desc, &g, &err);
                if (rc == RF_OK) {
                    CHECK((uint64_t)c.calls < n, "allocation %llu failed unnoticed", RFI_LLU(n));
                    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
                } else {
                    CHECK(rc == RF_ERR_MEMORY && err.code == rc && g == NULL, "%llu: %d %s", RFI_LLU(n), rc,
                          err.text);
                }
                CHECK(c.live == 0 && s.handles == 0 && s.maps == 0, "%llu: %llu blocks, %d handles, %d maps left",
                      RFI_LLU(n), RFI_LLU(c.live), s.handles, s.maps);
                if (rc == RF_OK) break;
            }
            CHECK(n > 5 && n < 1000, "%llu allocations", RFI_LLU(n));
        }
    }
    mg_free(&b);
}

/* The n-th call of a hook fails: an error with its errno, or, for a map, reading instead. */
static void test_io_failure(void) {
    mg_buf b = {0};
    rf_gguf *g;
    rf_error err;
    write_split("f", 3);
    small_file(&b, 3);
    REQUIRE(mg_write_file(&b, tmp_path("small.gguf")), "write");
    for (int way = 0; way < 8; way++) {
        const char *path = tmp_path(way % 2 ? "small.gguf" : "f-00001-of-00003.gguf");
        uint64_t failed = 0, unmapped = 0;
        for (uint64_t n = 1; n < 1000; n++) {
            memory c = {0};
            shaky s = {
                .fail_at = n, .error = way < 6 ? -EIO : INT32_MIN, .chunk = way < 4 ? 0 : 50, .forever = way & 2};
            rf_gguf_desc desc = {.allocator = memory_allocator(&c), .io = shaky_io(&s)};
            rf_result rc = rf_gguf_open(path, &desc, &g, &err);
            if (rc == RF_OK) {
                unmapped += !rf_gguf_get_info(g).mapped;
                s.fail_at = 0;
                touch_all(g);
                CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
            } else {
                failed++;
                CHECK(rc == RF_ERR_IO && err.sys == EIO && g == NULL, "%llu: %d sys %d %s", RFI_LLU(n), rc, err.sys,
                      err.text);
            }
            CHECK(c.live == 0 && s.handles == 0 && s.maps == 0, "%llu: %llu blocks, %d handles, %d maps left",
                  RFI_LLU(n), RFI_LLU(c.live), s.handles, s.maps);
            if (s.calls < n) break;
        }
        CHECK(failed >= 2 && unmapped == (way % 2 ? 1 : 3), "%llu failed, %llu unmapped", RFI_LLU(failed),
              RFI_LLU(unmapped));
    }
    /* hooks that misbehave, interrupted and short reads */
    shaky s = {.fail_at = 2, .lie = 1};
    rf_gguf_desc desc = {.io = shaky_io(&s)};
    CHECK(rf_gguf_open(tmp_path("small.gguf"), &desc, &g, &err) == RF_ERR_IO && strstr(err.text, "asked for"), "%s",
          err.text);
    s = (shaky){.fail_at = 2, .lie = 2};
    CHECK(rf_gguf_open(tmp_path("small.gguf"), &desc, &g, &err) == RF_ERR_IO && strstr(err.text, "shortened"), "%s",
          err.text);
    s = (shaky){.chunk = 1, .eintr = 1};
    REQUIRE(rf_gguf_open(tmp_path("small.gguf"), &desc, &g, &err) == RF_OK, "%s", err.text);
    check_small(g, &b, 3);
    unsigned char bytes[272];
    s.fail_at = s.calls + 6, s.error = -EIO;
    CHECK(rf_gguf_read_tensor(g, 1, 0, bytes, 272, &err) == RF_ERR_IO && err.sys == EIO, "%s", err.text);
    CHECK(rf_gguf_read_tensor(g, 1, 0, bytes, 272, &err) == RF_OK && err.code == RF_OK, "and works again: %s",
          err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK && s.handles == 0 && s.maps == 0, "%d handles, %d maps", s.handles, s.maps);
    /* no map hooks: read */
    desc.io.map_fn = NULL, desc.io.unmap_fn = NULL;
    s = (shaky){0};
    REQUIRE(rf_gguf_open(tmp_path("small.gguf"), &desc, &g, &err) == RF_OK, "%s", err.text);
    CHECK(rf_gguf_get_info(g).mapped == 0, "mapped");
    touch_all(g);
    CHECK(rf_gguf_close(g, NULL) == RF_OK && s.handles == 0, "close");
    mg_free(&b);
}

static char logged[512];
static void keep_log(rf_log_level level, const char *text, void *user) {
    RFI_UNUSED(user);
    snprintf(logged, sizeof logged, "%d %s", level, text);
}

static void test_map_failure_is_logged(void) {
    mg_buf b = {0};
    rf_gguf *g;
    rf_error err;
    small_file(&b, 3);
    REQUIRE(mg_write_file(&b, tmp_path("small.gguf")), "write");
    shaky s = {.fail_at = 3}; /* open, read, map */
    rf_gguf_desc desc = {.io = shaky_io(&s), .log_fn = keep_log};
    REQUIRE(rf_gguf_open(tmp_path("small.gguf"), &desc, &g, &err) == RF_OK, "%s", err.text);
    CHECK(strcmp(logged, "1 small.gguf: cannot be mapped, its tensors are read") == 0, "%s", logged);
    CHECK(g->log.fn == keep_log && rfi_gguf_allocator(g)->alloc_fn != NULL, "accessors");
    rf_gguf_close(g, NULL);
    mg_free(&b);
}

/* The file is cut or replaced while it is open. */
static void test_file_changes(void) {
    mg_buf b = {0};
    rf_gguf *g;
    rf_error err;
    unsigned char bytes[272];
    const char *path = tmp_path("changes.gguf");
    small_file(&b, 3);
    REQUIRE(mg_write_file(&b, path), "write");
    REQUIRE(rf_gguf_open(path, NULL, &g, &err) == RF_OK, "%s", err.text);
    CHECK(truncate(path, (off_t)(b.n - 200)) == 0, "truncate");
    rf_kv kv;
    CHECK(rf_gguf_find_kv(g, "u8", &kv, NULL) == RF_OK, "metadata is ours");
    CHECK(rf_gguf_read_tensor(g, 1, 0, bytes, 272, &err) == RF_ERR_IO && strstr(err.text, "shortened") &&
              strstr(err.text, "changes.gguf"),
          "%s", err.text);
    CHECK(rf_gguf_read_tensor(g, 0, 0, bytes, 60, &err) == RF_OK, "what is left can be read: %s", err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    REQUIRE(mg_write_file(&b, path), "write");
    REQUIRE(rf_gguf_open(path, NULL, &g, &err) == RF_OK, "%s", err.text);
    b.data[b.n - 1] ^= 1;
    REQUIRE(mg_write_file(&b, tmp_path("new.gguf")) && rename(tmp_path("new.gguf"), path) == 0, "replace by rename");
    CHECK(rf_gguf_read_tensor(g, 3, 0, bytes, 32, &err) == RF_OK && bytes[31] == (b.data[b.n - 1] ^ 1),
          "the old file is read");
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    mg_free(&b);
}

static void test_special_files(void) {
    rf_gguf *g;
    rf_error err;
    const char *names[] = {"dir.gguf",  "fifo.gguf", "loop.gguf",  "dangling.gguf",
                           "zero.gguf", "null.gguf", "absent.gguf"};
    const rf_result want[] = {RF_ERR_IO, RF_ERR_IO, RF_ERR_IO,       RF_ERR_NOT_FOUND,
                              RF_ERR_IO, RF_ERR_IO, RF_ERR_NOT_FOUND};
    const char *why[] = {"directory",          "not a regular file", "symbolic links", "no such file",
                         "not a regular file", "not a regular file", "no such file"};
    CHECK(mkdir(tmp_path("dir.gguf"), 0700) == 0 && mkfifo(tmp_path("fifo.gguf"), 0600) == 0, "make");
    CHECK(symlink("loop.gguf", tmp_path("loop.gguf")) == 0 && symlink("nowhere", tmp_path("dangling.gguf")) == 0,
          "link");
    CHECK(symlink("/dev/zero", tmp_path("zero.gguf")) == 0 && symlink("/dev/null", tmp_path("null.gguf")) == 0,
          "link");
    alarm(20); /* a FIFO without a writer must not hold us */
    for (size_t i = 0; i < RFI_COUNT(names); i++) {
        rf_result rc = rf_gguf_open(tmp_path(names[i]), NULL, &g, &err);
        CHECK(rc == want[i] && g == NULL && strstr(err.text, why[i]) && strstr(err.text, names[i]) && err.sys != 0,
              "%s: %d sys %d %s", names[i], rc, err.sys, err.text);
    }
    alarm(0);
    CHECK(rf_gguf_open("", NULL, &g, &err) == RF_ERR_NOT_FOUND && strstr(err.text, "'': cannot open"), "%s", err.text);
    mg_buf b = {0};
    small_file(&b, 3);
    CHECK(mg_write_file(&b, tmp_path("real.gguf")) && symlink("real.gguf", tmp_path("link.gguf")) == 0, "link");
    CHECK(rf_gguf_open(tmp_path("link.gguf"), NULL, &g, &err) == RF_OK, "a link to a file: %s", err.text);
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
    if (geteuid() != 0) {
        CHECK(chmod(tmp_path("real.gguf"), 0) == 0, "chmod");
        CHECK(rf_gguf_open(tmp_path("real.gguf"), NULL, &g, &err) == RF_ERR_IO &&
                  strstr(err.text, "permission denied"),
              "%s", err.text);
    }
    char odd_path[600];
    snprintf(odd_path, sizeof odd_path, "%s/odd \x1b[31m\n\xff%%n%%s.gguf", tmp_dir);
    CHECK(rf_gguf_open(odd_path, NULL, &g, &err) == RF_ERR_NOT_FOUND &&
              strstr(err.text, "odd \\x1b[31m\\x0a\\xff%n%s.gguf"),
          "%s", err.text);
    mg_free(&b);
}

/* A file of 1 TiB that is almost all hole: opened in no time and little memory, whatever it claims. */
static void test_sparse(void) {
    const char *path = tmp_path("sparse.gguf");
    const uint64_t tib = 1ull << 40;
    for (int lie = 0; lie < 5; lie++) {
        mg_buf b = {0};
        mg_gguf w;
        rf_gguf *g;
        rf_error err;
        memory c = {0};
        rf_gguf_desc desc = {.allocator = memory_allocator(&c)};
        mg_begin(&w, 3);
        mg_kv_str(&w, "text", "short");
        mg_tensor(&w, "t", 24 /* I8 */, 1, (uint64_t[]){tib - 4096}, NULL, 0);
        mg_finish(&w, &b);
        if (lie == 1) mg_set_u64(&b, 16, tib / 20);                  /* n_kv       */
        if (lie == 2) mg_set_u64(&b, 8, tib / 40);                   /* n_tensors  */
        if (lie == 3) mg_set_u64(&b, value_at(&b, "text"), tib / 2); /* a string   */
        if (lie == 4) mg_set_u64(&b, 16, 1 << 26);                   /* n_kv: fits the limit, not the file */
        REQUIRE(mg_write_file(&b, path), "write");
        mg_free(&b);
        if (truncate(path, (off_t)tib) != 0) {
            printf("    no file of 1 TiB here (%s)\n", strerror(errno));
            return;
        }
        clock_t start = clock();
        rf_result rc = rf_gguf_open(path, &desc, &g, &err);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        CHECK(rc == (lie == 0   ? RF_OK
                     : lie == 3 ? RF_ERR_UNSUPPORTED
                                : RF_ERR_FORMAT),
              "lie %d: %d %s", lie, rc, err.text);
        CHECK(c.peak < 1 << 20 && seconds < 0.5, "lie %d: peak %llu, %.3f s", lie, RFI_LLU(c.peak), seconds);
        if (rc == RF_OK) {
            unsigned char last;
            CHECK(rf_gguf_read_tensor(g, 0, tib - 4097, &last, 1, &err) == RF_OK && last == 0, "%s", err.text);
            CHECK(rf_gguf_close(g, NULL) == RF_OK, "close");
        }
        CHECK(c.live == 0, "left");
    }
    remove(path);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    const char *base = getenv("TMPDIR");
    snprintf(tmp_dir, sizeof tmp_dir, "%s/rf_gguf.XXXXXX", base && strlen(base) < 200 ? base : "/tmp");
    if (!mkdtemp(tmp_dir)) return perror("mkdtemp"), 1;
    RUN(test_round_trip);
    RUN(test_models);
    RUN(test_arguments);
    RUN(test_close_busy);
    RUN(test_truncated);
    RUN(test_mutations);
    RUN(test_malformed);
    RUN(test_odd_but_valid);
    RUN(test_many);
    RUN(test_memory_bound);
    RUN(test_split);
    RUN(test_alloc_failure);
    RUN(test_io_failure);
    RUN(test_map_failure_is_logged);
    RUN(test_file_changes);
    RUN(test_special_files);
    RUN(test_sparse);
    nftw(tmp_dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    RFT_END();
}
