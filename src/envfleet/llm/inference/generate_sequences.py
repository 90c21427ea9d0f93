"""Objects with `generate_sequences(lm_inputs)`: Ray worker groups and vLLM wrappers of RAGEN.

They answer a whole batch at once, in lock-step, and may be called by one thread at a time. So
requests that come while a batch is under way form the next one. `lm_inputs` has the fields of
verl's `DataProto`, and is one where verl is installed: `non_tensor_batch` with `messages_list`,
`env_ids` and `group_ids`, and, if there is a tokenizer, `batch` with `input_ids`, `attention_mask`
and `position_ids`, padded on the left. Answers are read from `non_tensor_batch["response_texts"]`,
or decoded from `batch["responses"]`.

Such objects draw tokens by settings of their own, so `Sampling` reaches them as `meta_info` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from envfleet.errors import ConfigError, InferenceError
from envfleet.llm.inference.types import GenerateRequest, Generation


@dataclass
class LmInputs:
    """What `generate_sequences` is given where verl is not installed."""

    batch: dict[str, Any] | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.non_tensor_batch["env_ids"])


class GenerateSequencesEngine:
    """Lets such an object answer.

    Args:
        worker_group: Has `generate_sequences(lm_inputs)`; a `world_size` makes batches multiples
            of it.
        tokenizer: Makes `input_ids`, and decodes answers that come as ids; not needed by objects
            that read `messages_list` and answer with texts.
        max_concurrency: The largest batch.
        name: For logs and journals.
    """

    is_deterministic = False

    def __init__(
        self,
        worker_group: Any,
        tokenizer: Any = None,
        *,
        max_concurrency: int = 256,
        name: str = "",
    ) -> None:
        if not callable(getattr(worker_group, "generate_sequences", None)):
            raise ConfigError(
                f"a {type(worker_group).__name__} has no generate_sequences(lm_inputs)"
            )
        self._group, self._tokenizer = worker_group, tokenizer
        self.max_concurrency = max_concurrency
        self.name = name or type(worker_group).__name__
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the one thread that calls the object."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="envfleet-generate-sequences")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Take part in the next batch."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def close(self) -> None:
        """End the thread, when the batch that is under way is over."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.to_thread(thread.shutdown)

    async def _serve(self) -> None:
        """Batch after batch, while there are requests."""
        await asyncio.sleep(0)  # those who ask in the same moment come along
        while self._waiting:
            asked, self._waiting = self._waiting, []
            asked = [(request, future) for request, future in asked if not future.done()]
            if not asked:
                continue
            loop = asyncio.get_running_loop()
            try:
                answers = await loop.run_in_executor(
                    self._thread, self._answers, [request for request, _ in asked]
                )
            except Exception as exc:
                problem = f"generate_sequences raised {type(exc).__name__}: {exc}"
                for _, future in asked:
                    if not future.done():
                        future.set_exception(InferenceError("engine", problem))
                continue
            for (_, future), answer in zip(asked, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _answers(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        size = int(getattr(self._group, "world_size", 1) or 1)
        num_more = -len(requests) % size
        padded = [*requests, *[requests[0]] * num_more]
        outputs = self._group.generate_sequences(self._inputs(padded))
        texts, ids = self._read(outputs)
        if len(texts) != len(padded):
            raise ValueError(f"{len(padded)} requests got {len(texts)} answers")
        return [
            Generation(
                text=text.removeprefix(request.prefill),
                stop_reason="stop",
                token_ids=one,
                num_tokens=len(one or ()),
                model_version=self.name,
            )
            for request, text, one in zip(requests, texts, ids, strict=False)
        ]

    def _inputs(self, requests: Sequence[GenerateRequest]) -> Any:
        messages = np.empty(len(requests), dtype=object)
        for place, request in enumerate(requests):
            messages[place] = [
                {"role": one.role, "content": one.content} for one in request.messages
            ]
        texts = {
            "messages_list": messages,
            "env_ids": np.arange(len(requests), dtype=object),
            "group_ids": np.arange(len(requests), dtype=object),
        }
        sampling = requests[0].sampling
        info = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "do_sample": sampling.temperature > 0,
            "eos_token_id": getattr(self._tokenizer, "eos_token_id", None),
            "pad_token_id": getattr(self._tokenizer, "pad_token_id", None),
        }
        tensors = None if self._tokenizer is None else self._tensors(requests)
        if find_spec("verl") is None:
            return LmInputs(tensors, texts, info)
        from verl import DataProto

        return DataProto.from_dict(tensors or {}, texts, info)

    def _tensors(self, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
        import torch

        rows = [self._prompt_ids(request) for request in requests]
        width = max(map(len, rows))
        padding = self._tokenizer.pad_token_id
        padding = self._tokenizer.eos_token_id if padding is None else padding
        ids = torch.full((len(rows), width), 0 if padding is None else padding)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, width - len(row) :] = torch.tensor(row)
            mask[place, width - len(row) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def _prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        if request.prompt_ids is not None:
            return request.prompt_ids
        messages = [{"role": one.role, "content": one.content} for one in request.messages]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        found = self._tokenizer(text + request.prefill, add_special_tokens=False)["input_ids"]
        return [int(one) for one in found]

    def _read(self, outputs: Any) -> tuple[list[str], list[tuple[int, ...] | None]]:
        texts = (outputs.non_tensor_batch or {}).get("response_texts")
        if texts is not None:
            return [str(one) for one in texts], [None] * len(texts)
        if self._tokenizer is None:
            raise ValueError("the answers are ids; give the engine a tokenizer to read them")
        padding = self._tokenizer.pad_token_id
        ids = [
            tuple(int(one) for one in row if int(one) != padding)
            for row in outputs.batch["responses"]
        ]
        decode = self._tokenizer.decode
        return [str(decode(row, skip_special_tokens=True)) for row in ids], list(ids)
