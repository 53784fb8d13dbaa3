// The kernel table of one instruction set.
#include "float_dot.h"
#include "kernels.h"

namespace srv::SRV_ISA {

void rms_norm(Type, const RmsNormArgs&);
void silu_and_mul(Type, const SiluAndMulArgs&);
void rotary(Type, const RotaryArgs&);
void sum(Type, const SumArgs&);
void linear(Type, const LinearArgs&);
void pack(Type, const PackArgs&);
void attention(Type, const AttentionArgs&);
int64_t attention_blocks(const AttentionArgs&);
void latent_attention(Type, const LatentAttentionArgs&);
void w8a8_linear(Type, const W8a8LinearArgs&);
void pack_w8a8(const PackW8a8Args&);
void gguf_linear(Type, const GgufLinearArgs&);
void gguf_rows(Type, const GgufRowsArgs&);
void pack_gguf(const PackGgufArgs&);
void route(const RouteArgs&);
void gate(Type, const GateArgs&);
void combine(Type, const CombineArgs&);
void most_likely(Type, const MostLikelyArgs&);
void draw(Type, const DrawArgs&);

#define SRV_TEXT_OF(name) #name
#define SRV_TEXT(name) SRV_TEXT_OF(name)

extern const Kernels kernels;
const Kernels kernels = {
    SRV_TEXT(SRV_ISA), WIDENS_BFLOAT16, rms_norm, silu_and_mul, rotary, sum, linear, pack, attention,
    attention_blocks, latent_attention, w8a8_linear, pack_w8a8, gguf_linear, gguf_rows, pack_gguf, route, gate, combine,
    most_likely, draw};

}  // namespace srv::SRV_ISA
