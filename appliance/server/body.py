"""Request bodies: JSON text to checked values. It knows JSON and pydantic's reports; not what the fields mean."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from appliance.errors import InvalidRequestError
from appliance.server.errors import ContentTypeError

Model = TypeVar("Model", bound=BaseModel)

_ALLOWED = {
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""pydantic's error types in the words of JSON."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body's object, without its null fields: null means missing, in every protocol served here.

    NaN and Infinity are not JSON and are refused, as is nesting deeper than 200 (jiter's limit).
    Raises ContentTypeError, InvalidRequestError; BodyTooLargeError from the middleware's cap.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        found = repr(media[:60]) if media else "missing"
        raise ContentTypeError(f"The Content-Type is {found}: send a JSON body with 'Content-Type: application/json'.")
    try:
        content = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"The body must be a JSON object, found {quoted(content)}.")
    return {key: value for key, value in content.items() if value is not None}


def parse(model: type[Model], content: dict[str, Any]) -> Model:
    """Check the fields that `model` knows. Raises InvalidRequestError naming the first wrong one."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        raise InvalidRequestError(f"{param} is missing: it is required.", param=param)
    if allowed := _ALLOWED.get(first["type"]):
        raise InvalidRequestError(f"{param} must be {allowed}, found {quoted(first['input'])}.", param=param)
    raise InvalidRequestError(f"{param}: {first['msg']}, found {quoted(first['input'])}.", param=param)


def quoted(value: object, limit: int = 60) -> str:
    """A value as it may stand in an error message: short, whatever it is."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
