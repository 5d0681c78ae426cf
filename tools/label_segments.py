"""Labels the segments of completions by the answers they lead to: training data for a process model.

python tools/label_segments.py --rows runs/.../predictions.jsonl --policy grpo_lightning:tiny_policy --out labels.jsonl

The labels of Math-Shepherd (arXiv 2312.08935): the policy completes the prefix up to the end of each segment N times. A
segment is right (hard label) if any of these completions reaches the gold answer; its fraction (soft label) is how many
of them do. The last segment is judged by the completion itself. The input is what `grpo predict` writes: question,
answer, completion. A row of the output has `prompt`, `completions` (the segments) and `labels` (hard), as TRL's
PRMTrainer reads them, and `fractions` (soft).
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt

from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.plugins.rewards.process.process_reward import ByPattern, last_tokens
from grpo_lightning.plugins.rewards.verifier.math_verifier import MathVerifier
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Completion, FinishReason, Prompt, Question, RandomKey, Request, Sample, Status

ROWS_AT_ONCE = 64
MAX_SEGMENTS = 1000


@dataclass
class Solution:
    """A completion cut into segments."""

    prompt: Prompt
    text: str
    prefixes: list[list[int]]
    """Token ids of the completion up to the end of each segment but the last."""
    segments: list[str]


def read(row: dict[str, Any], index: int, ends: Sequence[int], policy: Policy, template: str) -> Solution:
    """The completion of one row, cut between tokens, so that every prefix consists of the tokens that were written.

    Args:
        row: Has `question`, `answer` and `completion`.
        index: Index of the row, which keys the draws.
        ends: Indices of the characters after each segment.
        policy: Gives its tokenizer.
        template: The prompt, with `{question}` in place of the question.
    """
    question = Question(row["question"], row["answer"], row.get("source", f"row {index}"))
    prompt, text = template.replace("{question}", question.text), row["completion"]
    token_ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = sorted(set(last_tokens(policy.tokenizer, token_ids, text, ends[:-1])) - {len(token_ids) - 1})
    prefixes = [token_ids[: token + 1] for token in tokens[: MAX_SEGMENTS - 1]]
    cuts = [len(decoded(policy, prefix)) for prefix in prefixes]
    segments = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return Solution(Prompt(index, prompt, policy.tokenizer(prompt)["input_ids"], question), text, prefixes, segments)


def decoded(policy: Policy, token_ids: Sequence[int]) -> str:
    """The text of a completion, decoded as by the explorer."""
    (text,) = policy.tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
    return text


def label_prefixes(
    solutions: Sequence[Solution],
    policy: Policy,
    engine: RolloutEngine,
    verifier: Reward,
    sampling: Sampling,
    num_completions: int = 8,
    seed: int = 0,
) -> list[list[float]]:
    """For each segment of each solution the fraction of completions from its end that reach the gold answer.

    The last segment is not completed: its fraction is 1 if the solution is right, else 0.
    """
    prefixes = [
        Prompt(
            solution.prompt.id * MAX_SEGMENTS + segment,
            solution.prompt.text + decoded(policy, prefix),
            solution.prompt.token_ids + prefix,
            solution.prompt.question,
        )
        for solution in solutions
        for segment, prefix in enumerate(solution.prefixes)
    ]
    engine.sync(policy)
    requests = Request.from_prompts(prefixes, num_completions)
    drawn = iter(engine.complete(requests, sampling, RandomKey(seed, 0)) if requests else [])
    samples = [
        continued(solution.prompt, prefix, completion, policy)
        for solution in solutions
        for prefix in solution.prefixes
        for completion in islice(drawn, num_completions)
    ]
    samples += [Sample(solution.prompt, solution.text, [], FinishReason.STOP) for solution in solutions]
    right = iter([float(value > RIGHT_ABOVE) for value in verifier(samples).value])
    fractions = [
        [sum(islice(right, num_completions)) / num_completions for _ in solution.prefixes] for solution in solutions
    ]
    return [[*own, outcome] for own, outcome in zip(fractions, right, strict=True)]


def continued(prompt: Prompt, prefix: list[int], completion: Completion, policy: Policy) -> Sample:
    """The prefix and its continuation by the engine, as one completion of the prompt."""
    token_ids = prefix + completion.token_ids
    written = token_ids[:-1] if completion.finish_reason is FinishReason.STOP else token_ids
    return Sample(prompt, decoded(policy, written), token_ids, completion.finish_reason)


def label(
    rows: Path,
    policy: str,
    out: Path,
    num_completions: PositiveInt = 8,
    pattern: str = r"\n",
    template: str = "{question}",
    max_new_tokens: PositiveInt = 256,
    temperature: float = 1.0,
    seed: int = 0,
) -> None:
    """Labels the segments of completions by the answers they lead to; a row that the splitter fails on is left out.

    Args:
        rows: JSON lines with question, answer and completion, as `grpo predict` writes.
        policy: Folder or hub id of the model that completes.
        out: JSON lines to write.
        num_completions: N, completions per prefix.
        pattern: Regular expression after whose matches a segment ends.
        template: The prompt, as in data.template of the run.
        max_new_tokens: Most tokens of a completion.
        temperature: Temperature of the completions.
        seed: Seed of the completions.
    """
    given = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines() if line.strip()]
    model = Policy(policy)
    model.load()
    model.model.eval()
    engine, verifier, splitter = NativeEngine(), MathVerifier(), ByPattern(pattern)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
    count = 0
    with ExitStack() as stack, out.open("w", encoding="utf-8") as file:
        for part in (engine, verifier, splitter):
            stack.callback(part.close)
        for first in range(0, len(given), ROWS_AT_ONCE):
            some = given[first : first + ROWS_AT_ONCE]
            cuts = splitter([row["completion"] for row in some])
            solutions = [
                read(row, index, cut.value, model, template)
                for index, (row, cut) in enumerate(zip(some, cuts, strict=True), first)
                if cut.status == Status.OK and row["completion"]
            ]
            labels = label_prefixes(solutions, model, engine, verifier, sampling, num_completions, seed)
            for solution, fractions in zip(solutions, labels, strict=True):
                labelled = {
                    "prompt": solution.prompt.text,
                    "completions": solution.segments,
                    "labels": [fraction > 0 for fraction in fractions],
                    "fractions": fractions,
                }
                file.write(json.dumps(labelled, ensure_ascii=False) + "\n")
                count += 1
    print(f"{out}: {count} of {len(given)} completions")


def main(args: list[str] | None = None) -> None:
    """The command line."""
    auto_cli(label, args, as_positional=False)


if __name__ == "__main__":
    main()
