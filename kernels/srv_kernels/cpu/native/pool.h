// The threads that kernels run on: one pool a process, the caller is thread 0.
//
// A worker that has nothing to do spins for a moment, since the next kernel of a step is a few microseconds
// away, and then sleeps, so that an idle server costs nothing.
#pragma once

#include <cstdint>

namespace srv {

// One share of a piece of work: `thread` counts from 0 to `threads` - 1.
using Body = void (*)(void* context, int thread, int threads);

// Run `body` once on every thread and return when all are done. Calls from several threads take turns.
void run_on_all(Body body, void* context);

int threads();

// At least 1. Must not be called while a kernel runs.
void set_threads(int count);

// As run_on_all, for a lambda (int thread, int threads). With `alone`, on the caller only.
template <class Work>
inline void parallel(bool alone, Work&& work) {
    if (alone || threads() == 1) {
        work(0, 1);
        return;
    }
    run_on_all([](void* context, int thread, int count) { (*static_cast<Work*>(context))(thread, count); }, &work);
}

// The part [begin, end) of `total` items that falls to one thread; parts differ by at most one item.
struct Range {
    int64_t begin, end;
};

inline Range part(int64_t total, int thread, int threads) {
    return {total * thread / threads, total * (thread + 1) / threads};
}

}  // namespace srv
