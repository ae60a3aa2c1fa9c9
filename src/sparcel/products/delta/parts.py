"""Parts: the pieces of tensors that a process holds, with their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from sparcel import _cpu
from sparcel.core._threads import in_order
from sparcel.core.training.driver import model_names
from sparcel.errors import InputError, shown
from sparcel.products.delta.chunk import Version
from sparcel.products.delta.elements import (
    CHUNK_BYTES,
    LAYOUTS,
    Only,
    Piece,
    bits_of,
    piece_of_shard,
    whole_piece,
)

M = TypeVar("M", bound=Mapping[str, Tensor])
Weights: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A module, whose state dict counts, or tensors by name."""

_EXTRA = "_extra_state"
"""How torch names in a state dict what `nn.Module.get_extra_state` returns."""


@dataclass(frozen=True)
class Part:
    """What one process holds of a tensor: all of it, or a shard."""

    piece: Piece
    local: Tensor

    @cached_property
    def bits(self) -> Tensor:
        """The bits of all elements, in the same memory; a vector if they are in order there."""
        held = bits_of(self.local)
        # A view would keep the distance of a single element to the next one, which is not there.
        return held.as_strided((held.numel(),), (1,)) if held.is_contiguous() else held

    @cached_property
    def memory(self) -> tuple[object, ...]:
        """What parts with the same memory, and no others, have in common."""
        return *memory_of(self.local), self.piece.shape

    def elements(self, begin: int, end: int) -> Tensor:
        """Return bits of elements as a contiguous vector, in the part's memory if that can be."""
        held = self.bits
        if held.is_contiguous():
            return held[begin:end] if end - begin < len(held) else held
        each = max(held[0].numel(), 1)
        first = begin // each
        rows = held[first : -(-end // each)].contiguous().view(-1)
        return rows[begin - first * each : end - first * each]

    def begin_of(self, piece: Piece) -> int | None:
        """Return the place of a piece's first element, if its elements are consecutive here."""
        mine, before = self.piece, piece.first - self.piece.first
        if mine.ranges:
            there = piece.ranges and 0 <= before <= mine.count - piece.count
            return before if there else None
        begin = before // mine.stride * mine.row + before % mine.stride
        in_rows = (piece.row, piece.stride) == (mine.row, mine.stride) and begin % mine.row == 0
        in_one = piece.ranges and begin % mine.row + piece.count <= mine.row
        there = before >= 0 and before % mine.stride < mine.row
        there = there and (in_rows or in_one) and begin + piece.count <= mine.count
        return begin if there else None

    def gathered(self, piece: Piece) -> Tensor:
        """Return the bits of a piece, in the part's memory if they follow one another there.

        Raises
        ------
        InputError
            If the part lacks some of them.
        """
        begin = self.begin_of(piece)
        if begin is not None:
            return self.elements(begin, begin + piece.count)
        numbers = piece.numbers(torch.arange(piece.count, device=self.local.device))
        here, places = self.places_of(numbers)
        if not bool(here.all()):
            raise InputError(
                f"{shown(piece.name)} is cut otherwise here than where it was encoded; keep whole"
                " tensors in a Subscriber, and assign_ what changes in them"
            )
        return self.take(places)

    def places_of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tell which elements of the whole tensor are here, and at which places these are."""
        mine, before = self.piece, numbers - self.piece.first
        places = before // mine.stride * mine.row + before % mine.stride
        here = (before >= 0) & (before % mine.stride < mine.row) & (places < mine.count)
        return here, places[here]

    def take(self, places: Tensor) -> Tensor:
        """Return the bits of the elements at these places."""
        return self.bits[self._at(places)]

    def put(self, places: Tensor, bits: Tensor) -> None:
        """Write bits to the elements at these places."""
        self.bits[self._at(places)] = bits.to(self.local.device)

    def _at(self, places: Tensor) -> tuple[Tensor, ...]:
        return (places,) if self.bits.dim() == 1 else torch.unravel_index(places, self.bits.shape)


class _Unwrapped(MutableMapping[str, Tensor]):
    """A mapping by the names before a model was wrapped; what is added keeps its name."""

    def __init__(self, tensors: MutableMapping[str, Tensor], plain: Mapping[str, str]) -> None:
        self._tensors, self._plain = tensors, plain
        self._own = {name: own for own, name in plain.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._own.get(name, name)]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._tensors[self._own.get(name, name)] = tensor

    def __delitem__(self, name: str) -> None:
        del self._tensors[self._own.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return (self._plain.get(own, own) for own in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Sliced(_Unwrapped):
    """Tensors by name, each of which is what `only` says of a larger one.

    Attributes
    ----------
    only
        What there is of each tensor.
    pieces
        The same as pieces of the tensors of a version, once one is known.
    """

    def __init__(self, tensors: MutableMapping[str, Tensor], only: Only) -> None:
        super().__init__(tensors, {})
        self.only = only
        self.pieces: dict[str, Piece] = {}

    def piece(self, name: str) -> Piece:
        """Return what a tensor is of that of a version, or a whole one before one is known."""
        tensor = self[name]
        return self.pieces.get(name) or whole_piece(name, tensor.dtype, tuple(tensor.shape))


def tensors_of(
    weights: nn.Module | M, known: Set[str] | None = frozenset()
) -> MutableMapping[str, Tensor] | M:
    """Return the tensors of weights by the names that a model has before it is wrapped.

    Names come as from `model_names`, and stay so when what this returns is passed again. What is
    written to that of a mapping is written to the mapping. What a module has as extra state is left
    out: it may be anything, and is made for each call, so it could be neither compared nor written
    element by element.
    """
    if isinstance(weights, nn.Module):
        state = _unwrapped(weights).state_dict()
        kept = {name: one for name, one in state.items() if name.rpartition(".")[2] != _EXTRA}
        return _Unwrapped(kept, model_names(kept, known))
    if isinstance(weights, _Unwrapped):
        return weights
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise InputError(f"weights are a module, or a mapping of names to tensors, got {kind}")
    names = [name for name in weights if isinstance(name, str)]
    if all(name == own for own, name in model_names(names).items()):
        return weights
    tensors = cast("MutableMapping[str, Tensor]", weights)
    return _Unwrapped(tensors, model_names(names, known))


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without wrappers around it, which may have tensors of their own."""
    while isinstance(model, DistributedDataParallel | DataParallel | AveragedModel):
        model = model.module
    return model


def parts_of(weights: Weights) -> dict[str, Part]:
    """Return the part of each tensor that this process holds.

    Raises
    ------
    InputError
        If a DTensor is cut along several dimensions, so that its rows have no common distance, or
        if elements are not there as their bits.
    """
    parts: dict[str, Part] = {}
    tensors = tensors_of(weights)
    for name, tensor in tensors.items():
        _check_dense(name, tensor)
        if isinstance(tensors, Sliced):
            piece = tensors.piece(name)
        elif isinstance(tensor, DTensor):
            piece = piece_of_shard(name, tensor)
        else:
            piece = whole_piece(name, tensor.dtype, tuple(tensor.shape))
        parts[name] = Part(piece, local_of(tensor).detach())
    return parts


def _check_dense(name: object, tensor: object) -> None:
    """Raise InputError unless a tensor's elements are there as their bits."""
    if not isinstance(name, str):
        raise InputError(f"{shown(repr(name))} is no name; names of tensors are text")
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise InputError(f"{shown(name)} is no tensor but {kind}; pass tensors by name without it")
    if is_lazy(tensor):
        raise InputError(f"{shown(name)} has no shape yet; run the module once before")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        kind = "on the device meta" if tensor.is_meta else f"of the layout {tensor.layout}"
        kind = "nested" if tensor.is_nested else kind
        raise InputError(f"{shown(name)} is {kind}; deltas need dense tensors with values")
    if tensor.dtype not in LAYOUTS:
        raise InputError(f"{shown(name)} is {tensor.dtype}, which deltas do not know; leave it out")
    if tensor.is_conj() or tensor.is_neg():
        raise InputError(f"{shown(name)} is a conjugate or negative view; resolve it first")
    local = local_of(tensor)
    if local.numel() and not local.data_ptr():
        raise InputError(
            f"{shown(name)} is a {type(local).__name__}, which keeps its values in other tensors;"
            " pass those by name"
        )


def local_of(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies the memory that holds this process's elements of a tensor."""
    local = local_of(tensor)
    # Empty ones have no address, but ties must hold on ranks with an empty shard as well.
    address = local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset())
    return address, local.device, local.dtype, local.shape, local.stride()


def owners(parts: Mapping[str, Part]) -> dict[str, str]:
    """Return, for each name, the alphabetically first name of the parts with the same memory."""
    first: dict[tuple[object, ...], str] = {}
    names = {}
    for name in sorted(parts):
        names[name] = first.setdefault(parts[name].memory, name)
    return {name: names[name] for name in parts}


def ties_of(parts: Mapping[str, Part]) -> dict[str, str]:
    """Return for each tensor that is tied to another the name of that one."""
    return {name: owner for name, owner in owners(parts).items() if name != owner}


def elements_of(parts: Mapping[str, Part]) -> int:
    """Return how many elements parts hold; those of tied ones count once."""
    return sum(part.piece.count for part in untied(parts).values())


def untied(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return one part, the owner, of all that share the same memory."""
    return {name: parts[name] for name, owner in owners(parts).items() if name == owner}


def kernel_piece(piece: Piece, bits: Tensor | None) -> _cpu.Piece:
    """Return a piece as the compiled kernels take it, with its bits on the host, or without any."""
    there = None if bits is None else bits.cpu()
    return (there, piece.count, piece.key, piece.first, piece.row, piece.stride)


def kernel_pieces(pieces: Iterable[Piece], parts: Mapping[str, Part] | None) -> list[_cpu.Piece]:
    """Return pieces as the compiled kernels take them, with the bits that parts hold, if given."""
    return [
        kernel_piece(piece, None if parts is None else parts[piece.name].gathered(piece))
        for piece in pieces
    ]


def held(pieces: Iterable[_cpu.Piece]) -> list[Tensor]:
    """Return the bits of pieces that have them."""
    return [bits for bits, *_ in pieces if bits is not None]


def sum_of(part: Part) -> int:
    """Return the sum (64 bits) of what a part's elements add to that of their version."""
    return sum(sum_of_piece(part, piece) for piece in part.piece.cuts(CHUNK_BYTES)) % (1 << 64)


def sum_of_piece(part: Part, piece: Piece) -> int:
    """Return what a piece of a part adds to the sum of its version."""
    return _cpu.delta_sum([kernel_piece(piece, part.gathered(piece))], piece.dtype.itemsize)


def version_of(tensors: Weights, number: int = 0) -> Version:
    """Return the version that weights are; of DTensors, the sum counts this rank's shards."""
    return Version(number, sum_of_parts(parts_of(tensors)))


def sum_of_parts(parts: Mapping[str, Part]) -> int:
    """Return the sum of the version that parts are; tied ones count once."""
    return sum(in_order(sum_of, untied(parts).values())) % (1 << 64)
