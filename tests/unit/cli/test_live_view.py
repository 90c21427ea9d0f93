"""The live view: what a person sees at any width, and what looking costs."""

import io
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from envfleet.cli.line_view import FINISHING
from envfleet.cli.live_view import (
    BAR,
    LABEL,
    MOST_SHARE,
    RATE_OVER_S,
    REDRAW_S,
    SPARKS,
    Facts,
    LiveView,
    pause_s,
    sparkline,
    split_bar,
    view_rows,
)
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train import TrainOptions, train
from envfleet.runs.callbacks import Evaluation, Iteration
from envfleet.runs.time_report import Setup, verdict_so_far

SECONDS = {"environments": 20.0, "inference": 10.0, "learning": 68.0, "evaluation": 2.0}


def facts(**known):
    return Facts(
        "CartPole-v1 · 8 environments · seed 0", Path("runs/x"), 400, 102_400, 25_000, **known
    )


def halfway():
    found = facts(
        begun_s=100.0,
        iteration=200,
        mean_returns=[float(n) for n in range(200)],
        evaluation=(50_000, 487.2, 12.5),
        best=499.0,
        seconds=SECONDS,
        incidents=2,
    )
    found.pace(100.0, 0)
    found.pace(130.0, 51_200)
    return found


def text_of(found, now_s=130.0, width=80):
    return [
        f"{name:<{LABEL}}" * bool(name) + "".join(part for part, _ in parts)
        for name, parts in view_rows(found, now_s, width)
    ]


def test_a_run_halfway():
    assert [line.rstrip() for line in text_of(halfway())] == [
        "CartPole-v1 · 8 environments · seed 0",
        "steps      ━━━━━━━━━━━━━━━━━━──────────────────  50%  51,200/102,400  0:30 left",
        "pace       1,707 steps/s  iteration 200/400  0:30 so far",
        "return     " + sparkline(range(200), 31) + " 199.00  mean of the last 100 episodes",
        "evaluation 487.20 ± 12.50  at 50,000 steps  best 499.00",
        "time       " + "█" * 24 + "▓" * 8 + "▒" * 3 + "░",
        "           █ learning 68%  ▓ environments 20%  ▒ inference 10%  ░ evaluation 2%",
        "incidents  2  these episodes are lost, the run goes on",
        "run        runs/x",
    ]


def test_a_run_that_has_not_begun():
    assert [line.rstrip() for line in text_of(facts())] == [
        "CartPole-v1 · 8 environments · seed 0",
        "steps      " + "─" * BAR + "   0%  0/102,400",
        "pace       iteration 0/400  0:00 so far",
        "return     no episode has ended yet",
        "evaluation the first at 25,000 steps",
        "time       -",
        "incidents  none",
        "run        runs/x",
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_nothing_is_cut_off_in_a_window_of_usual_size(width):
    assert max(map(len, text_of(halfway(), width=width))) <= width + 2


@pytest.mark.parametrize("width", [1, 12, 20, 40, 60])
def test_bars_give_way_in_a_narrow_window(width):
    lines = text_of(halfway(), width=width)

    assert len(lines) >= 9
    assert len(lines[5]) <= max(width, LABEL)


def test_going_on_with_a_run_counts_the_new_steps_only():
    found = facts(begun_s=0.0, start_steps=51_200)
    found.pace(0.0, 51_200)
    found.pace(10.0, 61_440)

    assert "60%" in text_of(found, now_s=10.0)[1]
    assert "0:40 left" in text_of(found, now_s=10.0)[1]
    assert "1,024 steps/s" in text_of(found, now_s=10.0)[2]


def test_the_best_is_that_of_the_whole_run(tmp_path, monkeypatch):
    options = TrainOptions(
        "CartPole-v1", n_envs=2, num_episodes=4, backend="serial", eval_every=32, save_every=1
    )
    ppo, returns = PPOOptions(n_steps=8, batch_size=16), iter((90.0, 20.0))
    monkeypatch.setattr(
        "envfleet.learn.train.evaluate", lambda *_, **__: Evaluation((next(returns),))
    )
    first = LiveView(io.StringIO(), options, ppo, tmp_path)
    monkeypatch.setattr(first, "should_stop", lambda: first.facts.evaluation is not None)
    with first:
        train(options, ppo, tmp_path, first)
    second = LiveView(io.StringIO(), options, ppo, tmp_path)
    seen = []
    monkeypatch.setattr(second, "iterated", lambda _: seen.append(text_of(second.facts)[4]))
    with second:
        train(options, ppo, tmp_path, second, is_resumed=True)

    assert seen == ["evaluation best 90.00  so far"]
    assert text_of(second.facts)[4] == "evaluation 20.00 ± 0.00  at 64 steps  best 90.00"


def test_the_pace_is_that_of_the_last_seconds():
    found = facts(begun_s=0.0)
    for second in range(100):
        found.pace(float(second), second * (10 if second < 50 else 20))

    assert found.paces[0][0] >= 99 - RATE_OVER_S
    assert "20 steps/s" in text_of(found, now_s=99.0)[2]


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([1.0], 0, ""),
        ([5.0, 5.0], 10, "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, SPARKS),
        ([0, 0, 7, 7], 2, "▁█"),
        ([-3.0, 4.0], 9, "▁█"),
    ],
)
def test_sparkline(values, width, line):
    assert sparkline(values, width) == line


def test_a_sparkline_shows_every_value():
    spike = [0.0] * 999 + [1.0]

    assert sparkline(spike, 7).endswith("█")
    assert len(sparkline(spike, 7)) == 7


@pytest.mark.parametrize("size", [1, 5, 11, 36, 70])
@pytest.mark.parametrize("parts", [3, 5, 9])
def test_a_split_fills_its_bar(size, parts):
    bar, _ = split_bar({f"p{n}": 1.0 + n for n in range(parts)}, size)

    assert sum(len(shade) for shade, _ in bar) == min(size, BAR)


def test_many_parts_are_named_in_several_lines():
    _, legend = split_bar({f"part {n}": 2.0**n for n in range(10)}, 40)

    assert ["".join(text for text, _ in line).rstrip() for line in legend] == [
        "█ part 9 50%  ▓ part 8 25%  ▒ part 7 13%",
        "░ part 6 6%  ▪ part 5 3%  · part 4 2%",
        "· part 3 1%",
    ]


def test_drawing_holds_itself_to_its_share():
    assert pause_s(0.0) == REDRAW_S
    for spent_s in (0.002, 0.02, 0.5):
        assert spent_s / (spent_s + pause_s(spent_s)) <= MOST_SHARE


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    options = TrainOptions("CartPole-v1", n_envs=4, total_steps=1024)
    return LiveView(screen, options, PPOOptions(n_steps=32), Path("runs/x")), screen


def words(screen):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def wait_for(text, screen):
    limit_s = time.monotonic() + 10
    while text not in words(screen):
        assert time.monotonic() < limit_s, words(screen)
        time.sleep(0.02)


def envs(plan="A plan."):
    return SimpleNamespace(plan=plan)


class TestDrawing:
    def test_a_run_is_drawn_while_nobody_tells_anything(self, live):
        view, screen = live
        threads = threading.active_count()
        with view:
            assert "starting the environments" in words(screen)
            assert threading.active_count() == threads
            view.begun(envs(), 0)
            wait_for("A plan.", screen)
            told = Iteration(
                number=1,
                of=8,
                env_steps=128,
                episodes=[(7.0, 7)],
                mean_return=7.0,
                seconds=SECONDS,
                incidents=1,
            )
            view.iterated(told)
            wait_for("128/1,024", screen)
            wait_for("incidents  1", screen)
            view.evaluated(128, Evaluation((9.0, 11.0)))
            wait_for("10.00 ± 1.00", screen)
            view.evaluated(256, Evaluation((5.0,)))
            wait_for("best 10.00", screen)
        assert threading.active_count() == threads
        assert screen.getvalue().rstrip().endswith("\x1b[?25h")

    def test_the_last_view_stays_and_is_the_newest(self, live):
        view, screen = live
        with view:
            view.begun(envs(), 0)
            view.iterated(Iteration(number=8, of=8, env_steps=1024, seconds=SECONDS))
        assert "100%  1,024/1,024" in words(screen).rpartition("steps ")[2]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
    def test_the_terminal_is_given_back_however_it_ends(self, live, error):
        view, screen = live
        threads = threading.active_count()

        def fails():
            with view:
                view.begun(envs(), 0)
                raise error

        with pytest.raises(error):
            fails()
        assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1
        assert threading.active_count() == threads

    def test_a_terminal_that_is_gone_ends_the_drawing_not_the_run(self, live, monkeypatch):
        view, _ = live
        with view:
            view.begun(envs(), 0)
            with monkeypatch.context() as patch:
                patch.setattr(view, "_draw", self.gone)
                limit_s = time.monotonic() + 10
                while any(one.name == "envfleet-live" for one in threading.enumerate()):
                    assert time.monotonic() < limit_s
                    time.sleep(0.02)
            view.iterated(Iteration(number=1, of=8, env_steps=128, seconds=SECONDS))

    @staticmethod
    def gone():
        raise OSError(5, "Input/output error")

    def test_ctrl_c_is_told_in_the_view(self, live):
        view, screen = live
        with view:
            view.begun(envs(), 0)
            assert not view.should_stop()
            view._stop_requests._hear(2, None)
            assert view.should_stop()
            wait_for(FINISHING, screen)

    def test_the_verdict_so_far_stands_below_on_request(self, live):
        view, screen = live
        view._shows_verdict = True
        with view:
            view.begun(envs(), 0)
            assert "So far" not in words(screen)
            said = verdict_so_far({"learning": 3.0, "waiting": 1.0}, Setup())
            view.iterated(Iteration(number=1, of=8, env_steps=128, verdict=said))
            wait_for("So far 75% learning: more environments will not help", screen)

    def test_what_runs_where_stands_above_the_view(self, live):
        view, screen = live
        with view:
            view.begun(envs(), 512)
        text = words(screen)
        lines = ["Using 4 parallel environments for training", "   Start method: default"]
        lines += ["   A plan.", "   Going on from 512 steps", "CartPole-v1 · 4 environments"]
        places = [text.rindex(line) for line in lines]
        assert places == sorted(places)
        assert text.count("A plan.") == 1

    def test_an_evaluation_is_told_while_it_takes_its_time(self, live):
        view, screen = live
        with view:
            view.begun(envs(), 0)
            view.evaluating(128)
            wait_for("Evaluating: 10 episodes of up to 500 steps", screen)
            view.evaluated(128, Evaluation((1.0,)))
            assert view.facts.note == ""
            view._stop_requests._hear(2, None)
            view.evaluating(256)
            assert view.facts.note == FINISHING
