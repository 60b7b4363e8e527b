"""Without a flag, files and batches lie in a folder of the user's; a second server has none, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deployment import serve_parts


def test_files_are_kept_without_a_flag_and_a_second_server_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = tmp_path / "diptych" / "batches"
    with serve_parts("--colocated", "1") as first:
        assert first.status()["batches"]["data_dir"] == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        with first.client() as client:
            kept = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
        with serve_parts("--colocated", "1") as second:
            batches = second.status()["batches"]
            assert batches["enabled"] is False
            assert "in use by another gateway" in batches["off"] and str(folder) in batches["off"]
            refusal = second.get("/v1/files")
            assert refusal.status_code == 404
            error = refusal.json()["error"]
            assert error["code"] == "batches_not_enabled"
            assert "in use by another gateway" in error["message"] and "--data-dir" in error["message"]
            # Folders of the machine are its operator's business.
            assert str(tmp_path) not in error["message"]
            # Requests are served all the same.
            with second.client() as client:
                assert client.completions.create(model="tiny", prompt="def", max_tokens=2).choices
    # What was kept is there at the next start.
    with serve_parts("--colocated", "1") as again, again.client() as client:
        assert [one.id for one in client.files.list()] == [kept.id]
    with serve_parts("--colocated", "1", "--data-dir", "none") as off:
        assert off.status()["batches"] == {
            "enabled": False,
            "off": "the server was started without a data directory",
        }
