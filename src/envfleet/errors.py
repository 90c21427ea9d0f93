"""Every exception envfleet raises, in one tree.

    EnvfleetError
     ├─ ConfigError (ValueError)            an argument that cannot work; nothing was started
     ├─ MissingExtra (ImportError)          an optional dependency is not installed
     ├─ SpacesDiffer (RuntimeError)         the slots of a vector environment have different spaces
     ├─ ActionError (ValueError, TypeError) wrong number, shape or type of actions
     ├─ LayoutMismatch (ValueError)         a value does not fit the space it was declared with
     ├─ OutOfOrder (RuntimeError)           a call made at the wrong time
     │   ├─ ResetNeeded (gymnasium ResetNeeded)
     │   ├─ NothingSent (gymnasium NoAsyncCallError)
     │   ├─ StillInFlight
     │   └─ FleetClosed (gymnasium ClosedEnvironmentError)
     ├─ StartError (RuntimeError)           the fleet could not be opened; nothing is left running
     │   ├─ MissingMainGuard
     │   ├─ MainNotImportable
     │   ├─ TooManyOpenFiles
     │   ├─ NoNewProcess
     │   ├─ NotEnoughSharedMemory
     │   ├─ EnvNotPicklable
     │   ├─ EnvNotImportable
     │   ├─ EnvNotRegistered
     │   ├─ EnvConstructionFailed
     │   ├─ ClusterUnreachable (ConnectionError)
     │   ├─ ObjectStoreTooSmall
     │   └─ StartTimeout (TimeoutError)
     ├─ EnvFailed (RuntimeError)            an environment raised; the remote traceback is the cause
     ├─ NothingCollected (RuntimeError)     environments failed in every step of a rollout
     ├─ NoSuchAttribute (AttributeError)    an environment lacks what was called or read by name
     ├─ WorkerDied (RuntimeError)           a worker process ended unexpectedly
     ├─ DeadlineExceeded (TimeoutError)     an environment took too long; its stack is in the text
     ├─ NotAnswered (TimeoutError)          an answer is not there yet, and can still come
     ├─ SlotQuarantined (RuntimeError)      a slot failed more often than its restart budget allows
     ├─ NotFinite (ArithmeticError)         a reward, observation or parameter is inf or NaN
     ├─ ResumeFailed (RuntimeError)         a lost slot could not be rebuilt to the same state
     ├─ SnapshotError (RuntimeError)        the state of a slot cannot be saved or restored
     ├─ CheckpointError (RuntimeError)      a checkpoint cannot be written, read or used
     ├─ JournalError (RuntimeError)         the journal of a rollout cannot be written or read
     ├─ RolloutFailed (RuntimeError)        a trajectory failed, and `on_failure` is "raise"
     ├─ InferenceError (RuntimeError)       a language model gave no answer
     ├─ OpenEnvError (ConnectionError)      an OpenEnv server cannot be used
     ├─ ClusterLost (ConnectionError)       the Ray cluster does not answer any more
     ├─ NoNodes (RuntimeError)              no node of the cluster can take the work
     ├─ WorkLost (RuntimeError)             a piece of work was lost with its node too often
     └─ VideoError (RuntimeError)           a video cannot be made

Each class takes its data as constructor arguments and keeps them as attributes, so it can be
pickled. Its text says what happened, where, and what to do next.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

import gymnasium.error

__all__ = [
    "ActionError", "CheckpointError", "ClusterLost", "ClusterUnreachable", "ConfigError",
    "DeadlineExceeded", "EnvConstructionFailed", "EnvFailed", "EnvNotImportable", "EnvNotPicklable",
    "EnvNotRegistered", "EnvfleetError", "FleetClosed", "InferenceError", "JournalError",
    "LayoutMismatch", "MainNotImportable", "MissingExtra", "MissingMainGuard", "NoNewProcess",
    "NoNodes", "NoSuchAttribute", "NotAnswered", "NotEnoughSharedMemory", "NotFinite",
    "NothingCollected", "NothingSent", "ObjectStoreTooSmall", "OpenEnvError", "OutOfOrder",
    "RemoteTraceback", "ResetNeeded", "ResumeFailed", "RolloutFailed", "SlotQuarantined",
    "SnapshotError", "SpacesDiffer", "StartError", "StartTimeout", "StillInFlight",
    "TooManyOpenFiles", "VideoError", "WorkLost", "WorkerDied", "did_you_mean", "level_of_caller",
]  # fmt: skip


class EnvfleetError(Exception):
    """Base of every exception that envfleet raises."""


class ConfigError(EnvfleetError, ValueError):
    """An argument that cannot work. Raised before anything is started."""


class MissingExtra(EnvfleetError, ImportError):
    """A package of an optional extra is needed and not installed."""


class SpacesDiffer(EnvfleetError, RuntimeError):
    """Two slots have different spaces, so their values do not fit into one batched array."""

    def __init__(self, which: str, slot: int, expected: str, got: str) -> None:
        super().__init__(which, slot, expected, got)
        self.which, self.slot, self.expected, self.got = which, slot, expected, got

    def __str__(self) -> str:
        return (
            f"slot {self.slot} has the {self.which} space {self.got} but slot 0 has "
            f"{self.expected}; a vector environment needs equal spaces. Make them equal with a "
            "wrapper, or use envfleet.engine.Fleet, which takes environments with different spaces."
        )


class ActionError(EnvfleetError, ValueError, TypeError):
    """Wrong number, shape or type of actions. Nothing was sent."""


class LayoutMismatch(EnvfleetError, ValueError):
    """A value does not fit the space it was declared with."""

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(path, expected, got)
        self.path, self.expected, self.got = path, expected, got

    def __str__(self) -> str:
        return f"{self.path or 'the value'} should be {self.expected} but is {self.got}"


class OutOfOrder(EnvfleetError, RuntimeError):
    """A call made at the wrong time."""


class ResetNeeded(OutOfOrder, gymnasium.error.ResetNeeded):
    """A slot was stepped without a running episode."""


class NothingSent(OutOfOrder, gymnasium.error.NoAsyncCallError):
    """`recv` was called with no slot in flight."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.name = "recv"


class StillInFlight(OutOfOrder):
    """A slot was sent a second command before its first answer was received."""


class FleetClosed(OutOfOrder, gymnasium.error.ClosedEnvironmentError):
    """The fleet was used after `close`."""


class StartError(EnvfleetError, RuntimeError):
    """The fleet could not be opened. Everything that it had started was ended again."""


class MissingMainGuard(StartError):
    """The main script opens a fleet while a worker imports it."""

    def __init__(self, script: str, start_method: str) -> None:
        super().__init__(script, start_method)
        self.script, self.start_method = script, start_method

    def __str__(self) -> str:
        return (
            f"{self.script} opens a fleet at its top level. Start method {self.start_method!r} "
            "makes every worker import that file, so every worker would open a fleet. Put the "
            "code under a guard:\n\n"
            "    def main():\n"
            "        envs = envfleet.make_vec(...)\n"
            "        ...\n\n"
            '    if __name__ == "__main__":\n'
            "        main()\n"
        )


class MainNotImportable(StartError):
    """A worker cannot import the main script, which its start method requires."""

    def __init__(self, script: str, start_method: str, reason: str) -> None:
        super().__init__(script, start_method, reason)
        self.script, self.start_method, self.reason = script, start_method, reason

    def __str__(self) -> str:
        every = f"start method {self.start_method!r} makes every worker import the main script"
        if self.script == "<stdin>":
            return (
                f"{every}, but this one was read from standard input, which cannot be read again. "
                "Save it to a file, or use start_method='fork', which imports nothing."
            )
        return (
            f"{every}, but {self.script} cannot be imported there: {self.reason}. Put the code "
            'that only the program itself may run under `if __name__ == "__main__":`, or use '
            "start_method='fork', which imports nothing."
        )


class TooManyOpenFiles(StartError):
    """The workers need more file descriptors than this process may open."""

    def __init__(self, limit: int, in_use: int, need: int, num_workers: int) -> None:
        super().__init__(limit, in_use, need, num_workers)
        self.limit, self.in_use, self.need, self.num_workers = limit, in_use, need, num_workers

    def __str__(self) -> str:
        return (
            f"{self.num_workers} workers need about {self.need} open files, and {self.in_use} are "
            f"in use, but this process may have {self.limit}. Use fewer workers "
            "(num_workers=; one worker can run several environments) or raise the limit: "
            f"ulimit -n {2 * (self.need + self.in_use)}"
        )


class NoNewProcess(StartError):
    """A worker process could not be started."""

    def __init__(self, worker: int, slots: Sequence[int], reason: str, remedy: str) -> None:
        super().__init__(worker, tuple(slots), reason, remedy)
        self.worker, self.slots, self.reason = worker, tuple(slots), reason
        self.remedy = remedy

    def __str__(self) -> str:
        return (
            f"no process could be started for worker {self.worker} of slots {list(self.slots)}: "
            f"{self.reason}. {self.remedy}"
        )


class NotEnoughSharedMemory(StartError):
    """The shared block does not fit into the free memory."""

    def __init__(self, need_bytes: int, available_bytes: int, num_slots: int, why: str) -> None:
        super().__init__(need_bytes, available_bytes, num_slots, why)
        self.need_bytes, self.available_bytes = need_bytes, available_bytes
        self.num_slots, self.why = num_slots, why

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"the shared block for {self.num_slots} slots needs {self.need_bytes / mib:,.0f} MiB, "
            f"but {self.available_bytes / mib:,.0f} MiB are available ({self.why}). Use fewer "
            "environments or smaller observations (a smaller dtype, a resized image), or give the "
            "container more memory."
        )


class EnvNotPicklable(StartError):
    """The function that builds a slot's environment cannot be sent to a worker."""

    def __init__(self, slot: int, env_fn: str, reason: str) -> None:
        super().__init__(slot, env_fn, reason)
        self.slot, self.env_fn, self.reason = slot, env_fn, reason

    def __str__(self) -> str:
        return (
            f"the function that builds slot {self.slot} ({self.env_fn}) cannot be sent to a "
            f"worker: {self.reason}. Create the environment and its locks, files and sockets "
            "inside the function instead of capturing them, or use backend='thread' or 'serial'."
        )


class EnvNotImportable(StartError):
    """A worker cannot import the code that builds an environment."""

    def __init__(self, slots: Sequence[int], reason: str) -> None:
        super().__init__(tuple(slots), reason)
        self.slots, self.reason = tuple(slots), reason

    def __str__(self) -> str:
        return (
            f"a worker could not import the code that builds slots {list(self.slots)}: "
            f"{self.reason}. Install the module or put it on PYTHONPATH, so that workers find it "
            "too, or use start_method='fork', which inherits what this process has imported."
        )


class EnvNotRegistered(StartError):
    """An environment id is not registered inside a worker."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reason)
        self.slot, self.reason = slot, reason

    def __str__(self) -> str:
        return (
            f"slot {self.slot}'s worker does not know the environment: {self.reason} An id "
            "registered in this process is not registered in a new one. Pass the id itself to "
            "make_vec, which sends its registration too, or call gymnasium.register inside the "
            "function."
        )


class EnvConstructionFailed(StartError):
    """An environment could not be built, or failed when it was measured; see the cause."""

    def __init__(
        self,
        slot: int,
        reason: str,
        is_here: bool = False,
        doing: str = "the constructor",
        has_neighbour: bool = False,
    ) -> None:
        super().__init__(slot, reason, is_here, doing, has_neighbour)
        self.slot, self.reason = slot, reason
        self.has_neighbour = has_neighbour
        """Another environment had been built in the same process."""
        self.is_here = is_here
        """It was built in this process, not in a worker."""
        self.doing = doing

    def __str__(self) -> str:
        text = f"building the environment of slot {self.slot} failed: {self.reason}."
        if self.doing != "the constructor":
            text = (
                f"the environment of slot {self.slot} was built, but its {self.doing} failed when "
                f"it was measured: {self.reason}."
            )
        if self.has_neighbour:
            text += (
                " Another one had been built in that process: if each needs a process of its own, "
                "use backend='process' with num_workers=num_envs."
            )
        if self.is_here:
            return f"{text} The traceback is above, as the cause of this error."
        return (
            f"{text} The worker's traceback is above, as the cause of this error. To debug it in "
            "this process, use backend='serial'."
        )


class ClusterUnreachable(StartError, ConnectionError):
    """No Ray cluster answers, or it refuses this process."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return (
            f"the Ray cluster at {self.address} cannot be used: {self.reason}. On the head, "
            "`ray status` tells whether it runs, and `ray start --head` starts it; without an "
            "address a cluster is started on this machine."
        )


class ObjectStoreTooSmall(StartError):
    """The rows of a worker do not fit into the object store of a Ray cluster."""

    def __init__(self, worker: int, num_slots: int, need_bytes: int, store_bytes: int) -> None:
        super().__init__(worker, num_slots, need_bytes, store_bytes)
        self.worker, self.num_slots = worker, num_slots
        self.need_bytes, self.store_bytes = need_bytes, store_bytes

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"the rows of the {self.num_slots} slots of worker {self.worker} are "
            f"{self.need_bytes / mib:,.0f} MiB, and Ray's object store on its node, or on that of "
            f"this program, has {self.store_bytes / mib:,.0f} MiB. Start Ray with a larger "
            "--object-store-memory, give each worker fewer slots (num_workers), or use smaller "
            "observations."
        )


class StartTimeout(StartError, TimeoutError):
    """A worker was not ready in time."""

    def __init__(
        self,
        worker: int,
        slots: Sequence[int],
        seconds: float,
        doing: str,
        start_method: str | None = None,
    ) -> None:
        super().__init__(worker, tuple(slots), seconds, doing, start_method)
        self.worker, self.slots, self.seconds, self.doing = worker, tuple(slots), seconds, doing
        self.start_method = start_method

    def __str__(self) -> str:
        late = (
            f"worker {self.worker} of slots {list(self.slots)} was not ready after "
            f"{self.seconds:g} s."
        )
        if self.start_method != "fork" and re.search(r"/spawn\.py.* in prepare$", self.doing, re.M):
            remedy = (
                f"Start method {self.start_method!r} makes it import the main script, and it still "
                "does: put what only the program itself may run under "
                '`if __name__ == "__main__":`.'
            )
        else:
            remedy = (
                "If the constructors are slow, raise reset_timeout_s; if one hangs, run it with "
                "backend='serial'."
            )
            if self.start_method == "fork":
                remedy += (
                    " A forked worker can also hang in what this process has loaded (OpenGL, X11) "
                    "or in a lock that another thread held: try start_method='forkserver'."
                )
        return f"{late} {remedy} The worker is at: {self.doing or 'not known'}"


class RemoteTraceback(Exception):
    """The text of a traceback from another process or thread, shown as the cause of an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class EnvFailed(EnvfleetError, RuntimeError):
    """An environment raised; the worker's traceback is the cause."""

    def __init__(self, slot: int, doing: str, reason: str, slots: Sequence[int] = ()) -> None:
        super().__init__(slot, doing, reason, tuple(slots))
        self.slot, self.doing, self.reason = slot, doing, reason
        self.slots = tuple(slots) or (slot,)
        """All slots of the environment; a natively vectorised one has several."""

    def __str__(self) -> str:
        first, *others = self.slots
        whose = f"slots {first} to {others[-1]}" if others else f"slot {self.slot}"
        text = (
            f"the environment of {whose} raised during {self.doing}: {self.reason}. Other slots "
            "are not affected"
        )
        if self.doing not in ("step", "reset"):
            return f"{text}. The traceback is above, as the cause of this error"
        these = "all of these slots" if others else "this slot"
        return (
            f"{text}. Call reset() to start {these} again, or use on_failure='restart', which "
            "does so by itself"
        )


class NoSuchAttribute(EnvfleetError, AttributeError):
    """An environment has no attribute or method of the name that was called, read or set."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reason)
        self.slot, self.reason = slot, reason

    def __str__(self) -> str:
        return (
            f"the environment of slot {self.slot} does not have it: {self.reason}. Its wrappers "
            "were searched too. Check the name"
        )


class WorkerDied(EnvfleetError, RuntimeError):
    """A worker process ended unexpectedly."""

    def __init__(
        self,
        worker: int,
        slots: Sequence[int],
        exitcode: int | None,
        doing: str,
        dump: str = "",
        restart_helps: bool = True,
    ) -> None:
        super().__init__(worker, tuple(slots), exitcode, doing, dump, restart_helps)
        self.worker, self.slots, self.exitcode = worker, tuple(slots), exitcode
        self.doing, self.dump = doing, dump
        self.restart_helps = restart_helps
        """Whether on_failure='restart' would let the fleet go on."""

    def __str__(self) -> str:
        advice = ", or use on_failure='restart' to replace the worker" if self.restart_helps else ""
        text = (
            f"worker {self.worker} died during {self.doing} ({describe_exit(self.exitcode)}); it "
            f"hosted slots {list(self.slots)}. Run those with backend='serial' to see the failure "
            f"in this process{advice}."
        )
        return f"{text}\n{self.dump}" if self.dump else text


class DeadlineExceeded(EnvfleetError, TimeoutError):
    """An environment took longer than its deadline; its stack is part of the text."""

    def __init__(
        self, slot: int, worker: int, doing: str, seconds: float, option: str, stack: str
    ) -> None:
        super().__init__(slot, worker, doing, seconds, option, stack)
        self.slot, self.worker, self.doing = slot, worker, doing
        self.seconds, self.option, self.stack = seconds, option, stack

    def __str__(self) -> str:
        return (
            f"slot {self.slot} (worker {self.worker}) has been in {self.doing} for more than "
            f"{self.seconds:g} s, so its worker was stopped. If that is normal for this "
            f"environment, raise {self.option}. Its stack was:\n{self.stack}"
        )


class NotAnswered(EnvfleetError, TimeoutError):
    """A worker did not answer in the time that the caller gave it. Its answer can still come."""

    def __init__(self, worker: int, request: int, doing: str, seconds: float) -> None:
        super().__init__(worker, request, doing, seconds)
        self.worker, self.request, self.doing, self.seconds = worker, request, doing, seconds

    def __str__(self) -> str:
        return (
            f"worker {self.worker} has not answered its {self.doing} (request {self.request}) "
            f"after {self.seconds:g} s. It is still at work: call recv again, or recv with a "
            "longer timeout"
        )


class SlotQuarantined(EnvfleetError, RuntimeError):
    """A slot failed more often than its restart budget allows."""

    def __init__(self, slot: int, restarts: int, window_s: float, last: str) -> None:
        super().__init__(slot, restarts, window_s, last)
        self.slot, self.restarts, self.window_s, self.last = slot, restarts, window_s, last

        self.what_happened = (
            f"slot {slot} failed {restarts} times, within {window_s:g} s or with no good step in "
            f"between, and is quarantined. Last failure: {last}"
        )

    def __str__(self) -> str:
        return (
            f"{self.what_happened}. envs.incidents has every failure with its seed and actions; "
            "save one and run `envfleet doctor replay FILE` to see it in one process. To accept "
            "that many failures, raise max_restarts."
        )


class ResumeFailed(EnvfleetError, RuntimeError):
    """A lost slot could not be brought back to where it was, so its episode is over."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reason)
        self.slot, self.reason = slot, reason

    def __str__(self) -> str:
        return (
            f"slot {self.slot} was lost and cannot be resumed: {self.reason}. reset() starts this "
            "one again; the other slots are unharmed. With on_failure='restart' a lost slot comes "
            "back truncated instead"
        )


class NothingCollected(EnvfleetError, RuntimeError):
    """Environments failed in every step of a rollout, so there is nothing to learn from."""

    def __init__(self, steps: int, last: str, where: str) -> None:
        super().__init__(steps, last, where)
        self.steps, self.last, self.where = steps, last, where

    def __str__(self) -> str:
        return (
            f"there is nothing to learn from: the environments failed in each of {self.steps:,} "
            f"steps. Last failure: {self.last}. All failures are in {self.where}. Fix the "
            "environment and start again"
        )


class NotFinite(EnvfleetError, ArithmeticError):
    """A reward, observation or parameter is infinite or NaN."""

    def __init__(self, what: str, where: str, remedy: str) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        return f"{self.what} {self.where}, so nothing can be learned from it; {self.remedy}"


class SnapshotError(EnvfleetError, RuntimeError):
    """The state of a slot cannot be saved or restored."""


class CheckpointError(EnvfleetError, RuntimeError):
    """A checkpoint cannot be written, read or used."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


class JournalError(EnvfleetError, RuntimeError):
    """The journal of a rollout cannot be written or read."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


class RolloutFailed(EnvfleetError, RuntimeError):
    """A trajectory failed, and the policy for failures is to stop."""

    def __init__(self, env_id: int, tag: str, turn: int, reason: str, error: str) -> None:
        super().__init__(env_id, tag, turn, reason, error)
        self.env_id, self.tag, self.turn = env_id, tag, turn
        self.reason, self.error = reason, error

    def __str__(self) -> str:
        return (
            f"the trajectory of environment {self.env_id} ({self.tag}) failed in turn "
            f"{self.turn + 1} ({self.reason}): {self.error}. agent_proxy.on_failure is raise; "
            "retry, mask and refill go on with the others"
        )


class OpenEnvError(EnvfleetError, ConnectionError):
    """An OpenEnv server cannot be reached, did not answer in time, or refused a message."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url, self.problem = url, problem

    def __str__(self) -> str:
        return f"{self.url} {self.problem}"


class InferenceError(EnvfleetError, RuntimeError):
    """A language model gave no answer to one request. Other requests are not affected."""

    def __init__(
        self,
        reason: Literal["engine", "timeout", "budget"],
        problem: str,
        is_retryable: bool = False,
        retry_after_s: float | None = None,
        attempts: int = 1,
    ) -> None:
        super().__init__(reason, problem, is_retryable, retry_after_s, attempts)
        self.reason: Literal["engine", "timeout", "budget"] = reason
        self.problem = problem
        """What happened and what to do next, as a sentence without its full stop."""
        self.is_retryable = is_retryable
        """Whether the same request may get an answer later."""
        self.retry_after_s = retry_after_s
        """How long the server asks to wait before that."""
        self.attempts = attempts

    def __str__(self) -> str:
        tries = f" after {self.attempts} attempts" if self.attempts > 1 else ""
        return f"the model gave no answer{tries}: {self.problem}"


class ClusterLost(EnvfleetError, ConnectionError):
    """The Ray cluster that a job runs on does not answer any more."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"the Ray cluster does not answer any more ({self.problem}). See whether its head is "
            "up (`ray status`), and go on from the last checkpoint"
        )


class NoNodes(EnvfleetError, RuntimeError):
    """No node of the cluster can take the work."""

    def __init__(self, pieces: int, waited_s: float, last: str) -> None:
        super().__init__(pieces, waited_s, last)
        self.pieces, self.waited_s, self.last = pieces, waited_s, last

    def __str__(self) -> str:
        left = f"{self.pieces} pieces of work are left, and " if self.pieces else ""
        return (
            f"{left}no node of the Ray cluster has had a worker for {self.waited_s:g} s (last: "
            f"{self.last}). `ray status` shows the nodes and what takes their cores"
        )


class WorkLost(EnvfleetError, RuntimeError):
    """A piece of work was lost with its worker more often than is allowed."""

    def __init__(self, piece: int, losses: int, last: str) -> None:
        super().__init__(piece, losses, last)
        self.piece, self.losses, self.last = piece, losses, last

    def __str__(self) -> str:
        return (
            f"piece {self.piece} of the work was lost {self.losses} times, the last time on "
            f"{self.last}. It may be what ends its worker: run it on one machine to see"
        )


class VideoError(EnvfleetError, RuntimeError):
    """A video cannot be made. Nothing else fails because of it."""

    def __init__(self, path: str, reason: str, was_drawn: bool = False) -> None:
        super().__init__(path, reason, was_drawn)
        self.path, self.reason, self.was_drawn = path, reason, was_drawn
        """Whether the environment could be rendered, so that another video may succeed."""

    def __str__(self) -> str:
        text = f"there is no video {self.path}: {self.reason}"
        if self.was_drawn:
            return text
        return (
            f"{text}. The environment must support render_mode='rgb_array'. On a machine without "
            "a screen, set MUJOCO_GL=egl or MUJOCO_GL=osmesa for MuJoCo"
        )


def describe_exit(exitcode: int | None) -> str:
    """What an exit code of a worker usually means."""
    if exitcode is None:
        return "its exit code is not known"
    if exitcode == -9:
        return "killed by SIGKILL, often the system running out of memory"
    if exitcode == -11:
        return "segmentation fault in native code"
    if exitcode < 0:
        return f"killed by signal {-exitcode}"
    return f"exit code {exitcode}"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the most similar known one, if there is one."""
    close = difflib.get_close_matches(wrong.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def level_of_caller() -> int:
    """The `stacklevel` for a warning that points to the caller's own code, outside envfleet."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("envfleet."):
        frame, level = frame.f_back, level + 1
    return level
