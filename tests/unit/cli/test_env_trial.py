"""Commands that run an environment in their own process try it in a worker first."""

import os
import signal
import time

import pytest

from envfleet.cli import env_trial
from envfleet.cli.app import run
from envfleet.testing import Counter


class Exits(Counter):
    def step(self, action):
        if self.t == 3:
            os._exit(4)
        return super().step(action)


class Crashes(Counter):
    def reset(self, **given):
        os.kill(os.getpid(), signal.SIGSEGV)


class NeverBuilt(Counter):
    def __init__(self):
        os._exit(5)


class OldGym(Counter):
    def reset(self):  # type: ignore[override]
        return 0


class NeverCloses(Counter):
    def close(self):
        time.sleep(3600)


@pytest.mark.parametrize(
    ("command", "env", "told"),
    [
        ("tune", "Exits", "ends its process in a reset or step (exit code 4)"),
        ("verify", "Exits", "ends its process in a reset or step (exit code 4)"),
        ("bench", "Exits", "ends its process in a reset or step (exit code 4)"),
        (
            "bench",
            "Crashes",
            "ends its process in a reset or step (segmentation fault in native code)",
        ),
        ("verify", "OldGym", "the old Gym API need a wrapper, such as shimmy's"),
        ("bench", "NeverBuilt", "ends its process in the constructor (exit code 5)"),
        ("bench", "NeverCloses", "does not return from close within 1 s"),
    ],
)
def test_an_environment_that_would_take_the_command_along_is_named(
    command, env, told, monkeypatch, capsys
):
    monkeypatch.setattr(env_trial, "_CLOSE_LIMIT_S", 1.0)
    assert run([command, f"{__name__}:{env}", "--plain"]) == 2
    assert told in capsys.readouterr().err
