"""The code paths of the compiled kernels, and difficult vectors for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparcel import _cpu
from tests.strategies import FLOATS


def _runs_here(isa: str) -> bool:
    best = _cpu.isa()
    try:
        _cpu.set_isa(isa)
    except ValueError:
        return False
    _cpu.set_isa(best)
    return True


ISAS = [isa for isa in ("portable", "avx2", "avx512") if _runs_here(isa)]
isas = st.sampled_from(ISAS)


@contextmanager
def using(isa: str, threads: int = 1) -> Iterator[None]:
    """Run kernels with one instruction set and this number of threads."""
    best, threads_before = _cpu.isa(), torch.get_num_threads()
    _cpu.set_isa(isa)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        _cpu.set_isa(best)
        torch.set_num_threads(threads_before)


# Lengths around the widths of registers, groups of registers and blocks, and long enough to sample.
LENGTHS = [
    *range(70),
    *(width + step for width in (128, 512, 2048, 4096, 8192) for step in (-1, 0, 1)),
    20_001,
]

KINDS = (
    "normal",
    "cauchy",
    "few values",
    "all equal",
    "zeros",
    "mostly zero",
    "signed zeros",
    "denormals",
    "special",
    "extremes",
    "huge beside zeros",
    "ascending",
    "descending",
    "bunched",
)


@dataclass(frozen=True)
class Case:
    """A recipe for a vector; Hypothesis prints it better than the vector."""

    kind: str
    length: int
    dtype: torch.dtype
    seed: int = 0
    misaligned: bool = False

    def vector(self) -> Tensor:
        """Make the vector."""
        generator = torch.Generator().manual_seed(self.seed)
        start = int(self.misaligned)
        made = _values(self.kind, self.length + start, self.dtype, generator)
        return made.to(self.dtype)[start:]


def _values(kind: str, n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    normal = torch.randn(n, generator=generator, dtype=torch.float64)
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    match kind:
        case "cauchy":
            return (torch.pi * (uniform - 0.5)).tan()
        case "few values":
            return (uniform * 7).floor() - 3
        case "all equal":
            return torch.where(uniform < 0.5, -2.5, 2.5)
        case "zeros":
            return torch.zeros(n)
        case "mostly zero":
            return torch.where(uniform < 0.01, normal, 0.0)
        case "signed zeros":
            return torch.where(uniform < 0.5, -0.0, torch.where(uniform < 0.6, normal, 0.0))
        case "denormals":
            return normal * limits.smallest_normal / 8
        case "special":
            inf = torch.inf
            some = [torch.nan, -torch.nan, inf, -inf, limits.max, limits.min, 0.0, 1.0]
            choice = torch.tensor(some, dtype=torch.float64)[(uniform * len(some)).long()]
            return choice.to(dtype)
        case "extremes":
            least = limits.smallest_normal * limits.eps
            sizes = [limits.max, limits.smallest_normal, least, 1.0, 0.0]
            return torch.tensor(sizes, dtype=torch.float64)[(uniform * 5).long()] * normal.sign()
        case "huge beside zeros":
            # Whole chunks are zero, among others of whose entries most are.
            some = (torch.arange(n) // 512 % 3 > 0) & (uniform < 0.14)
            return torch.where(some, limits.max / 8 * normal.clamp(-8, 8), 0.0)
        case "ascending":
            return torch.arange(n) / max(n, 1)
        case "descending":
            return 1 - torch.arange(n) / max(n, 1)
        case "bunched":
            normal[n // 3 : n // 3 + n // 50] *= 100
    return normal


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Case:
    """Draw a vector's recipe."""
    return Case(
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(LENGTHS)),
        draw(st.sampled_from(dtypes)),
        draw(st.integers(0, 99)),
        draw(st.booleans()),
    )


@st.composite
def counts(draw: st.DrawFn, length: int) -> int:
    """Draw how many of ``length`` entries to select."""
    shares = [0, 1, 2, length // 100, length // 10, length // 2, length - 1, length, length + 1]
    return draw(st.sampled_from([share for share in shares if share >= 0]))
