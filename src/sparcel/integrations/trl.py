"""TRL: the weights of AsyncGRPOTrainer reach vLLM servers through a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparcel.errors import InputError
from sparcel.integrations._deltas import checked_dtype, on_host
from sparcel.integrations.vllm import Server
from sparcel.products.delta import Publisher, Version, store_at


class WeightTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=...)`` takes: publishes, then lets servers load.

    Servers serve on while a version is published: they pause only to load it.

    Parameters
    ----------
    store
        A path or URL, as for `sparcel.delta.store_at`, valid here and for the servers.
    urls
        Those of the vLLM servers: see `sparcel.integrations.vllm.Server`.
    dtype
        What wider floats become before they are compared, the dtype that is served; None keeps all.
        TRL trains in float32 by default, of which nearly every bit pattern changes in a step.
    mirror
        A folder on each host of the servers, such as ``/dev/shm/run``, in which all workers there
        keep one copy of the checkpoint together. Without it, each keeps one.
    publisher
        As for `sparcel.delta.Publisher`.

    Attributes
    ----------
    version
        The last version that was published.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *urls: str,
        dtype: torch.dtype | None = torch.bfloat16,
        mirror: str | os.PathLike[str] | None = None,
        **publisher: Any,
    ) -> None:
        self.version: Version | None = None
        self._store, self._dtype, self._arguments = store, checked_dtype(dtype), publisher
        self._mirror = mirror
        self._servers = [Server(url) for url in urls]
        self._publisher: Publisher | None = None

    def init_weight_transfer(self) -> None:
        """Open the store, and tell the servers about it."""
        self._publisher = Publisher(store_at(self._store), **self._arguments)
        for server in self._servers:
            server.connect(self._store, self._mirror)

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses servers, once there is something to load."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish the weights, and let each server load them."""
        tensors = on_host(iterator, self._dtype)
        if self._publisher is None:
            raise InputError("call init_weight_transfer first, as AsyncGRPOTrainer does")
        self.version = self._publisher.publish(tensors)
        for server in self._servers:
            server.serve(self.version)

    def resume(self) -> None:
        """Do nothing: `send_weights` has resumed what it paused."""

    def destroy(self) -> None:
        """Forget the copy of the last version."""
        self._publisher = None
