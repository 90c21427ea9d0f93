"""FrozenLake: maps that can be crossed, ice that slips as often as it says, and what is shown."""

import pickle
from collections import Counter

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.errors import ConfigError
from envfleet.llm.environments.frozen_lake import FrozenLakeConfig, FrozenLakeEnv, lake_text
from envfleet.llm.environments.frozen_lake_maps import has_path, random_lake
from envfleet.llm.environments.frozen_lake_picture import TILE_PIXELS, lake_picture
from envfleet.llm.registry import env_type
from tests.unit.llm.laws import HOSTILE, assert_answers_quickly, assert_episode_is_of_its_seed

DESC = ["SFFF", "FHFH", "FFFG"]
LEFT, DOWN, RIGHT, UP = 1, 2, 3, 4
seeds = st.integers(0, 2**40)
sizes = st.integers(2, 9)
chances = st.floats(0, 1)


def begun(seed: int = 0, **settings: object) -> FrozenLakeEnv:
    env = FrozenLakeEnv(FrozenLakeConfig(**settings))  # type: ignore[arg-type]
    env.reset(seed=seed)
    return env


def on_firm_ice() -> FrozenLakeEnv:
    return begun(desc=DESC, is_slippery=False)


def ways_to_goal(lake: tuple[str, ...]) -> set[tuple[int, int]]:
    """All places from which steps lead to a goal, grown backwards until nothing is added."""
    places = {
        (row, column)
        for row, tiles in enumerate(lake)
        for column, tile in enumerate(tiles)
        if tile == "G"
    }
    while True:
        grown = places | {
            (row + down, column + right)
            for row, column in places
            for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0))
            if 0 <= row + down < len(lake)
            and 0 <= column + right < len(lake[0])
            and lake[row + down][column + right] != "H"
        }
        if grown == places:
            return places
        places = grown


class TestMaps:
    @given(seeds, sizes, chances)
    def test_can_be_crossed(self, seed, size, p):
        lake = random_lake(np.random.default_rng(seed), size, p)
        tiles = "".join(lake)
        assert [len(row) for row in lake] == [size] * size
        assert tiles.count("S") == tiles.count("G") == 1
        start = divmod(tiles.index("S"), size)
        assert start in ways_to_goal(lake)

    @pytest.mark.parametrize("p", [0.0, 0.3, 0.6, 1.0])
    def test_large_ones_are_drawn_at_once_with_any_ice(self, p):
        assert has_path(random_lake(np.random.default_rng(0), 60, p))

    @given(st.lists(st.text("FH", min_size=3, max_size=3), min_size=3, max_size=3))
    def test_a_way_is_found_if_there_is_one(self, rows):
        lake = ("S" + rows[0][1:], rows[1], rows[2][:2] + "G")
        assert has_path(lake) == ((0, 0) in ways_to_goal(lake))

    def test_have_as_much_ice_as_p_says(self):
        tiles: Counter[str] = Counter()
        for seed in range(300):
            tiles.update("".join(random_lake(np.random.default_rng(seed), 8, 0.8)))
        # Maps without a way are drawn again, so there is a little more ice than p.
        assert 0.79 < tiles["F"] / (tiles["F"] + tiles["H"]) < 0.83

    def test_start_and_goal_are_anywhere(self):
        starts, goals = set(), set()
        for seed in range(600):
            tiles = "".join(random_lake(np.random.default_rng(seed), 4, 0.8))
            starts.add(tiles.index("S"))
            goals.add(tiles.index("G"))
        assert starts == goals == set(range(16))

    def test_are_of_the_episode_s_seed(self):
        env = FrozenLakeEnv()
        maps = [env.reset(seed=seed)[0] for seed in range(30)]
        assert len(set(maps)) > 20
        assert [env.reset(seed=seed)[0] for seed in reversed(range(30))] == maps[::-1]

    def test_of_a_map_seed_is_the_map_of_every_episode_but_slips_differ(self):
        env = begun(map_seed=5, size=6)
        assert {env.reset(seed=seed)[0] for seed in range(20)} == {begun(5, size=6).render()}
        firsts: Counter[str] = Counter()
        for seed in range(50):
            env.reset(seed=seed)
            firsts[env.step(DOWN)[0]] += 1
        assert len(firsts) > 1

    def test_written_out_is_the_map_of_every_episode(self):
        env = begun(desc=DESC)
        assert {env.reset(seed=seed)[0] for seed in range(5)} == {"P___\n_O_O\n___G"}

    def test_resets_leave_the_configuration_as_it_was(self):
        env = FrozenLakeEnv()
        for seed in range(3):
            env.reset(seed=seed)
        assert env.config == FrozenLakeConfig()


class TestIce:
    def test_firm_ice_goes_where_one_wants(self):
        env = on_firm_ice()
        path = [(DOWN, (1, 0)), (DOWN, (2, 0)), (RIGHT, (2, 1)), (RIGHT, (2, 2)), (UP, (1, 2)),
                (UP, (0, 2)), (LEFT, (0, 1))]  # fmt: skip
        for action, place in path:
            said, reward, terminated, truncated, info = env.step(action)
            assert said == env.render() == lake_text(tuple(DESC), place, env.config.grid_lookup)
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert info == {"action_is_effective": True, "action_is_valid": True, "success": False}

    def test_the_shore_holds_one_back(self):
        env = on_firm_ice()
        for action in (LEFT, UP):
            said, reward, terminated, _, info = env.step(action)
            assert (said, reward, terminated) == ("P___\n_O_O\n___G", 0.0, False)
            assert info == {"action_is_effective": False, "action_is_valid": True, "success": False}

    def test_the_goal_pays_one_and_ends(self):
        env = on_firm_ice()
        for action in (DOWN, DOWN, RIGHT, RIGHT):
            env.step(action)
        said, reward, terminated, truncated, info = env.step(RIGHT)
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert said == "____\n_O_O\n___√"
        assert info == {"action_is_effective": True, "action_is_valid": True, "success": True}

    def test_a_hole_pays_nothing_and_ends(self):
        env = on_firm_ice()
        env.step(DOWN)
        said, reward, terminated, truncated, info = env.step(RIGHT)
        assert (reward, terminated, truncated) == (0.0, True, False)
        assert said == "____\n_X_O\n___G"
        assert info == {"action_is_effective": True, "action_is_valid": True, "success": False}

    @pytest.mark.parametrize(
        ("success_rate", "expected"),
        [(None, (1 / 3, 1 / 3)), (0.8, (0.8, 0.1)), (1.0, (1.0, 0.0)), (0.0, (0.0, 0.5))],
    )
    @pytest.mark.parametrize("action", [LEFT, DOWN, RIGHT, UP])
    def test_one_slips_at_right_angles_as_often_as_said(self, action, success_rate, expected):
        rate = {} if success_rate is None else {"success_rate": success_rate}
        env = begun(desc=["FFF", "FSF", "FFG"], **rate)
        went: Counter[tuple[int, int]] = Counter()
        for seed in range(1500):
            env.reset(seed=seed)
            env.step(action)
            went[env._player] += 1
        ring = [(1, 0), (2, 1), (1, 2), (0, 1)]
        straight, aside = expected
        for turn, chance in enumerate((straight, aside, 0.0, aside)):
            share = went[ring[(action - 1 + turn) % 4]] / 1500
            assert abs(share - chance) < 0.045
            assert (share == 0) == (chance == 0)

    def test_nonsense_uses_up_no_luck(self):
        plain, disturbed = begun(3, desc=DESC), begun(3, desc=DESC)
        for action in (DOWN, UP, DOWN, UP):
            disturbed.step("jump")
            shown = plain.step(action)
            assert disturbed.step(action) == shown
            if shown[2]:
                break


class TestShown:
    def test_glyphs_can_be_others_and_prompts_hear_of_them(self):
        glyphs = {0: "@", 1: ".", 2: "~", 3: "*", 4: "!", 5: "+"}
        env = begun(desc=DESC, is_slippery=False, grid_lookup=glyphs)
        assert env.render() == "@...\n.~.~\n...*"
        assert env.config.grid_vocab == {
            "@": "player", ".": "empty", "~": "hole", "*": "goal", "!": "player in hole",
            "+": "player on goal",
        }  # fmt: skip
        assert FrozenLakeConfig(grid_vocab={"P": "you"}).grid_vocab == {"P": "you"}

    def test_actions_can_be_renamed(self):
        names = {1: "West", 2: "South", 3: "East", 4: "North"}
        env = begun(desc=DESC, is_slippery=False, action_lookup=names)
        assert env.step("south")[0] == "____\nPO_O\n___G"
        assert env.step("Down")[4]["action_is_valid"] is False

    @given(seeds, sizes)
    @settings(max_examples=20)
    def test_text_has_a_row_for_a_row_and_one_player(self, seed, size):
        text = begun(seed, size=size).render()
        assert [len(row) for row in text.split("\n")] == [size] * size
        assert (text.count("P"), text.count("G")) == (1, 1)

    def test_picture_is_fresh_and_shows_every_situation(self):
        env = FrozenLakeEnv(FrozenLakeConfig(desc=DESC), render_mode="rgb_array")
        env.reset(seed=0)
        picture = env.render()
        assert picture.shape == (3 * TILE_PIXELS, 4 * TILE_PIXELS, 3)
        assert picture.dtype == np.uint8
        picture[:] = 0
        assert env.render().any()
        assert isinstance(env.render("text"), str)
        tiles = {
            lake_picture((tile,), place).tobytes() for tile in "FHG" for place in ((0, 0), (9, 9))
        }
        assert len(tiles) == 6
        assert np.array_equal(lake_picture(("S",), (9, 9)), lake_picture(("F",), (9, 9)))

    def test_picture_changes_only_where_the_player_was_and_is(self):
        env = on_firm_ice()
        before = env.render("rgb_array")
        env.step(DOWN)
        changed = (before != env.render("rgb_array")).any(axis=2)
        rows, columns = np.nonzero(changed)
        assert {*(rows // TILE_PIXELS)} == {0, 1}
        assert {*(columns // TILE_PIXELS)} == {0}


class TestEnvironment:
    def test_has_four_actions(self):
        assert FrozenLakeEnv().action_space == spaces.Discrete(4, start=1)
        assert FrozenLakeConfig().action_lookup == {1: "Left", 2: "Down", 3: "Right", 4: "Up"}

    @given(
        seeds, st.lists(st.sampled_from([1, 2, 3, 4, "up", None, 5]), max_size=12), st.booleans()
    )
    def test_episode_is_of_its_seed(self, seed, actions, is_slippery):
        config = FrozenLakeConfig(is_slippery=is_slippery)
        assert_episode_is_of_its_seed(lambda: FrozenLakeEnv(config), seed, "val", actions)

    @given(seeds)
    def test_mode_changes_nothing(self, seed):
        env = FrozenLakeEnv()
        shown = {env.reset(seed=seed, options={"mode": mode})[0] for mode in ("train", "val")}
        assert len(shown) == 1

    @pytest.mark.parametrize("action", HOSTILE, ids=lambda action: ascii(action)[:16])
    def test_nonsense_is_answered_and_changes_nothing(self, action):
        env = begun(7)
        seen = env.render()
        said, reward, terminated, truncated, info = assert_answers_quickly(env, action)
        assert (said, reward, terminated, truncated) == (seen, 0.0, False, False)
        assert info == {"action_is_effective": False, "action_is_valid": False, "success": False}

    def test_is_small(self):
        assert len(pickle.dumps(begun(0))) < 3000

    def test_is_found_by_name(self):
        env = env_type("frozen_lake").make({"size": 5})
        assert isinstance(env, FrozenLakeEnv)
        assert env.reset(seed=0)[0].count("\n") == 4

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"size": 1}, "size must be from 2 to 1000, got 1"),
            ({"p": 1.1}, "p must be from 0 to 1, got 1.1"),
            ({"p": float("nan")}, "p must be a finite number, got nan"),
            ({"success_rate": -1}, "success_rate must be from 0 to 1, got -1"),
            ({"map_seed": -1}, "map_seed must be at least 0"),
            ({"map_seed": 1, "desc": DESC}, "give only one"),
            ({"desc": []}, "rows of one length"),
            ({"desc": ["SF", "G"]}, "rows of one length"),
            ({"desc": ["SX", "FG"]}, "made of S, F, H and G, got 'X'"),
            ({"desc": ["FF", "FG"]}, "one start S, got 0"),
            ({"desc": ["SS", "FG"]}, "one start S, got 2"),
            ({"desc": ["SH", "HG"]}, "needs a path from S"),
            ({"action_lookup": {0: "Left"}}, "must name 1, 2, 3 and 4"),
            ({"action_lookup": None}, "must name 1, 2, 3 and 4"),
            ({"grid_lookup": {0: "P"}}, "must have 0 to 5"),
            ({"grid_lookup": dict.fromkeys(range(6), "x")}, "must differ"),
        ],
    )
    def test_mistakes_are_named(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            FrozenLakeConfig(**settings)
