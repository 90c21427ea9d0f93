"""Asking the machine works here, is bounded, and leaves no process behind."""

import sys
import time
from pathlib import Path

import pytest

from envfleet.cli import doctor_probe
from envfleet.cli.report import Finding


@pytest.mark.parametrize(("name", "check"), doctor_probe.CHECKS)
def test_every_check_finds_something(name, check):
    found = check()

    assert isinstance(found, Finding)
    assert found.name == name
    assert found.level in ("ok", "warn", "bad")
    assert "could not be measured" not in found.text
    assert "does not work" not in found.text


def test_a_trial_that_hangs_is_ended_with_its_children(monkeypatch, tmp_path):
    package = tmp_path / "envfleet" / "cli"
    package.mkdir(parents=True)
    for folder in (package.parent, package):  # else the installed package goes before it
        (folder / "__init__.py").touch()
    (package / "doctor_probe_child.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(doctor_probe, "_TRIAL_S", 0.5)
    start_s = time.monotonic()

    result, error = doctor_probe.trial("start", "spawn")

    assert result is None
    assert error == "no answer in 0.5 s"
    assert time.monotonic() - start_s < 50


def test_a_trial_that_fails_says_why():
    result, error = doctor_probe.trial("start", "no-such-method")

    assert result is None
    assert "no-such-method" in (error or "")


def test_numbers_of_the_kernel(tmp_path):
    (tmp_path / "pids.max").write_text("max\n")
    (tmp_path / "pids.current").write_text("12\n")

    assert doctor_probe.read_number(tmp_path / "pids.max") is None
    assert doctor_probe.read_number(tmp_path / "pids.current") == 12
    assert doctor_probe.read_number(Path("/no/such/file")) is None


def test_what_the_kernel_refuses_does_not_work():
    def refused():
        raise PermissionError

    def missing():
        raise AttributeError

    assert not doctor_probe.works(refused)
    assert not doctor_probe.works(missing)
    assert doctor_probe.works(lambda: None)
