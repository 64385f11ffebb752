"""Routes for routing replay: the experts that computed each token in an instance. Defines them on the wire and as a
column.

A reply has the routes of all tokens, the prompt's first, except the last one, which no layer has computed. The column
`routes` of a row has an entry for all tokens: those of the prompt, taken from the first response that has any, then
those of all responses, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model.shape import Experts
from engine.wire.columns import Column, PackedResponse, pack_values

ROUTES = "routes"
"""Column of the experts: values, [tokens, layers with experts, experts per token], uint8 for fewer than 256 experts in
a layer, else uint16. The type's largest number means that no instance has routed the token."""


def route_type(experts: int) -> np.dtype[Any]:
    """Return the type of routes for this number of experts per layer."""
    return np.dtype("<u1" if experts < 256 else "<u2")


def pack_routes(prompt: int, responses: Sequence[PackedResponse], experts: Experts) -> Column:
    """Pack the routes of a group. `prompt`: number of prompt tokens."""
    kind = route_type(experts.count)
    token = (len(experts.layers), experts.per_token)
    size = prompt * kind.itemsize * token[0] * token[1]
    unknown = np.full(token, np.iinfo(kind).max, kind).tobytes()
    first = next((one.routes for one in responses if one.routes), unknown * prompt)[:size]
    own = [one.routes[size:] + unknown if one.length else b"" for one in responses]
    return pack_values(ROUTES, np.frombuffer(first + b"".join(own), kind).reshape(-1, *token))


def open_routes(values: NDArray[Any]) -> NDArray[np.int16]:
    """Return the column's values as int16, with -1 for tokens that no instance has routed."""
    found = values.astype(np.int16)
    found[values == np.iinfo(values.dtype).max] = -1
    return found


def problem_of_form(dtype: str, shape: Sequence[int], tokens: int, experts: Experts) -> str:
    """Return what is wrong with the type or shape of routes for this number of tokens; "" if nothing is."""
    expected = [tokens, len(experts.layers), experts.per_token]
    kind = route_type(experts.count).name
    if (dtype, list(shape)) != (kind, expected):
        return (
            f"routes {dtype:.20} {list(shape)!r:.100}, expected {kind} {expected} (tokens, layers with experts, "
            "experts per token)"
        )
    return ""


def problem_of_routes(values: NDArray[Any], experts: Experts) -> str:
    """Return what is wrong with routes of the right form; "" if nothing is."""
    if values.size and (largest := int(values.max())) >= experts.count:
        return f"routes to expert {largest}, but the model has {experts.count} in a layer"
    chosen = np.ascontiguousarray(values.reshape(-1, experts.per_token).T)
    if any((one == other).any() for one, other in combinations(chosen, 2)):
        return "routes that send a token to one expert twice"
    return ""
