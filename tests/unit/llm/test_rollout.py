"""Rollouts: who is answered when, what comes of it, and what it sums up to."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envfleet.errors import ActionError, ConfigError
from envfleet.llm.export import as_json, as_json_line
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import Cache
from envfleet.llm.metrics import mean_metrics
from envfleet.llm.policies import make_policy
from envfleet.llm.rollout import play_rollout
from envfleet.llm.settings import AgentProxy, read_agent_proxy
from tests.unit.llm import games

PROXY = AgentProxy()


@pytest.fixture(autouse=True)
def _games() -> None:
    games.register()


class Saying:
    """Says one thing, and remembers whom it was asked about."""

    def __init__(self, answer: str = "Down") -> None:
        self._answer = answer
        self.asked: list[list[int]] = []

    def __call__(self, caches: Sequence[Cache], /) -> list[str]:
        self.asked.append([cache["env_id"] for cache in caches])
        return [f"<think>so</think> <answer>{self._answer}</answer>" for _ in caches]


def manager(*tags: tuple[str, int], **options: Any) -> EnvStateManager:
    return EnvStateManager(games.config(*tags, **options))


class TestPlaying:
    def test_everybody_is_answered_until_the_episode_is_over(self) -> None:
        policy = Saying("Up")
        rollout = play_rollout(manager(("Climb", 2)), policy, AgentProxy(max_turn=9), seed=42)
        assert policy.asked == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 3], [2, 3]]  # from floors 2 and 0
        assert rollout.num_turns == 4
        assert [cache["metrics"]["Climb/success"] for cache in rollout.caches] == [1.0] * 4

    def test_no_more_turns_than_there_are(self) -> None:
        turns: list[tuple[int, int]] = []
        rollout = play_rollout(
            manager(("Climb", 1)),
            Saying(),
            AgentProxy(max_turn=3),
            seed=1,
            on_turn=lambda number, going_on: turns.append((number, going_on)),
        )
        assert turns == [(1, 2), (2, 2), (3, 2)]
        assert rollout.caches[0]["metrics"]["Climb/success"] == 0.0
        assert len(rollout.caches[0]["history"]) == 4

    def test_a_response_is_parsed_and_kept_in_both_forms(self) -> None:
        rollout = play_rollout(
            manager(("Climb", 1)), Saying("Up||Down"), AgentProxy(max_turn=1), seed=42
        )
        turn = rollout.caches[0]["history"][0]
        assert turn["actions"] == [1, 2]
        assert turn["llm_response"] == "<think>so</think><answer>Up||Down</answer>"
        assert turn["llm_raw_response"] == "<think>so</think> <answer>Up||Down</answer>"

    def test_a_turn_has_no_more_actions_than_it_may(self) -> None:
        proxy = AgentProxy(max_turn=1, max_actions_per_turn=1)
        rollout = play_rollout(manager(("Climb", 1)), Saying("Up||Down"), proxy, seed=42)
        assert rollout.caches[0]["history"][0]["actions"] == [1]

    @pytest.mark.filterwarnings("ignore:environment .* failed in:RuntimeWarning")
    def test_who_cannot_be_reset_is_not_asked(self) -> None:
        policy = Saying("done")
        rollout = play_rollout(manager(("Trouble", 2)), policy, PROXY, seed=665)
        assert policy.asked == [[0, 1]]
        assert rollout.tags[0].num_failures == 2

    @pytest.mark.filterwarnings("ignore:environment .* failed in:RuntimeWarning")
    def test_with_nobody_left_nobody_is_asked(self) -> None:
        policy = Saying()
        rollout = play_rollout(manager(("Trouble", 1)), policy, PROXY, seed=666)
        assert (policy.asked, rollout.num_turns) == ([], 0)

    def test_responses_may_come_one_by_one(self) -> None:
        one_by_one: Any = lambda caches: ("<answer>x</answer>" for _ in caches)  # noqa: E731
        assert play_rollout(manager(("Climb", 1)), one_by_one, PROXY).num_turns > 0

    def test_what_a_policy_owes_is_said(self) -> None:
        with pytest.raises(ActionError, match="about 2 environments and gave 1 responses"):
            play_rollout(manager(("Climb", 1)), lambda caches: ["x"], PROXY)
        for wrong in ("xy", None, 3):
            with pytest.raises(ActionError, match="must give a list with a response for each env"):
                play_rollout(manager(("Climb", 1)), lambda caches, said=wrong: said, PROXY)
        answers: Any = lambda caches: [None for _ in caches]  # noqa: E731
        with pytest.raises(ActionError, match="response to environment 0 must be text, got None"):
            play_rollout(manager(("Climb", 1)), answers, PROXY)

    def test_the_manager_s_next_seed_unless_one_is_given(self) -> None:
        stage = EnvStateManager({**games.config(("Climb", 2)), "seed": {"train": 50}})
        for first in (50, 52):
            play_rollout(stage, Saying(), AgentProxy(max_turn=1))
            assert stage.envs[0]["status"].seed == first

    @pytest.mark.parametrize("way", [False, "threads", True, "resets"])
    def test_one_rollout_wherever_environments_live(self, way: Any) -> None:
        alone = manager(("Climb", 3), ("Trouble", 1))
        elsewhere = manager(("Climb", 3), ("Trouble", 1), use_multiprocessing=way, max_workers=2)
        with alone, elsewhere:
            tags = [tag for tag, _ in alone.settings.groups]
            policy = make_policy("random", tags, PROXY, seed=5)
            rollouts = [play_rollout(one, policy, PROXY, seed=5) for one in (alone, elsewhere)]
        assert rollouts[0] == rollouts[1]


class TestSums:
    def test_of_each_tag(self) -> None:
        stage = manager(("Climb", 2), ("Trouble", 1))

        def policy(caches: Sequence[Cache], /) -> list[str]:
            says = {"Climb": "Up", "Trouble": "done"}
            first = "<think>so</think><answer>nonsense || Up</answer>"
            return [
                first
                if cache["env_id"] == 0 and len(cache["history"]) == 1
                else f"<think>so</think><answer>{says[cache['tag']]}</answer>"
                for cache in caches
            ]

        rollout = play_rollout(stage, policy, PROXY, seed=42)
        climb, trouble = rollout.tags
        assert (climb.tag, climb.num_envs, climb.success) == ("Climb", 4, 1.0)
        assert climb.num_actions == climb.num_turns == 3.0  # 2, 2, 4, 4
        assert climb.reward == pytest.approx((2 * 0.9 + 2 * 0.7) / 4)
        assert climb.penalty == pytest.approx(-0.1 / 4)
        assert (trouble.num_envs, trouble.success, trouble.reward) == (2, 1.0, 0.5)
        assert rollout.metrics["Climb/num_actions"] == 3.0
        assert rollout.metrics["Trouble/said"] == 2.0
        assert rollout.metrics["Climb/pass@2"] == 1.0

    def test_who_has_not_got_a_metric_counts_as_zero(self) -> None:
        def cache(tag: str, **metrics: float) -> Any:
            return {"tag": tag, "metrics": {f"{tag}/{key}": one for key, one in metrics.items()}}

        caches = [cache("a", x=3.0), cache("a", y=1.0), cache("a"), cache("b", x=4.0)]
        assert mean_metrics(caches) == {"a/x": 1.0, "a/y": 1 / 3, "b/x": 4.0}


class TestRecords:
    def test_every_cache_has_a_line(self) -> None:
        rollout = play_rollout(manager(("Climb", 1), ("Picture", 1)), Saying("Up"), PROXY, seed=1)
        lines = [json.loads(as_json_line(cache)) for cache in rollout.caches]
        assert [line["env_id"] for line in lines] == [0, 1, 2, 3]
        assert lines[0]["history"][0]["actions"] == [1]
        assert lines[2]["history"][0]["images"] == ["Image (3, 2)"]

    @pytest.mark.parametrize(
        ("value", "json_value"),
        [
            (np.float32(0.5), 0.5),
            (np.int64(3), 3),
            (np.bool_(True), True),
            (float("nan"), "nan"),
            (np.float64("-inf"), "-inf"),
            (np.arange(3), [0, 1, 2]),
            (np.zeros((200, 200)), "ndarray (200, 200)"),
            ({1: (None, "x")}, {"1": [None, "x"]}),
            (Image.new("RGB", (2, 3)), "Image (2, 3)"),
            ({1, 2}, "{1, 2}"),
            (10**400, 10**400),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_whatever_it_is(self, value: Any, json_value: Any) -> None:
        assert as_json(value) == json_value
        json.dumps(as_json(value), allow_nan=False)


class TestProxy:
    def test_what_is_not_said_has_a_default(self) -> None:
        assert read_agent_proxy({}) == read_agent_proxy({"agent_proxy": {}}) == AgentProxy()
        assert AgentProxy() == AgentProxy(5, "||", 5, True)
        assert read_agent_proxy("bandit") == AgentProxy(1, "||", 1, True)
        assert read_agent_proxy({"agent_proxy": {"max_context_window": -1}}) == AgentProxy()

    @pytest.mark.parametrize(
        ("block", "said"),
        [
            ({"max_turns": 3}, "agent_proxy has no key 'max_turns'; did you mean max_turn"),
            ({"max_turn": 0}, "agent_proxy.max_turn must be a whole number of at least 1, got 0"),
            ({"max_actions_per_turn": "5"}, "max_actions_per_turn must be a whole number"),
            ({"action_sep": " "}, "agent_proxy.action_sep must be text, got ' '"),
            ({"enable_think": 1}, "agent_proxy.enable_think must be true or false, got 1"),
            (3, "agent_proxy must be a mapping"),
        ],
    )
    def test_what_is_wrong_is_named(self, block: Any, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            read_agent_proxy({"agent_proxy": block})
