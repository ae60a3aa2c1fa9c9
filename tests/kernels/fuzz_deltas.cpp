// Decodes mutated changes of weights, which must be refused or harmless. The sanitizers see reads
// and writes out of bounds, because all buffers have exactly the bytes that a decoder may touch.
//
//     fuzz_deltas COUNT [SEED]

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "delta/delta.hpp"
#include "fuzzing.hpp"

namespace sparcel {
namespace {

template <class Word>
using Words = std::vector<Word>;

template <class Word>
std::vector<Piece> pieces_of(const std::vector<size_t>& counts, Words<Word>& elements) {
    std::vector<Piece> pieces;
    Word* next = elements.data();
    for (const size_t count : counts) {
        pieces.push_back({next, count, engine(), below(1000), 1 + below(50), 50});
        next += count;
    }
    return pieces;
}

// Sizes around multiples of 64, which are looked at together, and longer than a block that is coded
// together; few elements mostly, so that mutations of few bits matter.
std::vector<size_t> draw_counts() {
    std::vector<size_t> counts(1 + below(3));
    for (size_t& count : counts) {
        count = one_in(3)   ? 64 * below(one_in(8) ? 80 : 4) + below(3)
                : one_in(8) ? below(9000)
                            : below(200);
    }
    return counts;
}

// The bits of the fraction of a float that has so many bytes.
unsigned draw_fraction(size_t itemsize) {
    switch (itemsize) {
        case 1:
            return one_in(2) ? 2 : 3;
        case 2:
            return one_in(2) ? 7 : 10;
        case 4:
            return 23;
        default:
            return 52;
    }
}

// Elements whose exponents differ little, or are anything.
template <class Word>
Words<Word> draw_elements(size_t n, BitLayout layout) {
    Words<Word> elements(n);
    const bool anything = one_in(2);
    for (Word& element : elements) {
        const auto exponent = uint64_t(std::min({below(16), below(16), below(16)}));
        element = Word(anything ? engine() : exponent << layout.fraction | engine() >> 63);
    }
    return elements;
}

template <class Word>
Words<Word> changed(const Words<Word>& old) {
    Words<Word> now = old;
    const uint64_t each = one_in(4) ? 1 : 1 + below(50), width = 1 + below(8 * sizeof(Word));
    const uint64_t zeros = one_in(4) ? below(width) : 0;
    for (Word& element : now) {
        if (!one_in(each)) continue;
        element = Word(element + (((engine() >> (64 - width)) + 1) << zeros));
    }
    return now;
}

Told draw_told() {
    if (one_in(4)) return Told::values;
    return one_in(3) ? Told::nibbles : Told::steps;
}

// The streams of a chunk, in memory that ends where a decoder must stop reading.
struct Coded {
    CodedChanges changes;
    std::vector<uint8_t> memory;

    // Tells where the streams are, one after the other, and leaves some slack at the end.
    void point(const std::vector<size_t>& sizes) {
        memory.resize(std::accumulate(sizes.begin(), sizes.end(), kCodeSlack));
        memory.shrink_to_fit();
        const uint8_t* begin = memory.data();
        for (size_t i = 0; i < sizes.size(); begin += sizes[i++]) {
            *streams()[i] = {begin, begin + sizes[i]};
        }
    }
    std::vector<size_t> sizes() {
        std::vector<size_t> sizes;
        for (const CodedBytes* each : streams()) sizes.push_back(size_t(each->end - each->begin));
        return sizes;
    }

  private:
    std::vector<CodedBytes*> streams() { return {&changes.places, &changes.values, &changes.bits}; }
};

// Codes how pieces differ, of which those are left out that do not change.
template <class Word>
Coded encode(std::vector<Piece>& old, std::vector<Piece>& now, BitLayout layout, unsigned most,
             Told told) {
    Classes classes;
    if (layout.floats && most > 1) {
        classes = classes_for(sampled_exponents<Word>(old, now, layout), most);
    }
    OwnChanges<Word> changes(elements_of(old));
    std::vector<uint32_t> rank(elements_of(old));
    std::vector<uint8_t> of_class(elements_of(old));
    const Ranks ranks{rank.data(), of_class.data()};
    std::vector<size_t> kept;
    const size_t count = find_changes(old, now, layout, classes, changes.view(), ranks, kept);
    for (size_t i = 0; i < kept.size(); ++i) old[i] = old[kept[i]], now[i] = now[kept[i]];
    old.resize(kept.size()), now.resize(kept.size());
    const unsigned shift = told == Told::steps ? zeros_below(changes.view(), count) : 0;
    const Streams streams =
        code_changes(changes.view(), count, ranks, layout, classes, told, shift);
    Coded coded{{layout, classes, told, shift, {}, {}, {}}, {}};
    std::vector<size_t> sizes;
    for (const CodedBytes& stream :
         {streams.coded.places, streams.coded.values, streams.coded.bits}) {
        coded.memory.insert(coded.memory.end(), stream.begin, stream.end);
        sizes.push_back(size_t(stream.end - stream.begin));
    }
    coded.point(sizes);
    return coded;
}

// Decodes, checks that all places lie in the chunk, and writes the changes. Returns whether they
// were accepted.
template <class Word>
bool decode(const CodedChanges& coded, const std::vector<Piece>& pieces) {
    const uint64_t* each = coded.classes.changes;
    const size_t count = size_t(std::accumulate(each, each + coded.classes.count, uint64_t{0}));
    std::vector<uint32_t> places(count);
    Words<Word> before(count), after(count);
    const Changes<Word> changes{places.data(), before.data(), after.data()};
    const auto& passes = kernels().delta.readers<Word>();
    const size_t found = passes.decode(coded, pieces.data(), pieces.size(), changes);
    if (found == kTorn) return false;
    expect(found <= count, "more changes than there is room for");
    const size_t total = elements_of(pieces);
    places.resize(found);
    for (const uint32_t place : places) expect(place < total, "a place outside was accepted");
    hashed_changes(pieces, changes, found);
    if (std::all_of(pieces.begin(), pieces.end(), [](const Piece& p) { return p.known(); })) {
        swap_changes(pieces, places.data(), after.data(), found);
    }
    return true;
}

// Streams, limits and counts as a hostile chunk may have them: the binding checks no more than that
// there are not more changes than elements.
void damage(Coded& coded, size_t total) {
    Classes& classes = coded.changes.classes;
    const bool nibbles = coded.changes.told == Told::nibbles;
    if (one_in(8) && !nibbles) {
        const unsigned count = 1 + unsigned(below(kMostClasses));
        for (unsigned c = 0; c < kMostClasses; ++c) {
            classes.limits[c] = c + 1 < count ? uint8_t(engine() >> (56 + below(8))) : 0;
        }
        classes.count = count;
    }
    if (one_in(4)) {
        const uint64_t most = one_in(2) ? 2 : std::max<uint64_t>(total / 8, 2);
        for (uint64_t& changes : classes.changes) changes = one_in(4) ? total : below(most);
    }
    size_t left = total;
    for (unsigned c = 0; c < classes.count; ++c) {
        classes.changes[c] = std::min<uint64_t>(classes.changes[c], left);
        left -= size_t(classes.changes[c]);
    }
    std::vector<size_t> sizes = coded.sizes();
    if (one_in(4)) {
        size_t& last = sizes.back();
        last = one_in(2) ? 0 : below(last + 1);
        if (one_in(4)) sizes[below(2)] = below(sizes[0] + 1);
    }
    coded.point(sizes);
    if (!one_in(4)) mutate(Bytes(coded.memory).first(coded.memory.size() - kCodeSlack));
    if (one_in(4)) mutate(Bytes(coded.memory).last(kCodeSlack));
}

// The same pieces with their elements in another array.
template <class Word>
std::vector<Piece> moved(std::vector<Piece> pieces, Words<Word>& elements) {
    Word* next = elements.data();
    for (Piece& piece : pieces) {
        piece.elements = next;
        next += piece.count;
    }
    return pieces;
}

// Codes changes, which must come back, and decodes them again after some damage. Returns whether
// the damaged ones were accepted.
template <class Word>
bool read() {
    const Told told = draw_told();
    const BitLayout layout{told != Told::nibbles && !one_in(4), draw_fraction(sizeof(Word))};
    const std::vector<size_t> counts = draw_counts();
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    Words<Word> old = draw_elements<Word>(total, layout), now = changed(old), target = old;
    std::vector<Piece> pieces = pieces_of(counts, old), others = moved(pieces, now);
    const auto most = unsigned(1 + below(kMostClasses));
    Coded coded = encode<Word>(pieces, others, layout, most, told);
    others = pieces;
    for (Piece& piece : others) {
        piece.elements = target.data() + (static_cast<Word*>(piece.elements) - old.data());
    }
    const bool back = decode<Word>(coded.changes, others) && target == now;
    expect(back, "changes do not come back");

    damage(coded, elements_of(pieces) * (told == Told::nibbles ? kNibbles<Word> : 1));
    if (one_in(4)) mutate(bytes_of(old));
    others = pieces;
    if (told != Told::nibbles && coded.changes.classes.count == 1 && one_in(2)) {
        for (Piece& piece : others) piece.elements = nullptr;
    }
    return decode<Word>(coded.changes, others);
}

}  // namespace
}  // namespace sparcel

int main(int argc, char** argv) {
    using namespace sparcel;
    return fuzz(argc, argv, "changes of weights", [] {
        switch (below(4)) {
            case 0:
                return read<uint8_t>();
            case 1:
                return read<uint16_t>();
            case 2:
                return read<uint32_t>();
            default:
                return read<uint64_t>();
        }
    });
}
