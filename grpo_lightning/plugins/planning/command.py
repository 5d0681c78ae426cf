"""`grpo plan`, as what it changes in the command line of `grpo fit`."""

from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningCLI

from grpo_lightning.plugins.planning import internals
from grpo_lightning.plugins.planning.report import Planner


class Planning(LightningCLI):
    """Makes everything in a configuration except the trainer, whose devices may not exist here."""

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Makes the parser, with the subcommand `plan`."""
        self.trainer_class = type("PlanningTrainer", (L.Trainer,), {"plan": Planner.plan})
        super().setup_parser(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommand, and the arguments that are made for it."""
        return {"plan": {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        """Refuses the same options, and leaves out what writes files."""
        super().before_instantiate_classes()
        # Some write when they are made.
        self.config.plan.trainer.logger = False
        self.config.plan.trainer.callbacks = None

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A planner with the trainer's settings, instead of a trainer."""
        return Planner(self.config_init.plan.trainer, self.config_init.plan.loop)

    def after_instantiate_classes(self) -> None:
        """Nothing: the weights may not exist here."""

    def _run_subcommand(self, subcommand: str) -> None:
        planner: Any = self.trainer
        planner.plan(**internals.arguments_of(self, subcommand))
