"""What makes two requests the same, and answers as plain data that files can hold.

Two requests are the same if all that the model sees is, and their seeds are.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

from envfleet.llm.inference.types import GenerateRequest, Generation, GenerationTimes


def content_of(request: GenerateRequest) -> dict[str, Any]:
    """A request as plain data, without its name, its place in the queue and its deadline."""
    sampling = request.sampling
    return {
        "messages": [[message.role, message.content] for message in request.messages],
        "prompt_ids": None if request.prompt_ids is None else list(request.prompt_ids),
        "prefill": request.prefill,
        "sampling": {
            "max_tokens": sampling.max_tokens,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "grammar": sampling.grammar,
        },
    }


def content_key(request: GenerateRequest) -> str:
    """The same text for the same content, in every process."""
    data = json.dumps(content_of(request), separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(data.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def generation_data(answer: Generation) -> dict[str, Any]:
    """An answer as plain data."""
    return {
        "text": answer.text,
        "stop_reason": answer.stop_reason,
        "prompt_ids": _listed(answer.prompt_ids),
        "token_ids": _listed(answer.token_ids),
        "log_probs": _listed(answer.log_probs),
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_tokens": answer.num_tokens,
        "model_version": answer.model_version,
        "times": {
            "queue_s": answer.times.queue_s,
            "prefill_s": answer.times.prefill_s,
            "decode_s": answer.times.decode_s,
        },
    }


def plain_generation(answer: Generation) -> Generation:
    """The answer in plain numbers and whole characters, as records and JSON can hold it.

    An answer with a log-probability that is no finite number counts as one whose tokens were not
    reported. Half a character, which an engine may cut off, becomes U+FFFD.
    """
    token_ids = _plain_numbers(answer.token_ids, int)
    log_probs = _plain_numbers(answer.log_probs, float)
    if log_probs is not None and not all(map(math.isfinite, log_probs)):
        token_ids = log_probs = None
    text = answer.text
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return replace(
        answer,
        text=text,
        prompt_ids=_plain_numbers(answer.prompt_ids, int),
        token_ids=token_ids,
        log_probs=log_probs,
    )


def _plain_numbers(values: Any, kind: type[Any]) -> tuple[Any, ...] | None:
    """As a tuple of this type; one that is one already, mostly of thousands, is not copied."""
    if values is None or (isinstance(values, tuple) and type(next(iter(values), kind())) is kind):
        return values
    return tuple(map(kind, values))


def generation_from(data: dict[str, Any]) -> Generation:
    """The answer of this data."""
    lists = {name: data[name] for name in ("prompt_ids", "token_ids", "log_probs")}
    tuples = {name: None if one is None else tuple(one) for name, one in lists.items()}
    return Generation(**{**data, **tuples, "times": GenerationTimes(**data["times"])})


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    return None if values is None else list(values)
