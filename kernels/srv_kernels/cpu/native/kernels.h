// The kernels of one instruction set, as a table of functions (`Kernels`), and their arguments. library.cpp picks the
// table.
//
// Matrices are row-major; strides count elements; the elements of a row are contiguous. All tensors of a call have the
// same type, float32 or bfloat16 (`Type`), unless a comment says otherwise. Accumulators are float32. With float32_out,
// the results of a linear layer are the accumulators themselves, not rounded to that type.
#pragma once

#include <cstdint>

#include "gguf.h"

namespace srv {

// int8: packed weights and KV pools. float16: KV pools, and sums over ranks. float8: KV pools.
enum class Type : int32_t { float32 = 0, bfloat16 = 1, int8 = 2, float16 = 3, float8_e4m3 = 4, float8_e5m2 = 5 };

struct RmsNormArgs {
    const void *x, *residual, *weight;  // residual: null, or added to x before the norm
    void *out, *total;                  // total: null, or receives residual + x
    int64_t rows, dim, x_stride, residual_stride;
    float eps;
};

struct SiluAndMulArgs {
    const void* x;  // [rows, 2 dim]: gate, then up
    void* out;      // [rows, dim]
    int64_t rows, dim, x_stride;
};

struct RotaryArgs {
    const void *q, *k;       // [tokens, heads, dim], [tokens, kv_heads, dim]; strides are those of the token axis
    const float* cos_sin;    // [max_position, rotary_dim]: cosines, then sines
    const int64_t* positions;
    void *q_out, *k_out;     // contiguous
    int64_t tokens, heads, kv_heads, dim, rotary_dim, q_stride, k_stride;
};

// out = the sum of `members` parts in their order, rounded once; float32, bfloat16 or float16.
struct SumArgs {
    const void* parts;  // the parts of consecutive members are `stride` elements apart
    void* out;
    int64_t members, elements, stride;
};

// Consecutive rows of a product that have the same weight, by the index of the weight.
struct RowGroup {
    int64_t weight, begin, rows;
};

// A product with several weights of one shape and format, which follow each other in memory, as do their biases and
// scales. Groups are in the order of their rows, which they cover, and none is empty.
struct Grouping {
    const RowGroup* groups;
    int64_t count;
    const int32_t* x_rows;  // [rows]: the row of x that a row is; null: row i is row i of x
};

// y = x W^T + b with a packed weight: see linear.cpp. With `scales` the weight is int8, with one scale per output; or it
// is FP8, if `scale_inputs` is not 0, with scales [blocks(outputs), scale_columns, BLOCK_OUTPUTS] times FP8_FACTOR, each
// for so many inputs. With `block_scales` they are the same for all outputs of a block: [blocks(outputs),
// scale_columns].
struct LinearArgs {
    const void *x, *weight, *bias;  // bias: null, or [outputs]
    void* out;
    int64_t rows, inputs, outputs, x_stride, out_stride;
    const float* scales = nullptr;  // null, or [outputs]
    void* x_operands = nullptr;     // scratch [rows, inputs + APART bytes] from library.cpp, if x is copied; else null
    bool float32_out = false;
    const Grouping* grouping = nullptr;  // null: all rows have the same weight
    int64_t scale_inputs = 0;            // FP8: even, or at least `inputs`
    bool block_scales = false;
};

struct PackArgs {
    const void* weight;  // [outputs, inputs]
    void* packed;        // packed_elements(outputs, inputs) elements
    int64_t outputs, inputs, stride;
};

// Outputs in one block of a packed weight, and consecutive inputs that are interleaved for each of them (VNNI-style).
constexpr int64_t BLOCK_OUTPUTS = 32;
constexpr int64_t INTERLEAVE = 2;

inline int64_t blocks(int64_t outputs) { return (outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS; }
inline int64_t padded_inputs(int64_t inputs) { return (inputs + INTERLEAVE - 1) / INTERLEAVE * INTERLEAVE; }
inline int64_t packed_elements(int64_t outputs, int64_t inputs) {
    return blocks(outputs) * BLOCK_OUTPUTS * padded_inputs(inputs);
}

// Whether rows of x that are so many bytes apart replace each other in the L1 cache while a tile reads them in turn:
// multiples of half a way of it. With 2,048 inputs and more, a product takes up to twice the time then.
constexpr int64_t ALIASED = 2048, APART = 64;
inline bool rows_alias(int64_t rows, int64_t bytes) { return rows >= 8 && bytes != 0 && bytes % ALIASED == 0; }

constexpr float FP8_FACTOR = 256;  // what FP8 weights are divided by in registers: see float_dot.h
inline int64_t scale_columns(const LinearArgs& args) { return (args.inputs + args.scale_inputs - 1) / args.scale_inputs; }
// The scales of one FP8 weight.
inline int64_t scale_count(const LinearArgs& args) {
    return blocks(args.outputs) * scale_columns(args) * (args.block_scales ? 1 : BLOCK_OUTPUTS);
}

// y = x W^T + b with an int8 weight and x quantized to int8 at run time: see int8_linear.cpp.
struct W8a8LinearArgs {
    const void* x;
    const int8_t* weight;         // packed: blocks(outputs) * BLOCK_OUTPUTS * padded_quads(inputs) bytes
    const float* scales;          // [outputs]: scale of the weight, times that of x if it is static
    const int32_t* compensation;  // int32 [outputs], added to the integer sums: offsets the zero point of x
    const void* bias;             // null, or [outputs], added last
    void* out;                    // [rows, outputs], contiguous
    void* quantized;              // scratch [rows, padded_quads(inputs)], MAX_QUANT_BYTES each at most
    float* row_scales;            // scratch [rows]; both come from library.cpp
    int64_t rows, inputs, outputs, x_stride;
    float input_scale_inverse, input_offset;    // static: x * inverse + offset; inverse 0: dynamic, per row
    int32_t float32_out;
};

struct PackW8a8Args {
    const int8_t* weight;  // [outputs, inputs]
    int8_t* packed;
    int64_t outputs, inputs, stride;
};

constexpr int64_t QUAD = 4;
inline int64_t padded_quads(int64_t inputs) { return (inputs + QUAD - 1) / QUAD * QUAD; }

// The scale of 16 inputs of x as an integer multiple of the row's scale: as a float, or twice as int16 for `dot_pairs`.
union SubScale {
    float value;
    int32_t int16_pair;
};

// The sum of 16 or 32 quantized inputs: as a value in units of the row's scale, which the weights' minimum is
// multiplied by, or as the integer that compensates the weights' zero point.
union InputSum {
    float value;
    int32_t offset;
};

// y = x W^T + b with a weight in GGUF quantization: see gguf_linear.cpp. inputs: a multiple of K_BLOCK.
struct GgufLinearArgs {
    const void* x;
    const uint8_t* weight;  // packed: blocks(outputs) * inputs / K_BLOCK * k_block_bytes(shape) bytes
    const void* bias;       // null, or [outputs]
    void* out;
    void* quantized;       // scratch [rows, inputs], MAX_QUANT_BYTES each at most; like the next three
    SubScale* sub_scales;  // scratch [rows, inputs / K_BLOCK, 2]
    InputSum* x_sums;      // scratch [rows, inputs / K_BLOCK, 2]
    float* row_scales;     // scratch [rows]
    int64_t rows, inputs, outputs, x_stride, out_stride;
    GgmlType ggml_type;
    int32_t zero_point;       // of the format; filled in by the kernel
    int32_t float32_out;
    const Grouping* grouping = nullptr;  // null: all rows have the same weight
    const int32_t* columns = nullptr;    // null, or [inputs]: the column of x that each input of the weight is for
};

// Dequantized rows of a packed weight: an embedding lookup.
struct GgufRowsArgs {
    const uint8_t* weight;
    const int64_t* indices;
    void* out;  // [rows, inputs], contiguous
    int64_t rows, inputs;
    GgmlType ggml_type;
};

struct PackGgufArgs {
    const uint8_t* rows;  // as in the GGUF file, `stride` bytes apart
    uint8_t* packed;
    int64_t outputs, inputs, stride;
    GgmlType ggml_type;
};

// The activation of an expert's gate, which is multiplied by up; or of up, without a gate.
//
//     swiglu_clamped   gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up from -7 to 7
//     relu2            the square of max(up, 0), without a gate
enum class Activation : int32_t { silu = 0, gelu_tanh = 1, swiglu_clamped = 2, silu_clamped = 3, relu2 = 4 };

// The projections that gate_up has: the gate and up, or up alone.
constexpr int64_t parts_of(Activation activation) { return activation == Activation::relu2 ? 1 : 2; }

// What experts' scores are: of all experts, or of the chosen ones.
enum class Scoring : int32_t { softmax = 0, sigmoid = 1, softmax_of_top_k = 2 };

// The experts of each token, and their weights: see expert_rows.cpp.
struct RouteArgs {
    const float* logits;  // [tokens, experts]
    const float* bias;    // null, or [experts]: added to the scores that experts are chosen by
    int64_t* ids;         // [tokens, top_k]
    float* weights;       // [tokens, top_k]
    int64_t tokens, experts, top_k, stride, groups, top_groups;
    float scale;
    Scoring scoring;
    int32_t renormalize;
};

// out [rows, dim] = activation(first half of a row of gate_up) * second half, or activation(row) without a gate; out is
// of the call's type.
struct GateArgs {
    const float* gate_up;  // [rows, parts_of(activation) dim]
    void* out;
    int64_t rows, dim;
    Activation activation;
};

// out [tokens, dim] = the sum over a token's experts of weight * part, in their order; out is of the call's type.
struct CombineArgs {
    const float* parts;     // [rows, dim]
    const int32_t* rows;    // [tokens, top_k]: the row of parts; -1: none
    const float* weights;   // [tokens, top_k]
    void* out;
    int64_t tokens, top_k, dim;
};

// A mixture of experts: see experts.cpp. Weights of all experts are packed, one after the other.
struct ExpertsArgs {
    const void* x;         // [tokens, hidden]
    const int64_t* ids;    // [tokens, top_k]; those outside [0, experts) contribute nothing
    const float* weights;  // [tokens, top_k]
    const void *gate_up, *down;  // packed [parts_of(activation) intermediate, hidden], [hidden, intermediate]
    const void *gate_up_bias, *down_bias;        // null, or [experts, outputs] of x's type; see `down_type`
    const float *gate_up_scales, *down_scales;   // null, or of int8 or FP8 weights: see LinearArgs
    void* out;                                   // [tokens, hidden], contiguous
    int64_t tokens, hidden, intermediate, experts, top_k, x_stride;
    int32_t gate_up_type, down_type;  // GgmlType, whose down_bias is float32; 0: weights are not GGUF-quantized
    Activation activation;
    int32_t gate_up_block_scales, down_block_scales;  // of FP8 weights: see LinearArgs
    int64_t gate_up_scale_inputs, down_scale_inputs;  // likewise; 0 for other weights
};

// The argmax of each row, the lowest token id among equals; see sampling.cpp.
struct MostLikelyArgs {
    const void* logits;  // [rows, vocab]
    int64_t* tokens;     // [rows]; 0 where `finite` is 0
    uint8_t* finite;     // [rows]: 0 where a logit is NaN or +inf, or all are -inf; else 1
    int64_t rows, vocab, stride;
};

// One token per row, sampled after top-k, top-p and min-p; see sampling.cpp. Arrays are [rows].
struct DrawArgs {
    const void* logits;        // [rows, vocab]; vocab: below 2^31
    const float* temperature;  // 0: argmax
    const int32_t* top_k;      // vocabulary size: no limit
    const float *top_p, *min_p;
    const double* uniform;     // in [0, 1): the random number
    int64_t* tokens;           // 0 where the logits are not finite (see MostLikelyArgs.finite)
    int64_t rows, vocab, stride;
};

// Causal attention over a paged KV pool, after writing this step's keys and values to the pool.
//
// Row r has query_lens[r] tokens in this step, contiguous in the token axis from starts[r], and kv_lens[r] tokens in
// total, including these. Its token at position p is in page table[r][p / page_size]. A page holds page_size / 16
// blocks of 16 tokens per key head: see kv_layout.h. The pool's type is that of the call, float16, float8 or int8.
struct AttentionArgs {
    const void *q, *k, *v;  // [tokens, heads or kv_heads, dim]; strides are those of the token axis
    void* out;              // [tokens, heads, dim], contiguous
    void *keys, *values;
    const int32_t* table;  // [rows, columns]
    const int32_t *query_lens, *kv_lens, *starts;
    const float* sinks;  // [heads], scores that have no value; null without
    int64_t rows, columns, page_size, heads, kv_heads, dim;
    int64_t q_stride, k_stride, v_stride;
    float scale, soft_cap;  // soft_cap: 0, or scores become soft_cap * tanh(scores / soft_cap)
    int64_t window;         // 0, or a token attends to itself and the window - 1 tokens before it
    int64_t chunk;          // 0, or a token attends only to those of its own chunk of so many positions
    int64_t split_keys;     // the keys of a row with one query are divided at its multiples
    Type pool_type;
    float key_scale, value_scale;  // of a float8 pool, whose vectors are divided by it; otherwise 1
    int64_t temperature_from;      // 0, or capped scores of a query at position p > this n are multiplied by ln(p) / ln(n)
};

// Multi-head latent attention over a paged pool, after writing this step's vectors to it: see latent_attention.cpp. Rows,
// lengths and the page table are those of AttentionArgs. latent_dim and rope_dim: multiples of 16.
struct LatentAttentionArgs {
    const void* q;                   // [tokens, heads, key_dim + rope_dim], the last rope_dim rotated
    const void *latent, *rope;       // [tokens, latent_dim], [tokens, rope_dim]
    const void* up;                  // [heads, key_dim + value_dim, latent_dim], contiguous
    void* out;                       // [tokens, heads, value_dim], contiguous
    const void *latents, *ropes;     // [pages, page_size, latent_dim or rope_dim]; written as well
    const int32_t* table;            // [rows, columns]
    const int32_t *query_lens, *kv_lens, *starts;
    int64_t rows, columns, page_size, heads, latent_dim, key_dim, rope_dim, value_dim;
    int64_t q_stride, latent_stride, rope_stride;  // of the token axis
    int64_t split_keys;              // the keys of a row with one query are divided at its multiples
    int64_t materialise_from;        // queries of a row that is not absorbed: see latent_prefill.h; 0: all rows are
    int64_t part_keys;               // keys of a part of such a row, a multiple of 64; 0: it has one part
    float scale;
};

constexpr int64_t BLOCK_TOKENS = 16;
constexpr int64_t MAX_HEAD_DIM = 512;

struct Kernels {
    const char* name;
    bool widens_bfloat16;  // whether linear layers convert bfloat16 inputs to float32
    void (*rms_norm)(Type, const RmsNormArgs&);
    void (*silu_and_mul)(Type, const SiluAndMulArgs&);
    void (*rotary)(Type, const RotaryArgs&);
    void (*sum)(Type, const SumArgs&);
    void (*linear)(Type, const LinearArgs&);
    void (*pack)(Type, const PackArgs&);
    void (*attention)(Type, const AttentionArgs&);
    int64_t (*attention_blocks)(const AttentionArgs&);  // KV blocks of one head that a call reads
    void (*latent_attention)(Type, const LatentAttentionArgs&);
    void (*w8a8_linear)(Type, const W8a8LinearArgs&);
    void (*pack_w8a8)(const PackW8a8Args&);
    void (*gguf_linear)(Type, const GgufLinearArgs&);
    void (*gguf_rows)(Type, const GgufRowsArgs&);
    void (*pack_gguf)(const PackGgufArgs&);
    void (*route)(const RouteArgs&);
    void (*gate)(Type, const GateArgs&);
    void (*combine)(Type, const CombineArgs&);
    void (*most_likely)(Type, const MostLikelyArgs&);
    void (*draw)(Type, const DrawArgs&);
};

}  // namespace srv
