"""The global stream of samples under random kills, with other workers, prefetch, groups and ranks after each.

The loader runs in this process, its pool decodes nothing. What every rank is given, from one kill to the next, is put
together and compared with the stream of a run that was never stopped. Run: pytest tests/experiments/test_stream.py
"""

import dataclasses
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import product
from types import SimpleNamespace

import pytest

from data_pipelines.mixture import DataSource, Mixture
from data_pipelines.prepare import prepare
from data_pipelines.sampler import Order, OrderState
from experiments.pipeline import Document, Pipeline, read_steps
from experiments.train_video_lm import order_at
from mmcp.parallel.mesh import MeshConfig
from tests.training.tiny_run import tiny_settings

STEPS = 30
BATCH = 5


class KeptPipeline(Pipeline):
    """Lays out each sample once."""

    @cached_property
    def kept(self) -> dict[int, Document]:
        return {}

    def document(self, number: int) -> Document:
        if number not in self.kept:
            self.kept[number] = super().document(number)
        return self.kept[number]


class IdlePool:
    """Does nothing, after a while."""

    def __init__(self, workers: int, rng: random.Random):
        self.num_workers, self.rng = workers, rng
        self.threads = ThreadPoolExecutor(workers)

    def submit(self, function, *args):
        return self.threads.submit(time.sleep, self.rng.choice([0, 0, 0.001]))


@pytest.fixture(scope="module")
def settings(tiny_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    rows = [{"id": f"more {i}", "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
            for i in range(7)]  # fmt: skip
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(folder / "m.jsonl", folder / "more")
    base = tiny_settings(tiny_shards, folder / "run", f"data.documents_per_step={BATCH}", "data.row_tokens=600")
    sources = (DataSource(path=str(tiny_shards), weight=1.5), DataSource(path=str(folder / "more"), weight=0.5))
    return dataclasses.replace(base, data=dataclasses.replace(base.data, train=sources))


def segment(settings, shards: Mixture, kept, order: Order, *, start: int, stop: int, rng: random.Random):
    """Read steps on every rank of a drawn mesh; return by step the sample ids of its rows. Checks what is decoded."""
    groups, ranks = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
    mesh = MeshConfig(dp_shard=groups, ulysses=ranks)
    data = dataclasses.replace(settings.data, prefetch=rng.randint(1, 4), lookahead=rng.randint(0, 6))
    settings = dataclasses.replace(settings, mesh=mesh, data=data)
    pipeline = KeptPipeline(settings, settings.tokenizer.build(), shards, settings.planner(256 + 8))
    pipeline.__dict__["kept"] = kept
    pool = IdlePool(rng.randint(1, 4), rng)
    found, decoded = {}, {}
    for group, rank in product(range(groups), range(ranks)):
        place = SimpleNamespace(data=SimpleNamespace(index=group), cp=SimpleNamespace(index=rank))
        steps = read_steps(
            pipeline, place, pool, plan=lambda step: pipeline.plan(order.samples(step * BATCH, BATCH)),
            steps=range(start, STEPS),
        )  # fmt: skip
        for loaded in steps:
            planned = loaded.payload
            ids = [[document.sample.id for document in row] for row in planned.documents]
            assert found.setdefault(loaded.step, ids) == ids
            own = decoded.setdefault(loaded.step, [])
            own += [(job.key.row, unit) for job, _ in loaded.results for unit in job.key.units]
            if loaded.step == stop - 1:
                steps.close()
                break
    for step, own in decoded.items():
        planned = pipeline.plan(order.samples(step * BATCH, BATCH))
        everything = [
            (row, unit) for row, sequence in enumerate(planned.plan.rows) for unit in range(len(sequence.units))
        ]
        assert sorted(own) == everything, f"step {step}: units decoded twice or by nobody"
    pool.threads.shutdown()
    return found


def check_kills(settings, *, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    shards = settings.data.open_train()
    kept: dict[int, Document] = {}
    done = 0
    while done < kills:
        step, joined = 0, {}
        while step < STEPS and done < kills:
            saved = json.dumps(dataclasses.asdict(order_at(settings, shards, step)))
            assert len(saved) < 64 << 10 and json.loads(saved)["taken"] == step * BATCH
            order = shards.order(settings.seed)
            order.restore(OrderState.of(json.loads(saved)))
            stop = min(STEPS, step + rng.randint(1, 4))
            joined |= segment(settings, shards, kept, order, start=step, stop=stop, rng=rng)
            step, done = stop, done + 1
        order = shards.order(settings.seed)
        for number, rows in joined.items():
            expected = [kept[i].sample.id for i in order.samples(number * BATCH, BATCH)]
            assert sorted(sample for row in rows for sample in row) == sorted(expected), f"step {number}"
        seen = [i for number in sorted(joined) for i in order.samples(number * BATCH, BATCH)]
        assert seen == shards.order(settings.seed).take(len(seen))
    for source, (first, size) in enumerate(zip((0, shards.sizes[0]), shards.sizes, strict=True)):
        own = [i for i in shards.order(settings.seed).take(STEPS * BATCH) if first <= i < first + size]
        whole = len(own) // size * size
        assert sorted(own[:whole]) == sorted(list(range(first, first + size)) * (whole // size)), source


def test_kills_lose_and_repeat_nothing(settings):
    check_kills(settings, kills=20, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
def test_two_hundred_kills_lose_and_repeat_nothing(settings, seed):
    check_kills(settings, kills=40, seed=seed)


def test_a_config_mixes_data_sets_by_weight(settings, tiny_shards, tmp_path):
    sources = json.dumps([{"path": str(tiny_shards), "weight": 3}, {"path": settings.data.sources[1].path}])
    read = tiny_settings(tiny_shards, tmp_path, f"data.train={sources}")
    assert [source.weight for source in read.data.sources] == [3.0, 1.0]
    taken = read.data.open_train().order(0).take(40)
    assert sum(number < 10 for number in taken) == 30
    with pytest.raises(ValueError, match="list the data once"):
        Mixture.open([DataSource(path=str(tiny_shards)), DataSource(path=f"{tiny_shards}/shard-000000.tar")])
