"""Tests of the tests are left out only where git says that nothing of theirs changed."""

import shutil
import subprocess

import pytest

from tests import changes
from tests.changes import ROOT, changed_files, imported

pytestmark = [
    pytest.mark.of_tests,
    pytest.mark.skipif(shutil.which("git") is None, reason="there is no git, so every file counts as changed"),
]


@pytest.fixture
def repository(tmp_path):
    """A main branch with two commits, the second of which brought `second.py`."""
    changed_files.cache_clear()
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "first.py")
    commit(tmp_path, "second.py")
    yield tmp_path.resolve()
    changed_files.cache_clear()


def git(folder, *command):
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True, timeout=60)


def commit(folder, name, text="text"):
    (folder / name).write_text(text)
    git(folder, "add", name)
    git(folder, "commit", "--quiet", "--message", name)


def test_on_the_main_branch_the_last_commit_changed_something(repository):
    assert changed_files(repository) == {"second.py"}


def test_on_a_branch_all_its_commits_did(repository):
    git(repository, "switch", "--quiet", "--create", "branch")
    commit(repository, "third.py")
    commit(repository, "fourth.py")
    assert changed_files(repository) == {"third.py", "fourth.py"}


def test_a_merge_changed_what_its_branch_did(repository):
    git(repository, "switch", "--quiet", "--create", "branch")
    commit(repository, "third.py")
    commit(repository, "fourth.py")
    git(repository, "switch", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "branch")
    assert changed_files(repository) == {"third.py", "fourth.py"}


def test_on_the_main_branch_so_did_what_the_remote_does_not_have_yet(repository):
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD^")
    commit(repository, "third.py")
    assert changed_files(repository) == {"second.py", "third.py"}


def test_what_is_not_committed_or_unknown_or_gone_or_renamed_changed(repository):
    (repository / "first.py").write_text("another text")
    (repository / "new.py").write_text("text")
    git(repository, "mv", "second.py", "renamed.py")
    git(repository, "commit", "--quiet", "--message", "renamed")
    assert changed_files(repository) == {"first.py", "new.py", "second.py", "renamed.py"}


def test_where_git_cannot_tell_everything_counts_as_changed(repository, tmp_path):
    (repository / "inside").mkdir()
    assert changed_files(repository / "inside") is None
    git(repository, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    assert changed_files(repository / "shallow") is None


def test_a_file_is_concerned_by_what_it_imports_whatever_the_way(monkeypatch):
    zoo, edits = ROOT / "tests" / "test_zoo.py", ROOT / "tests" / "test_source_edits.py"
    read = ("test_zoo.py", "oracle.py", "traces.py", "__init__.py", "zoo/__init__.py", "zoo/case.py", "zoo/shapes.py")
    assert {ROOT / "tests" / name for name in read} <= imported(zoo)
    for changed, concerned in (
        ({"tests/zoo/shapes.py"}, {zoo}),
        ({"tests/test_zoo.py"}, {zoo}),
        ({"zero/sharding/update.py", "README.md"}, {edits}),
        ({"tests/source_edits.py"}, {edits}),
        ({"tests/test_parity.py", "docs/train.md"}, set()),
        (None, {zoo, edits}),
    ):
        monkeypatch.setattr(changes, "changed_files", lambda changed=changed: changed)
        assert {path for path in (zoo, edits) if changes.concern(path)} == concerned
