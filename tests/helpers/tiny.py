"""Tiny things to test with: random causal LMs of several architectures, a tokenizer, prompts, rollouts."""

import math
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from grpo_lightning import Compute, FinishReason, Policy, Prompt, Question, Request, Rollouts, Sample
from grpo_lightning.command.overview import optional

COMPUTES: list[type[Any]] = [kind for kind in (optional("Fast"), Compute) if kind]
"""The first is the default of the command line: the core's own where there are no plugins."""
SHAPES = ("llama", "qwen2", "qwen3", "gpt2")
VOCABULARY = 64
STOP_IDS = (3, 5)
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<sep>", "<end>")
"""Ids 0 to 5: 3 and 5 end a completion."""
CONTEXT = 128


def tokenizer() -> PreTrainedTokenizerFast:
    """One character a token, `0` is id 6; 64 tokens in all."""
    characters = (string.digits + string.ascii_letters)[: VOCABULARY - len(SPECIAL)]
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate([*SPECIAL, *characters])}, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return with_special(backend)


def with_special(backend: Tokenizer, **kwargs: Any) -> PreTrainedTokenizerFast:
    """The backend as a tokenizer of transformers that knows what the tokens of SPECIAL are for."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<end>",
        additional_special_tokens=["<eos>", "<sep>"],
        **{"clean_up_tokenization_spaces": False} | kwargs,
    )


def model_of(shape: str, seed: int = 0, scale: float = 0.2, **overrides: Any) -> PreTrainedModel:
    """Two layers of width 32 in float32 and eval mode. `scale` makes some tokens far likelier than others.

    Args:
        shape: Model type of transformers, such as `llama`.
        seed: Of the weights.
        scale: Standard deviation of the matrices.
        **overrides: Further keys of the config.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    if shape == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    if shape in ("qwen3", "gemma2", "gemma3_text"):
        sizes["head_dim"] = 16
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": list(STOP_IDS)}
    config = AutoConfig.for_model(shape, **{"vocab_size": VOCABULARY} | sizes | ids | overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if shape == "gemma2" else "sdpa")
    return randomised(model, seed, scale)


@torch.no_grad()
def randomised(model: PreTrainedModel, seed: int, scale: float) -> PreTrainedModel:
    """The model with random weights and in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(scale * noise)
        else:  # Norms and biases, which a new model has at 1 and 0, where mistakes hide.
            parameter.add_(0.1 * noise)
    return model.eval()


def policy_of(
    shape: str = "llama", seed: int = 0, scale: float = 0.2, compute: type[Compute] = Compute, **overrides: Any
) -> Policy:
    """A policy around `model_of`."""
    return Policy.from_model(model_of(shape, seed, scale, **overrides), tokenizer(), compute=compute())


def read_policy(folder: Path | str, **settings: Any) -> Policy:
    """The policy in a folder, as a run reads it."""
    policy = Policy(str(folder), **settings)
    policy.load()
    return policy


def without_end(policy: Policy) -> Policy:
    """The policy, which no token stops any more."""
    policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = policy.tokenizer.eos_token = None
    return policy


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    """Prompts of random characters with ids 10, 20, ..."""
    generator = torch.Generator().manual_seed(seed)
    spell: PreTrainedTokenizerBase = tokenizer()
    prompts = []
    for number, length in enumerate(lengths, start=1):
        ids = torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator).tolist()
        text = spell.decode(ids)
        prompts.append(Prompt(10 * number, text, ids, Question(text, answer=str(number), source=f"tiny:{number}")))
    return prompts


def samples_of(*texts: str) -> list[Sample]:
    """Completions of one prompt, whose gold answer is 1; they say that they are two tokens long."""
    return [Sample(prompts_of([3])[0], text, [7, 7], FinishReason.STOP) for text in texts]


def requests_of(lengths: Sequence[int], group_size: int, seed: int = 0) -> list[Request]:
    """Requests for completions of `prompts_of`."""
    return Request.from_prompts(prompts_of(lengths, seed), group_size)


def rollouts_of(
    lengths: Sequence[int],
    prompt_lengths: Sequence[int] = (3,),
    group: Sequence[int] | None = None,
    seed: int = 0,
    given: float = 0.0,
) -> Rollouts:
    """Random rollouts with every field set: probabilities and weights in (0, 1), normal advantages.

    Args:
        lengths: [B] |o_i|, drawn tokens.
        prompt_lengths: [Q].
        group: [B] prompt of each completion; by default they take turns.
        seed: Of everything that is random.
        given: Given tokens per drawn one, about; where they are is random. The drawn ones are the same whatever it is.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(len(SPECIAL), VOCABULARY, (count,), generator=generator).tolist()

    def uniform() -> Tensor:
        return torch.rand(sum(lengths), generator=generator) * 0.98 + 0.01

    prompts, completions = [ids(length) for length in prompt_lengths], [ids(length) for length in lengths]
    drawn = [[True] * length for length in lengths]
    rng = random.Random(seed)
    for own, flags in zip(completions, drawn, strict=True):
        for _ in range(round(given * len(own) * rng.choice([0.0, 1.0, 2.0]))):
            index = rng.randrange(len(own) + 1)
            own.insert(index, rng.randrange(len(SPECIAL), VOCABULARY))
            flags.insert(index, False)
    rollouts = Rollouts.from_lists(
        prompts=prompts,
        group=[row % len(prompt_lengths) for row in range(len(lengths))] if group is None else group,
        completions=completions,
        is_sampled=drawn,
    )
    rollouts.advantage = torch.randn(len(lengths), generator=generator).repeat_interleave(rollouts.lengths)
    rollouts.weight = uniform()
    rollouts.old_logp = uniform().log()
    rollouts.ref_logp = uniform().log()
    rollouts.sampler_logp = uniform().log()
    rollouts.truncated = torch.rand(len(lengths), generator=generator) < 0.5
    rollouts.add_columns({"entropy_rank": uniform(), "logp_low": uniform().log(), "logp_high": uniform().log()})
    return rollouts


def branching_rollouts(seed: int = 0, num_groups: int = 3, group_size: int = 6) -> Rollouts:
    """`rollouts_of` four tokens only, so that completions of a group begin alike.

    π_old is one distribution after each prefix. Advantages are the same for a whole completion, and often 0.
    """
    rng = random.Random(seed)
    after: dict[tuple[int, ...], list[float]] = {}
    completions, old_logp, advantage = [], [], []
    for row in range(num_groups * group_size):
        path: list[int] = []
        for _ in range(rng.randrange(1, 6)):
            key = (row % num_groups, *path)
            if key not in after:
                sizes = [rng.random() ** 3 + 0.01 for _ in range(4)]
                after[key] = [size / sum(sizes) for size in sizes]
            token = rng.choices(range(4), after[key])[0]
            old_logp.append(math.log(after[key][token]))
            path.append(token)
        completions.append(path)
        advantage.append(rng.choice([-1.0, 0.0, 1.0, 0.5, rng.gauss(0, 1)]))
    rollouts = rollouts_of([len(path) for path in completions], prompt_lengths=[3] * num_groups, seed=seed)
    rollouts.token_ids = torch.tensor([len(SPECIAL) + token for path in completions for token in path])
    rollouts.advantage = torch.tensor(advantage).repeat_interleave(rollouts.lengths)
    rollouts.old_logp = torch.tensor(old_logp)
    del rollouts.columns["logp_low"], rollouts.columns["logp_high"]
    return rollouts


def rows_of(rollouts: Rollouts) -> list[dict[str, Any]]:
    """What `rollouts` say, as one plain dict per completion: lists and ints, the prompt written out."""
    prompts = rollouts.prompt_token_ids.split(rollouts.prompt_lengths.tolist())
    context = rollouts.context
    contexts = context.ids.split(context.lengths.tolist()) if context else []
    tokens = dict.fromkeys(Rollouts.NAMES) | rollouts.columns | {"token_ids": rollouts.token_ids}
    tokens["position"] = context.position if context else None
    rows: list[dict[str, Any]] = []
    start = 0
    for number, length in enumerate(rollouts.lengths.tolist()):
        row: dict[str, Any] = {
            "row": int(rollouts.sample_index[number]),
            "truncated": bool(rollouts.truncated[number]),
            "prompt": prompts[int(rollouts.group[number])].tolist(),
        }
        for name, values in tokens.items():
            row[name] = None if values is None else values[start : start + length].tolist()
        if context is None:
            row["position"] = list(range(length))
        row["context"] = contexts[number].tolist() if contexts else []
        rows.append(row)
        start += length
    assert start == rollouts.num_tokens
    return rows


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """[R, V] float64 log-probs before each completion token, from a forward over one unpadded sequence."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0].double()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def forced_logp(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """[R] float64 log-probs of the completion's tokens, likewise."""
    logp = teacher_forced(model, prompt, completion, temperature)
    return logp.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def gradients(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The gradient of every parameter, 0 where there is none."""
    for name, parameter in module.named_parameters():
        yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
