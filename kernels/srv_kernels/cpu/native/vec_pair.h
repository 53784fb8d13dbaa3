// Vectors wider than a register: two halves (`Two`), each a register or two halves again.
//
// A compiler keeps its own vector types in memory where no register holds them, and takes some operations on them lane by
// lane. Operators work on registers and halves alike; `each`, `fill` and `over` come down to the registers.
//
// Every file that includes this is compiled once for each instruction set, into a namespace of that name
// (SRV_ISA): no function here may be shared between them.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace srv::SRV_ISA {

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class Half>
struct VecPair {
    Half low, high;
};

template <class V>
constexpr bool IS_PAIR = false;
template <class Half>
constexpr bool IS_PAIR<VecPair<Half>> = true;

template <class Number, int BYTES>
struct Wide {
    using Half = typename Wide<Number, BYTES / 2>::Type;
    using Type = VecPair<Half>;
};
template <class Number, int BYTES>
    requires(BYTES <= REGISTER)
struct Wide<Number, BYTES> {
    typedef Number Type __attribute__((vector_size(BYTES)));
};
template <class Number, int COUNT = LANES>
using Vector = typename Wide<Number, COUNT * static_cast<int>(sizeof(Number))>::Type;

using Float32x16 = Vector<float>;
using Int32x16 = Vector<int32_t>;
using UInt32x16 = Vector<uint32_t>;
using Float32x4 = Vector<float, 4>;
using Int32x4 = Vector<int32_t, 4>;

// Lanes of 32 bits.
template <class V>
constexpr int LANES_OF = static_cast<int>(sizeof(V) / 4);

// f of the registers of some vectors, one of each at a time, as a vector.
template <class F, class V, class... Others>
inline auto map_registers(const F& f, const V& value, const Others&... others) {
    if constexpr (IS_PAIR<V>) {
        const auto low = map_registers(f, value.low, others.low...);
        return VecPair<std::remove_const_t<decltype(low)>>{low, map_registers(f, value.high, others.high...)};
    } else {
        return f(value, others...);
    }
}

// A vector whose registers f(register, lane of its first) has written.
template <class V, class F>
inline V build(const F& f, int lane = 0) {
    if constexpr (IS_PAIR<V>) {
        using Half = decltype(V::low);
        return {build<Half>(f, lane), build<Half>(f, lane + LANES_OF<Half>)};
    } else {
        V value;
        f(value, lane);
        return value;
    }
}

// f(register, lane of its first) for the registers of a vector.
template <class V, class F>
inline void for_each_register(const V& value, const F& f, int lane = 0) {
    if constexpr (IS_PAIR<V>) {
        for_each_register(value.low, f, lane);
        for_each_register(value.high, f, lane + LANES_OF<V> / 2);
    } else {
        f(value, lane);
    }
}

// A number's type in a vector, and the number as one.
template <class V>
struct LaneTypeOf {
    using Type = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
};
template <class Half>
struct LaneTypeOf<VecPair<Half>> : LaneTypeOf<Half> {};

#define SRV_OPERATOR(op)                                                              \
    template <class H, class Other>                                                   \
    inline auto operator op(const VecPair<H>& a, const VecPair<Other>& b) {                   \
        return map_registers([](const auto& x, const auto& y) { return x op y; }, a, b);       \
    }                                                                                 \
    template <class H, class S>                                                       \
        requires std::is_arithmetic_v<S>                                              \
    inline auto operator op(const VecPair<H>& a, S scalar) {                              \
        const auto b = static_cast<typename LaneTypeOf<H>::Type>(scalar);               \
        return map_registers([b](const auto& x) { return x op b; }, a);                        \
    }                                                                                 \
    template <class H, class S>                                                       \
        requires std::is_arithmetic_v<S>                                              \
    inline auto operator op(S scalar, const VecPair<H>& b) {                              \
        const auto a = static_cast<typename LaneTypeOf<H>::Type>(scalar);               \
        return map_registers([a](const auto& y) { return a op y; }, b);                        \
    }
SRV_OPERATOR(+)
SRV_OPERATOR(-)
SRV_OPERATOR(*)
SRV_OPERATOR(/)
SRV_OPERATOR(&)
SRV_OPERATOR(|)
SRV_OPERATOR(<<)
SRV_OPERATOR(>>)
SRV_OPERATOR(<)
SRV_OPERATOR(>)
SRV_OPERATOR(<=)
SRV_OPERATOR(>=)
SRV_OPERATOR(==)
SRV_OPERATOR(!=)
#undef SRV_OPERATOR

template <class H>
inline VecPair<H> operator-(const VecPair<H>& a) {
    return map_registers([](const auto& x) { return -x; }, a);
}
template <class H, class Other>
inline VecPair<H>& operator+=(VecPair<H>& a, const Other& b) {
    return a = a + b;
}
template <class H, class Other>
inline VecPair<H>& operator*=(VecPair<H>& a, const Other& b) {
    return a = a * b;
}
template <class H, class Other>
inline VecPair<H>& operator|=(VecPair<H>& a, const Other& b) {
    return a = a | b;
}

// In each lane the one or the other, as a comparison came out.
template <class Mask, class V>
inline V select(const Mask& mask, const V& yes, const V& no) {
    return map_registers([](const auto& m, const auto& y, const auto& n) { return m ? y : n; }, mask, yes, no);
}

// The lanes of two registers, the second's numbered on, at these places.
template <int... PLACES, class V>
inline V shuffle(const V& first, const V& second) {
    static_assert(sizeof...(PLACES) == LANES_OF<V>);
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(first, second, PLACES...);
#else
    return __builtin_shuffle(first, second, Vector<int32_t, LANES_OF<V>>{PLACES...});
#endif
}

template <int... PLACES, class V>
inline V shuffle(const V& value) {
    return shuffle<PLACES...>(value, value);
}

// The lanes' numbers as another type's.
template <class Number, class V>
inline auto convert(const V& value) {
    return map_registers([](const auto& x) { return __builtin_convertvector(x, Vector<Number, LANES_OF<decltype(x)>>); }, value);
}

// The lanes' bits as another type's.
template <class Number, class V>
inline auto bits_as(const V& value) {
    return map_registers([](const auto& x) { return reinterpret_cast<Vector<Number, LANES_OF<decltype(x)>>>(x); }, value);
}

}  // namespace srv::SRV_ISA
