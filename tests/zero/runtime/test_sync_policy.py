"""Which backwards synchronise."""

import pytest

from zero.runtime.grads.sync_policy import SyncPolicy


@pytest.mark.parametrize(("locally", "expected"), [(True, [False, False, True, True]), (False, [True] * 4)])
def test_the_last_declared_backward_synchronises_and_every_one_beyond_it(locally, expected):
    boundary, found = SyncPolicy(3, locally), []
    for _ in range(4):
        boundary.backwards += 1
        found.append(boundary.synchronises)
    assert found == expected


def test_without_a_declaration_every_backward_does():
    assert SyncPolicy(None, True).synchronises


def test_the_users_word_counts_more_than_the_count_until_the_window_ends():
    boundary = SyncPolicy(2, True)
    boundary.backwards = 2
    boundary.override = False
    assert not boundary.synchronises
    boundary.end_window()
    assert (boundary.override, boundary.backwards) == (None, 0)
    boundary.override = True
    assert boundary.synchronises


def test_inside_no_sync_none_does_however_deep_and_whatever_happens():
    boundary = SyncPolicy(None, False)
    with pytest.raises(KeyError), boundary.no_sync():
        with boundary.no_sync():
            assert not boundary.synchronises
        assert not boundary.synchronises
        raise KeyError
    assert boundary.synchronises
