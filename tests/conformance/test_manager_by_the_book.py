"""A manager is compared with a second, plain implementation of its rules.

`Book` plays a rollout by nothing but the rules: groups, seeds, names of actions, budgets,
penalties, ends, metrics. Every way of playing the six environments has to give what it gives.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from envfleet.llm.config import load_config, plain_config
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.registry import env_type

WAYS: list[Any] = [False, True, "threads", "resets", "auto"]
TAGS = [
    "SimpleSokoban",
    "SokobanDifferentGridVocab",
    "FrozenLake",
    "Bandit",
    "BanditTest",
    "Countdown",
    "MetamathQA",
    "WebShop",
]
WORDS = ["Up", "down", "LEFT", "Right", "Dance", "", "phoenix", "Dragon", "trader", "1+2", "42"]
DEEDS = ["search[a blue shirt]", "click[back to search]", "click[next >]", "click[buy now]"]


class Book:
    """One rollout according to the rules."""

    def __init__(self, config: dict[str, Any], mode: str, seed: int) -> None:
        manager = config["es_manager"]
        block = manager[mode]
        self._penalty = -abs(manager["format_penalty"])
        self._group_size = block["group_size"]
        self.caches: list[dict[str, Any]] = []
        self.statuses: list[dict[str, Any]] = []
        self._envs: list[Any] = []
        self._most: list[int] = []
        kinds = block["env_configs"]
        for tag, num_groups in zip(kinds["tags"], kinds["n_groups"], strict=True):
            for _ in range(num_groups * self._group_size):
                self._begin(tag, config["custom_envs"][tag], mode, seed)
        self._answers = [getattr(env, "correct_answer", None) for env in self._envs]

    def _begin(self, tag: str, entry: dict[str, Any], mode: str, seed: int) -> None:
        kind, env_id = env_type(entry["env_type"]), len(self._envs)
        env = kind.env_class(kind.config_class(**(entry["env_config"] or {})))
        group = env_id // self._group_size
        env.reset(seed=seed + group, options={"mode": mode})
        most = entry["max_actions_per_traj"]
        self._envs.append(env)
        self._most.append(most)
        self.statuses.append(
            {"terminated": False, "truncated": False, "num_actions": 0, "rewards": []}
        )
        self.caches.append(
            {
                "env_id": env_id,
                "history": [{"state": env.render(), "actions_left": most}],
                "group_id": group,
                "tag": tag,
                "penalty": 0,
            }
        )

    def step(self, inputs: list[dict[str, Any]]) -> list[int]:
        return [one["env_id"] for one in inputs if not self._turn(one)]

    def _turn(self, given: dict[str, Any]) -> bool:
        env_id, named = given["env_id"], given["actions"]
        env, cache, status = self._envs[env_id], self.caches[env_id], self.statuses[env_id]
        lookup = env.config.action_lookup
        known = {name.lower(): number for number, name in (lookup or {}).items()}
        valid = (
            list(named)
            if lookup is None
            else [known[name.lower()] for name in named if name.lower() in known]
        )
        if len(valid) != len(named) or not valid:
            cache["penalty"] += self._penalty
        done, reward, executed = False, 0.0, []
        info: dict[str, Any] = {}
        for action in valid[: self._most[env_id] - status["num_actions"]]:
            _, worth, is_terminated, is_truncated, told = env.step(action)
            reward += worth
            info.update(told)
            executed.append(action)
            done = is_terminated or is_truncated
            if done:
                break
        status["num_actions"] += len(executed)
        status["rewards"].append(reward)
        left = self._most[env_id] - status["num_actions"]
        if done:
            status["terminated"], status["truncated"] = True, not info.get("success", False)
        elif left <= 0:
            done = status["terminated"] = status["truncated"] = True
        said = {key: given[key] for key in ("llm_response", "llm_raw_response")}
        cache["history"][-1].update(actions=executed, reward=reward, info=info, **said)
        cache["history"].append({"state": env.render(), "actions_left": left})
        return done

    def add_metrics(self) -> list[dict[str, Any]]:
        solved = set()
        for cache, status in zip(self.caches, self.statuses, strict=True):
            tag, history = cache["tag"], cache["history"]
            is_solved = status["terminated"] and not status["truncated"]
            if is_solved:
                solved.add((tag, cache["group_id"]))
            values: dict[str, list[float]] = {}
            for turn in history:
                for key, value in turn.get("info", {}).items():
                    if key != "success":
                        values.setdefault(key, []).append(float(value))
            history[-1]["metrics"] = values
            cache["metrics"] = {
                f"{tag}/success": float(is_solved),
                f"{tag}/num_actions": status["num_actions"],
                **{f"{tag}/{key}": sum(all_) / (len(history) - 1) for key, all_ in values.items()},
            }
            if tag == "MetamathQA":
                cache["correct_answer"] = self._answers[cache["env_id"]]
        for cache in self.caches:
            has_any = (cache["tag"], cache["group_id"]) in solved
            cache["metrics"][f"{cache['tag']}/pass@{self._group_size}"] = float(has_any)
        return self.caches


def turns_of(dice: random.Random, book: Book) -> Iterator[list[dict[str, Any]]]:
    """For each turn some of the running environments, in any order, with an answer for each."""
    for number in range(5):
        ids = [one for one, status in enumerate(book.statuses) if not status["terminated"]]
        asked = dice.sample(ids, dice.randint(0, len(ids)))
        yield [
            {
                "env_id": env_id,
                "llm_response": f"response {number}",
                "llm_raw_response": f"raw {number}",
                "actions": said_by(dice, book.caches[env_id]["history"][-1]["state"]),
            }
            for env_id in asked
        ]


def said_by(dice: random.Random, state: str) -> list[str]:
    offered = re.findall(r"click\[[^\]]*\]", state)[:12]
    return [dice.choice([*WORDS, *DEEDS, *offered]) for _ in range(dice.randint(0, 5))]


def some_config(dice: random.Random, mode: str) -> dict[str, Any]:
    config = plain_config(load_config("base"))
    tags = dice.sample(TAGS, 3)
    n_groups = [dice.randint(1, 2) for _ in tags]
    config["es_manager"]["format_penalty"] = dice.choice([0.1, -0.1, -0.25, 0])
    config["es_manager"][mode] = {
        "env_groups": sum(n_groups),
        "group_size": dice.randint(1, 3),
        "env_configs": {"tags": tags, "n_groups": n_groups},
    }
    config["custom_envs"]["MetamathQA"]["max_actions_per_traj"] = 3
    return config


@pytest.mark.parametrize("number", range(8))
def test_every_way_goes_by_the_book(number: int) -> None:
    dice = random.Random(number)
    mode = dice.choice(["train", "val"])
    config, seed = some_config(dice, mode), dice.randrange(10**6)
    book = Book(config, mode, seed)
    # one after another: the running environments depend on the turn before
    played = [(turn, book.step(turn)) for turn in turns_of(dice, book)]
    expected = book.add_metrics()
    for way in WAYS:
        config["es_manager"] |= {"use_multiprocessing": way, "max_workers": 2}
        with EnvStateManager(config, mode) as manager:
            manager.reset(seed=seed)
            for turn, going_on in played:
                assert [cache["env_id"] for cache in manager.step(turn)] == going_on, way
            assert manager.get_rollout_states() == expected, way
            for entry, status in zip(manager.envs, book.statuses, strict=True):
                assert {key: getattr(entry["status"], key) for key in status} == status, way
