/* Log-probabilities of tokens and of each row's likeliest, in passes over the row as it lies. */
#include "weights.h"

static const float LEAST_LOGPROB = -9999; /* as in engine/worker/model/sampler.py */

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
