"""Engines beyond the definition of decoding."""
