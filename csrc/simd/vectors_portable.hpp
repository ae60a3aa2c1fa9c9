// Vector types of 16 bytes from the compilers' vector extension: SSE, NEON, or plain words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/bits.hpp"

namespace sparcel {
namespace {

template <class StorageT, class SignedKey, class FloatT>
struct PortableVector {
    using Storage = StorageT;
    using Float = FloatT;
    using Key = typename Bits<Storage>::Key;
    // Signed, because SSE compares signed integers; magnitudes have no sign bit.
    using Register [[gnu::vector_size(16)]] = SignedKey;
    using Floats [[gnu::vector_size(16)]] = Float;
    using Mask = Register;
    static constexpr size_t lanes = 16 / sizeof(Key);

    Register bits;

    static PortableVector load(const Storage* x) {
        Storage raw [[gnu::vector_size(lanes * sizeof(Storage))]];
        std::memcpy(&raw, x, sizeof raw);
        return {__builtin_convertvector(raw, Register)};
    }

    static Register broadcast(Key key) { return Register{} + SignedKey(key); }
    static Register limit(Key threshold) { return broadcast(threshold - 1); }
    Register magnitude() const { return bits & SignedKey(Bits<Storage>::magnitude); }
    Mask reaching(Register limit) const { return magnitude() > limit; }

    static bool any(Mask a, Mask b, Mask c, Mask d) {
        const Mask all = a | b | c | d;
        uint64_t halves[2];
        std::memcpy(halves, &all, sizeof halves);
        return (halves[0] | halves[1]) != 0;
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

    static PortableVector load_float(const Float* x) {
        PortableVector v;
        std::memcpy(&v.bits, x, sizeof v.bits);
        return v;
    }
    static PortableVector add(PortableVector a, PortableVector b) {
        return {Register(Floats(a.bits) + Floats(b.bits))};
    }
    static PortableVector multiply(PortableVector a, Float b) {
        return {Register(Floats(a.bits) * b)};
    }
    void store(Float* x) const { std::memcpy(x, &bits, sizeof bits); }
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
    void stream(Float* x) const { store(x); }
    static void fence() {}
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
        SignedKey largest = 0;
        for (size_t lane = 0; lane < lanes; ++lane) {
            if (most[lane] > largest) largest = most[lane];
        }
        return Key(largest);
    }
};

using Vector16 = PortableVector<uint16_t, int32_t, float>;
using Vector32 = PortableVector<uint32_t, int32_t, float>;
using Vector64 = PortableVector<uint64_t, int64_t, double>;

}  // namespace
}  // namespace sparcel
