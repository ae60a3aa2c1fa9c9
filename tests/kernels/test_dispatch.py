"""A kernel runs the function for the device of its tensors, or else its definition."""

import inspect

import pytest
import torch
from torch import Tensor

from sparcel.core import device, kernels
from sparcel.core.kernels import Addition, by_device, cpu
from sparcel.errors import FormatError
from tests.card import moved, on_card

HERE, THERE = torch.ones(1), torch.ones(1, device="meta")


def added(memory: Tensor) -> Addition:
    return Addition(memory, memory, memory)


def test_the_device_decides() -> None:
    kernel = by_device(lambda first, *_: "definition", cpu=lambda first, *_: "cpu")
    for first in (HERE, added(HERE), [HERE, HERE], [(HERE, HERE)]):
        assert kernel(first, 1) == "cpu"
    for first in (THERE, added(THERE), [THERE], [HERE, THERE], [(HERE, HERE), (THERE, THERE)], []):
        assert kernel(first, 1) == "definition"


def test_a_kernel_is_described_by_its_definition() -> None:
    assert kernels.topk.__doc__ is not None and "Parameters" in kernels.topk.__doc__
    compiled = dict(inspect.getmembers(cpu, inspect.isfunction))
    own = {name for name in compiled if compiled[name].__module__ == cpu.__name__}
    for name in {name for name in own if not name.startswith("_")}:
        described = inspect.signature(getattr(kernels, name))
        assert list(described.parameters) == list(inspect.signature(compiled[name]).parameters)


def test_compiled_kernels_get_no_tensors_of_other_devices() -> None:
    dense = torch.empty(10, device="meta")
    indices = torch.empty(3, dtype=torch.int32, device="meta")
    kernels.scatter(dense, indices, torch.empty(3, device="meta"))
    assert dense.shape == (10,)


def test_torch_gets_no_indices_of_a_corrupt_message_on_a_gpu() -> None:
    """To torch, an index out of bounds is the end of CUDA; so what is wrong is raised before."""
    pytest.importorskip("triton")
    plain = by_device(lambda first: "definition", lambda first: "cpu")
    with on_card():
        there = moved(HERE)
        assert plain(there) == "definition"
        device.later(moved(torch.tensor(True)), lambda: FormatError("a corrupt message"))
        with pytest.raises(FormatError, match="a corrupt message"):
            plain(there)
