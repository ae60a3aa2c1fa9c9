// Sorting of keys that are spread evenly over their range, as hashes are.
//
// Such keys are nearly sorted once each is in its bucket of about one key, and an insertion sort
// finishes them in a few moves each. Where keys are not spread evenly, moves would multiply; after
// too many of them std::sort takes over.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sparcel {

template <class Key>
class BucketSort {
  public:
    // Returns `keys`, all of at most `bits` bits, in ascending order. They are valid until the next
    // call.
    const Key* sorted(const Key* keys, size_t count, int bits) {
        const int bucket_bits = std::min({int(std::bit_width(count)), bits, kMostBucketBits});
        const int shift = bits - bucket_bits;
        if (sorted_.size() < count) sorted_.resize(std::bit_ceil(count));
        ends_.assign(size_t{1} << bucket_bits, 0);
        for (size_t i = 0; i < count; ++i) ++ends_[keys[i] >> shift];
        size_t end = 0;
        for (size_t& bucket : ends_) bucket = std::exchange(end, end + bucket);
        for (size_t i = 0; i < count; ++i) sorted_[ends_[keys[i] >> shift]++] = keys[i];
        finish(count);
        return sorted_.data();
    }

  private:
    static constexpr int kMostBucketBits = 20;
    static constexpr size_t kMovesPerKey = 8;

    void finish(size_t count) {
        Key* keys = sorted_.data();
        size_t moves = kMovesPerKey * count;
        for (size_t i = 1; i < count; ++i) {
            const Key key = keys[i];
            size_t to = i;
            for (; to > 0 && keys[to - 1] > key; --to) keys[to] = keys[to - 1];
            keys[to] = key;
            if (i - to > moves) return std::sort(keys, keys + count);
            moves -= i - to;
        }
    }

    std::vector<Key> sorted_;
    std::vector<size_t> ends_;
};

}  // namespace sparcel
