"""For every test: draws that are the same in each run; once a session, standing rank processes and tiny shards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed import RankPool

settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to six gloo ranks, started as tests need them; `rank_pool.run(function, *args, ranks=3)`."""
    with RankPool(6) as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory) -> Path:
    """Ten prepared samples of every kind of media."""
    from tests.training.tiny_run import write_shards  # imports torch, which most tests of this folder do without

    return write_shards(tmp_path_factory.mktemp("tiny"))
