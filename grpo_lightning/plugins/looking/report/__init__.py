"""Runs compared on one page."""
