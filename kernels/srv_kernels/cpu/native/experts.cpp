// The experts of a layer: per token, the sum over its experts of weight * down(activation(gate(x)) * up(x)).
//
// A row is one token with one of its experts. Rows are ordered by expert, so that the rows of an expert are consecutive
// and its weights are read once:
//
//     gate_up   [rows, 2 intermediate]   one grouped product: threads share the tiles of all experts that have rows
//     gate      [rows, intermediate]     activation(gate) * up; activation(up) of experts that have up alone
//     down      [rows, hidden]           one grouped product
//     combine   [tokens, hidden]         the weighted sum of a token's rows, in the order of its ids
//
// For one token that is as many rows as it has experts, and the time is that of reading their weights. Products and
// sums are float32 between the steps; x is rounded to its type, or quantized, only where a product multiplies it.
//
// A row's results do not depend on the other rows (see linear.cpp and gguf_linear.cpp), and a token's sum has a fixed
// order, so that a token's result does not depend on its batch. Many tokens are therefore computed some at a time, so
// that intermediate results take limited memory.
#include "experts.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace srv {
namespace {

constexpr int64_t MOST_ROWS = 4096;  // of one pass

// The rows of some tokens, ordered by expert. Memory grows and is kept, so that steps do not allocate.
class Rows {
public:
    void order(const int64_t* ids, int64_t tokens, int64_t top_k, int64_t experts) {
        const auto valid = [experts](int64_t id) { return id >= 0 && id < experts; };
        ends_.assign(experts, 0);
        for (int64_t i = 0; i < tokens * top_k; ++i) {
            if (valid(ids[i])) ++ends_[ids[i]];
        }
        groups_.clear();
        int64_t begin = 0;
        for (int64_t expert = 0; expert < experts; ++expert) {
            const int64_t count = ends_[expert];
            if (count != 0) groups_.push_back({expert, begin, count});
            ends_[expert] = begin;  // the next free row
            begin += count;
        }
        tokens_.resize(begin);
        rows_.resize(tokens * top_k);
        for (int64_t i = 0; i < tokens * top_k; ++i) {
            rows_[i] = valid(ids[i]) ? static_cast<int32_t>(ends_[ids[i]]++) : -1;
            if (rows_[i] >= 0) tokens_[rows_[i]] = static_cast<int32_t>(i / top_k);
        }
    }

    int64_t count() const { return static_cast<int64_t>(tokens_.size()); }
    const int32_t* of_tokens() const { return rows_.data(); }  // [tokens, top_k]: the row; -1: none
    Grouping grouping(bool gathers) const {
        return {groups_.data(), static_cast<int64_t>(groups_.size()), gathers ? tokens_.data() : nullptr};
    }

private:
    std::vector<int64_t> ends_;
    std::vector<RowGroup> groups_;
    std::vector<int32_t> tokens_, rows_;
};

struct Memory {
    Rows rows;
    std::vector<float> products, gated;  // products: of gate_up, then of down
};

float* at_least(std::vector<float>& memory, int64_t elements) {
    if (static_cast<int64_t>(memory.size()) < elements) memory.resize(elements);
    return memory.data();
}

// Inputs, outputs and weights of one of the two products.
struct Product {
    const void *weight, *bias;
    const float* scales;
    int64_t inputs, outputs;
    int32_t ggml_type;  // 0: none
    int64_t scale_inputs;  // of FP8; 0: none
    bool block_scales;
};

void multiply(const ExpertKernels& kernels, Type type, const Product& product, const void* x, int64_t x_stride,
              const Grouping& grouping, int64_t rows, float* out) {
    if (product.ggml_type != 0) {
        GgufLinearArgs args{x, static_cast<const uint8_t*>(product.weight), product.bias, out, nullptr, nullptr,
                            nullptr, nullptr, rows, product.inputs, product.outputs, x_stride, product.outputs,
                            GgmlType{product.ggml_type}, 0, 1, &grouping};
        return kernels.gguf_linear(type, args);
    }
    kernels.linear(type, {x, product.weight, product.bias, out, rows, product.inputs, product.outputs, x_stride,
                          product.outputs, product.scales, nullptr, true, &grouping, product.scale_inputs,
                          product.block_scales});
}

int64_t width_of(Type type) { return type == Type::float32 ? 4 : 2; }

// Computes the tokens [begin, end).
void run_tokens(const ExpertKernels& kernels, Type type, const ExpertsArgs& a, Memory& memory, int64_t begin,
                int64_t end) {
    memory.rows.order(a.ids + begin * a.top_k, end - begin, a.top_k, a.experts);
    const int64_t rows = memory.rows.count(), width = width_of(type);
    const int64_t outputs = parts_of(a.activation) * a.intermediate;
    float* const products = at_least(memory.products, rows * std::max(outputs, a.hidden));
    float* const gated = at_least(memory.gated, rows * a.intermediate);
    if (rows != 0) {
        const Type gated_type = a.down_type != 0 ? Type::float32 : type;  // the product quantizes float32 as well
        const Product gate_up{a.gate_up, a.gate_up_bias, a.gate_up_scales, a.hidden, outputs, a.gate_up_type,
                              a.gate_up_scale_inputs, a.gate_up_block_scales != 0};
        const Product down{a.down, a.down_bias, a.down_scales, a.intermediate, a.hidden, a.down_type,
                           a.down_scale_inputs, a.down_block_scales != 0};
        const void* x = static_cast<const uint8_t*>(a.x) + begin * a.x_stride * width;
        multiply(kernels, type, gate_up, x, a.x_stride, memory.rows.grouping(true), rows, products);
        kernels.gate(gated_type, {products, gated, rows, a.intermediate, a.activation});
        multiply(kernels, gated_type, down, gated, a.intermediate, memory.rows.grouping(false), rows, products);
    }
    void* const out = static_cast<uint8_t*>(a.out) + begin * a.hidden * width;
    kernels.combine(type, {products, memory.rows.of_tokens(), a.weights + begin * a.top_k, out, end - begin, a.top_k,
                           a.hidden});
}

}  // namespace

void run_experts(const ExpertKernels& kernels, Type type, const ExpertsArgs& args) {
    thread_local Memory memory;
    const int64_t step = std::max<int64_t>(1, MOST_ROWS / std::max<int64_t>(1, args.top_k));
    for (int64_t begin = 0; begin < args.tokens; begin += step) {
        run_tokens(kernels, type, args, memory, begin, std::min(args.tokens, begin + step));
    }
}

}  // namespace srv
