"""Acting in C: for policies of layers on plain numbers, where the package could be compiled.

Between the steps of environments, whose code takes the caches, finding the way through PyTorch for
a dozen small operations takes ten times as long as the operations. What is drawn is what PyTorch
would draw, but for the last digits of what the layers say, which differ between kinds of processors
as PyTorch's do; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from envfleet.learn.heads import Choices, Gaussian
from envfleet.learn.networks import ActorCritic

_act: Callable[..., None] | None
try:
    from envfleet.learn._act import act as _act
except ImportError:
    _act = None

Array = npt.NDArray[Any]


class QuickActor:
    """A policy, and the [time, slot] arrays of one rollout; not to be used once it has learned."""

    def __init__(
        self,
        policy: ActorCritic,
        obs: Array,
        noise: Tensor,
        actions: Tensor,
        bounds: tuple[Array, Array] | None = None,
    ) -> None:
        """Take a policy for which `can_be`, and arrays as the collector fills them.

        With the `bounds` of an action, `act` also gives what environments get.
        """
        head, self._is_tanh = policy.head, policy.actor.activation == "tanh"
        self._layers = tuple(one.detach().numpy() for one in policy.actor.parameters())
        self._deviations: Array | None = None
        self._actions = actions.numpy()
        if isinstance(head, Gaussian):
            self._deviations = head.log_std.detach().exp().numpy()
            self._actions = _by_row(self._actions)
        self._obs, self._noise = _by_row(obs), noise.numpy()
        self._bounds: tuple[Array, Array] | None = None
        if bounds is not None and all(one.dtype == np.float32 for one in bounds):
            self._bounds = bounds[0].reshape(-1), bounds[1].reshape(-1)
            self._fitted = np.empty_like(actions[0].numpy())
            self._rows = self._fitted.reshape(self._actions.shape[1:])

    @staticmethod
    def can_be(policy: ActorCritic) -> bool:
        """Whether this policy can be acted for here."""
        head = policy.head
        return (
            _act is not None
            and policy.is_of_numbers
            and (isinstance(head, Gaussian) or (isinstance(head, Choices) and head.shape == ()))
            and all(one.device.type == "cpu" for one in policy.actor.parameters())
        )

    def act(self, step: int, slots: slice) -> Array | None:
        """Draw the actions of these slots; gives them within the bounds, until the next time."""
        assert _act is not None
        bounds = self._bounds
        _act(
            self._layers,
            self._is_tanh,
            self._obs[step, slots],
            self._noise[step, slots],
            self._deviations,
            self._actions[step, slots],
            None if bounds is None else (*bounds, self._rows[slots]),
        )
        return None if bounds is None else self._fitted[slots]


def _by_row(array: Array) -> Array:
    """The same memory as [time, slot, number]; an error where that needs a copy."""
    view = array.view()
    view.shape = (*array.shape[:2], -1)
    return view
