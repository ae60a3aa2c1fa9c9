"""Mini-batch stochastic gradient descent, and how ranks share gradients and the model."""
