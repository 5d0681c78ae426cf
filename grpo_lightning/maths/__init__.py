"""The mathematics: tensors in, tensors out. No I/O, no Lightning, no transformers."""
