"""Replaces the two agents that Ray's raylet starts, so that a Ray head starts faster and uses less CPU.

    python agent.py PREFIX NAME=PORT ...

A raylet starts two agents, waits for the ports that they write to files, and ends when one of them ends. The agents
serve Ray's dashboard and build runtime environments; Diptych uses neither. This program writes the ports in their place
(-1: not in use; 0: a port that it binds and never answers on) and waits for the raylet's end. It uses only the standard
library and is run by path, so it starts in 20 ms. PREFIX is the path of the files, in which `*` stands for the port's
name.
"""

import os
import select
import socket
import sys

LOOPBACK = "127.0.0.1"


def write_port(path: str, port: int) -> None:
    """Write a port to a file, atomically: a reader never sees a half-written file."""
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(str(port))
    os.rename(f"{path}.new", path)


def wait_for_end(pid: int) -> None:
    """Return when the process `pid` (this program's parent) has ended."""
    descriptor = os.pidfd_open(pid)
    # A different parent means that `pid` had ended before its descriptor was opened.
    if os.getppid() == pid:
        select.select([descriptor], [], [])


def main() -> None:
    """Write the ports that the raylet waits for, then wait for its end."""
    parent, (prefix, *ports) = os.getppid(), sys.argv[1:]
    held = []
    for one in ports:
        name, _, wanted = one.partition("=")
        port = int(wanted)
        if port == 0:
            held.append(socket.socket())
            held[-1].bind((LOOPBACK, 0))
            port = held[-1].getsockname()[1]
        write_port(prefix.replace("*", name), port)
    wait_for_end(parent)


if __name__ == "__main__":
    main()
