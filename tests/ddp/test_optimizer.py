"""Momentum of both the scheme and the optimiser, which attach refuses."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer, RMSprop

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Hierarchical, TopK
from sparcel.core.training import stays_dense
from sparcel.errors import InputError, SparcelWarning
from tests.ddp.models import Linear
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes

Make = Callable[[torch.nn.Module], Optimizer]


def over_all(kind: type[Optimizer], **settings: Any) -> Make:
    return partial(_over_all, kind, settings)


def _over_all(
    kind: type[Optimizer], settings: dict[str, Any], module: torch.nn.Module
) -> Optimizer:
    return kind(module.parameters(), **{"lr": 0.1, **settings})  # type: ignore[call-arg]


def for_small(module: torch.nn.Module) -> Optimizer:
    """Give momentum to the parameters that stay dense, and to no others."""
    return SGD(
        [
            {"params": one, "momentum": 0.9 if stays_dense(name, one) else 0}
            for name, one in module.named_parameters()
        ],
        lr=0.1,
    )


def attach(comm: Communicator, make: Make | None, scheme: Any, **settings: Any) -> list[str]:
    """Return the warnings or the error, and check that an error leaves no thread behind.

    Nothing moves ahead here, which knows fewer optimisers than momentum does.
    """
    threads = threading.active_count()
    ddp = DistributedDataParallel(Linear())
    optimizer = None if make is None else make(ddp.module)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            attach_evenly(ddp, scheme, optimizer=optimizer, ahead=False, **settings).close()
        except InputError as error:
            assert threading.active_count() == threads
            return [f"refused: {error}"]
    ours = [one for one in given if one.category is SparcelWarning]
    assert all(one.filename == __file__ for one in ours)
    return [f"warned: {one.message}" for one in ours]


CORRECTED: list[tuple[Any, dict[str, Any]]] = [
    ("topk", {"momentum": 0.9}),
    ("dgc", {}),
    (Hierarchical(TopK(momentum=0.9), 1), {}),
]
"""Schemes that correct momentum, two of them without a setting that says so."""


TWICE: list[tuple[Make, str]] = [
    (over_all(SGD, momentum=0.8), "SGD has momentum=0.8 for 3 "),
    (over_all(RMSprop, momentum=0.8), "RMSprop has momentum=0.8 for 3 "),
    (over_all(Adam), r"Adam has betas=(0.9, 0.999) for 3 "),
    (over_all(AdamW), r"AdamW has betas=(0.9, 0.999) for 3 "),
]


def attach_in_turn(comm: Communicator, cases: list[tuple[Any, ...]]) -> list[list[str]]:
    """Return what `attach` says of optimisers, each with a scheme and its settings."""
    return [attach(comm, make, scheme, **settings) for make, scheme, settings in cases]


def test_momentum_of_both_is_refused(run_on: Any) -> None:
    cases = [(make, *corrected) for make, _ in TWICE for corrected in CORRECTED]
    expected = [theirs for _, theirs in TWICE for _ in CORRECTED]
    for ranks in run_on(2, attach_in_turn, cases):
        for (said,), theirs in zip(ranks, expected, strict=True):
            assert said.startswith('refused: the scheme has momentum=0.9 ("dgc" has 0.9 unless')
            assert theirs in said and "such as 'first'" in said


def scheme_by_optimizers(comm: Communicator) -> list[str]:
    module = Linear()
    named = dict(module.named_parameters())
    matrices = [one for one in named.values() if one.ndim == 2]
    muon, adamw = Muon(matrices), AdamW([one for one in named.values() if one.ndim != 2])
    of_another_library = type("SingleDeviceMuon", (SGD,), {})(matrices, lr=0.1)
    given: list[dict[str, Any]] = [{"optimizer": [adamw, muon]}, {"optimizer": of_another_library}]
    given += [{"optimizer": [adamw]}, {}]
    given.append({"optimizer": [muon], "scheme_or_name": "topk", "ahead": False})
    schemes = []
    for one in given:
        handle = sparcel.attach(DistributedDataParallel(module), **one)
        schemes.append(str(handle.scheme))
        handle.close()
    return schemes


def test_all_goes_in_8_bits_where_muon_trains_and_no_scheme_is_named(run_on: Any) -> None:
    usual = str(sparcel.scheme())
    whole = "Bidirectional(density=1.0, format='packed:8')"
    expected = [whole, whole, usual, usual, "TopK(density=0.01)"]
    assert run_on(2, scheme_by_optimizers) == [expected] * 2


def of_other_parameters(module: torch.nn.Module) -> Optimizer:
    return SGD([torch.zeros(2)], lr=0.1)


def of_dense_parameters(module: torch.nn.Module) -> Optimizer:
    return SGD([one for name, one in module.named_parameters() if name.endswith("bias")], lr=0.1)


def test_an_optimiser_of_other_parameters_is_refused(run_on: Any) -> None:
    cases = [(of_other_parameters, "topk", {}), (of_dense_parameters, "dgc", {})]
    for (first,), (second,) in run_on(2, attach_in_turn, cases):
        assert "optimizer updates none of the model's parameters; pass the one that does" in first
        assert "optimizer updates none of the 3 parameters that are made sparse" in second


def test_rank_0_warns_of_an_optimiser_that_is_not_known(run_on: Any) -> None:
    cases = [(None, *corrected) for corrected in CORRECTED]
    by_rank_0, by_rank_1 = run_on(2, attach_in_turn, cases)
    assert not any(by_rank_1)
    for (said,) in by_rank_0:
        assert said.startswith("warned: the scheme has momentum=0.9")
        assert "pass optimizer= to have that checked" in said


def threads_left_by_a_warning_that_is_an_error(comm: Communicator) -> int:
    ddp, threads = DistributedDataParallel(Linear()), threading.active_count()
    with warnings.catch_warnings(action="error"), pytest.raises(SparcelWarning):
        attach_evenly(ddp, "dgc")
    return threading.active_count() - threads


def test_a_warning_that_is_made_an_error_leaves_no_thread(run_on: Any) -> None:
    assert run_on(2, threads_left_by_a_warning_that_is_an_error) == [0, 0]


def test_momentum_of_one_of_them_is_accepted(run_on: Any) -> None:
    cases = [
        (over_all(SGD), "dgc", {"momentum": 0.9}),
        (for_small, "dgc", {"momentum": 0.9}),
        (over_all(RMSprop), "dgc", {"momentum": 0.9}),
        (over_all(Adam, betas=(0.0, 0.999)), "dgc", {"momentum": 0.9}),
        (over_all(SGD, momentum=0.9), "dgc", {"momentum": 0.0}),
        (over_all(AdamW), "dgc", {"momentum": 0.0}),
        (None, "dgc", {"momentum": 0.0}),
    ]
    assert run_on(2, attach_in_turn, cases) == [[[]] * len(cases)] * 2
