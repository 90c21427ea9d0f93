"""Games of Microsoft's TextWorld: rooms, things and a quest, played in words.

Law: only a command that the game offers now reaches its interpreter, which is native code and knows
commands such as save and quit; any other text is answered here. An episode is its game and its
commands: a copy of an environment replays them.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig
from envfleet.llm.environments.config_fields import check_range
from envfleet.llm.environments.textworld_games import GameKind, made_game, textworld_package
from envfleet.options import check_fields

MAX_COMMAND_CHARS = 200
INTERPRETER_SEED = 1
"""Without one the interpreter would use the time of day."""


@dataclass(slots=True, kw_only=True)
class TextWorldConfig(TextEnvConfig):
    """The game, or what games are generated."""

    game_file: str | None = None
    """A game made by TextWorld, `.z8` with its `.json` beside it; None: games are generated."""
    num_games: int = 10
    """How many different games are generated; each takes some seconds, once."""
    num_rooms: int = 3
    num_objects: int = 6
    quest_length: int = 4
    """How many commands the shortest solution takes."""
    max_steps: int = 50
    """An episode is truncated after this many commands."""
    shows_commands: bool = True
    """Whether the text lists the possible commands."""
    games_dir: str | None = None
    """Where generated games are kept; None: the user's cache folder."""

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("num_games", "num_rooms", "num_objects", "quest_length", "max_steps")
        check_range(self, *counts, least=1)
        if self.game_file is not None:
            path = Path(self.game_file).expanduser().resolve()
            for one in (path, path.with_suffix(".json")):
                if not one.is_file():
                    raise ConfigError(f"there is no file {one}, which this game needs")
            self.game_file = str(path)


class TextWorldEnv(TextEnv):
    """One game; the episode ends when it is won or lost."""

    config_class: ClassVar[type[TextEnvConfig]] = TextWorldConfig
    config: TextWorldConfig

    def _prepare(self) -> None:
        """Check that TextWorld is installed; games are made or opened at a reset."""
        textworld_package()
        self._game: str | None = None
        self._commands: list[str] = []
        self._num_steps = 0
        self._said = ""
        self._player: Any = None
        self._state: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_player": None, "_state": None}

    def close(self) -> None:
        """Close the game."""
        if self._player is not None:
            self._player.close()
        self._player = self._state = None

    def _begin(self, seed: int, mode: Mode) -> None:
        game = self.config.game_file
        if game is None:
            number = random.Random(seed).randint(0, self.config.num_games - 1)
            game = str(made_game(_game_kind(self.config), number, self.config.games_dir))
        if game != self._game:
            self.close()
        self._game, self._commands, self._num_steps = game, [], 0
        self._state = None
        state = self._now()
        self._said = f"{state.objective}\n\n{_game_text(state.description)}"

    def _now(self) -> Any:
        """The state of the game, replayed up to here if it is not open."""
        if self._state is None:
            if self._player is None:
                self._player = _opened_game(str(self._game))
            self._state = self._player.reset()
            for command in self._commands:
                self._state, _, _ = self._player.step(command)
        return self._state

    def _act(self, action: Any) -> Step:
        before = self._now()
        command = _game_command(action)
        is_offered = command in before.admissible_commands
        self._num_steps += 1
        after, is_done = before, False
        if is_offered:
            after, _, is_done = self._player.step(command)
            self._state = after
            self._commands.append(command)
        self._said = _game_text(after.feedback) if is_offered else "That cannot be done here."
        info = {
            "action_is_effective": is_offered and _game_facts(after) != _game_facts(before),
            "action_is_valid": is_offered,
            "success": bool(after.won),
            "score": int(after.score or 0),
            "max_score": int(after.max_score),
        }
        reward = float((after.score or 0) - (before.score or 0))
        is_cut = not is_done and self._num_steps >= self.config.max_steps
        return self._text(), reward, bool(is_done), is_cut, info

    def _text(self) -> str:
        if not self.config.shows_commands or self._game is None:
            return self._said
        state = self._now()
        if state.won or state.lost:
            return self._said
        return f"{self._said}\n\nYou can: {', '.join(state.admissible_commands)}"


def _game_kind(config: TextWorldConfig) -> GameKind:
    return GameKind(config.num_rooms, config.num_objects, config.quest_length)


def _game_command(action: Any) -> str:
    if not isinstance(action, str) or len(action) > MAX_COMMAND_CHARS:
        return ""
    return " ".join(action.lower().split())


def _game_facts(state: Any) -> list[str]:
    return sorted(map(str, state.facts))


def _game_text(text: str) -> str:
    """A game's text without its prompt and status line."""
    head, _, _ = text.partition("\n>")
    return head.strip()


def _opened_game(game: str) -> Any:
    textworld = textworld_package()
    wanted = textworld.EnvInfos(
        admissible_commands=True,
        description=True,
        facts=True,
        lost=True,
        max_score=True,
        objective=True,
        score=True,
        won=True,
    )
    with warnings.catch_warnings():
        # The interpreter warns that it does not keep the score of this game; TextWorld keeps it.
        warnings.filterwarnings("ignore", "Game .* is not fully supported")
        player = textworld.start(game, wanted)
    player.seed(INTERPRETER_SEED)
    return player
