"""Many trial environments at once: `ParallelEnvManager`, on the fleet.

A worker is a slot of the fleet. Each has a `ParallelEnvRemote` with the interface of a pipe: `send`
a command, `recv` its answer. Workers go at their own pace. A worker process that dies is replaced,
and its environments are replayed to where they were, so that no row changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from envfleet.adapters.opening import open_fleet
from envfleet.engine import Batch, Fleet, ResetPlan
from envfleet.engine.backends.base import backend_named
from envfleet.engine.incident import Incident
from envfleet.engine.options import EnvFn
from envfleet.errors import (
    ConfigError,
    EnvfleetError,
    FleetClosed,
    NoSuchAttribute,
    NotAnswered,
    NothingSent,
    ResetNeeded,
    StillInFlight,
)
from envfleet.meta.trial import trial_functions
from envfleet.options import Count, SecondsOrZero, check

__all__ = ["NotAnswered", "ParallelEnvManager", "ParallelEnvRemote", "make_parallel_env"]

TIMEOUT_S = 600.0
"""How long one step or reset of one environment may take, unless the caller says otherwise."""


@dataclass(slots=True)
class _Request:
    """What a worker was asked and has not been received."""

    number: int
    doing: str
    answer: Batch | EnvfleetError | None = None
    """What came before it was asked for: through `poll`, or while others were waited for."""


class ParallelEnvRemote:
    """One worker as if at the end of a pipe; it does not keep its manager alive."""

    def __init__(self, manager: ParallelEnvManager, worker: int) -> None:
        """The manager makes its remotes."""
        self._manager = weakref.ref(manager)
        self.worker = worker

    def send(self, message: Any) -> int:
        """Ask for one thing, and return at once with the number of the request.

        Args:
            message: `("step", action)`, or `("reset", {"task": ...})`. A reset takes `task`,
                `seed` and `options`, each of which may be left out.

        Raises:
            StillInFlight: The answer to an earlier request was not received.
        """
        manager = self._found()
        if not isinstance(message, tuple | list) or len(message) != 2:
            raise ConfigError(f"send takes a pair (command, data); got {message!r}")
        command, data = message
        if command == "step":
            manager.send(np.asarray(data)[None], [self.worker])
        elif command == "reset":
            asked = dict(data or {})
            unknown = asked.keys() - {"task", "seed", "options"}
            if unknown:
                raise ConfigError(
                    f"a reset takes task, seed and options, not {', '.join(sorted(unknown))}"
                )
            manager.send_reset(
                [asked.get("task")],
                [self.worker],
                seeds=[asked.get("seed")],
                options=[asked.get("options")],
            )
        else:
            raise ConfigError(
                f"a worker knows 'reset' and 'step', not {command!r}; close() of the manager "
                "closes all of them"
            )
        return manager.num_requests

    def recv(self, timeout_s: float | None = None) -> tuple[Any, ...]:
        """Wait for the answer, and return it as the environment's `reset` or `step` does.

        Args:
            timeout_s: The longest to wait. None waits as long as the environment may take
                (`step_timeout_s` and `reset_timeout_s` of the manager).

        Raises:
            NothingSent: There is no request to be answered.
            NotAnswered: The time is over. The request stands, and can be received later.
        """
        return self._found()._receive_one(self.worker, timeout_s)

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether the answer is here, or comes within so many seconds; `recv` then returns it."""
        return self._found()._is_answered(self.worker, timeout)

    def _found(self) -> ParallelEnvManager:
        manager = self._manager()
        if manager is None:
            raise FleetClosed("the manager of this worker was deleted; keep a reference to it")
        return manager


class ParallelEnvManager:
    """Environments in workers, each with its own task and its own pace."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | None = None,
        num_processes: int | None = None,
        backend: str = "process",
        start_method: str | None = None,
        num_here: int = 0,
        on_failure: str = "resume",
        step_timeout_s: float | None = None,
        reset_timeout_s: float | None = None,
    ) -> None:
        """Build the environments; returns when all of them are there.

        Args:
            env_fns: One function per worker that builds its environment.
            seed: What the seeds of the workers' first resets are drawn from, see `seeds`.
            num_processes: Among how many processes the workers are dealt; None is the number of
                usable cores.
            backend: "process", "thread" or "serial", as for `make_vec`.
            start_method: How processes are started; None chooses.
            num_here: So many workers, the last, live in this process.
            on_failure: What happens if an environment fails or a process dies, as for `make_vec`.
            step_timeout_s: The longest that one step of one environment may take. None is ten
                minutes, or any time if the environments are in this process.
            reset_timeout_s: The same for a reset.
        """
        check("num_processes", num_processes, Count | None)
        if num_processes is not None:
            num_processes = min(num_processes, len(env_fns))
        can_interrupt = backend == "auto" or backend_named(backend, "auto").can_interrupt
        limit_s = TIMEOUT_S if can_interrupt and not num_here else None
        self._fleet, plan = open_fleet(
            env_fns,
            num_workers=num_processes,
            backend=backend,
            start_method=start_method,
            num_here=num_here,
            autoreset="disabled",
            on_failure=on_failure,
            step_timeout_s=step_timeout_s or limit_s,
            reset_timeout_s=reset_timeout_s or limit_s,
        )
        self.plan = plan.describe(len(env_fns))
        """One sentence on what runs where."""
        self.num_workers = len(env_fns)
        self._everyone = list(range(self.num_workers))
        self.remotes = [ParallelEnvRemote(self, worker) for worker in self._everyone]
        self.seeds: list[int | None] = [None] * self.num_workers
        """The seed of each worker's first reset, if that has none. `make_env` with this seed gives
        the same environment."""
        if seed is not None:
            self.seeds = [
                int(np.random.SeedSequence([seed, worker]).generate_state(1)[0])
                for worker in self._everyone
            ]
        self._unused_seeds = list(self.seeds)
        self.num_requests = 0
        """The number of the last request."""
        self._requests: dict[int, _Request] = {}
        facts = self._fleet.facts[0]
        self.observation_space, self.action_space = facts.observation_space, facts.action_space
        self.train_tasks: list[Any] = self._ask_first("train_tasks") or []
        self.eval_tasks: list[Any] = self._ask_first("eval_tasks") or []
        self.horizon_bamdp: int | None = self._ask_first("horizon_bamdp")

    @property
    def fleet(self) -> Fleet:
        """What runs the environments: its incidents, timings and processes."""
        return self._fleet

    @property
    def incidents(self) -> Sequence[Incident]:
        """Failures of environments and processes so far."""
        return self._fleet.incidents

    @property
    def num_processes(self) -> int:
        """How many other processes the environments live in."""
        return sum(pid is not None for pid in self._fleet.worker_pids())

    # ---- all, or some ---------------------------------------------------------------------------

    def reset(
        self,
        tasks: Sequence[Any] | None = None,
        workers: Sequence[int] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[dict[str, Any] | None] | None = None,
    ) -> Batch:
        """Start a trial in these workers (None: all), side by side, and wait for all of them."""
        workers = self._named(workers)
        self.send_reset(tasks, workers, seeds=seeds, options=options)
        return self._recv_or_drop(workers)

    def step(self, actions: Any, workers: Sequence[int] | None = None) -> Batch:
        """Step these workers (None: all), side by side; `actions` has one row for each."""
        workers = self._named(workers)
        self.send(actions, workers)
        return self._recv_or_drop(workers)

    def send_reset(
        self,
        tasks: Sequence[Any] | None = None,
        workers: Sequence[int] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[dict[str, Any] | None] | None = None,
    ) -> None:
        """Ask these workers (None: all) for a reset, each with its task; `recv` has the rows.

        Args:
            tasks: One for each worker; None lets the environments draw them.
            workers: Which workers.
            seeds: One for each worker. Where there is none, the first reset has that of `seeds`,
                and later ones go on with the generator of the environment.
            options: More options for each worker's `reset`.
        """
        workers = self._named(workers)
        rows = [
            _one_each(name, values, len(workers))
            for name, values in (("tasks", tasks), ("seeds", seeds), ("options", options))
        ]
        self._check_unasked(workers)
        plans = [
            ResetPlan(
                self._unused_seeds[worker] if seed is None else seed,
                {**(more or {}), "task": task} if task is not None else more,
            )
            for worker, task, seed, more in zip(workers, *rows, strict=True)
        ]
        self._fleet.send_reset(plans, self._slots(workers))
        for worker in workers:
            self._unused_seeds[worker] = None
        self._note_asked(workers, "reset")

    def send(self, actions: Any, workers: Sequence[int] | None = None) -> None:
        """Ask these workers (None: all) for a step; `actions` has one row for each."""
        workers = self._named(workers)
        self._check_unasked(workers)
        self._fleet.send(actions, self._slots(workers))
        self._note_asked(workers, "step")

    def recv(
        self,
        min_workers: int | None = None,
        timeout_s: float | None = None,
        workers: Sequence[int] | None = None,
    ) -> Batch:
        """Wait for workers that were asked, and return the rows of all that have answered.

        `slots` of the batch are the workers. A row of a reset has reward 0, and `valid` is False.

        Args:
            min_workers: Wait for so many; None waits for all that were asked.
            timeout_s: After this long return what is there, perhaps nothing.
            workers: Wait for these only.
        """
        awaited = sorted(self._requests) if workers is None else self._named(workers)
        if not awaited:
            raise NothingSent("recv has nothing to wait for: call send or send_reset first")
        for worker in awaited:
            answer = self._asked(worker).answer
            if isinstance(answer, EnvfleetError):
                del self._requests[worker]
                raise answer
            if answer is not None:
                raise StillInFlight(
                    f"the answer of worker {worker} was polled: remotes[{worker}].recv() has it"
                )
        batch = self._collect(awaited, min_workers, timeout_s)
        for slot in batch.slots.tolist():
            del self._requests[slot]
        return batch

    def check_idle(self) -> None:
        """Refuse if a worker has an answer that was not received.

        Raises:
            StillInFlight: One has.
        """
        self._check_unasked(self._everyone)

    def close(self) -> None:
        """Close the environments and end the processes; may be called twice."""
        self._fleet.close()

    def __enter__(self) -> ParallelEnvManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fleet"):
            self.close()

    # ---- one ------------------------------------------------------------------------------------

    def _receive_one(self, worker: int, timeout_s: float | None) -> tuple[Any, ...]:
        request = self._asked(worker)
        if request.answer is None:
            batch = self._collect([worker], None, timeout_s)
            if len(batch) == 0:
                raise NotAnswered(worker, request.number, request.doing, timeout_s or 0.0)
            request.answer = batch
        del self._requests[worker]
        if isinstance(request.answer, EnvfleetError):
            raise request.answer
        batch, info = request.answer, request.answer.each_info[0]
        if request.doing == "reset":
            return batch.obs[0], info
        flags = bool(batch.terminated[0]), bool(batch.truncated[0])
        return batch.obs[0], float(batch.rewards[0]), *flags, info

    def _is_answered(self, worker: int, timeout_s: float) -> bool:
        check("timeout", timeout_s, SecondsOrZero)
        request = self._asked(worker)
        if request.answer is None:
            try:
                batch = self._collect([worker], None, timeout_s)
            except EnvfleetError as error:  # for `recv` to raise
                request = self._requests.setdefault(worker, request)
                request.answer = error
                return True
            request.answer = batch if len(batch) else None
        return request.answer is not None

    # ---- records --------------------------------------------------------------------------------

    def _collect(
        self, workers: list[int], min_workers: int | None, timeout_s: float | None
    ) -> Batch:
        """`Fleet.recv`; an error of other workers is kept for those."""
        while True:
            try:
                return self._fleet.recv(min_workers, timeout_s, self._slots(workers))
            except (NothingSent, ResetNeeded):  # a handler of a signal, or a failure, took answers
                self._drop(workers)
                raise
            except EnvfleetError as error:
                failed = getattr(error, "slots", None) or [getattr(error, "slot", None)]
                for worker in self._requests.keys() & set(failed):
                    if worker in workers:
                        del self._requests[worker]
                    else:
                        self._requests[worker].answer = error
                if not failed or set(failed) & {*workers, None}:
                    raise

    def _recv_or_drop(self, workers: list[int]) -> Batch:
        try:
            return self.recv(workers=workers)
        except BaseException:
            self._drop(workers)  # the rows of the others have no caller left
            raise

    def _drop(self, workers: list[int]) -> None:
        if not self._fleet.is_closed:
            self._fleet.drop(self._slots(workers))
        for worker in workers:
            self._requests.pop(worker, None)

    def _asked(self, worker: int) -> _Request:
        request = self._requests.get(worker)
        if request is None:
            raise NothingSent(
                f"worker {worker} has nothing to answer: send it a reset or a step first. Each "
                "send has one recv"
            )
        return request

    def _check_unasked(self, workers: list[int]) -> None:
        for worker in workers:
            request = self._requests.get(worker)
            if request is not None:
                raise StillInFlight(
                    f"worker {worker} was asked for a {request.doing} (request {request.number}), "
                    "and its answer was not received: call recv before the next send"
                )

    def _note_asked(self, workers: list[int], doing: str) -> None:
        for worker in workers:
            self.num_requests += 1
            self._requests[worker] = _Request(self.num_requests, doing)

    def _named(self, workers: Sequence[int] | None) -> list[int]:
        if workers is None:
            return self._everyone
        named = [int(worker) for worker in workers]
        wrong = [worker for worker in named if not 0 <= worker < self.num_workers]
        if wrong or len(set(named)) != len(named) or not named:
            raise ConfigError(
                f"workers must be different numbers from 0 to {self.num_workers - 1}; got {named}"
            )
        return named

    def _slots(self, workers: list[int]) -> list[int] | None:
        """The same for the fleet, which is quicker if it is asked for all."""
        return None if workers == self._everyone else workers

    def _ask_first(self, name: str) -> Any:
        try:
            return self._fleet.get(name, slots=[0])[0]
        except NoSuchAttribute:
            return None


def make_parallel_env(
    env_id: str | EnvSpec | EnvFn,
    episodes_per_task: int,
    num_workers: int,
    seed: int | None = None,
    oracle: bool = False,
    *,
    num_processes: int | None = None,
    backend: str = "process",
    start_method: str | None = None,
    num_here: int = 0,
    on_failure: str = "resume",
    step_timeout_s: float | None = None,
    reset_timeout_s: float | None = None,
    **kwargs: Any,
) -> ParallelEnvManager:
    """Make `num_workers` environments as `make_env` does, to run side by side.

    `kwargs` are passed to the environments. The other arguments are those of `make_env` and of
    `ParallelEnvManager`.
    """
    check("num_workers", num_workers, Count)
    return ParallelEnvManager(
        trial_functions(env_id, episodes_per_task, num_workers, oracle=oracle, **kwargs),
        seed=seed,
        num_processes=num_processes,
        backend=backend,
        start_method=start_method,
        num_here=num_here,
        on_failure=on_failure,
        step_timeout_s=step_timeout_s,
        reset_timeout_s=reset_timeout_s,
    )


def _one_each(name: str, values: Sequence[Any] | None, num: int) -> list[Any]:
    if values is None:
        return [None] * num
    if len(values) != num:
        raise ConfigError(f"{name} must have one item for each of {num} workers; got {len(values)}")
    return list(values)
