"""Optimisers refuse a state with one damaged entry, or for parameters in another order."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

from sparcel import SparseStream, simulate
from sparcel.core.comm import Communicator
from sparcel.core.optim import LAMB, LARS, SGD
from sparcel.errors import InputError, MismatchError
from tests.optim.test_parallel import SLOW_WORK

MAKES: dict[str, Callable[..., Optimizer]] = {
    "LARS": lambda params, **given: LARS(params, lr=0.1, **given),
    "LAMB": lambda params, **given: LAMB(params, lr=0.1, **given),
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
}
NUMBERS = [None, "3", math.nan, -1, torch.tensor([1.0, 2.0]), torch.tensor(1j), [1]]
MISSING = object()


def trained(by: str, steps: int = 2, named: bool = False) -> Optimizer:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator) for shape in [(4, 5), (7,)]]
    parameters: Any = [("one", tensors[0]), ("two", tensors[1])] if named else tensors
    optimizer = MAKES[by](parameters)
    for _ in range(steps):
        gradients = [torch.randn(one.shape, generator=generator) for one in tensors]
        if isinstance(optimizer, SGD):
            optimizer.step([SparseStream.from_dense(one.flatten()) for one in gradients])
            continue
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
    return optimizer


def with_value(entries: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        del entries[key]
    else:
        entries[key] = value


@st.composite
def damaged(draw: st.DrawFn, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimiser with one entry damaged, or without it."""
    state, group = copy.deepcopy(state), copy.deepcopy(state["param_groups"][0])
    where = draw(st.sampled_from(["top", "group", "entry", "parameter"]))
    if where == "top":
        key = draw(st.sampled_from(sorted(state)))
        with_value(state, key, draw(st.sampled_from([None, 7, "x", MISSING])))
    elif where == "group":
        settings = [key for key in group if key in ("lr", "momentum", "params")]
        key = draw(st.sampled_from(settings))
        wrong = [None, 7, [0], [0, 1, 2]] if key == "params" else NUMBERS
        with_value(group, key, draw(st.sampled_from([*wrong, MISSING])))
        state["param_groups"] = draw(st.sampled_from([[group], [], [7], 2 * [group]]))
    elif where == "entry":
        entries = state["state"][draw(st.sampled_from([0, 1]))]
        key = draw(st.sampled_from(sorted(entries)))
        value = entries[key]
        if isinstance(value, Tensor):
            poisoned = torch.full_like(value, draw(st.sampled_from([math.nan, math.inf])))
            kinds = [value.to(torch.complex64), value.int(), value.to("meta")]
            wrong = [None, 7, value[1:], value[None], poisoned, *kinds]
            entries[key] = draw(st.sampled_from(wrong))
        else:
            entries[key] = draw(st.sampled_from(NUMBERS))
    else:
        state["state"][0] = draw(st.sampled_from([None, 7, [1], state["state"][1]]))
    return state


@pytest.mark.parametrize("by", MAKES)
@given(data=st.data())
def test_a_damaged_state_changes_nothing_and_the_whole_one_loads(
    by: str, data: st.DataObject
) -> None:
    whole = trained(by).state_dict()
    state = data.draw(damaged(whole))
    optimizer = trained(by, 1)
    before = str(optimizer.state_dict())
    with pytest.raises(InputError) as caught:
        optimizer.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert str(optimizer.state_dict()) == before
    optimizer.load_state_dict(copy.deepcopy(whole))
    assert str(optimizer.state_dict()) == str(whole)


@pytest.mark.parametrize("by", MAKES)
def test_a_hook_may_mend_a_state_before_it_is_checked(by: str) -> None:
    whole = trained(by).state_dict()
    old = {"state": whole["state"], "param_groups": [{**whole["param_groups"][0], "lr": None}]}
    optimizer = trained(by, 1)
    optimizer.register_load_state_dict_pre_hook(lambda *_: copy.deepcopy(whole))
    optimizer.load_state_dict(old)
    assert str(optimizer.state_dict()) == str(whole)


@pytest.mark.parametrize("by", ["LARS", "LAMB"])
def test_a_state_of_named_parameters_in_another_order_is_refused(by: str) -> None:
    """Also of parameters of one shape, which nothing but their names tells apart."""
    first, second = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
    saved = MAKES[by]([("first", first), ("second", second)]).state_dict()
    other = MAKES[by]([("second", second), ("first", first)])
    said = "it has 'first' where the optimiser has 'second'; make the optimiser with its parameters"
    with pytest.raises(InputError, match=said):
        other.load_state_dict(saved)
    MAKES[by]([first, second]).load_state_dict(saved)  # names on one side alone cannot be compared


@pytest.mark.parametrize("by", ["LARS", "LAMB"])
@pytest.mark.parametrize("start", ["drawn", "equal", "other sizes", "where it does not pay"])
def test_ranks_with_other_parameters_or_another_order_are_told(by: str, start: str) -> None:
    """Before they would get one another's norms; sizes and values may be equal."""

    def on_rank(comm: Communicator) -> None:
        comm.rates = None if start == "where it does not pay" else SLOW_WORK
        generator = torch.Generator().manual_seed(5)
        rows = 3 + (start == "other sizes" and comm.rank == 2)
        drawn = [torch.randn(rows, 4, generator=generator) for _ in range(4)]
        parameters = [torch.ones(3, 4) if start == "equal" else one for one in drawn[:2]]
        for parameter, gradient in zip(parameters, drawn[2:], strict=True):
            parameter.grad = gradient
        before = [one.clone() for one in parameters]
        order = parameters[:: -1 if comm.rank == 2 else 1]
        optimizer = MAKES[by](order, parallel=True, group=comm)
        with pytest.raises(MismatchError, match="or the same in another order; give the optim"):
            optimizer.step()
        assert all(map(torch.equal, parameters, before))
        raise MismatchError("seen")

    with pytest.raises(MismatchError, match="seen"):
        simulate(3, on_rank)


@pytest.mark.parametrize("by", ["LARS", "LAMB"])
def test_the_order_is_compared_again_when_parameters_are_added(by: str) -> None:
    def on_rank(comm: Communicator) -> None:
        comm.rates = SLOW_WORK
        tensors = [torch.ones(3, 4), torch.full((3, 4), 2.0), torch.full((3, 4), 3.0)]
        optimizer = MAKES[by](tensors[:1], parallel=True, group=comm)
        for one in tensors:
            one.grad = one.clone()
        optimizer.step()
        for one in tensors[1:][:: -1 if comm.rank == 1 else 1]:
            optimizer.add_param_group({"params": [one]})
        with pytest.raises(MismatchError, match="or the same in another order"):
            optimizer.step()
        raise MismatchError("seen")

    with pytest.raises(MismatchError, match="seen"):
        simulate(2, on_rank)
