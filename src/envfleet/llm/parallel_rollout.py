"""`ParallelRolloutManager`: rollouts with a model, wherever environments live.

    tasks ─► Play, here or in workers ─► begin, turn, end ─► journal, tally
      ▲───────────── FailurePolicy: further attempts ◄────────┘

Laws: with a deterministic engine or a cassette, trajectories and metrics are the same for every
backend and every number of workers, also if something was lost on the way. What a backend has
played before it failed is kept, and the next one goes on from there. Environments last from one
rollout to the next.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Self

from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError, EnvfleetError, FleetClosed
from envfleet.llm.joblib_workers import JoblibWorkers, end_idle_workers
from envfleet.llm.journal import Journal, damage_told
from envfleet.llm.metrics import TagSummary
from envfleet.llm.play import Play
from envfleet.llm.play_rules import PlayRules, TrajectoryTask, read_rules, write_image
from envfleet.llm.prompts import WritePrompt
from envfleet.llm.rollout_options import JOBLIB_BACKENDS, RewardFunction
from envfleet.llm.rollout_run import RolloutProgress, RolloutRun, check_header, header_of
from envfleet.llm.rollout_tally import RolloutTimings, rollout_verdict
from envfleet.llm.seats import EnvSeats
from envfleet.llm.settings import UseMultiprocessing
from envfleet.llm.trajectories import Trajectory
from envfleet.llm.work_share import WorkShare
from envfleet.llm.worker_round import RolloutWorkers, WorkerRound, WorkersLost

_LEAST_LIVE = 64
"""How many trajectories are played at once at least."""
_MOST_WORKERS = 8
_log = logging.getLogger("envfleet.llm.rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRolloutResult:
    """A finished rollout."""

    trajectories: Sequence[Trajectory]
    """One of each environment, in their order; read from the journal if there is one."""
    metrics: dict[str, float]
    """The mean of every metric over the environments of its tag."""
    tags: tuple[TagSummary, ...]
    timings: RolloutTimings
    failures: dict[str, int]
    """Attempts that failed, by reason."""
    first_errors: dict[str, str]
    """What the first of them said, by reason."""
    num_attempts: int
    num_masked: int
    backend: str
    """What played it in the end."""
    num_workers: int
    plan: tuple[str, ...]
    """Where each tag was played and why."""
    fallback: str | None
    """Why another backend than the one asked for had to go on; None if none had to."""
    damaged_lines: tuple[int, ...]
    """Lines of the journal, from 1, that were damaged; what was lost was played again."""
    verdict: str
    seed: int
    folder: Path | None


class ParallelRolloutManager:
    """Plays rollouts with one model; its environments last until `close`."""

    def __init__(
        self,
        config: Any,
        llm: Any,
        *,
        mode: str = "train",
        write_prompt: WritePrompt | None = None,
        reward_functions: Sequence[RewardFunction] = (),
    ) -> None:
        """Read the configuration.

        Args:
            config: A mapping, an OmegaConf object, or the name or path of a YAML file.
            llm: A `SharedLLMInferenceManager`.
            mode: "train" or "val": which block of `es_manager` to use.
            write_prompt: Writes the messages, in place of those of RAGEN.
            reward_functions: More rewards for finished trajectories.
        """
        self._rules = read_rules(config, mode, write=write_prompt, rewards=reward_functions)
        self.llm = llm
        self._seats: EnvSeats | None = None
        self._seats_for: tuple[Any, ...] = ()
        self._cluster: Any = None
        """The connection to a Ray cluster, made when it is needed."""
        self._num_rollouts = 0
        self._is_closed = False
        groups = self._rules.settings.groups
        self._group_tags = [tag.name for tag, count in groups for _ in range(count)]

    @property
    def rules(self) -> PlayRules:
        """How trajectories are played."""
        return self._rules

    @property
    def num_trajectories(self) -> int:
        """How many a rollout has."""
        return len(self._group_tags) * self._rules.settings.group_size

    def rollout(
        self,
        seed: int | None = None,
        *,
        folder: str | Path | None = None,
        watch: Callable[[RolloutProgress], None] | None = None,
        before_play: Callable[[], None] | None = None,
    ) -> ParallelRolloutResult:
        """Play every environment once.

        Args:
            seed: Of the first group, and of the model's random numbers; by default that of the
                configuration, which moves on by the number of groups with every training rollout.
            folder: Keeps a journal there, and goes on with the one that is there.
            watch: Called a few times a second.
            before_play: Called once, unless nothing is left to play.

        Raises:
            RolloutFailed: A trajectory failed, and `agent_proxy.on_failure` is raise.
            JournalError: The journal cannot be written, or belongs to another rollout.
        """
        if self._is_closed:
            raise FleetClosed("this manager is closed; make a new one")
        first = self._first_seed(seed)
        path = None if folder is None else Path(folder)
        rules = replace(
            self._rules,
            run_seed=first,
            started_s=monotonic(),
            keep_image=None if path is None else partial(write_image, path),
            continues_tokens=getattr(self.llm.engine, "continues_tokens", False),
        )
        with ExitStack() as stack:
            journal = None
            if path is not None:
                header = header_of(rules, first, self.llm.name)
                journal = stack.enter_context(Journal(path, header))
                check_header(path, header)
                if journal.damaged:
                    told = f"{damage_told(journal.damaged)} of {journal.path}"
                    _log.warning("damaged: %s; what was lost is played again", told)
                    journal.go_on(header)
                rules = replace(rules, started_s=monotonic() - journal.played_s)
            run = RolloutRun(rules, self.llm, self._tasks(first), journal, watch)
            before = self.llm.stats
            _log.info(
                "rollout of %d trajectories (%d left to play) with %s, seeds from %d",
                self.num_trajectories, run.num_unfinished, self.llm.name, first,
            )  # fmt: skip
            if run.num_unfinished and before_play is not None:
                before_play()
            played_by = self._play(run) if run.num_unfinished else _PlayedBy("the journal", 0)
            timings = run.tally.timings(
                before, self.llm.stats, 0.0 if journal is None else journal.write_s
            )
            _log.info(
                "%d turns in %.2f s by %s", timings.num_turns, timings.wall_s, played_by.backend
            )
            return ParallelRolloutResult(
                trajectories=run.trajectories(),
                metrics=run.tally.metrics(),
                tags=run.tally.tags(),
                timings=timings,
                failures=dict(sorted(run.tally.failures.items())),
                first_errors=dict(sorted(run.tally.first_errors.items())),
                num_attempts=run.tally.num_attempts,
                num_masked=run.tally.num_masked,
                backend=played_by.backend,
                num_workers=played_by.num_workers,
                plan=played_by.plan,
                fallback=played_by.fallback,
                damaged_lines=() if journal is None else tuple(journal.damaged),
                verdict=rollout_verdict(timings, played_by.num_workers, self.num_trajectories),
                seed=first,
                folder=path,
            )

    def close(self) -> None:
        """Close every environment and end the workers; closing twice changes nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._seats is not None:
                self._seats.close()
            if self._rules.options.parallel_backend in ("joblib", "loky"):
                end_idle_workers()
            if self._cluster is not None:
                self._cluster.close()

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # ---- what is to be played -------------------------------------------------------------------

    def _first_seed(self, seed: int | None) -> int:
        if seed is not None:
            if type(seed) is not int or seed < 0:
                raise ConfigError(f"seed must be a whole number from 0, got {seed!r:.60}")
            return seed
        settings = self._rules.settings
        if settings.mode == "val":
            return 123 if settings.seed is None else settings.seed
        first = secrets.randbelow(1_000_000) if settings.seed is None else settings.seed
        first += self._num_rollouts * settings.num_groups
        self._num_rollouts += 1
        return first

    def _tasks(self, first: int) -> list[TrajectoryTask]:
        size = self._rules.settings.group_size
        return [
            TrajectoryTask(group * size + member, group, tag, first + group)
            for group, tag in enumerate(self._group_tags)
            for member in range(size)
        ]

    # ---- who plays it ---------------------------------------------------------------------------

    def _play(self, run: RolloutRun) -> _PlayedBy:
        options = run.rules.options
        backend = options.parallel_backend if options.use_parallel_rollout else "sequential"
        fallback = None
        if backend == "ray" or backend in JOBLIB_BACKENDS:
            workers = self._workers(backend, run.num_unfinished)
            fallback = self._play_in_workers(run, workers)
            if fallback is None:
                plan = tuple(
                    f"{tag}: in workers of {workers.name}, as asked" for tag in run.rules.tags
                )
                return _PlayedBy(workers.backend, workers.num_workers, plan)
        wish: UseMultiprocessing = {"auto": "auto", "fleet": True}.get(backend, False)  # type: ignore[assignment]
        if wish is not False:
            try:
                seats = self._take_seats(run, wish)
            except (EnvfleetError, OSError) as exc:
                fallback, wish = f"workers cannot be started: {exc}", False
        if fallback is not None:
            _log.warning("going on in this process: %s", fallback)
        if wish is False:
            backend, seats = "sequential", self._take_seats(run, False)
        max_live = self._max_live(run)
        Play(run.rules, seats, self.llm.submit, run, run, max_live=max_live, on_tick=run.tick).run()
        num_workers = max(1, len(set(seats.worker_pids())))
        return _PlayedBy(backend, num_workers, seats.plan, fallback)

    def _workers(self, backend: str, num_tasks: int) -> RolloutWorkers:
        options = self._rules.options
        if backend == "ray":
            from envfleet.engine.backends.ray.cluster import connect
            from envfleet.llm.ray_workers import RayWorkers, cores_of_cluster

            if self._cluster is None:
                self._cluster = connect(options.ray_address)
            asked = options.parallel_n_jobs
            if asked == -1:
                return RayWorkers(min(cores_of_cluster(), num_tasks))
            return RayWorkers(min(asked, num_tasks), most=asked)
        name: Any = "loky" if backend == "joblib" else backend
        is_adaptive = options.parallel_n_jobs == -1
        return JoblibWorkers(name, self._num_workers(num_tasks), is_adaptive=is_adaptive)

    def _play_in_workers(self, run: RolloutRun, workers: RolloutWorkers) -> str | None:
        """Play in these workers; why they could not play to the end."""
        num_idle_rounds = 0
        while True:
            share = WorkShare(
                run.take_all(),
                workers.num_workers,
                run.expected_turns,
                run.num_losses,
                # before it would be given up, so that none is for the losses of another
                suspect_after=max(1, min(2, self._rules.settings.max_restarts)),
            )
            run.give = share.add
            for worker, env_ids in enumerate(share.env_ids()):
                _log.info("worker %d begins with environments %s", worker, env_ids)
            heard = run.num_events
            try:
                WorkerRound(
                    self.llm,
                    run.rules,
                    share,
                    workers,
                    max_live=self._max_live(run),
                    topic=f"rollout-{secrets.token_hex(4)}",
                ).run(run.take_in, run.lost, lambda: not run.num_unfinished, run.tick)
                return None
            except WorkersLost as exc:
                num_idle_rounds = 0 if run.num_events > heard else num_idle_rounds + 1
                why = str(exc)
            finally:
                run.give = run.waiting.extend
                run.waiting.extend(share.rest())
            if num_idle_rounds:
                return f"{workers.name} has no workers left: {why}"
            _log.warning("starting workers again: %s", why)

    def _num_workers(self, num_tasks: int) -> int:
        asked = self._rules.options.parallel_n_jobs
        most = min(usable_cores(), _MOST_WORKERS) if asked == -1 else asked
        return max(1, min(most, num_tasks))

    def _max_live(self, run: RolloutRun) -> int:
        if run.rules.options.rollout_mode == "lockstep":
            return max(1, run.num_unfinished)
        places: int = self.llm.stats.max_concurrency
        if getattr(self.llm.engine, "remembers_by_place", False):
            return max(1, min(run.num_unfinished, places))
        return max(1, min(run.num_unfinished, max(_LEAST_LIVE, 4 * places)))

    def _take_seats(self, run: RolloutRun, wish: UseMultiprocessing) -> EnvSeats:
        """Environments, those of the last rollout if they fit."""
        max_live = self._max_live(run)
        size = self._rules.settings.group_size
        counts = {
            name: min(max_live, self._group_tags.count(name) * size)
            for name in dict.fromkeys(self._group_tags)
        }
        num_workers = self._num_workers(sum(counts.values()))
        wanted = (wish, counts, num_workers)
        if self._seats is not None and self._seats_for == wanted:
            self._seats.refresh()
            return self._seats
        if self._seats is not None:
            self._seats.close()
            self._seats = None
        self._seats = EnvSeats(run.rules.tags, counts, run.rules.settings, wish, num_workers)
        self._seats_for = wanted
        for line in self._seats.plan:
            _log.info(line)
        return self._seats


@dataclass(frozen=True, slots=True)
class _PlayedBy:
    backend: str
    num_workers: int
    plan: tuple[str, ...] = ()
    fallback: str | None = None
