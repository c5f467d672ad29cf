"""Sums that are not taken before somebody needs them have the bits of those that are."""

import pytest
import torch

from tests.zoo.case import real_numbers
from zero.comm.group import add_rows
from zero.memory.norms import PIECE, squares_of
from zero.memory.rows import add_scaled
from zero.runtime.sums import SumsByTorch, stretch_of


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numel", [1, PIECE - 1, PIECE, 5 * PIECE + 7, 100 * PIECE + 1])
def test_the_square_of_rows_that_wait_is_to_the_bit_that_of_their_sum(numel, threads):
    rows, factors = [real_numbers((numel,), "row", rank).bfloat16() for rank in range(2)], (0.5, 0.3)
    total = torch.empty(numel)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        add_scaled(add_rows, rows, total, factors)
        assert SumsByTorch().square(rows, factors, torch.float32) == squares_of([total])[0]
        assert numel < 100 * PIECE or numel > 2 * stretch_of(numel)  # the longest is squared in parts
    finally:
        torch.set_num_threads(before)


def test_the_square_of_many_numbers_is_right_in_the_fourth_digit():
    numbers = torch.full((2**23 + 3,), 0.1)
    [square] = squares_of([numbers])
    assert square == pytest.approx(numbers.double().square().sum().item(), rel=1e-4)
