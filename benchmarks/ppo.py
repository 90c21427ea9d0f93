"""Measure what PPO on a fleet learns, and how fast.

    python benchmarks/ppo.py --jobs 2                          the whole table, hours
    python benchmarks/ppo.py --quick                           a few minutes: does everything run?
    python benchmarks/ppo.py --rows hopper --seeds 3 --jobs 2  some rows, fewer seeds
    python benchmarks/ppo.py --json results.json --write docs/ppo.md
    python benchmarks/ppo.py --from results.json --write docs/ppo.md     fill in, measure nothing
    python benchmarks/ppo.py --from results.json --rows cartpole-speed --json results.json

**Rows that learn** train with the recipe of their environment, once for each of the seeds 0, 1, ...
Each run has its own process. The last policy counts, not the best one. It plays 20 episodes with
its most likely actions, on seeds that training does not use.

**Rows of speed** divide environment steps by the wall time of whole iterations, collecting and
learning. Both sides use the same environments and hyper-parameters. There is no evaluation, no
checkpoint and no log, and the first iteration does not count. In every round, each contender runs
for one slice, in an order that rotates. The table shows the median of the ratios within rounds.

**What the trainer adds** is `(wall - fleet - acting - learning) / wall`, where

- wall is the time of whole iterations: collect a rollout, then learn from it;
- fleet is the time that the same fleet takes for the same steps with the same actions, after its
  state was restored. The actions are prepared. All slots step together or in two halves; the
  faster way counts;
- acting is the time that the policy takes to choose actions for the same observations, step by
  step, and to evaluate all of them at once. The observations are prepared as tensors;
- learning is the time of the same number of minibatch updates on prepared minibatches.

The rest is the trainer's own work: normalising, storing, converting, counting episodes, estimating
values of truncated episodes, advantages, shuffling, gathering, figures. Acting for one half of the
slots while the other half steps saves wall time, and the trainer gets the credit for that.

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
        name="ppo",
        about="What PPO on a fleet learns, and how fast, against published figures and SB3.",
        full=Pace(rounds=16, seconds=2.0, seeds=5),
        quick=Pace(rounds=2, seconds=0.5, part=0.001),
        learns=True,
    )
    return run_suite(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
