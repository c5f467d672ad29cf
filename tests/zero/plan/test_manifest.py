"""A manifest is read whole or refused with a reason, whatever it says."""

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.checkpoint.manifest import FORMAT, VERSION, Buffer, File, Manifest, Stored, Stretch, _hash_of

GOOD = Manifest(
    files=(File("rank0.safetensors", 100, "ab"), File("rank1.safetensors", 60, "cd")),
    parameters={
        "weight": Stored(
            (2, 3), (1, 0), "bfloat16", "float32", {"exp_avg": "float32"}, {"step": 3}, (Stretch(1, 0, 4), Stretch(0, 4, 6))
        ),
        "bias": Stored((), None, "float32", "float32", {}, {}, (Stretch(0, 0, 1),)),
    },
    buffers={"mean": Buffer((3,), "float32")},
    aliases={"head.weight": "weight"},
    training={"step": 3, "groups": [{"lr": 0.1}]},
    extra=None,
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@st.composite
def manifests(draw):
    """Parameters of all shapes, each cut into stretches that lie in any files in any order."""
    num_files, parameters = draw(st.integers(1, 3)), {}
    for number in range(draw(st.integers(0, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        numel = math.prod(shape)
        ends = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=2))), numel]
        stretches = [Stretch(draw(st.integers(0, num_files - 1)), *ends[at : at + 2]) for at in range(len(ends) - 1)]
        order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
        state = draw(st.dictionaries(st.text(max_size=3), st.sampled_from(["float32", "bfloat16"]), max_size=2))
        parameters[f"p{number}"] = Stored(shape, order, "bfloat16", "float32", state, draw(VALUES), tuple(stretches))
    files = tuple(File(f"rank{number}.safetensors", draw(st.integers(0)), "ab") for number in range(num_files))
    aliases = {"alias": "p0"} if parameters and draw(st.booleans()) else {}
    return Manifest(files, parameters, {}, aliases, draw(VALUES), draw(VALUES))


def body_of(manifest):
    body = json.loads(manifest.text())
    del body["sha256"]
    return body


def written(body):
    """As the text of a manifest whose hash is right."""
    return json.dumps({**body, "sha256": _hash_of(body)}).encode()


def places_in(node, path=()):
    """The path to everything in it."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield from places_in(child, (*path, key))


def changed(body, path, value, delete):
    body = copy.deepcopy(body)
    *above, last = path
    node = body
    for key in above:
        node = node[key]
    if delete:
        del node[last]
    else:
        node[last] = value
    return body


@settings(max_examples=100, deadline=None)
@given(manifests(), st.data(), VALUES, st.booleans())
def test_any_manifest_is_read_and_with_one_thing_changed_refused_with_a_value_error_and_repaired_it_is_read(
    manifest, data, value, delete
):
    body = body_of(manifest)
    assert Manifest.read(written(body), "here") == manifest
    path = data.draw(st.sampled_from([path for path in places_in(body) if path]))
    broken = changed(body, path, value, delete)
    try:
        Manifest.read(written(broken), "here")
    except ValueError as error:
        assert str(error).startswith("Cannot read here: ") and str(error).endswith("."), error
    if not delete:
        found = body
        for key in path:
            found = found[key]
        assert Manifest.read(written(changed(broken, path, found, delete=False)), "here") == manifest


def test_what_was_written_is_read():
    assert Manifest.read(GOOD.text().encode(), "here") == GOOD
    assert (body_of(GOOD)["format"], body_of(GOOD)["version"]) == (FORMAT, VERSION)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([path for path in places_in(body_of(GOOD)) if path]), VALUES, st.booleans())
def test_a_manifest_with_one_thing_changed_is_read_or_refused_with_a_value_error_and_repaired_it_is_read(path, value, delete):
    body = changed(body_of(GOOD), path, value, delete)
    try:
        found = Manifest.read(written(body), "here")
    except ValueError as error:
        assert str(error).startswith("Cannot read here: ") and str(error).endswith("."), error
    else:
        assert all(stored.covers() for stored in found.parameters.values())
        assert Manifest.read(found.text().encode(), "here") == found
    assert Manifest.read(written(body_of(GOOD)), "here") == GOOD


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()) | st.integers(0, 700).map(
    lambda cut: GOOD.text().encode()[:cut]))
def test_any_bytes_are_refused_with_a_value_error(content):
    with pytest.raises(ValueError, match=r"Cannot read here: "):
        Manifest.read(content, "here")


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("parameters", "weight", "stretches", 0, "stop"), 3, "weight"),  # an element lies nowhere
        (("parameters", "weight", "stretches", 1, "file"), 2, "weight"),
        (("parameters", "weight", "order"), [0, 0], "weight"),
        (("parameters", "bias", "shape"), [-1], "bias"),
        (("files", 0, "name"), "../elsewhere", "../elsewhere"),
        (("aliases", "head.weight"), "gone", "gone"),
    ],
)
def test_what_cannot_be_is_named(path, value, name):
    with pytest.raises(ValueError, match=f"what it says of {name} cannot be"):
        Manifest.read(written(changed(body_of(GOOD), path, value, delete=False)), "here")
