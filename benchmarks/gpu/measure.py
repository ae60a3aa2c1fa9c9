"""What an exchange takes on a GPU: its passes, a step, steps of processes that share the card.

    python -m benchmarks.gpu.measure [--json PATH]

is planned for less than five minutes on a data-centre GPU. It checks results, prints lines, and
writes a record with the card's name to benchmarks/results. It needs torch 2.11 or newer with
Triton. NCCL's ranks share the card, too, which takes NCCL 2.30 or newer, and turns, so their times
say little about cards of their own. A wrong result ends it. Without a card it is a trial at tiny
sizes on the device that stands in for one in the tests, whose times mean nothing; then it writes a
record only to ``--json``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import triton

from benchmarks.gpu import passes
from benchmarks.gpu.passes import Row, WrongResultError
from benchmarks.gpu.rank import Job, methods
from benchmarks.record import RESULTS, machine, options, show, tell
from sparcel.tools.lab import Loopback, WorkerFailedError, Workers

ON_CARD = torch.cuda.is_available()
MOST_SECONDS = 285.0
"""After so many, no measurement begins, and the ranks are ended."""
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # or products may differ from one training to the next
}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    sizes, repeats
        The vectors of the passes, and how often each call is timed. Those up to ``checked`` are
        compared with the CPU's.
    ranks, shared
        Numbers of processes, over Gloo and over NCCL, that train ``job``.
    """

    sizes: tuple[int, ...]
    repeats: int
    checked: int
    job: Job
    ranks: tuple[int, ...]
    shared: tuple[int, ...]


FULL = Plan(
    sizes=(6_500_000, 25_000_000, 100_000_000, 1_000_000_000),
    repeats=30,
    checked=25_000_000,
    job=Job("cuda:0", width=2048, layers=6, batch=64, rounds=20),
    ranks=(1, 4),
    shared=(2, 4),
)
TRIAL = Plan(
    sizes=(600,),
    repeats=1,
    checked=600,
    job=Job("cpu", width=64, layers=3, batch=8, rounds=1),
    ranks=(2,),
    shared=(2,),
)


def run(plan: Plan, place: torch.device, record: Row) -> None:
    """Measure, and fill a record, which holds what was measured if this raises."""
    until = time.monotonic() + MOST_SECONDS
    rows, steps = record.setdefault("passes", []), record.setdefault("steps", [])
    for size in plan.sizes:
        if time.monotonic() > until:
            break
        of_size = list(passes.measure(size, place, plan.repeats, size <= plan.checked))
        rows.extend(of_size)
        show(of_size)
    if place.type == "cuda":
        torch.cuda.empty_cache()  # the ranks share the card
    jobs = [(ranks, plan.job) for ranks in plan.ranks]
    jobs += [(ranks, by_nccl(plan.job)) for ranks in plan.shared]
    for ranks, job in jobs:
        for row in trained(ranks, job, until):
            steps.append(row)
            tell(row)
    record["seconds"] = time.monotonic() + MOST_SECONDS - until


def by_nccl(job: Job) -> Job:
    return replace(job, nccl=True)


def why_not(job: Job) -> str:
    """Return why NCCL cannot carry a job on this machine; nothing if it can, or need not."""
    if not job.nccl:
        return ""
    if not ON_CARD:
        return "NCCL needs a card"
    from tests.gpu.test_nccl import FOUND, SHARING

    if FOUND < SHARING:
        return f"ranks share a card from NCCL {SHARING} on, and this one is {FOUND}"
    return ""


def trained(ranks: int, job: Job, until: float) -> Iterator[Row]:
    """Yield the rows of all methods on so many processes, or a row with a note.

    Raises
    ------
    WrongResultError
        When a rank found a wrong result.
    """
    about: Row = {"ranks": ranks, "nccl": job.nccl}
    left = until - time.monotonic()
    if note := why_not(job) or ("no time was left" if left < 0 else ""):
        yield about | {"note": note}
        return
    argv = [sys.executable, "-m", "benchmarks.gpu.rank", json.dumps(asdict(job))]
    with Loopback(ranks) as network, Workers(network, argv, ENVIRONMENT) as workers:
        end = threading.Timer(left, workers.close)
        end.start()
        lines = 0
        try:
            for _, line in workers.lines():
                if line.startswith("{"):
                    lines += 1
                    yield about | json.loads(line)
            if lines < len(methods(job)):
                yield about | {"note": f"the time ended after {lines} methods"}
        except WorkerFailedError as error:
            if WrongResultError.__name__ in error.output:
                raise WrongResultError(str(error)) from error
            yield about | {"note": f"failed: {error}".splitlines()[0]}
        finally:
            end.cancel()


def origin() -> Row:
    """Describe the card, the machine and the versions, without paths of this machine."""
    about: Row = {"card": "none, but the tests' stand-in"}
    if ON_CARD:
        card = torch.cuda.get_device_properties(0)
        about = {
            "card": card.name,
            "memory_gb": card.total_memory / 1e9,
            "multiprocessors": card.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return about | machine() | {"triton": triton.__version__}


def main() -> None:
    path, record = options(__doc__, json=Path).json, origin()
    if not ON_CARD:
        from tests.card import on_card

        print("A TRIAL without a GPU: its times mean nothing.")
    print(f"{record['card']}, torch {record['torch']}, Triton {record['triton']}")
    if path is None and ON_CARD:
        path = RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', record['card'].lower())}.json"
    try:
        with nullcontext(torch.device("cuda", 0)) if ON_CARD else on_card() as place:
            run(FULL if ON_CARD else TRIAL, place, record)
    except WrongResultError as error:
        record["wrong"] = str(error)
        sys.exit(f"wrong result: {error}")
    finally:
        if path is not None:
            path.write_text(json.dumps(record, indent=1) + "\n")
    failed = [row for row in record["passes"] + record["steps"] if "failed" in row.get("note", "")]
    if failed:
        sys.exit(f"{len(failed)} measurements failed; the lines show which")


if __name__ == "__main__":
    main()
