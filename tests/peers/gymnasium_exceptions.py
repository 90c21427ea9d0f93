"""Tests of Gymnasium's that do not apply to a fleet: test id -> why."""

EXCEPTIONS: dict[str, str] = {
}
