"""What is said about a run's time follows from its parts and its setup alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.observe import report
from envfleet.observe.charts import part_colour
from envfleet.runs.time_report import REMEDIES, Setup, advice, shares, verdict, verdict_so_far

NAMES = tuple(REMEDIES)

setups = st.builds(
    Setup,
    n_envs=st.integers(1, 64),
    n_epochs=st.integers(1, 40),
    num_workers=st.integers(0, 16),
    cores=st.integers(1, 64),
    is_on_cpu=st.booleans(),
)
seconds = st.fixed_dictionaries({name: st.floats(0, 1e6) for name in NAMES if name != "the rest"})


def parts(**most):
    """All parts take something, one of them most of it."""
    ((name, share),) = most.items()
    name = name.replace("_", " ") if name == "the_rest" else name.replace("_", "-")
    rest = (1 - share) / (len(NAMES) - 1)
    return dict.fromkeys(NAMES, rest) | {name: share}


def test_shares_add_up():
    found = shares({"learning": 6.0, "inference": 1.0}, 10.0)
    assert found == pytest.approx({"learning": 0.6, "inference": 0.1, "the rest": 0.3})


def test_nothing_measured():
    assert verdict(shares({}, 0.0), Setup()) == "nothing was measured"
    assert verdict_so_far({}, Setup()) == ""


def test_learning_names_what_each_remedy_gains():
    said = verdict(parts(learning=0.72), Setup(n_envs=8, n_epochs=20))
    assert said == (
        "72% learning: more environments will not help; try 10 epochs instead of 20 (1.6 times as "
        "fast), a GPU (at most 3.6 times) or minibatches twice as large (at most 1.6 times)"
    )


def test_who_has_a_gpu_or_one_epoch_is_not_told_to_try_it():
    said = verdict(parts(learning=0.72), Setup(n_epochs=1, is_on_cpu=False))
    assert "GPU" not in said
    assert "epoch" not in said


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (Setup(n_envs=8, num_workers=2, cores=4), "4 workers instead of 2 (at most 1.4 times"),
        (Setup(n_envs=8, num_workers=0, cores=2), "--backend process (at most 1.4 times"),
        (Setup(n_envs=8, num_workers=2, cores=2), "4 cores, with a worker on each (at most 1.4"),
        (Setup(n_envs=3, num_workers=2, cores=2), "3 cores, with a worker on each (at most 1.2"),
    ],
)
def test_environments_get_workers_as_far_as_there_are_cores(setup, words):
    assert words in verdict(parts(environments=0.6), setup)


def test_one_environment_has_no_use_for_workers_or_cores():
    said = verdict(parts(environments=0.6), Setup(n_envs=1, cores=8))
    assert said == (
        "60% environments: try an environment whose steps take half as long (1.4 times as fast)"
    )


def test_workers_are_given_up_only_where_that_is_a_gain():
    found = {"transport": 0.5, "waiting": 0.2, "environments": 0.1, "learning": 0.2}
    two = verdict(found, Setup(n_envs=8, num_workers=2, cores=2))
    assert "no workers (--backend serial) (at most 2.5 times" in two
    none = verdict(found, Setup(n_envs=8, num_workers=0, cores=2))
    assert "no workers" not in none
    found = {"transport": 0.3, "waiting": 0.1, "environments": 0.25, "learning": 0.25}
    assert "no workers" not in verdict(found, Setup(n_envs=8, num_workers=4, cores=4))


@given(seconds, st.floats(0, 1e6), setups)
def test_gains_are_gains_and_no_more_than_a_part_that_takes_no_time(spent, more_s, setup):
    total_s = sum(spent.values()) + more_s
    found = shares(spent, total_s)
    if not found:
        return
    said = advice(found, setup)
    assert [one.share for one in said] == sorted(found.values(), reverse=True)
    saved_by_none = found["waiting"] + found["transport"]
    for one in said:
        assert one.remedies
        for remedy in one.remedies:
            least = 1 - (saved_by_none if "no workers" in remedy.what else one.share)
            assert least - 1e-9 <= remedy.left <= 1 + 1e-9
            assert remedy.gain >= 1 - 1e-9
        assert str(one).startswith(f"{one.share:.0%} {one.name}: ")


def test_every_part_has_a_colour_of_its_own_on_pages_of_both_themes():
    style = (Path(report.__file__).parent / "report.css").read_text()
    numbers = [part_colour(name) for name in NAMES]
    assert len(set(numbers)) == len(NAMES)
    for number in numbers:
        assert style.count(f"--c{number}: #") == 2
        assert f".c{number} {{ fill: var(--c{number}); background: var(--c{number}); }}" in style


def test_bookkeeping_is_shared_by_more_environments():
    assert verdict(parts(bookkeeping=0.5), Setup()) == (
        "50% bookkeeping: every step is normalised, stored and counted; try twice the "
        "environments, which share it (at most 1.3 times as fast)"
    )


@given(seconds, setups)
def test_the_verdict_is_about_what_takes_most(spent, setup):
    said = verdict_so_far(spent, setup)
    total_s = sum(spent.values())
    if total_s > 0:
        most = max(spent.values()) / total_s
        assert said.startswith(f"{most:.0%} ")
    else:
        assert said == ""
