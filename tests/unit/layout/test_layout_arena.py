"""Text and sequences: decoded anew each time, spilled when they are too large for their cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, OneOf, Sequence, Text, Tuple

from envfleet.errors import LayoutMismatch
from envfleet.layout import SEQUENCE_CELL_BYTES, TEXT_CELL_MAX_BYTES, Columns, plan_layout


def bind(space: Any, rows: int = 2) -> Columns:
    layout = plan_layout(space, "observation")
    return layout.bind(bytearray(layout.nbytes(rows)), 0, rows)


def test_text_is_decoded_anew_each_time() -> None:
    columns = bind(Text(8))
    write = columns.writer(0)
    seen = []
    for text in ("00000000", "first", "", "2nd", "longest8"):
        write(text)
        seen.append(columns.read(0))
    assert seen == ["00000000", "first", "", "2nd", "longest8"]
    assert columns.read(1) == ""


def test_a_text_that_is_too_long_spills_and_the_next_one_does_not() -> None:
    columns = bind(Dict(a=Text(4), b=Text(4), n=Discrete(3)))
    write = columns.writer(1)
    long = "x" * 100
    assert write({"a": "ok", "b": long, "n": 2}) == {1: long}
    assert columns.read(1, {1: long}) == {"a": "ok", "b": long, "n": 2}
    assert write({"a": "ok", "b": "back", "n": 2}) is None
    assert columns.read(1)["b"] == "back"


@pytest.mark.parametrize("space", [Text(4), Graph(Box(0, 1, (2,)), None), OneOf([Text(4)])])
def test_a_spilled_cell_read_without_its_spill_raises(space: Any) -> None:
    columns = bind(Tuple((Discrete(3), space)))
    spill = columns.writer(0)((1, "x" * 100))
    assert columns.read(0, spill) == (1, "x" * 100)
    for wrong in (None, {}, {0: 1}):
        with pytest.raises(
            LayoutMismatch, match=r"^observation\[1\] should be read with what spil"
        ):
            columns.read(0, wrong)
    assert spill is not None
    for read in (columns.read_each, columns.read_batch):
        with pytest.raises(LayoutMismatch, match="read with what spilled"):
            read(slice(0, 1))
        with pytest.raises(LayoutMismatch, match="read with what spilled"):
            read(slice(0, 1), {1: spill})


def test_an_unwritten_spill_leaf_raises_and_an_unwritten_cell_is_empty() -> None:
    with pytest.raises(LayoutMismatch, match="written before it is read"):
        bind(OneOf([Discrete(2)])).read(0, {0: 1})
    assert bind(Text(4, min_length=2)).read(0) == ""
    assert bind(Sequence(Discrete(2))).read(0) == ()
    assert bind(Sequence(Box(0, 1, (3,)), stack=True)).read(0).shape == (0, 3)


def test_spills_of_a_batch_are_keyed_by_position() -> None:
    columns = bind(Dict(a=Text(4), g=OneOf([Discrete(2)])), rows=9)
    rows = np.array([8, 3])
    spills = columns.write_batch(rows, {"a": ("ok", "x" * 9), "g": ((0, 1), (0, 0))})
    assert spills == {0: {1: (0, 1)}, 1: {0: "x" * 9, 1: (0, 0)}}
    assert columns.read_each(rows, spills) == [
        {"a": "ok", "g": (0, 1)},
        {"a": "x" * 9, "g": (0, 0)},
    ]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (Sequence(Discrete(9)), (np.int64(1), np.int64(2))),
        (Sequence(Text(5)), ("", "a", "longer than the space allows")),
        (Sequence(Sequence(Text(5))), ((), ("a",), ("b", ""))),
        (Sequence(Tuple((Discrete(2), Text(3)))), ((np.int64(1), "x"), (np.int64(0), "y"))),
        (Sequence(Text(5), stack=True), ("a", "b")),
        (Sequence(Dict(t=Text(5), n=Sequence(Discrete(3)))), ({"t": "a", "n": ()},)),
        (Sequence(Discrete(3)), ()),
    ],
)
def test_sequences_round_trip(space: Any, value: Any) -> None:
    columns = bind(space)
    assert columns.writer(1)(value) is None
    assert columns.read(1) == value
    assert columns.write_batch(slice(0, 2), (value, value[:0])) is None
    assert columns.read_batch(slice(0, 2)) == (value, value[:0])


def test_items_of_a_sequence_keep_their_form() -> None:
    columns = bind(Sequence(Box(-1, 1, ())))
    columns.writer(0)((np.array(0.5, np.float32), 0.25))
    assert columns.read(0) == (np.float32(0.5), np.float32(0.25))
    stacked = bind(Sequence(Dict(p=Box(-1, 1, (2,)), t=Text(3)), stack=True))
    stacked.writer(0)({"p": np.ones((3, 2)), "t": ("a", "b", "c")})
    value = stacked.read(0)
    assert (value["p"].dtype, value["p"].shape, value["t"]) == (np.float32, (3, 2), ("a", "b", "c"))
    value["p"][:] = 0
    assert stacked.read(0)["p"].all()
    stacked.writer(0)({"p": np.ones((0, 2), np.float32), "t": ()})
    assert stacked.read(0)["p"].shape == (0, 2)


def test_a_sequence_that_is_too_large_spills_as_a_copy() -> None:
    columns = bind(Sequence(Box(0, 255, (1000,), np.uint8)))
    small = (np.ones(1000, np.uint8),) * (SEQUENCE_CELL_BYTES // 1000 - 1)
    large = tuple(np.ones(1000, np.uint8) for _ in range(SEQUENCE_CELL_BYTES // 1000 + 1))
    assert columns.writer(0)(small) is None
    assert len(columns.read(0)) == len(small)
    spill = columns.writer(0)(large)
    large[0][:] = 7
    assert len(columns.read(0, spill)) == len(large)
    assert columns.read(0, spill)[0].tolist() == [1] * 1000


def test_a_text_at_the_bound_fits_and_one_beyond_it_spills() -> None:
    columns = bind(Text(10**6))
    assert columns.writer(0)("x" * TEXT_CELL_MAX_BYTES) is None
    assert columns.read(0) == "x" * TEXT_CELL_MAX_BYTES
    spill = columns.writer(0)("x" * 10**6)
    assert columns.read(0, spill) == "x" * 10**6


@pytest.mark.parametrize(
    ("space", "value", "path"),
    [
        (Sequence(Box(0, 1, (2,))), (np.zeros(2), np.zeros(3)), "[1]"),
        (Sequence(Dict(a=Text(3))), ({"a": "x"}, {"a": 3}), "[1]['a']"),
        (Sequence(Dict(a=Text(3))), ({"a": "x"}, {}), "[1]"),
        (Sequence(Sequence(Discrete(3))), ((), (1, 0.5)), "[1][1]"),
        (Sequence(Text(3)), "abc", ""),
        (Sequence(Text(3)), np.array("abc"), ""),
        (Sequence(Box(0, 1, (2,)), stack=True), np.zeros((3, 1)), ""),
        (Sequence(Box(0, 1, (2,)), stack=True), 3, ""),
        (Sequence(Tuple((Discrete(3), Text(3))), stack=True), ([1, 2], ("a",)), "[1]"),
        (Sequence(Tuple((Text(3), Discrete(3))), stack=True), (("a", 5), [1, 2]), "[0][1]"),
    ],
)
def test_errors_in_a_sequence_name_the_item(space: Any, value: Any, path: str) -> None:
    columns = bind(Dict(s=space))
    with pytest.raises(LayoutMismatch) as caught:
        columns.writer(0)({"s": value})
    assert caught.value.path == "observation['s']" + path
