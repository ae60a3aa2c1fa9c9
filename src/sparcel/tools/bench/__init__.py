"""The benchmark: compares every algorithm with dense all-reduce, on your engine and network."""

NOW = "now"
"""Stands for a file of rates: measure them first."""
