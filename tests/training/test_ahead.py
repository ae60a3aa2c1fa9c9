"""Where `Averager.ahead` says that parameters would be, on the simulated cluster."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim import SGD, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Bidirectional, Dense, Hierarchical, Scheme, TopK
from sparcel.core.training import Ahead
from sparcel.errors import InputError, MismatchError, SparcelWarning
from tests.evenly import even_averager
from tests.sampling import meeting
from tests.strategies import same_bits
from tests.training.ahead import (
    LARGE,
    OPTIMIZERS,
    SHARES,
    Make,
    Training,
    moved_by_torch,
    trained,
)
from tests.training.tensors import Named, owed_by


@pytest.mark.parametrize(("optimizer", "kept"), meeting(OPTIMIZERS, SHARES, each=1))
def test_parameters_move_as_the_optimiser_would_move_them_with_the_memory_as_gradient(
    optimizer: str, kept: str
) -> None:
    make, (scheme, share) = OPTIMIZERS[optimizer], SHARES[kept]

    def on_rank(comm: Communicator) -> bool:
        training = trained(comm, make, scheme())
        if "amsgrad" in training.optimizer.defaults:
            for one in training.optimizer.state.values():
                one["exp_avg_sq"] *= 0.25  # as after gradients that were larger
        before, expected = training.now(), moved_by_torch(training, share)
        state = copy.deepcopy(training.optimizer.state_dict())
        remembered, owed = (
            training.averager.handle.state_dict(),
            owed_by(training.averager, comm.rank),
        )
        inside = training.there()
        for name in before:
            if name in LARGE:
                moves = (inside[name] - before[name]).abs().max()
                torch.testing.assert_close(
                    inside[name], expected[name], rtol=0, atol=float(1e-5 * moves + 1e-7)
                )
                assert bool(moves) == bool(owed[name].any())  # half of the ranks of a node serve it
            else:
                assert same_bits(inside[name], before[name])
        after = training.now()
        assert all(same_bits(after[name], before[name]) for name in before)
        still = training.averager.handle.state_dict()
        assert all(same_bits(still[key], remembered[key]) for key in remembered)
        assert str(training.optimizer.state_dict()) == str(state)
        return any(owed[name].any() for name in LARGE)

    assert all(simulate(4, on_rank, ranks_per_node=2).results)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (OPTIMIZERS["SGD, momentum"], torch.float16),
        (partial(AdamW, lr=0.01, eps=1e-3), torch.bfloat16),
        (partial(AdamW, lr=0.01, eps=1e-3), torch.float64),
    ],
)
def test_other_dtypes_move(make: Make, dtype: torch.dtype) -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, make, TopK(0.05), dtype=dtype)
        before, expected = training.now(), moved_by_torch(training, 1.0)
        inside, after = training.there(), training.now()
        for name in before:
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(inside[name], expected[name], rtol=tolerance, atol=tolerance)
            assert same_bits(after[name], before[name])
        assert any(not same_bits(inside[name], before[name]) for name in LARGE)

    simulate(2, on_rank)


def test_ranks_agree_on_parameters_and_not_on_moved_values() -> None:
    def on_rank(comm: Communicator) -> tuple[Named, Named]:
        training = trained(comm, partial(SGD, lr=0.1), TopK(0.05))
        return training.now(), training.there()

    first, *others = simulate(3, on_rank).results
    for outside, inside in others:
        assert all(same_bits(outside[name], first[0][name]) for name in outside)
        assert all(not torch.equal(inside[name], first[1][name]) for name in LARGE)


def test_gradients_reach_the_parameters_as_if_these_had_moved() -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["Adam"], TopK(0.05))
        data, there = torch.randn(8, 40), training.there()
        leaves = {name: one.requires_grad_() for name, one in there.items()}
        functional_call(training.model, leaves, (data,)).square().mean().backward()
        training.optimizer.zero_grad()
        functional_call(training.model, training.ahead.moved(), (data,)).square().mean().backward()
        for name, parameter in training.parameters.items():
            assert same_bits(parameter.grad, leaves[name].grad)

    simulate(1, on_rank)


def test_without_memory_there_is_nowhere_to_go() -> None:
    """Before the first step, with a density of 1, for a dense scheme, and before Adam's first.

    So with LARS and LAMB, whose trust ratios are not known before.
    """

    def on_rank(comm: Communicator) -> None:
        fresh = Training(comm, OPTIMIZERS["SGD"], TopK(0.05))
        whole = trained(comm, OPTIMIZERS["SGD"], TopK(1.0))
        dense = trained(comm, OPTIMIZERS["SGD"], Dense())
        state = trained(comm, OPTIMIZERS["Adam"], TopK(0.05)).averager.handle.state_dict()
        names = ("Adam", "LARS", "LAMB")
        resumed = [Training(comm, OPTIMIZERS[name], TopK(0.05)) for name in names]
        for training in resumed:
            training.averager.handle.load_state_dict(state)
        for training in (fresh, whole, dense, *resumed):
            before = training.now()
            assert all(same_bits(one, before[name]) for name, one in training.there().items())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparcelWarning)  # of the density
        simulate(2, on_rank)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (partial(RMSprop, lr=0.01, momentum=0.5), "RMSprop"),
        (NAdam, "NAdam"),
        (RAdam, "RAdam"),
        (Adamax, "Adamax"),
    ],
)
def test_an_optimiser_of_another_kind_is_told_and_its_parameters_stay(
    make: Make, kind: str
) -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.warns(SparcelWarning, match=rf"{kind} updates '0\.weight'") as given:
            training = trained(comm, make, TopK(0.05))
        assert [one.filename for one in given] == [trained.__code__.co_filename]  # the caller
        assert not training.ahead.moved()

    simulate(1, on_rank)  # one rank, because a warning is the process's


def test_muon_is_warned_of_what_is_not_recommended_for_it() -> None:
    few = Bidirectional(1.0, format="packed:8", answer="packed:6")
    whole = Bidirectional(1.0, format="packed:8")
    suits = [Dense(), TopK(1.0), whole, Hierarchical(whole, 1)]

    def on_rank(comm: Communicator, scheme: Scheme) -> None:
        training = trained(comm, OPTIMIZERS["SGD"], scheme)
        matrices = [one for one in training.parameters.values() if one.ndim == 2]
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            training.ahead.follow(Muon(matrices))
        said = [str(one.message) for one in given]
        assert all("attach(model, optimizer=[muon, adamw]) sends all" in one for one in said)
        assert bool(said) == (scheme not in suits)

    for scheme in [*suits, few, TopK(0.05), Hierarchical(TopK(0.05), 1)]:
        simulate(1, lambda comm, scheme=scheme: on_rank(comm, scheme))


def test_roundings_alone_move_nothing_unless_a_layer_has_a_density_of_its_own() -> None:
    def on_rank(comm: Communicator) -> None:
        scheme = Bidirectional(1.0, format="packed:4")
        training = trained(comm, OPTIMIZERS["SGD"], scheme)
        assert training.averager.handle.memory_norm() > 0
        assert not training.ahead.moved()
        training.averager.handle.switch("topk", density=0.1)
        assert training.ahead.moved()

    simulate(2, on_rank)


def test_settings_and_state_are_those_that_the_optimiser_has_at_that_moment() -> None:
    """A schedule may change them, and loading a state replaces them."""

    def on_rank(comm: Communicator) -> None:
        for name in ("SGD, momentum", "Adam"):
            training = trained(comm, OPTIMIZERS[name], TopK(0.05))
            for load in (False, True):
                if load:
                    training.optimizer.load_state_dict(training.optimizer.state_dict())
                for group in training.optimizer.param_groups:
                    group["lr"] *= 3
                expected, before = moved_by_torch(training, 1.0), training.now()
                inside = training.there()
                for weight in LARGE:
                    moves = float((expected[weight] - before[weight]).abs().max())
                    torch.testing.assert_close(
                        inside[weight], expected[weight], rtol=0, atol=1e-5 * moves + 1e-7
                    )

    simulate(1, on_rank)


def test_an_optimiser_can_be_told_later_and_others_do_not_matter() -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["SGD"], TopK(0.05))
        ahead = Ahead(training.parameters, training.averager._session.residuals)
        ahead.follow(SGD([torch.zeros(3, requires_grad=True)], lr=0.1))
        ahead.follow(RMSprop([torch.zeros(3, requires_grad=True)]))  # no warning
        before = training.now()
        assert all(same_bits(one, before[name]) for name, one in ahead.moved().items())
        ahead.follow(training.optimizer)
        expected, moved = training.ahead.moved(), ahead.moved()
        assert moved.keys() == expected.keys() == before.keys()
        assert all(same_bits(moved[name], expected[name]) for name in LARGE)
        (name,) = ahead.moved(["2.weight"])
        assert name == "2.weight"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(1, on_rank)


def test_memory_of_scaled_gradients_moves_as_that_of_others() -> None:
    like = {"weight": nn.Parameter(torch.zeros(40, 50))}

    def on_rank(comm: Communicator) -> None:
        moved = []
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
            averager = even_averager(like, TopK(0.05), group=comm, scaler=scaler)
            generator = torch.Generator().manual_seed(comm.rank)
            gradient = torch.randn(40, 50, generator=generator) * (1024 if scaler else 1)
            averager.average({"weight": gradient})
            mine = {"weight": nn.Parameter(torch.zeros(40, 50))}
            moved.append(averager.ahead(mine, SGD(mine.values(), lr=0.1)).moved()["weight"])
        assert moved[0].any()
        assert torch.equal(*moved)

    simulate(2, on_rank)


def test_an_exchange_moves_tensors_that_it_knows_and_once() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager({"weight": torch.zeros(40, 50)}, TopK(0.05), group=comm)
        with pytest.raises(InputError, match="the name of a tensor to move ahead cannot be"):
            averager.ahead({"module.weight": torch.zeros(40, 50)})
        averager.ahead({"weight": torch.zeros(40, 50)})
        with pytest.raises(InputError, match="moved ahead already"):
            averager.ahead({"weight": torch.zeros(40, 50)})

    simulate(1, on_rank)


def test_ranks_that_front_load_and_ranks_that_do_not_are_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        like = {"weight": torch.zeros(40, 50)}
        even_averager(like, TopK(0.05), group=comm, frontload=comm.rank > 0)

    with pytest.raises(MismatchError, match="average something else"):
        simulate(2, on_rank)
