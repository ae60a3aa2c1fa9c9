"""Messages of the compiled passes are those of the format, and bad ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel import simulate
from sparcel.core import formats, kernels
from sparcel.core.comm import SimulatedCommunicator
from sparcel.core.formats import HEADER_BYTES, Expected, FewBits, Format, format_named
from sparcel.core.kernels import Leg, Regions
from sparcel.core.regions import RETURNED, leg
from sparcel.errors import CommunicationError, FormatError
from tests.kernels.paths import Case, isas, using
from tests.regions.made import Steps, passes
from tests.strategies import same_bits

RANKS, ME, STEP = 3, 1, 0

sizes = st.sampled_from([64, 200, 700, 1500, 5000])
formats_ = st.sampled_from([f"packed:{bits}" for bits in range(2, 9)])


class Owner:
    """Rank 1 of three, which has entered what it holds and got messages from the others."""

    def __init__(self, size: int, format: Format, density: float, kind: str = "normal") -> None:
        self.regions, self.format = Regions.of(size, RANKS), format
        self.up = self._leg(density)
        self.down = self._leg(min(1.0, RETURNED * density))
        self.scratch = [torch.empty(size) for _ in range(RANKS)]
        self.additions = [
            kernels.Addition(
                torch.zeros(size), Case(kind, size, torch.float32, rank).vector(), scratch
            )
            for rank, scratch in enumerate(self.scratch)
        ]
        sent = self._entered()
        self.arrived = [sent[rank][ME] for rank in range(RANKS)]

    def _entered(self) -> list[Any]:
        """Return what each rank sends up."""
        return [
            kernels.enter(addition, self.up, rank, STEP).messages
            for rank, addition in enumerate(self.additions)
        ]

    def _collected(self, rank: int, arrived: list[Tensor]) -> kernels.Collected:
        return kernels.collect(self.additions[rank], arrived, self.up, self.down, rank, STEP)

    def _leg(self, density: float) -> Leg:
        return leg(self.regions, ((self.regions.size, density),), self.format, torch.float32)

    def collect(self, source: int, message: Tensor) -> kernels.Collected:
        """Collect what arrived, where one message is another; leave the vector as it was."""
        kept = self.scratch[ME].clone()
        try:
            return self._collected(ME, replaced(self.arrived, source, message))
        finally:
            self.changed = not same_bits(kept, self.scratch[ME])
            self.scratch[ME].copy_(kept)

    def deliver(self, owner: int, message: Tensor, valid: list[Tensor]) -> kernels.Delivered:
        """Deliver what the owners returned, where one message is another."""
        out = torch.empty(self.regions.size)
        return kernels.deliver(out, replaced(valid, owner, message), self.down, 3.0)

    def returned(self) -> list[Tensor]:
        """Return messages such as owners return; each adds what a rank sends of its region."""
        sent = self._entered()
        return [
            self._collected(rank, [sent[other][rank] for other in range(RANKS)]).message
            for rank in range(RANKS)
        ]


def replaced(messages: list[Tensor], place: int, message: Tensor) -> list[Tensor]:
    return [*messages[:place], message, *messages[place + 1 :]]


@given(sizes, formats_, st.sampled_from([0.01, 0.1, 0.4, 0.99]), isas)
def test_messages_hold_the_streams_of_the_region(
    size: int, name: str, density: float, isa: str
) -> None:
    """What the decoder reads is what left the vector, less what rounding takes."""
    with using(isa):
        owner = Owner(size, format_named(name), density)
        regions = owner.regions
        for source in (0, 2):
            message = owner.arrived[source]
            expected = Expected(regions.length(ME), torch.float32, None)
            stream = formats.decode([message], expected)
            assert stream.finite
            assert (stream.indices is None) == owner.up.dense
            gradient = Case("normal", size, torch.float32, source).vector()
            left = regions.take(gradient, ME) - regions.take(owner.scratch[source], ME)
            torch.testing.assert_close(stream.to_dense(), left, rtol=1e-5, atol=1e-5)
            assert message.numel() == owner.format.nbytes(
                None if owner.up.dense else stream.nnz, regions.length(ME), 4
            )
            assert message.numel() <= owner.up.bounds[ME]


@st.composite
def damages(draw: st.DrawFn, length: int) -> tuple[str, int, int]:
    """Draw what happens to a message: a byte changes, or the end is cut off."""
    kind = draw(st.sampled_from(["byte", "byte", "cut"]))
    place = draw(st.integers(0, HEADER_BYTES - 1) | st.integers(0, length - 1))
    return kind, place, draw(st.integers(1, 255))


def damaged(message: Tensor, damage: tuple[str, int, int]) -> Tensor:
    kind, place, other = damage
    if kind == "cut":
        return message[:place].clone()
    made = message.clone()
    made[place] ^= other
    return made


NON_FINITE_FLAG = (7, 2)
"""The place of the flags in a header, and the flag of a stream that is not finite."""


@given(st.data(), sizes, formats_, st.sampled_from([0.01, 0.1, 0.4, 0.99]), isas)
def test_damaged_messages_are_refused_or_harmless(
    data: st.DataObject, size: int, name: str, density: float, isa: str
) -> None:
    """A changed code or scale stands for another value; anything else is refused."""
    with using(isa):
        owner = Owner(size, format_named(name), density)
        message = owner.arrived[0]
        damage = data.draw(damages(message.numel()))
        was_refused = owner.collect(0, damaged(message, damage)).fault
        kind, place, other = damage
        if kind == "cut" or (place < HEADER_BYTES and (place, other) != NON_FINITE_FLAG):
            assert was_refused
        assert not (was_refused and owner.changed)

        valid = owner.returned()
        damage = data.draw(damages(valid[2].numel()))
        was_refused = owner.deliver(2, damaged(valid[2], damage), valid).fault
        kind, place, other = damage
        if kind == "cut" or (place < HEADER_BYTES and (place, other) != NON_FINITE_FLAG):
            assert was_refused


@pytest.mark.parametrize("density", [0.02, 0.4])
def test_messages_of_other_regions_formats_and_kinds_are_refused(density: float) -> None:
    owner = Owner(700, format_named("packed:4"), density)
    other = {
        "a shorter vector": Owner(500, owner.format, density),
        "other bits": Owner(700, format_named("packed:8"), density),
        "all coordinates": Owner(700, owner.format, 1.0),
    }
    for source in other.values():
        assert owner.collect(0, source.arrived[0]).fault
    assert not owner.collect(0, owner.arrived[0]).fault


def test_bits_past_the_end_of_a_bitmap_are_refused() -> None:
    """Where a bitmap is plain, and its last word is not full."""
    owner = Owner(700, format_named("packed:4"), 0.4)
    length = owner.regions.length(ME)
    assert length % 64
    message = owner.arrived[0]
    past = message.clone()
    past[-1] |= 0x80
    assert owner.collect(0, past).fault
    missing = message.clone()
    words = missing[-8 * -(-length // 64) :].view(torch.int64)
    words[0] &= words[0] - 1
    assert owner.collect(0, missing).fault


@given(isas, st.sampled_from(["packed:4", "packed:2"]), st.sampled_from([0.05, 0.4]))
def test_the_definition_reads_messages_of_compiled_passes(
    isa: str, name: str, density: float
) -> None:
    with using(isa):
        owner = Owner(900, format_named(name), density)
        found = owner.collect(0, owner.arrived[0])
        with passes(compiled=False):
            beside = owner.collect(0, owner.arrived[0])
        assert same_bits(found.message, beside.message)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("exchange", [0, 1])
def test_the_receiver_of_a_damaged_message_names_its_sender(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, exchange: int
) -> None:
    """After the last exchange, the others may have finished their step already."""
    original, calls = SimulatedCommunicator.exchange_parts, {}

    def damaging(self: SimulatedCommunicator, sends: Any, *rest: Any) -> Any:
        number = calls[self.rank] = calls.get(self.rank, -1) + 1
        if (self.rank, number) == (2, exchange):
            sends = {rank: [part.clone() for part in parts] for rank, parts in sends.items()}
            sends[0][0][24] ^= 1  # the count of entries
        return original(self, sends, *rest)

    monkeypatch.setattr(SimulatedCommunicator, "exchange_parts", damaging)
    case = Steps(3, 700)

    def on_rank(comm: SimulatedCommunicator) -> str:
        scheme = case.scheme()
        try:
            scheme.step(case.gradient(comm.rank, 0), comm)
        except (FormatError, CommunicationError) as error:
            assert scheme.memory is None
            return str(error)
        return "finished"

    with passes(compiled):
        first, *others = simulate(3, on_rank).results
    assert first.startswith("rank 2 sent rank 0 a bad message")
    told = f"rank 0 failed: {first}"
    assert set(others) <= ({told} if exchange == 0 else {told, "finished"})


def test_random_rounding_is_another_in_each_step_for_each_sender_and_region() -> None:
    size, by = 3 * 256, FewBits(2, stochastic=True)
    up = leg(Regions.of(size, RANKS), ((size, 1.0),), Format("raw", by), torch.float32)
    vector, came = torch.tensor([1.0, 0.3]).repeat(size // 2), []
    for step in range(3):
        for rank in range(RANKS):
            addition = kernels.Addition(torch.zeros(size), vector.clone(), torch.empty(size))
            messages = kernels.enter(addition, up, rank, step).messages
            came += [bytes(messages[owner].numpy()) for owner in range(RANKS) if owner != rank]
    assert len(set(came)) == len(came) == 3 * RANKS * (RANKS - 1)
