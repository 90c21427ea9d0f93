"""Text environments for verl: its batch columns, and an agent loop.

verl is not needed to import this module, and is used where it is installed. The agent loop has the
form of verl's `AgentLoopBase`: verl makes one for every sample and awaits its `run`. All of a
process share one player, which keeps environments from one sample to the next.

Law: responses are the tokens that the server drew and those it was shown between its answers;
`response_mask` tells which are which.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import ConfigError, RolloutFailed
from envfleet.llm.config import load_config
from envfleet.llm.export.advantages import is_trained_on
from envfleet.llm.export.rows import token_runs
from envfleet.llm.inference.types import GenerateRequest, Generation, GenerationTimes
from envfleet.llm.play import Play
from envfleet.llm.play_rules import PlayRules, TrajectoryTask, read_rules
from envfleet.llm.seats import EnvSeats
from envfleet.llm.starts import read_start, start_texts
from envfleet.llm.token_prompts import TokenAsk, TokenPrompts
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn

__all__ = ["AgentLoopOutput", "EnvAgentLoop", "batch_columns", "start_rows"]

_MAX_LIVE = 1 << 20
"""verl itself limits how many samples are under way."""


# ---- finished trajectories as a batch ------------------------------------------------------------


def batch_columns(
    trajectories: Sequence[Trajectory],
    *,
    pad_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The columns of verl's `DataProto` for trajectories that are over and not masked.

    Prompts are padded on the left, responses on the right. `rm_scores` has the total reward at the
    last token. A trajectory whose tokens do not follow on from each other has several rows.

    Args:
        trajectories: Of a rollout.
        pad_id: The token that fills up.
        prompt_length: The width of prompts; that of the longest if None.
        response_length: The width of responses; that of the longest if None.

    Raises:
        ConfigError: The engine reported no tokens, or something is longer than asked for.
    """
    rows = [(one, run) for one in trajectories if is_trained_on(one) for run in token_runs(one)]
    longest = max((len(run.prompt_ids) for _, run in rows), default=0)
    prompts = _response_width("prompt_length", prompt_length, longest)
    longest = max((len(run.completion_ids) for _, run in rows), default=0)
    responses = _response_width("response_length", response_length, longest)
    whole = (len(rows), prompts + responses)
    input_ids = np.full(whole, pad_id, np.int64)
    attention, drawn = np.zeros(whole, np.int64), np.zeros(whole, np.int64)
    log_probs, scores = np.zeros(whole, np.float32), np.zeros(whole, np.float32)
    for place, (one, run) in enumerate(rows):
        begin, end = prompts - len(run.prompt_ids), prompts + len(run.completion_ids)
        input_ids[place, begin:end] = [*run.prompt_ids, *run.completion_ids]
        attention[place, begin:end] = 1
        drawn[place, prompts:end] = run.mask
        log_probs[place, prompts:end] = run.log_probs
        scores[place, end - 1] = one.total_reward
    return {
        "prompts": input_ids[:, :prompts],
        "responses": input_ids[:, prompts:],
        "response_mask": drawn[:, prompts:],
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": np.clip(attention.cumsum(axis=1) - 1, 0, None),
        "rollout_log_probs": log_probs[:, prompts:],
        "rm_scores": scores[:, prompts:],
        "__num_turns__": np.array([2 * run.num_turns for _, run in rows], np.int32),
        "uid": np.array([str(one.group_id) for one, _ in rows], object),
    }


def _response_width(name: str, asked: int | None, longest: int) -> int:
    if asked is not None and asked < longest:
        raise ConfigError(f"{name} is {asked}, and the longest has {longest} tokens; raise it")
    return longest if asked is None else asked


# ---- an agent loop -------------------------------------------------------------------------------


def start_rows(
    envs: str, number: int, *, changes: Sequence[str] = (), seed: int | None = None
) -> list[dict[str, Any]]:
    """Rows of a data set for verl: which environment a group plays, and from which seed."""
    texts = start_texts(load_config(envs, changes), number, seed=seed)
    return [
        {
            "prompt": [{"role": "user", "content": text}],
            "agent_name": "envfleet",
            "data_source": text.rpartition(",")[0],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for text in texts
    ]


@dataclass(slots=True, kw_only=True)
class AgentLoopOutput:
    """What a loop gives where verl is not installed; verl's own has the same fields."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float
    num_turns: int
    metrics: dict[str, float]
    extra_fields: dict[str, Any] = field(default_factory=dict)


class EnvAgentLoop:
    """Plays one episode with verl's server.

    In verl's file of agent loops:

        - name: envfleet
          _target_: envfleet.llm.verl.EnvAgentLoop
          envs: frozen_lake
          changes: [agent_proxy.max_turn=5]
    """

    def __init__(
        self,
        trainer_config: Any = None,
        server_manager: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        *,
        envs: str = "base",
        changes: Sequence[str] = (),
        mode: str = "train",
        **_: Any,
    ) -> None:
        """Take what verl passes, and a configuration of environments.

        Args:
            trainer_config: verl's.
            server_manager: Has `async generate(request_id, *, prompt_ids, sampling_params)`.
            tokenizer: Of the model.
            processor: Not used; states are text.
            envs: A preset, or the path of a YAML file.
            changes: Changes to it.
            mode: "train" or "val".
        """
        self._server, self._tokenizer = server_manager, tokenizer
        self._player = _player_of(envs, tuple(changes), mode)
        self._most = _response_length(trainer_config)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Play the episode that the row's prompt names; one that fails is not trained on."""
        text = kwargs["raw_prompt"][-1]["content"]
        tag, seed = read_start(text, self._player.rules)
        options = self._player.rules.options
        begun_s = time.monotonic()
        for attempt in range(options.max_attempts):
            task = TrajectoryTask(next(_numbers), 0, tag, seed, attempt)
            asker = _VerlRequests(self._server, self._tokenizer, sampling_params)
            played = await asyncio.wrap_future(self._player.play(task, asker))
            if played.failure is None or options.on_failure == "mask":
                break
            if options.on_failure == "raise":
                why = played.failure
                raise RolloutFailed(played.env_id, tag, len(played.turns), why.reason, why.error)
        return self._output(played, time.monotonic() - begun_s)

    def _output(self, played: Trajectory, seconds: float) -> Any:
        runs = token_runs(played)
        end_id = int(self._tokenizer.eos_token_id)
        first = runs[0] if runs else None
        prompt = first.prompt_ids if first else [end_id]
        ids = first.completion_ids if first else [end_id]
        mask = first.mask if first and played.failure is None else [0] * len(ids)
        log_probs = first.log_probs if first else [0.0]
        env_s = sum(turn.times.env_s for turn in played.turns)
        told = AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[: self._most],
            response_mask=mask[: self._most],
            response_logprobs=log_probs[: self._most],
            reward_score=played.total_reward if played.failure is None else 0.0,
            num_turns=2 * len(played.turns),
            metrics={"generate_sequences": max(0.0, seconds - env_s), "tool_calls": env_s},
            extra_fields={
                "success": played.is_success,
                "failure": None if played.failure is None else played.failure.reason,
                "num_cut_tokens": 0 if self._most is None else max(0, len(ids) - self._most),
            },
        )
        if find_spec("verl") is None:
            return told
        return import_module("verl.experimental.agent_loop.agent_loop").AgentLoopOutput(
            **asdict(told)
        )


_numbers = itertools.count()
"""Numbers of episodes in this process."""


def _response_length(trainer_config: Any) -> int | None:
    """The length to which verl cuts responses."""
    found = getattr(trainer_config, "config", trainer_config)
    for name in ("actor_rollout_ref", "rollout", "response_length"):
        found = getattr(found, name, None)
    return None if found is None else int(found)


class _VerlRequests:
    """Asks verl's server for one episode, in the event loop of its `run`."""

    def __init__(self, server: Any, tokenizer: Any, sampling: dict[str, Any]) -> None:
        self._server, self._tokenizer, self._sampling = server, tokenizer, sampling
        self._loop = asyncio.get_running_loop()
        # one name for all turns, so that they come to the server that has seen the earlier ones
        self._request_id = uuid.uuid4().hex
        self._ask = TokenAsk(TokenPrompts(tokenizer), self._submit)

    def __call__(self, request: GenerateRequest) -> Future[Generation]:
        return self._ask(request)

    def _submit(self, request: GenerateRequest) -> Future[Generation]:
        return asyncio.run_coroutine_threadsafe(self._generate(request), self._loop)

    async def _generate(self, request: GenerateRequest) -> Generation:
        begun_s = time.monotonic()
        prompt = list(request.prompt_ids or ())
        told = await self._server.generate(
            request_id=self._request_id, prompt_ids=prompt, sampling_params=self._sampling
        )
        ids = tuple(told.token_ids)
        return Generation(
            text=str(self._tokenizer.decode(list(ids), skip_special_tokens=True)),
            stop_reason="length" if told.stop_reason == "length" else "stop",
            prompt_ids=tuple(prompt),
            token_ids=ids,
            log_probs=None if told.log_probs is None else tuple(told.log_probs),
            num_prompt_tokens=len(prompt),
            num_tokens=len(ids),
            times=GenerationTimes(decode_s=time.monotonic() - begun_s),
        )


@lru_cache
def _player_of(envs: str, changes: tuple[str, ...], mode: str) -> _VerlPlayer:
    return _VerlPlayer(read_rules(load_config(envs, changes), mode))


class _VerlPlayer:
    """Plays episodes in a thread that lives as long as there are any.

    It hears of what happens to them (`PlayListener`) and is their source (`TaskSource`).
    """

    def __init__(self, rules: PlayRules) -> None:
        self.rules = rules
        self._seats = EnvSeats(rules.tags, dict.fromkeys(rules.tags, 1), rules.settings, False, 1)
        self._lock = threading.Lock()
        self._waiting: deque[TrajectoryTask] = deque()
        self._episodes: dict[int, tuple[_VerlRequests, Future[Trajectory]]] = {}
        self._is_running = False

    def play(self, task: TrajectoryTask, asker: _VerlRequests) -> Future[Trajectory]:
        """Play one episode; the future is its end."""
        future: Future[Trajectory] = Future()
        with self._lock:
            self._episodes[task.env_id] = asker, future
            self._waiting.append(task)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="envfleet-verl", daemon=True).start()
        return future

    def _run(self) -> None:
        rules = replace(self.rules, started_s=time.monotonic())
        try:
            Play(rules, self._seats, self._ask, self, self, max_live=_MAX_LIVE).run()
        except BaseException as exc:
            with self._lock:
                self._is_running = False
                lost, self._episodes = self._episodes, {}
                self._waiting.clear()
            for _, future in lost.values():
                future.set_exception(exc)

    def _ask(self, request: GenerateRequest) -> Future[Generation]:
        return self._episodes[int(request.request_id.partition(".")[0])][0](request)

    # ---- a source of tasks ----------------------------------------------------------------------

    def next(self) -> TrajectoryTask | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    @property
    def is_over(self) -> bool:
        with self._lock:
            self._is_running = bool(self._waiting)
            return not self._waiting

    # ---- a listener -----------------------------------------------------------------------------

    def begun(self, trajectory: Trajectory) -> None:
        pass

    def turned(self, trajectory: Trajectory, turn: TrajectoryTurn) -> None:
        pass

    def ended(self, trajectory: Trajectory) -> None:
        _, future = self._episodes.pop(trajectory.env_id)
        future.set_result(trajectory)
