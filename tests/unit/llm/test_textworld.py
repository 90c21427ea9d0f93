"""TextWorld games as environments: a game that the package makes is played to its end."""

import pickle
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envfleet.errors import ConfigError, MissingExtra, OutOfOrder
from envfleet.llm.environments.textworld import TextWorldConfig, TextWorldEnv
from envfleet.llm.environments.textworld_games import GameKind, made_game
from envfleet.llm.registry import env_type

KIND = GameKind(num_rooms=2, num_objects=3, quest_length=2)
PAGE = Path(__file__).parents[3] / "docs" / "environments" / "textworld.md"


def test_without_the_package_the_pip_line_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(MissingExtra, match=r"pip install 'envfleet\[textworld\]'"):
        env_type("textworld").make(None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_rooms": 0}, "num_rooms must be at least 1, got 0"),
        ({"game_file": "no.z8"}, "there is no file .*no.z8"),
    ],
)
def test_mistakes_are_named(settings, said):
    with pytest.raises(ConfigError, match=said):
        TextWorldConfig(**settings)


def test_a_game_needs_what_is_known_of_it(tmp_path):
    (tmp_path / "game.z8").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"there is no file .*game\.json"):
        TextWorldConfig(game_file=str(tmp_path / "game.z8"))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("games"))
    return TextWorldConfig(
        num_games=1, num_rooms=2, num_objects=3, quest_length=2, games_dir=folder
    )


@pytest.fixture
def env(config):
    env = TextWorldEnv(config)
    env.reset(seed=0)
    yield env
    env.close()


@pytest.fixture(scope="module")
def way_to_win(config):
    import textworld

    with pytest.warns(UserWarning, match="not fully supported"):
        game = textworld.start(
            str(made_game(KIND, 0, config.games_dir)), textworld.EnvInfos(policy_commands=True)
        )
    commands = list(game.reset().policy_commands)
    game.close()
    return commands


class TestWithThePackage:
    def test_a_player_reads_the_quest_the_room_and_the_commands(self, env):
        said = env.render()
        assert "-= " in said
        assert "\n\nYou can: " in said
        assert "\n>" not in said
        assert "$$$" not in said
        assert said in env.observation_space

    def test_the_way_to_win_wins(self, env, way_to_win):
        assert len(way_to_win) == 2
        for command in way_to_win[:-1]:
            _, reward, terminated, truncated, info = env.step(command)
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert info["action_is_effective"] is info["action_is_valid"] is True
        said, reward, terminated, truncated, info = env.step(f"  {way_to_win[-1].upper()} ")
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info["success"] is True
        assert info["score"] == info["max_score"] == 1
        assert "You can: " not in said
        with pytest.raises(OutOfOrder):
            env.step("look")

    def test_looking_is_valid_and_changes_nothing(self, env):
        _, reward, _, _, info = env.step("look")
        assert (reward, info["action_is_valid"], info["action_is_effective"]) == (0.0, True, False)

    def test_other_text_never_reaches_the_game(self, env, way_to_win):
        actions: tuple[object, ...] = (
            "quit", "save", "restart", "restore", "undo", "script", "look. quit", "look then quit",
            "", None, 3.5, {}, 10**5000, "x" * 2**20, "\x00", "\ud800", "__import__('os')",
        )  # fmt: skip
        for action in actions:
            said, reward, terminated, truncated, info = env.step(action)
            assert said.startswith("That cannot be done here.")
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert info["action_is_valid"] is info["action_is_effective"] is False
        for command in way_to_win:
            info = env.step(command)[4]
        assert info["success"] is True

    def test_after_so_many_steps_it_is_cut_off(self, config):
        env = TextWorldEnv(replace(config, max_steps=2, shows_commands=False))
        assert "You can: " not in env.reset(seed=0)[0]
        assert env.step("nothing")[2:4] == (False, False)
        assert env.step("look")[2:4] == (False, True)
        env.close()

    def test_a_pickled_episode_goes_on_the_same(self, env, way_to_win):
        env.step(way_to_win[0])
        other = pickle.loads(pickle.dumps(env))
        assert other.render() == env.render()
        assert other.step(way_to_win[1]) == env.step(way_to_win[1])
        other.close()

    def test_a_reset_begins_again(self, env, way_to_win):
        first = env.reset(seed=3)
        env.step(way_to_win[0])
        assert env.reset(seed=3) == first

    def test_a_game_file_is_played(self, config, way_to_win):
        env = TextWorldEnv(TextWorldConfig(game_file=str(made_game(KIND, 0, config.games_dir))))
        state = random.getstate()
        env.reset(seed=99)
        for command in way_to_win:
            info = env.step(command)[4]
        assert info["success"] is True
        assert random.getstate() == state
        env.close()

    def test_the_page_s_example_runs(self, config, monkeypatch, tmp_path, capsys):
        """With the game that is there already: the page asks for the same one."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "envfleet").mkdir()
        (tmp_path / "envfleet" / "textworld").symlink_to(config.games_dir)
        (example,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
        exec(example, {})
        assert "'action_is_valid': True" in capsys.readouterr().out

    def test_making_a_game_leaves_the_game_and_nothing_else(self, config):
        (folder,) = Path(config.games_dir).iterdir()
        assert sorted(path.name for path in folder.iterdir()) == ["game.json", "game.ni", "game.z8"]
        assert not Path("Inform").exists()
