"""The page on metrics names what a run logs and nothing else; the page on reading a run names what there is."""

import re
from collections.abc import Sequence

import lightning as L
import pytest
from helpers.elsewhere import ScriptedElsewhere
from helpers.fast import fit, policy_of
from helpers.fitting import Digits, Echo, events_of, scalars
from helpers.guessing import Once
from helpers.paths import ROOT

from grpo_lightning import Board, GRPOModule, Inspector, KLAbove, Objective, Proximal, Replay, StaleSource
from grpo_lightning.maths.entropy import FixedEntropy
from grpo_lightning.maths.filters import DynamicSampling
from grpo_lightning.plugins.data.conversations.prompt_data import PromptDataModule
from grpo_lightning.plugins.looking.loggers.sampled_completions import SampledCompletions
from grpo_lightning.plugins.methods.token_weights.truncated_ratio import TruncatedRatio
from grpo_lightning.plugins.rewards.learned.learned_reward import LearnedReward
from grpo_lightning.plugins.rewards.learned.reward_model_update import RewardUpdate
from grpo_lightning.plugins.sources.asynchronous.fully_asynchronous import FullyAsynchronous
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.types import Sample, Status

METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


def names_in(tables: str) -> list[str]:
    """The first cells, which stand in backquotes."""
    names = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
    assert len(names) == len(set(names))
    return names


NAMES, STATUSES = map(names_in, METRICS.split("\n## Statuses of the rewards\n"))


def pattern(name: str) -> re.Pattern[str]:
    """What a documented name stands for: `<name>` is any reward, `<status>` any status, `@k` any number."""
    name = (
        name.replace("<status>", f"({'|'.join(STATUSES)})").replace("<name>", "[a-z_]+").replace("<rule>", "[A-Za-z]+")
    )
    return re.compile(name.replace("@k", r"@\d+"))


class HalfDigits(Digits):
    """Right are those with at least half as many digits as the best."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        result = super().score(samples)
        result.value = [value / max(result.value) for value in result.value]
        return result


class OneBadUpdate(L.Callback):
    """Makes the run one in which an update was skipped."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        pl_module.bad_updates += 1


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a run with everything on logs."""
    folder = tmp_path_factory.mktemp("run")
    trainer = {"max_epochs": 2, "limit_val_batches": 1}
    policy_of().save_pretrained(folder / "reward_model")
    learned = LearnedReward(
        str(folder / "reward_model"),
        HalfDigits(),
        replay=Replay(held_out=0.4),
        update=RewardUpdate(lr=3e-3, num_passes=3, min_gain=-1, max_forgetting=1),
        weight=0,
    )
    rewards = [HalfDigits(), learned]
    trainer["logger"] = Board(folder, name="", version="")
    loop = {"mu": 2, "stop": KLAbove(1e-9), "dynamic_sampling": DynamicSampling(), "source": StaleSource(1)}
    objective = Objective(beta=0.1, correction=TruncatedRatio(), entropy=FixedEntropy())
    callbacks = [SampledCompletions(), Inspector(), OneBadUpdate()]
    data = PromptDataModule(Echo(), val_batch_size=5, environment=Once())
    fit(folder, callbacks, loop, trainer, data=data, objective=objective, old_policy=Proximal(), rewards=rewards)
    elsewhere = ScriptedElsewhere(lambda request, text: "7a3b9c"[: 1 + request.sample])
    fit(
        folder / "ahead",
        [],
        {"source": FullyAsynchronous(2)},
        {"max_epochs": 2},
        engine=elsewhere,
        old_policy=Proximal(),
    )
    tags = events_of(folder).Tags()
    tags["scalars"] += scalars(folder / "ahead", without=())
    texts = [name.removesuffix("/text_summary") for name in tags["tensors"]]
    return {*tags["scalars"], *tags["histograms"], *texts}


def test_every_logged_name_is_documented(logged: set[str]):
    assert {name for name in logged if not any(pattern(known).fullmatch(name) for known in NAMES)} == set()


def test_every_documented_name_is_logged(logged: set[str]):
    assert {known for known in NAMES if not any(map(pattern(known).fullmatch, logged))} == set()


def test_statuses_are_those_of_the_code():
    assert sorted(STATUSES) == sorted(Status)


READING = (ROOT / "docs" / "how_to" / "reading_a_run.md").read_text(encoding="utf-8")


def test_every_metric_of_the_page_on_reading_a_run_is_documented():
    named = set(re.findall(r"`((?:reward|rollout|policy|optim|time|async|val|update)/[^`]+)`", READING))
    filled = {"<name>": "verifier", "<status>": "ok", "<rule>": "KLAbove"}
    logged = {re.sub("<[a-z]+>", lambda found: filled[found[0]], name) for name in named}
    assert len(named) >= 30
    assert [name for name in sorted(logged) if not any(pattern(known).fullmatch(name) for known in NAMES)] == []


def test_every_picture_of_it_is_shown():
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", READING)
    assert sorted(shown) == sorted(
        f"reading_a_run/{path.name}" for path in (ROOT / "docs/how_to/reading_a_run").iterdir()
    )
