"""The workers of a Ray cluster: actors, spread over its nodes, which play whole trajectories.

An actor reaches the inference manager by TCP, wherever it lives. It has no file system in common
with the manager, and no clock: images travel, and times count from what the manager's clock says.
Law: an actor that died or cannot be reached is lost, and is not listened to again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from envfleet.engine.backends.ray.cluster import HeadWatch, need_ray
from envfleet.llm.inference.client import InferenceClient
from envfleet.llm.worker_round import Said, SharePlay

GOODBYE_S = 5.0
"""How long actors may take to end when all trajectories are over."""
_log = logging.getLogger("envfleet.llm.rollout")


class RayWorkers:
    """Actors of the cluster that this process is connected to."""

    name = "the Ray cluster"
    backend = "ray"
    is_adaptive = False

    def __init__(self, num_workers: int, most: int | None = None) -> None:
        """So many workers at first, and never more than `most`; None: as nodes that join allow."""
        self.num_workers, self._most = num_workers, most
        self._ray = need_ray()
        self._play: Any = None
        self._head: HeadWatch | None = None
        self._nodes: set[str] = set()
        """Those that are known."""
        self._spare: dict[str, int] = {}
        """Cores of nodes that joined later, as far as no worker was started for them."""
        self._actors: list[Any] = []
        self._calls: dict[Any, int] = {}
        """The worker of each call that is not known to be over."""
        self._ended: dict[int, str] = {}

    def client(self, llm: Any) -> InferenceClient:
        """What a worker reaches the inference manager by, from any node."""
        client: InferenceClient = llm.client(self._ray.util.get_node_ip_address())
        return client

    def start(self, play: SharePlay, say: Callable[[Said], None]) -> None:
        """Start the actors, where the cluster has room."""
        self._play, self._nodes = self._ray.put(play), set(self._cores())
        self._head = HeadWatch(str(self._ray.get_runtime_context().gcs_address))
        for worker in range(self.num_workers):
            self._hire(worker)

    def _hire(self, worker: int) -> None:
        actor = self._ray.remote(_RayPlayer).options(
            num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._actors.append(actor.remote())
        self._calls[self._actors[-1].play.remote(self._play, worker)] = worker

    def _cores(self) -> dict[str, int]:
        """Of the nodes that there are."""
        return {
            node["NodeID"]: int(node["Resources"].get("CPU", 0))
            for node in self._ray.nodes()
            if node["Alive"]
        }

    def grow(self, num_gone: int, num_waiting: int) -> str | None:
        """Start workers for nodes that have joined."""
        try:
            if self._head is None or not self._head.look():
                return None  # which nodes there are is known when it is back
            cores = self._cores()
        except (self._ray.exceptions.RayError, ConnectionError):
            return None
        self._spare |= {node: cores[node] for node in cores.keys() - self._nodes}
        self._nodes |= cores.keys()
        has_room = num_waiting
        if self._most is not None:
            # a node may join before the workers that it replaces are known to be lost
            has_room = min(num_waiting, self._most - self.num_workers + num_gone)
        more, num_nodes = 0, 0
        for node in [node for node in self._spare if node in cores and self._spare[node]]:
            taken = max(0, min(self._spare[node], has_room - more))
            self._spare[node] -= taken
            more, num_nodes = more + taken, num_nodes + (taken > 0)
        if not more:
            return None
        for worker in range(self.num_workers, self.num_workers + more):
            self._hire(worker)
        self.num_workers += more
        joined = f"{num_nodes} node{'s' * (num_nodes > 1)} joined"
        return f"{joined}, and {num_waiting} trajectories wait: {more} more workers are started"

    def greet(self, worker: int, pid: int) -> bool:
        """A worker plays."""
        _log.info("worker %d plays in process %d of %s", worker, pid, self.name)
        return True

    def ended(self) -> dict[int, str]:
        """Workers whose call is over, and why."""
        if self._calls:
            calls = list(self._calls)
            ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
            for call in ready:
                worker = self._calls.pop(call)
                self._ended[worker] = self._how_it_ended(call)
                self._ray.kill(self._actors[worker])  # it may live where it cannot be reached
        return self._ended

    def _how_it_ended(self, call: Any) -> str:
        try:
            self._ray.get(call)
        except Exception as exc:  # of Ray, or of the worker
            cause = getattr(exc, "cause", None) or exc
            lines = str(cause).strip().splitlines() or [""]
            return f"{type(cause).__name__}: {lines[0]}"
        return "it had nothing more to do"

    def kill(self, worker: int) -> bool:
        """End a worker that hangs."""
        self._ray.kill(self._actors[worker])
        return True

    def stop(self, is_any_lost: bool) -> None:
        """Wait for the actors, and end them all."""
        if self._calls:
            self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=GOODBYE_S)
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        self._calls.clear()
        self._play = None
        self._ended = {}


def cores_of_cluster() -> int:
    """How many workers the nodes of the cluster have cores for."""
    return max(1, int(need_ray().cluster_resources().get("CPU", 1)))


class _RayPlayer:
    """The actor."""

    def play(self, play: SharePlay, worker: int) -> int:
        """Play trajectories until there are none; how many it were."""
        client, topic, rules = play.client, play.topic, play.rules
        elapsed_s = client.send(f"{topic}.elapsed", None)
        begun_s = time.monotonic() - elapsed_s
        send_image = None if rules.keep_image is None else partial(_send_image, client, topic)
        rules = replace(rules, started_s=begun_s, keep_image=send_image)
        return replace(play, rules=rules)(worker)


def _send_image(client: InferenceClient, topic: str, name: str, data: bytes) -> None:
    client.send(f"{topic}.image", (name, data))
