"""Questions with their answers, from a file, a dataset or a list, in MetaMathQA's or GSM8K's form.

Law: questions are loaded once per process and are never part of an environment. A row is checked
when it is used; a wrong one is a ConfigError that names file, line and field. A row without an
answer that can be found is still a question, but no response is right.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import Mode
from envfleet.llm.environments.row_files import RowList, file_ending, file_rows
from envfleet.llm.extras import import_extra

QUERY_FIELDS = ("query", "question")
ANSWER_FIELDS = ("answer", "response")
LARGEST_ANSWER = 10**100
"""The largest answer that is a number and not text; Python does not convert very long ones."""
MARKS = ("The answer is: ", "####")

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and its answer if there is one."""

    query: str
    answer: str | None


class Questions:
    """The questions of a list of rows."""

    def __init__(self, rows: RowList) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Question:
        return question_of(self._rows[index], functools.partial(self._rows.place, index))

    @functools.cached_property
    def num_without_answer(self) -> int:
        """How many rows have no answer that can be found; reads all rows, once."""
        return sum(
            question_of(row, functools.partial(self._rows.place, index)).answer is None
            for index, row in enumerate(self._rows)
        )


class ListedQuestions(Sequence[Mapping[str, Any]]):
    """Rows given as a list. `deepcopy` returns the object itself, so that environments share it."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise ConfigError(f"{self.place(index)} is a {type(row).__name__}, not a row of fields")
        return row

    def place(self, index: int) -> str:
        """The name of this row in errors."""
        return f"row {index} of the list"

    def __deepcopy__(self, memo: dict[int, Any]) -> ListedQuestions:
        return self


class DatasetQuestions:
    """Rows of a `datasets.Dataset`, which maps its files into memory."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._dataset[index]
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._dataset)

    def place(self, index: int) -> str:
        """The name of this row in errors."""
        return f"{self._name}, row {index}"


def question_of(row: Mapping[str, Any], place: Callable[[], str] = lambda: "the row") -> Question:
    """The question of a row; `place()` gives its name in errors."""
    query, answer = _field(row, QUERY_FIELDS), _field(row, ANSWER_FIELDS)
    if query is None or answer is None:
        missing = QUERY_FIELDS if query is None else ANSWER_FIELDS
        raise ConfigError(
            f"{place()} has no field {' or '.join(map(repr, missing))}; "
            f"it has {', '.join(map(repr, row)) or 'none'}"
        )
    asked, said = row[query], row[answer]
    if not isinstance(asked, str) or not asked.strip():
        raise ConfigError(f"{place()}: field {query!r} should be text, got {_shown(asked)}")
    is_text = isinstance(said, str | float | None) or (
        isinstance(said, int) and not isinstance(said, bool) and abs(said) < LARGEST_ANSWER
    )
    if not is_text:
        raise ConfigError(f"{place()}: field {answer!r} should be text, got {_shown(said)}")
    if said is None:
        return Question(asked, None)
    return Question(asked, answer_in(str(said), is_bare=answer == "answer"))


def _field(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of these fields that is not None, else the first that is there.

    Rows of joined files have the columns of both.
    """
    there = [name for name in names if name in row]
    return next((name for name in there if row[name] is not None), there[0] if there else None)


def answer_in(text: str, *, is_bare: bool = False) -> str | None:
    """What follows "The answer is: " or "####"; without them the whole text if `is_bare`."""
    for mark in MARKS:
        _, found, answer = text.partition(mark)
        if found:
            return answer.strip() or None
    return (text.strip() or None) if is_bare else None


def _shown(value: Any) -> str:
    return repr(value) if value == "" else f"a {type(value).__name__}"


def rows_of_mode(mode: Mode, num_rows: int, fractions: Sequence[float] | None) -> range:
    """The rows that a mode draws from: all, or its share in the order train, val, test."""
    if fractions is None:
        return range(num_rows)
    part = ("train", "val", "test").index(mode)
    start, stop = (round(num_rows * sum(fractions[:end])) for end in (part, part + 1))
    return range(start, stop)


def checked_fractions(fractions: Sequence[float]) -> tuple[float, float, float]:
    """Three shares that add up to 1, or ConfigError."""
    shares = tuple(map(float, fractions))
    if len(shares) != 3 or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ConfigError(
            "split_fractions must be three shares of train, val and test that add up to 1, "
            f"got {list(fractions)}"
        )
    return shares[0], shares[1], shares[2]


def load_questions(
    dataset: str | ListedQuestions, *, split: str = "train", cache_dir: str | None = None
) -> Questions:
    """The questions of a file, of a folder made by `save_to_disk`, of a hub id, or of a list.

    Args:
        dataset: `.json`, `.jsonl`, `.jsonl.gz`, `.parquet`, a folder, a hub id, or rows.
        split: Which part of a folder or of a hub id that has several.
        cache_dir: Where `datasets` keeps what it downloads.

    Raises:
        ConfigError: There is no such dataset, or it has no rows.
        MissingExtra: It needs a package that is not installed.
    """
    if isinstance(dataset, ListedQuestions):
        questions = Questions(dataset)
    else:
        questions = _loaded(dataset, split, cache_dir)
    if not len(questions):
        raise ConfigError(f"{dataset if isinstance(dataset, str) else 'the list'} holds no rows")
    return questions


@functools.cache
def _loaded(dataset: str, split: str, cache_dir: str | None) -> Questions:
    path = Path(dataset)
    if path.is_dir():
        return Questions(_of_folder(path, split))
    if path.exists():
        return Questions(file_rows(path))
    is_path = path.is_absolute() or dataset.startswith((".", "~")) or file_ending(path) is not None
    if is_path or not _HUB_ID.fullmatch(dataset):
        raise ConfigError(f"there is no file {dataset}")
    datasets = import_extra(
        "datasets",
        wanted_by=f"there is no file {dataset}; to read it from the hub",
        install="pip install datasets",
    )
    try:
        found = datasets.load_dataset(dataset, split=split, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError) as exc:  # no network, no such dataset, no such split
        raise ConfigError(
            f"there is no file {dataset}, and the hub did not give its split {split!r}: "
            f"{' '.join(str(exc).split())}"
        ) from exc
    return Questions(DatasetQuestions(found, f"{dataset} ({split})"))


def _of_folder(path: Path, split: str) -> DatasetQuestions:
    datasets = import_extra(
        "datasets", wanted_by=f"the folder {path}", install="pip install datasets"
    )
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as exc:  # wrong JSON, wrong Arrow files, missing keys, ...
        raise ConfigError(
            f"{path} is no folder made by save_to_disk: {' '.join(str(exc).split())}"
        ) from exc
    if isinstance(found, Mapping):
        if split not in found:
            raise ConfigError(f"{path} has no split {split!r}; it has {', '.join(found)}")
        found = found[split]
    return DatasetQuestions(found, str(path))
