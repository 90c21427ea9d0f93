"""What C does to rows is what Python does, whatever environments return."""

import contextlib
import gc
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.engine import rows, rows_python
from envfleet.engine.backends.process import main
from envfleet.engine.fleet import Fleet
from envfleet.engine.host import SlotState
from envfleet.engine.options import Autoreset, ResetPlan
from envfleet.engine.snapshot import Replay
from envfleet.errors import EnvfleetError
from envfleet.testing.conformance import Subject, check_streams

SHAPE = (3,)
SHAPES = [(3,), (2, 2), (0,)]
untyped: Any = rows
"""For calls that types forbid."""


IN_BOTH = {name: getattr(rows, name) for name in rows.__all__ if hasattr(rows_python, name)}


def in_python(patch):
    """Make new fleets, and workers forked from here, do without C."""
    for module in list(sys.modules.values()):
        if module.__name__.startswith("envfleet."):
            for name, function in IN_BOTH.items():
                if vars(module).get(name) is function:
                    patch.setattr(module, name, getattr(rows_python, name))


def test_it_is_compiled_where_it_can_be():
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    can_be = headers.exists() and shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    is_wanted = not os.environ.get(rows.NO_C_VARIABLE)
    assert rows.IS_COMPILED is bool(can_be and is_wanted), (
        "install the package again: its C part is missing"
    )


class Scripted(gymnasium.Env):
    """Returns, or raises, one thing after another."""

    observation_space = gymnasium.spaces.Box(-10, 10, SHAPE, np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, script):
        self.script = script

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(SHAPE, np.float32), {}

    def step(self, action):
        what = self.script[self.at % len(self.script)]
        self.at += 1
        if isinstance(what, BaseException):
            raise type(what)(*what.args)  # a new one: one that is raised again tells all its past
        return what() if callable(what) else what


class Odd:
    """A number that numpy does not take for one, as a tensor with a gradient."""

    def __float__(self):
        return 2.5

    def __len__(self):
        return 3


plain_obs = st.integers(-9, 9).map(lambda n: np.full(SHAPE, n, np.float32))
odd_obs = st.sampled_from(
    [
        np.ones(SHAPE, np.float64),
        np.ones((4,), np.float32),
        np.ones((6,), np.float32)[::2],
        np.ones(SHAPE, np.float32).astype(">f4"),
        np.ones((3, 1), np.float32),
        np.ones(SHAPE, np.int32),
        [1.0, 2.0, 3.0],
        np.ma.masked_array(np.ones(SHAPE, np.float32)),
        None,
    ]
)
rewards = st.one_of(
    st.floats(-5, 5),
    st.sampled_from([1, True, np.float32(0.5), np.float64(2), np.array([3.0]), None, "1", 10**400]),
    st.just(Odd()),
)
flags = st.sampled_from([False, True, np.False_, np.True_, 0, 1])
infos = st.sampled_from(
    [
        {},
        {},
        {"a": 1},
        {"a": "text"},
        {"a": 1.5},
        {"a": -2.5},
        {"a": np.float64(3.5)},
        {"b": 0.25, "a": np.float64(4.5)},
        {"b": 0.5, "a": np.float64("nan")},
        {"a": 5.5, "b": 0.75},
        {"a": np.float32(6.5)},
        None,
        3,
    ]
)
fives = st.tuples(st.one_of(plain_obs, plain_obs, odd_obs), rewards, flags, flags, infos)
answers = st.one_of(
    fives,
    fives,
    fives,
    fives.map(list),
    st.sampled_from([None, (), (1, 2, 3, 4), ValueError("no"), KeyError("nor this")]),
)


def told(script, *, autoreset):
    """What a fleet in this process tells of three environments with these scripts."""
    fleet = Fleet(
        [partial(Scripted, part) for part in script],
        backend="serial",
        autoreset=autoreset,
        on_failure="restart",
    )
    story: list[Any] = []
    try:
        fleet.reset([ResetPlan(seed) for seed in range(3)])
        for _ in range(6):
            try:
                batch = fleet.step(np.zeros(3, np.int64))
            except EnvfleetError as exc:
                story.append(str(exc).partition("\n")[0])
                break
            story.append(
                (
                    batch.obs.tolist(),
                    batch.rewards.tolist(),
                    batch.terminated.tolist(),
                    batch.truncated.tolist(),
                    batch.valid.tolist(),
                    batch.has_events,
                    batch.final_obs.tolist(),
                    repr([{**info, "incident": None} for info in batch.each_info]),
                    [incident.reason for incident in batch.incidents],
                )
            )
    finally:
        fleet.close()
    return story


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@given(script=st.lists(st.lists(answers, min_size=1, max_size=4), min_size=3, max_size=3))
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_whatever_an_environment_returns_both_tell_the_same(autoreset, script):
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        expected = told(script, autoreset=autoreset)
    assert told(script, autoreset=autoreset) == expected


bits = st.lists(st.booleans(), min_size=5, max_size=5).map(lambda row: np.array(row, np.bool_))


@given(given_flags=st.tuples(bits, bits, bits), first=st.integers(0, 5), count=st.integers(0, 5))
def test_rows_are_copied_alike(given_flags, first, count):
    obs = np.arange(10, dtype=np.float32).reshape(5, 2)
    control = np.array(given_flags), np.arange(5.0)
    end = min(5, first + count)
    for source in (obs, None):
        got = rows.copy_rows(source, control[1], control[0], first, end)
        expected = rows_python.copy_rows(source, control[1], control[0], first, end)
        for one, other in zip(got, expected, strict=True):
            assert np.array_equal(one, other)
            assert np.asarray(one).dtype == np.asarray(other).dtype
    copied = rows.copy_rows(obs, control[1], control[0], first, end)
    before = [np.copy(part) for part in copied[:5]]
    obs[:], control[1][:], control[0][:] = -1, -1, ~control[0]
    assert all(np.array_equal(one, other) for one, other in zip(copied, before, strict=False))


@given(
    terminated=bits, truncated=bits, first=st.integers(0, 3), shape=st.sampled_from([(), *SHAPES])
)
def test_the_rows_of_ends_are_taken_alike(terminated, truncated, first, shape):
    finals = np.arange(8 * math.prod(shape), dtype=np.float32).reshape(8, *shape)
    told = [form.take_ended(finals, terminated, truncated, first) for form in (rows, rows_python)]
    for ended, positions, taken in told:
        assert ended.tolist() == (terminated | truncated).tolist()
        assert positions == np.flatnonzero(ended).tolist()
        assert [one.tolist() for one in taken] == [finals[first + i].tolist() for i in positions]
        assert all(one.dtype == finals.dtype and one.flags.owndata for one in taken)


@pytest.mark.parametrize("form", [rows, rows_python])
def test_the_records_of_ends_are_copies(form):
    finals = np.array([(1, [2.0, 3.0]), (4, [5.0, 6.0])], [("turn", "i8"), ("reward", "f8", 2)])
    is_ended = np.array([False, True])
    _, positions, [record] = form.take_ended(finals, is_ended, ~is_ended & False, 0)
    finals["turn"], finals["reward"] = 0, 0
    assert (positions, type(record)) == ([1], np.void)
    assert (record["turn"], record["reward"].tolist()) == (4, [5.0, 6.0])


@pytest.mark.skipif(not rows.IS_COMPILED, reason="Python leaves infos to `take`")
@pytest.mark.parametrize(
    ("info", "is_put"),
    [
        ({"a": 1.5, "b": np.float64(2.5), "c": np.float32(3.5)}, True),
        ({"a": 1.5, "b": 2.5, "c": np.float32(3.5)}, False),
        ({"b": np.float64(2.5), "a": 1.5, "c": np.float32(3.5)}, False),
        ({"a": 1.5, "b": np.float64(2.5)}, False),
        ({"a": 1.5, "b": np.float64(2.5), "c": np.float32(3.5), "d": 1.0}, False),
        ({"a": 1, "b": np.float64(2.5), "c": np.float32(3.5)}, False),
        ([1.5, 2.5], False),
        (None, False),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        (("a", "b", "c"), (float, np.float64, np.float32), b"ddf", 7),
        (("a", "b", "c"), (float, np.float64, np.float32), b"dd", 7),
        (("a", "b", "c"), (float, np.float64, np.float32), b"dds", 7),
        (("a", "b", "c"), (float, np.float64, np.float32), b"ddf", 0),
        None,
        (1, 2, 3, 4),
        (),
    ],
)
def test_an_info_like_most_goes_straight_into_its_cell(info, is_put, form):
    taken: list[int] = []
    is_put = is_put and form is not None and form[2:] == (b"ddf", 7)
    obs = np.zeros(2)
    host_state = step(
        [line(1, lambda action: (obs.copy(), 0.5, False, False, info), obs=obs)],
        has_info=bytearray([0, 1]),
        form=[form],
        take=lambda row, result: taken.append(row),
    )
    assert taken == ([] if is_put else [1])
    if is_put:
        assert host_state.cells[0].tobytes() == bytes(32)
        assert host_state.cells[1].tobytes() == struct.pack("=ddf", 1.5, 2.5, 3.5).ljust(32, b"\0")
        assert host_state.schemas.tolist() == [0, 7]
        assert host_state.has_info == bytearray([0, 1])


@pytest.mark.skipif(not rows.IS_COMPILED, reason="Python leaves infos to `take`")
def test_an_empty_info_clears_the_one_before_it():
    obs = np.zeros(2)
    host_state = step(
        [line(1, lambda action: (obs.copy(), 0.5, False, False, {}), obs=obs)],
        has_info=bytearray([1, 1]),
        schemas=np.array([3, 3], np.uint16),
        take=lambda row, result: pytest.fail("nothing is left to do"),
    )
    assert host_state.schemas.tolist() == [3, 0]
    assert host_state.has_info == bytearray([1, 0])


@pytest.mark.skipif(not rows.IS_COMPILED, reason="Python leaves ends to `take`")
@pytest.mark.parametrize("info", [{}, {"a": 1.5}], ids=repr)
def test_an_ended_episode_is_kept_and_reset_in_one_call(info):
    obs, final, seen = np.zeros(2), np.zeros(2), list[str]()
    reused, had_info, info = np.zeros(2), bool(info), dict(info)

    def end(action):
        reused[:] = 7
        return reused, 0.5, True, False, info

    def reset():
        seen.append("reset")
        info["a"] = 9.5  # of the next episode, whatever it reuses
        reused[:] = 8
        return reused, {}

    host_state = step(
        [line(0, end, reset, obs=obs, final_obs=final)],
        autoreset=1,
        form=[(("a",), (float,), b"d", 4)],
        has_info=bytearray([1]),
        schemas=np.array([4], np.uint16),
        final_schemas=np.array([2], np.uint16),
        keep_start=lambda row: seen.append("keep"),
        take=lambda row, result: pytest.fail("nothing is left to do"),
        take_reset=lambda row, result: pytest.fail("nothing is left to do"),
    )
    assert seen == ["keep", "reset"]
    assert (obs.tolist(), final.tolist()) == ([8, 8], [7, 7])
    assert host_state.ends == [(0, True, False)]
    assert (host_state.invalid, host_state.states) == ([], bytearray(1))
    assert (host_state.schemas.tolist(), host_state.has_info) == ([0], bytearray(1))
    assert host_state.final_schemas.tolist() == [4 if had_info else 0]
    assert host_state.final_cells.tobytes() == (
        struct.pack("=d", 1.5).ljust(32, b"\0") if had_info else bytes(32)
    )
    assert host_state.status[1] == 8


@pytest.mark.skipif(not rows.IS_COMPILED, reason="Python leaves ends to `take`")
@pytest.mark.parametrize("changed", [{"has_plan": bytearray([1])}, {"form": [None]}], ids=str)
def test_an_end_with_a_planned_reset_or_an_unknown_info_is_left_to_python(changed):
    taken: list[int] = []
    obs, final = np.zeros(2), np.zeros(2)
    answer = (np.ones(2), 0.5, False, True, {"a": 1.5})
    host_state = step(
        [line(0, lambda action: answer, lambda: pytest.fail("reset"), obs=obs, final_obs=final)],
        autoreset=1,
        **{"form": [(("a",), (float,), b"d", 4)], **changed},
        take=lambda row, result: taken.append(row),
    )
    assert taken == [0]
    assert host_state.ends == []


NUMBERS: dict[str, Sequence[Any]] = {
    "d": [1.5, np.float64(-2.5), float("nan")],
    "f": [np.float32(0.1)],
    "e": [np.float16(0.1)],
    "?": [True, False, np.True_, np.False_],
    "q": [7, -(2**63), 2**63 - 1, np.int64(-3), np.longlong(4)],
    "Q": [np.uint64(2**64 - 1), np.ulonglong(5)],
    **{code: [np.dtype(code).type(100)] for code in "iIhHbB"},
}


@pytest.mark.parametrize(
    ("code", "number"), [(code, number) for code in NUMBERS for number in NUMBERS[code]]
)
def test_numbers_are_written_as_struct_writes_them(code, number):
    obs, info = np.zeros(2), {"first": True, "number": number}
    host_state = step(
        [line(0, lambda action: (obs.copy(), 0.5, False, False, info), obs=obs)],
        form=[(("first", "number"), (bool, type(number)), f"?{code}".encode(), 1)],
    )
    assert host_state.schemas.tolist() == [1]
    assert host_state.cells.tobytes() == struct.pack(f"=?{code}", True, number).ljust(32, b"\0")


@pytest.mark.parametrize(
    ("number", "codes"),
    [
        (2**63, b"q"),
        (-(2**63) - 1, b"q"),
        (np.int32(1), b"q"),
        (np.float64(1), b"f"),
        (1 + 2j, b"d"),
        (np.complex64(1), b"f"),
        ("1", b"b"),
        (np.ones(1), b"d"),
        (1.0, b"d" * 5),
    ],
)
def test_what_does_not_fit_its_code_or_its_cell_is_left_to_python(number, codes):
    taken: list[int] = []
    keys = tuple("abcde"[: len(codes)])
    obs, info = np.zeros(2), dict.fromkeys(keys, number)
    host_state = step(
        [line(0, lambda action: (obs.copy(), 0.5, False, False, info), obs=obs)],
        form=[(keys, (type(number),) * len(keys), codes, 1)],
        take=lambda row, result: taken.append(row),
    )
    assert (taken, host_state.schemas.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("values", "is_put"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3), True),
        (np.arange(6.0).reshape(2, 3), False),
        (np.arange(6, dtype=">f4").reshape(2, 3), False),
        (np.arange(6, dtype=np.float32).reshape(3, 2).T, True),  # column by column
        (np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T, False),
        (np.arange(12, dtype=np.float32).reshape(6, 2)[::2].T, False),
        (np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2], False),
        (np.arange(9, dtype=np.float32).reshape(3, 3), False),
        (np.arange(2, dtype=np.float32), False),
        (np.arange(6, dtype=np.float32).reshape(2, 3).tolist(), False),
        (np.ma.zeros((2, 3), np.float32), False),
        (None, False),
    ],
)
def test_a_batch_that_lies_as_rows_do_is_put_into_them_alike(values, is_put):
    for form in (untyped, rows_python):
        column = np.full((5, 3), 7, np.float32)
        assert form.put_rows(column, 1, 3, values) is is_put
        assert column[[0, 3, 4]].tolist() == [[7] * 3] * 3
        assert column[1:3].tolist() == (np.asarray(values).tolist() if is_put else [[7] * 3] * 2)


@given(
    count=st.integers(0, 9),
    width=st.integers(0, 11),
    before=st.integers(0, 2),
    dtype=st.sampled_from(["f4", "i4", "f8", "i8", "u1", "f2", "c16", "?"]),
)
def test_batches_that_lie_column_by_column_are_turned(count, width, before, dtype):
    values = np.arange(count * width).astype(dtype).reshape(width, count).T
    for form in (untyped, rows_python):
        column = np.zeros((count + 3, width), dtype)
        is_put = form.put_rows(column, before, before + count, values)
        assert is_put is (values.flags.c_contiguous or np.dtype(dtype).itemsize in (4, 8))
        assert np.array_equal(column[before : before + count], values if is_put else values * 0)
        assert not column[:before].any()
        assert not column[before + count :].any()


@pytest.mark.parametrize("stride", [0, 1, -8, 1 << 40])
def test_the_stride_of_a_single_row_means_nothing(stride):
    values = np.arange(3, dtype=np.float32)
    batch = np.lib.stride_tricks.as_strided(values, (1, 3), (stride, 4))
    assert batch.flags.c_contiguous
    for form in (untyped, rows_python):
        column = np.zeros((4, 3), np.float32)
        assert form.put_rows(column, 2, 3, batch)
        assert column.tolist() == [[0] * 3, [0] * 3, [0, 1, 2], [0] * 3]
        obs = form.copy_rows(batch, np.zeros(1), np.zeros((3, 1), np.bool_), 0, 1)[0]
        assert obs.tolist() == [[0, 1, 2]]


@given(numbers=st.lists(st.integers(0, 2), min_size=1, max_size=6), first=st.integers(0, 5))
def test_what_rows_have_in_common_is_found_alike(numbers, first):
    array, first = np.array(numbers, np.uint16), first % len(numbers)
    found = rows.common_number(array, first, len(numbers))
    assert found == rows_python.common_number(array, first, len(numbers))
    assert (found is not None) == (len(set(numbers[first:])) == 1)


@given(
    told_flags=st.tuples(bits, bits, bits),
    ended=bits,
    first=st.integers(0, 5),
    now=st.integers(0),
    is_same_step=st.booleans(),
)
def test_ends_are_noted_alike(told_flags, ended, first, now, is_same_step):
    now %= 2**62
    part = [row[first:].copy() for row in told_flags]
    results = []
    for form in (untyped, rows_python):
        mine, starts = ended.copy(), np.zeros(5, np.int64)
        results.append(
            (
                form.note_ends(*part, mine, starts, first, now, is_same_step),
                mine.tolist(),
                starts.tolist(),
            )
        )
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: untyped.copy_rows(None, np.zeros(3), np.zeros((3, 3), np.bool_), 1, 9),
        lambda: untyped.copy_rows(None, np.zeros(3), np.zeros((3, 3), np.bool_), -1, 2),
        lambda: untyped.copy_rows(None, np.zeros(3), np.zeros((2, 3), np.bool_), 0, 2),
        lambda: untyped.copy_rows(None, np.zeros(3, np.float32), np.zeros((3, 3), np.bool_), 0, 2),
        lambda: untyped.copy_rows(np.zeros((2, 2)), np.zeros(3), np.zeros((3, 3), np.bool_), 0, 2),
        lambda: untyped.copy_rows(
            np.zeros((3, 4))[:, ::2], np.zeros(3), np.zeros((3, 3), np.bool_), 0, 2
        ),
        lambda: untyped.take_ended(np.zeros((3, 2)), *[np.zeros(3, np.bool_)] * 2, 1),
        lambda: untyped.take_ended(np.zeros((3, 2)), *[np.zeros(3, np.bool_)] * 2, -1),
        lambda: untyped.take_ended(np.array(0.0), *[np.zeros(3, np.bool_)] * 2, 0),
        lambda: untyped.take_ended(np.zeros((3, 4))[:, ::2], *[np.zeros(3, np.bool_)] * 2, 0),
        lambda: untyped.take_ended(np.zeros((3, 2), object), *[np.zeros(3, np.bool_)] * 2, 0),
        lambda: untyped.take_ended(np.zeros((3, 2)), np.zeros(3, np.bool_), np.zeros(2, "?"), 0),
        lambda: untyped.take_ended(np.zeros((3, 2)), *[np.zeros(3, np.uint8)] * 2, 0),
        lambda: untyped.put_rows(np.zeros(3), 1, 4, np.zeros(3)),
        lambda: untyped.put_rows(np.zeros(3), -1, 2, np.zeros(3)),
        lambda: untyped.put_rows(np.zeros(3), 2, 1, np.zeros(3)),
        lambda: untyped.put_rows(np.zeros(6)[::2], 0, 3, np.zeros(3)),
        lambda: untyped.put_rows(np.array(0.0), 0, 0, np.array(0.0)),
        lambda: untyped.put_rows(np.zeros(3, object), 0, 1, np.zeros(1, object)),
        lambda: untyped.put_rows([0.0], 0, 1, np.zeros(1)),
        lambda: untyped.note_ends(*[np.zeros(3, np.bool_)] * 4, np.zeros(3, np.int64), 1, 0, False),
        lambda: untyped.note_ends(*[np.zeros(3, np.bool_)] * 4, np.zeros(2, np.int64), 0, 0, False),
        lambda: untyped.common_number(np.zeros(3, np.uint16), 0, 4),
        lambda: untyped.common_number(np.zeros(3, np.uint16), 2, 2),
        lambda: untyped.common_number(np.zeros(3, np.int64), 0, 2),
        lambda: step(lines=[line(5)]),
        lambda: step(lines=[line(-1)]),
        lambda: step(lines=[line(0)[:6]]),
        lambda: step(lines=[(*line(0)[:6], None)]),
        lambda: step(lines=[(*line(0)[:6], np.zeros(3, np.uint8))]),
        lambda: step(lines=[(0, -1, *line(0)[2:])]),
        lambda: step(lines=[3]),
        lambda: step(actions=[]),
        lambda: step(states=bytearray(4)),
        lambda: step(ready=bytearray(4)),
        lambda: step(starts=np.zeros((2, 4), np.uint8)),
        lambda: step(status=np.zeros(1, np.uint64)),
        lambda: step(rewards=np.zeros(0)),
        lambda: step(cells=np.zeros((2, 4))),
        lambda: step(cells=np.zeros((1, 4), np.float32)),
        lambda: step(schemas=np.zeros(0, np.uint16)),
        lambda: step(final_cells=np.zeros((1, 4), np.float32)),
        lambda: step(final_cells=np.zeros((2, 4), np.uint8)),
        lambda: step(final_schemas=np.zeros(0, np.uint16)),
        lambda: step(has_plan=bytearray(4)),
        lambda: step(autoreset="same_step"),
        lambda: step(ends=None),
        lambda: step(form=3),
        lambda: untyped.step_rows((1, 2), [], [], *[None] * 5),
        lambda: post(port=(words(2), words(8), words(3), 0, 0, 1)),
        lambda: post(port=(words(3), words(0), words(3), 0, 0, 1)),
        lambda: post(port=(words(3), words(8), words(2), 0, 0, 1)),
        lambda: post(port=(1, 2)),
        lambda: post(states=bytearray(0)),
        lambda: post(states=bytearray([1])),
        lambda: post(workers=(1,)),
        lambda: post(workers=(-1,)),
        lambda: post(workers=("0",)),
        lambda: post(port=(words(3), words(8), np.array([1, 0, 0], np.uint64), 0, 0, 1)),
        lambda: untyped.collect_steps([()], bytearray([1]), (0,), 1, 0, 0.0, 0.0),
        lambda: untyped.collect_steps([()], bytearray([1]), (1,), 1, 0, 0.0, 0.0),
        lambda: untyped.collect_steps([], bytearray(1), (), 1, 0, 0.0, 0.0),
    ],
)
@pytest.mark.skipif(not rows.IS_COMPILED, reason="Python has no memory to overrun")
def test_what_would_overrun_memory_is_refused(call):
    with pytest.raises((TypeError, ValueError, IndexError, OverflowError)):
        call()


def words(count):
    return np.zeros(count, np.uint64)


def post(port=None, states=None, workers=(0,)):
    port = port or (words(3), words(8), words(3), -1, -1, 1)
    untyped.post_steps([port], bytearray(1) if states is None else states, workers, 7, 1, 0)


def line(row, step=lambda action: None, reset=lambda: None, obs=None, final_obs=None):
    env = SimpleNamespace(step=step, reset=reset)
    return rows_python.EnvRow(row, 7, 8, env, obs, final_obs, np.zeros(4, np.uint8))


def step(lines=None, actions=None, **changed):
    """Step rows, without anything around them."""
    lines = [line(0)] if lines is None else lines
    rows_ = 1 + max((one[0] for one in lines if isinstance(one, tuple)), default=0) % 4
    usual: dict[str, Any] = {
        "autoreset": 0,
        "states": bytearray(rows_),
        "has_info": bytearray(rows_),
        "ready": bytearray(rows_),
        "has_plan": bytearray(rows_),
        "starts": np.arange(4 * rows_, dtype=np.uint8).reshape(-1, 4),
        "status": np.zeros(8, np.uint64),
        "rewards": np.ones(rows_),
        "invalid": [],
        "ends": [],
        "form": [None],
        "cells": np.zeros((rows_, 32), np.uint8),
        "schemas": np.zeros(rows_, np.uint16),
        "final_cells": np.zeros((rows_, 32), np.uint8),
        "final_schemas": np.zeros(rows_, np.uint16),
    }
    functions = {
        "take": lambda row, result: None,
        "take_reset": lambda row, result: None,
        "unusual": lambda row: None,
        "fail": lambda row, doing, exc: None,
        "keep_start": lambda row: None,
    }
    host_state = rows_python.HostState(
        **{name: changed.get(name, one) for name, one in usual.items()}
    )
    given = [changed.get(name, one) for name, one in functions.items()]
    untyped.step_rows(
        host_state, lines, list(range(len(lines))) if actions is None else actions, *given
    )
    return host_state


def test_c_and_python_mean_the_same_by_numbers():
    assert (SlotState.RUNNING, SlotState.ENDED) == (0, rows_python.ENDED) == (0, 1)
    assert rows.AUTORESETS == ("next_step", "same_step", "disabled") == get_args(Autoreset)
    assert main.HAS_REPLY == rows_python.HAS_REPLY == 2


@pytest.mark.parametrize("form", [rows, rows_python])
@pytest.mark.parametrize("info", [{}, {"a": 1}])
def test_a_row_that_is_ready_begins_from_where_it_said(form, info, monkeypatch):
    monkeypatch.setattr(rows, "step_rows", form.step_rows)
    first, obs, states = np.full(2, 5, np.float32), np.ones(2, np.float32), bytearray([0, 1])

    def take_reset(row, result):
        obs[:], states[row] = result[0], 0

    mine = line(1, reset=lambda: (first, info), obs=obs)
    host_state = step([mine], states=states, ready=bytearray([1, 1]), take_reset=take_reset)
    assert obs.tolist() == [5, 5]
    assert mine.start.tolist() == [4, 5, 6, 7]
    assert (host_state.states, host_state.ready) == (bytearray(2), bytearray([1, 0]))
    assert host_state.rewards.tolist() == [1, 0]
    assert host_state.invalid == [1]
    assert host_state.status[1] == mine.resetting


@pytest.mark.skipif(not rows.IS_COMPILED, reason="about references in C")
def test_nothing_is_kept_of_what_passes_through():
    obs, info, error = np.zeros(2, np.float32), dict[str, int](), ValueError("x")
    to = np.zeros(2, np.float32)

    def raises(*action):
        raise error

    def count():
        return [sys.getrefcount(one) for one in (obs, info, to, error)]

    def once():
        step(
            [
                line(0, lambda action: (obs, 1.5, False, False, info), obs=to),
                line(1, lambda action: (obs, 1.5, True, False, info), obs=to),
                line(2, raises, obs=to),
                line(3, reset=lambda: (obs, info), obs=to),
                line(3, reset=lambda: (obs, info, 1), obs=to),
                line(3, reset=raises, obs=to),
            ],
            states=bytearray([0, 0, 0, 1]),
            ready=bytearray([0, 0, 0, 1]),
            take_reset=raises,
        )
        error.__traceback__ = None

    once()
    before = count()
    for _ in range(50):
        once()
    assert count() == before


def test_what_python_raises_for_a_row_comes_out():
    def fail(row, doing, exc):
        raise exc

    def interrupted(*action):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step([line(0, interrupted)], fail=fail)
    with pytest.raises(KeyboardInterrupt):
        step([line(0, reset=interrupted)], fail=fail, states=b_("1"), ready=b_("1"))
    with pytest.raises(ZeroDivisionError):
        step(states=b_("2"), unusual=lambda row: 1 / 0)


def b_(digits):
    return bytearray(map(int, digits))


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_a_fleet_in_python_alone_gives_the_same_streams(monkeypatch, backend):
    in_python(monkeypatch)
    options = {"start_method": "fork"} if backend == "process" else {}
    check_streams(Subject(env="CartPole-v1"), backend=backend, **options)


ALONE = """
from envfleet.engine import rows
from envfleet.testing.conformance import Subject, check_streams
assert not rows.IS_COMPILED and rows.step_rows.__module__ == "envfleet.engine.rows_python"
check_streams(Subject(env="CartPole-v1"), backend="process", start_method="fork")
"""


def test_a_variable_switches_c_off():
    environment = {**os.environ, rows.NO_C_VARIABLE: "1"}
    subprocess.run([sys.executable, "-c", ALONE], env=environment, check=True, timeout=300)


# ---- the parent's side of a step ----------------------------------------------------------------

SLOTS_OF = (2, 1, 3)
"""How many slots each of three workers has."""
chosen_workers = st.lists(st.integers(0, 2), unique=True, max_size=3).map(
    lambda some: tuple(sorted(some))
)
parent_orders = st.lists(
    st.one_of(
        st.tuples(st.just("post"), chosen_workers),
        st.tuples(st.just("post"), chosen_workers),
        st.tuples(st.just("answer"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("answer"), st.integers(0, 2), st.just(False)),
        st.tuples(st.just("collect"), chosen_workers, st.integers(0, 7)),
        st.tuples(st.just("set_urgent"), st.booleans()),
    ),
    max_size=30,
)


class Exchange:
    """Ports of three workers that are played by this test."""

    def __init__(self, form):
        self.form, self.states = form, bytearray(3)
        self.rings = [words(3 * size) for size in (2, 5, 3)]
        self.words, self.counts = [words(8) for _ in range(3)], [words(3) for _ in range(3)]
        self.commands = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
        self.done = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
        self.urgent = os.eventfd(0, os.EFD_NONBLOCK)
        parts = (self.rings, self.words, self.counts, self.commands, self.done, SLOTS_OF)
        self.ports = list(zip(*parts, strict=True))

    def close(self):
        for fd in (*self.commands, *self.done, self.urgent):
            os.close(fd)

    def told(self, number, order, *what):
        """What comes of one order, and how everything stands then."""
        try:
            result = getattr(self, order)(number, *what)
        except ValueError as exc:
            result = str(exc)
        arrays = [one.tolist() for group in (self.rings, self.words, self.counts) for one in group]
        return result, bytes(self.states), arrays

    def post(self, number, workers):
        self.form.post_steps(self.ports, self.states, workers, number, 2, 256 * number)

    def answer(self, number, worker, has_reply):
        """Let a worker serve one command, if it has any."""
        try:
            assert os.eventfd_read(self.commands[worker]) == 1
        except BlockingIOError:
            return "nothing to do"
        if has_reply:
            served = int(self.counts[worker][0]) - 1
            ring = self.rings[worker]
            ring[served * 3 % len(ring) + 2] |= np.uint64(main.HAS_REPLY)
        os.eventfd_write(self.done[worker], 1)
        return "served"

    def collect(self, number, workers, wanted):
        return self.form.collect_steps(
            self.ports, self.states, workers, wanted, self.urgent, 0.0, 0.0
        )

    def set_urgent(self, number, is_urgent):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.urgent, 1) if is_urgent else os.eventfd_read(self.urgent)


@pytest.mark.skipif(not rows_python.HAS_EVENTFD, reason="C knows no other bells")
@given(orders=parent_orders)
@settings(deadline=None)
def test_steps_are_posted_and_collected_alike(orders):
    exchanges = [Exchange(form) for form in (untyped, rows_python)]
    try:
        for number, order in enumerate(orders):
            one, other = (exchange.told(number, *order) for exchange in exchanges)
            assert one == other
    finally:
        for exchange in exchanges:
            exchange.close()


@pytest.mark.parametrize("form", [untyped, rows_python], ids=["C", "Python"])
@pytest.mark.parametrize("wanted", [1, 3])
def test_a_wait_ends_when_enough_is_done_and_not_before(form, wanted):
    with closing(Exchange(form)) as exchange:
        exchange.post(1, (0, 1))
        assert exchange.collect(1, (0, 1), wanted) is None
        exchange.answer(1, 0, False)
        last = threading.Timer(0.2, exchange.answer, (1, 1, False))
        last.start()
        found = form.collect_steps(
            exchange.ports, exchange.states, (0, 1), wanted, exchange.urgent, 60.0, 0.01
        )
        assert found == ((0,) if wanted == 1 else (0, 1))
        last.join()


@pytest.mark.parametrize("form", [untyped, rows_python], ids=["C", "Python"])
def test_what_a_signal_handler_raises_ends_the_wait_and_loses_nothing(form):
    class Alarm(Exception):
        pass

    def handler(number, frame):
        raise Alarm

    with closing(Exchange(form)) as exchange:
        exchange.post(1, (0, 1))
        exchange.answer(1, 0, False)
        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Alarm):
                form.collect_steps(
                    exchange.ports, exchange.states, (0, 1), 3, exchange.urgent, 60.0, 0.0
                )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        exchange.answer(1, 1, False)
        assert exchange.collect(1, (0, 1), 3) == (0, 1)


def test_rewards_are_whatever_python_takes_for_a_number():
    fleet = Fleet([partial(Scripted, [(np.zeros(SHAPE, np.float32), Odd(), False, False, {})])])
    try:
        fleet.reset([ResetPlan(0)])
        assert fleet.step(np.zeros(1, np.int64)).rewards.tolist() == [2.5]
    finally:
        fleet.close()


@pytest.mark.parametrize("dtype", [">f4", ">i2"])
def test_numbers_in_another_byte_order_are_copied_as_they_are(dtype):
    class Swapped(Scripted):
        observation_space = gymnasium.spaces.Box(-9, 9, SHAPE, np.dtype(dtype).type)

        def __init__(self):
            super().__init__([(np.arange(3).astype(dtype), 1.0, False, False, {})])
            self.observation_space = gymnasium.spaces.Box(-9, 9, SHAPE, np.dtype(dtype))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.ones(3).astype(dtype), {}

    fleet = Fleet([Swapped] * 2, backend="serial")
    try:
        assert fleet.reset([ResetPlan(0)] * 2).obs.tolist() == [[1, 1, 1]] * 2
        assert fleet.step(np.zeros(2, np.int64)).obs.tolist() == [[0, 1, 2]] * 2
    finally:
        fleet.close()


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_environments_go_with_their_fleet_before_any_collector_comes(backend):
    made = []

    def make():
        env = Scripted([(np.zeros(SHAPE, np.float32), 1.0, False, False, {})])
        made.append(weakref.ref(env))
        return env

    gc.disable()
    try:
        fleet = Fleet([make] * 2, backend=backend)
        fleet.reset([ResetPlan(0)] * 2)
        fleet.step(np.zeros(2, np.int64))
        fleet.close()
        del fleet
        assert [env() for env in made] == [None, None]
    finally:
        gc.enable()


class Drawing(gymnasium.Env):
    """Observes random numbers, and ends every second step; it cannot be pickled."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.cannot_travel: Any = (one for one in "")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.drawn(), {}

    def step(self, action):
        self.at += 1
        return self.drawn(), 0.0, self.at % 2 == 0, False, {}

    def drawn(self):
        return np.array([self.np_random.random()], np.float32)


def test_an_episode_is_replayed_from_where_its_generator_really_was():
    env, action = Drawing(), np.zeros(1, np.int64)
    fleet = Fleet([lambda: env], backend="serial")
    try:
        fleet.reset([ResetPlan(1)])
        fleet.step(action)
        assert fleet.step(action).terminated[0]
        env.np_random.random()  # in this process the environment is its caller's too
        fleet.step(action)
        snapshots = fleet.snapshot()
        assert isinstance(snapshots[0].taken, Replay)
        went_on = fleet.step(action).obs.tolist()
        env = Drawing()
        fleet.restore(snapshots)
        assert fleet.step(action).obs.tolist() == went_on
    finally:
        fleet.close()
