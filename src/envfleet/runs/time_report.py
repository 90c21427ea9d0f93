"""Where a run's time went, what would save some of it, and how much. Pure.

A gain follows from the time that would be left: half of the epochs take half of the learning, and
everything else takes as long as before. Where a remedy may fall short of that (a GPU needs time
too), its gain is given as "at most". A job with parts of its own adds remedies for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = [
    "OF_ROLLOUTS",
    "REMEDIES",
    "Remedy",
    "Setup",
    "TimeAdvice",
    "advice",
    "fleet_seconds",
    "shares",
    "verdict",
    "verdict_so_far",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup facts that advice depends on."""

    n_envs: int = 1
    n_epochs: int = 1
    num_workers: int = 0
    """Processes that share the environments; 0 if these run in the main process."""
    cores: int = 1
    is_on_cpu: bool = True
    """Whether the networks are on the CPU."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to try, and its gain."""

    what: str
    left: float
    """The share of the run's time that would be left."""
    is_best_case: bool = False

    @property
    def gain(self) -> float:
        """How many times as fast the run would be."""
        return 1 / max(self.left, 0.01)

    @property
    def promise(self) -> str:
        """The gain in words."""
        most = "at most " if self.is_best_case else ""
        many = f"{self.gain:.0f}" if self.gain >= 10 else f"{self.gain:.1f}"
        return f"{most}{many} times"


@dataclass(frozen=True, slots=True)
class TimeAdvice:
    """One part of the time, and how to save some of it."""

    name: str
    share: float
    why: str
    """Why it takes the time, or what does not help; may be empty."""
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        if not self.remedies:
            return f"{self.share:.0%} {self.name}{f': {self.why}' if self.why else ''}"
        first, *others = (f"{remedy.what} ({remedy.promise}" for remedy in self.remedies)
        *others, last = f"{first} as fast)", *(f"{other})" for other in others)
        tries = f"try {', '.join(others)}{' or ' if others else ''}{last}"
        return f"{self.share:.0%} {self.name}: {f'{self.why}; ' if self.why else ''}{tries}"


Parts = Mapping[str, float]
"""The share of each part of the time."""
Reasoned = tuple[str, list[Remedy]]
"""Why a part takes the time it does, and what to try."""
Remedies = Mapping[str, Callable[[Parts, Setup], Reasoned]]

OF_ROLLOUTS = ("environments", "waiting", "transport", "inference", "bookkeeping")
"""The parts of the time that collecting experience takes."""


def fleet_seconds(
    timings: Mapping[str, float], num_workers: int, spent_s: float
) -> dict[str, float]:
    """Split the time that a caller spent in a fleet.

    Args:
        timings: What the fleet measured in that time: seconds of all workers in environments, and
            seconds that this process waited.
        num_workers: How many workers share the environments.
        spent_s: Seconds that the caller spent in `send` and `recv`.
    """
    waited_s = min(timings["wait_s"], spent_s)
    stepping_s = min(timings["env_s"] / num_workers, waited_s)
    return {
        "environments": stepping_s,
        "waiting": waited_s - stepping_s,
        "transport": spent_s - waited_s,
    }


def shares(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """The share of each part; what was not measured is "the rest"."""
    if total_s <= 0:
        return {}
    parts = {name: spent_s / total_s for name, spent_s in seconds.items()}
    return parts | {"the rest": max(0.0, 1.0 - sum(parts.values()))}


def advice(parts: Parts, setup: Setup, more: Remedies | None = None) -> list[TimeAdvice]:
    """Advice for each part, the largest first; `more` are remedies for a job's own parts."""
    known = REMEDIES if more is None else {**REMEDIES, **more}
    found = []
    for name, share in sorted(parts.items(), key=lambda item: -item[1]):
        why, remedies = known[name](parts, setup) if name in known else ("", [])
        surest_first = sorted(remedies, key=lambda remedy: (remedy.is_best_case, remedy.left))
        found.append(TimeAdvice(name, share, why, tuple(surest_first)))
    return found


def verdict(parts: Parts, setup: Setup, more: Remedies | None = None) -> str:
    """What took most of the time, what to try, and what that would gain."""
    return str(advice(parts, setup, more)[0]) if parts else "nothing was measured"


def verdict_so_far(seconds: Mapping[str, float], setup: Setup, more: Remedies | None = None) -> str:
    """The verdict on a run that is still running; empty before anything was measured."""
    total_s = sum(seconds.values())
    return verdict(shares(seconds, total_s), setup, more) if total_s > 0 else ""


# ---- remedies by part of the time ----------------------------------------------------------------


def _environments(parts: Parts, setup: Setup) -> Reasoned:
    share, now, most = parts["environments"], max(setup.num_workers, 1), setup.n_envs
    remedies, why = [Remedy("an environment whose steps take half as long", 1 - share / 2)], ""
    if (room := min(setup.cores, most)) > now:
        what = f"{room} workers instead of {now}" if setup.num_workers else "--backend process"
        remedies.append(Remedy(what, 1 - share * (1 - now / room), True))
    elif (wider := min(2 * now, most)) > now:
        why = "all cores are busy with them" if now > 1 else ""
        what = f"{wider} cores, with a worker on each"
        remedies.append(Remedy(what, 1 - share * (1 - now / wider), True))
    return why, remedies


def _waiting(parts: Parts, setup: Setup) -> Reasoned:
    what = "more environments per worker (`envfleet tune ENV` finds how many)"
    even = Remedy(what, 1 - parts["waiting"], True)
    return "slots wait for the slowest of them", [even, *_without_workers(parts, setup)]


def _transport(parts: Parts, setup: Setup) -> Reasoned:
    shared = Remedy("twice the environments, which share it", 1 - parts["transport"] / 2, True)
    why = "steps are short against the way to the environments"
    return why, [shared, *_without_workers(parts, setup)]


def _without_workers(parts: Parts, setup: Setup) -> list[Remedy]:
    """All environments in the main process, if that would save time."""
    saved = parts.get("waiting", 0.0) + parts.get("transport", 0.0)
    added = parts.get("environments", 0.0) * (setup.num_workers - 1)
    is_gain = setup.num_workers > 0 and added < saved
    return [Remedy("no workers (--backend serial)", 1 - saved + added, True)] if is_gain else []


def _inference(parts: Parts, setup: Setup) -> Reasoned:
    left = 1 - parts["inference"] / 2
    return "", [Remedy("twice the environments, which share each forward pass", left, True)]


def _bookkeeping(parts: Parts, setup: Setup) -> Reasoned:
    shared = Remedy("twice the environments, which share it", 1 - parts["bookkeeping"] / 2, True)
    return "every step is normalised, stored and counted", [shared]


def _learning(parts: Parts, setup: Setup) -> Reasoned:
    share, epochs, fewer = parts["learning"], setup.n_epochs, setup.n_epochs // 2
    remedies = [Remedy("minibatches twice as large", 1 - share / 2, True)]
    if fewer:
        many = "1 epoch" if fewer == 1 else f"{fewer} epochs"
        remedies.append(Remedy(f"{many} instead of {epochs}", 1 - share * (1 - fewer / epochs)))
    if setup.is_on_cpu:
        remedies.append(Remedy("a GPU", 1 - share, True))
    return "more environments will not help", remedies


def _evaluation(parts: Parts, setup: Setup) -> Reasoned:
    what = "half as many evaluations (--eval-every) or episodes in them (--eval-episodes)"
    return "", [Remedy(what, 1 - parts["evaluation"] / 2)]


def _filming(parts: Parts, setup: Setup) -> Reasoned:
    return "", [
        Remedy("no videos while training (`envfleet eval --video`)", 1 - parts["filming"]),
        Remedy("half as many evaluations (--eval-every)", 1 - parts["filming"] / 2),
    ]


def _start_up(parts: Parts, setup: Setup) -> Reasoned:
    return "", [Remedy("a run that is twice as long", 1 - parts["start-up"] / 2)]


def _the_rest(parts: Parts, setup: Setup) -> Reasoned:
    fewer = Remedy("half as many checkpoints (--save-every)", 1 - parts["the rest"] / 2, True)
    return "checkpoints and notes take it", [fewer]


REMEDIES: Remedies = {
    "environments": _environments,
    "waiting": _waiting,
    "transport": _transport,
    "inference": _inference,
    "bookkeeping": _bookkeeping,
    "learning": _learning,
    "evaluation": _evaluation,
    "filming": _filming,
    "start-up": _start_up,
    "the rest": _the_rest,
}
"""Of the parts that jobs have in common."""
