"""Meta-RL as runs: folders, reports, and going on with the same results."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from envfleet.errors import ConfigError
from envfleet.meta import load_config, train
from envfleet.meta.report import write_trials
from envfleet.meta.rl2 import RL2_KIND
from envfleet.meta.training import META_KIND, resumed_config
from envfleet.runs.callbacks import RunCallback
from envfleet.runs.checkpoint import load
from envfleet.runs.record import read_record, write_report

LEARNER = (
    "env.env_name=PointRobot-v0",
    "env.num_train_tasks=4",
    "env.num_eval_tasks=2",
    "env.env_kwargs={max_episode_steps: 5}",
    "train.num_iters=4",
    "train.num_init_rollouts_pool=3",
    "train.num_rollouts_per_iter=2",
    "train.num_updates_per_iter=0.2",
    "train.buffer_size=500",
    "train.batch_size=4",
    "eval.log_interval=2",
    "policy.seq_model=gru",
    "policy.rnn_hidden_size=8",
)
RL2 = (
    "env.env_name=GridNavi-v0",
    "env.max_rollouts_per_task=2",
    "env.num_eval_tasks=3",
    "train.num_iters=3",
    "train.num_rollouts_per_iter=4",
    "eval.log_interval=2",
    "eval.max_eval_tasks=3",
    "eval.eval_stochastic=true",
    "policy.algo_name=rl2",
    "policy.memory=lstm",
    "policy.memory_size=8",
    "policy.n_steps=30",
    "policy.batch_size=60",
    "policy.n_epochs=1",
)
KINDS = {"learner": LEARNER, "rl2": RL2}


class Stop(RunCallback):
    """Stops after the first iteration of a process."""

    is_over = False

    def iterated(self, iteration):
        self.is_over = True

    def should_stop(self):
        return self.is_over


def learned(folder):
    """What the last checkpoint keeps of what was learned, without times."""
    state = load(folder / "latest.pt", trust="own")["job"]
    state.pop("slots", None)
    return state


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))


def evaluations(folder):
    """The figures of evaluations, which have no times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if "metrics/" in name}
        for line in lines
        if "evaluation_mean" in line
    ]


@pytest.fixture(params=KINDS)
def changes(request):
    return [*KINDS[request.param], "eval.log_tensorboard=false"]


def test_a_run_in_parts_is_the_run_in_one(changes, tmp_path):
    config = load_config(None, changes)
    train(config, tmp_path / "one")
    outcome = train(config, tmp_path / "parts", Stop())
    assert outcome.is_stopped
    train(resumed_config(tmp_path / "parts"), tmp_path / "parts", Stop(), is_resumed=True)
    outcome = train(config, tmp_path / "parts", is_resumed=True)
    assert not outcome.is_stopped
    assert equal(learned(tmp_path / "one"), learned(tmp_path / "parts"))
    assert evaluations(tmp_path / "one") == evaluations(tmp_path / "parts")
    replays = [tmp_path / name / "replay.bin" for name in ("one", "parts")]
    if replays[0].exists():
        assert replays[0].read_bytes() == replays[1].read_bytes()


def test_the_number_of_workers_changes_no_result(changes, tmp_path):
    for name, workers in (("one", 1), ("three", 3)):
        train(load_config(None, changes, num_parallel_workers=workers), tmp_path / name)
    assert equal(learned(tmp_path / "one"), learned(tmp_path / "three"))
    assert evaluations(tmp_path / "one") == evaluations(tmp_path / "three")


def test_a_killed_run_goes_on_with_the_same_results(tmp_path):
    changes = [*LEARNER, "eval.log_tensorboard=false", "eval.save_interval=1"]
    train(load_config(None, changes), tmp_path / "whole")
    program = f"""
import os, signal
from envfleet.meta import load_config, train
from envfleet.runs.callbacks import RunCallback

class Kill(RunCallback):
    def iterated(self, iteration):
        if iteration.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    train(load_config(None, {changes!r}), {str(tmp_path / "killed")!r}, Kill())
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    train(resumed_config(tmp_path / "killed"), tmp_path / "killed", is_resumed=True)
    assert equal(learned(tmp_path / "whole"), learned(tmp_path / "killed"))
    assert evaluations(tmp_path / "whole") == evaluations(tmp_path / "killed")


def test_checkpoints_are_plain_data(tmp_path):
    train(load_config(None, [*LEARNER, "eval.log_tensorboard=false"]), tmp_path / "run")
    state = load(tmp_path / "run" / "latest.pt", trust="none")["job"]
    assert state["counts"]["_n_rollouts_total"] == 3 + 4 * 2


def test_its_configuration_is_read_back_and_can_be_typed_again(changes, tmp_path):
    config = load_config(None, changes, seed=3)
    train(config, tmp_path, Stop())
    assert resumed_config(tmp_path) == config
    command = json.loads((tmp_path / "run.json").read_text())["command"]
    first, second, *typed = shlex.split(command)
    assert (first, second) == ("envfleet", "meta")
    place = typed.index("--seed")
    seed = int(typed[place + 1])
    assert load_config(None, typed[:place] + typed[place + 2 :], seed=seed) == config


def test_another_configuration_is_refused(changes, tmp_path):
    config = load_config(None, changes)
    train(config, tmp_path, Stop())
    other = replace(config, env=replace(config.env, num_eval_tasks=1))
    with pytest.raises(ConfigError, match="num_eval_tasks"):
        train(other, tmp_path, is_resumed=True)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    train(load_config(None, KINDS[request.param]), folder)
    return folder


class TestTheFolder:
    def kind_of(self, folder):
        return (
            RL2_KIND if json.loads((folder / "run.json").read_text())["job"] == "rl2" else META_KIND
        )

    def test_has_the_figures_as_csv(self, folder):
        with (folder / "progress.csv").open() as file:
            rows = list(csv.DictReader(file))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len(rows) == len(lines)
        name = "metrics/return_eval_episode_2"
        assert [row[name] for row in rows if row[name]] == [
            str(line[name]) for line in lines if name in line
        ]

    def test_has_curves_of_the_same_names(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        curves = EventAccumulator(str(folder)).Reload()
        names = curves.Tags()["scalars"]
        assert {"metrics/return_eval_episode_1", "metrics/return_eval_total"} <= set(names)
        assert {"z/env_steps", "z/time_cost", "z/fps"} <= set(names)
        if self.kind_of(folder) is META_KIND:
            assert {"z/rollouts", "z/rl_steps", "rl_loss/qf1_loss"} <= set(names)
        else:
            assert {"metrics/return_eval_episode_1_sto", "metrics/return_eval_total_sto"} <= set(
                names
            )

    def test_has_a_page_with_its_sections(self, folder):
        page = (folder / "report.html").read_text()
        for heading in ("Episodes of a trial", "Tasks seen", "Paths", "Where the time went"):
            assert f"<h2>{heading}</h2>" in page
        assert [f'data-label="episode {number}"' in page for number in (1, 2, 3)] == [
            True,
            True,
            False,
        ]
        assert page.count("<title>task ") == len(
            json.loads((folder / "trials.json").read_text())["pictures"]
        )
        assert "<circle" in page

    def test_has_a_page_without_its_pictures_too(self, folder, tmp_path):
        folder = shutil.copytree(folder, tmp_path / "copy")
        (folder / "trials.json").write_text('{"pictures": [{"task": 3}], "tasks_seen": 4}')
        write_report(folder, self.kind_of(folder))
        assert "not in the plane" in (folder / "report.html").read_text()

    def test_says_where_the_time_went(self, folder):
        record = read_record(folder, self.kind_of(folder))
        assert {"environments", "inference", "learning", "evaluation"} <= record.shares.keys()


def test_trials_without_a_plane_have_no_pictures(tmp_path):
    found: Any = SimpleNamespace(trials=[None], tasks=[0], returns=np.zeros((1, 2)))
    write_trials(tmp_path, found, None, {"0": 3})
    assert json.loads((tmp_path / "trials.json").read_text()) == {
        "tasks_seen": {"0": 3},
        "pictures": [],
    }


def test_evaluations_and_checkpoints_count_iterations_however_short_trials_are(tmp_path):
    changes = [
        "env.env_name=CartPole-P-v0", "env.num_train_tasks=null", "env.num_eval_tasks=null",
        "env.env_kwargs={}", "train.num_iters=7", "train.num_updates_per_iter=1",
        "eval.log_interval=3", "eval.save_interval=2", "eval.log_tensorboard=false",
        "policy.algo_name=sacd",
    ]  # fmt: skip
    config = load_config(None, [*LEARNER, *changes])
    train(config, tmp_path, Stop())
    train(config, tmp_path, is_resumed=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["iteration"] for line in lines if "evaluation_mean" in line]
    assert evaluated == [3, 6, 7]
    kept = [load(path, trust="own")["iteration"] for path in sorted(tmp_path.glob("step_*.pt"))]
    assert kept == [5, 6, 7]


def test_the_speed_of_a_run_that_went_on_is_that_of_its_steps_since_then(changes, tmp_path):
    config = load_config(None, changes)
    train(config, tmp_path, Stop())
    train(config, tmp_path, is_resumed=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second, *_ = [line for line in lines if "z/fps" in line]
    made = second["z/env_steps"] - first["z/env_steps"]
    assert second["z/fps"] * second["z/time_cost"] == pytest.approx(made)


def test_rl2_needs_a_memory(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.memory"):
        train(load_config(None, [*RL2, "policy.memory=null"]), tmp_path)
    assert not os.listdir(tmp_path)
