"""One turn of one environment: what its `reset` is told, in whatever form it was written."""

from typing import Any

import gymnasium
import pytest

from envfleet.llm.turns import TurnPlayer


class Older:
    """Shows what it was told."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 0.0, True, {}

    def render(self) -> str:
        return str(self.told)

    told: Any = None


class Named(Older):
    def reset(self, seed: int, mode: str) -> None:
        self.told = mode


class Whatever(Older):
    def reset(self, seed: int | None = None, **kwargs: Any) -> None:
        self.told = kwargs["mode"]


class Seeded(Older):
    def reset(self, seed: int) -> None:
        self.told = "nothing"


class Optional(Older):
    def reset(self, seed: int, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        assert options is not None
        assert not kwargs
        self.told = options["mode"]


class Gymnast(gymnasium.Env[Any, Any]):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.told = options["mode"]
        return "", {}

    def render(self) -> Any:
        return self.told


class Wrapped(Gymnast):
    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**kwargs)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Named, "val"),
        (Whatever, "val"),
        (Seeded, "nothing"),
        (Optional, "val"),
        (Gymnast, "val"),
        (Wrapped, "val"),
    ],
)
def test_a_reset_is_told_the_mode_if_it_can_be(kind: type[Any], told: str) -> None:
    opening = TurnPlayer(kind()).begin(5, "val")
    assert (opening.state, opening.failure) == (told, None)
