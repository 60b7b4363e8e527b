"""A container as a container engine starts it, from Linux's own parts: for `tests.system.compose_runner`.

    unshare --mount ... python container.py SPEC

SPEC is JSON: `root` (an empty folder), `binds` (folder by its place inside), `writable` (places that are volumes),
`tmpfs` (places), `hostname`, `hosts` (the text of /etc/hosts), `user`, `groups`, `cwd`, `environ`, `command`. The
root is read-only, no capability is left, and `no_new_privs` is set. Runs as root in name spaces of its own, with the
standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_NO_NEW_PRIVS = 38


def mount(*words: str) -> None:
    """Run mount(8)."""
    subprocess.run(["mount", *words], check=True)


def build_root(spec: dict[str, object], root: Path) -> None:
    """Mount the container's file system on `root`."""
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(root))
    for name in ("bin", "lib", "lib64", "sbin", "usr", "etc", "sys"):
        if Path("/", name).exists():
            (root / name).mkdir()
            mount("--rbind", "-o", "ro", f"/{name}", str(root / name))
    for name in ("proc", "dev"):
        (root / name).mkdir()
    mount("--rbind", "/dev", str(root / "dev"))
    mount("-t", "proc", "proc", str(root / "proc"))
    for inside in spec["tmpfs"]:  # type: ignore[attr-defined]
        (root / inside[1:]).mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", str(root / inside[1:]))
    # Behind the tmpfs, since the place of a bind may lie in one.
    for inside, outside in spec["binds"].items():  # type: ignore[attr-defined]
        (root / inside[1:]).mkdir(parents=True, exist_ok=True)
        mount("--bind", outside, str(root / inside[1:]))
        if inside not in spec["writable"]:  # type: ignore[operator]
            mount("-o", "remount,bind,ro", str(root / inside[1:]))
    hosts = root / "hosts"
    hosts.write_text(str(spec["hosts"]))
    mount("--bind", str(hosts), str(root / "etc/hosts"))
    mount("-o", "remount,ro", str(root))


def main() -> None:
    """Become the container's command."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    root = Path(spec["root"])
    socket.sethostname(spec["hostname"])
    build_root(spec, root)
    os.chroot(root)
    os.chdir(spec["cwd"])
    os.setgroups(spec["groups"])
    os.setgid(spec["user"])
    os.setuid(spec["user"])
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.environ.clear()
    os.environ.update(spec["environ"])
    os.execvp(spec["command"][0], spec["command"])


if __name__ == "__main__":
    main()
