"""The block `llm` of a configuration: which engine answers, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envfleet.errors import ConfigError
from envfleet.llm.inference.types import Sampling
from envfleet.options import (
    Count,
    CountOrZero,
    NotNegative,
    Seconds,
    SecondsOrZero,
    Share,
    from_mapping,
    option_class,
)

EngineName = Literal["embedded", "openai", "scripted", "transformers", "cassette"]
CassetteMode = Literal["record", "replay", "auto"]


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceOptions:
    """Who answers the requests of a rollout, and within which limits."""

    engine: EngineName = "embedded"
    """What answers; a base_url means openai, and a cassette that replays needs no engine."""
    base_url: str | None = None
    """The address of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    model: str | None = None
    """The model's name at the server, the path of a GGUF file, or a Hugging Face model."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; the key itself is never kept."""
    max_tokens: Count = 256
    """The most tokens of one answer."""
    temperature: NotNegative = 0.7
    top_p: Share = 1.0
    grammar: bool = False
    """Hold answers to the expected form, if the engine can."""
    max_concurrency: Count | None = None
    """The most requests that the engine has at once; None for as many as suit it."""
    request_timeout_s: Seconds = 120.0
    """How long one attempt at a request may take."""
    trajectory_timeout_s: Seconds | None = None
    """How long a whole trajectory may take."""
    max_retries: CountOrZero = 5
    """How often a request is tried again after a failure that may pass."""
    retry_delay_s: SecondsOrZero = 0.5
    """The wait before the first of these; it doubles each time, to 30 s at most."""
    token_budget: Count | None = None
    """No request starts after so many tokens, read and written."""
    time_budget_s: Seconds | None = None
    """No request runs longer than this after the first one was made."""
    threads: Count | None = None
    """Threads of the embedded model; None for the cores that workers leave."""
    context_tokens: Count = 16384
    """Tokens of all conversations together that the embedded model can hold."""
    cassette: str | None = None
    """A file with recorded answers."""
    cassette_mode: CassetteMode = "auto"
    """record: ask the engine and write; replay: only what was recorded; auto: both."""

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        if self.engine == "openai" and self.base_url is None:
            raise ConfigError(
                "llm.engine openai needs llm.base_url, the address of a server, such as "
                "http://localhost:8000/v1"
            )
        if self.engine == "cassette" and self.cassette is None:
            raise ConfigError("llm.engine cassette needs llm.cassette, the file to replay")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError("llm.base_url must start with http:// or https://")
        if self.base_url is not None and "@" in self.base_url.split("/")[2]:
            raise ConfigError(
                "llm.base_url must not hold a user or a password, which would be written into "
                "records; put a key into the environment variable that llm.api_key_env names"
            )
        if self.base_url is not None and self.engine not in ("embedded", "openai"):
            raise ConfigError(
                f"llm.base_url is for llm.engine openai, not {self.engine}; leave one of them out"
            )

    @property
    def engine_name(self) -> EngineName:
        """The engine that is meant: a base_url implies `openai`."""
        return "openai" if self.base_url is not None else self.engine

    def sampling(
        self, seed: int, *, stop: tuple[str, ...] = (), grammar: str | None = None
    ) -> Sampling:
        """How tokens of one answer are drawn; a grammar counts only if the option asks for one."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed,
            stop=stop,
            grammar=grammar if self.grammar else None,
        )


def read_options(config: Mapping[str, Any]) -> InferenceOptions:
    """Read the block `llm` of a plain configuration; what is not there has defaults."""
    block = config.get("llm")
    if block is None:
        return InferenceOptions()
    if not isinstance(block, Mapping):
        raise ConfigError(f"llm must hold options with their values, got {block!r:.60}")
    return from_mapping(InferenceOptions, block, "llm")
