"""What a step trains, and why: from the log to a manifest. No torch."""
