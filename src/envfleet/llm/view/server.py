"""Serves the page of a rollout to browsers of this machine.

Law: it listens on the loopback interface only, answers only to the names of that interface (a page
from elsewhere cannot reach it by a name that points here), and only below a path that begins with a
random token. It changes nothing. The page loads nothing from anywhere else.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from envfleet.errors import ConfigError, JournalError
from envfleet.llm.export import as_json
from envfleet.llm.timeline import chrome_trace
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn
from envfleet.llm.view.feed import JournalFeed, Query

_HOST = "127.0.0.1"
_PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
}
_CLIENT_TIMEOUT_S = 10.0
"""A browser that sends nothing for so long is let go."""


class ViewServer:
    """A page of one run, served until `close`."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Begin to serve; port 0 takes a free one.

        Raises:
            JournalError: The folder has no journal.
            ConfigError: The port is taken.
        """
        self.feed = JournalFeed(folder)
        self.token = secrets.token_urlsafe(24)
        try:
            self._server = _Server((_HOST, port), _Handler)
        except OSError as exc:
            raise ConfigError(
                f"port {port} cannot be used ({exc.strerror}); without --port a free one is taken"
            ) from exc
        self._server.view = self
        self.port: int = self._server.server_address[1]
        self.url = f"http://{_HOST}:{self.port}/{self.token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="envfleet-view"
        )
        self._thread.start()

    def close(self) -> None:
        """Stop; calling it twice changes nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    view: ViewServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless a browser went away in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _RefusedRequest(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S
    server_version, sys_version = "envfleet", ""

    def do_GET(self) -> None:
        """Answer."""
        try:
            parts = urlsplit(self.path)
            rest = self._checked(parts.path)
            asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            self._answer(rest, asked)
        except _RefusedRequest as exc:
            self._send(exc.text.encode(), "text/plain; charset=utf-8", exc.status)
        except (ConfigError, JournalError, ValueError) as exc:
            text = str(exc).encode()
            self._send(text, "text/plain; charset=utf-8", HTTPStatus.BAD_REQUEST)

    def _checked(self, path: str) -> str:
        """The path after the token."""
        port = self.server.view.port
        if self.headers.get("Host", "") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            raise _RefusedRequest(HTTPStatus.FORBIDDEN, "this page is for browsers of its machine")
        _, _, after = path.partition("/")
        token, _, rest = after.partition("/")
        if not compare_digest(token.encode(), self.server.view.token.encode()):
            raise _RefusedRequest(
                HTTPStatus.FORBIDDEN, "open the whole address that envfleet view has printed"
            )
        return rest

    def _answer(self, rest: str, asked: Mapping[str, str]) -> None:
        feed = self.server.view.feed
        if rest == "":
            self._send_page()
        elif rest == "list":
            feed.update()
            if asked.get("version") == str(feed.version):
                self._send_json({"version": feed.version, "is_unchanged": True})
                return
            page = feed.page(query_of(asked), *_numbers(asked, offset=0, limit=50))
            self._send_json(page | {"name": feed.folder.resolve().name})
        elif rest == "conversation":
            env_id, attempt, first = _numbers(asked, env_id=-1, attempt=0, first=0)
            found = feed.trajectory(env_id, attempt)
            if found is None:
                raise _RefusedRequest(HTTPStatus.NOT_FOUND, "there is no such trajectory")
            self._send_json(conversation(found, first))
        elif rest == "picture":
            self._send_picture(feed.folder, asked.get("name", ""))
        elif rest == "trace.json":
            found_ones = (feed.trajectory(*key) for key in feed.all_keys())
            self._send_json(chrome_trace(one for one in found_ones if one is not None))
        else:
            raise _RefusedRequest(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = resources.files("envfleet.llm.view").joinpath("page.html").read_text("utf-8")
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        body = page.replace("{nonce}", nonce).encode()
        self._send(body, "text/html; charset=utf-8", policy=policy)

    def _send_picture(self, folder: Path, name: str) -> None:
        root = folder.resolve()
        path = (root / name).resolve()
        kind = _PICTURES.get(path.suffix.lower())
        if kind is None or not path.is_relative_to(root) or not path.is_file():
            raise _RefusedRequest(HTTPStatus.NOT_FOUND, "there is no such picture")
        self._send(path.read_bytes(), kind)

    def _send_json(self, document: Any) -> None:
        body = json.dumps(as_json(document), allow_nan=False).encode()
        self._send(body, "application/json")

    def _send(
        self,
        body: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        policy: str = "default-src 'none'",
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the token would be in every line."""


def query_of(asked: Mapping[str, str]) -> Query:
    """What the parameters of an address ask for; empty ones ask for nothing."""
    given = {name: value for name, value in asked.items() if value != ""}
    kinds: dict[str, Callable[[str], Any]] = {
        "tag": str,
        "group_id": int,
        "state": str,
        "least": float,
        "most": float,
        "order": str,
    }
    return Query(**{name: kinds[name](value) for name, value in given.items() if name in kinds})


def conversation(trajectory: Trajectory, first: int = 0) -> dict[str, Any]:
    """A trajectory as the page reads it, with its turns from the `first` on."""
    failure = trajectory.failure
    return {
        "env_id": trajectory.env_id,
        "attempt": trajectory.attempt,
        "group_id": trajectory.group_id,
        "tag": trajectory.tag,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        "penalty": trajectory.penalty,
        "extra_rewards": trajectory.extra_rewards,
        "is_done": trajectory.is_done,
        "is_success": trajectory.is_success,
        "is_masked": trajectory.is_masked,
        "failure": None if failure is None else asdict(failure),
        "final_state": trajectory.final_state,
        "metrics": trajectory.metrics,
        "num_turns": len(trajectory.turns),
        "turns": [_turn(one) for one in trajectory.turns[max(0, first) :]],
    }


def _turn(turn: TrajectoryTurn) -> dict[str, Any]:
    """Without token ids: nothing shows them, and they are most of a turn."""
    said = turn.generation
    return {
        "number": turn.number,
        "state": turn.state,
        "images": list(turn.images),
        "actions_left": turn.actions_left,
        "messages": [{"role": one.role, "content": one.content} for one in turn.new_messages],
        "raw": turn.prefill + said.text,
        "answer": turn.llm_response,
        "actions": list(turn.actions),
        "reward": turn.reward,
        "penalty": turn.penalty,
        "is_valid": turn.is_valid,
        "info": turn.info,
        "stop_reason": said.stop_reason,
        "num_tokens": said.num_tokens,
        "num_prompt_tokens": said.num_prompt_tokens,
        "model_version": said.model_version,
        "times": {
            "queue": said.times.queue_s,
            "prefill": said.times.prefill_s,
            "decode": said.times.decode_s,
            "transport": turn.times.transport_s,
            "env": turn.times.env_s,
        },
        "start_s": turn.times.start_s,
    }


def _numbers(asked: Mapping[str, str], **defaults: int) -> list[int]:
    return [int(asked.get(name) or default) for name, default in defaults.items()]
