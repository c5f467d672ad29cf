"""Errors that are not a caller's mistake.

ZeroError                 ranks, a checkpoint, a disk or numbers failed
|-- RanksDiffer           ranks disagree about the model, the configuration, or what they did
|-- RankFailed            another rank raised an error
|-- GroupLost             a collective failed or timed out; the group cannot be used any more
|-- BadCheckpoint         a checkpoint lacks something, or is damaged
|-- CheckpointFailed      a save or a load failed on some rank; what was there before is as it was
|-- DiskFailed            a file of state could not be made, read or written, or has other values than were written
`-- NonFinite             gradients are not finite, and `on_nonfinite` is "raise"

A caller's mistake is a ValueError or a TypeError, as everywhere in Python.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator


class ZeroError(RuntimeError):
    """Ranks, a checkpoint, a disk or numbers failed. All errors that are not a caller's mistake are of this class."""


class RanksDiffer(ZeroError):
    """Ranks disagree about the model, the configuration, or what they did."""


class RankFailed(ZeroError):
    """Another rank raised an error."""


class GroupLost(ZeroError):
    """A collective failed or timed out; the group cannot be used any more."""


class BadCheckpoint(ZeroError, ValueError):
    """A checkpoint lacks something, or is damaged. It is a ValueError too, for a caller who passes such a path."""


class CheckpointFailed(ZeroError):
    """A save or a load failed on some rank; what was there before is as it was."""


class DiskFailed(ZeroError):
    """A file of state on disk could not be made, read or written, or has other values than were written."""


class NonFinite(ZeroError):
    """Gradients are not finite, and `on_nonfinite` is "raise"."""


_ROOM, _PERMISSION = "Make room there, or name a place on another disk", "Name a place that may be written"
_REMEDIES = {
    errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EFBIG: _ROOM, errno.ENAMETOOLONG: "Give a shorter name",
    errno.EACCES: _PERMISSION, errno.EPERM: _PERMISSION, errno.EROFS: _PERMISSION,
    errno.EEXIST: "Name another place", errno.ENOTDIR: "Name another place", errno.EISDIR: "Name another place",
}  # fmt: skip


def full_name(kind: type) -> str:
    """Returns the name of a class with its module's, as errors have it and lists of what is known."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_ours(text: str) -> bool:
    """Returns whether an error says this, in the form of the project: `Cannot X: Y. Do Z.` Such a text names the place and the
    remedy, and nothing has to be added to it.

    The text tells, not the class: a mistake of the caller's is a ValueError, as those of torch and of parsers are, and from the
    process of another rank the text is all that comes.
    """
    return text.startswith("Cannot ")


def not_written(place: object, error: OSError, act: str = "write to") -> Exception:
    """Returns an error of the system as one that says what was done to what place, and what to do; one of ours as it is."""
    if is_ours(str(error)):
        return error
    remedy = _REMEDIES.get(error.errno or 0, "Look at that place, and try it again")
    return CheckpointFailed(f"Cannot {act} {place}: {error.strerror or error}. {remedy}.")


@contextlib.contextmanager
def refusing(refusal: Callable[[Exception], Exception], hides: bool = False) -> Iterator[None]:
    """Raises what `refusal` makes of an error in a block that reads bytes which anybody may have written: there is no list of
    what parsers and constructors raise then. What is named already goes through, as does what `refusal` returns as it is. With
    `hides` the error itself is shown nowhere."""
    try:
        yield
    except ZeroError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is error:
            raise
        raise refused from (None if hides else error)
