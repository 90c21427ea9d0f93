"""What every slot returns, recorded twice: by a plain loop over one environment, and by a fleet.

Both records must be bit-equal. A stream is a list of events, and the events are the same in every
autoreset mode: an episode's reset, its steps, the next reset. Only their `step` differs. Actions
come from one generator per slot and are drawn only for steps that the environment really takes.

The loop shares no code with the engine: it is the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from envfleet.testing.values import (
    MISSING,
    canonical,
    info_row,
    snapshot,
    unbatch,
    value_difference,
)

Env = gymnasium.Env[Any, Any]
EnvLike = str | EnvSpec | Callable[[], Env]
"""What names an environment: a Gymnasium id, an `EnvSpec`, or a function without arguments."""

Infos = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_ACTION_SEED = 1_000_003
"""Keeps the generators of actions away from those of the environments, whose seeds are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One thing that happened in a slot."""

    kind: Literal["reset", "step"]
    step: int
    """The vector step that brought it, counted from 1; 0 is the first reset."""
    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]
    successor: Any = MISSING
    """What `recv` gave as ``final_obs``; it has to equal `obs` in every row that is no reset."""

    @property
    def ended(self) -> bool:
        """Whether the episode ended here."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The events of every slot of one run."""

    source: str
    """Who recorded it, for messages: "the hand-driven loop" or the arguments of a fleet."""
    autoreset: str
    slots: tuple[tuple[StreamEvent, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two runs part. As text it is one sentence."""

    slot: int
    step: int
    field: str
    """``obs``, ``reward``, ``terminated``, ``truncated``, ``info``, ``final_obs``,
    ``final_info`` or ``events`` (one stream ends before the other), with the path below it."""
    expected: Any
    got: Any
    expected_by: str = "the hand-driven loop"
    got_by: str = "the fleet"

    def __str__(self) -> str:
        """Slot, step, field and both values, in one sentence."""
        return (
            f"slot {self.slot}, step {self.step}: {self.field} should be {_short(self.expected)} "
            f"as {self.expected_by} has it, but {self.got_by} gave {_short(self.got)}."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


# ---- what drives both ----------------------------------------------------------------------------


def build_env(env: EnvLike) -> Env:
    """Build one environment from its id, its spec or its function."""
    if isinstance(env, str | EnvSpec):
        return gymnasium.make(env)
    return env()


def slot_actions(space: spaces.Space[Any], slot: int) -> Iterator[Any]:
    """Actions for one slot, for ever: samples that depend on the space and the slot only."""
    source = copy.deepcopy(space)
    source.seed(_ACTION_SEED + slot)
    while True:
        yield source.sample()


def count_episodes(events: Iterable[StreamEvent]) -> int:
    """How many episodes came to their end in a stream."""
    return sum(event.ended for event in events)


# ---- by hand -------------------------------------------------------------------------------------


def hand_driven(
    env: EnvLike,
    num_envs: int,
    num_steps: int,
    seed: int = 0,
    autoreset: str | AutoresetMode = "next_step",
) -> Streams:
    """Run each slot by a plain loop, one after the other, in this process and without a fleet.

    Args:
        env: the environment; every slot gets an instance of its own.
        num_envs: number of slots.
        num_steps: vector steps; in mode ``"next_step"`` a reset takes one of them.
        seed: slot i is seeded with ``seed + i``, as Gymnasium's vector environments do.
        autoreset: ``"next_step"``, ``"same_step"`` or ``"disabled"``. In the last one a slot
            whose episode ended is reset, without a seed, before the next step.
    """
    mode = mode_name(autoreset)
    slots = []
    for slot in range(num_envs):
        one = build_env(env)
        try:
            actions = slot_actions(one.action_space, slot)
            slots.append(tuple(hand_driven_stream(one, actions, num_steps, seed + slot, mode)))
        finally:
            one.close()
    return Streams(source="the hand-driven loop", autoreset=mode, slots=tuple(slots))


def hand_driven_stream(
    env: Env, actions: Iterator[Any], num_steps: int, seed: int | None, autoreset: str
) -> Iterator[StreamEvent]:
    """The events of one environment, driven by hand; see `hand_driven`."""
    space = env.observation_space

    def reset(step: int, seed: int | None = None) -> StreamEvent:
        obs, info = env.reset(seed=seed)
        return StreamEvent(
            kind="reset",
            step=step,
            obs=canonical(space, obs),
            reward=0.0,
            terminated=False,
            truncated=False,
            info=snapshot(info),
        )

    event = reset(0, seed)
    yield event
    for step in range(1, num_steps + 1):
        if event.ended and autoreset == "next_step":
            event = reset(step)
            yield event
            continue
        reward: Any
        obs, reward, terminated, truncated, info = env.step(next(actions))
        if np.ndim(reward) == 1:  # of several objectives: the sum, and the parts in the info
            parts = np.array(reward, np.float64)
            reward, info = parts.sum(), {**info, "vector_reward": parts}
        event = StreamEvent(
            kind="step",
            step=step,
            obs=canonical(space, obs),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=snapshot(info),
        )
        yield event
        if event.ended and (
            autoreset == "same_step" or (autoreset == "disabled" and step < num_steps)
        ):
            event = reset(step)
            yield event


# ---- by a fleet ----------------------------------------------------------------------------------


def fleet_driven(
    env: EnvLike | Sequence[Callable[[], Env]],
    num_envs: int,
    num_steps: int,
    seed: int = 0,
    autoreset: str | AutoresetMode = "next_step",
    *,
    min_slots: int | None = None,
    **make_vec_kwargs: Any,
) -> Streams:
    """Run the same slots with `envfleet.make_vec` and record what comes out.

    Everything that was returned is kept as it is and read only at the end (unless ``copy=False``
    asks for views), so an array that is overwritten later shows as a difference too.

    Args:
        env: as for `make_vec`.
        num_envs: number of slots.
        num_steps: vector steps, or steps of every slot when `min_slots` is given.
        seed: passed to the first reset.
        autoreset: as for `hand_driven`.
        min_slots: drive with ``send`` and ``recv(min_slots=...)``, first ready first served,
            instead of ``step``.
        **make_vec_kwargs: ``backend``, ``num_workers``, ``start_method`` and so on.
    """
    from envfleet import make_vec

    kwargs = {**make_vec_kwargs, "autoreset": mode_name(autoreset)}
    shown = kwargs if min_slots is None else {**kwargs, "min_slots": min_slots}
    source = f"the fleet ({', '.join(f'{key}={value!r}' for key, value in shown.items())})"
    with closing(make_vec(env, num_envs, **kwargs)) as envs:
        return vector_driven(
            envs,
            num_steps,
            seed,
            autoreset,
            min_slots=min_slots,
            views=not kwargs.get("copy", True),
            source=source,
        )


def vector_driven(
    envs: VectorEnv[Any, Any, Any],
    num_steps: int,
    seed: int = 0,
    autoreset: str | AutoresetMode = "next_step",
    *,
    min_slots: int | None = None,
    views: bool = False,
    source: str = "the vector environment",
) -> Streams:
    """Record the streams of a vector environment that is already open, and leave it open.

    Any `gymnasium.vector.VectorEnv` will do as long as `min_slots` is not given.

    Args:
        envs: the vector environment, of the mode that `autoreset` says.
        num_steps: as for `fleet_driven`.
        seed: as for `fleet_driven`.
        autoreset: as for `hand_driven`.
        min_slots: as for `fleet_driven`.
        views: read what was returned at once, because later steps may overwrite it.
        source: what messages call this run.
    """
    mode = mode_name(autoreset)
    recorder = _StreamRecorder(envs, mode, keep_raw=not views)
    recorder.reset(*envs.reset(seed=seed), range(envs.num_envs))
    if min_slots is None:
        _drive_in_step(envs, recorder, num_steps)
    else:
        _drive_first_ready(envs, recorder, num_steps, min_slots)
    return Streams(source=source, autoreset=mode, slots=recorder.streams())


def _drive_in_step(envs: Any, recorder: _StreamRecorder, num_steps: int) -> None:
    for step in range(1, num_steps + 1):
        obs, rewards, terminated, truncated, infos = envs.step(
            recorder.actions(range(envs.num_envs))
        )
        recorder.step(obs, rewards, terminated, truncated, infos, range(envs.num_envs))
        ended = np.asarray(terminated) | np.asarray(truncated)
        if recorder.autoreset == "disabled" and ended.any() and step < num_steps:
            # a copy: the mask must not change under a caller that keeps it
            obs, infos = envs.reset(options={"reset_mask": ended.copy()})
            recorder.reset(obs, infos, np.flatnonzero(ended).tolist())


def _drive_first_ready(
    envs: Any, recorder: _StreamRecorder, num_steps: int, min_slots: int
) -> None:
    idle, in_flight, ended = set(range(envs.num_envs)), set[int](), set[int]()
    while True:
        if recorder.autoreset == "disabled" and ended and not in_flight:
            mask = np.isin(np.arange(envs.num_envs), sorted(ended))
            obs, infos = envs.reset(options={"reset_mask": mask})
            recorder.reset(obs, infos, sorted(ended))
            idle, ended = idle | ended, set()
        ready = sorted(slot for slot in idle if recorder.steps_taken[slot] < num_steps)
        if ready:
            envs.send(recorder.actions(ready), np.array(ready))
            in_flight |= set(ready)
        if not in_flight:
            return
        batch = envs.recv(min_slots=min(min_slots, len(in_flight)))
        slots = [int(slot) for slot in batch.slots]
        recorder.batch(batch, slots)
        in_flight -= set(slots)
        idle = set(slots)
        if recorder.autoreset == "disabled":
            over = {
                slot
                for row, slot in enumerate(slots)
                if batch.terminated[row] or batch.truncated[row]
            }
            ended |= {slot for slot in over if recorder.steps_taken[slot] < num_steps}
            idle -= over


class _StreamRecorder:
    """Keeps what a fleet returned, and turns it into streams when asked."""

    def __init__(self, envs: Any, autoreset: str, *, keep_raw: bool) -> None:
        self.space: spaces.Space[Any] = envs.single_observation_space
        self.action_space: spaces.Space[Any] = envs.single_action_space
        self.autoreset, self.keep_raw = autoreset, keep_raw
        self.steps_taken = [0] * envs.num_envs
        self._sources = [slot_actions(self.action_space, i) for i in range(envs.num_envs)]
        self._ignored = [next(slot_actions(self.action_space, i)) for i in range(envs.num_envs)]
        self._resetting = [False] * envs.num_envs
        self._late: list[Callable[[], None]] = []
        self._events: list[list[StreamEvent]] = [[] for _ in range(envs.num_envs)]

    def actions(self, slots: Sequence[int]) -> Any:
        """A batch of actions; a slot that will only be reset gets one that it must not take."""
        each = [
            self._ignored[slot] if self._resetting[slot] else next(self._sources[slot])
            for slot in slots
        ]
        empty: Any = create_empty_array(self.action_space, n=len(each))
        return concatenate(self.action_space, each, empty)

    def reset(self, obs: Any, infos: Mapping[str, Any], slots: Iterable[int]) -> None:
        """Record a reset of some slots; `obs` has a row for each slot of the fleet."""
        for slot in slots:
            self._resetting[slot] = False
            self._note(slot, self.steps_taken[slot], slot, obs, infos)

    def step(
        self,
        obs: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        infos: Infos,
        slots: Sequence[int],
        final_obs: Any = None,
    ) -> None:
        """Record one step; row i of everything belongs to ``slots[i]``."""
        for row, slot in enumerate(slots):
            self.steps_taken[slot] += 1
            step = self.steps_taken[slot]
            over = bool(terminated[row]) or bool(truncated[row])
            scalars = (rewards, terminated, truncated)
            if self._resetting[slot]:
                self._note(slot, step, row, obs, infos, scalars, kind="reset", final_obs=final_obs)
            elif over and self.autoreset == "same_step":
                self._note(slot, step, row, obs, infos, scalars, final=True, final_obs=final_obs)
                self._note(slot, step, row, obs, infos, after_final=True)
            else:
                self._note(slot, step, row, obs, infos, scalars, final_obs=final_obs)
            self._resetting[slot] = over and self.autoreset == "next_step"

    def batch(self, batch: Any, slots: Sequence[int]) -> None:
        """Record what `recv` gave."""
        for row, slot in enumerate(slots):
            if bool(batch.valid[row]) == self._resetting[slot]:
                raise AssertionError(
                    f"slot {slot}, step {self.steps_taken[slot] + 1}: batch.valid is "
                    f"{bool(batch.valid[row])} in a row that "
                    f"{'is only a reset' if self._resetting[slot] else 'is a transition'}"
                )
        self.step(
            batch.obs,
            batch.rewards,
            batch.terminated,
            batch.truncated,
            # made when first asked for: only a late question shows whether it keeps what it needs
            lambda: batch.infos,
            slots,
            batch.final_obs,
        )

    def streams(self) -> tuple[tuple[StreamEvent, ...], ...]:
        """Read everything that was kept."""
        for read in self._late:
            read()
        self._late.clear()
        return tuple(tuple(events) for events in self._events)

    def _note(
        self,
        slot: int,
        step: int,
        row: int,
        obs: Any,
        infos: Infos,
        scalars: tuple[Any, Any, Any] | None = None,
        *,
        kind: Literal["reset", "step"] | None = None,
        final: bool = False,
        after_final: bool = False,
        final_obs: Any = None,
    ) -> None:
        def read() -> None:
            info = info_row(infos() if callable(infos) else infos, row)
            seen = unbatch(self.space, obs, row)
            if final:
                seen, info = info.get("final_obs", MISSING), info.get("final_info", {})
            elif after_final:
                info.pop("final_obs", None)
                info.pop("final_info", None)
            successor = MISSING
            if final_obs is not None:
                successor = unbatch(self.space, final_obs, row)
                if seen is MISSING:
                    seen = successor
            reward, terminated, truncated = (
                (0.0, False, False) if scalars is None else [column[row] for column in scalars]
            )
            self._events[slot].append(
                StreamEvent(
                    kind=kind or ("reset" if scalars is None else "step"),
                    step=step,
                    obs=seen,
                    reward=float(reward),
                    terminated=bool(terminated),
                    truncated=bool(truncated),
                    info=info,
                    successor=successor,
                )
            )

        if self.keep_raw:
            self._late.append(read)
        else:
            read()


# ---- comparison ----------------------------------------------------------------------------------


def first_difference(
    expected: Streams, got: Streams, *, ignore_infos: bool = False
) -> Difference | None:
    """The earliest step at which any slot of two runs differs, or None if they are bit-equal.

    Observations, rewards and flags have to be equal in every bit and of the same dtype. Infos
    have to hold the same keys and values; the type of a number may have been widened, since one
    array holds the values of all slots. With `ignore_infos` they are not compared.
    """
    found = [
        _slot_difference(slot, expected, got, ignore_infos)
        for slot in range(max(len(expected.slots), len(got.slots)))
    ]
    return min(
        (difference for difference in found if difference is not None),
        key=lambda difference: (difference.step, difference.slot),
        default=None,
    )


def _slot_difference(
    slot: int, expected: Streams, got: Streams, ignore_infos: bool
) -> Difference | None:
    left = expected.slots[slot] if slot < len(expected.slots) else ()
    right = got.slots[slot] if slot < len(got.slots) else ()

    def difference(step: int, name: str, was: Any, now: Any) -> Difference:
        return Difference(
            slot=slot,
            step=step,
            field=name,
            expected=was,
            got=now,
            expected_by=expected.source,
            got_by=got.source,
        )

    for a, b in zip(left, right, strict=False):
        if (a.kind, a.step) != (b.kind, b.step):
            return difference(
                a.step, "events", f"a {a.kind} in step {a.step}", f"a {b.kind} in step {b.step}"
            )
        final = got.autoreset == "same_step" and a.kind == "step" and a.ended
        for name, was, now in (
            ("terminated", a.terminated, b.terminated),
            ("truncated", a.truncated, b.truncated),
            ("final_obs" if final else "obs", a.obs, b.obs),
            ("final_obs", a.obs, a.obs if b.successor is MISSING else b.successor),
            ("reward", np.float64(a.reward), np.float64(b.reward)),
            ("final_info" if final else "info", a.info, b.info),
        ):
            is_info = name.endswith("info")
            if is_info and ignore_infos:
                continue
            found = value_difference(was, now, same_types=not is_info)
            if found is not None:
                return difference(a.step, f"{name}{found.path}", found.expected, found.got)
    if len(left) != len(right):
        shorter = min(len(left), len(right))
        step = max(left, right, key=len)[shorter].step
        return difference(step, "events", f"{len(left)} events", f"{len(right)} events")
    return None


def mode_name(autoreset: str | AutoresetMode) -> str:
    """The name of an autoreset mode, given as a name or as Gymnasium's enum."""
    return autoreset.name.lower() if isinstance(autoreset, AutoresetMode) else autoreset
