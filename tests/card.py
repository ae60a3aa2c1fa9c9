"""A GPU in the tests of a machine without one: tensors on the CPU that the host cannot read.

`on_card()` makes a device of type ``card`` that takes the place of a GPU. Triton's interpreter runs
the kernels. `HostReadError` is raised by all that would make the host wait for a GPU: reading a
number, results whose length depends on the data, and copies from and to memory that is not pinned.
What is left is `device.read`, which `device.reads` counts. `launches` lists the
kernels and copies that the host would give a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from sparcel.core import device

CARD = "card"

_LENGTH_DEPENDS_ON_DATA = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("bincount", "isin", "_local_scalar_dense", "is_nonzero", "equal", "item"),
}
_COPIES = {"_to_copy", "copy_"}
_NO_KERNELS = {"new_empty", "new_empty_strided", "empty_like", "_unsafe_view", "record_stream"}
"""What runs nothing on a GPU, beside views."""


class HostReadError(AssertionError):
    """The host would have waited for the card."""


@dataclass
class Launches:
    """What a GPU was given to do, by name, in the order in which the host queued it.

    Attributes
    ----------
    triton, torch
        Kernels: Triton's, and operations of torch, of which some launch more than one.
    copies
        Between the host and the GPU.
    """

    triton: list[str] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)

    def kernels(self) -> int:
        """Return how many kernels were launched, Triton's and torch's."""
        return len(self.triton) + len(self.torch)


_counting: list[tuple[Launches, int | None]] = []
"""What is being counted, and of which thread; None for all."""


@contextmanager
def launches(everywhere: bool = False) -> Iterator[Launches]:
    """List what this thread gives the card to do meanwhile, or what all threads do."""
    counted = Launches(), None if everywhere else threading.get_ident()
    _counting.append(counted)
    try:
        yield counted[0]
    finally:
        _counting[:] = [one for one in _counting if one is not counted]


def _count(kind: str, name: str) -> None:
    for counted, thread in _counting:
        if thread in (None, threading.get_ident()):
            getattr(counted, kind).append(name)


def _count_operation(func: Any, crosses: bool, results: Any) -> None:
    """Count an operation of torch. Views are none to a GPU, nor is anything without entries."""
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):  # one kernel for many tensors, in place
        _count("torch", name)
    found = [one for one in tree_flatten(results)[0] if isinstance(one, Tensor)]
    if func.is_view or name in _NO_KERNELS or not any(one.numel() for one in found):
        return
    _count("copies" if crosses else "torch", name)


class OnCard(Tensor):
    """A tensor of the card; ``inner`` holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        """Put a tensor of the host on the card, sharing its memory."""
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{CARD}:0",
        )
        made.inner = inner
        return made

    def __setitem__(self, place: Any, value: Any) -> None:
        # torch copies the number to a GPU from memory that is not pinned; a slice is filled.
        if not isinstance(value, Tensor) and self[place].ndim == 0:
            raise HostReadError("setting one entry to a number waits for the GPU")
        super().__setitem__(place, value)

    def __repr__(self) -> str:
        return f"OnCard({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        crosses = check(func, args, kwargs)
        flat, _ = tree_flatten((args, kwargs))
        wrappers = {id(one.inner): one for one in flat if isinstance(one, OnCard)}
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        plain = tree_map_only(OnCard, lambda one: one.inner, (args, kwargs))
        result = func(*plain[0], **plain[1])
        _count_operation(func, crosses, result)
        if to_host or (func.overloadpacket.__name__ == "copy_" and not isinstance(args[0], OnCard)):
            return result
        return tree_map_only(Tensor, lambda one: _wrapped(one, wrappers), result)


def _wrapped(inner: Tensor, wrappers: dict[int, OnCard]) -> OnCard:
    """Return the tensor that has this inner one already, as after `add_`, or a new one."""
    return wrappers[id(inner)] if id(inner) in wrappers else OnCard(inner)


def check(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation copies between the host and the card.

    Raise `HostReadError` where the host would wait, and `RuntimeError` for tensors on two devices.
    """
    name = func.overloadpacket.__name__
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    if name in _LENGTH_DEPENDS_ON_DATA:
        raise HostReadError(f"{name} waits for the GPU")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        raise HostReadError("repeat_interleave without output_size waits for the GPU")
    masks = [one for one in given[1:] if one.dtype in (torch.bool, torch.uint8)]
    if name in ("index", "index_put", "index_put_", "_unsafe_index") and masks:
        raise HostReadError(f"{name} by a mask waits for the GPU")
    on_host = [one for one in given if not isinstance(one, OnCard) and one.ndim]
    crosses = False
    if name in _COPIES:
        target = kwargs.get("device")
        crosses = bool(on_host) or (target is not None and torch.device(target).type != CARD)
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        if crosses and waits:
            raise HostReadError(f"{name} between the host and the GPU waits for it")
    elif on_host:
        raise RuntimeError(f"{name} of tensors on the host and on the card")
    return crosses


class _Module(_DummyBackendModule):
    """Tells torch, which asks for any accelerator, that there is none outside of `on_card`."""

    def is_available(self) -> bool:
        return CARD in device.GPUS


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return CARD in device.GPUS


@lru_cache
def _register() -> None:
    """Make the device, once a process; tensors are made on it from then on."""
    _setup_privateuseone_for_python_backend(CARD, _Module(), _Hook())

    @torch.library.impl("aten::empty.memory_format", "PrivateUse1")
    def empty(size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return OnCard(torch.empty(size, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::empty_strided", "PrivateUse1")
    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
        return OnCard(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::arange.start_step", "PrivateUse1")
    def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, **_: Any) -> Tensor:
        _count("torch", "arange")
        return OnCard(torch.arange(start, end, step, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::arange.start", "PrivateUse1")
    def arange_from(start: Any, end: Any, dtype: Any = None, **_: Any) -> Tensor:
        _count("torch", "arange")
        return OnCard(torch.arange(start, end, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::arange", "PrivateUse1")
    def arange_to(end: Any, dtype: Any = None, **_: Any) -> Tensor:
        _count("torch", "arange")
        return OnCard(torch.arange(end, dtype=dtype, device="cpu"))

    @torch.library.impl("aten::_copy_from", "PrivateUse1")
    def copy_from(*_: Any) -> Tensor:
        raise HostReadError("making a tensor of numbers of the host waits for the GPU")


@contextmanager
def interpreted() -> Iterator[None]:
    """Let Triton's interpreter convert from and to bfloat16 as a GPU does, and be quicker.

    It cuts bits off instead of rounding, and misreads the smallest numbers.

    It replaces the functions of Triton's language anew for each call of a function, and inside of
    that for each function which that calls. For each type it makes a table of all types anew.
    """
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    cut, replaced = InterpreterBuilder.create_fp_trunc, interpreter._patch_lang
    misread, looked_up = InterpreterBuilder.create_fp_ext, interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return cut(self, source, kind)
        halves = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(halves.numpy().view(np.uint16), kind.scalar)

    def widened(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar != tl.bfloat16 or kind.scalar != tl.float32:
            return misread(self, source, kind)
        bits = np.asarray(source.data).astype(np.uint32) << np.uint32(16)
        return TensorHandle(bits.view(np.float32), kind.scalar)

    def type_of(kind: Any) -> Any:
        if kind.name not in types:
            types[kind.name] = looked_up(kind)
        return types[kind.name]

    whole = replaced(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    InterpreterBuilder.create_fp_trunc, InterpreterBuilder.create_fp_ext = rounded, widened
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    interpreter._get_np_dtype = type_of
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype = replaced, looked_up
        InterpreterBuilder.create_fp_trunc, InterpreterBuilder.create_fp_ext = cut, misread
        whole.restore()


@contextmanager
def on_card() -> Iterator[torch.device]:
    """Let the card take the place of a GPU meanwhile; where there is a GPU, skip the test."""
    if torch.cuda.is_available():
        pytest.skip("nothing stands in for a GPU where there is one")
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    _register()
    start = interpreter.GridExecutor.__call__
    pinned, copied = device._pinned, device._copied

    def unwrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = tree_map_only(OnCard, lambda one: one.inner, (args, kwargs))
        _count("triton", self.fn.__name__)
        return start(self, *plain[0], **plain[1])

    interpreter.GridExecutor.__call__ = unwrapped
    device._pinned, device._copied = _unpinned, _read
    device.GPUS.add(CARD)
    try:
        with interpreted():
            yield torch.device(CARD, 0)
    finally:
        device.GPUS.discard(CARD)
        device._pinned, device._copied = pinned, copied
        interpreter.GridExecutor.__call__ = start


def moved(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the card."""
    return OnCard(tensor.clone())


def seen(tensor: Tensor) -> Tensor:
    """Return what a tensor of the card, or of the host, holds."""
    return tensor.inner if isinstance(tensor, OnCard) else tensor


def _unpinned(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _read(parts: list[Tensor]) -> list[Tensor]:
    _count("copies", "read")
    for _ in parts[1:]:
        _count("copies", "copy_")
    return [seen(part).clone() for part in parts]
