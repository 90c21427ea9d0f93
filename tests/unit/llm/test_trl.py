"""TRL's GRPOTrainer with text environments: a real step, on tokens that the model drew.

TRL takes seconds to import, so tests do so, and not this file, which all workers of a run import.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from envfleet.errors import ConfigError, RolloutFailed
from envfleet.llm import load_config
from envfleet.llm.inference.types import Generation
from envfleet.llm.trl import env_reward, rollout_func, start_prompts
from tests.unit.llm.tiny_model import tiny_model, tiny_tokenizer

GUIDE = Path(__file__).parents[3] / "docs" / "training-llms.md"
SMALL = (
    "es_manager.train.env_groups=2",
    "es_manager.train.env_configs.n_groups=[2]",
    "agent_proxy.max_turn=2",
    "llm.engine=transformers",
    "llm.max_tokens=6",
    "llm.temperature=1.0",
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def config_of(*changes, name="frozen_lake"):
    return load_config(name, [*SMALL, *changes])


def trainer_like(tokenizer, model=None, *, temperature=1.0):
    """What a rollout function reads of a trainer."""
    model = tiny_model(tokenizer) if model is None else model
    return SimpleNamespace(
        model=model,
        processing_class=tokenizer,
        args=SimpleNamespace(temperature=temperature, seed=7),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(
            num_processes=1, process_index=0, unwrap_model=lambda model: model
        ),
    )


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_a_grpo_trainer_takes_a_step(tokenizer, tmp_path, monkeypatch):
    import torch
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    config = config_of()
    model = tiny_model(tokenizer)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with rollout_func(config, rewards=[lambda one: float(one.env_id)]) as play:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=env_reward,
            train_dataset=Dataset.from_list(start_prompts(config, 2)),
            rollout_func=play,
            args=GRPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4,
                num_generations=2,
                max_steps=1,
                temperature=1.0,
                learning_rate=1e-2,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                use_cpu=True,
                bf16=False,
                activation_checkpointing=False,
                disable_tqdm=True,
            ),
        )
        trainer.train()
        played = play.trajectories

    assert len(played) == 4
    assert sorted(one.seed for one in played) == [10_000, 10_000, 10_001, 10_001]
    (logged,) = [one for one in trainer.state.log_history if "reward" in one]
    assert logged["reward"] == pytest.approx(sum(one.total_reward for one in played) / 4, rel=1e-3)
    drawn = [sum(turn.generation.num_tokens for turn in one.turns) for one in played]
    assert logged["completions/mean_length"] == pytest.approx(sum(drawn) / 4)
    moved = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert moved


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.leaves_thread("tqdm, which the trainer uses, keeps a thread of its own")
def test_the_example_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    """Here and not with the other examples, because this process may have imported TRL already."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)

    exec(compile(block, str(GUIDE), "exec"), {"__name__": "__main__"})

    assert "4 trajectories, mean reward" in capsys.readouterr().out


class TestTokens:
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_completions_are_what_the_model_drew_and_saw(self, tokenizer, temperature):
        """Compared with what TRL works out for the whole sequence, at its temperature."""
        import torch

        trainer = trainer_like(tokenizer, temperature=temperature)
        with rollout_func(config_of(f"llm.temperature={temperature}")) as play:
            told = play(["FrozenLake, seed 3"], trainer)
        (prompt,), (ids,), (mask,) = told["prompt_ids"], told["completion_ids"], told["env_mask"]
        (trajectory,) = play.trajectories
        assert len(trajectory.turns) == 2

        drawn = [one for turn in trajectory.turns for one in turn.generation.token_ids or ()]
        assert [one for one, is_drawn in zip(ids, mask, strict=True) if is_drawn] == drawn
        with torch.no_grad():
            logits = trainer.model(torch.tensor([[*prompt, *ids]])).logits[0] / temperature
        found = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        expected = [float(found[place, one]) for place, one in enumerate(ids)]
        for value, one, is_drawn in zip(told["logprobs"][0], expected, mask, strict=True):
            assert value == (pytest.approx(one, abs=1e-4) if is_drawn else 0.0)

    def test_what_stands_between_answers_is_what_the_template_writes(self, tokenizer):
        with rollout_func(config_of()) as play:
            told = play(["FrozenLake, seed 3"], trainer_like(tokenizer))
        (ids,), (mask,) = told["completion_ids"], told["env_mask"]
        between = [one for one, is_drawn in zip(ids, mask, strict=True) if not is_drawn]
        said = tokenizer.decode(between)
        (new,) = play.trajectories[0].turns[1].new_messages

        expected = f"\n<|im_start|>user\n{new.content}<|im_end|>\n<|im_start|>assistant\n<think>"
        assert said.removeprefix("<|im_end|>") == expected
        assert tokenizer.decode(told["prompt_ids"][0]).endswith("<|im_start|>assistant\n<think>")

    def test_the_same_prompts_and_step_give_the_same_tokens(self, tokenizer):
        def played():
            with rollout_func(config_of()) as play:
                return play(["FrozenLake, seed 3"] * 2, trainer_like(tokenizer))

        first, second = played(), played()
        assert first == second
        assert first["completion_ids"][0] != first["completion_ids"][1]

    def test_environments_in_workers_give_the_same_tokens(self, tokenizer):
        def played(*changes):
            prompts = ["FrozenLake, seed 3", "FrozenLake, seed 4"]
            with rollout_func(config_of(*changes)) as play:
                first = play(prompts, trainer_like(tokenizer))
                second = play(prompts * 2, trainer_like(tokenizer))  # more than before
            return first, second

        away = ("agent_proxy.use_parallel_rollout=true", "es_manager.use_multiprocessing=true")
        assert played(*away, "es_manager.max_workers=2") == played()

    def test_a_model_that_was_training_goes_on_training(self, tokenizer):
        trainer = trainer_like(tokenizer)
        trainer.model.train()
        with rollout_func(config_of()) as play:
            play(["FrozenLake, seed 3"], trainer)

        assert trainer.model.training


class Silent:
    """An engine that answers with text alone, or fails."""

    name, is_deterministic, max_concurrency = "silent", True, 8

    def __init__(self, error=None):
        self._error = error

    async def start(self):
        pass

    async def generate(self, request):
        if self._error is not None:
            raise self._error
        return Generation(text="Left", stop_reason="stop")

    async def close(self):
        pass


class TestWrongUse:
    def test_another_temperature_than_the_trainer_s_is_refused(self, tokenizer):
        with (
            rollout_func(config_of()) as play,
            pytest.raises(ConfigError, match=r"llm.temperature is 1 and the trainer's .* 0.5"),
        ):
            play(["FrozenLake, seed 3"], trainer_like(tokenizer, temperature=0.5))

    @pytest.mark.parametrize("prompt", ["Sokoban, seed 3", "FrozenLake", "FrozenLake, seed x", 5])
    def test_a_prompt_that_names_no_start_is_refused(self, tokenizer, prompt):
        with (
            rollout_func(config_of()) as play,
            pytest.raises(ConfigError, match="make the data set with start_prompts"),
        ):
            play([prompt], trainer_like(tokenizer))

    def test_a_context_window_is_refused(self):
        with pytest.raises(ConfigError, match="max_context_window must be -1"):
            rollout_func(config_of("agent_proxy.max_context_window=2"))

    def test_an_engine_without_tokens_is_refused(self, tokenizer):
        with (
            rollout_func(config_of(), engine=lambda trainer: Silent()) as play,
            pytest.raises(ConfigError, match="never tokenised again"),
        ):
            play(["FrozenLake, seed 3"], trainer_like(tokenizer))

    def test_a_failed_trajectory_has_a_row_that_is_not_trained_on(self, tokenizer):
        config = config_of("agent_proxy.on_failure=mask", "llm.max_retries=0")
        with rollout_func(config, engine=lambda trainer: Silent(OSError("gone"))) as play:
            told = play(["FrozenLake, seed 3"], trainer_like(tokenizer))

        assert told["env_reward"] == [None]
        assert told["env_mask"] == [[0]]
        assert env_reward([""], **told) == [None]

    def test_a_failed_trajectory_stops_training_if_asked(self, tokenizer):
        config = config_of("agent_proxy.on_failure=raise", "llm.max_retries=0")
        with (
            rollout_func(config, engine=lambda trainer: Silent(OSError("gone"))) as play,
            pytest.raises(RolloutFailed, match="gone"),
        ):
            play(["FrozenLake, seed 3"], trainer_like(tokenizer))


def test_start_prompts_take_the_tags_in_turn():
    config = config_of(
        "es_manager.train.env_configs.tags=[FrozenLake,Bandit]",
        "es_manager.train.env_configs.n_groups=[1,1]",
    )

    assert [row["prompt"] for row in start_prompts(config, 3, seed=5)] == [
        "FrozenLake, seed 5",
        "Bandit, seed 6",
        "FrozenLake, seed 7",
    ]
