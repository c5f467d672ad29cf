"""Faults of the kinds that checkpoints are known for; each is found by the test that its reason names."""

from __future__ import annotations

from tests.mutant_list import Mutant

K = "zero/checkpoint/"

CHECKPOINTS = [
    Mutant(
        "a file is not synced",
        K + "disk.py",
        "        os.fsync(descriptor)\n    finally:\n        os.close(descriptor)\n    return total",
        "    finally:\n        os.close(descriptor)\n    return total",
    ),
    Mutant(
        "what was renamed is not synced",
        K + "disk.py",
        "    os.rename(source, target)\n    sync_folder(target.parent)\n",
        "    os.rename(source, target)\n",
    ),
    Mutant(
        "the new pointer is not synced",
        K + "disk.py",
        "        os.replace(beside, path)\n    sync_folder(path.parent)\n",
        "        os.replace(beside, path)\n",
    ),
    Mutant("names of new files are not synced", K + "folder.py", "        disk.sync_folder(written)\n", ""),
    Mutant(
        "the pointer goes before the checkpoint",
        K + "folder.py",
        "            disk.rename(written, target)\n            if is_latest:\n"
        '                disk.replace(self.path / LATEST, f"{tag}\\n")\n',
        "            if is_latest:\n"
        '                disk.replace(self.path / LATEST, f"{tag}\\n")\n            disk.rename(written, target)\n',
    ),
    Mutant(
        "the one of the same tag goes before the new one is there",
        K + "folder.py",
        "            os.rename(target, replaced)\n        try:",
        "            os.rename(target, replaced)\n            shutil.rmtree(replaced)\n        try:",
    ),
    Mutant(
        "the pointer moves to what is not to be the latest",
        K + "folder.py",
        "            if is_latest:\n",
        "            if True:\n",
    ),
    Mutant(
        "a commit that fails takes nothing back",
        K + "folder.py",
        "                os.rename(replaced, target)\n",
        "                pass\n",
    ),
    Mutant(
        "who was stopped between two renames loses the one before",
        K + "folder.py",
        "                disk.rename(path, self.path / hidden[\"tag\"])  # stopped",
        "                shutil.rmtree(path)  # stopped",
    ),
    Mutant(
        "what others left stays",
        K + "folder.py",
        "            else:\n                shutil.rmtree(path)\n",
        "",
    ),
    Mutant(
        "another save's folder goes while it is written",
        K + "folder.py",
        "if hidden is None or path in _being_written:",
        "if hidden is None:",
    ),
    Mutant(
        "anything of that name is replaced",
        K + "folder.py",
        "target.exists() and _number(target) is None",
        "target.is_file()",
    ),
    Mutant("pruning keeps one more", K + "folder.py", "len(tags) - keep)", "len(tags) - keep - 1)"),
    Mutant(
        "pruning takes what the pointer names",
        K + "folder.py",
        "            if tag != latest:\n",
        "            if True:\n",
    ),
    Mutant("all checkpoints have one number", K + "folder.py", "default=0) + 1)", "default=0))"),
    Mutant(
        "old ones go before the new one is complete",
        K + "writing.py",
        "        self.folder.commit(self.place, self.tag, manifest, plan.is_latest)\n"
        "        if plan.keep_last is not None:\n            self.folder.prune(plan.keep_last)\n",
        "        if plan.keep_last is not None:\n            self.folder.prune(plan.keep_last)\n"
        "        self.folder.commit(self.place, self.tag, manifest, plan.is_latest)\n",
    ),
    Mutant(
        "hashes are not compared",
        K + "folder.py",
        "disk.checksum_of(path, read) != told.checksum",
        "not disk.checksum_of(path, read)",
    ),
    Mutant(
        "sizes are not compared",
        K + "folder.py",
        "        wrong = None if found == told.num_bytes else",
        "        wrong = None if found else",
    ),
    Mutant(
        "the manifest's own hash is not compared",
        "zero/plan/manifest.py",
        "if body.pop(\"sha256\", None) != _hash_of(body):",
        "if body.pop(\"sha256\", None) is None:",
    ),
    Mutant(
        "any version is read",
        "zero/plan/manifest.py",
        "if body.get(\"version\") != VERSION:",
        "if body.get(\"version\") is None:",
    ),
    Mutant(
        "stretches may leave gaps",
        "zero/plan/manifest.py",
        "if stretch.start != at or stretch.stop < at:",
        "if stretch.stop < at:",
    ),
    Mutant(
        "files of elsewhere are read",
        "zero/plan/manifest.py",
        "if \"/\" in file.name or \"\\\\\" in file.name]",
        "if file.name == \"\"]",
    ),
    Mutant(
        "everything is changed and verified after",
        "zero/loading.py",
        "    agreed(group, \"A load\", lambda: _verify(found, manifest, group.rank, group.size))\n",
        "",
    ),
    Mutant(
        "each rank verifies for itself",
        "zero/loading.py",
        "    agreed(group, \"A load\", lambda: _verify(found, manifest, group.rank, group.size))\n",
        "    _verify(found, manifest, group.rank, group.size)\n",
    ),
    Mutant(
        "shapes are not compared",
        "zero/loading.py",
        "if its is not None and its.shape != mine:",
        "if its is not None and its.shape is None:",
    ),
    Mutant(
        "a schedule that refuses keeps half of it",
        "zero/loading.py",
        "                schedule.load_state_dict(before)\n",
        "                pass\n",
    ),
    Mutant("weights are filled and not published", "zero/loading.py", "        loading.publish()\n", ""),
    Mutant("counters stay", "zero/loading.py", "    parts.window.settler.step = training[\"step\"]\n", ""),
    Mutant(
        "skipped steps stay",
        "zero/loading.py",
        "    optimizer.skipped_steps = training[\"skipped_steps\"]\n",
        "",
    ),
    Mutant("random numbers stay", "zero/loading.py", "    if num_ranks == group.size:\n", "    if num_ranks < 0:\n"),
    Mutant(
        "settings of groups stay",
        "zero/loading.py",
        "            take_settings(about.optimizer.inner, self.training[\"groups\"])\n",
        "            pass\n",
    ),
    Mutant(
        "whether it comes back as it was is not asked",
        "zero/saving.py",
        "        if wrong is not None:\n            raise ValueError(f\"A checkpoint",
        "        if wrong == \"\":\n            raise ValueError(f\"A checkpoint",
    ),
    Mutant(
        "every save makes a copy of everything",
        "zero/saving.py",
        "return cargo.copied() if copied else cargo",
        "return cargo.copied()",
    ),
    Mutant(
        "a save in the background writes what is there by then",
        "zero/saving.py",
        "return cargo.copied() if copied else cargo",
        "return cargo",
    ),
    Mutant(
        "a save in the middle of a window",
        "zero/saving.py",
        "        if pending or (self.engine is not None and self.engine.in_window):\n",
        "        if False:\n",
    ),
    Mutant(
        "what all ranks have is written by all of them",
        "zero/saving.py",
        "    return shared or piece.bucket % parts.group.size == parts.group.rank",
        "    return True",
    ),
    Mutant(
        "a writer that fails in the background keeps it to itself",
        K + "writing.py",
        "            self._error = error\n",
        "            pass\n",
    ),
    Mutant(
        "a writer that fails is told once",
        K + "writing.py",
        "        if self._failure is not None:\n            raise self._failure\n        if self.told:",
        "        if self.told:",
    ),
    Mutant(
        "a tuple comes back as a list",
        K + "typed.py",
        "return items if kind is list else",
        "return items if kind in (list, tuple) else",
    ),
    Mutant(
        "keys become texts",
        K + "typed.py",
        "if kind is dict and all(type(key) is str for key in value) and _keeps(value):",
        "if kind is dict:",
    ),
    Mutant(
        "what wants a gradient comes back without",
        K + "typed.py",
        "if value.requires_grad else coded",
        "if False else coded",
    ),
    Mutant(
        "ties are forgotten in an export",
        K + "exporting.py",
        "    found.update({alias: found[name] for alias",
        "    found.update({alias: found[name].clone() for alias",
    ),
    Mutant(
        "what is exported is not verified",
        K + "exporting.py",
        "            check_file(folder, manifest, number, bar.advance)\n",
        "            bar.advance(0)\n",
    ),
    Mutant("bars on all ranks", K + "writing.py", "cargo.num_bytes, self.rank == 0)", "cargo.num_bytes, True)"),
    Mutant(
        "bars where nobody looks",
        K + "bar.py",
        "self._wanted = wanted and sys.stderr.isatty()",
        "self._wanted = wanted",
    ),
    Mutant(
        "bars at once",
        K + "bar.py",
        "time.monotonic() - self._begun > _AFTER_S",
        "time.monotonic() - self._begun >= 0.0",
    ),
]
