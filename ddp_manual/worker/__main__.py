"""What an agent starts: ``python .../ddp_manual/worker CHANNEL FAULTS PARENT rank=K of=N``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    channel, faults, parent = map(int, sys.argv[1:4])
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this folder
    from ddp_manual.worker import process

    process.leave_stacks_in(faults)
    process.leave_signals_to_the_agent()
    process.die_with_parent(parent)

    from ddp_manual.worker.task import main

    main(channel)
