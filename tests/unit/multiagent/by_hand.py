"""PettingZoo environments driven by hand, one at a time, and fleets of them driven the same way.

Both give for each slot a list of steps in one form, so that they can be compared. What an agent
does follows from the slot, the number of the step, the agent and its mask.
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from envfleet.testing.values import snapshot as copied
from envfleet.testing.values import value_difference


def chosen(slot, step, agent, space, mask=None, legal_rate=1.0):
    """An action of this agent; a mask is followed so often."""
    rng = np.random.default_rng([slot, step, *map(ord, str(agent))])
    is_choice = isinstance(space, spaces.Discrete) and mask is not None and mask.any()
    if is_choice and rng.random() < legal_rate:
        return int(space.start + rng.choice(np.flatnonzero(mask)))
    own = space.__class__(**_arguments(space))
    own.seed(int(rng.integers(2**31)))
    return own.sample()


def _arguments(space):
    match space:
        case spaces.Discrete():
            return {"n": space.n, "start": space.start}
        case spaces.MultiDiscrete():
            return {"nvec": space.nvec, "start": space.start}
    return {"low": space.low, "high": space.high, "dtype": space.dtype}


def seeds_of(seed):
    """The seeds of a slot's episodes."""
    generator, _ = seeding.np_random(seed)
    yield seed
    while True:
        yield int(generator.integers(2**31))


def assert_same(expected, got):
    assert len(expected) == len(got)
    for slot, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert len(one) == len(other), slot
        for step, (wanted, found) in enumerate(zip(one, other, strict=True)):
            difference = value_difference(wanted, found)
            assert difference is None, f"slot {slot}, step {step}: {difference}"


# ---- Parallel -----------------------------------------------------------------------------------


def parallel_by_hand(make, num_slots, num_steps, seed):
    return [_parallel_slot(make(), slot, num_steps, seed + slot) for slot in range(num_slots)]


def _parallel_slot(env, slot, num_steps, seed):
    seeds = seeds_of(seed)
    seen, infos = env.reset(seed=next(seeds))
    steps: list[Any] = [copied({"seen": seen, "alive": set(env.agents), "infos": _told(infos)})]
    for number in range(num_steps):
        actions = {name: chosen(slot, number, name, env.action_space(name)) for name in env.agents}
        seen, rewards, terminated, truncated, infos = env.step(actions)
        step: dict[str, Any] = {
            name: (float(rewards[name]), bool(terminated[name]), bool(truncated[name]))
            for name in seen
        }
        step = copied({"brought": step, "last": seen, "last infos": _told(infos)})
        if not env.agents:
            seen, infos = env.reset(seed=next(seeds))
            step["ended"] = True
        step |= copied({"seen": seen, "alive": set(env.agents), "infos": _told(infos)})
        steps.append(step)
    return steps


def _told(infos):
    return {name: own for name, own in infos.items() if own}


def parallel_by_fleet(vec, num_steps, seed, min_slots=None, meanwhile=lambda number: None):
    """Drive all slots, each at its own speed if `min_slots` is given."""
    vec.reset(seed=seed)
    batch = vec.last_batch
    steps: list[Any] = [[] for _ in range(vec.num_envs)]
    for row, slot in enumerate(batch.slots.tolist()):
        steps[slot].append(_parallel_row(batch, row, is_start=True))
    waiting = list(range(vec.num_envs))
    while True:
        waiting = [slot for slot in waiting if len(steps[slot]) <= num_steps]
        if waiting:
            numbers = [len(steps[slot]) - 1 for slot in waiting]
            meanwhile(max(numbers))
            vec.send(_parallel_actions(vec, waiting, numbers), waiting)
        elif all(len(one) > num_steps for one in steps):
            return steps
        batch = vec.recv(min_slots)
        waiting = batch.slots.tolist()
        for row, slot in enumerate(waiting):
            steps[slot].append(_parallel_row(batch, row))


def _parallel_actions(vec, slots, numbers):
    actions = {}
    for name in vec.agents:
        space = vec.single_action_space(name)
        actions[name] = np.stack(
            [chosen(slot, number, name, space) for slot, number in zip(slots, numbers, strict=True)]
        )
    return actions


def _parallel_row(batch, row, is_start=False):
    names = list(batch.obs)
    step: dict[str, Any] = {}
    if not is_start:
        there = [name for name in names if batch.present[name][row]]
        step["brought"] = {
            name: (
                float(batch.rewards[name][row]),
                bool(batch.terminated[name][row]),
                bool(batch.truncated[name][row]),
            )
            for name in there
        }
        absent = [name for name in names if name not in there]
        assert not any(batch.rewards[name][row] for name in absent)
        assert not any(batch.terminated[name][row] for name in absent)
        assert not any(batch.truncated[name][row] for name in absent)
        step["last"] = {name: at(batch.final_obs[name], row) for name in there}
        if batch.ended[row]:
            step["ended"] = True
        step["last infos"] = told_at(batch.final_infos if batch.ended[row] else batch.infos, row)
    alive = {name for name in names if batch.alive[name][row]}
    shown = [
        name
        for name in names
        if name in alive or (not is_start and not batch.ended[row] and batch.present[name][row])
    ]
    step["seen"] = {name: at(batch.obs[name], row) for name in shown}
    return copied(step | {"alive": alive, "infos": told_at(batch.infos, row)})


def at(tree, row):
    if isinstance(tree, dict):
        return {key: at(part, row) for key, part in tree.items()}
    return tree[row]


def told_at(infos, row):
    """What the agents of one row were told."""
    found = {}
    for name, own in infos.items():
        if not isinstance(own, dict):
            continue
        keys = [key for key in own if not key.startswith("_") and own[f"_{key}"][row]]
        if keys:
            found[name] = {key: own[key][row].item() for key in keys}
    return found


# ---- AEC ----------------------------------------------------------------------------------------


def mask_in(seen, info, space):
    """What is allowed; without a mask all numbered actions are."""
    mask = seen.get("action_mask") if isinstance(seen, dict) else info.get("action_mask")
    if mask is None and isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return np.ones(np.sum(space.n if isinstance(space, spaces.Discrete) else space.nvec), bool)
    return None if mask is None else np.asarray(mask).astype(bool)


def turns_by_hand(make, num_slots, num_steps, seed, legal_rate=1.0):
    return [
        _turns_slot(make(), slot, num_steps, seed + slot, legal_rate) for slot in range(num_slots)
    ]


def _turns_slot(env, slot, num_steps, seed, legal_rate):
    seeds = seeds_of(seed)
    env.reset(seed=next(seeds))
    steps: list[Any] = []
    brought: dict[Any, Any] = {}
    last: dict[Any, Any] = {}
    has_ended = False
    while len(steps) <= num_steps:
        if not env.agents:
            env.reset(seed=next(seeds))
            has_ended = True
        agent = env.agent_selection
        seen, reward, terminated, truncated, info = env.last()
        if terminated or truncated:
            brought[agent] = (float(reward), bool(terminated), bool(truncated))
            last[agent] = copied(seen)
            env.step(None)
            continue
        if not has_ended and steps:
            brought[agent] = (float(reward), False, False)
            last[agent] = copied(seen)
        step = {
            "turn": agent,
            "seen": seen,
            "reward": float(reward),
            "mask": mask_in(seen, info, env.action_space(agent)),
            "alive": {n for n in env.agents if not (env.terminations[n] or env.truncations[n])},
            "brought": brought,
            "last": last,
            "ended": has_ended,
        }
        steps.append(copied(step))
        brought, last, has_ended = {}, {}, False
        space = env.action_space(agent)
        env.step(chosen(slot, len(steps) - 1, agent, space, step["mask"], legal_rate))
    return steps


def turns_by_fleet(
    vec, num_steps, seed, legal_rate=1.0, min_slots=None, meanwhile=lambda number: None
):
    batch = vec.reset(seed=seed)
    steps: list[Any] = [[] for _ in range(vec.num_envs)]
    masks: dict[int, Any] = {}
    while True:
        waiting = []
        for row, slot in enumerate(batch.slots.tolist()):
            steps[slot].append(_turn_row(batch, row, is_start=not steps[slot]))
            masks[slot] = steps[slot][-1]["mask"]
            if len(steps[slot]) <= num_steps:
                waiting.append(slot)
        if waiting:
            meanwhile(max(len(steps[slot]) for slot in waiting))
            actions = [
                chosen(
                    slot,
                    len(steps[slot]) - 1,
                    agent := steps[slot][-1]["turn"],
                    vec.single_action_space(agent),
                    masks[slot],
                    legal_rate,
                )
                for slot in waiting
            ]
            vec.send(actions, waiting)
        elif all(len(one) > num_steps for one in steps):
            return steps
        batch = vec.recv(min_slots)


def _turn_row(batch, row, is_start):
    agent = batch.agents[row]
    place = batch.rows_of(agent).tolist().index(row)
    masks = batch.masks_of(agent)
    step: dict[str, Any] = {
        "turn": agent,
        "seen": at(batch.obs_of(agent), place),
        "reward": float(batch.rewards[row]),
        "mask": None if masks is None else masks[place],
        "alive": set(),
        "brought": {},
        "last": {},
        "ended": bool(batch.ended[row]),
    }
    for number, name in enumerate(batch.infos):
        if number >= batch.all_alive.shape[1]:
            break
        if batch.all_alive[row, number]:
            step["alive"].add(name)
        if batch.all_present[row, number] and not is_start:
            step["brought"][name] = (
                float(batch.all_rewards[row, number]),
                bool(batch.all_terminated[row, number]),
                bool(batch.all_truncated[row, number]),
            )
            step["last"][name] = at(batch.final_obs_of(name), row)
    return copied(step)
