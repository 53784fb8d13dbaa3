// The threads that kernels run on: one pool per process. The calling thread is one of them.
//
// Work is split into more chunks than there are threads, and each thread claims the next chunk when it is done. If
// another process occupies a core for a while, the other threads take over. Results must not depend on the split.
//
// An idle worker spins for a moment, because the next kernel of a step is a few microseconds away, and then sleeps, so
// that an idle server uses no CPU time.
#pragma once

#include <cstdint>

namespace srv {

// Computes one chunk of the work, 0 <= chunk < chunks.
using Body = void (*)(void* context, int chunk, int chunks);

// Runs `body` for every chunk and returns when all are done. Calls from several threads are serialized.
void run_chunks(Body body, void* context);

int threads();

// At least 1. Must not be called while a kernel runs.
void set_threads(int count);

// Like run_chunks, for a lambda (int chunk, int chunks). With `serial`, the caller does all the work.
template <class Work>
inline void parallel(bool serial, Work&& work) {
    if (serial || threads() == 1) {
        work(0, 1);
        return;
    }
    run_chunks([](void* context, int chunk, int chunks) { (*static_cast<Work*>(context))(chunk, chunks); }, &work);
}

// The items [begin, end) of `total` that belong to one chunk; sizes differ by at most one.
struct Range {
    int64_t begin, end;
};

inline Range chunk_range(int64_t total, int chunk, int chunks) {
    return {total * chunk / chunks, total * (chunk + 1) / chunks};
}

}  // namespace srv
