"""The benchmark: every algorithm beside dense all-reduce, on the engine and network at hand."""
