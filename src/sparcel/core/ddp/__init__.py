"""The driver for DistributedDataParallel: its buckets in, updates out."""

from sparcel.core.ddp.driver import DDPDriver

__all__ = ["DDPDriver"]
