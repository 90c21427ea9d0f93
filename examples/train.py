"""Collect what a trainer of language models needs, iteration by iteration.

    python train.py --config-name base-parallel
    python train.py --config-name base-parallel llm.base_url=http://localhost:8000/v1 llm.model=NAME

Every iteration plays one rollout and works out the advantage of each trajectory in its group, which
is what GRPO and its relatives learn from. No weights are changed here and no GPU is needed: hand
`batch` to your trainer, and let it load the new weights into the server. docs/llm-rollouts.md says
more. llm.engine=scripted tries it without a model.
"""

import argparse
from statistics import mean

from envfleet.llm import ParallelRolloutManager, SharedLLMInferenceManager, load_config
from envfleet.llm.export import advantages_of


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", default="base-parallel")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    config = load_config(args.config_name, args.changes)
    with (
        SharedLLMInferenceManager.from_config(config) as llm,
        ParallelRolloutManager(config, llm) as manager,
    ):
        for iteration in range(1, args.iterations + 1):
            result = manager.rollout()
            batch = advantages_of(result.trajectories)  # None for those to be left out
            rewards = [one.total_reward for one in result.trajectories]
            print(
                f"iteration {iteration}: {len(rewards)} trajectories from seed {result.seed}, "
                f"mean reward {mean(rewards):.3f}, {sum(map(bool, batch))} with an "
                f"advantage, {result.timings.wall_s:.1f} s by {result.backend}"
            )
            if result.fallback:
                print(f"  fallback: {result.fallback}")
        print(result.verdict)


if __name__ == "__main__":
    main()
