"""Faster ways to compute what the core computes, and their memory."""
