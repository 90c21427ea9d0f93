"""Self-play and teams as runs: exact resuming, any workers, evaluations, the report page."""

import json
import math
import re
from dataclasses import replace

import pytest

from envfleet import errors
from envfleet.learn.agent_options import AGENT_FREE, AgentOptions
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train_options import LENGTHS, TrainOptions
from envfleet.multiagent.agent_train import train_agents
from envfleet.options import options_of
from envfleet.runs.callbacks import RunCallback
from envfleet.runs.checkpoint import load
from envfleet.testing.values import value_difference

GAME = TrainOptions(
    "tests.unit.multiagent.small_game:Sticks",
    n_envs=4,
    total_steps=384,
    backend="serial",
    save_every=96,
    eval_every=192,
    eval_episodes=10,
    tensorboard=False,
)
TEAM = replace(GAME, env="tests.unit.multiagent.small_game:Guessing")
PPO = PPOOptions(n_steps=12, batch_size=24, n_epochs=2, hidden=(16,))
AGENTS = AgentOptions()


class StopAt(RunCallback):
    def __init__(self, number):
        self.number, self.made = number, 0

    def iterated(self, iteration):
        self.made += 1

    def should_stop(self):
        return self.made == self.number


def policies(folder):
    job = load(folder / "latest.pt", trust="none")["job"]
    return {
        name: {key: value.numpy() for key, value in kept["policy"].items()}
        for name, kept in job["policies"].items()
    }


def untimed(folder):
    """What was measured, without how long it took, and without the ends in between."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith("seconds") and name != "env_steps_per_second"
        }
        for line in lines
        if "ended" not in line
    ]


@pytest.mark.parametrize("options", [GAME, TEAM], ids=["game", "team"])
def test_a_run_in_two_parts_equals_one_in_one(options, tmp_path):
    train_agents(options, AGENTS, PPO, tmp_path / "whole")
    stopped = train_agents(options, AGENTS, PPO, tmp_path / "parts", StopAt(3))
    assert stopped.is_stopped
    train_agents(options, AGENTS, PPO, tmp_path / "parts", is_resumed=True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert value_difference(policies(whole), policies(parts)) is None
    assert untimed(whole) == untimed(parts)


@pytest.mark.parametrize("options", [GAME, TEAM], ids=["game", "team"])
def test_results_do_not_depend_on_where_environments_run(options, tmp_path):
    agents = AgentOptions(policies="per-group")
    train_agents(options, agents, PPO, tmp_path / "serial")
    places = {
        "threads": replace(options, backend="thread", num_workers=2),
        "one": replace(options, backend="process", num_workers=1, parallel_start_method="fork"),
        "two": replace(options, backend="process", num_workers=2, parallel_start_method="fork"),
    }
    for name, elsewhere in places.items():
        train_agents(elsewhere, agents, PPO, tmp_path / name)
        assert value_difference(policies(tmp_path / "serial"), policies(tmp_path / name)) is None
        assert untimed(tmp_path / "serial") == untimed(tmp_path / name)


def test_a_game_is_evaluated_against_chance_and_its_past_in_both_seats(tmp_path):
    outcome = train_agents(GAME, AGENTS, PPO, tmp_path)
    lines = untimed(tmp_path)
    first, last = (line for line in lines if "evaluation_mean" in line)
    assert outcome.last_evaluation is not None
    assert len(outcome.last_evaluation.returns) == last["games_random"] == 10
    seats = (last["win_rate_as_anna"] + last["win_rate_as_bert"]) / 2
    assert last["win_rate_random"] == pytest.approx(seats)
    # a win is 1, a loss is -1
    assert last["evaluation_mean"] == pytest.approx(2 * last["win_rate_random"] - 1)
    assert (first["earlier_steps"], last["earlier_steps"]) == (96, 192)
    assert 0 <= last["win_rate_earlier"] <= 1
    iteration = next(line for line in lines if "value_loss" in line)
    assert iteration["draws"] == 0 < iteration["first_agent_wins"] < 1
    page = (tmp_path / "report.html").read_text()
    for said in ("<h2>Games</h2>", "won against random", "won as bert", "at 192"):
        assert said in page
    games = page.partition("<h2>Games</h2>")[2].partition("</section>")[0]
    ranges = [one.split()[2:] for one in re.findall(r'data-range="([^"]+)"', games)]
    assert ranges == [["0.0", "1.0"]] * 5  # shares: against chance, drawn, in both seats, earlier


def test_a_team_is_evaluated_by_its_own_episodes(tmp_path):
    outcome = train_agents(TEAM, AGENTS, PPO, tmp_path)
    assert outcome.last_evaluation is not None
    assert all(0 <= one <= 10 for one in outcome.last_evaluation.returns)
    assert not any("win_rate_random" in line for line in untimed(tmp_path))
    assert "<h2>Games</h2>" not in (tmp_path / "report.html").read_text()


def test_a_policy_for_each_group_has_figures_of_its_own(tmp_path):
    train_agents(GAME, AgentOptions(policies="per-group"), PPO, tmp_path)
    assert policies(tmp_path).keys() == {"anna", "bert"}
    line = next(line for line in untimed(tmp_path) if "value_loss" in line)
    both = line["entropy_anna"], line["entropy_bert"]
    assert line["entropy"] == pytest.approx(sum(both) / 2)
    assert all(map(math.isfinite, both))


def test_agents_with_different_spaces_cannot_share_a_policy(tmp_path):
    options = replace(GAME, env="tests.unit.multiagent.dying_agents:DyingAgents")
    with pytest.raises(errors.ConfigError, match=r"different observation spaces.*per-group"):
        train_agents(options, AGENTS, PPO, tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_a_run_says_by_which_options_it_cannot_go_on(tmp_path):
    train_agents(GAME, AGENTS, PPO, tmp_path)
    longer = replace(GAME, total_steps=480)
    with pytest.raises(errors.ConfigError, match="holds a run with policies=shared"):
        train_agents(longer, AgentOptions(policies="per-group"), PPO, tmp_path, is_resumed=True)
    outcome = train_agents(longer, AgentOptions(opening=2), PPO, tmp_path, is_resumed=True)
    assert (outcome.env_steps, outcome.new_steps) == (480, 96)


def test_every_option_is_free_or_part_of_a_run():
    known = {option.name for kind in (TrainOptions, AgentOptions) for option in options_of(kind)}
    of_a_run = {"env", "env_kwargs", "wrapper", "n_envs", "seed", "policies"}
    assert known == AGENT_FREE | set(LENGTHS) | of_a_run


def test_an_evaluation_can_be_filmed(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    train_agents(replace(GAME, video=True, eval_every=0), AGENTS, PPO, tmp_path)
    assert (tmp_path / "videos" / "step_000000000384.mp4").stat().st_size > 0
