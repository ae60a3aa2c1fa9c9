"""LARS and LAMB alone: equal to the plain reference bit by bit, and as torch's optimisers are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from sparcel.core.optim import LAMB, LARS
from sparcel.errors import InputError
from tests.optim.reference import lamb, lars
from tests.strategies import FLOATS, same_bits

Rule = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None]
RULES: dict[type[Optimizer], Rule] = {LARS: lars, LAMB: lamb}

both = pytest.mark.parametrize("kind", RULES)
shapes = st.sampled_from([(), (1,), (0,), (3, 0), (7,), (4, 5), (2, 3, 3, 2), (300, 400)])
common = {
    "lr": st.sampled_from([0.0, 0.1, 3.0]),
    "weight_decay": st.sampled_from([0.0, 0.01]),
    "exclude_vectors": st.booleans(),
    "foreach": st.sampled_from([None, True, False]),
}
settings_of: dict[type[Optimizer], st.SearchStrategy[dict[str, Any]]] = {
    LARS: st.fixed_dictionaries(
        {
            **common,
            "momentum": st.sampled_from([0.0, 0.9]),
            "trust": st.sampled_from([0.001, 1.0]),
        }
    ),
    LAMB: st.fixed_dictionaries(
        {
            **common,
            "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
            "eps": st.sampled_from([1e-6, 0.1]),
        }
    ),
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a tensor, some of zeros, some laid out in another order."""
    shape, dtype = draw(shapes), draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = torch.randn(shape, generator=generator).to(dtype) * draw(st.sampled_from([0, 1, 1]))
    if draw(st.booleans()) and made.ndim == 4:
        made = made.contiguous(memory_format=torch.channels_last)
    return made


def gradient_of(parameter: Tensor, step: int) -> Tensor | None:
    """Return a gradient in the parameter's layout; none or zeros at times."""
    generator = torch.Generator().manual_seed(1000 * step + parameter.numel())
    if parameter.numel() % 7 == step:
        return None
    scale = 0 if parameter.numel() % 5 == step else 0.1
    gradient = torch.empty_like(parameter)
    return gradient.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@both
@settings(max_examples=15)
@given(st.data())
def test_steps_are_those_of_the_reference_bit_by_bit(
    kind: type[Optimizer], data: st.DataObject
) -> None:
    drawn = data.draw(
        st.lists(
            st.tuples(st.lists(tensors(), min_size=1, max_size=4), settings_of[kind]),
            min_size=1,
            max_size=3,
        )
    )
    groups = [{"params": [one.clone() for one in starts], **own} for starts, own in drawn]
    optimizer = kind(groups, **drawn[0][1])
    states: list[list[dict[str, Any]]] = [[{} for _ in starts] for starts, _ in drawn]
    for step in range(3):
        for group, (starts, own), own_states in zip(groups, drawn, states, strict=True):
            for parameter, w, state in zip(group["params"], starts, own_states, strict=True):
                parameter.grad = g = gradient_of(parameter, step)
                if g is not None:
                    RULES[kind](w, g, state, own)
        optimizer.step()
    for group, (starts, _), own_states in zip(groups, drawn, states, strict=True):
        for parameter, w, state in zip(group["params"], starts, own_states, strict=True):
            assert same_bits(parameter, w)
            found = optimizer.state[parameter]
            assert set(found) == set(state)
            assert all(
                same_bits(found[key], value)
                if isinstance(value, Tensor)
                else str(found[key]) == str(value)  # NaN is NaN
                for key, value in state.items()
            )


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def train(net: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        net(data).square().mean().backward()
        optimizer.step()


MAKES: dict[str, Callable[..., Optimizer]] = {
    "LARS": partial(LARS, lr=1.0, weight_decay=0.01),
    "LAMB": partial(LAMB, lr=0.01, weight_decay=0.01),
}
each = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@each
def test_training_goes_on_from_a_checkpoint_bit_by_bit(make: Callable[..., Optimizer]) -> None:
    net, other = model(), model()
    optimizer, resumed = make(net.parameters()), make(other.parameters())
    train(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert 0 < optimizer.state[one]["trust_ratio"] == resumed.state[two]["trust_ratio"]
    train(net, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert all(map(same_bits, net.parameters(), other.parameters()))


@each
def test_the_state_of_another_optimiser_is_refused(make: Callable[..., Optimizer]) -> None:
    net = model()
    state = torch.optim.Adam(net.parameters()).state_dict()
    with pytest.raises(InputError, match=r"not the state of a LA.*: its groups have no exclude"):
        make(net.parameters()).load_state_dict(state)


@each
def test_training_helps_and_schedulers_change_the_rate(make: Callable[..., Optimizer]) -> None:
    net = model()
    optimizer = make(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    schedule.step()
    after = [one.detach().clone() for one in net.parameters()]
    second = optimizer.step(closure)
    assert second < first
    moved = [one.detach() - old for one, old in zip(net.parameters(), after, strict=True)]
    momentum = optimizer.defaults.get("momentum", 0)
    assert any(bool(one.any()) for one in moved) == bool(momentum)


@each
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("where", [0, 1], ids=["matrix", "vector"])
def test_nothing_changes_if_one_gradient_is_not_finite(
    make: Callable[..., Optimizer], bad: float, where: int
) -> None:
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, range(2))
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradient = list(net.parameters())[where].grad
    assert gradient is not None
    gradient.view(-1)[-1] = bad
    optimizer.step()
    assert all(same_bits(one, before[name]) for name, one in net.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)


@each
def test_groups_can_be_added_and_have_settings_of_their_own(
    make: Callable[..., Optimizer],
) -> None:
    first, second = torch.ones(3, 3), torch.ones(3)
    optimizer = make([("first", first)])
    optimizer.add_param_group({"params": [("second", second)], "exclude_vectors": False})
    first.grad, second.grad = torch.ones(3, 3), torch.ones(3)
    optimizer.step()
    assert all(optimizer.state[one]["trust_ratio"] not in (0, 1) for one in (first, second))


@each
def test_steps_without_gradients_and_without_parameters_do_nothing(
    make: Callable[..., Optimizer],
) -> None:
    parameter = torch.ones(2, 2, requires_grad=True)
    optimizer = make([parameter])
    optimizer.step()
    assert parameter.tolist() == [[1, 1], [1, 1]]
    assert not optimizer.state_dict()["state"]


WRONG = [
    ({"lr": -1}, "lr must be at least 0"),
    ({"weight_decay": -1}, "weight_decay must be"),
    ({"exclude_vectors": "no"}, "exclude_vectors must be True or False"),
    ({"foreach": 1}, "foreach must be True or False"),
    ({"group": object()}, "parallel=True only"),
    ({"parallel": "yes"}, "parallel must be True or False"),
]
WRONG_OF = {
    "LARS": [*WRONG, ({"momentum": 1}, r"momentum must lie in"), ({"trust": 0}, "trust must be")],
    "LAMB": [
        *WRONG,
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, r"each of betas must lie in \[0, 1"),
        ({"eps": 0}, "eps must be more than 0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [(name, *wrong) for name, wrongs in WRONG_OF.items() for wrong in wrongs],
)
def test_settings_are_checked(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MAKES[name]([torch.ones(1)], **settings)
    if not set(settings) & {"group", "parallel"}:
        optimizer = MAKES[name]([torch.ones(1)])
        with pytest.raises(InputError, match=message):
            optimizer.add_param_group({"params": [torch.ones(2)], **settings})
        assert len(optimizer.param_groups) == 1


@each
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_parameters_must_be_of_float_dtypes(
    make: Callable[..., Optimizer], dtype: torch.dtype
) -> None:
    with pytest.raises(InputError, match=f"float dtype, got {dtype}"):
        make([torch.ones(2, dtype=dtype)])


@each
def test_sparse_gradients_are_refused_and_nothing_changes(make: Callable[..., Optimizer]) -> None:
    dense, table = torch.ones(3, 3, requires_grad=True), nn.Embedding(5, 2, sparse=True)
    optimizer = make([dense, table.weight])
    dense.grad = torch.ones(3, 3)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(InputError, match="SparseAdam, or make its layer with sparse=False"):
        optimizer.step()
    assert bool((dense == 1).all())
