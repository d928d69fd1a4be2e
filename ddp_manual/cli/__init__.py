"""The command line; it begins in ``cli/main.py``."""
