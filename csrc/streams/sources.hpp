// The input of a selection: a vector, or the sum of memory and gradient.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/numbers.hpp"
#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "streams/survivors.hpp"

namespace sparcel {

// Stores bypass the cache for vectors that are too large for it.
constexpr size_t kStreamBytes = size_t{8} << 20;

template <class Storage>
struct Vector {
    using Key = typename Bits<Storage>::Key;
    using Word = Storage;

    const Storage* x;

    Key at(size_t i) const { return load_bits(x + i); }

    // Appends the entries of block [i, i + n), n <= kBlock, that survive; there is room for them.
    void pass(size_t i, size_t n, Survivors<Storage>& survivors) const {
        const auto base = uint32_t(i - survivors.begin);
        const auto compact = kernels().readers<Storage>().compact;
        survivors.count += compact(x + i, n, base, survivors.threshold, survivors.tail());
    }

    // Entries can be read at once, and the hardware prefetches a single stream well.
    void settle(size_t, size_t, Survivors<Storage>&) const {}
    void fetch(size_t, size_t) const {}
};

template <class Float, class Gradient>
struct Sum {
    using Word = std::conditional_t<sizeof(Float) == 4, uint32_t, uint64_t>;
    using Key = Word;

    Addition<Float> addition;
    const Gradient* gradient;
    Gradient* cleared;  // the gradient again if it is cleared as it is read, or null

    Key at(size_t i) const {
        Float addend = Float(widen(gradient[i])) * addition.scale;
        if (addition.velocity) addend += addition.velocity[i] * addition.momentum;
        return std::bit_cast<Key>(addition.memory[i] + addend);
    }

    void pass(size_t i, size_t n, Survivors<Word>& survivors) const {
        const auto base = uint32_t(i - survivors.begin);
        Float converted[kBlock];
        survivors.count += accumulate()(addition.from(i), block(i, n, converted), n, base,
                                        survivors.threshold, survivors.tail(), &survivors.largest);
        // The block is still in the cache, so this costs no pass over memory.
        if (cleared) std::memset(static_cast<void*>(cleared + i), 0, n * sizeof(Gradient));
    }

    // Prefetches the memory that settling [begin, end) will read and write.
    void fetch(size_t begin, size_t end) const {
        for (size_t i = begin; i < end; i += 64 / sizeof(Float)) {
            __builtin_prefetch(addition.memory + i);
            __builtin_prefetch(gradient + i);
            __builtin_prefetch(addition.scratch + i, 1);
        }
    }

    // Writes [begin, end) of the sum; no entry survives.
    void settle(size_t begin, size_t end, Survivors<Word>& survivors) const {
        survivors.restart(begin, Survivors<Word>::mask + 1);
        for (size_t i = begin; i < end; i += kBlock) {
            survivors.make_room(0);
            pass(i, std::min(kBlock, end - i), survivors);
        }
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
