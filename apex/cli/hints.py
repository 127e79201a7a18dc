"""What --help says of defaults: each option has one, in its help text or behind it."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Annotated

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

SEEN = object()  # marks what the rule below passes on to the others, so that it lets it pass

HINTS = ConstructorRegistry()


@HINTS.struct_rule
def without_empty_hints(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Options as they are, without "(default: None)": where the default is None or empty, the text says what holds."""
    if not is_dataclass(info.type) or SEEN in info.markers:
        return None
    spec = ConstructorRegistry.get_struct_spec(replace(info, markers=(*info.markers, SEEN)))
    no_hint = tyro.conf.arg(help_behavior_hint="")
    fields = (
        replace(field, type=Annotated[field.type, no_hint]) if field.default is None or field.default == () else field
        for field in spec.fields
    )
    return replace(spec, fields=tuple(fields))
