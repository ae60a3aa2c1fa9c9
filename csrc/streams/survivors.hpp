// The entries that survive a pass over a part of the vector, pruned to the k largest as they grow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"
#include "simd/bits.hpp"
#include "simd/kernels.hpp"
#include "streams/kth.hpp"

namespace sparcel {

// Entries that a pass handles between two checks of the remaining room.
constexpr size_t kBlock = 4096;

// A k that never prunes anything.
constexpr size_t kUnlimited = SIZE_MAX / 4;

// From this many survivors on, thinning them out before the exact selection pays.
constexpr size_t kWorthThinning = 128;

// Defines exactly k entries of a set: all above `kth`, and the first `ties` that equal it.
template <class Key>
struct Cut {
    Key kth;
    size_t ties;
};

template <class Storage>
class Survivors {
  public:
    using Key = typename Bits<Storage>::Key;
    static constexpr Key mask = Bits<Storage>::magnitude;

    Key threshold = 1;
    Key largest = 0;   // magnitude so far, if the pass reports it
    size_t begin = 0;  // positions count from here
    size_t count = 0;

    const Key* keys() const { return keys_.data(); }
    Sink<Key> tail() { return {keys_.data() + count, positions_.data() + count}; }

    void restart(size_t at, Key lowest) {
        begin = at;
        threshold = lowest;
        count = 0;
    }

    void reserve(size_t entries) {
        if (entries + kSlack <= keys_.capacity()) return;
        keys_.resize(entries + kSlack);
        positions_.resize(entries + kSlack);
    }

    // Makes room for a block; prunes first if there are more than twice k survivors.
    void make_room(size_t k) {
        if (count + kBlock + kSlack <= keys_.capacity()) return;
        if (count >= 2 * k + kBlock) {
            prune(k);
        } else {
            reserve(std::max(2 * count, count + kBlock));
        }
    }

    // Keeps the k largest, k < count. From now on only larger entries survive, because ties go to
    // the lowest index.
    void prune(size_t k) {
        Cut<Key> cut = find_cut(k);
        count = pick(cut, count, [&](size_t from, size_t to) {
            keys_[to] = keys_[from];
            positions_[to] = positions_[from];
        });
        threshold = cut.kth + 1;
    }

    // Picks the k largest, or all if there are at most k.
    Cut<Key> find_cut(size_t k) {
        if (count > kWorthThinning && k < count / 8) thin_out(k);
        return cut_of(keys(), count, k, spare_);
    }

    // The same if no survivor is less than `floor` and many may equal it.
    Cut<Key> find_cut_above(Key floor, size_t k) {
        if (count <= k) return {0, 0};
        size_t above = 0;
        for (size_t i = 0; i < count; ++i) above += (keys_[i] & mask) > floor;
        return above < k ? Cut<Key>{floor, k - above} : find_cut(k);
    }

    static Cut<Key> cut_of(const Key* keys, size_t count, size_t k, Buffer<Key>& spare) {
        if (count <= k) return {0, 0};
        const Key kth = kth_magnitude(keys, count, k, mask, spare);
        size_t above = 0;
        for (size_t i = 0; i < count; ++i) above += (keys[i] & mask) > kth;
        return {kth, k - above};
    }

    // Counts the entries that the cut picks, and subtracts the ties among them from the cut's.
    size_t count_picked(Cut<Key>& cut) const {
        if (cut.kth == 0) return count;
        size_t above = 0, ties = 0;
        for (size_t i = 0; i < count; ++i) above += (keys_[i] & mask) > cut.kth;
        for (size_t i = 0; i < count; ++i) ties += (keys_[i] & mask) == cut.kth;
        ties = std::min(ties, cut.ties);
        cut.ties -= ties;
        return above + ties;
    }

    // Writes the entries that the cut picks, in order and at most `room`. Returns how many.
    template <class Index>
    size_t write(Cut<Key> cut, Index* indices, Storage* values, size_t room) const {
        const auto move = [&](size_t from, size_t to) {
            indices[to] = Index(begin + positions_[from]);
            values[to] = Storage(keys_[from]);
        };
        if (cut.kth > 0) return pick(cut, room, move);
        for (size_t i = 0; i < count; ++i) move(i, i);
        return count;
    }

  private:
    // If far more than k survived, drops most of the excess: samples the survivors to estimate a
    // magnitude that slightly more than k reach.
    void thin_out(size_t k) {
        const auto sampled = [&](size_t i) { return keys_[i]; };
        const Key limit = detail::sampled_limit<Key>(sampled, count, k, mask);
        size_t reaching = 0;
        for (size_t i = 0; i < count; ++i) reaching += (keys_[i] & mask) >= limit;
        if (reaching < k || reaching > count / 2) return;
        size_t kept = 0;
        for (size_t i = 0; i < count; ++i) {
            keys_[kept] = keys_[i];
            positions_[kept] = positions_[i];
            kept += (keys_[i] & mask) >= limit;
        }
        count = kept;
    }

    // Calls move(from, to) for every entry; the next call overwrites `to` unless the cut picked the
    // entry. So no branch depends on the data. Returns how many were picked.
    template <class Move>
    size_t pick(Cut<Key>& cut, size_t room, const Move& move) const {
        size_t i = 0, picked = 0;
        for (const size_t end = past_last_tie(cut); i < end && picked < room; ++i) {
            move(i, picked);
            picked += (keys_[i] & mask) >= cut.kth;
        }
        for (; i < count && picked < room; ++i) {
            move(i, picked);
            picked += (keys_[i] & mask) > cut.kth;
        }
        return picked;
    }

    // The end of the range of entries in which ties are picked.
    size_t past_last_tie(Cut<Key>& cut) const {
        size_t i = 0;
        for (; i < count && cut.ties > 0; ++i) cut.ties -= (keys_[i] & mask) == cut.kth;
        return i;
    }

    Buffer<Key> keys_, spare_;
    Buffer<uint32_t> positions_;
};

}  // namespace sparcel
