"""Columns of integers against numpy arrays of the same values, drawn with long even stretches and without.

python -m pytest tests/data_pipelines/test_columns.py
"""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines import columns
from data_pipelines.columns import Column, ColumnBuilder

RUNS = st.lists(st.tuples(st.integers(-3, 600), st.integers(1, 9)), max_size=6)
VALUES = st.lists(st.integers(-(2**61), 2**61), max_size=12) | st.lists(st.sampled_from([0, 512, 1024]), max_size=20)


@st.composite
def arrays(draw, increasing: bool = False) -> np.ndarray:
    """Draw values, or runs of equal steps."""
    if draw(st.booleans()) and not increasing:
        return np.array(draw(VALUES), dtype=np.int64)
    steps = [max(step, 0) if increasing else step for step, count in draw(RUNS) for _ in range(count)]
    return np.cumsum([draw(st.integers(-100, 100)), *steps], dtype=np.int64)


def is_same(column: Column, array: np.ndarray) -> None:
    assert len(column) == len(array) and column.tolist() == array.tolist() and [*column] == array.tolist()
    assert [column[i] for i in range(-len(array), len(array))] == [*array.tolist(), *array.tolist()]


@given(arrays())
def test_a_column_holds_its_values(array):
    column = Column.of(array)
    is_same(column, array)
    is_same(Column.from_json(json.loads(json.dumps(column.to_json()))), array)
    is_same(pickle.loads(pickle.dumps(column)), array)
    assert Column.from_json(column.to_json()).to_json() == column.to_json()
    picked = np.arange(len(array))[::-3].reshape(-1, 1)
    np.testing.assert_array_equal(column[picked], array[picked])
    np.testing.assert_array_equal(column[1:7:2], array[1:7:2])
    with pytest.raises(IndexError):
        column[len(array)]
    with pytest.raises(IndexError):
        column[np.array([len(array)])]


@given(arrays(), st.integers(-600, 6000))
def test_a_value_is_found_where_it_first_stands(array, value):
    values = array.tolist()
    for wanted in {value, *values}:
        assert Column.of(array).index(wanted) == (values.index(wanted) if wanted in values else None)


@given(arrays(increasing=True), st.lists(st.integers(-700, 6000), min_size=1), st.sampled_from(["left", "right"]))
def test_searching_is_numpys(array, values, side):
    column = Column.of(array)
    expected = np.searchsorted(array, [*values, *array], side=side)
    np.testing.assert_array_equal(np.searchsorted(column, np.array([*values, *array]), side=side), expected)
    assert int(column.searchsorted(values[0], side=side)) == expected[0]


@given(arrays(increasing=True), st.data())
def test_a_window_keeps_the_numbers(array, data):
    first = data.draw(st.integers(0, len(array) - 1))
    stop = data.draw(st.integers(first + 1, len(array)))
    window = Column.of(array).window(first, stop)
    assert [window[i] for i in range(first, stop)] == array[first:stop].tolist() == window.tolist() == [*window]
    inside = first + np.searchsorted(array[first:stop], array)
    np.testing.assert_array_equal(window.searchsorted(array), inside)
    assert window.index(int(array[stop - 1])) == first + array[first:stop].tolist().index(array[stop - 1])
    if first:
        with pytest.raises(IndexError, match=f"known are {first} to {stop - 1}"):
            window[0]


@given(arrays(), st.integers(1, 5))
def test_a_builder_gives_the_same_column(array, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "PIECE", piece)
        builder = ColumnBuilder()
        for value in array.tolist():
            builder.append(value)
        is_same(builder.build(), array)


def test_even_steps_take_no_room_and_small_values_little():
    assert len(pickle.dumps(Column.of(np.arange(10**6) * 512))) < 1000
    assert len(pickle.dumps(Column.of(np.random.default_rng(0).integers(0, 30000, 1000)))) < 2500
