"""``python -m sparcel.cli`` is the ``sparcel`` command."""

from sparcel.cli import main

main()
