"""``sparcel delta log``: the versions of a store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from sparcel.cli.delta.places import StorePlace, index_of, open_store
from sparcel.cli.delta.shown import age, bits_each, console, share, size

if TYPE_CHECKING:
    from sparcel.delta import Index


def log(store: StorePlace) -> None:
    """List the versions of a store: whole models, and deltas from one version to another.

    A delta is much smaller than a whole model; bits is how much it spends on each changed element.
    """
    index = index_of(store, open_store(store))
    shown = console()
    shown.print(_table(index))
    kept = sum(entry.bytes for entry in index.entries)
    shown.print(f"The newest version is {index.newest}. All files take {size(kept)}.")


def _table(index: Index) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("version", "from", "", "changed", "bits", "bytes", "age"):
        table.add_column(heading, justify="left" if not heading else "right")
    now = time.time()
    for entry in index.entries:
        told = ("", "whole model", "", "")
        if entry.base is not None:
            changed = share(entry.changed, entry.elements)
            told = str(entry.base.number), "delta", changed, bits_each(entry.bytes, entry.changed)
        number, since = str(entry.version.number), age(now - entry.time)
        table.add_row(number, *told, size(entry.bytes), since)
    return table
