"""Our own HTTP API (rewards, episodes, policies), under `/lightning/`, where no engine route lives."""
