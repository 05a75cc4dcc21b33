"""Files of a run: whole or not there, and one line where the disk refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import InfraError
from harness.output import Records, write_whole


def test_a_file_appears_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "matrix.json", "{}\n")
    assert "{}\n" == (tmp_path / "new" / "matrix.json").read_text()
    assert ["matrix.json"] == [path.name for path in (tmp_path / "new").iterdir()]


def test_a_refusing_disk_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(InfraError, match=r"cannot write .*matrix\.json"):
        write_whole(tmp_path / "file" / "matrix.json", "{}")
    with pytest.raises(InfraError, match=r"cannot write .*records.jsonl"):
        Records(tmp_path / "file")
    assert "old" == (tmp_path / "file").read_text()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here to stand for a full disk")
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    records = Records(tmp_path)
    from tests.test_verdict import record

    with pytest.raises(InfraError, match="No space left"):
        records.add(record())
