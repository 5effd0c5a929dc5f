"""The parts of the long tools that are sums and draws."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest

from tests.chaos import cancels, sigterm
from tests.chaos.scales import BOUNDS, judge, memory_of
from tests.chaos.slopes import Slope, after_warm_up, theil_sen

pytestmark = pytest.mark.unit


def noisy(rng: random.Random, level: float, slope: float, count: int = 60) -> list[tuple[float, float]]:
    """A straight line over one unit of time, with noise, and with an outlier in ten."""
    times = [number / count for number in range(count)]
    return [(t, level + slope * t + rng.gauss(0, 1) + (1000 if rng.random() < 0.1 else 0)) for t in times]


def test_given_a_straight_line_when_fitted_then_its_slope_is_exact() -> None:
    slope = theil_sen([[(float(t), 3.0 + 2.0 * t) for t in range(10)]])
    assert slope == Slope(2.0, 2.0, 2.0, 10)


def test_given_noise_and_outliers_when_fitted_then_the_bounds_hold_the_true_slope_nineteen_times_in_twenty() -> None:
    rng = random.Random(0)
    slopes = [theil_sen([noisy(rng, 10.0, 5.0)]) for _ in range(200)]
    held = [slope.low <= 5.0 <= slope.high for slope in slopes if slope is not None]
    assert len(held) == 200
    assert 180 <= sum(held) < 200
    assert all(slope is not None and abs(slope.median - 5.0) < 3.0 for slope in slopes)


def test_given_two_runs_at_other_levels_when_fitted_then_only_what_grows_within_one_counts() -> None:
    rng = random.Random(1)
    slope = theil_sen([noisy(rng, 0.0, 0.0), [(t + 2, value) for t, value in noisy(rng, 500.0, 0.0)]])
    assert slope is not None
    assert abs(slope.median) < 5.0
    assert slope.num_samples == 120


@pytest.mark.parametrize("runs", [[], [[]], [[(0.0, 1.0)]], [[(0.0, 1.0)], [(1.0, 5.0)]], [[(0.0, 1.0), (0.0, 2.0)]]])
def test_given_no_two_samples_of_one_run_when_fitted_then_there_is_no_slope(
    runs: list[list[tuple[float, float]]],
) -> None:
    assert theil_sen(runs) is None


def test_given_samples_when_the_warm_up_is_cut_off_then_a_share_or_a_least_time_is_gone() -> None:
    samples = [(float(t), 0.0) for t in range(11)]
    assert after_warm_up(samples, 0.2, 0.0) == samples[2:]
    assert after_warm_up(samples, 0.2, 5.0) == samples[5:]
    assert after_warm_up(samples, 0.2, 50.0) == []
    assert after_warm_up([], 0.2, 0.0) == []


@pytest.mark.parametrize(
    ("what", "slope", "hours", "grows"),
    [
        ("files", Slope(0.0, 0.0, 0.0, 60), 1.0, False),
        ("files", Slope(4.0, 2.0, 6.0, 60), 1.0, True),
        ("files", Slope(4.0, -1.0, 9.0, 60), 1.0, False),  # not sure
        ("files", Slope(4.0, 2.0, 6.0, 60), 0.1, False),  # not even one
        ("memory", Slope(2e7, 2e7, 2e7, 60), 1.0, True),  # of 1 GB: 2 %
        ("memory", Slope(9e6, 9e6, 9e6, 60), 1.0, False),  # 0.9 %
        ("memory", Slope(1.1e7, 1.1e7, 1.1e7, 60), 1.0, False),  # 1.1 %, but only 1 MB too much
    ],
)
def test_given_a_slope_when_judged_then_it_is_too_much_if_that_is_sure_and_more_than_noise(
    what: str, slope: Slope, hours: float, grows: bool
) -> None:
    assert set(BOUNDS) == {"memory", "files", "threads", "children", "series"}
    assert judge("gateway 0", what, 1e9, slope, hours) is grows


def test_given_a_seed_when_leavings_are_drawn_then_there_are_all_and_none_that_makes_no_sense() -> None:
    drawn = [[cancels.draw(rng) for _ in range(500)] for rng in (random.Random(2), random.Random(2))]
    assert drawn[0] == drawn[1]
    ways = {(leaving.moment, leaving.way) for leaving in drawn[0]}
    without = {(moment, "cancel by its id") for moment in ("body", "at once", "soon")} | {("body", "cancel")}
    assert ways == {(moment, way) for moment in cancels.MOMENTS for way in cancels.WAYS} - without
    assert all(leaving.body["stream"] for leaving in drawn[0] if leaving.way == "cancel by its id")


def test_given_a_seed_when_orders_are_drawn_then_there_are_all_kinds() -> None:
    orders = [sigterm.draw(random.Random(seed)) for seed in range(300)]
    assert orders == [sigterm.draw(random.Random(seed)) for seed in range(300)]
    assert {(order.moment, order.target) for order in orders} == {
        (moment, target) for moment in sigterm.MOMENTS for target in sigterm.TARGETS
    }


def test_given_the_same_growth_when_it_is_of_ray_s_servers_then_more_is_allowed() -> None:
    slope = Slope(0.1e9, 0.1e9, 0.1e9, 9)
    assert judge("gateway 0", "memory", 1e9, slope, 1.0)
    assert not judge("gcs_server", "memory", 1e9, slope, 1.0)


def test_given_memory_that_is_filled_and_a_file_that_is_read_when_weighed_then_only_the_memory_counts(
    tmp_path: Path,
) -> None:
    size = 32 * 2**20
    (tmp_path / "file").write_bytes(bytes(size))
    before = memory_of(os.getpid())
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped.find(b"x") < 0  # every page of it is there now, and this process's alone
        assert abs(memory_of(os.getpid()) - before) < size / 4
    with mmap.mmap(-1, size) as filled:
        filled.write(b"x" * size)
        assert memory_of(os.getpid()) - before > 3 * size / 4
