"""Countdown: make the target from the numbers, each used once, by + - * / and parentheses.

Law: an episode plays the row with number `seed % number of rows`, of the file or, without one, of
the generated rows. An answer is parsed by `arithmetic.py`, never evaluated as code.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from envfleet.errors import ConfigError
from envfleet.llm.environments.arithmetic import ArithmeticResult, read_arithmetic
from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig
from envfleet.llm.environments.config_fields import check_range
from envfleet.llm.environments.countdown_rows import (
    MAX_NUMBERS,
    Row,
    RowTable,
    generated_row,
    rows_of_file,
)
from envfleet.options import check_fields

NEAR_ENOUGH = Fraction(1, 10**5)


@dataclass(slots=True, kw_only=True)
class CountdownConfig(TextEnvConfig):
    """The source of the rows, and the rewards."""

    path: str | None = None
    """A .jsonl, .json or .parquet file of rows {target, nums}; None generates rows."""
    max_instances: int = 20_000
    """How many rows are read at most, before the filter; without a file, how many there are."""
    is_plus_minus_only: bool = True
    """Whether rows of a file that + and - alone cannot solve are left out; generated ones can."""
    dataset_seed: int = 0
    """Which set of rows is generated."""
    num_numbers: tuple[int, ...] = (3, 4)
    """How many numbers a generated row has: one of these."""
    score: float = 1.0
    format_score: float = 0.1
    """For an answer that uses exactly the numbers but misses the target."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.num_numbers = tuple(self.num_numbers)
        if self.path is not None and Path(self.path).expanduser().exists():
            # The working directory may change before an episode begins.
            self.path = str(Path(self.path).expanduser().resolve())
        if self.action_lookup is not None:
            raise ConfigError("an answer is free text: Countdown has no action_lookup")
        check_range(self, "max_instances", least=1)
        check_range(self, "dataset_seed", least=0)
        if not self.num_numbers or not all(2 <= n <= MAX_NUMBERS for n in self.num_numbers):
            raise ConfigError(
                f"num_numbers must be counts from 2 to {MAX_NUMBERS}, got {self.num_numbers}"
            )

    def action_grammar(self) -> str:
        """An expression."""
        return "[0-9(] [-0-9+*/() ]{0,40}"


class CountdownEnv(TextEnv):
    """An action is a line of arithmetic; any answer ends the episode."""

    config_class: ClassVar[type[TextEnvConfig]] = CountdownConfig
    config: CountdownConfig

    def _prepare(self) -> None:
        # A file that cannot be used is an error now, before any worker is started.
        self._table()
        self._target = 0
        self._nums: tuple[int, ...] = ()
        self._seen = ""

    def _begin(self, seed: int, mode: Mode) -> None:
        self._target, self._nums = self._row(seed)
        self._seen = f"Target: {self._target}, nums: {list(self._nums)}"

    def _act(self, action: Any) -> Step:
        answer = read_arithmetic(action) if isinstance(action, str) else None
        uses_exactly, is_right = check_answer(answer, self._target, self._nums)
        worth = self.config.score if is_right else self.config.format_score
        reward = float(worth) if uses_exactly else 0.0
        self._seen = f"Your answer get {reward} points."
        info = {
            "action_is_effective": uses_exactly,
            "action_is_valid": answer is not None,
            "success": is_right,
        }
        return self._seen, reward, True, False, info

    def _text(self) -> str:
        return self._seen

    def _row(self, seed: int) -> Row:
        table = self._table()
        if table is not None:
            return table[seed % len(table)]
        config = self.config
        index = seed % config.max_instances
        return generated_row(config.dataset_seed, index, config.num_numbers)

    def _table(self) -> RowTable | None:
        # Looked up each time: an attribute would be pickled with every environment.
        config = self.config
        if config.path is None:
            return None
        return rows_of_file(config.path, config.max_instances, config.is_plus_minus_only)


def check_answer(
    answer: ArithmeticResult | None, target: int, nums: tuple[int, ...]
) -> tuple[bool, bool]:
    """Whether the answer uses exactly the numbers, and whether it is right as well."""
    if answer is None or sorted(answer.numbers) != sorted(nums):
        return False, False
    return True, abs(answer.value - target) < NEAR_ENOUGH
