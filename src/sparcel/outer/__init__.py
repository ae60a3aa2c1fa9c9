"""Outer steps: islands train alone, and exchange what their parameters have moved now and then."""

from sparcel.outer.attaching import attach
from sparcel.outer.driver import Outer
from sparcel.outer.method import Method, diloco, muloco, sparseloco, streaming

__all__ = ["Method", "Outer", "attach", "diloco", "muloco", "sparseloco", "streaming"]
