"""Failures around DDP's rebuild of its buckets are raised with their cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.training import Handle


class RebuildGuard:
    """Makes the ranks wait for one another before and after DDP rebuilds its buckets, once.

    DDP tells all ranks its new buckets at the start of a forward pass, by a collective of its own.
    If a rank failed meanwhile, the others would get a RuntimeError of the engine without the cause.
    Between the two waits no code of the user runs, so only a rank that is killed can fail there.
    What stays an error of the engine: that, and any failure during the broadcast of buffers (as
    BatchNorm has), which DDP repeats in every forward pass unless ``broadcast_buffers=False``.
    """

    _handle: Handle | None = None
    """None in a copy of the model, where nothing is guarded."""

    def __init__(self, model: DistributedDataParallel, handle: Handle) -> None:
        self._handle = handle
        self._hook = model.register_forward_pre_hook(self._before, prepend=True)

    def __getstate__(self) -> None:
        """Copy or pickle nothing."""

    def _before(self, model: DistributedDataParallel, arguments: Any) -> None:
        if self._handle is None or not torch.is_grad_enabled():
            return  # DDP rebuilds its buckets in a later pass
        self._hook.remove()
        # In join(), a rank may have no forward pass. A closed handle refuses the backward pass.
        if not model._join_config.enable and not self._handle.closed:
            self._handle.meet()
            self._hook = model.module.register_forward_pre_hook(self._after, prepend=True)

    def _after(self, module: nn.Module, arguments: Any) -> None:
        if self._handle is not None:
            self._hook.remove()
            self._handle.meet()
