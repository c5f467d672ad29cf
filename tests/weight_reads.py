"""Which bytes of weight files are read."""

import contextlib

from zero.checkpoint import weight_files


@contextlib.contextmanager
def counted_reads():
    """A list of how many each read inside takes."""
    read, counted = weight_files._OpenFile.read, []

    def counting(file, start, num_bytes):
        counted.append(num_bytes)
        return read(file, start, num_bytes)

    weight_files._OpenFile.read = counting
    try:
        yield counted
    finally:
        weight_files._OpenFile.read = read
