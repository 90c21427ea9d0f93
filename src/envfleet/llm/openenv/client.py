"""An environment behind an OpenEnv address, as a text environment of ours.

Law: what an episode has seen can be seen again. An environment that was moved to another process
connects anew, resets with the same seed and repeats its actions; if the server then shows something
else, that is an error.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from envfleet.errors import ConfigError, OpenEnvError
from envfleet.llm.environments.base import Mode, Step, TextEnv, TextEnvConfig
from envfleet.llm.extras import import_extra
from envfleet.options import Seconds

_INSTALL = "pip install 'envfleet[openenv]'"
_MAX_MESSAGE_BYTES = 100 << 20


@dataclass(slots=True, kw_only=True)
class OpenEnvConfig(TextEnvConfig):
    """Where the environment is, and which of its fields are text."""

    url: str = "http://127.0.0.1:8000"
    """Of the server, without /ws."""
    action_field: str = "message"
    """The field of its actions that takes text."""
    text_field: str = "text"
    """The field of its observations that is shown; empty shows all of them as JSON."""
    action_extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every action."""
    reset_extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of every reset."""
    timeout_s: Seconds = 60.0
    """The longest that the server may take for an answer."""

    def __post_init__(self) -> None:
        """Check the types of all fields, and the address."""
        TextEnvConfig.__post_init__(self)
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"url must start with http:// or ws://, got {self.url!r:.60}")


class OpenEnvTextEnv(TextEnv):
    """Plays an environment that a server holds."""

    config_class: ClassVar[type[TextEnvConfig]] = OpenEnvConfig
    config: OpenEnvConfig

    def _prepare(self) -> None:
        self._connection: Any = None
        self._closing: ExitStack | None = None
        """Closes the connection."""
        self._start: dict[str, Any] = {}
        self._actions: list[str] = []
        self._shown = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None, "_closing": None}

    def close(self) -> None:
        """Say goodbye to the server."""
        if self._connection is not None:
            with suppress(Exception):  # it is gone already
                self._connection.send(json.dumps({"type": "close"}))
            self._hang_up()

    def _hang_up(self) -> None:
        if self._closing is not None:
            self._closing.close()
        self._connection = self._closing = None

    def _begin(self, seed: int, mode: Mode) -> None:
        self._start = {"seed": seed, "mode": mode, **self.config.reset_extra}
        self._actions = []
        if self._connection is None:
            self._connect()
        self._shown = self._text_of(self._ask("reset", self._start))

    def _act(self, action: Any) -> Step:
        if self._connection is None:
            self._return()
        said = str(action)
        told = self._ask("step", {**self.config.action_extra, self.config.action_field: said})
        self._actions.append(said)
        self._shown = self._text_of(told)
        reward, is_done = float(told.get("reward") or 0.0), bool(told.get("done"))
        seen = told.get("observation")
        info = seen.get("info") if isinstance(seen, dict) else None
        return self._shown, reward, is_done, False, dict(info) if isinstance(info, dict) else {}

    def _text(self) -> str:
        return self._shown

    def _return(self) -> None:
        """Connect again and go to where the episode stood."""
        before = self._shown
        self._connect()
        told = self._ask("reset", self._start)
        for said in self._actions:
            told = self._ask("step", {**self.config.action_extra, self.config.action_field: said})
        if self._text_of(told) != before:
            self.close()
            problem = "shows something else after the same seed and actions"
            raise OpenEnvError(self.config.url, problem)

    def _connect(self) -> None:
        websockets = import_extra(
            "websockets.sync.client", wanted_by="an OpenEnv environment", install=_INSTALL
        )
        address = self.config.url.rstrip("/").replace("http", "ws", 1)
        if not address.endswith("/ws"):
            address += "/ws"
        closing = ExitStack()
        try:
            self._connection = closing.enter_context(
                websockets.connect(
                    address,
                    open_timeout=self.config.timeout_s,
                    max_size=_MAX_MESSAGE_BYTES,
                    proxy=None,
                )
            )
            self._closing = closing
        except Exception as exc:
            raise OpenEnvError(address, f"cannot be reached: {exc}") from exc

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message; the data of the answer."""
        try:
            self._connection.send(json.dumps({"type": kind, "data": data}))
            told = json.loads(self._connection.recv(timeout=self.config.timeout_s))
        except Exception as exc:
            self._hang_up()  # a late answer would be taken for that of the next message
            problem = str(exc) or type(exc).__name__
            raise OpenEnvError(self.config.url, f"did not answer {kind}: {problem}") from exc
        answer = told.get("data") if isinstance(told, dict) else None
        if not isinstance(answer, dict):
            raise OpenEnvError(self.config.url, f"answered {kind} with {told!r:.80}")
        if told.get("type") == "error":
            raise OpenEnvError(self.config.url, f"refused {kind}: {answer.get('message')}")
        return answer

    def _text_of(self, told: dict[str, Any]) -> str:
        seen, name = told.get("observation"), self.config.text_field
        if not name:
            return json.dumps(seen)
        if not isinstance(seen, dict) or name not in seen:
            offered = ", ".join(map(repr, seen)) if isinstance(seen, dict) else "none"
            raise ConfigError(
                f"observations of {self.config.url} have no field {name!r}; set text_field to one "
                f"of theirs ({offered}), or to '' to show all"
            )
        return seen[name] if isinstance(seen[name], str) else json.dumps(seen[name])
