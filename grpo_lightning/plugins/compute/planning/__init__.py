"""The memory of a run, before any of it is used."""
