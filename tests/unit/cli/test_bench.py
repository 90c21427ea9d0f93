"""What ``bench`` concludes from numbers, and how it shows them."""

import io

import pytest

from envfleet.cli.bench import KEYS, bench_blocks, bench_conclusion, contenders_for, result_json
from envfleet.cli.contenders import Workload
from envfleet.cli.env_argument import choose_env
from envfleet.cli.measure import Result, Shares, duration
from envfleet.cli.screen import PlainScreen


def result(key, rate, shares=None, base=1000.0):
    return Result(key, f"the {key}", (rate,) * 3, (rate / base,) * 3, shares)


def sentence(*results, num_envs=64, num_workers=2, cores=2):
    ordered = sorted(results, key=lambda one: -one.rate)
    return bench_conclusion(ordered, num_envs=num_envs, num_workers=num_workers, cores=cores)


LOOP = result("loop", 1000.0)
BUSY = Shares(0.83, 0.1, 0.05)


def test_halves_win_because_they_overlap():
    text = sentence(LOOP, result("process", 1500, BUSY), result("process-halves", 1800, BUSY))

    assert text == (
        "Fastest here: the process-halves: 83% of the workers' time is spent inside environments, "
        "because one half of them steps while the other is served; a step takes about 1 ms."
    )


def test_lockstep_wins_because_a_wake_up_is_shared():
    text = sentence(LOOP, result("process", 1500, BUSY))

    assert "one wake-up is shared by 32 environments" in text


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_envs": 1}, "nothing to run side by side"),
        ({"cores": 1}, "only one core may be used"),
        ({}, "cost less than waking worker processes"),
    ],
)
def test_a_process_of_its_own_may_not_pay(settings, why):
    assert why in sentence(LOOP, result("process", 500, BUSY), **settings)


def test_somebody_else_may_win():
    text = sentence(LOOP, result("gym-async", 1500))

    assert text.startswith("Fastest here: the gym-async")


def test_a_tie_is_called_one():
    text = sentence(result("loop", 1000.0), result("serial", 990.0))

    assert text.startswith("Fastest here: the loop (about as fast: the serial)")


def test_auto_says_itself_why():
    results = [result("auto", 1500, BUSY), LOOP]

    text = bench_conclusion(
        results, num_envs=4, num_workers=2, cores=2, auto_plan="2 workers: it pays."
    )

    assert text == "Fastest here: the auto: 2 workers: it pays."


def test_no_results():
    assert sentence() == "Nothing could be measured."


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(12.345, "12.3 us"), (1500, "1.5 ms"), (2.5e6, "2.5 s"), (0.5, "0.5 us")],
)
def test_durations(microseconds, text):
    assert duration(microseconds) == text


def test_the_table():
    settings = {
        "env": "CartPole-v1",
        "num_envs": 64,
        "cores": 2,
        "rounds": 3,
        "seconds": 0.1,
        "autoreset": "next_step",
        "baseline": "loop",
    }
    results = [result("process", 123456.7, BUSY), LOOP]
    stream = io.StringIO()

    blocks = bench_blocks(
        settings, results, {"sb3-dummy": "not installed"}, "a plan", "A conclusion."
    )
    PlainScreen(stream, width=200).show(blocks)

    assert stream.getvalue().splitlines() == [
        "CartPole-v1: 64 environments on 2 cores, 3 rounds of 0.1 s, next_step autoreset",
        "",
        "contender    steps/s    ratio  +-  in env  waiting  copying",
        "-----------  -------  -------  --  ------  -------  -------",
        "the process  123,457  123.46x  0%     83%      10%       5%",
        "the loop       1,000    1.00x  0%",
        "ratio: to the loop, median of the rounds; +-: half the range of the rounds. in env, "
        "waiting: share of the workers' time; copying: share of this process's time.",
        "",
        "left out: sb3-dummy: not installed",
        "",
        "auto: a plan",
        "",
        "A conclusion.",
    ]


def test_the_document_has_the_rounds():
    document = result_json(result("process", 2000.0, BUSY))

    assert document["rates"] == [2000.0] * 3
    assert document["ratio"] == 2.0
    assert document["shares"] == {"env": 0.83, "waiting": 0.1, "copying": 0.05}
    assert result_json(LOOP)["shares"] is None


def test_every_key_has_a_contender():
    work = Workload(choose_env("CartPole-v1"), 4)

    contenders = contenders_for(KEYS, work, 2)

    assert {one.key for one in contenders} == set(KEYS)
    assert len({one.label for one in contenders}) == len(KEYS)
