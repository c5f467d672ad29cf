"""promises.txt is complete and true: every promise stands in it once, and what it quotes is in the test that it names."""

import subprocess
import sys

import pytest

from tests.promise_list import IDS, ROOT, marked_ids, parsed, read_promises, read_test

PROMISES = {promise.id: promise for promise in read_promises()}
PROVEN = [promise for promise in PROMISES.values() if promise.proven]


def test_there_are_210_promises():
    assert len(IDS) == len(set(IDS)) == 210


def test_every_promise_stands_in_the_file_exactly_once():
    listed = [promise.id for promise in read_promises()]
    assert sorted(listed) == sorted(IDS)


def test_what_is_not_proven_yet_gives_one_sentence_of_reason():
    for promise in PROMISES.values():
        if not promise.proven:
            assert len(promise.quote.split()) >= 4, f"{promise.id} says only {promise.quote!r}"


def what_is_wrong_with(promise):
    try:
        source = read_test(promise.node)
    except LookupError as error:
        return str(error)
    if promise.id not in source.ids:
        return f"{promise.node} is not marked with {promise.id}"
    if promise.quote not in source.lines:
        return f"{promise.node} has no line {promise.quote!r}"
    if not promise.quote.startswith(("assert", "with pytest.raises", "with raises")):
        return f"{promise.quote!r} is no assertion"
    return None


def test_a_proven_promise_names_a_test_with_its_mark_and_a_line_of_it():
    wrong = {promise.id: problem for promise in PROVEN if (problem := what_is_wrong_with(promise))}
    assert not wrong, "\n".join(f"{id_}: {problem}" for id_, problem in wrong.items())


def test_every_mark_names_a_known_promise():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != ROOT / "tests" / "test_promises.py":
            assert marked_ids(parsed(path)[0]) <= set(IDS), f"{path.relative_to(ROOT)} is marked with an id that does not exist"


def test_a_line_that_is_no_promise_is_an_error(tmp_path):
    file = tmp_path / "promises.txt"
    file.write_text("# a comment\n\nR01 | not yet | a | b\nR02 | not yet\n")
    with pytest.raises(ValueError, match=r"promises.txt:4"):
        read_promises(file)
    file.write_text("R01 | not yet | a | b\n")
    assert read_promises(file)[0].quote == "a | b"


SAMPLE = '''
import pytest

def measure():
    assert 1 + 1 == 2

@pytest.mark.promise("R01", "R02")
@pytest.mark.promise("R03")
@pytest.mark.parametrize("n", [1, 2])
def test_plain(n):
    measure()
    if n == 2:
        pytest.skip("only one")

class Contract:
    def test_inherited(self):
        assert True

@pytest.mark.promise("G01")
class TestOne(Contract):
    pass

@pytest.mark.promise("G02")
def test_that_fails():
    assert False

@pytest.mark.promise("G03")
def test_that_is_skipped():
    pytest.skip("for no reason")
'''


@pytest.fixture
def sample(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.promise_list.ROOT", tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    return tmp_path


def test_marks_of_the_test_and_its_class_count_and_lines_of_what_it_uses(sample):
    plain = read_test("test_sample.py::test_plain")
    assert plain.ids == {"R01", "R02", "R03"}
    assert "assert 1 + 1 == 2" in plain.lines
    assert "assert False" not in plain.lines
    assert read_test("test_sample.py::TestOne::test_inherited").ids == {"G01"}


@pytest.mark.parametrize(
    "node", ["no.py::test", "test_sample.py::test_gone", "test_sample.py::TestOne::test_gone", "test_sample.py::measure"]
)
def test_a_test_that_does_not_exist_is_named(sample, node):
    with pytest.raises(LookupError, match=node.split("::")[-1]):
        read_test(node)


def run_pytest(folder, *args):
    # A plain pytest run of its own, with nothing of this project but the plug-in.
    plugins = ["-p", "tests.promises_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *args, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_report_sorts_promises_by_what_their_tests_did(sample):
    report = run_pytest(sample, "--promises", "--rootdir", str(sample), "-c", "/dev/null").stdout
    lines = [line.strip() for line in report.splitlines()]
    assert lines[lines.index("4 of 210 have a passing test") + 1] == "R01 R02 R03 G01"
    assert lines[lines.index("1 of 210 have a failing test") + 1] == "G02"
    assert lines[lines.index("1 of 210 have only skipped tests") + 1] == "G03"
    assert "204 of 210 have no test in this run" in lines


def test_an_unknown_id_stops_the_run(tmp_path):
    (tmp_path / "test_wrong.py").write_text('import pytest\n@pytest.mark.promise("Z99")\ndef test_it(): pass\n')
    result = run_pytest(tmp_path, "--rootdir", str(tmp_path), "-c", "/dev/null")
    assert result.returncode != 0
    assert "Z99" in result.stderr + result.stdout
