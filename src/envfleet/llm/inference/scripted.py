"""An engine without a model: its answers depend on the content of a request and its seed, only.

It is for tests, for benchmarks, and to try a rollout without a model. A token of it is a byte of
UTF-8, so that its prompts and answers have exact token ids.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envfleet.llm.inference.content import content_key
from envfleet.llm.inference.types import GenerateRequest, Generation, GenerationTimes

Script = Callable[[GenerateRequest, random.Random], str]
"""Gives the whole answer to a request, its prefill included; the dice are the request's own."""
Latency = Callable[[GenerateRequest, random.Random], float]
"""Gives the seconds that an answer takes."""

_ACTIONS = re.compile(r"Your available actions are:\s*\n([^\n]+)")
_PREFILL_SHARE = 0.2
"""Of the latency, before the first token."""


def some_action(request: GenerateRequest, dice: random.Random) -> str:
    """One to three of the actions that the conversation names, or a number."""
    text = "\n".join(message.content for message in request.messages)
    named = _ACTIONS.search(text)
    if named is None:
        answer = str(dice.randint(0, 99))
    else:
        names = [name.strip() for name in named[1].split(",")]
        answer = " || ".join(dice.choice(names) for _ in range(dice.randint(1, 3)))
    thought = "<think>by a script</think>" if request.prefill != "<answer>" else ""
    return f"{thought}<answer>{answer}</answer>"


@dataclass(frozen=True, slots=True)
class LognormalLatency:
    """Times as those of a real model: most are short, and a few are very long.

    Args:
        median_s: Half of all answers are quicker.
        sigma: Of the logarithm.
    """

    median_s: float = 1.0
    sigma: float = 1.25

    def __call__(self, request: GenerateRequest, dice: random.Random) -> float:
        """The seconds that this request takes, whenever it is made."""
        return self.median_s * math.exp(dice.gauss(0.0, self.sigma))


class ScriptedEngine:
    """Answers by a function.

    Args:
        script: Gives the answers; by default one to three of the actions that a prompt names.
        latency: Gives the times; None answers at once.
        max_concurrency: How many requests it serves at once.
        tells_tokens: Whether answers come with token ids and log-probabilities.
    """

    name = "scripted"
    is_deterministic = True

    def __init__(
        self,
        script: Script = some_action,
        *,
        latency: Latency | None = None,
        max_concurrency: int = 64,
        tells_tokens: bool = True,
    ) -> None:
        self._script, self._latency = script, latency
        self._tells_tokens = tells_tokens
        self.max_concurrency = max_concurrency

    async def start(self) -> None:
        """Nothing needs to be started."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer as the script says, after the time that the latency says."""
        key = content_key(request)
        dice = random.Random(key)
        # drawn first, and by dice of its own: a script that draws more changes no times
        took_s = 0.0 if self._latency is None else self._latency(request, random.Random(f"{key}t"))
        text = self._script(request, dice).removeprefix(request.prefill)
        for stop in request.sampling.stop:
            text = text.partition(stop)[0]
        tokens = text.encode()
        is_cut = len(tokens) > request.sampling.max_tokens
        if is_cut:
            tokens = tokens[: request.sampling.max_tokens]
            text = tokens.decode(errors="ignore")
        if took_s > 0:
            await asyncio.sleep(took_s)
        prompt = _prompt(request)
        return Generation(
            text=text,
            stop_reason="length" if is_cut else "stop",
            prompt_ids=tuple(prompt) if self._tells_tokens else None,
            token_ids=tuple(tokens) if self._tells_tokens else None,
            log_probs=tuple(-dice.random() for _ in tokens) if self._tells_tokens else None,
            num_prompt_tokens=len(prompt),
            num_tokens=len(tokens),
            model_version="scripted",
            times=GenerationTimes(
                prefill_s=took_s * _PREFILL_SHARE, decode_s=took_s * (1 - _PREFILL_SHARE)
            ),
        )

    async def close(self) -> None:
        """Nothing was started."""


def _prompt(request: GenerateRequest) -> Sequence[int]:
    if request.prompt_ids is not None:
        return request.prompt_ids
    parts = [f"<|{message.role}|>{message.content}" for message in request.messages]
    return "".join([*parts, "<|assistant|>", request.prefill]).encode()
