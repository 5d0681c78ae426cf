"""Tiny policies and runs with the defaults of the command line: `Fast`, `NativeEngine`, `PromptDataModule`."""

from functools import partial

from grpo_lightning.plugins.conversations.data import PromptDataModule
from grpo_lightning.plugins.fast.compute import Fast
from grpo_lightning.plugins.fast.native import NativeEngine
from helpers import adapters, fitting, tiny

policy_of = partial(tiny.policy_of, compute=Fast)
adapted = partial(adapters.adapted, compute=Fast)
fit = partial(fitting.fit, kinds=(Fast, NativeEngine, PromptDataModule))
