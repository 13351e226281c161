/* Attention over paged keys and values, read where they lie, with a running softmax.
 *
 * A tile of queries, all that share a KV head, meets its visible keys TILE_KEYS at a time: scores,
 * weights, weighted sum. Few queries (decode) take dot products with the rows of the pool as they
 * are. Many (a prompt's chunk) are worth a transposed copy of the keys, and register-blocked
 * products over it. Positions outside a query's window or beyond its own weigh exactly 0; positions
 * beyond the sequence are never read.
 *
 * A query's result has the same bits whatever else is in the step: scores are summed in one order on
 * both ways, tiles of keys begin at multiples of TILE_KEYS, and the running softmax begins anew at
 * multiples of PART_KEYS, whose sums are merged one after the other. Parts and heads of one query can
 * so be left to several threads.
 *
 * Keys and values that lie as codes of a byte are multiplied as codes: a key's scale goes to its
 * scores, a value's to its weights, which are fewer.
 */
#include "attention_tile.h"

static int is_tiled(const attention *a, const int64_t *sequence)
{
    return a->variant == TILES && sequence[1] > FEW_QUERIES;
}

/* A unit's tiles of a sequence are of one size: what is laid out for a short one is laid out for few. */
static int64_t queries_per_tile(const attention *a, const int64_t *sequence)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    if (!is_tiled(a, sequence))
        return larger_of(1, TILE_ROWS / group);
    const int64_t most = larger_of(1, MAX_SQUARE_ROWS / group);
    return ceil_div(sequence[1], ceil_div(sequence[1], most));
}

/* The first key that a sequence's first query sees, and the end of those of its last. */
static int64_t first_key_of(const attention *a, const int64_t *sequence)
{
    const int64_t first_position = sequence[2] - sequence[1];
    return a->window > 0 ? larger_of(0, first_position - a->window + 1) : 0;
}

static int64_t parts_of(const attention *a, const int64_t *sequence)
{
    return ceil_div(sequence[2], PART_KEYS) - first_key_of(a, sequence) / PART_KEYS;
}

static int64_t items_of(const attention *a, const int64_t *sequence)
{
    if (sequence[1] == 1)
        return parts_of(a, sequence) * a->num_shares;
    return ceil_div(sequence[1], queries_per_tile(a, sequence)) * a->num_kv_heads;
}

/* One query: all heads of a position, or a share of them, which lie together. */
static void take_part(const attention *a, tile *t, const int64_t *sequence, int64_t item,
                      int64_t num_parts_before)
{
    const int64_t share = item % a->num_shares, part = item / a->num_shares;
    t->num_queries = 1;
    t->first_head = a->num_kv_heads * share / a->num_shares;
    t->num_heads = a->num_kv_heads * (share + 1) / a->num_shares - t->first_head;
    const int64_t first_part = first_key_of(a, sequence) / PART_KEYS;
    t->first_key = larger_of(first_key_of(a, sequence), (first_part + part) * PART_KEYS);
    t->end_key = smaller_of(sequence[2], (first_part + part + 1) * PART_KEYS);
    if (parts_of(a, sequence) > 1 || a->sinks != NULL)
        t->partial = a->partial + (num_parts_before + part) * a->num_heads * (a->head_dim + 2);
}

static tile tile_of(const attention *a, int64_t item)
{
    int64_t s = 0, num_parts_before = 0;
    for (int64_t passed; item >= (passed = items_of(a, a->sequences + 3 * s)); s++) {
        item -= passed;
        num_parts_before += a->sequences[3 * s + 1] == 1 ? parts_of(a, a->sequences + 3 * s) : 0;
    }
    const int64_t *sequence = a->sequences + 3 * s;
    tile t = {.table = a->block_tables + s * a->table_stride};
    int64_t first_query = 0;
    if (sequence[1] == 1) {
        take_part(a, &t, sequence, item, num_parts_before);
    } else {
        /* the longest tiles first: what is left at the end is short */
        const int64_t num_tiles = ceil_div(sequence[1], queries_per_tile(a, sequence));
        first_query = (num_tiles - 1 - item / a->num_kv_heads) * queries_per_tile(a, sequence);
        t.num_queries = smaller_of(queries_per_tile(a, sequence), sequence[1] - first_query);
        t.first_head = item % a->num_kv_heads;
        t.num_heads = 1;
        const int64_t first = sequence[2] - sequence[1] + first_query;
        t.end_key = first + t.num_queries;
        t.first_key = a->window > 0 ? larger_of(0, first - a->window + 1) : 0;
    }
    t.first_row = sequence[0] + first_query;
    t.first_position = sequence[2] - sequence[1] + first_query;
    t.first_key = t.first_key / TILE_KEYS * TILE_KEYS;
    t.is_joined = sequence[1] > 1 &&
                  (a->sinks != NULL || t.first_key / PART_KEYS < (t.end_key - 1) / PART_KEYS);
    t.num_rows = t.num_queries * (a->num_heads / a->num_kv_heads);
    t.is_tiled = is_tiled(a, sequence);
    t.is_direct = !t.is_tiled && t.num_rows <= DIRECT_ROWS && a->head_dim % LANES == 0;
    const int64_t rows = t.is_tiled ? SQUARE : t.is_direct ? 1 : MICRO_ROWS;
    const int64_t values = t.is_tiled ? SQUARE : 2 * LANES;
    t.num_padded_rows = ceil_div(t.num_rows, rows) * rows;
    t.padded_dim = ceil_div(a->head_dim, values) * values;
    return t;
}

static int open_workspace(workspace *w, const tile *t)
{
    const int64_t rows = t->num_heads * t->num_padded_rows;
    const int64_t sizes[] = {rows * t->padded_dim,
                             rows * t->padded_dim,
                             rows,
                             rows,
                             t->num_padded_rows * TILE_KEYS,
                             t->padded_dim * TILE_KEYS,
                             t->padded_dim * TILE_KEYS,
                             t->is_joined ? t->num_rows * (t->padded_dim + 2) : 0};
    float **const parts[] = {&w->q,           &w->out,
                             &w->largest,     &w->total,
                             &w->weights,     &w->packed_keys,
                             &w->packed_values, &w->joined};
    enum { NUM_PARTS = sizeof sizes / sizeof sizes[0] };
    int64_t size = 0;
    for (int i = 0; i < NUM_PARTS; i++)
        size += ceil_div(sizes[i], 16) * 16;
    float *next = scratch((size_t)size * sizeof(float));
    if (next == NULL)
        return -1;
    for (int i = 0; i < NUM_PARTS; i++) {
        *parts[i] = next;
        next += ceil_div(sizes[i], 16) * 16;
    }
    memset(w->q, 0, (size_t)(2 * ceil_div(sizes[0], 16) * 16) * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        w->largest[row] = -INFINITY;
        w->total[row] = 0;
    }
    return 0;
}

INLINE void read_queries(const attention *a, const tile *t, const workspace *w, int type)
{
    for (int64_t head = 0; head < t->num_heads; head++)
        for (int64_t row = 0; row < t->num_rows; row++) {
            const void *from = at(a->q, element_of(a, t, head, row, a->q_stride), type);
            float *to = w->q + (head * t->num_padded_rows + row) * t->padded_dim;
            int64_t i = 0;
            for (; i + LANES <= a->head_dim; i += LANES)
                store(to + i, load(at(from, i, type), type) * a->scale, FLOAT32);
            if (i < a->head_dim)
                store(to + i, load_part(at(from, i, type), a->head_dim - i, type) * a->scale,
                      FLOAT32);
        }
}

INLINE void write_output(const attention *a, const tile *t, const workspace *w, int type)
{
    for (int64_t head = 0; head < t->num_heads; head++)
        for (int64_t row = 0; row < t->num_rows; row++) {
            const int64_t state = head * t->num_padded_rows + row;
            const float share = 1.0f / w->total[state];
            const float *from = w->out + state * t->padded_dim;
            const int64_t stride = a->num_heads * a->head_dim;
            void *to = at(a->out, element_of(a, t, head, row, stride), type);
            int64_t i = 0;
            for (; i + LANES <= a->head_dim; i += LANES)
                store(at(to, i, type), load(from + i, FLOAT32) * share, type);
            if (i < a->head_dim)
                store_part(at(to, i, type), load(from + i, FLOAT32) * share, a->head_dim - i, type);
        }
}

/* Sums of a part of the keys as they are handed on: of a row the values, the largest score, the total. */
static void write_partial(const attention *a, const tile *t, const workspace *w)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    float *to = t->partial + t->first_head * group * (a->head_dim + 2);
    for (int64_t head = 0; head < t->num_heads; head++)
        for (int64_t row = 0; row < t->num_rows; row++, to += a->head_dim + 2) {
            const int64_t state = head * t->num_padded_rows + row;
            memcpy(to, w->out + state * t->padded_dim, (size_t)a->head_dim * sizeof(float));
            to[a->head_dim] = w->largest[state];
            to[a->head_dim + 1] = w->total[state];
        }
}

/* What has been joined of a row before its first part: a head's sink is a score without a value. */
static void begin_row(const attention *a, float *joined, int64_t dim, int64_t head)
{
    memset(joined, 0, (size_t)dim * sizeof(float));
    joined[dim] = a->sinks == NULL ? -INFINITY : a->sinks[head];
    joined[dim + 1] = a->sinks == NULL ? 0 : 1;
}

/* Adds a part's sums to a row's; products are rounded before they are added, wherever the row lies. */
static __attribute__((noinline, optimize("fp-contract=off"))) void join_row(float *joined, const float *out, float largest,
                                               float total, int64_t dim)
{
    if (largest == -INFINITY) /* no key of the part was visible */
        return;
    const float most = joined[dim] > largest ? joined[dim] : largest;
    const float kept = expf(joined[dim] - most), share = expf(largest - most);
    for (int64_t i = 0; i < dim; i++)
        joined[i] = joined[i] * kept + out[i] * share;
    joined[dim] = most;
    joined[dim + 1] = joined[dim + 1] * kept + total * share;
}

/* Puts the sums of a tile's part to those before it, and begins anew. */
static void join_tile(const attention *a, const tile *t, const workspace *w)
{
    for (int64_t row = 0; row < t->num_rows; row++) {
        join_row(w->joined + row * (t->padded_dim + 2), w->out + row * t->padded_dim,
                 w->largest[row], w->total[row], t->padded_dim);
        w->largest[row] = -INFINITY;
        w->total[row] = 0;
    }
    memset(w->out, 0, (size_t)(t->num_padded_rows * t->padded_dim) * sizeof(float));
}

/* The joined sums to where a tile without parts has its own. */
static void take_joined(const tile *t, const workspace *w)
{
    for (int64_t row = 0; row < t->num_rows; row++) {
        const float *joined = w->joined + row * (t->padded_dim + 2);
        memcpy(w->out + row * t->padded_dim, joined, (size_t)t->padded_dim * sizeof(float));
        w->total[row] = joined[t->padded_dim + 1];
    }
}

/* One head of one query from its parts. */
static void join_head(const attention *a, const float *parts, int64_t num_parts, int64_t token,
                      int64_t head, int64_t type)
{
    const int64_t dim = a->head_dim, stride = a->num_heads * (dim + 2);
    float *joined = scratch((size_t)(dim + 2) * sizeof(float));
    if (joined == NULL)
        abort(); /* as in attend_item */
    begin_row(a, joined, dim, head);
    for (int64_t i = 0; i < num_parts; i++) {
        const float *part = parts + i * stride + head * (dim + 2);
        join_row(joined, part, part[dim], part[dim + 1], dim);
    }
    void *to = at(a->out, (token * a->num_heads + head) * dim, (int)type);
    const float share = 1.0f / joined[dim + 1];
    int64_t j = 0;
    for (; j + LANES <= dim; j += LANES)
        store(at(to, j, (int)type), load(joined + j, FLOAT32) * share, (int)type);
    if (j < dim)
        store_part(at(to, j, (int)type), load_part(joined + j, dim - j, FLOAT32) * share, dim - j,
                   (int)type);
}

static void join_sequences(const attention *a, int64_t type)
{
    const float *parts = a->partial;
    for (int64_t s = 0; s < a->num_sequences; s++) {
        const int64_t *sequence = a->sequences + 3 * s;
        if (sequence[1] > 1)
            continue;
        const int64_t num_parts = parts_of(a, sequence);
        for (int64_t head = 0; head < a->num_heads && (num_parts > 1 || a->sinks != NULL); head++)
            join_head(a, parts, num_parts, sequence[0], head, type);
        parts += num_parts * a->num_heads * (a->head_dim + 2);
    }
}

/* Brings what a first tile's heads have at its positions into the caches, as eight long streams:
 * read in the order of the arithmetic, a head's share of row after row, they come half as fast. */
INLINE void touch_rows(const attention *a, const tile *t, const key_rows *rows, int type)
{
    enum { QUARTER = TILE_KEYS / 4 };
    const int64_t first_byte = t->first_head * a->head_dim * size_of(type);
    const int64_t end_byte = first_byte + t->num_heads * a->head_dim * size_of(type);
    for (int64_t k = 0; k < QUARTER; k++) {
        const volatile char *const *keys = (const volatile char *const *)rows->keys + k;
        const volatile char *const *values = (const volatile char *const *)rows->values + k;
        for (int64_t byte = first_byte; byte < end_byte; byte += 64) {
            (void)keys[0][byte], (void)keys[QUARTER][byte];
            (void)keys[2 * QUARTER][byte], (void)keys[3 * QUARTER][byte];
            (void)values[0][byte], (void)values[QUARTER][byte];
            (void)values[2 * QUARTER][byte], (void)values[3 * QUARTER][byte];
        }
    }
}

INLINE void attend_head(const attention *a, const tile *t, key_rows *keys, const key_rows *next,
                        int64_t head, const workspace *w, int type)
{
    const int64_t first = head * t->num_padded_rows, dim = t->padded_dim;
    const int64_t byte_offset = (t->first_head + head) * a->head_dim * size_of(type);
    const int64_t group = a->num_heads / a->num_kv_heads;
    const float *q = w->q + first * dim;
    float *out = w->out + first * dim;
    if (type == INT8)
        find_scales(a, t, keys, t->first_head + head);
    if (t->is_direct) {
        IN_THREES(t->num_rows, score_directly(t, keys, byte_offset, q + row * dim,
                                              w->weights + row * TILE_KEYS, ROWS, a->head_dim, type,
                                              row == 0 ? next : NULL))
    } else {
        pack(a, t, keys, byte_offset, w, type);
        for (int64_t k = 0; k < TILE_KEYS; k += 2 * LANES)
            for (int64_t row = 0; row < t->num_padded_rows; row += SCORE_ROWS)
                score_packed(w->weights + row * TILE_KEYS + k, q + row * dim, dim,
                             w->packed_keys + k, a->head_dim);
    }
    for (int64_t row = 0; row < t->num_rows; row++) {
        const int64_t last = t->first_position + row / group - keys->first_position;
        const int64_t low = a->window > 0 ? larger_of(0, last - a->window + 1) : 0;
        const int64_t high = smaller_of(keys->count, last + 1);
        if (type == INT8)
            scale_columns(w->weights + row * TILE_KEYS, keys->key_scales);
        weigh_row(w->weights + row * TILE_KEYS, low, high, a->softcap, w->largest + first + row,
                  w->total + first + row, out + row * dim, dim);
        if (type == INT8)
            scale_columns(w->weights + row * TILE_KEYS, keys->value_scales);
    }
    if (t->is_direct) {
        IN_THREES(t->num_rows,
                  add_rows_directly(t, keys, byte_offset, w->weights + row * TILE_KEYS,
                                    out + row * dim, ROWS, a->head_dim, type, row == 0 ? next : NULL))
    } else {
        for (int64_t i = 0; i < dim; i += 2 * LANES)
            for (int64_t row = 0; row < t->num_rows; row += MICRO_ROWS)
                multiply(out + row * dim + i, dim, w->weights + row * TILE_KEYS, TILE_KEYS,
                         w->packed_values + i, dim, keys->count, 0);
    }
}

INLINE void attend_item(const attention *a, int64_t item, int type, int kv_type)
{
    const tile t = tile_of(a, item);
    if (t.is_tiled) {
        attend_by_squares(a, &t, kv_type);
        return;
    }
    workspace w;
    if (open_workspace(&w, &t) != 0)
        abort(); /* a few hundred KiB: there is no machine left to serve on */
    read_queries(a, &t, &w, type);
    const int64_t group = a->num_heads / a->num_kv_heads;
    for (int64_t row = 0; t.is_joined && row < t.num_rows; row++)
        begin_row(a, w.joined + row * (t.padded_dim + 2), t.padded_dim,
                  t.first_head * group + row % group);
    key_rows both[2], *keys = &both[0], *next = &both[1];
    open_rows(a, &t, next, t.first_key, kv_type);
    if (t.is_direct && next->count > 0)
        touch_rows(a, &t, next, kv_type);
    while (next->count > 0) {
        key_rows *const now = next;
        next = keys, keys = now;
        open_rows(a, &t, next, keys->first_position + TILE_KEYS, kv_type);
        for (int64_t head = 0; head < t.num_heads; head++)
            attend_head(a, &t, keys, next->count > 0 ? next : NULL, head, &w, kv_type);
        if (t.is_joined && (next->count == 0 || next->first_position % PART_KEYS == 0))
            join_tile(a, &t, &w);
    }
    if (t.is_joined)
        take_joined(&t, &w);
    if (t.partial != NULL)
        write_partial(a, &t, &w);
    else
        write_output(a, &t, &w, type);
}

#define ATTEND(name, type, kv_type) \
    static void name(void *context, int64_t item) { attend_item(context, item, type, kv_type); }
ATTEND(attend_float32, FLOAT32, FLOAT32)
ATTEND(attend_bfloat16, BFLOAT16, BFLOAT16)
ATTEND(attend_float32_codes, FLOAT32, INT8)
ATTEND(attend_bfloat16_codes, BFLOAT16, INT8)

/* attend(out, q, kv, sequences, block_tables, sinks, type, num_sequences, table_stride, q_stride,
 *        num_heads, num_kv_heads, head_dim, block_size, num_layers, layer, window, kv_type,
 *        plane_bytes, variant, num_threads, scale, softcap)
 *
 * out is [num_tokens, num_heads, head_dim], q the same with tokens q_stride apart. kv is the pool,
 * [num_blocks, num_layers, 2] planes; in a plane lie [block_size, num_kv_heads, head_dim] of
 * kv_type, which is type, or INT8 with float32 scales [num_kv_heads, block_size] behind the codes.
 * sequences and block_tables are int64: [num_sequences, 3] of first query's row, query_len and
 * seq_len, and [num_sequences, table_stride] of block ids; sinks are float32 [num_heads]. window,
 * softcap or sinks 0: off. variant is WIDENED, or TILES for many queries of bfloat16: then queries,
 * keys, values and weights are bfloat16, sums float32. */
KERNEL(attend, "ppppppiiiiiiiiiiiiiiiff")
{
    attention a;
    int64_t type, kv_type;
    read_words(words, attend_format, &a.out, &a.q, &a.kv, &a.sequences,
                       &a.block_tables, &a.sinks, &type, &a.num_sequences, &a.table_stride, &a.q_stride,
                       &a.num_heads, &a.num_kv_heads, &a.head_dim, &a.block_size, &a.num_layers,
                       &a.layer, &a.window, &kv_type, &a.plane_bytes, &a.variant, &a.num_threads,
                       &a.scale, &a.softcap);
    if (type != BFLOAT16)
        a.variant = WIDENED;
    int64_t num_items = 0, num_parts = 0;
    a.num_shares = 1;
    for (int64_t s = 0; s < a.num_sequences; s++) {
        num_items += items_of(&a, a.sequences + 3 * s);
        num_parts += a.sequences[3 * s + 1] == 1 ? parts_of(&a, a.sequences + 3 * s) : 0;
    }
    if (num_items < 2 * a.num_threads && a.num_threads > 1 && num_parts > 0)
        a.num_shares = smaller_of(a.num_kv_heads, ceil_div(2 * a.num_threads, num_items));
    num_items += num_parts * (a.num_shares - 1);
    a.partial = NULL;
    if (num_parts > 0) {
        a.partial = malloc((size_t)(num_parts * a.num_heads * (a.head_dim + 2)) * sizeof(float));
        if (a.partial == NULL)
            return -1;
    }
    const parallel_body same = type == FLOAT32 ? attend_float32 : attend_bfloat16;
    const parallel_body codes = type == FLOAT32 ? attend_float32_codes : attend_bfloat16_codes;
    parallel_for(a.num_threads, num_items, kv_type == INT8 ? codes : same, &a);
    join_sequences(&a, type);
    free(a.partial);
    return 0;
}
