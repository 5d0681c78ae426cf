"""`grpo export`, through the command line: a folder that transformers reads in a process without this package."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers.command import Grpo, arguments, furnish, table
from helpers.programs import succeed
from helpers.tiny import read_policy, rollouts_of
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_lightning.command import overview
from grpo_lightning.maths.metrics import clustered_half_width
from grpo_lightning.plugins.looking.export.export import model_card
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars
from grpo_lightning.training.evaluation import Measurement

ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
logp = model(input_ids=torch.arange(6, 30)[None]).logits.log_softmax(-1)
assert not [name for name in sys.modules if name.startswith(("grpo_lightning", "lightning"))]
torch.save(logp, sys.argv[2])
"""
"""A process that only transformers is in."""


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The policy's, by the names of transformers."""
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {name.removeprefix("policy.model."): value for name, value in saved.items() if "policy.model." in name}


def export(*words: str) -> int:
    """The exit code of `grpo export`."""
    return overview.answer(["export", *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, and a run of two steps whose weights have moved."""
    folder = tmp_path_factory.mktemp("export")
    furnish(folder)
    succeed({"run": arguments("fit", "--trainer.max_epochs=2", *LEARNS)}, folder)
    started = AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict()
    assert any(not torch.equal(value, started[name]) for name, value in weights_in(folder / LAST).items())
    return folder


@pytest.fixture
def trained(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, in a working directory that may be changed."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run")


LAST = Path("run", "checkpoints", "last.ckpt")
LEARNS = [
    '--model.rewards=[{class_path: FormatReward, init_args: {pattern: ".*[a-m].*"}}]',
    "--model.optimizer=torch.optim.SGD",
    "--model.optimizer.lr=0.5",
    "--model.guard.grad_clip=0",
]


@pytest.mark.usefixtures("trained")
def test_export_reproduces_log_probs_without_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.partial").mkdir()  # what an export that was killed left
    Path("out.partial", "model.safetensors").write_bytes(b"half")
    Path("out").mkdir()  # an empty folder is as good as none
    assert export("run", "--out", "out") == 0
    assert not Path("out.partial").exists()
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in Path("out").iterdir()} == {0o666 & ~mask}
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "out"), str(tmp_path / "logp.pt")]
    subprocess.run(command, check=True, cwd="/", env=outside | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    model = AutoModelForCausalLM.from_pretrained("policy")
    model.load_state_dict(weights_in(LAST))
    logp = model(input_ids=torch.arange(6, 30)[None]).logits.log_softmax(-1)
    assert torch.equal(torch.load("logp.pt", weights_only=True), logp)
    exported, expected = read_policy("out"), read_policy("policy")
    expected.model.load_state_dict(weights_in(LAST))
    rollouts = rollouts_of([5, 3, 7])
    with torch.no_grad():
        assert torch.equal(exported(rollouts).logp, expected(rollouts).logp)
    assert exported.stop_ids == expected.stop_ids and len(exported.stop_ids) > 1
    assert exported.tokenizer.get_vocab() == expected.tokenizer.get_vocab()
    # The card: its head, and the configuration.
    _, head, body = Path("out", "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    (index,) = ModelCard.load("out/README.md").data.to_dict()["model-index"]
    values, shown = read_scalars("run"), ("avg@2", "greedy")
    found = {metric["type"]: metric["value"] for one in index["results"] for metric in one["metrics"]}
    assert found == {name: pytest.approx(values[f"val/{name}"][-1][1], abs=1e-4) for name in shown}
    *_, last = map(json.loads, Path("run", "validations.jsonl").read_text().splitlines())
    halves = {name: clustered_half_width(last["values"][name]) for name in shown}
    texts = {name: f"{name} {values[f'val/{name}'][-1][1]:.2f} ± {halves[name]:.2f}" for name in shown}
    names = [metric["name"] for one in index["results"] for metric in one["metrics"]]
    assert names == [f"{text} (8 questions)" for text in texts.values()]
    assert f". Validation: {', '.join(texts.values())} (8 questions); ± is half the 95 % interval" in body
    assert {one["dataset"]["name"] for one in index["results"]} == {"rows"} and index["name"] == "out"
    config_text = body.split(":\n\n", 1)[1].partition("Each start of the run")[0]
    assert yaml.safe_load(config_text) == yaml.safe_load(Path("run", "config.yaml").read_text())


def test_generation_is_that_of_the_run(grpo: Grpo) -> None:
    grpo.ok("fit", "--model.sampling.temperature=0.7", "--model.sampling.top_p=0.9")
    assert export("run", "--out", "out") == 0
    config = GenerationConfig.from_pretrained("out")
    assert (config.do_sample, config.temperature, config.top_k, config.top_p, config.min_p) == (True, 0.7, 0, 0.9, 0.0)
    assert config.eos_token_id == sorted(read_policy("policy").stop_ids)
    model, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    output = model.generate(**tokenizer("123", return_tensors="pt"), max_new_tokens=5)
    assert 3 < output.shape[1] <= 8


@pytest.mark.usefixtures("trained")
def test_an_earlier_checkpoint_of_its_own_numbers(grpo: Grpo) -> None:
    shutil.copy(LAST, "run/checkpoints/two.ckpt")
    val = read_scalars("run")["val/avg@2"]
    grpo.ok("fit", "--ckpt_path=last", "--trainer.max_epochs=4", *LEARNS)
    assert export("run", "--out", "out", "--ckpt_path", "run/checkpoints/two.ckpt") == 0
    card = Path("out", "README.md").read_text()
    assert "after 2 exploration steps" in card and f"value: {round(val[-1][1], 4)}\n" in card
    model = AutoModelForCausalLM.from_pretrained("out")
    assert all(
        torch.equal(value, weights_in(Path("run/checkpoints/two.ckpt"))[name])
        for name, value in model.state_dict().items()
    )


MISTAKES = table("""
nowhere --out out => nowhere: no run is there | config.yaml
started --out out => started: there is no checkpoint | --ckpt_path
run --out out --ckpt_path x.ckpt => run: there is no checkpoint x.ckpt
run --out out --ckpt_path half.ckpt => ckpt_path=half.ckpt | damaged
run --out policy => --out=policy | already
run --out rows.jsonl => --out=rows.jsonl | already
edited --out out => edited/config.yaml | no configuration
moved --out out => policy.path=./gone | no such folder
run --out out --as adapter => --as=adapter | run has trained all weights
other --out out => policy.path=other_policy | another model
""")


@pytest.mark.parametrize(("words", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_writes_nothing(
    words: list[str], said: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = LAST.read_bytes()
    Path("half.ckpt").write_bytes(data[: len(data) // 2])
    text = (trained / "config.yaml").read_text()
    for name, config in {
        "started": text,
        "edited": "model: [",
        "moved": text.replace("path: policy\n", "path: ./gone\n"),
        "other": text.replace("path: policy\n", "path: other_policy\n"),
    }.items():
        Path(name, "checkpoints").mkdir(parents=True)
        Path(name, "config.yaml").write_text(config)
        if name != "started":
            shutil.copy(LAST, Path(name, "checkpoints"))
    shutil.copytree("policy", "other_policy")
    wider = json.loads(Path("policy", "config.json").read_text()) | {"num_hidden_layers": 1}
    Path("other_policy", "config.json").write_text(json.dumps(wider))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert export(*words) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    assert line.startswith("grpo: error: ")
    assert [word for word in said if word not in line] == [], line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_card_says_which_questions_were_asked() -> None:
    hub = {"class_path": "grpo_lightning.HubPrompts", "init_args": {"id": "openai/gsm8k", "val": "train[-500:]"}}
    local = {"class_path": "JsonPrompts", "init_args": {"val": "no.jsonl", "test": "data/aime.jsonl"}}
    config = {"model": {"policy": {"path": "a/b"}}, "data": {"task": hub, "validations": {"aime": {"task": local}}}}
    scores = {
        "val/greedy": Measurement(0.5, math.nan, 0, ""),  # of a run of 0.2
        "val/aime/avg@4": Measurement(0.25, 0.08, 30, ""),
        "val/gone/avg@4": Measurement(1.0, 0.1, 2, ""),
    }
    head = yaml.safe_load(model_card(config, "model", "", "out", scores).split("---\n")[1])
    assert [result["metrics"] for result in head["model-index"][0]["results"]] == [
        [{"type": "greedy", "value": 0.5}],
        [{"type": "avg@4", "value": 0.25, "name": "avg@4 0.25 ± 0.08 (30 questions)"}],
    ]
    assert head["datasets"] == ["openai/gsm8k"] and head["base_model"] == "a/b"
    assert [result["dataset"] for result in head["model-index"][0]["results"]] == [
        {"name": "openai/gsm8k", "type": "openai/gsm8k", "split": "train[-500:]"},
        {"name": "aime", "type": "JsonPrompts"},
    ]
