"""sparcel in frameworks: Lightning, the Trainer of transformers, and Accelerate.

`sparcel.integrations.lightning` and `sparcel.integrations.transformers` need their frameworks, so
they are imported by name. Accelerate needs one object, which is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.core.training import Handle

__all__ = ["FullState"]


class FullState:
    """What a framework saves on rank 0 alone, of what all ranks remember.

    ``accelerator.register_for_checkpointing`` saves rank 0's ``state_dict()`` and loads it on all
    ranks. Of the handle itself that would be rank 0's memory alone.

    Parameters
    ----------
    handle
        What `sparcel.attach` returned.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 what all ranks remember, and nothing elsewhere; all ranks call."""
        return self.handle.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from such a state; all ranks call, each with the state whole."""
        self.handle.load_state_dict(state_dict)
