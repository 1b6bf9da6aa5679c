"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from adammcmc.posterior.store.atomic import clear, whole, write_whole


def test_what_fails_on_the_way_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    write_whole(path, "1 2 3")

    def fail() -> None:
        with whole(path) as file:
            file.write_text("4")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["numbers.txt"]
    assert path.read_text() == "1 2 3"


def test_the_temporary_name_is_a_new_file_of_its_own(tmp_path: Path) -> None:
    """Nothing that stands there beforehand is written through."""
    with whole(tmp_path / "a.txt") as one, whole(tmp_path / "a.txt") as other:
        assert one != other
        assert one.is_file()
        assert not one.is_symlink()
        one.write_text("1")
        other.write_text("2")


def test_what_killed_processes_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / ".a[1]-0.json"
    left = [tmp_path / f".{path.name}.{pid}.json" for pid in (7, 12345)]
    others = [path, tmp_path / "..a1-0.json.7.json", tmp_path / "..a[1]-01.json.7.json", tmp_path / ".a[1]-0.lock"]
    for file in (*left, *others):
        file.write_text("")
    with whole(path) as file:
        assert file.name.removeprefix(f".{path.name}.")[0].isdigit(), "as those above"
        file.write_text("")
    clear(path)
    assert set(tmp_path.iterdir()) == set(others)
    clear(tmp_path / "none" / "a.json")  # a folder that is not there has nothing
