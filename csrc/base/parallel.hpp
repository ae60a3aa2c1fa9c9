// A pool of threads that all calls of the process share.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace sparcel {

// The calling thread takes tasks too, and does all of them if no other thread is free or can be
// started. So callers never wait for one another.
class ThreadPool {
  public:
    static ThreadPool& shared() { return *shared_; }

    // Calls run(0) … run(count - 1) on up to `count` threads, and throws the first error.
    template <class Run>
    void run(size_t count, const Run& run) {
        const auto call = [](const void* tasks, size_t task) {
            (*static_cast<const Run*>(tasks))(task);
        };
        Batch batch{count, call, &run};
        std::unique_lock lock(mutex_);
        start_threads(count - 1);
        waiting_.push_back(&batch);
        has_work_ = true;
        for (size_t other = 1; other < count; ++other) wake_.notify_one();
        while (batch.next < count) perform(batch, lock);
        spin(lock, [&] { return batch.done == count; });
        batch.finished.wait(lock, [&] { return batch.done == count; });
        if (batch.error) std::rethrow_exception(batch.error);
    }

  private:
    // A fork copies no threads, but may copy a lock that one of them held. So the child gets a new
    // pool, which starts threads when needed.
    static ThreadPool* make() {
        ::pthread_atfork(nullptr, nullptr, [] { shared_ = new ThreadPool; });
        return new ThreadPool;
    }

    struct Batch {
        const size_t count;
        void (*const call)(const void* tasks, size_t task);
        const void* const tasks;
        size_t next = 0;  // the first task that no thread has taken
        std::atomic<size_t> done = 0;
        std::exception_ptr error = {};
        std::condition_variable finished = {};
    };

    // Starts threads up to the most that a call has asked for. They end with the process.
    void start_threads(size_t wanted) {
        try {
            for (; threads_ < wanted; ++threads_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {
            // The system has no more threads; the running ones do the work.
        }
    }

    [[noreturn]] void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            spin(lock, [&] { return has_work_.load(); });
            wake_.wait(lock, [&] { return !waiting_.empty(); });
            perform(*waiting_.front(), lock);
        }
    }

    // Looks for a while whether something is ready, with the lock released. To sleep and be woken
    // takes tens of microseconds, longer than the pause between two kernels of a step.
    template <class Ready>
    static void spin(std::unique_lock<std::mutex>& lock, const Ready& ready) {
        constexpr std::chrono::microseconds kMost{50};
        if (ready()) return;
        lock.unlock();
        const auto end = std::chrono::steady_clock::now() + kMost;
        while (!ready() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        lock.lock();
    }

    // Runs the next task of a batch, with the lock released.
    void perform(Batch& batch, std::unique_lock<std::mutex>& lock) {
        const size_t task = batch.next++;
        if (batch.next == batch.count) {
            std::erase(waiting_, &batch);
            has_work_ = !waiting_.empty();
        }
        lock.unlock();
        std::exception_ptr error;
        try {
            batch.call(batch.tasks, task);
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        if (!batch.error) batch.error = error;
        if (++batch.done == batch.count) batch.finished.notify_one();
    }

    static ThreadPool* shared_;  // never destroyed: its threads use it until the process ends

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Batch*> waiting_;  // with tasks that no thread has taken
    std::atomic<bool> has_work_ = false;
    size_t threads_ = 0;
};

inline ThreadPool* ThreadPool::shared_ = ThreadPool::make();

// Calls run(0) … run(count - 1) on the shared threads, or on this thread if there is only one.
template <class Run>
void parallel(size_t count, const Run& run) {
    count == 1 ? run(0) : ThreadPool::shared().run(count, run);
}

// The fewest entries for which another thread pays.
constexpr size_t kEntriesPerThread = size_t{1} << 18;

inline size_t useful_threads(size_t entries, int threads) {
    return std::clamp<size_t>(entries / kEntriesPerThread, 1, size_t(std::max(threads, 1)));
}

// The bounds of part `part` if `count` things are split as evenly as possible.
inline size_t split_point(size_t count, size_t part, size_t parts) {
    return count / parts * part + std::min(part, count % parts);
}

}  // namespace sparcel
