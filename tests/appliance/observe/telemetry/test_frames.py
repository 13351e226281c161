"""Parts of a frame that are read from the router."""

from __future__ import annotations

from appliance.observe.telemetry.frame_parts import way_frames
from engine.scheduler.routing.elastic import PredictionKind, Slo
from engine.scheduler.routing.outcomes import PredictionRecord
from engine.scheduler.routing.step_times import size_class
from engine.scheduler.routing.worker_routes import Pair
from engine.scheduler.snapshot import RolesSnapshot


def test_a_way_is_told_with_the_size_of_its_steps():
    way = PredictionKind(
        Pair("prefill", "decode"), is_beside=True, num_cores=1, size=size_class(256)
    )
    told = [(way, PredictionRecord())]
    roles = RolesSnapshot("elastic", Slo(), False, False, {}, 2, told, frozenset())
    (told,) = way_frames(roles)
    assert (told.step_tokens, told.worker, told.has_all) == (256, "prefill", False)
