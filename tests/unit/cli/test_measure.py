"""Rounds are interleaved, ratios are taken within a round, and failures stay with who failed."""

import pytest

from envfleet.cli.measure import (
    Shares,
    Slice,
    compare,
    failure_text,
    noise_warning,
    rotation,
    summarise,
)
from envfleet.observe.progress import Silent


class Scripted:
    """A contender that writes down what is done with it."""

    def __init__(self, key, log, fails_in=None, rates=(100, 100, 100, 100)):
        self.key, self.label, self.log, self.fails_in = key, f"the {key}", log, fails_in
        self.rates = iter(rates)

    def _did(self, what):
        self.log.append((what, self.key))
        if what == self.fails_in:
            raise RuntimeError(f"{self.key} cannot {what}")

    def open(self):
        self._did("open")

    def run(self, seconds):
        self._did("run")
        return Slice(next(self.rates), seconds)

    def close(self):
        self._did("close")


def run(contenders, rounds=4):
    return compare(contenders, rounds=rounds, seconds=1.0, progress=Silent(), title="t")


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
def test_every_round_has_everybody_once(num):
    for number in range(2 * num):
        assert sorted(rotation(num, number)) == list(range(num))


@pytest.mark.parametrize("num", [3, 4, 5])
def test_nobody_is_always_first_or_always_behind_the_same(num):
    orders = [rotation(num, number) for number in range(2 * num)]

    assert {order[0] for order in orders} == set(range(num))
    for one in range(num):
        before = {order[order.index(one) - 1] for order in orders if order.index(one) > 0}
        assert len(before) >= 2


@pytest.mark.parametrize("num", [2, 3, 8])
def test_a_pair_of_rounds_favours_nobody(num):
    for number in range(0, 6, 2):
        first, second = rotation(num, number), rotation(num, number + 1)

        assert {first.index(one) + second.index(one) for one in range(num)} == {num - 1}


def test_rounds_are_interleaved_and_everything_is_closed():
    log: list[tuple[str, str]] = []

    slices, failures = run([Scripted("a", log), Scripted("b", log)], rounds=2)

    assert failures == {}
    assert {key: len(own) for key, own in slices.items()} == {"a": 2, "b": 2}
    assert log == [
        ("open", "a"),
        ("open", "b"),
        ("run", "a"),
        ("run", "b"),
        ("run", "b"),
        ("run", "a"),
        ("close", "b"),
        ("close", "a"),
    ]


@pytest.mark.parametrize("moment", ["open", "run", "close"])
def test_one_failure_does_not_stop_the_others(moment):
    log: list[tuple[str, str]] = []

    slices, failures = run([Scripted("bad", log, moment), Scripted("good", log)])

    assert len(slices["good"]) == 4
    assert ("close", "bad") in log
    if moment == "close":
        assert failures == {}
    else:
        assert failures == {"bad": f"RuntimeError: bad cannot {moment}"}
        assert "bad" not in slices


def test_an_interrupt_closes_everything():
    log: list[tuple[str, str]] = []

    class Interrupted(Scripted):
        def run(self, seconds):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([Scripted("a", log), Interrupted("b", log)])

    assert log[-2:] == [("close", "b"), ("close", "a")]


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # the machine is twice as slow in the second round, for both: the ratio does not see it
    base = [Slice(100, 1.0), Slice(50, 1.0), Slice(100, 1.0)]
    fast = [Slice(300, 1.0), Slice(150, 1.0), Slice(310, 1.0)]

    first, second = summarise({"loop": base, "fast": fast}, {"loop": "L", "fast": "F"}, "loop")

    assert (first.label, first.rate, first.ratio) == ("F", 300.0, 3.0)
    assert (second.label, second.rate, second.ratio) == ("L", 100.0, 1.0)
    assert first.spread == pytest.approx((310 - 150) / 2 / 300)


def test_the_ratio_ranks():
    # the second has the better median rate only because its slow round was somebody else's
    steady = [Slice(100, 1.0), Slice(200, 1.0), Slice(100, 1.0)]
    lucky = [Slice(90, 1.0), Slice(180, 1.0), Slice(150, 1.0)]

    order = summarise({"lucky": lucky, "steady": steady}, {"lucky": "", "steady": ""}, "steady")

    assert [one.key for one in order] == ["steady", "lucky"]
    assert order[0].rate < order[1].rate


def test_unrest_is_told():
    quiet = summarise({"a": [Slice(100, 1.0), Slice(110, 1.0)]}, {"a": "A"}, "a")
    noisy = summarise({"a": [Slice(100, 1.0), Slice(200, 1.0)]}, {"a": "A"}, "a")

    assert noise_warning([]) is None
    assert noise_warning(quiet) is None
    assert "something else is using this machine" in (noise_warning(noisy) or "")


def test_without_the_baseline_there_is_no_ratio():
    (only,) = summarise({"a": [Slice(1, 1.0)]}, {"a": "A"}, "loop")

    assert only.ratio is None


def test_shares_are_medians_where_they_are_known():
    own = [Slice(1, 1.0, Shares(part, 1 - part, 0.5)) for part in (0.1, 0.2, 0.9)]

    (only,) = summarise({"a": own}, {"a": "A"}, "a")

    assert only.shares == Shares(0.2, 0.8, 0.5)


def test_a_reason_is_one_short_line():
    text = failure_text(ValueError("first\n  second " + "x" * 300))

    assert text.startswith("ValueError: first second xxx")
    assert len(text) < 230
    assert failure_text(ValueError()) == "ValueError"
