"""An actor's forward pass for one step of many slots, whose rows do not depend on each other.

The embeddings of action, reward and observation are one matrix product here, and the memory is a
call of its cell: a third of the time that the modules take. A row's result is the same, bit for
bit, in any batch of at least `MIN_ROWS` rows and at any place in it. For that a product has at
least `MIN_OUTPUTS` outputs: narrower ones are computed by other code at the end of a batch than in
its middle. `rows_are_equal` (agent.py) checks this for the machine at hand.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from envfleet.meta.agents.networks import ActorNetwork, TrialMemory

__all__ = ["MIN_ROWS", "ActingNetwork"]

MIN_ROWS = 4
MIN_OUTPUTS = 16


class ActingNetwork:
    """An actor and its memory with the weights they have now; after an update make another one."""

    def __init__(
        self, actor: ActorNetwork, memory: TrialMemory | None, device: torch.device
    ) -> None:
        self._device = device
        self._body = [_Product(weight.data, bias.data) for weight, bias in actor.body.weights]
        self._memory = None
        if memory is not None:
            assert actor.shortcut is not None
            self._memory = memory.recurrence
            self._width = memory.width
            parts = [*memory.embeddings.items(), ("obs", actor.shortcut)]
            self._embed = _side_by_side(parts, memory.dims)
            self._cells = _cells(memory.recurrence.cells)

    def __call__(
        self,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        obs: npt.NDArray[Any],
        hidden: npt.NDArray[Any],
    ) -> tuple[Tensor, Tensor | None]:
        """The actor's output for each row, and what is remembered after it; rows may be added."""
        if self._memory is None:
            return self._through_body(self.rows(obs)), None
        seen = self._embed(self.rows(np.concatenate((action, reward[:, None], obs), 1))).relu_()
        known, shortcut = seen[:, : self._width], seen[:, self._width :]
        states = self.rows(hidden).view(max(len(obs), MIN_ROWS), -1, self._memory.size)
        after = self._remember(known, states)
        return self._through_body(torch.cat((after[:, self._last], shortcut), 1)), after.flatten(1)

    @property
    def _last(self) -> int:
        """Where the output of the last layer is: cells of an LSTM come after all outputs."""
        return len(self._cells) - 1

    def _remember(self, known: Tensor, states: Tensor) -> Tensor:
        """The states after one step, [row, layer, number]."""
        assert self._memory is not None
        depth = len(self._cells)
        outputs, cells = [], []
        for layer, weights in enumerate(self._cells):
            if self._memory.is_lstm:
                before = states[:, layer], states[:, depth + layer]
                known, cell = torch.lstm_cell(known, before, *weights)
                cells.append(cell)
            else:
                known = torch.gru_cell(known, states[:, layer], *weights)
            outputs.append(known)
        return torch.stack(outputs + cells, 1)

    def _through_body(self, rows: Tensor) -> Tensor:
        *inner, last = self._body
        for product in inner:
            rows = product(rows).relu_()
        return last(rows)

    def rows(self, values: npt.NDArray[Any]) -> Tensor:
        """As a tensor of at least `MIN_ROWS` rows."""
        array = np.asarray(values, np.float32)
        missing = MIN_ROWS - len(array)
        if missing > 0:
            array = np.concatenate((array, np.zeros((missing, array.shape[1]), np.float32)))
        return torch.from_numpy(array).to(self._device)


class _Product:
    """A layer with at least `MIN_OUTPUTS` outputs, of which those that were asked for are given."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._size = len(bias)
        missing = max(0, MIN_OUTPUTS - self._size)
        self._weight, self._bias = pad(weight, (0, 0, 0, missing)), pad(bias, (0, missing))

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self._weight, self._bias)[:, : self._size]


def _side_by_side(parts: list[tuple[str, Any]], dims: dict[str, int]) -> _Product:
    """Embeddings of the named inputs as one layer on all inputs."""
    ends = np.cumsum([0, *dims.values()]).tolist()
    spans = dict(zip(dims, pairwise(ends), strict=True))
    layers = [(spans[name], embedding.layer) for name, embedding in parts]
    weights = [pad(layer.weight.data, (span[0], ends[-1] - span[1])) for span, layer in layers]
    biases = [layer.bias.data for _, layer in layers]
    return _Product(torch.cat(weights), torch.cat(biases))


def _cells(module: Any) -> list[tuple[Tensor, ...]]:
    """The weights of each layer, as the functions of a cell take them."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [
        tuple(getattr(module, f"{kind}_l{layer}").data for kind in kinds)
        for layer in range(module.num_layers)
    ]
