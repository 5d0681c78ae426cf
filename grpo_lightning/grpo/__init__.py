"""Algorithm 1 of DeepSeekMath, in the order of a step: loop, source, explore, prepare, update."""
