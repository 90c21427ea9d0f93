"""A Hugging Face model in this process, one answer at a time.

It draws tokens itself, by a generator of its own for each request: the same request gets the same
answer, other users of PyTorch's random numbers are not disturbed, and a cancelled request ends
after its next token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envfleet.errors import InferenceError
from envfleet.llm.extras import import_extra
from envfleet.llm.inference.types import (
    GenerateRequest,
    Generation,
    GenerationTimes,
    StopReason,
)


class TransformersEngine:
    """Answers with a causal language model of PyTorch.

    Args:
        model: Such as `AutoModelForCausalLM.from_pretrained(...)` gives.
        tokenizer: Its tokenizer; a chat template is used if it has one.
        model_version: Written into every answer.
        has_scaled_log_probs: Whether log-probabilities are those at the temperature of the request,
            as some trainers work them out, and not those of the model.
    """

    is_deterministic = True
    max_concurrency = 1

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        model_version: str = "",
        has_scaled_log_probs: bool = False,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._has_scaled_log_probs = has_scaled_log_probs
        self._version = model_version or str(getattr(model, "name_or_path", "") or "transformers")
        self._thread: ThreadPoolExecutor | None = None

    @classmethod
    def from_pretrained(cls, name: str) -> TransformersEngine:
        """The model of this folder or name at the hub."""
        transformers = import_extra(
            "transformers",
            wanted_by="llm.engine transformers",
            install="pip install torch transformers",
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(name)
        return cls(model, transformers.AutoTokenizer.from_pretrained(name), model_version=name)

    @property
    def name(self) -> str:
        """The model."""
        return f"transformers {self._version}"

    async def start(self) -> None:
        """Start the thread in which the model works."""
        self._model.eval()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="envfleet-transformers")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw an answer, token by token."""
        is_cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._draw, request, is_cancelled
            )
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.to_thread(thread.shutdown)

    def _draw(self, request: GenerateRequest, is_cancelled: threading.Event) -> Generation:
        import torch

        begun_s = time.perf_counter()
        sampling = request.sampling
        prompt_ids = request.prompt_ids or self._prompt_ids(request)
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and len(prompt_ids) >= limit:
            raise InferenceError(
                "engine",
                f"the conversation has {len(prompt_ids):,} tokens, and the model reads {limit:,}. "
                "Set agent_proxy.max_context_window",
            )
        device = next(self._model.parameters()).device
        dice = torch.Generator(device).manual_seed(sampling.seed)
        most = min(sampling.max_tokens, (limit or 1 << 30) - len(prompt_ids))
        ends = self._end_ids()
        token_ids: list[int] = []
        log_probs: list[float] = []
        first_s, past, stop, text = begun_s, None, "length", ""
        ids = torch.tensor([prompt_ids], device=device)
        with torch.inference_mode():
            while len(token_ids) < most and not is_cancelled.is_set():
                out = self._model(input_ids=ids, past_key_values=past, use_cache=True)
                past, logits = out.past_key_values, out.logits[0, -1].float()
                token = _drawn(torch, logits, sampling.temperature, sampling.top_p, dice)
                if not token_ids:
                    first_s = time.perf_counter()
                token_ids.append(token)
                if self._has_scaled_log_probs and sampling.temperature > 0:
                    logits = logits / sampling.temperature
                log_probs.append(float(torch.log_softmax(logits, -1)[token]))
                if token in ends:
                    stop = "stop"
                    break
                text = self._text(token_ids)
                if any(word in text for word in sampling.stop):
                    stop = "stop"
                    break
                ids = torch.tensor([[token]], device=device)
        text = self._text(token_ids)
        for word in sampling.stop:
            text = text.partition(word)[0]
        reason: StopReason = "stop" if stop == "stop" else "length"
        return Generation(
            text=text,
            stop_reason=reason,
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(token_ids),
            log_probs=tuple(log_probs),
            num_prompt_tokens=len(prompt_ids),
            num_tokens=len(token_ids),
            model_version=self._version,
            times=GenerationTimes(
                prefill_s=first_s - begun_s, decode_s=time.perf_counter() - first_s
            ),
        )

    def _prompt_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        messages = [{"role": one.role, "content": one.content} for one in request.messages]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        else:
            lines = [f"{one['role']}: {one['content']}\n" for one in messages]
            text = "".join([*lines, "assistant: "])
        ids = self._tokenizer(text + request.prefill, add_special_tokens=False)["input_ids"]
        return tuple(map(int, ids))

    def _end_ids(self) -> frozenset[int]:
        found = getattr(self._model.generation_config, "eos_token_id", None)
        listed = found if isinstance(found, list) else [found, self._tokenizer.eos_token_id]
        return frozenset(one for one in listed if one is not None)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _drawn(torch: Any, logits: Any, temperature: float, top_p: float, dice: Any) -> int:
    """One token by its probability; the most probable one if the temperature is 0."""
    if temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        ordered, places = probs.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= max(top_p, 1e-9)] = 0.0
        probs = torch.zeros_like(probs).scatter(-1, places, ordered)
    return int(torch.multinomial(probs, 1, generator=dice))
