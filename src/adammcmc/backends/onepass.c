/* Algorithm 1 in one pass over the parameters, for the CPU: what onepass.py has for the GPU, with the same counter-based noise.
   Compiled when it is first asked for (compiled.py). Everything is written so that a compiler vectorises it: Philox, logarithm, sine
   and cosine are straight arithmetic on rows of numbers. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define GROUPS 64             /* calls of Philox that are made at once */
#define ROW (4 * GROUPS)      /* the normal numbers that they give */
#define SUMS 5

/* log of a number in (0, 1]: exponent and mantissa by their bits, the mantissa by a polynomial about 1 (relative error 1e-7) */
static inline float log_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    int32_t e = (bits - 0x3f3504f3) >> 23; /* so that the mantissa is in [sqrt(1/2), sqrt(2)) */
    bits -= e << 23;
    float m;
    memcpy(&m, &bits, 4);
    float f = m - 1.0f, s = f / (2.0f + f), z = s * s;
    float r = z * (0.66666667f + z * (0.4f + z * (0.28571429f + z * (0.22222222f + z * 0.18181818f))));
    return (float)e * 0.69314718f + (s * (2.0f + r));
}

/* Four N(0, 1) numbers for each of GROUPS counters: Philox-4x32-10, then Box-Muller. */
static void normals(uint64_t key, uint32_t first, float *restrict out) {
    uint32_t a[GROUPS], b[GROUPS], c[GROUPS], d[GROUPS];
    for (int i = 0; i < GROUPS; i++) {
        a[i] = first + (uint32_t)i;
        b[i] = c[i] = d[i] = 0;
    }
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < GROUPS; i++) {
            uint64_t p = (uint64_t)0xD2511F53u * a[i], q = (uint64_t)0xCD9E8D57u * c[i];
            uint32_t hi = (uint32_t)(q >> 32) ^ b[i] ^ k0, lo = (uint32_t)(p >> 32) ^ d[i] ^ k1;
            b[i] = (uint32_t)q;
            d[i] = (uint32_t)p;
            a[i] = hi;
            c[i] = lo;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int half = 0; half < 2; half++) {
        const uint32_t *u = half ? c : a, *v = half ? d : b;
        for (int i = 0; i < GROUPS; i++) {
            /* converted as two halves of 16 bits: vector units have no unsigned conversion */
            float x = ((float)(int32_t)(u[i] >> 16) * 65536.0f + (float)(int32_t)(u[i] & 0xffff) + 0.5f) * 2.3283064365386963e-10f;
            float radius = sqrtf(-2.0f * log_of(x));
            /* the angle 2 pi (v / 2^32 - 1/2), as a quarter turn number and a rest between -pi/4 and pi/4 */
            int32_t s = (int32_t)(v[i] - 0x80000000u);
            int32_t turn = (s + 0x20000000) >> 30;
            float t = ((float)(s - (int32_t)((uint32_t)turn << 30)) + 0.5f) * 1.4629180792671596e-09f, z = t * t;
            float sine = t * (1.0f + z * (-0.16666667f + z * (0.0083333310f + z * -0.00019840874f)));
            float cosine = 1.0f + z * (-0.5f + z * (0.041666638f + z * (-0.0013887799f + z * 2.4433157e-05f)));
            float first_part = (turn & 1) ? sine : cosine, second_part = (turn & 1) ? cosine : sine;
            float sign_first = ((turn + 1) & 2) ? -radius : radius, sign_second = (turn & 2) ? -radius : radius;
            out[4 * i + 2 * half] = sign_first * first_part;
            out[4 * i + 2 * half + 1] = sign_second * second_part;
        }
    }
}

/* One row of up to ROW weights. `sums`: |u|^2, u.eps, |theta|^2, |tau|^2 - |theta|^2; returns whether all gradients are sound. */
static void row_of(float *restrict p, const float *restrict g, float *restrict m1, float *restrict m2, float *restrict old,
                   const float *restrict noise, int n, const double *co, float along, float pull, double *restrict sums) {
    const float step_size = (float)co[0], eps = (float)co[1], new1 = (float)co[2], keep2 = (float)co[3], new2 = (float)co[4];
    const float sigma = (float)co[5];
    double uu = 0, ue = 0, pp = 0, change = 0;
#pragma omp simd reduction(+ : uu, ue, pp, change)
    for (int i = 0; i < n; i++) {
        float theta = p[i], grad = g[i] + pull * theta;
        int sound = fabsf(grad) < 1.8e19f; /* else the chain freezes; the moments of this weight stay clean */
        float a = m1[i] + new1 * (grad - m1[i]), b = keep2 * m2[i] + new2 * grad * grad;
        float u = step_size * a / (sqrtf(b) + eps);
        u = sound ? u : NAN;
        m1[i] = sound ? a : m1[i];
        m2[i] = sound ? b : m2[i];
        float tau = theta + sigma * noise[i] + along * u;
        old[i] = theta;
        p[i] = tau;
        uu += (double)u * u;
        ue += (double)u * noise[i];
        pp += (double)theta * theta;
        change += ((double)tau - theta) * ((double)tau + theta);
    }
    sums[0] += uu;
    sums[1] += ue;
    sums[2] += pp;
    sums[3] += change;
}

/* theta -> tau in place, m1, m2 and the copy of theta; `total`: |u|^2, |u|^2 / sigma^2, u.eps / sigma, precision |theta|^2,
   precision (|tau|^2 - |theta|^2). `chunks`: tensor and number of each stretch of `size` weights (a multiple of ROW). */
void propose(const int64_t *places, const int64_t *gradients, const int64_t *sizes, const int64_t *bases, const int32_t *chunks,
             int64_t num_chunks, int64_t size, int64_t num_tensors, const double *coefficients, uint64_t key, float along,
             double inverse_scale, double *total, int32_t threads) {
    double t0 = 0, t1 = 0, t2 = 0, t3 = 0, t4 = 0;
    /* a stretch's sums go to its own place, and are joined in order: the result does not depend on the threads */
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t k = 0; k < num_chunks; k++) {
        float noise[ROW];
        int64_t t = chunks[2 * k], start = (int64_t)chunks[2 * k + 1] * size, end = start + size;
        const double *co = coefficients + 8 * t;
        float *p = (float *)places[t], *m1 = (float *)places[num_tensors + t], *m2 = (float *)places[2 * num_tensors + t];
        float *old = (float *)places[3 * num_tensors + t];
        const float *g = (const float *)gradients[t];
        double sums[4] = {0, 0, 0, 0};
        if (end > sizes[t]) end = sizes[t];
        for (int64_t i = start; i < end; i += ROW) {
            int n = end - i < ROW ? (int)(end - i) : ROW;
            normals(key, (uint32_t)(bases[t] + i / 4), noise);
            row_of(p + i, g + i, m1 + i, m2 + i, old + i, noise, n, co, along, (float)(co[7] * inverse_scale), sums);
        }
        double *own = total + SUMS * (k + 1);
        own[0] = sums[0];
        own[1] = sums[0] * co[6] * co[6];
        own[2] = sums[1] * co[6];
        own[3] = sums[2] * co[7];
        own[4] = sums[3] * co[7];
    }
    for (int64_t k = 1; k <= num_chunks; k++) {
        t0 += total[SUMS * k];
        t1 += total[SUMS * k + 1];
        t2 += total[SUMS * k + 2];
        t3 += total[SUMS * k + 3];
        t4 += total[SUMS * k + 4];
    }
    total[0] = t0;
    total[1] = t1;
    total[2] = t2;
    total[3] = t3;
    total[4] = t4;
}
