"""Algorithm 1 of DeepSeekMath, file by file in the order of a step: loop, source, explore, prepare, update."""
