"""What ``bench --speedup`` says of its numbers, and how it draws them."""

import io
import json

import pytest

from envfleet.cli import main
from envfleet.cli.bench_speedup import COUNTS, EXPECTED, Point, speedup_blocks, speedup_conclusion
from envfleet.cli.screen import PlainScreen


def points(*speedups):
    return [
        Point(count, 1000.0 * speedup, speedup, 0.05, f"plan of {count}")
        for count, speedup in zip(COUNTS, speedups, strict=False)
    ]


@pytest.mark.parametrize(
    ("speedups", "cores", "step_us", "said"),
    [
        (
            (0.9, 1.4, 1.7, 1.8, 1.9),
            2,
            340,
            "2 cores: at most 2x for environments that compute; 16 environments reach 1.9x (a step "
            "takes 340 us). The usual ~6.0x of 16 needs 6 or more cores.",
        ),
        (
            (0.9, 1.8, 3.2, 5.0, 7.0),
            8,
            340,
            "8 cores: at most 8x for environments that compute; 16 environments reach 7.0x (a step "
            "takes 340 us).",
        ),
        (
            (0.9, 1.8, 3.5, 7.2, 9.0),
            2,
            2100,
            "2 cores, but a step takes 2.1 ms and mostly waits, so more environments than cores "
            "pay: 16 environments are 9.0x as fast as one.",
        ),
        (
            (0.2, 0.3, 0.5, 0.6, 1.1),
            2,
            15,
            "2 cores: at most 2x for environments that compute; here nothing is gained, because a "
            "step of 15 us is short beside a round trip to workers (120 us).",
        ),
        (
            (0.9,),
            1,
            500,
            "1 core: at most 1x for environments that compute; here nothing is gained, because "
            "there is no second core to use.",
        ),
        (
            (0.9, 0.8),
            2,
            500,
            "2 cores: at most 2x for environments that compute; here nothing is gained, because "
            "something else is using the cores: steps of 500 us should pay.",
        ),
        ((), 2, 15, "Nothing could be measured."),
    ],
)
def test_the_sentence_follows_from_the_numbers(speedups, cores, step_us, said):
    assert speedup_conclusion(points(*speedups), cores=cores, step_us=step_us) == said


def test_table_and_bars():
    settings = {"env": "x", "cores": 2, "rounds": 3, "seconds": 0.1, "loop_steps_per_s": 1000.0}
    stream = io.StringIO()

    blocks = speedup_blocks(
        settings, points(1.0, 1.5, 2.0), {"8": "it broke"}, "A sentence.", "Unrest."
    )
    PlainScreen(stream, width=60).show(blocks)

    assert stream.getvalue().splitlines() == [
        "x: speed-up over one environment in a plain loop (1,000",
        "steps/s), 2 cores, 3 rounds of 0.1 s",
        "",
        "envs  steps/s  speed-up  expected  +-",
        "----  -------  --------  --------  --",
        "   1    1,000     1.00x     ~1.0x  5%",
        "   2    1,500     1.50x            5%",
        "   4    2,000     2.00x     ~2.5x  5%",
        "expected: what is usually promised for so many environments,",
        "on as many cores; +-: half the range of the rounds.",
        "",
        " 1 env  ##################|                            1.00x",
        "2 envs  ###########################                    1.50x",
        "4 envs  ####################################         | 2.00x",
        "",
        "left out: 8 envs: it broke",
        "",
        "auto: plan of 4",
        "",
        "A sentence.",
        "",
        "Unrest.",
    ]


def test_every_count_is_measured(capsys):
    code = main(
        ["bench", "--speedup", "CartPole-v1", "--rounds", "2", "--seconds", "0.02", "--json"]
    )

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [point["num_envs"] for point in found["points"]] == list(COUNTS)
    assert [point["expected"] for point in found["points"]] == [EXPECTED.get(n) for n in COUNTS]
    for point in found["points"]:
        assert point["steps_per_s"] > 0
        assert point["speedup"] > 0
        assert "environment" in point["plan"]
    assert found["conclusion"]


@pytest.mark.parametrize(
    "flag", [("--num-envs", "4"), ("--baseline", "loop"), ("--autoreset", "same_step")]
)
def test_what_does_not_go_with_it_is_refused(flag, capsys):
    assert main(["bench", "--speedup", "CartPole-v1", *flag]) == 2
    assert f"leave out {flag[0]}" in capsys.readouterr().err
