/* Draws: the next token of each row of logits, and log-probabilities, in passes over the row as it lies.
 *
 * engine/worker/model/sampler.py says what a draw is and computes it, too, bit for bit: here every sum, product
 * and quotient is rounded on its own, and masses are whole numbers, whose sums have no order. Weights are
 * computed anew in each pass, which costs less than to keep them; vectors without a weight that could
 * matter are passed over, and the logarithm of noise is computed for those tokens alone that may win.
 * Where a filter needs an order, weights are copied, and halving the range of their bits finds the
 * border: each pass keeps the side that it is in. A row whose logits a request changes is changed in
 * place, and restored. */
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "simd.h"

#include <float.h>
#include <stdlib.h>

/* As in engine/worker/model/sampler.py. */
static const float LEAST_EXPONENT = -87, LARGEST_UNIFORM = 1 - 0x1p-24f, LEAST_LOGPROB = -9999;
static const uint32_t FIRST_FACTOR = 0x7feb352d, SECOND_FACTOR = 0x846ca68b;
enum { NO_TOKEN = -1, MASS_BITS = 40 };
static const double MASS_STEPS = 1LL << MASS_BITS;

/* A row as engine/worker/model/draw_rows.py writes it, in float64. */
enum {
    TEMPERATURE, FIRST_KEY, SECOND_KEY, TOP_P, MIN_P, TOP_K,
    LOGITS, ALLOWED, IDS, NUM_PROMPT_IDS, NUM_IDS, REPETITION, FREQUENCY, PRESENCE, ADDED, NUM_ADDED,
    NUM_FIELDS
};

enum { NUM_MAXIMA = 64 }; /* of as many parts of a row, each of which has another logit */

typedef double vec_double __attribute__((vector_size(LANES * 4)));
typedef int64_t vec_long __attribute__((vector_size(LANES * 4)));
typedef float half_vec __attribute__((vector_size(LANES * 2)));

static const uint32_t lane_bits[16] = {1u << 0,  1u << 1,  1u << 2,  1u << 3, 1u << 4,  1u << 5,
                                       1u << 6,  1u << 7,  1u << 8,  1u << 9, 1u << 10, 1u << 11,
                                       1u << 12, 1u << 13, 1u << 14, 1u << 15};
static const uint32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

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

/* The first token with that logit. */
static int64_t first_of(const struct row *r, float logit)
{
    for (int64_t i = 0; i < r->count; i += LANES) {
        const uint32_t lanes = lanes_of(visible(r, i) >= logit);
        if (lanes)
            return i + __builtin_ctz(lanes);
    }
    return 0;
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

/* Uniform numbers for LANES tokens: the hash of engine/worker/model/sampler.py. */
INLINE vec uniforms(const struct row *r, int64_t i)
{
    vec_bits bits;
    memcpy(&bits, lane_numbers, sizeof bits);
    bits = (bits + (uint32_t)i) ^ r->first;
    bits = (bits ^ bits >> 16) * FIRST_FACTOR;
    bits = (bits ^ bits >> 15) + r->second;
    bits = bits * SECOND_FACTOR;
    bits = (bits ^ bits >> 16) & 0x7fffffff;
    const vec numbers = __builtin_convertvector((vec_int)bits, vec);
    return smaller((numbers + 0.5f) * 0x1p-31f, all(LARGEST_UNIFORM));
}

INLINE float noise_of(float uniform) { return (float)-logarithm(1 - (double)uniform); }

/* Logarithms, rounded down by 0.06 at most: the exponent, and the fraction as it lies. */
INLINE vec least_logarithms(vec numbers)
{
    return __builtin_convertvector((vec_int)numbers, vec) * (0x1p-23f * 0.69314718f) - 88.029692f;
}

/* The token with the largest ratio of weight to noise, of those that weigh no less than `least`. */
static int64_t race(const struct row *r, float least)
{
    const int64_t first = r->best_id / LANES * LANES;
    int64_t winner = r->best_id;
    float most = 1 / noise_of(uniforms(r, first)[winner - first]), low = 0, bar = 0, bar_log = 0;
    for (int64_t i = 0, is_new = 1; i < r->count; i += LANES) {
        if (is_new) { /* noise is not below 2^-32, nor less than the uniform number it is of */
            const float possible = most * 0x1p-33f;
            low = (float)logarithm(least > possible ? least : possible) - 0.01f;
            bar = most * 0.9999f;
            bar_log = (float)logarithm(bar) - 0.01f;
            is_new = 0;
        }
        const vec at = exponents(r, visible(r, i));
        if (lanes_of(at >= low) == 0)
            continue;
        const vec numbers = uniforms(r, i);
        if (lanes_of(at >= least_logarithms(numbers) + bar_log) == 0)
            continue;
        const vec weights = weights_of(at);
        uint32_t lanes = lanes_of((weights >= least) & (weights >= numbers * bar));
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            const float ratio = weights[lane] / noise_of(numbers[lane]);
            if (ratio > most || (ratio == most && i + lane < winner)) {
                most = ratio;
                winner = i + lane;
                is_new = 1;
            }
        }
    }
    return winner;
}

/* Draws among the tokens that the filters keep. */
static int64_t drawn(struct row *r, const double *fields, float *maxima, float *weights)
{
    float least = (float)fields[MIN_P];
    const int64_t top_k = (int64_t)fields[TOP_K];
    if (top_k > 0 && top_k < r->count) {
        const struct collected c = collect(r, least, logit_of_place(maxima, top_k), weights);
        if (c.count >= top_k)
            least = fmaxf(least, border_of(weights, c.count, c.smallest, top_k, 0));
    }
    if (fields[TOP_P] < 1) {
        const struct collected c = collect(r, least, -INFINITY, weights);
        int64_t wanted = (int64_t)ceil(fields[TOP_P] * (double)c.mass);
        wanted = wanted < 1 ? 1 : wanted > c.mass ? c.mass : wanted;
        /* what is smaller than this has, all together, less mass than may be left out */
        const double cut = 0.999 * ((double)(c.mass - wanted) / (double)c.count - 1) / MASS_STEPS;
        const float lowest = fmaxf((float)cut, c.smallest);
        least = fmaxf(least, border_of(weights, c.count, lowest, wanted, 1));
    }
    return race(r, least);
}

/* A logit that was changed, as it was before. */
struct changed {
    int64_t id;
    float logit;
};

/* Changes logits as engine/worker/model/logit_rules.py does; returns how many, or -1 without memory. */
static int64_t change(struct row *r, const double *fields, struct changed *changed)
{
    static _Thread_local struct memory memory; /* zeros between calls */
    enum { IS_DONE = 1 << 30 };
    const int64_t *ids = (const int64_t *)(uintptr_t)fields[IDS];
    const double *added = (const double *)(uintptr_t)fields[ADDED];
    const float repetition = (float)fields[REPETITION];
    const float frequency = (float)fields[FREQUENCY], presence = (float)fields[PRESENCE];
    const int64_t num_ids = (int64_t)fields[NUM_IDS], num_prompt = (int64_t)fields[NUM_PROMPT_IDS];
    int64_t num_changed = 0;
    for (int64_t i = 0; i < (int64_t)fields[NUM_ADDED]; i++) {
        const int64_t id = (int64_t)added[2 * i];
        changed[num_changed++] = (struct changed){id, r->logits[id]};
        r->logits[id] += (float)added[2 * i + 1];
    }
    if (num_ids == 0)
        return num_changed;
    const size_t capacity = memory.capacity, num_bytes = (size_t)r->count * sizeof(int32_t);
    int32_t *counts = grown(&memory, num_bytes);
    if (counts == NULL)
        return -1;
    if (memory.capacity != capacity)
        memset(counts, 0, memory.capacity);
    for (int64_t i = num_prompt; i < num_ids; i++)
        counts[ids[i]]++;
    for (int64_t i = repetition == 1 ? num_prompt : 0; i < num_ids; i++) {
        const int64_t id = ids[i];
        const int32_t count = counts[id];
        if (count & IS_DONE)
            continue;
        float logit = r->logits[id];
        changed[num_changed++] = (struct changed){id, logit};
        logit = logit > 0 ? logit / repetition : logit * repetition;
        r->logits[id] = logit - (frequency * (float)count + (count > 0 ? presence : 0));
        counts[id] |= IS_DONE;
    }
    for (int64_t i = 0; i < num_ids; i++)
        counts[ids[i]] = 0;
    return num_changed;
}

typedef struct {
    int64_t *token_ids;
    const double *rows;
    int64_t num_logits;
    _Atomic int lacks_memory;
} draws;

static void draw_row(void *context, int64_t item)
{
    draws *d = context;
    const double *fields = d->rows + item * NUM_FIELDS;
    struct row r = {
        .logits = (float *)(uintptr_t)fields[LOGITS],
        .count = d->num_logits,
        .allowed = (const char *)(uintptr_t)fields[ALLOWED],
        .first = (uint32_t)(int64_t)fields[FIRST_KEY],
        .second = (uint32_t)(int64_t)fields[SECOND_KEY],
    };
    const size_t most_changed = (size_t)(fields[NUM_ADDED] + fields[NUM_IDS]);
    struct changed *changed = scratch(most_changed * sizeof *changed +
                                      (size_t)(r.count + LANES) * sizeof(float));
    const int64_t num_changed = changed == NULL ? -1 : change(&r, fields, changed);
    if (num_changed < 0) {
        d->lacks_memory = 1;
        return;
    }
    float maxima[NUM_MAXIMA];
    int64_t token_id = NO_TOKEN;
    r.best = best_of(&r, maxima);
    if (r.best > -INFINITY) {
        token_id = r.best_id = first_of(&r, r.best);
        if (fields[TEMPERATURE] > 0) {
            r.sharpness = 1 / (float)fields[TEMPERATURE];
            token_id = drawn(&r, fields, maxima, (float *)(changed + most_changed));
        }
        if (!isfinite(r.logits[token_id]))
            token_id = NO_TOKEN;
    }
    d->token_ids[item] = token_id;
    for (int64_t i = num_changed - 1; i >= 0; i--)
        r.logits[changed[i].id] = changed[i].logit;
}

/* draw(token_ids, rows, num_rows, num_logits, num_threads)
 *
 * One of token_ids, int64, for each of rows, which are float64 [num_rows, NUM_FIELDS]; NO_TOKEN where its
 * logit is no finite number. Ids are int64, of prompt and output; what is added are pairs of float64, a
 * token's id and the number. All ids are below num_logits. Two rows never have the same logits. */
KERNEL(draw, "ppiii")
{
    draws d = {0};
    int64_t num_rows, num_threads;
    read_words(words, draw_format, &d.token_ids, &d.rows, &num_rows, &d.num_logits, &num_threads);
    parallel_for(num_threads, num_rows, draw_row, &d);
    return d.lacks_memory ? -1 : 0;
}

struct candidate {
    float logit;
    int32_t id;
};

/* The likelier first, then the smaller id. */
static int likelier(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    const int order = (x->logit < y->logit) - (x->logit > y->logit);
    return order ? order : (x->id > y->id) - (x->id < y->id);
}

typedef struct {
    float *values;
    int64_t *ids;
    const int64_t *rows;
    int64_t num_logits, width;
    _Atomic int lacks_memory;
} ratings;

/* The row's `wanted` likeliest tokens, in order, among others behind them; returns NULL without memory. */
static struct candidate *likeliest(const struct row *r, int64_t wanted, float *maxima)
{
    const size_t num_floats = ((size_t)r->count + LANES + 1) / 2 * 2;
    float *weights = scratch(num_floats * sizeof(float) + (size_t)r->count * sizeof(struct candidate));
    if (weights == NULL)
        return NULL;
    struct candidate *found = (struct candidate *)(weights + num_floats);
    const float lowest = logit_of_place(maxima, wanted);
    float least = weights_of(exponents(r, all(lowest)))[0];
    if (wanted > NUM_MAXIMA) {
        const struct collected c = collect(r, 0, -INFINITY, weights);
        least = c.count < wanted ? 0 : border_of(weights, c.count, c.smallest, wanted, 0);
    }
    size_t num_found = 0;
    for (int64_t i = 0; i < r->count; i += LANES) {
        const vec logits = visible(r, i);
        uint32_t lanes = lanes_of(weights_of(exponents(r, logits)) >= least);
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            if (i + lane < r->count)
                found[num_found++] = (struct candidate){logits[lane], (int32_t)i + lane};
        }
    }
    qsort(found, num_found, sizeof *found, likelier);
    return found;
}

static void rate_row(void *context, int64_t item)
{
    ratings *p = context;
    const int64_t *fields = p->rows + 3 * item, token_id = fields[1];
    struct row r = {
        .logits = (float *)(uintptr_t)fields[0], .count = p->num_logits, .sharpness = 1};
    float maxima[NUM_MAXIMA], *values = p->values + item * p->width;
    r.best = best_of(&r, maxima);
    const int64_t first = token_id / LANES * LANES;
    const float logit = visible(&r, first)[token_id - first];
    int64_t rank = 1;
    vec_long masses = {0};
    for (int64_t i = 0; i < r.count; i += LANES) {
        const vec logits = visible(&r, i);
        masses = plus_masses(masses, weights_of(exponents(&r, logits)));
        rank += __builtin_popcount(lanes_of(logits > logit));
    }
    const double log_sum = logarithm((double)total(masses) / MASS_STEPS);
    p->ids[item * p->width] = rank;
    const int64_t num_likeliest = fields[2];
    const struct candidate *others = num_likeliest ? likeliest(&r, num_likeliest, maxima) : NULL;
    if (num_likeliest && others == NULL) {
        p->lacks_memory = 1;
        return;
    }
    for (int64_t i = 0; i <= num_likeliest; i++) {
        const float from = i == 0 ? logit : others[i - 1].logit;
        const float value = (float)((double)from - r.best - log_sum);
        values[i] = value > LEAST_LOGPROB ? value : LEAST_LOGPROB;
        if (i > 0)
            p->ids[item * p->width + i] = others[i - 1].id;
    }
}

/* rate(values, ids, rows, num_rows, num_logits, width, num_threads)
 *
 * Log-probabilities of logits. rows are int64 [num_rows, 3]: the address of the logits, a token, and how
 * many of the likeliest tokens to tell. values are float32 and ids int64 [num_rows, width]: first the
 * token's own and its rank, then the likeliest tokens'. */
KERNEL(rate, "pppiiii")
{
    ratings p = {0};
    int64_t num_rows, num_threads;
    read_words(words, rate_format, &p.values, &p.ids, &p.rows, &num_rows, &p.num_logits, &p.width,
               &num_threads);
    parallel_for(num_threads, num_rows, rate_row, &p);
    return p.lacks_memory ? -1 : 0;
}
