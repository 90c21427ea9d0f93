"""Does a parallel rollout give the same as a sequential one, and how long do they take?

    python test_parallel_rollout.py --config-name base-parallel
    python test_parallel_rollout.py --config-name mixed agent_proxy.parallel_backend=fleet

A script answers in place of a model, so that two rollouts can be compared bit by bit; its answers
take as long as those of a model would, on a smaller scale. Workers are started before the time is
taken. In the last rollout requests fail on purpose. Ends with exit code 1 if anything differs.
"""

import argparse

from envfleet.errors import InferenceError
from envfleet.llm import ParallelRolloutManager, SharedLLMInferenceManager, load_config
from envfleet.llm.inference.options import InferenceOptions
from envfleet.llm.inference.scripted import LognormalLatency, ScriptedEngine
from envfleet.llm.same_trajectories import trajectory_difference

__test__ = False  # a script for people: pytest has nothing to collect here


class FailingEngine(ScriptedEngine):
    """Refuses one request in ten when it comes first, as a busy server does."""

    refused: frozenset[int] = frozenset()

    async def generate(self, request):
        seed = request.sampling.seed
        if seed % 10 == 0 and seed not in self.refused:
            self.refused |= {seed}
            raise InferenceError("engine", "it is busy", is_retryable=True)
        return await super().generate(request)


def play(config, make_engine=ScriptedEngine, **proxy):
    """One rollout with the script."""
    config.agent_proxy.update(proxy)
    engine = make_engine(latency=LognormalLatency(0.02), max_concurrency=32)
    options = InferenceOptions(retry_delay_s=0.01)
    with (
        SharedLLMInferenceManager(engine, options=options) as llm,
        ParallelRolloutManager(config, llm) as manager,
    ):
        manager.rollout(seed=1)  # starts the workers
        before = llm.stats.num_retries
        result = manager.rollout(seed=42)
        print(
            f"{result.backend:<16} {config.agent_proxy.rollout_mode:<13} "
            f"{result.timings.wall_s:6.2f} s  {result.timings.num_turns} turns  "
            f"fallback: {result.fallback or 'none'}  "
            f"requests that failed: {llm.stats.num_retries - before}"
        )
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", default="base-parallel")
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    config = load_config(args.config_name, args.changes)
    backend = config.agent_proxy.parallel_backend
    sequential = play(config, use_parallel_rollout=False, rollout_mode="lockstep")
    parallel = play(config, use_parallel_rollout=True, rollout_mode="asynchronous")
    config.agent_proxy.parallel_backend = "fleet" if backend != "fleet" else "threading"
    other = play(config)
    failing = play(config, FailingEngine)
    compared = {parallel.backend: parallel, other.backend: other, "failing requests": failing}
    for name, result in compared.items():
        difference = trajectory_difference(sequential.trajectories, result.trajectories)
        print(f"{name}: trajectories {'are equal' if difference is None else difference}")
        print(f"{name}: metrics equal: {result.metrics == sequential.metrics}")
        if difference is not None or result.metrics != sequential.metrics:
            raise SystemExit(1)
    for name, value in sorted(sequential.metrics.items()):
        print(f"  {name:<40} {value:.3f}")
    gain = sequential.timings.wall_s / min(parallel.timings.wall_s, other.timings.wall_s)
    print(f"✅ equal; parallel is {gain:.1f} times as fast as sequential")


if __name__ == "__main__":
    main()
