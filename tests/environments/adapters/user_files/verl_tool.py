# verl_tool.py, named in YAML as class_name: verl_tool.Ledger
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Ledger(BaseTool):
    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.total = (create_kwargs or kwargs).get("start", 0)
        return instance_id or "one", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.total += int(parameters["amount"])
        return ToolResponse(text=str(self.total)), 0.0, {"total": self.total}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.total == 10)
