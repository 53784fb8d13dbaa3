// The threads that kernels run on: one pool a process, the caller is one of them.
//
// Work is cut into more shares than there are threads, and each thread takes the next one when it is done: where another
// process has a core for a while, the other threads do what its thread would have done. What a kernel computes must
// not depend on how it was cut.
//
// A worker that has nothing to do spins for a moment, since the next kernel of a step is a few microseconds
// away, and then sleeps, so that an idle server costs nothing.
#pragma once

#include <cstdint>

namespace srv {

// One share of a piece of work: `share` counts from 0 to `shares` - 1.
using Body = void (*)(void* context, int share, int shares);

// Run `body` for every share and return when all are done. Calls from several threads take turns.
void run_shared(Body body, void* context);

int threads();

// At least 1. Must not be called while a kernel runs.
void set_threads(int count);

// As run_shared, for a lambda (int share, int shares). With `alone`, in one share by the caller.
template <class Work>
inline void parallel(bool serial, Work&& work) {
    if (serial || threads() == 1) {
        work(0, 1);
        return;
    }
    run_shared([](void* context, int share, int shares) { (*static_cast<Work*>(context))(share, shares); }, &work);
}

// The part [begin, end) of `total` items that falls to one share; parts differ by at most one item.
struct Range {
    int64_t begin, end;
};

inline Range part(int64_t total, int share, int shares) {
    return {total * share / shares, total * (share + 1) / shares};
}

}  // namespace srv
