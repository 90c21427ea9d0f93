"""The rows of cluster.py's table: nodes that wait, that compute, and that are killed."""

from __future__ import annotations

import threading
import time

from benchmarks.cluster_contenders import WAITER, Collecting, LocalCluster, grow, on_nodes
from benchmarks.peer_rllib import RLlib
from benchmarks.rounds import Outcome, Pace, Rounds, Row
from benchmarks.tables import Entry, Line, Target
from benchmarks.workload import timed
from envfleet.observe.progress import Progress

NEARLY = 0.95
"""A rate counts as reached from here on: three quarters are what three of four nodes can do."""
ALIVE_S = 30.0
"""So long it is waited for the rate to come back."""


def waiting(pace: Pace, progress: Progress, title: str) -> Outcome:
    """64 slots that wait 20 ms per step, on 1, 2 and 4 nodes of one worker each."""
    slots, rates = 64, {}
    cluster = LocalCluster(1)
    try:
        with on_nodes(cluster, WAITER, slots, 4) as trainer:
            for nodes in (1, 2, 4):
                grow(cluster, trainer, nodes)
                rates[nodes] = [
                    timed(lambda: trainer.collect().rewards.size, pace.seconds).rate
                    for _ in range(pace.rounds)
                ]
    finally:
        cluster.close()
    work = f"{slots} envs that wait 20 ms per step"
    lines = []
    for nodes, least in ((2, 0.95), (4, 0.95)):
        pairs = zip(rates[nodes], rates[1], strict=True)
        shares = tuple(many / nodes / one for many, one in pairs)
        against = f"{nodes} times the rate of 1 node"
        value = sorted(shares)[len(shares) // 2]
        lines.append(Line(f"{work}, {nodes} nodes", against, Target(least), (value,), (shares,)))
    found = [
        Entry(work, f"{nodes} node{'s' * (nodes > 1)}", tuple(each))
        for nodes, each in rates.items()
    ]
    return Outcome(lines, found)


def ant(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Ant on two nodes of one core, against two worker processes."""
    size = "Ant-v5", 16, 128
    work = "Ant-v5, 16 envs x 128 steps, collecting"
    own = Collecting("nodes", "--collect node, two nodes of one core", *size, nodes=2)
    other = Collecting("process", "the process backend, 2 workers", *size)
    rounds = Rounds(work, [own, other], pace, progress, title)
    line = rounds.line(work, "the process backend, 2 workers", 0.85, own.key, other.key)
    return Outcome([line], rounds.entries())


def rllib_ant(pace: Pace, progress: Progress, title: str) -> Outcome:
    """Ant against RLlib."""
    return _against_rllib("Ant-v5", 16, 128, 1.5, pace, progress, title)


def rllib_cartpole(pace: Pace, progress: Progress, title: str) -> Outcome:
    """CartPole against RLlib."""
    return _against_rllib("CartPole-v1", 64, 128, 2.0, pace, progress, title)


def _against_rllib(
    env: str,
    num_envs: int,
    n_steps: int,
    target: float,
    pace: Pace,
    progress: Progress,
    title: str,
) -> Outcome:
    work = f"{env}, {num_envs} envs x {n_steps} steps, collecting on two nodes"
    label = "--collect node, two nodes of one core"
    own = Collecting("nodes", label, env, num_envs, n_steps, nodes=2)
    other = RLlib(env, num_envs, n_steps)
    rounds = Rounds(work, [own, other], pace, progress, title)
    line = rounds.line(work, "RLlib EnvRunners", target, own.key, other.key)
    return Outcome([line], rounds.entries())


def kill(pace: Pace, progress: Progress, title: str) -> Outcome:
    """One of four nodes is killed in the middle of an iteration."""
    slots, n_steps, cluster = 48, 2, LocalCluster(4)
    try:
        with on_nodes(cluster, WAITER, slots, n_steps) as trainer:
            before = timed(lambda: trainer.collect().rewards.size, pace.seconds).rate
            killed_s: list[float] = []

            def end_one() -> None:
                killed_s.append(time.perf_counter())
                cluster.kill()

            timer = threading.Timer(0.2, end_one)
            timer.start()
            counted, collected = trainer.env_steps, 0
            limit_s = time.perf_counter() + ALIVE_S
            while time.perf_counter() < limit_s:
                begun_s = time.perf_counter()
                collected += trainer.collect().rewards.size
                rate = slots * n_steps / (time.perf_counter() - begun_s)
                if killed_s and begun_s > killed_s[0] and rate >= NEARLY * 3 / 4 * before:
                    break
            timer.join()
            seconds = begun_s - killed_s[0]
            is_exact = trainer.env_steps - counted == collected
            why = [str(event) for event in trainer.envs.events if event.kind != "joined"]
    finally:
        cluster.close()
    work = f"{slots} envs that wait 20 ms per step, one of 4 nodes killed"
    failure = None if is_exact else "steps were lost or counted twice"
    target = Target(5_000.0, "ms", is_ceiling=True)
    value = (seconds * 1_000,)
    line = Line(work, "until 3/4 of the rate are back", target, value, (), failure)
    return Outcome([line], [Entry(work, "before", (before,)), Entry(work, "after", (rate,))], why)


ROWS: dict[str, Row] = {
    "waiting": waiting,
    "ant": ant,
    "rllib-ant": rllib_ant,
    "rllib-cartpole": rllib_cartpole,
    "kill": kill,
}
