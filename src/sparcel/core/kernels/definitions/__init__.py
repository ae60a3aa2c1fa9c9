"""The kernels, described and defined in plain torch, which runs on any device.

Magnitudes are compared by the bits of ``|x|`` read as an integer. This orders all values,
NaN > Inf > finite numbers > 0, so every selection is well defined.
"""
