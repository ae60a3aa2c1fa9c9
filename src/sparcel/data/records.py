"""Samples as bytes: a pickle, followed by the contents of the sample's arrays and tensors."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import torch
from torch import Tensor

from sparcel.errors import InputError

_ALIGNMENT = 64
"""Arrays begin at multiples of this, so that they can be used where they are."""


def pack(place: int, sample: object) -> bytes:
    """Return a sample as bytes.

    A record consists of the number of its parts and their lengths, and of the parts: the pickle
    first, then the contents of arrays and tensors, as pickle's protocol 5 gives them out of band.

    Raises
    ------
    InputError
        When the sample cannot be pickled; ``place`` tells which one it is.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(sample)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    except Exception as error:  # whatever a __reduce__ raises
        raise InputError(
            f"sample {place}, of type {type(sample).__name__}, cannot be pickled ({error}); return"
            " plain data, such as bytes, numbers, arrays, tensors, and tuples or dicts of them"
        ) from error
    lengths = [part.nbytes for part in parts]
    pieces: list[Any] = [struct.pack(f"<{1 + len(parts)}Q", len(parts), *lengths)]
    end = len(pieces[0])
    for part, length in zip(parts, lengths, strict=True):
        padding = -end % _ALIGNMENT
        pieces += [bytes(padding), part]
        end += padding + length
    return b"".join(pieces)


def unpack(record: Any) -> Any:
    """Return the sample of a record, whose arrays and tensors use the record's own memory.

    The record is a buffer. It must be writable, and nobody else's, and may be longer than what
    `pack` returned.
    """
    content = memoryview(record)
    (count,) = struct.unpack_from("<Q", content)
    parts, start = [], 8 * (count + 1)
    for length in struct.unpack_from(f"<{count}Q", content, 8):
        start += -start % _ALIGNMENT
        parts.append(content[start : start + length])
        start += length
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    """Gives the contents of tensors out of band, as pickle does with numpy's arrays.

    By itself torch pickles a tensor by writing a file of its own into the pickle. That has the
    whole storage, also of a small view, and its address, so it is another one in each process.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage):
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            content = torch.empty(0, dtype=torch.uint8).set_(obj).numpy().data
            return _storage, (pickle.PickleBuffer(content),)
        if not isinstance(obj, Tensor) or not _is_strided(obj):
            return NotImplemented
        if type(obj) is Tensor and not (obj.requires_grad or obj.is_quantized or obj.__dict__):
            plain = obj.resolve_conj().resolve_neg().contiguous().reshape(-1)
            content = plain.view(torch.uint8).numpy().data
            return _tensor, (pickle.PickleBuffer(content), obj.dtype, tuple(obj.shape))
        if obj.untyped_storage().nbytes() <= obj.nbytes:
            return NotImplemented
        return _reduced(obj)


def _is_strided(tensor: Tensor) -> bool:
    """Tell whether a tensor is one piece of this process's memory."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not hasattr(tensor, "__tensor_flatten__")  # it consists of other tensors
    )


def _reduced(view: Tensor) -> Any:
    """Return how torch pickles a copy of a view that is more than its elements."""
    copy = view.detach().clone()
    has_slots = any(vars(one).get("__slots__") for one in type(view).__mro__)
    if type(copy) is not type(view) or has_slots:  # torch pickles a parameter's plain tensor
        return NotImplemented
    copy.__dict__.update(view.__dict__)
    return copy.requires_grad_(view.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(content).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _storage(content: Any) -> torch.UntypedStorage:
    return _tensor(content, torch.uint8, (memoryview(content).nbytes,)).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
