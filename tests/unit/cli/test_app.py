"""Streams, exit codes and errors of the application, with commands made up for the purpose."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import types
import warnings
from typing import Any

import pytest

from envfleet.cli import app, main
from envfleet.cli.arguments import value_of, values_of
from envfleet.cli.bench import NUM_ENVS
from envfleet.cli.command import UsageError
from envfleet.cli.report import Report, Text
from envfleet.errors import ConfigError, MissingExtra
from envfleet.options import Count, Seconds, literal_of


@pytest.fixture
def command(monkeypatch):
    """Installs one command, ``try``, which runs the given function."""

    def install(run):
        module = types.SimpleNamespace(
            add_arguments=lambda parser: parser.add_argument("--number", type=value_of(Count)),
            run=run,
        )
        monkeypatch.setitem(sys.modules, "made_up_command", module)
        monkeypatch.setattr(
            app, "COMMANDS", (app.CommandEntry("try", "made_up_command", "made up"),)
        )

    return install


def report(ok=True):
    return Report(ok, {"answer": 42}, (Text("forty-two"),))


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_people_read_blocks(command, capsys, ok, code):
    command(lambda args, context: report(ok))

    assert main(["try"]) == code
    assert capsys.readouterr().out == "forty-two\n"


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_scripts_read_one_document(command, capsys, ok, code):
    def run(args, context):
        sys.stdout.write("an environment says hello")
        return report(ok)

    command(run)

    assert main(["try", "--json"]) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["command"] == "try"
    assert document["ok"] is ok
    assert document["answer"] == 42
    assert "hello" in captured.err


def test_not_even_a_child_process_can_spoil_the_document():
    code = (
        "import os, subprocess, sys, types\n"
        "from envfleet.cli import app\n"
        "from envfleet.cli.report import Report\n"
        "def run(args, context):\n"
        "    os.write(1, b'from C')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"from a child\")'], check=True)\n"
        "    print('from Python')\n"
        "    return Report(True, {'answer': 42})\n"
        "module = types.ModuleType('m')\n"
        "module.add_arguments = lambda parser: None\n"
        "module.run = run\n"
        "sys.modules['m'] = module\n"
        "app.COMMANDS = (app.CommandEntry('try', 'm', ''),)\n"
        "code = app.run(['try', '--json'])\n"
        "print('afterwards')\n"
        "sys.exit(code)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )

    assert done.returncode == 0, done.stderr
    document, _, rest = done.stdout.rpartition("}\n")
    assert json.loads(document + "}")["answer"] == 42
    assert rest == "afterwards\n"
    for words in ("from C", "from a child", "from Python"):
        assert words in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("there is no such thing"), 2, "envfleet: there is no such thing\n"),
        (ConfigError("num_envs must be 1 or more"), 2, "envfleet: num_envs must be 1 or more\n"),
        (
            ValueError("bad\nthing"),
            1,
            "envfleet: ValueError: bad thing. Run again with --traceback to see where.\n",
        ),
        (KeyError(), 1, "envfleet: KeyError. Run again with --traceback to see where.\n"),
        (
            MissingExtra("it needs more: pip install more"),
            2,
            "envfleet: it needs more: pip install more\n",
        ),
        (KeyboardInterrupt(), 130, "envfleet: stopped\n"),
    ],
)
def test_errors_are_one_sentence(command, capsys, error, code, said):
    def run(args, context):
        raise error

    command(run)

    assert main(["try"]) == code
    captured = capsys.readouterr()
    assert captured.err == said
    assert captured.out == ""


def test_a_failure_is_a_document_too(command, capsys):
    def run(args, context):
        raise UsageError("no")

    command(run)

    assert main(["try", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["error"] == {"type": "UsageError", "message": "no"}


def test_bad_arguments_are_a_document_too(command, capsys):
    command(lambda args, context: report())

    assert main(["try", "--json", "--number", "0"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert "must be a whole number of at least 1, got 0" in captured.err


def test_the_traceback_is_shown_on_request(command, capsys):
    def run(args, context):
        raise ValueError("bad thing")

    command(run)

    assert main(["try", "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_warnings_are_one_line(command, capsys):
    def run(args, context):
        # pytest records warnings instead of showing them, so the format itself is asked
        text = warnings.formatwarning("\x1b[33mWARN: a\nb\x1b[0m", UserWarning, "f.py", 1)
        return Report(True, {}, (Text(text),))

    command(run)
    before = warnings.formatwarning

    assert main(["try"]) == 0
    assert capsys.readouterr().out == "envfleet: warning: a b\n"
    assert warnings.formatwarning is before


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_a_reader_who_leaves_is_no_failure(command, ok, code):
    read, write = os.pipe()
    os.close(read)
    command(lambda args, context: Report(ok, {}, (Text("all is done"),)))
    with open(write, "w") as pipe, contextlib.redirect_stdout(pipe):
        assert main(["try"]) == code
        pipe.write("and nobody minds what comes after it")


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--json"], 1)])
def test_a_report_that_cannot_be_written_is_one_sentence(command, capsys, words, code):
    command(lambda args, context: Report(True, {}, (Text("all is done"),)))
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert main(["try", *words]) == code
    said = "envfleet: the report cannot be printed: No space left on device\n"
    assert capsys.readouterr().err == said


def test_a_connection_that_a_command_lost_is_its_failure(command, capsys):
    def run(args, context):
        raise BrokenPipeError("the simulator is gone")

    command(run)
    assert main(["try"]) == 1
    assert "BrokenPipeError: the simulator is gone" in capsys.readouterr().err


def test_signs_that_a_stream_does_not_have_are_replaced():
    code = "import envfleet.cli.app as app; app.run(['train', '--env', 'mäze'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('ä')"],
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "?\n"


def test_unknown_commands_and_none_are_usage_errors(capsys):
    assert main(["bnech"]) == 2
    assert main([]) == 2
    assert "bench" in capsys.readouterr().err


def test_help_and_version(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("envfleet ")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) < 80
    for entry in app.COMMANDS:
        assert entry.summary in " ".join(out.split())


@pytest.mark.parametrize("name", [entry.name for entry in app.COMMANDS])
def test_every_command_explains_itself_with_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--json", "--plain", "--traceback"):
        assert option in out
    assert f"  envfleet {name}" in out
    assert max(len(line) for line in out.splitlines()) < 80


def test_only_the_named_command_is_imported():
    code = (
        "import sys\n"
        "from envfleet.cli import main\n"
        "main(['--help'])\n"
        "sys.exit('envfleet.cli.bench' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=30)

    assert done.returncode == 0


COMMON = {"--json", "--plain", "--traceback", "--help"}
MEASURING = {"--env-kwargs", "--num-envs", "--seconds", "--rounds", "--quick", "--start-method"}
YES_OR_NO = {
    f"--{no}{name}"
    for no in ("", "no-")
    for name in (
        "recipe",
        "anneal-learning-rate",
        "anneal-clip-range",
        "clip-values",
        "normalise-obs",
        "normalise-rewards",
        "orthogonal",
        "overlap",
        "tensorboard",
        "wandb",
        "video",
    )
}
TRAINING = YES_OR_NO | {
    "--env",
    "--policies",
    "--opening",
    "--config",
    "--checkpoint-dir",
    "--env-kwargs",
    "--n-envs",
    "--total-steps",
    "--num-episodes",
    "--seed",
    "--device",
    "--backend",
    "--ray-address",
    "--collect",
    "--max-staleness",
    "--slow-nodes",
    "--wrapper",
    "--num-workers",
    "--parallel-start-method",
    "--max-restarts",
    "--step-timeout-s",
    "--reset-timeout-s",
    "--save-every",
    "--keep-checkpoints",
    "--eval-every",
    "--eval-envs",
    "--eval-episodes",
    "--eval-max-steps",
    "--wandb-project",
    "--n-steps",
    "--batch-size",
    "--n-epochs",
    "--learning-rate",
    "--clip-range",
    "--gamma",
    "--gae-lambda",
    "--ent-coef",
    "--vf-coef",
    "--max-grad-norm",
    "--target-kl",
    "--hidden",
    "--activation",
    "--log-std",
    "--memory",
    "--memory-size",
}
PLAYING = {"--config-name", "--mode", "--seed"}
OPTIONS = {
    "train": TRAINING | {"--resume", "--live-verdict", "--trust"},
    "eval": {"--episodes", "--n-envs", "--seed", "--video"},
    "match": {"--games", "--opening", "--seed", "--backend", "--out", "--no-film"},
    "bench": MEASURING
    | {"--speedup", "--num-workers", "--autoreset", "--contenders", "--baseline"}
    | {"--backend", "--ray-address"},
    "tune": MEASURING | {"--max-workers"},
    "doctor": {"--ray-address"},
    "meta": {
        "--cfg",
        "--seed",
        "--cuda",
        "--num-parallel-workers",
        "--collect",
        "--ray-address",
        "--checkpoint-dir",
        "--resume",
        "--trust",
    },
    "rollout": PLAYING | {"--policy", "--out", "--resume"},
    "view": {"--port", "--no-browser"},
    "export": {"--form", "--out", "--advantage"},
    "verify train": TRAINING,
    "verify llm": PLAYING | {"--workers", "--start-methods"},
    "verify": {
        "--env-kwargs",
        "--num-envs",
        "--steps",
        "--seed",
        "--workers",
        "--start-methods",
        "--autoreset",
        "--backends",
        "--ignore-infos",
    },
}


def test_the_options_are_these():
    """Pinned, because changing one is a change for users."""
    parser = app.build_parser()
    commands: Any = next(a for a in parser._actions if a.dest == "command").choices

    found = {
        name: {
            option
            for action in command._actions
            for option in action.option_strings
            if option.startswith("--")
        }
        for name, command in commands.items()
    }

    assert found == {name: own | COMMON for name, own in OPTIONS.items()}


def test_tune_needs_no_more_than_the_environment():
    args = app.build_parser().parse_args(["tune", "CartPole-v1"])

    assert args.num_envs == NUM_ENVS


class TestTypes:
    def test_one_value(self):
        assert value_of(Count)("3") == 3
        for text in ("0", "x"):
            with pytest.raises(Exception, match=f"a whole number of at least 1, got {text}"):
                value_of(Count)(text)

    @pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "x"])
    def test_seconds(self, text):
        assert value_of(Seconds)("0.5") == 0.5
        with pytest.raises(Exception, match=f"must be positive seconds, got {text}"):
            value_of(Seconds)(text)

    def test_several_values(self):
        assert values_of(Count)("1, 2,2,") == (1, 2)
        with pytest.raises(Exception, match="at least one"):
            values_of(Count)(",")
        with pytest.raises(Exception, match="must be one of a, b; got c"):
            values_of(literal_of("a", "b"))("a,c")


def test_a_closed_stdout_is_no_error():
    asked = [sys.executable, "-c", "import sys; from envfleet.cli.app import run; sys.exit(run())"]
    command = shlex.join([*asked, "verify", "CartPole-v1", "--steps", "5"]) + " >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "NoneType" not in done.stderr
