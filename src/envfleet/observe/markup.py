"""HTML and SVG as text: all that is not markup already is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["Markup", "join", "tag"]

_VOID = frozenset({"meta", "br", "line", "rect", "path", "polyline", "polygon"})


class Markup(str):
    """Text that is markup; only this module and literals of the library make it."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        name: Of the element.
        children: What is in it; a plain string is text and is escaped.
        attributes: ``class_`` is class, ``stroke_width`` is stroke-width; True is an attribute
            with nothing in it, False and None leave it out.
    """
    opening = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + f'="{"" if value is True else escape(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{opening}/>")
    return Markup(f"<{name}{opening}>{join(children)}</{name}>")


def join(children: Sequence[str], between: str = "") -> Markup:
    """Several pieces as one."""
    pieces = (one if isinstance(one, Markup) else escape(one, quote=False) for one in children)
    return Markup(between.join(pieces))


def _shown(value: str | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
