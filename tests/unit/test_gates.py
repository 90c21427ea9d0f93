"""What tests allow for a busy machine."""

import pytest

from tests import gates


def test_a_busy_machine_is_given_more_time_but_not_without_end(monkeypatch):
    waited_s = iter([0.0, 0.0, 0.0, 50.0])
    monkeypatch.setattr(gates, "waited_s", lambda: next(waited_s))
    with pytest.raises(AssertionError, match="may take 0 s"), gates.at_most(0.0):
        pass
    with gates.at_most(10.0):
        pass
    assert [gates.allowed_s(2.0, waited) for waited in (0.0, 5.0, 1000.0)] == [2.0, 7.0, 20.0]
