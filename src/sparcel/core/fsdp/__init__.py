"""The driver for fully_shard (FSDP2) and replicate: shards of gradients in, updates out."""

from sparcel.core.fsdp.driver import FSDPDriver, Replicas, checked_mesh, group_of_ranks, is_sharded

__all__ = ["FSDPDriver", "Replicas", "checked_mesh", "group_of_ranks", "is_sharded"]
