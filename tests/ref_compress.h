/* ref_compress.h: a row of COMPRESS in float64, for the tests of every device. */
#ifndef REF_COMPRESS_H
#define REF_COMPRESS_H

/* More of a running softmax {maximum, sum of weights, weighted sum}, `apart` values from one to the next; nothing is in it
 * while the sum is not above 0. */
static inline void ref_compress_add(double *s, size_t apart, double max, double sum, double y) {
    const double top = s[apart] > 0 ? fmax(s[0], max) : max, keep = s[apart] > 0 ? exp(s[0] - top) : 0;
    s[0] = top;
    s[apart] = s[apart] * keep + sum * exp(max - top);
    s[2 * apart] = s[2 * apart] * keep + y * exp(max - top);
}

/* y [n] of values x and scores, both [n], or [2, n] with overlap; w of the same size for each of `unit` places. s is moved on. */
static inline void ref_compress_row(double *s, uint32_t n, uint32_t unit, int overlap, uint32_t pos, const float *x, const float *scores,
                                    const double *w, double *y) {
    const uint32_t place = pos % unit, second = overlap ? n : 0;
    w += (size_t)place * (second + n);
    for (uint32_t c = 0; c < n; c++) {
        double *own = s + c, *next = own + 3 * (size_t)n, *before = next + 3 * (size_t)n, all[3];
        for (uint32_t i = 0; place == 0 && i < 3; i++) {
            own[i * (size_t)n] = 0;
            if (overlap) before[i * (size_t)n] = next[i * (size_t)n], next[i * (size_t)n] = 0;
        }
        ref_compress_add(own, n, (double)scores[second + c] + w[second + c], 1, (double)x[second + c]);
        if (overlap) ref_compress_add(next, n, (double)scores[c] + w[c], 1, (double)x[c]);
        for (uint32_t i = 0; i < 3; i++) all[i] = own[i * (size_t)n];
        if (overlap && before[n] > 0) ref_compress_add(all, 1, before[0], before[n], before[2 * (size_t)n]);
        y[c] = all[2] / all[1];
    }
}

#endif
