"""Methods beside GRPO itself: a file per paper, a class per formula."""
