"""A run: what it keeps, how it goes on, what it says of its time."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace

import gymnasium
import numpy as np
import pytest
import torch

from envfleet import errors
from envfleet.learn.environments import env_fn, opened
from envfleet.learn.evaluate import EVALUATION_SEED, evaluate
from envfleet.learn.load import load_agent, resumed_options
from envfleet.learn.networks import ActorCritic
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import RECIPES
from envfleet.learn.train import PPO_KIND, TrainOptions, train
from envfleet.learn.train_options import FREE, LENGTHS
from envfleet.runs.callbacks import Evaluation, RunCallback
from envfleet.runs.checkpoint import CheckpointFolder, load, save
from envfleet.runs.clock import Clock
from envfleet.runs.folder import RunFolder
from envfleet.runs.record import read_record
from tests.faults.stage import kill_and_wait
from tests.unit.observe.small_disk import files_no_larger_than

PPO = PPOOptions(n_steps=16, batch_size=32, n_epochs=2, hidden=(16,), normalise_obs=True)
RUN = TrainOptions(
    "CartPole-v1",
    n_envs=4,
    total_steps=64 * 12,
    backend="serial",
    save_every=64 * 4,
    eval_every=64 * 5,
    eval_episodes=2,
)


class StopAt(RunCallback):
    def __init__(self, number):
        self.number, self.seen = number, 0

    def iterated(self, iteration):
        self.seen = iteration.number

    def should_stop(self):
        return self.seen == self.number


class Killed(BaseException):
    """Ends a run without a word, as a kill does."""


class CutOff(StopAt):
    def should_stop(self):
        if super().should_stop():
            raise Killed
        return False


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder):
    """What was measured, without how long it took, and without the ends in between."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith("seconds") and name != "env_steps_per_second"
        }
        for line in metrics(folder)
        if "ended" not in line
    ]


def weights(folder):
    policy = load(folder / "latest.pt")["job"]["policy"]
    return {name: value.numpy().tobytes() for name, value in policy.items()}


class SpoiledLater(gymnasium.Env):
    """Pays nothing that is a number from its fortieth step on."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(size=1).astype("float32"), {}

    def step(self, action):
        self.steps += 1
        reward = 1.0 if self.steps < 40 else float("nan")
        return self.np_random.uniform(size=1).astype("float32"), reward, False, False, {}


def test_a_run_leaves_what_it_promises(tmp_path):
    outcome = train(RUN, PPO, tmp_path / "run")
    assert (outcome.env_steps, outcome.new_steps, outcome.is_stopped) == (768, 768, False)
    assert outcome.best_return is not None
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"run.json", "metrics.jsonl", "latest.pt", "best.pt", "report.html"} <= names
    assert outcome.report == tmp_path / "run" / "report.html"
    assert sum(name.startswith("step_") for name in names) <= RUN.keep_checkpoints
    iterations = [line for line in metrics(tmp_path / "run") if "approx_kl" in line]
    assert [line["iteration"] for line in iterations] == list(range(1, 13))
    evaluations = [line for line in metrics(tmp_path / "run") if "evaluation_mean" in line]
    assert [line["env_steps"] for line in evaluations] == [320, 640, 768]
    assert resumed_options(tmp_path / "run") == (RUN, PPO)


class Unpicklable(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("env", "method"),
    [("CartPole-v1", "pickle"), (f"{__name__}:Unpicklable", "replay")],
)
def test_a_run_tells_how_its_environments_are_kept(env, method, tmp_path):
    told = []

    class Told(RunCallback):
        def kept_by(self, methods):
            told.append(methods)

    train(replace(RUN, env=env, num_episodes=1), PPO, tmp_path, Told())
    assert told == [(method,)]
    assert json.loads((tmp_path / "run.json").read_text())["environments_kept_by"] == [method]
    assert "environments are kept by" in (tmp_path / "report.html").read_text()


class DoesNotRepeat(Unpicklable):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(next(NUMBERS) % 7), *rest


NUMBERS = itertools.count()


def test_a_run_whose_environments_do_not_repeat_goes_on_with_new_episodes(tmp_path):
    told = []

    class Told(StopAt):
        def kept_by(self, methods):
            told.append(methods)

    def about():
        return json.loads((tmp_path / "run.json").read_text())

    run = replace(RUN, env=f"{__name__}:DoesNotRepeat", eval_every=0)
    with pytest.warns(RuntimeWarning, match="does not repeat itself.*begins new episodes"):
        train(run, PPO, tmp_path, Told(5))
    assert told == [("replay",), ()]
    assert about()["environments_kept_by"] == []
    assert "Go on with this one, with new episodes:" in (tmp_path / "report.html").read_text()
    with pytest.warns(RuntimeWarning) as said:
        outcome = train(*resumed_options(tmp_path), tmp_path, is_resumed=True)
    assert "new episodes begin in all slots" in str(said[0].message)
    assert outcome.env_steps == 768
    assert [part["new_episodes"] for part in about()["resumed"]] == [True]
    assert "UTC, with new episodes" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("stop_at", [1, 5, 7, 11])
def test_a_run_in_two_parts_equals_one_in_one(stop_at, tmp_path):
    train(RUN, PPO, tmp_path / "whole")
    first = train(RUN, PPO, tmp_path / "parts", StopAt(stop_at))
    assert first.is_stopped
    assert first.env_steps == 64 * stop_at
    second = train(*resumed_options(tmp_path / "parts"), tmp_path / "parts", is_resumed=True)
    assert second.new_steps == 768 - 64 * stop_at
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")


def test_a_run_goes_on_elsewhere_with_the_same_results(tmp_path):
    train(RUN, PPO, tmp_path / "whole")
    train(RUN, PPO, tmp_path / "parts", StopAt(5))
    elsewhere = replace(
        RUN, backend="process", num_workers=2, save_every=64, tensorboard=False, eval_envs=2
    )
    train(elsewhere, PPO, tmp_path / "parts", is_resumed=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")
    assert resumed_options(tmp_path / "parts") == (elsewhere, PPO)
    (part,) = json.loads((tmp_path / "parts" / "run.json").read_text())["resumed"]
    assert part["changed"]["backend"] == ["serial", "process"]
    assert "backend serial became process" in (tmp_path / "parts" / "report.html").read_text()


LONGER = replace(RUN, total_steps=64 * 20)


def test_a_run_at_its_end_is_made_longer_and_again_in_as_many_parts(tmp_path):
    first = train(RUN, PPO, tmp_path / "whole")
    longer = train(LONGER, PPO, tmp_path / "whole", is_resumed=True)
    assert (first.env_steps, longer.env_steps, longer.new_steps) == (768, 1280, 512)
    made = [line for line in metrics(tmp_path / "whole") if "approx_kl" in line]
    assert [line["iteration"] for line in made] == list(range(1, 21))
    assert made[12]["learning_rate"] == pytest.approx(PPO.learning_rate * 8 / 20)

    train(RUN, PPO, tmp_path / "again", StopAt(7))
    train(RUN, PPO, tmp_path / "again", is_resumed=True)
    train(LONGER, PPO, tmp_path / "again", StopAt(15), is_resumed=True)
    train(*resumed_options(tmp_path / "again"), tmp_path / "again", is_resumed=True)
    assert weights(tmp_path / "again") == weights(tmp_path / "whole")
    assert untimed(tmp_path / "again") == untimed(tmp_path / "whole")
    told = json.loads((tmp_path / "whole" / "run.json").read_text())["command"]
    assert told.endswith("envfleet train --resume runs/again --total-steps 1280")


def test_the_length_of_a_run_can_only_grow_and_only_at_its_end(tmp_path):
    train(RUN, PPO, tmp_path, StopAt(5))
    with pytest.raises(errors.ConfigError, match=r"made 320 of 768 steps; go on with it as it is"):
        train(LONGER, PPO, tmp_path, is_resumed=True)
    train(RUN, PPO, tmp_path, is_resumed=True)
    with pytest.raises(errors.ConfigError, match=r"not shorter: this one has 768 steps"):
        train(replace(RUN, total_steps=64), PPO, tmp_path, is_resumed=True)
    assert resumed_options(tmp_path) == (RUN, PPO)


@pytest.mark.parametrize(
    ("options", "ppo", "name"),
    [
        (replace(RUN, seed=1), PPO, "seed=0"),
        (replace(RUN, n_envs=8), PPO, "n_envs=4"),
        (RUN, replace(PPO, gamma=0.5), "gamma=0.99"),
    ],
)
def test_what_is_learned_depends_on_stays(options, ppo, name, tmp_path):
    train(RUN, PPO, tmp_path, StopAt(5))
    with pytest.raises(errors.ConfigError, match=f"a run with {name}, which is a part of it"):
        train(options, ppo, tmp_path, is_resumed=True)


def test_every_option_of_a_run_is_free_or_part_of_it():
    names = {field.name for field in fields(TrainOptions)}
    assert names >= FREE
    assert names - FREE == {"env", "env_kwargs", "wrapper", "n_envs", "seed", *LENGTHS}


def test_what_was_noted_after_the_last_checkpoint_is_noted_once(tmp_path):
    train(RUN, PPO, tmp_path, StopAt(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "env_steps": 384, "approx_kl": 1}\n{"iteration": 7, "env')
    train(RUN, PPO, tmp_path, is_resumed=True)
    numbers = [line["iteration"] for line in metrics(tmp_path) if "approx_kl" in line]
    assert numbers == list(range(1, 13))


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    train(RUN, PPO, tmp_path)
    again = train(RUN, PPO, tmp_path, is_resumed=True)
    assert (again.env_steps, again.new_steps) == (768, 0)


def test_a_finished_run_is_told_to_be_one_once(tmp_path):
    for is_resumed in (False, True, True):
        outcome = train(RUN, PPO, tmp_path, is_resumed=is_resumed)
    assert outcome.seconds > 0
    assert [line["ended"] for line in metrics(tmp_path) if "ended" in line] == ["finished"]
    train(replace(RUN, total_steps=64 * 13), PPO, tmp_path, is_resumed=True)
    assert [line["ended"] for line in metrics(tmp_path) if "ended" in line] == ["finished"] * 2


def test_a_run_that_was_ended_before_its_first_checkpoint_begins_again(tmp_path):
    train(RUN, PPO, tmp_path / "whole")
    with pytest.raises(Killed):
        train(RUN, PPO, tmp_path / "early", CutOff(2))
    assert len(metrics(tmp_path / "early")) == 2
    train(*resumed_options(tmp_path / "early"), tmp_path / "early", is_resumed=True)
    assert weights(tmp_path / "early") == weights(tmp_path / "whole")
    assert untimed(tmp_path / "early") == untimed(tmp_path / "whole")


def test_a_run_that_has_lost_its_checkpoints_is_not_begun_again(tmp_path):
    train(RUN, PPO, tmp_path, StopAt(5))
    noted = metrics(tmp_path)
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    with pytest.raises(errors.CheckpointError, match="has lost its checkpoints"):
        train(RUN, PPO, tmp_path, is_resumed=True)
    assert metrics(tmp_path) == noted


def test_options_that_fail_leave_no_run_behind(tmp_path):
    with pytest.raises(errors.ConfigError, match="device 'cuda:99' cannot be used"):
        train(TrainOptions("CartPole-v1", device="cuda:99", backend="serial"), PPO, tmp_path)
    assert list(tmp_path.iterdir()) == []


class KillsAWorker(RunCallback):
    """Between a rollout and its checkpoint."""

    def begun(self, envs, start_steps):
        self.fleet = envs.fleet

    def iterated(self, iteration):
        if iteration.number == 4:
            kill_and_wait(self.fleet.worker_pids()[0])


def test_a_worker_that_dies_before_a_checkpoint_delays_it(tmp_path):
    options = replace(RUN, backend="process", num_workers=2)
    outcome = train(options, PPO, tmp_path, KillsAWorker())
    assert outcome.env_steps == 768
    assert outcome.incidents == 1
    assert load(tmp_path / "latest.pt")["iteration"] == 12


class KillsAWorkerAfterEvaluation(RunCallback):
    """The first one, whose checkpoint is the best so far."""

    def begun(self, envs, start_steps):
        self.fleet, self.evaluated_at = envs.fleet, []

    def evaluated(self, env_steps, evaluation):
        self.evaluated_at.append(env_steps)
        if len(self.evaluated_at) == 1:
            kill_and_wait(self.fleet.worker_pids()[0])


def test_the_best_is_what_was_evaluated_even_if_a_worker_dies_then(tmp_path, monkeypatch):
    returns = iter((9.0, 8.0, 7.0))
    monkeypatch.setattr(
        "envfleet.learn.train.evaluate", lambda *_, **__: Evaluation((next(returns),))
    )
    options = replace(RUN, backend="process", num_workers=2)
    callback = KillsAWorkerAfterEvaluation()
    outcome = train(options, PPO, tmp_path, callback)
    assert outcome.incidents == 1
    assert load(tmp_path / "best.pt")["job"]["env_steps"] == callback.evaluated_at[0] == 320


def test_the_best_is_what_was_evaluated_even_if_the_disk_was_full_then(tmp_path, monkeypatch):
    returns = iter((9.0, 8.0, 7.0))
    monkeypatch.setattr(
        "envfleet.learn.train.evaluate", lambda *_, **__: Evaluation((next(returns),))
    )

    class FullForAWhile(RunCallback):
        def evaluated(self, env_steps, evaluation):
            if env_steps == 320:
                self.limit = files_no_larger_than(6_000)
                self.limit.__enter__()

        def iterated(self, iteration):
            if iteration.number == 7:
                self.limit.__exit__(None, None, None)

    with pytest.warns(RuntimeWarning, match="is tried again after every iteration"):
        train(replace(RUN, tensorboard=False), PPO, tmp_path, FullForAWhile())
    assert load(tmp_path / "best.pt")["job"]["env_steps"] == 320
    assert load(tmp_path / "latest.pt")["job"]["env_steps"] == 768


def test_what_was_learned_is_saved_before_it_is_evaluated(tmp_path, monkeypatch):
    train(RUN, PPO, tmp_path / "whole")

    def killed(*_, **__):
        raise KeyboardInterrupt

    options = replace(RUN, save_every=64 * 5)
    with monkeypatch.context() as patched:
        patched.setattr("envfleet.learn.train.evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            train(options, PPO, tmp_path / "parts")
    assert load(tmp_path / "parts" / "latest.pt")["iteration"] == 5
    second = train(*resumed_options(tmp_path / "parts"), tmp_path / "parts", is_resumed=True)
    assert second.new_steps == 768 - 320
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")


def test_an_evaluation_that_was_noted_and_not_saved_is_noted_once(tmp_path, monkeypatch):
    train(RUN, PPO, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    state = load(tmp_path / "parts" / "latest.pt")
    save(tmp_path / "parts" / "latest.pt", {**state, "owes_evaluation": True})
    again = train(*resumed_options(tmp_path / "parts"), tmp_path / "parts", is_resumed=True)
    assert again.last_evaluation is not None
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")
    assert not load(tmp_path / "parts" / "latest.pt")["owes_evaluation"]


class StopsEvaluating(RunCallback):
    """Asks for an end after some steps of the second evaluation, which is at 640 steps."""

    def __init__(self):
        self.evaluations = self.asked = 0

    def evaluating(self, env_steps):
        self.evaluations += 1

    def should_stop(self):
        self.asked += self.evaluations == 2
        return self.asked > 5


@pytest.mark.parametrize("n_envs", [1, 2])
def test_an_evaluation_is_cut_off_on_request_and_made_up_for(n_envs, tmp_path, monkeypatch):
    options = replace(RUN, eval_envs=n_envs)
    train(options, PPO, tmp_path / "whole")
    callback = StopsEvaluating()
    first = train(options, PPO, tmp_path / "parts", callback)
    assert (first.is_stopped, first.env_steps) == (True, 640)
    assert callback.asked == 6
    assert load(tmp_path / "parts" / "latest.pt")["owes_evaluation"]

    in_worker = []

    def played(*args, **kwargs):
        in_worker.append(kwargs["in_worker"])
        return evaluate(*args, **kwargs)

    monkeypatch.setattr("envfleet.learn.train.evaluate", played)
    train(*resumed_options(tmp_path / "parts"), tmp_path / "parts", is_resumed=True)
    assert in_worker == [False, False]
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")


def test_a_run_that_was_stopped_in_its_last_evaluation_is_not_called_finished(tmp_path):
    options = replace(RUN, eval_every=0, num_episodes=2)
    outcome = train(options, PPO, tmp_path, StopAt(2))
    assert outcome.is_stopped
    record = read_record(tmp_path, PPO_KIND)
    assert (record.state, record.resume_command) == (
        "stopped",
        f"envfleet train --resume {tmp_path}",
    )
    again = train(options, PPO, tmp_path, is_resumed=True)
    assert (again.is_stopped, again.new_steps) == (False, 0)
    assert again.best_return is not None


def test_an_evaluation_without_a_number_is_not_the_best(tmp_path, monkeypatch):
    returns = iter((float("nan"), 8.0, float("inf")))
    monkeypatch.setattr(
        "envfleet.learn.train.evaluate", lambda *_, **__: Evaluation((next(returns),))
    )
    assert train(RUN, PPO, tmp_path).best_return == 8.0
    assert load(tmp_path / "best.pt")["job"]["env_steps"] == 640


FATAL = TrainOptions(
    "envfleet.testing:Crashing",
    {"mode": "kill", "only_seed": EVALUATION_SEED},
    n_envs=2,
    num_episodes=3,
    backend="process",
    num_workers=1,
    eval_every=64,
)


LOST = r"1 of 10 episodes of the evaluation at \d+ steps were lost \(WorkerDied"


def test_an_evaluation_s_episode_that_takes_its_process_along_costs_itself(tmp_path):
    with pytest.warns(RuntimeWarning, match=LOST):
        outcome = train(replace(FATAL, step_timeout_s=60.0), PPO, tmp_path)
    assert (outcome.env_steps, outcome.incidents, outcome.failed_evaluations) == (96, 0, 0)
    noted = [line for line in metrics(tmp_path) if "evaluation_mean" in line]
    assert [line["evaluation_lost"] for line in noted] == [1, 1]
    assert "1 episode lost" in (tmp_path / "report.html").read_text()
    assert load(tmp_path / "latest.pt")["iteration"] == 3


ENDED_BY_ITS_EVALUATION = """
import pathlib, sys
from tests.unit.learn.test_train import FATAL, PPO, replace, train

if __name__ == "__main__":
    train(FATAL, PPO, pathlib.Path(sys.argv[1]))
"""


def test_an_evaluation_that_took_the_run_along_is_made_up_for_and_costs_itself(tmp_path):
    (tmp_path / "fatal.py").write_text(ENDED_BY_ITS_EVALUATION)
    words = [sys.executable, str(tmp_path / "fatal.py"), str(tmp_path / "run")]
    where = os.pathsep.join([os.getcwd(), *sys.path])
    ended = subprocess.run(words, env={**os.environ, "PYTHONPATH": where}, check=False)
    assert ended.returncode == -signal.SIGKILL
    state = load(tmp_path / "run" / "latest.pt")
    assert (state["iteration"], state["owes_evaluation"]) == (2, True)
    # whoever stops the next try has not shown that the evaluation is harmless
    train(*resumed_options(tmp_path / "run"), tmp_path / "run", StopAt(0), is_resumed=True)
    with pytest.warns(RuntimeWarning, match=LOST):
        train(*resumed_options(tmp_path / "run"), tmp_path / "run", is_resumed=True)
    lost = [line["env_steps"] for line in metrics(tmp_path / "run") if "evaluation_lost" in line]
    assert lost == [64, 96]
    assert not load(tmp_path / "run" / "latest.pt")["owes_evaluation"]


ENDS_ITS_PROCESS = """
import os, pathlib, sys
import gymnasium
from envfleet.learn.train import TrainOptions, train
from tests.unit.learn.test_train import PPO

class Ends(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        self.is_fatal = seed == 1 or (seed is None and self.is_fatal)
        return self.observation_space.low, {}

    def step(self, action):
        self.left -= 1
        self.made += 1
        if self.made == 40 and self.is_fatal:
            os._exit(3)
        return self.observation_space.low, 1.0, self.left == 0, False, {}

if __name__ == "__main__":
    options = TrainOptions(
        f"{__file__}:Ends", n_envs=2, num_episodes=5, save_every=32, eval_episodes=1
    )
    run = pathlib.Path(sys.argv[1])
    outcome = train(options, PPO, run, is_resumed=run.exists())
    print(outcome.env_steps, outcome.incidents)
"""


def test_an_environment_that_ended_the_run_costs_its_episode_once_that_goes_on(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS_ITS_PROCESS)
    words = [sys.executable, str(tmp_path / "ends.py"), str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}

    first = subprocess.run(words, env=env, check=False)
    assert first.returncode == 3
    assert load(tmp_path / "run" / "latest.pt")["iteration"] == 2
    second = subprocess.run(words, env=env, check=False, capture_output=True, text=True)

    assert second.stdout == "160 1\n", second.stderr


class Told(RunCallback):
    def begun(self, envs, start_steps):
        self.plan = envs.plan


@pytest.mark.parametrize("backend", ["auto", "serial"])
def test_a_run_that_was_cut_off_goes_on_in_workers_unless_told_otherwise(backend, tmp_path):
    options, told = replace(RUN, backend=backend), Told()
    with pytest.raises(Killed):
        train(options, PPO, tmp_path / "cut", CutOff(4))
    train(options, PPO, tmp_path / "cut", told, is_resumed=True)
    train(options, PPO, tmp_path / "whole")
    assert ("the run was cut off" in told.plan) == (backend == "auto")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    train(options, PPO, tmp_path / "cut", told, is_resumed=True)
    assert "the run was cut off" not in told.plan


def test_deadlines_call_for_workers(tmp_path):
    options = TrainOptions("CartPole-v1", n_envs=2, num_episodes=1, step_timeout_s=60.0)
    with opened(options, PPO) as trainer:
        assert all(pid is not None for pid in trainer.envs.fleet.worker_pids())
    with pytest.raises(errors.ConfigError, match="leave out the timeouts"):
        train(replace(options, backend="serial"), PPO, tmp_path)


def test_an_environment_that_hangs_costs_its_episode_where_there_is_a_deadline(tmp_path):
    fault = {"once": str(tmp_path / "hung"), "nth": 10}
    options = TrainOptions(
        "envfleet.testing:Hanging",
        fault,
        n_envs=2,
        num_episodes=2,
        backend="process",
        num_workers=1,
        step_timeout_s=0.5,
    )
    outcome = train(options, PPO, tmp_path / "run")
    assert (outcome.env_steps, outcome.incidents) == (64, 1)
    assert outcome.best_return is not None


IN_THE_WAY = """
import pathlib, sys
from envfleet.runs.lock import locked

with locked(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_kept_out_of_a_run_until_the_first_is_gone(tmp_path):
    train(RUN, PPO, tmp_path, StopAt(1))
    words = [sys.executable, "-c", IN_THE_WAY, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        half_written = tmp_path / ".step_000000000099.pt.4711"
        half_written.write_bytes(b"")
        with pytest.raises(errors.CheckpointError, match="in use by another process"):
            train(RUN, PPO, tmp_path, is_resumed=True)
        assert half_written.exists()
        other.kill()
    assert train(RUN, PPO, tmp_path, is_resumed=True).env_steps == 768


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    train(RUN, PPO, tmp_path, StopAt(1))
    with pytest.raises(errors.ConfigError, match="holds a run already; resume it"):
        train(RUN, PPO, tmp_path)


@pytest.mark.parametrize("content", [None, "{", '{"options": {}}', '{"options": {}, "ppo": {}}'])
def test_a_folder_without_a_run_says_so(content, tmp_path):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(errors.CheckpointError, match=r"run\.json"):
        resumed_options(tmp_path)


def test_a_run_that_is_asked_for_by_its_checkpoint(tmp_path):
    (tmp_path / "latest.pt").write_bytes(b"")
    with pytest.raises(errors.CheckpointError, match=rf"is a file; name.* folder, {tmp_path}"):
        resumed_options(tmp_path / "latest.pt")


def test_a_checkpoint_of_another_run_is_said_to_be_one(tmp_path):
    train(replace(RUN, num_episodes=1), PPO, tmp_path / "mine")
    train(replace(RUN, num_episodes=1, env="Acrobot-v1"), PPO, tmp_path / "other")
    for path in (tmp_path / "mine").glob("*.pt"):
        path.unlink()
    (tmp_path / "other" / "latest.pt").rename(tmp_path / "mine" / "latest.pt")
    said = r"mine/latest\.pt does not fit its run\.json or its environment"
    with pytest.raises(errors.CheckpointError, match=said) as caught:
        train(*resumed_options(tmp_path / "mine"), tmp_path / "mine", is_resumed=True)
    assert len(str(caught.value)) < 600
    with pytest.raises(errors.CheckpointError, match=said):
        load_agent(tmp_path / "mine")


@pytest.mark.parametrize(
    ("options", "ppo"),
    [
        (replace(RUN, env="Acrobot-v1"), PPO),
        (replace(RUN, n_envs=2), PPO),
        (RUN, replace(PPO, hidden=(8, 8))),
        (RUN, replace(PPO, memory="gru")),
        (replace(RUN, seed=1), PPO),
        (RUN, PPO),
    ],
    ids=[
        *("another environment", "fewer slots", "another network", "a memory", "another seed"),
        "all the same",
    ],
)
def test_a_checkpoint_of_another_run_gives_way_to_the_one_before(options, ppo, tmp_path):
    train(RUN, PPO, tmp_path / "whole")
    train(RUN, PPO, tmp_path / "mine", StopAt(5))
    train(replace(options, num_episodes=1), ppo, tmp_path / "other")
    for name in ("latest.pt", "step_000000000320.pt"):
        shutil.copyfile(tmp_path / "other" / "latest.pt", tmp_path / "mine" / name)

    said = r"latest\.pt does not fit .* going on from step_000000000256\.pt$"
    with pytest.warns(RuntimeWarning, match=said):
        train(*resumed_options(tmp_path / "mine"), tmp_path / "mine", is_resumed=True)

    assert weights(tmp_path / "mine") == weights(tmp_path / "whole")
    assert untimed(tmp_path / "mine") == untimed(tmp_path / "whole")


def test_a_run_of_which_nobody_says_which_it_is_is_refused(tmp_path):
    train(RUN, PPO, tmp_path, StopAt(1))
    about = json.loads((tmp_path / "run.json").read_text())
    del about["identity"]
    (tmp_path / "run.json").write_text(json.dumps(about))
    with pytest.raises(errors.CheckpointError, match="does not say which run it is"):
        train(RUN, PPO, tmp_path, is_resumed=True)
    with pytest.raises(errors.CheckpointError, match="does not say which run it is"):
        load_agent(tmp_path)


def test_an_agent_too_is_the_newest_that_fits(tmp_path):
    train(RUN, PPO, tmp_path / "mine", StopAt(5))
    train(replace(RUN, num_episodes=1), replace(PPO, hidden=(8,)), tmp_path / "other")
    shutil.copyfile(tmp_path / "mine" / "latest.pt", tmp_path / "mine" / "step_000000000321.pt")
    shutil.copyfile(tmp_path / "other" / "latest.pt", tmp_path / "mine" / "latest.pt")
    with pytest.warns(
        RuntimeWarning, match=r"does not fit .* going on from step_000000000321\.pt$"
    ):
        _, agent = load_agent(tmp_path / "mine")
    kept = load(tmp_path / "mine" / "step_000000000321.pt")["job"]["policy"]
    assert all(torch.equal(kept[name], value) for name, value in agent.state()["policy"].items())


def test_a_checkpoint_without_a_run_in_it_is_said_to_be_one(tmp_path):
    train(replace(RUN, num_episodes=1), PPO, tmp_path)
    for path in tmp_path.glob("*.pt"):
        save(path, {"something": "else"})
    with pytest.raises(errors.CheckpointError, match="does not fit"):
        train(*resumed_options(tmp_path), tmp_path, is_resumed=True)


def test_a_run_that_meets_no_number_ends_and_its_checkpoint_is_whole(tmp_path):
    gymnasium.register("Spoiled-v0", lambda **_: SpoiledLater(), max_episode_steps=20)
    try:
        options = TrainOptions(
            "Spoiled-v0", n_envs=2, num_episodes=4, backend="serial", save_every=1, eval_every=0
        )
        with pytest.raises(errors.NotFinite, match="a reward of"):
            train(options, PPO, tmp_path)
    finally:
        del gymnasium.registry["Spoiled-v0"]
    kept = load(tmp_path / "latest.pt")
    assert kept["iteration"] == 2
    assert all(torch.isfinite(value).all() for value in kept["job"]["policy"].values())
    assert metrics(tmp_path)[-1]["ended"].startswith("failed: a reward of")


def test_an_agent_that_is_not_there(tmp_path):
    with pytest.raises(errors.CheckpointError, match=r"gone\.pt does not exist"):
        load_agent(tmp_path / "gone.pt")


def test_an_agent_plays_as_it_was_evaluated(tmp_path):
    outcome = train(RUN, PPO, tmp_path)
    for path in (tmp_path, tmp_path / "latest.pt"):
        options, agent = load_agent(path)
        assert options == RUN
        found = evaluate(agent.play, lambda: gymnasium.make("CartPole-v1"), episodes=2)
        assert found == outcome.last_evaluation


def test_an_environment_by_its_class_is_found_again(tmp_path):
    options = TrainOptions(
        "envfleet.testing:Counter",
        env_kwargs={"length": 3},
        n_envs=2,
        num_episodes=2,
        backend="serial",
    )
    outcome = train(options, PPO, tmp_path)
    kept, agent = load_agent(tmp_path)
    assert kept == options
    assert evaluate(agent.play, env_fn(kept), episodes=10) == outcome.last_evaluation
    assert train(*resumed_options(tmp_path), tmp_path, is_resumed=True).new_steps == 0


def test_an_id_that_a_module_registers_is_found(tmp_path):
    options = replace(RUN, env="benchmarks.cartpole_no_velocity:CartPoleNoVel-v1", total_steps=64)
    train(options, PPO, tmp_path)
    assert load_agent(tmp_path)[0] == options


def test_torch_s_threads_are_given_back(tmp_path):
    before = torch.get_num_threads()
    train(RUN, PPO, tmp_path, StopAt(1))
    assert torch.get_num_threads() == before


def test_a_run_acts_with_one_thread(tmp_path, monkeypatch):
    used, whole = [], ActorCritic.respond

    def respond(*args):
        used.append(torch.get_num_threads())
        return whole(*args)

    monkeypatch.setattr(ActorCritic, "respond", respond)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(RUN, replace(PPO, memory="gru", memory_size=8), tmp_path, StopAt(6))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(used) > 6 * PPO.n_steps
    assert set(used) == {1}


def test_num_episodes_counts_iterations(tmp_path):
    options = TrainOptions("CartPole-v1", n_envs=2, num_episodes=3, backend="serial")
    assert train(options, PPO, tmp_path).env_steps == 3 * 16 * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_envs": 0},
        {"total_steps": 0},
        {"num_episodes": 0},
        {"eval_every": -1},
        {"eval_max_steps": 0},
        {"eval_every": False},
        {"n_envs": "4"},
        {"n_envs": 2.5},
        {"total_steps": 1e5},
        {"seed": -1},
        {"seed": 1 << 63},
        {"device": None},
        {"step_timeout_s": 0},
        {"device": "gpu"},
        {"backend": "mpi"},
        {"parallel_start_method": "teleport"},
        {"video": "no"},
        {"tensorboard": 1},
        {"wandb_project": None},
        {"max_restarts": "a"},
        {"max_restarts": -1},
        {"num_workers": "a"},
        {"num_workers": 0},
        {"env_kwargs": None},
        {"env_kwargs": {1: 2}},
    ],
)
def test_options_that_cannot_work(wrong):
    (name,) = wrong
    with pytest.raises(errors.ConfigError, match=f"{name} must be"):
        TrainOptions("CartPole-v1", **wrong)


def test_a_name_that_no_option_has_is_answered_with_the_nearest():
    with pytest.raises(errors.ConfigError, match="no option 'n_env'; did you mean n_envs"):
        TrainOptions("CartPole-v1", n_env=4)  # type: ignore[call-arg]
    with pytest.raises(errors.ConfigError, match="PPOOptions has no option 'lerning_rate'; did"):
        PPOOptions(lerning_rate=1)  # type: ignore[call-arg]
    assert replace(PPO, n_steps=8).n_steps == 8


@pytest.mark.parametrize("env", RECIPES)
def test_recipes_make_whole_minibatches(env):
    recipe = RECIPES[env]
    assert recipe.n_envs * recipe.options.n_steps % recipe.options.batch_size == 0


class RaisesOnce(gymnasium.Env):
    """Raises in its tenth step, in one of all its instances."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), float)
    action_space = gymnasium.spaces.Discrete(2)
    left = 10

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(size=1), {}

    def step(self, action):
        RaisesOnce.left -= 1
        if not RaisesOnce.left:
            raise RuntimeError("once")
        return self.np_random.uniform(size=1), 1.0, False, False, {}


def test_an_environment_that_raises_costs_its_episode_also_in_this_process(tmp_path):
    gymnasium.register("RaisesOnce-v0", lambda **_: RaisesOnce(), max_episode_steps=20)
    try:
        options = TrainOptions("RaisesOnce-v0", n_envs=2, num_episodes=2, backend="serial")
        outcome = train(options, PPO, tmp_path)
    finally:
        del gymnasium.registry["RaisesOnce-v0"]
    assert outcome.incidents == 1
    assert outcome.env_steps == 64


class RaisesOften(RaisesOnce):
    """Raises once in a while, by its own numbers."""

    def step(self, action):
        if self.np_random.random() < 0.05:
            raise RuntimeError("again")
        return self.np_random.uniform(size=1), 1.0, False, False, {}


@pytest.fixture
def raises_often():
    gymnasium.register("RaisesOften-v0", lambda **_: RaisesOften(), max_episode_steps=20)
    yield TrainOptions("RaisesOften-v0", n_envs=2, num_episodes=6, backend="serial", save_every=64)
    del gymnasium.registry["RaisesOften-v0"]


def weights_of(folder):
    return {
        name: value.tolist() for name, value in load_agent(folder)[1].policy.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:the evaluation at")  # it raises there too
@pytest.mark.filterwarnings("ignore:.* episodes of the evaluation at")
def test_failures_cost_episodes_and_a_resume_is_exact_after_them(raises_often, tmp_path):
    whole = train(raises_often, PPO, tmp_path / "whole")
    assert whole.incidents > 5
    train(raises_often, PPO, tmp_path / "parts", StopAt(3))
    train(raises_often, PPO, tmp_path / "parts", is_resumed=True)
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")


def test_failures_beyond_the_budget_end_the_run(raises_often, tmp_path):
    with pytest.raises(errors.SlotQuarantined, match="raise max_restarts"):
        train(dataclasses.replace(raises_often, max_restarts=2), PPO, tmp_path)


class RaisesInEvaluation(RaisesOnce):
    """Does not like the seeds of evaluations."""

    def reset(self, *, seed=None, options=None):
        if seed is not None and seed >= EVALUATION_SEED:
            raise ValueError("not this seed")
        return super().reset(seed=seed)

    def step(self, action):
        return self.np_random.uniform(size=1), 1.0, False, False, {}


def test_an_evaluation_that_fails_costs_the_evaluation(tmp_path):
    gymnasium.register("Picky-v0", lambda **_: RaisesInEvaluation(), max_episode_steps=20)
    try:
        options = TrainOptions("Picky-v0", n_envs=2, num_episodes=2, backend="serial")
        with pytest.warns(RuntimeWarning, match=r"evaluation at 64 steps failed \(ValueError: not"):
            outcome = train(options, PPO, tmp_path)
    finally:
        del gymnasium.registry["Picky-v0"]
    assert outcome.env_steps == 64
    assert outcome.best_return is None
    assert (tmp_path / "latest.pt").exists()


def test_no_part_of_the_time_is_ever_negative():
    spent = {"waiting": 2.0, "environments": 1.0}
    clock = Clock(0.0, lambda: spent)
    clock.lap()
    spent |= {"waiting": 1.5, "environments": 1.5}
    assert clock.lap().keys() == {"seconds", "seconds/environments"}
    spent |= {"waiting": 2.25}
    assert clock.lap()["seconds/waiting"] == 0.25


def test_an_evaluation_without_end_is_left_after_the_steps_that_were_asked_for(tmp_path):
    options = replace(RUN, env="envfleet.testing:Counter", num_episodes=1, eval_max_steps=3)
    watched = []

    class Watching(RunCallback):
        def evaluating(self, env_steps):
            watched.append(env_steps)

    with pytest.warns(RuntimeWarning, match="3 steps"):
        train(options, replace(PPO, normalise_obs=False), tmp_path, Watching())
    assert watched == [64]


class Interrupting(RunCallback):
    """Ends the process's run when it has begun, and before anything is learned."""

    def begun(self, envs, start_steps):
        raise KeyboardInterrupt


def test_a_length_by_which_nothing_was_learned_may_be_taken_back(tmp_path):
    for name in ("run", "again"):
        train(RUN, PPO, tmp_path / name)
    endless = replace(RUN, total_steps=64 * 2_000)
    with pytest.raises(KeyboardInterrupt):
        train(endless, PPO, tmp_path / "run", Interrupting(), is_resumed=True)
    for name in ("run", "again"):
        train(LONGER, PPO, tmp_path / name, is_resumed=True)
    told = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("run", "again")]
    assert told[0]["command"] == told[1]["command"]
    assert weights(tmp_path / "run") == weights(tmp_path / "again")


def test_a_longer_run_that_falls_back_behind_its_old_end_learns_the_same(tmp_path):
    options = replace(RUN, save_every=64)
    for name in ("whole", "run"):
        train(options, PPO, tmp_path / name)
        train(replace(LONGER, save_every=64), PPO, tmp_path / name, StopAt(13), is_resumed=True)
    for path in ("latest.pt", "step_000000000832.pt", "step_000000000768.pt"):
        (tmp_path / "run" / path).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="going on from step_000000000704"):
        train(*resumed_options(tmp_path / "run"), tmp_path / "run", is_resumed=True)
    train(*resumed_options(tmp_path / "whole"), tmp_path / "whole", is_resumed=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


class StopsAtOnce(StopAt):
    """Raises what a second Ctrl-C does."""

    def should_stop(self):
        if super().should_stop():
            raise KeyboardInterrupt
        return False


def test_a_run_that_was_ended_by_hand_was_not_cut_off(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(RUN, PPO, tmp_path, StopsAtOnce(5))
    assert not RunFolder(tmp_path, PPO_KIND).was_cut_off


def test_a_run_whose_last_checkpoint_failed_is_not_called_finished(tmp_path, monkeypatch):
    monkeypatch.setattr("envfleet.runs.run.RETRY_S", 0.0)
    whole = CheckpointFolder.write

    def write(self, env_steps, state, *, is_best=False):
        if env_steps == RUN.total_steps:
            raise errors.CheckpointError("x", "cannot be written: the disk is full")
        return whole(self, env_steps, state, is_best=is_best)

    monkeypatch.setattr(CheckpointFolder, "write", write)
    with (
        pytest.warns(RuntimeWarning, match="the run goes on"),
        pytest.raises(errors.CheckpointError, match="the disk is full"),
    ):
        train(RUN, PPO, tmp_path)
    found = read_record(tmp_path, PPO_KIND)
    assert (found.state, found.reason[-16:]) == ("failed", "the disk is full")
    assert "--resume" in found.resume_command


RENDERER_THAT_KILLS = """
import os, pathlib, sys
from gymnasium.envs.classic_control import CartPoleEnv
from envfleet.learn.train import train
from tests.unit.learn.test_train import PPO, RUN, replace

if __name__ == "__main__":
    CartPoleEnv.render = lambda self: os._exit(9)
    options = replace(RUN, video=True)
    train(options, PPO, pathlib.Path(sys.argv[1]), is_resumed=len(sys.argv) > 2)
"""


def test_a_renderer_that_kills_costs_the_videos(tmp_path):
    (tmp_path / "kills.py").write_text(RENDERER_THAT_KILLS)
    words = [sys.executable, "-W", "ignore", str(tmp_path / "kills.py"), str(tmp_path / "run")]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    assert subprocess.run(words, env=where, check=False).returncode == 9
    assert metrics(tmp_path / "run")[-1]["evaluation_mean"] > 0
    assert subprocess.run([*words, "again"], env=where, check=False).returncode == 0
    assert load(tmp_path / "run" / "latest.pt")["iteration"] == 12
