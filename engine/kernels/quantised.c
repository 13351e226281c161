/* Inputs times quantised weights: codes become floats in registers, scales are applied to sums.
 *
 * A step of few inputs is bound by reading, so that a quarter of the bytes is nearly a quarter of the
 * time as long as unpacking keeps up: each lane is a row of its own, a code costs a shift and a table
 * look-up within one register (two instructions for 16 weights), and scale and minimum are applied once
 * to the sum of a group. A minimum is the same for all values of a group, so that it is multiplied by
 * the sum of the inputs. Panels are read as a few long streams, a part of the rows apart. Arithmetic is
 * float32, nothing of the inputs is rounded. Inputs in bfloat16 go through dots.c where the processor
 * has its instructions.
 */
#include "forms.h"

#if LANES == 16
enum { STREAMS = 4, MAX_INPUTS = 4 };
#elif LANES == 8
enum { STREAMS = 2, MAX_INPUTS = 2 };
#else
enum { STREAMS = 1, MAX_INPUTS = 2 };
#endif

/* Codes of a byte are unpacked two vectors at a time, which are two values or two halves of one. */
enum { BYTES_AT_ONCE = VECS == 1 ? 2 : 1 };

/* Codes of 8 bits of LANES rows as numbers. */
INLINE vec bytes_at(const char *from, int form)
{
    return form == FP8_128 ? eighths(from) : integers(from, 1);
}

/* Two vectors of them that follow each other. */
INLINE void two_at(vec *to, const char *from, int form)
{
    if (form == FP8_128) {
        eighths_of_two(to, from);
        return;
    }
    to[0] = bytes_at(from, form);
    to[1] = bytes_at(from + LANES, form);
}

/* Code number j of eight in each lane as a number: an integer, of 4 bits a sign, two of the
 * exponent and one of the mantissa (E2M1), or an entry of a table. */
INLINE vec nibbles(vec_bits packed, int j, int form)
{
#if LANES == 16
    const __m512 curve = _mm512_set_ps(113, 89, 69, 53, 38, 25, 13, 1, -10, -22, -35, -49, -65, -83,
                                       -104, -127);
    const __m512 integer = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 real = _mm512_set_ps(-6.0f, -4.0f, -3.0f, -2.0f, -1.5f, -1.0f, -0.5f, -0.0f, 6.0f,
                                      4.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f, 0.0f);
    return (vec)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)packed, 4 * j),
                                      is_curved(form) ? curve : is_float4(form) ? real : integer);
#else
    const vec_bits code = packed >> (4 * j);
    if (is_curved(form)) {
        static const float curve[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
#if LANES == 8
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(curve), (__m256i)code);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(curve + 8), (__m256i)code);
        return (vec)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
        vec value;
        for (int lane = 0; lane < LANES; lane++)
            value[lane] = curve[code[lane] & 15];
        return value;
#endif
    }
#if LANES == 8
    if (is_float4(form)) {
        const __m256 table = _mm256_set_ps(6.0f, 4.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f, 0.0f);
        const vec magnitude = (vec)_mm256_permutevar8x32_ps(table, (__m256i)code);
        return (vec)((vec_bits)magnitude | (code & 8) << 28);
    }
#endif
    if (is_float4(form)) {
        const vec_bits bits = code & 7; /* as E4M3 above: a float32 of too small an exponent */
        const vec magnitude = (vec)(bits << 22) * 0x1p126f;
        return (vec)((vec_bits)magnitude | (code & 8) << 28);
    }
    return __builtin_convertvector((vec_int)(code & 15), vec);
#endif
}

/* Code number j of eight in each lane as a number; they are number `eight` of the group, and have more
 * than four bits. */
INLINE vec long_codes(vec_bits packed, vec_bits high, int eight, int j, int form)
{
    const int more = code_bits(form) - 4, at = j / 2 * 8 + more * (2 * eight + j % 2);
    const vec_bits code = (packed >> (4 * j) & 15) | (high >> at & ((1u << more) - 1)) << 4;
    return __builtin_convertvector((vec_int)code, vec);
}

/* The same of two bits, or of three: 16 values are in one word, and their third bits in half a one. */
INLINE vec short_codes(vec_bits packed, vec_bits high, int eight, int j, int form)
{
    const int place = 2 * eight + j % 2;
    vec_bits code = packed >> (j / 2 * 8 + 2 * place) & 3;
    if (form == Q3_K)
        code |= (high >> (j / 2 * 4 + place) & 1) << 2;
    return __builtin_convertvector((vec_int)code, vec);
}

/* Codes from number k of a group on in each lane: eight of them, or all where they are short. */
INLINE void load_codes(vec_bits *packed, vec_bits *high, const char *at, int form, int k, int v)
{
    const int first = code_bits(form) < 4 ? 0 : k * CODE_ROWS / 2;
    memcpy(packed, at + first + v * LANES * WORD_BYTES, sizeof *packed);
    if (code_bits(form) > 4)
        memcpy(high, high_bits(at, form) + v * LANES * WORD_BYTES, sizeof *high);
    if (form == Q3_K)
        *high = halves_of(at + CODE_ROWS * WORD_BYTES + v * LANES * HALF_BYTES);
}

INLINE vec codes_at(vec_bits packed, vec_bits high, int eight, int j, int form)
{
    if (code_bits(form) < 4)
        return short_codes(packed, high, eight, j, form);
    return code_bits(form) == 4 ? nibbles(packed, j, form) : long_codes(packed, high, eight, j, form);
}

/* Some panels by some inputs. */
struct block {
    const char *panels[STREAMS];
    const float *x, *x_sums; /* [inputs, x_stride], [inputs, groups] */
    int64_t x_stride, depth;
};

INLINE void multiply_block(const struct block *b, vec (*out)[STREAMS][VECS], int form, int num_inputs)
{
    const int group = group_of(form);
    const int64_t num_groups = groups_of(form, b->depth);
    vec sums[MAX_INPUTS][STREAMS][VECS];
    const char *at[STREAMS], *heads[STREAMS] = {NULL};
    struct scales factors[STREAMS][VECS];
    for (int n = 0; n < STREAMS; n++)
        at[n] = b->panels[n];
#pragma GCC unroll 4
    for (int i = 0; i < num_inputs; i++)
#pragma GCC unroll 4
        for (int n = 0; n < STREAMS; n++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                sums[i][n][v] = all(0);
    for (int64_t g = 0; g < num_groups; g++) {
        const float *x = b->x + g * group;
        const int count = values_of(form, b->depth, g);
        vec part[MAX_INPUTS][STREAMS][VECS];
        if (begins_block(form, g))
#pragma GCC unroll 4
            for (int n = 0; n < STREAMS; n++) {
                heads[n] = at[n];
                at[n] += head_bytes(form);
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++)
                    factors[n][v] = factors_at(heads[n], form, v);
            }
#pragma GCC unroll 4
        for (int i = 0; i < num_inputs; i++)
#pragma GCC unroll 4
            for (int n = 0; n < STREAMS; n++)
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++)
                    part[i][n][v] = all(0);
        if (code_bits(form) < 8) {
            for (int k = 0; k < count; k += 8) {
                vec_bits packed[STREAMS][VECS], high[STREAMS][VECS];
#pragma GCC unroll 4
                for (int n = 0; n < STREAMS; n++)
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; v++)
                        load_codes(&packed[n][v], &high[n][v], at[n], form, k, v);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
                    for (int n = 0; n < STREAMS; n++)
#pragma GCC unroll 4
                        for (int v = 0; v < VECS; v++) {
                            const vec w = codes_at(packed[n][v], high[n][v], k / 8, j, form);
#pragma GCC unroll 4
                            for (int i = 0; i < num_inputs; i++)
                                part[i][n][v] = plus_product(part[i][n][v], w,
                                                             all(x[i * b->x_stride + k + j]));
                        }
            }
        } else {
            for (int k = 0; k < count; k += BYTES_AT_ONCE)
#pragma GCC unroll 4
                for (int n = 0; n < STREAMS; n++)
#pragma GCC unroll 4
                    for (int first = 0; first < BYTES_AT_ONCE * VECS; first += 2) {
                        vec w[2];
                        two_at(w, at[n] + k * CODE_ROWS + first * LANES, form);
#pragma GCC unroll 2
                        for (int j = first; j < first + 2; j++)
#pragma GCC unroll 4
                            for (int i = 0; i < num_inputs; i++)
                                part[i][n][j % VECS] =
                                    plus_product(part[i][n][j % VECS], w[j - first],
                                                 all(x[i * b->x_stride + k + j / VECS]));
                    }
        }
#pragma GCC unroll 4
        for (int n = 0; n < STREAMS; n++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) {
                const struct scales s =
                    scales_at(at[n] + code_bytes(form), form, heads[n], &factors[n][v], g, v);
#pragma GCC unroll 4
                for (int i = 0; i < num_inputs; i++) {
                    sums[i][n][v] = plus_product(sums[i][n][v], part[i][n][v], s.scale);
                    if (has_minimum(form))
                        sums[i][n][v] = plus_product(sums[i][n][v], s.minimum,
                                                     all(b->x_sums[i * num_groups + g]));
                }
            }
            at[n] += group_bytes(form);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < num_inputs; i++)
#pragma GCC unroll 4
        for (int n = 0; n < STREAMS; n++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                out[i][n][v] = sums[i][n][v];
}

#if LANES == 16
#define FOR_INPUTS(form)                                                                           \
    case form:                                                                                     \
        if (num_inputs == 1)                                                                       \
            multiply_block(b, out, form, 1);                                                       \
        else if (num_inputs == 2)                                                                  \
            multiply_block(b, out, form, 2);                                                       \
        else if (num_inputs == 3)                                                                  \
            multiply_block(b, out, form, 3);                                                       \
        else                                                                                       \
            multiply_block(b, out, form, 4);                                                       \
        return;
#else
#define FOR_INPUTS(form)                                                                           \
    case form:                                                                                     \
        if (num_inputs == 1)                                                                       \
            multiply_block(b, out, form, 1);                                                       \
        else                                                                                       \
            multiply_block(b, out, form, 2);                                                       \
        return;
#endif

static void multiply_some(const struct block *b, vec (*out)[STREAMS][VECS], int form,
                          int64_t num_inputs)
{
    switch (form) {
        FOR_INPUTS(Q4_0)
        FOR_INPUTS(Q4_1)
        FOR_INPUTS(Q4_K)
        FOR_INPUTS(Q8_0)
        FOR_INPUTS(Q5_0)
        FOR_INPUTS(Q5_1)
        FOR_INPUTS(Q5_K)
        FOR_INPUTS(Q6_K)
        FOR_INPUTS(MXFP4)
        FOR_INPUTS(IQ4_NL)
        FOR_INPUTS(IQ4_XS)
        FOR_INPUTS(Q2_K)
        FOR_INPUTS(Q3_K)
        FOR_INPUTS(NVFP4)
        FOR_INPUTS(INT4_32)
        FOR_INPUTS(INT4_128)
        FOR_INPUTS(INT8_128)
        FOR_INPUTS(INT8_ROW)
        FOR_INPUTS(FP8_128)
    }
}

/* All inputs by some panels. */
static void multiply_some_panels(const void *product, const struct panels *panels)
{
    const struct product *p = product;
    const int form = panels->scheme;
    const int64_t num_groups = groups_of(form, p->depth), count = panels->end - panels->first;
    const int64_t apart = (count + STREAMS - 1) / STREAMS;
    const int64_t num_shares = (p->num_inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    for (int64_t i = 0; i < apart; i++) {
        int64_t numbers[STREAMS];
        struct block b = {.x_stride = p->x_stride, .depth = p->depth};
        for (int n = 0; n < STREAMS; n++) {
            const int64_t number = i + n * apart;
            numbers[n] = panels->first + (number < count ? number : i); /* one is written twice */
            b.panels[n] = panels->base + numbers[n] * panels->bytes;
        }
        for (int64_t share = 0; share < num_shares; share++) {
            const int64_t input = p->num_inputs * share / num_shares;
            const int64_t next = p->num_inputs * (share + 1) / num_shares;
            vec sums[MAX_INPUTS][STREAMS][VECS];
            b.x = p->x + input * p->x_stride;
            b.x_sums = p->x_sums + input * num_groups;
            multiply_some(&b, sums, form, next - input);
            for (int64_t j = input; j < next; j++)
                for (int n = 0; n < STREAMS; n++)
                    for (int v = 0; v < VECS; v++)
                        write_rows(p, panels, j, numbers[n] * CODE_ROWS + v * LANES,
                                   sums[j - input][n][v]);
        }
    }
}

void sum_input(float *sums, const struct product *p, int64_t input)
{
    const int group = group_of(p->type);
    const int64_t num_groups = groups_of(p->type, p->depth);
    for (int64_t g = 0; g < num_groups; g++) {
        const int count = values_of(p->type, p->depth, g);
        vec sum = all(0);
        for (int k = 0; k < count; k += LANES) /* inputs are padded with zeros */
            sum += load(p->x + input * p->x_stride + g * group + k, FLOAT32);
        sums[input * num_groups + g] = sum_of(sum);
    }
}

int wants_sums(int form) { return has_minimum(form); }

void multiply_quantised(void *context, int64_t item)
{
    const struct product *p = context;
    for_panels(p, p->parts, p->num_parts, 1, panel_bytes(p->type, p->depth), item, p->num_items,
               multiply_some_panels);
}

void round_input(float *x, int64_t depth)
{
    const float scale = token_scale((const char *)x, depth, FLOAT32);
    for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t count = depth - k < LANES ? depth - k : LANES;
        const vec values = load_part(x + k, count, FLOAT32);
        store_part(x + k, token_codes(values, scale) * all(scale), count, FLOAT32);
    }
}

INLINE void unpack(float *to, float *scales, int64_t stride, const char *panel, int form, int v,
                   int64_t first, int64_t end)
{
    const int group = group_of(form);
    for (int64_t k = first; k < end; k += group) {
        const int64_t g = k / group, num_heads = heads_up_to(form, g);
        const char *at = panel + g * group_bytes(form) + num_heads * head_bytes(form), *head = panel;
        if (has_head(form) && !has_row_head(form))
            head += k / BLOCK_VALUES *
                    (head_bytes(form) + BLOCK_VALUES / group * group_bytes(form));
        const struct scales factors = factors_at(head, form, v);
        const struct scales s = scales_at(at + code_bytes(form), form, head, &factors, g, v);
        const int count = end - k < group ? (int)(end - k) : group;
        store(scales, s.scale, FLOAT32);
        store(scales + stride, s.minimum, FLOAT32);
        scales += 2 * stride;
        for (int j = 0; j < count; j++) {
            vec code;
            if (code_bits(form) < 8) {
                vec_bits packed, high;
                load_codes(&packed, &high, at, form, j / 8 * 8, v);
                code = codes_at(packed, high, j / 8, j % 8, form);
            } else {
                code = bytes_at(at + j * CODE_ROWS + v * LANES, form);
            }
            store(to + (k - first + j) * stride, code, FLOAT32);
        }
    }
}

void unpack_rows(float *to, float *scales, int64_t stride, const struct part *part, int64_t depth,
                 int64_t row, int64_t first, int64_t end)
{
    const int form = (int)part->scheme, v = (int)(row % CODE_ROWS / LANES);
    if (row / CODE_ROWS * CODE_ROWS >= part->num_rows) {
        for (int64_t k = first; k < end; k++)
            store(to + (k - first) * stride, all(0), FLOAT32);
        for (int64_t k = first; k < end; k += group_of(form), scales += 2 * stride) {
            store(scales, all(0), FLOAT32);
            store(scales + stride, all(0), FLOAT32);
        }
        return;
    }
    const char *panel =
        (const char *)(uintptr_t)part->address + row / CODE_ROWS * panel_bytes(form, depth);
#define UNPACK(form)                                                                               \
    case form:                                                                                     \
        unpack(to, scales, stride, panel, form, v, first, end);                                    \
        return;
    switch (form) {
        UNPACK(Q4_0) UNPACK(Q4_1) UNPACK(Q4_K) UNPACK(Q8_0) UNPACK(Q5_1) UNPACK(Q5_K) UNPACK(Q6_K)
        UNPACK(Q5_0) UNPACK(MXFP4) UNPACK(IQ4_NL) UNPACK(IQ4_XS) UNPACK(Q2_K) UNPACK(Q3_K)
        UNPACK(NVFP4)
        UNPACK(INT4_32) UNPACK(INT4_128) UNPACK(INT8_128)
        UNPACK(INT8_ROW) UNPACK(FP8_128)
    }
}
