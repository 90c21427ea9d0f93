"""The command line as a user meets it: in processes of its own, in pipes and on terminals."""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.gates import PATIENCE_S

pytestmark = pytest.mark.timeout(300)
"""Several programs may be started by a test, each with a limit of its own."""

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()
ENVFLEET = (sys.executable, "-m", "envfleet")
WITHOUT_RICH = (
    sys.executable,
    "-c",
    "import sys; sys.modules['rich'] = None\n"
    "from envfleet.cli import main\n"
    "if __name__ == '__main__': sys.exit(main())",
)
QUICK = ("--steps", "5", "--num-envs", "2", "--workers", "1", "--start-methods", "fork")
FINE = ("--num-envs", "4", "--quick", "--rounds", "2", "--seconds", "0.02")


def environment():
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "COLUMNS": "100"}


def envfleet(*arguments, cwd=None, timeout=60):
    return subprocess.run(
        [*ENVFLEET, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(),
        check=False,
    )


def document(*arguments, code=0, cwd=None):
    done = envfleet(*arguments, "--json", cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def on_a_terminal(command, *arguments, timeout=60):
    """Run a command with a terminal for all three streams; its exit code and what was drawn."""
    pid, screen = pty.fork()
    if pid == 0:
        os.execve(command[0], [*command, *arguments], environment() | {"TERM": "xterm-256color"})
    drawn, deadline_s = b"", time.monotonic() + timeout
    try:
        while time.monotonic() < deadline_s:
            if select.select([screen], [], [], 0.1)[0]:
                try:
                    part = os.read(screen, 65536)
                except OSError:  # the other side is gone
                    break
                if not part:
                    break
                drawn += part
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(screen)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), drawn.decode()


AS_INSTALLED = (sys.executable, "-c", "from envfleet.cli import main\nraise SystemExit(main())")
"""What the script does that pip makes of the project's entry point."""


@pytest.mark.parametrize("command", [ENVFLEET, AS_INSTALLED], ids=["module", "script"])
@pytest.mark.parametrize("package", ["numpy", "gymnasium", "torch"])
def test_an_interrupt_while_importing_is_one_word(tmp_path, command, package):
    (tmp_path / f"{package}.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt as exc:  # as numpy does\n"
        "    raise ImportError('importing the C extensions failed') from exc\n"
    )
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"

    done = subprocess.run(
        [*command, "train", "--env", "CartPole-v1"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": path},
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "envfleet: stopped\n")


def last_screen(drawn):
    """The words that stay: without colours and without bars that were wiped."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    return [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]


class TestBench:
    def test_puts_everybody_side_by_side(self):
        found = document("bench", "CartPole-v1", *FINE, "--num-workers", "2")

        keys = {result["key"] for result in found["results"]}
        assert found["left_out"] == {}
        assert keys == {
            "loop",
            "gym-sync",
            "gym-async",
            "sb3-dummy",
            "sb3-subproc",
            "serial",
            "process",
            "process-halves",
            "auto",
        }
        for result in found["results"]:
            assert len(result["rates"]) == len(result["ratios"]) == 2
            assert result["steps_per_s"] > 0
            if result["key"].startswith("process"):
                assert 0 < result["shares"]["env"] <= 1
        assert found["conclusion"].startswith("Fastest here: ")
        assert found["auto_plan"]

    @pytest.mark.parametrize("env", ["my_env:GridWorld", "Blackjack-v1"])
    @pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
    def test_own_environments_and_tuple_observations(self, my_env, env, autoreset):
        contenders = "loop,gym-async,process,process-halves,thread"

        found = document(
            "bench", env, *FINE, "--contenders", contenders, "--autoreset", autoreset, cwd=my_env
        )

        assert {result["key"] for result in found["results"]} == set(contenders.split(","))

    def test_one_who_cannot_is_left_out(self, my_env):
        (my_env / "words.py").write_text(
            "import gymnasium\n"
            "from my_env import GridWorld\n"
            "def make():\n"
            "    space = gymnasium.spaces.Text(5)\n"
            "    return gymnasium.wrappers.TransformObservation(GridWorld(), str, space)\n"
        )

        found = document(
            "bench", "words:make", *FINE, "--contenders", "loop,process,sb3-dummy", cwd=my_env
        )

        assert {result["key"] for result in found["results"]} == {"loop", "process"}
        assert found["left_out"].keys() == {"sb3-dummy"}

    def test_an_interrupt_ends_everything(self):
        child = subprocess.Popen(
            [*ENVFLEET, "bench", "CartPole-v1", "--num-envs", "4", "--rounds", "100"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        family = psutil.Process(child.pid)
        deadline_s = time.monotonic() + 30
        while len(family.children(recursive=True)) < 8 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        children = family.children(recursive=True)

        # a terminal sends it to the whole group
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=60)

        assert child.returncode == 130
        assert errors.rstrip().endswith("envfleet: stopped")
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert alive == []


class TestTune:
    def test_its_line_runs_as_pasted(self, my_env):
        found = document("tune", "my_env:GridWorld", *FINE, "--max-workers", "2", cwd=my_env)

        code = found["advice"]["code"]
        assert "envfleet.make_vec(GridWorld, num_envs=4, backend=" in code
        pasted = "\n    ".join(["import envfleet", *code.splitlines(), "envs.reset(seed=0)"])
        (my_env / "pasted.py").write_text(
            f"if __name__ == '__main__':\n    {pasted}\n    envs.close()\n"
        )
        done = subprocess.run(
            [sys.executable, "pasted.py"], cwd=my_env, env=environment(), timeout=30, check=False
        )
        assert done.returncode == 0
        tried = {(one["backend"], one["num_workers"]) for one in found["results"]}
        assert ("serial", 1) in tried


class TestVerify:
    def test_an_honest_environment_passes(self):
        found = document(
            *("verify", "CartPole-v1", "--steps", "60"),
            *("--workers", "2", "--start-methods", "fork"),
        )

        assert found["conclusion"] == "All 11 runs equal the plain loop, bit by bit."

    def test_every_start_method_passes(self):
        found = document(
            *("verify", "CartPole-v1", "--steps", "60", "--workers", "2", "--backends", "process"),
            *("--start-methods", "fork,spawn,forkserver", "--autoreset", "next_step"),
        )

        assert found["conclusion"] == "All 4 runs equal the plain loop, bit by bit."

    def test_global_random_state_fails(self):
        found = document(
            *("verify", "envfleet.testing:GlobalRandom", "--steps", "20", "--workers", "2"),
            *("--start-methods", "fork", "--autoreset", "next_step"),
            code=1,
        )

        assert "self.np_random" in found["global_random"]

    def test_an_environment_that_shares_state_is_told_where(self):
        found = document(
            *("verify", "envfleet.testing:SharesState", "--steps", "20", "--workers", "2"),
            *("--start-methods", "fork", "--autoreset", "next_step"),
            code=1,
        )

        assert re.search(r"slot \d+, step \d+, field \w+", found["conclusion"])


class TestVerifyTrain:
    SMALL = ("--n-envs", "4", "--num-episodes", "2", "--n-steps", "16", "--hidden", "16")

    def test_training_repeats_itself_in_other_processes(self):
        found = document("verify", "train", "--env", "CartPole-v1", *self.SMALL)

        assert found["equal"] is True
        assert found["compared"]["transitions"] == 2 * 16 * 4
        assert [one["backend"] for one in found["runs"]] == ["serial", "process"]

    def test_global_random_state_is_told_where(self):
        found = document(
            *("verify", "train", "--env", "envfleet.testing:GlobalRandom", *self.SMALL), code=1
        )

        place = {"iteration": 1, "step": 0, "slot": 0, "field": "obs"}
        assert place.items() <= found["parting"].items()
        assert "in iteration 1, step 0, slot 0: obs is" in found["conclusion"]


class TestTextEnvironments:
    """An environment of one's own, in a file that a configuration names."""

    STAIRS = """
import random
from dataclasses import dataclass, field
from envfleet.llm import TextEnv, TextEnvConfig

@dataclass(slots=True, kw_only=True)
class StairsConfig(TextEnvConfig):
    action_lookup: dict[int, str] | None = field(default_factory=lambda: {1: "Up", 2: "Down"})
    height: int = 3

class Stairs(TextEnv):
    config_class = StairsConfig

    def _begin(self, seed, mode):
        print("it begins")
        self._floor = seed % self.config.height

    def _act(self, action):
        self._floor += 1 if action == 1 else -1
        is_up = self._floor >= self.config.height
        return self._text(), float(is_up), is_up, False, {"success": is_up}

    def _text(self):
        return f"floor {self._floor} of {self.config.height}"

class Careless(Stairs):
    def _begin(self, seed, mode):
        super()._begin(seed + random.randint(0, 9), mode)
"""
    MINE = """
defaults: [base]
es_manager:
  train: {env_groups: 2, group_size: 2, env_configs: {tags: [Tower], n_groups: [2]}}
custom_envs:
  Tower: {env_type: "games/stairs.py:Stairs", max_actions_per_traj: 9, env_config: {height: 5}}
"""

    @pytest.fixture
    def mine(self, tmp_path):
        (tmp_path / "games").mkdir()
        (tmp_path / "games/stairs.py").write_text(self.STAIRS)
        (tmp_path / "mine.yaml").write_text(self.MINE)
        return tmp_path

    def test_are_played(self, mine):
        found = document("rollout", "--config-name", "mine.yaml", "--policy", "first", cwd=mine)

        (tower,) = found["tags"]
        assert (tower["num_envs"], tower["success"]) == (4, 1.0)

    def test_are_proved_in_workers_of_every_kind(self, mine):
        found = document("verify", "llm", "--config-name", "mine", "--workers", "2", cwd=mine)

        assert found["conclusion"].startswith("All 11 ways gave the rollout of one loop")

    def test_are_told_what_is_wrong_with_them(self, mine):
        found = document(
            *("verify", "llm", "--config-name", "mine", "--workers", "2"),
            *("--start-methods", "fork", "custom_envs.Tower.env_type=games/stairs.py:Careless"),
            code=1,
            cwd=mine,
        )

        assert "Tower draws from Python's global state" in found["global_random"]


class TestReplay:
    def test_a_real_incident(self, my_env):
        scripts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        (my_env / "crash.py").write_text(next(s for s in scripts if "crash.incident" in s))
        subprocess.run(
            [sys.executable, "crash.py"], cwd=my_env, env=environment(), timeout=60, check=True
        )

        found = document("doctor", "replay", "crash.incident", cwd=my_env)

        assert found["reproduced"] is True
        assert found["steps"] > 0


class TestScreens:
    def test_a_terminal_gets_a_bar_and_a_table(self):
        arguments = ("bench", "CartPole-v1", *FINE, "--contenders", "loop,gym-sync,process")

        code, drawn = on_a_terminal(ENVFLEET, *arguments)

        assert code == 0, drawn
        assert "plain for loop" in drawn
        assert re.search(r"\d+/9", drawn), "no progress was drawn"
        assert "\x1b[" in drawn
        lines = last_screen(drawn)
        header = next(line for line in lines if line.startswith("contender"))
        assert header.split() == [
            *("contender", "steps/s", "ratio", "+-", "in", "env", "waiting", "copying")
        ]
        rows = [line for line in lines if re.search(r"\d+\.\d\dx", line)]
        assert len(rows) == 3
        # right-aligned numbers under their names
        assert {line.index("x ") + 1 for line in rows} == {header.index("ratio") + len("ratio")}
        assert any(line.startswith("Fastest here: ") for line in lines)

    def test_a_terminal_needs_rich_unless_plain_text_will_do(self):
        code, drawn = on_a_terminal(WITHOUT_RICH, "doctor", "replay", "no-such-file")
        assert code == 2
        assert "pip install 'envfleet[cli]', or add --plain" in " ".join(drawn.split())

        code, drawn = on_a_terminal(WITHOUT_RICH, "verify", "CartPole-v1", "--plain", *QUICK)
        assert code == 0, drawn
        assert "runs equal the plain loop" in drawn
        assert "\x1b[" not in drawn

    def test_a_pipe_gets_neither_bars_nor_colours(self):
        done = envfleet("bench", "CartPole-v1", *FINE, "--contenders", "loop,gym-sync")

        assert done.returncode == 0
        assert done.stderr == ""
        assert "\x1b" not in done.stdout
        assert "\r" not in done.stdout

    def test_a_reader_may_leave(self):
        command = f"{sys.executable} -m envfleet verify --help | head -1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=30,
            check=False,
        )

        assert done.returncode == 0
        assert done.stderr == ""


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("bench", "Cartpole"), "did you mean CartPole-v1?"),
            (
                ("bench", "CartPole-v1", "--num-envs", "0"),
                "must be a whole number of at least 1, got 0",
            ),
            (("bench", "CartPole-v1", "--seconds", "-1"), "must be positive seconds, got -1"),
            (
                ("bench", "CartPole-v1", "--contenders", "puffer"),
                "--contenders must be one of loop, gym-sync",
            ),
            (("verify", "CartPole-v1", "--workers", "two"), "at least 1, got two"),
            (
                ("verify", "CartPole-v1", "--start-methods", "teleport"),
                "must be one of fork, spawn",
            ),
            (("doctor", "replay", "no-such-file"), "there is no file no-such-file"),
            (("doctor", "replay", __file__), "is not an incident file"),
            (("brench", "CartPole-v1"), "there is no command 'brench'; did you mean bench?"),
            (("tune", "CartPole-v1", "--num-env", "4"), "did you mean --num-envs?"),
            (("doctor", "--jsn"), "there is no --jsn; did you mean --json?"),
            (("doctor", "repaly", "x"), "there is no command 'repaly'; did you mean replay?"),
            (("doctor", "replay", "x", "--in-proces"), "did you mean --in-process?"),
            (("--versoin",), "did you mean --version?"),
        ],
    )
    def test_are_answered_in_one_sentence(self, arguments, said):
        done = envfleet(*arguments)

        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def test_an_environment_that_fails_is_named(self):
        done = envfleet("bench", "envfleet.testing:FailingConstructor", *FINE)

        assert done.returncode == 2
        assert "envfleet.testing:FailingConstructor cannot be built" in done.stderr
        assert "Traceback" not in done.stderr


def commands_of_the_page():
    """Every ``$ envfleet ...`` of the page, with the lines that follow and its exit code."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *rest = example.splitlines()
            code = next((int(line[6:-1]) for line in rest if line.startswith("[exit ")), 0)
            yield command, [line for line in rest if line and not line.startswith("[exit ")], code


@pytest.fixture
def my_env(tmp_path):
    """A directory with the page's own environment in it."""
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert script is not None
    (tmp_path / "my_env.py").write_text(script.group(1))
    config = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert config is not None
    (tmp_path / "run.yaml").write_text(config.group(1))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "expected", "code"),
    [pytest.param(*example, id=example[0]) for example in commands_of_the_page()],
)
def test_every_example_of_the_page_runs(my_env, command, expected, code):
    if "crash.incident" in command:
        scripts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        with contextlib.chdir(my_env):
            Path("crash.py").write_text(next(s for s in scripts if "crash.incident" in s))
        subprocess.run(
            [sys.executable, "crash.py"], cwd=my_env, env=environment(), timeout=60, check=True
        )

    if command.startswith("envfleet eval"):
        done = envfleet("train", "--config", "run.yaml", "--backend", "serial", cwd=my_env)
        assert done.returncode == 0, done.stderr

    if command.startswith("envfleet match"):
        made = next(
            one for one, *_ in commands_of_the_page() if "--checkpoint-dir runs/agents" in one
        )
        done = envfleet(*shlex.split(made)[1:], cwd=my_env)
        assert done.returncode == 0, done.stderr

    if "runs/bandit-seed123" in command:
        made = next(one for one, *_ in commands_of_the_page() if "--policy llm" in one)
        done = envfleet(*shlex.split(made)[1:], cwd=my_env)
        assert done.returncode == 0, done.stderr

    # also in the second of two commands on one line
    command = re.sub(r"(^|; )envfleet ", rf"\1{sys.executable} -m envfleet ", command)
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=my_env,
        env=environment(),
        timeout=60,
        check=False,
    )

    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for line in expected:
        assert line in (done.stdout + done.stderr).splitlines()
