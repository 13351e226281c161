"""A pytest plugin that lets llama.cpp's server tests ask a server that is there already.

Their own launcher is replaced: it starts and stops nothing, loads nothing, and knows the address.
Set by the command in tests.peers: PENSTOCK_URL, PENSTOCK_KEY.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import openai
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


_open = openai.OpenAI.__init__


def _open_with_key(self, *, api_key=None, **options):
    key = os.environ["PENSTOCK_KEY"] if api_key == "dummy" else api_key
    _open(self, api_key=key, **options)


openai.OpenAI.__init__ = _open_with_key
utils.ServerProcess.start = _start
utils.ServerProcess.stop = lambda self: None
utils.ServerPreset.load_all = staticmethod(lambda: None)
requests.Session.request = _with_key
