"""Diagnostics of training: how similar ranks are, and how much selections leave behind.

CLT-k lets one rank choose the coordinates for all. This does little harm if the ranks' memories are
similar, and if coordinates that are large on one rank are large in the average. These functions
measure both, and Ok-Topk's ξ. *Local* is one rank's memory + gradient, *true* the average over all
ranks. Each function takes tensors ``[size]`` of any float dtype, or streams of scalar values, and
computes in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce as fold

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparcel.core._checks import FLOAT_DTYPES, check_type, checked_number, checked_whole
from sparcel.core.selectors import topk
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError, optional

Vector = Tensor | SparseStream
"""A vector of floats: a one-dimensional tensor, or a stream of scalar values."""


def checked_vector(vector: Vector, name: str) -> Tensor:
    """Return a vector as a tensor ``[size]``, or raise an `InputError` that names it.

    Tensors are not copied.
    """
    if isinstance(vector, SparseStream):
        vector = vector.to_dense()
    check_type(vector, Tensor, name, "it may be a SparseStream as well")
    values = vector.detach()
    if values.ndim != 1 or values.dtype not in FLOAT_DTYPES:
        raise InputError(
            f"{name} must be a one-dimensional float tensor, or a stream of scalar floats, got"
            f" {values.dtype} of shape {tuple(values.shape)}; flatten it first"
        )
    return values


def checked_alike(vectors: Sequence[Vector], what: str) -> list[Tensor]:
    """Return vectors as tensors, or raise `InputError` if there is none or sizes differ."""
    check_type(vectors, Iterable, what)
    tensors = [checked_vector(vector, f"{what}[{place}]") for place, vector in enumerate(vectors)]
    if not tensors:
        raise InputError(f"{what} must be at least one vector, got none")
    sizes = sorted({tensor.numel() for tensor in tensors})
    if len(sizes) > 1:
        raise InputError(f"{what} must all have one size, got sizes {sizes}")
    return tensors


_SLAB = 1 << 20
"""How many coordinates are converted to float64 at a time, to avoid copies of whole vectors."""


def cosine_similarities(memories: Sequence[Vector]) -> Tensor:
    """Return the cosine of the angle between each pair of vectors.

    Parameters
    ----------
    memories
        One vector a rank, of one size and on one device.

    Returns
    -------
    Tensor
        ``[P, P]`` float64, symmetric, in [−1, 1]; 1 for vectors of the same direction. NaN if one
        of the two is all zero, as memories are before the first step. ScaleCom plots the cosine
        *distance*, 1 − similarity.

    Raises
    ------
    InputError
        When there is no vector, or sizes differ.

    Source: ScaleCom, Figure 2(a) and appendix A.
    """
    vectors = checked_alike(memories, "memories")
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for start in range(0, vectors[0].numel(), _SLAB):
        slab = torch.stack([vector[start : start + _SLAB].double() for vector in vectors])
        products += (slab @ slab.T).cpu()
    norms = products.diagonal().sqrt()
    return (products / norms[:, None] / norms).clamp(-1, 1)


def hamming_distance(a: SparseStream | Tensor, b: SparseStream | Tensor) -> int:
    """Return how many indices are in one of two sets and not in the other.

    Two sets of k that differ in d places have distance 2d.

    Parameters
    ----------
    a, b
        Index sets: the stored indices of a stream, or an integer tensor ``[k]`` without duplicates.
        ScaleCom compares ``topk(local, k)`` with ``topk(true, k)``.

    Raises
    ------
    InputError
        When a tensor is not one-dimensional, is not of integers, or repeats an index, or when
        streams differ in size.

    Source: ScaleCom, equation (6).
    """
    first, second = _index_sets(a, b)
    common = int(torch.isin(first, second).sum())
    return first.numel() + second.numel() - 2 * common


def normalized_hamming_distance(a: SparseStream | Tensor, b: SparseStream | Tensor) -> float:
    """Return d/k: the share of one set's indices that are not in the other.

    Parameters
    ----------
    a, b
        As for `hamming_distance`.

    Returns
    -------
    float
        From 0 for identical to 1 for disjoint sets. If the sets differ in length, it is the Hamming
        distance divided by the sum of the two lengths. 0 for two empty sets.

    Raises
    ------
    InputError
        As for `hamming_distance`.
    """
    lengths = sum(indices.numel() for indices in _index_sets(a, b))
    return hamming_distance(a, b) / lengths if lengths else 0.0


def spearman(local: Vector, true: Vector) -> float:
    """Return Spearman's rank correlation of the magnitudes of two vectors. Needs scipy.

    It tells whether coordinates that are large in one vector are large in the other. Only the order
    of the magnitudes matters; ties get their mean rank.

    Parameters
    ----------
    local, true
        Vectors of one size, at least 2.

    Returns
    -------
    float
        In [−1, 1], 1 for the same order; NaN if all magnitudes of a vector are equal.

    Raises
    ------
    InputError
        When sizes differ or are below 2.
    MissingDependencyError
        When scipy is not installed.

    Source: ScaleCom, appendix A: 0.657 for ResNet18 on CIFAR10 with 8 workers.
    """
    with optional("spearman", "plots"):
        from scipy.stats import rankdata
    first, second = _magnitudes(local, true)
    return _pearson(rankdata(first), rankdata(second))


def quantile_agreement(local: Vector, true: Vector) -> float:
    """Return R² of the straight line through the Q-Q plot of the magnitudes of two vectors.

    The plot has the sorted magnitudes of one vector against those of the other. R² tells whether
    both have the same distribution up to scale and shift, regardless of position.

    Parameters
    ----------
    local, true
        Vectors of one size, at least 2.

    Returns
    -------
    float
        In [0, 1], 1 if the points lie on a line; NaN if all magnitudes of a vector are equal.

    Raises
    ------
    InputError
        When sizes differ or are below 2.

    Source: ScaleCom, Figure A1: 0.99 between two workers' memories, 0.89 between their gradients.
    """
    first, second = _magnitudes(local, true)
    return _pearson(np.sort(first), np.sort(second)) ** 2


Magnitudes = npt.NDArray[np.float64]


def _magnitudes(local: Vector, true: Vector) -> tuple[Magnitudes, Magnitudes]:
    vectors = checked_alike(
        [checked_vector(local, "local"), checked_vector(true, "true")], "local and true"
    )
    if vectors[0].numel() < 2:
        raise InputError(f"a correlation needs two coordinates or more, got {vectors[0].numel()}")
    first, second = (vector.abs().double().cpu().numpy() for vector in vectors)
    return first, second


def _pearson(x: Magnitudes, y: Magnitudes) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN where all values are equal
        return float(np.corrcoef(x, y)[0, 1])


def _index_sets(a: SparseStream | Tensor, b: SparseStream | Tensor) -> list[Tensor]:
    sizes = {one.size for one in (a, b) if isinstance(one, SparseStream)}
    if len(sizes) > 1:
        raise InputError(f"index sets must be of vectors of one size, got sizes {sorted(sizes)}")
    return [checked_selection(a, "a"), checked_selection(b, "b")]


def checked_selection(selection: SparseStream | Tensor, name: str) -> Tensor:
    """Return a selection's indices, ``[k]`` int64, or raise an `InputError` that names it."""
    if isinstance(selection, SparseStream):
        if selection.indices is None:
            return torch.arange(selection.size, device=selection.device)
        return selection.indices.long()
    check_type(selection, Tensor, name, "it may be a SparseStream as well")
    if selection.ndim != 1 or selection.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{name} must be a stream or an int32 or int64 tensor [k], got {selection.dtype} of"
            f" shape {tuple(selection.shape)}"
        )
    if selection.unique().numel() < selection.numel():
        raise InputError(f"{name} must not repeat an index; pass indices.unique()")
    return selection.long()


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
