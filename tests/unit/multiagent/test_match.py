"""Matches: who played whom, how often and in which seat, what came of it, and the commands."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from envfleet import errors
from envfleet.cli import app
from envfleet.learn.agent_options import AgentOptions
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train_options import TrainOptions
from envfleet.multiagent.agent_train import train_agents
from envfleet.multiagent.games import Game, RandomPlayer, Tally, all_seatings, in_turn, play_games
from envfleet.multiagent.match import open_match
from envfleet.runs.callbacks import EvaluationStopped
from tests.unit.multiagent.small_game import Guessing, Sticks

STICKS, GUESSING = (f"tests.unit.multiagent.small_game:{name}" for name in ("Sticks", "Guessing"))
PPO = PPOOptions(n_steps=12, batch_size=24, hidden=(16,))


class Knowing:
    """Leaves a multiple of four where it can."""

    name = "knowing"

    def begin(self, num_slots, seed):
        self.games = 0

    def choose(self, agent, slots, obs, masks, is_drawn):
        assert len(slots) == len(masks) == len(is_drawn)
        left = obs["observation"].argmax(1)
        return np.where(left % 4, left % 4 - 1, 0)

    def forget(self, slot):
        self.games += 1


def chance():
    env = Sticks()
    return RandomPlayer({name: env.action_space(name) for name in env.possible_agents})


def played(players, games=40, most=12, **more):
    make, seatings = partial(Sticks, most), all_seatings(2)
    options: dict[str, Any] = {"seed": 3, "max_turns": 100, "backend": "serial"} | more
    return play_games(make, players, seatings, games, **options)


def test_every_seat_is_taken_equally_often():
    games = played([Knowing(), chance()])
    assert len(games) == 40
    assert [game.seating for game in games[:4]] == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert all(sorted(game.returns) == [-1.0, 1.0] for game in games)


def test_one_who_knows_wins_all_games_that_can_be_won():
    games = played([Knowing(), Knowing()], games=60)
    # a game of sticks lasts as long as both play on, and the start decides it
    starts = [_start(3 + number % 32) for number in range(32)]
    for number, game in enumerate(games[:32]):
        anna = 1.0 if starts[number] % 4 else -1.0
        assert game.returns == (anna, -anna)


def _start(seed):
    env = Sticks()
    env.reset(seed=seed)
    return env.left


def test_a_player_that_knows_beats_chance_in_both_seats():
    games = played([Knowing(), chance()], games=200)
    by_seat = [Tally.of([one for one in games if one.seating[seat] == 0], 0) for seat in (0, 1)]
    assert [tally.games for tally in by_seat] == [100, 100]
    assert all(tally.win_rate > 0.8 for tally in by_seat)


@pytest.mark.parametrize("where", [{"backend": "thread"}, {"backend": "process"}])
def test_games_are_the_same_everywhere(where):
    players = [chance(), chance()]
    where = {**where, "num_workers": 2}
    if where["backend"] == "process":
        where["start_method"] = "fork"
    assert played(players) == played(players, **where)


def test_a_game_without_an_end_and_a_wish_to_stop_are_heard():
    with pytest.raises(errors.ConfigError, match="not ended after 2 turns"):
        played([chance(), chance()], max_turns=2)
    with pytest.raises(EvaluationStopped):
        played([chance(), chance()], should_stop=lambda: True)


def test_agents_that_act_at_once_are_asked_in_turn():
    spaces = {name: Guessing().action_space(name) for name in Guessing.possible_agents}
    games = play_games(
        partial(in_turn, Guessing),
        [RandomPlayer(spaces)],
        [(0, 0)],
        5,
        seed=0,
        max_turns=100,
        backend="serial",
    )
    assert [game.turns for game in games] == [20] * 5
    assert all(0 <= value <= 10 for game in games for value in game.returns)


def test_seatings_of_three_agents_give_each_player_each_seat():
    assert all_seatings(2) == [(0, 1), (1, 0)]
    three = all_seatings(3)
    assert len(three) == len(set(three)) == 6
    assert {(seating.index(0), seating.count(0)) for seating in three if seating.count(0) == 1} == {
        (0, 1),
        (1, 1),
        (2, 1),
    }


def test_who_won_is_who_got_more():
    games = [Game((0, 1), (1.0, -1.0), 3), Game((1, 0), (1.0, -1.0), 3), Game((0, 1), (0, 0), 9)]
    assert Tally.of(games, 0) == Tally(1, 1, 1) == Tally.of(games, 1)
    assert (Tally(2, 1, 1).score, Tally(2, 1, 1).win_rate) == (2.5, 0.5)


# ---- matches between runs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of sticks, and one of a team."""
    place = tmp_path_factory.mktemp("runs")
    for name, env, agents, steps in (
        ("a", STICKS, AgentOptions(), 1536),
        ("b", STICKS, AgentOptions(policies="per-group"), 96),
        ("team", GUESSING, AgentOptions(), 96),
    ):
        options = TrainOptions(
            env, n_envs=4, total_steps=steps, backend="serial", eval_episodes=2, tensorboard=False
        )
        train_agents(options, agents, PPO, place / name)
    return place


def test_all_pairs_play_and_ratings_follow(runs):
    match = open_match([str(runs / "a"), str(runs / "b"), "random"])
    pairings = match.play(20, backend="serial")
    assert [(one.one, one.other) for one in pairings] == [(0, 1), (0, 2), (1, 2)]
    for one in pairings:
        assert one.tally.games == 20
        assert sum(seat.wins for seat in one.by_seat.values()) == one.tally.wins
    ratings = match.ratings(pairings)
    assert ratings.points[2] == 0
    document = match.document(pairings, ratings)
    assert json.loads(json.dumps(document)) == document
    assert pairings == match.play(20, backend="thread", num_workers=2)


@pytest.mark.parametrize(
    ("players", "said"),
    [
        (["random"], "needs two players"),
        (["random", "random"], "named twice"),
        (["a", "a"], "named twice"),
        (["a", "team"], "a match is for players of one game"),
        (["a", "nowhere"], "does not exist"),
    ],
)
def test_a_match_that_cannot_be(players, said, runs):
    with pytest.raises((errors.ConfigError, errors.CheckpointError), match=said):
        open_match([one if one == "random" else str(runs / one) for one in players])


def test_a_match_needs_a_game_for_every_seat(runs):
    with pytest.raises(errors.ConfigError, match="play at least 2"):
        open_match([str(runs / "a"), "random"]).play(1, backend="serial")


def test_the_command_shows_a_table_and_keeps_it(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a, best = str(runs / "a"), str(runs / "b" / "best.pt")
    assert app.run(["match", a, best, "random", "--games", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["players"]] == [a, best, "random"]
    assert [one["games"] for one in document["pairings"]] == [8, 8, 8]
    kept = json.loads((tmp_path / document["result"]).read_text())
    assert kept["players"] == document["players"]
    if document["film"] is not None:
        assert (tmp_path / document["film"]).stat().st_size > 0
    assert app.run(["match", a, "random", "--games", "7", "--no-film", "--plain"]) == 0
    shown = capsys.readouterr().out
    for said in ("Elo", "as anna", "8 games", "match.json", "8 games and not 7"):
        assert said in shown


def test_a_run_with_several_agents_is_sent_to_match_by_eval(runs, capsys):
    assert app.run(["eval", str(runs / "a")]) == 2
    assert "has several agents: `envfleet match" in capsys.readouterr().err


def test_from_a_name_to_a_run_that_goes_on_and_a_match(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = ["--n-envs", "4", "--n-steps", "12", "--batch-size", "24", "--eval-episodes", "4"]
    few += ["--hidden", "8", "--backend", "serial", "--no-tensorboard", "--json"]
    made = ["train", "--env", STICKS, "--total-steps", "96", "--checkpoint-dir", "runs/s"]
    assert app.run([*made, *few]) == 0
    assert json.loads(capsys.readouterr().out)["env_steps"] == 96
    kept = json.loads((tmp_path / "runs/s/run.json").read_text())
    assert kept["job"] == "agents"
    assert "--policies" not in kept["command"]
    assert app.run(["train", "--resume", "runs/s", "--total-steps", "192", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["env_steps"] == 192
    assert app.run(["match", "runs/s", "random", "--games", "4", "--no-film", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_verify_train_finds_a_game_equal_everywhere(capsys):
    asked = ["--env", STICKS, "--n-envs", "4", "--n-steps", "16", "--num-episodes", "2"]
    assert app.run(["verify", "train", *asked, "--backend", "thread", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    # a turn whose reward is still to come belongs to the next rollout
    assert 2 * 4 * 16 - 2 * 4 <= found["compared"]["transitions"] <= 2 * 4 * 16


def test_verify_train_names_the_agent_whose_environment_follows_no_seed(capsys):
    careless = "tests.unit.multiagent.small_game:CarelessSticks"
    asked = ["--env", careless, "--n-envs", "2", "--n-steps", "32", "--num-episodes", "1"]
    assert app.run(["verify", "train", *asked, "--backend", "thread", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["parting"]["agent"] in ("anna", "bert")
    assert found["parting"]["slot"] in (0, 1)
    assert "follows from no seed" in found["conclusion"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "CartPole-v1", "--policies", "per-group"], "CartPole-v1 has one"),
        (["--env", STICKS, "--policies", "mine"], "shared"),
        (
            ["--env", STICKS, "--env-kwargs", '{"size": 3}', "--n-envs", "2"],
            "cannot be built with {'size': 3}",
        ),
    ],
)
def test_wrong_input_is_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert app.run(["train", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
