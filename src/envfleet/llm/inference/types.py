"""What is asked of a language model, and what it answers.

    GenerateRequest ─► SharedLLMInferenceManager ─► Engine ─► Generation

Law: both are plain data that can be pickled and written as JSON. Token ids and log-probabilities
come from the engine or are absent; they are never made by tokenising text again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
StopReason = Literal["stop", "length"]
_SEED_BITS = 31
"""What every server takes, those with signed 32-bit seeds too."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    max_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 1.0
    seed: int = 0
    """Drawn from the run's seed, the environment and the turn."""
    stop: tuple[str, ...] = ()
    grammar: str | None = None
    """A GBNF grammar, for engines that can follow one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One question to the model: messages, or the ids of a prompt."""

    request_id: str
    """Unique in a run: names the environment, its attempt and its turn."""
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    """If given, the engine continues these tokens, and `messages` are for people only."""
    so_far: tuple[int, ...] | None = None
    """The tokens of the last prompt and of its answer, where `messages` only went on since: an
    engine that `continues_tokens` tokenises what is new and nothing else. It says nothing that
    `messages` do not say."""
    prefill: str = ""
    """The beginning of the answer, forced on the model; `Generation.text` starts after it."""
    sampling: Sampling = field(default_factory=Sampling)
    priority: tuple[int, ...] = ()
    """The smallest is served first; equal ones in the order in which they came."""
    timeout_s: float | None = None
    """How long it may take in all, in the queue too; None for the limit of each attempt only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTimes:
    """Where the time of one request went, in seconds."""

    queue_s: float = 0.0
    """Before the engine took it."""
    prefill_s: float = 0.0
    """Until the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The model's answer."""

    text: str
    stop_reason: StopReason
    prompt_ids: tuple[int, ...] | None = None
    """The tokens of the prompt, with the prefill, if the engine tells them."""
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    """Of each of `token_ids`, as they were when it was drawn."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    model_version: str = ""
    times: GenerationTimes = field(default_factory=GenerationTimes)


class Engine(Protocol):
    """A language model behind the broker. All its calls come from the broker's event loop."""

    @property
    def name(self) -> str:
        """What answers, for logs and journals: the kind of engine and its model."""
        ...

    @property
    def is_deterministic(self) -> bool:
        """Whether the same request always gets the same answer, in any company."""
        ...

    @property
    def max_concurrency(self) -> int:
        """How many requests it serves at once without a queue of its own."""
        ...

    async def start(self) -> None:
        """Get ready; called once before the first request."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer one request; raises `InferenceError`. A cancelled call frees its place."""
        ...

    async def close(self) -> None:
        """End what it started; calling it twice changes nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStats:
    """Counts since the manager was started, at one moment."""

    num_requests: int = 0
    num_answers: int = 0
    num_retries: int = 0
    num_cancelled: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Requests that failed for good, by reason: engine, timeout, budget."""
    retries: dict[str, int] = field(default_factory=dict)
    """Attempts that failed and were tried again, by reason."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Written by the model."""
    num_queued: int = 0
    """Waiting for a place at the engine, or for their next attempt."""
    num_in_flight: int = 0
    max_in_flight: int = 0
    """The most that there were at once."""
    max_concurrency: int = 1
    busy_s: float = 0.0
    """With at least one request at the engine."""
    occupied_s: float = 0.0
    """The same for each place at the engine, summed up."""
    engine_restarts: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the model wrote per second in which it had a request."""
        return self.num_tokens / self.busy_s if self.busy_s > 0 else 0.0


def request_seed(run_seed: int, env_id: int, turn: int, attempt: int = 0) -> int:
    """The seed of one request: the same in every process, and different for every argument."""
    text = f"{run_seed} {env_id} {turn} {attempt}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"envfleet-request").digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
