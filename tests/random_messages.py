"""Random protobuf messages by their descriptors, and bytes that nearly are messages."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_WHOLE = (0, 1, 2, 3, 7, 16, 64, 299, 300, 2**31 - 1, 2**32 - 1)
_REAL = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "the fox",
    "user",
    "<|im_start|>",
    "é€🦊",
    "\0",
    "{{ x }}",
    " " * 300,
    "x" * 3000,
)


def random_message(
    rng: random.Random, kind: type[Message], depth: int = 0, skipped: float = 0.4
) -> Message:
    """A valid message: any of its fields, with values at and around the edges.

    skipped: part of the fields that are left out; of those within others, few or nearly all.
    """
    within = rng.choice([0.4, 0.7, 0.95]) if depth == 0 else skipped
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if depth > 4 or rng.random() < skipped:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(rng, getattr(message, field.name), field, depth, within)
        elif field.is_repeated:
            values = [_value(rng, field, depth, within) for _ in range(rng.choice([0, 1, 2, 5]))]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(rng, field, depth, within))
        else:
            setattr(message, field.name, _value(rng, field, depth, within))
    return message


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The same with some bytes changed, lost or doubled."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(made) + 1)
        match rng.randrange(4):
            case 0:
                made[place : place + 1] = rng.randbytes(1)
            case 1:
                made[place:place] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del made[place : place + rng.randint(1, 8)]
            case _:
                made[place:place] = made[rng.randrange(len(made) + 1) :][:64]
    return bytes(made)


def _fill_map(
    rng: random.Random, target: Any, field: FieldDescriptor, depth: int, skipped: float
) -> None:
    entry = field.message_type.fields_by_name
    for _ in range(rng.choice([0, 1, 3])):
        key, value = _scalar(rng, entry["key"]), _value(rng, entry["value"], depth, skipped)
        if entry["value"].message_type is None:
            target[key] = value
        else:
            target[key].CopyFrom(value)


def _value(rng: random.Random, field: FieldDescriptor, depth: int, skipped: float) -> Any:
    if field.message_type is None:
        return _scalar(rng, field)
    return random_message(rng, GetMessageClass(field.message_type), depth + 1, skipped)


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kinds = FieldDescriptor
    match field.cpp_type:
        case kinds.CPPTYPE_STRING:
            text = rng.choice(_TEXTS)
            return text.encode() if field.type == kinds.TYPE_BYTES else text
        case kinds.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case kinds.CPPTYPE_DOUBLE | kinds.CPPTYPE_FLOAT:
            return rng.choice(_REAL)
        case kinds.CPPTYPE_ENUM:
            return rng.choice([value.number for value in field.enum_type.values])
    small = [value for value in _WHOLE if value < 2**31]
    if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64):
        return rng.choice([*small, -1, -(2**31)])
    return rng.choice(_WHOLE)
