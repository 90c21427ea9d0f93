"""A run's folder as a user of the command line has it: killed, resumed, made again."""

import json
import os
import shlex
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envfleet.learn.train import PPO_KIND
from envfleet.runs.checkpoint import load
from envfleet.runs.record import write_report
from tests.e2e.test_train import SMALL, command, run

pytestmark = pytest.mark.timeout(500)
"""Several programs may be started by a test, each with a limit of its own."""


def weights(folder):
    policy = load(folder / "latest.pt")["job"]["policy"]
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
    running.wait(60)
    assert not (folder / "report.html").exists()
    assert 'class="state unfinished"' in write_report(folder, PPO_KIND).read_text()
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


EXACT = [
    *["--n-envs", "4", "--n-steps", "16", "--batch-size", "32", "--n-epochs", "4"],
    *["--hidden", "8", "--memory", "lstm", "--memory-size", "8", "--normalise-obs"],
    *["--normalise-rewards", "--num-episodes", "100", "--save-every", str(64 * 45)],
    *["--eval-every", "0", "--eval-episodes", "1", "--no-tensorboard"],
]


def bits(state):
    """All that is in a state, so that two can be compared to the last bit."""
    if isinstance(state, dict):
        return {name: bits(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    if isinstance(state, np.ndarray):
        return str(state.dtype), state.shape, state.tobytes()
    return state


def learned(folder):
    """Everything that is kept but the environments."""
    trainer = load(folder / "latest.pt")["job"]
    trainer.pop("slots")
    return bits(trainer)


def wait_for_iteration(number, folder, running):
    limit_s = time.monotonic() + 60
    noted = folder / "metrics.jsonl"
    while not noted.exists() or noted.read_text().count("approx_kl") < number:
        assert running.poll() is None
        assert time.monotonic() < limit_s
        time.sleep(0.002)


@pytest.mark.parametrize(
    "where",
    [
        ["--env", "CartPole-v1", "--backend", "process", "--num-workers", "2"],
        ["--env", "Acrobot-v1", "--backend", "serial"],
    ],
    ids=["cartpole-workers", "acrobot-serial"],
)
def test_a_run_ended_by_kill_9_between_checkpoints_learns_the_same_to_the_last_bit(where, tmp_path):
    words, folder = [*where, *EXACT], tmp_path / "parts"
    run("train", *words, "--checkpoint-dir", "whole", folder=tmp_path)
    running = subprocess.Popen(
        command("train", *words, "--checkpoint-dir", "parts"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for_iteration(50, folder, running)
    finally:
        running.kill()
        running.wait(60)
    assert 45 <= load(folder / "latest.pt")["iteration"] < len(lines(folder)) < 100
    assert learned(folder) != learned(tmp_path / "whole")

    run("train", "--resume", "parts", folder=tmp_path)

    assert load(folder / "latest.pt")["iteration"] == 100
    found, expected = learned(folder), learned(tmp_path / "whole")
    assert None not in (*found["normalisers"], found["collector"]["scaler"])
    for name in expected:
        assert found[name] == expected[name], name


def test_words_of_the_folder_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("train", *SMALL, "--checkpoint-dir", "file", folder=tmp_path, code=1)
    assert "file cannot be written to" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
