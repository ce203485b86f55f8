/* cc -O2 -I. examples/hello.c -o hello -lm -pthread */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <stdio.h>

static int put(const rf_piece *p, void *out) { return !fwrite(p->text.data, p->text.len, 1, out); }

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "examples/shakespeare-5m.gguf";
    rf_generate_desc d = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 64, .on_piece = put, .user = stdout};
    rf_session *session = NULL;
    rf_error err = {0};
    rf_result r = rf_session_open_file(path, "auto", NULL, &session, &err); // on the first GPU, else the CPU
    if (!r) r = rf_generate(session, &d, NULL, &err);                       // or .chat: messages, tools
    if (r) fprintf(stderr, "%s\n", err.text);
    rf_session_close(session, NULL);
    return r != RF_OK;
}
