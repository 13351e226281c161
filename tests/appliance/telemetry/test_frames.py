"""Parts of a frame that are read from the router."""

from __future__ import annotations

from appliance.telemetry.frame_parts import way_frames
from engine.schedule.elastic import PredictionKind, Slo
from engine.schedule.outcomes import PredictionRecord
from engine.schedule.snapshot import RolesSnapshot
from engine.schedule.step_times import size_class
from engine.schedule.worker_routes import Pair


def test_a_way_is_told_with_the_size_of_its_steps():
    way = PredictionKind(
        Pair("prefill", "decode"), is_beside=True, num_cores=1, size=size_class(256)
    )
    told = [(way, PredictionRecord())]
    roles = RolesSnapshot("elastic", Slo(), False, False, {}, 2, told, frozenset())
    (told,) = way_frames(roles)
    assert (told.step_tokens, told.worker, told.has_all) == (256, "prefill", False)
