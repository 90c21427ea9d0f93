"""What an episode starts from is read from a generator's memory as from its state."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.engine import rng, rows

compiled = pytest.mark.skipif(rows.keep_pcg64 is None, reason="memory is read in C")


def kept(bits: Any) -> bytes:
    """What is put into a cell that was full of something else."""
    base = SimpleNamespace(np_random=SimpleNamespace(bit_generator=bits))
    cell = np.full(rng.CELL_BYTES, 0xAB, np.uint8)
    rng.keep(SimpleNamespace(unwrapped=base), cell)
    return cell.tobytes()


@compiled
def test_memory_is_as_we_know_it():
    """With the versions that are tested; elsewhere it is looked at in the slow way."""
    assert rng._READS_MEMORY


@given(seed=st.integers(0, 2**64), draws=st.lists(st.sampled_from(["u4", "u8", "f4", "f8"])))
def test_a_state_is_kept_and_comes_back(seed, draws):
    bits = np.random.PCG64(seed)
    generator = np.random.Generator(bits)
    for kind in draws:
        generator.integers(1000, dtype=kind) if kind[0] == "u" else generator.random(dtype=kind)
    cell = kept(bits)
    assert cell == rng.packed(bits.state)
    assert rng.unpacked(cell) == bits.state
    assert cell == kept(bits), "looking changes nothing"


@pytest.mark.parametrize("bits", [np.random.Philox(1), np.random.MT19937(1), None])
def test_other_generators_are_not_known(bits):
    assert kept(bits) == rng.NOT_KNOWN


def test_without_c_it_is_the_same(monkeypatch):
    bits = np.random.PCG64(3)
    quick = kept(bits)
    monkeypatch.setattr(rng, "_READS_MEMORY", False)
    assert kept(bits) == quick


@compiled
@pytest.mark.parametrize(
    ("capsule", "cell"),
    [
        (None, np.zeros(rng.CELL_BYTES, np.uint8)),
        (np.random.PCG64(0).capsule, np.zeros(rng.CELL_BYTES - 1, np.uint8)),
        (np.random.PCG64(0).capsule, np.zeros(rng.CELL_BYTES)),
        (np.random.PCG64(0).capsule, bytearray(rng.CELL_BYTES)),
    ],
)
def test_what_does_not_fit_is_refused(capsule, cell):
    keep: Any = rows.keep_pcg64
    with pytest.raises((TypeError, ValueError)):
        keep(capsule, cell)
