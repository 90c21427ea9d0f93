"""`envfleet train` and `eval` as a user has them, with real signals."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envfleet.cli import main
from envfleet.runs.checkpoint import load

pytestmark = pytest.mark.timeout(500)
"""Several programs may be started by a test, each with a limit of its own."""

SMALL = [
    *["--env", "CartPole-v1", "--n-envs", "4", "--n-steps", "32", "--batch-size", "64"],
    *["--n-epochs", "2", "--hidden", "16", "--backend", "serial", "--eval-episodes", "2"],
]


def command(*words):
    return [sys.executable, "-m", "envfleet", *map(str, words)]


def run(*words, folder, code=0):
    done = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=120, cwd=folder, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done


def test_train_and_eval_give_one_json_line(tmp_path):
    trained = run("train", *SMALL, "--total-steps", 1024, "--json", folder=tmp_path).stdout
    assert trained.count("\n") == 1
    found = json.loads(trained)
    assert found["env_steps"] == 1024
    assert (tmp_path / found["report"]).is_file()
    assert {"seconds", "env_steps_per_second", "best_return", "verdict"} <= found.keys()
    assert found["run_dir"] == "runs/CartPole-v1-seed0"
    played = run("eval", found["run_dir"], "--episodes", 3, "--json", folder=tmp_path).stdout
    assert played.count("\n") == 1
    assert json.loads(played)["episodes"] == 3
    assert {"mean_return", "std_return"} <= json.loads(played).keys()
    more = ["--episodes", 3, "--n-envs", 2, "--json"]
    assert run("eval", found["run_dir"], *more, folder=tmp_path).stdout == played
    filmed = run("eval", found["run_dir"], "--episodes", 1, "--video", "--json", folder=tmp_path)
    assert (tmp_path / json.loads(filmed.stdout)["video"]).stat().st_size > 1000
    assert "<svg" in (tmp_path / found["report"]).read_text()


def test_make_run_trains_to_the_highest_return(tmp_path):
    printing = ["make", "--just-print", "--no-print-directory", "VENV=.venv"]
    asked = subprocess.run(
        [*printing, "--old-file=.venv/.installed-run", "run"],
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    (line,) = asked.stdout.splitlines()
    program, *words = shlex.split(line)
    assert program == ".venv/bin/envfleet"

    found = json.loads(run(*words, "--json", folder=tmp_path).stdout)

    assert found["best_return"] == 500
    assert (tmp_path / found["report"]).is_file()


def test_the_document_s_lines(tmp_path):
    printed = run("train", *SMALL, "--num-episodes", 10, folder=tmp_path).stdout
    assert "Recipe for CartPole-v1: " in printed
    assert "Using 4 parallel environments" in printed
    for words in ("Episode 10/10", "Reward:", "Length:", "Mean(100):", "n_completed_episodes:"):
        assert words in printed
    assert "n_envs: 4" in printed


def test_any_flag_overrides_the_recipe_and_no_recipe_leaves_it_out(tmp_path):
    few = ["--env", "CartPole-v1", "--num-episodes", 1, "--backend", "serial"]
    more = ["--gamma", 0.5, "--hidden", "32,32", "--no-anneal-clip-range", "--save-every", "1e4"]
    run("train", *few, *more, "--checkpoint-dir", "a", folder=tmp_path)
    run("train", *few, "--no-recipe", "--checkpoint-dir", "b", folder=tmp_path)
    one, other = (json.loads((tmp_path / name / "run.json").read_text())["ppo"] for name in "ab")
    assert (one["gamma"], one["n_epochs"], one["learning_rate"]) == (0.5, 20, 1e-3)
    assert (one["hidden"], one["anneal_clip_range"]) == ([32, 32], False)
    assert (other["gamma"], other["n_epochs"], other["learning_rate"]) == (0.99, 4, 2.5e-4)


def test_a_file_lies_over_the_recipe_and_flags_over_both(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "env: CartPole  # the newest\nn-envs: 2\nnum_episodes: 1\nbackend: serial\n"
        "learning_rate: 3e-4\ngamma: 0.5\nhidden: [16]\nseed: 3\ncheckpoint_dir: here\n"
    )
    run("train", "--config", "run.yaml", "--gamma", 0.6, folder=tmp_path)
    kept = json.loads((tmp_path / "here" / "run.json").read_text())
    assert {"env": "CartPole-v1", "n_envs": 2, "seed": 3}.items() <= kept["options"].items()
    assert {"learning_rate": 3e-4, "gamma": 0.6, "n_epochs": 20}.items() <= kept["ppo"].items()


def test_a_wrong_file_gets_one_sentence(tmp_path):
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nlearning_rat: 1\n")
    done = run("train", "--config", "run.yaml", "--json", folder=tmp_path, code=2)
    said = "run.yaml: there is no option 'learning_rat'; did you mean learning_rate?"
    assert done.stderr == f"envfleet: {said}\n"
    assert json.loads(done.stdout)["error"] == {"type": "ConfigError", "message": said}


MAZE = """
import gymnasium

class Maze(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size=2):
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.size
        return self.np_random.uniform(size=2).astype("float32"), {}

    def step(self, action):
        self.left -= 1
        return self.np_random.uniform(size=2).astype("float32"), 1.0, self.left == 0, False, {}
"""


def test_an_environment_of_one_s_own_is_found_again(tmp_path):
    (tmp_path / "maze.py").write_text(MAZE)
    words = ["--env", "maze.py:Maze", "--env-kwargs", '{"size": 5}', "--n-envs", 4, "--n-steps", 16]
    more = ["--num-episodes", 2, "--parallel-start-method", "spawn", "--num-workers", 2]
    run("train", *words, *more, "--checkpoint-dir", "run", folder=tmp_path)
    run("train", "--resume", "run", folder=tmp_path)
    played = run("eval", "run", "--episodes", 2, "--json", folder=tmp_path).stdout
    assert json.loads(played)["mean_return"] == 5.0


def test_a_module_beside_the_run_is_found_again_from_elsewhere(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "maze.py").write_text(MAZE)
    words = ["--env", "maze:Maze", "--n-envs", 2, "--n-steps", 16, "--num-episodes", 1]
    run("train", *words, "--backend", "process", "--checkpoint-dir", "run", folder=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    run("train", "--resume", "../run", "--num-episodes", 2, folder=elsewhere)
    played = run("eval", "../run", "--episodes", 2, "--n-envs", 2, "--json", folder=elsewhere)
    assert json.loads(played.stdout)["mean_return"] == 2.0


def test_eval_says_what_happened_in_words_of_the_command_line(tmp_path):
    fails = STUMBLES.replace("== 40", ">= 1 and (tmp / 'now').exists()").replace(
        "import gymnasium", f"import gymnasium, pathlib; tmp = pathlib.Path({str(tmp_path)!r})", 1
    )
    (tmp_path / "maze.py").write_text(fails)
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--n-steps", 16, "--num-episodes", 1]
    run("train", *words, "--backend", "serial", "--checkpoint-dir", "run", folder=tmp_path)
    (tmp_path / "now").touch()
    told = run("eval", "run", "--n-envs", 2, folder=tmp_path, code=1).stderr
    assert "in the last one it failed during step: ValueError: stumbled" in told
    assert "on_failure" not in told


STUMBLES = MAZE.replace(
    "self.left -= 1",
    """self.left -= 1
        self.made = getattr(self, "made", 0) + 1
        if self.made == 40:
            raise ValueError("stumbled")""",
)


def test_incidents_are_told_on_the_way_and_at_the_end(tmp_path):
    (tmp_path / "maze.py").write_text(STUMBLES)
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--n-steps", 16, "--num-episodes", 3]
    more = ["--backend", "serial", "--checkpoint-dir", "run"]
    printed = run("train", *words, *more, folder=tmp_path).stdout
    assert "  incidents: 2  |  these episodes are lost, the run goes on" in printed
    assert "\n2 incidents: see run/incidents.jsonl\n" in printed


def test_too_many_failures_name_the_files_and_the_flag(tmp_path):
    (tmp_path / "maze.py").write_text(STUMBLES.replace("== 40", ">= 40"))
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--n-steps", 16, "--num-episodes", 9]
    more = ["--backend", "serial", "--checkpoint-dir", "run", "--max-restarts", 0]
    told = run("train", *words, *more, folder=tmp_path, code=1).stderr
    assert "envfleet doctor replay run/incidents/0001-slot0.incident" in told
    assert "All are in run/incidents.jsonl" in told
    assert "raise --max-restarts" in told


WITHOUT_SEED = MAZE.replace("reset(self, *, seed=None, options=None)", "reset(self)").replace(
    "super().reset(seed=seed)", "super().reset()"
)
DOES_NOT_FIT = MAZE.replace("(size=2)", "(size=3)")


@pytest.mark.parametrize(
    ("source", "said"),
    [(WITHOUT_SEED, "an unexpected keyword argument 'seed'"), (DOES_NOT_FIT, "of shape (3,)")],
    ids=["without seed", "does not fit"],
)
def test_an_environment_that_cannot_be_reset_gets_one_sentence(source, said, tmp_path):
    (tmp_path / "maze.py").write_text(source)
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--backend", "serial"]
    told = run("train", *words, "--checkpoint-dir", "run", folder=tmp_path, code=1).stderr
    assert told.startswith("envfleet: maze:Maze cannot be used: its reset failed")
    assert said in told
    assert "incidents" not in told
    assert "reset(self, *, seed=None, options=None)" in told


@pytest.mark.parametrize("backend", ["serial", "auto"])
def test_a_run_with_nothing_to_learn_from_fails(backend, tmp_path):
    broken = MAZE.replace("self.left -= 1", 'raise ValueError("a joint is broken")')
    (tmp_path / "maze.py").write_text(broken)
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--n-steps", 16, "--num-episodes", 9]
    more = ["--backend", backend, "--checkpoint-dir", "run"]
    told = run("train", *words, *more, folder=tmp_path, code=1).stderr
    assert "the environments failed in each of 32 steps" in told
    assert "ValueError: a joint is broken. All failures are in run/incidents.jsonl" in told
    (noted,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(noted)["ended"].startswith("failed: there is nothing to learn from")
    assert len((tmp_path / "run" / "incidents.jsonl").read_text().splitlines()) == 32


@pytest.mark.parametrize("raised", ['SystemExit("bye")', "KeyboardInterrupt"])
def test_an_environment_that_exits_in_a_step_costs_its_episode(raised, tmp_path):
    exits = STUMBLES.replace('ValueError("stumbled")', raised).replace("== 40", "% 40 == 5")
    (tmp_path / "maze.py").write_text(exits)
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--n-steps", 64, "--num-episodes", 2]
    more = ["--eval-episodes", 9, "--checkpoint-dir", "run"]
    done = run("train", *words, *more, folder=tmp_path)
    name = raised.partition("(")[0]
    assert re.search(rf"worker processes \(\w+\), up to 1 each: step raised '{name}", done.stdout)
    assert "Evaluation at 256: 2.00" in done.stdout
    assert f"during step: {name}" in done.stderr


@pytest.mark.parametrize("backend", ["serial", "process", "auto"])
def test_an_environment_without_spaces_gets_one_sentence(backend, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [line for line in MAZE.splitlines() if "observation_space" not in line]
    (tmp_path / "bare.py").write_text("\n".join(lines).replace("Maze", f"Bare{backend}"))
    assert main(["train", "--env", f"bare.py:Bare{backend}", "--backend", backend]) == 2
    assert "has no observation_space; set observation_space" in capsys.readouterr().err
    sys.modules.pop("bare", None)


def test_eval_of_what_ends_its_process_is_a_sentence_once_it_has_failed(tmp_path):
    fatal = STUMBLES.replace('raise ValueError("stumbled")', "import os; os._exit(3)")
    (tmp_path / "maze.py").write_text(fatal)
    words = ["--env", "maze.py:Maze", "--n-envs", 2, "--n-steps", 16, "--num-episodes", 3]
    more = ["--backend", "process", "--checkpoint-dir", "run", "--eval-episodes", 1]
    run("train", *words, *more, folder=tmp_path)
    told = run("eval", "run", "--episodes", 50, folder=tmp_path).stdout
    assert told.endswith(
        "over 48 episodes\n\n2 episodes were lost, because the environment failed.\n"
    )
    (tmp_path / "maze.py").write_text(fatal.replace("== 40", ">= 1"))
    told = run("eval", "run", "--episodes", 2, folder=tmp_path, code=1).stderr
    assert "in the last one its process died during step (exit code 3)" in told
    assert "backend" not in told


def wait_for(path, seconds=30.0):
    limit_s = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < limit_s, f"{path} never came"
        time.sleep(0.02)


LONG = [*SMALL, "--total-steps", "1e6", "--save-every", "512", "--checkpoint-dir", "run"]


def test_a_killed_run_is_resumed(tmp_path):
    running = subprocess.Popen(command("train", *LONG), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "run" / "latest.pt")
    os.kill(running.pid, signal.SIGKILL)
    running.wait(60)
    going_on = subprocess.Popen(
        command("train", "--resume", "run"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert going_on.stdout is not None
    lines = iter(going_on.stdout.readline, "")
    assert any("Going on from " in line for line in lines)
    os.kill(going_on.pid, signal.SIGINT)
    rest, _ = going_on.communicate(timeout=90)
    assert going_on.returncode == 0
    assert "Finishing this iteration" in rest
    assert "envfleet train --resume run" in " ".join(rest.split())


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["lines", "json"])
def test_a_reader_who_leaves_costs_the_lines_only(words, tmp_path):
    running = subprocess.Popen(
        command("train", *SMALL, "--total-steps", 2560, "--checkpoint-dir", "run", *words),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if words else subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert any("parallel environments" in line for line in iter(running.stdout.readline, ""))
    running.stdout.close()
    assert running.wait(60) == 0
    assert running.stderr is None or running.stderr.read() == ""
    if running.stderr is not None:
        running.stderr.close()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["env_steps"], last["ended"]) == (2560, "finished")
    assert load(tmp_path / "run" / "latest.pt")["iteration"] == 20
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("number", "kill", "backend"),
    [
        (signal.SIGTERM, os.kill, "serial"),
        (signal.SIGTERM, os.kill, "process"),
        (signal.SIGTERM, os.killpg, "process"),
        (signal.SIGHUP, os.kill, "serial"),
        (signal.SIGHUP, os.killpg, "process"),
    ],
    ids=["serial", "workers", "workers-too", "hang-up", "workers-hang-up"],
)
def test_sigterm_finishes_the_iteration_and_saves(number, kill, backend, tmp_path):
    words = [*SMALL, "--total-steps", "1e7", "--save-every", "1e7", "--eval-every", "0"]
    running = subprocess.Popen(
        command("train", *words, "--backend", backend, "--checkpoint-dir", "run"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # where these tests run under nohup, it would be ignored
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert running.stdout is not None
    assert any("Iteration 10/" in line for line in iter(running.stdout.readline, ""))
    kill(running.pid, number)
    rest, stderr = running.communicate(timeout=300)
    assert running.returncode == 0, stderr
    assert "It was stopped; to go on:" in rest
    kept = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert kept["ended"] == "stopped"
    assert load(tmp_path / "run" / "latest.pt")["iteration"] == kept["iteration"] >= 10


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    slow = ["--env", "CartPole-v1", "--n-steps", "1e6", "--checkpoint-dir", "run"]
    running = subprocess.Popen(
        command("train", *slow, "--backend", "serial"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert any("parallel environments" in line for line in iter(running.stdout.readline, ""))
    os.kill(running.pid, signal.SIGINT)
    assert any("Finishing" in line for line in iter(running.stdout.readline, ""))
    os.kill(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env", "CartPol-v1"], "CartPole"),
        (["--env", "CartPole-v1", "--gamma", "2"], "gamma must be a number from 0 to 1, got 2"),
        (
            ["--env", "CartPole-v1", "--n-envs", "1.5"],
            "must be a whole number of at least 1, got 1.5",
        ),
        (["--env", "CartPole-v1", "--activation", "sine"], "activation must be one of"),
        (
            ["--env", "CartPole-v1", "--n-envs", "inf"],
            "must be a whole number of at least 1, got inf",
        ),
        (
            ["--env", "CartPole-v1", "--device", "nonsense"],
            "device must be auto, cpu, cuda, cuda:N or mps, got nonsense",
        ),
        (["--resume", "x", "--gamma", "0.5"], "leave out --gamma"),
        (["--resume", "x", "--no-recipe", "--config", "y"], "leave out --config, --no-recipe"),
        (["--resume", "nowhere"], "holds no run"),
        (["--env", "CartPole-v1", "--device", "mps"], "device 'mps' cannot be used here"),
        (["--env", "CartPole-v1", "--backend", "mpi"], "one of auto, serial, thread, process"),
        (["--env", "CartPole-v1", "--learnin-rate", "1"], "did you mean --learning-rate?"),
        (["--env", "CartPole-v1", "--lr", "3e-4"], "did you mean --learning-rate?"),
        (["--env", "CartPole-v1", "--timesteps", "9"], "did you mean --total-steps?"),
        (["--env", "CartPole-v1", "--total-timesteps", "9"], "did you mean --total-steps?"),
        (["--env", "CartPole-v1", "--steps", "9"], "did you mean --total-steps?"),
        (["--env", "CartPole-v1", "--normalize-obs"], "did you mean --normalise-obs?"),
        (["--resume", "~/no-such-run"], f"{Path.home()}/no-such-run does not exist"),
        (["--evn", "CartPole-v1"], "there is no --evn; did you mean --env?"),
        (["--env", "CartPole-v1", "--resume", "x"], "not allowed with argument"),
        ([], "say what to train on: --env CartPole-v1"),
        (
            ["--env", "CartPole-v1", "--total-steps", "9", "--num-episodes", "2"],
            "leave out one of them",
        ),
    ],
)
def test_wrong_words_get_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    is_asked_to_go_on = len(words) == 2 and words[0] == "--resume"
    assert main(["train", *words]) == (1 if is_asked_to_go_on else 2)

    told = capsys.readouterr()
    assert said in " ".join(told.err.split())
    assert "Traceback" not in told.err
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_built_is_named_with_its_arguments(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    assert main(["train", "--env", "CartPole-v1", "--env-kwargs", '{"sizze": 3}']) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert "CartPole-v1 cannot be built with {'sizze': 3}: TypeError" in said
    assert "traceback" not in said.lower()


def test_a_finished_run_says_so_and_a_video_that_cannot_be_made_costs_no_evaluation(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    env = ["--env", "envfleet.testing:Counter", "--n-envs", "2", "--backend", "serial"]
    short = ["--n-steps", "8", "--num-episodes", "1", "--checkpoint-dir", "run"]
    assert main(["train", *env, *short]) == 0
    capsys.readouterr()

    assert main(["train", "--resume", "run"]) == 0
    assert "nothing left to do: the run had made all its 16 steps" in capsys.readouterr().out

    assert main(["eval", "run", "--episodes", "2", "--video", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["episodes"], found["video"]) == (2, None)
    assert "there is no video" in told.err
