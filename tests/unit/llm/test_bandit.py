"""Bandit: every rule of its arms, and that nothing but the seed decides."""

import pickle
from dataclasses import replace

import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.environments.bandit import BanditConfig, BanditEnv
from envfleet.llm.registry import env_type
from tests.unit.llm.laws import HOSTILE, assert_answers_quickly, assert_episode_is_of_its_seed

seeds = st.integers(0, 2**40)
modes = st.sampled_from(["train", "val", "test"])


def begun(seed: int, mode: str = "train", config: BanditConfig | None = None) -> BanditEnv:
    env = BanditEnv(config)
    env.reset(seed=seed, options={"mode": mode})
    return env


def arms_of(env: BanditEnv) -> list[str]:
    assert env.config.action_lookup is not None
    assert list(env.config.action_lookup) == [1, 2]
    return list(env.config.action_lookup.values())


class TestArms:
    def test_are_listed_in_the_order_of_their_numbers(self):
        env = BanditEnv()
        for seed in range(20):
            said, _ = env.reset(seed=seed)
            assert sorted(arms_of(env)) == ["dragon", "phoenix"]
            assert said == env.render() == "Arms: " + ", ".join(arms_of(env))

    def test_stand_either_way_round_half_the_time(self):
        num_hi_first = sum(arms_of(begun(seed))[0] == "dragon" for seed in range(2000))
        assert 900 < num_hi_first < 1100

    @pytest.mark.parametrize("seed", range(5))
    def test_the_sure_arm_pays_a_tenth_and_is_no_success(self, seed):
        said, reward, terminated, truncated, info = begun(seed).step("phoenix")
        assert (said, reward, terminated, truncated) == ("phoenix: 0.1 points", 0.1, True, False)
        assert info == {"action_is_effective": True, "action_is_valid": True, "success": False}

    def test_the_risky_arm_pays_one_a_quarter_of_the_time_and_is_a_success(self):
        paid = []
        for seed in range(2000):
            said, reward, terminated, truncated, info = begun(seed).step("dragon")
            assert said == f"dragon: {reward} points"
            assert (terminated, truncated) == (True, False)
            assert info == {"action_is_effective": True, "action_is_valid": True, "success": True}
            paid.append(reward)
        assert set(paid) == {0.0, 1.0}
        assert 440 < sum(paid) < 560

    def test_luck_has_nothing_to_do_with_the_order(self):
        lucky = [seed for seed in range(2000) if begun(seed).step("dragon")[1] == 1.0]
        num_hi_first = sum(arms_of(begun(seed))[0] == "dragon" for seed in lucky)
        assert 0.4 < num_hi_first / len(lucky) < 0.6

    @given(seeds)
    def test_number_and_name_are_the_same_pull(self, seed):
        for number in (1, 2):
            name = arms_of(begun(seed))[number - 1]
            pulled = begun(seed).step(number)
            assert pulled == begun(seed).step(name) == begun(seed).step(name.upper())
            assert pulled[0].startswith(f"{name}: ")

    def test_after_the_pull_its_result_is_what_is_seen(self):
        env = begun(0)
        said, *_ = env.step(1)
        assert env.render() == said
        with pytest.raises(OutOfOrder, match="call reset first"):
            env.step(1)

    def test_are_not_changed_by_what_is_done_to_the_lookup(self):
        env = begun(0)
        assert env.config.action_lookup is not None
        env.config.action_lookup.clear()
        assert env.step(1) == begun(0).step(1)

    def test_scores_can_be_set(self):
        config = BanditConfig(
            lo_arm_score=2, hi_arm_loscore=3, hi_arm_hiscore=4, hi_arm_hiscore_prob=1
        )
        assert begun(0, config=config).step("phoenix")[:2] == ("phoenix: 2.0 points", 2.0)
        assert begun(0, config=config).step("dragon")[1] == 4.0
        never = replace(config, hi_arm_hiscore_prob=0)
        assert begun(0, config=never).step("dragon")[1] == 3.0


class TestNames:
    @given(seeds, modes)
    def test_are_the_same_in_every_mode_unless_split(self, seed, mode):
        assert arms_of(begun(seed, mode)) == arms_of(begun(seed, "train"))

    @given(seeds, modes)
    def test_of_the_test_take_the_place_of_the_others_if_split(self, seed, mode):
        split = BanditConfig(split_names=True)
        standing_for = {"trader": "phoenix", "librarian": "dragon"}
        found = arms_of(begun(seed, mode, split))
        trained = arms_of(begun(seed, "train", split))
        if mode == "train":
            assert set(found) == {"phoenix", "dragon"}
        else:
            assert [standing_for[name] for name in found] == trained
        paid = begun(seed, mode, split).step("dragon" if mode == "train" else "librarian")
        assert paid[1] == begun(seed, "train").step("dragon")[1]
        assert paid[4]["success"]

    def test_of_the_other_pair_are_unknown(self):
        assert not begun(0, "val", BanditConfig(split_names=True)).step("dragon")[4][
            "action_is_valid"
        ]

    def test_can_be_others(self):
        config = BanditConfig(lo_arm_name="Trader", hi_arm_name="Librarian")
        assert set(arms_of(begun(3, config=config))) == {"Trader", "Librarian"}


class TestEnvironment:
    def test_has_two_actions_before_and_after_reset(self):
        env = BanditEnv()
        assert env.action_space == spaces.Discrete(2, start=1)
        env.reset(seed=0)
        assert env.action_space == spaces.Discrete(2, start=1)
        env.action_space.seed(0)
        assert env.step(env.action_space.sample())[2]

    @given(seeds, modes, st.lists(st.sampled_from([None, 0, "x", 1, 2]), max_size=4))
    def test_episode_is_of_its_seed(self, seed, mode, actions):
        config = BanditConfig(split_names=True)
        assert_episode_is_of_its_seed(lambda: BanditEnv(config), seed, mode, actions)

    def test_is_the_same_whatever_was_made_before(self):
        first = [arms_of(begun(seed)) for seed in range(10)]
        assert [arms_of(begun(seed)) for seed in reversed(range(10))] == first[::-1]

    def test_leaves_the_given_configuration_alone(self):
        config = BanditConfig()
        begun(0, config=config)
        assert config == BanditConfig()
        used = begun(1).config
        assert arms_of(begun(0, config=used)) == arms_of(begun(0))

    @pytest.mark.parametrize("action", HOSTILE, ids=lambda action: ascii(action)[:16])
    def test_nonsense_is_answered_and_changes_nothing(self, action):
        env = begun(7)
        seen = env.render()
        said, reward, terminated, truncated, info = assert_answers_quickly(env, action)
        assert (said, reward, terminated, truncated) == (seen, 0.0, False, False)
        assert info == {"action_is_effective": False, "action_is_valid": False, "success": False}
        assert env.step(1) == begun(7).step(1)

    def test_is_small(self):
        assert len(pickle.dumps(begun(0))) < 3000

    def test_is_found_by_name(self):
        env = env_type("bandit").make({"lo_arm_name": "a", "hi_arm_name": "b"})
        assert isinstance(env, BanditEnv)
        assert set(env.reset(seed=0)[0]) >= {"a", "b"}

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"lo_arm_name": "Dragon"}, "two different names, got 'Dragon' and 'dragon'"),
            ({"hi_arm_name": ""}, "two different names"),
            ({"test_hi_arm_name": "trader"}, "got 'trader' and 'trader'"),
            ({"hi_arm_hiscore_prob": 1.5}, "from 0 to 1, got 1.5"),
        ],
    )
    def test_mistakes_are_named(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            BanditConfig(**settings)
