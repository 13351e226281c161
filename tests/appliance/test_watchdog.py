"""Workers that hang are named; those that are slow, idle, parked or gone are not."""

import pytest

from appliance.watchdog import HUNG_AFTER_FRAMES, Watchdog
from tests.tui.frames import idle, worker

STILL = {"last_step_age_ms": 9000.0, "steps_per_s": 0.0, "cpu_percent": 0.0, "cpus": [1]}


def frame(**changes):
    return idle(1, workers=[worker("prefill", cpus=[0]), worker("decode", **STILL | changes)])


def look(watchdog, *frames):
    return [sorted(watchdog.hung(each)) for each in frames]


def test_a_worker_that_is_still_for_long_is_named_with_what_is_wrong():
    watchdog = Watchdog()
    assert not any(look(watchdog, *[frame()] * (HUNG_AFTER_FRAMES - 1)))
    about = watchdog.hung(frame())["decode"]
    assert f"{HUNG_AFTER_FRAMES} s" in about


@pytest.mark.parametrize(
    "sign_of_life",
    [
        {"cpu_percent": 0.1},
        {"cpu_percent": None},
        {"steps_per_s": 1.0},
        {"last_step_age_ms": None},
        {"state": "loading"},
        {"pid": 77},
    ],
)
def test_any_sign_of_life_begins_the_wait_again(sign_of_life):
    watchdog = Watchdog()
    still = [frame()] * (HUNG_AFTER_FRAMES - 1)
    assert not any(look(watchdog, *still, frame(**sign_of_life), *still))


def test_a_worker_whose_cores_another_computes_on_has_to_wait():
    watchdog = Watchdog()
    borrower = worker("prefill", cpus=[0], cpus_used=[0, 1])
    lent = idle(1, workers=[borrower, worker("decode", **STILL)])
    assert not any(look(watchdog, *[lent] * 2 * HUNG_AFTER_FRAMES))
