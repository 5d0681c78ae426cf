import pytest
import torch

from grpo_lightning.engines.philox import philox, uniforms
from grpo_lightning.types import RandomKey

ALL_ONES = 0xFFFFFFFF


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    return [int(word) for word in philox((c0, c1, c2, c3), key)]


def reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, in Python's unbounded integers."""
    (l0, r0, l1, r1), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * l0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * l1, 2**32)
        l0, r0, l1, r1 = high1 ^ r0 ^ k0, low1, high0 ^ r1 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [l0, r0, l1, r1]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers_of_random123(counter, key, answer):
    assert words(counter, key) == answer
    assert reference(counter, key) == answer


def test_uniform_is_the_upper_24_bits_of_the_word_for_its_five_keys():
    prompt, sample, seed, step = 2**40 + 17, 6, 2**32 - 3, 12
    key, first = RandomKey(seed, step), torch.tensor([5])
    numbers = uniforms(key, torch.tensor([prompt]), torch.tensor([sample]), first, count=9)[0].tolist()
    for position, number in zip(range(5, 14), numbers, strict=True):
        counter = (position // 4, sample, prompt % 2**32, prompt >> 32)
        assert number == (reference(counter, (seed, step))[position % 4] >> 8) / 2**24


def test_completions_may_begin_at_positions_of_their_own():
    prompt, sample = torch.arange(9), torch.tensor([0, 1, 2] * 3)
    first = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 1000])
    for count in range(1, 12):
        together = uniforms(RandomKey(7, 3), prompt, sample, first, count)
        assert together.shape == (9, count)
        for row in range(9):
            alone = uniforms(RandomKey(7, 3), prompt[[row]], sample[[row]], torch.tensor([0]), int(first[row]) + count)
            assert together[row].equal(alone[0, int(first[row]) :])
