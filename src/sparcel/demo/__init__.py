"""Real data-parallel training on an emulated network, dense and sparse."""
