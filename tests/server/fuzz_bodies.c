/* cc -g -O1 -I. tests/server/fuzz_bodies.c -o fuzz_bodies -lmicrohttpd -ljansson -lm -pthread
 *
 * JSON bodies as clients might send them, read by the server's own readers: fuzz_bodies N runs N mutations of the bodies
 * below, RF_LIBFUZZER makes it a libFuzzer target. The first byte of an input chooses the API. What is accepted must
 * have choices with prompts; what is not must say why. */
#define main server_main
#include "examples/rocmforge_server.c"
#undef main

static const char *const bodies[] = {
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"temperature\":0.5,\"max_tokens\":3,\"stop\":[\"a\",\"b\"],\"n\":2,\"seed\":1,"
    "\"logit_bias\":{\"7\":-100},\"logprobs\":true,\"top_logprobs\":2,\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
    "{\"messages\":[{\"role\":\"system\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]},{\"role\":\"assistant\",\"tool_calls\":[{\"id\":"
    "\"c\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"c\",\"content\":\"y\"}],\"tools\":[{"
    "\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\"}}}],\"tool_choice\":\"required\"}",
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{\"type\":"
    "\"object\",\"properties\":{\"a\":{\"enum\":[1,\"b\"]}},\"required\":[\"a\"]}}},\"chat_template_kwargs\":{\"a\":[1]}}",
    "{\"prompt\":[\"ab\",[1,2,3]],\"max_tokens\":2,\"logprobs\":1,\"echo\":true,\"grammar\":\"root ::= [a-z]+\",\"dry_multiplier\":0.5,"
    "\"mirostat\":2,\"logit_bias\":[[5,1.5],[6,false]]}",
    "{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"x\"}]},{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":"
    "\"f\",\"arguments\":\"{}\"},{\"type\":\"function_call_output\",\"call_id\":\"c\",\"output\":\"y\"}],\"text\":{\"format\":{\"type\":"
    "\"json_object\"}},\"reasoning\":{\"effort\":\"low\"},\"instructions\":\"i\",\"tools\":[{\"type\":\"function\",\"name\":\"g\"}]}",
    "{\"max_tokens\":5,\"system\":\"s\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]},{\"role\":\"assistant\","
    "\"content\":[{\"type\":\"thinking\",\"thinking\":\"t\"},{\"type\":\"tool_use\",\"id\":\"u\",\"name\":\"f\",\"input\":{\"a\":1}}]},{\"role\":"
    "\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"u\",\"content\":[{\"type\":\"text\",\"text\":\"r\"}]}]}],\"stop_sequences\":"
    "[\"z\"],\"thinking\":{\"type\":\"enabled\"},\"tools\":[{\"name\":\"f\",\"input_schema\":{}}],\"tool_choice\":{\"type\":\"any\"}}",
    "{\"input\":[\"a\",\"b\"],\"encoding_format\":\"base64\"}"};
#define N_BODIES (sizeof bodies / sizeof bodies[0])
static const api apis[N_BODIES] = {API_CHAT, API_CHAT, API_CHAT, API_COMPLETIONS, API_RESPONSES, API_MESSAGES, API_EMBEDDINGS};

static int open_all(void) {
    char name[] = "fuzz_bodies", model[] = "examples/shakespeare-5m.gguf", device[] = "--device=cpu", threads[] = "--threads=1", ctx[] = "--ctx=64";
    char *arguments[] = {name, model, device, threads, ctx, NULL};
    rf_error err = {0};
    read_options(5, arguments);
    if (open_model(&err) == RF_OK) return 1;
    fprintf(stderr, "%s\n", err.text);
    return 0;
}

/* Returns 1 if the body was accepted. */
static int run(const char *data, size_t n) {
    const api kind = n ? (api)((unsigned char)data[0] % API_NONE) : API_CHAT;
    task *t = read_task(kind, 0, data + (n > 0), n - (n > 0));
    if (!t) return 0;
    const int accepted = t->status == 200;
    if (accepted ? !t->n_inputs || (kind != API_EMBEDDINGS && (!t->n_choices || !t->choices[0].n_prompt)) : !t->error[0]) {
        fprintf(stderr, "api %d, status %d: %.*s\n", kind, t->status, (int)n, data);
        exit(1);
    }
    task_free(t);
    return accepted;
}

static uint64_t state = 1;
static uint32_t random_below(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

/* Change a few places: bytes, tokens of JSON, values of another type. */
static size_t mutate(char *text, size_t n, size_t capacity) {
    static const char *const values[] = {"null", "true", "-1", "1e999", "99999999999", "\"\"", "[]", "{}", "[[]]", "\"\\u0000\"", "\"\\ud800\"",
                                         "0.5", ",", ":", "\"x\":1,", "}", "]"};
    for (uint32_t k = random_below(4) + 1; k > 0 && n > 2; k--) {
        const size_t at = 1 + random_below((uint32_t)n - 1);
        const char *value = values[random_below(sizeof values / sizeof values[0])];
        const size_t length = strlen(value), cut = random_below(12) < n - at ? random_below(12) % (n - at) : 0;
        if (random_below(4) == 0) text[at] = (char)random_below(256);
        else if (n + length < capacity) {
            memmove(text + at + length, text + at + cut, n - at - cut);
            memcpy(text + at, value, length);
            n = n - cut + length;
        }
    }
    return n;
}

#ifdef RF_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static int opened;
    if (!opened && !(opened = open_all())) return 0;
    char *copy = malloc(n + 1);
    memcpy(copy, data, n);
    run(copy, n);
    free(copy);
    return 0;
}

/* libFuzzer's own mutations seldom leave JSON whole: half of them are ours, and some inputs begin anew with a body. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t capacity);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t capacity, unsigned seed) {
    char text[4096];
    state = seed;
    if (n < 3 || random_below(16) == 0) {
        const uint32_t which = random_below(N_BODIES);
        const size_t length = (size_t)snprintf(text, sizeof text, "%c%s", (char)apis[which], bodies[which]);
        if (length <= capacity) memcpy(data, text, length), n = length;
    }
    return random_below(2) ? LLVMFuzzerMutate(data, n, capacity) : mutate((char *)data, n, capacity);
}
#else
int main(int argc, char **argv) {
    const int n_runs = argc > 1 ? atoi(argv[1]) : 1000;
    int n_accepted = 0, failed = !open_all();
    for (size_t i = 0; i < N_BODIES && !failed; i++) {
        char text[4096];
        const int n = snprintf(text, sizeof text, "%c%s", (char)apis[i], bodies[i]);
        if (!run(text, (size_t)n)) fprintf(stderr, "body %zu is refused\n", i), failed = 1;
    }
    for (int i = 0; i < n_runs && !failed; i++) {
        char text[4096];
        const uint32_t which = random_below(N_BODIES);
        const int n = snprintf(text, sizeof text, "%c%s", (char)apis[which], bodies[which]);
        n_accepted += run(text, mutate(text, (size_t)n, sizeof text));
    }
    if (g.scheduler) rf_scheduler_close(g.scheduler, NULL);
    close_model();
    printf("%d bodies, %d of them accepted\n", n_runs, n_accepted);
    return failed || n_accepted == 0 || n_accepted == n_runs;
}
#endif
