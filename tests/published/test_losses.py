"""Each family trains on two workers, packed, as a plain loop does: losses are equal in fp32, and in
bf16 they differ by less than with another seed."""

from pathlib import Path

import pytest

from tests.published.losses import NAMES, measure

OFTEN = ("llama", "llama3")


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        pytest.param(*each, marks=() if each == OFTEN else [pytest.mark.night, pytest.mark.slow])
        for each in NAMES
    ],
)
def test_losses_are_those_of_a_plain_loop(
    kind: str, rope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINING_CACHE_DIR", "")  # set by what is measured
    found = measure(kind, rope, tmp_path)
    assert found.is_right, found
    assert bool(found.beyond) == bool(rope)
