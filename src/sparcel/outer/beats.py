"""An island's signs of life, by which others and `sparcel meet` see that it is there."""

from __future__ import annotations

import json
import threading
import time

from sparcel.errors import CommunicationError
from sparcel.outer.board import Board
from sparcel.outer.silence import Watches, beat_seconds
from sparcel.stores import ExclusiveStore


class Beats:
    """An island's signs of life: a key that changes, and tells how far it is."""

    def __init__(self, board: Board, island: int, patience: float) -> None:
        self._board, self.island = board, island
        self.steps, self.a_step = 0, 0.0
        """How many outer steps it has done, and seconds of an inner one."""
        self.stop = threading.Event()
        self._seconds = beat_seconds(patience)
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        number, known = 0, self.island
        while True:
            number, island = number + 1, self.island
            if island != known:  # another has taken its place, and it another number
                self._board.remove([f"beat.{known}"])
                known = island
            told = {"beat": number, "steps": self.steps, "seconds": self.a_step}
            self._board.tell(f"beat.{island}", json.dumps(told))
            if self.stop.wait(self._seconds):
                self._board.remove([f"beat.{island}"])
                return

    def end(self) -> None:
        """Give none any more."""
        self.stop.set()
        self._thread.join()


def signs(board: Board, island: int) -> str:
    """Return what sums up an island's last signs of life; it is empty for none."""
    return board.read(f"beat.{island}") or ""


class Listener:
    """Tells which islands are silent, as far as their place answers at once."""

    def __init__(self, store: ExclusiveStore, patience: float) -> None:
        self._board, self._watches = Board(store, 0.0), Watches(patience)

    def is_silent(self, island: int) -> bool:
        """Return whether an island has been silent for too long since this was first asked."""
        if self._watches.is_due(island, time.monotonic()):
            try:
                self._watches.hear(island, signs(self._board, island))
            except CommunicationError:  # nobody can give a sign now
                self._watches.clear()
                return False
        return self._watches.is_silent(island)
