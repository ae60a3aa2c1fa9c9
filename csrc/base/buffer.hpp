// Growable memory that is not initialised; a kernel must write it before anyone reads it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/memory_pool.hpp"

namespace sparcel {

struct GiveBack {
    void operator()(void* data) const noexcept { Blocks::shared().give_back(data); }
};

template <class T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        Buffer(std::move(other)).swap(*this);
        return *this;
    }
    explicit Buffer(size_t capacity)
        : data_(static_cast<T*>(Blocks::shared().take(capacity * sizeof(T)))),
          capacity_(capacity) {}

    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    T& operator[](size_t i) { return data_.get()[i]; }
    const T& operator[](size_t i) const { return data_.get()[i]; }
    size_t capacity() const { return capacity_; }

    // Moves the contents, or as much as fits, to memory of another capacity.
    void resize(size_t capacity) {
        Buffer moved(capacity);
        const size_t kept = std::min(capacity, capacity_);
        if (kept) std::memcpy(moved.data(), data(), kept * sizeof(T));
        swap(moved);
    }

    void swap(Buffer& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
    }

    // Gives the memory to the caller, who must free it with `GiveBack`.
    T* release() { return data_.release(); }

  private:
    std::unique_ptr<T, GiveBack> data_;
    size_t capacity_ = 0;
};

}  // namespace sparcel
