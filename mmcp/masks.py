"""Which query may read which key, told from the segments of a row."""

from dataclasses import dataclass

import numpy as np

from mmcp.sequence import TokenSequence


@dataclass(frozen=True, eq=False)
class Mask:
    """Causal inside each document; nothing across documents.

    bounds: [documents + 1] int64  first token of each document, then the number of tokens
    """

    bounds: np.ndarray

    @staticmethod
    def of(sequence: TokenSequence) -> "Mask":
        """Describe the mask of one row."""
        return Mask(sequence.document_bounds)
