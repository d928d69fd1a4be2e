"""Variables that mpirun and mpiexec gave to their ranks: recorded, and shortened to those that something here reads.

Each is a list with an environment per rank. Hosts nodeA to nodeC are network namespaces, and mpirun runs on nodeA.
"""

from __future__ import annotations

from tests.unit.launcher_environments import variables


def _ranks(common: str, *own: str) -> list[dict[str, str]]:
    """Return the variables of both ranks, from those of all and each rank's own; N is the rank."""
    texts = [f"{common} {one}" for one in own or ("", "")]
    return [variables(text.replace("=N", f"={rank}")) for rank, text in enumerate(texts)]


_OPEN_MPI = "OMPI_COMM_WORLD_RANK=N OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=N"
_ON_ONE_HOST = f"{_OPEN_MPI} OMPI_COMM_WORLD_LOCAL_RANK=N OMPI_COMM_WORLD_LOCAL_SIZE=2"
_ON_TWO_HOSTS = f"{_OPEN_MPI} OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1"

# Open MPI 4.1.4: mpirun -n 2
OPEN_MPI_4_ONE_HOST = _ranks(
    f"""
    {_ON_ONE_HOST} OMPI_MCA_orte_hnp_uri=1850736640.0;tcp://192.0.2.2:38107;tcp6://[fd00::2]:39053 PMIX_HOSTNAME=vm
    PMIX_NAMESPACE=1850736641 PMIX_SERVER_URI2=1850736640.0;tcp4://127.0.0.1:52673
    """
)

# Open MPI 4.1.4: mpirun --host nodeA:1,nodeB:1 -n 2
OPEN_MPI_4_TWO_HOSTS = _ranks(
    f"{_ON_TWO_HOSTS} OMPI_MCA_orte_hnp_uri=2971533312.0;tcp://10.91.0.1:60945 PMIX_NAMESPACE=2971533313",
    "PMIX_HOSTNAME=nodeA PMIX_SERVER_URI2=2971533312.0;tcp4://127.0.0.1:35889",
    """
    OMPI_MCA_orte_node_regex=nodeA,nodeB@0(2) PMIX_HOSTNAME=nodeB
    PMIX_SERVER_URI2=2971533312.1;tcp4://127.0.0.1:46241
    """,
)

# Open MPI 4.1.4: mpirun in the shell of a job of Slurm 22.05 with two nodes, of which n1 has that shell
OPEN_MPI_4_IN_A_SLURM_JOB = _ranks(
    f"""
    {_ON_TWO_HOSTS} OMPI_MCA_orte_hnp_uri=1350565888.0;tcp://10.77.1.1:57033 PMIX_NAMESPACE=1350565889 SLURM_JOB_ID=1
    SLURM_LOCALID=0 SLURM_PROCID=0
    """,
    "PMIX_HOSTNAME=n1 PMIX_SERVER_URI2=1350565888.0;tcp4://127.0.0.1:59267 SLURM_NTASKS=2",
    """
    OMPI_MCA_orte_node_regex=n[1:1-2]@0(2) PMIX_HOSTNAME=n2 PMIX_SERVER_URI2=1350565888.1;tcp4://127.0.0.1:58847
    SLURM_NTASKS=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    """,
)

# Open MPI 5.0.11: mpirun --host nodeA:1,nodeB:1 -n 2
OPEN_MPI_5_TWO_HOSTS = _ranks(
    f"{_ON_TWO_HOSTS} PMIX_NAMESPACE=prterun-nodeA-9809@1",
    "PMIX_HOSTNAME=nodeA PMIX_SERVER_URI2=prterun-nodeA-9809@0.0;tcp4://127.0.0.1:58043",
    "PMIX_HOSTNAME=nodeB PMIX_SERVER_URI2=prterun-nodeA-9809@0.1;tcp4://127.0.0.1:42519",
)

# MPICH 5.0.2: mpiexec -n 2; mpiexec -hosts nodeA,nodeB -n 2
MPICH_ONE_HOST = _ranks("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=N PMI_RANK=N PMI_SIZE=2")
MPICH_TWO_HOSTS = _ranks("MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 PMI_RANK=N PMI_SIZE=2")

# Intel MPI 2021.19: mpiexec -n 2
INTEL_MPI_ONE_HOST = _ranks(
    """
    I_MPI_HYDRA_UUID=1d2d0000-982a-e169-ee60-0600de29e76e MPI_LOCALNRANKS=2 MPI_LOCALRANKID=N PMI_RANK=N PMI_SIZE=2
    """
)
