/* ref_hyper.h: the matrix of HYPER with three parts in float64, for the tests of every device. */
#ifndef REF_HYPER_H
#define REF_HYPER_H

/* c[to][from], n by n: a softmax over `to` of scale * x + base, both [from][to], + eps; then rows and columns in turn are
 * divided by their sums + eps, rows `rounds` times. */
static inline void ref_hyper_matrix(double *c, uint32_t n, const float *x, double scale, const double *base, double eps, uint32_t rounds) {
    for (uint32_t from = 0; from < n; from++) {
        double sum = 0;
        for (uint32_t to = 0; to < n; to++) sum += c[to * n + from] = exp(scale * x[from * n + to] + base[from * n + to]);
        for (uint32_t to = 0; to < n; to++) c[to * n + from] = c[to * n + from] / sum + eps;
    }
    for (uint32_t line = 0; line < 2 * rounds - 1; line++)
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t first = line % 2 ? i : i * n, step = line % 2 ? n : 1;
            double sum = eps;
            for (uint32_t j = 0; j < n; j++) sum += c[first + j * step];
            for (uint32_t j = 0; j < n; j++) c[first + j * step] /= sum;
        }
}

#endif
