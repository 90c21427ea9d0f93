"""Damaged files of a run: the checkpoint before is used, or one sentence says what is wrong."""

import json
import random
import shutil
import warnings
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import envfleet
from envfleet import errors
from envfleet.cli import main
from envfleet.learn.load import load_agent, resumed_options
from envfleet.learn.ppo import PPOTrainer
from envfleet.learn.train import PPO_KIND, train
from envfleet.runs.checkpoint import CheckpointFolder, load, save
from envfleet.runs.record import read_record, write_report
from tests.unit.learn.test_train import PPO, RUN, StopAt, metrics, untimed, weights
from tests.unit.runs.test_run import StopAt as StopWalkAt
from tests.unit.runs.test_run import made, walk

SMALL = replace(RUN, num_episodes=4, save_every=64, eval_episodes=1, tensorboard=False)
TINY = replace(PPO, hidden=(4,), normalise_rewards=True)
NEWEST = ("latest.pt", "step_000000000192.pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in one part."""
    folder = tmp_path_factory.mktemp("whole")
    train(SMALL, TINY, folder)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run, stopped after three of four iterations; each has a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    train(SMALL, TINY, folder, StopAt(3))
    return folder


@pytest.fixture
def run_dir(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def put(folder, content, names=NEWEST):
    for name in names:
        (folder / name).unlink()
        (folder / name).write_bytes(content)


def flipped(content, position):
    changed = bytearray(content)
    changed[position] ^= 1 << position % 8
    return bytes(changed)


def test_every_flipped_bit_is_found(stopped, tmp_path):
    walk(tmp_path / "walk", callback=StopWalkAt(3))
    small, large = ((one / "latest.pt").read_bytes() for one in (tmp_path / "walk", stopped))
    path = tmp_path / "a.pt"
    damaged = [flipped(small, position) for position in range(len(small))]
    damaged += [flipped(large, position) for position in some(large, 300)]
    for content in damaged:
        path.write_bytes(content)
        for trust in ("own", "none"):
            with pytest.raises(errors.CheckpointError):
                load(path, trust=trust)


def test_every_truncation_is_found(stopped, tmp_path):
    content = (stopped / "latest.pt").read_bytes()
    path = tmp_path / "a.pt"
    for length in {*range(0, len(content), 61), *range(len(content) - 80, len(content))}:
        path.write_bytes(content[:length])
        with pytest.raises(errors.CheckpointError):
            load(path, trust="none")


def some(content, number):
    """Places in a checkpoint, the same each time; the first are those of the format itself."""
    places = random.Random(15).sample(range(len(content)), number)
    return [0, 25, 33, 40, len(content) - 1, *places]


def test_a_run_goes_on_from_the_one_before(stopped, whole, tmp_path):
    content = (stopped / "latest.pt").read_bytes()
    damaged = [flipped(content, place) for place in some(content, 8)]
    damaged += [b"", content[:100], content[:-1], content + b"\n", b"\xff" * 50]
    for number, changed in enumerate(damaged):
        folder = tmp_path / str(number)
        shutil.copytree(stopped, folder)
        put(folder, changed)
        with pytest.warns(RuntimeWarning, match=r"latest\.pt .*; going on from step_0*128\.pt"):
            load_agent(folder)
        with pytest.warns(RuntimeWarning, match=r"latest\.pt .*; going on from step_0*128\.pt"):
            train(*resumed_options(folder), folder, is_resumed=True)
        assert weights(folder) == weights(whole)
        assert untimed(folder) == untimed(whole)


def test_the_command_line_says_one_sentence_if_all_are_damaged(run_dir, capsys):
    content = (run_dir / "latest.pt").read_bytes()
    names = [path.name for path in run_dir.glob("*.pt")]
    for place in some(content, 8):
        put(run_dir, flipped(content, place), names)
        for words in (["eval", str(run_dir)], ["train", "--resume", str(run_dir), "--plain"]):
            assert main(words) == 1
            said = capsys.readouterr().err
            assert said.startswith("envfleet: ")
            assert "latest.pt" in said.replace("\n", "")


# ---- fields ------------------------------------------------------------------------------------

OTHERS: tuple[Any, ...] = (
    *(None, True, 7, -0.5, "text", b"bytes", [], [1], (), {}, {"a": 1}),
    *(np.zeros(3), np.zeros((), np.int8), torch.zeros(2, 2), object),
)


def places(state, path=()):
    """The way to every value of nested dicts, lists and tuples."""
    inner = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, dict | list | tuple) and value:
            yield from places(value, (*path, key))


def changed_at(state, path, change):
    """A copy in which `change` was made to the container at the end of a path."""
    if len(path) == 1:
        copied = dict(state) if isinstance(state, dict) else list(state)
        change(copied, path[0])
    else:
        copied = dict(state) if isinstance(state, dict) else list(state)
        copied[path[0]] = changed_at(state[path[0]], path[1:], change)
    return tuple(copied) if isinstance(state, tuple) else copied


def variants(state, others=OTHERS):
    """The state with each field missing, and with each of another type; with place and change."""
    for path in places(state):
        yield path, "missing", changed_at(state, path, lambda inner, key: inner.pop(key))
        for other in others:

            def change(inner, key, other=other):
                inner[key] = other

            yield path, other, changed_at(state, path, change)


def bits(state):
    """A state in a form that can be compared."""
    if isinstance(state, dict):
        return {name: bits(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    if isinstance(state, torch.Tensor | np.ndarray):
        return str(state.dtype), tuple(state.shape), np.asarray(state).tobytes()
    return state


def test_every_field_of_a_trainer_that_is_missing_or_of_another_type_is_found(stopped, tmp_path):
    """What is accepted must be used as it is; whatever is not costs a warning."""
    good = load(stopped / "step_000000000128.pt")["job"]
    newest = load(stopped / "latest.pt")["job"]
    folder = CheckpointFolder(tmp_path)
    folder.write(128, good)
    before, accepted = bits(_but_slots(good)), []
    with envfleet.make_vec("CartPole-v1", 4, backend="serial", autoreset="same_step") as envs:
        trainer = PPOTrainer(envs, TINY, seed=0)
        for path, other, state in variants(newest):
            save(tmp_path / "latest.pt", state)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                folder.newest(take=trainer.load)
            found = bits(_but_slots(trainer.state()))
            if any("going on from step_0" in str(one.message) for one in said):
                assert found == before, (path, other)
            else:
                accepted.append((path, other))
                if path[0] not in ("slots", "options", "num_envs"):
                    assert found == bits(_but_slots(state)), (path, other)
    # another number of the same type is as good, and environments need not have been kept
    plain = [one for one in accepted if type(one[1]) not in (bool, int, float)]
    other = [one for one in plain if one[0][0] != "options"]
    assert other == [(("collector", "masks"), None), (("slots",), None)]


def _but_slots(state):
    return {name: value for name, value in state.items() if name != "slots"}


@pytest.mark.parametrize(
    "name",
    ["identity", "job", "iteration", "best", "evaluated", "owes_evaluation", "is_wary", "recent"],
)
def test_every_field_of_the_loop_that_is_missing_or_of_another_type_is_found(name, tmp_path):
    walk(tmp_path / "whole")
    walk(tmp_path / "stopped", callback=StopWalkAt(7))
    state = load(tmp_path / "stopped" / "latest.pt")
    wrong = [*OTHERS, "missing", [(1.0, "2")], [("1", 2)], [(1.0,)], {"iteration": 3}]
    for number, other in enumerate(wrong):
        is_right = {
            "best": other is None or type(other) in (int, float),
            "iteration": type(other) is int,
            "evaluated": type(other) is int,
            "recent": type(other) is list and not other,
            "owes_evaluation": other is True,
            "is_wary": other is True,
        }
        if is_right.get(name, False):
            continue
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "stopped", folder)
        changed = {**deepcopy(state), name: other}
        if isinstance(other, str) and other == "missing":
            del changed[name]
        for path in (folder / "latest.pt", folder / "step_000000000035.pt"):
            save(path, changed)
        with pytest.warns(RuntimeWarning, match=r"latest\.pt does not fit.* going on from step_"):
            walk(folder, is_resumed=True)
        assert made(folder) == made(tmp_path / "whole"), other


# ---- metrics.jsonl and run.json ----------------------------------------------------------------


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff",
        b'{"env_steps": 128, "iteration": \xc3\x28}\n',
        b'{"env_steps": "many"}\n',
        b'{"env_steps": 1, "seconds": "a while", "env_steps_per_second": []}\n',
        b"[1, 2]\n",
        b"[" * 100_000 + b"\n",
        b"\x00" * 10,
    ],
)
def test_bad_bytes_at_the_end_of_the_metrics_are_left_out(junk, run_dir, whole):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(junk)
    assert read_record(run_dir, PPO_KIND).iterations[-1]["iteration"] == 3
    write_report(run_dir, PPO_KIND)
    train(*resumed_options(run_dir), run_dir, is_resumed=True)
    assert untimed(run_dir) == untimed(whole)
    assert metrics(run_dir)[-1]["ended"] == "finished"


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        DEEP,
        b'{"options": ' + DEEP + b"}",
    ],
    ids=["empty", "list", "dict", "null", "bytes", "deep", "deep inside"],
)
def test_a_run_json_that_is_none_gets_one_sentence(content, run_dir, capsys):
    (run_dir / "run.json").write_bytes(content)
    for words in (["eval", str(run_dir)], ["train", "--resume", str(run_dir), "--plain"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert said.startswith("envfleet: ")
        assert "run.json" in said
        assert len(said) < 600
    with pytest.raises(errors.CheckpointError, match=r"run\.json"):
        train(SMALL, TINY, run_dir, is_resumed=True)
    with pytest.raises(errors.CheckpointError, match=r"run\.json"):
        read_record(run_dir, PPO_KIND)


def test_every_field_of_run_json_that_is_missing_or_of_another_type_is_found(run_dir, capsys):
    """Resuming and evaluating work, or say one sentence; they never raise anything else."""
    about = json.loads((run_dir / "run.json").read_text())
    about["earlier_lengths"] = [{"iterations": 2, "total_steps": 9, "num_episodes": 2}]
    about["resumed"] = [{"env_steps": 64, "versions": {}, "changed": {}}]
    others: tuple[Any, ...] = (None, True, 7, -0.5, "text", [], [1], {}, {"a": 1})
    for _, _, changed in variants(about, others):
        (run_dir / "run.json").write_text(json.dumps(changed))
        for use in (resumed_options, load_agent, lambda folder: read_record(folder, PPO_KIND)):
            with suppress(errors.EnvfleetError):
                use(run_dir)


@pytest.mark.parametrize("name", ["identity", "iterations", "options", "ppo", "setup", "defaults"])
def test_resuming_with_a_run_json_that_lacks_a_field_gets_one_sentence(name, run_dir, capsys):
    about = json.loads((run_dir / "run.json").read_text())
    for changed in ({**about, name: []}, {key: about[key] for key in about if key != name}):
        (run_dir / "run.json").write_text(json.dumps(changed))
        assert main(["train", "--resume", str(run_dir), "--plain"]) == 1
        assert "run.json" in capsys.readouterr().err
