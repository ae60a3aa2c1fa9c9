"""``sparcel meet``: serves the store where islands meet that come and go."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from sparcel.outer.places import PORT, serve


def meet(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: any.")] = PORT,
) -> None:
    """Serve the place where islands of sparcel.outer meet, until it is interrupted.

    It carries no parameters, only who takes part in a step, and it must outlive every island.
    Whoever reaches the port can take part: keep it inside a private network. For example, on a
    machine that all islands reach:

        sparcel meet --port 29400
    """
    store = serve(port)
    typer.echo(f"islands meet at tcp://HOST:{store.port}; HOST is a name of this machine")
    threading.Event().wait()
