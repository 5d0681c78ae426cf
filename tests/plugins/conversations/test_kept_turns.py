"""A game in whole runs: the engine reads of each turn only what is new, and draws what it would have drawn."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fast import fit
from helpers.fitting import scalars
from helpers.guessing import Guess

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.plugins.conversations.conversations import Limits
from grpo_lightning.plugins.conversations.data import PromptDataModule
from grpo_lightning.plugins.conversations.reward import EnvironmentReward
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy

LETTERS = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ")
"""Each ends a turn: the tiny policy seldom draws a stop token."""


class Played(L.Callback):
    """Keeps the conversations of every step."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        samples = GRPOLoop.find(trainer).current_step.exploration.samples
        self.pieces += [piece for sample in samples for piece in sample.conversation.pieces]


def test_a_game_reads_far_fewer_tokens_and_is_played_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    hidden = Policy.hidden

    def noted(self: Policy, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("past_key_values") is not None and input_ids.shape[1] > 1:
            read[0] += input_ids.numel()
        return hidden(self, input_ids, **kwargs)

    monkeypatch.setattr(Policy, "hidden", noted)
    runs = []
    for name in ("kept", "whole"):
        if name == "whole":
            monkeypatch.setattr(NativeEngine, "conversations", lambda engine: nullcontext())
        played, read[0] = Played(), 0
        data = PromptDataModule(Guess(), val_batch_size=5, limits=Limits(max_turns=6))
        options: dict[str, Any] = {
            "rewards": [EnvironmentReward()],
            "sampling": Sampling(max_new_tokens=12, stop=LETTERS),
        }
        fit(tmp_path / name, [played], trainer={"max_epochs": 2}, data=data, **options)
        assert max(scalars(tmp_path / name)["policy/logp_gap"].values()) < 1e-4
        runs.append((played.pieces, read[0]))
    (kept, few), (whole, many) = runs
    assert [piece.token_ids for piece in kept] == [piece.token_ids for piece in whole]
    for one, other in zip(kept, whole, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-4)
    assert sum(piece.drawn.count(True) > 6 for piece in kept) > 0
    assert few < many / 2
