"""The connection of this process to a Ray cluster: joined if it is there, else started here.

Ray allows one connection per process. All that need it share it, each by a `Connection` of its own;
when the last of them is closed, what was started for them is ended: a local cluster, or the
connection to a running one. A connection that other code made by `ray.init` is used and left open.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from envfleet.errors import ClusterUnreachable, ConfigError, MissingExtra

_LOCAL_CLUSTER = {
    "RAY_worker_niceness": "0",  # Ray's own 15 lets any other program take the cores
    "RAY_USAGE_STATS_ENABLED": "0",
}
HEAD_CHECK_S, HEAD_ANSWER_S = 2.0, 1.0
"""How often the head of a cluster is asked whether it is there, and how long it may take to say."""
HEAD_LOST_S = 10.0
"""A head that has not answered for so long is lost; in less it may have been restarted."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_HTTP2_SETTINGS = 4

_lock = threading.RLock()
_session: _Session | None = None


class _Session:
    """The connection that all users in this process share."""

    def __init__(
        self, address: str, runtime_env: Mapping[str, Any] | None, *, is_ours: bool
    ) -> None:
        self.address, self.runtime_env, self.is_ours = address, runtime_env, is_ours
        self.pid, self.num_users = os.getpid(), 0

    @property
    def is_open(self) -> bool:
        """Whether it still connects this very process: not a parent's, and not shut down."""
        return self.pid == os.getpid() and bool(need_ray().is_initialized())


class Connection:
    """One user's share of the connection to Ray; `close` it, or use it in a `with` block."""

    def __init__(self, session: _Session) -> None:
        self.address = session.address
        """host:port of the head."""
        self._session: _Session | None = session
        session.num_users += 1

    def close(self) -> None:
        """Give the share up; the last one ends what was started for it. Idempotent."""
        global _session
        with _lock:
            session, self._session = self._session, None
            if session is None:
                return
            session.num_users -= 1
            if session.num_users == 0 and session is _session:
                _session = None
                if session.is_ours and session.is_open:
                    need_ray().shutdown()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def need_ray() -> ModuleType:
    """The package `ray`.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as exc:
        if exc.name != "ray":
            raise
        raise MissingExtra("ray is not installed: pip install 'envfleet[ray]'") from exc


def connect(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
) -> Connection:
    """Join a Ray cluster, or start one on this machine.

    Args:
        address: "host:port" of the head, or "auto" for the cluster of which this machine is a node.
            None takes the environment variable RAY_ADDRESS, or else a connection that is open
            already, or else starts a cluster here, which ends with the last `Connection`.
        num_cpus: How many CPUs a cluster that is started here says it has; None counts them.
        runtime_env: Ray's runtime environment for all that runs for this process: working_dir,
            py_modules, pip, env_vars and so on.
        timeout_s: How long the head may take to answer.

    Raises:
        MissingExtra: ray is not installed.
        ClusterUnreachable: No cluster answers there, or it refuses this process.
        ConfigError: This process is connected to another cluster, or in another way.
    """
    global _session
    ray = need_ray()
    asked = address or os.environ.get("RAY_ADDRESS") or None
    if asked is not None and asked.startswith("ray://"):
        raise ConfigError(
            f"address={asked!r} is one of Ray's client; give host:port of the head, or 'auto', and "
            "run this program on a machine that is a node of the cluster"
        )
    with _lock:
        if _session is not None and not _session.is_open:
            _session = None
        if _session is None and ray.is_initialized():
            _session = _Session(_head_of(ray), None, is_ours=False)
        if _session is None:
            where = asked
            if asked is not None and asked != "local":
                where = _found(asked, timeout_s)
            with _as_it_was():
                _start(ray, where, num_cpus, runtime_env)
            _session = _Session(_head_of(ray), runtime_env, is_ours=True)
        else:
            _check_same(_session, asked, runtime_env)
        return Connection(_session)


def _check_same(
    session: _Session, asked: str | None, runtime_env: Mapping[str, Any] | None
) -> None:
    if asked not in (None, "auto", "local") and not _is_same(asked, session.address):
        raise ConfigError(
            f"this process is connected to the Ray cluster at {session.address}, and cannot be to "
            f"{asked} as well; close what uses the first, or use another process"
        )
    if runtime_env is not None and runtime_env != session.runtime_env:
        raise ConfigError(
            "this process is connected to Ray with another runtime_env; give it to what connects "
            "first (or to your own ray.init)"
        )


def _is_same(asked: str, address: str) -> bool:
    (host, _, port), (known_host, _, known_port) = asked.rpartition(":"), address.rpartition(":")
    if port != known_port:
        return False
    try:
        return socket.gethostbyname(host) == socket.gethostbyname(known_host)
    except OSError:
        return host == known_host


def _head_of(ray: ModuleType) -> str:
    return str(ray.get_runtime_context().gcs_address)


def _found(asked: str, timeout_s: float) -> str:
    """host:port of a head that answers; Ray itself may wait for one that does not for ever."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        where = str(canonicalize_bootstrap_address_or_die(asked))
    except Exception as exc:
        reason = str(exc).partition(". ")[0]
        raise ClusterUnreachable(asked, reason) from exc
    check_head(where, timeout_s)
    return where


def check_head(address: str, timeout_s: float) -> None:
    """An error unless the head of a cluster answers at `address`.

    Ray has no such question with a deadline: it may wait for ever, or end this process. Any server
    of HTTP/2, as the head is one, answers a greeting at once.

    Raises:
        ClusterUnreachable: No answer, or not one of a head.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as link:
            link.sendall(_HTTP2_HELLO)
            answer = link.recv(9, socket.MSG_WAITALL)
    except TimeoutError as exc:
        raise ClusterUnreachable(address, f"no answer for {timeout_s:g} s") from exc
    except (OSError, ValueError) as exc:
        raise ClusterUnreachable(address, str(exc)) from exc
    if len(answer) < 9 or answer[3] != _HTTP2_SETTINGS:
        raise ClusterUnreachable(address, "what answers there is no head of a Ray cluster")


class HeadWatch:
    """Asks from time to time whether the head of a cluster is there.

    Actors go on without it, but Ray ends a process that has had none for 60 s, without an
    exception, and what asks the head waits as long: `look` right before that.
    """

    def __init__(self, address: str, every_s: float = 0.0) -> None:
        """It has just answered, and is asked every so often at most."""
        self._address, self._every_s = address, every_s
        self._due_s = time.monotonic() + every_s
        self._silent_s: float | None = None
        """Since when it has not answered."""

    def look(self) -> bool:
        """Whether it answered when it was asked last.

        Raises:
            ClusterUnreachable: It has been silent for too long.
        """
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._every_s
            try:
                check_head(self._address, HEAD_ANSWER_S)
                self._silent_s = None
            except ClusterUnreachable as exc:
                self._silent_s = self._silent_s or now_s
                lost_s = now_s - self._silent_s
                if lost_s > HEAD_LOST_S:
                    raise ClusterUnreachable(
                        self._address,
                        f"its head has been silent for {lost_s:.0f} s ({exc.reason}), and Ray ends "
                        "programs without one; start the head again, and this program from its "
                        "last checkpoint",
                    ) from exc
        return self._silent_s is None


def _start(
    ray: ModuleType,
    address: str | None,
    num_cpus: int | None,
    runtime_env: Mapping[str, Any] | None,
) -> None:
    own: dict[str, Any] = {}
    if address in (None, "local"):
        own = {"num_cpus": num_cpus, "include_dashboard": False}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=None if runtime_env is None else dict(runtime_env),
            **own,
        )
    except Exception as exc:
        with contextlib.suppress(Exception):
            ray.shutdown()
        raise ClusterUnreachable(address or "this machine", str(exc).strip()) from exc


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Take back what `ray.init` changes in this process: a signal handler, environment variables.

    Variables that the caller has set are the caller's.
    """
    handler = signal.getsignal(signal.SIGTERM)
    ours = {name: value for name, value in _LOCAL_CLUSTER.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
