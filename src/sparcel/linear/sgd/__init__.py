"""Mini-batch stochastic gradient descent, and how ranks share gradients and the model."""

from sparcel.linear.sgd.solver import Sgd

__all__ = ["Sgd"]
