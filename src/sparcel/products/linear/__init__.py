"""Linear models on high-dimensional sparse rows, fitted by one process or many."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparcel.products.linear.estimators import (
        SparseLinearRegression,
        SparseLinearSVC,
        SparseLogisticRegression,
    )
    from sparcel.products.linear.trainer import Epoch

__all__ = ["Epoch", "SparseLinearRegression", "SparseLinearSVC", "SparseLogisticRegression"]

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Import what is used when it is first used: the command does without scikit-learn."""
        if name not in __all__:
            raise AttributeError(f"module 'sparcel.linear' has no attribute {name!r}")
        home = "trainer" if name == "Epoch" else "estimators"
        return getattr(import_module(f"sparcel.products.linear.{home}"), name)
