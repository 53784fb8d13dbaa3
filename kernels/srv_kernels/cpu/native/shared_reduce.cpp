// The mapping:
//
//     state │ sequence of each member │ member 0: buffer, buffer │ member 1: buffer, buffer │ ...
//
// A tensor is exchanged in chunks, which all members number alike. For chunk k a member copies its part into its buffer
// k % 2, publishes k as its sequence, waits until all others have published k, and reads their buffers. It may write to
// the same buffer again for chunk k + 2: a member publishes k + 1 only after it has read chunk k.
#include "shared_reduce.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include <sched.h>

#include "pause.h"

namespace srv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t CHUNK = 512 * 1024;  // bytes: smaller ones wait more often, larger ones leave the caches
constexpr int64_t BUFFERS = 2;         // per member

// Waiting: the others are usually a few microseconds away, but may compute for long, or wait for this core.
constexpr std::chrono::microseconds SPIN{20}, YIELD{100}, SLEEP{50};

void rest(Clock::duration waited) {
    if (waited < SPIN) return pause();
    if (waited < YIELD) return void(sched_yield());
    std::this_thread::sleep_for(SLEEP);
}

struct alignas(64) State {
    std::atomic<Outcome> failure;  // JOINED while the group is intact
};

struct alignas(64) Sequence {
    std::atomic<uint64_t> published;
};

static_assert(std::atomic<Outcome>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

State& state_of(void* mapping) { return *static_cast<State*>(mapping); }

// Records the first failure of the group and returns it.
Outcome fail(State& state, Outcome failure) {
    Outcome found = JOINED;
    return state.failure.compare_exchange_strong(found, failure) ? failure : found;
}

class Exchange {
public:
    explicit Exchange(const SharedGroup& group)
        : group_(group),
          state_(state_of(group.mapping)),
          sequences_(reinterpret_cast<Sequence*>(&state_ + 1)),
          buffers_(reinterpret_cast<uint8_t*>(sequences_ + group.members)) {}

    // Calls use(begin, count, parts) for each chunk [begin, begin + count) of `bytes` bytes. The part of member m is at
    // parts + m * STRIDE. This member has the first `own` bytes only.
    template <class Use>
    Outcome in_chunks(const uint8_t* data, int64_t own, int64_t bytes, Use&& use) {
        if (const Outcome failure = state_.failure.load(); failure != JOINED) return failure;
        uint64_t sequence = sequences_[group_.rank].published.load(std::memory_order_relaxed);
        for (int64_t begin = 0; begin < bytes; begin += CHUNK) {
            const int64_t count = std::min(CHUNK, bytes - begin);
            uint8_t* const parts = buffers_ + static_cast<int64_t>(++sequence % BUFFERS) * CHUNK;
            if (own > begin) std::memcpy(parts + group_.rank * STRIDE, data + begin, std::min(count, own - begin));
            sequences_[group_.rank].published.store(sequence, std::memory_order_release);
            if (const Outcome outcome = wait_for_all(sequence); outcome != JOINED) return outcome;
            use(begin, count, parts);
        }
        return JOINED;
    }

    static constexpr int64_t STRIDE = BUFFERS * CHUNK;  // bytes from one member's part to the next one's

private:
    // A chunk that all have published succeeds, even if one of them has aborted the group since: so the failure is read
    // before the sequence.
    Outcome wait_for_all(uint64_t sequence) {
        const auto begin = Clock::now();
        for (int64_t member = 0; member < group_.members; ++member) {
            for (;;) {
                const Outcome failure = state_.failure.load();
                if (sequences_[member].published.load(std::memory_order_acquire) >= sequence) break;
                if (failure != JOINED) return failure;
                const auto waited = Clock::now() - begin;
                if (waited > std::chrono::nanoseconds(group_.timeout_ns)) return fail(state_, 1 + member);
                rest(waited);
            }
        }
        return JOINED;
    }

    const SharedGroup& group_;
    State& state_;
    Sequence* const sequences_;
    uint8_t* const buffers_;
};

int64_t width_of(Type type) { return type == Type::float32 ? sizeof(float) : sizeof(uint16_t); }

}  // namespace

int64_t shared_group_bytes(int64_t members) {
    return sizeof(State) + members * (static_cast<int64_t>(sizeof(Sequence)) + Exchange::STRIDE);
}

Outcome shared_all_reduce(const SharedGroup& group, void (*sum)(Type, const SumArgs&), Type type, void* data,
                          int64_t elements) {
    auto* const bytes = static_cast<uint8_t*>(data);
    const int64_t width = width_of(type);
    const int64_t all = elements * width;
    return Exchange(group).in_chunks(bytes, all, all, [&](int64_t begin, int64_t count, const uint8_t* parts) {
        sum(type, {parts, bytes + begin, group.members, count / width, Exchange::STRIDE / width});
    });
}

Outcome shared_reduce_scatter(const SharedGroup& group, void (*sum)(Type, const SumArgs&), Type type, const void* data,
                              int64_t elements, void* out) {
    const int64_t width = width_of(type), mine = elements * width, first = group.rank * mine, all = group.members * mine;
    const auto* const own = static_cast<const uint8_t*>(data);
    auto* const result = static_cast<uint8_t*>(out);
    return Exchange(group).in_chunks(own, all, all, [&](int64_t begin, int64_t count, const uint8_t* parts) {
        const int64_t low = std::max(begin, first), high = std::min(begin + count, first + mine);
        if (low >= high) return;
        sum(type, {parts + low - begin, result + low - first, group.members, (high - low) / width,
                   Exchange::STRIDE / width});
    });
}

Outcome shared_all_gather(const SharedGroup& group, const void* data, int64_t bytes, void* out) {
    const auto* const own = static_cast<const uint8_t*>(data);
    auto* const gathered = static_cast<uint8_t*>(out);
    return Exchange(group).in_chunks(own, bytes, bytes, [&](int64_t begin, int64_t count, const uint8_t* parts) {
        for (int64_t member = 0; member < group.members; ++member) {
            std::memcpy(gathered + member * bytes + begin, parts + member * Exchange::STRIDE, count);
        }
    });
}

Outcome shared_all_to_all(const SharedGroup& group, const void* data, const int64_t* table, void* out) {
    const int64_t members = group.members;
    const auto sent = [&](int64_t from, int64_t until) {  // bytes of `from` that go to the members before `until`
        const int64_t* const row = table + from * members;
        return std::accumulate(row, row + until, int64_t{0});
    };
    int64_t longest = 0;
    for (int64_t member = 0; member < members; ++member) longest = std::max(longest, sent(member, members));
    const auto* const own = static_cast<const uint8_t*>(data);
    const auto copy = [&](int64_t begin, int64_t count, const uint8_t* parts) {
        auto* to = static_cast<uint8_t*>(out);
        for (int64_t member = 0; member < members; ++member) {
            const int64_t first = sent(member, group.rank), bytes = table[member * members + group.rank];
            const int64_t low = std::max(begin, first), high = std::min(begin + count, first + bytes);
            if (low < high) std::memcpy(to + low - first, parts + member * Exchange::STRIDE + low - begin, high - low);
            to += bytes;
        }
    };
    return Exchange(group).in_chunks(own, sent(group.rank, members), longest, copy);
}

Outcome shared_broadcast(const SharedGroup& group, void* data, int64_t bytes, int64_t source) {
    auto* const whole = static_cast<uint8_t*>(data);
    const int64_t own = group.rank == source ? bytes : 0;
    return Exchange(group).in_chunks(whole, own, bytes, [&](int64_t begin, int64_t count, const uint8_t* parts) {
        if (group.rank != source) std::memcpy(whole + begin, parts + source * Exchange::STRIDE, count);
    });
}

void shared_abort(void* mapping) { fail(state_of(mapping), ABORTED); }

}  // namespace srv
