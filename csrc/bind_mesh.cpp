#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "mesh.hpp"

namespace sparcel {
namespace {

using Messages = std::vector<std::pair<size_t, std::vector<Bytes>>>;
using Bounds = std::vector<std::pair<size_t, uint64_t>>;

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
    std::vector<Received> received;
    const Outcome outcome = [&] {
        nb::gil_scoped_release release;
        return mesh.exchange(sends, receives, seconds, call, received, [] {
            nb::gil_scoped_acquire acquire;
            if (PyErr_CheckSignals()) throw nb::python_error();
        });
    }();
    nb::list arrived;
    if (!outcome.fault) {
        for (Received& message : received) {
            arrived.append(give(std::move(message.bytes), message.size, dtype_of<uint8_t>()));
        }
    }
    return nb::make_tuple(arrived, int(outcome.fault), outcome.peer, outcome.length);
}

}  // namespace

void bind_mesh(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Mesh>(module, "Mesh")
        .def(nb::init<const std::vector<int>&>(), "sockets"_a)
        .def("exchange", exchange, "sends"_a, "receives"_a, "seconds"_a, "call"_a)
        .def("shut", &Mesh::shut)
        .def("broken", &Mesh::broken);
}

}  // namespace sparcel
