"""Where a run's time went, what could be done about it, and what that would gain. Pure.

A gain is worked out by what would be left of the run's time: half of the epochs take half of the
learning, and everything else takes as long as before. Where a remedy cannot do better than that but
may well do worse (a GPU takes time, too) the gain is said to be the most there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run works with, as far as remedies depend on it."""

    n_envs: int = 1
    n_epochs: int = 1
    num_workers: int = 0
    """Processes that share the environments; 0 if these live in the learner's."""
    cores: int = 1
    is_on_cpu: bool = True
    """Whether the networks are."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to try, and what it promises."""

    what: str
    left: float
    """What would be left of the run's time, as a part of 1."""
    is_best_case: bool = False

    @property
    def gain(self) -> float:
        """How many times as fast a run would be."""
        return 1 / max(self.left, 0.01)

    @property
    def promise(self) -> str:
        """The gain in words."""
        most = "at most " if self.is_best_case else ""
        many = f"{self.gain:.0f}" if self.gain >= 10 else f"{self.gain:.1f}"
        return f"{most}{many} times"


@dataclass(frozen=True, slots=True)
class Advice:
    """One part of the time, and what could be had by doing something about it."""

    name: str
    share: float
    why: str
    """Why it takes the time, or what does not help; may be empty."""
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        first, *others = (f"{remedy.what} ({remedy.promise}" for remedy in self.remedies)
        *others, last = f"{first} as fast)", *(f"{other})" for other in others)
        tries = f"try {', '.join(others)}{' or ' if others else ''}{last}"
        return f"{self.share:.0%} {self.name}: {f'{self.why}; ' if self.why else ''}{tries}"


Parts = Mapping[str, float]

OF_ROLLOUTS = ("environments", "waiting", "transport", "inference", "bookkeeping")
"""The parts of the time that rollouts take."""


def fleet_seconds(
    timings: Mapping[str, float], num_workers: int, spent_s: float
) -> dict[str, float]:
    """What the time spent in a fleet was spent on.

    Args:
        timings: The fleet's own of the same time: workers in environments (all together), this
            process waiting.
        num_workers: Who shares that work.
        spent_s: From the caller's side, in `send` and `recv`.
    """
    waited_s = min(timings["wait_s"], spent_s)
    stepping_s = min(timings["env_s"] / num_workers, waited_s)
    return {
        "environments": stepping_s,
        "waiting": waited_s - stepping_s,
        "transport": spent_s - waited_s,
    }


def shares(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """Parts of 1; what was not measured is "the rest"."""
    if total_s <= 0:
        return {}
    parts = {name: spent_s / total_s for name, spent_s in seconds.items()}
    return parts | {"the rest": max(0.0, 1.0 - sum(parts.values()))}


def advice(parts: Parts, setup: Setup) -> list[Advice]:
    """What takes most first."""
    found = []
    for name, share in sorted(parts.items(), key=lambda item: -item[1]):
        why, remedies = REMEDIES[name](parts, setup)
        surest_first = sorted(remedies, key=lambda remedy: (remedy.is_best_case, remedy.left))
        found.append(Advice(name, share, why, tuple(surest_first)))
    return found


def verdict(parts: Parts, setup: Setup) -> str:
    """What took most, what to do about it, and what that would gain."""
    return str(advice(parts, setup)[0]) if parts else "nothing was measured"


def verdict_so_far(seconds: Mapping[str, float], setup: Setup) -> str:
    """The same of a run that goes on, by what was measured; empty before anything was."""
    total_s = sum(seconds.values())
    return verdict(shares(seconds, total_s), setup) if total_s > 0 else ""


# ---- what helps, by where the time goes ----------------------------------------------------------

Found = tuple[str, list[Remedy]]


def _environments(parts: Parts, setup: Setup) -> Found:
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


def _waiting(parts: Parts, setup: Setup) -> Found:
    what = "more environments per worker (`envfleet tune ENV` finds how many)"
    even = Remedy(what, 1 - parts["waiting"], True)
    return "slots wait for the slowest of them", [even, *_without_workers(parts, setup)]


def _transport(parts: Parts, setup: Setup) -> Found:
    shared = Remedy("twice the environments, which share it", 1 - parts["transport"] / 2, True)
    why = "steps are short against the way to the environments"
    return why, [shared, *_without_workers(parts, setup)]


def _without_workers(parts: Parts, setup: Setup) -> list[Remedy]:
    """All environments beside the learner, one after another, if there are workers to save."""
    saved = parts.get("waiting", 0.0) + parts.get("transport", 0.0)
    added = parts.get("environments", 0.0) * (setup.num_workers - 1)
    is_gain = setup.num_workers > 0 and added < saved
    return [Remedy("no workers (--backend serial)", 1 - saved + added, True)] if is_gain else []


def _inference(parts: Parts, setup: Setup) -> Found:
    left = 1 - parts["inference"] / 2
    return "", [Remedy("twice the environments, which share each forward pass", left, True)]


def _bookkeeping(parts: Parts, setup: Setup) -> Found:
    shared = Remedy("twice the environments, which share it", 1 - parts["bookkeeping"] / 2, True)
    return "every step is normalised, stored and counted", [shared]


def _learning(parts: Parts, setup: Setup) -> Found:
    share, epochs, fewer = parts["learning"], setup.n_epochs, setup.n_epochs // 2
    remedies = [Remedy("minibatches twice as large", 1 - share / 2, True)]
    if fewer:
        many = "1 epoch" if fewer == 1 else f"{fewer} epochs"
        remedies.append(Remedy(f"{many} instead of {epochs}", 1 - share * (1 - fewer / epochs)))
    if setup.is_on_cpu:
        remedies.append(Remedy("a GPU", 1 - share, True))
    return "more environments will not help", remedies


def _evaluation(parts: Parts, setup: Setup) -> Found:
    what = "half as many evaluations (--eval-every) or episodes in them (--eval-episodes)"
    return "", [Remedy(what, 1 - parts["evaluation"] / 2)]


def _filming(parts: Parts, setup: Setup) -> Found:
    return "", [
        Remedy("no videos while training (`envfleet eval --video`)", 1 - parts["filming"]),
        Remedy("half as many evaluations (--eval-every)", 1 - parts["filming"] / 2),
    ]


def _start_up(parts: Parts, setup: Setup) -> Found:
    return "", [Remedy("a run that is twice as long", 1 - parts["start-up"] / 2)]


def _the_rest(parts: Parts, setup: Setup) -> Found:
    fewer = Remedy("half as many checkpoints (--save-every)", 1 - parts["the rest"] / 2, True)
    return "checkpoints and notes take it", [fewer]


REMEDIES: dict[str, Callable[[Parts, Setup], Found]] = {
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
"""By part of the time: why it takes that, and what to try."""
