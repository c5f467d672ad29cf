"""Where parameters lie, for any sizes, any number of ranks and any size of buckets."""

import itertools
import math
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.plan.families import Family
from zero.plan.homes import Asked, Away, assign_homes
from zero.plan.layout import ITEM_BYTES, FlatLayout, ParamSpec, Span, round_up

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)
some_sixty = settings(max_examples=60, deadline=None)
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def layouts(draw):
    specs = [ParamSpec(f"p{index}", shape, draw(dtypes)) for index, shape in enumerate(draw(shapes))]
    unplaced = draw(st.sets(st.integers(0, max(0, len(specs) - 1)))) if specs else set()
    bucket_bytes, align_bytes = draw(st.sampled_from([1, 28, 64, 100, 1000, 10**6])), draw(st.sampled_from([16, 64]))
    return FlatLayout.build(specs, draw(st.integers(1, 5)), bucket_bytes, align_bytes, unplaced)


def placed(layout):
    return [slot for slot in layout.slots if slot is not None]


@some_sixty
@given(layouts())
def test_slots_are_aligned_disjoint_and_within_their_chunk(layout):
    for chunk, _ in enumerate(layout.chunks):
        spans = sorted((s.span.start, s.span.stop) for s in placed(layout) if s.chunk == chunk and s.span.numel)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert all(stop <= layout.chunks[chunk].numel for _, stop in spans)
    for slot in placed(layout):
        spec = layout.params[slot.param]
        assert slot.span.numel == spec.numel == math.prod(spec.shape)
        assert slot.span.start * ITEM_BYTES[spec.dtype] % layout.align_bytes == 0
        assert layout.chunks[slot.chunk].dtype == spec.dtype


@some_sixty
@given(layouts())
def test_buckets_tile_their_chunks_and_divide_evenly_among_the_ranks(layout):
    for chunk, found in enumerate(layout.chunks):
        spans = sorted((bucket.span for bucket in layout.buckets if bucket.chunk == chunk), key=lambda span: span.start)
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])][: len(spans)]
        assert (spans[-1].stop if spans else 0) == found.numel
        assert all(span.numel > 0 and span.numel % layout.num_shares == 0 for span in spans)
        item = ITEM_BYTES[found.dtype]
        assert all(span.numel // layout.num_shares * item % layout.align_bytes == 0 for span in spans)


@some_sixty
@given(layouts())
def test_no_bucket_grows_for_a_large_parameter(layout):
    for bucket in layout.buckets:
        item = ITEM_BYTES[layout.chunks[bucket.chunk].dtype]
        # The most that rounding adds, and the alignment of a few small parameters.
        unit = layout.num_shares * layout.align_bytes
        assert bucket.span.numel * item < max(layout.bucket_bytes, 1) + unit + len(bucket.params) * layout.align_bytes


@some_sixty
@given(layouts())
def test_the_pieces_of_all_ranks_tile_every_parameter_exactly_once(layout):
    for param, spec in enumerate(layout.params):
        pieces = [piece for rank in range(layout.num_shares) for piece in layout.pieces(param, rank)]
        counted = sorted(element for piece in pieces for element in range(piece.in_param.start, piece.in_param.stop))
        assert counted == (list(range(spec.numel)) if layout.slots[param] is not None else [])
        for piece in pieces:
            assert piece.in_share.numel == piece.in_param.numel
            assert 0 <= piece.in_share.start < piece.in_share.stop <= layout.buckets[piece.bucket].share_numel


@some_sixty
@given(layouts())
def test_pieces_lie_where_the_slot_says(layout):
    for slot in placed(layout):
        for rank in range(layout.num_shares):
            for piece in layout.pieces(slot.param, rank):
                share = layout.buckets[piece.bucket].share(rank)
                assert share.start + piece.in_share.start == slot.span.start + piece.in_param.start


@some_sixty
@given(layouts())
def test_stretches_are_the_parameter_cut_at_the_buckets(layout):
    for slot in placed(layout):
        stretches = layout.stretches_of(slot.param)
        counted = [element for each in stretches for element in range(each.in_param.start, each.in_param.stop)]
        assert counted == list(range(layout.params[slot.param].numel))
        for each in stretches:
            assert layout.buckets[each.bucket].span.start + each.in_bucket.start == slot.span.start + each.in_param.start


@some_sixty
@given(layouts())
def test_in_a_bucket_are_the_parameters_that_have_a_stretch_there_and_no_empty_ones(layout):
    for index, params in enumerate(layout.params_in):
        buckets_of = [{each.bucket for each in layout.stretches_of(param)} for param in range(len(layout.params))]
        assert [params >> param & 1 for param in range(len(buckets_of))] == [index in buckets for buckets in buckets_of]


@some_sixty
@given(layouts())
def test_padding_is_in_the_gaps_and_nothing_else_is(layout):
    for index, bucket in enumerate(layout.buckets):
        filled = set()
        for param in bucket.params:
            for each in layout.stretches_of(param):
                if each.bucket == index:
                    filled.update(range(each.in_bucket.start, each.in_bucket.stop))
        gaps = {element for gap in layout.gaps[index] for element in range(gap.start, gap.stop)}
        assert not gaps & filled
        assert gaps | filled == set(range(bucket.span.numel))
        assert all(gap.numel > 0 for gap in layout.gaps[index])


@some_sixty
@given(layouts())
def test_an_unplaced_parameter_lies_nowhere_and_extending_leaves_the_others_where_they_are(layout):
    unplaced = [param for param, slot in enumerate(layout.slots) if slot is None]
    extended = layout.extended(unplaced)
    assert all(slot is not None for slot in extended.slots)
    for param, slot in enumerate(layout.slots):
        if slot is not None:
            assert extended.slots[param] == slot
    assert extended.chunks[: len(layout.chunks)] == layout.chunks
    assert extended.buckets[: len(layout.buckets)] == layout.buckets


@some_sixty
@given(layouts(), shapes)
def test_parameters_that_join_change_nothing_of_the_others(layout, more):
    joined = layout.joined([ParamSpec(f"new{index}", shape, "float32") for index, shape in enumerate(more)])
    assert joined.slots[: len(layout.slots)] == layout.slots
    assert joined.slots[len(layout.slots) :] == (None,) * len(more)
    extended = joined.extended(range(len(layout.params), len(joined.params)))
    assert extended.buckets[: len(layout.buckets)] == layout.buckets


@some_sixty
@given(layouts())
def test_every_rank_owns_as_much(layout):
    for rank in range(layout.num_shares):
        shares = [bucket.share(layout.share_of(index, rank)) for index, bucket in enumerate(layout.buckets)]
        assert sum(share.numel for share in shares) == layout.owned_numel


def test_the_last_parameter_of_the_model_is_in_the_first_bucket():
    layout = FlatLayout.build([ParamSpec(f"p{index}", (16,), "float32") for index in range(4)], 1, 64)
    assert [bucket.params for bucket in layout.buckets] == [(3,), (2,), (1,), (0,)]


def test_a_bucket_may_be_larger_than_any_memory():
    assert len(FlatLayout.build([ParamSpec("p", (16,), "float32")], 1, 10**20).buckets) == 1


def test_buckets_hold_one_dtype():
    specs = [ParamSpec("a", (3,), "float32"), ParamSpec("b", (3,), "bfloat16"), ParamSpec("c", (3,), "float32")]
    layout = FlatLayout.build(specs, 2, 10**6)
    assert sorted(sorted(bucket.params) for bucket in layout.buckets) == [[0, 2], [1]]


def test_digests_differ_exactly_where_layouts_do():
    specs = [ParamSpec("a", (3, 4), "float32"), ParamSpec("b", (5,), "float32")]
    one = FlatLayout.build(specs, 2, 1000)
    assert one.digest == FlatLayout.build(list(specs), 2, 1000).digest
    others = [
        FlatLayout.build(specs[:1], 2, 1000),
        FlatLayout.build(specs, 3, 1000),
        FlatLayout.build(specs, 2, 16),
        FlatLayout.build([ParamSpec("a", (4, 3), "float32"), specs[1]], 2, 1000),
        FlatLayout.build(specs, 2, 1000, unplaced=[0]),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 6


def test_a_billion_elements_are_planned_in_numbers_only():
    layers = [ParamSpec(f"layer{index}.{name}", (3200, 3200), "bfloat16") for index in range(50) for name in ("up", "down")]
    layout = FlatLayout.build(layers, 8, 8 << 20)
    assert sum(spec.numel for spec in layout.params) > 10**9
    assert sum(piece.in_param.numel for piece in layout.pieces(0, 3)) == pytest.approx(3200 * 3200 / 8, rel=0.2)


@pytest.mark.parametrize("wrong", [{"num_shares": 0}, {"bucket_bytes": 0}, {"align_bytes": 24}, {"align_bytes": 8}])
def test_a_layout_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="Cannot lay out buckets"):
        FlatLayout.build([], **{"num_shares": 1, "bucket_bytes": 64, **wrong})



@some_sixty
@given(st.lists(st.integers(0, 40), min_size=1, max_size=7), st.integers(1, 60))
def test_there_are_as_few_chunks_as_there_must_be_and_the_longest_is_as_short_as_can_be(sizes, most):
    layout = FlatLayout.build([ParamSpec(f"p{at}", (size,), "float64") for at, size in enumerate(sizes)], 1, 8 * most, 16)
    aligned = [size + size % 2 for size in sizes]

    def lengths(cuts):
        """Of the runs between those cuts; None where one is too long, and not a single parameter."""
        bounds = [0, *cuts, len(sizes)]
        runs = [range(first, stop) for first, stop in itertools.pairwise(bounds)]
        # No gap follows the parameter that is laid out last in a chunk, which is the first of the model.
        found = [sum(aligned[at] for at in run) - aligned[run[0]] + sizes[run[0]] for run in runs]
        return found if all(length <= most or len(run) == 1 for length, run in zip(found, runs, strict=True)) else None

    cuts = [cut for number in range(len(sizes)) for cut in itertools.combinations(range(1, len(sizes)), number)]
    possible = [found for cut in cuts if (found := lengths(cut)) is not None]
    fewest = min(map(len, possible))
    best = min(max(found) for found in possible if len(found) == fewest)
    assert len(layout.chunks) == fewest
    assert max(chunk.numel for chunk in layout.chunks) == round_up(best, 2)


@some_sixty
@given(layouts())
def test_buckets_of_a_large_parameter_differ_by_no_more_than_their_rounding(layout):
    for chunk, found in enumerate(layout.chunks):
        numels = [bucket.span.numel for bucket in layout.buckets if bucket.chunk == chunk]
        unit = layout.num_shares * layout.align_bytes // ITEM_BYTES[found.dtype]
        assert not numels or max(numels) - min(numels) < len(numels) * unit


# whole tensors ----------------------------------------------------------------------------------------------------------


@st.composite
def whole_layouts(draw):
    """Some parameters with one owner each, some that are anybody's, some that join later."""
    kinds, works = st.sampled_from(["float32", "bfloat16"]), st.integers(0, 3)
    specs = [ParamSpec(f"p{at}", shape, draw(kinds), work=draw(works)) for at, shape in enumerate(draw(shapes))]
    unplaced = draw(st.sets(st.integers(0, max(0, len(specs) - 1)))) if specs else set()
    options = draw(st.sampled_from([1, 64, 10**6])), 16, unplaced, draw(st.sampled_from([None, 8]))
    return FlatLayout.build(specs, draw(st.integers(1, 5)), *options), unplaced


@some_sixty
@given(whole_layouts())
def test_a_parameter_with_an_owner_is_one_piece_of_that_rank_and_nobody_elses(found):
    layout, unplaced = found
    layout = layout.extended(unplaced)
    for param, spec in enumerate(layout.params):
        pieces = {rank: list(layout.pieces(param, rank)) for rank in range(layout.num_shares)}
        assert sum(piece.in_param.numel for own in pieces.values() for piece in own) == spec.numel
        if spec.work and spec.numel:
            [piece] = pieces[layout.owner(param)]
            assert piece.in_param.start == 0 and layout.buckets[piece.bucket].has_owners
            assert layout.block_of(piece).span.numel == layout.buckets[piece.bucket].share_numel
        elif not spec.work:
            assert layout.owner(param) is None


@some_sixty
@given(whole_layouts())
def test_whole_tensors_lie_apart_aligned_in_chunks_of_their_own_and_leave_the_others_where_they_were(found):
    layout, _ = found
    for slot in placed(layout):
        assert slot.span.start * ITEM_BYTES[layout.params[slot.param].dtype] % layout.align_bytes == 0
        together = layout.chunks[slot.chunk].params
        assert {bool(layout.params[other].work) for other in together} == {bool(layout.params[slot.param].work)}
    for chunk, _ in enumerate(layout.chunks):
        spans = [layout.slots[param].span for param in layout.chunks[chunk].params]
        assert spans == sorted(spans, key=lambda span: (span.start, span.stop))
        assert all(before.stop <= after.start for before, after in itertools.pairwise(spans))
    bare = FlatLayout.build([spec for spec in layout.params if not spec.work], layout.num_shares, 64, 16)
    with_them = FlatLayout.build(layout.params, layout.num_shares, 64, 16)
    rest = [slot for slot, spec in zip(with_them.slots, layout.params, strict=True) if not spec.work]
    assert [slot.span for slot in rest] == [slot.span for slot in bare.slots]


@some_sixty
@given(whole_layouts())
def test_padding_of_whole_tensors_is_in_the_gaps(found):
    layout, _ = found
    for index, bucket in enumerate(layout.buckets):
        stretches = [each for param in bucket.params for each in layout.stretches_of(param) if each.bucket == index]
        filled = sum(each.in_param.numel for each in stretches)
        assert filled + sum(gap.numel for gap in layout.gaps[index]) == bucket.span.numel


def test_the_example_of_the_module_is_what_is_built():
    shapes = {"embed": (6, 4), "norm": (4,), "fc": (8, 5), "bias": (10,)}
    layout = FlatLayout.build([ParamSpec(name, shape, "float32") for name, shape in shapes.items()], 2, 128, 16)
    said = sys.modules[FlatLayout.__module__].__doc__.partition("[Note: an example]")[2]
    for slot, spec in zip(layout.slots, layout.params, strict=True):
        assert re.search(rf"chunk {slot.chunk}  \|.* {spec.name} {slot.span.start}\.\.{slot.span.stop} \|", said), spec.name
    for number, bucket in enumerate(layout.buckets):
        span, shares = bucket.span, [bucket.share(rank) for rank in range(2)]
        words = [f"rank {rank} has {share.start}..{share.stop}" for rank, share in enumerate(shares)]
        assert re.search(rf"bucket {number}: {span.start}\.\.{span.stop} +{words[0]}, +{words[1]}$", said, re.MULTILINE), number
    assert [[piece.in_param for piece in layout.pieces(3, rank)] for rank in range(2)] == [[Span(0, 8)], [Span(8, 10)]]
    assert [[piece.in_param for piece in layout.pieces(0, rank)] for rank in range(2)] == [[Span(0, 12)], [Span(12, 24)]]


# chunks of all kinds ---------------------------------------------------------------------------------------------------


@st.composite
def mixed_layouts(draw):
    """Parameters that differ in all that decides their places: owners, families, homes, whether all ranks keep them whole."""
    ratios, aways = st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([(), (Away("moments", "disk:/scratch", 0.5),)])
    families = [Family(num_shares) for num_shares in draw(st.lists(st.integers(1, 3), max_size=2))]
    specs = [
        ParamSpec(
            f"p{index}", shape, draw(st.sampled_from(["float32", "bfloat16"])), offload=draw(ratios), kept=draw(st.booleans()),
            work=draw(st.integers(0, 2)), away=draw(aways), family=draw(st.integers(0, len(families))),
        )
        for index, shape in enumerate(draw(shapes))
    ]  # fmt: skip
    late = draw(st.sets(st.sampled_from(range(len(specs))))) if specs else set()
    sizes = draw(st.integers(1, 5)), draw(st.sampled_from([1, 64, 200, 10**6])), 16
    return FlatLayout.build(specs, *sizes, late, parted=tuple(families)).extended(late)


@some_sixty
@given(mixed_layouts())
def test_a_chunk_is_one_bucket_or_one_parameter(layout):
    for number, chunk in enumerate(layout.chunks):
        buckets = [layout.buckets[index] for index in layout.buckets_in(number)]
        assert len(chunk.params) == 1 or len(buckets) <= 1
        assert {bucket.params for bucket in buckets} <= {chunk.params}
    for param, slot in enumerate(layout.slots):
        assert [number for number, chunk in enumerate(layout.chunks) if param in chunk.params] == [slot.chunk]
        assert 0 <= slot.span.start <= slot.span.stop <= layout.chunks[slot.chunk].numel
        assert slot.span.numel == layout.params[param].numel


@some_sixty
@given(mixed_layouts())
def test_no_chunk_has_parameters_of_two_kinds(layout):
    for number, chunk in enumerate(layout.chunks):
        specs = [layout.params[param] for param in chunk.params]
        [(dtype, family, _, _, kept, _)] = {(s.dtype, s.family, s.offload, s.away, s.kept, s.work > 0) for s in specs}
        assert (chunk.dtype, chunk.family, chunk.is_kept) == (dtype, family, kept)
        for bucket in (layout.buckets[index] for index in layout.buckets_in(number)):
            assert bucket.family == family
            assert bucket.has_owners == (specs[0].work > 0)
            assert specs[0].offload or not bucket.offloaded
            assert {kind for kind, _ in bucket.away} <= {each.kind for each in specs[0].away}


# homes ------------------------------------------------------------------------------------------------------------------


def test_the_first_buckets_are_away_and_as_few_as_have_the_ratio_or_more():
    half = Away("moments", "disk:/scratch", 0.5)
    at_home, elsewhere = (False, ()), (False, (("moments", "disk:/scratch"),))
    assert list(assign_homes([Asked(100, 0.0, (half,))] * 3)) == [elsewhere, elsewhere, at_home]
    assert list(assign_homes([Asked(100, 0.0, (half,))] * 4)) == [elsewhere, elsewhere, at_home, at_home]
