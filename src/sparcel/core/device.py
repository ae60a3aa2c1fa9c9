"""What passes between the host and a GPU: control that the host reads, and numbers it sends.

A GPU works behind the host, which waits only for what decides, such as how long a result is or
whether all was finite (`read`), and for messages that it sends (`read_all`). It then waits for an
event on copies in pinned memory. What need not be known at once, such as whether a message was
sound, waits for the next `read`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from math import isfinite
from operator import and_
from typing import Any, TypeAlias

import torch
from torch import Tensor

GPUS = {"cuda"}
"""The types of devices whose kernels are Triton's."""


Number: TypeAlias = float | Tensor
"""A number or a flag, of Python, or a tensor of one element on a device."""

Checks: TypeAlias = list[tuple[Tensor, Callable[[], Exception]]]
"""What waits for the next read: flags on a GPU, and what makes the exception if one is set."""


class _Thread(threading.local):
    """The checks of this thread, and how often it has read."""

    def __init__(self) -> None:
        self.checks: Checks = []
        self.reads = 0


_thread = _Thread()


def read(control: Tensor) -> Tensor:
    """Return a small tensor on the host, and raise what the checks of `later` have found.

    Parameters
    ----------
    control
        Any shape and dtype. A tensor on the host is returned as it is.
    """
    return _read([control])[0].clone() if control.device.type in GPUS else control.cpu()


def read_all(messages: Sequence[Tensor]) -> list[Tensor]:
    """Return bytes on the host, in order, by one `read` of those that are on a GPU.

    Parameters
    ----------
    messages
        uint8, ``[nbytes]``. Those on the host are returned as they are; the others come in pinned
        memory, once each, however often they are in the list.
    """
    far = {id(message): message for message in messages if message.device.type in GPUS}
    near = dict(zip(far, _read(list(far.values())), strict=True)) if far else {}
    return [near.get(id(message), message) for message in messages]


def _read(parts: list[Tensor]) -> list[Tensor]:
    """Return tensors of a GPU on the host, and raise what checks have found."""
    checks = _thread.checks.copy()
    _thread.checks.clear()
    _thread.reads += 1
    copies = _copied([*parts, *(fault for fault, _ in checks)])
    for found, (_, complaint) in zip(copies[len(parts) :], checks, strict=True):
        if found:
            raise complaint()
    return copies[: len(parts)]


def numbers(values: Sequence[Number]) -> list[Any]:
    """Return numbers and flags on the host, in order, by one `read` of those that are on a GPU.

    Parameters
    ----------
    values
        Of Python, or tensors of one element of any dtype.
    """
    far = {id(one): one for one in values if isinstance(one, Tensor) and one.device.type in GPUS}
    found: dict[int, Tensor] = {}
    if far:
        # A GPU takes about as long for a copy of some bytes as for a copy of many.
        (content,) = _read([torch.cat([one.reshape(-1).view(torch.uint8) for one in far.values()])])
        parts = content.split([one.element_size() for one in far.values()])
        # A clone begins where any dtype may.
        found = {
            key: part.clone().view(far[key].dtype) for key, part in zip(far, parts, strict=True)
        }
    settle()
    held = [found.get(id(one), one) for one in values]
    return [one.item() if isinstance(one, Tensor) else one for one in held]


def finite_flag(values: Tensor) -> bool | Tensor:
    """Return whether values are finite: those of a device as a flag there, without a wait."""
    if not values.is_floating_point() or not values.numel():
        return True
    if values.is_cpu and isfinite(values.sum().item()):
        return True
    # Finite values may have a sum that is not.
    flag = torch.linalg.vector_norm(values, torch.inf) < torch.inf
    return bool(flag) if flag.is_cpu else flag


def all_of(flags: Sequence[bool | Tensor]) -> bool | Tensor:
    """Return whether all flags are true, on the device where one of them is."""
    there = [flag for flag in flags if isinstance(flag, Tensor)]
    here = all(flag for flag in flags if not isinstance(flag, Tensor))
    return reduce(and_, there) if here and there else here


def truth(flag: bool | Tensor) -> bool:
    """Return a flag that may be on a device, without dimensions, on the host."""
    return bool(flag if isinstance(flag, bool) else read(flag))


def read_flagged(numbers: Tensor, flag: bool | Tensor) -> tuple[Tensor, bool]:
    """Return integers and a flag on the host, by one `read`."""
    if isinstance(flag, bool) or flag.device != numbers.device:
        return read(numbers), truth(flag)
    both = read(torch.cat([numbers, flag.view(1).to(numbers.dtype)]))
    return both[:-1], bool(both[-1])


def later(fault: bool | Tensor, complaint: Callable[[], Exception]) -> None:
    """Raise ``complaint()`` if ``fault`` is true: now on the host, else at this thread's next read.

    Parameters
    ----------
    fault
        A bool, or a tensor of one without dimensions. That of a device without memory is not true.
    complaint
        Makes the exception.
    """
    if isinstance(fault, Tensor) and fault.device.type in GPUS:
        _thread.checks.append((fault, complaint))
    elif not (isinstance(fault, Tensor) and fault.is_meta) and fault:
        raise complaint()


def settle() -> None:
    """Wait for the checks of `later`, if there are any."""
    if checks := _thread.checks:
        read(torch.zeros((), dtype=torch.uint8, device=checks[0][0].device))


def reads() -> int:
    """Return how often this thread has waited for a GPU in `read`."""
    return _thread.reads


def checks() -> Checks:
    """Return the list of this thread's checks."""
    return _thread.checks


@contextmanager
def adding_to(checks: Checks) -> Iterator[None]:
    """Let this thread's checks be these ones meanwhile; after an error they are void."""
    before, _thread.checks = _thread.checks, checks
    try:
        yield
    except BaseException:
        checks.clear()
        raise
    finally:
        _thread.checks = before


def put(numbers: Sequence[float] | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers of the host on a device, without waiting for it.

    A tensor keeps its shape.
    """
    host = torch.as_tensor(numbers, dtype=dtype, device="cpu")
    if device.type not in GPUS:
        return host.to(device)
    return _pinned(host.shape, dtype).copy_(host).to(device, non_blocking=True)


def put_rows(
    messages: Mapping[int, Tensor], rows: int, nbytes: int, device: torch.device
) -> Tensor:
    """Return a tensor ``[rows, nbytes]`` on a GPU, by one copy, without waiting for it.

    Parameters
    ----------
    messages
        Bytes (uint8) of the host, with which rows begin; the rest holds anything.
    """
    host = _pinned((rows, nbytes), torch.uint8)
    for row, message in messages.items():
        host[row, : message.numel()] = message
    return host.to(device, non_blocking=True)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory of the host that a GPU reads and writes by itself."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _copied(parts: list[Tensor]) -> list[Tensor]:
    """Return copies on the host, once they are complete."""
    copies = [_pinned(part.shape, part.dtype).copy_(part, non_blocking=True) for part in parts]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(parts[0].device))
    event.synchronize()
    return copies
