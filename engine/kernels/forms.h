/* The forms of quantised matrices, as numbers: where codes, scales and minimums of a panel lie. */
#ifndef PENSTOCK_FORMS_H
#define PENSTOCK_FORMS_H

#include "quantised.h"

enum { VECS = CODE_ROWS / LANES, HALF_BYTES = 2 };

typedef uint8_t vec_u8 __attribute__((vector_size(LANES)));
typedef int8_t vec_s8 __attribute__((vector_size(LANES)));

INLINE int code_bits(int form)
{
    return form <= Q4_K || form == MXFP4 || form == INT4_32 || form == INT4_128 ? 4 : 8;
}
INLINE int group_of(int form) { return form == Q6_K ? 16 : form >= INT4_128 ? 128 : 32; }
INLINE int64_t groups_of(int form, int64_t depth)
{
    return (depth + group_of(form) - 1) / group_of(form);
}
INLINE int has_head(int form) { return form == Q4_K || form == Q5_K || form == Q6_K; }
INLINE int stores_minimum(int form)
{
    return form == Q4_1 || form == Q5_1 || form == Q4_K || form == Q5_K;
}
INLINE int stores_zero(int form) { return form == INT4_32 || form == INT4_128; }
/* Q4_0 has codes from 0 on, and all of them 8 too large. */
INLINE int has_minimum(int form) { return form == Q4_0 || stores_minimum(form) || stores_zero(form); }
INLINE int scale_size(int form)
{
    return has_head(form) || form == MXFP4 ? 1 : form >= INT4_32 ? (int)sizeof(float) : HALF_BYTES;
}
INLINE int minimum_size(int form)
{
    return stores_minimum(form) ? scale_size(form) : stores_zero(form);
}
INLINE int64_t head_bytes(int form)
{
    return has_head(form) ? CODE_ROWS * HALF_BYTES * (1 + stores_minimum(form)) : 0;
}
INLINE int64_t code_bytes(int form) { return CODE_ROWS * group_of(form) * code_bits(form) / 8; }
INLINE int64_t group_bytes(int form)
{
    return code_bytes(form) + CODE_ROWS * (scale_size(form) + minimum_size(form));
}
INLINE int64_t panel_bytes(int form, int64_t depth)
{
    return groups_of(form, depth) * group_bytes(form) + depth / BLOCK_VALUES * head_bytes(form);
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

/* LANES small integers. */
INLINE vec integers(const char *from, int is_signed)
{
    return __builtin_convertvector((vec_int)bytes_of(from, is_signed), vec);
}

/* Powers of two of LANES rows: 2 to the power of (byte - 127). */
INLINE vec powers_of_two(const char *from)
{
    const vec_bits exponents = bytes_of(from, 0);
    return (vec)(exponents << 23 | ((vec_bits)(exponents == 0) & 0x400000));
}

/* Scale and minimum of a group's rows; `at` is behind its codes. */
struct scales {
    vec scale, minimum;
};
INLINE const char *scale_zero(const char *at, int form) { return at + CODE_ROWS * scale_size(form); }
INLINE struct scales scales_at(const char *at, int form, vec head, vec head_minimum, int v)
{
    struct scales s = {.minimum = all(0)};
    const int size = scale_size(form);
    const char *scale = at + v * LANES * size, *minimum = scale + CODE_ROWS * size;
    if (has_head(form)) {
        s.scale = head * integers(scale, form == Q6_K);
        if (stores_minimum(form))
            s.minimum = all(0) - head_minimum * integers(minimum, 0);
        return s;
    }
    if (form == MXFP4)
        s.scale = powers_of_two(scale);
    else if (form >= INT4_32)
        s.scale = load(scale, FLOAT32) * all(form == FP8_128 ? 256.0f : 1.0f);
    else
        s.scale = widened_half(scale);
    if (stores_zero(form))
        s.minimum = all(0) - s.scale * integers(scale_zero(at, form) + v * LANES, 0);
    else if (form == Q4_0)
        s.minimum = s.scale * all(-8.0f);
    else if (stores_minimum(form))
        s.minimum = widened_half(minimum);
    return s;
}

/* Values in group number g of a row: fewer than in the others where the row ends in it, which rows in
 * blocks never do. Codes go on to a multiple of eight, and inputs with zeros as far (STEP of linear.c). */
INLINE int values_of(int form, int64_t depth, int64_t g)
{
    const int group = group_of(form);
    return form < INT4_32 || depth - g * group > group ? group : (int)(depth - g * group);
}

/* Sums of an input and LANES rows of a part, from number `row` on, to the output. */
INLINE void write_rows(const struct product *p, const struct part *part, int64_t input,
                       int64_t column, int64_t row, vec sums)
{
    const int64_t left = part->num_rows - row;
    float *to = p->out + input * p->out_stride + column + row;
    const float *bias = p->bias == NULL ? NULL : p->bias + column + row;
    if (left >= LANES)
        store(to, bias == NULL ? sums : sums + load(bias, FLOAT32), FLOAT32);
    else if (left > 0)
        store_part(to, bias == NULL ? sums : sums + load_part(bias, left, FLOAT32), left, FLOAT32);
}

/* Calls multiply() for the panels [first, end) of each part that are item number `item`, which is
 * one of equal shares of them all; the part's rows begin at `column` of the output. */
typedef void (*multiply_part_of)(const struct product *p, const struct part *part, int64_t column,
                                 int64_t first, int64_t end);
INLINE void for_panels_of_item(const struct product *p, int64_t item, multiply_part_of multiply)
{
    int64_t num_panels = 0, before = 0, column = 0;
    for (int64_t i = 0; i < p->num_parts; i++)
        num_panels += (p->parts[i].num_rows + CODE_ROWS - 1) / CODE_ROWS;
    const int64_t first = num_panels * item / p->num_items;
    const int64_t end = num_panels * (item + 1) / p->num_items;
    for (int64_t i = 0; i < p->num_parts; i++) {
        const struct part *part = &p->parts[i];
        const int64_t count = (part->num_rows + CODE_ROWS - 1) / CODE_ROWS;
        const int64_t from = first > before ? first - before : 0;
        const int64_t to = end < before + count ? end - before : count;
        if (from < to)
            multiply(p, part, column, from, to);
        before += count;
        column += part->num_rows;
    }
}

#endif
