/* Draws: the next token of each row of logits, in passes over the row as it lies.
 *
 * engine/worker/model/sampler.py says what a draw is and computes it, too, bit for bit. Vectors without a
 * weight that could matter are passed over, and the logarithm of noise is computed for those tokens alone
 * that may win. A sample says which few weights the border of top_p is among. A row whose logits a
 * request changes is changed in place, and restored. */
#include "weights.h"

/* As in engine/worker/model/sampler.py. */
static const float LARGEST_UNIFORM = 1 - 0x1p-24f;
static const uint32_t FIRST_FACTOR = 0x7feb352d, SECOND_FACTOR = 0x846ca68b;
enum { NO_TOKEN = -1 };

/* A row as engine/worker/model/draw_rows.py writes it, in float64. */
enum {
    TEMPERATURE, FIRST_KEY, SECOND_KEY, TOP_P, MIN_P, TOP_K,
    LOGITS, ALLOWED, IDS, NUM_PROMPT_IDS, NUM_IDS, REPETITION, FREQUENCY, PRESENCE, ADDED, NUM_ADDED,
    NUM_FIELDS
};

static const uint32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

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

static float border_of_mass(float *weights, int64_t count, float least, int64_t wanted)
{
    return border_of(weights, count, least, wanted, 1);
}

INLINE int64_t rounded_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Writes down a row's weights, in whole vectors; returns their mass. */
static int64_t weigh(const struct row *r, float *weights)
{
    const float massless = -28.5f; /* of a smaller exponent the mass is 0 */
    vec_long masses = {0};
    for (int64_t i = 0; i < r->count; i += LANES) {
        const vec at = exponents(r, visible(r, i));
        vec some = all(0);
        if (lanes_of(at >= massless)) {
            some = weights_of(at);
            masses = plus_masses(masses, some);
        }
        store(weights + i, some, FLOAT32);
    }
    end_packed(weights + rounded_up(r->count));
    return total(masses);
}

/* Between which weights those are that `left_out` of the mass is just below, by a sample; copied to
 * `some`. The mass of what a sample has of them deviates by the root of their squares, if they weigh
 * no more than two in the mean. */
static void guess_border(const float *weights, int64_t count, int64_t mass, int64_t left_out,
                         float *some, float *low, float *high)
{
    enum { SAMPLED = 16 }; /* one vector of as many */
    vec_long masses = {0};
    int64_t num_sampled = 0;
    for (int64_t i = 0; i < count; i += SAMPLED * LANES, num_sampled += LANES) {
        const vec sampled = load(weights + i, FLOAT32);
        store(some + num_sampled, sampled, FLOAT32);
        masses = plus_masses(masses, sampled);
    }
    end_packed(some + num_sampled);
    float *again = some + num_sampled + LANES;
    memcpy(again, some, (size_t)(num_sampled + LANES) * sizeof *some);
    const double all_sampled = (double)total(masses), left = (double)left_out / SAMPLED;
    const double margin = 3 * sqrt(2 * (double)mass / (double)count * left);
    const double most = fmin(all_sampled, all_sampled - left + margin);
    const double fewest = fmax(1, all_sampled - left - margin);
    *low = border_of_mass(some, num_sampled, FLT_MIN, (int64_t)fmax(1, most));
    *high = border_of_mass(again, num_sampled, FLT_MIN, (int64_t)fewest);
}

/* The border of top_p among the weights that are not below `least`. */
static float top_p_border(const struct row *r, double top_p, float least, float *weights)
{
    struct collected c = {.count = rounded_up(r->count), .smallest = FLT_MIN};
    if (least > 0) /* few are left */
        c = collect(r, least, -INFINITY, weights);
    else
        c.mass = weigh(r, weights);
    int64_t wanted = (int64_t)ceil(top_p * (double)c.mass);
    wanted = wanted < 1 ? 1 : wanted > c.mass ? c.mass : wanted;
    if (least <= 0) {
        float low, high, *some = weights + c.count + 4 * LANES;
        guess_border(weights, c.count, c.mass, c.mass - wanted, some, &low, &high);
        vec_long above = {0}, between = {0};
        int64_t count = 0;
        for (int64_t i = 0; i < c.count; i += LANES) {
            const vec one = load(weights + i, FLOAT32);
            const vec_int is_above = one > high, is_between = (one >= low) & ~is_above;
            above = plus_masses(above, choose(is_above, one, all(0)));
            count += pack(some + count, one, is_between);
        }
        end_packed(some + count);
        for (int64_t i = 0; i < count; i += LANES) {
            const vec one = load(some + i, FLOAT32);
            between = plus_masses(between, choose(one > 0, one, all(0)));
        }
        const int64_t rest = wanted - total(above);
        if (0 < rest && rest <= total(between))
            return border_of_mass(some, count, low, rest);
    }
    /* what is smaller than this has, all together, less mass than may be left out */
    const double cut = 0.999 * ((double)(c.mass - wanted) / (double)c.count - 1) / MASS_STEPS;
    return border_of_mass(weights, c.count, fmaxf((float)cut, c.smallest), wanted);
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
    if (fields[TOP_P] < 1)
        least = fmaxf(least, top_p_border(r, fields[TOP_P], least, weights));
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
                                      2 * (size_t)(r.count + 5 * LANES) * sizeof(float));
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
