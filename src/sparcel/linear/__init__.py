"""Linear models on high-dimensional sparse rows, fitted by one process or many."""

from importlib import import_module
from typing import TYPE_CHECKING

from sparcel.linear.epoch import Epoch

if TYPE_CHECKING:
    from sparcel.linear.estimators import (
        SparseLinearRegression,
        SparseLinearSVC,
        SparseLogisticRegression,
    )

__all__ = [
    "Epoch",
    "SparseLinearRegression",
    "SparseLinearSVC",
    "SparseLogisticRegression",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Import the estimators when they are first used: the command does without scikit-learn."""
        if name in __all__:
            return getattr(import_module("sparcel.linear.estimators"), name)
        raise AttributeError(f"module 'sparcel.linear' has no attribute {name!r}")
