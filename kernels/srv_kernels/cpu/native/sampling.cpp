// Sampling: argmax, or inverse-CDF sampling after top-k, top-p and min-p. Each row is sampled by itself, so that other
// rows cannot change its token.
//
//     temperature 0    the largest logit, the lowest id among equals
//     no filter        the first token in vocabulary order whose cumulative weight exceeds uniform * total
//     any filter       likewise among the kept tokens, by descending logit, then token id
//
// A token's weight is e^((logit - largest) / temperature). With filters, a histogram over the distance from the largest
// logit counts tokens and sums their weights. Only the buckets that contain a filter's bound or the sampled token are
// sorted: few tokens, except at temperatures so high that the whole row falls into few buckets.
#include <algorithm>
#include <memory>

#include "kernels.h"
#include "thread_pool.h"
#include "vector.h"

namespace srv::SRV_ISA {
namespace {

constexpr float INFINITY_F = __builtin_inff();
constexpr int64_t BLOCK = 256;  // tokens summed in float32; the blocks' sums are added in double precision
constexpr int BUCKETS = 1024;   // of the histogram
// Range of the histogram in temperatures: enough for most filters, or the whole range of nonzero weights.
constexpr float NEAR_REACH = 16.0f, FULL_REACH = 88.0f;

struct Argmax {
    float value = -INFINITY_F;
    int64_t at = 0;
    bool nan = false;

    // Among equals the lowest position wins.
    void update(float other, int64_t where) {
        if (other > value || (other == value && where < at)) value = other, at = where;
        nan |= other != other;
    }

    bool finite() const { return !nan && value > -INFINITY_F && value < INFINITY_F; }
};

// Each lane tracks its largest value and the first position of it; the lanes are compared at the end.
template <class T>
Argmax argmax_of(const T* row, int64_t count) {
    Float32x16 values = broadcast(-INFINITY_F);
    Int32x16 positions{}, nan{};
    const int64_t whole = count / LANES;
    for (int64_t block = 0; block < whole; ++block) {
        const Float32x16 now = load(row + block * LANES);
        const Int32x16 later = now > values;
        values = select(later, now, values);
        positions = select(later, Int32x16{} + static_cast<int32_t>(block), positions);
        nan |= now != now;
    }
    Argmax found;
    float maximums[LANES];
    int32_t blocks[LANES], nans[LANES];
    store(maximums, values), store(blocks, positions), store(nans, nan);
    for (int lane = 0; lane < LANES; ++lane) {
        if (whole > 0) found.update(maximums[lane], blocks[lane] * LANES + lane);
        found.nan |= nans[lane] != 0;
    }
    for (int64_t i = whole * LANES; i < count; ++i) found.update(to_float(row[i]), i);
    return found;
}

template <class T>
void most_likely_impl(const MostLikelyArgs& a) {
    parallel(a.rows == 1, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.rows, chunk, chunks);
        for (int64_t row = mine.begin; row < mine.end; ++row) {
            const Argmax found = argmax_of(static_cast<const T*>(a.logits) + row * a.stride, a.vocab);
            a.tokens[row] = found.finite() ? found.at : 0;
            a.finite[row] = found.finite();
        }
    });
}

// A row to sample from: finite logits, temperature above 0.
template <class T>
struct Row {
    const T* logits;
    int64_t vocab;
    float largest, temperature;

    // Sixteen logits from `from` on; -inf past the vocabulary.
    Float32x16 at(int64_t from) const {
        if (from + LANES <= vocab) return load(logits + from);
        float values[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            values[lane] = from + lane < vocab ? to_float(logits[from + lane]) : -INFINITY_F;
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

// The threshold for the cumulative weight: below the total, so that rounding cannot select past the last token.
inline double threshold_of(double uniform, double total) {
    const double threshold = uniform * total, limit = __builtin_nextafter(total, 0.0);
    return threshold < limit ? threshold : limit;
}

// The first token of the block at `from` whose cumulative weight exceeds the threshold; the last token of nonzero
// weight, if rounding left the sum below it.
template <class T>
int64_t first_above(const Row<T>& row, int64_t from, double threshold) {
    double total = 0;
    int64_t last = from;
    for (const int64_t end = row.end_of_block(from); from < end; from += LANES) {
        float weights[LANES];
        store(weights, row.weights(row.at(from)));
        for (int lane = 0; lane < LANES; ++lane) {
            if (weights[lane] <= 0) continue;
            last = from + lane;
            if ((total += weights[lane]) > threshold) return last;
        }
    }
    return last;
}

template <class T>
int64_t draw_unfiltered(const Row<T>& row, double uniform) {
    double total = 0, before = 0;
    for (int64_t from = 0; from < row.vocab; from += BLOCK) total += row.weight_of_block(from);
    const double threshold = threshold_of(uniform, total);
    for (int64_t from = 0;; from += BLOCK) {  // ends: the total is above the threshold
        const double weight = row.weight_of_block(from);
        if (before + weight > threshold) return first_above(row, from, threshold - before);
        before += weight;
    }
}

struct Filter {
    int64_t top_k;   // at least 1
    bool has_top_k;  // whether top_k excludes any token
    float top_p, min_p;
};

// Counts and weights of the tokens by distance from the largest logit.
class Histogram {
public:
    template <class T>
    Histogram(const Row<T>& row, float reach) : buckets_(BUCKETS / reach) {
        scale_ = buckets_ / row.temperature < __FLT_MAX__ ? buckets_ / row.temperature : __FLT_MAX__;
        Float32x16 outside{};
        double total = 0, weight_of[BUCKETS] = {};
        int64_t count_in[BUCKETS] = {};
        for (int64_t from = 0; from < row.vocab; from += LANES) {
            const Float32x16 logits = row.at(from), positions = positions_of(row, logits);
            const Float32x16 weights = row.weights(logits);
            if (!any_greater(-positions, -static_cast<float>(BUCKETS))) {
                outside += weights;
                continue;
            }
            float position[LANES], weight[LANES];
            store(position, positions), store(weight, weights);
            for (int lane = 0; lane < LANES; ++lane) {
                if (position[lane] < BUCKETS) {
                    const int bucket = static_cast<int>(position[lane]);
                    ++count_in[bucket], weight_of[bucket] += weight[lane];
                } else {
                    total += weight[lane];
                }
            }
        }
        for (int bucket = 0; bucket < BUCKETS; ++bucket) {
            count_[bucket + 1] = count_[bucket] + count_in[bucket];
            weight_[bucket + 1] = weight_[bucket] + weight_of[bucket];
        }
        total_ = total + reduce_add(outside) + weight_[BUCKETS];
    }

    // The bucket of each of sixteen logits, after truncation; BUCKETS or above: none.
    template <class T>
    Float32x16 positions_of(const Row<T>& row, const Float32x16& logits) const {
        return (row.largest - logits) * scale_;
    }

    // The number and the weight of the tokens in all buckets before `bucket`; total() is the weight of the row.
    int64_t count_before(int bucket) const { return count_[bucket]; }
    double weight_before(int bucket) const { return weight_[bucket]; }
    double total() const { return total_; }

    // The bucket of a weight, off by one at most.
    float position_of(float weight) const { return -__builtin_logf(weight) * buckets_; }

    // The first bucket with which the cumulative count, or weight, reaches a value; BUCKETS if there is none.
    int bucket_reaching(int64_t count) const { return first_reaching(count_, count); }
    int bucket_reaching(double weight) const { return first_reaching(weight_, weight); }

private:
    template <class Number>
    static int first_reaching(const Number (&before)[BUCKETS + 1], Number wanted) {
        int bucket = 0;
        while (bucket < BUCKETS && before[bucket + 1] < wanted) ++bucket;
        return bucket;
    }

    float buckets_, scale_;  // buckets per temperature, and per unit of the logits
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

// The sorted tokens of a bucket.
class Sorted {
public:
    template <class T>
    Sorted(const Row<T>& row, const Histogram& histogram, int bucket)
        : count_(histogram.count_before(bucket + 1) - histogram.count_before(bucket)), found_(new Candidate[count_]) {
        const float begin = static_cast<float>(bucket), end = begin + 1;
        int64_t found = 0;
        for (int64_t from = 0; from < row.vocab && found < count_; from += LANES) {
            const Float32x16 logits = row.at(from), positions = histogram.positions_of(row, logits);
            const Float32x16 inside = select(positions < begin, broadcast(INFINITY_F), positions);
            if (!any_greater(-inside, -end)) continue;
            float position[LANES], logit[LANES], weight[LANES];
            store(position, inside), store(logit, logits), store(weight, row.weights(logits));
            for (int lane = 0; lane < LANES; ++lane) {
                const auto token = static_cast<int32_t>(from + lane);
                if (position[lane] < end) found_[found++] = {logit[lane], weight[lane], token};
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

// The tokens that filters keep: all buckets before `bucket`, and `count` tokens of it; and their total weight.
struct KeptSet {
    int bucket;
    int64_t count;
    double weight;

    // Intersects with another set.
    void limit(const KeptSet& other) {
        if (other.bucket != bucket ? other.bucket < bucket : other.count < count) *this = other;
    }
};

// A row and its histogram.
template <class T>
class BucketedRow {
public:
    BucketedRow(const Row<T>& row, float reach) : row_(row), histogram_(row, reach), covers_all_(reach == FULL_REACH) {}

    // Computes what a filter keeps; false if tokens beyond the histogram's range may belong to it.
    bool find(const Filter& filter, KeptSet& kept) const {
        kept = {BUCKETS - 1, tokens_in(BUCKETS - 1), histogram_.weight_before(BUCKETS)};
        bool found = covers_all_;
        double total = histogram_.total();
        if (filter.has_top_k) {
            const int bucket = histogram_.bucket_reaching(filter.top_k);
            if (bucket < BUCKETS) {
                const int64_t wanted = filter.top_k - histogram_.count_before(bucket);
                kept = take_until(bucket, [=](int64_t count, double, float) { return count == wanted; });
                found = true;
            } else if (!found && filter.top_p < 1) {
                return false;  // top_p refers to the total weight after top_k
            }
            total = kept.weight;
        }
        if (filter.top_p < 1) {
            const double bound = filter.top_p * total;
            const int bucket = histogram_.bucket_reaching(bound);
            if (bucket < BUCKETS) {
                kept.limit(take_until(bucket, [=](int64_t, double upto, float) { return upto >= bound; }));
                found = true;
            }
        }
        if (filter.min_p > 0) {
            const float position = histogram_.position_of(filter.min_p);
            const auto lighter = [=](int64_t, double, float weight) { return weight < filter.min_p; };
            int bucket = position > 1 ? static_cast<int>(position < BUCKETS ? position : BUCKETS) - 1 : 0;
            KeptSet heavier = take_until(bucket, lighter);
            while (heavier.count == tokens_in(bucket) && bucket < BUCKETS - 1 && bucket <= position) {
                heavier = take_until(++bucket, lighter);
            }
            kept.limit(heavier);
            found |= position + 1 < BUCKETS;
        }
        return found;
    }

    // Samples from the kept tokens.
    int64_t draw(const KeptSet& kept, double uniform) const {
        const double threshold = threshold_of(uniform, kept.weight);
        int bucket = 0;
        while (bucket < kept.bucket && histogram_.weight_before(bucket + 1) <= threshold) ++bucket;
        double upto = histogram_.weight_before(bucket);
        int64_t last = 0, left = bucket == kept.bucket ? kept.count : tokens_in(bucket);
        for (const Candidate& candidate : Sorted(row_, histogram_, bucket)) {
            if (left-- == 0 || candidate.weight <= 0) break;
            last = candidate.token;
            if ((upto += candidate.weight) > threshold) break;
        }
        return last;
    }

private:
    int64_t tokens_in(int bucket) const { return histogram_.count_before(bucket + 1) - histogram_.count_before(bucket); }

    // Keeps the tokens of a bucket before the first for which stop(tokens before it in the bucket, total weight before
    // it, its weight) is true, or the whole bucket. Keeps at least one token of the row.
    template <class Stop>
    KeptSet take_until(int bucket, const Stop& stop) const {
        KeptSet found = {bucket, 0, histogram_.weight_before(bucket)};
        for (const Candidate& candidate : Sorted(row_, histogram_, bucket)) {
            if (bucket + found.count > 0 && stop(found.count, found.weight, candidate.weight)) break;
            ++found.count, found.weight += candidate.weight;
        }
        return found;
    }

    const Row<T>& row_;
    Histogram histogram_;
    bool covers_all_;
};

template <class T>
int64_t draw_filtered(const Row<T>& row, const Filter& filter, double uniform) {
    KeptSet kept;
    if (const BucketedRow near(row, NEAR_REACH); near.find(filter, kept)) return near.draw(kept, uniform);
    const BucketedRow full(row, FULL_REACH);
    full.find(filter, kept);
    return full.draw(kept, uniform);
}

template <class T>
int64_t draw_row(const DrawArgs& a, int64_t row) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
    const Argmax largest = argmax_of(logits, a.vocab);
    if (!largest.finite()) return 0;
    const float temperature = a.temperature[row];
    if (temperature <= 0) return largest.at;
    const Filter filter = {a.top_k[row] > 1 ? a.top_k[row] : 1, a.top_k[row] < a.vocab, a.top_p[row], a.min_p[row]};
    const Row<T> drawn = {logits, a.vocab, largest.value, temperature};
    if (filter.has_top_k || filter.top_p < 1 || filter.min_p > 0) return draw_filtered(drawn, filter, a.uniform[row]);
    return draw_unfiltered(drawn, a.uniform[row]);
}

template <class T>
void draw_impl(const DrawArgs& a) {
    parallel(a.rows == 1, [&](int chunk, int chunks) {
        const Range mine = chunk_range(a.rows, chunk, chunks);
        for (int64_t row = mine.begin; row < mine.end; ++row) a.tokens[row] = draw_row<T>(a, row);
    });
}

}  // namespace

void most_likely(Type type, const MostLikelyArgs& args) {
    type == Type::float32 ? most_likely_impl<float>(args) : most_likely_impl<BFloat16>(args);
}

void draw(Type type, const DrawArgs& args) {
    type == Type::float32 ? draw_impl<float>(args) : draw_impl<BFloat16>(args);
}

}  // namespace srv::SRV_ISA
