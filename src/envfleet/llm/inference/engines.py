"""The engine that options name; its module is imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError
from envfleet.llm.inference.options import InferenceOptions
from envfleet.llm.inference.types import Engine


def engine_of(options: InferenceOptions, config: Mapping[str, Any] | None = None) -> Engine:
    """The engine that these options name, with its cassette if they name one.

    Args:
        options: The block `llm`.
        config: The whole configuration, which says how many cores workers take.
    """
    name = options.engine_name
    is_replay = options.cassette is not None and options.cassette_mode == "replay"
    inner = None if name == "cassette" or is_replay else _plain_engine(name, options, config or {})
    if options.cassette is None:
        assert inner is not None
        return inner
    from envfleet.llm.inference.cassette import CassetteEngine

    return CassetteEngine(options.cassette, inner, mode=options.cassette_mode)


def _plain_engine(name: str, options: InferenceOptions, config: Mapping[str, Any]) -> Engine:
    if name == "scripted":
        from envfleet.llm.inference.scripted import ScriptedEngine

        return ScriptedEngine(max_concurrency=options.max_concurrency or 64)
    if name == "openai":
        from envfleet.llm.inference.openai_http import OpenAIEngine

        assert options.base_url is not None
        return OpenAIEngine(
            options.base_url,
            options.model,
            api_key_env=options.api_key_env,
            max_concurrency=options.max_concurrency or 64,
        )
    if name == "transformers":
        from envfleet.llm.inference.transformers_engine import TransformersEngine

        if options.model is None:
            raise ConfigError("llm.engine transformers needs llm.model, a folder or a hub's name")
        return TransformersEngine.from_pretrained(options.model)
    from envfleet.llm.inference.embedded import EmbeddedEngine

    return EmbeddedEngine(
        model=options.model,
        threads=options.threads or threads_left(config),
        max_concurrency=options.max_concurrency or 8,
        context_tokens=options.context_tokens,
    )


def threads_left(config: Mapping[str, Any]) -> int:
    """Cores that the workers of a rollout leave; one is the least."""
    proxy = config.get("agent_proxy") or {}
    num_jobs = proxy.get("parallel_n_jobs", -1) if proxy.get("use_parallel_rollout") else 0
    taken = num_jobs if isinstance(num_jobs, int) and num_jobs >= 0 else 1
    return max(1, usable_cores() - taken)
