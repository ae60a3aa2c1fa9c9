"""How sums fill in: measured on gradients, and expected if ranks select independently."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparcel.core import kernels
from sparcel.core._checks import check_type, checked_whole
from sparcel.core.cost.predict import expected_union, log_absent
from sparcel.core.schemes.density import checked_density, count_for
from sparcel.core.selectors import selector
from sparcel.core.stream import SparseStream, dense_from
from sparcel.errors import InputError
from sparcel.tools.analysis.diagnostics import Vector, checked_vector


@dataclass(frozen=True)
class Growth:
    """How nnz grew as the selections of ranks were summed, in the order of the ranks.

    Attributes
    ----------
    size
        Coordinates of the vector.
    selected
        nnz of each rank's selection.
    nnz
        ``nnz[r]`` is the nnz of the sum over the first r + 1 ranks.
    """

    size: int
    selected: tuple[int, ...]
    nnz: tuple[int, ...]

    @property
    def density(self) -> tuple[float, ...]:
        """Density of the sum over the first 1, 2, … ranks, in [0, 1]."""
        return tuple(nnz / self.size for nnz in self.nnz)

    @property
    def uniform_density(self) -> tuple[float, ...]:
        """The density expected if the ranks selected as many coordinates at random."""
        counts = [self.selected[: ranks + 1] for ranks in range(len(self.selected))]
        return tuple(_expected_union(self.size, count) / self.size for count in counts)

    def dense_from(self, dtype: torch.dtype = torch.float32) -> int | None:
        """Return the fewest ranks whose sum of ``dtype`` values is dense; None if none is."""
        most = delta(self.size, dtype)
        return next((ranks for ranks, nnz in enumerate(self.nnz, 1) if nnz > most), None)


def _expected_union(size: int, counts: Sequence[int]) -> float:
    """Return the expected nnz of a sum in which stream i has ``counts[i]`` coordinates."""
    if max(counts, default=0) == size:
        return float(size)
    return -size * math.expm1(math.fsum(log_absent(size, count) for count in counts))


def growth(selections: Iterable[SparseStream]) -> Growth:
    """Return how nnz grows as streams are summed.

    Parameters
    ----------
    selections
        One stream a rank, of one size; consumed one by one. Stored zeros count.

    Raises
    ------
    InputError
        When there is no stream, or sizes differ or are 0.
    """
    check_type(selections, Iterable, "selections")
    union: _Union | None = None
    for place, stream in enumerate(selections):
        check_type(stream, SparseStream, f"selections[{place}]")
        union = union or _Union(stream.size, stream.device)
        union.add(stream)
    if union is None:
        raise InputError("growth needs at least one stream, got none")
    return union.growth()


def fill_in(
    gradients: Iterable[Vector],
    densities: Sequence[float],
    selectors: Sequence[str] = ("exact", "bucketed"),
) -> dict[tuple[float, str], Growth]:
    """Measure how the sum of gradients fills in, for several densities and selectors.

    Parameters
    ----------
    gradients
        One float vector ``[size]`` a rank. With error feedback, pass memory + gradient. Vectors
        are consumed one by one, so the output of `gradients_of` need not be stored.
    densities
        Each in (0, 1].
    selectors
        Names of selectors: ``"exact"`` takes the largest of the whole vector, ``"bucketed"``, as
        SparCML does, the largest of every 512 coordinates.

    Returns
    -------
    dict
        `Growth` by density and selector.

    Raises
    ------
    InputError
        When there is no gradient, sizes differ, or a density or selector does not exist.

    Source: SparCML, section 3 and Figure 1.
    """
    check_type(gradients, Iterable, "gradients")
    check_type(densities, Iterable, "densities")
    check_type(selectors, Iterable, "selectors")
    densities = [checked_density(one, f"densities[{i}]") for i, one in enumerate(densities)]
    unions: dict[tuple[float, str], _Union] = {}
    for place, gradient in enumerate(gradients):
        vector = checked_vector(gradient, f"gradients[{place}]").contiguous()
        for density, name in product(densities, selectors):
            # Every rank gets a new selector, because some selectors have state.
            k = count_for(density, vector.numel())
            selection = selector(name).select(vector, k)
            if (density, name) not in unions:
                unions[density, name] = _Union(vector.numel(), vector.device)
            unions[density, name].add(selection)
    if not unions:
        raise InputError("fill_in needs at least one gradient, one density and one selector")
    return {selection: union.growth() for selection, union in unions.items()}


def gradients_of(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[Tensor]:
    """Yield the gradient of ``loss(model(inputs), targets)`` that each rank would have.

    Parameters
    ----------
    model
        Parameters, their ``.grad``, and buffers are not changed. The caller sets its mode.
    loss
        Takes outputs and targets, returns a scalar.
    batches
        Inputs and targets, one pair a rank.

    Yields
    ------
    Tensor
        ``[size]``: the gradients of all parameters that need one, flattened, in the order of
        ``model.parameters()``; 0 for those that the batch did not use.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for inputs, targets in batches:
        # Batch norm writes into its buffers, so every rank gets copies of the initial ones.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        value = loss(functional_call(model, buffers, (inputs,)), targets)
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
        yield torch.cat([gradient.to_dense().flatten() for gradient in gradients])


class _Union:
    """The set of coordinates that at least one rank has selected so far."""

    def __init__(self, size: int, device: torch.device) -> None:
        if size < 1:
            raise InputError("vectors must have at least one coordinate, got size 0")
        self._seen = torch.zeros(size, dtype=torch.bool, device=device)
        self._selected: list[int] = []
        self._nnz: list[int] = []

    def add(self, stream: SparseStream) -> None:
        size = self._seen.numel()
        if stream.size != size:
            raise InputError(f"vectors must all have one size, got {size} and {stream.size}")
        chosen = slice(None) if stream.indices is None else stream.indices.long()
        new = self._seen[chosen].logical_not().sum()
        self._seen[chosen] = True
        self._selected.append(stream.nnz)
        self._nnz.append((self._nnz[-1] if self._nnz else 0) + int(new))

    def growth(self) -> Growth:
        return Growth(self._seen.numel(), tuple(self._selected), tuple(self._nnz))


def expected_nnz(size: int, k: int, ranks: int) -> float:
    """Return the expected nnz of a sum over ranks that each select k coordinates uniformly.

    A coordinate is absent from the sum if all ranks left it out: n · (1 − (1 − k/n)^P).

    Parameters
    ----------
    size
        n, at least 1.
    k
        Number of coordinates that each rank selects, in [0, n].
    ranks
        P, at least 1; the ranks select independently of each other.

    Returns
    -------
    float
        At least k, the nnz for identical selections, and at most min(P·k, n), that for disjoint
        ones. The relative error is that of a few roundings for any n, k and P.

    Raises
    ------
    InputError
        When an argument is out of its range.

    Notes
    -----
    Among independent ranks with the same distribution, uniform selection fills in fastest, because
    1 − (1 − p)^P is concave in a coordinate's probability p. Real gradients have large values at
    similar coordinates, so their sums have fewer coordinates.

    Source: SparCML, appendix B.1. The paper's alternating sum is the binomial expansion of this
    formula. It is useless in floating point: for P = 100 and k/n = 0.9 its terms reach 10²⁷.
    """
    size, k, ranks = _checked(size, k, ranks)
    return expected_union(size, k, ranks)


def nnz_variance(size: int, k: int, ranks: int) -> float:
    """Return the variance of the nnz whose expectation `expected_nnz` gives.

    Let q be the probability that a coordinate is absent, and q₂ that two are. The variance is
    n·q + n·(n−1)·q₂ − n²·q². It is at most P·k, so the nnz stays within a few √(P·k) of its
    expectation.

    Parameters
    ----------
    size, k, ranks
        As for `expected_nnz`.

    Returns
    -------
    float
        At least 0. The absolute error is about 10⁻¹⁵·P·k; if almost no selections collide, the
        variance may be smaller than that.

    Raises
    ------
    InputError
        When an argument is out of its range.
    """
    size, k, ranks = _checked(size, k, ranks)
    if k in (0, size) or ranks == 1:
        return 0.0
    absent = math.exp(ranks * log_absent(size, k))
    # q₂ = q²·(1 − c)^P: if one coordinate is absent, every other one is more likely to be present.
    c = k / ((size - k) * (size - 1))
    likelier = -math.expm1(ranks * math.log1p(-c)) if c < 1 else 1.0
    spread = expected_union(size, k, ranks) / size - (size - 1) * absent * likelier
    return max(0.0, size * absent * spread)


def delta(size: int, dtype: torch.dtype = torch.float32) -> int:
    """Return δ, the most coordinates with which a sum stays sparse.

    With more coordinates the dense vector takes fewer bytes, because it needs no indices. For
    float32 vectors of fewer than 2³¹ coordinates, δ is half of them.

    Source: SparCML, section 5.1.
    """
    check_type(dtype, torch.dtype, "dtype")
    return dense_from(checked_whole(size, "size", at_least=0), dtype.itemsize) - 1


def ranks_until_dense(size: int, k: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the fewest ranks whose sum is expected to be dense: `expected_nnz` above `delta`.

    Parameters
    ----------
    size, k
        As for `expected_nnz`, but k at least 1.
    dtype
        Of the values.

    Raises
    ------
    InputError
        When an argument is out of its range.
    """
    size, k, _ = _checked(size, k, 1)
    if k == 0:
        raise InputError("k must be at least 1, got 0: an empty sum never turns dense")
    most = delta(size, dtype)
    worlds = range(1, sys.maxsize)
    return worlds[bisect_left(worlds, True, key=lambda ranks: expected_nnz(size, k, ranks) > most)]


def relative_volume(size: int, k: int, ranks: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the expected volume of a sparse all-reduce, divided by that of a dense one.

    The sparse one is ``split_allgather`` with the selections of `expected_nnz`: each rank sends its
    k coordinates to their owners, and then receives the owners' sums, sparse up to `delta` and
    dense above. Once the sum is dense, the volume is at least half of the dense one, however small
    k is. Headers are not counted.

    Parameters
    ----------
    size, k, ranks
        As for `expected_nnz`; ranks at least 2, since one sends nothing.
    dtype
        Of the values.

    Returns
    -------
    float
        In [0, 1].

    Raises
    ------
    InputError
        When an argument is out of its range.

    Source: SparCML, section 5.3.2 and 5.3.3.
    """
    size, k, ranks = _checked(size, k, ranks)
    if ranks < 2:
        raise InputError(f"ranks must be at least 2, got {ranks}: one rank sends nothing")
    check_type(dtype, torch.dtype, "dtype")
    coordinate = 1 + kernels.index_dtype(size).itemsize / dtype.itemsize
    halves = (min(size, nnz * coordinate) for nnz in (k, expected_nnz(size, k, ranks)))
    return sum(halves) / (2 * size)


def _checked(size: int, k: int, ranks: int) -> tuple[int, int, int]:
    size = checked_whole(size, "size", at_least=1)
    k = checked_whole(k, "k", at_least=0, at_most=size)
    return size, k, checked_whole(ranks, "ranks", at_least=1)
