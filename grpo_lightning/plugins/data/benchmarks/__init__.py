"""Named validations, in a run and of a model without a run."""
