"""What helps to decide: the command, plans, benchmarks, analysis, emulated networks."""
