"""Version of looplib, for all files: none of them may import the package, which imports them."""

__version__ = "0.1.0"
