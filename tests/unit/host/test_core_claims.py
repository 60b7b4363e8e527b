"""Workers of one machine get different cores, whatever deployments they belong to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.host.core_claims import CoreClaim

HOLDER = """
import sys
from pathlib import Path
from services.host.core_claims import CoreClaim
claim = CoreClaim(Path(sys.argv[1]))
print(claim.take_cores(2, [0, 1, 2, 3]), flush=True)
sys.stdin.read()
"""


def test_cores_are_held_by_one_process_and_free_when_it_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        claim, other = CoreClaim(tmp_path), CoreClaim(tmp_path)
        assert claim.take_cores(1, [0, 1, 2, 3]) == 2
        assert other.take_cores(2, [0, 1, 2, 3]) is None and other.take_cores(1, [0, 1, 2, 3]) == 3
        holder.kill()
        holder.communicate()
    other.release()
    assert CoreClaim(tmp_path).take_cores(2, [0, 1, 2, 3]) == 0


def test_no_folder_means_no_core(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert CoreClaim(tmp_path / "file" / "below").take_cores(1, [0]) is None
