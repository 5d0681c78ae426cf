"""A teacher: another model as the reference."""

import copy
from typing import Any, Literal

from torch import nn

from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.types import UsageError


class Teacher(FrozenCopy):
    """Another model, of any size but with the policy's vocabulary: the teacher of on-policy distillation.

    The KL term then pulls the policy towards the teacher, on completions that the policy itself draws. The teacher
    never moves and is in no checkpoint: a resumed run reads its folder again. docs/distillation.md shows its use.

    Args:
        path: Folder made by `save_pretrained`, or a model id of the Hugging Face hub.
        dtype: Type of its weights.
        trust_remote_code: Run Python code shipped with the model, as for the policy.
    """

    is_policy, stays = False, True

    def __init__(
        self, path: str, dtype: Literal["float32", "bfloat16"] = "float32", trust_remote_code: bool = False
    ) -> None:
        super().__init__()
        self.policy: Policy = Policy(path, dtype, trust_remote_code=trust_remote_code)
        self.policy.key = "model.reference"
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_put_in)

    def check(self, policy: Policy) -> None:
        """Raises UsageError for what its folder lacks, and where a token of the policy has another id."""
        self.policy.check()
        policy_ids = policy.tokenizer.get_vocab()
        teacher_ids = self.policy.tokenizer.get_vocab()
        differ = [token for token, id in policy_ids.items() if teacher_ids.get(token) != id]
        if differ:
            token = differ[0]
            raise UsageError(
                f"{self.policy.key}.path={self.policy.path}: its vocabulary is not the policy's: {token!r} is "
                f"{teacher_ids.get(token, 'missing')} there and {policy_ids[token]} in {policy.path} "
                f"({len(differ)} differ); give a teacher of the policy's family"
            )

    def refresh(self, policy: Policy) -> None:
        """Reads the weights, once; log-probs are computed as the policy computes them."""
        if not self.exists:
            self.check(policy)
            self.policy.compute, self.policy.float32_head = copy.deepcopy(policy.compute), policy.float32_head
            self.policy.load()
            self.policy.requires_grad_(False).eval()


def _leave_out(teacher: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def _put_in(teacher: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """A checkpoint has none of its tensors: they stay as they are."""
    for name, module in teacher.named_children():
        state.update(module.state_dict(prefix=f"{prefix}{name}."))
