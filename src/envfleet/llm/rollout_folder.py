"""The folder of a rollout with a model.

    run.json        the configuration, the seed, the engine, versions, machine, and the outcome
    journal.jsonl   every turn (journal.py)
    images/         what the model saw, where that is pictures
    report.html     all of it on one page
    .lock           keeps a second process out

Law: the journal is the truth. The page is made from it and from run.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from envfleet.errors import JournalError
from envfleet.llm.export import as_json
from envfleet.llm.inference.options import InferenceOptions, read_options
from envfleet.llm.journal import JOURNAL_FILE
from envfleet.llm.metrics import TAG_COLUMNS
from envfleet.llm.parallel_rollout import ParallelRolloutResult
from envfleet.llm.rollout_options import RolloutOptions
from envfleet.llm.rollout_run import another_rollout
from envfleet.llm.settings import AgentProxy
from envfleet.llm.timeline import timeline_chart
from envfleet.llm.trajectories import Trajectory
from envfleet.observe import facts
from envfleet.observe.jsonl import rewrite
from envfleet.observe.markup import Markup, tag
from envfleet.observe.report import (
    JobPage,
    OptionValue,
    RunRecord,
    render,
    section,
    table,
    tile,
)
from envfleet.runs.lock import LOCK_FILE

RUN_FILE, REPORT_FILE = "run.json", "report.html"
JOB = "rollout"
UNDER_WAY = "is_under_way"
"""In run.json: a process plays, or ended without being able to say so, as after a kill."""
_PACKAGES = ("envfleet", "numpy", "gymnasium", "joblib", "aiohttp", "xllamacpp")
_SAMPLES = 3
"""Trajectories that the page shows."""
_MAY_CHANGE = ("config", "engine", "is_deterministic", "agent_proxy", "llm")
"""Of run.json, when a rollout goes on; `check_config` says which options."""
_FREE = frozenset(
    f"{block}.{name}"
    for block, names in {
        # how to reach what answers, and within which limits
        "llm": "base_url api_key_env max_concurrency request_timeout_s trajectory_timeout_s "
        "max_retries retry_delay_s token_budget time_budget_s threads context_tokens",
        # who plays, and what becomes of failures
        "agent_proxy": "use_parallel_rollout parallel_n_jobs parallel_backend ray_address "
        "rollout_mode on_failure max_attempts",
        "es_manager": "use_multiprocessing max_workers sequential_env_types start_method "
        "step_timeout_s max_restarts",
    }.items()
    for name in names.split()
)
"""Options that may be others when a rollout goes on: no answer, prompt or reward follows from them.
"""
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "llm": (InferenceOptions,),
    "agent_proxy": (AgentProxy, RolloutOptions),
}
_PARTS = ("queue", "prefill", "decode", "env", "transport", "journal")


def new_folder(name: str, seed: int, under: Path = Path("runs")) -> Path:
    """A folder that holds no run yet."""
    stem, number = f"{Path(name).stem}-seed{seed}", 1
    while (folder := under / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


def is_unbegun(folder: Path) -> bool:
    """Whether a rollout was to begin in this folder, or none yet, and nothing was journalled."""
    mine = {LOCK_FILE, RUN_FILE, f".{RUN_FILE}", JOURNAL_FILE}
    if not folder.is_dir() or {one.name for one in folder.iterdir()} - mine:
        return False
    journal = folder / JOURNAL_FILE
    if not journal.exists():
        return True
    with journal.open("rb") as file:
        return not file.readline().endswith(b"\n")


def begin_run(folder: Path, about: Mapping[str, Any]) -> None:
    """Write down what is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_run_file(folder, {"job": JOB, **about, **facts.collect(_PACKAGES)})


def check_config(folder: Path, begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with options that would make it another rollout.

    Raises:
        JournalError: Another option than those that may change is not as it was.
    """
    defaults = {
        f"{block}.{name}": default
        for block, kinds in _OPTIONS.items()
        for name, default in _option_defaults(kinds).items()
    }
    before, after = (
        {**defaults, **dict(_config_leaves(one)), "llm.engine": read_options(one).engine_name}
        for one in (begun, wanted)
    )
    for name in before | after:
        if name not in _FREE and before.get(name) != after.get(name):
            raise another_rollout(folder, name, before.get(name), after.get(name))


def _config_leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings, each with its full name."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _config_leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", as_json(value)


@contextmanager
def under_way(
    folder: Path, about: Mapping[str, Any], *, was_cut_off: bool
) -> Iterator[Callable[[], None]]:
    """Give what notes that a process plays, and with what; the mark goes when the process ends.

    A rollout keeps the rest of what it began with. One whose last process was cut off keeps its
    mark until it is over.
    """
    is_noted, is_over = was_cut_off, False

    def note() -> None:
        nonlocal is_noted
        is_noted = True
        with_what = {name: about[name] for name in _MAY_CHANGE}
        _write_run_file(folder, read_run(folder) | with_what | {UNDER_WAY: True})

    try:
        yield note
        is_over = True
    finally:
        if is_noted and (is_over or not was_cut_off):
            with suppress(OSError, JournalError):  # a full disk: the error under way says more
                ended = read_run(folder)
                _write_run_file(folder, {name: ended[name] for name in ended if name != UNDER_WAY})


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
        JournalError: The folder holds no rollout.
    """
    path = folder / RUN_FILE
    try:
        found = json.loads(path.read_text())
    except OSError as exc:
        raise JournalError(str(path), f"cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise JournalError(str(path), f"is not what envfleet writes: {exc}") from exc
    if not isinstance(found, dict) or found.get("job") != JOB:
        raise JournalError(str(folder), "holds no rollout with a model")
    return found


def end_run(folder: Path, result: ParallelRolloutResult) -> Path:
    """Write down what came of it, and make the page; where that is."""
    outcome = {
        "metrics": result.metrics,
        "tags": [asdict(one) for one in result.tags],
        "timings": asdict(result.timings),
        "failures": result.failures,
        "first_errors": result.first_errors,
        "num_attempts": result.num_attempts,
        "num_masked": result.num_masked,
        "backend": result.backend,
        "num_workers": result.num_workers,
        "plan": list(result.plan),
        "fallback": result.fallback,
        "verdict": result.verdict,
    }
    about, page = read_run(folder), folder / REPORT_FILE
    if "outcome" in about and page.exists() and not result.timings.num_turns:
        return page  # it was over before, and these times are of reading
    about["outcome"] = outcome
    _write_run_file(folder, about)
    rewrite(page, _rollout_page(folder, about, result))
    return page


def _write_run_file(folder: Path, about: Mapping[str, Any]) -> None:
    rewrite(folder / RUN_FILE, json.dumps(about, indent=2) + "\n")


def _rollout_page(folder: Path, about: Mapping[str, Any], result: ParallelRolloutResult) -> str:
    rows = [tag("tr", *(tag("td", cell) for cell in one.cells)) for one in result.tags]
    timings = result.timings
    spent = {name: getattr(timings, f"{name}_s") for name in _PARTS}
    total = sum(spent.values()) or 1.0
    record = RunRecord(
        folder=str(folder),
        name=folder.resolve().name,
        env=f"rollout {about['config_name']}",
        state="finished",
        total_steps=0,
        options={name: _option_values(about[name], kinds) for name, kinds in _OPTIONS.items()},
        incidents=None,
        seconds=timings.wall_s,
        shares={name: seconds / total for name, seconds in spent.items()},
        verdict=result.verdict,
        advice=() if result.fallback is None else (f"Fallback: {result.fallback}",),
        command=about["command"],
        repeats="The same rollout again"
        if about.get("is_deterministic")
        else "The same starts and seeds again, to which this engine may give other answers",
        facts=about,
    )
    earlier = f"; before, {timings.num_earlier} turns" if timings.num_earlier else ""
    tiles = (
        tile("trajectories", str(len(result.trajectories)), f"{result.num_masked} masked"),
        tile("turns", str(timings.num_turns), f"{timings.num_tokens} tokens{earlier}"),
        tile("tokens per second", f"{timings.tokens_per_s:.1f}", about["engine"]),
        tile("failures", str(sum(result.failures.values())), _failures_text(result.failures)),
    )
    sections = (
        section("Results", table(TAG_COLUMNS, rows)),
        *([_failures(result)] if result.failures else []),
        section("Timeline", timeline_chart(result.trajectories), _how_to_trace(folder)),
        section("Conversations", *_samples(result.trajectories), _how_to_view(folder)),
        section("Where it was played", *(tag("p", line) for line in result.plan)),
    )
    return render(record, JobPage("rollout with a model", tiles, sections))


def _option_values(block: Mapping[str, Any], kinds: Sequence[Any]) -> list[OptionValue]:
    """Options with their defaults; one that another library defines has none."""
    defaults = _option_defaults(kinds)
    return [OptionValue(name, value, defaults.get(name, value)) for name, value in block.items()]


def _option_defaults(kinds: Sequence[Any]) -> dict[str, Any]:
    return {one.name: as_json(one.default) for kind in kinds for one in fields(kind)}


def _failures(result: ParallelRolloutResult) -> Markup:
    rows = [
        tag("tr", *(tag("td", cell) for cell in (reason, str(count), result.first_errors[reason])))
        for reason, count in result.failures.items()
    ]
    text = (
        f"{sum(result.failures.values())} of {result.num_attempts} attempts failed; "
        f"{result.num_masked} of {len(result.trajectories)} trajectories are masked."
    )
    return section("Failures", tag("p", text), table(("reason", "attempts", "the first"), rows))


def _samples(trajectories: Sequence[Trajectory]) -> list[Markup]:
    """The first trajectory of a few tags."""
    shown: dict[str, Markup] = {}
    for trajectory in trajectories:
        if trajectory.tag not in shown:
            shown[trajectory.tag] = _conversation(trajectory)
        if len(shown) == _SAMPLES:
            break
    return list(shown.values())


def _conversation(trajectory: Trajectory) -> Markup:
    parts: list[Markup] = []
    for turn in trajectory.turns:
        parts += [tag("pre", f"{one.role}: {one.content}") for one in turn.new_messages]
        parts.append(tag("pre", f"assistant: {turn.prefill}{turn.generation.text}"))
        parts.append(tag("p", f"actions {list(turn.actions)}, reward {turn.reward:g}"))
    title = f"environment {trajectory.env_id} ({trajectory.tag}), reward {trajectory.reward:g}"
    return tag("details", tag("summary", title), *parts)


def _how_to_view(folder: Path) -> Markup:
    return tag("p", f"All of them: envfleet view {folder}")


def _how_to_trace(folder: Path) -> Markup:
    command = f"envfleet export {folder} --form trace --out trace.json"
    return tag("p", f"All of it, for chrome://tracing and ui.perfetto.dev: {command}")


def _failures_text(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in failures.items()) or "none"
