"""Episodes that begin in one process and go on in another."""

import random
from typing import Any

import numpy as np
import pytest

from envfleet.errors import OutOfOrder
from envfleet.llm.config import load_config
from envfleet.llm.environments.base import Mode, Step, TextEnv
from envfleet.llm.environments.sokoban import SokobanEnv
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.prefetch import EpisodeStarter, can_hand_over, pack_episode, unpack_episode
from envfleet.llm.registry import env_type
from envfleet.llm.turns import EpisodeSoFar, TurnPlayer
from tests.unit.llm.games import Climb, News, Trouble, TroubleConfig

OURS = ["bandit", "countdown", "frozen_lake", "metamathqa", "sokoban", "webshop"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "webshop"
    monkeypatch.setenv("ENVFLEET_CACHE", str(folder))


class Drawing(TextEnv):
    """Draws from Gymnasium's generator, and uses one list for all of its episodes."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[float] = []

    def _begin(self, seed: int, mode: Mode) -> None:
        self._drawn.clear()
        self._draw()

    def _act(self, action: Any) -> Step:
        self._draw()
        return self._text(), 0.0, False, False, {}

    def _draw(self) -> None:
        self._drawn.append(float(self.np_random.random()))

    def _text(self) -> str:
        return str(self._drawn)


def outcomes(env: Any, num_turns: int = 6) -> list[Any]:
    chance, player = random.Random(3), TurnPlayer(env)
    names = list((env.config.action_lookup or {0: "search[shoes]", 1: "click[buy now]"}).values())
    turns = []
    for _ in range(num_turns):
        turns.append(player.play([chance.choice(names)], 9))
        if turns[-1].is_done:
            break
    return turns


@pytest.mark.parametrize("num_turns", [0, 1, 6])
@pytest.mark.parametrize("kind", OURS)
def test_an_episode_goes_on_elsewhere_as_it_would_have_where_it_was(
    kind: str, num_turns: int
) -> None:
    made = env_type(kind)
    settings = {"num_products": 50} if kind == "webshop" else None
    one, other, alone = (made.make(settings) for _ in range(3))
    for env in (one, alone):
        TurnPlayer(env).begin(5, "val")
        outcomes(env, num_turns)
    TurnPlayer(other).begin(99, "train")  # what it did before does not matter
    outcomes(other, 2)

    moved = pack_episode(one)
    assert unpack_episode(moved, other) is other

    assert other.render() == alone.render()
    assert outcomes(other) == outcomes(alone)
    assert other.np_random.random() == alone.np_random.random()
    assert len(moved[1]) < 2000


@pytest.mark.parametrize("kind", OURS)
def test_one_that_has_not_begun_moves_too(kind: str) -> None:
    one, other = (env_type(kind).make(None) for _ in range(2))
    TurnPlayer(other).begin(99, "train")
    unpack_episode(pack_episode(one), other)
    with pytest.raises(OutOfOrder):
        other.render()
    with pytest.raises(OutOfOrder):
        other.step("1")


class Walled(SokobanEnv):
    """Puts a wall where the level has none."""

    def _begin(self, seed: int, mode: Mode) -> None:
        super()._begin(seed, mode)
        place = self._cells.index(1)
        self._cells[place], self._shown[place] = 0, "#"


def test_what_a_subclass_adds_to_a_level_moves_too() -> None:
    one, other, alone = (Walled() for _ in range(3))
    for env in (one, alone):
        env.reset(seed=3)
    other.reset(seed=4)
    unpack_episode(pack_episode(one), other)
    assert other.render() == alone.render()
    assert outcomes(other) == outcomes(alone)


def test_a_configuration_that_was_changed_moves_with_its_episode() -> None:
    one, other, alone = (SokobanEnv() for _ in range(3))
    for env in (one, alone):
        env.config.action_lookup = {1: "A", 2: "B", 3: "C", 4: "D"}
        env.reset(seed=3)
    other.reset(seed=4)
    unpack_episode(pack_episode(one), other)
    assert other.config == alone.config
    assert outcomes(other) == outcomes(alone)


def test_one_environment_begins_many_episodes_and_none_of_them_knows_of_the_others() -> None:
    beginner = EpisodeStarter(Drawing)
    begun = [beginner.begin(seed, "train") for seed in range(4)]
    homes = [Drawing() for _ in begun]

    for home, (moved, _) in zip(homes, begun, strict=True):
        unpack_episode(moved, home)

    for seed, (home, (_, opening)) in enumerate(zip(homes, begun, strict=True)):
        alone = Drawing()
        assert opening == TurnPlayer(alone).begin(seed, "train")
        assert outcomes_of_drawing(home) == outcomes_of_drawing(alone)


def outcomes_of_drawing(env: Drawing) -> list[str]:
    return [env.step("")[0] for _ in range(3)]


def test_a_generator_of_another_kind_moves_too() -> None:
    one, other, alone = Drawing(), Drawing(), Drawing()
    for env in (one, alone):
        env.reset(seed=1)
        env.np_random = np.random.Generator(np.random.MT19937(7))
    unpack_episode(pack_episode(one), other)
    assert outcomes_of_drawing(other) == outcomes_of_drawing(alone)

    other.reset(seed=2)  # and one of the usual kind into where another kind was
    other.np_random = np.random.Generator(np.random.MT19937(8))
    one, alone = Drawing(), Drawing()
    for env in (one, alone):
        env.reset(seed=3)
    unpack_episode(pack_episode(one), other)
    assert outcomes_of_drawing(other) == outcomes_of_drawing(alone)


def test_what_cannot_part_from_its_episode_moves_whole() -> None:
    beginner, home = EpisodeStarter(lambda: Trouble(TroubleConfig())), Trouble(TroubleConfig())
    first, second = (unpack_episode(beginner.begin(seed, "val")[0], home) for seed in (1, 2))

    assert not can_hand_over(first)
    assert home is not first is not second
    assert first.render() != second.render()


def test_an_environment_that_failed_begins_nothing_more() -> None:
    made: list[Climb] = []

    class Failing(Climb):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def _begin(self, seed: int, mode: Mode) -> None:
            if seed == 1:
                raise RuntimeError("no such level")
            super()._begin(seed, mode)

    beginner = EpisodeStarter(Failing)
    openings = [beginner.begin(seed, "train")[1] for seed in (0, 1, 2, 3)]

    assert [one.failure is None for one in openings] == [True, False, True, True]
    assert len(made) == 2


@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_an_episode_played_again_goes_on_alike(num_turns: int) -> None:
    player = TurnPlayer(News(TroubleConfig()))
    state = player.begin(3, "val").state
    turns = [("a", "b"), (), ("c",)][:num_turns]
    for turn in turns:
        state = player.play(turn, 9).state
    expected = player.play(["d"], 9)
    player = TurnPlayer(News(TroubleConfig()))
    assert player.replay(EpisodeSoFar(3, "val", turns, state)) is None
    assert player.play(["d"], 9) == expected
    failure = player.replay(EpisodeSoFar(3, "val", turns, "another state"))
    assert failure is not None
    assert "do not bring it back (it shows something else now)" in failure.error


@pytest.mark.parametrize("count", [2, 60])
def test_what_an_episode_changes_in_its_configuration_moves_with_it(count: int) -> None:
    """Bandit names its arms at every beginning."""
    caches = []
    for way in ("resets", False):
        config = load_config(
            "bandit",
            [
                f"es_manager.train.env_groups={count}",
                "es_manager.train.group_size=1",
                f"es_manager.train.env_configs.n_groups=[{count}]",
                f"es_manager.use_multiprocessing={way}",
            ],
        )
        with EnvStateManager(config) as manager:
            for seed in (1, 500, 7):  # environments that have had other arms before
                manager.reset(seed=seed)
                manager.step(
                    [
                        {"env_id": one, "actions": [("Phoenix", "Dragon", "Fly")[one % 3]]}
                        for one in range(count)
                    ]
                )
                caches.append((way, seed, repr(manager.get_rollout_states())))
    found = {(way, seed): said for way, seed, said in caches}
    assert all(found["resets", seed] == found[False, seed] for seed in (1, 500, 7))
