"""mini-swe-agent (Chat Completions through litellm). Needs `pip install mini-swe-agent`."""

import os

# Read on import. Otherwise litellm fetches a price list, and mini-swe-agent repeats a failed request ten times: each
# repeat is a request of its own, sampled anew.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": os.environ["RELAX_SESSION_IO_DIR"],
}

from harness_task import TIMEOUT_S, load_task, write_reward
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir, get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import FormatError
from minisweagent.models.litellm_model import LitellmModel

MAX_TURNS = 16


class Agent(DefaultAgent):
    """mini-swe-agent's agent, but for one thing: it keeps replies that made no valid call."""

    def query(self):
        """Without this such a reply is missing in the next request, and its turn becomes a conversation of its own."""
        try:
            return super().query()
        except FormatError as error:
            response = error.messages[0]["extra"]["response"]
            self.add_messages(response["choices"][0]["message"])
            raise


def main():
    task = load_task()
    config = get_config_from_spec(str(builtin_config_dir / "mini.yaml"))
    model = LitellmModel(
        **config["model"]
        | {
            "model_name": "openai/policy",  # litellm's way to say: OpenAI's API, at api_base
            "model_kwargs": {
                "api_base": os.environ["RELAX_BASE_URL"],
                "api_key": os.environ["RELAX_SESSION_ID"],
                "timeout": TIMEOUT_S,
            },
        }
    )
    templates = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    environment = LocalEnvironment(**config["environment"], cwd=str(task.directory))
    agent = Agent(model, environment, **templates, step_limit=MAX_TURNS, cost_limit=0)
    agent.run(task.prompt)
    said = [message["content"] for message in agent.messages if message["role"] == "assistant"]
    write_reward(task, said[-1])


if __name__ == "__main__":
    main()
