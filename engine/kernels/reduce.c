/* Wait for a group's other processes, and add up what each has computed of the same rows.
 *
 * The parts lie in memory that all processes of the group share, and so do counters of arrivals, one
 * for each process. Every process adds up all parts, as a tree over the parts: its bits do not depend
 * on how many processes share them. A process that waits spins briefly, and then sleeps on the counter
 * of the one that is late, since the group may have more processes than there are free cores.
 */
#include "simd.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define pause_briefly() __builtin_ia32_pause()
#else
#define pause_briefly() ((void)0)
#endif

enum { MAX_RANKS = 8, MAX_PARTS = 8, SPINS = 2000, ROWS = 4 };

/* Begins as zeros. Each counter has a line of the cache to itself. */
struct group {
    struct {
        _Atomic uint32_t count __attribute__((aligned(64)));
    } arrived[MAX_RANKS];
    _Atomic int64_t num_sleeping __attribute__((aligned(64)));
    struct { /* how long each process has waited for others; the first one reads all */
        _Atomic int64_t ns __attribute__((aligned(64)));
    } waited[MAX_RANKS];
};

/* Tell the others that this process has written its parts, and has read those of the time before. */
static uint32_t arrive(struct group *group, int64_t rank)
{
    const uint32_t count = atomic_fetch_add(&group->arrived[rank].count, 1) + 1;
    if (atomic_load(&group->num_sleeping) > 0)
        syscall(SYS_futex, &group->arrived[rank].count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return count;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void wait_for(struct group *group, int64_t rank, uint32_t count)
{
    _Atomic uint32_t *arrived = &group->arrived[rank].count;
    uint32_t now;
    for (int spin = 0; (int32_t)((now = atomic_load(arrived)) - count) < 0; spin++) {
        if (spin < SPINS) {
            pause_briefly();
            continue;
        }
        /* one that arrives after this looks for sleepers; one that has arrived is seen by the kernel */
        atomic_fetch_add(&group->num_sleeping, 1);
        syscall(SYS_futex, arrived, FUTEX_WAIT, now, NULL, NULL, 0);
        atomic_fetch_sub(&group->num_sleeping, 1);
    }
}

typedef struct {
    struct group *group;
    void *out, *parts;
    int64_t type, num_tokens, dim, stride, num_parts;
} reduction;

/* One row: neighbours are added first, then their sums, in float32, and rounded at the end. */
INLINE void add_row(const reduction *r, int64_t token, int num_parts, int type)
{
    const int64_t first = token * r->dim;
    for (int64_t i = 0; i < r->dim; i += LANES) {
        vec sums[MAX_PARTS];
#pragma GCC unroll 8
        for (int part = 0; part < num_parts; part++)
            sums[part] =
                load_upto(at(r->parts, part * r->stride + first + i, type), r->dim - i, type);
#pragma GCC unroll 3
        for (int left = num_parts / 2; left > 0; left /= 2)
#pragma GCC unroll 4
            for (int part = 0; part < left; part++)
                sums[part] = sums[2 * part] + sums[2 * part + 1];
        store_upto(at(r->out, first + i, type), sums[0], r->dim - i, type);
    }
}

static void add_rows(void *context, int64_t item)
{
    const reduction *r = context;
    const int64_t end = (item + 1) * ROWS < r->num_tokens ? (item + 1) * ROWS : r->num_tokens;
#define IF_PARTS(count)                                  \
    if (r->num_parts == (count) && r->type == FLOAT32)   \
        add_row(r, token, count, FLOAT32);               \
    else if (r->num_parts == (count))                    \
        add_row(r, token, count, BFLOAT16);
    for (int64_t token = item * ROWS; token < end; token++) {
        IF_PARTS(1)
        IF_PARTS(2)
        IF_PARTS(4)
        IF_PARTS(8)
    }
#undef IF_PARTS
}

/* reduce(out, parts, group, type, num_tokens, dim, stride, num_parts, rank, num_ranks, num_threads)
 *
 * Returns when all processes of the group have called it as often as this one: out is then the sum of
 * parts, each num_tokens rows of dim, `stride` apart. Their number is a power of two. With no token it
 * only waits. Parts must not be written again before the next call but one, whose parts lie elsewhere:
 * then all have read them.
 */
KERNEL(reduce, "pppiiiiiiii")
{
    reduction r;
    int64_t rank, num_ranks, num_threads;
    read_words(words, reduce_format, &r.out, &r.parts, &r.group, &r.type, &r.num_tokens, &r.dim,
               &r.stride, &r.num_parts, &rank, &num_ranks, &num_threads);
    const uint32_t count = arrive(r.group, rank);
    const int64_t begun_ns = num_ranks > 1 ? now_ns() : 0;
    for (int64_t other = 0; other < num_ranks; other++)
        if (other != rank)
            wait_for(r.group, other, count);
    if (num_ranks > 1)
        atomic_fetch_add(&r.group->waited[rank].ns, now_ns() - begun_ns);
    parallel_for(num_threads, (r.num_tokens + ROWS - 1) / ROWS, add_rows, &r);
    return 0;
}
