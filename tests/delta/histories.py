"""A model that is trained, stores that fail, and files that are damaged."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from sparcel.products.delta import Folder, Version, version_of
from tests.delta.pairs import Model, bits_of, copied


def first_model(seed: int = 0, size: int = 300) -> Model:
    """Make weights of several dtypes, one of them a scalar."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(size, generator=generator) * 0.02
    return {
        "layer.weight": weights.bfloat16().view(-1, 10),
        "layer.bias": weights[:7].clone(),
        "steps": torch.tensor(seed),
        "mask": torch.arange(9) % 2 == 0,
    }


def trained(model: Model, step: int) -> Model:
    """Return the model a step later: a few weights change, others from step to step."""
    new = copied(model)
    bits_of(new["layer.weight"]).view(-1)[step % 5 :: 11] += 1 + step % 3
    new["steps"] += 1
    return new


def history(count: int, seed: int = 0) -> list[Model]:
    """Return the model of every step."""
    models = [first_model(seed)]
    while len(models) < count:
        models.append(trained(models[-1], len(models)))
    return models


def sums_of(models: Iterable[Model]) -> list[Version]:
    """Return the versions with the numbers from 0 on."""
    return [version_of(model, number) for number, model in enumerate(models)]


class Failing(Folder):
    """A folder that fails when told: before, in or after it writes a file, or when it removes one.

    ``fail`` says in which file, by how its name begins, and when; ``left`` files go well before.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fail: tuple[str, str] | None = None
        self.left = 0

    def remove(self, name: str) -> None:
        if self._fails(name, "remove"):
            raise OSError(f"the store failed to remove {name}")
        super().remove(name)

    def _fails(self, name: str, *when: str) -> bool:
        if self.fail is None or not name.startswith(self.fail[0]) or self.fail[1] not in when:
            return False
        self.left -= 1
        return self.left < 0

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        if not self._fails(name, "before", "in", "after"):
            return super().write(name, parts)
        when = self.fail[1] if self.fail else ""
        if when == "in":
            return super().write(name, _torn(parts))
        if when == "after":
            super().write(name, parts)
        raise OSError(f"the store failed {when} {name}")


def _torn(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for part in parts:
        yield bytes(part)[: len(part) // 2]
        raise OSError("the store failed in a file")


def damage(path: Path, how: str, dice: random.Random) -> None:
    """Do to a file what disks, networks and people do to files; a reader sees it as a whole."""
    data = bytearray(path.read_bytes())
    match how:
        case "lost":
            path.unlink()
            return
        case "torn":
            del data[dice.randrange(len(data)) :]
        case "flipped":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case "zeros":
            begin = dice.randrange(len(data))
            data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
        case "swapped":
            others = [p for p in path.parent.glob("*.safetensors") if p != path]
            data = bytearray(dice.choice([*others, path]).read_bytes())
    part = path.with_name(f".damaged-{path.name}")
    part.write_bytes(data)
    part.replace(path)


DAMAGES = ("lost", "torn", "flipped", "zeros", "swapped")
