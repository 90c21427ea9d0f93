"""Generated word problems: a seed and a number give a problem with its working and exact answer.

Law: a problem depends on its generator seed and its number only. Each number in the working is a
number of the text, a result of an earlier line, or the 100 of per cent, so that the answer can be
worked out again from the text.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.environments.problems.counting import COUNTING
from envfleet.llm.environments.problems.decimal_numbers import DECIMAL_NUMBERS
from envfleet.llm.environments.problems.fraction_numbers import FRACTION_NUMBERS
from envfleet.llm.environments.problems.measures import MEASURES
from envfleet.llm.environments.problems.story import Draw, NumberKind, Story, Template

TEMPLATES: tuple[tuple[NumberKind, Template], ...] = (
    *(("whole", one) for one in (*COUNTING, *MEASURES)),
    *(("decimal", one) for one in DECIMAL_NUMBERS),
    *(("fraction", one) for one in FRACTION_NUMBERS),
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A problem, its working, and its answer."""

    template: str
    query: str
    working: tuple[str, ...]
    answer: Fraction
    answer_text: str

    def row(self) -> Row:
        """The problem in the form of MetaMathQA's rows."""
        return {
            "type": f"Generated_{self.template}",
            "query": self.query,
            "original_question": self.query,
            "response": "\n".join((*self.working, f"The answer is: {self.answer_text}")),
        }


@dataclass(frozen=True, slots=True)
class WordProblems:
    """A set of generated problems; only its seed and its size are stored."""

    generator_seed: int
    num_problems: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_problems <= sys.maxsize:
            raise ConfigError(
                f"num_problems must be at least 1 and at most {sys.maxsize}, "
                f"got {self.num_problems}"
            )

    def __len__(self) -> int:
        return self.num_problems

    def __getitem__(self, index: int) -> Row:
        return word_problem(self.generator_seed, range(self.num_problems)[index]).row()

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        """The name of this problem in errors."""
        return f"generated problem {index} of seed {self.generator_seed}"


def word_problem(generator_seed: int, index: int) -> WordProblem:
    """The problem of this number."""
    # A seed that is text goes through SHA-512, so neighbouring numbers give unrelated problems.
    draw = Draw(random.Random(f"word problem {generator_seed} {index}"))
    kind, template = draw.one_of(TEMPLATES)
    template(draw, story := Story(kind))
    while not story.is_well_told():
        template(draw, story := Story(kind))
    result, text = story.answer()
    return WordProblem(template.__name__, story.query(), story.working(), result, text)
