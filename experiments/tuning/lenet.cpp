/* Loss and gradient of the paper's network, 64 images at a time with the images innermost, so that all sums but the last are
   over whole vectors. Weights lie as in the torch module: each layer's matrix, then its bias. */
#include <math.h>
#include <string.h>

typedef float V __attribute__((vector_size(64)));
typedef int M __attribute__((vector_size(64)));
enum { LANES = 16, R = 4, B = 64 };

static V input[3 * 32 * 32][R], raw1[6][2][28][R], pool1[6 * 14 * 14][R], d1[6][28][R];
static V raw2[16][2][10][R], pool2[16 * 5 * 5][R], d2[16 * 10 * 10][R], h1[120][R], h2[84][R], out[10][R];
static V dpool1[6 * 14 * 14][R], dpool2[400][R], dh1[120][R], dh2[84][R], dout[10][R];
static M at1[6 * 14 * 14][R], at2[16 * 5 * 5][R]; /* which of the four pixels was the largest */
static V sums1[75][6], sums2[150][16];

static inline float total(V v) {
    float s = 0;
    for (int k = 0; k < LANES; k++) s += v[k];
    return s;
}

static void pack(const float *images, const long *rows, int count) {
    static float picked[B][3072];
    for (int b = 0; b < B; b++) memcpy(picked[b], images + rows[b < count ? b : 0] * 3072, sizeof picked[b]);
    for (int p = 0; p < 3072; p += LANES)
        for (int b = 0; b < B; b++)
            for (int k = 0; k < LANES; k++) ((float *)input[p + k])[b] = picked[b][p + k];
}

/* One row of outputs: G channels at a time over C x 5 x 5 weights. */
#define CORRELATE(NAME, C, W, O, G, WO)                                                                        \
    static void NAME(V (*x)[R], const float *w, const float *bias, int y, V (*to)[2][WO][R], int half) {       \
        for (int o = 0; o < O; o += G)                                                                         \
            for (int q = 0; q < WO; q++) {                                                                     \
                V a[G][R];                                                                                     \
                for (int g = 0; g < G; g++)                                                                    \
                    for (int r = 0; r < R; r++) a[g][r] = bias[o + g] - (V){};                                 \
                for (int c = 0; c < C; c++)                                                                    \
                    for (int i = 0; i < 5; i++)                                                                \
                        for (int j = 0; j < 5; j++) {                                                          \
                            V *from = x[(c * W + y + i) * W + q + j];                                          \
                            const float *tap = w + o * C * 25 + (c * 5 + i) * 5 + j;                           \
                            _Pragma("GCC unroll 6") for (int g = 0; g < G; g++)                                \
                                _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)                            \
                                    a[g][r] += tap[g * C * 25] * from[r];                                      \
                        }                                                                                      \
                for (int g = 0; g < G; g++)                                                                    \
                    for (int r = 0; r < R; r++) to[o + g][half][q][r] = a[g][r];                               \
            }                                                                                                  \
    }
CORRELATE(correlate1, 3, 32, 6, 6, 28)
CORRELATE(correlate2, 6, 14, 16, 4, 10)

/* Two rows of outputs to one of their maxima, at least zero; ties go to the first. */
#define POOL(NAME, O, WO)                                                                                      \
    static void NAME(V (*from)[2][WO][R], int y, V (*to)[R], M (*at)[R]) {                                     \
        for (int o = 0; o < O; o++)                                                                            \
            for (int q = 0; q < WO / 2; q++)                                                                   \
                for (int r = 0; r < R; r++) {                                                                  \
                    V best = from[o][0][2 * q][r];                                                             \
                    M k = {};                                                                                  \
                    for (int n = 1; n < 4; n++) {                                                              \
                        V v = from[o][n / 2][2 * q + n % 2][r];                                                \
                        M more = v > best;                                                                     \
                        best = more ? v : best;                                                                \
                        k = more ? n - (M){} : k;                                                              \
                    }                                                                                          \
                    M up = best > 0;                                                                           \
                    to[(o * (WO / 2) + y) * (WO / 2) + q][r] = up ? best : (V){};                              \
                    at[(o * (WO / 2) + y) * (WO / 2) + q][r] = up ? k : -1 - (M){};                            \
                }                                                                                              \
    }
POOL(pooled1, 6, 28)
POOL(pooled2, 16, 10)

static void linear(V (*x)[R], int K, const float *w, const float *bias, int O, V (*to)[R], int relu) {
    for (int o = 0; o < O; o += 2) {
        V a[2][R];
        for (int r = 0; r < R; r++) a[0][r] = bias[o] - (V){}, a[1][r] = bias[o + 1] - (V){};
        for (int k = 0; k < K; k++)
            for (int r = 0; r < R; r++) {
                a[0][r] += w[o * K + k] * x[k][r];
                a[1][r] += w[(o + 1) * K + k] * x[k][r];
            }
        for (int g = 0; g < 2; g++)
            for (int r = 0; r < R; r++) to[o + g][r] = relu ? (a[g][r] > 0 ? a[g][r] : (V){}) : a[g][r];
    }
}

/* From the gradient by a linear layer's outputs those by its weights and, where they are wanted, by its inputs. */
static void linear_back(V (*x)[R], int K, const float *w, int O, V (*d)[R], V (*dx)[R], float *dw, float *db) {
    for (int o = 0; o < O; o++) {
        db[o] += total(d[o][0] + d[o][1] + d[o][2] + d[o][3]);
        for (int k = 0; k < K; k++) {
            V a = d[o][0] * x[k][0] + d[o][1] * x[k][1] + d[o][2] * x[k][2] + d[o][3] * x[k][3];
            dw[o * K + k] += total(a);
        }
    }
    for (int k = 0; k < K; k += 2) {
        V a[2][R] = {};
        for (int o = 0; o < O; o++)
            for (int r = 0; r < R; r++) {
                a[0][r] += w[o * K + k] * d[o][r];
                a[1][r] += w[o * K + k + 1] * d[o][r];
            }
        for (int g = 0; g < 2; g++)
            for (int r = 0; r < R; r++) dx[k + g][r] = x[k + g][r] > 0 ? a[g][r] : (V){};
    }
}

/* What one row of gradients by the outputs adds to those by the weights: G channels and five taps at a time. */
#define WEIGH(NAME, C, W, O, G, WO)                                                                            \
    static void NAME(V (*x)[R], V *d, int stride, int y, V (*sums)[O]) {                                       \
        for (int c = 0; c < C; c++)                                                                            \
            for (int i = 0; i < 5; i++)                                                                        \
                for (int o = 0; o < O; o += G) {                                                               \
                    V a[5][G];                                                                                 \
                    V(*s)[O] = sums + (c * 5 + i) * 5;                                                         \
                    V *row = x[(c * W + y + i) * W], *dd = d + o * stride;                                     \
                    for (int j = 0; j < 5; j++)                                                                \
                        for (int g = 0; g < G; g++) a[j][g] = s[j][o + g];                                     \
                    for (int q = 0; q < WO * R; q++)                                                           \
                        _Pragma("GCC unroll 5") for (int j = 0; j < 5; j++)                                    \
                            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++)                                \
                                a[j][g] += row[q + j * R] * dd[g * stride + q];                                \
                    for (int j = 0; j < 5; j++)                                                                \
                        for (int g = 0; g < G; g++) s[j][o + g] = a[j][g];                                     \
                }                                                                                              \
    }
WEIGH(weigh1, 3, 32, 6, 3, 28)
WEIGH(weigh2, 6, 14, 16, 4, 10)

static void back_through_second(const float *w) {
    for (int y = 0; y < 14; y++)
        for (int q = 0; q < 14; q++) {
            V a[6][R] = {};
            int above = y > 9 ? y - 9 : 0, below = y < 4 ? y : 4, left = q > 9 ? q - 9 : 0, right = q < 4 ? q : 4;
            for (int o = 0; o < 16; o++)
                for (int i = above; i <= below; i++)
                    for (int j = left; j <= right; j++) {
                        V *d = d2[(o * 10 + y - i) * 10 + q - j];
                        const float *tap = w + o * 150 + i * 5 + j;
                        _Pragma("GCC unroll 6") for (int c = 0; c < 6; c++)
                            _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) a[c][r] += tap[c * 25] * d[r];
                    }
            for (int c = 0; c < 6; c++)
                for (int r = 0; r < R; r++) dpool1[(c * 14 + y) * 14 + q][r] = a[c][r];
        }
}

/* The sum of count losses, each times scale; *right more are classed rightly; and the sum of their gradients is added to dw. */
extern "C" double lenet(const float *w, const float *images, const long *labels, const long *rows, int count, float scale, float *dw,
             long *right) {
    enum { W2 = 456, F1 = W2 + 2416, F2 = F1 + 48120, F3 = F2 + 10164 };
    double loss = 0;
    memset(sums1, 0, sizeof sums1), memset(sums2, 0, sizeof sums2);
    for (int first = 0; first < count; first += B) {
        int here = count - first < B ? count - first : B;
        pack(images, rows + first, here);
        for (int y = 0; y < 28; y++) {
            correlate1(input, w, w + 450, y, raw1, y % 2);
            if (y % 2) pooled1(raw1, y / 2, pool1, at1);
        }
        for (int y = 0; y < 10; y++) {
            correlate2(pool1, w + W2, w + W2 + 2400, y, raw2, y % 2);
            if (y % 2) pooled2(raw2, y / 2, pool2, at2);
        }
        linear(pool2, 400, w + F1, w + F1 + 48000, 120, h1, 1);
        linear(h1, 120, w + F2, w + F2 + 10080, 84, h2, 1);
        linear(h2, 84, w + F3, w + F3 + 840, 10, out, 0);
        memset(dout, 0, sizeof dout);
        for (int b = 0; b < here; b++) {
            int best = 0, label = labels[rows[first + b]];
            float sum = 0, p[10];
            for (int o = 0; o < 10; o++) p[o] = ((float *)out[o])[b], best = p[o] > p[best] ? o : best;
            float most = p[best], own = p[label];
            for (int o = 0; o < 10; o++) sum += p[o] = expf(p[o] - most);
            loss += scale * (double)(logf(sum) + most - own);
            *right += best == label;
            for (int o = 0; o < 10; o++) ((float *)dout[o])[b] = scale * (p[o] / sum - (o == label));
        }
        if (!dw) continue;
        linear_back(h2, 84, w + F3, 10, dout, dh2, dw + F3, dw + F3 + 840);
        linear_back(h1, 120, w + F2, 84, dh2, dh1, dw + F2, dw + F2 + 10080);
        linear_back(pool2, 400, w + F1, 120, dh1, dpool2, dw + F1, dw + F1 + 48000);
        for (int o = 0; o < 16; o++) {
            V sum = {};
            for (int p = 0; p < 25; p++)
                for (int r = 0; r < R; r++) {
                    V g = dpool2[o * 25 + p][r];
                    M k = at2[o * 25 + p][r];
                    sum += g;
                    for (int n = 0; n < 4; n++)
                        d2[(o * 10 + p / 5 * 2 + n / 2) * 10 + p % 5 * 2 + n % 2][r] = k == n ? g : (V){};
                }
            dw[W2 + 2400 + o] += total(sum); /* dpool2 is zero where the output was cut off */
        }
        for (int y = 0; y < 10; y++) weigh2(pool1, d2[y * 10], 100 * R, y, sums2);
        back_through_second(w + W2);
        for (int y = 0; y < 28; y++) {
            for (int o = 0; o < 6; o++)
                for (int q = 0; q < 28; q++)
                    for (int r = 0; r < R; r++) {
                        int p = (o * 14 + y / 2) * 14 + q / 2;
                        d1[o][q][r] = at1[p][r] == y % 2 * 2 + q % 2 ? dpool1[p][r] : (V){};
                    }
            weigh1(input, d1[0][0], 28 * R, y, sums1);
            for (int o = 0; o < 6; o++) {
                V sum = {};
                for (int q = 0; q < 28; q++)
                    for (int r = 0; r < R; r++) sum += d1[o][q][r];
                dw[450 + o] += total(sum);
            }
        }
    }
    if (dw) {
        for (int k = 0; k < 75; k++)
            for (int o = 0; o < 6; o++) dw[o * 75 + k] += total(sums1[k][o]);
        for (int k = 0; k < 150; k++)
            for (int o = 0; o < 16; o++) dw[W2 + o * 150 + k] += total(sums2[k][o]);
    }
    return loss;
}
