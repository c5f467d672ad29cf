"""Numbers in 8 bits: how near they are, what they are expected to be, and how long they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.window.narrowing import BLOCK, Noise, decode, encode, num_bytes_of


def through(rows, noise):
    messages = torch.full((rows.shape[0], num_bytes_of(rows.shape[1])), 255, dtype=torch.uint8)
    encode(rows, messages, noise)
    return decode(messages, rows.shape[1])


def steps_of(rows):
    """The step of each number's block."""
    blocks = [row.split(BLOCK) for row in rows.float()]
    return torch.stack([torch.cat([(block.abs().max() / 127).expand(block.numel()) for block in row]) for row in blocks])


def draw(count, numel, seed=0):
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, numel, generator=generator) * 2.0 ** torch.randint(-20, 20, (count, numel), generator=generator)


@given(st.integers(1, 3), st.integers(1, 3 * BLOCK), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_each_number_is_within_a_step_of_its_block(count, numel, dtype, seed):
    rows = draw(count, numel, seed).to(dtype)
    steps = steps_of(rows) * (1 + 1e-5)
    assert bool(((through(rows, Noise(seed)) - rows.float()).abs() <= steps).all())


def test_rounded_at_random_a_number_is_expected_to_be_itself():
    rows, noise, count = draw(2, 700), Noise(0), 4000
    mean = sum(through(rows, noise).double() for _ in range(count)) / count
    # One that lies between two steps is half a step off at most in the root mean square, and the mean of n by sqrt(n) less.
    assert bool(((mean - rows).abs() <= 5 * steps_of(rows) / 2 / count**0.5).all())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_its_block_so_and_no_other(value):
    rows = draw(1, 3 * BLOCK)
    rows[0, BLOCK + 7] = value
    finite = through(rows, Noise(0)).isfinite().view(3, BLOCK)
    assert not finite[1].any() and finite[0].all() and finite[2].all()


def test_zeros_are_zeros_and_a_message_is_a_byte_a_number_and_four_a_block():
    assert not through(torch.zeros(2, 300), Noise(0)).any()
    assert [num_bytes_of(numel) for numel in (0, 1, 256, 257, 1024)] == [0, 8, 260, 268, 1040]
