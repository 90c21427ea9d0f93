"""How a host calls into an environment, and what is not the environment's to raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _directly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True, slots=True)
class Guard:
    """The manners of one place. Whatever is not let pass is a failure of the environment alone."""

    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = _directly
    passes: tuple[type[BaseException], ...] = ()
    """Raised by somebody else than the environment: Ctrl-C in this thread, the end of a worker."""

    def let_pass(self, exc: BaseException) -> None:
        """Raise `exc` again if it is not the environment's."""
        if isinstance(exc, self.passes):
            raise exc
