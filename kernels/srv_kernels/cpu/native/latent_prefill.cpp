// Multi-head latent attention of a row with many queries: the keys and values of each head are computed from the
// compressed vectors, and attended to like those of other layers (DeepSeek-V2, arXiv:2405.04434).
//
// For each group of heads, and each part of the row's keys, own ones included:
//
//     gather     the part's compressed vectors, packed like a weight; its rotary keys, in blocks
//     project    [heads * (key_dim + value_dim), keys] = up-projection * compressed vectors: one product (linear.cpp)
//     arrange    blocks of keys, with the rotary keys, and blocks of values of each head (kv_layout.h)
//     attend     all queries of the row, with the largest scores and sums of the parts before (attention.cpp)
//
// Keys and values are rounded to the type of the call, as a model rounds them that caches them. A row's results depend
// on the row alone. Memory is bounded by the size of a part and the number of heads of a group; it is kept.
#include <cstring>
#include <vector>

#include "attention_tiles.h"
#include "float_dot.h"
#include "key_part.h"
#include "kv_layout.h"
#include "latent_prefill.h"
#include "thread_pool.h"

namespace srv::SRV_ISA {

void linear(Type, const LinearArgs&);

namespace {

constexpr int64_t GROUP_BYTES = 32 << 20;  // of what exists for the heads of a group, unless one head has more

struct alignas(64) CacheLine {
    uint8_t bytes[64];
};

// Memory of a thread that grows, and is kept so that steps do not allocate.
template <class T>
class Buffer {
public:
    T* of(int64_t count) {
        const size_t lines = (count * sizeof(T) + sizeof(CacheLine) - 1) / sizeof(CacheLine);
        if (memory.size() < lines) memory.resize(lines);
        return reinterpret_cast<T*>(memory.data());
    }

private:
    std::vector<CacheLine> memory;
};

template <class T>
struct PrefillSpace {
    Buffer<T> latents, ropes, products, keys, values;
    Buffer<Operand<T>> up;
    Buffer<float> state;
};

template <class T>
PrefillSpace<T>& own_space() {
    thread_local PrefillSpace<T> space;
    return space;
}

// Consecutive elements of an operand that are multiplied together; the same in linear.cpp and in KV blocks.
template <class T>
constexpr int64_t TOGETHER = KV_INTERLEAVE<T>;
static_assert(TOGETHER<float> == INTERLEAVE_OF<float> && TOGETHER<BFloat16> == INTERLEAVE_OF<BFloat16>);

template <class T>
class Prefill {
public:
    Prefill(const LatentAttentionArgs& args, int64_t row)
        : a(args),
          row(row),
          all_keys(args.kv_lens[row]),
          queries(args.query_lens[row]),
          head_dim(args.key_dim + args.rope_dim),
          per_head(args.key_dim + args.value_dim),
          most_keys(args.part_keys == 0 ? ceiling(all_keys, KV_TILE) * KV_TILE : args.part_keys),
          stride(ceiling(min_of(most_keys, all_keys), BLOCK_OUTPUTS) * BLOCK_OUTPUTS + APART / sizeof(T)),
          space(own_space<T>()) {}

    void run(Type type) const {
        const int64_t of_keys = stride * (per_head + head_dim + a.value_dim) * sizeof(T);  // products, keys, values
        const int64_t of_state = all_keys > most_keys ? queries * (a.value_dim + 2) * sizeof(float) : 0;
        const int64_t of_up = per_head * (a.latent_dim * SIZE + APART);  // where it is copied
        const int64_t bytes_of_head = of_keys + of_state + of_up;
        const int64_t groups = min_of(a.heads, ceiling(a.heads * bytes_of_head, GROUP_BYTES));
        for (int64_t group = 0; group < groups; ++group) {
            const Range heads = chunk_range(a.heads, static_cast<int>(group), static_cast<int>(groups));
            for (int64_t first = 0; first < all_keys; first += most_keys) {
                attend(type, heads, {first, min_of(first + most_keys, all_keys)});
            }
        }
    }

private:
    static constexpr int64_t SIZE = sizeof(Operand<T>);

    const LatentAttentionArgs& a;
    const int64_t row, all_keys, queries, head_dim, per_head;
    const int64_t most_keys;  // of a part
    const int64_t stride;     // of the products of an output of the up-projection, in keys
    PrefillSpace<T>& space;

    void attend(Type type, Range heads, Range keys) const {
        const int64_t count = keys.end - keys.begin, blocks_of_head = ceiling(count, BLOCK_TOKENS);
        const int64_t group = heads.end - heads.begin, tokens = blocks_of_head * BLOCK_TOKENS;
        gather(keys);
        project(type, heads, count);
        T* const of_keys = space.keys.of(group * tokens * head_dim);
        T* const of_values = space.values.of(group * tokens * a.value_dim);
        parallel(false, [&](int chunk, int chunks) {
            const Range mine = chunk_range(group * blocks_of_head, chunk, chunks);
            for (int64_t at = mine.begin; at < mine.end; ++at) {
                arrange(at / blocks_of_head, at % blocks_of_head, of_keys + at * BLOCK_TOKENS * head_dim,
                        of_values + at * BLOCK_TOKENS * a.value_dim);
            }
        });

        const int32_t first_page = 0, kv_len = static_cast<int32_t>(all_keys - keys.begin);
        AttentionArgs args{};
        args.q = static_cast<const T*>(a.q) + heads.begin * head_dim;
        args.out = static_cast<T*>(a.out) + heads.begin * a.value_dim;
        args.keys = of_keys, args.values = of_values, args.table = &first_page;
        args.query_lens = a.query_lens + row, args.kv_lens = &kv_len, args.starts = a.starts + row;
        args.rows = 1, args.columns = 1, args.page_size = tokens;
        args.heads = group, args.kv_heads = group, args.dim = head_dim;
        args.q_stride = a.q_stride, args.split_keys = a.split_keys, args.scale = a.scale;
        args.pool_type = type, args.key_scale = 1, args.value_scale = 1;
        const bool first = keys.begin == 0, last = keys.end == all_keys;
        float* const state = first && last ? nullptr : space.state.of(group * queries * (a.value_dim + 2));
        attend_to_part(type, args, {count, a.value_dim, a.heads * a.value_dim, state, first, last});
    }

    int64_t slot(int64_t position) const {
        const int64_t page = a.table[row * a.columns + position / a.page_size];
        return page * a.page_size + position % a.page_size;
    }

    // Copies vectors of a part from the pool: the compressed ones to the layout of a packed weight, which has zeros
    // past the last key, and the rotary keys to that of a block of keys.
    void gather(Range keys) const {
        const int64_t count = keys.end - keys.begin, in_blocks = ceiling(count, BLOCK_OUTPUTS) * BLOCK_OUTPUTS;
        T* const latents = space.latents.of(in_blocks * a.latent_dim);
        T* const ropes = space.ropes.of(in_blocks * a.rope_dim);
        parallel(count * a.latent_dim < 64 * 1024, [&](int chunk, int chunks) {
            const Range mine = chunk_range(in_blocks, chunk, chunks);
            for (int64_t key = mine.begin; key < mine.end; ++key) {
                const int64_t from = key < count ? slot(keys.begin + key) : -1;
                place<BLOCK_OUTPUTS>(latents, key, vector_at(a.latents, from, a.latent_dim), a.latent_dim);
                place<BLOCK_TOKENS>(ropes, key, vector_at(a.ropes, from, a.rope_dim), a.rope_dim);
            }
        });
    }

    static const T* vector_at(const void* pool, int64_t slot, int64_t dim) {
        return slot < 0 ? nullptr : static_cast<const T*>(pool) + slot * dim;
    }

    // Stores a vector, zeros if it is null, in blocks [dim / n][BLOCK][n elements].
    template <int64_t BLOCK>
    static void place(T* blocks, int64_t number, const T* vector, int64_t dim) {
        T* to = blocks + number / BLOCK * BLOCK * dim + number % BLOCK * TOGETHER<T>;
        const T zeros[TOGETHER<T>] = {};
        for (int64_t d = 0; d < dim; d += TOGETHER<T>, to += BLOCK * TOGETHER<T>) {
            std::memcpy(to, vector == nullptr ? zeros : vector + d, sizeof(zeros));
        }
    }

    // The elements of keys and values of a group of heads, [outputs, `stride` keys]: the up-projection takes the place
    // of the inputs of a linear layer, and the compressed vectors that of its weight.
    void project(Type type, Range heads, int64_t count) const {
        const int64_t outputs = (heads.end - heads.begin) * per_head;
        LinearArgs args{};
        args.x = static_cast<const T*>(a.up) + heads.begin * per_head * a.latent_dim;
        args.weight = space.latents.of(0);
        args.out = space.products.of(outputs * stride);
        args.rows = outputs, args.inputs = a.latent_dim, args.outputs = count;
        args.x_stride = a.latent_dim, args.out_stride = stride;
        if (!std::is_same_v<T, Operand<T>> || rows_alias(outputs, a.latent_dim * SIZE)) {
            args.x_operands = space.up.of(outputs * (a.latent_dim + APART / SIZE));
        }
        linear(type, args);
    }

    // Writes one block of keys and values of a head of the group.
    void arrange(int64_t head, int64_t block, T* keys, T* values) const {
        const T* from = space.products.of(0) + head * per_head * stride + block * BLOCK_TOKENS;
        for (int64_t d = 0; d < a.key_dim; d += TOGETHER<T>, keys += BLOCK_TOKENS * TOGETHER<T>) {
            for (int64_t token = 0; token < BLOCK_TOKENS; ++token) {
                for (int64_t i = 0; i < TOGETHER<T>; ++i) {
                    keys[token * TOGETHER<T> + i] = from[(d + i) * stride + token];
                }
            }
        }
        std::memcpy(keys, space.ropes.of(0) + block * BLOCK_TOKENS * a.rope_dim, BLOCK_TOKENS * a.rope_dim * sizeof(T));
        from += a.key_dim * stride;
        for (int64_t v = 0; v < a.value_dim; ++v, from += stride) {
            T* to = values + v * TOGETHER<T>;
            for (int64_t token = 0; token < BLOCK_TOKENS; token += TOGETHER<T>, to += a.value_dim * TOGETHER<T>) {
                std::memcpy(to, from + token, TOGETHER<T> * sizeof(T));
            }
        }
    }
};

}  // namespace

void materialised_attention(Type type, const LatentAttentionArgs& args, int64_t row) {
    if (type == Type::float32) return Prefill<float>(args, row).run(type);
    Prefill<BFloat16>(args, row).run(type);
}

}  // namespace srv::SRV_ISA
