"""What is noted as written in part."""

from zero.memory.masters import Wholeness


def test_what_another_thread_tears_during_an_update_stays_torn_when_that_ends():
    wholeness = Wholeness()
    wholeness.begin("step 3")
    wholeness.tear("the last update")
    wholeness.end()
    assert not wholeness.is_whole


def test_an_update_that_ends_leaves_what_was_torn_before_and_nothing_else():
    wholeness = Wholeness()
    wholeness.begin("step 1", params=3)
    assert not wholeness.is_whole
    wholeness.end()
    assert wholeness.is_whole
    wholeness.tear("step 2", params=1)
    wholeness.begin("step 3", params=2)
    wholeness.end()
    assert not wholeness.is_whole
    wholeness.begin("a load", params=3)
    wholeness.end(replaced=("masters", "moments"))
    assert wholeness.is_whole
