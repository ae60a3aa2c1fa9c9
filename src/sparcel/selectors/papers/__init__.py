"""Selectors that only reproduce a paper. `ExactTopK` takes less time, or trains better."""
