"""The agent of a rank in a person's own script, which starts it: ``python .../ddp_manual/agent CHANNEL FAULTS``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    channel, faults = map(int, sys.argv[1:3])
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder
    from ddp_manual.agent.attached import main

    main(channel, faults)
