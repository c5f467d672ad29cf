"""Values of Python's own come back from a checkpoint as what they were."""

import collections
import datetime
import json
import math
import pathlib
import zoneinfo

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.checkpoint.values import decode, encode, first_difference
from zero.errors import BadCheckpoint


def back(value):
    return decode(json.loads(json.dumps(encode(value, "it"), sort_keys=True, allow_nan=False)))


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20), st.complex_numbers(),
    st.just(torch.bfloat16),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()), st.none())


def nested(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(st.integers(), st.integers(), max_size=4).map(collections.Counter),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, maxlen=9)),
        st.frozensets(st.integers(), max_size=4),
        st.sets(st.text(), max_size=4),
    )


@given(st.recursive(PLAIN, nested, max_leaves=20))
def test_what_is_stored_comes_back_with_its_types_and_bits(value):
    assert first_difference(value, back(value), "it") is None


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tuple", "v": [1]},
        {"b": 1, "a": 2},
        {1: "one", "1": "text", False: "false"},
        {float("nan"): 1},
        -0.0,
        math.inf,
        float("nan"),
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        numpy.zeros((0, 3)),
        torch.Size([2, 3]),
        torch.device("cpu"),
        numpy.arange(6, dtype=numpy.uint32).reshape(2, 3),
        numpy.float64(0.1),
        numpy.array(3),
        datetime.datetime(2026, 11, 21, 20, 0),
        datetime.timedelta(days=1, microseconds=3),
        pathlib.Path("a") / "b",
        range(1, 9, 2),
        slice(None, 3),
        bytearray(b"abc"),
    ],
    ids=repr,
)
def test_these_come_back_too(value):
    found = back(value)
    assert first_difference(value, found, "it") is None
    if isinstance(value, dict):
        assert repr(list(found)) == repr(list(value))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)], ids=str)
def test_a_permuted_tensor_lies_as_it_lay(order):
    for value in (torch.arange(24.0).view(2, 3, 4), torch.arange(24.0, requires_grad=True).view(2, 3, 4)):
        found = back(value.permute(order))
        assert torch.equal(found, value.permute(order)) and found.stride() == value.permute(order).stride()
        assert found.requires_grad == value.requires_grad and found.is_leaf


class Fleeting:
    pass


CIRCLE = []
CIRCLE.append({"again": CIRCLE})


def nest(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": Fleeting()}]}, r"it\['a'\]\[1\]\['b'\]"),
        ((1, lambda: 0), r"it\[1\]"),
        ({(1, Fleeting()): 2}, r"it \(a key\)\[1\]"),
        (CIRCLE, r"it\[0\]\['again'\].* contains itself"),
        ([torch.nn.Parameter(torch.ones(1))], r"it\[0\].*Parameter"),
        ([torch.ones(2).to_sparse()], r"it\[0\]"),
        ([numpy.array([object()])], r"it\[0\]"),
        (collections.defaultdict(list), "defaultdict"),
        ([datetime.datetime(2026, 11, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))], r"it\[0\]"),
        ([datetime.time(1, fold=1)], r"it\[0\]"),
        ([slice(math.inf)], r"it\[0\]"),
        ([numpy.array([""])], r"it\[0\]"),
        ({"a": nest(101)}, r"it\['a'\](\[0\])+: .* levels deep"),
        ({"a": 10**4000}, r"it\['a'\]"),
    ],
    ids=["object", "function", "key", "circle", "parameter", "sparse", "objects", "defaultdict", "zone", "fold", "slice",
         "texts", "deep", "digits"],
)
def test_what_cannot_be_stored_is_refused_with_the_path_to_it(value, path):
    with pytest.raises(ValueError, match=path):
        encode(value, "it")


def test_a_large_tensor_goes_to_a_file_and_a_small_one_does_not():
    kept = {}

    def keep(tensor):
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    value = {"large": torch.arange(5000.0), "small": torch.arange(5.0), "trained": torch.ones(5000, requires_grad=True)}
    coded = json.loads(json.dumps(encode(value, "it", keep)))
    assert list(kept) == ["0", "1"]
    found = decode(coded, lambda key, dtype, shape: kept[key].to(dtype).reshape(shape))
    assert first_difference(value, found, "it") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({1: 2}, {"1": 2}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2), torch.ones(2).double()), (torch.ones(2), torch.ones(1, 2)), (numpy.int32(1), numpy.int64(1)),
        ([1, [2, 3]], [1, [2, 4]]), ({1}, {2}), (b"a", b"b"),
    ],
)  # fmt: skip
def test_a_difference_in_type_or_bits_is_found(one, other):
    assert first_difference([one], [other], "it") is not None


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Cannot read a tensor of dtype 'load'"):
        decode({"$": "dtype", "v": "load"})


def test_a_value_of_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="pickle"):
        decode({"$": "pickle", "v": "AAAA"})


def test_a_tensor_of_parts_without_what_it_is_made_with_is_refused():
    name = f"{pytest.importorskip('torch.distributed.tensor').DTensor.__module__}.DTensor"
    with pytest.raises(BadCheckpoint, match=r"it is none that was saved \(AssertionError: "):
        decode({"$": "parts", "v": [name, {}, None, [2], [1]]})
