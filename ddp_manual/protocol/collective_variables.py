"""The environment variables that change how ranks communicate; rank 0 compares those of all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddp_manual.wire import printable

# NCCL's user guide has them under "Environment Variables", torch's documentation under "ProcessGroupNCCL Environment
# Variables". Ranks that choose another algorithm, protocol or size of buffers for the same collective wait for each
# other for ever: NCCL compares none of them. TORCH_DISTRIBUTED_DEBUG=DETAIL adds a collective to each collective.
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_")
# These may differ from one rank to the next.
NOT_COMPARED = re.compile(
    "|".join(
        [
            r".*_IFNAME",  # the interfaces of a host
            r"NCCL_IB_(HCA|GID_INDEX|PKEY|ADDR_RANGE)",  # its adapters, and indices into tables of its own
            r"NCCL_(HOSTID|MNNVL_UUID|MNNVL_CLIQUE_ID|PROXY_CPUSET|IGNORE_CPU_AFFINITY|RAS_\w+)",  # the host itself
            r".*_(FILE|FILE_RANK|LIB)|GLOO_.*_TLS_\w+",  # paths, such as of certificates: another on each host, or rank
            r"NCCL_(PROFILER|ENV)_PLUGIN",
            # What is logged, recorded and shown, and when; not TORCH_DISTRIBUTED_DEBUG.
            r"NCCL_(DEBUG\w*|SET_THREAD_NAME|REPORT_CONNECT_PROGRESS|NVTX_\w+|WARN_\w+|\w+_DUMP_\w+)|GLOO_LOG_LEVEL",
            r"TORCH_NCCL_\w*(DEBUG|DUMP|TRACE|LOG|SHOW|TIMING)\w*|TORCH_NCCL_COORD_CHECK_MILSEC",
        ]
    )
)
# How two GPUs of one host reach each other, and a GPU its network adapter: these follow from the hardware of a host,
# and are often the remedy for a single one. Ranks of the same host must agree.
OF_A_HOST = re.compile(
    r"NCCL_(P2P_DISABLE|P2P_LEVEL|P2P_DIRECT_DISABLE|SHM_DISABLE|NVB_DISABLE|NET_GDR_\w+|DMABUF_ENABLE|GDRCOPY_\w+)"
)
# More of them may not fit in a hello, which has 64 KiB.
MOST_VARIABLES = 100


def collective_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of this process's variables that ranks must have in common; an empty one counts as unset."""
    named = [name for name in variables if name.startswith(PREFIXES) and not NOT_COMPARED.fullmatch(name)]
    return {name: printable(variables[name]) for name in [one for one in named if variables[one]][:MOST_VARIABLES]}


def differing_variables(rank_0: Mapping[str, str], variables: Mapping[str, str], *, same_host: bool) -> list[str]:
    differing = [name for name in sorted({*rank_0, *variables}) if rank_0.get(name) != variables.get(name)]
    return [name for name in differing if same_host or not OF_A_HOST.fullmatch(name)]
