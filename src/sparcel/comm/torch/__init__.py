"""The communicator over torch.distributed, with the engines Gloo and NCCL."""

from sparcel.comm.torch.communicator import TorchCommunicator, connect
from sparcel.comm.torch.rendezvous import TorchRendezvous

__all__ = ["TorchCommunicator", "TorchRendezvous", "connect"]
