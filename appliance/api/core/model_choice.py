"""Check that the model a client names is served, and say what is if not.

Invariant: a refusal says every name that would have been served.
"""

from __future__ import annotations

from appliance.daemon.requests.request import ModelInfo
from appliance.json.fields import invalid_type
from engine.errors import RequestError

_MAX_NAMED = 20


def check_model(asked: object, model: ModelInfo) -> None:
    """Refuse another model than the one that is served; no name is the served one's."""
    if asked in (None, ""):  # clients that must name one may leave it empty
        return
    if not isinstance(asked, str):
        raise invalid_type("model", "a string", asked)
    if model.is_called(asked):
        return
    raise model_not_found(asked, model)


def model_not_found(asked: str, model: ModelInfo) -> RequestError:
    """Another model was asked for than the one that is served."""
    if asked.removesuffix(":latest") in model.text_models:
        return RequestError(
            f"`{asked}` writes no text; `{model.model_id}` does",
            code="wrong_model",
            param="model",
            hint="POST /v1/embeddings makes vectors, /v1/rerank scores",
        )
    if asked.removesuffix(":latest") in model.others:
        what = f"`{asked}` is not served now, `{model.model_id}` is; a request that generates swaps"
    else:
        what = f"the model `{asked[:200]}` does not exist here; {_named(model)}"
    return no_such_model(what)


def no_such_model(what: str, hint: str = "") -> RequestError:
    """Make the error for a name that no served model has."""
    return RequestError(
        what, code="model_not_found", param="model", status=404, kind="not_found_error", hint=hint
    )


def _named(model: ModelInfo) -> str:
    """List the names that exist: `a`, `b` and `c` do."""
    names = [f"`{name}`" for name in (model.model_id, *model.others, *model.aliases)]
    if len(names) == 1:
        return f"{names[0]} does"
    names[_MAX_NAMED:] = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return f"{', '.join(names[:-1])} and {names[-1]} do"
