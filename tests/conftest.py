"""For every test: draws that are the same in each run, and one standing pool of rank processes for the session."""

from collections.abc import Iterator

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
