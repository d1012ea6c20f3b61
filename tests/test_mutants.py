"""The planted faults of `make mutants` are where they say, each once, and their tests exist."""

from pathlib import Path

import pytest
from mutants.planted import MUTANTS

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_planted_fault_has_its_place(number):
    mutant = MUTANTS[number]
    text = (ROOT / "numflash" / mutant.file).read_text()
    assert text.count(mutant.old) == 1, (
        f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times"
    )
    assert mutant.new != mutant.old
    for path in mutant.tests.split(" -k ")[0].split():
        assert (ROOT / path.split("::")[0]).exists(), path


def test_there_are_many():
    assert len(MUTANTS) >= 60
    assert len({mutant.file.split("/")[0] for mutant in MUTANTS}) >= 10
