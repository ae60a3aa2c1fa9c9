"""Which coordinates of a dense vector are largest."""

from __future__ import annotations

from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels import cpu, reference


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
