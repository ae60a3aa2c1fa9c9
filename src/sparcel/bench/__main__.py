"""``python -m sparcel.bench SETTINGS``: run one rank of a benchmark that `start` launched."""

from __future__ import annotations

import sys

from sparcel.bench.report import console
from sparcel.bench.run import run
from sparcel.bench.settings import BenchSettings
from sparcel.errors import CommunicationError, SparcelError
from sparcel.lab import told_by_survivor

if __name__ == "__main__":
    try:
        run(BenchSettings.from_json(sys.argv[1]), console())
    except CommunicationError as error:
        sys.exit(told_by_survivor(error))
    except SparcelError as error:
        sys.exit(f"sparcel: {error}")
