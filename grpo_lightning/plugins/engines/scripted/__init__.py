"""An engine whose completions a function writes: for tests, and to try rewards."""
