"""Arguments of a wrong type raise an `InputError` that names the argument, in all public calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

import sparcel
from sparcel import SparseStream, simulate
from sparcel.core import cost
from sparcel.core.comm import Network
from sparcel.core.formats import FewBits
from sparcel.core.kernels import sums_of_squares
from sparcel.core.optim import parallel
from sparcel.core.schemes import SCHEMES, Hierarchical, TopK
from sparcel.core.selectors import SELECTORS
from sparcel.core.training import Averager
from sparcel.errors import InputError
from sparcel.products.rows import HashedNGrams
from sparcel.tools import analysis, plan
from tests.strategies import make_stream

CANDIDATES = ("0.01", True, 0.5, [0.5], object())
"""Values of many types; each is wrong for most arguments."""

ACCEPTED = {
    str: {"str"},
    bool: {"bool"},
    float: {"float"},
    list: {"Sequence", "Iterable", "Collection"},
    object: set[str](),
}
"""The words in an annotation that accept a type."""


def wrong_values(function: Callable[..., Any], name: str) -> list[object]:
    """Return the candidates that the annotation of an argument does not accept."""
    words = set(re.findall(r"\w+", signature(function).parameters[name].annotation))
    return [value for value in CANDIDATES if not words & ACCEPTED[type(value)]]


def assert_named(function: Callable[..., Any], name: str, others: dict[str, Any]) -> None:
    """Check that each wrong value of an argument raises an error that names it."""
    values = wrong_values(function, name)
    assert len(values) >= 3
    for value in values:
        with pytest.raises(InputError, match=rf"\b{name}\b"):
            function(**{**others, name: value})


NEEDING: dict[Callable[..., Any], dict[str, Any]] = {
    FewBits: {"bits": 8},
    Hierarchical: {"inner": TopK()},
}
"""What has settings without a default, and these."""


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (kind, setting)
        for kind in (*SCHEMES.values(), *SELECTORS.values(), HashedNGrams, *NEEDING)
        for setting in signature(kind).parameters
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_settings_of_wrong_types_are_named(kind: Callable[..., Any], setting: str) -> None:
    assert_named(kind, setting, NEEDING.get(kind, {}))


X, STREAM = torch.arange(1.0, 9.0), make_stream([1, 4], 0, 9)
PROBLEM = {"size": 100, "k": 10, "ranks": 4}
TENSORS = {"weight": torch.ones(40, 40)}
KNOWN_SIZES = {"size": 10, "k": 2, "ranks": 3}

CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (sparcel.topk, {"x": X, "k": 2}, "x k"),
    (sparcel.scheme, {"name": "topk"}, "name"),
    (SparseStream, {"indices": None, "values": X, "size": 8}, "indices values size"),
    (SparseStream.from_dense, {"vector": X}, "vector"),
    (STREAM.to_dense, {}, "fill"),
    (STREAM.scale, {"factor": 2}, "factor"),
    (STREAM.slice, {"start": 0, "stop": 2}, "start stop"),
    (STREAM.topk, {"k": 1}, "k"),
    (STREAM.largest, {"k": 1}, "k"),
    (STREAM.without, {"other": STREAM}, "other"),
    (Network, {}, "latency_s bandwidth ranks_per_node node_latency_s node_bandwidth"),
    (simulate, {"world_size": 1, "function": id}, "world_size function latency_s cpu_time"),
    (simulate(1, lambda comm: None).seconds_on, {}, "network"),
    (analysis.contraction, {"vector": X, "selection": STREAM}, "vector selection"),
    (analysis.contraction_bound, {"k": 3, "d": 1, "gamma0": 0.5}, "k d gamma0"),
    (analysis.xi, {"accumulated": [X], "gradients": [X], "k": 1}, "accumulated gradients k"),
    (analysis.expected_nnz, KNOWN_SIZES, "size k ranks"),
    (analysis.nnz_variance, KNOWN_SIZES, "size k ranks"),
    (analysis.relative_volume, KNOWN_SIZES, "size k ranks dtype"),
    (analysis.ranks_until_dense, {"size": 10, "k": 2}, "size k dtype"),
    (analysis.delta, {"size": 10}, "size dtype"),
    (analysis.cosine_similarities, {}, "memories"),
    (analysis.hamming_distance, {"a": STREAM, "b": STREAM}, "a b"),
    (analysis.normalized_hamming_distance, {"a": STREAM, "b": STREAM}, "a b"),
    (analysis.spearman, {"local": X, "true": X}, "local true"),
    (analysis.quantile_agreement, {"local": X, "true": X}, "local true"),
    (analysis.growth, {}, "selections"),
    (analysis.fill_in, {"gradients": [X], "densities": [1]}, "gradients densities selectors"),
    (analysis.plot_fill_in, {"path": "fill_in.svg"}, "measured"),
    (cost.Problem, PROBLEM, "size k ranks ranks_per_node itemsize spread"),
    (cost.predict, {"problem": None, "formula": iter}, "formula problem"),
    (
        cost.stated_rates,
        {"bandwidth": 1e9, "latency_s": 0, "ranks": 2},
        "bandwidth latency_s ranks ranks_per_node node_bandwidth node_latency_s memory_bandwidth",
    ),
    (
        plan.plan,
        {"model": "gpt2", "compute_s": 1},
        "model compute_s density rates topology bucket_bytes",
    ),
]


@pytest.mark.parametrize(
    ("function", "others", "name"),
    [(function, others, name) for function, others, names in CALLS for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__qualname__", ""),
)
def test_arguments_of_wrong_types_are_named(
    function: Callable[..., Any], others: dict[str, Any], name: str
) -> None:
    assert_named(function, name, others)


ON_RANKS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (sparcel.all_reduce, {"stream": STREAM}, "stream op algorithm group async_op max_nnz"),
    (
        sparcel.all_reduce_topk,
        {"stream": STREAM, "k": 2},
        "stream k algorithm group async_op max_nnz format",
    ),
    (sparcel.all_gather, {"stream": STREAM}, "stream group async_op"),
    (sparcel.reduce_scatter, {"stream": STREAM}, "stream op group async_op"),
    (sparcel.broadcast, {"stream": STREAM}, "stream root group async_op"),
    (
        Averager,
        {"tensors": TENSORS, "scheme": sparcel.scheme("topk")},
        "tensors scheme group scaler policy densities rates scope withhold_zeros",
    ),
    (parallel, {"op": sums_of_squares, "tensors": [X]}, "op group additive"),
    (sparcel.scheme("topk").step, {"gradient": X}, "gradient out request in_place"),
    (sparcel.scheme("topk").step_stream, {"gradient": X}, "gradient request"),
]
"""Calls that take a group, or a communicator."""


@pytest.mark.parametrize(
    ("function", "others", "name"),
    [(function, others, name) for function, others, names in ON_RANKS for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__qualname__", ""),
)
def test_arguments_of_wrong_types_are_refused_before_anything_is_sent(
    function: Callable[..., Any], others: dict[str, Any], name: str
) -> None:
    def on_rank(comm: sparcel.comm.Communicator) -> None:
        ranks = {"comm" if "comm" in signature(function).parameters else "group": comm}
        try:
            assert_named(function, name, {**others, **ranks})
        finally:
            assert comm.traffic.messages_sent == 0

    simulate(2, on_rank)


@pytest.mark.parametrize("given", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_numpy_and_torch_are_numbers(given: Any) -> None:
    assert repr(sparcel.scheme("topk", density=given)) == repr(sparcel.scheme("topk", density=0.5))


@pytest.mark.parametrize("given", [np.int16(3), np.array(3), torch.tensor(3), 3])
def test_integers_of_numpy_and_torch_are_whole_numbers(given: Any) -> None:
    assert sparcel.topk(X, given).nnz == 3
    stream = SparseStream(None, X[:3], given)
    assert type(stream.size) is int and stream.size == 3
    three = sparcel.scheme("sparcml", bits=4, seed=3)
    assert repr(sparcel.scheme("sparcml", bits=4, seed=given)) == repr(three)
