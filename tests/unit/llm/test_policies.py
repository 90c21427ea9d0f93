"""Players without a model: what they say, and what it depends on."""

import random
import re
from typing import Any, cast

import numpy as np
import pytest

from envfleet.errors import ConfigError
from envfleet.llm.manager_types import Cache
from envfleet.llm.parsing import parse_response
from envfleet.llm.policies import NONSENSE, POLICIES, Policy, make_policy
from envfleet.llm.settings import AgentProxy, Tag, read_settings
from tests.unit.llm import games

PROXY = AgentProxy()


@pytest.fixture(autouse=True)
def _games() -> None:
    games.register()


def tags(*names: str) -> list[Tag]:
    config = games.config(*((name, 1) for name in names))
    return [tag for tag, _ in read_settings(config, "train").groups]


def free(type_name: str) -> list[Tag]:
    """A tag whose type says nothing about its actions."""
    (tag,) = tags("Trouble")
    return [Tag("Trouble", type_name, tag.env_type, None, 1)]


def cache(tag: str, env_id: int = 0, turn: int = 0, state: str = "") -> Cache:
    history = [{"state": state, "actions_left": 1}] * (turn + 1)
    found = {"env_id": env_id, "history": history, "group_id": 0, "tag": tag, "penalty": 0}
    return cast(Cache, found)


def said(policy: Policy, tag: str, num: int = 200, state: str = "") -> list[list[str]]:
    """What is named in many turns."""
    caches = [cache(tag, env_id, turn, state) for env_id in range(num // 10) for turn in range(10)]
    return [list(parse_response(raw).actions) for raw in policy(caches)]


class TestRandom:
    def test_one_to_the_most_actions_of_a_turn_are_named(self) -> None:
        named = said(make_policy("random", tags("Climb"), PROXY), "Climb")
        assert {len(names) for names in named} == {0, 1, 2, 3, 4, 5}
        assert {name for names in named for name in names} == {"Up", "Down", NONSENSE}

    def test_nonsense_and_silence_are_rare(self) -> None:
        named = said(make_policy("random", tags("Climb"), PROXY), "Climb", num=1000)
        assert 0.06 < sum(NONSENSE in names for names in named) / 1000 < 0.14
        assert 0.02 < sum(not names for names in named) / 1000 < 0.09

    def test_it_keeps_to_the_proxy_s_form(self) -> None:
        proxy = AgentProxy(action_sep=";", max_actions_per_turn=2, enable_think=False)
        policy = make_policy("random", tags("Climb"), proxy)
        raw = policy([cache("Climb", env_id) for env_id in range(50)])
        assert not any("<think>" in one for one in raw)
        assert any(one.count(";") == 1 for one in raw)

    def test_it_depends_on_seed_environment_and_turn_alone(self) -> None:
        alike = [make_policy("random", tags("Climb"), PROXY, seed=3) for _ in range(2)]
        caches = [cache("Climb", env_id, turn) for env_id in range(5) for turn in range(5)]
        random.seed(1)
        first = alike[0](caches)
        random.seed(2)
        np.random.seed(2)
        before = random.getstate()
        backwards = alike[1](caches[::-1])
        assert first == backwards[::-1]
        assert random.getstate() == before
        assert first != make_policy("random", tags("Climb"), PROXY, seed=4)(caches)
        assert len(set(first)) > 10

    def test_it_is_the_same_on_every_machine(self) -> None:
        policy = make_policy("random", tags("Climb"), PROXY, seed=1)
        assert policy([cache("Climb", 2, 3)]) == [
            "<think>by chance</think><answer>Up || Up || Up || Down || Down</answer>"
        ]


class TestFreeText:
    @pytest.mark.parametrize(
        ("type_name", "state", "pattern"),
        [
            ("metamathqa", "How many?", r"\d+"),
            ("unheard of", "", r"\d+"),
            ("countdown", "Target: 24, nums: [3, 8, 11]", r"\d+ [-+*/] \d+ [-+*/] \d+"),
            ("countdown", "nonsense", "0"),
            ("bandit", "Arms: Phoenix, Dragon", "Phoenix|Dragon"),
            ("bandit", "", ""),
            (
                "webshop",
                "Instruction: red shoes.\n You must choose from these actions:"
                "search[<content>], click[back to search], click[b0].",
                r"search\[(\w+ ?){3}\]|click\[back to search\]|click\[b0\]",
            ),
            ("textworld", "-= Cellar =-\n\nYou can: go west, look", "go west|look"),
            ("webshop", "lost", r"search\[(lost ?){3}\]"),
            ("webshop", "", r"search\[(anything ?){3}\]"),
        ],
    )
    def test_types_have_their_own_words(self, type_name: str, state: str, pattern: str) -> None:
        policy = make_policy("random", free(type_name), PROXY)
        names = {name for names in said(policy, "Trouble", state=state) for name in names}
        names.discard(NONSENSE)
        assert bool(names) == bool(pattern)
        assert all(re.fullmatch(pattern, name) for name in names)

    def test_a_countdown_uses_every_number_once(self) -> None:
        policy = make_policy("random", free("countdown"), PROXY)
        for names in said(policy, "Trouble", state="Target: 24, nums: [3, 8, 11]"):
            for name in names:
                if name != NONSENSE:
                    assert sorted(name.split()[::2]) == ["11", "3", "8"]

    def test_a_megabyte_is_read_in_part(self) -> None:
        policy = make_policy("random", free("webshop"), PROXY)
        state = "search[" * 200_000
        policy([cache("Trouble", state=state)])


class TestFirst:
    @pytest.mark.parametrize(
        ("kinds", "tag", "state", "name"),
        [
            (lambda: tags("Climb"), "Climb", "", "Up"),
            (lambda: free("metamathqa"), "Trouble", "", "0"),
            (lambda: free("countdown"), "Trouble", "Target: 1, nums: [4, 2]", "4 + 2"),
            (lambda: free("bandit"), "Trouble", "Arms: a, b", "a"),
        ],
    )
    def test_it_always_says_the_same(self, kinds: Any, tag: str, state: str, name: str) -> None:
        policy = make_policy("first", kinds(), PROXY)
        assert {tuple(names) for names in said(policy, tag, state=state)} == {(name,)}


def test_a_wrong_name_is_told_the_nearest() -> None:
    assert list(POLICIES) == ["random", "first"]
    with pytest.raises(ConfigError, match=r"there is no policy 'randon'; did you mean random\?"):
        make_policy("randon", [], PROXY)
