"""Conversations: the policy and an environment take turns, and every token is kept as it was drawn."""
