"""The communicator over torch.distributed, with the engines Gloo and NCCL."""

from sparcel.comm.torch.communicator import TorchCommunicator, connect

__all__ = ["TorchCommunicator", "connect"]
