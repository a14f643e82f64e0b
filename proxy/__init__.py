"""The recording proxy: between the agent and the engine, faithful to both."""
