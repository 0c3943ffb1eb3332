"""What every section is made of: the strict base class, and numbers and texts of a few kinds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]  # a number of things, at least one
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ProperShare = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
FunctionPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
MetricName = Annotated[str, Field(pattern=r"^[\w.-]+$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvName = Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")]

# What a text with a pattern is called in messages.
PATTERNS = {
    r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$": "module:function",
    r"^[\w.-]+$": "a name of letters, digits, '.', '-' and '_'",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "letters, digits and '_'",
    r"^[A-Z_][A-Z0-9_]*$": "the name of an environment variable, in capitals",
}


class Section(BaseModel):
    """Strict types (`true` is no number), finite numbers, no unknown keys, no change after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
