"""Trajectories made by hand, with tokens that can be told apart."""

from envfleet.llm.inference.types import Generation, GenerationTimes, Message
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn, TurnTimes


def turn(number, *, prompt=None, answer=None, reward=0.0, **changes):
    """A turn; `prompt` and `answer` are token ids, and None is an engine that does not tell."""
    said = f"<think>t{number}</think><answer>Left</answer>"
    fields = {
        "number": number,
        "state": f"state {number}",
        "actions_left": 10 - number,
        "new_messages": (Message("user", f"state {number}"),),
        "prefill": "<think>",
        "generation": Generation(
            text=said.removeprefix("<think>"),
            stop_reason="stop",
            prompt_ids=prompt,
            token_ids=answer,
            log_probs=None if answer is None else tuple(-0.1 * one for one in answer),
            num_tokens=len(answer or ()),
            model_version="v3",
            times=GenerationTimes(queue_s=0.1, prefill_s=0.2, decode_s=0.3),
        ),
        "llm_response": said,
        "actions": (1,),
        "reward": reward,
        "times": TurnTimes(start_s=float(number), env_s=0.05, transport_s=0.01),
    }
    return TrajectoryTurn(**(fields | changes))


def trajectory(env_id=0, *, rewards=(0.0,), group_size=2, has_tokens=True, **changes):
    """A finished trajectory of as many turns as rewards, whose prompts only grow."""
    turns = []
    so_far: tuple[int, ...] = (100 + env_id, 7)
    for number, reward in enumerate(rewards):
        answer = (1 + number, 2 + number)
        prompt = so_far
        so_far = (*prompt, *answer, 50 + number)
        known = {"prompt": prompt, "answer": answer} if has_tokens else {}
        turns.append(turn(number, reward=reward, **known))
    fields = {
        "env_id": env_id,
        "group_id": env_id // group_size,
        "tag": "FrozenLake",
        "seed": 10_000 + env_id // group_size,
        "turns": turns,
        "final_state": "the end",
        "is_done": True,
    }
    return Trajectory(**(fields | changes))
