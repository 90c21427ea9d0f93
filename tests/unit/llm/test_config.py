"""Configurations: presets, files, changes, forms; and what a manager reads out of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from envfleet.errors import ConfigError
from envfleet.llm.config import Config, load_config, plain_config, preset_names
from envfleet.llm.settings import Settings, read_settings
from tests.unit.llm import games


@dataclass
class OddConfig:
    height: int = 1

    def __post_init__(self) -> None:
        self.floors = self.height + 1


class Odd(games.Trouble):
    config_class = OddConfig


NAMES = [
    "bandit",
    "base",
    "base-parallel",
    "countdown",
    "frozen_lake",
    "metamathqa",
    "mixed",
    "sokoban",
    "webshop",
]


class TestLoading:
    def test_these_come_with_the_package(self) -> None:
        assert preset_names() == NAMES

    def test_a_preset_builds_on_another(self) -> None:
        base, parallel = load_config("base"), load_config("base-parallel")
        assert base.es_manager.use_multiprocessing == "auto"
        assert parallel.es_manager.use_multiprocessing is True
        assert parallel.es_manager.train == base.es_manager.train

    def test_keys_are_attributes_and_items(self) -> None:
        config = load_config("base")
        assert config.es_manager.train.env_groups == config["es_manager"]["train"]["env_groups"]
        config.es_manager.train.env_groups = 3
        assert config["es_manager"]["train"]["env_groups"] == 3
        with pytest.raises(AttributeError, match="no key 'es_manger'; did you mean es_manager"):
            _ = config.es_manger

    def test_a_file_builds_on_its_neighbour_and_on_presets(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("defaults: [base, other]\nseed: {train: 1}\n")
        (tmp_path / "other.yaml").write_text("seed: {train: 2, val: 3}\nnew: 1\n")
        config = load_config(tmp_path / "mine.yaml")
        assert config.seed == {"train": 1, "val": 3}
        assert config.new == 1
        assert config.es_manager.max_restarts == 3
        assert load_config(tmp_path / "mine") == config

    @pytest.mark.parametrize(
        ("change", "path", "value"),
        [
            ("es_manager.max_workers=4", ("es_manager", "max_workers"), 4),
            ("es_manager.format_penalty=1e-1", ("es_manager", "format_penalty"), 0.1),
            ("es_manager.format_penalty=-2.5E2", ("es_manager", "format_penalty"), -250.0),
            ("+new=.5e1", ("new",), ".5e1"),
            ("+new=1e", ("new",), "1e"),
            ("+new=0x1e5", ("new",), 0x1E5),
            ("+new='1e3'", ("new",), "1e3"),
            ("agent_proxy.action_sep=;", ("agent_proxy", "action_sep"), ";"),
            (
                "es_manager.train.env_configs.tags=[Bandit]",
                ("es_manager", "train", "env_configs", "tags"),
                ["Bandit"],
            ),
            ("+custom_envs.Mine.env_type=mine", ("custom_envs", "Mine", "env_type"), "mine"),
            ("+new=null", ("new",), None),
        ],
    )
    def test_changes(self, change: str, path: tuple[str, ...], value: Any) -> None:
        found: Any = load_config("base", [change])
        for key in path:
            found = found[key]
        assert found == value

    def test_a_key_can_be_taken_away(self) -> None:
        assert "seed" not in load_config("base", ["~seed"])

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                "es_manager.max_worker=4",
                "there is no key es_manager.max_worker; did you mean max_w",
            ),
            ("es_manger.max_workers=4", "there is no key es_manger; did you mean es_manager"),
            ("zzz=4", "a new one is written with a plus"),
            ("zzz.engine=4", "no key zzz; a new one is written with a plus"),
            ("es_manager.max_workers", "key=value, .key=value or ~key"),
            ("=4", "key=value"),
            ("seed.train.more=4", "seed.train is 10000 and has no keys"),
            ("seed.train=[1", "is not YAML"),
            ("~nothing", r"there is no key nothing$"),
            ("~sed", r"there is no key sed; did you mean seed\?$"),
            ("+new=&a [*a]", r"the value of '\+new=&a \[\*a\]' is not YAML: .* recursive"),
            ("+new=&a {b: [*a]}", "recursive"),
            ("+new=" + "[" * 9000 + "]" * 9000, "nested too deeply"),
        ],
    )
    def test_a_wrong_change_is_named(self, change: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            load_config("base", [change])

    def test_wrong_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no file 'bse'; did you mean base\?"):
            load_config("bse")
        for name, text, said in [
            ("a", "[1, 2]", "must hold keys with their values"),
            ("b", "x: [", "is not YAML"),
            ("c", "defaults: [c]", "builds on itself"),
            ("e", "x: &a [*a]", "e.yaml is not YAML: .* recursive"),
        ]:
            (tmp_path / f"{name}.yaml").write_text(text)
            with pytest.raises(ConfigError, match=said):
                load_config(tmp_path / f"{name}.yaml")
        (tmp_path / "d.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="it is not text"):
            load_config(tmp_path / "d.yaml")

    def test_references_in_a_file_are_resolved_where_they_are_read(self, tmp_path: Path) -> None:
        text = "defaults: [bandit]\nn: 3\nseed: {train: '${n}'}\nctx_manager: {x: '${elsewhere}'}\n"
        (tmp_path / "mine.yaml").write_text(text)
        config = load_config(tmp_path / "mine.yaml", ["+agent_proxy.max_turn=${n}"])
        assert (config.seed.train, config.agent_proxy.max_turn) == (3, 3)
        assert config.ctx_manager.x == "${elsewhere}"
        with pytest.raises(ConfigError, match=r"seed.train cannot be resolved: .*nowhere"):
            load_config("bandit", ["seed.train=${nowhere}"])

    def test_a_list_cannot_take_the_place_of_a_mapping(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("defaults: [base]\nseed: [1]\n")
        with pytest.raises(ConfigError, match=r"mine.yaml cannot be merged with what it builds on"):
            load_config(tmp_path / "mine.yaml")

    def test_a_file_that_is_missing_is_named_with_who_builds_on_it(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer]")
        with pytest.raises(ConfigError, match=r"mine.yaml builds on 'ppo_trainer', but there is"):
            load_config(tmp_path / "mine.yaml")

    @pytest.mark.parametrize("wrong", ["seed.train=1", None, {"seed.train": 1}, [3]], ids=str)
    def test_changes_are_a_list(self, wrong: Any) -> None:
        with pytest.raises(ConfigError, match="overrides must be a list of changes like "):
            load_config("base", wrong)

    def test_any_form_is_the_same(self, tmp_path: Path) -> None:
        config = load_config("base")
        assert plain_config(OmegaConf.create(plain_config(config))) == config
        assert plain_config("base") == config
        assert plain_config(dict(config)) == config
        with pytest.raises(ConfigError, match="got int"):
            plain_config(3)

    def test_omegaconf_is_resolved_where_it_is_read(self) -> None:
        config = OmegaConf.create({**plain_config("bandit"), "groups": {"n": 3}})
        config.seed.train = "${groups.n}"
        config.merge_with({"ctx_manager": {"top_p": "${actor_rollout_ref.rollout.top_p}"}})
        found = plain_config(config)
        assert found["seed"]["train"] == 3
        assert found["ctx_manager"]["top_p"] == "${actor_rollout_ref.rollout.top_p}"

    def test_blocks_of_omegaconf_may_stand_in_a_mapping(self) -> None:
        expected = plain_config("bandit")
        whole = OmegaConf.create({**expected, "groups": {"n": 3}})
        whole.seed.train = "${groups.n}"
        config = {name: whole[name] for name in expected}
        config["es_manager"] = {**expected["es_manager"], "train": whole.es_manager.train}
        config["trainer"] = OmegaConf.create({"left": "${alone}"})
        found = plain_config(config)
        assert found["seed"]["train"] == 3
        assert found["es_manager"] == expected["es_manager"]
        assert type(found["es_manager"]["train"]["env_configs"]["tags"]) is list
        assert found["trainer"] == {"left": "${alone}"}
        whole.seed.train = "${nowhere}"
        with pytest.raises(ConfigError, match=r"seed.train cannot be resolved: "):
            plain_config({**config, "seed": whole.seed})

    def test_a_mapping_that_holds_itself_is_refused(self) -> None:
        config: dict[str, Any] = dict(plain_config("bandit"))
        config["seed"] = {"train": 1, "more": config}
        with pytest.raises(ConfigError, match="the configuration holds itself"):
            plain_config(config)

    @pytest.mark.parametrize("value", ["${nowhere.n}", "???"])
    def test_what_cannot_be_resolved_is_named(self, value: str) -> None:
        config = OmegaConf.create(plain_config("bandit"))
        config.es_manager.train.group_size = value
        with pytest.raises(ConfigError, match=r"es_manager.train.group_size cannot be resolved: "):
            plain_config(config)

    def test_what_a_manager_reads_is_a_copy(self) -> None:
        config = load_config("base")
        plain_config(config)["es_manager"]["train"]["env_groups"] = 99
        assert config.es_manager.train.env_groups == 8


class TestSettings:
    @pytest.fixture(autouse=True)
    def _games(self) -> None:
        games.register()

    def read(self, **manager: Any) -> Settings:
        return read_settings(games.config(("Climb", 2), **manager), "train")

    def test_what_is_not_said_has_a_value(self) -> None:
        settings = self.read()
        assert settings.format_penalty == -0.1
        assert 1 <= settings.max_workers <= 8
        assert settings.step_timeout_s is None
        assert settings.num_groups == 2
        assert settings.groups[0][0].name == "Climb"
        del (config := games.config(("Climb", 2)))["es_manager"]["use_multiprocessing"]
        assert read_settings(config, "train").use_multiprocessing == "auto"

    @pytest.mark.parametrize("given", [0.1, -0.1])
    def test_a_penalty_is_a_penalty(self, given: float) -> None:
        assert self.read(format_penalty=given).format_penalty == -0.1

    @pytest.mark.parametrize(
        ("manager", "said"),
        [
            ({"max_worker": 2}, "es_manager has no key 'max_worker'; did you mean max_workers"),
            (
                {"max_workers": 0},
                "es_manager.max_workers must be a whole number of at least 1, got 0",
            ),
            ({"max_workers": "two"}, "es_manager.max_workers must be a whole number"),
            (
                {"use_multiprocessing": "yes"},
                "must be true or false or one of 'auto', 'threads', 'resets', got 'yes'",
            ),
            ({"format_penalty": "much"}, "es_manager.format_penalty must be a finite number"),
            ({"format_penalty": float("nan")}, "es_manager.format_penalty must be a finite number"),
            (
                {"sequential_env_types": ["climp"]},
                r"no environment type 'climp'; did you mean climb",
            ),
            ({"sequential_env_types": "climb"}, "es_manager.sequential_env_types must be a list"),
            ({"start_method": "frok"}, "es_manager.start_method"),
            ({"step_timeout_s": 0}, "es_manager.step_timeout_s must be positive seconds"),
            ({"max_restarts": -1}, "es_manager.max_restarts must be a whole number, 0 or more"),
            ({"train": {}}, "has no es_manager.train.group_size"),
            ({"train": 3}, "es_manager.train must be a mapping"),
        ],
    )
    def test_what_is_wrong_is_named(self, manager: Any, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            self.read(**manager)

    def test_numbers_of_numpy_are_numbers(self) -> None:
        config = games.config(("Climb", 2), max_workers=np.int32(2), format_penalty=np.float32(0.5))
        config["es_manager"]["train"] |= {"group_size": np.int64(3), "env_groups": np.uint8(2)}
        config["es_manager"]["train"]["env_configs"]["n_groups"] = list(np.array([2]))
        found = read_settings({**config, "seed": {"train": np.int64(7)}}, "train")
        whole = (found.group_size, found.num_groups, found.seed, found.max_workers)
        assert whole == (3, 2, 7, 2)
        assert all(type(one) is int for one in whole)
        assert found.format_penalty == -0.5
        config["es_manager"]["train"]["group_size"] = np.bool_(True)
        with pytest.raises(ConfigError, match="group_size must be a whole number"):
            read_settings(config, "train")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"tags": ["Climb"], "n_groups": [1]}, r"\[1\] gives 1 and env_groups is 2"),
            ({"tags": ["Climb"], "n_groups": [1, 1]}, "one number for each of the 1 tags"),
            (
                {"tags": ["Climb"], "n_groups": [2.0]},
                "n_groups must be a list of whole numbers, 0 or more",
            ),
            ({"tags": ["Clmb"], "n_groups": [2]}, r"no environment 'Clmb'; did you mean Climb\?"),
            ({"tags": "Climb", "n_groups": [2]}, "env_configs.tags must be a list"),
            ({"tag": ["Climb"], "n_groups": [2]}, "has no key 'tag'; did you mean tags"),
        ],
    )
    def test_wrong_groups_are_named(self, change: Any, said: str) -> None:
        config = games.config(("Climb", 2))
        config["es_manager"]["train"]["env_configs"] = change
        with pytest.raises(ConfigError, match=said):
            read_settings(config, "train")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"env_type": "clim"}, r"custom_envs.Climb: there is no environment type 'clim'"),
            ({"env_type": None}, "there is no environment type 'None'"),
            ({"env_config": 3}, "custom_envs.Climb.env_config must be a mapping, or None"),
            ({"max_action_per_traj": 3}, "no key 'max_action_per_traj'; did you mean max_actions"),
            ({"env_config": {"gaol": 3}}, "ClimbConfig has no field 'gaol'; did you mean goal"),
            (
                {"max_actions_per_traj": 0},
                "max_actions_per_traj must be a whole number of at least 1",
            ),
        ],
    )
    def test_wrong_environments_are_named(self, change: Any, said: str) -> None:
        config = games.config(("Climb", 2))
        config["custom_envs"]["Climb"] |= change
        with pytest.raises(ConfigError, match=said):
            read_settings(config, "train")

    def test_values_of_the_wrong_kind_are_named(self) -> None:
        config = load_config("frozen_lake", ["custom_envs.FrozenLake.env_config={size: big}"])
        with pytest.raises(ConfigError, match="FrozenLake: size must be a whole number, got 'big'"):
            read_settings(config, "train")

    def test_a_configuration_that_checks_nothing_itself_is_shown(self) -> None:
        config = games.config(("Odd", 1))
        config["custom_envs"]["Odd"] = {
            "env_type": f"{__name__}:Odd",
            "max_actions_per_traj": 1,
            "env_config": {"height": "tall"},
        }
        with pytest.raises(
            ConfigError, match=r"Odd.env_config \{'height': 'tall'\} cannot be used"
        ):
            read_settings(config, "train")

    @pytest.mark.parametrize("bases", ["base", "5", "[{a: base}]"])
    def test_defaults_are_a_list_of_names(self, bases: str, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(f"defaults: {bases}")
        with pytest.raises(ConfigError, match="defaults must be a list of names"):
            load_config(tmp_path / "mine.yaml")

    def test_modes_and_seeds(self) -> None:
        config = games.config(("Climb", 2))
        with pytest.raises(ConfigError, match="mode must be one of 'train', 'val'; got 'test'"):
            read_settings(config, "test")
        for seeds, said in [
            (3, "seed must be a mapping"),
            ({"train": -1}, "seed.train must be"),
            ({"trian": 1}, "seed has no key 'trian'; did you mean train"),
        ]:
            with pytest.raises(ConfigError, match=said):
                read_settings({**config, "seed": seeds}, "train")
        with pytest.raises(ConfigError, match="the configuration has no es_manager"):
            read_settings({}, "train")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("+sed.train=3", "no block 'sed'; did you mean seed"),
            ("+es_manger.max_workers=3", "no block 'es_manger'; did you mean es_manager"),
            ("+Custom_env.X.env_type=x", "no block 'Custom_env'; did you mean custom_envs"),
            ("+agent_proxi.max_turn=3", "no block 'agent_proxi'; did you mean agent_proxy"),
            ("+agent_proxy.max_turns=3", "agent_proxy has no key 'max_turns'; did you mean max_t"),
            # what does not count in this mode, and who does not play
            ("+es_manager.val.groups=3", "es_manager.val has no key 'groups'; did you mean group"),
            ("+es_manager.val.env_configs.tag=3", "es_manager.val.env_configs has no key 'tag'"),
            ("+seed.vla=3", "seed has no key 'vla'; did you mean val"),
            ("+custom_envs.WebShop.env_typ=x", "custom_envs.WebShop has no key 'env_typ'; did yo"),
        ],
    )
    def test_no_unknown_key_is_taken(self, change: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            read_settings(load_config("bandit", [change]), "train")

    def test_a_tag_may_have_a_dot_in_its_name(self) -> None:
        config = load_config("bandit")
        config.custom_envs["Bandit.v2"] = {"env_typ": "bandit"}
        with pytest.raises(ConfigError, match=r"custom_envs.Bandit\.v2 has no key 'env_typ'"):
            read_settings(config, "train")

    def test_blocks_of_a_whole_training_run_are_let_be(self) -> None:
        changes = ["+trainer.n=1", "+actor_rollout_ref.model.path=x", "+model_path=x", "+lora=null"]
        assert read_settings(load_config("bandit", changes), "train").num_groups == 8

    def test_a_block_that_nobody_knows_is_named(self) -> None:
        config = load_config("bandit", ["+mine.n=1"])
        with pytest.warns(RuntimeWarning, match=".mine. of the configuration is ignored; "):
            read_settings(config, "train")

    def test_a_config_object_of_ours_is_taken(self) -> None:
        assert isinstance(load_config("base"), Config)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ({"es_manager": {}}, "give a mapping to EnvStateManager as it is"),
        ("x" * 5000, "there is no conf"),
    ],
)
def test_what_is_no_name_gets_a_sentence(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(name)
