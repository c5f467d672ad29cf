"""What goes wrong that is no caller's mistake.

ZeroError                 the world is not as training needs it
|-- RanksDiffer           ranks disagree in model, configuration, place or what they did
|-- RankFailed            another rank reported an error of its own
|-- GroupLost             a collective failed or timed out; the group is of no use any more
|-- BadCheckpoint         a checkpoint lacks something, or is damaged
|-- CheckpointFailed      a save or a load failed on some rank; what was there before it is as it was
|-- DiskFailed            a file that state lives in could not be made, read or written, or has other values than were written
`-- NonFinite             gradients are not finite, and the policy is to raise

A caller's mistake is a ValueError or a TypeError, as everywhere in Python.
"""

from __future__ import annotations


class ZeroError(RuntimeError):
    """The world is not as training needs it."""


class RanksDiffer(ZeroError):
    """Ranks disagree in model, configuration, place or what they did."""


class RankFailed(ZeroError):
    """Another rank reported an error of its own."""


class GroupLost(ZeroError):
    """A collective failed or timed out; the group is of no use any more."""


class BadCheckpoint(ZeroError, ValueError):
    """A checkpoint lacks something, or is damaged: of the world where it was there, and a bad value for who passes it."""


class CheckpointFailed(ZeroError):
    """A save or a load failed on some rank; what was there before it is as it was."""


class DiskFailed(ZeroError):
    """A file that state lives in could not be made, read or written, or has other values than were written."""


class NonFinite(ZeroError):
    """Gradients are not finite, and the policy is to raise."""
