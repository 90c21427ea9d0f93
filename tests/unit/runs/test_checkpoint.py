"""Checkpoints: whole or not there; a run that was killed goes on bit for bit."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from envfleet import errors
from envfleet.runs import checkpoint
from envfleet.runs.checkpoint import CheckpointFolder
from tests.unit.observe.small_disk import files_no_larger_than

STATE: dict[str, Any] = {"weights": torch.arange(5000.0), "number": 7}


def test_what_is_saved_is_loaded(tmp_path):
    checkpoint.save(tmp_path / "a.pt", STATE)
    found = checkpoint.load(tmp_path / "a.pt")
    assert torch.equal(found["weights"], STATE["weights"])
    assert found["number"] == 7
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_recognised(share, tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save(path, STATE)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(errors.CheckpointError, match=r"a\.pt is damaged or no checkpoint"):
        checkpoint.load(path)


def test_a_flipped_bit_is_recognised(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save(path, STATE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(errors.CheckpointError, match="is damaged"):
        checkpoint.load(path)


def test_somebody_else_s_file_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(errors.CheckpointError, match="not written by this version"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["latest.pt", "best.pt"])
def test_a_directory_in_the_way_is_found_before_anything_starts(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(errors.CheckpointError, match=rf"{name} is a directory, and a checkpoint"):
        CheckpointFolder(tmp_path).prepare()


class Renamed:
    """What an environment's class was called when a checkpoint was written."""


def test_a_class_that_is_gone_is_named(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a.pt", {"env": Renamed()})
    monkeypatch.delattr(sys.modules[__name__], "Renamed")
    with pytest.raises(errors.CheckpointError, match=r"cannot be imported here \(.*Renamed"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_folder_in_a_checkpoint_s_place_is_named(tmp_path):
    with pytest.raises(errors.CheckpointError, match="cannot be read: Is a directory"):
        checkpoint.load(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(errors.CheckpointError, match=r"a\.pt does not exist"):
        checkpoint.load(tmp_path / "a.pt")


class TestFolder:
    def test_it_keeps_the_last_few_the_newest_and_the_best(self, tmp_path):
        folder = CheckpointFolder(tmp_path / "run", keep=2)
        for steps in (100, 200, 300, 1000):
            folder.write(steps, {"steps": steps}, is_best=steps == 100)
        names = sorted(os.listdir(tmp_path / "run"))
        assert names == ["best.pt", "latest.pt", "step_000000000300.pt", "step_000000001000.pt"]
        assert folder.newest()["steps"] == 1000
        assert checkpoint.load(tmp_path / "run" / "best.pt")["steps"] == 100

    def test_a_damaged_newest_gives_way_to_the_one_before(self, tmp_path):
        folder = CheckpointFolder(tmp_path)
        folder.write(1, {"steps": 1})
        folder.write(2, {"steps": 2})
        (tmp_path / "latest.pt").write_bytes(b"junk")
        (tmp_path / "step_000000000002.pt").write_bytes(b"")
        with pytest.warns(RuntimeWarning, match=r"latest\.pt is damaged.* going on from step_0*1"):
            assert folder.newest()["steps"] == 1

    def test_what_a_kill_left_behind_is_swept_up(self, tmp_path):
        (tmp_path / ".step_000000000001.pt.4711").write_bytes(b"half a checkpoint")
        CheckpointFolder(tmp_path).prepare()
        assert os.listdir(tmp_path) == []

    def test_an_empty_folder_says_so(self, tmp_path):
        with pytest.raises(errors.CheckpointError, match="does not exist"):
            CheckpointFolder(tmp_path).newest()

    @pytest.mark.parametrize("place", ["file", "file/below"])
    def test_a_file_in_the_way_is_found_at_once(self, place, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(errors.CheckpointError, match=r"cannot be written to.* choose another"):
            CheckpointFolder(tmp_path / place).prepare()
        assert os.listdir(tmp_path) == ["file"]

    def test_a_folder_that_nobody_may_write_to_is_found_at_once(self):
        where = Path("/sys/envfleet")  # not even root may
        with pytest.raises(errors.CheckpointError, match="/sys/envfleet cannot be written to"):
            CheckpointFolder(where).prepare()

    def test_a_full_disk_is_found_at_once(self, tmp_path):
        full = pytest.raises(errors.CheckpointError, match="cannot be written to: File too large")
        with files_no_larger_than(1000), full:
            CheckpointFolder(tmp_path).prepare()
        assert os.listdir(tmp_path) == []

    def test_a_folder_that_can_be_written_to_is_left_as_it_was(self, tmp_path):
        CheckpointFolder(tmp_path / "a" / "b").prepare()
        assert list((tmp_path / "a" / "b").iterdir()) == []

    def test_room_for_all_that_will_be_kept_is_looked_for(self, tmp_path):
        said = r"free space, and the checkpoints.*need.*or, with envfleet train, keep fewer"
        with pytest.raises(errors.CheckpointError, match=said):
            CheckpointFolder(tmp_path, keep=10**12).rehearse(STATE)
        CheckpointFolder(tmp_path, keep=3).rehearse(STATE)
        assert os.listdir(tmp_path) == []

    def test_what_is_there_already_needs_no_more_room(self, tmp_path):
        folder = CheckpointFolder(tmp_path, keep=2)
        size = 10_000
        assert folder._still_needed(size) == 4 * size
        folder.write(1, STATE, is_best=True)
        there = (tmp_path / "latest.pt").stat().st_size
        assert folder._still_needed(there) == 3 * there, "three names of one file"

    def test_a_checkpoint_that_does_not_fit_is_found_by_writing_it(self, tmp_path):
        with (
            files_no_larger_than(5000),
            pytest.raises(errors.CheckpointError, match="cannot hold a checkpoint") as caught,
        ):
            CheckpointFolder(tmp_path).rehearse(STATE)
        assert ".trial" not in str(caught.value)
        assert os.listdir(tmp_path) == []

    def test_looking_for_one_makes_nothing(self, tmp_path):
        with pytest.raises(errors.CheckpointError, match="does not exist"):
            CheckpointFolder(tmp_path / "nowhere").newest()
        assert list(tmp_path.iterdir()) == []

    def test_a_file_system_without_second_names(self, tmp_path, monkeypatch):
        def refused(*names):
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refused)
        folder = CheckpointFolder(tmp_path)
        folder.write(1, {"steps": 1}, is_best=True)
        assert folder.newest()["steps"] == 1
        assert checkpoint.load(tmp_path / "best.pt")["steps"] == 1


SCRIPT = """
import hashlib, sys, torch, envfleet
from pathlib import Path
from envfleet.runs.checkpoint import CheckpointFolder
from envfleet.learn.ppo import PPOOptions, PPOTrainer

def main(env, folder, iterations, where):
    torch.set_num_threads(1)
    options = PPOOptions(
        n_steps=32, batch_size=64, n_epochs=2, hidden=(16,), normalise_obs=True,
        normalise_rewards=True,
    )
    folder = CheckpointFolder(Path(folder))
    with envfleet.make_vec(env, 4, autoreset="same_step", **where) as envs:
        trainer = PPOTrainer(envs, options, seed=5)
        if (folder.folder / "latest.pt").exists():
            trainer.load(folder.newest())
        total = 4 * 32 * iterations
        while trainer.env_steps < total:
            trainer.learn(trainer.collect(), trainer.env_steps / total)
            folder.write(trainer.env_steps, trainer.state())
            print(trainer.env_steps, flush=True)
        values = [one.detach().numpy().tobytes() for one in trainer.policy.parameters()]
        print(hashlib.sha256(b"".join(values)).hexdigest(), flush=True)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), eval(sys.argv[4]))
"""
ITERATIONS = 20


def started(script, env, folder, where):
    command = [sys.executable, str(script), env, str(folder), str(ITERATIONS), repr(where)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(
    "where", [{"backend": "serial"}, {"backend": "process", "num_workers": 2}], ids=["here", "out"]
)
def test_a_run_that_was_killed_equals_one_that_was_not(env, where, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    whole, _ = started(script, env, tmp_path / "whole", where).communicate(timeout=120)
    first = started(script, env, tmp_path / "parts", where)
    assert first.stdout is not None
    while int(first.stdout.readline()) < 4 * 32 * ITERATIONS // 2:
        pass
    time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    rest, _ = started(script, env, tmp_path / "parts", where).communicate(timeout=120)
    assert 0 < len(rest.split()) < len(whole.split())
    assert rest.split()[-1] == whole.split()[-1]
