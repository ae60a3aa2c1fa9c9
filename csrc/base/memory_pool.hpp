// A pool of large memory blocks: a freed block is kept for the next buffer.
//
// Fresh memory costs a fault for each page, about as much as merging a page of data. Every step
// allocates and frees messages, results and scratch of a few MB, so this pool keeps their blocks
// instead of returning them to the system.
#pragma once

#include <pthread.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <bit>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace sparcel {

class Blocks {
  public:
    static constexpr size_t kLeastBytes = size_t{16} << 10;  // malloc keeps smaller ones itself
    static constexpr size_t kMostBytes = size_t{256} << 20;  // of all waiting blocks
    static constexpr size_t kMostBlocks = 256;               // waiting blocks

    static Blocks& shared() { return *shared_; }

    // Returns `bytes` of memory, uninitialised and aligned for any scalar.
    void* take(size_t bytes) {
        Header* header = bytes < kLeastBytes ? nullptr : find(bytes);
        if (!header) header = allocate(bytes);
        mark_usable(header, bytes);
        return header + 1;
    }

    // Takes back memory that `take` returned; any thread may call it. If too much memory waits,
    // the blocks that have waited longest go back to malloc.
    void give_back(void* memory) noexcept {
        Header* header = static_cast<Header*>(memory) - 1;
        if (header->bytes < kLeastBytes || header->bytes > kMostBytes) return std::free(header);
        mark_usable(header, 0);
        const std::lock_guard lock(mutex_);
        waiting_.push_back(header);
        waiting_bytes_ += header->bytes;
        while (waiting_bytes_ > kMostBytes || waiting_.size() > kMostBlocks) {
            std::free(remove(0));
        }
    }

    // Gives all waiting blocks back to the system, and with them what malloc keeps.
    void drop() {
        {
            const std::lock_guard lock(mutex_);
            while (!waiting_.empty()) std::free(remove(waiting_.size() - 1));
        }
#ifdef __GLIBC__
        ::malloc_trim(0);
#endif
    }

    // The bytes of all waiting blocks.
    size_t waiting_bytes() {
        const std::lock_guard lock(mutex_);
        return waiting_bytes_;
    }

  private:
    // Precedes the memory that `take` returns, and keeps malloc's alignment.
    struct alignas(std::max_align_t) Header {
        size_t bytes;  // of that memory
    };

    Blocks() { waiting_.reserve(kMostBlocks + 1); }

    // A fork waits until no other thread is in the pool, so in the child the lock is free and the
    // list is consistent.
    static Blocks* make() {
        ::pthread_atfork([] { shared_->mutex_.lock(); }, [] { shared_->mutex_.unlock(); },
                         [] { shared_->mutex_.unlock(); });
        return new Blocks;
    }

    // Sizes are rounded up by at most an eighth, so that messages whose lengths differ a little
    // from step to step use the same block.
    static Header* allocate(size_t bytes) {
        if (bytes >= kLeastBytes) {
            const size_t step = std::bit_floor(bytes) / 8;
            bytes = (bytes + step - 1) / step * step;
        }
        auto* header = static_cast<Header*>(std::malloc(sizeof(Header) + bytes));
        if (!header) throw std::bad_alloc();
        header->bytes = bytes;
        return header;
    }

    // Among blocks of sufficient and at most twice the size, picks the one freed last, because it
    // may still be in the cache.
    Header* find(size_t bytes) {
        const std::lock_guard lock(mutex_);
        for (size_t i = waiting_.size(); i-- > 0;) {
            const size_t has = waiting_[i]->bytes;
            if (bytes <= has && has / 2 <= bytes) return remove(i);
        }
        return nullptr;
    }

    Header* remove(size_t i) {
        Header* header = waiting_[i];
        waiting_.erase(waiting_.begin() + std::ptrdiff_t(i));
        waiting_bytes_ -= header->bytes;
        return header;
    }

    // Tells the address sanitizer, if enabled, that only the first `bytes` may be touched.
    static void mark_usable([[maybe_unused]] Header* header, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
        ASAN_POISON_MEMORY_REGION(header + 1, header->bytes);
        ASAN_UNPOISON_MEMORY_REGION(header + 1, bytes);
#endif
    }

    static Blocks* const shared_;  // never destroyed: tensors may be freed at exit

    std::mutex mutex_;
    std::vector<Header*> waiting_;  // the newest last
    size_t waiting_bytes_ = 0;
};

inline Blocks* const Blocks::shared_ = Blocks::make();

}  // namespace sparcel
