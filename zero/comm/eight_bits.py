"""Numbers in 8 bits for sending: in blocks of 256, each number as a whole number of steps of its block.

A row of N numbers is N bytes, filled up to a multiple of four, and a float32 for each block: the size of its step, which is its
largest magnitude over 127. A number that is not finite makes its whole block so.
"""

from __future__ import annotations

import torch

EIGHT_BITS = "int8"  # what a configuration calls this
BLOCK = 256
_MOST = 127
_NUM_BLOCKS = 256  # of a table of noise
_ALIGN = 4  # bytes of a float32, as it is read where it lies


class Noise:
    """Random numbers for rounding, uniform between 0 and 1. Those of one call are made together, so that a device need not make
    them."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._table = torch.rand(_NUM_BLOCKS, BLOCK, generator=self._generator, device="cpu")
        self._tables: dict[torch.device, torch.Tensor] = {}

    def draw(self, blocks: int, device: torch.device) -> torch.Tensor:
        """One for each number of so many blocks."""
        table = self._tables.setdefault(device, self._table.to(device, copy=True))
        shift = torch.rand((), generator=self._generator, device="cpu").item()
        return table.repeat(-(-blocks // _NUM_BLOCKS), 1)[:blocks].add_(shift).frac_()


class EightBits:
    """The code of gradients: what they are rounded to is right on average."""

    def __init__(self, seed: int) -> None:
        self._noise = Noise(seed)

    def num_bytes(self, numel: int) -> int:
        return num_bytes_of(numel)

    def encode(self, rows: torch.Tensor, messages: torch.Tensor) -> None:
        encode(rows, messages, self._noise)

    def decode(self, messages: torch.Tensor, numel: int) -> torch.Tensor:
        return decode(messages, numel)


def num_bytes_of(numel: int) -> int:
    """Returns the size of the message for so many numbers."""
    return _start_of_sizes(numel) + _ALIGN * _num_blocks(numel)


def encode(rows: torch.Tensor, messages: torch.Tensor, noise: Noise) -> None:
    """Writes each row of numbers to a row of bytes: each number is rounded at random to one of the two steps beside it, so that
    the expected value is the number itself."""
    count, numel = rows.shape
    blocks = _num_blocks(numel)
    padded = torch.nn.functional.pad(rows.float(), (0, blocks * BLOCK - numel)).view(count, blocks, BLOCK)
    sizes = padded.abs().amax(dim=2) / _MOST
    steps = padded / torch.where(sizes == 0, 1.0, sizes).unsqueeze(2)
    steps.add_(noise.draw(count * blocks, steps.device).view(steps.shape)).floor_()
    steps.nan_to_num_(nan=0.0).clamp_(-_MOST, _MOST)
    messages[:, :numel] = steps.view(count, -1)[:, :numel].to(torch.int8).view(torch.uint8)
    messages[:, _start_of_sizes(numel) :].view(torch.float32).copy_(sizes)


def decode(messages: torch.Tensor, numel: int) -> torch.Tensor:
    """Reads the numbers of each row of bytes, in float32."""
    sizes = messages[:, _start_of_sizes(numel) :].view(torch.float32)
    return messages[:, :numel].view(torch.int8).float() * sizes.repeat_interleave(BLOCK, dim=1)[:, :numel]


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _start_of_sizes(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN

