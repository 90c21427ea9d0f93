from typing import Any

import numpy.typing as npt

_Array = npt.NDArray[Any]

def act(
    layers: tuple[_Array, ...],
    is_tanh: bool,
    obs: _Array,
    noise: _Array,
    deviations: _Array | None,
    actions: _Array,
    bounds: tuple[_Array, _Array, _Array] | None,
    /,
) -> None: ...
