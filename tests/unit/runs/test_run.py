"""A job that is not PPO: what the loop gives to any job, exact resuming first."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from envfleet import errors
from envfleet.observe.report import JobPage, section, tile
from envfleet.runs.callbacks import Evaluation, EvaluationStopped, RunCallback
from envfleet.runs.checkpoint import load
from envfleet.runs.growing_file import GrowingFile
from envfleet.runs.job import Iterated, Job, JobKind, RunSettings
from envfleet.runs.plain_data import check_structure
from envfleet.runs.record import read_record
from envfleet.runs.run import run
from envfleet.runs.run_file import RunFile
from envfleet.runs.time_report import Remedy


@dataclass(frozen=True)
class WalkOptions:
    seed: int
    length: int = 10
    colour: str = "red"
    places: list[int] = field(default_factory=list)


KIND = JobKind(
    name="walk",
    options={"options": WalkOptions},
    titles={"options": "Walk"},
    command=("walk",),
    flags=("--quietly",),
    free=frozenset({"colour"}),
    lengths=("length",),
    remedies={"walking": lambda parts, setup: ("legs are slow", [Remedy("a horse", 0.5)])},
    page=lambda record: JobPage(
        "walks",
        [tile("farthest", f"{record.iterations[-1]['place']:.3f}")] if record.iterations else [],
        [section("Places", ", ".join(str(one["env_steps"]) for one in record.iterations))],
    ),
)


class Walk(Job):
    """A random walk that appends every place to a file; evaluation says how far it is."""

    def __init__(self, options, folder, *, can_evaluate=True):
        self.can_evaluate = can_evaluate
        self.options, self.env_steps, self.place = options, 0, 0.0
        self.random = np.random.default_rng(options.seed)
        self.data, self.walking_s = GrowingFile(folder / "places.bin"), 0.0
        self.progresses = []

    def iterate(self, progress):
        self.progresses.append(progress)
        self.place += self.random.normal()
        self.env_steps += 5
        self.walking_s += 5.0
        self.data.append(np.float64(self.place).tobytes())
        return Iterated(episodes=[(self.place, 5)], figures={"place": self.place})

    @property
    def seconds(self):
        return {"walking": self.walking_s, "resting": self.walking_s / 2}

    def state(self):
        return {
            "env_steps": self.env_steps,
            "place": self.place,
            "random": self.random.bit_generator.state,
            "data": self.data.mark(),
        }

    def load(self, state):
        check_structure(self.state(), state)
        self.env_steps, self.place = state["env_steps"], state["place"]
        self.random.bit_generator.state = state["random"]
        self.data.go_on(state["data"])

    def evaluate(self, *, is_wary, should_stop):
        if should_stop():
            raise EvaluationStopped
        return Evaluation((self.place,))


class StopAt(RunCallback):
    def __init__(self, number):
        self.number, self.seen = number, 0

    def iterated(self, iteration):
        self.seen, self.told = iteration.number, iteration

    def should_stop(self):
        return self.seen == self.number


class Killed(BaseException):
    """Ends a run as a kill does."""


class KillAt(StopAt):
    def should_stop(self):
        if super().should_stop():
            raise Killed
        return False


OPTIONS = WalkOptions(seed=3)


def walk(
    folder, options=OPTIONS, callback=None, *, keeps=None, is_resumed=False, can_evaluate=True
):
    @contextmanager
    def open_job(is_wary):
        job = Walk(options, folder, can_evaluate=can_evaluate)
        if keeps is not None:
            keeps.append(job)
        yield job

    settings = RunSettings(
        title="the hills",
        iterations=options.length,
        iteration_steps=5,
        save_every=15,
        eval_every=25,
    )
    given = {"options": options}
    return run(KIND, given, settings, folder, open_job, callback, is_resumed=is_resumed)


def figures(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if "second" not in name}
        for line in lines
        if "ended" not in line
    ]


def made(folder):
    """Everything that must not depend on where a run was interrupted."""
    state = load(folder / "latest.pt")
    del state["identity"]
    return state, (folder / "places.bin").read_bytes(), figures(folder)


@pytest.mark.parametrize("stops", [StopAt, KillAt])
@pytest.mark.parametrize("number", [1, 4, 5, 9])
def test_a_run_in_parts_equals_one_in_one(stops, number, tmp_path):
    walk(tmp_path / "whole")
    try:
        assert walk(tmp_path / "parts", callback=stops(number)).is_stopped
    except Killed:
        assert stops is KillAt
    walk(tmp_path / "parts", is_resumed=True)
    assert made(tmp_path / "parts") == made(tmp_path / "whole")


def test_a_run_leaves_its_folder_and_says_how_it_ended(tmp_path):
    told = StopAt(0)
    outcome = walk(tmp_path, callback=told)
    assert (outcome.env_steps, outcome.new_steps, outcome.is_stopped) == (50, 50, False)
    assert outcome.last_evaluation is not None
    assert outcome.best_return is not None
    assert outcome.best_return >= outcome.last_evaluation.mean
    assert outcome.verdict.endswith("walking: legs are slow; try a horse (2.0 times as fast)")
    assert re.sub(r"\d+%", "", told.told.verdict) == re.sub(r"\d+%", "", outcome.verdict)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"run.json", "metrics.jsonl", "latest.pt", "best.pt", "report.html"} <= names
    page = outcome.report.read_text()
    assert "<h2>Places</h2>5, 10, 15" in page
    assert "envfleet · walks" in page
    assert "resting" in page


def test_a_job_without_environments_says_nothing_of_them(tmp_path):
    class Told(RunCallback):
        def kept_by(self, methods):
            raise AssertionError(methods)

    walk(tmp_path, callback=Told())
    assert json.loads((tmp_path / "run.json").read_text())["environments_kept_by"] is None
    assert "environments are kept by" not in (tmp_path / "report.html").read_text()


def test_a_job_that_cannot_be_evaluated_is_not(tmp_path):
    outcome = walk(tmp_path, can_evaluate=False)
    assert outcome.last_evaluation is None
    assert "evaluation" not in outcome.shares
    assert not (tmp_path / "best.pt").exists()
    assert (tmp_path / "latest.pt").exists()


def test_progress_goes_by_the_length_that_a_run_had(tmp_path):
    jobs: list[Walk] = []
    walk(tmp_path, keeps=jobs)
    walk(tmp_path, replace(OPTIONS, length=20), keeps=jobs, is_resumed=True)
    assert jobs[0].progresses == [number / 10 for number in range(10)]
    assert jobs[1].progresses == [number / 20 for number in range(10, 20)]
    with pytest.raises(errors.ConfigError, match="not shorter: this one has 100 steps"):
        walk(tmp_path, is_resumed=True)


def test_the_folder_tells_what_was_asked_for_and_how_to_repeat_it(tmp_path):
    options = replace(OPTIONS, colour="blue", places=[1, 2])
    walk(tmp_path, options)
    assert RunFile(tmp_path, KIND).options() == {"options": options}
    record = read_record(tmp_path, KIND)
    assert record.command == "walk --seed 3 --quietly --colour blue --places 1,2"
    assert (record.env, record.state, record.total_steps) == ("the hills", "finished", 50)
    assert list(record.options) == ["Walk"]


def test_free_options_may_change_and_others_not(tmp_path):
    walk(tmp_path, callback=StopAt(3))
    with pytest.raises(errors.ConfigError, match="a run with seed=3, which is a part of it"):
        walk(tmp_path, replace(OPTIONS, seed=4), is_resumed=True)
    walk(tmp_path, replace(OPTIONS, colour="blue"), is_resumed=True)
    assert "colour red became blue" in (tmp_path / "report.html").read_text()


def test_a_folder_of_another_kind_is_refused(tmp_path):
    walk(tmp_path, callback=StopAt(3))
    with pytest.raises(errors.CheckpointError, match="holds a run of another kind: 'walk'"):
        RunFile(tmp_path, replace(KIND, name="swim")).read()


def test_an_evaluation_that_fails_costs_itself(tmp_path, monkeypatch):
    def evaluate(self, **_):
        raise ValueError("too foggy")

    monkeypatch.setattr(Walk, "evaluate", evaluate)
    with pytest.warns(
        RuntimeWarning, match=r"evaluation at (25|50) steps failed \(ValueError: too fog"
    ):
        outcome = walk(tmp_path)
    assert (outcome.env_steps, outcome.failed_evaluations, outcome.best_return) == (50, 2, None)


def test_nothing_here_needs_torch():
    names = sorted(path.stem for path in Path(run.__code__.co_filename).parent.glob("*.py"))
    code = "\n".join(f"import envfleet.runs.{name}" for name in names if name != "__init__")
    code += "\nimport sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
