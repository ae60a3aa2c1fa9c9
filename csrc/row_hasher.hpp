// The entries of consecutive documents: n-grams hashed, sorted, counted and scaled.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "bucket_sort.hpp"
#include "buffer.hpp"
#include "murmur.hpp"
#include "ngrams.hpp"

namespace sparcel {

enum class RowNorm { kNone, kSum, kEuclidean };

struct HashSettings {
    uint64_t dimensions;  // at most what the index type counts
    bool alternate_sign, binary;
    RowNorm norm;
};

template <class Index>
struct Entries {
    Buffer<Index> columns;
    Buffer<float> values;
    size_t count = 0;
};

// 32 bits of hash for int32 columns, 64 for int64. A key is a column and, in its lowest bit,
// whether the hash is negative.
template <class Index>
class RowHasher {
    using Key = std::make_unsigned_t<Index>;

  public:
    // `bytes` is the length of all documents to come.
    RowHasher(const NgramSettings& ngrams, const HashSettings& hash, size_t bytes)
        : reader_(ngrams),
          hash_(hash),
          bits_(1 + std::bit_width(hash.dimensions - 1)),
          bytes_(bytes) {}

    // Returns the number of entries so far.
    int64_t add(const uint8_t* document, size_t bytes) {
        size_t count = 0;
        reader_.read(document, bytes, [&](size_t more, const auto& at) {
            if (keys_.size() < count + more) keys_.resize(std::bit_ceil(count + more));
            write_keys(keys_.data() + count, more, at);
            count += more;
        });
        done_ += bytes;
        if (count) {
            reserve(entries_.count + count);
            add_row(sort_.sorted(keys_.data(), count, bits_), count);
        }
        return int64_t(entries_.count);
    }

    Entries<Index> finish() { return std::move(entries_); }

  private:
    template <class At>
    void write_keys(Key* keys, size_t count, const At& at) const {
        const Key dimensions = Key(hash_.dimensions), signs = hash_.alternate_sign;
        if (std::has_single_bit(dimensions)) {  // a division takes longer than the hash
            const auto column = [=](Key size) { return size & (dimensions - 1); };
            for (size_t i = 0; i < count; ++i) keys[i] = key_of(at(i), column, signs);
        } else {
            const auto column = [=](Key size) { return size % dimensions; };
            for (size_t i = 0; i < count; ++i) keys[i] = key_of(at(i), column, signs);
        }
    }

    template <class Column>
    static Key key_of(const Ngram& ngram, const Column& column, Key signs) {
        Key hash;
        if constexpr (sizeof(Key) == 4) hash = murmur32(ngram.text, ngram.bytes);
        if constexpr (sizeof(Key) == 8) hash = murmur64(ngram.text, ngram.bytes);
        const Key negative = hash >> (8 * sizeof(Key) - 1);
        const Key size = (hash ^ (0 - negative)) + negative;
        return column(size) << 1 | (negative & signs);
    }

    // Adds one entry for each column among sorted keys. If signs cancel, the entry stays, as zero.
    // Whether a key is of another column is unpredictable, so no branch depends on it.
    void add_row(const Key* keys, size_t count) {
        Index* const columns = entries_.columns.data() + entries_.count;
        float* const values = entries_.values.data() + entries_.count;
        size_t last = 0;
        int64_t sum = 0;
        for (size_t i = 0; i < count; ++i) {
            const bool other = (keys[i] ^ keys[i - (i > 0)]) > 1;
            sum = (other ? 0 : sum) + 1 - 2 * int64_t(keys[i] & 1);
            last += other;
            columns[last] = Index(keys[i] >> 1);
            values[last] = float(sum);
        }
        if (hash_.binary) std::fill_n(values, last + 1, 1.0f);
        scale(values, last + 1);
        entries_.count += last + 1;
    }

    void scale(float* values, size_t count) const {
        if (hash_.norm == RowNorm::kNone) return;
        int64_t sum = 0;  // of whole numbers, so in any order
        for (size_t i = 0; i < count; ++i) {
            const auto value = int64_t(std::abs(values[i]));
            sum += hash_.norm == RowNorm::kSum ? value : value * value;
        }
        if (sum == 0) return;
        const double norm = hash_.norm == RowNorm::kSum ? double(sum) : std::sqrt(double(sum));
        for (size_t i = 0; i < count; ++i) values[i] = float(values[i] / norm);
    }

    // Makes room for `count` entries and, once a part of the text tells their density, for those of
    // all documents: fresh memory costs more than what is written there.
    void reserve(size_t count) {
        if (count <= entries_.columns.capacity()) return;
        const bool known = done_ > bytes_ / 64;
        const double growth = known ? 1.1 * double(bytes_) / double(done_) : 2;
        const auto capacity = size_t(growth * double(count)) + 1;
        entries_.columns.resize(capacity);
        entries_.values.resize(capacity);
    }

    NgramReader reader_;
    const HashSettings hash_;
    const int bits_;  // of a key
    const size_t bytes_;
    size_t done_ = 0;  // of these bytes
    std::vector<Key> keys_;
    BucketSort<Key> sort_;
    Entries<Index> entries_{Buffer<Index>(0), Buffer<float>(0)};  // memory even if nothing comes
};

}  // namespace sparcel
