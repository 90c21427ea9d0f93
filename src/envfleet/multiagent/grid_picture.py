"""The grid world as a picture and as text. y is upwards in both, as for the agents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from envfleet.multiagent.grid_agents import (
    AGENT,
    CLOUD,
    EMPTY,
    OBSTACLE,
    TARGET,
    UNSEEN,
    Cell,
    ObserverAgent,
)
from envfleet.multiagent.grid_rules import GridState

Picture = npt.NDArray[np.uint8]
Shape = npt.NDArray[np.bool_]
Colour = Sequence[int]

_SIDE_PIXELS, _LEAST_CELL_PIXELS = 512, 12
_GROUND, _LINE, _WALL, _CLOUD_COLOUR = (30, 30, 30), (60, 60, 60), (110, 110, 110), (120, 170, 210)
_NOTICED = (255, 255, 0)
_LETTERS = {EMPTY: ".", OBSTACLE: "#", AGENT: "a", TARGET: "*", CLOUD: "~", UNSEEN: " "}


def grid_picture(state: GridState, *, show_views: bool) -> Picture:
    """The world from above, [row, column, colour], about 512 pixels wide."""
    size, agents = state.rules.size, state.rules.agents
    pixels = max(_SIDE_PIXELS // size, _LEAST_CELL_PIXELS)
    canvas = np.empty((size * pixels, size * pixels, 3), np.uint8)  # [x, y] until it is turned
    canvas[...] = _GROUND
    for covered, colour in ((state.is_blocked, _WALL), (state.is_clouded, _CLOUD_COLOUR)):
        cells = np.kron(covered, np.ones((pixels, pixels), np.bool_))
        if covered is state.is_clouded:  # striped: what lies beneath can be seen by the viewer
            across = np.add.outer(np.arange(size * pixels), np.arange(size * pixels))
            cells &= across % 8 < 4
        canvas[cells] = colour
    canvas[::pixels] = canvas[:, ::pixels] = _LINE
    # each shape in a square of coordinates from -1 to 1
    along = (np.arange(pixels) + 0.5) / pixels * 2 - 1
    x, y = along[:, None], along[None, :]
    triangle = (np.abs(x) < (0.6 - y) / 2) & (np.abs(y) < 0.6)
    circle, square = x**2 + y**2 < 0.45, np.maximum(np.abs(x), np.abs(y)) < 0.5
    dot = x**2 + (y - 0.8) ** 2 < 0.03
    is_seen = False
    for index, (agent, place) in enumerate(zip(agents, state.places, strict=True)):
        shape = square if isinstance(agent, ObserverAgent) else circle
        _fill_cell(canvas, place, shape, agent.color)
        if state.sees_target(index):
            _fill_cell(canvas, place, dot, _NOTICED)
        is_seen = is_seen or state.is_seen_by_target(index)
        if show_views:
            width, scale = agent.outline_width, agent.box_scale
            _outline(canvas, place, state.view_radius(index), pixels, width, scale, agent.color)
    target = state.rules.target
    if target is not None and state.target is not None:
        _fill_cell(canvas, state.target, triangle, target.color)
        if is_seen:
            _fill_cell(canvas, state.target, dot, _NOTICED)
        if show_views:
            width, scale, radius = target.outline_width, target.box_scale, target.box_cells // 2
            _outline(canvas, state.target, radius, pixels, width, scale, target.color)
    return np.ascontiguousarray(canvas.transpose(1, 0, 2)[::-1])


def grid_text(state: GridState, *, show_views: bool) -> str:
    """The world as letters: agents by number, * the target, # obstacles, ~ what hides."""
    letters = np.full((state.rules.size,) * 2, _LETTERS[EMPTY])
    letters[state.is_blocked] = _LETTERS[OBSTACLE]
    letters[state.is_clouded] = _LETTERS[CLOUD]
    if state.target is not None:
        letters[state.target] = _LETTERS[TARGET]
    for index, place in enumerate(state.places):
        letters[place] = str((index + 1) % 10)
    parts = [_grid_lines(letters)]
    if show_views:
        for index, agent in enumerate(state.rules.agents):
            view = np.vectorize(_LETTERS.__getitem__)(state.view(index))
            view[agent.side // 2, agent.side // 2] = str((index + 1) % 10)
            parts.append(f"{agent.name} sees\n{_grid_lines(view)}")
    return "\n\n".join(parts) + "\n"


def _grid_lines(letters: npt.NDArray[np.str_]) -> str:
    """[x, y] letters as lines of text, the highest y first."""
    return "\n".join("".join(row) for row in letters.T[::-1])


def _fill_cell(canvas: Picture, place: Cell, shape: Shape, colour: Colour) -> None:
    pixels = len(shape)
    left, low = place[0] * pixels, place[1] * pixels
    canvas[left : left + pixels, low : low + pixels][shape] = colour


def _outline(
    canvas: Picture,
    place: Cell,
    radius: int,
    pixels: int,
    width: int,
    scale: float,
    colour: Colour,
) -> None:
    """A square of `2 * radius + 1` cells around a place, scaled, as far as it is in the picture."""
    half = (radius + 0.5) * pixels * scale
    middle_x, middle_y = ((part + 0.5) * pixels for part in place)
    across, along = np.arange(canvas.shape[0])[:, None], np.arange(canvas.shape[1])[None, :]
    far = np.maximum(np.abs(across + 0.5 - middle_x), np.abs(along + 0.5 - middle_y))
    canvas[(far <= half) & (far > half - width)] = colour
