"""Folders that can each be deleted: the core imports none of them."""
