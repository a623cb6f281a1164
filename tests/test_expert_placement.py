"""Copies of experts on devices: DeepSeek's published placement, and balance."""

import numpy as np
import pytest

from jaxrunner.mixtures.placement import imbalance, in_turn, of_experts, place

LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_placement_is_found():
    made = place(LOADS, 16, 8, num_groups=4, num_nodes=2)
    assert made.expert.tolist() == PUBLISHED
    assert made.copies[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 2)], ids=["global", "nodes", "no multiple"])
def test_each_expert_has_its_places(groups):
    """Whatever the loads, zeros included; places and experts say the same."""
    for loads in (LOADS, 0 * LOADS, LOADS**4):
        made = place(loads, 24, 4, num_groups=groups[0], num_nodes=groups[1])
        for expert, places, copies in zip(*made, strict=True):
            assert copies.sum() == 24 and copies.min() >= 1
            for x, own in enumerate(places):
                assert sorted(np.flatnonzero(expert == x)) == own[own >= 0].tolist()
                assert (own >= 0).sum() == copies[x]


def test_skewed_loads_are_balanced():
    """16 redundant of 128 on 8 devices: within 10% of the mean, several times that without."""
    rng = np.random.default_rng(0)
    for skew in (0.5, 0.8, 1.0):
        loads = 1e5 * (1 + np.arange(128)) ** -skew
        loads = np.stack([rng.permutation(loads) for _ in range(4)])
        assert imbalance(loads, place(loads, 144, 8), 8).max() < 1.1
        assert imbalance(loads, in_turn(4, 128, 144), 8).max() > 1.1


def test_copies_lie_in_turn_at_first():
    made = in_turn(2, 5, 8)
    assert made.expert[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert made.places[0].tolist() == [[0, 5], [1, 6], [2, 7], [3, -1], [4, -1]]
    assert of_experts(made.expert, 5).copies[0].tolist() == [2, 2, 2, 1, 1]


@pytest.mark.parametrize(("places", "devices"), [(11, 1), (14, 4)])
def test_places_that_cannot_be_are_refused(places, devices):
    words = f"{places} places of copies must be a multiple of {devices} devices, and 12 experts"
    with pytest.raises(ValueError, match=words):
        place(LOADS, places, devices)
