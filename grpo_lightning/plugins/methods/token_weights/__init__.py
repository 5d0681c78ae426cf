"""Weights and masks per token of other papers."""
