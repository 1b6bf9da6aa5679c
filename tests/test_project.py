"""The house: what imports what, what is public, what is documented."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import adammcmc
from tests.mutants import MUTANTS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "adammcmc"

# a package imports only from packages before it in the line of CONTRIBUTING.md
LINE = next(line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("> `errors`"))
ORDER = re.findall(r"`(\w+)`", LINE)
LEVEL = {name: level for level, name in enumerate(ORDER)}


def imported_rooms(file: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "adammcmc":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return rooms


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_flow_one_way(file: Path) -> None:
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in LEVEL, f"{room} has no place in the order of CONTRIBUTING.md"
    for other in imported_rooms(file) - {room}:
        assert LEVEL[other] < LEVEL[room], f"{room} must not import from {other}"


def test_every_package_and_its_files_are_on_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {entry.name.removesuffix(".py") for entry in SOURCE.iterdir()} - {"__init__", "__pycache__", "py.typed"} == set(
        LEVEL
    )
    for package in set(LEVEL) - {"errors", "jets", "cli"}:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{package}/`"))
        for file in (SOURCE / package).glob("[!_]*.py"):
            assert f"`{file.name}`" in row, f"{package}/{file.name} is not on the map of CONTRIBUTING.md"


def test_the_top_level_is_small() -> None:
    assert len([entry for entry in SOURCE.iterdir() if entry.name != "__pycache__"]) <= 12


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_classes_and_functions_are_short(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (350 if isinstance(node, ast.ClassDef) else 70), f"{node.name} has {length} lines"


def test_every_public_name_has_a_place_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    names = set(adammcmc.__all__) - {"acceptance", "calibration", "diagnostics", "kernels", "target"}
    names |= {f"kernels.{name}" for name in adammcmc.kernels.__all__ if name[0].islower()}
    missing = [name for name in names if not re.search(rf"^::: adammcmc\.(\w+\.)*{re.escape(name)}$", pages, re.MULTILINE)]
    assert not missing


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_everything_public_has_a_docstring(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), file
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{file.name}: {node.name}"


@pytest.mark.parametrize("name", [name for name in adammcmc.kernels.__all__ if name[0].islower()])
def test_kernels_say_what_they_are(name: str) -> None:
    text = getattr(adammcmc.kernels, name).__doc__
    assert "Target:" in text
    assert "**exactly**" in text.lower() or "**approximately**" in text.lower()
    assert "Cost:" in text
    assert "tau =" in text or "u = " in text or "(tau, v')" in text


def test_paper_to_code_names_things_that_exist() -> None:
    """Every name in the table exists below `adammcmc`, and so does every test file."""
    table = [line for line in (ROOT / "docs" / "paper.md").read_text().splitlines() if line.startswith("|")]
    references = {name for name in re.findall(r"`([\w.]+)(?:\([^`]*\))?`", "\n".join(table)) if not name.startswith("test_")}
    assert len(references) > 20
    for name in references:
        assert pkgutil.resolve_name(f"adammcmc.{name}"), name
    for test in set(re.findall(r"`(test_\w+)`", "\n".join(table))):
        assert (ROOT / "tests" / f"{test}.py").exists(), test


def test_the_readme_quotes_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {adammcmc.__version__}\n" in citation


def test_every_mutant_finds_its_line() -> None:
    """A mutant whose line was changed since would break nothing, and be called noticed by nobody."""
    for mutant in MUTANTS:
        text = (ROOT / "src" / "adammcmc" / mutant.file).read_text()
        assert text.count(mutant.right) == 1, f"{mutant.name}: {mutant.file} has this line {text.count(mutant.right)} times"
        assert all((ROOT / test).exists() for test in mutant.tests.split()), mutant.name
