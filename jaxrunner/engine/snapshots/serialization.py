"""Objects of the host as JSON and back. No pickle: a file is data, and runs nothing.

What JSON has stands for itself; all else is {kind: contents}. A request stands in a list of its own
and is named by its place there, as others may refer to it.
"""

import base64
from collections import OrderedDict
import dataclasses
from enum import Enum
import json
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.runner.slot import Needs, PendingPromptLogprobs, Slot
from jaxrunner.scheduling.request import Request, Status
from jaxrunner.types import Logprobs

PLAIN = (type(None), bool, int, float, str)
OURS = {
    cls.__name__: cls
    for cls in (
        SamplingParams, RepetitionDetectionParams, StructuredOutputsParams, RequestOutputKind,
        Status, Needs, PendingPromptLogprobs, Slot, Logprobs,
    )
}  # fmt: skip
SEQUENCES = {cls.__name__: cls for cls in (tuple, set, frozenset)}
MAPPINGS = {cls.__name__: cls for cls in (dict, OrderedDict)}


def dumps(value: Any) -> str:
    """Returns the JSON of a value.

    Raises:
      TypeError: a part of it is of a kind that is not known here.
    """
    encoder = _Encoder()
    root, requests = encoder.encode(value), []
    for request in encoder.requests:  # grows, as one refers to another
        requests.append(encoder.encode(vars(request) | dict(grammar=None)))
    return json.dumps(dict(root=root, requests=requests))


def loads(text: str) -> tuple[Any, list[Request]]:
    """Returns the value that `dumps` wrote, and all its requests. Those have no grammar.

    Raises:
      ValueError: this is no such text.
    """
    stored = json.loads(text)
    decoder = _Decoder([Request.__new__(Request) for _ in stored["requests"]])
    for request, fields in zip(decoder.requests, stored["requests"], strict=True):
        vars(request).update(decoder.decode(fields))
    return decoder.decode(stored["root"]), decoder.requests


class _Encoder:
    def __init__(self):
        self.requests: list[Request] = []
        self._place_of: dict[Request, int] = {}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return [self.encode(x) for x in value]
        return {kind.__name__: self._contents(value)}

    def _contents(self, value: Any) -> Any:
        name = type(value).__name__
        if isinstance(value, Request):
            if value not in self._place_of:
                self._place_of[value] = len(self.requests)
                self.requests.append(value)
            return self._place_of[value]
        if isinstance(value, Enum):
            return value.value
        if name in OURS and isinstance(value, tuple):
            return [self.encode(x) for x in value]
        if name in OURS:
            return {f.name: self.encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if name in SEQUENCES:
            return [self.encode(x) for x in (value if name == "tuple" else sorted(value))]
        if name in MAPPINGS:
            return [[self.encode(k), self.encode(v)] for k, v in value.items()]
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, np.ndarray):
            data = base64.b64encode(value.tobytes()).decode()
            return [value.dtype.name, list(value.shape), data]
        if isinstance(value, np.random.Generator):
            return self.encode(value.bit_generator.state)
        raise TypeError(f"a {name} cannot be saved as JSON: {value!r:.99}")


class _Decoder:
    def __init__(self, requests: list[Request]):
        self.requests = requests

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(x) for x in value]
        if not isinstance(value, dict):
            return value
        [(name, contents)] = value.items()
        return self._made(name, contents)

    def _made(self, name: str, contents: Any) -> Any:
        if name == "Request":
            return self.requests[contents]
        if name in OURS:
            return self._ours(OURS[name], contents)
        if name in SEQUENCES:
            return SEQUENCES[name](self.decode(contents))
        if name in MAPPINGS:
            return MAPPINGS[name](self.decode(contents))
        if name == "bytes":
            return bytes.fromhex(contents)
        if name == "ndarray":
            dtype, shape, data = contents
            return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
        if name == "Generator":
            generator = np.random.default_rng()
            generator.bit_generator.state = self.decode(contents)
            return generator
        raise ValueError(f"{name!r} is no kind of object that is saved as JSON")

    def _ours(self, cls: Any, contents: Any) -> Any:
        if isinstance(contents, dict):
            return cls(**{name: self.decode(value) for name, value in contents.items()})
        contents = self.decode(contents)
        return cls(*contents) if isinstance(contents, list) else cls(contents)
