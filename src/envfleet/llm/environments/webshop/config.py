"""The options of a shop: its catalogue, its goals and its rewards."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import TextEnvConfig
from envfleet.llm.environments.config_fields import check_range
from envfleet.llm.environments.webshop.goals import FilterGoals
from envfleet.llm.environments.webshop.reward import Nouns
from envfleet.llm.environments.webshop.sources import GeneratedSource, Source, SourceFiles, locate
from envfleet.llm.environments.webshop.store import CACHE_VARIABLE, default_cache, prepare
from envfleet.observe.progress import Progress
from envfleet.options import check_fields

NUM_GENERATED = {"small": 1000, "full": 100_000}


@dataclass(slots=True, kw_only=True)
class WebShopConfig(TextEnvConfig):
    """The catalogue, the goals and the rewards."""

    dataset: str = "small"
    """"small" or "full": which files to look for, or how many products to generate."""
    file_path: str | None = None
    """WebShop's products: a .json or .jsonl file, or a folder; None generates a catalogue."""
    attr_path: str | None = None
    """items_ins_v2*.json; found beside the products unless given."""
    human_path: str | None = None
    """items_human_ins.json; found beside the products unless given."""
    human_goals: bool = False
    """Use goals that people wrote, instead of one for each combination of a product's options."""
    num_products: int | None = None
    """How many products; None: all of a file, or 1000 or 100,000 generated ones."""
    limit_goals: int = -1
    """How many goals are drawn, mostly those with rare attributes; -1: all."""
    filter_goals: FilterGoals | str | None = None
    """`f(number, goal)` says whether a goal is kept; or its name, "package.module:function"."""
    show_attrs: bool = False
    """Whether a product has a page of its attributes."""
    observation_mode: str = "text"
    """Only "text": there are no HTML pages, no URLs and no pictures."""
    catalogue_seed: int = 0
    """The seed of a generated catalogue."""
    nouns: Nouns | str | None = None
    """`f(title)` gives its nouns; or its name, "package.module:function"; None: a simple rule."""
    binary_reward: bool = False
    """Whether the reward is 1 for a perfect purchase and else 0; the info has raw_reward."""
    cache_dir: str | None = None
    """Where catalogues are built; None: $ENVFLEET_CACHE or the user's cache folder."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.action_lookup is not None:
            raise ConfigError("a search is free text: WebShop has no action_lookup")
        if self.dataset not in NUM_GENERATED:
            raise ConfigError(f"dataset must be small or full, got {self.dataset!r}")
        if self.observation_mode != "text":
            raise ConfigError(
                f"observation_mode must be text, got {self.observation_mode!r}: there are no HTML "
                "pages, no URLs and no pictures here"
            )
        check_range(self, "num_products", least=1)
        check_range(self, "limit_goals", least=-1)

    def action_grammar(self) -> str:
        """A search or a click; what can be clicked depends on the page."""
        return '("search[" | "click[") [^\\]<|\\n]{1,60} "]"'


def source_of(config: WebShopConfig) -> Source:
    """The source of a configuration's catalogue."""
    if config.file_path is None:
        if config.attr_path is not None or config.human_path is not None:
            raise ConfigError("attr_path and human_path belong to products: give file_path as well")
        number = config.num_products or NUM_GENERATED[config.dataset]
        return GeneratedSource(number, config.catalogue_seed)
    files = locate(config.file_path, config.attr_path, config.human_path, config.dataset)
    return SourceFiles(*files, num_products=config.num_products)


def prepare_catalogue(config: WebShopConfig, progress: Progress | None = None) -> Path:
    """Build the catalogue of a configuration if it is not there; returns its folder.

    An environment does this when its first episode begins; call it before to save that wait.
    """
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache()
    try:
        return prepare(source_of(config), cache, progress)
    except OSError as exc:
        raise ConfigError(
            f"WebShop's catalogue cannot be built in {cache}: {exc.strerror or exc}; "
            f"cache_dir or ${CACHE_VARIABLE} names another folder"
        ) from exc


def function_named(named: Callable[..., Any] | str | None, field: str) -> Callable[..., Any] | None:
    """The function with this name; a function or None as it is."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f'{field}: {named!r} is not a "package.module:function" that exists'
        ) from exc
    if not callable(found):
        raise ConfigError(f"{field}: {named!r} is no function but a {type(found).__name__}")
    return cast("Callable[..., Any]", found)
