// Threads that work together: a caller and helpers who pass from phase to phase of a job by spinning briefly, and sleep between two jobs that
// don't follow each other closely.
//
// Invariant: a job never depends on a helper's coming. Work is taken piece by piece, and a phase is over when all its pieces are done, whoever
// did them; who comes late finds nothing left and passes on. After a fork there are no helpers, and a busy machine may send them late.

#pragma once

#include <sched.h>
#include <stdint.h>

namespace penstock {

constexpr int MAX_THREADS = 256;

// Calls work(context, worker) in this thread, as worker 0, and in those helpers who come while it lasts, each with a number of its own below
// `threads`; returns when all who came are done. One job at a time has helpers; others run in their callers alone.
void run_team(int threads, void (*work)(void* context, int worker), void* context);

// Pieces of work that may be done in any order. Zeroed before the job, and used once in it.
struct alignas(64) Phase {
    int64_t next;  // the next piece to be taken
    int64_t done;
};

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

constexpr int SPINS = 4096;  // some ten microseconds; then whoever else wants this core may have it

// Takes pieces 0 .. count - 1, as many as it gets.
template <typename Piece>
inline void take(Phase& phase, int64_t count, Piece piece) {
    if (__atomic_load_n(&phase.done, __ATOMIC_ACQUIRE) == count) return;
    for (int64_t index; (index = __atomic_fetch_add(&phase.next, 1, __ATOMIC_RELAXED)) < count;) {
        piece(index);
        __atomic_fetch_add(&phase.done, 1, __ATOMIC_RELEASE);
    }
}

// Returns when all `count` pieces are done by whomever.
inline void wait(const Phase& phase, int64_t count) {
    for (int spins = 0; __atomic_load_n(&phase.done, __ATOMIC_ACQUIRE) != count; spins++) {
        if (spins < SPINS)
            pause_briefly();
        else
            sched_yield();
    }
}

// The piece to take as the `i`-th: each of `threads`, 1 or more, that go at one pace takes neighbouring ones, so that what it asks for ahead of a piece's end
// is its own. One that has to do without the others goes to and fro. With neighbours' pieces in turn a step with 4-bit weights took 10 % longer on a Zen 4.
inline int64_t piece_of(int64_t i, int64_t count, int threads) {
    const int64_t each = count / threads;
    return i < each * threads ? i % threads * each + i / threads : i;
}

template <typename Piece>
inline void share(Phase& phase, int64_t count, Piece piece) {
    take(phase, count, piece);
    wait(phase, count);
}

}  // namespace penstock
