"""The commands that drive the log, a file per group; nothing heavy is imported before a command runs."""

from .call_show import show_call
from .curation import calls_app
from .db import db_app
from .doctor import doctor
from .episodes import episodes_app
from .policy import policy_app
from .reward import reward_app
from .reward_many import import_file, show_rewards
from .runs import runs_app

__all__ = ["calls_app", "db_app", "doctor", "episodes_app", "policy_app", "reward_app", "runs_app"]

calls_app.command("show")(show_call)
reward_app.command("import")(import_file)
reward_app.command("show")(show_rewards)
