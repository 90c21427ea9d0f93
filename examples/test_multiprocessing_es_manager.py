"""Does the EnvStateManager give the same in parallel as one by one? A few seconds, no framework.

    python test_multiprocessing_es_manager.py

Each check raises if something is wrong, which ends the script with its traceback and exit code 1.
"""

import io
import os
import signal
import sys
import time
import warnings

from envfleet.errors import ConfigError
from envfleet.llm import EnvStateManager, load_config

__test__ = False  # a script for people: pytest has nothing to collect here

ACTIONS = {"SimpleSokoban": ["Up", "Down", "Left", "Right"], "FrozenLake": ["Right", "Down", "Fly"]}


def config(**manager):
    """Two groups of two Sokoban rooms, and two of frozen lakes."""
    found = load_config("base")
    found.es_manager.update(manager)
    found.es_manager.train.update(env_groups=4, group_size=2)
    found.es_manager.train.env_configs.update(tags=list(ACTIONS), n_groups=[2, 2])
    return found


def turn(caches, number):
    """The same actions for the same environments, some of which do not exist."""
    names = [ACTIONS[cache["tag"]] for cache in caches]
    chosen = [[one[(number + i) % len(one)], one[i % len(one)]] for i, one in enumerate(names)]
    return [
        {"env_id": cache["env_id"], "llm_response": "", "llm_raw_response": "", "actions": actions}
        for cache, actions in zip(caches, chosen, strict=True)
    ]


def played(manager, between=lambda number: None):
    """All caches of a rollout; something may happen between its turns."""
    live = manager.reset(seed=42)
    for number in range(4):
        live = manager.step(turn(live, number))
        between(number)
    return manager.get_rollout_states()


def expect(fact, words):
    if not fact:
        raise AssertionError(words)


def expected():
    with EnvStateManager(config(use_multiprocessing=False)) as manager:
        return played(manager)


def check_consistency():
    """Sequential and parallel rollouts are the same, every cache in full, for 1 to 3 workers."""
    sequential = expected()
    expect(any(cache["penalty"] < 0 for cache in sequential), "no environment was penalised")
    for workers in (1, 2, 3):
        with EnvStateManager(config(use_multiprocessing=True, max_workers=workers)) as manager:
            expect(played(manager) == sequential, f"{workers} workers change the rollout")


def check_errors():
    """A killed worker changes nothing; wrong input is refused before anybody has moved."""
    with EnvStateManager(config(use_multiprocessing=True, max_workers=2)) as manager:
        got = played(manager, lambda number: os.kill(manager.worker_pids()[0], signal.SIGKILL))
        expect(got == expected(), "a killed worker changes the rollout")
        for wrong in ({"env_id": 99, "actions": []}, {"env_id": 0, "actions": "Up"}):
            try:
                manager.step([wrong])
            except ValueError:
                continue
            raise AssertionError(f"{wrong} was taken")


def kill_all(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def check_fallback():
    """A worker lost over the limit is a failure on record; a move to this process keeps states."""
    with (
        EnvStateManager(config(use_multiprocessing=True, max_workers=2, max_restarts=0)) as manager,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        live = manager.reset(seed=42)
        kill_all(manager.worker_pids())
        expect(manager.step(turn(live, 0)) == [], "a lost environment went on")
        caches = manager.get_rollout_states()
        expect(all("failure" in cache for cache in caches), "a failure is not on record")
        expect(played(manager) == expected(), "the next rollout is not whole")
    expect(any("its worker was killed" in str(one.message) for one in said), "no warning")
    with EnvStateManager(config(use_multiprocessing=True, max_workers=2)) as manager:

        def kill_and_switch(number):
            kill_all(manager.worker_pids())
            manager.use_multiprocessing = False

        home = played(manager, kill_and_switch)
        expect(home == expected(), "switching to sequential changes the rollout")


def check_options():
    """Options are read, forced where they force something, and named when they are wrong."""
    with EnvStateManager(config(sequential_env_types=["sokoban"], use_multiprocessing=True)) as one:
        expect("SimpleSokoban: in this process" in one.plan, one.plan)
        expect("FrozenLake: in workers" in one.plan, one.plan)
    for penalty in (0.5, -0.5):
        with EnvStateManager(config(format_penalty=penalty)) as manager:
            manager.reset(seed=1)
            manager.step([{"env_id": 0, "actions": ["Fly"]}])
            expect(manager.rollout_cache[0]["penalty"] == -0.5, "a penalty must be a penalty")
    try:
        EnvStateManager(config(max_worker=2))
    except ConfigError as exc:
        expect("did you mean max_workers?" in str(exc), str(exc))
    else:
        raise AssertionError("a wrong option was taken")


CHECKS = (check_consistency, check_errors, check_fallback, check_options)


def main():
    for check in CHECKS:
        begun_s = time.perf_counter()
        check()
        print(f"{check.__name__:<18} ok  {time.perf_counter() - begun_s:.1f} s  {check.__doc__}")
    print("✅ ALL TESTS PASSED!")


if __name__ == "__main__":
    # emoji on a terminal or pipe that has none would else be an error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    main()
