"""Maps of frozen lakes: rows of S (start), F (frozen), H (hole) and G (goal).

Law: a generated map has a path from start to goal, and generation ends for every `p`.
"""

from __future__ import annotations

import numpy as np

from envfleet.errors import ConfigError

Lake = tuple[str, ...]
Place = tuple[int, int]
"""Row and column."""

MAX_DRAWS = 100
"""With p 0.8 every second draw has a path. After this many without one, a path is added."""


def random_lake(generator: np.random.Generator, size: int, p: float) -> Lake:
    """A square lake where each tile is frozen with probability `p`, start and goal anywhere."""
    for _ in range(MAX_DRAWS):
        is_safe = generator.random((size, size)) < p
        start = int(generator.integers(size * size))
        goal = int(generator.integers(size * size - 1))
        goal += goal >= start
        is_safe.flat[start] = is_safe.flat[goal] = True
        lake = _written(is_safe, start, goal)
        if has_path(lake):
            return lake
    for row, column in _random_path(generator, divmod(start, size), divmod(goal, size)):
        is_safe[row, column] = True
    return _written(is_safe, start, goal)


def checked_lake(rows: list[str] | tuple[str, ...]) -> Lake:
    """A map that the user gave, or a ConfigError."""
    lake = tuple(str(row) for row in rows)
    tiles = "".join(lake)
    if not tiles or len({len(row) for row in lake}) != 1:
        raise ConfigError(f"desc must be rows of one length, got {list(lake)}")
    wrong = sorted(set(tiles) - set("SFHG"))
    if wrong:
        raise ConfigError(f"desc is made of S, F, H and G, got {', '.join(map(repr, wrong))}")
    if tiles.count("S") != 1:
        raise ConfigError(f"desc needs one start S, got {tiles.count('S')}")
    if not has_path(lake):
        raise ConfigError(f"desc needs a path from S to a goal G: {list(lake)}")
    return lake


def start_of(lake: Lake) -> Place:
    """The start."""
    return next((row, tiles.index("S")) for row, tiles in enumerate(lake) if "S" in tiles)


def has_path(lake: Lake) -> bool:
    """Whether a goal can be reached from the start without a hole."""
    height, width = len(lake), len(lake[0])
    start = start_of(lake)
    seen, to_visit = {start}, [start]
    while to_visit:
        row, column = to_visit.pop()
        if lake[row][column] == "G":
            return True
        for place in ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column)):
            is_inside = 0 <= place[0] < height and 0 <= place[1] < width
            if is_inside and place not in seen and lake[place[0]][place[1]] != "H":
                seen.add(place)
                to_visit.append(place)
    return False


def _written(
    is_safe: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], start: int, goal: int
) -> Lake:
    width = is_safe.shape[1]
    tiles = ["F" if one else "H" for one in is_safe.ravel().tolist()]
    tiles[start], tiles[goal] = "S", "G"
    return tuple("".join(tiles[row : row + width]) for row in range(0, len(tiles), width))


def _random_path(generator: np.random.Generator, start: Place, goal: Place) -> list[Place]:
    """A shortest path from start to goal, turning at random."""
    (row, column), path = start, [start]
    while (row, column) != goal:
        rows_left, columns_left = goal[0] - row, goal[1] - column
        if generator.integers(abs(rows_left) + abs(columns_left)) < abs(rows_left):
            row += 1 if rows_left > 0 else -1
        else:
            column += 1 if columns_left > 0 else -1
        path.append((row, column))
    return path
