"""Sokoban levels by reverse play: start solved, pull the boxes away, keep the way back.

Laws: a level depends on its seed and on what is asked for only. It begins with no box on a target,
and its solution is known and no longer than asked for.
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
    way,
)

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

MAX_SIDE = 64

# Found by trying: shortest solutions as long as those of gym-sokoban's levels, in under 1 ms.
NUM_TAKES = 2
PULLS_PER_BOX = 6
OUTWARD = 0.8
LEAVE_TARGET = 0.8
MAX_STEPS_ASIDE = 3


class LevelSpec(NamedTuple):  # tuples, because these travel, and dataclasses take ten times as long
    """What levels are asked for."""

    num_rows: int
    num_columns: int
    num_boxes: int
    max_actions: int
    """The longest solution a level may have."""

    @property
    def num_tries(self) -> int:
        """How many rooms are tried: fewer where one takes long, so that all take seconds."""
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


def generate(wish: LevelSpec, seed: int) -> Level:
    """The level of this seed."""
    level = _first_level(wish, Random(seed), wish.num_tries)
    if level is None:
        raise ConfigError(
            f"no Sokoban level of {wish} was found for seed {seed} in {wish.num_tries} rooms; "
            "give it a larger room, fewer boxes, or more search_depth and max_steps"
        )
    return level


@lru_cache(maxsize=64)
def check(wish: LevelSpec) -> None:
    """Refuse a wish that no level grants, or hardly any."""
    sides = f"{wish.num_rows}x{wish.num_columns}"
    shorter, longer = sorted((wish.num_rows, wish.num_columns))
    if shorter < 3 or longer < 5 or longer > MAX_SIDE:
        raise ConfigError(
            f"a Sokoban room with its walls has sides of 3 to {MAX_SIDE} cells, one of them of 5 "
            f"or more, got dim_room {sides}"
        )
    num_inside = (wish.num_rows - 2) * (wish.num_columns - 2)
    if not 0 < 2 * wish.num_boxes < num_inside:
        raise ConfigError(
            f"a Sokoban room of {sides} has {num_inside} cells within its walls, for 1 to "
            f"{(num_inside - 1) // 2} boxes, got num_boxes {wish.num_boxes}"
        )
    # Far fewer rooms than a seed may try: of what passes here, hardly a seed is without a level.
    num_tries = max(2, wish.num_tries // 16)
    if any(_first_level(wish, Random(seed), num_tries) is None for seed in range(4)):
        raise ConfigError(
            f"there are no Sokoban levels of {wish}, or too few to be found; "
            "give it a larger room, fewer boxes, or more search_depth and max_steps"
        )


# ---- rooms --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Room:
    """A solved room: a box on each target, the player anywhere."""

    num_columns: int
    floor: int
    targets: int
    pulls_from_target: dict[int, int]
    """For every cell how many pulls, at least, bring a box there."""


def _carve(wish: LevelSpec, rng: Random) -> int:
    """Floor cells: the track of a walker with a brush of changing shape, all connected."""
    columns, inside = wish.num_columns, _inside(wish.num_rows, wish.num_columns)
    num_inside = inside.bit_count()
    num_floor = max(int((0.5 + 0.35 * rng.random()) * num_inside), 4 * wish.num_boxes + 2)
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


def _furnish(wish: LevelSpec, floor: int, rng: Random) -> _Room | None:
    """Targets on cells from which a box could be pulled, were it alone."""
    columns = wish.num_columns
    up, down, left, right = pullable(floor, columns)
    candidates = list(cells_of(floor & (up | down | left | right)))
    if len(candidates) < wish.num_boxes:
        return None
    targets = 0
    for _ in range(wish.num_boxes):
        target = _pick(candidates, rng)
        candidates.remove(target)
        targets |= target
    return _Room(columns, floor, targets, _pulls_from(targets, floor, columns))


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
class _Take:
    """One reverse play, up to its best moment."""

    room: _Room
    score: int
    moves: list[int]
    player: int
    boxes: int


class _Pull(NamedTuple):
    """The player stands before the box, takes one step away from it, and the box follows."""

    action: int
    box: int
    stand: int


def _first_level(wish: LevelSpec, rng: Random, num_tries: int) -> Level | None:
    """Try room after room, all from one stream of random numbers."""
    for _ in range(num_tries):
        floor = _carve(wish, rng)
        takes = [
            take
            for _ in range(NUM_TAKES)
            if (room := _furnish(wish, floor, rng)) and (take := _reverse_play(wish, room, rng))
        ]
        if takes:
            return _level(wish, max(takes, key=lambda take: take.score), rng)
    return None


def _reverse_play(wish: LevelSpec, room: _Room, rng: Random) -> _Take | None:
    """Pull boxes away from the targets at random, mostly outwards, and keep the best moment.

    A moment is the better the more pushes its boxes are from targets. It counts only if no box is
    on one.
    """
    columns, targets, distance = room.num_columns, room.targets, room.pulls_from_target
    boxes = targets
    player = _pick(list(cells_of(room.floor & ~boxes)), rng)
    moves: list[int] = []
    seen = {boxes}
    best = None
    for _ in range(PULLS_PER_BOX * wish.num_boxes):
        layers = flood(player, room.floor & ~boxes, columns)
        # Where the player goes after the last push does not matter, so the first walk is free.
        near = layers[: wish.max_actions - len(moves)] if moves else layers
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
            moves += way(layers, stand, columns)
        moves.append(action)
        player = beyond(stand, action, columns)
        boxes ^= box ^ stand
        seen.add(boxes)
        if not boxes & targets:
            score = sum([distance[box] for box in cells_of(boxes)])
            if best is None or score > best.score:
                best = _Take(room, score, moves.copy(), player, boxes)
    return best


def _level(wish: LevelSpec, take: _Take, rng: Random) -> Level:
    """The level that begins where this play ended, the player a few steps aside."""
    room = take.room
    layers = flood(take.player, room.floor & ~take.boxes, room.num_columns)
    near = layers[: min(MAX_STEPS_ASIDE, wish.max_actions - len(take.moves)) + 1]
    player = _pick(list(cells_of(_pick(near, rng))), rng)
    moves = take.moves + way(layers, player, room.num_columns)

    cells = bytearray(wish.num_rows * wish.num_columns)
    what_stands = (
        (FLOOR, room.floor),
        (TARGET, room.targets),
        (BOX, take.boxes),
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
    # Python promises the sequence of random() for ever, that of choice() not.
    return choices[int(rng.random() * len(choices))]
