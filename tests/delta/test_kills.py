"""Trainers and servers are killed and files damaged at any moment; weights are always a version."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from sparcel.errors import FormatError, VersionError
from sparcel.products.delta import Folder, Publisher, Subscriber, Version, read_index, version_of
from tests.delta.histories import DAMAGES, damage
from tests.delta.pairs import Model, same

_processes = multiprocessing.get_context("forkserver")

SIZE = 50_000
LAST = "last"
"""A file beside the store: the number of the last version, when it is there."""


def model_at(number: int) -> Model:
    """Return the weights of a version: each element changes once in 97 of them."""
    element = torch.arange(SIZE)
    bits = element * 7919 % 16_000 + 8_000 + (number + element * 31) // 97 % 50
    return {
        "weight": bits.to(torch.int16).view(torch.bfloat16).view(-1, 50),
        "steps": torch.tensor(number),
    }


def serve_all(folder: Path, count: int, anchor_every: int) -> None:
    """Publish all versions that are still missing."""
    store = Folder(folder / "store")
    publisher = Publisher(store, anchor_every=anchor_every, lag=anchor_every // 2)
    newest = read_index(store).newest
    for number in range(newest.number + 1 if newest else 0, count):
        version = publisher.publish(model_at(number), number)
        assert version == version_of(model_at(number), number)


def follow_all(folder: Path, who: str, note: int) -> None:
    """Follow the versions to the last one; note each that was served, and what hindered it."""
    subscriber = Subscriber(Folder(folder / "store"))
    reached: Version | None = None
    while True:
        last = int((folder / LAST).read_text()) if (folder / LAST).exists() else None
        error = None
        try:
            subscriber.update()
        except (VersionError, FormatError) as refusal:
            error = refusal
        version = subscriber.version
        if version is not None and version != reached:
            right = version_of(model_at(version.number), version.number)
            assert version == right, f"{version} was never published: it is {right}"
            assert version_of(subscriber.tensors, version.number) == version
            assert same(subscriber.tensors, model_at(version.number))
            reached = version
        text = f"{version.number if version else -1} {type(error).__name__}\n"
        os.write(note, text.encode())
        if version is not None and version.number == last:
            return
        time.sleep(0.002)


def run(folder: Path, who: str, count: int, anchor_every: int) -> None:
    torch.set_num_threads(1)
    note = os.open(folder / f"{who}.notes", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        with patch("os.fsync"):  # a kill does not lose what the system has
            if who == "trainer":
                serve_all(folder, count, anchor_every)
            else:
                follow_all(folder, who, note)
    except BaseException:
        (folder / f"{who}.failed").write_text(traceback.format_exc())
        raise


class Fleet:
    """A trainer and its subscribers, which start anew when they are killed."""

    def __init__(self, folder: Path, subscribers: int, count: int, anchor_every: int) -> None:
        self.names = ["trainer", *(f"subscriber{i}" for i in range(subscribers))]
        self.kills = 0
        self._folder, self._settings = folder, (count, anchor_every)
        self._running: dict[str, BaseProcess] = {}

    def start(self, who: str) -> None:
        process = _processes.Process(target=run, args=(self._folder, who, *self._settings))
        process.start()
        self._running[who] = process

    def kill(self, who: str) -> None:
        process = self._running[who]
        process.kill()
        process.join()
        self.kills += 1

    def ended(self, who: str) -> bool:
        """Tell whether a process has done its work; raise if it failed."""
        failed = self._folder / f"{who}.failed"
        code = self._running[who].exitcode
        if code:
            raise AssertionError(f"{who}: {failed.read_text() if failed.exists() else code}")
        return code == 0

    def wait(self, who: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.ended(who):
            assert time.monotonic() < deadline, f"{who} does not end"
            time.sleep(0.01)

    @contextmanager
    def started(self) -> Iterator[None]:
        try:
            for who in self.names:
                self.start(who)
            yield
        finally:
            for process in self._running.values():
                process.kill()
                process.join()


def sabotage(store: Folder, dice: random.Random) -> int:
    """Damage a file that the index lists, most often one of the last; return how many that were."""
    names = [name for entry in read_index(store).entries for name in entry.names]
    name = dice.choice([*names, *names[-3:] * 3])
    with suppress(FileNotFoundError):  # it was pruned meanwhile
        damage(store.path / name, dice.choice(DAMAGES), dice)
        return 1
    return 0


def notes_of(folder: Path, who: str) -> list[tuple[int, str]]:
    lines = (folder / f"{who}.notes").read_text().splitlines()
    return [(int(number), error) for number, error in (line.split() for line in lines)]


def survive(
    folder: Path, count: int, subscribers: int, anchor_every: int, seconds: float
) -> tuple[int, int, int]:
    """Publish so many versions under attack, then one in peace, which everybody must reach.

    An attack comes about every third version, not after some time: a trainer that starts slowly on
    a busy machine would otherwise be killed before each version.
    Return how many processes were killed and files damaged, and how often a subscriber said why it
    cannot go on.
    """
    dice, store = random.Random(count), Folder(folder / "store")
    fleet = Fleet(folder, subscribers, count, anchor_every)
    deadline, attack_at, damages = time.monotonic() + seconds, 0, 0
    with fleet.started():
        while not fleet.ended("trainer"):
            assert time.monotonic() < deadline, "the trainer does not end"
            time.sleep(dice.uniform(0, 0.02))
            newest = read_index(store).newest
            if newest is None or newest.number < attack_at:
                continue
            attack_at = newest.number + dice.randrange(6)
            who = dice.choice(["trainer", *fleet.names])
            if dice.random() < 0.5:
                damages += sabotage(store, dice)
            elif not fleet.ended(who):
                fleet.kill(who)
                fleet.start(who)
        newest = read_index(store).newest
        assert newest == version_of(model_at(count - 1), count - 1)
        with patch("os.fsync"):
            Publisher(store, anchor_every=1, lag=0).publish(model_at(count), count)
        (folder / "unread").write_text(str(count))
        (folder / "unread").rename(folder / LAST)  # nobody reads it before it is whole
        for who in fleet.names[1:]:
            fleet.wait(who, seconds)
            assert notes_of(folder, who)[-1] == (count, "NoneType")
    notes = [note for who in fleet.names[1:] for note in notes_of(folder, who)]
    errors = [error for _, error in notes if error != "NoneType"]
    assert set(errors) <= {"VersionError", "FormatError"}
    return fleet.kills, damages, len(errors)


@pytest.mark.slow
@pytest.mark.processes
def test_kills_and_damage(tmp_path: Path) -> None:
    """1,000 versions take a minute: ``SPARCEL_VERSIONS=1000``."""
    count = int(os.environ.get("SPARCEL_VERSIONS", "150"))
    kills, damages, errors = survive(
        tmp_path, count=count, subscribers=3, anchor_every=count // 20, seconds=240
    )
    print(f"{kills} kills, {damages} damages, {errors} refusals")
    assert kills > 0
    assert damages > 0
