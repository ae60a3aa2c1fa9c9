"""Modules whose `state_dict` gives something else than their parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparcel.errors import InputError
from sparcel.products.delta import Publisher, Subscriber, apply_, assign_, encode
from tests.delta.pairs import copied, same, wholes

State = dict[str, Any]


def changed(hook: Callable[[State], None], size: int = 4) -> nn.Module:
    """Return a module whose state dict a hook changes."""
    module = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))

    def change(module: nn.Module, state: State, prefix: str, metadata: State) -> None:
        hook(state)

    module.register_state_dict_post_hook(change)
    return module


def cast(state: State) -> None:
    state["0.weight"] = state["0.weight"].bfloat16()


def transposed(state: State) -> None:
    state["0.weight"] = state["0.weight"].t().contiguous()


def cloned(state: State) -> None:
    state["1.running_mean"] = state["1.running_mean"].clone()


def fused(state: State) -> None:
    state["0.both"] = torch.cat([state.pop("0.weight"), state.pop("0.bias")[None]])


def written(module: nn.Module, version: dict[str, Tensor], how: str, folder: Path) -> None:
    """Make a module a version."""
    if how == "assign_":
        assign_(module, wholes(**version))
    elif how == "apply_":
        apply_(module, encode(version, module.state_dict()))
    else:
        Publisher(folder).publish(version)
        Subscriber(folder, module).update()


WRITERS = ("assign_", "apply_", "Subscriber")


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("hook", [cast, transposed, cloned, fused])
def test_a_copy_is_not_taken_for_the_weights(
    tmp_path: Path, hook: Callable[[State], None], how: str
) -> None:
    module = changed(hook)
    version = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    before = copied(dict(module.named_parameters()))
    (name,) = [name for name, one in module.state_dict().items() if not inside(one, module)]
    with pytest.raises(InputError, match=rf"^{name} is a copy .*; register it, pass tensors"):
        written(module, version, how, tmp_path)
    assert same(before, dict(module.named_parameters()))


def inside(tensor: Tensor, module: nn.Module) -> bool:
    own = [*module.parameters(), *module.buffers()]
    return tensor.data_ptr() in [one.data_ptr() for one in own]


def turned(state: State) -> None:
    """Give views: rows as columns, and a matrix by its halves."""
    first, second = state.pop("0.weight").chunk(2)
    state |= {"0.first": first.t(), "0.second": second}


@pytest.mark.parametrize("how", WRITERS)
def test_views_of_the_weights_are_written(tmp_path: Path, how: str) -> None:
    module, other = changed(turned), changed(turned)
    written(module, other.state_dict(), how, tmp_path)
    assert same(module.state_dict(), other.state_dict())
    assert torch.equal(module[0].weight, other[0].weight)


@pytest.mark.parametrize("how", WRITERS)
def test_buffers_that_are_not_in_the_state_may_be_of_any_layout(tmp_path: Path, how: str) -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    module.register_buffer("later", nn.UninitializedBuffer(), persistent=False)
    other = nn.Linear(3, 3)
    written(module, other.state_dict(), how, tmp_path)
    assert same(module.state_dict(), other.state_dict())


class Extra(nn.Linear):
    """A layer that keeps something beside its weights, as those for 8-bit floats do."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [None, b"state", {"scale": 2}, torch.ones(3)])
def test_extra_state_is_left_out(tmp_path: Path, extra: Any) -> None:
    trained, served = nn.Sequential(Extra(3, 3)), nn.Sequential(Extra(3, 3))
    trained[0].extra = extra
    Publisher(tmp_path).publish(trained)
    subscriber = Subscriber(tmp_path, served)
    subscriber.update()
    assert torch.equal(served[0].weight, trained[0].weight)
    assert served[0].extra is None
    assert set(subscriber.tensors) == {"0.weight", "0.bias"}
    with pytest.raises(InputError, match=r"^0._extra_state is no tensor but"):
        Publisher(tmp_path / "state").publish({**trained.state_dict(), "0._extra_state": 1})
