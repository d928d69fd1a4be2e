"""Variables that launchers set, as they were recorded where it says, and shortened to those that something here reads.

Slurm 22.05 with nodes n1 and n2, whose tasks were started from a third host, ctl. Of mpirun and mpiexec each is a list
with an environment per rank; hosts nodeA to nodeC are network namespaces, and mpirun runs on nodeA.
"""

from __future__ import annotations


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


_OF_JOB = "SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2"
_OF_TWO_TASKS = f"""
    {_OF_JOB} SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=2
"""
_OF_ONE_NODE = "SLURMD_NODENAME=n1 SLURM_JOB_ID=6 SLURM_JOB_NODELIST=n1 SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0"

# srun -N2 -n2, typed on another host: the first of two tasks, and the second.
SRUN_RANK_0 = variables(f"SLURMD_NODENAME=n1 SLURM_PROCID=0 {_OF_TWO_TASKS}")
SRUN_TASK = variables(f"SLURMD_NODENAME=n2 SLURM_PROCID=1 {_OF_TWO_TASKS}")

# srun -n1, and srun --pty bash.
SRUN_ONE_TASK = variables(
    f"""
    {_OF_ONE_NODE} SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1
    SLURM_STEP_NUM_TASKS=1
    """
)
SRUN_PTY = SRUN_ONE_TASK | variables("SLURM_PTY_PORT=45847")

# srun -m arbitrary with the hosts n2, n1: rank 0 is not on the first of SLURM_STEP_NODELIST.
SRUN_ARBITRARY_RANK_0 = SRUN_RANK_0 | variables("SLURMD_NODENAME=n2 SLURM_DISTRIBUTION=arbitrary")
SRUN_ARBITRARY_RANK_1 = SRUN_TASK | variables("SLURMD_NODENAME=n1 SLURM_DISTRIBUTION=arbitrary")

# The script that sbatch runs, of a job with two nodes, one task on each: no SLURM_STEP_*. With --array=3-4, and of a
# job that asks for nothing: no SLURM_NTASKS either. And the shell of salloc: no SLURM_PROCID.
BATCH_SHELL = variables(f"SLURMD_NODENAME=n1 {_OF_JOB} SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_PROCID=0")
ARRAY_SHELL = variables(f"SLURMD_NODENAME=n1 {_OF_JOB} SLURM_LOCALID=0 SLURM_PROCID=0")
BATCH_SHELL_OF_ONE_TASK = variables(f"{_OF_ONE_NODE} SLURM_PROCID=0")
SALLOC_SHELL = variables(f"{_OF_JOB} SLURM_NTASKS=2")
# The shell of salloc with LaunchParameters=use_interactive_step, as users of a newer Slurm have published it.
INTERACTIVE_STEP = SALLOC_SHELL | variables(
    """
    SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    """
)

# srun -N1 -n1 -w n2 in that script: the job is larger than the step.
BATCH_SECOND_STEP = BATCH_SHELL | variables(
    """
    SLURMD_NODENAME=n2 SLURM_DISTRIBUTION=cyclic SLURM_NTASKS=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=n2
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    """
)

# srun --het-group=0,1 of a job with n2, then n1: rank 0 is on n2, not on the first of SLURM_STEP_NODELIST.
HETEROGENEOUS_RANK_0 = SRUN_RANK_0 | variables("SLURMD_NODENAME=n2 SLURM_DISTRIBUTION=cyclic SLURM_HET_SIZE=2")
# srun --het-group=1 in such a job: the only component of the step.
HETEROGENEOUS_ONE_COMPONENT = SRUN_ONE_TASK | variables("SLURM_DISTRIBUTION=cyclic SLURM_HET_SIZE=2")


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
