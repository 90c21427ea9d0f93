"""Questions from files, folders and lists: what is read, what is refused, and where it stays."""

import gzip
import json
import os
import pickle
import sys
import types
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from envfleet.errors import ConfigError, MissingExtra
from envfleet.llm.environments import questions, row_files
from envfleet.llm.environments.questions import (
    ListedQuestions,
    Question,
    answer_in,
    load_questions,
    question_of,
    rows_of_mode,
)
from envfleet.llm.environments.word_problems import WordProblems

ROWS = [*WordProblems(0, 150)]
EXPECTED = [Question(row["query"], row["response"].rpartition(": ")[2]) for row in ROWS]
DATA = Path(os.environ.get("ENVFLEET_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


@pytest.fixture(autouse=True)
def _nothing_loaded():
    questions._loaded.cache_clear()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def saved(folder, name, rows):
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines(rows).encode()))
    elif name.endswith(".jsonl"):
        path.write_text(lines(rows))
    else:
        path.write_text(json.dumps(rows, indent=1))
    return str(path)


FORMS = ("rows.json", "rows.jsonl", "rows.jsonl.gz")


class TestRows:
    @pytest.mark.parametrize(
        ("row", "answer"),
        [
            ({"query": "q", "response": "Two.\nThe answer is: 2"}, "2"),
            ({"query": "q", "response": "#### 3\nThe answer is: 2 \n"}, "2"),
            ({"query": "q", "response": "The answer is: 1\nor 2"}, "1\nor 2"),
            ({"query": "q", "response": "so it is\n#### 1,234"}, "1,234"),
            ({"question": "q", "answer": "4 + 5 = <<4+5=9>>9\n#### 9"}, "9"),
            ({"question": "q", "answer": "three quarters"}, "three quarters"),
            ({"question": "q", "answer": 7}, "7"),
            ({"question": "q", "answer": 0.5}, "0.5"),
            ({"query": "q", "response": "The answer is: 2", "answer": "two"}, "two"),
            ({"query": "q", "response": "no idea"}, None),
            ({"query": "q", "response": "The answer is: "}, None),
            ({"query": "q", "response": "The answer is 5"}, None),
            ({"query": "q", "response": None}, None),
            ({"query": None, "question": "q", "response": None, "answer": "#### 18"}, "18"),
            ({"query": "q", "question": None, "response": "#### 18", "answer": None}, "18"),
            ({"query": "q", "response": None, "answer": None}, None),
        ],
    )
    def test_answer_is_found(self, row, answer):
        assert question_of(row) == Question("q", answer)

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({}, "no field 'query' or 'question'; it has none"),
            ({"prompt": "q", "answer": "1"}, "no field 'query' or 'question'; it has 'prompt'"),
            ({"query": "q"}, "no field 'answer' or 'response'"),
            ({"query": None, "answer": "1"}, "field 'query' should be text, got a NoneType"),
            ({"query": 5, "response": ""}, "field 'query' should be text, got a int"),
            ({"query": "", "response": ""}, "field 'query' should be text, got ''"),
            ({"query": "q", "response": ["a"]}, "field 'response' should be text, got a list"),
            ({"query": "q", "answer": True}, "field 'answer' should be text, got a bool"),
            ({"query": "q", "answer": 10**5000}, "field 'answer' should be text, got a int"),
        ],
    )
    def test_what_is_wrong_is_named(self, row, said):
        with pytest.raises(ConfigError, match=said):
            question_of(row)

    def test_only_an_answer_of_its_own_field_stands_alone(self):
        assert answer_in("5") is None
        assert answer_in("5", is_bare=True) == "5"


class TestFiles:
    @pytest.mark.parametrize("name", FORMS)
    def test_every_form_holds_the_same_questions(self, name, tmp_path):
        found = load_questions(saved(tmp_path, name, ROWS))
        assert [found[index] for index in range(len(found))] == EXPECTED
        assert found[-1] == EXPECTED[-1]
        with pytest.raises(IndexError):
            found[len(EXPECTED)]

    @pytest.mark.parametrize("name", FORMS)
    def test_rows_without_an_answer_are_kept_and_counted(self, name, tmp_path):
        rows = [*ROWS, {"query": "Why?", "response": "Because."}]
        found = load_questions(saved(tmp_path, name, rows))
        assert found.num_without_answer == 1
        assert found[150] == Question("Why?", None)

    @pytest.mark.parametrize("name", FORMS)
    def test_text_of_any_script_and_brackets_in_text(self, name, tmp_path):
        queries = ['}]"[{\\', "\u0660 €\u2028 \U0001d7d9", 'a\\"b', "[1, {2}]", "\n\r\nx"]
        rows = [{"query": one, "answer": "1", "more": {"a": [{}]}} for one in queries]
        found = load_questions(saved(tmp_path, name, rows))
        assert [found[index].query for index in range(len(found))] == queries
        plain = tmp_path / "unescaped.json"
        plain.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        found = load_questions(str(plain))
        assert [found[index].query for index in range(len(found))] == queries

    def test_empty_lines_and_other_line_ends_do_not_count(self, tmp_path):
        path = tmp_path / "a.jsonl"
        text = lines(ROWS[:3]).replace("\n", "\r\n\r\n\n")
        path.write_bytes(text.rstrip().encode())
        found = load_questions(str(path))
        assert [found[index] for index in range(3)] == EXPECTED[:3]
        assert len(found) == 3

    @pytest.mark.parametrize("blank", ["   ", "\t", " \r", "\x0b\x0c ", "\r"])
    def test_lines_that_look_empty_do_not_count(self, blank, tmp_path):
        path = tmp_path / "a.jsonl"
        first, second = (f"{json.dumps(row)}\n" for row in ROWS[:2])
        path.write_text(f"{blank}\n{first}{blank}\n  {second}{blank}")
        found = load_questions(str(path))
        assert [found[index] for index in range(len(found))] == EXPECTED[:2]

    def test_lines_in_a_file_named_json(self, tmp_path):
        path = tmp_path / "a.json"
        path.write_text(lines(ROWS))
        assert load_questions(str(path))[7] == EXPECTED[7]

    def test_a_line_may_lie_across_what_is_scanned_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setattr(row_files, "SCAN_BYTES", 97)
        found = load_questions(saved(tmp_path, "a.jsonl", ROWS))
        assert [found[index] for index in range(len(found))] == EXPECTED

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("a.jsonl", "", "holds no rows"),
            ("a.json", "", "holds no rows"),
            ("a.json", "[]", "holds no rows"),
            ("a.json", "3", "line 1: a list of rows should begin with"),
            ("a.json", '[{"query": "q"', "no complete JSON list"),
            ("a.txt", "x", "none of .json, .jsonl, .jsonl.gz, .parquet"),
            ("a.jsonl.gz", "x", "no complete gzip file"),
        ],
    )
    def test_a_file_that_cannot_be_is_named(self, name, text, said, tmp_path):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            load_questions(str(path))
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("name", FORMS)
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ('{"query": "q",,}', "no JSON object"),
            ('["q", "a"]', "no JSON object but a list"),
            ('{"query": "q", "text": "a"}', "no field 'answer' or 'response'"),
            ('{"query": ["q"], "answer": "a"}', "field 'query' should be text"),
        ],
    )
    def test_a_wrong_row_is_named_by_file_and_line(self, name, wrong, said, tmp_path):
        good = json.dumps(ROWS[0])
        path = tmp_path / name
        if name.endswith(".json"):
            path.write_text(f"[{good},\n{wrong},\n{good}]")
        else:
            data = f"{good}\n{wrong}\n{good}\n".encode()
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        found = load_questions(str(path))
        assert found[0] == found[2] == EXPECTED[0]
        with pytest.raises(ConfigError, match=said) as caught:
            found[1]
        assert f"{path}, line 2" in str(caught.value)

    def test_a_cut_gzip_file_is_named(self, tmp_path):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(lines(ROWS).encode())[:-200])
        with pytest.raises(ConfigError, match="no complete gzip file"):
            load_questions(str(path))

    def test_a_file_that_has_changed_is_an_error(self, tmp_path):
        path = saved(tmp_path, "a.jsonl", ROWS)
        found = load_questions(path)
        saved(tmp_path, "a.jsonl", ROWS[::-1])
        os.utime(path, (1, 1))
        with pytest.raises(ConfigError, match="has changed since"):
            found[0]

    def test_is_loaded_once_and_holds_places_only(self, tmp_path):
        path = saved(tmp_path, "a.jsonl", ROWS)
        found = load_questions(path)
        assert load_questions(path) is found
        assert len(pickle.dumps(found)) < 16 * len(ROWS) + 1000


class TestElsewhere:
    def test_a_list_is_shared_by_its_copies(self):
        rows = ListedQuestions(ROWS)
        assert deepcopy(rows) is rows
        assert load_questions(rows)[3] == EXPECTED[3]

    @pytest.mark.parametrize(
        ("rows", "said"),
        [([], "the list holds no rows"), ([ROWS[0], "q"], "row 1 of the list is a str")],
    )
    def test_a_wrong_list_is_named(self, rows, said):
        with pytest.raises(ConfigError, match=said):
            load_questions(ListedQuestions(rows))[1]

    @pytest.mark.parametrize("name", ["no.jsonl", "./no", "no such/file", "/no/where"])
    def test_a_missing_file_is_named(self, name):
        with pytest.raises(ConfigError, match=f"there is no file {name}"):
            load_questions(name)

    @pytest.mark.parametrize("name", ["meta-math/MetaMathQA", "a folder"])
    def test_datasets_is_asked_for_where_it_is_needed(self, name, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        place = str(tmp_path) if name == "a folder" else name
        with pytest.raises(MissingExtra, match="pip install datasets"):
            load_questions(place)

    def test_a_broken_folder_is_named(self, tmp_path, monkeypatch):
        def load_from_disk(path):
            raise KeyError("_data_files")

        fake = types.SimpleNamespace(load_from_disk=load_from_disk)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        said = f"{tmp_path} is no folder made by save_to_disk: '_data_files'"
        with pytest.raises(ConfigError, match=said):
            load_questions(str(tmp_path))

    def test_parquet_asks_for_pyarrow(self, tmp_path, monkeypatch):
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MissingExtra, match=r"pip install 'envfleet\[parquet\]'"):
            load_questions(str(tmp_path / "a.parquet"))

    def test_what_datasets_is_asked(self, tmp_path, monkeypatch):
        """By a stand-in: which calls are made, and what is done with their answers."""
        asked: list[object] = []

        def load_from_disk(path):
            asked.append(path)
            return {"train": ROWS, "test": ROWS[:5]}

        def load_dataset(name, split, cache_dir):
            asked.append((name, split, cache_dir))
            return ROWS

        stand_in = types.SimpleNamespace(load_from_disk=load_from_disk, load_dataset=load_dataset)
        monkeypatch.setitem(sys.modules, "datasets", stand_in)
        assert len(load_questions(str(tmp_path), split="test")) == 5
        assert load_questions("some/where", cache_dir="kept")[1] == EXPECTED[1]
        assert asked == [str(tmp_path), ("some/where", "train", "kept")]
        with pytest.raises(ConfigError, match="has no split 'val'; it has train, test"):
            load_questions(str(tmp_path), split="val")

    @pytest.mark.parametrize(
        "error", [ConnectionError("no way there"), ValueError("no such split"), RuntimeError("no")]
    )
    def test_a_hub_that_does_not_give_it_is_named(self, error, monkeypatch):
        def load_dataset(name, split, cache_dir):
            raise error

        monkeypatch.setitem(
            sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset)
        )
        said = f"no file no/where, and the hub did not give its split 'train': {error}"
        with pytest.raises(ConfigError, match=said):
            load_questions("no/where")


class TestWithTheRealPackages:
    def test_parquet(self, tmp_path):
        import pyarrow as arrow
        from pyarrow import parquet

        path = tmp_path / "a.parquet"
        parquet.write_table(arrow.Table.from_pylist(ROWS), path)
        found = load_questions(str(path))
        assert [found[index] for index in range(len(found))] == EXPECTED
        assert found.num_without_answer == 0
        (tmp_path / "b.parquet").write_bytes(b"no such thing")
        with pytest.raises(ConfigError, match="cannot be read as a Parquet file"):
            load_questions(str(tmp_path / "b.parquet"))

    @pytest.mark.leaves_thread("tqdm, which datasets uses, keeps a thread of its own")
    def test_a_folder_made_by_save_to_disk(self, tmp_path):
        import datasets

        whole = datasets.Dataset.from_list(ROWS)
        whole.save_to_disk(str(tmp_path / "whole"))
        datasets.DatasetDict(train=whole).save_to_disk(str(tmp_path / "parts"))
        for name in ("whole", "parts"):
            found = load_questions(str(tmp_path / name))
            assert [found[index] for index in range(len(found))] == EXPECTED
            assert found.num_without_answer == 0
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="no folder made by save_to_disk"):
            load_questions(str(tmp_path / "empty"))

    @pytest.mark.skipif(not (DATA / "gsm8k").exists(), reason="GSM8K is not there")
    def test_gsm8k(self):
        found = load_questions(str(DATA / "gsm8k" / "test.jsonl"))
        assert len(found) == 1319
        assert found.num_without_answer == 0
        assert found[0].query.startswith("Janet")
        assert found[0].answer == "18"
        assert all("#" not in str(found[index].answer) for index in range(len(found)))


class TestModes:
    def test_every_mode_draws_from_all_rows(self):
        assert {rows_of_mode(mode, 9, None) for mode in ("train", "val", "test")} == {range(9)}

    @pytest.mark.parametrize("num_rows", [1, 3, 10, 1319, 395_000])
    @pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5)])
    def test_shares_are_disjoint_and_all(self, num_rows, fractions):
        parts = [rows_of_mode(mode, num_rows, fractions) for mode in ("train", "val", "test")]
        joined = np.concatenate([np.asarray(part, int) for part in parts])
        assert np.array_equal(joined, np.arange(num_rows))
        assert all(
            abs(len(part) - share * num_rows) <= 1
            for part, share in zip(parts, fractions, strict=True)
        )
