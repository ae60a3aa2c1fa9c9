#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "base/bindings.hpp"
#include "mesh/mesh.hpp"

namespace sparcel {
namespace {

using Messages = std::vector<std::pair<size_t, std::vector<Bytes>>>;
using Bounds = std::vector<std::pair<size_t, uint64_t>>;

// Runs an exchange without the GIL, but for checks whether a signal's handler raises.
Outcome run(Mesh& mesh, const std::vector<Sending>& sends, const std::vector<Receiving>& receives,
            double seconds, uint64_t call, std::span<Received> received) {
    nb::gil_scoped_release release;
    return mesh.exchange(sends, receives, seconds, call, received, [] {
        nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals()) throw nb::python_error();
    });
}

// Returns the messages, the fault (0 for none), its peer, and the length of a too long message.
nb::tuple exchange(Mesh& mesh, const Messages& messages, const Bounds& bounds, double seconds,
                   uint64_t call) {
    std::vector<Sending> sends;
    for (const auto& [peer, parts] : messages) {
        require(peer < mesh.size(), "no such peer");
        sends.push_back({peer, {}});
        for (const Bytes& part : parts) sends.back().parts.push_back({part.data(), part.size()});
    }
    std::vector<Receiving> receives;
    for (const auto& [peer, at_most] : bounds) {
        require(peer < mesh.size(), "no such peer");
        receives.push_back({peer, at_most});
    }
    std::vector<Received> received(receives.size());
    const Outcome outcome = run(mesh, sends, receives, seconds, call, received);
    nb::list arrived;
    if (!outcome.fault) {
        for (Received& message : received) {
            arrived.append(
                give<nb::numpy>(std::move(message.bytes), message.size, dtype_of<uint8_t>()));
        }
    }
    return nb::make_tuple(arrived, int(outcome.fault), outcome.peer, outcome.length);
}

// Tells whether a message of so many bytes has a part of each size.
bool fits(size_t bytes, const std::vector<size_t>& sizes) {
    for (size_t size : sizes) {
        if (size > bytes) return false;
        bytes -= size;
    }
    return bytes == 0;
}

// Sends each peer its part of a message, and writes what the peers sent into `out`, one after
// another. Parts without bytes are not sent. This rank's own part is copied. Returns as `exchange`;
// a part that is too short is a fault as well.
nb::tuple all_to_all(Mesh& mesh, size_t rank, const Bytes& message,
                     const std::vector<size_t>& leaving, const InOut& out,
                     const std::vector<size_t>& arriving, double seconds, uint64_t call) {
    require(rank < mesh.size() && leaving.size() == mesh.size() && arriving.size() == mesh.size() &&
                leaving[rank] == arriving[rank] && out.dtype() == dtype_of<uint8_t>() &&
                fits(message.size(), leaving) && fits(out.size(), arriving),
            "the messages must be as long as the ranks' parts");
    std::vector<Sending> sends;
    std::vector<Receiving> receives;
    std::vector<Received> received;
    const uint8_t* from = message.data();
    uint8_t* to = data<uint8_t>(out);
    for (size_t peer = 0; peer < mesh.size(); from += leaving[peer], to += arriving[peer], ++peer) {
        if (peer == rank) {
            if (leaving[peer]) std::memcpy(to, from, leaving[peer]);
            continue;
        }
        if (leaving[peer]) sends.push_back({peer, {{from, leaving[peer]}}});
        if (!arriving[peer]) continue;
        receives.push_back({peer, arriving[peer]});
        received.push_back({{}, 0, to});
    }
    // Each rank begins with the next one, so that not all send to one rank at a time.
    std::ranges::rotate(sends, std::ranges::find_if(sends, [&](auto& s) { return s.peer > rank; }));
    Outcome outcome = run(mesh, sends, receives, seconds, call, received);
    for (size_t i = 0; i < receives.size() && !outcome.fault; ++i) {
        if (received[i].size != receives[i].at_most) {
            outcome = {Outcome::too_long, receives[i].peer, received[i].size};
        }
    }
    return nb::make_tuple(int(outcome.fault), outcome.peer, outcome.length);
}

}  // namespace

void bind_mesh(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Mesh>(module, "Mesh")
        .def(nb::init<const std::vector<int>&>(), "sockets"_a)
        .def("exchange", exchange, "sends"_a, "receives"_a, "seconds"_a, "call"_a)
        .def("all_to_all", all_to_all, "rank"_a, "message"_a, "leaving"_a, "out"_a, "arriving"_a,
             "seconds"_a, "call"_a)
        .def("shut", &Mesh::shut)
        .def("broken", &Mesh::broken);
}

}  // namespace sparcel
