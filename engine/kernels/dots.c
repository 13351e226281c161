/* Inputs in bfloat16 times quantised weights, by dots of bytes.
 *
 * Codes are bytes, four of a row in each lane, so that one instruction makes 64 products, where
 * codes as floats make 16; unpacking takes three instructions for 128 of 4 bits. A unit of 32 inputs
 * becomes integers of two bytes, high * 256 + low, times one power of two; each byte has dots of its
 * own. An input of bfloat16, whose values have 8 bits, is exactly such an integer where it is not less
 * than a 64th of its unit's largest; what is smaller is rounded by at most 2^-14 of that, a 128th of
 * what the last bit of the largest is worth. Sums of a unit are exact, and added as float32.
 *
 * Where a form's products are those of inputs of one byte (rounds_inputs), a row and an input have one
 * scale each: sums stay integers to the end of the row, and are exact whatever the order.
 *
 * What is always taken from codes is taken from the sums before they begin; minimums and zeros, which
 * differ by row, are multiplied by the sum of the inputs. Codes of 16 rows and 32 values stay in
 * registers while all inputs pass by. One input alone meets four panels at once: each of its integers
 * is read once for the four, and sums stay in registers. Every way adds in the same order.
 */
#include "forms.h"

#if LANES == 16 && defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512vnni,avx512vbmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512vnni,avx512vbmi")
#endif

enum {
    STREAMS = 4, /* panels side by side, as long streams */
    TOGETHER = 2, /* of them, whose codes are in registers at the same time */
    AHEAD_BYTES = 4096, /* fetched while others are multiplied; panels of a stream follow each other */
    AT_ONCE = 32, /* inputs, whose sums stay in the first cache */
};

int has_dots(int form, int64_t type)
{
    static int is_known, is_there; /* the same whoever writes it */
    if (!__atomic_load_n(&is_known, __ATOMIC_ACQUIRE)) {
        __builtin_cpu_init();
        const int found =
            __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
        __atomic_store_n(&is_there, found, __ATOMIC_RELAXED);
        __atomic_store_n(&is_known, 1, __ATOMIC_RELEASE);
    }
    if (!__atomic_load_n(&is_there, __ATOMIC_RELAXED))
        return 0;
    return rounds_inputs(form) || (type == BFLOAT16 && is_quantised(form) && form != FP8_128);
}

INLINE int values_of_unit(int form) { return group_of(form) < UNIT ? group_of(form) : UNIT; }

/* By how much bytes are larger than codes, which may be negative: dots want one of two without sign. */
INLINE int excess_of(int form)
{
    return is_float4(form) ? 12 : is_curved(form) ? 128 : code_bits(form) == 8 ? 128 : zero_of(form);
}

INLINE int64_t units_of(int form, int64_t depth)
{
    return (depth + values_of_unit(form) - 1) / values_of_unit(form);
}

/* 16 integers of two bytes: the higher ones, and the lower, which have a sign, too. */
INLINE void split(__m512i integers, __m128i *high, __m128i *low)
{
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(integers, _mm512_set1_epi32(128)), 8);
    *high = _mm512_cvtepi32_epi8(upper);
    *low = _mm512_cvtepi32_epi8(_mm512_sub_epi32(integers, _mm512_slli_epi32(upper, 8)));
}

/* Up to 32 values of an input as a unit. */
INLINE void fill_unit(struct unit *unit, const char *x, int64_t count, int form)
{
    vec values[2];
    values[0] = count < LANES ? load_part(x, count, BFLOAT16) : load(x, BFLOAT16);
    x += LANES * 2;
    values[1] = count >= UNIT ? load(x, BFLOAT16)
                              : load_part(x, count < LANES ? 0 : count - LANES, BFLOAT16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i larger = _mm512_max_epi32(_mm512_and_si512((__m512i)values[0], magnitude),
                                            _mm512_and_si512((__m512i)values[1], magnitude));
    int exponent = _mm512_reduce_max_epi32(larger) >> 23;
    const int is_finite = exponent < 255;
    exponent = exponent < 32 ? 32 : exponent; /* neither number below is a denormal */
    const uint32_t up = (uint32_t)(127 + 127 + 13 - exponent) << 23;
    const uint32_t down = (uint32_t)(exponent - 13) << 23;
    float factor;
    memcpy(&factor, &up, sizeof factor);
    memcpy(&unit->scale, is_finite ? &down : (const uint32_t[]){0x7fc00000}, sizeof unit->scale);
    /* even codes of eight, then odd ones, as a mask finds them */
    const __m128i order = code_bits(form) < 8
                              ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                              : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        __m512i integers = _mm512_cvtps_epi32((__m512)(values[i] * factor));
        if (!is_finite)
            integers = _mm512_setzero_si512();
        sum += _mm512_reduce_add_epi32(integers);
        __m128i high, low;
        split(integers, &high, &low);
        _mm_storeu_si128((__m128i *)(unit->high + 4 * i), _mm_shuffle_epi8(high, order));
        _mm_storeu_si128((__m128i *)(unit->low + 4 * i), _mm_shuffle_epi8(low, order));
    }
    unit->sum = (float)sum * unit->scale;
    unit->excess = -excess_of(form) * sum;
}

/* Up to 32 values of an input as one byte each; `scale` is the whole input's. */
INLINE void fill_bytes(struct unit *unit, const char *x, int64_t count, int type, float scale)
{
    int sum = 0;
    for (int i = 0; i < 2; i++, count -= LANES, x += LANES * size_of(type)) {
        const vec values = count >= LANES ? load(x, type) : load_part(x, count < 0 ? 0 : count, type);
        __m512i integers = _mm512_cvtps_epi32((__m512)token_codes(values, scale));
        if (isnan(scale))
            integers = _mm512_setzero_si512();
        sum += _mm512_reduce_add_epi32(integers);
        _mm_storeu_si128((__m128i *)(unit->high + 4 * i), _mm512_cvtepi32_epi8(integers));
    }
    unit->scale = scale;
    unit->excess = -excess_of(INT8_ROW) * sum;
}

void fill_units(struct unit *units, const struct product *p, const char *x, int type, int64_t input)
{
    const int form = p->type, num_values = values_of_unit(form);
    const int64_t num_units = units_of(form, p->depth);
    if (rounds_inputs(form)) {
        const float scale = token_scale(x, p->depth, type);
        for (int64_t u = 0; u < num_units; u++)
            fill_bytes(units + u * p->num_inputs + input, x + u * UNIT * size_of(type),
                       p->depth - u * UNIT < UNIT ? p->depth - u * UNIT : UNIT, type, scale);
        return;
    }
    for (int64_t u = 0; u < num_units; u++) {
        const int64_t first = u * num_values, left = p->depth - first;
        fill_unit(units + u * p->num_inputs + input, x + first * 2,
                  left < num_values ? left : num_values, form);
    }
}

/* Of vector number w of a unit's codes, what is above four bits, where it belongs. */
INLINE __m512i fourth_bit(__m512i high, int w, int form)
{
    const int more = code_bits(form) - 4, shift = 4 - more * w;
    const vec_bits bits = (vec_bits)high;
    const vec_bits there = shift >= 0 ? bits << shift : bits >> -shift;
    return _mm512_and_si512((__m512i)there, _mm512_set1_epi8((char)(((1 << more) - 1) << 4)));
}

/* 64 bytes in a register: gcc would read them from memory for each use, and most lie in two lines. */
INLINE __m512i loaded_once(const char *from)
{
    __m512i bytes = _mm512_loadu_si512(from);
    __asm__("" : "+v"(bytes));
    return bytes;
}

/* Codes of 16 rows and a unit, as they lie in memory, where they are read once for all of its values. */
struct packed {
    const char *from;
    __m512i codes; /* of less than four bits */
    __m512i high;  /* what is above four bits, or the third of three */
};

INLINE struct packed packed_unit(const char *from, int form)
{
    struct packed p = {from, _mm512_setzero_si512(), _mm512_setzero_si512()};
    if (code_bits(form) < 4)
        p.codes = loaded_once(from);
    if (form == Q3_K) /* byte number b of a row begins with bit 4 * b */
        p.high = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2c2824200c080400),
                                              (__m512i)halves_of(from + CODE_ROWS * WORD_BYTES));
    if (code_bits(form) > 4 && code_bits(form) < 8)
        p.high = loaded_once(high_bits(from, form));
    return p;
}

/* Vector number w of them as bytes. */
INLINE __m512i unpack_short(const struct packed *p, int w, int form)
{
    const __m512i code = _mm512_and_si512(_mm512_srli_epi32(p->codes, 2 * w), _mm512_set1_epi8(3));
    if (form != Q3_K)
        return code;
    const vec_bits bits = (vec_bits)p->high, bit = w < 2 ? bits << (2 - w) : bits >> (w - 2);
    return _mm512_or_si512(code, (__m512i)(bit & 0x04040404));
}

INLINE __m512i unpack_bytes(const char *from, int form)
{
    const __m512i columns = _mm512_set_epi8( /* four values of a row, row after row */
        63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58, 42, 26,
        10, 57, 41, 25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20,
        4, 51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
    const __m512i sign = _mm512_set1_epi8((char)(excess_of(form) ? 0x80 : 0));
    return _mm512_xor_si512(_mm512_permutexvar_epi8(columns, _mm512_loadu_si512(from)), sign);
}

/* Vectors number 2 * i and 2 * i + 1. */
INLINE void unpack_pair(__m512i *codes, const struct packed *p, int i, int form)
{
    if (code_bits(form) == 8) {
        codes[0] = unpack_bytes(p->from + i * 128, form);
        codes[1] = unpack_bytes(p->from + i * 128 + 64, form);
        return;
    }
    if (code_bits(form) < 4) {
        codes[0] = unpack_short(p, 2 * i, form);
        codes[1] = unpack_short(p, 2 * i + 1, form);
        return;
    }
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i curve = _mm512_broadcast_i32x4( /* and 128 more */
        _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char)129, (char)141, (char)153, (char)166,
                      (char)181, (char)197, (char)217, (char)241));
    const __m512i doubled = _mm512_broadcast_i32x4( /* small floats, and 12 more */
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i packed = loaded_once(p->from + i * 64);
    codes[0] = _mm512_and_si512(packed, mask);
    codes[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
    if (is_float4(form) || is_curved(form)) {
        const __m512i table = is_curved(form) ? curve : doubled;
        codes[0] = _mm512_shuffle_epi8(table, codes[0]);
        codes[1] = _mm512_shuffle_epi8(table, codes[1]);
    }
    if (code_bits(form) > 4) {
        codes[0] = _mm512_or_si512(codes[0], fourth_bit(p->high, 2 * i, form));
        codes[1] = _mm512_or_si512(codes[1], fourth_bit(p->high, 2 * i + 1, form));
    }
}

/* sums[i * STREAMS + n], which are integers, += a unit of 16 rows of panel n times that of each input. */
INLINE void add_bytes(vec *sums, __m512i (*codes)[UNIT / 4], int num_panels,
                      const struct unit *units, int64_t num_inputs)
{
    for (int64_t i = 0; i < num_inputs; i++) {
        const struct unit *x = units + i;
        __m512i total[TOGETHER];
#pragma GCC unroll 2
        for (int n = 0; n < num_panels; n++)
            total[n] = _mm512_add_epi32((__m512i)sums[i * STREAMS + n], _mm512_set1_epi32(x->excess));
#pragma GCC unroll 8
        for (int w = 0; w < UNIT / 4; w++)
#pragma GCC unroll 2
            for (int n = 0; n < num_panels; n++)
                total[n] = _mm512_dpbusd_epi32(total[n], codes[n][w], _mm512_set1_epi32(x->high[w]));
#pragma GCC unroll 2
        for (int n = 0; n < num_panels; n++)
            sums[i * STREAMS + n] = (vec)total[n];
    }
}

/* *sum += a unit's dots times scales. */
INLINE void add_dots(vec *sum, __m512i high, __m512i low, const struct scales *by,
                     const struct unit *x, int form)
{
    const vec dots =
        (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    vec total = plus_product(*sum, dots, by->scale * all(x->scale));
    if (stores_minimum(form) || stores_zero(form))
        total = plus_product(total, by->minimum, all(x->sum));
    *sum = total;
}

/* sums[i * STREAMS + n] += a unit of 16 rows of panel n times that of each input. */
INLINE void add_units(vec *sums, __m512i (*codes)[UNIT / 4], const struct scales *by, int num_panels,
                      const struct unit *units, int64_t num_inputs, int form)
{
    for (int64_t i = 0; i < num_inputs; i++) {
        const struct unit *x = units + i;
        __m512i high[TOGETHER], low[TOGETHER];
#pragma GCC unroll 2
        for (int n = 0; n < num_panels; n++) {
            high[n] = _mm512_setzero_si512();
            low[n] = _mm512_set1_epi32(x->excess);
        }
#pragma GCC unroll 8
        for (int w = 0; w < values_of_unit(form) / 4; w++)
#pragma GCC unroll 2
            for (int n = 0; n < num_panels; n++) {
                high[n] = _mm512_dpbusd_epi32(high[n], codes[n][w], _mm512_set1_epi32(x->high[w]));
                low[n] = _mm512_dpbusd_epi32(low[n], codes[n][w], _mm512_set1_epi32(x->low[w]));
            }
#pragma GCC unroll 2
        for (int n = 0; n < num_panels; n++)
            add_dots(sums + i * STREAMS + n, high[n], low[n], by + n, x, form);
    }
}

/* The same of one input and all panels, whose codes are unpacked when they are wanted, so that each
 * integer of the input is read once for all of them. */
INLINE void add_unit(vec *sums, const struct packed *packed, const struct scales *by,
                     const struct unit *x, int form)
{
    __m512i high[STREAMS], low[STREAMS];
#pragma GCC unroll 4
    for (int n = 0; n < STREAMS; n++) {
        high[n] = _mm512_setzero_si512();
        low[n] = _mm512_set1_epi32(x->excess);
    }
#pragma GCC unroll 4
    for (int i = 0; i < values_of_unit(form) / 8; i++) {
        const __m512i higher[2] = {_mm512_set1_epi32(x->high[2 * i]),
                                   _mm512_set1_epi32(x->high[2 * i + 1])};
        const __m512i lower[2] = {_mm512_set1_epi32(x->low[2 * i]),
                                  _mm512_set1_epi32(x->low[2 * i + 1])};
#pragma GCC unroll 4
        for (int n = 0; n < STREAMS; n++) {
            __m512i codes[2];
            unpack_pair(codes, packed + n, i, form);
#pragma GCC unroll 2
            for (int w = 0; w < 2; w++) {
                high[n] = _mm512_dpbusd_epi32(high[n], codes[w], higher[w]);
                low[n] = _mm512_dpbusd_epi32(low[n], codes[w], lower[w]);
            }
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < STREAMS; n++)
        add_dots(sums + n, high[n], low[n], by + n, x, form);
}

/* Group number g of some panels; `at` goes on behind it. */
INLINE void add_group(vec *sums, const struct product *p, int64_t g, const char **at,
                      const char **heads, struct scales *factors, int num_panels, int64_t first,
                      int64_t num_inputs, int form)
{
    const int per_group = group_of(form) / values_of_unit(form);
    const int64_t unit_bytes = code_bytes(form) / per_group, num_units = units_of(form, p->depth);
    struct scales by[STREAMS];
#pragma GCC unroll 4
    for (int n = 0; n < num_panels; n++) {
        if (begins_block(form, g)) {
            heads[n] = at[n];
            at[n] += head_bytes(form);
            factors[n] = factors_at(heads[n], form, 0);
        }
        if (!rounds_inputs(form))
            by[n] = scales_at(at[n] + code_bytes(form), form, heads[n], factors + n, g, 0);
        if (is_float4(form))
            by[n].scale *= 0.5f;
    }
    for (int j = 0; j < per_group && g * per_group + j < num_units; j++) {
        const struct unit *units = p->units + (g * per_group + j) * p->num_inputs + first;
        struct packed packed[STREAMS];
#pragma GCC unroll 4
        for (int n = 0; n < num_panels; n++)
            packed[n] = packed_unit(at[n] + j * unit_bytes, form);
        if (num_panels == STREAMS) {
            add_unit(sums, packed, by, units, form);
            continue;
        }
        __m512i codes[TOGETHER][UNIT / 4];
#pragma GCC unroll 4
        for (int i = 0; i < values_of_unit(form) / 8; i++)
#pragma GCC unroll 2
            for (int n = 0; n < num_panels; n++)
                unpack_pair(codes[n] + 2 * i, packed + n, i, form);
        if (rounds_inputs(form))
            add_bytes(sums, codes, num_panels, units, num_inputs);
        else
            add_units(sums, codes, by, num_panels, units, num_inputs, form);
    }
#pragma GCC unroll 4
    for (int n = 0; n < num_panels; n++) {
        if (first == 0)
            for (int64_t ahead = 0; ahead < group_bytes(form); ahead += 64)
                _mm_prefetch(at[n] + AHEAD_BYTES + ahead, _MM_HINT_T0);
        at[n] += group_bytes(form);
    }
}

/* One input by STREAMS panels, whose sums stay in registers. */
INLINE void multiply_one(vec *out, const struct product *p, const char *const *panels, int64_t first,
                         int form)
{
    const int64_t num_groups = groups_of(form, p->depth);
    const char *at[STREAMS], *heads[STREAMS];
    struct scales factors[STREAMS] = {0}; /* which the first group sets, if the form has any */
    vec sums[STREAMS];
#pragma GCC unroll 4
    for (int n = 0; n < STREAMS; n++) {
        at[n] = heads[n] = panels[n];
        sums[n] = all(0);
    }
    for (int64_t g = 0; g < num_groups; g++)
        add_group(sums, p, g, at, heads, factors, STREAMS, first, 1, form);
#pragma GCC unroll 4
    for (int n = 0; n < STREAMS; n++)
        out[n] = sums[n];
}

/* Inputs [first, first + num_inputs) by some panels, to [inputs, STREAMS]. */
INLINE void multiply_streams(vec *sums, const struct product *p, const char *const *panels,
                             int num_panels, int64_t first, int64_t num_inputs, int form)
{
    if (num_inputs == 1 && num_panels == STREAMS && !rounds_inputs(form)) {
        multiply_one(sums, p, panels, first, form);
        return;
    }
    const int64_t num_groups = groups_of(form, p->depth);
    const char *at[STREAMS];
    const char *heads[STREAMS] = {NULL};
    struct scales factors[STREAMS] = {0}; /* which the first group sets, if the form has any */
    for (int n = 0; n < num_panels; n++)
        at[n] = panels[n];
    for (int64_t i = 0; i < num_inputs * STREAMS; i++)
        sums[i] = all(0);
    for (int64_t g = 0; g < num_groups; g++)
        for (int n = 0; n < num_panels; n += TOGETHER) {
            if (n + TOGETHER <= num_panels)
                add_group(sums + n, p, g, at + n, heads + n, factors + n, TOGETHER, first,
                          num_inputs, form);
            else
                add_group(sums + n, p, g, at + n, heads + n, factors + n, 1, first, num_inputs,
                          form);
        }
    for (int64_t i = 0; rounds_inputs(form) && i < num_inputs; i++)
        for (int n = 0; n < num_panels; n++) {
            const vec sum = (vec)_mm512_cvtepi32_ps((__m512i)sums[i * STREAMS + n]);
            const vec scale = load(heads[n], FLOAT32) * all(p->units[first + i].scale);
            sums[i * STREAMS + n] = sum * scale;
        }
}

#define FORM(form)                                                                                 \
    case form:                                                                                     \
        multiply_streams(sums, p, panels, num_panels, first, num_inputs, form);                  \
        return;

static void multiply_some(vec *sums, const struct product *p, const char *const *panels,
                          int num_panels, int64_t first, int64_t num_inputs)
{
    switch (p->type) {
        FORM(Q4_0) FORM(Q4_1) FORM(Q4_K) FORM(Q5_0) FORM(Q5_1) FORM(Q5_K) FORM(Q6_K) FORM(Q8_0)
        FORM(MXFP4) FORM(IQ4_NL) FORM(IQ4_XS) FORM(Q2_K) FORM(Q3_K) FORM(NVFP4) FORM(INT4_32) FORM(INT4_128) FORM(INT8_128) FORM(INT8_ROW)
    }
}

/* All inputs by some panels. */
static void multiply_part(const void *product, const struct panels *part)
{
    const struct product *p = product;
    const int64_t apart = (part->end - part->first + STREAMS - 1) / STREAMS;
    vec sums[AT_ONCE * STREAMS];
    for (int64_t i = part->first; i < part->first + apart; i++) {
        const char *panels[STREAMS];
        int num_panels = 0;
        for (int64_t number = i; number < part->end; number += apart)
            panels[num_panels++] = part->base + number * part->bytes;
        for (int64_t input = 0; input < p->num_inputs; input += AT_ONCE) {
            const int64_t left = p->num_inputs - input, count = left < AT_ONCE ? left : AT_ONCE;
            multiply_some(sums, p, panels, num_panels, input, count);
            for (int64_t j = 0; j < count; j++)
                for (int n = 0; n < num_panels; n++)
                    write_rows(p, part, input + j, (i + n * apart) * CODE_ROWS,
                               sums[j * STREAMS + n]);
        }
    }
}

void multiply_dots(void *context, int64_t item)
{
    const struct product *p = context;
    for_panels(p, p->parts, p->num_parts, 1, panel_bytes(p->type, p->depth), item, p->num_items,
               multiply_part);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

int has_dots(int form, int64_t type) { return (void)form, (void)type, 0; }
void fill_units(struct unit *units, const struct product *p, const char *x, int type, int64_t input)
{
    (void)units, (void)p, (void)x, (void)type, (void)input;
}
void multiply_dots(void *context, int64_t item) { (void)context, (void)item; }

#endif
