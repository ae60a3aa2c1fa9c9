"""What only reproduces a paper: `ExactTopK` takes less time, or trains better."""
