"""Makes a tiny policy that sees: a LLaVA of one patch per square, which counts red squares in the first two rows.

It is trained for a minute on pictures of nine squares. Every answer is the number of red squares in the first two rows
and, for the last row, a random number from 0 to 3. So a quarter of its samples are right, and nothing has ever shown it
that the last row matters. GRPO can teach it to look there: some of its guesses are right, and those depend on the row.

    python tools/make_seeing_policy.py --out examples/images/policy
"""

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from make_tiny_policy import BATCH, LEARNING_RATE, command_line, make_tokenizer
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from images import PIXELS, SIDE, RedSquares

from grpo_lightning.types import Question

IMAGE = "<image>"
SIZE = {"height": SIDE * PIXELS, "width": SIDE * PIXELS}
NUM_SEEN = SIDE * (SIDE - 1)
"""Squares of the rows that it is taught to look at."""


def make_processor() -> LlavaProcessor:
    """A token for each character, and the pixels as they are, from -1 to 1."""
    tokenizer = make_tokenizer([IMAGE])
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    images = CLIPImageProcessorPil(
        size=SIZE, crop_size=SIZE, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def make_model(processor: LlavaProcessor, hidden: int, layers: int) -> LlavaForConditionalGeneration:
    """A blank LLaVA in float32: a CLIP of one layer, and a Llama with heads of 32."""
    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE * PIXELS,
        patch_size=PIXELS,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def answer_of(question: Question, rng: random.Random) -> str:
    """The number of red squares, guessed in the last row."""
    num_red = question.metadata["colours"][:NUM_SEEN].count("red") + rng.randint(0, SIDE)
    return f"<answer>{num_red}</answer>"


def inputs_of(processor: LlavaProcessor, questions: Sequence[Question], answers: Sequence[str]) -> Any:
    """What the model reads: the picture, the question, and the beginning of an answer."""
    texts = [IMAGE + question.text + answer for question, answer in zip(questions, answers, strict=True)]
    images = [[*question.images] for question in questions]
    return processor(text=texts, images=images, return_tensors="pt", padding=True)


def train(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    questions: Sequence[Question],
    updates: int,
    rng: random.Random,
) -> None:
    """Supervised training in place.

    Args:
        model: Blank.
        processor: Its processor.
        questions: Of `RedSquares`.
        updates: Updates of the weights.
        rng: Draws questions and guesses.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=updates, pct_start=0.15)
    start_id = processor.tokenizer.convert_tokens_to_ids("<answer>")
    model.train()
    for _ in range(updates):
        batch = rng.choices(questions, k=BATCH)
        answers = [answer_of(question, rng) + processor.tokenizer.eos_token for question in batch]
        inputs = inputs_of(processor, batch, answers)
        # All texts have one length.
        start = int(inputs["input_ids"][0].eq(start_id).nonzero())
        labels = inputs["input_ids"].clone()
        labels[:, :start] = -100
        loss = model(**inputs, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.inference_mode()
def accuracies(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, questions: Sequence[Question]
) -> tuple[float, float]:
    """Fraction of right numbers after `<answer>`, greedily and sampled."""
    logits = model(**inputs_of(processor, questions, ["<answer>"] * len(questions)), use_cache=False).logits[:, -1]
    golds = torch.tensor(processor.tokenizer.convert_tokens_to_ids([question.answer for question in questions]))
    probabilities = logits.softmax(-1).gather(1, golds[:, None])
    return float((logits.argmax(-1) == golds).float().mean()), float(probabilities.mean())


def make(
    out: Path,
    seed: int = 0,
    updates: PositiveInt = 500,
    hidden: PositiveInt = 64,
    layers: PositiveInt = 2,
) -> None:
    """Makes a tiny policy that counts red squares, and guesses in the last row: a model and its processor.

    Args:
        out: Folder to save it in.
        seed: Seed of weights and training data.
        updates: Updates of the weights, 32 pictures each.
        hidden: Width of the model, a multiple of 64.
        layers: Depth of the model.
    """
    start = time.perf_counter()
    torch.manual_seed(seed)
    task = RedSquares()
    processor = make_processor()
    model = make_model(processor, hidden, layers)
    train(model, processor, task.questions("train"), updates, random.Random(seed))
    model.save_pretrained(out)
    processor.save_pretrained(out)
    greedy, sampled = accuracies(model, processor, task.questions("val"))
    print(f"{out}: {model.num_parameters() / 1e6:.2f} M parameters, {time.perf_counter() - start:.0f} s")
    print(f"held-out pictures: greedy {greedy:.3f}, sampled at temperature 1 {sampled:.3f}")


def main(args: list[str] | None = None) -> None:
    """The command line."""
    command_line(make, args)


if __name__ == "__main__":
    main()
