"""Policies without a model, to try environments and to verify rollouts.

A policy gets the caches of all environments that need a response, and returns one for each, so that
a model can answer them in one batch. Law: the policies here depend on their seed, the environment's
id, its turn and its state only; not on global random numbers, on other environments, or on where
the environment lives.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from envfleet.errors import ConfigError, did_you_mean
from envfleet.llm.manager_types import Cache
from envfleet.llm.parsing import format_response
from envfleet.llm.settings import AgentProxy, Tag

NONSENSE = "Dance"
"""An action that no environment has."""
_NONSENSE_SHARE = 0.1
_SILENCE_SHARE = 0.05
"""The share of responses without an answer."""
_MOST_READ = 20_000
"""Characters of a state that are read."""


class Policy(Protocol):
    """Gives responses to environments."""

    def __call__(self, caches: Sequence[Cache], /) -> Sequence[str]:
        """A response for each of these environments, in their order."""
        ...


def make_policy(name: str, tags: Iterable[Tag], proxy: AgentProxy, seed: int = 0) -> Policy:
    """The policy of this name, for environments of these tags.

    Args:
        name: One of `POLICIES`.
        tags: The tags of these environments.
        proxy: The form of a response.
        seed: Of its random numbers.
    """
    if name not in POLICIES:
        nearest = did_you_mean(name, POLICIES) or f"; there are {', '.join(POLICIES)}"
        raise ConfigError(f"there is no policy {name!r}{nearest}")
    choose = POLICIES[name]
    guess_of = {tag.name: _guesses(tag) for tag in tags}

    def policy(caches: Sequence[Cache], /) -> list[str]:
        responses = []
        for cache in caches:
            turn = len(cache["history"]) - 1
            # a seed that is text gives the same numbers in every process
            dice = random.Random(f"{seed} {cache['env_id']} {turn}")
            state = cache["history"][-1]["state"][:_MOST_READ]
            responses.append(choose(guess_of[cache["tag"]], state, dice, proxy))
        return responses

    return policy


Guess = Callable[[str, random.Random], str]
"""Draws the name of an action that is possible in a state."""
Choose = Callable[[Guess, str, random.Random, AgentProxy], str]


def _by_chance(guess: Guess, state: str, dice: random.Random, proxy: AgentProxy) -> str:
    if dice.random() < _SILENCE_SHARE:
        return "I would rather not say."
    names = [guess(state, dice) for _ in range(dice.randint(1, proxy.max_actions_per_turn))]
    if dice.random() < _NONSENSE_SHARE:
        names[dice.randrange(len(names))] = NONSENSE
    return _response("by chance", names, proxy)


def _the_first(guess: Guess, state: str, dice: random.Random, proxy: AgentProxy) -> str:
    return _response("the first that comes to mind", [guess(state, _FirstChoice())], proxy)


def _response(thought: str, names: Sequence[str], proxy: AgentProxy) -> str:
    return format_response(
        thought, f" {proxy.action_sep} ".join(names), enable_think=proxy.enable_think
    )


POLICIES: dict[str, Choose] = {"random": _by_chance, "first": _the_first}


class _FirstChoice(random.Random):
    """Always gives the first choice."""

    def random(self) -> float:
        return 0.0

    def getrandbits(self, k: int, /) -> int:
        return 0

    def shuffle(self, x: object) -> None:
        """Leave the order as it is."""


# ---- possible actions, by type of environment ---------------------------------------------------


def _guesses(tag: Tag) -> Guess:
    lookup = getattr(tag.env_type.config(tag.env_config), "action_lookup", None)
    if lookup:
        names = list(lookup.values())
        return lambda _, dice: dice.choice(names)
    return _FREE_TEXT.get(tag.type_name, _policy_number)


def _policy_number(_: str, dice: random.Random) -> str:
    return str(dice.randint(0, 99))


def _arm(state: str, dice: random.Random) -> str:
    """One of the arms that a bandit shows."""
    return dice.choice(state.partition(": ")[2].split(", "))


def _expression(state: str, dice: random.Random) -> str:
    """All numbers of a countdown in random order, joined by random signs."""
    numbers = re.findall(r"\d+", state.partition("nums:")[2]) or ["0"]
    dice.shuffle(numbers)
    return "".join(
        number if not place else f" {dice.choice('+-*/')} {number}"
        for place, number in enumerate(numbers)
    )


def _shop_action(state: str, dice: random.Random) -> str:
    """A button of a shop's page, or a search for some words of the instruction."""
    text, _, offered = state.partition("You must choose from these actions:")
    actions = re.findall(r"(?:search|click)\[[^\]]*\]", offered)
    action = dice.choice(actions) if actions else "search[]"
    if not action.startswith("search["):
        return action
    words = re.findall(r"[a-z]+", text.lower())[:40] or ["anything"]
    return f"search[{' '.join(dice.choice(words) for _ in range(3))}]"


def _policy_command(state: str, dice: random.Random) -> str:
    """One of the commands that a game offers."""
    return dice.choice(state.rpartition("You can: ")[2].split(", "))


_FREE_TEXT: dict[str, Guess] = {
    "bandit": _arm,
    "countdown": _expression,
    "textworld": _policy_command,
    "webshop": _shop_action,
}
