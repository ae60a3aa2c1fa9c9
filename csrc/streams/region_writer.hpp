// Messages of what is selected of a region, written while its vector is read.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <utility>

#include "base/buffer.hpp"
#include "base/numbers.hpp"
#include "simd/kernels.hpp"
#include "streams/message.hpp"
#include "streams/pack.hpp"
#include "streams/region_layout.hpp"
#include "streams/region_limits.hpp"

namespace sparcel {

constexpr uint32_t kNonFiniteBits = 0x7f800000;
constexpr uint32_t kNoLimit = 0x7fffffff;  // where nobody uses what is selected

// A message, how many entries it has, and by how much the magnitude of the vector has fallen.
struct Written {
    Buffer<uint8_t> bytes = {};
    size_t length = 0, count = 0;
    double magnitude = 0;
};

// What is selected of a region, in few bits, as it grows piece by piece.
class Selected {
  public:
    Selected(const Coding& coding, size_t length, size_t most, bool dense)
        : coding_(coding),
          passes_(kernels()),
          most_(most),
          dense_(dense),
          scales_(coding.scales_of(most)),
          codes_(coding.code_bytes(most) + 8),
          mask_(dense ? 0 : (length + 63) / 64),
          length_(length) {}

    // Takes what reaches the limits out of x = memory + addend, or out of x if `memory` is null.
    // x[0, n) are the coordinates from `begin` on, and the region's from `place` on.
    void take(const float* memory, const float* addend, float* x, size_t n, size_t begin,
              size_t place, std::span<const Limit> limits) {
        const size_t words = (n + 63) / 64;
        const bool apart = memory || n % 64;
        float* const work = apart ? rooms_[turn_ ^= 1] : x;
        alignas(64) float padded[2][kMostPiece];
        if (n % 64) {
            const auto pad = [&](const float* from, float* to) {
                std::fill(std::copy_n(from, n, to), to + 64 * words, 0.0f);
                return to;
            };
            if (memory) {
                memory = pad(memory, padded[0]), addend = pad(addend, padded[1]);
            } else {
                pad(x, work);
            }
        }
        take_whole(memory, addend, work, 64 * words, begin, place, limits);
        write_back();
        if (apart) last_ = {work, x, n};
    }

    // Rounds what has waited for others to share a scale, and returns the message, whose header
    // begins as `header` does.
    Written finish(Header header) {
        if (held_) round(values_, held_, errors_);
        for (size_t i = 0; i < held_; ++i) *waiting_[i] = errors_[i];
        held_ = 0;
        write_back();
        passes_.masked.fence();
        const uint64_t scales = 2 * coding_.scales_of(count_), codes = coding_.code_bytes(count_);
        const Packing packing(dense_ ? 0 : count_, length_);
        header.nnz = count_;
        header.flags = uint8_t(header.flags | (largest_ < kNonFiniteBits ? 0 : kNonFinite));
        header.length = sizeof header + padded(scales) + padded(codes) + 8 * packing.words;
        Buffer<uint8_t> message(header.length);
        uint8_t* to = message.data();
        std::memset(to + header.length - 8, 0, 8);
        std::memcpy(to, &header, sizeof header);
        to += sizeof header;
        std::memset(to + padded(scales) - 8 * (scales > 0), 0, 8 * (scales > 0));
        for (size_t i = 0; i < scales / 2; ++i) {
            const Brain scale = narrow<Brain>(scales_[i]);
            std::memcpy(to + 2 * i, &scale, sizeof scale);
        }
        to += padded(scales);
        std::memset(to + padded(codes) - 8 * (codes > 0), 0, 8 * (codes > 0));
        if (codes) std::memcpy(to, codes_.data(), codes);
        to += padded(codes);
        if (packing.words) write_places(packing, reinterpret_cast<uint64_t*>(to));
        return {std::move(message), header.length, count_, magnitude_};
    }

  private:
    void take_whole(const float* memory, const float* addend, float* x, size_t n, size_t begin,
                    size_t place, std::span<const Limit> limits) {
        const size_t words = n / 64;
        if (dense_) {
            uint64_t none[kMostPiece / 64];
            float* const sums = memory ? values_ : x;
            passes_.masked.select(memory, addend, sums, words, kNoLimit, none, errors_, &largest_);
            return round(sums, std::min(n, length_ - place), x);
        }
        uint64_t* const mask = mask_.data() + place / 64;
        size_t found = 0;
        const auto limit = std::ranges::upper_bound(limits, begin, {}, &Limit::stop);
        if (begin + n <= limit->stop || limit + 1 == limits.end()) {
            found = passes_.masked.select(memory, addend, x, words, limit->threshold, mask,
                                          values_ + held_, &largest_);
        } else {
            passes_.masked.select(memory, addend, x, words, kNoLimit, mask, values_ + held_,
                                  &largest_);
            found = take_each(x, n, begin, limit, limits.end(), mask);
        }
        if (count_ + held_ + found > most_) found = leave_out(mask, words, found);
        settle(x, mask, words, found);
    }

    // Selects where several limits apply.
    template <class Iterator>
    size_t take_each(const float* x, size_t n, size_t begin, Iterator limit, Iterator end,
                     uint64_t* mask) {
        std::fill_n(mask, n / 64, 0);
        size_t found = 0;
        for (size_t i = 0; i < n; ++i) {
            while (begin + i >= limit->stop && limit + 1 != end) ++limit;
            const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & Bits<uint32_t>::magnitude;
            if (magnitude < limit->threshold) continue;
            mask[i / 64] |= uint64_t{1} << i % 64;
            values_[held_ + found++] = x[i];
        }
        return found;
    }

    // Selects no more than there is room for; returns how many.
    size_t leave_out(uint64_t* mask, size_t words, size_t found) {
        const size_t room = most_ - count_ - held_;
        for (size_t word = words; word-- > 0;) {
            for (; mask[word] && found > room; --found) {
                mask[word] &= ~(uint64_t{1} << (63 - std::countl_zero(mask[word])));
            }
        }
        return found;
    }

    // Rounds the values that fill whole scales. In x, these become what rounding takes; the others
    // wait, and so do their places.
    void settle(float* x, const uint64_t* mask, size_t words, size_t found) {
        const size_t all = held_ + found, whole = all / coding_.group * coding_.group;
        if (whole) {
            round(values_, whole, errors_);
            for (size_t i = 0; i < held_; ++i) *waiting_[i] = errors_[i];
            passes_.masked.put(mask, words, errors_ + held_, x);  // garbage for those that wait
            held_ = 0;
            std::copy_n(values_ + whole, all - whole, values_);
        }
        const size_t rest = all - whole - held_;  // of this piece
        for (size_t word = words, left = rest; left;) {
            --word;
            for (uint64_t bits = mask[word]; bits && left;) {
                const int bit = 63 - std::countl_zero(bits);
                bits ^= uint64_t{1} << bit;
                waiting_[held_ + --left] = x + 64 * word + bit;
            }
        }
        held_ += rest;
    }

    // Writes the last piece to its place, past the cache: what fits there is needed for the next.
    void write_back() {
        if (!last_.n) return;
        for (size_t i = 0; i < held_; ++i) {
            const bool inside = !std::less<>()(waiting_[i], last_.work) &&
                                std::less<>()(waiting_[i], last_.work + last_.n);
            if (inside) waiting_[i] = last_.home + (waiting_[i] - last_.work);
        }
        passes_.masked.move_out(last_.work, last_.n, last_.home);
        last_ = {};
    }

    // Rounds n values, and writes what that takes.
    void round(const float* values, size_t n, float* errors) {
        alignas(64) uint8_t codes[kMostPiece + kMostResidual + 8];
        double sums[kMostResidual];
        magnitude_ += passes_.codes.residual(
            coding_, values, n, sums, codes,
            scales_.data() + count_ / coding_.group * coding_.scales(), errors);
        passes_.codes.pack(coding_.bits, codes, n, codes_.data() + coding_.code_bytes(count_));
        count_ += n;
    }

    void write_places(Packing packing, uint64_t* words) {
        if (packing.plain) {
            std::memcpy(words, mask_.data(), 8 * packing.words);
            return;
        }
        Packing plain(length_, length_);
        plain.count = count_;
        Buffer<int32_t> indices(count_ + kUnpackSlack);
        unpack_indices(plain, mask_.data(), indices.data());
        pack_indices(packing, indices.data(), words);
    }

    const Coding coding_;
    const Kernels& passes_;
    const size_t most_;
    const bool dense_;
    Buffer<float> scales_;
    Buffer<uint8_t> codes_;
    Buffer<uint64_t> mask_;
    const size_t length_;
    size_t count_ = 0;  // values that are rounded
    size_t held_ = 0;   // values that wait
    uint32_t largest_ = 0;
    double magnitude_ = 0;  // of the values, less what rounding takes
    struct Piece {
        const float* work;  // where it is
        float* home;        // where it belongs
        size_t n;
    };
    Piece last_ = {};  // the last piece, unless it is where it belongs
    size_t turn_ = 0;
    alignas(64) float rooms_[2][kMostPiece];
    float* waiting_[kMostResidual];  // where what rounding takes of the values that wait will go
    alignas(64) float values_[kMostPiece + kMostResidual + kSlack];
    alignas(64) float errors_[kMostPiece + kMostResidual + kSlack];
};

}  // namespace sparcel
