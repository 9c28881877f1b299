"""Machines for tests: network namespaces with addresses and names of their own, joined by a bridge.

A host is a network namespace. What is started on it gets its own host name, /etc/hosts and process numbers, so that
killing the first process kills all of them. Making namespaces needs root and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
INTERFACE = "eth0"
PORT = 29500  # of the meeting place on host0, which nobody else uses there
NEEDED = ("ip", "unshare", "mount", "hostname")

# The first process waits for those that a launcher leaves behind, as all of them would end with it.
SCRIPT = """
hostname {name} && mount --bind {hosts_file} /etc/hosts || exit
"$@"
code=$?
while set -- /proc/[0-9]* && [ $# -gt 1 ]; do sleep 0.1; done
exit $code
"""


@dataclass
class Host:
    """A machine of a test."""

    name: str
    address: str
    namespace: str
    hosts_file: Path

    def start(self, command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start ``command`` on this machine; its output goes to ``log``. Killing it kills all that it has started."""
        script = SCRIPT.format(name=self.name, hosts_file=self.hosts_file)
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "-"]
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *own, *command],
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
            )

    def set_link(self, state: str) -> None:
        """Pull the machine's network cable ("down"), or plug it in ("up")."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, state)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the machine."""
        for pid in _ip("netns", "pids", self.namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)


def why_not() -> str | None:
    """Return why machines cannot be made here, None if they can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing (Debian: iproute2, util-linux, mount, hostname)"
    try:
        with _namespace(f"zoo-{os.getpid()}-try") as name:
            _ip("-n", name, "link", "add", "try", "type", "bridge")
            subprocess.run(["unshare", "--uts", "--mount", "--pid", "--fork", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.decode().strip()}"
    return None


@dataclass
class Launch:
    """`torchrun` on machines, the first of which is the meeting place of its launchers.

    Args:
    - `machines`: where it runs.
    - `logs`: what is printed on each of them.
    - `launchers`: the first process on each of them.
    """

    machines: list[Host]
    logs: list[Path]
    launchers: list[subprocess.Popen[bytes]]

    def printed(self, index: int) -> str:
        """Return what was printed on a machine until now."""
        return self.logs[index].read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Wait until ``condition`` holds; return the seconds that it took."""
        begin_s = time.monotonic()
        while not condition():
            if time.monotonic() - begin_s > limit_s:
                raise AssertionError("\n".join(["too late", *map(self.printed, range(len(self.logs)))]))
            time.sleep(0.05)
        return time.monotonic() - begin_s

    def wait_for_end(self, indices: list[int], limit_s: float) -> float:
        """Wait until the launchers of these machines have ended; return the seconds that it took."""
        return self.wait_for(lambda: all(self.launchers[index].poll() is not None for index in indices), limit_s)

    def pids(self, index: int, module: str) -> list[int]:
        """Return the processes of a machine that run a Python module themselves, and do not launch others."""
        own = _ip("netns", "pids", self.machines[index].namespace).split()
        lines = {int(pid): Path("/proc", pid, "cmdline").read_bytes().split(b"\0") for pid in own}
        return [pid for pid, words in lines.items() if words[1:4] == [b"-u", b"-m", module.encode()]]


@contextmanager
def torchrun(
    machines: list[Host],
    module: str,
    command: list[str],
    folder: Path,
    environments: Mapping[int, Mapping[str, str]],
    *options: str,
) -> Iterator[Launch]:
    """Start ``python -m MODULE COMMAND`` through torchrun on each machine; what is left of it at the end is killed.

    Args:
    - `machines`: where it runs; the first one is the meeting place.
    - `module`: the Python module that the launchers start.
    - `command`: its arguments.
    - `folder`: where what each machine prints goes.
    - `environments`: variables of single machines.
    - `options`: more options of torchrun, which count more than those given here.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(machines)), "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", f"{machines[0].name}:{PORT}", "--rdzv_id", "1", "--rdzv_conf", "last_call_timeout=2"]
    launch = Launch(machines, [], [])
    try:
        for index, machine in enumerate(machines):
            launch.logs.append(folder / f"{machine.name}.{time.time_ns()}.log")
            environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environments.get(index, {})}
            words = [*launcher, *options, "-m", module, *command]
            launch.launchers.append(machine.start(words, launch.logs[-1], environment))
        yield launch
    finally:
        for machine, process in zip(machines, launch.launchers, strict=False):
            machine.send(signal.SIGKILL)
            process.wait()


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Make ``count`` machines called host0, host1 and so on; all that still runs on them is killed at the end."""
    prefix = f"zoo-{os.getpid()}"
    hosts_file = folder / "hosts"
    addresses = [f"10.213.0.{index + 1}" for index in range(count)]
    names = [f"host{index}" for index in range(count)]
    lines = (f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(lines))
    with _namespace(f"{prefix}-hub") as hub, _machines(hub, prefix, names, addresses, hosts_file) as machines:
        yield machines


@contextmanager
def _machines(hub: str, prefix: str, names: list[str], addresses: list[str], file: Path) -> Iterator[list[Host]]:
    _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
    _ip("-n", hub, "link", "set", "bridge", "up")
    machines: list[Host] = []
    try:
        for name, address in zip(names, addresses, strict=True):
            host = Host(name, address, f"{prefix}-{name}", file)
            _ip("netns", "add", host.namespace)
            machines.append(host)
            _ip("-n", hub, "link", "add", name, "type", "veth", "peer", INTERFACE, "netns", host.namespace)
            _ip("-n", hub, "link", "set", name, "master", "bridge", "up")
            _ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield machines
    finally:
        for host in machines:
            host.send(signal.SIGKILL)
            _ip("netns", "del", host.namespace)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True).stdout.decode()
