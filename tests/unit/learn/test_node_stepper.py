"""Slots on nodes without a cluster: who steps what, by which policy, when nodes are slow."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from envfleet.learn import node_stepper
from envfleet.learn.environments import opened
from envfleet.learn.judging import judged
from envfleet.learn.node_envs import NodeEnvs
from envfleet.learn.node_fleet import NodeFleet, SlotTask
from envfleet.learn.options import PPOOptions
from envfleet.learn.ppo import PPOTrainer
from envfleet.learn.torch_setup import threads
from envfleet.learn.train_options import TrainOptions
from envfleet.observe.events import Event
from envfleet.runs.nodes import Done, Later, Place

PPO = PPOOptions(n_steps=16, n_epochs=2, normalise_rewards=True)
OPTIONS = TrainOptions("CartPole-v1", n_envs=6, backend="serial")


class HerePool:
    """A `NodePool` whose workers live here and work when `next` is asked, one piece each time.

    Which one that is, `turn` says, of those that have a piece. Until then a piece is under way.
    """

    def __init__(
        self,
        build: Callable[[Place], Any],
        workers: int,
        turn: Callable[[Sequence[int]], int | None] = min,
    ) -> None:
        self._build, self.turn = build, turn
        self._fleets: dict[int, Any] = {}
        self.pieces: list[tuple[int, SlotTask, Any, int]] = []
        self.steps: list[tuple[int, int, int]] = []
        """Worker, segment and policy of all that was given."""
        self.tasks: list[SlotTask] = []
        self.slot_s: dict[int, float] = {}
        """What workers say that a segment of one slot took."""
        self.events: list[Event] = []
        self.seconds = 0.0
        self.workers: dict[int, Place] = {}
        for number in range(workers):
            self.join(number)

    def join(self, number: int, cores: int = 1) -> None:
        self.workers[number] = Place(f"node-{number}", "host", cores)
        self._fleets[number] = self._build(self.workers[number])

    def expel(self, worker: int, why: str) -> None:
        self.tell("lost", str(self.workers.pop(worker)), why)
        self._fleets.pop(worker).close()

    def give(self, index: int, task: Any, shared: Any = None, prefers: int | None = None) -> None:
        chosen = prefers if prefers in self.workers else min(self.workers)
        assert chosen is not None
        if isinstance(task, SlotTask) and shared is not None:
            assert all(index != other for other, *_ in self.pieces)
            self.steps.append((chosen, task.moment[1], shared[0][1]))
            self.tasks.append(task)
        self.pieces.append((index, task, shared, chosen))

    def next(self) -> Done[Any] | None:
        who = {
            piece[3] if piece[3] in self.workers else min(self.workers): piece
            for piece in reversed(self.pieces)
        }
        worker = self.turn(sorted(who))
        if worker is None:
            return None
        self.pieces.remove(who[worker])
        index, task, shared, _ = who[worker]
        result = _travelled(self._fleets[worker](*_travelled((task, shared))))
        if isinstance(task, SlotTask) and task.start is not None:
            spent_s = self.slot_s.get(worker, 0.5) * (task.last - task.first)
            result = replace(result, seconds={"environments": spent_s, "inference": 0.0})
        return Done(index, result, worker, 0.0)

    def work(
        self, tasks: Sequence[Any], shared: Any = None, prefers: Sequence[int] = ()
    ) -> Iterator[Done[Any]]:
        for index, task in enumerate(tasks):
            self.give(index, task, shared, prefers[index] if prefers else None)
        for _ in tasks:
            done = self.next()
            assert done is not None
            yield done

    def under_way(self) -> dict[int, tuple[int, float]]:
        return {index: (worker, self.seconds) for index, _, _, worker in self.pieces}

    def forget(self) -> None:
        self.pieces.clear()

    def refresh(self) -> None:
        pass

    def share(self, value: Any) -> Any:
        return value

    def later(self, value: Any) -> Any:
        return _Here(value)

    def tell(self, kind: Any, where: str, why: str) -> None:
        self.events.append(Event(kind, where, why))

    def close(self) -> None:
        for one in self._fleets.values():
            one.close()


def _travelled(value: Any) -> Any:
    """As it would arrive elsewhere."""
    return pickle.loads(pickle.dumps(value))


class _Here(Later):
    """A value that is here already."""

    def get(self) -> Any:
        return self.reference


@contextmanager
def on_nodes(
    workers: int = 2, max_staleness: int = 0, slow_nodes: Any = "wait", ppo: PPOOptions = PPO
) -> Iterator[tuple[PPOTrainer, HerePool]]:
    def build(place: Place) -> NodeFleet:
        return NodeFleet([CartPoleEnv] * OPTIONS.n_envs, OPTIONS, ppo, place)

    pool = HerePool(build, workers)
    envs = NodeEnvs(pool, OPTIONS.n_envs, max_staleness, slow_nodes)  # type: ignore[arg-type]
    with closing(pool), threads():
        yield PPOTrainer(envs, ppo), pool


def trained_here(iterations: int, ppo: PPOOptions = PPO) -> PPOTrainer:
    long = replace(OPTIONS, env="gymnasium.envs.classic_control:CartPoleEnv")
    with opened(long, ppo) as trainer:
        run(trainer, iterations)
        return trainer


def run(trainer: PPOTrainer, iterations: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(iterations):
        found.append(trainer.collect())
        trainer.learn(found[-1])
    return found


def assert_same_policy(one: PPOTrainer, other: PPOTrainer) -> None:
    for name, weight in one.policy.state_dict().items():
        assert torch.equal(weight, other.policy.state_dict()[name]), name


def test_each_segment_is_made_by_the_policy_that_was_asked_for_it() -> None:
    with on_nodes() as (trainer, pool):
        run(trainer, 3)
        assert pool.steps == [(worker, n, n) for n in range(3) for worker in (0, 1)]
        assert_same_policy(trainer, trained_here(3))


def test_a_fast_node_runs_ahead_as_far_as_it_may_and_says_so() -> None:
    bound, length = 2, 5
    with on_nodes(max_staleness=bound) as (trainer, pool):  # the first one is always quicker
        found = run(trainer, length)
        policies = {(worker, n): policy for worker, n, policy in pool.steps}
        assert policies[0, 1] == policies[0, 2] == 0
        assert all(n - bound <= policy <= n for (_, n), policy in policies.items())
        for n, one in enumerate(found):
            expected = [n - policies[slot // 3, n] for slot in range(6)]
            stale = [0] * 6 if one.staleness is None else one.staleness.tolist()
            assert stale == expected
            assert one.age["staleness_max"] == max(expected)
        assert found[2].staleness.tolist() == [2, 2, 2, 1, 1, 1]
        assert trainer.env_steps == length * 6 * PPO.n_steps


def test_a_row_weighs_as_much_as_its_action_has_become_less_likely() -> None:
    with on_nodes(max_staleness=1) as (trainer, _):
        first = trainer.collect()
        assert first.weights is None
        old = deepcopy(trainer.agent)
        trainer.learn(first)
        second: Any = trainer.collect()
        assert second.staleness.tolist() == [1] * 6
        states, rows = torch.from_numpy(second.states), (second.obs, second.actions, None)
        with torch.no_grad():
            before, _ = judged(old, *rows, second.ended, states)
            now, _ = judged(trainer.agent, *rows, second.ended, states)
        assert np.abs(now - before).max() > 1e-3
        np.testing.assert_allclose(second.weights, np.minimum(np.exp(now - before), 1), atol=1e-5)
        assert second.age["importance_weight"] == pytest.approx(second.weights.mean())


def test_statistics_of_observations_may_change_while_nodes_run_ahead() -> None:
    normalised = replace(PPO, normalise_obs=True)
    with on_nodes(max_staleness=1, ppo=normalised) as (trainer, _):
        for one in run(trainer, 3)[1:]:
            # as the policy was a moment ago: nearly as likely, and never far off
            assert one.staleness.tolist() == [1] * 6
            assert 0.5 < one.weights.min() <= one.weights.max() <= 1.0


def test_a_run_goes_on_from_what_was_asked_for_also_if_more_was_begun() -> None:
    with on_nodes(max_staleness=2) as (trainer, _):
        run(trainer, 3)
        state = trainer.state()
        following = trainer.collect()
        with on_nodes(workers=3) as (other, _):
            other.load(state)
            again = other.collect()
        assert again.staleness is None
        np.testing.assert_array_equal(again.obs[0][0], following.obs[0][0])
        trainer.load(state)
        np.testing.assert_array_equal(trainer.collect().obs[0], again.obs[0])


def test_slots_are_dealt_anew_when_all_are_at_the_same_segment() -> None:
    with on_nodes(max_staleness=2) as (trainer, pool):
        run(trainer, 2)
        pool.join(2)
        run(trainer, 5)
        assert [event.kind for event in pool.events] == ["moved"]
        workers = [{who for who, number, _ in pool.steps if number == n} for n in range(7)]
        assert workers == [{0, 1}] * 4 + [{0, 1, 2}] * 3  # two more had been begun


@pytest.mark.parametrize(
    ("slow_nodes", "kinds", "sizes"),
    [
        ("wait", ["slow"], [2, 2, 2]),
        ("rebalance", ["slow", "moved"], [3, 2, 1]),
        ("skip", ["slow", "lost", "moved"], [3, 3]),
    ],
)
def test_a_slow_node_is_named_and_waited_for_relieved_or_skipped(
    slow_nodes: Any, kinds: list[str], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_stepper, "SKIP_S", 0.0)
    with on_nodes(workers=3, slow_nodes=slow_nodes) as (trainer, pool):
        pool.slot_s = {0: 0.5, 1: 0.5, 2: 2.0}

        def turn(busy: Sequence[int]) -> int | None:
            """The slow one comes last, and lets the others wait."""
            pool.seconds += 1.0
            return None if [*busy] == [2] and pool.seconds < 9.0 else min(busy)

        pool.turn = turn
        run(trainer, 4)
        assert [event.kind for event in pool.events] == kinds
        assert pool.events[0].where == "node node-2 (host)"
        last = [task.last - task.first for task in pool.tasks[-len(sizes) :]]
        assert last == sizes
        assert_same_policy(trainer, trained_here(4))
