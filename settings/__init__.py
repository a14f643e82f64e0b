"""One settings model per process; a field's description is what `--help` and docs/settings.md show."""
