"""Pictures of Sokoban rooms, of one tile per kind of cell; tiles are drawn once per process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from envfleet.llm.environments.base import Picture
from envfleet.llm.environments.sokoban_levels import (
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    PLAYER_ON_TARGET,
    TARGET,
    WALL,
)

TILE = 16
"""Pixels along the side of a cell."""

Colour = tuple[int, int, int]
Shape = npt.NDArray[np.bool_]

_MORTAR, _BRICK, _LIT = (62, 58, 66), (124, 112, 112), (150, 138, 136)
_STONE, _JOINT = (226, 219, 202), (212, 204, 186)
_RED = (206, 62, 54)
_WOOD, _DARK_WOOD = (198, 142, 76), (122, 78, 34)
_LEAF, _DARK_LEAF = (112, 176, 84), (46, 98, 40)
_BLUE, _SKIN, _INK = (48, 96, 190), (244, 202, 160), (40, 36, 44)


def picture(cells: Sequence[int], num_columns: int) -> Picture:
    """A room, [row, column, colour]; `cells` says what stands where, row by row."""
    tiles = _tiles()[np.array(cells, np.uint8).reshape(-1, num_columns)]
    num_rows = len(tiles)
    return tiles.swapaxes(1, 2).reshape(num_rows * TILE, num_columns * TILE, 3)


@lru_cache(maxsize=1)
def _tiles() -> Picture:
    tiles = np.empty((7, TILE, TILE, 3), np.uint8)
    tiles[WALL] = _wall()
    tiles[FLOOR] = _floor()
    tiles[TARGET] = _target()
    tiles[BOX] = _box(_WOOD, _DARK_WOOD)
    tiles[BOX_ON_TARGET] = _box(_LEAF, _DARK_LEAF)
    tiles[PLAYER] = _player(_floor(), _BLUE)
    tiles[PLAYER_ON_TARGET] = _player(_target(), _RED)
    return tiles


def _wall() -> Picture:
    row, column = np.indices((TILE, TILE))
    shifted = (column + 4 * (row // 4 % 2)) % 8
    tile = _filled(_BRICK)
    tile[row % 4 == 0] = _LIT
    tile[(row % 4 == 3) | (shifted == 7)] = _MORTAR
    return tile


def _floor() -> Picture:
    tile = _filled(_STONE)
    tile[-1] = tile[:, -1] = _JOINT
    return tile


def _target() -> Picture:
    tile = _floor()
    tile[_disc(7.5, 7.5, 6.0) & ~_disc(7.5, 7.5, 4.4)] = _RED
    tile[_disc(7.5, 7.5, 2.2)] = _RED
    return tile


def _box(face: Colour, edge: Colour) -> Picture:
    row, column = np.indices((TILE, TILE))
    tile = _floor()
    tile[1:15, 1:15] = edge
    tile[3:13, 3:13] = face
    inner = (abs(row - 7.5) < 5) & (abs(column - 7.5) < 5)
    tile[inner & ((abs(row - column) < 2) | (abs(row + column - 15) < 2))] = edge
    tile[2, 2:14] = tile[2:14, 2] = face
    return tile


def _player(tile: Picture, shirt: Colour) -> Picture:
    tile[8:15, 4:12] = shirt
    tile[8, [4, 11]] = tile[13:15, 7:9] = _STONE
    tile[_disc(5.0, 7.5, 4.1)] = _INK
    tile[_disc(5.5, 7.5, 3.3)] = _SKIN
    tile[5, [6, 9]] = _INK
    return tile


def _filled(colour: Colour) -> Picture:
    return np.full((TILE, TILE, 3), colour, np.uint8)


def _disc(row: float, column: float, radius: float) -> Shape:
    rows, columns = np.indices((TILE, TILE))
    return np.asarray((rows - row) ** 2 + (columns - column) ** 2 < radius**2)
