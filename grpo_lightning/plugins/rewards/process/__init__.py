"""Process rewards: scores for the segments of a completion."""
