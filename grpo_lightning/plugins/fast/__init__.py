"""Speed: the shared prefix, fused layers and products, and the native engine."""
