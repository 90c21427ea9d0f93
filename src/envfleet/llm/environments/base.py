"""The base class of text environments: Gymnasium environments that are read and answered in words.

Law: an episode depends on its seed, its mode and the configuration only. No environment depends on
global random numbers, hash order, the clock, or another environment.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.utils import seeding

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.environments.config_fields import build_config
from envfleet.options import check_fields

Mode = Literal["train", "val", "test"]
Picture = npt.NDArray[np.uint8]
Step = tuple[str, float, bool, bool, dict[str, Any]]

FPS = 4
"""Pictures per second in a video: an episode has few, and there must be time to read each."""
_LASTING = ("config", "render_mode", "observation_space", "action_space")
"""Attributes that most environments keep from one episode to the next."""


class AnyText(spaces.Space[str]):
    """Any text. Gymnasium's `Text` needs to know the characters and the length."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed size."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A few printable characters."""
        size = int(self.np_random.integers(1, 17))
        return bytes(self.np_random.integers(32, 127, size, np.uint8)).decode("ascii")

    def contains(self, x: Any) -> bool:
        """Whether it is text."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)

    def __hash__(self) -> int:
        return hash(AnyText)

    def __repr__(self) -> str:
        return "AnyText()"


@dataclass(slots=True, kw_only=True)
class TextEnvConfig:
    """The options of every text environment."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Fields whose values are large and never change, so that environments share them."""

    action_lookup: dict[int, str] | None = None
    """Names of the actions, by number; None if an action is free text."""
    render_mode: str = "text"

    def __post_init__(self) -> None:
        """Check the types of all fields; a subclass that overrides this must do so too."""
        check_fields(self)

    def action_grammar(self) -> str | None:
        """What an action without a name in `action_lookup` looks like, in GBNF; None: any text."""
        return None


class TextEnv(gymnasium.Env[str, Any]):
    """Plays one episode at a time; `render()` gives what the model sees.

    A subclass has `config_class`, `_begin`, `_act` and `_text`. An action is a number of
    `config.action_lookup`, or text if there is no lookup. Any text gets an observation and a
    reward; it never raises.
    """

    config_class: ClassVar[type[TextEnvConfig]] = TextEnvConfig
    metadata: dict[str, Any] = {"render_modes": ["text"], "render_fps": FPS}  # noqa: RUF012

    def __init__(
        self,
        config: TextEnvConfig | Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Take a configuration, or a mapping of the fields that differ from their defaults."""
        if config is None or isinstance(config, Mapping):
            self.config: TextEnvConfig = build_config(self.config_class, config)
        else:
            self.config = deepcopy(config)
        if not isinstance(self.config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, "
                f"got a {type(config).__name__}"
            )
        self.config.render_mode = self.render_mode = render_mode or self.config.render_mode
        self._check_mode(self.config.render_mode)
        self.observation_space = AnyText()
        self.action_space: spaces.Space[Any] = _actions(self.config.action_lookup)
        self._has_begun = self._is_running = False
        self._generator: np.random.Generator | None = None
        self._as_made = {name: deepcopy(getattr(self, name)) for name in _LASTING}
        self._prepare()

    # ---- Gymnasium ------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; `options={"mode": "train" | "val" | "test"}` chooses the split.

        Without a seed the episode is drawn from the generator, as everywhere in Gymnasium.
        """
        if seed is not None:
            self._seed(seed)
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f'options must be like {{"mode": "val"}}, got {options!r:.60}')
        mode = (options or {}).get("mode", "train")
        if mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        self._begin(int(self.np_random.integers(2**31)) if seed is None else seed, mode)
        self._has_begun = self._is_running = True
        return self.render("text"), {}

    def step(self, action: Any) -> Step:
        """Take one action."""
        if not self._is_running:
            raise OutOfOrder(f"{type(self).__name__} has no running episode; call reset first")
        said, reward, is_terminated, is_truncated, info = self._act(action)
        self._is_running = not (is_terminated or is_truncated)
        return said, reward, is_terminated, is_truncated, info

    def render(self, mode: str | None = None) -> Any:
        """What the model sees now: text, or a picture for "rgb_array"."""
        mode = mode or self.config.render_mode
        self._check_mode(mode)
        if not self._has_begun:
            raise OutOfOrder(f"{type(self).__name__} has nothing to show yet; call reset first")
        return self._text() if mode == "text" else self._picture()

    # ---- random numbers -------------------------------------------------------------------------

    def _seed(self, seed: int) -> None:
        """As Gymnasium does, but make the generator only when it is used: it takes long."""
        if type(seed) is not int or seed < 0:
            seeding.np_random(seed)  # raises an error that says what is wrong
        self._generator, self._np_random_seed = None, seed

    @property
    def _np_random(self) -> np.random.Generator | None:
        """Where Gymnasium keeps its generator."""
        if self._generator is None and self._np_random_seed is not None:
            self._generator, _ = seeding.np_random(self._np_random_seed)
        return self._generator

    @_np_random.setter
    def _np_random(self, value: np.random.Generator | None) -> None:
        self._generator = value

    # ---- moving an episode -----------------------------------------------------------------------

    def dump_episode(self) -> dict[str, Any]:
        """All that another environment of the same configuration needs to go on with this episode.

        It may share lists with this environment: pickle it before this one goes on.
        """
        state: Any = self.__getstate__()
        kept: dict[str, Any] = {**state}
        made = kept.pop("_as_made")
        for name in _LASTING:
            if kept[name] == made[name]:  # Bandit, for one, changes its names at every reset
                del kept[name]
        rng = kept.pop("_generator", None)
        if rng is not None:
            # Pickling its state takes a tenth of the time that the whole generator takes.
            is_usual = type(rng.bit_generator) is np.random.PCG64
            kept["_generator"] = rng.bit_generator.state if is_usual else rng
        return kept

    def load_episode(self, episode: dict[str, Any]) -> None:
        """Go on with the episode of another environment."""
        for name, made in self._as_made.items():
            if name not in episode and getattr(self, name) != made:
                setattr(self, name, deepcopy(made))
        rng = episode.pop("_generator", None)
        if isinstance(rng, dict):
            state, rng = rng, self._generator
            if rng is None or type(rng.bit_generator) is not np.random.PCG64:
                rng = np.random.Generator(np.random.PCG64(0))
            rng.bit_generator.state = state
        self.__dict__.update(episode, _generator=rng)

    # ---- for subclasses -------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Set up what lasts for all episodes, once the configuration is checked."""

    def _begin(self, seed: int, mode: Mode) -> None:
        """Set up the episode of this seed."""
        raise NotImplementedError(f"{type(self).__name__} has no _begin")

    def _act(self, action: Any) -> Step:
        """Take an action in a running episode."""
        raise NotImplementedError(f"{type(self).__name__} has no _act")

    def _text(self) -> str:
        """The current state as text."""
        raise NotImplementedError(f"{type(self).__name__} has no _text")

    def _picture(self) -> Picture:
        """The current state as [row, column, colour]; only if `metadata` lists "rgb_array"."""
        raise NotImplementedError(f"{type(self).__name__} has no _picture")

    def _check_mode(self, mode: str) -> None:
        offered = self.metadata["render_modes"]
        if mode not in offered:
            raise ConfigError(
                f"render_mode: {type(self).__name__} renders as {' or '.join(offered)}, "
                f"not as {mode!r:.60}"
            )


def gbnf_text(text: str) -> str:
    """A grammar's form of this text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _actions(names: Mapping[int, str] | None) -> spaces.Space[Any]:
    if names is None:
        return AnyText()
    if not names or not all(type(number) is int for number in names):
        raise ConfigError(
            "action_lookup must name actions by whole numbers, or be none where any text is an "
            f"action; got {names!r:.60}"
        )
    if len({str(name).lower() for name in names.values()}) < len(names):
        raise ConfigError(
            f"action_lookup must name every action differently, ignoring case; got {names!r:.100}"
        )
    return spaces.Discrete(len(names), start=min(names))


def action_number(action: Any, names: Mapping[int, str]) -> int | None:
    """The number of an action that is given by its number or its name; None if there is none.

    A name must match as a whole, ignoring case: "left" is "Left", "Left!" is no action.
    """
    if isinstance(action, str):
        # Do not copy a megabyte into lower case.
        if len(action) > 2 * max(map(len, names.values()), default=0):
            return None
        said = action.lower()
        return next((number for number, name in names.items() if name.lower() == said), None)
    try:
        number = operator.index(action)
    except TypeError:
        return None
    return number if number in names else None
