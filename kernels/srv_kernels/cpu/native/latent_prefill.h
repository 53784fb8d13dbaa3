// Latent attention of a row with many queries, materialised: see latent_prefill.cpp.
#pragma once

#include "kernels.h"

namespace srv::SRV_ISA {

// Whether the row computes the keys and values of each head: with q queries of k keys, if
//
//     1 / q <= 1 / materialise_from + 1 / k
//
// That is, every row without a prefix but a single query, and behind a long prefix rows of materialise_from queries.
inline bool is_materialised(const LatentAttentionArgs& a, int64_t row) {
    const int64_t queries = a.query_lens[row], keys = a.kv_lens[row], from = a.materialise_from;
    return from > 0 && queries > 1 && queries * (keys + from) >= keys * from;
}

// The results of a row whose vectors are in the pool already. key_dim and value_dim: multiples of 16; neither value_dim
// nor key_dim + rope_dim exceeds MAX_HEAD_DIM.
void materialised_attention(Type, const LatentAttentionArgs&, int64_t row);

}  // namespace srv::SRV_ISA
