"""Which rank of a program failed first, and why.

A rank that fails takes the others along. They may end before it does, because a process that fails
may have more to tidy up. So the order in which ranks end does not tell, but what they wrote does: a
rank that ends by sparcel's `CommunicationError` survived the failure of another, whose cause the
error tells.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass

from sparcel.errors import CommunicationError, SparcelError

_KEPT_LINES = 60

_SURVIVED = re.compile(r"\bCommunicationError: (.*)")

_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ")
"""What torch puts before each line of an exception while there is a process group."""


@dataclass(frozen=True)
class Line:
    """A line that a rank wrote to standard error or to standard output."""

    rank: int
    text: str
    is_error: bool


@dataclass(frozen=True)
class Ended:
    """The end of a rank's process.

    Attributes
    ----------
    status
        Its exit status, negative for a signal.
    killed
        Whether it ended because all workers are being closed.
    """

    rank: int
    status: int
    killed: bool = False


class WorkerFailedError(SparcelError):
    """A worker ended with an error.

    Attributes
    ----------
    rank
        The rank of the worker that failed first; a survivor's if that worker had not ended yet.
    status
        Its exit status; the negative number of the signal if one killed it.
    output
        The last lines of its standard error.
    """

    def __init__(self, rank: int, status: int, output: str) -> None:
        self.rank, self.status, self.output = rank, status, output
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        last = output.strip().splitlines()[-1:]
        cause = f": {last[0]}" if last else ""
        super().__init__(_cause(output) or f"rank {rank} failed ({how}){cause}")

    @property
    def survived(self) -> bool:
        """Whether the worker failed because another one did."""
        return _cause(self.output) is not None


class Failures:
    """The ranks that ended with an error, and what they wrote before."""

    def __init__(self) -> None:
        self._errors: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_LINES))
        self._causes: dict[int, str] = {}
        self._found: list[WorkerFailedError] = []

    def note(self, event: Line | Ended) -> None:
        """Note a line on standard error, or the end of a rank."""
        if isinstance(event, Ended):
            if event.status != 0 and not event.killed:
                lines, cause = list(self._errors[event.rank]), self._causes.get(event.rank)
                if cause is not None and cause not in lines:  # much was written after it
                    lines.insert(0, cause)
                output = "\n".join(lines)
                self._found.append(WorkerFailedError(event.rank, event.status, output))
        elif event.is_error:
            text = _TORCHS_PREFIX.sub("", event.text)
            self._errors[event.rank].append(text)
            if _SURVIVED.search(text):
                self._causes[event.rank] = text

    @property
    def first(self) -> WorkerFailedError | None:
        """The first failure; that of a survivor only as long as there is no other."""
        return min(self._found, key=lambda failure: failure.survived, default=None)


def told_by_survivor(error: CommunicationError) -> str:
    """Return the line with which a program ends on a rank that survived another rank's failure.

    `_SURVIVED` recognises it.
    """
    return f"sparcel: CommunicationError: {error}"


def _cause(output: str) -> str | None:
    """Return the text of the last `CommunicationError` in a worker's output."""
    found = _SURVIVED.findall(output)
    return str(found[-1]) if found else None
