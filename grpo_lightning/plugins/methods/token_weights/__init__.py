"""Token weights and token masks of other papers."""
