"""A real Slurm: nodes n1 and n2 and a controller, each in a network namespace with its own /etc/slurm and munge's key.

Nothing of the machine's own is used or changed, so several test processes may have a Slurm each, and what a killed one
leaves ends with its namespaces. slurmd accounts for processes by their parents, since cgroups are the machine's.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import clean_environment, named
from tests.hosts.hosts import CommandFailed, Host, Network

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged")
NODES = ("n1", "n2")
CONTROLLER = "ctl"
# The number of its network; the fixture ``hosts`` counts from 1.
NETWORK = 99
# How long Slurm waits for processes that were sent SIGTERM, before it kills them. Its default is 30.
KILL_WAIT = 10
# How long credentials of a job count; until then Slurm does not start it again. At least 5; the default is 120.
CRED_EXPIRE = 5

CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={cred_expire}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
ReturnToService=2
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait={kill_wait}
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES OverSubscribe=FORCE:4 MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why Slurm cannot be started here, and what to do about it; None if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin")]
    if missing or not Path("/etc/slurm").is_dir():
        return f"no {' and '.join(missing) or '/etc/slurm'} (on Debian and Ubuntu: apt-get install slurm-wlm munge)"
    return None


class Slurm:
    """Two nodes with two CPUs each, and the host where jobs are submitted.

    Attributes:
        nodes: the hosts of n1 and n2.
        controller: the host where slurmctld runs; commands are typed there.
    """

    def __init__(self, network: Network) -> None:
        *self.nodes, self.controller = network.hosts
        # Short: a path of a socket may have 107 characters. It goes with the namespace.
        self.folder = self.controller.namespace.etc / "slurm"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def place(self) -> tuple[str, str]:
        """Where the fixture ``start`` runs a command such as srun."""
        return (self.controller.namespace.name, CONTROLLER)

    def add(self) -> None:
        hosts = dict(zip((*NODES, CONTROLLER), (*self.nodes, self.controller), strict=True))
        lines = [f"NodeName={name} NodeAddr={hosts[name].address} CPUs=2 State=UNKNOWN" for name in NODES]
        configuration = CONFIGURATION.format(
            controller=CONTROLLER,
            address=self.controller.address,
            folder=self.folder,
            cred_expire=CRED_EXPIRE,
            kill_wait=KILL_WAIT,
            nodes="\n".join(lines),
        )
        for name, host in hosts.items():
            (host.namespace.etc / "slurm").mkdir()
            (host.namespace.etc / "slurm" / "slurm.conf").write_text(configuration)
            for other, of_other in hosts.items():
                host.resolve(other, "127.0.1.1" if other == name else of_other.address)
        for part in ("state", *NODES):
            (self.folder / part).mkdir()
        (self.folder / "munge.key").write_bytes(b"a key that is not secret" * 10)
        (self.folder / "munge.key").chmod(0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._start_daemon(CONTROLLER, self.controller, "munged", "--foreground", "--force", *munge)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start_daemon(CONTROLLER, self.controller, "slurmctld", "-D")
        for name, host in zip(NODES, self.nodes, strict=True):
            self._start_daemon(name, host, "slurmd", "-D", "-N", name)
        self._wait(lambda: self.run("sinfo", "-h", "-N", "-t", "idle", check=False).stdout.count("\n") == 2, "slurmd")

    def _start_daemon(self, name: str, host: Host, *command: object) -> None:
        """Start a daemon on a host; its files in /etc are put in place by us, since ip would also mount a /sys without
        cgroups, which slurmd needs."""
        mount = f'for file in {host.namespace.etc}/*; do mount --bind "$file" "/etc/${{file##*/}}"; done; exec "$@"'
        words = ["nsenter", f"--net=/run/netns/{host.namespace.name}", *named(name)]
        words += ["unshare", "--mount", "sh", "-c", mount, "sh", *map(str, command)]
        with (self.folder / f"{name}.{command[0]}.out").open("wb") as out:
            environment = clean_environment(PATH="/usr/sbin:/usr/bin:/sbin:/bin")
            daemon = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        self._daemons.append(daemon)

    def reap(self) -> None:
        """Wait for the daemons, which the removal of the network has killed."""
        for daemon in self._daemons:
            daemon.wait(10)

    def _wait(self, done: Callable[[], bool], daemon: str) -> None:
        deadline = time.monotonic() + 30
        while not done():
            if time.monotonic() > deadline:
                logs = "".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.*"))
                raise CommandFailed(f"{daemon} did not start within 30 s:\n{logs}")
            time.sleep(0.05)

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command such as scontrol to its end, within 30 s."""
        return self.controller.namespace.execute(*named(CONTROLLER), *words, check=check)
