"""Workers of a manager die, hang and are killed, and the rollout stays the same."""

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envfleet.engine.backends.process.backend import ProcessBackend
from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.manager import EnvStateManager
from tests.gates import wait_for
from tests.unit.llm import games
from tests.unit.llm.games import config, inputs


@pytest.fixture(autouse=True)
def _games() -> None:
    games.register()


def troubled(folder: Path, way: Any = True, **manager: Any) -> EnvStateManager:
    (folder / "pid").write_text(str(os.getpid()))
    settings = config(("Trouble", 2), use_multiprocessing=way, **{"max_workers": 2, **manager})
    settings["custom_envs"]["Trouble"] |= {
        "env_config": {"folder": str(folder)},
        "max_actions_per_traj": 20,
    }
    return EnvStateManager(settings)


def pids(manager: EnvStateManager) -> list[int]:
    found = [
        pid for remote_envs in manager._placed._remote for pid in remote_envs.fleet.worker_pids()
    ]
    return [pid for pid in found if pid is not None]


def played(manager: EnvStateManager, turns: list[list[dict[str, Any]]]) -> Any:
    manager.reset(seed=1)
    for turn in turns:
        manager.step(turn)
    return manager.get_rollout_states()


TURNS = [inputs(e0=["a"], e1=["b"], e2=["c"], e3=["d"]), inputs(e3=["e"], e0=["f"])]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("trouble", ["crash once", "killed once"])
def test_a_lost_turn_is_played_again(tmp_path: Path, trouble: str, start_method: str) -> None:
    turns = [*TURNS, inputs(e1=["g"], e0=["h", trouble, "i"]), inputs(e0=["j"], e1=["k"], e3=["l"])]
    with troubled(tmp_path, start_method=start_method) as manager:
        disturbed = played(manager, turns)
        assert (tmp_path / trouble.split()[0]).exists()
    with troubled(tmp_path, way=False) as manager:  # what happens once has happened
        assert disturbed == played(manager, turns)


def test_a_deadline_costs_a_worker_and_no_turn(tmp_path: Path) -> None:
    turns = [*TURNS, inputs(e0=["hang once", "i"], e1=["g"])]
    with troubled(tmp_path, step_timeout_s=0.5) as manager:
        disturbed = played(manager, turns)
    with troubled(tmp_path, way=False) as manager:
        assert disturbed == played(manager, turns)


def test_what_is_repeated_has_the_deadline_of_each_turn(tmp_path: Path) -> None:
    with troubled(tmp_path, step_timeout_s=1) as manager:
        manager.reset(seed=1)
        for _ in range(4):
            manager.step(inputs(e0=["nap"]))
        os.kill(manager.worker_pids()[0], signal.SIGKILL)
        assert len(manager.step(inputs(e0=["nap"], e1=["a"]))) == 2
        assert manager.render()[:2] == ["train 1 nap nap nap nap nap", "train 1 a"]


def test_who_lives_beside_one_that_hangs_does_not_notice(tmp_path: Path) -> None:
    settings = {"max_restarts": 1, "step_timeout_s": 1, "max_workers": 1}
    with troubled(tmp_path, **settings) as manager:
        manager.reset(seed=1)
        for _ in range(4):
            manager.step(inputs(e0=["nap"], e1=["a"], e2=["b"]))
        with pytest.warns(RuntimeWarning, match="its worker passed its deadline 2 times"):
            going_on = manager.step(inputs(e0=["nap"], e1=["hang"], e2=["b"]))
        assert [cache["env_id"] for cache in going_on] == [0, 2]
        assert manager.render()[0] == "train 1 nap nap nap nap nap"


@pytest.mark.parametrize("kill_at", [1, 2, 3])
def test_news_are_shown_again_turn_by_turn(kill_at: int) -> None:
    turns = [inputs(e0=["a", "b"], e1=["c"]), inputs(e0=[]), inputs(e1=["d"], e0=["e", "f"])]
    turns.append(inputs(e0=["g"], e1=["h"]))

    def shown(manager: EnvStateManager, trouble: Any) -> list[Any]:
        manager.reset(seed=1)
        for number, turn in enumerate(turns):
            if number == kill_at:
                trouble()
            manager.step(turn)
        return manager.get_rollout_states()

    with EnvStateManager(config(("News", 1))) as manager:
        alone = shown(manager, list)
    settings = config(("News", 1), use_multiprocessing=True, max_workers=1)
    with EnvStateManager(settings) as manager:
        assert shown(manager, lambda: _kill_all(manager.worker_pids())) == alone
        assert shown(manager, lambda: setattr(manager, "use_multiprocessing", False)) == alone


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("die", "its worker died 3 times in one episode"),
        ("hang", "its worker passed its deadline 3 times in one episode"),
    ],
)
def test_who_costs_too_many_workers_fails_alone(tmp_path: Path, trouble: str, error: str) -> None:
    with troubled(tmp_path, max_restarts=2, step_timeout_s=0.5) as manager:
        manager.reset(seed=1)
        manager.step(TURNS[0])
        with pytest.warns(RuntimeWarning, match=error):
            going_on = manager.step(inputs(e0=["e"], e1=[trouble], e2=["f"], e3=["g"]))
        assert [cache["env_id"] for cache in going_on] == [0, 2, 3]
        assert manager.rollout_cache[1]["failure"] == {"doing": "step", "error": error, "turn": 2}
        manager.step(inputs(e0=["h"]))
        assert manager.render()[0] == "train 1 a e h"
        manager.reset(seed=1)  # a new episode, a new budget
        assert len(manager.step(TURNS[0])) == 4


@pytest.mark.parametrize("trouble", ["die", "hang", "raise"])
def test_a_lost_turn_is_not_fined(tmp_path: Path, trouble: str) -> None:
    with troubled(tmp_path, max_restarts=0, step_timeout_s=0.5) as manager:
        manager.reset(seed=1)
        with pytest.warns(RuntimeWarning, match="environment 0 .* failed in step"):
            manager.step(inputs(e0=["a", trouble], e2=[]))
        assert manager.rollout_cache[0]["penalty"] == 0
        assert manager.rollout_cache[2]["penalty"] == -0.1


class StaysHere:
    """Can be copied and cannot be pickled."""

    def __deepcopy__(self, memo: object) -> "StaysHere":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


@pytest.mark.parametrize(
    ("way", "it", "error"),
    [
        (False, threading.Lock(), "cannot pickle '_thread.lock' object"),
        ("threads", threading.Lock(), "cannot pickle '_thread.lock' object"),
        (True, threading.Lock(), "cannot pickle '_thread.lock' object"),
        (False, StaysHere(), "TypeError: it stays here"),
        ("threads", StaysHere(), "TypeError: it stays here"),
        (True, StaysHere(), "TypeError: it stays here"),
    ],
    ids=["here", "threads", "workers", *[f"{way}, can be copied" for way in ("h", "t", "w")]],
)
def test_an_answer_that_cannot_travel_fails_alone(
    tmp_path: Path, way: Any, it: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = games.Trouble.step

    def with_it(env: Any, action: str) -> Any:
        said, reward, is_done, info = step(env, action)
        return said, reward, is_done, info | ({"it": it} if action == "it" else {})

    monkeypatch.setattr(games.Trouble, "step", with_it)
    with troubled(tmp_path, way, start_method="fork") as manager:  # workers see the change
        manager.reset(seed=1)
        with pytest.warns(RuntimeWarning, match=error):
            going_on = manager.step(inputs(e0=["a"], e1=["it"], e2=["b"], e3=["c"]))
        assert [cache["env_id"] for cache in going_on] == [0, 2, 3]
        assert len(manager.step(inputs(e0=["a"], e2=["b"]))) == 2
        assert len(manager.reset(seed=1)) == 4
        assert len(manager.step(TURNS[0])) == 4


def test_who_does_not_come_back_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two whose start does not depend on the seed: one ends early, one shows something else."""

    def begin(env: Any, seed: int, mode: Any) -> None:
        has_begun_before = (tmp_path / str(seed)).exists()
        (tmp_path / str(seed)).touch()
        env._random, env._mode = random.Random(seed), mode
        env._floor = {1: 3, 3: -5}.get(seed, 0) if has_begun_before else 0

    monkeypatch.setattr(games.Climb, "_begin", begin)
    settings = config(("Climb", 3), group_size=1, use_multiprocessing=True, max_workers=1)
    settings["es_manager"]["start_method"] = "fork"
    with EnvStateManager(settings) as manager:
        manager.reset(seed=1)
        manager.step(inputs(e0=["Up", "Up"], e1=["Down"], e2=["Up"]))
        for pid in manager.worker_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"\(Climb, seed [13]\) failed in step"):
            going_on = manager.step(inputs(e0=["Down"], e1=["Down"], e2=["Up"]))
    assert [cache["env_id"] for cache in going_on] == [1]
    for env_id in (0, 2):
        error = manager.rollout_cache[env_id]["failure"]["error"]
        assert error.endswith("do not bring it back (it shows something else now)")


def test_who_is_killed_too_often_fails(tmp_path: Path) -> None:
    turns = [*TURNS, inputs(e0=["h"], e1=["i"])]
    error = "its worker was killed 2 times in one episode (exit code -9)"
    with troubled(tmp_path, way=False) as manager:
        alone = played(manager, turns)
    with troubled(tmp_path, max_restarts=1) as manager:
        manager.reset(seed=1)
        _kill_all(manager.worker_pids())
        manager.step(turns[0])
        _kill_all(
            manager.worker_pids()[:1]
        )  # between turns: any of its environments may be at fault
        with pytest.warns(RuntimeWarning, match=r"environment 0 .* killed 2 times in one episode"):
            assert [cache["env_id"] for cache in manager.step(turns[1])] == [3]
        assert manager.rollout_cache[0]["failure"] == {"doing": "step", "error": error, "turn": 2}
        with pytest.warns(RuntimeWarning, match=r"environment 1 .* killed 2 times in one episode"):
            assert manager.step(inputs(e1=["i"])) == []
        assert len(manager.step(inputs(e2=["j"], e3=["k"]))) == 2
        assert played(manager, turns) == alone  # all of them again, each with its whole budget
        _kill_all(manager.worker_pids())
        assert played(manager, turns) == alone


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_who_kills_every_worker_fails_alone(tmp_path: Path, max_restarts: int) -> None:
    times = f"{max_restarts + 1} times" if max_restarts else "once"
    error = f"its worker was killed {times} in one episode (exit code -9)"
    with troubled(tmp_path, max_restarts=max_restarts) as manager:
        manager.reset(seed=1)
        with pytest.warns(RuntimeWarning, match="its worker was killed"):
            going_on = manager.step(inputs(e0=["killed in workers"], e1=["a"], e2=["b"]))
        assert [cache["env_id"] for cache in going_on] == [1, 2]
        assert manager.rollout_cache[0]["failure"] == {"doing": "step", "error": error, "turn": 1}
        assert not isinstance(manager.envs[0]["env"], games.Trouble)
        assert len(manager.worker_pids()) == 2


@pytest.mark.parametrize("trouble", ["deadly", "hangs"])
def test_who_has_failed_does_not_come_home_with_the_others(tmp_path: Path, trouble: str) -> None:
    (tmp_path / "pid").write_text(str(os.getpid()))
    settings = config(("Trouble", 3), group_size=1, use_multiprocessing=True, max_workers=2)
    settings["es_manager"] |= {"max_restarts": 0, "step_timeout_s": 1}
    trouble_config: dict[str, Any] = {"folder": str(tmp_path)}
    settings["custom_envs"]["Trouble"]["env_config"] = trouble_config
    trouble_config |= {"hangs": 2} if trouble == "hangs" else {"deadly": {2: 0}}
    with EnvStateManager(settings) as manager:
        with pytest.warns(RuntimeWarning, match="environment 1 .* failed in reset"):
            manager.reset(seed=1)
        manager.step(inputs(e0=["done"], e2=["a"]))
        (tmp_path / "hang").unlink(missing_ok=True)
        manager.use_multiprocessing = False
        assert not (tmp_path / "here").exists()
        assert not (tmp_path / "hang").exists()
        assert len(manager.step(inputs(e2=["b"]))) == 1
        assert manager.render() == ["train 1 done", "", "train 3 a b"]
        assert len(manager.reset(seed=11)) == 3
        assert isinstance(manager.envs[1]["env"], games.Trouble)


@pytest.mark.parametrize("trouble", ["closed", "deadly"])
def test_who_cannot_live_alone_does_not_come_home(tmp_path: Path, trouble: str) -> None:
    with troubled(tmp_path, max_restarts=0) as manager:
        manager.reset(seed=1)
        (tmp_path / trouble).touch()
        _kill_all(manager.worker_pids())
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert manager.step(TURNS[0]) == []
        assert all("failure" in cache for cache in manager.rollout_cache)


@pytest.mark.parametrize("way", [True, "resets"])
@pytest.mark.parametrize(
    ("number", "max_restarts", "error"),
    [
        (0, 3, "its worker died 4 times in one episode"),
        (signal.SIGKILL, 3, "its worker was killed 4 times in one episode (exit code -9)"),
        (signal.SIGKILL, 0, "its worker was killed once in one episode (exit code -9)"),
    ],
)
def test_a_beginning_that_ends_its_process_fails_alone(
    tmp_path: Path, number: int, max_restarts: int, error: str, way: Any
) -> None:
    (tmp_path / "pid").write_text(str(os.getpid()))
    settings = config(("Trouble", 12), group_size=1, use_multiprocessing=way, max_workers=2)
    settings["es_manager"]["max_restarts"] = max_restarts
    # the first ones, which workers are handed before this process lends a hand
    settings["custom_envs"]["Trouble"]["env_config"] = {
        "folder": str(tmp_path),
        "reset_s": 0.005,
        "deadly": {1: int(number)},
    }
    with EnvStateManager(settings) as manager:
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="environment 0 .* failed in reset"):
                caches = manager.reset(seed=1)
            assert caches[0]["failure"]["error"] == error
            assert [cache["env_id"] for cache in caches if "failure" in cache] == [0]
            states = [cache["history"][0]["state"] for cache in caches[1:]]
            assert states == [f"train {seed}" for seed in range(2, 13)]
            assert len(manager.step(inputs(e1=["a"], e11=["b"]))) == 2


@pytest.mark.parametrize("way", [True, "resets"])
def test_workers_may_be_killed_before_anything_has_begun(way: Any) -> None:
    settings = config(("Climb", 4), use_multiprocessing=way, max_workers=2)
    with EnvStateManager(config(("Climb", 4))) as manager:
        alone = manager.reset(seed=1)
    with EnvStateManager(settings) as manager:
        for pid in manager.worker_pids():
            os.kill(pid, signal.SIGKILL)
        assert manager.reset(seed=1) == alone
        assert manager.reset(seed=1) == alone


def test_who_cannot_be_built_again_fails_alone(tmp_path: Path) -> None:
    with troubled(tmp_path, max_restarts=1) as manager:
        manager.reset(seed=1)
        manager.step(TURNS[0])
        (tmp_path / "closed").touch()
        os.kill(manager.worker_pids()[0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="could not be built again"):
            going_on = manager.step(inputs(e0=["e"], e1=["f"], e2=["g"], e3=["h"]))
        assert [cache["env_id"] for cache in going_on] == [2, 3]
        (tmp_path / "closed").unlink()
        manager.reset(seed=1)
        assert len(manager.step(TURNS[0])) == 4


@pytest.mark.parametrize("trouble", ["closed", "deadly"])
def test_who_cannot_be_built_again_fails_alone_in_reset_too(tmp_path: Path, trouble: str) -> None:
    with troubled(tmp_path, max_restarts=1) as manager:
        (tmp_path / trouble).touch()
        os.kill(manager.worker_pids()[0], signal.SIGKILL)
        for _ in range(2):  # the second time there is no worker for them
            with pytest.warns(RuntimeWarning, match="environment . .* failed in (reset|the con)"):
                caches = manager.reset(seed=1)
            assert [cache["env_id"] for cache in caches if "failure" in cache] == [0, 1]
            assert len(manager.step(inputs(e2=["g"], e3=["h"]))) == 2
        (tmp_path / trouble).unlink()
        manager.reset(seed=1)
        assert len(manager.step(TURNS[0])) == 4


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_budget_is_for_one_episode(tmp_path: Path, is_idle: bool) -> None:
    with troubled(tmp_path, max_workers=1) as manager:
        for _ in range(25):
            manager.reset(seed=1)
            _kill_all(manager.worker_pids())
            if not is_idle:
                assert len(manager.step(TURNS[0])) == 4
        assert not any("failure" in cache for cache in manager.reset(seed=1))


def test_who_fails_in_every_rollout_fails_alone(tmp_path: Path) -> None:
    with troubled(tmp_path) as manager:
        for _ in range(7):
            manager.reset(seed=1)
            with pytest.warns(RuntimeWarning, match="its worker died 4 times in one episode"):
                going_on = manager.step(inputs(e0=["die"], e1=["a"], e2=["b"]))
            assert [cache["env_id"] for cache in going_on] == [1, 2]


def test_makers_that_cannot_be_started_again_are_done_without(tmp_path: Path) -> None:
    with troubled(tmp_path, way=False) as manager:
        alone = played(manager, TURNS)
    with troubled(tmp_path, way="resets") as manager:
        assert played(manager, TURNS) == alone

        def fails(*_: Any) -> None:
            raise OSError("no process left")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessBackend, "launch", fails)
            for pid in manager.worker_pids():
                os.kill(pid, signal.SIGKILL)
            assert played(manager, TURNS) == alone
        assert played(manager, TURNS) == alone


def test_a_deadline_needs_workers(tmp_path: Path) -> None:
    with troubled(tmp_path, way="auto", step_timeout_s=1) as manager:
        assert manager.plan == (
            "Trouble: reset and step in workers: only there step_timeout_s can be kept"
        )
        assert len(manager.worker_pids()) == 2
    with pytest.raises(ConfigError, match="step_timeout_s cannot be kept with use_multiproc"):
        troubled(tmp_path, way="resets", step_timeout_s=1)


def test_idle_workers_may_be_killed(tmp_path: Path) -> None:
    with troubled(tmp_path, way=False) as manager:
        alone = played(manager, TURNS)
    with troubled(tmp_path) as manager:
        for _ in range(2):
            manager.reset(seed=1)
            for turn in TURNS:
                for pid in pids(manager):
                    os.kill(pid, signal.SIGKILL)
                manager.step(turn)
            assert manager.get_rollout_states() == alone


def test_killed_at_random_moments(tmp_path: Path) -> None:
    turns = [inputs(e0=["wait"], e1=["a"], e2=["wait", "b"], e3=["wait"]) for _ in range(8)]
    with troubled(tmp_path, way=False) as manager:
        alone = played(manager, turns)
    with troubled(tmp_path, max_restarts=100) as manager:
        is_over = threading.Event()
        killer = threading.Thread(target=_kill_now_and_then, args=(manager, is_over))
        killer.start()
        try:
            for _ in range(3):
                assert played(manager, turns) == alone
        finally:
            is_over.set()
            killer.join()


def _kill_now_and_then(manager: EnvStateManager, is_over: threading.Event) -> None:
    chance = random.Random(0)
    while not is_over.wait(chance.uniform(0.05, 0.4)):
        victim = chance.choice(pids(manager))
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_makers_may_be_killed(tmp_path: Path) -> None:
    settings = config(("Trouble", 20), use_multiprocessing="auto", max_workers=2)
    settings["custom_envs"]["Trouble"]["env_config"] = {"reset_s": 0.01}
    with EnvStateManager(settings) as manager:
        assert "reset in workers, step in-process" in manager.plan
        makers = manager._placed._prefetcher
        assert makers is not None
        undisturbed = [cache["history"][0]["state"] for cache in manager.reset(seed=1)]
        killer = threading.Timer(0.05, lambda: _kill_all(makers.fleet.worker_pids()))
        killer.start()
        assert [cache["history"][0]["state"] for cache in manager.reset(seed=1)] == undisturbed
        killer.join()
        assert [cache["history"][0]["state"] for cache in manager.reset(seed=1)] == undisturbed
        assert len(manager.step(inputs(e0=["a"], e39=["b"]))) == 2


def _kill_all(victims: Sequence[int | None]) -> None:
    for pid in victims:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def test_turns_in_flight_survive_their_workers(tmp_path: Path) -> None:
    turns = [inputs(e0=["wait"], e1=["a"], e2=["b"], e3=["wait"]), inputs(e1=["c"], e2=["d"])]
    with troubled(tmp_path, way=False) as manager:
        alone = played(manager, turns)
    with troubled(tmp_path) as manager:
        manager.reset(seed=1)
        for turn in turns:
            manager.send(turn)
            _kill_all(manager.worker_pids())
            while manager.in_flight:
                manager.recv(min_envs=1)
        assert manager.get_rollout_states() == alone


def test_an_interrupted_step_wants_a_reset(tmp_path: Path) -> None:
    with troubled(tmp_path) as manager:
        manager.reset(seed=1)
        main = threading.get_ident()

        def interrupt_the_hang() -> None:
            wait_for(tmp_path / "hang")
            signal.pthread_kill(main, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt_the_hang)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            manager.step(inputs(e0=["hang once"], e1=["a"]))
        interrupting.join()
        with pytest.raises(OutOfOrder, match="the last step was interrupted; call reset first"):
            manager.step(inputs(e1=["a"]))


@pytest.mark.parametrize("way", [True, "threads"])
def test_a_reset_does_not_wait_for_a_step_that_was_interrupted(
    tmp_path: Path, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()  # no thread may be left behind
    monkeypatch.setattr(games, "time", SimpleNamespace(sleep=is_over.wait, perf_counter=time.time))
    with troubled(tmp_path, way, start_method="fork") as manager:
        manager.reset(seed=1)
        interrupting = threading.Thread(target=_interrupt_at, args=(tmp_path / "hang",))
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            manager.step(inputs(e0=["hang once"], e1=["a"], e2=["b"]))
        interrupting.join()
        began_s = time.monotonic()
        assert not any("failure" in cache for cache in manager.reset(seed=1))
        assert time.monotonic() - began_s < 30  # it hangs for a minute
        is_over.set()
        assert len(manager.step(TURNS[0])) == 4


@pytest.mark.parametrize("way", [True, "resets"])
def test_a_reset_does_not_wait_for_a_reset_that_was_interrupted(tmp_path: Path, way: Any) -> None:
    (tmp_path / "pid").write_text(str(os.getpid()))
    settings = config(("Trouble", 12), group_size=1, use_multiprocessing=way, max_workers=2)
    settings["custom_envs"]["Trouble"]["env_config"] = {
        "folder": str(tmp_path),
        "reset_s": 0.005,
        "hangs": 1,
    }
    with EnvStateManager(settings) as manager:
        interrupting = threading.Thread(target=_interrupt_at, args=(tmp_path / "hang",))
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            manager.reset(seed=1)
        interrupting.join()
        began_s = time.monotonic()
        assert not any("failure" in cache for cache in manager.reset(seed=1))
        assert time.monotonic() - began_s < 30


def _interrupt_at(mark: Path) -> None:
    wait_for(mark)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    manager = troubled(tmp_path)
    manager.reset(seed=1)
    children = pids(manager)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.close()
    deadline_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
