"""When rollouts give workers to nodes; a real cluster is in tests/faults/test_rollout_on_ray.py."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from envfleet.llm import ray_workers
from envfleet.llm.ray_workers import RayWorkers


def node(name: str, cores: int = 4) -> dict[str, Any]:
    return {"NodeID": name, "Alive": True, "Resources": {"CPU": cores}}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    ray = MagicMock()
    ray.exceptions.RayError = RuntimeError
    ray.nodes.return_value = [node("first")]
    monkeypatch.setattr(ray_workers, "need_ray", lambda: ray)
    monkeypatch.setattr(ray_workers, "HeadWatch", MagicMock())
    return ray


def test_a_node_that_joins_before_a_loss_is_noticed_gets_the_lost_workers(ray: MagicMock) -> None:
    workers = RayWorkers(6, most=6)
    workers.start(MagicMock(), MagicMock())
    ray.nodes.return_value = [node("first"), node("second", 3)]

    assert workers.grow(0, 8) is None
    said = workers.grow(2, 8)
    assert said == "1 node joined, and 8 trajectories wait: 2 more workers are started"
    assert workers.num_workers == 8
    assert workers.grow(2, 8) is None, "as many play as were asked for"
    workers.grow(4, 8)
    assert workers.num_workers == 9, "the node has three cores"


def test_a_node_that_has_gone_again_gets_nothing(ray: MagicMock) -> None:
    workers = RayWorkers(2, most=2)
    workers.start(MagicMock(), MagicMock())
    ray.nodes.return_value = [node("first"), node("second")]
    assert workers.grow(0, 8) is None
    ray.nodes.return_value = [node("first")]
    assert workers.grow(2, 8) is None
