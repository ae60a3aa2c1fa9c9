"""The table at the end of the demo."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from sparcel.demo.results import MethodResult

_LEGEND = (
    "Step: time of a training step. Compute: its computation alone. Added: the time that the "
    "exchange of gradients adds. Select and communicate: time in sparcel, partly beside the "
    "computation. Sent: by the busiest node. × fp32, × bf16: speed-up over dense training."
)


def table(rows: Sequence[MethodResult]) -> Table:
    """Return the results as a table; speed-ups are over the first two rows, the dense baselines."""
    result = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption=_LEGEND,
        caption_justify="left",
    )
    result.add_column("method", no_wrap=True)
    times = ("step\nms", "compute\nms", "added\nms", "select\nms", "commu-\nnicate ms")
    for title in (*times, "sent\nMB", "accu-\nracy %", "×\nfp32", "×\nbf16"):
        result.add_column(title, justify="right")
    for row in rows:
        seconds = (row.step_s, row.compute_s, row.exposed_s, row.select_s, row.communicate_s)
        result.add_row(
            row.method,
            *("" if value is None else f"{1000 * value:.1f}" for value in seconds),
            f"{row.sent_bytes / 1e6:.2f}",
            f"{100 * row.accuracy:.1f}",
            *(f"{dense.step_s / row.step_s:.1f}" for dense in rows[:2]),
        )
    return result
