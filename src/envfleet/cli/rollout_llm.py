"""``envfleet rollout --policy llm`` and ``--resume``: a language model plays."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envfleet.cli.command import Context, UsageError
from envfleet.cli.llm_arguments import config_of
from envfleet.cli.report import Block, Code, Heading, Report, Text, plural
from envfleet.llm.config import changed_config, plain_config
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.journal import JOURNAL_FILE, damage_told, read_header
from envfleet.llm.parallel_rollout import ParallelRolloutManager, ParallelRolloutResult
from envfleet.llm.play_rules import read_rules
from envfleet.llm.rollout_folder import (
    RUN_FILE,
    UNDER_WAY,
    begin_run,
    check_config,
    end_run,
    is_unbegun,
    new_folder,
    read_run,
    under_way,
)
from envfleet.llm.rollout_options import in_workers
from envfleet.llm.rollout_run import RolloutProgress, check_header, header_of
from envfleet.llm.rollout_tally import RolloutTimings
from envfleet.llm.trajectories import Trajectory
from envfleet.observe.progress import ProgressBar
from envfleet.runs.lock import locked

_SAMPLE_EVERY_S = 20.0
_SAID_EVERY_S = 10.0
_SHOWN_TURNS, _SHOWN_CHARACTERS = 2, 300


def run_llm(
    args: argparse.Namespace,
    context: Context,
    table_of: Callable[..., Block],
    shorten: Callable[[str], list[str]],
) -> Report:
    """Play, or go on with, one rollout."""
    if args.resume is None:
        config, name = plain_config(config_of(args)), args.config_name
        mode = args.mode
        rules = read_rules(config, mode)
        seed = args.seed if args.seed is not None else rules.settings.seed or 0
        folder = args.out or new_folder(name, seed)
        command = _rollout_command(args, name, mode, seed)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder} is a file, and a rollout with a model needs a folder")
        if folder.exists() and not is_unbegun(folder):
            raise UsageError(
                f"--out {folder} is not empty; choose another folder, or go on with the rollout "
                f"in it by --resume {folder}"
            )
    else:
        folder = args.resume
        is_new = is_unbegun(folder)
        if is_new and not (folder / RUN_FILE).exists():
            raise UsageError(
                f"--resume {folder}: nothing was begun there; begin the rollout by --out {folder}"
            )
        about = read_run(folder)
        config, name = changed_config(about["config"], args.changes), about["config_name"]
        mode, seed, command = about["mode"], about["seed"], about["command"]
        if not is_new:
            header = read_header(folder)
            mode, seed = header["mode"], header["seed"]
            check_header(folder, header_of(read_rules(config, mode), seed, header["engine"]))
        check_config(folder, about["config"], config)
    was_cut_off = args.resume is not None and bool(about.get(UNDER_WAY))
    with locked(folder):
        with SharedLLMInferenceManager.from_config(config) as llm:
            proxy, about_llm = config.get("agent_proxy") or {}, config.get("llm") or {}
            asked = {
                "config_name": name,
                "config": config,
                "mode": mode,
                "seed": seed,
                "engine": llm.name,
                "is_deterministic": llm.is_deterministic,
                "agent_proxy": proxy,
                "llm": about_llm,
                "command": command,
            }
            if args.resume is None or is_new:
                begin_run(folder, asked)
            played = _safely_placed(config, args.changes, context) if was_cut_off else config
            with ParallelRolloutManager(played, llm, mode=mode) as manager:
                num_envs = manager.num_trajectories
                context.say(Text(f"{num_envs} trajectories with {llm.name}, kept in {folder}"))
                with context.progress.bar("rollout", num_envs) as bar:
                    watch = _RolloutView(bar, context, shorten)
                    try:
                        with under_way(folder, asked, was_cut_off=was_cut_off) as note:
                            result = manager.rollout(
                                seed, folder=folder, watch=watch, before_play=note
                            )
                    except KeyboardInterrupt:
                        watch.say(
                            Text(f"Every finished turn is kept. Go on with: {_resume(folder)}")
                        )
                        raise
            page = end_run(folder, result)
        return _rollout_report(name, mode, folder, page, llm.name, result, table_of)


def _rollout_command(args: argparse.Namespace, name: str, mode: str, seed: int) -> str:
    words = ["envfleet", "rollout", "--config-name", name, "--policy", "llm"]
    words += ["--mode", mode] if mode != "train" else []
    return shlex.join([*words, "--seed", str(seed), *args.changes])


def _safely_placed(
    config: dict[str, Any], changes: Sequence[str], context: Context
) -> dict[str, Any]:
    """With environments in workers, if the user did not say this time where they are to play."""
    placing = ("agent_proxy.use_parallel_rollout", "agent_proxy.parallel_backend")
    is_told = any(change.lstrip("+~").startswith(placing) for change in changes)
    found = None if is_told else in_workers(config)
    if found is None:
        return config
    context.say(
        Text(
            "The last process could not say how it ended: a kill, or an environment that ends its "
            "process. Environments play in workers now (agent_proxy.parallel_backend=fleet), where "
            "one that does costs its own trajectory only.",
            "warn",
        )
    )
    return found


def _resume(folder: Path) -> str:
    return shlex.join(["envfleet", "rollout", "--resume", str(folder)])


class _RolloutView:
    """Shows how far a rollout has come, and a conversation now and then."""

    def __init__(
        self, bar: ProgressBar, context: Context, shorten: Callable[[str], list[str]]
    ) -> None:
        self._bar, self._context, self._shorten = bar, context, shorten
        self._num_shown = 0
        self._sampled_s = self._said_s = time.monotonic()
        self._told_reasons: set[str] = set()
        self._last_sample: Trajectory | None = None

    def __call__(self, now: RolloutProgress) -> None:
        """Show a state."""
        self._bar.note(told(now))
        self._bar.advance(now.num_final - self._num_shown)
        self._num_shown = now.num_final
        for reason, error in now.first_errors.items():
            if reason not in self._told_reasons:
                self._told_reasons.add(reason)
                self.say(Text(f"An attempt failed ({reason}): {error}", "warn"))
        at_s = time.monotonic()
        if at_s - self._said_s >= _SAID_EVERY_S and not self._context.progress.is_drawn:
            self._said_s = at_s
            left = "" if now.left_s is None else f", about {now.left_s:.0f} s left"
            over = f"{now.num_final} of {now.num_trajectories} trajectories"
            self.say(Text(f"{over}, {told(now)}{left}"))
        is_new = now.sample is not None and now.sample is not self._last_sample
        if is_new and at_s - self._sampled_s >= _SAMPLE_EVERY_S:
            assert now.sample is not None
            self._sampled_s, self._last_sample = at_s, now.sample
            self.say(Code(tuple(sample_conversation(now.sample, self._shorten))))

    def say(self, block: Block) -> None:
        """Show something above the bar."""
        with self._bar.hidden():
            self._context.say(block)


def told(now: RolloutProgress) -> str:
    """What a bar does not show of how far a rollout has come."""
    return (
        f"{now.num_turns} turns, {now.tokens_per_s:.0f} tokens/s, {now.num_in_flight} asked, "
        f"{now.num_queued} queued, {sum(now.failures.values())} failed"
    )


def sample_conversation(trajectory: Trajectory, shorten: Callable[[str], list[str]]) -> list[str]:
    """The first turns of a trajectory, shortened."""
    lines = [f"environment {trajectory.env_id} ({trajectory.tag}), reward {trajectory.reward:.3g}"]
    for turn in trajectory.turns[:_SHOWN_TURNS]:
        lines += [f"  {line}" for line in shorten(turn.state)]
        said = (turn.prefill + turn.generation.text)[:_SHOWN_CHARACTERS]
        lines += [f"  > {line}" for line in shorten(said)]
        lines += [f"  actions {list(turn.actions)}, reward {turn.reward:.3g}"]
    return lines


def _played(timings: RolloutTimings, verdict: str, *, was_over: bool) -> list[Block]:
    """How long it took, and what held it up."""
    earlier = f"; before it was interrupted, {plural(timings.num_earlier, 'turn')}"
    if was_over:
        return [Text(f"Nothing was left to play of {plural(timings.num_earlier, 'turn')}.")]
    text = (
        f"{timings.num_turns} turns and {timings.num_tokens} tokens in {timings.wall_s:.1f} s "
        f"({timings.tokens_per_s:.0f} tokens/s)"
    )
    return [Text(f"{text}{earlier if timings.num_earlier else ''}."), Text(verdict)]


def _rollout_report(
    name: str,
    mode: str,
    folder: Path,
    page: Path,
    engine: str,
    result: ParallelRolloutResult,
    table_of: Callable[..., Block],
) -> Report:
    timings = result.timings
    document: dict[str, Any] = {
        "config": name,
        "mode": mode,
        "policy": "llm",
        "engine": engine,
        "seed": result.seed,
        "folder": str(folder),
        "report": str(page),
        "backend": result.backend,
        "num_workers": result.num_workers,
        "fallback": result.fallback,
        "damaged_lines": list(result.damaged_lines),
        "plan": list(result.plan),
        "num_envs": len(result.trajectories),
        "tags": [asdict(one) for one in result.tags],
        "metrics": result.metrics,
        "failures": result.failures,
        "first_errors": result.first_errors,
        "num_masked": result.num_masked,
        "timings": {key: round(value, 4) for key, value in asdict(timings).items()},
        "verdict": result.verdict,
    }
    blocks: list[Block] = [
        Heading(
            f"{name}, {mode}: {len(result.trajectories)} trajectories, seeds from {result.seed}, "
            f"played by {engine}"
        ),
        table_of(result.tags, result.plan),
        *_played(timings, result.verdict, was_over=not result.num_workers),
    ]
    if result.damaged_lines:
        was = "was" if len(result.damaged_lines) == 1 else "were"
        told_lines = f"{damage_told(result.damaged_lines).capitalize()} of {folder / JOURNAL_FILE}"
        blocks.append(Text(f"{told_lines} {was} damaged; what was lost was played again.", "warn"))
    if result.fallback is not None:
        blocks.append(Text(f"Fallback: {result.fallback}.", "warn"))
    if result.failures:
        counts = ", ".join(f"{reason} {count}" for reason, count in result.failures.items())
        blocks.append(
            Text(f"Failed attempts: {counts}; {result.num_masked} trajectories masked.", "bad")
        )
        if result.num_masked and result.failures.keys() & {"engine", "budget"}:
            blocks.append(Text(f"Those that lacked answers are taken up by: {_resume(folder)}"))
        blocks += [
            Text(f"The first of reason {reason}: {error}", "bad")
            for reason, error in result.first_errors.items()
        ]
    blocks += [
        Text(f"Report: {page}"),
        Text(f"Everything is in {folder}; read the conversations with:"),
        Text(f"  envfleet view {folder}"),
    ]
    return Report(ok=not result.num_masked, document=document, blocks=tuple(blocks))
