"""TRL: the weights of AsyncGRPOTrainer reach vLLM servers through a store.

`encode_patch` and `iter_sparse_patches` have the shape of functions that were proposed to TRL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparcel.delta import Publisher, Version, decode, encode, store_at
from sparcel.errors import InputError
from sparcel.integrations._weights import on_host
from sparcel.integrations.vllm import Server


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
        self._store, self._dtype, self._arguments = store, dtype, publisher
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


def encode_patch(
    iterator: Iterable[tuple[str, Tensor, Tensor | None]], model_version: int = 0
) -> tuple[dict[str, Tensor] | None, dict[str, str] | None]:
    """Encode elements that have changed, for callers that know where, but not from what.

    It has the shape of ``encode_patch`` in TRL's pull requests 5417, 5932 and 5937; TRL 1.16.0 has
    no such function. The tensors that it returns are sparcel's chunks, not theirs: new values, and
    places coded by how many there are. `iter_sparse_patches` reads them. As nobody says which
    weights the patch is for, nothing can check that, and a `sparcel.delta.Subscriber` would not
    take it. A `sparcel.delta.Publisher` compares weights by itself, and makes smaller files.

    Parameters
    ----------
    iterator
        Names, tensors, and masks of what has changed; without a mask, all is sent.
    model_version
        Noted in the metadata.

    Returns
    -------
    tensors, metadata
        What ``safetensors.torch.save_file(tensors, path, metadata)`` writes; two None if nothing
        has changed.
    """
    tensors: dict[str, Tensor] = {}
    base: dict[str, Tensor] = {}
    changed: list[int] = []
    for name, tensor, mask in iterator:
        # Copies: tied tensors would count as one, and each has a mask of its own.
        tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if mask is not None:
            base[name] = _other_where(tensors[name], mask.cpu())
        changed.append(tensor.numel() if mask is None else int(mask.sum()))
    if not any(changed):
        return None, None
    chunks = encode(tensors, base, code="values", target=model_version)
    metadata = {
        "format": "sparcel_patch",
        "model_version": model_version,
        "num_changed_params": sum(count > 0 for count in changed),
        "total_changed_elements": sum(changed),
        "total_elements": sum(tensor.numel() for tensor in tensors.values()),
    }
    return (
        {f"chunk.{i}": _bytes(chunk) for i, chunk in enumerate(chunks)},
        {key: str(value) for key, value in metadata.items()},
    )


def iter_sparse_patches(file: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names, indices (int64, counted row by row) and new values from a patch.

    Parameters
    ----------
    file
        What ``safetensors.safe_open`` returned for a file that holds what `encode_patch` made. A
        tensor of more than 4 MiB comes in several parts.
    """
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        for change in decode(memoryview(file.get_tensor(name).numpy())):
            if change.values is not None and len(change.values):
                yield change.name, change.indices, change.values


def _other_where(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return a copy of which the elements in the mask, and no others, have other bits."""
    other = tensor.clone()
    octets = other.view(-1).view(torch.uint8).view(-1, tensor.itemsize)
    octets[mask.reshape(-1)] ^= 1
    return other


def _bytes(chunk: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(chunk, np.uint8).copy())
