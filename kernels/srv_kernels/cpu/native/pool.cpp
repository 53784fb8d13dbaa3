#include "pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

namespace srv {
namespace {

constexpr std::chrono::microseconds SPIN{100};  // longer than the interpreter takes between two kernels
constexpr int PAUSES = 64;                      // looks at the flag between two looks at the clock

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spin until `ready()`; false when it has taken longer than SPIN.
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

class Pool {
public:
    explicit Pool(int count) : count_(count), pid_(getpid()) {
        for (int thread = 1; thread < count; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    }

    ~Pool() {
        stop_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    bool usable() const { return pid_ == getpid(); }
    int count() const { return count_; }

    void run(Body body, void* context) {
        std::lock_guard<std::mutex> turn(turn_);
        body_ = body;
        context_ = context;
        left_.store(count_ - 1, std::memory_order_relaxed);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        body(context, 0, count_);
        while (!spin_until([this] { return left_.load(std::memory_order_acquire) == 0; })) {
            const int left = left_.load(std::memory_order_acquire);
            if (left != 0) left_.wait(left);  // a core is busy with something else: leave it this one's share
        }
    }

private:
    void work(int thread) {
        uint32_t seen = 0;
        for (;;) {
            if (!spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; })) epoch_.wait(seen);
            seen = epoch_.load(std::memory_order_acquire);
            if (stop_.load()) return;
            body_(context_, thread, count_);
            if (left_.fetch_sub(1, std::memory_order_release) == 1) left_.notify_one();
        }
    }

    const int count_;
    const pid_t pid_;
    std::mutex turn_;
    Body body_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> left_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

std::mutex changing;
std::atomic<int> wanted{1};
// Never destroyed: kernels may run on other threads until the process ends.
std::atomic<Pool*> pool{nullptr};

Pool* current() {
    Pool* found = pool.load(std::memory_order_acquire);
    if (found != nullptr && found->usable() && found->count() == wanted.load()) return found;
    std::lock_guard<std::mutex> guard(changing);
    found = pool.load(std::memory_order_acquire);
    if (found != nullptr && found->usable() && found->count() == wanted.load()) return found;
    if (found != nullptr && found->usable()) delete found;  // a forked child has no such threads to join
    found = new Pool(wanted.load());
    pool.store(found, std::memory_order_release);
    return found;
}

}  // namespace

int threads() { return wanted.load(std::memory_order_relaxed); }

void set_threads(int count) { wanted.store(count < 1 ? 1 : count); }

void run_on_all(Body body, void* context) { current()->run(body, context); }

}  // namespace srv
