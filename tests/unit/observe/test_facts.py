"""Facts about versions, machine and working directory, found quickly or left out."""

import json
import os
import platform
import subprocess
import time

import gymnasium

import envfleet
from envfleet.observe import facts


def git(folder, *words):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def repository(folder):
    git(folder, "init", "-q")
    (folder / "code.py").write_text("one")
    git(folder, "add", "code.py")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_clean_commit_a_changed_file_and_one_that_is_not_tracked(tmp_path):
    repository(tmp_path)
    clean = facts.git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["is_dirty"] is False
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").write_text("")
    assert facts.git_state(tmp_path) == clean
    (tmp_path / "code.py").write_text("two")
    assert facts.git_state(tmp_path) == {"commit": clean["commit"], "is_dirty": True}


def test_no_repository_no_commit_and_no_git_have_no_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert facts.git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert facts.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.git_state(tmp_path) is None


def test_a_git_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    begun_s = time.monotonic()
    assert facts.git_state(tmp_path, timeout_s=0.2) is None
    assert time.monotonic() - begun_s < 50


def test_all_facts_are_json(tmp_path, monkeypatch):
    repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = json.loads(json.dumps(facts.collect(["envfleet", "gymnasium", "no-such-package"])))
    assert found["versions"] == {
        "python": platform.python_version(),
        "envfleet": envfleet.__version__,
        "gymnasium": gymnasium.__version__,
    }
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["machine"]["cpu"]
    assert found["git"]["is_dirty"] is False
    assert found["started"].endswith("+00:00")


def test_the_machine_s_name_is_not_told():
    assert platform.node() not in facts.machine().values()
