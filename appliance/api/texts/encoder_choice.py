"""Find the model of texts that a client means; a chat model makes no vectors, nor the other way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from appliance.api.core.model_choice import no_such_model
from appliance.daemon.requests.request import ModelInfo
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.json.fields import invalid_type
from engine.errors import RequestError

_SETTINGS = {"embedding": "--embedding-model", "rerank": "--rerank-model"}
_MAKES = {"embedding": "makes vectors", "rerank": "scores pairs of texts"}


def choose_encoder(
    asked: object,
    kind: Literal["embedding", "rerank"],
    encoders: Mapping[str, TextEncoder],
    served: ModelInfo,
) -> TextEncoder:
    """Find the served model of a kind by its name; no name, and an alias, mean the one there is.

    Raises:
        RequestError: 404 `model_not_found`, or 400 `wrong_model` for one of another kind.
    """
    if asked is not None and not isinstance(asked, str):
        raise invalid_type("model", "a string", asked)
    name = (asked or "").removesuffix(":latest")
    found = next((one for one in encoders.values() if one.kind == kind), None)
    if found is not None and name in ("", found.name):
        return found
    hint = f"serve {_SETTINGS[kind]} NAME" if found is None else f"ask `{found.name}`"
    if name in encoders or name in (served.model_id, *served.others):
        does = _MAKES[encoders[name].kind] if name in encoders else "writes text"
        what = f"`{name[:200]}` {does}; it never {_MAKES[kind]}"
        raise RequestError(what, code="wrong_model", param="model", hint=hint)
    if found is None:
        raise no_such_model(f"no model that {_MAKES[kind]} is served", hint)
    if served.is_called(name):
        return found
    what = f"the model `{name[:200]}` does not exist here; `{found.name}` {_MAKES[kind]}"
    raise no_such_model(what)
