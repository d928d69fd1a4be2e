"""``python -m ddp_manual.training``: see ``program``."""

from ddp_manual.training.program import main

if __name__ == "__main__":  # not in a process that multiprocessing spawns
    main()
