"""Times of the kernels on a device, beside other selections and passes, for `measure.py`.

All methods take turns on the same vectors in each repetition, each after a write of 256 MiB, so
that no vector is in the card's cache. What a method does on the host counts where the GPU waits
for it. Every method's result is checked before and after it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import checks
from benchmarks.gpu.baselines import APPROXIMATE, EXACT, Select
from benchmarks.gpu.clock import Clock, Method, Row, parts, timed
from sparcel import formats
from sparcel.kernels import Addition, index_dtype
from sparcel.ops import SUM
from sparcel.selectors import MSTopK
from sparcel.stream import SparseStream

FORMATS = ("raw", "packed", "packed:4")
STREAMS = 8
"""How many streams are merged."""
SAMPLINGS = 30
RUN = 4096
"""Neighbours that share a scale in the clustered vectors."""
TORCH_TOPK = next(iter(EXACT))


def gaussian(size: int, place: torch.device, seed: int) -> Tensor:
    """Return normally distributed numbers."""
    generator = torch.Generator(place).manual_seed(seed)
    return torch.randn(size, generator=generator, device=place)


def clustered(size: int, place: torch.device, seed: int) -> Tensor:
    """Return numbers with heavy tails, whose neighbours have a scale in common."""
    scales = gaussian(-(-size // RUN), place, seed + 1).exp_()
    spread = scales.repeat_interleave(RUN, output_size=scales.numel() * RUN)[:size]
    return gaussian(size, place, seed) * gaussian(size, place, seed + 2).exp_() * spread


INPUTS = {"gaussian": gaussian, "clustered": clustered}


def overlapping(indices: Tensor, size: int) -> list[checks.Pair]:
    """Return streams that have about half of their indices in common; values are whole numbers."""
    streams = []
    for number in range(STREAMS):
        moved = (indices[1::2].long() + 7919 * number) % size
        own = torch.cat([indices[::2].long(), moved]).unique()
        values = (own * (2 * number + 1) % 17 - 8).float()
        streams.append((own.to(indices.dtype), values))
    return streams


def to_pinned(payload: Tensor) -> Tensor:
    """Return a copy of a message's payload in pinned memory, once it is there."""
    if payload.is_cpu:
        return payload.clone()
    pinned = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
    return pinned.copy_(payload, non_blocking=True)


class Cell:
    """The methods on one vector at one density.

    Parameters
    ----------
    kernels
        What has the kernels: `sparcel.kernels`, or on a host without CUDA `sparcel.kernels.gpu`,
        which Triton's interpreter runs.
    """

    def __init__(self, kernels: Any, x: Tensor, memory: Tensor, k: int) -> None:
        self.kernels, self.x, self.memory, self.k = kernels, x, memory, k
        self.scratch, self.y = torch.empty_like(x), torch.empty_like(x)
        # By torch, so that the other kernels are measured even where the selection fails.
        places = torch.topk(x.abs(), k, sorted=False).indices.sort().values
        self.indices = places.to(index_dtype(x.numel()))
        self.values = x.index_select(0, places)
        self.shared: dict[str, float] = {}
        """The share of the exact selection that other methods selected."""

    def methods(self) -> Iterator[Method]:
        """Yield all methods; what cannot be prepared fails when it is called."""
        groups = [self.passes, self.selections, self.accumulations, self.on_streams]
        for group in (*groups, *(partial(self.messages, name) for name in FORMATS)):
            try:
                yield from group()
            except Exception as error:
                yield Method("what follows", "stream", partial(_raise, error), lambda _: None, 0)

    def passes(self) -> Iterator[Method]:
        """Yield passes over memory, which are what the others are compared with."""
        x, y, memory = self.x, self.y, self.memory

        def copied(_: Any) -> None:
            checks.expect(torch.equal(y, x), "copy_ copies")

        def added(_: Any) -> None:
            checks.expect(torch.equal(y, memory + x), "add_ adds")

        def positive(magnitudes: Tensor) -> None:
            checks.expect(torch.equal(magnitudes, torch.maximum(x, -x)), "abs is |x|")

        yield Method("copy", "pass", lambda: y.copy_(x), copied, x.nbytes, y.zero_)
        add, prepare = partial(y.add_, x), partial(y.copy_, memory)
        yield Method("memory.add_(gradient)", "pass", add, added, 2 * x.nbytes, prepare)
        yield Method("x.abs()", "pass", x.abs, positive, x.nbytes)

    def selections(self) -> Iterator[Method]:
        """Yield all ways to select, exact ones first."""
        x, k = self.x, self.k
        exact = lambda found: checks.check_largest(x, k, *found)  # noqa: E731
        yield Method("topk", "select", partial(self.kernels.topk, x, k), exact, x.nbytes)
        in_any_order = lambda found: checks.check_in_any_order(x, k, *found)  # noqa: E731
        for name, select in EXACT.items():
            yield Method(name, "select", partial(select, x, k), in_any_order, x.nbytes)
        for name, select in {"mstopk": self.own_mstopk, **APPROXIMATE}.items():
            yield Method(
                name, "select", partial(select, x, k), partial(self.nearly, name), x.nbytes
            )

    @property
    def own_mstopk(self) -> Select:
        """The selector."""

        def select(x: Tensor, k: int) -> checks.Pair:
            found = MSTopK(SAMPLINGS).select(x, k)
            assert found.indices is not None, "selections are sparse"
            return found.indices, found.values

        return select

    def nearly(self, name: str, found: checks.Pair) -> None:
        """Check an approximate selection, and note how much of the exact one it has."""
        indices, values = found
        order = indices.argsort()
        checks.check_listed(self.x, indices[order], values[order])
        checks.expect(0 < values.numel() <= self.k, "at most k are selected")
        kth = self.values.abs().min()
        self.shared[name] = int((values.abs() >= kth).sum()) / self.k

    def accumulations(self) -> Iterator[Method]:
        """Yield the fused accumulate-select; in the second, it clears the gradient as well."""
        for name, gradient, clear in (
            ("accumulate_topk", self.x, False),
            ("accumulate_topk, clear", self.y, True),
        ):
            addition = Addition(self.memory, gradient, self.scratch, clear=clear)
            prepare = partial(self.prepare, addition)
            call = partial(self.kernels.accumulate_topk, addition, self.k)
            check = partial(self.accumulated, addition)
            yield Method(name, "accumulate", call, check, 2 * self.x.nbytes, prepare)

    def prepare(self, addition: Addition) -> None:
        """Make the gradient whole again, and the scratch wrong."""
        addition.scratch.fill_(torch.nan)
        if addition.clear:
            addition.gradient.copy_(self.x)

    def accumulated(self, addition: Addition, found: Any) -> None:
        checks.check_accumulated(self.memory + self.x, self.k, addition.scratch, found)
        if addition.clear:
            checks.expect(torch.count_nonzero(addition.gradient) == 0, "the gradient is cleared")

    def on_streams(self) -> Iterator[Method]:
        """Yield what is done with streams."""
        y, size, indices, values = self.y, self.x.numel(), self.indices, self.values
        write = partial(self.kernels.scatter, y, indices, values)
        written = lambda _: checks.check_scattered(y, indices, values)  # noqa: E731
        yield Method("scatter", "stream", write, written, indices.nbytes + values.nbytes, y.zero_)
        streams = overlapping(indices, size)
        nbytes = sum(own.nbytes + addends.nbytes for own, addends in streams)
        merged = lambda found: checks.check_merged(size, streams, *found)  # noqa: E731
        merge = partial(self.kernels.merge, streams, SUM)
        yield Method(f"merge of {STREAMS} streams", "stream", merge, merged, nbytes)

    def messages(self, name: str) -> Iterator[Method]:
        """Yield encoding in a format, decoding, and the way to the host."""
        format = formats.format_named(name)
        stream = SparseStream.unchecked(self.indices, self.values, self.x.numel())
        packet = format.encode(stream)
        message, payload = packet.message, packet.message[-1]
        nbytes = self.indices.nbytes + self.values.nbytes
        held = lambda found: checks.check_packet(stream, found, format)  # noqa: E731
        yield Method(f"encode {name}", "stream", partial(format.encode, stream), held, nbytes)
        same = lambda found: checks.check_same(found, packet.stream, f"{name} decodes")  # noqa: E731
        yield Method(
            f"decode {name}", "stream", partial(formats.decode, message), same, payload.nbytes
        )

        def arrived(pinned: Tensor) -> None:
            if payload.is_cuda:
                torch.cuda.synchronize()
            checks.expect(torch.equal(pinned, payload.cpu()), "the host has the message")

        yield Method(
            f"to the host, {name}", "stream", partial(to_pinned, payload), arrived, payload.nbytes
        )


def _raise(error: Exception) -> None:
    raise error


def compared(rows: list[Row]) -> None:
    """Add what tells more than a time: to passes and selections what they are beside others.

    ``of_copy`` is the bandwidth as a share of the copy's, which counts bytes read and written.
    """
    done = {row["method"]: row for row in rows if "ms" in row}
    copy, add, topk = (done.get(name) for name in ("copy", "memory.add_(gradient)", TORCH_TOPK))
    for row in done.values():
        if copy and row["kind"] != "stream":
            row["of_copy"] = row["gb_per_s"] / (2 * copy["gb_per_s"])
        if add and row["kind"] != "stream":
            row["of_add"] = row["ms"] / add["ms"]
        if topk and row["kind"] == "select":
            row["times_torch_topk"] = topk["ms"] / row["ms"]


def measure(
    kernels: Any, place: torch.device, name: str, size: int, density: float, **limits: Any
) -> list[Row]:
    """Return the rows of one input, size and density."""
    x, memory = INPUTS[name](size, place, 0), INPUTS[name](size, place, 10).mul_(0.1)
    k = round(density * size)
    about = {"input": name, "size": size, "density": density}
    cell = Cell(kernels, x, memory, k)
    rows = timed(list(cell.methods()), Clock(place), **limits)
    for row in rows:
        if row["method"] in cell.shared and "ms" in row:
            row["of_exact"] = cell.shared[row["method"]]
    compared(rows)
    return [about | row for row in rows]


def profiled(kernels: Any, place: torch.device, size: int, density: float) -> Row:
    """Return what the exact selection and the fused one consist of, on gaussian vectors."""
    cell = Cell(kernels, gaussian(size, place, 0), gaussian(size, place, 10), round(density * size))
    rows = {"size": size, "density": density}
    for method in [*cell.selections(), *cell.accumulations()]:
        if method.name in ("topk", "accumulate_topk"):
            method.check(method.call())
            rows[method.name] = parts(method.call, place)
    return rows


def fits(size: int, place: torch.device) -> bool:
    """Tell whether a card has room for the vectors of a cell and of its checks."""
    if place.type != "cuda":
        return True
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(place)
    return free > 9 * 4 * size
