"""Options declared once: checked, described, read from text and from files."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from envfleet.cli.config_file import read_config
from envfleet.cli.flags import ELSEWHERE, add_flags, given_flags
from envfleet.cli.train_args import StartOptions
from envfleet.errors import ConfigError, MissingExtra, did_you_mean
from envfleet.learn.options import PPOOptions
from envfleet.learn.train import TrainOptions
from envfleet.options import (
    Count,
    CountOrZero,
    Positive,
    Seconds,
    Seed,
    Share,
    check,
    check_fields,
    docstrings,
    from_mapping,
    option_class,
    options_of,
    read,
)


@dataclass(frozen=True)
class Some:
    """Of every kind."""

    whole: int = 8
    """How many,
    at least."""
    number: float = 0.5
    is_on: bool = True
    name: str = "x"
    colour: Literal["red", "green"] = "red"
    """100% of it."""
    limit: float | None = None
    sizes: tuple[int, ...] = (64, 64)
    folder: Path | None = None
    more: dict[str, Any] = field(default_factory=dict)


OPTIONS = {option.name: option for option in options_of(Some)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "12", 12),
        ("whole", "1e6", 1_000_000),
        ("whole", "1_000", 1000),
        ("whole", "9007199254740993", 9007199254740993),
        ("number", "3e-4", 3e-4),
        ("name", "none", "none"),
        ("colour", "green", "green"),
        ("limit", "none", None),
        ("limit", "None", None),
        ("limit", "2", 2.0),
        ("sizes", "32, 32,", (32, 32)),
        ("sizes", "", ()),
        ("folder", "a/b", Path("a/b")),
        ("more", '{"size": 9}', {"size": 9}),
    ],
)
def test_text_is_read_by_the_field_s_type(name, text, value):
    found = read(text, OPTIONS[name].kind)

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("whole", 12, 12),
        ("whole", 1e6, 1_000_000),
        ("whole", 2**63 + 1, 2**63 + 1),
        ("number", 1, 1.0),
        ("number", "3e-4", 3e-4),
        ("is_on", False, False),
        ("limit", None, None),
        ("sizes", [32, 16], (32, 16)),
        ("sizes", 32, (32,)),
        ("more", {"size": 9}, {"size": 9}),
    ],
)
def test_what_a_file_holds_is_read_by_the_field_s_type(name, value, expected):
    found = read(value, OPTIONS[name].kind)

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("whole", "1.5", "must be a whole number, got 1.5"),
        ("whole", "many", "must be a whole number, got many"),
        ("whole", "inf", "must be a whole number, got inf"),
        ("whole", True, "must be a whole number, got True"),
        ("whole", None, "must be a whole number, got None"),
        ("whole", [1], r"must be a whole number, got \[1\]"),
        ("number", "nan", "must be a finite number, got nan"),
        ("number", False, "must be a finite number, got False"),
        ("is_on", "yes", "must be true or false, got yes"),
        ("is_on", 1, "must be true or false, got 1"),
        ("name", 3, "must be text, got 3"),
        ("colour", "blue", "must be one of red, green; got blue"),
        ("colour", None, "must be one of red, green; got None"),
        ("sizes", "64,x", "must be whole numbers with commas between, got 64,x"),
        ("sizes", {"a": 1}, "must be a list of whole numbers"),
        ("folder", 3, "must be a path, or None; got 3"),
        ("more", "[1]", "must be a JSON object"),
        ("more", "{", "must be a JSON object"),
        ("more", [1], "must be a mapping"),
    ],
)
def test_a_wrong_value_is_answered_by_what_it_must_be(name, wrong, said):
    with pytest.raises(ValueError, match=said):
        read(wrong, OPTIONS[name].kind)


def test_docstrings_below_fields_are_found():
    assert docstrings(Some) == {"whole": "How many, at least.", "colour": "100% of it."}


def test_a_class_without_source_has_no_docstrings():
    made = type("Made", (), {"__module__": "nowhere"})

    assert docstrings(made) == {}


@pytest.mark.parametrize("kind", [StartOptions, TrainOptions, PPOOptions])
def test_every_option_of_a_run_explains_itself(kind):
    assert {one.name for one in fields(kind)} == docstrings(kind).keys()


class TestFlags:
    @staticmethod
    def parser():
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_flags(parser, Some, without=frozenset({"number"}))
        return parser

    def test_what_was_not_typed_is_not_given(self):
        args = self.parser().parse_args(["--no-is-on", "--limit", "none", "--whole", "1e3"])

        assert given_flags(args, Some) == {"is_on": False, "limit": None, "whole": 1000}

    def test_what_was_left_out_is_no_flag(self):
        with pytest.raises(SystemExit):
            self.parser().parse_args(["--number", "1"])

    def test_help_has_docstring_and_default(self):
        text = " ".join(self.parser().format_help().split())

        assert "--whole N how many, at least (default: 8)" in text
        assert "--colour red|green 100% of it (default: red)" in text
        assert "--is-on, --no-is-on (default: yes)" in text
        assert "--limit X (default: none)" in text
        assert "--sizes N,N (default: 64,64)" in text
        assert "--more JSON (default: {})" in text

    def test_a_wrong_value_names_its_flag(self):
        with pytest.raises(argparse.ArgumentError, match="argument --whole: must be a whole"):
            self.parser().parse_args(["--whole", "x"])


class TestConfig:
    @pytest.fixture
    def read(self, tmp_path):
        def read(text):
            path = tmp_path / "run.yaml"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            return read_config(path, Some, StartOptions)

        return read

    def test_holds_options_of_all_classes(self, read):
        assert read("whole: 1e3  # many\nis-on: false\nlimit: null\nrecipe: false\n") == {
            "whole": 1000,
            "is_on": False,
            "limit": None,
            "recipe": False,
        }

    @pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
    def test_may_hold_nothing(self, read, text):
        assert read(text) == {}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("whole: many", "run.yaml: whole must be a whole number, got many"),
            ("numbr: 1", r"run.yaml: there is no option 'numbr'; did you mean number\?"),
            ("Is-Onn: true", r"there is no option 'Is-Onn'; did you mean is_on\?"),
            ("qqqqq: 1", "there is no option 'qqqqq'; `envfleet train --help` lists them all"),
            ("7: 1", "there is no option '7'"),
            ("[1, 2]: 1", r"there is no option '\[1, 2\]'"),
            ("whole: 1\nwhole: 2", "run.yaml sets whole twice"),
            ("is-on: true\nis_on: false", "run.yaml sets is_on twice"),
            ("- whole", "run.yaml must hold options with their values, .* but holds a list"),
            ("whole", "run.yaml must hold options with their values, .* a single value"),
            ("whole: 1\n  x: : 2", r"run.yaml is not YAML \(line 2\): mapping values"),
            ("whole: !!python/object:os.system 1", "run.yaml is not YAML .*constructor"),
            ("whole: 2026-99-99", "run.yaml is not YAML: month must be"),
            (b"\xff\xfe\x00\xd8", "run.yaml cannot be read: it is not text"),
            ("whole: 1\n---\nwhole: 2", "run.yaml is not YAML .*single document|another document"),
        ],
    )
    def test_is_answered_in_one_sentence_when_wrong(self, read, text, said):
        with pytest.raises(ConfigError, match=said) as caught:
            read(text)

        assert "\n" not in str(caught.value)

    def test_that_cannot_be_read(self, tmp_path):
        with pytest.raises(ConfigError, match=r"gone.yaml cannot be read: No such file"):
            read_config(tmp_path / "gone.yaml", Some)
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            read_config(tmp_path, Some)

    def test_needs_its_package(self, read, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "yaml", None)

        with pytest.raises(MissingExtra, match=r"pip install 'envfleet\[train\]'"):
            read("whole: 1")


@pytest.mark.parametrize("name", ["lr", "total-timesteps", "normalize_obs"])
def test_names_that_people_know_from_elsewhere_are_answered_with_ours(name, tmp_path):
    (tmp_path / "run.yaml").write_text(f"{name}: 1")
    meant = ELSEWHERE[name.replace("-", "_")]
    with pytest.raises(ConfigError, match=rf"'{name}'; did you mean {meant}\?"):
        read_config(tmp_path / "run.yaml", TrainOptions, PPOOptions)


def test_what_is_meant_by_a_name_from_elsewhere_is_an_option():
    ours = {option.name for kind in (TrainOptions, PPOOptions) for option in options_of(kind)}
    assert set(ELSEWHERE.values()) <= ours
    assert not ELSEWHERE.keys() & ours


def test_a_whole_number_of_hundreds_of_digits_is_read(tmp_path):
    (tmp_path / "run.yaml").write_text(f"n_envs: {'9' * 400}")
    assert read_config(tmp_path / "run.yaml", TrainOptions)["n_envs"] == int("9" * 400)
    (tmp_path / "run.yaml").write_text(f"log_std: {'9' * 400}")
    with pytest.raises(ConfigError, match="log_std must be a finite number"):
        read_config(tmp_path / "run.yaml", PPOOptions)


def test_only_what_is_near_is_named():
    assert did_you_mean("--n-env", ["--n-envs", "--seed"]) == "; did you mean --n-envs?"
    assert did_you_mean("--qqq", ["--n-envs", "--seed"]) == ""


@option_class
@dataclass(frozen=True, slots=True)
class Checked:
    """Checked when it is made."""

    name: str
    count: Count = 1
    restarts: CountOrZero = 0
    limit_s: Seconds | None = None
    share: Share = 0.5
    rate: Positive = 1.0
    seed: Seed = 0
    way: Literal["up", "down"] | None = "up"
    sizes: tuple[Count, ...] = (64,)
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count * self.share > 5:  # the values are checked before this
            raise ConfigError("count and share are too large together")


class TestOptionClass:
    @pytest.mark.parametrize(
        "values",
        [
            {"count": np.int64(3)},
            {"limit_s": 1},
            {"limit_s": np.float32(0.5)},
            {"limit_s": float("inf")},
            {"share": 0},
            {"way": None},
            {"sizes": ()},
            {"more": {"a": None}},
        ],
        ids=str,
    )
    def test_takes_what_fits(self, values):
        made = Checked("x", **values)
        assert {name: getattr(made, name) for name in values} == values

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"name": 3}, "name must be text, got 3"),
            ({"count": 0}, "count must be a whole number of at least 1, got 0"),
            ({"count": True}, "count must be a whole number of at least 1, got True"),
            ({"count": "2"}, "count must be a whole number of at least 1, got '2'"),
            ({"restarts": -1}, "restarts must be a whole number, 0 or more, got -1"),
            ({"limit_s": 0}, "limit_s must be positive seconds, or None to wait for ever; got 0"),
            ({"limit_s": "1"}, "limit_s must be positive seconds, or None to wait for ever"),
            ({"limit_s": float("nan")}, "limit_s must be positive seconds, or None"),
            ({"share": 1.01}, "share must be a number from 0 to 1, got 1.01"),
            ({"rate": float("inf")}, "rate must be a finite number above 0, got inf"),
            ({"seed": 2**63}, r"seed must be a whole number from 0 to 2\*\*63 - 1, got 92"),
            ({"way": "left"}, "way must be one of 'up', 'down', or None; got 'left'"),
            ({"way": []}, "way must be one of"),
            ({"sizes": [64, 0]}, r"sizes must be a list of whole numbers of at least 1, got \[64,"),
            ({"sizes": 64}, "sizes must be a list of whole numbers of at least 1, got 64"),
            ({"more": [1]}, r"more must be a mapping, got \[1\]"),
            ({"cuont": 1}, r"Checked has no option 'cuont'; did you mean count\?"),
            ({"zzz": 1}, "Checked has no option 'zzz'; it has name, count, "),
            ({"count": 20}, "count and share are too large together"),
        ],
        ids=str,
    )
    def test_refuses_what_does_not(self, values, text):
        with pytest.raises(ConfigError, match=text):
            Checked(**{"name": "x", **values})

    def test_checks_what_has_no_name_at_the_call(self):
        assert Checked("x", 3).count == 3
        with pytest.raises(ConfigError, match="count must be"):
            Checked("x", 0)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            Checked()  # type: ignore[call-arg]

    def test_makes_a_tuple_of_a_list(self):
        assert Checked("x", sizes=[1, 2]) == Checked("x", sizes=(1, 2))  # type: ignore[arg-type]

    def test_of_a_mapping_names_the_path(self):
        assert from_mapping(Checked, {"name": "x", "count": 2}, "run") == Checked("x", 2)
        with pytest.raises(ConfigError, match=r"run\.count must be a whole number"):
            from_mapping(Checked, {"name": "x", "count": 0}, "run")
        with pytest.raises(ConfigError, match="run has no option 'nam'; did you mean name"):
            from_mapping(Checked, {"nam": "x"}, "run")

    def test_flags_and_files_know_the_bounds(self):
        options = {option.name: option for option in options_of(Checked)}
        assert read("1e3", options["count"].kind) == 1000
        assert read("none", options["limit_s"].kind) is None
        with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
            read("0", options["count"].kind)


def test_fields_are_checked_unless_they_are_the_default():
    @dataclass
    class Loose:
        count: Count = None  # type: ignore[assignment]
        name: str = "x"

    check_fields(Loose())
    with pytest.raises(ConfigError, match="name must be text, got 3"):
        check_fields(Loose(name=3))  # type: ignore[arg-type]


def test_a_checked_value_is_returned():
    assert check("backend", "serial", Literal["auto", "serial"]) == "serial"
