"""The state of an environment of MuJoCo: its data and its model, written into the ones it has.

Renderers, wrappers and arrays refer to the data and the model of an environment, so these objects
stay and their contents change.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def has_mujoco_data(env: Any) -> bool:
    """Whether `env` keeps its state in MuJoCo's `data` and `model`."""
    return type(getattr(env, "data", None)).__name__ == "MjData" and hasattr(env, "model")


def write_state(env: Any, kept: Any) -> None:
    """Give `env` the model and the data of `kept`, an MjData."""
    import mujoco

    _write_model(env.model, kept.model)
    if hasattr(mujoco, "mj_copyData"):  # from MuJoCo 3.5 on
        mujoco.mj_copyData(env.data, env.model, kept)
    else:
        _write_data(env.model, env.data, kept)


def _write_model(model: Any, kept: Any) -> None:
    """Give a model the numbers it had: masses, frictions and the like may be drawn anew."""
    _write_arrays(model, kept)
    for name in dir(kept.opt):
        if not name.startswith("_"):
            number = getattr(kept.opt, name)
            if np.any(number != getattr(model.opt, name)):
                setattr(model.opt, name, number)


def _write_data(model: Any, data: Any, kept: Any) -> None:
    """What `mj_copyData` does, for what the next step and the observations depend on."""
    import mujoco

    mujoco.mj_resetData(model, data)
    _write_arrays(data, kept)
    data.time = kept.time
    # Contacts and constraints lie in memory of a size that changes: it is taken up as MuJoCo does,
    # from the same positions, and then given the same numbers.
    for contact in kept.contact:
        mujoco.mj_addContact(model, data, contact)
    mujoco.mj_makeConstraint(model, data)
    _write_arrays(data, kept)


def _write_arrays(target: Any, kept: Any) -> None:
    for name in dir(kept):
        numbers = None if name.startswith("_") else getattr(kept, name)
        if type(numbers) is np.ndarray:
            mine = getattr(target, name)
            if mine.shape == numbers.shape and mine.tobytes() != numbers.tobytes():
                mine[...] = numbers
