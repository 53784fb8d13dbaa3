// The library's C interface: selects the instruction set and dispatches every call to its kernels.
//
// Knows neither torch nor Python: takes pointers and sizes. Callers check shapes and types.
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "captured_graph.h"
#include "experts.h"
#include "kernels.h"
#include "shared_reduce.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace srv {

#define SRV_DECLARE(isa)           \
    namespace isa {                \
    extern const Kernels kernels;  \
    }
SRV_DECLARE(generic)
#if defined(__x86_64__)
SRV_DECLARE(avx2)
SRV_DECLARE(avx512)
SRV_DECLARE(avx512_vnni)
SRV_DECLARE(avx512_bf16)
#elif defined(__aarch64__)
SRV_DECLARE(neon_bf16)
#endif

namespace {

struct Choice {
    const Kernels* kernels;
    bool usable, preferred = usable;
};

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know F16C.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Intel's cores start a 512-bit VDPBF16PS every other cycle and two float32 FMAs per cycle, so that converting to
// float32 is twice as fast (bfloat16 165, float32 347 Gop/s on two cores of Emerald Rapids; 470 and 235 on two of Zen
// 4).
bool prefers_avx512_bf16() { return has_avx512_bf16() && !__builtin_cpu_is("intel"); }
#elif defined(__aarch64__)
// Mixed-sign int8 (USDOT) and bfloat16 (BFDOT) dot products: Armv8.6.
bool has_neon_bf16() {
#if defined(__linux__)
    constexpr unsigned long I8MM = 1ul << 13, BF16 = 1ul << 14, NEEDED = I8MM | BF16;  // HWCAP2_...
    return (getauxval(AT_HWCAP2) & NEEDED) == NEEDED;
#else
    return false;
#endif
}
#endif

// The first preferred one is the default; any usable one can be selected by name.
const Choice CHOICES[] = {
#if defined(__x86_64__)
    {&avx512_bf16::kernels, has_avx512_bf16(), prefers_avx512_bf16()},
    {&avx512_vnni::kernels, has_avx512_vnni()},
    {&avx512::kernels, has_avx512()},
    {&avx2::kernels, has_avx2()},
#elif defined(__aarch64__)
    {&neon_bf16::kernels, has_neon_bf16()},
#endif
    {&generic::kernels, true},
};

const Kernels* best() {
    for (const Choice& choice : CHOICES) {
        if (choice.preferred) return choice.kernels;
    }
    return &generic::kernels;
}

const Kernels* chosen = best();

thread_local CapturedGraph* capturing = nullptr;

constexpr int64_t CACHE_LINE = 64;  // bytes of a cache line

inline int64_t round_to_line(int64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

// A kernel's temporary memory, valid until the next request of this thread. It grows and is never released, so that
// steps do not allocate. Because it may move, each call requests its address anew, in a replayed graph too.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }

    uint8_t* get(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = round_to_line(bytes);
            memory_ = static_cast<uint8_t*>(std::aligned_alloc(CACHE_LINE, size_));
            if (memory_ == nullptr) std::abort();
        }
        return memory_;
    }

private:
    uint8_t* memory_ = nullptr;
    int64_t size_ = 0;
};

thread_local Scratch scratch;

void linear(Type type, const LinearArgs& given) {
    LinearArgs args = given;
    const bool gathers = args.grouping != nullptr && args.grouping->x_rows != nullptr;
    const bool widens = type == Type::bfloat16 && chosen->widens_bfloat16;
    const int64_t size = type == Type::bfloat16 && !widens ? 2 : 4;
    if (gathers || widens || rows_alias(args.rows, args.x_stride * size)) {
        args.x_operands = scratch.get(args.rows * (args.inputs * size + APART));
    }
    chosen->linear(type, args);
}

void gguf_linear(Type type, const GgufLinearArgs& given) {
    GgufLinearArgs args = given;
    const int64_t halves = args.rows * args.inputs / K_BLOCK * 2;
    const int64_t quantized = round_to_line(args.rows * args.inputs * MAX_QUANT_BYTES);
    const int64_t sub_scales = round_to_line(halves * sizeof(SubScale));
    const int64_t sums = round_to_line(halves * sizeof(InputSum));
    uint8_t* const at = scratch.get(quantized + sub_scales + sums + args.rows * sizeof(float));
    args.quantized = at;
    args.sub_scales = reinterpret_cast<SubScale*>(at + quantized);
    args.x_sums = reinterpret_cast<InputSum*>(at + quantized + sub_scales);
    args.row_scales = reinterpret_cast<float*>(at + quantized + sub_scales + sums);
    chosen->gguf_linear(type, args);
}

void w8a8_linear(Type type, const W8a8LinearArgs& given) {
    W8a8LinearArgs args = given;
    const int64_t quantized = round_to_line(args.rows * padded_quads(args.inputs) * MAX_QUANT_BYTES);
    uint8_t* const at = scratch.get(quantized + args.rows * sizeof(float));
    args.quantized = at;
    args.row_scales = reinterpret_cast<float*>(at + quantized);
    chosen->w8a8_linear(type, args);
}

void experts(Type type, const ExpertsArgs& args) {
    run_experts({linear, gguf_linear, chosen->gate, chosen->combine}, type, args);
}

void route(Type, const RouteArgs& args) { chosen->route(args); }

// Every kernel of a step goes through here: it runs, or is added to the graph that this thread is capturing.
template <class Args>
void dispatch(void (*kernel)(Type, const Args&), int32_t type, const Args& args) {
    if (capturing == nullptr) return kernel(Type{type}, args);
    capturing->add([kernel, type, args] { kernel(Type{type}, args); });
}

}  // namespace
}  // namespace srv

using srv::dispatch;

#pragma GCC visibility push(default)

extern "C" {

// Callers must not use a library whose version differs from the one that they were written for.
int32_t srv_abi_version() { return 23; }

// Sizes of the structs that callers fill in: AttentionArgs, W8a8LinearArgs, GgufLinearArgs, GgufRowsArgs, DrawArgs,
// RouteArgs, ExpertsArgs, LatentAttentionArgs; 0 past the last.
int64_t srv_sizeof_args(int32_t index) {
    constexpr int64_t SIZES[] = {sizeof(srv::AttentionArgs), sizeof(srv::W8a8LinearArgs), sizeof(srv::GgufLinearArgs),
                                 sizeof(srv::GgufRowsArgs), sizeof(srv::DrawArgs), sizeof(srv::RouteArgs),
                                 sizeof(srv::ExpertsArgs), sizeof(srv::LatentAttentionArgs)};
    return index < 0 || index >= static_cast<int32_t>(std::size(SIZES)) ? 0 : SIZES[index];
}

const char* srv_isa() { return srv::chosen->name; }

// Selects the kernels of an instruction set by name; 0 if this build or this processor does not have it.
int32_t srv_choose_isa(const char* name) {
    for (const srv::Choice& choice : srv::CHOICES) {
        if (choice.usable && std::strcmp(choice.kernels->name, name) == 0) {
            srv::chosen = choice.kernels;
            return 1;
        }
    }
    return 0;
}

void srv_set_threads(int32_t count) { srv::set_threads(count); }

int64_t srv_packed_elements(int64_t outputs, int64_t inputs) { return srv::packed_elements(outputs, inputs); }

void srv_rms_norm(int32_t type, void* out, const void* x, const void* weight, int64_t rows, int64_t dim,
                  int64_t x_stride, float eps) {
    dispatch(srv::chosen->rms_norm, type,
             srv::RmsNormArgs{x, nullptr, weight, out, nullptr, rows, dim, x_stride, 0, eps});
}

void srv_add_rms_norm(int32_t type, void* out, void* total, const void* x, const void* residual, const void* weight,
                  int64_t rows, int64_t dim, int64_t x_stride, int64_t residual_stride, float eps) {
    dispatch(srv::chosen->rms_norm, type,
             srv::RmsNormArgs{x, residual, weight, out, total, rows, dim, x_stride, residual_stride, eps});
}

void srv_silu_and_mul(int32_t type, void* out, const void* x, int64_t rows, int64_t dim, int64_t x_stride) {
    dispatch(srv::chosen->silu_and_mul, type, srv::SiluAndMulArgs{x, out, rows, dim, x_stride});
}

void srv_rotary(int32_t type, void* q_out, void* k_out, const void* q, const void* k, const float* cos_sin,
                const int64_t* positions, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                int64_t rotary_dim, int64_t q_stride, int64_t k_stride) {
    dispatch(srv::chosen->rotary, type,
             srv::RotaryArgs{q, k, cos_sin, positions, q_out, k_out, tokens, heads, kv_heads, dim, rotary_dim,
                             q_stride, k_stride});
}

void srv_linear(int32_t type, void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                int64_t inputs, int64_t outputs, int64_t x_stride, int32_t float32_out) {
    dispatch(srv::linear, type,
             srv::LinearArgs{x, weight, bias, out, rows, inputs, outputs, x_stride, outputs, nullptr, nullptr,
                             float32_out != 0});
}

// With a packed int8 weight; scales: float32 [outputs].
void srv_int8_weight_linear(int32_t type, void* out, const void* x, const void* weight, const float* scales,
                            const void* bias, int64_t rows, int64_t inputs, int64_t outputs, int64_t x_stride,
                            int32_t float32_out) {
    dispatch(srv::linear, type,
             srv::LinearArgs{x, weight, bias, out, rows, inputs, outputs, x_stride, outputs, scales, nullptr,
                             float32_out != 0});
}

// With a packed float8_e4m3fn weight; scales: see LinearArgs.
void srv_fp8_linear(int32_t type, void* out, const void* x, const void* weight, const float* scales, const void* bias,
                    int64_t rows, int64_t inputs, int64_t outputs, int64_t x_stride, int64_t out_stride,
                    int64_t scale_inputs, int32_t block_scales, int32_t float32_out) {
    dispatch(srv::linear, type,
             srv::LinearArgs{x, weight, bias, out, rows, inputs, outputs, x_stride, out_stride, scales, nullptr,
                             float32_out != 0, nullptr, scale_inputs, block_scales != 0});
}

void srv_pack(int32_t type, void* packed, const void* weight, int64_t outputs, int64_t inputs, int64_t stride) {
    srv::chosen->pack(srv::Type{type}, {weight, packed, outputs, inputs, stride});
}

void srv_attention(int32_t type, const srv::AttentionArgs* args) { dispatch(srv::chosen->attention, type, *args); }

// The number of KV blocks of one head that attention reads, repeated reads included: fewer if rows share a prefix.
int64_t srv_attention_blocks(const srv::AttentionArgs* args) { return srv::chosen->attention_blocks(*args); }

void srv_latent_attention(int32_t type, const srv::LatentAttentionArgs* args) {
    dispatch(srv::chosen->latent_attention, type, *args);
}

void srv_w8a8_linear(int32_t type, const srv::W8a8LinearArgs* args) { dispatch(srv::w8a8_linear, type, *args); }

int64_t srv_packed_w8a8_bytes(int64_t outputs, int64_t inputs) {
    return srv::blocks(outputs) * srv::BLOCK_OUTPUTS * srv::padded_quads(inputs);
}

void srv_pack_w8a8(void* packed, const void* weight, int64_t outputs, int64_t inputs, int64_t stride) {
    srv::chosen->pack_w8a8({static_cast<const int8_t*>(weight), static_cast<int8_t*>(packed), outputs, inputs,
                             stride});
}

void srv_gguf_linear(int32_t type, const srv::GgufLinearArgs* args) { dispatch(srv::gguf_linear, type, *args); }

void srv_gguf_rows(int32_t type, const srv::GgufRowsArgs* args) { dispatch(srv::chosen->gguf_rows, type, *args); }

void srv_most_likely(int32_t type, int64_t* tokens, uint8_t* finite, const void* logits, int64_t rows, int64_t vocab,
                     int64_t stride) {
    dispatch(srv::chosen->most_likely, type, srv::MostLikelyArgs{logits, tokens, finite, rows, vocab, stride});
}

void srv_draw(int32_t type, const srv::DrawArgs* args) { dispatch(srv::chosen->draw, type, *args); }

// All of it is float32, as is `type`.
void srv_route(int32_t type, const srv::RouteArgs* args) { dispatch(srv::route, type, *args); }

void srv_experts(int32_t type, const srv::ExpertsArgs* args) { dispatch(srv::experts, type, *args); }

// 0 for an unknown type.
int64_t srv_packed_gguf_bytes(int32_t ggml_type, int64_t outputs, int64_t inputs) {
    const srv::PackedShape shape = srv::packed_format_of(srv::GgmlType{ggml_type}).shape;
    return shape.bits == 0 ? 0 : srv::blocks(outputs) * (inputs / srv::K_BLOCK) * srv::k_block_bytes(shape);
}

int64_t srv_gguf_row_bytes(int32_t ggml_type, int64_t inputs) {
    return srv::gguf_row_bytes(srv::GgmlType{ggml_type}, inputs);
}

void srv_pack_gguf(int32_t ggml_type, void* packed, const void* rows, int64_t outputs, int64_t inputs, int64_t stride) {
    srv::chosen->pack_gguf({static_cast<const uint8_t*>(rows), static_cast<uint8_t*>(packed), outputs, inputs, stride,
                              srv::GgmlType{ggml_type}});
}

// Starts capturing this thread's kernel calls instead of running them; null if it is capturing already.
srv::CapturedGraph* srv_graph_capture_begin() {
    return srv::capturing != nullptr ? nullptr : srv::capturing = new srv::CapturedGraph;
}

// Ends the capture; returns the number of captured calls.
int64_t srv_graph_capture_end() {
    const int64_t calls = srv::capturing == nullptr ? 0 : srv::capturing->size();
    srv::capturing = nullptr;
    return calls;
}

// Runs the captured calls in order, with the pointers and sizes that they were captured with.
void srv_graph_replay(const srv::CapturedGraph* graph) { graph->replay(); }

void srv_graph_free(srv::CapturedGraph* graph) { delete graph; }

// The bytes that the ranks of a group map together: see shared_reduce.h, also for the outcome of an operation.
int64_t srv_shared_group_bytes(int64_t members) { return srv::shared_group_bytes(members); }

int64_t srv_shared_all_reduce(int32_t type, void* mapping, int64_t members, int64_t rank, int64_t timeout_ns,
                              void* data, int64_t elements) {
    return srv::shared_all_reduce({mapping, members, rank, timeout_ns}, srv::chosen->sum, srv::Type{type}, data,
                                  elements);
}

int64_t srv_shared_reduce_scatter(int32_t type, void* mapping, int64_t members, int64_t rank, int64_t timeout_ns,
                                  const void* data, int64_t elements, void* out) {
    return srv::shared_reduce_scatter({mapping, members, rank, timeout_ns}, srv::chosen->sum, srv::Type{type}, data,
                                      elements, out);
}

int64_t srv_shared_all_gather(void* mapping, int64_t members, int64_t rank, int64_t timeout_ns, const void* data,
                              int64_t bytes, void* out) {
    return srv::shared_all_gather({mapping, members, rank, timeout_ns}, data, bytes, out);
}

int64_t srv_shared_all_to_all(void* mapping, int64_t members, int64_t rank, int64_t timeout_ns, const void* data,
                              const int64_t* table, void* out) {
    return srv::shared_all_to_all({mapping, members, rank, timeout_ns}, data, table, out);
}

int64_t srv_shared_broadcast(void* mapping, int64_t members, int64_t rank, int64_t timeout_ns, void* data,
                             int64_t bytes, int64_t source) {
    return srv::shared_broadcast({mapping, members, rank, timeout_ns}, data, bytes, source);
}

void srv_shared_abort(void* mapping) { srv::shared_abort(mapping); }

}  // extern "C"

#pragma GCC visibility pop
