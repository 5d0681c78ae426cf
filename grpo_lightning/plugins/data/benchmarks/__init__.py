"""Validations of a name of their own, and models measured by them without a run."""
