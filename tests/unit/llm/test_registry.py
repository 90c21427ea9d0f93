"""Environment types by name: found, made with settings, registered; mistakes named."""

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm import EnvStateManager, registry
from envfleet.llm.environments.base import TextEnv, TextEnvConfig
from envfleet.llm.registry import env_type, env_types, register_env


@dataclass
class EchoConfig:
    word: str = "echo"


class Echo:
    def __init__(self, config: EchoConfig) -> None:
        self.config = config

    def reset(self, seed: int) -> None:
        """Begin."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return action, 0.0, False, {}

    def render(self) -> str:
        return self.config.word


class Mute(Echo):
    reset = None  # type: ignore[assignment]
    render = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def test_a_registered_type_is_made_with_its_settings() -> None:
    register_env("echo", Echo, EchoConfig)
    assert "echo" in env_types()
    assert env_type("echo").make(None).config == EchoConfig()
    assert env_type("echo").make({"word": "hello"}).config.word == "hello"


def test_a_class_needs_no_registration() -> None:
    name = "tests.unit.llm.games:Climb"
    assert env_type(name).make({"goal": 7}).config.goal == 7
    assert env_type(name) is env_type(name)
    assert name in env_types()


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda: env_type("socoban"), "did you mean sokoban?"),
        (lambda: env_type("zzz"), "there are bandit"),
        (lambda: register_env("sokoban", Echo, EchoConfig), "say replace=True"),
        (lambda: register_env("echo", Echo), "has no config_class"),
        (lambda: register_env("echo", Echo, cast(Any, dict)), "must be a dataclass, got <class 'd"),
        (lambda: register_env("echo", Echo, cast(Any, EchoConfig())), "must be a dataclass, got E"),
        (lambda: register_env("echo", cast(Any, "Echo")), "is a class, got 'Echo'"),
        (lambda: register_env("echo", Mute, EchoConfig), "Mute has no reset and no render; an env"),
        (lambda: register_env("", Echo, EchoConfig), "is named by text, got ''"),
        (lambda: register_env(cast(Any, None), Echo, EchoConfig), "is named by text, got None"),
        (lambda: env_type("tests.unit.llm.games:Trouble"), "Trouble has no config_class"),
        (lambda: env_type("tests.unit.llm.games:config"), "is not a class"),
        (lambda: env_type("tests.unit.llm.games:Clim"), "has no 'Clim'; did you mean"),
        (lambda: env_type("no_such_module:Climb"), "there is no module 'no_such_module'"),
        (lambda: env_type(":"), "half a name"),
        (
            lambda: registry.EnvType(Echo, EchoConfig).make({"wrod": 1}),
            "no field 'wrod'; did you mean word?",
        ),
        (lambda: TextEnv(TextEnvConfig(render_mode="rgb_array")), "renders as text"),
        (lambda: TextEnv({"action_lookup": {1: "Up", 2: "up"}}), "name every action differently"),
        (lambda: TextEnv(cast(Any, "6x6")), "takes a TextEnvConfig, got a str"),
        (
            lambda: TextEnv({"render_mod": "text"}),
            "no field 'render_mod'; did you mean render_mode?",
        ),
    ],
)
def test_mistakes_are_named(do: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        do()


def test_one_environment_s_configuration_is_its_own() -> None:
    shared = TextEnvConfig(action_lookup={1: "Up"})
    env = TextEnv(shared)
    assert env.config.action_lookup is not shared.action_lookup
    fields = {"action_lookup": {1: "Up"}}
    env = TextEnv(fields)
    assert env.config == shared
    assert env.config.action_lookup is not fields["action_lookup"]


def test_options_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"options must be like .*, got 'val'"):
        env_type("bandit").make(None).reset(seed=1, options="val")


def test_nothing_is_shown_or_done_before_a_reset() -> None:
    for env in (env_type("bandit").make(None), env_type("sokoban").make(None)):
        with pytest.raises(OutOfOrder, match="nothing to show yet; call reset first"):
            env.render()
        with pytest.raises(OutOfOrder, match="no running episode; call reset first"):
            env.step(1)


@dataclass
class DeckConfig:
    cards: list[str] = field(default_factory=list)
    lock: Any = None
    action_lookup: None = None


class Deck(Echo):
    """Deals the cards of its own configuration, as an environment of the older form may."""

    config: Any

    def reset(self, seed: int) -> None:
        self.config.cards.sort()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return self.config.cards.pop(0), 0.0, False, {}

    def render(self) -> str:
        return " ".join(self.config.cards)


def test_environments_share_nothing_of_their_settings() -> None:
    register_env("deck", Deck, DeckConfig)
    given = {"cards": ["b", "a", "c"]}
    groups = {"env_groups": 1, "group_size": 3, "env_configs": {"tags": ["D"], "n_groups": [1]}}
    custom = {"D": {"env_type": "deck", "max_actions_per_traj": 9, "env_config": given}}
    for where in (False, "threads", True):
        manager_block = {"use_multiprocessing": where, "max_workers": 2, "train": groups}
        with EnvStateManager({"es_manager": manager_block, "custom_envs": custom}) as manager:
            manager.reset(seed=0)
            manager.step([{"env_id": env_id, "actions": ["deal"]} for env_id in range(3)])
            assert manager.render() == ["b c"] * 3
    assert given == {"cards": ["b", "a", "c"]}


def test_what_cannot_be_copied_and_long_lists_of_rows_are_shared() -> None:
    lock, rows = threading.Lock(), [{"query": "1 + 1?", "answer": "2"}]
    deck = registry.EnvType(Deck, DeckConfig)
    assert deck.make({"lock": lock}).config.lock is lock
    questions = env_type("metamathqa")
    one, other = (questions.config({"dataset_path": rows}).dataset_path[0] for _ in range(2))
    assert one is other is rows[0]
