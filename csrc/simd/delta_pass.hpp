// The passes over weights, written once over the types that each instruction set provides.
//
// A type `Sixty4` stands for the exponents of 64 elements. It has `of_exponents`, `reaching`, whose
// bits tell which reach a limit, and `differing`, whose bits tell which elements differ.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/delta.hpp"
#include "simd/delta_members.hpp"
#include "simd/delta_models.hpp"

namespace sparcel {
namespace {

template <class Sixty4, class Word>
class Decoding {
  public:
    Decoding(const CodedChanges& coded, Changes<Word> changes)
        : coded_(coded), changes_(changes), members_(coded.layout, coded.classes) {}

    // Returns how many elements change, or `kTorn`.
    size_t run(const Piece* pieces, size_t count) {
        Readers readers{SymbolReader(coded_.places), SymbolReader(coded_.values),
                        BitReader(coded_.bits)};
        for (unsigned c = 0; c < coded_.classes.count; ++c) {
            left_[c] = coded_.classes.changes[c];
            skip_[c] = next(c, readers);
            if (readers.past_end()) return kTorn;
        }
        for (size_t i = 0; i < count && !readers.past_end(); base_ += uint32_t(pieces[i++].count)) {
            const auto* x = static_cast<const Word*>(pieces[i].elements);
            const size_t n = pieces[i].count;
            if (coded_.told == Told::nibbles) {
                skip_[0] = take_nibbles(x, n, readers);
            } else if (coded_.classes.count == 1) {
                const size_t before = found_;
                skip_[0] = take(0, n, 0, readers, [](uint64_t rank) { return rank; });
                complete(x, before);
            } else {
                scan(x, n, readers);
            }
        }
        for (unsigned c = 0; c < coded_.classes.count; ++c) {
            if (skip_[c] < kNever) return kTorn;
        }
        return readers.finished() ? found_ : kTorn;
    }

  private:
    static constexpr uint64_t kNever = uint64_t{1} << 62;

    struct Readers {
        SymbolReader places, values;
        BitReader bits;

        bool past_end() const { return places.past_end() || values.past_end() || bits.past_end(); }
        bool finished() const { return places.finished() && values.finished() && bits.finished(); }
    };

    void scan(const Word* x, size_t n, Readers& readers) {
        for (size_t i = 0; i < n; i += kCodedTogether) {
            const size_t length = std::min(kCodedTogether, n - i);
            fetch(x + i + length, std::min(kCodedTogether, n - i - length));
            members_.find(x + i, length);
            const size_t before = found_;
            for (unsigned c = 0; c < coded_.classes.count; ++c) {
                skip_[c] = take(c, members_.count(c), uint32_t(i), readers,
                                [&](uint64_t rank) { return members_.place(c, uint16_t(rank)); });
            }
            complete(x, before);
        }
    }

    // Decodes the changes among the next `count` elements of a class, and returns how many elements
    // after these do not change.
    template <class Place>
    uint64_t take(unsigned c, uint64_t count, uint32_t first, Readers& shared, const Place& place) {
        Readers readers = shared;  // in registers
        uint64_t skip = skip_[c];
        size_t found = found_;
        while (skip < count && !readers.past_end()) {
            changes_.places[found] = base_ + first + uint32_t(place(skip));
            changes_.after[found] = coded_.told == Told::steps
                                        ? steps_[c].read(readers.values, readers.bits)
                                        : whole_.read(readers.values, readers.bits);
            ++found;
            skip += next(c, readers) + 1;
        }
        found_ = found;
        shared = readers;
        return skip - std::min(skip, count);
    }

    // Decodes the changes of nibbles in a piece, and returns how many nibbles after it do not
    // change. Those of one element are one change.
    uint64_t take_nibbles(const Word* x, size_t n, Readers& shared) {
        Readers readers = shared;  // in registers
        const size_t before = found_;
        uint64_t skip = skip_[0];
        for (; skip < n * kNibbles<Word> && !readers.past_end(); skip += next(0, readers) + 1) {
            const size_t place = skip / kNibbles<Word>;
            const unsigned bit = 4 * (skip % kNibbles<Word>);
            if (found_ == before || changes_.places[found_ - 1] != base_ + place) {
                changes_.places[found_] = base_ + uint32_t(place);
                changes_.before[found_] = changes_.after[found_] = x[place];
                ++found_;
            }
            const unsigned old = unsigned(x[place] >> bit & 0xf);
            const Word moved = Word(old ^ nibbles_.read(readers.values, old));
            Word& after = changes_.after[found_ - 1];
            after = Word(after ^ Word(moved << bit));
        }
        shared = readers;
        return skip - std::min<uint64_t>(skip, n * kNibbles<Word>);
    }

    // Decodes the gap to the next change of a class.
    uint64_t next(unsigned c, Readers& readers) {
        if (left_[c] == 0)
            return 2 * kNever;  // whatever a chunk takes off, more than kNever is left
        --left_[c];
        return gaps_[c].read(readers.places, readers.bits);
    }

    // Fills in what depends on the old elements, if these are known. They are read apart from
    // decoding, so that many reads from memory overlap.
    void complete(const Word* x, size_t first) {
        for (size_t i = first; i < found_; ++i) {
            const Word old = x ? x[changes_.places[i] - base_] : Word{0};
            Word& after = changes_.after[i];
            if (x && coded_.told == Told::steps)
                after = stepped(old, after, coded_.layout.floats, coded_.shift);
            changes_.before[i] = old;
        }
    }

    const CodedChanges& coded_;
    Changes<Word> changes_;
    Members<Sixty4> members_;
    Gaps gaps_[kMostClasses];
    Steps<Word> steps_[kMostClasses];
    Values<Word> whole_;
    Nibbles nibbles_;
    uint64_t skip_[kMostClasses];  // the elements of the class before its next change
    uint64_t left_[kMostClasses];  // the changes of the class after that
    size_t found_ = 0;
    uint32_t base_ = 0;
};

// Codes two streams, in turns, so that neither waits for the other's divisions; one ends where the
// other begins.
inline void code_both(SymbolCoder& one, SymbolCoder& other) {
    for (size_t both = std::min(one.left(), other.left()); both > 0; --both) {
        one.code_one();
        other.code_one();
    }
    while (one.left()) one.code_one();
    while (other.left()) other.code_one();
}

// What is recorded of changes before it is coded.
struct Recorders {
    explicit Recorders(CodingRoom room)
        : places(room.places), values(room.values), bits(room.bits) {}

    CodedStreams coded(CodingRoom room) {
        uint8_t* const middle = room.symbols + places.most_bytes();
        uint8_t* const end = middle + values.most_bytes();
        SymbolCoder of_places(places, middle), of_values(values, end);
        code_both(of_places, of_values);
        return {
            {of_places.finish(), middle}, {of_values.finish(), end}, {room.bits, bits.finish()}};
    }

    SymbolRecorder places, values;
    BitRecorder bits;
};

template <class Sixty4, class Word>
struct DeltaPass {
    static CodedStreams code(Changes<Word> changes, size_t count, Ranks ranks, BitLayout layout,
                             Classes& classes, Told told, unsigned shift, CodingRoom room) {
        // The gap to a change follows the change before it of its class.
        constexpr uint32_t kLast = ~uint32_t{0};
        uint32_t next[kMostClasses];
        std::fill(next, next + kMostClasses, kLast);
        std::fill(classes.changes, classes.changes + kMostClasses, 0);
        for (size_t i = count; i-- > 0;) {
            const unsigned c = ranks.classes[i];
            room.gaps[i] = next[c] == kLast ? kLast : next[c] - ranks.ranks[i] - 1;
            next[c] = ranks.ranks[i];
            ++classes.changes[c];
        }
        Recorders to(room);
        Gaps gaps_of[kMostClasses];
        for (unsigned c = 0; c < classes.count; ++c) {
            if (next[c] != kLast) gaps_of[c].record(to.places, to.bits, next[c]);
        }
        Steps<Word> steps_of[kMostClasses];
        Values<Word> whole;
        for (size_t i = 0; i < count; ++i) {
            const unsigned c = ranks.classes[i];
            if (told == Told::steps) {
                const Word step =
                    step_between(changes.before[i], changes.after[i], layout.floats, shift);
                steps_of[c].record(to.values, to.bits, step);
            } else {
                whole.record(to.values, to.bits, changes.after[i]);
            }
            if (room.gaps[i] != kLast) gaps_of[c].record(to.places, to.bits, room.gaps[i]);
        }
        return to.coded(room);
    }

    static CodedStreams code_nibbles(Changes<Word> changes, size_t count, CodingRoom room) {
        Recorders to(room);
        Gaps gaps;
        Nibbles nibbles;
        uint64_t next = 0;  // the nibble after the last one that changes
        for (size_t i = 0; i < count; ++i) {
            const Word before = changes.before[i], after = changes.after[i];
            for (Word rest = before ^ after; rest;) {
                const auto nibble = unsigned(std::countr_zero(rest)) / 4;
                const uint64_t place = changes.places[i] * uint64_t(kNibbles<Word>) + nibble;
                gaps.record(to.places, to.bits, place - next);
                nibbles.record(to.values, unsigned(before >> 4 * nibble & 0xf),
                               unsigned(after >> 4 * nibble & 0xf));
                next = place + 1;
                rest = Word(rest & ~(Word(0xf) << 4 * nibble));
            }
        }
        return to.coded(room);
    }

    static size_t changed(const Word* old, const Word* now, size_t n, BitLayout layout,
                          const Classes& classes, uint64_t* seen, uint32_t base,
                          Changes<Word> changes, Ranks ranks) {
        Members<Sixty4> members(layout, classes);
        size_t found = 0;
        for (size_t i = 0; i < n;
             i += kCodedTogether, old += kCodedTogether, now += kCodedTogether) {
            const size_t length = std::min(kCodedTogether, n - i);
            const size_t after = std::min(kCodedTogether, n - i - length);
            fetch(old + length, after);
            fetch(now + length, after);
            uint64_t differing[kWords] = {};
            uint16_t places[kCodedTogether + 3];
            const bool any = differ(old, now, length, differing);
            const size_t count = any ? places_of(differing, places) : 0;
            uint8_t class_of[kCodedTogether];
            size_t next[kMostClasses + 1] = {};  // where each class goes on
            for (size_t j = 0; j < count; ++j) {
                class_of[j] = uint8_t(members.class_of(old[places[j]]));
                ++next[class_of[j] + 1];
            }
            for (unsigned c = 0; c < classes.count; ++c) next[c + 1] += next[c];
            members.find(old, length);
            for (size_t j = 0; j < count; ++j) {
                const unsigned c = class_of[j];
                const size_t place = places[j], to = found + next[c]++;
                changes.places[to] = base + uint32_t(i + place);
                changes.before[to] = old[place];
                changes.after[to] = now[place];
                ranks.ranks[to] = uint32_t(seen[c] + members.rank(c, place));
                ranks.classes[to] = uint8_t(c);
            }
            for (unsigned c = 0; c < classes.count; ++c) seen[c] += members.count(c);
            found += count;
        }
        return found;
    }

    // Tells by bits which elements of a block differ, and whether any does.
    static bool differ(const Word* a, const Word* b, size_t n, uint64_t* bits) {
        uint64_t any = 0;
        size_t i = 0;
        for (; i + 64 <= n; i += 64)
            any |= * bits++ = Sixty4::template differing<Word>(a + i, b + i);
        if (i == n) return any;
        Word padded[2][64] = {};
        std::memcpy(padded[0], a + i, (n - i) * sizeof(Word));
        std::memcpy(padded[1], b + i, (n - i) * sizeof(Word));
        return any |= *bits = Sixty4::template differing<Word>(padded[0], padded[1]);
    }

    static size_t decode(const CodedChanges& coded, const Piece* pieces, size_t count,
                         Changes<Word> changes) {
        return Decoding<Sixty4, Word>(coded, changes).run(pieces, count);
    }

    static uint64_t sum(const Piece& piece) {
        const auto* x = static_cast<const Word*>(piece.elements);
        uint64_t total = 0;
        for (size_t i = 0; i < piece.count; i += piece.row) {
            const uint64_t first = piece.first + i / piece.row * piece.stride;
            const size_t n = std::min<size_t>(piece.row, piece.count - i);
            for (size_t j = 0; j < n; ++j) total += hashed(piece.key, first + j, x[i + j]);
        }
        return total;
    }

    static constexpr DeltaReaders<Word> readers = {differ,       changed, code,
                                                   code_nibbles, decode,  sum};
};

template <class Sixty4>
constexpr DeltaPasses delta_passes = {
    DeltaPass<Sixty4, uint8_t>::readers, DeltaPass<Sixty4, uint16_t>::readers,
    DeltaPass<Sixty4, uint32_t>::readers, DeltaPass<Sixty4, uint64_t>::readers};

}  // namespace
}  // namespace sparcel
