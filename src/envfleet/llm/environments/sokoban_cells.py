"""Sets of a room's cells as integers, with bit row * columns + column for each cell.

A flood fill then takes a few shifts. Law: a wall surrounds the free cells, so that no shift runs
into the next row. A single cell is a set of one.
"""

from __future__ import annotations

from collections.abc import Iterator

UP, DOWN, LEFT, RIGHT = ACTIONS = range(1, 5)
OPPOSITE = {UP: DOWN, DOWN: UP, LEFT: RIGHT, RIGHT: LEFT}


def pullable(free: int, columns: int) -> tuple[int, int, int, int]:
    """Cells next to two free ones in a row: above, below, to the left, to the right."""
    return (
        free << columns & free << 2 * columns,
        free >> columns & free >> 2 * columns,
        free << 1 & free << 2,
        free >> 1 & free >> 2,
    )


def beyond(cell: int, action: int, columns: int) -> int:
    """The next cell in the direction of an action."""
    if action == UP:
        return cell >> columns
    if action == DOWN:
        return cell << columns
    return cell >> 1 if action == LEFT else cell << 1


def flood(start: int, free: int, columns: int) -> list[int]:
    """Cells that can be walked to, by number of steps."""
    layers = []
    layer = start
    while layer:
        layers.append(layer)
        free &= ~layer
        layer = (layer << 1 | layer >> 1 | layer << columns | layer >> columns) & free
    return layers


def shortest_walk(layers: list[int], end: int, columns: int) -> list[int]:
    """Actions of a shortest walk from the first layer to a cell of some layer."""
    num_steps = next(depth for depth, layer in enumerate(layers) if layer & end)
    actions = []
    for layer in reversed(layers[:num_steps]):
        for action, opposite in OPPOSITE.items():
            before = beyond(end, opposite, columns)
            if layer & before:
                actions.append(action)
                end = before
                break
    actions.reverse()
    return actions


def cells_of(cells: int) -> Iterator[int]:
    """The cells of a set, in order."""
    while cells:
        cell = cells & -cells
        yield cell
        cells ^= cell
