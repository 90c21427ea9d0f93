"""Several agents learn: a game by self-play, and a team, in a few seconds each."""

from dataclasses import replace

from envfleet.learn.agent_options import AgentOptions
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train_options import TrainOptions
from envfleet.multiagent.agent_train import train_agents
from envfleet.runs.checkpoint import load

GAME = TrainOptions(
    "tests.unit.multiagent.small_game:Sticks",
    n_envs=16,
    total_steps=25_000,
    backend="serial",
    eval_every=0,
    eval_episodes=200,
    tensorboard=False,
)
PPO = PPOOptions(n_steps=32, batch_size=128, learning_rate=3e-3, ent_coef=0.02, hidden=(32,))


def test_a_game_is_learned_by_self_play(tmp_path):
    outcome = train_agents(GAME, AgentOptions(opening=0), PPO, tmp_path)
    assert outcome.last_evaluation is not None
    figures = outcome.last_evaluation.figures
    # chance holds its own in half of the games; one who knows loses one in twenty
    assert figures["win_rate_random"] >= 0.85
    assert min(figures["win_rate_as_anna"], figures["win_rate_as_bert"]) >= 0.75


def test_a_team_learns_what_each_of_it_sees(tmp_path):
    team = replace(GAME, env="tests.unit.multiagent.small_game:Guessing", eval_episodes=10)
    shared = replace(team, total_steps=8_000)
    outcome = train_agents(shared, AgentOptions(), PPO, tmp_path / "shared")
    assert outcome.last_evaluation is not None
    assert outcome.last_evaluation.mean >= 9.5
    each = train_agents(shared, AgentOptions(policies="per-group"), PPO, tmp_path / "each")
    assert each.last_evaluation is not None
    assert each.last_evaluation.mean >= 9.5
    kept = load(tmp_path / "each" / "latest.pt", trust="none")["job"]["policies"]
    assert kept.keys() == {"left", "right"}
