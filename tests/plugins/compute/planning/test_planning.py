"""The memory of a run: numbers worked out by hand, what a real pass holds, and what `grpo plan` and a fit print."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.fast import policy_of
from helpers.fitting import Digits, grouped
from helpers.paths import ROOT
from helpers.tiny import model_of, rollouts_of, tokenizer

from grpo_lightning import Fast, GRPOLoop, GRPOModule, LoRA, NativeEngine, Objective, Policy, Validation
from grpo_lightning.cli import run
from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.maths.kl import K2
from grpo_lightning.plugins.compute.planning import memory
from grpo_lightning.plugins.compute.planning import plan_report as report
from grpo_lightning.plugins.compute.planning.memory import (
    Devices,
    LiveBytes,
    Plan,
    peak_of,
    remedies,
    state_ratio,
    without_numbers,
)
from grpo_lightning.plugins.engines.scripted.scripted_engine import ScriptedEngine
from grpo_lightning.plugins.methods.distillation.full_vocabulary import FullVocabulary
from grpo_lightning.plugins.methods.distillation.self_teacher import SelfTeacher
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.training.lightning_machine import LightningMachine

# tiny.py's Llama: embedding and head; queries, output, keys, values, MLP and norms of two layers; the last norm.
PARAMETERS = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
BUFFERS = 2 * 4 * 4  # RoPE's four frequencies, twice in float32
WEIGHTS = 4 * PARAMETERS + BUFFERS
CACHE = 2 * 2 * 2 * 8 * 4  # keys and values of two layers with two heads of eight float32 for a token
LOGITS = 4 * 64 * 4  # four float32 tensors over the vocabulary, for a row that is decoded
# Rank 4 beside queries, output, keys, values and MLP of two layers.
ADAPTER = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))


def plan_of(devices: Any = None, loop: Any = None, validated: int = 0, **changes: Any) -> Plan:
    """Four prompts of 10 tokens, four completions each of at most 20."""
    options: dict[str, Any] = {"sampling": Sampling(max_new_tokens=20), "policy": policy_of()} | changes
    module = GRPOModule(rewards=[Digits()], **grouped({"engine": NativeEngine()} | options))
    sizes: dict[str, Any] = {"group_size": 4, "prompts_per_step": 4, "max_tokens": 0} | (loop or {})
    return Plan(module, GRPOLoop(**sizes), devices or Devices(process=1000), 10, validated)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are not rehearsed: 100 bytes per token, and 10 times as many with a backward."""
    made = {True: 1000, False: 100}
    monkeypatch.setattr(
        memory, "peak_of", lambda fake, micro_batch, way, *_: len(micro_batch.all_token_ids) * made[way]
    )


def unread(**settings: Any) -> Policy:
    how = inspect.signature(Fast).parameters.keys() & settings.keys()
    policy = Policy("unread", compute=Fast(**{name: settings.pop(name) for name in how}), **settings)
    policy.config = policy_of().config
    return policy


def rows_of(*args: Any, **changes: Any) -> dict[str, tuple[float, ...]]:
    """Bytes in each phase, by the name of the row."""
    return {name: values for name, values, _ in plan_of(*args, **changes).rows}


def test_the_rows_of_a_tiny_model_by_hand(quick: None) -> None:
    plan = plan_of(objective=Objective(beta=0.1))
    rows = {name: values for name, values, _ in plan.rows}
    assert rows["weights"] == rows["frozen copies"] == (WEIGHTS, WEIGHTS, WEIGHTS)
    assert rows["gradients"] == (0, 0, 4 * PARAMETERS)
    assert rows["optimizer"] == (8 * PARAMETERS,) * 3 and rows["process"] == (1000,) * 3
    assert rows["key-value cache"] == (16 * (30 * CACHE + LOGITS), 0, 0)
    assert plan.sums[2] == sum(values[2] for values in rows.values()) == max(plan.sums) and plan.phase == "updating"
    assert plan.passes == (360, 16, 36_000, 360_000) and plan.passes[0] == 4 * 10 + 16 * 20
    assert rows["activations, logits"] == (36_000, 36_000, 360_000)
    # One group of the longest has 90 tokens; two of half as long completions have 2 x (10 + 4 x 10).
    assert plan_of(loop={"max_tokens": 100}).passes == (100, 8, 10_000, 100_000)


def test_types_of_weights_and_cache(quick: None) -> None:
    names = (("64-true", 8, 8), ("bf16-mixed", 4, 2), ("bf16", 4, 2))  # bytes of a weight, and of a number in the cache
    types: list[Any] = [({"devices": Devices(precision=name)}, *sizes) for name, *sizes in names]
    for changes, weight, cache in [({"policy": unread(dtype="bfloat16")}, 2, 2), *types]:
        rows = rows_of(**changes)
        assert rows["gradients"][2] == weight * PARAMETERS
        assert rows["key-value cache"][0] == 16 * (30 * CACHE * cache // 4 + LOGITS)


def test_only_an_adapter_has_gradients_and_optimizer_state(quick: None) -> None:
    rows = rows_of(policy=unread(dtype="bfloat16", adapter=LoRA(rank=4)))
    assert rows["weights"][0] == 2 * PARAMETERS + 4 * ADAPTER + BUFFERS  # float32 beside weights of another type
    assert (rows["gradients"][2], rows["optimizer"][0]) == (4 * ADAPTER, 8 * ADAPTER)


def test_pieces_of_the_heap_are_counted_for_an_adapter_on_a_cpu(quick: None) -> None:
    def pieces(kind: str, adapter: LoRA | None) -> tuple[float, ...]:
        return rows_of(Devices(kind), policy=unread(adapter=adapter)).get("pieces of the heap", ())

    assert pieces("cpu", LoRA(rank=4)) == (0, 0, 0.6 * 360_000)
    assert pieces("cuda", LoRA(rank=4)) == pieces("cpu", None) == ()


def test_copies_for_sampling_are_counted(quick: None) -> None:
    linear = PARAMETERS - 64 * 32 - 5 * 32  # the head, but neither the embedding nor the norms
    adapted = unread(dtype="bfloat16", adapter=LoRA(rank=4))
    mixed: list[Any] = [Devices("cpu", precision="bf16-mixed"), Devices("cuda", precision="16-mixed")]
    for devices in mixed:
        copied = rows_of(devices)["copies for sampling"]
        assert copied == (2 * linear, 0, 0)
    made: list[Any] = [
        ({"policy": adapted, "devices": Devices("cuda", precision="bf16-mixed")}, 2 * ADAPTER),
        ({"policy": unread(dtype="bfloat16", float32_head=True), "devices": Devices("cuda")}, 4 * 64 * 32),
        ({"engine": NativeEngine(dtype="bfloat16"), "devices": Devices("cuda")}, 2 * linear),
        ({"engine": NativeEngine(packed=True)}, 4 * linear),
    ]
    for changes, copied in made:
        assert rows_of(**changes)["copies for sampling"] == (copied, 0, 0)
    for changes in ({}, {"policy": adapted}, {"engine": ScriptedEngine([]), "devices": mixed[0]}):
        assert "copies for sampling" not in rows_of(**changes)


def test_shards_are_gathered_and_replicas_exchange_gradients(quick: None) -> None:
    rows = rows_of(Devices(count=4, strategy="fsdp2"))
    assert (rows["weights"][0], rows["gradients"][2]) == (WEIGHTS / 4, PARAMETERS)
    # Of two layers both are gathered at once: all weights, and in the backward pass their gradients.
    assert rows["gathered weights"] == (WEIGHTS * 3 / 4, WEIGHTS, WEIGHTS + 4 * PARAMETERS)
    assert rows["key-value cache"][0] == 4 * (30 * CACHE + LOGITS)  # one prompt on each
    replicas = rows_of(Devices(count=2, strategy="ddp"))
    assert (replicas["weights"][0], replicas["gradients"][2]) == (WEIGHTS, 8 * PARAMETERS)


def test_states_of_an_optimizer() -> None:
    made: list[Any] = [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adafactor(p), (64 + 96) / (64 * 96)),  # a row and a column of 64 x 96
    ]
    for optimizer, ratio in made:
        assert state_ratio(optimizer, torch.float32) == pytest.approx(ratio)


def test_rows_decoded_at_once() -> None:
    made: list[Any] = [
        ({"engine": NativeEngine(max_rows=9)}, 9, 30),
        ({"engine": NativeEngine(max_cache_gib=13.5 * (30 * CACHE + LOGITS) / 2**30)}, 13, 30),
        ({"validated": 3}, 24, 30),
        ({"validated": 3, "validation": Validation(sampling=ValidationSampling(max_new_tokens=80))}, 24, 90),
        ({"engine": ScriptedEngine([])}, 0, 0),  # of an engine elsewhere nothing is known
    ]
    for changes, rows, tokens in made:
        assert plan_of(**changes).decoding == (rows, tokens, rows * (tokens * CACHE + LOGITS))


def truly_held(policy: Policy, backward: bool, autocasts: bool, kl: Any = None, teacher: Any = None) -> int:
    """The peak of a real forward, and backward, over tensors with numbers; and of what `kl` reads of a teacher."""
    policy.train(backward)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter) if backward and parameter.requires_grad else None
    grads = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    others = [*teacher.parameters(), *teacher.buffers()] if teacher else []
    live = LiveBytes([*policy.parameters(), *policy.buffers(), *grads, *others])
    with live, torch.autocast("cpu", torch.bfloat16, enabled=autocasts), torch.set_grad_enabled(backward):
        scored = policy(a_micro_batch(), read=kl and kl.reading(teacher, policy, a_micro_batch()))
        if backward:
            (scored.logp + scored.entropy + (scored.read if kl else 0)).sum().backward()
        del scored
    return live.peak


def a_micro_batch() -> Any:
    return rollouts_of([40, 12, 3, 25, 25], prompt_lengths=[9, 5], group=[0, 0, 0, 1, 1], given=0.2)


HELD: list[Any] = [
    ("gpt2", {"gradient_checkpointing": True}, False),
    ("qwen3", {}, True),
    ("llama", {"fused": False, "adapter": LoRA(rank=4, dora=True)}, False),
]


@pytest.mark.parametrize("attention", ["sdpa", "kernels-community/flash-attn2"])
def test_prompts_are_shared_under_sdpa_alone(attention: str) -> None:
    policy = Policy("grpo_lightning:tiny_policy", compute=Fast(attention=attention))
    assert without_numbers(policy, torch.float32, "cpu").compute.shares_prefix is (attention == "sdpa")


@pytest.mark.parametrize(("shape", "settings", "autocasts"), HELD)
def test_a_policy_without_numbers_holds_what_it_holds(shape: str, settings: dict[str, Any], autocasts: bool) -> None:
    with LiveBytes() as live:
        first = torch.zeros(100)
        second = first.view(10, 10) + 1
        del first, second
    assert (live.live, live.peak) == (0, 800)
    compute = Fast(**{name: value for name, value in settings.items() if name != "adapter"})
    policy = Policy.from_model(model_of(shape), tokenizer(), settings.get("adapter"), compute)
    fake = without_numbers(policy, torch.float32, "cpu")
    for backward in (True, False):
        found = peak_of(fake, a_micro_batch(), backward, autocasts)
        assert found == pytest.approx(truly_held(policy, backward, autocasts), rel=0.03), backward
    assert policy.model is not fake.model and all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("kl", [FullVocabulary(), FullVocabulary("jensen_shannon", top_k=8)], ids=["all", "top"])
def test_a_teacher_without_numbers_holds_what_it_holds(kl: FullVocabulary, tmp_path: Path) -> None:
    """Its states and both models' logits, which an update has beside the policy's own forward and backward."""
    policy = policy_of()
    policy_of(seed=1, hidden_size=96).save_pretrained(tmp_path / "teacher")
    teacher = Teacher(str(tmp_path / "teacher"))
    teacher.refresh(policy)
    fake = without_numbers(policy, torch.float32, "cpu")
    other = without_numbers(teacher.policy, torch.float32, "cpu", beside=fake)
    found = peak_of(fake, a_micro_batch(), True, False, False, kl, other)
    assert found == pytest.approx(truly_held(policy, True, False, kl, teacher), rel=0.03)
    assert found > 1.05 * peak_of(fake, a_micro_batch(), True, False)


def test_a_teacher_is_counted_before_it_is_read(quick: None, tmp_path: Path) -> None:
    policy_of(seed=1, hidden_size=96).save_pretrained(tmp_path / "teacher")
    whole = sum(one.nbytes for one in policy_of(hidden_size=96).parameters()) + 2 * 4 * 24 // 2  # RoPE's frequencies
    teacher, objective = Teacher(str(tmp_path / "teacher")), Objective(kl=K2(), beta=1.0)
    rows = rows_of(objective=objective, reference=teacher)
    assert rows["teachers"] == (whole,) * 3 and "frozen copies" not in rows and not teacher.exists
    half = Teacher(str(tmp_path / "teacher"), dtype="bfloat16")
    assert rows_of(objective=objective, reference=half)["teachers"][0] == pytest.approx(whole / 2, rel=0.01)
    sharded = rows_of(Devices(count=4, strategy="fsdp2"), objective=objective, reference=teacher)
    assert sharded["teachers"] == (whole / 4, whole / 4 + whole, whole / 4 + whole)  # both layers at once
    told = SelfTeacher(snapshot=FrozenCopy())
    assert rows_of(objective=objective, reference=told)["frozen copies"][0] == WEIGHTS


def test_a_remedy_saves_what_it_says_and_leaves_the_run_as_it_is(quick: None) -> None:
    plan = plan_of(Devices(count=4, strategy="ddp"), loop={"prompts_per_step": 32}, policy=unread())
    found = dict(line.split(" saves ") for line in remedies(plan, "updating"))
    order = "trainer.strategy loop.max_tokens model.policy.compute.gradient_checkpointing trainer.precision "
    positions = [(order + "model.policy.adapter").index(text.split("=")[0]) for text in found]
    assert positions == sorted(positions)
    key = next(key for key in found if key.startswith("loop.max_tokens="))
    fewer = plan.changed("loop.max_tokens", int(key.split("=")[1]))
    assert found[key] == f"{(plan.sums[2] - fewer.sums[2]) / 2**20:.1f} MiB" and fewer.sums[2] < plan.sums[2]
    assert plan.loop.max_tokens == 0 and plan.trainer.strategy == "ddp" and plan.policy.adapter is None
    assert any("max_cache_gib=" in line for line in remedies(plan_of(loop={"prompts_per_step": 64}), "exploring"))
    assert not any("max_cache_gib=" in line for line in remedies(plan_of(engine=ScriptedEngine([])), "exploring"))


def test_a_plan_says_what_a_run_would_hold_and_writes_nothing(grpo: Grpo, quick: None) -> None:
    before = list(Path().rglob("*"))
    out = grpo.ok("plan")
    assert "longest prompt 1 tokens" in out and "it fits" in out
    Path("rows.jsonl").unlink()
    options = ("--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.num_nodes=2", "--trainer.strategy=fsdp2")
    code, _, errors = grpo("plan", *options)
    assert code == 2 and "rows.jsonl" in errors
    out = grpo.ok("plan", *options, "--loop.prompts_per_step=16", "--prompt_tokens=512")
    assert "longest prompt 512 tokens" in out
    assert "of 16 shards" in out and "CUDA context" in out and "give --memory_gib to compare" in out
    out = grpo.ok("plan", "--memory_gib=0.001", "--prompt_tokens=30", "--trainer.precision=32")
    assert "longest prompt 30 tokens" in out and "it does not fit 1.0 MiB" in out
    assert "  loop.max_tokens=" in out
    assert {*Path().rglob("*")} < {*before}


def test_mistakes_in_a_plan(grpo: Grpo, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"memory_gib": 0, "trainer.strategy": "x", "loop.group_size": 1}.items():
        code, _, errors = grpo("plan", f"--{key}={value}")
        assert code == 2 and f"{key}=" in errors and "Traceback" not in errors
    monkeypatch.setattr(memory, "peak_of", lambda *args: [][0])
    code, _, errors = grpo("plan")
    assert code == 2 and "the memory of llama cannot be planned (list index out of range)" in errors


def test_a_fit_says_what_it_holds(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(report, "rank_zero_info", said.append)
    options = ("--trainer.limit_val_batches=0", "--loop.group_size=8", "--prompt_tokens=1")
    grpo.ok("fit", "--memory.show=true", *options[:2])
    _, planned, _ = grpo("plan", *options)
    activations = [line for line in said[0].splitlines() if "activations" in line]
    assert activations == [line for line in planned.splitlines() if "activations" in line]  # it agrees with `grpo plan`
    assert len(said) == 1


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 9 bytes"


def failing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(ALLOCATOR)


@pytest.mark.usefixtures("quick")
def test_out_of_memory_ends_with_phase_table_and_key(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    update = (LightningMachine, "backward", "updating", "loop.max_tokens=")
    for owner, name, phase, key in (update, (NativeEngine, "generate", "exploring", "max_cache_gib=")):
        monkeypatch.setattr(owner, name, failing)
        options = ("--trainer.limit_val_batches=0", "--loop.prompts_per_step=64", f"--trainer.default_root_dir={phase}")
        code, _, errors = grpo("fit", "--model.sampling.max_new_tokens=60", *options)
        assert code == 1 and "Traceback" not in errors
        first, second, *table, helps = errors[errors.index("grpo: error: out of memory") :].splitlines()
        assert "can't allocate memory" in first and second == f"It happened in this phase: {phase}."
        assert table[0].startswith("memory of each device") and helps.startswith("What helps: ") and key in helps


CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1 GiB is free. "
    "Of the allocated memory 70 GiB is allocated by PyTorch, and 8.00 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation. See documentation for Memory Management (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)


def test_memory_in_pieces_has_torchs_own_hint() -> None:
    message = report.out_of_memory_message(torch.OutOfMemoryError(CUDA_MESSAGE)).splitlines()[0]
    assert "8.00 GiB is reserved" in message and message.endswith("expandable_segments:True to avoid fragmentation.")


def test_configurations_and_engines_elsewhere_can_be_planned(grpo: Grpo, quick: None) -> None:
    config = grpo.ok("fit", "--ckpt_path=last", "--print_config")
    Path("config.yaml").write_text(config)
    server = ("--model.engine=VLLMServerEngine", "--model.engine.urls=[http://localhost:1]")
    for options in (["--model.engine=VLLMEngine"], server, ["--config=config.yaml"]):
        out = grpo.ok("plan", *options)
        assert ("key-value cache" in out) is ("--config=config.yaml" in options)
    run(["plan", f"--config={ROOT}/configs/gsm8k_qwen2.5_0.5b.yaml", "--model.policy.path=policy", "--prompt_tokens=9"])
