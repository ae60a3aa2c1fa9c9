"""The callback that attaches to the model of each fit, and keeps its memory in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from sparcel.integrations._framework import attach_wrapped, go_on
from sparcel.integrations.lightning import _sharded

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.schemes import Scheme
    from sparcel.training import Handle

_WAY_OUT = (
    'pass strategy="ddp" to the Trainer, or HybridShardStrategy() for models of fully_shard, or'
    " leave the callback out"
)


class Sparcel(Callback):  # type: ignore[misc]
    """Lets sparcel exchange the gradients of each `Trainer.fit`, with DDP or `HybridShardStrategy`.

    Each fit begins with an empty memory, unless ``ckpt_path`` gives it one. Checkpoints hold the
    memory of all ranks, also those that are saved after the fit. One process alone trains as it
    does without the callback.

    Parameters
    ----------
    scheme_or_name, arguments
        As for `sparcel.attach`: ``Sparcel("topk", density=0.01)``. The optimiser, if there is only
        one, and the scaler of mixed precision are found.

    Attributes
    ----------
    handle
        That of the last fit; None before training starts, and in one process alone. It is closed
        when training ends, and its statistics stay.

    Raises
    ------
    InputError
        When a fit begins, for another strategy, and for what `sparcel.attach` refuses.

    Warns
    -----
    SparcelWarning
        When a fit begins in one process alone, or from a checkpoint that holds no memory.
    """

    state_key = "sparcel"  # of subclasses, too: the strategy looks for it in checkpoints

    def __init__(self, scheme_or_name: Scheme | str | None = None, **arguments: Any) -> None:
        self.handle: Handle | None = None
        self._arguments = {"scheme_or_name": scheme_or_name, **arguments}
        self._sharded = False
        self._state: dict[str, Tensor] = {}
        """What a checkpoint held, until training begins; what the training ended with, after it."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the fit before, and what was loaded for a test."""
        if stage == "fit":
            self._close()
            self.handle, self._state = None, {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model, which is wrapped now, and load what the checkpoint holds."""
        arguments: dict[str, Any] = {"scaler": getattr(trainer.precision_plugin, "scaler", None)}
        if len(trainer.optimizers) == 1:
            arguments["optimizer"] = trainer.optimizers[0]
        arguments |= self._arguments
        strategy, checkpoint = trainer.strategy, trainer.ckpt_path
        replicas = _sharded.replicas(strategy)
        self._sharded = replicas is not None
        if replicas is None:
            copies = strategy.model, trainer.world_size
        else:
            copies = _sharded.root(pl_module), replicas
        self.handle = attach_wrapped(*copies, _WAY_OUT, arguments)
        if self.handle is None or checkpoint is None:
            return
        if self._sharded:
            self._state = _sharded.load(self.handle, checkpoint)
        go_on(self.handle, self._state, checkpoint)
        self._state = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the exchange; checkpoints can still be saved."""
        self._state = self.state_dict()
        self._close()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what all ranks remember, or this rank's shards of it; all ranks call."""
        if self.handle is None or self.handle.closed:
            return self._state
        return self.handle.state_dict() if self._sharded else self.handle.full_state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Keep what a checkpoint holds until the model is wrapped."""
        self._state = state_dict

    def _close(self) -> None:
        if self.handle is not None:
            self.handle.close()
