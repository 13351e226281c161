"""A pytest plugin that lets llama.cpp's server tests ask a server that is there already.

Their own launcher is replaced: it starts and stops nothing, loads nothing, and knows the address.
Set by the command in tests.peers: PENSTOCK_URL and PENSTOCK_KEY.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import requests
import utils  # llama.cpp's, in the folder where its tests run

URL = urlsplit(os.environ["PENSTOCK_URL"])


def _start(self, timeout_seconds=0):
    self.server_host, self.server_port = URL.hostname, URL.port


_request = requests.Session.request


def _with_key(self, method, url, *, headers=None, **options):
    headers = dict(headers or {})
    if not {name.lower() for name in headers} & {"authorization", "x-api-key"}:
        headers["authorization"] = f"Bearer {os.environ['PENSTOCK_KEY']}"
    options.setdefault("timeout", 60)
    return _request(self, method, url, headers=headers, **options)


utils.ServerProcess.start = _start
utils.ServerProcess.stop = lambda self: None
utils.ServerPreset.load_all = staticmethod(lambda: None)
requests.Session.request = _with_key
