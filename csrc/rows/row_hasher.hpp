// The entries of consecutive documents: n-grams hashed, sorted, counted and scaled.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "rows/bucket_sort.hpp"
#include "rows/murmur.hpp"
#include "rows/ngrams.hpp"

namespace sparcel {

enum class RowNorm { kNone, kSum, kEuclidean };

struct HashSettings {
    uint64_t dimensions;  // at most what the index type counts
    bool alternate_sign, binary;
    RowNorm norm;
};

// Document i is text[offsets[i]] to text[offsets[i + 1]].
struct Documents {
    size_t bytes(size_t from, size_t to) const { return size_t(offsets[to] - offsets[from]); }

    const uint8_t* text;
    const int64_t* offsets;
    size_t count;
};

// 32 bits of hash for int32 columns, 64 for int64. A key is a column and, in its lowest bit,
// whether the hash is negative.
template <class Index>
class RowHasher {
    using Key = std::make_unsigned_t<Index>;

  public:
    RowHasher(const NgramSettings& ngrams, const HashSettings& hash)
        : reader_(ngrams), hash_(hash), bits_(1 + std::bit_width(hash.dimensions - 1)) {}

    // Makes the entries of documents in place of those it had. Sets the ends of their rows.
    void hash(const Documents& documents, size_t first, size_t end, int64_t* offsets) {
        count_ = 0;
        for (size_t i = first; i < end; ++i) {
            add(documents.text + documents.offsets[i], documents.bytes(i, i + 1));
            offsets[i + 1] = int64_t(count_);
        }
    }

    size_t count() const { return count_; }

    void copy_to(Index* columns, float* values) const {
        std::copy_n(columns_.data(), count_, columns);
        std::copy_n(values_.data(), count_, values);
    }

  private:
    void add(const uint8_t* document, size_t bytes) {
        size_t count = 0;
        reader_.read(document, bytes, [&](size_t more, const auto& at) {
            if (keys_.size() < count + more) keys_.resize(std::bit_ceil(count + more));
            write_keys(keys_.data() + count, more, at);
            count += more;
        });
        if (count == 0) return;
        if (columns_.size() < count_ + count) {
            columns_.resize(std::bit_ceil(count_ + count));
            values_.resize(columns_.size());
        }
        add_row(sort_.sorted(keys_.data(), count, bits_), count);
    }

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
        Index* const columns = columns_.data() + count_;
        float* const values = values_.data() + count_;
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
        count_ += last + 1;
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

    NgramReader reader_;
    const HashSettings hash_;
    const int bits_;  // of a key
    std::vector<Key> keys_;
    BucketSort<Key> sort_;
    std::vector<Index> columns_;
    std::vector<float> values_;
    size_t count_ = 0;  // of entries
};

}  // namespace sparcel
