"""Calls of an HTTP server with JSON, whole or streamed, whose failures are all `InferenceError`s.

Law: the key is read from the environment for each request. It is in the header of that request and
nowhere else: what a server says of it is taken out of every error.
"""

from __future__ import annotations

import email.utils
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from envfleet.errors import InferenceError
from envfleet.llm.extras import import_extra

if TYPE_CHECKING:
    import aiohttp

_MOST_SHOWN = 300
_MOST_READ = 1 << 16
_LONGEST_LINE = 1 << 24
"""Bytes of one event: a server may tell the ids of a long prompt in one."""


class JsonServer:
    """One HTTP server that takes and gives JSON.

    Args:
        base_url: Where the paths of calls begin.
        key: Gives the key for the header of a request, if there is one.
        advice: What to do about an answer with this status, as the end of a sentence.
    """

    def __init__(
        self, base_url: str, key: Callable[[], str | None], advice: Mapping[int, str]
    ) -> None:
        self._base_url, self._key, self._advice = base_url.rstrip("/"), key, advice
        self._session: aiohttp.ClientSession | None = None
        self._aiohttp = _aiohttp()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Any:
        """The JSON at this path."""
        async with self._answer("GET", path, None) as response:
            return await _whole_reply(response)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that the server answers."""
        async with self._answer("POST", path, body) as response:
            return await _whole_reply(response)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events that the server answers, each as it comes; a cut stream just ends."""
        async with self._answer("POST", path, body) as response:
            async for line in _reply_lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _parsed_reply(data)
                if not isinstance(event, dict):
                    raise _garbage(data)
                if "error" in event:
                    raise self._refused(_http_status_in(event["error"]), data, {})
                yield event

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        aiohttp = self._aiohttp
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the broker limits them
                timeout=aiohttp.ClientTimeout(total=None),  # the broker has the deadline
            )
        key = self._key()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{self._base_url}{path}"
        try:
            async with self._session.request(
                method, url, json=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    text = await response.content.read(_MOST_READ)
                    raise self._refused(response.status, text, response.headers)
                yield response
        # none of aiohttp's errors is kept as a cause: some hold the headers, and so the key
        except InferenceError:
            raise
        except aiohttp.ClientConnectorCertificateError:
            raise InferenceError("engine", f"{self._place()} has no valid certificate") from None
        except aiohttp.InvalidURL:
            raise InferenceError("engine", "llm.base_url is not an address") from None
        except aiohttp.ClientConnectorError as exc:
            raise InferenceError(
                "engine",
                f"{self._place()} cannot be reached ({exc.strerror or exc.os_error}). Check that "
                "the server runs, and llm.base_url",
                is_retryable=True,
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise InferenceError(
                "engine",
                f"the connection to {self._place()} was cut ({type(exc).__name__})",
                is_retryable=True,
            ) from None

    def _place(self) -> str:
        return without_credentials(self._base_url)

    def _refused(self, status: int, body: bytes, headers: Mapping[str, str]) -> InferenceError:
        text = _http_error_text(body)
        key = self._key()
        shown = (text.replace(key, "***") if key else text)[:_MOST_SHOWN] or "no reason given"
        is_passing = status in (408, 425, 429) or status >= 500
        if "insufficient_quota" in text or b'"insufficient_quota"' in body:
            is_passing = False
        if is_passing:
            advice = "It may pass; else look at the server's log"
        elif "exceed_context_size" in body.decode(errors="replace") or "context length" in text:
            advice = "Set agent_proxy.max_context_window, or lower llm.max_tokens"
        else:
            advice = self._advice.get(status, "Check llm.model and llm.base_url")
        return InferenceError(
            "engine",
            f"{self._place()} answered {status}: {shown}. {advice}",
            is_retryable=is_passing,
            retry_after_s=retry_after_s(headers.get("Retry-After"), time.time()),
        )


def key_from(variable: str) -> Callable[[], str | None]:
    """Reads the key from this environment variable whenever it is asked."""
    return lambda: os.environ.get(variable) or None


def without_credentials(url: str) -> str:
    """An address as it may be shown: without a user, a password and a query."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """The seconds that a server asks to wait, given as a number or as a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None


def _aiohttp() -> Any:
    install = "pip install 'envfleet[llm]'"
    return import_extra("aiohttp", wanted_by="a model behind an address", install=install)


async def _reply_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a body as they come, several at a time if they come together."""
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > _LONGEST_LINE:
            raise _garbage(rest)
    yield rest


async def _whole_reply(response: aiohttp.ClientResponse) -> Any:
    return _parsed_reply(await response.read())


def _parsed_reply(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as exc:
        raise _garbage(data) from exc


def _garbage(data: bytes) -> InferenceError:
    shown = data[:60].decode(errors="replace")
    return InferenceError(
        "engine",
        f"the server answered what is not JSON: {shown!r}. Check that llm.base_url is that of an "
        "OpenAI-compatible server",
        is_retryable=True,
    )


def _http_status_in(error: Any) -> int:
    """The status that an error in the middle of a stream stands for."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _http_error_text(body: bytes) -> str:
    """The reason in an error's body, in whichever form a server gives it, as one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    return " ".join(text.split())
