"""What the model is told, and the form of its answers."""

from typing import Any

import pytest

from envfleet.errors import ConfigError
from envfleet.llm.inference.continuation import new_messages
from envfleet.llm.inference.types import Generation, Message
from envfleet.llm.play_rules import read_rules
from envfleet.llm.prompts import (
    PromptInput,
    TagPrompt,
    format_grammar,
    prefill_of,
    write_messages,
)
from envfleet.llm.settings import AgentProxy
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn
from tests.unit.llm.rollouts import config_with

PROXY = AgentProxy()
TAG = TagPrompt("Walk.", 50, ("Left", "Right"))


def turn(number: int) -> TrajectoryTurn:
    return TrajectoryTurn(
        number=number,
        state=f"state {number}",
        actions_left=9 - number,
        new_messages=(),
        generation=Generation(text="", stop_reason="stop"),
        llm_response=f"<think>t</think><answer>{number}</answer>",
        actions=(1,),
        reward=-0.1,
    )


def given(num_turns: int, window: int = -1, proxy: AgentProxy = PROXY) -> PromptInput:
    turns = [turn(number) for number in range(num_turns)]
    return PromptInput(TAG, proxy, turns, f"state {num_turns}", 9 - num_turns, window)


FORM = (
    "Always output: <think> [Your thoughts] </think> <answer> [your answer] </answer> with no "
    "extra text. Strictly follow this format. Max response length: 50 words (tokens).\n"
)


def test_the_first_prompt_is_the_instruction_and_the_state() -> None:
    assert write_messages(given(0)) == [
        Message("system", "You're a helpful assistant. "),
        Message("user", f"Walk.\nTurn 1:\nState:\nstate 0\nYou have 9 actions left. {FORM}"),
    ]


def test_a_later_prompt_goes_on_with_the_reward_and_the_next_state() -> None:
    first, second, answer, third = write_messages(given(1))
    assert [first, second] == write_messages(given(0))
    assert answer == Message("assistant", "<think>t</think><answer>0</answer>")
    assert third.content == (
        f"Reward:\n-0.1\n\nTurn 2:\nState:\nstate 1\nYou have 8 actions left. {FORM}"
    )
    assert new_messages([first, second, answer, third]) == (third,)
    assert new_messages([first, second]) == (first, second)


def test_a_context_window_shows_the_last_turns_only() -> None:
    messages = write_messages(given(4, window=2))
    assert len(messages) == 4
    assert "state 3" in messages[1].content
    assert messages[1].content.startswith("Walk.")
    assert "state 4" in messages[3].content
    assert len(write_messages(given(4, window=9))) == len(write_messages(given(4)))


def test_without_thoughts_only_an_answer_is_asked_for() -> None:
    proxy = AgentProxy(enable_think=False)
    assert "<think>" not in write_messages(given(0, proxy=proxy))[1].content
    assert prefill_of(proxy) == "<answer>"
    assert prefill_of(PROXY) == "<think>"


def test_the_prefix_of_a_tag_names_symbols_and_actions() -> None:
    prefix = read_rules(config_with(), "train").prompts["FrozenLake"].prefix
    assert "\nThe meaning of each symbol in the state is:\n" in prefix
    assert "\nYour available actions are:\nLeft, Down, Right, Up\n" in prefix
    assert prefix.endswith('up to 10 actions, separated by the action separator " || "\n')


def test_a_grammar_allows_known_actions_only() -> None:
    grammar = format_grammar(TAG, PROXY)
    assert 'root ::= thought "</think><answer>" answer "</answer>"' in grammar
    assert 'action ::= "Left" | "Right"' in grammar
    assert 'answer ::= action (" || " action){0,4}' in grammar
    assert "thought" not in format_grammar(TAG, AgentProxy(enable_think=False))
    assert r"answer ::= [^< \t\r\n] [^<]{0,79}" in format_grammar(TagPrompt("", 9, None), PROXY)
    assert '"say \\"hi\\""' in format_grammar(TagPrompt("", 9, ('say "hi"',)), PROXY)


def test_a_grammar_allows_what_an_environment_without_named_actions_understands() -> None:
    tags = ("Bandit", "Countdown", "WebShop")
    rules = read_rules(config_with(tags=tags), "train")
    answers = {tag: rules.grammars[tag].partition("\nanswer ::= ")[2] for tag in tags}
    assert answers["Bandit"] == '"Phoenix" | "Dragon"'
    assert answers["Countdown"].startswith("[0-9(] ")
    assert answers["WebShop"].startswith('("search[" | "click[")')


def bonus(trajectory: Trajectory) -> float:
    return 1.0


def shout(given: Any) -> list[Message]:
    return [Message("user", given.state.upper())]


def test_prompts_and_rewards_may_be_named_in_the_configuration() -> None:
    here = "tests.unit.llm.test_prompts"
    rules = read_rules(
        config_with(
            f"agent_proxy.prompt={here}:shout", f"agent_proxy.reward_functions=[{here}:bonus]"
        ),
        "train",
    )
    assert rules.write is shout
    assert rules.rewards == {f"{here}:bonus": bonus}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("agent_proxy.prompt=nothing", "must be written module:function"),
        ("agent_proxy.prompt=no_such_module:f", "cannot be imported"),
        ("agent_proxy.reward_functions=[os:sep]", "is not a function"),
        ("agent_proxy.parallel_n_jobs=0", "agent_proxy.parallel_n_jobs must be -1, or 1 or more"),
        ("agent_proxy.on_failure=ignore", "agent_proxy.on_failure must be"),
        ("agent_proxy.parallel_backend=dask", "agent_proxy.parallel_backend must be"),
    ],
)
def test_a_wrong_option_is_one_sentence(change: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_rules(config_with(change), "train")
