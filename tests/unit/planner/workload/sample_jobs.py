"""Jobs of one kind, and of clients that talk in rounds."""

from __future__ import annotations

from planner.types import Job

JOBS = [Job(float(i), 10 * (i % 5 + 1), i % 5 + 1, "chat") for i in range(50)]


def talk(messages: int, clients: int) -> list[Job]:
    """Clients that share a first block and alternate; each message begins with the one before."""
    jobs = list[Job]()
    for message in range(messages):
        for client in range(clients):
            path = (0, *(1000 * client + block for block in range(1, 3 * message + 3)))
            jobs.append(Job(len(jobs) * 0.1, 64 * len(path) + 7, 5, "", path))
    return jobs
