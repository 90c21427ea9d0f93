"""States as histories hold them: text as it is, pictures beside a mark for each."""

from __future__ import annotations

from typing import Any

from envfleet.errors import MissingExtra
from envfleet.llm.turns import State

IMAGE_MARK = "<images>"


def seen(state: State) -> dict[str, Any]:
    """The parts of a history entry that show a state."""
    if isinstance(state, str):
        return {"state": state}
    return {"state": IMAGE_MARK * len(state), "images": [_picture(one) for one in state]}


def _picture(pixels: Any) -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtra("pictures as states need Pillow: pip install pillow") from exc

    return Image.fromarray(pixels).convert("RGB")
