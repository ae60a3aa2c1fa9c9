"""The three passes of an exchange by regions on a device, beside what else reads a vector.

One process does what the ranks would do. All have the same memory and gradient, so a message of
one is a message of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.record import Row
from sparcel.core import device, kernels
from sparcel.core.formats import HEADER_BYTES, format_named, message_length
from sparcel.core.kernels import Addition, Regions
from sparcel.core.regions import leg

_AHEAD = 5_000_000
"""Cycles for which a GPU is kept busy before a call, so that the host is ahead: about 3 ms."""
_CACHE = 1 << 28
"""Bytes that are written before a call, so that no vector is in the GPU's cache."""

Call = Callable[[], object]


class Work(NamedTuple):
    """What a call gives a device to do; on a trial's stand-in its time is unknown."""

    launches: int
    device_ms: float | None


def work_of(call: Call, place: torch.device) -> Work:
    """Return what a call gives a device to do: kernels, and copies from and to the host."""
    if place.type != "cuda":
        from tests.card import launches

        with launches(everywhere=True) as done:
            call()
        return Work(done.kernels() + len(done.copies), None)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [one for one in profile.key_averages() if one.self_device_time_total]
    total = sum(one.self_device_time_total for one in events)
    return Work(sum(one.count for one in events), total / 1e3)


def cost_of(call: Call, place: torch.device, repeats: int) -> dict[str, Any]:
    """Return a call's launches, and the medians of its milliseconds on the device and the host.

    The device's are from the call's first kernel to its last, by events; None without a card. The
    host's are those until the call returns. A call that waits for the device has both in either.
    """
    call()  # compiles, and makes what is made once
    on_card = place.type == "cuda"
    return {
        "launches": work_of(call, place).launches,
        "device_ms": median(_device_ms(call, place) for _ in range(repeats)) if on_card else None,
        "host_ms": median(_host_ms(call, place) for _ in range(repeats)),
    }


def _host_ms(call: Call, place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize()
    begun = perf_counter()
    call()
    return 1e3 * (perf_counter() - begun)


def _device_ms(call: Call, place: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(_CACHE, dtype=torch.uint8, device=place).zero_()
    torch.cuda._sleep(_AHEAD)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def captured(call: Call) -> Call:
    """Return what replays a call that was captured in a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


RANKS = 8
Share = tuple[float, str]
"""How much of the coordinates travels, and in which format."""
EXCHANGES: dict[str, tuple[Share, Share]] = {
    "5 bits": ((1.0, "packed:5"), (1.0, "packed:5")),
    "4 bits": ((1.0, "packed:4"), (1.0, "packed:4")),
    "8 bits": ((1.0, "packed:8"), (1.0, "packed:8")),
    "10 % and 30 %": ((0.1, "packed:4"), (0.3, "packed:4")),
}
"""What travels up, and down."""
SELECTED = 0.01
_PERIOD = 1 << 24
"""Numbers that are drawn; longer vectors repeat them."""


class WrongResultError(AssertionError):
    """A result is not what it should be; the message names the check."""


def expect(holds: bool, what: str) -> None:
    """Raise `WrongResultError` unless something holds."""
    if not holds:
        raise WrongResultError(what)


def vector(size: int, place: torch.device, seed: int) -> Tensor:
    """Return numbers with heavy tails, as gradients have them."""
    draws = torch.randn(min(size, _PERIOD), generator=torch.Generator().manual_seed(seed)) ** 3
    return device.put(draws, place, torch.float32).repeat(-(-size // _PERIOD))[:size].contiguous()


@dataclass
class Exchange:
    """The passes of rank 0, and what the others would have sent it."""

    addition: Addition
    out: Tensor
    up: kernels.Leg
    down: kernels.Leg

    def __post_init__(self) -> None:
        to_others = kernels.enter(self.addition, self.up, 0, 0).messages
        to_first, *_ = kernels.enter(self.addition, self.up, 1, 0).messages
        join = torch.stack if isinstance(to_others, Tensor) else list
        self.arrived = join([to_first] * RANKS)
        returned = []
        for owner, message in enumerate([to_first, *to_others[1:]]):
            kernels.enter(self.addition, self.up, owner, 0)
            returned.append(self._collect(join([message] * RANKS), owner).message)
        self.returned = join(returned)

    @classmethod
    def of(cls, memory: Tensor, gradient: Tensor, name: str) -> Exchange:
        """Return one of the exchanges of a vector."""
        size = memory.numel()
        regions = Regions.of(size, RANKS)
        legs = (
            leg(regions, ((size, density),), format_named(format), torch.float32)
            for density, format in EXCHANGES[name]
        )
        scratch, out = torch.empty_like(memory), torch.empty_like(memory)
        return cls(Addition(memory, gradient, scratch), out, *legs)

    def enter(self) -> Any:
        """Do the first pass; return what it does."""
        return kernels.enter(self.addition, self.up, 0, 0)

    def collect(self) -> Any:
        """Do the second."""
        return self._collect(self.arrived, 0)

    def deliver(self) -> Any:
        """Do the third."""
        return kernels.deliver(self.out, self.returned, self.down, float(RANKS))

    def all(self) -> tuple[Any, Any]:
        """Do all three; return what the first two do."""
        done = self.enter(), self.collect()
        self.deliver()
        return done

    def _collect(self, arrived: Any, owner: int) -> Any:
        return kernels.collect(self.addition, arrived, self.up, self.down, owner, 0)

    def results(self) -> dict[str, list[Tensor]]:
        """Return what the passes leave, on the host, messages without what follows them."""
        entered, collected = self.all()
        return {
            "messages up": [_cut(message) for message in entered.messages[1:]],
            "the message down": [_cut(collected.message)],
            "what is kept": [device.read(self.addition.scratch)],
            "the update": [device.read(self.out)],
        }


def _cut(message: Tensor) -> Tensor:
    near = device.read(message)
    return near[: message_length(near[:HEADER_BYTES])]


def check(memory: Tensor, gradient: Tensor, name: str) -> None:
    """Check that the passes have the bits of the CPU's."""
    found = Exchange.of(memory, gradient, name).results()
    expected = Exchange.of(device.read(memory), device.read(gradient), name).results()
    for what, parts in found.items():
        same = all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for one, other in zip(parts, expected[what], strict=True)
        )
        expect(same, f"{what} of {name} have the bits of the CPU's")


def calls(memory: Tensor, gradient: Tensor, name: str) -> dict[str, Call]:
    """Return the passes, one by one and all together."""
    exchange = Exchange.of(memory, gradient, name)
    return {one: getattr(exchange, one) for one in ("enter", "collect", "deliver", "all")}


def others(memory: Tensor, gradient: Tensor) -> dict[str, Call]:
    """Return what the passes are compared with."""
    sum, k = torch.empty_like(memory), round(SELECTED * memory.numel())
    return {
        "copy": partial(sum.copy_, gradient),
        "add_": partial(sum.add_, gradient),
        "torch.topk 1 %": lambda: gradient.abs().topk(k, sorted=False),
        "accumulate_topk 1 %": partial(kernels.accumulate_topk, Addition(memory, gradient, sum), k),
    }


def measure(size: int, place: torch.device, repeats: int, checked: bool) -> Iterator[Row]:
    """Yield a row for each call on vectors of a size, or why it was not measured.

    Raises
    ------
    WrongResultError
        If results are ``checked`` and not those of the CPU.
    """
    memory, gradient = vector(size, place, 0), vector(size, place, 1)
    groups = {"": partial(others, memory, gradient)}
    for name in EXCHANGES:
        if checked:
            check(memory, gradient, name)
        groups[f", {name}"] = partial(calls, memory, gradient, name)
    for name, make in groups.items():
        about: Row = {"size": size, "call": f"what follows{name}"}
        try:
            for call, do in make().items():
                about = {"size": size, "call": f"{call}{name}"}
                yield about | cost_of(do, place, repeats)
            if name and place.type == "cuda":
                about = {"size": size, "call": f"all in a graph{name}"}
                yield about | cost_of(captured(do), place, repeats)
        except Exception as error:
            yield about | {"note": f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]}
