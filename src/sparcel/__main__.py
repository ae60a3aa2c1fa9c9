"""``python -m sparcel`` is the ``sparcel`` command."""

from sparcel.cli import main

main()
