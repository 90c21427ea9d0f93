"""Every preset of the package gives the same rollout in every way of playing it."""

import pytest

from envfleet.llm import EnvStateManager, load_config
from envfleet.llm.config import preset_names
from envfleet.llm.policies import make_policy
from envfleet.llm.rollout import play_rollout
from envfleet.llm.settings import read_agent_proxy, read_settings
from envfleet.llm.verify import verify


def small(name, mode="train"):
    """A preset, with as few groups as it has tags."""
    config = load_config(name)
    tags = config.es_manager[mode].env_configs.tags
    config.es_manager[mode].update(env_groups=len(tags), group_size=2)
    config.es_manager[mode].env_configs.n_groups = [1] * len(tags)
    return config


@pytest.mark.parametrize("name", preset_names())
def test_one_rollout_in_every_way(name):
    found = verify(small(name), seed=7, workers=(2,), start_methods=("fork",))

    assert found.ok, found.conclusion
    assert found.num_failures == 0


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("policy", ["random", "first"])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_players_say_what_environments_understand(name, policy, mode):
    config = small(name, mode)
    proxy = read_agent_proxy(config)
    tags = [tag for tag, _ in read_settings(config, mode).groups]

    with EnvStateManager(config, mode) as manager:
        rollout = play_rollout(manager, make_policy(policy, tags, proxy, seed=1), proxy, seed=1)

    assert all(summary.num_failures == 0 for summary in rollout.tags)
    if policy == "first":
        assert all(summary.penalty == 0 for summary in rollout.tags)
        assert all(summary.num_actions > 0 for summary in rollout.tags)
        for cache in rollout.caches:
            said = [turn["info"].get("action_is_valid", True) for turn in cache["history"][:-1]]
            assert all(said), (cache["tag"], cache["history"][0])
