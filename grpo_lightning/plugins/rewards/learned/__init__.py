"""The learned reward: a reward model that keeps training, with replay."""
