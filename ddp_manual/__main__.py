"""``python -m ddp_manual`` is the ``ddp-manual`` command."""

from ddp_manual.cli.main import main

if __name__ == "__main__":
    main()
