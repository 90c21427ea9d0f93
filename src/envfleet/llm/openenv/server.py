"""Serves a text environment to OpenEnv clients.

Law: each connection has an environment of its own, which lives and ends with it in one thread. A
message that cannot be served gets an error and changes nothing. A browser's page is refused, for it
would let any web page play.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Self

from envfleet.errors import ConfigError
from envfleet.llm.export import as_json
from envfleet.llm.extras import import_extra
from envfleet.llm.registry import env_type

MAX_SESSIONS = 256
_INSTALL = "pip install 'envfleet[openenv]'"
_MAX_MESSAGE_BYTES = 1 << 24


class OpenEnvServer:
    """Serves environments until `close`; use it in a `with` statement."""

    def __init__(
        self,
        env: str | Callable[[], Any],
        settings: Mapping[str, Any] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        """Begin to serve.

        Args:
            env: The name of an environment type, as `env_type` in configurations, or a function
                that makes an environment with Gymnasium's `reset` and `step` and text to see.
            settings: Of the environment type, where they differ from its defaults.
            host: The interface to listen on. OpenEnv has no passwords: on another interface than
                this machine's own, every machine that reaches it can play.
            port: 0 takes a free one.
            max_sessions: How many connections there may be at once.
        """
        if isinstance(env, str):
            kind = env_type(env)
            kind.make(settings)  # wrong settings are an error now, not for every client
            self._make: Callable[[], Any] = lambda: kind.make(settings)
        elif settings is not None:
            raise ConfigError("settings belong to the name of an environment type; leave them out")
        else:
            self._make = env
        websockets = import_extra(
            "websockets.sync.server", wanted_by="OpenEnvServer", install=_INSTALL
        )
        self._places = threading.Semaphore(max_sessions)
        self._max_sessions = max_sessions
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        try:
            self._server = websockets.serve(
                self._serve,
                host,
                port,
                origins=[None],  # only browsers say where they come from
                process_request=_health,
                max_size=_MAX_MESSAGE_BYTES,
                server_header=None,
            )
        except OSError as exc:
            raise ConfigError(f"{host}:{port} cannot be used ({exc.strerror})") from exc
        self.port: int = self._server.socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        """What clients are given; they add /ws."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="envfleet-openenv", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End all connections; calling it twice changes nothing."""
        self._server.shutdown()
        with self._lock:
            still_open = list(self._open)
        for connection in still_open:
            with suppress(Exception):  # it is closing already
                connection.close()
        self._thread.join()

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections."""
        self.close()

    def _serve(self, connection: Any) -> None:
        """One connection, in a thread of its own."""
        if not self._places.acquire(blocking=False):
            text = f"all {self._max_sessions} sessions are taken"
            connection.send(_error(text, "CAPACITY_REACHED"))
            return
        try:
            with self._lock:
                self._open.add(connection)
            try:
                session = _ClientSession(self._make())
            except Exception as exc:
                connection.send(_error(_error_text(exc), "FACTORY_ERROR"))
                return
            try:
                for message in connection:
                    answer = session.answer(message)
                    if answer is None:
                        return
                    connection.send(answer)
            finally:
                session.close()
        finally:
            with self._lock:
                self._open.discard(connection)
            self._places.release()


class _ClientSession:
    """One client's environment."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._episode_id, self._num_steps = "", 0

    def answer(self, message: str | bytes) -> str | None:
        """What to send back; None if the client is done."""
        try:
            told = json.loads(message)
        except ValueError as exc:
            return _error(f"not JSON: {exc}", "INVALID_JSON")
        kind = told.get("type") if isinstance(told, dict) else None
        data = told.get("data") or {} if isinstance(told, dict) else {}
        if not isinstance(data, dict):
            return _error("data must be an object", "VALIDATION_ERROR")
        try:
            if kind == "reset":
                return self._reset(data)
            if kind == "step":
                return self._step(data)
            if kind == "state":
                state = {"episode_id": self._episode_id, "step_count": self._num_steps}
                return _message("state", state)
            if kind == "close":
                return None
        except Exception as exc:  # the environment's own
            return _error(_error_text(exc), "EXECUTION_ERROR")
        text = f"there is no message type {kind!r:.40}; there are reset, step, state, close"
        return _error(text, "UNKNOWN_TYPE")

    def _reset(self, data: Mapping[str, Any]) -> str:
        seed, mode = data.get("seed"), data.get("mode", "train")
        if seed is not None and (type(seed) is not int or seed < 0):
            return _error(f"seed must be a whole number, got {seed!r:.40}", "VALIDATION_ERROR")
        text, info = self._env.reset(seed=seed, options={"mode": mode})
        self._episode_id = str(data.get("episode_id") or uuid.uuid4())
        self._num_steps = 0
        return self._observation(text, info, reward=None, is_done=False)

    def _step(self, data: Mapping[str, Any]) -> str:
        if "message" not in data:
            return _error('an action is {"message": "..."}', "VALIDATION_ERROR")
        text, reward, terminated, truncated, info = self._env.step(data["message"])
        self._num_steps += 1
        shown = self._env.render()
        if isinstance(shown, str):
            text = shown
        return self._observation(text, info, float(reward), bool(terminated or truncated))

    def _observation(self, text: Any, info: Any, reward: float | None, is_done: bool) -> str:
        lookup = getattr(getattr(self._env, "config", None), "action_lookup", None)
        seen = {"text": text, "info": info, "actions": list(lookup.values()) if lookup else None}
        return _message("observation", {"observation": seen, "reward": reward, "done": is_done})

    def close(self) -> None:
        self._env.close()


def _message(kind: str, data: Mapping[str, Any]) -> str:
    return json.dumps({"type": kind, "data": as_json(data)}, allow_nan=False)


def _error(text: str, code: str) -> str:
    return _message("error", {"message": text, "code": code})


def _error_text(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _health(connection: Any, request: Any) -> Any:
    """Answer OpenEnv's question whether the server is up, and let /ws alone be a WebSocket."""
    if request.path == "/health":
        return connection.respond(HTTPStatus.OK, '{"status": "healthy"}\n')
    if request.path.partition("?")[0] != "/ws":
        return connection.respond(HTTPStatus.NOT_FOUND, "OpenEnv's address here is /ws\n")
    return None
