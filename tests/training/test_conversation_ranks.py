"""Two ranks whose conversations have unequal numbers of turns learn what one process learns."""

from typing import Any

import pytest
from helpers.conversations_of_ranks import runs
from helpers.fitting import relative
from helpers.two_ranks import in_every_way

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What `conversations_of_ranks` found in each way."""
    folder = tmp_path_factory.mktemp("conversations")
    return in_every_way("conversations_of_ranks.py", runs, folder, max_tokens=60)


@pytest.mark.parametrize("run", ["objectives", "learning"])
@pytest.mark.parametrize("way", ["parts", "ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(found: Found, way: str, run: str) -> None:
    expected, actual = found["whole"][run]["gradients"], found[way][run]["gradients"]
    # Of 20 and 6 updates; a mask leaves out every token of four minibatches, and those are not made.
    assert len(expected) == len(actual) == (16 if run == "objectives" else 6)
    moving = [update for update, gradient in enumerate(expected) if any(part.any() for part in gradient.values())]
    assert len(moving) >= (14 if run == "objectives" else 6)  # a mask may leave out all of a minibatch
    assert max(relative(actual[update], expected[update]) for update in moving) < 1e-6
    still = [actual[update] for update in range(len(expected)) if update not in moving]
    assert not any(part.any() for gradient in still for part in gradient.values())
    for name in ("rollout/turns", "rollout/branches", "rollout/given", "reward/mean"):
        assert found[way][run]["logged"][name] == pytest.approx(found["whole"][run]["logged"][name])


def test_the_ranks_drew_unequal_numbers_of_turns_and_history_was_rewritten(found: Found) -> None:
    for way in ("ddp", "fsdp2"):
        first, second = found[way]["objectives"]["turns"]
        assert first != second
    assert max(found["whole"]["objectives"]["logged"]["rollout/branches"].values()) > 0
