"""What a run with an environment records: turns and pieces, terms that add up, followed conversations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fast import fit
from helpers.fitting import of_updates
from helpers.guessing import Guess
from helpers.inspecting import completions_of, groups_of, inspector, sums_of_terms

from grpo_lightning import EnvironmentReward, Limits, ProcessSupervision, PromptDataModule, Sampling
from grpo_lightning.plugins.looking.inspector import read
from grpo_lightning.plugins.looking.inspector.groups import conversation_record
from grpo_lightning.plugins.looking.inspector.record import TurnRecord, path_of
from grpo_lightning.types import Conversation, Piece, UsageError

LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]
CONVERSATION = Conversation(
    messages=[
        {"role": "user", "content": "example?"},
        {"role": "assistant", "content": "example"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "add", "content": "6"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "again"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "bye"},
    ],
    pieces=[
        Piece([1, 2, 3, 4, 5, 6, 7], [False, False, True, True, False, False, True], None),
        Piece([1, 2, 9, 9, 8], [False, False, False, False, True], None),
    ],
    ends=[1, 2, 3],
    rewards=[0.25, 0.5, 1.0],
    outcome=2.0,
    num_calls=3,
    num_failed_calls=1,
)
"""Three turns in two pieces, after an example in the prompt."""


def test_turns_of_a_piece_have_their_roles_and_rewards() -> None:
    first = conversation_record(CONVERSATION, 0, [False, True, True, False, False, True])
    assert first.turns == [
        TurnRecord("prompt", 0),
        TurnRecord("assistant", 2, 0.25),
        TurnRecord("tool add, tool", 4),
        TurnRecord("assistant", 5, 0.5),
    ]
    assert (first.piece, first.num_pieces, first.closing) == (0, 2, [])
    assert (first.outcome, first.num_calls, first.num_failed_calls) == (2.0, 3, 1)


def test_a_branch_begins_with_history_and_the_last_has_the_closing_words() -> None:
    second = conversation_record(CONVERSATION, 1, [False, False, True])
    assert second.turns == [TurnRecord("history", 1), TurnRecord("assistant", 2, 1.0)]
    assert second.closing == [("user", "bye")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a game in which the policy's turns often end as the template would not end them."""
    folder = tmp_path_factory.mktemp("run")
    fit(
        folder,
        [inspector(num_samples=2)],
        {"mu": 2, "num_minibatches": 2, "max_tokens": 120},
        {"max_epochs": 2, "limit_val_batches": 1},
        data=PromptDataModule(Guess(), val_batch_size=5, limits=Limits(max_turns=3)),
        rewards=[EnvironmentReward()],
        advantage=ProcessSupervision(),
        sampling=Sampling(max_new_tokens=6, stop=LETTERS),
    )
    return folder


@pytest.mark.whole
def test_terms_of_all_pieces_sum_to_the_logged_objective(run: Path) -> None:
    updates = 0
    for record in read(run)[1:]:
        logged = of_updates(run, "policy/objective")[record.step - 1]
        sums = sums_of_terms(record)
        assert sums == pytest.approx({update: logged[update] for update in sums}, rel=1e-5, abs=1e-6)
        updates += len(sums)
    assert updates == 4


@pytest.mark.whole
def test_every_piece_has_its_turns_and_its_own_numbers(run: Path) -> None:
    branches = 0
    for record in read(run):
        for kind in ("train", "validation"):
            number = 0
            for one in completions_of(record, kind):
                talk, tokens = one.conversation, one.tokens
                assert talk.turns[-1].end == len(tokens) - 1
                number = 0 if talk.piece == 0 else number + 1
                assert talk.piece == number < talk.num_pieces
                branches += talk.piece > 0
                starts = [0, *(turn.end + 1 for turn in talk.turns)]
                for start, turn in zip(starts, talk.turns, strict=False):
                    sampled = tokens.sampled[start : turn.end + 1]
                    assert sampled.all() if turn.role == "assistant" else not sampled.any()
                    assert (turn.reward is not None) == (turn.role == "assistant")
                assert talk.turns[0].role == ("history" if talk.piece else "assistant")
                assert (np.isfinite(tokens.after_logp) == tokens.sampled).all()
                policy_turns = [turn for turn in talk.turns if turn.role == "assistant"]
                ends, rewards = zip(*one.segments["environment_reward"], strict=True)
                assert [*ends] == [turn.end for turn in policy_turns]
                assert rewards == pytest.approx([turn.reward for turn in policy_turns])
    assert branches > 0


@pytest.mark.whole
def test_prompts_are_followed_through_their_conversations(run: Path) -> None:
    records = read(run)
    assert [record.step for record in records] == [0, 1, 2]
    for record in records:
        groups = groups_of(record, "validation")
        assert [group.prompt_id for group in groups] == [0, 1]
        for group in groups:
            whole = [one for one in group.completions if one.conversation and not one.conversation.piece]
            assert [one.greedy for one in whole] == [True, False, False]
            drawn = [one.reward for one in whole if not one.greedy]
            assert group.mean == pytest.approx(sum(drawn) / 2), "a branch is no answer of its own"
            assert group.prompt == "guess"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": [{"role": "user"}]}, "no record of a step .*'end'"),
        ({"closing": [["user"]]}, "no record of a step"),
    ],
)
def test_a_broken_conversation_is_named(run: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    head, line, *_ = path_of(run, 2).read_text().splitlines()
    row = json.loads(line)
    row["completions"][0]["conversation"] |= change
    path_of(tmp_path, 2).parent.mkdir()
    path_of(tmp_path, 2).write_text(f"{head}\n{json.dumps(row)}\n")
    with pytest.raises(UsageError, match=message):
        read(tmp_path)
