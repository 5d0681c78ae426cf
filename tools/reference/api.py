"""The pages of the API: a page per family, its base class first, then the classes that derive from it.

A class is on the page of its base class. What derives from no base is on the page that lists its module.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import grpo_lightning
from reference.places import MODULES, REFERENCE, first_sentence, public_classes


class Family(NamedTuple):
    """A page of the API."""

    title: str
    decides: str
    """What the classes of the page decide, or hold."""
    bases: str = ""
    """The base classes, whose public subclasses are here too."""
    modules: str = ""
    """The modules whose other public names are here. A folder stands for all modules in it."""


FAMILIES = {
    "advantages": Family(
        "Advantages", "An advantage estimator turns the rewards of a group into Â.", "AdvantageEstimator"
    ),
    "surrogates": Family(
        "Surrogates",
        "A surrogate is the objective of a token, from log π_θ, log π_old and Â: the clip, or what replaces it.",
        "Surrogate",
        "maths.surrogates plugins.methods.surrogates",
    ),
    "kl": Family("KL", "A KL estimator says how far π_θ is from π_ref at a token.", "KLEstimator", "maths.kl"),
    "weightings": Family(
        "Averages over tokens",
        "A weighting decides how much each token counts in J.",
        "TokenWeighting",
        "maths.weightings",
    ),
    "masks": Family("Masks", "A mask leaves tokens out of J, or weighs them less.", "TokenMask"),
    "corrections": Family(
        "Sampler corrections",
        "A correction is a factor per token where the engine sampled from another distribution than π_old.",
        "Correction",
        "maths.mismatch",
    ),
    "entropy": Family(
        "Entropy bonus", "An entropy bonus decides how much J rewards the entropy of π_θ.", "EntropyBonus"
    ),
    "objective": Family(
        "Objective",
        "The objective puts the surrogate, the KL term, the weights and the entropy together.",
        "",
        "maths.objective maths.diagnostics",
    ),
    "snapshots": Family(
        "Old policy, reference, teachers", "A snapshot gives the log-probs of π_old or of π_ref.", "PolicySnapshot"
    ),
    "stopping": Family(
        "Stop rules", "A stop rule ends the passes over a step's rollouts before all μ are made.", "StopRule"
    ),
    "schedules": Family(
        "Learning-rate schedules", "A schedule over the run changes the learning rate of each update.", "RunSchedule"
    ),
    "filters": Family(
        "Dynamic sampling", "A filter decides which groups are learned from.", "GroupFilter", "maths.filters"
    ),
    "rewards": Family("Rewards", "A reward scores completions.", "Reward", "rewards maths.reward_batch"),
    "process_rewards": Family(
        "Process rewards",
        "A splitter cuts a completion into segments, and a scorer scores each.",
        "Splitter SegmentScorer",
    ),
    "reward_models": Family(
        "Reward models", "How a learned reward goes on learning.", "RewardLoss", "plugins.rewards.learned"
    ),
    "tasks": Family(
        "Tasks and data",
        "A task provides the questions; a data module makes prompts of them.",
        "Task TaskData",
        "plugins.data.benchmarks",
    ),
    "orders": Family("Order of questions", "An order decides which question comes next.", "QuestionOrder"),
    "environments": Family(
        "Environments and tools",
        "An environment answers the policy, so that a completion has several turns.",
        "Environment ToolFormat",
        "plugins.data.conversations",
    ),
    "engines": Family(
        "Engines",
        "An engine samples the completions. Every engine samples from the same distribution.",
        "RolloutEngine",
        "engines plugins.engines",
    ),
    "samplers": Family(
        "Samplers", "A sampler makes samples of prompts with an engine: of one turn, or several.", "Sampler"
    ),
    "sources": Family(
        "Sources of rollouts",
        "A source decides where a step's rollouts come from, and how old the sampling policy may be.",
        "RolloutSource",
        "grpo.source",
    ),
    "policy": Family(
        "Policy",
        "The model that is trained, its adapter, and how its log-probs are computed.",
        "Compute",
        "policy",
    ),
    "training": Family(
        "Training",
        "What Lightning runs: the module, the loop of Algorithm 1, and limits.",
        "GRPOModule GRPOLoop",
        "training plugins.console.cluster plugins.compute.planning",
    ),
    "callbacks": Family(
        "Callbacks and loggers",
        "Callbacks and loggers record and show a run. They change nothing of what is learned.",
        "Watcher Observer",
        "plugins.console plugins.looking.loggers plugins.looking.inspector.inspector",
    ),
    "records": Family(
        "Reading a run in Python",
        "What the inspector recorded, and how runs are compared.",
        "",
        "plugins.looking",
    ),
    "data_types": Family(
        "Data types",
        "What passes between the data, the engine, the rewards and the loop.",
        "",
        "types grpo maths.rollouts maths.sizes",
    ),
    "functions": Family(
        "Functions for a method of your own",
        "Functions on flat vectors over tokens, metrics, and processes with limits.",
        "",
        "maths sandbox",
    ),
}
"""The pages by their file names, in the order of the navigation."""


def titles() -> list[tuple[str, str]]:
    """Returns the file name and the title of each page."""
    return [("index", "All names"), *((name, family.title) for name, family in FAMILIES.items())]


def page_of(name: str) -> str:
    """Returns the path of the page that has a public name."""
    return f"{REFERENCE}/api/{family_of(name)}.md"


@cache
def family_of(name: str) -> str:
    """Returns the page of a public name: of its nearest base class, or of its module."""
    classes = public_classes()
    page_of_base = {base: page for page, family in FAMILIES.items() for base in family.bases.split()}
    for base in classes[name].__mro__ if name in classes else ():
        if base.__name__ in page_of_base and classes.get(base.__name__) is base:
            return page_of_base[base.__name__]
    pages = {module: page for page, family in FAMILIES.items() for module in family.modules.split()}
    module = MODULES[name].removeprefix("grpo_lightning.")
    while module not in pages:
        if not module:
            raise LookupError(f"{name}: no page of {__file__} has its module {MODULES[name]}")
        module = module.rpartition(".")[0]
    return pages[module]


@cache
def members() -> dict[str, list[str]]:
    """Returns the public names of each page: base classes, then the core's names, then the plugins' names."""
    names: dict[str, list[str]] = {page: [] for page in FAMILIES}
    for name in MODULES:
        names[family_of(name)].append(name)
    return {page: sorted(names[page], key=lambda name: order(name, FAMILIES[page])) for page in FAMILIES}


def order(name: str, family: Family) -> tuple[Any, ...]:
    """Returns the place of a name on its page: the base classes, their subclasses, and what goes with them.

    In a file the names stay in order, since the paper's choice is the first.
    """
    bases = family.bases.split()
    value = getattr(grpo_lightning, name)
    line = inspect.getsourcelines(value)[1]
    base_index = bases.index(name) if name in bases else len(bases)
    is_member = any(base.__name__ in bases for base in getattr(value, "__mro__", ()))
    return (base_index, not is_member, ".plugins." in MODULES[name], MODULES[name], line)


def pages(keys_by_page: dict[str, list[str]]) -> dict[str, str]:
    """Returns the pages by their file names.

    Args:
        keys_by_page: The keys of the configuration that take the classes of each page.
    """
    return {"index": index(), **{page: page_text(page, keys_by_page.get(page, [])) for page in FAMILIES}}


def index() -> str:
    """Returns the page that lists every name."""
    lines = [
        "# API: all names",
        "",
        "Every name is in `grpo_lightning` itself: `from grpo_lightning import GroupStd`.",
        "",
    ]
    for page, family in FAMILIES.items():
        lines += [f"## {family.title}", "", family.decides, "", *contents(page, f"{page}.md"), ""]
    return "\n".join(lines)


def page_text(page: str, keys: list[str]) -> str:
    """Returns the page of a family."""
    family = FAMILIES[page]
    lines = [f"# {family.title}", "", family.decides, "Every name is in `grpo_lightning` itself.", ""]
    if keys:
        links = ", ".join(f"[`{key}`](../configuration/{key}.md)" for key in keys)
        lines += [f"In a configuration: {links}.", ""]
    lines += [*contents(page), ""]
    for name in members()[page]:
        # The public name is an anchor too.
        lines += [f'<a id="{name}"></a>', "", f"::: {path_of(name)}", ""]
    return "\n".join(lines)


def contents(page: str, path: str = "") -> list[str]:
    """Returns a list of the names of a page, each with its first sentence."""
    return [f"- [`{name}`]({path}#{name}): {first_sentence(getattr(grpo_lightning, name))}" for name in members()[page]]


def path_of(name: str) -> str:
    """Returns the import path of a public name."""
    value = getattr(grpo_lightning, name)
    return value.__name__ if inspect.ismodule(value) else f"{MODULES[name]}.{name}"
