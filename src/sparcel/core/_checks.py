"""Checks of arguments and settings, and of tensors that become part of a stream."""

from __future__ import annotations

from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparcel.core import device, kernels
from sparcel.errors import InputError

Array: TypeAlias = Tensor | np.ndarray[Any, Any]
"""What users may give where sparcel works with tensors of the host."""

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VALUE_DTYPES = (*FLOAT_DTYPES, torch.int32, torch.int64)
"""A dtype's place here is its number in a message's header."""


def checked_whole(
    value: object,
    name: str,
    at_least: int | None = None,
    at_most: int | None = None,
    hint: str = "",
) -> int:
    """Return ``value`` as an int, or raise an `InputError` that names it and ends with ``hint``.

    Integers of numpy, and of tensors without dimensions, are whole numbers; bools and floats are
    none.
    """
    given = _plain(value)
    if not isinstance(given, int) or isinstance(given, bool):
        raise _refusal(name, "be a whole number", given, hint)
    checked_number(given, name, at_least=at_least, at_most=at_most, hint=hint)
    return given


def checked_number(
    value: object,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> float:
    """Return ``value`` as a float, or raise an `InputError` that names it and ends with ``hint``.

    Numbers of numpy, and of tensors without dimensions, are numbers; bools are none. NaN is outside
    of every range.
    """
    given = _plain(value)
    if not isinstance(given, Real) or isinstance(given, bool):
        raise _refusal(name, "be a number", given, hint)
    try:
        found = float(given)
    except OverflowError:
        raise InputError(f"{name} must be a number that float64 holds, got a larger one") from None
    low, high = (at_least if above is None else above), (at_most if below is None else below)
    exact: Any = given  # as a float, a large whole number may round beyond its limit
    high_enough = low is None or (exact >= low if above is None else exact > low)
    low_enough = high is None or (exact <= high if below is None else exact < high)
    if high_enough and low_enough:
        return found
    if high is None:
        limits = f"be {'at least' if above is None else 'more than'} {low}"
    else:
        opening, closing = "[" if above is None else "(", "]" if below is None else ")"
        limits = f"lie in {opening}{low}, {high}{closing}"
    raise _refusal(name, limits, given, hint)


def checked_filter(value: object, name: str, hint: str) -> float:
    """Return a filter β that a state holds, or raise `InputError`; memory is divided by it."""
    found = checked_number(value, name, above=0, at_most=1, hint=hint)
    return checked_number(found, name, at_least=torch.finfo(torch.float32).tiny, hint=hint)


def checked_flag(value: object, name: str) -> bool:
    """Return ``value`` as a bool, or raise an `InputError` that names it."""
    given = _plain(value)
    if not isinstance(given, bool):
        raise _refusal(name, "be True or False", given)
    return given


def check_type(value: object, kind: type, name: str, hint: str = "") -> None:
    """Raise an `InputError` that names ``value`` and ends with ``hint`` unless it is a ``kind``."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise _refusal(name, f"be {article} {kind.__name__}", value, hint)


def check_callable(value: object, name: str) -> None:
    """Raise an `InputError` that names ``value`` unless it can be called."""
    if not callable(value):
        raise _refusal(name, "be a function", value)


def _plain(value: Any) -> Any:
    """Return the Python number that a number of numpy or a tensor without dimensions holds."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _refusal(name: str, expected: str, value: object, hint: str = "") -> InputError:
    """Return the error; it shows numbers and texts, and the type of other values."""
    short = isinstance(value, str | Real | None)
    got = repr(value) if short else type(value).__name__
    return InputError(f"{name} must {expected}, got {got}" + (f"; {hint}" if hint else ""))


def as_tensor(value: Array, name: str) -> Tensor:
    """Return a tensor as it is, and an array of NumPy as a tensor, with the same memory if it can.

    Raises
    ------
    InputError
        When ``value``, which the error names ``name``, is neither, or torch lacks its dtype.
    """
    if isinstance(value, np.ndarray):
        try:
            # Torch takes no array that is read-only or has negative strides.
            return torch.from_numpy(np.require(value, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} must be of a dtype that torch has: {error}") from error
    check_type(value, Tensor, name)
    return value


def check_values(values: Tensor, size: int, dense: bool) -> None:
    """Raise `InputError` unless ``values`` can be the values of a stream of ``size``."""
    if values.dtype not in VALUE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_DTYPES)
        raise InputError(f"values must be one of {names}, got {values.dtype}")
    if values.ndim not in (1, 2):
        raise InputError(
            f"values must be [nnz], or rows [nnz, width], got shape {tuple(values.shape)}"
        )
    if dense and values.shape[0] != size:
        raise InputError(
            f"a dense stream of size {size} needs {size} values, got {values.shape[0]}"
        )


def checked_indices(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the indices in the dtype and layout of a stream of ``size``, or raise `InputError`."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise InputError(f"indices must be int32 or int64, got {indices.dtype}")
    if indices.ndim != 1 or indices.numel() != values.shape[0]:
        raise InputError(
            f"indices must be one-dimensional, one per value: got shape {tuple(indices.shape)}"
            f" for {values.shape[0]} values"
        )
    if indices.device != values.device:
        raise InputError(
            f"indices must be where values are, on {values.device}, got {indices.device}"
        )
    dtype = kernels.index_dtype(size)
    # The dtype must hold both the given indices and the size that they are compared with.
    indices = indices.to(torch.promote_types(indices.dtype, dtype)).contiguous()
    position = kernels.check_indices(indices, size)
    if position >= 0:
        found = int(indices[position])
        if not 0 <= found < size:
            raise InputError(f"index {found} at position {position} is outside [0, {size})")
        raise InputError(
            f"indices must be strictly increasing, got {int(indices[position - 1])} and then"
            f" {found} at position {position}; sort them and merge duplicates first"
        )
    return indices.to(dtype)


def all_finite(values: Tensor) -> bool:
    """Tell whether all values are finite, without allocating a mask as large as ``values``."""
    return device.truth(device.finite_flag(values))


def check_part(part: object, name: str, size: int | None, hint: str) -> None:
    """Raise an `InputError` unless ``part`` can be what a state holds of ``size`` coordinates.

    Its values are not read. ``size`` is None if it is not known.
    """
    check_type(part, Tensor, name, hint)
    assert isinstance(part, Tensor)
    if part.dtype not in FLOAT_DTYPES or part.layout != torch.strided or part.is_meta:
        kind = f"{part.dtype}, {part.layout} on {part.device}"
        raise InputError(f"{name} must be a dense tensor of floats, got {kind}; {hint}")
    if part.ndim != 1 or size not in (None, part.numel()):
        expected = "one dimension" if size is None else f"shape ({size},)"
        raise InputError(f"{name} must have {expected}, got shape {tuple(part.shape)}; {hint}")


def check_like(out: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """Raise an `InputError` unless ``out`` is contiguous, of this shape, and of ``like``'s kind."""
    check_type(out, Tensor, "out")
    if (tuple(out.shape), out.dtype, out.device) != (shape, like.dtype, like.device):
        raise InputError(
            f"out must be {like.dtype} of shape {shape} on {like.device}, got {out.dtype} of shape"
            f" {tuple(out.shape)} on {out.device}"
        )
    if not out.is_contiguous():
        raise InputError(f"out must be contiguous, got strides {out.stride()}")
