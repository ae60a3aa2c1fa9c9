"""What deltas, weights and publishers must satisfy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from sparcel.delta.chunk import Chunk
from sparcel.delta.parts import Part
from sparcel.errors import InputError, VersionError


def check_pace(anchor_every: int, lag: int) -> None:
    """Raise InputError unless a publisher can publish and prune so often."""
    if anchor_every < 1 or lag < 0:
        raise InputError(
            f"anchor_every must be at least 1, and lag at least 0, got {anchor_every}, {lag}"
        )


def check_together(chunks: list[Chunk]) -> None:
    """Raise VersionError unless chunks are all those of one version."""
    if not chunks:
        raise VersionError("there are no chunks to apply; a version has at least one")
    first = chunks[0]
    for chunk in chunks:
        told = (chunk.base, chunk.target, chunk.shards)
        if told != (first.base, first.target, first.shards):
            raise VersionError(
                f"chunks of different versions: {first.base} to {first.target}, and {chunk.base} to"
                f" {chunk.target}"
            )
    for shard in range(first.shards):
        mine = [chunk for chunk in chunks if chunk.shard == shard]
        parts = sorted(chunk.part for chunk in mine)
        last = [chunk.part for chunk in mine if chunk.last]
        if not parts or parts != list(range(len(mine))) or last != parts[-1:]:
            raise VersionError(
                f"version {first.target} is not whole: of shard {shard} there are chunks {parts},"
                f" and the last one is {last}; fetch it again"
            )


def check_names(
    target: object, tensors: Mapping[str, Tensor], added: Iterable[str], leaving: set[str]
) -> None:
    """Raise VersionError unless tensors can appear and vanish as a delta says."""
    added = set(added)
    if isinstance(target, nn.Module) and (added or leaving):
        names = ", ".join(sorted(added | leaving))
        raise VersionError(f"a module's tensors cannot appear, vanish or change shape: {names}")
    there = sorted(added & tensors.keys() - leaving)
    missing = sorted(leaving - tensors.keys())
    if there or missing:
        raise VersionError(
            f"these weights are not the base of the delta: {there} are there already, and {missing}"
            " are not; fetch a full version"
        )


def check_writable(parts: Mapping[str, Part]) -> None:
    """Raise InputError unless each element of each tensor can be written alone."""
    for name, part in parts.items():
        local = part.local
        if any(
            not step and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)
        ):
            raise InputError(f"several elements of {name} are one in memory; pass a copy of it")
