"""GRPO and its relatives on PyTorch Lightning."""
