"""Start a worker for a daemon that ran before an upgrade: `python -m engine.workers`."""

from runpy import run_module

run_module("engine.worker", run_name="__main__", alter_sys=True)
