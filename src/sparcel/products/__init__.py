"""What is built on the core: outer steps, deltas of weights, linear models, rows and samples."""
