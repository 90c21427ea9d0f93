"""RecordSpace: what it takes, what it holds, and how it lies in a row."""

from __future__ import annotations

import doctest
import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envfleet.errors import LayoutMismatch
from envfleet.layout import Columns, RecordSpace, are_equal, are_same, plan_layout, record

AGENTS = 3


def agents_space(high: float = 1.0, **changed: Any) -> RecordSpace:
    fields: dict[str, Any] = {
        "observation": Box(-1, high, (AGENTS, 4)),
        "reward": Box(-9, 9, (AGENTS,), np.float64),
        "alive": MultiBinary(AGENTS),
        "mask": Box(0, 1, (AGENTS, 5), np.bool_),
        "kind": MultiDiscrete([2, 3, 4]),
        "turn": Discrete(AGENTS),
    }
    return RecordSpace({**fields, **changed})


def are_equal_records(one: Any, other: Any) -> bool:
    """By field: numpy does not copy the bytes between fields."""
    assert one.dtype == other.dtype
    return all(np.array_equal(one[name], other[name]) for name in one.dtype.names)


def bound(space: Any, rows: int = 4) -> Columns:
    layout = plan_layout(space, "observation")
    return layout.bind(bytearray(layout.nbytes(rows)), 0, rows)


def test_the_documented_example_holds() -> None:
    result = doctest.testmod(record)
    assert result.attempted
    assert not result.failed


def test_a_record_is_planned_as_one_field_in_one_piece() -> None:
    layout = plan_layout(agents_space())
    (field,) = layout.fields
    assert layout.is_one_array
    assert (field.kind, field.shape, field.dtype) == ("array", (), agents_space().dtype)
    assert field.dtype.isalignedstruct


def test_the_parent_sees_fields_with_an_agent_axis_and_no_copies() -> None:
    space = agents_space()
    columns = bound(space)
    view = columns.read_batch(slice(0, 4), copy=False)
    copy = columns.read_batch(slice(0, 4))
    value = space.sample()
    columns.writer(2)(value)
    assert {name: view[name].shape for name in view.dtype.names} == {
        "observation": (4, AGENTS, 4),
        "reward": (4, AGENTS),
        "alive": (4, AGENTS),
        "mask": (4, AGENTS, 5),
        "kind": (4, AGENTS),
        "turn": (4,),
    }
    assert view["observation"][2].tolist() == value["observation"].tolist()
    assert all(np.shares_memory(view[name], view) for name in view.dtype.names)
    assert not copy["observation"].any()
    assert view["observation"].flags.aligned


@pytest.mark.parametrize("form", ["array", "scalar", "row of its own"])
def test_arrays_and_scalars_are_taken_and_copied(form: str) -> None:
    space = agents_space()
    own = np.zeros(2, space.dtype)
    own[1] = space.sample()
    given = {"array": own[1, ...], "scalar": own[1], "row of its own": own[1:2].reshape(())}[form]
    expected = own[1].copy()
    columns = bound(space)
    columns.writer(0)(given)
    own[1] = 0
    assert are_equal_records(columns.read(0), expected)
    assert given in space


def test_samples_belong_to_the_space_and_follow_the_seed() -> None:
    space, other = agents_space(), agents_space()
    space.seed(3), other.seed(3)
    values = [space.sample() for _ in range(5)]
    assert all(value in space for value in values)
    assert all(are_equal_records(value, other.sample()) for value in values)
    assert not are_equal_records(values[0], values[1])
    other.seed(4)
    assert not are_equal_records(other.sample(), values[0])


def test_masks_are_given_by_field() -> None:
    space = agents_space()
    only = np.array([0, 1, 0], np.int8)
    assert {int(space.sample(mask={"turn": only})["turn"]) for _ in range(9)} == {1}
    likely = np.array([0.0, 0.0, 1.0])
    assert {int(space.sample(probability={"turn": likely})["turn"]) for _ in range(9)} == {2}


def test_what_does_not_belong_to_the_space() -> None:
    space = agents_space()
    value: Any = space.sample()
    outside = {"observation": 1.5, "reward": np.nan, "alive": 2, "kind": 4, "turn": AGENTS}
    for name, wrong in outside.items():
        changed = value.copy()
        changed[name] = wrong
        assert changed not in space
    others = [value["turn"], dict(zip(value.dtype.names, value.item(), strict=True)), None]
    names = value.dtype.names
    others += [value.reshape(1), value.astype([(name, value.dtype[name]) for name in names])]
    others += [np.zeros((), [(name, value.dtype[name]) for name in reversed(names)])]
    assert not any(other in space for other in others)


def test_equal_spaces_are_equal_and_pickle() -> None:
    space = agents_space()
    for other in (agents_space(), deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert space == other
        assert are_same(space, other)
    reordered = RecordSpace(dict(reversed(list(space.fields.items()))))
    different = [agents_space(2.0), agents_space(turn=Discrete(4)), agents_space(more=Discrete(2))]
    for other in (*different, reordered, batch_space(space, 2), Dict(dict(space.fields)), None):
        assert space != other
        assert not are_same(space, other)
        assert not are_equal(space, other)
    nearly = agents_space(1.0 + 1e-6)
    assert not are_same(space, nearly)
    assert are_equal(space, nearly)  # as Gymnasium judges its boxes


def test_spaces_with_equal_fields_share_one_dtype() -> None:
    first, second = (RecordSpace({"turn": Discrete(3), "reward": Box(0, 1, (2,))}) for _ in "ab")
    assert first.dtype is second.dtype
    assert first.dtype is not RecordSpace({"turn": Discrete(3)}).dtype


def test_gymnasium_batches_records() -> None:
    space = agents_space()
    batched = batch_space(space, 4)
    items = [space.sample() for _ in range(4)]
    out: Any = create_empty_array(space, 4)
    batch: Any = concatenate(space, items, out)
    assert batch.shape == (4,)
    assert batch in batched
    assert batched.sample() in batched
    assert batch[0] in space
    assert all(map(are_equal_records, iterate(batched, batch), items))
    batch["turn"][3] = AGENTS
    assert batch not in batched


def test_records_nest() -> None:
    inner = RecordSpace({"at": Box(-1, 1, (AGENTS, 2))}, shape=(AGENTS,))
    space = RecordSpace({"team": inner, "turn": Discrete(AGENTS)})
    columns = bound(space)
    value = space.sample()
    columns.writer(1)(value)
    assert value in space
    view = columns.read_batch(slice(0, 4), copy=False)
    assert view["team"]["at"].shape == (4, AGENTS, AGENTS, 2)
    assert view["team"]["at"][1].tolist() == value["team"]["at"].tolist()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"text": Text(4)}, TypeError, "field 'text' of a record must be a Box"),
        ({"x": Dict(a=Discrete(2))}, TypeError, "put other spaces beside the record"),
        ({"": Discrete(2)}, TypeError, "non-empty str"),
        ({3: Discrete(2)}, TypeError, "non-empty str"),
        ({}, ValueError, "a field that holds something"),
        ({"nothing": Box(0, 1, (0,))}, ValueError, "a field that holds something"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(fields: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        RecordSpace(fields)


def test_fields_are_matched_by_name_and_never_by_position() -> None:
    """numpy itself assigns records field by field in order, and ignores their names."""
    columns = bound(RecordSpace({"x": Box(-9, 9, (2,)), "y": Box(-9, 9, (2,))}))
    swapped = np.zeros((), [("y", "f4", 2), ("x", "f4", 2)])
    for value in (swapped, swapped[()], np.zeros((), [("x", "f4", 2)]), np.zeros(2), 3.0, None):
        with pytest.raises(LayoutMismatch) as caught:
            columns.writer(0)(value)
        assert caught.value.path == "observation"
    with pytest.raises(LayoutMismatch):
        columns.write_batch(slice(0, 4), np.zeros(4, swapped.dtype))
    with pytest.raises(LayoutMismatch):  # nor is a record a number
        bound(Box(-1, 1, ())).writer(0)(np.zeros((), [("x", "f4")]))


def test_a_record_of_another_precision_is_cast_field_by_field() -> None:
    columns = bound(RecordSpace({"x": Box(-9, 9, (2,)), "n": Discrete(300, dtype=np.int16)}))
    columns.writer(0)(np.array((0.5, 7), [("x", "f8", 2), ("n", "i8")]))
    assert columns.read(0)["x"].tolist() == [0.5, 0.5]
    assert columns.read(0)["n"] == 7
    with pytest.raises(LayoutMismatch, match="out of range") as caught:
        columns.writer(0)(np.array((0.5, 70_000), [("x", "f8", 2), ("n", "i8")]))
    assert caught.value.path == "observation['n']"
    with pytest.raises(LayoutMismatch) as caught:
        columns.writer(0)(np.array((0.5, 7), [("x", "f8", 3), ("n", "i8")]))
    assert caught.value.path == "observation['x']"
    assert columns.read(0)["n"] == 7


def test_poison_shows_in_every_field() -> None:
    columns = bound(agents_space())
    view = columns.read_batch(slice(0, 4), copy=False)
    columns.poison(np.array([1]))
    assert np.isnan(view["observation"][1]).all()
    assert np.isnan(view["reward"][1]).all()
    assert view["turn"][1] not in range(AGENTS)
    assert view["mask"][1].all()
    assert not view["observation"][[0, 2, 3]].any()


def test_what_is_read_owns_its_memory() -> None:
    columns = bound(agents_space())
    one, each = columns.read(0), columns.read_each(slice(0, 4))
    columns.poison(slice(0, 4))
    for value in (one, *each):
        assert not value["observation"].any()
        value["turn"] = 2
    assert not (columns.read_batch(slice(0, 4))["turn"] == 2).any()
