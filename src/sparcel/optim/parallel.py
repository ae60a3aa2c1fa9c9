"""The parallel tensor operator: ranks that hold equal tensors share an operation over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import check_callable, check_type, checked_flag
from sparcel.comm import Call, Communicator, Group, resolve_or_alone
from sparcel.errors import InputError
from sparcel.optim._shares import Division, Sizes, divide, flat
from sparcel.rates import Rates

Operation = Callable[[Sequence[Tensor]], Tensor]
"""``tensors -> rows``, one row for each tensor."""

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
