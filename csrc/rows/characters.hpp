// The characters of a document in ASCII or UTF-8, and what they are to Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sparcel {

// What characters are to Python, by code point; zero if neither.
struct CharacterClasses {
    static constexpr uint8_t kOfWord = 1, kSpace = 2;

    uint8_t operator[](uint32_t code) const { return code < count ? classes[code] : 0; }

    const uint8_t* classes;
    size_t count;
};

// Characters of one byte: character i starts at byte i.
struct Ascii {
    static size_t width(const uint8_t*, const uint8_t*) { return 1; }
    static uint32_t code(const uint8_t* text, size_t) { return *text; }

    size_t operator[](size_t i) const { return i; }
    void set(size_t, size_t) {}
};

// Characters of UTF-8, whose starts are listed. Invalid text gives some characters, of up to four
// bytes that are there.
struct Utf8 {
    static size_t width(const uint8_t* text, const uint8_t* end) {
        const size_t most = size_t(std::min(end - text, std::ptrdiff_t{4}));
        size_t bytes = 1;
        while (bytes < most && (text[bytes] & 0xC0) == 0x80) ++bytes;
        return bytes;
    }
    static uint32_t code(const uint8_t* text, size_t width) {
        if (width == 1) return *text;
        uint32_t code = *text & (0x7F >> width);
        for (size_t i = 1; i < width; ++i) code = code << 6 | (text[i] & 0x3F);
        return code;
    }

    size_t operator[](size_t i) const { return starts[i]; }
    void set(size_t i, size_t start) { starts[i] = start; }

    size_t* starts;
};

// The characters of a document in turn. It copies its settings, so that as a local variable it
// stays in registers: bytes that are written may belong to anything, for all the compiler knows.
template <class Coding>
class Cursor {
  public:
    Cursor(CharacterClasses classes, bool lowercase, const uint8_t* document, size_t bytes)
        : classes_(classes),
          lower_(lowercase ? 'a' - 'A' : 0),
          at_(document),
          end_(document + bytes) {
        measure();
    }

    bool more() const { return at_ != end_; }
    void advance() {
        at_ += width_;
        measure();
    }
    bool is(uint8_t character_class) const {
        return classes_[Coding::code(at_, width_)] == character_class;
    }
    // Writes the character and returns where it ends.
    size_t copy(uint8_t* text, size_t to) const {
        text[to] = uint8_t(*at_ + (uint8_t(*at_ - 'A') < 26 ? lower_ : 0));
        for (size_t i = 1; i < width_; ++i) text[to + i] = at_[i];
        return to + width_;
    }

  private:
    void measure() {
        if (more()) width_ = Coding::width(at_, end_);
    }

    const CharacterClasses classes_;
    const uint8_t lower_;
    const uint8_t* at_;
    const uint8_t* const end_;
    size_t width_ = 0;
};

}  // namespace sparcel
