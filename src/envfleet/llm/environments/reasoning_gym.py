"""Tasks of the `reasoning-gym` package: a question in words, scored by the task's own scorer.

Law: some scorers evaluate an answer as Python. They are given plain values and plain arithmetic
only; any other answer scores nothing.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from envfleet.errors import ConfigError, did_you_mean
from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig
from envfleet.llm.environments.config_fields import check_range
from envfleet.llm.environments.questions import checked_fractions, rows_of_mode
from envfleet.llm.environments.safe_answers import (
    has_few_repeats,
    has_long_exponent,
    is_arithmetic,
    is_value_or_words,
)
from envfleet.llm.extras import import_extra
from envfleet.options import check_fields

MAX_ANSWER_CHARS = 10_000

# Found by reading the scorers of version 0.1.25: each of these evaluates the answer.
_EVALUATES_VALUES = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_EVALUATES_ARITHMETIC = frozenset({"countdown", "polynomial_multiplication", "puzzle24"})
# Found by answering every task with 1e9999999 and the like, and with a move 99999999 times.
_MAKES_FRACTIONS = frozenset({"coin_flip"})
_REPEATS_MOVES = frozenset({"rubiks_cube", "rush_hour"})
_SIMPLIFIES = frozenset({"intermediate_integration", "simple_integration"})
# Found by asking each task for twelve questions under two hash seeds.
_FOLLOWS_HASHES = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)


@dataclass(slots=True, kw_only=True)
class ReasoningGymConfig(TextEnvConfig):
    """The task and its settings."""

    task: str = "chain_sum"
    """The name of a dataset of reasoning-gym."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Settings of that dataset, without its seed and size."""
    dataset_seed: int = 0
    """Which set of questions is generated."""
    num_questions: int = 10_000
    """How many questions that set has."""
    max_tries: int = 1
    """How many answers end an episode."""
    split_fractions: Sequence[float] | None = None
    """Shares of train, val and test, by number; None: every mode draws from all questions."""
    trust_answers: bool = False
    """Allow tasks whose scorer runs sympy on an answer, without a time limit."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "num_questions", "max_tries", least=1)
        if taken := sorted({"seed", "size"} & set(self.task_config)):
            raise ConfigError(
                f"task_config cannot hold {' and '.join(taken)}: use dataset_seed, num_questions"
            )
        if self.task in _SIMPLIFIES and not self.trust_answers:
            raise ConfigError(
                f"{self.task} is scored by sympy's simplify on the answer, which may evaluate it "
                "and take any time; set trust_answers=True if you trust the answers"
            )
        if self.task in _FOLLOWS_HASHES and not os.environ.get("PYTHONHASHSEED", "").isdigit():
            raise ConfigError(
                f"the questions of {self.task} follow Python's hash order and differ from process "
                "to process; start Python with PYTHONHASHSEED=0 in the environment to use it"
            )
        if self.split_fractions is not None:
            self.split_fractions = checked_fractions(self.split_fractions)


@functools.cache
def _dataset(task: str, settings: str, seed: int, size: int) -> Any:
    gym = import_extra(
        "reasoning_gym",
        wanted_by="env type reasoning_gym",
        install="pip install 'envfleet[reasoning-gym]'",
    )
    known = import_extra("reasoning_gym.factory", wanted_by="", install="").DATASETS
    if task not in known:
        nearest = did_you_mean(task, known) or f"; it has {', '.join(sorted(known))}"
        raise ConfigError(f"reasoning-gym has no task {task!r}{nearest}")
    try:
        return gym.create_dataset(task, seed=seed, size=size, **json.loads(settings))
    except (AssertionError, TypeError, ValueError) as exc:
        raise ConfigError(f"reasoning-gym refuses the task_config of {task}: {exc}") from exc


class ReasoningGymEnv(TextEnv):
    """One question of a task."""

    config_class: ClassVar[type[TextEnvConfig]] = ReasoningGymConfig
    config: ReasoningGymConfig

    question_index: int | None = None
    """Which question of the set this episode asks."""

    def _prepare(self) -> None:
        """Make the task's dataset, unless this process has made it before."""
        self._questions()
        self._entry: dict[str, Any] | None = None
        self._said = ""
        self._num_tries = 0

    @property
    def correct_answer(self) -> str | None:
        """A correct answer; there may be others."""
        answer: str | None = self._question()["answer"]
        return answer

    def _questions(self) -> Any:
        config = self.config
        settings = json.dumps(config.task_config, sort_keys=True)
        return _dataset(config.task, settings, config.dataset_seed, config.num_questions)

    def _question(self) -> dict[str, Any]:
        if self._entry is None:
            self._entry = dict(self._questions()[self.question_index])
        return self._entry

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entry": None}  # made again from its number when it is needed

    def _begin(self, seed: int, mode: Mode) -> None:
        config = self.config
        rows = rows_of_mode(mode, config.num_questions, config.split_fractions)
        if not rows:
            raise ConfigError(f"split_fractions leave no question for mode {mode!r}")
        index = rows[random.Random(seed).randint(0, len(rows) - 1)]
        if index != self.question_index:  # some tasks take a second for a question
            self.question_index, self._entry = index, None
        self._said = self._question()["question"]
        self._num_tries = 0

    def _act(self, action: Any) -> Step:
        answer = action.strip() if isinstance(action, str) else ""
        score = self._score(answer)
        self._num_tries += 1
        success = score is not None and score >= 1
        reward = score or 0.0
        self._said = "Correct!" if success else f"Your answer scores {reward:.3g} of 1."
        info = {
            "action_is_effective": reward > 0,
            "action_is_valid": score is not None,
            "success": success,
        }
        is_over = success or self._num_tries >= self.config.max_tries
        return self._said, reward, is_over, False, info

    def _score(self, answer: str) -> float | None:
        """The score of an answer; None if the scorer does not get the answer, or fails on it."""
        task = self.config.task
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return None
        if task in _EVALUATES_VALUES and not is_value_or_words(answer):
            return None
        if task in _EVALUATES_ARITHMETIC and not is_arithmetic(answer):
            return None
        if task in _MAKES_FRACTIONS and has_long_exponent(answer):
            return None
        if task in _REPEATS_MOVES and not has_few_repeats(answer):
            return None
        try:
            score = float(self._questions().score_answer(answer, self._question()))
        except Exception:  # scorers raise anything on text that they did not expect
            return None
        return score if math.isfinite(score) else None

    def _text(self) -> str:
        return self._said
