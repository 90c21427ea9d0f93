"""Sokoban: its rules against a model written apart, its levels by their laws, its mistakes."""

import inspect
import os
import pickle
import random
import subprocess
import sys
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.environments import sokoban, sokoban_levels
from envfleet.llm.environments.sokoban import SokobanConfig, SokobanEnv, coordinates
from envfleet.llm.environments.sokoban_levels import LevelSpec, check, generate
from envfleet.llm.environments.sokoban_picture import TILE, picture
from envfleet.llm.registry import env_type
from tests.unit.llm.laws import HOSTILE, assert_answers_quickly, assert_episode_is_of_its_seed

UP, DOWN, LEFT, RIGHT = 1, 2, 3, 4
STEPS = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
SEEDS = st.integers(0, 2**31 - 1)


def started(seed=0, **settings):
    env = SokobanEnv(SokobanConfig(**settings))
    env.reset(seed=seed)
    return env


@pytest.fixture
def standing(monkeypatch):
    """Episodes that begin with a given room."""

    def begin(text, **settings):
        rows = text.split()
        cells = bytes("#_O√XPS".index(glyph) for glyph in "".join(rows))
        level = sokoban_levels.Level(cells, b"")
        monkeypatch.setattr(sokoban, "check", lambda wish: None)
        monkeypatch.setattr(sokoban, "generate", lambda wish, seed: level)
        return started(
            dim_room=(len(rows), len(rows[0])),
            num_boxes=sum(text.count(glyph) for glyph in "X√"),
            **settings,
        )

    return begin


class Model:
    """The rules once more, on sets of coordinates."""

    def __init__(self, text, max_steps):
        cells = {
            (row, column): glyph
            for row, line in enumerate(text.split("\n"))
            for column, glyph in enumerate(line)
        }
        self.cells = cells
        self.walls = {cell for cell, glyph in cells.items() if glyph == "#"}
        self.targets = {cell for cell, glyph in cells.items() if glyph in "O√S"}
        self.boxes = {cell for cell, glyph in cells.items() if glyph in "X√"}
        (self.player,) = (cell for cell, glyph in cells.items() if glyph in "PS")
        self.left = max_steps

    def step(self, action):
        on_target = len(self.boxes & self.targets)
        has_moved = action in STEPS and self.go(*STEPS[action])
        self.left -= 1
        is_solved = self.boxes == self.targets
        reward = -0.1 + (len(self.boxes & self.targets) - on_target) + (10 if is_solved else 0)
        info = {
            "action_is_effective": has_moved,
            "action_is_valid": action in STEPS,
            "success": is_solved,
        }
        return self.text(), reward, is_solved, not is_solved and self.left == 0, info

    def go(self, down, right):
        ahead = self.player[0] + down, self.player[1] + right
        behind = ahead[0] + down, ahead[1] + right
        if ahead in self.walls or (ahead in self.boxes and behind in self.walls | self.boxes):
            return False
        if ahead in self.boxes:
            self.boxes = self.boxes - {ahead} | {behind}
        self.player = ahead
        return True

    def text(self):
        def glyph(cell):
            is_target = cell in self.targets
            if cell in self.walls:
                return "#"
            if cell == self.player:
                return "S" if is_target else "P"
            if cell in self.boxes:
                return "√" if is_target else "X"
            return "O" if is_target else "_"

        rows: dict[int, str] = {}
        for row, column in sorted(self.cells):
            rows[row] = rows.get(row, "") + glyph((row, column))
        return "\n".join(rows.values())


class TestRules:
    @given(SEEDS, st.integers(1, 3), st.lists(st.integers(0, 5), max_size=60))
    @settings(max_examples=60)
    def test_every_step_is_that_of_the_model(self, seed, num_boxes, actions):
        """Wandering about; then, from the start, the solution."""
        env = started(seed, num_boxes=num_boxes, max_steps=60)
        for plan in (actions, env.solution()):
            text, _ = env.reset(seed=seed)
            model = Model(text, max_steps=60)
            assert model.text() == text
            for action in plan:
                result = env.step(action)
                assert result == model.step(action)
                assert env.render() == result[0]
                if result[2] or result[3]:
                    break

    def test_a_box_is_pushed_not_pulled(self, standing):
        env = standing("####### #__PXO# #######")
        assert env.step(LEFT)[0] == "#######\n#_P_XO#\n#######"
        assert env.step(RIGHT)[0] == "#######\n#__PXO#\n#######"

    @pytest.mark.parametrize("room", ["######## #OOPXX_# ########", "######## #_OPX√_# ########"])
    def test_two_boxes_in_a_row_stand_still(self, standing, room):
        env = standing(room)
        before = env.render()
        text, reward, terminated, truncated, info = env.step(RIGHT)
        assert (text, reward, terminated, truncated) == (before, -0.1, False, False)
        assert info == {"action_is_effective": False, "action_is_valid": True, "success": False}

    def test_rewards(self, standing):
        """On a target 1, off again -1, the last box 10 more, and each step costs 0.1."""
        env = standing("######### #_PXO_XO# #########")
        assert env.step(RIGHT)[1] == 0.9
        assert env.step(RIGHT)[1] == -1.1
        env = standing("######### #PXO_√__# #########")
        text, reward, terminated, truncated, info = env.step(RIGHT)
        assert text == "#########\n#_P√_√__#\n#########"
        assert (reward, terminated, truncated, info["success"]) == (10.9, True, False, True)

    def test_from_target_to_target_is_worth_nothing(self, standing):
        env = standing("######### #P√OX___# #########")
        text, reward, *_ = env.step(RIGHT)
        assert text == "#########\n#_S√X___#\n#########"
        assert reward == -0.1

    def test_max_steps_cut_an_episode_off(self):
        env = started(max_steps=30)
        for _ in range(29):
            assert env.step(0)[2:4] == (False, False)
        assert env.step(0)[2:4] == (False, True)
        with pytest.raises(OutOfOrder, match="call reset first"):
            env.step(UP)

    def test_the_last_step_may_solve_it(self, standing):
        env = standing("###### #P_XO# ######", max_steps=20)
        for _ in range(18):
            env.step(0)
        env.step(RIGHT)
        assert env.step(RIGHT)[1:4] == (10.9, True, False)

    def test_a_solved_episode_is_over(self):
        env = started()
        for action in env.solution():
            env.step(action)
        with pytest.raises(OutOfOrder):
            env.step(UP)

    def test_numpy_s_numbers_are_numbers(self):
        for action in (UP, DOWN, LEFT, RIGHT):
            assert started().step(np.int64(action)) == started().step(action)

    def test_names_are_taken_whole_and_in_any_case(self):
        names = {1: "North", 2: "South", 3: "West", 4: "East"}
        for number, name in names.items():
            for said in (name, name.lower(), name.upper()):
                env = started(action_lookup=names)
                assert env.step(said) == started().step(number)
            for said in ("Up", name + "!", f" {name}", name[:-1], str(number)):
                assert not started(action_lookup=names).step(said)[4]["action_is_valid"]


class TestHostileActions:
    @pytest.mark.parametrize(
        "action", [*HOSTILE, "1", 1.0, "Up" * 2**20], ids=lambda one: f"{one}"[:9]
    )
    def test_move_nothing_and_cost_a_step(self, action):
        env = started()
        before = env.render()
        answer = assert_answers_quickly(env, action)
        assert answer[:4] == (before, -0.1, False, False)
        assert not any(answer[4].values())

    @given(
        st.text()
        | st.binary()
        | st.floats()
        | st.integers()
        | st.recursive(st.none(), lambda inner: st.lists(inner) | st.tuples(inner), max_leaves=8)
        | st.dictionaries(st.text(), st.integers())
    )
    def test_anything_is_answered(self, action):
        is_named = isinstance(action, str) and action.lower() in ("up", "down", "left", "right")
        is_valid = is_named or (isinstance(action, int) and action in STEPS)
        assert assert_answers_quickly(started(), action)[4]["action_is_valid"] == is_valid

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_deep_nesting(self, kind):
        deep: Any = kind()
        for _ in range(100_000):
            deep = kind((deep,))
        assert started().step(deep)[4]["action_is_valid"] is False
        while deep:  # freed from outside: the interpreter would do so by recursion
            (deep,) = deep


class TestText:
    def test_signs(self):
        text = started(seed=5).render("text")
        assert set(text) <= set("#_O√XPS\n")
        assert [len(row) for row in text.split("\n")] == [6] * 6

    def test_signs_of_one_s_own(self):
        signs = {0: "wall ", 1: ". ", 2: "T ", 3: "* ", 4: "B ", 5: "me ", 6: "ME "}
        plain, own = started(), started(grid_lookup=signs)
        for action in [0, *plain.solution()]:
            plain.step(action)
            own.step(action)
            expected = "".join(
                {"\n": "\n", **dict(zip("#_O√XPS", signs.values(), strict=True))}[c]
                for c in plain.render()
            )
            assert own.render() == expected

    def test_coordinates(self):
        cells = [0, 0, 0, 0, 0, 0, 3, 6, 4, 0, 0, 0, 0, 0, 0]
        assert coordinates(cells, 5) == (
            "3 rows, 5 columns; (row, column) is counted from (0, 0) at the top left.\n"
            "Walls: (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 4), (2, 0), (2, 1), "
            "(2, 2), (2, 3), (2, 4)\n"
            "Targets: (1, 1), (1, 2)\n"
            "Boxes: (1, 3)\n"
            "Boxes on targets: (1, 1)\n"
            "Player on a target: (1, 2)"
        )

    def test_formats(self):
        grid, coord, both = (
            started(observation_format=kind) for kind in ("grid", "coord", "grid_coord")
        )
        lists = coord.step(UP)[0]
        assert lists.splitlines()[-1].startswith("Player")
        assert both.step(UP)[0] == f"{lists}\n{grid.step(UP)[0]}"


class TestPicture:
    def test_one_tile_for_each_cell(self):
        env = SokobanEnv(SokobanConfig(dim_room=(5, 7), num_boxes=1), render_mode="rgb_array")
        env.reset(seed=1)
        looks: dict[str, set[bytes]] = {}
        for action in [0, *env.solution()]:
            text, *_ = env.step(action)
            seen = env.render()
            assert (seen.shape, seen.dtype) == ((5 * TILE, 7 * TILE, 3), np.uint8)
            for row, line in enumerate(text.split("\n")):
                for column, glyph in enumerate(line):
                    tile = seen[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
                    looks.setdefault(glyph, set()).add(tile.tobytes())
        assert {len(tiles) for tiles in looks.values()} == {1}

    def test_all_that_can_stand_on_a_cell_looks_different(self):
        tiles = np.split(picture(range(7), 7), 7, axis=1)
        assert len({tile.tobytes() for tile in tiles}) == 7

    def test_is_a_copy(self):
        env = started()
        env.render("rgb_array")[:] = 0
        assert env.render("rgb_array").any()


def digest_of_levels():
    wishes = (LevelSpec(6, 6, 3, 100), LevelSpec(8, 8, 2, 10), LevelSpec(10, 7, 4, 100))
    levels = [generate(wish, seed) for wish in wishes for seed in range(20)]
    return sha256(b"".join(level.cells + level.solution for level in levels)).hexdigest()


class TestLevels:
    @given(
        SEEDS, st.integers(5, 10), st.integers(5, 10), st.integers(1, 3), st.sampled_from([12, 300])
    )
    @settings(max_examples=100)
    def test_laws(self, seed, num_rows, num_columns, num_boxes, search_depth):
        env = SokobanEnv(
            SokobanConfig(
                dim_room=(num_rows, num_columns), num_boxes=num_boxes, search_depth=search_depth
            )
        )
        text, _ = env.reset(seed=seed)
        rows = text.split("\n")
        assert (len(rows), {len(row) for row in rows}) == (num_rows, {num_columns})
        border = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
        assert set(border) == {"#"}
        assert text.count("X") == num_boxes == text.count("O") + text.count("S")
        assert text.count("P") + text.count("S") == 1
        assert "√" not in text

        num_pushes = 0
        for number, action in enumerate(env.solution(), start=1):
            boxes = {i for i, glyph in enumerate(text) if glyph in "X√"}
            text, _, terminated, _, info = env.step(action)
            assert info["action_is_effective"]
            assert terminated == info["success"] == (number == len(env.solution()))
            num_pushes += boxes != {i for i, glyph in enumerate(text) if glyph in "X√"}
        assert num_boxes <= num_pushes <= len(env.solution()) <= min(search_depth, 100)

    @given(SEEDS)
    @settings(max_examples=20)
    def test_floor_is_connected(self, seed):
        level = generate(LevelSpec(8, 8, 2, 100), seed)
        floor = {i for i, cell in enumerate(level.cells) if cell}
        found, edge = set(), {min(floor)}
        while edge:
            found |= edge
            edge = {i + step for i in edge for step in (-8, 8, -1, 1)} & floor - found
        assert found == floor

    def test_most_are_no_child_s_play(self):
        levels = [generate(LevelSpec(8, 8, 2, 100), seed) for seed in range(200)]
        assert len({level.cells for level in levels}) == 200
        lengths = sorted(len(level.solution) for level in levels)
        assert lengths[20] >= 8
        assert lengths[100] >= 20

    def test_are_the_same_in_every_process(self):
        code = (
            "from hashlib import sha256\n"
            "from envfleet.llm.environments.sokoban_levels import LevelSpec, generate\n"
            f"{inspect.getsource(digest_of_levels)}\n"
            "print(digest_of_levels())"
        )
        printed = [
            subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout.strip()
            for hash_seed in ("1", "2")
        ]
        assert printed == [digest_of_levels()] * 2

    def test_are_the_same_as_ever(self):
        """A seed means a level: a change of any of them breaks recorded runs."""
        assert digest_of_levels() == (
            "d076cd462d41c26b74299b32816b7deb6b02e1d1cbe780fdf4b6db6417c0a242"
        )
        assert started(seed=0).render().split() == [
            "######",
            "##_P_#",
            "#_XXO#",
            "#_O#X#",
            "#___O#",
            "######",
        ]


class TestEpisodes:
    def test_gymnasium_s_checker_is_content(self):
        check_env(SokobanEnv(), skip_render_check=True)
        check_env(SokobanEnv(render_mode="rgb_array"), skip_render_check=True)

    @given(SEEDS, st.sampled_from(["train", "val"]), st.lists(st.integers(0, 4), max_size=30))
    @settings(max_examples=20)
    def test_an_episode_is_of_its_seed(self, seed, mode, actions):
        assert_episode_is_of_its_seed(SokobanEnv, seed, mode, actions)

    def test_mode_changes_nothing(self):
        one, other = (SokobanEnv().reset(seed=3, options={"mode": m}) for m in ("train", "test"))
        assert one == other

    def test_without_a_seed_the_next_is_another(self):
        one, other = started(7), started(7)
        texts = [one.reset()[0] for _ in range(3)]
        assert texts == [other.reset()[0] for _ in range(3)]
        assert len(set(texts)) == 3

    def test_is_small_when_pickled(self):
        assert len(pickle.dumps(started(dim_room=(8, 8), num_boxes=2))) < 4000

    def test_no_global_random_numbers(self):
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        env = started()
        env.step(UP)
        assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]

    def test_no_solution_before_reset(self):
        with pytest.raises(OutOfOrder, match="call reset first"):
            SokobanEnv().solution()


class TestConfig:
    def test_as_it_comes_from_yaml(self):
        config = env_type("sokoban").config(
            {
                "dim_room": [8, 7],
                "num_boxes": 2,
                "action_lookup": {"1": "North", "2": "South", "3": "West", "4": "East"},
                "render_mode": "rgb_array",
            }
        )
        assert config.dim_room == (8, 7)
        assert config.action_lookup == {1: "North", 2: "South", 3: "West", 4: "East"}
        assert config.grid_vocab["√"] == "box on target"
        env = env_type("sokoban").make({"dim_x": 7, "dim_y": 9})
        text, _ = env.reset(seed=1)
        assert [len(row) for row in text.split("\n")] == [9] * 7

    def test_defaults(self):
        config = SokobanConfig()
        assert (config.dim_room, config.num_boxes) == ((6, 6), 3)
        assert (config.max_steps, config.search_depth) == (100, 300)
        assert config.action_lookup == {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
        assert list(config.grid_lookup.items()) == list(enumerate("#_O√XPS"))
        assert (config.render_mode, config.observation_format) == ("text", "grid")
        space = SokobanEnv().action_space
        assert [number for number in range(-5, 9) if space.contains(number)] == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"dim_room": (2, 6)}, "sides of 3 to 64 cells"),
            ({"dim_room": (4, 4)}, "one of them of 5 or more, got dim_room 4x4"),
            ({"dim_room": (6, 65)}, "got dim_room 6x65"),
            ({"num_boxes": 8}, "16 cells within its walls, for 1 to 7 boxes, got num_boxes 8"),
            ({"num_boxes": 7}, "there are no Sokoban levels of 6x6 with 7 boxes"),
            ({"search_depth": 2}, "solution length of up to 2, or too few to be found"),
            ({"max_steps": 2}, "more search_depth and max_steps"),
            ({"dim_room": 6}, "dim_room must be two numbers, got 6"),
            ({"dim_room": [6, 6, 6]}, "dim_room must be two numbers"),
            ({"dim_room": [6, 6.5]}, "dim_room must be a whole number above 0, got 6.5"),
            ({"dim_x": "8"}, "dim_x must be a whole number"),
            ({"num_boxes": 0}, "num_boxes must be a whole number above 0, got 0"),
            ({"max_steps": -1}, "max_steps must be"),
            ({"search_depth": None}, "search_depth must be"),
            ({"action_lookup": None}, "action_lookup must give a text for each of 1, 2, 3, 4"),
            ({"action_lookup": {1: "Up"}}, "action_lookup must give"),
            ({"grid_lookup": ["#"]}, "grid_lookup must give a text for each of 0, 1, 2"),
            ({"grid_lookup": dict.fromkeys(range(7), 0)}, "grid_lookup must give"),
            (
                {"observation_format": "map"},
                "must be one of 'grid', 'coord', 'grid_coord'; got 'map'",
            ),
            ({"render_mode": "human"}, "renders as text or rgb_array, not as 'human'"),
        ],
    )
    def test_mistakes_are_named(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            env_type("sokoban").make(settings)

    def test_what_hardly_a_seed_grants_is_refused(self):
        """Not at some reset in the middle of a run."""
        with pytest.raises(ConfigError, match="or too few"):
            SokobanEnv(SokobanConfig(dim_room=(9, 10), num_boxes=4, search_depth=6))

    def test_a_seed_without_a_level_is_named(self):
        """Such wishes are refused when an environment is built; this one is made past that."""
        with pytest.raises(ConfigError, match="was found for seed 3 in 400 rooms"):
            generate(LevelSpec(5, 5, 4, 300), 3)

    @pytest.mark.parametrize(
        "wish",
        [
            LevelSpec(3, 5, 1, 1),
            LevelSpec(5, 5, 3, 100),
            LevelSpec(6, 6, 5, 100),
            LevelSpec(8, 8, 2, 3),
            LevelSpec(20, 20, 5, 100),
        ],
    )
    def test_tight_wishes_are_granted_for_every_seed(self, wish):
        check(wish)
        for seed in range(20):
            assert len(generate(wish, seed).solution) <= wish.max_actions
