"""README: the tree in it is the first sentence of every module's docstring; its strategy runs; its files exist.

python -m pytest tests/test_readme.py        (python tests/test_readme.py writes the tree anew)
"""

import ast
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FOLDERS = ("mmcp", "encoders", "data_pipelines", "experiments")
BEGIN, END = "by `python tests/test_readme.py` -->\n", "<!-- end of tree -->"


def tree() -> str:
    """One line a module, by folder: its name and the first sentence of its docstring."""
    lines = []
    for folder in FOLDERS:
        modules = sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent, path.name))
        for parent in dict.fromkeys(path.parent for path in modules):
            lines.append(f"{parent.relative_to(ROOT)}/")
            inside = [path for path in modules if path.parent == parent and path.name != "__init__.py"]
            lines += [f"  {path.name:<20} {first_sentence(path)}" for path in inside]
    return "```\n" + "\n".join(lines) + "\n```\n"


def first_sentence(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    text = " ".join(paragraph.split())
    return re.split(r"(?<=[.?])\s(?=[A-Z])", text, maxsplit=1)[0].rstrip(".:")


def test_the_tree_is_that_of_the_code():
    text = README.read_text(encoding="utf-8")
    found = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert found == tree(), "run python tests/test_readme.py"


def test_the_strategy_of_the_readme_makes_a_plan():
    from mmcp.registry import Registry
    from mmcp.sharding import strategies
    from mmcp.sharding.cost import row_costs
    from mmcp.sharding.plan import check
    from mmcp.sharding.workloads import make_workload, reference_model

    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code
    table = Registry("sharding strategy")
    scope = {**vars(strategies), "STRATEGIES": table, "np": np}
    exec(compile(code.group(1), "README.md", "exec"), scope)
    row = make_workload("lecture_hour", seed=0, length=0.01)
    plan = table["even_units"](row, (1, 3), row_costs(row, reference_model("softmax")))
    check(plan, row)


def test_files_it_names_exist():
    names = re.findall(r"experiments/configs/\w+\.yaml", README.read_text(encoding="utf-8"))
    assert names
    for name in names:
        assert (ROOT / name).is_file(), name


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:start] + tree() + text[stop:], encoding="utf-8")
