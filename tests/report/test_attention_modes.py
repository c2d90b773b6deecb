"""docs/attention_modes.md against the code it is written from.

Run: python -m pytest tests/report/test_attention_modes.py
"""

from pathlib import Path

from mmcp.report.attention_modes import MASKS, refusal_of_mask, refusals, render

DOCUMENT = Path(__file__).parents[2] / "docs" / "attention_modes.md"


def test_the_document_is_what_the_code_says():
    remedy = "run `python -m mmcp.report.attention_modes > docs/attention_modes.md`"
    assert DOCUMENT.read_text() == render(), remedy


def test_refusals_are_provoked_not_written():
    messages = list(refusals())
    assert any("mode 'ring' needs answers that merge by log-sum-exp, which Linear is not" in text for text in messages)
    assert any("chunks=3 groups of heads" in text for text in messages)
    assert not refusal_of_mask("softmax", MASKS["prefix"]) and refusal_of_mask("linear", MASKS["prefix"])
