"""Whether a policy still speaks English, measured on texts that training never sees."""

import json
import math
from pathlib import Path

import lightning as L
import torch

from grpo_lightning import GRPOModule, Policy, Prompt, Question, Rollouts, Sampling
from grpo_lightning.types import RandomKey

HERE = Path(__file__).parent
OPENING = 8
"""Tokens at the beginning of a paragraph that are given and not measured."""


class SpeaksEnglish(L.Callback):
    """Logs perplexities beside each validation, and writes answers to read when training ends.

    `english/text` is the perplexity of the paragraphs in english.txt, exp(-mean log p) per token. `english/answers` is
    that of the answers in answers.jsonl, each after its instruction: they are what the model said before training.
    At the end `answers.jsonl` in the run's folder has what it says now.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Rollouts] = {}
        self.instructions: list[str] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reads the texts."""
        policy = module_of(pl_module).policy
        paragraphs = (HERE / "english.txt").read_text(encoding="utf-8").strip().split("\n\n")
        english = [policy.tokenizer.encode(paragraph, add_special_tokens=False) for paragraph in paragraphs]
        rows = [json.loads(line) for line in (HERE / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
        self.instructions = [row["instruction"] for row in rows]
        self.texts = {
            "english/text": rollouts([ids[:OPENING] for ids in english], [ids[OPENING:] for ids in english]),
            "english/answers": rollouts(
                [chat(policy, instruction) for instruction in self.instructions],
                [policy.tokenizer.encode(row["answer"], add_special_tokens=False) for row in rows],
            ),
        }

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs the perplexities."""
        if trainer.sanity_checking or not self.texts:
            return
        policy = module_of(pl_module).policy
        for name, text in self.texts.items():
            logp = policy(text.to(policy.device)).logp
            pl_module.log(name, math.exp(-logp.double().mean().item()))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes greedy answers."""
        module = module_of(pl_module)
        prompts = [
            Prompt(number, instruction, chat(module.policy, instruction), Question(instruction, answer=""))
            for number, instruction in enumerate(self.instructions)
        ]
        sampling = Sampling(max_new_tokens=48, temperature=0.0)
        samples = module.explorer.sample(module.policy, prompts, 1, sampling, RandomKey(0, 0))
        with (Path(trainer.default_root_dir) / "answers.jsonl").open("w", encoding="utf-8") as file:
            for sample in samples:
                row = {"instruction": sample.prompt.text, "answer": sample.text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def module_of(pl_module: L.LightningModule) -> GRPOModule:
    """The module as what it is."""
    assert isinstance(pl_module, GRPOModule)
    return pl_module


def rollouts(prompts: list[list[int]], completions: list[list[int]]) -> Rollouts:
    """Each completion after its own prompt."""
    return Rollouts.from_lists(prompts, list(range(len(prompts))), completions)


def chat(policy: Policy, instruction: str) -> list[int]:
    """The token ids of an instruction in the model's chat template, up to where the answer begins."""
    turns = [{"role": "user", "content": instruction}]
    text = policy.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return policy.tokenizer.encode(text, add_special_tokens=False)
