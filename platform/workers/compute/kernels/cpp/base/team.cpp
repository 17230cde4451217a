#include "base/team.hpp"

#include <pthread.h>

namespace penstock {
namespace {

struct Pool {
    pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;  // held by the caller whose job it is
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    void (*work)(void*, int) = nullptr;
    void* context = nullptr;
    int wanted = 0, came = 0, active = 0, num_helpers = 0;
    unsigned num_jobs = 0;  // begun so far
};

constexpr int IDLE_SPINS = 1024;  // some twenty microseconds between two jobs: those of a draft follow each other sooner, and to be woken takes longer

Pool pool;

// Returns when a condition has come true, or else after a while.
template <typename Condition>
void spin(Condition condition) {
    for (int spins = 0; spins < IDLE_SPINS && !condition(); spins++) pause_briefly();
}

void* help(void*) {
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        __atomic_fetch_add(&pool.active, 1, __ATOMIC_RELAXED);
        const unsigned job = pool.num_jobs;
        const int worker = ++pool.came;
        const auto work = pool.work;
        void* context = pool.context;
        pthread_mutex_unlock(&pool.lock);
        work(context, worker);
        pthread_mutex_lock(&pool.lock);
        if (__atomic_sub_fetch(&pool.active, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
        spin([&] { return __atomic_load_n(&pool.num_jobs, __ATOMIC_RELAXED) != job; });
        pthread_mutex_lock(&pool.lock);
    }
    return nullptr;
}

void start_helpers(int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 2 << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.num_helpers < count && pthread_create(&thread, &attributes, help, nullptr) == 0) pool.num_helpers++;
    pthread_attr_destroy(&attributes);
}

}  // namespace

void run_team(int threads, void (*work)(void*, int), void* context) {
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        work(context, 0);
        return;
    }
    const int helpers = (threads < MAX_THREADS ? threads : MAX_THREADS) - 1;
    start_helpers(helpers);
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.context = context;
    pool.came = 0;
    pool.wanted = helpers;
    __atomic_fetch_add(&pool.num_jobs, 1, __ATOMIC_RELAXED);
    if (helpers == 1)
        pthread_cond_signal(&pool.wake);
    else
        pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(context, 0);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0;
    pthread_mutex_unlock(&pool.lock);
    spin([] { return __atomic_load_n(&pool.active, __ATOMIC_ACQUIRE) == 0; });
    pthread_mutex_lock(&pool.lock);
    while (pool.active > 0) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}

}  // namespace penstock
