"""What frameworks and engines share: what is told where one is missing, and how weights pass."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.errors import InputError, MissingDependencyError, SparcelWarning
from sparcel.integrations import attach_wrapped
from sparcel.integrations._deltas import narrowed


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_missing_framework_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f"sparcel.integrations.{framework}"
    for name in [name for name in sys.modules if f"{name}.".startswith((f"{ours}.", framework))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(MissingDependencyError) as raised:
        import_module(ours)
    assert str(raised.value) == f"{ours} needs {framework}: install it as its project says"


def test_other_wrappers_are_refused_with_a_way_out() -> None:
    with pytest.raises(InputError) as raised:
        attach_wrapped(nn.Linear(2, 2), 4, "say ddp", {})
    assert str(raised.value).endswith("and 4 processes train a Linear; say ddp")


def steps_of_a_compiled_model(comm: Communicator) -> int:
    """Attach to a DDP object that was compiled already, as Accelerate does, and do a step."""
    compiled = torch.compile(DistributedDataParallel(nn.Linear(40, 60)), backend="eager")
    handle = attach_wrapped(compiled, comm.size, "say ddp", {"scheme_or_name": "topk"})
    assert handle is not None
    compiled(torch.ones(1, 40)).sum().backward()
    handle.close()
    return handle.stats().steps


@pytest.mark.slow
@pytest.mark.processes
def test_a_compiled_model_is_reached(run_on: Any) -> None:
    assert run_on(2, steps_of_a_compiled_model) == [1, 1]


def test_one_model_alone_is_left_as_it_is() -> None:
    with pytest.warns(SparcelWarning, match="there is one copy of the model, so sparcel"):
        assert attach_wrapped(nn.Linear(2, 2), 1, "say ddp", {}) is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
def test_floats_wider_than_a_dtype_become_it_and_others_stay(dtype: torch.dtype | None) -> None:
    for before in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
        ((name, after),) = narrowed([("w", torch.ones(3, dtype=before))], dtype)
        is_wider = (
            dtype is not None and before.is_floating_point and before.itemsize > dtype.itemsize
        )
        assert (name, after.dtype) == ("w", dtype if is_wider else before)
