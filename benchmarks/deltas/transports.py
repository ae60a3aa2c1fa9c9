"""How new weights get from a trainer to its servers, for `fleet.py`."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.server import serving
from sparcel.products import delta

DELTA, DENSE = "delta.broadcast", "all bf16"


@dataclass(frozen=True)
class Model:
    """Weights, side by side in one vector."""

    flat: Tensor
    tensors: dict[str, Tensor]

    def copy(self) -> Model:
        return _arranged(self.flat.clone(), self.tensors)


def models(files: Sequence[Path]) -> list[Model]:
    """Return the trainer's versions; of a server, the first one only."""
    return [_model(file) for file in (files if dist.get_rank() == 0 else files[:1])]


def _model(file: Path) -> Model:
    tensors = load_file(file)
    return _arranged(torch.cat([tensor.flatten() for tensor in tensors.values()]), tensors)


def _arranged(flat: Tensor, like: dict[str, Tensor]) -> Model:
    parts = flat.split([tensor.numel() for tensor in like.values()])
    views = {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}
    return Model(flat, views)


class Transport(ABC):
    """Brings a version to all servers, after the one that they have.

    Attributes
    ----------
    label
        What tables call it.
    served
        A server's weights.
    pause
        Seconds and processor seconds of the last step in which a server's weights were written.
    prepared
        When the trainer began to send the last version.
    payload
        Bytes of the last message.
    """

    label: str

    def __init__(self, versions: Sequence[Model], folder: Path) -> None:
        self._versions, self._at = versions, 0
        self.trains = dist.get_rank() == 0
        self.served = versions[0].copy()
        self.pause, self.prepared, self.payload = (0.0, 0.0), 0.0, 0

    def step(self, number: int) -> None:
        """Go on to a version; all call."""
        if self.trains:
            self._send(self._versions[number], self._versions[self._at])
        else:
            self._receive()
        self._at = number

    def close(self) -> None:  # noqa: B027
        """End what it has begun, if anything."""

    @abstractmethod
    def _send(self, now: Model, old: Model) -> None: ...

    @abstractmethod
    def _receive(self) -> None: ...

    @contextmanager
    def _writing(self) -> Iterator[None]:
        start, busy = perf_counter(), process_time()
        yield
        self.pause = perf_counter() - start, process_time() - busy

    def _ready(self, payload: int) -> None:
        self.prepared, self.payload = perf_counter(), payload


class Chunks(Transport):
    """Chunks, by sparcel's wires."""

    label = DELTA

    def _send(self, now: Model, old: Model) -> None:
        chunks = list(delta.encode(now.tensors, old.tensors))
        self._ready(sum(map(len, chunks)))
        delta.broadcast(chunks)

    def _receive(self) -> None:
        chunks = delta.broadcast(None)
        prepared = delta.prepare(self.served.tensors, chunks)
        with self._writing():
            prepared.apply()


class Listed(Transport):
    """Places as int32 and new values as bfloat16, by Gloo's broadcast."""

    label = "int32 + bf16"

    def _send(self, now: Model, old: Model) -> None:
        first, second = old.flat.view(torch.int16), now.flat.view(torch.int16)
        places = (first != second).nonzero().squeeze(1)
        values, told = second.index_select(0, places), places.int()
        self._ready(told.nbytes + values.nbytes)
        dist.broadcast(torch.tensor([len(told)]), 0)
        dist.broadcast(told, 0)
        dist.broadcast(values.view(torch.uint8), 0)

    def _receive(self) -> None:
        count = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(count, 0)
        places = torch.empty(int(count), dtype=torch.int32)
        values = torch.empty(int(count), dtype=torch.int16)
        dist.broadcast(places, 0)
        dist.broadcast(values.view(torch.uint8), 0)
        with self._writing():
            self.served.flat.view(torch.int16).index_copy_(0, places.long(), values)


class Dense(Transport):
    """All weights, by one broadcast of Gloo's, into the weights that are served."""

    label = DENSE

    def _send(self, now: Model, old: Model) -> None:
        self._ready(now.flat.nbytes)
        dist.broadcast(now.flat.view(torch.uint8), 0)

    def _receive(self) -> None:
        with self._writing():
            dist.broadcast(self.served.flat.view(torch.uint8), 0)


class Served(Transport):
    """A store in a folder that the trainer serves by HTTP; a broadcast tells of a version."""

    label = "Publisher, HTTP, Subscriber"

    def __init__(self, versions: Sequence[Model], folder: Path) -> None:
        super().__init__(versions, folder)
        self._end: Callable[[], object] = lambda: None
        port = torch.zeros(1, dtype=torch.int64)
        if self.trains:
            self._place = tempfile.TemporaryDirectory(dir=folder)
            self._publisher = delta.Publisher(delta.Folder(self._place.name))
            self._publisher.publish(versions[0].tensors)
            server = serving(self._place.name, host=os.environ["MASTER_ADDR"])
            self._end = server.shutdown
            port[0] = server.server_port
        dist.broadcast(port, 0)
        if not self.trains:
            store = delta.store_at(f"http://{os.environ['MASTER_ADDR']}:{int(port)}")
            self._subscriber = delta.Subscriber(store, self.served.tensors)
            self._subscriber.update()
        dist.barrier()

    def close(self) -> None:
        """End the server, and remove its files."""
        self._end()
        if self.trains:
            self._place.cleanup()

    def _send(self, now: Model, old: Model) -> None:
        self._publisher.publish(now.tensors)
        entries = delta.read_index(delta.Folder(self._place.name)).entries
        self._ready(entries[-1].bytes)
        dist.broadcast(torch.zeros(1), 0)

    def _receive(self) -> None:
        dist.broadcast(torch.zeros(1), 0)
        ready = self._subscriber.prepare()
        assert ready is not None, "there is a version to go on to"
        with self._writing():
            ready.apply()


TRANSPORTS = (Chunks, Served, Listed, Dense)
