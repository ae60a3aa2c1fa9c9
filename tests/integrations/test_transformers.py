"""The Trainer of transformers: attach() exchanges, and its memory is beside checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparcel.core.comm import Communicator
from sparcel.errors import InputError, SparcelWarning
from tests.integrations.launched import (
    Trained,
    as_by_accelerate,
    assert_not_interrupted,
    largest,
    needs,
    said,
)

pytestmark = needs("transformers", "accelerate")

STEPS = 6
SAVED = 3


def language() -> list[dict[str, Tensor]]:
    """Return sequences in which each token tells the next."""
    sequences = [(torch.arange(16) * (step + 3) + step) % 64 for step in range(64)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in sequences]


def trainer(folder: Path, **settings: Any) -> Any:
    """Return a Trainer of a transformer with dropout and tied weights, by AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(7)
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    arguments = TrainingArguments(
        str(folder),
        disable_tqdm=True,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_strategy="no",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        report_to="none",
        save_steps=SAVED,
        save_strategy="steps",
        use_cpu=True,
        **settings,
    )
    data = language()
    return Trainer(
        GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)),
        arguments,
        train_dataset=data,
        eval_dataset=data[:8],
    )


def attached(made: Any) -> Any:
    from sparcel.integrations.transformers import attach

    return attach(made, "topk", density=0.05, frontload=False)


def trained(folder: Path, resumed: Path | None = None) -> Trained:
    """Train in fresh objects, from a checkpoint if there is one, and evaluate in between."""
    made = trainer(folder, eval_strategy="steps", eval_steps=2)
    callback = attached(made)
    made.train(resume_from_checkpoint=resumed and str(resumed))
    parameters = [parameter.detach() for parameter in made.model.parameters()]
    return Trained(parameters, callback.handle.state_dict(), callback.handle.stats())


def interrupted(comm: Communicator, folder: Path) -> tuple[Trained, Trained]:
    """Train without interruption, and from a checkpoint."""
    with as_by_accelerate(comm):
        return trained(folder), trained(folder / "resumed", folder / f"checkpoint-{SAVED}")


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(
    run_on: Any, tmp_path: Path
) -> None:
    ranks = run_on(2, interrupted, tmp_path)
    assert_not_interrupted(ranks, STEPS, SAVED)
    for rank, (through, _) in enumerate(ranks):
        assert largest(through.memory, rank) > 0


class BrokenError(Exception):
    """What ends a training."""


def lives(comm: Communicator, folder: Path) -> list[tuple[int, bool]]:
    """Train, evaluate, train again, break, and train from the last checkpoint, by one Trainer."""
    from transformers import TrainerCallback

    class Break(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise BrokenError

    seen = []

    def note() -> None:
        seen.append((callback.handle.stats().training_steps, callback.handle.closed))

    with as_by_accelerate(comm):
        life = trainer(folder)
        callback = attached(life)
        life.train()
        note()
        life.evaluate()
        life.train()
        note()
        life.add_callback(Break)
        with pytest.raises(BrokenError):
            life.train()
        note()
        life.remove_callback(Break)
        life.args.max_steps = STEPS + 1
        life.train(resume_from_checkpoint=True)
        note()
    return seen


def test_a_trainer_trains_again(run_on: Any, tmp_path: Path) -> None:
    for seen in run_on(2, lives, tmp_path):
        assert seen == [(STEPS, True), (STEPS, True), (1, False), (STEPS + 1, True)]


def told(comm: Communicator, folder: Path) -> tuple[list[str], str]:
    """Return what is said of a checkpoint without memory, and of a model without DDP."""
    with as_by_accelerate(comm):
        dense = trainer(folder)
        dense.train()
        made = trainer(folder)
        attached(made)
        with pytest.warns(SparcelWarning) as warned:
            made.train(str(folder / f"checkpoint-{SAVED}"))
        unwrapped = trainer(folder)
        attached(unwrapped)
        unwrapped.evaluate()  # Trainer then trains the model as it is, each rank by itself
        with pytest.raises(InputError) as refused:
            unwrapped.train()
    return said(warned), str(refused.value)


def test_what_is_missing_is_told(run_on: Any, tmp_path: Path) -> None:
    for warnings, refused in run_on(2, told, tmp_path):
        (only,) = warnings
        assert only.endswith("checkpoint-3 holds no memory of sparcel, which starts empty")
        assert "2 processes train a GPT2LMHeadModel" in refused
        assert "train() before evaluate()" in refused
