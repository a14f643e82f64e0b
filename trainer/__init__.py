"""The offline trainer: from the log to a new policy version. Never imports fastapi."""
