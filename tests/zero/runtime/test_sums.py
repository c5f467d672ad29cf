"""Sums that are not taken before somebody needs them have the bits of those that are."""

import pytest
import torch

from tests.devices import needs_compiler
from tests.zoo.case import real_numbers
from zero.comm.results import add_rows
from zero.memory.deferred_sum import add_scaled, sum_together
from zero.memory.norms import PIECE, squares_of
from zero.runtime.kernels.sums import CompiledSums, SumsByTorch, stretch_of


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numel", [1, PIECE - 1, PIECE, 5 * PIECE + 7, 100 * PIECE + 1])
def test_the_square_of_deferred_sums_is_to_the_bit_that_of_their_sum(numel, threads):
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


@pytest.mark.parametrize("sums", [SumsByTorch(), pytest.param(CompiledSums(), marks=needs_compiler)])
@pytest.mark.parametrize("own", range(3))
def test_a_sum_may_take_the_place_of_any_of_its_rows(sums, own):
    rows = [real_numbers((3 * 2**20 + 7,), "row", rank) for rank in range(3)]
    expected = (rows[0] + rows[1] + rows[2]) * 0.3
    sums.add(rows, rows[own], 0.3, False)
    assert torch.equal(rows[own], expected)


def test_the_square_of_many_numbers_is_right_in_the_fourth_digit():
    numbers = torch.full((2**23 + 3,), 0.1)
    [square] = squares_of([numbers])
    assert square == pytest.approx(numbers.double().square().sum().item(), rel=1e-4)


def test_parts_that_are_summed_together_have_the_bits_of_each_by_itself_though_some_are_rows_and_others_sums():
    halves = [[real_numbers((numel,), "row", rank, numel).bfloat16() for rank in range(2)] for numel in (5, 64, 3)]
    kinds = [(halves[0], (0.5, 0.3)), ([real_numbers((7,), "sum")], (0.3,)), (halves[1], (0.5, 0.3)), (halves[2], (0.7,))]
    expected = list[torch.Tensor]()
    for rows, factors in kinds:
        expected.append(torch.empty(rows[0].numel()))
        add_scaled(add_rows, rows, expected[-1], factors)
    total = torch.empty(79)
    sum_together(kinds, total, torch.split(total, [5, 7, 64, 3]))
    assert torch.equal(total, torch.cat(expected))
