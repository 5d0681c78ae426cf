"""Tiny policies and runs with the defaults of the command line: `Fast`, `NativeEngine`, `PromptDataModule`."""

from functools import partial

from grpo_lightning import Fast, NativeEngine, PromptDataModule
from helpers import adapters, fitting, tiny

policy_of = partial(tiny.policy_of, compute=Fast)
adapted = partial(adapters.adapted, compute=Fast)
fit = partial(fitting.fit, kinds=(Fast, NativeEngine, PromptDataModule))
