"""What calls take of a device and of the host, for `measure`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

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
