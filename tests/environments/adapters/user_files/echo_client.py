# echo_client.py
from openenv.core.env_client import EnvClient, StepResult

class Echo(EnvClient):
    def _step_payload(self, action):
        return {"message": action}

    def _parse_result(self, payload):
        return StepResult(payload["observation"]["echoed_message"], payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload):
        return payload
