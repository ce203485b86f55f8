/* cc -O2 -I. examples/lazy.c -o lazy -lm -pthread */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <stdio.h>

/* lazy [MODEL.gguf]: when weights are loaded. Opening reads metadata only; a tensor is loaded the first time somebody
 * needs it, or when a program asks for its layer ahead of time; all can be evicted while the model stays open. */

static void show(const char *what, const rf_model *m) {
    rf_loading_stats s = rf_model_get_loading_stats(m);
    uint32_t n_layers = rf_model_get_info(m).n_layers;
    printf("%-32s layers ", what);
    for (uint32_t i = 0; i < n_layers; i++) putchar(rf_model_is_layer_loaded(m, i) ? '#' : '.');
    printf("  %3llu tensors, %8llu bytes, %3llu loads, %3llu evictions, %.2f ms\n",
           (unsigned long long)s.tensors_loaded, (unsigned long long)s.bytes_loaded, (unsigned long long)s.loads,
           (unsigned long long)s.evictions, s.load_seconds * 1e3);
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "examples/shakespeare-5m.gguf";
    rf_gguf *file = NULL;
    rf_device *device = NULL;
    rf_model *model = NULL;
    rf_session *session = NULL;
    rf_error err = {0};
    const uint32_t ahead[1] = {0};
    const int32_t token = 1;
    uint32_t n_in_use = 0;
    float *logits;

    rf_result r = rf_gguf_open(path, NULL, &file, &err);
    if (!r) r = rf_device_open("auto", NULL, &device, &err);
    if (!r) r = rf_model_open(file, device, NULL, &model, &err);
    if (!r) show("open", model);

    if (!r) r = rf_model_preload_layers(model, ahead, 1, &err);
    if (!r) show("preload_layers {0}", model);

    if (!r) r = rf_session_open(model, NULL, &session, &err);
    if (!r) r = rf_session_forward(session, &token, 1, &logits, &err); /* loads the rest, layer by layer */
    if (!r) show("forward", model);

    if (!r) r = rf_model_clear_device_cache(model, &n_in_use, &err);
    if (!r) show(n_in_use ? "clear_device_cache (some in use)" : "clear_device_cache", model);

    if (!r) r = rf_session_forward(session, &token, 1, &logits, &err); /* the session is still valid: loads again */
    if (!r) show("forward again", model);

    if (r) fprintf(stderr, "lazy: %s\n", err.text);
    rf_session_close(session, NULL);
    rf_model_close(model, NULL);
    rf_device_close(device, NULL);
    rf_gguf_close(file, NULL);
    return r != RF_OK;
}
