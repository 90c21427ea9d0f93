"""Copies that share nothing, as far as things can be copied."""

import threading
from typing import Any

import numpy as np

from envfleet.engine.detached_copy import detached_copy


class Thing:
    def __init__(self):
        self.items = [1]


def test_what_can_change_is_copied_at_any_depth():
    value: dict[str, Any] = {"array": np.zeros(2), "deep": {"list": [1, (2, [3])]}}
    value |= {"thing": Thing(), "number": 4}
    copied = detached_copy(value)
    value["array"][0] = value["number"] = 9
    value["deep"]["list"][1][1].append(9)
    value["thing"].items.append(9)
    assert copied["array"].tolist() == [0, 0]
    assert copied["deep"] == {"list": [1, (2, [3])]}
    assert copied["thing"].items == [1]
    assert copied["number"] == 4


def test_types_stay_what_they_are():
    for value in (True, 1, 1.5, "a", None, np.float32(1), np.bool_(True), (1, "b"), {1, 2}):
        copied = detached_copy({"value": value})["value"]
        assert type(copied) is type(value)
        assert copied == value


def test_objects_that_were_one_still_are():
    thing = Thing()
    copied = detached_copy({"a": {"thing": thing}, "b": {"thing": thing}})
    assert copied["a"]["thing"] is copied["b"]["thing"]


def test_what_holds_itself_is_copied():
    value: list[Any] = []
    value.append(value)
    copied = detached_copy(value)
    assert copied is not value
    assert copied[0] is copied


def test_what_cannot_be_copied_is_itself_and_the_rest_is_a_copy():
    lock, plain = threading.Lock(), [1]
    copied = detached_copy({"deep": {"lock": lock, "plain": plain}, "both": (lock, plain)})
    assert copied["deep"]["lock"] is lock
    assert copied["both"][0] is lock
    assert copied["deep"] == {"lock": lock, "plain": [1]}
    assert copied["deep"]["plain"] is not plain
    assert copied["both"][1] is not plain


def test_a_circle_of_what_cannot_be_copied_ends():
    value: dict[str, Any] = {"lock": threading.Lock()}
    value["again"] = value
    assert detached_copy(value)["lock"] is value["lock"]


def test_functions_are_themselves():
    value = {"function": lambda: 1, "list": [1]}
    copied = detached_copy(value)
    assert copied["function"] is value["function"]
    assert copied["list"] is not value["list"]
