"""`lightning reward run`: functions that judge episodes of the log."""
