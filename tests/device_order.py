"""The order of two processes' work on one device: a vector of clocks in place of streams.

Each process launches operations in its own order, and the device runs them whenever it likes
within that. One comes after another only if it does in its own process, or if it comes after a
wait for an event that was recorded after the other.
"""


class Stream:
    """One process's work."""

    def __init__(self, order, name):
        self.order, self.name = order, name
        self.num_launched = 0
        self.known = {}
        """Operations of other processes that what is launched now comes after, by process."""

    def launch(self):
        """An operation; its name and number."""
        self.num_launched += 1
        return self.name, self.num_launched

    def comes_after(self, operation):
        name, number = operation
        is_over = name in self.order.dead  # what a dead process had launched is done or gone
        return is_over or name == self.name or self.known.get(name, 0) >= number

    def event(self):
        return _Event(self, self.order)

    def opened(self, handle):
        return _Opened(self.order.events[handle], self)


class DeviceOrder:
    def __init__(self):
        self.events = {}
        self.dead = set()

    def stream(self, name):
        return Stream(self, name)


class _Event:
    def __init__(self, stream, order):
        self.stream = stream
        self.handle = f"{stream.name}/{len(order.events)}".encode()
        self.recorded = {}
        order.events[self.handle] = self

    def record(self):
        self.recorded = self.stream.known | {self.stream.name: self.stream.num_launched}

    def wait(self):
        raise AssertionError("a process waits for the other's events, not for its own")


class _Opened:
    def __init__(self, event, stream):
        self.event, self.stream, self.handle = event, stream, event.handle

    def record(self):
        raise AssertionError("an event is recorded by the process that made it")

    def wait(self):
        known = self.stream.known
        for name, number in self.event.recorded.items():
            known[name] = max(known.get(name, 0), number)
