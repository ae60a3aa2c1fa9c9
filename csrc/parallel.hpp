// Threads for one call. They are made and joined within it, so a fork in between finds none; for
// the sizes that use several, making them costs next to nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace sparcel {

// Entries that are worth a thread of their own.
constexpr size_t kEntriesPerThread = size_t{1} << 18;

inline size_t useful_threads(size_t entries, int threads) {
    return std::clamp<size_t>(entries / kEntriesPerThread, 1, size_t(std::max(threads, 1)));
}

// Calls run(0) … run(count - 1), each on a thread of its own; the first error is thrown here.
template <class Run>
void parallel(size_t count, const Run& run) {
    std::vector<std::exception_ptr> errors(count);
    const auto guarded = [&](size_t task) {
        try {
            run(task);
        } catch (...) {
            errors[task] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(count);
    for (size_t task = 1; task < count; ++task) {
        try {
            others.emplace_back(guarded, task);
        } catch (const std::system_error&) {
            guarded(task);  // no thread to be had: this one does the work
        }
    }
    guarded(0);
    for (std::thread& other : others) other.join();
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

// The bounds of part `part` when `count` things are split as evenly as they go.
inline size_t split_point(size_t count, size_t part, size_t parts) {
    return count / parts * part + std::min(part, count % parts);
}

}  // namespace sparcel
