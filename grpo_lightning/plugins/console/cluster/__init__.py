"""Runs on a cluster: weights sharded over all devices, limits of time, and ranks that end together."""
