// Growable memory that is never initialised: what a kernel writes before anyone reads it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

namespace sparcel {

struct Free {
    void operator()(void* data) const { std::free(data); }
};

template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        Buffer(std::move(other)).swap(*this);
        return *this;
    }
    explicit Buffer(size_t capacity) { resize(capacity); }

    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    T& operator[](size_t i) { return data_.get()[i]; }
    const T& operator[](size_t i) const { return data_.get()[i]; }
    size_t capacity() const { return capacity_; }

    // Keeps the contents; a smaller capacity gives memory back.
    void resize(size_t capacity) {
        void* moved = std::realloc(data_.get(), capacity ? capacity * sizeof(T) : 1);
        if (!moved) throw std::bad_alloc();
        (void)data_.release();
        data_.reset(static_cast<T*>(moved));
        capacity_ = capacity;
    }

    void swap(Buffer& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
    }

    T* release() { return data_.release(); }

  private:
    std::unique_ptr<T, Free> data_;
    size_t capacity_ = 0;
};

}  // namespace sparcel
