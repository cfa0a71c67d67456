"""What all params sections are made of: bounded numbers, paths of objects, the base class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Annotated, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam
Fraction = Annotated[float, Field(ge=0, le=1)]
ObjectPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Section(BaseModel):
    """Base of all sections: immutable; errors are unknown keys, truth values where numbers belong, and blank names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: object, info: ValidationInfo) -> object:
        """Python would take true for 1; of `keep_checkpoints: yes` the person who wrote it meant something else."""
        types = _types(cls.model_fields[str(info.field_name)].annotation)
        if types & {int, float} and not types & {bool, object} and _has_truth_value(value):
            raise ValueError("must be a number, not a truth value (YAML reads yes and on as true)")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _text(cls, value: object, info: ValidationInfo) -> object:
        """A variable that is not set gives an empty text, which is neither a name nor no name."""
        types = _types(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, str) and not value.strip() and {str, NoneType} <= types:
            raise ValueError("must not be blank; null is for none")
        return value


def _types(annotation: object) -> set[object]:
    """What an annotation is made of; a literal value counts as its type."""
    if parts := get_args(annotation):
        return set[object]().union(*(_types(part) for part in parts))
    return {type(annotation) if isinstance(annotation, int | str) else annotation}


def _has_truth_value(value: object) -> bool:
    if isinstance(value, Mapping):
        value = [*cast("Mapping[object, object]", value).values()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_has_truth_value(item) for item in cast("Sequence[object]", value))
    return isinstance(value, bool)
