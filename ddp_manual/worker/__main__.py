"""What an agent starts: ``python .../ddp_manual/worker CHANNEL FAULTS PARENT rank=K of=N``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    channel, faults, parent = map(int, sys.argv[1:4])
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder
    from ddp_manual.worker import birth

    birth.leave_stacks_in(faults)
    birth.leave_signals_to_the_agent()
    birth.die_with_parent(parent)

    from ddp_manual.worker.main import main

    main(channel)
