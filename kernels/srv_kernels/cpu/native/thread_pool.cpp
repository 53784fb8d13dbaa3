#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "pause.h"

namespace srv {
namespace {

constexpr std::chrono::microseconds SPIN{100};  // longer than Python takes between two kernels
constexpr int PAUSES = 64;                      // polls between two reads of the clock
constexpr int CHUNKS = 4;                       // per thread

// Spins until `ready()`; false after SPIN.
template <class Ready>
bool spin_until(Ready&& ready) {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < PAUSES; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() - begin < SPIN);
    return ready();
}

// The next chunk to claim, the number of chunks, and the run that they belong to. One 64-bit value, so that a claim is
// a single compare-and-swap; aligned to its size, or Clang calls libatomic.
struct alignas(uint64_t) Claims {
    uint32_t run;
    uint16_t chunks, next;
};
static_assert(std::atomic<Claims>::is_always_lock_free);

class ThreadPool {
public:
    explicit ThreadPool(int count) : count_(count), pid_(getpid()) {
        for (int thread = 1; thread < count; ++thread) workers_.emplace_back([this] { serve(); });
    }

    ~ThreadPool() {
        stop_.store(true);
        runs_.fetch_add(1);
        runs_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    bool usable() const { return pid_ == getpid(); }
    int count() const { return count_; }

    void run(Body body, void* context) {
        std::lock_guard<std::mutex> turn(turn_);
        const int chunks = min_of(count_ * CHUNKS, UINT16_MAX);
        body_ = body;
        context_ = context;
        left_.store(chunks, std::memory_order_relaxed);
        const uint32_t run = runs_.load(std::memory_order_relaxed) + 1;
        claims_.store({run, static_cast<uint16_t>(chunks), 0}, std::memory_order_release);
        runs_.store(run, std::memory_order_release);
        runs_.notify_all();
        work();
        while (!spin_until([this] { return left_.load(std::memory_order_acquire) == 0; })) {
            const int left = left_.load(std::memory_order_acquire);
            if (left != 0) left_.wait(left);  // another process occupies a core: give up this one
        }
    }

private:
    static int min_of(int value, int most) { return value < most ? value : most; }

    void serve() {
        uint32_t seen = 0;
        for (;;) {
            if (!spin_until([&] { return runs_.load(std::memory_order_acquire) != seen; })) runs_.wait(seen);
            seen = runs_.load(std::memory_order_acquire);
            if (stop_.load()) return;
            work();
        }
    }

    // Claims and runs chunks until none is left. A run ends only when all claimed chunks are done, so `body_` is still
    // its own.
    void work() {
        int done = 0;
        for (Claims found = claims_.load(std::memory_order_acquire); found.next < found.chunks;) {
            const Claims claimed{found.run, found.chunks, static_cast<uint16_t>(found.next + 1)};
            if (!claims_.compare_exchange_weak(found, claimed, std::memory_order_acq_rel)) continue;
            body_(context_, found.next, found.chunks);
            ++done;
            found = claims_.load(std::memory_order_acquire);
        }
        if (done != 0 && left_.fetch_sub(done, std::memory_order_acq_rel) == done) left_.notify_one();
    }

    const int count_;
    const pid_t pid_;
    std::mutex turn_;
    Body body_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<Claims> claims_{};
    alignas(64) std::atomic<uint32_t> runs_{0};
    alignas(64) std::atomic<int> left_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

std::mutex changing;
std::atomic<int> thread_count{1};
// Never destroyed: other threads may run kernels until the process exits.
std::atomic<ThreadPool*> pool{nullptr};

ThreadPool* current() {
    ThreadPool* found = pool.load(std::memory_order_acquire);
    if (found != nullptr && found->usable() && found->count() == thread_count.load()) return found;
    std::lock_guard<std::mutex> guard(changing);
    found = pool.load(std::memory_order_acquire);
    if (found != nullptr && found->usable() && found->count() == thread_count.load()) return found;
    if (found != nullptr && found->usable()) delete found;  // a forked child has no threads to join
    found = new ThreadPool(thread_count.load());
    pool.store(found, std::memory_order_release);
    return found;
}

}  // namespace

int threads() { return thread_count.load(std::memory_order_relaxed); }

void set_threads(int count) { thread_count.store(count < 1 ? 1 : count); }

void run_chunks(Body body, void* context) { current()->run(body, context); }

}  // namespace srv
