"""CPU kernels of sparcel; sparcel.core.kernels documents them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer, CapsuleType

Array: TypeAlias = Tensor | CapsuleType
"""A tensor, or its capsule from `torch.utils.dlpack.to_dlpack`, which is read ten times faster."""

NumpyArray: TypeAlias = NDArray[Any]

def isa() -> str:
    """Name the instruction set in use."""

def set_isa(name: str) -> None:
    """Use 'portable', 'avx2' or 'avx512', for tests and benchmarks."""

def empty(bytes: int) -> Tensor:
    """Make an uninitialised uint8 tensor whose memory is used again later."""

def kept_bytes() -> int:
    """Tell how many bytes of freed memory wait to be used again."""

def drop_kept() -> None:
    """Give the system the freed memory that waits to be used again, and what malloc keeps."""

def topk(x: Tensor, k: int, chunk: int, threads: int) -> tuple[Tensor, Tensor]: ...
def accumulate_topk(
    memory: Tensor,
    gradient: Tensor,
    scratch: Tensor,
    scale: float,
    momentum: float,
    velocity: Tensor | None,
    entering: Tensor | None,
    clear: bool,
    k: int,
    chunk: int,
    threads: int,
) -> tuple[Tensor, Tensor, bool]: ...
def threshold_select(x: Tensor, threshold: Tensor, threads: int) -> tuple[Tensor, Tensor]: ...
def sums_of_squares(vectors: Sequence[Array], chunk: int, threads: int) -> Tensor: ...
def moved(
    tensors: Sequence[
        tuple[Array, Array, float, tuple[Array, Array | None, float, float, float, float] | None]
    ],
    threads: int,
) -> list[Tensor]:
    """Move values along a direction, at a rate, as Adam scales it if there is a scale.

    A scale has squares and perhaps the largest ones, β₂, 1 − β₂, the correction and ε.
    """

def magnitude_histogram(
    x: Tensor, shift: int, bins: int, prefix: int | None, threads: int
) -> Tensor: ...
def magnitude_ends(x: Tensor, threads: int) -> Tensor: ...
def bracket(x: Tensor, thresholds: Tensor, k: int, threads: int) -> Tensor: ...
def merge(
    indices: Sequence[Tensor], values: Sequence[Tensor], width: int | None, op: str, threads: int
) -> tuple[Tensor, Tensor]: ...
def join_message(header: bytes, parts: Sequence[Array]) -> Tensor: ...
def merge_messages(
    messages: Sequence[Sequence[Array]], size: int, dtype: int, op: str, threads: int
) -> tuple[Tensor, Tensor, bool] | None: ...
def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, width: int, op: str) -> None: ...
def scatter(dense: Tensor, indices: Tensor, values: Tensor, width: int) -> None: ...
def expand(dense: Tensor, fill: Tensor, indices: Tensor, values: Tensor, width: int) -> None: ...
def add_saturated(dense: Tensor, indices: Tensor, values: Tensor) -> None: ...
def within(
    indices: Tensor, values: Tensor, others: Tensor, width: int | None
) -> tuple[Tensor, Tensor]: ...
def without(
    indices: Tensor, values: Tensor, others: Tensor, width: int | None
) -> tuple[Tensor, Tensor]: ...
def check_indices(indices: Array, size: int) -> int: ...
def pack_indices(indices: Array, size: int) -> Tensor: ...
def unpack_indices(words: Array, count: int, size: int) -> Tensor | None: ...

class MalformedLineError(ValueError):
    """Its arguments are the line, counted from 0 in its block, and what is wrong with it."""

def parse_svmlight(
    block: Buffer, index_from: int, dimensions: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return offsets, columns, values, labels (NaN if no numbers) and the labels' spans."""

def quantize(
    x: Array, bits: int, block: int, seed: int | None, offset: int, narrow: bool, threads: int
) -> tuple[Tensor, Tensor, Tensor]: ...
def dequantize(
    codes: Array, scales: Array, size: int, bits: int, block: int, threads: int
) -> Tensor: ...
def limited(x: Array, brain: bool, threads: int) -> Tensor: ...
def hash_ngrams(
    text: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    classes: NDArray[np.uint8],
    analyzer: str,
    low: int,
    high: int,
    lowercase: bool,
    dimensions: int,
    alternate_sign: bool,
    binary: bool,
    norm: str | None,
    threads: int,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """Make sparse rows of documents' n-grams; `sparcel.rows.HashedNGrams` documents it.

    Document i is ``text[offsets[i] : offsets[i + 1]]``, in UTF-8. ``classes`` tells of a code point
    whether it is of a word (1) or white space (2); only ASCII is lowered.
    """

class Mesh:
    """Connections to peers; `GlooEngine` of `core.comm.torch` documents it."""

    def __init__(self, sockets: Sequence[int]) -> None: ...
    def exchange(
        self,
        sends: Sequence[tuple[int, Sequence[Array]]],
        receives: Sequence[tuple[int, int]],
        seconds: float,
        call: int,
    ) -> tuple[list[NDArray[np.uint8]], int, int, int]: ...
    def all_to_all(
        self,
        rank: int,
        message: NumpyArray | Tensor,
        leaving: Sequence[int],
        out: NumpyArray | Tensor,
        arriving: Sequence[int],
        seconds: float,
        call: int,
    ) -> tuple[int, int, int]: ...
    def shut(self) -> None: ...
    def broken(self) -> list[int]: ...

class LinearModel:
    """The numbers of a linear model and its regularisation; see `products.linear.weights`."""

    scale: float
    now: float
    def __init__(
        self, rows: NumpyArray, width: int, adaptive: bool, l1: float, l2: float
    ) -> None: ...
    def step(
        self,
        columns: NumpyArray | Tensor | None,
        values: NumpyArray | Tensor,
        factor: float,
        rate: float,
        sums: NumpyArray | None,
        weight: float,
        threads: int,
    ) -> None: ...
    def step_sum(
        self,
        columns: NumpyArray,
        bounds: Sequence[int],
        values: NumpyArray,
        tail: int,
        total: NumpyArray,
        factor: float,
        rate: float,
        sums: NumpyArray | None,
        weight: float,
        threads: int,
    ) -> None: ...
    def read_at(self, columns: NumpyArray | Tensor, out: NumpyArray, threads: int) -> None: ...
    def read(self, out: NumpyArray) -> None: ...

class LinearBatch:
    """A batch of rows by columns; see `sparcel.products.linear.batches`."""

    def __init__(
        self,
        columns: NumpyArray,
        places: NumpyArray,
        values: NumpyArray,
        targets: NumpyArray,
        weights: NumpyArray | None,
    ) -> None: ...
    def differentiate(
        self,
        coordinates: NumpyArray,
        loss: str,
        intercept: Sequence[float],
        derivatives: NumpyArray,
        threads: int,
    ) -> list[float]: ...
    def gradient(
        self, derivatives: NumpyArray, width: int, out: NumpyArray, threads: int
    ) -> None: ...

def by_columns(
    offsets: NumpyArray,
    columns: NumpyArray,
    values: NumpyArray,
    bounds: Sequence[int],
    out_columns: NumpyArray,
    out_places: NumpyArray,
    out_values: NumpyArray,
    threads: int,
) -> list[int]: ...

class LinearShard:
    """A rank's rows by columns; see `sparcel.products.linear.coordinate_descent`."""

    def __init__(
        self,
        offsets: NumpyArray,
        rows: NumpyArray,
        values: NumpyArray,
        targets: NumpyArray,
        weights: NumpyArray | None,
        width: int,
    ) -> None: ...
    def differentiate(
        self,
        loss: str,
        margins: NumpyArray,
        chosen: NumpyArray,
        before: NumpyArray,
        after: NumpyArray,
        out: NumpyArray,
        threads: int,
    ) -> None: ...
    def change(
        self, columns: NumpyArray, changes: NumpyArray, margins: NumpyArray, threads: int
    ) -> None: ...
    def loss(self, loss: str, margins: NumpyArray, threads: int) -> float: ...

def transpose(
    offsets: NumpyArray,
    columns: NumpyArray,
    values: NumpyArray,
    starts: NumpyArray,
    out_rows: NumpyArray,
    out_values: NumpyArray,
    threads: int,
) -> None: ...

# Exchanges by regions: see csrc/streams/bind_regions.cpp.

def enter(
    memory: Tensor,
    gradient: Tensor,
    scratch: Tensor,
    scale: float,
    rank: int,
    ranks: int,
    block: int,
    shares: Sequence[tuple[int, float]],
    most: Sequence[int],
    dense: bool,
    bits: int,
    group: int,
    step: int,
    leaving: Sequence[bytes],
    threads: int,
) -> tuple[list[Tensor], int, float]: ...
def collect(
    x: Tensor,
    messages: Sequence[Tensor] | Tensor,
    expected: bytes,
    arriving: tuple[int, int],
    rank: int,
    ranks: int,
    block: int,
    shares: Sequence[tuple[int, float]],
    most: int,
    dense: bool,
    bits: int,
    group: int,
    step: int,
    header: bytes,
    threads: int,
) -> tuple[Tensor, float, bool]: ...
def deliver(
    messages: Sequence[Tensor] | Tensor,
    expected: Sequence[bytes],
    block: int,
    bits: int,
    group: int,
    divisor: float,
    out: Tensor,
    threads: int,
) -> tuple[int, bool, bool]: ...

# Changes of weights: see csrc/delta/bind_delta.cpp. A piece has its elements, or None if they are
# not known, its count, key, first, row and stride.

Piece: TypeAlias = tuple[Tensor | None, int, int, int, int, int]
CODE_SLACK: int
MOST_CLASSES: int

def delta_encode(
    old: Sequence[Piece],
    now: Sequence[Piece],
    itemsize: int,
    floats: bool,
    fraction: int,
    most_classes: int,
    steps: bool,
) -> tuple[list[int], int, list[int], list[int], int, bytes, bytes, bytes, int]: ...
def delta_decode(
    pieces: Sequence[Piece],
    itemsize: int,
    floats: bool,
    fraction: int,
    code: str,
    shift: int,
    limits: Sequence[int],
    counts: Sequence[int],
    data: NumpyArray,
    values_begin: int,
    bits_begin: int,
    end: int,
) -> tuple[Tensor, Tensor, int] | None: ...
def delta_swap(pieces: Sequence[Piece], places: Tensor, values: Tensor) -> None: ...
def delta_remember(elements: Tensor, floats: bool) -> Tensor: ...
def delta_recall(now: Tensor, low: Tensor, floats: bool) -> Tensor: ...
def delta_sum(pieces: Sequence[Piece], itemsize: int) -> int: ...
