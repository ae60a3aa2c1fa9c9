"""Parameters inside `Averager.ahead`, and outside of it, on the simulated cluster."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adamax, AdamW, NAdam, RAdam, RMSprop

from sparcel import simulate
from sparcel.comm import Communicator
from sparcel.errors import InputError, MismatchError, SparcelWarning
from sparcel.schemes import Dense, Scheme, TopK
from sparcel.training import Ahead, Averager
from tests.strategies import same_bits
from tests.training.ahead import (
    LARGE,
    OPTIMIZERS,
    SHARES,
    Make,
    Training,
    moved_by_torch,
    optimizers,
    trained,
)
from tests.training.tensors import Named, owed_by


@optimizers
@pytest.mark.parametrize(("scheme", "share"), SHARES.values(), ids=SHARES)
def test_a_block_moves_as_the_optimiser_would_with_the_memory_as_gradient_and_exactly_back(
    make: Make, scheme: Callable[[], Scheme], share: float
) -> None:
    def on_rank(comm: Communicator) -> bool:
        training = trained(comm, make, scheme())
        if "amsgrad" in training.optimizer.defaults:
            for one in training.optimizer.state.values():
                one["exp_avg_sq"] *= 0.25  # as after gradients that were larger
        before, expected = training.now(), moved_by_torch(training, share)
        state = copy.deepcopy(training.optimizer.state_dict())
        remembered, owed = training.averager.state_dict(), owed_by(training.averager, comm.rank)
        with training.ahead:
            inside = training.now()
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
        still = training.averager.state_dict()
        assert all(same_bits(still[key], remembered[key]) for key in remembered)
        assert str(training.optimizer.state_dict()) == str(state)
        return any(owed[name].any() for name in LARGE)

    assert all(simulate(4, on_rank, ranks_per_node=2).results)


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD, momentum"], partial(AdamW, lr=0.01, eps=1e-3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_move_and_come_back(make: Make, dtype: torch.dtype) -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, make, TopK(0.05), dtype=dtype)
        before, expected = training.now(), moved_by_torch(training, 1.0)
        with training.ahead:
            inside = training.now()
        after = training.now()
        for name in before:
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(inside[name], expected[name], rtol=tolerance, atol=tolerance)
            assert same_bits(after[name], before[name])
        assert any(not same_bits(inside[name], before[name]) for name in LARGE)

    simulate(2, on_rank)


def test_ranks_agree_outside_and_not_inside_and_nothing_is_lost() -> None:
    def on_rank(comm: Communicator) -> tuple[Named, Named]:
        training = trained(comm, partial(SGD, lr=0.1), TopK(0.05))
        with training.ahead:
            inside = training.now()
        return training.now(), inside

    first, *others = simulate(3, on_rank).results
    for outside, inside in others:
        assert all(same_bits(outside[name], first[0][name]) for name in outside)
        assert all(not torch.equal(inside[name], first[1][name]) for name in LARGE)


def fail_inside(training: Training, seen: Named) -> None:
    with training.ahead:
        seen |= training.now()
        raise LookupError


def test_parameters_come_back_after_an_exception_and_the_next_block_moves_again() -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["Adam"], TopK(0.05))
        before, inside = training.now(), {}
        with pytest.raises(LookupError):
            fail_inside(training, inside)
        assert all(same_bits(one, before[name]) for name, one in training.now().items())
        with training.ahead:
            again = training.now()
        assert all(same_bits(again[name], inside[name]) for name in inside)
        assert not torch.equal(again["0.weight"], before["0.weight"])

    simulate(2, on_rank)


def test_who_is_ahead_already_moves_no_further() -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["SGD, momentum"], TopK(0.05))
        before = training.now()
        with training.ahead:
            inside = training.now()
            training.ahead.move()
            with training.ahead:
                twice = training.now()
        training.ahead.back()
        assert all(same_bits(twice[name], inside[name]) for name in inside)
        assert all(same_bits(one, before[name]) for name, one in training.now().items())

    simulate(2, on_rank)


def test_without_memory_there_is_nowhere_to_go() -> None:
    """Before the first step, with a density of 1, for a dense scheme, and before Adam's first.

    So with LARS and LAMB, whose trust ratios are not known before.
    """

    def on_rank(comm: Communicator) -> None:
        fresh = Training(comm, OPTIMIZERS["SGD"], TopK(0.05))
        whole = trained(comm, OPTIMIZERS["SGD"], TopK(1.0))
        dense = trained(comm, OPTIMIZERS["SGD"], Dense())
        state = trained(comm, OPTIMIZERS["Adam"], TopK(0.05)).averager.state_dict()
        names = ("Adam", "LARS", "LAMB")
        resumed = [Training(comm, OPTIMIZERS[name], TopK(0.05)) for name in names]
        for training in resumed:
            training.averager.load_state_dict(state)
        for training in (fresh, whole, dense, *resumed):
            before = training.now()
            with training.ahead:
                assert all(same_bits(one, before[name]) for name, one in training.now().items())

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
        before = training.now()
        with training.ahead:
            assert all(same_bits(one, before[name]) for name, one in training.now().items())

    simulate(1, on_rank)  # one rank, because a warning is the process's


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
                with training.ahead:
                    inside = training.now()
                for weight in LARGE:
                    moves = float((expected[weight] - before[weight]).abs().max())
                    torch.testing.assert_close(
                        inside[weight], expected[weight], rtol=0, atol=1e-5 * moves + 1e-7
                    )

    simulate(1, on_rank)


def test_an_optimiser_can_be_told_later_and_others_do_not_matter() -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["SGD"], TopK(0.05))
        ahead = Ahead(training.parameters, training.averager._residuals)
        before = training.now()
        ahead.follow(SGD([torch.zeros(3, requires_grad=True)], lr=0.1))
        ahead.follow(RMSprop([torch.zeros(3, requires_grad=True)]))  # no warning
        with ahead:
            assert all(same_bits(one, before[name]) for name, one in training.now().items())
        ahead.follow(training.optimizer)
        with training.ahead:
            expected = training.now()
        with ahead:
            assert all(same_bits(one, expected[name]) for name, one in training.now().items())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(1, on_rank)


def test_memory_of_scaled_gradients_moves_as_that_of_others() -> None:
    like = {"weight": nn.Parameter(torch.zeros(40, 50))}

    def on_rank(comm: Communicator) -> None:
        moved = []
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
            averager = Averager(like, TopK(0.05), group=comm, scaler=scaler)
            generator = torch.Generator().manual_seed(comm.rank)
            gradient = torch.randn(40, 50, generator=generator) * (1024 if scaler else 1)
            averager.average({"weight": gradient})
            mine = {"weight": nn.Parameter(torch.zeros(40, 50))}
            with averager.ahead(mine, SGD(mine.values(), lr=0.1)):
                moved.append(mine["weight"].detach().clone())
        assert moved[0].any()
        assert torch.equal(*moved)

    simulate(2, on_rank)


def test_a_graph_that_is_still_needed_survives_a_move() -> None:
    """As with two models that are trained in turns, whose passes overlap."""

    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["SGD"], TopK(0.05))
        data = torch.randn(8, 40, generator=torch.Generator().manual_seed(comm.rank))
        gradients = []
        for interrupted in (False, True):
            training.optimizer.zero_grad()
            with training.ahead:
                loss = training.model(data).square().mean()
                if interrupted:
                    training.ahead.back()
                    training.ahead.move()
                loss.backward()
            gradients.append({name: p.grad for name, p in training.parameters.items()})
        assert all(same_bits(gradients[0][name], gradients[1][name]) for name in gradients[0])

    simulate(1, on_rank)


def test_an_exchange_has_one_block_of_tensors_that_it_knows() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = Averager({"weight": torch.zeros(40, 50)}, TopK(0.05), group=comm)
        with pytest.raises(InputError, match="the name of a tensor to move ahead must be"):
            averager.ahead({"module.weight": torch.zeros(40, 50)})
        averager.ahead({"weight": torch.zeros(40, 50)})
        with pytest.raises(InputError, match="moved ahead already"):
            averager.ahead({"weight": torch.zeros(40, 50)})

    simulate(1, on_rank)


def test_closing_moves_back_what_a_failed_pass_left_ahead() -> None:
    def on_rank(comm: Communicator) -> None:
        training = trained(comm, OPTIMIZERS["SGD"], TopK(0.05))
        before = training.now()
        training.ahead.move()
        assert any(not same_bits(one, before[name]) for name, one in training.now().items())
        training.averager.close()
        assert all(same_bits(one, before[name]) for name, one in training.now().items())

    simulate(1, on_rank)


def test_ranks_that_front_load_and_ranks_that_do_not_are_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        like = {"weight": torch.zeros(40, 50)}
        Averager(like, TopK(0.05), group=comm, frontload=comm.rank > 0)

    with pytest.raises(MismatchError, match="average something else"):
        simulate(2, on_rank)
