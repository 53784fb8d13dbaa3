// A token of each row: the most likely one, or one that is drawn. Rows are drawn one by one, each alone, so that its
// neighbours cannot change its token.
//
//     temperature 0    the most likely token, the lowest id among equals
//     no filter        the first token in vocabulary order whose cumulative weight exceeds uniform * total
//     any filter       likewise among the kept tokens, in order of falling logit, equals by token id
//
// A token's weight is e^((logit - largest) / temperature). For filters, tokens are counted and weighed in buckets by the
// distance from the largest logit. Only those buckets are sorted in which a filter's bound lies, or the token: few tokens of
// many, but at temperatures so high that the whole row lies in few buckets.
#include <algorithm>
#include <memory>

#include "kernels.h"
#include "thread_pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr float UNBOUNDED = __builtin_inff();
constexpr int64_t BLOCK = 256;  // tokens whose weights are added in lanes; blocks are added in double precision
constexpr int BUCKETS = 1024;   // of the histogram
// How far from the largest logit the histogram reaches, in temperatures: as far as most filters keep tokens, or else until
// weights are 0.
constexpr float NEAR = 16.0f, FAR = 88.0f;

struct Largest {
    float value = -UNBOUNDED;
    int64_t at = 0;
    bool nan = false;

    // Later than all that were seen before, unless it says where.
    void see(float other, int64_t where) {
        if (other > value || (other == value && where < at)) value = other, at = where;
        nan |= other != other;
    }

    bool finite() const { return !nan && value > -UNBOUNDED && value < UNBOUNDED; }
};

// Each lane keeps the largest value that it has seen and where that was first; the lanes are compared at the end.
template <class T>
Largest largest_of(const T* row, int64_t count) {
    Float32x16 values = broadcast(-UNBOUNDED);
    Int32x16 places{}, nan{};
    const int64_t whole = count / LANES;
    for (int64_t block = 0; block < whole; ++block) {
        const Float32x16 now = load(row + block * LANES);
        const Int32x16 later = now > values;
        values = select(later, now, values);
        places = select(later, Int32x16{} + static_cast<int32_t>(block), places);
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
            a.tokens[row] = found.finite() ? found.at : 0;
            a.finite[row] = found.finite();
        }
    });
}

// A row to draw from: finite, of a temperature above 0.
template <class T>
struct Row {
    const T* logits;
    int64_t vocab;
    float largest, temperature;

    // Of sixteen tokens from `from` on; past the vocabulary there is nothing to draw.
    Float32x16 at(int64_t from) const {
        if (from + LANES <= vocab) return load(logits + from);
        float values[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            values[lane] = from + lane < vocab ? to_float(logits[from + lane]) : -UNBOUNDED;
        }
        return load(values);
    }

    Float32x16 weights(const Float32x16& at) const { return exponential((at - largest) / temperature); }

    int64_t end_of_block(int64_t from) const { return from + BLOCK < vocab ? from + BLOCK : vocab; }

    double weight_of_block(int64_t from) const {
        Float32x16 total{};
        for (const int64_t end = end_of_block(from); from < end; from += LANES) total += weights(at(from));
        return reduce_add(total);
    }
};

// What the kept tokens' cumulative weight is to exceed: below their total, so that rounding cannot lead past the last.
inline double point_of(double uniform, double total) {
    const double point = uniform * total, most = __builtin_nextafter(total, 0.0);
    return point < most ? point : most;
}

// The first token from `from` on, within its block, whose cumulative weight exceeds the point; the last of any weight, where
// a sum in another order came out higher.
template <class T>
int64_t first_above(const Row<T>& row, int64_t from, double point) {
    double total = 0;
    int64_t last = from;
    for (const int64_t end = row.end_of_block(from); from < end; from += LANES) {
        float weights[LANES];
        store(weights, row.weights(row.at(from)));
        for (int lane = 0; lane < LANES; ++lane) {
            if (weights[lane] <= 0) continue;
            last = from + lane;
            if ((total += weights[lane]) > point) return last;
        }
    }
    return last;
}

template <class T>
int64_t draw_of_all(const Row<T>& row, double uniform) {
    double total = 0, before = 0;
    for (int64_t from = 0; from < row.vocab; from += BLOCK) total += row.weight_of_block(from);
    const double point = point_of(uniform, total);
    for (int64_t from = 0;; from += BLOCK) {  // the last block's end is the total, which is above the point
        const double weight = row.weight_of_block(from);
        if (before + weight > point) return first_above(row, from, point - before);
        before += weight;
    }
}

struct Filter {
    int64_t top_k;  // from 1 on
    bool limited;   // whether top_k leaves any out
    float top_p, min_p;
};

// How many tokens lie how far from the largest logit, and what they weigh.
class Histogram {
public:
    template <class T>
    Histogram(const Row<T>& row, float reach) : buckets_(BUCKETS / reach) {
        scale_ = buckets_ / row.temperature < __FLT_MAX__ ? buckets_ / row.temperature : __FLT_MAX__;
        Float32x16 outside{};
        double total = 0, weight_of[BUCKETS] = {};
        int64_t quantize[BUCKETS] = {};
        for (int64_t from = 0; from < row.vocab; from += LANES) {
            const Float32x16 logits = row.at(from), places = places_of(row, logits), weights = row.weights(logits);
            if (!any_greater(-places, -static_cast<float>(BUCKETS))) {
                outside += weights;
                continue;
            }
            float place[LANES], weight[LANES];
            store(place, places), store(weight, weights);
            for (int lane = 0; lane < LANES; ++lane) {
                if (place[lane] < BUCKETS) {
                    const int bucket = static_cast<int>(place[lane]);
                    ++quantize[bucket], weight_of[bucket] += weight[lane];
                } else {
                    total += weight[lane];
                }
            }
        }
        for (int bucket = 0; bucket < BUCKETS; ++bucket) {
            count_[bucket + 1] = count_[bucket] + quantize[bucket];
            weight_[bucket + 1] = weight_[bucket] + weight_of[bucket];
        }
        total_ = total + reduce_add(outside) + weight_[BUCKETS];
    }

    // Which bucket each of sixteen logits lies in, once it is cut to a whole number; from BUCKETS on, in none.
    template <class T>
    Float32x16 places_of(const Row<T>& row, const Float32x16& logits) const {
        return (row.largest - logits) * scale_;
    }

    // Tokens and weight of the buckets before one; of all that has a bucket, and of the whole row.
    int64_t count_before(int bucket) const { return count_[bucket]; }
    double weight_before(int bucket) const { return weight_[bucket]; }
    double total() const { return total_; }

    // The bucket of a weight, give or take one.
    float place_of(float weight) const { return -__builtin_logf(weight) * buckets_; }

    // The first bucket with whose end so much, or so many, are reached; BUCKETS if there is none.
    int reaching(int64_t count) const { return reached(count_, count); }
    int reaching(double weight) const { return reached(weight_, weight); }

private:
    template <class Number>
    static int reached(const Number (&before)[BUCKETS + 1], Number wanted) {
        int bucket = 0;
        while (bucket < BUCKETS && before[bucket + 1] < wanted) ++bucket;
        return bucket;
    }

    float buckets_, scale_;  // buckets of one temperature, and of one logit
    int64_t count_[BUCKETS + 1] = {};
    double weight_[BUCKETS + 1] = {}, total_;
};

struct Candidate {
    float logit, weight;
    int32_t token;

    bool operator<(const Candidate& other) const {
        return logit != other.logit ? logit > other.logit : token < other.token;
    }
};

// A bucket's tokens, in order.
class Sorted {
public:
    template <class T>
    Sorted(const Row<T>& row, const Histogram& histogram, int bucket)
        : count_(histogram.count_before(bucket + 1) - histogram.count_before(bucket)), found_(new Candidate[count_]) {
        const float begin = static_cast<float>(bucket), end = begin + 1;
        int64_t found = 0;
        for (int64_t from = 0; from < row.vocab && found < count_; from += LANES) {
            const Float32x16 logits = row.at(from), places = histogram.places_of(row, logits);
            const Float32x16 inside = select(places < begin, broadcast(UNBOUNDED), places);
            if (!any_greater(-inside, -end)) continue;
            float place[LANES], logit[LANES], weight[LANES];
            store(place, inside), store(logit, logits), store(weight, row.weights(logits));
            for (int lane = 0; lane < LANES; ++lane) {
                if (place[lane] < end) found_[found++] = {logit[lane], weight[lane], static_cast<int32_t>(from + lane)};
            }
        }
        std::sort(begin_of(), end_of());
    }

    const Candidate* begin() const { return found_.get(); }
    const Candidate* end() const { return found_.get() + count_; }

private:
    Candidate* begin_of() { return found_.get(); }
    Candidate* end_of() { return found_.get() + count_; }

    int64_t count_;
    std::unique_ptr<Candidate[]> found_;
};

// What a filter keeps: all buckets before one, and so many tokens of that; and what these weigh together.
struct Kept {
    int bucket;
    int64_t count;
    double weight;

    // No more than another.
    void limit(const Kept& other) {
        if (other.bucket != bucket ? other.bucket < bucket : other.count < count) *this = other;
    }
};

// A row whose tokens lie in buckets, near enough to the largest logit for what a filter keeps.
template <class T>
class Bucketed {
public:
    Bucketed(const Row<T>& row, float reach) : row_(row), histogram_(row, reach), all_(reach == FAR) {}

    // Whether `kept` is what a filter keeps; else some of that may lie further than the buckets reach.
    bool find(const Filter& filter, Kept& kept) const {
        kept = {BUCKETS - 1, quantize(BUCKETS - 1), histogram_.weight_before(BUCKETS)};
        bool found = all_;
        double total = histogram_.total();
        if (filter.limited) {
            const int bucket = histogram_.reaching(filter.top_k);
            if (bucket < BUCKETS) {
                const int64_t wanted = filter.top_k - histogram_.count_before(bucket);
                kept = until(bucket, [=](int64_t count, double, float) { return count == wanted; });
                found = true;
            } else if (!found && filter.top_p < 1) {
                return false;  // top_p is of what all that top_k keeps weighs
            }
            total = kept.weight;
        }
        if (filter.top_p < 1) {
            const double bound = filter.top_p * total;
            const int bucket = histogram_.reaching(bound);
            if (bucket < BUCKETS) {
                kept.limit(until(bucket, [=](int64_t, double upto, float) { return upto >= bound; }));
                found = true;
            }
        }
        if (filter.min_p > 0) {
            const float place = histogram_.place_of(filter.min_p);
            const auto lighter = [=](int64_t, double, float weight) { return weight < filter.min_p; };
            int bucket = place > 1 ? static_cast<int>(place < BUCKETS ? place : BUCKETS) - 1 : 0;
            Kept heavier = until(bucket, lighter);
            while (heavier.count == quantize(bucket) && bucket < BUCKETS - 1 && bucket <= place) {
                heavier = until(++bucket, lighter);
            }
            kept.limit(heavier);
            found |= place + 1 < BUCKETS;
        }
        return found;
    }

    // The first token whose cumulative weight exceeds a part of what is kept.
    int64_t draw(const Kept& kept, double uniform) const {
        const double point = point_of(uniform, kept.weight);
        int bucket = 0;
        while (bucket < kept.bucket && histogram_.weight_before(bucket + 1) <= point) ++bucket;
        double upto = histogram_.weight_before(bucket);
        int64_t last = 0, left = bucket == kept.bucket ? kept.count : quantize(bucket);
        for (const Candidate& one : Sorted(row_, histogram_, bucket)) {
            if (left-- == 0 || one.weight <= 0) break;
            last = one.token;
            if ((upto += one.weight) > point) break;
        }
        return last;
    }

private:
    int64_t quantize(int bucket) const { return histogram_.count_before(bucket + 1) - histogram_.count_before(bucket); }

    // All tokens before that one of a bucket for which stop(tokens of the bucket before it, all weight before it, its own
    // weight) is true first; up to the bucket's end, where it is for none. One at least.
    template <class Stop>
    Kept until(int bucket, const Stop& stop) const {
        Kept found = {bucket, 0, histogram_.weight_before(bucket)};
        for (const Candidate& one : Sorted(row_, histogram_, bucket)) {
            if (bucket + found.count > 0 && stop(found.count, found.weight, one.weight)) break;
            ++found.count, found.weight += one.weight;
        }
        return found;
    }

    const Row<T>& row_;
    Histogram histogram_;
    bool all_;
};

template <class T>
int64_t draw_of_kept(const Row<T>& row, const Filter& filter, double uniform) {
    Kept kept;
    if (const Bucketed near(row, NEAR); near.find(filter, kept)) return near.draw(kept, uniform);
    const Bucketed far(row, FAR);
    far.find(filter, kept);
    return far.draw(kept, uniform);
}

template <class T>
int64_t draw_row(const DrawArgs& a, int64_t row) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
    const Largest largest = largest_of(logits, a.vocab);
    if (!largest.finite()) return 0;
    const float temperature = a.temperature[row];
    if (temperature <= 0) return largest.at;
    const Filter filter = {a.top_k[row] > 1 ? a.top_k[row] : 1, a.top_k[row] < a.vocab, a.top_p[row], a.min_p[row]};
    const Row<T> drawn = {logits, a.vocab, largest.value, temperature};
    if (filter.limited || filter.top_p < 1 || filter.min_p > 0) return draw_of_kept(drawn, filter, a.uniform[row]);
    return draw_of_all(drawn, a.uniform[row]);
}

template <class T>
void draw_of(const DrawArgs& a) {
    parallel(a.rows == 1, [&](int share, int shares) {
        const Range mine = part(a.rows, share, shares);
        for (int64_t row = mine.begin; row < mine.end; ++row) a.tokens[row] = draw_row<T>(a, row);
    });
}

}  // namespace

void most_likely(Type type, const MostLikelyArgs& args) {
    type == Type::float32 ? most_likely_of<float>(args) : most_likely_of<BFloat16>(args);
}

void draw(Type type, const DrawArgs& args) { type == Type::float32 ? draw_of<float>(args) : draw_of<BFloat16>(args); }

}  // namespace srv::SRV_ISA
