"""What each verb prints, to which stream, and with which exit code.

Run: python -m pytest tests/test_cli.py
"""

import importlib
import inspect
import json
import shlex

import pytest

from mmcp import cli
from mmcp.report.outcome import Outcome


def fail(**_):
    raise ValueError("ranks=3 does not divide 4; use 2")


def crash(**_):
    return {}["missing"]


def interrupt(**_):
    raise KeyboardInterrupt


def count(*, number: int) -> Outcome:
    return Outcome(record={"number": number}, tables=[f"number {number}"], is_ok=number > 0)


def _number(parser):
    parser.add_argument("number", type=int)
    parser.add_argument("--json", action="store_true")


@pytest.fixture
def verb(monkeypatch):
    """Return `add(function, arguments)`: make a function of this file the verb `try`."""

    def add(function, arguments=lambda parser: None):
        job = cli.Verb("try", "try it", "mmcp try", f"{__name__}:{function.__name__}", arguments)
        monkeypatch.setitem(cli.VERBS, "try", job)

    return add


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_help_with_an_example_that_parses(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"example: mmcp {name}" in capsys.readouterr().out
    cli._parser(cli.VERBS[name]).parse_intermixed_args(shlex.split(cli.VERBS[name].example)[2:])


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_a_job_that_takes_its_options(name):
    verb = cli.VERBS[name]
    module, function = verb.job.split(":")
    job = inspect.signature(getattr(importlib.import_module(module), function))
    given = vars(cli._parser(verb).parse_intermixed_args(shlex.split(verb.example)[2:])).keys() - {"json", "debug"}
    assert given == job.parameters.keys()


def test_the_overview_names_every_verb(capsys):
    assert cli.main(["--help"]) == 0 and cli.main([]) == 2
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in cli.VERBS)


def test_a_mistyped_verb_is_told_its_neighbour(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: unknown verb 'trian'; did you mean 'train'?\n"
    assert cli.main(["zzz"]) == 2
    assert "use one of prepare, train" in capsys.readouterr().err


def test_options_may_stand_between_the_settings():
    options = cli._parser(cli.VERBS["train"]).parse_intermixed_args(["c.yaml", "a=1", "--ranks", "2", "b.c=-2"])
    assert (options.overrides, options.ranks, str(options.config)) == (["a=1", "b.c=-2"], 2, "c.yaml")


def test_an_error_is_one_line_and_its_traceback_is_asked_for(verb, capsys, monkeypatch):
    verb(fail)
    assert cli.main(["try"]) == 1
    assert capsys.readouterr() == ("", "error: ranks=3 does not divide 4; use 2\n")
    assert cli.main(["try", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("MMCP_DEBUG", "1")
    assert cli.main(["try"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_the_program_names_its_kind_and_place(verb, capsys):
    verb(crash)
    assert cli.main(["try"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: KeyError: 'missing' (") and "test_cli.py:" in error and error.count("\n") == 1


def test_an_interrupt_is_quiet(verb, capsys):
    verb(interrupt)
    assert cli.main(["try"]) == 130
    assert capsys.readouterr() == ("", "")


def test_the_result_is_a_table_or_json_and_decides_the_exit_code(verb, capsys):
    verb(count, _number)
    assert cli.main(["try", "3"]) == 0
    assert "number 3" in capsys.readouterr().out
    assert cli.main(["try", "0", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"number": 0}


def test_doctor_reports_every_finding_as_json(capsys):
    assert cli.main(["doctor", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"] and findings.keys() >= {"python", "torch", "gpu", "attention", "media", "decord", "memory"}
    assert all(finding["remedy"] for finding in findings.values() if finding["status"] != "ok")
