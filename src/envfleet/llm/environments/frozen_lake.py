"""FrozenLake: cross the ice to the goal without falling into a hole; the ice may be slippery.

Law: the map and the slips are drawn from the episode's own seed, so that no episode depends on the
one before. A map given by `desc` or `map_seed` is the map of every episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import (
    FPS,
    Mode,
    Picture,
    Step,
    TextEnv,
    TextEnvConfig,
    action_number,
)
from envfleet.llm.environments.config_fields import check_range
from envfleet.llm.environments.frozen_lake_maps import (
    Lake,
    Place,
    checked_lake,
    random_lake,
    start_of,
)
from envfleet.llm.environments.frozen_lake_picture import lake_picture
from envfleet.options import check_fields

MEANINGS = ("player", "empty", "hole", "goal", "player in hole", "player on goal")
"""The meanings of the numbers in `grid_lookup`."""
LARGEST_SIZE = 1000
"""The most rows of a generated map; a million of them would fill the memory."""

_GLYPH_OF = {"S": 1, "F": 1, "H": 2, "G": 3}
_GLYPH_OF_PLAYER_ON = {"S": 0, "F": 0, "H": 4, "G": 5}
# Neighbours in this ring are at right angles; the player slips from one to the other.
_RING = ((0, -1), (1, 0), (0, 1), (-1, 0))
_MAP_STREAM, _SLIP_STREAM = 0, 1


@dataclass(slots=True, kw_only=True)
class FrozenLakeConfig(TextEnvConfig):
    """The map, the ice and the glyphs."""

    action_lookup: dict[int, str] | None = field(
        default_factory=lambda: {1: "Left", 2: "Down", 3: "Right", 4: "Up"}
    )
    """The names may be changed; what the numbers do may not."""
    size: int = 4
    p: float = 0.8
    """The probability that a tile of a generated map is frozen."""
    is_slippery: bool = True
    success_rate: float = 1 / 3
    """The probability of going as intended on slippery ice; else at a right angle, either side."""
    map_seed: int | None = None
    """The seed of the map of every episode; None: each episode's own seed."""
    desc: list[str] | None = None
    """A map given as rows of S, F, H and G, instead of a generated one."""
    grid_lookup: dict[int, str] = field(
        default_factory=lambda: {0: "P", 1: "_", 2: "O", 3: "G", 4: "X", 5: "√"}
    )
    """Glyphs, by number: player, empty, hole, goal, player in hole, player on goal."""
    grid_vocab: dict[str, str] | None = None
    """What a prompt says of each glyph; None: the meanings above."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.action_lookup is None or sorted(self.action_lookup) != [1, 2, 3, 4]:
            raise ConfigError(f"action_lookup must name 1, 2, 3 and 4, got {self.action_lookup}")
        if sorted(self.grid_lookup) != list(range(len(MEANINGS))):
            raise ConfigError(f"grid_lookup must have 0 to 5, got {self.grid_lookup}")
        if len(set(self.grid_lookup.values())) < len(MEANINGS):
            raise ConfigError(f"glyphs of grid_lookup must differ, got {self.grid_lookup}")
        check_range(self, "size", least=2, most=LARGEST_SIZE)
        check_range(self, "p", "success_rate", least=0, most=1)
        check_range(self, "map_seed", least=0)
        if self.desc is not None:
            if self.map_seed is not None:
                raise ConfigError("desc is the map itself, and map_seed draws one; give only one")
            self.desc = list(checked_lake(self.desc))
        if self.grid_vocab is None:
            self.grid_vocab = {
                self.grid_lookup[number]: meaning for number, meaning in enumerate(MEANINGS)
            }


class FrozenLakeEnv(TextEnv):
    """An action is 1 to 4, or its name. The goal gives 1.0; the goal or a hole ends the episode."""

    config_class: ClassVar[type[TextEnvConfig]] = FrozenLakeConfig
    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["text", "rgb_array"],
        "render_fps": FPS,
    }
    config: FrozenLakeConfig

    def _prepare(self) -> None:
        self._lake: Lake = ("SG",)
        self._player: Place = (0, 0)
        self._slips = _generator(0, _SLIP_STREAM)

    def _begin(self, seed: int, mode: Mode) -> None:
        config = self.config
        if config.desc is not None:
            self._lake = tuple(config.desc)
        else:
            map_seed = seed if config.map_seed is None else config.map_seed
            self._lake = random_lake(_generator(map_seed, _MAP_STREAM), config.size, config.p)
        self._player = start_of(self._lake)
        self._slips = _generator(seed, _SLIP_STREAM)

    def _act(self, action: Any) -> Step:
        number = action_number(action, self.config.action_lookup or {})
        before = self._player
        if number is not None:
            self._player = moved(self._lake, before, self._slipped(number - 1))
        row, column = self._player
        tile = self._lake[row][column]
        info = {
            "action_is_effective": self._player != before,
            "action_is_valid": number is not None,
            "success": tile == "G",
        }
        return self._text(), float(tile == "G"), tile in "GH", False, info

    def _slipped(self, direction: int) -> int:
        """The direction in which the player really moves."""
        if not self.config.is_slippery:
            return direction
        draw, success_rate = self._slips.random(), self.config.success_rate
        if draw < success_rate:
            return direction
        return (direction + (1 if draw < (1 + success_rate) / 2 else -1)) % len(_RING)

    def _text(self) -> str:
        return lake_text(self._lake, self._player, self.config.grid_lookup)

    def _picture(self) -> Picture:
        return lake_picture(self._lake, self._player)


def moved(lake: Lake, place: Place, direction: int) -> Place:
    """The next tile to the left (0), down (1), right (2) or up (3); the same tile at the edge."""
    down, right = _RING[direction]
    row = min(max(place[0] + down, 0), len(lake) - 1)
    column = min(max(place[1] + right, 0), len(lake[0]) - 1)
    return row, column


def lake_text(lake: Lake, player: Place, glyphs: dict[int, str]) -> str:
    """The map as text; the start is shown as ice."""
    rows = [[glyphs[_GLYPH_OF[tile]] for tile in tiles] for tiles in lake]
    row, column = player
    rows[row][column] = glyphs[_GLYPH_OF_PLAYER_ON[lake[row][column]]]
    return "\n".join("".join(glyphs_of_row) for glyphs_of_row in rows)


def _generator(seed: int, stream: int) -> np.random.Generator:
    sequence = np.random.SeedSequence(seed, spawn_key=(stream,))
    return np.random.Generator(np.random.PCG64(sequence))
