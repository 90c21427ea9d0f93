"""MetaMathQA: a question in words, with as many tries as the manager allows.

Law: the question of an episode depends on its seed, its mode and the configuration only. All
environments of a process share the questions (questions.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig
from envfleet.llm.environments.questions import (
    ListedQuestions,
    Questions,
    checked_fractions,
    load_questions,
    rows_of_mode,
)
from envfleet.llm.environments.scoring import Scoring, is_right
from envfleet.llm.environments.word_problems import WordProblems
from envfleet.options import check_fields

RIGHT = "Correct!"
WRONG = "Incorrect. Please think again."


@dataclass(slots=True, kw_only=True)
class MetaMathQAConfig(TextEnvConfig):
    """The source of the questions, and how answers are compared."""

    shared: ClassVar[tuple[str, ...]] = ("dataset_path",)

    dataset_path: str | Sequence[Mapping[str, Any]] | None = None
    """A file, a folder made by `save_to_disk`, a hub id, or rows; None: generated word problems."""
    split: str = "train"
    """Which part of a folder or a hub id that has several."""
    cache_dir: str | None = None
    """Where `datasets` keeps what it downloads from a hub."""
    generator_seed: int = 0
    """Which set of word problems is generated."""
    num_problems: int = 100_000
    """How many word problems that set has."""
    scoring: Scoring = "exact"
    """How an answer is compared: exact, numeric or symbolic."""
    split_fractions: Sequence[float] | None = None
    """Shares of the rows for train, val and test; None: every mode draws from all rows."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.action_lookup is not None:
            raise ConfigError("an answer is free text: MetaMathQA has no action_lookup")
        if self.scoring not in get_args(Scoring):
            offered = ", ".join(get_args(Scoring))
            raise ConfigError(f"scoring must be one of {offered}, got {self.scoring!r}")
        if self.dataset_path is not None and not isinstance(
            self.dataset_path, str | ListedQuestions
        ):
            self.dataset_path = ListedQuestions(self.dataset_path)
        if self.split_fractions is not None:
            self.split_fractions = checked_fractions(self.split_fractions)


class MetaMathQAEnv(TextEnv):
    """One question; the episode ends with the right answer.

    The reward is 1 at the first try, and half as much at every further one.
    """

    config_class: ClassVar[type[TextEnvConfig]] = MetaMathQAConfig
    config: MetaMathQAConfig

    correct_answer: str | None = None
    """The answer to this episode's question; None if its row has none."""
    question_index: int | None = None
    """The row of this episode's question."""

    def _prepare(self) -> None:
        """Load the questions, unless this process has loaded them."""
        dataset = self.config.dataset_path
        if isinstance(dataset, str) and Path(dataset).expanduser().exists():
            # An environment may be unpickled in a process with another working directory.
            self.config.dataset_path = str(Path(dataset).expanduser().resolve())
        self._questions()
        self._said = ""
        self._num_tries = 0

    def _questions(self) -> Questions:
        config = self.config
        if config.dataset_path is None:
            return Questions(WordProblems(config.generator_seed, config.num_problems))
        dataset = config.dataset_path
        rows = dataset if isinstance(dataset, str | ListedQuestions) else ListedQuestions(dataset)
        return load_questions(rows, split=config.split, cache_dir=config.cache_dir)

    def _begin(self, seed: int, mode: Mode) -> None:
        questions = self._questions()
        fractions = self.config.split_fractions
        rows = rows_of_mode(
            mode, len(questions), None if fractions is None else checked_fractions(fractions)
        )
        if not rows:
            raise ConfigError(
                f"split_fractions leave no row of {len(questions)} for mode {mode!r}: {fractions}"
            )
        self.question_index = rows[random.Random(seed).randint(0, len(rows) - 1)]
        question = questions[self.question_index]
        self.correct_answer = question.answer
        self._said = question.query
        self._num_tries = 0

    def _act(self, action: Any) -> Step:
        is_answer = isinstance(action, str) and bool(action.strip())
        success = is_answer and is_right(action, self.correct_answer, self.config.scoring)
        reward = math.ldexp(1.0, -self._num_tries) if success else 0.0
        self._num_tries += 1
        self._said = RIGHT if success else WRONG
        info = {
            "action_is_effective": is_answer,
            "action_is_valid": is_answer,
            "success": success,
        }
        return self._said, reward, success, False, info

    def _text(self) -> str:
        return self._said
