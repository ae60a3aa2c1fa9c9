"""Times calls that take turns on a device, and checks their results, for `kernels.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks import WrongResultError
from sparcel import device

Row = dict[str, Any]


@dataclass
class Method:
    """A call to time.

    Attributes
    ----------
    kind
        ``"pass"``, ``"select"``, ``"accumulate"`` or ``"stream"``.
    check
        Raises `WrongResultError` for a wrong result.
    nbytes
        Bytes that have to be read.
    before
        Prepares a call, outside of its time.
    """

    name: str
    kind: str
    call: Callable[[], Any]
    check: Callable[[Any], None]
    nbytes: int
    before: Callable[[], object] = lambda: None


@dataclass
class Clock:
    """Times calls by CUDA events, or where there is no CUDA by the host's clock."""

    device: torch.device
    written: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = 1 << 26 if self.device.type == "cuda" else 0
        self.written = torch.empty(size, dtype=torch.int32, device=self.device)

    def ms(self, method: Method) -> float:
        """Return the milliseconds of one call."""
        method.before()
        self.written.zero_()
        if self.device.type != "cuda":
            begun = time.perf_counter()
            method.call()
            return 1e3 * (time.perf_counter() - begun)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        method.call()
        end.record()
        end.synchronize()
        device.settle()  # or the checks of decoded messages would add to a later method's read
        return start.elapsed_time(end)


def first_line(error: Exception) -> str:
    """Return an error in a line, without paths of this machine."""
    lines = [line for line in str(error).splitlines() if line and "/" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


class Timing:
    """One method's row, and the times behind it."""

    def __init__(self, method: Method) -> None:
        self.method, self.times, self.checked, self.note = method, list[float](), 0, ""

    def attempt(self, run: Callable[[], object]) -> None:
        """Run a part of the measurement; an error, but for a wrong result, ends this method's."""
        if self.note:
            return
        try:
            run()
        except WrongResultError as error:
            raise WrongResultError(f"{self.method.name}: {error}") from error
        except torch.OutOfMemoryError:
            self.note = "does not fit in memory"
        except Exception as error:
            self.note = f"failed: {first_line(error)}"

    def check(self) -> None:
        """Call the method, and check its result."""
        self.method.before()
        self.method.check(self.method.call())
        device.settle()
        self.checked += 1

    def wants_more(self, ms: float) -> bool:
        """Tell whether to time another call, if a method is to have so many milliseconds."""
        least = 1 if self.times and self.times[0] > 1000 else 3
        return len(self.times) < least or sum(self.times) < ms

    def row(self) -> Row:
        about = {"method": self.method.name, "kind": self.method.kind}
        if self.note:
            return about | {"note": self.note}
        ms = median(self.times)
        return about | {
            "ms": ms,
            "min_ms": min(self.times),
            "max_ms": max(self.times),
            "repeats": len(self.times),
            "checked": self.checked,
            "gb_per_s": self.method.nbytes / ms / 1e6,
        }


def timed(methods: list[Method], clock: Clock, repeats: int, seconds: float) -> list[Row]:
    """Time methods that take turns.

    One that has had its seconds stops after three repeats, or after one that took a second.
    """
    timings = [Timing(method) for method in methods]
    for timing in timings:
        timing.attempt(timing.check)  # this warms up and compiles
    for _ in range(repeats):
        for timing in timings:
            if timing.wants_more(1e3 * seconds):
                timing.attempt(partial(_append, timing, clock))
    for timing in timings:
        timing.attempt(timing.check)
    return [timing.row() for timing in timings]


def _append(timing: Timing, clock: Clock) -> None:
    timing.times.append(clock.ms(timing.method))


def parts(call: Callable[[], object], place: torch.device) -> Row:
    """Return the kernels of a call, with their device's microseconds and launches by the profiler.

    The difference to the call's time is what the host takes.
    """
    activity = torch.profiler.ProfilerActivity
    on_gpu = place.type == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    return {
        event.key[:60]: {
            "us": event.self_device_time_total if on_gpu else event.self_cpu_time_total,
            "launches": event.count,
        }
        for event in profile.key_averages()
        if not on_gpu or event.self_device_time_total
    }
