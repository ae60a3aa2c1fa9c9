"""The driver for fully_shard (FSDP2) and replicate: shards of gradients in, updates out."""

from sparcel.fsdp.driver import FSDPDriver, is_sharded
from sparcel.fsdp.model import checked_mesh
from sparcel.fsdp.ranks import Replicas, group_of_ranks

__all__ = ["FSDPDriver", "Replicas", "checked_mesh", "group_of_ranks", "is_sharded"]
