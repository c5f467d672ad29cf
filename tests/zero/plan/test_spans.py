"""Stretches of elements."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.layout import Span, round_up

unhurried = settings(deadline=None)  # other work may have the core
numbers = st.integers(0, 50)
spans = st.tuples(numbers, numbers).map(lambda ends: Span(min(ends), max(ends)))


def elements(span):
    return set(range(span.start, span.stop))


@unhurried
@given(spans, spans)
def test_an_overlap_is_what_both_have(one, other):
    found = one.overlap(other)
    assert (set() if found is None else elements(found)) == elements(one) & elements(other)
    assert found is None or found.numel > 0


@unhurried
@given(st.integers(0, 20), st.integers(1, 7), st.integers(0, 30))
def test_pieces_tile_a_span_in_order(share, num_pieces, start):
    span = Span(start, start + share * num_pieces)
    pieces = [span.piece(rank, num_pieces) for rank in range(num_pieces)]
    assert [element for piece in pieces for element in range(piece.start, piece.stop)] == list(range(span.start, span.stop))
    assert {piece.numel for piece in pieces} == {share}


def test_a_span_that_does_not_divide_is_our_own_mistake():
    with pytest.raises(AssertionError, match="does not divide into 3"):
        Span(0, 10).piece(0, 3)


@unhurried
@given(st.integers(0, 1000), st.integers(1, 64))
def test_rounding_up_gives_the_least_multiple_that_is_not_below(number, multiple):
    found = round_up(number, multiple)
    assert found % multiple == 0
    assert number <= found < number + multiple


def test_shifting_keeps_the_length():
    assert Span(3, 7).shifted(-3) == Span(0, 4)
    assert Span(3, 7).shifted(2).numel == 4
