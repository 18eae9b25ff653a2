"""Tools in the style of older verl: one instance a trajectory, arguments of the row spread over `create`."""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.rollout_trace import rollout_trace_op

LIFE = []


class Counter(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.instances = {}

    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {"by": {"type": "integer", "description": "How much."}}, "required": ["by"]}
        function = {"name": "count", "description": "Count up.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id=None, target=None, **kwargs):
        LIFE.append(("create", instance_id, target))
        self.instances[instance_id] = {"count": 0, "target": target}
        return instance_id

    @rollout_trace_op
    async def execute(self, instance_id, parameters, scale=1, **kwargs):
        instance = self.instances[instance_id]
        instance["count"] += scale * parameters["by"]
        return f"count is {instance['count']}", -0.1, {"count": instance["count"], "note": "text"}

    async def calc_reward(self, instance_id, **kwargs):
        instance = self.instances[instance_id]
        return float(instance["count"] == instance["target"])

    async def release(self, instance_id, **kwargs):
        LIFE.append(("release", instance_id, self.instances.pop(instance_id)["count"]))


class Talker(Counter):
    async def execute(self, instance_id, parameters, **kwargs):
        return "abcdefghij" * parameters["by"], None, {}
