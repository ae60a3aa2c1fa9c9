// Vector types of any width, from the compilers' vector extension: SSE, NEON, AVX, or plain words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd/bits.hpp"

namespace sparcel {
namespace {

// What all vector types share. `Self` inherits it and replaces what its processor has instructions
// for that compilers do not find.
template <class Self, class StorageT, size_t bytes>
struct VectorLanes {
    using Storage = StorageT;
    using Key = typename Bits<Storage>::Key;
    using Float = std::conditional_t<sizeof(Key) == sizeof(float), float, double>;
    // Signed, because SSE and AVX2 compare signed integers; magnitudes have no sign bit.
    using Signed = std::make_signed_t<Key>;
    using Register [[gnu::vector_size(bytes)]] = Signed;
    using Floats [[gnu::vector_size(bytes)]] = Float;
    using Mask = Register;
    using InMemory [[gnu::vector_size(bytes), gnu::aligned(1), gnu::may_alias]] = Signed;
    static constexpr size_t lanes = bytes / sizeof(Key);

    Register bits;

    static Self load(const Storage* x) {
        using Raw [[gnu::vector_size(lanes * sizeof(Storage)), gnu::aligned(1), gnu::may_alias]] =
            Storage;
        return {{__builtin_convertvector(*reinterpret_cast<const Raw*>(x), Register)}};
    }
    static Self load_float(const Float* x) { return {{*reinterpret_cast<const InMemory*>(x)}}; }
    void store(Float* x) const { *reinterpret_cast<InMemory*>(x) = bits; }
    void stream(Float* x) const { store(x); }
    static void fence() {}

    static Register broadcast(Key key) { return Register{} + Signed(key); }
    static Register limit(Key threshold) { return broadcast(threshold - 1); }
    Register magnitude() const { return bits & Signed(Bits<Storage>::magnitude); }
    Mask reaching(Register limit) const { return magnitude() > limit; }
    static bool any(Mask a, Mask b, Mask c, Mask d) {
        const Mask all = a | b | c | d;
        uint64_t words[bytes / 8], any = 0;
        std::memcpy(words, &all, sizeof words);
        for (const uint64_t word : words) any |= word;
        return any != 0;
    }

    // Every lane is written, but the position advances only past the masked ones.
    size_t emit(Mask mask, uint32_t base, Key* keys, uint32_t* positions) const {
        size_t found = 0;
        for (size_t lane = 0; lane < lanes; ++lane) {
            keys[found] = Key(bits[lane]);
            positions[found] = base + uint32_t(lane);
            found += size_t(mask[lane] & 1);
        }
        return found;
    }
    static uint64_t word(Mask mask) {
        uint64_t which = 0;
        for (size_t lane = 0; lane < lanes; ++lane) which |= uint64_t(mask[lane] & 1) << lane;
        return which;
    }
    size_t compress(uint64_t which, Float* x) const {
        size_t found = 0;
        for (size_t lane = 0; lane < lanes; ++lane) {
            x[found] = Floats(bits)[lane];
            found += size_t(which >> lane & 1);
        }
        return found;
    }

    static Self add(Self a, Self b) { return {{Register(Floats(a.bits) + Floats(b.bits))}}; }
    static Self multiply(Self a, Float b) { return {{Register(Floats(a.bits) * b)}}; }

    Register larger(Register most) const {
        const Register m = magnitude();
        return m > most ? m : most;
    }
    void keep_larger(Register& most, Register& place, Register here) const {
        const Register m = magnitude();
        place = m > most ? here : place;
        most = m > most ? m : most;
    }
    static Key largest_lane(Register most) {
        Key keys[lanes], largest = 0;
        std::memcpy(keys, &most, sizeof keys);
        for (const Key key : keys) largest = key > largest ? key : largest;
        return largest;
    }
};

}  // namespace
}  // namespace sparcel
