"""Which backwards synchronise."""

import pytest

from zero.engine.accumulation import Accumulation
from zero.window.sync_policy import SyncPolicy


@pytest.mark.parametrize(("locally", "expected"), [(True, [False, False, True, True]), (False, [True] * 4)])
def test_the_last_declared_backward_synchronises_and_every_one_beyond_it(locally, expected):
    boundary, found = SyncPolicy(3, locally), []
    for _ in range(4):
        boundary.counting.note_backward(divides=False)
        found.append(boundary.synchronises)
    assert found == expected


def test_without_a_declaration_every_backward_does():
    assert SyncPolicy(None, True).synchronises


def test_the_users_word_counts_more_than_the_count_until_the_window_ends():
    boundary = SyncPolicy(2, True)
    for _ in range(2):
        boundary.counting.note_backward(divides=False)
    assert boundary.synchronises
    boundary.override = False
    assert not boundary.synchronises
    boundary.end_window()
    assert boundary.override is None and not boundary.synchronises
    boundary.override = True
    assert boundary.synchronises


def test_an_engine_counts_instead_and_clearing_gradients_does_not_begin_its_count_anew():
    boundary, count = SyncPolicy(2, True), Accumulation(2, counted=True)
    boundary.counting = count
    assert not boundary.synchronises
    count.count()
    assert boundary.synchronises
    boundary.end_window()
    assert boundary.synchronises
    boundary.counting.begin()
    assert not boundary.synchronises


def test_inside_no_sync_none_does_however_deep_and_whatever_happens():
    boundary = SyncPolicy(None, False)
    with pytest.raises(KeyError), boundary.no_sync():
        with boundary.no_sync():
            assert not boundary.synchronises
        assert not boundary.synchronises
        raise KeyError
    assert boundary.synchronises
