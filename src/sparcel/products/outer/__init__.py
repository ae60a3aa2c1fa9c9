"""Outer steps: islands train alone, and exchange what their parameters have moved now and then."""

from sparcel.products.outer.attaching import attach
from sparcel.products.outer.driver import Outer
from sparcel.products.outer.method import Method, diloco, muloco, sparseloco, streaming

__all__ = ["Method", "Outer", "attach", "diloco", "muloco", "sparseloco", "streaming"]
