"""Messages that arrive in parts: whole, as control and payload, or as they were sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Return a message in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
