"""The passes in C++ round as torch does, have the same bits with any number of threads, and any usual compiler builds them."""

import contextlib
import os
import stat

import pytest
import torch
from torch import nn

import zero
from tests import programs
from tests.devices import needs_compiler
from tests.loopback import solo
from tests.zoo.case import real_numbers
from zero.runtime.kernels import native

pytestmark = needs_compiler

NOTHING = (1.0, 0.0, 1.0, 0.0, -0.0, 1.0, 1.0)  # numbers of a step that leaves masters and moments what they are
HALVES = [torch.bfloat16, torch.float16]


def every(dtype):
    """Every number of that dtype, NaNs included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def bits(tensor):
    """With one NaN for all of them."""
    whole = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return torch.where(tensor.isnan(), -1, whole)


def step(masters, weights=None, rounded=None):
    moments = [torch.zeros_like(masters) for _ in range(2)]
    native.step_adam(NOTHING, True, [torch.zeros_like(masters)], (), masters, moments, weights, rounded)


@contextlib.contextmanager
def of_threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_narrow_number_is_widened_as_torch_does(dtype):
    found = torch.empty(2**16)
    native.add([every(dtype)], found, 1.0, False)
    assert torch.equal(bits(found), bits(every(dtype).float()))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("masters", [torch.float32, torch.float64])
def test_what_lies_at_or_beside_the_middle_of_two_narrow_numbers_is_rounded_as_torch_does(dtype, masters):
    ends = every(dtype).float()
    middles = (ends + ends.roll(1)) / 2
    given = torch.cat([ends, middles, middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))])
    given = torch.cat([given, torch.tensor([torch.nan, torch.inf, 3e38, 65519.9, 65520.0, 1e-8, 2**-25, 2**-24])]).to(masters)
    rounded, kept = torch.empty(given.numel(), dtype=dtype), given.clone()
    step(given, rounded=rounded)
    assert torch.equal(bits(given), bits(kept))
    assert torch.equal(bits(rounded), bits(given.to(dtype)))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_master_takes_the_value_of_a_weight_that_it_does_not_round_to_and_of_no_other(dtype):
    weights = every(torch.bfloat16).to(dtype)
    masters = torch.where(torch.arange(2**16) % 2 == 0, weights.float() * (1 + 2**-12), 1.0)
    before, same = masters.clone(), bits(masters.to(dtype)) == bits(weights)
    step(masters, weights=weights)
    assert torch.equal(bits(masters), bits(torch.where(same, before, weights.float())))
    masters, zeros = torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, -0.0], dtype=dtype)
    step(masters, weights=zeros)
    assert masters.signbit().tolist() == [False, True, False, True]


@pytest.mark.parametrize("value", [1e-30, 1e-10, 1.0, 1e10, 1e30, torch.inf, torch.nan])
def test_a_square_of_numbers_of_any_size_is_that_of_fp64(value):
    numbers = torch.full((5000,), value)
    numbers[1030:] = 0.0  # one block and a part of the next
    expected = numbers.double().square().sum().item()
    assert native.square([numbers], (), torch.float32) == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit_and_rows_have_the_square_of_their_sum(dtype):
    rows, total, found = [real_numbers((50_007,), "row", rank).to(dtype) for rank in range(3)], torch.empty(50_007), []
    for number in (1, 2, 3):
        with of_threads(number):
            native.add(rows, total, 0.3, False)
            total.mul_(0.7)
            squares = [native.square([total], (), torch.float32), native.square(rows, (0.3, 0.7), torch.float32)]
            masters, *moments = (real_numbers((50_007,), name) for name in ("masters", "mean", "square"))
            moments[1].square_()
            rounded = torch.empty(50_007, dtype=torch.bfloat16)
            numbers = (0.999, 0.1, 0.99, 0.01, -1e-3, 3.0, 1e-8)
            native.step_adam(numbers, False, rows, (0.3, 0.7), masters, moments, None, rounded)
            found.append((squares, total.clone(), masters, *moments, rounded))
    assert len({square for squares, *_ in found for square in squares}) == 1
    for other in found[1:]:
        assert all(map(torch.equal, found[0][1:], other[1:]))


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_sum_is_added_or_takes_the_place_of_what_was_there_also_where_that_is_a_row(factor):
    rows = [real_numbers((3000,), "row", rank) for rank in range(2)]
    expected = (rows[0] + rows[1]) * factor
    target = torch.ones(3000)
    native.add(rows, target, factor, True)
    assert torch.equal(target, 1.0 + expected)
    native.add(rows, rows[0], factor, False)
    assert torch.equal(rows[0], expected)


@pytest.mark.parametrize("row", [torch.ones(4, 4)[:, 0], torch.ones(3), torch.ones(4, device="meta")], ids=str)
def test_what_is_no_line_of_so_many_elements_of_the_host_is_refused(row):
    with pytest.raises(ValueError, match="Pass as many contiguous elements"):
        native.add([torch.ones(4), row], torch.zeros(4), 1.0, False)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.99), (0.4, 0.3), (0.5, 0.9)])
def test_a_mean_that_counts_little_leaves_little_of_itself(betas):
    """As in torch, whatever it was before."""
    found = []
    for is_ours in (True, False):
        param = nn.Parameter(torch.ones(100))
        optimizer = torch.optim.AdamW([param], lr=0.1, betas=betas, fused=True)
        if is_ours:
            optimizer = zero.shard(nn.ParameterList([param]), optimizer, stage=2, kernels="compiled", group=solo())
        for factor in (1e4, 1e-4, -3e-6):
            (param * factor).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((param.detach().clone(), next(iter(optimizer.state.values()))["exp_avg"].clone()))
    (ours, our_mean), (theirs, their_mean) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(our_mean, their_mean, rtol=1e-5, atol=0.0)


PROGRAM = """
import os, torch
from zero.runtime.kernels import native
torch.set_num_threads(2)
masters, moments, rows = torch.ones(5000), [torch.zeros(5000), torch.zeros(5000)], [torch.arange(5000).bfloat16()]
try:
    native.step_adam((0.9, 0.1, 0.9, 0.1, -0.1, 2.0, 1e-8), True, rows, (0.3,), masters, moments, None, None)
    smallest = torch.tensor(1e-40) * 1.0  # which is 0 where that was turned off for the process
    print(masters.double().sum().item(), smallest.item(), os.listdir(os.environ["TMPDIR"]))
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def as_usual(tmp_path_factory):
    """What the program prints with the system's compiler."""
    environment = {**os.environ, "CXX": "", "TMPDIR": str(tmp_path_factory.mktemp("scratch"))}
    return programs.with_torch(PROGRAM, environment).stdout


INEXACT = "-ffast-math -funsafe-math-optimizations -Ofast"


@pytest.mark.full
@pytest.mark.parametrize("unknown", [(), ("-fopenmp",), ("-march=native",), ("-fopenmp", "-march=native")], ids=str)
@pytest.mark.parametrize("also", ["", INEXACT])
def test_a_compiler_that_does_not_know_an_option_builds_without_and_leaves_nothing(tmp_path, as_usual, unknown, also):
    """The same numbers too, and however inexact it is told to compute."""
    refuses = "\n".join(f'case " $* " in *" {option} "*) echo "unknown option" >&2; exit 1;; esac' for option in unknown)
    wrapper, scratch = tmp_path / "compiler", tmp_path / "scratch"
    scratch.mkdir()
    wrapper.write_text(f'#!/bin/sh\n{refuses}\nexec c++ {also} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CXX": str(wrapper), "TMPDIR": str(scratch)}
    found = programs.with_torch(PROGRAM, environment)
    assert found.stdout == as_usual and found.stdout.endswith("[]\n"), found.stdout + found.stderr


SAYS = {
    "of what all it is asked for": ('echo "no licence today" >&2; exit 3', "no licence today"),
    "where it is asked for least": (
        'case " $* " in *" -fopenmp "*) echo "no OpenMP";; *) echo "no cmath";; esac >&2; exit 1',
        "no cmath",
    ),
    "that all is well, and makes nothing": ("exit 0", "cannot open shared object file"),
}


@pytest.mark.parametrize("what", [next(iter(SAYS)), *(pytest.param(what, marks=pytest.mark.full) for what in list(SAYS)[1:])])
def test_what_a_compiler_says_is_told(tmp_path, what):
    wrapper, (script, words) = tmp_path / "compiler", SAYS[what]
    wrapper.write_text(f"#!/bin/sh\n{script}\n")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    assert words in said({"CXX": str(wrapper)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"CXX": "", "PATH": "/nowhere"}, "No such file or directory: 'c++'"),
        pytest.param({"CXX": "c++ 'x"}, "No closing quotation", marks=pytest.mark.full),
        pytest.param(
            {"TMPDIR": "/nowhere", "TMP": "/nowhere", "TEMP": "/nowhere", "CXX": "false"}, "false ended with status 1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_without_a_compiler_it_is_told_why(given, words):
    assert words in said(given)


def said(given):
    found = programs.with_torch(PROGRAM, {**os.environ, **given})
    return found.stdout + found.stderr


@pytest.mark.full
def test_what_is_built_but_cannot_be_loaded_is_built_with_less(tmp_path):
    """As by a compiler whose OpenMP is not there."""
    wrapper = tmp_path / "compiler"
    broken = 'for option; do target="$option"; done; echo "no library" > "$target"'
    wrapper.write_text(f'#!/bin/sh\ncase " $* " in *" -fopenmp "*) {broken};; *) exec c++ "$@";; esac\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    assert said({"CXX": str(wrapper), "TMPDIR": str(tmp_path)}).endswith("['compiler']\n")


def cut_short(kept):
    whole = kept.read_bytes()
    kept.unlink()  # it is loaded: nobody may write to that file itself
    kept.write_bytes(whole[:100])
    kept.chmod(0o600)


HARMS = {
    "none": lambda kept: None,
    "cut short": cut_short,
    "written by others": lambda kept: kept.chmod(0o666),
    "gone": lambda kept: kept.unlink(),
}


def test_what_was_built_is_found_again_unless_it_is_harmed_or_another_is_asked_for(tmp_path, monkeypatch):
    """By a compiler that copies what the real one built."""
    built, wrapper, number = tmp_path / "built.so", tmp_path / "compiler", tmp_path / "number"
    native._built(["c++"], tmp_path)[1].rename(built)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def compiler(version):
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo {version}; exit;; esac\necho . >> {number}\n'
            f'for option; do target="$option"; done; cp {built} "$target"\n'
        )
        wrapper.chmod(0o755)

    def builds():
        """Runs in a process of its own, as a library that was loaded from a place is not looked for there again."""
        number.write_text("")
        child = os.fork()
        if child == 0:
            try:
                os._exit(native.passes.__wrapped__().zero_num_blocks(1) != 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        return number.read_text().count(".")

    compiler("one")
    assert builds() == 1
    for harm, do in HARMS.items():
        [kept] = (tmp_path / "cache").rglob("*.so")
        do(kept)
        assert (builds(), builds()) == (0 if harm == "none" else 1, 0), harm
        assert kept.stat().st_mode & 0o777 == 0o600, harm
    compiler("two")
    assert (builds(), builds()) == (1, 0) and len(list((tmp_path / "cache").rglob("*.so"))) == 2
    (tmp_path / "cache" / "zero-accelerators").chmod(0o777)
    assert (builds(), builds()) == (1, 1), "others could put theirs there"
