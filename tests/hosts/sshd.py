"""A real sshd on each host of a network, with keys made for the test, and the ssh configuration to reach them.

Nothing of the machine's own is read or changed: neither ~/.ssh nor /etc/ssh, nor an agent that holds keys.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.conftest import REPOSITORY, RankProcess
from tests.hosts.hosts import Host, run

# Not 22: an ssh that was not told of the configuration reaches nobody.
PORT = 2222
SERVER = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


def why_not() -> str | None:
    """Return why this machine cannot run sshd, and what to do about it; None if it can."""
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)]
    if missing or SERVER is None:
        return "ssh or sshd not found (on Debian and Ubuntu: apt-get install openssh-client openssh-server)"
    return None


class SshHosts:
    """Hosts that ssh reaches by their name, such as ``hostB``, or by its last letter, ``b``.

    Args:
        env: variables that each session has, besides those to find this package.

    Attributes:
        config: ssh's configuration file.
        command: what to type for ssh, also as the remote shell of another program.
        known_hosts: the file with the hosts' keys.
        key: the file of the user's own key.
        authorized_keys: the file with the keys that each sshd accepts.
        servers: the sshd of each host, and then those of ``also_serve``.
    """

    def __init__(self, hosts: list[Host], folder: Path, **env: str) -> None:
        self.hosts = hosts
        self._folder = folder
        self._env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **env}
        folder.mkdir()
        self.config, self.known_hosts = folder / "config", folder / "known_hosts"
        self.key = self._make_key("user")
        self.authorized_keys = folder / "authorized_keys"
        self.authorized_keys.write_text(self._public("user"))
        self.known_hosts.write_text("".join(self._known(host) for host in hosts))
        self.config.write_text("".join(map(self._reached, hosts)) + self._for_all)
        self.config.chmod(0o600)
        self.servers = [self.serve(host) for host in hosts]
        for server in self.servers:
            server.wait_for("Server listening")

    @property
    def command(self) -> str:
        return f"ssh -F {self.config}"

    def serve(self, host: Host, before: str = "true", port: int = PORT, **env: str) -> RankProcess:
        """Start an sshd on a host.

        Args:
            before: a shell command, whose mounts only this sshd and its sessions see.
            env: further variables of its sessions.
        """
        Path("/run/sshd").mkdir(exist_ok=True)  # an empty folder that sshd asks for
        settings = {
            "Port": port,
            "HostKey": self._folder / host.name,
            "AuthorizedKeysFile": self.authorized_keys,
            "StrictModes": "no",  # the test's folder is below a folder that everybody may write to
            "PermitRootLogin": "prohibit-password",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "UseDNS": "no",
            "MaxStartups": 100,
            "PidFile": "none",
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in {**self._env, **env}.items()),
        }
        path = self._folder / (f"{host.name}.sshd" if port == PORT else f"{host.name}-{port}.sshd")
        path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        return host.start("sh", "-c", f'{before} && exec "$@"', "sh", SERVER, "-D", "-e", "-f", path)

    def also_called(self, name: str, host: Host, **settings: object) -> None:
        """Have ssh reach a host by another name, with these settings of ssh's configuration."""
        words = {"HostName": host.address, **settings}
        lines = "".join(f"  {setting} {value}\n" for setting, value in words.items())
        self.config.write_text(f"Host {name}\n{lines}{self.config.read_text()}")

    def also_serve(self, name: str, host: Host, before: str = "true", **env: str) -> None:
        """Start one more sshd on a host, which ssh reaches by another name: see ``serve``."""
        port = PORT + len(self.servers)
        self.servers.append(self.serve(host, before, port, **env))
        self.servers[-1].wait_for("Server listening")
        self.also_called(name, host, Port=port, HostKeyAlias=f"[{host.address}]:{PORT}")

    @property
    def _for_all(self) -> str:
        return (
            f"Host *\n  Port {PORT}\n  User root\n"
            f"  IdentityFile {self.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )

    @staticmethod
    def _reached(host: Host) -> str:
        return f"Host {host.name} {host.name[-1].lower()}\n  HostName {host.address}\n"

    def _known(self, host: Host) -> str:
        self._make_key(host.name)
        return f"[{host.address}]:{PORT} {self._public(host.name)}"

    def _make_key(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", path)
        return path

    def _public(self, name: str) -> str:
        return (self._folder / f"{name}.pub").read_text()
