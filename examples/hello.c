/* cc -O2 -I. examples/hello.c -o hello -lm -pthread */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <stdio.h>

static int show(const rf_piece *piece, void *user) {
    (void)user;
    return fwrite(piece->text.data, 1, piece->text.len, stdout) != piece->text.len;
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "examples/shakespeare-5m.gguf";
    rf_generate_desc desc = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 64, .on_piece = show};
    rf_gguf *file = NULL;
    rf_device *device = NULL;
    rf_model *model = NULL;
    rf_session *session = NULL;
    rf_error err = {0};

    rf_result r = rf_gguf_open(path, NULL, &file, &err);
    if (!r) r = rf_device_open("auto", NULL, &device, &err); // the first GPU, else the CPU
    if (!r) r = rf_model_open(file, device, NULL, &model, &err);
    if (!r) r = rf_session_open(model, NULL, &session, &err);
    if (!r) r = rf_generate(session, &desc, NULL, &err); // or .chat: messages, tools
    if (r) fprintf(stderr, "%s\n", err.text);

    rf_session_close(session, NULL);
    rf_model_close(model, NULL);
    rf_device_close(device, NULL);
    rf_gguf_close(file, NULL);
    return r != RF_OK;
}
