"""A scheme refuses a state with one damaged entry, and stays as it was; the whole one loads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Auto, Dense, Hierarchical, OkTopK, ScaleCom, Scheme, TopK
from sparcel.errors import InputError
from tests.strategies import same_bits

SIZE = 40
MAKES: dict[str, Callable[[], Scheme]] = {
    "topk": lambda: TopK(0.1),
    "momentum": lambda: TopK(0.1, momentum=0.5),
    "reuse": lambda: OkTopK(0.1, threshold="reuse"),
    "filtered": lambda: ScaleCom(0.1, beta=0.5),
    "auto": lambda: Auto(0.1),
    "dense": Dense,
    "two levels": lambda: Hierarchical(OkTopK(0.1, threshold="reuse", momentum=0.5), 1),
}
COUNTS = [None, "3", 1.5, -1, True, torch.tensor(-1), torch.tensor([1, 2]), math.nan]
THRESHOLDS = ["0.5", math.nan, math.inf, -1.0, [0.5], torch.tensor([0.5, 0.5])]
FILTERS = [None, "1", math.nan, 0, -0.5, 1.5, 1e-320, True, torch.tensor([0.5, 0.5])]
BOUNDARIES = [7, "07", [], [1, 40], [0, 30, 20, 40], [0, None], [0.0, 40.0]]
MISSING = object()


def without_or_with(state: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    rest = {name: entry for name, entry in state.items() if name != key}
    return rest if value is MISSING else {**rest, key: value}


@st.composite
def damaged(draw: st.DrawFn, state: dict[str, Any]) -> dict[str, Any]:
    key = draw(st.sampled_from(sorted({*state, "beta"})))  # a state of 0.1.0 has it, too
    value: Any
    if key == "steps":
        value = draw(st.sampled_from([*COUNTS, MISSING]))
    elif key == "beta":
        value = draw(st.sampled_from(FILTERS))
    elif key == "selectors":
        value = draw(st.sampled_from([None, 7, "x", {}, [7], [None], [{"unknown": 1}]]))
        if state[key] and state[key][0]:
            kind = draw(st.sampled_from(["threshold", "k", "since"]))
            wrong = draw(st.sampled_from(THRESHOLDS if kind == "threshold" else [*COUNTS, MISSING]))
            value = [without_or_with(state[key][0], kind, wrong)]
    elif key == "estimates":
        choices = {"threshold": THRESHOLDS, "k": COUNTS, "boundaries": BOUNDARIES, "other": [1]}
        kind = draw(st.sampled_from(sorted(choices)))
        value = {**state[key], kind: draw(st.sampled_from(choices[kind]))}
        value = draw(st.sampled_from([None, 7, "x", [1], value]))
    elif state[key] is None:
        keeps_none = [] if "selectors" in state else [torch.ones(SIZE)]
        value = draw(st.sampled_from([MISSING, 7, torch.full((SIZE,), math.nan), *keeps_none]))
    else:
        value = draw(st.sampled_from([0.0, "x", [0.0] * SIZE, *wrong_parts(state[key])]))
        value = MISSING if key == "memory" and draw(st.integers(0, 9)) == 0 else value
    return without_or_with(state, key, value)


def wrong_parts(part: Tensor) -> list[Tensor]:
    """Return tensors that cannot be a memory."""
    kinds = [torch.complex64, torch.int32, torch.float16]
    poisoned = [part.clone() for _ in range(3)]
    for one, by in zip(poisoned, [math.nan, math.inf, -math.inf], strict=True):
        one[-1] = by
    return [*map(part.to, kinds), part[None], part.to_sparse(), part.to("meta"), *poisoned]


def trained(make: Callable[[], Scheme], comm: Communicator, steps: int) -> Scheme:
    scheme = make()
    for step in range(steps):
        scheme.step(torch.arange(SIZE) * (comm.rank + 1.0) % (7 + step) + 1, comm)
    return scheme


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return same_bits(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return bool(one == two)


@pytest.mark.parametrize("name", MAKES)
@given(data=st.data())
def test_a_damaged_state_changes_nothing_and_the_whole_one_loads(
    name: str, data: st.DataObject
) -> None:
    whole = simulate(1, lambda comm: trained(MAKES[name], comm, 3)).results[0].state_dict()
    state = data.draw(damaged(copy.deepcopy(whole)))

    def on_rank(comm: Communicator) -> None:
        scheme = trained(MAKES[name], comm, 1)
        before = scheme.state_dict()
        with pytest.raises(InputError) as caught:
            scheme.load_state_dict(state)
        assert "; " in str(caught.value) and "\n" not in str(caught.value)
        assert same(scheme.state_dict(), before)
        scheme.load_state_dict(whole)
        assert same(scheme.state_dict(), whole)
        assert trained(lambda: scheme, comm, 1).steps == 4

    simulate(1, on_rank)


@pytest.mark.parametrize("state", [None, 7, [("steps", 1)], "state"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(InputError, match="state must be a Mapping"):
        TopK(0.1).load_state_dict(state)


def test_a_velocity_of_another_size_than_the_memory_is_refused() -> None:
    state = {"steps": 3, "memory": torch.ones(SIZE), "velocity": torch.ones(SIZE - 1)}
    for memory in (state["memory"], None):
        with pytest.raises(InputError, match="'velocity' must be as long as its memory"):
            TopK(0.1, momentum=0.5).load_state_dict({**state, "memory": memory})
