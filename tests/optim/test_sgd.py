"""SGD for streams changes parameters as torch's change them with dense gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel import SparseStream
from sparcel.core.optim import SGD
from sparcel.errors import InputError

SHAPES = [(4, 5), (7,), (1,)]


def gradients(seed: int) -> list[Tensor]:
    """Return gradients of small integers: the first is mostly zero, the last is dense."""
    generator = torch.Generator().manual_seed(seed)
    shares = (0.2, 0.5, 1.0)
    return [
        torch.randint(1, 5, shape, generator=generator).float()
        * (torch.rand(shape, generator=generator) <= share)
        for shape, share in zip(SHAPES, shares, strict=True)
    ]


def as_streams(tensors: list[Tensor]) -> list[SparseStream]:
    return [SparseStream.from_dense(tensor.flatten()) for tensor in tensors]


@given(st.sampled_from([0.0, 0.5, 0.9]), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_steps_are_those_of_torch(momentum: float, seeds: list[int]) -> None:
    own, theirs = ([torch.ones(shape, requires_grad=True) for shape in SHAPES] for _ in range(2))
    optimizer, expected = SGD(own, 0.25, momentum), torch.optim.SGD(theirs, 0.25, momentum)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, expected)]
    for seed in seeds:
        optimizer.step(as_streams(gradients(seed)))
        for parameter, gradient in zip(theirs, gradients(seed), strict=True):
            parameter.grad = gradient
        expected.step()
        for schedule in schedules:
            schedule.step()
    for parameter, other in zip(own, theirs, strict=True):
        assert torch.equal(parameter, other)


def test_momentum_goes_on_from_torchs_state() -> None:
    parameter, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    theirs, optimizer = torch.optim.SGD([other], 0.5, 0.5), SGD([parameter], 0.5, 0.5)
    other.grad = torch.tensor([1.0, 0.0, 2.0])
    theirs.step()
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.step(as_streams([torch.zeros(3)]))
    assert parameter.tolist() == [0.75, 1.0, 0.5]


def test_rows_are_applied_to_a_matrix() -> None:
    parameter = torch.zeros(3, 2)
    rows = SparseStream(torch.tensor([0, 2]), torch.ones(2, 2), 3)
    SGD([parameter], 0.5).step([rows])
    assert parameter.tolist() == [[-0.5, -0.5], [0, 0], [-0.5, -0.5]]


def test_nothing_changes_if_one_update_is_not_finite() -> None:
    parameters = [torch.ones(3), torch.ones(3)]
    optimizer = SGD(parameters, 0.5, 0.5)
    stream = SparseStream.from_dense(torch.tensor([1.0, 0, 0]))
    optimizer.step([stream, stream.void_like()])
    assert all(parameter.tolist() == [1, 1, 1] for parameter in parameters)
    optimizer.step([stream, stream])
    assert parameters[0].tolist() == [0.5, 1, 1]


def test_updates_must_fit_the_parameters() -> None:
    parameters = [torch.ones(3), torch.ones(2)]
    stream = SparseStream.from_dense(torch.ones(3))
    for updates in ([stream], [stream, stream]):
        with pytest.raises(InputError, match=r"of sizes \[3, 2\]"):
            SGD(parameters, 0.5).step(updates)
    assert parameters[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("settings", "name"), [((-1,), "lr"), ((1, 1), "momentum")])
def test_settings_are_checked(settings: tuple[float, ...], name: str) -> None:
    with pytest.raises(InputError, match=name):
        SGD([torch.ones(1)], *settings)
