// Compares the native kernels with double-precision references, without Python: for emulated processors.
//
//     native_driver [ISA]
//
// Prints the instruction set, then a line per kernel and dtype with its largest error divided by the bound. Exits with
// 1 if one is above 1, or if the instruction set is not available.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"

extern "C" {
const char* srv_isa();
int32_t srv_choose_isa(const char* name);
void srv_set_threads(int32_t count);
int64_t srv_packed_elements(int64_t outputs, int64_t inputs);
int64_t srv_packed_w8a8_bytes(int64_t outputs, int64_t inputs);
int64_t srv_packed_gguf_bytes(int32_t ggml_type, int64_t outputs, int64_t inputs);
int64_t srv_gguf_row_bytes(int32_t ggml_type, int64_t inputs);
void srv_pack(int32_t type, void* packed, const void* weight, int64_t outputs, int64_t inputs, int64_t stride);
void srv_pack_w8a8(void* packed, const void* weight, int64_t outputs, int64_t inputs, int64_t stride);
void srv_pack_gguf(int32_t ggml_type, void* packed, const void* rows, int64_t outputs, int64_t inputs, int64_t stride);
void srv_linear(int32_t type, void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                int64_t inputs, int64_t outputs, int64_t x_stride, int32_t float32_out);
void srv_int8_weight_linear(int32_t type, void* out, const void* x, const void* weight, const float* scales,
                       const void* bias, int64_t rows, int64_t inputs, int64_t outputs, int64_t x_stride,
                       int32_t float32_out);
void srv_fp8_linear(int32_t type, void* out, const void* x, const void* weight, const float* scales, const void* bias,
                    int64_t rows, int64_t inputs, int64_t outputs, int64_t x_stride, int64_t out_stride,
                    int64_t scale_inputs, int32_t block_scales, int32_t float32_out);
void srv_w8a8_linear(int32_t type, const srv::W8a8LinearArgs* args);
void srv_gguf_linear(int32_t type, const srv::GgufLinearArgs* args);
void srv_gguf_rows(int32_t type, const srv::GgufRowsArgs* args);
void srv_rms_norm(int32_t type, void* out, const void* x, const void* weight, int64_t rows, int64_t dim,
                  int64_t x_stride, float eps);
void srv_add_rms_norm(int32_t type, void* out, void* total, const void* x, const void* residual, const void* weight,
                  int64_t rows, int64_t dim, int64_t x_stride, int64_t residual_stride, float eps);
void srv_silu_and_mul(int32_t type, void* out, const void* x, int64_t rows, int64_t dim, int64_t x_stride);
void srv_rotary(int32_t type, void* q_out, void* k_out, const void* q, const void* k, const float* cos_sin,
                const int64_t* positions, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                int64_t rotary_dim, int64_t q_stride, int64_t k_stride);
void srv_attention(int32_t type, const srv::AttentionArgs* args);
void srv_route(int32_t type, const srv::RouteArgs* args);
void srv_experts(int32_t type, const srv::ExpertsArgs* args);
void srv_most_likely(int32_t type, int64_t* tokens, uint8_t* finite, const void* logits, int64_t rows, int64_t vocab,
                     int64_t stride);
void srv_draw(int32_t type, const srv::DrawArgs* args);
int64_t srv_shared_group_bytes(int64_t members);
int64_t srv_shared_all_reduce(int32_t type, void* mapping, int64_t members, int64_t rank, int64_t timeout_ns,
                              void* data, int64_t elements);
}

namespace {

constexpr int FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT16 = 3, FLOAT8_E4M3 = 4, FLOAT8_E5M2 = 5;
constexpr float KEY_SCALE = 0.25f, VALUE_SCALE = 2.0f;  // of pools of float8

std::mt19937 bits(1);
std::normal_distribution<float> normal;

// A contiguous matrix of float32 or bfloat16.
class Matrix {
public:
    Matrix(int type, int64_t rows, int64_t columns, float size = 1.0f)
        : type_(type), columns_(columns), bytes_(rows * columns * width()) {
        for (int64_t i = 0; i < rows * columns; ++i) put(i, normal(bits) * size);
    }

    void* data(int64_t column = 0) { return bytes_.data() + column * width(); }
    double at(int64_t row, int64_t column) const { return get(row * columns_ + column); }

    // Columns [first, first + count) of a row, rounded to the pool's type. scale: that of float8.
    std::vector<double> rounded(int pool, int64_t row, int64_t first, int64_t count, double scale) const {
        std::vector<double> numbers(count);
        double largest = 0;
        for (int64_t i = 0; i < count; ++i) {
            numbers[i] = at(row, first + i);
            largest = std::max(largest, std::fabs(numbers[i]));
        }
        for (double& number : numbers) {
            if (pool == INT8) number = std::nearbyint(number * 127 / largest) * largest / 127;
            const int last = number == 0 ? 0 : std::ilogb(number) - 10;  // the last mantissa bit in half precision
            if (pool == FLOAT16) number = std::ldexp(std::nearbyint(std::ldexp(number, -last)), last);
            if (pool == FLOAT8_E4M3) number = scale * float8(number / scale, -6, 3);
            if (pool == FLOAT8_E5M2) number = scale * float8(number / scale, -14, 2);
        }
        return numbers;
    }

private:
    // Rounded to so many bits of fraction, and more coarsely below 2^smallest.
    static double float8(double number, int smallest, int fraction) {
        const int last = (number == 0 ? smallest : std::max(std::ilogb(number), smallest)) - fraction;
        return std::ldexp(std::nearbyint(std::ldexp(number, -last)), last);
    }

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

std::vector<int8_t> random_int8(int64_t count) {
    std::vector<int8_t> numbers(count);
    for (auto& number : numbers) number = static_cast<int8_t>(bits());
    return numbers;
}

// The tolerance of a kernel: relative to the sum of magnitudes in float32, and in bfloat16 also 2^-8 of the result per
// rounding.
class Check {
public:
    Check(std::string name, int type, int roundings = 1, double sum_error = 1e-6)
        : name_(std::move(name)), type_(type), rounded_(type == BFLOAT16 ? roundings / 256.0 : 0), sum_error_(sum_error) {}

    void compare(double found, double wanted, double magnitude, double doubted = 0) {
        const double allowed = sum_error_ * magnitude + rounded_ * std::fabs(wanted) + doubted + 1e-12;
        const double error = std::fabs(found - wanted) / allowed;
        worst_ = std::isnan(error) ? INFINITY : std::max(worst_, error);
    }

    bool passed() const {
        const bool passed = worst_ <= 1;
        std::printf("%-19s %-8s %.3f%s\n", name_.c_str(), type_ == BFLOAT16 ? "bfloat16" : "float32", worst_,
                    passed ? "" : "  TOO FAR");
        return passed;
    }

private:
    std::string name_;
    int type_;
    double rounded_, sum_error_, worst_ = 0;
};

constexpr auto no_doubt = [](int64_t, int64_t) { return 0.0; };

// Compares each found(row, output) with the sum of x(row, i) * weight(output, i), where x may be off by doubt(row, i).
template <class X, class W, class Doubt = decltype(no_doubt)>
void compare_products(Check& check, const Matrix& found, int64_t rows, int64_t outputs, int64_t inputs, const X& x,
                      const W& weight, const Matrix* bias = nullptr, const Doubt& doubt = no_doubt) {
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = bias == nullptr ? 0 : bias->at(0, o), magnitude = std::fabs(sum), doubted = 0;
            for (int64_t i = 0; i < inputs; ++i) {
                const double product = x(r, i) * weight(o, i);
                sum += product;
                magnitude += std::fabs(product);
                doubted += doubt(r, i) * std::fabs(weight(o, i));
            }
            check.compare(found.at(r, o), sum, magnitude, doubted);
        }
    }
}

bool linear(int type) {
    Check check("linear", type);
    for (int64_t rows : {1, 2, 3, 4, 5, 13, 130}) {
        for (int64_t outputs : {33, 64}) {
            for (int64_t inputs : {7, 66, 520}) {
                Matrix x(type, rows, inputs + 1), weight(type, outputs, inputs), bias(type, 1, outputs);
                Matrix out(type, rows, outputs), packed(type, 1, srv_packed_elements(outputs, inputs));
                srv_pack(type, packed.data(), weight.data(), outputs, inputs, inputs);
                srv_linear(type, out.data(), x.data(), packed.data(), bias.data(), rows, inputs, outputs, inputs + 1,
                           0);
                compare_products(
                    check, out, rows, outputs, inputs, [&](auto r, auto i) { return x.at(r, i); },
                    [&](auto o, auto i) { return weight.at(o, i); }, &bias);
            }
        }
    }
    return check.passed();
}

bool int8_weight_linear(int type) {
    Check check("linear, int8", type);
    for (int64_t rows : {1, 3, 5}) {
        for (int64_t outputs : {33, 64}) {
            for (int64_t inputs : {8, 67}) {
                Matrix x(type, rows, inputs), out(type, rows, outputs);
                const auto weight = random_int8(outputs * inputs);
                std::vector<int8_t> packed(srv_packed_elements(outputs, inputs));
                std::vector<float> scales(outputs);
                for (auto& scale : scales) scale = 0.01f * std::fabs(normal(bits));
                srv_pack(INT8, packed.data(), weight.data(), outputs, inputs, inputs);
                srv_int8_weight_linear(type, out.data(), x.data(), packed.data(), scales.data(), nullptr, rows, inputs,
                                       outputs, inputs, 0);
                compare_products(
                    check, out, rows, outputs, inputs, [&](auto r, auto i) { return x.at(r, i); },
                    [&](auto o, auto i) { return double(scales[o]) * weight[o * inputs + i]; });
            }
        }
    }
    return check.passed();
}

// The value of a finite float8_e4m3fn.
double fp8_value(int8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return code < 0 ? -magnitude : magnitude;
}

void compare_fp8_linear(Check& check, int type, int64_t rows, int64_t outputs, int64_t inputs, int64_t scale_inputs,
                        bool block_scales) {
    Matrix x(type, rows, inputs), out(type, rows, outputs);
    auto weight = random_int8(outputs * inputs);
    for (auto& code : weight) {
        if ((code & 127) == 127) code = static_cast<int8_t>(code ^ 1);  // not NaN
    }
    std::vector<int8_t> packed(srv_packed_elements(outputs, inputs));
    const int64_t columns = (inputs + scale_inputs - 1) / scale_inputs, lanes = block_scales ? 1 : 32;
    std::vector<float> scales((outputs + 31) / 32 * columns * lanes);
    for (auto& scale : scales) scale = 0.01f * std::fabs(normal(bits));
    srv_pack(INT8, packed.data(), weight.data(), outputs, inputs, inputs);
    srv_fp8_linear(type, out.data(), x.data(), packed.data(), scales.data(), nullptr, rows, inputs, outputs, inputs,
                   outputs, scale_inputs, block_scales, 0);
    compare_products(
        check, out, rows, outputs, inputs, [&](auto r, auto i) { return x.at(r, i); },
        [&](auto o, auto i) {
            const float scale = scales[(o / 32 * columns + i / scale_inputs) * lanes + o % lanes];
            return double(scale) / 256 * fp8_value(weight[o * inputs + i]);
        });
}

bool fp8_weight_linear(int type) {
    Check check("linear, FP8", type);
    for (int64_t rows : {1, 3, 13}) {
        for (int64_t outputs : {33, 64}) {
            for (int64_t inputs : {64, 131}) {
                for (int64_t scale_inputs : {32, 1000}) {
                    for (bool block_scales : {false, true}) {
                        compare_fp8_linear(check, type, rows, outputs, inputs, scale_inputs, block_scales);
                    }
                }
            }
        }
    }
    return check.passed();
}

bool w8a8_linear(int type) {
    Check check("linear, w8a8", type);
    for (int64_t rows : {1, 3, 6}) {
        constexpr int64_t outputs = 40, inputs = 70;
        Matrix x(type, rows, inputs), out(type, rows, outputs);
        const auto weight = random_int8(outputs * inputs);
        std::vector<int8_t> packed(srv_packed_w8a8_bytes(outputs, inputs));
        std::vector<float> scales(outputs, 0.01f);
        std::vector<int32_t> compensation(outputs);
        for (int64_t i = 0; i < outputs * inputs; ++i) compensation[i / inputs] -= 128 * weight[i];
        srv_pack_w8a8(packed.data(), weight.data(), outputs, inputs, inputs);
        srv::W8a8LinearArgs args{};
        args.x = x.data(), args.out = out.data(), args.weight = packed.data();
        args.scales = scales.data(), args.compensation = compensation.data();
        args.rows = rows, args.inputs = args.x_stride = inputs, args.outputs = outputs;
        srv_w8a8_linear(type, &args);
        std::vector<float> step(rows);
        for (int64_t i = 0; i < rows * inputs; ++i) {
            step[i / inputs] = std::max(step[i / inputs], std::fabs(float(x.at(i / inputs, i % inputs))) / 127.0f);
        }
        compare_products(
            check, out, rows, outputs, inputs,
            [&](auto r, auto i) { return std::nearbyint(float(x.at(r, i)) / step[r]) * double(step[r]); },
            [&](auto o, auto i) { return double(scales[o]) * weight[o * inputs + i]; });
    }
    return check.passed();
}

// A quantization type: the bytes of its block, and the offsets of its scales: of half precision, but one byte in MXFP4,
// float32 in NF4 and FP4, and the highest four bits of four words in IQ1_M.
struct BlockType {
    int32_t type;
    int64_t block;
    std::vector<int> scales;
};

constexpr int32_t IQ4_NL = 20, IQ4_XS = 23, IQ1_M = 29, MXFP4 = 39, NF4 = 1000, FP4 = 1001;
const BlockType GGML_TYPES[] = {
    {2, 18, {0}},       {3, 20, {0, 2}},    {6, 22, {0}},       {7, 24, {0, 2}},    {8, 34, {0}},
    {10, 84, {80, 82}}, {11, 110, {108}},   {12, 144, {0, 2}},  {13, 176, {0, 2}},  {14, 210, {208}},
    {IQ4_NL, 18, {0}},  {IQ4_XS, 136, {0}}, {MXFP4, 17, {0}},   {NF4, 36, {0}},     {FP4, 36, {0}},
    {16, 66, {0}},      {17, 74, {0}},      {18, 98, {0}},      {19, 50, {0}},      {21, 110, {0}},
    {22, 82, {0}},      {IQ1_M, 56, {48}},  {34, 54, {52}},     {35, 66, {64}},
};

// Writes a scale of about 2^-7.
void put_scale(int32_t type, uint8_t* at) {
    if (type == MXFP4) {
        *at = static_cast<uint8_t>(118 + (bits() & 3));
    } else if (type == NF4 || type == FP4) {
        const float scale = 0x1p-7f + 0x1p-15f * static_cast<float>(bits() & 0xff);
        std::memcpy(at, &scale, 4);
    } else {
        const auto half = static_cast<uint16_t>(0x2000 + (bits() & 0xff));
        if (type != IQ1_M) {
            std::memcpy(at, &half, 2);
            return;
        }
        for (int i = 0; i < 4; ++i) at[2 * i + 1] = static_cast<uint8_t>((at[2 * i + 1] & 15) | (half >> 4 * i & 15) << 4);
    }
}

// Random bits, but for the scales.
std::vector<uint8_t> random_rows(const BlockType& block_type, int64_t outputs, int64_t inputs) {
    std::vector<uint8_t> rows(outputs * srv_gguf_row_bytes(block_type.type, inputs));
    for (auto& byte : rows) byte = static_cast<uint8_t>(bits());
    for (size_t block = 0; block < rows.size(); block += block_type.block) {
        for (int place : block_type.scales) put_scale(block_type.type, &rows[block + place]);
    }
    return rows;
}

bool gguf_linear(int type, const BlockType& block_type) {
    Check check("blocks of type " + std::to_string(block_type.type), type);
    for (int64_t rows : {1, 2, 4, 5, 33}) {
        constexpr int64_t outputs = 40, inputs = 512;
        const int64_t row_bytes = srv_gguf_row_bytes(block_type.type, inputs);
        const std::vector<uint8_t> file = random_rows(block_type, outputs, inputs);
        std::vector<uint8_t> packed(srv_packed_gguf_bytes(block_type.type, outputs, inputs));
        srv_pack_gguf(block_type.type, packed.data(), file.data(), outputs, inputs, row_bytes);
        std::vector<float> weight(outputs * inputs);
        std::vector<int64_t> all_rows(outputs);
        for (int64_t i = 0; i < outputs; ++i) all_rows[i] = i;
        const srv::GgufRowsArgs unpack{packed.data(), all_rows.data(), weight.data(), outputs, inputs,
                                        srv::GgmlType{block_type.type}};
        srv_gguf_rows(FLOAT32, &unpack);
        Matrix x(type, rows, inputs), out(type, rows, outputs);
        srv::GgufLinearArgs args{};
        args.x = x.data(), args.out = out.data(), args.weight = packed.data();
        args.rows = rows, args.inputs = args.x_stride = inputs, args.outputs = args.out_stride = outputs;
        args.ggml_type = srv::GgmlType{block_type.type};
        srv_gguf_linear(type, &args);
        // x as the kernel quantizes it: 16 inputs have one scale, an integer multiple of the row's scale, which is its
        // largest magnitude / (127 * 32,767) on the int32 path, aarch64's. Values halfway between may be rounded either
        // way.
        std::vector<double> rounded(rows * inputs), doubts(rows * inputs);
        const auto largest_of = [&](int64_t first, int64_t count) {
            double largest = 0;
            for (int64_t i = first; i < first + count; ++i) {
                largest = std::max(largest, std::fabs(x.at(i / inputs, i % inputs)));
            }
            return static_cast<float>(largest);
        };
        for (int64_t first = 0; first < rows * inputs; first += 16) {
            const float row_scale = largest_of(first / inputs * inputs, inputs) * (1.0f / (127.0f * 32767.0f));
            const float needed = largest_of(first, 16) * (1.0f / row_scale * (1.0f / 127.0f));
            const double scale = (std::floor(std::min(needed, 32766.0f)) + 1) * row_scale;
            for (int64_t i = first; i < first + 16; ++i) {
                const double steps = x.at(i / inputs, i % inputs) / scale, whole = std::nearbyint(steps);
                rounded[i] = whole * scale;
                doubts[i] = std::fabs(steps - whole) > 0.4999 ? scale : 0;
            }
        }
        compare_products(
            check, out, rows, outputs, inputs, [&](auto r, auto i) { return rounded[r * inputs + i]; },
            [&](auto o, auto i) { return double(weight[o * inputs + i]); }, nullptr,
            [&](auto r, auto i) { return doubts[r * inputs + i]; });
    }
    return check.passed();
}

void compare_norm(Check& check, const Matrix& out, const Matrix& x, const Matrix& weight, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < dim; ++i) squares += x.at(r, i) * x.at(r, i);
        for (int64_t i = 0; i < dim; ++i) {
            const double wanted = x.at(r, i) / std::sqrt(squares / dim + 1e-5) * weight.at(0, i);
            check.compare(out.at(r, i), wanted, std::fabs(wanted));
        }
    }
}

bool rms_norm(int type) {
    Check check("rms_norm", type, 2);
    constexpr int64_t rows = 3, dim = 70;
    Matrix x(type, rows, dim), residual(type, rows, dim), weight(type, 1, dim), out(type, rows, dim);
    srv_rms_norm(type, out.data(), x.data(), weight.data(), rows, dim, dim, 1e-5f);
    compare_norm(check, out, x, weight, rows, dim);
    Matrix total(type, rows, dim);
    srv_add_rms_norm(type, out.data(), total.data(), x.data(), residual.data(), weight.data(), rows, dim, dim, dim,
                     1e-5f);
    for (int64_t i = 0; i < rows * dim; ++i) {
        const double sum = x.at(0, i) + residual.at(0, i);
        check.compare(total.at(0, i), sum, std::fabs(x.at(0, i)) + std::fabs(residual.at(0, i)));
    }
    compare_norm(check, out, total, weight, rows, dim);
    return check.passed();
}

bool silu_and_mul(int type) {
    Check check("silu_and_mul", type, 2);
    constexpr int64_t rows = 3, dim = 70;
    Matrix x(type, rows, 2 * dim, 4.0f), out(type, rows, dim);
    srv_silu_and_mul(type, out.data(), x.data(), rows, dim, 2 * dim);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < dim; ++i) {
            const double wanted = x.at(r, i) / (1 + std::exp(-x.at(r, i))) * x.at(r, dim + i);
            check.compare(out.at(r, i), wanted, std::fabs(wanted));
        }
    }
    return check.passed();
}

bool rotary(int type) {
    Check check("rotary", type);
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
    const auto compare = [&](const Matrix& from, const Matrix& rotated, int64_t token, int64_t first) {
        const float* cosines = &cos_sin[positions[token] * dim];
        for (int64_t i = 0; i < dim / 2; ++i) {
            const double a = from.at(token, first + i), b = from.at(token, first + dim / 2 + i);
            const double cosine = cosines[i], sine = cosines[dim / 2 + i], size = std::fabs(a) + std::fabs(b);
            check.compare(rotated.at(token, first + i), a * cosine - b * sine, size);
            check.compare(rotated.at(token, first + dim / 2 + i), b * cosine + a * sine, size);
        }
    };
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t head = 0; head < heads; ++head) compare(q, q_out, token, head * dim);
        for (int64_t head = 0; head < kv_heads; ++head) compare(k, k_out, token, head * dim);
    }
    return check.passed();
}

bool route(int type) {
    Check check("route", type, 0);
    constexpr int64_t tokens = 3, experts = 21, top_k = 4;
    Matrix logits(FLOAT32, tokens, experts, 2.0f);
    int64_t ids[tokens * top_k];
    float weights[tokens * top_k];
    const srv::RouteArgs args{static_cast<const float*>(logits.data()), nullptr, ids, weights, tokens, experts, top_k,
                              experts, 1, 1, 2.0f, srv::Scoring::softmax, 1};
    srv_route(FLOAT32, &args);
    for (int64_t t = 0; t < tokens; ++t) {
        std::vector<std::pair<double, int64_t>> order;
        for (int64_t e = 0; e < experts; ++e) order.emplace_back(-logits.at(t, e), e);
        std::sort(order.begin(), order.end());
        double total = 0;
        for (int64_t k = 0; k < top_k; ++k) total += std::exp(order[0].first - order[k].first);
        for (int64_t k = 0; k < top_k; ++k) {
            check.compare(double(ids[t * top_k + k]), double(order[k].second), 0);
            const double wanted = 2 * std::exp(order[0].first - order[k].first) / total;
            check.compare(weights[t * top_k + k], wanted, wanted);
        }
    }
    return check.passed();
}

// The experts of some tokens; the ids of each token differ.
struct Choices {
    static constexpr int64_t EXPERTS = 4, TOP_K = 3, HIDDEN = 64, INTERMEDIATE = 32;

    explicit Choices(int64_t tokens) : count(tokens), ids(tokens * TOP_K), weights(tokens * TOP_K) {
        for (int64_t i = 0; i < tokens * TOP_K; ++i) {
            ids[i] = (i / TOP_K + i % TOP_K) % EXPERTS;
            weights[i] = 0.25f + 0.5f * static_cast<float>(i % 5);
        }
    }

    srv::ExpertsArgs args(void* x, const void* gate_up, const void* down, void* out) const {
        srv::ExpertsArgs args{};
        args.x = x, args.ids = ids.data(), args.weights = weights.data(), args.out = out;
        args.gate_up = gate_up, args.down = down;
        args.tokens = count, args.hidden = args.x_stride = HIDDEN, args.intermediate = INTERMEDIATE;
        args.experts = EXPERTS, args.top_k = TOP_K;
        return args;
    }

    int64_t count;
    std::vector<int64_t> ids;
    std::vector<float> weights;
};

bool experts(int type) {
    using C = Choices;
    Check check("experts", type, 2, type == BFLOAT16 ? 1.0 / 256 : 1e-5);
    for (int64_t tokens : {1, 2, 7, 40}) {
        const Choices choices(tokens);
        constexpr int64_t WIDTHS = 2 * C::INTERMEDIATE;
        Matrix x(type, tokens, C::HIDDEN), out(type, tokens, C::HIDDEN);
        Matrix gate_up(type, C::EXPERTS * WIDTHS, C::HIDDEN, 0.25f);
        Matrix down(type, C::EXPERTS * C::HIDDEN, C::INTERMEDIATE, 0.25f);
        // The sizes are whole blocks, so that the matrices of all experts are packed as one.
        Matrix packed_gate_up(type, 1, srv_packed_elements(C::EXPERTS * WIDTHS, C::HIDDEN));
        Matrix packed_down(type, 1, srv_packed_elements(C::EXPERTS * C::HIDDEN, C::INTERMEDIATE));
        srv_pack(type, packed_gate_up.data(), gate_up.data(), C::EXPERTS * WIDTHS, C::HIDDEN, C::HIDDEN);
        srv_pack(type, packed_down.data(), down.data(), C::EXPERTS * C::HIDDEN, C::INTERMEDIATE, C::INTERMEDIATE);
        const auto args = choices.args(x.data(), packed_gate_up.data(), packed_down.data(), out.data());
        srv_experts(type, &args);
        for (int64_t t = 0; t < tokens; ++t) {
            std::vector<double> sums(C::HIDDEN), magnitudes(C::HIDDEN);
            for (int64_t k = 0; k < C::TOP_K; ++k) {
                const int64_t expert = choices.ids[t * C::TOP_K + k];
                const double weight = choices.weights[t * C::TOP_K + k];
                const auto product = [&](int64_t row) {
                    double sum = 0;
                    for (int64_t i = 0; i < C::HIDDEN; ++i) sum += gate_up.at(expert * WIDTHS + row, i) * x.at(t, i);
                    return sum;
                };
                for (int64_t i = 0; i < C::INTERMEDIATE; ++i) {
                    const double gate = product(i), gated = gate / (1 + std::exp(-gate)) * product(C::INTERMEDIATE + i);
                    for (int64_t o = 0; o < C::HIDDEN; ++o) {
                        const double part = gated * down.at(expert * C::HIDDEN + o, i) * weight;
                        sums[o] += part, magnitudes[o] += std::fabs(part);
                    }
                }
            }
            for (int64_t o = 0; o < C::HIDDEN; ++o) check.compare(out.at(t, o), sums[o], magnitudes[o]);
        }
    }
    return check.passed();
}

// Each token alone, and with others, so many that blocks of weights are unpacked: the results are equal.
bool experts_in_blocks(int type) {
    using C = Choices;
    Check check("experts, blocks", type, 0, 0);
    for (const BlockType& block_type : GGML_TYPES) {
        constexpr int64_t tokens = 60, WIDTHS = 2 * C::INTERMEDIATE;
        if (srv_gguf_row_bytes(block_type.type, C::INTERMEDIATE) < 0) continue;  // its blocks are larger
        const Choices choices(tokens);
        const auto packed = [&](int64_t outputs, int64_t inputs) {
            const std::vector<uint8_t> file = random_rows(block_type, outputs, inputs);
            std::vector<uint8_t> to(srv_packed_gguf_bytes(block_type.type, outputs, inputs));
            srv_pack_gguf(block_type.type, to.data(), file.data(), outputs, inputs, file.size() / outputs);
            return to;
        };
        const auto gate_up = packed(C::EXPERTS * WIDTHS, C::HIDDEN);
        const auto down = packed(C::EXPERTS * C::HIDDEN, C::INTERMEDIATE);
        Matrix x(type, tokens, C::HIDDEN), together(type, tokens, C::HIDDEN), alone(type, 1, C::HIDDEN);
        auto args = choices.args(x.data(), gate_up.data(), down.data(), together.data());
        args.gate_up_type = args.down_type = block_type.type;
        srv_experts(type, &args);
        for (int64_t t = 0; t < tokens; ++t) {
            auto one = args;
            one.x = x.data(t * C::HIDDEN), one.tokens = 1, one.out = alone.data();
            one.ids = &choices.ids[t * C::TOP_K], one.weights = &choices.weights[t * C::TOP_K];
            srv_experts(type, &one);
            for (int64_t o = 0; o < C::HIDDEN; ++o) check.compare(alone.at(0, o), together.at(t, o), 0);
        }
    }
    return check.passed();
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
    return check.passed();
}

// Without a filter, and with each: the random number must fall into the sampled token's share of the kept weight.
bool draw(int type) {
    Check check("draw", type, 0, 1.0);
    constexpr int64_t rows = 5, vocab = 1003;
    Matrix logits(type, rows, vocab, 3.0f);
    const float temperature[rows] = {1.0f, 0.7f, 1.0f, 1.5f, 0.0f}, top_p[rows] = {1.0f, 1.0f, 0.8f, 1.0f, 1.0f};
    const float min_p[rows] = {0.0f, 0.0f, 0.0f, 0.1f, 0.0f};
    const int32_t top_k[rows] = {vocab, 20, vocab, vocab, vocab};
    for (double noise : {0.0, 0.3, 0.77, 1.0 - 0x1p-53}) {
        const double uniform[rows] = {noise, noise, noise, noise, noise};
        int64_t tokens[rows];
        const srv::DrawArgs args{logits.data(), temperature, top_k, top_p, min_p, uniform, tokens, rows, vocab, vocab};
        srv_draw(type, &args);
        for (int64_t r = 0; r < rows; ++r) {
            std::vector<std::pair<double, int64_t>> order;
            for (int64_t i = 0; i < vocab; ++i) order.emplace_back(-logits.at(r, i), i);
            if (r == 4) {
                check.compare(double(tokens[r]), double(std::min_element(order.begin(), order.end())->second), 0);
                continue;
            }
            const double least = std::min_element(order.begin(), order.end())->first;
            if (r > 0) std::sort(order.begin(), order.end());
            std::vector<double> weights;
            double all = 0, kept = 0;
            for (const auto& [negative, token] : order) {
                weights.push_back(std::exp((least - negative) / temperature[r]));
                all += weights.back();
            }
            for (int64_t i = 0; i < vocab; ++i) {
                if (i >= top_k[r] || kept >= top_p[r] * all || weights[i] < min_p[r]) weights[i] = 0;
                kept += weights[i];
            }
            double end = 0, share = 0;
            for (int64_t i = 0; i < vocab && share == 0; ++i) {
                end += weights[i] / kept;
                if (order[i].second == tokens[r]) share = weights[i] / kept;
            }
            check.compare(noise, end - share / 2, share / 2 + 1e-5);
        }
    }
    return check.passed();
}

// Two requests that share their first pages.
class Requests {
public:
    static constexpr int64_t HEADS = 8, KV_HEADS = 2, DIM = 16, PAGE = 16, PAGES = 160, COLUMNS = 72;
    static constexpr int64_t SHARED = 66 * PAGE;

    Requests(int type, int pool)
        : type_(type),
          pool_(pool),
          keys_(PAGES * KV_HEADS * PAGE * (DIM + 1) * 4),
          values_(keys_.size()),
          seen_{Matrix(type, COLUMNS * PAGE, WIDTH), Matrix(type, COLUMNS * PAGE, WIDTH)},
          table_(2 * COLUMNS) {
        for (const Matrix& seen : seen_) {
            std::vector<double> kept;
            for (int64_t token = 0; token < COLUMNS * PAGE; ++token) {
                for (int64_t head = 0; head < 2 * KV_HEADS; ++head) {
                    const double scale = head < KV_HEADS ? KEY_SCALE : VALUE_SCALE;
                    const std::vector<double> one = seen.rounded(pool, token, (HEADS + head) * DIM, DIM, scale);
                    kept.insert(kept.end(), one.begin(), one.end());
                }
            }
            kept_.push_back(kept);
        }
        for (int64_t i = 0; i < COLUMNS; ++i) {
            table_[i] = static_cast<int32_t>(2 * i + 1);
            table_[COLUMNS + i] = static_cast<int32_t>(i < SHARED / PAGE ? 2 * i + 1 : 2 * i);
        }
    }

    // A step of the requests from `first` on, with `before` cached tokens and `queries` new ones each. Only the last
    // queries are compared.
    void step(Check& check, int64_t first, std::vector<int32_t> before, std::vector<int32_t> queries,
              int64_t window = 0, float soft_cap = 0) {
        const auto count = static_cast<int64_t>(before.size());
        std::vector<int32_t> lens(count), starts(count);
        int64_t tokens = 0;
        for (int64_t r = 0; r < count; ++r) {
            starts[r] = static_cast<int32_t>(tokens);
            lens[r] = before[r] + queries[r];
            tokens += queries[r];
        }
        const int64_t bytes = type_ == BFLOAT16 ? 2 : 4;
        std::vector<uint8_t> x(tokens * WIDTH * bytes);
        for (int64_t r = 0; r < count; ++r) {
            const void* from = seen_[first + r].data(before[r] * WIDTH);
            std::memcpy(&x[starts[r] * WIDTH * bytes], from, queries[r] * WIDTH * bytes);
        }
        Matrix out(type_, tokens, HEADS * DIM);
        srv::AttentionArgs args{};
        args.q = x.data(), args.k = &x[HEADS * DIM * bytes], args.v = &x[(HEADS + KV_HEADS) * DIM * bytes];
        args.out = out.data(), args.keys = keys_.data(), args.values = values_.data();
        args.table = &table_[first * COLUMNS], args.query_lens = queries.data(), args.kv_lens = lens.data();
        args.starts = starts.data(), args.rows = count, args.columns = COLUMNS, args.page_size = PAGE;
        args.heads = HEADS, args.kv_heads = KV_HEADS, args.dim = DIM;
        args.q_stride = args.k_stride = args.v_stride = WIDTH;
        args.scale = 0.25f, args.soft_cap = soft_cap, args.window = window, args.split_keys = SPLIT, args.pool_type = srv::Type{pool_};
        const bool scaled = pool_ == FLOAT8_E4M3 || pool_ == FLOAT8_E5M2;
        args.key_scale = scaled ? KEY_SCALE : 1, args.value_scale = scaled ? VALUE_SCALE : 1;
        srv_attention(type_, &args);
        for (int64_t r = 0; r < count; ++r) {
            for (int64_t query = std::max(queries[r] - COMPARED, 0); query < queries[r]; ++query) {
                for (int64_t head = 0; head < HEADS; ++head) {
                    compare(check, out, starts[r] + query, first + r, before[r] + query, head, window, soft_cap);
                }
            }
        }
    }

private:
    static constexpr int64_t WIDTH = (HEADS + 2 * KV_HEADS) * DIM, GROUP = HEADS / KV_HEADS, SPLIT = 256;
    static constexpr int32_t COMPARED = 24;

    // A column of a request's keys and values at a position; shared ones are the first request's.
    double kept(int64_t request, int64_t token, int64_t column) const {
        return kept_[token < SHARED ? 0 : request][token * 2 * KV_HEADS * DIM + column];
    }

    void compare(Check& check, const Matrix& out, int64_t row, int64_t request, int64_t token, int64_t head,
                 int64_t window, double soft_cap) const {
        const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, token + 1 - window);
        const int64_t key_column = head / GROUP * DIM, value_column = key_column + KV_HEADS * DIM;
        std::vector<double> weights(token + 1);
        double total = 0;
        for (int64_t key = first; key <= token; ++key) {
            double score = 0;
            for (int64_t d = 0; d < DIM; ++d) {
                score += seen_[request].at(token, head * DIM + d) * kept(request, key, key_column + d);
            }
            score *= 0.25;
            total += weights[key] = std::exp(soft_cap == 0 ? score : soft_cap * std::tanh(score / soft_cap));
        }
        for (int64_t d = 0; d < DIM; ++d) {
            double sum = 0, magnitude = 0;
            for (int64_t key = first; key <= token; ++key) {
                const double value = kept(request, key, value_column + d);
                sum += weights[key] / total * value;
                magnitude += weights[key] / total * std::fabs(value);
            }
            check.compare(out.at(row, head * DIM + d), sum, magnitude);
        }
    }

    int type_, pool_;
    std::vector<uint8_t> keys_, values_;
    std::vector<Matrix> seen_;
    std::vector<std::vector<double>> kept_;  // of each request: [tokens, keys and values, KV_HEADS, DIM]
    std::vector<int32_t> table_;
};

// Prompts, chunked prompts, decode steps that share a prefix, and mixed batches.
bool attention_over(int type, int pool, const char* name) {
    // bfloat16 softmax weights are rounded where the processor multiplies bfloat16, and their exponentials are as exact
    // as that requires; over an int8 pool, queries and weights are rounded to 1/32,767 of their largest magnitude.
    Check check(name, type, 1, type == BFLOAT16 ? 1.0 / 256 : pool == INT8 ? 2e-4 : 1e-5);
    constexpr int32_t SHARED = Requests::SHARED;
    Requests requests(type, pool);
    requests.step(check, 0, {0}, {SHARED + 20});
    requests.step(check, 1, {SHARED}, {7});
    requests.step(check, 0, {SHARED + 20, SHARED + 7}, {1, 1});
    requests.step(check, 0, {SHARED + 21, SHARED + 8}, {37, 1}, 0, 5.0f);
    requests.step(check, 0, {SHARED + 58, SHARED + 9}, {1, 1}, 24);
    return check.passed();
}

// Threads are the members; the sum takes several chunks.
bool shared_all_reduce(int type) {
    Check check("shared all-reduce", type);
    constexpr int64_t members = 3, elements = 300'007, timeout_ns = 60'000'000'000;
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    std::vector<Line> mapping(srv_shared_group_bytes(members) / sizeof(Line));
    Matrix parts(type, members, elements), sums = parts;
    std::vector<std::thread> threads;
    for (int64_t member = 0; member < members; ++member) {
        threads.emplace_back([&, member] {
            if (srv_shared_all_reduce(type, mapping.data(), members, member, timeout_ns, sums.data(member * elements),
                                      elements) != 0) {
                check.compare(NAN, 0, 0);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    for (int64_t i = 0; i < elements; ++i) {
        const double sum = parts.at(0, i) + parts.at(1, i) + parts.at(2, i);
        const double magnitude = std::fabs(parts.at(0, i)) + std::fabs(parts.at(1, i)) + std::fabs(parts.at(2, i));
        for (int64_t member = 0; member < members; ++member) check.compare(sums.at(member, i), sum, magnitude);
    }
    return check.passed();
}

bool attention(int type) { return attention_over(type, type, "attention"); }
bool attention_float16(int type) { return attention_over(type, FLOAT16, "attention float16"); }
bool attention_int8(int type) { return attention_over(type, INT8, "attention int8"); }
bool attention_e4m3(int type) { return attention_over(type, FLOAT8_E4M3, "attention e4m3"); }
bool attention_e5m2(int type) { return attention_over(type, FLOAT8_E5M2, "attention e5m2"); }

}  // namespace

int main(int count, char** words) {
    if (count > 1 && srv_choose_isa(words[1]) == 0) {
        std::printf("%s is not available\n", words[1]);
        return 1;
    }
    srv_set_threads(2);
    std::printf("isa %s\n", srv_isa());
    bool passed = true;
    for (int type : {FLOAT32, BFLOAT16}) {
        for (const auto& kernel : {linear, int8_weight_linear, fp8_weight_linear, w8a8_linear, rms_norm, silu_and_mul,
                                   rotary, route, experts, experts_in_blocks, most_likely, draw, shared_all_reduce,
                                   attention, attention_float16, attention_int8, attention_e4m3, attention_e5m2}) {
            passed = kernel(type) && passed;
        }
        for (const BlockType& block_type : GGML_TYPES) passed = gguf_linear(type, block_type) && passed;
    }
    return passed ? 0 : 1;
}
