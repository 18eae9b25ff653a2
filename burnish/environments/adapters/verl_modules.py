"""Stand-ins for the modules of verl that tool files import, so that such files load without verl, Ray and its other dependencies.

`install` puts four modules into `sys.modules`, only if verl is not installed: `verl.tools.base_tool` (`BaseTool`), `verl.tools.schemas`
(the records of schemas and `ToolResponse`), `verl.tools.function_tool` (`function_tool`) and `verl.utils.rollout_trace`
(`rollout_trace_op`, which records nothing here). Call it in worker processes only. Any other module of verl stays missing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from burnish.config.errors import UserError
from burnish.environments.adapters.user_code import install_stand_ins
from burnish.environments.tools.function_tool import function_schema

# --- verl.tools.schemas -----------------------------------------------------------------------------------------------------


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter of a function. Other keys of JSON schema (`items`, `minimum`) are kept."""

    model_config = {"extra": "allow"}
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function by name, with its description and parameters."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's form."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call whose arguments are still JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(parsed: OpenAIFunctionParsedSchema) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments were no JSON object; they are then empty."""
        try:
            arguments = json.loads(parsed.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_object = isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed.name, arguments=arguments if is_object else {}), not is_object


class OpenAIFunctionToolCall(BaseModel):
    """A call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool returns."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


# --- verl.tools.base_tool ---------------------------------------------------------------------------------------------------


class BaseTool:
    """The base class of tools with a life of `create`, `execute`, `calc_reward` and `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        schema = getattr(self, "tool_schema", None)
        if schema is None:
            raise UserError(
                f"verl tool {type(self).__name__} has neither a tool_schema in the YAML nor a method get_openai_tool_schema()"
            )
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id if instance_id is not None else str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


# --- verl.tools.function_tool -----------------------------------------------------------------------------------------------

FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


@dataclass
class FunctionTool:
    """A function with its schema, as the decorator registers it."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """The decorator `@function_tool`, `@function_tool("name")` or `@function_tool(schema=...)`. It returns the function unchanged."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        tool_name = name if isinstance(name, str) else function.__name__
        if schema is None:
            built = OpenAIFunctionToolSchema.model_validate(_inferred_schema(function, tool_name))
        else:
            built = OpenAIFunctionToolSchema.model_validate(schema)
        known = FUNCTION_TOOL_REGISTRY.get(tool_name)
        if known is not None and known.fn is not function:
            raise ValueError(
                f"function tool {tool_name!r} of {function.__module__} is already registered by {known.fn.__module__}"
            )
        FUNCTION_TOOL_REGISTRY[tool_name] = FunctionTool(
            tool_name, function, built, inspect.iscoroutinefunction(function)
        )
        return function

    return register(name) if callable(name) else register


def _inferred_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    schema = function_schema(function, getattr(function, "__qualname__", repr(function)))
    return {**schema, "function": {**schema["function"], "name": name}}


# --- verl.utils.rollout_trace -----------------------------------------------------------------------------------------------


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """verl's decorator for tracing. The function stays as it is: samples and report show every call here."""
    return function


# --- installation -----------------------------------------------------------------------------------------------------------

SCHEMAS = (
    OpenAIFunctionPropertySchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionCallSchema,
    OpenAIFunctionToolCall,
    ToolResponse,
)


def install() -> None:
    """Answer for verl's modules if verl is not installed. Installing twice changes nothing."""
    records = {record.__name__: record for record in SCHEMAS}
    install_stand_ins(
        "verl",
        {
            "verl": {},
            "verl.tools": {},
            "verl.utils": {},
            "verl.tools.schemas": records,
            "verl.tools.base_tool": {
                "BaseTool": BaseTool,
                "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
                "ToolResponse": ToolResponse,
            },
            "verl.tools.function_tool": {
                "function_tool": function_tool,
                "FunctionTool": FunctionTool,
                "FUNCTION_TOOL_REGISTRY": FUNCTION_TOOL_REGISTRY,
            },
            "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
        },
    )
