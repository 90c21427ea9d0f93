"""Proofs that a configuration gives one rollout: those that hold, and what breaks one."""

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envfleet.engine.options import StartMethod
from envfleet.errors import ConfigError, EnvfleetError
from envfleet.llm.environments.base import Mode, Step
from envfleet.llm.registry import register_env
from envfleet.llm.settings import read_agent_proxy, read_settings
from envfleet.llm.variants import (
    IN_PROCESS,
    OTHER_RANDOM,
    REPEATED,
    Variant,
    play_variant,
    variants_for,
)
from envfleet.llm.verify import VariantOutcome, Verification, verify
from envfleet.testing.global_random import shared_states
from tests.unit.llm import games
from tests.unit.llm.games import Climb

FORK: tuple[StartMethod, ...] = ("fork",)


class DrawsFromPython(Climb):
    def _act(self, action: Any) -> Step:
        said, reward, *rest, info = super()._act(action)
        return said, reward, rest[0], rest[1], {**info, "luck": random.random()}


class DrawsFromNumpy(Climb):
    def _begin(self, seed: int, mode: Mode) -> None:
        super()._begin(seed, mode)
        self._floor += int(np.random.randint(3))


class DrawsAndTells(Climb):
    """Its draws show nowhere: nobody would notice until they do."""

    def _act(self, action: Any) -> Step:
        random.random()
        return super()._act(action)


class InHashOrder(Climb):
    def _text(self) -> str:
        return " ".join({f"word{number}" for number in range(20)})


class KnowsItsProcess(Climb):
    def _text(self) -> str:
        return f"{super()._text()} in {os.getpid()}"


class KnowsTheTime(Climb):
    def _act(self, action: Any) -> Step:
        said, reward, *rest, info = super()._act(action)
        return said, reward, rest[0], rest[1], {**info, "now": time.perf_counter()}


@pytest.fixture(autouse=True)
def _games() -> Iterator[None]:
    games.register()
    before = shared_states(), os.environ.get("PYTHONHASHSEED")
    yield
    assert before == (shared_states(), os.environ.get("PYTHONHASHSEED"))


def test_a_configuration_with_a_deadline_is_proved_too() -> None:
    config = games.config(("Climb", 2), step_timeout_s=60, use_multiprocessing=True)
    found = verify(config, workers=[1], start_methods=FORK)
    assert found.ok
    assert "begun in workers, played here" in [one.variant.name for one in found.outcomes]


def test_a_deadline_that_cannot_be_kept_is_no_proof() -> None:
    config = games.config(("Climb", 2), step_timeout_s=60, use_multiprocessing="resets")
    with pytest.raises(ConfigError, match="step_timeout_s cannot be kept with use_multiprocessing"):
        verify(config, workers=[1], start_methods=FORK)


class Deadly(Climb):
    """Ends its process in a step, or holds it up, or cannot even be built."""

    how = ""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        if self.how == "constructor":
            os._exit(7)

    def _act(self, action: Any) -> Step:
        match self.how:
            case "step":
                os._exit(7)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)
        return super()._act(action)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("step", r"environment 2 \(Climb, seed 1\) cannot be played .* in step its worker died"),
        ("killed", "environment 2 .* in step its worker was killed"),
        ("hang", "environment 2 .* in step its worker passed its deadline"),
        ("constructor", "an environment of .*Climb cannot be played .* died during the constr"),
    ],
)
def test_what_would_end_this_process_is_told_by_workers(
    how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadly, "how", how)
    config = with_climb(Deadly)
    config["es_manager"] |= {"step_timeout_s": 0.5, "sequential_env_types": ["climb"]}
    with pytest.raises(EnvfleetError, match=said):
        verify(config, workers=(1,), start_methods=FORK)


def with_climb(env_class: type[Climb]) -> dict[str, Any]:
    register_env("climb", env_class, replace=True)
    return games.config(("Picture", 1), ("Climb", 2))


def found_by(verification: Verification) -> list[str]:
    return [one.variant.name for one in verification.outcomes if not one.is_equal]


def test_an_honest_configuration_is_proved() -> None:
    names: list[str] = []
    found = verify(
        games.config(("Climb", 2), ("Picture", 1), use_multiprocessing="auto"),
        workers=(1, 2),
        start_methods=("fork", "spawn"),
        on_variant=names.append,
    )
    assert found.ok, found.conclusion
    assert found_by(found) == []
    assert {one.digest for one in found.outcomes} == {found.digest}
    assert (found.num_envs, found.num_failures, found.global_random) == (6, 0, None)
    assert found.num_turns > 6
    assert found.conclusion.startswith("All 13 ways gave the rollout of one loop in this process: ")
    assert names[:2] == ["in this process", "global random numbers"]
    assert names[2:] == [one.variant.name for one in found.outcomes]


def test_another_seed_is_another_rollout() -> None:
    whole = games.config(("Climb", 2))
    settings, proxy = read_settings(whole, "train"), read_agent_proxy(whole)
    one, two = (play_variant(whole, settings, proxy, IN_PROCESS, seed) for seed in (0, 1))
    assert one.digest != two.digest


@pytest.mark.filterwarnings("error")
def test_failures_are_part_of_the_proof() -> None:
    with pytest.warns(RuntimeWarning, match="failed in reset") as said:
        found = verify(games.config(("Trouble", 2)), seed=665, workers=(2,), start_methods=FORK)
    assert found.ok, found.conclusion
    assert found.num_failures == 2
    assert len(said) == 1  # for both of them, though every way met them


class TestGlobalRandomNumbers:
    @pytest.mark.parametrize(
        ("env_class", "whose", "doing"),
        [
            (DrawsFromPython, r"Python's global state \(random.\*\)", "step"),
            (DrawsFromNumpy, r"numpy's global state \(np.random.\*\)", "reset"),
        ],
    )
    def test_are_found_with_their_user(self, env_class: Any, whose: str, doing: str) -> None:
        found = verify(with_climb(env_class), workers=(1,), start_methods=FORK)
        assert not found.ok
        assert found.global_random is not None
        assert re.match(f"Climb draws from {whose} in {doing}, which", found.global_random)
        assert OTHER_RANDOM.name in found_by(found)
        assert found.global_random in found.conclusion

    def test_are_found_where_nothing_differs_yet(self) -> None:
        found = verify(with_climb(DrawsAndTells), workers=(1,), start_methods=FORK)
        assert found_by(found) == []
        assert not found.ok
        assert found.conclusion.startswith("All ways were equal, but that is luck. Climb draws")


def test_hash_order_is_found_by_spawned_workers() -> None:
    found = verify(with_climb(InHashOrder), workers=(1, 2), start_methods=("fork", "spawn"))
    assert not found.ok
    differing = found_by(found)
    assert differing
    assert all("by spawn" in name for name in differing)
    first = next(one for one in found.outcomes if not one.is_equal)
    assert first.difference is not None
    assert (first.difference.env_id, first.difference.tag) == (2, "Climb")
    assert (first.difference.turn, first.difference.field) == (1, "state")


def test_what_depends_on_the_process_is_found_in_workers() -> None:
    found = verify(with_climb(KnowsItsProcess), workers=(1,), start_methods=FORK)
    always = [
        "1 worker by fork",
        "1 worker, other orders",
        "1 worker, one killed before each turn",
        "1 worker, killed, going on in this process",
    ]
    # where episodes begin in workers, some begin here too
    assert found_by(found)[: len(always)] == always
    assert "environment 2 (Climb), turn 1: state is 'train: floor" in found.conclusion


def test_what_does_not_repeat_itself_is_said_first() -> None:
    found = verify(with_climb(KnowsTheTime), workers=(1,), start_methods=FORK)
    assert found_by(found)[0] == REPEATED.name
    assert "info.now" in found.conclusion
    assert "No way of playing can repair that" in found.conclusion


class TestKills:
    def test_workers_are_killed_before_each_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        killed: list[int] = []
        kill = os.kill

        def kill_and_count(pid: int, number: int) -> None:
            if number == signal.SIGKILL:
                killed.append(pid)
            kill(pid, number)

        monkeypatch.setattr(os, "kill", kill_and_count)
        whole = games.config(("Climb", 2))
        settings, proxy = read_settings(whole, "train"), read_agent_proxy(whole)
        variant = Variant(
            name="", use_multiprocessing=True, max_workers=2, start_method="fork", has_kills=True
        )
        recording = play_variant(whole, settings, proxy, variant, 0)
        longest = max(len(one["history"]) - 1 for one in recording.environments)
        assert len(killed) >= longest > 1
        assert len(set(killed)) > 1


class TestWays:
    def test_are_these(self) -> None:
        found = variants_for((1, 2, 3), ("fork", "spawn"), "auto")
        assert [variant.name for variant in found] == [
            "in this process, again",
            "one by one, other global random numbers",
            "in this process, other orders",
            "in threads",
            "1 worker by fork",
            "2 workers by fork",
            "3 workers by fork",
            "1 worker by spawn, PYTHONHASHSEED=1",
            "2 workers by spawn, PYTHONHASHSEED=2",
            "3 workers by spawn, PYTHONHASHSEED=3",
            "3 workers, other orders",
            "3 workers, one killed before each turn",
            "3 workers, killed, going on in this process",
            "begun in workers, played here",
            "as configured (auto)",
        ]
        assert len(variants_for((2,), FORK, False)) == len(variants_for((2,), FORK, True)) - 1

    def test_a_way_that_fails_is_no_equal(self) -> None:
        outcome = VariantOutcome(IN_PROCESS, 0.1, error="StartError: no room")
        found = Verification(2, 4, 0, "0", (VariantOutcome(REPEATED, 0.1), outcome), None)
        assert not found.ok
        assert found.conclusion == (
            "1 of 2 ways differ from one loop in this process. The first, in this process: "
            "StartError: no room."
        )

    def test_a_wrong_configuration_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="mode must be one of 'train', 'val'; got 'test'"):
            verify(games.config(("Climb", 1)), mode="test")
