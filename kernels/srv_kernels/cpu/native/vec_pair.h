// Vectors wider than a register: a `VecPair` of two halves, each a register or a pair again.
//
// Compilers keep their own vector types in memory if these are wider than a register, and scalarize some operations on
// them. Operators work on registers and pairs alike; `map_registers`, `build` and `for_each_register` visit the
// registers.
//
// Every file that includes this is compiled once per instruction set, into a namespace of that name (SRV_ISA), so that
// the linker never shares a function between instruction sets.
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

// 32-bit lanes of a vector.
template <class V>
constexpr int LANES_OF = static_cast<int>(sizeof(V) / 4);

// Applies f to the corresponding registers of one or more vectors; returns the vector of the results.
template <class F, class V, class... Others>
inline auto map_registers(const F& f, const V& value, const Others&... others) {
    if constexpr (IS_PAIR<V>) {
        const auto low = map_registers(f, value.low, others.low...);
        return VecPair<std::remove_const_t<decltype(low)>>{low, map_registers(f, value.high, others.high...)};
    } else {
        return f(value, others...);
    }
}

// A vector whose registers are written by f(register, index of its first lane).
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

// Calls f(register, index of its first lane) for each register of a vector.
template <class V, class F>
inline void for_each_register(const V& value, const F& f, int lane = 0) {
    if constexpr (IS_PAIR<V>) {
        for_each_register(value.low, f, lane);
        for_each_register(value.high, f, lane + LANES_OF<V> / 2);
    } else {
        f(value, lane);
    }
}

// The element type of a vector.
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

// Lane by lane: mask ? yes : no.
template <class Mask, class V>
inline V select(const Mask& mask, const V& yes, const V& no) {
    return map_registers([](const auto& m, const auto& y, const auto& n) { return m ? y : n; }, mask, yes, no);
}

// A shuffle of two registers; the lanes of the second are numbered after those of the first.
template <int... INDICES, class V>
inline V shuffle(const V& first, const V& second) {
    static_assert(sizeof...(INDICES) == LANES_OF<V>);
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(first, second, INDICES...);
#else
    return __builtin_shuffle(first, second, Vector<int32_t, LANES_OF<V>>{INDICES...});
#endif
}

template <int... INDICES, class V>
inline V shuffle(const V& value) {
    return shuffle<INDICES...>(value, value);
}

// Converts each lane to another type.
template <class Number, class V>
inline auto convert(const V& value) {
    return map_registers(
        [](const auto& x) { return __builtin_convertvector(x, Vector<Number, LANES_OF<decltype(x)>>); }, value);
}

// Reinterprets the bits of each lane as another type.
template <class Number, class V>
inline auto bits_as(const V& value) {
    return map_registers(
        [](const auto& x) { return reinterpret_cast<Vector<Number, LANES_OF<decltype(x)>>>(x); }, value);
}

}  // namespace srv::SRV_ISA
