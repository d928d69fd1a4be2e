"""Start ONE rank of a run by hand; start the others the same way, in any order, on one or several machines.

python run_multi_gpu_train.py --world_size 2 --rank 0
python run_multi_gpu_train.py --world_size 2 --rank 1
"""

from __future__ import annotations

import sys

from ddp_manual.cli.main import main as ddp_manual


def main() -> None:
    ddp_manual(["train", *sys.argv[1:]])


if __name__ == "__main__":
    main()
