# sky_env.py: register("parity", entry_point="sky_env:Parity")
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Parity(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.gold, self.max_turns = extras["reward_spec"]["ground_truth"], extras.get("max_turns", 2)

    def step(self, action):
        self.turns += 1
        right = self.gold in action.lower()
        done = right or self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": "No. Even or odd?"}]
        return BaseTextEnvStepOutput(observations=said, reward=float(right), done=done, metadata={})
