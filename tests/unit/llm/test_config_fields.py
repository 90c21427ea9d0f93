"""Values of a configuration are of the kinds that its fields say, or the field is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import TextEnv, TextEnvConfig
from envfleet.llm.registry import env_type
from envfleet.options import check_fields

if TYPE_CHECKING:
    from decimal import Decimal

OURS = ["bandit", "countdown", "frozen_lake", "metamathqa", "sokoban", "webshop"]


@dataclass(slots=True, kw_only=True)
class Many(TextEnvConfig):
    is_wet: bool = False
    count: int = 1
    share: float = 0.5
    name: str = "a"
    seed: int | None = None
    way: Literal["up", "down"] = "up"
    sizes: tuple[int, ...] = (1,)
    rows: Sequence[Mapping[str, Any]] = ()
    words: list[str] = field(default_factory=list)
    table: dict[int, str] = field(default_factory=dict)
    judge: Callable[[str], bool] | str | None = None
    thing: Any = None
    sloppy: int = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "given",
    [
        {"is_wet": np.True_},
        {"count": np.int64(3)},
        {"share": 1},
        {"share": np.float32(0.5)},
        {"seed": None},
        {"seed": 5},
        {"way": "down"},
        {"sizes": [3, 4]},
        {"sizes": np.array([3, 4])},
        {"rows": [3]},  # what is in it is for its reader to say
        {"words": ("a", "b")},
        {"table": {1: "a"}},
        {"judge": len},
        {"judge": "module:function"},
        {"thing": [...]},
        {"sloppy": None},
    ],
    ids=str,
)
def test_the_right_kinds_are_taken(given: dict[str, Any]) -> None:
    Many(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"is_wet": "no"}, "is_wet must be true or false, got 'no'"),
        ({"is_wet": 1}, "is_wet must be true or false, got 1"),
        ({"count": 1.0}, "count must be a whole number, got 1.0"),
        ({"count": True}, "count must be a whole number, got True"),
        ({"share": "half"}, "share must be a finite number, got 'half'"),
        ({"share": float("nan")}, "share must be a finite number, got nan"),
        ({"share": 10**400}, "share must be a finite number, got 1000"),
        ({"share": False}, "share must be a finite number, got False"),
        ({"name": None}, "name must be text, got None"),
        ({"seed": "1"}, "seed must be a whole number, or None; got '1'"),
        ({"way": "left"}, "way must be one of 'up', 'down'; got 'left'"),
        ({"way": []}, "way must be one of 'up', 'down'; got "),
        ({"sizes": "34"}, "sizes must be a list of whole numbers, got '34'"),
        ({"sizes": [3, "4"]}, "sizes must be a list of whole numbers, got "),
        ({"sizes": 3}, "sizes must be a list of whole numbers, got 3"),
        ({"rows": {"a": 1}}, "rows must be a list, got {'a': 1}"),
        ({"words": [1]}, "words must be a list of texts, got "),
        ({"table": ["a"]}, "table must be a mapping of texts, got "),
        ({"table": {1: 2}}, "table must be a mapping of texts, got {1: 2}"),
        ({"judge": 3}, "judge must be a function or text, or None; got 3"),
        ({"sloppy": "x"}, "sloppy must be a whole number, got 'x'"),
        ({"render_mode": 3}, "render_mode must be text, got 3"),
    ],
    ids=str,
)
def test_the_wrong_kinds_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Many(**given)
    assert str(caught.value).startswith(said)


def test_what_cannot_be_looked_up_is_not_asked_for() -> None:
    @dataclass
    class Unknown:
        price: Decimal
        count: int = 1

    check_fields(Unknown(price="dear", count="many"))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [object(), {"a": object()}, [[object()]]], ids=["", "{}", "[]"])
@pytest.mark.parametrize("name", OURS)
def test_no_field_of_the_six_takes_just_anything(name: str, wrong: Any) -> None:
    config_class = env_type(name).config_class
    for one in fields(config_class):
        if one.name == "dataset_path" and isinstance(wrong, list):
            continue  # rows, which are looked at when they are read
        with pytest.raises(ConfigError, match=rf"\b{one.name}\b"):
            config_class(**{one.name: wrong})


@pytest.mark.parametrize("lookup", [{}, {"a": "b"}, {1.5: "b"}, {True: "b"}], ids=str)
def test_actions_have_numbers(lookup: Any) -> None:
    with pytest.raises(ConfigError, match="action_lookup must name actions by whole numbers"):
        TextEnv(TextEnvConfig(action_lookup=lookup))


@pytest.mark.parametrize("name", ["countdown", "metamathqa", "webshop"])
def test_free_text_has_no_lookup(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is free text: .* has no action_lookup"):
        env_type(name).config({"action_lookup": {1: "yes"}})


def test_a_lake_has_a_size_that_can_be_drawn() -> None:
    with pytest.raises(ConfigError, match="size must be from 2 to 1000, got 1000000"):
        env_type("frozen_lake").config({"size": 1_000_000})
