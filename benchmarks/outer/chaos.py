"""Islands that are killed, start and return at random moments, and how much of their work counts.

In some 20 minutes, on nodes of an emulated network, and then by way of files:

    python -m benchmarks.outer.chaos --output benchmarks/results/outer_chaos.json

A run is disturbed by ``events``: after waits of random length, a process is killed (SIGKILL), be it
training or about to join, or one more is started, so that 2 to 5 islands train. Every second one
that is started comes from the checkpoint of another, however old, and every tenth event is that
the place where islands meet is killed and started again. An undisturbed run
of 4 islands takes a minute. Compute is a sleep, so that the cores suffice; an outer step is due
every 20 inner steps, of 60 ms each.

``goodput`` is the inner steps that took effect, by the seconds in which islands were alive. Inner
steps took effect if their island came through the next outer step in which it took part. An island
is alive from when it calls ``attach``, where it joins, until it is killed or asked to stop.
``share`` is goodput by that of the undisturbed run. ``silence_s`` is the longest time in which an
island that was alive came through no outer step. `faults` says what must not happen.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import sparcel.outer
from benchmarks.record import RESULTS, Row, machine, options, show, write
from sparcel.tools.lab import Link, Network, open_network

EVERY, INNER_S, PATIENCE_S, SILENCE_S = 20, 0.06, 5.0, 20.0
FEWEST, MOST, UNDISTURBED = 2, 5, 4
UNDISTURBED_S = 60.0
SAVED = 5  # outer steps from one checkpoint to the next
WAIT_S = 6.0  # from one event to the next, in the mean


def train(place: str, folder: Path, checkpoint: str = "") -> None:
    """Be an island until a file says stop; print a line when it begins, and after outer steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    _tell(step=0)
    outer = sparcel.outer.attach(
        model, optimizer, every=EVERY, islands=place, least=FEWEST, patience=PATIENCE_S
    )
    if checkpoint:
        for whose, state in zip((model, optimizer, outer), torch.load(checkpoint), strict=True):
            whose.load_state_dict(state)
    torch.manual_seed(os.getpid())
    step, inner = outer.steps, 0
    while not (folder / "stop").exists():
        time.sleep(INNER_S)
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        inner += 1
        if outer.steps != step:
            step, shared = outer.steps, outer.shared
            took = all(torch.equal(one, shared[name]) for name, one in model.named_parameters())
            crc = zlib.crc32(b"".join(one.numpy().tobytes() for one in shared.values()))
            _tell(step=step, took=took, inner=inner, crc=crc, islands=outer.islands)
            inner = 0 if took else inner
            if step % SAVED == 0:
                states = [whose.state_dict() for whose in (model, optimizer, outer)]
                torch.save(states, folder / f"saved-{os.getpid()}-{step}.part")
                (folder / f"saved-{os.getpid()}-{step}.part").rename(
                    folder / f"saved-{os.getpid()}-{step}"
                )
    outer.close()


def _tell(**what: int) -> None:
    print(json.dumps({"time": time.monotonic(), **what}), flush=True)


class Island:
    """A process that trains, what it tells, and until when it is alive."""

    def __init__(self, network: Network, node: int, argv: Sequence[str], out: Path) -> None:
        self.node, self.until, self.killed, self._out = node, 0.0, False, out
        with out.open("w") as told, out.with_suffix(".err").open("w") as errors:
            self.process = subprocess.Popen(
                network.command(node, [sys.executable, *argv]),
                env={**os.environ, "GLOO_SOCKET_IFNAME": network.interface, "OMP_NUM_THREADS": "1"},
                pass_fds=network.descriptors,
                stdin=subprocess.PIPE,  # the lab's guard takes its closing for our death
                stdout=told,
                stderr=errors,
                start_new_session=True,
            )

    def lines(self) -> list[Row]:
        """Return what it has told while it was alive."""
        lines = map(json.loads, self._out.read_text().splitlines())
        return [line for line in lines if not self.until or line["time"] <= self.until]

    def steps(self) -> list[Row]:
        """Return what it has told of outer steps in which it took part."""
        return [line for line in self.lines() if line.get("took")]

    def end(self, status: int | None) -> str:
        """Kill the process; return what is wrong if it had not ended with this status before."""
        self.until = self.until or time.monotonic()
        if (ended := self.process.poll()) is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        if ended == status:
            return ""
        error = self._out.with_suffix(".err").read_text()[-2000:]
        return f"island {self._out.name} ended with {ended}, not {status}: {error}"


def faults(islands: Sequence[Island]) -> Iterator[str]:
    """Yield what is wrong with what islands have told of themselves.

    Their parameters differ after a step; a step repeats, or comes after a later one; one that was
    killed was more than one step behind; or one came through no outer step for 4 patiences.
    """
    crcs: dict[int, set[int]] = {}
    for line in chain.from_iterable(map(Island.steps, islands)):
        crcs.setdefault(line["step"], set()).add(line["crc"])
    yield from (f"step {step}: parameters differ" for step, of in crcs.items() if len(of) > 1)
    for number, one in enumerate(islands):
        steps = [line["step"] for line in one.lines()]
        if steps != sorted({*steps}):
            yield f"island {number} did not go forward: {steps}"
        others = chain.from_iterable(map(Island.steps, islands))
        last = max((line["step"] for line in others if line["time"] <= one.until), default=0)
        if one.killed and one.steps() and steps[-1] < last - 1:
            yield f"island {number} was killed after step {steps[-1]} when others were at {last}"
        if (silence := max(_silences(one))) > SILENCE_S:
            yield f"island {number} was silent for {silence:.1f} s"


def _silences(island: Island) -> list[float]:
    times = [*(line["time"] for line in island.lines()), island.until]
    return [late - early for early, late in pairwise(times)] or [0.0]


def summary(islands: Sequence[Island]) -> Row:
    """Return the figures of a run."""
    steps = [line for one in islands for line in one.steps()]
    silences = [_silences(one) for one in islands]
    alive = sum(map(sum, silences))
    return {
        "kills": sum(one.killed for one in islands),
        "joins": len(islands) - UNDISTURBED,
        "steps": max(line["step"] for line in steps),
        "alive_s": alive,
        "goodput": sum(line["inner"] for line in steps) / alive,
        "silence_s": max(map(max, silences)),
    }


def run(network: Network, folder: Path, events: int, seed: int, seconds: float = 0.0) -> Row:
    """Let islands train through so many events, then on until ``seconds`` are over; tell of it.

    Without a link, they meet in a folder, and not on node 0.
    """
    chance, islands, port = random.Random(seed), list[Island](), network.free_port()
    wrong, returns = list[str](), list[str]()
    place = f"tcp://{network.address(0)}:{port}" if network.link else str(folder / "bucket")
    with ExitStack() as ends:
        meetings = list[Island]()

        def serve() -> None:
            meet = ["-m", "sparcel", "meet", "--port", str(port), "--state", str(folder / "place")]
            meetings.append(Island(network, 0, meet, folder / f"meet{len(meetings)}"))
            ends.callback(meetings[-1].end, None)

        if network.link:
            serve()

        def start() -> None:
            node = min({*range(1, MOST + 1)} - {one.node for one in islands if not one.killed})
            saved = [str(one) for one in sorted(folder.glob("saved-*")) if not one.suffix]
            checkpoint = chance.choice(saved) if saved and chance.random() < 0.5 else ""
            argv = ["-m", "benchmarks.outer.chaos", "--island", place, str(folder), checkpoint]
            returns.append(checkpoint)
            islands.append(Island(network, node, argv, folder / f"{len(islands)}"))
            ends.callback(islands[-1].end, None)

        for _ in range(UNDISTURBED):
            start()
        while any(one.process.poll() is None and not one.steps() for one in islands):
            time.sleep(0.1)
        begun = time.monotonic()
        for number in range(events):
            time.sleep(chance.expovariate(1 / WAIT_S))
            if network.link and number % 10 == 9:
                wrong.append(meetings[-1].end(None))
                serve()
                continue
            running = [one for one in islands if not one.killed]
            joining = [one for one in running if not one.steps()]
            enough = len(running) - len(joining) > FEWEST
            if len(running) == MOST or (enough and chance.random() < 0.5):
                one = chance.choice(running if enough else joining)
                one.killed = True
                wrong.append(one.end(None))
            else:
                start()
        time.sleep(max(2 * PATIENCE_S if events else 0.0, seconds + begun - time.monotonic()))
        left, end = [one for one in islands if not one.killed], time.monotonic()
        for one in left:
            one.until = end
        (folder / "stop").touch()
        while any(one.process.poll() is None for one in left):
            time.sleep(0.1)
            if time.monotonic() > end + SILENCE_S:
                break
        wrong += [one.end(0) for one in left]
        wrong += faults(islands)
        counted = {"returns": sum(map(bool, returns)), "restarts": max(len(meetings) - 1, 0)}
        return {
            "seconds": end - begun,
            **summary(islands),
            **counted,
            "faults": [*filter(None, wrong)],
        }


def main() -> None:
    """Run, disturbed and undisturbed, or be an island."""
    told = options(
        __doc__,
        island={"nargs": 3, "metavar": ("PLACE", "FOLDER", "CHECKPOINT"), "help": "be one"},
        events=60,
        seed=0,
        output=RESULTS / "outer_chaos.json",
    )
    if told.island:
        train(told.island[0], Path(told.island[1]), told.island[2])
        return
    origin, rows = machine(), list[Row]()
    for link, events in ((Link(), told.events), (None, told.events // 6)):
        rows += compared(link, events, told.seed)
        write(told.output, {**origin, "load": os.getloadavg()}, rows)
    show(rows)
    sys.exit("\n".join(fault for row in rows for fault in row["faults"]))


def compared(link: Link | None, events: int, seed: int) -> list[Row]:
    """Return the rows of a disturbed run, and of an undisturbed one."""
    rows: list[Row] = []
    for number in (events, 0):
        with open_network(MOST + 1, link) as network, TemporaryDirectory() as name:
            row = run(network, Path(name), number, seed, 0.0 if number else UNDISTURBED_S)
        rows.append({"network": network.description, "events": number, **row})
    rows[0]["share"] = rows[0]["goodput"] / rows[1]["goodput"]
    return rows


if __name__ == "__main__":
    main()
