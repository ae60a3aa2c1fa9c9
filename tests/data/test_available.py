"""The memory that is left is that of the machine or of a container, whichever is less."""

import pytest

from sparcel.data.shared import available


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file")),
        ("0::/", ".", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/of/the/host",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
@pytest.mark.parametrize("limit", [700, 1 << 40, "max"])
def test_limits_of_containers_count(tmp_path, line, folder, files, limit):
    assert available(tmp_path) == 1 << 62  # nothing is known
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2 kB\n")
    assert available(tmp_path) == 2048
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    for file, content in zip(files, (limit, 500, 0), strict=True):
        if file.startswith("memory."):
            (group / file).write_text(f"{content}\n")
    (group / "memory.stat").write_text(f"anon 400\n{files[2]} 100\n")
    assert available(tmp_path) == (300 if limit == 700 else 2048)
