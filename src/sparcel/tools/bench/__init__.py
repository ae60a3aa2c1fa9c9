"""The benchmark: compares every algorithm with dense all-reduce, on your engine and network."""
