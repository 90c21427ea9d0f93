"""Which environments live where, and who asks whom.

By "auto" every kind is measured once and placed by `choice.choose`; True and "threads" put all
kinds but `sequential_env_types` into workers or threads; "resets" has their episodes begun in
workers and played here; False keeps everything here. Workers are started once and serve every
rollout until the placing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from envfleet.engine import Fleet
from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError
from envfleet.llm.choice import Placement, choose, measure
from envfleet.llm.makers import Made, Makers
from envfleet.llm.moving import arrived
from envfleet.llm.places import (
    Answer,
    Here,
    House,
    Order,
    Seats,
    Standing,
    built_as_it_stood,
    carry_out,
)
from envfleet.llm.settings import Settings, Tag, UseMultiprocessing
from envfleet.llm.turns import Failure, Opening


class GoOnHere(Protocol):
    """Brings an environment home that no worker can keep, and has it answer."""

    def __call__(self, env_id: int, order: Order, why: str) -> Answer:
        """Its answer."""
        ...


class Places:
    """All places of one manager."""

    def __init__(self, tags: Sequence[Tag], settings: Settings) -> None:
        self._tags, self._settings = list(tags), settings
        self.here = Here()
        self.said = ""
        self._seats: list[Seats] = []
        self._makers: Makers | None = None
        self._made_elsewhere: set[str] = set()
        """Tags whose episodes begin in workers and are then played here."""
        self._deadly: set[str] = set()
        """Tags whose beginnings have ended workers."""
        self._settled: UseMultiprocessing | None = None

    def settle(self, wish: UseMultiprocessing) -> None:
        """Build every environment where it is to live; nothing to do if that is known already."""
        if wish == self._settled:
            return
        self.close()
        placements = self._placements(wish)
        self.said = "\n".join(f"{name}: {one.why}" for name, one in placements.items())
        kinds = {"here": {}, "thread": {}, "process": {}}  # type: dict[str, dict[int, Any]]
        for env_id, tag in enumerate(self._tags):
            kinds[placements[tag.name].turns][env_id] = partial(Tag.make, tag)
        for env_id, make in kinds["here"].items():
            self.here.take_in(env_id, make())
        if kinds["thread"]:
            self._seats.append(self._open(kinds["thread"], "thread"))
        if kinds["process"]:
            self._seats.append(self._open(kinds["process"], "process"))
        self._made_elsewhere = {
            name
            for name, one in placements.items()
            if one.turns == "here" and one.resets == "process"
        }
        if self._made_elsewhere:
            self._makers = Makers(
                {tag.name: tag for tag in self._tags if tag.name in self._made_elsewhere},
                num_workers=max(1, min(self._settings.max_workers, usable_cores()) - 1),
                start_method=self._settings.start_method,
                max_restarts=self._settings.max_restarts,
                deadly=self._deadly,
            )
        self._settled = wish

    def refresh(self) -> None:
        """A new episode begins for everybody: who came home goes back to the workers."""
        for seats in self._seats:
            for env_id in seats.ids:
                self.here.let_go(env_id)
            seats.refresh()

    def begin(
        self,
        orders: Mapping[int, Order],
        go_on_here: GoOnHere,
        meanwhile: Callable[[], None],
        tell: Callable[[int, Answer], None],
    ) -> None:
        """Begin everybody's episode.

        Args:
            orders: By environment.
            go_on_here: For those who cannot stay where they are.
            meanwhile: Called once, as soon as workers have begun and before anybody's answer.
            tell: Is told of each answer, as soon as it is there.
        """
        elsewhere = {
            env_id: (tag, order.seed, order.mode)
            for env_id, order in orders.items()
            if (tag := self._tags[env_id].name) in self._made_elsewhere
        }
        if not elsewhere or self._makers is None:
            meanwhile()
            for answered in self.play(orders, _nowhere, go_on_here).items():
                tell(*answered)
            return
        self._makers.send(elsewhere)
        rest = {env_id: order for env_id, order in orders.items() if env_id not in elsewhere}
        self._send(rest)
        meanwhile()

        def take(env_id: int, made: Made) -> None:
            moved, answer = made
            player = self.here.players[env_id]
            env = arrived(moved, player.env)
            if env is not player.env:
                self.here.take_in(env_id, env)
            tell(env_id, answer)

        def begin_here(env_id: int) -> None:
            tell(env_id, carry_out(self.here.players[env_id], orders[env_id]))

        def fail(env_id: int, failure: Failure) -> None:
            tell(env_id, Opening("", failure=failure))

        others = [one for one in rest if one in self.here.players]
        self._makers.recv(take, begin_here, fail, others)
        for answered in self._recv(rest, _nowhere, go_on_here).items():
            tell(*answered)

    def play(
        self,
        orders: Mapping[int, Order],
        standing_of: Callable[[int], Standing],
        go_on_here: GoOnHere,
    ) -> dict[int, Answer]:
        """Play everybody's turn, in workers and in this process at the same time."""
        self._send(orders)
        here = self.here.players
        answers = self.here.ask({one: order for one, order in orders.items() if one in here})
        return answers | self._recv(orders, standing_of, go_on_here)

    def worker_pids(self) -> list[int]:
        """Every process that environments live in, or are made in, apart from this one."""
        found = [pid for fleet in self._fleets() for pid in fleet.worker_pids()]
        return [pid for pid in found if pid is not None]

    def _fleets(self) -> list[Fleet]:
        makers = [] if self._makers is None else [self._makers.fleet]
        return [*(fleet for seats in self._seats for fleet in seats.fleets), *makers]

    def come_home(self, orders: Mapping[int, Order], failed: Collection[int]) -> dict[int, Failure]:
        """Build everybody here by these orders, and end the workers; who did not come back.

        Of those without an order nothing is left to be played. Those that have failed come with
        the next reset: what they did to a worker they would do to this process.
        """
        failures: dict[int, Failure] = {}
        for env_id in [one for seats in self._seats for one in seats.ids]:
            if env_id in self.here.players or env_id in failed:
                continue
            make = partial(Tag.make, self._tags[env_id])
            if env_id not in orders:
                self.here.take_in(env_id, make())
                continue
            answer = built_as_it_stood(self.here, env_id, make, orders[env_id])
            if answer.failure is not None:
                failures[env_id] = answer.failure
        self._end_workers()
        self.said = "\n".join(f"{name}: in this process, as asked" for name in self._names())
        is_complete = len(self.here.players) == len(self._tags)
        self._settled = False if is_complete else None
        return failures

    def close(self) -> None:
        """Close every environment and end the workers."""
        self._settled = None
        self.here.close()
        self._end_workers()

    def _end_workers(self) -> None:
        for seats in self._seats:
            seats.close()
        self._seats = []
        if self._makers is not None:
            self._makers.close()
            self._makers = None
        self._made_elsewhere = set()

    def _send(self, orders: Mapping[int, Order]) -> None:
        """Have workers begin with their orders."""
        here = self.here.players
        for seats in self._seats:
            seats.send({one: orders[one] for one in seats.ids if one in orders and one not in here})

    def _recv(
        self,
        orders: Mapping[int, Order],
        standing_of: Callable[[int], Standing],
        go_on_here: GoOnHere,
    ) -> dict[int, Answer]:
        """What workers answer; who cannot stay there answers here."""
        answers: dict[int, Answer] = {}
        for seats in self._seats:
            found, leaving = seats.recv(standing_of)
            answers |= found
            for env_id, why in leaving.items():
                answers[env_id] = go_on_here(env_id, orders[env_id], why)
        return answers

    def _open(self, makers: Mapping[int, Callable[[], Any]], backend: Any) -> Seats:
        settings = self._settings
        house = House(backend, settings.max_workers, settings.start_method, settings.step_timeout_s)
        return Seats(makers, house, settings.max_restarts)

    def _placements(self, wish: UseMultiprocessing) -> dict[str, Placement]:
        counts = Counter(tag.name for tag in self._tags)
        by_name = {tag.name: tag for tag in self._tags}
        found: dict[str, Placement] = {}
        for name, count in counts.items():
            tag = by_name[name]
            if tag.type_name in self._settings.sequential_env_types or wish is False:
                found[name] = Placement("here", "here", "in this process, as asked")
            elif wish is True:
                found[name] = Placement("process", "process", "in workers, as asked")
            elif wish == "threads":
                found[name] = Placement("thread", "thread", "in threads, as asked")
            elif self._settings.step_timeout_s is not None:
                if wish == "resets":
                    raise ConfigError(
                        "es_manager.step_timeout_s cannot be kept with use_multiprocessing: "
                        "resets, which plays turns in this process; leave it out, or say true"
                    )
                why = "reset and step in workers: only there step_timeout_s can be kept"
                found[name] = Placement("process", "process", why)
            elif wish == "resets":
                found[name] = Placement("here", "process", "reset in workers, step here, as asked")
            else:
                workers = self._settings.max_workers
                found[name] = choose(measure(tag.make), count, workers, usable_cores())
        return found

    def _names(self) -> list[str]:
        return list(dict.fromkeys(tag.name for tag in self._tags))


def _nowhere(env_id: int) -> Standing:
    """Where an episode stands that has not begun."""
    return (), ""
