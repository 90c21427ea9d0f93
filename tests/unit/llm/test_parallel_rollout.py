"""Rollouts with a model in this process: failures, budgets, rewards, what is asked."""

import gc
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envfleet.errors import ConfigError, InferenceError, JournalError, RolloutFailed
from envfleet.llm.environments.base import Mode
from envfleet.llm.export import write_export
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine, some_action
from envfleet.llm.inference.types import GenerateRequest, Generation
from envfleet.llm.journal import read_journal
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.parallel_rollout import ParallelRolloutManager
from envfleet.llm.registry import register_env
from envfleet.llm.rollout import play_rollout
from envfleet.llm.rollout_tally import RolloutTimings, rollout_verdict
from envfleet.llm.same_trajectories import trajectory_difference
from envfleet.llm.settings import read_agent_proxy
from envfleet.llm.trajectories import Trajectory
from envfleet.llm.work_share import MachineState, WorkShare, split, wanted_workers
from tests.unit.llm.games import Climb
from tests.unit.llm.rollouts import config_with, play


class Counting(ScriptedEngine):
    """Counts what it is asked, and fails where a test says so."""

    def __init__(self, fails: Any = lambda request: None, script: Any = some_action) -> None:
        super().__init__(script)
        self.asked: Counter[str] = Counter()
        self._fails = fails

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked[request.request_id] += 1
        reason = self._fails(request)
        if reason is not None:
            raise InferenceError(reason, "as the test says")
        return await super().generate(request)


def in_turn(turn: int, env_ids: set[int], reason: str, attempts: int = 1) -> Any:
    """Fail one turn of some environments, in their first attempts."""

    def fails(request: GenerateRequest) -> str | None:
        env_id, attempt, number = map(int, request.request_id.split("."))
        is_meant = env_id in env_ids and number == turn and attempt < attempts
        return reason if is_meant else None

    return fails


# ---- the same as by hand ------------------------------------------------------------------------


def test_it_plays_as_the_loop_over_the_state_manager_does() -> None:
    config = config_with()
    result = play(config)
    responses = {
        (one.env_id, turn.number): turn.prefill + turn.generation.text
        for one in result.trajectories
        for turn in one.turns
    }

    def policy(caches: Any) -> list[str]:
        return [responses[cache["env_id"], len(cache["history"]) - 1] for cache in caches]

    with EnvStateManager(config) as manager:
        by_hand = play_rollout(manager, policy, read_agent_proxy(config), seed=7)
    assert result.metrics == by_hand.metrics
    for one, cache in zip(result.trajectories, by_hand.caches, strict=True):
        history = cache["history"]
        assert [turn.state for turn in one.turns] == [entry["state"] for entry in history[:-1]]
        assert one.final_state == history[-1]["state"]
        assert [turn.reward for turn in one.turns] == [e["reward"] for e in history[:-1]]
        assert [list(turn.actions) for turn in one.turns] == [e["actions"] for e in history[:-1]]
        assert one.penalty == pytest.approx(cache["penalty"])


def test_lockstep_gives_the_same_trajectories() -> None:
    lockstep = play(config_with("agent_proxy.rollout_mode=lockstep"))
    assert trajectory_difference(play(config_with()).trajectories, lockstep.trajectories) is None


def test_groups_share_seeds_and_every_environment_is_played() -> None:
    result = play(config_with(group_size=3))
    assert [one.env_id for one in result.trajectories] == list(range(12))
    assert [one.seed for one in result.trajectories] == [7] * 3 + [8] * 3 + [9] * 3 + [10] * 3
    starts = [one.turns[0].state for one in result.trajectories]
    assert all(len(set(starts[first : first + 3])) == 1 for first in (0, 3, 6, 9))


def test_used_environments_play_as_new_ones() -> None:
    config = config_with()
    with (
        SharedLLMInferenceManager(ScriptedEngine()) as llm,
        ParallelRolloutManager(config, llm) as manager,
    ):
        manager.rollout(seed=1)
        assert manager._seats is not None
        num_built, used = manager._seats.num_built, manager.rollout(seed=7)
        assert manager._seats.num_built == num_built
    assert trajectory_difference(play(config).trajectories, used.trajectories) is None


def test_without_a_seed_training_moves_on_and_validation_does_not() -> None:
    config = config_with("es_manager.val.env_groups=1", "es_manager.val.env_configs.n_groups=[1]")
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        with ParallelRolloutManager(config, llm) as manager:
            assert [manager.rollout().seed for _ in range(2)] == [10000, 10004]
            with pytest.raises(ConfigError, match="seed must be a whole number"):
                manager.rollout(seed=-1)
        with ParallelRolloutManager(config, llm, mode="val") as manager:
            assert [manager.rollout().seed for _ in range(2)] == [123, 123]


# ---- failures -----------------------------------------------------------------------------------


def test_one_failed_request_does_not_affect_the_others() -> None:
    whole = play(config_with())
    engine = Counting(in_turn(1, {0}, "engine", attempts=9))
    result = play(config_with("agent_proxy.on_failure=mask"), engine)
    failed = result.trajectories[0]
    assert failed.failure is not None
    assert (failed.failure.reason, failed.is_masked, len(failed.turns)) == ("engine", True, 1)
    assert result.failures == {"engine": 1}
    assert result.num_masked == 1
    assert trajectory_difference(whole.trajectories[1:], result.trajectories[1:]) is None


def test_retry_plays_the_same_start_again_with_other_random_numbers() -> None:
    engine = Counting(in_turn(1, {0, 3}, "timeout", attempts=2))
    result = play(config_with(), engine)
    assert result.failures == {"timeout": 4}
    assert result.num_masked == 0
    again = result.trajectories[0]
    assert (again.attempt, again.seed, again.failure) == (2, 7, None)
    assert again.turns[0].state == result.trajectories[1].turns[0].state
    assert result.num_attempts == 8 + 4


def test_retry_masks_when_all_attempts_are_used_up() -> None:
    result = play(config_with(), Counting(in_turn(0, {5}, "engine", attempts=99)))
    assert result.trajectories[5].attempt == 2
    assert [one.env_id for one in result.trajectories if one.is_masked] == [5]


def test_refill_gives_complete_groups_from_another_start() -> None:
    config = config_with("agent_proxy.on_failure=refill")
    result = play(config, Counting(in_turn(1, {0}, "engine")))
    first, second, *others = result.trajectories
    assert (first.attempt, second.attempt) == (1, 1)
    assert first.seed == second.seed == 1_000_007
    assert first.turns[0].state == second.turns[0].state
    assert result.num_masked == 0
    assert {one.attempt for one in others} == {0}


def test_refill_masks_the_whole_group_in_the_end(tmp_path: Path) -> None:
    config = config_with("agent_proxy.on_failure=refill", "agent_proxy.max_attempts=2")
    engine = Counting(in_turn(0, {0}, "engine", attempts=99))
    result = play(config, engine, folder=tmp_path)
    assert [one.env_id for one in result.trajectories if one.is_masked] == [0, 1]
    assert [one.is_masked for one in read_journal(tmp_path).trajectories] == [True] * 2 + [
        False
    ] * 6


def test_raise_ends_the_rollout_and_keeps_what_was_played(tmp_path: Path) -> None:
    config = config_with("agent_proxy.on_failure=raise")
    engine = Counting(in_turn(2, {1}, "engine"))
    with pytest.raises(RolloutFailed, match=r"environment 1 \(SimpleSokoban\) failed in turn 3"):
        play(config, engine, folder=tmp_path)
    kept = read_journal(tmp_path).trajectories[1]
    assert len(kept.turns) == 2
    assert kept.failure is not None


def test_turns_in_a_row_without_an_action_end_a_trajectory() -> None:
    def mumble(request: GenerateRequest, dice: random.Random) -> str:
        return "mumble"

    config = config_with(
        "agent_proxy.max_invalid_turns=2", "agent_proxy.on_failure=mask", tags=("FrozenLake",)
    )
    result = play(config, ScriptedEngine(mumble))
    assert result.failures == {"parse": 2}
    assert [len(one.turns) for one in result.trajectories] == [2, 2]
    assert [turn.is_valid for turn in result.trajectories[0].turns] == [False, False]
    assert result.trajectories[0].penalty == pytest.approx(-0.2)


@pytest.fixture(scope="module", autouse=True)
def _shaky() -> None:
    register_env("shaky-climb", Shaky)


class Shaky(Climb):
    """Cannot be played with some seeds."""

    def _begin(self, seed: int, mode: Mode) -> None:
        if seed == 7:
            raise RuntimeError("no such mountain")
        super()._begin(seed, mode)


def shaky(*changes: str, **more: Any) -> Any:
    return config_with(
        "+custom_envs.Shaky.env_type=shaky-climb",
        "+custom_envs.Shaky.max_actions_per_traj=6",
        *changes,
        tags=("Shaky", "FrozenLake"),
        **more,
    )


@pytest.mark.parametrize("backend", [None, "fleet", "threading"])
def test_an_environment_that_fails_is_a_reason_of_its_own(backend: str | None) -> None:
    result = play(shaky("agent_proxy.on_failure=mask", backend=backend))
    assert result.failures == {"env": 2}
    failure = result.trajectories[0].failure
    assert failure is not None
    assert failure.error == "reset: RuntimeError: no such mountain"
    refilled = play(shaky("agent_proxy.on_failure=refill", backend=backend))
    assert refilled.num_masked == 0
    assert refilled.trajectories[0].seed == 1_000_007


def test_a_budget_ends_a_rollout_cleanly_and_another_one_goes_on(tmp_path: Path) -> None:
    def spent(request: GenerateRequest) -> str | None:
        return "budget" if int(request.request_id.split(".")[2]) >= 2 else None

    result = play(config_with(), Counting(spent), folder=tmp_path)
    assert set(result.failures) == {"budget"}
    assert all(len(one.turns) <= 2 for one in result.trajectories)
    engine = Counting()
    more = play(config_with(), engine, folder=tmp_path)
    assert more.failures == {}
    assert trajectory_difference(play(config_with()).trajectories, more.trajectories) is None
    assert min(int(name.split(".")[2]) for name in engine.asked) == 2


@pytest.mark.parametrize("on_failure", ["retry", "mask", "refill", "raise"])
def test_what_an_outage_ended_is_taken_up(tmp_path: Path, on_failure: str) -> None:
    config = config_with(
        f"agent_proxy.on_failure={on_failure}",
        "agent_proxy.max_attempts=1",
        tags=("SimpleSokoban",),
    )
    num_masked = 2 if on_failure == "refill" else 1
    outage = Counting(in_turn(1, {0}, "engine"))
    if on_failure == "raise":
        with pytest.raises(RolloutFailed):
            play(config, outage, folder=tmp_path)
    else:
        assert play(config, outage, folder=tmp_path).num_masked == num_masked
        again = play(config, outage, folder=tmp_path)  # it lasts
        assert again.failures == {"engine": 1}
        assert again.num_masked == num_masked
    engine = Counting()
    more = play(config, engine, folder=tmp_path)
    assert (more.failures, more.num_masked) == ({}, 0)
    assert not any(one.is_masked for one in read_journal(tmp_path).trajectories)
    assert trajectory_difference(play(config).trajectories, more.trajectories) is None
    assert "0.0.0" not in engine.asked


def test_what_stays_failed_is_told_again(tmp_path: Path) -> None:
    config = config_with("agent_proxy.max_invalid_turns=1", tags=("FrozenLake",))
    first = play(config, ScriptedEngine(lambda request, dice: "mumble"), folder=tmp_path)
    assert first.num_masked == 2
    again = play(config, folder=tmp_path)
    assert (again.timings.num_turns, again.failures) == (0, {"parse": 2})
    assert again.first_errors == first.first_errors


# ---- rewards, journal ---------------------------------------------------------------------------


def length_bonus(trajectory: Trajectory) -> float:
    return 0.5 * len(trajectory.turns)


def no_bonus(trajectory: Trajectory) -> float:
    raise ValueError("no")


def nan_bonus(trajectory: Trajectory) -> float:
    return float("nan")


def test_reward_functions_are_added() -> None:
    result = play(config_with(), of_manager={"reward_functions": [length_bonus]})
    one = result.trajectories[0]
    assert one.extra_rewards == {"length_bonus": 0.5 * len(one.turns)}
    assert one.total_reward == one.reward + one.penalty + one.extra_rewards["length_bonus"]


@pytest.mark.parametrize(
    ("bonus", "why"), [(no_bonus, "no"), (nan_bonus, "it gave nan, which is no finite number")]
)
def test_a_reward_function_that_fails_is_told(tmp_path: Path, bonus: Any, why: str) -> None:
    config = config_with("agent_proxy.on_failure=mask")
    result = play(config, folder=tmp_path, of_manager={"reward_functions": [bonus]})
    assert result.failures == {"env": 8}
    failure = result.trajectories[0].failure
    assert failure is not None
    assert failure.error == f"the reward function {bonus.__name__} failed: ValueError: {why}"


def test_a_failed_trajectory_keeps_its_reason_if_its_reward_cannot_be_worked_out() -> None:
    engine = Counting(in_turn(0, {0}, "budget", attempts=9))
    config = config_with("agent_proxy.on_failure=mask", tags=("FrozenLake",))
    result = play(config, engine, of_manager={"reward_functions": [no_bonus]})
    assert result.failures == {"budget": 1, "env": 1}


class OddAnswers(ScriptedEngine):
    """Answers with what neither JSON nor UTF-8 can hold."""

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await super().generate(request)
        assert answer.token_ids is not None
        odd = request.request_id == "0.0.0"
        ids: Any = np.array(answer.token_ids)
        log_probs: Any = np.full(len(ids), -np.inf if odd else -0.5, np.float32)
        text = "\ud83d" + answer.text if odd else answer.text
        return replace(answer, text=text, token_ids=ids, log_probs=log_probs)


def test_an_answer_that_files_cannot_hold_as_it_is_aborts_nothing(tmp_path: Path) -> None:
    result = play(config_with(tags=("FrozenLake",)), OddAnswers(), folder=tmp_path)
    assert result.failures == {}
    odd, plain = (one.turns[0].generation for one in result.trajectories)
    assert odd.text.startswith("\N{REPLACEMENT CHARACTER}by a script")
    assert (odd.token_ids, odd.log_probs) == (None, None)
    assert plain.log_probs == (-0.5,) * plain.num_tokens
    export = write_export(result.trajectories, "rows", tmp_path / "rows.jsonl")
    assert (export.num_trajectories, export.num_untold) == (2, 1)


def test_a_finished_rollout_is_read_from_its_journal_and_nothing_is_asked(tmp_path: Path) -> None:
    first = play(config_with(), folder=tmp_path)
    engine = Counting()
    again = play(config_with(), engine, folder=tmp_path)
    assert not engine.asked
    assert trajectory_difference(first.trajectories, again.trajectories) is None
    assert again.metrics == first.metrics


def test_a_journal_of_another_rollout_is_refused(tmp_path: Path) -> None:
    play(config_with(), folder=tmp_path)
    with pytest.raises(JournalError, match="holds another rollout: its max_turn is 5 and not 4"):
        play(config_with("agent_proxy.max_turn=4"), folder=tmp_path)
    with pytest.raises(JournalError, match="its seed is 7 and not 8"):
        play(config_with(), folder=tmp_path, seed=8)
    changed = config_with("custom_envs.SimpleSokoban.env_config.num_boxes=2")
    where = r"its environments\.SimpleSokoban\.1\.num_boxes is 1 and not 2"
    with pytest.raises(JournalError, match=where):
        play(changed, folder=tmp_path)


@pytest.mark.parametrize("num_kept", [1, 3, 8, 20, 33])
def test_a_rollout_goes_on_in_mid_trajectory(tmp_path: Path, num_kept: int) -> None:
    engine = Counting()
    whole = play(config_with(), engine, folder=tmp_path)
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:25])
    num_turns = sum(b'"kind":"turn"' in line for line in lines[:num_kept])
    again = Counting()
    resumed = play(config_with(), again, folder=tmp_path)
    assert trajectory_difference(whole.trajectories, resumed.trajectories) is None
    assert sum(again.asked.values()) == sum(engine.asked.values()) - num_turns


def test_an_environment_that_does_not_repeat_itself_is_told(tmp_path: Path) -> None:
    play(config_with(tags=("FrozenLake",)), folder=tmp_path)
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"kind":"end"' not in line))
    changed = config_with("agent_proxy.on_failure=mask", tags=("FrozenLake",))
    changed.custom_envs.FrozenLake.env_config = {"is_slippery": False}
    header = path.read_bytes().splitlines(keepends=True)[0]
    with pytest.raises(JournalError, match=r"its environments\.FrozenLake\.1 is None and not"):
        play(changed, folder=tmp_path)
    assert path.read_bytes().splitlines(keepends=True)[0] == header


# ---- who plays what -----------------------------------------------------------------------------


class Task:
    def __init__(self, env_id: int) -> None:
        self.env_id, self.attempt = env_id, 0


@pytest.mark.parametrize(("num_tasks", "num_workers"), [(7, 3), (2, 4), (16, 4), (1, 1)])
def test_shares_cover_all_tasks_whatever_the_remainder(num_tasks: int, num_workers: int) -> None:
    tasks: Any = [Task(number) for number in range(num_tasks)]
    shares = split(tasks, num_workers)
    assert [one for share in shares for one in share] == tasks
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_worker_with_nothing_left_takes_from_the_one_with_most() -> None:
    tasks: Any = [Task(number) for number in range(4)]
    share = WorkShare(tasks, 2, expected=lambda task: task.env_id)
    first = [share.next(0) for _ in range(3)]
    assert [one.env_id for one in first if one is not None] == [1, 0, 3]
    assert share.num_stolen == 1
    assert sorted(share.lost(0)) == [(0, 0), (1, 0), (3, 0)]
    assert not share.is_owner(0, (1, 0))


def test_a_trajectory_that_was_lost_twice_is_played_alone() -> None:
    tasks: Any = [Task(number) for number in range(3)]
    share = WorkShare(tasks, 1)
    assert share.next(0) is tasks[0]
    share.lost(0)
    share.add(tasks[:1])
    assert [share.next(0) for _ in range(3)] == [tasks[1], tasks[2], tasks[0]]
    share.lost(0)
    share.add(tasks[:1])  # lost twice now
    share.add(tasks[1:])
    assert share.next(0) is tasks[0]
    assert share.next(0) is None
    share.ended((0, 0))
    assert [share.next(0) for _ in range(2)] == tasks[1:]


def test_a_trajectory_is_played_alone_before_it_would_be_given_up() -> None:
    tasks: Any = [Task(number) for number in range(2)]
    share = WorkShare(tasks, 1, suspect_after=1)
    assert [share.next(0) for _ in range(2)] == tasks
    share.lost(0)
    share.add(tasks)
    assert [share.next(0) for _ in range(2)] == [tasks[0], None]


def test_a_resting_worker_gets_nothing() -> None:
    tasks: Any = [Task(number) for number in range(4)]
    share = WorkShare(tasks, 2)
    share.active = 1
    assert share.next(1) is None
    assert len([share.next(0) for _ in range(4)]) == 4


@pytest.mark.parametrize(
    ("active", "num_waiting", "now", "wanted", "why"),
    [
        (2, 5, MachineState(1.0, 2, 0.5), 3, "5 trajectories wait"),
        (2, 5, MachineState(3.5, 2, 0.5), 2, None),
        (2, 5, MachineState(9.0, 2, 0.5), 1, "the load is 9.0 on 2 cores"),
        (2, 5, MachineState(1.0, 2, 0.04), 1, "only 4% of the memory is free"),
        (2, 0, MachineState(9.0, 2, 0.5), 1, "the load is 9.0 on 2 cores"),
        (1, 0, MachineState(9.0, 2, 0.01), 1, None),
        (4, 9, MachineState(0.0, 2, 0.9), 4, None),
    ],
)
def test_the_number_of_workers_follows_load_and_memory(
    active: int, num_waiting: int, now: MachineState, wanted: int, why: str | None
) -> None:
    got, told = wanted_workers(active, 4, num_waiting, now)
    assert got == wanted
    assert (told is None) == (why is None)
    assert why is None or why in str(told)


@pytest.mark.parametrize(
    ("timings", "begin"),
    [
        (RolloutTimings(wall_s=10, busy_share=0.98, capacity_share=0.9), "LLM-bound"),
        (RolloutTimings(wall_s=10, busy_share=0.2, env_s=9), "Env-bound"),
        (RolloutTimings(wall_s=10, busy_share=0.05, env_s=1), "Too short to judge"),
        (
            RolloutTimings(wall_s=10, busy_share=1.0, capacity_share=0.3, tail_s=6),
            "Straggler-bound",
        ),
    ],
)
def test_the_verdict_names_what_holds_a_rollout_up(timings: RolloutTimings, begin: str) -> None:
    assert rollout_verdict(timings, 1, 100).startswith(begin)


def test_a_manager_of_inference_keeps_nothing_of_a_rollout_that_is_over() -> None:
    """It serves thousands of them in a training run."""
    config = config_with(tags=("FrozenLake",), backend="threading")
    with (
        SharedLLMInferenceManager(ScriptedEngine()) as llm,
        ParallelRolloutManager(config, llm) as manager,
    ):
        before = num_trajectories_in_memory()
        manager.rollout(seed=1)
        assert num_trajectories_in_memory() == before


def num_trajectories_in_memory() -> int:
    gc.collect()
    return sum(type(one) is Trajectory for one in gc.get_objects())
