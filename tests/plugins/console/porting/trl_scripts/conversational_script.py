"""A script for TRL with a chat template, two weighted rewards, an adapter and validation."""

from chat_rewards import right, short
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "policy"
NUM_GENERATIONS = 4


def main() -> None:
    config = GRPOConfig(
        output_dir=f"runs/{MODEL}-chat",
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=2 * NUM_GENERATIONS,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        max_completion_length=6,
        max_steps=4,
        beta=0.04,
        loss_type="dr_grpo",
        scale_rewards=False,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        reward_weights=[1.0, 0.5],
        eval_strategy="steps",
        eval_steps=2,
        report_to="tensorboard",
        use_cpu=True,
    )
    config.learning_rate = 2e-4
    data = load_dataset("json", data_files={"train": "chat.jsonl", "test": "chat_test.jsonl"})
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32", attn_implementation="sdpa")
    trainer = GRPOTrainer(
        model,
        [right, short],
        config,
        data["train"],
        data["test"],
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
