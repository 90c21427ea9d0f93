"""Games that TextWorld generates, by kind and number, kept in a folder so that each is made once.

Law: a game appears in the folder when it is complete, so that several processes may make it at the
same time. It is made in a process of its own, because TextWorld's compiler writes files into the
user's home.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.extras import import_extra

NUM_ATTEMPTS = 20
"""Attempts at one game: not every generated map has room for a quest of the wanted length."""
TIMEOUT_S = 300.0
NO_QUEST = 3


@dataclass(frozen=True, slots=True)
class GameKind:
    """The size of a game."""

    num_rooms: int
    num_objects: int
    quest_length: int

    def __str__(self) -> str:
        return f"rooms{self.num_rooms}-objects{self.num_objects}-quest{self.quest_length}"


def textworld_package() -> Any:
    """TextWorld, or MissingExtra."""
    install = "pip install 'envfleet[textworld]'"
    return import_extra("textworld", wanted_by="env type textworld", install=install)


def made_game(kind: GameKind, number: int, games_dir: str | None = None) -> Path:
    """The file of the game of this number, which is made if it is not there."""
    name = f"{textworld_package().__version__}-{kind}-{number}"
    kept = _games_folder(games_dir)
    game = kept / name / "game.z8"
    if not game.exists():
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=kept) as making:
            whole = Path(making) / "whole"
            whole.mkdir()
            _make_elsewhere(kind, number, whole / "game.z8", home=making)
            try:
                whole.rename(kept / name)
            except OSError:
                if not game.exists():  # no other process was faster
                    raise
    return game


def _games_folder(games_dir: str | None) -> Path:
    if games_dir is not None:
        return Path(games_dir).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "envfleet" / "textworld"


def _make_elsewhere(kind: GameKind, number: int, path: Path, home: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, (*astuple(kind), number, path))],
        env={**os.environ, "HOME": home, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == NO_QUEST:
        raise ConfigError(
            f"no game with {kind.num_rooms} rooms, {kind.num_objects} objects and a quest of "
            f"{kind.quest_length} commands was found in {NUM_ATTEMPTS} attempts; "
            "ask for a shorter quest, or for more rooms and objects"
        )
    if done.returncode != 0:
        raise ConfigError(f"TextWorld could not make game {number} of {kind}:\n{done.stderr}")


def make(kind: GameKind, number: int, path: str) -> bool:
    """Make a game in this process; False if there is none of this kind."""
    textworld = textworld_package()
    no_quest = import_extra(
        "textworld.generator.chaining", wanted_by="", install=""
    ).QuestGenerationError
    for attempt in range(NUM_ATTEMPTS):
        options = textworld.GameOptions()
        options.seeds = number * NUM_ATTEMPTS + attempt
        options.nb_rooms, options.nb_objects = kind.num_rooms, kind.num_objects
        options.quest_length = kind.quest_length
        options.path = path
        try:
            textworld.make(options)
        except no_quest:
            continue
        return True
    return False


if __name__ == "__main__":
    *_numbers, _path = sys.argv[1:]
    _rooms, _objects, _quest, _number = map(int, _numbers)
    sys.exit(0 if make(GameKind(_rooms, _objects, _quest), _number, _path) else NO_QUEST)
