"""What may be typed for ENV, and what is said to a wrong one."""

import functools
import pickle
import sys

import cloudpickle
import gymnasium
import pytest

from envfleet.adapters.names import find, label, nearest
from envfleet.cli.env_argument import choose_env
from envfleet.errors import ConfigError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module in the directory where the command is typed."""
    (tmp_path / "garden.py").write_text(
        """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Plot(CartPoleEnv):
    def __init__(self, size=1):
        super().__init__()
        self.size = size


def make_plot():
    return Plot(3)


def make_wrong():
    return 7


def make_broken():
    raise OSError("no seeds")


class Nested:
    Inner = Plot


A_NUMBER = 3
gymnasium.register("garden/Plot-v2", Plot, max_episode_steps=10)
"""
    )
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "hungry.py").write_text("import not_installed_anywhere")
    monkeypatch.chdir(tmp_path)
    path, modules, registry = list(sys.path), set(sys.modules), dict(gymnasium.registry)
    yield "garden"
    sys.path[:] = path
    for name in set(sys.modules) & {"garden", "broken", "hungry"} - modules:
        del sys.modules[name]
    for env_id in gymnasium.registry.keys() - registry.keys():
        del gymnasium.registry[env_id]


def test_a_gymnasium_id():
    choice = choose_env("CartPole-v1")

    assert choice.name == "CartPole-v1"
    assert choice.expression == '"CartPole-v1"'
    assert choice.imports is None
    assert choice.action_space == gymnasium.spaces.Discrete(2)
    assert pickle.loads(pickle.dumps(choice.env_fn)).args == ("CartPole-v1",)


def test_an_id_without_its_version_means_the_newest():
    assert choose_env("CartPole").name == "CartPole-v1"


def test_keyword_arguments():
    choice = choose_env("Pendulum-v1", '{"g": 5.0}')

    with choice.env_fn() as env:
        assert env.get_wrapper_attr("g") == 5.0
    assert choice.env_kwargs == "{'g': 5.0}"


@pytest.mark.parametrize(
    ("env", "imports"),
    [
        ("garden:Plot", "from garden import Plot"),
        ("garden:make_plot", "from garden import make_plot"),
        ("garden:Nested.Inner", "from garden import Nested"),
    ],
)
def test_a_class_or_a_function(module, env, imports):
    choice = choose_env(env)

    assert choice.name == env
    assert choice.imports == imports
    assert choice.expression == env.partition(":")[2]
    assert cloudpickle.loads(cloudpickle.dumps(choice.env_fn)) is choice.env_fn


def test_a_class_with_keyword_arguments(module):
    choice = choose_env("garden:Plot", '{"size": 9}')

    assert isinstance(choice.env_fn, functools.partial)
    with choice.env_fn() as env:
        assert env.get_wrapper_attr("size") == 9


@pytest.mark.parametrize("env", ["garden:garden/Plot-v2", "garden:garden/Plot"])
def test_an_id_that_a_module_registers(module, env):
    choice = choose_env(env)

    assert choice.name == "garden:garden/Plot-v2"
    assert choice.imports == "import garden"
    assert choice.expression == '"garden/Plot-v2"'
    with choice.env_fn() as built:
        assert built.spec is not None
        assert built.spec.id == "garden/Plot-v2"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("Cartpol-v1", "Gymnasium knows no environment 'Cartpol-v1'; did you mean CartPole-v1?"),
        ("cartpole-v1", "did you mean CartPole-v1?"),
        ("CartPole-v9", "did you mean CartPole-v1?"),
        ("Lunar-Lander", "did you mean LunarLander-v3?"),
        ("qqqq", "ids that a package registers need its import first"),
        ("spaces in it", "ids that a package registers need its import first"),
        ("", "knows no environment ''"),
        (":Plot", "half a name"),
        ("garden:", "half a name"),
        ("garden:Plat", "garden has no 'Plat'; did you mean garden:Plot?"),
        ("garden:A_NUMBER", "garden:A_NUMBER is a int, not something that builds"),
        ("garden:make_wrong", "garden:make_wrong gives a int, not a gymnasium.Env"),
        ("garden:make_broken", "garden:make_broken cannot be built: OSError: no seeds"),
        ("garden:garden/Plit-v2", "did you mean garden/Plot-v2?"),
        ("gardn:Plot", "there is no module 'gardn' to import"),
        ("garden.deep:Plot", "there is no module 'garden.deep' to import"),
        ("broken:Plot", "importing broken failed: ZeroDivisionError"),
        ("hungry:Plot", "importing hungry failed: it needs 'not_installed_anywhere'"),
    ],
)
def test_a_wrong_one_is_answered_in_one_sentence(module, wrong, said):
    with pytest.raises(ConfigError) as caught:
        choose_env(wrong)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ("{", "--env-kwargs is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"wrong": 1}', "CartPole-v1 cannot be built with {'wrong': 1}: TypeError"),
    ],
)
def test_wrong_keyword_arguments(kwargs, said):
    with pytest.raises(ConfigError) as caught:
        choose_env("CartPole-v1", kwargs)

    assert said in str(caught.value)


def test_the_newest_version_of_the_likeliest_is_named():
    known = ["Ant-v2", "Ant-v10", "Ant-v5", "Cart-v1"]

    assert nearest("ant-v3", known) == "; did you mean Ant-v10?"


def test_finding_builds_nothing():
    found = find("Ant-v5")

    assert found.name == found.source == "Ant-v5"
    assert isinstance(found.build, functools.partial)


class TestFiles:
    def test_a_class_in_a_file_is_found_from_anywhere(self, module, tmp_path, monkeypatch):
        found = find("garden.py:Plot")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)

        assert found.name == f"{tmp_path / 'garden.py'}:Plot"
        assert find(found.name).build is found.build
        assert find("../garden.py:Plot").name == found.name
        assert found.imports == "from garden import Plot"

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("CartPole-v1", "CartPole-v1"),
            ("ale_py:ALE/Pong-v5", "ale_py:ALE/Pong-v5"),
            ("/a/b/garden.py:Plot", "garden:Plot"),
        ],
    )
    def test_people_read_a_file_s_own_name(self, name, short):
        assert label(name) == short

    def test_an_id_that_a_file_registers(self, module, tmp_path):
        found = find("garden.py:garden/Plot")

        assert found.name == f"{tmp_path / 'garden.py'}:garden/Plot-v2"
        assert found.source == "garden:garden/Plot-v2"
        with found.build() as built:
            assert built.spec is not None
            assert built.spec.id == "garden/Plot-v2"

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("gardn.py:Plot", "there is no file gardn.py"),
            ("garden.py:Plat", "did you mean"),
            ("no-name.py:Plot", "no-name.py cannot be imported: rename it"),
            ("json.py:Plot", "another module is named json too; rename it"),
            ("broken.py:Plot", "importing broken failed: ZeroDivisionError"),
        ],
    )
    def test_a_wrong_one_is_answered_in_one_sentence(self, module, tmp_path, wrong, said):
        for name in ("no-name.py", "json.py"):
            (tmp_path / name).write_text("Plot = dict")

        with pytest.raises(ConfigError, match=said):
            find(wrong)
