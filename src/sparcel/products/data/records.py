"""Samples: where they are read, as bytes, and in append-only files of records.

The bytes of a sample are a pickle, followed by the contents of the sample's arrays and tensors.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from sparcel.errors import InputError, warn

VERSION = 2
"""Of records and of the file that they are in."""


class Source:
    """Reads samples of a map-style dataset, and compares them with those read before.

    Raises
    ------
    InputError
        When the dataset is not map-style, or its length is unknown.
    """

    def __init__(self, dataset: Dataset[Any], threads: int) -> None:
        kind = type(dataset).__name__
        wanted = "dataset must be map-style, with len(dataset) and dataset[i]"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise InputError(f"{wanted}; {kind} has no samples by number")
        try:
            self.length = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError) as error:
            raise InputError(f"{wanted}; {kind} has no length: {error}") from error
        self._dataset, self._threads = dataset, threads
        self._said_random = False

    def identity(self, version: str) -> str:
        """Return what a copy of the samples is of."""
        kind = type(self._dataset).__qualname__
        about = {"dataset": kind, "length": self.length, "version": version, "format": VERSION}
        parts = _parts(self._dataset)
        if len(parts) > 1 or parts[0][2] is not None:
            text = json.dumps(parts, default=_for_json, skipkeys=True)
            about["parts"] = blake2b(text.encode(), digest_size=8).hexdigest()
        return json.dumps(about)

    def read(self, places: Sequence[int]) -> Sequence[Any]:
        """Return the samples of some places."""
        if self._threads > 1 and len(places) > 1:
            with ThreadPoolExecutor(min(self._threads, len(places))) as pool:
                return [*pool.map(self._dataset.__getitem__, places)]
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return [self._dataset[place] for place in places]
        found = list(together(places))
        if len(found) != len(places):
            raise InputError(
                f"dataset.__getitems__ must give a sample for each of {len(places)} indices, got"
                f" {len(found)}"
            )
        return found

    def still_has(self, place: int, record: bytes) -> bool:
        """Tell whether a sample is the one of a record; warn if it changes at each access.

        The record may be longer than what `pack` returned, as its own lengths tell.
        """
        sample = pack(place, self._dataset[place])
        if record.startswith(sample):
            return True
        is_random = sample != pack(place, self._dataset[place])
        if is_random and not self._said_random:
            self._said_random = True
            warn(
                f"dataset[{place}] is another sample at each access, and Cached keeps the first"
                " one; do what is random in transform="
            )
        return is_random


def _parts(dataset: Dataset[Any]) -> list[tuple[Any, ...]]:
    """Describe a dataset and those inside it, each once: class, length, indices, what is inside.

    These tell apart what has the same class and length, such as the folds of one dataset, which
    have indices as a `Subset` does.
    """
    parts, found, numbers = [], [dataset], {id(dataset): 0}
    for one in found:  # grows meanwhile
        inside = []
        for other in _inside(one):
            inside.append(numbers.setdefault(id(other), len(found)))
            if inside[-1] == len(found):
                found.append(other)
        indices = getattr(one, "__dict__", {}).get("indices")
        parts.append((type(one).__qualname__, _length(one), indices, inside))
    return parts


def _inside(dataset: Dataset[Any]) -> Iterator[Dataset[Any]]:
    """Iterate over the datasets that are attributes, or in a list or dict that is one."""
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        several = value.values() if isinstance(value, dict) else value
        for one in several if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(one, Dataset):
                yield one


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a part need not have one, nor be open
        return None


def _for_json(value: Any) -> Any:
    """Return what JSON holds for an array, a tensor or a number of theirs, or a range."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Set):
        return sorted(map(repr, value))  # in one order in all processes
    return list(value) if isinstance(value, Collection) else type(value).__qualname__


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


UNIT = 64
"""Offsets and lengths of records are multiples of this."""
_LENGTH_BITS = 24
LARGEST = UNIT * ((1 << _LENGTH_BITS) - 1)
"""The most bytes of a record: a little less than 1 GiB."""


class Records(ABC):
    """An append-only file of records, and the index that tells where each sample's is.

    The file begins with an index of one word a sample, its entry, which is 0 without a record.
    Records follow in the order in which they came. An entry is written after its record, as a
    whole, so a process that is killed leaves no broken entry behind. Places of records are never
    used again, so an entry that is the same before and after its record was read has the right one.
    The file is closed when this object goes.

    Parameters
    ----------
    descriptor
        Of the open file.
    first
        Where records begin.
    """

    def __init__(self, descriptor: int, first: int) -> None:
        self.descriptor, self.first = descriptor, up_to(UNIT, first)
        finalize(self, os.close, descriptor)

    @abstractmethod
    def entry(self, place: int) -> int:
        """Return the entry of a sample."""

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return max(self.first, up_to(UNIT, os.fstat(self.descriptor).st_size))

    def read(self, place: int) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the record of a sample, or what a torn file has left of it, or None."""
        if not (entry := self.entry(place)):
            return None
        offset, length = range_of(entry)
        record = np.empty(length, np.uint8)
        count = os.preadv(self.descriptor, [record.data], offset)
        return record[:count] if self.entry(place) == entry else None

    def reserve(self, length: int) -> int:
        """Return where so many bytes may be written; whoever calls this holds a lock."""
        offset = self.end
        os.truncate(self.descriptor, offset + up_to(UNIT, length))
        return offset

    def write(self, content: bytes, offset: int) -> None:
        """Write all of the content, which one call of the system may not do."""
        left = memoryview(content)
        while left:
            count = os.pwrite(self.descriptor, left, offset)
            left, offset = left[count:], offset + count


class ProcessLock:
    """Excludes other processes and threads; the system frees the lock of a killed process.

    While it holds the lock, the process must not close another descriptor of the same file: that
    would free the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads, self._pid = Lock(), os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():  # a thread of the parent may have held it in the fork
            self._threads, self._pid = Lock(), os.getpid()
        self._threads.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()


def entry_of(offset: int, length: int) -> int:
    """Return the entry of a record that begins there and has so many bytes."""
    return (offset // UNIT) << _LENGTH_BITS | up_to(UNIT, length) // UNIT


def range_of(entry: int) -> tuple[int, int]:
    """Return the offset and the length of an entry's record."""
    return (entry >> _LENGTH_BITS) * UNIT, (entry & (1 << _LENGTH_BITS) - 1) * UNIT


def up_to(multiple: int, nbytes: int) -> int:
    """Round up to a multiple."""
    return nbytes + -nbytes % multiple
