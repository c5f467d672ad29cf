"""Which bytes of weight files are read."""

import contextlib

from tests import faults


@contextlib.contextmanager
def counted_reads():
    """A list of how many each read inside takes."""
    read, counted = faults.READING_A_FILE.now, []

    def counting(file, start, num_bytes):
        counted.append(num_bytes)
        return read(file, start, num_bytes)

    faults.READING_A_FILE.put(counting)
    try:
        yield counted
    finally:
        faults.READING_A_FILE.put(read)
