"""Tasks beyond a table of questions: conversations, benchmarks, orders of questions."""
