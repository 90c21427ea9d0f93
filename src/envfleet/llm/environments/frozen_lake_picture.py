"""Draws a frozen lake: ice, holes, a flag at the goal, and a player in a red coat.

A tile is painted once per process at four times its size and then averaged down, which smooths its
edges; a picture is those tiles side by side.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from envfleet.llm.environments.base import Picture
from envfleet.llm.environments.frozen_lake_maps import Lake, Place

TILE_PIXELS = 48
_FINER = 4

_Mask = npt.NDArray[np.bool_]
_Canvas = npt.NDArray[np.float64]
_Colour = tuple[int, int, int]

_ICE: _Colour = (218, 238, 249)
_SHEEN: _Colour = (238, 248, 253)
_SEAM: _Colour = (170, 205, 226)
_RIM: _Colour = (140, 184, 212)
_WATER: _Colour = (24, 62, 104)
_RIPPLE: _Colour = (92, 142, 186)
_POLE: _Colour = (96, 68, 46)
_FLAG: _Colour = (34, 150, 72)
_COAT: _Colour = (204, 46, 52)
_SKIN: _Colour = (250, 206, 160)
_DARK: _Colour = (40, 34, 38)

# Every point of a tile, from -1 to 1 both ways, y downwards: a row and a column that broadcast.
_POINTS = TILE_PIXELS * _FINER
_X = ((np.arange(_POINTS) + 0.5) / _POINTS * 2 - 1)[None, :]
_Y = _X.T


def lake_picture(lake: Lake, player: Place) -> Picture:
    """The lake from above, [row, column, colour]."""
    rows = [
        np.concatenate(
            [_tile(tile, (row, column) == player) for column, tile in enumerate(tiles)], axis=1
        )
        for row, tiles in enumerate(lake)
    ]
    return np.concatenate(rows)


@lru_cache(maxsize=8)
def _tile(tile: str, has_player: bool) -> Picture:
    canvas = np.empty((_POINTS, _POINTS, 3))
    _paint_ice(canvas)
    if tile == "H":
        _paint_hole(canvas)
        if has_player:
            _paint_swimmer(canvas)
    else:
        if tile == "G":
            _paint_flag(canvas)
        if has_player:
            _paint_player(canvas, x=-0.2 if tile == "G" else 0.0)
    blocks = canvas.reshape(TILE_PIXELS, _FINER, TILE_PIXELS, _FINER, 3)
    painted: Picture = blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    return painted


def _paint_ice(canvas: _Canvas) -> None:
    canvas[:] = _ICE
    slope = _X + _Y
    canvas[(abs(slope - 0.5) < 0.1) | (abs(slope - 0.85) < 0.05)] = _SHEEN
    canvas[np.maximum(abs(_X), abs(_Y)) > 0.96] = _SEAM


def _paint_hole(canvas: _Canvas) -> None:
    canvas[_disc(0, 0, 0.78, 0.7)] = _RIM
    canvas[_disc(0, 0.04, 0.7, 0.6)] = _WATER


def _paint_flag(canvas: _Canvas) -> None:
    canvas[_disc(0.3, 0.74, 0.3, 0.09)] = _SEAM
    canvas[(abs(_X - 0.3) < 0.045) & (_Y > -0.8) & (_Y < 0.76)] = _POLE
    canvas[(_X > 0.3) & (abs(_Y + 0.5) < 0.3 * (1 - (_X - 0.3) / 0.6))] = _FLAG


def _paint_player(canvas: _Canvas, x: float) -> None:
    canvas[_disc(x, 0.76, 0.42, 0.1)] = _SEAM
    canvas[_disc(x - 0.17, 0.72, 0.13, 0.08) | _disc(x + 0.17, 0.72, 0.13, 0.08)] = _DARK
    canvas[_disc(x, 0.36, 0.38, 0.38)] = _COAT
    _paint_head(canvas, x, -0.28)


def _paint_swimmer(canvas: _Canvas) -> None:
    canvas[_disc(0, 0.24, 0.52, 0.16)] = _RIPPLE
    canvas[_disc(0, 0.24, 0.44, 0.11)] = _WATER
    _paint_head(canvas, 0, 0.0, water_line=0.2)


def _paint_head(canvas: _Canvas, x: float, y: float, water_line: float = 1.0) -> None:
    dry = water_line > _Y
    canvas[_disc(x, y, 0.36, 0.36) & dry] = _COAT
    canvas[_disc(x, y + 0.05, 0.26, 0.26) & dry] = _SKIN
    canvas[(_disc(x - 0.1, y, 0.045, 0.06) | _disc(x + 0.1, y, 0.045, 0.06)) & dry] = _DARK


def _disc(x: float, y: float, across: float, down: float) -> _Mask:
    """The points inside an ellipse around (x, y)."""
    inside: _Mask = ((_X - x) / across) ** 2 + ((_Y - y) / down) ** 2 < 1
    return inside
