"""What every worker does, wherever it runs: build environments, carry out commands, answer.

A `Worker` knows nothing of processes, threads or pipes. `handle` never raises because of an
environment. If one constructor fails, the environments that are already built are closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.host import EnvHost, Guard
from envfleet.engine.infos import SchemaRegistry
from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import Command, EnvFacts, EnvFailure, Op, Reply, status_word
from envfleet.engine.options import Autoreset, EnvFn
from envfleet.engine.vector_host import VectorHost
from envfleet.errors import ConfigError
from envfleet.layout import are_same

Host = EnvHost | VectorHost


@dataclass(frozen=True, slots=True)
class NativeFn:
    """Marks a function that builds a natively vectorised environment of a given size."""

    build: Callable[[int], VectorEnv]

    def __call__(self) -> VectorEnv:
        """Build one of size 1, so that a marker is an `EnvFn` too."""
        return self.build(1)


class BuildFailed(Exception):
    """A constructor raised; `failure` says which one."""

    def __init__(self, failure: EnvFailure) -> None:
        super().__init__(failure)
        self.failure = failure


class Worker:
    """The environments of one worker, in one or several hosts side by side."""

    def __init__(
        self,
        first: int,
        env_fns: Sequence[EnvFn],
        autoreset: Autoreset,
        status: memoryview,
        guard: Guard,
    ) -> None:
        self._status, self._guard = status, guard
        self.hosts: list[Host] = _build(first, env_fns, autoreset, status, guard)
        self._only = self.hosts[0] if len(self.hosts) == 1 else None

    def facts(self) -> list[EnvFacts]:
        """Spaces, metadata and spec of each slot's environment, in the order of slots."""
        return _sharing_spaces([facts for host in self.hosts for facts in host.facts()])

    def bind(self, control: Control, data: Data) -> None:
        """Take the shared rows."""
        self._data = data
        first, count = self.hosts[0].first, sum(host.count for host in self.hosts)
        self._rows = slice(first, first + count)
        for host in self.hosts:
            host.bind(control, data, self._status)

    def handle(self, command: Command) -> Reply | None:
        """Carry out one command; the reply is None if everything lies in the rows."""
        started = time.perf_counter_ns()
        if command.op is Op.STEP:
            reply = self.step(command.slots, command.payload, command.page)
        else:
            reply = self._fan_out(command)
            self._status[1] = 0
        self._status[2] += time.perf_counter_ns() - started
        return reply

    def handle_here(self, command: Command) -> Reply | None:
        """`handle` in the parent's own process: infos are copied, as a message would copy them."""
        reply = self.handle(command)
        if reply is not None:
            for infos in (reply.infos, reply.final_infos):
                for slot, info in infos.items():
                    infos[slot] = detached_copy(info)
        return reply

    def step(
        self, slots: Sequence[int] | None, payload: Sequence[Any] | None, page: int
    ) -> Reply | None:
        """Carry out the most common command, without measuring its time."""
        if self._only is None:
            reply = self._fan_out(Command(0, Op.STEP, slots, payload))
        else:
            try:
                spills = None if payload is None else self._spills(slots, payload)
                reply = self._only.step(slots, spills)
            except BaseException as exc:
                self._guard.let_pass(exc)
                slot = self._only.first if slots is None else slots[0]
                reply = Reply(failures=[EnvFailure.of(slot, "step", exc)])
        if page:
            self._data.keep(page, self._rows)
        self._status[1] = 0
        return reply

    def idle(self) -> None:
        """The last command is answered: prepare the next one."""
        for host in self.hosts:
            host.idle()

    def _spills(self, slots: Sequence[int] | None, payload: Sequence[Any]) -> dict[int, Any]:
        chosen = range(self.hosts[0].first, self.hosts[0].first + len(payload))
        return _spills(slots or chosen, payload, range(len(payload))) or {}

    def _fan_out(self, command: Command) -> Reply | None:
        whole = Reply()
        for host in self.hosts:
            span = range(host.first, host.first + host.count)
            chosen = span if command.slots is None else command.slots
            positions = [index for index, slot in enumerate(chosen) if slot in span]
            if not positions:
                continue
            slots = [chosen[index] for index in positions]
            try:
                part = _carry_out(host, command, slots, positions)
            except BaseException as exc:
                self._guard.let_pass(exc)
                part = Reply(failures=[EnvFailure.of(slots[0], command.op.phrase, exc)])
            if part is not None:
                for field in fields(Reply):
                    mine, theirs = getattr(whole, field.name), getattr(part, field.name)
                    mine.extend(theirs) if isinstance(mine, list) else mine.update(theirs)
        return whole if whole != Reply() else None


def _sharing_spaces(facts: list[EnvFacts]) -> list[EnvFacts]:
    """The same facts; equal spaces are one object, so that each is sent and compared once."""
    first = facts[0]
    return [
        one
        if not are_same(first.observation_space, one.observation_space)
        or not are_same(first.action_space, one.action_space)
        else replace(
            one, observation_space=first.observation_space, action_space=first.action_space
        )
        for one in facts
    ]


def _spills(
    slots: Sequence[int], payload: Sequence[Any] | None, positions: Sequence[int]
) -> dict[int, Any] | None:
    """By slot, what of its action did not fit into its row."""
    if payload is None:
        return None
    return {slot: payload[index] for slot, index in zip(slots, positions, strict=True)}


def _carry_out(
    host: Host, command: Command, slots: Sequence[int], positions: Sequence[int]
) -> Reply | None:
    payload = command.payload
    match command.op:
        case Op.STEP:
            return host.step(slots, _spills(slots, payload, positions))
        case Op.RESET:
            return host.reset(slots, [payload[index] for index in positions])
        case Op.QUEUE:
            return host.queue(slots, [payload[index] for index in positions])
        case Op.REBUILD if isinstance(host, EnvHost):
            return host.rebuild(slots, [payload[index] for index in positions])
        case Op.RESUME:
            return host.resume(slots, [payload[index] for index in positions])
        case Op.CALL:
            return host.call(slots, *payload)
        case Op.GET:
            return host.get(slots, payload)
        case Op.APPLY:
            return host.apply(slots, payload)
        case Op.SET:
            return host.set_attr(slots, [payload[index] for index in positions])
        case Op.SNAPSHOT:
            return host.snapshot(slots)
        case Op.RESTORE:
            return host.restore(slots, [payload[index] for index in positions])
        case Op.REHEARSE if isinstance(host, EnvHost):
            return host.rehearse(slots, [payload[index] for index in positions])
        case Op.CLOSE:
            return host.close()
        case _:
            raise ConfigError(f"a worker cannot carry out {command.op!r}")


def _build(
    first: int, env_fns: Sequence[EnvFn], autoreset: Autoreset, status: memoryview, guard: Guard
) -> list[Host]:
    schemas = SchemaRegistry()
    hosts: list[Host] = []
    scalars: list[Any] = []
    built: list[Any] = []
    row = 0

    def flush() -> None:
        if scalars:
            start = row - len(scalars)
            fns = env_fns[start:row]
            hosts.append(EnvHost(first + start, list(scalars), fns, autoreset, guard, schemas))
            scalars.clear()

    try:
        while row < len(env_fns):
            status[1] = status_word(Op.BUILD, first + row)
            env_fn, left = env_fns[row], len(env_fns) - row
            size = next((i for i in range(left) if env_fns[row + i] is not env_fn), left)
            if isinstance(env_fn, NativeFn):
                env = guard.wrap(env_fn.build)(size)
            else:
                env = guard.wrap(env_fn)()
            built.append(env)
            if isinstance(env_fn, NativeFn) and not isinstance(env, VectorEnv):
                raise ConfigError(
                    "envfleet.native needs a function that builds a gymnasium.vector.VectorEnv, "
                    f"this one returned {type(env).__name__}"
                )
            if isinstance(env, VectorEnv):
                if env.num_envs > size:
                    raise ConfigError(
                        f"the function of slot {first + row} built a {type(env).__name__} of "
                        f"{env.num_envs} environments, but from there on {size} slots of its "
                        "worker are that function's; make the slots of each worker a multiple of "
                        "it (num_envs, num_workers), or pass envfleet.native(build), where build "
                        "takes how many it shall have"
                    )
                flush()
                hosts.append(VectorHost(first + row, env, autoreset, guard))
                row += env.num_envs
            elif isinstance(env, gymnasium.Env):
                scalars.append(env)
                row += 1
            else:
                raise ConfigError(
                    f"the function returned {type(env).__name__}, not a gymnasium.Env or VectorEnv"
                )
        flush()
    except BaseException as exc:
        guard.let_pass(exc)
        for env in built:
            try:
                guard.wrap(env.close)()
            except BaseException as second:  # the first failure is the one to report
                guard.let_pass(second)
        raise BuildFailed(EnvFailure.of(first + row, "the constructor", exc)) from exc
    status[1] = 0
    return hosts
