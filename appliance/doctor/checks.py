"""Check what keeps this machine, or a model, from being served well.

Invariant: a check changes nothing except for a probe file that it removes; what cannot be checked
is reported, never assumed good.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from appliance.client.address import TcpAddress, UnixAddress, is_of_this_machine
from appliance.client.calls import Client, UnusableAnswer
from appliance.configuration import client_settings, config, paths, sources
from appliance.configuration.settings import ServeConfig
from appliance.daemon.announcement import OPEN_CODE, sampling_advice, sampling_text
from appliance.daemon.process.limits import max_connections
from appliance.devices.machine import Devices
from appliance.doctor.finding import Finding
from appliance.doctor.gpu_checks import GpuHost, gpu_findings
from appliance.doctor.hub_models import in_a_sentence
from appliance.doctor.packages import packages
from appliance.doctor.ports import listening_uids
from appliance.doctor.self_test import kept_findings, prove_now
from appliance.dynamo import runtime
from appliance.fleet import cgroup_limits
from appliance.fleet.core_claims import shared_cores, sharing_text
from appliance.fleet.placement import available_cores, available_memory_bytes
from appliance.http.access import AccessPolicy
from appliance.hub.names import STARTER_FOLDER, HubName, model_name
from appliance.observe.frame.figures import state_words
from appliance.observe.frame.protocol import Frame
from appliance.observe.log import log_file
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype
from engine.checkpoint.gguf import find_gguf
from engine.errors import ConfigError, PenstockError
from engine.kernels.cpu import has_kernels, load_kernels
from engine.kernels.product_choice import products_here
from engine.system.own_files import existing_part, why_not_writable
from engine.text.read_models import read_checkpoint, read_tokenizer
from engine.text.reading import READER
from engine.text.tokenizer_fit import misfits
from engine.units import part_text, size_text

MIN_FREE_BYTES = 1 << 30
_IF_MEANT = "intended if other machines use it; check which networks reach it and which keys exist"


def examine(
    settings: dict[str, str | None], client: Callable[[], Client], *, runs_self_test: bool = False
) -> Iterator[Finding]:
    """Yield every finding, in the order in which one would set the machine up.

    Args:
        settings: as the flags of serve.
        client: of the daemon that the command would ask.
        runs_self_test: compute on the device, which takes some seconds.
    """
    state, elsewhere = _state(client), _elsewhere(client)
    here = state if elsewhere is None else PenstockError("it is on another machine")
    if elsewhere is not None:
        yield elsewhere
    devices = Devices.of_machine()
    has_gpus = bool(devices.num_gpus)
    yield packages(has_gpus=has_gpus)
    found = _configuration(settings)
    checkpoint = None if isinstance(found, PenstockError) else _checkpoint(found)
    is_bitwise = isinstance(found, ServeConfig) and found.exact == "bitwise"
    yield _kernels(checkpoint, is_bitwise=is_bitwise)
    if not isinstance(found, PenstockError) and (why := _no_speculation(found, has_gpus=has_gpus)):
        yield Finding("speculation", "ok", f"off ({why})")
    yield _reader()
    yield _cores()
    yield from _devices(devices)
    if isinstance(found, ServeConfig):
        yield from _self_test(found, checkpoint if runs_self_test else None, has_gpus=has_gpus)
    yield from _dynamo()
    for sentence in config.unknown_variables():
        yield Finding("environment", "note", sentence, "`penstock config show` lists the settings")
    if (opened := _open_daemon(state, client)) is not None:
        yield opened
    if isinstance(found, PenstockError):
        yield from gpu_findings(GpuHost.of_machine())
        yield _bad("configuration", found)
    else:
        yield _open_files(found.max_connections)
        if found.devices != "cpu":
            yield from gpu_findings(GpuHost.of_machine(), *_model_bytes(checkpoint))
        looked_at = partial(_looked_at, settings)
        if opened is None and found.listen is not None:
            yield looked_at("network", lambda: _network(found, here))
        if isinstance(here, PenstockError) or settings.get("model") is not None:
            yield looked_at("model", lambda: _model(found))
        else:
            yield looked_at("model", partial(_served, here, found))
        yield from _tokenizer(checkpoint)
        whose = _whose(found.state_dir, here, client)
        for check, look in (
            ("state", partial(_state_dir, found.state_dir)),
            ("log", partial(_log, found.log_path)),
        ):
            finding = looked_at(check, look)
            yield replace(finding, found=finding.found + whose)
        yield looked_at("ssd", lambda: _ssd(found, here))
    yield _daemon(state)
    if elsewhere is None:
        yield from _sharing(client)
    yield from _alerts(state)


def _looked_at(settings: dict[str, str | None], check: str, look: Callable[[], Finding]) -> Finding:
    try:
        with sources.named_by_source(settings):
            return look()
    except PenstockError as error:
        return _bad(check, error)
    except OSError as error:
        hint = "run it as the user who serves, or let this one read it"
        return Finding(check, "bad", f"{error.filename}: {error.strerror}", hint)


def _configuration(settings: dict[str, str | None]) -> ServeConfig | PenstockError:
    """Load the configuration of a start, or return its error."""
    try:
        return client_settings.load_asked(settings)
    except PenstockError as error:
        return error


def _self_test(
    found: ServeConfig, checkpoint: Checkpoint | None, *, has_gpus: bool
) -> Iterator[Finding]:
    """Yield what self-tests found, and run one for a model if there is one."""
    yield from kept_findings(found.state_dir)
    if checkpoint is not None:
        yield from prove_now(
            checkpoint, choose_dtype(found.dtype, checkpoint.stored_dtype, has_gpu=has_gpus)
        )


def _checkpoint(found: ServeConfig) -> Checkpoint | None:
    """Open the model of a start; None: unreadable, which its own check reports."""
    from appliance.fleet.model_files import model_folder  # half of a second

    try:
        return read_checkpoint(model_folder(found.model))
    except (PenstockError, OSError):
        return None


def _model_bytes(checkpoint: Checkpoint | None) -> tuple[int | None, int | None]:
    """Return the bytes of the weights and of a position's KV."""
    if checkpoint is None:
        return None, None
    return checkpoint.num_bytes, checkpoint.config.kv_block_bytes(1, "bfloat16")


def _bad(check: str, error: PenstockError) -> Finding:
    return Finding(check, "bad", str(error), error.hint)


def _reader() -> Finding:
    """Check that the process for templates and grammars starts here, with its limits."""
    try:
        READER.read("constraint", "regex", "a", True)
    except PenstockError as error:
        hint = "raise the limits of processes and memory: ulimit -u, ulimit -v"
        return Finding("reader", "bad", str(error), hint)
    return Finding("reader", "ok", "chat templates and grammars have a process of their own")


def _dynamo() -> Iterator[Finding]:
    """Check what `penstock worker --dynamo` needs, where its package is installed at all."""
    what = runtime.missing()
    if what is None:
        yield Finding("dynamo", "ok", f"{runtime.PACKAGE} {runtime.VERSION}")
    elif not what.endswith("not installed"):
        about = f"{what}: for `penstock worker --dynamo` alone"
        yield Finding("dynamo", "note", about, runtime.INSTALL)


def _kernels(model: Checkpoint | None = None, *, is_bitwise: bool = False) -> Finding:
    """Check the kernels, and show the products that this CPU and `exact` get."""
    try:
        kernels, level = load_kernels()
    except ImportError as error:
        return Finding(
            "kernels", "note", f"torch replaces them, several times slower: {error}",
            "apt install gcc python3-dev, then pip install --force-reinstall --no-deps -e .",
        )  # fmt: skip
    if level != (best := kernels.supported()[0]):
        about = f"compiled for {level}, but this CPU runs {best}, which is faster"
        hint = "pip install --force-reinstall --no-deps -e . (it compiles what is missing)"
        return Finding("kernels", "note", about, hint)
    about = f"compiled, for {level}"
    choice = products_here(is_bitwise=is_bitwise)
    about += f"; {choice.why}" if choice.why else ""
    if model is not None and (share := _quantised_ratio(model)) > 0.5:
        about += f" (says little about this model: {share:.0%} of its bytes are quantised)"
    if choice.wrong:
        hint = "report this CPU and its level; replies are right, prompts slower"
        return Finding("kernels", "note", about, hint)
    return Finding("kernels", "ok", about)


def _no_speculation(found: ServeConfig, *, has_gpus: bool) -> str | None:
    """Say why no worker would guess tokens; None: they do."""
    if found.max_drafted == 0:
        return "speculate is off"
    return None if has_kernels() or (has_gpus and found.devices != "cpu") else "no compiled kernels"


def _quantised_ratio(model: Checkpoint) -> float:
    """Return the share of quantised matrices in the bytes of all weights."""
    quantised = [tensor for tensor in model.tensors.values() if tensor.is_quantised]
    num_bytes = sum(piece.num_bytes for each in quantised for piece in each.pieces.values())
    return num_bytes / model.num_bytes


def _cores() -> Finding:
    cores, quota = available_cores(), cgroup_limits.cpu_quota()
    memory = f"{size_text(available_memory_bytes())} of memory free"
    limited = "" if quota is None else f", a quota of {quota:g}"
    found = f"{len(cores)} physical cores{limited}; {memory}"
    if len(cores) < 2:
        hint = "give it two cores, or serve with --roles colocated"
        return Finding("cores", "note", f"{found}: prefill and decode share one", hint)
    return Finding("cores", "ok", found)


def _devices(devices: Devices) -> Iterator[Finding]:
    frames = devices.read(time.monotonic_ns())
    if any(frame.kind == "cpu" and frame.energy_j is not None for frame in frames):
        yield Finding("power", "ok", "CPU packages report energy")
    else:
        yield Finding(
            "power", "note", "no CPU package reports energy: requests show none",
            "/sys/class/powercap may need root; virtual machines have none",
        )  # fmt: skip


def _open_files(wanted: int) -> Finding:
    """Check the hard limit of open files; the daemon raises the soft one itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found, fit = f"{hard} open files allowed", max_connections(wanted, hard)
    if fit < wanted:
        about = f"{found}: {fit} of {wanted} connections (max_connections) fit"
        return Finding("limits", "note", about, "raise the hard limit: ulimit -Hn, LimitNOFILE=")
    return Finding("limits", "ok", found)


def _open_daemon(
    state: dict[str, Any] | PenstockError, client: Callable[[], Client]
) -> Finding | None:
    """Report if the running daemon said at its start that it is open to the network."""
    if isinstance(state, PenstockError):
        return None
    try:
        asked = client()
        with asked.reading():
            began = datetime.fromisoformat(state["at"]) - timedelta(seconds=state["uptime_s"] + 1)
            query = {"severity": "warning", "since": began.isoformat(), "after": "0"}
            events = asked.rows("/v1/penstock/events", query)  # the oldest first
            said = [event["message"] for event in events if event["code"] == OPEN_CODE]
    except PenstockError as error:
        about = f"could not ask whether the daemon is open to the network: {error}"
        return Finding("network", "note", about, error.hint)
    return Finding("network", "note", f"the daemon: {said[0]}", _IF_MEANT) if said else None


def _network(found: ServeConfig, state: dict[str, Any] | PenstockError) -> Finding:
    """Check the configured TCP address and its access rules."""
    policy = AccessPolicy.from_config(found)
    assert found.listen is not None
    where = TcpAddress(*found.listen, is_tls=policy.tls is not None)
    about = f"{where}, {len(policy.keys)} API keys"
    about += "; /metrics without a key" if policy.has_open_metrics else ""
    is_by_settings = not isinstance(state, PenstockError)
    about += "; by the settings here, not the daemon's" if is_by_settings else ""
    if len(uids := listening_uids(found.listen[1])) > 1:
        who = f"{where}: users {', '.join(map(str, uids))} listen on this port"
        hint = "serve with --port, which takes both addresses of localhost; or on another port"
        return Finding("network", "bad", f"{who}: clients may reach another program", hint)
    if not found.is_open_to_network:
        return Finding("network", "ok", about)
    return Finding("network", "note", f"{about}: open to the network", _IF_MEANT)


def _whose(
    folder: Path, state: dict[str, Any] | PenstockError, client: Callable[[], Client]
) -> str:
    """Say whose state folder it is, unless it is known to be the running daemon's."""
    if isinstance(state, PenstockError):
        return ""
    address = client().address
    if isinstance(address, UnixAddress) and paths.is_of_socket(folder, address.path):
        return ""
    other = paths.socket_of(folder)
    of = f", of the daemon at {other}" if other else ""
    return f"; by the settings here{of}: PENSTOCK_STATE_DIR names the asked daemon's folder"


def _model(found: ServeConfig) -> Finding:
    from appliance.fleet.boot_check import check_plan, dram_forecast, proposals
    from appliance.fleet.model_files import model_folder, to_be_fetched
    from appliance.fleet.placed_model import place  # half of a second

    if missing := to_be_fetched(found):
        hint = "penstock serve or penstock pull downloads it"
        return Finding("model", "note", "; ".join(map(in_a_sentence, missing)), hint)
    placed, folder = place(found), model_folder(found.model)
    about, dram = check_plan(found, placed)[0], dram_forecast(found, placed)
    about = f"the configuration is good; {about}{'' if dram is None else f'; {dram.text}'}"
    about = "; proposed: ".join([about, *proposals(found, placed)])
    sampling = placed.checkpoint.config.sampling
    if advice := sampling_advice(sampling, folder):
        return Finding("model", "note", f"{about}; {sampling_text(sampling, folder)}", advice)
    return Finding("model", "ok", about)


def _served(state: dict[str, Any], found: ServeConfig) -> Finding:
    """Compare the model that the running daemon serves with the configured one.

    Raises:
        ConfigError: a start would fail; the memory, now the daemon's, is not checked.
    """
    from appliance.fleet.boot_check import check_files
    from appliance.fleet.model_files import is_to_be_fetched

    length = "" if state["max_model_len"] is None else f", up to {state['max_model_len']} tokens"
    about = f"the daemon serves {state['model']} in {state['dtype']}{length} per request"
    try:
        if not is_to_be_fetched(found.model):
            check_files(found)
    except ConfigError as error:
        error.what = f"{error.what}, so that a start would fail; {about}"
        raise
    model = STARTER_FOLDER if found.model is None else found.model
    wanted = model_name(model if isinstance(model, HubName) else find_gguf(model) or model)
    if wanted != state["model"]:
        about += f"; by the settings here a start would serve {model}"
    return Finding("model", "ok", about)


def _tokenizer(checkpoint: Checkpoint | None) -> Iterator[Finding]:
    """Check that the tokenizer fits the weights; what cannot be read is the model's finding."""
    if checkpoint is None:
        return
    try:
        found = misfits(
            read_tokenizer(checkpoint.folder, has_chats=False),
            checkpoint.config.vocab_size,
            checkpoint.config.unknown_ends,
        )
    except PenstockError:
        return
    if found:
        hint = "serve the tokenizer that was published with these weights"
        yield Finding("tokenizer", "note", "; ".join(found), hint)


def _state_dir(folder: Path) -> Finding:
    parent = existing_part(folder)
    why = why_not_writable(parent) if parent.is_dir() else "it is not a folder"
    if why is not None:
        hint = "choose another with --state-dir, or let the daemon's user write there"
        return Finding("state", "bad", f"{folder}: no file can be made in {parent}: {why}", hint)
    if parent == folder:
        tempfile.TemporaryFile(dir=folder).close()
    free = shutil.disk_usage(parent).free
    found = f"{folder}: {size_text(free)} free"
    if free < MIN_FREE_BYTES:
        return Finding("state", "note", found, "the request log stops when the disk is full")
    return Finding("state", "ok", found)


def _log(path: Path) -> Finding:
    from appliance.observe.log import store
    from appliance.observe.log.reader import RECOVER

    if not path.exists():
        return Finding("log", "ok", f"{path} is not there yet")
    if (problem := store.problem(path)) is not None:
        return Finding("log", "bad", f"{path}: {problem}", RECOVER)
    rows: Any = store.stats(path)["rows"]
    about = f"{path}: sound, {rows['requests']:,} requests"
    if kept := log_file.damaged_logs(path):
        names = ", ".join(each.name for each in kept)
        hint = "`sqlite3 FILE .dump` saves the readable rows; then delete the file"
        return Finding("log", "note", f"{about}; a damaged one before it is kept: {names}", hint)
    return Finding("log", "ok", about)


def _ssd(found: ServeConfig, state: dict[str, Any] | PenstockError) -> Finding:
    """Check the SSD cache of the running daemon, or of the settings."""
    from appliance.fleet.ssd_cache import HINT, allowance
    from engine.scheduler.offload.files import slab_bytes

    if not isinstance(state, PenstockError) and (served := state.get("ssd")) is not None:
        has_gpus = any(w["device"].startswith("gpu") for w in state["workers"])
        return _ssd_of_daemon(served, has_gpus=has_gpus)
    folder = found.ssd_folder
    allowed = allowance(folder, found.ssd_cache)
    if isinstance(allowed, str):
        if found.ssd_cache == "off":
            return Finding("ssd", "ok", "SSD cache: off by the settings")
        return Finding("ssd", "note", f"no SSD cache: {allowed}", HINT)
    used = f"{part_text(slab_bytes(folder), allowed.cap_bytes)} used"
    if allowed.words:
        hint = "choose a smaller --ssd-cache, or another disk with --ssd-dir"
        return Finding("ssd", "note", f"{folder}: {used}; {allowed.words}", hint)
    return Finding("ssd", "ok", f"{folder}: {used}")


def _ssd_of_daemon(ssd: dict[str, Any], *, has_gpus: bool) -> Finding:
    about = f"{ssd['folder']}: the daemon's SSD cache is {ssd['state']}"
    match ssd["state"]:
        case "on":
            used = f"{part_text(ssd['num_bytes'], ssd['max_bytes'])} of KV used"
            way = "; to and from GPUs through host memory, unproven" if has_gpus else ""
            if others := ssd.get("other_models"):
                kept = ", ".join(f"{name} {size_text(held)}" for name, held in others.items())
                way = f"; kept for other models: {kept}{way}"
            if limit := ssd.get("limit"):
                hint = "free space on that disk, or choose another with --ssd-dir"
                return Finding("ssd", "note", f"{ssd['folder']}: {used}; {limit}{way}", hint)
            return Finding("ssd", "ok", f"{ssd['folder']}: {used} by the daemon{way}")
        case "down":
            hint = "the disk is slow or fails; see the kernel log"
            return Finding("ssd", "note", f"{about}: {ssd['reason']}", hint)
        case "failed":
            about = f"{about}: {ssd['reason']}"
            return Finding("ssd", "note", about, "correct that and restart the daemon")
        case _:
            return Finding("ssd", "ok", f"{about}: {ssd['reason']}")


def _state(client: Callable[[], Client]) -> dict[str, Any] | PenstockError:
    """Fetch the daemon's frame, or return the error."""
    try:
        asked = client()
        state = asked.state()
        with asked.reading():
            msgspec.convert(state, Frame)
    except PenstockError as error:
        return error
    return state


def _elsewhere(client: Callable[[], Client]) -> Finding | None:
    """Note if the daemon is on another machine, unlike the other findings."""
    try:
        address = client().address
    except PenstockError:
        return None  # which is told of the daemon
    if is_of_this_machine(address):
        return None
    about = f"the daemon is asked at {address}; what is not said of it is of this machine"
    return Finding("machine", "note", about, "run penstock doctor on that machine for its facts")


def _sharing(client: Callable[[], Client]) -> Iterator[Finding]:
    """Say which other daemons of this user are on the same cores."""
    try:
        address = client().address
    except PenstockError:
        return  # which is told of the daemon
    asked = address.path if isinstance(address, UnixAddress) else None
    cores = os.sched_getaffinity(0)
    if shared := list(shared_cores(cores, asked)):
        half = ",".join(map(str, sorted(cores)[: max(len(cores) // 2, 1)]))
        hint = f"stop one with `penstock stop`, or give each its own cores: taskset -c {half} ..."
        yield Finding("sharing", "note", "; ".join(map(sharing_text, shared)), hint)


def _alerts(state: dict[str, Any] | PenstockError) -> Iterator[Finding]:
    """List the raised alerts, as `status` does."""
    for alert in [] if isinstance(state, PenstockError) else state.get("alerts", []):
        about = f"{alert['code']} since {alert['since']}: {alert['message']}"
        hint = f"run `{alert.get('action') or 'penstock events'}`"
        if alert["code"] == "link.down":
            hint = "it retries when a worker starts; see also the kernel log"
        verdict = "bad" if alert["code"] == "log.not_written" else "note"
        yield Finding("alert", verdict, about, hint)


def _daemon(state: dict[str, Any] | PenstockError) -> Finding:
    if isinstance(state, PenstockError):
        verdict = "bad" if isinstance(state, UnusableAnswer) else "note"
        return Finding("daemon", verdict, str(state), state.hint)
    workers = ", ".join(
        f"{w['name']} {w['state']}" + (f" ({w['attention']})" if w["attention"] else "")
        for w in state["workers"]
    )
    found = f"{state['model']} {state['state']}, roles {state['roles']}; {workers}"
    if state["state"] != "ready":
        verdict = "bad" if state["state"] == "degraded" else "note"  # as `status` grades it
        found = f"{found}; {state_words(state['state_reason'])}"
        return Finding("daemon", verdict, found, "see penstock events")
    quantised = "".join(f"; {state[name]}" for name in ("weights", "kv") if state.get(name))
    return Finding("daemon", "ok", found + quantised)
