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


KEY = os.environ["PENSTOCK_KEY"]
TAKEN = {"dummy"}
"""Keys that tests have started a server with: they stand for ours."""


def _start(self, timeout_seconds=0):
    self.server_host, self.server_port = URL.hostname, URL.port
    if self.api_key:
        TAKEN.add(self.api_key)


def _ours(value):
    """A header's value, with our key where it has a test's."""
    is_taken = isinstance(value, str) and value.removeprefix("Bearer ") in TAKEN
    return value.replace(value.removeprefix("Bearer "), KEY) if is_taken else value


_request = requests.Session.request


def _with_key(self, method, url, *, headers=None, **options):
    headers = {name: _ours(value) for name, value in (headers or {}).items()}
    if not {name.lower() for name in headers} & {"authorization", "x-api-key"}:
        headers["authorization"] = f"Bearer {KEY}"
    options.setdefault("timeout", 60)
    reply = _request(self, method, url, headers=headers, **options)
    # names of headers have no case; the tests look them up in a plain dict
    told = [(name.title(), value) for name, value in reply.headers.items()]
    reply.headers = type(reply.headers)(told)
    return reply


_open = openai.OpenAI.__init__


def _open_with_key(self, *, api_key=None, **options):
    _open(self, api_key=KEY if api_key in TAKEN else api_key, **options)


openai.OpenAI.__init__ = _open_with_key
utils.ServerProcess.start = _start
utils.ServerProcess.stop = lambda self: None
utils.ServerPreset.load_all = staticmethod(lambda: None)
requests.Session.request = _with_key
