"""What a request may wish for, and in which forms."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.errors import InvalidRequestError
from appliance.sampling_params import SamplingParams, params_or_defaults


def test_stops_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("END",), (1, 2))
    assert params == SamplingParams(stop=["END"], stop_token_ids=(1, 2))
    assert len({params, SamplingParams(stop=("END",), stop_token_ids=(1, 2))}) == 1


def test_a_value_survives_the_way_to_the_engine_process() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], seed=(1 << 64) - 1, output_kind="cumulative")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"stop": None}, "stop must be a list or a tuple, found None"),
        ({"stop": [""]}, "stop must be at most 64 strings of 1 to 1000 characters"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list or a tuple, found 3"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be an integer"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"seed": 1 << 64}, "seed must be an integer"),
        ({"output_kind": "final"}, "output_kind must be delta or cumulative, found 'final'"),
    ],
)
def test_a_wrong_wish_is_named(wish: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence) as caught:
        SamplingParams(**wish)
    assert caught.value.param == next(iter(wish))


def test_none_is_what_the_model_suggests() -> None:
    assert params_or_defaults(None, {"temperature": 0.5, "top_k": 3}) == SamplingParams(temperature=0.5, top_k=3)
    with pytest.raises(InvalidRequestError, match="must be a SamplingParams, found dict"):
        params_or_defaults({}, {})  # type: ignore[arg-type]
