"""Where this process runs, who has started it, and as which rank; only this room uses ``os.environ``."""
