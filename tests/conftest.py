"""Fixtures for every test, made once a session: a standing pool of rank processes, and tiny prepared shards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import RankPool
from tests.training.tiny_run import write_shards


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to six gloo ranks, started as tests need them; `rank_pool.run(function, *args, ranks=3)`."""
    with RankPool(6) as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory) -> Path:
    """Ten prepared samples of every kind of media."""
    return write_shards(tmp_path_factory.mktemp("tiny"))
