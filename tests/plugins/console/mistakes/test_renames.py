"""Names of version 0.2 work in options, in saved configurations and in Python, and say the new name once."""

import warnings

import pytest
from helpers.command import Grpo, table

import grpo_lightning
from grpo_lightning.plugins.console.mistakes import renames


@pytest.fixture(autouse=True)
def _warned_of_nothing() -> None:
    renames.warn.cache_clear()


RENAMED = table("""
--loop.source=Ahead => grpo_lightning.OneStepOffPolicy | Ahead is called OneStepOffPolicy now
--loop.source=grpo_lightning.Stream => grpo_lightning.FullyAsynchronous | Stream is called FullyAsynchronous now
--loop.stop=AllSettled => grpo_lightning.AllConverged | AllSettled is called AllConverged now
--model.objective.denominator=moving => denominator: has_advantage | moving is called has_advantage now
--model.validation.judge=FormatReward => grader: | judge is called --model.validation.grader now
--model.validation.grader=FormatReward --model.validation.judge.pattern=x =>
    pattern: x | judge.pattern is called --model.validation.grader.pattern
"--model.validation={judge: FormatReward}" => grader: | judge of Validation is called grader now
"--model.rewards={class_path: LearnedReward, init_args: {path: x, labeller: FormatReward}}" =>
    grader: | labeller of LearnedReward is called grader now
""")


@pytest.mark.parametrize(("options", "words"), RENAMED.values(), ids=RENAMED)
def test_an_old_name_works_and_says_the_new_one(options: list[str], words: list[str], grpo: Grpo) -> None:
    line, message = words
    with pytest.warns(FutureWarning, match=message):
        assert line in grpo.ok("fit", *options, "--print_config")


def test_an_old_class_is_the_new_one_in_python() -> None:
    with pytest.warns(FutureWarning, match="Ahead is called OneStepOffPolicy now"):
        assert grpo_lightning.Ahead is grpo_lightning.OneStepOffPolicy
    with pytest.raises(AttributeError, match="no attribute 'Nowhere'"):
        grpo_lightning.Nowhere  # noqa: B018


def test_names_of_others_stay_as_they_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert renames.new_class("my_sources.Ahead") == "my_sources.Ahead"
        flags = ["--model.rewards.judge=x", "--a", "b.labeller"]
        assert renames.new_flags([*flags]) == flags
        arguments = renames.new_value({"class_path": "my.Reward", "init_args": {"judge": 1}}, None)["init_args"]
        assert arguments == {"judge": 1}
