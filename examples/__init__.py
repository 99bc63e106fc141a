"""Programs that show one thing each."""
