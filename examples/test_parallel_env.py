"""Does the parallel environment work here? A few seconds, and no test framework.

    python test_parallel_env.py

Each check raises if something is wrong, which ends the script with its traceback and exit code 1.
"""

import io
import multiprocessing
import os
import signal
import sys
import time

import gymnasium
import numpy as np

import envfleet

__test__ = False  # a script for people: pytest has nothing to collect here

NUM_ENVS, STEPS = 4, 200


def make(**options):
    return envfleet.make_vec("CartPole-v1", NUM_ENVS, autoreset="same_step", **options)


def played(envs, seed):
    """Observations, rewards and ends of a few hundred steps with fixed actions."""
    obs, _ = envs.reset(seed=seed)
    actions = np.random.default_rng(seed).integers(2, size=(STEPS, NUM_ENVS))
    steps = [envs.step(action)[:4] for action in actions]
    return [obs, *(np.stack(part) for part in zip(*steps, strict=True))]


def expect(fact, words):
    if not fact:
        raise AssertionError(words)


def check_steps():
    """Batches have a row for each environment, and episodes are reset by themselves."""
    with make(backend="process", num_workers=2) as envs:
        first, obs, *others = played(envs, seed=0)
    expect(first.shape == (NUM_ENVS, 4), f"the first observations have shape {first.shape}")
    expect(obs.shape == (STEPS, NUM_ENVS, 4), f"the observations have shape {obs.shape}")
    for part in others:
        expect(part.shape == (STEPS, NUM_ENVS), f"rewards or ends have shape {part.shape}")
    expect(others[1].any(), "no episode ended")
    expect(not np.array_equal(first[0], first[1]), "two environments got the same seed")


def check_same_results():
    """Worker processes give what the same environments give one by one."""
    with make(backend="serial") as envs:
        expected = played(envs, seed=7)
    for method in sorted({"fork", "spawn"} & set(multiprocessing.get_all_start_methods())):
        with make(backend="process", num_workers=2, start_method=method) as envs:
            got = played(envs, seed=7)
        is_equal = all(map(np.array_equal, expected, got))
        expect(is_equal, f"start method {method} changes the results")


def check_truth():
    """An environment in a worker is Gymnasium's own."""
    with make(backend="process", num_workers=2) as envs:
        obs, rewards = played(envs, seed=3)[1:3]
    action = np.random.default_rng(3).integers(2, size=(STEPS, NUM_ENVS))[0, 0]
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=3)
    alone, reward, *_ = env.step(action)
    env.close()
    expect(np.array_equal(obs[0, 0], alone), f"observed {obs[0, 0]} instead of {alone}")
    expect(rewards[0, 0] == reward, f"rewarded by {rewards[0, 0]} instead of {reward}")


def check_death():
    """A killed worker costs its episodes, not the program."""
    with make(backend="process", num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        os.kill(envs.fleet.worker_pids()[0], signal.SIGKILL)
        truncated = envs.step(np.zeros(NUM_ENVS, np.int64))[3]
        expect(truncated.any(), "the killed worker went unnoticed")
        played(envs, seed=1)
        expect(len(envs.incidents) >= 1, "the death is not on record")


CHECKS = (check_steps, check_same_results, check_truth, check_death)


def main():
    for check in CHECKS:
        begun_s = time.perf_counter()
        check()
        print(f"{check.__name__:<20} ok  {time.perf_counter() - begun_s:.1f} s  {check.__doc__}")
    print("✅ ALL TESTS PASSED!")
    print("🎉 All tests completed successfully!")


if __name__ == "__main__":
    # emoji on a terminal or pipe that has none would else be an error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    main()
