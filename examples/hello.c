/* cc -O2 -I. examples/hello.c -o hello -lm -pthread */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <stdio.h>

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "examples/shakespeare-5m.gguf", *prompt = "ROMEO:\n";
    rf_gguf *file = NULL;
    rf_device *device = NULL;
    rf_model *model = NULL;
    rf_session *session = NULL;
    const rf_tokenizer *tokenizer = NULL;
    rf_sampler sampler;
    rf_error err = {0};
    int32_t ids[64];
    uint32_t n = 0;

    rf_result r = rf_gguf_open(path, NULL, &file, &err);
    if (!r) r = rf_device_open("auto", NULL, &device, &err); // the first GPU, else the CPU
    if (!r) r = rf_model_open(file, device, NULL, &model, &err);
    if (!r) r = rf_session_open(model, NULL, &session, &err);
    if (!r) r = rf_model_get_tokenizer(model, &tokenizer, &err);
    if (!r) r = rf_sampler_init(&sampler, NULL, &err); // greedy
    if (!r) r = rf_tokenize(tokenizer, rf_string_of(prompt), RF_TOKENIZE_ADD, ids, 64, &n, &err);

    rf_detokenizer state = {.tokenizer = tokenizer};
    for (int i = 0; !r && i < 64; i++, n = 1) {
        char text[256];
        size_t n_bytes = 0;
        r = rf_session_forward(session, ids, n, NULL, &err); // the prompt, then one token at a time
        if (!r) r = rf_session_sample(session, 0, &sampler, &ids[0], &err);
        if (r || rf_token_is_end(tokenizer, ids[0])) break;
        r = rf_detokenize(&state, ids[0], 0, text, sizeof text, &n_bytes, &err);
        fwrite(text, 1, n_bytes, stdout);
    }
    if (r) fprintf(stderr, "%s\n", err.text);

    rf_session_close(session, NULL);
    rf_model_close(model, NULL);
    rf_device_close(device, NULL);
    rf_gguf_close(file, NULL);
    return r != RF_OK;
}
