"""What a config file and its overrides become, and what is said about each mistake, against values written by hand.

Run: python -m pytest tests/config
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcp.config import ConfigError, OneOf, config, dump, load
from mmcp.registry import Registry

MIXERS = Registry("mixer")


@MIXERS.register("softmax")
@config
class Softmax:
    name: Literal["softmax"] = "softmax"
    heads: int = 4
    window: int | None = None


@MIXERS.register("decayed")
@config
class Decayed:
    name: Literal["decayed"] = "decayed"
    decay: float = 0.5
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if self.decay > 1:
            raise ValueError(f"decay={self.decay} is above 1; use at most 1")


@config
class Optim:
    learning_rate: float = 1e-3
    eps: float = 1e-8


@config
class Job:
    """A config with every kind of field."""

    steps: int
    label: str = "x"
    verbose: bool = False
    num_workers: int = 2
    limit: int | str = 3
    mixer: Annotated[Any, OneOf(MIXERS)] = Softmax(heads=9, window=3)
    layers: tuple[Annotated[Any, OneOf(MIXERS)], ...] = ()
    spare: Annotated[Any, OneOf(MIXERS)] | None = None
    optim: Optim = Optim(learning_rate=5.0)


@config
class Texts:
    value: str
    values: dict[str, str] = field(default_factory=dict)


@config
class Numbers:
    value: float
    count: int = 0


@pytest.fixture
def read(tmp_path):
    """Return `read(text, *overrides, cls=Job)`: write the text to a file and load it."""

    def write_and_load(text: str, *overrides: str, cls: type = Job):
        path = tmp_path / "job.yaml"
        path.write_text(text, encoding="utf-8")
        return load(cls, path, overrides)

    return write_and_load


def problems(read, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    assert str(caught.value).startswith("/"), "the absolute path is named"
    return caught.value.problems


NUMBERS = Path(__file__).parents[1] / "data" / "cases" / "B67_numbers.yaml"
CASES = [line.split(": ", 1) for line in NUMBERS.read_text().splitlines()]
AS_FLOAT = {"lr_plain": 1e-5, "lr_dot": 1e-5, "lr_cap": 1e-5, "eps": 1e-8, "mu": 1e4, "hex": 16.0}
AS_INTEGER = {"mu": 10_000, "hex": 16}
NOT_TEXT = {"lr_plain", "lr_dot", "lr_cap", "eps", "mu", "hex", "null_word", "tilde"}


@pytest.mark.parametrize(("key", "text"), CASES)
def test_each_value_of_B67_is_read_exactly_or_refused_by_name(read, key, text):
    for cls, name, expected in ((Numbers, "value", AS_FLOAT), (Job, "steps", AS_INTEGER)):
        if key in expected:
            value = getattr(read(f"{name}: {text}\n", cls=cls), name)
            assert value == expected[key] and type(value) is type(expected[key])
        else:
            with pytest.raises(ConfigError, match=rf"line 1: {name}"):
                read(f"{name}: {text}\n", cls=cls)
    with pytest.raises(ConfigError, match="expected a boolean"):
        read(f"steps: 1\nverbose: {text}\n")
    if key in NOT_TEXT:
        with pytest.raises(ConfigError, match="in quotes it is text"):
            read(f"value: {text}\n", cls=Texts)
    else:
        assert read(f"value: {text}\n", cls=Texts).value == text
    assert read(f"value: '{text}'\n", cls=Texts).value == text


def test_values_whose_meaning_depends_on_the_version_say_what_to_write(read):
    found = problems(read, "steps: 010\nverbose: no\nnum_workers: 1_000\noptim: {learning_rate: 1:30, eps: .nan}\n")
    assert [line.split(": ")[1].split(" =")[0] for line in found] == [
        "steps",
        "verbose",
        "num_workers",
        "optim.learning_rate",
        "optim.eps",
    ]
    for line, words in zip(found, ("octal", "true or false", "underscores", "base 60", "finite"), strict=True):
        assert words in line, line


def test_defaults_then_file_then_overrides(read):
    job = read("steps: 1\noptim: {eps: 1e-6}\nnum_workers: 5\n", "num_workers=7", "mixer.heads=2")
    assert job.num_workers == 7
    assert job.optim == Optim(learning_rate=5.0, eps=1e-6), "the default config of the section stays underneath"
    assert job.mixer == Softmax(heads=2, window=3)
    assert read("steps: 1\n", "mixer.name=decayed").mixer == Decayed(), "another choice starts from its own defaults"
    assert read("steps: 1\nlayers: [{name: softmax}]\n", "layers.0.heads=1e2").layers == (Softmax(heads=100),)
    assert read("steps: 1\n", "mixer={name: decayed, sizes: [1, 2]}").mixer == Decayed(sizes=(1, 2))
    assert read("steps: 1\n", "spare.name=softmax", "label='a=b'").label == "a=b"


def test_every_mistake_is_told_at_once_with_its_line(read):
    text = """steps: 1
lerning_rate: 1
learning_rate: 1
num-workers: 3
verbose: true
verbose: false
label: 3
layers: [{name: softmx}, {heads: 1}, {name: decayed, decay: 1.5}, 3, {name: softmax, decay: 1}]
optim: {eps: small}
"""
    found = problems(read, text, "optim.learning_rat=2", "steps", "layers.9.heads=1", "label=[")
    expected = [
        ("line 2: lerning_rate = 1", "did you mean optim.learning_rate?"),
        ("line 3: learning_rate = 1", "it belongs at optim.learning_rate"),
        ("line 4: num-workers = 3", "did you mean num_workers?"),
        ("line 6: verbose = false", "duplicate key, first given on line 5"),
        ("line 7: label = 3", 'in quotes it is text: "3"'),
        ("line 8: layers.0", "did you mean softmax?"),
        ("line 8: layers.1", "`name` is missing"),
        ("line 8: layers.2", "decay=1.5 is above 1; use at most 1"),
        ("line 8: layers.3 = 3", "expected an object"),
        ("line 8: layers.4.decay = 1", "section 'layers.4' has: name, heads, window"),
        ("line 9: optim.eps = small", "expected a number"),
        ("override: optim.learning_rat = 2", "did you mean learning_rate?"),
        ("override 'steps'", "section.key=value"),
        ("override 'layers.9.heads=1'", "5 list indices"),
        ("override 'label=['", "not YAML"),
    ]
    assert len(found) == len(expected), "\n".join(found)
    for line, (place, reason) in zip(found, expected, strict=True):
        assert line.startswith(place) and reason in line, line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- 1\n", "expected `key: value` lines"),
        ("steps: [1\n", "not YAML 1.2"),
        ("steps: 1\n---\nsteps: 2\n", "not YAML 1.2"),
        ("label: a\n", "steps: is required and missing"),
        ("steps: !!python/object/apply:os.system ['true']\n", "is not allowed"),
        ("steps: 1\nmixer: &a {name: *a}\n", "alias"),
        ("steps: 1e400\n", "too large"),
        ("steps: 1.5\n", "expected an integer"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(read, text, reason):
    assert any(reason in line for line in problems(read, text))


def test_a_path_that_cannot_be_read_names_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/missing.yaml: no such file"):
        load(Job, "missing.yaml")
    with pytest.raises(ConfigError, match=rf"{tmp_path}: is a folder"):
        load(Job, ".")
    (tmp_path / "latin.yaml").write_bytes(b"label: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(Job, "latin.yaml")


def test_configs_made_in_python_are_checked_as_strictly():
    with pytest.raises(ValueError, match="valid integer"):
        Softmax(heads=1.5)
    with pytest.raises(ValueError, match="finite"):
        Optim(eps=float("nan"))
    with pytest.raises(ValueError, match="Unexpected keyword"):
        Softmax(head=1)


TRICKY = [
    "no",
    "010",
    "1:30",
    "1_000",
    "2024-01-02",
    "1e-5",
    "null",
    "~",
    "",
    " a",
    "a: b",
    "#",
    "'",
    '"',
    "\n",
    "\x07",
    "é",
]
TEXT = st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs"]))
MIXER = st.builds(Softmax, heads=st.integers(), window=st.none() | st.integers()) | st.builds(
    Decayed, decay=st.floats(max_value=1, allow_infinity=False), sizes=st.lists(st.integers()).map(tuple)
)
JOBS = st.builds(
    Job,
    steps=st.integers(),
    label=TEXT,
    verbose=st.booleans(),
    limit=st.integers() | TEXT,
    mixer=MIXER,
    layers=st.lists(MIXER, max_size=3).map(tuple),
    spare=st.none() | MIXER,
    optim=st.builds(Optim, learning_rate=st.floats(allow_nan=False, allow_infinity=False)),
)


@given(JOBS)
def test_what_is_written_is_read_back_equal(tmp_path_factory, job):
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump(job), encoding="utf-8")
    assert load(Job, path) == job


@given(TEXT, st.dictionaries(TEXT, TEXT, max_size=3))
def test_pyyaml_reads_the_written_text_alike(value, values):
    yaml = pytest.importorskip("yaml", reason="PyYAML reads YAML 1.1; it comes with the hf extra")
    assert yaml.safe_load(dump(Texts(value=value, values=values))) == {"value": value, "values": values}
