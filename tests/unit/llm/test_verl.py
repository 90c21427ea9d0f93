"""verl's batch columns and its agent loop, without verl."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from envfleet.errors import ConfigError, RolloutFailed
from envfleet.llm.verl import EnvAgentLoop, batch_columns, start_rows
from tests.unit.llm.made_trajectories import trajectory, turn
from tests.unit.llm.tiny_model import tiny_tokenizer


class TestColumns:
    def test_a_batch_by_hand(self):
        played = [
            trajectory(0, rewards=(0.0, 1.0)),
            trajectory(1, rewards=(0.5,)),
            trajectory(2, is_masked=True),
        ]
        found = batch_columns(played, pad_id=9, prompt_length=3)

        assert found["prompts"].tolist() == [[9, 100, 7], [9, 101, 7]]
        assert found["responses"].tolist() == [[1, 2, 50, 2, 3], [1, 2, 9, 9, 9]]
        assert found["response_mask"].tolist() == [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]
        assert found["attention_mask"].tolist() == [[0] + [1] * 7, [0] + [1] * 4 + [0] * 3]
        assert found["position_ids"].tolist() == [
            [0, 0, 1, 2, 3, 4, 5, 6],
            [0, 0, 1, 2, 3, 3, 3, 3],
        ]
        assert found["rm_scores"].tolist() == [[0, 0, 0, 0, 1], [0, 0.5, 0, 0, 0]]
        assert found["rollout_log_probs"][1] == pytest.approx([-0.1, -0.2, 0, 0, 0])
        assert found["__num_turns__"].tolist() == [4, 2]
        assert found["uid"].tolist() == ["0", "0"]
        both = np.concatenate([found["prompts"], found["responses"]], axis=1)
        assert np.array_equal(found["input_ids"], both)

    def test_a_trajectory_that_was_cut_has_several_rows(self):
        cut = [turn(0, prompt=(1,), answer=(2,)), turn(1, prompt=(8, 8), answer=(3,))]
        found = batch_columns([trajectory(turns=cut)])

        assert found["prompts"].tolist() == [[0, 1], [8, 8]]

    def test_nothing_is_cut_off_unasked(self):
        with pytest.raises(ConfigError, match="response_length is 1, and the longest has 2"):
            batch_columns([trajectory()], response_length=1)

    def test_no_trajectories_are_no_rows(self):
        assert batch_columns([])["input_ids"].shape == (0, 0)


class Server:
    """Answers as verl's `server_manager` does."""

    def __init__(self, tokenizer, answers=("go</think><answer>Left</answer>",), error=None):
        self._tokenizer, self._answers, self._error = tokenizer, answers, error
        self.asked = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None):
        self.asked.append((request_id, prompt_ids, sampling_params))
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        text = self._answers[(len(self.asked) - 1) % len(self._answers)]
        ids = [*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id]
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed")


CHANGES = ("agent_proxy.max_turn=3",)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def loop_of(server, tokenizer, *changes):
    return EnvAgentLoop(None, server, tokenizer, envs="frozen_lake", changes=[*CHANGES, *changes])


def prompt_of(text):
    return {"raw_prompt": [{"role": "user", "content": text}]}


class TestAgentLoop:
    def test_an_episode_is_prompt_answers_and_what_stands_between(self, tokenizer):
        server = Server(tokenizer)
        told = asyncio.run(
            loop_of(server, tokenizer).run({"top_p": 0.9}, **prompt_of("FrozenLake, seed 3"))
        )

        assert 1 <= len(server.asked) <= 3
        assert told.num_turns == 2 * len(server.asked)
        assert len({name for name, *_ in server.asked}) == 1
        assert server.asked[0][2] == {"top_p": 0.9}
        assert told.prompt_ids == server.asked[0][1]
        assert len(told.response_ids) == len(told.response_mask) == len(told.response_logprobs)
        whole = [*told.prompt_ids, *told.response_ids]
        for _, prompt, _ in server.asked:
            assert whole[: len(prompt)] == prompt
        drawn = [
            one
            for one, is_drawn in zip(told.response_ids, told.response_mask, strict=True)
            if is_drawn
        ]
        said = "go</think><answer>Left</answer><|im_end|>"
        assert tokenizer.decode(drawn) == said * len(server.asked)
        assert isinstance(told.reward_score, float)

    def test_many_at_once_share_environments_and_do_not_mix(self, tokenizer):
        server = Server(tokenizer)

        async def play():
            loops = [loop_of(server, tokenizer) for _ in range(20)]
            starts = [prompt_of(f"FrozenLake, seed {number % 4}") for number in range(20)]
            return await asyncio.gather(
                *(one.run({}, **start) for one, start in zip(loops, starts, strict=True))
            )

        played = asyncio.run(play())
        for number, one in enumerate(played):
            assert one.prompt_ids == played[number % 4].prompt_ids
            assert one.response_ids == played[number % 4].response_ids
        assert len({tuple(one.prompt_ids) for one in played}) == 4

    def test_a_failed_episode_is_masked(self, tokenizer):
        loop = loop_of(Server(tokenizer, error=OSError("gone")), tokenizer)
        told = asyncio.run(loop.run({}, **prompt_of("FrozenLake, seed 3")))

        assert told.response_mask == [0]
        assert told.extra_fields["failure"] == "engine"
        assert told.reward_score == 0.0

    def test_a_failed_episode_raises_if_asked(self, tokenizer):
        server = Server(tokenizer, error=OSError("gone"))
        loop = loop_of(server, tokenizer, "agent_proxy.on_failure=raise")
        with pytest.raises(RolloutFailed, match="gone"):
            asyncio.run(loop.run({}, **prompt_of("FrozenLake, seed 3")))
        assert len(server.asked) == 1

    def test_responses_are_cut_to_verl_s_length_and_that_is_told(self, tokenizer):
        rollout = SimpleNamespace(response_length=10)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        loop = EnvAgentLoop(
            SimpleNamespace(config=config), Server(tokenizer), tokenizer, envs="frozen_lake"
        )
        told = asyncio.run(loop.run({}, **prompt_of("FrozenLake, seed 3")))

        assert len(told.response_ids) == 10
        assert told.extra_fields["num_cut_tokens"] > 0

    def test_a_prompt_that_names_no_start_is_refused(self, tokenizer):
        with pytest.raises(ConfigError, match="or start_rows of"):
            asyncio.run(loop_of(Server(tokenizer), tokenizer).run({}, **prompt_of("hello")))


def test_rows_of_a_data_set():
    first, second = start_rows("frozen_lake", 2, seed=5)

    assert first["prompt"] == [{"role": "user", "content": "FrozenLake, seed 5"}]
    assert second["prompt"][0]["content"] == "FrozenLake, seed 6"
    assert (first["agent_name"], first["data_source"]) == ("envfleet", "FrozenLake")
