// Messages of any size over one connection to each peer, all outstanding at once.
//
// A message is a frame followed by its bytes. The frame is the message's length and the call that
// sent it, 8 bytes each in the machine's byte order. A message of another call than the receiver's
// is refused. Sockets never block. epoll reports the sockets that became ready; the others are not
// touched. Bytes that arrive after the expected message wait in the peer's stage for the next
// exchange.
#pragma once

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/buffer.hpp"
#include "mesh/readiness.hpp"

namespace sparcel {

struct Frame {
    uint64_t length;
    uint64_t call;
};
static_assert(sizeof(Frame) == 16);

struct Part {
    const uint8_t* data;
    size_t size;
};

struct Sending {
    size_t peer;
    std::vector<Part> parts;
};

struct Receiving {
    size_t peer;
    uint64_t at_most;
};

// A message, in memory of its own unless `into` is given, which holds as much as its bound.
struct Received {
    Buffer<uint8_t> bytes;
    size_t size = 0;
    uint8_t* into = nullptr;

    void take(size_t length) {
        size = length;
        if (into) return;
        bytes = Buffer<uint8_t>(length);
        into = bytes.data();
    }
};

// The result of an exchange: success, or the fault and the peer.
struct Outcome {
    enum Fault { none = 0, lost = 1, late = 2, too_long = 3, other_call = 4 };
    Fault fault = none;
    size_t peer = 0;
    uint64_t length = 0;  // of the message that was too long
};

class Mesh {
  public:
    using Clock = std::chrono::steady_clock;

    // Takes ownership of connected sockets, one for each rank; -1 for this rank itself.
    explicit Mesh(const std::vector<int>& sockets) {
        for (int socket : sockets) peers_.emplace_back(socket);
        for (size_t rank = 0; rank < peers_.size(); ++rank) {
            if (sockets[rank] >= 0) ready_.add(sockets[rank], rank);
        }
    }
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;
    ~Mesh() {
        for (Peer& peer : peers_) {
            if (peer.socket >= 0) ::close(peer.socket);
        }
    }

    size_t size() const { return peers_.size(); }

    // Ends all connections; running exchanges fail. Any thread may call it.
    void shut() {
        for (Peer& peer : peers_) {
            if (peer.socket >= 0) ::shutdown(peer.socket, SHUT_RDWR);
        }
    }

    // Returns the peers whose connections have ended. Any thread may call it.
    std::vector<size_t> broken() {
        std::vector<pollfd> states;  // poll passes over negative descriptors
        for (const Peer& peer : peers_) states.push_back({peer.socket, POLLRDHUP, 0});
        std::vector<size_t> ended;
        if (::poll(states.data(), states.size(), 0) <= 0) return ended;
        for (size_t peer = 0; peer < states.size(); ++peer) {
            if (states[peer].revents & (POLLRDHUP | POLLHUP | POLLERR)) ended.push_back(peer);
        }
        return ended;
    }

    // Sends and receives, as a part of `call`. The messages are put into `received`, which has one
    // for each of `receives`. While the exchange waits, it calls `interrupted`, which throws to end
    // it. It cannot be resumed.
    template <class Interrupted>
    Outcome exchange(const std::vector<Sending>& sends, const std::vector<Receiving>& receives,
                     double seconds, uint64_t call, std::span<Received> received,
                     const Interrupted& interrupted) {
        std::vector<Departure> departures;
        for (const Sending& sending : sends) departures.emplace_back(sending, call);
        std::vector<Arrival> arrivals;
        for (size_t i = 0; i < receives.size(); ++i) {
            arrivals.push_back({receives[i].peer, receives[i].at_most, call, &received[i]});
        }
        const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                 std::chrono::duration<double>(seconds));
        while (true) {
            Outcome outcome;
            std::erase_if(departures, [&](Departure& d) {
                return !outcome.fault && peers_[d.peer].writable && send(d, outcome);
            });
            std::erase_if(arrivals, [&](Arrival& a) {
                return !outcome.fault && peers_[a.peer].may_receive() && receive(a, outcome);
            });
            if (outcome.fault || (departures.empty() && arrivals.empty())) return outcome;
            while (!wait() && Clock::now() < deadline) interrupted();
            if (Clock::now() >= deadline) {
                return {Outcome::late, arrivals.empty() ? departures[0].peer : arrivals[0].peer};
            }
        }
    }

  private:
    static constexpr size_t kStageBytes = 16 << 10;
    static constexpr int kSliceMs = 100;  // between checks for signals and the deadline

    struct Peer {
        explicit Peer(int socket_) : socket(socket_) {}

        // The next message's frame may have arrived together with the message before.
        bool may_receive() const { return readable || end - begin >= sizeof(Frame); }

        int socket;
        // True until a call finds that the socket has no more bytes, or takes no more.
        bool readable = true, writable = true;
        bool stalled = false;  // the socket did not take all of the current message at once
        // Bytes [begin, end) of the stage arrived after the last message.
        Buffer<uint8_t> stage{kStageBytes};
        size_t begin = 0, end = 0;
    };

    struct Departure {
        Departure(const Sending& sending, uint64_t call) : peer(sending.peer), frame{0, call} {
            for (const Part& part : sending.parts) frame.length += part.size;
            left.push_back({});  // for the frame; set when sending, because this object may move
            for (const Part& part : sending.parts) {
                if (part.size) left.push_back({const_cast<uint8_t*>(part.data), part.size});
            }
        }
        size_t peer;
        Frame frame;
        size_t frame_sent = 0;
        size_t next = 1;  // the first of `left` that is not sent yet
        std::vector<iovec> left;
    };

    struct Arrival {
        size_t peer;
        uint64_t at_most;
        uint64_t call;
        Received* message;
        bool begun = false;
        size_t filled = 0;
    };

    // Sends as much as possible now. Returns whether all is sent, or the connection failed.
    bool send(Departure& d, Outcome& outcome) {
        Peer& peer = peers_[d.peer];
        while (d.frame_sent < sizeof d.frame || d.next < d.left.size()) {
            msghdr message{};
            size_t first = d.next;
            if (d.frame_sent < sizeof d.frame) {
                first = d.next - 1;
                d.left[first] = {reinterpret_cast<uint8_t*>(&d.frame) + d.frame_sent,
                                 sizeof d.frame - d.frame_sent};
            }
            message.msg_iov = &d.left[first];
            message.msg_iovlen = std::min<size_t>(d.left.size() - first, 64);
            const ssize_t sent = ::sendmsg(peer.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0) {
                if (errno == EINTR) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) {
                    peer.writable = false;
                    if (!peer.stalled) ready_.ask_writable(peer.socket, d.peer, true);
                    peer.stalled = true;
                    return false;
                }
                outcome = {Outcome::lost, d.peer};
                return true;
            }
            size_t gone = size_t(sent);
            const size_t of_frame = std::min(gone, sizeof d.frame - d.frame_sent);
            d.frame_sent += of_frame;
            gone -= of_frame;
            for (; gone; ++d.next) {
                iovec& part = d.left[d.next];
                if (gone < part.iov_len) {
                    part = {static_cast<uint8_t*>(part.iov_base) + gone, part.iov_len - gone};
                    break;
                }
                gone -= part.iov_len;
            }
        }
        if (peer.stalled) ready_.ask_writable(peer.socket, d.peer, false);
        peer.stalled = false;
        return true;
    }

    // Receives available bytes. Returns whether the message is complete, or the exchange failed.
    bool receive(Arrival& a, Outcome& outcome) {
        Peer& peer = peers_[a.peer];
        while (!a.begun) {
            if (begin(a, peer, outcome)) {
                if (outcome.fault) return true;
                break;
            }
            const ssize_t came =
                ::recv(peer.socket, &peer.stage[peer.end], kStageBytes - peer.end, MSG_DONTWAIT);
            if (!count(came, peer.end, a.peer, outcome)) return outcome.fault;
        }
        while (a.filled < a.message->size) {
            const ssize_t came = ::recv(peer.socket, a.message->into + a.filled,
                                        a.message->size - a.filled, MSG_DONTWAIT);
            if (!count(came, a.filled, a.peer, outcome)) return outcome.fault;
        }
        return true;
    }

    // Takes the frame, and bytes of the message, from the stage. Returns whether the frame is
    // there.
    bool begin(Arrival& a, Peer& peer, Outcome& outcome) {
        Frame frame;
        if (peer.end - peer.begin < sizeof frame) {
            std::memmove(&peer.stage[0], &peer.stage[peer.begin], peer.end - peer.begin);
            peer.end -= peer.begin;
            peer.begin = 0;
            return false;
        }
        std::memcpy(&frame, &peer.stage[peer.begin], sizeof frame);
        if (frame.call != a.call || frame.length > a.at_most) {
            const auto fault = frame.call != a.call ? Outcome::other_call : Outcome::too_long;
            outcome = {fault, a.peer, frame.length};
            return true;
        }
        peer.begin += sizeof frame;
        a.message->take(frame.length);
        a.filled = std::min<size_t>(frame.length, peer.end - peer.begin);
        std::memcpy(a.message->into, &peer.stage[peer.begin], a.filled);
        peer.begin += a.filled;
        if (peer.begin == peer.end) peer.begin = peer.end = 0;
        a.begun = true;
        return true;
    }

    // Adds the result of recv(). Returns false if no bytes came, with a fault if none ever will.
    bool count(ssize_t came, size_t& total, size_t peer, Outcome& outcome) {
        if (came > 0) {
            total += size_t(came);
            return true;
        }
        if (came < 0 && errno == EINTR) return true;
        if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            peers_[peer].readable = false;
        } else {
            outcome = {Outcome::lost, peer};
        }
        return false;
    }

    // Sleeps until the state of a connection changes. Returns false if none did for a while.
    bool wait() {
        return ready_.wait(kSliceMs, [&](size_t rank, uint32_t events) {
            const bool ended = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
            peers_[rank].readable |= ended || events & EPOLLIN;
            peers_[rank].writable |= ended || events & EPOLLOUT;
        });
    }

    std::vector<Peer> peers_;
    Readiness ready_;
};

}  // namespace sparcel
