"""A stand-in for what TRL calls, with the signatures of 1.16.0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class WeightTransferProtocol(Protocol):
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
