"""Passes over regions that select, on a GPU or in Triton's interpreter: the compiled ones' bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from sparcel import _cpu  # noqa: E402
from sparcel.core import kernels  # noqa: E402
from sparcel.core.formats import FewBits, Format, format_named  # noqa: E402
from sparcel.core.kernels import Addition, Leg, Regions, gpu, row_bytes  # noqa: E402
from sparcel.core.kernels.definitions import packing  # noqa: E402
from sparcel.core.kernels.gpu import _arrived, _message, _selected  # noqa: E402
from sparcel.core.regions import leg  # noqa: E402
from tests.card import launches, moved, on_card  # noqa: E402
from tests.kernels.paths import KINDS, Case  # noqa: E402
from tests.strategies import same_bits  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    # NumPy computes in Triton's interpreter.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
few = settings(max_examples=17)

FORMATS = (
    *("packed:4", "packed:4", "packed:8", "packed:2", "packed:3", "packed:5", "packed:6"),
    *(Format("packed", FewBits(4, 8)), Format("packed", FewBits(8, 16))),
    Format("packed", FewBits(2, 32)),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 63, 64, 65, 127, 129, 300, 511, 513, 700, 1025, 3000)


@dataclass(frozen=True)
class Exchange:
    """A recipe for the passes of one step; Hypothesis prints it better than its vectors."""

    ranks: int
    size: int
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    up: tuple[tuple[int, float], ...] = ()
    down: tuple[tuple[int, float], ...] = ()
    format: str | Format = "packed:4"
    scale: float = 1.0
    step: int = 0
    tile: int = 2048
    chunks: int = 1024

    answer: str | Format = "packed:6"

    def leg(self, shares: tuple[tuple[int, float], ...], named: str | Format | None = None) -> Leg:
        """Return a leg, in the format that goes up unless one is named."""
        regions, format = Regions.of(self.size, self.ranks), format_named(named or self.format)
        return leg(regions, shares, format, torch.float32)

    @property
    def legs(self) -> tuple[Leg, Leg]:
        """The legs up and down."""
        return self.leg(self.up), self.leg(self.down, self.answer)

    def vectors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's memory and gradient."""
        memory = Case(self.kind, self.size, torch.float32, 2 * rank).vector()
        return memory, Case(self.kind, self.size, self.dtype, 2 * rank + 1).vector()

    @contextmanager
    def tiles(self) -> Iterator[None]:
        """Let programs take such tiles meanwhile, so that short vectors have many."""
        sizes = {"TILE": self.tile, "CHUNKS": self.chunks}
        with patch.multiple(_message, **sizes), patch.object(_selected, "_ENTRIES", self.tile):
            yield


class Left(NamedTuple):
    """What left a vector, and what became of the vector."""

    messages: list[Tensor | None]
    sent: int
    magnitude: float
    x: Tensor


class Cpu:
    """The compiled passes of one rank."""

    def __init__(self, case: Exchange, rank: int, up: Leg, down: Leg) -> None:
        self.case, self.rank, self.up, self.down = case, rank, up, down

    def enter(self) -> Left:
        case, up, x = self.case, self.up, torch.empty(self.case.size)
        made = _cpu.enter(
            *self.case.vectors(self.rank), x, case.scale, self.rank, case.ranks, up.regions.block,
            up.shares, up.most, False, up.bits, up.group, case.step, up.headers, 1,
        )  # fmt: skip
        messages = [message if message.numel() else None for message in made[0]]
        return Left(messages, *made[1:], x)

    def collect(self, x: Tensor, arrived: Sequence[Tensor]) -> tuple[Tensor | None, float, Tensor]:
        """Collect what the other ranks sent; return no message if one is bad."""
        case, rank, up, down, x = self.case, self.rank, self.up, self.down, x.clone()
        messages = [*arrived[:rank], torch.empty(0, dtype=torch.uint8), *arrived[rank:]]
        message, fell, wrong = _cpu.collect(
            x, messages, up.headers[rank], (up.bits, up.group), rank, case.ranks,
            down.regions.block, down.shares, down.most[rank], False, down.bits, down.group,
            case.step, down.headers[rank], 1,
        )  # fmt: skip
        return None if wrong else message, fell, x

    def deliver(
        self, returned: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[int, bool, bool, Tensor]:
        out, down = torch.empty(self.case.size, dtype=dtype), self.down
        entries, finite, wrong = _cpu.deliver(
            returned, down.headers, down.regions.block, down.bits, down.group, 3.0, out, 1
        )
        return entries, finite, wrong, out


def rows_of(messages: Sequence[Tensor | None], leg: Leg) -> Tensor:
    """Return messages as rows of a GPU, garbage behind them."""
    rows = torch.full((len(messages), row_bytes(leg.bounds)), 0xA5, dtype=torch.uint8)
    for row, message in zip(rows, messages, strict=True):
        if message is not None:
            row[: message.numel()] = message
    return rows.to(DEVICE)


def length_in(row: Tensor) -> int:
    return int(row[32:40].clone().view(torch.int64))


def agree(row: Tensor, expected: Tensor) -> bool:
    """Tell whether a message is the expected one, or says like it that a vector is not finite."""
    row = row.cpu()
    if expected[7] & 2:
        return bool(row[7] & 2) and length_in(row) <= row.numel()
    return length_in(row) == expected.numel() and torch.equal(row[: expected.numel()], expected)


def near(found: Tensor, expected: float, x: Tensor) -> bool:
    """Tell whether a magnitude is the expected one, but for the rounding of float32 sums."""
    total = float(x.double().abs().sum())
    return total != total or abs(float(found) - expected) <= 1e-5 * total or total > 1e36


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """Draw an exchange whose legs both select."""
    tile = draw(st.sampled_from([64, 128, 2048]))
    size = min(draw(st.sampled_from(SIZES) | st.integers(0, 1500)), 8 * tile + 1)
    inner = draw(st.sets(st.integers(0, size), max_size=3))
    densities = st.sampled_from([0.01, 0.1, 0.1, 0.3, 0.6, 0.9])

    def shares() -> tuple[tuple[int, float], ...]:
        stops = [*sorted(inner if draw(st.booleans()) else ()), size]
        return tuple((stop, draw(densities)) for stop in stops)

    case = Exchange(
        draw(st.integers(1, 5)),
        size,
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(DTYPES)),
        shares(),
        shares(),
        draw(st.sampled_from(FORMATS)),
        draw(st.sampled_from([1.0, 1.0, 1024.0, 0.3])),
        draw(st.sampled_from([0, 1, 7, 2**31 + 5])),
        tile,
        1024 if tile == 2048 else draw(st.sampled_from([2, 4])),
        draw(st.sampled_from(FORMATS)),
    )
    assume(not any(one.dense for one in case.legs))
    return case


SHARES = ((400, 0.1), (700, 0.3))


@few
@example(Exchange(2, 700, "all equal", up=SHARES, down=SHARES, tile=64, chunks=2), 1, DTYPES[0])
@example(Exchange(3, 700, "special", up=SHARES, down=SHARES, tile=64, chunks=2), 0, DTYPES[1])
@example(Exchange(2, 700, up=SHARES, down=SHARES, scale=1e6), 0, torch.float16)
@given(exchanges(), st.integers(0, 4), st.sampled_from(DTYPES))
def test_the_passes_have_the_bits_of_the_compiled_ones(
    case: Exchange, rank: int, dtype: torch.dtype
) -> None:
    """Each gets what the compiled pass before it made."""
    rank %= case.ranks
    up, down = case.legs
    others = [Cpu(case, one, up, down) for one in range(case.ranks)]
    left = [one.enter() for one in others]
    expected = left[rank]
    memory, gradient = (one.to(DEVICE) for one in case.vectors(rank))
    addition = Addition(memory, gradient, torch.empty_like(memory), case.scale)
    with case.tiles():
        found = _selected.enter(addition, up, rank, case.step)
    for row, message in zip(found.messages, expected.messages, strict=True):
        assert message is None or agree(row, message)
    if expected.x.isfinite().all():
        assert same_bits(addition.scratch.cpu(), expected.x)
        assert int(found.sent) == expected.sent
        added = memory.abs() + case.scale * gradient.abs()
        assert near(found.magnitude, expected.magnitude, added)

    arrived = [[one.messages[owner] for one in left] for owner in range(case.ranks)]
    sent = [[one for one in messages if one is not None] for messages in arrived]
    collected = [
        other.collect(one.x, messages)
        for other, one, messages in zip(others, left, sent, strict=True)
    ]
    message, magnitude, after = collected[rank]
    assert message is not None
    x = expected.x.to(DEVICE)
    left_over, came = replace(addition, scratch=x), rows_of(arrived[rank], up)
    with case.tiles():
        row, fell, fault = gpu.collect(left_over, came, up, down, rank, case.step)
    assert agree(row, message)
    assert not fault
    if after.isfinite().all():
        assert same_bits(x.cpu(), after)
        assert near(fell, magnitude, expected.x.abs() + after.abs())

    returned = [message for message, _, _ in collected if message is not None]
    entries, finite, _, expected_out = others[rank].deliver(returned, dtype)
    out = torch.empty(case.size, dtype=dtype, device=DEVICE)
    with case.tiles():
        found = _arrived.deliver(rows_of(returned, down), down, 3.0, out)
    assert (int(found[0]), bool(found[1]), bool(found[2])) == (entries, finite, False)
    if finite:
        assert same_bits(out.cpu(), expected_out)


@st.composite
def damages(draw: st.DrawFn, message: Tensor, row: int) -> Tensor:
    """Draw what becomes of a message in a row of so many bytes."""
    made = message.clone()
    header, length = made[:40].view(torch.int64), message.numel()
    size, count = header[2:4].tolist()
    kinds = ["header", "number", "count", *(["byte", "end"] if count else [])]
    match draw(st.sampled_from(kinds)):
        case "header":
            made[draw(st.integers(0, 39))] ^= draw(st.integers(1, 255))
        case "number":
            header[draw(st.sampled_from([2, 3, 4]))] = draw(st.integers(-(2**63), 2**63 - 1))
        case "count":  # another count, and the length that belongs to it
            bits = draw(st.integers(2, 8))
            header[3] = draw(st.integers(0, size))
            header[4] = Format("packed", FewBits(bits, 64)).nbytes(int(header[3]), size, 4)
            made = torch.cat([made, made.new_full((row - length,), draw(st.integers(0, 255)))])
        case "byte":
            made[draw(st.integers(40, length - 1))] ^= draw(st.integers(1, 255))
        case _:
            made[draw(st.integers(length - 8, length - 1))] ^= 0x80
    return made


@few
@given(
    st.data(),
    st.sampled_from([64, 200, 700]),
    st.sampled_from([0.02, 0.1, 0.2, 0.6]),
    st.sampled_from(["packed:4", "packed:8", "packed:2"]),
    st.sampled_from([(64, 2), (2048, 1024)]),
)
def test_bad_messages_are_noticed_or_mean_what_they_mean_on_the_cpu(
    data: st.DataObject, size: int, density: float, name: str, tiles: tuple[int, int]
) -> None:
    """The outgoing message of a rank that got one says that not all is finite."""
    shares = ((size, density),)
    case = Exchange(3, size, "normal", torch.float32, shares, shares, name, 1.0, 5, *tiles)
    part = case.leg(shares)
    assume(not part.dense)
    ranks = [Cpu(case, rank, part, part) for rank in range(3)]
    left = [one.enter() for one in ranks]
    good = left[0].messages[1], left[2].messages[1]
    at_most = row_bytes(part.bounds)
    bad = data.draw(damages(good[0], at_most))
    expected, _, after = ranks[1].collect(left[1].x, [bad, good[1]])
    with case.tiles():
        x = left[1].x.to(DEVICE)
        rows = rows_of([bad, None, good[1]], part)
        row, _, fault = gpu.collect(Addition(x, x, x), rows, part, part, 1, case.step)
    assert bool(fault) == (expected is None)
    if expected is None:
        assert row[7] & 2
    else:
        assert agree(row, expected)
        assert not after.isfinite().all() or same_bits(x.cpu(), after)

    returned = [left[1].messages[0], left[0].messages[1], left[0].messages[2]]
    returned[2] = data.draw(damages(returned[2], at_most))
    entries, finite, wrong, expected_out = ranks[0].deliver(returned, torch.float32)
    with case.tiles():
        out = torch.empty(size, device=DEVICE)
        found = _arrived.deliver(rows_of(returned, part), part, 3.0, out)
    assert bool(found[2]) == wrong
    assert bool(found[1]) == (finite and not wrong)
    if not wrong:
        assert int(found[0]) == entries
        assert not finite or same_bits(out.cpu(), expected_out)


@pytest.mark.parametrize("kind", ["none", "twice", "swapped", "past", "filled"])
@pytest.mark.parametrize("density", [0.1, 0.6])
def test_places_are_in_order_and_in_the_region(kind: str, density: float) -> None:
    """Places are repacked; ``filled`` sets a bit after those of a plain bitmap."""
    case = Exchange(2, 713, up=((713, density),), tile=64, chunks=2)
    part = case.leg(case.up)
    made = Cpu(case, 0, part, part).enter().messages[1]
    assert made is not None
    size, count = made[16:32].clone().view(torch.int64).tolist()
    assert (count > size // 4) == (density > 0.25)
    low_bits, _ = packing.layout(count, size)
    places = made[made.numel() - 8 * packing.packed_words(count, size) :]
    indices, _ = kernels.unpack_indices(places.clone().view(torch.int64), count, size)
    upper = indices >> low_bits
    near = 1 + int((upper[1:] == upper[:-1]).nonzero()[0]) if low_bits else 1
    match kind:
        case "twice":
            indices[near] = indices[near - 1]
        case "swapped":
            indices[[near - 1, near]] = indices[[near, near - 1]]
        case "past":
            indices[-1] = size
    places[:] = packing.pack_indices(indices, size).view(torch.uint8)
    if kind == "filled":
        places[-1] |= 0x80
    bad = kind != "none" and not (density > 0.25 and kind == "swapped")
    bad = bad and not (density < 0.25 and kind == "filled")
    rows = rows_of([made, None], part)
    with case.tiles():
        added = _arrived.add(torch.zeros(713, device=DEVICE), rows, part, 1)
    assert (bool(added.fault), bool(added.finite)) == (bad, not bad)


def test_messages_longer_than_their_row_are_bad() -> None:
    """Even where the next row, which nobody else uses, holds the rest."""
    size = 700
    case = Exchange(2, size, up=((size, 0.1),), down=((size, 0.6),))
    part, more = case.legs
    message = Cpu(case, 0, more, more).enter().messages[1]
    at_most = row_bytes(part.bounds)
    assert message is not None
    assert at_most < message.numel() <= 2 * at_most
    rows = torch.zeros(2, at_most, dtype=torch.uint8)
    rows.view(-1)[: message.numel()] = message
    added = _arrived.add(torch.zeros(size, device=DEVICE), rows.to(DEVICE), part, 1)
    assert added.fault
    assert not added.finite


@triton.jit(do_not_specialize=["count", "length", "size", "ranks", "block_bits", "owner", "place"])
def _tell(
    result, count, length, size, ranks, block_bits, owner, place,
    BITS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    codes, places, end, bitmap, low_bits, plain = _message.parts_of(
        count.to(tl.int64), length.to(tl.int64), BITS, GROUP
    )
    tl.store(result, codes)
    tl.store(result + 1, places)
    tl.store(result + 2, end)
    tl.store(result + 3, bitmap)
    tl.store(result + 4, low_bits)
    tl.store(result + 5, plain)
    tl.store(result + 6, _message.length_of(size, ranks, block_bits, owner))
    at = place.to(tl.int64)
    tl.store(result + 7, at + _message.skipped(at, ranks, block_bits, owner))


@given(st.data(), st.integers(1, 2**31 - 1) | st.integers(1, 5000), st.integers(2, 8))
def test_layouts_of_the_longest_vectors_do_not_overflow(
    data: st.DataObject, size: int, bits: int
) -> None:
    ranks = data.draw(st.integers(1, 300))
    regions = Regions.of(size, ranks)
    owner = data.draw(st.integers(0, ranks - 1))
    place = data.draw(st.integers(0, max(0, regions.length(owner) - 1)))
    count = data.draw(st.integers(0, size) | st.integers(0, min(size, 9)))
    result = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    block_bits = regions.block.bit_length() - 1
    _tell[(1,)](result, count, size, size, ranks, block_bits, owner, place, BITS=bits, GROUP=32)
    code = Format("packed", FewBits(bits, 32))
    scales, codes = (-(-part // 8) * 8 for part in code.value_code.part_bytes(count, 4))
    low_bits, bitmap = packing.layout(count, size)
    expected = [
        *(40 + scales, 40 + scales + codes, code.nbytes(count, size, 4)),
        *((bitmap, low_bits) if count else (0, 0)),
        *(count > size // 4, regions.length(owner)),
        int(regions.coordinates(owner, torch.tensor(place))),
    ]
    assert result.tolist() == expected


def test_a_step_takes_fourteen_launches_and_the_host_reads_nothing() -> None:
    """What a leg decides is on the device from its first step on."""
    shares = ((2000, 0.1), (5000, 0.2))
    case = Exchange(3, 5000, up=shares, down=shares)
    part = case.leg(shares)
    with on_card():
        memory, gradient = map(moved, case.vectors(1))
        addition = Addition(memory, gradient, torch.empty_like(memory), 0.5)

        def step(number: int) -> Any:
            left = _selected.enter(addition, part, 1, number)
            gpu.collect(addition, left.messages, part, part, 1, number)
            _arrived.deliver(left.messages, part, 3.0, torch.empty_like(memory))

        step(0)
        with launches() as counted:
            step(1)
    assert (len(counted.triton), counted.torch, counted.copies) == (14, [], [])
