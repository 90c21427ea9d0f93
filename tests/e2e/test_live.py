"""Training on a terminal as a person sees it: drawn, interrupted, failing, narrow, dumb."""

import json
import re
import sys
import time

from tests.e2e.terminal import Terminal

SMALL = [
    *["--env", "CartPole-v1", "--n-envs", "4", "--n-steps", "32", "--batch-size", "64"],
    *["--n-epochs", "2", "--hidden", "16", "--backend", "serial", "--eval-episodes", "2"],
]
LONG = [*SMALL, "--total-steps", "1e7", "--checkpoint-dir", "run", "--eval-every", "0"]
FINISHING = "Finishing this iteration; press Ctrl-C again to end at once"
NAMES = ["steps", "pace", "return", "evaluation", "time", "incidents", "run"]


def train(*words, folder, **settings):
    command = [sys.executable, "-m", "envfleet", "train", *map(str, words)]
    return Terminal(command, cwd=folder, **settings)


def names(screen):
    """The names on the left, which are there once unless an old view was left behind."""
    found = re.findall(r"^(\w+) +\S", screen.text, re.MULTILINE)
    return [name for name in found if name in NAMES]


def test_a_run_is_drawn_from_beginning_to_end(tmp_path):
    # Some seconds long on fast machines too: a shorter run may end before its second drawing.
    begun_s = time.monotonic()
    with train(*SMALL, "--total-steps", 102_400, folder=tmp_path) as terminal:
        terminal.until(lambda screen: re.search(r"steps +━+─+ +\d+%", screen.text))
        assert terminal.ends() == 0
        screen = terminal.screen
        assert names(screen) == NAMES
        assert re.search(r"steps +━+ 100%  102,400/102,400$", screen.text, re.MULTILINE)
        assert re.search(r"return +[▁-█]+ \d+\.\d\d  mean of the last 100 episodes", screen.text)
        assert re.search(r"evaluation +\d+\.\d\d ± \d+\.\d\d  at 102,400 steps  best", screen.text)
        assert re.search(r"█ [\w-]+ \d+%  ▓ [\w-]+ \d+%", screen.text)
        assert "Using 4 parallel environments for training\n   Start method: default" in screen.text
        assert screen.text.endswith("The report is runs/CartPole-v1-seed0/report.html")
        assert screen.colours > 0
        assert terminal.is_as_it_was
        assert len(terminal.raw) < 20_000 + 10_000 * (time.monotonic() - begun_s)


def test_ctrl_c_saves_and_gives_the_terminal_back(tmp_path):
    with train(*LONG, folder=tmp_path) as terminal:
        terminal.until(lambda screen: "steps/s" in screen.text)
        terminal.interrupt()
        assert terminal.ends() == 0
        assert terminal.is_as_it_was
        assert names(terminal.screen) == NAMES
        assert "    envfleet train --resume run" in terminal.screen.text
        assert (tmp_path / "run" / "latest.pt").exists()


def test_ctrl_c_twice_ends_at_once_and_gives_the_terminal_back(tmp_path):
    with train(*LONG, "--n-steps", "1e6", folder=tmp_path) as terminal:
        terminal.until(lambda screen: "in this process" in screen.text)
        terminal.interrupt()
        terminal.until(lambda screen: FINISHING in screen.text)
        terminal.interrupt()
        assert terminal.ends(10) == 130
        assert terminal.is_as_it_was
        assert terminal.screen.text.endswith("envfleet: stopped")
        assert "Traceback" not in terminal.screen.text


def test_a_terminal_that_goes_away_costs_the_view_only(tmp_path):
    words = [*SMALL, "--total-steps", 51_200, "--checkpoint-dir", "run"]
    with train(*words, folder=tmp_path) as terminal:
        terminal.until(lambda screen: "steps/s" in screen.text)
        terminal.close()
        assert terminal.process.wait(60) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["env_steps"], last["ended"]) == (51_200, "finished")
    assert (tmp_path / "run" / "report.html").exists()


BREAKS = """
import gymnasium
import warnings

class Breaks(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        warnings.warn("mind the step")
        raise RuntimeError("it broke")
"""


def test_an_error_and_what_is_written_meanwhile_stand_beside_the_view(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    words = ["--env", "breaks.py:Breaks", "--n-envs", "2", "--backend", "serial"]
    with train(*words, folder=tmp_path) as terminal:
        assert terminal.ends() == 1
        assert terminal.is_as_it_was
        text = terminal.screen.text
        assert names(terminal.screen) == NAMES
        assert text.index("envfleet: warning: mind the step") < text.index("breaks:Breaks · 2")
        assert text.index("runs/breaks_Breaks-seed0") < text.index("is quarantined. Last failure:")
        assert "Traceback" not in text


def test_a_narrow_window_without_colours(tmp_path):
    settings = {"columns": 36, "NO_COLOR": "1"}
    with train(*SMALL, "--total-steps", 2560, folder=tmp_path, **settings) as terminal:
        assert terminal.ends() == 0
        assert names(terminal.screen) == NAMES
        assert terminal.screen.colours == 0
        assert "100%" in terminal.screen.text


def test_a_terminal_that_cannot_redraw_gets_lines(tmp_path):
    words = [*SMALL, "--num-episodes", 10]
    with train(*words, folder=tmp_path, TERM="dumb") as terminal:
        assert terminal.ends() == 0
        assert "Episode 10/10" in terminal.screen.text
        assert names(terminal.screen) == []
        assert "\x1b[?25l" not in terminal.raw


def test_with_json_a_person_still_sees_the_run(tmp_path):
    line = [sys.executable, "-m", "envfleet", "train", *SMALL, "--num-episodes", "20", "--json"]
    with Terminal(["sh", "-c", f"{' '.join(line)} > out.json"], cwd=tmp_path) as terminal:
        assert terminal.ends() == 0
        assert names(terminal.screen) == NAMES
        written = (tmp_path / "out.json").read_text()
        assert written.count("\n") == 1
        assert json.loads(written)["env_steps"] == 2560
