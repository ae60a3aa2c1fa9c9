// Which sockets are ready, by epoll.
#pragma once

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <system_error>

namespace sparcel {

// Reports which sockets became readable, or writable if that is asked. Sockets stay registered,
// edge-triggered: exchanges need not register the sockets they wait for, and unread bytes
// report their socket only once.
class Readiness {
  public:
    Readiness() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
        if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll");
    }
    Readiness(const Readiness&) = delete;
    Readiness& operator=(const Readiness&) = delete;
    ~Readiness() { ::close(epoll_); }

    void add(int socket, size_t rank) {
        ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
        control(EPOLL_CTL_ADD, socket, rank, 0);
    }

    void ask_writable(int socket, size_t rank, bool asked) {
        control(EPOLL_CTL_MOD, socket, rank, asked ? uint32_t{EPOLLOUT} : 0);
    }

    // Waits at most `ms`, calls visit(rank, events) for each socket whose state changed, and
    // returns whether there was any.
    template <class Visit>
    bool wait(int ms, const Visit& visit) {
        epoll_event events[64];
        const int count = ::epoll_wait(epoll_, events, std::size(events), ms);
        for (int i = 0; i < count; ++i) visit(events[i].data.u64, events[i].events);
        return count > 0;
    }

  private:
    void control(int operation, int socket, size_t rank, uint32_t more) {
        epoll_event event{EPOLLIN | EPOLLRDHUP | EPOLLET | more, {.u64 = rank}};
        if (::epoll_ctl(epoll_, operation, socket, &event) != 0) {
            throw std::system_error(errno, std::generic_category(), "epoll");
        }
    }

    int epoll_;
};

}  // namespace sparcel
