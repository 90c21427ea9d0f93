"""Every backend and every number of workers gives the same rollout."""

import functools
import logging
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import LognormalLatency, ScriptedEngine
from envfleet.llm.parallel_rollout import ParallelRolloutManager, ParallelRolloutResult
from envfleet.llm.same_trajectories import rollout_digest, trajectory_difference
from tests.unit.llm.rollouts import config_with, play


@functools.cache
def reference(group_size: int, seed: int) -> ParallelRolloutResult:
    return play(config_with(group_size=group_size), seed=seed)


# few examples of these, which start processes; there are more below
@example(backend="loky", workers=3, group_size=2, mode="asynchronous", seed=2, latency_s=1e-3)
@example(backend="multiprocessing", workers=4, group_size=1, mode="lockstep", seed=3, latency_s=0.0)
@settings(max_examples=6)
@given(
    backend=st.sampled_from(("auto", "fleet", "threading", "sequential")),
    workers=st.integers(1, 5),
    group_size=st.integers(1, 3),
    mode=st.sampled_from(("asynchronous", "lockstep")),
    seed=st.integers(0, 3),
    latency_s=st.sampled_from((0.0, 1e-3)),
)
def test_the_rollout_does_not_depend_on_who_plays_it(
    backend: str, workers: int, group_size: int, mode: str, seed: int, latency_s: float
) -> None:
    config = config_with(
        f"agent_proxy.rollout_mode={mode}",
        group_size=group_size,
        backend=backend,
        workers=workers,
    )
    engine = ScriptedEngine(latency=LognormalLatency(latency_s), max_concurrency=3)
    got, wanted = play(config, engine, seed=seed), reference(group_size, seed)
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    assert got.metrics == wanted.metrics
    assert got.tags == wanted.tags
    assert got.fallback is None


@pytest.mark.parametrize(("backend", "workers"), [("joblib", 2), ("multiprocessing", 3)])
def test_processes_of_joblib_give_the_same_rollout(
    backend: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, wanted = config_with(group_size=3, backend=backend, workers=workers), reference(3, 1)
    caplog.set_level(logging.INFO, "envfleet.llm.rollout")
    got = play(config, seed=1, folder=tmp_path)
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    assert rollout_digest(got.trajectories) == rollout_digest(wanted.trajectories)
    assert got.metrics == wanted.metrics
    assert got.backend == ("loky" if backend == "joblib" else backend)
    assert "worker 1 begins with environments" in caplog.text
    assert "plays in process" in caplog.text


def test_a_recorded_rollout_is_replayed_by_every_backend(tmp_path: Path) -> None:
    cassette = f"llm.cassette={tmp_path / 'tape'}"
    recorded = config_with(cassette)
    with (
        SharedLLMInferenceManager.from_config(recorded) as llm,
        ParallelRolloutManager(recorded, llm) as manager,
    ):
        wanted = manager.rollout(seed=3)
    for backend in ("auto", "fleet", "threading"):
        config = config_with(cassette, "llm.cassette_mode=replay", backend=backend, workers=3)
        with (
            SharedLLMInferenceManager.from_config(config) as llm,
            ParallelRolloutManager(config, llm) as manager,
        ):
            got = manager.rollout(seed=3)
        assert trajectory_difference(wanted.trajectories, got.trajectories) is None
