"""What is trained when a recipe, a file and flags speak of it; and where it is kept."""

from dataclasses import replace

import gymnasium
import pytest

from envfleet.cli import app
from envfleet.cli.command import UsageError
from envfleet.cli.train import _free_folder
from envfleet.cli.train_args import read_resume_args, read_train_args
from envfleet.learn.options import PPOOptions
from envfleet.learn.recipes import RECIPES
from envfleet.learn.train import TrainOptions, train


def asked(*words):
    given = ["train", *words]
    return read_train_args(app.build_parser(given).parse_args(given))


def test_a_recipe_comes_before_the_defaults():
    found, recipe = asked("--env", "CartPole"), RECIPES["CartPole-v1"]

    assert found.recipe is not None
    assert found.said == {"env"}
    assert found.options.env == "CartPole-v1"
    assert found.options.n_envs == recipe.n_envs
    assert found.ppo == recipe.options


def test_the_environment_may_be_a_plain_word_and_its_number_has_both_names():
    expected = asked("--env", "CartPole-v1", "--n-envs", "3")

    assert expected.options.n_envs == 3
    assert asked("CartPole-v1", "--num-envs", "3") == expected
    assert asked("--num-envs=3", "CartPole-v1") == expected
    bench = ["bench", "CartPole-v1", "--n-envs", "3"]
    assert app.build_parser(bench).parse_args(bench).num_envs == 3


def test_a_file_that_is_no_checkpoint_is_named(tmp_path, capsys):
    (tmp_path / "afile").touch()

    assert app.run(["eval", str(tmp_path / "afile"), "--plain"]) == 1
    assert "afile is no checkpoint of a run" in capsys.readouterr().err


def test_everything_of_mujoco_has_a_recipe():
    known = gymnasium.registry.values()
    of_mujoco = {spec.id for spec in known if "mujoco" in str(spec.entry_point)}

    assert {name for name in of_mujoco if name.endswith("-v5")} <= RECIPES.keys()


def test_no_recipe_leaves_the_defaults():
    found = asked("--env", "CartPole-v1", "--no-recipe")

    assert found.recipe is None
    assert found.ppo == PPOOptions()
    assert found.options == TrainOptions("CartPole-v1")


def test_a_file_comes_before_the_recipe_and_flags_before_both(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("env: CartPole-v1\ngamma: 0.5\nn-epochs: 3\ntarget_kl: 0.1\n")

    found = asked("--config", str(path), "--gamma", "0.25", "--target-kl", "none")

    assert (found.ppo.gamma, found.ppo.n_epochs, found.ppo.target_kl) == (0.25, 3, None)
    assert found.ppo.learning_rate == RECIPES["CartPole-v1"].options.learning_rate
    assert found.said == {"env", "gamma", "n_epochs", "target_kl"}


@pytest.mark.parametrize(
    ("kept", "typed", "is_meant"),
    [
        ("num_episodes: 3", ("--total-steps", "2000"), (2000, None)),
        ("total_steps: 2000", ("--num-episodes", "3"), (100_000, 3)),
    ],
)
def test_a_flag_s_length_goes_before_a_file_s(kept, typed, is_meant, tmp_path):
    (tmp_path / "run.yaml").write_text(f"env: CartPole-v1\n{kept}\n")

    options = asked("--config", str(tmp_path / "run.yaml"), *typed).options

    assert (options.total_steps, options.num_episodes) == is_meant


def test_how_long_is_said_once(tmp_path):
    both = "total_steps: 2000\nnum_episodes: 3\n"
    (tmp_path / "run.yaml").write_text(f"env: CartPole-v1\n{both}")

    with pytest.raises(UsageError, match=r"--total-steps and --num-episodes.* leave out one"):
        asked("--env", "CartPole-v1", "--total-steps", "9", "--num-episodes", "3")
    with pytest.raises(UsageError, match=r"run\.yaml sets total_steps and num_episodes"):
        asked("--config", str(tmp_path / "run.yaml"))


def test_a_file_may_leave_the_recipe_out(tmp_path):
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nrecipe: false\n")

    assert asked("--config", str(tmp_path / "run.yaml")).recipe is None
    assert asked("--config", str(tmp_path / "run.yaml"), "--recipe").recipe is not None


def test_somebody_has_to_say_what_to_train_on(tmp_path):
    (tmp_path / "run.yaml").write_text("gamma: 0.5\n")

    for words in ([], ["--config", str(tmp_path / "run.yaml")]):
        with pytest.raises(UsageError, match="say what to train on"):
            asked(*words)


def test_a_run_gets_a_folder_with_nothing_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = TrainOptions("/somewhere/my_env.py:Grid", seed=3)
    folder = _free_folder(options)
    assert str(folder) == "runs/my_env_Grid-seed3"

    folder.mkdir(parents=True)
    assert _free_folder(options) == folder
    (folder / "run.json").touch()
    assert str(_free_folder(options)) == "runs/my_env_Grid-seed3-2"
    assert str(_free_folder(TrainOptions("ALE/Pong-v5"))) == "runs/ALE_Pong-v5-seed0"


class TestGoingOn:
    RUN = TrainOptions("CartPole-v1", n_envs=1, num_episodes=2, backend="serial")

    @pytest.fixture
    def asked(self, tmp_path):
        train(self.RUN, PPOOptions(n_steps=8), tmp_path / "run")

        def asked(*words):
            given = ["train", "--resume", str(tmp_path / "run"), *words]
            return read_resume_args(app.build_parser(given).parse_args(given))

        return asked

    def test_is_by_what_the_run_was_asked_for(self, asked):
        assert asked().options == self.RUN
        assert asked().ppo == PPOOptions(n_steps=8)

    def test_takes_flags_that_nothing_depends_on_that_is_learned(self, asked):
        found = asked("--backend", "process", "--no-tensorboard", "--device", "cpu").options
        assert found == replace(self.RUN, backend="process", tensorboard=False, device="cpu")

    def test_may_be_for_longer_in_either_way_to_say_it(self, asked):
        assert asked("--num-episodes", "9").options == replace(self.RUN, num_episodes=9)
        found = asked("--total-steps", "1e3").options
        assert found == replace(self.RUN, total_steps=1000, num_episodes=None)
        with pytest.raises(UsageError, match="leave out one of them"):
            asked("--num-episodes", "9", "--total-steps", "1e3")

    @pytest.mark.parametrize(
        ("words", "flags"),
        [
            (("--gamma", "0.5"), "--gamma"),
            (("--n-envs", "4", "--backend", "serial"), "--n-envs"),
            (("--no-orthogonal", "--no-recipe"), "--no-recipe, --no-orthogonal"),
        ],
    )
    def test_refuses_what_would_make_it_another_run(self, words, flags, asked):
        with pytest.raises(UsageError, match=f"leave out {flags}$"):
            asked(*words)
