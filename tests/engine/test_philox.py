from __future__ import annotations

import itertools

import pytest
import torch

from appliance.engine.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_equal_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(torch.tensor(key).unsqueeze(1), torch.tensor(counter).unsqueeze(1))
    assert tuple(words.flatten().tolist()) == expected


def test_columns_are_computed_independently() -> None:
    generator = torch.Generator().manual_seed(0)
    key = torch.randint(0, 1 << 32, (2, 37), generator=generator)
    counter = torch.randint(0, 1 << 32, (4, 37), generator=generator)
    together = philox4x32(key, counter)
    alone = torch.cat([philox4x32(key[:, i : i + 1], counter[:, i : i + 1]) for i in range(37)], dim=1)
    assert torch.equal(together, alone)


def test_key_is_the_seed_and_counter_is_position_child_lane_zero() -> None:
    seed = 0x299F31D0_A4093822
    words = philox4x32(torch.tensor([[0xA4093822], [0x299F31D0]]), torch.tensor([[7], [3], [5], [0]]))
    assert uniforms([seed], [7], [3], lane=5) == [words[0].item() * 2.0**-32]


def test_every_argument_changes_the_number() -> None:
    seeds = (0, 1, 1 << 32, 1 << 63, (1 << 64) - 1)
    numbers = [
        uniforms([seed], [position], [child], lane)[0]
        for seed, position, child, lane in itertools.product(seeds, (0, 1, 1 << 20), (0, 1, 127), (0, 1))
    ]
    assert len(set(numbers)) == len(numbers)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert uniforms([-1, 1 << 64, (1 << 70) + 5], [3, 3, 3], [0, 0, 0]) == uniforms(
        [(1 << 64) - 1, 0, 5], [3, 3, 3], [0, 0, 0]
    )


def test_numbers_are_spread_evenly_over_the_unit_interval() -> None:
    count, bins = 64_000, 64
    numbers = torch.tensor(uniforms([1234] * count, range(count), [0] * count), dtype=torch.float64)
    assert numbers.min().item() >= 0.0
    assert numbers.max().item() < 1.0
    observed = torch.bincount((numbers * bins).long(), minlength=bins).double()
    expected = count / bins
    # 99.9 % quantile of chi-square with 63 degrees of freedom.
    assert ((observed - expected) ** 2 / expected).sum().item() < 103.4
