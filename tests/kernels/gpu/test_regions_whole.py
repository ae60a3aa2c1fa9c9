"""Passes over regions of which everything travels: messages and vectors are the compiled ones'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from sparcel.core import device, kernels
from sparcel.core.formats import HEADER_BYTES, FewBits, Format
from sparcel.core.kernels import Addition, Entered, Leg, Regions, gpu
from sparcel.core.regions import leg
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

DIVISOR, ANSWER = 3.0, FewBits(6, 32)
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
    answer: FewBits = ANSWER

    @property
    def up(self) -> Leg:
        """The leg in which everything travels up."""
        # An empty vector would not travel whole; its messages tell, and the passes do not ask.
        return replace(self.selecting(1.0), dense=True)

    @property
    def down(self) -> Leg:
        """The leg in which everything comes back."""
        return replace(self.answering(1.0), dense=True)

    def selecting(self, density: float) -> Leg:
        """Return the leg in which a share travels up."""
        return self._leg(density, FewBits(self.bits, self.group))

    def answering(self, density: float) -> Leg:
        """Return the leg in which a share comes back."""
        return self._leg(density, self.answer)

    def _leg(self, density: float, values: FewBits) -> Leg:
        regions = Regions(self.size, self.ranks, self.block)
        return leg(regions, ((self.size, density),), Format("packed", values), torch.float32)

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
        draw(st.integers(2, 8)),
        draw(st.sampled_from([8, 16, 32, 64])),
        tuple(draw(st.lists(st.sampled_from(paths.KINDS), min_size=1, max_size=ranks))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([1.0, 0.3, 1024.0, -1.0])),
        draw(st.integers(0, ranks - 1)),
        draw(st.booleans()),
        FewBits(draw(st.integers(2, 8)), draw(st.sampled_from([8, 16, 32, 64]))),
    )


def rows_of(messages: Sequence[Tensor], like: Leg) -> Tensor:
    """Return messages as a GPU has them: in rows, with garbage where there is nothing."""
    length = -(-max(like.bounds) // 16) * 16
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (len(messages), length), generator=generator, dtype=torch.uint8)
    for row, message in zip(rows, messages, strict=True):
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


def magnitude_of(additions: Sequence[Addition]) -> float:
    """Return the sum of the magnitudes of all that ranks add up."""
    sums = (it.memory.double() + it.scale * it.gradient for it in additions)
    return sum(float(one.abs().sum()) for one in sums)


def close(found: float | Tensor, expected: float | Tensor, magnitude: float) -> bool:
    """Tell whether by how much a magnitude fell is right, up to rounding in float32.

    Sums of the largest numbers may overflow.
    """
    assert isinstance(found, Tensor)
    assert (found.shape, found.dtype) == ((), torch.float64)
    return not magnitude < 1e37 or abs(float(found) - expected) <= 1e-5 * magnitude


def exchange(case: Case, up: Leg | None = None) -> tuple[list[Addition], list[Entered]]:
    """Let each rank enter what it has, by compiled passes; all travels ``up`` unless told."""
    additions = [case.addition(rank) for rank in range(case.ranks)]
    entered = [kernels.enter(it, up or case.up, rank, 0) for rank, it in enumerate(additions)]
    return additions, entered


def arrived(entered: Sequence[Entered], rank: int) -> list[Tensor]:
    """Return what came to a rank."""
    return [one.messages[rank] for one in entered]


def check(case: Case) -> None:
    """Do an exchange with the compiled passes, and what one rank does of it on the device, too.

    Where something is not finite, all that counts is that all say so.
    """
    up, down, me = case.up, case.down, case.me
    additions, entered = exchange(case)
    x, y = additions[me].scratch, Room(case.size, torch.float32)
    mine = replace(case.addition(me, DEVICE), scratch=y.inside)
    magnitude = magnitude_of(additions)

    found = gpu.enter(mine, up, me, 0)
    assert isinstance(found.sent, Tensor)
    assert (found.sent.shape, found.sent.dtype) == ((), torch.int64)
    assert int(found.sent) == entered[me].sent
    for owner, expected in enumerate(entered[me].messages):
        if owner != me:
            assert is_finite(found.messages[owner]) == is_finite(expected)
            assert alike(found.messages[owner], expected) or not is_finite(expected)
    if x.isfinite().all():
        assert same_bits(y.read(), x)
        assert close(found.magnitude, entered[me].magnitude, magnitude)

    y.inside.copy_(x)
    came = arrived(entered, me)
    returned = [
        kernels.collect(it, arrived(entered, rank), up, down, rank, 0)
        for rank, it in enumerate(additions)
    ]
    expected, rows = returned[me], rows_of(came, up)
    collected = gpu.collect(mine, rows, up, down, me, 0)
    assert not collected.fault
    assert is_finite(collected.message) == is_finite(expected.message)
    if is_finite(expected.message):
        assert alike(collected.message, expected.message)
        assert same_bits(y.read(), x)
        assert close(collected.magnitude, expected.magnitude, magnitude)

    average, out = torch.empty(case.size, dtype=case.out), Room(case.size, case.out)
    messages = [one.message for one in returned]
    told = kernels.deliver(average, messages, down, DIVISOR)
    delivered = gpu.deliver(out.inside, rows_of(messages, down), down, DIVISOR)
    assert [one.dtype for one in delivered] == [torch.int64, torch.bool, torch.bool]
    assert [int(one) for one in delivered] == [*told]
    assert same_bits(out.read(), average) or not told.finite


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


@given(cases(), st.booleans(), st.booleans())
@example(Case(3, 700), True, False)
@example(Case(3, 700, me=1), False, True)
@settings(max_examples=10)
def test_one_phase_may_select(case: Case, flagged: bool, down_selects: bool) -> None:
    """Everything returns of a selection, or a selection of everything."""
    up, down = (case.up, case.answering(0.3)) if down_selects else (case.selecting(0.1), case.down)
    me = case.me
    additions, entered = exchange(case, up)
    it, came = additions[me], arrived(entered, me)
    if flagged and case.ranks > 1:
        came[me - 1][FINITE_AT] |= NON_FINITE
    y = Room(case.size, torch.float32)
    y.inside.copy_(it.scratch)
    mine = replace(case.addition(me, DEVICE), scratch=y.inside)
    expected = kernels.collect(it, came, up, down, me, 0)
    found = gpu.collect(mine, rows_of(came, up), up, down, me, 0)
    assert not found.fault
    assert is_finite(found.message) == is_finite(expected.message)
    if is_finite(expected.message):
        assert alike(found.message, expected.message)
        assert same_bits(y.read(), it.scratch)
        assert close(found.magnitude, expected.magnitude, magnitude_of(additions))


@given(
    st.integers(0, HEADER_BYTES - 1), st.integers(1, 255), st.sampled_from([0, 2]), st.booleans()
)
@example(FINITE_AT, NON_FINITE, 2, False)
@example(FINITE_AT, NON_FINITE, 2, True)
@settings(max_examples=9)
def test_a_changed_header_is_a_fault(
    place: int, other: int, source: int, down_selects: bool
) -> None:
    """Only the flag of what is not finite may be another."""
    case = Case(3, 150, me=1)
    fault = (place, other) != (FINITE_AT, NON_FINITE)
    up, down = case.up, case.down
    additions, entered = exchange(case)
    came = [one.clone() for one in arrived(entered, 1)]
    came[source][place] ^= other
    mine = replace(case.addition(1, DEVICE), scratch=additions[1].scratch.to(DEVICE, copy=True))
    back = case.answering(0.3) if down_selects else down
    found = gpu.collect(mine, rows_of(came, up), up, back, 1, 0)
    assert bool(found.fault) == fault
    assert not is_finite(found.message)

    returned = [
        kernels.collect(it, arrived(entered, rank), up, down, rank, 0).message
        for rank, it in enumerate(additions)
    ]
    returned[source][place] ^= other
    out = torch.empty(case.size, device=DEVICE)
    delivered = gpu.deliver(out, rows_of(returned, down), down, DIVISOR)
    assert bool(delivered.fault) == fault
    assert not delivered.finite


@given(st.integers(2, 8), st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=12)
def test_any_codes_and_scales_are_read_as_the_compiled_passes_do(
    bits: int, size: int, seed: int
) -> None:
    case = Case(2, size, bits=bits, group=16)
    up, down = case.up, case.down
    additions, entered = exchange(case)
    came = arrived(entered, 0)
    came[1][HEADER_BYTES:].random_(0, 256, generator=torch.Generator().manual_seed(seed))
    x = additions[0].scratch
    y = x.to(DEVICE, copy=True)
    mine = replace(case.addition(0, DEVICE), scratch=y)
    found = gpu.collect(mine, rows_of(came, up), up, down, 0, 0)
    expected = kernels.collect(additions[0], came, up, down, 0, 0)
    assert not found.fault
    assert is_finite(found.message) == is_finite(expected.message)
    if is_finite(expected.message):
        assert alike(found.message, expected.message)
        assert same_bits(y.cpu(), x)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
def test_a_pass_takes_two_launches_and_waits_for_nothing() -> None:
    case = Case(3, 300, me=1)
    leg, before = case.up, device.reads()
    additions, entered = exchange(case)
    it, rows = case.addition(1), rows_of(arrived(entered, 1), leg)
    with on_card():
        mine = Addition(*map(moved, (it.memory, it.gradient, it.scratch)))
        came, out = moved(rows), moved(it.gradient)
        with launches() as enter:
            found = kernels.enter(mine, leg, 1, 0)
        assert same_bits(seen(mine.scratch), additions[1].scratch)
        assert alike(seen(found.messages[0]), entered[1].messages[0])
        with launches() as collect:
            kernels.collect(mine, came, leg, leg, 1, 0)
        with launches() as deliver:
            kernels.deliver(out, came, leg, DIVISOR)
        for one in (enter, collect, deliver):
            assert (len(one.triton), one.torch, one.copies) == (2, [], [])
    assert device.reads() == before
