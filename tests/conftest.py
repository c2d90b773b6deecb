"""Fixtures for every test: one standing pool of rank processes for the whole session."""

from collections.abc import Iterator

import pytest

from tests.distributed import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to six gloo ranks, started as tests need them; `rank_pool.run(function, *args, ranks=3)`."""
    with RankPool(6) as pool:
        yield pool
