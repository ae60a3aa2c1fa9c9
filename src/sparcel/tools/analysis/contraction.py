"""How much of a vector a selection leaves behind, and Ok-Topk's ξ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce as fold

import torch
from torch import Tensor

from sparcel.core._checks import check_type, checked_number, checked_whole
from sparcel.core.selectors import topk
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError
from sparcel.tools.analysis.similarity import (
    Vector,
    checked_alike,
    checked_selection,
    checked_vector,
)


def contraction(vector: Vector, selection: SparseStream | Tensor) -> float:
    """Return the share of a vector's energy that a selection leaves behind.

    It is ‖y − comp(y)‖² / ‖y‖², where comp(y) is y at the selected indices and 0 elsewhere. With
    ``topk(y, k)`` as the selection it is the γ of exact top-k, at most 1 − k/n.

    Parameters
    ----------
    vector
        y, ``[size]``, a float tensor or a stream of scalar values.
    selection
        An index set: a stream, whose values are ignored, or an integer tensor ``[k]``.

    Returns
    -------
    float
        In [0, 1]; NaN where y is all zero.

    Raises
    ------
    InputError
        When ``vector`` is not a vector of floats, ``selection`` is not an index set, or an index
        lies outside the vector.
    """
    energy = checked_vector(vector, "vector").double().square()
    indices = checked_selection(selection, "selection")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < energy.numel():
        raise InputError(
            f"indices must lie in [0, {energy.numel()}), got {int(indices.min())} to"
            f" {int(indices.max())}"
        )
    total = float(energy.sum())
    # Sum the remainder directly, because total − kept would round a small remainder away.
    energy[indices] = 0
    return float(energy.sum()) / total if total else math.nan


def contraction_bound(k: int, d: float, gamma0: float) -> float:
    """Return Lemma 1's bound on the contraction of a selection that misses d of the top k.

    d/k + (1 − d/k)·γ₀ bounds the expectation of `contraction` over all selections of k indices
    that share k − d with the true top k, each equally likely.

    Parameters
    ----------
    k
        Number of selected indices, at least 1.
    d
        Half the `hamming_distance` of the selection and the true top k, in [0, k]; a mean over
        steps may be fractional.
    gamma0
        The contraction of exact top-k, in [0, 1]: measured, or 1 − k/n, which is always valid.

    Raises
    ------
    InputError
        When an argument is out of its range.

    Notes
    -----
    The bound holds on average. One selection may exceed it if it misses the largest of the top k.
    Leaders mostly miss the smallest, and then stay below it. By the same derivation the expectation
    is lower than the bound by exactly γ₀·d/(n − k), the energy of the indices that are selected
    instead of the top k.

    Source: ScaleCom, Lemma 1 and appendix C.
    """
    k = checked_whole(k, "k", at_least=1)
    d = checked_number(
        d, "d", at_least=0, at_most=k, hint="pass half the distance, which is at most k"
    )
    gamma0 = checked_number(gamma0, "gamma0", at_least=0, at_most=1)
    return d / k + (1 - d / k) * gamma0


def xi(accumulated: Sequence[Vector], gradients: Sequence[Vector], k: int) -> float:
    """Return the ξ of this step: the error of selecting twice, relative to the true gradient.

    It is ‖Topk(mean(aᵢ)) − Topk(mean(Topk(aᵢ)))‖ / ‖mean(gᵢ)‖, for the ranks' accumulated aᵢ and
    gradients gᵢ. Training converges as with Topk SGD while ξ stays below some constant; values up
    to about P are harmless.

    Parameters
    ----------
    accumulated
        One vector a rank, memory + gradient, before the step's selection.
    gradients
        One gradient a rank, of this step, on the same scale as the memory. If the memory holds
        gradients times the learning rate, scale these too.
    k
        At least 1.

    Returns
    -------
    float
        At least 0; infinite or NaN if the mean gradient is zero.

    Raises
    ------
    InputError
        When there are no vectors, their numbers differ, or their sizes differ.

    Source: Ok-Topk, Assumption 1 (equation 5) and section 5.1.
    """
    check_type(accumulated, Sequence, "accumulated")
    check_type(gradients, Sequence, "gradients")
    k = checked_whole(k, "k", at_least=1)
    if len(accumulated) != len(gradients):
        raise InputError(
            "xi needs one vector of accumulated and one of gradients a rank, got"
            f" {len(accumulated)} and {len(gradients)}"
        )
    vectors = checked_alike([*accumulated, *gradients], "accumulated and gradients")
    ranks = len(accumulated)
    whole = _mean(vectors[:ranks], ranks)
    sparse = _mean((topk(vector, k).to_dense() for vector in vectors[:ranks]), ranks)
    change = topk(whole, k).to_dense() - topk(sparse, k).to_dense()
    return float(change.norm() / _mean(vectors[ranks:], ranks).norm())


def _mean(vectors: Iterable[Tensor], ranks: int) -> Tensor:
    return fold(torch.add, (vector.double() for vector in vectors)) / ranks
