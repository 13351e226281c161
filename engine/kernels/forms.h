/* The forms of quantised matrices, as numbers: where codes, scales and minimums of a panel lie. */
#ifndef PENSTOCK_FORMS_H
#define PENSTOCK_FORMS_H

#include "quantised.h"

enum { VECS = CODE_ROWS / LANES, HALF_BYTES = 2, WORD_BYTES = 4 };

typedef uint8_t vec_u8 __attribute__((vector_size(LANES)));
typedef int8_t vec_s8 __attribute__((vector_size(LANES)));

INLINE int code_bits(int form)
{
    return form == Q5_0 || form == Q5_1 || form == Q5_K    ? 5
           : form == Q6_K                                  ? 6
           : form == Q2_K                                  ? 2
           : form == Q3_K                                  ? 3
           : form <= Q4_K || (form >= MXFP4 && form <= INT4_128) ? 4
                                                           : 8;
}
/* Forms whose codes are small floats, E2M1. */
INLINE int is_float4(int form) { return form == MXFP4 || form == NVFP4; }
/* Forms whose codes are numbers of a table's entries. */
INLINE int is_curved(int form) { return form == IQ4_NL || form == IQ4_XS; }
INLINE int group_of(int form)
{
    return form == Q6_K || form == Q2_K || form == Q3_K || form == NVFP4 ? 16 : form >= INT4_128 && form != INT8_ROW ? 128 : 32;
}
INLINE int64_t groups_of(int form, int64_t depth)
{
    return (depth + group_of(form) - 1) / group_of(form);
}
/* Forms whose scales and minimums are six bits each, all of a block in its head. */
INLINE int has_sixes(int form) { return form == Q4_K || form == Q5_K; }
/* Forms whose scale is a small integer times the block's head. */
INLINE int has_small_scales(int form) { return form == Q6_K || form == Q3_K || form == IQ4_XS; }
/* Forms with one head for a whole row. */
INLINE int has_row_head(int form) { return form == INT8_ROW || form == NVFP4; }
INLINE int has_head(int form)
{
    return has_row_head(form) || has_sixes(form) || has_small_scales(form) || form == Q2_K;
}
INLINE int stores_minimum(int form)
{
    return form == Q4_1 || form == Q5_1 || form == Q2_K || has_sixes(form);
}
INLINE int stores_zero(int form) { return form == INT4_32 || form == INT4_128; }
/* What all codes of a form are too large by, which has them from 0 on. */
INLINE int zero_of(int form)
{
    return form == Q4_0 ? 8 : form == Q5_0 ? 16 : form == Q6_K ? 32 : form == Q3_K ? 4 : 0;
}
INLINE int has_minimum(int form)
{
    return zero_of(form) || stores_minimum(form) || stores_zero(form);
}
INLINE int scale_size(int form)
{
    return has_sixes(form) || form == INT8_ROW ? 0
           : is_float4(form) || form == Q2_K || has_small_scales(form) ? 1
           : form >= INT4_32                   ? (int)sizeof(float)
                                               : HALF_BYTES;
}
INLINE int minimum_size(int form)
{
    return form == Q2_K ? 0 : stores_minimum(form) ? scale_size(form) : stores_zero(form);
}
INLINE int64_t head_bytes(int form)
{
    return form == INT8_ROW ? CODE_ROWS * (int64_t)sizeof(float)
           : form == NVFP4  ? CODE_ROWS * 2 * (int64_t)sizeof(float)
           : has_sixes(form) ? CODE_ROWS * (2 * HALF_BYTES + 3 * WORD_BYTES)
           : form == Q2_K    ? CODE_ROWS * 2 * HALF_BYTES
           : has_head(form)  ? CODE_ROWS * HALF_BYTES
                             : 0;
}
/* Heads of a row up to group number g, that of its own block among them. */
INLINE int64_t heads_up_to(int form, int64_t g)
{
    return !has_head(form) ? 0 : has_row_head(form) ? 1 : g * group_of(form) / BLOCK_VALUES + 1;
}
INLINE int begins_block(int form, int64_t g)
{
    return has_head(form) && (g == 0 || heads_up_to(form, g) > heads_up_to(form, g - 1));
}
INLINE int64_t code_bytes(int form) { return CODE_ROWS * group_of(form) * code_bits(form) / 8; }
INLINE int64_t group_bytes(int form)
{
    return code_bytes(form) + CODE_ROWS * (scale_size(form) + minimum_size(form));
}
INLINE int64_t panel_bytes(int form, int64_t depth)
{
    const int64_t num_groups = groups_of(form, depth);
    return num_groups * group_bytes(form) + heads_up_to(form, num_groups - 1) * head_bytes(form);
}

/* LANES bytes as integers of 32 bits. Written out: gcc takes them apart byte by byte. */
INLINE vec_bits bytes_of(const char *from, int is_signed)
{
#if LANES == 16
    const __m128i bytes = _mm_loadu_si128((const void *)from);
    return (vec_bits)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif LANES == 8
    const __m128i bytes = _mm_loadl_epi64((const void *)from);
    return (vec_bits)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    vec_s8 with_sign;
    vec_u8 without;
    memcpy(&with_sign, from, sizeof with_sign);
    memcpy(&without, from, sizeof without);
    return is_signed ? (vec_bits)__builtin_convertvector(with_sign, vec_int)
                     : __builtin_convertvector(without, vec_bits);
#endif
}

/* LANES integers of two bytes, without sign. */
INLINE vec_bits halves_of(const char *from)
{
#if LANES == 16
    return (vec_bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
#elif LANES == 8
    return (vec_bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
#else
    uint16_t halves[LANES];
    vec_bits wide = {0};
    memcpy(halves, from, sizeof halves);
    for (int lane = 0; lane < LANES; lane++)
        wide[lane] = halves[lane];
    return wide;
#endif
}

/* LANES small integers. */
INLINE vec integers(const char *from, int is_signed)
{
    return __builtin_convertvector((vec_int)bytes_of(from, is_signed), vec);
}

/* The lowest four bits of LANES integers as numbers. */
INLINE vec small_number(vec_bits integer)
{
#if LANES == 16
    return (vec)_mm512_permutexvar_ps((__m512i)integer,
                                      _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
#else
    return __builtin_convertvector((vec_int)(integer & 15), vec);
#endif
}

/* Powers of two of LANES rows: 2 to the power of (byte - 127). */
INLINE vec powers_of_two(const char *from)
{
    const vec_bits exponents = bytes_of(from, 0);
    return (vec)(exponents << 23 | ((vec_bits)(exponents == 0) & 0x400000));
}

/* LANES numbers of 8 bits, sign, exponent and three of the mantissa (E4M3), 256 times too small, so
 * that they are float16's. */
INLINE vec eighths(const char *from)
{
#if LANES == 16
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
    const __m256i halves = _mm256_slli_epi16(wide, 7);
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbf80)));
#elif LANES == 8
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)from));
    const __m128i halves = _mm_slli_epi16(wide, 7);
    return (vec)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)0xbf80)));
#else
    vec_u8 bytes;
    memcpy(&bytes, from, sizeof bytes);
    const vec_bits bits = __builtin_convertvector(bytes, vec_bits);
    const vec magnitude = (vec)((bits & 0x7f) << 20) * 0x1p112f;
    return (vec)((vec_bits)magnitude | (bits & 0x80) << 24);
#endif
}

/* The same of two vectors that follow each other: most of the work is done for both at once. */
INLINE void eighths_of_two(vec *to, const char *from)
{
#if LANES == 16
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
    const __m512i halves =
        _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
    to[0] = (vec)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    to[1] = (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#elif LANES == 8
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
    const __m256i halves =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
    to[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    to[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#else
    to[0] = eighths(from);
    to[1] = eighths(from + LANES);
#endif
}

/* Scale and minimum of a group's rows; `at` is behind its codes. */
struct scales {
    vec scale, minimum;
};
INLINE const char *scale_zero(const char *at, int form) { return at + CODE_ROWS * scale_size(form); }

/* Of group number i of a block's eight, whose numbers of six bits lie in 12 bytes of a row as GGUF has
 * them: the first four groups' lowest in a byte each, the others' in a byte's halves and in what is left
 * above the first four. A word of four bytes of all rows, then the next. */
INLINE struct scales sixes_at(const char *words, int i, int v)
{
    vec_bits low, middle, high;
    memcpy(&low, words + v * LANES * WORD_BYTES, sizeof low);
    memcpy(&middle, words + (CODE_ROWS + v * LANES) * WORD_BYTES, sizeof middle);
    memcpy(&high, words + (2 * CODE_ROWS + v * LANES) * WORD_BYTES, sizeof high);
    const int shift = i % 4 * 8;
    vec_bits scale = low >> shift & 63, minimum = middle >> shift & 63;
    if (i >= 4) {
        scale = (high >> shift & 15) | (low >> (shift + 2) & 48);
        minimum = (high >> (shift + 4) & 15) | (middle >> (shift + 2) & 48);
    }
    return (struct scales){__builtin_convertvector((vec_int)scale, vec),
                           __builtin_convertvector((vec_int)minimum, vec)};
}

/* Numbers of a block's head that the scales and minimums of its groups are multiplied by. */
INLINE struct scales factors_at(const char *head, int form, int v)
{
    struct scales s = {.scale = all(0), .minimum = all(0)};
    if (has_sixes(form) || form == Q2_K)
        s.minimum -= widened_half(head + (CODE_ROWS + v * LANES) * HALF_BYTES);
    if (has_sixes(form) || form == Q2_K || has_small_scales(form))
        s.scale = widened_half(head + v * LANES * HALF_BYTES);
    return s;
}

/* Of group number g; `head` is its block's, and `factors` are what factors_at() makes of it. */
INLINE struct scales scales_at(const char *at, int form, const char *head,
                               const struct scales *factors, int64_t g, int v)
{
    struct scales s = {.minimum = all(0)};
    const int size = scale_size(form);
    const char *scale = at + v * LANES * size, *minimum = scale + CODE_ROWS * size;
    if (has_sixes(form) || form == Q2_K) {
        if (has_sixes(form)) {
            s = sixes_at(head + 2 * CODE_ROWS * HALF_BYTES, (int)(g % 8), v);
        } else { /* a byte's halves */
            const vec_bits both = bytes_of(scale, 0);
            s.scale = small_number(both);
            s.minimum = small_number(both >> 4);
        }
        s.scale *= factors->scale;
        s.minimum *= factors->minimum;
        return s;
    }
    if (form == INT8_ROW)
        s.scale = load(head + v * LANES * sizeof(float), FLOAT32);
    else if (has_small_scales(form))
        s.scale = factors->scale * integers(scale, 1);
    else if (form == NVFP4)
        s.scale = eighths(scale) * all(256.0f) * load(head + v * LANES * sizeof(float), FLOAT32) /
                  load(head + (CODE_ROWS + v * LANES) * sizeof(float), FLOAT32);
    else if (form == MXFP4)
        s.scale = powers_of_two(scale);
    else if (form >= INT4_32)
        s.scale = load(scale, FLOAT32) * all(form == FP8_128 ? 256.0f : 1.0f);
    else
        s.scale = widened_half(scale);
    if (stores_zero(form))
        s.minimum = all(0) - s.scale * integers(scale_zero(at, form) + v * LANES, 0);
    else if (zero_of(form))
        s.minimum = s.scale * all((float)-zero_of(form));
    else if (stores_minimum(form))
        s.minimum = widened_half(minimum);
    return s;
}

/* Of codes of more than four bits what is above them, in a lane for each row behind the others: bits
 * 8 * b + n * w and so on, n of them, belong to value 8 * (w / 2) + 2 * b + w % 2 of the group, so that
 * those of four values that lie in one vector of bytes are found by one shift. */
INLINE const char *high_bits(const char *codes, int form) { return codes + CODE_ROWS * group_of(form) / 2; }

/* What an input is divided by, so that its values are integers from -127 to 127: its largest over 127;
 * 0 if that is too small; NaN if a value is no number. */
INLINE float token_scale(const char *x, int64_t depth, int type)
{
    vec_bits largest = {0};
    for (int64_t k = 0; k < depth; k += LANES) {
        const vec values = depth - k < LANES ? load_part(x + k * size_of(type), depth - k, type)
                                             : load(x + k * size_of(type), type);
        const vec_bits magnitude = (vec_bits)values & 0x7fffffff;
        const vec_bits is_larger = (vec_bits)(magnitude > largest);
        largest = (is_larger & magnitude) | (~is_larger & largest);
    }
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits = largest[lane] > bits ? largest[lane] : bits;
    float value;
    memcpy(&value, &bits, sizeof value);
    return bits >= 0x7f800000 ? NAN : value / 127 < 0x1p-126f ? 0 : value / 127;
}

/* Those integers, to the nearest, ties to even. */
INLINE vec token_codes(vec x, float scale)
{
    return x / all(scale == 0 ? 1 : scale) + 12582912.0f - 12582912.0f;
}

/* Values in group number g of a row: fewer than in the others where the row ends in it, which rows in
 * blocks never do. Codes go on to a multiple of eight, and inputs with zeros as far (STEP of linear.c). */
INLINE int values_of(int form, int64_t depth, int64_t g)
{
    const int group = group_of(form);
    return form < INT4_32 || depth - g * group > group ? group : (int)(depth - g * group);
}

/* Sums of an input and LANES rows of a part, from number `row` on, to the output. */
INLINE void write_rows(const struct product *p, const struct panels *panels, int64_t input,
                       int64_t row, vec sums)
{
    const int64_t left = panels->num_rows - row, column = panels->column + row;
    float *to = p->out + input * p->out_stride + column;
    const float *bias = p->bias == NULL ? NULL : p->bias + column;
    if (left >= LANES)
        store(to, bias == NULL ? sums : sums + load(bias, FLOAT32), FLOAT32);
    else if (left > 0)
        store_part(to, bias == NULL ? sums : sums + load_part(bias, left, FLOAT32), left, FLOAT32);
}

#endif
