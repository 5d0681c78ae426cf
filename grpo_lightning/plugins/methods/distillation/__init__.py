"""Distillation from whole distributions, from several teachers, and from the policy itself with another prompt."""
