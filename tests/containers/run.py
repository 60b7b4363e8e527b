"""Tries the image and compose with a real container engine: `make containers`.

    python -m tests.containers.run --out .run/containers

The engine, a base image and wheels are taken from Debian's packages and pip's index, once. The daemon runs in a network
namespace and a mount namespace of its own, with its data in a temporary folder that is removed at the end. Needs root
and a Debian; skips in words, with exit status 0, where there can be no engine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.containers.checks import Checks
from tests.containers.debian import Downloads, Unavailable, why_unavailable
from tests.containers.engine import enter_namespaces, running_engine
from tests.containers.project import Project
from tests.containers.report import Report


def run_trial(folder: Path, downloads: Downloads, report: Report) -> None:
    """All checks, with the engine's data in `folder`. Raises Unavailable."""
    with running_engine(folder, downloads) as engine:
        engine.import_base()
        python = engine.run(
            "docker", "run", "--rm", "--network", "none", engine.base, "python", "-V"
        ).split()[1]
        cores = f"{os.cpu_count()} cores, nice {os.nice(0)}"
        report.versions = {
            **engine.versions(),
            "kernel": platform.release(),
            "base": f"Debian 12, Python {python}",
        }
        report.versions |= {"machine": cores}
        checks = Checks(Project(engine))
        if not all(report.check(what, call) for what, call in checks.of_image()):
            return
        for what, call in checks.of_project():
            report.check(what, call)


def main() -> int:
    """Run the trial; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".run/containers"), help="folder for report and downloads"
    )
    out = parser.parse_args().out.absolute()
    report = Report(out / "report.md")
    # So that a trial that is told to stop ends the daemon, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if why := why_unavailable():
            raise Unavailable(why)
        downloads = Downloads(out / "downloads")
        downloads.take_all()
        enter_namespaces()
        folder = Path(tempfile.mkdtemp(prefix="dpt", dir="/var/tmp"))
        try:
            run_trial(folder, downloads, report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except Unavailable as error:
        print(f"skipped: {error}")
        return 0
    print(f"\n{report.page()}\nwritten to {report.file}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
