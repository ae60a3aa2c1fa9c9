#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "base/bindings.hpp"
#include "base/operations.hpp"
#include "streams/merge.hpp"
#include "streams/message.hpp"

namespace sparcel {
namespace {

// Returns a message: the header, then the bytes of each part, padded with zeros.
Output join_message(nb::bytes header, const std::vector<Input>& parts) {
    require(header.size() == sizeof(Header), "a header has 40 bytes");
    Header fields;
    std::memcpy(&fields, header.c_str(), sizeof fields);
    uint64_t length = sizeof fields;
    for (const Input& part : parts) length += padded(part.nbytes());
    require(fields.length == length, "the parts must take up the message");
    Buffer<uint8_t> message(length);
    std::memcpy(message.data(), &fields, sizeof fields);
    {
        nb::gil_scoped_release release;
        uint8_t* place = message.data() + sizeof fields;
        for (const Input& part : parts) {
            const size_t bytes = part.nbytes(), slot = padded(bytes);
            if (bytes) std::memcpy(place, part.data(), bytes);
            std::memset(place + bytes, 0, slot - bytes);
            place += slot;
        }
    }
    return give(std::move(message), length, dtype_of<uint8_t>());
}

// The parts of a message: its header and its payload, or one that holds both.
using Message = std::vector<Bytes>;

// Returns what `read_sparse` does, for a message in one or two parts.
template <class Value>
std::optional<StreamView<int32_t, Value>> read_message(const Message& message, uint64_t size,
                                                       uint8_t dtype, bool& finite) {
    if (message.empty() || message.size() > 2 || message[0].size() < sizeof(Header)) return {};
    const Bytes &control = message.front(), &last = message.back();
    const size_t before = message.size() == 1 ? sizeof(Header) : 0;
    return read_sparse<Value>(control.data(), last.data() + before, last.size() - before, size,
                              dtype, finite);
}

// Reduces the streams in messages. Returns the indices, the values and whether all are finite, or
// None if a message is not a plain sparse one of that size and dtype. `dtype` is its code in
// message headers.
nb::object merge_messages(const std::vector<Message>& messages, uint64_t size, uint8_t dtype,
                          std::string_view op, int threads) {
    const auto run = [&]<class Value>(Type<Value>) -> nb::object {
        std::vector<StreamView<int32_t, Value>> views;
        bool finite = true;
        for (const Message& message : messages) {
            const auto view = read_message<Value>(message, size, dtype, finite);
            if (!view) return nb::none();
            views.push_back(*view);
        }
        auto merged = with_operation(op, [&]<class Op>(Type<Op>) {
            nb::gil_scoped_release release;
            return merge<Op, int32_t, Value>(views, 1, threads);
        });
        return nb::make_tuple(give(std::move(merged.indices), merged.count, dtype_of<int32_t>()),
                              give(std::move(merged.values), merged.count, dtype_of<Value>()),
                              finite);
    };
    switch (dtype) {
        case 0:
            return run(Type<Half>());
        case 1:
            return run(Type<Brain>());
        case 2:
            return run(Type<float>());
        case 3:
            return run(Type<double>());
        case 4:
            return run(Type<int32_t>());
        case 5:
            return run(Type<int64_t>());
        default:
            return nb::none();
    }
}

}  // namespace

void bind_message(nb::module_& module) {
    using namespace nb::literals;
    module.def("join_message", join_message, "header"_a, "parts"_a);
    module.def("merge_messages", merge_messages, "messages"_a, "size"_a, "dtype"_a, "op"_a,
               "threads"_a);
}

}  // namespace sparcel
