"""What a sequence derives from its segments against the same, token by token.

Run: python -m pytest tests/test_sequence.py
"""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from mmcp.sequence import NO_LABEL
from tests.sharding.rows import rows


@settings(max_examples=200)
@given(rows(max_segments=9))
def test_labels_and_documents_from_segments_are_those_of_tokens(sequence):
    assert np.array_equal(sequence.label_positions, np.flatnonzero(sequence.labels != NO_LABEL))
    documents = sequence.documents.tolist()
    starts = [place for place, (before, here) in enumerate(pairwise([-1, *documents])) if before != here]
    assert sequence.document_bounds.tolist() == [*starts, sequence.num_tokens]
