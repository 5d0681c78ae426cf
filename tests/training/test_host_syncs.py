"""How often the host waits for the device: in decoding once per look, in an update a few times whatever its size.

The numbers are exact, so that a new wait shows: with its line, in the message. Where one is needed, raise the number.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import fit
from helpers.host_syncs import HostSyncs
from helpers.other_device import TRAINER, other_device
from helpers.tiny import policy_of, requests_of

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.corrections import GeometricMask, ProbabilityGap
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.sequence_surrogates import SequenceClipped
from grpo_lightning.maths.stopping import AllSettled, KLAbove, ObjectivePlateau
from grpo_lightning.maths.target_probability import TargetProbability
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey

# Decoding

BATCH = 20
"""Waits and uploads of one batch whatever its length: its prompts go there, its completions come back."""


def decoding(
    policy: Policy, lengths: list[int], new_tokens: int, check_every: int = 8, **sampling: Any
) -> tuple[HostSyncs, list[int]]:
    """What waited while completions of at most `new_tokens` were drawn, and their lengths."""
    with other_device() as other:
        policy.to(other.device)
        engine = NativeEngine(check_every=check_every)
        engine.sync(policy)
        other.syncs.clear()
        settings = Sampling(max_new_tokens=new_tokens, **sampling)
        completions = engine.complete(requests_of(lengths, 12), settings, RandomKey())
    return other.syncs, [len(completion.token_ids) for completion in completions]


@pytest.mark.parametrize(
    ("shape", "lengths", "stop"), [("llama", [5, 1, 7], []), ("gpt2", [4, 4], ["</answer>"])], ids=["ragged", "stop"]
)
def test_decoding_waits_per_look_for_what_has_ended_and_once_more_for_stop_strings(shape, lengths, stop):
    waits = {}
    for new_tokens in (8, 40):
        syncs, drawn = decoding(policy_of(shape, scale=0.02), lengths, new_tokens, stop=stop)
        assert max(drawn) > new_tokens - 8, "completions that end early would prove nothing"
        waits[new_tokens] = len(syncs)
    # A look at position 8, 16, 24 and 32: how many rows have ended, and their tokens.
    assert waits[40] - waits[8] <= 4 * (3 if stop else 2), str(syncs)
    assert stop or waits[8] <= BATCH, str(syncs)


# Updates

UPDATE = 1
"""Waits of one update: the numbers that are logged come to the host together, and decide there."""


def waits(folder: Path, mu: int, **options: Any) -> Counter[tuple[str, str]]:
    """The waits of a whole run of one step with `mu` updates, by line and operation."""
    stop = options.pop("stop", None)
    with other_device() as other:
        fit(
            folder / f"{mu}",
            sampling=Sampling(max_new_tokens=6),
            loop={"prompts_per_step": 2, "mu": mu, "max_tokens": 30, "stop": stop},  # several packs
            trainer={"max_epochs": 1} | TRAINER,
            **options,
        )
    return other.syncs.by_line()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "Clipped, a correction of tokens, an entropy bonus": lambda: {
        "objective": Objective(beta=0.1, correction=ProbabilityGap(), entropy_bonus=0.1),
        "stop": ObjectivePlateau(9),
    },
    "GSPO, a correction of completions, stops by KL": lambda: {
        "objective": Objective(SequenceClipped(), correction=GeometricMask()),
        "stop": KLAbove(1e3),
    },
    "targets, stops when settled": lambda: {"objective": Objective(TargetProbability()), "stop": AllSettled(1.0)},
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_waits_for_the_device_once(case, tmp_path):
    # What an update more costs; the first is left out, which checks the sampler's log-probs.
    update = waits(tmp_path, 3, **CASES[case]())
    update.subtract(waits(tmp_path, 2, **CASES[case]()))
    assert (+update).total() == UPDATE, +update
