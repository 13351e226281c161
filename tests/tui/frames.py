"""Sample frames for the console's tests: fixed numbers, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from appliance.observe.frame.protocol import (
    FRAME_VERSION,
    AlertFrame,
    DeviceFrame,
    EnergyFrame,
    EventFrame,
    Frame,
    HandoffFrame,
    HostFrame,
    LatencyFrame,
    LinkFrame,
    OwnerFrame,
    PoolFrame,
    QueueFrame,
    RequestFrame,
    TodayFrame,
    TotalsFrame,
    UserFrame,
    WorkerFrame,
)
from tui.view import Caller, View

GIB = 1 << 30
OPERATOR = Caller("ana", "operator")
STALLED_SEQS = (151, 152)
"""Of busy(): decode stands still behind a prompt."""


def request(number: int = 1, phase: str = "decoding", **changes: Any) -> RequestFrame:
    """A live request; the stages before its phase are complete."""
    phases = ("queued", "prefilling", "handing_off", "decoding", "finished")
    rank = phases.index("decoding" if phase == "paused" else phase)
    prompt_tokens = 300 + 811 * number % 7000
    frame = RequestFrame(
        id=f"cmpl-{0x3F9A21C0 + 0x11D7E2B1 * number & 0xFFFFFFFF:08x}d7e2b1a4c0583f96",
        endpoint="/v1/completions",
        phase=phase,
        model="penstock-starter-random-1",
        user=("ana", "svc-rag", "bo", "cy")[number % 4],
        stream=True,
        num_sequences=1,
        prompt_tokens=prompt_tokens,
        computed_tokens=(0, prompt_tokens * 62 // 100, prompt_tokens, prompt_tokens + 7)[
            min(rank, 3)
        ],
        output_tokens=0 if rank < 3 else 12 + 37 * number % 900,
        max_tokens=2048,
        num_blocks=0 if rank == 0 else 5 + number,
        worker=None if phase == "paused" else (None, "prefill", "prefill", "decode", None)[rank],
        transport="alias" if rank >= 3 else None,
        client=("python 9495", "rag 31870", "curl 4242", "10.0.0.7:51824")[number % 4],
        received_at="2026-11-21T14:02:05.250Z",
        age_ms=400.0 + 350 * number,
        tokenize_ms=1.5,
        queue_ms=3.0 + 40 * (number % 5) if rank >= 1 else None,
        prefill_ms=156.0 + number if rank >= 2 else None,
        ttft_ms=160.5 + 41 * number if rank >= 2 else None,
        handoff_ms=0.9 if rank >= 3 else None,
        decode_wait_ms=1.1 if rank >= 3 else None,
        first_itl_ms=13.4 if rank >= 3 else None,
        tpot_ms=11.8 if rank >= 3 else None,
        handoff_bytes=0 if rank >= 3 else None,
        route="move" if rank >= 1 else None,
        route_reason="decode is free sooner" if rank >= 1 else None,
        prefill_j=6.0 + number if rank >= 2 else None,
        decode_j=2.5 * number if rank >= 3 else None,
        slow_because="queue: 1.2s, usually 20ms" if number % 5 == 4 and rank else None,
        waits_for=None if rank else "its turn on worker prefill, behind aaa971e6; 1.2 s so far",
        behind=None if rank else "cmpl-aaa971e6d7e2b1a4c0583f96",
        behind_tokens=None if rank else 4730,
    )
    return msgspec.structs.replace(frame, **changes)


def worker(name: str, **changes: Any) -> WorkerFrame:
    """A ready worker."""
    core = 1 if name == "decode" else 0
    frame = WorkerFrame(
        name=name,
        state="ready",
        pid=4100 + core,
        device=f"cpu {core}",
        cpus=[core],
        attention="gather",
        num_sequences=2,
        prefill_tokens_per_s=0.0,
        decode_tokens_per_s=0.0,
        steps_per_s=0.0,
        step_ms_p50=None,
        step_ms_max=None,
        busy_ratio=0.0,
        cpu_percent=0.4,
        rss_bytes=640 << 20,
        num_restarts=0,
        loaded_bytes=270 << 20,
        total_bytes=270 << 20,
        cpus_used=[core],
    )
    return msgspec.structs.replace(frame, **changes)


def pool(name: str = "kv", owners: list[OwnerFrame] | None = None, **counts: int) -> PoolFrame:
    """A pool of 1,024 blocks; what the counts leave is free."""
    states = {"reserved": 0, "active": 0, "draining": 0, **counts}
    return PoolFrame(
        name=name,
        num_blocks=1024,
        block_size=64,
        block_bytes=2 << 20,
        free=1024 - sum(states.values()),
        **states,
        owners=owners or [],
    )


def finished(number: int, **changes: Any) -> RequestFrame:
    """A request that has ended by itself."""
    values = {"finish_reason": "stop", "handoff_ms": 0.9, "decode_wait_ms": 1.1,
              "decode_ms": 894.5, "tpot_ms": 11.8, "decode_j": 40.0,
              "output_tokens": 77}  # fmt: skip
    whole = request(number, "finished", **{**values, **changes})
    stages = (whole.tokenize_ms, whole.queue_ms, whole.prefill_ms, whole.handoff_ms,
              whole.decode_wait_ms, whole.decode_ms)  # fmt: skip
    e2e_ms = sum(value for value in stages if value is not None) + 0.5
    return msgspec.structs.replace(whole, e2e_ms=changes.get("e2e_ms", e2e_ms))


def minute() -> tuple[RequestFrame, ...]:
    """Requests that came every three seconds of the last minute, and have ended."""
    now = datetime.fromisoformat(idle().at)
    ended = []
    for number in range(17):
        age_s = 58.0 - 3.1 * number
        received = (now - timedelta(seconds=age_s)).isoformat(timespec="milliseconds")
        prefill_ms, decode_ms = 400.0 + 431 * number % 1900, 2000.0 + 1733 * number % 6500
        stages = {"queue_ms": 60.0 * (number % 4), "prefill_ms": prefill_ms,
                  "ttft_ms": 1.5 + 60.0 * (number % 4) + prefill_ms,
                  "decode_ms": min(decode_ms, 1000 * (age_s - 3))}  # fmt: skip
        received_at = received.replace("+00:00", "Z")
        ended.append(finished(60 - number, received_at=received_at, workers="prefill,decode",
                              **stages))  # fmt: skip
    return tuple(reversed(ended))


def idle(seq: int = 160, **changes: Any) -> Frame:
    """A ready appliance without work."""
    frame = Frame(
        version=FRAME_VERSION,
        at="2026-11-21T14:02:11.004Z",
        seq=seq,
        uptime_s=273_840.0 + seq,
        state="ready",
        state_reason="",
        model="penstock-starter-random-1",
        model_note="random weights: it answers noise",
        dtype="float32",
        max_model_len=4096,
        roles="static",
        transport="alias",
        pid=4099,
        queue=QueueFrame(0, 0, 0, 0, 64, None),
        workers=[worker("prefill"), worker("decode")],
        pools=[pool()],
        latency=LatencyFrame(60.0, 0, *[None] * 8),
        totals=TotalsFrame(*[0] * 12, has_prefix_cache=True),
        devices=[],
        host=HostFrame(3.1, 5 * GIB, 23 * GIB, 0.8, 72 << 20, [4, 2]),
        today=TodayFrame("2026-11-21T00:00:00.000Z", 1237, 2, 2_412_333, 281_002),
        requests=[],
        num_requests=0,
        events=[
            EventFrame("2026-11-21T13:58:40.000Z", "info", "daemon.ready", "serving on 2 cores")
        ],
    )
    return msgspec.structs.replace(frame, **changes)


OWNERS = [OwnerFrame("ana", 301, 8), OwnerFrame("svc-rag", 160, 14), OwnerFrame("bo", 57, 4)]


def alert(code: str = "kv.occupancy", **changes: Any) -> AlertFrame:
    """Something that has been wrong for 41 s at the time of the sample frames."""
    made = AlertFrame(code, "warning", "KV kv 97% in use", "2026-11-21T14:01:30.004Z", "kv")
    return msgspec.structs.replace(made, **changes)


def busy(seq: int = 160, **changes: Any) -> Frame:
    """Thirty requests in all phases; its rates swing with `seq`."""
    swing = math.sin(seq / 4) + math.sin(seq / 1.7) / 2
    decode_share = 0.1 if seq in STALLED_SEQS else 1.0
    queued = max(0, round(4 + 3 * swing))
    requests = [request(number) for number in range(30, 7, -1)]
    requests += [request(7, "handing_off"), request(6, "prefilling"), request(5, "prefilling")]
    requests += [request(number, "queued") for number in range(4, 0, -1)]
    frame = idle(
        seq,
        queue=QueueFrame(queued, 2, 1, 23, 64, 1312.0, 3, 9_800, 262_144),
        workers=[
            worker("prefill", prefill_tokens_per_s=4100 + 700 * swing, steps_per_s=2.4,
                   busy_ratio=0.98, step_ms_p50=402.0, step_ms_max=410.0,
                   batch_size_mean=1.2, last_step_age_ms=180.0,
                   cpu_percent=99.2, rss_bytes=1310 << 20),
            worker("decode", decode_tokens_per_s=decode_share * (1900 + 60 * swing),
                   steps_per_s=84.2,
                   busy_ratio=0.96, step_ms_p50=11.4, step_ms_max=14.2,
                   batch_size_mean=22.6, last_step_age_ms=4.0,
                   cpu_percent=97.0, rss_bytes=1288 << 20),
        ],
        pools=[pool(active=398, reserved=120, draining=9, owners=OWNERS)],
        latency=LatencyFrame(
            60.0, 142, 204.0, 412.0 + 20 * swing, 690.0, 11.6, 14.8, 31.0, 0.9, 2.4,
            655.0, 24.0, 3100.0, 7200.0, 9900.0, 61.0, 142.0, 0.971, 0.998, 2, 1.4),
        totals=TotalsFrame(1274, 1204, 2, 31, 0, 2_412_333, 281_002, 1240 + 2 * seq, 0, 3, 0, 0,
                            {"move cheapest": 1190, "decode prefill is busy": 84},
                            has_prefix_cache=True, prefix_cache_queries=2_400_000,
                            prefix_cache_hits=1_300_000, prefix_cache_s=2.4),
        host=HostFrame(97.6, 9 * GIB, 23 * GIB, 1.2, 80 << 20, [99, 96]),
        users=[UserFrame("svc-rag", 8, 812.0), UserFrame("ana", 8, 640.5),
               UserFrame("bo", 7, 488.0)],
        devices=[
            DeviceFrame("package-0", "cpu", power_w=96.4, power_limit_w=125.0, temperature_c=61.0,
                        power_source="rapl", energy_j=812_000.0)
        ],
        handoff=HandoffFrame("alias", 1, 2.0, 0.0),
        energy=EnergyFrame(812_000.0, 256_000.0, 367_000.0, 189_000.0, 60.0, 96.4, 0.0106, 0.0412,
                           "rapl, divided by the workers' shares of each step"),
        limit="queue: 4 sequences wait for prefill",
        slo_ttft_ms=500,
        slo_itl_ms=20,
        requests=requests,
        num_requests=len(requests),
        events=[
            EventFrame("2026-11-21T13:41:02.000Z", "info", "daemon.ready", "serving on 2 cores"),
            EventFrame("2026-11-21T13:58:40.000Z", "error", "worker.died",
                       "decode exited with signal 9; 4 sequences go on elsewhere"),
            EventFrame("2026-11-21T14:00:12.000Z", "info", "request.cancelled",
                       "cmpl-88ab90f2d7e2b1a4c0583f96 by uid 1003 after 201 tokens"),
            EventFrame("2026-11-21T14:01:30.000Z", "warning", "queue.high", "33 of 64 waiting"),
        ],
    )  # fmt: skip
    return msgspec.structs.replace(frame, **changes)


def loading() -> Frame:
    """Weights on their way in."""
    half = {"state": "loading", "loaded_bytes": 116 << 20, "attention": None, "rss_bytes": None}
    return idle(
        state="loading",
        state_reason="weights 43%",
        workers=[worker("prefill", **half), worker("decode", **half)],
        pools=[],
        events=[],
    )


def draining(**changes: Any) -> Frame:
    """SIGTERM came; three requests are left."""
    requests = [request(number) for number in (3, 2, 1)]
    frame = busy(
        state="draining",
        state_reason="3 requests left, 27s to go",
        requests=requests,
        num_requests=3,
        queue=QueueFrame(0, 0, 0, 3, 64, None),
    )
    return msgspec.structs.replace(frame, **changes)


def colocated() -> Frame:
    """One worker that does both."""
    both = worker("colocated", device="cpu 0-1", prefill_tokens_per_s=2900.0,
                  decode_tokens_per_s=610.0, step_ms_p50=18.2, step_ms_max=44.0,
                  steps_per_s=50.0, busy_ratio=0.99)  # fmt: skip
    return busy(roles="colocated", transport=None, workers=[both])


def two_by_three() -> Frame:
    """Two workers that prefill, one of which is down, and three that decode."""
    prefill = worker("prefill", prefill_tokens_per_s=4100.0, step_ms_p50=402.0, busy_ratio=0.98)
    decode = [
        worker(name, device=f"cpu {core}", cpus=[core], cpus_used=[core], pid=4100 + core,
               decode_tokens_per_s=600.0, steps_per_s=50.0 + core, step_ms_p50=11.0 + core,
               step_ms_max=30.0 + core, busy_ratio=core / 5, batch_size_mean=4.0 + core)
        for core, name in enumerate(("decode", "decode1", "decode2"), 2)
    ]  # fmt: skip
    return busy(
        transport="peer",
        workers=[prefill, worker("prefill1", state="restarting", num_restarts=1), *decode],
        pools=[pool(w.name, active=30 * w.cpus[0]) for w in (prefill, *decode)],
        handoff=HandoffFrame("peer", 1, 2.0, 1e6, 9.7e9),
    )


def eight_gpus() -> Frame:
    """Three GPUs that prefill and five that decode, every pair linked; one link is down."""
    names = [*(f"prefill{i}" for i in range(3)), *(f"decode{i}" for i in range(5))]
    rates = [{"prefill_tokens_per_s": 41e3}, {"decode_tokens_per_s": 2400.0}]
    workers = [
        worker(name, device=f"gpu{i}", cpus=[], cpus_used=[], pid=4100 + i,
               step_ms_p50=(212.0, 9.4)[i > 2], step_ms_max=(388.0, 13.1)[i > 2],
               busy_ratio=0.97 - 0.06 * i, batch_size_mean=(None, 20.0 + i)[i > 2],
               **rates[i > 2])
        for i, name in enumerate(names)
    ]  # fmt: skip
    devices = [
        DeviceFrame(f"gpu{i}", "gpu", 655.0 - 40 * i, 700.0, 68.0 - i, 1980.0, 0.97 - 0.06 * i,
                    (110 + i) * GIB, 140 * GIB, model="H200", power_source="energy counter")
        for i in range(8)
    ]  # fmt: skip
    links = [
        LinkFrame(p, d, "peer", 3.7e11, 3.5e11, 2e9 - 1e8 * i - 3e7 * j, has_detour=True)
        for i, p in enumerate(names[:3])
        for j, d in enumerate(names[3:])
    ]
    why = "8 copies in a row failed or were slow: copies come to 41 GB/s"
    links[7] = msgspec.structs.replace(links[7], transport="shm", down=why, copy_bytes_per_s=2.1e10)
    return busy(
        model_note=None,
        dtype="bfloat16",
        transport="peer",
        workers=workers,
        pools=[pool(name, active=40 * i) for i, name in enumerate(names)],
        devices=devices,
        links=links,
        handoff=HandoffFrame("peer", 3, 41.0, 2.1e10, 3.7e11),
        alerts=[alert("link.down", message=f"the link from prefill1 to decode2 is down: {why}",
                      subject="prefill1 to decode2")],
    )  # fmt: skip


def three_pools() -> Frame:
    """The shm transport with its ring, a nearly full decode pool, and three power domains."""
    return busy(
        transport="shm",
        pools=[
            pool("prefill", active=210),
            pool("decode", active=398, reserved=588),
            pool("ring", active=90),
        ],
        devices=[
            DeviceFrame("gpu0", "gpu", 512.0, 700.0, 61.0, 1980.0, 0.81, 61 * GIB, 80 * GIB),
            DeviceFrame("gpu1", "gpu", 388.0, 700.0, 54.0, 1980.0, 0.64, 74 * GIB, 80 * GIB),
            DeviceFrame("package-0", "cpu", 96.0, 125.0),
        ],
    )


def kv_critical(seq: int = 160) -> Frame:
    """Blocks run out on the decode side, and the targets are missed."""
    return busy(
        seq,
        transport="shm",
        pools=[
            pool("prefill", active=610, reserved=90, owners=OWNERS),
            pool("decode", active=min(830, 300 + 4 * seq), reserved=181, draining=4, owners=OWNERS),
        ],
        handoff=HandoffFrame("shm", 1, 2.0, 1e6 * seq, 9.7e9, 1),
        alerts=[
            alert(severity="error", message="KV decode 99% in use", subject="decode"),
            alert("slo.missed", subject="ttft", message="2.9% of the first tokens are late"),
        ],
        limit="decode's KV is full: 4 sequences wait for 181 blocks",
    )


def worker_dead() -> Frame:
    """The decode worker is coming back; its sequences wait."""
    return busy(
        state="degraded",
        state_reason="worker decode is down",
        workers=[
            worker("prefill", prefill_tokens_per_s=4100.0, steps_per_s=2.4, busy_ratio=0.98),
            worker("decode", state="restarting", pid=None, num_restarts=1, cpu_percent=None,
                   rss_bytes=None, attention=None),
        ],
        alerts=[
            alert("worker.down", severity="error", message="worker decode is restarting",
                  subject="decode", since="2026-11-21T14:02:08.004Z"),
        ],
        limit="decode is restarting",
    )  # fmt: skip


def no_gpu() -> Frame:
    """Nothing meters power."""
    unreported = EnergyFrame(None, None, None, None, 60.0, None, None, None, "not reported")
    requests = [msgspec.structs.replace(r, prefill_j=None, decode_j=None) for r in busy().requests]
    return busy(devices=[], energy=unreported, requests=requests)


def mig() -> Frame:
    """One GPU in two slices, whose power is the GPU's, and a second one that throttles."""
    gpu = DeviceFrame(
        "gpu0", "gpu", 512.0, 700.0, 61.0, 1980.0, None, 61 * GIB, 80 * GIB,
        model="H100 SXM", uuid="GPU-8f1c7b52", energy_j=4.1e6, power_source="energy counter",
        power_instant_w=540.0, memory_clock_mhz=2619.0, throttle_reasons=[],
        pcie_rx_bytes_per_s=2e9, pcie_tx_bytes_per_s=1e9,
    )  # fmt: skip
    slices = [
        DeviceFrame("gpu0/1", "gpu", memory_used_bytes=30 * GIB, memory_total_bytes=40 * GIB,
                    parent="gpu0", uuid="MIG-1a", sm_ratio=0.81, tensor_ratio=0.44,
                    memory_bandwidth_ratio=0.38),
        DeviceFrame("gpu0/2", "gpu", memory_used_bytes=31 * GIB, memory_total_bytes=40 * GIB,
                    parent="gpu0", uuid="MIG-2b"),
    ]  # fmt: skip
    hot = DeviceFrame(
        "gpu1", "gpu", 688.0, 700.0, 84.0, 1410.0, 0.64, 74 * GIB, 80 * GIB,
        throttle_reasons=["power cap"], nvlink_rx_bytes_per_s=3e9, nvlink_tx_bytes_per_s=1e8,
        last_xid=79,
    )  # fmt: skip
    throttles = alert("device.throttled", message="gpu1 throttles: power cap", subject="gpu1")
    return busy(devices=[gpu, *slices, hot], alerts=[throttles])


def view_of(frame: Frame, before: Callable[[int], Frame] = busy, num_frames: int = 60) -> View:
    """An operator's view with a minute of history behind it, one frame a second."""
    view = View(caller=OPERATOR)
    for num_before in range(num_frames - 1, 0, -1):
        past = before(frame.seq - num_before)
        past.uptime_s = frame.uptime_s - num_before
        view = view.after(past)
    return view.after(frame)


@dataclass
class FakeClock:
    """A clock that moves when told."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s
