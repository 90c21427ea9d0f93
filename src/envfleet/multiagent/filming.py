"""A game as a video, played in this process with the environment's own pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.multiagent.agent_records import AgentLayout
from envfleet.multiagent.games import OPENING, Player, Seating
from envfleet.multiagent.slot_envs import TurnSlot, build_slot
from envfleet.observe import video


def film_game(
    env_fn: Callable[[], Any],
    players: Sequence[Player],
    seating: Seating,
    path: Path,
    *,
    seed: int,
    opening: int = OPENING,
) -> video.FilmedEpisode:
    """Play one game and keep what it looks like.

    Args:
        env_fn: Builds the AEC environment with ``render_mode="rgb_array"``.
        players: Who plays.
        seating: Which player plays which agent.
        path: Where the video goes, an ``.mp4``.
        seed: Of the environment and of draws.
        opening: So many turns at the start are drawn.

    Raises:
        VideoError: The environment cannot be rendered here, or the video not be written.
        MissingExtra: The package that writes videos is not installed.
    """
    for number, player in enumerate(players):
        player.begin(1, seed + number)
    layout: AgentLayout | None = None
    turn = 0

    def build() -> TurnSlot:
        nonlocal layout
        slot = build_slot(TurnSlot, env_fn, None, None)
        assert isinstance(slot, TurnSlot)
        assert isinstance(slot.layout, AgentLayout)
        layout = slot.layout
        return slot

    def act(record: Any, info: Mapping[str, Any]) -> Any:
        nonlocal turn
        assert layout is not None
        number = int(record["turn"])
        name = layout.agents[number]
        group, place = layout.places[name]
        rows = record[np.newaxis]
        masks = layout.masks(rows, group)
        is_drawn = np.array([turn < opening])
        turn += 1
        move = players[seating[number]].choose(
            name,
            np.zeros(1, np.intp),
            _of(layout.observations(rows, group), place),
            None if masks is None else masks[:, place],
            is_drawn,
        )[0]
        if layout.shared_action_space is not None:
            return move
        action = np.zeros(1, layout.action_space.dtype)
        layout.put_turn_action(action, name, move)
        return action[0]

    return video.record(act, partial(build), path, seed=seed)


def _of(tree: Any, place: int) -> Any:
    """Of each row the part of one agent."""
    if isinstance(tree, dict):
        return {key: _of(part, place) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_of(part, place) for part in tree)
    return tree[:, place]
