"""Communicators: what carries messages between ranks."""

from sparcel.comm.base import Communicator, Handle, Traffic
from sparcel.comm.simulated import Report, SimulatedCommunicator, simulate

__all__ = ["Communicator", "Handle", "Report", "SimulatedCommunicator", "Traffic", "simulate"]
