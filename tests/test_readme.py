"""The README's examples run as printed, and links and targets of the pages are right."""

import csv
import os
import re
import shlex
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import sparcel
from sparcel.comm import Communicator
from sparcel.training import Averager

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs/training.md").read_text()


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


SCRIPT, SAVE, LOAD, LOG, PUBLISH = python_of(README)
SHARDED = "".join(python_of((ROOT / "docs/fsdp.md").read_text()))
EXAMPLES = [SCRIPT, *python_of((ROOT / "docs/streams.md").read_text()), SHARDED]
LAUNCHES = re.findall(r"^torchrun .*$", README, re.MULTILINE)

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def run(script: str, folder: Path) -> None:
    (folder / "train.py").write_text(script)
    (launch,) = LAUNCHES
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(launch if "init_process_group" in script else "python train.py"),
        cwd=folder,
        env={**os.environ, "PATH": beside_python},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_the_first_example_trains_with_all_that_protects_training() -> None:
    (arguments,) = re.findall(r"sparcel\.attach\(model, (.*)\)$", SCRIPT, re.MULTILINE)
    assert arguments == "optimizer=optimizer"
    defaults = signature(sparcel.attach).parameters
    assert defaults["scheme_or_name"].default is None
    assert defaults["ahead"].default is defaults["frontload"].default is True


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "example", EXAMPLES, ids=["training", "all_reduce", "simulate", "fully_shard"]
)
def test_example_runs_as_printed(example: str, tmp_path: Path) -> None:
    run(example, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_training_resumes_from_the_checkpoint_as_printed(tmp_path: Path) -> None:
    """Train, save, attach to a new model, load there, and train on."""
    begin, attach, train, end = re.split(
        r"^(?=model =|for epoch|print)", SCRIPT, flags=re.MULTILINE
    )
    seen = "assert (handle.stats().training_steps, handle.stats().steps) == (2000, 1000)\n"
    new = f"handle.close()\ndist.barrier()\n{attach}"
    run("".join([begin, attach, train, SAVE, new, LOAD, train, seen, end]), tmp_path)


def test_weights_are_published_as_printed(tmp_path: Path) -> None:
    model, served = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    names = {"sparcel": sparcel, "model": model, "served_model": served}
    exec(PUBLISH.replace("/shared/run", str(tmp_path)), names)
    assert torch.equal(model.weight, served.weight)


def handle() -> sparcel.Handle:
    """Return what is attached in a training of two ranks, after a step."""

    def on_rank(comm: Communicator) -> sparcel.Handle:
        averager = Averager({"weight": torch.zeros(64, 64)}, sparcel.scheme("topk"), group=comm)
        averager.average({"weight": torch.randn(64, 64)})
        return averager.handle

    return sparcel.simulate(2, on_rank).results[0]


def tensorboard_writer(folder: Path) -> Mock:
    """Return TensorBoard's writer where it is installed; its calls are noted."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        return Mock(["add_scalar", "close"])
    return Mock(wraps=SummaryWriter(folder))  # type: ignore[no-untyped-call]


def test_profiles_are_made_as_printed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = python_of(TRAINING[TRAINING.index("## Profiles") :])
    exec(snippet, {"model": torch.nn.Linear(4, 4), "batch": torch.ones(2, 4)})
    assert "traceEvents" in Path("step.json").read_text()


def test_loggers_get_the_numbers_as_printed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    wandb, module = Mock(["log"]), Mock(["log_dict"])
    writer = tensorboard_writer(tmp_path)
    attached = handle()
    numbers = attached.stats().as_dict()
    names = {"handle": attached, "step": 1, "csv": csv}
    names |= {"wandb": wandb, "self": module, "writer": writer}
    section = TRAINING[TRAINING.index("## Logging") : TRAINING.index("## Profiles")]
    assert LOG in python_of(section)
    for snippet in python_of(section):
        exec(snippet, names)
    wandb.log.assert_called_once_with(numbers, step=1)
    module.log_dict.assert_called_once_with(numbers)
    assert {call.args[0]: call.args[1] for call in writer.add_scalar.call_args_list} == numbers
    writer.close()
    del names  # closes the file
    with open("costs.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: float(number) for name, number in row.items()} == numbers


@page_by_page
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_diffs_of_contributing_are_in_the_code() -> None:
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(diffs) == 3
    for part in re.split(r"^--- ", "".join(diffs), flags=re.MULTILINE)[1:]:
        file, *lines = part.splitlines()
        assert {line[1:] for line in lines} <= set((ROOT / file).read_text().splitlines())


@page_by_page
def test_make_targets_in_the_pages_exist(page: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets
