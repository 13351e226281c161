"""A worker's loop over a real channel, stepped by hand."""

import socket

import msgspec

from engine.wire.channel import WorkerChannel
from engine.wire.messages import Report
from engine.worker.loop import StepLoop
from engine.worker.text_batches import TextBatches


def reports_in(sock, at_least=0):
    """All reports that have arrived at the daemon's end, or so many that come."""
    # decoded by hand: the blocking end of a channel expects commands
    timeout, reports, data = sock.gettimeout(), [], b""
    while True:
        sock.settimeout(timeout if len(reports) < at_least else 0)
        try:
            data += sock.recv(1 << 20)
        except BlockingIOError:
            return reports
        head = 8  # length and checksum
        while len(data) >= head and len(data) >= (end := head + int.from_bytes(data[:4], "little")):
            reports.append(msgspec.msgpack.decode(data[head:end], type=Report))
            data = data[end:]


class Harness:
    """One worker; `tell` it commands and `step` it."""

    def __init__(
        self,
        runner,
        pool,
        other=None,
        eos_token_ids=(102,),
        max_num_batched_tokens=8,
        pools=None,
        device=None,
        own_cores=None,
        pages=None,
        speculation=None,
        texts=None,
    ):
        self.runner = runner
        self.pool = pool
        self.other = other
        self.cores = []
        """As the worker was told to use them, one list after the other."""
        self.sockets = socket.socketpair()
        daemon, worker = self.sockets
        self.daemon, self.channel = WorkerChannel(daemon), WorkerChannel(worker)
        self.batches = None if texts is None else TextBatches(texts, self.channel.send, None)
        self.worker = StepLoop(
            self.channel,
            runner,
            pools=pools or {"kv": pool, "other": other},
            device=device,
            eos_token_ids=eos_token_ids,
            max_num_batched_tokens=max_num_batched_tokens,
            own_cores=own_cores,
            use_cores=self.cores.append,
            pages=pages,
            speculation=speculation,
            texts=self.batches,
        )

    def tell(self, *commands):
        for command in commands:
            self.worker._apply(command)

    def step(self):
        """One step; the reports that it sent."""
        self.worker.step()
        return self.reported()

    def turn(self):
        """A turn of the loop after its commands: a step, and texts; the reports that it sent."""
        self.worker.turn()
        return self.reported()

    def step_all(self, count):
        """Steps, one after the other; the entries of each, whatever else is reported."""
        steps, before = [], self.worker._channel.send
        self.worker._channel.send = steps.append
        for _ in range(count):
            self.worker.step()
        self.worker._channel.send = before
        return [step.entries for step in steps]

    def reported(self):
        return reports_in(self.sockets[0])

    def run(self):
        """Step until nothing is left; all entries."""
        entries = []
        while self.worker._running:
            entries += [e for report in self.step() for e in report.entries]
        return entries

    def close(self):
        for sock in self.sockets:
            sock.close()
