"""The queue in front of an engine: order, places, retries, deadlines and budgets.

    submit ─► waiting (a heap) ─► at the engine (so many at once) ─► over
                   ▲                        │
                   └── after a delay ◄──────┘  a failure that may pass

Law: every request ends exactly once, with an answer or an `InferenceError`, or is cancelled. A
request that waits for its next attempt has no place at the engine. All calls come from one event
loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from envfleet.errors import InferenceError
from envfleet.llm.inference.content import plain_generation
from envfleet.llm.inference.options import InferenceOptions
from envfleet.llm.inference.retries import delay_before_retry
from envfleet.llm.inference.types import (
    Engine,
    GenerateRequest,
    Generation,
    GenerationTimes,
    InferenceStats,
)

Outcome = Generation | InferenceError
_HAIR_S = 0.001
"""A timer of asyncio may go off a moment too early."""


@dataclass(slots=True, eq=False)
class InferenceJob:
    """One request from the moment it was made."""

    request: GenerateRequest
    on_end: Callable[[Outcome], None]
    order: tuple[tuple[int, ...], int]
    asked_s: float
    num_failures: int = 0
    is_over: bool = False
    attempt: asyncio.Task[None] | None = None
    """Under way at the engine."""
    timer: asyncio.TimerHandle | None = None
    """For its next attempt."""
    deadline: asyncio.TimerHandle | None = None

    def __lt__(self, other: InferenceJob) -> bool:
        return self.order < other.order


class Broker:
    """Serves the requests of all callers with one engine."""

    def __init__(self, engine: Engine, options: InferenceOptions) -> None:
        self._engine, self._options = engine, options
        self._max_concurrency = options.max_concurrency or engine.max_concurrency
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._dice = random.Random()
        self._waiting: list[InferenceJob] = []
        self._jobs: set[InferenceJob] = set()
        self._num_in_flight = 0
        self._hold_until_s = 0.0
        self._first_s: float | None = None
        self._last_change_s = self._loop.time()
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter(engine=0, timeout=0, budget=0)
        self._retries: Counter[str] = Counter(engine=0, timeout=0)
        self._busy_s = self._occupied_s = 0.0
        self._max_in_flight = 0

    def submit(self, request: GenerateRequest, on_end: Callable[[Outcome], None]) -> InferenceJob:
        """Take a request in; `on_end` is called once, unless the job is cancelled."""
        now_s = self._loop.time()
        job = InferenceJob(request, on_end, (request.priority, next(self._numbers)), now_s)
        self._counts["requests"] += 1
        self._jobs.add(job)
        if self._first_s is None:
            self._first_s = now_s
            if self._options.time_budget_s is not None:
                self._loop.call_later(self._options.time_budget_s, self._end_waiting)
        if self._is_closed:
            self._end(job, _closed())
            return job
        if request.timeout_s is not None:
            job.deadline = self._loop.call_later(request.timeout_s, self._expire, job)
        heapq.heappush(self._waiting, job)
        self._start_more()
        return job

    def cancel(self, job: InferenceJob) -> None:
        """Forget a request; its place is free at once, and `on_end` is not called."""
        if not job.is_over:
            self._counts["cancelled"] += 1
            self._leave(job)
            self._start_more()

    def close(self) -> None:
        """End every request with an error, and refuse more."""
        self._is_closed = True
        self._waiting.clear()
        for job in list(self._jobs):
            self._end(job, _closed())

    def stats(self) -> InferenceStats:
        """The counts up to now. May be called from other threads."""
        past_s = self._loop.time() - self._last_change_s
        return InferenceStats(
            num_requests=self._counts["requests"],
            num_answers=self._counts["answers"],
            num_retries=sum(self._retries.values()),
            num_cancelled=self._counts["cancelled"],
            failures=dict(self._failures),
            retries=dict(self._retries),
            num_prompt_tokens=self._counts["prompt_tokens"],
            num_tokens=self._counts["tokens"],
            num_queued=max(0, len(self._jobs) - self._num_in_flight),
            num_in_flight=self._num_in_flight,
            max_in_flight=self._max_in_flight,
            max_concurrency=self._max_concurrency,
            busy_s=self._busy_s + (past_s if self._num_in_flight else 0.0),
            occupied_s=self._occupied_s + past_s * self._num_in_flight,
            engine_restarts=getattr(self._engine, "num_restarts", 0),
        )

    # ---- to the engine and back -----------------------------------------------------------------

    def _start_more(self) -> None:
        """Give free places to those who wait, in their order; none if a budget is spent."""
        while self._waiting:
            spent = self._spent_budget()
            is_full = self._num_in_flight >= self._max_concurrency
            if spent is None and (is_full or self._hold_until_s > self._loop.time()):
                return  # it is called again when a place is free, and when the hold is over
            job = heapq.heappop(self._waiting)
            if job.is_over:
                continue
            if spent is not None:
                self._end(job, spent)
                continue
            self._count_places(+1)
            job.attempt = self._loop.create_task(self._attempt(job))

    async def _attempt(self, job: InferenceJob) -> None:
        begun_s = self._loop.time()
        left_s = self._budget_left_s(begun_s)
        limit_s = min(self._options.request_timeout_s, left_s)
        outcome: Outcome
        try:
            async with asyncio.timeout(limit_s) as limit:
                outcome = await self._engine.generate(job.request)
            outcome = self._counted(outcome, begun_s - job.asked_s, self._loop.time() - begun_s)
        except InferenceError as exc:
            outcome = exc
        except TimeoutError as exc:
            if not limit.expired():
                outcome = _broker_failure(exc)
            elif limit_s == left_s:
                outcome = self._spent_time()
            else:
                outcome = InferenceError(
                    "timeout",
                    f"it took longer than {limit_s:g} s. Raise llm.request_timeout_s, or lower "
                    "llm.max_tokens or llm.max_concurrency",
                    is_retryable=True,
                )
        except Exception as exc:  # an engine of the user's own
            outcome = _broker_failure(exc)
        if job.is_over:
            return  # cancelled in the meantime, and its place was given back then
        self._count_places(-1)
        job.attempt = None
        if isinstance(outcome, Generation):
            self._end(job, outcome)
        else:
            self._retry_or_end(job, outcome)
        self._start_more()

    def _retry_or_end(self, job: InferenceJob, error: InferenceError) -> None:
        job.num_failures += 1
        delay_s = delay_before_retry(
            error,
            job.num_failures,
            max_retries=self._options.max_retries,
            first_delay_s=self._options.retry_delay_s,
            longest_wait_s=self._options.request_timeout_s,
            dice=self._dice,
        )
        if delay_s is None:
            attempts = job.num_failures
            final = InferenceError(
                error.reason, error.problem, error.is_retryable, error.retry_after_s, attempts
            )
            final.__cause__ = error.__cause__
            self._end(job, final)
            return
        self._retries[error.reason] += 1
        if error.retry_after_s is not None:  # the server is full: others would be refused as well
            until_s = self._loop.time() + error.retry_after_s
            self._hold_until_s = max(self._hold_until_s, until_s)
            self._loop.call_at(self._hold_until_s + _HAIR_S, self._start_more)
        job.timer = self._loop.call_later(delay_s, self._wait_again, job)

    def _wait_again(self, job: InferenceJob) -> None:
        job.timer = None
        heapq.heappush(self._waiting, job)
        self._start_more()

    def _expire(self, job: InferenceJob) -> None:
        seconds = job.request.timeout_s or 0.0
        self._end(job, InferenceError("timeout", f"the time for it was over after {seconds:g} s"))
        self._start_more()

    # ---- ends -----------------------------------------------------------------------------------

    def _end(self, job: InferenceJob, outcome: Outcome) -> None:
        if job.is_over:
            return
        self._leave(job)
        if isinstance(outcome, InferenceError):
            self._failures[outcome.reason] += 1
        else:
            self._counts["answers"] += 1
        job.on_end(outcome)

    def _leave(self, job: InferenceJob) -> None:
        job.is_over = True
        self._jobs.discard(job)
        for timer in (job.timer, job.deadline):
            if timer is not None:
                timer.cancel()
        job.timer = job.deadline = None
        if job.attempt is not None:
            job.attempt.cancel()
            job.attempt = None
            self._count_places(-1)

    def _counted(self, answer: Generation, queue_s: float, took_s: float) -> Generation:
        self._counts["prompt_tokens"] += answer.num_prompt_tokens
        self._counts["tokens"] += answer.num_tokens
        prefill_s = answer.times.prefill_s
        decode_s = answer.times.decode_s or max(0.0, took_s - prefill_s)
        times = GenerationTimes(queue_s=queue_s, prefill_s=prefill_s, decode_s=decode_s)
        return replace(plain_generation(answer), times=times)

    def _count_places(self, change: int) -> None:
        now_s = self._loop.time()
        past_s = now_s - self._last_change_s
        self._busy_s += past_s if self._num_in_flight else 0.0
        self._occupied_s += past_s * self._num_in_flight
        self._last_change_s = now_s
        self._num_in_flight += change
        self._max_in_flight = max(self._max_in_flight, self._num_in_flight)

    # ---- budgets --------------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """The time is over; attempts that are under way end by their own limit."""
        for job in [job for job in self._jobs if job.attempt is None]:
            self._end(job, self._spent_time())

    def _budget_left_s(self, now_s: float) -> float:
        limit_s, first_s = self._options.time_budget_s, self._first_s
        if limit_s is None or first_s is None:
            return float("inf")
        return max(0.0, first_s + limit_s - now_s)

    def _spent_budget(self) -> InferenceError | None:
        used = self._counts["prompt_tokens"] + self._counts["tokens"]
        limit = self._options.token_budget
        if limit is not None and used >= limit:
            return InferenceError(
                "budget",
                f"the token budget is spent ({used:,} of {limit:,}); what was answered before is "
                "kept. To go on, raise llm.token_budget",
            )
        return self._spent_time() if self._budget_left_s(self._loop.time()) <= 0 else None

    def _spent_time(self) -> InferenceError:
        return InferenceError(
            "budget",
            f"the time budget of {self._options.time_budget_s:g} s is spent; what was answered "
            "before is kept. To go on, raise llm.time_budget_s",
        )


def _closed() -> InferenceError:
    return InferenceError("engine", "the inference manager was closed")


def _broker_failure(exc: Exception) -> InferenceError:
    error = InferenceError("engine", f"the engine raised {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error
