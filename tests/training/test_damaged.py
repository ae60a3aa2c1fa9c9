"""A state with one damaged entry is refused in words, and nothing changes; the whole one loads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Dense, GTopK, Hierarchical, ScaleCom, Scheme, TopK
from sparcel.core.training import Averager
from sparcel.errors import InputError, SparcelWarning
from tests.evenly import even_averager
from tests.strategies import same_bits
from tests.training.tensors import TENSORS, Named, gradients_of, owed_by

MAKES: dict[str, Callable[[], Scheme]] = {
    "topk": lambda: TopK(0.05),
    "momentum": lambda: TopK(0.05, momentum=0.5),
    "filtered": lambda: ScaleCom(0.05, beta=0.5),
    "two levels": lambda: Hierarchical(GTopK(0.1)),
}

NO_NUMBERS = [
    None,
    "3",
    [1],
    1.5,
    True,
    torch.tensor(1.5),
    torch.tensor([1, 2]),
    torch.tensor(1 + 0j),
    torch.tensor(math.nan),
]
MISFITS: list[Any] = [torch.tensor(10**9), torch.tensor(1), torch.tensor(0.0), torch.zeros(5)]
"""Numbers of ranks, and memory, that may be those of another training."""

DAMAGES: dict[str, list[Any]] = {
    "steps": [*NO_NUMBERS, -1, torch.tensor(-1), 2**60],
    "world_size": [*NO_NUMBERS, 0, -3, torch.tensor(0), *MISFITS[:2], 2**60],
    "flush": [*NO_NUMBERS, -5, torch.tensor(-5), 0, 10**9],
    "filter": [
        *[one for one in NO_NUMBERS if not isinstance(one, float)][:4],
        True,
        torch.tensor([0.5, 0.5]),
        torch.tensor(1 + 0j),
        *[math.nan, 0, 0.0, -0.5, 1.5, math.inf, 1e-320],
    ],
    "layout.": [
        None,
        "3",
        [0, 0, 9],
        0,
        torch.tensor([0, 0]),
        torch.tensor([[0, 0, 9]]),
        torch.tensor([0.0, 0.0, 9.0]),
        torch.tensor(0),
    ],
}


def poisoned(part: torch.Tensor, by: float, place: int) -> torch.Tensor:
    part = part.clone()
    part[place % part.numel()] = by
    return part


@st.composite
def damaged(draw: st.DrawFn, state: Named) -> tuple[Named, bool]:
    """Return the state with another value of one entry.

    The second result tells whether the state is then one that may be loaded in part.
    """
    key = draw(st.sampled_from(sorted({*state, "filter"})))  # a state of 0.1.0 has it, too
    if key.startswith(("rank", "velocity")):
        part = state[key]
        poison = st.sampled_from([math.nan, math.inf, -math.inf])
        wrong = [None, "0", 0.0, [0.0], part[None], part.to_sparse(), part.to("meta")]
        wrong += [part.to(torch.complex64), part.to(torch.int32), *MISFITS[2:]]
        value = draw(
            st.builds(poisoned, st.just(part), poison, st.integers(0, 2**20))
            | st.sampled_from(wrong)
        )
    else:
        value = draw(st.sampled_from(DAMAGES["layout." if key.startswith("layout.") else key]))
    return {**state, key: value}, any(value is one for one in MISFITS)


def saved_by(make: Callable[[], Scheme]) -> Named:
    """Return the full state of two ranks after two steps."""

    def on_rank(comm: Communicator) -> Named:
        averager = even_averager(TENSORS, make(), group=comm)
        for step in range(2):
            averager.average(gradients_of(comm.rank, step))
        return averager.handle.full_state_dict()

    return simulate(2, on_rank, ranks_per_node=1).results[0]


STATES: dict[str, Named] = {}


def snapshot(averager: Averager) -> tuple[Named, str]:
    return averager.handle.state_dict(), repr(averager)


def unchanged(averager: Averager, before: tuple[Named, str]) -> bool:
    state, shown = snapshot(averager)
    assert state.keys() == before[0].keys()
    return shown == before[1] and all(same_bits(state[key], before[0][key]) for key in state)


@pytest.mark.parametrize("name", MAKES)
@given(data=st.data())
def test_a_damaged_entry_is_named_and_changes_nothing(name: str, data: st.DataObject) -> None:
    whole = STATES.setdefault(name, saved_by(MAKES[name]))
    state, in_part = data.draw(damaged(whole))
    strict = in_part or data.draw(st.booleans())
    (key,) = (key for key in state if state[key] is not whole.get(key, state))

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, MAKES[name](), group=comm)
        averager.average(gradients_of(comm.rank, 7))
        before = snapshot(averager)
        with pytest.raises(InputError) as caught:
            averager.handle.load_state_dict(state, strict)
        said = str(caught.value)
        named = "old ranks [2" if state[key] is MISFITS[0] else repr(key)
        named = "world size 1" if state[key] is MISFITS[1] else named
        assert named in said
        assert "; " in said and "\n" not in said
        assert unchanged(averager, before)
        averager.handle.load_state_dict(whole)
        assert averager.handle.stats().training_steps == 2
        for tensor in owed_by(averager, 0):
            parts = [whole[f"rank{rank}.{tensor}"] for rank in range(2)]
            expected = (parts[0] + parts[1]).double() / 2
            assert torch.equal(owed_by(averager, 0)[tensor], expected)

    simulate(1, on_rank)


@pytest.mark.parametrize("state", [None, 7, [("steps", 1)], "state", {7: torch.zeros(1)}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        with pytest.raises(InputError, match=r"give what state_dict\(\) or full_state_dict\(\)"):
            averager.handle.load_state_dict(state)

    simulate(1, on_rank)


@pytest.mark.parametrize("strict", [True, False])
def test_a_billion_old_ranks_take_no_time(strict: bool) -> None:
    state = {**saved_by(MAKES["topk"]), "world_size": torch.tensor(10**9)}

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        started = time.monotonic()
        said = r"nothing of the old ranks \[2, 3, 4, …\]"
        if strict:
            with pytest.raises(InputError, match=said):
                averager.handle.load_state_dict(state)
        else:
            with pytest.warns(SparcelWarning, match=said):
                averager.handle.load_state_dict(state, strict=False)
        assert time.monotonic() - started < 5

    simulate(1, on_rank)


@pytest.mark.parametrize("key", ["rank00.first", "rank2.first", "rank-1.first", "rank²1.first"])
def test_memory_of_a_rank_that_did_not_save_is_refused(key: str) -> None:
    state = saved_by(MAKES["topk"])
    state[key] = state["rank0.first"]

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        with pytest.raises(InputError, match=key):
            averager.handle.load_state_dict(state)

    simulate(1, on_rank)


@pytest.mark.parametrize("large", [torch.finfo(torch.float32).max, 1e38])
def test_memory_that_the_ranks_could_not_add_up_is_refused(large: float) -> None:
    state = saved_by(MAKES["topk"])
    for rank in range(2):
        state[f"rank{rank}.first"][0] = large

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        with pytest.raises(
            InputError,
            match=r"'rank0\.first' \+ 'rank1\.first' must be finite, and at most 8.5e\+37",
        ):
            averager.handle.load_state_dict(state)
        assert averager.handle.memory_norm() == 0

    simulate(1, on_rank)


def test_memory_that_a_small_filter_makes_too_large_is_refused() -> None:
    state = {**saved_by(MAKES["filtered"]), "filter": torch.tensor(1e-37, dtype=torch.float64)}

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        with pytest.raises(InputError, match="must be finite, and at most"):
            averager.handle.load_state_dict(state)
        assert averager.handle.memory_norm() == 0

    simulate(1, on_rank)


def test_a_scheme_without_memory_refuses_damage_too() -> None:
    state = saved_by(MAKES["topk"])
    state["rank1.third"] = poisoned(state["rank1.third"], math.nan, 5)

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, Dense(), group=comm)
        before = snapshot(averager)
        with pytest.raises(InputError, match=r"'rank1.third' must be finite, .*got nan"):
            averager.handle.load_state_dict(state)
        assert unchanged(averager, before)

    simulate(1, on_rank)


@pytest.mark.parametrize("saved_by", [0, -1, 1.5, "2"])
def test_room_is_asked_for_a_number_of_ranks(saved_by: Any) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(0.05), group=comm)
        with pytest.raises(InputError, match="saved_by must be"):
            averager.handle.state_dict(saved_by)

    simulate(1, on_rank)
