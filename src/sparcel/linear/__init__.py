"""Linear models on high-dimensional sparse rows, fitted by one process or many."""

from sparcel.linear.estimators import (
    SparseLinearRegression,
    SparseLinearSVC,
    SparseLogisticRegression,
)
from sparcel.linear.sgd import Epoch

__all__ = [
    "Epoch",
    "SparseLinearRegression",
    "SparseLinearSVC",
    "SparseLogisticRegression",
]
