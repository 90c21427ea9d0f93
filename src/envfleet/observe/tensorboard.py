"""Curves for TensorBoard, written without a thread and without losing what a kill would cut off.

TensorBoard's own writer hands events to a thread that writes them when it finds time. Here every
note is in the file when it returns, and no thread is there when workers are forked.
"""

from __future__ import annotations

import io
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envfleet.observe.append import append
from envfleet.observe.figures import Figures, curves

__all__ = ["TensorBoard", "is_installed"]

_PREFIX = "events.out.tfevents."


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("tensorboard") is not None


class TensorBoard:
    """A sink: one event file of its own in a folder that may hold earlier ones of the same run."""

    def __init__(self, folder: Path, start_steps: int = 0) -> None:
        """Begin a file.

        Args:
            folder: What ``tensorboard --logdir`` is pointed at, or a folder in it.
            start_steps: Where the run goes on; later points of earlier files are taken back.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # readers take files in the order of their names
        number = len(list(folder.glob(f"{_PREFIX}*")))
        self._path = folder / f"{_PREFIX}{int(time.time()):010d}.{number:04d}"
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(
            Event(
                wall_time=time.time(),
                step=start_steps + 1,
                session_log=SessionLog(status=SessionLog.START),
            )
        )

    def note(self, env_steps: int, figures: Figures) -> None:
        """Add a point to every curve that there is a number for."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in curves(figures).items()
        ]
        self._write(Event(wall_time=time.time(), step=env_steps, summary=Summary(value=values)))

    def close(self) -> None:
        """Nothing is held back."""

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        append(self._path, record.getvalue())
