"""Exports on disk.

Law: the file that was there stays until the new one is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from envfleet.errors import ConfigError
from envfleet.llm.export.advantages import Normalisation, is_trained_on
from envfleet.llm.export.conversations import chat_row, ragen_cache
from envfleet.llm.export.json_values import as_json, as_json_line
from envfleet.llm.export.rows import training_rows
from envfleet.llm.extras import import_extra
from envfleet.llm.timeline import chrome_trace
from envfleet.llm.trajectories import Trajectory

Form = Literal["openai", "ragen", "rows", "parquet", "datasets"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    num_rows: int
    num_trajectories: int
    """How many trajectories the rows are of."""
    num_left_out: int
    """Trajectories that are not in it: masked, not over, or without an answer."""
    num_cut: int = 0
    """Rows that begin in mid-conversation: a prompt did not begin with the tokens so far."""
    num_untold: int = 0
    """Turns that are not in it, because the engine could not report all tokens of the answer."""


def write_export(
    trajectories: Sequence[Trajectory],
    form: Form,
    path: Path,
    *,
    advantage: Normalisation = "mean_std",
) -> Exported:
    """Write trajectories in one of the forms.

    Args:
        trajectories: Of a whole rollout.
        form: "openai" and "ragen" are lines of JSON, one per trajectory; "rows" are lines of JSON
            with tokens for trainers, "parquet" and "datasets" hold the same rows as a table
            ("datasets" is a folder that `datasets.load_from_disk` reads).
        path: The file, or the folder, which must not exist.
        advantage: How the advantages in rows are normalised.

    Raises:
        ConfigError: The form needs tokens and the engine reported none, or the path is no use.
        MissingExtra: The form needs a package.
    """
    if form == "openai":
        told = [one for one in trajectories if one.turns]
        _write_lines(path, map(chat_row, told))
    elif form == "ragen":
        told = list(trajectories)
        _write_lines(path, map(ragen_cache, told))
    elif form in FORMS:
        rows = training_rows(trajectories, advantage)
        _WRITERS[form](path, rows)
        trained_on = [one for one in trajectories if is_trained_on(one)]
        num_told = len(trained_on)
        num_untold = sum(len(one.turns) for one in trained_on) - sum(
            row["num_turns"] for row in rows
        )
        num_cut = sum(row["first_turn"] > 0 for row in rows)
        return Exported(
            path, len(rows), num_told, len(trajectories) - num_told, num_cut, num_untold
        )
    else:
        raise ConfigError(f"the form is one of {', '.join(FORMS)}, not {form!r}")
    return Exported(path, len(told), len(told), len(trajectories) - len(told))


def write_trace(trajectories: Sequence[Trajectory], path: Path) -> Exported:
    """Write where the time went, for chrome://tracing and Perfetto; a row is an event."""
    trace = chrome_trace(trajectories)
    with _complete(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        json.dump(as_json(trace), file, allow_nan=False)
    return Exported(path, len(trace["traceEvents"]), len(trajectories), 0)


def _write_lines(path: Path, rows: Iterable[Any]) -> None:
    with _complete(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines(as_json_line(row) + "\n" for row in rows)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """As lines of JSON; every value is plain already, so that long lists are written fast."""
    with _complete(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        try:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        except ValueError as exc:
            raise ConfigError(
                "a reward or a log-probability is infinite or NaN, which JSON cannot hold; take "
                "the form parquet"
            ) from exc


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = _arrow_table(rows, "the form parquet")
    parquet = import_extra("pyarrow.parquet", wanted_by="the form parquet", install=_INSTALL_ARROW)
    with _complete(path) as unfinished:
        parquet.write_table(table, unfinished)


def _write_dataset(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    datasets = import_extra(
        "datasets", wanted_by="the form datasets", install="pip install 'envfleet[datasets]'"
    )
    if path.exists():
        raise ConfigError(f"{path} exists already; a dataset is written into a folder of its own")
    table = _arrow_table(rows, "the form datasets")
    had_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with _complete(path) as unfinished:
            datasets.Dataset(table).save_to_disk(unfinished)
    finally:
        if had_bars:
            datasets.enable_progress_bars()


_WRITERS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], None]] = {
    "rows": _write_rows,
    "parquet": _write_parquet,
    "datasets": _write_dataset,
}
_INSTALL_ARROW = "pip install 'envfleet[parquet]'"


def _arrow_table(rows: Sequence[dict[str, Any]], wanted_by: str) -> Any:
    """The rows as an Arrow table, of the same types for any rows and for none."""
    arrow = import_extra("pyarrow", wanted_by=wanted_by, install=_INSTALL_ARROW)
    kinds = {
        "input_ids": arrow.list_(arrow.int32()),
        "completion_mask": arrow.list_(arrow.int8()),
        "old_log_probs": arrow.list_(arrow.float64()),
        "advantage": arrow.float64(),
        "model_version": arrow.string(),
        "group_id": arrow.int64(),
        "env_id": arrow.int64(),
        "attempt": arrow.int64(),
        "tag": arrow.string(),
        "first_turn": arrow.int64(),
        "num_turns": arrow.int64(),
        "reward": arrow.float64(),
    }
    return arrow.Table.from_pylist(list(rows), schema=arrow.schema(list(kinds.items())))


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A place beside `path` that takes its name once all is written, and is gone if it fails."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        _remove(unfinished)
        yield unfinished
        unfinished.replace(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc
    finally:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            _remove(unfinished)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
