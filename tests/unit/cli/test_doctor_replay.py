"""Incident files run again: exceptions here, deaths and hangs in a child."""

import json
import os
import signal
import subprocess
import sys
import time

import cloudpickle
import gymnasium
import numpy as np
import psutil
import pytest

from envfleet.cli import doctor_replay, main
from envfleet.cli.doctor_replay import WARNING, child_verdict, replay_verdict
from envfleet.engine.incident import Incident, ReplayResult


class Fragile(gymnasium.Env):
    """Does something bad in its third step."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, fault):
        self.fault, self.t = fault, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == 3:
            match self.fault:
                case "raise":
                    raise ValueError("out of grass")
                case "exit":
                    sys.exit(7)
                case "die":
                    os._exit(7)
                case "abort":
                    os.abort()
                case "hang":
                    with open(os.environ.get("TELL", os.devnull), "w") as file:
                        file.write("hanging")
                    time.sleep(60)
        return np.zeros(1, np.float32), 0.0, False, False, {}


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def saved(tmp_path):
    def save(fault, kind="exception", reason="ValueError: out of grass", *, is_complete=True):
        incident = Incident(
            kind=kind,
            slot=3,
            slots=(3,),
            worker=1,
            doing="step",
            reason=reason,
            traceback="",
            exitcode=None,
            seed=5,
            options=None,
            actions=(0, 1, 0),
            rng=None,
            is_complete=is_complete,
            env_fn=cloudpickle.dumps(lambda: Fragile(fault)),
        )
        return str(incident.save(tmp_path / f"{fault}.incident"))

    return save


def run(capsys, *arguments):
    code = main(["doctor", "replay", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_an_exception_happens_again(saved, capsys):
    code, document, errors = run(capsys, saved("raise"))

    assert code == 0
    assert document["reproduced"] is True
    assert document["steps"] == 3
    assert document["in_process"] is True
    assert "ValueError: out of grass" in document["exception"]
    assert document["conclusion"] == "It happened again after 3 steps: ValueError: out of grass."
    assert "trust" in errors


def test_people_see_the_traceback_and_the_verdict(saved, capsys):
    assert main(["doctor", "replay", saved("raise")]) == 0

    out = capsys.readouterr().out
    assert out.startswith("incident: exception in slot 3 (worker 1) during step")
    assert 'raise ValueError("out of grass")' in out
    assert out.rstrip().endswith("It happened again after 3 steps: ValueError: out of grass.")


def test_what_goes_well_is_not_reproduced(saved, capsys):
    code, document, _ = run(capsys, saved("nothing"))

    assert code == 1
    assert document["reproduced"] is False
    assert "3 steps went well" in document["conclusion"]


def test_what_cannot_be_done_again_as_it_was_is_not_judged(saved, capsys):
    code, document, _ = run(capsys, saved("nothing", is_complete=False))

    assert code == 1
    assert document["reproduced"] is False
    assert "cannot be replayed as it was" in document["conclusion"]


@pytest.mark.parametrize(("fault", "said"), [("die", "exit code 7"), ("abort", "signal SIGABRT")])
def test_a_death_is_replayed_in_a_child(saved, capsys, fault, said):
    code, document, _ = run(capsys, saved(fault, "death", "exit code 7"))

    assert code == 0
    assert document["in_process"] is False
    assert document["conclusion"] == f"It happened again: the process ended with {said}."


def test_a_hang_is_ended_and_shows_where_it_stood(saved, capsys):
    path = saved("hang", "timeout", "no answer")

    for seconds in (3, 9, 27):  # on a busy machine it may not have got there so soon
        code, document, _ = run(capsys, path, "--timeout", str(seconds))
        assert code == 0
        assert f"It hung: no end after {seconds} s" in document["conclusion"]
        if "in step" in document["exception"]:
            break
    assert "in step" in document["exception"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_hang_does_not_outlive_the_command(saved, number, tmp_path):
    command = [sys.executable, "-m", "envfleet", "doctor", "replay"]
    path = saved("hang", "timeout", "no answer")
    told = tmp_path / "told"
    places = os.pathsep.join(place for place in sys.path if place)
    with subprocess.Popen(
        [*command, path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": places, "TELL": str(told)},
    ) as parent:
        give_up_s = time.monotonic() + 30.0
        while not told.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
        parent.send_signal(number)
    _, alive = psutil.wait_procs(children, timeout=20.0)
    for child in alive:
        child.kill()
    assert alive == []


def test_a_death_that_does_not_come_again(saved, capsys):
    code, document, _ = run(capsys, saved("nothing", "death", "killed"))

    assert code == 1
    assert "did not happen again: 3 steps" in document["conclusion"]


def test_an_environment_that_exits_does_not_end_the_command_silently(saved, capsys):
    code, document, errors = run(capsys, saved("exit"))

    assert code == 1
    assert document["error"]["type"] == "SystemExit"
    assert "SystemExit: 7" in errors


def test_the_warning_comes_before_the_file_is_read(tmp_path, capsys, monkeypatch):
    said = []

    def load(path):
        said.append(capsys.readouterr().err)
        raise EOFError

    monkeypatch.setattr(Incident, "load", load)
    path = tmp_path / "x"
    path.write_bytes(b"")

    main(["doctor", "replay", str(path)])

    assert " ".join(said[0].split()) == WARNING


def test_files_that_are_none(tmp_path, capsys):
    wrong = tmp_path / "notes.txt"
    wrong.write_text("hello")

    assert main(["doctor", "replay", str(wrong)]) == 2
    assert "is not an incident file" in capsys.readouterr().err
    assert main(["doctor", "replay", str(tmp_path / "missing")]) == 2
    assert "there is no file" in capsys.readouterr().err


class TestVerdicts:
    def test_other_failure(self):
        text = replay_verdict(ReplayResult(False, 1, "Traceback\nKeyError: 'x'"))

        assert text == "Something else happened after 1 step: KeyError: 'x'."

    @pytest.mark.parametrize(
        ("kind", "exitcode", "reproduced"),
        [
            ("death", -11, True),
            ("timeout", -11, False),
            ("timeout", None, True),
            ("death", None, False),
        ],
    )
    def test_of_a_child(self, kind, exitcode, reproduced):
        result, text = child_verdict(kind, exitcode, 9.0, "", "Fatal Python error")

        assert result.reproduced is reproduced
        assert result.exception == "Fatal Python error"
        assert text.startswith("It hung" if exitcode is None else ("It", "Some")[not reproduced])

    def test_an_unknown_signal_is_a_number(self):
        assert doctor_replay.exit_words(-99) == "exit code -99"
        assert doctor_replay.exit_words(-9) == "signal SIGKILL"
