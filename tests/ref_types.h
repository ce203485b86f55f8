/* ref_types.h: the values of quantized blocks in float64, written from the descriptions of the formats: the reference for
 * rf_dequantize and for every matrix product. The grids are the library's; test_kernels.c checks them by a digest. Include it
 * after the library. C11 and C++11. */
#ifndef REF_TYPES_H
#define REF_TYPES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static double half_value(uint16_t h) {
    int e = h >> 10 & 31, f = h & 1023;
    double v = e == 31 ? (f ? NAN : INFINITY) : (double)(e ? 1024 + f : f) * (1 << (e ? e : 1)) / (1 << 25); /* exact */
    return h & 0x8000 ? -v : v;
}
static uint16_t rd16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* The grids' codes as values: `bits` each, the first weight's the lowest. */
#define CODES(v) v,
static const uint16_t grid_iq2_xxs[256] = {RF_GRID_IQ2_XXS(CODES)}, grid_iq2_xs[512] = {RF_GRID_IQ2_XS(CODES)},
                      grid_iq2_s[1024] = {RF_GRID_IQ2_S(CODES)}, grid_iq1[2048] = {RF_GRID_IQ1(CODES)},
                      grid_iq3_xxs[256] = {RF_GRID_IQ3_XXS(CODES)}, grid_iq3_s[512] = {RF_GRID_IQ3_S(CODES)};
#undef CODES
static int grid2(uint32_t entry, int k) { static const int v[] = {8, 25, 43, 0}; return v[entry >> (2 * k) & 3]; }
static int grid3_xxs(uint32_t entry, int k) {
    static const int v[] = {4, 12, 20, 28, 36, 44, 52, 62};
    return v[entry >> (3 * k) & 7];
}
static int sign_of(uint32_t signs, int k) { return signs >> k & 1 ? -1 : 1; }
/* seven signs, and an eighth so that an even number is negative */
static int even_sign(uint32_t seven, int k) {
    int odd = 0;
    for (int i = 0; i < 7; i++) odd ^= (int)(seven >> i & 1);
    return k < 7 ? sign_of(seven, k) : odd ? -1 : 1;
}
static double fp4(int code) {
    static const double v[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -v[code & 7] : v[code & 7];
}
static double ue4m3(int code) {
    int e = code >> 3 & 15, k = code & 7;
    return code == 0x7f ? 0 : e ? ldexp(8 + k, e - 10) : ldexp(k, -9);
}
static int digit3(int byte, int n) {
    for (int i = 0; i < n; i++) byte = byte * 3 & 255;
    return (byte * 3 >> 8) - 1;
}

/* The same for types with blocks of 256 and grids: element i of block b. */
static double grid_value(uint32_t type, const uint8_t *b, int i) {
    int g = i / 32, l = i % 32 / 8, k = i % 8, half = i % 32 / 16;
    double d = half_value(rd16(b));
    switch (type) {
    case RF_TYPE_IQ2_XXS: {
        const uint8_t *p = b + 2 + 8 * g;
        uint32_t aux = (uint32_t)rd16(p + 4) | (uint32_t)rd16(p + 6) << 16;
        return d * (0.5 + (aux >> 28)) / 4 * grid2(grid_iq2_xxs[p[l]], k) * even_sign(aux >> (7 * l) & 127, k);
    }
    case RF_TYPE_IQ2_XS: {
        uint32_t code = rd16(b + 2 + 2 * (4 * g + l));
        return d * (0.5 + (b[66 + g] >> (4 * half) & 15)) / 4 * grid2(grid_iq2_xs[code & 511], k) *
               even_sign(code >> 9, k);
    }
    case RF_TYPE_IQ2_S: {
        uint32_t index = b[2 + 4 * g + l] | (b[66 + g] >> (2 * l) & 3u) << 8;
        return d * (0.5 + (b[74 + g] >> (4 * half) & 15)) / 4 * grid2(grid_iq2_s[index], k) *
               sign_of(b[34 + 4 * g + l], k);
    }
    case RF_TYPE_IQ3_XXS: {
        const uint8_t *p = b + 66 + 4 * g;
        uint32_t aux = (uint32_t)rd16(p) | (uint32_t)rd16(p + 2) << 16;
        return d * (0.5 + (aux >> 28)) / 2 * grid3_xxs(grid_iq3_xxs[b[2 + 8 * g + i % 32 / 4]], i % 4) *
               even_sign(aux >> (7 * l) & 127, k);
    }
    case RF_TYPE_IQ3_S: {
        uint32_t index = b[2 + 8 * g + i % 32 / 4] | (b[66 + g] >> (i % 32 / 4) & 1u) << 8;
        return d * (1 + 2 * (b[106 + g / 2] >> (4 * (g % 2)) & 15)) *
               (1 + 2 * (grid_iq3_s[index] >> (3 * (i % 4)) & 7)) * sign_of(b[74 + 4 * g + l], k);
    }
    case RF_TYPE_IQ1_S: {
        uint32_t high = rd16(b + 34 + 2 * g), index = b[2 + 4 * g + l] | (high >> (3 * l) & 7) << 8;
        return d * (2 * (high >> 12 & 7) + 1) * ((grid_iq1[index] >> (2 * k) & 3) - 1 + (high >> 15 ? -0.125 : 0.125));
    }
    default: { /* IQ1_M */
        uint32_t sc[4], high = b[32 + 2 * g + l / 2] >> (4 * (l % 2)), index = b[4 * g + l] | (high & 7) << 8;
        for (int s = 0; s < 4; s++) sc[s] = rd16(b + 48 + 2 * s);
        d = half_value((uint16_t)(sc[0] >> 12 | sc[1] >> 12 << 4 | sc[2] >> 12 << 8 | sc[3] >> 12 << 12));
        return d * (2 * (sc[g / 2] >> (6 * (g % 2) + 3 * half) & 7) + 1) *
               ((grid_iq1[index] >> (2 * k) & 3) - 1 + (high & 8 ? -0.125 : 0.125));
    }
    }
}

/* Decode a block by its description (elements in order). */
static void decode_block(uint32_t type, const uint8_t *b, double *out) {
    static const int iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    double d, m, dmin;
    int j, l, g, n;
    switch (type) {
    case RF_TYPE_F32: { float f; memcpy(&f, b, 4); out[0] = f; break; }
    case RF_TYPE_F16: out[0] = half_value(rd16(b)); break;
    case RF_TYPE_BF16: { uint32_t u = (uint32_t)rd16(b) << 16; float f; memcpy(&f, &u, 4); out[0] = f; break; }
    case RF_TYPE_Q8_0: for (j = 0; j < 32; j++) out[j] = half_value(rd16(b)) * (int8_t)b[2 + j]; break;
    case RF_TYPE_Q4_0:
        for (d = half_value(rd16(b)), j = 0; j < 16; j++)
            out[j] = d * ((b[2 + j] & 15) - 8), out[j + 16] = d * ((b[2 + j] >> 4) - 8);
        break;
    case RF_TYPE_Q4_1:
        for (d = half_value(rd16(b)), m = half_value(rd16(b + 2)), j = 0; j < 16; j++)
            out[j] = d * (b[4 + j] & 15) + m, out[j + 16] = d * (b[4 + j] >> 4) + m;
        break;
    case RF_TYPE_Q5_0:
    case RF_TYPE_Q5_1: {
        int one = type == RF_TYPE_Q5_1;
        const uint8_t *h = b + 2 + 2 * one, *q = h + 4;
        uint32_t qh = (uint32_t)rd16(h) | (uint32_t)rd16(h + 2) << 16;
        d = half_value(rd16(b)), m = one ? half_value(rd16(b + 2)) : -16 * d;
        for (j = 0; j < 16; j++) {
            out[j] = d * (int)((q[j] & 15u) | (qh >> j & 1) << 4) + m;
            out[j + 16] = d * (int)((uint32_t)(q[j] >> 4) | (qh >> (j + 16) & 1) << 4) + m;
        }
        break;
    }
    case RF_TYPE_Q4_K:
    case RF_TYPE_Q5_K: {
        int five = type == RF_TYPE_Q5_K;
        const uint8_t *s = b + 4, *qh = b + 16, *q = b + 16 + 32 * five;
        d = half_value(rd16(b)), dmin = half_value(rd16(b + 2));
        for (j = 0; j < 8; j++) {
            int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
            int mn = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
            for (l = 0; l < 32; l++) {
                int byte = q[32 * (j / 2) + l], v = j % 2 ? byte >> 4 : byte & 15;
                if (five) v += 16 * (qh[l] >> j & 1);
                out[32 * j + l] = d * sc * v - dmin * mn;
            }
        }
        break;
    }
    case RF_TYPE_Q6_K:
        for (d = half_value(rd16(b + 208)), n = 0; n < 2; n++)
            for (l = 0; l < 32; l++)
                for (g = 0; g < 4; g++) {
                    int byte = b[64 * n + 32 * (g % 2) + l], low = g < 2 ? byte & 15 : byte >> 4,
                        high = b[128 + 32 * n + l] >> (2 * g) & 3;
                    out[128 * n + 32 * g + l] =
                        d * (int8_t)b[192 + 8 * n + 2 * g + l / 16] * ((low | high << 4) - 32);
                }
        break;
    case RF_TYPE_IQ4_NL:
        for (d = half_value(rd16(b)), j = 0; j < 16; j++) out[j] = d * iq4[b[2 + j] & 15], out[j + 16] = d * iq4[b[2 + j] >> 4];
        break;
    case RF_TYPE_IQ4_XS:
        for (d = half_value(rd16(b)), j = 0; j < 256; j++) {
            g = j / 32;
            int scale = (b[4 + g / 2] >> (4 * (g % 2)) & 15) | (rd16(b + 2) >> (2 * g) & 3) << 4;
            out[j] = d * (scale - 32) * iq4[b[8 + 16 * g + j % 16] >> (j % 32 < 16 ? 0 : 4) & 15];
        }
        break;
    case RF_TYPE_MXFP4:
        for (d = ldexp(1, b[0] - 127), j = 0; j < 16; j++) out[j] = d * fp4(b[1 + j] & 15), out[j + 16] = d * fp4(b[1 + j] >> 4);
        break;
    case RF_TYPE_NVFP4:
        for (j = 0; j < 64; j++)
            out[j] = ue4m3(b[j / 16]) * fp4(b[4 + j / 16 * 8 + j % 8] >> (j % 16 < 8 ? 0 : 4) & 15);
        break;
    case RF_TYPE_Q2_K:
        for (d = half_value(rd16(b + 80)), dmin = half_value(rd16(b + 82)), j = 0; j < 256; j++)
            out[j] = d * (b[j / 16] & 15) * (b[16 + j / 128 * 32 + j % 32] >> (j / 32 % 4 * 2) & 3) - dmin * (b[j / 16] >> 4);
        break;
    case RF_TYPE_Q3_K:
        for (d = half_value(rd16(b + 108)), j = 0; j < 256; j++) {
            const uint8_t *s = b + 96;
            int i = j / 16, scale = (i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> (i / 4 * 2) & 3) << 4;
            out[j] = d * (scale - 32) *
                     ((b[32 + j / 128 * 32 + j % 32] >> (j / 32 % 4 * 2) & 3) - (b[j % 32] >> (j / 32) & 1 ? 0 : 4));
        }
        break;
    case RF_TYPE_TQ1_0:
        for (d = half_value(rd16(b + 52)), j = 0; j < 256; j++)
            out[j] = d * (j < 160   ? digit3(b[j % 32], j / 32)
                          : j < 240 ? digit3(b[32 + j % 16], (j - 160) / 16)
                                    : digit3(b[48 + j % 4], (j - 240) / 4));
        break;
    case RF_TYPE_TQ2_0:
        for (d = half_value(rd16(b + 64)), j = 0; j < 256; j++)
            out[j] = d * ((b[j / 128 * 32 + j % 32] >> (j / 32 % 4 * 2) & 3) - 1);
        break;
    case RF_TYPE_Q1_0:
        for (d = half_value(rd16(b)), j = 0; j < 128; j++) out[j] = b[2 + j / 8] >> (j % 8) & 1 ? d : -d;
        break;
    case RF_TYPE_Q2_0:
        for (d = half_value(rd16(b)), j = 0; j < 64; j++) out[j] = d * ((b[2 + j / 4] >> (j % 4 * 2) & 3) - 1);
        break;
    default:
        for (j = 0; j < 256; j++) out[j] = grid_value(type, b, j);
        break;
    }
}

#endif
