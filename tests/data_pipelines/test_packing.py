"""Packing into rows against its defining properties: order kept, nothing lost, first fit.

python -m pytest tests/data_pipelines/test_packing.py
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.packing import pack_rows


@given(st.lists(st.integers(0, 30), max_size=40))
def test_each_document_is_in_the_first_row_that_had_room(lengths):
    rows = pack_rows(lengths, 30)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for number, row in enumerate(rows):
        assert list(row) == sorted(row) and sum(lengths[document] for document in row) <= 30
        for document in row:
            for earlier in rows[:number]:
                assert sum(lengths[other] for other in earlier if other < document) + lengths[document] > 30


def test_the_example_of_the_docstring():
    assert pack_rows([5, 4, 3, 6], 8) == ((0, 2), (1,), (3,))


def test_a_document_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="sample 'talk' has 9 tokens, a row holds 8"):
        pack_rows([3, 9], 8, names=["hi", "talk"])
