/* A mixture of experts: each token goes through the few feed-forwards that its router scores highest.
 *
 * All of it is one kernel, so that a step of few tokens is calls that do not depend on what is in
 * memory: which experts are chosen is found here, not by who calls. Tokens of one expert are gathered
 * and multiplied together, some at a time, by the kernels for one matrix. Rounding is that of
 * engine/worker/model/feed_forward.py: what an expert makes, times its share, is rounded, then added.
 */
#include "pairs.h"

enum {
    AT_ONCE = 256,      /* tokens of an expert: their products stay in the caches */
    ROWS_PER_ITEM = 16, /* gathered, or added, by a thread */
};

/* A layer's, as engine/worker/model/feed_forward.py fills it. */
struct experts {
    int64_t num_experts, num_per_token, is_normalized, activation;
    int64_t hidden, width; /* of a token; of what is between an expert's matrices */
    int64_t gate_up, num_gate_up, gate_up_bias; /* parts [num_experts, num_gate_up, 3]; see linear */
    int64_t down, down_bias;                    /* parts [num_experts, 1, 3] */
    int64_t is_gate_up_packed, is_down_packed; /* in pairs, whose few rows are multiplied in `variant` */
    int64_t variant;
    int64_t share_scale; /* float32 [num_experts], which shares are multiplied by; or 0 */
};

/* A token's expert. */
struct choice {
    int64_t token, expert;
    float share;
};

struct mixture {
    const struct experts *e;
    int type;
    int64_t num_tokens, num_threads;
    char *out;
    const char *x, *scores;
    struct choice *choices, *in_order; /* [num_tokens * num_per_token]; by expert */
    int64_t *ends;                     /* [num_experts]: where the next token of an expert goes */
    float *exponentials;               /* [num_experts, and to a whole vector] of one token */
    char *rows, *gate_up, *inner, *made; /* of up to AT_ONCE tokens of one expert */
    const struct choice *run;            /* these are of now */
    int64_t num_rows, num_few_rows;
};

/* A token's experts, the highest score first and of equals the first of them; and their shares. */
static void choose_experts(const struct mixture *m, int64_t token)
{
    const struct experts *e = m->e;
    const char *scores = m->scores + token * e->num_experts * size_of(m->type);
    struct choice *choices = m->choices + token * e->num_per_token;
    float largest = -INFINITY, sum = 0, chosen = 0;
    for (int64_t i = 0, count = 0; i < e->num_experts; i++) {
        const float score = load_part(scores + i * size_of(m->type), 1, m->type)[0];
        m->exponentials[i] = score;
        largest = score > largest ? score : largest;
        /* a score that is no number is below all others, and makes every share one */
        int64_t place = count;
        while (place > 0 && score > choices[place - 1].share)
            place--;
        if (place == e->num_per_token)
            continue;
        count += count < e->num_per_token;
        memmove(choices + place + 1, choices + place, (size_t)(count - 1 - place) * sizeof *choices);
        choices[place] = (struct choice){token, i, score == score ? score : -INFINITY};
    }
    for (int64_t i = 0; i < e->num_experts; i += LANES) {
        float *some = m->exponentials + i;
        store(some, exponential(load(some, FLOAT32) - largest), FLOAT32);
        for (int lane = 0; lane < LANES && i + lane < e->num_experts; lane++)
            sum += some[lane];
    }
    for (int64_t k = 0; k < e->num_per_token; k++)
        chosen += choices[k].share = m->exponentials[choices[k].expert] / sum;
    for (int64_t k = 0; e->is_normalized && k < e->num_per_token; k++)
        choices[k].share /= chosen;
    const float *scale = (const float *)(uintptr_t)e->share_scale;
    for (int64_t k = 0; scale != NULL && k < e->num_per_token; k++)
        choices[k].share *= scale[choices[k].expert];
}

/* Choices in the order of their experts, those of one in that of their tokens; ends[i] is where
 * those of expert i end. */
static void sort_choices(const struct mixture *m)
{
    const int64_t count = m->num_tokens * m->e->num_per_token;
    int64_t first = 0;
    memset(m->ends, 0, (size_t)m->e->num_experts * sizeof *m->ends);
    for (int64_t i = 0; i < count; i++)
        m->ends[m->choices[i].expert]++;
    for (int64_t i = 0; i < m->e->num_experts; i++) {
        const int64_t of_expert = m->ends[i];
        m->ends[i] = first;
        first += of_expert;
    }
    for (int64_t i = 0; i < count; i++)
        m->in_order[m->ends[m->choices[i].expert]++] = m->choices[i];
}

#define FOR_ROWS(item, num_rows)                                                                \
    for (int64_t row = (item) * ROWS_PER_ITEM,                                                  \
                 end = row + ROWS_PER_ITEM < (num_rows) ? row + ROWS_PER_ITEM : (num_rows);     \
         row < end; row++)

static void gather(void *context, int64_t item)
{
    const struct mixture *m = context;
    const int64_t num_bytes = m->e->hidden * size_of(m->type);
    FOR_ROWS(item, m->num_rows)
        memcpy(m->rows + row * num_bytes, m->x + m->run[row].token * num_bytes, (size_t)num_bytes);
}

INLINE void add_row(char *to, const char *from, float share, int64_t count, int type)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec added = rounded(load(at(from, i, type), type) * share, type);
        store(at(to, i, type), load(at(to, i, type), type) + added, type);
    }
    if (i < count) {
        const vec made = load_part(at(from, i, type), count - i, type);
        const vec before = load_part(at(to, i, type), count - i, type);
        store_part(at(to, i, type), before + rounded(made * share, type), count - i, type);
    }
}

/* A token is once among those of an expert: no two threads add to one row. */
static void add(void *context, int64_t item)
{
    const struct mixture *m = context;
    const int64_t num_bytes = m->e->hidden * size_of(m->type);
    FOR_ROWS(item, m->num_rows) {
        char *to = m->out + m->run[row].token * num_bytes;
        if (m->type == FLOAT32)
            add_row(to, m->made + row * num_bytes, m->run[row].share, m->e->hidden, FLOAT32);
        else
            add_row(to, m->made + row * num_bytes, m->run[row].share, m->e->hidden, BFLOAT16);
    }
}

/* One product of an expert's, by the kernel for its matrices. */
static int multiply(const struct mixture *m, char *out, const char *x, int64_t depth, int64_t parts,
                    int64_t num_parts, int64_t bias, int64_t is_packed)
{
    word words[11] = {{.address = out}, {.address = (void *)(uintptr_t)x}};
    word *next = words + 2;
    if (!is_packed)
        (next++)->integer = m->type;
    (next++)->integer = m->num_rows;
    if (is_packed)
        (next++)->integer = m->num_few_rows;
    (next++)->integer = depth;
    (next++)->address = (void *)(uintptr_t)parts;
    (next++)->integer = num_parts;
    (next++)->address = (void *)(uintptr_t)bias;
    if (is_packed)
        next[0].integer = m->e->variant, next[1].integer = NOT_GATED, next += 2;
    next->integer = m->num_threads;
    return is_packed ? linear_pairs(words) : linear(words);
}

/* The tokens of `run` through expert number `expert`. */
static int pass(struct mixture *m, int64_t expert)
{
    const struct experts *e = m->e;
    const int64_t part = 3 * (int64_t)sizeof(int64_t), items = padded(m->num_rows, ROWS_PER_ITEM);
    const int64_t gate_up_bias =
        e->gate_up_bias ? e->gate_up_bias + expert * 2 * e->width * (int64_t)sizeof(float) : 0;
    const int64_t down_bias =
        e->down_bias ? e->down_bias + expert * e->hidden * (int64_t)sizeof(float) : 0;
    const char *x = m->x + m->run->token * e->hidden * size_of(m->type);
    if (m->num_rows > 1) {
        parallel_for(m->num_threads, items / ROWS_PER_ITEM, gather, m);
        x = m->rows;
    }
    if (multiply(m, m->gate_up, x, e->hidden, e->gate_up + expert * e->num_gate_up * part,
                 e->num_gate_up, gate_up_bias, e->is_gate_up_packed) < 0)
        return -1;
    const word words[] = {{.address = m->inner},
                          {.address = m->gate_up},
                          {.address = m->gate_up + e->width * size_of(m->type)},
                          {.integer = m->type},
                          {.integer = m->num_rows},
                          {.integer = e->width},
                          {.integer = 2 * e->width},
                          {.integer = 2 * e->width},
                          {.integer = e->activation},
                          {.integer = m->num_threads}};
    gated(words);
    if (multiply(m, m->made, m->inner, e->width, e->down + expert * part, 1, down_bias,
                 e->is_down_packed) < 0)
        return -1;
    parallel_for(m->num_threads, items / ROWS_PER_ITEM, add, m);
    return 0;
}

/* Memory for all of it, which the kernels for one matrix do not use; -1 if there is none. */
static int prepare(struct mixture *m)
{
    static _Thread_local struct memory memory;
    const struct experts *e = m->e;
    const int64_t count = m->num_tokens * e->num_per_token, size = size_of(m->type);
    const int64_t at_once = m->num_tokens < AT_ONCE ? m->num_tokens : AT_ONCE;
    const int64_t sizes[] = {
        count * (int64_t)sizeof(struct choice),
        count * (int64_t)sizeof(struct choice),
        e->num_experts * (int64_t)sizeof(int64_t),
        padded(e->num_experts, LANES) * (int64_t)sizeof(float),
        at_once * e->hidden * size,
        at_once * 2 * e->width * size,
        at_once * e->width * size,
        at_once * e->hidden * size,
    };
    enum { NUM_PIECES = sizeof sizes / sizeof *sizes };
    int64_t num_bytes = 0;
    for (int i = 0; i < NUM_PIECES; i++)
        num_bytes += padded(sizes[i], 64);
    char *next = grown(&memory, (size_t)num_bytes), *pieces[NUM_PIECES];
    if (next == NULL)
        return -1;
    for (int i = 0; i < NUM_PIECES; i++) {
        pieces[i] = next;
        next += padded(sizes[i], 64);
    }
    m->choices = (struct choice *)pieces[0];
    m->in_order = (struct choice *)pieces[1];
    m->ends = (int64_t *)pieces[2];
    m->exponentials = (float *)pieces[3];
    m->rows = pieces[4];
    m->gate_up = pieces[5];
    m->inner = pieces[6];
    m->made = pieces[7];
    return 0;
}

/* mixture(out, x, scores, experts, type, num_tokens, num_few, num_threads)
 *
 * out and x are [num_tokens, hidden], scores what the router makes of x, [num_tokens, num_experts], all
 * contiguous and of type FLOAT32 or BFLOAT16, which is the latter where matrices are packed in pairs;
 * experts is the address of a struct experts; num_few as of linear_pairs(). */
KERNEL(mixture, "ppppiiii")
{
    void *out, *x, *scores, *experts;
    int64_t type, num_tokens, num_few, num_threads;
    read_words(words, mixture_format, &out, &x, &scores, &experts, &type, &num_tokens, &num_few,
               &num_threads);
    struct mixture m = {.e = experts,
                        .type = (int)type,
                        .num_tokens = num_tokens,
                        .num_threads = num_threads,
                        .out = out,
                        .x = x,
                        .scores = scores};
    if (prepare(&m) < 0)
        return -1;
    memset(out, 0, (size_t)(num_tokens * m.e->hidden * size_of(m.type)));
    for (int64_t token = 0; token < num_tokens; token++)
        choose_experts(&m, token);
    sort_choices(&m);
    for (int64_t expert = 0, first = 0; expert < m.e->num_experts; first = m.ends[expert++])
        for (int64_t left = m.ends[expert] - first; left > 0; left -= m.num_rows) {
            m.run = m.in_order + m.ends[expert] - left;
            m.num_rows = left < AT_ONCE ? left : AT_ONCE;
            m.num_few_rows = 0;
            while (m.num_few_rows < m.num_rows && m.run[m.num_few_rows].token < num_few)
                m.num_few_rows++;
            if (pass(&m, expert) < 0)
                return -1;
        }
    return 0;
}
