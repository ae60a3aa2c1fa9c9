// What the passes over weights and their changes share with their callers: see `delta_pass.hpp`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparcel {

// The bits of a dtype, as an unsigned integer: how many stand for the fraction of a float. Integers
// have no exponents, so all of them are in one class.
struct BitLayout {
    bool floats;
    unsigned fraction;

    // How far to the right the first eight bits of an exponent are.
    unsigned exponent_shift() const { return fraction == 52 ? 55 : fraction; }
};

// The elements of a chunk that lie in one tensor. Element i has the number
// first + (i / row) * stride + i % row in the tensor, whose elements `key` tells from others'.
struct Piece {
    void* elements;  // null if they are not known
    size_t count;
    uint64_t key;
    uint64_t first;
    uint64_t row;
    uint64_t stride;

    bool known() const { return elements || count == 0; }
};

// Changes are coded a block after the other, and in a block a class after the other.
constexpr size_t kCodedTogether = 2048;

constexpr unsigned kMostClasses = 6;

// Elements belong to classes by the exponent of their old value, of which the first eight bits
// count: class c has those whose exponent is at least limits[c] and less than the limit before; the
// last class has the rest.
struct Classes {
    unsigned count = 1;
    uint8_t limits[kMostClasses] = {};
    uint64_t changes[kMostClasses] = {};  // how many elements of each class change
};

// Where the words of a coded chunk lie; `kCodeSlack` bytes after the end may be read.
struct CodedBytes {
    const uint8_t* begin;
    const uint8_t* end;
};
constexpr size_t kCodeSlack = 32;

// What is told of each change: the new value; the step to it from the old value; or the steps of
// those nibbles, groups of four bits, that change.
enum class Told { values, steps, nibbles };

// How many nibbles an element has.
template <class Word>
constexpr size_t kNibbles = 2 * sizeof(Word);

// What a chunk says: where elements change, and by how much or to what.
struct CodedChanges {
    BitLayout layout;
    Classes classes;
    Told told;
    unsigned shift;     // steps are those of all but so many bits, which are 0
    CodedBytes places;  // symbols
    CodedBytes values;  // symbols
    CodedBytes bits;    // of both, in the order of the changes
};

// Changed elements: their numbers in the chunk, and their bits.
template <class Word>
struct Changes {
    uint32_t* places;
    Word* before;  // zeros if they are not known
    Word* after;
};

// Of each changed element: its number among the elements of its class.
struct Ranks {
    uint32_t* ranks;
    uint8_t* classes;
};

// The coded streams of a chunk.
struct CodedStreams {
    CodedBytes places, values, bits;
};

// Memory in which `count` changes are coded.
struct CodingRoom {
    uint32_t* gaps;    // count
    uint32_t* places;  // count + kMostClasses
    uint32_t* values;  // 2 * count
    uint8_t* bits;     // most_plain_bytes(count, sizeof(Word))
    uint8_t* symbols;  // most_symbol_bytes(count)
};
// A gap takes a symbol, and 36 bits at most; a step or a value two symbols, and its bits and seven.
constexpr size_t most_plain_bytes(size_t count, size_t word) {
    return (count + kMostClasses) * (36 + 8 * word + 7) / 8 + 24;
}
constexpr size_t most_symbol_bytes(size_t count) { return 2 * (3 * count + kMostClasses) + 16; }

constexpr size_t kTorn = ~size_t{0};

// The passes over weights whose bits are `Word`s.
template <class Word>
struct DeltaReaders {
    // Tells by bits which of up to `kCodedTogether` elements differ, and whether any does.
    bool (*differ)(const Word* a, const Word* b, size_t n, uint64_t* bits);

    // Finds the elements of a piece that change, in the order in which they are coded: by the block
    // of `kCodedTogether` elements that they lie in, then by class, then by place. Raises `seen`,
    // the number of elements of each class so far.
    size_t (*changed)(const Word* old, const Word* now, size_t n, BitLayout layout,
                      const Classes& classes, uint64_t* seen, uint32_t base, Changes<Word> changes,
                      Ranks ranks);

    // Codes changes whose ranks are known, as values or steps, and counts those of each class.
    CodedStreams (*code)(Changes<Word> changes, size_t count, Ranks ranks, BitLayout layout,
                         Classes& classes, Told told, unsigned shift, CodingRoom room);

    // Codes changes, in the order of their places, as nibbles.
    CodedStreams (*code_nibbles)(Changes<Word> changes, size_t count, CodingRoom room);

    // Decodes a chunk, and returns how many elements change, or `kTorn` if not all that it says was
    // found. There is room for all changes that `classes` tells of.
    size_t (*decode)(const CodedChanges& coded, const Piece* pieces, size_t count,
                     Changes<Word> changes);

    // The sum of `hashed` over a piece.
    uint64_t (*sum)(const Piece& piece);
};

struct DeltaPasses {
    DeltaReaders<uint8_t> of8;
    DeltaReaders<uint16_t> of16;
    DeltaReaders<uint32_t> of32;
    DeltaReaders<uint64_t> of64;

    template <class Word>
    const DeltaReaders<Word>& readers() const {
        if constexpr (sizeof(Word) == 1) return of8;
        if constexpr (sizeof(Word) == 2) return of16;
        if constexpr (sizeof(Word) == 4) return of32;
        if constexpr (sizeof(Word) == 8) return of64;
    }
};

}  // namespace sparcel
