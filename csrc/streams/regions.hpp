// Vectors that ranks divide among themselves in blocks: what each rank sends of every region to its
// owner, what the owner makes of that and returns, and what all ranks make of what was returned.
//
// Messages are those of `sparcel.formats`, in few bits, packed or dense. A block is taken from
// memory and gradient to a message's codes, or back, while it is in the first-level cache.
// `sparcel.regions.by_streams` does the same with streams.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.hpp"
#include "base/numbers.hpp"
#include "base/parallel.hpp"
#include "simd/kernels.hpp"
#include "streams/message.hpp"
#include "streams/pack.hpp"

namespace sparcel {

constexpr size_t kMostPiece = 1024;  // coordinates that are in the first-level cache at a time
constexpr uint32_t kNonFiniteBits = 0x7f800000;
constexpr uint32_t kNoLimit = 0x7fffffff;  // where nobody uses what is selected

// Block b of a vector belongs to rank b mod `ranks`, whose region is its blocks one after another.
struct Regions {
    size_t size, ranks, block;

    // How many of the coordinates below `end` lie in the region of a rank.
    size_t before(size_t rank, size_t end) const {
        const size_t whole = end / block;
        const size_t owned = (whole + ranks - 1 - rank) / ranks;
        return owned * block + (whole % ranks == rank ? end % block : 0);
    }
    size_t length(size_t rank) const { return before(rank, size); }

    // Calls run(begin, n, place) with pieces of the region's blocks from `from` to `to`: n
    // coordinates from `begin` on, which are the region's from `place` on.
    template <class Run>
    void each_block(size_t rank, size_t from, size_t to, const Run& run) const {
        for (size_t i = from; i < to; ++i) {
            const size_t first = (i * ranks + rank) * block;
            const size_t end = std::min(first + block, size);
            for (size_t begin = first; begin < end; begin += kMostPiece) {
                run(begin, std::min(kMostPiece, end - begin), i * block + begin - first);
            }
        }
    }
    size_t blocks(size_t rank) const { return (length(rank) + block - 1) / block; }
};

// What enters memory, block by block: scale·gradient.
template <class Gradient>
struct Entering {
    const float* memory;
    const Gradient* gradient;
    float scale;

    float addend(size_t i) const {
        const float plain = widen(gradient[i]);
        return scale == 1 ? plain : plain * scale;
    }
    float sum(size_t i) const { return memory[i] + addend(i); }

    // Returns the addends of [begin, begin + n), which `room` holds where they must be computed.
    const float* addends(size_t begin, size_t n, float* room) const {
        if constexpr (std::is_same_v<Gradient, float>) {
            if (scale == 1) return gradient + begin;
        }
        for (size_t i = 0; i < n; ++i) room[i] = addend(begin + i);
        return room;
    }
};

// Before coordinate `stop`, and from the limit before this one on, entries of at least the
// threshold's magnitude are taken.
struct Limit {
    size_t stop;
    uint32_t threshold;  // the bits of a magnitude, not 0
};

// Returns the magnitude that about `density` of `count` numbers reach: in a sample of up to 8192,
// which every step takes elsewhere. `number(place)` is the number at a place below `count`.
template <class Number>
uint32_t sampled_threshold(size_t count, double density, uint64_t step, const Number& number) {
    const size_t taken = std::min(count, std::clamp<size_t>(count / 64, 1024, 8192));
    if (taken == 0) return 1;
    std::vector<uint32_t> sample(taken);
    for (size_t i = 0; i < taken; ++i) {
        const uint64_t spread = ((i + step * taken) & 0xffffff) * 0x9E3779B1 & 0xffffffff;
        const size_t place = taken == count ? i : size_t((spread >> 8) * count >> 24);
        sample[i] = std::bit_cast<uint32_t>(number(place)) & Bits<uint32_t>::magnitude;
    }
    const size_t k = std::clamp<size_t>(size_t(density * double(taken) + 0.5), 1, taken);
    std::nth_element(sample.begin(), sample.begin() + ptrdiff_t(k - 1), sample.end(),
                     std::greater<>());
    return std::max<uint32_t>(sample[k - 1], 1);
}

// What is selected of a region, in few bits, as it grows block by block.
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

    // Rounds what has waited for others to share a scale.
    void finish() {
        if (held_) round(values_, held_, errors_);
        for (size_t i = 0; i < held_; ++i) *waiting_[i] = errors_[i];
        held_ = 0;
        write_back();
        passes_.masked.fence();
    }

    // Returns the message, with a header that begins as `header` does.
    Buffer<uint8_t> message(Header header, size_t& length) {
        const uint64_t scales = 2 * coding_.scales_of(count_), codes = coding_.code_bytes(count_);
        const Packing packing(dense_ ? 0 : count_, length_);
        header.nnz = count_;
        header.flags = uint8_t(header.flags | (largest_ < kNonFiniteBits ? 0 : kNonFinite));
        header.length = sizeof header + padded(scales) + padded(codes) + 8 * packing.words;
        length = header.length;
        Buffer<uint8_t> message(length);
        uint8_t* to = message.data();
        std::memset(to + length - 8, 0, 8);
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
        return message;
    }

    size_t count() const { return count_; }
    double magnitude() const { return magnitude_; }

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
        const size_t all = held_ + found, whole = all / coding_.block * coding_.block;
        if (whole) {
            round(values_, whole, errors_);
            for (size_t i = 0; i < held_; ++i) *waiting_[i] = errors_[i];
            passes_.masked.put(mask, words, errors_ + held_, x);  // garbage for those that wait
            held_ = 0;
            std::copy_n(values_ + whole, all - whole, values_);
        }
        const size_t rest = all - whole - held_;  // of this block
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
            scales_.data() + count_ / coding_.block * coding_.scales(), errors);
        passes_.codes.pack(coding_.bits, codes, n, codes_.data() + count_ / coding_.per_byte());
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

// A message of a region, checked.
struct Packed {
    size_t count = 0, length = 0;
    bool dense = false, finite = true;
    const uint8_t* scales = nullptr;
    const uint8_t* codes = nullptr;
    Buffer<uint64_t> mask = {};  // null without has_mask()

    bool has_mask() const { return !dense && count; }
};

// Reads a message of a region of `length` coordinates whose header begins as `expected` does;
// returns nothing for any other, of which the decoder of `sparcel.formats` says what is wrong.
inline std::optional<Packed> read_packed(const uint8_t* bytes, size_t size, const Header& expected,
                                         const Coding& coding) {
    Header header;
    if (size < sizeof header) return {};
    std::memcpy(&header, bytes, sizeof header);
    Packed packed{.count = header.nnz, .length = header.size};
    packed.dense = expected.flags & kDense;
    packed.finite = !(header.flags & kNonFinite);
    Header like = header;
    like.flags = uint8_t(header.flags & ~kNonFinite);
    like.nnz = like.length = 0;
    if (std::memcmp(&like, &expected, sizeof like) != 0 || header.nnz > header.size ||
        (packed.dense && header.nnz != header.size)) {
        return {};
    }
    const uint64_t scales = padded(2 * coding.scales_of(header.nnz));
    const uint64_t codes = padded(coding.code_bytes(header.nnz));
    const Packing packing(packed.dense ? 0 : header.nnz, header.size);
    if (header.length != sizeof header + scales + codes + 8 * packing.words ||
        header.length > size) {
        return {};
    }
    packed.scales = bytes + sizeof header;
    packed.codes = packed.scales + scales;
    if (!packing.words) return packed;
    Buffer<uint64_t> words(packing.words);
    std::memcpy(words.data(), packed.codes + codes, 8 * packing.words);
    if (packing.plain) {
        size_t found = 0;
        for (size_t i = 0; i < packing.words; ++i) found += size_t(std::popcount(words[i]));
        const size_t last = header.size % 64;
        if (found != header.nnz || (last && words[packing.words - 1] >> last)) return {};
        packed.mask = std::move(words);
        return packed;
    }
    Buffer<int32_t> indices(header.nnz + kUnpackSlack);
    if (!unpack_indices(packing, words.data(), indices.data()) ||
        check_indices(indices.data(), header.nnz, int64_t(header.size)) >= 0) {
        return {};
    }
    Packing plain(header.size, header.size);
    plain.count = header.nnz;
    packed.mask = Buffer<uint64_t>(plain.words);
    pack_bitmap(plain, indices.data(), packed.mask.data());
    return packed;
}

// Decodes the values of a message block by block.
class Values {
  public:
    Values(const Packed& packed, const Coding& coding, size_t first_word = 0)
        : packed_(packed), coding_(coding), passes_(kernels()) {
        size_t before = packed.dense ? 64 * first_word : 0;
        for (size_t i = 0; i < first_word && packed.has_mask(); ++i) {
            before += size_t(std::popcount(packed.mask[i]));
        }
        decoded_ = before / coding.block * coding.block;
        const size_t skipped = before - decoded_;
        if (skipped) next(skipped);
    }

    // Returns the next `count` values, with room for kSlack more.
    const float* next(size_t count) {
        if (used_) std::copy_n(values_ + used_, held_, values_);
        used_ = 0;
        while (held_ < count) {
            const size_t wanted = (count - held_ + coding_.block - 1) / coding_.block;
            decode(std::min(wanted * coding_.block, packed_.count - decoded_));
        }
        used_ = count;
        held_ -= count;
        return values_;
    }

  private:
    void decode(size_t n) {
        alignas(64) uint8_t codes[kMostPiece + 2 * kMostResidual + 8];
        float scales[2 * (kMostPiece / 8 + kMostResidual)];
        const size_t first = decoded_ / coding_.block * coding_.scales();
        for (size_t i = 0; i < coding_.scales_of(n); ++i) {
            Brain scale;
            std::memcpy(&scale, packed_.scales + 2 * (first + i), sizeof scale);
            scales[i] = widen(scale);
        }
        passes_.codes.unpack(coding_.bits, packed_.codes + decoded_ / coding_.per_byte(), n, codes);
        passes_.codes.dequantize(coding_, codes, n, scales, values_ + held_);
        held_ += n;
        decoded_ += n;
    }

    const Packed& packed_;
    const Coding coding_;
    const Kernels& passes_;
    size_t decoded_ = 0;          // values of the message
    size_t used_ = 0, held_ = 0;  // values here that were returned, and those that were not
    alignas(64) float values_[kMostPiece + 2 * kMostResidual + kSlack] = {};
};

// Calls run(values, mask, count) with a block of a message: its selected values, and which
// coordinates these are; null for all.
template <class Run>
void with_block(const Packed& packed, Values& values, size_t n, size_t place, const Run& run) {
    if (packed.dense) return run(values.next(n), nullptr, n);
    if (packed.count == 0) return;
    const uint64_t* const mask = packed.mask.data() + place / 64;
    size_t count = 0;
    for (size_t i = 0; i < (n + 63) / 64; ++i) count += size_t(std::popcount(mask[i]));
    run(values.next(count), mask, count);
}

// Adds messages to the region `rank` of x, in order, and returns by how much its magnitude rose.
inline double add_packed(const Regions& regions, size_t rank, std::span<const Packed> messages,
                         const Coding& coding, float* x, int threads) {
    const Kernels& passes = kernels();
    const size_t blocks = regions.blocks(rank);
    const size_t useful = useful_threads(regions.length(rank) * (messages.size() + 1), threads);
    const size_t tasks = std::clamp<size_t>(blocks, 1, useful);
    std::vector<double> magnitudes(tasks);
    parallel(tasks, [&](size_t task) {
        const size_t from = split_point(blocks, task, tasks);
        std::vector<Values> values;
        values.reserve(messages.size());
        for (const Packed& message : messages) {
            values.emplace_back(message, coding, from * regions.block / 64);
        }
        const size_t to = split_point(blocks, task + 1, tasks);
        regions.each_block(rank, from, to, [&](size_t begin, size_t n, size_t place) {
            alignas(64) float padded[kMostPiece];
            float* const sums = n % 64 ? padded : x + begin;
            if (n % 64) std::copy_n(x + begin, n, padded);
            const double before = passes.masked.magnitude(sums, n);
            for (size_t i = 0; i < messages.size(); ++i) {
                const auto add = [&](const float* added, const uint64_t* mask, size_t) {
                    if (mask) return passes.masked.add(mask, (n + 63) / 64, added, sums);
                    for (size_t j = 0; j < n; ++j) sums[j] += added[j];
                };
                with_block(messages[i], values[i], n, place, add);
            }
            magnitudes[task] += passes.masked.magnitude(sums, n) - before;
            if (n % 64) std::copy_n(padded, n, x + begin);
        });
    });
    double total = 0;
    for (const double one : magnitudes) total += one;
    return total;
}

// The bits of the least magnitude that becomes infinite in a dtype.
template <class T>
constexpr uint32_t kOverflows = kNonFiniteBits;
template <>
constexpr uint32_t kOverflows<Half> = 0x477ff000;
template <>
constexpr uint32_t kOverflows<Brain> = 0x7f7f8000;

// Writes a region's values over a divisor to `out`, zeros elsewhere; tells whether all are finite.
template <class Out>
bool write_packed(const Regions& regions, size_t rank, const Packed& message, const Coding& coding,
                  float divisor, Out* out) {
    const Kernels& passes = kernels();
    Values values(message, coding);
    uint32_t largest = 0;
    regions.each_block(rank, 0, regions.blocks(rank), [&](size_t begin, size_t n, size_t place) {
        alignas(64) float block[kMostPiece + kSlack];
        if (message.count == 0) std::fill_n(block, n, 0.0f);
        const auto write = [&](const float* found, const uint64_t* mask, size_t count) {
            alignas(64) float quotients[kMostPiece + kSlack];
            float* const divided = mask ? quotients : block;
            std::copy_n(found, count, divided);
            largest = std::max(largest, passes.masked.divide(divided, count, divisor));
            if (mask) passes.masked.expand(mask, (n + 63) / 64, quotients, block);
        };
        with_block(message, values, n, place, write);
        if constexpr (std::is_same_v<Out, float>) {
            passes.masked.move_out(block, n, out + begin);
        } else {
            for (size_t i = 0; i < n; ++i) out[begin + i] = narrow<Out>(block[i]);
        }
    });
    passes.masked.fence();
    return message.finite && largest < kOverflows<Out>;
}

}  // namespace sparcel
