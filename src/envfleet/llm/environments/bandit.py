"""Bandit: one pull of one of two named arms; a sure small reward against a rare large one.

Law: the seed alone decides which arm is listed first and whether the risky one would pay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import (
    Mode,
    Step,
    TextEnv,
    TextEnvConfig,
    action_number,
    gbnf_text,
)
from envfleet.llm.environments.config_fields import check_range
from envfleet.options import check_fields


@dataclass(slots=True, kw_only=True)
class BanditConfig(TextEnvConfig):
    """Names and rewards of the arms. `action_lookup` is filled at every reset."""

    lo_arm_name: str = "phoenix"
    """The sure arm."""
    hi_arm_name: str = "dragon"
    """The risky arm, which pays more on average."""
    split_names: bool = False
    """Whether episodes of the modes "val" and "test" use the test names."""
    test_lo_arm_name: str = "trader"
    test_hi_arm_name: str = "librarian"
    lo_arm_score: float = 0.1
    hi_arm_loscore: float = 0.0
    hi_arm_hiscore: float = 1.0
    hi_arm_hiscore_prob: float = 0.25

    def __post_init__(self) -> None:
        check_fields(self)
        for lo, hi in (
            (self.lo_arm_name, self.hi_arm_name),
            (self.test_lo_arm_name, self.test_hi_arm_name),
        ):
            if not lo or not hi or lo.lower() == hi.lower():
                raise ConfigError(f"two arms need two different names, got {lo!r} and {hi!r}")
        check_range(self, "hi_arm_hiscore_prob", least=0, most=1)

    def action_grammar(self) -> str:
        """The name of an arm; which of them comes first is known from the reset on only."""
        names = [self.lo_arm_name, self.hi_arm_name]
        if self.split_names:
            names += [self.test_lo_arm_name, self.test_hi_arm_name]
        return " | ".join(map(gbnf_text, names))


class BanditEnv(TextEnv):
    """An action is 1 or 2, or the name of an arm; the first valid one ends the episode."""

    config_class: ClassVar[type[TextEnvConfig]] = BanditConfig
    config: BanditConfig

    def _prepare(self) -> None:
        self.action_space = spaces.Discrete(2, start=1)
        self._arms: dict[int, str] = {}
        self._hi_arm_name = ""
        self._hi_arm_pays = False
        self._seen = ""

    def _begin(self, seed: int, mode: Mode) -> None:
        config = self.config
        is_test = config.split_names and mode != "train"
        lo_name = config.test_lo_arm_name if is_test else config.lo_arm_name
        hi_name = config.test_hi_arm_name if is_test else config.hi_arm_name
        generator = np.random.Generator(np.random.PCG64(seed))
        first, second = (lo_name, hi_name) if generator.random() < 0.5 else (hi_name, lo_name)
        self._arms = {1: first, 2: second}
        config.action_lookup = dict(self._arms)
        self._hi_arm_name = hi_name
        self._hi_arm_pays = bool(generator.random() < config.hi_arm_hiscore_prob)
        self._seen = f"Arms: {first}, {second}"

    def _act(self, action: Any) -> Step:
        number = action_number(action, self._arms)
        if number is None:
            info = {"action_is_effective": False, "action_is_valid": False, "success": False}
            return self._seen, 0.0, False, False, info
        arm = self._arms[number]
        is_hi = arm == self._hi_arm_name
        reward = self._hi_reward() if is_hi else float(self.config.lo_arm_score)
        self._seen = f"{arm}: {reward} points"
        info = {"action_is_effective": True, "action_is_valid": True, "success": is_hi}
        return self._seen, reward, True, False, info

    def _hi_reward(self) -> float:
        config = self.config
        return float(config.hi_arm_hiscore if self._hi_arm_pays else config.hi_arm_loscore)

    def _text(self) -> str:
        return self._seen
