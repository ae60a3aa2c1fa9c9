"""The tables of `measure.py`, and what has to be reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.baselines import EXACT
from benchmarks.gpu.steps import RATES

Row = dict[str, Any]

TARGET, LARGE, SPARSE = 25_000_000, 110_000_000, 0.001
"""The size that limits are about, the one from which on bandwidth counts, and the density."""
COLUMNS = f"{'ms':>10}{'GB/s':>7}{'copy':>7}{'×topk':>9}{'÷add':>8}"
LEGEND = (
    "",
    "GB/s count bytes read once. copy: their share of the copy's bandwidth, read and written.",
    "×topk: times faster than torch.topk of |x|. ÷add: time beside memory.add_(gradient).",
)
STEP_LEGEND = (
    "",
    "ms: a step. compute: without exchange. exchange: the share of the step beyond DDP's compute.",
    "link: computed from the bytes, not measured. reads: waits for the card in sparcel.device.read",
    "a step, of all buckets; waits: other ones, of which torch warns. A part of a step is one",
    "selection, reduction, message or coding, as the profile shows them.",
)


class Limits:
    """What has to be reached on the gaussian vectors, and what was.

    Parameters
    ----------
    rows, steps
        Those of the kernels and of DDP.
    """

    def __init__(self, rows: list[Row], steps: list[Row]) -> None:
        self.found: list[Row] = []
        self._steps = [row for row in steps if row.get("synchronisations")]
        self._done = {
            (row["size"], row["method"]): row
            for row in rows
            if "ms" in row and (row["input"], row["density"]) == ("gaussian", SPARSE)
        }
        self._sizes = sorted({row["size"] for row in rows} | {TARGET, LARGE})

    def all(self) -> list[Row]:
        """Return a row for each limit; ``reached`` is None for what was not measured."""
        for name in (*EXACT, "MSTopK, 30 samplings"):
            what = f"topk of {count(TARGET)}: times faster than {name}"
            self._at_least(what, self._ratio(TARGET, name, "topk"), 10 if name in EXACT else 1)
        for size in self._sizes:
            if size >= LARGE:
                what = f"topk of {count(size)}: bandwidth beside the copy's, read and written"
                share = self._done.get((size, "topk"), {}).get("of_copy")
                self._at_least(what, share, 0.5)
        for size in self._sizes:
            if size >= TARGET:
                what = f"accumulate_topk of {count(size)}: time beside memory.add_(gradient)"
                times = self._ratio(size, "accumulate_topk", "memory.add_(gradient)")
                self._at_most(what, times, 1.6)
        for method in dict.fromkeys(row["method"] for row in self._steps):
            waits = [row["synchronisations"] for row in self._steps if row["method"] == method]
            most = max(one["most_reads_in_a_part"] for one in waits)
            self._at_most(f"a step of {method}: most reads in one of its parts", most, 1)
            others = max(one["warnings"] for one in waits)
            self._at_most(f"a step of {method}: other waits for the card", others, 0)
        return self.found

    def _ratio(self, size: int, method: str, other: str) -> float | None:
        one, two = self._done.get((size, method)), self._done.get((size, other))
        return one["ms"] / two["ms"] if one and two else None

    def _at_least(self, what: str, figure: float | None, limit: float) -> None:
        self._add(what, figure, limit, figure is not None and figure >= limit)

    def _at_most(self, what: str, figure: float | None, limit: float) -> None:
        self._add(what, figure, limit, figure is not None and figure <= limit)

    def _add(self, what: str, figure: float | None, limit: float, reached: bool) -> None:
        known = None if figure is None else reached
        self.found.append({"what": what, "figure": figure, "limit": limit, "reached": known})


def count(size: int) -> str:
    """Return a number of coordinates as people say it."""
    for scale, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return str(size)


def kernel_table(rows: list[Row]) -> Iterator[str]:
    """Yield a table for each vector, with columns for each density."""
    for name, size in dict.fromkeys((row["input"], row["size"]) for row in rows):
        own = [row for row in rows if (row["input"], row["size"]) == (name, size)]
        densities = list(dict.fromkeys(row["density"] for row in own))
        yield ""
        titles = (f"{f'{density:.1%}':>10}".ljust(len(COLUMNS)) for density in densities)
        yield f"{f'{name}, {count(size)} float32':26}{''.join(titles)}"
        yield f"{'':26}{COLUMNS * len(densities)}"
        cells = {(row["method"], row["density"]): row for row in own}
        for method in dict.fromkeys(row["method"] for row in own):
            shown = (_kernel_cell(cells.get((method, density), {})) for density in densities)
            yield f"{method:26}{''.join(shown)}"
    yield from LEGEND


def _kernel_cell(row: Row) -> str:
    """Return the figures of a row, or its note, as wide as `COLUMNS`."""
    if "ms" not in row:
        width = len(COLUMNS)
        return f"{row.get('note', '')[: width - 2]:>{width}}"
    return (
        f"{row['ms']:>10.3f}{row['gb_per_s']:>7.0f}{_shown(row, 'of_copy', '7.0%')}"
        f"{_shown(row, 'times_torch_topk', '9.1f')}{_shown(row, 'of_add', '8.2f')}"
    )


def _shown(row: Row, name: str, form: str) -> str:
    """Return a figure, or as many spaces."""
    return f"{row[name]:>{form}}" if name in row else " " * int(form[0])


def step_table(steps: list[Row]) -> Iterator[str]:
    """Yield a table for each network."""
    links = "".join(f"{f'link {rate}':>13}" for rate in RATES)
    columns = (
        f"{'ms':>9}{'compute':>9}{'exchange':>10}{'sent MB':>9}{links}{'reads':>7}{'waits':>7}"
    )
    for network in dict.fromkeys(row["network"] for row in steps):
        yield ""
        yield f"DDP, {network}"
        yield f"{'':14}{columns}"
        for row in steps:
            if row["network"] == network:
                yield row["note"] if "note" in row else _step_line(row)
    yield from STEP_LEGEND


def _step_line(row: Row) -> str:
    links = "".join(f"{row['computed_link_ms'][rate]:>10.1f} ms" for rate in RATES)
    waits = row["synchronisations"] or {"reads": "", "warnings": ""}
    return (
        f"{row['method']:14}{row['step_ms']:>9.1f}{row['compute_ms']:>9.1f}"
        f"{row['exchange_share']:>10.0%}{row['sent_bytes'] / 1e6:>9.2f}{links}"
        f"{waits['reads']:>7}{waits['warnings']:>7}"
    )


def limit_lines(found: list[Row]) -> Iterator[str]:
    """Yield a line for each limit."""
    yield ""
    for one in found:
        words = {True: "reached", False: "MISSED", None: "not measured"}[one["reached"]]
        figure = "" if one["figure"] is None else f"{one['figure']:.3g}"
        yield f"{words:13}{figure:>7} of {one['limit']:<4g} {one['what']}"
