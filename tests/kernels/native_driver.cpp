// Every kernel of the native library against sums in double precision, without Python: for processors that are emulated.
//
//     native_driver [ISA]
//
// Prints the instruction set, then a line for each kernel, type of numbers and error: the largest, as a share of the sum
// of magnitudes that the result was added up from, and the bound. Ends with 1 if an error is above its bound, or if the
// instruction set is not there.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

extern "C" {
const char* srv_isa();
int32_t srv_choose_isa(const char* name);
void srv_set_threads(int32_t count);
int64_t srv_packed_elements(int64_t outputs, int64_t inputs);
int64_t srv_packed_bytes(int64_t outputs, int64_t inputs);
int64_t srv_packed_blocks(int32_t stored, int64_t outputs, int64_t inputs);
int64_t srv_stored_row_bytes(int32_t stored, int64_t inputs);
void srv_pack(int32_t type, void* packed, const void* weight, int64_t outputs, int64_t inputs, int64_t stride);
void srv_pack_bytes(void* packed, const void* weight, int64_t outputs, int64_t inputs, int64_t stride);
void srv_pack_blocks(int32_t stored, void* packed, const void* rows, int64_t outputs, int64_t inputs, int64_t stride);
void srv_linear(int32_t type, void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                int64_t inputs, int64_t outputs, int64_t x_stride);
void srv_scaled_linear(int32_t type, void* out, const void* x, const void* weight, const float* scales,
                       const void* bias, int64_t rows, int64_t inputs, int64_t outputs, int64_t x_stride);
void srv_byte_linear(int32_t type, const srv::ByteLinearArgs* args);
void srv_block_linear(int32_t type, const srv::BlockLinearArgs* args);
void srv_block_rows(int32_t type, const srv::BlockRowsArgs* args);
void srv_norm(int32_t type, void* out, const void* x, const void* weight, int64_t rows, int64_t dim, int64_t x_stride,
              float eps);
void srv_gate(int32_t type, void* out, const void* x, int64_t rows, int64_t dim, int64_t x_stride);
void srv_rotary(int32_t type, void* q_out, void* k_out, const void* q, const void* k, const float* cos_sin,
                const int64_t* positions, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t turned,
                int64_t q_stride, int64_t k_stride);
void srv_attention(int32_t type, const srv::AttentionArgs* args);
void srv_most_likely(int32_t type, int64_t* tokens, uint8_t* finite, const void* logits, int64_t rows, int64_t vocab,
                     int64_t stride);
}

namespace {

constexpr int FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2;

std::mt19937 bits(1);
std::normal_distribution<float> normal;

// A matrix of float32 or bfloat16 numbers, rows beside one another.
class Matrix {
public:
    Matrix(int type, int64_t rows, int64_t columns, float size = 1.0f)
        : type_(type), columns_(columns), bytes_(rows * columns * width()) {
        for (int64_t i = 0; i < rows * columns; ++i) put(i, normal(bits) * size);
    }

    void* data(int64_t column = 0) { return bytes_.data() + column * width(); }
    double at(int64_t row, int64_t column) const { return get(row * columns_ + column); }

private:
    int64_t width() const { return type_ == BFLOAT16 ? 2 : 4; }

    float get(int64_t i) const {
        uint32_t word = 0;
        if (type_ == BFLOAT16) {
            uint16_t half;
            std::memcpy(&half, bytes_.data() + i * 2, 2);
            word = static_cast<uint32_t>(half) << 16;
        } else {
            std::memcpy(&word, bytes_.data() + i * 4, 4);
        }
        float value;
        std::memcpy(&value, &word, 4);
        return value;
    }

    void put(int64_t i, float value) {
        uint32_t word;
        std::memcpy(&word, &value, 4);
        const auto half = static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
        type_ == BFLOAT16 ? std::memcpy(bytes_.data() + i * 2, &half, 2) : std::memcpy(bytes_.data() + i * 4, &word, 4);
    }

    int type_;
    int64_t columns_;
    std::vector<uint8_t> bytes_;
};

std::vector<int8_t> whole_numbers(int64_t count) {
    std::vector<int8_t> numbers(count);
    for (auto& number : numbers) number = static_cast<int8_t>(bits());
    return numbers;
}

// The largest error seen, and the bound that it may not pass.
class Check {
public:
    Check(std::string name, int type, double of_float32, double of_bfloat16)
        : name_(std::move(name)), type_(type), bound_(type == BFLOAT16 ? of_bfloat16 : of_float32) {}

    void compare(double found, double wanted, double magnitude) {
        const double error = std::fabs(found - wanted) / std::max(magnitude, 1e-9);
        worst_ = error <= worst_ ? worst_ : error;  // NaN is the worst
    }

    bool kept() const {
        const bool kept = worst_ <= bound_;
        std::printf("%-16s %-8s %.2e of %.2e%s\n", name_.c_str(), type_ == BFLOAT16 ? "bfloat16" : "float32", worst_,
                    bound_, kept ? "" : "  TOO FAR");
        return kept;
    }

private:
    std::string name_;
    int type_;
    double bound_, worst_ = 0;
};

// Rounding to bfloat16, once, takes up to 2^-8 of a number; sums in float32 far less.
constexpr double ADDED = 1e-6, ROUNDED = 1.0 / 256;

// Every found(row, output) against the sum of x(row, i) * weight(output, i).
template <class X, class W>
void compare_products(Check& check, const Matrix& found, int64_t rows, int64_t outputs, int64_t inputs, const X& x,
                      const W& weight) {
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = 0, magnitude = 0;
            for (int64_t i = 0; i < inputs; ++i) {
                const double product = x(r, i) * weight(o, i);
                sum += product;
                magnitude += std::fabs(product);
            }
            check.compare(found.at(r, o), sum, magnitude);
        }
    }
}

bool linear(int type) {
    Check check("linear", type, ADDED, ROUNDED);
    for (int64_t rows : {1, 3, 4, 5, 13}) {
        for (int64_t outputs : {33, 64}) {
            for (int64_t inputs : {7, 66}) {
                Matrix x(type, rows, inputs), weight(type, outputs, inputs), out(type, rows, outputs);
                Matrix packed(type, 1, srv_packed_elements(outputs, inputs));
                srv_pack(type, packed.data(), weight.data(), outputs, inputs, inputs);
                srv_linear(type, out.data(), x.data(), packed.data(), nullptr, rows, inputs, outputs, inputs);
                compare_products(
                    check, out, rows, outputs, inputs, [&](auto r, auto i) { return x.at(r, i); },
                    [&](auto o, auto i) { return weight.at(o, i); });
            }
        }
    }
    return check.kept();
}

bool scaled_linear(int type) {
    Check check("linear, int8", type, ADDED, ROUNDED);
    for (int64_t rows : {1, 3, 5}) {
        for (int64_t outputs : {33, 64}) {
            for (int64_t inputs : {8, 67}) {
                Matrix x(type, rows, inputs), out(type, rows, outputs);
                const auto weight = whole_numbers(outputs * inputs);
                std::vector<int8_t> packed(srv_packed_elements(outputs, inputs));
                std::vector<float> scales(outputs);
                for (auto& scale : scales) scale = 0.01f * std::fabs(normal(bits));
                srv_pack(INT8, packed.data(), weight.data(), outputs, inputs, inputs);
                srv_scaled_linear(type, out.data(), x.data(), packed.data(), scales.data(), nullptr, rows, inputs, outputs,
                                  inputs);
                compare_products(
                    check, out, rows, outputs, inputs, [&](auto r, auto i) { return x.at(r, i); },
                    [&](auto o, auto i) { return double(scales[o]) * weight[o * inputs + i]; });
            }
        }
    }
    return check.kept();
}

bool byte_linear(int type) {
    Check check("linear of bytes", type, ADDED, ROUNDED);
    for (int64_t rows : {1, 3, 6}) {
        constexpr int64_t outputs = 40, inputs = 70;
        Matrix x(type, rows, inputs), out(type, rows, outputs);
        const auto weight = whole_numbers(outputs * inputs);
        std::vector<int8_t> packed(srv_packed_bytes(outputs, inputs));
        std::vector<float> scales(outputs, 0.01f);
        std::vector<int32_t> correction(outputs);
        for (int64_t i = 0; i < outputs * inputs; ++i) correction[i / inputs] -= 128 * weight[i];
        srv_pack_bytes(packed.data(), weight.data(), outputs, inputs, inputs);
        srv::ByteLinearArgs args{};
        args.x = x.data(), args.out = out.data(), args.weight = packed.data();
        args.scales = scales.data(), args.correction = correction.data();
        args.rows = rows, args.inputs = args.x_stride = inputs, args.outputs = outputs;
        srv_byte_linear(type, &args);
        std::vector<float> step(rows);
        for (int64_t i = 0; i < rows * inputs; ++i) {
            step[i / inputs] = std::max(step[i / inputs], std::fabs(float(x.at(i / inputs, i % inputs))) / 127.0f);
        }
        compare_products(
            check, out, rows, outputs, inputs,
            [&](auto r, auto i) { return std::nearbyint(float(x.at(r, i)) / step[r]) * double(step[r]); },
            [&](auto o, auto i) { return double(scales[o]) * weight[o * inputs + i]; });
    }
    return check.kept();
}

// A type in GGUF files: the bytes of its block, and where scales in half precision lie in it.
struct StoredType {
    int32_t type;
    int64_t block;
    std::vector<int> scales;
};

const StoredType STORED[] = {{2, 18, {0}},     {3, 20, {0, 2}},   {6, 22, {0}},    {7, 24, {0, 2}},   {8, 34, {0}},
                             {10, 84, {80, 82}}, {11, 110, {108}}, {12, 144, {0, 2}}, {13, 176, {0, 2}}, {14, 210, {208}}};

bool block_linear(int type, const StoredType& stored) {
    Check check("blocks of type " + std::to_string(stored.type), type, ADDED, ROUNDED);
    for (int64_t rows : {1, 2, 4, 5}) {
        constexpr int64_t outputs = 40, inputs = 512;
        const int64_t row_bytes = srv_stored_row_bytes(stored.type, inputs);
        std::vector<uint8_t> file(outputs * row_bytes), packed(srv_packed_blocks(stored.type, outputs, inputs));
        for (auto& byte : file) byte = static_cast<uint8_t>(bits());
        for (size_t block = 0; block < file.size(); block += stored.block) {
            for (int place : stored.scales) {
                const auto small = static_cast<uint16_t>(0x2000 + (bits() & 0xff));  // about 2^-7
                std::memcpy(&file[block + place], &small, 2);
            }
        }
        srv_pack_blocks(stored.type, packed.data(), file.data(), outputs, inputs, row_bytes);
        std::vector<float> weight(outputs * inputs);
        std::vector<int64_t> every(outputs);
        for (int64_t i = 0; i < outputs; ++i) every[i] = i;
        const srv::BlockRowsArgs unpack{packed.data(), every.data(), weight.data(), outputs, inputs,
                                        srv::Stored{stored.type}};
        srv_block_rows(FLOAT32, &unpack);
        Matrix x(type, rows, inputs), out(type, rows, outputs);
        srv::BlockLinearArgs args{};
        args.x = x.data(), args.out = out.data(), args.weight = packed.data();
        args.rows = rows, args.inputs = args.x_stride = inputs, args.outputs = args.out_stride = outputs;
        args.stored = srv::Stored{stored.type};
        srv_block_linear(type, &args);
        // x as the kernel rounds it: 16 numbers have one scale.
        std::vector<float> steps(rows * inputs);
        for (int64_t first = 0; first < rows * inputs; first += 16) {
            float most = 0;
            for (int64_t i = first; i < first + 16; ++i) {
                most = std::max(most, std::fabs(float(x.at(i / inputs, i % inputs))));
            }
            const float scale = most * (1.0f / 127.0f), inverse = 1.0f / scale;
            for (int64_t i = first; i < first + 16; ++i) {
                steps[i] = std::nearbyintf(float(x.at(i / inputs, i % inputs)) * inverse) * scale;
            }
        }
        compare_products(
            check, out, rows, outputs, inputs, [&](auto r, auto i) { return double(steps[r * inputs + i]); },
            [&](auto o, auto i) { return double(weight[o * inputs + i]); });
    }
    return check.kept();
}

bool norm(int type) {
    Check check("norm", type, 8 * ADDED, 2 * ROUNDED);
    constexpr int64_t rows = 3, dim = 70;
    Matrix x(type, rows, dim), weight(type, 1, dim), out(type, rows, dim);
    srv_norm(type, out.data(), x.data(), weight.data(), rows, dim, dim, 1e-5f);
    for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < dim; ++i) squares += x.at(r, i) * x.at(r, i);
        for (int64_t i = 0; i < dim; ++i) {
            const double wanted = x.at(r, i) / std::sqrt(squares / dim + 1e-5) * weight.at(0, i);
            check.compare(out.at(r, i), wanted, std::fabs(wanted));
        }
    }
    return check.kept();
}

bool gate(int type) {
    Check check("gate", type, 8 * ADDED, 2 * ROUNDED);
    constexpr int64_t rows = 3, dim = 70;
    Matrix x(type, rows, 2 * dim, 4.0f), out(type, rows, dim);
    srv_gate(type, out.data(), x.data(), rows, dim, 2 * dim);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < dim; ++i) {
            const double wanted = x.at(r, i) / (1 + std::exp(-x.at(r, i))) * x.at(r, dim + i);
            check.compare(out.at(r, i), wanted, std::fabs(wanted));
        }
    }
    return check.kept();
}

bool rotary(int type) {
    Check check("rotary", type, 8 * ADDED, 2 * ROUNDED);
    constexpr int64_t tokens = 5, heads = 3, kv_heads = 1, dim = 32, places = 9;
    Matrix q(type, tokens, heads * dim), k(type, tokens, kv_heads * dim);
    Matrix q_out(type, tokens, heads * dim), k_out(type, tokens, kv_heads * dim);
    std::vector<float> cos_sin(places * dim);
    for (int64_t i = 0; i < places * dim; ++i) {
        const double angle = double(i / dim) / std::pow(10.0, double(i % dim % (dim / 2)) / 8);
        cos_sin[i] = static_cast<float>(i % dim < dim / 2 ? std::cos(angle) : std::sin(angle));
    }
    const std::vector<int64_t> positions = {8, 0, 3, 3, 7};
    srv_rotary(type, q_out.data(), k_out.data(), q.data(), k.data(), cos_sin.data(), positions.data(), tokens, heads,
               kv_heads, dim, dim, heads * dim, kv_heads * dim);
    const auto compare = [&](const Matrix& from, const Matrix& turned, int64_t token, int64_t first) {
        const float* cosines = &cos_sin[positions[token] * dim];
        for (int64_t i = 0; i < dim / 2; ++i) {
            const double a = from.at(token, first + i), b = from.at(token, first + dim / 2 + i);
            const double cosine = cosines[i], sine = cosines[dim / 2 + i], size = std::fabs(a) + std::fabs(b);
            check.compare(turned.at(token, first + i), a * cosine - b * sine, size);
            check.compare(turned.at(token, first + dim / 2 + i), b * cosine + a * sine, size);
        }
    };
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t head = 0; head < heads; ++head) compare(q, q_out, token, head * dim);
        for (int64_t head = 0; head < kv_heads; ++head) compare(k, k_out, token, head * dim);
    }
    return check.kept();
}

bool most_likely(int type) {
    Check check("most likely", type, 0, 0);
    constexpr int64_t rows = 2, vocab = 1003;
    Matrix logits(type, rows, vocab);
    int64_t tokens[rows];
    uint8_t finite[rows];
    srv_most_likely(type, tokens, finite, logits.data(), rows, vocab, vocab);
    for (int64_t r = 0; r < rows; ++r) {
        int64_t best = 0;
        for (int64_t i = 0; i < vocab; ++i) best = logits.at(r, i) > logits.at(r, best) ? i : best;
        check.compare(double(tokens[r]), double(best), 1);
        check.compare(finite[r], 1, 1);
    }
    return check.kept();
}

// Two prompts that begin with the same pages, then a step of each (which go through the shared keys together), then a
// prompt's second part.
bool attention(int type) {
    Check check("attention", type, 1e-5, 2 * ROUNDED);
    constexpr int64_t heads = 6, kv_heads = 2, group = heads / kv_heads, dim = 32, page = 16, pages = 64, columns = 12;
    constexpr int64_t width = (heads + 2 * kv_heads) * dim, shared = 6 * page, requests = 2;
    Matrix keys(type, pages * kv_heads * page, dim, 0), values(type, pages * kv_heads * page, dim, 0);
    std::vector<int32_t> table(requests * columns);
    for (int64_t i = 0; i < columns; ++i) {
        table[i] = static_cast<int32_t>(3 * i + 1);
        table[columns + i] = static_cast<int32_t>(i < shared / page ? 3 * i + 1 : 3 * i + 2);
    }
    // A request's projections of every token of it: of the second's shared ones they are the first's.
    std::vector<Matrix> seen(requests, Matrix(type, columns * page, width));
    seen[1] = Matrix(type, columns * page, width);
    const auto key_at = [&](int64_t request, int64_t token, int64_t column) {
        return seen[token < shared ? 0 : request].at(token, column);
    };
    const auto step = [&](int64_t first, int64_t count, std::vector<int32_t> before, std::vector<int32_t> queries) {
        std::vector<int32_t> lens(count), starts(count);
        int64_t tokens = 0;
        for (int64_t r = 0; r < count; ++r) {
            starts[r] = static_cast<int32_t>(tokens);
            lens[r] = before[r] + queries[r];
            tokens += queries[r];
        }
        const int64_t bytes = type == BFLOAT16 ? 2 : 4;
        std::vector<uint8_t> x(tokens * width * bytes);
        for (int64_t r = 0; r < count; ++r) {
            std::memcpy(&x[starts[r] * width * bytes], seen[first + r].data(before[r] * width), queries[r] * width * bytes);
        }
        Matrix out(type, tokens, heads * dim);
        srv::AttentionArgs args{};
        args.q = x.data(), args.k = &x[heads * dim * bytes], args.v = &x[(heads + kv_heads) * dim * bytes];
        args.out = out.data(), args.keys = keys.data(), args.values = values.data(), args.table = &table[first * columns];
        args.query_lens = queries.data(), args.kv_lens = lens.data(), args.starts = starts.data();
        args.rows = count, args.columns = columns, args.page_size = page;
        args.heads = heads, args.kv_heads = kv_heads, args.dim = dim;
        args.q_stride = args.k_stride = args.v_stride = width;
        args.scale = static_cast<float>(1 / std::sqrt(double(dim)));
        srv_attention(type, &args);
        for (int64_t r = 0; r < count; ++r) {
            for (int64_t query = 0; query < queries[r] * heads; ++query) {
                const int64_t token = before[r] + query / heads, head = query % heads, kv = head / group;
                std::vector<double> weights(token + 1);
                double total = 0;
                for (int64_t key = 0; key <= token; ++key) {
                    double score = 0;
                    for (int64_t d = 0; d < dim; ++d) {
                        score += seen[first + r].at(token, head * dim + d) * key_at(first + r, key, (heads + kv) * dim + d);
                    }
                    total += weights[key] = std::exp(score / std::sqrt(double(dim)));
                }
                for (int64_t d = 0; d < dim; ++d) {
                    double sum = 0, magnitude = 0;
                    for (int64_t key = 0; key <= token; ++key) {
                        const double value = key_at(first + r, key, (heads + kv_heads + kv) * dim + d);
                        sum += weights[key] / total * value;
                        magnitude += weights[key] / total * std::fabs(value);
                    }
                    check.compare(out.at(starts[r] + query / heads, head * dim + d), sum, magnitude);
                }
            }
        }
    };
    step(0, 1, {0}, {shared + 20});
    step(1, 1, {shared}, {7});
    step(0, 2, {shared + 20, shared + 7}, {1, 1});
    step(0, 2, {shared + 21, shared + 8}, {37, 1});
    return check.kept();
}

}  // namespace

int main(int count, char** words) {
    if (count > 1 && srv_choose_isa(words[1]) == 0) {
        std::printf("%s is not there\n", words[1]);
        return 1;
    }
    srv_set_threads(2);
    std::printf("isa %s\n", srv_isa());
    bool kept = true;
    for (int type : {FLOAT32, BFLOAT16}) {
        for (const auto& kernel : {linear, scaled_linear, byte_linear, norm, gate, rotary, most_likely, attention}) {
            kept = kernel(type) && kept;
        }
        for (const StoredType& stored : STORED) kept = block_linear(type, stored) && kept;
    }
    return kept ? 0 : 1;
}
