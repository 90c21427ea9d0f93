"""What ``envfleet doctor --ray-address`` asks the nodes of a cluster, and what they answer."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from envfleet.cli.doctor_checks import format_bytes
from envfleet.cli.report import Finding, plural
from envfleet.engine.backends.ray.cluster import connect, need_ray
from envfleet.errors import EnvfleetError

PACKAGES = ("envfleet", "ray", "numpy", "gymnasium")
"""What must be the same everywhere: commands and rows travel as these pickle them."""
ANSWER_S = 30.0
"""How long a node may take to start a worker that answers."""
ROUNDS = 50
SMALL_STORE = 256 * 2**20
Check = tuple[str, Callable[[], Finding]]


def versions_here() -> dict[str, str]:
    """Versions of this process, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


@contextmanager
def ray_checks(address: str) -> Iterator[list[Check]]:
    """One check of the cluster and one of each of its nodes, while it is connected."""
    try:
        connection = connect(address)
    except EnvfleetError as exc:
        yield [("Ray", lambda exc=exc: Finding("Ray", "bad", str(exc)))]  # type: ignore[misc]
        return
    with connection:
        nodes = [node for node in need_ray().nodes() if node["Alive"]]
        cpus = sum(node["Resources"].get("CPU", 0) for node in nodes)
        text = f"{plural(len(nodes), 'node')} with {cpus:g} CPUs at {connection.address}"
        checks: list[Check] = [("Ray", lambda: Finding("Ray", "ok", text))]
        for node in nodes:
            name = f"node {node['NodeManagerAddress']} {node['NodeID'][:6]}"
            checks.append((name, lambda node=node, name=name: check_node(name, *ask(node))))  # type: ignore[misc]
        yield checks


def ask(node: Mapping[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """What a worker of this node says of itself (None: nothing in time), and the round trip."""
    ray = need_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Probe:  # travels by value: the node may have no envfleet, or another one
        def versions(self, names: tuple[str, ...]) -> dict[str, Any]:
            import os
            import platform
            from importlib import metadata

            found: dict[str, Any] = {"python": platform.python_version(), "niceness": os.nice(0)}
            for name in names:
                try:
                    found[name] = metadata.version(name)
                except metadata.PackageNotFoundError:
                    found[name] = "missing"
            return found

        def echo(self) -> None:
            pass

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    probe = ray.remote(num_cpus=0)(Probe).options(scheduling_strategy=there).remote()
    try:
        said = ray.get(probe.versions.remote(PACKAGES), timeout=ANSWER_S)
        said["object store"] = int(node["Resources"].get("object_store_memory", 0))
        trips = []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            ray.get(probe.echo.remote(), timeout=ANSWER_S)
            trips.append(time.perf_counter() - start_s)
        return said, sorted(trips)[ROUNDS // 2]
    except (ray.exceptions.RayError, TimeoutError):
        return None, 0.0
    finally:
        ray.kill(probe)


def check_node(name: str, said: Mapping[str, Any] | None, trip_s: float) -> Finding:
    """One node: the same versions as here, priority, memory, distance."""
    if said is None:
        text = f"no worker of it answered within {ANSWER_S:g} s"
        return Finding(name, "bad", text, "see `ray status`, and Ray's logs on that machine")
    here = versions_here()
    store = said["object store"]
    text = (
        f"{trip_s * 1e3:.2f} ms to a worker and back, object store {format_bytes(store)}, "
        f"niceness {said['niceness']}, Python {said['python']}, "
        + ", ".join(f"{package} {said[package]}" for package in PACKAGES)
    )
    other = [f"{key} {here[key]}" for key in here if said[key] != here[key]]
    if other:
        missing = [key for key in here if said[key] == "missing"]
        remedy = f"this process has {', '.join(other)}: install the same on every node"
        return Finding(name, "bad" if missing else "warn", text, remedy)
    if said["niceness"] > 0:
        remedy = "other programs go before its workers: start the node with RAY_worker_niceness=0"
        return Finding(name, "warn", text, remedy)
    if store < SMALL_STORE:
        remedy = "what a worker sends has to fit into it: start the node with --object-store-memory"
        return Finding(name, "warn", text, remedy)
    return Finding(name, "ok", text)
