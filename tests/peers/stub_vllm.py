"""A pytest plugin that lets vLLM's tests of its servers ask a server that is there already.

Their launcher is replaced by one that knows the address; a test's model is renamed, on the way, to
the one that is served. vLLM itself is not imported: its modules are empty here, and tests that send
nothing are left out. Set by the command in tests.peers: PENSTOCK_URL, PENSTOCK_KEY, PENSTOCK_MODEL.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from urllib.parse import urljoin

import anthropic
import httpx
import openai
import pytest
import requests
from transformers import AutoConfig, AutoTokenizer

URL, KEY = os.environ["PENSTOCK_URL"], os.environ["PENSTOCK_KEY"]
MODEL = os.environ["PENSTOCK_MODEL"]
TIMEOUT_S = 120
MODELS = set()
"""Names under which tests have asked for a server."""


class Nothing:
    """Stands for whatever vLLM has under a name; tests that need it are not run."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_arguments, **_options):
        return self

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


class EmptyModule(ModuleType):
    """A module that has every name."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class ModelConfig:
    """What tests ask of a model's settings."""

    def __init__(self, *_arguments, **_options):
        self.vocab_size = AutoConfig.from_pretrained(MODEL).vocab_size

    def get_vocab_size(self):
        return self.vocab_size


class Empty(MetaPathFinder, Loader):
    """Finds modules of packages that are not there."""

    def find_spec(self, name, path=None, target=None):
        is_empty = name.partition(".")[0] in ("vllm", "fastapi")
        return ModuleSpec(name, self, is_package=True) if is_empty else None

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = lambda *_a, **_o: AutoTokenizer.from_pretrained(MODEL)
        if module.__name__ == "vllm.config":
            module.ModelConfig = ModelConfig


@functools.cache
def model_id():
    """What is served."""
    return requests.get(f"{URL}/v1/models").json()["data"][0]["id"]


def served(body):
    """A body that asks for what is served, if it asks for a model that a test has launched."""
    if isinstance(body, dict) and body.get("model") in MODELS:
        return body | {"model": model_id()}
    return body


class Renaming(httpx.AsyncHTTPTransport):
    """Sends a request for the model that is served."""

    async def handle_async_request(self, request):
        if request.content:
            content = json.dumps(served(json.loads(request.content))).encode()
            headers = {k: v for k, v in request.headers.items() if k != "content-length"}
            request = httpx.Request(
                request.method,
                request.url,
                headers=headers,
                content=content,
                extensions=request.extensions,
            )
        return await super().handle_async_request(request)


class RemoteOpenAIServer:
    """What their launcher promises, but that it launches nothing."""

    DUMMY_API_KEY = KEY

    def __init__(self, model, *_arguments, **_options):
        MODELS.add(model)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None

    @property
    def url_root(self):
        return URL

    def url_for(self, *parts):
        return urljoin(f"{URL}/", "/".join(parts))

    def get_async_client(self, **options):
        http = httpx.AsyncClient(transport=Renaming(), timeout=TIMEOUT_S)
        own = self._options(options, http_client=http)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **own)

    def get_async_client_anthropic(self, **options):
        # its HTTP library is another; the daemon's --model-aliases knows the name that is asked for
        return anthropic.AsyncAnthropic(base_url=URL, **self._options(options))

    def _options(self, options, **own):
        return {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S, **own, **options}


_request = requests.Session.request


def _with_key(self, method, url, *, headers=None, json=None, **options):
    headers = {"authorization": f"Bearer {KEY}", **(headers or {})}
    options.setdefault("timeout", TIMEOUT_S)
    return _request(self, method, url, headers=headers, json=served(json), **options)


requests.Session.request = _with_key
sys.meta_path.insert(0, Empty())
utils = EmptyModule("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer
utils.ROCM_EXTRA_ARGS = []
sys.modules["tests.utils"] = utils


def _adapter():
    return "no-adapter"


for _name in ("zephyr_lora_files", "qwen3_lora_files", "opt125_lora_files"):
    globals()[_name] = pytest.fixture(scope="session", name=_name)(_adapter)


def pytest_collection_modifyitems(config, items):
    """Leave out what sends nothing."""
    sent = [item for item in items if _sends(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in sent])
    items[:] = sent


def _sends(item):
    named = ("server", "client")
    has_fixture = any(word in name for name in item.fixturenames for word in named)
    return has_fixture or "RemoteOpenAIServer" in inspect.getsource(item.function)
