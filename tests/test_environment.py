"""environment.yml, constraints.txt and the imports of every module against the dependencies in pyproject.toml.

Run: python -m pytest tests/test_environment.py
"""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"pytorch-gpu": "torch"}
OURS = ("mmcp", "encoders", "data_pipelines", "experiments", "tests")
NOT_IMPORTED = {
    "mypy": "make lint runs it",
    "pytest-timeout": "pytest loads it",
    "ruff": "make lint runs it",
    "tensorboard": "torch.utils.tensorboard writes through it",
    "torchvision": "timm imports it",
}
COMES_WITH = {"pydantic-core": "pydantic"}
LENT = {"common"}  # experiments/peer_step.py is run among the drivers of the peers, beside their common.py
IMPORTED_AS = {"flash-linear-attention": "fla"}  # not installed here, so its files do not tell


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


def test_everything_that_is_installed_with_them_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    needed: set[str] = set()
    waiting = [(requirement, "") for requirement in requirements("hf", "dev").values()]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in needed or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        needed.add(key)
        for line in importlib.metadata.requires(name) or []:
            waiting += [(Requirement(line), extra) for extra in (requirement.extras or {""})]
    names = {key.partition("[")[0] for key in needed}
    assert not names - pins, "pin these in constraints.txt"
    if sys.platform == "linux":
        assert not pins - names, "nothing needs these any more"


def imported(*folders: str) -> set[str]:
    """Return the distributions that the modules below some folders import anywhere in them."""
    providers = importlib.metadata.packages_distributions()
    tops: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops.add((node.module or "").partition(".")[0])
    foreign = tops - set(sys.stdlib_module_names) - set(OURS) - LENT
    distributions = {name: distribution for distribution, name in IMPORTED_AS.items()}
    found = {canonicalize_name(providers.get(top, [distributions.get(top, top)])[0]) for top in foreign}
    return {COMES_WITH.get(name, name) for name in found}


def test_what_the_library_imports_is_a_dependency_or_an_extra_of_running():
    assert not imported(*OURS[:-1]) - requirements("gpu", "decord", "hf").keys()


def test_what_the_tests_import_is_listed():
    assert not imported("tests") - requirements(*PROJECT["optional-dependencies"]).keys()


def test_every_dependency_is_imported_or_has_another_reason():
    running, testing = requirements("gpu", "decord", "hf").keys(), requirements("dev").keys()
    unused = (running - imported(*OURS[:-1])) | (testing - running - imported("tests"))
    assert unused == NOT_IMPORTED.keys()
