"""What a fleet refuses before any worker is asked: slots that cannot do what a caller wants now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from gymnasium.utils.env_checker import data_equivalence

from envfleet.engine.backends.base import backend_named
from envfleet.engine.messages import EnvFacts
from envfleet.engine.options import Autoreset, Deadlines, OnFailure, ResetPlan, StartMethod
from envfleet.engine.slots import SlotSet
from envfleet.errors import ConfigError, EnvfleetError
from envfleet.options import Count, SecondsOrZero, check

Together = tuple[range, ...]
"""The slots of each natively vectorised environment."""


def together_of(facts: Sequence[EnvFacts]) -> Together:
    """The slots of each natively vectorised environment of a fleet."""
    return tuple(dict.fromkeys(one.together for one in facts if one.together is not None))


def check_whole(together: Together, slot_set: SlotSet, doing: str) -> None:
    """Refuse a part of what is one environment."""
    if together and slot_set.workers is None:
        named = set(slot_set.slots.tolist())
        for slots in together:
            if 0 < len(named.intersection(slots)) < len(slots):
                raise ConfigError(f"{_one_env(slots)}: {doing} all of them together")


def check_options(together: Together, slot_set: SlotSet, plans: Sequence[ResetPlan]) -> None:
    """Refuse options that differ where one environment can take only one."""
    options = dict(zip(slot_set.slots.tolist(), (plan.options for plan in plans), strict=True))
    for slots in together:
        first = options.get(slots[0])
        if slots[0] in options and not all(
            data_equivalence(first, options[slot], exact=True) for slot in slots
        ):
            raise ConfigError(f"{_one_env(slots)}, which takes one options for all of them")


def check_scalar(
    together: Together, slot_set: SlotSet, why: str, error: type[EnvfleetError] = ConfigError
) -> None:
    """Refuse for natively vectorised environments what they cannot do."""
    named = set(slot_set.slots.tolist())
    for slots in together:
        if not named.isdisjoint(slots):
            raise error(f"{_one_env(slots)}, which {why}")


def check_resumable(together: Together) -> None:
    """Refuse on_failure="resume" for natively vectorised environments."""
    if together:
        raise ConfigError(
            f"{_one_env(together[0])}, which cannot be replayed slot by slot; use "
            "on_failure='restart'"
        )


def check_blocked(blocked: Mapping[int, EnvfleetError], slot_set: SlotSet) -> None:
    """Raise why one of these slots is lost for good, if one is."""
    if blocked:
        for slot in slot_set.slots.tolist():
            if slot in blocked:
                raise blocked[slot]


def check_wait(min_slots: int | None, timeout_s: float | None) -> None:
    """Refuse what `recv` cannot wait for."""
    if min_slots is not None:
        check("min_slots", min_slots, Count)
    if timeout_s is not None:
        check("timeout_s", timeout_s, SecondsOrZero | None)


def check_page(page: object, pages: npt.NDArray[np.generic] | None) -> None:
    """Refuse a page that there is not."""
    is_number = isinstance(page, int | np.integer) and not isinstance(page, bool)
    if pages is None or not is_number or not 1 <= page <= len(pages):  # type: ignore[operator]
        have = "none" if pages is None else f"1 to {len(pages)}"
        raise ConfigError(f"there is no page {page!r}: this fleet has {have}")


def check_choices(start_method: str, autoreset: str, on_failure: str) -> None:
    """Refuse words that are none of the choices."""
    check("start_method", start_method, StartMethod)
    check("autoreset", autoreset, Autoreset)
    check("on_failure", on_failure, OnFailure)


def check_plan(
    num_slots: int, num_workers: int, num_here: int, backend: str, deadlines: Deadlines
) -> None:
    """Refuse a division of slots among workers that cannot be."""
    kind = backend_named(backend)
    if not kind.can_interrupt and (deadlines.step_s or deadlines.reset_s):
        raise ConfigError(
            f"backend={backend!r} runs environments in this thread, where none can be "
            "interrupted; leave out the timeouts or use backend='process'"
        )
    if not num_slots:
        raise ConfigError("a fleet needs at least one environment; got none")
    check("num_workers", num_workers, Count)
    if num_workers > num_slots:
        raise ConfigError(
            f"num_workers must be between 1 and the number of environments ({num_slots}), "
            f"got {num_workers}"
        )
    if not num_here:
        return
    if not kind.survives_crash or num_workers < 2:
        raise ConfigError(
            "num_here shares slots between this process and worker processes: it needs "
            f"backend='process' and two workers or more, of which this process is one; got "
            f"backend={backend!r} and num_workers={num_workers}"
        )
    check("num_here", num_here, Count)
    if num_here > num_slots - num_workers + 1:
        raise ConfigError(
            f"num_here={num_here} leaves {max(num_slots - num_here, 0)} of {num_slots} slots for "
            f"{num_workers - 1} worker processes; each needs one or more"
        )
    if deadlines.step_s or deadlines.reset_s:
        raise ConfigError(
            "the slots that live in this process cannot be interrupted; leave out the timeouts or "
            "num_here"
        )


def _one_env(slots: range) -> str:
    return f"slots {slots[0]} to {slots[-1]} are one natively vectorised environment"
