"""The schedule of decode jobs on a virtual clock: what slow clips cost the others, memory, order, no waiting for ever.

The clock is simulated, so that every figure is a function of the schedule alone. `Schedule` is compared with jobs that
start strictly in order. Run: pytest tests/data_pipelines/test_schedule.py
"""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.schedule import Planned, Schedule


def simulate(costs, *, workers, prefetch, lookahead, step_time, most_bytes=10**9, size=1, actual=None):
    """Run steps of jobs with these costs; return the time all is done, and the most bytes held beside the next step's.

    costs:  [steps][jobs] planned      actual: [steps][jobs] what they take; by default as planned
    """
    actual = actual or costs
    schedule = Schedule(workers=workers, prefetch=prefetch, most_bytes=most_bytes)
    now, planned, free_at, left = 0, 0, 0, [len(jobs) for jobs in costs]
    running, most_held, starts = [], 0, []
    while schedule.head < len(costs):
        while planned < min(len(costs), schedule.head + prefetch + lookahead):
            jobs = [Planned(planned, cost, size, i) for i, cost in enumerate(costs[planned])]
            schedule.add(planned, jobs)
            planned += 1
        while (job := schedule.next()) is not None:
            starts.append((now, job.step, job.job))
            heapq.heappush(running, (now + actual[job.step][job.job], len(starts), job))
        own = sum(job.num_bytes for job in schedule._started[schedule.head])
        most_held = max(most_held, schedule.held_bytes - own)
        head = schedule.head
        if not left[head] and now >= free_at:
            schedule.used(head)
            free_at = now + step_time
            continue
        moments = [running[0][0]] if running else []
        moments += [free_at] if not left[head] else []
        assert moments, "nothing runs and nothing can start: the loader would wait for ever"
        now = max(now, min(moments))
        while running and running[0][0] <= now:
            _, _, job = heapq.heappop(running)
            schedule.done(job)
            left[job.step] -= 1
    return max(now, free_at), most_held, starts


def stall(costs, **options):
    """Time that the consumer is held up, against steps that follow each other without a pause."""
    first = simulate(costs[:1], **options)[0]
    return simulate(costs, **options)[0] - first - options["step_time"] * (len(costs) - 1)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("place", [20, 35])
def test_a_clip_thirty_times_longer_stalls_the_others_at_most_a_tenth(workers, place):
    costs = [[10] * 4 for _ in range(48)]
    costs[place] = [10, 10, 300, 10]
    options = {"workers": workers, "step_time": 40 // (workers - 1) + 5, "prefetch": 2}
    in_order, early = stall(costs, lookahead=0, **options), stall(costs, lookahead=16, **options)
    assert in_order > 150 and early <= in_order / 10, (in_order, early)


def test_without_room_in_memory_nothing_starts_early():
    costs = [[10] * 4 for _ in range(48)]
    costs[20] = [10, 10, 300, 10]
    options = {"workers": 3, "step_time": 25, "prefetch": 2, "lookahead": 16}
    assert stall(costs, most_bytes=8, **options) > 150


@given(
    st.lists(st.lists(st.integers(1, 400), max_size=5), min_size=1, max_size=25),
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 60), st.integers(1, 30), st.randoms(),
)  # fmt: skip
def test_memory_is_bounded_order_is_kept_and_nothing_waits_for_ever(
    costs, workers, prefetch, lookahead, step_time, most_bytes, rng
):
    actual = [[rng.randint(1, 400) for _ in jobs] for jobs in costs]
    options = {"workers": workers, "prefetch": prefetch, "lookahead": lookahead, "step_time": step_time}
    _, held, starts = simulate(costs, **options, most_bytes=most_bytes, actual=actual)
    assert held <= most_bytes
    assert sorted(start[1:] for start in starts) == [(i, j) for i, jobs in enumerate(costs) for j in range(len(jobs))]


@given(st.lists(st.lists(st.integers(10, 12), min_size=3, max_size=3), min_size=1, max_size=25), st.integers(1, 4))
def test_jobs_of_like_cost_start_in_their_order(costs, workers):
    _, _, starts = simulate(costs, workers=workers, prefetch=2, lookahead=9, step_time=5)
    assert [step for _, step, _ in starts] == sorted(step for _, step, _ in starts)


def test_the_longest_job_of_a_step_starts_first():
    done, _, starts = simulate([[10, 10, 10, 30]], workers=2, prefetch=1, lookahead=0, step_time=0)
    assert done == 30 and starts[0][2] == 3
