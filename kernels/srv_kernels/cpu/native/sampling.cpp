// The most likely token of each row, and whether the row can be drawn from at all: one pass over the logits.
//
// Each lane keeps the largest value that it has seen and where that was first; the lanes are compared at the end.
#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr float INFINITE = __builtin_inff();

struct Largest {
    float value = -INFINITE;
    int64_t at = 0;
    bool nan = false;

    // Later than all that were seen before, unless it says where.
    void see(float other, int64_t where) {
        if (other > value || (other == value && where < at)) value = other, at = where;
        nan |= other != other;
    }
};

template <class T>
Largest largest_of(const T* row, int64_t count) {
    Floats values = all(-INFINITE);
    Ints places{}, nan{};
    const int64_t whole = count / LANES;
    for (int64_t block = 0; block < whole; ++block) {
        const Floats now = load(row + block * LANES);
        const Ints later = now > values;
        values = choose(later, now, values);
        places = choose(later, Ints{} + static_cast<int32_t>(block), places);
        nan |= now != now;
    }
    Largest found;
    float most[LANES];
    int32_t blocks[LANES], nans[LANES];
    store(most, values), store(blocks, places), store(nans, nan);
    for (int lane = 0; lane < LANES; ++lane) {
        if (whole > 0) found.see(most[lane], blocks[lane] * LANES + lane);
        found.nan |= nans[lane] != 0;
    }
    for (int64_t i = whole * LANES; i < count; ++i) found.see(to_float(row[i]), i);
    return found;
}

template <class T>
void most_likely_of(const MostLikelyArgs& a) {
    parallel(a.rows == 1, [&](int share, int shares) {
        const Range mine = part(a.rows, share, shares);
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            const Largest found = largest_of(static_cast<const T*>(a.logits) + row * a.stride, a.vocab);
            const bool finite = !found.nan && found.value > -INFINITE && found.value < INFINITE;
            a.tokens[row] = finite ? found.at : 0;
            a.finite[row] = finite;
        }
    });
}

}  // namespace

void most_likely(Type type, const MostLikelyArgs& args) {
    type == Type::float32 ? most_likely_of<float>(args) : most_likely_of<BFloat16>(args);
}

}  // namespace srv::SRV_ISA
