"""The exceptions that sparcel raises, a small tree under one root."""


class SparcelError(Exception):
    """Root of everything that sparcel raises on purpose."""


class InputError(SparcelError, ValueError):
    """An argument is wrong; nothing was sent and nothing was changed."""


class MismatchError(SparcelError, ValueError):
    """Two ranks called the same collective with arguments that do not fit together."""


class FormatError(SparcelError, ValueError):
    """A message is truncated, corrupt or was not written by sparcel."""


class CommunicationError(SparcelError, RuntimeError):
    """A peer is gone, did not answer within the timeout, or reported that it failed."""
