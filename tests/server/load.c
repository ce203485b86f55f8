/* cc -O1 -o load tests/server/load.c -lm -pthread
 *
 * load URL CLIENTS REQUESTS PER_SECOND TOKENS [FIELDS]: requests that stream from a server, arriving at random
 * (Poisson: waits are exponential), PER_SECOND of them in all (0: each client asks again at once), over CLIENTS
 * connections that are kept. FIELDS are added to each request, like '"temperature":0'.
 * Prints a line of a table: time to the first token and between tokens (median, 95 and 99 of 100), tokens per second.
 * A client that is busy when its next request arrives takes it late: the time to its first token counts from the
 * arrival. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static struct sockaddr_in address;
static int n_clients, n_requests, n_tokens;
static double rate, begin;
static const char *fields = "";
static atomic_int next_request, n_failed;
static double *arrivals, *first, *between; /* [n_requests], [n_requests], [n_requests * n_tokens] */
static atomic_long n_between, n_total;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Read a stream to its end. Returns its tokens, 0 if it does not end as it should. */
static int read_events(int fd, int i) {
    char text[65536];
    double last = 0;
    int ends = 0, n = 0, n_usage = 0;
    for (size_t held = 0;;) {
        const ssize_t got = recv(fd, text + held, sizeof text - 1 - held, 0);
        if (got <= 0) return 0;
        held += (size_t)got;
        text[held] = 0;
        char *at = text, *end, *usage;
        const double now = seconds();
        while ((end = strstr(at, "\n\n"))) { /* an event: of a token if it has a delta's content that is not empty */
            *end = 0;
            if (strstr(at, "\"delta\":{\"content\"")) {
                if (n++ == 0) first[i] = now - arrivals[i];
                else between[atomic_fetch_add(&n_between, 1)] = now - last;
                last = now;
            }
            if ((usage = strstr(at, "\"completion_tokens\":"))) n_usage = atoi(usage + 20);
            if (strstr(at, "[DONE]")) ends = 1;
            at = end + 2;
        }
        if (ends && strstr(at, "0\r\n\r\n")) return n_usage; /* the last chunk */
        held = strlen(at);
        memmove(text, at, held + 1);
    }
}

/* One request over a connection that is kept; *fd: -1 where there is none. Returns the tokens, 0 after a failure. */
static int ask(int *fd, int i) {
    char body[1024], head[256];
    const int one = 1;
    if (*fd < 0) {
        *fd = socket(AF_INET, SOCK_STREAM, 0);
        if (*fd < 0 || connect(*fd, (struct sockaddr *)&address, sizeof address) != 0) return 0;
        setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    const int n_body = snprintf(body, sizeof body,
                                "{\"messages\":[{\"role\":\"user\",\"content\":\"Speak to me of matter %d, and of "
                                "what it was that you did before.\"}],\"max_tokens\":%d,\"stream\":true,"
                                "\"stream_options\":{\"include_usage\":true},\"seed\":%d%s%.500s}", i, n_tokens, i,
                                *fields ? "," : "", fields);
    const int n_head = snprintf(head, sizeof head, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                                "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n", n_body);
    int n = 0;
    if (send(*fd, head, (size_t)n_head, MSG_NOSIGNAL | MSG_MORE) == n_head &&
        send(*fd, body, (size_t)n_body, MSG_NOSIGNAL) == n_body)
        n = read_events(*fd, i);
    atomic_fetch_add(&n_total, n);
    return n;
}

static void *client(void *unused) {
    int fd = -1;
    (void)unused;
    for (int i; (i = atomic_fetch_add(&next_request, 1)) < n_requests;) {
        const double wait = arrivals[i] - seconds();
        const struct timespec t = {(time_t)(wait > 0 ? wait : 0), (long)(1e9 * fmod(wait > 0 ? wait : 0, 1))};
        if (rate > 0) nanosleep(&t, NULL);
        else arrivals[i] = seconds();
        if (ask(&fd, i)) continue;
        atomic_fetch_add(&n_failed, 1);
        close(fd);
        fd = -1;
    }
    if (fd >= 0) close(fd);
    return NULL;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void show(const char *name, double *x, long n) {
    qsort(x, (size_t)n, sizeof *x, ascending);
    if (n) printf("%s ms: median %.1f, p95 %.1f, p99 %.1f; ", name, 1e3 * x[n / 2], 1e3 * x[n * 95 / 100], 1e3 * x[n * 99 / 100]);
}

int main(int argc, char **argv) {
    char host[64];
    unsigned port = 0;
    if (argc < 6 || argc > 7 || sscanf(argv[1], "http://%63[0-9.]:%u", host, &port) != 2)
        return fprintf(stderr, "usage: load http://127.0.0.1:PORT CLIENTS REQUESTS PER_SECOND TOKENS [FIELDS]\n"), 2;
    if (argc == 7) fields = argv[6];
    n_clients = atoi(argv[2]), n_requests = atoi(argv[3]), rate = atof(argv[4]), n_tokens = atoi(argv[5]);
    if (n_clients < 1 || n_clients > 1000 || n_requests < 1 || n_tokens < 1 || rate < 0) return 2;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &address.sin_addr);
    arrivals = calloc((size_t)n_requests, sizeof *arrivals), first = calloc((size_t)n_requests, sizeof *first);
    between = calloc((size_t)n_requests * (size_t)n_tokens, sizeof *between);
    pthread_t *threads = calloc((size_t)n_clients, sizeof *threads);
    if (!arrivals || !first || !between || !threads) return 1;
    srand48(1);
    double at = begin = seconds();
    for (int i = 0; i < n_requests; i++) arrivals[i] = at += rate > 0 ? -log(1 - drand48()) / rate : 0;
    for (int i = 0; i < n_clients; i++)
        if (pthread_create(&threads[i], NULL, client, NULL) != 0) return 1;
    for (int i = 0; i < n_clients; i++) pthread_join(threads[i], NULL);
    const double took = seconds() - begin;
    printf("%d clients, %d requests, %d failed; ", n_clients, n_requests, n_failed);
    int n_first = 0; /* of those that got one */
    for (int i = 0; i < n_requests; i++)
        if (first[i] > 0) first[n_first++] = first[i];
    show("first token", first, n_first);
    show("between tokens", between, n_between);
    printf("%.0f tokens/s\n", (double)n_total / took);
    free(arrivals), free(first), free(between), free(threads);
    return n_failed != 0;
}
