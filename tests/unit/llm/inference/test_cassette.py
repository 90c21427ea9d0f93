"""Answers are recorded once and replayed without a model."""

import dataclasses

import pytest

from envfleet.errors import ConfigError, InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.cassette import CassetteEngine
from envfleet.llm.inference.scripted import ScriptedEngine
from tests.unit.llm.inference.stage import ask

REQUESTS = [ask(f"env {seed}", f"State {seed // 2}", seed=seed) for seed in range(6)]


class Moody(ScriptedEngine):
    """Never gives the same answer twice, and counts what it was asked."""

    def __init__(self):
        super().__init__(lambda request, dice: f"<answer>{self.count()}</answer>")
        self.num_asked = 0

    def count(self):
        self.num_asked += 1
        return self.num_asked


def played(engine, requests=REQUESTS):
    with SharedLLMInferenceManager(engine) as llm:
        found = [llm.submit(request) for request in requests]
        return [without_times(one.result(60)) for one in found]


def without_times(answer):
    return dataclasses.replace(answer, times=type(answer.times)())


def test_a_replay_equals_the_recording_in_any_order_and_under_other_names(tmp_path):
    path = tmp_path / "deep" / "tape.jsonl"
    recorded = played(CassetteEngine(path, Moody(), mode="record"))
    assert len({one.text for one in recorded}) == 6
    renamed = [dataclasses.replace(one, request_id="x", priority=(9,)) for one in REQUESTS]
    again = played(CassetteEngine(path, mode="replay"), renamed[::-1])
    assert again[::-1] == recorded


def test_auto_replays_what_is_there_and_records_the_rest(tmp_path):
    path = tmp_path / "tape.jsonl"
    first = played(CassetteEngine(path, Moody()), REQUESTS[:3])
    inner = Moody()
    both = played(CassetteEngine(path, inner), REQUESTS)
    assert both[:3] == first
    assert inner.num_asked == 3
    assert played(CassetteEngine(path, mode="replay")) == both


def test_record_starts_anew(tmp_path):
    path = tmp_path / "tape.jsonl"
    played(CassetteEngine(path, Moody()), REQUESTS)
    played(CassetteEngine(path, Moody(), mode="record"), REQUESTS[:1])
    assert len(path.read_bytes().splitlines()) == 1


def test_a_strict_replay_says_which_request_is_missing(tmp_path):
    path = tmp_path / "tape.jsonl"
    played(CassetteEngine(path, Moody()), REQUESTS[:2])
    with (
        SharedLLMInferenceManager(CassetteEngine(path, mode="replay")) as llm,
        pytest.raises(InferenceError, match=r"none to request env 4 \(seed 4.*ends in 'State 2'"),
    ):
        llm.generate(REQUESTS[4])


@pytest.mark.parametrize(
    "change",
    [{"seed": 9}, {"temperature": 0.1}, {"max_tokens": 9}, {"prefill": "<think>"}, {"text": "!"}],
    ids=str,
)
def test_every_part_of_the_content_counts(tmp_path, change):
    path = tmp_path / "tape.jsonl"
    played(CassetteEngine(path, Moody()), [ask()])
    with (
        SharedLLMInferenceManager(CassetteEngine(path, mode="replay")) as llm,
        pytest.raises(InferenceError, match="has 1 answers, but none"),
    ):
        llm.generate(ask(**change))


def test_a_torn_last_line_was_never_written_and_is_recorded_again(tmp_path):
    path = tmp_path / "tape.jsonl"
    recorded = played(CassetteEngine(path, ScriptedEngine()))
    path.write_bytes(path.read_bytes()[:-9])
    again = played(CassetteEngine(path, ScriptedEngine()))
    assert again == recorded
    assert played(CassetteEngine(path, mode="replay")) == recorded


def test_a_damaged_line_is_refused_and_named(tmp_path):
    path = tmp_path / "tape.jsonl"
    played(CassetteEngine(path, ScriptedEngine()))
    path.write_bytes(path.read_bytes().replace(b"State 1", b"State 7", 1))
    with pytest.raises(ConfigError, match=r"tape\.jsonl, line \d is damaged"):
        played(CassetteEngine(path, mode="replay"))


def test_a_cassette_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        played(CassetteEngine(tmp_path / "none", mode="replay"))


def test_a_configuration_names_the_cassette(tmp_path):
    path = str(tmp_path / "tape.jsonl")
    block = {"engine": "scripted", "cassette": path}
    with SharedLLMInferenceManager.from_config({"llm": block}) as llm:
        recorded = llm.generate(ask())
    block = {"engine": "cassette", "cassette": path}
    with SharedLLMInferenceManager.from_config({"llm": block}) as llm:
        assert llm.is_deterministic
        assert without_times(llm.generate(ask())) == without_times(recorded)
