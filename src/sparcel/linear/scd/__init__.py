"""Random block coordinate descent, and how ranks share derivatives."""
