"""``envfleet verify train``: does training give the same bits on every backend?

Two runs with one seed go side by side: one in this process, one in worker processes. After every
rollout all experience is compared, after every update all parameters. Law: the first difference is
named by iteration, step, slot and field (and by agent, if there are several, whose steps are its
own turns), or by the parameter's name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from envfleet.adapters.names import label
from envfleet.cli.command import Context
from envfleet.cli.report import Block, Heading, Report, Table, Text
from envfleet.cli.train_args import TrainArgs, add_train_flags, read_train_args
from envfleet.learn.environments import opened
from envfleet.learn.ppo import PPOTrainer
from envfleet.learn.train_options import TrainOptions
from envfleet.observe.progress import ProgressBar
from envfleet.testing.values import value_difference

Array: TypeAlias = npt.NDArray[Any]

ITERATIONS = 5
"""Unless another length is asked for."""
WORKERS = 3
"""Unless another number is asked for: it divides few numbers of environments."""
LOOKS_AHEAD = frozenset({"successors", "advantages", "returns"})
"""Fields whose rows depend on later rows: they differ before the cause does."""
FROM_ENVIRONMENTS = frozenset({"obs", "rewards", "terminated", "truncated", "ended", "valid"})

_EPILOG = """\
examples:
  envfleet verify train --env CartPole-v1
  envfleet verify train --env my_package:MyEnv --num-episodes 20
  envfleet verify train --config run.yaml --num-workers 4

Takes the flags of `envfleet train`. One run has its environments in this process; for the other
--backend, --num-workers and --parallel-start-method say what runs them (3 worker processes, started
by spawn). Each makes 5 iterations unless --num-episodes or --total-steps say otherwise; nothing is
saved. The exit code is 1 when anything differs.
"""


@dataclass(frozen=True, slots=True)
class TrainDifference:
    """The first thing that differs between two runs."""

    iteration: int
    """From 1; 0 is before the first."""
    field: str
    expected: Any
    got: Any
    step: int | None = None
    """Within the iteration, from 0; None for what has no steps."""
    slot: int | None = None
    agent: Any = None
    """Whose row it is, if there are several agents."""

    @property
    def place(self) -> str:
        """Where it is."""
        where = (
            "before the first iteration" if not self.iteration else f"iteration {self.iteration}"
        )
        if self.step is not None:
            where += f", step {self.step}, slot {self.slot}"
        return where if self.agent is None else f"{where}, {self.agent}"


@dataclass(frozen=True, slots=True)
class Compared:
    """How much was compared."""

    iterations: int
    transitions: int
    fields: tuple[str, ...]
    """Of every transition."""
    parameters: int
    """Numbers that make up the policy, and its statistics."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verify train``."""
    parser.description = (
        "Train twice with one seed, once in this process and once in worker processes, and compare "
        "every transition and every parameter."
    )
    parser.usage = "envfleet verify train --env ENV [option of train ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "--env", metavar="ENV", default=argparse.SUPPRESS, help="what to train on, as for train"
    )
    add_train_flags(parser)


def run(args: argparse.Namespace, context: Context) -> Report:
    """Train twice and compare."""
    asked = read_train_args(args)
    reference, other = runs_of(asked)
    iterations = other.iterations(asked.ppo)
    with (
        context.progress.bar("verify train", iterations) as bar,
        _trainer(reference, asked) as one,
        _trainer(other, asked) as two,
    ):
        difference, compared = side_by_side(one, two, iterations, bar)
        fleets = [one.envs, two.envs] if asked.agents is None else [one.vec, two.vec]
        incidents = sum(len(fleet.incidents) for fleet in fleets)
    return _train_report(reference, other, difference, compared, incidents)


def _trainer(options: TrainOptions, asked: TrainArgs) -> AbstractContextManager[Any]:
    """A trainer for one agent or for several, on environments of its own."""
    return opened(options, asked.ppo) if asked.agents is None else _of_agents(options, asked)


@contextmanager
def _of_agents(options: TrainOptions, asked: TrainArgs) -> Iterator[Any]:
    from envfleet.multiagent.agent_environments import opened_agents  # needs PettingZoo

    assert asked.agents is not None
    with opened_agents(options, asked.agents, asked.ppo) as (_, trainer):
        yield trainer


def runs_of(asked: TrainArgs) -> tuple[TrainOptions, TrainOptions]:
    """The run in this process, and the one that has to equal it."""
    options = asked.options
    if not asked.said & {"num_episodes", "total_steps"}:
        options = replace(options, num_episodes=ITERATIONS)
    reference = replace(
        options,
        backend="serial",
        num_workers=None,
        parallel_start_method=None,
        step_timeout_s=None,  # nothing can be given up in this process
        reset_timeout_s=None,
    )
    if options.backend == "serial":
        return reference, reference
    other = replace(
        options,
        backend="process" if options.backend == "auto" else options.backend,
        num_workers=options.num_workers or min(WORKERS, options.n_envs),
        parallel_start_method=options.parallel_start_method or "spawn",
    )
    return reference, other


def side_by_side(
    one: Any, two: Any, iterations: int, bar: ProgressBar
) -> tuple[TrainDifference | None, Compared]:
    """Iterate both trainers, of one agent or of several, until something differs."""
    names: tuple[str, ...] = ()
    transitions = 0
    difference = state_difference(_policies(one), _policies(two), 0)
    number = 0
    while difference is None and number < iterations:
        progress = number / iterations
        number += 1
        rollouts = one.collect(), two.collect()
        difference = _experience_difference(*rollouts, one, number)
        if difference is None:
            made = list(_by_group(rollouts[0]).values())
            names = _state_fields(made[0])
            transitions += sum(int(rollout.valid.sum()) for rollout in made)
            one.learn(rollouts[0], progress)
            two.learn(rollouts[1], progress)
            difference = state_difference(_policies(one), _policies(two), number)
        bar.advance()
    parameters = sum(array.size for _, array in _arrays("", _policies(one)))
    return difference, Compared(number, transitions, names, parameters)


def _policies(trainer: Any) -> Any:
    """The state of the policy, or of each group's if there are several."""
    if isinstance(trainer, PPOTrainer):
        return trainer.agent.state()
    states = {str(name): agent.state() for name, agent in trainer.agents.items()}
    return states if len(states) > 1 else next(iter(states.values()))


def _by_group(rollout: Any) -> Mapping[Any, Any]:
    return rollout if isinstance(rollout, Mapping) else {None: rollout}


def _experience_difference(
    expected: Any, got: Any, trainer: Any, iteration: int
) -> TrainDifference | None:
    """The earliest difference; where there are several agents, in the rows of one of them."""
    found = []
    others = _by_group(got)
    for number, (group, rollout) in enumerate(_by_group(expected).items()):
        difference = rollout_difference(rollout, others[group], iteration)
        if difference is None:
            continue
        if group is not None and difference.slot is not None:
            agents = trainer.vec.layout.groups[number].agents
            slot, place = divmod(difference.slot, len(agents))
            difference = replace(difference, slot=slot, agent=agents[place])
        found.append(difference)
    # what has no step comes last: it follows from what has one
    return min(found, key=lambda one: (one.step is None, one.step or 0), default=None)


# ---- comparing ----------------------------------------------------------------------------------


def rollout_difference(expected: Any, got: Any, iteration: int) -> TrainDifference | None:
    """Where two rollouts first differ: by time, then by slot, then in the order of their fields."""
    # agents that act in turn may have made more rows in one run than in the other
    shape = (min(len(expected.rewards), len(got.rewards)), *np.shape(expected.rewards)[1:])
    first: tuple[tuple[bool, int, int, int], TrainDifference] | None = None
    for order, (name, left, right) in enumerate(_state_pairs(expected, got)):
        is_by_row = left.shape[:2] == np.shape(expected.rewards)
        if is_by_row and right.shape[:2] == np.shape(got.rewards):
            left, right = left[: shape[0]], right[: shape[0]]
        if left.shape != right.shape or left.dtype != right.dtype:
            kinds = f"{left.dtype}{list(left.shape)}", f"{right.dtype}{list(right.shape)}"
            return TrainDifference(iteration, name, *kinds)
        if not is_by_row:
            continue  # has no rows of its own: compared below, with the rest
        unequal = _unequal(left, right).reshape(*shape, -1).any(axis=2)
        if unequal.any():
            step, slot = map(int, np.argwhere(unequal)[0])
            rank = (name.partition(".")[0] in LOOKS_AHEAD, step, slot, order)
            if first is None or rank < first[0]:
                at = (step, slot)
                first = rank, TrainDifference(iteration, name, left[at], right[at], step, slot)
    if first is not None:
        return first[1]
    return state_difference(_plain_train_state(expected), _plain_train_state(got), iteration)


def state_difference(expected: Any, got: Any, iteration: int) -> TrainDifference | None:
    """Where two states first differ, in their own order: mappings, lists, arrays, tensors."""
    found = value_difference(_plain_train_state(expected), _plain_train_state(got))
    if found is None:
        return None
    # ['policy']['actor.0.weight'][3, 2] reads better as policy.actor.0.weight[3, 2]
    name = re.sub(r"\['([^']*)'\]", r".\1", found.path).lstrip(".")
    return TrainDifference(iteration, name, found.expected, found.got)


def _plain_train_state(value: Any) -> Any:
    """A value of mappings, lists and arrays alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain_train_state(getattr(value, field.name)) for field in fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain_train_state(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_train_state(part) for part in value]
    return value


def _arrays(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    """Every array in a value, with its name."""
    value = _plain_train_state(value)
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _arrays(f"{name}.{key}".lstrip("."), part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _arrays(name if len(value) == 1 else f"{name}.{number}", part)


def _state_pairs(expected: Any, got: Any) -> Iterator[tuple[str, Array, Array]]:
    """The arrays that both have."""
    others = dict(_arrays("", got))
    for name, array in _arrays("", expected):
        if name in others:
            yield name, array, others[name]


def _unequal(left: Array, right: Array) -> Array:
    """Which elements differ in any bit; NaN equals NaN."""
    if left.dtype.hasobject:
        return np.asarray(left != right)
    bits = [np.ascontiguousarray(one).reshape(-1, 1).view(np.uint8) for one in (left, right)]
    return np.asarray((bits[0] != bits[1]).any(axis=1).reshape(left.shape))


def _state_fields(rollout: Any) -> tuple[str, ...]:
    """The names of what every transition has."""
    shape = np.shape(rollout.rewards)
    return tuple(name for name, array in _arrays("", rollout) if array.shape[:2] == shape)


# ---- telling ------------------------------------------------------------------------------------


def train_conclusion(
    difference: TrainDifference | None, compared: Compared, one: TrainOptions, two: TrainOptions
) -> str:
    """The result in one sentence; after a difference, another on where to look."""
    where = [_where(options) for options in (one, two)]
    if difference is None:
        return (
            f"Equal, bit by bit, {where[0]} and {where[1]}: {compared.transitions:,} transitions "
            f"of {one.n_envs} environment{'' if one.n_envs == 1 else 's'} "
            f"({', '.join(compared.fields)}) and {compared.parameters:,} parameters after each of "
            f"{compared.iterations} updates."
        )
    values = [" ".join(str(value).split()) for value in (difference.expected, difference.got)]
    place = f"{'in ' if difference.iteration else ''}{difference.place}"
    return (
        f"They differ {place}: {difference.field} is "
        f"{values[0]} {where[0]} and {values[1]} {where[1]}. {_cause(difference, one.env)}"
    )


def _cause(difference: TrainDifference, env: str) -> str:
    if difference.step is None:
        return "The experience was equal, so the cause lies in the learner: threads, or a GPU."
    if difference.field.partition(".")[0] in FROM_ENVIRONMENTS:
        if difference.agent is not None:
            return "That comes from the environment: something in it follows from no seed."
        return f"That comes from the environment; look closer with: envfleet verify {env}"
    return "The observations were equal, so the cause lies in the networks: threads, or a GPU."


def _where(options: TrainOptions) -> str:
    if options.backend == "serial":
        return "in this process"
    if options.backend == "thread":
        return f"in {options.num_workers} threads"
    many = "" if options.num_workers == 1 else "es"
    return f"in {options.num_workers} worker process{many} ({options.parallel_start_method})"


def _train_report(
    one: TrainOptions,
    two: TrainOptions,
    difference: TrainDifference | None,
    compared: Compared,
    incidents: int,
) -> Report:
    conclusion = train_conclusion(difference, compared, one, two)
    document: dict[str, Any] = {
        "env": one.env,
        "n_envs": one.n_envs,
        "seed": one.seed,
        "equal": difference is None,
        "parting": None if difference is None else _train_json(difference),
        "compared": asdict(compared),
        "runs": [
            {
                "backend": options.backend,
                "num_workers": options.num_workers,
                "start_method": options.parallel_start_method,
            }
            for options in (one, two)
        ],
        "incidents": incidents,
        "conclusion": conclusion,
    }
    blocks: list[Block] = [
        Heading(f"{label(one.env)}: training with seed {one.seed}, twice"),
        _train_table((one, two), compared),
    ]
    if incidents:
        blocks.append(Text(f"{incidents} environments failed on the way.", "warn"))
    blocks.append(Text(conclusion, "ok" if difference is None else "bad"))
    return Report(ok=difference is None, document=document, blocks=tuple(blocks))


def _train_json(difference: TrainDifference) -> dict[str, Any]:
    """For scripts; the values as text, because they may be anything."""
    values = {"expected": repr(difference.expected)[:500], "got": repr(difference.got)[:500]}
    places = {name: getattr(difference, name) for name in ("iteration", "step", "slot")}
    if difference.agent is not None:
        places["agent"] = str(difference.agent)
    return places | {"field": difference.field} | values


def _train_table(runs: Sequence[TrainOptions], compared: Compared) -> Table:
    rows = [
        (
            options.backend,
            options.parallel_start_method or "",
            str(options.num_workers or 1),
            str(options.n_envs),
            str(compared.iterations),
        )
        for options in runs
    ]
    return Table(
        columns=("backend", "start", "workers", "envs", "iterations"),
        rows=tuple(rows),
        right=frozenset({"workers", "envs", "iterations"}),
    )
