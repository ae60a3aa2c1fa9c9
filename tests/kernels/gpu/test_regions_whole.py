"""Passes over regions of which everything travels: messages and vectors are the compiled ones'."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from sparcel import _cpu, device
from sparcel.formats import HEADER_BYTES, FewBits, Format
from sparcel.kernels import Addition, Phase, Regions
from sparcel.kernels.gpu import _whole as kernels
from sparcel.regions import phase
from tests.card import launches, moved, on_card, seen
from tests.kernels import paths
from tests.regions.made import DTYPES
from tests.strategies import same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few = settings(max_examples=25)
pytestmark = [
    pytest.mark.gpu,
    # NumPy computes in Triton's interpreter.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DIVISOR = 3.0
FINITE_AT, NON_FINITE = 7, 2
"""The place of the flags in a header, and the flag of what is not finite."""


@dataclass(frozen=True)
class Case:
    """A recipe for what some ranks exchange; Hypothesis prints it better than their vectors."""

    ranks: int
    size: int
    block: int = 64
    bits: int = 4
    group: int = 64
    kinds: tuple[str, ...] = ("normal",)
    dtype: torch.dtype = torch.float32
    out: torch.dtype = torch.float32
    scale: float = 1.0
    me: int = 0
    misaligned: bool = False

    @property
    def phase(self) -> Phase:
        """The phase in which everything travels, up or down."""
        regions = Regions(self.size, self.ranks, self.block)
        format = Format("packed", FewBits(self.bits, self.group))
        made = phase(regions, ((self.size, 1.0),), format, torch.float32)
        assert made.dense or not self.size
        return made

    def addition(self, rank: int, place: str = "cpu") -> Addition:
        """Return what a rank adds up; its kind is that of its place among the kinds."""
        kind = self.kinds[rank % len(self.kinds)]
        memory, gradient = (
            paths.Case(kind, self.size, dtype, 2 * rank + i, self.misaligned).vector().to(place)
            for i, dtype in enumerate((torch.float32, self.dtype))
        )
        return Addition(memory, gradient, torch.empty_like(memory), self.scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 5))
    block = draw(st.sampled_from([64, 64, 64, 256, 4096]))
    ends = [0, 1, 7, 8, block - 1, block, block + 1, 2 * block + 33, ranks * block + 1]
    size = draw(st.sampled_from(ends) | st.integers(0, 3 * block))
    return Case(
        ranks,
        size,
        block,
        draw(st.sampled_from([8, 4, 2])),
        draw(st.sampled_from([8, 16, 32, 64])),
        tuple(draw(st.lists(st.sampled_from(paths.KINDS), min_size=1, max_size=ranks))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([1.0, 0.3, 1024.0, -1.0])),
        draw(st.integers(0, ranks - 1)),
        draw(st.booleans()),
    )


def compiled_enter(it: Addition, up: Phase, rank: int) -> tuple[list[Tensor | None], int, float]:
    regions = up.regions
    found: tuple[list[Tensor | None], int, float] = _cpu.enter(
        it.memory, it.gradient, it.scratch, it.scale, rank, regions.ranks, regions.block,
        up.shares, up.most, True, up.bits, up.group, 0, up.headers, 1,
    )  # fmt: skip
    return found


def compiled_collect(
    x: Tensor, arrived: list[Tensor], phase: Phase, rank: int
) -> tuple[Tensor | None, float, int]:
    regions, header = phase.regions, phase.headers[rank]
    found: tuple[Tensor | None, float, int] = _cpu.collect(
        x, arrived, header, rank, regions.ranks, regions.block, phase.shares, phase.most[rank],
        True, phase.bits, phase.group, 0, header, 1,
    )  # fmt: skip
    return found


def compiled_deliver(returned: list[Tensor], down: Phase, out: Tensor) -> tuple[int, bool, int]:
    found: tuple[int, bool, int] = _cpu.deliver(
        returned, down.headers, down.regions.block, down.bits, down.group, DIVISOR, out, 1
    )
    return found


def rows_of(messages: list[Tensor | None], like: Phase) -> Tensor:
    """Return messages as a GPU has them: in rows, with garbage where there is nothing."""
    length = -(-max(like.bounds) // 16) * 16
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (len(messages), length), generator=generator, dtype=torch.uint8)
    for row, message in zip(rows, messages, strict=True):
        if message is not None:
            row[: message.numel()] = message
    return rows.to(DEVICE)


def is_finite(message: Tensor) -> bool:
    return not int(message[FINITE_AT]) & NON_FINITE


class Room:
    """Memory on the device for a vector, after whose end nothing may be written."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._whole = torch.full((size + 4096,), torch.nan, dtype=dtype, device=DEVICE)
        self.inside = self._whole[:size]

    def read(self) -> Tensor:
        """Return what was written inside."""
        assert bool(self._whole[self.inside.numel() :].isnan().all())
        return self.inside.cpu()


def alike(found: Tensor, expected: Tensor) -> bool:
    """Tell whether a message or a row of it has the bytes that are expected."""
    return same_bits(found.cpu()[: expected.numel()], expected)


def close(found: Tensor, expected: float, magnitude: float) -> bool:
    """Tell whether by how much a magnitude fell is right, up to rounding in float32.

    Sums of the largest numbers may overflow.
    """
    assert (found.shape, found.dtype) == ((), torch.float64)
    return not magnitude < 1e37 or abs(float(found) - expected) <= 1e-5 * magnitude


def check(case: Case) -> None:
    """Do an exchange with the compiled passes, and what one rank does of it on the device, too.

    Where something is not finite, all that counts is that all say so.
    """
    up = down = case.phase
    me, everyone = case.me, range(case.ranks)
    additions = [case.addition(rank) for rank in everyone]
    sent = [compiled_enter(it, up, rank) for rank, it in enumerate(additions)]
    x, y = additions[me].scratch, Room(case.size, torch.float32)
    mine = replace(case.addition(me, DEVICE), scratch=y.inside)
    sound = bool(x.isfinite().all())
    sums = (it.memory.double() + it.scale * it.gradient for it in additions)
    magnitude = sum(float(one.abs().sum()) for one in sums)

    messages, count, fell = kernels.enter(mine, up, me)
    assert (count.shape, count.dtype, int(count)) == ((), torch.int64, sent[me][1])
    for message, expected in zip(messages, sent[me][0], strict=True):
        if expected is not None:
            assert is_finite(message) == is_finite(expected)
            assert alike(message, expected) or not is_finite(expected)
    if sound:
        assert same_bits(y.read(), x)
        assert close(fell, sent[me][2], magnitude)

    arrived = [messages[me] for messages, *_ in sent]
    came, others = rows_of(arrived, up), [one for one in arrived if one is not None]
    halves = y.inside.copy_(x).clone()
    expected, expected_fell, wrong = compiled_collect(x, others, up, me)
    assert expected is not None
    assert wrong == -1
    message, fell, fault = kernels.collect(y.inside, came, up, down, me)
    added = kernels.add(halves, came, up, me)
    taken, then_fell = kernels.take_own(halves, down, me, added.finite)
    assert not fault
    assert not added.fault
    assert bool(added.finite) == all(map(is_finite, others))
    assert is_finite(message) == is_finite(taken) == is_finite(expected)
    if is_finite(expected):
        assert alike(message, expected)
        assert alike(taken, expected)
        assert same_bits(y.read(), x)
        assert same_bits(halves.cpu(), x)
        assert close(fell, expected_fell, magnitude)
        assert close(added.magnitude + then_fell, expected_fell, magnitude)

    returned = []
    for rank, it in enumerate(additions):
        others = [one for messages, *_ in sent if (one := messages[rank]) is not None]
        made = expected if rank == me else compiled_collect(it.scratch, others, down, rank)[0]
        assert made is not None
        returned.append(made)
    average, result = torch.empty(case.size, dtype=case.out), Room(case.size, case.out)
    entries, finite, wrong = compiled_deliver(returned, down, average)
    assert wrong == -1
    found = kernels.deliver(rows_of([*returned], down), down, DIVISOR, result.inside)
    assert [one.dtype for one in found] == [torch.int64, torch.bool, torch.bool]
    assert [int(one) for one in found] == [entries, finite, False]
    assert same_bits(result.read(), average) or not finite


@given(cases())
@example(Case(3, 4096 * 4 + 100, 4096, 8, 16, me=1, out=torch.bfloat16))
@example(Case(2, 1000, 256, 2, 8, kinds=("normal", "zeros"), me=1))
@example(Case(4, 200, kinds=("special", "normal"), me=3))
@example(Case(2, 200, kinds=("special", "zeros")))
@example(Case(2, 100, kinds=("extremes",), out=torch.float16))
@few
def test_exchanges_equal_those_of_the_compiled_passes(case: Case) -> None:
    check(case)


def test_headers_of_many_ranks() -> None:
    """Of most ranks the regions are empty, and their messages are headers."""
    check(Case(70, 200, kinds=(*["zeros"] * 69, "special"), me=2))


@pytest.mark.parametrize(
    ("up", "down"), [((4, 64), (8, 16)), ((2, 8), (4, 32)), ((8, 32), (2, 64))], ids=str
)
def test_what_returns_may_be_in_other_bits(up: tuple[int, int], down: tuple[int, int]) -> None:
    first, then = (Case(3, 500, bits=bits, group=group, me=1) for bits, group in (up, down))
    (_, x, _), (_, arrived, _) = exchange(first)
    came = rows_of(arrived, first.phase)
    y = x.to(DEVICE, copy=True)
    message, _, fault = kernels.collect(y, came, first.phase, then.phase, 1)
    assert not fault
    halfway = x.to(DEVICE, copy=True)
    kernels.add(halfway, came, first.phase, 1)
    x.copy_(halfway)
    expected = compiled_collect(x, [], then.phase, 1)[0]
    assert expected is not None
    assert alike(message, expected)
    assert same_bits(y.cpu(), x)


def exchange(case: Case) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Return what each rank has entered, and the messages that come to it."""
    additions = [case.addition(rank) for rank in range(case.ranks)]
    sent = [compiled_enter(it, case.phase, rank)[0] for rank, it in enumerate(additions)]
    return [it.scratch for it in additions], [list(came) for came in zip(*sent, strict=True)]


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255), st.sampled_from([0, 2]))
@example(FINITE_AT, NON_FINITE, 2)
@settings(max_examples=10)
def test_a_changed_header_is_a_fault(place: int, other: int, source: int) -> None:
    """Only the flag of what is not finite may be another."""
    case = Case(3, 150)
    fault = (place, other) != (FINITE_AT, NON_FINITE)
    up = down = case.phase
    (_, x, _), (_, arrived, _) = exchange(case)
    damaged = arrived[source]
    assert damaged is not None
    damaged[place] ^= other
    message, _, found = kernels.collect(x.to(DEVICE), rows_of(arrived, up), up, down, 1)
    assert bool(found) == fault
    assert not is_finite(message)

    returned = [compiled_collect(x.clone(), [], down, rank)[0] for rank in range(3)]
    damaged = returned[source]
    assert damaged is not None
    damaged[place] ^= other
    out = torch.empty(case.size, device=DEVICE)
    _, finite, found = kernels.deliver(rows_of(returned, down), down, DIVISOR, out)
    assert bool(found) == fault
    assert not finite


@given(st.sampled_from([8, 4, 2]), st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=12)
def test_any_codes_and_scales_are_read_as_the_compiled_passes_do(
    bits: int, size: int, seed: int
) -> None:
    case = Case(2, size, bits=bits, group=16)
    (x, _), (arrived, _) = exchange(case)
    message = arrived[1]
    assert message is not None
    payload = message[HEADER_BYTES:]
    generator = torch.Generator().manual_seed(seed)
    payload.random_(0, 256, generator=generator)
    y, phase = x.to(DEVICE, copy=True), case.phase
    made, _, fault = kernels.collect(y, rows_of(arrived, phase), phase, phase, 0)
    expected = compiled_collect(x, [message], phase, 0)[0]
    assert expected is not None
    assert not fault
    assert is_finite(made) == is_finite(expected)
    if is_finite(expected):
        assert alike(made, expected)
        assert same_bits(y.cpu(), x)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
def test_a_pass_takes_two_launches_and_waits_for_nothing() -> None:
    case = Case(3, 300, me=1)
    (_, x, _), (_, arrived, _) = exchange(case)
    up = case.phase
    it, before = case.addition(1), device.reads()
    with on_card():
        addition = Addition(*map(moved, (it.memory, it.gradient, it.scratch)))
        came, y, out = map(moved, (rows_of(arrived, up), x, x))
        with launches() as enter:
            messages, *_ = kernels.enter(addition, up, 1)
        with launches() as collect:
            kernels.collect(y, came, up, up, 1)
        with launches() as deliver:
            kernels.deliver(came, up, DIVISOR, out)
        for one in (enter, collect, deliver):
            assert (len(one.triton), one.torch, one.copies) == (2, [], [])
        assert same_bits(seen(addition.scratch), x)
        expected = compiled_enter(it, up, 1)[0][0]
        assert expected is not None
        assert alike(seen(messages)[0], expected)
    assert device.reads() == before
