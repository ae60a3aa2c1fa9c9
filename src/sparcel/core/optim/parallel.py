"""The parallel tensor operator: ranks that hold equal tensors share an operation over them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from sparcel.core import cost, kernels
from sparcel.core._checks import check_callable, check_type, checked_flag
from sparcel.core.comm import Call, Communicator, Group, digest, resolve_or_alone
from sparcel.core.cost.formulas import ROUND, gather
from sparcel.core.cost.predict import Exchange, Problem, Work
from sparcel.core.rates import Rates
from sparcel.errors import InputError

Operation = Callable[[Sequence[Tensor]], Tensor]
"""``tensors -> rows``, one row for each tensor."""

Sizes = tuple[tuple[int, int], ...]
"""The number of elements of each tensor, and the bytes of one."""

_ROW_BYTES = 8
"""Bytes of a row, which the cost model takes for one number."""

_TURN_SECONDS = 3e-3
"""How long a process runs before Linux lets another one have its core."""

_COMPARED: WeakKeyDictionary[Communicator, set[tuple[Sizes, bool, Rates | None]]] = (
    WeakKeyDictionary()
)
"""What the ranks of a communicator have compared."""


def parallel(
    op: Operation, tensors: Iterable[Tensor], group: Group = None, additive: bool = False
) -> Tensor:
    """Apply an operation to tensors that all ranks hold; each rank computes a part of the result.

    Each rank applies ``op`` to its share of the tensors, r[p] = OP(g[p]), and all ranks gather all
    rows. Shares are balanced by bytes. Each rank computes everything instead where the cost model
    predicts that this is faster; the result has the same bits. The model assumes that ``op`` is one
    pass over its tensors, and decides by the tensors' sizes, the number of ranks, their waiting for
    one another, and the communicator's ``rates`` or the default rates. All ranks call.

    Parameters
    ----------
    op
        ``op(list of tensors)`` returns a row for each tensor, of any shape and dtype, both the same
        for all: ``[n]`` or ``[n, …]``. A row must depend on its own tensor alone, bit by bit.
    tensors
        The same on all ranks, bit by bit; of any shapes and dtypes. Only sizes are compared.
    group
        As of `sparcel.all_reduce`; a process that was launched alone needs no group.
    additive
        Whether the row of a tensor is the sum of the rows of its pieces, as a sum of squares is.
        Then ``op`` gets vectors: tensors in the order of memory, large ones in pieces of
        131,072 elements. Rows are added in float64 in the order of the pieces. So
        the result has the same bits for every number of ranks.

    Returns
    -------
    Tensor
        A row for each tensor, on the device where ``op`` left them; float64 if ``additive``.

    Raises
    ------
    InputError
        For tensors that are not strided, or an ``op`` that returns another number of rows.
    MismatchError
        On all ranks, when they differ in the tensors' sizes, in ``additive``, or in whether their
        rates make them share the work; this is compared when sizes or rates are new on the
        communicator. Ranks that share the work also compare ``op``'s name and the rows' dtype and
        shape.
    CommunicationError
        When a peer fails, as when its ``op`` raises, or does not answer within the timeout.

    Source: CommLib, section 4.2 (PTO), which divides by the number of tensors.
    """
    check_callable(op, "op")
    checked_flag(additive, "additive")
    tensors = list(tensors)
    for tensor in tensors:
        check_type(tensor, Tensor, "a tensor")
        if tensor.layout != torch.strided:
            raise InputError(f"tensors must be strided, got {tensor.layout}; use to_dense()")
    comm = resolve_or_alone(group)
    sizes = tuple([(tensor.numel(), tensor.element_size()) for tensor in tensors])
    if comm is None:
        divided = divide(sizes, 1, additive, None)
    else:
        divided = divide(sizes, comm.size, additive, comm.rates)
        _compare(divided, comm)
    if comm is not None and divided.pays:
        rows = comm.run(lambda: _gathered(op, tensors, divided, comm))
    else:
        rows = _rows(op, tensors, divided, range(len(divided.pieces)))
    return _added(rows, divided) if additive else rows


def _compare(divided: Division, comm: Communicator) -> None:
    """Compare what the ranks divide, and whether they share it; once on each communicator.

    Ranks with other sizes or rates might choose otherwise; then some would wait for the others.
    """
    question = divided.sizes, divided.additive, comm.rates
    compared = _COMPARED.setdefault(comm, set())
    if question not in compared:
        facts = {"tensors": divided.text, "additive": divided.additive, "shared": divided.pays}
        comm.call(Call.of("parallel", facts), lambda: comm.gather_numbers(0))
        compared.add(question)


def _gathered(
    op: Operation, tensors: list[Tensor], divided: Division, comm: Communicator
) -> Tensor:
    """Compute this rank's rows and return those of all ranks."""
    rows = _rows(op, tensors, divided, divided.share(comm.rank))
    facts = {
        "op": getattr(op, "__qualname__", type(op).__name__),
        "tensors": divided.text,
        "additive": divided.additive,
        "row": f"{tuple(rows.shape[1:])} of {rows.dtype}",
    }
    nbytes = [rows[:1].nbytes * count for count in divided.counts]
    own = rows[: divided.counts[comm.rank]].to(comm.device).contiguous()
    block = own.view(-1).view(torch.uint8)
    gathered = comm.call(Call.of("parallel", facts), lambda: comm.gather_blocks(block, nbytes))
    return gathered.view(rows.dtype).view(-1, *rows.shape[1:]).to(rows.device)


@torch.no_grad()
def _rows(op: Operation, tensors: list[Tensor], divided: Division, share: range) -> Tensor:
    """Apply the operation to some pieces."""
    chosen = divided.pieces[share.start : share.stop]
    pieces = list(_cut(tensors, chosen)) if divided.additive else [tensors[n] for n, *_ in chosen]
    rows = op(pieces)
    if not isinstance(rows, Tensor) or rows.shape[:1] != (len(pieces),):
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(f"op must return a row for each of {len(pieces)} tensors, got {found}")
    return rows.to(torch.float64) if divided.additive else rows


def _cut(tensors: list[Tensor], chosen: Sequence[tuple[int, int, int]]) -> Iterator[Tensor]:
    """Yield the chosen pieces as vectors; consecutive ones of a tensor are cut in one call."""
    for number, own in groupby(chosen, itemgetter(0)):
        ranges, vector = list(own), flat(tensors[number])
        start, stop = ranges[0][1], ranges[-1][2]
        if stop - start < vector.numel():
            vector = vector[start:stop]
        yield from vector.split(kernels.CHUNK) if len(ranges) > 1 else (vector,)


def _added(rows: Tensor, divided: Division) -> Tensor:
    """Add the rows of each tensor's pieces, one after another."""
    total = np.zeros((len(divided.sizes), *rows.shape[1:]))
    np.add.at(total, divided.owners, rows.cpu().numpy())
    return torch.from_numpy(total).to(rows.device)


@dataclass(eq=False)
class Division:
    """Pieces of tensors, and the ranks' shares of them.

    Attributes
    ----------
    sizes
        The tensors.
    additive
        Whether the result of a tensor is the sum of those of its pieces; then large ones are cut.
    pieces
        ``(tensor, start, stop)``, in order: the number of a tensor and a range of its elements.
    cuts
        Rank r has the pieces ``[cuts[r], cuts[r + 1])``.
    pays
        Whether the ranks should share the work, by the cost model.
    """

    sizes: Sizes
    additive: bool
    pieces: tuple[tuple[int, int, int], ...]
    cuts: tuple[int, ...]
    pays: bool = False

    @cached_property
    def owners(self) -> np.ndarray:
        """The tensor that each piece belongs to."""
        return np.array([tensor for tensor, *_ in self.pieces], np.int64)

    @cached_property
    def text(self) -> str:
        """The tensors in few words, to compare ranks by."""
        return f"{len(self.sizes)} tensors {digest(repr(self.sizes), 32):08x}"

    @cached_property
    def nbytes(self) -> list[int]:
        """Bytes of each piece."""
        return [(stop - start) * self.sizes[tensor][1] for tensor, start, stop in self.pieces]

    @property
    def loads(self) -> list[int]:
        """Bytes of each rank's share."""
        return [sum(self.nbytes[start:stop]) for start, stop in pairwise(self.cuts)]

    @property
    def counts(self) -> list[int]:
        """Pieces of each rank's share."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    def share(self, rank: int) -> range:
        """Return the pieces of a rank; the smallest piece of all if it has none."""
        own = range(self.cuts[rank], self.cuts[rank + 1])
        if own:
            return own
        smallest = self.nbytes.index(min(self.nbytes))
        return range(smallest, smallest + 1)


@lru_cache(maxsize=64)
def divide(sizes: Sizes, ranks: int, additive: bool, rates: Rates | None) -> Division:
    """Divide tensors among the ranks by bytes; cached, because each step asks again.

    Only the arguments decide, so ranks with equal arguments divide alike. With ``additive`` large
    tensors are cut into chunks of `kernels.CHUNK` elements. A rank's share is then less than the
    mean and a chunk.
    """
    pieces = tuple(_pieces(sizes, additive))
    whole = Division(sizes, additive, pieces, (0, len(pieces)))
    # A piece goes to the rank in whose part of all bytes its middle lies.
    ends = list(accumulate(whole.nbytes))
    middles = [2 * end - piece for end, piece in zip(ends, whole.nbytes, strict=True)]
    total = ends[-1] if ends else 0
    bounds = [-(-2 * total * rank // ranks) for rank in range(1, ranks)]
    cuts = (0, *(bisect_left(middles, bound) for bound in bounds), len(pieces))
    divided = Division(sizes, additive, pieces, cuts)
    divided.pays = _seconds(divided, ranks, rates) < _seconds(whole, ranks, rates)
    return divided


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a vector in the order of memory, which mostly needs no copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).contiguous()


def _pieces(sizes: Sizes, cut: bool) -> Iterator[tuple[int, int, int]]:
    for tensor, (size, _) in enumerate(sizes):
        step = kernels.CHUNK if cut else max(size, 1)
        for start in range(0, max(size, 1), step):
            yield tensor, start, min(start + step, size)


def _seconds(divided: Division, ranks: int, rates: Rates | None) -> float:
    """Return the predicted time of an operation that is one pass over its tensors.

    A rank that waits for messages gives up its core. Where ranks share cores, or loaders run beside
    them, it gets the core back after a turn of each process in front of it, and all ranks wait for
    the last. Crowding tells how many share a core; where it was not measured, one other is assumed.
    """
    rates = cost.default_rates() if rates is None else rates
    problem = Problem(1, 1, ranks, min(ranks, rates.ranks_per_node))
    exchanging = cost.predict(partial(_terms, divided), problem, rates).seconds
    if len(divided.loads) == 1:
        return exchanging
    return exchanging + _TURN_SECONDS * (rates.crowding - 1 if rates.measured else 1)


def _terms(divided: Division, problem: Problem) -> Iterator[Exchange | Work]:
    yield Work("add", max(divided.loads) / 4)  # its coordinates are of float32
    shares = len(divided.counts)
    if shares > 1:
        yield from gather(shares, _ROW_BYTES * len(divided.pieces) / shares)
        yield ROUND
