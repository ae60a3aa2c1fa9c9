// The n-grams of a document, as scikit-learn's HashingVectorizer makes them.
//
// A document is brought into a normal form, in which each n-gram is a range of bytes: its
// characters with a space for each run of white space, or its words with a space between them.
// N-grams are runs of units, which are characters or words, so the starts of the units locate them
// all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "rows/characters.hpp"
#include "rows/murmur.hpp"

namespace sparcel {

enum class Analyzer { kWord, kCharacter, kCharacterInWord };

struct NgramSettings {
    Analyzer analyzer;
    size_t low, high;  // units of the shortest and of the longest n-grams
    bool lowercase;    // ASCII only
    CharacterClasses classes;
};

struct Ngram {
    const uint8_t* text;
    size_t bytes;
};

class NgramReader {
  public:
    explicit NgramReader(const NgramSettings& settings) : settings_(settings) {}

    // Calls take(count, at) for all n-grams in turn, where at(i) is the i-th of `count` n-grams.
    // Bytes behind them are readable as the hash needs it.
    template <class Take>
    void read(const uint8_t* document, size_t bytes, const Take& take) {
        const size_t most = bytes + 2;  // with a space on either side
        if (starts_.size() <= most) {
            text_.resize(2 * most + kMurmurPadding);
            starts_.resize(2 * most + 1);
        }
        uint8_t bits = 0;
        for (size_t i = 0; i < bytes; ++i) bits |= document[i];
        if (bits < 0x80) {
            read_as(Ascii{}, document, bytes, take);
        } else {
            read_as(Utf8{starts_.data()}, document, bytes, take);
        }
    }

  private:
    template <class Coding, class Take>
    void read_as(Coding starts, const uint8_t* document, size_t bytes, const Take& take) {
        const Cursor<Coding> cursor(settings_.classes, settings_.lowercase, document, bytes);
        switch (settings_.analyzer) {
            case Analyzer::kWord:
                return read_words(cursor, take);
            case Analyzer::kCharacter:
                return read_characters(cursor, starts, take);
            case Analyzer::kCharacterInWord:
                return read_characters_in_words(cursor, starts, take);
        }
    }

    // Words have two or more characters; what follows overwrites shorter ones.
    template <class Coding, class Take>
    void read_words(Cursor<Coding> cursor, const Take& take) {
        uint8_t* const text = text_.data();
        size_t* const starts = starts_.data();
        size_t words = 0;
        for (size_t start = 0; cursor.more();) {
            size_t to = start, characters = 0;
            for (; cursor.more() && cursor.is(CharacterClasses::kOfWord); cursor.advance()) {
                to = cursor.copy(text, to);
                ++characters;
            }
            if (characters > 1) {
                starts[words++] = start;
                text[to] = ' ';
                start = to + 1;
                starts[words] = start;
            }
            if (cursor.more()) cursor.advance();
        }
        take_all(Utf8{starts}, words, 1, take);
    }

    template <class Coding, class Take>
    void read_characters(Cursor<Coding> cursor, Coding starts, const Take& take) {
        uint8_t* const text = text_.data();
        size_t count = 0;
        bool after_space = false;
        starts.set(0, 0);
        for (; cursor.more(); cursor.advance()) {
            const bool space = cursor.is(CharacterClasses::kSpace);
            // A run of white space becomes one space at its second character.
            const bool again = space & after_space;
            count -= again;
            const size_t start = starts[count], end = cursor.copy(text, start);
            text[start] = again ? ' ' : text[start];
            starts.set(++count, again ? start + 1 : end);
            after_space = space;
        }
        take_all(starts, count, 0, take);
    }

    // Each word has a space on either side, which it shares with its neighbours.
    template <class Coding, class Take>
    void read_characters_in_words(Cursor<Coding> cursor, Coding starts, const Take& take) {
        uint8_t* const text = text_.data();
        text[0] = ' ';
        starts.set(0, 0);
        for (size_t word = 0; cursor.more();) {
            size_t count = word + 1;
            starts.set(count, starts[word] + 1);
            for (; cursor.more() && !cursor.is(CharacterClasses::kSpace); cursor.advance()) {
                const size_t end = cursor.copy(text, starts[count]);
                starts.set(++count, end);
            }
            if (count > word + 1) {
                text[starts[count]] = ' ';
                starts.set(count + 1, starts[count] + 1);
                take_word(starts, word, count + 1 - word, take);
                word = count;
            }
            if (cursor.more()) cursor.advance();
        }
    }

    // Takes the n-grams of `count` units, of which each ends with `gap` bytes that do not count.
    template <class Starts, class Take>
    void take_all(const Starts& starts, size_t count, size_t gap, const Take& take) const {
        for (size_t n = settings_.low; n <= std::min(settings_.high, count); ++n) {
            take_of(starts, 0, count, n, gap, take);
        }
    }

    // Takes the n-grams of one word. A word of fewer than n characters is one itself, but once.
    template <class Starts, class Take>
    void take_word(const Starts& starts, size_t first, size_t count, const Take& take) const {
        for (size_t n = settings_.low; n <= settings_.high; ++n) {
            take_of(starts, first, count, std::min(n, count), 0, take);
            if (n >= count) return;
        }
    }

    template <class Starts, class Take>
    void take_of(const Starts& starts, size_t first, size_t count, size_t n, size_t gap,
                 const Take& take) const {
        take(count - n + 1, [=, text = text_.data()](size_t i) {
            const size_t start = starts[first + i];
            return Ngram{text + start, starts[first + i + n] - gap - start};
        });
    }

    const NgramSettings settings_;
    std::vector<uint8_t> text_;
    std::vector<size_t> starts_;
};

}  // namespace sparcel
