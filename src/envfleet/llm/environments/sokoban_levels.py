"""Sokoban levels by reverse play: start with a solved room and pull the boxes off their targets.

Laws: a level depends on its seed and its `LevelSpec` only. It starts with no box on a target, and
its solution is known and not too long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeVar

from envfleet.errors import ConfigError
from envfleet.llm.environments.sokoban_cells import (
    ACTIONS,
    OPPOSITE,
    beyond,
    cells_of,
    flood,
    pullable,
    shortest_walk,
)

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

MAX_SIDE = 64

# Found by trying: shortest solutions as long as those of gym-sokoban's levels, in under 1 ms.
NUM_PLAYS = 2
PULLS_PER_BOX = 6
OUTWARD = 0.8
LEAVE_TARGET = 0.8
MAX_STEPS_ASIDE = 3


class LevelSpec(NamedTuple):  # a tuple is pickled in a tenth of the time of a dataclass
    """The size and difficulty of levels."""

    num_rows: int
    num_columns: int
    num_boxes: int
    max_actions: int
    """The longest solution a level may have."""

    @property
    def num_tries(self) -> int:
        """How many rooms are tried: fewer of large ones, so that the search takes seconds."""
        return max(32, min(400, 200_000 // (self.num_rows * self.num_columns * self.num_boxes)))

    def __str__(self) -> str:
        boxes = "1 box" if self.num_boxes == 1 else f"{self.num_boxes} boxes"
        return (
            f"{self.num_rows}x{self.num_columns} with {boxes} "
            f"and a solution length of up to {self.max_actions}"
        )


class Level(NamedTuple):
    """What stands on every cell, row by row, and actions that solve it."""

    cells: bytes
    solution: bytes


def generate(spec: LevelSpec, seed: int) -> Level:
    """The level of this seed."""
    level = _first_level(spec, Random(seed), spec.num_tries)
    if level is None:
        raise ConfigError(
            f"no Sokoban level of {spec} was found for seed {seed} in {spec.num_tries} rooms; "
            "give it a larger room, fewer boxes, or more search_depth and max_steps"
        )
    return level


@lru_cache(maxsize=64)
def check(spec: LevelSpec) -> None:
    """Refuse a specification for which there are no levels, or hardly any."""
    sides = f"{spec.num_rows}x{spec.num_columns}"
    shorter, longer = sorted((spec.num_rows, spec.num_columns))
    if shorter < 3 or longer < 5 or longer > MAX_SIDE:
        raise ConfigError(
            f"a Sokoban room with its walls has sides of 3 to {MAX_SIDE} cells, one of them of 5 "
            f"or more, got dim_room {sides}"
        )
    num_inside = (spec.num_rows - 2) * (spec.num_columns - 2)
    if not 0 < 2 * spec.num_boxes < num_inside:
        raise ConfigError(
            f"a Sokoban room of {sides} has {num_inside} cells within its walls, for 1 to "
            f"{(num_inside - 1) // 2} boxes, got num_boxes {spec.num_boxes}"
        )
    # Far fewer rooms than a seed may try, so that hardly any seed fails later.
    num_tries = max(2, spec.num_tries // 16)
    if any(_first_level(spec, Random(seed), num_tries) is None for seed in range(4)):
        raise ConfigError(
            f"there are no Sokoban levels of {spec}, or too few to be found; "
            "give it a larger room, fewer boxes, or more search_depth and max_steps"
        )


# ---- rooms --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SolvedLevel:
    """A solved room: a box on each target, the player anywhere."""

    num_columns: int
    floor: int
    targets: int
    pulls_from_target: dict[int, int]
    """For every cell the least number of pulls that bring a box there."""


def _carve(spec: LevelSpec, rng: Random) -> int:
    """Connected floor cells: the track of a random walk with a brush of changing shape."""
    columns, inside = spec.num_columns, _inside(spec.num_rows, spec.num_columns)
    num_inside = inside.bit_count()
    num_floor = max(int((0.5 + 0.35 * rng.random()) * num_inside), 4 * spec.num_boxes + 2)
    num_floor = min(num_floor, num_inside)
    brushes = (1, 3, 1 | 1 << columns, 3 | 3 << columns)
    steps = (-columns, columns, -1, 1)
    place = _pick(list(cells_of(inside)), rng).bit_length() - 1
    step = _pick(steps, rng)
    floor = 0
    while True:
        floor |= _pick(brushes, rng) << place & inside
        if floor.bit_count() >= num_floor:
            return floor
        if rng.random() < 0.4 or not inside >> (place + step) & 1:
            step = _pick(steps, rng)
        if inside >> (place + step) & 1:
            place += step


@lru_cache(maxsize=64)
def _inside(num_rows: int, num_columns: int) -> int:
    row = (1 << (num_columns - 2)) - 1 << 1
    return sum(row << number * num_columns for number in range(1, num_rows - 1))


def _furnish(spec: LevelSpec, floor: int, rng: Random) -> _SolvedLevel | None:
    """Put targets on cells from which a single box could be pulled."""
    columns = spec.num_columns
    up, down, left, right = pullable(floor, columns)
    candidates = list(cells_of(floor & (up | down | left | right)))
    if len(candidates) < spec.num_boxes:
        return None
    targets = 0
    for _ in range(spec.num_boxes):
        target = _pick(candidates, rng)
        candidates.remove(target)
        targets |= target
    return _SolvedLevel(columns, floor, targets, _pulls_from(targets, floor, columns))


def _pulls_from(targets: int, floor: int, columns: int) -> dict[int, int]:
    up, down, left, right = pullable(floor, columns)
    pulls: dict[int, int] = {}
    layer, rest, num_pulls = targets, floor, 0
    while layer:
        pulls.update(dict.fromkeys(cells_of(layer), num_pulls))
        num_pulls += 1
        rest &= ~layer
        layer = rest & (
            (layer & up) >> columns
            | (layer & down) << columns
            | (layer & left) >> 1
            | (layer & right) << 1
        )
    return pulls


# ---- reverse play -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ReversePlay:
    """A reverse play, up to its best state."""

    room: _SolvedLevel
    score: int
    moves: list[int]
    player: int
    boxes: int


class _Pull(NamedTuple):
    """The player, next to the box, steps away from it, and the box follows."""

    action: int
    box: int
    stand: int


def _first_level(spec: LevelSpec, rng: Random, num_tries: int) -> Level | None:
    """Try one room after another, all from one stream of random numbers."""
    for _ in range(num_tries):
        floor = _carve(spec, rng)
        plays = [
            play
            for _ in range(NUM_PLAYS)
            if (room := _furnish(spec, floor, rng)) and (play := _reverse_play(spec, room, rng))
        ]
        if plays:
            return _level(spec, max(plays, key=lambda play: play.score), rng)
    return None


def _reverse_play(spec: LevelSpec, room: _SolvedLevel, rng: Random) -> _ReversePlay | None:
    """Pull boxes off the targets at random, mostly outwards, and keep the best state.

    The best state has no box on a target and needs the most pushes.
    """
    columns, targets, distance = room.num_columns, room.targets, room.pulls_from_target
    boxes = targets
    player = _pick(list(cells_of(room.floor & ~boxes)), rng)
    moves: list[int] = []
    seen = {boxes}
    best = None
    for _ in range(PULLS_PER_BOX * spec.num_boxes):
        layers = flood(player, room.floor & ~boxes, columns)
        # The first walk does not count: it comes after the last push of the solution.
        near = layers[: spec.max_actions - len(moves)] if moves else layers
        pulls = [
            pull
            for pull in _pulls(boxes, sum(near), columns)
            if boxes ^ pull.box ^ pull.stand not in seen
        ]
        if not pulls:
            break
        if rng.random() < OUTWARD:
            pulls = [one for one in pulls if distance[one.stand] > distance[one.box]] or pulls
        if rng.random() < LEAVE_TARGET:
            pulls = [one for one in pulls if one.box & targets] or pulls
        action, box, stand = _pick(pulls, rng)
        if moves:
            moves += shortest_walk(layers, stand, columns)
        moves.append(action)
        player = beyond(stand, action, columns)
        boxes ^= box ^ stand
        seen.add(boxes)
        if not boxes & targets:
            score = sum([distance[box] for box in cells_of(boxes)])
            if best is None or score > best.score:
                best = _ReversePlay(room, score, moves.copy(), player, boxes)
    return best


def _level(spec: LevelSpec, play: _ReversePlay, rng: Random) -> Level:
    """The level that begins with this state, the player a few steps away."""
    room = play.room
    layers = flood(play.player, room.floor & ~play.boxes, room.num_columns)
    near = layers[: min(MAX_STEPS_ASIDE, spec.max_actions - len(play.moves)) + 1]
    player = _pick(list(cells_of(_pick(near, rng))), rng)
    moves = play.moves + shortest_walk(layers, player, room.num_columns)

    cells = bytearray(spec.num_rows * spec.num_columns)
    what_stands = (
        (FLOOR, room.floor),
        (TARGET, room.targets),
        (BOX, play.boxes),
        (PLAYER_ON_TARGET if player & room.targets else PLAYER, player),
    )
    for code, where in what_stands:
        for cell in cells_of(where):
            cells[cell.bit_length() - 1] = code
    return Level(bytes(cells), bytes([OPPOSITE[move] for move in reversed(moves)]))


def _pulls(boxes: int, reach: int, columns: int) -> Iterator[_Pull]:
    for action, where in zip(ACTIONS, pullable(reach, columns), strict=True):
        for box in cells_of(boxes & where):
            yield _Pull(action, box, beyond(box, action, columns))


_T = TypeVar("_T")


def _pick(choices: Sequence[_T], rng: Random) -> _T:
    # Python guarantees the numbers of random() for all versions, but not those of choice().
    return choices[int(rng.random() * len(choices))]
