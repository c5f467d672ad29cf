"""promises.txt is complete: every promise stands in it once, and the test that it names has its mark and asserts something."""


import pytest

from tests import programs
from tests.promise_list import IDS, ROOT, marked_ids, parsed, read_promises, read_test

PROMISES = {promise.id: promise for promise in read_promises()}
NUMBER = 275  # say here how many there are now, so that none gets lost
PROVEN = [promise for promise in PROMISES.values() if promise.node]


@pytest.fixture(scope="module", autouse=True)
def sources_for_a_while(without_collector):
    yield
    parsed.cache_clear()


def test_there_are_so_many_promises():
    assert len(IDS) == len(set(IDS)) == NUMBER


def test_every_promise_stands_in_the_file_exactly_once():
    listed = [promise.id for promise in read_promises()]
    assert sorted(listed) == sorted(IDS)


def test_what_is_not_proven_yet_gives_one_sentence_of_reason():
    for promise in PROMISES.values():
        if not promise.node:
            assert len(promise.reason.split()) >= 4, f"{promise.id} says only {promise.reason!r}"


def what_is_wrong_with(promise):
    try:
        source = read_test(promise.node)
    except LookupError as error:
        return str(error)
    if promise.id not in source.ids:
        return f"{promise.node} is not marked with {promise.id}"
    if not source.asserts:
        return f"{promise.node} asserts nothing"
    if not source.by_day:
        return f"{promise.node} runs at night only"
    return None


def test_a_proven_promise_names_a_test_with_its_mark_that_asserts_something_and_runs_by_day():
    wrong = {promise.id: problem for promise in PROVEN if (problem := what_is_wrong_with(promise))}
    assert not wrong, "\n".join(f"{id_}: {problem}" for id_, problem in wrong.items())


def test_every_mark_names_a_known_promise():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != ROOT / "tests" / "test_promises.py":
            assert marked_ids(parsed(path)) <= set(IDS), f"{path.relative_to(ROOT)} is marked with an id that does not exist"


def test_a_line_that_is_no_promise_is_an_error(tmp_path):
    file = tmp_path / "promises.txt"
    for line in ("R02 | not yet", "R02", "R02 | tests/test_it.py::test | assert True", " | not yet | a"):
        file.write_text(f"# a comment\n\nR01 | not yet | a\n{line}\n")
        with pytest.raises(ValueError, match=r"promises.txt:4"):
            read_promises(file)


SAMPLE = '''
import pytest

def measure():
    with pytest.raises(ZeroDivisionError):
        1 / 0

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

@pytest.mark.full
def test_at_night():
    assert True

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full)])
def test_at_night_with_more(n):
    assert n
'''


@pytest.fixture
def sample(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.promise_list.ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    return tmp_path


def test_marks_and_assertions_count_wherever_the_test_has_them_from(sample):
    assert read_test("tests/test_sample.py::test_plain").ids == {"R01", "R02", "R03"}
    assert read_test("tests/test_sample.py::TestOne::test_inherited").ids == {"G01"}
    for name in ("test_plain", "TestOne::test_inherited", "test_that_fails"):
        assert read_test(f"tests/test_sample.py::{name}").asserts
    (sample / "tests" / "helper.py").write_text("def checked():\n    assert 1 + 1 == 2\n")
    (sample / "tests" / "test_asking.py").write_text("from tests.helper import checked\ndef test_asking():\n    checked()\n")
    assert read_test("tests/test_asking.py::test_asking").asserts
    assert not read_test("tests/test_sample.py::test_that_is_skipped").asserts


def test_a_test_of_the_night_is_told_from_one_that_does_more_there(sample):
    assert not read_test("tests/test_sample.py::test_at_night").by_day
    assert read_test("tests/test_sample.py::test_at_night_with_more").by_day
    (sample / "tests" / "test_all.py").write_text("import pytest\npytestmark = pytest.mark.full\ndef test_it(): assert 1\n")
    assert not read_test("tests/test_all.py::test_it").by_day


@pytest.mark.parametrize(
    "node", ["no.py::test", *(f"tests/test_sample.py::{name}" for name in ("test_gone", "TestOne::test_gone", "measure"))]
)
def test_a_test_that_does_not_exist_is_named(sample, node):
    with pytest.raises(LookupError, match=node.split("::")[-1]):
        read_test(node)


def run_pytest(folder, *args):
    # A plain pytest run of its own, with nothing of this project but the plug-in.
    plugins = ["-p", "tests.promises_plugin", "-p", "no:cacheprovider"]
    return programs.python("-m", "pytest", "-q", *plugins, *args, folder, cwd=ROOT)


def test_the_report_sorts_promises_by_what_their_tests_did(sample):
    report = run_pytest(sample, "--promises", "--rootdir", str(sample), "-c", "/dev/null").stdout
    lines = [line.strip() for line in report.splitlines()]
    assert lines[lines.index(f"4 of {NUMBER} have a passing test") + 1] == "R01 R02 R03 G01"
    assert lines[lines.index(f"1 of {NUMBER} have a failing test") + 1] == "G02"
    assert lines[lines.index(f"1 of {NUMBER} have only skipped tests") + 1] == "G03"
    assert f"{NUMBER - 6} of {NUMBER} have no test in this run" in lines


def test_an_unknown_id_stops_the_run(tmp_path):
    (tmp_path / "test_wrong.py").write_text('import pytest\n@pytest.mark.promise("Z99")\ndef test_it(): pass\n')
    result = run_pytest(tmp_path, "--rootdir", str(tmp_path), "-c", "/dev/null")
    assert result.returncode != 0
    assert "Z99" in result.stderr + result.stdout
