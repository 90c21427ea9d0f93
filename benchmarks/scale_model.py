"""Predict how fast `--collect node` is on n nodes, from what was measured on one.

    python benchmarks/scale_model.py --measure        real runs with 1, 2 and 4 nodes beside it
    python benchmarks/scale_model.py                  a table for 1 to 1,000 nodes, of typical costs

One iteration is played through, piece by piece:

    driver   put weights, send n tasks one after another ─┐          ┌─ take in n results, one after
    network                                                └► tasks   │  another, join, learn
    nodes                                  step, act, step, act ... ──┘

The driver does one thing at a time, and all bytes pass through its network. Nodes work side by
side, each as fast as its slots and cores allow. Which part the iteration spends its time in says
what stops it from getting faster.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, its parent is not

NODES = (1, 10, 100, 1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured, in seconds and bytes."""

    env_s: float
    """One step of one environment on one core."""
    act_s: float
    """One step of all slots of a node, beside its environments: the policy and keeping the rows."""
    piece_s: float
    """What the driver does for one piece, without its bytes: send the task, take in the result."""
    round_trip_s: float
    """From sending a piece to its result, when there is nothing to do."""
    step_bytes: float
    """One step of one slot in a result."""
    slot_bytes: float
    """One slot's state, which goes out and comes back once per iteration."""
    weights_bytes: float
    byte_s: float
    """One byte through the driver: network, object store, and joining the arrays."""
    row_s: float = 0.0
    """What the driver does with one step afterwards: judging it and learning from it."""
    spread: float = 0.0
    """How much longer the slowest of ten nodes takes than the mean, as a part of it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One iteration."""

    nodes: int
    steps: int
    """Of all slots together."""
    seconds: float
    stepping_s: float
    """Until the slowest node was done, from its first step on."""
    learning_s: float

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.steps / self.seconds

    @property
    def driver_s(self) -> float:
        """What was neither stepping nor learning: the driver and the way to it."""
        return self.seconds - self.stepping_s - self.learning_s


def predict(costs: Costs, *, nodes: int, cores: int, slots: int, n_steps: int) -> Prediction:
    """Play one iteration through; the slots are dealt evenly."""
    each, more = divmod(slots, nodes)
    # the weights are read from the driver by a few nodes, and from those by the others
    hops = math.ceil(math.log2(nodes + 1))
    now_s = costs.weights_bytes * costs.byte_s * hops
    done_s, stepping_s = [], 0.0
    for node in range(nodes):
        mine = each + (node < more)
        if not mine:
            continue
        now_s += costs.piece_s / 2 + mine * costs.slot_bytes * costs.byte_s
        step_s = math.ceil(mine / min(cores, mine)) * costs.env_s + costs.act_s
        # of n nodes the slowest is further off the larger n is
        share = math.log10(nodes) if node == 0 else 0.0
        work_s = n_steps * step_s * (1 + costs.spread * share)
        stepping_s = max(stepping_s, work_s)
        done_s.append((now_s + costs.round_trip_s + work_s, mine))
    for ready_s, mine in sorted(done_s):
        size = mine * (n_steps * costs.step_bytes + costs.slot_bytes)
        now_s = max(now_s, ready_s) + costs.piece_s / 2 + size * costs.byte_s
    learning_s = slots * n_steps * costs.row_s
    return Prediction(nodes, slots * n_steps, now_s + learning_s, stepping_s, learning_s)


def stepwise_rate(costs: Costs, *, nodes: int, cores: int, slots: int) -> float:
    """Steps per second where every step goes over the network and back (`backend="ray"`)."""
    mine = math.ceil(slots / nodes)
    way_s = costs.round_trip_s + nodes * costs.piece_s + slots * costs.step_bytes * costs.byte_s
    return slots / (math.ceil(mine / min(cores, mine)) * costs.env_s + costs.act_s + way_s)


TYPICAL = Costs(
    env_s=50e-6,
    act_s=100e-6,
    piece_s=1e-3,
    round_trip_s=3e-3,
    step_bytes=500.0,
    slot_bytes=20e3,
    weights_bytes=200e3,
    byte_s=1 / 1e9,
    spread=0.05,
)
"""Ant-v5 with a small network, over 10 Gbit/s."""


def table(costs: Costs, *, cores: int, slots_per_node: int, n_steps: int) -> list[str]:
    """How it scales if every node brings its own slots."""
    one = predict(costs, nodes=1, cores=cores, slots=slots_per_node, n_steps=n_steps)
    lines = ["| nodes | slots | steps/s | efficiency | driver | stepwise steps/s |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for nodes in NODES:
        slots = nodes * slots_per_node
        found = predict(costs, nodes=nodes, cores=cores, slots=slots, n_steps=n_steps)
        step = stepwise_rate(costs, nodes=nodes, cores=cores, slots=slots)
        efficiency = found.rate / nodes / one.rate
        lines.append(
            f"| {nodes:,} | {slots:,} | {found.rate:,.0f} | {efficiency:.2f} | "
            f"{found.driver_s / found.seconds:.0%} | {step:,.0f} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print tables; with --measure the exit code is 1 if a prediction is more than 15 % off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="compare with real runs here")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each real run")
    given = parser.parse_args(arguments)
    say = sys.stdout.write
    if given.measure:
        from benchmarks.cluster_contenders import measured_and_predicted

        worst = 0.0
        for nodes, real, predicted in measured_and_predicted(given.seconds):
            off = predicted / real - 1
            worst = max(worst, abs(off))
            say(f"{nodes} nodes: {real:,.0f} steps/s measured, {predicted:,.0f} predicted, ")
            say(f"{off:+.1%}\n")
        return int(worst > 0.15)
    for name, costs, slots in (
        ("Ant-v5 (50 us per step), 1,000 slots per node", TYPICAL, 1_000),
        ("the same, with 10 us per row for learning", replace(TYPICAL, row_s=10e-6), 1_000),
        ("5 ms per step, 160 slots per node", replace(TYPICAL, env_s=5e-3), 160),
    ):
        say(f"{name}; 16 cores per node, segments of 128 steps, 1 GB/s\n\n")
        say("\n".join(table(costs, cores=16, slots_per_node=slots, n_steps=128)) + "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
