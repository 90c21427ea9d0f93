"""Acting in C: for policies of layers on plain numbers, where the package could be compiled.

Between the steps of environments, whose code fills the caches, PyTorch's way to a dozen small
operations takes ten times as long as the operations. The actions are those that PyTorch would draw,
except for the last digits of the layers' outputs, which differ between processors as PyTorch's do;
a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from envfleet.learn.heads import Choices, Gaussian
from envfleet.learn.networks import ActorCritic

_act: Callable[..., None] | None
try:
    from envfleet.learn.fast._act import act as _act
except ImportError:
    _act = None

Array = npt.NDArray[Any]


class QuickActor:
    """A policy, and the [time, slot] arrays of one rollout. After an update make another one."""

    def __init__(
        self,
        policy: ActorCritic,
        obs: Array,
        noise: Tensor,
        actions: Tensor,
        parts: Sequence[slice] = (slice(None),),
        bounds: tuple[Array, Array] | None = None,
    ) -> None:
        """Prepare to act; `can_be` says whether this is possible for the policy.

        Args:
            policy: The policy.
            obs: Observations, one time more than there are actions.
            noise: Random numbers that actions are drawn by.
            actions: Where the actions go.
            parts: Slots that act together.
            bounds: Of an action; with them `act` also returns what environments get.
        """
        head, self._is_tanh = policy.head, policy.actor.activation == "tanh"
        self._layers = tuple(one.detach().numpy() for one in policy.actor.parameters())
        self._deviations: Array | None = None
        chosen = actions.numpy()
        if isinstance(head, Gaussian):
            self._deviations = head.log_std.detach().exp().numpy()
            chosen = _by_row(chosen)
        arrays = _by_row(obs)[: len(chosen)], noise.numpy(), chosen
        # sliced now: between the steps of environments each slice takes ten times as long
        self._given = [list(zip(*(one[:, part] for one in arrays), strict=True)) for part in parts]
        self._fitted: list[Array | None] = [None] * len(parts)
        self._bounds: list[tuple[Array, ...] | None] = [None] * len(parts)
        if bounds is not None and all(one.dtype == np.float32 for one in bounds):
            for index, part in enumerate(parts):
                fitted = np.empty_like(actions.numpy()[0, part])
                rows = fitted.reshape(self._given[index][0][-1].shape)
                self._fitted[index] = fitted
                self._bounds[index] = bounds[0].reshape(-1), bounds[1].reshape(-1), rows

    @staticmethod
    def can_be(policy: ActorCritic) -> bool:
        """Whether this policy can act in C here."""
        head = policy.head
        return (
            _act is not None
            and policy.is_of_numbers
            and (isinstance(head, Gaussian) or (isinstance(head, Choices) and head.shape == ()))
            and all(one.device.type == "cpu" for one in policy.actor.parameters())
        )

    def act(self, step: int, part: int = 0) -> Array | None:
        """Draw the actions of a part; returns them within the bounds, valid until the next call."""
        assert _act is not None
        obs, noise, actions = self._given[part][step]
        bounds = self._bounds[part]
        _act(self._layers, self._is_tanh, obs, noise, self._deviations, actions, bounds)
        return self._fitted[part]


def _by_row(array: Array) -> Array:
    """The same memory as [time, slot, number]; an error if that needs a copy."""
    view = array.view()
    view.shape = (*array.shape[:2], -1)
    return view
