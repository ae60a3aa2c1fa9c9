// Coding the changes of weights: classes by exponent, and what is recorded of each change.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "simd/delta_models.hpp"
#include "simd/kernels.hpp"

namespace sparcel {

// The elements of a piece have numbers in the tensor that `hashed` takes.
inline uint64_t number_of(const Piece& piece, uint64_t i) {
    if (i < piece.row) [[likely]]
        return piece.first + i;
    return piece.first + i / piece.row * piece.stride + i % piece.row;
}

// Changes of a chunk, which own their memory.
template <class Word>
struct OwnChanges {
    explicit OwnChanges(size_t count) : places(count), before(count), after(count) {}

    Changes<Word> view() { return {places.data(), before.data(), after.data()}; }

    Buffer<uint32_t> places;
    Buffer<Word> before, after;
};

inline size_t elements_of(const std::vector<Piece>& pieces) {
    size_t total = 0;
    for (const Piece& piece : pieces) total += piece.count;
    return total;
}

// The first eight bits of a float's exponent, which tell how likely it is to change: the larger the
// unit in its last place, the less.
template <class Word>
uint8_t exponent_of(Word bits, BitLayout layout) {
    return uint8_t(Word(bits << 1) >> (layout.exponent_shift() + 1));
}

// Counts the exponents of elements that change, in blocks here and there until there are enough.
template <class Word>
std::vector<uint64_t> sampled_exponents(const std::vector<Piece>& old,
                                        const std::vector<Piece>& now, BitLayout layout) {
    constexpr size_t kEnough = 1024, kApart = 32;
    std::vector<std::pair<size_t, size_t>> blocks;  // the piece, the first element
    for (size_t i = 0; i < old.size(); ++i) {
        for (size_t j = 0; j < old[i].count; j += kCodedTogether) blocks.emplace_back(i, j);
    }
    std::vector<uint64_t> counts(256);
    size_t found = 0;
    for (size_t offset = 0; offset < kApart; ++offset) {
        for (size_t block = offset; block < blocks.size(); block += kApart) {
            const auto [i, first] = blocks[block];
            const auto *a = static_cast<const Word*>(old[i].elements) + first,
                       *b = static_cast<const Word*>(now[i].elements) + first;
            const size_t n = std::min(kCodedTogether, old[i].count - first);
            uint64_t bits[kCodedTogether / 64];
            if (!kernels().delta.readers<Word>().differ(a, b, n, bits)) continue;
            for (size_t j = 0; 64 * j < n; ++j) {
                for (uint64_t rest = bits[j]; rest; rest &= rest - 1, ++found) {
                    const size_t place = 64 * j + size_t(std::countr_zero(rest));
                    ++counts[exponent_of(a[place], layout)];
                }
            }
        }
        if (found >= kEnough) break;
    }
    return counts;
}

// Divides exponents into at most `most` classes, each with some changes to learn from, by joining
// neighbours with the fewest changes.
inline Classes classes_for(const std::vector<uint64_t>& counts, unsigned most) {
    constexpr uint64_t kFewest = 6;
    Classes classes;
    std::vector<std::pair<uint8_t, uint64_t>> found;  // the least exponent, the changes
    for (size_t e = counts.size(); e-- > 0;) {
        if (counts[e]) found.emplace_back(uint8_t(e), counts[e]);
    }
    const auto together = [&](size_t i) { return found[i].second + found[i + 1].second; };
    while (found.size() > 1) {
        size_t least = 0, rarest = 0;
        for (size_t i = 0; i < found.size(); ++i) {
            if (i + 1 < found.size() && together(i) < together(least)) least = i;
            if (found[i].second < found[rarest].second) rarest = i;
        }
        const bool rare = found[rarest].second < kFewest;
        if (!rare && found.size() <= most) break;
        if (rare) {
            const bool last = rarest + 1 == found.size();
            least = last || (rarest > 0 && together(rarest - 1) < together(rarest)) ? rarest - 1
                                                                                    : rarest;
        }
        found[least] = {found[least + 1].first, together(least)};
        found.erase(found.begin() + ptrdiff_t(least) + 1);
    }
    classes.count = unsigned(std::max<size_t>(found.size(), 1));
    for (unsigned c = 0; c + 1 < classes.count; ++c) classes.limits[c] = found[c].first;
    return classes;
}

// Finds all changes of a chunk, in the order in which they are coded, and returns how many. Pieces
// that do not change do not belong to the chunk; `kept` lists the others.
template <class Word>
size_t find_changes(const std::vector<Piece>& old, const std::vector<Piece>& now, BitLayout layout,
                    const Classes& classes, Changes<Word> changes, Ranks ranks,
                    std::vector<size_t>& kept) {
    uint64_t seen[kMostClasses] = {};
    uint32_t base = 0;
    size_t found = 0;
    for (size_t i = 0; i < old.size(); ++i) {
        const auto *a = static_cast<const Word*>(old[i].elements),
                   *b = static_cast<const Word*>(now[i].elements);
        const Changes<Word> rest{changes.places + found, changes.before + found,
                                 changes.after + found};
        const Ranks others{ranks.ranks + found, ranks.classes + found};
        uint64_t before[kMostClasses];
        std::copy(seen, seen + kMostClasses, before);
        const size_t here = kernels().delta.readers<Word>().changed(
            a, b, old[i].count, layout, classes, seen, base, rest, others);
        if (here) {
            kept.push_back(i);
            found += here;
            base += uint32_t(old[i].count);
        } else {
            std::copy(before, before + kMostClasses, seen);
        }
    }
    return found;
}

// How many of the last bits of all changed elements are 0, before and after.
template <class Word>
unsigned zeros_below(const Changes<Word>& changes, size_t count) {
    Word bits = Word(Word(1) << (8 * sizeof(Word) - 1));
    for (size_t i = 0; i < count; ++i) bits |= changes.before[i] | changes.after[i];
    return unsigned(std::countr_zero(bits));
}

// Tells whether elements hold values of four bits: steps of one value leave those below it alone,
// where steps of a whole number change its last bits, apart from `zeros` that are always 0.
template <class Word>
bool packs_nibbles(const Changes<Word>& changes, size_t count, unsigned zeros) {
    const Word lowest = Word(Word(0xf) << (zeros & ~3u));
    size_t above = 0;
    for (size_t i = 0; i < count; ++i)
        above += ((changes.before[i] ^ changes.after[i]) & lowest) == 0;
    return 4 * above > count;
}

// How many nibbles change.
template <class Word>
size_t count_nibbles(const Changes<Word>& changes, size_t count) {
    size_t nibbles = 0;
    for (size_t i = 0; i < count; ++i) {
        uint64_t rest = Word(changes.before[i] ^ changes.after[i]);
        rest |= rest >> 2;
        rest |= rest >> 1;
        nibbles += size_t(std::popcount(rest & 0x1111111111111111));
    }
    return nibbles;
}

// The coded streams of a chunk, with their memory.
struct Streams {
    Buffer<uint8_t> symbols, plain;
    CodedStreams coded;
};

// Codes changes whose ranks are known, and counts those of each class; of nibbles, these.
template <class Word>
Streams code_changes(const Changes<Word>& changes, size_t count, Ranks ranks, BitLayout layout,
                     Classes& classes, Told told, unsigned shift) {
    const auto& passes = kernels().delta.readers<Word>();
    const size_t coded = told == Told::nibbles ? count_nibbles(changes, count) : count;
    Buffer<uint32_t> gaps(coded), places(coded + kMostClasses), values(2 * coded);
    Streams streams{Buffer<uint8_t>(most_symbol_bytes(coded)),
                    Buffer<uint8_t>(most_plain_bytes(coded, sizeof(Word))),
                    {}};
    const CodingRoom room{gaps.data(), places.data(), values.data(), streams.plain.data(),
                          streams.symbols.data()};
    if (told == Told::nibbles) {
        classes.changes[0] = coded;
        streams.coded = passes.code_nibbles(changes, count, room);
    } else {
        streams.coded = passes.code(changes, count, ranks, layout, classes, told, shift, room);
    }
    return streams;
}

// What changes add to the sum of the tensors that the pieces are of.
template <class Word>
uint64_t hashed_changes(const std::vector<Piece>& pieces, const Changes<Word>& changes,
                        size_t count) {
    uint64_t sum = 0, base = 0;
    const Piece* piece = pieces.data();
    for (size_t i = 0; i < count; ++i) {
        while (changes.places[i] >= base + piece->count) base += piece++->count;
        const uint64_t number = number_of(*piece, changes.places[i] - base);
        sum += hashed(piece->key, number, changes.after[i]) -
               hashed(piece->key, number, changes.before[i]);
    }
    return sum;
}

// Notes the last eight bits of each element's place in the order of values.
template <class Word>
void remember(const Word* x, size_t n, bool floats, uint8_t* low) {
    for (size_t i = 0; i < n; ++i) low[i] = uint8_t(ordered(x[i], floats));
}

// Finds what elements were, if each has moved by less than 128 steps since `remember`.
template <class Word>
void recall(const Word* now, const uint8_t* low, size_t n, bool floats, Word* before) {
    for (size_t i = 0; i < n; ++i) {
        const Word order = ordered(now[i], floats);
        const auto step = int8_t(uint8_t(uint8_t(order) - low[i]));
        before[i] = unordered(Word(order - Word(step)), floats);
    }
}

// Exchanges values with the elements at their places, whose memory is asked for some changes ahead.
template <class Word>
void swap_changes(const std::vector<Piece>& pieces, const uint32_t* places, Word* values,
                  size_t count) {
    constexpr size_t kAhead = 32;
    uint64_t base = 0;
    const Piece* piece = pieces.data();
    for (size_t i = 0; i < count; ++i) {
        if (places[i] < base) piece = pieces.data(), base = 0;
        while (places[i] >= base + piece->count) base += piece++->count;
        auto* elements = static_cast<Word*>(piece->elements);
        const uint64_t later = i + kAhead < count ? places[i + kAhead] - base : 0;
        if (later < piece->count) __builtin_prefetch(elements + later, 1);
        std::swap(elements[places[i] - base], values[i]);
    }
}

}  // namespace sparcel
