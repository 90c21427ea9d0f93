"""Arrays and bytes on disk, mapped so that all processes of a machine share the memory."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def saved(path: Path, values: npt.NDArray[Any]) -> None:
    """Write an array for `mapped`."""
    np.save(path, values, allow_pickle=False)


def mapped(path: Path) -> npt.NDArray[Any]:
    """The array of a .npy file, read-only and loaded page by page."""
    found: npt.NDArray[Any] = np.load(
        path, mmap_mode=None if _is_empty(path) else "r", allow_pickle=False
    )
    # Indexing a plain view takes half the time of numpy's class for mapped files.
    return np.asarray(found)


def bytes_of(path: Path) -> mmap.mmap | bytes:
    """The bytes of a file, loaded page by page."""
    if path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _is_empty(path: Path) -> bool:
    """Whether a .npy file holds no values, and so cannot be mapped."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        shape = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)[0]
    return 0 in shape
