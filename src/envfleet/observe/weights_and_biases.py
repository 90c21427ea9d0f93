"""Curves for Weights & Biases: one run, from this process only, that goes on under the same id."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envfleet.errors import MissingExtra
from envfleet.observe.figures import Figures, curves

__all__ = ["WeightsAndBiases", "need"]


def need() -> None:
    """Say what to install if the package is not there."""
    if find_spec("wandb") is None:
        raise MissingExtra("wandb is not installed: pip install 'envfleet[wandb]'")


class WeightsAndBiases:
    """A sink: one run of a project."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        run_id: str,
        config: Mapping[str, Any],
        noted_steps: int = -1,
        patience_s: float = 30.0,
    ) -> None:
        """Begin a run or go on with it; without its service it is kept offline, with a warning.

        Args:
            folder: Its files go to ``wandb`` in there; the run is named after it.
            project: Where the run belongs.
            run_id: The same one goes on with the same run.
            config: What was asked for.
            noted_steps: How far the run had been noted before, if it goes on.
            patience_s: How long the service is waited for before the run is kept offline.
        """
        import wandb

        def begin(mode: Any = None) -> Any:
            return wandb.init(
                project=project,
                dir=folder,
                id=run_id,
                name=folder.name,
                resume="allow",
                config=dict(config),
                mode=mode,
                # "console" would put itself between the program and its terminal
                settings=wandb.Settings(console="off", init_timeout=patience_s),
            )

        try:
            self._run = begin()
        except wandb.errors.Error as exc:
            reason = " ".join(str(exc).split())
            warnings.warn(
                f"Weights & Biases cannot be reached ({reason}); the run is kept offline in "
                f"{folder / 'wandb'}, and `wandb sync` sends it later",
                RuntimeWarning,
                stacklevel=2,
            )
            wandb.teardown()  # its helper process would say that this run is in use
            self._run = begin("offline")
        self._begins_at = max(self._run.starting_step, noted_steps + 1)

    def note(self, env_steps: int, figures: Figures) -> None:
        """Add a point to every curve that there is a number for."""
        # points cannot be taken back there; what a run does again after a kill equals what it did
        # before, so it is not sent a second time
        if env_steps >= self._begins_at:
            self._run.log(curves(figures), step=env_steps)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
