"""Countdown's rows: generated one by one, or read from a file once per process.

Law: a generated row depends on its dataset seed and its index only, and + and - alone solve it. A
file is read again only if it changed; all environments of a process share its rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import closing
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from envfleet.errors import ConfigError
from envfleet.llm.environments.row_files import file_rows

Row = tuple[int, tuple[int, ...]]
"""The target and the numbers."""

MAX_NUMBERS = 12
"""The most numbers in a row: all combinations of their signs are tried."""
LARGEST_NUMBER = 99
LARGEST_TARGET = 99


class RowTable:
    """Many rows in three arrays, about 50 bytes each."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._targets = array("q")
        self._nums = array("q")
        self._ends = array("q")
        for target, nums in rows:
            self._targets.append(target)
            self._nums.extend(nums)
            self._ends.append(len(self._nums))

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self._ends[index - 1] if index else 0
        return self._targets[index], tuple(self._nums[start : self._ends[index]])


def generated_row(dataset_seed: int, index: int, num_numbers: tuple[int, ...]) -> Row:
    """Row `index` of the endless list with this seed."""
    generator = np.random.Generator(np.random.PCG64([dataset_seed, index]))
    size = num_numbers[int(generator.integers(len(num_numbers)))]
    # About one draw in four has a target in range, for any size.
    while True:
        nums = generator.integers(1, LARGEST_NUMBER + 1, size)
        signs = 2 * generator.integers(0, 2, size) - 1
        target = int(nums @ signs)
        if 1 <= target <= LARGEST_TARGET:
            return target, tuple(nums.tolist())


def plus_minus_solves(row: Row) -> bool:
    """Whether the target is a sum of all the numbers, each with a plus or a minus."""
    target, nums = row
    sums = {0}
    for number in nums:
        sums = {one + signed for one in sums for signed in (number, -number)}
    return target in sums


def rows_of_file(path: str, max_rows: int, is_plus_minus_only: bool) -> RowTable:
    """The first `max_rows` rows of the file, or those of them that + and - alone solve."""
    try:
        whole = Path(path).expanduser().resolve(strict=True)
        state = whole.stat()
    except OSError as exc:
        raise ConfigError(f"Countdown's rows {path} cannot be read: {exc.strerror}") from exc
    return _read_table(str(whole), state.st_mtime_ns, state.st_size, max_rows, is_plus_minus_only)


# The time and the size are part of the cache key.
@lru_cache(maxsize=8)
def _read_table(
    path: str, mtime_ns: int, size_bytes: int, max_rows: int, is_plus_minus_only: bool
) -> RowTable:
    with closing(iter(file_rows(Path(path), ["target", "nums"]))) as found:
        records = enumerate(islice(found, max_rows), start=1)
        rows = (_checked(record, path, number) for number, record in records)
        table = RowTable(row for row in rows if not is_plus_minus_only or plus_minus_solves(row))
    if not len(table):
        why = " that + and - alone solve" if is_plus_minus_only else ""
        raise ConfigError(f"{path} has no rows{why} among its first {max_rows}")
    return table


def _checked(record: Any, path: str, number: int) -> Row:
    if isinstance(record, dict):
        target, nums = record.get("target"), record.get("nums")
        if _is_whole(target) and _are_nums(nums):
            return target, tuple(nums)
    raise ConfigError(
        f"row {number} of {path} must have a whole number as target and 1 to {MAX_NUMBERS} whole "
        f"numbers of at least 0 as nums, got {str(record)[:200]}"
    )


def _are_nums(value: Any) -> TypeGuard[list[int]]:
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_NUMBERS
    return is_list and all(_is_whole(one) and one >= 0 for one in value)


def _is_whole(value: Any) -> TypeGuard[int]:
    return type(value) is int and -(2**63) <= value < 2**63
