/* Vectors of LANES floats in the instruction set that a file is compiled for.
 *
 * Arithmetic is the compiler's vector extension, so that one source serves every level; the few
 * operations that it does not know are written out. Elements in memory are float32, bfloat16 or
 * codes of a byte, arithmetic is float32. `type` is a constant wherever speed matters, so that no
 * branch is left.
 */
#ifndef PENSTOCK_SIMD_H
#define PENSTOCK_SIMD_H

#include "kernels.h"

#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline, unused))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t vec_int __attribute__((vector_size(LANES * 4)));
typedef uint32_t vec_bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t vec_half __attribute__((vector_size(LANES * 2)));
typedef int8_t vec_code __attribute__((vector_size(LANES)));

INLINE int64_t size_of(int type) { return type == FLOAT32 ? 4 : type == INT8 ? 1 : 2; }

/* The address of element i. */
INLINE void *at(const void *base, int64_t i, int type)
{
    return (char *)base + i * size_of(type);
}

INLINE vec all(float value) { return value - (vec){0}; }

/* sum + a * b. Written out where every register is taken: the compiler would move sums about. */
INLINE vec plus_product(vec sum, vec a, vec b)
{
#if LANES == 8
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

/* Lane by lane: a where the mask is set, else b. */
INLINE vec choose(vec_int mask, vec a, vec b)
{
    return (vec)((mask & (vec_int)a) | (~mask & (vec_int)b));
}

/* The larger of each pair; b if one is a NaN. */
INLINE vec larger(vec a, vec b)
{
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* The smaller of each pair; b if one is a NaN. */
INLINE vec smaller(vec a, vec b)
{
#if LANES == 16
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

INLINE vec load(const void *from, int type)
{
    if (type == FLOAT32) {
        vec value;
        memcpy(&value, from, sizeof value);
        return value;
    }
    if (type == INT8) {
        vec_code codes;
        memcpy(&codes, from, sizeof codes);
#if LANES == 16
        return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif LANES == 8
        return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (long long)codes)));
#else
        return __builtin_convertvector(codes, vec);
#endif
    }
    vec_half halves;
    memcpy(&halves, from, sizeof halves);
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#elif LANES == 8
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)halves), 16);
#else
    return (vec)(__builtin_convertvector(halves, vec_bits) << 16);
#endif
}

INLINE void store(void *to, vec value, int type)
{
    if (type == FLOAT32) {
        memcpy(to, &value, sizeof value);
        return;
    }
#if defined(__AVX512BF16__) && LANES == 16
    const __m256bh pairs = _mm512_cvtneps_pbh((__m512)value); /* what is denormal becomes 0 */
    memcpy(to, &pairs, sizeof pairs);
    return;
#endif
    const vec_bits bits = (vec_bits)value;
    const vec_bits nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* ties to even */
    const vec_int is_nan = value != value;
    const vec_half halves = __builtin_convertvector(
        ((vec_bits)is_nan & 0x7fc0) | (~(vec_bits)is_nan & nearest), vec_half);
    memcpy(to, &halves, sizeof halves);
}

/* The first count lanes from memory, the others 0. */
INLINE vec load_part(const void *from, int64_t count, int type)
{
    char lanes[LANES * 4] = {0};
    memcpy(lanes, from, (size_t)(count * size_of(type)));
    return load(lanes, type);
}

INLINE void store_part(void *to, vec value, int64_t count, int type)
{
    char lanes[LANES * 4];
    store(lanes, value, type);
    memcpy(to, lanes, (size_t)(count * size_of(type)));
}

/* The same; whole vectors where there are as many. */
INLINE vec load_upto(const void *from, int64_t count, int type)
{
    return count >= LANES ? load(from, type) : load_part(from, count, type);
}

INLINE void store_upto(void *to, vec value, int64_t count, int type)
{
    if (count >= LANES)
        store(to, value, type);
    else
        store_part(to, value, count, type);
}

#if LANES >= 8
/* Eight values of a row. */
INLINE __m256 eight(const char *from, int type)
{
    if (type == FLOAT32)
        return _mm256_loadu_ps((const float *)from);
    if (type == INT8)
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    const __m128i halves = _mm_loadu_si128((const __m128i *)from);
    if (type == FLOAT16)
        return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* to[k][row] = value k of eight rows, for eight values; to's rows are `stride` apart. */
INLINE void turn(float *to, int64_t stride, const char *const *rows, int64_t offset_bytes, int type)
{
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = eight(rows[i] + offset_bytes, type);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}
#endif

/* The nearest integers, ties to even, of values within -127 and 127, as codes of a byte each. */
INLINE void store_codes(int8_t *to, vec value)
{
    /* adding 1.5 * 2^23 leaves the nearest integer in the low bits */
    const vec_code codes = __builtin_convertvector((vec_int)(value + 12582912.0f), vec_code);
    memcpy(to, &codes, sizeof codes);
}

/* What is left of `value` after it has been stored as `type`. */
INLINE vec rounded(vec value, int type)
{
    if (type == FLOAT32)
        return value;
    char lanes[LANES * 4];
    store(lanes, value, type);
    return load(lanes, type);
}

INLINE float sum_of(vec value)
{
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)value);
#elif LANES == 8
    const __m128 halves =
        _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
#else
    return (value[0] + value[1]) + (value[2] + value[3]);
#endif
}

INLINE float largest_of(vec value)
{
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)value);
#endif
    float largest = value[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = value[lane] > largest ? value[lane] : largest;
    return largest;
}

/* e to the power of each lane, to about one unit in the last place; a NaN stays one. */
INLINE vec exponential(vec x)
{
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    /* x = n ln 2 + r; adding 1.5 * 2^23 leaves the nearest integer in the low bits */
    const vec shifted = x * 1.44269504f + 12582912.0f;
    const vec n = shifted - 12582912.0f;
    const vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vec sum = all(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
#if LANES == 16
    return (vec)_mm512_scalef_ps((__m512)sum, (__m512)n); /* the same product */
#else
    return sum * (vec)(((vec_int)shifted << 23) + (127 << 23));
#endif
}

#endif
