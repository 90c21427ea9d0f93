"""Adam over all parameters of a network as one vector.

A small network has a dozen small tensors, and an optimiser that visits each of them spends most of
its time on the visits. Here parameters are views of one vector, so a step is a handful of
operations however many layers there are. A test holds it equal to PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_FIRST, _SECOND = 0.9, 0.999
_EPSILON = 1e-5
"""PPO's; PyTorch's default is 1e-8."""


class FlatAdam:
    """Adam with the gradient's norm clipped first, as PPO does it."""

    def __init__(self, network: nn.Module) -> None:
        """Make the parameters of `network` views of one vector."""
        self.parameters = list(network.parameters())
        with torch.no_grad():
            self._vector = torch.cat([one.reshape(-1) for one in self.parameters])
            start = 0
            for one in self.parameters:
                one.data = self._vector[start : start + one.numel()].view_as(one)
                start += one.numel()
        self._mean, self._square = torch.zeros((2, start), device=self._vector.device)
        self._steps = 0

    @property
    def is_finite(self) -> bool:
        """Whether every parameter is still a finite number."""
        return bool(torch.isfinite(self._vector).all())

    @torch.inference_mode()
    def step(self, gradients: Sequence[Tensor], *, rate: float, max_norm: float) -> None:
        """Make one step; `gradients` has one for each parameter."""
        gradient = torch.cat([one.reshape(-1) for one in gradients])
        norm = float(torch.linalg.vector_norm(gradient))
        if norm > max_norm:
            gradient.mul_(max_norm / (norm + 1e-6))
        self._steps += 1
        self._mean.lerp_(gradient, 1 - _FIRST)
        self._square.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
        # Adam's two bias corrections, applied where they cost no operation over the vector
        young = (1 - _SECOND**self._steps) ** 0.5
        spread = self._square.sqrt().add_(_EPSILON * young)
        self._vector.addcdiv_(self._mean, spread, value=-rate * young / (1 - _FIRST**self._steps))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "steps": self._steps,
            "mean": self._mean.clone(),
            "square": self._square.clone(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._steps = state["steps"]
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
