"""The connection of a process to a Ray cluster: shared, owned, and refused in words."""

import os
import signal
import socket
import sys
import time

import pytest

from envfleet.engine.backends.ray import cluster
from envfleet.errors import ClusterUnreachable, ConfigError, MissingExtra


def test_users_share_one_connection_and_closing_one_leaves_the_others(ray_cluster):
    import ray

    first, second = cluster.connect(), cluster.connect(ray_cluster.address)
    assert first.address == second.address == ray_cluster.address
    first.close()
    first.close()
    second.close()
    assert ray.is_initialized()  # the tests' own connection is open
    with pytest.raises(ConfigError, match="cannot be to"):
        cluster.connect("127.0.0.1:1")
    with pytest.raises(ConfigError, match="another runtime_env"):
        cluster.connect(runtime_env={"env_vars": {"A": "b"}})


def test_an_address_where_no_head_answers_is_refused_in_bounded_time(monkeypatch):
    monkeypatch.setattr(cluster, "_session", None)
    start_s = time.monotonic()
    with socket.socket() as deaf, socket.socket() as closed:
        deaf.bind(("127.0.0.2", 0))
        deaf.listen()
        closed.bind(("127.0.0.2", 0))
        for one, reason in ((deaf, "no answer for 0.3 s"), (closed, "refused")):
            with pytest.raises(ClusterUnreachable, match=reason) as caught:
                cluster._found(f"127.0.0.2:{one.getsockname()[1]}", 0.3)
            assert "ray start --head" in str(caught.value)
    assert time.monotonic() - start_s < 10
    with pytest.raises(ClusterUnreachable, match="somewhere"):
        cluster._found("somewhere", 0.3)
    with pytest.raises(ConfigError, match="host:port of the head"):
        cluster.connect("ray://127.0.0.2:10001")


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'envfleet\[ray\]'"):
        cluster.connect()


def test_connecting_changes_no_variable_and_no_handler_of_the_caller(monkeypatch):
    niceness = "RAY_worker_niceness"
    monkeypatch.setenv(niceness, "5")
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    with cluster._as_it_was():
        assert os.environ[niceness] == "5"  # the caller's own choice
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) == handler
