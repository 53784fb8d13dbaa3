// Collective operations of the ranks on one host, through memory that all of them have mapped.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace srv {

// How an operation ended: JOINED, ABORTED, or 1 + the rank of a member that did not join in time.
using Outcome = int64_t;
constexpr Outcome JOINED = 0, ABORTED = -1;

// One member's view of the group. `mapping`: shared_group_bytes(members) bytes, zero before the first operation.
struct SharedGroup {
    void* mapping;
    int64_t members, rank, timeout_ns;
};

int64_t shared_group_bytes(int64_t members);

// Replaces `data` by the sum over all members, added by `sum` in the order of ranks: all get the same bits.
Outcome shared_all_reduce(const SharedGroup& group, void (*sum)(Type, const SumArgs&), Type type, void* data,
                          int64_t elements);

// data [members, elements]. out [elements]: the sum over all members of row `rank`, added as by shared_all_reduce.
Outcome shared_reduce_scatter(const SharedGroup& group, void (*sum)(Type, const SumArgs&), Type type, const void* data,
                              int64_t elements, void* out);

// out [members, bytes]: the data of all members in the order of ranks.
Outcome shared_all_gather(const SharedGroup& group, const void* data, int64_t bytes, void* out);

// table [members, members], the same on all members: how many bytes each sends to each. `data` of a member has what it
// sends, in the order of ranks; `out` gets what is sent to it, likewise.
Outcome shared_all_to_all(const SharedGroup& group, const void* data, const int64_t* table, void* out);

// Replaces the `bytes` bytes at `data` of all members by those of the member `source`.
Outcome shared_broadcast(const SharedGroup& group, void* data, int64_t bytes, int64_t source);

// Makes waiting and later operations of all members fail.
void shared_abort(void* mapping);

}  // namespace srv
