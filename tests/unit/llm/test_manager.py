"""What a manager gives for what it gets: reset, step, groups, seeds, penalties, metrics."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envfleet.errors import ActionError, ConfigError, FleetClosed, OutOfOrder, StartError
from envfleet.llm.config import load_config
from envfleet.llm.environments.base import TextEnv
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import EnvInWorker, EnvStatus
from envfleet.llm.registry import register_env
from tests.unit.llm import games
from tests.unit.llm.games import config, inputs

WAYS: list[Any] = [False, "threads", True, "resets"]


@pytest.fixture(autouse=True)
def _games() -> None:
    games.register()


@pytest.fixture(params=WAYS, ids=["here", "threads", "workers", "resets"])
def climbing(request: pytest.FixtureRequest) -> Iterator[EnvStateManager]:
    settings = config(("Climb", 2), use_multiprocessing=request.param, max_workers=2)
    with EnvStateManager(settings) as manager:
        yield manager


def made(*tags: tuple[str, int], mode: str = "train", **manager: Any) -> EnvStateManager:
    return EnvStateManager(config(*tags, **manager), mode)


class TestBeforeAnyReset:
    def test_ids_run_through_tags_and_groups_through_ids(self) -> None:
        manager = made(("Climb", 1), ("Trouble", 2), group_size=3)
        assert [entry["env_id"] for entry in manager.envs] == list(range(9))
        assert [entry["group_id"] for entry in manager.envs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert [entry["tag"] for entry in manager.envs] == ["Climb"] * 3 + ["Trouble"] * 6
        assert manager.envs[0]["max_actions_per_traj"] == 5
        assert manager.envs[0]["status"] == EnvStatus(False, False, 0, [], None)

    def test_environments_are_there_or_say_where_they_are(self, climbing: EnvStateManager) -> None:
        is_here = climbing.use_multiprocessing in (False, "resets")
        assert all(isinstance(one["env"], games.Climb) == is_here for one in climbing.envs)
        assert all(isinstance(one["env"], EnvInWorker) != is_here for one in climbing.envs)
        assert climbing.envs[0]["env"].config == games.ClimbConfig()
        assert "as asked" in climbing.plan

    def test_an_entry_has_its_environment_s_own_configuration(self) -> None:
        for where in ("auto", *WAYS):
            settings = load_config("bandit", ["es_manager.train.group_size=1"])
            settings["es_manager"]["use_multiprocessing"] = where
            with EnvStateManager(settings) as manager:
                for _ in range(2):
                    manager.reset(seed=1)
                    entry = manager.envs[0]
                    assert entry["config"] is entry["env"].config
                    is_here = not isinstance(entry["env"], EnvInWorker)
                    assert (entry["config"].action_lookup is not None) == is_here
                manager.use_multiprocessing = False
                assert manager.envs[0]["config"] is manager.envs[0]["env"].config
                assert manager.envs[0]["config"].action_lookup is not None
                manager.use_multiprocessing = True
                manager.reset(seed=1)
                assert manager.envs[0]["config"].action_lookup is None

    def test_nothing_can_be_stepped_and_nothing_summed_up(self) -> None:
        manager = made(("Climb", 1))
        with pytest.raises(OutOfOrder, match="call reset first"):
            manager.step([])
        with pytest.raises(OutOfOrder, match="there is no rollout yet; call reset first"):
            manager.get_rollout_states()
        with pytest.raises(OutOfOrder, match="there is no rollout yet; call reset first"):
            manager.render()


class TestReset:
    def test_every_environment_has_a_cache_with_its_first_state(
        self, climbing: EnvStateManager
    ) -> None:
        caches = climbing.reset(seed=42)
        assert [cache["env_id"] for cache in caches] == [0, 1, 2, 3]
        first = caches[0]["history"][0]["state"]
        assert first.startswith("train: floor ")
        assert caches[0] == {
            "env_id": 0,
            "history": [{"state": first, "actions_left": 5}],
            "group_id": 0,
            "tag": "Climb",
            "penalty": 0,
        }
        assert caches is climbing.rollout_cache

    def test_a_group_shares_its_seed_and_the_next_has_the_next(
        self, climbing: EnvStateManager
    ) -> None:
        caches = climbing.reset(seed=42)
        assert [entry["status"].seed for entry in climbing.envs] == [42, 42, 43, 43]
        states = [cache["history"][0]["state"] for cache in caches]
        assert states[0] == states[1]
        assert states[2] == states[3]

    def test_training_goes_on_by_as_many_seeds_as_there_are_groups(self) -> None:
        manager = EnvStateManager({**config(("Climb", 2)), "seed": {"train": 10_000}})
        seen = []
        for seed in (None, None, 10_100, None):
            manager.reset(seed)
            seen.append([entry["status"].seed for entry in manager.envs[::2]])
        assert seen == [[10_000, 10_001], [10_002, 10_003], [10_100, 10_101], [10_101, 10_102]]

    @pytest.mark.parametrize(
        ("seeds", "first"), [({"val": 7}, 7), ({"train": 1}, 123), (None, 123)]
    )
    def test_validation_begins_at_the_same_seed_every_time(self, seeds: Any, first: int) -> None:
        settings = config(("Climb", 1))
        if seeds is not None:
            settings["seed"] = seeds
        manager = EnvStateManager(settings, mode="val")
        for _ in range(2):
            caches = manager.reset()
            assert manager.envs[0]["status"].seed == first
            assert caches[0]["history"][0]["state"].startswith("val: ")

    def test_without_any_seed_training_begins_anywhere(self) -> None:
        manager = made(("Climb", 1))
        manager.reset()
        first = manager.envs[0]["status"].seed
        assert first is not None
        assert 0 <= first <= 1_000_000

    def test_a_reset_forgets_the_rollout_before(self, climbing: EnvStateManager) -> None:
        once = deepcopy(climbing.reset(seed=1))
        climbing.step(inputs(e0=["Up", "nonsense"], e2=["Down"]))
        assert climbing.reset(seed=1) == once
        assert climbing.envs[0]["status"] == EnvStatus(seed=1)

    def test_pictures_stand_beside_their_mark(self) -> None:
        manager = made(("Picture", 1))
        entry = manager.reset(seed=3)[0]["history"][0]
        assert entry["state"] == "<images>"
        (picture,) = entry["images"]
        assert isinstance(picture, Image.Image)
        assert (picture.mode, picture.size) == ("RGB", (3, 2))
        assert np.asarray(picture).max() == 3


class TestStep:
    def test_the_caches_of_those_that_go_on_come_in_input_order(
        self, climbing: EnvStateManager
    ) -> None:
        climbing.reset(seed=42)  # group 0 begins at floor 2, group 1 at floor 0
        going_on = climbing.step(inputs(e3=["Up"], e0=["Up", "Up"], e2=["Down"]))
        assert [cache["env_id"] for cache in going_on] == [3, 2]
        assert going_on[0] is climbing.rollout_cache[3]

    def test_a_turn_is_written_into_the_last_entry_and_a_new_one_begins(
        self, climbing: EnvStateManager
    ) -> None:
        before = climbing.reset(seed=42)[3]["history"][0]["state"]
        climbing.step(inputs(e3=["UP", "down"]))
        turn, now = climbing.rollout_cache[3]["history"]
        assert turn["state"] == before
        assert turn["actions"] == [1, 2]
        assert turn["reward"] == pytest.approx(-0.2)
        assert (turn["llm_response"], turn["llm_raw_response"]) == ("r", "raw")
        assert now == {"state": before, "actions_left": 3}
        assert climbing.envs[3]["status"].rewards == [pytest.approx(-0.2)]
        assert climbing.envs[3]["status"].num_actions == 2

    def test_the_last_word_of_an_info_counts(self) -> None:
        manager = made(("Trouble", 1))
        manager.reset(seed=1)
        manager.step(inputs(e0=["a", "b", "c"]))
        info = manager.rollout_cache[0]["history"][0]["info"]
        assert info == {"success": False, "said": 4, "all": ["train 1", "a", "b", "c"]}

    def test_an_info_stays_as_it_was(self) -> None:
        manager = made(("Trouble", 1))
        manager.reset(seed=1)
        manager.step(inputs(e0=["a"]))
        manager.step(inputs(e0=["b"]))
        first, second, _ = manager.rollout_cache[0]["history"]
        assert first["info"]["all"] == ["train 1", "a"]
        assert second["info"]["all"] == ["train 1", "a", "b"]

    def test_nothing_is_done_after_the_end(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        assert climbing.step(inputs(e0=["Up", "Up", "Up", "Up"])) == []
        assert climbing.rollout_cache[0]["history"][0]["actions"] == [1, 1]
        assert climbing.envs[0]["status"].terminated
        assert not climbing.envs[0]["status"].truncated

    def test_an_end_without_success_is_a_truncation(self) -> None:
        manager = made(("Climb", 1))
        manager.reset(seed=42)
        manager.step(inputs(e0=["Down"] * 4))
        (going_on,) = manager.step(inputs(e1=["Down"]))
        assert manager.step(inputs(e0=["Down"])) == []
        status = manager.envs[0]["status"]
        assert (status.terminated, status.truncated, status.num_actions) == (True, True, 5)
        assert manager.rollout_cache[0]["history"][-1]["actions_left"] == 0
        assert going_on["env_id"] == 1

    def test_no_more_actions_than_are_left(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=43)
        climbing.step(inputs(e0=["Down", "Up", "Down"]))
        assert climbing.step(inputs(e0=["Down", "Up", "Down", "Up"])) == []
        cache = climbing.rollout_cache[0]
        assert cache["history"][1]["actions"] == [2, 1]
        assert cache["penalty"] == 0
        assert climbing.envs[0]["status"].truncated

    def test_no_input_is_nothing_to_do(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=1)
        assert climbing.step([]) == []


class TestFirstReady:
    def test_turns_come_back_as_step_would_return_them(self, climbing: EnvStateManager) -> None:
        turns = [inputs(e2=["Up"], e0=["Down"]), inputs(e3=["Up"], e0=["Down"], e1=["Down"])]
        climbing.reset(seed=42)
        expected = [deepcopy(climbing.step(turn)) for turn in turns]
        climbing.reset(seed=42)
        found = []
        for turn in turns:
            climbing.send(turn)
            assert climbing.in_flight == [one["env_id"] for one in turn]
            found.append(deepcopy(climbing.recv()))
            assert climbing.in_flight == []
        assert found == expected

    @pytest.mark.parametrize("way", [True, "threads"])
    def test_who_is_ready_does_not_wait_for_others(self, way: Any, tmp_path: Path) -> None:
        settings = config(("Trouble", 2), group_size=1, use_multiprocessing=way, max_workers=2)
        settings["custom_envs"]["Trouble"]["env_config"] = {"folder": str(tmp_path)}
        with EnvStateManager(settings) as manager:
            manager.reset(seed=1)
            manager.send(inputs(e0=["until told"], e1=["a"]))
            assert [cache["env_id"] for cache in manager.recv(min_envs=1)] == [1]
            assert manager.recv(timeout_s=0) == []
            manager.send(inputs(e1=["b"]))
            assert [cache["env_id"] for cache in manager.recv(min_envs=1)] == [1]
            assert manager.in_flight == [0]
            (tmp_path / "told").touch()
            assert [cache["env_id"] for cache in manager.recv()] == [0]
            assert manager.render() == ["train 1 until told", "train 2 a b"]

    def test_environments_here_and_in_workers_come_together(self, tmp_path: Path) -> None:
        settings = config(("Climb", 1), ("Trouble", 1), use_multiprocessing=True, max_workers=1)
        settings["es_manager"]["sequential_env_types"] = ["climb"]
        settings["custom_envs"]["Trouble"]["env_config"] = {"folder": str(tmp_path)}
        with EnvStateManager(settings) as manager:
            manager.reset(seed=1)
            manager.send(inputs(e2=["until told"], e0=["Down"], e1=["Down"]))
            assert [cache["env_id"] for cache in manager.recv(min_envs=1)] == [0, 1]
            (tmp_path / "told").touch()
            assert [cache["env_id"] for cache in manager.recv()] == [2]

    def test_an_episode_that_ends_is_not_returned(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        climbing.send(inputs(e0=["Up"] * 5, e3=["Down"]))
        assert [cache["env_id"] for cache in climbing.recv()] == [3]
        assert climbing.envs[0]["status"].terminated

    def test_what_makes_no_sense_is_refused(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        with pytest.raises(OutOfOrder, match="recv has nothing to wait for"):
            climbing.recv()
        climbing.send(inputs(e0=["Down"]))
        with pytest.raises(ActionError, match="the turn of environment 0 is in flight"):
            climbing.send(inputs(e1=["Down"], e0=["Down"]))
        with pytest.raises(OutOfOrder, match=r"environments \[0\] are in flight; call recv first"):
            climbing.step(inputs(e1=["Down"]))
        with pytest.raises(OutOfOrder, match=r"environments \[0\] are in flight; call recv first"):
            climbing.use_multiprocessing = False
        with pytest.raises(ConfigError, match="min_envs must be a whole number of at least 1"):
            climbing.recv(min_envs=0)
        assert len(climbing.recv()) == 1

    def test_a_reset_drops_what_is_in_flight(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        expected = deepcopy(climbing.step(inputs(e0=["Down"], e1=["Up"])))
        climbing.reset(seed=42)
        climbing.send(inputs(e0=["Up"], e2=["Up"]))
        climbing.reset(seed=42)
        assert climbing.in_flight == []
        assert climbing.step(inputs(e0=["Down"], e1=["Up"])) == expected


class TestPenalty:
    @pytest.mark.parametrize(
        ("actions", "penalties"),
        [
            (["Up"], 0),
            (["up", "DOWN"], 0),
            (["Up", "Sideways"], 1),
            (["Sideways", "Backwards", "3"], 1),
            ([], 1),
            ([None, 3.5, {"a": 1}], 1),
            ([" Up"], 1),
        ],
    )
    @pytest.mark.parametrize("given", [-0.1, 0.1])
    def test_it_is_added_once_per_turn_that_names_what_is_not_there(
        self, actions: list[Any], penalties: int, given: float
    ) -> None:
        manager = made(("Climb", 1), format_penalty=given)
        manager.reset(seed=1)
        manager.step(inputs(e0=actions))
        assert manager.rollout_cache[0]["penalty"] == pytest.approx(-0.1 * penalties)

    def test_a_turn_without_a_valid_action_changes_nothing_else(
        self, climbing: EnvStateManager
    ) -> None:
        climbing.reset(seed=1)
        climbing.step(inputs(e0=["?"]))
        turn, now = climbing.rollout_cache[0]["history"]
        assert (turn["actions"], turn["reward"], turn["info"]) == ([], 0, {})
        assert now == {"state": turn["state"], "actions_left": 5}
        assert climbing.envs[0]["status"].rewards == [0]

    def test_free_text_is_taken_as_it_is(self) -> None:
        manager = made(("Trouble", 1))
        manager.reset(seed=1)
        manager.step(inputs(e0=["Any Thing", "at ALL"]))
        assert manager.rollout_cache[0]["history"][0]["actions"] == ["Any Thing", "at ALL"]
        assert manager.rollout_cache[0]["penalty"] == 0


class TestMetrics:
    def test_of_an_environment(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        climbing.step(inputs(e0=["Down"], e2=["nonsense"]))
        climbing.step(inputs(e0=["Up", "Up", "Up"], e2=["Up"]))
        caches = climbing.get_rollout_states()
        shakes = [turn["info"]["shake"] for turn in caches[0]["history"][:2]]
        assert caches[0]["metrics"] == {
            "Climb/success": 1.0,
            "Climb/num_actions": 4,
            "Climb/shake": sum(shakes) / 2,
            "Climb/pass@2": 1.0,
        }
        assert caches[0]["history"][-1]["metrics"] == {"shake": shakes}
        # a turn without an action has no info, and counts
        shake = caches[2]["history"][1]["info"]["shake"]
        assert caches[2]["metrics"]["Climb/shake"] == shake / 2
        assert caches[1]["metrics"] == {
            "Climb/success": 0.0,
            "Climb/num_actions": 0,
            "Climb/pass@2": 1.0,
        }
        assert caches[3]["metrics"]["Climb/pass@2"] == 0.0

    def test_asking_twice_changes_nothing(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        climbing.step(inputs(e0=["Down"]))
        once = deepcopy(climbing.get_rollout_states())
        assert climbing.get_rollout_states() == once


class TestSeeds:
    @pytest.mark.parametrize("wrong", [-5, 1.5, True, "a"])
    def test_what_is_no_seed_is_refused_and_changes_nothing(self, wrong: Any) -> None:
        manager = EnvStateManager({**config(("Climb", 2)), "seed": {"train": 10}})
        with pytest.raises(ConfigError, match="seed must be a whole number from 0"):
            manager.reset(seed=wrong)
        manager.reset()
        assert manager.envs[0]["status"].seed == 10

    def test_numbers_of_numpy_are_seeds(self) -> None:
        manager = made(("Climb", 1))
        assert manager.reset(seed=np.int64(3)) == manager.reset(seed=3)  # type: ignore[arg-type]


class TestOddAnswers:
    """Whatever one environment gives, the others do not notice."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        ("action", "error"),
        [
            ("odd success", "ValueError: The truth value of an array"),
            ("odd render", "TypeError: render() must give text or pictures of uint8, got 3"),
            ("odd lookup", "AttributeError"),
        ],
    )
    def test_fail_alone(self, way: Any, action: str, error: str) -> None:
        with made(("Trouble", 1), use_multiprocessing=way, max_workers=1) as manager:
            manager.reset(seed=5)
            if action == "odd lookup":  # it counts from the next turn on
                manager.step(inputs(e0=[action], e1=["a"]))
            with pytest.warns(RuntimeWarning, match="environment 0 .Trouble"):
                manager.step(inputs(e0=[action], e1=["b"]))
            assert manager.rollout_cache[0]["failure"]["error"].startswith(error)
            assert "failure" not in manager.rollout_cache[1]
            assert manager.envs[1]["status"].num_actions >= 1

    def test_numbers_beyond_all_floats_count_nothing(self) -> None:
        manager = made(("Trouble", 1))
        manager.reset(seed=5)
        manager.step(inputs(e0=["huge"]))
        assert "Trouble/number" not in manager.get_rollout_states()[0]["metrics"]


class TestWrongInput:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("Up", "a list with a mapping"),
            ({"env_id": 0}, "a list with a mapping"),
            (["Up"], "mapping with env_id and actions"),
            ([{"env_id": 0}], "mapping with env_id and actions"),
            ([{"env_id": "0", "actions": []}], "env_id must be a whole number"),
            ([{"env_id": True, "actions": []}], "env_id must be a whole number"),
            ([{"env_id": 4, "actions": []}], "there are 0 to 3"),
            ([{"env_id": -1, "actions": []}], "there are 0 to 3"),
            ([{"env_id": 10**5000, "actions": []}], "there are 0 to 3"),
            ([{"env_id": 0, "actions": "Up"}], "must be a list of names"),
            (inputs(e1=["Up"]) + inputs(e1=["Up"]), "environment 1 was given two turns"),
        ],
    )
    def test_is_refused_before_anybody_moves(
        self, climbing: EnvStateManager, given: Any, said: str
    ) -> None:
        before = deepcopy(climbing.reset(seed=1))
        if isinstance(given, list):
            given = inputs(e0=["Up"]) + given if "two turns" in said else given
        with pytest.raises(ActionError, match=said):
            climbing.step(given)
        assert climbing.rollout_cache == before
        assert len(climbing.step(inputs(e1=["Down"]))) == 1

    def test_an_episode_that_is_over_cannot_go_on(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        climbing.step(inputs(e0=["Up", "Up"]))
        with pytest.raises(ActionError, match="the episode of environment 0 is over"):
            climbing.step(inputs(e1=["Up"], e0=["Up"]))
        assert len(climbing.rollout_cache[1]["history"]) == 1


class TestFailures:
    @pytest.mark.parametrize(
        ("how", "error"), [("closed", "RuntimeError"), ("exits", "SystemExit")]
    )
    @pytest.mark.parametrize("way", [*WAYS, "auto"])
    def test_one_that_cannot_be_built_is_named(
        self, way: Any, how: str, error: str, tmp_path: Path
    ) -> None:
        (tmp_path / how).touch()
        settings = config(("Trouble", 1), use_multiprocessing=way, max_workers=1)
        settings["custom_envs"]["Trouble"]["env_config"] = {"folder": str(tmp_path)}
        said = (
            r"an environment of custom_envs.Trouble \(trouble\) cannot be built: "
            f"{error}: no licence left"
        )
        with pytest.raises(StartError, match=said):
            EnvStateManager(settings)

    def test_what_a_class_lacks_is_named(self) -> None:
        register_env("half", TextEnv, replace=True)
        settings = config(("Climb", 1))
        settings["custom_envs"]["Climb"]["env_type"] = "half"
        with pytest.warns(RuntimeWarning, match="NotImplementedError: TextEnv has no _begin"):
            EnvStateManager(settings).reset(seed=1)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        ("action", "error"),
        [
            ("raise", "ValueError: it was told to raise"),
            ("exit", "SystemExit: 3"),
            ("NaN", "ValueError: the reward must be a finite number, got nan"),
        ],
    )
    def test_one_that_raises_ends_alone(self, way: Any, action: str, error: str) -> None:
        with made(("Trouble", 1), use_multiprocessing=way, max_workers=1) as manager:
            manager.reset(seed=5)
            with pytest.warns(RuntimeWarning, match="environment 0 .Trouble, seed 5. failed in st"):
                going_on = manager.step(inputs(e0=["a", action], e1=["a"]))
            assert [cache["env_id"] for cache in going_on] == [1]
            failed = manager.rollout_cache[0]
            assert failed["failure"] == {"doing": "step", "error": error, "turn": 1}
            assert failed["history"][0]["actions"] == ["a"]
            assert failed["history"][1] == {"state": "train 5", "actions_left": 4}
            assert manager.envs[0]["status"].terminated
            assert manager.envs[0]["status"].truncated
            assert "failure" not in manager.reset(seed=5)[0]

    @pytest.mark.parametrize("way", WAYS)
    def test_those_that_fail_alike_are_told_of_once(self, way: Any) -> None:
        manager = made(("Trouble", 2), group_size=3, use_multiprocessing=way, max_workers=2)
        with pytest.warns(RuntimeWarning) as at_reset:
            caches = manager.reset(seed=666)
        assert [str(one.message) for one in at_reset] == [
            "environment 0 (Trouble, seed 666) failed in reset: RuntimeError: no such episode; its "
            "rollout ends here, and so do those of 2 more of its kind"
        ]
        with pytest.warns(RuntimeWarning) as at_step:
            manager.step(inputs(e3=["raise"], e4=["exit"], e5=["raise"]))
        assert [str(one.message).partition(" failed in step: ")[2] for one in at_step] == [
            "ValueError: it was told to raise; its rollout ends here, and so do those of 1 more of "
            "its kind",
            "SystemExit: 3; its rollout ends here",
        ]
        assert all("failure" in cache for cache in caches)

    def test_failures_of_an_interrupted_reset_are_not_told_of_later(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager = made(("Trouble", 4))

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(manager, "_show_where", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.reset(seed=666)
        assert len(manager.reset(seed=1)) == len(manager.envs)

    def test_a_warning_that_is_an_error_breaks_nothing(self) -> None:
        manager = made(("Trouble", 1))
        manager.reset(seed=1)
        with pytest.raises(RuntimeWarning, match="environment 0 "):
            manager.step(inputs(e0=["raise"], e1=["a"]))
        assert len(manager.step(inputs(e1=["b"]))) == 1
        assert manager.render() == ["train 1", "train 1 a b"]

    def test_a_warning_points_at_whoever_called(self) -> None:
        manager = made(("Trouble", 1))
        with pytest.warns(RuntimeWarning, match="failed in reset") as said:
            manager.reset(seed=666)
        assert {one.filename for one in said} == {__file__}

    @pytest.mark.parametrize("way", WAYS)
    def test_one_that_cannot_be_reset_ends_alone(self, way: Any) -> None:
        with made(("Trouble", 2), use_multiprocessing=way, max_workers=2) as manager:
            with pytest.warns(RuntimeWarning, match="failed in reset: RuntimeError: no such epis"):
                caches = manager.reset(seed=665)
            assert [("failure" in cache) for cache in caches] == [False, False, True, True]
            assert caches[2]["history"] == [{"state": "", "actions_left": 5}]
            with pytest.raises(ActionError, match="environment 2 is over"):
                manager.step(inputs(e2=["a"]))
            assert len(manager.step(inputs(e0=["a"], e1=["b"]))) == 2


class TestOtherThings:
    def test_an_entry_s_environment_is_the_one_that_is_played(self) -> None:
        with made(("Climb", 2), use_multiprocessing="resets", max_workers=2) as manager:
            for _ in range(2):
                manager.reset(seed=42)
                manager.step(inputs(e3=["Up"]))
                assert [entry["env"].render() for entry in manager.envs] == manager.render()

    def test_who_is_replaced_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[Any] = []
        close = lambda self: closed.append(self)  # noqa: E731
        monkeypatch.setattr(games.Trouble, "close", close, raising=False)
        manager = made(
            ("Trouble", 20), use_multiprocessing="resets", max_workers=1, start_method="fork"
        )
        first = [entry["env"] for entry in manager.envs]
        manager.reset(seed=1)
        now = [entry["env"] for entry in manager.envs]
        replaced = [env for env, other in zip(first, now, strict=True) if env is not other]
        assert replaced  # some have begun here
        assert {id(env) for env in closed} == {id(env) for env in replaced}
        manager.close()
        assert len(closed) == len(replaced) + len(now)

    def test_one_that_cannot_be_closed_leaves_nobody_open(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(env: Any) -> None:
            raise OSError("stuck")

        monkeypatch.setattr(games.Climb, "close", fail)
        manager = made(("Climb", 1), use_multiprocessing="resets", max_workers=1)
        with pytest.warns(RuntimeWarning, match="Climb failed in close: OSError: stuck"):
            manager.close()
        assert manager.worker_pids() == []

    def test_workers_are_known_by_their_numbers(self) -> None:
        assert made(("Climb", 1)).worker_pids() == []
        for way, count in ((True, 2), ("threads", 0), ("resets", 1)):
            with made(("Climb", 2), use_multiprocessing=way, max_workers=2) as manager:
                found = manager.worker_pids()
                assert len(found) == len(set(found)) == count
                assert all(os.getpgid(pid) for pid in found)

    @pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
    def test_numbers_of_numpy_are_numbers(self, kind: Any) -> None:
        manager = made(("Climb", 1))
        manager.reset(seed=1)
        (going_on,) = manager.step([{"env_id": kind(1), "actions": ["Down"]}])
        assert going_on["env_id"] == 1

    def test_render_shows_every_environment(self, climbing: EnvStateManager) -> None:
        climbing.reset(seed=42)
        climbing.step(inputs(e3=["Up"]))
        assert climbing.render() == [
            cache["history"][-1]["state"] for cache in climbing.rollout_cache
        ]

    def test_everybody_comes_home_as_they_stand(self, climbing: EnvStateManager) -> None:
        alike = made(("Climb", 2))
        for manager in (climbing, alike):
            manager.reset(seed=42)
            manager.step(inputs(e0=["Down"], e3=["Up", "Up"]))
        climbing.use_multiprocessing = False
        assert isinstance(climbing.envs[3]["env"], games.Climb)
        for manager in (climbing, alike):
            manager.step(inputs(e3=["Up"], e0=["Up"], e1=["Down"]))
        assert climbing.get_rollout_states() == alike.get_rollout_states()

    def test_workers_serve_every_rollout_and_change_at_a_reset(self) -> None:
        with made(("Climb", 2), use_multiprocessing=True, max_workers=2) as manager:
            pids = manager._placed._remote[0].fleet.worker_pids()
            manager.reset(seed=1)
            manager.reset(seed=2)
            assert manager._placed._remote[0].fleet.worker_pids() == pids
            manager.use_multiprocessing = "threads"
            manager.reset(seed=2)
            assert manager._placed._remote[0].fleet.worker_pids() == [None, None]

    def test_a_deadline_that_could_not_be_kept_is_refused_at_once(self) -> None:
        with made(("Climb", 1), use_multiprocessing=True, step_timeout_s=60) as manager:
            with pytest.raises(ConfigError, match="step_timeout_s cannot be kept with use_multip"):
                manager.use_multiprocessing = "resets"
            assert manager.use_multiprocessing is True
            manager.reset(seed=1)
            assert len(manager.step(inputs(e0=["Down"]))) == 1

    def test_types_that_are_sequential_stay_here(self) -> None:
        settings = config(("Climb", 1), ("Trouble", 1), sequential_env_types=["climb"])
        settings["es_manager"] |= {"use_multiprocessing": True, "max_workers": 1}
        with EnvStateManager(settings) as manager:
            kinds = [isinstance(entry["env"], EnvInWorker) for entry in manager.envs]
            assert kinds == [False, False, True, True]
            manager.reset(seed=1)
            assert len(manager.step(inputs(e3=["a"], e0=["Down"]))) == 2

    def test_after_close_nothing_works_and_closing_again_does(self) -> None:
        manager = made(("Climb", 1))
        manager.close()
        manager.close()
        with pytest.raises(FleetClosed, match="make a new one"):
            manager.reset()
        for name, value in (("use_multiprocessing", False), ("format_penalty", 1)):
            with pytest.raises(FleetClosed, match="make a new one"):
                setattr(manager, name, value)
        with pytest.raises(FleetClosed, match="make a new one"), manager:
            pass

    def test_another_penalty_counts_at_once(self) -> None:
        manager = made(("Climb", 1))
        manager.reset(seed=1)
        manager.step(inputs(e0=["?"]))
        manager.format_penalty = 0.5
        assert manager.format_penalty == -0.5
        manager.step(inputs(e0=["?"]))
        assert manager.rollout_cache[0]["penalty"] == pytest.approx(-0.6)

    def test_workers_and_who_stays_here_change_at_a_reset(self) -> None:
        with made(("Climb", 2), use_multiprocessing=True, max_workers=2) as manager:
            first = manager.reset(seed=1)
            manager.max_workers = 1
            assert len(manager.worker_pids()) == 2
            assert manager.reset(seed=1) == first
            assert (manager.max_workers, len(manager.worker_pids())) == (1, 1)
            manager.sequential_env_types = ["climb"]
            assert manager.reset(seed=1) == first
            assert manager.worker_pids() == []
            assert manager.sequential_env_types == ["climb"]
            assert isinstance(manager.envs[0]["env"], games.Climb)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [("max_workers", 0), ("sequential_env_types", ["clim"]), ("format_penalty", "much")],
    )
    def test_an_option_that_makes_no_sense_changes_nothing(self, name: str, wrong: Any) -> None:
        manager = made(("Climb", 1))
        before = manager.settings
        with pytest.raises(ConfigError, match=f"es_manager.{name}"):
            setattr(manager, name, wrong)
        assert manager.settings == before
