// Attention of one row to a part of its keys, which are in memory of the caller: see attention.cpp.
#pragma once

#include "kernels.h"

namespace srv::SRV_ISA {

// Positions count from the part's first key, so that kv_lens - query_lens is negative for tokens before it. `dim` is
// that of keys and queries; every head has its own. Nothing is written to `keys` and `values`, which are one page.
struct KeyPart {
    int64_t keys;        // of the part, which no token attends beyond
    int64_t value_dim;   // a multiple of 16, up to MAX_HEAD_DIM
    int64_t out_stride;  // of the token axis
    float* state;        // [heads, queries, value_dim + 2]: largest score, sum of weights, weighted values
    bool first, last;    // the state is read unless `first`, and written unless `last`, which writes `out`
};

void attend_to_part(Type, const AttentionArgs&, const KeyPart&);

}  // namespace srv::SRV_ISA
