"""The driver for fully_shard (FSDP2) and replicate: shards of gradients in, updates out."""

from sparcel.fsdp.driver import FSDPDriver, is_sharded
from sparcel.fsdp.ranks import Replicas

__all__ = ["FSDPDriver", "Replicas", "is_sharded"]
