"""A run as lines of text: the lines that are promised."""

import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from envfleet.cli.ctrl_c import StopRequests, exit_on_ctrl_c
from envfleet.cli.line_view import (
    FINISHING,
    LOST,
    LineView,
    begin_lines,
    clock_text,
    iteration_lines,
)
from envfleet.learn.train_options import TrainOptions
from envfleet.runs.callbacks import Evaluation, Iteration
from envfleet.runs.time_report import Setup, verdict_so_far

OPTIONS = TrainOptions("CartPole-v1", n_envs=8, num_episodes=1000)


def iteration(number=10, of=1000, episodes=((99.0, 12), (123.45, 234)), mean=120.12, incidents=0):
    return Iteration(
        number=number,
        of=of,
        env_steps=256 * number,
        episodes=list(episodes),
        mean_return=mean,
        seconds={},
        incidents=incidents,
    )


def test_an_iteration_is_told_in_these_lines():
    assert iteration_lines(iteration(episodes=((1.0, 2),) * 2 + ((123.45, 234),)), 8, 512.0) == [
        "Iteration 10/1000",
        "  Reward:   123.45  |  Length:  234  |  Mean(100):   120.12",
        "  n_completed_episodes: 3  |  n_envs: 8",
        "  env_steps: 2,560  |  steps/s: 512  |  left: 8:15",
    ]


def test_an_iteration_in_which_no_episode_ended():
    lines = iteration_lines(iteration(episodes=(), mean=None), 8, 512.0)

    assert lines[1] == "  Reward:        -  |  Length:    -  |  Mean(100):        -"
    assert lines[2] == "  n_completed_episodes: 0  |  n_envs: 8"


@pytest.mark.parametrize(
    ("n_envs", "method", "steps", "said"),
    [
        (
            8,
            None,
            0,
            [
                "Using 8 parallel environments for training",
                "   Start method: default",
                "   A plan.",
            ],
        ),
        (
            1,
            "spawn",
            512,
            [
                "Using one environment for training",
                "   Start method: spawn",
                "   A plan.",
                "   Going on from 512 steps",
            ],
        ),
    ],
)
def test_the_beginning(n_envs, method, steps, said):
    options = TrainOptions("CartPole-v1", n_envs=n_envs, parallel_start_method=method)

    assert begin_lines(options, "A plan.", steps) == said


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (("pickle",), "Environments are kept in checkpoints by their pickles"),
        (("own", "replay"), "by their own state methods and their seeds and actions, to be"),
        ((), "Environments cannot be kept in checkpoints: going on begins new episodes"),
    ],
)
def test_how_environments_are_kept_is_told_at_the_beginning(methods, said):
    stream = io.StringIO()
    lines = LineView(stream, OPTIONS)
    lines.kept_by(methods)
    lines.begun(SimpleNamespace(plan="A plan."), 0)  # type: ignore[arg-type]
    assert said in stream.getvalue().splitlines()[-1]
    lines.kept_by(())
    assert "Environments cannot be kept" in stream.getvalue().splitlines()[-1]


def test_every_tenth_iteration_and_the_last_are_shown():
    stream = io.StringIO()
    lines = LineView(stream, OPTIONS)
    lines.begun(SimpleNamespace(plan="A plan."), 0)  # type: ignore[arg-type]
    for number in range(1, 26):
        lines.iterated(iteration(number, of=25))
    lines.evaluating(6400)
    lines.evaluated(6400, Evaluation((1.0, 3.0)))

    said = stream.getvalue().splitlines()
    assert [line for line in said if line.startswith("Episode")] == [
        "Episode 10/25",
        "Episode 20/25",
        "Episode 25/25",
    ]
    assert said.count("Parallel mode: 8 environments") == 1
    assert said[-2:] == [
        "Evaluating: 10 episodes of up to 500 steps",
        "Evaluation at 6,400: 2.00 +- 1.00",
    ]


def test_an_evaluation_of_a_game_says_how_many_were_won():
    stream = io.StringIO()
    lines = LineView(stream, OPTIONS)
    lines.evaluated(6400, Evaluation((1.0, 1.0), figures={"win_rate_random": 0.955}))
    assert stream.getvalue().splitlines() == [
        "Evaluation at 6,400: 1.00 +- 0.00  |  won against random: 95.5%"
    ]


def test_incidents_are_counted_whenever_there_are_more():
    stream = io.StringIO()
    lines = LineView(stream, OPTIONS)
    for number, incidents in ((10, 0), (19, 3), (20, 3), (30, 3), (40, 5)):
        lines.iterated(iteration(number, incidents=incidents))

    told = [line for line in stream.getvalue().splitlines() if "incidents" in line]
    assert told == [f"  incidents: {number}  |  {LOST}" for number in (3, 5)]


def test_the_verdict_so_far_is_told_on_request():
    told = []
    for shows in (False, True):
        stream = io.StringIO()
        lines = LineView(stream, OPTIONS, shows_verdict=shows)
        lines.iterated(iteration())
        said = verdict_so_far({"learning": 3.0, "inference": 1.0}, Setup())
        lines.iterated(replace(iteration(20), verdict=said))
        told.append([line for line in stream.getvalue().splitlines() if "so far" in line])

    assert told[0] == []
    assert told[1] == [
        "  so far 75% learning: more environments will not help; try a GPU (at most 4.0 times as "
        "fast) or minibatches twice as large (at most 1.6 times)"
    ]


def test_one_environment_is_not_called_parallel():
    stream = io.StringIO()
    LineView(stream, TrainOptions("CartPole-v1", n_envs=1)).iterated(iteration())

    assert "Parallel" not in stream.getvalue()
    assert "Sequential mode: 1 environment" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3723, "1:02:03")]
)
def test_clock(seconds, text):
    assert clock_text(seconds) == text


def test_lines_that_nobody_reads_are_let_go():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        lines = LineView(stream, OPTIONS)
        for number in (10, 20):
            lines.iterated(iteration(number))
        stream.write("what others write is let go too")


class TestInterrupts:
    @pytest.mark.parametrize("others", [signal.SIG_IGN, lambda number, frame: None])
    def test_who_ignores_them_or_hears_them_is_left_alone(self, others):
        before = signal.signal(signal.SIGINT, others)
        try:
            with exit_on_ctrl_c():
                assert signal.getsignal(signal.SIGINT) is others
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)

    def test_importing_in_a_thread_changes_nothing(self):
        def enter():
            with exit_on_ctrl_c():
                return signal.getsignal(signal.SIGINT)

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(enter).result() is signal.default_int_handler

    def test_after_imports_they_mean_what_they_did(self):
        with exit_on_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    def test_the_first_asks_and_the_second_ends(self):
        said = []
        before = signal.getsignal(signal.SIGINT)
        with StopRequests(lambda: said.append("first")) as interrupts:
            assert not interrupts.is_asked
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.is_asked
            assert said == ["first"]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert said == ["first"]
        assert signal.getsignal(signal.SIGINT) is before

    @pytest.mark.parametrize("numbers", [(signal.SIGTERM,) * 2, (signal.SIGTERM, signal.SIGINT)])
    def test_sigterm_is_heard_as_ctrl_c_is(self, numbers):
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with StopRequests(lambda: None) as interrupts:
                os.kill(os.getpid(), numbers[0])
                assert interrupts.is_asked
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), numbers[1])
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_terminal_that_is_closed_asks_however_often_it_tells(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            with StopRequests(lambda: None) as interrupts:
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGHUP)
                assert interrupts.is_asked
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_who_was_told_to_outlive_the_terminal_does(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with StopRequests(lambda: None) as interrupts:
                os.kill(os.getpid(), signal.SIGHUP)
                assert not interrupts.is_asked
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_lines_say_so_and_stop(self):
        stream = io.StringIO()
        with LineView(stream, OPTIONS) as lines:
            assert not lines.should_stop()
            os.kill(os.getpid(), signal.SIGINT)
            assert lines.should_stop()
        assert stream.getvalue() == FINISHING + "\n"

    def test_a_stream_that_is_being_written_to_is_left_alone(self):
        class Busy(io.StringIO):
            def write(self, text):
                raise RuntimeError("reentrant call")

        with LineView(Busy(), OPTIONS) as lines:
            os.kill(os.getpid(), signal.SIGINT)
            assert lines.should_stop()
