"""A teacher, which is another model in place of the reference."""

import copy
from typing import Any, Literal

from torch import nn

from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.types import UsageError


class Teacher(FrozenCopy):
    """Takes another model as the reference: the teacher of on-policy distillation, of any size, with equal vocabulary.

    The KL term pulls the policy towards the teacher on completions that the policy samples. The teacher is never
    trained and is in no checkpoint: a resumed run reads its folder again. docs/how_to/distillation.md shows its use.

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
        # It has an encoder of its own, and may be of another width.
        self.policy.encodes_anew = True
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_put_in)

    def check(self, policy: Policy) -> None:
        """Raises UsageError if the folder is incomplete, or if a token of the policy has another id in the teacher."""
        self.policy.check()
        policy_ids = policy.tokenizer.get_vocab()
        teacher_ids = self.policy.tokenizer.get_vocab()
        different_tokens = [token for token, id in policy_ids.items() if teacher_ids.get(token) != id]
        if different_tokens:
            token = different_tokens[0]
            raise UsageError(
                f"{self.policy.key}.path={self.policy.path}: its vocabulary is not the policy's: {token!r} is "
                f"{teacher_ids.get(token, 'missing')} there and {policy_ids[token]} in {policy.path} "
                f"({len(different_tokens)} differ); give a teacher of the policy's family"
            )

    def refresh(self, policy: Policy) -> None:
        """Reads the weights once. Log-probs are computed in the same way as the policy's."""
        if not self.exists:
            self.check(policy)
            self.policy.compute = copy.deepcopy(policy.compute)
            self.policy.float32_head = policy.float32_head
            self.policy.load()
            self.policy.requires_grad_(False).eval()


def _leave_out(teacher: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Removes the teacher's tensors from a checkpoint that is being written."""
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def _put_in(teacher: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Adds the teacher's tensors to a checkpoint that is being read, which has none, so that they stay unchanged."""
    for name, module in teacher.named_children():
        state.update(module.state_dict(prefix=f"{prefix}{name}."))
