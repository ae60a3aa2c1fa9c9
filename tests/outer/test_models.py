"""What islands share of a model: buffers of all kinds, memory that moves, modules that change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim import SGD

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.errors import InputError, SparcelWarning
from sparcel.products.outer import Outer, attach, diloco, sparseloco

PLAIN = diloco(lr=1.0, momentum=0.0)
"""What is shared becomes the mean of what islands have."""


class Net(nn.Module):
    """A layer, and what a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        for one in self.parameters():
            nn.init.zeros_(one)


class Island:
    """An island that adds its number and 1 to all parameters; each two steps all average."""

    def __init__(self, comm: Communicator, model: nn.Module, method: Any = PLAIN, **settings: Any):
        self.rank, self.model = comm.rank, model
        self.optimizer = SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
        outer = attach(model, self.optimizer, method, every=2, islands=comm, **settings)
        assert isinstance(outer, Outer)
        self.outer = outer

    def steps(self, number: int, change: Callable[[], None] = lambda: None) -> Island:
        for _ in range(number):
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, -self.rank - 1)
            change()
            self.optimizer.step()
        return self


def on_islands(work: Callable[[Communicator], Any], islands: int = 3) -> list[Any]:
    results: list[Any] = simulate(islands, work).results
    return results


MASK = nn.Transformer.generate_square_subsequent_mask(64)


@pytest.mark.parametrize("name", ["causal", "mask"])
def test_what_no_island_changes_is_not_exchanged(name: str) -> None:
    """Not even a mask of zeros and -inf, whatever it is called."""

    def on_rank(comm: Communicator, with_it: bool) -> Any:
        model = Net()
        if with_it:
            model.register_buffer(name, MASK.clone())
        island = Island(comm, model).steps(6)
        assert not with_it or torch.equal(model.get_buffer(name), MASK)
        return model.layer.weight.tolist(), island.outer.stats().bytes_sent

    plain = on_islands(lambda comm: on_rank(comm, False))
    assert on_islands(lambda comm: on_rank(comm, True)) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_buffer_that_one_island_changes_becomes_the_average(dtype: torch.dtype) -> None:
    def on_rank(comm: Communicator) -> Any:
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(3))
        model.register_buffer("mean", torch.full((5,), 3.0, dtype=dtype))
        model.register_buffer("other", torch.ones(2))
        model.register_buffer("elsewhere", torch.ones(2, device="meta"))
        model.register_buffer("sparse", torch.eye(2).to_sparse())
        island = Island(comm, model)

        def change() -> None:
            if comm.rank == 1:
                model.mean = model.mean + 3  # another tensor in its place

        island.steps(2, change)
        return model.mean.tolist(), model.other.tolist()

    assert on_islands(on_rank) == [([5.0] * 5, [1.0] * 2)] * 3


def test_masks_and_power_iterations_stay_each_islands_own() -> None:
    def on_rank(comm: Communicator) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8))
        )
        model.register_buffer("weight_mask", torch.ones(4))
        island = Island(comm, model)
        vectors = [one for name, one in model.named_buffers() if name.endswith(("_u", "_v"))]
        assert len(vectors) == 4

        def change() -> None:
            model.weight_mask[comm.rank] = 0
            for one in vectors:
                one[comm.rank] += 1

        before = [one.clone() for one in vectors]
        island.steps(2, change)
        assert set(island.outer.shared) == {name for name, _ in model.named_parameters()}
        assert model.weight_mask.sum() == 3
        for one, was in zip(vectors, before, strict=True):
            assert float(one[comm.rank] - was[comm.rank]) == pytest.approx(2)

    on_islands(on_rank)


def moves(model: nn.Module) -> None:
    for one in model.parameters():
        one.data = one.data.clone()


@pytest.mark.parametrize(
    "change",
    [moves, lambda model: model.double().float(), lambda model: model.half()],
    ids=["moved", "there and back", "another dtype"],
)
def test_memory_may_move(change: Callable[[nn.Module], Any]) -> None:
    def on_rank(comm: Communicator) -> Any:
        model = Net()
        island = Island(comm, model).steps(2)
        change(model)
        island.steps(2)
        return model.layer.bias.tolist()

    assert on_islands(on_rank) == [[8.0] * 3] * 3


def unfreezes(model: Any) -> None:
    model.frozen.requires_grad_(True)


def unties(model: Any) -> None:
    model.tied = nn.Parameter(model.layer.weight.detach().clone())


def grows(model: Any) -> None:
    model.layer = nn.Linear(2, 4)


def drops(model: Any) -> None:
    model.layer.bias = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreezes, "'frozen' was frozen, or not there, and is of shape"),
        (unties, "'layer.weight' was frozen, or not there"),
        (grows, r"'layer.bias' was of shape \[3\] on cpu, and is of shape \[4\] on cpu now"),
        (drops, "'layer.bias' was of shape .*, and is no parameter of the model now"),
        (lambda model: model.to("meta"), r"'.*' was of shape .* on cpu, and is .* on meta now"),
    ],
    ids=["unfrozen", "untied", "replaced", "gone", "away"],
)
def test_who_changes_the_model_is_told(change: Callable[[Any], Any], words: str) -> None:
    def on_rank(comm: Communicator) -> None:
        model = Net()
        model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        model.tied = model.layer.weight
        island = Island(comm, model).steps(3)
        change(model)
        with pytest.raises(InputError, match=words):
            island.optimizer.step()

    on_islands(on_rank)


def test_parameters_may_be_frozen() -> None:
    def on_rank(comm: Communicator) -> Any:
        model = Net()
        island = Island(comm, model).steps(1)
        model.layer.weight.requires_grad_(False)
        island.steps(1)
        return model.layer.weight.tolist()

    first, *others = on_islands(on_rank)
    assert others == [first] * 2


def test_both_parts_of_complex_numbers_are_averaged() -> None:
    def on_rank(comm: Communicator) -> Any:
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        island = Island(comm, model)
        for _ in range(2):
            model.p.grad = torch.full_like(model.p, -comm.rank - 2j)
            island.optimizer.step()
        assert island.outer.shared["p"].shape == (3, 2)
        return model.p.tolist()

    assert on_islands(on_rank) == [[2 + 4j] * 3] * 3


def spoilt(comm: Communicator) -> nn.Module:
    model = Net()
    model.layer.weight.data[0] = torch.inf
    return model


def changing(comm: Communicator) -> nn.Module:
    model = Net()
    model.register_buffer("bounds", torch.full((3,), -torch.inf))
    return model


def lazy(comm: Communicator) -> nn.Module:
    return nn.LazyLinear(3)


def away(comm: Communicator) -> nn.Module:
    return nn.Linear(3, 3, device="meta")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (spoilt, "'layer.weight' holds NaN or Inf"),
        (changing, "the buffer 'bounds' held NaN or Inf when islands began, and has changed"),
        (lazy, "'weight' has no values yet"),
        (away, "'weight' has no values yet"),
    ],
)
def test_what_cannot_be_exchanged_is_named(make: Callable[[Any], nn.Module], words: str) -> None:
    def on_rank(comm: Communicator) -> None:
        model = make(comm)

        def change() -> None:
            if comm.rank == 1:
                model.bounds[0] = 1.0

        with pytest.raises(InputError, match=words):
            Island(comm, model).steps(2, change)

    on_islands(on_rank)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_an_island_that_goes_on_from_what_is_shared_says_why(buffers: Any) -> None:
    """Its own buffers go back, too, if they hold NaN."""

    def on_rank(comm: Communicator) -> None:
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8))
        model.load_state_dict({name: one.clone() for name, one in STATE.items()})
        island = Island(comm, model, buffers=buffers).steps(2)

        def change() -> None:
            if comm.rank == 1:
                for one in filter(torch.is_floating_point, model.buffers()):
                    one.fill_(torch.nan)
                model[1].bias.grad = torch.full((8,), torch.nan)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            island.steps(2, change)
        said = [one for one in caught if issubclass(one.category, SparcelWarning)]
        assert len(said) == (comm.rank == 1)
        for one in said:
            assert "'1.bias'" in str(one.message)
            assert "held NaN or Inf: this island goes on from what" in str(one.message)
            assert one.filename == __file__
        state = model.state_dict().values()
        assert all(bool(one.isfinite().all()) for one in state if one.is_floating_point())

    on_islands(on_rank)


def test_a_buffer_that_holds_nan_is_left_out_and_heals() -> None:
    """As after a forward pass that overflows, whose step a GradScaler skips."""

    def on_rank(comm: Communicator) -> Any:
        model = Net()
        model.register_buffer("mean", torch.zeros(2))
        island = Island(comm, model)

        def change() -> None:
            model.mean.add_(comm.rank)
            if comm.rank == 1:
                model.mean[0] = torch.inf

        if comm.rank == 1:
            with pytest.warns(SparcelWarning, match="the buffers .'mean'. hold NaN or Inf"):
                island.steps(2, change)
        else:
            island.steps(2, change)
        return model.mean.tolist(), model.layer.bias.tolist()

    assert on_islands(on_rank) == [([pytest.approx(4 / 3)] * 2, [4.0] * 3)] * 3


STATE = nn.Sequential(
    parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8)
).state_dict()


@pytest.mark.parametrize("size", [1, 7, 64, 65, 200, 399, 400])
def test_averages_by_senders_of_small_models(size: int) -> None:
    def on_rank(comm: Communicator) -> Tensor:
        model = nn.ParameterList([torch.zeros(size)])
        Island(comm, model, sparseloco(divisor="sent")).steps(4)
        return model[0].detach()

    first, *others = on_islands(on_rank)
    assert bool(first.any())
    assert all(torch.equal(one, first) for one in others)
