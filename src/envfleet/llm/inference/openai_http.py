"""Any server that speaks OpenAI's protocol: vLLM, SGLang, llama.cpp, or a hosted one.

Answers are streamed and `max_tokens` is always sent: a server gives the place of a streamed request
free as soon as the connection is cut, and that of another only when it has written all of it. What
goes beyond the protocol (token ids, grammars) is asked only of servers that are known to have it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from envfleet.errors import InferenceError
from envfleet.llm.inference.http_calls import JsonServer, key_from, without_credentials
from envfleet.llm.inference.types import (
    GenerateRequest,
    Generation,
    GenerationTimes,
    StopReason,
)


class OpenAIEngine:
    """Asks a server over HTTP.

    Args:
        base_url: Its address, with the version: http://localhost:8000/v1.
        model: Its name at the server; None for the first that the server lists.
        api_key_env: The environment variable that holds the key.
        max_concurrency: How many requests it gets at once.
    """

    is_deterministic = False

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        max_concurrency: int = 64,
    ) -> None:
        self._base_url, self._model = base_url, model
        self._kind = ""
        self.max_concurrency = max_concurrency
        bad_key = f"Put the right key into the environment variable {api_key_env}"
        self._server = JsonServer(base_url, key_from(api_key_env), {401: bad_key, 403: bad_key})

    @property
    def name(self) -> str:
        """The model and its server."""
        return f"{self._model or 'openai'} at {without_credentials(self._base_url)}"

    async def start(self) -> None:
        """Ask which models there are, to know the server; a server need not tell."""
        try:
            listed = await self._server.get("/models")
            first = listed["data"][0]
            self._kind = str(first.get("owned_by", "")).lower()
            self._model = self._model or str(first["id"])
        except (InferenceError, LookupError, TypeError, AttributeError) as exc:
            why = exc.problem if isinstance(exc, InferenceError) else "its list is empty or odd"
            if self._model is None:
                raise InferenceError(
                    "engine",
                    f"{without_credentials(self._base_url)} does not say which models it has, so "
                    f"name one by llm.model ({why})",
                ) from exc

    async def generate(self, request: GenerateRequest) -> Generation:
        """Ask, and put the streamed answer together."""
        path, body = self._asked(request)
        answer = _Answer()
        async for event in self._server.stream(path, body):
            answer.add(event)
        return answer.finished(request, self._model or "")

    async def close(self) -> None:
        """Close all connections."""
        await self._server.close()

    def _asked(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if self._kind == "vllm":
            body["return_token_ids"] = True
            if sampling.grammar is not None:
                body["structured_outputs"] = {"grammar": sampling.grammar}
        elif self._kind == "llamacpp":
            body |= {"return_tokens": True, "cache_prompt": True, "top_k": 0, "min_p": 0.0}
            if sampling.grammar is not None:
                body["grammar"] = sampling.grammar
        elif self._kind == "sglang" and sampling.grammar is not None:
            body["ebnf"] = sampling.grammar
        if request.prompt_ids is not None:
            body |= {"prompt": list(request.prompt_ids), "logprobs": 1}
            return "/completions", body
        messages = [{"role": one.role, "content": one.content} for one in request.messages]
        if request.prefill:
            messages.append({"role": "assistant", "content": request.prefill})
            if self._kind in ("vllm", "sglang"):
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        return "/chat/completions", body | {"messages": messages, "logprobs": True}


@dataclass(slots=True)
class _Answer:
    """The events of one answer, put together."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    begun_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None

    def add(self, event: dict[str, Any]) -> None:
        try:
            self.usage = event.get("usage") or self.usage
            self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
            for choice in event.get("choices") or ():
                self._add_choice(choice)
        except (TypeError, AttributeError, KeyError, ValueError) as exc:
            raise InferenceError(
                "engine",
                f"the server answered what is not of OpenAI's protocol: {event!r:.100}",
                is_retryable=True,
            ) from exc

    def _add_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        if not isinstance(text, str):
            raise TypeError(text)
        if text and self.first_s is None:
            self.first_s = time.perf_counter()
        self.texts.append(text)
        self.finish = choice.get("finish_reason") or self.finish
        self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
        log_probs = choice.get("logprobs") or {}
        of_tokens = log_probs.get("content") or ()
        self.log_probs += [float(one["logprob"]) for one in of_tokens]
        self.log_probs += map(float, log_probs.get("token_logprobs") or ())
        ids = choice.get("token_ids") or [one["id"] for one in of_tokens if "id" in one]
        self.token_ids += map(int, ids)

    def finished(self, request: GenerateRequest, model: str) -> Generation:
        if self.finish is None:
            raise InferenceError(
                "engine", "the server's answer was cut in the middle", is_retryable=True
            )
        end_s = time.perf_counter()
        first_s = end_s if self.first_s is None else self.first_s
        stop: StopReason = "length" if self.finish == "length" else "stop"
        ids = tuple(self.token_ids) or None
        are_complete = ids is not None and len(self.log_probs) == len(ids)
        prompt_ids = request.prompt_ids or (self.prompt_ids and tuple(self.prompt_ids)) or None
        num_prompt = int(self.usage.get("prompt_tokens") or len(prompt_ids or ()))
        num_tokens = int(self.usage.get("completion_tokens") or len(ids or self.texts))
        return Generation(
            # a server that cannot continue a message begins the answer anew
            text="".join(self.texts).removeprefix(request.prefill),
            stop_reason=stop,
            prompt_ids=prompt_ids,
            token_ids=ids,
            log_probs=tuple(self.log_probs) if are_complete else None,
            num_prompt_tokens=num_prompt,
            num_tokens=num_tokens,
            model_version=model,
            times=GenerationTimes(prefill_s=first_s - self.begun_s, decode_s=end_s - first_s),
        )
