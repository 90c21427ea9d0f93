"""Answers recorded in a file, and given again without a model.

Law: an answer is found by the content of its request and its seed; the name of the request, its
priority and the company in which it came do not matter. The first answer to a request is the one
that counts. A replay asks no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from envfleet.errors import ConfigError, InferenceError
from envfleet.llm.checked_lines import as_line, read_lines
from envfleet.llm.inference.content import (
    content_key,
    content_of,
    generation_data,
    generation_from,
)
from envfleet.llm.inference.options import CassetteMode
from envfleet.llm.inference.types import Engine, GenerateRequest, Generation

_SHOWN = 80
"""Characters of a request that an error shows."""


class CassetteEngine:
    """Replays recorded answers, and records new ones.

    Args:
        path: The file.
        inner: Who answers what is not recorded; not needed to replay.
        mode: "replay" asks `inner` nothing; "record" starts the file anew; "auto" replays what is
            there and records the rest.
    """

    is_deterministic = True

    def __init__(
        self, path: str | Path, inner: Engine | None = None, *, mode: CassetteMode = "auto"
    ) -> None:
        self._path, self._mode = Path(path).expanduser(), mode
        self._inner = None if mode == "replay" else inner
        self._answers: dict[str, Generation] = {}
        self._file: BinaryIO | None = None
        if mode == "record" and inner is None:
            raise ConfigError(
                f"llm.cassette_mode record needs an engine to record; give llm.engine its name "
                f"and leave {self._path} to llm.cassette"
            )

    @property
    def name(self) -> str:
        """Whose answers these are."""
        return f"cassette of {self._inner.name}" if self._inner is not None else "cassette"

    @property
    def max_concurrency(self) -> int:
        """That of the engine behind it."""
        return self._inner.max_concurrency if self._inner is not None else 64

    @property
    def continues_tokens(self) -> bool:
        """Whether the engine behind it takes a conversation as tokens that only grow."""
        return getattr(self._inner, "continues_tokens", False)

    async def start(self) -> None:
        """Read what is recorded; start the engine if there may be more."""
        end = 0
        if self._mode != "record" and (self._path.exists() or self._inner is None):
            try:
                for data, end in read_lines(self._path):  # noqa: B007 - the last end is used
                    self._answers.setdefault(data["key"], generation_from(data["generation"]))
            except OSError as exc:
                raise ConfigError(f"llm.cassette {self._path} cannot be read: {exc}") from exc
        if self._inner is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._file.truncate(end)  # a line that was never finished
        except OSError as exc:
            raise ConfigError(f"llm.cassette {self._path} cannot be written: {exc}") from exc
        await self._inner.start()

    async def generate(self, request: GenerateRequest) -> Generation:
        """The recorded answer, or a new one."""
        key = content_key(request)
        found = self._answers.get(key)
        if found is not None:
            return found
        if self._inner is None:
            raise InferenceError("engine", self._what_is_missing(request, key))
        answer = await self._inner.generate(request)
        # another request of the same content may have been answered meanwhile
        if key not in self._answers:
            self._answers[key] = answer
            self._record(key, request, answer)
        return self._answers[key]

    async def close(self) -> None:
        """Close the file and the engine."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._inner is not None:
            await self._inner.close()

    def _record(self, key: str, request: GenerateRequest, answer: Generation) -> None:
        line = as_line(
            {
                "key": key,
                "request_id": request.request_id,
                "request": content_of(request),
                "generation": generation_data(answer),
            }
        )
        if self._file is None:  # closed meanwhile
            return
        try:
            self._file.write(line)
        except OSError as exc:
            raise InferenceError(
                "engine", f"its answer cannot be recorded in {self._path}: {exc}"
            ) from exc

    def _what_is_missing(self, request: GenerateRequest, key: str) -> str:
        last = request.messages[-1].content if request.messages else f"{request.prompt_ids}"
        shown = " ".join(last[-4 * _SHOWN :].split())[-_SHOWN:]
        return (
            f"{self._path} has {len(self._answers)} answers, but none to request "
            f"{request.request_id} (seed {request.sampling.seed}, key {key}), which ends in "
            f"{shown!r}. Record it with llm.cassette_mode auto, or use the configuration and seed "
            "of the recording"
        )
