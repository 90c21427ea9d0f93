"""Measure how fast trials are collected on the fleet, and what meta-RL learns.

    python benchmarks/meta.py                                  the whole table, hours
    python benchmarks/meta.py --quick                          a minute: does everything run?
    python benchmarks/meta.py --rows ant-dir,point-robot       some rows
    python benchmarks/meta.py --rows point-robot-rl2 --seeds 3 --jobs 2
    python benchmarks/meta.py --json results.json --write docs/meta-rl.md
    python benchmarks/meta.py --from results.json --write docs/meta-rl.md    measure nothing
    python benchmarks/meta.py --from one.json two.json --json results.json   as one

**Rows of speed** call `collect_rollouts_parallel` and `collect_rollouts` of one Learner with a GRU
of 128 units. Each slice collects whole rollouts with the agent's own actions, three per slot in a
call. In every round, each contender runs for one slice, in an order that rotates. The table shows
the median of the ratios within rounds. The row against pomdp-baselines needs an interpreter of its
own: `peer_pomdp.py` says how.

**Rows that learn** train by a preset, once for each of the seeds 0, 1, ..., each in a process of
its own. The last policy counts. It plays one trial of each evaluation task with its best actions.
Returns are scaled: 0 is what random actions get, 1 is what an agent gets that knows the task. The
rows wind-returns and half-cheetah-vel-returns say how far agents with a memory end above one
without, after as many steps.

The exit code is 1 if a target is missed, unless --quick was given.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, its parent is not


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the tables, and return 1 if a target is missed."""
    from benchmarks.rounds import Pace
    from benchmarks.suite import Suite, run_suite

    suite = Suite(
        name="meta",
        about="Collecting trials on the fleet, and what meta-RL learns from them.",
        full=Pace(rounds=10, seconds=1.0, seeds=3),
        quick=Pace(rounds=1, seconds=0.05, part=0.01),
        learns=True,
        rates="meta_rates",
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
