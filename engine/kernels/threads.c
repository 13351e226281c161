/* Helper threads for a worker that has more than one core, and each thread's scratch memory.
 *
 * Not OpenMP: torch brings a runtime of its own, and a second one in the process, or one that spins
 * without bound on a core that somebody else wants, costs more than it saves. A helper spins briefly
 * after its work, for the next call is usually microseconds away, and then sleeps. Meanwhile it fetches
 * what it will read next into its second cache, if that was announced: between two products of a
 * step memory would else have nothing to do. A call waits only for helpers that have joined it: one
 * that other programs keep from its core holds up nobody, and the others do its items. With one thread
 * none of this is touched. One caller at a time: a worker computes on one thread.
 */
#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST_GLIBC "GLIBC_2.17"
#endif
#ifdef FIRST_GLIBC
/* glibc 2.34 gave these two a second version, without which a wheel runs wherever torch does. */
__asm__(".symver pthread_create, pthread_create@" FIRST_GLIBC);
__asm__(".symver pthread_detach, pthread_detach@" FIRST_GLIBC);
#endif
#if defined(__x86_64__)
#define pause_briefly() __builtin_ia32_pause()
#else
#define pause_briefly() ((void)0)
#endif

enum {
    MAX_HELPERS = 255,
    SPINS = 4000,
    FETCHED_AT_ONCE = 1024,  /* bytes between two looks for the next call */
    AHEAD_BYTES = 128 << 10, /* fetched at most, for they have to stay in the second cache */
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t has_work;
    int64_t num_helpers;
    int64_t num_sleeping;
    parallel_body body;
    void *context;
    uint64_t num_shares;
    _Atomic uint64_t call; /* its number above, in the low byte how many helpers may take part */
    _Atomic uint64_t joined; /* the open call's number above, how many take part; 0: none is open */
    _Atomic uint64_t num_done; /* of those */
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .has_work = PTHREAD_COND_INITIALIZER};

/* By thread, the caller being 0; each has a line of the cache to itself. */
static struct {
    _Atomic int64_t next_item __attribute__((aligned(64))); /* of its share of a call's items */
    int64_t end_item;
    const char *_Atomic ahead; /* what it will read in a call to come, or NULL */
    _Atomic int64_t num_ahead_bytes;
} threads[MAX_HELPERS + 1];

/* A thread's own share of the items, then what is left of the others'. */
static void work(uint64_t thread)
{
    for (uint64_t i = 0; i < pool.num_shares; i++) {
        const uint64_t share = (thread + i) % pool.num_shares;
        int64_t item;
        while ((item = atomic_fetch_add(&threads[share].next_item, 1)) < threads[share].end_item)
            pool.body(pool.context, item);
    }
}

void announce(int64_t thread, const char *address, int64_t num_bytes)
{
    num_bytes = num_bytes < AHEAD_BYTES ? num_bytes : AHEAD_BYTES;
    if (thread <= MAX_HELPERS) {
        atomic_store_explicit(&threads[thread].num_ahead_bytes, num_bytes, memory_order_relaxed);
        atomic_store_explicit(&threads[thread].ahead, address, memory_order_relaxed);
    }
}

void announce_nothing(void)
{
    for (int64_t thread = 1; thread <= pool.num_helpers; thread++)
        announce(thread, NULL, 0);
}

/* Take part in a call, unless it is over. */
static int join(uint64_t call)
{
    uint64_t joined = atomic_load(&pool.joined);
    while (joined >> 8 == call >> 8)
        if (atomic_compare_exchange_weak(&pool.joined, &joined, joined + 1))
            return 1;
    return 0;
}

/* The first call after the one seen. */
static uint64_t next_call(uint64_t seen, uint64_t thread)
{
    /* an address of one announcement with the bytes of another does no harm: to fetch never fails */
    const char *from = atomic_load_explicit(&threads[thread].ahead, memory_order_relaxed);
    int64_t left =
        from == NULL ? 0
                     : atomic_load_explicit(&threads[thread].num_ahead_bytes, memory_order_relaxed);
    for (int spin = 0; spin < SPINS; spin++) {
        const uint64_t call = atomic_load(&pool.call);
        if (call != seen)
            return call;
        if (left <= 0) {
            pause_briefly();
            continue;
        }
        for (int64_t i = 0; i < FETCHED_AT_ONCE && i < left; i += 64)
            __builtin_prefetch(from + i, 0, 2);
        from += FETCHED_AT_ONCE;
        left -= FETCHED_AT_ONCE;
    }
    pthread_mutex_lock(&pool.mutex);
    pool.num_sleeping++;
    while (atomic_load(&pool.call) == seen)
        pthread_cond_wait(&pool.has_work, &pool.mutex);
    pool.num_sleeping--;
    pthread_mutex_unlock(&pool.mutex);
    return atomic_load(&pool.call);
}

static void *help(void *argument)
{
    const uint64_t index = (uint64_t)(uintptr_t)argument;
    uint64_t call = 0;
    for (;;) {
        call = next_call(call, index + 1);
        if (index < (call & MAX_HELPERS) && join(call)) {
            work(index + 1);
            atomic_fetch_add(&pool.num_done, 1);
        }
    }
    return NULL;
}

/* As many helpers as there are, or could be started. */
static int64_t started_helpers(int64_t num_wanted)
{
    num_wanted = num_wanted < MAX_HELPERS ? num_wanted : MAX_HELPERS;
    while (pool.num_helpers < num_wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(uintptr_t)pool.num_helpers) != 0)
            return pool.num_helpers;
        pthread_detach(thread);
        pool.num_helpers++;
    }
    return num_wanted;
}

/* Items in as many shares as threads take part, or in one. */
static void run(int64_t num_threads, int64_t num_items, int are_shared, parallel_body body,
                void *context)
{
    num_threads = num_threads < num_items ? num_threads : num_items;
    const int64_t num_helpers = num_threads > 1 ? started_helpers(num_threads - 1) : 0;
    if (num_helpers == 0) {
        for (int64_t item = 0; item < num_items; item++)
            body(context, item);
        return;
    }
    pool.body = body;
    pool.context = context;
    const int64_t num_shares = are_shared ? num_helpers + 1 : 1;
    pool.num_shares = (uint64_t)num_shares;
    for (int64_t i = 0; i < num_shares; i++) {
        atomic_store(&threads[i].next_item, num_items * i / num_shares);
        threads[i].end_item = num_items * (i + 1) / num_shares;
    }
    atomic_store(&pool.num_done, 0);
    pthread_mutex_lock(&pool.mutex);
    const uint64_t number = (atomic_load(&pool.call) >> 8) + 1;
    atomic_store(&pool.joined, number << 8);
    atomic_store(&pool.call, number << 8 | (uint64_t)num_helpers);
    if (pool.num_sleeping > 0)
        pthread_cond_broadcast(&pool.has_work);
    pthread_mutex_unlock(&pool.mutex);
    work(0);
    const uint64_t num_joined = atomic_exchange(&pool.joined, 0) & MAX_HELPERS;
    for (int spin = 0; atomic_load(&pool.num_done) < num_joined; spin++) {
        if (spin < SPINS)
            pause_briefly();
        else
            sched_yield(); /* a helper has lost its core amid an item */
    }
}

void parallel_for(int64_t num_threads, int64_t num_items, parallel_body body, void *context)
{
    run(num_threads, num_items, 0, body, context);
}

void parallel_shares(int64_t num_threads, int64_t num_items, parallel_body body, void *context)
{
    run(num_threads, num_items, 1, body, context);
}

void *grown(struct memory *memory, size_t num_bytes)
{
    if (num_bytes > memory->capacity) {
        num_bytes = (num_bytes + 4095) / 4096 * 4096;
        free(memory->address);
        memory->address = aligned_alloc(64, num_bytes);
        memory->capacity = memory->address == NULL ? 0 : num_bytes;
    }
    return memory->address;
}

void *scratch(size_t num_bytes)
{
    static _Thread_local struct memory memory;
    return grown(&memory, num_bytes);
}
