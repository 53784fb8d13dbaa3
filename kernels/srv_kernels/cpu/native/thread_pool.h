// The threads that kernels run on: one pool per process. The calling thread is one of them.
//
// Work is split into more shares than there are threads, and each thread claims the next share when it is done. If
// another process occupies a core for a while, the other threads take over. Results must not depend on the split.
//
// An idle worker spins for a moment, because the next kernel of a step is a few microseconds away, and then sleeps, so
// that an idle server uses no CPU time.
#pragma once

#include <cstdint>

namespace srv {

// Computes one share of the work, 0 <= share < shares.
using Body = void (*)(void* context, int share, int shares);

// Runs `body` for every share and returns when all are done. Calls from several threads are serialized.
void run_shared(Body body, void* context);

int threads();

// At least 1. Must not be called while a kernel runs.
void set_threads(int count);

// Like run_shared, for a lambda (int share, int shares). With `serial`, the caller does all the work.
template <class Work>
inline void parallel(bool serial, Work&& work) {
    if (serial || threads() == 1) {
        work(0, 1);
        return;
    }
    run_shared([](void* context, int share, int shares) { (*static_cast<Work*>(context))(share, shares); }, &work);
}

// The items [begin, end) of `total` that belong to one share; sizes differ by at most one.
struct Range {
    int64_t begin, end;
};

inline Range part(int64_t total, int share, int shares) {
    return {total * share / shares, total * (share + 1) / shares};
}

}  // namespace srv
