// How ranks divide a vector among themselves: each rank has a region of it.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sparcel {

constexpr size_t kMostPiece = 1024;  // coordinates that are in the first-level cache at a time

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

    // Cuts the region's blocks from `from` to `to` into pieces, and calls run(begin, n, place) with
    // each: n coordinates from `begin` on, which are the region's from `place` on.
    template <class Run>
    void each_piece(size_t rank, size_t from, size_t to, const Run& run) const {
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

// The coordinates of a region, or of all others, in order.
class Domain {
  public:
    Domain(const Regions& regions, size_t rank, bool others)
        : regions_(regions), rank_(rank), others_(others) {}

    size_t before(size_t end) const {
        const size_t owned = regions_.before(rank_, end);
        return others_ ? end - owned : owned;
    }
    size_t coordinate(size_t place) const {
        const size_t number = place / regions_.block, others = regions_.ranks - 1;
        const size_t skipped =  // blocks before it that are not of this domain
            others_ ? (number + others - rank_) / others : number * others + rank_;
        return place + skipped * regions_.block;
    }

  private:
    const Regions& regions_;
    size_t rank_;
    bool others_;
};

}  // namespace sparcel
