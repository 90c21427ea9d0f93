"""Fair speed comparisons: every contender runs one slice per round, in an order that rotates.

A machine's speed drifts (heat, other programs, clock rates), so numbers taken minutes apart do not
compare. Within one round they nearly do: a ratio is taken per round, and the median of the ratios
counts. Law: a contender that fails is left out with its reason and never stops the others, and
everything that was opened is closed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from envfleet.observe.progress import Progress

_UNREST = 0.2


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of one slice went, as parts of 1."""

    env: float
    """Of the workers' time: inside the environments."""
    waiting: float
    """Of the workers' time: waiting for the next command."""
    copying: float
    """Of this process's time: writing actions and collecting batches."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One measurement: how many environment steps in how many seconds."""

    steps: int
    seconds: float
    shares: Shares | None = None

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.steps / self.seconds


class Contender(Protocol):
    """One way to step the environments."""

    @property
    def key(self) -> str:
        """A short name, as typed on the command line."""

    @property
    def label(self) -> str:
        """The name in tables."""

    def open(self) -> None:
        """Start it and reset its environments."""

    def run(self, seconds: float) -> Slice:
        """Step for about ``seconds``."""

    def close(self) -> None:
        """Stop it; called once if ``open`` was called, however that ended."""


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one contender."""

    key: str
    label: str
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    """Per round: its rate over the baseline's; empty when the baseline is missing."""
    shares: Shares | None

    @property
    def rate(self) -> float:
        """Median steps per second."""
        return statistics.median(self.rates)

    @property
    def ratio(self) -> float | None:
        """Median of the rounds' ratios to the baseline."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def score(self) -> float:
        """What contenders are ranked by: the ratio, which drifts less than the rate."""
        return self.rate if self.ratio is None else self.ratio

    @property
    def spread(self) -> float:
        """How far the rounds lie apart: half the range of the rates over their median."""
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


def rotation(num: int, round_number: int) -> list[int]:
    """The order of one round: each order is followed by its reverse, then shifted by one.

    So in every pair of rounds each contender's mean place is the middle, and none always runs after
    the same other one, with the same warm or cold caches.
    """
    order = [(index + round_number // 2) % num for index in range(num)]
    return order if round_number % 2 == 0 else order[::-1]


def compare(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    seconds: float,
    progress: Progress,
    title: str,
) -> tuple[dict[str, list[Slice]], dict[str, str]]:
    """Run every contender once per round.

    Args:
        contenders: What takes part; opened in this order, all open at the same time.
        rounds: How many slices each one runs.
        seconds: How long one slice lasts.
        progress: Where to show how far it is.
        title: What to call the work there.

    Returns:
        Each contender's slices by key, and for those that failed the reason by key.
    """
    slices: dict[str, list[Slice]] = {}
    failures: dict[str, str] = {}
    total = len(contenders) * (rounds + 1)
    with ExitStack() as undo, progress.bar(title, total) as bar:
        for contender in contenders:
            bar.note(f"starting {contender.label}")
            undo.callback(_close_quietly, contender)
            try:
                contender.open()
                slices[contender.key] = []
            except Exception as exc:
                failures[contender.key] = failure_text(exc)
            bar.advance()
        for round_number in range(rounds):
            for index in rotation(len(contenders), round_number):
                contender = contenders[index]
                if contender.key in slices:
                    bar.note(contender.label)
                    try:
                        slices[contender.key].append(contender.run(seconds))
                    except Exception as exc:
                        del slices[contender.key]
                        failures[contender.key] = failure_text(exc)
                bar.advance()
        bar.note("closing")
    return slices, failures


def _close_quietly(contender: Contender) -> None:
    # the measurements are taken: it does not matter if another library fails to close
    with suppress(Exception):
        contender.close()


def failure_text(exc: BaseException) -> str:
    """An error as half a line."""
    text = " ".join(str(exc).split())
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def summarise(
    slices: Mapping[str, Sequence[Slice]], labels: Mapping[str, str], baseline: str
) -> list[Result]:
    """Medians of rates, of ratios to the baseline, and of shares, fastest first."""
    base = [one.rate for one in slices.get(baseline, ())]
    results = []
    for key, own in slices.items():
        rates = tuple(one.rate for one in own)
        ratios = tuple(rate / of for rate, of in zip(rates, base, strict=True)) if base else ()
        results.append(Result(key, labels[key], rates, ratios, median_shares(own)))
    return sorted(results, key=lambda result: -result.score)


def median_shares(slices: Sequence[Slice]) -> Shares | None:
    """The median of each share, if the slices have any."""
    known = [one.shares for one in slices if one.shares is not None]
    if not known:
        return None
    return Shares(
        env=statistics.median(one.env for one in known),
        waiting=statistics.median(one.waiting for one in known),
        copying=statistics.median(one.copying for one in known),
    )


def noise_warning(results: Sequence[Result]) -> str | None:
    """A warning if the rounds differ so much that the machine must have been busy."""
    if not results:
        return None
    spread = statistics.median(result.spread for result in results)
    if spread <= _UNREST:
        return None
    return (
        f"The rounds lie far apart (+-{spread:.0%}): something else is using this machine, so take "
        "these numbers as rough and measure again when it is quiet."
    )


def duration(microseconds: float) -> str:
    """A time in the unit people would use."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"
