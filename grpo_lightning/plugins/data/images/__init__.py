"""Questions with images: reading them, and the processor that makes tokens and pixels of them."""
