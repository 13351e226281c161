"""Pull a model for a daemon that ran before an upgrade: `python -m appliance.models.hub NAME`."""

from runpy import run_module

run_module("appliance.hub.download", run_name="__main__", alter_sys=True)
