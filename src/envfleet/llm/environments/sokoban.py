"""Sokoban: push every box onto a target. Boxes are pushed, never pulled, one at a time.

Laws: every level can be solved within `max_steps`, and its solution is known. An action is the
number or the name of a direction; any other action moves nothing and costs a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar, Literal, get_args

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.environments.base import (
    FPS,
    Mode,
    Picture,
    Step,
    TextEnv,
    TextEnvConfig,
    action_number,
)
from envfleet.llm.environments.sokoban_cells import ACTIONS, DOWN, LEFT, RIGHT, UP
from envfleet.llm.environments.sokoban_levels import (
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    PLAYER_ON_TARGET,
    TARGET,
    WALL,
    Level,
    LevelSpec,
    check,
    generate,
)
from envfleet.llm.environments.sokoban_picture import picture
from envfleet.options import check_fields

ObservationFormat = Literal["grid", "coord", "grid_coord"]

STEP_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0

_MEANINGS = {
    WALL: "wall",
    FLOOR: "empty",
    TARGET: "target",
    BOX_ON_TARGET: "box on target",
    BOX: "box",
    PLAYER: "player",
    PLAYER_ON_TARGET: "player on target",
}
_BOXES = (BOX, BOX_ON_TARGET)
_PLAYERS = (PLAYER, PLAYER_ON_TARGET)
_BOX_OVER = {FLOOR: BOX, TARGET: BOX_ON_TARGET}
_WITHOUT_PLAYER = {PLAYER: FLOOR, PLAYER_ON_TARGET: TARGET}
_WITH_PLAYER = {
    FLOOR: PLAYER,
    BOX: PLAYER,
    TARGET: PLAYER_ON_TARGET,
    BOX_ON_TARGET: PLAYER_ON_TARGET,
}
_OF_EVERY_EPISODE = ("_spec", "_names", "_step_of", "_num_columns")
"""Attributes that follow from the configuration."""
_OF_A_NEW_EPISODE = (
    *_OF_EVERY_EPISODE,
    *("_cells", "_shown", "_player", "_num_on_target", "_num_steps"),
)
"""Attributes that follow from the configuration and the level."""
_GLYPHS = dict(zip(_MEANINGS, "#_O√XPS", strict=True))


@dataclass(slots=True, kw_only=True)
class SokobanConfig(TextEnvConfig):
    """The room, the level and how it is shown."""

    action_lookup: dict[int, str] | None = field(
        default_factory=lambda: {UP: "Up", DOWN: "Down", LEFT: "Left", RIGHT: "Right"}
    )
    """Names of the actions 1 (up), 2 (down), 3 (left) and 4 (right)."""
    dim_room: tuple[int, int] = (6, 6)
    """Rows and columns, walls included."""
    dim_x: int | None = None
    """Rows, if given on their own."""
    dim_y: int | None = None
    """Columns, if given on their own."""
    num_boxes: int = 3
    max_steps: int = 100
    """An episode is truncated after this many steps; every level can be solved in them."""
    search_depth: int = 300
    """The longest solution that a level may have; small numbers make easy levels."""
    grid_lookup: dict[int, str] = field(default_factory=_GLYPHS.copy)
    """The signs of wall 0, empty 1, target 2, box on target 3, box 4, player 5 and player on target
    6."""
    grid_vocab: dict[str, str] | None = None
    """What these signs mean, for prompts; None: made from `grid_lookup`."""
    observation_format: ObservationFormat = "grid"
    """A map, lists of coordinates, or both."""

    def __post_init__(self) -> None:
        """Convert values from YAML, and refuse wrong ones."""
        self.dim_room = _sides(self.dim_room, self.dim_x, self.dim_y)
        self.dim_x = self.dim_y = None
        for name in ("num_boxes", "max_steps", "search_depth"):
            setattr(self, name, _positive(name, getattr(self, name)))
        self.action_lookup = _named("action_lookup", self.action_lookup, len(ACTIONS), start=1)
        self.grid_lookup = _named("grid_lookup", self.grid_lookup, len(_MEANINGS), start=0)
        check_fields(self)
        self.grid_vocab = (
            {self.grid_lookup[code]: meaning for code, meaning in _MEANINGS.items()}
            if self.grid_vocab is None
            else dict(self.grid_vocab)
        )
        if self.observation_format not in get_args(ObservationFormat):
            raise ConfigError(
                f"observation_format must be one of {', '.join(get_args(ObservationFormat))}, "
                f"got {self.observation_format!r}"
            )


class SokobanEnv(TextEnv):
    """Push every box onto a target: +1 for each, +10 for the last, -0.1 for every step."""

    config_class: ClassVar[type[TextEnvConfig]] = SokobanConfig
    config: SokobanConfig
    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["text", "rgb_array"],
        "render_fps": FPS,
    }

    def _prepare(self) -> None:
        """Refuse a configuration for which there are no levels."""
        num_rows, self._num_columns = self.config.dim_room
        longest = min(self.config.search_depth, self.config.max_steps)
        self._spec = LevelSpec(num_rows, self._num_columns, self.config.num_boxes, longest)
        check(self._spec)
        steps = (-self._num_columns, self._num_columns, -1, 1)
        self._names = self.config.action_lookup or {}
        self._step_of = dict(zip(ACTIONS, steps, strict=True))
        self._level: Level | None = None

    def solution(self) -> list[int]:
        """Actions that solve this episode from its start; not always the fewest."""
        if self._level is None:
            raise OutOfOrder("SokobanEnv has no level yet; call reset first")
        return list(self._level.solution)

    def dump_episode(self) -> dict[str, Any]:
        """As for all text environments; before the first step the level is enough."""
        kept = super().dump_episode()
        # a subclass may have more state, and the configuration may have been changed
        if type(self) is SokobanEnv and "config" not in kept:
            for name in _OF_EVERY_EPISODE if kept.get("_num_steps") else _OF_A_NEW_EPISODE:
                kept.pop(name, None)
        return kept

    def load_episode(self, episode: dict[str, Any]) -> None:
        """Go on with the episode of another environment."""
        super().load_episode(episode)
        if "_cells" not in episode and self._level is not None:  # else it has not begun
            self._lay_out(self._level)

    def _begin(self, seed: int, mode: Mode) -> None:
        self._level = generate(self._spec, seed)
        self._lay_out(self._level)

    def _lay_out(self, level: Level) -> None:
        cells, width = level.cells, self._num_columns
        # Plain lists, because a step on them takes about a microsecond.
        self._cells = list(cells)
        self._shown = list(map(self.config.grid_lookup.__getitem__, cells))
        # Each line end is part of the wall on the right, which never changes.
        inner_ends = slice(width - 1, len(cells) - 1, width)
        self._shown[inner_ends] = [sign + "\n" for sign in self._shown[inner_ends]]
        self._player = max(map(cells.find, _PLAYERS))
        self._num_on_target = cells.count(BOX_ON_TARGET)
        self._num_steps = 0

    def _act(self, action: Any) -> Step:
        number = action_number(action, self._names)
        before = self._num_on_target
        has_moved = number is not None and self._move(self._step_of[number])
        self._num_steps += 1
        reward = STEP_REWARD + BOX_REWARD * (self._num_on_target - before)
        is_solved = self._num_on_target == self.config.num_boxes
        if is_solved:
            reward += SOLVED_REWARD
        info = {
            "action_is_effective": has_moved,
            "action_is_valid": number is not None,
            "success": is_solved,
        }
        is_late = self._num_steps >= self.config.max_steps and not is_solved
        return self._text(), reward, is_solved, is_late, info

    def _move(self, step: int) -> bool:
        """Move the player, and a box in front of them; whether that was possible."""
        cells, shown, glyphs = self._cells, self._shown, self.config.grid_lookup
        place, ahead = self._player, self._player + step
        there = cells[ahead]
        if there in _BOXES:
            pushed = _BOX_OVER.get(cells[ahead + step])
            if pushed is None:
                return False
            cells[ahead + step] = pushed
            shown[ahead + step] = glyphs[pushed]
            self._num_on_target += (pushed == BOX_ON_TARGET) - (there == BOX_ON_TARGET)
        elif there == WALL:
            return False
        cells[place] = left = _WITHOUT_PLAYER[cells[place]]
        shown[place] = glyphs[left]
        cells[ahead] = entered = _WITH_PLAYER[there]
        shown[ahead] = glyphs[entered]
        self._player = ahead
        return True

    def _text(self) -> str:
        wanted = self.config.observation_format
        grid = "".join(self._shown)
        if wanted == "grid":
            return grid
        lists = coordinates(self._cells, self._num_columns)
        return lists if wanted == "coord" else f"{lists}\n{grid}"

    def _picture(self) -> Picture:
        return picture(self._cells, self._num_columns)


def coordinates(cells: list[int], num_columns: int) -> str:
    """A room as lists of coordinates, one line for each kind of thing in it."""
    lines = [
        f"{len(cells) // num_columns} rows, {num_columns} columns; "
        "(row, column) is counted from (0, 0) at the top left."
    ]
    for title, kinds in (
        ("Walls", (WALL,)),
        ("Targets", (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET)),
        ("Boxes", (BOX,)),
        ("Boxes on targets", (BOX_ON_TARGET,)),
        ("Player", (PLAYER,)),
        ("Player on a target", (PLAYER_ON_TARGET,)),
    ):
        places = [divmod(place, num_columns) for place, cell in enumerate(cells) if cell in kinds]
        if places:
            lines.append(f"{title}: {', '.join(map(str, places))}")
    return "\n".join(lines)


def _sides(dim_room: Any, dim_x: Any, dim_y: Any) -> tuple[int, int]:
    try:
        num_rows, num_columns = dim_room
    except (TypeError, ValueError):
        raise ConfigError(f"dim_room must be two numbers, got {dim_room!r}") from None
    return (
        _positive("dim_room", num_rows) if dim_x is None else _positive("dim_x", dim_x),
        _positive("dim_room", num_columns) if dim_y is None else _positive("dim_y", dim_y),
    )


def _positive(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"{name} must be a whole number above 0, got {value!r}")
    return number


def _named(name: str, given: Any, count: int, *, start: int) -> dict[int, str]:
    """A lookup with exactly the numbers it must have."""
    numbers = range(start, start + count)
    try:
        lookup = {int(key): given[key] for key in given}
    except (TypeError, ValueError, KeyError, IndexError):
        lookup = {}
    if sorted(lookup) != list(numbers) or not all(isinstance(v, str) for v in lookup.values()):
        raise ConfigError(
            f"{name} must give a text for each of {', '.join(map(str, numbers))}, got {given!r}"
        )
    return {number: lookup[number] for number in numbers}
