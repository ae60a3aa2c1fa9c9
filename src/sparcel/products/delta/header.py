"""The header of a chunk, and how what others wrote is parsed."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby, repeat
from typing import Any

from sparcel.errors import FormatError, InputError, SparcelError, shown
from sparcel.products.delta.elements import MOST_DIMS, MOST_PIECES, Layout, Piece, whole_piece

_WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What Python raises when data have another form than was expected."""

_MOST_NESTED = 1 << 17
"""Most lists and objects in a header, and brackets in its names: each takes dozens of bytes."""

_MOST = 16 << 20
"""Most bytes of a header, and of the names that it tells."""

_FREE, _RATIO = 4 << 10, 32
"""A header may unpack to so many bytes, and so many more for each byte that it has packed. Names of
tensors shrink to about a twenty-fifth, and nothing that is worth reading to a thousandth."""

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
"""A number in a name that Python writes as it stands there."""

_NUMBERS = 2
"""How many numbers of a name are told apart from its text: those of a layer and an expert."""

_DICTIONARY = (
    b'"untied":["lm_head.weight"],"ties":{"model.embed_tokens.weight"]"code":"removed""code":"xor"'
    b'"dtype":"int32""dtype":"float16""dtype":"float8_e5m2""dtype":"float32""code":"values"'
    b'"code":"dense""dtype":"int8""embedding","lm_head","norm.weight","layers.",".attn.qkv",".bias"]'
    b'"transformer.h.",".mlp.c_fc",".mlp.c_proj",".attn.c_attn",".block_sparse_moe.experts."'
    b'".weight_global_scale"],".weight_packed"],".weight_scale_inv"],".weight_scale"],"_blocks"]'
    b'".input_layernorm.weight"],".post_attention_layernorm",".self_attn.q_norm",".mlp.experts."'
    b'".mlp.down_proj.weight"],".mlp.gate_proj",".mlp.up_proj",".self_attn.o_proj",".self_attn.k_proj"'
    b'"code":"nibbles","dtype":"uint8""dtype":"float8_e4m3fn","cuts":[[0,33554432]],"limits":[],'
    b'"limits":[122,121,120,119,118],"shift":16,"new":true,"shard":[1,8],"last":false'
    b'{"target":1,"base":0,"part":0,"changes":[1],"streams":[1,1,1],"code":"steps","dtype":"bfloat16",'
    b'"tensors":[[1,["model.embed_tokens.weight"],[32000,4096],[]],[32,["model.layers.",'
    b'".self_attn.v_proj.weight"],[4096,1024],[[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,'
    b'21,22,23,24,25,26,27,28,29,30,31]]]],"cuts":[],"limits":[],"shift":0,"nibbles":0,"new":false,'
    b'"shard":[0,1],'
    b'"last":true,"ties":{},"untied":[]}'
)
"""What headers have in common: it is part of the layout, and never changes."""


@contextmanager
def malformed(what: str, way_out: str = "") -> Iterator[None]:
    """Raise FormatError if the block, which parses something, meets anything unexpected."""
    try:
        yield
    except SparcelError:
        raise
    except (*_WRONG, zlib.error) as error:
        hint = f"; {way_out}" if way_out else ""
        raise FormatError(f"{what}: {shown(repr(error))}{hint}") from None


def _nested(text: bytes) -> int:
    """Return how many lists and objects a text may have."""
    return text.count(b"[") + text.count(b"{")


def is_too_nested(text: bytes) -> bool:
    """Tell whether a list of files or tensors has more brackets than `loads` takes.

    A tensor has three in at least 48 bytes, and a file fewer; names may have some more.
    """
    return _nested(text) > _MOST_NESTED + len(text) // 16


def loads(text: bytes) -> Any:
    """Parse a list of files or tensors, or raise ValueError if it would take too much memory."""
    if is_too_nested(text):
        raise ValueError(f"it has {_nested(text)} brackets in {len(text)} bytes")
    return json.loads(text)


def whole(number: object, limit: int = 1 << 63) -> int:
    """Return a whole number below a limit, or raise ValueError."""
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < limit:
        raise ValueError(f"{number!r} is no whole number below {limit}")
    return number


def packed(header: Mapping[str, object]) -> bytes:
    """Pack a header, or raise InputError if it would be longer than readers take."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > _MOST or _nested(text) > _MOST_NESTED:
        raise InputError(
            f"a chunk's names take {len(text)} bytes with {_nested(text)} brackets, and may"
            f" take {_MOST} with {_MOST_NESTED}: shorten them"
        )
    packings = (_deflated(text, level) for level in (9, 1, 0))
    return next(one for one in packings if len(text) <= _most_text(len(one)))


def _deflated(text: bytes, level: int) -> bytes:
    packer = zlib.compressobj(level, wbits=-zlib.MAX_WBITS, zdict=_DICTIONARY)
    return packer.compress(text) + packer.flush()


def unpacked(packed: memoryview) -> dict[str, Any]:
    """Return a header that was packed, or raise ValueError or zlib's error."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_DICTIONARY)
    most = _most_text(len(packed))
    text = unpacker.decompress(packed, most + 1)  # of 0 it would take for no limit
    if not unpacker.eof or len(text) > most:
        raise ValueError(f"it is torn, or longer than {most} bytes")
    if _nested(text) > _MOST_NESTED:
        raise ValueError(f"it has {_nested(text)} brackets")
    header: dict[str, Any] = json.loads(text)
    return header


def _most_text(packed: int) -> int:
    """Return how long a header may be that is packed to so many bytes."""
    return min(_FREE + _RATIO * packed, _MOST)


def template_of(name: str) -> tuple[str, ...]:
    """Return what names have in common that differ in numbers: the text around these."""
    return tuple(_NUMBER.split(name, _NUMBERS)[::2])


def description_of(pieces: Sequence[Piece]) -> dict[str, object]:
    """Return the fields of a header that describe pieces.

    Consecutive pieces with alike names and the same shape are described together: by their number,
    the text of their names without numbers, the shape, and a list for each number in the names.
    """
    tensors = []
    for (template, shape), alike in groupby(pieces, lambda one: (template_of(one.name), one.shape)):
        rows = [[int(n) for n in _NUMBER.split(one.name, _NUMBERS)[1::2]] for one in alike]
        tensors.append([len(rows), template, shape, list(zip(*rows, strict=True))])
    cuts = [_cut(piece) for piece in pieces]
    return {"tensors": tensors, "cuts": cuts if any(cuts) else []}


def _cut(piece: Piece) -> list[int]:
    if piece.count == piece.size:
        return []
    rows = [] if piece.ranges else [piece.row, piece.stride]
    return [piece.first, piece.count, *rows]


def pieces_of(header: Mapping[str, Any], layout: Layout) -> Iterator[Piece]:
    """Yield the pieces that a header describes; what else it may hold, `malformed` must catch."""
    count = sum(whole(count) for count, *_ in header["tensors"])
    if count > MOST_PIECES:
        raise ValueError(f"more than {MOST_PIECES} pieces")
    cuts = header["cuts"] or [()] * count
    for (name, shape), cut in zip(_tensors_of(header["tensors"]), cuts, strict=True):
        yield _piece_of(whole_piece(name, layout.dtype, shape), *cut)


def _tensors_of(groups: Sequence[Sequence[Any]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    room = _MOST
    for count, template, lengths, columns in groups:
        shape = _shape_read(lengths)
        for row in zip(*columns, strict=True) if columns else repeat((), count):
            name = _name_of(template, row)
            room -= len(name)
            if room < 0:
                raise ValueError(f"names of more than {_MOST} characters")
            yield name, shape
            count -= 1
        if count:
            raise ValueError(f"{count} tensors have no numbers")


def _shape_read(lengths: Sequence[Any]) -> tuple[int, ...]:
    shape = tuple(whole(length) for length in lengths)
    if len(shape) > MOST_DIMS:
        raise ValueError(f"{len(shape)} dimensions")
    whole(math.prod(length or 1 for length in shape))  # or torch could not make it
    return shape


def _name_of(template: Sequence[str], numbers: Sequence[int]) -> str:
    """Put numbers between the parts of a template."""
    after = [str(whole(number)) for number in numbers]
    return "".join(chain.from_iterable(zip(template, [*after, ""], strict=True)))


def _piece_of(tensor: Piece, *cut: Any) -> Piece:
    if not cut:
        return tensor
    first, count, *rows = cut
    row, stride = map(whole, rows or (tensor.row, tensor.stride))
    if not (row >= 1 and stride >= 1 and (whole(count) <= row or stride >= row)):
        raise ValueError(f"rows of {row} elements every {stride}")
    piece = replace(tensor, first=whole(first), row=row, stride=stride, count=count)
    if piece.end > tensor.size:
        raise ValueError(f"element {piece.end - 1} of {tensor.size} in {shown(tensor.name)}")
    return piece
