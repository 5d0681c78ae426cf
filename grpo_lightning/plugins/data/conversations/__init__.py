"""Conversations: dialogue, tools, environments and games."""
