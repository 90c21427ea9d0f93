"""A run's folder as a user of the command line has it: killed, resumed, made again."""

import json
import os
import shlex
import signal
import subprocess
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envfleet.learn.checkpoint import load
from envfleet.learn.run_folder import write_report
from tests.e2e.test_train import SMALL, command, run

pytestmark = pytest.mark.timeout(500)
"""Several programs may be started by a test, each with a limit of its own."""


def weights(folder):
    policy = load(folder / "latest.pt")["trainer"]["policy"]
    return {name: value.numpy().tobytes() for name, value in policy.items()}


def about(folder):
    return json.loads((folder / "run.json").read_text())


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_command_that_is_told_makes_the_same_run_again(tmp_path):
    more = ["--gae-lambda", "0.9", "--normalise-obs", "--num-episodes", "6", "--no-overlap"]
    more += ["--env-kwargs", '{"sutton_barto_reward": true}']
    run("train", *SMALL, *more, "--seed", "5", "--checkpoint-dir", "one", folder=tmp_path)
    told = shlex.split(about(tmp_path / "one")["command"])
    assert told[0] == "envfleet"
    run(*told[1:], "--checkpoint-dir", "other", folder=tmp_path)
    assert weights(tmp_path / "one") == weights(tmp_path / "other")
    one, other = (
        json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "other")
    )
    assert one["command"] == other["command"]
    assert (one["options"], one["ppo"]) == (other["options"], other["ppo"])


HOLDS = """
import time
from pathlib import Path

import gymnasium

class Holds(gymnasium.Wrapper):
    "Stands still half-way unless the file is there."

    steps = 0

    def step(self, action):
        self.steps += 1
        while self.steps > 1600 and not Path("may_go_on").exists():
            time.sleep(0.01)
        return super().step(action)

def make():
    return Holds(gymnasium.make("CartPole-v1"))
"""


def test_a_run_ended_by_kill_9_has_its_report_after_the_resume(tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "holds.py").write_text(HOLDS)
    long = [*SMALL, "--total-steps", "12800", "--save-every", "512", "--checkpoint-dir", "run"]
    long[long.index("CartPole-v1")] = "holds.py:make"
    running = subprocess.Popen(command("train", *long), cwd=tmp_path, stdout=subprocess.DEVNULL)
    limit_s = time.monotonic() + 60
    while not list(folder.glob("step_*.pt")):
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait(10)
    assert not (folder / "report.html").exists()
    assert 'class="state unfinished"' in write_report(folder).read_text()
    (tmp_path / "may_go_on").touch()
    run("train", "--resume", "run", folder=tmp_path)
    page = (folder / "report.html").read_text()
    assert 'class="state finished"' in page
    assert "The run went on from a checkpoint:" in page
    numbers = [line["iteration"] for line in lines(folder) if "approx_kl" in line]
    assert numbers == list(range(1, 101))
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    steps = [event.step for event in read.Scalars("train/value_loss")]
    assert steps == [128 * number for number in numbers]


def test_words_of_the_folder_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("train", *SMALL, "--checkpoint-dir", "file", folder=tmp_path, code=1)
    assert "file cannot be written to" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
