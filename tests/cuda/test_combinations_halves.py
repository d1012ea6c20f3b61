"""float16 and bfloat16 forward kernels for every combination of options, in every case, in the
emulator against float64.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from combinations import DECKS, FAMILIES, WHOLE, cases, check_all, combinations, enough, parameters


@pytest.mark.parametrize("name", WHOLE)
def test_every_option_meets_every_case(name):
    family = FAMILIES[name]
    met = {}
    for one, dealt in cases(family, combinations(family)):
        for option in ((n, one[n]) for n in ("band", "mask", "softcap", "alibi", "sinks", "group")):
            for deck, card in (item for case in dealt for item in case.items()):
                met.setdefault((option, deck), []).append(card)
    missing = {
        (option, deck): card
        for (option, deck), cards in met.items()
        for card in DECKS[deck]
        if card not in cards
    }
    assert not missing


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(WHOLE)))
def test_every_pair_of_options_occurs(name):
    """Where the tests go through some of the combinations."""
    found = combinations(FAMILIES[name])
    pairs = [
        {(a, b) for one in part for a in one.items() for b in one.items()}
        for part in (found, enough(found, 2))
    ]
    assert pairs[0] == pairs[1] and len(enough(found, 2)) <= 12
    assert {a for one in enough(found, 1) for a in one.items()} == {a for a, b in pairs[0]} and len(
        enough(found, 1)
    ) <= 5


@pytest.mark.parametrize(
    ("family", "one", "dealt"),
    parameters("float16 sm_80", "bfloat16 sm_80", "float16 sm_75", "halves sm_90a"),
)
def test_combination(family, one, dealt):
    check_all(family, one, dealt)
