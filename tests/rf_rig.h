/* rf_rig.h: what most suites have open: a file, a device, a model, a session. Include it after the library, make_gguf.h and
 * rf_test.h.
 *     rig r;
 *     if (!rig_open(&r, &(rig_how){.path = "x.gguf", .mode = COPIED})) return;
 *     rig_close(&r); */
#ifndef RF_RIG_H
#define RF_RIG_H

#include "rf_memory.h"

#define RIG_FN __attribute__((unused)) static

/* The file used in place, read into memory of the CPU device, read into the null device. */
enum { MAPPED, COPIED, NULLED, N_MODES };
RIG_FN const char *const modes[] = {"mapped", "copied", "null"};

typedef struct rig {
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_session *s;
    rf_error err;
    uint32_t n_vocab, n_embd; /* of the model                                                     */
    memory mem;               /* what file and device allocate, unless descs have other allocators */
    mg_buf file;              /* a suite's, for rig_close to free; or {0}                          */
} rig;

typedef struct rig_how {
    const char *path;                   /* of a file, or NULL and                       */
    const mg_buf *file;                 /* its bytes, borrowed                          */
    int mode;                           /* of path                                      */
    const char *device;                 /* NULL: as mode says                           */
    const rf_gguf_desc *gguf;           /* NULL: as mode says                           */
    const rf_device_desc *device_desc;  /* NULL: two threads                            */
    const rf_model_desc *model;
    const rf_session_desc *session;     /* NULL: none is opened                         */
} rig_how;

RIG_FN void rig_close(rig *r) {
    rf_session_close(r->s, NULL);
    CHECK(rf_model_close(r->m, NULL) == RF_OK && rf_device_close(r->d, NULL) == RF_OK && rf_gguf_close(r->g, NULL) == RF_OK, "busy");
    CHECK(memory_read(&r->mem.live) == 0, "%lld blocks are left", (long long)memory_read(&r->mem.live));
    mg_free(&r->file);
    memset(r, 0, sizeof *r);
}

/* On failure nothing is left open, and r->err says why. */
RIG_FN rf_result rig_try(rig *r, const rig_how *how) {
    rf_gguf_desc gd = how->gguf ? *how->gguf : (rf_gguf_desc){.no_map = how->mode != MAPPED};
    rf_device_desc dd = how->device_desc ? *how->device_desc : (rf_device_desc){.n_threads = 2};
    const char *device = how->device ? how->device : how->mode == NULLED ? "null" : "cpu";
    memset(r, 0, sizeof *r);
    if (!gd.allocator.alloc_fn) gd.allocator = memory_allocator(&r->mem);
    if (!dd.allocator.alloc_fn) dd.allocator = memory_allocator(&r->mem);
    rf_result res = how->path ? rf_gguf_open(how->path, &gd, &r->g, &r->err)
                              : rf_gguf_open_memory(how->file->data, how->file->n, &gd, &r->g, &r->err);
    if (res == RF_OK) res = rf_device_open(device, &dd, &r->d, &r->err);
    if (res == RF_OK) res = rf_model_open(r->g, r->d, how->model, &r->m, &r->err);
    if (res == RF_OK && how->session) res = rf_session_open(r->m, how->session, &r->s, &r->err);
    if (res == RF_OK) {
        const rf_model_info info = rf_model_get_info(r->m);
        r->n_vocab = info.n_vocab, r->n_embd = info.n_embd;
    } else {
        const rf_error err = r->err;
        rig_close(r);
        r->err = err;
    }
    return res;
}

/* 1, or 0 after a report. */
RIG_FN int rig_open(rig *r, const rig_how *how) {
    const rf_result res = rig_try(r, how);
    CHECK(res == RF_OK, "%s, %s: %s", how->path ? how->path : "(memory)", modes[how->mode], r->err.text);
    return res == RF_OK;
}

/* ---- a saved sequence in memory ---- */

typedef struct saved {
    unsigned char data[1 << 20];
    size_t n, at; /* bytes written, bytes read */
} saved;

RIG_FN int saved_write(const void *data, size_t n, void *user) {
    saved *f = (saved *)user;
    if (n > sizeof f->data - f->n) return -1;
    memcpy(f->data + f->n, data, n);
    f->n += n;
    return 0;
}
RIG_FN int64_t saved_read(void *data, size_t n, void *user) {
    saved *f = (saved *)user;
    if (n > f->n - f->at) n = f->n - f->at;
    memcpy(data, f->data + f->at, n);
    f->at += n;
    return (int64_t)n;
}

/* Change header, tokens or values of a saved sequence, and make its checksum (FNV-1a of all before it) right again. */
RIG_FN void saved_forge(saved *f, mg_rng *r) {
    static const uint32_t odd[] = {0, 1, 2, 7, 0x7f, 0xff, 0x3c00, 0x7c00, 0x7e00, 0x7f800000, 0x7fc00000, 0x7fffffff, 0x80000000,
                                   0xfffffffe, 0xffffffff};
    const size_t end = f->n - 8, parts[] = {end < 104 ? end : 104, end < 144 ? end : 144, end};
    for (uint32_t k = 1 + mg_below(r, 4); k > 0; k--) {
        const size_t at = mg_below(r, (uint32_t)parts[mg_below(r, 3)]), left = end - at;
        const uint32_t v = odd[mg_below(r, sizeof odd / sizeof *odd)], fields[] = {16, 20, 56, 72, 76, 80, 84, 88, 96, 100};
        switch (mg_below(r, 5)) {
        case 0: f->data[at] ^= (unsigned char)(1u << mg_below(r, 8)); break;
        case 1: memcpy(f->data + at, &v, left < 4 ? left : 4); break;
        case 2: memcpy(f->data + at / 2 * 2, &v, left < 2 ? 1 : 2); break;
        case 3: memcpy(f->data + fields[mg_below(r, 10)], &v, 4); break;
        default: f->data[80 + 4 * mg_below(r, 2)] = (unsigned char)mg_below(r, 20); /* n_tokens or min_keep */
        }
    }
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < end; i++) hash = (hash ^ f->data[i]) * 0x100000001b3u;
    memcpy(f->data + end, &hash, 8);
    f->at = 0;
}

#endif
