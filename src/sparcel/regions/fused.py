"""The passes of the two exchanges, compiled: one over the vector for each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sparcel import _cpu
from sparcel.errors import FormatError
from sparcel.formats import Expected, FewBits, Format, Message
from sparcel.kernels import Addition, Phase
from sparcel.stream import SparseStream
from sparcel.wire import Wire

_BLOCKS = (8, 16, 32, 64)
"""How many values may share a scale: blocks of a region must have whole scales."""

_GRADIENTS = (torch.float16, torch.bfloat16, torch.float32)
_MOST = 2**31 - 1
"""The longest vector: indices of its regions are int32."""


class Fused:
    """What `ByStreams` computes, in one pass a phase: see ``csrc/streams/regions.hpp``.

    Attributes
    ----------
    sent, magnitude, applied
        See `Returned`.
    """

    applied: Sequence[Tensor] = ()

    def __init__(self, addition: Addition, wire: Wire) -> None:
        self._addition, self._wire = addition, wire
        code = wire.format.value_code
        assert isinstance(code, FewBits), "can() asked"
        self._bits, self._group = code.bits, code.block
        self.sent, self.magnitude = 0, 0.0

    @staticmethod
    def can(addition: Addition, format: Format, phases: Sequence[Phase]) -> bool:
        """Tell whether the compiled passes take such vectors and messages."""
        code, memory = format.value_code, addition.memory
        return (
            memory.is_cpu
            and memory.dtype == torch.float32
            and addition.gradient.dtype in _GRADIENTS
            and memory.numel() <= _MOST
            and addition.entering is None
            and not addition.clear
            and isinstance(code, FewBits)
            and not code.stochastic
            and code.scale == "bfloat16"
            and code.block in _BLOCKS
            and (format.indices == "packed" or all(phase.dense for phase in phases))
        )

    def enter(self, up: Phase) -> dict[int, Message]:
        """See `ByStreams.enter`."""
        it, wire = self._addition, self._wire
        messages, self.sent, self.magnitude = _cpu.enter(
            it.memory,
            it.gradient,
            it.scratch,
            it.scale,
            wire.rank,
            wire.size,
            up.regions.block,
            up.shares,
            up.most,
            up.dense,
            self._bits,
            self._group,
            wire.step,
            _headers(wire.format, up),
            torch.get_num_threads(),
        )
        return {owner: [message] for owner, message in enumerate(messages) if message is not None}

    def collect(self, arrived: Mapping[int, Message], up: Phase, down: Phase) -> Message:
        """See `ByStreams.collect`."""
        wire, sources = self._wire, sorted(arrived)
        message, magnitude, wrong = _cpu.collect(
            self._addition.scratch,
            [arrived[source][0] for source in sources],
            _headers(wire.format, up)[wire.rank],
            wire.rank,
            wire.size,
            down.regions.block,
            down.shares,
            down.most[wire.rank],
            down.dense,
            self._bits,
            self._group,
            wire.step,
            _headers(wire.format, down)[wire.rank],
            torch.get_num_threads(),
        )
        if message is None:
            raise self._fault(sources[wrong], arrived[sources[wrong]], up, wire.rank)
        self.magnitude += magnitude
        return [message]

    def deliver(
        self, returned: Mapping[int, Message], down: Phase, divisor: float, out: Tensor | None
    ) -> tuple[SparseStream, int]:
        """See `ByStreams.deliver`."""
        assert out is not None, "only streams are made without"
        entries, finite, wrong = _cpu.deliver(
            [returned[owner][0] for owner in range(self._wire.size)],
            _headers(self._wire.format, down),
            down.regions.block,
            self._bits,
            self._group,
            divisor,
            out,
            torch.get_num_threads(),
        )
        if wrong >= 0:
            raise self._fault(wrong, returned[wrong], down, wrong)
        return SparseStream.unchecked(None, out, out.numel(), finite), entries

    def _fault(self, source: int, message: Message, phase: Phase, owner: int) -> Exception:
        """Return what is wrong with a message; raise it if the decoder finds it, too."""
        length = phase.regions.length(owner)
        self._wire.decode(source, message, Expected(length, torch.float32, None))
        return FormatError(
            f"rank {source} sent rank {self._wire.rank} a bad message: it does not hold"
            f" {self._wire.format.name} values of a region of {length}"
        )


@lru_cache(maxsize=1024)
def _headers(format: Format, phase: Phase) -> tuple[bytes, ...]:
    """Return the headers of messages of all regions, without what a step decides."""
    regions = phase.regions
    return tuple(
        format.blank_header(regions.length(rank), torch.float32, phase.dense).pack()
        for rank in range(regions.ranks)
    )
