"""What PPO on the fleet learns, and how fast, from one command.

    python benchmarks/ppo.py --jobs 2                          the whole table, hours
    python benchmarks/ppo.py --quick                           some minutes: does everything run?
    python benchmarks/ppo.py --rows hopper --seeds 3 --jobs 2  some rows, fewer seeds
    python benchmarks/ppo.py --json results.json --write docs/ppo.md
    python benchmarks/ppo.py --from results.json --write docs/ppo.md     fills in, measures nothing
    python benchmarks/ppo.py --from results.json --rows cartpole-speed --json results.json

**Rows that learn** train by the recipe of their environment, once for each of the seeds 0, 1, ...
Each run is a process of its own. The last policy counts, not the best one: 20 episodes by its
likeliest actions, on the seeds that no training uses.

**Rows of speed** count environment steps over the wall time of whole iterations, collecting and
learning, with the same environments and hyper-parameters on both sides: without evaluation,
checkpoints and logs, after a first iteration that does not count. In every round each contender
runs one slice, in an order that rotates; ratios are taken within a round, and their median counts.

**What the trainer adds** is `(wall - fleet - acting - learning) / wall`, where

- wall is the time of whole iterations, from asking for a rollout until the policy has learned it;
- fleet is the time in which the same fleet, put back to where it was, makes the same steps with the
  same actions, which now lie ready: all slots at a time or in two halves, whichever is faster;
- acting is the time the policy takes to choose actions for the same observations, step by step, and
  to judge all of them at once; they now lie ready as tensors;
- learning is the time of the same number of minibatch steps, gradients and the optimiser, on
  minibatches that lie ready.

What is left is the trainer's own: normalising, storing, conversions, counting episodes, values of
cut-off episodes, advantages, shuffling, gathering, figures. What it hides by acting for one half of
the slots while the other steps counts for it.

The exit code is 1 if a floor is missed, unless --quick.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run as a script, Python looks in benchmarks/ only


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, show, and say whether every floor holds."""
    from benchmarks import command
    from benchmarks.outcome import Pace

    suite = command.Suite(
        name="ppo",
        about="What PPO on the fleet learns, and how fast, against published figures and SB3.",
        full=Pace(rounds=16, seconds=2.0, seeds=5),
        quick=Pace(rounds=2, seconds=0.5, part=0.001),
        learns=True,
    )
    return command.main(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
