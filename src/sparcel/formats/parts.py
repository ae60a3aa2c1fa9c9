"""A message: its header, the parts that hold the values, and the part that tells their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.formats.header import HEADER_BYTES, Header, padded


def join(header: Header, parts: Sequence[Tensor]) -> Tensor:
    """Return the message of a header and contiguous parts, each padded."""
    if parts[0].is_cpu:
        return _cpu.join_message(header.pack(), [to_dlpack(part) for part in parts])
    return join_by_torch(header, parts)


def join_by_torch(header: Header, parts: Sequence[Tensor]) -> Tensor:
    """Return what `join` returns, on any device."""
    message = torch.zeros(header.length, dtype=torch.uint8, device=parts[0].device)
    header.pack_into(message)
    start = HEADER_BYTES
    for part in parts:
        content = part.flatten().view(torch.uint8)
        message[start : start + content.numel()] = content
        start += padded(content.numel())
    return message
