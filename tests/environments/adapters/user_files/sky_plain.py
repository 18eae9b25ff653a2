"""A class with skyrl-gym's interface that does not import skyrl-gym, for the tests."""


class Echo:
    def __init__(self, env_config=None, extras=None):
        self.config, self.extras, self.log = env_config, extras, []

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"At most {self.extras['max_turns']} turns."}], {}

    def step(self, action):
        self.log.append(action)
        done = action == self.extras["reward_spec"]["ground_truth"]
        replaced = {"postprocessed_action": action[: self.config["cut"]]} if "cut" in self.config else {}
        said = [] if done else [{"role": "user", "content": f"You said {action}."}]
        return {"observations": said, "reward": len(self.log) / 10, "done": done, "metadata": {"turns": len(self.log)}, **replaced}

    def get_metrics(self):
        return {"num_answers": len(self.log), "last": "text"}

    def close(self):
        self.log = None
