/* test_limits.c: every limit for files is a macro: what is just within it is taken, what is one beyond it refused by
 * name. The limits are set small here; the tests of the other suites have the defaults. */
#define ROCMFORGE_IMPLEMENTATION
#define ROCMFORGE_MAX_KEY_BYTES 40u
#define ROCMFORGE_MAX_NAME_BYTES 32u
#define ROCMFORGE_MAX_METADATA_BYTES 20000u
#define ROCMFORGE_MAX_ALIGNMENT 64u
#define ROCMFORGE_MAX_FILES 2u
#define ROCMFORGE_MAX_LAYERS 3
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_test.h"

/* Opens the file, and a model of it if `plan`; says as what it ends, and closes everything. */
static rf_result attempt(mg_buf *file, int plan, rf_error *err) {
    rf_gguf *g = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    rf_result r = rf_gguf_open_memory(file->data, file->n, NULL, &g, err);
    if (r == RF_OK && plan) r = rf_device_open("null", NULL, &d, err);
    if (r == RF_OK && plan) r = rf_model_open(g, d, NULL, &m, err);
    CHECK(rf_model_close(m, NULL) == RF_OK && rf_device_close(d, NULL) == RF_OK, "busy");
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "busy");
    mg_free(file);
    return r;
}

static void expect(const char *what, mg_buf *file, int plan, rf_result want, const char *says) {
    rf_error err;
    rf_result r = attempt(file, plan, &err);
    CHECK(r == want && (r == RF_OK || strstr(err.text, says)), "%s: %s, want %s: %s", what, rf_result_name(r),
          rf_result_name(want), err.text);
}

/* A file with one key, one string value and one tensor. */
static mg_buf small(unsigned key_bytes, unsigned value_bytes, unsigned name_bytes, uint32_t alignment) {
    char key[128] = {0}, name[128] = {0};
    char *value = (char *)calloc(value_bytes + 1, 1);
    mg_buf file = {0};
    mg_gguf w;
    if (!value) exit(99);
    memset(key, 'k', key_bytes), memset(value, 'v', value_bytes), memset(name, 'n', name_bytes);
    mg_begin(&w, 3);
    mg_kv_str(&w, key, value);
    if (alignment) mg_align(&w, alignment);
    mg_tensor(&w, name, MG_F32, 1, (uint64_t[]){8}, NULL, 32);
    mg_finish(&w, &file);
    free(value);
    return file;
}

static void test_key_bytes(void) {
    mg_buf within = small(40, 1, 1, 0), beyond = small(41, 1, 1, 0);
    expect("40 bytes", &within, 0, RF_OK, "");
    expect("41 bytes", &beyond, 0, RF_ERR_FORMAT, "key length is 41, want 1..40");
}

static void test_name_bytes(void) {
    mg_buf within = small(1, 1, 32, 0), beyond = small(1, 1, 33, 0);
    expect("32 bytes", &within, 0, RF_OK, "");
    expect("33 bytes", &beyond, 0, RF_ERR_FORMAT, "name length is 33, want 1..32");
}

static void test_metadata_bytes(void) {
    mg_buf probe = small(1, 0, 1, 0);
    rf_gguf *g;
    REQUIRE(rf_gguf_open_memory(probe.data, probe.n, NULL, &g, NULL) == RF_OK, "open");
    unsigned head = (unsigned)rf_gguf_get_info(g).metadata_bytes;
    rf_gguf_close(g, NULL);
    mg_free(&probe);
    mg_buf within = small(1, 20000 - head, 1, 0), beyond = small(1, 20001 - head, 1, 0), far = small(1, 100000, 1, 0);
    expect("20000 bytes", &within, 0, RF_OK, "");
    expect("20001 bytes", &beyond, 0, RF_ERR_UNSUPPORTED, "ROCMFORGE_MAX_METADATA_BYTES");
    expect("many bytes", &far, 0, RF_ERR_UNSUPPORTED, "ROCMFORGE_MAX_METADATA_BYTES");
}

static void test_alignment(void) {
    mg_buf within = small(1, 1, 1, 64), beyond = small(1, 1, 1, 128);
    expect("64", &within, 0, RF_OK, "");
    expect("128", &beyond, 0, RF_ERR_FORMAT, "general.alignment");
}

static void test_layers(void) {
    mg_buf within = {0}, beyond = {0};
    mg_options o = {.n_layers = 3, .n_embd = 4, .n_heads = 1, .n_kv_heads = 1, .head_dim = 4, .n_ff = 4};
    o.no_vocab = 1, o.n_vocab = 8;
    mg_llama(&within, &o);
    o.n_layers = 4;
    mg_llama(&beyond, &o);
    expect("3 layers", &within, 1, RF_OK, "");
    expect("4 layers", &beyond, 1, RF_ERR_FORMAT, "llama.block_count");
}

/* Dimensions and nesting are the format's own limits. */
static void test_dimensions(void) {
    for (uint32_t n = 4; n <= 5; n++) {
        mg_buf file = {0};
        mg_gguf w;
        mg_begin(&w, 3);
        mg_tensor(&w, "t", MG_F32, 4, (uint64_t[]){2, 2, 2, 1}, NULL, 32);
        mg_finish(&w, &file);
        mg_set_u32(&file, 24 + 8 + 1, n); /* after header and name; a fifth one is read from what follows */
        expect("dimensions", &file, 0, n == 4 ? RF_OK : RF_ERR_FORMAT, "n_dims");
    }
    mg_buf nested = {0};
    mg_gguf w;
    mg_begin(&w, 3);
    mg_kv_arr(&w, "a", MG_KV_ARR, "\1\0\0\0\1\0\0\0\0\0\0\0\7", 1, 13);
    mg_finish(&w, &nested);
    expect("an array of arrays", &nested, 0, RF_ERR_UNSUPPORTED, "array of arrays");
}

static void write_part(const char *stem, unsigned no, unsigned count) {
    char path[128], name[8];
    mg_buf file = {0};
    mg_gguf w;
    snprintf(path, sizeof path, "%s-%05u-of-%05u.gguf", stem, no, count);
    snprintf(name, sizeof name, "t%u", no);
    mg_begin(&w, 3);
    mg_kv_u16(&w, "split.no", (uint16_t)(no - 1));
    mg_kv_u16(&w, "split.count", (uint16_t)count);
    mg_kv_i32(&w, "split.tensors.count", (int32_t)count);
    mg_tensor(&w, name, MG_F32, 1, (uint64_t[]){8}, NULL, 32);
    mg_finish(&w, &file);
    CHECK(mg_write_file(&file, path), "cannot write %s", path);
    mg_free(&file);
}

static void test_files(void) {
    char dir[] = "/tmp/rf_limits_XXXXXX", stem[64], path[128];
    REQUIRE(mkdtemp(dir) != NULL, "mkdtemp");
    snprintf(stem, sizeof stem, "%s/m", dir);
    for (unsigned count = 2; count <= 3; count++) {
        rf_gguf *g;
        rf_error err;
        for (unsigned no = 1; no <= count; no++) write_part(stem, no, count);
        snprintf(path, sizeof path, "%s-00001-of-%05u.gguf", stem, count);
        rf_result r = rf_gguf_open(path, NULL, &g, &err);
        CHECK(count == 2 ? r == RF_OK : r == RF_ERR_UNSUPPORTED && strstr(err.text, "ROCMFORGE_MAX_FILES"), "%u: %s",
              count, err.text);
        rf_gguf_close(g, NULL);
        for (unsigned no = 1; no <= count; no++) {
            snprintf(path, sizeof path, "%s-%05u-of-%05u.gguf", stem, no, count);
            unlink(path);
        }
    }
    CHECK(rmdir(dir) == 0, "files are left");
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_key_bytes);
    RUN(test_name_bytes);
    RUN(test_metadata_bytes);
    RUN(test_alignment);
    RUN(test_layers);
    RUN(test_dimensions);
    RUN(test_files);
    RFT_END();
}
