// Where the entries of a selection come from: a vector, or the sum of memory and gradient.
#pragma once

#include "numbers.hpp"
#include "survivors.hpp"

namespace sparcel {

// Stores bypass the cache for vectors that would not stay in it anyway.
constexpr size_t kStreamBytes = size_t{8} << 20;

template <class Storage>
struct Vector {
    using Key = typename Bits<Storage>::Key;
    using Word = Storage;

    const Storage* x;

    Key at(size_t i) const { return x[i]; }

    // Lets block [i, i + n) pass, n <= kBlock, into the room that the survivors have.
    void pass(size_t i, size_t n, Survivors<Storage>& survivors) const {
        const auto base = uint32_t(i - survivors.begin);
        survivors.count += compact()(x + i, n, base, survivors.threshold, survivors.tail());
    }

  private:
    static Compact<Storage> compact() {
        if constexpr (sizeof(Storage) == 2) return kernels().compact16;
        if constexpr (sizeof(Storage) == 4) return kernels().compact32;
        if constexpr (sizeof(Storage) == 8) return kernels().compact64;
    }
};

template <class Float, class Gradient>
struct Sum {
    using Word = std::conditional_t<sizeof(Float) == 4, uint32_t, uint64_t>;
    using Key = Word;

    const Float* memory;
    const Gradient* gradient;
    Float* scratch;
    bool stream;

    Key at(size_t i) const { return std::bit_cast<Key>(memory[i] + Float(widen(gradient[i]))); }

    void pass(size_t i, size_t n, Survivors<Word>& survivors) const {
        const auto base = uint32_t(i - survivors.begin);
        Float converted[kBlock];
        const Float* addend = block(i, n, converted);
        survivors.count +=
            accumulate()(memory + i, addend, scratch + i, n, base, survivors.threshold,
                         survivors.tail(), &survivors.largest, stream);
    }

  private:
    const Float* block(size_t i, size_t n, Float* converted) const {
        if constexpr (std::is_same_v<Float, Gradient>) {
            return gradient + i;
        } else {
            for (size_t j = 0; j < n; ++j) converted[j] = Float(widen(gradient[i + j]));
            return converted;
        }
    }

    static auto accumulate() {
        if constexpr (sizeof(Float) == 4) {
            return kernels().accumulate32;
        } else {
            return kernels().accumulate64;
        }
    }
};

}  // namespace sparcel
