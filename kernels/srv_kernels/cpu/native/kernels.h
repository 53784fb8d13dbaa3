// The kernels of one instruction set, as a table of functions. `library.cpp` picks the table once.
//
// Matrices are row-major; strides count elements; a row's own elements lie beside one another. T is float32 or
// bfloat16 (`Type`), the same for every tensor of a call unless said otherwise; sums are float32.
#pragma once

#include <cstdint>

#include "gguf.h"

namespace srv {

// int8: of packed weights and of pools of keys and values; float16: of these pools alone.
enum class Type : int32_t { float32 = 0, bfloat16 = 1, int8 = 2, float16 = 3 };

struct RmsNormArgs {
    const void *x, *residual, *weight;  // residual: null, or added to x first
    void *out, *total;                  // total: null, or where residual + x goes
    int64_t rows, dim, x_stride, residual_stride;
    float eps;
};

struct SiluAndMulArgs {
    const void* x;  // [rows, 2 dim]: gates, then what they open
    void* out;      // [rows, dim]
    int64_t rows, dim, x_stride;
};

struct RotaryArgs {
    const void *q, *k;       // [tokens, heads, dim], [tokens, kv_heads, dim]; strides are of the token axis
    const float* cos_sin;    // [places, turned]: cosines, then sines
    const int64_t* positions;
    void *q_out, *k_out;     // contiguous
    int64_t tokens, heads, kv_heads, dim, rotary_dim, q_stride, k_stride;
};

// y = x W^T + b. The weight is packed: see linear.cpp. With `scales` it is of int8, and its rows are worth that much.
struct LinearArgs {
    const void *x, *weight, *bias;  // bias: null, or [outputs]
    void* out;
    int64_t rows, inputs, outputs, x_stride, out_stride;
    const float* scales = nullptr;  // null, or [outputs]
    float* x_float32 = nullptr;       // scratch: [rows, inputs]; library.cpp's, where kernels widen
};

struct PackArgs {
    const void* weight;  // [outputs, inputs]
    void* packed;        // packed_elements(outputs, inputs) of them
    int64_t outputs, inputs, stride;
};

// Outputs that one block of a packed weight holds, and inputs that lie together for each of them.
constexpr int64_t BLOCK_OUTPUTS = 32;
constexpr int64_t INTERLEAVE = 2;

inline int64_t blocks(int64_t outputs) { return (outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS; }
inline int64_t padded_inputs(int64_t inputs) { return (inputs + INTERLEAVE - 1) / INTERLEAVE * INTERLEAVE; }
inline int64_t packed_elements(int64_t outputs, int64_t inputs) {
    return blocks(outputs) * BLOCK_OUTPUTS * padded_inputs(inputs);
}

// y = x W^T + b with a weight of bytes, x rounded to bytes on the way in: see int8_linear.cpp.
struct W8a8LinearArgs {
    const void* x;
    const int8_t* weight;       // packed: blocks(outputs) * BLOCK_OUTPUTS * padded_fours(inputs) of them
    const float* scales;        // [outputs]: what a step of a weight is worth, and of x too if `per_input` is not 0
    const int32_t* compensation;  // [outputs], added to the sums of steps
    const void* bias;           // null, or [outputs], added last
    void* out;                  // [rows, outputs], contiguous
    void* quantized;                // scratch: [rows, padded_fours(inputs)] of STEP_BYTES or less
    float* row_scales;          // scratch: [rows]; both are library.cpp's
    int64_t rows, inputs, outputs, x_stride;
    float input_scale_inverse, input_offset;    // steps are x * per_input + offset; 0: of each row's own size, about 0
};

struct PackW8a8Args {
    const int8_t* weight;  // [outputs, inputs]
    int8_t* packed;
    int64_t outputs, inputs, stride;
};

constexpr int64_t QUAD = 4;
inline int64_t padded_quads(int64_t inputs) { return (inputs + QUAD - 1) / QUAD * QUAD; }

// The scale of half a stretch of x, in units of its row's: as a number, or twice as 16 bits, for products of pairs.
union SubScale {
    float value;
    int32_t int16_pair;
};

// The sum of some steps of x: what it is worth, in units of the row, or what it takes off a sum of products.
union InputSum {
    float value;
    int32_t offset;
};

// y = x W^T + b with a weight in a GGUF file's blocks: see gguf_linear.cpp. inputs: a multiple of STRETCH.
struct GgufLinearArgs {
    const void* x;
    const uint8_t* weight;  // packed: blocks(outputs) * inputs / STRETCH * stretch_bytes(form) bytes
    const void* bias;       // null, or [outputs]
    void* out;
    void* quantized;            // scratch: [rows, inputs] of STEP_BYTES or less; library.cpp's, as the next three are
    SubScale* sub_scales;    // scratch: [rows, inputs / STRETCH, 2]
    InputSum* x_sums;       // scratch: [rows, inputs / STRETCH, 2]
    float* row_scales;         // scratch: [rows]
    int64_t rows, inputs, outputs, x_stride, out_stride;
    GgmlType ggml_type;
    int32_t zero_point;       // what is to be taken off numbers as they are multiplied; filled in by the kernel
};

// Rows of a packed weight, as an embedding needs them.
struct GgufRowsArgs {
    const uint8_t* weight;
    const int64_t* indices;
    void* out;  // [rows, inputs], contiguous
    int64_t rows, inputs;
    GgmlType ggml_type;
};

struct PackGgufArgs {
    const uint8_t* rows;  // as the file has them, `stride` bytes apart
    uint8_t* packed;
    int64_t outputs, inputs, stride;
    GgmlType ggml_type;
};

// The token of the largest logit of each row, the lowest among equals; see sampling.cpp.
struct MostLikelyArgs {
    const void* logits;  // [rows, vocab]
    int64_t* tokens;     // [rows]; 0 where `finite` is 0
    uint8_t* finite;     // [rows]: 0 where a logit is NaN or +inf, or all are -inf; else 1
    int64_t rows, vocab, stride;
};

// A token of each row, drawn from what is kept of it; see sampling.cpp. Arrays are [rows].
struct DrawArgs {
    const void* logits;        // [rows, vocab]; vocab: below 2^31
    const float* temperature;  // 0: the most likely token
    const int32_t* top_k;      // the vocabulary's size: all
    const float *top_p, *min_p;
    const double* uniform;     // in [0, 1): which token it is
    int64_t* tokens;           // 0 where the logits are not finite, as `MostLikelyArgs` tells them
    int64_t rows, vocab, stride;
};

// Causal attention over a paged pool, after writing this step's keys and values to it.
//
// Row r has query_lens[r] tokens in this step, one after the other in the token axis from starts[r] on, and
// kv_lens[r] tokens in all, these included. Its token at position p lies in page table[r][p / page_size]. A page
// holds, for each key head, page_size / 16 blocks of 16 tokens: see kv_layout.h. The pool's type is that of the call, or
// float16, or int8.
struct AttentionArgs {
    const void *q, *k, *v;  // [tokens, heads or kv_heads, dim]; strides are of the token axis
    void* out;              // [tokens, heads, dim], contiguous
    void *keys, *values;
    const int32_t* table;  // [rows, columns]
    const int32_t *query_lens, *kv_lens, *starts;
    int64_t rows, columns, page_size, heads, kv_heads, dim;
    int64_t q_stride, k_stride, v_stride;
    float scale, soft_cap;  // soft_cap: 0, or scores become soft_cap * tanh(scores / soft_cap)
    int64_t window;         // 0, or a token sees itself and the window - 1 before it
    Type pool_type;
};

constexpr int64_t BLOCK_TOKENS = 16;
constexpr int64_t MAX_HEAD_DIM = 512;

struct Kernels {
    const char* name;
    bool widens_bfloat16;  // whether bfloat16 inputs are widened for products
    void (*rms_norm)(Type, const RmsNormArgs&);
    void (*silu_and_mul)(Type, const SiluAndMulArgs&);
    void (*rotary)(Type, const RotaryArgs&);
    void (*linear)(Type, const LinearArgs&);
    void (*pack)(Type, const PackArgs&);
    void (*attention)(Type, const AttentionArgs&);
    int64_t (*attention_blocks)(const AttentionArgs&);  // of BLOCK_TOKENS keys of one head, that a call reads
    void (*w8a8_linear)(Type, const W8a8LinearArgs&);
    void (*pack_w8a8)(const PackW8a8Args&);
    void (*gguf_linear)(Type, const GgufLinearArgs&);
    void (*gguf_rows)(Type, const GgufRowsArgs&);
    void (*pack_gguf)(const PackGgufArgs&);
    void (*most_likely)(Type, const MostLikelyArgs&);
    void (*draw)(Type, const DrawArgs&);
};

}  // namespace srv
