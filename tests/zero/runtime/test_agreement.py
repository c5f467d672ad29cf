"""What follows from all ranks' counts: every rank decides the same, and every error has names."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.errors import RankFailed, RanksDiffer, ZeroError
from zero.plan.layout import set_bits
from zero.window.agreement import OCCASIONS, Codec, Counts, agree

NUM_PARAMS, NUM_BUCKETS = 19, 9
NAMES = [f"p{index}" for index in range(NUM_PARAMS)]
of_params = st.integers(0, 2**NUM_PARAMS - 1)
of_buckets = st.integers(0, 2**NUM_BUCKETS - 1)
counts = st.builds(
    Counts,
    occasion=st.sampled_from(OCCASIONS),
    step=st.integers(0, 2**40),
    settles=st.integers(0, 2**40),
    digest=st.binary(min_size=8, max_size=8),
    settings=st.binary(min_size=8, max_size=8),
    sent=st.integers(0, 2**20),
    clears=st.integers(0, 2**20),
    weight=st.floats(0, 1e300),
    weighted=st.booleans(),
    weights=st.binary(min_size=8, max_size=8),
    row=st.integers(-1, 2**20),
    contributed=st.booleans(),
    failed=st.booleans(),
    changes=st.integers(0, 2**32 - 1),
    differing=st.integers(0, 2**32 - 1),
    micro_steps=st.integers(0, 2**32 - 1),
    used=of_params,
    put=of_params,
    trained=of_params,
    removed=of_params,
    replaced=of_params,
    lost=of_params,
    open=of_buckets,
    wide=of_buckets,
    later=of_buckets,
    order=st.permutations(range(NUM_BUCKETS)).flatmap(
        lambda order: st.integers(0, NUM_BUCKETS).map(lambda num: tuple(order[:num]))
    ),
)


@settings(deadline=None)
@given(counts)
def test_counts_come_out_of_their_message_as_they_went_in(one):
    codec = Codec(NUM_PARAMS, NUM_BUCKETS)
    message = codec.pack(one)
    assert codec.unpack(message) == one
    assert len(message) == len(codec.pack(Counts("step", 0, 0, bytes(8))))  # one size, whatever is in it


@given(st.sets(st.integers(0, 200)))
def test_bits_of_a_set_are_its_members(members):
    assert set_bits(sum(1 << member for member in members)) == sorted(members)


def plain(**changes):
    return replace(Counts("step", 3, 4, b"layout 1", contributed=True, used=0b11, put=0b111), **changes)


def explained(what, rank):
    return f"{what} {rank}"


def agreed(*everyone, order=(0, 1, 2)):
    return agree(everyone, order, NAMES, explained)


@settings(deadline=None)
@given(st.lists(counts.map(lambda one: replace(one, digest=bytes(8))), min_size=1, max_size=4))
def test_it_follows_from_the_counts_of_all_whatever_they_are(everyone):
    first, again = agree(everyone, (1, 0), NAMES, explained), agree(everyone, (1, 0), NAMES, explained)
    assert (first.rounds, first.rest, first.used, str(first.error)) == (again.rounds, again.rest, again.used, str(again.error))
    assert first.rounds == max(one.sent for one in everyone)
    if first.error is not None:
        assert first.discard
        assert first.rest == ()


# What is done -----------------------------------------------------------------------------------------------------------


def test_all_send_as_many_rounds_as_the_one_that_sent_most():
    assert agreed(plain(sent=2), plain(sent=5)).rounds == 5


def test_what_catching_up_does_not_send_needs_a_round_more():
    # Rank 0 sent one round and has something for buckets 1 and 2; catching up sends its buckets 1 but not 2.
    found = agreed(plain(sent=1, open=0b110), plain(sent=2))
    assert found.rest == (2,)


def test_the_order_is_run_through_again_by_every_further_backward():
    assert agreed(plain(sent=0, open=0b111), plain(sent=3)).rest == ()
    assert agreed(plain(sent=2, open=0b111), plain(sent=5)).rest == ()
    assert agreed(plain(sent=3, open=0b111), plain(sent=3)).rest == (0, 1, 2)


def test_what_is_wide_or_late_anywhere_is_sent_by_all_after_the_rounds():
    found = agreed(plain(wide=0b001, sent=9), plain(later=0b100, open=0b100, sent=0))
    assert found.rest == (0, 2)
    assert found.wide == 0b001
    # A late gradient stays late even if catching up would have sent its bucket.
    assert agreed(plain(sent=3), plain(later=0b010, sent=0)).rest == (1,)


def test_what_any_rank_used_is_used():
    assert agreed(plain(used=0b001), plain(used=0b100)).used == 0b101


def test_the_order_to_come_is_rank_0s():
    assert agreed(plain(order=(2, 0, 1)), plain(order=(1,))).order == (2, 0, 1)


def test_weights_are_added_up_where_there_are_any():
    assert agreed(plain(), plain()).weight is None
    assert agreed(plain(weighted=True, weight=3.0), plain(weighted=True, weight=0.5)).weight == 3.5
    # A rank without anything to weigh is no disagreement.
    assert agreed(plain(weighted=True, weight=3.0), plain(used=0)).weight == 3.0


def test_clearing_discards_what_was_sent_and_sends_no_more():
    found = agreed(plain(occasion="zero_grad", open=0b1), plain(occasion="zero_grad", sent=2))
    assert (found.rounds, found.rest, found.discard, found.error) == (2, (), True, None)
    assert agreed(plain(clears=1), plain(clears=1)).discard
    assert not agreed(plain(), plain()).discard


# What is wrong ----------------------------------------------------------------------------------------------------------


def test_different_layouts_are_raised_at_once():
    said = r"rank 1 of 2 built something else than rank 0, which shows at step 4: built 1"
    with pytest.raises(RanksDiffer, match=said):
        agreed(plain(), plain(digest=b"other la"))


@pytest.mark.parametrize(
    ("others", "kind", "words"),
    [
        ({"failed": True}, RankFailed, r"rank 1 failed or cleared its gradients at step 4failed 1, where the others came to s"),
        ({"occasion": "zero_grad"}, RankFailed, r"rank 1 failed or cleared its gradients at step 4.*on all ranks to go on"),
        ({"lost": 0b100}, ZeroError, r"Cannot train p2: on rank 1 it is no longer what was sharded"),
        ({"occasion": "settle"}, RanksDiffer, r"rank 1 of 2 is at settle of step 4, and rank 0 is at step of step 4\."),
        ({"step": 9}, RanksDiffer, r"rank 1 of 2 is at step of step 10, and rank 0 is at step of step 4\."),
        ({"settles": 9}, RanksDiffer, r"its settlement 10, and rank 0 is at step of step 4, its settlement 5\."),
        ({"contributed": False, "used": 0}, RanksDiffer, r"rank 1 came to step at step 4 without a gradient.*no_contribution"),
        ({"weighted": True, "weight": 2.0}, RanksDiffer, r"rank 1 gave a weight to its micro-batches, rank 0 did not"),
        ({"clears": 1}, RanksDiffer, r"rank 1 cleared its gradients 1 times since the last step, rank 0 0 times"),
        ({"removed": 0b10}, RanksDiffer, r"rank 1 removed or replaced the gradient of p1, rank 0 kept it"),
        ({"replaced": 0b100}, RanksDiffer, r"rank 1 removed or replaced the gradient of p2, rank 0 kept it"),
    ],
)
def test_every_disagreement_is_named_on_every_rank(others, kind, words):
    found = agreed(plain(), plain(**others))
    assert type(found.error) is kind
    with pytest.raises(kind, match=words):
        raise found.error
    assert found.discard


def test_of_many_lost_parameters_three_are_named_and_the_others_counted():
    assert "Cannot train p0, p1, p2:" in str(agreed(plain(lost=0b111), plain()).error)
    assert "Cannot train p0, p1, p2 and 2 more:" in str(agreed(plain(lost=0b1011), plain(lost=0b10101)).error)


def test_an_edit_of_rank_0_is_named_as_such():
    with pytest.raises(RanksDiffer, match="rank 0 removed or replaced the gradient of p0, rank 1 kept it"):
        raise agreed(plain(replaced=1), plain()).error


def test_the_same_edits_and_edits_of_what_was_put_on_one_rank_only_are_fine():
    assert agreed(plain(removed=0b1), plain(replaced=0b1)).error is None
    assert agreed(plain(removed=0b100), plain(put=0b011)).error is None
    assert agreed(plain(put=0, removed=0), plain(removed=0b1)).error is None


@pytest.mark.parametrize(("values", "differs"), [("aaa", None), ("aba", 1), ("aab", 2), ("abb", 1)])
def test_values_of_all_ranks_are_compared_where_one_has_another_digest(values, differs):
    everyone = [plain(changes=1), plain(changes=1), plain(changes=2)]
    error = agree(everyone, (0, 1, 2), NAMES, lambda what, rank: "" if values[rank] == values[0] else what).error
    assert (error is None) == (differs is None)
    assert differs is None or f"rank {differs} came to step with gradients changed otherwise" in str(error)


def test_ranks_that_all_clear_may_have_failed_alone():
    assert agreed(plain(occasion="zero_grad", failed=True), plain(occasion="zero_grad")).error is None


def test_all_without_a_gradient_is_no_disagreement():
    assert agreed(plain(contributed=False, used=0), plain(contributed=False, used=0)).error is None
