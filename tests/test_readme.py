"""README: its tree is the first sentence of every module's docstring; its code keeps the contracts; its commands parse.

python -m pytest tests/test_readme.py        (python tests/test_readme.py writes the tree anew)
"""

import ast
import re
import shlex
import typing
from pathlib import Path

import pytest

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


def blocks(language: str) -> list[str]:
    """Return the README's blocks of code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_every_verb_is_in_its_table():
    from mmcp.cli import VERBS

    assert re.findall(r"^\| `mmcp (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE) == list(VERBS)


def test_every_section_of_the_config_is_in_its_table():
    from experiments.base import RunConfig
    from mmcp.config.typed import is_config

    types = typing.get_type_hints(RunConfig)
    rows = re.findall(r"^\| (`.*`) \| .* \| `(.*)` \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    declared = {name.strip("` "): file for names, file in rows for name in names.split(",")}
    assert declared.keys() == types.keys()
    for name, cls in types.items():
        if is_config(cls):
            assert declared[name] == f"{cls.__module__.replace('.', '/')}.py"


def test_commands_can_be_read():
    from mmcp import cli

    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) > 5
    for command in commands:
        words = shlex.split(command, comments=True)
        cli._parser(cli.VERBS[words[1]]).parse_intermixed_args(words[2:])


def test_its_manifest_can_be_read(tmp_path):
    from data_pipelines.manifest import Sample, parse_line, read_lines

    (tmp_path / "clip.mp4").touch()
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(blocks("json")[0])
    samples = [parse_line(line, manifest=str(manifest), row=row) for row, line in read_lines(manifest)]
    assert [isinstance(sample, Sample) and len(sample.turns) for sample in samples] == [2, 2]


@pytest.fixture
def shown():
    """Return `shown(number)`: run a python block and return what it defines; what it registers is taken back."""
    from encoders import ENCODERS
    from mmcp.attention import ATTENTION
    from mmcp.sharding.strategies import STRATEGIES

    registries = (ATTENTION, ENCODERS, STRATEGIES)
    before = [dict(registry) for registry in registries]

    def run(number: int) -> dict:
        defined = {"__name__": f"readme_{number}"}
        exec(compile(blocks("python")[number], f"README.md, block {number}", "exec"), defined)
        return defined

    yield run
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def test_its_attention_variant_is_its_reference(shown):
    import torch

    from mmcp.attention.base import split_heads
    from mmcp.masks import Mask
    from tests.attention.rows import draw_inputs, relative_error, row_info

    variant, heads = shown(0)["ReluConfig"](), split_heads(6, 2, 1)[0]
    core = variant.build(heads=6, kv_heads=2, head_dim=8)
    for lengths in ([9, 1, 14], []):
        mask = Mask.causal(lengths)
        inputs = draw_inputs(core, mask.num_tokens, heads, seed=0)
        out, expected = core(inputs, row_info(mask), heads), core.reference(inputs, mask, heads)
        pairs = [(out, expected)]
        if lengths:
            grads = (torch.autograd.grad(x.square().sum(), list(inputs.values())) for x in (out, expected))
            pairs += zip(*grads, strict=True)
        assert max(relative_error(got, want, of=()) for got, want in pairs) < 1e-12
    assert variant.flops(Mask.causal([3]), heads=2, head_dim=8) == 2 * 6 * 4 * 8


def test_its_encoder_keeps_the_contract(shown):
    import torch

    from data_pipelines.units import image_unit

    encoder = shown(1)["ImageMeans"](block=4)
    assert encoder.frames == 1 and image_unit((9, 14), (8, 12), encoder).num_tokens == encoder.num_tokens((8, 12))
    module = encoder.build(24)
    rows = module(torch.randint(0, 256, (3, 8, 12, 3), dtype=torch.uint8))
    assert rows.shape == (3 * encoder.num_tokens((8, 12)), 24)
    none = module(module.empty())
    none.sum().backward()
    assert none.shape == (0, 24) and all(parameter.grad is not None for parameter in module.parameters())


def test_its_strategy_makes_exact_plans(shown):
    from mmcp.sharding.cost import row_costs
    from mmcp.sharding.plan import check
    from mmcp.sharding.workloads import make_workload, reference_model

    dealt, row = shown(2)["dealt"], make_workload("lecture_hour", seed=0, length=0.01)
    for mesh in ((1, 1), (1, 3), (2, 2)):
        check(dealt(row, mesh, row_costs(row, reference_model("softmax"))), row)


def test_files_it_names_exist():
    names = re.findall(r"experiments/configs/\w+\.yaml", README.read_text(encoding="utf-8"))
    assert names
    for name in names:
        assert (ROOT / name).is_file(), name


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:start] + tree() + text[stop:], encoding="utf-8")
