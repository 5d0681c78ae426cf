"""Several teachers, each for its own questions."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from grpo_lightning.maths.ragged import take
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.methods.distillation.states import States
from grpo_lightning.plugins.methods.distillation.teacher import Teacher
from grpo_lightning.policy.compute import TokenLogp
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import PolicySnapshot
from grpo_lightning.types import Sample, require


class Teachers(PolicySnapshot):
    """Several teachers; a column of the data says which one teaches a question, such as one per subject.

    Each is a `Teacher`, and all are in memory together.

    Args:
        paths: Value of the column -> folder or model id of the teacher.
        column: The column of the task's rows.
        dtype: Type of the teachers' weights.
        trust_remote_code: Run Python code shipped with the models, as for the policy.
    """

    def __init__(
        self,
        paths: dict[str, str],
        column: str = "teacher",
        dtype: Literal["float32", "bfloat16"] = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        require(bool(paths), "model.reference.paths={}: give at least one teacher, e.g. {math: runs/math_model}")
        self.names, self.column = [str(value) for value in paths], column  # YAML may read numbers
        self.teachers = nn.ModuleList(Teacher(path, dtype, trust_remote_code) for path in paths.values())
        self.teacher_of: list[int] = []
        """Of each sample of the step."""

    @property
    def each(self) -> list[Teacher]:
        """The teachers, in the order of their names in `paths`."""
        return [teacher for teacher in self.teachers if isinstance(teacher, Teacher)]

    def check(self, policy: Policy) -> None:
        """As `Teacher.check`, of each."""
        for teacher in self.each:
            teacher.check(policy)

    def refresh(self, policy: Policy) -> None:
        """Reads the weights, once."""
        for teacher in self.each:
            teacher.refresh(policy)

    def begin(self, policy: Policy, samples: Sequence[Sample]) -> None:
        """Looks up the teacher of each sample."""
        names = {name: index for index, name in enumerate(self.names)}
        for question in (sample.prompt.question for sample in samples):
            value = str(question.metadata.get(self.column, ""))
            allowed = f"model.reference has teachers for {', '.join(self.names)}"
            require(value in names, f"{question.source}: {self.column}={value or 'missing'}, and {allowed}")
        self.teacher_of = [names[str(sample.prompt.question.metadata[self.column])] for sample in samples]

    def scored(self, policy: Policy, rollouts: Rollouts, read: Any = None) -> TokenLogp:
        """As `Policy.forward`, each row by its teacher."""
        teacher_of_row = torch.tensor(
            [self.teacher_of[row] if row >= 0 else 0 for row in rollouts.sample_index.tolist()]
        )
        logp, entropy = (torch.zeros_like(rollouts.weight) for _ in range(2))
        states: list[States] = []
        for index, teacher in enumerate(self.each):
            rows = (teacher_of_row == index).nonzero().squeeze(1).to(rollouts.sample_index.device)
            # Ranks with sharded weights meet in every forward: each makes as many.
            if not len(rows) and not isinstance(teacher.policy, FSDPModule):
                continue
            scored = teacher.scored(policy, rollouts.select(rows if len(rows) else rows.new_zeros(1)), read)
            if len(rows):
                tokens = take(rows, rollouts.lengths)
                logp[tokens] = scored.logp
                entropy[tokens] = scored.entropy
                states += [States(read_states.hidden, read_states.head, tokens) for read_states in scored.read or []]
        return TokenLogp(logp, entropy, read=states)
