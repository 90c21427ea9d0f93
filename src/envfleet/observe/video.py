"""A video of one episode, from an environment of its own in this process.

The frames go through a pipe to ffmpeg, which ``imageio-ffmpeg`` brings along; a video that is cut
short by an error leaves no file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from envfleet.errors import MissingExtra, VideoError

__all__ = ["MAX_FRAMES", "FilmedEpisode", "need", "record"]

MAX_FRAMES = 3_000
"""Longest a video may be: an episode may have no end."""

Act = Callable[[Any, Mapping[str, Any]], Any]
"""From one observation and its info to one action."""

_DEFAULT_FPS = 30
_ENCODING_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class FilmedEpisode:
    """What was recorded."""

    path: Path
    frames: int
    episode_return: float
    is_whole: bool
    """False if the episode was longer than a video may be."""


def need() -> None:
    """Say what to install if the package is not there."""
    if find_spec("imageio_ffmpeg") is None:
        raise MissingExtra("imageio-ffmpeg is not installed: pip install 'envfleet[video]'")


def record(
    act: Act,
    env_fn: Callable[[], gymnasium.Env[Any, Any]],
    path: Path,
    *,
    seed: int | None = None,
    max_frames: int = MAX_FRAMES,
) -> FilmedEpisode:
    """Play one episode and keep what it looks like.

    Args:
        act: How to act in this episode.
        env_fn: Builds the environment with ``render_mode="rgb_array"``.
        path: Where the video goes, an ``.mp4``; folders on the way are made.
        seed: Of the reset.
        max_frames: The episode is left after so many steps.

    Raises:
        VideoError: The environment cannot be rendered here, or the video not be written.
        MissingExtra: The package that writes videos is not installed.
    """
    need()
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    was_drawn = False

    def drawn() -> None:
        nonlocal was_drawn
        was_drawn = True

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # renderers warn of screens they do not find; whether it works is seen by the frames
        with warnings.catch_warnings(), _no_window():
            warnings.simplefilter("ignore")
            with closing(env_fn()) as env:
                frames, total, is_whole = _play(act, env, unfinished, seed, max_frames, drawn)
        if _written(unfinished) != frames:
            raise OSError("it could not be written completely; is the disk full?")
        unfinished.replace(path)
    except Exception as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise VideoError(str(path), reason, was_drawn) from exc
    finally:
        unfinished.unlink(missing_ok=True)
    return FilmedEpisode(path, frames, total, is_whole)


@contextmanager
def _no_window() -> Iterator[None]:
    """Keep pygame, which draws into memory here, from complaining that it finds no screen."""
    if {"SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        yield
        return
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    try:
        yield
    finally:
        del os.environ["SDL_VIDEODRIVER"]


def _play(
    act: Act,
    env: gymnasium.Env[Any, Any],
    path: Path,
    seed: int | None,
    max_frames: int,
    drawn: Callable[[], None],
) -> tuple[int, float, bool]:
    modes = list(env.metadata.get("render_modes") or [])
    if env.render_mode != "rgb_array" or "rgb_array" not in modes:
        raise ValueError(f"the environment's render modes are {modes}")
    obs, info = env.reset(seed=seed)
    first = _frame(env)
    frames, total, is_over = 1, 0.0, False
    with closing(_Encoder(path, first, env.metadata.get("render_fps"))) as encoder:
        encoder.add(first)
        drawn()
        while not is_over and frames < max_frames:
            obs, reward, terminated, truncated, info = env.step(act(obs, info))
            encoder.add(_frame(env))
            frames, total, is_over = frames + 1, total + float(reward), terminated or truncated
    return frames, total, is_over


def _frame(env: gymnasium.Env[Any, Any]) -> npt.NDArray[np.uint8]:
    """What the environment looks like; the codec wants even sides."""
    drawn: Any = env.render()
    if not isinstance(drawn, np.ndarray) or drawn.ndim != 3 or drawn.shape[2] != 3:
        raise TypeError(f"render() gave {type(drawn).__name__} instead of rows of pixels")
    height, width, _ = drawn.shape
    padded = np.pad(drawn, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(padded, np.uint8)


class _Encoder:
    """ffmpeg with a pipe in front of it."""

    def __init__(self, path: Path, first: npt.NDArray[np.uint8], fps: float | None) -> None:
        import imageio_ffmpeg

        height, width, _ = first.shape
        self._pipe = imageio_ffmpeg.write_frames(
            path,
            (width, height),
            fps=fps or _DEFAULT_FPS,
            macro_block_size=2,
            ffmpeg_log_level="error",
            ffmpeg_timeout=_ENCODING_TIMEOUT_S,
            # the index in front, so that a browser plays it while it loads
            output_params=["-movflags", "+faststart"],
        )
        self._pipe.send(None)

    def add(self, frame: npt.NDArray[np.uint8]) -> None:
        self._pipe.send(frame)

    def close(self) -> None:
        self._pipe.close()


def _written(path: Path) -> int:
    """How many frames are in a file; ffmpeg ends without a word when the disk is full."""
    import imageio_ffmpeg

    frames, _ = imageio_ffmpeg.count_frames_and_secs(path)
    return int(frames)
