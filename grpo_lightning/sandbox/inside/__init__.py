"""What runs inside a sandbox process. These files import nothing of this package."""
