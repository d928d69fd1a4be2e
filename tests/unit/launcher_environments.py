"""Variables that launchers set, as they were recorded where it says, and shortened to those that something here reads.

Slurm 22.05 with nodes n1 and n2, whose tasks were started from a third host, ctl.
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
