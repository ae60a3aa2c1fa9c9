"""transformers: sparcel exchanges the gradients of a Trainer on several processes."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparcel.core._files import replacing
from sparcel.errors import optional
from sparcel.integrations import attach_wrapped, load_or_warn

with optional("sparcel.integrations.transformers"):
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

if TYPE_CHECKING:
    from sparcel.core.schemes import Scheme
    from sparcel.core.training import Handle

_FILE = "sparcel.pt"
_WAY_OUT = (
    "leave fsdp and deepspeed out of TrainingArguments, and call train() before evaluate(), after"
    " which Trainer does not wrap the model"
)


def attach(
    trainer: Trainer, scheme_or_name: Scheme | str | None = None, **arguments: Any
) -> SparcelCallback:
    """Let sparcel exchange the gradients of each `Trainer.train`; all ranks call.

    Each training begins with an empty memory, unless ``resume_from_checkpoint`` gives it one. The
    folder of each checkpoint holds the memory of all ranks, in ``sparcel.pt``. One process alone
    trains as it does without sparcel.

    Parameters
    ----------
    trainer
        Before it trains. A callback is added to it, and its `train` tells the callback which
        checkpoint it resumes from: Trainer has no event that would.
    scheme_or_name, arguments
        As for `sparcel.attach`: ``attach(trainer, "topk", density=0.01)``. The optimiser, and the
        scaler of mixed precision, are found.

    Returns
    -------
    SparcelCallback
        Its ``handle`` is that of the last training.

    Raises
    ------
    InputError
        When a training begins, for a model that the Trainer does not wrap in DDP, and for what
        `sparcel.attach` refuses.

    Warns
    -----
    SparcelWarning
        When a training begins in one process alone, or resumes from a checkpoint without memory.
    """
    callback = SparcelCallback(trainer, {"scheme_or_name": scheme_or_name, **arguments})
    trainer.add_callback(callback)
    train = trainer.train

    @wraps(train)
    def train_from(resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        if resume_from_checkpoint is True:
            found = get_last_checkpoint(trainer.args.output_dir)
            resume_from_checkpoint = found or True  # Trainer says that there is none
        callback.on_train_end()  # an exception may have ended the training before
        callback.resumed = resume_from_checkpoint or None
        return train(resume_from_checkpoint, *others, **named)

    trainer.train = train_from
    return callback


class SparcelCallback(TrainerCallback):  # type: ignore[misc]
    """What `attach` adds to a Trainer.

    Attributes
    ----------
    handle
        That of the last training; None before the first one, and in one process alone. It is closed
        when training ends, and its statistics stay.
    resumed
        The checkpoint that the training resumes from, if any.
    """

    def __init__(self, trainer: Trainer, arguments: dict[str, Any]) -> None:
        self.handle: Handle | None = None
        self.resumed: str | None = None
        self._trainer, self._arguments = trainer, arguments

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Attach to the model, which is wrapped now, and load what the checkpoint holds."""
        if self.handle is not None:
            self.handle.close()  # the training begins once more, with smaller batches
        trainer = self._trainer
        found = {"optimizer": trainer.optimizer, "scaler": trainer.accelerator.scaler}
        self.handle = attach_wrapped(
            trainer.model_wrapped, args.world_size, _WAY_OUT, found | self._arguments
        )
        if self.handle is not None and self.resumed is not None:
            file = Path(self.resumed, _FILE)
            saved = torch.load(file, mmap=True, weights_only=True) if file.is_file() else {}
            load_or_warn(self.handle, saved, self.resumed)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Save what all ranks remember in the folder of the checkpoint."""
        # Nobody resumes from others: the optimiser is not saved, or they are of a search's trial.
        if self.handle is None or args.save_only_model or state.is_hyper_param_search:
            return
        saved = self.handle.full_state_dict()
        if args.process_index == 0:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            with replacing(folder / _FILE) as file:
                torch.save(saved, file)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the exchange, if there is one, and let the next training wrap the model anew."""
        if self.handle is not None:
            self.handle.close()
            self._trainer.model_wrapped = self._trainer.model
