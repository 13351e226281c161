/* What draws and log-probabilities read a row of logits by: weights relative to the likeliest token's.
 *
 * Every sum, product and quotient is rounded on its own, and masses are whole numbers, whose sums have no
 * order. Weights are computed anew in each pass, which costs less than to keep them. Where a filter needs
 * an order, weights are copied, and halving the range of their bits finds the border: each pass keeps
 * the side that it is in.
 */
#ifndef PENSTOCK_WEIGHTS_H
#define PENSTOCK_WEIGHTS_H

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "simd.h"

#include <float.h>
#include <stdlib.h>

/* As in engine/worker/model/sampler.py. */
static const float LEAST_EXPONENT = -87;
enum { MASS_BITS = 40 };
static const double MASS_STEPS = 1LL << MASS_BITS;

enum { NUM_MAXIMA = 64 }; /* of as many parts of a row, each of which has another logit */

typedef double vec_double __attribute__((vector_size(LANES * 4)));
typedef int64_t vec_long __attribute__((vector_size(LANES * 4)));
typedef float half_vec __attribute__((vector_size(LANES * 2)));

static const uint32_t lane_bits[16] = {1u << 0,  1u << 1,  1u << 2,  1u << 3, 1u << 4,  1u << 5,
                                       1u << 6,  1u << 7,  1u << 8,  1u << 9, 1u << 10, 1u << 11,
                                       1u << 12, 1u << 13, 1u << 14, 1u << 15};

struct row {
    float *logits;
    int64_t count;
    const char *allowed; /* a bit for each token, in words of 32, or NULL: all are */
    float best, sharpness;
    int64_t best_id;
    uint32_t first, second; /* the draw's key */
};

/* A bit for each lane that is set in a mask. */
INLINE uint32_t lanes_of(vec_int mask)
{
#if LANES == 16
    return _mm512_movepi32_mask((__m512i)mask);
#elif LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits |= (uint32_t)(mask[lane] & 1) << lane;
    return bits;
#endif
}

INLINE int32_t bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Logits from token i on, as draws see them: infinity is the largest float; what is a NaN, forbidden or
 * behind the last token is impossible. */
INLINE vec visible(const struct row *r, int64_t i)
{
    const int64_t left = r->count - i;
    vec x = load_upto(r->logits + i, left, FLOAT32);
    vec_bits lanes;
    memcpy(&lanes, lane_bits, sizeof lanes);
    if (left < LANES)
        x = choose((vec_int)((lanes & ((1u << left) - 1)) != 0), x, all(-INFINITY));
    if (r->allowed != NULL) {
        uint32_t word;
        memcpy(&word, r->allowed + i / 32 * 4, sizeof word);
        x = choose((vec_int)((lanes & (word >> i % 32)) != 0), x, all(-INFINITY));
    }
    return smaller(larger(x, all(-INFINITY)), all(FLT_MAX));
}

/* The largest logit, and those of NUM_MAXIMA parts of the row. */
static float best_of(const struct row *r, float *maxima)
{
    enum { NUM_VECS = NUM_MAXIMA / LANES };
    vec tops[NUM_VECS];
    for (int v = 0; v < NUM_VECS; v++)
        tops[v] = all(-INFINITY);
    for (int64_t i = 0; i < r->count; i += NUM_MAXIMA)
#pragma GCC unroll 16
        for (int v = 0; v < NUM_VECS; v++)
            if (i + v * LANES < r->count)
                tops[v] = larger(tops[v], visible(r, i + v * LANES));
    memcpy(maxima, tops, sizeof tops);
    float best = -INFINITY;
    for (int i = 0; i < NUM_MAXIMA; i++)
        best = maxima[i] > best ? maxima[i] : best;
    return best;
}

static int falling(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* A logit that at least `place` tokens have or exceed; there may be one of no more than NUM_MAXIMA. */
static float logit_of_place(float *maxima, int64_t place)
{
    if (place > NUM_MAXIMA)
        return -INFINITY;
    qsort(maxima, NUM_MAXIMA, sizeof *maxima, falling);
    return maxima[place - 1];
}

/* What weights, which are relative to the likeliest token's, are the exponentials of. */
INLINE vec exponents(const struct row *r, vec logits) { return (logits - r->best) * r->sharpness; }

INLINE vec weights_of(vec exponents)
{
    return choose(exponents >= LEAST_EXPONENT, exponential(exponents), all(0));
}

INLINE vec_double doubles_of(half_vec some)
{
#if LANES == 16
    return (vec_double)_mm512_cvtps_pd((__m256)some);
#elif LANES == 8
    return (vec_double)_mm256_cvtps_pd((__m128)some);
#else
    return __builtin_convertvector(some, vec_double);
#endif
}

/* sums + the masses of weights, which are multiples of 2^-MASS_BITS. */
INLINE vec_long plus_masses(vec_long sums, vec weights)
{
    const double magic = 1.5 * (1LL << (52 - MASS_BITS)); /* leaves them in the low bits */
    int64_t magic_bits;
    memcpy(&magic_bits, &magic, sizeof magic_bits);
    half_vec halves[2];
    memcpy(halves, &weights, sizeof weights);
    for (int i = 0; i < 2; i++)
        sums += (vec_long)(doubles_of(halves[i]) + magic) - magic_bits;
    return sums;
}

INLINE int64_t total(vec_long sums)
{
    int64_t sum = 0;
    for (int i = 0; i < LANES / 2; i++)
        sum += sums[i];
    return sum;
}

/* The wanted ones of some weights to `to`, where there is room for all; returns their number. */
INLINE int64_t pack(float *to, vec weights, vec_int wanted)
{
#if LANES == 16
    const __mmask16 lanes = (__mmask16)lanes_of(wanted);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes, (__m512)weights));
    return __builtin_popcount(lanes);
#elif LANES == 8
    static const int32_t set_lanes[16][4] = {{0}, {0}, {1}, {0, 1}, {2}, {0, 2}, {1, 2}, {0, 1, 2},
                                             {3}, {0, 3}, {1, 3}, {0, 1, 3}, {2, 3}, {0, 2, 3},
                                             {1, 2, 3}, {0, 1, 2, 3}};
    const uint32_t lanes = lanes_of(wanted);
    int64_t count = 0;
    for (int half = 0; half < 2; half++) {
        const uint32_t set = lanes >> 4 * half & 15;
        const __m128i order = _mm_loadu_si128((const __m128i *)set_lanes[set]);
        const __m128 some = half ? _mm256_extractf128_ps((__m256)weights, 1)
                                 : _mm256_castps256_ps128((__m256)weights);
        _mm_storeu_ps(to + count, _mm_permutevar_ps(some, order));
        count += __builtin_popcount(set);
    }
    return count;
#else
    const uint32_t lanes = lanes_of(wanted);
    if (lanes == (1u << LANES) - 1)
        store(to, weights, FLOAT32);
    if (lanes == 0 || lanes == (1u << LANES) - 1)
        return lanes == 0 ? 0 : LANES;
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        to[count] = weights[lane];
        count -= wanted[lane];
    }
    return count;
#endif
}

/* Ends packed weights by lanes that are none. */
INLINE void end_packed(float *end)
{
    for (int lane = 0; lane < LANES; lane++)
        end[lane] = -1;
}

/* The natural logarithm of a number above 0, with fdlibm's coefficients. */
static double logarithm(double x)
{
    int exponent;
    double fraction = frexp(x, &exponent);
    if (fraction < 0.70710678118654752) {
        fraction *= 2;
        exponent--;
    }
    const double f = fraction - 1, s = f / (2 + f), z = s * s;
    double sum = 1.479819860511658591e-01;
    sum = sum * z + 1.531383769920937332e-01;
    sum = sum * z + 1.818357216161805012e-01;
    sum = sum * z + 2.222219843214978396e-01;
    sum = sum * z + 2.857142874366239149e-01;
    sum = sum * z + 3.999999999940941908e-01;
    sum = sum * z + 6.666666666666735130e-01;
    const double half = 0.5 * f * f;
    return exponent * 0.69314718055994531 - ((half - s * (half + z * sum)) - f);
}

struct collected {
    int64_t count, mass;
    float smallest;
};

/* Packs the weights, above 0 and not below `least`, of tokens with no smaller logit than `lowest`. */
static struct collected collect(const struct row *r, float least, float lowest, float *to)
{
    struct collected c = {0};
    vec_long masses = {0};
    vec smallest = all(1);
    least = least > FLT_MIN ? least : FLT_MIN;
    const float low = fmaxf(exponents(r, all(lowest))[0], (float)logarithm(least) - 0.01f);
    for (int64_t i = 0; i < r->count; i += LANES) {
        const vec at = exponents(r, visible(r, i));
        const vec_int is_high = at >= low;
        if (lanes_of(is_high) == 0)
            continue;
        const vec weights = weights_of(at);
        const vec_int is_wanted = is_high & (weights >= least);
        masses = plus_masses(masses, choose(is_wanted, weights, all(0)));
        smallest = smaller(smallest, choose(is_wanted, weights, all(1)));
        c.count += pack(to + c.count, weights, is_wanted);
    }
    end_packed(to + c.count);
    c.mass = total(masses);
    c.smallest = -largest_of(-smallest);
    return c;
}

/* The largest weight, not below `least`, so that weights no smaller have the wanted mass, or number;
 * overwrites them. */
INLINE float border_of(float *weights, int64_t count, float least, int64_t wanted, int is_mass)
{
    int32_t low = bits_of(least), high = bits_of(1);
    while (low < high) {
        const float middle = float_of(low + (high - low) / 2 + 1), lowest = float_of(low);
        vec_long masses = {0};
        int64_t above = 0;
        for (int64_t i = 0; i < count; i += LANES) {
            const vec some = load(weights + i, FLOAT32);
            if (is_mass)
                masses = plus_masses(masses, choose(some >= middle, some, all(0)));
            else
                above += __builtin_popcount(lanes_of(some >= middle));
        }
        above = is_mass ? total(masses) : above;
        const int is_above = above >= wanted;
        vec smallest = all(1), largest = all(0);
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i += LANES) {
            const vec some = load(weights + i, FLOAT32);
            const vec_int is_kept = is_above ? some >= middle : (some < middle) & (some >= lowest);
            smallest = smaller(smallest, choose(is_kept, some, all(1)));
            largest = larger(largest, choose(is_kept, some, all(0)));
            kept += pack(weights + kept, some, is_kept);
        }
        end_packed(weights + kept);
        count = kept;
        if (is_above) {
            low = bits_of(-largest_of(-smallest));
        } else {
            wanted -= above;
            high = bits_of(largest_of(largest));
        }
    }
    return float_of(low);
}

#endif
