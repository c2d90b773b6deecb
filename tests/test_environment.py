"""environment.yml and constraints.txt against the dependencies in pyproject.toml.

Run: python -m pytest tests/test_environment.py
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"pytorch-gpu": "torch"}


def requirements(*extras: str) -> dict[str, Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_the_workstation_has_every_dependency_and_extra_in_the_same_range():
    listed = YAML(typ="safe", pure=True).load(ROOT / "environment.yml")["dependencies"]
    conda = [line for line in listed if isinstance(line, str)]
    pip = next(line["pip"] for line in listed if isinstance(line, dict))
    found = {}
    for line in [*conda, *pip]:
        if line not in ("python=3.11", "pip", "--editable ."):
            requirement = Requirement(line)
            requirement.name = CONDA_NAMES.get(requirement.name, requirement.name)
            found[canonicalize_name(requirement.name)] = str(requirement)
    wanted = requirements(*PROJECT["optional-dependencies"])
    assert found == {name: str(requirement) for name, requirement in wanted.items()}
    assert "python=3.11" in conda and "--editable ." in pip


def test_what_the_two_commands_install_is_pinned_inside_the_ranges():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    for name, pin in pins.items():
        assert pin.url is None and [clause.operator for clause in pin.specifier] == ["=="], name
    for name, requirement in requirements("hf", "dev").items():
        version = next(iter(pins[name].specifier)).version
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"
