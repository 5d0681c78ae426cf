"""Mistakes in keys, classes and files as one line each; most are found before torch is imported, in a second."""
