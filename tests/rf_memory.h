/* rf_memory.h: memory that is counted and can be made to fail, for any number of threads. Include it after the library.
 *     memory m = {.fail_at = 3};
 *     const rf_gguf_desc desc = {.allocator = memory_allocator(&m)}; */
#ifndef RF_MEMORY_H
#define RF_MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct memory {
    int64_t calls;     /* allocations, failed ones included                    */
    int64_t live;      /* blocks                                               */
    int64_t now, peak; /* bytes held now, and at most                          */
    int64_t total;     /* bytes of all allocations                             */
    int64_t fail_at;   /* this call fails; 0: none                             */
    int forever;       /* so do all after it                                   */
    int64_t limit;     /* an allocation after which more would be held fails; 0: none */
} memory;

/* Blocks begin with their size. */
enum { MEMORY_HEADER = 16 };

static inline int64_t memory_add(int64_t *count, int64_t n) { return __atomic_add_fetch(count, n, __ATOMIC_SEQ_CST); }
static inline int64_t memory_read(const int64_t *count) { return __atomic_load_n(count, __ATOMIC_SEQ_CST); }

static inline void *memory_alloc(size_t n, void *user) {
    memory *m = (memory *)user;
    const int64_t call = memory_add(&m->calls, 1), size = (int64_t)n;
    if (m->fail_at && (call == m->fail_at || (m->forever && call > m->fail_at))) return NULL;
    if (size < 0 || (m->limit && (size > m->limit || memory_read(&m->now) > m->limit - size))) return NULL;
    unsigned char *p = (unsigned char *)malloc(n + MEMORY_HEADER);
    if (!p) return NULL;
    memcpy(p, &size, sizeof size);
    memory_add(&m->live, 1);
    memory_add(&m->total, size);
    const int64_t now = memory_add(&m->now, size);
    int64_t peak = memory_read(&m->peak);
    while (now > peak && !__atomic_compare_exchange_n(&m->peak, &peak, now, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
    return p + MEMORY_HEADER;
}

static inline void memory_free(void *block, void *user) {
    memory *m = (memory *)user;
    unsigned char *p = (unsigned char *)block - MEMORY_HEADER;
    int64_t size;
    memcpy(&size, p, sizeof size);
    memory_add(&m->now, -size);
    memory_add(&m->live, -1);
    free(p);
}

static inline rf_allocator memory_allocator(memory *m) {
    const rf_allocator a = {memory_alloc, memory_free, m};
    return a;
}

#endif
