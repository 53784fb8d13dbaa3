// The table of this instruction set.
#include "kernels.h"
#include "product.h"

namespace srv::SRV_ISA {

void norm(Type, const NormArgs&);
void gate(Type, const GateArgs&);
void rotary(Type, const RotaryArgs&);
void linear(Type, const LinearArgs&);
void pack(Type, const PackArgs&);
void attention(Type, const AttentionArgs&);
int64_t attention_blocks(const AttentionArgs&);
void byte_linear(Type, const ByteLinearArgs&);
void pack_bytes(const PackBytesArgs&);
void block_linear(Type, const BlockLinearArgs&);
void block_rows(Type, const BlockRowsArgs&);
void pack_blocks(const PackBlocksArgs&);
void most_likely(Type, const MostLikelyArgs&);
void draw(Type, const DrawArgs&);

#define SRV_TEXT_OF(name) #name
#define SRV_TEXT(name) SRV_TEXT_OF(name)

extern const Kernels kernels;
const Kernels kernels = {
    SRV_TEXT(SRV_ISA), WIDENS, norm,        gate,       rotary,       linear,     pack,        attention,
    attention_blocks, byte_linear, pack_bytes, block_linear, block_rows, pack_blocks, most_likely, draw};

}  // namespace srv::SRV_ISA
