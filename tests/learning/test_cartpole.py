"""PPO learns: CartPole-v1 by its recipe, 100,000 steps, evaluated on an environment of its own."""

from envfleet.learn.recipes import RECIPES
from envfleet.learn.train import TrainOptions, train


def test_cartpole_is_solved_in_100_000_steps(tmp_path):
    recipe = RECIPES["CartPole-v1"]
    options = TrainOptions(
        "CartPole-v1",
        n_envs=recipe.n_envs,
        total_steps=recipe.total_steps,
        backend="serial",
        eval_every=0,
    )
    outcome = train(options, recipe.options, tmp_path)
    assert outcome.last_evaluation is not None
    assert outcome.last_evaluation.returns == (500.0,) * 10
