/* cc -O2 -I. examples/ranks.c -o ranks -lm -pthread
 *
 * A process a GPU, on one host or several: each runs this program, with its number. For GPUs:
 *   hipcc -O2 -I. -c examples/ranks.c -o ranks.o
 *   hipcc -O2 -I. -DROCMFORGE_RCCL ranks.o rocmforge_kernels.hip -lrccl -o ranks
 *   ranks N I ID MODEL.gguf [layer|tensor]    rank I of N; ID: a file that all hosts see; none when it starts
 * Under mpirun (a batch system's variables have other names):
 *   mpirun -n 2 sh -c './ranks $OMPI_COMM_WORLD_SIZE $OMPI_COMM_WORLD_RANK id model.gguf tensor'
 * A program of MPI sends the id itself: MPI_Bcast(id, RF_RANK_ID_BYTES, MPI_BYTE, 0, MPI_COMM_WORLD). */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Rank 0 makes the id and leaves it in a file, under its name when it is whole; the others wait for that, a minute. */
static rf_result share_id(uint32_t rank, const char *path, uint8_t *id, rf_error *err) {
    char part[4096];
    int whole = 0;
    snprintf(part, sizeof part, "%s.part", path);
    if (rank == 0) {
        const rf_result r = rf_rank_id(id, err);
        FILE *f = r ? NULL : fopen(part, "wb");
        if (r) return r;
        whole = f && fwrite(id, RF_RANK_ID_BYTES, 1, f) == 1;
        whole = f && fclose(f) == 0 && whole && rename(part, path) == 0;
    }
    for (int tenths = 0; rank && !whole && tenths < 600; tenths++) {
        FILE *f = fopen(path, "rb");
        whole = f && fread(id, RF_RANK_ID_BYTES, 1, f) == 1;
        if (f) fclose(f);
        else usleep(100000);
    }
    if (!whole) snprintf(err->text, sizeof err->text, "no id in %.200s", path);
    return whole ? RF_OK : RF_ERR_IO;
}

static int put(const rf_piece *p, void *out) { return out && !fwrite(p->text.data, p->text.len, 1, (FILE *)out); }

int main(int argc, char **argv) {
    if (argc < 5) return fprintf(stderr, "usage: ranks N I ID MODEL.gguf [layer|tensor]\n"), 2;
    uint8_t id[RF_RANK_ID_BYTES];
    rf_device_desc dd = {.ranks = (uint32_t)atoi(argv[1]), .rank = (uint32_t)atoi(argv[2]), .rank_id = id};
    if (argc > 5 && strcmp(argv[5], "tensor") == 0) dd.split = RF_SPLIT_TENSORS;
    rf_sampler sampler; // the same seed on all ranks: they choose the same tokens
    rf_generate_desc gd = {.prompt = rf_string_of("ROMEO:\n"), .max_tokens = 64, .sampler = &sampler, .on_piece = put,
                           .user = dd.rank == 0 ? stdout : NULL};
    rf_error err = {0};
    rf_gguf *file = NULL;
    rf_device *device = NULL;
    rf_model *model = NULL;
    rf_session *session = NULL;
    rf_device_info list[64];
    uint32_t n_devices = 0, n_gpus = 0;
    char name[16];

    rf_result r = rf_device_list(list, 64, &n_devices, &err);
    for (uint32_t i = 0; !r && i < n_devices && i < 64; i++) n_gpus += list[i].is_gpu;
    snprintf(name, sizeof name, "hip:%u", dd.rank % (n_gpus ? n_gpus : 1)); // as many ranks a host as it has GPUs
    if (!r && dd.ranks > 1) r = share_id(dd.rank, argv[3], id, &err);
    if (!r) r = rf_gguf_open(argv[4], NULL, &file, &err);
    if (!r) r = rf_device_open(name, &dd, &device, &err);
    if (!r && dd.ranks > 1 && dd.rank == 0) remove(argv[3]); // all have joined
    if (!r) r = rf_model_open(file, device, NULL, &model, &err);
    if (!r) r = rf_session_open(model, NULL, &session, &err);
    if (!r) r = rf_sampler_init(&sampler, &(rf_sampler_desc){.temperature = 0.7f, .seed = 1}, &err);
    if (!r) r = rf_generate(session, &gd, NULL, &err);
    if (r) fprintf(stderr, "rank %u: %s\n", dd.rank, err.text);
    rf_session_close(session, NULL);
    rf_model_close(model, NULL);
    rf_device_close(device, NULL);
    rf_gguf_close(file, NULL);
    return r != RF_OK;
}
