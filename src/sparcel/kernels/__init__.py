"""The operations over whole vectors that everything else is built from.

Tensors are contiguous and one-dimensional unless a function says otherwise; results live on the
device of the input. Indices are int32 where they can count the coordinates, else int64, and sorted.
Magnitudes are ordered by the bits of ``|x|``, so NaN > Inf > finite numbers; zeros are never
selected. `reference` says in plain torch what each kernel means; on the CPU the compiled ones do
the work. The device of the tensors decides: callers choose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels import cpu, reference
from sparcel.kernels.reference import index_dtype
from sparcel.ops import Op

__all__ = [
    "accumulate_topk",
    "check_indices",
    "dequantize",
    "index_dtype",
    "magnitude_histogram",
    "merge",
    "quantize",
    "scatter",
    "scatter_reduce",
    "threshold_select",
    "topk",
    "topk_chunked",
]


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the entries of largest magnitude, exactly.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    k
        How many to select, at least 0.

    Returns
    -------
    indices, values
        ``[min(k, nnz)]`` each; ties go to the lowest index.
    """
    if x.is_cpu:
        return cpu.topk(x, k)
    return reference.topk(x, k)


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Select the entries of largest magnitude of every ``chunk`` consecutive ones.

    SparCML's bucketed selection (section 8.3: of every 512) and ScaleCom's chunk-wise one.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64; its last chunk may be short.
    k
        How many to select of each chunk, at least 0: min(k, nnz of the chunk) are.
    chunk
        Length of a chunk, at least 1.

    Returns
    -------
    indices, values
        Over the whole vector; ties go to the lowest index.
    """
    if x.is_cpu:
        return cpu.topk_chunked(x, k, chunk)
    return reference.topk_chunked(x, k, chunk)


def accumulate_topk(
    memory: Tensor, gradient: Tensor, scratch: Tensor, k: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, bool]:
    """Add gradient and memory, select the largest magnitudes, and keep the rest in ``scratch``.

    One pass: ``scratch = memory + gradient``, with 0 where an entry was selected.

    Parameters
    ----------
    memory
        ``[n]``, float32 or float64; left as it was.
    gradient
        ``[n]``, float16, bfloat16, float32 or float64, converted to the dtype of ``memory`` before
        it is added; left as it was.
    scratch
        ``[n]``, overwritten; the dtype of ``memory``, overlapping neither of the others.
    k
        How many to select, at least 0.
    chunk
        Select k of every ``chunk`` consecutive entries; None for k of all.

    Returns
    -------
    indices, values
        What was selected: values in the dtype of ``memory``.
    finite
        Whether all of ``memory + gradient`` was finite. Where it was not, the selection and
        ``scratch`` mean nothing.
    """
    if memory.is_cpu:
        return cpu.accumulate_topk(memory, gradient, scratch, k, chunk)
    return reference.accumulate_topk(memory, gradient, scratch, k, chunk)


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Select the entries whose magnitude is at least ``threshold``, and not 0.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    threshold
        At least 0; rounded to the dtype of ``x`` before it is compared.

    Returns
    -------
    indices, values
        What was selected; NaN always is.
    """
    if x.is_cpu:
        return cpu.threshold_select(x, threshold)
    return reference.threshold_select(x, threshold)


def merge(streams: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    """Reduce sorted streams to one.

    Where several streams hold an index, ``op`` is applied from left to right in the order of the
    sequence: the result depends on nothing else. float16 and bfloat16 are reduced in float32 and
    rounded once, at the end.

    Parameters
    ----------
    streams
        At least one pair of indices ``[nnz]``, sorted and unique, and values ``[nnz]`` or rows
        ``[nnz, width]``. All pairs agree in dtypes and width; values may be float16, bfloat16,
        float32, float64, int32 or int64 (integers wrap on overflow).
    op
        How values of one index are combined.

    Returns
    -------
    indices, values
        The union of the indices, and one value or row each; dtypes as in ``streams``.
    """
    if not streams:
        raise InputError("merge needs at least one stream, got none")
    if streams[0][0].is_cpu:
        return cpu.merge(streams, op)
    return reference.merge(streams, op)


def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, op: Op) -> None:
    """Apply ``dense[i] = op(dense[i], v)`` in place for each index and its value or row.

    Parameters
    ----------
    dense
        ``[n]`` or rows ``[n, width]``, any dtype that `merge` takes.
    indices
        ``[nnz]``, unique, within ``dense``.
    values
        ``[nnz]`` or ``[nnz, width]``; converted to the dtype of ``dense`` before the operation.
    op
        How values are combined; float16 and bfloat16 go through float32.
    """
    implementation = cpu if dense.is_cpu else reference
    implementation.scatter_reduce(dense, indices, values, op)


def scatter(dense: Tensor, indices: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """Apply ``dense[i] = v * scale`` in place for each index and its value or row.

    Parameters
    ----------
    dense
        ``[n]`` or rows ``[n, width]``, any dtype that `merge` takes.
    indices
        ``[nnz]``, unique, within ``dense``.
    values
        ``[nnz]`` or ``[nnz, width]``; converted to the dtype of ``dense`` before it is scaled.
    scale
        Rounded to the dtype of ``dense`` (float32 for halves); must be 1 for integers.
    """
    if scale != 1.0 and not dense.is_floating_point():
        raise InputError(f"scale must be 1 for {dense.dtype}, got {scale}; scale floats instead")
    implementation = cpu if dense.is_cpu else reference
    implementation.scatter(dense, indices, values, scale)


def magnitude_histogram(x: Tensor, shift: int, bins: int, prefix: int | None = None) -> Tensor:
    """Count one field of the bits of ``|x|``, for a radix select over several ranks.

    With ``m`` the bits of ``|x|`` read as an integer (15, 31 or 63 bits) and ``bins = 2**b``, bin
    ``j`` counts the entries, other than zeros, with ``(m >> shift) % bins == j`` and, when a prefix
    is given, ``m >> (shift + b) == prefix``. A radix select over float32 asks for
    ``(20, 2048)``, then ``(10, 1024, first)``, then ``(0, 1024, first << 10 | second)``.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    shift
        Bits below the field.
    bins
        A power of two: the field's range.
    prefix
        What the bits above the field must be; None when the field reaches the top.

    Returns
    -------
    Tensor
        int64 ``[bins]``.

    Raises
    ------
    InputError
        When ``bins`` is no power of two, or the prefix is None with bits left above the field.
    """
    if bins < 1 or bins & (bins - 1):
        raise InputError(f"bins must be a power of two, got {bins}")
    field_end = shift + bins.bit_length() - 1
    magnitude_width = 8 * x.element_size() - 1
    if prefix is None and field_end < magnitude_width:
        raise InputError(
            f"the field ends at bit {field_end} of {magnitude_width}: give the prefix of the bits "
            "above it, or a larger shift"
        )
    if x.is_cpu:
        return cpu.magnitude_histogram(x, shift, bins, prefix)
    return reference.magnitude_histogram(x, shift, bins, prefix)


def quantize(
    x: Tensor, bits: int, bucket: int, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantise to sign and level, each bucket scaled by its largest magnitude, unbiased.

    QSGD (Alistarh et al. 2017) with s = 2**(bits - 1) - 1 levels, as in SparCML section 6. A
    magnitude between two levels goes up with the probability that keeps its mean; the random
    number of an entry depends on ``seed`` and ``offset`` + its position alone, so every machine
    gets the same bits. A bucket of zeros stays zeros; one with NaN or Inf comes back as NaN.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64 (rounded to float32).
    bits
        8, 4 or 2 a value.
    bucket
        Consecutive values that share a scale.
    seed
        Names the sequence of random numbers; any integer, modulo 2**64.
    offset
        Position of ``x[0]`` in that sequence, at least 0.

    Returns
    -------
    packed
        uint8 ``[ceil(n * bits / 8)]``, the lowest bits of a byte first; of a code, the sign is the
        highest bit.
    scales
        float32 ``[ceil(n / bucket)]``.
    """
    _check_bits(bits, bucket)
    if x.is_cpu:
        return cpu.quantize(x, bits, bucket, seed, offset)
    return reference.quantize(x, bits, bucket, seed, offset)


def dequantize(packed: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Turn what `quantize` made back into values.

    Parameters
    ----------
    packed, scales
        As `quantize` returned them.
    size
        Length of the vector that was quantised.
    bits, bucket
        As given to `quantize`.

    Returns
    -------
    Tensor
        float32 ``[size]``.

    Raises
    ------
    InputError
        When the lengths do not fit ``size``.
    """
    _check_bits(bits, bucket)
    expected = -(-size * bits // 8), -(-size // bucket)
    if (packed.numel(), scales.numel()) != expected:
        raise InputError(
            f"{size} values of {bits} bits in buckets of {bucket} need {expected[0]} bytes and "
            f"{expected[1]} scales, got {packed.numel()} and {scales.numel()}"
        )
    if packed.is_cpu:
        return cpu.dequantize(packed, scales, size, bits, bucket)
    return reference.dequantize(packed, scales, size, bits, bucket)


def check_indices(indices: Tensor, size: int) -> int:
    """Find the first index that is not in [0, size) or not greater than the one before it.

    Parameters
    ----------
    indices
        ``[nnz]``, int32 or int64.
    size
        Number of coordinates.

    Returns
    -------
    int
        Its position, or -1 when all is well.
    """
    if indices.is_cpu:
        return cpu.check_indices(indices, size)
    return reference.check_indices(indices, size)


def _check_bits(bits: int, bucket: int) -> None:
    if bits not in (8, 4, 2):
        raise InputError(f"bits must be 8, 4 or 2, got {bits}")
    if bucket < 1:
        raise InputError(f"bucket must be at least 1, got {bucket}")
