"""Lightning: a callback lets sparcel exchange gradients, with DDP or a strategy for FSDP2."""

from sparcel.integrations._framework import needs

with needs("lightning"):
    from sparcel.integrations.lightning.callback import Sparcel
    from sparcel.integrations.lightning.strategy import HybridShardStrategy

__all__ = ["HybridShardStrategy", "Sparcel"]
