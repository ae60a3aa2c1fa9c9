"""How far two steps of Muon go, against steps of torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

from sparcel.core.optim import muon_two_steps

SHAPES = [(40, 30), (30, 60), (64, 64)]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
adjustments = pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])


def muon(shape: tuple[int, int], **settings: Any) -> tuple[nn.Parameter, Muon, dict[str, Any]]:
    """Return a parameter with an optimiser that has done a step, and its group's settings."""
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.0, **settings)
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    (group,) = optimizer.param_groups
    return parameter, optimizer, {**group, "shape": parameter.shape}


def move(gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    rate, direction = muon_two_steps(gradient, group, state)
    return rate * direction


@shapes
@adjustments
def test_with_a_huge_gradient_it_is_two_steps_of_muon_long(
    shape: tuple[int, int], adjust_lr_fn: str | None
) -> None:
    parameter, optimizer, group = muon(shape, adjust_lr_fn=adjust_lr_fn)
    before = parameter.detach().clone()
    gradient = 1e6 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    expected = 1 + group["momentum"]
    found = move(gradient, group, optimizer.state[parameter])
    parameter.grad = gradient
    optimizer.step()
    # The singular values of torch's updates are between 0.5 and 1.5.
    assert float(found.norm() / (before - parameter.detach()).norm()) == pytest.approx(
        expected, rel=0.3
    )


@shapes
def test_it_grows_with_a_small_gradient_and_points_there(shape: tuple[int, int]) -> None:
    parameter, optimizer, group = muon(shape)
    state = optimizer.state[parameter]
    gradient = 1e-3 * state["momentum_buffer"].flip(0)
    once, twice = (move(factor * gradient, group, state) for factor in (1, 2))
    torch.testing.assert_close(twice, 2 * once)
    # An update is that long, and the gradient and its momentum add that share to the momentum.
    update = 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * min(shape) ** 0.5
    share = 1e-3 * (1 - group["momentum"] ** 2) / group["momentum"]
    torch.testing.assert_close(once.norm(), torch.tensor(update * share), rtol=1e-3, atol=0)
    torch.testing.assert_close(once / once.norm(), gradient / gradient.norm())


@shapes
def test_it_depends_on_no_scale_of_gradients_as_muon_does_not(shape: tuple[int, int]) -> None:
    parameter, optimizer, group = muon(shape)
    state = optimizer.state[parameter]
    gradient = torch.randn(shape)
    scaled = {"momentum_buffer": 64 * state["momentum_buffer"]}
    torch.testing.assert_close(move(64 * gradient, group, scaled), move(gradient, group, state))


@shapes
def test_shards_move_about_as_the_whole_does(shape: tuple[int, int]) -> None:
    parameter, optimizer, group = muon(shape)
    state = optimizer.state[parameter]
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    shards = [
        move(part, group, {"momentum_buffer": momentum})
        for part, momentum in zip(gradient.chunk(2), state["momentum_buffer"].chunk(2), strict=True)
    ]
    whole = move(gradient, group, state)
    torch.testing.assert_close(torch.cat(shards), whole, rtol=0.1, atol=0)


@shapes
def test_nothing_moves_before_the_first_step_and_without_gradients(shape: tuple[int, int]) -> None:
    parameter, optimizer, group = muon(shape)
    assert not move(torch.ones(shape), group, {}).any()
    for momentum in (torch.zeros(shape), optimizer.state[parameter]["momentum_buffer"]):
        assert not move(torch.zeros(shape), group, {"momentum_buffer": momentum}).any()
