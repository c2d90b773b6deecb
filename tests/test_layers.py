"""The imports of every module, read from its source, against the layers of the library.

Rows of mmcp: a module imports its own row or rows above it, and there are no circles. `encoders` and `data_pipelines`
import rows 1 and 2 only, and not each other. Neither they nor rows 1 to 3 import torch.distributed.
Run: python -m pytest tests/test_layers.py
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = (
    ("sequence", "registry", "config"),
    ("interleave", "positions", "masks", "sharding"),
    ("attention", "model"),
    ("parallel",),
    ("planning",),
    ("training", "generate"),
    ("report", "integrations"),
    ("cli",),
)
ROW = {name: number for number, names in enumerate(ROWS, 1) for name in names}
OURS = ("mmcp", "encoders", "data_pipelines", "experiments")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in OURS
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(module: str, source: str) -> set[str]:
    """Return the modules that a module's source imports anywhere in it, ours as modules, not as names in them."""
    package = module if MODULES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {_as_module(name) for name in found}


def _as_module(name: str) -> str:
    """mmcp.sequence.pack -> mmcp.sequence; names of other packages stay as they are."""
    while name.split(".")[0] in OURS and name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def row(module: str) -> int:
    """Return the row of a module of mmcp; the package itself stands above all."""
    parts = module.split(".")
    return ROW[parts[1]] if len(parts) > 1 else 0


def faults(module: str, source: str) -> Iterator[str]:
    """Say which imports of a module break the layers."""
    package = module.split(".")[0]
    for name in sorted(imports(module, source)):
        target = name.split(".")[0]
        is_low = package in ("encoders", "data_pipelines") or (package == "mmcp" and row(module) <= 3)
        if is_low and (name + ".").startswith("torch.distributed."):
            yield f"{module} imports {name}"
        if package == "mmcp" and target in OURS and (target != "mmcp" or row(name) > row(module)):
            yield f"{module} imports {name}"
        is_foreign = target in OURS and target != package and (target != "mmcp" or row(name) > 2)
        if package in ("encoders", "data_pipelines") and is_foreign:
            yield f"{module} imports {name}"


def test_every_module_of_mmcp_has_a_row():
    names = {module.split(".")[1] for module in MODULES if module.startswith("mmcp.")}
    assert names <= ROW.keys(), f"give {sorted(names - ROW.keys())} a row in this file"


def test_imports_follow_the_layers():
    assert not [fault for module, path in MODULES.items() for fault in faults(module, path.read_text())]


def test_there_are_no_circles():
    graph = {module: imports(module, path.read_text()) & MODULES.keys() - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "source", "is_fault"),
    [
        ("mmcp.sequence", "from mmcp.sharding.plan import check", True),
        ("mmcp.sharding.plan", "from mmcp.sequence import Segment", False),
        ("mmcp.sharding.plan", "import torch.distributed as dist", True),
        ("mmcp.attention.base", "def f():\n    from torch import distributed", True),
        ("mmcp.attention.base", "from torch.distributed.tensor import DTensor", True),
        ("mmcp.parallel.launch", "import torch.distributed as dist", False),
        ("mmcp.parallel.launch", "import encoders.base", True),
        ("mmcp.cli", "import mmcp.report.doctor", False),
        ("encoders.audio", "from mmcp import registry", False),
        ("encoders.audio", "from mmcp.attention import softmax", True),
        ("data_pipelines.clip", "from encoders.base import ENCODERS", True),
        ("data_pipelines.clip", "from .decode import frames", False),
    ],
)
def test_the_check_itself_sees_each_kind_of_fault(module, source, is_fault):
    assert bool(list(faults(module, source))) == is_fault


def test_the_command_line_starts_without_torch():
    code = "import sys, mmcp.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
