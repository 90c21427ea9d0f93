"""RAGEN's own manager, context manager and loop as a contender, beside envfleet's rollout.

    git clone https://github.com/RAGEN-AI/RAGEN && git -C RAGEN checkout 5eb79b8
    pip install --no-deps gym-sokoban==0.0.6 imageio
    ENVFLEET_RAGEN=RAGEN python benchmarks/llm_rollout.py --rows ragen

Its code runs as it is: `LLMAgentProxy.rollout` with its `EnvStateManager`, its `ContextManager` and
its Sokoban. What it imports and does not need here is replaced while it is imported: hydra, vLLM,
the clients of hosted models, and of verl and tensordict the two classes that only hold data. The
scripted answers reach it through its own wrapper of hosted models. Its tokenizer knows words only,
and is quicker than that of any model.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peer_sokoban import gym_sokoban, gymnasium_for_gym
from benchmarks.workload import timed
from envfleet.cli.measure import Slice
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine
from envfleet.llm.inference.types import GenerateRequest
from envfleet.llm.parallel_rollout import ParallelRolloutManager

FOLDER = "ENVFLEET_RAGEN"
MAX_TURN = 5
NUM_WORDS = 40
"""Of a thought."""
_TEMPLATE = (
    "{% for one in messages %}<|im_start|> {{ one['role'] }}\n{{ one['content'] }} <|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)


@cache
def answer(env_id: int, turn: int) -> str:
    """What the model says after `<think>`: a thought, and two actions."""
    dice = random.Random(f"{env_id} {turn}")
    thought = " ".join(
        dice.choice(("the", "box", "is", "left", "of", "me")) for _ in range(NUM_WORDS)
    )
    actions = " || ".join(dice.choice(("Up", "Down", "Left", "Right")) for _ in range(2))
    return f"{thought}</think><answer>{actions}</answer>"


def config_of(num_groups: int) -> dict[str, Any]:
    """What both are given: RAGEN's own settings for simple rooms of Sokoban, in groups of 16."""
    rooms = {"dim_x": 6, "dim_y": 6, "num_boxes": 1, "max_steps": 100, "search_depth": 300}
    block = {
        "env_groups": num_groups,
        "group_size": 16,
        "env_configs": {"tags": ["SimpleSokoban"], "n_groups": [num_groups]},
    }
    return {
        "seed": {"train": 10_000, "val": 123},
        "es_manager": {"format_penalty": -0.1, "train": block, "val": block},
        "agent_proxy": {
            "max_context_window": -1,
            "max_turn": MAX_TURN,
            "action_sep": "||",
            "max_actions_per_turn": 5,
            "use_turn_scores": False,
            "enable_think": True,
            "reward_normalization": {"grouping": "state", "method": "identity"},
        },
        "custom_envs": {
            "SimpleSokoban": {
                "env_type": "sokoban",
                "max_actions_per_traj": 10,
                "env_instruction": "Push all boxes onto targets.",
                "max_tokens": 100,
                "env_config": rooms,
            }
        },
    }


class Ours:
    """A rollout of envfleet, in this process."""

    key, label = "envfleet", "envfleet"

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups

    def open(self) -> None:
        """Make the environments, and play once."""

        def script(request: GenerateRequest, dice: random.Random) -> str:
            env_id, _, turn = map(int, request.request_id.split("."))
            return f"<think>{answer(env_id, turn)}"

        engine = ScriptedEngine(script, tells_tokens=False)
        self._llm = SharedLLMInferenceManager(engine)
        self._manager = ParallelRolloutManager(config_of(self._num_groups), self._llm)
        self.turns = self._play()

    def run(self, seconds: float) -> Slice:
        """Play whole rollouts."""
        return timed(self._play, seconds)

    def _play(self) -> int:
        return self._manager.rollout().timings.num_turns

    def close(self) -> None:
        """End the manager and the engine."""
        self._manager.close()
        self._llm.close()


class Ragen:
    """A rollout of RAGEN, with what it makes of it for training."""

    key, label = "ragen", "RAGEN's manager and loop"

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups

    def open(self) -> None:
        """Import it, make its environments, and play once."""
        from omegaconf import OmegaConf

        proxy = ragen_proxy()
        own = {
            "enable_response_mask": True,
            "actor_rollout_ref": {"rollout": {"response_length": 400}},
        }
        config = OmegaConf.create(config_of(self._num_groups) | own)
        self._agent = proxy.LLMAgentProxy(config, _answers(proxy), _tokenizer())
        self._asked = proxy.DataProto(meta_info={})
        self.turns = self._play()

    def run(self, seconds: float) -> Slice:
        """Play whole rollouts."""
        return timed(self._play, seconds)

    def _play(self) -> int:
        self._agent.rollout(self._asked)
        caches = self._agent.train_es_manager.rollout_cache
        return sum(len(one["history"]) for one in caches)

    def close(self) -> None:
        """Close its environments."""
        self._agent.train_es_manager.close()
        self._agent.val_es_manager.close()


def _answers(proxy: Any) -> Any:
    class Answers(proxy.ApiCallingWrapperWg):
        """In place of hosted models."""

        def __init__(self) -> None: ...

        def generate_sequences(self, lm_inputs: Any) -> Any:
            given = lm_inputs.non_tensor_batch
            texts = [
                answer(int(env_id), sum(one["role"] == "assistant" for one in messages))
                for env_id, messages in zip(given["env_ids"], given["messages_list"], strict=True)
            ]
            return proxy.DataProto(non_tensor_batch={**given, "response_texts": texts})

    return Answers()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|word|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.WordLevel({one: i for i, one in enumerate(words)}, words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token=words[0],
        pad_token=words[1],
        chat_template=_TEMPLATE,
        name_or_path="qwen of words",  # it knows the marks of a conversation by the model's name
    )


# ---- its modules --------------------------------------------------------------------------------


def ragen_proxy() -> Any:
    """Its module of the loop."""
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder, "ragen").is_dir():
        raise RuntimeError(
            f"set {FOLDER} to RAGEN's repository: git clone https://github.com/RAGEN-AI/RAGEN && "
            "git -C RAGEN checkout 5eb79b8"
        )
    gym_sokoban()
    sys.path.insert(0, folder)
    try:
        with gymnasium_for_gym(), _stand_ins(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("ragen.llm_agent.agent_proxy")
    finally:
        sys.path.remove(folder)


class _DataProto:
    """Holds data."""

    def __init__(self, batch: Any = None, non_tensor_batch: Any = None, meta_info: Any = None):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info


class _TensorDict(dict[str, Any]):
    """Holds tensors."""

    def __init__(self, source: Any, batch_size: int) -> None:
        super().__init__(source)
        self.batch_size = batch_size


class _Unused:
    """A class that is named and never made."""


@contextmanager
def _stand_ins() -> Iterator[None]:
    def unchanged(**_: Any) -> Callable[[Any], Any]:
        return lambda function: function

    held: dict[str, dict[str, Any]] = {
        "hydra": {"main": unchanged},
        "vllm": {"LLM": _Unused, "SamplingParams": _Unused},
        "tensordict": {"TensorDict": _TensorDict},
        "verl": {"DataProto": _DataProto},
        "verl.protocol": {"pad_dataproto_to_divisor": None, "unpad_dataproto": None},
        "verl.single_controller": {},
        "verl.single_controller.ray": {},
        "verl.single_controller.ray.base": {"RayWorkerGroup": _Unused},
        "verl.utils": {},
        "verl.utils.dataset": {},
        "verl.utils.dataset.rl_dataset": {"collate_fn": None},
        "ragen.llm_agent.base_llm": {"ConcurrentLLM": _Unused},
    }
    before = {name: sys.modules.get(name) for name in held}
    for name, contents in held.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
